"""`meshwright bench`: the speed of named sets of runs on this machine, in a table and a picture."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from meshwright.apps.bench import rows
from meshwright.apps.bench.rows import Peer
from meshwright.base import device as devices
from meshwright.base.errors import DONE, UNEXPECTED, UserError
from meshwright.config import command, flags
from meshwright.config.fields import flag
from meshwright.config.problem import Problem, SettingsError, stated

ABOUT = "Measure the speed of training: each row of a SET is one run of `meshwright train`. Its flags go after --."
Wording = list[str]  # a field below is named list
Problems = list[Problem]
Peers = list[Peer]
# Flags of train that a bench sets, and what to give in their place.
BENCH_FLAGS = {
    "--train-iters": "--steps before --",
    "--run-dir": "--out before --",
    "--data-path": "--data before --",
}
BENCH_FLAGS |= dict.fromkeys(("--dry-run", "--print-config"), "--list before --")


@dataclass(frozen=True)
class BenchConfig:
    """Settings of `meshwright bench`."""

    sets: Wording = flag(
        [],
        "sets of rows, or presets (none: by this machine's devices)",
        positional=True,
        value="FORM",
    )
    rows: str | None = flag(
        None, "only the rows whose names match this regular expression", value="FORM"
    )
    list: bool = flag(
        False, "list the sets, or the rows if a set or --rows is given, and run nothing"
    )
    out: Path | None = flag(None, "folder for tables and logs (none: bench- and the time)")
    data: str | None = flag(
        None,
        "prefix of token files, made with GPT-2's vocabulary (none: random tokens)",
        value="PREFIX",
    )
    steps: int | None = flag(
        None, "steps of each row (none: the row's own number)", bound=">0", docs="evaluation"
    )
    seconds: float = flag(
        300, "most seconds for a row; then it is stopped, and the steps so far count", bound=">0"
    )
    peers: bool = flag(
        False,
        "run the same models by other programs too (transformers, megatron-core, a plain GPT), as far as installed",
    )
    peer_names: Peers = flag([], f"as --peers, but only these: {' '.join(get_args(Peer))}")
    peer_seconds: float = flag(180, "most seconds for each other program and model", bound=">0")
    profile: bool = flag(
        False, "trace three more steps of each row, and show where their time goes", docs="memory"
    )
    gpus: int | None = flag(
        None, "GPUs of the rows on several (none: all of this machine, at least 2)", bound=">0"
    )
    calibrate: bool = flag(
        False, "measure this machine for `meshwright plan` instead, and write its profile to --out"
    )
    device: str = flag(
        "auto", "device that --calibrate measures", needs="--calibrate", value="FORM", docs=""
    )

    def problems(self) -> Problems:
        if self.steps is not None and self.steps < 3:
            text = f"{stated(self, 'steps')}: the first third is warm-up; give 3 or more"
            return [Problem(("steps",), text)]
        if self.peer_seconds != type(self).peer_seconds and not self.programs:
            return [Problem(("peer_seconds",), "{peer_seconds} has no effect without {peers}")]
        if self.calibrate and (self.sets or self.rows or self.programs or self.list):
            text = (
                "{calibrate=True} runs no rows of a set; give it alone, or with {out} and {device}"
            )
            return [Problem(("calibrate",), text)]
        return []

    @property
    def programs(self) -> Wording:
        if self.peer_names:
            return [*self.peer_names]
        return [*get_args(Peer)] if self.peers else []


def main(argv: Wording) -> int:
    # What follows -- are flags of train, for all rows.
    at = argv.index("--") if "--" in argv else len(argv)
    words = argv[:at]
    extra = argv[at + 1 :]
    c = flags.parse_settings(BenchConfig, words, "meshwright bench", about=ABOUT).config
    # Flags of train in either spelling.
    for word in extra:
        name = word.partition("=")[0].replace("_", "-")
        if name in BENCH_FLAGS:
            raise UserError(f"{name} after --: each row has its own; give {BENCH_FLAGS[name]}")
    command.flags_of_train(extra)  # --help prints that of train and ends
    if c.calibrate:
        return run_calibration(c, extra)
    if c.list and not (c.sets or c.rows):
        for name, about in rows.ABOUT.items():
            print(f"{name:<10} {about}")
        print(f"\nand each preset: {' '.join(rows.presets())}")
        return DONE

    # Which rows?
    gpus = c.gpus or devices.count_accelerators()
    chosen = rows.chosen(c.sets or rows.default_sets(gpus), c.rows, gpus)
    # A number of GPUs that no row uses is a mistake of the caller's.
    most = max(row.gpus for row in chosen)
    if c.gpus and most != c.gpus:
        raise SettingsError(
            f"{{gpus={c.gpus}}}: the largest of these rows uses {most}; the flag is for the set layouts, from 2 on"
        )
    if c.list:
        for row in chosen:
            print(f"{row.name:<31} {row.steps:>3} steps  {row.flags}")
        return DONE

    # Run them.
    from meshwright.apps.bench.bench import Bench
    from meshwright.apps.bench.runs import BenchPlan

    out = out_folder(c)
    if (out / "results.json").exists():
        raise SettingsError(
            f"{{out={out}}} holds the results of an earlier bench; choose another folder"
        )
    plan = BenchPlan(
        out=out,
        data=c.data,
        steps=c.steps,
        seconds=c.seconds,
        has_profile=c.profile,
        extra=tuple(extra),
        peers=tuple(c.programs),
        peer_seconds=c.peer_seconds,
    )
    # Names of rows become names of folders, so two benches in one folder would mix.
    taken = [folder for row in chosen if (folder := plan.folder(row)).exists()]
    if out.exists() and not out.is_dir():
        taken.insert(0, out)
    if taken:
        raise SettingsError(f"{{out={out}}}: {taken[0]} exists already; choose another folder")
    bench = Bench(plan, shlex.join(["meshwright", "bench", *argv]), devices.count_accelerators())
    return UNEXPECTED if bench.run(chosen) else DONE


def out_folder(c: BenchConfig) -> Path:
    return c.out or Path(f"bench-{time.strftime('%Y%m%d-%H%M%S')}")


def run_calibration(c: BenchConfig, extra: Wording) -> int:
    if extra:
        raise SettingsError(f"after --: {extra[0]} is for rows; {{calibrate=True}} has none")
    from meshwright.apps.bench.calibrate import calibrate

    out = out_folder(c)
    out.mkdir(parents=True, exist_ok=True)
    path = calibrate(c.device, out)
    print(path.read_text(encoding="utf-8"))
    print(f"written to {path}; `meshwright plan --gpu {path}` takes it")
    return DONE
