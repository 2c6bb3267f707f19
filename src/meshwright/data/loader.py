"""Samples to batches: what one data-parallel rank reads in each step, a pure function of the consumed samples.

There is no state to save. Step n after `consumed` samples reads the samples consumed + n x global batch and on; each
block of micro-batch x ranks consecutive samples is cut into one slice for each rank (Megatron's `single` order). A
background thread reads ahead: torch releases the interpreter while it computes, so a thread is enough, costs no
second process, and hands its errors to the loop that asks for the batch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from meshwright.data.samples import Dataset
from meshwright.errors import BAD_DATA, UserError


@dataclass(frozen=True)
class Batch:
    """One micro-batch. None stands for the trivial value, so that nothing is computed or copied for it."""

    tokens: Tensor  # [B, S] int64
    labels: Tensor  # [B, S] int64: the next tokens
    sample_ids: Tensor  # [B] int64: global sample numbers
    loss_mask: Tensor | None = None  # [B, S]; None: all ones
    position_ids: Tensor | None = None  # [B, S]; None: 0 ... S - 1
    doc_ids: Tensor | None = None  # [B, S]; None: one document, causal attention over all of it

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device; to a GPU the copy runs beside the computation, from pinned memory."""
        device = torch.device(device)
        if device.type == "cuda":
            return self._map(lambda t: t.pin_memory().to(device, non_blocking=True))
        return self._map(lambda t: t.to(device))

    def pin_memory(self) -> Batch:
        return self._map(lambda t: t.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return replace(self, **{name: change(value) for name, value in vars(self).items() if value is not None})


class Loader:
    """An iterable over steps; each item is the list of a step's micro-batches for this rank.

    `wrap=True`, for validation, starts again at the first sample when the data set runs out (sample numbers go on
    counting); without it, running out is an error that names both numbers.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch: int,
        micro_batches_per_step: int,
        consumed: int,
        workers: int,
        vocab_size: int,
        rank: int = 0,
        ranks: int = 1,
        wrap: bool = False,
        pin: bool = False,
    ) -> None:
        self.dataset, self.vocab_size = dataset, vocab_size
        self.micro_batch, self.micro_batches, self.consumed = micro_batch, micro_batches_per_step, consumed
        self.workers, self.rank, self.ranks, self.wrap, self.pin = workers, rank, ranks, wrap, pin
        if not len(dataset):
            raise UserError("the data set has no sample", BAD_DATA)

    def __iter__(self) -> Generator[list[Batch], None, None]:
        """Endless: the caller stops. Closing the iterator ends the thread."""
        if self.workers == 0:
            yield from map(self.step, itertools.count())
        thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        try:
            ahead = deque(thread.submit(self.step, n) for n in range(self.workers))
            for n in itertools.count(self.workers):
                batches = ahead.popleft().result()
                ahead.append(thread.submit(self.step, n))
                yield batches
        finally:
            thread.shutdown(cancel_futures=True)

    def step(self, n: int) -> list[Batch]:
        """The micro-batches of the n-th step from `consumed` on."""
        block = self.micro_batch * self.ranks
        first = self.consumed + n * block * self.micro_batches + self.rank * self.micro_batch
        return [self.read(first + m * block) for m in range(self.micro_batches)]

    def read(self, first: int) -> Batch:
        """The micro-batch of the samples from number `first` on."""
        numbers = range(first, first + self.micro_batch)
        if numbers[-1] >= len(self.dataset) and not self.wrap:
            raise UserError(
                f"samples {first} to {numbers[-1]} are wanted, but the data set has {len(self.dataset)}: it was built "
                "for fewer steps",
                BAD_DATA,
            )
        text = np.stack([self.dataset[k % len(self.dataset)] for k in numbers])  # [B, S + 1]
        if text.min() < 0 or text.max() >= self.vocab_size:
            row, column = np.argwhere((text < 0) | (text >= self.vocab_size))[0].tolist()
            place = self.dataset.locate(numbers[row] % len(self.dataset), column)
            raise UserError(
                f"sample {numbers[row]} has id {text[row, column]} ({place}), but the tokenizer's ids are "
                f"0 ... {self.vocab_size - 1}: the data was made with another tokenizer",
                BAD_DATA,
            )
        batch = Batch(
            tokens=torch.from_numpy(text[:, :-1].copy()),
            labels=torch.from_numpy(text[:, 1:].copy()),
            sample_ids=torch.arange(numbers.start, numbers.stop),
        )
        return batch.pin_memory() if self.pin else batch
