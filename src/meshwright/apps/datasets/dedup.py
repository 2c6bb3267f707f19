"""Leave out near-duplicates: a document goes if it resembles an earlier one that is kept.

A document is the set of its pieces of a few characters (shingles). Two documents resemble each
other if the Jaccard index of their sets, shared pieces over all pieces, reaches a threshold.

Not every pair is compared. MinHash gives each document a signature: its pieces are hashed, the
range of the hashes is cut into parts, and the smallest hash of each part is taken (one permutation
hashing with optimal densification). Two documents share each with the probability of their index J.
The signature is cut into bands of r hashes; pairs with an equal band are candidates, which b bands
find with about the probability 1 - (1 - J^r)^b: with 20 bands of 5, 97.5 % at J = 0.7 and 99.96 %
at 0.8. They are then compared exactly: nothing goes whose index is below the threshold.

Texts stay in their files, signatures in a temporary one; memory takes about 100 bytes a document.
By hand, because libraries for this (datasketch, text-dedup) keep all signatures in memory.
"""

from __future__ import annotations

import mmap
import shlex
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import orjson

from meshwright.base.errors import UserError, bad_data
from meshwright.base.files import replacing, write_lines
from meshwright.base.hints import near_path
from meshwright.base.progress import SkippedLines, progress_bar
from meshwright.data.text import limits
from meshwright.data.text.charsets import BOM
from meshwright.data.text.containers import HEAD, kind_of_bytes
from meshwright.data.text.jsonl import lines_of, parse_line
from meshwright.data.text.records import Document, Rejected, TextPlace, too_long

Hashes = npt.NDArray[np.uint64]
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, with bits everywhere
OPEN_FILES = 256  # at once, at most; each costs a descriptor
UNPACK = {
    "gzip": "gunzip -k",
    "xz": "unxz -k",
    "bzip2": "bunzip2 -k",
    "zstd": "unzstd",
    "zip": "unzip",
    "tar": "tar xf",
}
PARQUET_LINES = (
    'python -c "import json, sys, pyarrow.parquet as p; '
    '[print(json.dumps(row, default=str)) for row in p.read_table(sys.argv[1]).to_pylist()]"'
)


@dataclass(frozen=True)
class Similarity:
    """When documents resemble each other, and how candidates are found."""

    key: str = "text"
    threshold: float = 0.7
    shingle: int = 5  # characters of a piece
    seeds: int = 100  # parts of the range of hashes
    bands: int = 20
    seed: int = 1234


@dataclass
class Outcome:
    """What was read, and for each document that goes the one it resembles, with their index."""

    documents: int = 0
    removed: dict[int, tuple[int, float]] = field(default_factory=dict)
    bad: SkippedLines = field(default_factory=SkippedLines)
    is_unchanged: bool = False  # the output was there, with this content


class JsonDocuments:
    """The documents of several files of JSON lines, by number, read from the files when needed."""

    def __init__(self, paths: list[str], key: str, bad: SkippedLines) -> None:
        self.paths = paths
        self.key = key
        self.bad = bad
        self.first_bad: Rejected | None = None
        self.content = lru_cache(OPEN_FILES)(lambda number: map_lines(paths[number]))
        self.size = sum(len(self.content(number)) for number in range(len(paths)))
        # Where each document is; filled by `scan`.
        self.files = self.lines = self.begins = self.ends = np.zeros(0, np.int64)

    def scan(self, advance: Callable[[int], None]) -> Iterator[str]:
        """Yield the texts in their order, count bad lines, and note where each text is."""
        places: list[tuple[int, int, int, int]] = []
        blocks: list[npt.NDArray[np.int64]] = []
        for number, path in enumerate(self.paths):
            # Files are mapped, so a line costs no memory until it is parsed.
            content = self.content(number)
            begin = len(BOM) if content[: len(BOM)] == BOM else 0
            for line, view in enumerate(lines_of(content, begin, len(content)), 1):
                end = begin + len(view)
                advance(len(view) + 1)
                text = self.read(view, TextPlace(path, line))
                if text is not None:
                    places.append((number, line, begin, end))
                    # Arrays take a fraction of the memory of tuples.
                    if len(places) == 1 << 16:
                        blocks.append(np.array(places))
                        places.clear()
                    yield text
                begin = end + 1
        table = np.concatenate([*blocks, np.array(places, np.int64).reshape(-1, 4)])
        self.files, self.lines, self.begins, self.ends = table.T.copy()

    def read(self, line: memoryview, place: TextPlace) -> str | None:
        """Return the text of a line; None for an empty line, or a bad one, which is counted."""
        is_short = len(line) <= limits.LONGEST
        record = parse_line(line, [self.key], place) if is_short else too_long(place)
        if isinstance(record, Rejected):
            self.bad.count(record.reason, 1, str(place))
            self.first_bad = self.first_bad or record
            return None
        return None if record is None else record.texts[0]

    def line(self, i: int) -> bytes:
        """Return document i as it is in its file."""
        content = memoryview(self.content(self.files[i]))
        return bytes(content[self.begins[i] : self.ends[i]])

    def text(self, i: int) -> str:
        path = self.paths[self.files[i]]
        record = parse_line(memoryview(self.line(i)), [self.key], TextPlace(path))
        assert isinstance(record, Document)
        return record.texts[0]

    def place(self, i: int) -> str:
        return f"{self.paths[self.files[i]]}:{self.lines[i]}"


