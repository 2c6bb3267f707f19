"""Rows of metrics.jsonl for tests of reports, and a reader of their pages."""

import base64
import html.parser
import math
import re


def step_row(i, loss, batch=4, **more):
    row = {
        "event": "step",
        "attempt": 1,
        "iteration": i,
        "consumed_samples": batch * i,
        "loss": loss,
    }
    row |= {
        "grad_norm": 0.5,
        "lr": 0.1 / i,
        "skipped": False,
        "ms": 10.0,
        "tokens_per_second": 6400.0,
        "time": 1.7e9 + 0.01 * i,
    }
    return row | more


def check_row(i, loss, name="validation"):
    return {
        "event": "validation",
        "attempt": 1,
        "iteration": i,
        "name": name,
        "loss": loss,
        "ppl": math.exp(loss),
    }


def page_reloads(text):
    """Whether a page has the one script that it may have, which reloads it."""
    return text.count("<script") == 1 == text.count("location.reload()")


class Page(html.parser.HTMLParser):
    """Fails on unclosed tags and outside resources; collects texts and SVGs by title.

    Fails on scripts too, except that of a run that goes on.
    """

    def __init__(self, page):
        super().__init__()
        self.open, self.drawings, self.narrow, self.said = [], {}, [], ""
        self.feed(page)
        assert not self.open
        assert not re.search(r"@import|url\(", page)
        assert set(re.findall(r"var\((--\w+)\)", page)) <= set(re.findall(r"(--\w+):", page))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert tag != "script" or (
            not given and "script" not in self.open and page_reloads(self.rawdata)
        )
        assert tag not in ("link", "iframe", "image", "svg")
        assert not any(name.startswith("on") or name == "href" for name in given)
        if tag == "source":  # of a narrow screen
            kind, data = given["srcset"].split(",", 1)
            assert kind == "data:image/svg+xml;base64"
            self.narrow.append(base64.b64decode(data).decode())
        if "src" in given:
            kind, data = given["src"].split(",", 1)
            assert tag == "img" and kind == "data:image/svg+xml;base64"
            self.drawings[given["alt"]] = base64.b64decode(data).decode()
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said += data + "\n"
