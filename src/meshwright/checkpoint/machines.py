"""Read the steps of a run whose machines have folders of their own.

`joined` finds out whether the ranks see one folder. If they do not, the first rank of each machine
lists the steps that it has and serves their files to the others; rank 0 compares the lists. A step
is complete if all files of its manifest are on some machine. Each rank reads what its own folder
has from there, and the rest from the machine that has it, with the same checksums.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.base.errors import IO, UserError, bad_data
from meshwright.base.files import naming_file, own_file, replacing
from meshwright.base.runs.rows import METRICS, find_last_time
from meshwright.base.storage.addresses import address_of
from meshwright.checkpoint import disks, manifests, steps
from meshwright.checkpoint.manifests import (
    HIDDEN,
    MANIFEST,
    DamagedCheckpoint,
    File,
    FilePart,
    Manifest,
)
from meshwright.checkpoint.steps import NATIVE, OUR_STEP, TRACKER, StepLocation, step_folder
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.runtime.ranks.remote_files import Address, FileServer, RemoteFiles
from meshwright.runtime.ranks.team import Team

if TYPE_CHECKING:
    from meshwright.checkpoint.publish import Folders

FILE = r"(mp_rank_\d+(_\d+)?/)?\.?[A-Za-z0-9_][A-Za-z0-9_.-]*"  # of a step
SERVED = rf"metrics\.jsonl|log\.txt|{OUR_STEP}/{FILE}"
RECORDS = (METRICS, "log.txt")
FILES_NAMED = 3  # in a message about a step that is not complete


class StepFiles(NamedTuple):
    """What one machine has of a step."""

    manifest: str  # its file's name
    seal: str  # what tells it from other manifests
    names: list[str]  # the files that are here, with the sizes of the manifest


class Listed(NamedTuple):
    """What the first rank of a machine serves."""

    steps: dict[str, StepFiles]  # by the name of the step's folder
    last: float  # when the last row of its records was written, 0 without any
    records: dict[str, int]  # the sizes of its records


@dataclass
class RunMachines:
    """The machines of a run, of which each has a folder of its own."""

    root: Path
    rank: int
    first: int  # the first rank of this machine
    files: RemoteFiles
    # On rank 0: the first rank of each rank's machine.
    ranks: list[int]
    complete: dict[str, str] = field(default_factory=dict)  # by step's folder: its manifest's seal
    # by "step's folder/file", the ranks that serve it: on rank 0 of all files, on others of those
    # that they need
    holders: dict[str, list[int]] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)  # on rank 0: why steps are not complete
    own: dict[str, bool] = field(default_factory=dict)  # answers of `has_own`
    brought: dict[str, Manifest] = field(default_factory=dict)  # of steps that are not here at all
    listed: dict[int, Listed] = field(default_factory=dict)  # on rank 0

    # Reading

    def is_on_other(self, path: Path, file: File | FilePart) -> bool:
        """Return whether a file of a step must be read from another machine."""
        return not self.is_whole(path, file) and self.key_of(path) in self.holders

    def is_whole(self, path: Path, file: File | FilePart) -> bool:
        """Return whether this machine has a file of the complete step, in its size."""
        if self.has_own(path.parent.name):
            with contextlib.suppress(UserError):
                manifests.check_size(path, file)
                return True
        return False

    def has_own(self, name: str) -> bool:
        """Return whether this machine's folder of that name is a part of the complete step."""
        if name not in self.own:
            self.own[name] = False
            with contextlib.suppress(UserError):
                self.own[name] = manifests.read_seal(self.root / name) == self.complete.get(name)
        return self.own[name]

    def key_of(self, path: Path) -> str:
        return f"{path.parent.name}/{path.name}"

    def read(self, path: Path, attempt: int, data: bytearray | mmap, begin: int) -> None:
        """Fill a buffer from another machine that has a file; each attempt asks the next one."""
        others = self.others_with(path)
        # The ranks of a large run begin with different machines.
        self.files.read(others[(self.rank + attempt) % len(others)], self.key_of(path), begin, data)

    def others_with(self, path: Path) -> list[int]:
        """Return the first ranks of the other machines that have a file."""
        return [rank for rank in self.holders.get(self.key_of(path), []) if rank != self.first]

    def holders_of(self, folder: Path, name: str) -> list[int]:
        return self.holders.get(f"{folder.name}/{name}", [])

    def add_holders(self, folder: Path, holders: dict[str, list[int]]) -> None:
        """Note who serves files of a step."""
        self.holders |= {f"{folder.name}/{name}": ranks for name, ranks in holders.items()}

    def deal_holders(self, folder: Path, names: Iterable[str], team: Team) -> None:
        """Learn from rank 0 who serves the files that this rank needs of a step."""
        wanted = team.collect(lambda: list(names))
        self.add_holders(
            folder,
            team.deal(
                lambda: [{name: self.holders_of(folder, name) for name in own} for own in wanted]
            ),
        )

    def share_holders(self, team: Team) -> None:
        """Tell every rank who has which file, for steps that every rank opens by itself."""
        self.holders = team.run_on_rank_0(lambda: self.holders)

    def divide(self, folder: Path, manifest: Manifest) -> list[manifests.Share]:
        """Divide the chunks of a step among the machines' first ranks: each hashes what it has."""
        parts: dict[int, Manifest] = {}
        for name, file in manifest.items():
            parts.setdefault(self.holders_of(folder, name)[0], {})[name] = file
        shares: list[manifests.Share] = [[] for _ in self.ranks]
        for rank, part in parts.items():
            [shares[rank]] = manifests.divide_chunks(part, 1)
        return shares

    # Finding, on rank 0

    def compare(self) -> None:
        """Find the complete steps, and who has their files; bring here what describes them."""
        listed = self.listed
        names = sorted({name for one in listed.values() for name in one.steps})
        for name in names:
            parts = {rank: one.steps[name] for rank, one in listed.items() if name in one.steps}
            # Of two steps with one number, one was left incomplete when a run fell back.
            seals = sorted({part.seal for part in parts.values()})
            same = [{r: part for r, part in parts.items() if part.seal == seal} for seal in seals]
            complete = [each for each in same if self.is_complete(name, each, len(listed))]
            if len(complete) > 1:
                raise bad_data(
                    f"the machines hold two different steps {name} in {self.root}, and both are complete; move the "
                    "one that is not meant to another folder"
                )
            if complete:
                self.accept(name, complete[0])

    def is_complete(self, name: str, parts: dict[int, StepFiles], machines: int) -> bool:
        """Return whether these machines have all files of a step, and note what is lacking."""
        step = int(name.removeprefix("iter_"))
        path, raw = self.read_manifest(name, parts)
        manifest = manifests.parse_manifest(raw, path)
        holders = holders_of_parts(parts)
        lacking = {n: file.place for n, file in manifest.items() if n not in holders}
        if lacking:
            self.problems[step] = name_lacking(lacking)
        elif path.name == HIDDEN and min(map(len, holders.values())) < machines:
            self.problems[step] = (
                "it has Megatron's format, whose readers need all files on each machine; bring them together "
                "with `meshwright collect`"
            )
        else:
            return True
        return False

    def accept(self, name: str, parts: dict[int, StepFiles]) -> None:
        """Note who has the files of a complete step."""
        self.problems.pop(int(name.removeprefix("iter_")), None)
        self.complete[name] = next(iter(parts.values())).seal
        self.add_holders(self.root / name, holders_of_parts(parts))
        if self.rank not in parts:
            self.bring(name, parts)

    def bring(self, name: str, parts: dict[int, StepFiles]) -> None:
        """Bring the manifest of a complete step to this machine, which has no part of it."""
        path, raw = self.read_manifest(name, parts)
        manifest = manifests.parse_manifest(raw, path)
        if not all(file.place for file in manifest.values()):
            # It was written to one folder. Without its files the manifest would be a damaged step.
            self.brought[name] = manifest
            return
        # The small files too, which tell the next start here what the step is.
        small = {n: file for n, file in manifest.items() if not n.startswith("rank_")}
        texts = {path.name: raw}
        for n, file in small.items():
            key = f"{name}/{n}"
            texts[n] = b"".join(verified_chunks(self.files, self.holders[key][0], key, file))
        self.keep(path, texts)

    def manifest_of(self, folder: Path) -> Manifest:
        """Return the manifest of a complete step."""
        brought = self.brought.get(folder.name)
        return manifests.read_manifest(folder) if brought is None else brought

    def read_manifest(self, name: str, parts: dict[int, StepFiles]) -> tuple[Path, bytes]:
        """Return path and bytes of a step's manifest, which may be on another machine."""
        rank = self.rank if self.rank in parts else min(parts)
        part = parts[rank]
        path = self.root / name / part.manifest
        if rank == self.rank:
            return path, manifests.read_small(path, manifests.MANIFEST_LIMIT)
        data = bytearray(manifests.size_of_sealed(part.seal))
        self.files.read(rank, f"{name}/{part.manifest}", 0, data)
        return path, bytes(data)

    def keep(self, path: Path, texts: dict[str, bytes]) -> None:
        """Write the files that describe a step here; `path` is that of its manifest."""
        folder = path.parent
        unnamed = folder.with_name(f"{folder.name}.tmp")
        try:
            shutil.rmtree(unnamed, ignore_errors=True)
            unnamed.mkdir(parents=True)
            for name, text in texts.items():
                with replacing(unnamed / name, durably=True) as file:
                    file.write(text)
            if folder.exists():  # a part of another step with this number, which is not complete
                aside = folder.with_name(f"{folder.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
            unnamed.rename(folder)
        except OSError as error:
            raise UserError(
                f"cannot write what describes a step that other machines have to {folder}: "
                f"{error.strerror or error}; make it writable, or start rank 0 on one of them",
                IO,
            ) from error
        self.own[folder.name] = True

    def bring_records(self) -> None:
        """Replace the records of the run here, if another machine has later ones."""
        rank = max(self.listed, key=lambda rank: (self.listed[rank].last, -rank))
        if self.listed[rank].last <= self.listed[self.first].last:
            return
        for name, size in self.listed[rank].records.items():
            with replacing(self.root / name) as file:
                for begin in range(0, size, manifests.CHUNK):
                    data = bytearray(min(manifests.CHUNK, size - begin))
                    self.files.read(rank, name, begin, data)
                    file.write(data)

    def require_complete(self, step: int) -> None:
        """Raise DamagedCheckpoint if the machines do not have all files of a step."""
        if step_folder(self.root, step).name not in self.complete:
            raise DamagedCheckpoint(f"iteration {step}: {self.problems.get(step, 'it is damaged')}")

    def find_step(
        self, path: Path, below: int | None = None
    ) -> tuple[StepLocation | None, list[str]]:
        """Return the step that a path means, as steps.find_step does, of what all machines have."""
        root, step = steps.split_path(path)
        complete = {int(name.removeprefix("iter_")) for name in self.complete}
        if not complete and not self.problems:
            return steps.find_step(path, below)
        if step is not None and below is None:
            if step not in complete:
                lack = self.problems.get(step, "no machine has it")
                raise bad_data(f"{path} is not complete: {lack}")
            return locate(root, step), []
        older = [n for n in complete if below is None or n < below]
        newest = max(older, default=None)
        skipped = [
            f"{step_folder(root, n).name}, which is not complete: {why}"
            for n, why in sorted(self.problems.items(), reverse=True)
            if (newest is None or n > newest) and (below is None or n < below)
        ]
        if newest is None:
            if not skipped:
                raise DamagedCheckpoint(f"there is no older checkpoint in {root}")
            raise DamagedCheckpoint(
                f"no complete checkpoint in {root} on the machines of this run: {'; '.join(skipped)}"
            )
        notes = [f"WARNING: skipping {why}" for why in skipped]
        return locate(root, newest), notes


def locate(root: Path, step: int) -> StepLocation:
    folder = step_folder(root, step)
    # On a machine without files of the step there is only the manifest.
    kind = NATIVE if (folder / MANIFEST).exists() else steps.kind_of_folder(folder) or NATIVE
    return StepLocation(kind, folder, step, root)


def holders_of_parts(parts: dict[int, StepFiles]) -> dict[str, list[int]]:
    """Return the ranks that serve each file of a step."""
    holders: dict[str, list[int]] = {}
    for rank, part in sorted(parts.items()):
        for file in part.names:
            holders.setdefault(file, []).append(rank)
    return holders


def name_lacking(lacking: dict[str, str]) -> str:
    """Say whose files of a step no machine has."""
    by_place: dict[str, list[str]] = {}
    for name, place in sorted(lacking.items()):
        by_place.setdefault(place, []).append(name)
    parts = []
    for place, names in by_place.items():
        whose = f"the part of {disks.readable(place)}" if place else "a part"
        some = ", ".join(names[:FILES_NAMED]) + ", ..." * (len(names) > FILES_NAMED)
        parts.append(f"{whose} ({some})")
    verb = "is" if len(parts) == 1 else "are"
    where = "on a machine that is not in the run and must be started too"
    return f"{' and '.join(parts)} {verb} damaged, or {where}"


@contextlib.contextmanager
def joined(path: Path, team: Team) -> Iterator[RunMachines | None]:
    """Let each machine serve its steps to the others; None if all ranks see one folder.

    All ranks call this together, and what they do in the block ends together on all of them.
    """
    root = steps.split_path(path)[0]
    if team.size == 1 or address_of(root):
        yield None
        return
    seen = team.run_on_all(lambda: what_is_seen(root))
    # What is seen, and the first rank that sees it.
    views = team.merge({seen: team.rank}, merge_first)
    if len(views) == 1:
        yield None
        return

    first = views[seen]
    is_first = team.rank == first
    ranks = team.collect(lambda: first)
    with served(root, SERVED, is_first, team) as files:

        def look() -> dict[str, Any]:
            if not is_first:
                return {}
            sizes = {
                name: (root / name).stat().st_size for name in RECORDS if (root / name).is_file()
            }
            return {str(team.rank): Listed(list_files(root), find_last_time(root), sizes)}

        listed = {}
        for rank, (own, *records) in team.collect_merged(look, merge_first).items():
            parts = {name: StepFiles(*part) for name, part in own.items()}
            listed[int(rank)] = Listed(parts, *records)
        machines = RunMachines(root, team.rank, first, files, ranks, listed=listed)

        def compare() -> dict[str, str]:
            machines.compare()
            return machines.complete

        # On rank 0 these are its own.
        machines.complete = team.run_on_rank_0(compare)
        yield machines


@contextlib.contextmanager
def served(root: Path, pattern: str, is_server: bool, team: Team) -> Iterator[RemoteFiles]:
    """Let some ranks serve files below a folder to all, who call this together."""
    key = bytes.fromhex(team.run_on_rank_0(lambda: secrets.token_hex(32)))
    with contextlib.ExitStack() as stack:

        def serve() -> dict[str, Address]:
            if not is_server:
                return {}
            server = stack.enter_context(contextlib.closing(FileServer(root, pattern, key)))
            return {str(team.rank): server.address}

        addresses = team.merge(team.run_on_all(serve), merge_first)
        where = {int(rank): (host, port) for rank, (host, port) in addresses.items()}
        yield stack.enter_context(contextlib.closing(RemoteFiles(where, key)))


def verified_chunks(files: RemoteFiles, rank: int, key: str, file: File) -> Iterator[bytearray]:
    """Yield the chunks of a file on another machine, each after it was hashed."""
    for index in range(file.chunks):
        begin = index * manifests.CHUNK
        chunk = bytearray(min(manifests.CHUNK, file.size - begin))
        files.read(rank, key, begin, chunk)
        if manifests.sha256([chunk]) != file.digest(index):
            raise UserError(f"{key}: what came from rank {rank} is not what was written", IO)
        yield chunk


def copy_parts(
    folder: Path,
    manifest: Manifest,
    writers: Mapping[str, int],
    folders: Folders,
    team: Team,
    explained: Callable[[Callable[[], None]], Callable[[], None]],
) -> None:
    """Copy the files of a step that is being written to the next machines, verified.

    Each is on `copies` machines then, so that one machine less may be lost. `writers` are the first
    ranks of the machines that wrote the files. `explained` says what an OSError means for the run.
    """
    first_ranks = sorted({*folders.users})
    number = first_ranks.index(folders.users[team.rank])
    is_first = team.rank in first_ranks
    pattern = rf"{re.escape(folder.name)}/{FILE}"
    with served(folder.parent, pattern, is_first, team) as files:

        def copy() -> None:
            if not is_first:
                return
            for distance in range(1, min(folders.copies, len(first_ranks))):
                source = first_ranks[number - distance]
                for name, file in manifest.items():
                    # Each machine has written the small files.
                    if writers[name] == source and not (folder / name).exists():
                        copy_file(files, source, folder, name, file)

        team.run_on_all(explained(copy))


def copy_file(files: RemoteFiles, rank: int, folder: Path, name: str, file: File) -> None:
    """Copy a file of a step from another machine, and bring it to the disk."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)  # Megatron's mp_rank_01/
    with naming_file(path), open(path, "xb", opener=own_file) as copy:
        for chunk in verified_chunks(files, rank, f"{folder.name}/{name}", file):
            copy.write(chunk)
            heartbeat.tick()
        copy.flush()
        os.fsync(copy.fileno())


def merge_first(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge what neighbouring ranks say; of the same key, the first one's."""
    return {key: value for part in reversed(parts) for key, value in part.items()}


def what_is_seen(root: Path) -> str:
    """Return what differs between machines that do not share a folder: its disk, or its tracker.

    The folder is not listed, as all ranks of a run would do so at once.
    """
    if disk := disks.disk_of(root):
        return disk
    with contextlib.suppress(OSError):
        status = os.stat(root / TRACKER)
        return f"{status.st_size} {status.st_mtime_ns}"
    return ""


def incomplete_steps(root: Path, newest: int, is_first: bool, team: Team) -> list[int]:
    """Return rank 0's steps before `newest` of which some file is on no machine.

    All ranks call this; `is_first` tells the first rank of each machine.
    """
    listed: dict[str, dict[str, StepFiles]] = team.collect_merged(
        lambda: {str(team.rank): list_files(root, newest)} if is_first else {}, merge_first
    )

    def is_incomplete(step: int) -> bool:
        name = step_folder(root, step).name
        parts = {rank: StepFiles(*own[name]) for rank, own in listed.items() if name in own}
        if "0" not in parts:  # its manifest is damaged
            return True
        seal = parts["0"].seal
        found = {file for part in parts.values() if part.seal == seal for file in part.names}
        return found != manifests.read_manifest(root / name).keys()

    incomplete: list[int] = team.run_on_rank_0(
        lambda: [n for n in steps.list_steps(root) if n < newest and is_incomplete(n)]
    )
    return incomplete


def list_files(root: Path, below: int | None = None) -> dict[str, StepFiles]:
    """List what a folder has of each step of ours, or of those below a number."""
    listed: dict[str, StepFiles] = {}
    for step in steps.list_steps(root):
        if below is not None and step >= below:
            continue
        folder = step_folder(root, step)
        whole = []
        with contextlib.suppress(UserError):
            seal = manifests.read_seal(folder)
            for name, file in manifests.read_manifest(folder).items():
                with contextlib.suppress(UserError):
                    manifests.check_size(folder / name, file)
                    whole.append(name)
            listed[folder.name] = StepFiles(manifests.find_manifest(folder).name, seal, whole)
    return listed
