"""The record of a sweep: its runs, which have folders of their own beside it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.base.errors import bad_data
from meshwright.base.files import RECORD_LIMIT, read_small
from meshwright.base.runs.rows import holds_steps

RECORD = "sweep.json"
STATES = ("done", "running", "interrupted", "stopped", "diverged", "failed", "waiting")  # of a run


def read_record(folder: Path) -> dict[str, Any]:
    """Return what a sweep recorded; empty if the folder holds none."""
    try:
        record = json.loads(read_small(folder / RECORD, RECORD_LIMIT, folder))
        return {
            # Each part is checked: the folder may come from someone else.
            "words": list(map(_word, record["words"])),
            "train_flags": list(map(_word, record["train_flags"])),
            "runs": {_name(name): _run(run) for name, run in record["runs"].items()},
        }
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise bad_data(
            f"{folder / RECORD} is not the record of a sweep: {error}; choose another folder"
        ) from None


def _word(value: object) -> str:
    """Return a word of a command line. Bytes of a path that are no text are surrogates in it."""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{str(value)[:100]!r} is no word of a command")
    os.fsencode(value)
    return value


def _name(name: str) -> str:
    if not re.fullmatch(r"[\w+=-][\w.,+=-]{0,200}", name):  # a folder of the sweep's own
        raise ValueError(f"no run has a name such as {name[:100]!r}")
    return name


def _run(run: dict[str, Any]) -> dict[str, Any]:
    state = run["state"]
    if state not in STATES:
        raise ValueError(f"no run has a state such as {str(state)[:100]!r}")
    point = {}
    for name, value in run["point"].items():
        point[_word(name)] = _word(value)
    return {"point": point, "state": state, "note": _word(run["note"])}


def expand_sweeps(folders: Iterable[Path]) -> list[Path]:
    """Return the folders, those of sweeps replaced by their runs that made a step."""
    runs: list[Path] = []
    for folder in folders:
        names = read_record(folder).get("runs", ())
        # A sweep without such a run stays what it is: its own folder.
        runs += [folder / name for name in names if holds_steps(folder / name)] or [folder]
    return runs
