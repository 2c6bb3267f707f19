"""The history of a run: metrics.jsonl and config.toml."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Reversible, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.errors import bad_data, not_a_run, too_old
from meshwright.base.files import parse_toml, read_small
from meshwright.base.runs.rows import DAMAGED, METRICS, DamagedRow, explain_damage, read_lines

CONFIG_LIMIT = 4 << 20  # bytes of config.toml
PATIENCE = 900.0  # seconds without a new row after which a run counts as killed


@dataclass(frozen=True, slots=True)
class LoggedStep:
    iteration: int
    consumed_samples: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    ms: float
    tokens_per_second: float
    mfu: float | None
    memory: float | None
    length: int | None  # tokens of each sample, if --seq-length-schedule changes it


@dataclass(frozen=True, slots=True)
class Validation:
    iteration: int
    name: str  # "validation" or "test"
    loss: float
    ppl: float
    dataset: str  # its name where there are several
    # whether it followed the last step, which may have been validated before
    is_at_end: bool
    by_position: dict[str, float]
    # losses by pairs of token files, if there are several
    by_data: dict[str, float]
    ema_loss: float | None  # of the average of --ema

    @property
    def title(self) -> str:
        return f"{self.name} on {self.dataset}" if self.dataset else self.name


@dataclass(frozen=True, slots=True)
class Mean:
    """The validation loss of the mean of the weights of some steps."""

    steps: list[int]
    loss: float


# Rows about what is done between steps, whose seconds no step includes.
PAUSES = {"save": "saves", "validation": "validations", "scores": "scores", "sample": "samples"}
PAUSES |= {"average": "validations", "rollback": "rollbacks", "nonfinite": "searches for a fault"}


@dataclass
class Attempt:
    number: int
    start: dict[str, Any]
    began: int  # the iteration it started from
    last: int  # the iteration it reached
    seconds: float = 0.0  # in steps and saves, including those that a later attempt repeated
    steps: float = 0.0  # seconds in steps
    # seconds between them, by what they went into
    pauses: dict[str, float] = field(default_factory=dict)
    first: float = 0.0  # when its first step was done, in seconds since 1970
    latest: float = 0.0  # the time of its last row
    end: dict[str, Any] | None = None  # None: still running, or killed
    unsaved: list[int] = field(default_factory=list)  # the iterations whose save failed
    rollbacks: list[int] = field(default_factory=list)  # the iterations at which it went back
    # rank: how much slower than the others it is
    slow: dict[int, str] = field(default_factory=dict)

    @property
    def startup(self) -> float:
        """Seconds from its beginning to its first row."""
        return _time(self.start.get("ready", 0))

    @property
    def begun(self) -> float:
        return float(self.start["time"]) - self.startup

    def note(self, row: dict[str, Any], now: float) -> None:
        """Take note of the time of one of its rows, and of what went into a pause between steps."""
        if kind := PAUSES.get(row["event"]):
            seconds = _time(row.get("seconds", 0))
            self.pauses[kind] = self.pauses.get(kind, 0.0) + seconds
            if kind == "saves":
                self.seconds += seconds
        self.latest = max(self.latest, now)


@dataclass(frozen=True, slots=True)
class Sample:
    """Text that the model wrote during training (--sample-interval)."""

    iteration: int
    number: int  # of the prompt
    prompt: str
    text: str


class Record:
    """The content of metrics.jsonl, taken row by row; the steps are left to the caller.

    An attempt that starts at N undoes what earlier ones did after N, and so does a rollback to N.
    So the last row of an iteration counts, and a run started anew is not mixed with the one before.

    The losses of several validation sets are one where a run has one: their mean, as --keep-best
    compares it. The final one is that after the last step, if the run ended with a validation.
    """

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        # Keyed by title, iteration, and whether it was the validation at the end of the run.
        self.checks: dict[tuple[str, int, bool], Validation] = {}
        self.samples: dict[tuple[int, int], Sample] = {}
        self.means: dict[int, Mean] = {}  # of --average-last, by the iteration at which a run ended
        self.scores: dict[str, dict[int, float]] = {}  # of --eval-tasks: name: iteration: score

    def _undo_after(self, kept: int) -> None:
        """Forget what came later than an iteration, which a start or a rollback goes back to."""
        for check, validation in list(self.checks.items()):
            if validation.iteration > kept:
                del self.checks[check]
        for place, sample in list(self.samples.items()):
            if sample.iteration > kept:
                del self.samples[place]
        # The others are kept by iteration alone.
        by_iteration: list[dict[int, Any]] = [self.means, *self.scores.values()]
        for values in by_iteration:
            for iteration in list(values):
                if iteration > kept:
                    del values[iteration]

    def take(self, row: dict[str, Any]) -> None:
        """Add a row; raise one of DAMAGED for a damaged one."""
        event = row["event"]
        iteration = int(row["iteration"])
        now = _time(row.get("time", 0))
        kept = kept_until(row)
        if kept is not None:
            self._undo_after(kept)

        # What the row itself says.
        if event == "start":
            self.attempts.append(Attempt(int(row["attempt"]), row, iteration, iteration))
            row["time"] = now
        elif event == "validation":
            v = _read_validation(row, iteration)
            self.checks[v.title, iteration, v.is_at_end] = v
        elif event == "average":
            self.means[iteration] = Mean([int(step) for step in row["steps"]], float(row["loss"]))
        elif event == "sample":
            number = int(row["number"])
            self.samples[iteration, number] = Sample(
                iteration, number, str(row["prompt"]), str(row["text"])
            )
        elif event == "scores":
            for name, score in row["scores"].items():
                self.scores.setdefault(name, {})[iteration] = float(score)
        elif event == "save-failed" and self.attempts:
            self.attempts[-1].unsaved.append(iteration)
        elif event == "rollback" and self.attempts:
            self.attempts[-1].rollbacks.append(iteration)
        elif event == "straggler" and self.attempts:
            slow = self.attempts[-1].slow
            rank = int(row["rank"])
            slow.pop(rank, None)  # the newest comes last
            if row["slow"]:
                slow[rank] = f"{row['text']} (step {iteration})"
        elif event == "end" and self.attempts and self.attempts[-1].number == int(row["attempt"]):
            self.attempts[-1].end = row
            row["time"] = now
        # Its time, and that of a pause.
        if self.attempts and self.attempts[-1].number == row.get("attempt"):
            self.attempts[-1].note(row, now)

    def take_steps(self, last: int, seconds: float, times: tuple[float, float]) -> None:
        """Count steps up to iteration `last` as the newest attempt's; `times` of first and last."""
        if not self.attempts:
            return
        newest = self.attempts[-1]
        newest.last = last
        newest.seconds += seconds
        newest.steps += seconds
        # The first step of an attempt ends its start, or its recovery.
        newest.first = newest.first or times[0]
        newest.latest = max(newest.latest, times[1])

    @property
    def validations(self) -> list[Validation]:
        return sorted(self.checks.values(), key=lambda v: (v.iteration, v.is_at_end))

    def sets(self, name: str = "validation") -> dict[str, list[Validation]]:
        """Return the validations (or tests) of each data set, in order."""
        sets: dict[str, list[Validation]] = {}
        for v in self.validations:
            # Every name but test's is one of validation.
            if (v.name == "test") == (name == "test"):
                sets.setdefault(v.dataset, []).append(v)
        return sets

    def mean_validations(self) -> list[tuple[int, float]]:
        """Return iterations and mean losses of the sets; the last iteration may occur twice."""
        losses: dict[tuple[int, bool], list[float]] = {}
        for validations in self.sets().values():
            for v in validations:
                losses.setdefault((v.iteration, v.is_at_end), []).append(v.loss)
        means = []
        for (iteration, _), each in sorted(losses.items()):
            means.append((iteration, math.fsum(each) / len(each)))
        return means

    def best_validation(self) -> tuple[int, float] | None:
        """Return the iteration with the lowest mean loss, and that loss."""
        numbers = [(i, loss) for i, loss in self.mean_validations() if not math.isnan(loss)]
        return min(numbers, key=lambda pair: pair[1], default=None)

    def resumed_at(self) -> list[int]:
        """Return the iterations at which a run was resumed or rolled back, apart from 0."""
        marks = {attempt.began for attempt in self.attempts[1:]}
        for attempt in self.attempts:
            marks.update(attempt.rollbacks)
        return sorted(marks - {0})


