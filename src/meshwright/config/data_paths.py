"""The token files that a run reads, named by flags in one of three ways.

1. `--data-path` or `--data-args-path`: one blend, whose files `--split` divides.
2. `--train-data-path` and its sisters, or `--per-split-data-args-path`: a blend of files each.
3. `--train-weighted-split-paths` and its sisters (bigscience): named groups of ranges of files.
   Groups for validation and test alone may also stand beside the first way, as further sets.

Only the files that flags name are read. ValueError says what is wrong, with fields as the text of a
`Problem` has them.
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

from meshwright.base.files import GivenTwice, read_small, unique_keys
from meshwright.base.hints import find_address, refuse_address
from meshwright.config.grammar import blend, prefix_of
from meshwright.config.problem import FLAGS, named, plain
from meshwright.config.schema import Data

PATHS_LIMIT = 64 << 20  # bytes of a file that names token files
SPLITS = ("train", "valid", "test")
# The settings of each way; the last one names a file that holds the values of the others.
BLEND_FLAGS = ("data_path", "data_args_path")
SET_FLAGS = (*(f"{split}_data_path" for split in SPLITS), "per_split_data_args_path")
GROUP_FLAGS = tuple(
    f"{split}_weighted_split_paths{end}" for split in SPLITS for end in ("", "_path")
)


@dataclass(frozen=True)
class TokenFiles:
    """A pair of token files in a set; `begin` and `end` bound the share of its documents."""

    prefix: str
    weight: float | None = None  # none: its number of tokens
    begin: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", prefix_of(self.prefix))


@dataclass(frozen=True)
class PathSet:
    """Files that are read as one, for training or for one loss."""

    split: str  # train, valid or test
    name: str | None  # of a named validation or test set
    sources: tuple[TokenFiles, ...]
    flag: str  # the field that names them, in braces
    divided: bool = False  # by --split

    @property
    def key(self) -> str:
        return f"{self.split}/{self.name}" if self.name else self.split


def path_settings(d: Data) -> list[str]:
    """Return the settings that name token files."""
    return [name for name in (*BLEND_FLAGS, *SET_FLAGS, *GROUP_FLAGS) if getattr(d, name)]


def without(d: Data) -> Data:
    """Return the settings without those that name token files."""
    # Some take one file, others a list.
    nothing: dict[str, Any] = {}
    for name in path_settings(d):
        nothing[name] = [] if isinstance(getattr(d, name), list) else None
    return dataclasses.replace(d, **nothing)


def prefixes(d: Data) -> list[str]:
    """Return every pair of token files that is read, once."""
    if d.mock_data:
        return []
    out: dict[str, None] = {}  # which keeps the order
    for path_set in path_sets(d):
        out |= dict.fromkeys(source.prefix for source in path_set.sources)
    return list(out)


def path_sets(d: Data) -> list[PathSet]:
    """Return the sets in the order train, valid, test; each in the order of its flag."""
    given = path_settings(d)
    blends, sets, groups = (
        [name for name in way if name in given] for way in (BLEND_FLAGS, SET_FLAGS, GROUP_FLAGS)
    )
    meanings = (
        (blends, "{split} divides"),
        (sets, "takes whole files"),
        (groups, "names groups"),
    )
    used = [(named(names), meaning) for names, meaning in meanings if names]
    adds_sets = not sets and not any(name.startswith("train") for name in groups)
    if len(used) > 1 and not adds_sets:
        (first, meaning), *others = used
        contradicted = " and ".join(names for names, _ in others)
        raise ValueError(f"{first}, which {meaning}, contradicts {contradicted}; give either")
    # A file beside the flags that it stands for.
    if len(blends) > 1 or ("per_split_data_args_path" in sets and len(sets) > 1):
        raise ValueError(f"{used[0][0]} say the same thing twice; give one")
    if blends:
        out = sorted(_together(d) + _groups(d), key=lambda one: SPLITS.index(one.split))
    elif sets:
        out = _apart(d)
    else:
        out = _groups(d)
    for path_set in out:
        _require_once(path_set)
    _check_validation(d, out)
    return out


def _together(d: Data) -> list[PathSet]:
    # A file holds what the flag would, on one line or several.
    flag = "{data_args_path}" if d.data_args_path else "{data_path}"
    values = _read(d.data_args_path, flag).split() if d.data_args_path else d.data_path
    sources = _blend(values, flag)
    return [PathSet(split, None, sources, flag, divided=True) for split in SPLITS]


def _apart(d: Data) -> list[PathSet]:
    values: dict[str, list[str]] = {split: getattr(d, f"{split}_data_path") for split in SPLITS}
    flags = {split: f"{{{split}_data_path}}" for split in SPLITS}
    if d.per_split_data_args_path:
        flag = "{per_split_data_args_path}"
        values = _per_split(d.per_split_data_args_path, flag)
        flags = dict.fromkeys(SPLITS, flag)
    out = []
    for split in SPLITS:
        sources = _blend(values[split], flags[split]) if values[split] else ()
        if split == "valid" and (d.multiple_validation_sets or d.validation_set_names):
            out += _each_alone(sources, d, flags[split])
        elif sources:
            out.append(PathSet(split, None, sources, flags[split]))
    return out


def _each_alone(sources: tuple[TokenFiles, ...], d: Data, flag: str) -> list[PathSet]:
    """Return a set for each path, named by its file, or by its number if two names are equal."""
    if any(s.weight is not None for s in sources):
        raise ValueError(
            f"{flag} with weights and {{multiple_validation_sets=True}}: each path is a set; leave weights out"
        )
    # One set needs no name, and keeps the columns of a run without this flag.
    if len(sources) < 2 and not d.validation_set_names:
        return [PathSet("valid", None, sources, flag)] if sources else []
    names = d.validation_set_names or [Path(s.prefix).name for s in sources]
    if len(names) != len(sources):
        raise ValueError(
            f"{{validation_set_names}} has {len(names)} names, but {flag} has {len(sources)} paths"
        )
    if not d.validation_set_names and len(set(names)) < len(names):
        names = [str(n) for n in range(len(sources))]
    return [PathSet("valid", name, (s,), flag) for name, s in zip(names, sources, strict=True)]


def _groups(d: Data) -> list[PathSet]:
    out = []
    for split in SPLITS:
        name = f"{split}_weighted_split_paths"
        texts = getattr(d, name)
        path = getattr(d, f"{name}_path")
        if texts and path:
            raise ValueError(f"{named((name, f'{name}_path'))} say the same thing twice; give one")
        flag = f"{{{name}_path}}" if path else f"{{{name}}}"
        if path:
            try:
                # The file holds what a shell would, so quotes keep a group together.
                texts = shlex.split(_read(path, flag))
            except ValueError as error:
                raise ValueError(
                    f"{flag} {plain(path)}: {plain(error)}; it holds what {{{name}}} would, in quotes"
                ) from None
        # Groups are sets with names of their own; a run trains on one set.
        if split == "train" and len(texts) > 1:
            raise ValueError(f"{flag} names {len(texts)} groups; training has one")
        for text in texts:
            try:
                group, sources = _weighted_group(text)
            except ValueError as error:
                raise ValueError(f"{flag} {plain(repr(text[:200]))}{plain(error)}") from None
            out.append(PathSet(split, None if split == "train" else group, sources, flag))
    return out


def _weighted_group(text: str) -> tuple[str, tuple[TokenFiles, ...]]:
    """Parse `NAME: WEIGHT START:END PATH, ...`, or `NAME: PATH` for one whole file."""
    form = "NAME: WEIGHT START:END PATH, WEIGHT START:END PATH ..., or NAME: PATH"
    # The first colon ends the name; ranges have colons too.
    name, colon, rest = (part.strip() for part in text.partition(":"))
    parts = [part.split() for part in rest.split(",")]
    lengths = [len(part) for part in parts]
    # A group is one path alone, or three words for each path.
    if not (name and colon and (lengths == [1] or set(lengths) == {3})):
        raise ValueError(f" is not of the form {form}")
    if lengths == [1]:
        return name, (TokenFiles(parts[0][0]),)
    sources = []
    weights = []
    for weight, part, prefix in parts:
        try:
            begin, end = (float(x) for x in part.split(":"))
            weights.append(float(weight))
        except ValueError:
            raise ValueError(
                f": {weight} {part} is no weight and range, as in 0.3 0:0.95; the form is {form}"
            ) from None
        if not 0 <= begin < end <= 1:
            raise ValueError(f": the range {part} must go up, from 0 or more to 1 or less")
        if not 0 <= weights[-1] < math.inf:
            raise ValueError(f": the weight {weight} must be a number not below 0")
        # A single source needs no weight.
        sources.append(TokenFiles(prefix, weights[-1] if len(parts) > 1 else None, begin, end))
    if len(parts) > 1 and not 0 < sum(weights) < math.inf:
        raise ValueError(
            f": the weights {' '.join(f'{w:g}' for w in weights)[:200]} must have a finite sum above 0"
        )
    return name, tuple(sources)


def _blend(values: list[str], flag: str) -> tuple[TokenFiles, ...]:
    try:
        weights, paths = blend(values)
    except ValueError as error:
        raise ValueError(f"{flag}: {plain(error)}") from None
    if not paths:
        raise ValueError(f"{flag} names no data")
    return tuple(map(TokenFiles, paths, weights)) if weights else tuple(map(TokenFiles, paths))


def _per_split(path: str, flag: str) -> dict[str, list[str]]:
    """Read {"train": [...], "valid": [...], "test": [...]}; a value may also be one string."""
    start = f"{flag} {plain(path)}"
    form = 'it must be an object {"train": [...], "valid": [...], "test": [...]}'
    try:
        found = json.loads(_read(path, flag), object_pairs_hook=unique_keys)
    except GivenTwice as error:
        raise ValueError(f"{start}: {plain(error)}; name the data of a split in one list") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{start} is no JSON: {plain(error)}; {form}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{start}: {form}")
    if unknown := [str(key) for key in found if key not in SPLITS]:
        raise ValueError(f"{start}: unknown key {plain(', '.join(unknown)[:200])}; {form}")
    out = {}
    for split in SPLITS:
        words = found.get(split)
        if words is None:
            words = []
        elif isinstance(words, str):
            words = words.split()
        # type, not isinstance: a boolean is no weight
        if not isinstance(words, list) or any(type(w) not in (str, int, float) for w in words):
            raise ValueError(
                f"{start}: {split} must be a list of weights and prefixes, or one string of them"
            )
        out[split] = [str(word) for word in words]
    return out


def overlaps(d: Data) -> list[str]:
    """Report validation and test sets that contain documents of the training set."""
    sets = [] if d.mock_data else path_sets(d)
    train = [s for path_set in sets if path_set.split == "train" for s in path_set.sources]

    def is_trained_on(source: TokenFiles) -> bool:
        return any(
            t.prefix == source.prefix and t.begin < source.end and source.begin < t.end
            for t in train
        )

    out = []
    for path_set in sets:
        # --split divides documents, so that its sets never overlap.
        if path_set.split == "train" or path_set.divided:
            continue
        for source in filter(is_trained_on, path_set.sources):
            out.append(
                f"{FLAGS.render(path_set.flag)}: {source.prefix} is in the training set too, with the same documents: "
                f"this {path_set.key} loss is not of unseen text"
            )
    return out


def _read(path: str, flag: str) -> str:
    try:
        text = read_small(path, PATHS_LIMIT, pipes=True).decode()
    except OSError as error:
        raise ValueError(
            f"{flag} {plain(path)} cannot be read: {error.strerror or error}"
        ) from None
    except ValueError:
        raise ValueError(f"{flag} {plain(path)} is no UTF-8 text") from None
    if address := find_address(text):
        raise ValueError(f"{flag} {plain(path)}: {plain(refuse_address(address))}")
    return text


def _require_once(path_set: PathSet) -> None:
    """Raise if a document would be read twice, under whichever spelling of its file."""
    ends: dict[str, float] = {}  # of the ranges so far, by file
    for s in sorted(path_set.sources, key=lambda s: s.begin):
        file = os.path.realpath(s.prefix + ".bin")
        if s.begin < ends.get(file, 0):
            where = f"{path_set.flag} {plain(path_set.name)}" if path_set.name else path_set.flag
            raise ValueError(
                f"{where}: {plain(s.prefix)} appears twice, so its documents would be read twice; add up its weights"
            )
        ends[file] = s.end


def _check_validation(d: Data, sets: list[PathSet]) -> None:
    # Names tell sets apart in the log and in tags.
    for key, number in Counter(path_set.key for path_set in sets).items():
        if number > 1:
            raise ValueError(
                f"{number} sets are named {plain(key.partition('/')[2])}; give each its own name"
            )
    for path_set in sets:
        # A / in a tag begins a group in TensorBoard.
        if path_set.name and ("/" in path_set.name or not path_set.name.isprintable()):
            raise ValueError(
                f"the set's name {plain(repr(path_set.name))} becomes a part of tags; give printable letters without /"
            )
    has_sets = any(name in SET_FLAGS for name in path_settings(d))
    if (d.multiple_validation_sets or d.validation_set_names) and not has_sets:
        flag = "{validation_set_names}"
        if d.multiple_validation_sets:
            flag = "{multiple_validation_sets=True}"
        raise ValueError(
            f"{flag} needs {{valid_data_path}}, or the valid of {{per_split_data_args_path}}"
        )
    for path_set in sets:
        is_blend = path_set.split == "valid" and len(path_set.sources) > 1
        if d.full_validation and is_blend and path_set.sources[0].weight is not None:
            raise ValueError(
                "{full_validation=True} reads every sample once; leave out the weights of the validation set"
            )
