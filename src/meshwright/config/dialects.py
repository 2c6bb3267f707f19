"""Dialects: the flags and files of settings that other programs have, in terms of ours.

Each is registered under the entry point `meshwright.dialects`. Without any, the flags are ours
alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base import registry
from meshwright.base.errors import UNAVAILABLE
from meshwright.config.fields import group_values
from meshwright.config.problem import Problem, SettingsError, stated
from meshwright.config.schema import TrainConfig

Switches = Mapping[str, tuple[str, Any]]  # switch -> the setting that it stands for, and its value
Filled = tuple[TrainConfig, list[str], list[Problem]]  # a configuration, notices and problems


@dataclass(frozen=True)
class Dialect:
    """What one program's users write. A dialect has some of these parts."""

    # Switches that are a setting with a value, by their flags.
    equal: Switches = field(default_factory=dict)
    # Older switches, by the names of their settings: files and saved runs may hold them too.
    old_switches: Switches = field(default_factory=dict)
    # Flags that give their value to a setting, and another setting a fixed value.
    two_in_one: Mapping[str, tuple[str, str, Any]] = field(default_factory=dict)
    # Values that other programs give where a setting of ours is not given.
    unset: Mapping[str, Any] = field(default_factory=dict)
    # By a setting's name: other programs' words for its values, each with ours, and why.
    other_values: Mapping[str, Mapping[str, tuple[str, str]]] = field(default_factory=dict)
    # Flags that are accepted without effect: the number of values (*: any), and why.
    no_effect: Mapping[str, tuple[int | str, str]] = field(default_factory=dict)
    # (flag, how it was given) -> the text of a problem, if it is known and not accepted.
    answer: Callable[[str, str], str | None] | None = None
    # The suffix of files for --config, and (path) -> their settings.
    suffix: str = ""
    read: Callable[[Path], dict[str, Any]] | None = None
    # (configuration, names of the settings that are given): fills it from --deepspeed_config.
    fill: Callable[[TrainConfig, Collection[str]], Filled] | None = None
    # (configuration, given flags without effect, backend) -> the arguments at the head of the log.
    arguments: Callable[[TrainConfig, Mapping[str, Any], str], dict[str, Any]] | None = None


@functools.cache
def dialects() -> tuple[Dialect, ...]:
    return tuple(registry.load("dialects").values())


@functools.cache
def equal() -> dict[str, tuple[str, Any]]:
    return {name: setting for dialect in dialects() for name, setting in dialect.equal.items()}


@functools.cache
def two_in_one() -> dict[str, tuple[str, str, Any]]:
    return {name: both for dialect in dialects() for name, both in dialect.two_in_one.items()}


@functools.cache
def unset() -> dict[str, Any]:
    return {name: value for dialect in dialects() for name, value in dialect.unset.items()}


@functools.cache
def other_values() -> dict[tuple[str, str], tuple[str, str]]:
    """Return (setting, word of another program) -> our word, and why it is taken."""
    return {
        (name, word): ours
        for dialect in dialects()
        for name, words in dialect.other_values.items()
        for word, ours in words.items()
    }


@functools.cache
def old_switches() -> dict[str, tuple[str, Any]]:
    return {
        name: setting for dialect in dialects() for name, setting in dialect.old_switches.items()
    }


@functools.cache
def no_effect() -> dict[str, tuple[int | str, str]]:
    return {name: reason for dialect in dialects() for name, reason in dialect.no_effect.items()}


def known_elsewhere(flag: str, given: str) -> str | None:
    """Return the answer to a flag that is known only in other programs, and was given by a name."""
    answers = (dialect.answer(flag, given) for dialect in dialects() if dialect.answer)
    return next(filter(None, answers), None)


def read_file(path: Path) -> dict[str, Any] | None:
    """Return the settings in a file, or None if no dialect has its suffix."""
    for dialect in dialects():
        if dialect.read and dialect.suffix == path.suffix:
            return dialect.read(path)
    return None


def fill_from_file(config: TrainConfig, given: Collection[str]) -> Filled:
    """Fill a configuration from --deepspeed_config; see `Dialect.fill`."""
    if not config.parallel.deepspeed_config:
        return config, [], []
    for dialect in dialects():
        if dialect.fill:
            return dialect.fill(config, given)
    file = stated(config.parallel, "deepspeed_config")
    raise SettingsError(f"{file} cannot be read: {registry.LACKING}", UNAVAILABLE)


def shown_arguments(
    config: TrainConfig, ignored: Mapping[str, Any], backend: str
) -> dict[str, Any]:
    """Return name -> value of the block of arguments at the head of the log.

    Args:
        ignored: The given flags that have no effect, by name.
        backend: The backend of torch.distributed that this run uses.
    """
    for dialect in dialects():
        if dialect.arguments:
            return dialect.arguments(config, ignored, backend)
    arguments: dict[str, Any] = {}
    for group in group_values(config):
        arguments |= vars(group)
    return arguments | dict(ignored)
