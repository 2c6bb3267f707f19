"""Name the rank that hangs and end the run: each rank watches itself, a waiting one the others.

A rank that is stopped, loops, or waits for what never comes leaves all others waiting in their next
collective, for as long as torch's time-out says, and then torch names a rank that only waited. Here
a thread of each rank writes a heartbeat to the run's store every few seconds: where its rank is
(heartbeat.py), for how long it has made no progress, and whether it stays in one call that may wait
for other ranks.

A rank that has waited for half of --distributed-timeout-minutes begins to read the others' signs.
If it has waited for all of that time, and no rank made progress meanwhile, it decides which one
hangs: a rank without new signs; else one that does not wait; else the one that is behind the
others. All ranks read this verdict, write their stacks and end with status 75. While a rank makes
progress, the others wait for it as long as it takes.

Threads run while the training waits in C++, but not while a C++ call holds Python's lock, nor in a
stopped process: neighbours on the same machine wake such a rank, have it print its stacks by a
signal, and then end it.

Hand-written because torch's time-outs (and NCCL's own watchdog) fire on the ranks that wait, so
they name a victim, and end a run in which one rank is only slow. faulthandler's timer, a C thread
that needs no lock, could end a rank in a C++ call, but not one that SIGSTOP has stopped.
"""

from __future__ import annotations

import contextlib
import dis
import faulthandler
import json
import linecache
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from meshwright.base.errors import HANG
from meshwright.base.files import own_file
from meshwright.runtime.ranks import heartbeat as heartbeats
from meshwright.runtime.ranks import team
from meshwright.runtime.ranks.compare import format_ranks
from meshwright.runtime.ranks.connect import find_missing
from meshwright.runtime.ranks.heartbeat import PHASES, Heartbeat
from meshwright.runtime.ranks.team import Team
from meshwright.runtime.ranks.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SIGN_SECONDS = 2.0  # between two heartbeats; less if the time-out is short
MOST_READERS = 8  # ranks that read all others' signs at once
EXIT_SECONDS = 2.0  # from the verdict to the end, in which its text and all stacks are written
LISTED_CALLS = 4  # in a verdict
# The first prints the stacks, without Python's lock; the second lets a woken process leave. The
# lower number is delivered first.
WAKING_SIGNALS: tuple[int, ...] = (59, 60) if sys.platform.startswith("linux") else ()

# A call that stays on such a line, or in the standard library, waits for something else than ranks.
INPUT = re.compile(
    r"\b(read|readinto|open|input|sleep|select|poll|urlopen|fsync|acquire|join|result)\w*\("
)
LIBRARY = os.path.dirname(os.__file__)
# Every exchange of small values waits in the same few lines, so who asked for it says more.
TEAM = team.__file__
# Files whose calls are on the stack only while kernels are being made.
COMPILERS = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/graph.py",
    "/triton/compiler/",
    "/autotuner.py",
)


class Sign(NamedTuple):
    """A heartbeat: where a rank is, for the others."""

    number: int = 0  # of its signs so far
    phase: str = PHASES[0]
    doing: str = PHASES[0]  # phase and step in words
    step: int = 0
    still: float = 0.0  # seconds without progress
    waiting: float = 0.0  # seconds in one call that may wait for other ranks
    call: str = ""  # as file:line in function
    is_busy: bool = False  # whether it spends the processor's time there

    @property
    def position(self) -> tuple[int, int]:
        return self.step, PHASES.index(self.phase)

    def __str__(self) -> str:
        return f"{self.doing}, at {self.call}"


Post = tuple[int, float, float]  # iteration, own milliseconds of a step, of which it waits for data


class Identity(TypedDict):
    host: str
    pid: int
    started: str  # tells a process from a later one of the same number
    # the file descriptor of a file in memory: its phase, then what the first of WAKING_SIGNALS
    # prints
    stacks: int
    obeys: bool  # whether the second one lets it leave


class HangVerdict(TypedDict):
    text: str
    silent: list[int]  # ranks without a heartbeat
    printers: list[int]  # one rank of each machine
    who: dict[str, Identity]  # of the silent ones


