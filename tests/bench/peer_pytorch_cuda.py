"""Rows of bench_cuda in PyTorch on the same GPU.

    python tests/bench/peer_pytorch_cuda.py               some minutes, most of them for torch.compile
    python tests/bench/peer_pytorch_cuda.py --only norm   one item; --list lists the items
    python tests/bench/peer_pytorch_cuda.py --quick       5 samples instead of 15
    python tests/bench/peer_pytorch_cuda.py --rows        no line with the names of the columns
    python tests/bench/peer_pytorch_cuda.py --device cpu --tiny   shapes that only show that everything runs

Prints a CSV with the columns of bench_cuda --csv. A row has the item and the name of the row of bench_cuda that it
compares with, and counts the same operations or bytes. The last column names what PyTorch runs. The figures are the
rates of the samples between CUDA events, and the median time. Comments go to stderr, also about what PyTorch refuses.
Exits with 77 when PyTorch or a GPU is missing, and with 1 when a whole item has no row.
"""

import argparse
import statistics
import sys
import time

USUAL = [("h 1024, s 2048", 1024, 16, 2048, 4), ("h 4096, s 2048", 4096, 32, 2048, 4)]  # as in bench_cuda.cu
PAPER = [("1.2B of the paper", 1536, 16, 1024, 8), ("2.5B of the paper", 1920, 20, 1024, 8),
         ("4.2B of the paper", 2304, 24, 1024, 8), ("8.3B of the paper", 3072, 32, 1024, 8)]
BIG = [("h 4096, s 8192", 4096, 32, 8192, 1), ("h 8192, s 2048", 8192, 64, 2048, 4),
       ("h 8192, s 8192", 8192, 64, 8192, 1)]
ROW_SECONDS = 0.5  # the samples of a row take at most this long, unless three of them take longer


