"""Figures of logged steps and validations, and their lines in the log, which scripts read.

The log has Megatron's lines. `FORMS` are other forms of a step's line, for --log-format.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshwright.training.log.columns import STEP_COLUMNS


@dataclass(frozen=True)
class RunSizes:
    """The size of a run, and where this attempt begins."""

    steps: int  # all steps of the run
    samples: int | None  # the same in samples, with --train-samples
    sequence: int  # tokens of a sample, of the longest ones if samples grow
    micro_batch: int  # samples of one micro-batch of every replica together
    devices: int
    flops_per_token: float  # of a sample of that length
    peak: float | None  # FLOP/s of a device, if known
    iteration: int = 0  # steps that earlier attempts have done
    consumed: int = 0  # samples of these steps
    # FLOPs of a token by the length of the sample, with --seq-length-schedule
    shorter: dict[int, float] = field(default_factory=dict)

    def tokens(self, step: dict[str, Any]) -> int:
        """Return the tokens of a step by its columns."""
        return int(step["batch"] * step.get("length", self.sequence))

    def flops(self, step: dict[str, Any]) -> float:
        """Return the FLOPs of a step by its columns."""
        each = self.shorter.get(step.get("length", self.sequence), self.flops_per_token)
        return self.tokens(step) * each


@dataclass(frozen=True)
class Interval:
    """The steps since the line before, up to and including `iteration`."""

    run: RunSizes
    iteration: int
    consumed: int  # samples since the run's first step
    lr: float  # of the next step, as Megatron prints it
    steps: list[dict[str, Any]]  # STEP_COLUMNS of each
    seconds: float
    memory: int | None  # peak bytes, if known

    @property
    def loss(self) -> float:
        """Mean loss of the steps that were not skipped; of all, if all were."""
        applied = [step for step in self.steps if not step["skipped"]] or self.steps
        return float(sum(step["loss"] for step in applied) / len(applied))

    @property
    def skipped(self) -> int:
        return sum(step["skipped"] for step in self.steps)

    @property
    def samples_per_second(self) -> float:
        return float(sum(step["batch"] for step in self.steps) / self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(self.run.tokens, self.steps)) / self.seconds

    @property
    def flops(self) -> float:
        """FLOP/s of each device."""
        return sum(map(self.run.flops, self.steps)) / self.seconds / self.run.devices

    @property
    def mfu(self) -> float | None:
        return self.flops / self.run.peak if self.run.peak else None

    @property
    def seconds_left(self) -> float:
        run = self.run
        # If the run counts steps, those to come are taken to be as large as the last one.
        left: float = (run.steps - self.iteration) * self.steps[-1]["batch"]
        if run.samples:
            left = run.samples - self.consumed
        # While samples grow, those to come are taken to be of the last length.
        longer: float = self.run.sequence / self.steps[-1].get("length", self.run.sequence)
        return max(left * longer / self.samples_per_second, 0)

    def in_megatrons_form(self) -> str:
        last = self.steps[-1]
        numbers = last | {"lr": self.lr, "loss": scientific(self.loss)}
        # Megatron leaves out what it knows of the gradients of a step that it skips.
        for name in ("grad_norm", "num_zeros"):
            if last["skipped"] and not math.isfinite(last.get(name, 0)):
                del numbers[name]
        columns = [c for c in STEP_COLUMNS if c.line and c.name in numbers]
        of_columns = [column.line.format(numbers[column.name]) for column in columns]
        ms = self.seconds / len(self.steps) * 1e3
        nan = sum(not math.isfinite(step["loss"]) for step in self.steps)
        # Scripts find the parts by words and order; parts that Megatron lacks come at the end.
        parts = [
            f" iteration {self.iteration:8d}/{self.run.steps:8d}",
            f"consumed samples: {self.consumed:12d}",
            f"elapsed time per iteration (ms): {ms:.1f}",
            *of_columns,
            f"number of skipped iterations: {self.skipped:3d}",
            f"number of nan iterations: {nan:3d}",
            f"samples per second: {self.samples_per_second:.3f}",
            f"TFLOPs: {self.flops / 1e12:.2f}",
            f"tokens per second: {self.tokens_per_second:.0f}",
        ]
        if self.run.peak and self.mfu is not None:
            parts.append(f"MFU: {100 * self.mfu:.1f}% of {self.run.peak / 1e12:.0f} TFLOP/s")
        if self.memory:
            parts.append(f"memory (GiB): {self.memory / 2**30:.2f}")
        left = datetime.timedelta(seconds=round(self.seconds_left))
        parts.append(f"ETA: {left}")
        return " | ".join(parts) + " |"

    def in_libais_form(self) -> str:
        """Return LiBai's line, which counts iterations from 0."""
        steps = len(self.steps)
        waited = sum(step["data_ms"] for step in self.steps) / 1e3 / steps
        left = datetime.timedelta(seconds=int(self.seconds_left))
        return (
            f" eta: {left}  iteration: {self.iteration - 1}/{self.run.steps}  "
            f"consumed_samples: {self.consumed}  total_loss: {self.loss:.4g}  "
            f"time: {self.seconds / steps:.4f} s/iter  data_time: {waited:.4f} s/iter "
            f"total_throughput: {self.samples_per_second:.2f} samples/s lr: {self.lr:.2e}  "
        )

    def named(self) -> dict[str, str]:
        """Return the figures of the forms "table" and "normal", by OneFlow's names."""
        return {
            "step": f"{self.iteration}",
            "micro_batches": f"{self.consumed // self.run.micro_batch}",
            "samples": f"{self.consumed}",
            "throughput": f"{self.samples_per_second:.5f}",
            "latency": f"{self.seconds / len(self.steps):.5f}",
            "loss": f"{self.loss:.5f}",
        }


