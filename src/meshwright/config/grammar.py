"""Settings with a syntax of their own; ValueError says what is wrong with a text.

An error of several settings together names them in braces, as the text of a `Problem`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from meshwright.base import registry
from meshwright.base.python310 import Self
from meshwright.config.expressions import read_expression
from meshwright.config.fields import TextForm


@dataclass(frozen=True, repr=False)
class Split(TextForm):
    """Shares of the documents for training, validation and test: 949,50,1 or 949/50/1."""

    text: str
    shares: tuple[float, ...]  # three; those that are missing are 0

    @classmethod
    def read(cls, text: str) -> Self:
        # Quotes within an array of a script reach its program, as in "--split '99,1,0'".
        text = text.strip("'\"")
        try:
            # Megatron takes both.
            given = [float(share) for share in text.replace("/", ",").split(",")]
        except ValueError:
            raise ValueError(f"{text!r} is not three numbers such as 949,50,1") from None
        if len(given) > 3 or not 0 < sum(given) < math.inf or min(given) < 0:
            raise ValueError(f"{text!r} must be at most three numbers, none below 0 and not all 0")
        return cls(text, (*given, 0.0, 0.0)[:3])


def prefix_of(path: str) -> str:
    """Return the prefix of a pair of token files, which the name of one of them stands for."""
    stem, dot, ending = path.rpartition(".")
    # A prefix may itself end in .bin or .idx, if its pair of files is there.
    if dot and ending in ("bin", "idx") and not os.path.exists(f"{path}.idx"):
        return stem
    return path


def blend(values: list[str]) -> tuple[list[float] | None, list[str]]:
    """Split `w1 p1 w2 p2 ...` into weights and prefixes; prefixes alone have no weights."""

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    # Weights are recognised as numbers; a mistake in one would make it a prefix.
    numbers = [number(v) for v in values]
    # A single value is a prefix, also one that looks like a number.
    if len(values) < 2 or not any(n is not None for n in numbers):
        return None, values
    weights = numbers[::2]
    prefixes = values[1::2]
    if len(values) % 2 or None in weights:
        raise ValueError(
            f"{' '.join(values)[:200]}: a blend is WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes alone"
        )
    kept = [w for w in weights if w is not None]
    if min(kept) < 0 or not 0 < sum(kept) < float("inf"):
        what = f"the weights {' '.join(values[::2])[:200]} must not be below 0 nor all 0"
        # inf and nan, which float() reads from words
        if not all(map(math.isfinite, kept)):
            what += ", and each must be a number"
        raise ValueError(what)
    return kept, prefixes


@dataclass(frozen=True, repr=False)
class Iterations(TextForm):
    """A range A-B of iterations, of which both ends count."""

    text: str
    first: int
    last: int

    @classmethod
    def read(cls, text: str) -> Self:
        # What does not match becomes 0-0, which is refused like any other wrong range.
        found = re.fullmatch("([0-9]{1,9})-([0-9]{1,9})", text)
        first, last = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(f"{text!r} is not a range A-B of iterations, from 1 on")
        return cls(text, first, last)


@dataclass(frozen=True, repr=False)
class InputShard(TextForm):
    """One of several parts of an input, I/N, counted from 1."""

    text: str
    number: int
    count: int

    @classmethod
    def read(cls, text: str) -> Self:
        found = re.fullmatch("([0-9]{1,5})/([0-9]{1,5})", text)
        number, count = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= number <= count:
            raise ValueError(f"{text!r} is not I/N with I from 1 to N, such as 1/4")
        return cls(text, number, count)

    @property
    def suffix(self) -> str:
        """What stands behind the prefix of its files: by name they sort in the input's order."""
        return f"-{self.number:0{len(str(self.count))}}-of-{self.count}"


