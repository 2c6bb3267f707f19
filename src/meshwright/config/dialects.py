"""What is registered of other programs' flags and settings files (group `meshwright.dialects`).

compat/ registers Megatron's flags and DeepSpeed's JSON file; without it the core takes its own
flags alone. A dialect says what another program's switches are here, answers flags that have no
counterpart, fills settings from its file, and names the arguments as that program prints them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.base import registry
from meshwright.config.fields import group_values
from meshwright.config.schema import TrainConfig

Settings = Mapping[str, tuple[str, Any]]  # a switch -> the setting that it stands for, and its value
Filled = tuple[TrainConfig, list[str], list[str]]  # with notices, and what is wrong


@dataclass(frozen=True)
class Dialect:
    """What one program's settings are here; all of it is optional."""

    equal: Settings = field(default_factory=dict)
    old_switches: Settings = field(default_factory=dict)
    # A flag that is accepted without effect -> the number of its values, and the reason.
    no_effect: Mapping[str, tuple[int | str, str]] = field(default_factory=dict)
    # (flag) -> what to say of it, None if this program does not have it either.
    answer: Callable[[str], str | None] | None = None
    # (config, names of given settings) -> the settings filled from this program's file.
    fill: Callable[[TrainConfig, Collection[str]], Filled] | None = None
    # (config, given flags without effect, backend) -> arguments as this program prints them.
    arguments: Callable[[TrainConfig, Mapping[str, Any], str], dict[str, Any]] | None = None


@functools.cache
def dialects() -> list[Dialect]:
    return list(registry.load("dialects").values())


@functools.cache
def equal_switches() -> Settings:
    """Return switches that do the same as a setting of ours."""
    return {switch: setting for dialect in dialects() for switch, setting in dialect.equal.items()}


@functools.cache
def old_switches() -> Settings:
    """Return switches that became values of a setting, which programs still ask for."""
    return {switch: setting for dialect in dialects() for switch, setting in dialect.old_switches.items()}


@functools.cache
def flags_without_effect() -> Mapping[str, tuple[int | str, str]]:
    return {flag: about for dialect in dialects() for flag, about in dialect.no_effect.items()}


def answer_to(flag: str) -> str | None:
    """Return the answer to a flag that is known only in other programs."""
    answers = (dialect.answer(flag) for dialect in dialects() if dialect.answer)
    return next(filter(None, answers), None)


def fill_from_file(config: TrainConfig, given: Collection[str]) -> Filled:
    """Fill a configuration from the files of other programs that its settings name.

    `given` are the settings with a source, which no file changes.
    """
    notices, wrong = list[str](), list[str]()
    filling = [dialect.fill for dialect in dialects() if dialect.fill]
    for fill in filling:
        config, more_notices, more_wrong = fill(config, given)
        notices += more_notices
        wrong += more_wrong
    if config.parallel.deepspeed_config and not filling:
        wrong.append("--deepspeed_config needs compat/, which this installation lacks; give its settings as flags")
    return config, notices, wrong


def arguments_of(config: TrainConfig, without_effect: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """Return the arguments for the head of the log: Megatron's block, or our settings alone."""
    if naming := next((dialect.arguments for dialect in dialects() if dialect.arguments), None):
        return naming(config, without_effect, backend)
    return {name: value for group in group_values(config) for name, value in vars(group).items()}
