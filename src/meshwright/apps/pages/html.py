"""HTML pages without outside resources: one file that can be mailed or archived."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from meshwright.base.errors import USAGE, UserError
from meshwright.base.files import replacing


def escape(value: object) -> str:
    return html.escape(str(value))


def document(title: str, parts: Iterable[str], head: Sequence[str] = ()) -> str:
    # In the page itself, so that it looks the same wherever it is opened.
    css = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    top = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>\n{css}</style>",
        *head,
        "</head><body>",
    ]
    return "\n".join([*top, *parts, "</body></html>\n"])


def html_table(body: Iterable[Sequence[str]], kind: str, head: Sequence[str] = ()) -> str:
    rows = [row(head, "th")] if head else []
    rows += [row(cells, "td") for cells in body]
    return f'<div class="scroll"><table class="{kind}">{"".join(rows)}</table></div>'


def row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def write_page(target: Path, text: str, typed: bool = False) -> Path:
    """Write a file completely or not at all; return its path. See `replacing` for `typed`."""
    if target.exists() and not target.is_file():
        raise UserError(f"{target} is not a regular file; choose another name for the page", USAGE)
    with replacing(target, typed=typed) as file:
        # A command line that is not valid text has lone surrogates, which UTF-8 cannot encode.
        file.write(text.encode(errors="replace"))
    return target
