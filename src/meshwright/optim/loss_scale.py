"""Number formats and the loss scale of fp16."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.config.schema import Precision


def dtype_of(p: Precision) -> torch.dtype:
    """Return the format of weights and activations."""
    dtype = getattr(torch, p.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


class LossScale:
    """Megatron's loss scale: halved on overflow after the hysteresis, doubled after clean steps.

    The hysteresis is refilled only when the scale grows. With the default of 2, the first overflow
    changes nothing and each one after it halves the scale. Without --fp16 the scale stays 1.
    """

    def __init__(self, p: Precision) -> None:
        self.p = p
        self.dynamic = p.fp16 and p.loss_scale is None
        self.scale = 1.0
        if self.dynamic:
            self.scale = float(p.initial_loss_scale)
        elif p.fp16:
            self.scale = float(p.loss_scale or 1.0)
        self.clean = 0
        self.hysteresis = p.hysteresis
        self.in_a_row = 0  # overflows

    def update(self, is_overflow: bool) -> None:
        # A fixed scale cannot answer, but overflows in a row end the run in the end.
        self.in_a_row = self.in_a_row + 1 if is_overflow else 0
        if not self.dynamic:
            return
        if is_overflow:
            self.clean = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale / 2, self.p.min_loss_scale)
            return
        # Try a larger scale after enough steps without an overflow.
        self.clean += 1
        if self.clean >= self.p.loss_scale_window:
            self.clean = 0
            self.hysteresis = self.p.hysteresis
            self.scale = self.scale * 2

    def may_overflow(self, scale: float) -> bool:
        """Whether an overflow at this scale is harmless, as it only skips a step.

        It is not where a dynamic scale cannot fall further, nor, with a fixed one, 20 times in a
        row.
        """
        return scale > self.p.min_loss_scale if self.dynamic else self.in_a_row < 20

    def state(self) -> dict[str, Any]:
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "growth_tracker": self.clean,
            "hysteresis_tracker": self.hysteresis,
            "in_a_row": self.in_a_row,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.in_a_row = int(state.get("in_a_row", 0))
        if self.dynamic and state["dynamic"]:  # a scale of 1 from another format means nothing
            self.scale = float(state["scale"])
            self.clean = int(state["growth_tracker"])
            self.hysteresis = int(state["hysteresis_tracker"])
