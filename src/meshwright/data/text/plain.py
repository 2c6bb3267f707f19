"""Cut files and streams into documents; read those of plain text.

A file of text is one document, or several with a separating line between them. A line of JSON is a
document that ends with its line feed.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Generator, Iterator

from meshwright.base.errors import IO, UserError, bad_data
from meshwright.data.text import containers, dumps, encodings, markup, records
from meshwright.data.text.encodings import BOM
from meshwright.data.text.folders import shown
from meshwright.data.text.records import BINARY, NOT_UTF8, TOO_LONG, Bad, Mended, Reading, Unit

PIECE = 1 << 20  # bytes
REST = 1 << 16  # bytes read beyond a piece, within which its last line mostly ends
JSON_LINES = "\n"  # the separator of lines of JSON
Span = tuple[bytes, int, int]  # a buffer, and where documents begin and end in it, since cutting would copy them
HTML_NAME = re.compile(r"\.x?html?(\.(gz|xz|zst|bz2))?$", re.IGNORECASE)


@functools.cache
def ends_of(separator: str) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Return the patterns of a line that ends a document: with its line feed, or at the end too."""
    if dump := dumps.with_separator(separator):
        return dump.ends
    if separator == JSON_LINES:
        return re.compile(b"\n"), re.compile(b"\n")
    line = rb"^" + re.escape(separator.encode()) + rb"\r?"
    return re.compile(line + rb"\n", re.MULTILINE), re.compile(line + rb"(?:\n|\Z)", re.MULTILINE)


def documents(content: bytes, name: str, how: Reading, before: int = 0) -> Iterator[tuple[int, Unit]]:
    """Yield the documents of a text, or what is wrong in it, and where either begins.

    Blank documents do not count. `before`: bytes of the file that precede the text.
    """
    if dump := dumps.with_separator(how.separator):
        yield from dump.documents(content, how)
        return
    is_named = HTML_NAME.search(name) is not None  # a page as a whole, whatever lines are in it
    # Looking for the bytes first is many times as fast as the pattern alone.
    is_whole = is_named or how.separator.encode() not in content
    separators = [] if is_whole else ends_of(how.separator)[1].finditer(content)
    begin = 0
    for start, end in [*(line.span() for line in separators), (len(content), len(content))]:
        if part := content[begin:start]:
            for at, unit in _document(part, is_named, how, before + begin):
                if not isinstance(unit, list) or not unit[0].isspace():
                    yield begin + at, unit
        begin = end


def _document(content: bytes, is_named: bool, how: Reading, before: int) -> Iterator[tuple[int, Unit]]:
    """Yield one document: a page if its file is named as one or it begins as one, else plain text.

    A page within a text is mostly UTF-8 as the text is, whatever it declared when it was a file.
    """
    if markup.IS_HTML.match(content) or (is_named and not content.startswith(TOO_LONG)):
        if is_named or not encodings.is_decoded(content):
            codec = encodings.declared_codec(content) or encodings.codec_of(content, how.encoding)
            content, how = encodings.to_utf8(content, codec), how._replace(encoding=codec)
        content = _page_text(content, how)
    yield from decode(content, how, before)


def _page_text(page: bytes, how: Reading) -> bytes:
    """Return the text of a page, with its bad bytes; the page itself if these are an error."""
    if b"\0" in page or (how.on_error == "stop" and not encodings.is_utf8(page)):
        return page
    text = markup.page_text(page.removeprefix(BOM).decode("utf-8", "surrogateescape"))
    return text.encode("utf-8", "surrogateescape")


def decode(content: bytes, how: Reading, before: int = 0) -> Iterator[tuple[int, Unit]]:
    """Yield a text with line feeds alone, and what is wrong with it or with lines left out."""
    if content.startswith(TOO_LONG):
        long = f"divide it: lines {how.separator!r}, or --document-separator"
        yield 0, Bad(f"longer than {records.LONGEST:,} bytes", long)
        return
    if b"\0" in content:
        yield 0, Bad(BINARY, encodings.why_binary(content), is_passed=True, size=len(content))
        return
    try:
        text, mended = content.decode("utf-8"), None
    except UnicodeDecodeError as error:
        if why := encodings.why_binary(content):
            yield 0, Bad(BINARY, why, is_passed=True, size=len(content))
            return
        if how.on_error == "stop":
            yield error.start, _not_utf8(error, how, before)
            return
        if how.on_error == "replace":
            text, mended = content.decode("utf-8", "replace"), error.start
        else:
            text, mended = (yield from _intact_lines(content, how, before)), None
    text = text.removeprefix("\ufeff")  # a mark of a file that became a document among others
    text = text.replace("\r\n", "\n") if "\r" in text else text
    if text:
        yield (0, [text]) if mended is None else (mended, Mended([text], *count_bad_lines(text)))


