"""The points of a sweep: combinations of flags' values, listed or drawn at random. No torch."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.base.errors import UserError
from meshwright.base.hints import did_you_mean
from meshwright.config.fields import config_fields, inner_type, is_list, spelling, switches
from meshwright.config.flags import convert_value, words_in
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TrainConfig

Point = dict[str, str]  # field of train's settings -> value, as it is typed
CONTROLS = ("preset", "recipe", "depth")  # flags of train that are no fields
OWN = ("save", "load", "run_dir")  # fields that a sweep sets for each run
NAME_LIMIT = 120  # characters of a folder's name


@dataclass(frozen=True)
class Axis:
    """Flags that change together, and their values; or one flag and the ends of its range."""

    names: tuple[str, ...]
    values: tuple[tuple[str, ...], ...] = ()
    ends: tuple[float, float] | None = None

    def listed(self) -> list[Point]:
        return [dict(zip(self.names, each, strict=True)) for each in self.values]

    def draw(self, key: str) -> Point:
        """Draw a value that depends on nothing but the key and the axis.

        A range with positive ends is log-uniform, any other uniform; numbers have three digits.
        """
        generator = random.Random(f"{key}/{','.join(self.names)}")
        if self.ends is None:
            return generator.choice(self.listed())
        (name,) = self.names
        low, high = self.ends
        # Rates and sizes differ by factors, so their logarithms are uniform.
        is_log = low > 0
        number = generator.uniform(*(map(math.log, self.ends) if is_log else self.ends))
        if is_log:
            number = math.exp(number)
        if _kind(name) is int:
            return {name: str(round(number))}
        # Rounding to three digits may leave the range.
        rounded = float(f"{number:.3g}")
        return {name: _text_of(min(max(rounded, low), high))}


@dataclass(frozen=True)
class Space:
    """The axes of a sweep: every point of the grid with each of the draws."""

    grid: tuple[Axis, ...]
    random: tuple[Axis, ...]

    def count(self, draws: int) -> int:
        listed = math.prod(len(axis.values) for axis in self.grid)
        return listed * draws if self.random else listed

    def points(self, draws: int, draw_seed: int) -> Iterator[Point]:
        """Yield the points in order; more draws begin with the same ones."""
        drawn: list[Point] = []
        for i in range(draws if self.random else 1):
            drawn.append(_joined(axis.draw(f"{draw_seed}/{i}") for axis in self.random))
        # Every point of the grid meets the same draws, so that points differ by the grid alone.
        for listed in itertools.product(*(axis.listed() for axis in self.grid)):
            for draw in drawn:
                yield _joined([*listed, draw])


def read_space(grid: Sequence[str], drawn: Sequence[str]) -> Space:
    """Return the axes of --grid and --random."""
    space = Space(tuple(_read_axes(grid, "--grid")), tuple(_read_axes(drawn, "--random")))
    for axis in space.grid:
        if axis.ends:
            name = spelling(axis.names[0])[2:]
            raise SettingsError(
                f"{{grid={name}}}: a range has no grid; give it to {{random}}, or list its values"
            )
    names = [name for axis in (*space.grid, *space.random) for name in axis.names]
    if twice := sorted({spelling(name) for name in names if names.count(name) > 1}):
        raise UserError(f"{', '.join(twice)}: named twice in the sweep; give all values at once")
    return space


def _read_axes(words: Sequence[str], flag: str) -> list[Axis]:
    """Parse NAME=VALUE,VALUE; several may stand in a word, and | separates values with commas."""
    axes = []
    for several in words:
        # Words are divided at spaces that another FLAG= follows; a value may contain spaces.
        for word in re.split(r"\s+(?=[\w:-]+=)", several.strip()):
            names, _, values = word.partition("=")
            if not values:
                raise UserError(f"{flag} {word}: write FLAG=VALUE,VALUE, as in lr=1e-4,3e-4")
            separator = "|" if "|" in values else ","
            axes.append(_make_axis(names, values.split(separator), f"{flag} {word}"))
    return axes


def _make_axis(flags: str, values: Sequence[str], where: str) -> Axis:
    # A range, the values of one flag, or those of several flags that change together.
    names = tuple(_field_of(name, where) for name in flags.split(":"))
    first, *others = names
    # A single value with .. in it is a range, if the flag takes numbers.
    may_be_range = len(names) == len(values) == 1
    if may_be_range and ".." in values[0] and _kind(first) in (int, float):
        return Axis(names, ends=_ends(values[0], where))

    # Each value has a part for each flag; a lone flag's may contain colons.
    read = []
    for value in values:
        parts = value.split(":") if others else [value]
        if len(parts) != len(names):
            raise UserError(f"{where}: {value!r} is not {len(names)} values with : between them")
        pairs = zip(names, parts, strict=True)
        read.append(tuple(_normal(name, part, where) for name, part in pairs))
    return Axis(names, tuple(read))


def _ends(text: str, where: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(".."))
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise UserError(f"{where}: a range is LOW..HIGH, as in 1e-4..1e-2")
    return low, high


def _field_of(word: str, where: str) -> str:
    """Return the field of a flag, by any of its spellings."""
    fields = config_fields(TrainConfig)
    key = word.lstrip("-").replace("_", "-")
    name = key.replace("-", "_")
    # Any spelling that train takes: lr, --lr, another program's.
    for field, (_, f, _) in fields.items():
        if f"--{key}" in f.metadata["aliases"]:
            name = field
    if name in OWN:
        raise UserError(
            f"{where}: a sweep gives each run its own folder; leave {spelling(name)} out"
        )
    if name in fields and fields[name][1].metadata["once"]:
        raise UserError(f"{where}: {spelling(name)} is for one start, not for a run; leave it out")
    if name not in fields and name not in CONTROLS:
        raise UserError(f"{where}: train has no flag --{key}{did_you_mean(key, fields)}")
    return name


def _kind(name: str) -> Any:
    if name in CONTROLS:
        return int if name == "depth" else str
    return inner_type(config_fields(TrainConfig)[name][2])


def _normal(name: str, text: str, where: str) -> str:
    """Return a value in the form that names its run: 0.0001 and 1e-4 are the same."""
    if name in CONTROLS:
        return text
    try:
        # As train would read it, so that a mistake is found before the first run.
        value = convert_value(config_fields(TrainConfig)[name][2], text)
    except ValueError as error:
        raise UserError(f"{where}: {spelling(name)}: {error}") from None
    if isinstance(value, float):
        return _text_of(value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return text if isinstance(value, list) else str(value)


def _text_of(number: float) -> str:
    """Return the shortest text that states a number exactly."""
    text = f"{number:.12g}"
    return text if float(text) == number else repr(number)


def _joined(parts: Iterable[Point]) -> Point:
    return {name: value for part in parts for name, value in part.items()}


def words_of(point: Mapping[str, str]) -> list[str]:
    """Return the flags of train that set a point's values."""
    words: list[str] = []
    for name, text in point.items():
        if text in ("true", "false") and _kind(name) is bool:
            # A switch has two flags and no value.
            on, off = switches(config_fields(TrainConfig)[name][1])
            words.append(on[0] if text == "true" else off[0])
        elif is_list(_kind(name)):
            words += [spelling(name), *words_in(text)]
        else:
            words.append(f"{spelling(name)}={text}")
    return words


def name_of_point(point: Mapping[str, str]) -> str:
    """Return the name of a point's folder, which depends on its values alone."""
    settings = []
    for field, value in point.items():
        flag = spelling(field).removeprefix("--")
        settings.append(f"{flag}={value}")
    values = ",".join(settings)
    # A folder's name is free of slashes, spaces and all that a shell reads.
    name = re.sub(r"[^\w.,+=-]", "-", values)
    if name == values and len(name) <= NAME_LIMIT:
        return name or "run"
    # Other points may have the same name once it is cut or characters are replaced.
    exact = repr(sorted(point.items()))
    digest = hashlib.sha256(exact.encode()).hexdigest()
    return f"{name[: NAME_LIMIT - 9]}-{digest[:8]}"


def require_flags(point: Mapping[str, str], where: str) -> None:
    """Refuse a recorded point with a name that is no flag of train."""
    for name in point:
        _field_of(name, where)


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether an axis of these values is drawn with a logarithmic scale."""
    return len(values) > 1 and min(values) > 0 and max(values) / min(values) >= 4
