"""THE table of other programs' checkpoints: how each is recognised, found, and read.

Finding steps, `--load`, convert and inspect read this table alone; a new format is one record here
and one reader (docs/adding-a-format.md).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

MEGATRON, TORCH_DIST, DEEPSPEED, UNIVERSAL = "Megatron", "Megatron-Core", "DeepSpeed", "universal"
HUGGING_FACE, LIBAI, ONEFLOW = "Hugging Face", "LiBai", "OneFlow-GPT"
NANOGPT, LITGPT = "nanoGPT", "litgpt"

MEGATRON_RANK = r"mp_rank_\d\d+(_\d{3,}){0,2}"


@dataclass(frozen=True)
class Format:
    """One program's checkpoints. All patterns are regular expressions that match a full name."""

    # As messages and `inspect` spell it.
    name: str
    # "module:function" in foreign/: (folder, trust, heads, optimizer) -> MappedSource.
    reader: str
    # A folder is of the first format whose patterns each match some name in it.
    files: tuple[str, ...]
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
        module, _, function = self.reader.partition(":")
        read: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.foreign.{module}"), function)
        return read


_FORMATS = (
    Format(
        MEGATRON,
        reader="megatron.reader:open_megatron",
        files=(MEGATRON_RANK,),
        steps=r"iter_\d{7,}|release",
        tracker="latest_checkpointed_iteration.txt",
        tracked=r"(\d{1,15})",
        unfinished=r"mp_rank_.*",
    ),
    Format(
        TORCH_DIST,
        reader="megatron.torch_dist:open_torch_dist",
        files=(r"\.metadata", r".*\.distcp"),
        steps=r"iter_\d{7,}|release",
        tracker="latest_checkpointed_iteration.txt",
        tracked=r"(\d{1,15})",
        unfinished=r".*\.distcp|\.metadata|common\.pt",
    ),
    Format(
        UNIVERSAL,
        reader="megatron.deepspeed:open_deepspeed",
        files=(r"zero", r"mp_rank_\d+_model_states\.pt"),
        steps=r"global_step\d+_universal",
        tracker="latest",
        tracked=r"global_step(\d{1,15})",
    ),
    Format(
        DEEPSPEED,
        reader="megatron.deepspeed:open_deepspeed",
        files=(r"(layer_\d+-model_\d+|mp_rank_\d+|zero_pp_rank_\d+_mp_rank_\d+)(-|_)model_states\.pt",),
        steps=r"global_step\d+",
        tracker="latest",
        tracked=r"global_step(\d{1,15})",
    ),
    Format(LITGPT, reader="litgpt:open_litgpt", files=(r"lit_model\.pth",), is_numbered=False, counts_padding=True),
    Format(
        HUGGING_FACE,
        reader="huggingface.reader:open_huggingface",
        files=(r"config\.json", r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?"),
        is_numbered=False,
        counts_padding=True,
    ),
    Format(
        LIBAI,
        reader="libai.reader:open_libai",
        files=(r"(model|module)\S*|System-\S*|snapshot_done",),
        folder=r"model_\w+",
        tracker="last_checkpoint",
    ),
    Format(
        ONEFLOW,
        reader="libai.reader:open_libai",
        files=(r"(model|module)\S*|System-\S*|snapshot_done",),
        folder=r"iter\d+_snapshot",
        steps=r"iter\d+_snapshot",
    ),
    Format(
        NANOGPT,
        reader="nanogpt:open_nanogpt",
        files=(r"ckpt\.pt",),
        is_numbered=False,
        yields=True,
        counts_padding=True,
    ),
)
FORMATS = {record.name: record for record in _FORMATS}