def map_lines(path: str) -> mmap.mmap | bytes:
    if Path(path).is_dir():
        raise bad_data(f"{path} is a folder; join its files with `meshwright data merge-json`")
    try:
        with open(path, "rb") as file:
            if kind := kind_of_bytes(file.read(HEAD)):
                raise bad_data(not_lines(path, kind))
            if not Path(path).stat().st_size:  # which cannot be mapped
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError):
            hint = near_path(path) or "; give files of JSON lines that are there"
        raise bad_data(f"{path} cannot be read: {error.strerror}{hint}") from None


def not_lines(path: str, kind: str) -> str:
    """Say why a file of another kind cannot be read, and which command turns it into JSON lines."""
    name = shlex.quote(path)
    if kind in UNPACK:
        return f"{path} is packed ({kind}), and its lines are read more than once; unpack it: {UNPACK[kind]} {name}"
    cure = "write its rows as lines of JSON"
    if kind == "parquet":
        target = shlex.quote(path.removesuffix(".parquet"))
        cure += f": {PARQUET_LINES} {name} > {target}.jsonl"
    return f"{path} has no lines of JSON ({kind}); {cure}"


def deduplicate(
    paths: list[str],
    output: str,
    rule: Similarity,
    report: str | None = None,
    overwrite: bool = False,
) -> Outcome:
    """Write what is kept to `output`, byte for byte, and to `report` why the others go."""
    target = Path(output)
    # Inputs stay open until the end, and are read while the output is written.
    inputs = {Path(path).resolve() for path in paths}
    for path in (output, report):
        if path is not None and Path(path).resolve() in inputs:
            raise UserError(f"{path} is an input, too; choose another name for what is written")
    if report is not None and Path(report).resolve() == target.resolve():
        raise UserError(f"{report} would hold what is kept and what is removed; name two files")

    out = Outcome()
    documents = JsonDocuments(paths, rule.key, out.bad)
    try:
        # Find what goes.
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent) as file:
            _write_keys(documents, rule, file, out)
            if not out.documents:
                raise bad_data(_nothing_in(documents))
            # A column of the keys is read at a time, in the order of the bands.
            keys = np.memmap(file, np.uint64, "r", shape=(out.documents, rule.bands))
            sharing, buckets = _buckets(keys)
            out.removed = choose_removed(documents, sharing, buckets, rule)
            del keys  # which maps the file that is closed here

        # Write what is kept.
        lines = (documents.line(i).strip() for i in range(out.documents) if i not in out.removed)
        out.is_unchanged = not write_lines(target, lines, overwrite)
        if report:
            with replacing(Path(report), typed=True) as listing:
                for i, (other, index) in sorted(out.removed.items()):
                    why = {
                        "removed": documents.place(i),
                        "kept": documents.place(other),
                        "jaccard": round(index, 4),
                    }
                    listing.write(orjson.dumps(why) + b"\n")
    except OSError as error:
        error.filename = error.filename or output  # a full disk names none; main adds the advice
        raise
    return out


def _nothing_in(documents: JsonDocuments) -> str:
    """Say that no file has a document, with what was left out and the first reason."""
    message = f"{', '.join(documents.paths)}: no document"
    if documents.bad:
        message += f"; left out {documents.bad}"
    first = documents.first_bad
    if first and first.cure:
        message += f"; {first.detail}; {first.cure}"
    return f"{message}; nothing was written"


def _write_keys(documents: JsonDocuments, rule: Similarity, file: IO[bytes], out: Outcome) -> None:
    """Write one key for each band of each document."""
    order = spares(rule)
    with progress_bar("fingerprints", documents.size) as advance:
        for text in documents.scan(advance):
            minima = signature(shingles(text, rule), order)
            file.write(band_keys(minima, rule.bands).tobytes())
            out.documents += 1
    file.flush()