@dataclass(frozen=True, repr=False)
class BlendStage(TextForm):
    """A blend of the training set from a point of the run on, such as '60%: 0.5 a 0.5 b'."""

    text: str
    begin: float
    unit: str  # samples, tokens, or % of the run
    weights: tuple[tuple[str, float], ...]  # by prefix

    @classmethod
    def read(cls, text: str) -> Self:
        found = re.fullmatch(
            r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*(%|tokens|samples|)\s*:\s+(\S.*)", text
        )
        if found is None:
            raise ValueError(f"{text!r} is not of the form BEGIN: WEIGHT PREFIX WEIGHT PREFIX ...")
        # A number alone counts samples.
        begin = float(found[1])
        unit = found[2] or "samples"
        if not (begin < 100 if unit == "%" else begin.is_integer()):
            raise ValueError(
                f"{text!r} begins at {found[1]} {unit}; give a whole number, or less than 100 %"
            )
        weights, prefixes = blend(found[3].split())
        if weights is None and len(prefixes) > 1:
            raise ValueError(f"{text!r} has no weights; give WEIGHT PREFIX WEIGHT PREFIX ...")
        # A prefix may be spelled as one of its two files.
        names = [prefix_of(prefix) for prefix in prefixes]
        if len(set(names)) < len(names):
            raise ValueError(f"{text!r} names a prefix twice; give each once")
        return cls(text, begin, unit, tuple(zip(names, weights or [1.0], strict=True)))

    def first_sample(self, samples: int, samples_with: Callable[[int], int]) -> int:
        """Return the first sample of the stage in a run of so many samples.

        `samples_with` gives the number of samples that have so many tokens.
        """
        if self.unit == "%":
            return round(samples * self.begin / 100)
        begin = int(self.begin)
        return samples_with(begin) if self.unit == "tokens" else begin

    def follows(self, before: BlendStage | None) -> bool:
        """Return whether the stage begins after another, or after the first sample."""
        # Points in two units can be compared only once the length of the run is known.
        if before is not None and before.unit == self.unit:
            return self.begin > before.begin
        return self.begin > 0

    @property
    def start(self) -> str:
        """The begin, as messages say it."""
        return f"{self.begin:.15g}{self.unit if self.unit == '%' else ' ' + self.unit}"


@dataclass(frozen=True, repr=False)
class Reaction(TextForm):
    """What follows a bad step: a word, for `rollback:K` and `skip:K` at most so many times."""

    text: str
    word: str
    times: int
    forms: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        word, colon, number = text.partition(":")
        if f"{word}:K" in cls.forms and re.fullmatch("[1-9][0-9]{0,5}", number):
            return cls(text, word, int(number))
        if word in cls.forms and not colon:
            return cls(text, word, 0)
        *others, last = cls.forms
        raise ValueError(
            f"{text!r} is neither {', '.join(others)} nor {last}; K is a whole number above 0"
        )


class OnNonfinite(Reaction):
    forms = ("stop", "skip:K", "rollback:K")


class OnSpike(Reaction):
    forms = ("off", "warn", "stop", "rollback:K")


def describe_eval_tasks() -> str:
    """Return the help of --eval-tasks, with the names that are registered."""
    forms = ",".join(f"{name}=FILE" for name in registry.entries("tasks"))
    return f"files to score the model on, also during a training: {forms or registry.LACKING}"


@dataclass(frozen=True, repr=False)
class EvalTasks(TextForm):
    """NAME=FILE,NAME=FILE: files to score; a comma in a file's name is part of it."""

    text: str
    tasks: tuple[tuple[str, str], ...]  # names and files

    @classmethod
    def read(cls, text: str) -> Self:
        tasks: dict[str, str] = {}
        # A comma separates tasks only before NAME=.
        for one in re.split(r",(?=[a-z-]+=)", text):
            name, _, path = one.partition("=")
            if not name or not path:
                raise ValueError(wrong_task(one))
            if name in tasks:
                raise ValueError(
                    f"{name} is given twice; evaluate another file with `meshwright evaluate`"
                )
            tasks[name] = path
        return cls(text, tuple(tasks.items()))

    def check(self) -> None:
        """Raise ValueError if there is no task of a name; those of `meshwright.tasks` are known."""
        known = registry.entries("tasks")
        if not known:
            raise ValueError(f"there is no task: {registry.LACKING}, or leave it out")
        for name, path in self.tasks:
            if name not in known:
                raise ValueError(wrong_task(f"{name}={path}"))


def wrong_task(text: str) -> str:
    return f"{text!r} is not NAME=FILE with one of the names {', '.join(registry.entries('tasks'))}"


@dataclass(frozen=True, repr=False)
class PipelineLayout(TextForm):
    """The layers of each stage, as 6,6,6,6, or the stage of each layer, as [0]*6+[1]*6."""

    text: str
    counts: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        if "[" in text:
            # A micro-batch passes the stages in order, each once.
            ids = evaluate_list(text)
            for layer, (before, stage) in enumerate(zip(ids, ids[1:], strict=False), 1):
                if stage < before:
                    raise ValueError(
                        f"{text[:50]!r}: layer {layer} goes back from stage {before} to {stage}"
                    )
            return cls(text, ids=tuple(ids))
        if re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", text):
            return cls(text, counts=tuple(int(n) for n in text.split(",")))
        forms = "neither the layers of each stage, as 6,6,6,6, nor the stage of each layer, as [0]*6+[1]*6"
        raise ValueError(f"{text[:50]!r} is {forms}")


PARTS = "{pipeline_model_parallel_size}, times the pieces of each rank,"