class Bench:
    """The options, the device, and the rows that were printed."""

    def __init__(self, torch, arguments):
        self.torch, self.device, self.tiny = torch, arguments.device, arguments.tiny
        self.samples = 1 if arguments.tiny else 5 if arguments.quick else 15
        self.item, self.rows = "", 0

    def shapes(self, shapes):
        return [("tiny", 64, 1, 24, 2)] if self.tiny else shapes

    def noise(self, *size, std=1.0, dtype=None, grad=False):
        values = self.torch.randn(*size, device=self.device, dtype=dtype or self.torch.bfloat16) * std
        return values.detach().requires_grad_(grad)

    def compiled(self, function):
        return self.torch.compile(function, dynamic=False, backend="aot_eager" if self.device == "cpu" else "inductor")

    def wait(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def sample(self, step, calls):
        """Returns the seconds of one call."""
        if self.device == "cpu":
            begin = time.perf_counter()
            for _ in range(calls):
                step()
            return (time.perf_counter() - begin) / calls
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            step()
        end.record()
        end.synchronize()
        return max(begin.elapsed_time(end) * 1e-3, 1e-9) / calls

    def measure(self, step):
        """Returns the seconds of a call in each sample, after a warm-up. A sample takes at least 5 ms."""
        for _ in range(3):
            step()
        calls = 1 if self.tiny else min(1000, max(1, int(5e-3 / self.sample(step, 3))))
        times, start = [], time.perf_counter()
        while len(times) < self.samples and (len(times) < 3 or time.perf_counter() - start < ROW_SECONDS):
            times.append(self.sample(step, calls))
        return times

    def print(self, name, times, amount, unit, versus):
        seconds = statistics.median(times)
        rates = ",".join(f"{amount / t:.6g}" for t in (seconds, max(times), min(times)))
        print(f'{self.item},"{name}",{rates},{unit},{seconds * 1e6:.6g},,"{versus}"', flush=True)
        self.rows += 1

    def guarded(self, name, versus, work):
        """Returns what work returns. When PyTorch raises, says so and returns None."""
        try:
            return work()
        except Exception as error:  # the other rows follow
            text = str(error).strip().split("\n")[0][:200]
            print(f"# {self.item}, {name}, {versus}: not measured: {type(error).__name__}: {text}", file=sys.stderr,
                  flush=True)
            return None

    def row(self, name, step, amount, unit, versus):
        times = self.guarded(name, versus, lambda: self.measure(step))
        if times:
            self.print(name, times, amount, unit, versus)

    def memory_row(self, name, step, moved, versus="PyTorch compiled"):
        self.row(name, step, 1e-9 * moved, "GB/s", versus)

    def compute_row(self, name, step, flop, versus):
        self.row(name, step, 1e-12 * flop, "TFLOP/s", versus)

    def host_row(self, name, step, versus):
        """The host's time of a call; the GPU is idle before it."""
        def times():
            found = []
            for _ in range(self.samples):
                self.wait()
                begin = time.perf_counter()
                step()
                found.append(time.perf_counter() - begin)
            return found
        found = self.guarded(name + ", host", versus, times)
        if found:
            seconds = sorted(1e6 * t for t in found)
            median = statistics.median(seconds)
            print(f'{self.item},"{name}, host",{median:.6g},{seconds[0]:.6g},{seconds[-1]:.6g},us,{median:.6g},,'
                  f'"{versus}"', flush=True)

    def forward_backward(self, name, function, inputs, forward_bytes, backward_bytes, backward="",
                         versus="PyTorch compiled"):
        """Rows of function(*inputs), and of the gradients of the inputs that require them, for random dy. backward is
        the name of the row of the gradients."""
        self.memory_row(name, lambda: function(*inputs), forward_bytes, versus)
        y = self.guarded(name, versus, lambda: function(*inputs))
        if y is None or not backward:
            return
        dy, wanted = self.torch.randn_like(y), [t for t in inputs if t.requires_grad]
        self.memory_row(backward, lambda: self.torch.autograd.grad(y, wanted, dy, retain_graph=True), backward_bytes,
                        versus)


def matrix(bench):
    """The sizes of the tensors of memory-bound rows."""
    return (9, 40) if bench.tiny else (32768, 4096)


def item_activation(bench):
    gelu, (tokens, hidden) = bench.torch.nn.functional.gelu, matrix(bench)
    x, bias = bench.noise(tokens, hidden, grad=True), bench.noise(hidden, grad=True)
    moved = 3 * 2 * tokens * hidden
    bench.forward_backward("bf16 bias + GELU", bench.compiled(lambda x, b: gelu(x + b, approximate="tanh")), (x, bias),
                           moved, moved, "bf16 bias + GELU backward")


def item_dropout(bench):
    functional, (tokens, hidden) = bench.torch.nn.functional, matrix(bench)
    x, bias, residual = bench.noise(tokens, hidden, grad=True), bench.noise(hidden), bench.noise(tokens, hidden)
    function = bench.compiled(lambda x, bias, residual: residual + functional.dropout(x + bias, 0.1))
    one = 2 * tokens * hidden
    bench.forward_backward("bf16 bias + dropout + add", function, (x, bias, residual), 3 * one, 2 * one,
                           "bf16 dropout backward")


def item_norm(bench):
    functional, (tokens, wide) = bench.torch.nn.functional, matrix(bench)
    for hidden in [40] if bench.tiny else [1024, 4096]:
        x, gain = bench.noise(tokens * wide // hidden, hidden, grad=True), bench.noise(hidden, grad=True)
        bias, one = bench.noise(hidden, grad=True), 2 * tokens * wide
        layer = bench.compiled(lambda x, gain, bias: functional.layer_norm(x, gain.shape, gain, bias, 1e-5))
        rms = bench.compiled(lambda x, gain: functional.rms_norm(x, gain.shape, gain, 1e-5))
        for name, function, inputs in ("LayerNorm", layer, (x, gain, bias)), ("RMSNorm", rms, (x, gain)):
            bench.forward_backward(f"bf16 {name}, h {hidden}", function, inputs, 2 * one, 3 * one,
                                   f"bf16 {name} backward, h {hidden}")


def zipf_ids(bench, vocab, tokens):
    """Ids with the frequencies of words, by the formula of bench_cuda.cu."""
    uniform = bench.torch.rand(tokens, dtype=bench.torch.float64)
    return bench.torch.pow(float(vocab), uniform).long().sub(1).to(bench.device)


def item_embedding(bench):
    """The gradient is a whole table, which PyTorch fills with zeros first. The bytes are those of bench_cuda, which
    adds to an f32 gradient."""
    vocab, lookup = 100 if bench.tiny else 50304, bench.torch.nn.functional.embedding
    for tokens, hidden in [(5, 24)] if bench.tiny else [(16384, 4096), (49152, 768)]:
        table, one = bench.noise(vocab, hidden, grad=True), 2 * tokens * hidden
        words = zipf_ids(bench, vocab, tokens)
        numbers = bench.torch.arange(tokens, device=bench.device) % vocab
        for ids, kind in (numbers, "distinct ids"), (words, "natural text"):
            rows = tokens if kind == "distinct ids" else int(words.unique().numel())
            bench.forward_backward(f"bf16 embedding, {kind}, h {hidden}", lambda table, ids=ids: lookup(ids, table),
                                   (table,), 2 * one, one + 8 * rows * hidden,
                                   f"bf16 embedding backward, {kind}, h {hidden}",
                                   "PyTorch, which also fills the gradient")


def item_cross_entropy(bench):
    torch, tokens = bench.torch, 5 if bench.tiny else 8192
    loss = bench.compiled(lambda x, t: torch.nn.functional.cross_entropy(x.float(), t, reduction="sum"))
    whole, part = (96, 93) if bench.tiny else (50304, 50257)
    for vocab, ld in (whole, whole), (part, part), (part, whole):
        logits = bench.noise(tokens, ld)[:, :vocab].detach().requires_grad_()
        targets = zipf_ids(bench, vocab, tokens)
        name = f", vocabulary {vocab}" + (f", ld {ld}" if ld != vocab else "")
        one = 2 * tokens * vocab
        with torch.no_grad():
            bench.memory_row("bf16 cross-entropy forward" + name, lambda: loss(logits, targets), one)
        bench.memory_row("bf16 cross-entropy forward + backward" + name,
                         lambda: torch.autograd.grad(loss(logits, targets), [logits]), 2 * one)


def sdpa_rows(bench, seq, head_dim, per_group, causal, dtype="bf16"):
    torch = bench.torch
    backends = torch.nn.attention.SDPBackend
    heads = 2 if bench.tiny else 2048 // head_dim // per_group * per_group
    sequences = 1 if bench.tiny else 16384 // seq
    kind = torch.float16 if dtype == "f16" else torch.bfloat16

    def heads_of(count):
        return bench.noise(sequences, seq, count, head_dim, dtype=kind).transpose(1, 2).detach().requires_grad_()
    inputs = heads_of(heads), heads_of(heads // per_group), heads_of(heads // per_group)
    flop = 4 * sequences * seq * seq * heads * head_dim * (0.5 if causal else 1)
    name = (f"head size {head_dim}, s {seq}" + (", causal" if causal else "") +
            (f", {per_group} heads per group" if per_group > 1 else ""))
    name = name if dtype == "bf16" else f"{dtype} {name}"

    def attention():
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=per_group > 1)
    for backend, versus in (backends.FLASH_ATTENTION, "PyTorch, flash"), (backends.CUDNN_ATTENTION, "PyTorch, cuDNN"):
        with torch.nn.attention.sdpa_kernel(backend):
            out = bench.guarded(name, versus, attention)
            if out is None:
                continue
            dout = torch.randn_like(out)
            bench.compute_row(name + ", forward", attention, flop, versus)
            bench.compute_row(name + ", backward", lambda out=out, dout=dout: torch.autograd.grad(
                out, inputs, dout, retain_graph=True), 2.5 * flop, versus)


def item_attention(bench):
    seq = 33 if bench.tiny else 2048
    for head_dim in 128, 96, 64:
        for causal in True, False:
            sdpa_rows(bench, seq, head_dim, 1, causal)
    sdpa_rows(bench, seq, 128, 1, True, "f16")
    sdpa_rows(bench, seq, 128, 2 if bench.tiny else 4, True)


def item_attention_lengths(bench):
    for seq in [20] if bench.tiny else [512, 1024, 4096, 8192, 16384]:
        for head_dim in 128, 64:
            sdpa_rows(bench, seq, head_dim, 1, True)
    sdpa_rows(bench, 20 if bench.tiny else 8192, 128, 1, False)


def gemm_rows(bench, shapes):
    """The weight gradient of PyTorch is bfloat16, and is not added to what was there."""
    matmul = bench.torch.matmul
    for shape_name, hidden, _, seq, sequences in bench.shapes(shapes):
        tokens = seq * sequences
        products = ("qkv", hidden, 3 * hidden), ("proj", hidden, hidden), ("fc1", hidden, 4 * hidden), (
            "fc2", 4 * hidden, hidden)
        for name, wide, out in products:
            x, w, dy = bench.noise(tokens, wide), bench.noise(out, wide, std=0.02), bench.noise(tokens, out)
            steps = ("input gradient", dy, w), ("weight gradient", dy.T, x), ("forward", x, w.T)
            flop = 2 * tokens * wide * out
            for step, a, b in steps:
                bench.compute_row(f"{shape_name}, {name} {step}", lambda a=a, b=b: matmul(a, b), flop, "torch.matmul")


def make_layer(bench, hidden, heads, dtype):
    torch = bench.torch
    functional = torch.nn.functional

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
            self.qkv, self.proj = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
            self.fc1, self.fc2 = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

        def forward(self, x):
            batch, seq, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(a.transpose(1, 2).reshape(batch, seq, hidden))
            return x + self.fc2(functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))

    return Layer().to(device=bench.device, dtype=dtype)


def layer_rows(bench, shapes, host=False):
    """Gradients of the input and of all weights, which autograd accumulates. Weights are bfloat16. Attention is causal
    scaled_dot_product_attention, restricted to the flash backend."""
    torch, versus = bench.torch, "PyTorch compiled"
    for name, hidden, heads, seq, sequences in bench.shapes(shapes):
        layer = make_layer(bench, hidden, heads, torch.bfloat16)
        compiled, tokens = bench.compiled(layer), seq * sequences
        x = bench.noise(sequences, seq, hidden, grad=True)
        dy = torch.randn_like(x)

        def step(compiled=compiled, x=x, dy=dy):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                compiled(x).backward(dy)
        flop = 72 * tokens * hidden ** 2 + 6 * tokens * (seq + 1) * hidden
        bench.compute_row(f"{name}, forward + backward", step, flop, versus)
        if host:
            bench.host_row(f"{name}, forward + backward", step, versus)


def make_gpt2(bench, layers, hidden, heads, vocab, seq):
    """Returns a module from ids and targets to the mean loss. The head is the word embedding."""
    torch = bench.torch
    functional = torch.nn.functional

    class GPT2(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.positions = torch.nn.Embedding(vocab, hidden), torch.nn.Embedding(seq, hidden)
            self.layers = torch.nn.ModuleList(
                make_layer(bench, hidden, heads, torch.float32) for _ in range(layers))
            self.norm = torch.nn.LayerNorm(hidden)
            torch.nn.init.normal_(self.words.weight, std=0.02)

        def forward(self, ids, targets):
            x = self.words(ids) + self.positions.weight
            for layer in self.layers:
                x = layer(x)
            logits = functional.linear(self.norm(x), self.words.weight)
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return GPT2().to(bench.device)


def item_gpt2(bench):
    """Parameters are f32, as are the masters of bench_cuda; autocast runs the products and attention in bfloat16. The
    vocabulary is the padded one, which is faster."""
    torch, tiny = bench.torch, bench.tiny
    layers, hidden, heads, vocab, seq, sequences = (2, 32, 4, 96, 16, 2) if tiny else (12, 768, 12, 50304, 1024, 16)
    model = make_gpt2(bench, layers, hidden, heads, vocab, seq)
    compiled, parameters = bench.compiled(model), list(model.parameters())
    adamw = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = zipf_ids(bench, vocab, sequences * seq + 1)
    inputs, targets = ids[:-1].view(sequences, seq), ids[1:].view(sequences, seq)

    def gradients():
        with torch.autocast(bench.device, torch.bfloat16):
            loss = compiled(inputs, targets)
        loss.backward()

    def step():
        gradients()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        adamw.step()
        adamw.zero_grad()
    count, tokens = sum(int(p.numel()) for p in parameters), sequences * seq
    flop = 6 * count * tokens + 6 * tokens * (seq + 1) * hidden * layers
    name = f"GPT-2 124M, 16 x 1024 tokens, vocabulary {93 if tiny else 50257} padded to {vocab}"
    bench.compute_row(f"{name}, step", step, flop, "PyTorch compiled")
    bench.host_row(f"{name}, step", step, "PyTorch compiled")
    bench.compute_row(f"{name}, forward + backward", gradients, flop, "PyTorch compiled")


def gpt2_parameters(bench):
    """f32 tensors with the shapes of GPT-2 124M, and random gradients."""
    layers, hidden, vocab, seq = (2, 32, 93, 16) if bench.tiny else (12, 768, 50257, 1024)
    layer = [(hidden,), (hidden,), (3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,),
             (hidden,), (hidden,), (4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,)]
    parameters = []
    for shape in [(vocab, hidden), (seq, hidden)] + layers * layer + [(hidden,), (hidden,)]:
        parameters.append(bench.noise(*shape, std=0.02, dtype=bench.torch.float32, grad=True))
        parameters[-1].grad = bench.noise(*shape, std=1e-3, dtype=bench.torch.float32)
    return parameters


def item_optimizer(bench):
    """AdamW of f32 parameters moves 28 bytes for each, not the 30 of bf16 parameters with f32 masters."""
    torch, parameters = bench.torch, gpt2_parameters(bench)
    count = sum(int(p.numel()) for p in parameters)
    adamw = torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.1, fused=True)
    norm = torch.nn.utils
    gradients = [p.grad for p in parameters]
    rows = [("GPT-2 124M, AdamW, bf16 with f32 master", adamw.step, 28, "PyTorch, fused AdamW of f32 parameters"),
            ("GPT-2 124M, gradient norm", lambda: norm.get_total_norm(gradients, foreach=True).item(), 4,
             "PyTorch get_total_norm"),
            ("GPT-2 124M, gradient norm", lambda: norm.clip_grad_norm_(parameters, 1.0, foreach=True).item(), 4,
             "PyTorch clip_grad_norm_, which also clips")]
    for name, step, per_parameter, versus in rows:
        bench.memory_row(name, step, per_parameter * count, versus)
        bench.host_row(name, step, versus)


ITEMS = {
    "activation": item_activation, "dropout": item_dropout, "norm": item_norm, "embedding": item_embedding,
    "cross-entropy": item_cross_entropy, "attention": item_attention, "attention-lengths": item_attention_lengths,
    "gemm": lambda bench: gemm_rows(bench, USUAL), "layer": lambda bench: layer_rows(bench, USUAL, True),
    "gpt2": item_gpt2,
    "optimizer": item_optimizer, "gemm-paper": lambda bench: gemm_rows(bench, PAPER),
    "gemm-big": lambda bench: gemm_rows(bench, BIG[-1:]),
    "layer-paper": lambda bench: layer_rows(bench, PAPER), "layer-big": lambda bench: layer_rows(bench, BIG),
}


def keep_graphs():
    """Backward runs many times after one forward: compiled code must not reuse the memory that forward has kept."""
    try:
        import torch._functorch.config as config
        config.donated_buffer = False
    except (ImportError, AttributeError):
        pass  # an older PyTorch, which never does


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 samples of each instead of 15")
    parser.add_argument("--rows", action="store_true", help="rows without the line that names the columns")
    parser.add_argument("--list", action="store_true", help="print the items, in the order in which they run")
    parser.add_argument("--only", metavar="ITEM", choices=list(ITEMS), help="measure only this item")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: only to run this script")
    parser.add_argument("--tiny", action="store_true", help="shapes that only show that everything runs")
    return parser.parse_args()


def main():
    arguments = parse()
    if arguments.list:
        print("\n".join(ITEMS))
        return
    try:
        import torch
    except ImportError:
        print("peer_pytorch_cuda: PyTorch is not installed, nothing was measured", file=sys.stderr)
        sys.exit(77)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("peer_pytorch_cuda: no GPU here, nothing was measured", file=sys.stderr)
        sys.exit(77)
    gpu = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if arguments.device == "cuda" else "a CPU"
    print(f"# PyTorch {torch.__version__}, {gpu}", file=sys.stderr)
    keep_graphs()
    if not arguments.rows:
        print("item,name,median,min,max,unit,us,ratio,versus", flush=True)
    failed = 0
    for name, item in ITEMS.items():
        if arguments.only not in (None, name):
            continue
        bench = Bench(torch, arguments)
        bench.item = name
        bench.guarded("the item", "PyTorch", lambda item=item, bench=bench: item(bench))
        failed += bench.rows == 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
