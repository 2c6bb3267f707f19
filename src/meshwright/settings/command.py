"""How the commands that read a model or text begin."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from meshwright import device
from meshwright.errors import UserError
from meshwright.settings import flags

C = TypeVar("C")


def settings(
    cls: type[C], argv: list[str], name: str, about: str, positional: str | None = None
) -> flags.Parsed[C] | None:
    """A command's settings, what has no effect being told; None if they were only to be printed."""
    parsed = flags.parse(cls, argv, f"meshwright {name}", positional=positional, about=about)
    if parsed.print_config:
        print(flags.to_toml(parsed.config, parsed.sources))
        return None
    flags.print_notices(parsed)
    return parsed


def out_of_memory(error: Exception, less: str) -> UserError | None:
    """What to do about it, if that is what the error says: of a device, of the host by torch, or by Python and numpy."""
    said = str(error)
    if not (device.is_out_of_memory(error) or "can't allocate memory" in said or isinstance(error, MemoryError)):
        return None
    wanted = re.search(r"tried to allocate .*?(?= Including| Error code|$)", said, re.I | re.M)
    return UserError(f"out of memory{': ' + wanted[0].rstrip('.') if wanted else ''}: {less} needs less")


@contextlib.contextmanager
def explain_out_of_memory(less: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        explained = out_of_memory(error, less)
        if explained is None:
            raise
        raise explained from error


def our_version() -> str:
    try:
        return version("meshwright")
    except PackageNotFoundError:  # a clone that is not installed
        return "uninstalled"
