"""Check each value by itself: bounds, empty text, addresses, values that are planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from meshwright.base.hints import find_address, refuse_address
from meshwright.base.storage import addresses
from meshwright.config.fields import cached, group_values
from meshwright.config.problem import Problem, plain, stated, with_value
from meshwright.config.text_inputs import TextInputs

BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    ">0": (lambda number: number > 0, "must be above 0"),
    ">=0": (lambda number: number >= 0, "must not be below 0"),
    "[0,1)": (lambda number: 0 <= number < 1, "is not in [0, 1)"),
    "[0,1]": (lambda number: 0 <= number <= 1, "must be from 0 to 1"),
}


def planned_values(config: Any) -> list[Problem]:
    """Report values that are planned and not in this release."""
    out = []
    for group in group_values(config):
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            only = f.metadata["only"]
            if only is None or value in only:
                continue
            # None and False are what a setting has that is left out.
            words = [f"give {v}" for v in only if v not in (None, False)]
            works = ", or ".join(words) or "leave it out"
            text = f"{stated(group, f.name)} is not yet in this version; {works}"
            out.append(Problem((f.name,), text))
    return out


def unusable(config: Any) -> list[Problem]:
    """Report empty strings, often unset shell variables, and numbers out of bounds."""
    out = remote_paths(config)
    for group in group_values(config):
        out += out_of_bounds(group)
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            name = f.name
            # A launched command may have empty arguments.
            may_be_empty = f.metadata["value"] == "WORDS" or f.metadata["positional"] == "rest"
            is_empty = value == "" or (isinstance(value, list) and "" in value)
            if is_empty and not may_be_empty:
                text = f"{{{name}}} is empty; leave it out, or is a shell variable unset?"
                out.append(Problem((name,), text))
            # Tensors and indices hold products of these, which must stay within 64 bits.
            most = 2**62 if name.endswith(("_samples", "_tokens")) else 2**31
            is_large = type(value) is int and abs(value) >= most
            if is_large and name != "seed":
                shown = with_value(name, str(value)[:20])
                out.append(Problem((name,), f"{shown} must be below {most}"))
    return out


def remote_paths(config: Any) -> list[Problem]:
    """Report addresses, such as s3://bucket, where a path of this machine is needed.

    Without this, pathlib would make a folder named "s3:".
    """
    out = []
    for group in group_values(config):
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            if value is None or isinstance(value, int | float):
                continue
            if f.metadata["value"] in ("NAME", "WORDS"):
                continue  # no path
            # Texts may also be read from a data set of the Hugging Face Hub.
            is_text_input = isinstance(group, TextInputs) and f.name == "input"
            may_be_remote = is_text_input or f.metadata["remote"]
            for one in value if isinstance(value, list) else [value]:
                text = addresses.as_typed(one)
                if is_text_input and str(one).startswith("hf://"):
                    continue
                if may_be_remote and addresses.is_address(text):
                    continue
                if isinstance(text, str) and (address := find_address(text)):
                    why = plain(refuse_address(address).removeprefix(address))
                    out.append(Problem((f.name,), with_value(f.name, address) + why))
    return out


def out_of_bounds(group: Any) -> list[Problem]:
    """Report numbers outside the range of their setting."""
    out = []
    for field, is_inside, rule in bounds_of(type(group)):
        value = getattr(group, field)
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, int | float) and not is_inside(number):
                out.append(Problem((field,), f"{with_value(field, number)} {rule}"))
    return out


@cached
def bounds_of(group: type) -> list[tuple[str, Callable[[float], bool], str]]:
    """Return each field with a bound, whether a number is within it, and the rule in words."""
    out = []
    for f in dataclasses.fields(group):
        if f.metadata["bound"] is not None:
            is_inside, rule = BOUNDS[f.metadata["bound"]]
            out.append((f.name, is_inside, rule))
    return out
