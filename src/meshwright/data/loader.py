"""From disk to batches: what one data-parallel rank reads in each step, a pure function of the consumed samples.

There is no state to save. A step that begins after `consumed` samples reads the next batch(consumed) of them; each
block of micro-batch x ranks consecutive samples is cut into one slice for each rank (Megatron's `single` order). A
background thread reads ahead: torch releases the interpreter while it computes, so a thread is enough, costs no
second process, and hands its errors to the loop that asks for the batch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, starmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwright import device as devices
from meshwright.console import say
from meshwright.data.format.indexed import Indexed, fingerprint
from meshwright.data.index_cache import Ints, Room, cached_indices
from meshwright.data.samples import VERSION, build_indices, epochs_needed
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
    ) -> None:
        self.indexed, self.seq_length = indexed, seq_length
        tokens = indexed.tokens_of(documents.start, documents.stop)

        def build(room: Room) -> list[Ints]:
            return build_indices(indexed.sizes, documents, tokens, num_samples, seq_length, seed, cutoff, room)

        key = {
            "version": VERSION,
            "data": fingerprint(indexed.prefix),
            "name": name,
            "first": documents.start,
            "end": documents.stop,
            "samples": num_samples,
            "seq_length": seq_length,
            "seed": seed,
            "cutoff": cutoff,
        }
        names = ("doc", "sample", "shuffle")
        self.doc_idx, self.sample_idx, self.shuffle_idx = cached_indices(cache_dir, key, names, build)
        self.epochs, self.apart = epochs_needed(tokens, num_samples, seq_length, cutoff)
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

    def read(self, numbers: list[int]) -> npt.NDArray[np.int64]:
        """[samples, S + 1]: the same of many at once, a third of the time."""
        indexed, tokens, j = self.indexed, self.indexed.tokens, self.shuffle_idx[numbers].astype(np.int64)
        (first, offset), (last, end) = self.sample_idx[j].T, self.sample_idx[j + 1].T
        counts = last - first + 1
        stops = counts.cumsum()  # of each sample's pieces
        documents = self.doc_idx[np.arange(stops[-1]) + np.repeat(first - stops + counts, counts)]
        begins = indexed.pointers[documents] // indexed.dtype.itemsize
        ends = begins + indexed.sizes[documents]
        ends[stops - 1] = begins[stops - 1] + end + 1
        begins[stops - counts] += offset
        pieces = [tokens[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]  # of the memory-mapped file
        return np.concatenate(pieces, dtype=np.int64, casting="unsafe").reshape(len(j), -1)

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


class Cyclic:
    """Megatron's `cyclic` order: every epoch reads all samples in a new order. It never runs out.

    Megatron gives each data-parallel rank a part of the samples to shuffle; here one order serves all, the one that
    Megatron has with a single rank and a length that is a multiple of the micro-batch. So the layout changes nothing.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self._order = lru_cache(maxsize=2)(self._shuffled)  # a step can lie in two epochs

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        return self.dataset[self._number(k)]

    def locate(self, k: int, position: int) -> str:
        return self.dataset.locate(self._number(k), position)

    def _number(self, k: int) -> int:
        epoch, place = divmod(k, len(self.dataset))
        return int(self._order(epoch)[place])

    def _shuffled(self, epoch: int) -> Tensor:
        return torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(epoch))


@dataclass(frozen=True)
class Marks:
    """What the ends of documents inside a sample change. An end belongs to the document before it."""

    eod: int
    mask_loss: bool
    reset_positions: bool
    reset_attention: bool

    def of(self, tokens: npt.NDArray[np.int64]) -> dict[str, Any]:
        """These fields of a Batch, for tokens [B, S]."""
        ends = tokens == self.eod
        out: dict[str, npt.NDArray[Any]] = {}
        if self.mask_loss:
            out["loss_mask"] = (~ends).astype(np.float32)
        if self.reset_positions:
            places = np.arange(tokens.shape[1])
            begins = np.zeros_like(tokens)
            begins[:, 1:] = np.where(ends[:, :-1], places[1:], 0)
            out["position_ids"] = places - np.maximum.accumulate(begins, axis=1)
        if self.reset_attention:
            out["doc_ids"] = np.cumsum(ends, axis=1, dtype=np.int32) - ends
        return {name: torch.from_numpy(values) for name, values in out.items()}


