"""Zip archives of torch.save: find the records in a file, write a new archive in a stream.

Reading is by hand because zipfile builds an object for every entry that a hostile directory lists,
ignores how many it claims, and does not say where a record's bytes begin. Writing uses zipfile,
with padding in front of each record, since torch aligns them to 64 bytes.
"""

from __future__ import annotations

import struct
import sys
import zipfile
from collections.abc import Callable, Iterable
from typing import NamedTuple

LOCAL, ENTRY, END = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s4H2LH")
END64, LOCATOR = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
ENTRIES, DIRECTORY, NAME = 200_000, 64 << 20, 512  # limits: entries, bytes of them all, of a name
FULL, FULL16 = 0xFFFFFFFF, 0xFFFF  # "see the 64-bit field"
ALIGN = 64
PAD = struct.Struct("<2sH")  # head of a padding block: torch's letters, size
SIZES64 = 20  # bytes that zipfile adds to an entry's header
Data = bytes | bytearray | memoryview


class ByteRange(NamedTuple):
    begin: int
    end: int


# Reading


def find_records(data: memoryview) -> dict[str, ByteRange]:
    """Return where each entry's bytes lie, or raise ValueError."""
    table, count, size = find_directory(data)
    if count > ENTRIES or not count * ENTRY.size <= size <= DIRECTORY:
        raise ValueError(
            f"its directory has {size:,} bytes and claims {count:,} entries; "
            f"at most {ENTRIES:,} in {DIRECTORY:,} are read"
        )
    ranges: dict[str, ByteRange] = {}
    extents, memory = [], 0
    position, stop = table, table + size
    for _ in range(count):
        name, record, header, position = read_entry(data[:stop], position, table)
        if name in ranges:
            raise ValueError(f"two entries are called {name!r}")
        memory += sys.getsizeof(name)  # up to four times its bytes: one letter above U+FFFF widens all
        if memory > DIRECTORY:
            raise ValueError(f"the names of its entries take more than {DIRECTORY:,} bytes")
        ranges[name] = record
        extents.append((header, record.end, name))
    extents.sort()
    for (_, end, name), (begin, _, other) in zip(extents, extents[1:], strict=False):
        if begin < end:
            raise ValueError(f"the entries {name!r} and {other!r} overlap")
    return ranges


def find_directory(data: memoryview) -> tuple[int, int, int]:
    """Return where the table of entries begins, their number, and its length."""
    tail = bytes(data[-(END.size + FULL16) :])
    at = tail.rfind(b"PK\5\6")
    while at >= 0 and (at + END.size > len(tail) or END.unpack_from(tail, at)[7] != len(tail) - at - END.size):
        at = tail.rfind(b"PK\5\6", 0, at)
    if at < 0:
        raise ValueError("it begins as a zip archive but ends without a directory, so it is cut short")
    _, _, _, _, count, size, table, _ = END.unpack_from(tail, at)
    end = len(data) - len(tail) + at
    if at >= LOCATOR.size and tail[at - LOCATOR.size :].startswith(b"PK\6\7"):  # torch always writes the 64-bit form
        _, _, end, _ = LOCATOR.unpack_from(tail, at - LOCATOR.size)
        signature, *_, count, size, table = END64.unpack_from(data, min(end, len(data) - END64.size))
        if signature != b"PK\6\6":
            raise ValueError("its 64-bit directory is damaged")
    if table + size != end:
        raise ValueError(f"its directory is said to end at byte {table + size:,}, and ends at {end:,}")
    return table, count, size


def read_entry(data: memoryview, at: int, limit: int) -> tuple[str, ByteRange, int, int]:
    """Return one line of the table: name, bytes, place of its header, start of the next line."""
    signature, _, _, flags, method, _, _, _, packed, size, name_size, extra_size, comment, _, _, kind, header = (
        ENTRY.unpack_from(data, at)
    )
    if name_size > NAME:
        raise ValueError(f"one of its entries has a name of {name_size:,} bytes; at most {NAME} are read")
    at += ENTRY.size
    raw, extra = bytes(data[at : at + name_size]), bytes(data[at + name_size : at + name_size + extra_size])
    name = raw.decode()
    if signature != b"PK\1\2" or len(extra) != extra_size:
        raise ValueError("its directory is damaged")
    size, packed, header = widen(extra, size, packed, header)
    if method or packed != size or flags & 1:
        raise ValueError(f"its entry {name!r} is compressed or encrypted; torch.save does neither")
    if name.startswith("/") or "\\" in name or ".." in name.split("/") or kind >> 28 == 0xA:
        raise ValueError(f"its entry {name!r} is a link or leads out of the archive")
    if header + LOCAL.size > limit:
        raise ValueError(f"its entry {name!r} begins at byte {header:,}, beyond the directory at {limit:,}")
    fields = LOCAL.unpack_from(data, header)
    begin = header + LOCAL.size + fields[9] + fields[10]
    if fields[0] != b"PK\3\4" or bytes(data[header + LOCAL.size :][: fields[9]]) != raw:
        raise ValueError(f"its entry {name!r} is not where the directory says")
    if begin + size > limit:
        raise ValueError(f"its entry {name!r} ends at byte {begin + size:,}, beyond the directory at {limit:,}")
    return name, ByteRange(begin, begin + size), header, at + name_size + extra_size + comment


def widen(extra: bytes, *fields: int) -> list[int]:
    """Return the fields, full ones replaced by the 64-bit ones of the extra block."""
    at, wider = 0, b""
    while at + 4 <= len(extra):
        tag, size = struct.unpack_from("<2H", extra, at)
        if tag == 1:
            wider = extra[at + 4 : at + 4 + size]
        at += 4 + size
    values = (value for (value,) in struct.iter_unpack("<Q", wider[: len(wider) // 8 * 8]))
    return [next(values, field) if field == FULL else field for field in fields]


# Writing


class AppendOnlyFile:
    """A file for zipfile that can only be appended to."""

    def __init__(self, send: Callable[[Data], None]) -> None:
        self.send, self.position = send, 0

    def write(self, data: Data) -> int:
        self.send(data)
        self.position += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def write_archive(send: Callable[[Data], None], entries: Iterable[tuple[str, Callable[[], Data]]]) -> None:
    """Write entries; each function makes its bytes when they are due."""
    stream = AppendOnlyFile(send)
    with zipfile.ZipFile(stream, "w") as out:  # type: ignore[call-overload]  # write() and flush() are all it needs
        for name, make in entries:
            info = zipfile.ZipInfo(name)
            padding = -(stream.position + LOCAL.size + len(name.encode()) + PAD.size + SIZES64) % ALIGN
            info.extra = PAD.pack(b"FB", padding) + bytes(padding)
            with out.open(info, "w", force_zip64=True) as file:
                file.write(make())
