"""Prompts of a file: lines of text, or JSON lines with options of their own. No torch."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import BAD_DATA, UserError
from meshwright.settings import checks
from meshwright.settings.hints import did_you_mean
from meshwright.settings.schema import Sampling

# Keys of a JSON line: those of Sampling by other names, too, and these.
RENAMED = {"max_tokens": "out_seq_length", "max_new_tokens": "out_seq_length", "n": "num_return_sequences"}
OPTIONS = [f.name for f in dataclasses.fields(Sampling) if f.name != "recompute"]
MOST = 20  # faults that are listed


@dataclass(frozen=True)
class Prompt:
    """A text and how to continue it; `seed` is None unless its line gives one."""

    text: str
    options: Sampling
    stop: tuple[str, ...] = ()
    count: int = 1  # continuations
    logprobs: int | None = None
    seed: int | None = None
    id: Any = None  # of a JSON line, copied to the output


def read_prompt_file(path: str, usual: Prompt, flag: str = "--prompts") -> list[Prompt]:
    """Read a file, or standard input for `-`; `usual` has the options that a line does not give.

    It is JSON if the first line is an object.
    """
    text = read_prompt_text(path, flag)
    if not text.lstrip().startswith("{"):
        return prompts_of_lines(text, usual)
    prompts, faults = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompts.append(parse_prompt(line, usual))
        except UserError as error:
            faults.append(f"{flag} {path}:{number}: {error}")
    refuse_all(faults)
    return prompts


def prompts_of_lines(text: str, usual: Prompt) -> list[Prompt]:
    """Return a prompt for each line, an empty one too."""
    lines = text.removesuffix("\n").split("\n")
    return [dataclasses.replace(usual, text=line.removesuffix("\r")) for line in lines]


def refuse_all(faults: list[str], status: int = BAD_DATA) -> None:
    """Raise UserError with the first faults, if there are any."""
    if faults:
        more = [f"and {len(faults) - MOST:,} more"] if len(faults) > MOST else []
        listed = "\n  ".join([*faults[:MOST], *more])
        raise UserError(f"\n  {listed}" if len(faults) > 1 else listed, status)


def read_prompt_text(path: str, flag: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{flag} {path}: no such file", BAD_DATA) from None
    except UnicodeDecodeError as e:
        raise UserError(f"{flag} {path}: byte {e.start} is not UTF-8", BAD_DATA) from None
    if not text.strip():
        raise UserError(f"{flag} {path} is empty; write one prompt per line", BAD_DATA)
    return text


def parse_prompt(line: str, usual: Prompt) -> Prompt:
    """Return the prompt of a JSON line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise UserError('not an object with a text named "prompt"')
    named: dict[str, Any] = {}
    for key, value in row.items():
        name = str(RENAMED.get(key, key))
        if name in named:
            raise UserError(f"{key!r} is given twice, as {name!r} too")
        named[name] = value
    known = {"id", "prompt", "seed", "stop", "logprobs", "num_return_sequences", *OPTIONS}
    if unknown := named.keys() - known:
        word = min(unknown)
        hint = did_you_mean(word, [*known, *RENAMED])
        raise UserError(f"{word!r} is no option of a prompt{hint or '; other data may be in ' + repr('id')}")
    stop = list(usual.stop) if named.get("stop") is None else named["stop"]
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise UserError(f"stop {stop!r} is neither a text nor a list of texts")
    logprobs = named.get("logprobs", usual.logprobs)
    return Prompt(
        row["prompt"],
        _options(named, usual.options),
        tuple(stops),
        _whole(named, "num_return_sequences", usual.count, 1),
        None if logprobs is None else _whole({"logprobs": logprobs}, "logprobs", 0, 0),
        _whole(named, "seed", 0, 0) if named.get("seed") is not None else usual.seed,
        row.get("id"),
    )


def _options(named: Mapping[str, Any], usual: Sampling) -> Sampling:
    """Return the sampling options of a line, or raise what is wrong with the first bad one."""
    given = {name: named[name] for name in OPTIONS if named.get(name) is not None}
    kinds = typing.get_type_hints(Sampling)
    for name, value in given.items():
        wanted: Callable[[Any], bool] = {
            bool: lambda v: isinstance(v, bool),
            int: lambda v: type(v) is int,
            float: lambda v: type(v) in (int, float),
        }[kinds[name]]
        if not wanted(value):
            raise UserError(f"{name} {value!r} is not {'true or false' if kinds[name] is bool else 'a number'}")
    options = dataclasses.replace(usual, **{name: kinds[name](value) for name, value in given.items()})
    if "temperature" in given and "greedy" not in given:
        options = dataclasses.replace(options, greedy=False)  # its own temperature wins over --greedy
    if wrong := [*checks.out_of_bounds(options), *checks.sampling_problems(options)]:
        raise UserError(wrong[0].removeprefix("--"))
    return options


def _whole(named: Mapping[str, Any], name: str, usual: int, least: int) -> int:
    value = named.get(name)
    if value is None:
        return usual
    if type(value) is not int or value < least:
        raise UserError(f"{name} {value!r} is not a whole number from {least}")
    return value
