"""Parse settings with a syntax of their own; ValueError says what is wrong."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from typing import NamedTuple

from meshwright.base import registry
from meshwright.config.expressions import read_expression


def split_shares(split: str) -> list[float]:
    """Parse '949,50,1' or '949/50/1'; missing shares are 0."""
    parts = [float(x) for x in split.replace("/", ",").split(",")]
    return (parts + [0.0] * 3)[: max(3, len(parts))]


def prefix_of(path: str) -> str:
    """Return the prefix of a pair of token files, which the name of one of them stands for."""
    stem, dot, ending = path.rpartition(".")
    return stem if dot and ending in ("bin", "idx") and not os.path.exists(f"{path}.idx") else path


def blend(values: list[str]) -> tuple[list[float] | None, list[str]]:
    """Split `w1 p1 w2 p2 ...` into weights and prefixes; prefixes alone have no weights."""

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    numbers = [number(v) for v in values]
    if len(values) < 2 or not any(n is not None for n in numbers):
        return None, values
    weights, prefixes = numbers[::2], values[1::2]
    if len(values) % 2 or None in weights:
        raise ValueError(f"{' '.join(values)[:200]}: a blend is WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes alone")
    kept = [w for w in weights if w is not None]
    if min(kept) < 0 or not 0 < sum(kept) < float("inf"):
        raise ValueError(f"the weights {' '.join(values[::2])[:200]} must not be below 0 nor all 0")
    return kept, prefixes


def skipped(ranges: list[str]) -> list[tuple[int, int]]:
    """Return ranges `A-B` as sorted pairs, of which both ends are skipped."""
    out = []
    for text in ranges:
        first, dash, last = text.partition("-")
        if not (dash and re.fullmatch("[0-9]{1,9}-[0-9]{1,9}", text) and 1 <= int(first) <= int(last)):
            raise ValueError(f"{text!r} is not a range A-B of iterations, from 1 on")
        out.append((int(first), int(last)))
    out.sort()
    for (_, end), (begin, _) in zip(out, out[1:], strict=False):
        if begin <= end:
            raise ValueError(f"the ranges {' '.join(ranges)} overlap")
    return out


class BlendStage(NamedTuple):
    """A blend of the training set from a point of the run on."""

    begin: float
    unit: str  # samples, tokens, or % of the run
    weights: dict[str, float]  # by prefix

    def first_sample(self, samples: int, length: int) -> int:
        """Return the first sample of the stage in a run of so many samples of so many tokens."""
        if self.unit == "%":
            return round(samples * self.begin / 100)
        return -(-int(self.begin) // length) if self.unit == "tokens" else int(self.begin)

    def __str__(self) -> str:
        return f"{self.begin:.15g}{self.unit if self.unit == '%' else ' ' + self.unit}"


def blend_stages(texts: list[str]) -> list[BlendStage]:
    """Parse stages such as '60%: 0.5 a 0.5 b'."""
    out = list[BlendStage]()
    for text in texts:
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*(%|tokens|samples|)\s*:\s+(\S.*)", text)
        if found is None:
            raise ValueError(f"{text!r} is not of the form BEGIN: WEIGHT PREFIX WEIGHT PREFIX ...")
        begin, unit = float(found[1]), found[2] or "samples"
        if not (begin < 100 if unit == "%" else begin.is_integer()):
            raise ValueError(f"{text!r} begins at {found[1]} {unit}; give a whole number, or less than 100 %")
        weights, prefixes = blend(found[3].split())
        if weights is None and len(prefixes) > 1:
            raise ValueError(f"{text!r} has no weights; give WEIGHT PREFIX WEIGHT PREFIX ...")
        names = [prefix_of(prefix) for prefix in prefixes]
        if len(set(names)) < len(names):
            raise ValueError(f"{text!r} names a prefix twice; give each once")
        stage = BlendStage(begin, unit, dict(zip(names, weights or [1.0], strict=True)))
        if not begin or (out and out[-1].unit == unit and begin <= out[-1].begin):
            raise ValueError(f"{text!r} does not begin after the blend before it; give stages in their order")
        out.append(stage)
    return out


ON_NONFINITE, ON_SPIKE = ("stop", "skip:K", "rollback:K"), ("off", "warn", "stop", "rollback:K")


def reaction(text: str, known: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the word and the number of `stop` or `skip:K`; None if it is not known."""
    word, colon, number = text.partition(":")
    if not colon:
        return (word, 0) if word in known else None
    return (word, int(number)) if f"{word}:K" in known and re.fullmatch("[1-9][0-9]{0,5}", number) else None


def eval_tasks(text: str) -> dict[str, str]:
    """Return name -> file of `NAME=FILE,NAME=FILE`; a comma in a file's name is part of it.

    The names are those of the group `meshwright.tasks`.
    """
    known = registry.entries("tasks") if text else {}
    if text and not known:
        raise ValueError(f"there is no task: {registry.LACKING}, or leave it out")
    out: dict[str, str] = {}
    for one in re.split(r",(?=[a-z-]+=)", text) if text else ():
        name, _, path = one.partition("=")
        if name not in known or not path:
            raise ValueError(f"{one!r} is not NAME=FILE with one of the names {', '.join(known)}")
        if name in out:
            raise ValueError(f"{name} is given twice; evaluate another file with `meshwright evaluate`")
        out[name] = path
    return out


