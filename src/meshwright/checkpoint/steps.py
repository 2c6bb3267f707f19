"""Find the step that a path means, our own or another program's.

A step is ours if it has a manifest, in our format or in Megatron's tree. The latest step is the
newest of these whose manifest holds, whatever the tracker says. Other programs' steps are
recognised by their file names and found through their program's tracker.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import NamedTuple

from meshwright.base.errors import UserError, bad_data, not_a_run
from meshwright.base.files import open_plain
from meshwright.checkpoint.formats import all_formats
from meshwright.checkpoint.manifests import (
    MANIFEST,
    DamagedCheckpoint,
    find_manifest,
    read_manifest,
    verify_step,
)

TRACKER = "latest_checkpointed_iteration.txt"  # as Megatron's, for its readers
BEST = "best_checkpointed_iteration.txt"  # ours: the step with the lowest validation loss
NATIVE = "native"

OUR_STEP = r"iter_(\d{7,})"


class StepLocation(NamedTuple):
    """Where a step is, and which program's it is."""

    kind: str  # NATIVE, or the name of a format
    folder: Path
    step: int
    root: Path  # the folder of the run, with its other steps and tokenizer/

    @property
    def ours(self) -> bool:
        return find_manifest(self.folder).exists() or self.kind == NATIVE

    @property
    def is_numbered(self) -> bool:
        """Whether it is a step of a run, rather than one model by itself."""
        return self.kind == NATIVE or all_formats()[self.kind].is_numbered


def trackers() -> dict[str, str]:
    """Return all trackers, and the number in what they say if it is to be compared."""
    theirs = {record.tracker: record.tracked for record in all_formats().values() if record.tracker}
    return {TRACKER: r"(\d{1,15})"} | theirs


def step_folder(root: str | Path, step: int) -> Path:
    return Path(root) / f"iter_{step:07d}"


def make_aside(root: Path) -> Path:
    """Make the next folder `replaced-N`, for checkpoints that are moved aside."""
    aside = next(path for n in itertools.count(1) if not (path := root / f"replaced-{n}").exists())
    aside.mkdir()
    return aside


def folder_meant(path: Path) -> Path:
    """Return the folder that a path means: of the step that has this file or rank in it."""
    if path.suffix in (".pt", ".pth") and path.is_file():  # mp_rank_00/model_optim_rng.pt
        path = path.parent
    is_rank = any(
        record.ranks and re.fullmatch(record.ranks, path.name) for record in all_formats().values()
    )
    return path.parent if is_rank else path


def split_path(path: str | Path) -> tuple[Path, int | None]:
    """Split a path into the folder of a run and the step in it, if the path names one."""
    path = folder_meant(Path(path))
    match = re.fullmatch(OUR_STEP, path.name)
    return (path.parent, int(match[1])) if match else (path, None)


def find_step(
    path: str | Path, below: int | None = None, sizes: bool = True
) -> tuple[StepLocation | None, list[str]]:
    """Return the step that a path means, or None without any checkpoint, and the notes to print.

    In a folder of steps the newest is meant, or with `below` the newest one before that. Without
    `sizes`, as on ranks that load nothing by themselves, the files of a step are not looked at.
    """
    given = Path(path)
    path = folder_meant(given)
    root, step = split_path(path)
    kind = kind_of_folder(path)
    # A run may continue in the folder of another program's step, whose file still means that step.
    theirs = all_formats().get(kind or "")
    steps_beside = list_checkpoints if theirs and theirs.yields else list_steps
    is_step = step is not None or (kind is not None and (given.is_file() or not steps_beside(path)))

    # The path is that of a step or of one model.
    if below is None and is_step:
        if step is not None and not path.exists() and (present := list_steps(root)):
            raise no_such_step(root, step, present)
        if theirs and not theirs.is_numbered:
            if given != path and not any(
                re.fullmatch(pattern, given.name) for pattern in theirs.files
            ):
                raise bad_data(
                    f"{given} is not the {theirs.name} model in {path}; move it to a folder of its own, and rename it"
                )
            return StepLocation(theirs.name, path, 0, path), []
        number = re.search(r"(\d{1,15})(_universal|_snapshot)?$", path.name)
        return StepLocation(kind or NATIVE, path, int(number[1]) if number else 0, path.parent), []

    # It is that of a folder of steps: ours come before another program's.
    newest, notes = latest(root, below, sizes)
    if newest is not None:
        folder = step_folder(root, newest)
        return StepLocation(kind_of_folder(folder) or NATIVE, folder, newest, root), notes
    return find_foreign(root), notes


