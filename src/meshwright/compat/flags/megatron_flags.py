"""Answers to flags of Megatron-LM, Megatron-Core and their descendants that Meshwright lacks.

A flag is accepted without effect only if the result of a training does not depend on it; all
others are refused with the reason, or do the same as one of ours.
"""

from __future__ import annotations

from typing import Any

from meshwright.base.files import read_table

_TABLES = read_table("compat/flags/megatron_flags.toml")
RETIRED: dict[str, str] = _TABLES["retired"]
Setting = dict[str, tuple[str, Any]]  # switch -> the setting that it stands for, and its value
EQUAL: Setting = {switch: (name, value) for switch, (name, value) in _TABLES["equal"].items()}
OLD_SWITCHES: Setting = {
    switch: (name, value) for switch, (name, value) in _TABLES["old_switches"].items()
}
TWO_IN_ONE: dict[str, tuple[str, str, Any]] = {
    flag: (name, also, value) for flag, (name, also, value) in _TABLES["two_in_one"].items()
}
UNSET: dict[str, Any] = _TABLES["unset"]
OTHER_VALUES: dict[str, dict[str, tuple[str, str]]] = {
    name: {word: (ours, reason) for word, (ours, reason) in words.items()}
    for name, words in _TABLES["other_values"].items()
}
_COUNTS: dict[str, int | str] = {"": 0, "1": 1, "*": "*"}
# Accepted flags: number of values, and why they have no effect here, which each run reports.
NO_EFFECT = {
    f"--{name}": (_COUNTS[count], str(reason))
    for reason, words in _TABLES["idle"].items()
    for name, _, count in (word.partition(":") for word in words.split())
}
REFUSED = {
    f"--{word}": str(reason)
    for reason, words in _TABLES["refused"].items()
    for word in words.split()
}
OTHER_MODELS: dict[str, str] = _TABLES["other_models"]


def known_elsewhere(name: str, given: str) -> str | None:
    """Return the answer to a flag that is known only in other programs, and was given by a name."""
    if name in RETIRED:
        return f"no {'flag' if given.startswith('-') else 'setting'} {given}; here it is {RETIRED[name]}"
    begins = (
        reason
        for word, reason in REFUSED.items()
        if word.endswith("*") and name.startswith(word[:-1])
    )
    if reason := REFUSED.get(name) or next(begins, None):
        return f"{given} is refused: {reason}"
    for model, starts in OTHER_MODELS.items():
        if name.startswith(tuple("--" + s for s in starts.split())):
            return f"{given} is for {model}; Meshwright pre-trains GPT"
    return None
