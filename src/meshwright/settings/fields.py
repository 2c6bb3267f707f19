"""The flags of a configuration: its groups, fields, types and defaults."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING as MISSING
from typing import Any, Literal, TypeVar

from meshwright.settings.pages import PAGES

F = TypeVar("F", bound=Callable[..., Any])


def flag(
    default: Any,
    help: str,
    *aliases: str,
    only: tuple[Any, ...] | None = None,
    step: int = 0,
    bound: Literal[">0", ">=0", "[0,1)"] | None = None,
    needs: str | tuple[str, ...] = (),
    positional: Literal[True, "rest"] | None = None,
) -> Any:
    """Return a dataclass field that is a flag; the default `MISSING` makes it required.

    Args:
        aliases: Other spellings.
        only: Values that work before release `step`.
        step: Release in which the other values are planned.
        bound: Range of a number.
        needs: Conditions, keys of `checks.CONDITIONS`, without which the flag has no effect.
        positional: Given without a flag; "rest" takes all that follows. Only in flat dataclasses.
    """
    needs = (needs,) if isinstance(needs, str) else needs
    metadata = dict(help=help, aliases=aliases, only=only, step=step, bound=bound, needs=needs, positional=positional)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def spelling(name: str) -> str:
    """Return the flag of a field; three underscores are kept, as in Megatron."""
    return "--" + name.replace("_", "-").replace("opt-param", "opt_param").replace(
        "deepspeed-config", "deepspeed_config"
    )


def is_flat(config: Any) -> bool:
    """Return whether a configuration's own fields are flags, not groups of them."""
    return "help" in dataclasses.fields(config)[0].metadata


def group_values(config: Any) -> list[Any]:
    """Return the groups of settings of a configuration; a flat one is its own only group."""
    return [config] if is_flat(config) else [getattr(config, f.name) for f in dataclasses.fields(config)]


def every_config() -> list[type]:
    """Return the configurations whose settings a file or the environment may hold."""
    configs = [pkgutil.resolve_name(name) for name in dict.fromkeys(page.config for page in PAGES.values())]
    return [config for config in configs if not is_flat(config)]


def config_groups(cls: type) -> dict[str, type]:
    """Return group name -> dataclass, a command's own first; a flat configuration has one, ""."""
    if is_flat(cls):
        return {"": cls}
    hints = typing.get_type_hints(cls)
    own = sorted(dataclasses.fields(cls), key=lambda f: f.name not in cls.__annotations__)
    return {f.name: hints[f.name] for f in own}


def cached(function: F) -> F:
    """Cache a function of a class; mypy does not take a type[C] for functools.cache's Hashable."""
    return typing.cast(F, functools.cache(function))


@cached
def config_fields(cls: type) -> Mapping[str, tuple[str, dataclasses.Field[Any], Any]]:
    """Return field name -> (group name, field, type) of a configuration class."""
    out = {}
    for group_name, group in config_groups(cls).items():
        hints = typing.get_type_hints(group)
        for f in dataclasses.fields(group):
            out[f.name] = (group_name, f, hints[f.name])
    return types.MappingProxyType(out)


def default_of(f: dataclasses.Field[Any]) -> Any:
    """Return the default; MISSING if the flag is required."""
    return f.default_factory() if callable(f.default_factory) else f.default


def is_not_yet(f: dataclasses.Field[Any]) -> bool:
    """Return whether only its default works before the release in which it is planned."""
    return bool(f.metadata["only"] == (default_of(f),) and f.metadata["step"] > 0)


def not_yet(f: dataclasses.Field[Any], kind: Any) -> str:
    """Return "not yet", with the values that do not work if others do; empty if all work."""
    if is_not_yet(f):
        return "not yet"
    lacking = [str(c) for c in choices_of(kind) if f.metadata["only"] and c not in f.metadata["only"]]
    return f"not yet: {', '.join(lacking)}" if lacking else ""


def inner_type(kind: Any) -> Any:
    """Return `int` of `int | None`, and so on."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(kind) if a is not type(None))
    return kind


def is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is list


def choices_of(kind: Any) -> tuple[Any, ...]:
    plain = inner_type(kind)
    return typing.get_args(plain) if typing.get_origin(plain) is typing.Literal else ()


def word_of(name: str) -> str:
    """Return the name of a positional argument."""
    return {"load": "DIR", "folders": "DIR", "prefixes": "PREFIX", "paths": "SRC DST", "input": "TEXT"}.get(
        name, name.rstrip("s").upper()
    )


def switches(f: dataclasses.Field[Any]) -> tuple[list[str], list[str]]:
    """Return the flags that turn a boolean field on, and those that turn it off."""
    off = [a for a in f.metadata["aliases"] if a.startswith(("--disable", "--no-"))]
    on = [spelling(f.name), *(a for a in f.metadata["aliases"] if a not in off)]
    if not f.name.startswith("no_"):
        off.insert(0, "--no-" + on[0][2:])
    return on, off
