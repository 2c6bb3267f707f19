"""Decode text that is not UTF-8, and say which charset a text may have.

All readers read UTF-8. A byte that a charset lacks becomes bytes that are invalid in UTF-8 too, so
that one place decides about the bad bytes of all charsets.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator

from meshwright.config.text_inputs import text_codec

BOM = b"\xef\xbb\xbf"
MARKS = {
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
# bytes at the beginning of a page that may declare its charset, as in the HTML standard
DECLARED = 1 << 10
CHARSET = re.compile(
    rb"<meta\b[^>]*\bcharset\s*=\s*[\"']?\s*([\w:.-]+)|<\?xml[^>]*\bencoding\s*=\s*[\"']([\w:.-]+)",
    re.I,
)
# What browsers read where a page declares an older standard.
LARGER = {"gb2312": "gb18030", "gbk": "gb18030", "iso8859-1": "cp1252", "ascii": "cp1252"}
LARGER |= {"shift_jis": "cp932", "euc_kr": "cp949", "big5": "cp950"}
OF_GB18030 = ("gb2312", "gbk")  # read as the standard that has all their characters
# of a codec, its guess
CHINESE = {"gb18030": "gb18030", "big5": "big5", "cp950": "big5", "big5hkscs": "big5"}
# The most frequent characters, simplified and traditional: between a third and a half of any text.
COMMON = frozenset(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事"
    "成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此"
    "已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体相见被利什二等产或新己制身果加西斯月话合回特代内信"
    "這個們來為國說時會對後過發裡經學現當沒動還進樣開從實無與長機將間問並應戰頭體見產話關點業種書聽讓覺給誰氣東車門馬"
)
SAMPLE = 1 << 16  # bytes that show the encoding of a text
LEAST_COMMON = 0.1  # share of them by which an encoding is recognised
CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
# share of them that no text has; a tenth of all bytes is usual in compressed files
LEAST_CONTROL = 0.02

BROKEN = re.compile(rb"\xf0[\x90-\x93][\x80-\xbf](?![\x80-\xbf])")  # what `mark_broken` writes


def mark_broken(error: UnicodeError) -> tuple[str, int]:
    """Return the first three bytes of a character of four, which carry a byte that is bad.

    The next character begins anew, so the mark is never completed: it counts as one bad place.
    """
    assert isinstance(error, UnicodeDecodeError)
    byte = error.object[error.start]
    # The byte's two high bits go into the second byte, the six others into the third.
    mark = bytes((0xF0, 0x90 + (byte >> 6), 0x80 + (byte & 0x3F)))
    return mark.decode("ascii", "surrogateescape"), error.end


def broken_byte(error: UnicodeDecodeError) -> int | None:
    """Return the byte that a mark stands for, None for a byte of a text that was read as UTF-8."""
    mark = error.object[error.start : error.end]
    if len(mark) != 3:
        return None
    lead, high, low = mark
    if lead != 0xF0 or high >= 0x94:
        return None
    return ((high - 0x90) << 6) + (low & 0x3F)


codecs.register_error("meshwright-broken", mark_broken)


def codec_of(start: bytes, given: str = "") -> str:
    """Return the codec of a text with these first bytes, "" for UTF-8.

    It is the `given` one, unless the bytes show another.
    """
    for mark, codec in MARKS.items():
        if start.startswith(mark):
            return codec
    if not given or start.startswith(BOM):
        return ""
    codec = text_codec(given)
    if codec in OF_GB18030:
        codec = LARGER[codec]
    # In other charsets hardly any text happens to be valid UTF-8.
    shows_utf8 = not start.isascii() and is_utf8(start)
    return "" if codec == "utf-8" or shows_utf8 else codec


def is_utf8(start: bytes) -> bool:
    """Return whether this can be the beginning of a text in UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # its last character may be cut
    except UnicodeDecodeError:
        return False
    return True