def describe_eval_tasks() -> str:
    """Return the help of --eval-tasks, with the names that are registered."""
    forms = ",".join(f"{name}=FILE" for name in registry.entries("tasks"))
    return f"files to score the model on, also during a training: {forms or registry.LACKING}"


PARTS = "--pipeline-model-parallel-size, times the pieces of each rank,"


def split_layers(layout: str | None, layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage, in order."""
    if layout is None:
        # Extra layers go to the middle, later stages first: the last stage has the head, the first
        # the embedding, and under 1F1B earlier stages hold more activations.
        order = sorted(range(stages), key=lambda i: (i == stages - 1, i == 0, abs(2 * i - stages + 1), -i))
        more = order[: layers % stages]
        return [layers // stages + (i in more) for i in range(stages)]
    if "[" in layout:
        ids = evaluate_list(layout)
        for layer, (before, stage) in enumerate(zip(ids, ids[1:], strict=False), 1):
            if stage < before:
                raise ValueError(f"layer {layer} goes back from stage {before} to {stage}")
        if ids[-1] >= stages:
            raise ValueError(f"there is a stage {ids[-1]}, but {PARTS} gives 0 to {stages - 1}")
        if len(ids) != layers:
            raise ValueError(f"{len(ids)} layers have a stage, but --num-layers is {layers}")
        counts = [ids.count(stage) for stage in range(stages)]
    elif re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", layout):
        counts = [int(n) for n in layout.split(",")]
    else:
        raise ValueError("neither the layers of each stage, as 6,6,6,6, nor the stage of each layer, as [0]*6+[1]*6")
    if len(counts) != stages:
        raise ValueError(f"{len(counts)} stages, but {PARTS} gives {stages}")
    if 0 in counts:
        raise ValueError(f"stage {counts.index(0)} has no layer (a list of each layer's stage stands in brackets)")
    if sum(counts) != layers:
        raise ValueError(f"{sum(counts)} layers, but --num-layers is {layers}")
    return counts


def read_batch_schedule(text: str) -> list[tuple[int, int]]:
    """Return the pairs of --step-batch-size-schedule, whose numbers may end in K, M, B or T."""
    units = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    pairs = []
    for word in text.replace(",", " ").split():
        match = re.fullmatch(r"([0-9.]+)([KMBT]?):([0-9.]+)([KMBT]?)", word.upper())
        if match is None:
            raise ValueError(f"{word[:50]!r} is not TOKENS:BATCH")
        tokens, batch = (int(float(match[n]) * units[match[n + 1]]) for n in (1, 3))
        pairs.append((tokens, batch))
    return pairs


@functools.cache
def window_reach(size: str | None) -> int:
    """Return L of `L`, `L,0` or `(L,0)`; 0 for no window."""
    if size is None:
        return 0
    parts = re.fullmatch(r"\(?\s*(-1|[0-9]{1,9})\s*(?:,\s*(?:0|-1)\s*)?\)?", size)
    if not parts or int(parts[1]) == 0:
        raise ValueError("neither L nor L,0: L tokens before each, from 1 on, or -1 for all; 0 on the right")
    return max(int(parts[1]), 0)


@functools.cache
def layers_with_window(skipped: str | None, layers: int) -> tuple[int, ...]:
    """Return the layers that are not skipped: by N each N-th is, by a list those with 0."""
    if skipped is None:
        return tuple(range(layers))
    if re.fullmatch("[0-9]{1,9}", skipped):
        if int(skipped) < 2:
            raise ValueError("N must be at least 2, or no layer has the window")
        return tuple(i for i in range(layers) if (i + 1) % int(skipped))
    kinds = evaluate_list(skipped)
    if len(kinds) != layers:
        raise ValueError(f"a list is of {len(kinds)} layers, but --num-layers is {layers}")
    return tuple(i for i, kind in enumerate(kinds) if kind)


def evaluate_list(text: str) -> list[int]:
    """Evaluate sums and multiples of lists of numbers, such as [0]*6 + [1]*6 or ([1]*5+[0])*4."""

    with contextlib.suppress(ValueError):
        out = read_expression(text.strip())
        if isinstance(out, list) and out and all(type(number) is int and number >= 0 for number in out):
            return out
    raise ValueError(f"{text[:50]!r} is not a list of numbers such as [1,1,0] or ([1]*5+[0])*4")


ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def unescape(text: str) -> str:
    r"""Replace \n, \t, \r and \\ by their characters; another character after \ stays, with it."""
    return re.sub(r"\\([ntr\\])", lambda found: ESCAPES.get(found[1], found[1]), text)
