"""Read the HTML pages of reports in tests."""

import base64
import html.parser
import re


class Page(html.parser.HTMLParser):
    """A strict parser: it fails on unclosed tags, scripts and outside resources, and collects the
    text.

    `drawings` maps the title of each embedded image to its SVG.
    """

    def __init__(self, page):
        super().__init__()
        self.open, self.drawings, self.said = [], {}, ""
        self.feed(page)
        assert not self.open
        assert not re.search(r"@import|url\(", page)
        assert set(re.findall(r"var\((--\w+)\)", page)) <= set(re.findall(r"(--\w+):", page))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert tag not in ("script", "link", "iframe", "image", "svg")
        assert not any(name.startswith("on") or name in ("srcset", "href") for name in given)
        if "src" in given:
            kind, data = given["src"].split(",", 1)
            assert tag == "img" and kind == "data:image/svg+xml;base64"
            self.drawings[given["alt"]] = base64.b64decode(data).decode()
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said += data + "\n"
