"""Token files to samples: which S + 1 tokens are sample k, in Megatron's order, element for element.

Three index arrays make the order. The documents of a split, repeated for as many epochs as are needed, are shuffled
(`doc_idx`); the shuffled documents are read as one stream of tokens and cut every S tokens (`sample_idx`: where each
sample begins); the samples are shuffled (`shuffle_idx`). A sample takes S + 1 tokens, its last being the next one's
first. Everything is vectorised numpy, so nothing compiles.

The arrays are cached under a hash of all that they depend on. A `.json` file written last makes the three arrays of
a cache entry valid and holds their checksums: a damaged or half-written entry is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.config import TrainConfig, split_shares
from meshwright.data.indexed import Indexed, fingerprint
from meshwright.errors import BAD_DATA, UserError

VERSION = 1  # of the algorithm below: part of the cache's key
BLOCK = 1 << 20
Ints = npt.NDArray[np.integer[Any]]
Say = Callable[[str], None]


class Dataset(Protocol):
    """What the loader reads. A user's own data set needs these three methods."""

    def __len__(self) -> int: ...

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        """S + 1 token ids."""
        ...

    def locate(self, k: int, position: int) -> str:
        """Where a token of sample k comes from, for messages."""
        ...


def quiet(line: str) -> None:
    pass


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def split_bounds(split: str, n: int, arithmetic: str) -> list[int]:
    """Borders of train, validation and test among n documents: 0, a, b, n."""
    shares = split_shares(split)
    parts = [share / sum(shares) for share in shares]
    if arithmetic == "cumulative":
        sums = [0.0]
        for part in parts:
            sums.append(sums[-1] + part)
        return [int(round(c * float(n))) for c in sums]
    bounds = [0]
    for part in parts:
        bounds.append(bounds[-1] + int(round(part * float(n))))
    surplus = bounds[-1] - n
    return [0] + [max(bound - surplus, 0) for bound in bounds[1:]]  # below 0 would take documents from the end


