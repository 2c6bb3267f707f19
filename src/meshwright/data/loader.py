"""From the memory-mapped token files to batches: what one data-parallel rank reads in each step.

`Loader.steps` says which samples make a step, `Loader.read_step` picks this rank's share of them,
`Samples.read` copies their tokens out of the file, and `Loader.make_batch` makes each `Batch`.

There is no state to save: a step that begins after `consumed` samples reads the next
`step_size(consumed)` of them, of each the beginning with --seq-length-schedule; each block of
micro-batch x ranks consecutive samples is cut into one slice for each rank (Megatron's `single`
order). A thread reads ahead, which is enough because torch releases the interpreter while it
computes; the loop that asks for the batch gets its errors.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, starmap
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwright.base import device as devices
from meshwright.base.console import say
from meshwright.base.errors import BAD_DATA, UserError, bad_data
from meshwright.config.problem import SettingsError
from meshwright.data.blend import Composite
from meshwright.data.files.indexed import Indexed, fingerprint
from meshwright.data.index_cache import Ints, Storage, cached_indices
from meshwright.data.samples import (
    VERSION,
    Dataset,
    FileSamples,
    OrderedSamples,
    build_indices,
    epochs_needed,
    require_sample,
)


class Samples(FileSamples):
    """Megatron's samples of one split of a pair of token files: stretches of one stream.

    `len` is how many can be cut from the epochs, at least the number asked for.
    """

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
        super().__init__(indexed, seq_length)
        tokens = indexed.tokens_of(documents.start, documents.stop)

        def build(storage: Storage) -> list[Ints]:
            return build_indices(
                indexed.sizes, documents, tokens, num_samples, seq_length, seed, cutoff, storage
            )

        # All that the order depends on.
        key = {
            "version": VERSION,
            "data": fingerprint(indexed.prefix),
            "name": name,
            "samples": num_samples,
            "first": documents.start,
            "end": documents.stop,
            "seq_length": seq_length,
            "seed": seed,
            "cutoff": cutoff,
        }
        names = ("doc", "sample", "shuffle")
        self.doc_idx, self.sample_idx, self.shuffle_idx = cached_indices(
            cache_dir, key, names, build
        )
        self.epochs, self.last_epoch_separate = epochs_needed(
            tokens, num_samples, seq_length, cutoff
        )
        say(f"    total number of samples: {len(self.sample_idx)}")
        say(f"    total number of epochs: {self.epochs}")

    def list_epochs(self) -> list[list[Any]]:
        return [[self.epochs, self.last_epoch_separate]]

    def __len__(self) -> int:
        return len(self.shuffle_idx)

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        indexed = self.indexed
        self.require_whole()
        ranges = []
        for document, offset, length in self.pieces(k):
            begin = indexed.begin(document) + offset
            ranges.append((begin, begin + length))
        if indexed.is_sparse:
            indexed.need(ranges)
        return np.concatenate([indexed.tokens[a:b] for a, b in ranges], dtype=np.int64)

    def read(self, numbers: list[int]) -> npt.NDArray[np.int64]:
        """Return [samples, S + 1]."""
        indexed = self.indexed
        self.require_whole()

        # A sample ends one token beyond the beginning of the next one.
        j = self.shuffle_idx[numbers].astype(np.int64)
        first, offset = self.sample_idx[j].T
        last, end = self.sample_idx[j + 1].T

        # The documents that the samples touch, one sample after the other.
        counts = last - first + 1
        stops = counts.cumsum()
        starts = stops - counts
        places = np.arange(stops[-1]) + np.repeat(first - starts, counts)
        documents = self.doc_idx[places]

        # Their tokens; a sample's first and last document are cut.
        begins = indexed.pointers[documents] // indexed.pointers_per_token
        ends = begins + indexed.sizes[documents]
        ends[stops - 1] = begins[stops - 1] + end + 1
        begins[starts] += offset
        # Slices of the memory-mapped file: the concatenation is the one copy.
        ranges = list(zip(begins.tolist(), ends.tolist(), strict=True))
        if indexed.is_sparse:
            indexed.need(ranges)
        pieces = [indexed.tokens[a:b] for a, b in ranges]
        flat = np.concatenate(pieces, dtype=np.int64, casting="unsafe")
        return flat.reshape(len(j), -1)

    def pieces(self, k: int) -> list[tuple[int, int, int]]:
        require_sample(k, len(self))
        j = int(self.shuffle_idx[k])
        first, offset = self.sample_idx[j].tolist()
        last, end = self.sample_idx[j + 1].tolist()
        pieces = []
        for place in range(first, last + 1):
            document = int(self.doc_idx[place])
            stop = end + 1 if place == last else int(self.indexed.sizes[document])
            pieces.append((document, offset, stop - offset))
            offset = 0
        return pieces


class Mock(OrderedSamples):
    """Random tokens; a sample depends on the seed and its number alone."""

    def __init__(self, vocab_size: int, num_samples: int, seq_length: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        require_sample(k, len(self))
        rng = np.random.RandomState([self.seed, k])
        return rng.randint(self.vocab_size, size=self.seq_length + 1, dtype=np.int64)

    def locate(self, k: int, position: int) -> str:
        return f"token {position} of mock sample {k}"


class Cyclic(Composite):
    """Megatron's `cyclic` order: every epoch reads all samples in a new order. It never runs out.

    Megatron gives each data-parallel rank a part of the samples to shuffle; here one order serves
    all ranks: Megatron's with one rank and a length that is a multiple of the micro-batch.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.parts = [dataset]
        # A step can lie in two epochs.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        return sys.maxsize

    def list_epochs(self) -> list[list[Any]]:
        return self.dataset.list_epochs() if isinstance(self.dataset, OrderedSamples) else []

    def resolve(self, k: int) -> tuple[Dataset, int]:
        epoch, place = divmod(k, len(self.dataset))
        return self.dataset, int(self._order(epoch)[place])

    def _shuffle(self, epoch: int) -> Tensor:
        return torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(epoch))