def why_binary(content: bytes) -> str:
    """Return what shows that a file is no text in any encoding that is read, "" if nothing does."""
    at = content.find(b"\0")
    if at >= 0:
        return f"NUL byte at {at}"
    sample = content[:SAMPLE]
    number = len(CONTROL.findall(sample))
    if number <= LEAST_CONTROL * len(sample) or is_utf8(sample):
        return ""
    characters = "character" if number == 1 else "characters"
    return f"{number:,} control {characters} in {len(sample):,} bytes"


def is_decoded(text: bytes) -> bool:
    """Return whether this is UTF-8, but for marks of bytes that could not be decoded."""
    return is_utf8(text) or is_utf8(BROKEN.sub(b"", text))


def declared_codec(page: bytes) -> str:
    """Return the codec that a page of HTML declares, "" for UTF-8 or none that is known.

    A declaration in ASCII cannot be one of UTF-16.
    """
    if page.startswith(BOM):
        return ""
    declared = CHARSET.search(page[:DECLARED])
    if declared is None:
        return ""
    name = declared[1] or declared[2]
    codec = text_codec(name.decode())
    return "" if codec.startswith("utf") else LARGER.get(codec, codec)


def codec_of_page(page: bytes, given: str) -> str:
    """Return the codec of a page of HTML: that of its mark, the declared or the given one."""
    return codec_of(page) or declared_codec(page) or codec_of(page, given)


def transcode(chunks: Iterable[bytes], codec: str) -> Iterator[bytes]:
    """Yield a text in UTF-8."""
    for text in codecs.iterdecode(chunks, codec, "meshwright-broken"):
        yield text.encode("utf-8", "surrogateescape")


def to_utf8(content: bytes, codec: str) -> bytes:
    """Return a text in UTF-8."""
    return b"".join(transcode([content], codec)) if codec else content


def guess(content: bytes) -> str:
    """Return the encoding that a text seems to be in, "" if it is not clear."""
    # More characters than bad bytes: UTF-8 that is damaged.
    sample = content[:SAMPLE]
    valid = sum(not c.isascii() for c in sample.decode("utf-8", "ignore"))
    bad = sample.decode("utf-8", "replace").count("\ufffd")
    if valid >= bad:
        return ""

    # Chinese, by its frequent characters.
    shares = {name: _share_of_common(sample, name) for name in ("gb18030", "big5")}
    best = max(shares, key=lambda name: shares[name])
    if shares[best] >= LEAST_COMMON:
        return best
    # A language of Latin letters, where those with accents mostly stand alone among ASCII.
    high = len(re.findall(rb"[\x80-\xff]", sample))
    alone = len(re.findall(rb"(?<=[\0-\x7f])[\x80-\xff](?=[\0-\x7f]|\Z)", sample))
    return "cp1252" if 2 * alone > high else ""


def count_decoded(content: bytes, *names: str) -> str:
    """Say how many of a text's first lines each of these encodings decodes."""
    lines = content[:SAMPLE].splitlines()
    if len(content) > SAMPLE:
        lines.pop()  # which is cut
    decoded = []
    for name in dict.fromkeys(names):
        # Lines are counted one by one, since a text may mix encodings or be broken in one place.
        number = sum(_decodes(line, name) for line in lines)
        decoded.append(f"{name} decodes {number:,}")
    return f"of the first {len(lines):,} lines {', '.join(decoded)}"


def _decodes(line: bytes, name: str) -> bool:
    try:
        line.decode(name)
    except UnicodeDecodeError:
        return False
    return True


def _share_of_common(sample: bytes, name: str) -> float:
    """Return the share of frequent Chinese characters in a sample, 0 if it has many bad bytes."""
    decoder = codecs.getincrementaldecoder(name)("replace")  # its last character may be cut
    decoded = decoder.decode(sample)
    wide = [c for c in decoded if not c.isascii()]
    if wide.count("\ufffd") > len(wide) // 100:
        return 0.0
    common = sum(c in COMMON for c in wide)
    return common / max(len(wide), 1)


def misread(start: bytes, codec: str) -> str:
    """Return the other encoding in which a text reads like Chinese, "" if it is not clear."""
    if codec not in CHINESE:
        return ""
    other = guess(start)
    return other if other in CHINESE.values() and other != CHINESE[codec] else ""
