"""Find the step that a path means, our own or another program's.

A step is ours if it has a manifest, in our format or in Megatron's tree. The latest step is the
newest of these whose manifest holds, whatever the tracker says. Other programs' steps are
recognised by their file names and found through their program's tracker.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from meshwright.checkpoint.manifests import HIDDEN, MANIFEST, DamagedCheckpoint, find_manifest, verify_step
from meshwright.errors import BAD_DATA, UserError, not_a_run

TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"  # ours: the step with the lowest validation loss
DEEPSPEED_TRACKER = "latest"
LIBAI_TRACKER = "last_checkpoint"

NATIVE, MEGATRON, TORCH_DIST, DEEPSPEED = "native", "Megatron", "Megatron-Core", "DeepSpeed"
UNIVERSAL, HUGGING_FACE, LIBAI, ONEFLOW = "universal", "Hugging Face", "LiBai", "OneFlow-GPT"

# A folder is of the first kind whose patterns all match some name in it.
PATTERNS = {
    NATIVE: (r"index\.json", r"manifest\.json"),
    MEGATRON: (r"mp_rank_\d\d+(_\d{3,}){0,2}",),
    TORCH_DIST: (r"\.metadata", r".*\.distcp"),
    UNIVERSAL: (r"zero", r"mp_rank_\d+_model_states\.pt"),
    DEEPSPEED: (r"(layer_\d+-model_\d+|mp_rank_\d+|zero_pp_rank_\d+_mp_rank_\d+)(-|_)model_states\.pt",),
    HUGGING_FACE: (r"config\.json", r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?"),
    ONEFLOW: (r"(model|module)\S*|System-\S*|snapshot_done",),
}


class StepLocation(NamedTuple):
    """The location of a step."""

    kind: str
    folder: Path
    step: int
    root: Path  # the folder of the run, with its other steps and tokenizer/

    @property
    def ours(self) -> bool:
        return find_manifest(self.folder).exists() or self.kind == NATIVE


def step_folder(root: str | Path, step: int) -> Path:
    return Path(root) / f"iter_{step:07d}"


def split_path(path: str | Path) -> tuple[Path, int | None]:
    """Split a path into the folder of a run and the step in it, if the path names one."""
    path = Path(path)
    found = re.fullmatch(r"iter_(\d{7,})", path.name)
    return (path.parent, int(found[1])) if found else (path, None)


def find_step(path: str | Path, below: int | None = None) -> tuple[StepLocation | None, list[str]]:
    """Return the step that a path means, or None without any checkpoint, and the notes to print.

    In a folder of steps the newest is meant, or with `below` the newest one before that.
    """
    path = Path(path)
    if path.suffix == ".pt" and path.is_file():  # mp_rank_00/model_optim_rng.pt
        path = path.parent
    if re.fullmatch(r"mp_rank_\d\d+(_\d{3,}){0,2}", path.name):
        path = path.parent
    root, step = split_path(path)
    kind = kind_of_folder(path)
    # A run may go on in the folder of another program's step.
    if below is None and (step is not None or (kind is not None and not list_steps(path))):
        if kind == HUGGING_FACE:
            return StepLocation(kind, path, 0, path), []
        number = re.search(r"(\d{1,15})(_universal|_snapshot)?$", path.name)
        return StepLocation(kind or NATIVE, path, int(number[1]) if number else 0, path.parent), []
    newest, notes = latest(root, below)
    if newest is not None:
        folder = step_folder(root, newest)
        return StepLocation(kind_of_folder(folder) or NATIVE, folder, newest, root), notes
    return find_foreign(root), notes


def kind_of_folder(folder: Path) -> str | None:
    """Return the program whose step a folder is, judging by the names in it."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for kind, patterns in PATTERNS.items():
        if kind == ONEFLOW and not re.fullmatch(r"iter\d+_snapshot|model_\w+", folder.name):
            continue
        if all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns):
            return LIBAI if kind == ONEFLOW and folder.name.startswith("model_") else kind
    return None


def find_foreign(root: Path) -> StepLocation | None:
    """Return the step that another program's tracker names; raise if none does."""
    names = foreign_names(root)
    if not names:
        return None
    for tracker in (TRACKER, DEEPSPEED_TRACKER, LIBAI_TRACKER):
        if tracker in names and (root / tracker).is_file():
            return place_named_by(root, tracker, read_tracker(root / tracker))
    snapshots = sorted(int(m[1]) for m in (re.fullmatch(r"iter(\d+)_snapshot", name) for name in names) if m)
    if snapshots:
        return StepLocation(ONEFLOW, root / f"iter{snapshots[-1]}_snapshot", snapshots[-1], root)
    kinds = sorted({str(kind_of_folder(root / name)) for name in names})
    raise UserError(
        f"{root} holds {', '.join(names[:5])} ({', '.join(kinds)}), but no file that says which one "
        f"is meant ({TRACKER}, {DEEPSPEED_TRACKER}); give the path of the one itself",
        BAD_DATA,
    )