def kind_of_folder(folder: Path) -> str | None:
    """Return the program whose step a folder is, judging by the names in it.

    A step of ours has files of thousands of ranks, so it is not listed.
    """
    if (folder / MANIFEST).exists() and (folder / "index.json").exists():
        return NATIVE
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    return next(
        (record.name for record in all_formats().values() if record.matches(folder.name, names)),
        None,
    )


def find_foreign(root: Path) -> StepLocation | None:
    """Return the step that another program's tracker names; raise if none does."""
    names = [
        n for n in listing(root) if not re.fullmatch(r"iter_\d+(\.\w+)?", n) or is_foreign(root / n)
    ]
    if not names:
        return None
    for tracker in trackers():
        if tracker in names and (root / tracker).is_file():
            return find_tracked(root, tracker, read_tracker(root / tracker))
    # A program without a tracker means its newest step.
    for record in all_formats().values():
        if record.tracker:
            continue
        numbered = {
            int(re.findall(r"\d+", name)[-1]): name
            for name in names
            if re.fullmatch(record.steps, name)
        }
        if numbered:
            newest = max(numbered)
            return StepLocation(record.name, root / numbered[newest], newest, root)
    kinds = sorted({str(kind_of_folder(root / name)) for name in names})
    raise bad_data(
        f"{root} holds {', '.join(names[:5])} ({', '.join(kinds)}), but no file that says which one "
        f"is meant ({', '.join(trackers())}); give the path of the one itself"
    )


def find_tracked(root: Path, tracker: str, text: str) -> StepLocation:
    """Return the step that the text of a tracker names."""
    name = text
    if tracker == TRACKER and text != "release":
        if not re.fullmatch(r"\d{1,15}", text, re.ASCII):
            raise bad_data(
                f"{root / tracker} says {text!r}, not an iteration, and there is no checkpoint"
            )
        name = step_folder(root, int(text)).name
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise bad_data(f"{root / tracker} says {text!r}, which is no folder's name")
    kind = kind_of_folder(root / name)
    if kind is None:
        missing = f"there is no checkpoint in {root / name}; remove that file to start again"
        raise bad_data(f"{root / tracker} names {text}, but {missing}")
    number = re.search(r"\d+$", name)
    return StepLocation(kind, root / name, int(number[0]) if number else 0, root)


def read_tracker(path: Path) -> str:
    with open_plain(path) as file:
        return file.read(200).decode(errors="replace").strip()


# Ours


def latest(
    root: str | Path, below: int | None = None, sizes: bool = True
) -> tuple[int | None, list[str]]:
    """Return our newest step whose manifest and sizes hold, and notes to print about newer ones.

    Return None if none was ever finished. It is an error, never a fresh start, if all are damaged
    or a tracker names something newer. `below` considers only older steps, after a damaged read.
    """
    root = Path(root)
    names = listing(root)
    notes: list[str] = []
    check_trackers(root, names, notes)
    # What a save found damaged was a step that existed: without another one, no run starts anew.
    damages = [
        f"{root / name} was found damaged and moved aside"
        for name in names
        if name.endswith(".damaged")
    ]
    ours = sorted(our_numbers(root, OUR_STEP, names), reverse=True)
    for step in (n for n in ours if below is None or n < below):
        try:
            (verify_step if sizes else read_manifest)(step_folder(root, step))
            return step, notes
        except DamagedCheckpoint as damage:
            notes.append(
                f"WARNING: skipping {step_folder(root, step).name}, it is damaged: {damage}"
            )
            damages.append(str(damage))
    if damages:
        raise DamagedCheckpoint(f"no undamaged checkpoint in {root}: {'; '.join(damages)}")
    if below is not None:
        raise DamagedCheckpoint(f"there is no older checkpoint in {root}")
    notes += [
        f"WARNING: {root / name} was never finished and is ignored"
        for name in names
        if name.endswith(".tmp")
    ]
    return None, notes


