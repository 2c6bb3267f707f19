"""Which token files a run reads, in whichever of three ways the flags say it; ValueError says what is wrong.

1. `--data-path` or `--data-args-path`: one blend for all, whose files `--split` divides.
2. `--train-data-path`, `--valid-data-path`, `--test-data-path` or `--per-split-data-args-path`: a blend of whole files each.
3. bigscience's `--train-weighted-split-paths` and its sisters: named groups, each a blend of ranges of files.

Nothing but the files that the flags name is read, so that settings can be checked before anything is imported.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.settings.grammar import blend
from meshwright.settings.schema import Data, spelling

SPLITS = ("train", "valid", "test")
# Of each of the three ways the settings; the last of a way names a file that holds what the others would.
TOGETHER = ("data_path", "data_args_path")
APART = (*(f"{split}_data_path" for split in SPLITS), "per_split_data_args_path")
GROUPS = tuple(f"{split}_weighted_split_paths{end}" for split in SPLITS for end in ("", "_path"))


@dataclass(frozen=True)
class Source:
    """One pair of token files in a set, and the share of its documents that the set has, unless `--split` says."""

    prefix: str
    weight: float | None = None  # none: its tokens are
    begin: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class PathSet:
    """Files that are read as one: for training, or to measure one loss on."""

    split: str  # train, valid or test
    name: str | None  # of a validation or test set that has one
    sources: tuple[Source, ...]
    flag: str  # that names them
    divided: bool = False  # by --split

    @property
    def key(self) -> str:
        return f"{self.split}/{self.name}" if self.name else self.split


def given(d: Data) -> list[str]:
    """The settings that name token files."""
    return [name for name in (*TOGETHER, *APART, *GROUPS) if getattr(d, name)]


def without(d: Data) -> Data:
    nothing: dict[str, Any] = {n: [] if isinstance(getattr(d, n), list) else None for n in given(d)}
    return dataclasses.replace(d, **nothing)


def prefixes(d: Data) -> list[str]:
    """Every pair of token files that is read, once."""
    return [] if d.mock_data else list(dict.fromkeys(s.prefix for one in path_sets(d) for s in one.sources))


def path_sets(d: Data) -> list[PathSet]:
    """In the order train, valid, test; of several sets of one split in the order given."""
    named = given(d)
    ways = [[n for n in way if n in named] for way in (TOGETHER, APART, GROUPS)]
    used = [way for way in ways if way]
    if len(used) > 1:
        said = [" and ".join(map(spelling, way)) for way in used]
        raise ValueError(f"{said[0]}, which {_says(used[0])}, contradicts {' and '.join(said[1:])}: give either")
    if ways[0] and len(ways[0]) > 1 or (APART[-1] in ways[1] and len(ways[1]) > 1):
        raise ValueError(f"{' and '.join(map(spelling, used[0]))} say the same thing twice: give one")
    out = _together(d) if ways[0] else _apart(d) if ways[1] else _groups(d) if ways[2] else []
    for one in out:
        _check(one)
    _check_validation(d, out)
    return out


def _says(way: list[str]) -> str:
    return "--split divides" if way[0] in TOGETHER else "takes whole files" if way[0] in APART else "names groups"


def _together(d: Data) -> list[PathSet]:
    flag = spelling("data_args_path" if d.data_args_path else "data_path")
    values = read(d.data_args_path, flag).split() if d.data_args_path else d.data_path
    sources = _blend(values, flag)
    return [PathSet(split, None, sources, flag, divided=True) for split in SPLITS]


def _apart(d: Data) -> list[PathSet]:
    values: dict[str, list[str]] = {split: getattr(d, f"{split}_data_path") for split in SPLITS}
    flags = {split: spelling(f"{split}_data_path") for split in SPLITS}
    if d.per_split_data_args_path:
        flag = spelling("per_split_data_args_path")
        values, flags = per_split(d.per_split_data_args_path, flag), dict.fromkeys(SPLITS, flag)
    out = []
    for split in SPLITS:
        sources = _blend(values[split], flags[split]) if values[split] else ()
        if split == "valid" and (d.multiple_validation_sets or d.validation_set_names):
            out += _each_alone(sources, d, flags[split])
        elif sources:
            out.append(PathSet(split, None, sources, flags[split]))
    return out


def _each_alone(sources: tuple[Source, ...], d: Data, flag: str) -> list[PathSet]:
    """--multiple-validation-sets: every path by itself, under its file's name, or where these are alike its number."""
    if any(s.weight is not None for s in sources):
        raise ValueError(
            f"{flag} with weights and --multiple-validation-sets: every path is a set of its own; leave them out"
        )
    if len(sources) < 2 and not d.validation_set_names:
        return [PathSet("valid", None, sources, flag)] if sources else []
    names = d.validation_set_names or [Path(s.prefix).name for s in sources]
    if len(names) != len(sources):
        raise ValueError(f"--validation-set-names has {len(names)} names, but {flag} has {len(sources)} paths")
    if not d.validation_set_names and len(set(names)) < len(names):
        names = [str(n) for n in range(len(sources))]
    return [PathSet("valid", name, (s,), flag) for name, s in zip(names, sources, strict=True)]


def _groups(d: Data) -> list[PathSet]:
    out = []
    for split in SPLITS:
        name = f"{split}_weighted_split_paths"
        texts, path = getattr(d, name), getattr(d, f"{name}_path")
        if texts and path:
            raise ValueError(f"{spelling(name)} and {spelling(name)}-path say the same thing twice: give one")
        flag = spelling(f"{name}_path" if path else name)
        if path:
            try:
                texts = shlex.split(read(path, flag))
            except ValueError as error:
                raise ValueError(f"{flag} {path}: {error}; it holds what {spelling(name)} would, in quotes") from None
        if split == "train" and len(texts) > 1:
            raise ValueError(f"{flag} names {len(texts)} groups: training has one")
        for text in texts:
            group, sources = weighted_group(text, flag)
            out.append(PathSet(split, None if split == "train" else group, sources, flag))
    return out


