"""--seq-length-schedule: how many tokens of each sample a step reads, by the step's number.

It is DeepSpeed's curriculum of sequence lengths. The length is a function of the step alone, so a
run that resumes within it needs no state of it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from meshwright.base.python310 import Self
from meshwright.config.fields import TextForm

FORMS = (
    "linear:MIN:MAX:STEPS:MULTIPLE, root:MIN:MAX:STEPS:MULTIPLE:DEGREE or STEPS:LENGTH STEPS:LENGTH ..., "
    "such as linear:64:1024:45000:8 or '0:64 100:128 500:1024'"
)
NEVER = 2**60  # a step that no run reaches
MOST_LENGTHS = 10**6  # of a curve, whose lengths are found one by one


@dataclass(frozen=True, repr=False)
class LengthSchedule(TextForm):
    """A growing length of samples: linear in the step, by a root of it, or a list of stages."""

    text: str
    stages: tuple[tuple[int, int], ...]  # steps after which a length counts, and that length

    @classmethod
    def read(cls, text: str) -> Self:
        curve = re.fullmatch(r"(?:linear((?::[0-9]{1,15}){4})|root((?::[0-9]{1,15}){5}))", text)
        if curve is not None:
            numbers = [int(n) for n in (curve[1] or curve[2])[1:].split(":")]
            return cls(text, _stages_of_curve(text, *numbers))
        stages = []
        # Spaces or commas may stand between the entries.
        for word in text.replace(",", " ").split():
            entry = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", word)
            if entry is None:
                raise ValueError(f"{word[:50]!r} is not of the form {FORMS}")
            stages.append((int(entry[1]), int(entry[2])))
        if not stages:
            raise ValueError(f"{text!r} names no length; write {FORMS}")
        if stages[0][0]:
            raise ValueError(f"{text!r} does not say how long samples are at first; begin with 0:")
        if not all(
            a < b for pair in itertools.pairwise(stages) for a, b in zip(*pair, strict=True)
        ):
            raise ValueError(f"{text!r}: steps and lengths must grow")
        if not stages[0][1]:
            raise ValueError(f"{text!r} begins with samples of 0 tokens; give 1 or more")
        return cls(text, tuple(stages))

    @property
    def longest(self) -> int:
        return self.stages[-1][1]

    def length(self, step: int) -> int:
        """Return the tokens of a sample in a step, of which the first is 1."""
        return self.stages[bisect.bisect_left(self._starts, step) - 1][1]

    @cached_property
    def _starts(self) -> list[int]:
        return [steps for steps, _ in self.stages]

    @cached_property
    def _tokens_before(self) -> list[int]:
        """The tokens that one place in the batch has read before each stage."""
        read = [0]
        for (begin, length), (end, _) in itertools.pairwise(self.stages):
            read.append(read[-1] + (end - begin) * length)
        return read

    def tokens(self, steps: float) -> float:
        """Return the tokens that one place in the batch reads in so many steps."""
        i = max(0, bisect.bisect_right(self._starts, steps) - 1)
        begin, length = self.stages[i]
        return self._tokens_before[i] + (steps - begin) * length

    def steps(self, tokens: float) -> float:
        """Return the steps, of which the last may be a part, that read so many tokens."""
        i = max(0, bisect.bisect_right(self._tokens_before, tokens) - 1)
        begin, length = self.stages[i]
        return begin + (tokens - self._tokens_before[i]) / length


def _stages_of_curve(
    text: str, first: int, last: int, total: int, multiple: int, degree: int = 1
) -> tuple[tuple[int, int], ...]:
    """Return the stages of DeepSpeed's fixed_root schedule, whose degree 1 is its fixed_linear."""
    if not (total and multiple and degree):
        raise ValueError(f"{text!r}: STEPS, MULTIPLE and DEGREE must be 1 or more")
    if first > last:
        raise ValueError(f"{text!r}: MIN {first} is above MAX {last}")
    if first < multiple:
        raise ValueError(
            f"{text!r}: MIN {first}, rounded down to a multiple of {multiple}, is 0; "
            "raise MIN or lower MULTIPLE"
        )
    if (last - first) // multiple > MOST_LENGTHS:
        raise ValueError(
            f"{text!r} has more than {MOST_LENGTHS:,} lengths; lower MAX or raise MULTIPLE"
        )

    def length_at(step: int) -> int:
        # In DeepSpeed's order of operations: the rounding decides at which step a sample grows.
        grown: float = (float(step) / total) ** (1.0 / degree)
        rounded = math.floor(grown * (last - first) + first)
        return min(rounded - rounded % multiple, last)

    stages = [(0, length_at(1))]
    # The curve never falls, so that each next length is found by bisection.
    while stages[-1][1] < last:
        begin, now = stages[-1]
        step = _first_step(lambda step, now=now: length_at(step) > now, begin + 1)  # type: ignore[misc]
        if step is None:
            break
        stages.append((step - 1, length_at(step)))
    return tuple(stages)


def _first_step(holds: Callable[[int], bool], begin: int) -> int | None:
    """Return the first step after `begin` from which on something holds; None if no run has it."""
    low, high = begin, begin + 1
    while not holds(high):
        low, high = high, 2 * high
        if high > NEVER:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
