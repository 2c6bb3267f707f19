"""Predicted beside measured times of a step: the records of `meshwright bench`, and lines of JSON.

    python benchmarks/plan_times.py                    # the half that the model was fitted to
    python benchmarks/plan_times.py --half other       # the half that was set aside
    python benchmarks/plan_times.py --lines cases.jsonl

A line of JSON has `flags` of train, `ms`, `device`, and `world` if several ranks ran. Records
before 0.9.0 are left out: they measured other kernels.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.apps.bench import rows
from meshwright.apps.plan.timing import StepTime, measured_operations, terms_of
from meshwright.base.device_profiles import DeviceProfile, load_profile
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.model.counts import padded_size

RECORDS = Path(__file__).parent / "records"
SEED = 28  # of the halves
COMPARED_MS = 16e-9  # of a comparison of copies on an H100, for each parameter


class Case(NamedTuple):
    source: str
    name: str
    words: str  # flags of train
    world: int
    ms: float
    gpu: str


def recorded() -> list[Case]:
    """Return the rows of all results.json, and of tables that were kept without one."""
    cases = []
    for path in sorted(RECORDS.glob("*/**/results.json")):
        done = json.loads(path.read_text())
        gpu = "h200" if "H200" in (done["device"] or "") else "h100"
        for row in done["rows"]:
            if row["ms"]:
                source = str(path.parent.relative_to(RECORDS))
                cases.append(
                    Case(
                        source,
                        row["name"],
                        train_flags(row["command"]),
                        row["gpus"],
                        row["ms"],
                        gpu,
                    )
                )
    by_name = {row.name: row for row in rows.chosen(["345m"], None, 1)}
    for path in sorted(RECORDS.glob("2026-11-23-second-house/*[12].txt")):
        for name, ms in re.findall(r"^(345M.*?)  +[\d,]+ +([\d.]+)  ", path.read_text(), re.M):
            words = f"{by_name[name].flags} --vocab-size 50257"
            cases.append(
                Case(path.parent.name, f"{name} ({path.stem})", words, 1, float(ms), "h100")
            )
    return cases + [
        case for path in sorted(RECORDS.glob("*-plan/*.jsonl")) for case in from_lines(path)
    ]


def train_flags(command: str) -> str:
    return shlex.join(shlex.split(command)[shlex.split(command).index("train") + 1 :])


def from_lines(path: Path) -> list[Case]:
    """Return the cases of a file of JSON lines."""
    lines = [row for row in map(json.loads, path.read_text().splitlines()) if "flags" in row]
    return [
        Case(
            path.stem,
            f"line {i}",
            row["flags"],
            row.get("world", 1),
            own_ms(path, row),
            gpu_of(row["device"]),
        )
        for i, row in enumerate(lines, 1)
        # others waited for a busy host
        if row.get("ms") and (row.get("graphs", True) or row.get("quiet"))
    ]


def own_ms(path: Path, row: dict[str, Any]) -> float:
    """Return the milliseconds of a step without what else was measured with it."""
    compared = COMPARED_MS * row["parameters"] if path.stem == "replicas-compared" else 0.0
    return float(row["ms"]) - compared


def gpu_of(device: str) -> str:
    return "h200" if "H200" in device else "h100"


def halves(cases: list[Case]) -> tuple[list[Case], list[Case]]:
    """Return the cases that the model was fitted to, and those that were set aside."""
    sides: tuple[list[Case], list[Case]] = [], []
    for case in sorted(cases):
        if case.source == "fresh":  # taken when the model was finished
            sides[1].append(case)
            continue
        sides[random.Random(f"{SEED} {case.source} {case.name}").randrange(2)].append(case)
    return sides


def predict(case: Case, is_estimated: bool = False) -> StepTime:
    return predicted_step(case.words, case.world, load_profile(case.gpu), is_estimated)


def predicted_step(
    flags_of_train: str, world: int, profile: DeviceProfile, is_estimated: bool = False
) -> StepTime:
    """Return the prediction of a configuration's step on such devices, measured if it can be."""
    words = shlex.split(flags_of_train)
    if "--world-size" not in words:
        words += ["--world-size", str(world)]
    config = flags.parse_settings(TrainConfig, words, "meshwright train", check=False).config
    p = config.parallel
    size = config.tokenizer.vocab_size or 0
    padded = padded_size(
        size, config.model.make_vocab_size_divisible_by, p.tensor_model_parallel_size, None
    )
    measured = None if is_estimated else measured_operations(config, padded, profile)
    return terms_of(config, padded, profile, measured=measured).result()


def show(cases: list[Case], with_parts: bool = False, is_estimated: bool = False) -> None:
    errors = []
    for case in cases:
        try:
            predicted = predict(case, is_estimated)
        except UserError as error:  # flags of then that are refused now
            print(f"{case.source[-28:]:28} {case.name:28} left out: {error}")
            continue
        ms = 1000 * predicted.seconds
        errors.append(abs(ms / case.ms - 1))
        print(
            f"{case.source[-28:]:28} {case.name:28} {case.ms:9.1f} {ms:9.1f} {ms / case.ms - 1:+7.1%}",
            end="",
        )
        print(
            "  " + " ".join(f"{n} {1000 * s:.1f}" for n, s in predicted.parts.items())
            if with_parts
            else ""
        )
        if with_parts and case.name.startswith("line"):
            print("      ", case.words)
    print(f"{len(errors)} cases: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--half", choices=("fitted", "other"), default="fitted", help="half of the cases"
    )
    parser.add_argument(
        "--lines", type=Path, nargs="*", default=[], help="files of JSON lines, beside the records"
    )
    parser.add_argument("--parts", action="store_true", help="show the terms of each prediction")
    parser.add_argument(
        "--estimate", action="store_true", help="by the closed form, which nothing is measured for"
    )
    c = parser.parse_args()
    fitted, other = halves([*recorded(), *(case for path in c.lines for case in from_lines(path))])
    show(fitted if c.half == "fitted" else other, c.parts, c.estimate)


if __name__ == "__main__":
    main()
