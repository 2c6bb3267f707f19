"""`meshwright presets`: the known models, what each needs, and its settings as flags or a file."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.base.errors import DONE
from meshwright.config import flags
from meshwright.config.fields import flag
from meshwright.config.presets import ALIASES, FAMILIES, PRESETS, family_of, require_preset
from meshwright.config.problem import Problem
from meshwright.config.recipes import RECIPES, as_flag
from meshwright.config.schema import TrainConfig
from meshwright.model import counts

FOOT = """
memory: at least, to train on one device in bf16 with AdamW and micro-batches of
  one sequence: weights, gradients, optimizer state, logits; activations apart
parameters and memory count the source's vocabulary; yours is the tokenizer's

meshwright train --preset NAME ...    train it; flags given beside win
meshwright presets NAME               print it as flags; --toml: for --config

Recipes set all else from the size of a preset, or of --depth N alone:"""


@dataclass(frozen=True)
class PresetsConfig:
    """Settings of `meshwright presets`."""

    name: str | None = flag(
        None, "preset to print as flags (none: list all)", positional=True, value="NAME"
    )
    toml: bool = flag(False, "print it as a file for --config")
    json: bool = flag(False, "print it, or all, as JSON", docs="data")

    def problems(self) -> list[Problem]:
        if self.toml and (self.json or not self.name):
            text = "{toml=True} prints one preset: `meshwright presets NAME --toml`, without {json=True}"
            return [Problem(("toml", "json"), text)]
        return []


def main(argv: list[str]) -> int:
    about = "List the presets of `train --preset`, or print one as flags."
    c = flags.parse_settings(PresetsConfig, argv, "meshwright presets", about=about).config
    if c.name:
        require_preset(c.name)
    if c.json:
        names = [name for family in FAMILIES for name in family.presets]
        described = describe_preset(c.name) if c.name else [describe_preset(n) for n in names]
        print(json.dumps(described, indent=2))
    elif not c.name:
        print("\n".join(list_presets()))
    elif c.toml:
        print(preset_as_toml(c.name))
    else:
        about_one = describe_preset(c.name)
        size = f"{_rounded(about_one['parameters'])} parameters with a vocabulary of {about_one['vocabulary']:,} ids"
        # This goes to standard error, so that a script gets the flags alone.
        print(f"# {c.name}: {size}\n# {about_one['source']}", file=sys.stderr)
        # Into a script or a command line goes one line.
        separator = " \\\n    " if sys.stdout.isatty() else " "
        print(separator.join(preset_as_flags(c.name)))
    return DONE


def describe_preset(name: str) -> dict[str, Any]:
    """Return a preset's size, source, memory in bytes and settings."""
    from meshwright.base.device import NVIDIA
    from meshwright.model.counts import padded_size
    from meshwright.training.sizes import logits_bytes, state_bytes

    settings = PRESETS[name]
    # All get the same precision, batch and optimizer, so that their memory can be compared.
    own = {"fp16": False, "bf16": True, "micro_batch_size": 1, "optimizer": "adam"}
    config, _ = flags.build_config(TrainConfig, [(name, settings | own)])
    vocabulary = family_of(name).vocabulary
    positions = settings.get("max_position_embeddings", 0)
    padded = padded_size(vocabulary, config.model.make_vocab_size_divisible_by, 1, None)
    return {
        "name": name,
        "parameters": counts.parameters(config.model, vocabulary, positions),
        "vocabulary": vocabulary,
        "memory_bytes": state_bytes(config, padded, 0, NVIDIA) + logits_bytes(config, padded, 0),
        "source": family_of(name).source,
        "settings": settings,
    }


def list_presets() -> list[str]:
    """Return the list of all presets, within 80 columns."""
    titles = ("preset", "parameters", "layers", "width", "heads", "context", "memory")
    out = [_line(titles)]
    for family in FAMILIES:
        out += ["", family.source]
        for name, settings in family.presets.items():
            about = describe_preset(name)
            heads = str(settings["num_attention_heads"])
            # The heads of keys and values follow those of queries where there are fewer of them.
            if groups := settings.get("num_query_groups"):
                heads += f"/{groups}"
            cells = (
                f"  {name}",
                _rounded(about["parameters"]),
                str(settings["num_layers"]),
                f"{settings['hidden_size']:,}",
                heads,
                f"{settings['seq_length']:,}",
                f"{about['memory_bytes'] / 2**30:,.1f} GiB",
            )
            out.append(_line(cells))
    others = ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items())
    out += ["", *textwrap.wrap(f"also: {others}", 80, subsequent_indent="  "), FOOT]
    for name, recipe in RECIPES.items():
        out.append(f"  --recipe {name:<9}{recipe['about']}")
    return out


def _line(cells: Sequence[str]) -> str:
    first, *numbers = cells
    widths = (10, 8, 7, 8, 9, 13)
    right = map(str.rjust, numbers, widths)
    return f"{first:<24}{''.join(right)}"


def preset_as_flags(name: str) -> list[str]:
    """Return a preset as words of a command line, each flag with its value."""
    return [as_flag(setting, value) for setting, value in PRESETS[name].items()]


def preset_as_toml(name: str) -> str:
    # The file holds only what the preset says, so that it changes nothing else.
    settings = PRESETS[name]
    config, _ = flags.build_config(TrainConfig, [(name, settings)])
    stated = [setting for setting, value in settings.items() if value is not None]
    toml = flags.to_toml(config, only=stated).rstrip()

    about = describe_preset(name)
    size = f"{about['parameters']:,} parameters with {about['vocabulary']:,} ids"
    return f"# {name}: {size}\n# {about['source']}\n\n{toml}"


def _rounded(n: int) -> str:
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"
