"""What documents come packed in: compression, tar archives of text files, Parquet and Arrow tables.

The standard library reads gzip, xz, bzip2 and tar; zstandard and pyarrow come with the `data` extra.
"""

from __future__ import annotations

import bz2
import functools
import glob
import gzip
import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from meshwright.errors import BAD_DATA, UNAVAILABLE, UserError

HEAD = 512  # bytes by which a kind is known
MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"PAR1": "parquet",
         b"ARROW1": "arrow", b"\xff\xff\xff\xff": "legacy arrow"}  # fmt: skip
CHUNK = 1 << 18


class Damaged(Exception):
    """A stream that ends before it should, or cannot be unpacked."""


DAMAGES = (Damaged, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError)


def kind_of(start: bytes) -> str | None:
    """Of a file with these first bytes; None for plain text. The last of MAGIC is how a stream of Arrow batches begins."""
    if start[257:262] == b"ustar":
        return "tar"
    return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)


def missing(package: str, what: str) -> UserError:
    return UserError(f"{what} needs the package {package}: pip install 'meshwright[data]'", UNAVAILABLE)


# Streams.


def unpacked(file: BinaryIO) -> BinaryIO:
    """The stream inside, as it is if it is not compressed. `file` has `peek`, or can be wrapped to have it."""
    kind = kind_of(_peek(file))
    if kind == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if kind == "xz":
        return cast(BinaryIO, lzma.LZMAFile(file))
    if kind == "bzip2":
        return cast(BinaryIO, bz2.BZ2File(file))
    if kind == "zstd":
        return cast(BinaryIO, io.BufferedReader(cast(Any, _Zstd(file)), CHUNK))
    return file


def _peek(file: BinaryIO) -> bytes:
    return bytes(cast(Any, file).peek(HEAD)[:HEAD])


class _Zstd(io.RawIOBase):
    """zstandard's own reader takes a frame that is cut short for a whole one."""

    def __init__(self, file: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise missing("zstandard", "a .zst file") from None
        self.library, self.file = zstandard, file
        self.frame, self.ready, self.begun = zstandard.ZstdDecompressor().decompressobj(), b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            if self.frame.eof and (left := self.frame.unused_data):
                packed = left
                self.frame, self.begun = self.library.ZstdDecompressor().decompressobj(), False
            elif not (packed := self.file.read(CHUNK)):
                if self.begun and not self.frame.eof:
                    raise Damaged("the last frame is not complete")
                return 0
            elif self.frame.eof:
                self.frame = self.library.ZstdDecompressor().decompressobj()
            self.begun = True
            try:
                self.ready = self.frame.decompress(packed)
            except self.library.ZstdError as error:
                raise Damaged(str(error)) from None
        size = min(len(buffer), len(self.ready))
        buffer[:size], self.ready = self.ready[:size], self.ready[size:]
        return size


def chunks(file: BinaryIO) -> Iterator[bytes]:
    """The unpacked bytes as they come: what precedes damage is not lost in a buffer."""
    stream = cast(Any, unpacked(file))
    first = True
    while data := stream.read1(CHUNK):
        yield data.removeprefix(b"\xef\xbb\xbf") if first else data
        first = False


def position(file: BinaryIO) -> int:
    """Bytes read of the packed file; 0 of a pipe."""
    try:
        return file.tell()
    except (OSError, ValueError):
        return 0


# Archives.


def is_archive(file: BinaryIO) -> bool:
    """A tar, perhaps compressed. Looks at the first block alone, without taking it."""
    start = _peek(file)
    kind = kind_of(start)
    if kind in (None, "tar"):
        return kind == "tar"
    packed = bytes(cast(Any, file).peek(1 << 16))
    try:
        inner = cast(Any, unpacked(cast(BinaryIO, io.BufferedReader(cast(Any, io.BytesIO(packed)))))).read1(HEAD)
    except (*DAMAGES, OSError):
        return False
    return kind_of(inner) == "tar"


def texts(file: BinaryIO, size: int) -> Iterator[list[tuple[str, bytes]]]:
    """The files of an archive and of archives in it, in its order, some together."""
    kept: list[tuple[str, bytes]] = []
    have = 0
    try:
        for name, content in _members(file, ""):
            kept.append((name, content))
            have += len(content)
            if have >= size:
                yield kept
                kept, have = [], 0
    except DAMAGES:
        if kept:
            yield kept
        raise
    if kept:
        yield kept


def _members(file: BinaryIO, folder: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=_Reader(unpacked(file)), mode="r|") as archive:
        for member in archive:
            opened = archive.extractfile(member) if member.isfile() else None
            if opened is None:
                continue
            inner = cast(BinaryIO, io.BufferedReader(cast(Any, opened), 1 << 16))
            if is_archive(inner):
                yield from _members(inner, f"{folder}{member.name}/")
            else:
                yield folder + member.name, unpacked(inner).read()


class _Reader(io.RawIOBase):
    """tarfile's stream mode takes few bytes for the end: it gets as many as it asks for."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts = []
        while size > 0 and (part := self.file.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


# Tables.


def tables_in(folder: str) -> list[str]:
    """A data set saved by Hugging Face's `datasets`, in its order, or the .parquet files below a folder, sorted."""
    state = Path(folder) / "state.json"
    if (Path(folder) / "dataset_dict.json").exists():
        splits = json.loads((Path(folder) / "dataset_dict.json").read_text()).get("splits", [])
        one = Path(folder) / (splits or ["train"])[0]
        raise UserError(f"--input {folder} holds several data sets: name one of them, such as {one}", BAD_DATA)
    if state.exists():
        return [str(Path(folder) / one["filename"]) for one in json.loads(state.read_text())["_data_files"]]
    escaped = glob.escape(folder)
    return sorted(glob.glob(f"{escaped}/**/*.parquet", recursive=True)) or sorted(glob.glob(f"{escaped}/*.arrow"))


def parts_of(path: str, kind: str) -> int:
    """Row groups, or batches."""
    try:
        if kind == "parquet":
            return int(_parquet(path).num_row_groups)
        return sum(1 for _ in _batches(path))
    except ImportError:
        raise missing("pyarrow", path) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}", BAD_DATA) from None


def spans(count: int, size: int, piece: int) -> Iterator[tuple[int, int]]:
    """Of so many parts of a file of this size, some together that make about a piece."""
    step = max(1, count * piece // max(size, 1))
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)


def rows(path: str, kind: str, begin: int, end: int, keys: list[str]) -> Iterator[list[Any]]:
    """The values under the keys."""
    if kind == "parquet":
        file = _parquet(path)
        _need(path, keys, file.schema_arrow.names)
        batches = file.iter_batches(1024, row_groups=range(begin, end), columns=keys, use_threads=False)
    else:
        batches = (batch for n, batch in enumerate(_batches(path)) if begin <= n < end)
    for batch in batches:
        _need(path, keys, batch.schema.names)
        yield from map(list, zip(*(batch.column(key).to_pylist() for key in keys), strict=True))


def _need(path: str, keys: list[str], names: list[str]) -> None:
    for key in keys:
        if key not in names:
            raise UserError(f"{path} has no column {key!r}: --json-keys names one of {', '.join(names[:10])}", BAD_DATA)


@functools.lru_cache(maxsize=1)
def _parquet(path: str) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, memory_map=True)


def _batches(path: str) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(path) as source:
        if bytes(source.read(6)) == b"ARROW1":
            reader = pyarrow.ipc.open_file(source)
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            source.seek(0)
            yield from pyarrow.ipc.open_stream(source)
