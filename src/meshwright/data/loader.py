"""From disk to batches: what one data-parallel rank reads in each step, a pure function of the consumed samples.

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
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwright.data.indexed import Indexed, fingerprint
from meshwright.data.samples import VERSION, Ints, Say, build_indices, cached_indices, quiet, to_stderr
from meshwright.errors import BAD_DATA, UserError


class Dataset(Protocol):
    """What the loader reads. A user's own data set needs these three methods."""

    def __len__(self) -> int: ...

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        """S + 1 token ids."""
        ...

    def locate(self, k: int, position: int) -> str:
        """Where a token of sample k comes from, for messages."""
        ...


class Samples:
    """Samples of one split. `len` is how many can be cut from the epochs, at least the number asked for."""

    def __init__(
        self,
        indexed: Indexed,
        documents: range,
        num_samples: int,
        seq_length: int,
        seed: int,
        cutoff: float = 0.80,
        cache_dir: str | Path | None = None,
        name: str = "train",
        say: Say = quiet,
        notice: Say = to_stderr,
    ) -> None:
        self.indexed, self.seq_length = indexed, seq_length

        def build() -> tuple[Ints, Ints, Ints, int]:
            return build_indices(indexed.sizes, documents, num_samples, seq_length, seed, cutoff, say)

        if cache_dir is None:
            self.doc_idx, self.sample_idx, self.shuffle_idx, self.epochs = build()
        else:
            key = {
                "version": VERSION, "data": fingerprint(indexed.prefix), "name": name, "first": documents.start,
                "end": documents.stop, "samples": num_samples, "seq_length": seq_length, "seed": seed, "cutoff": cutoff,
            }  # fmt: skip
            cached = cached_indices(Path(cache_dir), key, build, say, notice)
            self.doc_idx, self.sample_idx, self.shuffle_idx, self.epochs = cached
        say(f"    total number of samples: {len(self.sample_idx)}")
        say(f"    total number of epochs: {self.epochs}")

    def __len__(self) -> int:
        return len(self.shuffle_idx)

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        tokens, pointers, itemsize = self.indexed.tokens, self.indexed.pointers, self.indexed.dtype.itemsize
        parts = []
        for document, offset, length in self._pieces(k):
            start = int(pointers[document]) // itemsize + offset
            parts.append(tokens[start : start + length])  # a view of the memory-mapped file
        return np.concatenate(parts, dtype=np.int64)

    def locate(self, k: int, position: int) -> str:
        for document, offset, length in self._pieces(k):
            if position < length:
                return f"token {offset + position} of document {document} in {self.indexed.prefix}"
            position -= length
        raise IndexError(f"sample {k} has no token {position}")

    def _pieces(self, k: int) -> list[tuple[int, int, int]]:
        """(document, first token, number of tokens) of each part of sample k."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        j = int(self.shuffle_idx[k])
        (first, offset), (last, end) = self.sample_idx[j].tolist(), self.sample_idx[j + 1].tolist()
        pieces = []
        for place in range(first, last + 1):
            document = int(self.doc_idx[place])
            stop = end + 1 if place == last else int(self.indexed.sizes[document])
            pieces.append((document, offset, stop - offset))
            offset = 0
        return pieces


class Mock:
    """Random tokens; a sample depends on the seed and its number alone."""

    def __init__(self, vocab_size: int, num_samples: int, seq_length: int, seed: int) -> None:
        self.vocab_size, self.num_samples, self.seq_length, self.seed = vocab_size, num_samples, seq_length, seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        rng = np.random.RandomState([self.seed, k])
        return rng.randint(self.vocab_size, size=self.seq_length + 1, dtype=np.int64)

    def locate(self, k: int, position: int) -> str:
        return f"token {position} of mock sample {k}"


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
