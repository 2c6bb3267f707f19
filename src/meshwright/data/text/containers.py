"""Recognise kinds of files by their first bytes, and unpack compressed streams in bounded memory.

The standard library unpacks gzip, xz and bzip2; zstandard comes with the `data` extra. One loop
over the decompressors replaces their file readers, which hide damage: LZMAFile and BZ2File ignore
whatever follows a stream, and zstandard takes a stream that is cut short for complete.
"""

from __future__ import annotations

import bz2
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from meshwright.base.errors import UNAVAILABLE, UserError
from meshwright.data.text import charsets, limits

HEAD = 512  # bytes that decide the kind
START = 1 << 16  # bytes that decide the encoding, and show lines of JSON or the columns of a table
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow stream",
    b"SQLite format 3\0": "sqlite",
}
PDF = b"%PDF-"
# after a byte from 0x50 to 0x5f: a zstd frame without data, as pzstd writes
SKIPPABLE = b"\x2a\x4d\x18"
STREAMS = ("gzip", "xz", "bzip2", "zstd")
LAYERS = 4  # of compression within compression, at most
# packed bytes at once: zstd unpacks 4 of them to up to 2^17, so this bounds the memory
SLICE = 1 << 11


class DamagedInput(Exception):
    """A stream that ends before it should, or cannot be unpacked."""


DAMAGES = (DamagedInput, tarfile.TarError, zipfile.BadZipFile)


def kind_of_bytes(start: bytes) -> str | None:
    """Return the kind of a file with these first bytes; None for text, which may begin as MAGIC."""
    start = start[:HEAD]
    if start.startswith(PDF):
        return "pdf"
    # A text may happen to begin with a container's letters, such as BZh or PAR1.
    if charsets.is_utf8(start) and not charsets.CONTROL.search(start):
        return None
    # tar's mark is in the middle of its first header.
    if start[257:262] == b"ustar":
        return "tar"
    if start[1:4] == SKIPPABLE and 0x50 <= start[0] <= 0x5F:
        return "zstd"
    return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)


def missing(package: str, what: str) -> UserError:
    return UserError(
        f"{what} needs the package {package}: pip install 'meshwright[data]'", UNAVAILABLE
    )


def unpacked(file: BinaryIO) -> BinaryIO:
    """Return the stream inside a buffered one, even if it is compressed several times."""
    for _ in range(LAYERS):
        kind = kind_of_bytes(peek(file))
        if kind not in STREAMS:
            return file
        file = buffered(_streams(file, kind))
    if kind_of_bytes(peek(file)) in STREAMS:
        raise DamagedInput(f"compressed more than {LAYERS} times, one in another")
    return file


def peek(file: BinaryIO) -> bytes:
    """Return the next bytes, HEAD or more if there are, START at most."""
    return bytes(cast(Any, file).peek(START)[:START])


def _streams(file: BinaryIO, kind: str) -> Iterator[bytes]:
    """Yield the contents of one compressed stream after another; zeros may pad each."""
    begin, errors = _library(kind)
    stream: Any = None
    packed = memoryview(b"")
    while packed or (packed := memoryview(cast(Any, file).read1(limits.CHUNK))):
        # Zeros may lie between two streams: tape drives and some writers leave them.
        if stream is None:
            packed = memoryview(bytes(packed).lstrip(b"\0"))
            if not packed:
                continue
            stream = begin()
        part = packed[:SLICE]
        packed = packed[SLICE:]
        try:
            data = stream.decompress(part)
        except errors as error:
            raise DamagedInput(f"{kind}: {error}") from None
        # What follows the end of a stream belongs to the next one.
        if stream.eof:
            packed = memoryview(stream.unused_data + bytes(packed))
            stream = None
        if data:
            yield data
    if stream is not None:
        raise DamagedInput(f"Compressed file ended within a {kind} stream")


def _library(kind: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """Return the maker of a decompressor, and its errors."""
    # zlib takes 31 as 15, for a window of 2^15 bytes, plus 16, for gzip's header.
    if kind == "gzip":
        return lambda: zlib.decompressobj(31), (zlib.error,)
    if kind == "xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), (lzma.LZMAError,)
    if kind == "bzip2":
        return bz2.BZ2Decompressor, (OSError, ValueError)
    try:
        import zstandard
    except ImportError:
        raise missing("zstandard", "a .zst file") from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), (zstandard.ZstdError,)


def buffered(parts: Iterator[bytes]) -> BinaryIO:
    """Return parts of any size as a stream that can `peek`."""
    return cast(BinaryIO, io.BufferedReader(cast(Any, _Chunks(parts)), START))


class _Chunks(io.RawIOBase):
    """Read at least HEAD bytes at once, or to the end; raise damage after all that precedes it."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self.parts = parts
        self.ready = memoryview(b"")
        self.damage: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        have = 0
        while have < min(HEAD, len(buffer)) and (self.ready or self._more()):
            size = min(len(buffer) - have, len(self.ready))
            buffer[have : have + size] = self.ready[:size]
            self.ready = self.ready[size:]
            have += size
        # Bytes that precede damage are returned first; the next read raises it.
        if self.damage and not have:
            raise self.damage
        return have

    def _more(self) -> bool:
        try:
            self.ready = memoryview(b"" if self.damage else next(self.parts, b""))
        except DAMAGES as error:
            self.damage = error
        return len(self.ready) > 0


def chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes as they come, so that no buffer swallows what precedes damage."""
    while data := cast(Any, file).read1(limits.CHUNK):
        yield data


def position(file: BinaryIO) -> int:
    """Return the bytes read of the packed file, 0 for a pipe."""
    try:
        return file.tell()
    except (OSError, ValueError):
        return 0
