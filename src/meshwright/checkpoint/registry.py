"""Other programs' checkpoints: how each is recognised, found, read and written.

Finding steps, `--load`, convert and inspect ask `formats` alone. A new format is one record, which
is registered, and one reader (docs/adding-a-format.md).
"""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from meshwright.base import registry
from meshwright.base.errors import UserError

MEGATRON, TORCH_DIST, DEEPSPEED, UNIVERSAL = "Megatron", "Megatron-Core", "DeepSpeed", "universal"
HUGGING_FACE, LIBAI, ONEFLOW = "Hugging Face", "LiBai", "OneFlow-GPT"
NANOGPT, LITGPT = "nanoGPT", "litgpt"

MEGATRON_RANK = r"mp_rank_\d\d+(_\d{3,}){0,2}"


@dataclass(frozen=True)
class Format:
    """One program's checkpoints. All patterns are regular expressions that match a full name."""

    # As messages and `inspect` spell it.
    name: str
    # "module:function": (folder, trust, heads, optimizer) -> MappedSource.
    reader: str

    # A folder is of the first format whose patterns each match some name in it.
    files: tuple[str, ...]
    # Which formats are asked first: -1 those whose folders may look like Hugging Face's too.
    order: int = 0
    # "module:function": (source, tensor ranks, pipeline ranks, vocabulary, optimizer) -> files.
    writer: str = ""
    # The name of such a folder.
    folder: str = r".*"
    # The names of steps in a run's folder, if they can be told from other folders by their names.
    steps: str = ""
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

    def matches(self, folder: str, names: Collection[str]) -> bool:
        """Return whether a folder with these names in it has this format."""
        if not re.fullmatch(self.folder, folder):
            return False
        return all(any(re.fullmatch(pattern, name) for name in names) for pattern in self.files)

    def load_reader(self) -> Callable[..., Any]:
        """Import the reader, which may need torch."""
        read: Callable[..., Any] = pkgutil.resolve_name(self.reader)
        return read


_HUGGING_FACE = Format(
    HUGGING_FACE,
    reader="meshwright.checkpoint.huggingface.reader:open_huggingface",
    files=(r"config\.json", r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?"),
    is_numbered=False,
    counts_padding=True,
)


def _registered() -> list[Format]:
    """Return the formats that the registry finds; an entry is one, or a sequence of them."""
    found: list[Format] = []
    for given in registry.load("formats").values():
        found += [given] if isinstance(given, Format) else given
    return found


@functools.cache
def formats() -> dict[str, Format]:
    """Return the formats by name; a folder is of the first that matches it."""
    records = sorted([_HUGGING_FACE, *_registered()], key=lambda record: record.order)
    return {record.name: record for record in records}


def load_writer(name: str) -> Callable[..., Any]:
    """Import what writes a format, or raise UserError if nothing here does."""
    record = formats().get(name)
    if record is None or not record.writer:
        what = f"nothing in this installation writes checkpoints of {name}, as compat/ does"
        raise UserError(f"{what}; choose another format, or install all of meshwright")
    write: Callable[..., Any] = pkgutil.resolve_name(record.writer)
    return write
