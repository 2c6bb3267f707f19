"""Compare the numbers that a stranger's file claims with what can be true.

Every count, size or iteration of another program's file passes through here before a range, a
product or a copy is made of it: a file of a few bytes can claim a thousand million layers.
"""

from __future__ import annotations

import math
from typing import Any

STEPS = 10**15 - 1  # iterations, and samples: names of folders have at most 15 digits
ELEMENTS = 1 << 60
DIMENSIONS = 16  # no tensor has more
HEADS = 1 << 16  # of all layers; GPT-3's 96 layers of 96 heads are 9,216


class FalseClaim(ValueError):
    """A number in a file that cannot be true."""


def claimed(value: Any, what: str, most: int, why: str = "") -> int:
    """Return a whole number from 0 to `most`; a tensor of one element counts as one."""
    # By its method, so that torch is not imported for it.
    if callable(getattr(value, "item", None)) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # The bounds come first: int() of an infinite number raises, and NaN is within none.
    is_true = is_number and 0 <= value <= most and value == int(value)
    if not is_true:
        reason = f": {why}" if why else ""
        raise FalseClaim(f"{what} is {value!r:.50}, not a whole number from 0 to {most:,}{reason}")
    return int(value)


def claimed_steps(value: Any, what: str) -> int:
    """Return a number of iterations or samples that a run can have done."""
    return claimed(value, what, STEPS)


def claimed_shape(sizes: Any, what: str) -> tuple[int, ...]:
    """Return sizes that a tensor can have; a long list is refused before it is copied."""
    if not isinstance(sizes, list | tuple) or len(sizes) > DIMENSIONS:
        raise FalseClaim(f"the shape of {what} is not a list of at most {DIMENSIONS} sizes")
    of_size = f"a size of {what}"
    shape = tuple(claimed(size, of_size, ELEMENTS) for size in sizes)
    # Each size may be true and their product not.
    claimed(math.prod(shape), f"the number of elements of {what}", ELEMENTS)
    return shape


def claimed_heads(layers: int, heads: int, what: str) -> int:
    """Return the heads of each layer; refuse so many that a view for each would fill the memory."""
    claimed(layers * heads, f"the heads of all layers by {what}", HEADS)
    return heads
