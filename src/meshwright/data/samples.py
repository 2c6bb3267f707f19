"""Token files to samples: which S + 1 tokens are sample k, in Megatron's order, element for element.

Three index arrays make the order. The documents of a split, repeated for as many epochs as are needed, are shuffled
(`doc_idx`); the shuffled documents are read as one stream of tokens and cut every S tokens (`sample_idx`: where each
sample begins); the samples are shuffled (`shuffle_idx`). A sample takes S + 1 tokens, its last being the next one's
first. Everything is vectorised numpy, so nothing compiles.

The arrays are cached under a hash of all that they depend on. A `.json` file written last makes the arrays of a cache
entry valid and holds their checksums: a damaged or half-written entry is built again.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.console import notice, say
from meshwright.errors import BAD_DATA, UserError
from meshwright.files import replacing
from meshwright.values import split_shares

VERSION = 1  # of the algorithm below: part of the cache's key
BLOCK = 1 << 20
Ints = npt.NDArray[np.integer[Any]]


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
    sizes: Ints, documents: range, num_samples: int, seq_length: int, seed: int, cutoff: float
) -> tuple[Ints, Ints, Ints, int]:
    """doc_idx, sample_idx, shuffle_idx and the number of epochs."""
    tokens = int(sizes[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens == 0:
        raise UserError(f"documents {documents.start} to {documents.stop} hold no token", BAD_DATA)
    epochs, apart = epochs_needed(tokens, num_samples, seq_length, cutoff)
    total = (epochs * tokens - 1) // seq_length
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    if epochs == 1:
        say(" > only one epoch required, setting separate_last_epoch to False")
    else:
        last, per_epoch = num_samples - before_last, (tokens - 1) // seq_length
        say(
            f" > last epoch number of samples ({last}) is {'smaller' if apart else 'larger'} than {cutoff:.0%} of "
            f"number of samples per epoch ({per_epoch}), setting separate_last_epoch to {apart}"
        )
    rng = np.random.RandomState(seed)  # the same for every split; its stream is frozen by numpy's promise

    # "elasped" is Megatron's own misspelling: its log is what people's scripts read.
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


def epochs_needed(tokens: int, num_samples: int, seq_length: int, cutoff: float) -> tuple[int, bool]:
    """How often the documents are repeated, and whether the last epoch is shuffled by itself, so that documents of a barely
    begun one don't crowd out others. The order of all samples follows from these two."""
    # The smallest number of epochs with (epochs x tokens - 1) // S >= num_samples
    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    return epochs, epochs > 1 and num_samples - before_last < int(cutoff * ((tokens - 1) // seq_length))


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


def cached_indices(
    folder: str | Path | None, key: dict[str, Any], parts: Sequence[str], build: Callable[[], list[Ints]]
) -> list[Ints]:
    """The arrays from the cache; built, and put there, where they are missing or damaged. Without a folder: built."""
    if folder is None:
        return build()
    folder = Path(folder)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    paths = {part: folder / f"{name}_{part}_idx.npy" for part in parts}
    record = folder / f"{name}.json"
    if not record.exists():
        say(" > WARNING: could not find index map files, building the indices on rank 0 ...")
    else:
        loaded = load_indices(paths, record)
        if not isinstance(loaded, str):
            return loaded
        notice(f"{record} is damaged ({loaded}): building the indices again")

    built = build()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, values in zip(paths.values(), built, strict=True):
            with replacing(path) as file:
                np.save(file, values, allow_pickle=False)
        checksums = {part: checksum(path) for part, path in paths.items()}
        with replacing(record) as file:
            file.write(json.dumps({**key, "crc32": checksums}, indent=1).encode() + b"\n")
    except OSError as error:
        notice(f"{folder} takes no index cache ({error.strerror or error}): the indices stay in memory")
        return built
    # Read back rather than kept: memory-mapped arrays are shared by all processes of a machine.
    loaded = load_indices(paths, record)
    return built if isinstance(loaded, str) else loaded


def checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def load_indices(paths: dict[str, Path], record: Path) -> list[Ints] | str:
    """The arrays of a cache entry, memory-mapped, or what is wrong with it."""
    start = time.perf_counter()
    try:
        checksums = json.loads(record.read_bytes())["crc32"]
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
    return arrays
