"""Learning rate and weight decay as pure functions of samples, counted over successful steps only.

Samples, not iterations, so that a changing batch size moves along the same curve (Megatron's convention). Step k is
made at the samples of the steps before it: with a warm-up the very first learning rate is 0.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from meshwright.config import TrainConfig
from meshwright.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """Everything the curve depends on; saved with a checkpoint and compared on resume."""

    max_lr: float
    min_lr: float
    warmup: float  # samples
    decay: int  # samples
    style: str
    start_wd: float
    end_wd: float
    wd_samples: int
    wd_style: str

    def lr(self, samples: int) -> float:
        if self.warmup > 0 and samples <= self.warmup:
            return self.max_lr * samples / self.warmup
        if self.style == "constant":
            return self.max_lr
        if samples > self.decay:
            return self.min_lr
        ratio = (samples - self.warmup) / (self.decay - self.warmup)
        left = 1 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1)
        return self.min_lr + (self.max_lr - self.min_lr) * left

    def wd(self, samples: int) -> float:
        return self.end_wd  # ramps are not built yet, so start and end are equal


def from_config(c: TrainConfig) -> Schedule:
    o = c.optimizer
    assert o.lr is not None and c.training.train_iters is not None
    batch = c.global_batch
    decay = (o.lr_decay_iters or c.training.train_iters) * batch
    warmup = o.lr_warmup_iters * batch if o.lr_warmup_fraction is None else o.lr_warmup_fraction * decay
    return Schedule(
        max_lr=o.lr, min_lr=o.min_lr, warmup=warmup, decay=decay, style=o.lr_decay_style, start_wd=o.weight_decay,
        end_wd=o.weight_decay, wd_samples=c.training.train_iters * batch, wd_style=o.weight_decay_incr_style,
    )  # fmt: skip


# What Megatron calls each value in its log, and the flag that sets it.
_CALLED = {
    "max_lr": ("learning rate", "--lr"),
    "min_lr": ("minimum learning rate", "--min-lr"),
    "warmup": ("warmup iterations", "--lr-warmup-fraction or --lr-warmup-iters"),
    "decay": ("total number of iterations", "--lr-decay-iters or --global-batch-size"),
    "style": ("learning rate decay style", "--lr-decay-style"),
    "start_wd": ("start weight decay", "--weight-decay"),
    "end_wd": ("end weight decay", "--weight-decay"),
    "wd_samples": ("total number of weight decay iterations", "--train-iters or --global-batch-size"),
    "wd_style": ("weight decay incr style", "--weight-decay-incr-style"),
}


def resume(ours: Schedule, saved: dict[str, Any], c: TrainConfig) -> tuple[Schedule, list[str]]:
    """The schedule to go on with, and Megatron's nine lines; a difference nobody decided about is an error."""
    lines, different, values = [], [], {}
    for name, (called, by) in _CALLED.items():
        mine, theirs = getattr(ours, name), saved[name]
        if c.optimizer.override_opt_param_scheduler:
            values[name] = mine
            lines.append(f" > overriding {called} value to {mine}")
            continue
        matters = name != "wd_samples" or ours.wd_style != "constant"  # a constant has no length
        unit = " samples" if name in ("warmup", "decay", "wd_samples") else ""
        if mine != theirs and matters and not c.optimizer.use_checkpoint_opt_param_scheduler:
            different.append(f"{called}: the checkpoint has {theirs}, the flags say {mine}{unit} ({by})")
        values[name] = theirs if matters else mine
        lines.append(f" > using checkpoint value {values[name]} for {called}")
    if different:
        raise UserError(
            "the schedule differs from the checkpoint's:\n  " + "\n  ".join(different) + "\n  to go on with the flags "
            "add --override-opt_param-scheduler, with the checkpoint's add --use-checkpoint-opt_param-scheduler"
        )
    return dataclasses.replace(ours, **values), lines
