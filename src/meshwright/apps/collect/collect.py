"""Copy what the steps of a run lack from other machines, and verify it before it gets its place."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from meshwright.base.console import show
from meshwright.base.errors import BAD_DATA, IO, UNAVAILABLE, UserError
from meshwright.base.files import make_anew, own_file, sync
from meshwright.base.progress import progress_bar
from meshwright.base.runs.rows import METRICS
from meshwright.checkpoint import disks, manifests, owner, publish, steps
from meshwright.checkpoint.manifests import DamagedCheckpoint, File, Manifest
from meshwright.checkpoint.steps import OUR_STEP

STAGE = ".collect"  # in the run's folder: what was copied and is not verified yet
# What a run keeps beside its steps, which is taken from the machine that has it.
RECORDS = ("config.toml", METRICS, "log.txt", "tokenizer")
NAMES = (
    rf"{OUR_STEP}/\.?manifest\.json|(config\.toml|metrics\.jsonl|log\.txt|tokenizer/[\w][\w.-]*)"
)
HOST = r"[A-Za-z0-9_][\w.@-]*"  # no dash first, which ssh would take for an option

Advance = Callable[[float], None]


def collect(run: Path, sources: list[str]) -> None:
    """Copy what the steps in `run` lack from the sources, or from where the steps say."""
    require_run(run, "RUN")
    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file; give the run's folder", BAD_DATA)
    if not sources and not steps.list_steps(run):
        raise UserError(
            f"{run} holds no step that says where the others are; give --from HOST:DIR or DIR",
            BAD_DATA,
        )
    with owner.lock_folder(run, "wait for it"):
        for text in sources or places_of(run):
            show(f"from {text}")
            try:
                take(run, read_source(text))
            except OSError as error:
                name = error.filename or run
                raise UserError(f"{name}: {error.strerror or error}", IO) from error
        publish_newest(run)


def require_run(folder: Path, word: str) -> None:
    """Refuse the folder of a step, beside whose files another one would be made."""
    if re.fullmatch(OUR_STEP, folder.name):
        raise UserError(
            f"{word} {folder} is a step; give the folder of the run, {folder.parent}", BAD_DATA
        )


def places_of(run: Path) -> list[str]:
    """Return the machines and folders that have what the steps here lack."""
    found: list[str] = []
    for step in steps.list_steps(run):
        folder = steps.step_folder(run, step)
        with contextlib.suppress(DamagedCheckpoint):
            found += disks.list_elsewhere(folder, manifests.read_manifest(folder))
    return list(dict.fromkeys(found))


def read_source(text: str) -> RunFolder:
    """Return the source that HOST:DIR or DIR names."""
    host, colon, folder = text.partition(":")
    if not colon or "/" in host or Path(text).is_dir():
        require_run(Path(text), "--from")
        return LocalFolder(Path(text))
    # A second colon would have rsync ask a server of its own instead of ssh.
    if not re.fullmatch(HOST, host) or folder.startswith(":"):
        raise UserError(f"{text[:200]!r} names no machine; give HOST:DIR or DIR")
    require_run(Path(folder), "--from")
    # ssh begins in the user's folder there.
    return RemoteFolder(host, folder.removeprefix("~/") or ".")


# Where parts come from


class RunFolder(ABC):
    """A folder of the run, here or on another machine."""

    @abstractmethod
    def list_names(self) -> list[str]:
        """List the manifests and records in it."""

    @abstractmethod
    def copy(self, names: list[str], target: Path, advance: Advance = lambda size: None) -> None:
        """Copy those of the named files that exist; say the size of each that has come."""


@dataclass
class LocalFolder(RunFolder):
    folder: Path

    def list_names(self) -> list[str]:
        if not self.folder.is_dir():
            raise UserError(f"{self.folder} is no folder; give HOST:DIR or DIR", BAD_DATA)
        found = (path.relative_to(self.folder) for path in self.folder.glob("*/*"))
        return [*map(str, found), *os.listdir(self.folder)]

    def copy(self, names: list[str], target: Path, advance: Advance = lambda size: None) -> None:
        for name in names:
            source = self.folder / name
            # A step's folder may be a link, which the user has made; a file in it may not.
            if source.is_file() and not source.is_symlink():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target / name)
                advance(source.stat().st_size)


@dataclass
class RemoteFolder(RunFolder):
    host: str
    folder: str

    def list_names(self) -> list[str]:
        listing = "ls -d iter_*/manifest.json iter_*/.manifest.json tokenizer/* * 2>/dev/null; true"
        return self.ask(listing, b"").decode(errors="replace").split("\n")

    def copy(self, names: list[str], target: Path, advance: Advance = lambda size: None) -> None:
        wanted = "".join(f"{name}\n" for name in names).encode()
        if shutil.which("rsync"):
            from_folder = f"{self.host}:{self.folder}/"
            # Without --archive it takes no links or devices. Before 3.2.4 it would have a shell
            # interpret the name of the folder.
            words = ["rsync", "--times", "--partial", "--ignore-missing-args", "--protect-args"]
            words += ["--files-from=-"]
            if subprocess.run([*words, from_folder, f"{target}/"], input=wanted).returncode == 0:
                return
            show(f"rsync failed, so the files of {self.host} are copied with ssh and tar")
        with self.start("tar -cf - --ignore-failed-read -T -") as tar:
            assert tar.stdin and tar.stdout
            # tar may send files before it has read all names.
            threading.Thread(target=feed, args=(tar.stdin, wanted), daemon=True).start()
            try:
                unpack(tar.stdout, {*names}, target, advance)
            except tarfile.TarError as error:
                raise UserError(
                    f"{self.host}: what tar sent cannot be read: {error}", UNAVAILABLE
                ) from error

    def start(self, command: str) -> subprocess.Popen[bytes]:
        line = f"cd -- {shlex.quote(self.folder)} && {command}"
        try:
            return subprocess.Popen(
                ["ssh", self.host, line], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except FileNotFoundError:
            raise UserError(
                f"ssh is needed to read from {self.host}; install it, or copy {self.folder} here and give its path",
                UNAVAILABLE,
            ) from None

    def ask(self, command: str, text: bytes) -> bytes:
        with self.start(command) as process:
            answer, _ = process.communicate(text)
        if process.returncode:
            raise UserError(
                f"{self.host} did not list {self.folder} (ssh ended with status {process.returncode}); check that "
                f"`ssh {self.host} ls {self.folder}` works",
                UNAVAILABLE,
            )
        return answer


def feed(stream: BinaryIO, text: bytes) -> None:
    """Write to a process; if it ends before, what it sent says so."""
    with contextlib.suppress(OSError), stream:
        stream.write(text)


def unpack(stream: object, names: set[str], target: Path, advance: Advance) -> None:
    """Write the regular files of a tar stream that were asked for, and nothing else."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None and member.name in names:
                path = target / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)  # a part that rsync has left
                with open(path, "xb", opener=own_file) as file:
                    shutil.copyfileobj(content, file, manifests.CHUNK)
                advance(member.size)