def shingles(text: str, rule: Similarity) -> Hashes:
    """Return the hashes of all pieces, sorted, each once."""
    # A number for each character, and of the text's pieces all at once.
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.uint64)
    size = min(rule.shingle, len(points))  # a shorter text is one piece
    count = max(len(points) - rule.shingle + 1, 1)
    out = np.full(count, rule.seed << 8 | size, np.uint64)
    for k in range(size):
        out = out * FACTOR + points[k : k + count]
    out = mix(out)

    out.sort()  # three times as fast as np.unique, which hashes first
    is_first = np.append(True, out[1:] != out[:-1])
    once: Hashes = out[is_first]
    return once


def mix(x: Hashes) -> Hashes:
    """Return numbers whose bits all depend on all bits of `x`: MurmurHash3's last steps."""
    half = np.uint64(33)
    x = (x ^ (x >> half)) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> half)) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> half)


def spares(rule: Similarity) -> npt.NDArray[np.int64]:
    """Return for each part the order in which others replace it, itself first."""
    rng = np.random.Generator(np.random.PCG64(rule.seed))
    parts = np.arange(rule.seeds)
    drawn = [rng.permutation(rule.seeds) for _ in parts]
    out = np.array(drawn)
    # Exchange each part's own number with the one that was drawn first.
    own = np.argmax(out == parts[:, None], axis=1)
    out[parts, own] = out[:, 0].copy()
    out[:, 0] = parts
    return out


def signature(pieces: Hashes, order: npt.NDArray[np.int64]) -> Hashes:
    """Return the smallest hash in each part of the range of hashes; empty parts take another's."""
    parts = len(order)
    # Python's integers, since 2^64 is above the largest of 64 bits.
    edges = np.array([(part << 64) // parts for part in range(parts)], np.uint64)
    first = np.searchsorted(pieces, edges)
    # The pieces are sorted: a part begins at the first hash above its edge.
    has_any = np.diff(first, append=len(pieces)) > 0
    replacement = np.argmax(has_any[order], axis=1)  # the first in its order that is not empty
    source = order[np.arange(parts), replacement]
    out: Hashes = pieces[first[source]]
    return out


def band_keys(minima: Hashes, bands: int) -> Hashes:
    out = np.zeros(bands, np.uint64)
    # All bands at once, one of their hashes after the other.
    for column in minima.reshape(bands, -1).T:
        out = mix(out * FACTOR + column)
    return out


def _buckets(keys: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the documents that share a band with others, in order, and their buckets."""
    documents, buckets, first = [], [], 0
    for band in range(keys.shape[1]):
        # Documents with equal keys are neighbours in the order of the keys: number these groups.
        column = np.array(keys[:, band])
        order = np.argsort(column, kind="stable")
        ordered = column[order]
        is_new = np.append(True, ordered[1:] != ordered[:-1])
        number = np.cumsum(is_new) - 1
        # Most documents share no band with another, and are done with here.
        is_shared = np.bincount(number)[number] > 1
        documents.append(order[is_shared])
        buckets.append(number[is_shared] + first)
        first += int(number[-1]) + 1
    sharing = np.concatenate(documents)
    number = np.concatenate(buckets)
    order = np.argsort(sharing, kind="stable")
    return sharing[order], number[order]


def choose_removed(
    documents: JsonDocuments,
    sharing: npt.NDArray[np.int64],
    buckets: npt.NDArray[np.int64],
    rule: Similarity,
) -> dict[int, tuple[int, float]]:
    """Return the documents that go, each with the kept one it resembles and their index."""

    @lru_cache(maxsize=1024)
    def pieces(i: int) -> Hashes:
        return shingles(documents.text(i), rule)

    out: dict[int, tuple[int, float]] = {}
    kept_of = defaultdict[int, list[int]](list)  # kept documents of each bucket
    begins = np.flatnonzero(np.diff(sharing, prepend=-1))  # of each document's buckets
    for begin, end in pairwise([*begins.tolist(), len(sharing)]):
        i = int(sharing[begin])
        own_buckets = buckets[begin:end].tolist()
        # The first kept document, by its number, that is similar decides.
        candidates = {j for bucket in own_buckets for j in kept_of[bucket]}
        for other in sorted(candidates):
            index = jaccard(pieces(i), pieces(other))
            if index >= rule.threshold:
                out[i] = other, index
                break
        else:
            for bucket in own_buckets:
                kept_of[bucket].append(i)
    return out


def jaccard(a: Hashes, b: Hashes) -> float:
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / (len(a) + len(b) - shared)
