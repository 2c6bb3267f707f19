"""nanochat and `--recipe modern` at the same depth on one GPU: tokens a second of each.

usage: python benchmarks/peer_nanochat.py NANOCHAT OUT [--depth 8 12 20] [--steps 8] [--fp8]

NANOCHAT is a clone of nanochat; nothing of it is kept. Its model, its compilation, its optimizer
and the loop around them are what its scripts/base_train.py runs, with its own batch and its
micro-batch of 32, but with full attention in each layer (`--window-pattern L`), as it advises where
FlashAttention 3 cannot be downloaded. Tokens are random and already on the device, vocabularies
have 32,768 ids, and samples 2,048 tokens. Ours is `meshwright train --recipe modern --depth N`,
with its own batch and the micro-batch that it finds. One program runs after the other, each in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import describe_machine, new_parser, print_head, print_row

VOCAB, LENGTH = 32768, 2048
TOKENS_OF_PARAMETER = 12  # nanochat's default
REFERENCE_BATCH = 2**19  # at depth 12


def build(depth: int) -> Any:
    """Return nanochat's model of a depth on the meta device, as base_train.py does."""
    from nanochat.gpt import GPT, GPTConfig

    width = -(-depth * 64 // 128) * 128
    config = GPTConfig(
        sequence_len=LENGTH,
        vocab_size=VOCAB,
        n_layer=depth,
        n_head=width // 128,
        n_kv_head=width // 128,
        n_embd=width,
        window_pattern="L",
    )
    with torch.device("meta"):
        return GPT(config)


def horizon(model: Any) -> float:
    counts = model.num_scaling_params()
    return float(TOKENS_OF_PARAMETER * (counts["transformer_matrices"] + counts["lm_head"]))


def run_nanochat(args: argparse.Namespace) -> None:
    """Train nanochat's model for some steps; print its figures as JSON."""
    sys.path.insert(0, str(args.nanochat))
    (depth,) = args.depth
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")  # as its compute_init does
    torch.manual_seed(42)
    model = build(depth)
    # Its batch grows with the tokens of a run to the power of 0.383, from that of depth 12.
    ratio = horizon(model) / horizon(build(12))
    batch = args.batch or 2 ** round(math.log2(REFERENCE_BATCH * ratio**0.383))
    model.to_empty(device=device)
    model.init_weights()
    if args.fp8:
        from nanochat.fp8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name("tensorwise"),
            module_filter_fn=lambda module, name: (
                isinstance(module, torch.nn.Linear)
                and module.in_features % 16 == 0 == module.out_features % 16
                and min(module.in_features, module.out_features) >= 128
            ),
        )
    parameters = sum(p.numel() for p in model.parameters())
    compiled = torch.compile(model, dynamic=False)
    optimizer = model.setup_optimizer(
        unembedding_lr=0.008,
        embedding_lr=0.3,
        scalar_lr=0.5,
        matrix_lr=0.02,
        weight_decay=0.28,
    )
    micro = args.micro
    micro_steps = batch // (micro * LENGTH)
    x = torch.randint(0, VOCAB, (micro, LENGTH + 1), device=device)
    tokens, labels = x[:, :-1].contiguous(), x[:, 1:].contiguous()

    seconds = []
    for _ in range(args.steps):
        synchronize()
        begin = time.perf_counter()
        for _ in range(micro_steps):
            loss = compiled(tokens, labels)
            (loss / micro_steps).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        loss.item()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    # The first steps compile.
    step = statistics.median(seconds[2:])
    print(json.dumps({"tokens/s": batch / step, "batch": batch, "parameters": parameters}))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_ours(depth: int, args: argparse.Namespace) -> dict[str, float]:
    """Run `meshwright train` for some steps; return its figures."""
    folder = args.out / f"ours-{depth}"
    # The length of the whole run decides about the batch; the run ends early.
    flags = (
        f"--recipe modern --depth {depth} --seq-length {LENGTH} --vocab-size {VOCAB} --mock-data"
    )
    flags += (
        f" --exit-interval {args.steps + 4} --eval-iters 0 --log-interval 1 --bf16 --no-tensorboard"
    )
    flags += " --fp8-format hybrid" * args.fp8 + (f" {args.ours}" if args.ours else "")
    words = [sys.executable, "-m", "meshwright", "train", *flags.split(), "--run-dir", str(folder)]
    with (args.out / f"ours-{depth}.log").open("w") as log:
        subprocess.run(words, check=True, stdout=log, stderr=subprocess.STDOUT)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row.get("ms")][4:]
    batch = steps[-1]["batch"] * LENGTH
    seconds = statistics.median(row["ms"] for row in steps) / 1000
    return {"tokens/s": batch / seconds, "batch": batch}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("nanochat", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--depth", type=int, nargs="+", default=[8, 12, 20])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro", type=int, default=32, help="samples of nanochat's forward pass")
    parser.add_argument("--batch", type=int, help="tokens of nanochat's step, instead of its own")
    parser.add_argument("--fp8", action="store_true", help="both multiply in 8 bits")
    parser.add_argument("--ours", help="further flags of ours")
    parser.add_argument("--only-nanochat", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only_nanochat:
        run_nanochat(args)
        return
    print(describe_machine("torch"))
    print_head("depth", "nanochat, tokens/s", "its batch", "ours, tokens/s", "our batch", "ratio")
    for depth in args.depth:
        words = [sys.executable, *sys.argv, "--only-nanochat", "--depth", str(depth)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        theirs = json.loads(done.stdout.splitlines()[-1])
        ours = run_ours(depth, args)
        ratio = ours["tokens/s"] / theirs["tokens/s"]
        numbers = theirs["tokens/s"], theirs["batch"], ours["tokens/s"], ours["batch"]
        print_row(depth, *(f"{n:,.0f}" for n in numbers), f"{ratio:.2f}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