class Watchdog:
    """Watches the rank whose thread makes it."""

    def __init__(
        self,
        world: World,
        store: Store,
        minutes: float,
        heartbeat: Heartbeat = heartbeats.heartbeat,
    ) -> None:
        self.world = world
        self.store = store
        self.heartbeat = heartbeat
        self.minutes = minutes
        self.limit = 60 * minutes
        self.every = min(SIGN_SECONDS, self.limit / 20)
        # of a rank that gives no sign
        self.quiet = max(self.limit / 4, min(2.0, 0.45 * self.limit))
        self.thread = threading.get_ident()
        self.folder: Path | None = None  # for the stacks
        # gets the reason before the process is ended
        self.record: Callable[[str], Any] = lambda text: None
        self.stopping = threading.Event()
        now = time.monotonic()
        self.ticks = -1
        self.position = (0, 0, 0)
        self.moved = self.entered = self.looked = self.answered = now
        self.woken = -EXIT_SECONDS  # when this process was found to have been stopped
        self.used = 0.0  # the processor's time of the training's thread when it entered its call
        self.sign = Sign(0, heartbeat.phase, str(heartbeat), heartbeat.step)
        self.wants_to_read = False
        # by rank: its last sign, and when it was new
        self.others: dict[int, tuple[Sign | None, float]] = {}
        self.verdict: HangVerdict | None = None
        self.compared = -1  # the iteration of the posts that were exchanged last
        self.own_post: Post | None = None
        # what all have posted, with their machines
        self.board: list[tuple[str, int, float, float]] | None = None
        self.stacks = -1
        self.obeys = False
        if WAKING_SIGNALS and hasattr(os, "memfd_create"):
            # This file is in memory: a neighbour can read it whatever has happened to the disk.
            self.stacks = os.memfd_create(f"stacks-{world.rank}")
            os.lseek(self.stacks, heartbeats.PHASE_BYTES, os.SEEK_SET)
            heartbeat.shown_in = self.stacks
            faulthandler.register(WAKING_SIGNALS[0], self.stacks, all_threads=True, chain=False)
            self.obeys = threading.current_thread() is threading.main_thread()
        if self.obeys:
            signal.signal(WAKING_SIGNALS[1], self.leave_woken)
        self.first: Identity | None = None  # rank 0's
        # The judge must not wait for the store, which may be gone.
        acts = {"watchdog": self.judge, "heartbeats": self.exchange}
        self.threads = [
            threading.Thread(target=act, name=name, daemon=True) for name, act in acts.items()
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(2)
        self.record = lambda text: None  # frees the training
        self.heartbeat.shown_in = -1
        if self.obeys:
            signal.signal(WAKING_SIGNALS[1], signal.SIG_DFL)
        if self.stacks >= 0:
            faulthandler.unregister(WAKING_SIGNALS[0])
            os.close(self.stacks)

    # Heartbeats

    def exchange(self) -> None:
        """Tell the store where this rank is; read the verdict and, in a wait, the others' signs."""
        rank = self.world.rank
        is_reader = False
        is_known = False
        pause = 0.0
        pid = os.getpid()
        me = Identity(
            host=socket.gethostname(),
            pid=pid,
            started=started(pid),
            stacks=self.stacks,
            obeys=self.obeys,
        )
        while not self.stopping.wait(pause) and self.verdict is None:
            # the store is gone, or does not answer for a moment
            with contextlib.suppress(RuntimeError):
                if not is_known:
                    self.store.set(f"who/{rank}", json.dumps(me))
                    is_known = True
                self.store.set(f"sign/{rank}", json.dumps(self.sign))
                if self.first is None and self.store.check(["who/0"]):
                    self.first = json.loads(self.store.get("who/0"))
                if self.wants_to_read != is_reader:
                    # Few ranks read all signs at once, for the store's sake; one verdict is enough.
                    readers = self.store.add("readers", 1 if self.wants_to_read else -1)
                    is_reader = self.wants_to_read and readers <= MOST_READERS
                    if self.wants_to_read and not is_reader:
                        self.store.add("readers", -1)
                if is_reader:
                    self.read_others()
                if is_reader and self.sign.waiting > self.limit and (verdict := self.decide()):
                    # The first verdict counts, whoever comes to it.
                    self.store.compare_set("verdict", "", json.dumps(verdict))
                self.exchange_posts()
                if self.store.check(["verdict"]):
                    self.verdict = json.loads(self.store.get("verdict"))
                self.answered = time.monotonic()
            # Near the time-out a rank looks more often, so that all end soon after the verdict.
            pause = self.every if self.sign.waiting < self.limit / 2 else min(self.every, 1.0)

    def read_others(self) -> None:
        now = time.monotonic()
        signs = self.read_all("sign")
        for rank in range(self.world.size):
            sign = Sign(*signs[rank]) if rank in signs else None
            before = self.others.get(rank)
            # A sign is new if it differs at all: its number grows with each.
            if before is None or before[0] != sign:
                self.others[rank] = sign, now

    def read_all(self, key: str) -> dict[int, Any]:
        """Return what the ranks have written under a key, by rank."""
        # To get a key that nobody has set would wait for it.
        missing = set(find_missing(self.store, key, 0, self.world.size))
        ranks = [rank for rank in range(self.world.size) if rank not in missing]
        texts = self.store.multi_get([f"{key}/{rank}" for rank in ranks])
        found = {}
        for rank, text in zip(ranks, texts, strict=True):
            found[rank] = json.loads(text)
        return found

    # Posts: times of steps (training/health/stragglers.py), on the way to rank 0

    def post(self, values: Post) -> None:
        """Have this rank's iteration, own milliseconds and wait for data taken to rank 0."""
        self.own_post = values

    def take_board(self) -> list[tuple[str, int, float, float]] | None:
        """Return what all ranks have newly posted, on rank 0; None if there is nothing new."""
        board = self.board
        self.board = None
        return board

    def exchange_posts(self) -> None:
        own = self.own_post
        if own is None or own[0] <= self.compared:
            return
        self.store.set(f"post/{self.world.rank}", json.dumps(own))
        if self.world.rank:
            self.compared = own[0]
            return
        # Rank 0 compares when a new post of every rank is there.
        ranks = range(self.world.size)
        if not self.store.check([f"post/{rank}" for rank in ranks]):
            return
        posts = self.read_all("post")
        times = [at for at, _, _ in posts.values()]
        if min(times) > self.compared:
            self.compared = max(times)
            who = self.read_all("who")
            self.board = [(who[rank]["host"], *posts[rank]) for rank in ranks]

    # The judge

    def judge(self) -> None:
        while not self.stopping.wait(min(self.every, 1.0)):
            self.watch_training()
            if self.verdict is not None:
                self.end(self.verdict)
            waiting = self.sign.waiting
            self.wants_to_read = waiting > self.limit / 2
            if not self.wants_to_read:
                self.others.clear()
            elif waiting > self.limit and time.monotonic() - self.answered > self.quiet:
                self.end(self.without_store())

    def watch_training(self) -> None:
        """See where the training's thread is, and since when."""
        now = time.monotonic()
        ticks = self.heartbeat.ticks
        # This thread itself did not run for so long: the process had been stopped.
        if now - self.looked > self.quiet:
            self.woken = self.entered = now
        self.looked = now
        frame = sys._current_frames().get(self.thread)
        if frame is None:
            return
        position = (ticks, id(frame), frame.f_lasti)
        # A compiler makes no ticks, and may take minutes.
        if ticks != self.ticks or is_compiling(frame):
            self.ticks = ticks
            self.moved = now
        used = thread_time(self.thread)
        if position != self.position:
            self.position = position
            self.entered = now
            self.used = used
        # Data come from this rank's own processes and disks.
        waits = self.heartbeat.phase != "data" and may_wait_for_ranks(frame)
        waiting = min(now - self.entered, now - self.moved) if waits else 0.0
        self.sign = Sign(
            number=self.sign.number + 1,
            phase=self.heartbeat.phase,
            doing=str(self.heartbeat),
            step=self.heartbeat.step,
            still=round(now - self.moved, 3),
            waiting=round(waiting, 3),
            call=describe_frame(frame),
            is_busy=used - self.used > 0.5 * (now - self.entered),
        )

    def decide(self) -> HangVerdict | None:
        """Return the verdict, or None while some rank makes progress."""
        now = time.monotonic()
        if len(self.others) < self.world.size:
            return None  # nothing was read yet
        signs = {rank: sign for rank, (sign, _) in self.others.items()}
        silent = [
            rank
            for rank, (sign, since) in self.others.items()
            if sign is None or now - since > self.quiet
        ]
        live = {
            rank: sign for rank, sign in signs.items() if sign is not None and rank not in silent
        }
        if any(sign.still < 0.9 * self.limit for sign in live.values()):
            return None
        named = silent
        why = "no heartbeat: stopped, without its machine, or in a call that holds Python's lock"
        if not named:
            active = {rank: sign for rank, sign in live.items() if sign.waiting < self.limit / 2}
            if not active and not all(sign.is_busy for sign in live.values()):
                active = {rank: sign for rank, sign in live.items() if sign.is_busy}
            last = min(sign.position for sign in (active or live).values())
            named = [rank for rank, sign in (active or live).items() if sign.position == last]
            why = "no progress" if active else "it waits too, but is behind the others"
            if len(named) == self.world.size:
                why = "all ranks wait for one another"
        who: dict[int, Identity] = self.read_all("who")
        for rank in silent:  # its last sign may be older than what it does
            doing = read_phase(who[rank]) if rank in who else ""
            before = signs[rank] or Sign()
            signs[rank] = before._replace(
                doing=doing or before.doing, call="a place that its stacks show"
            )
        # The lowest live rank of each machine prints.
        printers = {}
        for rank in sorted(live, reverse=True):
            printers[who[rank]["host"] if rank in who else ""] = rank
        text = self.describe(
            signs, named, why, {rank: identity["host"] for rank, identity in who.items()}
        )
        named_who = {str(rank): who[rank] for rank in silent if rank in who}
        return HangVerdict(
            text=text, silent=silent, printers=sorted(printers.values()), who=named_who
        )

    def describe(
        self, signs: dict[int, Sign | None], named: list[int], why: str, hosts: dict[int, str]
    ) -> str:
        def places(ranks: list[int], verb: str = "") -> str:
            by_sign: dict[str, list[int]] = {}
            for rank in ranks:
                by_sign.setdefault(str(signs[rank]), []).append(rank)
            texts = []
            for sign, same in by_sign.items():
                texts.append(f"{name_ranks(same, hosts)}{verb} in {sign}")
            if len(texts) > LISTED_CALLS:
                texts[LISTED_CALLS:] = ["..."]
            return "; ".join(texts)

        others = [rank for rank in signs if rank not in named]
        whom = "it" if len(named) == 1 else "them"
        waited = "nothing moved"
        if others:
            waited = f"the others waited {self.limit:.0f} s for {whom}: {places(others)}"
        hang = places(named, " hangs" if len(named) == 1 else " hang")
        stacks = self.folder / "stacks-rank*.txt" if self.folder else "below"
        return (
            f"{hang} ({why}); {waited} (--distributed-timeout-minutes {self.minutes:g}); "
            f"stacks: {stacks}"
        )

    def without_store(self) -> HangVerdict:
        """Return the verdict of a rank that cannot ask the others."""
        where = f"{self.world.address}:{self.world.port}"
        quiet = time.monotonic() - self.answered
        # rank 0 is on this machine, but stopped
        first = int(self.world.rank == self.world.local_rank)
        text = (
            f"rank {self.world.rank} in {self.sign} has waited {self.sign.waiting:.0f} s "
            f"(--distributed-timeout-minutes {self.minutes:g}), and the store at {where}, of rank 0 or of the launcher "
            f"there, has not answered for {quiet:.0f} s: that process hangs, or the network is down"
        )
        prints = self.world.local_rank == min(first, self.world.local_size - 1)
        who = {}
        if self.first is not None and is_stopped(self.first):
            who["0"] = self.first
            text = f"rank 0 hangs in {read_phase(self.first)} (its process is stopped): {text}"
        return HangVerdict(
            text=text, silent=[], printers=[self.world.rank] if prints else [], who=who
        )

    # The end

    def is_ending(self) -> bool:
        """Return whether the watchdog is about to end this process.

        Its report then replaces the training's error: a process that was stopped until now may
        learn first that the others are gone.
        """
        now = time.monotonic()
        if now - self.looked > self.quiet or now - self.woken < EXIT_SECONDS:
            time.sleep(2 * self.every)
        return self.verdict is not None

    def end(self, verdict: HangVerdict) -> None:
        """Write the verdict and this rank's stacks, and end the process."""
        self.verdict = verdict
        until = time.monotonic() + EXIT_SECONDS * (time.monotonic() - self.woken > EXIT_SECONDS)
        until += 0.5 * (self.world.rank == 0)  # it may serve the store
        prints = self.world.rank in verdict["printers"]
        if prints:
            write_text(2, f"meshwright train: error: {verdict['text']}\n")
        self.dump(prints)
        # The record may go to a disk or a network that hangs as well.
        reporting = threading.Thread(target=self.record, args=(verdict["text"],), daemon=True)
        reporting.start()
        if prints:
            for rank, who in verdict["who"].items():
                self.wake(int(rank), who)
        reporting.join(max(until - time.monotonic(), 0))
        time.sleep(max(until - time.monotonic(), 0))
        if time.monotonic() - self.woken < EXIT_SECONDS:
            self.leave_woken()
        os._exit(HANG)

    def leave_woken(self, *_: object) -> None:
        """End this process once the stacks that a neighbour asked for are written."""
        if self.stacks >= 0:
            wait_for_stacks(self.stacks, tries=10, pause=0.1)
        os._exit(HANG)

    def dump(self, prints: bool) -> None:
        """Write the stacks of all threads into the run's folder, or to stderr if there is none."""
        head = (
            f"rank {self.world.rank}, process {os.getpid()} on {socket.gethostname()}: {self.sign}\n"
            f"the training's thread is 0x{self.thread:016x}\n"
        )
        fd = 2
        with contextlib.suppress(OSError):
            if self.folder is not None and self.folder.is_dir():
                fd = own_file(
                    stacks_of(self.folder, self.world.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                )
        if fd == 2 and not prints and self.sign.waiting > self.limit / 2:
            return  # it waits as the one that prints does
        write_text(fd, head)
        faulthandler.dump_traceback(fd, all_threads=True)
        if fd != 2:
            os.close(fd)

    def wake(self, rank: int, who: Identity) -> None:
        """Have a silent neighbour write its stacks and end; else kill it."""
        pid = who["pid"]
        with contextlib.suppress(OSError):
            if not is_neighbour(who):
                return
            # Open it by its descriptor: the file has no name.
            with open(f"/proc/{pid}/fd/{who['stacks']}", errors="replace") as memory:
                for number in WAKING_SIGNALS if who["obeys"] else WAKING_SIGNALS[:1]:
                    os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)
                wait_for_stacks(memory.fileno(), tries=6, pause=0.5)
                text = f"rank {rank}, process {pid} on {who['host']}\n{memory.read()[heartbeats.PHASE_BYTES :]}"
            if self.folder is not None and self.folder.is_dir():
                with open(stacks_of(self.folder, rank), "w", opener=own_file) as file:
                    file.write(text)
            else:
                write_text(2, text)
            for _ in range(25):  # it first waits for its own stacks
                time.sleep(0.1)
                if not is_neighbour(who):
                    return
            # Our own launcher kills it a little later, and knows that the run failed before.
            if self.world.launcher != "meshwright launch":
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def watched(
    world: World, team: Team, minutes: float, folder: str | None
) -> Iterator[Watchdog | None]:
    """Watch this rank during the block; one process alone waits for nobody."""
    if team.store is None:
        yield None
        return
    from torch._C._distributed_c10d import PrefixStore

    store = PrefixStore("watchdog", team.store.clone())  # type: ignore[attr-defined]  # on its own connection
    watchdog = Watchdog(world, store, minutes)
    watchdog.folder = Path(folder) if folder else None
    try:
        yield watchdog
    except Exception:
        if watchdog.is_ending():
            threading.Event().wait(30)  # its thread reports, and ends the process
        raise
    finally:
        watchdog.stop()


def stacks_of(folder: Path, rank: int) -> Path:
    return folder / f"stacks-rank{rank}.txt"


def started(pid: int) -> str:
    """Return what only this process has: its PID's namespace and start time; "" if it is gone."""
    try:
        space = os.readlink(f"/proc/{pid}/ns/pid")
        # The name of the program may hold spaces and brackets; the fields follow its last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{space} {fields[19]}"


def is_neighbour(who: Identity) -> bool:
    """Return whether the process is on this machine, and still the one that it was."""
    return who["host"] == socket.gethostname() and started(who["pid"]) == who["started"]


def is_stopped(who: Identity) -> bool:
    """Return whether this is a process of this machine that SIGSTOP or a debugger has stopped."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{who['pid']}/stat")
        return is_neighbour(who) and stat.read_text().rpartition(") ")[2][:1] in "Tt"
    return False


def read_phase(who: Identity) -> str:
    """Return what a process of this machine says of its phase in its memory."""
    with contextlib.suppress(OSError):
        if is_neighbour(who):
            memory = Path(f"/proc/{who['pid']}/fd/{who['stacks']}").read_text(errors="replace")
            return memory[: heartbeats.PHASE_BYTES].strip(" \0")
    return ""


def wait_for_stacks(fd: int, tries: int, pause: float) -> None:
    """Wait until a file in memory holds all stacks: until it grows no more."""
    size = -1
    for _ in range(tries):
        before = size
        size = os.fstat(fd).st_size
        if heartbeats.PHASE_BYTES < size == before:
            return
        time.sleep(pause)


def thread_time(thread: int) -> float:
    """Return the seconds of the processor's time that a thread has used."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):
        return 0.0


def write_text(fd: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, text.encode(errors="backslashreplace"))


def name_ranks(ranks: list[int], hosts: dict[int, str]) -> str:
    if len(ranks) != 1:
        return f"ranks {format_ranks(ranks)}"
    (rank,) = ranks
    return f"rank {rank} ({hosts[rank]})" if rank in hosts else f"rank {rank}"


def callers(frame: FrameType) -> Iterator[FrameType]:
    """Yield a frame and those that called it, from the innermost on."""
    at: FrameType | None = frame
    while at is not None:
        yield at
        at = at.f_back


def describe_frame(frame: FrameType) -> str:
    """Return the innermost call that is not torch's, the standard library's or the team's."""
    at = frame
    for caller in callers(frame):
        file = caller.f_code.co_filename
        if "/torch/" not in file and not is_library(file) and file != TEAM:
            at = caller
            break
    code = at.f_code
    return f"{os.path.basename(code.co_filename)}:{at.f_lineno} in {code.co_name}"


def is_library(file: str) -> bool:
    return (file.startswith(LIBRARY) and "-packages" not in file) or file.startswith("<frozen")


def may_wait_for_ranks(frame: FrameType) -> bool:
    """Return whether a call that does not return may wait for ranks, not for files or threads.

    A loop in Python is no call: a thread that looks at it finds it at a jump or at a call's begin.
    On an accelerator it may be any call that submits work, because the device's queue is bounded.
    """
    file = frame.f_code.co_filename
    at = dis.opname[frame.f_code.co_code[max(frame.f_lasti, 0)]]
    # Python gives way to other threads at jumps and where a function begins: a loop is found there.
    if "JUMP" in at or "RESUME" in at:
        return False
    if "/torch/" in file:
        return True
    return not is_library(file) and not INPUT.search(linecache.getline(file, frame.f_lineno))


def is_compiling(frame: FrameType) -> bool:
    return any(name in at.f_code.co_filename for at in callers(frame) for name in COMPILERS)