def scientific(value: float) -> str:
    """Return a number in Megatron's form; nan and inf, which E would capitalise, as they are."""
    return f"{value:.6E}" if math.isfinite(value) else str(value)


# OneFlow's columns and their widths
WIDTHS = {
    "step": 8,
    "micro_batches": 15,
    "samples": 15,
    "throughput": 10,
    "latency": 10,
    "loss": 10,
}


def table_row(cells: dict[str, str]) -> str:
    return "| " + " | ".join(cells[name].ljust(width) for name, width in WIDTHS.items()) + " |"


@dataclass(frozen=True)
class Form:
    """A form of the steps' lines on stdout.

    All other lines are the same in every form: settings, validations, saved checkpoints, notices.
    """

    step: Callable[[Interval], str]
    head: str = ""  # printed once, before the first step
    start: str = "training ..."  # when the first step begins


MEGATRON = Form(Interval.in_megatrons_form)
# By the values of --log-format; the others are MEGATRON
FORMS = {
    "table": Form(
        lambda x: table_row(x.named()),
        head=f"{table_row({n: n for n in WIDTHS})}\n{table_row({n: '-' * width for n, width in WIDTHS.items()})}",
        start="Training...",
    ),
    "libai": Form(Interval.in_libais_form),
    "normal": Form(
        lambda x: "".join(f"{name}={value}," for name, value in x.named().items()),
        start="Training...",
    ),
}


def in_deepspeeds_form(step: int, loss: float, steps: int, samples: int, seconds: float) -> str:
    """Return the line of DeepSpeed's engine: the last step, and the speed of the last `steps`."""
    speed = samples / seconds
    return f"steps: {step} loss: {loss:.4f} iter time (s): {seconds / steps:.3f} samples/sec: {speed:.3f}"


@dataclass(frozen=True)
class Check:
    """The loss of a validation or test set."""

    iteration: int
    name: str  # "validation" or "test"
    loss: float
    is_at_end: bool = False  # whether it follows the last step, and may repeat an iteration
    dataset: str = ""  # given only if there are several
    seconds: float = 0.0  # that it took
    by_position: dict[str, float] = field(default_factory=dict)  # losses by ranges of positions
    # Losses by pairs of token files, if there are several.
    by_data: dict[str, float] = field(default_factory=dict)
    ema_loss: float | None = None  # of the average of --ema

    @property
    def ppl(self) -> float:
        """The perplexity exp(loss), capped as in Megatron."""
        return math.exp(min(20, self.loss)) if math.isfinite(self.loss) else math.nan

    @property
    def title(self) -> str:
        return f"{self.name} on {self.dataset}" if self.dataset else self.name

    @property
    def when(self) -> str:
        """The time in Megatron's words."""
        if not self.is_at_end:
            return f"iteration {self.iteration}"
        return f"the end of training for {'test' if self.name == 'test' else 'val'} data"

    def in_megatrons_form(self) -> str:
        """Return the line between two rules."""
        where = f"{self.when} on {self.dataset}" if self.dataset else self.when
        loss, ppl = scientific(self.loss), scientific(self.ppl)
        line = f" validation loss at {where} | lm loss value: {loss} | lm loss PPL: {ppl} | "
        if self.ema_loss is not None:
            line += f"lm loss value of the average: {scientific(self.ema_loss)} | "
        rule = "-" * (len(line) + 1)
        return f"{rule}\n{line}\n{rule}"
