"""Results as JSON and as text: numbers and characters that are none, and columns of a table.

In all that Meshwright writes or prints as JSON, a number that is not finite is the string "nan",
"inf" or "-inf", as in metrics.jsonl: a reader's float() takes it as it takes a number. Only what a
page asks the server of `watch` has null in its place, which draws as a gap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any


def json_ready(value: Any, substitute: Callable[[float], str | None] = str) -> Any:
    """Replace floats that are not finite by their names, or by what `substitute` makes of them."""
    if isinstance(value, dict):
        return {name: json_ready(x, substitute) for name, x in value.items()}
    if isinstance(value, list):
        return [json_ready(x, substitute) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return substitute(value)
    return value


def lone_surrogate(value: Any) -> str:
    """Return the first half of a character in a text or a value of JSON, as \\ud800, or "".

    JSON may spell one, and Python's strings hold it, but no encoding and so no tokenizer has it.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return ""


def or_dash(value: float | None, form: str) -> str:
    """Return a cell of a table: a number in this format, or a dash for none."""
    return "-" if value is None else format(value, form)


def align_columns(rows: Sequence[Sequence[str]], to_the_right: bool = False) -> list[str]:
    """Return lines whose columns are as wide as their widest cell.

    rich would wrap or cut them at the width of a terminal; scripts read these lines too.
    """
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    pad = str.rjust if to_the_right else str.ljust
    lines = []
    for row in rows:
        line = "  ".join(map(pad, row, widths))
        lines.append(line.rstrip())
    return lines