def _intact_lines(content: bytes, how: Reading, before: int) -> Generator[tuple[int, Bad], None, str]:
    """Yield the lines that are not UTF-8; return the others."""
    intact, at = [], 0
    for line in content.split(b"\n"):
        try:
            intact.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            yield at + error.start, _not_utf8(error, how, before + at)._replace(is_passed=False)
        at += len(line) + 1
    return "\n".join(intact)


def count_bad_lines(text: str) -> tuple[int, int]:
    """Return the number of lines with U+FFFD for bad bytes, and of all lines."""
    lines = text.rstrip("\n").split("\n")
    return sum("\ufffd" in line for line in lines), len(lines)


def _not_utf8(error: UnicodeDecodeError, how: Reading, before: int) -> Bad:
    byte = encodings.broken_byte(error) if how.encoding else None
    guess, cure, size = "", "", len(error.object)
    if how.on_error == "stop":
        bad, lines = count_bad_lines(error.object.decode("utf-8", "replace"))
        if byte is None and (guess := encodings.guess(error.object)):
            cure = f"it looks like {guess}, which --encoding {guess} reads"
        elif bad > max(lines // 2, 2):
            cure = f"{bad:,} of {lines:,} lines are not: --encoding names another encoding"
        elif byte is not None:
            cure = f"{bad:,} of {lines:,} lines are not {how.encoding}: --on-error replace keeps the rest"
    if byte is not None:  # its place in the file is not known
        size = len(error.object.decode("utf-8", "replace").encode(how.encoding, "replace"))
        return Bad(NOT_UTF8, f"byte 0x{byte:02x} is not {how.encoding}", is_passed=True, cure=cure, size=size)
    at = error.start
    detail = f"0x{error.object[at]:02x}"
    if guess:
        detail += f"; {encodings.count_decoded(error.object, guess, 'gb18030', 'big5')}"
    return Bad(NOT_UTF8, detail, is_passed=True, byte=before + at, size=size, cure=cure, guess=guess)


def read_text_file(path: str, encoding: str = "") -> bytes | Bad:
    """Return a text file's content, unpacked and in UTF-8, except for pages of another encoding."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size <= records.LONGEST:
                content = file.read()  # many times as fast as reading up to records.LONGEST
                if containers.kind_of_bytes(content) not in containers.STREAMS:
                    return encodings.to_utf8(content, codec_of_file(path, content, encoding))
                file.seek(0)
            content = containers.unpacked(file).read(records.LONGEST + 1)
    except containers.DAMAGES as error:
        return Bad("damaged file", str(error))
    except OSError as error:
        why = "it has vanished" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise UserError(f"{shown(path)} cannot be read: {why}; start again", IO) from None
    if len(content) > records.LONGEST:
        return TOO_LONG
    return encodings.to_utf8(content, codec_of_file(path, content, encoding))


def codec_of_file(name: str, start: bytes, encoding: str) -> str:
    """Return the codec in which to read a file, "" for UTF-8 and pages that declare their own."""
    declares = HTML_NAME.search(name) or (markup.IS_HTML.match(start) and encodings.declared_codec(start))
    return encodings.codec_of(start, "" if declares else encoding)


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
            if len(data) < end - start:
                raise bad_data(
                    f"{shown(path)} has become shorter while it was read: it ends at byte {start + len(data):,} and "
                    f"had at least {end:,}; start again when it is complete"
                )
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


def cut_stream(chunks: Iterator[bytes], size: int, separator: str) -> Iterator[bytes]:
    """Yield documents, about `size` bytes at a time; raise damage after the intact ones."""
    begins_line = b"" if separator == JSON_LINES else b"\n"
    # `end`: of the last complete document; `searched`: the beginning of the unfinished line.
    unread, end, searched, too_long = bytearray(), 0, 0, False
    try:
        for chunk in chunks:
            before = len(unread)
            unread += chunk
            if too_long:
                line = ends_of(separator)[0].search(unread)
                if line is None:
                    unread = unread[unread.rfind(b"\n") + 1 :][: margin_of(separator)]
                    continue
                unread, searched, too_long = bytearray(TOO_LONG + begins_line) + unread[line.start() :], 0, False
                before = 0
            if (feed := unread.rfind(b"\n", before)) >= 0:  # else no line ends here; looking again takes n * n
                end = last_end(unread, separator, searched) or end
                searched = max(end, feed + 1)
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
