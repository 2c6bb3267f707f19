"""A place for gradients as a parameter store has it, for tests of the kernels that write there."""

from __future__ import annotations

import torch
from torch import Tensor


class Total:
    """A main_grad: a float32 total of 3.0, or of NaN if the first gradient is to overwrite it."""

    def __init__(self, parameter: Tensor, adds: bool = False) -> None:
        self.total = torch.full_like(parameter, 3.0 if adds else torch.nan, dtype=torch.float32)
        self.adds, self.ended = adds, 0

    def begin(self) -> tuple[Tensor, bool]:
        adds, self.adds = self.adds, True
        return self.total, adds

    def end(self) -> None:
        self.ended += 1