def place_named_by(root: Path, tracker: str, text: str) -> StepLocation:
    """Return the step that the text of a tracker names."""
    name = text
    if tracker == TRACKER and text != "release":
        if not re.fullmatch(r"\d{1,15}", text, re.ASCII):
            raise UserError(f"{root / tracker} says {text!r}, not an iteration, and there is no checkpoint", BAD_DATA)
        name = step_folder(root, int(text)).name
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise UserError(f"{root / tracker} says {text!r}, which is no folder's name", BAD_DATA)
    kind = kind_of_folder(root / name)
    if kind is None:
        missing = f"there is no checkpoint in {root / name}; remove that file to start again"
        raise UserError(f"{root / tracker} names {text}, but {missing}", BAD_DATA)
    number = re.search(r"\d+$", name)
    return StepLocation(kind, root / name, int(number[0]) if number else 0, root)


def read_tracker(path: Path) -> str:
    with open(path, "rb") as file:
        return file.read(200).decode(errors="replace").strip()


# Ours


def latest(root: str | Path, below: int | None = None) -> tuple[int | None, list[str]]:
    """Return our newest step whose manifest and sizes hold, and notes to print about newer ones.

    Return None if none was ever finished. It is an error, never a fresh start, if all are damaged
    or a tracker names something newer. `below` considers only older steps, after a damaged read.
    """
    root = Path(root)
    names = listing(root)
    notes: list[str] = []
    check_trackers(root, names, notes)
    damages = [f"{root / name} was found damaged and moved aside" for name in names if name.endswith(".damaged")]
    for step in (n for n in list_steps(root) if below is None or n < below):
        try:
            verify_step(step_folder(root, step))
            return step, notes
        except DamagedCheckpoint as damage:
            notes.append(f"WARNING: skipping {step_folder(root, step).name}, it is damaged: {damage}")
            damages.append(str(damage))
    if damages:
        raise DamagedCheckpoint(f"no undamaged checkpoint in {root}: {'; '.join(damages)}")
    if below is not None:
        raise DamagedCheckpoint(f"there is no older checkpoint in {root}")
    notes += [f"WARNING: {root / name} was never finished and is ignored" for name in names if name.endswith(".tmp")]
    return None, notes


def list_steps(root: str | Path) -> list[int]:
    """List our steps, complete or not, newest first: by number, because times change."""
    return sorted(our_numbers(Path(root), r"iter_(\d{7,})"), reverse=True)


def our_numbers(root: Path, pattern: str) -> list[int]:
    """Return the numbers in the names of our steps that match a pattern."""
    found = (re.fullmatch(pattern, name) for name in listing(root))
    return [int(m[1]) for m in found if m and not is_foreign(root / m[0])]


def listing(root: Path) -> list[str]:
    """List the names in the folder that belong to checkpoints of any program."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise not_a_run(root, "checkpoint") from None
    except OSError as error:
        raise UserError(f"cannot read the folder {root}: {error.strerror}", BAD_DATA) from error
    trackers = "|".join(map(re.escape, (TRACKER, BEST, DEEPSPEED_TRACKER, LIBAI_TRACKER)))
    pattern = rf"iter_\d{{7,}}(\.tmp|\.damaged)?|global_step\d+(_universal)?|release|iter\d+_snapshot|{trackers}"
    return sorted(name for name in names if re.fullmatch(pattern, name))


def foreign_names(root: Path) -> list[str]:
    """List the names that belong to other programs' checkpoints."""
    return [n for n in listing(root) if not re.fullmatch(r"iter_\d+(\.\w+)?", n) or is_foreign(root / n)]


def is_foreign(folder: Path) -> bool:
    """Return whether a folder named like our steps holds a step of Megatron's, complete or not."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    theirs = r"mp_rank_.*|.*\.distcp|\.metadata|common\.pt"
    return not {MANIFEST, HIDDEN} & set(names) and any(re.fullmatch(theirs, name) for name in names)


def check_trackers(root: Path, names: list[str], notes: list[str]) -> None:
    """Refuse a tracker that names a checkpoint of another program, newer than ours."""
    newest = max(our_numbers(root, r"iter_(\d+)(\.damaged)?"), default=None)
    for name, pattern in ((TRACKER, r"(\d{1,15})"), (DEEPSPEED_TRACKER, r"global_step(\d{1,15})")):
        if newest is None or name not in names or not (root / name).is_file():
            continue
        text = read_tracker(root / name)
        named = re.fullmatch(pattern, text, re.ASCII)
        if not named and text != "release":  # a release is iteration 0: any step of ours is newer
            notes.append(f"WARNING: {root / name} says {text!r}, not an iteration; ignored")
        elif named and int(named[1]) > newest:
            folder = root / text if name == DEEPSPEED_TRACKER else step_folder(root, int(named[1]))
            whose, path = (
                (f" of {kind}", f", or give the path {folder}") if (kind := kind_of_folder(folder)) else ("", "")
            )
            raise UserError(
                f"{root / name} names iteration {named[1]}{whose}, but our newest is iteration {newest}: "
                f"write {newest} into it to continue from there{path}",
                BAD_DATA,
            )


def list_checkpoints(root: str | Path) -> list[str]:
    """List checkpoints, of any program, that a run without --load must not write beside."""
    return [name for name in listing(Path(root)) if not name.endswith(".tmp")]
