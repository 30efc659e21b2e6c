"""The layers of bench_cuda in PyTorch on the same GPU: bfloat16, compiled, flash attention.

    python tests/bench/peer_pytorch_cuda.py            some minutes
    python tests/bench/peer_pytorch_cuda.py --quick    fewer samples
    python tests/bench/peer_pytorch_cuda.py --rows     no line with the names of the columns

It runs one pre-LN GPT layer, forward and backward (gradients of its input and of all weights), without dropout.
Attention is causal scaled_dot_product_attention, restricted to the flash backend. Weights are bfloat16, and autograd
accumulates their gradients. Prints a CSV with the columns of bench_cuda --csv and a row for each shape: the rates of
the samples between CUDA events, and the median time. Comments go to stderr. Exits with 77 when PyTorch or a GPU is
missing.
"""

import argparse
import statistics
import sys

SHAPES = [  # name, hidden, heads, seq, sequences: as in bench_cuda.cu
    ("1.2B of the paper", 1536, 16, 1024, 8), ("2.5B of the paper", 1920, 20, 1024, 8),
    ("4.2B of the paper", 2304, 24, 1024, 8), ("8.3B of the paper", 3072, 32, 1024, 8),
    ("h 4096, s 2048", 4096, 32, 2048, 4), ("h 4096, s 8192", 4096, 32, 8192, 1),
    ("h 8192, s 2048", 8192, 64, 2048, 4), ("h 8192, s 8192", 8192, 64, 8192, 1),
]


def make_layer(torch, hidden, heads):
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

    return Layer().to(device="cuda", dtype=torch.bfloat16)


def measure(torch, step, samples):
    times = []
    for _ in range(5):
        step()
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(5):
            step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / 5)
    return times


def layer_times(torch, shape, samples):
    _, hidden, heads, seq, sequences = shape
    layer = make_layer(torch, hidden, heads)
    compiled = torch.compile(layer)
    x = torch.randn(sequences, seq, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    def step():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            compiled(x).backward(dy)
    return measure(torch, step, samples)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 samples of each instead of 15")
    parser.add_argument("--rows", action="store_true", help="rows without the line that names the columns")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("peer_pytorch_cuda: PyTorch is not installed, nothing was measured", file=sys.stderr)
        sys.exit(77)
    if not torch.cuda.is_available():
        print("peer_pytorch_cuda: no GPU here, nothing was measured", file=sys.stderr)
        sys.exit(77)
    print(f"# PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}", file=sys.stderr)
    if not arguments.rows:
        print("item,name,median,min,max,unit,us,ratio,versus")
    for shape in SHAPES:
        name, hidden, _, seq, sequences = shape
        tokens = seq * sequences
        flop = 72 * tokens * hidden ** 2 + 6 * tokens * (seq + 1) * hidden
        times = layer_times(torch, shape, 5 if arguments.quick else 15)
        seconds = statistics.median(times)
        rates = ",".join(f"{1e-12 * flop / t:.6g}" for t in (seconds, max(times), min(times)))
        print(f'layer,"{name}, forward + backward, PyTorch",{rates},TFLOP/s,{seconds * 1e6:.6g},,', flush=True)


if __name__ == "__main__":
    main()