def list_steps(root: str | Path) -> list[int]:
    """List our steps, complete or not, newest first: by number, because times change."""
    return sorted(our_numbers(Path(root), OUR_STEP, listing(Path(root))), reverse=True)


def no_such_step(root: Path, step: int, present: list[int]) -> UserError:
    """Return the error of a step that a folder lacks; `present` are those that it has."""
    oldest_first = sorted(present)
    if len(present) < 10:
        steps = ", ".join(map(str, oldest_first))
    else:
        steps = f"{len(present)}, from {oldest_first[0]} to {oldest_first[-1]}"
    verb = "is" if len(present) == 1 else "are"
    return bad_data(f"no step {step} in {root}; there {verb} {steps}")


def our_numbers(root: Path, pattern: str, names: list[str]) -> list[int]:
    """Return the numbers in the names of our steps that match a pattern."""
    matches = (re.fullmatch(pattern, name) for name in names)
    return [int(m[1]) for m in matches if m and not is_foreign(root / m[0])]


def listing(root: Path) -> list[str]:
    """List the names in the folder that belong to checkpoints of any program."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise not_a_run(root, "checkpoint") from None
    except OSError as error:
        raise bad_data(f"cannot read the folder {root}: {error.strerror}") from error
    steps = [
        rf"{OUR_STEP}(\.tmp|\.damaged)?",
        *(record.steps for record in all_formats().values() if record.steps),
    ]
    pattern = "|".join([*steps, *map(re.escape, (BEST, *trackers()))])
    return sorted(name for name in names if re.fullmatch(pattern, name))


def is_foreign(folder: Path) -> bool:
    """Return whether a folder named like our steps holds another program's, complete or not."""
    if find_manifest(folder).exists():
        return False
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    theirs = "|".join(record.unfinished for record in all_formats().values() if record.unfinished)
    return any(re.fullmatch(theirs, name) for name in names)


def check_trackers(root: Path, names: list[str], notes: list[str]) -> None:
    """Refuse a tracker that names a checkpoint of another program, newer than ours."""
    newest = max(our_numbers(root, r"iter_(\d+)(\.damaged)?", names), default=None)
    if newest is None:
        return
    for name, pattern in trackers().items():
        if not pattern or name not in names or not (root / name).is_file():
            continue
        text = read_tracker(root / name)
        tracked = re.fullmatch(pattern, text, re.ASCII)
        if not tracked:
            # A release is iteration 0: any step of ours is newer.
            if text != "release":
                notes.append(f"WARNING: {root / name} says {text!r}, not an iteration; ignored")
            continue
        if int(tracked[1]) <= newest:
            continue

        # Say whose checkpoint it names, if there is one.
        folder = step_folder(root, int(tracked[1])) if name == TRACKER else root / text
        kind = kind_of_folder(folder)
        whose, path = (f" of {kind}", f", or give the path {folder}") if kind else ("", "")
        raise bad_data(
            f"{root / name} names iteration {tracked[1]}{whose}, but our newest is iteration {newest}: "
            f"write {newest} into it to continue from there{path}"
        )


def list_checkpoints(root: str | Path) -> list[str]:
    """List checkpoints, of any program, that a run without --load must not write beside."""
    return [name for name in listing(Path(root)) if not name.endswith(".tmp")]
