"""Read plain text, and pages of HTML among it.

A file of text is one document, or several with a separating line between them. Whether a document
is a page is decided for each one, after the text is divided.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.data.text import charsets, html_pages
from meshwright.data.text.charsets import BOM
from meshwright.data.text.divide import Slice, by_separator
from meshwright.data.text.records import BINARY, NOT_UTF8, Document, ReadOptions, Record, Rejected


def documents(texts: Slice, options: ReadOptions) -> Iterator[Record]:
    """Yield the documents of a text, or what is wrong in them; blank ones do not count."""
    content = texts.content
    # Looking for the bytes first is many times as fast as the pattern alone.
    if options.separator.encode() not in content:
        yield from _document(content, 0, texts, options)
        return
    begin = 0
    for line in by_separator(options.separator).at_end.finditer(content):
        yield from _document(content[begin : line.start()], begin, texts, options)
        begin = line.end()
    yield from _document(content[begin:], begin, texts, options)


def page(text: Slice, options: ReadOptions) -> Iterator[Record]:
    """Yield the document of a file that is named as a page, whatever lines are in it."""
    content = _page_text(text.content, options)
    yield from decode(content, 0, text, options._replace(encoding=text.codec))


def _document(content: bytes, at: int, texts: Slice, options: ReadOptions) -> Iterator[Record]:
    """Yield one document: a page if it begins as one, else plain text.

    A page within a text is mostly UTF-8 as the text is, whatever it declared when it was a file.
    """
    if not content:
        return
    if html_pages.IS_HTML.match(content):
        if not charsets.is_decoded(content):
            codec = charsets.codec_of_page(content, options.encoding)
            content = charsets.to_utf8(content, codec)
            options = options._replace(encoding=codec)
        content = _page_text(content, options)
    yield from decode(content, at, texts, options)


def _page_text(page: bytes, options: ReadOptions) -> bytes:
    """Return the text of a page, with its bad bytes; the page itself if these are an error."""
    if b"\0" in page or (options.on_error == "stop" and not charsets.is_utf8(page)):
        return page
    text = html_pages.page_text(page.removeprefix(BOM).decode("utf-8", "surrogateescape"))
    return text.encode("utf-8", "surrogateescape")


def decode(content: bytes, at: int, texts: Slice, options: ReadOptions) -> Iterator[Record]:
    """Yield a document with line feeds alone, or what is wrong with it or with lines left out.

    It begins `at` so many bytes after the first of `texts`.
    """
    repaired_at = None
    try:
        if b"\0" in content:
            yield _binary(content, at, texts)
            return
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        if charsets.why_binary(content):
            yield _binary(content, at, texts)
            return
        if options.on_error == "stop":
            yield _not_utf8(error, at, texts, options)
            return
        if options.on_error == "replace":
            text = content.decode("utf-8", "replace")
            repaired_at = error.start
        else:
            intact, rejected = _intact_lines(content, at, texts, options)
            yield from rejected
            text = "\n".join(intact)

    # A byte order mark is of a file that became a document among others.
    text = text.removeprefix("\ufeff")
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    if not text or text.isspace():
        return
    texts_of_keys = (text,) * len(options.keys)
    if repaired_at is None:
        lines = text.count("\n") + (not text.endswith("\n"))
        yield Document(texts_of_keys, texts.place(at), lines)
    else:
        bad, lines = count_bad_lines(text)
        yield Document(texts_of_keys, texts.place(at + repaired_at, exactly=True), lines, bad)


def _binary(content: bytes, at: int, texts: Slice) -> Rejected:
    why = charsets.why_binary(content)
    return Rejected(BINARY, texts.place(at), why, is_error=texts.is_named, bytes=len(content))


def _intact_lines(
    content: bytes, at: int, texts: Slice, options: ReadOptions
) -> tuple[list[str], list[Rejected]]:
    """Return the lines that are UTF-8, and those that are not."""
    intact = list[str]()
    rejected = list[Rejected]()
    for line in content.split(b"\n"):
        try:
            intact.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            rejected.append(_not_utf8(error, at, texts, options)._replace(is_error=True))
        at += len(line) + 1
    return intact, rejected


def count_bad_lines(text: str) -> tuple[int, int]:
    """Return the number of lines with U+FFFD for bad bytes, and of all lines."""
    lines = text.rstrip("\n").split("\n")
    return sum("\ufffd" in line for line in lines), len(lines)


def _not_utf8(error: UnicodeDecodeError, at: int, texts: Slice, options: ReadOptions) -> Rejected:
    """Say which byte is bad, and which charset the text may have."""
    content = error.object
    place = texts.place(at + error.start, exactly=True)
    byte = charsets.broken_byte(error) if options.encoding else None

    # The run stops here, so what to do is worth a look at the whole text.
    guess = cure = ""
    if options.on_error == "stop":
        bad, lines = count_bad_lines(content.decode("utf-8", "replace"))
        if byte is None and (guess := charsets.guess(content)):
            cure = f"it looks like {guess}, which --encoding {guess} reads"
        elif bad > max(lines // 2, 2):
            cure = f"{bad:,} of {lines:,} lines are not: --encoding names another encoding"
        elif byte is not None:
            cure = f"{bad:,} of {lines:,} lines are not {options.encoding}: --on-error replace keeps the rest"

    # In another charset: what is here was decoded, so the place in the file is not known.
    if byte is not None:
        detail = f"byte 0x{byte:02x} is not {options.encoding}"
        decoded = content.decode("utf-8", "replace")
        size = len(decoded.encode(options.encoding, "replace"))
        return Rejected(NOT_UTF8, place, detail, cure, texts.is_named, bytes=size)

    # In UTF-8.
    detail = f"0x{content[error.start]:02x}"
    if guess:
        counts = charsets.count_decoded(content, guess, "gb18030", "big5")
        detail += f"; {counts}"
    first = texts.byte + at + error.start
    return Rejected(
        NOT_UTF8,
        place,
        detail,
        cure,
        texts.is_named,
        first,
        len(content),
        guess,
    )
