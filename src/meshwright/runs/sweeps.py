"""The record of a sweep: its runs, which have folders of their own beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.errors import bad_data
from meshwright.files import RECORD_LIMIT, read_small
from meshwright.runs.rows import holds_steps

RECORD = "sweep.json"


def read_record(folder: Path) -> dict[str, Any]:
    """Return what a sweep recorded; empty if the folder holds none."""
    try:
        record = json.loads(read_small(folder / RECORD, RECORD_LIMIT, folder))
        runs = {str(name): dict(run) for name, run in record["runs"].items()}
        if any("/" in name or name.startswith(".") for name in runs):
            raise ValueError("a run lies outside of the folder")
        points = {name: {"point": dict(r["point"]), "state": r["state"], "note": r["note"]} for name, r in runs.items()}
        return {"words": list(record["words"]), "train_flags": list(record["train_flags"]), "runs": points}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise bad_data(f"{folder / RECORD} is not the record of a sweep: {error}; choose another folder") from None


def expand_sweeps(folders: Iterable[Path]) -> list[Path]:
    """Return the folders, those of sweeps replaced by their runs that made a step."""
    runs: list[Path] = []
    for folder in folders:
        names = read_record(folder).get("runs", ())
        runs += [folder / name for name in names if holds_steps(folder / name)] or [folder]
    return runs
