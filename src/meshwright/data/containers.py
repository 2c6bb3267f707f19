"""What documents come packed in: compression and tar archives of files.

The standard library reads gzip, xz, bzip2 and tar; zstandard comes with the `data` extra. Everything is unpacked in bounded
parts: a small file can hold more than the memory does.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from meshwright.errors import UNAVAILABLE, UserError

HEAD = 512  # bytes by which a kind is known
MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"PAR1": "parquet",
         b"ARROW1": "arrow", b"\xff\xff\xff\xff": "legacy arrow"}  # fmt: skip
SKIPPABLE = b"\x2a\x4d\x18"  # behind a byte from 0x50 to 0x5f: a zstd frame that tells of the next, as pzstd's
STREAMS = ("gzip", "xz", "bzip2", "zstd")
LAYERS = 4  # of compression, one in another
FOREIGN = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
CHUNK = 1 << 18
SLICE = 1 << 11  # packed bytes for zstd at once: it gives back all that they hold, up to 2^17 bytes for each four


class Damaged(Exception):
    """A stream that ends before it should, or cannot be unpacked."""


DAMAGES = (Damaged, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError)


def kind_of(start: bytes) -> str | None:
    """Of a file with these first bytes; None for plain text. The last of MAGIC is how a stream of Arrow batches begins."""
    if start[257:262] == b"ustar":
        return "tar"
    if start[1:4] == SKIPPABLE and 0x50 <= start[0] <= 0x5F:
        return "zstd"
    return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)


def foreign(start: bytes) -> str:
    """What to do about text in another encoding than UTF-8, or nothing. Known by its byte order mark, which UTF-32 shares."""
    name = next((name for mark, name in FOREIGN.items() if start.startswith(mark)), None)
    return f"is {name}: convert it, for example iconv -f {name} -t UTF-8" if name else ""


def missing(package: str, what: str) -> UserError:
    return UserError(f"{what} needs the package {package}: pip install 'meshwright[data]'", UNAVAILABLE)


# Streams.


def unpacked(file: BinaryIO) -> BinaryIO:
    """The stream inside, however often it is compressed. `file` has `peek`, or can be wrapped to have it."""
    for _ in range(LAYERS):
        kind = kind_of(peek(file))
        if kind not in STREAMS:
            return file
        file = _one_layer(file, kind)
    if kind_of(peek(file)) in STREAMS:
        raise Damaged(f"compressed more than {LAYERS} times, one in another")
    return file


def _one_layer(file: BinaryIO, kind: str) -> BinaryIO:
    if kind == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="rb"))
    if kind == "xz":
        return cast(BinaryIO, lzma.LZMAFile(file))
    if kind == "bzip2":
        return cast(BinaryIO, bz2.BZ2File(file))
    return cast(BinaryIO, io.BufferedReader(cast(Any, _Zstd(file)), CHUNK))


def peek(file: BinaryIO) -> bytes:
    return bytes(cast(Any, file).peek(HEAD)[:HEAD])


class _Zstd(io.RawIOBase):
    """zstandard's own reader takes a frame that is cut short for a whole one."""

    def __init__(self, file: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise missing("zstandard", "a .zst file") from None
        self.library, self.file = zstandard, file
        self.frame, self.begun = zstandard.ZstdDecompressor().decompressobj(), False
        self.packed, self.ready = memoryview(b""), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            if not self.packed:
                self.packed = memoryview(self.file.read(CHUNK))
            if not self.packed:
                if self.begun and not self.frame.eof:
                    raise Damaged("the last frame is not complete")
                return 0
            if self.frame.eof:
                self.frame = self.library.ZstdDecompressor().decompressobj()
            part, self.packed = self.packed[:SLICE], self.packed[SLICE:]
            self.begun = True
            try:
                self.ready = memoryview(self.frame.decompress(part))
            except self.library.ZstdError as error:
                raise Damaged(str(error)) from None
            if self.frame.eof and (left := len(self.frame.unused_data)):
                self.packed = memoryview(bytes(part[-left:]) + bytes(self.packed))
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
    start = peek(file)
    kind = kind_of(start)
    if kind in (None, "tar"):
        return kind == "tar"
    packed = bytes(cast(Any, file).peek(1 << 16))
    try:
        inner = cast(Any, unpacked(cast(BinaryIO, io.BufferedReader(cast(Any, io.BytesIO(packed)))))).read1(HEAD)
    except (*DAMAGES, OSError):
        return False
    return kind_of(inner) == "tar"


def members(file: BinaryIO, folder: str = "") -> Iterator[tuple[str, BinaryIO]]:
    """The files of an archive and of archives in it, in its order, unpacked; each is read before the next one is asked for.

    Nothing is written anywhere, so a name can be what it likes; links and devices are left out."""
    with tarfile.open(fileobj=_Reader(unpacked(file)), mode="r|") as archive:
        for member in archive:
            opened = archive.extractfile(member) if member.isfile() else None
            if opened is None:
                continue
            inner = cast(BinaryIO, io.BufferedReader(cast(Any, opened), 1 << 16))
            if is_archive(inner):
                yield from members(inner, f"{folder}{member.name}/")
            else:
                yield folder + member.name, unpacked(inner)
            cast(Any, archive).members = []  # tarfile keeps what it knows of each


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