class History(Record):
    """The row that counts for each iteration, in order, and all else that the rows say."""

    def __init__(self, updated: float) -> None:
        super().__init__()
        self.steps: list[LoggedStep] = []
        self.updated = updated  # seconds since 1970, of the newest row

    def final_loss(self, log_interval: Any = 1) -> tuple[float, int]:
        """Return the mean training loss at the end, and of how many steps; see final_loss."""
        losses = [s.loss for s in self.steps if not s.skipped]
        return final_loss(losses, self.steps[-1].iteration if self.steps else 0, log_interval)

    def is_running(self, now: float) -> bool:
        """Return whether the last attempt goes on: it has no end, and had a row not long ago."""
        if not self.attempts or self.attempts[-1].end is not None:
            return False
        return now - self.updated < PATIENCE


def kept_until(row: dict[str, Any]) -> int | None:
    """Return the last iteration that a row leaves as it is; None if it undoes none."""
    events = {"start": "iteration", "rollback": "to"}
    return int(row[events[row["event"]]]) if row["event"] in events else None


def read_history(folder: Path) -> History:
    path = folder / METRICS
    if not path.exists():
        raise not_a_run(folder, METRICS)
    steps: dict[int, LoggedStep] = {}
    history = History(path.stat().st_mtime)
    for number, line in enumerate(read_lines(folder), 1):
        try:
            row = json.loads(line)
            if row["event"] == "step":
                if "time" not in row:
                    raise too_old(path)
                iteration = int(row["iteration"])
                steps[iteration] = step = _read_step(row)
                now = _time(row["time"])
                history.take_steps(iteration, step.ms / 1e3, (now, now))
                continue
            history.take(row)
            if (kept := kept_until(row)) is not None:
                steps = {i: s for i, s in steps.items() if i <= kept}
        except DAMAGED as e:
            if not line.endswith(b"\n"):
                break  # the last line, cut by a kill
            what = f"{path}:{number} is not a row that a run writes: {explain_damage(e)}"
            raise bad_data(f"{what}; remove that line to read the others") from None
    history.steps = [steps[i] for i in sorted(steps)]
    return history


