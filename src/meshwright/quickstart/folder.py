"""The folder of a tour: whose it is, how far it came, and what a new tour may remove."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from meshwright.checkpoint import owner
from meshwright.errors import LOCKED, UserError
from meshwright.files import replacing

# Names in it that a new tour may remove; a model is kept aside.
TOUR_FILES = (
    "train.jsonl held_out.jsonl sample.jsonl tokenizer train_text_document.bin train_text_document.idx "
    "train_text_document.tokenizer train_text_document.origin.json index-cache run demo.log quickstart.log"
).split()


def claim_folder(folder: Path, mark: str, name: str) -> None:
    """Make the folder, or check that an earlier tour of this name made it."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name another folder", LOCKED)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / mark).is_file():
        raise UserError(f"{folder} is not empty, and no {name} made it; name another folder", LOCKED)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mark).touch()


def require_no_model(folder: Path, of: str = "other text or settings") -> None:
    if (folder / "run").exists():
        advice = "--overwrite starts again and keeps that model aside, or name another --output"
        raise UserError(f"{folder} holds a model of {of}; {advice}", LOCKED)


def clear_folder(folder: Path, name: str) -> None:
    """Remove only what an earlier tour made; keep its model, which may be trained further."""
    remaining = [folder / entry for entry in TOUR_FILES if (folder / entry).exists()]
    if remaining:
        print(f"{folder} holds an earlier {name}; starting again")
    for path in remaining:
        if path.name == "run":
            number = 1
            while (aside := folder / f"run-{number}").exists():
                number += 1
            with owner.lock_folder(path):  # someone may be training there
                path.rename(aside)
            print(f"its model is kept in {aside}")
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class TourProgress:
    """The finished steps of a tour and their results, in a JSON file of the folder."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file, self.settings, self.done = file, settings, dict[str, Any]()

    def resume(self) -> bool:
        """Take up a tour with the same settings, if there is one whose model was not removed."""
        try:
            saved = json.loads(self.file.read_text(encoding="utf-8"))
            same = saved["settings"] == self.settings
            same = same and ("end" not in saved["done"] or (self.file.parent / "run").is_dir())
        except (OSError, ValueError, LookupError, TypeError):
            return False
        if same:
            self.done = saved["done"]
        return same and bool(self.done)

    def finish(self, step: str, result: Any = None) -> None:
        self.done[step] = result
        with replacing(self.file) as file:
            file.write(json.dumps({"settings": self.settings, "done": self.done}, indent=1).encode())
