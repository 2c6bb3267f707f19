"""Copy the steps of a run to its address, in the background, while the run goes on.

A step's files are sent first and its manifest last, so a step in storage is complete or it does not
exist. SENT lists what is there: after a kill, a file that was sent in full is not sent again.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from meshwright.checkpoint import mirror, publish
from meshwright.checkpoint.lease import OWNER, confirm, read_owner
from meshwright.checkpoint.manifests import MANIFEST, Manifest, read_manifest, sha256
from meshwright.checkpoint.steps import TRACKER, list_steps, step_folder
from meshwright.console import notice, remark
from meshwright.errors import IO, LOCKED, UserError
from meshwright.ranks.pulse import pulse
from meshwright.ranks.team import ALONE, Team
from meshwright.storage.addresses import address_of
from meshwright.storage.copies import read_note, write_note
from meshwright.storage.store import locate

SENT = ".sent.json"
RECEIPT = ".sent-by-rank-"  # begins the name of an object in a step that is not complete
PATIENCE = 1800.0  # seconds in which other machines send their files of a step
LOOK = 1.0  # seconds between looks for their receipts
SOON = 2.0  # seconds of waiting that need no explanation


class Uploader:
    """Sends what a run has saved, by one thread of rank 0.

    `others` are folders of the run without steps. Before each change the thread confirms that no
    other run has taken the address over.

    If machines do not share the folder, as `users` says, the first rank of each sends what is
    there, and then a receipt for the step; rank 0 waits for all receipts before the manifest.
    """

    def __init__(self, root: Path, others: list[Path], team: Team = ALONE, users: publish.Users = ()) -> None:
        self.root, self.others, self.rank = root, others, team.rank
        self.senders = sorted({0, *users})
        self.saved: int | None = None  # the step that other machines are sending too
        self.owner = ""  # the process that writes to the address
        self.removed: list[int] = []  # steps that are not here any more, but perhaps in storage
        self.pool = ThreadPoolExecutor(1, "upload")
        self.flying: Future[None] | None = None

    def begin(self, saved: int, removed: list[int]) -> None:
        """Send all steps that storage lacks, then remove steps there. Nothing may be in flight."""
        assert self.flying is None
        self.saved = saved
        self.removed += removed
        self.flying = self.pool.submit(self.send)

    def send(self) -> None:
        for step in reversed(list_steps(self.root)):
            self.send_step(step)
        if self.rank:
            for step in self.removed:
                shutil.rmtree(step_folder(self.root, step), ignore_errors=True)
        else:
            self.send_files()
            self.remove(self.removed)
        self.removed.clear()

    def wait(self) -> None:
        """Wait until nothing is sent any more, with signs of life for ranks that wait for this."""
        began, is_explained = time.monotonic(), False
        while self.flying is not None and not self.flying.done():
            time.sleep(0.01)
            pulse.tick()
            if not is_explained and time.monotonic() - began > SOON:
                remark(f" > waiting for the upload to {address_of(self.root)}")
                is_explained = True

    def end(self) -> None:
        """Wait, and raise the failure of what was sent."""
        self.wait()
        flying, self.flying = self.flying, None
        if flying is not None:
            flying.result()

    def close(self) -> None:
        self.pool.shutdown()
        if self.flying is not None and (failure := self.flying.exception()):
            notice(f"the upload in flight failed: {failure}")

    def send_step(self, step: int) -> None:
        """Send a step that storage lacks: its files, then its manifest."""
        folder, sent = step_folder(self.root, step), read_note(self.root / SENT)
        store, key = locate(folder)
        if not (folder / MANIFEST).exists():
            return
        manifest, raw = read_manifest(folder), (folder / MANIFEST).read_bytes()
        if sent.get(f"{folder.name}/{MANIFEST}") == sha256([raw]):
            return
        here = {name: file for name, file in manifest.items() if (folder / name).exists()}
        if len(here) < len(manifest) and (step != self.saved or len(self.senders) == 1):
            return  # it was read from storage
        self.confirm()
        there = store.entries(key)
        before = store.get(f"{key}/{MANIFEST}") if MANIFEST in there else None
        if before is None or before[0] != raw:
            if not self.rank:
                others = [name for name in there if name not in manifest and not name.startswith(RECEIPT)]
                store.delete([f"{key}/{name}" for name in sorted(others, key=lambda name: name != MANIFEST)])
            for name, file in here.items():
                known = sent.get(f"{folder.name}/{name}")
                if known is None or name not in there or known != [file.sha256, there[name].tag]:
                    self.confirm()
                    publish.crash_point("before_file")
                    sent[f"{folder.name}/{name}"] = [file.sha256, store.put(f"{key}/{name}", folder / name)]
                    write_note(self.root / SENT, sent)
            self.publish(step, manifest, raw)
        publish.crash_point("after_manifest")
        sent[f"{folder.name}/{MANIFEST}"] = sha256([raw])
        write_note(self.root / SENT, sent)
        if not self.rank:
            store.put(f"{locate(self.root)[1]}/{TRACKER}", str(step).encode())
            remark(f" > uploaded step {step:,} to {address_of(self.root)}")
        self.thin(step, sent)

    def publish(self, step: int, manifest: Manifest, raw: bytes) -> None:
        """Put the manifest of a step whose files this machine has sent; other ranks, a receipt."""
        store, key = locate(step_folder(self.root, step))
        receipt = sha256([raw, self.owner.encode()]).encode()  # of this start of the run alone
        if self.rank:
            store.put(f"{key}/{RECEIPT}{self.rank}", receipt)
            return
        self.send_files()  # the rows of metrics.jsonl before this step
        lacking = [f"{key}/{RECEIPT}{rank}" for rank in self.senders[1:]]
        until = time.monotonic() + PATIENCE
        while lacking and any((store.get(name) or [None])[0] != receipt for name in lacking):
            if time.monotonic() > until:
                raise UserError(f"another machine has not sent its files of step {step:,} for {PATIENCE:.0f} s", IO)
            time.sleep(LOOK)
        there = store.entries(key)
        if wrong := [name for name, file in manifest.items() if name not in there or there[name].size != file.size]:
            raise UserError(f"{store.bucket}/{key}/{wrong[0]} is not there, or of another size than was sent", IO)
        self.confirm()
        publish.crash_point("before_manifest")
        store.put(f"{key}/{MANIFEST}", raw)
        store.delete(lacking)

    def confirm(self) -> None:
        """Refuse to go on if another run has taken the address over, since this one began."""
        if not self.rank:
            confirm(self.root)
            self.owner = str(read_note(self.root / OWNER).get("process"))
            return
        owner = read_owner(*locate(self.root))
        self.owner = self.owner or (owner["process"] if owner else "")
        if owner is None or owner["process"] != self.owner:
            raise UserError(f"{address_of(self.root)} was taken over by another run", LOCKED)

    def send_files(self) -> None:
        self.confirm()
        for root in (self.root, *self.others):
            mirror.send_files(root)

    def thin(self, newest: int, sent: dict[str, object]) -> None:
        """Remove the files of older steps, which storage has, from this machine."""
        for step in list_steps(self.root):
            folder = step_folder(self.root, step)
            if step < newest and f"{folder.name}/{MANIFEST}" in sent and self.is_there(folder):
                for path in folder.iterdir():
                    if path.name != MANIFEST:
                        path.unlink(missing_ok=True)

    def is_there(self, folder: Path) -> bool:
        """Return whether storage has a step, of which this machine has sent its files."""
        store, key = locate(folder)
        return not self.rank or store.entry(f"{key}/{MANIFEST}") is not None

    def remove(self, steps: list[int]) -> None:
        """Remove steps that are not here from storage, their manifests first."""
        sent = read_note(self.root / SENT)
        for step in set(steps) - set(list_steps(self.root)):
            confirm(self.root)
            folder = step_folder(self.root, step)
            store, key = locate(folder)
            names = sorted(store.entries(key), key=lambda name: name != MANIFEST)
            store.delete([f"{key}/{name}" for name in names])
            sent = {name: value for name, value in sent.items() if not name.startswith(f"{folder.name}/")}
        write_note(self.root / SENT, sent)