@dataclass(frozen=True)
class DocumentEnds:
    """The effects of document ends inside a sample. An end belongs to the document before it."""

    eod: int
    mask_loss: bool
    reset_positions: bool
    reset_attention: bool

    def fields(self, tokens: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """Return these fields of a Batch for tokens [B, S]."""
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


def piece_fields(positions: npt.NDArray[np.int64]) -> dict[str, Tensor]:
    """Return these fields of a Batch of packed samples from the positions [B, S + 1] in pieces."""
    begins = positions == 0
    return {
        "loss_mask": torch.from_numpy((~begins[:, 1:]).astype(np.float32)),
        "position_ids": torch.from_numpy(positions[:, :-1].copy()),
        "doc_ids": torch.from_numpy(np.cumsum(begins[:, :-1], axis=1, dtype=np.int32)),
    }


@dataclass(frozen=True)
class Batch:
    """One micro-batch. None stands for the trivial value, which is neither computed nor copied."""

    tokens: Tensor  # [B, S] int64
    labels: Tensor  # [B, S] int64: the next tokens
    sample_ids: Tensor  # [B] int64: global sample numbers
    loss_mask: Tensor | None = None  # [B, S] float32; None: all ones
    position_ids: Tensor | None = None  # [B, S] int64; None: 0 ... S - 1
    # [B, S] int32; None: one document, causal attention over all of it
    doc_ids: Tensor | None = None
    first_sample: int = -1  # sample_ids[0], read while the batch is on the host
    unmasked: int = -1  # tokens that count in the loss, counted on the host too

    def __post_init__(self) -> None:
        if self.unmasked >= 0:
            # This is a part or a copy of a batch that is already counted.
            return
        # Read here, on the host: on a device it would wait for the stream.
        unmasked = self.labels.numel() if self.loss_mask is None else int(self.loss_mask.sum())
        object.__setattr__(self, "unmasked", unmasked)
        object.__setattr__(self, "first_sample", int(self.sample_ids[0]))

    def select(self, columns: slice) -> Batch:
        """Return some columns of each sample; `doc_ids` and `unmasked` stay as they are."""
        cut = {}
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            values = getattr(self, name)
            if values is not None:
                cut[name] = values[:, columns].contiguous()
        return replace(self, **cut)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device; accelerators copy from pinned memory, without a wait."""
        device = torch.device(device)
        here = self.tokens.device
        if here == device or (device.index is None and here.type == device.type):
            return self
        return self._each(lambda x: devices.send(x, device))

    def copy(self, device: torch.device) -> Batch:
        """Return a copy on the device, whose memory is shared with nothing."""
        return self._each(lambda x: x.to(device, copy=True))

    def pin(self) -> Batch:
        """Return the batch in memory from which accelerators copy without a wait."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed: Any = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **changed)


@dataclass(frozen=True)
class LoaderSpec:
    """The samples that a rank reads in each step, and how it makes batches of them."""

    micro_batch: int  # samples of a batch
    step_size: Callable[[int], int]  # samples of the step that begins after this many
    vocab_size: int
    workers: int = 0  # steps to read ahead in a thread; 0: read when asked
    document_ends: DocumentEnds | None = None
    rank: int = 0  # among the `ranks` that read different samples
    ranks: int = 1
    # number of a sample's columns -> those of this rank, where several ranks share the sample
    columns: Callable[[int], slice] | None = None
    length: int | None = None  # tokens of a sample, including the last label; None: any
    # number of a step, from 1 on -> how many of these tokens it reads of each sample; None: all
    length_at: Callable[[int], int | None] = lambda step: None
    packed: bool = False  # samples are [2, length]: tokens and their positions in their documents
    # where batches will be sent; for accelerators they are pinned
    device: torch.device | None = None
    # At the end of the data set: raise an error; or wrap to the first sample, for validation
    # (sample numbers continue); or wrap, but mask what has been read before (--full-validation).
    at_end: Literal["raise", "wrap", "mask"] = "raise"


class Loader:
    """The steps after `consumed` samples, each a list of this rank's micro-batches."""

    def __init__(
        self, dataset: Dataset, spec: LoaderSpec, consumed: int = 0, iteration: int = 0
    ) -> None:
        """`iteration` is the number of the step before the first one."""
        self.dataset = dataset
        self.spec = spec
        self.consumed = consumed
        self.iteration = iteration
        if not len(dataset):
            raise bad_data("the data set has no sample")

    def __iter__(self) -> Generator[list[Batch], None, None]:
        """Yield steps without end: the caller stops. Closing the iterator ends the thread."""
        steps = self.steps()
        if self.spec.workers == 0:
            yield from starmap(self.read_step, steps)
        # A new thread starts on device 0, so it is told its own.
        thread = ThreadPoolExecutor(1, "read-ahead", devices.set_current, (self.spec.device,))
        try:
            ahead = deque(
                thread.submit(self.read_step, *step) for step in islice(steps, self.spec.workers)
            )
            # Each step that is taken makes room for one more.
            for step in steps:
                batches = ahead.popleft().result()
                ahead.append(thread.submit(self.read_step, *step))
                yield batches
        finally:
            thread.shutdown(cancel_futures=True)

    def steps(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield each step's first sample, number of samples, and what it reads of each."""
        consumed = self.consumed
        block = self.spec.micro_batch * self.spec.ranks
        for step in itertools.count(self.iteration + 1):
            samples = self.spec.step_size(consumed)
            if samples % block or not samples:
                raise SettingsError(
                    f"a step of {samples} samples is not a multiple of {self.spec.micro_batch} "
                    f"({{micro_batch_size}}) x {self.spec.ranks} ranks; "
                    "change {global_batch_size} or {rampup_batch_size}"
                )
            yield consumed, samples, self.spec.length_at(step)
            consumed += samples

    def read_step(self, first: int, samples: int, length: int | None = None) -> list[Batch]:
        """Return this rank's slice of each block of the step, with so many tokens of a sample."""
        size = self.spec.micro_batch
        end = first + samples
        # A block has a micro-batch for each rank.
        starts = range(first + self.spec.rank * size, end, size * self.spec.ranks)
        numbers = [n for start in starts for n in range(start, start + size)]
        if numbers[-1] >= len(self.dataset) and self.spec.at_end == "raise":
            raise bad_data(
                f"the step needs samples {first} to {end - 1}, but the data set has {len(self.dataset)}; "
                "it was built for fewer steps"
            )
        text = self.read_tokens(numbers)[..., :length]
        tokens = text[:, 0] if self.spec.packed else text
        if tokens.min() < 0 or tokens.max() >= self.spec.vocab_size:
            raise self.unknown_id(numbers, tokens)
        batches = []
        for k in range(0, len(numbers), size):
            some = slice(k, k + size)
            batches.append(self.make_batch(numbers[some], text[some]))
        return batches

    def read_tokens(self, numbers: list[int]) -> npt.NDArray[np.int64]:
        """Return the samples of a step, stacked; read at once where the data set can."""
        places = [k % len(self.dataset) for k in numbers]
        if isinstance(self.dataset, FileSamples) and self.spec.length in (
            None,
            self.dataset.seq_length + 1,
        ):
            return self.dataset.read(places)
        samples = [np.asarray(self.dataset[k]) for k in places]
        shape = (2,) * self.spec.packed + (self.spec.length or samples[0].shape[-1],)
        for k, ids in zip(numbers, samples, strict=True):
            if ids.dtype.kind not in "iu" or ids.shape != shape:
                raise self.wrong_shape(k, ids)
        return np.stack(samples).astype(np.int64, copy=False)

    def make_batch(self, numbers: list[int], text: npt.NDArray[np.int64]) -> Batch:
        spec = self.spec
        fields = dict[str, Any]()
        # What the documents within the samples change.
        if spec.packed:
            fields = piece_fields(text[:, 1])
            text = text[:, 0]
        tokens = text[:, :-1].copy()
        labels = text[:, 1:].copy()
        if spec.document_ends:
            fields = spec.document_ends.fields(tokens)
        # Beyond the end of the data set, samples have been read before.
        if spec.at_end == "mask" and numbers[-1] >= len(self.dataset):
            mask = fields.setdefault("loss_mask", torch.ones(tokens.shape))
            mask[torch.tensor(numbers) >= len(self.dataset)] = 0.0
        batch = Batch(
            torch.from_numpy(tokens), torch.from_numpy(labels), torch.tensor(numbers), **fields
        )
        if spec.columns is not None:
            batch = batch.select(spec.columns(tokens.shape[1]))
        # The step copies it to the device on its own stream.
        if spec.device is not None and devices.is_accelerator(spec.device):
            return batch.pin()
        return batch

    def wrong_shape(self, k: int, ids: npt.NDArray[Any]) -> UserError:
        wanted = (
            f"{self.spec.length} int64, {{seq_length}} + 1"
            if self.spec.length
            else "one row of int64"
        )
        found = f"{ids.dtype} of shape {ids.shape}"
        return SettingsError(f"sample {k} of the data set has {found}; give {wanted}", BAD_DATA)

    def unknown_id(self, numbers: list[int], text: npt.NDArray[np.int64]) -> UserError:
        is_wrong = (text < 0) | (text >= self.spec.vocab_size)
        row, column = np.argwhere(is_wrong)[0].tolist()
        # The numbers of samples go on beyond the end of the data set.
        sample = numbers[row] % len(self.dataset)
        place = self.dataset.locate(sample, column)
        return bad_data(
            f"sample {numbers[row]} has id {text[row, column]} ({place}), but the tokenizer's ids are "
            f"0 ... {self.spec.vocab_size - 1}; the data was made with another tokenizer"
        )
