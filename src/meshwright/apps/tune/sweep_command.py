"""`meshwright sweep`: many trainings with other flags, a table of them and a picture."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from meshwright.apps.tune import sweep
from meshwright.apps.tune.points import Point, name_of_point, read_space
from meshwright.base.errors import DONE, UserError
from meshwright.base.records import json_ready
from meshwright.base.runs.sweeps import RECORD, read_record
from meshwright.config import checks, command, flags
from meshwright.config.fields import config_fields, default_of, flag, group, spelling, with_settings
from meshwright.config.problem import Problem, SettingsError, require, with_value
from meshwright.config.schema import TrainConfig

MOST_RUNS = 10_000
FOLDERS = ("save_hf", "tensorboard_dir")  # that a run writes into beside its own
ABOUT = (
    "Search flags of train: each point of a grid, or of random draws, is one run of `meshwright train`. Its flags go "
    "after --. DIR alone goes on with a sweep that was interrupted."
)


@dataclass(frozen=True)
@group(docs="tuning")
class SweepFlags:
    """Flags to vary, how many runs at a time, and which end early."""

    sweep_dir: Path | None = flag(
        None, "folder of the sweep, with one folder for each run", value="DIR", docs=""
    )
    grid: list[str] = flag(
        [],
        "flags and their values, all combined: lr=1e-4,3e-4 weight-decay=0,0.1; flags that change together have a :, "
        "as in hidden-size:num-layers=256:4,512:8; | stands between values that have commas",
        value="FORM",
    )
    random: list[str] = flag(
        [],
        "flags to draw at random: lr=1e-4..1e-2 is a range, log-uniform if both ends are positive; or a list, of which "
        "one is drawn",
        value="FORM",
    )
    draws: int = flag(
        16, "number of random draws; more draws later add to the first ones", bound=">0"
    )
    draw_seed: int = flag(0, "seed of the random draws", bound=">=0")
    seeds: int = flag(
        1, "repeat each point with so many seeds, from --seed of train on", bound=">0"
    )
    jobs: int | None = flag(
        None, "runs at a time (none: one for each device, or one on the CPU)", bound=">0"
    )
    devices_per_run: int = flag(1, "devices, and ranks, of each run", bound=">0")
    stop_at: list[float] = flag(
        [],
        "fractions of the steps at which the worse runs end, as 0.25 0.5 (none: no run ends early)",
    )
    stop_share: float = flag(
        0.5,
        "share of the runs that go on at each of --stop-at; 0.5 is a median rule",
        bound="[0,1)",
    )
    no_checkpoints: bool = flag(False, "let runs save nothing; an interrupted run then begins anew")
    json: bool = flag(False, "print the table as JSON")


@dataclass(frozen=True)
class SweepConfig:
    """Settings of `meshwright sweep`."""

    ADVICE: ClassVar[str] = "flags of train go after --"

    sweep: SweepFlags = SweepFlags()

    def problems(self) -> list[Problem]:
        s = self.sweep
        out = []
        if not s.sweep_dir:
            text = "a folder is needed: meshwright sweep DIR --grid lr=1e-4,3e-4 -- FLAGS OF TRAIN"
            out.append(Problem(("sweep_dir",), text, "missing"))
        for share in s.stop_at:
            if not 0 < share < 1:
                text = f"{with_value('stop_at', share)}: give fractions between 0 and 1"
                out.append(Problem(("stop_at",), text))
        if s.stop_at and not s.stop_share:
            text = "{stop_share=0} would end every run; give a share above 0"
            out.append(Problem(("stop_share",), text))
        return out


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    words = [word for word in argv[:at] if word != "--dry-run"]
    extra = argv[at + 1 :]
    parsed = command.settings(SweepConfig, argv[:at], "sweep", ABOUT, "sweep_dir")
    if parsed is None:
        return DONE
    c = parsed.config.sweep
    assert c.sweep_dir is not None
    # With anything that makes points the command says all; DIR alone goes on.
    if c.grid or c.random or extra or c.seeds > 1:
        return run_sweep(c, words, extra, parsed.dry_run)

    # The folder alone: go on with the sweep in it, by its own words, but for what is typed now.
    record = read_record(c.sweep_dir)
    if not record:
        raise SettingsError(
            f"{c.sweep_dir} holds no sweep; give {{grid}} or {{random}}, and after -- the flags of train"
        )
    words = list(record["words"])
    extra = list(record["train_flags"])
    # A folder may come from someone else, so its flags may not switch checks off.
    require_repeatable(c.sweep_dir, extra)
    # Only what was typed: defaults must not undo what the first start said.
    given = {}
    for name, source in parsed.sources.items():
        if source == "command line":
            given[name] = getattr(c, name)
    recorded = flags.parse_settings(
        SweepConfig, words, "meshwright sweep", "sweep_dir", check=False
    ).config
    repeated = with_settings(recorded, **given)
    require(checks.problems(repeated), parsed.words)
    return run_sweep(repeated.sweep, words, extra, parsed.dry_run)


def require_repeatable(folder: Path, extra: list[str]) -> None:
    """Refuse recorded flags for one start, such as --trust-pickle: who typed them is not known."""
    settings = flags.to_dict(command.flags_of_train(extra).config)
    for name, (_, f, _) in config_fields(TrainConfig).items():
        if f.metadata["once"] and settings[name] != default_of(f):
            why = "a flag for one start is taken from the command line alone"
            raise UserError(
                f"{spelling(name)} in {folder / RECORD}: {why}; type the whole command again"
            )


def run_sweep(c: SweepFlags, words: list[str], extra: list[str], dry_run: bool) -> int:
    assert c.sweep_dir is not None
    # Flags that would do nothing are refused.
    if dry_run and c.json:
        raise SettingsError(
            "{json=True} with --dry-run, which lists commands and prints no table; leave one out"
        )
    if not c.random and (c.draws, c.draw_seed) != (SweepFlags.draws, SweepFlags.draw_seed):
        raise SettingsError("{draws} and {draw_seed} are for {random}; give it, or leave them out")
    if not c.stop_at and c.stop_share != SweepFlags.stop_share:
        raise SettingsError("{stop_share} is for {stop_at}; give it, or leave {stop_share} out")

    # All runs are checked before the first begins, those that are over excepted.
    common = settings_of_all(extra)
    points = list_points(c, common.training.seed)
    refuse_shared_folders(points)
    plan = sweep.SweepPlan(
        folder=c.sweep_dir,
        train_flags=tuple(extra),
        ranks=c.devices_per_run,
        checkpoints=not c.no_checkpoints,
        stop_at=tuple(sorted(c.stop_at)),
        share=c.stop_share,
    )
    runs = sweep.join_runs(c.sweep_dir, points, extra)
    sweep.require_runs(plan, [run for run in runs.values() if run.state not in sweep.FINAL_STATES])
    if dry_run:
        for run in runs.values():
            words_of_run = shlex.join(["meshwright", *plan.command(run.name, run.point)])
            print(f"{run.state:<11} {words_of_run}")
        return DONE
    # Train them, and show all that the folder has, of earlier starts too.
    slots = sweep.find_slots(c.jobs, c.devices_per_run, common.parallel.device)
    # With --json, standard output has the JSON alone.
    status = sweep.Sweep(plan, runs, words, sys.stderr if c.json else None).run(slots)
    show_results(c.sweep_dir, list(runs.values()), c.json)
    return status


def settings_of_all(extra: list[str]) -> TrainConfig:
    """Return the settings that all runs share; refuse the flags that a sweep sets."""
    for word in extra:
        # Flags in either spelling, with or without a value.
        if (name := word.partition("=")[0].replace("_", "-")) in sweep.OWN_FLAGS:
            raise UserError(f"{name} after --: a sweep gives each run its own folder; leave it out")
    common = command.flags_of_train(extra).config
    for name in FOLDERS:
        if folder := flags.to_dict(common)[name]:
            raise UserError(
                f"{spelling(name)} {folder}: all runs would write there; leave it out, or list a folder for each"
            )
    return common


def refuse_shared_folders(points: Sequence[Point]) -> None:
    """Refuse listed folders into which several runs would write."""
    different = {name_of_point(point): point for point in points}.values()
    for name in FOLDERS:
        listed = [point[name] for point in different if point.get(name, "none") != "none"]
        shared = next((folder for folder in listed if listed.count(folder) > 1), None)
        if shared is not None:
            raise UserError(
                f"{spelling(name)} {shared}: {listed.count(shared)} runs would write there; leave it out, or join it "
                "to the other flags so that each run has its own"
            )


def list_points(c: SweepFlags, seed: int) -> list[Point]:
    """Return all points, each with its further seeds after it."""
    space = read_space(c.grid, c.random)
    if c.seeds > 1 and any("seed" in axis.names for axis in (*space.grid, *space.random)):
        raise SettingsError(
            f"{{seeds={c.seeds}}} beside values of {{seed}}: both choose seeds; leave one out"
        )
    runs = space.count(c.draws) * c.seeds
    if runs > MOST_RUNS:
        raise SettingsError(
            f"the sweep has {runs:,} runs, more than {MOST_RUNS:,}; list fewer values, or use {{random}}"
        )
    points = []
    for point in space.points(c.draws, c.draw_seed):
        points.append(point)  # with the seed of the flags
        for i in range(1, c.seeds):
            points.append({**point, "seed": str(seed + i)})
    return points


def show_results(folder: Path, runs: list[sweep.SweepRun], as_json: bool) -> None:
    from meshwright.apps.tune import results

    swept = results.swept_points(runs)
    path = results.write_picture(folder, swept)
    if as_json:
        print(json.dumps(json_ready([vars(o) for o in swept]), allow_nan=False))
    else:
        print("\n".join(["", *results.table(swept), ""]))
    print(path, file=sys.stderr if as_json else sys.stdout)
