"""`python -m fuzz.storage`: runs in object storage with a hostile service and a second writer.

A case is a sequence of sessions on two machines: load, save, upload, thin, prune, read token files.
Before each request something may happen: an object goes or gets other bytes or another tag, a list
is out of date, token files are replaced, the other machine takes over, a request is refused, the
process is killed. Between sessions a disk may be lost or copied, and blocks in a crash.

A session ends well or with a reason and a status. What it reads was saved under that name, token
files are of one version, and each step that was saved has a copy, unless what happened took the
last one. What is not so is silent damage, which is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

from meshwright.base import console
from meshwright.base.errors import UserError
from meshwright.base.storage import addresses, copies, store
from meshwright.checkpoint import lease, loading, manifests, mirror, publish, steps, upload
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer
from s3 import Bucket, serving_bucket

RUN, DATA = "runs/a", "data/text"
MACHINES = ("a", "b")
FILES = ("index.json", "rank_00000.safetensors")
BLOCK = 512  # bytes of a sparse copy
ASK = store.BucketObjects.ask


class Killed(BaseException):
    """Stands for SIGKILL."""


class Silent(Exception):
    """Damage that nothing has reported."""


class Saved(NamedTuple):
    """A step as it was saved."""

    step: int
    content: bytes  # of each file
    manifest: bytes


class World:
    """The service, the machines, and what is known about each step that was saved."""

    def __init__(self, bucket: Bucket, folder: Path, rng: random.Random) -> None:
        self.bucket, self.folder, self.rng = bucket, folder, rng
        self.made: list[Saved] = []  # by anyone
        self.owed = set[Saved]()  # those of which there must be a copy
        self.excused = 0
        # keys about which the session at work has asked since their last change
        self.answered = set[str]()
        self.past: list[dict[str, bytes]] = [{}]  # which a list may show
        self.pairs = set[tuple[bytes, bytes]]()  # token files that were in storage together
        self.metrics = {b""}  # that were in storage
        self.starts = 0  # of the machines, after crashes
        self.left: list[int] = []  # requests until a kill, of the sessions at work
        self.danger = rng.choice([0.0, 0.02, 0.05, 0.1])  # of an event before a request
        self.events: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()  # of refusals
        self.versions = [write_tokens(folder / f"tokens{seed}", seed) for seed in range(3)]

    def root(self, machine: str) -> Path:
        return Path(addresses.localize(f"s3://bucket/{RUN}", str(self.folder / machine)))

    # What happens

    def ask(
        self, objects: Any, key: str, act: Callable[[], Any], none_for: tuple[str, ...] = ()
    ) -> Any:
        """Stand for BucketObjects.ask: let something happen before a request."""
        self.count_down()
        if self.rng.random() < 0.1:
            self.bucket.listed = None
        if self.rng.random() < self.danger:
            self.happen(key)
        answer = ASK(objects, key, act, none_for)
        self.answered.add(key)
        self.look()
        return answer

    def look(self) -> None:
        """Note what storage holds."""
        objects = self.bucket.objects
        if objects != self.past[-1]:
            self.past.append(dict(objects))
            self.metrics.add(objects.get(f"{RUN}/metrics.jsonl", b""))
            self.pairs.add((objects.get(f"{DATA}.idx", b""), objects.get(f"{DATA}.bin", b"")))

    def count_down(self, point: str = "") -> None:
        if self.left:
            self.left[-1] -= 1
            if self.left[-1] <= 0:
                raise Killed

    def happen(self, key: str) -> None:
        events = [
            self.remove,
            self.replace,
            self.change_tag,
            self.show_past,
            self.refuse,
            self.replace_tokens,
        ]
        events += [self.write_as_another, self.remove_owner]
        # Between a look at the owner and a write, storage has no means to tell two writers apart.
        if key.endswith(lease.OWNER) and len(self.left) == 1:
            events += [self.take_over] * 6
        event = self.rng.choice(events)
        self.events[event.__name__] += 1
        with self.excusing():
            event()
        self.look()

    def pick(self) -> str | None:
        """Return an object of a step."""
        keys = sorted(key for key in self.bucket.objects if "/iter_" in key)
        return self.rng.choice(keys) if keys else None

    def remove(self) -> None:
        if (key := self.pick()) is not None:
            self.harm(key)
            del self.bucket.objects[key]

    def replace(self) -> None:
        if (key := self.pick()) is not None:
            self.harm(key)
            self.bucket.objects[key] = self.rng.randbytes(len(self.bucket.objects[key]))

    def change_tag(self) -> None:
        if self.bucket.objects:
            self.bucket.salts[self.rng.choice(sorted(self.bucket.objects))] = self.rng.randbytes(4)

    def show_past(self) -> None:
        self.bucket.listed = self.rng.choice(self.past[-40:])

    def refuse(self) -> None:
        """Refuse all writing for the rest of a session, or for a few requests."""
        some = self.rng.choice([3, 1_000_000]) + len(self.bucket.log)
        self.bucket.faults = lambda method, key: (
            403 if method == "PUT" and len(self.bucket.log) < some else None
        )

    def replace_tokens(self) -> None:
        new = self.rng.choice(self.versions)
        for key in self.rng.choice([list(new), list(new), [f"{DATA}.bin"], [f"{DATA}.idx"]]):
            self.bucket.objects[key] = new[key]

    def remove_owner(self) -> None:
        if self.rng.random() < 0.2:
            self.bucket.objects.pop(f"{RUN}/{lease.OWNER}", None)

    def write_as_another(self) -> None:
        """Write a whole step that is valid, without a lease."""
        if (key := self.pick()) is not None:
            number = int(Path(key).parent.name[5:])
            saved = make(number, self.rng.randbytes(64))
            self.made.append(saved)
            for name, data in {
                **dict.fromkeys(FILES, saved.content),
                manifests.MANIFEST: saved.manifest,
            }.items():
                self.harm(f"{RUN}/iter_{number:07d}/{name}")
                self.bucket.objects[f"{RUN}/iter_{number:07d}/{name}"] = data

    def take_over(self) -> None:
        """Let the other machine find the one at work without a heartbeat."""
        other = next(machine for machine in MACHINES if machine != self.at_work)
        before, asked = self.at_work, self.answered
        self.answered = set()
        self.session(other)
        self.at_work, self.answered = before, asked

    def harm(self, key: str) -> None:
        """Excuse steps of which storage has shown this object and is about to lose it."""
        if key in self.answered:
            for saved in [s for s in self.owed if f"/iter_{s.step:07d}/" in key]:
                self.owed.discard(saved)
                self.excused += 1

    # What must be so

    def is_kept(self, saved: Saved) -> bool:
        """Return whether a step can be read anywhere: its files may be here and there."""
        folder = f"{RUN}/iter_{saved.step:07d}"
        there = {
            name: self.bucket.objects.get(f"{folder}/{name}")
            for name in (*FILES, manifests.MANIFEST)
        }
        places = [there]
        for machine in MACHINES:
            for path in self.root(machine).glob(f"**/iter_{saved.step:07d}*"):
                here = {f.name: f.read_bytes() for f in path.iterdir()}
                places.append(there | here)
        wanted = dict.fromkeys(FILES, saved.content) | {manifests.MANIFEST: saved.manifest}
        return any(
            all(place.get(name) == data for name, data in wanted.items()) for place in places
        )

    @contextlib.contextmanager
    def excusing(self) -> Iterator[None]:
        """Excuse what the block takes the last copy of."""
        before = {saved for saved in self.owed if self.is_kept(saved)}
        yield
        lost = {saved for saved in before & self.owed if not self.is_kept(saved)}
        self.owed -= lost
        self.excused += len(lost)

    def check(self) -> None:
        for saved in self.owed:
            if not self.is_kept(saved):
                raise Silent(f"the last copy of step {saved.step} is gone")

    def tracked(self) -> int:
        """Return the step that storage says is the newest, if it is whole there."""
        number = int(self.bucket.objects.get(f"{RUN}/{steps.TRACKER}", b"0"))
        return number if any(s.step == number and self.is_there(s) for s in self.made) else 0

    def is_there(self, saved: Saved) -> bool:
        wanted = dict.fromkeys(FILES, saved.content) | {manifests.MANIFEST: saved.manifest}
        return all(
            self.bucket.objects.get(f"{RUN}/iter_{saved.step:07d}/{n}") == data
            for n, data in wanted.items()
        )

    # Sessions

    def run(self) -> None:
        """Run the sessions of a case."""
        self.bucket.objects |= self.versions[0]
        self.look()
        acts = [
            self.train,
            self.train,
            self.train,
            self.read_run,
            self.read_tokens,
            self.read_tokens,
            self.lose,
        ]
        for _ in range(self.rng.randrange(5, 10)):
            act = self.rng.choice(acts)
            act(self.rng.choice(MACHINES))
            self.bucket.listed, self.bucket.faults = None, lambda method, key: None
            self.check()

    def attempt(self, act: Callable[[], None]) -> str:
        """Run a process, which may be killed, and return how it ended."""
        self.answered.clear()
        self.left.append(self.rng.choice([1_000_000, 1_000_000, self.rng.randrange(1, 60)]))
        outcome = "ended well"
        try:
            act()
        except UserError as error:
            outcome = "refused"
            self.reasons[
                re.sub(r"\d+|[0-9a-f]{32}|process .*? since \S+ \S+ \S+", "N", str(error))[:150]
            ] += 1
            if not error.status or len(str(error)) < 10:
                raise Silent(f"a refusal without a status or reason: {error!r}") from error
        except Killed:
            outcome = "killed"
        finally:
            self.left.pop()
        self.outcomes[outcome] += 1
        return outcome

    def start(self, machine: str) -> Path:
        """Forget what another process would not know."""
        root = self.root(machine)
        self.at_work = machine
        store.forget()
        mirror.fetch.cache_clear()
        copies.sparse_copy.cache_clear()
        lease._held.pop(root, None)
        for path in [path for path in mirror._as_sent if path.is_relative_to(root)]:
            del mirror._as_sent[path]
        return root

    def train(self, machine: str) -> None:
        self.session(machine)

    def session(self, machine: str) -> None:
        root, events = self.start(machine), sum(self.events.values())

        def act() -> None:
            with mirror.leased(root):
                self.go_on(root)

        outcome = self.attempt(act)
        is_quiet = sum(self.events.values()) == events
        if outcome == "ended well" and is_quiet:
            if (root / "metrics.jsonl").read_bytes() != self.bucket.objects[f"{RUN}/metrics.jsonl"]:
                raise Silent("metrics.jsonl in storage is not as the run has left it")
            newest = steps.list_steps(root)[0]
            if not any(s.step == newest and self.is_there(s) for s in self.made):
                raise Silent(f"the run has ended well, and step {newest} is not in storage")

    def go_on(self, root: Path) -> None:
        """Load the newest step, and save a few more."""
        step = self.load(root)
        keep = self.rng.choice([None, 1, 2])
        sender = upload.Uploader(root, [])
        for number in range(step + 1, step + 1 + self.rng.randrange(1, 4)):
            saved = make(number, self.rng.randbytes(64))
            self.made.append(saved)
            publish.write_step(
                root, number, dict.fromkeys(FILES, functools.partial(pass_on, saved.content))
            )
            self.owed.add(saved)
            with open(root / "metrics.jsonl", "a") as file:
                file.write(f"{root.parts[-6]} {number} {self.rng.random()}\n")
            if keep:
                sender.removed += self.prune(root, number, keep)
            sender.send()
        sender.close()

    def prune(self, root: Path, newest: int, keep: int) -> list[int]:
        """Remove old steps as --keep-last does: nobody is owed these."""
        before = {
            step: steps.step_folder(root, step) / manifests.MANIFEST
            for step in steps.list_steps(root)
        }
        here = {step: path.read_bytes() for step, path in before.items() if path.exists()}
        try:
            damaged = publish.damaged_steps(root, newest)
            removed = publish.steps_to_remove(root, newest, keep, None, None, damaged)
            publish.remove_steps(root, removed)
            return removed
        finally:
            gone = set(here) - set(steps.list_steps(root))
            self.owed -= {
                saved
                for saved in self.owed
                if saved.step in gone and here[saved.step] == saved.manifest
            }

    def load(self, root: Path) -> int:
        expected, notes, events = self.tracked(), list[str](), sum(self.events.values())

        def use(location: steps.StepLocation, _: object) -> steps.StepLocation:
            manifest = manifests.verify_step(location.folder, full=True)
            for name, file in manifest.items():
                with manifests.VerifiedReader(location.folder / name, file) as reader:
                    content = bytes(reader.read(0, file.size))
                if not any(s.step == location.step and s.content == content for s in self.made):
                    raise Silent(f"step {location.step} holds what was never saved under its name")
            return location

        location, _ = loading.first_intact(root, use, report=notes.append)
        found = location.step if location else 0
        if sum(self.events.values()) == events and found < expected and not notes:
            raise Silent(
                f"step {found} was loaded without a word about step {expected}, which is in storage"
            )
        return found

    def read_run(self, machine: str) -> None:
        """Read the run on a machine that has never seen it."""
        root = self.start("reader")
        shutil.rmtree(self.folder / "reader", ignore_errors=True)
        outcome = self.attempt(lambda: self.load(root) and None)
        metrics = root / "metrics.jsonl"
        if (
            outcome == "ended well"
            and metrics.exists()
            and metrics.read_bytes() not in self.metrics
        ):
            raise Silent("metrics.jsonl is as it never was in storage")

    def read_tokens(self, machine: str) -> None:
        self.start(machine)
        prefix = addresses.localize(f"s3://bucket/{DATA}", str(self.folder / machine))
        if self.rng.random() < 0.2:
            self.lose_blocks(Path(f"{prefix}.bin"))

        def act() -> None:
            copies.prepare_tokens(prefix)
            indexed = Indexed(prefix)
            pieces = []
            for _ in range(8):
                if self.rng.random() < self.danger:
                    self.events["replace_tokens"] += 1
                    self.replace_tokens()
                    self.look()
                begin = self.rng.randrange(len(indexed.tokens))
                end = min(begin + self.rng.randrange(1, 600), len(indexed.tokens))
                indexed.need([(begin, end)])
                pieces.append((2 * begin, 2 * end, indexed.tokens[begin:end].tobytes()))
            header = (
                len(Path(f"{prefix}.idx").read_bytes())
                - 12 * len(indexed)
                - 8 * len(indexed.doc_idx)
            )
            for idx, binary in self.pairs:
                is_index = idx[header:].startswith(indexed.sizes.tobytes())
                if is_index and all(binary[begin:end] == piece for begin, end, piece in pieces):
                    return
            raise Silent("the token files that were read were never in storage together")

        self.attempt(act)

    def lose(self, machine: str) -> None:
        """Lose a disk, or blocks of token files in a crash, or copy a disk to the other machine."""
        other = next(name for name in MACHINES if name != machine)
        prefix = Path(addresses.localize(f"s3://bucket/{DATA}", str(self.folder / machine)))
        what = self.rng.choice(["disk", "blocks", "map", "copy"])
        self.events[f"lose {what}"] += 1
        binary = prefix.with_name(f"{prefix.name}.bin")
        with self.excusing():
            if what == "disk":
                shutil.rmtree(self.folder / machine, ignore_errors=True)
            elif what == "copy" and self.root(machine).exists():
                shutil.rmtree(self.folder / other, ignore_errors=True)
                shutil.copytree(self.folder / machine, self.folder / other)
            elif what == "map":
                copies.map_of(binary).unlink(missing_ok=True)
            elif what == "blocks":
                self.lose_blocks(binary)

    def lose_blocks(self, binary: Path) -> None:
        if binary.exists():
            size = binary.stat().st_size
            with open(binary, "r+b") as file:
                file.truncate(self.rng.randrange(size))
                file.truncate(size)
            self.starts += 1


def pass_on(content: bytes, write: publish.Write) -> None:
    write(content)


def make(step: int, content: bytes) -> Saved:
    file = manifests.File(len(content), manifests.sha256([content]))
    return Saved(step, content, manifests.encode_manifest(dict.fromkeys(FILES, file)))


def write_tokens(folder: Path, seed: int) -> dict[str, bytes]:
    """Return a pair of token files; those of all seeds have the same lengths."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    with Writer(str(folder / "text"), np.uint16) as writer:
        for length in rng.permutation([100, 400, 700, 800]):
            writer.add(rng.integers(0, 64, length))
            writer.end_document()
    return {f"{DATA}.{end}": (folder / f"text.{end}").read_bytes() for end in ("bin", "idx")}


