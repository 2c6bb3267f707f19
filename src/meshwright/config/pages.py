"""What the help shows first: each command's common flags and examples, from pages.toml."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.base import registry
from meshwright.base.files import read_table

# Commands that `launch` starts as several ranks.
LAUNCHED = (
    "train",
    "verify-layout",
    "evaluate",
    "generate",
    "chat",
    "serve",
    "doctor",
)


@dataclass(frozen=True)
class Page:
    """A command's configuration, and the first screens of its help."""

    config: str  # module and class, imported when needed
    positional: str | None = None  # the field that words without a flag set
    common: dict[str, str] = field(default_factory=dict)  # heading: names of fields
    examples: tuple[str, ...] = ()
    settings: str = "config_file print_config dry_run"  # the last heading


_TABLES = read_table("config/pages.toml")
SHORT: dict[str, str] = _TABLES.pop("short")  # field: its line among the common flags


def known_pages() -> dict[str, Page]:
    """Return the pages of the commands whose configuration is part of this installation."""
    known = {name: page for name, page in _TABLES.items() if registry.is_there(page["config"])}
    return {
        name: Page(**page | {"examples": tuple(page.get("examples", ()))})
        for name, page in known.items()
    }


PAGES = known_pages()
