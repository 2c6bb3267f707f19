"""Find what packages register: commands, checkpoint formats, dialects of flags, parts of a run.

Each is an entry point in a group such as `meshwright.commands`, so that another package adds one
without a change here. Ours are in pyproject.toml, which a clone reads itself: it may run without an
install, or beside the metadata of an older one. The core works without what apps/ and compat/
register.

importlib.metadata would find the same, but importing and asking it takes longer than most commands
need to start.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import importlib.util
import pkgutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.base.errors import UNAVAILABLE, UserError
from meshwright.base.version import project_text

PREFIX = "meshwright."
# Ends the error about something that was asked for and is not registered.
LACKING = "this installation lacks the part for it; install Meshwright as a whole"


def entries(group: str) -> dict[str, str]:
    """Return name -> "module:attribute" of a group: ours in order, then other packages'."""
    ours = {name: place for name, place in _ours().get(group, {}).items() if is_there(place)}
    return ours | {name: place for name, place in _others().get(group, {}).items() if name not in ours}


def find(group: str, name: str) -> Any:
    """Return what is registered under a name, None if nothing is."""
    place = _ours().get(group, {}).get(name)
    if place is None or not is_there(place):
        place = entries(group).get(name)
    return pkgutil.resolve_name(place) if place else None


def load(group: str) -> dict[str, Any]:
    """Import and return all that a group has, by name."""
    return {name: pkgutil.resolve_name(place) for name, place in entries(group).items()}


@functools.cache
def is_there(place: str) -> bool:
    """Return whether the module of "module:attribute" is part of this installation."""
    try:
        return importlib.util.find_spec(place.partition(":")[0]) is not None
    except ModuleNotFoundError:  # a folder above it is not there
        return False


Groups = dict[str, dict[str, str]]  # group -> name -> "module:attribute"


@functools.cache
def _ours() -> Groups:
    if text := project_text():
        groups: Groups = tomllib.loads(text)["project"]["entry-points"]
        return {name.removeprefix(PREFIX): points for name, points in groups.items()}
    for name, groups in _installed():
        if name.startswith("meshwright-"):
            return groups
    what = f"{Path(__file__).parents[1]} is neither installed nor in a clone with its pyproject.toml"
    raise UserError(f"{what}; run `pip install meshwright`", UNAVAILABLE)


@functools.cache
def _others() -> Groups:
    found: Groups = {}
    for name, groups in _installed():
        if not name.startswith("meshwright-"):
            for group, points in groups.items():
                found.setdefault(group, {}).update(points)
    return found


def _installed() -> Iterator[tuple[str, Groups]]:
    """Yield the name of each installed package that registers something, and what it registers."""
    for folder in dict.fromkeys(sys.path):
        for path in sorted(Path(folder or ".").glob("*.dist-info/entry_points.txt")):
            text = ""
            with contextlib.suppress(OSError, UnicodeDecodeError):  # of a package that is being removed
                text = path.read_text(encoding="utf-8")
            if f"[{PREFIX}" not in text:
                continue
            parser = configparser.RawConfigParser(delimiters=("=",))
            parser.optionxform = str  # type: ignore[assignment, method-assign]  # names keep their case
            parser.read_string(text)
            sections = (name for name in parser.sections() if name.startswith(PREFIX))
            yield path.parent.name, {name.removeprefix(PREFIX): dict(parser[name]) for name in sections}
