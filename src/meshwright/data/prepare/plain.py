"""Cut files and streams into documents; read those of plain text.

A file of text is one document, or several with a separating line between them. A line of JSON is a
document that ends with its line feed.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator

from meshwright.data.prepare import containers, markup, records, wiki
from meshwright.data.prepare.folders import shown
from meshwright.data.prepare.records import TOO_LONG, Bad
from meshwright.errors import IO, UserError, bad_data

BOM = b"\xef\xbb\xbf"
PIECE = 1 << 20  # bytes
REST = 1 << 16  # bytes read beyond a piece, within which its last line mostly ends
JSON_LINES = "\n"  # the separator of lines of JSON
Span = tuple[bytes, int, int]  # a buffer, and where documents begin and end in it, since cutting would copy them
HTML_NAME = re.compile(r"\.x?html?(\.(gz|xz|zst|bz2))?$", re.IGNORECASE)


@functools.cache
def ends_of(separator: str) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Return the patterns of a line that ends a document: with its line feed, or at the end too."""
    if separator == wiki.PAGES:
        return wiki.ENDS
    if separator == JSON_LINES:
        return re.compile(b"\n"), re.compile(b"\n")
    line = rb"^" + re.escape(separator.encode()) + rb"\r?"
    return re.compile(line + rb"\n", re.MULTILINE), re.compile(line + rb"(?:\n|\Z)", re.MULTILINE)


def documents(content: bytes, name: str, separator: str) -> Iterator[tuple[int, str | Bad]]:
    """Yield the documents of a text, or what is wrong with each, and where they begin in it.

    Blank ones do not count.
    """
    if separator == wiki.PAGES:
        if content.startswith(TOO_LONG):
            yield 0, Bad(f"page longer than {records.LONGEST:,} bytes", "a dump without old revisions is shorter")
        yield from wiki.articles(content)
        return
    is_page = HTML_NAME.search(name) or markup.IS_HTML.match(content)
    begin = len(BOM) * content.startswith(BOM)
    # Looking for the bytes first is many times as fast as the pattern alone.
    is_whole = is_page or separator.encode() not in content
    separators = [] if is_whole else ends_of(separator)[1].finditer(content)
    for start, end in [*(line.span() for line in separators), (len(content), len(content))]:
        if part := content[begin:start]:
            text = decode(part, separator)
            if is_page and isinstance(text, str):
                text = markup.page_text(text)
            if isinstance(text, Bad) or (text and not text.isspace()):
                yield begin, text
        begin = end


def decode(content: bytes, separator: str) -> str | Bad:
    """Return a text with line feeds alone, or what is wrong with it."""
    if content.startswith(TOO_LONG):
        return Bad(f"longer than {records.LONGEST:,} bytes", f"divide it: lines {separator!r}, or --document-separator")
    other = containers.foreign_encoding(content)
    if not other and (at := content.find(b"\0")) >= 0:
        return Bad("binary", f"NUL byte at {at}", is_passed=True)
    try:
        if not other:
            text = content.decode("utf-8")
            return text.replace("\r\n", "\n") if b"\r" in content else text
    except UnicodeDecodeError as error:
        other = f"byte 0x{content[error.start]:02x} at {error.start}"
    return Bad("not UTF-8", other, is_passed=True)


def read_text_file(path: str) -> bytes | Bad:
    """Return a text file's content, unpacked."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size <= records.LONGEST:
                content = file.read()  # many times as fast as reading up to records.LONGEST
                if containers.kind_of_bytes(content[: containers.HEAD]) not in containers.STREAMS:
                    return content
                file.seek(0)
            content = containers.unpacked(file).read(records.LONGEST + 1)
    except containers.DAMAGES as error:
        return Bad("damaged file", str(error))
    except OSError as error:
        why = "it has vanished" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise UserError(f"{shown(path)} cannot be read: {why}; start again", IO) from None
    return content if len(content) <= records.LONGEST else TOO_LONG


def next_end(data: bytes, separator: str, least: int) -> int:
    """Return where the first document ends that ends at `least` or later; 0 if none does."""
    if separator == JSON_LINES:
        return data.find(b"\n", max(least - 1, 0)) + 1
    lines = ends_of(separator)[0].finditer(data, max(least - margin_of(separator), 0))
    return next((line.end() for line in lines if line.end() >= least), 0)


def last_end(data: bytes | bytearray, separator: str, at: int = 0) -> int:
    """Return where the last document ends, looking from `at` on; 0 if none does."""
    if separator == JSON_LINES:
        return data.rfind(b"\n", at) + 1
    return max((line.end() for line in ends_of(separator)[0].finditer(data, at)), default=0)


def margin_of(separator: str) -> int:
    """Return the most bytes of a separating line, with the line feed before it and its own."""
    return len(separator.encode()) + 3


def read_span(path: str, begin: int, end: int, separator: str) -> tuple[Span, int]:
    """Return the documents that begin within these bytes of a file, and where the first begins."""
    start = max(begin - margin_of(separator), 0)
    size = end - start
    try:
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(size + REST)
            require_length(path, start, len(data), end)
            first = next_end(data, separator, begin - start) if begin else len(BOM) * data.startswith(BOM)
            if first >= size or (begin and not first):
                return (b"", 0, 0), 0  # no document begins here
            stop = next_end(data, separator, size)
            while not stop and (more := file.read(max(PIECE, len(data) // 4))):
                searched = len(data) - margin_of(separator)
                data += more
                stop = next_end(data, separator, max(size, searched))
                if (stop or len(data)) - size > records.LONGEST:  # only the last document can be so long
                    data, stop = data[: max(first, last_end(data[:size], separator))] + TOO_LONG, 0
                    break
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be read at byte {begin:,}: {error.strerror or error}", IO) from None
    return (data, first, stop or len(data)), start + first


def require_length(path: str, start: int, have: int, end: int) -> None:
    """Raise if a file ends before a place that it had when it was inspected."""
    if have < end - start:
        raise bad_data(
            f"{shown(path)} has become shorter while it was read: it ends at byte {start + have:,} and had at least "
            f"{end:,}; start again when it is complete"
        )


def cut_stream(chunks: Iterator[bytes], size: int, separator: str) -> Iterator[bytes]:
    """Yield documents, about `size` bytes at a time; raise damage after the intact ones."""
    begins_line = b"" if separator == JSON_LINES else b"\n"
    # `end`: of the last complete document; `searched`: the beginning of the unfinished line.
    unread, end, searched, too_long = bytearray(), 0, 0, False
    try:
        for chunk in chunks:
            unread += chunk
            if too_long:
                line = ends_of(separator)[0].search(unread)
                if line is None:
                    unread = unread[unread.rfind(b"\n") + 1 :][: margin_of(separator)]
                    continue
                unread, searched, too_long = bytearray(TOO_LONG + begins_line) + unread[line.start() :], 0, False
            end = last_end(unread, separator, searched) or end
            searched = max(end, unread.rfind(b"\n") + 1)
            if end and len(unread) >= size:
                yield bytes(unread[:end])
                unread, searched, end = unread[end:], searched - end, 0
            if len(unread) > records.LONGEST:
                unread, searched, too_long = unread[searched:][: margin_of(separator)], 0, True
    except containers.DAMAGES:
        if end:
            yield bytes(unread[:end])
        raise
    if rest := TOO_LONG if too_long else bytes(unread):
        yield rest
