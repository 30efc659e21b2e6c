"""The shapes of bench.c in PyTorch on a CPU, with the settings that make PyTorch fastest.

    python tests/bench/peer_pytorch.py            some minutes
    python tests/bench/peer_pytorch.py --quick    a few iterations of each, for a look
    python tests/bench/peer_pytorch.py --only inference
                                                  only point 5; "--only training": all but point 5

1. One pre-LN GPT layer, forward and backward (gradients of its input and of all weights): hidden
   768, 12 heads, one sequence of 1024 tokens, float32, no dropout, scaled_dot_product_attention.
   It runs with 1 thread, with 2 threads, and split over 2 processes of 1 thread (Megatron's f and
   g over gloo). For the split layer, also the time of its 4 all-reduces, which includes waiting for
   the other process. In float32, and in bfloat16 with autocast.
2. One GPT-2 124M training step: 4 sequences of 64 tokens, or 1 of 1024, vocabulary padded to 50304,
   tied head, gradients clipped by their norm, fused AdamW; 2 threads. In float32, and in bfloat16
   with autocast. Also without clipping, which bench.c has no row for.
3. One all-reduce of 3 MB between 2 processes over gloo.
4. The GEMM of the layer's first MLP product in float32, by PyTorch's BLAS and by its oneDNN. Training
   in float32 uses the BLAS. The row of oneDNN shows whether it would be faster with oneDNN.
5. Inference, with 1 and with 2 threads. BERT-base and BERT-large without heads: one sequence of 128
   tokens, in float32 and bfloat16, in PyTorch (transformers' BertModel with
   scaled_dot_product_attention, as it is and compiled) and in ONNX Runtime (float32, after its
   transformer optimizer). GPT-2 124M: generate of transformers, greedy, batch 1, 64 tokens after
   a prompt of 64, in float32 and bfloat16; the time of one token. What is not installed is left out.

This process starts each measurement in a process of its own, with this environment: glibc's malloc
keeps its memory, OpenMP threads are pinned one per core, and OpenBLAS uses its AVX-512 kernels. MKL
uses slower kernels on AMD processors. A preloaded library of one line, built with a C compiler,
makes MKL use its Intel kernels when they are faster. tcmalloc or jemalloc is preloaded if it is
installed and faster. GPT-2 uses the allocator that makes a step of 4 x 64 tokens fastest. All other
measurements use the one that makes the layer fastest. Processes that form a group are pinned one
per core and communicate through 127.0.0.1.

Prints the median and the 10th and 90th percentile of each figure as soon as it is measured, then a
line "name,value,unit" for each median. Exits with 77 when PyTorch is not installed.
"""

import argparse
import ctypes.util
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time

HIDDEN, HEADS, TOKENS = 768, 12, 1024
LAYERS, VOCAB = 12, 50304
GPT2_BATCHES = ((4, 64), (1, 1024))  # sequences, tokens of each
ALL_REDUCE_FLOATS = TOKENS * HIDDEN  # 3 MB

TUNING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "OMP_PROC_BIND": "true",
    "GLOO_SOCKET_IFNAME": "lo",
}

# The libraries to preload: "kernels" are those that choose the kernels of MKL, the others those of a
# part with its allocator. A part that is not here has those of "layer", or else "kernels".
PRELOADED = {"kernels": []}


def summary(seconds):
    ordered = sorted(seconds)

    def at(q):
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
    return {"median": at(0.5), "p10": at(0.1), "p90": at(0.9), "n": len(ordered)}


def repeat(step, iterations, warmup):
    """Returns the seconds of each of `iterations` calls of step, after `warmup` other calls."""
    for _ in range(warmup):
        step()
    seconds = []
    for _ in range(iterations):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


# ---- what is measured: each function runs in a process of its own --------------------------------


