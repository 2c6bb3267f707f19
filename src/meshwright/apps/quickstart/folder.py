"""The folder of a tour: whose it is, how far it came, and what a new tour may remove."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.base.errors import LOCKED, UserError
from meshwright.base.files import replacing, require_unlinked
from meshwright.checkpoint import owner
from meshwright.config.fields import spelling

# Names in it that a new tour may remove; a model is kept aside.
TOUR_FILES = [
    "train.jsonl",
    "held_out.jsonl",
    "sample.jsonl",
    "tokenizer",
    "index-cache",
    "run",
    "demo.log",
    "quickstart.log",
]
for ending in (".bin", ".idx", ".tokenizer", ".origin.json"):
    TOUR_FILES += [f"train_text_document{ending}", f"held_out_text_document{ending}"]


@contextlib.contextmanager
def claim_folder(folder: Path, mark: str, name: str) -> Iterator[None]:
    """Make the folder, or check that an earlier tour of this name made it, and lock it.

    A first attempt that fails before it finished a step leaves nothing there.
    """
    remedy = "name another folder" + " by --output" * (name == "quickstart")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; {remedy}", LOCKED)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / mark).is_file():
        raise UserError(f"{folder} is not empty, and no {name} made it; {remedy}", LOCKED)
    is_new = not folder.exists()
    with owner.lock_folder(folder, remedy):  # which makes it
        # A link there would lead what the tour writes or removes out of its folder.
        for entry in (*TOUR_FILES, mark):
            require_unlinked(folder / entry)
        (folder / mark).touch()
        try:
            yield
        except BaseException:
            # The mark is empty until a step has finished.
            if not (folder / mark).stat().st_size and not (folder / "run").exists():
                remove_attempt(folder, mark, is_new)
            raise


def remove_attempt(folder: Path, mark: str, is_new: bool) -> None:
    """Remove the files of a tour that finished no step, and the folder if it was new."""
    for name in (*TOUR_FILES, mark, ".lock"):
        remove(folder / name)
    if is_new:
        with contextlib.suppress(OSError):  # someone put a file there
            folder.rmdir()


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_no_model(folder: Path, of: str) -> None:
    if (folder / "run").exists():
        advice = "--overwrite starts again and keeps that model aside, or name another folder"
        raise UserError(f"{folder} holds a model of {of}; {advice}", LOCKED)


def clear_folder(folder: Path, name: str) -> None:
    """Remove only what an earlier tour made; keep its model, which may be trained further."""
    remaining = [folder / entry for entry in TOUR_FILES if (folder / entry).exists()]
    if remaining:
        print(f"{folder} holds an earlier {name}; starting again")
    for path in remaining:
        if path.name != "run":
            remove(path)
            continue
        number = 1
        # The first free number, so that no earlier model is lost.
        while (aside := folder / f"run-{number}").exists():
            number += 1
        with owner.lock_folder(path, "name another folder"):  # someone may be training there
            path.rename(aside)
        print(f"its model is kept in {aside}")


class TourProgress:
    """The finished steps of a tour and their results, in a JSON file of the folder.

    `more_minutes` are those beyond the minutes of the earlier tour, and `changes` says which other
    settings differ.
    """

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file = file
        self.settings = settings
        self.done: dict[str, Any] = {}
        self.more_minutes = 0.0
        self.changes = "unknown settings"

    def resume(self) -> bool:
        """Take up a tour of the same settings, or of fewer minutes, whose model was not removed."""
        try:
            saved = json.loads(self.file.read_text(encoding="utf-8"))
            before = dict(saved["settings"])
            done = dict(saved["done"])
        except (OSError, ValueError, LookupError, TypeError):
            return False
        # More minutes are no other tour: its model is trained further.
        more = self.settings.get("minutes", 0) - before.get("minutes", 0)
        if more > 0:
            before["minutes"] = self.settings["minutes"]
        self.changes = f"other settings: {describe_changes(before, self.settings)}"
        if before != self.settings or not done:
            return False
        # Someone may have moved the model away, and wants another.
        if "end" in done and not (self.file.parent / "run").is_dir():
            return False
        self.done = done
        self.more_minutes = max(more, 0.0)
        return True

    def finish(self, step: str, result: Any = None) -> None:
        self.done[step] = result
        progress = {"settings": self.settings, "done": self.done}
        with replacing(self.file) as file:
            file.write(json.dumps(progress, indent=1).encode())


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say which settings differ, and how."""

    def shown(value: Any) -> str:
        if isinstance(value, list):
            return " ".join(value)
        return "" if value is None else str(value)

    changes = []
    for name in {**before, **now}:
        if before.get(name) == now.get(name):
            continue
        title = "the text" if name == "input" else spelling(name)
        old = shown(before.get(name))
        new = shown(now.get(name))
        if not old:
            changes.append(f"no {title} was given, now {new}")
        elif new:
            changes.append(f"{title} was {old}, not {new}")
        else:
            changes.append(f"{title} was {old}, now none is given")
    return ", ".join(changes)
