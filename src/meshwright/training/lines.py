"""Figures of logged steps and validations, and Megatron's lines of them, which scripts read."""

from __future__ import annotations

import datetime
import math
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
    lr: float  # of the next step, as Megatron prints it
    values: dict[str, Any]  # of the last step
    loss: float | None  # mean of the steps that were not skipped
    skipped: int
    nan: int
    samples_per_second: float
    tokens_per_second: float
    flops: float  # per second and device
    peak: float | None  # FLOP/s of the device, if known
    memory: int | None  # peak bytes, if known
    left: float  # seconds

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
        ]
        parts += [] if self.loss is None else [f"lm loss: {self.loss:.6E}"]
        parts += [f"loss scale: {values['loss_scale']:.1f}", f"grad norm: {values['grad_norm']:.3f}"]
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


@dataclass(frozen=True)
class Check:
    """The loss of a validation or test set."""

    iteration: int
    name: str  # "validation" or "test"
    when: str  # in Megatron's words
    loss: float
    dataset: str = ""  # given only if there are several

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
        line = f" validation loss at {where} | lm loss value: {self.loss:.6E} | lm loss PPL: {self.ppl:.6E} | "
        rule = "-" * (len(line) + 1)
        return f"{rule}\n{line}\n{rule}"
