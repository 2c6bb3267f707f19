"""Cut documents that are too long to be divided between training and validation."""

from __future__ import annotations

import re
from collections.abc import Iterator

BORDER = re.compile(r"\n\s*\n|\n")  # where a document may be cut


def cut_document(text: str, longest: int) -> Iterator[str]:
    """Cut a long document at the ends of paragraphs, or else of lines; a blank rest is dropped."""
    begin = 0
    while len(text) - begin > longest:
        borders = [m.end() for m in BORDER.finditer(text, begin + longest // 2, begin + longest) if len(m[0]) > 1]
        end = borders[-1] if borders else text.rfind("\n", begin + longest // 2, begin + longest) + 1
        end = end or begin + longest
        yield text[begin:end]
        begin = end
    if text[begin:].strip():
        yield text[begin:]
