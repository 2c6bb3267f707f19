"""Number formats and fp16's loss scale."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.settings.schema import Precision


def dtype_of(p: Precision) -> torch.dtype:
    """The format of weights and activations."""
    return {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[
        p.dtype
    ]


class LossScale:
    """Megatron's rule: halve on overflow once the hysteresis is used up, double after a window of clean steps.

    The hysteresis is refilled only when the scale grows, so from the start the first overflow changes nothing and each
    further one halves. Without --fp16 the scale is 1 and never moves.
    """

    def __init__(self, p: Precision) -> None:
        self.p = p
        self.dynamic = p.fp16 and p.loss_scale is None
        self.scale = float(p.initial_loss_scale if self.dynamic else (p.loss_scale or 1.0) if p.fp16 else 1.0)
        self.clean = 0
        self.hysteresis = p.hysteresis
        self.in_a_row = 0  # overflows

    def update(self, overflow: bool) -> None:
        self.in_a_row = self.in_a_row + 1 if overflow else 0
        if not self.dynamic:
            return
        if overflow:
            self.clean = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale / 2, self.p.min_loss_scale)
            return
        self.clean += 1
        if self.clean >= self.p.loss_scale_window:
            self.clean, self.hysteresis, self.scale = 0, self.p.hysteresis, self.scale * 2

    def may_overflow(self, scale: float) -> bool:
        """Whether an overflow at this scale is a mere skip.

        A dynamic scale at its minimum has nowhere to go; a constant one that overflows again and again never had.
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
        if self.dynamic and state["dynamic"]:  # a scale of 1 from another format says nothing
            self.scale, self.clean = float(state["scale"]), int(state["growth_tracker"])
            self.hysteresis = int(state["hysteresis_tracker"])
