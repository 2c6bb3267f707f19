"""The formats of checkpoints besides our own: how each is recognised, found, read and written.

Finding steps, `--load`, convert and inspect ask this file alone; a new format is one record under
the entry point `meshwright.formats`, and one reader (docs/adding-a-format.md).
"""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from meshwright.base import registry
from meshwright.base.errors import UNAVAILABLE, UserError

HUGGING_FACE = "Hugging Face"


@dataclass(frozen=True)
class Format:
    """One program's checkpoints. All patterns are regular expressions that match a full name."""

    # As messages and `inspect` spell it.
    name: str
    # "module:function": (folder, trust, heads, optimizer) -> MappedSource.
    reader: str
    # A folder is of the first format whose patterns each match some name in it.
    files: tuple[str, ...]
    # Formats are tried in this order. Ours are from 10 to 90, so that others come last.
    order: int = 100
    # The name of such a folder.
    folder: str = r".*"
    # The names of steps in a run's folder, if they can be told from other folders by their names.
    steps: str = ""
    # The names of folders within a step, one a rank, which stand for the step.
    ranks: str = ""
    # The file in a run's folder that names the newest step, and the number in what it says.
    tracker: str = ""
    tracked: str = ""
    # Steps have numbers and belong to a run. False: the folder is one model by itself.
    is_numbered: bool = True
    # Its files have names that others use too: beside steps of any program they mean nothing.
    yields: bool = False
    # The vocabulary's size that it states may include rows of padding.
    counts_padding: bool = False
    # Names in a step that was never finished, if its name is one of ours.
    unfinished: str = ""
    # What --ckpt-format and convert's --to call it if it is written too, and by which
    # "module:function": (source, tensor ranks, stages, rows with padding, whether with the
    # optimizer's state) -> what writes each file, in the order of stages within tensor ranks.
    target: str = ""
    writer: str = ""

    def matches(self, folder: str, names: Collection[str]) -> bool:
        """Return whether a folder with these names in it has this format."""
        if not re.fullmatch(self.folder, folder):
            return False
        return all(any(re.fullmatch(pattern, name) for name in names) for pattern in self.files)

    def load_reader(self) -> Callable[..., Any]:
        """Import the reader, which may need torch."""
        read: Callable[..., Any] = pkgutil.resolve_name(self.reader)
        return read

    def load_writer(self) -> Callable[..., Any]:
        write: Callable[..., Any] = pkgutil.resolve_name(self.writer)
        return write


OWN = Format(
    HUGGING_FACE,
    reader="meshwright.checkpoint.huggingface.reader:open_huggingface",
    files=(r"config\.json", r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?"),
    order=60,
    is_numbered=False,
    counts_padding=True,
)


@functools.cache
def all_formats() -> dict[str, Format]:
    """Return name -> record, in the order in which they are tried.

    An entry is a record or a tuple of them.
    """
    records = [OWN]
    for entry in registry.load("formats").values():
        records += [entry] if isinstance(entry, Format) else entry
    return {record.name: record for record in sorted(records, key=lambda record: record.order)}


def require_written(target: str) -> Format:
    """Return the record that writes this --ckpt-format or --to; refuse one that is missing."""
    for record in all_formats().values():
        if record.writer and record.target == target:
            return record
    raise UserError(
        f"the format {target} cannot be written: {registry.LACKING}, or choose native", UNAVAILABLE
    )
