"""Unpack compressed streams and archives in bounded memory.

The standard library unpacks gzip, xz, bzip2, tar and zip; zstandard comes with the `data` extra.
One loop over the decompressors replaces their file readers, which hide damage: LZMAFile and BZ2File
ignore whatever follows a stream, zstandard takes a stream that is cut short for complete, and
tarfile takes a damaged header for the end.
"""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from meshwright.base.errors import UNAVAILABLE, UserError
from meshwright.data.text import encodings

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
SKIPPABLE = b"\x2a\x4d\x18"  # after a byte from 0x50 to 0x5f: a zstd frame without data, as pzstd writes
STREAMS = ("gzip", "xz", "bzip2", "zstd")
LAYERS = 4  # of compression within compression, at most
CHUNK = 1 << 18
HEADER = 1 << 20  # bytes of a member's headers in a tar archive, with its names
ENDS = 100  # times that tarfile may read at the end
SLICE = 1 << 11  # packed bytes at once: zstd unpacks 4 of them to up to 2^17, so this bounds the memory


class DamagedInput(Exception):
    """A stream that ends before it should, or cannot be unpacked."""


DAMAGES = (DamagedInput, tarfile.TarError, zipfile.BadZipFile)


def kind_of_bytes(start: bytes) -> str | None:
    """Return the kind of a file with these first bytes; None for text, which may begin as MAGIC."""
    start = start[:HEAD]
    if start.startswith(PDF):
        return "pdf"
    if encodings.is_utf8(start) and not encodings.CONTROL.search(start):
        return None
    if start[257:262] == b"ustar":
        return "tar"
    if start[1:4] == SKIPPABLE and 0x50 <= start[0] <= 0x5F:
        return "zstd"
    return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)


def missing(package: str, what: str) -> UserError:
    return UserError(f"{what} needs the package {package}: pip install 'meshwright[data]'", UNAVAILABLE)


# Streams.


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
    while packed or (packed := memoryview(cast(Any, file).read1(CHUNK))):
        if stream is None:
            packed = memoryview(bytes(packed).lstrip(b"\0"))
            if not packed:
                continue
            stream = begin()
        part, packed = packed[:SLICE], packed[SLICE:]
        try:
            data = stream.decompress(part)
        except errors as error:
            raise DamagedInput(f"{kind}: {error}") from None
        if stream.eof:
            stream, packed = None, memoryview(stream.unused_data + bytes(packed))
        if data:
            yield data
    if stream is not None:
        raise DamagedInput(f"Compressed file ended within a {kind} stream")


def _library(kind: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """Return the maker of a decompressor, and its errors."""
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
        self.parts, self.ready = parts, memoryview(b"")
        self.damage: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        have = 0
        while have < min(HEAD, len(buffer)) and (self.ready or self._more()):
            size = min(len(buffer) - have, len(self.ready))
            buffer[have : have + size], self.ready = self.ready[:size], self.ready[size:]
            have += size
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
    while data := cast(Any, file).read1(CHUNK):
        yield data


def position(file: BinaryIO) -> int:
    """Return the bytes read of the packed file, 0 for a pipe."""
    try:
        return file.tell()
    except (OSError, ValueError):
        return 0


# Archives.


class _Header(tarfile.TarInfo):
    """A header that raises if it is damaged or if the archive ends without its block of zeros.

    After the zeros another archive may follow, as `cat` joins them.
    """

    @classmethod
    def fromtarfile(cls, archive: Any) -> Any:
        try:
            header = super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            archive.is_ended = True
            raise
        except (tarfile.HeaderError, ValueError, LookupError, RecursionError) as error:
            if archive.is_ended and isinstance(error, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
                raise
            raise DamagedInput(f"tar: {error} at byte {archive.offset:,}") from None
        archive.is_ended = False
        return header


class _Archive(tarfile.TarFile):
    tarinfo = _Header
    ignore_zeros = True
    is_ended = False


class _Packed:
    """The bytes of an archive as tarfile reads them, within limits that it lacks.

    A header may claim any size for its names, which tarfile collects, or for a file, beyond whose
    end it goes on reading nothing.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.left, self.ends = stream, HEADER, 0

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.ends += not data
        self.left -= len(data)
        if self.ends > ENDS:
            raise DamagedInput("tar: a member claims more bytes than follow")
        if self.left < 0:
            raise DamagedInput(f"tar: a header of more than {HEADER:,} bytes")
        return data

    def next_member(self, archive: _Archive) -> tarfile.TarInfo | None:
        """Skip what is left of the last member, and read the next one's header."""
        self.left = sys.maxsize
        stream = cast(Any, archive.fileobj)
        is_first = cast(Any, archive).firstmember is not None
        if not is_first and archive.offset > stream.tell():
            stream.seek(archive.offset)
        self.left = HEADER
        try:
            return archive.next()
        finally:
            self.left = sys.maxsize


def is_archive(stream: BinaryIO) -> bool:
    return kind_of_bytes(peek(stream)) == "tar"


def members(stream: BinaryIO, folder: str = "") -> Iterator[tuple[str, BinaryIO | Exception]]:
    """Yield the unpacked files of an archive and of archives in it; read each before taking the
    next.

    In place of a file that cannot be unpacked comes its damage; damage of the archive is raised.
    Nothing is written, so names need no check; links and devices are skipped.
    """
    packed = _Packed(stream)
    with _Archive.open(fileobj=cast(Any, packed), mode="r|") as archive:
        while (member := packed.next_member(archive)) is not None:
            cast(Any, archive).members = []  # free what tarfile keeps of each
            if member.issparse():
                yield folder + member.name, DamagedInput("a sparse file; write the archive without --sparse")
                continue
            opened = archive.extractfile(member) if member.isfile() else None
            if opened is None:
                continue
            yield from _member(folder + member.name, cast(BinaryIO, opened))


def _member(name: str, opened: BinaryIO) -> Iterator[tuple[str, BinaryIO | Exception]]:
    try:
        inner = unpacked(opened)
        if is_archive(inner):
            yield from members(inner, f"{name}/")
        else:
            yield name, inner
    except DAMAGES as error:
        yield name, error


def zip_members(file: BinaryIO) -> Iterator[tuple[str, BinaryIO | Exception]]:
    """Yield the unpacked files of a zip archive, or their damage, as `members` does."""
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                try:
                    with archive.open(member) as opened:
                        yield from _member(member.filename, buffered(_zipped(opened)))
                except (*DAMAGES, RuntimeError) as error:  # encrypted, or packed in another way
                    yield member.filename, DamagedInput(str(error))


def _zipped(opened: Any) -> Iterator[bytes]:
    """Yield a member's bytes; the library raises at the end if its checksum is wrong."""
    try:
        while data := opened.read(CHUNK):
            yield data
    except (zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise DamagedInput(f"zip: {error}") from None
