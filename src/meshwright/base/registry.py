"""Find what packages register: commands, checkpoint formats, dialects of flags, parts of a run.

Each is an entry point in a group such as `meshwright.commands`, so that another package adds one
without a change here. Ours are in pyproject.toml, which a clone reads itself: it may run without an
install, or beside the metadata of an older one. The core works without what apps/ and compat/
register.

importlib.metadata would find the same, but to import it takes almost as long as all else that a
command does before it starts.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.base.errors import UNAVAILABLE, UserError
from meshwright.base.python310 import tomllib
from meshwright.base.version import project_text

PREFIX = "meshwright."
# Ends the error about something that was asked for and is not registered.
LACKING = "this installation lacks the part for it; install Meshwright as a whole"


def entries(group: str) -> dict[str, str]:
    """Return name -> "module:attribute" of a group: ours in order, then other packages'."""
    ours = {name: place for name, place in _ours().get(group, {}).items() if is_there(place)}
    return ours | {
        name: place for name, place in _others().get(group, {}).items() if name not in ours
    }


def find(group: str, name: str) -> Any:
    """Return what is registered under a name, None if nothing is."""
    # Look at ours first: finding those of other packages takes longer.
    place = _ours().get(group, {}).get(name)
    if place is None or not is_there(place):
        place = entries(group).get(name)
    return resolve(group, name, place) if place else None


def load(group: str) -> dict[str, Any]:
    """Import and return all that a group has, by name."""
    return {name: resolve(group, name, place) for name, place in entries(group).items()}


def resolve(group: str, name: str, place: str) -> Any:
    """Import "module:attribute"; a package that cannot be imported is named."""
    try:
        return pkgutil.resolve_name(place)
    except Exception as error:
        if place.startswith(PREFIX):  # ours: a defect, or a package that __main__ names
            raise
        what = f"{name} = {place}, which an installed package registers in {PREFIX}{group}, cannot be imported"
        advice = f"mend or uninstall {place.partition('.')[0].partition(':')[0]}"
        raise UserError(
            f"{what} ({type(error).__name__}: {error}); {advice}", UNAVAILABLE
        ) from error


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
    # In a clone its own file counts, whatever was installed before.
    if text := project_text():
        groups: Groups = tomllib.loads(text)["project"]["entry-points"]
        return {name.removeprefix(PREFIX): points for name, points in groups.items()}
    for name, groups in _installed():
        if name.startswith("meshwright-"):
            return groups
    what = (
        f"{Path(__file__).parents[1]} is neither installed nor in a clone with its pyproject.toml"
    )
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
    # Look where Python looks for packages, in the same order.
    for folder in dict.fromkeys(sys.path):
        for path in sorted(Path(folder or ".").glob("*.dist-info/entry_points.txt")):
            parser = configparser.RawConfigParser(delimiters=("=",))
            parser.optionxform = str  # type: ignore[assignment, method-assign]  # names keep their case
            # Left out: a package that is being removed, and metadata that nobody can read.
            with contextlib.suppress(OSError, UnicodeDecodeError, configparser.Error):
                if f"[{PREFIX}" in (text := path.read_text(encoding="utf-8")):
                    parser.read_string(text)
            if not parser.sections():
                continue
            sections = (name for name in parser.sections() if name.startswith(PREFIX))
            yield (
                path.parent.name,
                {name.removeprefix(PREFIX): dict(parser[name]) for name in sections},
            )
