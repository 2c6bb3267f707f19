"""Read text in other encodings than UTF-8, and say which one a text may be in.

Everything else in this room reads UTF-8. A byte that cannot be decoded becomes a mark that is no
UTF-8 either, so that one place decides about bad bytes of all encodings.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator

from meshwright.settings.text_inputs import text_codec

BOM = b"\xef\xbb\xbf"
MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
DECLARED = 1 << 10  # bytes at the beginning of a page that may declare its charset, as in the HTML standard
CHARSET = re.compile(
    rb"<meta\b[^>]*\bcharset\s*=\s*[\"']?\s*([\w:.-]+)|<\?xml[^>]*\bencoding\s*=\s*[\"']([\w:.-]+)", re.I
)
# What browsers read where a page declares an older standard.
LARGER = {"gb2312": "gb18030", "gbk": "gb18030", "iso8859-1": "cp1252", "ascii": "cp1252"}
LARGER |= {"shift_jis": "cp932", "euc_kr": "cp949", "big5": "cp950"}


def mark_broken(error: UnicodeError) -> tuple[str, int]:
    """Return the first three bytes of a character of four, which carry a byte that is bad.

    The next character begins anew, so the mark is never completed: it counts as one bad place.
    """
    assert isinstance(error, UnicodeDecodeError)
    byte = error.object[error.start]
    return bytes((0xF0, 0x90 + (byte >> 6), 0x80 + (byte & 0x3F))).decode("ascii", "surrogateescape"), error.end


def broken_byte(error: UnicodeDecodeError) -> int | None:
    """Return the byte that a mark stands for, None for a byte of a text that was read as UTF-8."""
    mark = error.object[error.start : error.end]
    is_mark = len(mark) == 3 and mark[0] == 0xF0 and mark[1] < 0x94
    return ((mark[1] - 0x90) << 6) + (mark[2] & 0x3F) if is_mark else None


codecs.register_error("meshwright-broken", mark_broken)


def codec_of(start: bytes, given: str = "") -> str:
    """Return the codec of a text with these first bytes, "" for UTF-8.

    It is the `given` one, unless the bytes show another.
    """
    mark = next((codec for mark, codec in MARKS.items() if start.startswith(mark)), "")
    if mark or not given or start.startswith(BOM):
        return mark
    codec = text_codec(given)
    return "" if codec == "utf-8" or (not start.isascii() and is_utf8(start)) else codec


def is_utf8(start: bytes) -> bool:
    """Return whether this can be the beginning of a text in UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # its last character may be cut
    except UnicodeDecodeError:
        return False
    return True


def declared_codec(page: bytes) -> str:
    """Return the codec that a page of HTML declares, "" for UTF-8 or none that is known.

    A declaration in ASCII cannot be one of UTF-16.
    """
    declared = None if page.startswith(BOM) else CHARSET.search(page[:DECLARED])
    codec = text_codec((declared[1] or declared[2]).decode()) if declared else ""
    return "" if codec.startswith("utf") else LARGER.get(codec, codec)


def transcode(chunks: Iterable[bytes], codec: str) -> Iterator[bytes]:
    """Yield a text in UTF-8, after its mark."""
    decoder = codecs.getincrementaldecoder(codec)("meshwright-broken")
    yield BOM
    for chunk in chunks:
        yield decoder.decode(chunk).encode("utf-8", "surrogateescape")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")


def to_utf8(content: bytes, codec: str) -> bytes:
    """Return a text in UTF-8, with a mark if it was in another encoding."""
    return b"".join(transcode([content], codec)) if codec else content


def guess(content: bytes) -> str:
    """Return the encoding that a text seems to be in, "" if it is not clear."""
    sample = content[: 1 << 16]
    valid = sum(not c.isascii() for c in sample.decode("utf-8", "ignore"))
    if valid >= sample.decode("utf-8", "replace").count("\ufffd"):
        return ""  # UTF-8 with some bad bytes
    wide = [c for c in codecs.getincrementaldecoder("gb18030")("replace").decode(sample) if not c.isascii()]
    # The common characters of GB 2312, in the order of their sounds; a few bytes may be bad.
    common = sum(b"\xb0" <= c.encode("gb18030")[:1] <= b"\xd7" for c in wide)
    if 2 * common > len(wide) and wide.count("\ufffd") <= len(wide) // 100:
        return "gb18030"
    high = len(re.findall(rb"[\x80-\xff]", sample))
    alone = len(re.findall(rb"(?<=[\0-\x7f])[\x80-\xff](?=[\0-\x7f]|\Z)", sample))
    return "cp1252" if 2 * alone > high else ""
