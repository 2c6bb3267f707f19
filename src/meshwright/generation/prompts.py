"""Prompts of a file: lines of text, or JSON lines with options of their own. No torch."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.base.errors import BAD_DATA, UserError, bad_data
from meshwright.base.fields import Fields, Refusal
from meshwright.base.records import lone_surrogate
from meshwright.config import check_values
from meshwright.config.problem import NAMES
from meshwright.config.schema import Sampling

# Names that OpenAI's and Hugging Face's programs give to our keys of a JSON line.
RENAMED = {
    "max_tokens": "out_seq_length",
    "max_new_tokens": "out_seq_length",
    "n": "num_return_sequences",
}
OPTIONS = [f.name for f in dataclasses.fields(Sampling) if f.name != "recompute"]
MOST_LISTED = 20  # faults
LARGEST = 2**63 - 1  # of a line's integers: a tensor holds none above it


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


def read_prompt_file(path: str, usual: Prompt) -> list[Prompt]:
    """Read a file, or standard input for `-`; `usual` has the options that a line does not give.

    It is JSON if the first line is an object.
    """
    text = read_prompt_text(path, "--prompts")
    if not text.lstrip().startswith("{"):
        return prompts_of_lines(text, usual)
    prompts = []
    faults = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompts.append(parse_prompt(line, usual))
        except Refusal as error:
            faults.append(f"--prompts {path}:{number}: {error}")
    refuse_all(faults)
    return prompts


def prompts_of_lines(text: str, usual: Prompt) -> list[Prompt]:
    """Return a prompt for each line, an empty one too."""
    lines = text.removesuffix("\n").split("\n")
    return [dataclasses.replace(usual, text=line.removesuffix("\r")) for line in lines]


def refuse_all(faults: list[str], status: int = BAD_DATA) -> None:
    """Raise UserError with the first faults, if there are any."""
    if not faults:
        return
    if len(faults) == 1:
        raise UserError(faults[0], status)
    lines = faults[:MOST_LISTED]
    if len(faults) > MOST_LISTED:
        lines.append(f"and {len(faults) - MOST_LISTED:,} more")
    raise UserError("\n  " + "\n  ".join(lines), status)


def read_prompt_text(path: str, flag: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        # Editors on Windows begin a file with a byte order mark, which is no part of a prompt.
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise bad_data(f"{flag} {path}: no such file") from None
    except UnicodeDecodeError as e:
        raise bad_data(f"{flag} {path}: byte {e.start} is not UTF-8") from None
    if not text.strip():
        raise bad_data(f"{flag} {path} is empty; write one prompt per line")
    return text


def parse_prompt(line: str, usual: Prompt) -> Prompt:
    """Return the prompt of a JSON line; raise Refusal if it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # the second at a line of many brackets
        raise Refusal(f"not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise Refusal('not an object with a text named "prompt"')
    if half := lone_surrogate(row):
        raise Refusal(f"lone surrogate ({half}, half a character); mend the line")
    values: dict[str, Any] = {}
    for key, value in row.items():
        name = str(RENAMED.get(key, key))
        if name in values:
            raise Refusal(f"{key!r} is given twice, as {name!r} too")
        values[name] = value
    options = usual.options
    if values.get("temperature") is not None:
        # its own temperature wins over --greedy
        options = dataclasses.replace(options, greedy=False)
    f = Fields(values)
    prompt = Prompt(
        text=f.take("prompt"),
        options=read_sampling(f, options),
        stop=f.strings("stop", LARGEST, LARGEST, usual.stop),
        count=f.integer("num_return_sequences", usual.count, 1, LARGEST),
        logprobs=f.integer("logprobs", usual.logprobs, 0, LARGEST),
        seed=f.integer("seed", usual.seed, 0, LARGEST),
        id=f.take("id"),
    )
    # What nobody took is a key that we don't know: a misspelt option must not be ignored.
    f.refuse_rest()
    return prompt


def read_sampling(f: Fields, usual: Sampling) -> Sampling:
    """Return the sampling options of a line, by default the usual ones."""
    kinds = typing.get_type_hints(Sampling)
    values: dict[str, Any] = {}
    for name in OPTIONS:
        default = getattr(usual, name)
        if kinds[name] is bool:
            values[name] = f.flag(name, default)
        elif kinds[name] is int:
            # The bounds of the options are checked below, with the messages of the flags.
            values[name] = f.integer(name, default, -LARGEST, LARGEST)
        else:
            values[name] = f.number(name, default)
    options = dataclasses.replace(usual, **values)
    if wrong := check_values.out_of_bounds(options):
        raise Refusal(NAMES.render(wrong[0].text))
    return options