def _time(value: Any) -> float:
    """Return a time or a duration, which a run never writes as NaN or infinity."""
    seconds = float(value)
    if not 0 <= seconds < 1e11:
        raise DamagedRow(f"{value} is not a time")
    return seconds


def _read_step(row: dict[str, Any]) -> LoggedStep:
    # float() also reads "nan", "inf" and "-inf", which stand for what JSON has no numbers for.
    mfu = row.get("mfu")
    memory = row.get("memory")
    length = row.get("length")
    return LoggedStep(
        loss=float(row["loss"]),
        grad_norm=float(row["grad_norm"]),
        lr=float(row["lr"]),
        tokens_per_second=float(row["tokens_per_second"]),
        ms=_time(row["ms"]),
        mfu=None if mfu is None else float(mfu),
        memory=None if memory is None else float(memory),
        length=None if length is None else int(length),
        iteration=int(row["iteration"]),
        consumed_samples=int(row["consumed_samples"]),
        skipped=bool(row["skipped"]),
    )


def _read_validation(row: dict[str, Any], iteration: int) -> Validation:
    by_position = row.get("by_position", {})
    by_data = row.get("by_data", {})
    return Validation(
        iteration=iteration,
        name=str(row["name"]),
        loss=float(row["loss"]),
        ppl=float(row["ppl"]),
        dataset=str(row.get("set", "")),
        is_at_end=bool(row.get("end")),
        by_position={str(places): float(loss) for places, loss in by_position.items()},
        by_data={str(prefix): float(loss) for prefix, loss in by_data.items()},
        ema_loss=float(row["ema_loss"]) if "ema_loss" in row else None,
    )


def read_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the groups of settings in config.toml; none if the file does not exist."""
    path = folder / "config.toml"
    try:
        groups = parse_toml(read_small(path, CONFIG_LIMIT, folder).decode(errors="surrogateescape"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as e:
        raise bad_data(f"{path} is damaged: {e}") from None
    return {group: values for group, values in groups.items() if isinstance(values, dict)}


def flat_settings(groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: value for group in groups.values() for name, value in group.items()}


def final_steps(iteration: int, log_interval: Any) -> int:
    """Return the steps at the end whose mean is the final loss, as one step says little.

    It is the last logged interval, in a long run the last fiftieth of all steps.
    """
    interval = log_interval if isinstance(log_interval, int) else 1
    return min(max(1, iteration // 50, interval), sys.maxsize)


def final_loss(
    losses: Reversible[float], iteration: int, log_interval: Any = 1
) -> tuple[float, int]:
    """Return the mean training loss at the end, and of how many steps; NaN if none is finite.

    `losses` are those of steps that were not skipped, up to `iteration`. The final loss of a
    validation set is simply its last one, and its best the lowest of all.
    """
    last = itertools.islice(reversed(losses), final_steps(iteration, log_interval))
    finite = [x for x in last if math.isfinite(x)]
    return (math.fsum(finite) / len(finite) if finite else math.nan), len(finite)


def wall_time(attempts: Sequence[Attempt]) -> tuple[str, float]:
    """Return a label and seconds: start to end if all are dated, else the known steps and saves."""
    # A killed attempt has no end, so its time is not known.
    dated = [
        a.end["time"] - a.start["time"]
        for a in attempts
        if a.end and "time" in a.end and "time" in a.start
    ]
    if dated and len(dated) == len(attempts):
        return "wall time", sum(dated)
    return "time in steps and saves", sum(a.seconds for a in attempts)
