"""Read the articles of a MediaWiki dump, such as enwiki-latest-pages-articles.xml.bz2.

In such a file every `<` of a text is escaped, so `<page>` and `</page>` are found by looking for
the bytes. An XML parser would need the whole file in its order; this way workers share it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from meshwright.compat.prepare import wikitext
from meshwright.data.text.divide import Division, Slice
from meshwright.data.text.formats import TextFormat
from meshwright.data.text.records import (
    NOT_UTF8,
    Document,
    ReadOptions,
    Record,
    Rejected,
    TextPlace,
)

# A dump, or a part of one that begins with a page.
IS_DUMP = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<mediawiki\b|<page>\s*<title>)")
PAGES = Division(
    re.compile(rb"(?<=</page>)\r?\n"),
    re.compile(rb"(?<=</page>)\r?(?:\n|\Z)"),
    len("\n</page>\r\n"),
)
NAMESPACE = re.compile(rb"<ns>\s*(-?\d+)\s*</ns>")
TITLE = re.compile(rb"<title>(.*?)</title>", re.DOTALL)
MODEL = re.compile(rb"<model>\s*(\w+)\s*</model>")


def articles(pages: Slice, options: ReadOptions) -> Iterator[Record]:
    """Yield title and text of the articles in pages of a dump, and pages that are damaged.

    Left out are redirects, other namespaces than 0, and pages without text.
    """
    content = pages.content
    at = 0
    while (begin := content.find(b"<page>", at)) >= 0:
        at = content.find(b"</page>", begin)
        place = pages.place(begin)
        if at < 0:
            yield Rejected("page cut short", place, "the dump ends within it")
            return
        page = content[begin:at]
        record = _article(page, pages.place(begin), options)
        if isinstance(record, Rejected) and record.reason == NOT_UTF8:
            # Only such a page is worth counting the lines before it.
            place = pages.place(begin, exactly=True)
            if options.on_error == "replace":
                record = _article(page.decode("utf-8", "replace").encode(), place, options)
                if isinstance(record, Document):
                    record = replace(record, repaired=1)
            else:
                record = record._replace(place=place)
        if record:
            yield record


def _article(page: bytes, place: TextPlace, options: ReadOptions) -> Record | None:
    """Return the text of a page's newest revision, None if it is no article, or what is wrong."""
    # What describes the page.
    revision = page.rfind(b"<revision")
    head = page[: max(page.find(b"<revision"), 0)]
    namespace = NAMESPACE.search(head)
    title = TITLE.search(head)
    if (namespace and int(namespace[1]) != 0) or b"<redirect" in head:
        return None

    # The text of its newest revision.
    begin = page.rfind(b"<text", revision)
    inner = page.find(b">", begin) + 1
    end = page.find(b"</text>", inner)
    is_empty = end < 0 and page[inner - 2 : inner] == b"/>"
    if revision < 0 or title is None or begin < 0 or (end < 0 and not is_empty):
        lacking = "title" if title is None else "text"
        return Rejected("damaged page", place, f"no {lacking} in {page[:80]!r}")
    model = MODEL.search(page, revision, begin)
    if is_empty or (model and model[1] != b"wikitext"):
        return None

    # The article: its title, a blank line, and the text without markup.
    try:
        name = _unescape(title[1]).strip()
        text = _unescape(page[inner:end])
    except UnicodeDecodeError as error:
        return Rejected(NOT_UTF8, place, f"byte 0x{error.object[error.start]:02x} in a page")
    if text.lstrip()[:9].upper() == "#REDIRECT":  # dumps of before 2011 do not mark them
        return None
    body = wikitext.article_text(text)
    if not body:
        return None
    article = f"{name}\n\n{body}\n"
    return Document((article,) * len(options.keys), place, article.count("\n"))


def _unescape(content: bytes) -> str:
    text = content.decode("utf-8")
    # The ampersand last: &amp;lt; stands for &lt;, not for <.
    for escaped, sign in (
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", '"'),
        ("&#039;", "'"),
        ("&amp;", "&"),
    ):
        text = text.replace(escaped, sign)
    return text


DUMP = TextFormat(
    "wiki dumps",
    PAGES,
    articles,
    begins=IS_DUMP,
    unit="page ",
    shorten="a dump without old revisions is shorter",
)
