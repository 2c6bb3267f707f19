"""The machines of an elastic run: they meet, are missed, come back, and run on what is there.

Each machine writes one record to the store on machine 0, with a beat every second. Machine 0 alone
reads the records, decides who runs, and writes its decision under one key, which all machines read.
So a machine that comes late, or again, needs to know nothing of the past. Without machine 0 none
can meet: its end is the end of the attempt.

Hand-written because torch's DynamicRendezvousHandler takes any number of machines between two
bounds: it knows neither which numbers of ranks the command can run on nor why a machine left, so
that it could not say "machine 2 was lost; going on with 3 of 4 ranks".
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from meshwright.base import device as devices
from meshwright.base import host
from meshwright.base.console import no_stderr
from meshwright.base.errors import DONE, HANG, SIGINT, SIGTERM, UNAVAILABLE
from meshwright.runtime.launch import agent, elastic
from meshwright.runtime.launch.agent import (
    GRACE_SECONDS,
    LOST,
    PASSED_SIGNALS,
    STOPPED,
    describe_end,
    exit_status,
    find_cause,
    is_final,
    say,
)
from meshwright.runtime.launch.launcher import LaunchPlan
from meshwright.runtime.ranks import connect
from meshwright.runtime.ranks.compare import format_ranks
from meshwright.runtime.ranks.world import ATTEMPT, RUN_ID

POLL_SECONDS = 0.2  # between two looks at the decision, and at the machines
BEAT_SECONDS = 1.0  # between the beats of a machine
SILENT_SECONDS = 10.0  # without a beat, after which a machine is lost
LISTED = 8  # changes that a line names
# For which a machine is there before the others make room: several may come together.
SETTLE_SECONDS = 2.0
# The states of a machine.
FREE = "free"
RUNNING = "running"
FINISHED = "finished"
GONE = "gone"
T = TypeVar("T")


class RunOver(Exception):
    """The end of the run, as machine 0 decided it."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


def launch_elastic(plan: LaunchPlan, program: list[str]) -> int:
    """Start the ranks of this machine whenever it has a part in the run; return the status."""

    def leave(number: int, _: object) -> None:
        raise SignalException(f"signal {number}", signal.Signals(number))

    # A spare has no ranks, with which torch would do this.
    with host.handled(PASSED_SIGNALS, leave):
        try:
            return agent.launch_ranks(plan, program, ElasticAgent)
        except SignalException as error:  # while it had no ranks
            return agent.status_of_signal(error.sigval)
        except RunOver as over:
            say(str(over))
            return over.status


@dataclass
class MachineRecord:
    """A machine as machine 0 sees it."""

    id: int = 0  # how often a launcher came as this machine
    ranks: int = 0  # that it can run
    number: int = 0  # of the decision that it follows
    state: str = GONE
    why: str = ""  # it is gone
    failed: dict[str, int] = field(default_factory=dict)  # exit codes of its ranks
    beat: int = -1
    seen: float = 0.0  # when its beat changed last
    free_since: float = 0.0

    def take(self, record: dict[str, Any], now: float) -> None:
        """Take over what the machine has written about itself."""
        if record["id"] < self.id:  # of a launcher that another one replaced
            return
        if (record["id"], record["beat"]) != (self.id, self.beat):
            self.seen = now
        if record["state"] == FREE and (self.state != FREE or self.id != record["id"]):
            self.free_since = now
        vars(self).update(record)

    def is_there(self, now: float) -> bool:
        return self.state != GONE and now - self.seen < SILENT_SECONDS


