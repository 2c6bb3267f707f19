"""Read the articles of a MediaWiki dump, such as enwiki-latest-pages-articles.xml.bz2.

In such a file every `<` of a text is escaped, so `<page>` and `</page>` are found by looking for
the bytes. An XML parser would need the whole file in its order; this way workers share it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.compat.prepare import wikitext
from meshwright.data.text import records
from meshwright.data.text.dumps import Dump
from meshwright.data.text.records import NOT_UTF8, TOO_LONG, Bad, Mended, Reading, Unit

# A dump, or a part of one that begins with a page.
IS_DUMP = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<mediawiki\b|<page>\s*<title>)")
# The separator of its documents; no --document-separator is equal, which is one line.
PAGES = "\n</page>"
ENDS = re.compile(rb"(?<=</page>)\r?\n"), re.compile(rb"(?<=</page>)\r?(?:\n|\Z)")
NAMESPACE = re.compile(rb"<ns>\s*(-?\d+)\s*</ns>")
TITLE = re.compile(rb"<title>(.*?)</title>", re.DOTALL)
MODEL = re.compile(rb"<model>\s*(\w+)\s*</model>")


def articles(content: bytes) -> Iterator[tuple[int, str | Bad]]:
    """Yield title and text of the articles in pages of a dump, and where the pages begin.

    Left out are redirects, other namespaces than 0, and pages without text.
    """
    at = 0
    while (begin := content.find(b"<page>", at)) >= 0:
        at = content.find(b"</page>", begin)
        if at < 0:
            yield begin, Bad("page cut short", "the dump ends within it")
            return
        if article := _article(content[begin:at]):
            yield begin, article


def _article(page: bytes) -> str | Bad:
    """Return the text of a page's newest revision, "" if it is no article, or what is wrong."""
    revision = page.rfind(b"<revision")
    head = page[: max(page.find(b"<revision"), 0)]
    namespace, title = NAMESPACE.search(head), TITLE.search(head)
    if (namespace and int(namespace[1]) != 0) or b"<redirect" in head:
        return ""
    begin = page.rfind(b"<text", revision)
    inner = page.find(b">", begin) + 1
    end = page.find(b"</text>", inner)
    if revision < 0 or title is None or begin < 0 or (end < 0 and page[inner - 2 : inner] != b"/>"):
        return Bad("damaged page", f"no {'title' if title is None else 'text'} in {page[:80]!r}")
    model = MODEL.search(page, revision, begin)
    if end < 0 or (model and model[1] != b"wikitext"):
        return ""
    try:
        name, text = _unescape(title[1]).strip(), _unescape(page[inner:end])
    except UnicodeDecodeError as error:
        return Bad(NOT_UTF8, f"byte 0x{error.object[error.start]:02x} in a page")
    if text.lstrip()[:9].upper() == "#REDIRECT":  # dumps of before 2011 do not mark them
        return ""
    body = wikitext.article_text(text)
    return f"{name}\n\n{body}\n" if body else ""


def documents(content: bytes, how: Reading) -> Iterator[tuple[int, Unit]]:
    """Yield the articles in pages of a dump, or what is wrong, and where the pages begin."""
    if content.startswith(TOO_LONG):
        yield 0, Bad(f"page longer than {records.LONGEST:,} bytes", "a dump without old revisions is shorter")
    for at, article in articles(content):
        if isinstance(article, Bad) and article.kind == NOT_UTF8 and how.on_error == "replace":
            page = content[at : content.find(b"</page>", at) + len(b"</page>")]
            mended = articles(page.decode("utf-8", "replace").encode())
            yield from ((at, text if isinstance(text, Bad) else Mended([text])) for _, text in mended)
        else:
            yield at, article if isinstance(article, Bad) else [article]


def _unescape(content: bytes) -> str:
    text = content.decode("utf-8")
    for escaped, sign in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&#039;", "'"), ("&amp;", "&")):
        text = text.replace(escaped, sign)
    return text


DUMP = Dump("wiki dumps", PAGES, IS_DUMP, ENDS, documents)
