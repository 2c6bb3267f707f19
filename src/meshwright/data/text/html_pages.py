"""Read HTML pages: their text without tags, scripts and styles, entities decoded.

The standard library's html.parser is enough for that: it needs no package and stops at no fault.
Parsers that build a tree (lxml, html5lib) mend wrong nesting, which text without tags does not
show; programs that also remove menus and advertisements (trafilatura) guess what matters.
"""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

HIDDEN = frozenset("script style template noscript".split())
LINES = frozenset(
    "address article aside br dd details div dl dt fieldset figcaption footer form header".split()
)
LINES |= frozenset("hr li main nav option section summary title tr".split())
PARAGRAPHS = frozenset("blockquote figure h1 h2 h3 h4 h5 h6 ol p pre table ul".split())
CELLS = frozenset(("td", "th"))
IS_HTML = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html)\b", re.IGNORECASE)


def page_text(page: str) -> str:
    """Return the text of a page, with line breaks where block elements begin and end."""
    parser = _PageParser()
    # Behind the last ">", the parser would look in vain for the end of each tag.
    end = page.rfind(">") + 1
    parser.feed(page[:end])
    parser.close()
    parser.handle_data(html.unescape(page[end:]))
    return re.sub(r"\n{3,}", "\n\n", "".join(parser.parts)).strip("\n") + "\n"


class _PageParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        # elements that are open: without text, with their own white space
        self.hidden = self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in HIDDEN
        self.preformatted += tag in ("pre", "textarea")
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in HIDDEN and self.hidden > 0
        self.preformatted -= tag in ("pre", "textarea") and self.preformatted > 0
        if tag not in CELLS:
            self._break(tag)

    def _break(self, tag: str) -> None:
        """Break the line at a block element, and put a space before the cell of a table."""
        parts = self.parts
        if tag in LINES or tag in PARAGRAPHS:
            if parts and not self.preformatted:
                parts[-1] = parts[-1].rstrip(" ")
            parts.append("\n" if tag in LINES else "\n\n")
        elif tag in CELLS and parts and not parts[-1].endswith("\n"):
            parts.append(" ")

    def handle_data(self, data: str) -> None:
        if self.hidden:
            return
        if not self.preformatted:
            data = re.sub(r"\s+", " ", data)
            if self.parts and self.parts[-1][-1:] in (" ", "\n"):
                data = data.removeprefix(" ")
        if data:
            self.parts.append(data)

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """Skip `<![...>` as browsers do; the base class raises at an unknown name."""
        return self.parse_bogus_comment(i)
