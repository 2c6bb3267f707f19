"""Find the documents in the bytes of files and streams, wherever these are cut.

A piece of a file is a range of its bytes. It has the documents that begin in it, so that workers
agree about the borders without talking to each other. A stream is cut behind a document.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.base.errors import bad_data
from meshwright.data.text import folders, limits
from meshwright.data.text.charsets import BOM
from meshwright.data.text.containers import DAMAGES
from meshwright.data.text.records import TextPlace, shown


class Slice(NamedTuple):
    """Whole documents of a file: the bytes `first` to `stop` of `data`, and where these are.

    A document that follows them may be `lacking` because it is too long.
    """

    path: str
    data: bytes = b""
    first: int = 0
    stop: int = 0
    line: int = 0  # lines that precede it, from the byte `after` of the file on
    after: int = 0
    byte: int = 0  # bytes that precede it
    lacking: bool = False
    is_named: bool = True  # what is no text is an error; in folders and archives it is passed over
    is_range: bool = False  # of a file whose documents are known by their lines
    codec: str = ""  # from which it was decoded

    @property
    def content(self) -> bytes:
        return self.data[self.first : self.stop]

    @property
    def is_start(self) -> bool:
        """Whether the file begins here."""
        return self.byte <= len(BOM)

    def place(self, at: int, exactly: bool = False) -> TextPlace:
        """Return the place of a document, which begins so many bytes after the first.

        Documents of files that are read as a whole have no line, but those that are asked for
        `exactly`, because of a bad byte.
        """
        if self.is_range:
            return TextPlace(self.path, 1, "line", self.after + at)
        if not exactly:
            return TextPlace(self.path)
        return TextPlace(
            self.path, self.line + self.data.count(b"\n", self.first, self.first + at) + 1
        )


def whole(path: str, content: bytes, is_named: bool = True, codec: str = "") -> Slice:
    """Return a file that is read as a whole, without its byte order mark."""
    first = len(BOM) * content.startswith(BOM)
    return Slice(path, content, first, len(content), byte=first, is_named=is_named, codec=codec)


class Division:
    """Where documents end: behind a line that matches a pattern."""

    def __init__(self, end: re.Pattern[bytes], last_end: re.Pattern[bytes], margin: int) -> None:
        # The end of a document with its line feed, and also at the end of a file.
        self.end = end
        self.at_end = last_end
        # The most bytes of such a line, with the line feed before it.
        self.margin = margin

    def first_end(self, data: bytes | bytearray) -> int:
        """Return where the first document ends, 0 if none does."""
        line = self.end.search(data)
        return line.end() if line else 0

    def next_end(self, data: bytes, least: int) -> int:
        """Return where the first document ends that ends at `least` or later; 0 if none does."""
        lines = self.end.finditer(data, max(least - self.margin, 0))
        return next((line.end() for line in lines if line.end() >= least), 0)

    def last_end(self, data: bytes | bytearray, at: int = 0) -> int:
        """Return where the last document ends, looking from `at` on; 0 if none does."""
        return max((line.end() for line in self.end.finditer(data, at)), default=0)


class LineFeeds(Division):
    """Each line is a document; looking for the byte alone is much faster."""

    def __init__(self) -> None:
        feed = re.compile(b"\n")
        super().__init__(feed, feed, 4)

    def next_end(self, data: bytes, least: int) -> int:
        return data.find(b"\n", max(least - 1, 0)) + 1

    def last_end(self, data: bytes | bytearray, at: int = 0) -> int:
        return data.rfind(b"\n", at) + 1


LINES = LineFeeds()


@functools.cache
def by_separator(separator: str) -> Division:
    """Return the division by lines that consist of the separator."""
    content = separator.encode()
    line = rb"^" + re.escape(content) + rb"\r?"
    end = re.compile(line + rb"\n", re.MULTILINE)
    at_end = re.compile(line + rb"(?:\n|\Z)", re.MULTILINE)
    # With the line feed before it, and the two characters that may end it.
    margin = len(content) + 3
    return Division(end, at_end, margin)


def read_range(path: str, begin: int, end: int, division: Division, is_named: bool = True) -> Slice:
    """Return the documents that begin within these bytes of a file."""
    start = max(begin - division.margin, 0)
    size = end - start
    lacking = False
    try:
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(size + limits.REST)
            if len(data) < size:
                raise bad_data(
                    f"{shown(path)} has become shorter while it was read: it ends at byte {start + len(data):,} and "
                    f"had at least {end:,}; start again when it is complete"
                )

            # The first document begins behind the end of one, or at the beginning of the file.
            first = len(BOM) * data.startswith(BOM)
            if begin:
                first = division.next_end(data, begin - start)
            if first >= size or (begin and not first):
                return Slice(path, byte=begin, is_named=is_named, is_range=True)  # none begins here

            # The last one ends beyond the range, perhaps far.
            stop = division.next_end(data, size)
            while not stop and (more := file.read(max(limits.PIECE, len(data) // 4))):
                searched = len(data) - division.margin
                data += more
                stop = division.next_end(data, max(size, searched))
                # only the last document can be so long
                if (stop or len(data)) - size > limits.LONGEST:
                    stop = max(first, division.last_end(data[:size]))
                    lacking = True
                    break
    except OSError as error:
        raise folders.interrupted(
            f"{shown(path)} cannot be read at byte {begin:,}", error
        ) from None
    if not stop and not lacking:
        stop = len(data)
    at = start + first
    return Slice(
        path,
        data,
        first,
        stop,
        after=at,
        byte=at,
        lacking=lacking,
        is_named=is_named,
        is_range=True,
    )


def cut_stream(
    chunks: Iterator[bytes], size: int, division: Division, stream: Slice
) -> Iterator[Slice]:
    """Yield documents, about `size` bytes at a time; raise damage after the intact ones.

    `stream` is where they begin, without bytes. Of a document that is too long nothing is kept but
    its place.
    """
    # `end`: of the last complete document; `searched`: the beginning of the unfinished line.
    unread = bytearray()
    end = 0
    searched = 0
    here = stream
    long = False

    def take(count: int) -> Slice:
        nonlocal here
        taken = here._replace(data=bytes(unread[:count]), stop=count)
        del unread[:count]
        here = here._replace(line=here.line + taken.data.count(b"\n"), byte=here.byte + count)
        return taken

    def forget(count: int) -> None:
        """Drop so many bytes, and of the unfinished line what cannot be an end of a document."""
        nonlocal here
        take(count)
        here = here._replace(byte=here.byte + max(len(unread) - division.margin, 0))
        del unread[division.margin :]

    try:
        for chunk in chunks:
            before = len(unread)
            unread += chunk

            # Within a document that is too long, only its end matters.
            if long:
                behind = division.first_end(unread)
                if not behind:
                    forget(unread.rfind(b"\n") + 1)
                    continue
                take(behind)
                long = False
                before = 0
                searched = 0

            # If no line ends in the chunk, no document does; looking again would take n * n.
            if (feed := unread.rfind(b"\n", before)) >= 0:
                end = division.last_end(unread, searched) or end
                searched = max(end, feed + 1)
            if end and len(unread) >= size:
                yield take(end)
                searched -= end
                end = 0
            if len(unread) > limits.LONGEST:
                yield here._replace(lacking=True)
                forget(searched)
                long = True
                searched = 0
    except DAMAGES:
        if end:
            yield take(end)
        raise
    if unread and not long:
        yield take(len(unread))
