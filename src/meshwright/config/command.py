"""Shared beginnings and errors of commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from meshwright.base import device, host
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.config.schema import TrainConfig

C = TypeVar("C")


def settings(
    cls: type[C],
    argv: list[str],
    name: str,
    about: str,
    positional: str | None = None,
    prints: bool = True,
) -> flags.Parsed[C] | None:
    """Return parsed settings after printing notices, or None after --print-config.

    Of several ranks one `prints`.
    """
    parsed = flags.parse_settings(
        cls, argv, f"meshwright {name}", positional=positional, about=about
    )
    if parsed.print_config:
        print(flags.to_toml(parsed.config, parsed.sources))
        return None
    if prints:
        flags.print_notices(parsed)
    return parsed


def flags_of_train(words: list[str]) -> flags.Parsed[TrainConfig]:
    """Return the flags of train that a command takes after --, not checked yet."""
    try:
        return flags.parse_settings(TrainConfig, words, "meshwright train", check=False)
    except UserError as error:
        raise UserError(f"after --: {error}", error.status) from None


def out_of_memory(error: Exception, less: str | None = None) -> UserError | None:
    """Return advice if the memory of the device or the host ran out, else None.

    `less` names flags that need less, where they are the reason. What is explained stays as it is.
    """
    if isinstance(error, UserError):
        return None
    lack = host.describe_lack(error)  # first, because it needs no torch
    if lack is None and not device.is_out_of_memory(error):
        return None
    lack = lack or host.refused_request(error)
    if less is None:
        return UserError(
            f"out of memory on this machine: {lack or 'a request was refused'}; {host.MORE_MEMORY}"
        )
    return UserError(f"out of memory{': ' * bool(lack)}{lack}: {less} needs less")


@contextlib.contextmanager
def explain_out_of_memory(less: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        explained = out_of_memory(error, less)
        if explained is None:
            raise
        raise explained from error
