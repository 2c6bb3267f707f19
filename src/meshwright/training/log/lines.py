"""Figures of logged steps and validations, and the lines of them, which scripts read.

The log has Megatron's lines. `FORMS` are other forms of a logged step, for --log-format.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Interval:
    """The steps since the line before, up to and including `iteration`."""

    iteration: int
    total: int  # steps of the run
    consumed: int  # samples since the run's first step
    steps: int
    seconds: float
    data_seconds: float  # of these, waiting for the data
    lr: float  # of the next step, as Megatron prints it
    values: dict[str, Any]  # of the last step
    loss: float  # mean of the steps that were not skipped; if all were, of what they found
    skipped: int
    nan: int
    samples_per_second: float
    tokens_per_second: float
    flops: float  # per second and device
    peak: float | None  # FLOP/s of the device, if known
    memory: int | None  # peak bytes, if known
    left: float  # seconds
    micro_batches: int  # of one replica, since the run's first step

    @property
    def mfu(self) -> float | None:
        return self.flops / self.peak if self.peak else None

    def in_megatrons_form(self) -> str:
        values = self.values
        parts = [
            f" iteration {self.iteration:8d}/{self.total:8d}",
            f"consumed samples: {self.consumed:12d}",
            f"elapsed time per iteration (ms): {self.seconds / self.steps * 1e3:.1f}",
            f"learning rate: {self.lr:.3E}",
            f"global batch size: {values['batch']:5d}",
            f"lm loss: {scientific(self.loss)}",
            f"loss scale: {values['loss_scale']:.1f}",
            f"grad norm: {values['grad_norm']:.3f}",
        ]
        parts += [f"num zeros: {values['num_zeros']:.1f}"] if "num_zeros" in values else []
        parts += [f"params norm: {values['params_norm']:.3f}"] if "params_norm" in values else []
        parts += [
            f"number of skipped iterations: {self.skipped:3d}",
            f"number of nan iterations: {self.nan:3d}",
            f"samples per second: {self.samples_per_second:.3f}",
            f"TFLOPs: {self.flops / 1e12:.2f}",
            f"tokens per second: {self.tokens_per_second:.0f}",
        ]
        if self.peak and self.mfu is not None:
            parts.append(f"MFU: {100 * self.mfu:.1f}% of {self.peak / 1e12:.0f} TFLOP/s")
        if self.memory:
            parts.append(f"memory (GiB): {self.memory / 2**30:.2f}")
        return " | ".join([*parts, f"ETA: {datetime.timedelta(seconds=round(self.left))}"]) + " |"

    def in_libais_form(self) -> str:
        """Return LiBai's line, which counts iterations from 0."""
        seconds, waited = self.seconds / self.steps, self.data_seconds / self.steps
        return (
            f" eta: {datetime.timedelta(seconds=int(self.left))}  iteration: {self.iteration - 1}/{self.total}  "
            f"consumed_samples: {self.consumed}  total_loss: {self.loss:.4g}  time: {seconds:.4f} s/iter  "
            f"data_time: {waited:.4f} s/iter total_throughput: {self.samples_per_second:.2f} samples/s "
            f"lr: {self.lr:.2e}  "
        )

    def named(self) -> dict[str, str]:
        """Return the figures of the table and the normal form, by OneFlow's names."""
        return {
            "step": f"{self.iteration}",
            "micro_batches": f"{self.micro_batches}",
            "samples": f"{self.consumed}",
            "throughput": f"{self.samples_per_second:.5f}",
            "latency": f"{self.seconds / self.steps:.5f}",
            "loss": f"{self.loss:.5f}",
        }


def scientific(value: float) -> str:
    """Return a number in Megatron's form; nan and inf, which E would capitalise, as they are."""
    return f"{value:.6E}" if math.isfinite(value) else str(value)


# OneFlow's columns and their widths
WIDTHS = {"step": 8, "micro_batches": 15, "samples": 15, "throughput": 10, "latency": 10, "loss": 10}


def table_row(cells: dict[str, str]) -> str:
    return "| " + " | ".join(cells[name].ljust(width) for name, width in WIDTHS.items()) + " |"


@dataclass(frozen=True)
class Form:
    """A form of the log's lines of steps on stdout.

    All other lines stay as they are: settings, validations, saved checkpoints, notices.
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
    "normal": Form(lambda x: "".join(f"{name}={value}," for name, value in x.named().items()), start="Training..."),
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
    when: str  # in Megatron's words
    loss: float
    dataset: str = ""  # given only if there are several
    seconds: float = 0.0  # that it took

    @property
    def ppl(self) -> float:
        """The perplexity exp(loss), capped as in Megatron."""
        return math.exp(min(20, self.loss)) if math.isfinite(self.loss) else math.nan

    @property
    def title(self) -> str:
        return f"{self.name} on {self.dataset}" if self.dataset else self.name

    @property
    def is_at_end(self) -> bool:
        """Whether it is the one after the last step, which may repeat an iteration."""
        return self.when.startswith("the end")

    def in_megatrons_form(self) -> str:
        """Return the line between two rules."""
        where = f"{self.when} on {self.dataset}" if self.dataset else self.when
        loss, ppl = scientific(self.loss), scientific(self.ppl)
        line = f" validation loss at {where} | lm loss value: {loss} | lm loss PPL: {ppl} | "
        rule = "-" * (len(line) + 1)
        return f"{rule}\n{line}\n{rule}"