class Coordinator:
    """Machine 0's view of all machines, and its decisions."""

    def __init__(self, plan: LaunchPlan, store: Store, until: float) -> None:
        self.plan = plan
        self.store = store
        self.until = until
        self.machines = {n: MachineRecord() for n in range(plan.nodes)}
        self.decision: dict[str, Any] = {"number": 0, "assignments": {}, "ranks": 0, "restarts": 0}
        self.came: set[int] = set()
        self.looked_at = 0.0  # when the records were read
        self.stopped_at = 0.0  # when the machines stopped last
        self.is_silent = True

    def read_records(self) -> float:
        """Read what the machines have written; return the time."""
        self.looked_at = now = time.monotonic()
        if len(self.came) < len(self.machines):
            missing = connect.find_missing(self.store, "machine", 0, len(self.machines))
            self.came = self.machines.keys() - set(missing)
        came = sorted(self.came)
        texts = self.store.multi_get([f"machine/{n}" for n in came]) if came else []
        for n, text in zip(came, texts, strict=True):
            self.machines[n].take(json.loads(text), now)
        return now

    def publish(self, **changes: Any) -> None:
        self.decision = self.decision | changes
        # The count comes after its decision: who has seen it finds what it counts.
        self.store.set("decision", json.dumps(self.decision))
        self.store.add("decisions", 1)  # which all machines read several times a second

    def end(self, status: int, line: str) -> None:
        self.publish(over={"status": status, "line": line})

    @property
    def assignments(self) -> dict[int, list[int]]:
        """The machines that take part: the launcher's number, the first rank, and their ranks."""
        return {int(n): assignment for n, assignment in self.decision["assignments"].items()}

    def lost(self, now: float) -> list[int]:
        """Return the machines that took part and are not there any more, or came anew."""
        lost = []
        for n, (launcher, *_) in self.assignments.items():
            machine = self.machines[n]
            # Another launcher under this number is a new start, whose ranks know nothing.
            if machine.id != launcher or not machine.is_there(now):
                lost.append(n)
        return lost

    def failures(self) -> dict[int, int]:
        """Return the exit codes of ranks that failed, except for those that were asked to stop."""
        codes: dict[int, int] = {}
        for n in self.assignments:
            machine = self.machines[n]
            if machine.number != self.decision["number"]:  # of ranks before these
                continue
            for rank, code in machine.failed.items():
                if not self.decision.get("orderly") or code not in STOPPED + LOST:
                    codes[int(rank)] = code
        return codes

    def watch(self) -> None:
        """Stop the ranks of all machines if one of them is lost, has failed, or could join."""
        if self.decision.get("stop") or time.monotonic() - self.looked_at < POLL_SECONDS:
            return
        now = self.read_records()
        lost = self.lost(now)
        failed = self.failures()
        if lost or failed:
            # A machine that was told to leave: its ranks save with all others.
            is_leaving = any(self.machines[n].state == GONE for n in lost)
            self.publish(stop=True, orderly=is_leaving and not failed)
            return
        # A larger run may be possible with the machines that have come.
        usable = {n: ranks for n, (_, _, ranks) in self.assignments.items()}
        for n, machine in self.machines.items():
            # Wait some seconds: several may come together, and each stop takes time.
            is_new = n not in usable and machine.state == FREE and machine.is_there(now)
            if is_new and now - machine.free_since > SETTLE_SECONDS:
                usable[n] = machine.ranks
        choice = elastic.choose_shape(self.plan.shapes, usable)
        if choice and choice[0].ranks > self.decision["ranks"]:
            self.publish(stop=True, orderly=True)

    def decide(self) -> None:
        """Write who runs next, or the end of the run, as soon as that is known."""
        now = self.read_records()
        assignments = self.assignments
        largest = self.plan.shapes[0].ranks
        self.stopped_at = self.stopped_at or now
        # Wait until those that ran have stopped: only then is known which are free.
        present = {n: machine for n, machine in self.machines.items() if machine.is_there(now)}
        is_stopping = any(present[n].state == RUNNING for n in assignments if n in present)
        if is_stopping and now < self.stopped_at + GRACE_SECONDS + self.plan.wait:
            return
        free = {
            n: machine.ranks
            for n, machine in present.items()
            if machine.state == FREE and machine.ranks
        }
        choice = elastic.choose_shape(self.plan.shapes, free)
        # The first start takes less than the most only when the time to come is over.
        is_full = choice is not None and choice[0].ranks == largest
        if not assignments and not is_full and now < self.until:
            self.report_waiting(free, now)
            return
        # Why the run stopped: machines are lost or too small now, or a rank failed, which ends it
        # if its status is final or it was the last restart.
        lost = self.lost(now)
        failed = self.failures()
        restarts = self.decision["restarts"]
        for n, (_, _, ranks) in assignments.items():
            # The machine is there, but with fewer devices than it had ranks.
            if n not in lost and free.get(n, 0) < ranks:
                lost.append(n)
        reasons = self.explain(lost, free, choice[1] if choice else {})
        if failed:
            rank, code = find_cause(failed)
            cause = f"rank {rank} {describe_end(code)}"
            if is_final(code) or (not lost and restarts == self.plan.restarts):
                self.end(exit_status(code), f"{cause}; the others were stopped")
                return
            if not lost:
                restarts += 1
                restart = f"restart {restarts} of at most {self.plan.restarts}"
                reasons.insert(0, f"{cause}, {restart}")
        # Who runs next, if there are enough.
        if choice is None:
            if now > max(self.until, self.stopped_at + self.plan.wait):
                few = f"{sum(free.values())} ranks are there and --min-ranks is {self.plan.least_ranks}"
                reasons.append(f"{few}, and no more came within {self.plan.wait:g} s")
                self.end(HANG, "; ".join(reasons))
            self.report_waiting(free, now)
            return
        self.stopped_at = 0.0
        self.is_silent = True
        text = elastic.describe_choice(*choice, free, self.plan.most_ranks)
        if reasons:
            text = f"{', '.join(reasons)}; going on with {text}"
        self.start(*choice, text, restarts)

    def start(self, shape: elastic.Shape, shares: dict[int, int], line: str, restarts: int) -> None:
        assignments = {}
        first = 0
        for n, ranks in shares.items():
            assignments[str(n)] = [self.machines[n].id, first, ranks]
            first += ranks
        new = {
            "number": self.decision["number"] + 1,
            "assignments": assignments,
            "ranks": shape.ranks,
            "flags": shape.flags,
        }
        self.publish(**new, line=line, restarts=restarts, stop=False, orderly=False)

    def explain(self, lost: list[int], free: dict[int, int], shares: dict[int, int]) -> list[str]:
        """Return what changed: ["machine 2 was lost", "machine 4 joins"]."""
        if not self.assignments and len(free) < self.plan.nodes:
            return [f"{len(free)} of {self.plan.nodes} machines came within {self.plan.wait:g} s"]
        changes = []
        assignments = self.assignments
        for n in lost:
            machine = self.machines[n]
            if machine.state == FREE and machine.id == assignments[n][0]:
                changes.append(f"on machine {n} only {machine.ranks} devices answer")
            elif machine.state == GONE:
                changes.append(f"machine {n} {machine.why}")
            elif machine.state == FINISHED:
                changes.append(f"machine {n} has finished")
            else:
                changes.append(f"machine {n} was lost")
        if assignments:
            for n in shares:
                if n not in assignments or self.machines[n].id != assignments[n][0]:
                    changes.append(f"machine {n} joins")
        if len(changes) > LISTED:
            changes[LISTED:] = [f"{len(changes) - LISTED} more changes"]
        return changes

    def report_waiting(self, free: dict[int, int], now: float) -> None:
        if not self.is_silent or now - self.stopped_at <= connect.SILENCE:
            return
        self.is_silent = False
        missing = [n for n in range(self.plan.nodes) if n not in free]
        until = self.until
        if self.assignments:
            until = max(until, self.stopped_at + self.plan.wait)
        left = max(until - now, 0)
        say(f"waiting for machine {format_ranks(missing)}, up to {left:.0f} s more")

    def wait_until_all_leave(self, seconds: float) -> None:
        """Keep the store until the other machines have read the end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            now = self.read_records()
            if not any(n and machine.is_there(now) for n, machine in self.machines.items()):
                return
            time.sleep(0.1)


class ElasticMeeting(agent.MachineMeeting):
    """One machine's side: its record, and the decisions that it follows."""

    def __init__(self, plan: LaunchPlan, store: TCPStore, until: float) -> None:
        super().__init__(plan, store, until)
        self.store: Store = PrefixStore("elastic", store)
        self.record: dict[str, Any] = {
            "state": FREE,
            "ranks": plan.processes,
            "failed": {},
            "beat": 0,
            "why": "ended",
        }
        self.record["id"] = self.store.add(f"came/{plan.node}", 1)
        self.coordinator = Coordinator(plan, self.store, until) if plan.node == 0 else None
        self.decision: dict[str, Any] = {"number": 0}  # that this machine follows
        # The last one that was read, and how many there were.
        self.newest = self.decision
        self.decisions = 0
        self.read_at = 0.0
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.first_beat = (-1, time.monotonic())  # of machine 0, and when it changed
        self.is_replaced = False
        threading.Thread(target=self.beat, daemon=True).start()

    def ask(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except RuntimeError as error:
            raise RunOver(
                HANG,
                f"machine 0 at {self.plan.address} is gone, and no machine can go on without it",
            ) from error

    def announce(self, **changes: Any) -> None:
        with self.lock:
            self.record |= changes
            self.record["beat"] += 1
            text = json.dumps(self.record)
            self.ask(lambda: self.store.set(f"machine/{self.plan.node}", text))

    def beat(self) -> None:
        while not self.ended.wait(BEAT_SECONDS):
            with contextlib.suppress(RunOver):  # the main thread judges whether machine 0 is gone
                self.announce()
                newest = self.ask(lambda: self.store.add(f"came/{self.plan.node}", 0))
                self.is_replaced = newest > self.record["id"]

    def read(self) -> dict[str, Any]:
        """Return machine 0's decision; raise RunOver if the run has ended, or nobody decides."""
        self.read_at = time.monotonic()
        # Two launchers of one machine would both start its ranks.
        if self.is_replaced:
            raise RunOver(
                UNAVAILABLE, f"another launcher came as machine {self.plan.node}; this one ends"
            )
        decisions = self.ask(lambda: self.store.add("decisions", 0))
        if decisions > self.decisions:
            self.decisions = decisions
            self.newest = json.loads(self.ask(lambda: self.store.get("decision")))
        if over := self.newest.get("over"):
            raise RunOver(over["status"], over["line"])
        return self.newest

    def next_rendezvous(self) -> RendezvousInfo:
        self.announce(state=FREE)
        was_spare = False
        while True:
            if self.coordinator:
                self.ask(self.coordinator.decide)
            decision = self.read()
            assignment = decision.get("assignments", {}).get(str(self.plan.node))
            if decision["number"] > self.decision["number"] and not decision["stop"]:
                if assignment and assignment[0] == self.record["id"]:
                    break
                # Say it once, however often this machine is not chosen.
                if not was_spare:
                    was_spare = True
                    say(
                        f"machine {self.plan.node} waits as a spare: the run has {decision['ranks']} ranks"
                    )
            self.require_machine_0()
            time.sleep(0.1)
        # This machine takes part.
        self.decision = decision
        self.announce(state=RUNNING, failed={}, number=decision["number"])
        say(decision["line"])
        os.environ[ATTEMPT] = decision["line"]
        self.run_id = f"{RUN_ID}{decision['number']}"
        nodes = sorted(map(int, decision["assignments"]))
        store = PrefixStore(f"agents/{decision['number']}", self.store)
        address = RendezvousStoreInfo(self.plan.address, self.master_port)
        return RendezvousInfo(store, nodes.index(self.plan.node), len(nodes), address)

    def require_machine_0(self) -> None:
        """Raise RunOver if machine 0 does not beat, though its store may answer."""
        if self.coordinator or not self.ask(lambda: self.store.check(["machine/0"])):
            return
        beat = json.loads(self.ask(lambda: self.store.get("machine/0")))["beat"]
        if beat != self.first_beat[0]:
            self.first_beat = (beat, time.monotonic())
        # Its store may answer while its launcher is stopped.
        elif time.monotonic() - self.first_beat[1] > 6 * SILENT_SECONDS:
            raise RunOver(
                HANG,
                f"machine 0 at {self.plan.address} does not answer; no machine goes on without it",
            )

    def num_nodes_waiting(self) -> int:
        """Return above 0 if the ranks must stop; torch's agent then calls next_rendezvous."""
        if self.coordinator:
            self.ask(self.coordinator.watch)
        if time.monotonic() - self.read_at < POLL_SECONDS:
            return 0
        decision = self.read()
        self.decision = self.decision | {"orderly": bool(decision.get("orderly"))}
        return int(decision["number"] != self.decision["number"] or decision["stop"])


class ElasticAgent(agent.Agent):
    meeting_type = ElasticMeeting

    def __init__(self, plan: LaunchPlan, program: list[str], store: TCPStore, until: float) -> None:
        super().__init__(plan, program, store, until)
        self.program = program
        self.uses_devices = (
            not re.search(r"--device[= ]cpu", " ".join(program))
            and devices.count_accelerators() > 0
        )
        handler = self._worker_group.spec.rdzv_handler
        assert isinstance(handler, ElasticMeeting)
        self.meeting = handler

    def _assign_worker_ranks(
        self, store: Store, rank: int, size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Take the ranks that machine 0 gave this machine."""
        decision = self.meeting.decision
        _, first, ranks = decision["assignments"][str(self.plan.node)]
        spec.local_world_size = ranks
        spec.args = (*self.program, *decision["flags"])
        # Machine 0 counts the restarts of all.
        self._remaining_restarts = spec.max_restarts - decision["restarts"]
        self.failed = {}
        world = decision["ranks"]
        return [Worker(n, first + n, first + n, world, world) for n in range(ranks)]

    def settle_failure(self) -> None:
        """Leave the decision to machine 0, which knows whether a machine was lost."""
        self.meeting.announce(failed={str(rank): code for rank, code in self.failed.items()})
        self._remaining_restarts += 1  # torch takes one

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._pcontext is not None:
            # All ranks are there, and can save together.
            if self.meeting.decision.get("orderly") and not self.failed:
                self._pcontext.close(signal.SIGTERM, GRACE_SECONDS)
            else:
                agent.stop_hopeless(self._pcontext)
        # After a crash a device may be broken: count those that still compute.
        if self.uses_devices and self.failed and find_cause(self.failed)[1] not in LOST + STOPPED:
            self.meeting.announce(ranks=devices.show_answering(self.plan.processes))

    def _exit_barrier(self) -> None:
        """Machine 0 ends the run when its ranks are done; the others wait for its word."""
        if self.meeting.coordinator:
            self.meeting.coordinator.end(DONE, "the run is finished")
            return
        self.meeting.announce(state=FINISHED)
        until = time.monotonic() + GRACE_SECONDS
        try:
            while time.monotonic() < until:
                if self.meeting.read()["number"] != self.meeting.decision["number"]:
                    return
                time.sleep(POLL_SECONDS)
        except RunOver as over:
            if over.status != DONE:
                raise

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """Say that this machine leaves before a signal is passed on: then its ranks do not fail."""
        error = sys.exc_info()[1]
        if isinstance(error, SignalException):
            why = f"was stopped by {signal.Signals(error.sigval).name}"
            with contextlib.suppress(RunOver, RuntimeError):
                self.meeting.announce(why=why, state=GONE)
                if self.meeting.coordinator:
                    self.meeting.coordinator.end(
                        agent.status_of_signal(death_sig), f"machine 0 {why}, which ends the run"
                    )
        elif (
            isinstance(error, RunOver)
            and error.status not in (DONE, SIGTERM, SIGINT)
            and self._pcontext is not None
        ):
            agent.stop_hopeless(self._pcontext)
            return
        super()._shutdown(death_sig, timeout)

    def leave(self) -> None:
        self.meeting.ended.set()
        with contextlib.suppress(RunOver, RuntimeError), no_stderr():
            self.meeting.announce(state=GONE)
            if self.meeting.coordinator:
                if "over" not in self.meeting.coordinator.decision:
                    self.meeting.coordinator.end(HANG, "machine 0 ended")
                self.meeting.coordinator.wait_until_all_leave(GRACE_SECONDS)
