"""Architecture and recipe of known models, from presets.toml; and schedules that fit any length.

A preset gives flags, no vocabulary: that comes with the tokenizer. The vocabulary of its source is
kept beside it, so that numbers of parameters can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.base.files import read_table
from meshwright.base.hints import did_you_mean, our_word
from meshwright.config.problem import SettingsError, plain


@dataclass(frozen=True)
class Family:
    """Presets of one source, with the size of its vocabulary."""

    source: str
    vocabulary: int
    presets: dict[str, dict[str, Any]]
    is_script: bool  # repeats a program's script: its schedule is kept for any length


def _families() -> tuple[Family, ...]:
    tables = read_table("config/presets.toml")
    out = []
    for family in tables["families"]:
        columns = family["columns"].split()
        presets = {}
        # All presets of a family share these settings; a cell of the table comes before them.
        shared = tables["recipes"].get(family.get("recipe"), {}) | family["settings"]
        for name, cells in family["presets"].items():
            row = {column: cell for column, cell in zip(columns, cells, strict=True) if cell != ""}
            values = row | {
                setting: value for setting, value in shared.items() if setting not in row
            }
            # TOML has no null, so that the file has the word none.
            presets[name] = {
                setting: None if value == "none" else value for setting, value in values.items()
            }
        is_script = family.get("is_script", False)
        out.append(Family(family["source"], family["vocabulary"], presets, is_script))
    return tuple(out)


FAMILIES = _families()
# Other names in use.
ALIASES = {
    "gpt2-124m": "gpt2-117m",
    "gpt2-355m": "gpt2-345m",
    "gpt2-774m": "gpt2-762m",
    "gpt2-1558m": "gpt2-1.5b",
}
PRESETS: dict[str, dict[str, Any]] = {
    name: values for family in FAMILIES for name, values in family.presets.items()
}
PRESETS |= {alias: PRESETS[name] for alias, name in ALIASES.items()}


def require_preset(name: str, where: str = "") -> None:
    """Refuse a name that no preset has; suggest one."""
    if name not in PRESETS:
        ours = our_word("presets", name.lower(), PRESETS)
        near = f"; here it is {ours}" if ours else did_you_mean(name.lower(), PRESETS, 0.7)
        hint = near or "; `meshwright presets` lists them"
        raise SettingsError(f"{where}no preset {plain(repr(name))}{hint}")


def family_of(name: str) -> Family:
    return next(f for f in FAMILIES if ALIASES.get(name, name) in f.presets)


def fitted(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's settings; a length given otherwise stretches or shortens its schedule.

    Without that, a run of 2,000 steps would end inside the warm-up of one of 320,000.
    """
    out = dict(PRESETS[name])
    steps = PRESETS[name]["train_iters"]
    parts = {n: out[n] / steps for n in ("lr_decay_iters", "lr_wsd_decay_iters") if n in out}
    units = ("iters", "samples", "tokens")
    unit = next((u for u in (*units, "epochs") if given.get(f"train_{u}")), None)
    if not unit or family_of(name).is_script:
        return out
    # How many samples an epoch has is not known yet, so that the schedule takes all of them.
    if unit == "epochs":
        return {n: value for n, value in out.items() if n not in (*parts, "train_iters")}
    # The parts of the schedule keep their shares of the run, in the unit of its length. Tokens are
    # counted in samples, unless these have different lengths; the last ones, of WSD, have one.
    length = given[f"train_{unit}"]
    in_steps = unit == "iters"
    tokens = length
    if unit == "tokens":
        length //= given.get("seq_length") or out["seq_length"]
    grows = unit == "tokens" and given.get("seq_length_schedule") is not None
    for part, share in parts.items():
        del out[part]
        # A part that the user gives, in any unit, stays as it is.
        if any(part.replace("iters", u) in given for u in units):
            continue
        if grows and part == "lr_decay_iters":
            out["lr_decay_tokens"] = max(1, round(tokens * share))
        else:
            key = part if in_steps else part.replace("iters", "samples")
            out[key] = max(1, round(length * share))
    if not in_steps:
        del out["train_iters"]
    return out