def tensor_parallel_regions(dist, clock):
    """Returns Megatron's conjugates f and g. clock[0] adds up the seconds inside all-reduces."""
    import torch

    def all_reduce(x):
        start = time.perf_counter()
        dist.all_reduce(x)
        clock[0] += time.perf_counter() - start
        return x

    class Copy(torch.autograd.Function):  # f: identity forward, all-reduce backward
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            return all_reduce(dy.contiguous())

    class Reduce(torch.autograd.Function):  # g: all-reduce forward, identity backward
        @staticmethod
        def forward(ctx, x):
            return all_reduce(x.contiguous())

        @staticmethod
        def backward(ctx, dy):
            return dy

    return Copy.apply, Reduce.apply


def make_layer_weights(split):
    import torch

    def parameter(*shape):
        return (0.02 * torch.randn(*shape)).requires_grad_()
    return {
        "ln1": (torch.ones(HIDDEN, requires_grad=True), torch.zeros(HIDDEN, requires_grad=True)),
        "ln2": (torch.ones(HIDDEN, requires_grad=True), torch.zeros(HIDDEN, requires_grad=True)),
        "qkv": (parameter(3 * HIDDEN // split, HIDDEN), parameter(3 * HIDDEN // split)),
        "proj": (parameter(HIDDEN, HIDDEN // split), parameter(HIDDEN)),
        "fc1": (parameter(4 * HIDDEN // split, HIDDEN), parameter(4 * HIDDEN // split)),
        "fc2": (parameter(HIDDEN, 4 * HIDDEN // split), parameter(HIDDEN)),
    }


def layer_forward(w, x, split=1, f=None, g=None):
    """x is [sequences, seq, HIDDEN]. With g, row-parallel layers add their biases after it."""
    import torch.nn.functional as F
    b, s, _ = x.shape
    n = F.layer_norm(x, (HIDDEN,), *w["ln1"])
    qkv = F.linear(f(n) if f else n, *w["qkv"])
    q, k, v = qkv.view(b, s, 3, HEADS // split, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    a = a.transpose(1, 2).reshape(b, s, HIDDEN // split)
    x = x + (g(F.linear(a, w["proj"][0])) + w["proj"][1] if g else F.linear(a, *w["proj"]))
    n = F.layer_norm(x, (HIDDEN,), *w["ln2"])
    h = F.gelu(F.linear(f(n) if f else n, *w["fc1"]), approximate="tanh")
    return x + (g(F.linear(h, w["fc2"][0])) + w["fc2"][1] if g else F.linear(h, *w["fc2"]))


def autocast(args):
    import torch
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bfloat16")


def run_layer(args):
    import torch
    split, clock, collected, f, g = 1, [0.0], [], None, None
    if args.world > 1:
        dist, split = join_group(args), args.world
        f, g = tensor_parallel_regions(dist, clock)
    torch.manual_seed(1234)
    weights = make_layer_weights(split)
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    dy = torch.randn(1, TOKENS, HIDDEN)
    leaves = [x] + [t for pair in weights.values() for t in pair]

    def step():
        for leaf in leaves:
            leaf.grad = None
        clock[0] = 0.0
        with autocast(args):
            y = layer_forward(weights, x, split, f, g)
        y.backward(dy)
        collected.append(clock[0])
    warmup = 3
    seconds = repeat(step, args.iterations, warmup)
    return {"step": summary(seconds), "all_reduces": summary(collected[warmup:])}


def run_gpt2(args):
    import torch
    import torch.nn.functional as F
    torch.manual_seed(1234)
    tokens = (0.02 * torch.randn(VOCAB, HIDDEN)).requires_grad_()
    positions = (0.02 * torch.randn(1024, HIDDEN)).requires_grad_()
    layers = [make_layer_weights(1) for _ in range(LAYERS)]
    final = (torch.ones(HIDDEN, requires_grad=True), torch.zeros(HIDDEN, requires_grad=True))
    leaves = [tokens, positions, *final, *(t for w in layers for pair in w.values() for t in pair)]
    optimizer = torch.optim.AdamW(
        [{"params": [t for t in leaves if t.dim() > 1], "weight_decay": 0.1},
         {"params": [t for t in leaves if t.dim() == 1], "weight_decay": 0.0}],
        lr=1e-4, betas=(0.9, 0.95), fused=True)
    batch, seq = args.batch, args.seq
    ids = torch.randint(0, 50257, (batch, seq))
    targets = torch.randint(0, 50257, (batch * seq,))

    def step():
        optimizer.zero_grad(set_to_none=True)
        with autocast(args):
            x = F.embedding(ids, tokens) + positions[:seq]
            for w in layers:
                x = layer_forward(w, x)
            x = F.layer_norm(x, (HIDDEN,), *final)
            loss = F.cross_entropy(F.linear(x, tokens).view(-1, VOCAB), targets)
        loss.backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(leaves, 1.0, foreach=True)
        optimizer.step()
        loss.item()
    return {"step": summary(repeat(step, args.iterations, 2))}


def run_all_reduce(args):
    import torch
    dist = join_group(args)
    x = torch.zeros(ALL_REDUCE_FLOATS)
    return {"step": summary(repeat(lambda: dist.all_reduce(x), args.iterations, 5))}


def run_gemm(args):
    import torch
    x, w = torch.randn(TOKENS, HIDDEN), torch.randn(4 * HIDDEN, HIDDEN)
    y = torch.empty(TOKENS, 4 * HIDDEN)
    return {"step": summary(repeat(lambda: torch.mm(x, w.t(), out=y), args.iterations, 5))}


def run_gemm_onednn(args):
    """The same by the operator that torch.compile uses for inference, which has no backward."""
    import torch
    x, w = torch.randn(TOKENS, HIDDEN), torch.randn(4 * HIDDEN, HIDDEN)
    linear = torch.ops.mkldnn._linear_pointwise
    step = repeat(lambda: linear(x, w, None, "none", [], ""), args.iterations, 5)
    return {"step": summary(step)}


BERT_SHAPES = {"base": (12, 768, 12), "large": (24, 1024, 16)}
BERT_SEQ, PROMPT, GENERATED = 128, 64, 64


def make_bert(size):
    """Returns a BertModel with random weights, without pooler, and the ids of one sequence."""
    import torch
    from transformers import BertConfig, BertModel
    layers, hidden, heads = BERT_SHAPES[size]
    torch.manual_seed(1234)
    config = BertConfig(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
                        intermediate_size=4 * hidden, attn_implementation="sdpa")
    model = BertModel(config, add_pooling_layer=False).eval()
    return model, torch.randint(0, config.vocab_size, (1, BERT_SEQ))


def run_bert(args):
    import torch
    model, ids = make_bert(args.size)
    model = model.to(getattr(torch, args.dtype))
    if args.compiled:
        model = torch.compile(model)
    with torch.inference_mode():
        return {"step": summary(repeat(lambda: model(ids), args.iterations, 5))}


def run_bert_onnx(args):
    """Exports a BertModel, lets ONNX Runtime's transformer optimizer fuse its operators, and runs it."""
    import onnxruntime
    import torch
    from onnxruntime.transformers import optimizer

    class HiddenStates(torch.nn.Module):  # the exporter wants one input and one output
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(input_ids=ids).last_hidden_state
    model, ids = make_bert(args.size)
    layers, hidden, heads = BERT_SHAPES[args.size]
    with tempfile.TemporaryDirectory() as folder:
        plain, fused = os.path.join(folder, "plain.onnx"), os.path.join(folder, "fused.onnx")
        torch.onnx.export(HiddenStates(model), (ids,), plain, input_names=["input_ids"],
                          dynamo=False)
        graph = optimizer.optimize_model(plain, "bert", num_heads=heads, hidden_size=hidden)
        graph.save_model_to_file(fused, use_external_data_format=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = args.threads
        session = onnxruntime.InferenceSession(fused, options, providers=["CPUExecutionProvider"])
    feed = {"input_ids": ids.numpy()}
    return {"step": summary(repeat(lambda: session.run(None, feed), args.iterations, 5))}


def run_decode(args):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(1234)
    model = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa", eos_token_id=None))
    model = model.eval().to(getattr(torch, args.dtype))
    ids = torch.randint(0, 50257, (1, PROMPT))

    def generate(tokens):
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens,
                           min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    prefill = summary(repeat(lambda: generate(1), args.iterations, 2))["median"]
    whole = repeat(lambda: generate(1 + GENERATED), args.iterations, 1)
    return {"step": summary([(seconds - prefill) / GENERATED for seconds in whole])}


def join_group(args):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{args.port}",
                            rank=args.rank, world_size=args.world)
    return dist


def run_part(args):
    import torch
    torch.set_num_threads(args.threads)
    part = {"layer": run_layer, "gpt2": run_gpt2, "all_reduce": run_all_reduce, "gemm": run_gemm,
            "gemm_onednn": run_gemm_onednn, "bert": run_bert, "bert_onnx": run_bert_onnx, "decode": run_decode}
    result = part[args.part](args)
    if args.rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    if args.world > 1:
        import torch.distributed as dist
        dist.barrier()
        time.sleep(0.5)  # the other process must leave the barrier, too
        os._exit(0)  # destroying a gloo group can hang when the process with the store exits first


# ---- the parent ----------------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(part, cores, iterations, threads=1, rank=0, world=1, port=0, flags=()):
    environment = {**os.environ, **TUNING, "OMP_NUM_THREADS": str(threads),
                   "OMP_PLACES": ",".join("{%d}" % core for core in cores)}
    environment.setdefault("OPENBLAS_CORETYPE", "SkylakeX")
    preloaded = PRELOADED.get(part, PRELOADED.get("layer", PRELOADED["kernels"]))
    if preloaded:
        environment["LD_PRELOAD"] = ":".join(preloaded)
    if part == "bert_onnx":  # its threads are its own, and would inherit the one core of libgomp's first thread
        del environment["OMP_PROC_BIND"], environment["OMP_PLACES"]
    command = [sys.executable, os.path.abspath(__file__), "--part", part,
               "--iterations", str(iterations), "--threads", str(threads),
               "--rank", str(rank), "--world", str(world), "--port", str(port), *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True,
                            preexec_fn=lambda: os.sched_setaffinity(0, cores))


def measure(part, cores, iterations, threads=1, world=1, flags=()):
    """Returns the result of rank 0. Each of several processes gets one core and one thread."""
    if world == 1:
        processes = [start(part, cores[:threads], iterations, threads, flags=flags)]
    else:
        port = free_port()
        processes = [start(part, [cores[r]], iterations, 1, r, world, port, flags)
                     for r in range(world)]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"peer_pytorch: the measurement '{part}' failed")
    line = [text for text in outputs[0].splitlines() if text.startswith("RESULT ")][-1]
    return json.loads(line[len("RESULT "):])


def processor_name():
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":")[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe(torch):
    config = torch.__config__.show()
    blas = [word for word in config.replace(",", " ").split() if word.startswith("BLAS_INFO=")]
    library = [line.strip(" -") for line in config.splitlines()
               if "Math Kernel Library" in line or "MKL-DNN" in line]
    print(f"PyTorch {torch.__version__}, {', '.join(blas + library) or 'BLAS unknown'}")
    print(f"processor: {processor_name()}, {len(os.sched_getaffinity(0))} cores allowed; "
          f"CPU capability {torch.backends.cpu.get_cpu_capability()}")
    print(f"load average before: {os.getloadavg()[0]:.2f} (other work spoils the figures)")


def choose_mkl_kernels(torch, folder, core, iterations):
    """Makes MKL use its Intel kernels on an AMD processor, if they are faster, by a preloaded library."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if "AMD" not in processor_name() or not torch.backends.mkl.is_available() or not compiler:
        return
    source, library = os.path.join(folder, "intel.c"), os.path.join(folder, "intel.so")
    with open(source, "w") as file:
        file.write("int mkl_serv_intel_cpu_true(void) { return 1; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    stock = measure("gemm", [core], iterations)["step"]["p10"]
    PRELOADED["kernels"] = [library]
    told = measure("gemm", [core], iterations)["step"]["p10"]
    if told >= stock:
        PRELOADED["kernels"] = []
    print(f"MKL on an AMD processor: its Intel kernels take {told / stock:.2f} of the time of its "
          f"AMD kernels; {'Intel' if told < stock else 'AMD'} kernels are used")


def choose_allocator(part, cores, iterations, flags=()):
    """Preloads tcmalloc or jemalloc for a part, if it is faster with one of them."""
    seconds, kernels = {}, PRELOADED["kernels"]
    preloads = {"malloc": kernels}
    for name in ("tcmalloc_minimal", "tcmalloc", "jemalloc"):
        library = ctypes.util.find_library(name)
        if library:
            preloads[name] = [*kernels, library]
    for name, preload in preloads.items():
        PRELOADED[part] = preload
        seconds[name] = measure(part, cores, iterations, len(cores), flags=flags)["step"]["p10"]
    best = min(seconds, key=seconds.get)
    PRELOADED[part] = preloads[best]
    times = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in seconds.items())
    print(f"allocator of {part}: {best} ({times})", flush=True)


FACTORS = {"ms": 1e3, "us": 1e6}


class Table:
    """Prints each row as soon as it is measured, and at the end the lines "name,value,unit"."""

    def __init__(self):
        self.lines = []
        print(f"\n{'':34s} {'median':>10s} {'10 %':>10s} {'90 %':>10s} {'':7s} n", flush=True)

    def add(self, name, text, s, unit="ms"):
        print(f"{text:34s} " + " ".join(f"{s[q] * FACTORS[unit]:10.2f}"
              for q in ("median", "p10", "p90")) + f" {unit:7s} {s['n']}", flush=True)
        self.lines.append(f"{name},{s['median'] * FACTORS[unit]:.3f},{unit}")

    def add_rate(self, name, text, rate):
        print(f"{text:34s} {rate:10.1f} {'':21s} GFLOP/s", flush=True)
        self.lines.append(f"{name},{rate:.1f},GFLOP/s")

    def end(self):
        print("\n" + "\n".join(self.lines))


def gpt2_flags(dtype, batch, seq):
    return ("--dtype", dtype, "--batch", str(batch), "--seq", str(seq), "--clip")


def measure_gpt2(table, cores, iterations, dtype, end):
    for batch, seq in GPT2_BATCHES:
        clipped = gpt2_flags(dtype, batch, seq)
        name, text = f"pytorch_gpt2_124m_{batch}x{seq}_2t{end}", f"GPT-2 {batch}x{seq} {dtype}, 2t"
        step = measure("gpt2", cores, iterations, 2, flags=clipped)["step"]
        table.add(name, text, step)
        step = measure("gpt2", cores, iterations, 2, flags=clipped[:-1])["step"]
        table.add(f"{name}_not_clipped", "  without clipping", step)


def measure_training(table, cores, quick):
    few, many = (5, 30) if quick else (40, 400)
    flops = 2 * TOKENS * HIDDEN * 4 * HIDDEN
    for threads in (1, 2)[:len(cores)]:
        for part, name in (("gemm", "BLAS"), ("gemm_onednn", "oneDNN")):
            seconds = measure(part, cores, many // 2, threads)["step"]["median"]
            table.add_rate(f"pytorch_{part}_{threads}t", f"GEMM, {name}, {threads} thread(s)",
                           flops / seconds / 1e9)
    for dtype in ("float32", "bfloat16"):
        flags, end = ("--dtype", dtype), "" if dtype == "float32" else "_bf16"
        for threads in (1, 2)[:len(cores)]:
            layer = measure("layer", cores, few, threads, flags=flags)["step"]
            table.add(f"pytorch_layer_{threads}t{end}", f"layer {dtype}, {threads}t", layer)
        if len(cores) < 2:
            continue
        split = measure("layer", cores, few, world=2, flags=flags)
        table.add(f"pytorch_layer_tp2{end}", f"layer {dtype}, 2 processes (gloo)", split["step"])
        table.add(f"pytorch_layer_tp2_all_reduces{end}", "  of it in 4 all-reduces",
                  split["all_reduces"])
        measure_gpt2(table, cores, 3 if quick else 20, dtype, end)
    if len(cores) > 1:
        reduce = measure("all_reduce", cores, many, world=2)["step"]
        table.add("pytorch_all_reduce_3mb", "all-reduce of 3 MB (gloo)", reduce, "us")


def missing(*modules):
    return [name for name in modules if importlib.util.find_spec(name) is None]


def inference_parts():
    """Returns (name, text, part, flags, iterations) of what can be measured here."""
    parts = []
    for size in BERT_SHAPES:
        for dtype in ("float32", "bfloat16"):
            flags = ("--size", size, "--dtype", dtype)
            name, text = f"bert_{size}_{dtype}", f"BERT-{size} {dtype}"
            parts += [(f"pytorch_{name}", text, "bert", flags, 40),
                      (f"pytorch_{name}_compiled", f"{text} compiled", "bert",
                       (*flags, "--compiled"), 40)]
        parts.append((f"onnxruntime_bert_{size}", f"BERT-{size} ONNX Runtime", "bert_onnx",
                      ("--size", size), 40))
    for dtype in ("float32", "bfloat16"):
        parts.append((f"transformers_gpt2_{dtype}", f"GPT-2 {dtype} a token", "decode",
                      ("--dtype", dtype), 10))
    needs = {"bert_onnx": ("transformers", "onnx", "onnxruntime")}
    kept = [p for p in parts if not missing(*needs.get(p[2], ("transformers",)))]
    if len(kept) < len(parts):
        absent = missing("transformers", "onnx", "onnxruntime")
        print(f"inference: {len(parts) - len(kept)} rows left out, not installed: "
              + ", ".join(absent))
    return kept


def measure_inference(table, cores, quick):
    for name, text, part, flags, iterations in inference_parts():
        for threads in (1, 2)[:len(cores)]:
            step = measure(part, cores, 3 if quick else iterations, threads, flags=flags)["step"]
            table.add(f"{name}_{threads}t", f"{text}, {threads}t", step)


def report(torch, quick, only):
    cores = sorted(os.sched_getaffinity(0))[:2]
    describe(torch)
    with tempfile.TemporaryDirectory() as folder:
        choose_mkl_kernels(torch, folder, cores[0], 20 if quick else 100)
        choose_allocator("layer", cores[:1], 5 if quick else 20)
        if only != "inference":
            choose_allocator("gpt2", cores, 2 if quick else 5, gpt2_flags("float32", *GPT2_BATCHES[0]))
        table = Table()
        if only != "inference":
            measure_training(table, cores, quick)
        if only != "training":
            measure_inference(table, cores, quick)
        table.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few iterations")
    parser.add_argument("--only", choices=("training", "inference"), help="a part of it")
    for name in ("--compiled", "--clip"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--size", "--dtype"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--part", "--iterations", "--threads", "--rank", "--world", "--port", "--batch",
                 "--seq"):
        parser.add_argument(name, type=str if name == "--part" else int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("peer_pytorch: PyTorch is not installed, so there is nothing to compare with.")
        sys.exit(77)
    if args.part:
        run_part(args)
    else:
        report(torch, args.quick, args.only)


if __name__ == "__main__":
    main()
