"""The exponential moving average of the weights that --ema keeps beside them."""

from __future__ import annotations

import torch
from torch import Tensor

SWAP_CHUNK = 1 << 24  # elements that change places at a time, through a copy of 64 MiB in float32


class MovingAverage:
    """An average of master weights, which follows each applied update.

    After update t (1, 2, ...) it is d * average + (1 - d) * weights, where d is the lower of
    `decay` and (1 + t) / (10 + t): the first updates soon replace the initial weights, which would
    otherwise stay in it for some multiple of 1 / (1 - decay) updates. Nothing here waits for the
    device, so a CUDA graph can hold an update.
    """

    def __init__(self, decay: float, masters: list[Tensor]) -> None:
        self.decay = decay
        self.masters = masters
        self.values = [torch.zeros_like(x) for x in masters]
        device = masters[0].device if masters else torch.device("cpu")
        self.count = torch.zeros((), dtype=torch.float64, device=device)  # updates since it began

    def restart(self) -> None:
        """Begin with the weights as they are."""
        torch._foreach_copy_(self.values, self.masters)
        self.count.zero_()

    def update(self, is_finite: Tensor) -> None:
        """Follow an update of the weights, if it was applied."""
        # A skipped update counts 0, so that its step is 0 too.
        applied = is_finite.to(self.count)
        self.count += applied
        decay = ((1 + self.count) / (10 + self.count)).clamp(max=self.decay)
        step = (1 - decay) * applied
        for value, master in zip(self.values, self.masters, strict=True):
            value.lerp_(master, step.to(value.dtype))

    def swap(self) -> None:
        """Let the average and the weights change places, bit for bit."""
        # A part at a time, so that the copy in between stays small.
        for value, master in zip(self.values, self.masters, strict=True):
            parts = (torch.split(x.view(-1), SWAP_CHUNK) for x in (value, master))
            for a, b in zip(*parts, strict=True):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