def weighted_group(text: str, flag: str) -> tuple[str, tuple[Source, ...]]:
    """`NAME: w1 start:end path1, w2 start:end path2`, or `NAME: path` for all of one."""
    shown, form = f"{flag} {text[:200]!r}", "NAME: WEIGHT START:END PATH, WEIGHT START:END PATH ..., or NAME: PATH"
    name, colon, rest = (part.strip() for part in text.partition(":"))
    parts = [part.split() for part in rest.split(",")]
    if (
        not (name and colon)
        or any(len(p) not in (1, 3) for p in parts)
        or (len(parts) > 1 and any(len(p) == 1 for p in parts))
    ):
        raise ValueError(f"{shown} is not of the form {form}")
    if len(parts[0]) == 1:
        return name, (Source(parts[0][0]),)
    sources = []
    for weight, part, prefix in parts:
        try:
            begin, end = (float(x) for x in part.split(":"))
            number = float(weight)
        except ValueError:
            raise ValueError(
                f"{shown}: {weight} {part} is no weight and range, as in 0.3 0:0.95; the form is {form}"
            ) from None
        if not 0 <= begin < end <= 1:
            raise ValueError(f"{shown}: the range {part} must go up, from 0 or more to 1 or less")
        if not 0 <= number < math.inf:
            raise ValueError(f"{shown}: the weight {weight} must be a number not below 0")
        sources.append(Source(prefix, number if len(parts) > 1 else None, begin, end))  # alone it weighs nothing up
    return name, tuple(sources)


def _blend(values: list[str], flag: str) -> tuple[Source, ...]:
    try:
        weights, paths = blend(values)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    if not paths:
        raise ValueError(f"{flag} names no data")
    if weights is None:
        return tuple(map(Source, paths))
    return tuple(map(Source, paths, weights))


def per_split(path: str, flag: str) -> dict[str, list[str]]:
    """The JSON object {"train": [...], "valid": [...], "test": [...]}; each also as one text, as on the command line."""
    try:
        found = json.loads(read(path, flag))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{flag} {path} is no JSON: {error}") from None
    form = 'it must be an object {"train": [...], "valid": [...], "test": [...]}'
    if not isinstance(found, dict):
        raise ValueError(f"{flag} {path}: {form}")
    if unknown := [str(key) for key in found if key not in SPLITS]:
        raise ValueError(f"{flag} {path}: unknown key {', '.join(unknown)[:200]}; {form}")
    return {split: _words(found.get(split), f"{flag} {path}: {split}") for split in SPLITS}


def _words(value: Any, where: str) -> list[str]:
    if value is None:
        return []
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or any(not isinstance(w, str | int | float) or isinstance(w, bool) for w in words):
        raise ValueError(f"{where} must be a list of weights and prefixes, or one text of them")
    return [str(word) for word in words]


def overlaps(d: Data) -> list[str]:
    """Validation and test sets that have documents of the training set."""
    sets = [] if d.mock_data else path_sets(d)
    train = [s for one in sets if one.split == "train" for s in one.sources]
    return [
        f"{one.flag}: {s.prefix} is in the training set too, with the same documents: this {one.key} loss is not of unseen text"
        for one in sets
        if one.split != "train" and not one.divided
        for s in one.sources
        if any(t.prefix == s.prefix and t.begin < s.end and s.begin < t.end for t in train)
    ]


def read(path: str | None, flag: str) -> str:
    try:
        return Path(path or "").read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise ValueError(f"{flag} {path} is no UTF-8 text") from None


def _check(one: PathSet) -> None:
    """Weights, and documents that would be read twice."""
    weights = [s.weight for s in one.sources if s.weight is not None]
    where = one.flag + (f" {one.name}" if one.name else "")
    bad = [w for w in weights if not 0 <= w < math.inf]
    if bad or (weights and not 0 < sum(weights) < math.inf):
        shown = " ".join(f"{w:g}" for w in bad or weights)[:200]
        raise ValueError(f"{where}: the weights {shown} must be numbers not below 0, and not all 0")
    seen: dict[str, Source] = {}
    files = [
        (os.path.realpath(s.prefix + ".bin"), s.begin, n) for n, s in enumerate(one.sources)
    ]  # whatever its spelling
    for file, _, n in sorted(files):
        s = one.sources[n]
        if (before := seen.get(file)) and s.begin < before.end:
            raise ValueError(
                f"{where}: {s.prefix} is there twice, so its documents would come twice: add its weights up"
            )
        seen[file] = s


def _check_validation(d: Data, sets: list[PathSet]) -> None:
    for key, number in Counter(one.key for one in sets).items():
        if number > 1:
            raise ValueError(f"{number} sets are named {key.partition('/')[2]}: each needs a name of its own")
    if strange := [one.name for one in sets if one.name and ("/" in one.name or not one.name.isprintable())]:
        raise ValueError(
            f"the name {strange[0]!r} of a set cannot be a part of tags: give one of printable letters without /"
        )
    if (d.multiple_validation_sets or d.validation_set_names) and not any(n in APART for n in given(d)):
        said = "--multiple-validation-sets" if d.multiple_validation_sets else "--validation-set-names"
        raise ValueError(f"{said} needs --valid-data-path, or the valid of --per-split-data-args-path")
    valid = [one for one in sets if one.split == "valid"]
    if d.full_validation and any(len(one.sources) > 1 and one.sources[0].weight is not None for one in valid):
        raise ValueError(
            "--full-validation reads every sample once, which weights contradict: leave these out for validation"
        )