# What is taken


def take(run: Path, source: RunFolder) -> None:
    """Take from a source what the steps here lack, and whole steps that are not here."""
    stage = run / STAGE
    make_anew(stage)
    try:
        names = [name for name in source.list_names() if re.fullmatch(NAMES, name)]
        source.copy([name for name in names if "manifest.json" in name], stage)
        take_records(run, source, [name for name in names if "manifest.json" not in name])
        for step in steps.list_steps(stage)[::-1]:
            take_step(run, source, steps.step_folder("", step).name)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def take_records(run: Path, source: RunFolder, names: list[str]) -> None:
    """Take the settings, the log and the vocabulary, if this machine has none of its own."""
    lacking = [name for name in names if not (run / name.partition("/")[0]).exists()]
    source.copy(lacking, run / STAGE)
    for name in RECORDS:
        staged = run / STAGE / name
        if staged.is_dir() if name == "tokenizer" else staged.is_file():
            staged.rename(run / name)


def take_step(run: Path, source: RunFolder, name: str) -> None:
    """Take the files of a step that are there and not here."""
    staged, here = run / STAGE / name, run / name
    try:
        manifest = manifests.read_manifest(staged)
        is_other = here.exists() and manifests.read_seal(here) != manifests.read_seal(staged)
    except DamagedCheckpoint as damage:
        show(f"  {name}: passed over, {damage}")
        return
    if is_other:
        show(f"  {name}: passed over, it is another step of that number than the one here")
        return

    lacking = {n: file for n, file in manifest.items() if not has_size(here / n, file)}
    size = sum(file.size for file in lacking.values())
    with progress_bar(name, size) as advance:
        source.copy([f"{name}/{n}" for n in lacking], run / STAGE, advance)
    came = {n: file for n, file in lacking.items() if (staged / n).exists()}
    if not came:
        return
    require_intact(staged, came)

    # A step that is here gets the files; one that is not is moved as a whole.
    if not here.exists():
        sync(manifests.find_manifest(staged))
        sync(staged)
        staged.rename(here)
    else:
        for n in came:
            (here / n).parent.mkdir(exist_ok=True)
            (staged / n).rename(here / n)
        sync(here)
    sync(run)
    show(
        f"  {name}: {len(came)} file{'s' * (len(came) != 1)}, {sum(f.size for f in came.values()):,} bytes"
    )


def has_size(path: Path, file: File) -> bool:
    """Return whether a file is here as long as it was written; one that was cut is replaced."""
    try:
        manifests.check_size(path, file)
    except DamagedCheckpoint:
        return False
    return True


def require_intact(folder: Path, files: Manifest) -> None:
    """Check size and every byte of files that were copied, and bring them to the disk."""
    for name, file in files.items():
        manifests.check_size(folder / name, file)
        with open(folder / name, "rb") as copied:
            os.fsync(copied.fileno())
    manifests.hash_chunks(folder, manifests.divide_chunks(files, 1)[0])


def publish_newest(run: Path) -> None:
    """Let Megatron's tracker name the newest complete step."""
    for step in steps.list_steps(run):
        with contextlib.suppress(DamagedCheckpoint):
            if not lacking_places(run, step):
                manifests.verify_step(steps.step_folder(run, step))
                publish.write_tracker(run, step)
                return


def lacking_places(run: Path, step: int) -> dict[str, list[str]]:
    """Return the files of a step that are not here, by the place where they were written."""
    folder = steps.step_folder(run, step)
    found: dict[str, list[str]] = {}
    for name, file in sorted(manifests.read_manifest(folder).items()):
        if not (folder / name).exists():
            found.setdefault(disks.readable(file.place) or "this machine", []).append(name)
    return found


def describe(run: Path) -> tuple[list[str], bool]:
    """Say of each step whether it is complete here; also return whether one is."""
    lines, some = [], False
    for step in steps.list_steps(run):
        name = steps.step_folder(run, step).name
        try:
            lacking = lacking_places(run, step)
            if not lacking:
                number = len(manifests.verify_step(steps.step_folder(run, step)))
                lines.append(f"{name}  complete, {number} files")
                some = True
        except DamagedCheckpoint as damage:
            lines.append(f"{name}  damaged: {damage}")
            continue
        for place, names in lacking.items():
            lines.append(f"{name}  {len(names)} file{'s' * (len(names) != 1)} still on {place}")
    return lines or [f"{run} holds no steps"], some