@dataclass(frozen=True)
class Batch:
    """One micro-batch. None stands for the trivial value, so that nothing is computed or copied for it."""

    tokens: Tensor  # [B, S] int64
    labels: Tensor  # [B, S] int64: the next tokens
    sample_ids: Tensor  # [B] int64: global sample numbers
    loss_mask: Tensor | None = None  # [B, S] float32; None: all ones
    position_ids: Tensor | None = None  # [B, S] int64; None: 0 ... S - 1
    doc_ids: Tensor | None = None  # [B, S] int32; None: one document, causal attention over all of it
    first_sample: int = -1  # sample_ids[0] and the tokens that count, read while the batch is on the host
    unmasked: int = -1

    def __post_init__(self) -> None:
        if self.unmasked < 0:
            unmasked = self.labels.numel() if self.loss_mask is None else int(self.loss_mask.sum())
            object.__setattr__(self, "unmasked", unmasked)
            object.__setattr__(self, "first_sample", int(self.sample_ids[0]))

    def part(self, columns: slice) -> Batch:
        """Some columns of each sample; attention sees the documents of all, and `unmasked` stays that of all."""
        cut = {n: getattr(self, n) for n in ("tokens", "labels", "loss_mask", "position_ids")}
        return replace(self, **{n: x[:, columns].contiguous() for n, x in cut.items() if x is not None})

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device; to an accelerator from pinned memory, so that nobody waits for the copy."""
        device = torch.device(device)
        if self.tokens.device == device or (device.index is None and self.tokens.device.type == device.type):
            return self
        pinned = devices.is_accelerator(device)
        moved: dict[str, Any] = {
            name: (t.pin_memory() if pinned else t).to(device, non_blocking=pinned)
            for name, t in vars(self).items()
            if isinstance(t, Tensor)
        }
        return replace(self, **moved)


class Loader:
    """An iterable over steps; each item is the list of a step's micro-batches for this rank.

    A step that begins after `consumed` samples has batch(consumed) of them. `wrap=True`, for validation, starts again
    at the first sample when the data set runs out (sample numbers go on counting); without it, running out is an
    error that names both numbers.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch: int,
        batch: Callable[[int], int],
        consumed: int,
        workers: int,
        vocab_size: int,
        marks: Marks | None = None,
        rank: int = 0,
        ranks: int = 1,
        wrap: bool = False,
        device: torch.device | None = None,
        columns: slice | None = None,
        length: int | None = None,
    ) -> None:
        """`rank` of `ranks` read each their own samples; `columns`: of each sample, where several ranks share it; `length`:
        the tokens of a sample, the last label with them."""
        self.dataset, self.vocab_size, self.marks = dataset, vocab_size, marks
        self.micro_batch, self.batch, self.consumed = micro_batch, batch, consumed
        self.workers, self.rank, self.ranks = workers, rank, ranks
        self.wrap, self.device, self.columns, self.length = wrap, device, columns, length
        if not len(dataset):
            raise UserError("the data set has no sample", BAD_DATA)

    def __iter__(self) -> Generator[list[Batch], None, None]:
        """Endless: the caller stops. Closing the iterator ends the thread."""
        steps = self.steps()
        if self.workers == 0:
            yield from starmap(self.step, steps)
        thread = ThreadPoolExecutor(1, "read-ahead", devices.set_current, (self.device,))
        try:
            ahead = deque(thread.submit(self.step, *where) for where in islice(steps, self.workers))
            for where in steps:
                batches = ahead.popleft().result()
                ahead.append(thread.submit(self.step, *where))
                yield batches
        finally:
            thread.shutdown(cancel_futures=True)

    def steps(self) -> Iterator[tuple[int, int]]:
        """First sample and number of samples of each step."""
        consumed, block = self.consumed, self.micro_batch * self.ranks
        while True:
            samples = self.batch(consumed)
            if samples % block or not samples:
                raise UserError(
                    f"a step of {samples} samples is not a multiple of {self.micro_batch} (--micro-batch-size) x "
                    f"{self.ranks} ranks: change --global-batch-size or --rampup-batch-size"
                )
            yield consumed, samples
            consumed += samples

    def step(self, first: int, samples: int) -> list[Batch]:
        """This rank's slice of each block of the step."""
        size = self.micro_batch
        starts = range(first + self.rank * size, first + samples, size * self.ranks)
        numbers = [n for start in starts for n in range(start, start + size)]
        if numbers[-1] >= len(self.dataset) and not self.wrap:
            raise UserError(
                f"samples {first} to {first + samples - 1} are wanted, but the data set has {len(self.dataset)}: it was "
                "built for fewer steps",
                BAD_DATA,
            )
        text = self.texts(numbers)
        if text.min() < 0 or text.max() >= self.vocab_size:
            raise self.unknown_id(numbers, text)
        return [self.batch_of(numbers[k : k + size], text[k : k + size]) for k in range(0, len(numbers), size)]

    def texts(self, numbers: list[int]) -> npt.NDArray[np.int64]:
        """[samples, S + 1]: all of a step at once where the data set can, for meanwhile nobody else has the interpreter."""
        places = [k % len(self.dataset) for k in numbers]
        if isinstance(self.dataset, Samples) and self.length in (None, self.dataset.seq_length + 1):
            return self.dataset.read(places)
        samples = [np.asarray(self.dataset[k]) for k in places]
        shape = (self.length or samples[0].size,)
        if any(ids.dtype.kind not in "iu" or ids.shape != shape for ids in samples):
            raise self.misshapen(numbers, samples, shape)
        return np.stack(samples).astype(np.int64, copy=False)

    def batch_of(self, numbers: list[int], text: npt.NDArray[np.int64]) -> Batch:
        batch = Batch(
            tokens=torch.from_numpy(text[:, :-1].copy()),
            labels=torch.from_numpy(text[:, 1:].copy()),
            sample_ids=torch.arange(numbers[0], numbers[-1] + 1),
            **(self.marks.of(text[:, :-1]) if self.marks else {}),
        )
        if self.columns is not None:
            batch = batch.part(self.columns)
        return batch if self.device is None else batch.to(self.device)

    def misshapen(self, numbers: list[int], samples: list[npt.NDArray[Any]], shape: tuple[int]) -> UserError:
        pairs = zip(numbers, samples, strict=True)
        k, ids = next((k, ids) for k, ids in pairs if ids.dtype.kind not in "iu" or ids.shape != shape)
        wanted = "one row of int64" if self.length is None else f"{self.length} int64, --seq-length + 1"
        return UserError(f"sample {k} of the data set has {ids.dtype} of shape {ids.shape}: give {wanted}", BAD_DATA)

    def unknown_id(self, numbers: list[int], text: npt.NDArray[np.int64]) -> UserError:
        row, column = np.argwhere((text < 0) | (text >= self.vocab_size))[0].tolist()
        place = self.dataset.locate(numbers[row] % len(self.dataset), column)
        return UserError(
            f"sample {numbers[row]} has id {text[row, column]} ({place}), but the tokenizer's ids are "
            f"0 ... {self.vocab_size - 1}: the data was made with another tokenizer",
            BAD_DATA,
        )
