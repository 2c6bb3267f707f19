"""Time attention on a CPU in bfloat16 beside torch's kernel, forward and backward, in turns.

python attention.py [--turns 15]      with src/ on PYTHONPATH
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from meshwright import host
from meshwright.kernels import causal

SIZES = {  # samples, tokens, heads, groups, head_dim
    "10M": (12, 256, 6, 6, 64),
    "124M, 64 tokens": (4, 64, 12, 12, 64),
    "16 x 4 x 128": (16, 128, 4, 4, 64),
    "heads of 128": (12, 256, 4, 4, 128),
    "two heads a key": (12, 256, 6, 3, 64),
    "2 x 6 x 512": (2, 512, 6, 6, 64),
    "2 x 12 x 1,024": (2, 1024, 12, 12, 64),
    "1 x 12 x 2,048": (1, 2048, 12, 12, 64),
    "1 x 12 x 4,096": (1, 4096, 12, 12, 64),
    "8 x 2 x 32": (8, 32, 2, 2, 32),
}


def by_torch(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def milliseconds(attend, inputs, grad, repeats):
    """Return what a forward and a backward pass take."""
    spent = [0.0, 0.0]
    for _ in range(repeats):
        start = time.perf_counter()
        o = attend(*inputs)
        middle = time.perf_counter()
        torch.autograd.grad(o, inputs, grad)
        spent = [spent[0] + middle - start, spent[1] + time.perf_counter() - middle]
    return [1e3 * x / repeats for x in spent]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=15)
    turns = parser.parse_args().turns
    host.keep_freed_memory()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {turns} turns, medians")
    print("| | torch, forward + backward, ms | ours, ms | times as fast |\n|---|---:|---:|---:|")
    for name, (batch, length, heads, groups, dim) in SIZES.items():
        torch.manual_seed(0)
        shapes = [(batch, length, n, dim) for n in (heads, groups, groups, heads)]
        *inputs, grad = (torch.randn(shape).bfloat16() for shape in shapes)
        inputs = [x.requires_grad_() for x in inputs]
        repeats = max(1, 12 * 6 * 256**2 // (batch * heads * length**2))
        pairs = []
        for turn in range(turns + 1):
            order = (by_torch, causal.attend) if turn % 2 else (causal.attend, by_torch)
            found = {attend: milliseconds(attend, inputs, grad, repeats) for attend in order}
            pairs.append((found[by_torch], found[causal.attend]))
        pairs = pairs[1:]
        theirs, ours = (
            " + ".join(
                f"{statistics.median(pair[i][part] for pair in pairs):.2f}" for part in (0, 1)
            )
            for i in (0, 1)
        )
        ratio = statistics.median(sum(a) / sum(b) for a, b in pairs)
        print(f"| {name} | {theirs} | {ours} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