def split_layers(layout: PipelineLayout | None, layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage, in order."""
    if layout is None:
        # Extra layers go to the middle, later stages first: the last stage has the head, the first
        # the embedding, and under 1F1B earlier stages hold more activations.
        order = sorted(
            range(stages), key=lambda i: (i == stages - 1, i == 0, abs(2 * i - stages + 1), -i)
        )
        more = order[: layers % stages]
        return [layers // stages + (i in more) for i in range(stages)]
    counts = list(layout.counts)
    if ids := layout.ids:
        if ids[-1] >= stages:
            raise ValueError(f"there is a stage {ids[-1]}, but {PARTS} gives 0 to {stages - 1}")
        if len(ids) != layers:
            raise ValueError(f"{len(ids)} layers have a stage, but {{num_layers}} is {layers}")
        counts = [ids.count(stage) for stage in range(stages)]
    if len(counts) != stages:
        raise ValueError(f"{len(counts)} stages, but {PARTS} gives {stages}")
    if 0 in counts:
        raise ValueError(
            f"stage {counts.index(0)} has no layer (a list of each layer's stage stands in brackets)"
        )
    if sum(counts) != layers:
        raise ValueError(f"{sum(counts)} layers, but {{num_layers}} is {layers}")
    return counts


@dataclass(frozen=True, repr=False)
class BatchSchedule(TextForm):
    """TOKENS:BATCH TOKENS:BATCH ...: global batches, in numbers that may end in K, M, B or T."""

    text: str
    stages: tuple[tuple[int, int], ...]  # tokens from which a batch counts, and that batch

    @classmethod
    def read(cls, text: str) -> Self:
        units = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
        number = r"([0-9]+\.?[0-9]*|\.[0-9]+)([KMBT]?)"
        stages = []
        # Spaces or commas may stand between the entries.
        for word in text.replace(",", " ").split():
            match = re.fullmatch(f"{number}:{number}", word.upper())
            if match is None:
                raise ValueError(
                    f"{word[:50]!r} is not TOKENS:BATCH; write for example '0:768 250B:1536'"
                )
            tokens, batch = (int(float(match[n]) * units[match[n + 1]]) for n in (1, 3))
            stages.append((tokens, batch))
        if not stages:
            raise ValueError(f"{text!r} names no batch; write for example '0:768 250B:1536'")
        return cls(text, tuple(stages))


@dataclass(frozen=True, repr=False)
class AttentionWindow(TextForm):
    """How many tokens before each are seen: L, `L,0` or `(L,0)`; -1 for all."""

    text: str
    reach: int  # 0 for no window

    @classmethod
    def read(cls, text: str) -> Self:
        # A model of text looks back only, so the right side is 0, or -1, which causality makes 0.
        parts = re.fullmatch(r"\(?\s*(-1|[0-9]{1,9})\s*(?:,\s*(?:0|-1)\s*)?\)?", text)
        if not parts or int(parts[1]) == 0:
            forms = (
                "neither L nor L,0: L tokens before each, from 1 on, or -1 for all; 0 on the right"
            )
            raise ValueError(f"{text!r} is {forms}")
        return cls(text, max(int(parts[1]), 0))


@dataclass(frozen=True, repr=False)
class WindowSkips(TextForm):
    """Which layers have no window: each N-th, or those with 0 in a list such as ([1]*5+[0])*4."""

    text: str
    every: int = 0
    kinds: tuple[int, ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        if not re.fullmatch("[0-9]{1,9}", text):
            return cls(text, kinds=tuple(evaluate_list(text)))
        if int(text) < 2:
            raise ValueError(f"{text}: N must be at least 2, or no layer has the window")
        return cls(text, every=int(text))


@functools.cache
def layers_with_window(skips: WindowSkips | None, layers: int) -> tuple[int, ...]:
    """Return the layers that are not skipped."""
    if skips is None:
        return tuple(range(layers))
    if skips.every:
        return tuple(i for i in range(layers) if (i + 1) % skips.every)
    if len(skips.kinds) != layers:
        raise ValueError(f"a list is of {len(skips.kinds)} layers, but {{num_layers}} is {layers}")
    return tuple(i for i, kind in enumerate(skips.kinds) if kind)


@dataclass(frozen=True, repr=False)
class Machines(TextForm):
    """Addresses of machines with commas between them."""

    text: str
    addresses: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Self:
        return cls(text, tuple(address for one in text.split(",") if (address := one.strip())))


def evaluate_list(text: str) -> list[int]:
    """Evaluate sums and multiples of lists of numbers, such as [0]*6 + [1]*6 or ([1]*5+[0])*4."""
    with contextlib.suppress(ValueError):
        out = read_expression(text.strip())
        # not isinstance: True and False are no numbers here
        if isinstance(out, list) and out and all(type(x) is int and x >= 0 for x in out):
            return out
    raise ValueError(f"{text[:50]!r} is not a list of numbers such as [1,1,0] or ([1]*5+[0])*4")


ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def unescape(text: str) -> str:
    r"""Replace \n, \t, \r and \\ by their characters; another character after \ stays, with it."""
    return re.sub(r"\\([ntr\\])", lambda found: ESCAPES.get(found[1], found[1]), text)
