"""Steps whose files are divided over the own disks of several machines.

Each machine keeps the files of its ranks, and all have the same manifest, which says of each file
on which machine it is. A disk has a name, in the file DISK of the run's folder, because the names
of machines and folders may change.
"""

from __future__ import annotations

import re
import shlex
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.base.errors import BAD_DATA, UnfitFile, UserError
from meshwright.base.files import read_small, replacing

if TYPE_CHECKING:
    from meshwright.checkpoint.manifests import File

DISK = ".disk"


def disk_of(root: Path) -> str:
    """Return the name of the disk that a run's folder is on; "" if machines share the folder."""
    path = root / DISK
    try:
        name = read_small(path, 100).decode(errors="replace").strip() if path.exists() else ""
    except UnfitFile:
        return ""
    return name if re.fullmatch("[0-9a-f]{1,64}", name) else ""


def name_disk(root: Path) -> None:
    """Give the disk a new name."""
    with replacing(root / DISK, durably=True) as file:
        file.write(f"{uuid.uuid4().hex}\n".encode())


def own_place(root: Path) -> str:
    """Return where the files of this machine's ranks are: machine, folder and disk."""
    return f"{socket.gethostname()}:{root.resolve()}#{disk_of(root)}"


def readable(place: str) -> str:
    """Return a place as people write it, machine and folder."""
    written = place.rpartition("#")[0]
    # Whoever made the manifest chose the place: it must not control a terminal.
    return "".join(letter if letter.isprintable() else "?" for letter in written)


def run_of(path: Path) -> Path:
    """Return the folder of the run that has a file of a step, in our format or in Megatron's."""
    step = path.parent.parent if path.parent.name.startswith("mp_rank_") else path.parent
    return step.parent


def is_elsewhere(path: Path, place: str) -> bool:
    """Return whether a file of a step, which was written at this place, is on another machine."""
    if not place or path.exists():
        return False
    return place.rpartition("#")[2] != disk_of(run_of(path))


def require_here(folder: Path, manifest: Mapping[str, File]) -> None:
    """Refuse a step of which some file is on another machine."""
    for name, file in sorted(manifest.items()):
        if is_elsewhere(folder / name, file.place):
            raise OnOtherMachine(folder / name, file.place)


class OnOtherMachine(UserError):
    """A file of a step is on a machine that is not at hand."""

    def __init__(self, path: Path, place: str) -> None:
        super().__init__(
            f"{path} is on the disk of {readable(place)}; bring all parts together with "
            f"`meshwright collect {run_of(path)} --from {shlex.quote(readable(place))}`",
            BAD_DATA,
        )


def list_elsewhere(folder: Path, manifest: Mapping[str, File]) -> dict[str, list[str]]:
    """Return the files of a step that are on other machines, by machine and folder."""
    found: dict[str, list[str]] = {}
    for name, file in sorted(manifest.items()):
        if is_elsewhere(folder / name, file.place):
            found.setdefault(readable(file.place), []).append(name)
    return found
