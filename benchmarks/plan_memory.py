"""Print predicted beside measured memory, for measurements in JSON lines.

    python benchmarks/plan_memory.py FILE... [--device h100] [--half 1 --seed 28]

A line has `flags` as given to `train`, or its `command`, and bytes: `peak` or
`peak_bytes`, and if known `reserved` and `context`. With --half only the first or second half of
each file's lines counts, drawn by the seed: a prediction is refined with one half and judged by the
other.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from meshwright.apps.plan.memory import memory_of_ranks
from meshwright.base.device_profiles import load_profile
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.model import counts

RUN = "--mock-data --train-iters 10 --lr 1e-4".split()


def lines_of(path: str, half: int, seed: int) -> list[dict[str, Any]]:
    """Return the measurements of a file, or of half of it."""
    rows = [
        json.loads(line)
        for line in Path(path).read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    rows = [row for row in rows if row.get("peak") or row.get("peak_bytes")]
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    chosen = {1: order[: len(rows) // 2], 2: order[len(rows) // 2 :]}.get(half, order)
    return [rows[i] for i in sorted(chosen)]


def flags_of(row: dict[str, Any]) -> list[str]:
    if "flags" in row:
        return row["flags"].split()
    _, _, words = row["command"].partition(" train ")
    return [*words.split(), "--world-size", str(row["gpus"])]


def predict(row: dict[str, Any], device: str) -> dict[str, int]:
    """Return the largest of the pipeline ranks' memory."""
    config = flags.parse_settings(
        TrainConfig, [*RUN, *flags_of(row)], "meshwright train", check=False
    ).config
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    size = config.tokenizer.vocab_size or 50257
    padded = counts.padded_size(size, m.make_vocab_size_divisible_by, tp, m.pad_vocab_size_to)
    most = max(
        memory_of_ranks(config, padded, load_profile(device)), key=lambda rank: rank.allocated
    )
    return {"allocated": most.allocated, "reserved": most.reserved, "context": most.context}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--half", type=int, default=0)
    parser.add_argument("--seed", type=int, default=28)
    args = parser.parse_args()
    errors: dict[str, list[float]] = {"allocated": [], "reserved": [], "context": []}
    for row in (row for path in args.files for row in lines_of(path, args.half, args.seed)):
        predicted = predict(row, args.device)
        measured = {kind: row.get(kind) for kind in errors} | {
            "allocated": row.get("peak") or row.get("peak_bytes")
        }
        found = {k: predicted[k] / n - 1 for k, n in measured.items() if n}
        for kind, error in found.items():
            errors[kind].append(abs(error))
        print(
            "  ".join(f"{k} {predicted[k] / 2**20:,.0f} MiB ({e:+.2%})" for k, e in found.items()),
            *flags_of(row),
        )
    for kind, values in errors.items():
        if values:
            print(
                f"{kind}: median {statistics.median(values):.2%}, worst {max(values):.2%} of {len(values)}"
            )


if __name__ == "__main__":
    main()
