"""A validation's loss by data set and by position, in any layout."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.data.samples import Dataset, OrderedSamples
from meshwright.model.loss import first_positions, range_names
from meshwright.parallel.parallel_model import ParallelModel


class LossParts:
    """Sums of losses, and numbers of tokens, by data set and range of positions.

    A position is that of the model: the place in the sample, or in the document if they restart.
    """

    def __init__(self, dataset: Dataset, length: int, net: ParallelModel) -> None:
        self.dataset = dataset
        self.length = length
        self.net = net
        # A caller's own data set need not tell where a sample comes from.
        self.sources = list[str]()
        if isinstance(dataset, OrderedSamples):
            self.sources = dataset.list_sources()
        self.numbers = {source: number for number, source in enumerate(self.sources)}
        self.firsts = torch.tensor(first_positions(length), device=net.device)
        # [losses and tokens, data sets, ranges of positions]
        shape = 2, max(len(self.sources), 1), len(self.firsts)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=net.device)

    def add(self, samples: list[int], batch: Batch, losses: Tensor) -> None:
        """Add the losses [B, T] of the samples with these numbers, for this rank's columns."""
        mask = batch.loss_mask
        if mask is None:
            mask = torch.ones_like(losses)
        values = torch.stack((losses * mask, mask)).double()  # [2, B, T]

        # The range of positions that each column is in, as its index in `firsts`.
        positions = batch.position_ids
        if positions is None:
            columns = losses.shape[1]
            first = self.net.layout.at("cp") * columns
            positions = first + torch.arange(columns, device=losses.device)[None]
        ranges = torch.bucketize(positions, self.firsts, right=True) - 1
        in_range = F.one_hot(ranges, len(self.firsts)).double()
        in_range = in_range.expand(len(losses), -1, -1)

        # The data set that each sample comes from, as its index in `sources`.
        numbers = torch.tensor([self.number_of(sample) for sample in samples])
        of_source = F.one_hot(numbers, self.sums.shape[1])
        of_source = of_source.to(losses.device, torch.float64)

        # Matrix products, because a GPU adds up by index in no fixed order. v: losses and tokens,
        # b: samples, t: columns, r: ranges of positions, s: data sets.
        by_sample = torch.einsum("vbt,btr->vbr", values, in_range)
        self.sums += torch.einsum("vbr,bs->vsr", by_sample, of_source)

    def number_of(self, sample: int) -> int:
        """Return the number of the data set that a sample of the validation comes from."""
        if not isinstance(self.dataset, OrderedSamples):
            return 0
        # A validation goes on where the one before ended; after its last sample a set begins again.
        return self.numbers[self.dataset.source_of(sample % len(self.dataset))]

    def merge(self) -> None:
        """Add up the sums of all ranks."""
        if self.net.layout.world > 1:
            dist.all_reduce(self.sums)

    @property
    def by_position(self) -> dict[str, float]:
        """The mean loss of each range of positions that has a token."""
        return named_means(range_names(self.length), self.sums.sum(1))

    @property
    def by_data(self) -> dict[str, float]:
        """The mean loss of each data set that has a token; empty if there is only one set."""
        return named_means(self.sources, self.sums.sum(2)) if len(self.sources) > 1 else {}


def named_means(names: list[str], sums: Tensor) -> dict[str, float]:
    """Return the mean of each name whose count is not 0, from sums and counts [2, names]."""
    totals, counts = sums.tolist()
    means = {}
    for name, total, count in zip(names, totals, counts, strict=True):
        if count:
            means[name] = total / count
    return means