@contextlib.contextmanager
def prepared() -> Iterator[Bucket]:
    """Serve a bucket to cases of this process, which wait for nothing."""
    with pytest.MonkeyPatch.context() as patch, serving_bucket(patch) as bucket:
        patch.setattr(lease, "DURATION", 0.0)
        patch.setattr(lease, "BEAT", 1e6)
        patch.setattr(copies, "BLOCK", BLOCK)
        patch.setattr(copies, "THREADS", 1)
        console.set_stream(None)
        try:
            yield bucket
        finally:
            console.set_stream("stdout")


def run_case(bucket: Bucket, seed: int, number: int) -> World:
    """Run a case; raise Silent, or what no process should end with."""
    bucket.objects, bucket.salts, bucket.listed = {}, {}, None
    bucket.faults = lambda method, key: None
    with tempfile.TemporaryDirectory(prefix="storage") as name:
        world = World(bucket, Path(name).resolve(), random.Random(f"{seed}/{number}"))
        ask = functools.partialmethod(lambda objects, *words: world.ask(objects, *words))
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(store.BucketObjects, "ask", ask))
            stack.enter_context(patch.object(publish, "crash_point", world.count_down))
            stack.enter_context(patch.object(copies, "boot_id", lambda: f"{world.starts}"))
            world.run()
    return world


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.storage", description=__doc__)
    parser.add_argument(
        "--cases", type=int, default=200, help="how many cases to run (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default %(default)s)")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first case (default %(default)s)"
    )
    given = parser.parse_args(argv)
    events, outcomes, reasons, silent, excused = (
        Counter[str](),
        Counter[str](),
        Counter[str](),
        0,
        0,
    )
    began = time.monotonic()
    with prepared() as bucket:
        for number in range(given.first, given.first + given.cases):
            try:
                world = run_case(bucket, given.seed, number)
            except Exception as error:
                silent += 1
                print(f"case {number}: {type(error).__name__}: {error}; to repeat it:", flush=True)
                print(
                    f"PYTHONPATH=src:tests python -m fuzz.storage --seed {given.seed} --first {number} --cases 1"
                )
                continue
            events, outcomes, excused = (
                events + world.events,
                outcomes + world.outcomes,
                excused + world.excused,
            )
            reasons += world.reasons
    for reason, n in reasons.most_common():
        print(f"refused {n} times: {reason}")
    print("events: " + ", ".join(f"{name} {n}" for name, n in sorted(events.items())))
    print("sessions: " + ", ".join(f"{name} {n}" for name, n in sorted(outcomes.items())))
    print(f"steps whose last copy an event took: {excused}; {time.monotonic() - began:.0f} s")
    print(f"storage seed={given.seed} cases={given.cases} silent={silent}")
    return int(silent > 0)


if __name__ == "__main__":
    sys.exit(main())
