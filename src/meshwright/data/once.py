"""Reading a validation set once, in full: no sample is left out, though all ranks take batches of one size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from meshwright.data.loader import Batch, Loader


class Once(Loader):
    """Of a loader that wraps: what fills the last batch up, samples that were there before, counts for nothing."""

    def __init__(self, whole: Loader) -> None:
        """`whole` is taken over."""
        vars(self).update(vars(whole))
        self.whole, whole.columns, whole.device = whole, None, None

    def batch_of(self, numbers: list[int], text: npt.NDArray[np.int64]) -> Batch:
        batch = self.whole.batch_of(numbers, text)
        beyond = batch.sample_ids >= len(self.dataset)
        if beyond.any():
            mask = torch.ones(batch.tokens.shape) if batch.loss_mask is None else batch.loss_mask.clone()
            mask[beyond] = 0.0
            batch = replace(batch, loss_mask=mask, unmasked=-1)  # counted anew
        if self.columns is not None:
            batch = batch.part(self.columns)
        return batch if self.device is None else batch.to(self.device)
