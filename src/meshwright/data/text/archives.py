"""Read the members of tar and zip archives, in bounded memory and whatever is damaged.

tarfile takes a damaged header for the end, and believes any size that a header claims.
"""

from __future__ import annotations

import lzma
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from meshwright.data.text import limits
from meshwright.data.text.containers import (
    DAMAGES,
    DamagedInput,
    buffered,
    kind_of_bytes,
    peek,
    unpacked,
)

HEADER = 1 << 20  # bytes of a member's headers in a tar archive, with its names
ENDS = 100  # times that tarfile may read at the end


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
        self.stream = stream
        self.left = HEADER
        self.ends = 0

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        # At the end of the stream, tarfile would go on reading until it had the size in the header.
        self.ends += not data
        self.left -= len(data)
        if self.ends > ENDS:
            raise DamagedInput("tar: a member claims more bytes than follow")
        if self.left < 0:
            raise DamagedInput(f"tar: a header of more than {HEADER:,} bytes")
        return data

    def next_member(self, archive: _Archive) -> tarfile.TarInfo | None:
        """Skip what is left of the last member, and read the next one's header."""
        # What is left of a member may be long; from here on, `left` bounds the header alone.
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


# A file in an archive, or its damage.
Member = tuple[str, BinaryIO | Exception]


def is_archive(stream: BinaryIO) -> bool:
    return kind_of_bytes(peek(stream)) == "tar"


def members(stream: BinaryIO, folder: str = "") -> Iterator[Member]:
    """Yield the unpacked files of an archive and of archives in it; read each before taking the
    next.

    In place of a file that cannot be unpacked comes its damage; damage of the archive is raised.
    Nothing is written, so names need no check; links and devices are skipped.
    """
    packed = _Packed(stream)
    with _Archive.open(fileobj=cast(Any, packed), mode="r|") as archive:
        while (member := packed.next_member(archive)) is not None:
            # tarfile would otherwise keep the header of every member.
            cast(Any, archive).members = []
            name = folder + member.name
            if member.issparse():
                yield name, DamagedInput("a sparse file; write the archive without --sparse")
                continue
            opened = archive.extractfile(member) if member.isfile() else None
            if opened is not None:
                yield from _member(name, cast(BinaryIO, opened))


def _member(name: str, opened: BinaryIO) -> Iterator[Member]:
    try:
        inner = unpacked(opened)
        if is_archive(inner):
            yield from members(inner, f"{name}/")
        else:
            yield name, inner
    except DAMAGES as error:
        yield name, error


def zip_members(file: BinaryIO) -> Iterator[Member]:
    """Yield the unpacked files of a zip archive, or their damage, as `members` does."""
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            try:
                with archive.open(member) as opened:
                    yield from _member(member.filename, buffered(_zipped(opened)))
            except (*DAMAGES, RuntimeError) as error:  # encrypted, or packed in another way
                yield member.filename, DamagedInput(str(error))


def _zipped(opened: Any) -> Iterator[bytes]:
    """Yield a member's bytes; the library raises at the end if its checksum is wrong."""
    try:
        while data := opened.read(limits.CHUNK):
            yield data
    except (zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise DamagedInput(f"zip: {error}") from None