def build_indices(
    sizes: Ints, documents: range, num_samples: int, seq_length: int, seed: int, cutoff: float, say: Say = quiet
) -> tuple[Ints, Ints, Ints, int]:
    """doc_idx, sample_idx, shuffle_idx and the number of epochs."""
    tokens = int(sizes[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens == 0:
        raise UserError(f"documents {documents.start} to {documents.stop} hold no token", BAD_DATA)
    # The smallest number of epochs with (epochs x tokens - 1) // S >= num_samples
    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
    total = (epochs * tokens - 1) // seq_length
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    per_epoch = (tokens - 1) // seq_length
    apart = False  # shuffle the last epoch by itself, so that documents of a barely begun one don't crowd out others
    if epochs == 1:
        say(" > only one epoch required, setting separate_last_epoch to False")
    else:
        last = num_samples - before_last
        apart = last < int(cutoff * per_epoch)
        say(
            f" > last epoch number of samples ({last}) is {'smaller' if apart else 'larger'} than {cutoff:.0%} of "
            f"number of samples per epoch ({per_epoch}), setting separate_last_epoch to {apart}"
        )
    rng = np.random.RandomState(seed)  # the same for every split; its stream is frozen by numpy's promise

    start = time.perf_counter()
    once = np.arange(documents.start, documents.stop, dtype=np.int32)
    doc_idx = np.tile(once, epochs)
    whole = len(once) * (epochs - 1 if apart else epochs)
    rng.shuffle(doc_idx[:whole])
    if apart:
        rng.shuffle(doc_idx[whole:])
    say(f" > elasped time to build and save doc-idx mapping (seconds): {time.perf_counter() - start:4f}")

    start = time.perf_counter()
    sample_idx = cut(sizes, doc_idx, total, seq_length)
    say(f" > elasped time to build and save sample-idx mapping (seconds): {time.perf_counter() - start:4f}")

    start = time.perf_counter()
    first = before_last if apart else total
    say(f" > building shuffle index with split [0, {first}) and [{first}, {total}) ...")
    shuffle_idx: Ints = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
    rng.shuffle(shuffle_idx[:first])
    if first < total:
        rng.shuffle(shuffle_idx[first:])
    say(f" > elasped time to build and save shuffle-idx mapping (seconds): {time.perf_counter() - start:4f}")
    return doc_idx, sample_idx, shuffle_idx, epochs


def cut(sizes: Ints, doc_idx: Ints, samples: int, seq_length: int) -> Ints:
    """Row k: in which place of doc_idx, and at which token of that document, sample k begins.

    Sample k begins at token k x S of the stream. Counting the multiples of S inside each document and repeating the
    document's place as often gives all rows at once; documents are taken in blocks, so memory stays bounded.
    """
    rows = np.zeros((samples + 1, 2), dtype=np.int32 if len(doc_idx) < 2**31 else np.int64)
    done, position = 1, 0  # row 0 is (0, 0) even where the first documents are empty, as in Megatron's walk
    for begin in range(0, len(doc_idx), BLOCK):
        lengths = sizes[doc_idx[begin : begin + BLOCK]].astype(np.int64)
        ends = position + np.cumsum(lengths)
        last = np.clip((ends - 1) // seq_length, done - 1, samples)  # the last sample that begins before each end
        places = np.repeat(np.arange(len(lengths)), np.diff(last, prepend=done - 1))
        new = slice(done, done + len(places))
        rows[new, 0] = begin + places
        rows[new, 1] = np.arange(new.start, new.stop) * seq_length - (ends - lengths)[places]
        done, position = new.stop, int(ends[-1])
    return rows


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
        parts = [self.indexed.get(document, offset, length) for document, offset, length in self._pieces(k)]
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


def build_datasets(
    config: TrainConfig, vocab_size: int, say: Say = quiet, notice: Say = to_stderr
) -> dict[str, Dataset | None]:
    """The data of "train", "valid" and "test"; None where a split has no document. Prints what Megatron prints."""
    t, d = config.training, config.data
    assert t.train_iters and d.seq_length
    targets = {
        "train": t.train_iters * config.global_batch,
        "valid": (t.train_iters // t.eval_interval + 1) * t.eval_iters * config.global_batch,
        "test": t.eval_iters * config.global_batch,
    }
    say("> building train, validation, and test datasets ...")
    say(" > datasets target sizes (minimum size):")
    say(f"    train:      {targets['train']}")
    say(f"    validation: {targets['valid']}")
    say(f"    test:       {targets['test']}")
    say("> building train, validation, and test datasets for GPT ...")
    out: dict[str, Dataset | None] = {}
    if d.mock_data:
        for n, (name, samples) in enumerate(targets.items()):
            out[name] = Mock(vocab_size, samples, d.seq_length, t.seed + n)
        say("> finished creating GPT datasets ...")
        return out

    prefix = d.data_path[0]
    say("Single data path provided for train, valid & test")
    say(f"data_prefix: {d.data_path}")
    indexed = open_indexed(prefix, d.mmap_warmup, vocab_size, say)
    bounds = split_bounds(d.split, len(indexed), d.split_arithmetic)
    say(" > dataset split:")
    for title, a, b in zip(("train", "validation", "test"), bounds, bounds[1:], strict=False):
        say(f"    {title}:")
        say(f"     document indices in [{a}, {b}) total of {b - a} documents")

    cache_dir = Path(d.data_cache_path) if d.data_cache_path else Path(prefix).parent / "index-cache"
    for name, a, b in zip(targets, bounds, bounds[1:], strict=False):
        tokens = int(indexed.sizes[a:b].sum(dtype=np.int64))
        if name == "train" and tokens <= d.seq_length:
            raise UserError(
                f"the training split ({b - a} of {len(indexed)} documents) has {tokens} tokens, but one sample takes "
                f"--seq-length {d.seq_length} + 1: give more data, a shorter --seq-length or another --split",
                BAD_DATA,
            )
        if tokens == 0:
            notice(f"--split {d.split}: the {name} split of {len(indexed)} documents is empty, so it is left out")
            out[name] = None
            continue
        if tokens <= d.seq_length:
            notice(f"the {name} split has {tokens} tokens: each sample of {d.seq_length} + 1 repeats its documents")
        out[name] = Samples(
            indexed, range(a, b), targets[name], d.seq_length, t.seed, d.last_epoch_cutoff, cache_dir, name, say, notice
        )
    say("> finished creating GPT datasets ...")
    return out


def open_indexed(prefix: str, warmup: bool, vocab_size: int, say: Say) -> Indexed:
    start = time.perf_counter()
    say(" > building dataset index ...")
    if warmup:
        say("    warming up index mmap file...")
        read_through(f"{prefix}.idx")
    indexed = Indexed(prefix)
    say("    reading sizes...")
    say("    reading pointers...")
    say("    reading document index...")
    if warmup:
        say("    warming up data mmap file...")
        read_through(f"{prefix}.bin")
    say("    creating numpy buffer of mmap...")
    say("    creating memory view of numpy buffer...")
    check_vocabulary(indexed, vocab_size)
    say(f" > finished creating indexed dataset in {time.perf_counter() - start:4f} seconds")
    say(f"    number of documents: {len(indexed)}")
    return indexed


def check_vocabulary(indexed: Indexed, vocab_size: int, blocks: int = 64, block: int = 4096) -> None:
    """Refuse data of another vocabulary before the first step by looking at samples; the loader looks at all."""
    last = max(len(indexed.tokens) - block, 0)
    for start in sorted({last * n // (blocks - 1) for n in range(blocks)}):
        tokens = indexed.tokens[start : start + block]
        wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        if len(wrong):
            at = start + int(wrong[0])
            raise UserError(
                f"{indexed.prefix}.bin has id {indexed.tokens[at]} in document {indexed.sequence_at(at)}, but the "
                f"tokenizer's ids are 0 ... {vocab_size - 1}: the data was made with another tokenizer",
                BAD_DATA,
            )


def read_through(path: str) -> None:
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass


def cached_indices(
    folder: Path, key: dict[str, Any], build: Callable[[], tuple[Ints, Ints, Ints, int]], say: Say, notice: Say
) -> tuple[Ints, Ints, Ints, int]:
    """The arrays from the cache; built, and put there, where they are missing or damaged."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    paths = {part: folder / f"{name}_{part}_idx.npy" for part in ("doc", "sample", "shuffle")}
    record = folder / f"{name}.json"
    if not record.exists():
        say(" > WARNING: could not find index map files, building the indices on rank 0 ...")
    else:
        loaded = load_indices(paths, record, say)
        if not isinstance(loaded, str):
            return loaded
        notice(f"{record} is damaged ({loaded}): building the indices again")

    *arrays, epochs = built = build()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, values in zip(paths.values(), arrays, strict=True):
            with replacing(path) as file:
                np.save(file, values, allow_pickle=False)
        checksums = {part: checksum(path) for part, path in paths.items()}
        with replacing(record) as file:
            file.write(json.dumps({**key, "epochs": epochs, "crc32": checksums}, indent=1).encode() + b"\n")
    except OSError as error:
        notice(f"{folder} takes no index cache ({error.strerror or error}): the indices stay in memory")
        return built
    # Read back rather than kept: memory-mapped arrays are shared by all processes of a machine.
    loaded = load_indices(paths, record, say)
    return built if isinstance(loaded, str) else loaded


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name only when whole; the process number keeps several writers apart."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def load_indices(paths: dict[str, Path], record: Path, say: Say) -> tuple[Ints, Ints, Ints, int] | str:
    """The arrays of a cache entry, memory-mapped, or what is wrong with it."""
    start = time.perf_counter()
    try:
        described = json.loads(record.read_bytes())
        epochs, checksums = int(described["epochs"]), described["crc32"]
        for part, path in paths.items():
            if checksum(path) != checksums[part]:
                return f"the checksum of {path.name} differs"
        # As plain arrays: indexing numpy's memmap class is several times slower.
        arrays = [np.asarray(np.load(path, mmap_mode="r", allow_pickle=False)) for path in paths.values()]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        return str(error)
    for part, path in paths.items():
        say(f" > loading {part}-idx mapping from {path}")
    say(f"    loaded indexed file in {time.perf_counter() - start:.3f} seconds")
    doc_idx, sample_idx, shuffle_idx = arrays
    return doc_idx, sample_idx, shuffle_idx, epochs
