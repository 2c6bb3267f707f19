"""How the commands that read a model or text begin."""

from __future__ import annotations

from typing import TypeVar

from meshwright import flags

C = TypeVar("C")


def settings(
    cls: type[C], argv: list[str], name: str, about: str, positional: str | None = None
) -> flags.Parsed[C] | None:
    """A command's settings, what has no effect being told; None if they were only to be printed."""
    parsed = flags.parse(cls, argv, f"meshwright {name}", positional=positional, about=about)
    if parsed.print_config:
        print(flags.to_toml(parsed.config, parsed.sources))
        return None
    flags.tell(parsed)
    return parsed
