"""Find what packages register: commands, checkpoint formats, dialects of flags, parts of a run.

Each is an entry point in a group such as `meshwright.commands`, so that another package adds one
without a change here. Ours are in pyproject.toml, which a clone reads itself: it may run without an
install, or beside the metadata of an older one. The core works without what apps/ and compat/
register.
"""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
import tomllib
from typing import Any

from meshwright.base.version import project_text

# Ends the error about something that was asked for and is not registered.
LACKING = "this installation lacks the part for it; install Meshwright as a whole"


@functools.cache
def entries(group: str) -> dict[str, str]:
    """Return name -> "module:attribute" of a group: ours in order, then other packages'."""
    found = {name: place for name, place in _ours().get(group, {}).items() if is_there(place)}
    return found | {name: place for name, place in _others().get(group, {}).items() if name not in found}


def find(group: str, name: str) -> Any:
    """Return what is registered under a name, None if nothing is."""
    place = _ours().get(group, {}).get(name)
    if place is None or not is_there(place):
        place = entries(group).get(name)
    return pkgutil.resolve_name(place) if place else None


def load(group: str) -> dict[str, Any]:
    """Import and return all that a group has, by name."""
    return {name: pkgutil.resolve_name(place) for name, place in entries(group).items()}


def is_there(place: str) -> bool:
    """Return whether the module of "module:attribute" is part of this installation."""
    try:
        return importlib.util.find_spec(place.partition(":")[0]) is not None
    except ModuleNotFoundError:  # a folder above it is not there
        return False


@functools.cache
def _others() -> dict[str, dict[str, str]]:
    """Return what other packages register in any group: one look takes tens of milliseconds."""
    import importlib.metadata

    found: dict[str, dict[str, str]] = {}
    points = importlib.metadata.entry_points()
    for group in points.groups:
        if group.startswith("meshwright."):
            theirs = (point for point in points.select(group=group) if not point.value.startswith("meshwright."))
            found[group.removeprefix("meshwright.")] = {point.name: point.value for point in theirs}
    return found


@functools.cache
def _ours() -> dict[str, dict[str, str]]:
    if text := project_text():
        groups: dict[str, dict[str, str]] = tomllib.loads(text)["project"]["entry-points"]
        return {name.removeprefix("meshwright."): points for name, points in groups.items()}
    import importlib.metadata

    found: dict[str, dict[str, str]] = {}
    for point in importlib.metadata.distribution("meshwright").entry_points:
        found.setdefault(point.group.removeprefix("meshwright."), {})[point.name] = point.value
    return found
