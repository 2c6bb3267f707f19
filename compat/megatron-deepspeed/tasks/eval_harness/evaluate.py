"""Megatron-DeepSpeed's way to lm-evaluation-harness: `meshwright evaluate --harness`."""

import argparse
import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "src"))

from meshwright.__main__ import main  # noqa: E402

# Megatron's parser demands these, and bigscience's scripts give -1: the checkpoint says them.
SAID_BY_CHECKPOINT = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--seq-length",
    "--max-position-embeddings",
)


def without_dummies(argv: list[str]) -> list[str]:
    out: list[str] = []
    for word in argv:
        if word == "-1" and out and out[-1] in SAID_BY_CHECKPOINT:
            out.pop()
        else:
            out.append(word)
    return out


def command(argv: list[str]) -> list[str]:
    """Return the words of `meshwright evaluate`; what it does anyway is left out."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task_list", "--task-list", required=True)
    parser.add_argument("--results_path", "--results-path", default="./results.json")
    for name in ("adaptive_seq_len", "eval_fp32", "intermed_results"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", action="store_true")
    for name in ("bootstrap_iters", "micro_bs_multiplier"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    found, rest = parser.parse_known_args(without_dummies(argv))
    if found.eval_fp32:
        rest = [word for word in rest if word not in ("--fp16", "--bf16")]
    return ["evaluate", "--harness", found.task_list, "--results-path", found.results_path, *rest]


if __name__ == "__main__":
    sys.exit(main(command(sys.argv[1:])))
