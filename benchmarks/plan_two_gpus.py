"""The fastest of the layouts that were measured on two H200s, and the one that the plan takes.

python benchmarks/plan_two_gpus.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from plan_times import RECORDS, Case, predict, train_flags


class Row(NamedTuple):
    model: str
    layout: str
    measured: float  # tokens/s
    predicted: float


def rows() -> Iterator[tuple[str, Row]]:
    """Yield the name of each measurement and one of its layouts."""
    for path in sorted(RECORDS.glob("2026-11-2[12]-h200-*/**/results.json")):
        for row in json.loads(path.read_text())["rows"]:
            if row["gpus"] == 2 and row["ms"]:
                model, _, layout = row["name"].partition(" ")
                yield (
                    "22 November",
                    of(model, layout, row["command"], row["ms"], row["tokens_per_second"]),
                )
    for path in sorted(RECORDS.glob("2026-11-21-h200-layouts/two-gpus*/layouts-*B.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if row["event"] == "done" and row["gpus"] == 2:
                of_row = of(
                    row["model"], row["cell"], row["command"], row["ms"], row["tokens_per_second"]
                )
                yield f"21 November, {path.parent.name}", of_row


def of(model: str, layout: str, command: str, ms: float, tokens: float) -> Row:
    step = predict(Case("", layout, train_flags(command), 2, ms, "h200"))
    return Row(model, layout, tokens, step.tokens_per_second)


def table(rows: list[tuple[str, Row]]) -> Iterator[str]:
    yield "| model, measurement | layout | measured, tokens/s | predicted |"
    yield "|---|---|---:|---:|"
    for model in ("345M", "1.3B", "2.7B"):
        for when in sorted({when for when, _ in rows}):
            some = [
                row
                for at, row in rows
                if at == when and row.model == model and "micro-batch 4" not in row.layout
            ]
            for row in sorted(some, key=lambda row: -row.measured):
                yield f"| {model}, {when} | {row.layout} | {row.measured:,.0f} | {row.predicted:,.0f} |"
            if len(some) > 1:
                chosen, best = (
                    max(some, key=lambda r: r.predicted),
                    max(some, key=lambda r: r.measured),
                )
                yield f"| | chosen: {chosen.layout} | {chosen.measured / best.measured - 1:+.1%} of the fastest | |"


if __name__ == "__main__":
    print("\n".join(table(list(rows()))))
