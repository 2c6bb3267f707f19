"""The machines of an elastic run: they meet, are missed, come back, and run on what is there.

Each machine writes one record to the store on machine 0, with a beat every second. Machine 0 alone
reads the records, decides who runs, and writes its decision under one key, which all machines read.
So whoever comes late, or again, needs to know nothing of the past. Without machine 0 nobody can
meet: its end is the end of the attempt.
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

from meshwright import device as devices
from meshwright.errors import DONE, HANG, SIGINT, SIGTERM, UNAVAILABLE
from meshwright.launch import agent, elastic
from meshwright.launch.agent import GRACE, LOST, SIGNALS, STOPPED, describe_end, exit_status, find_cause, is_final, say
from meshwright.launch.launcher import Plan
from meshwright.ranks import connect
from meshwright.ranks.compare import format_ranks
from meshwright.ranks.world import ATTEMPT, RUN_ID

POLL = 0.2  # seconds between two looks at the decision, and at the machines
BEAT = 1.0  # seconds between the beats of a machine
SILENT = 10.0  # seconds without a beat after which a machine is lost
SETTLE = 2.0  # seconds that a machine is there before the others make room: several may come together
FREE, RUNNING, FINISHED, GONE = "free", "running", "finished", "gone"  # states of a machine
T = TypeVar("T")


class Over(Exception):
    """The end of the run, as machine 0 decided it."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


def run(plan: Plan, program: list[str]) -> int:
    """Start the ranks of this machine whenever it has a part in the run; return the status."""

    def leave(number: int, _: object) -> None:
        raise SignalException(f"signal {number}", signal.Signals(number))

    before = {n: signal.signal(n, leave) for n in SIGNALS}  # a spare has no ranks, with which torch would do this
    try:
        return agent.run(plan, program, ElasticAgent)
    except Over as over:
        say(str(over))
        return over.status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Machine:
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

    def take(self, row: dict[str, Any], now: float) -> None:
        if row["id"] < self.id:  # of a launcher that another one replaced
            return
        if (row["id"], row["beat"]) != (self.id, self.beat):
            self.seen = now
        if row["state"] == FREE and (self.state != FREE or self.id != row["id"]):
            self.free_since = now
        for name, value in row.items():
            setattr(self, name, value)

    def is_there(self, now: float) -> bool:
        return self.state != GONE and now - self.seen < SILENT


class Council:
    """Machine 0's view of all machines, and its decisions."""

    def __init__(self, plan: Plan, store: Store, until: float) -> None:
        self.plan, self.store, self.until = plan, store, until
        self.machines = {n: Machine() for n in range(plan.nodes)}
        self.decision: dict[str, Any] = {"number": 0, "place": {}, "ranks": 0, "restarts": 0}
        self.known: set[int] = set()
        self.looked = self.began = 0.0  # when the machines were looked at, and when they stopped last
        self.is_silent = True

    def look(self) -> float:
        now = time.monotonic()
        self.known |= {n for n in self.machines.keys() - self.known if self.store.check([f"machine/{n}"])}
        for n in self.known:
            self.machines[n].take(json.loads(self.store.get(f"machine/{n}")), now)
        self.looked = now
        return now

    def publish(self, **changes: Any) -> None:
        self.decision = self.decision | changes
        self.store.set("decision", json.dumps(self.decision))

    def end(self, status: int, line: str) -> None:
        self.publish(over={"status": status, "line": line})

    @property
    def place(self) -> dict[int, list[int]]:
        """The machines that have a part: the launcher's number, the first rank, and their ranks."""
        return {int(n): row for n, row in self.decision["place"].items()}

    def lost(self, now: float) -> list[int]:
        """Return the machines that had a part and are not there any more, or came anew."""
        machines = self.machines
        return [n for n, row in self.place.items() if machines[n].id != row[0] or not machines[n].is_there(now)]

    def failures(self) -> dict[int, int]:
        """Return the exit codes of ranks that failed, except for those that were asked to stop."""
        codes: dict[int, int] = {}
        for one in (self.machines[n] for n in self.place):
            if one.number == self.decision["number"]:
                codes |= {int(rank): code for rank, code in one.failed.items()}
        return {r: c for r, c in codes.items() if not (self.decision.get("orderly") and c in STOPPED + LOST)}

    def watch(self) -> None:
        """Stop the ranks of all machines if one of them is lost, has failed, or could join."""
        if self.decision.get("stop") or time.monotonic() - self.looked < POLL:
            return
        now = self.look()
        lost, failed = self.lost(now), self.failures()
        if lost or failed:
            is_leaving = any(self.machines[n].state == GONE for n in lost)  # its ranks save with all others
            self.publish(stop=True, orderly=is_leaving and not failed)
            return
        there = {n: row[2] for n, row in self.place.items()}
        for n, one in self.machines.items():
            if n not in there and one.state == FREE and one.is_there(now) and now - one.free_since > SETTLE:
                there[n] = one.ranks
        found = elastic.choose(self.plan.shapes, there)
        if found and found[0].ranks > self.decision["ranks"]:
            self.publish(stop=True, orderly=True)

    def decide(self) -> None:
        """Write who runs next, or the end of the run, as soon as that is known."""
        now, place, largest = self.look(), self.place, self.plan.shapes[0].ranks
        self.began = self.began or now
        there = {n: one for n, one in self.machines.items() if one.is_there(now)}
        if any(there[n].state == RUNNING for n in place if n in there) and now < self.began + GRACE + self.plan.wait:
            return
        free = {n: one.ranks for n, one in there.items() if one.state == FREE and one.ranks}
        found = elastic.choose(self.plan.shapes, free)
        if not place and not (found and found[0].ranks == largest) and now < self.until:
            self.report_waiting(free, now)
            return
        lost, failed, restarts = self.lost(now), self.failures(), self.decision["restarts"]
        lost += [n for n, row in place.items() if n not in lost and free.get(n, 0) < row[2]]
        said = self.explain(lost, free, found[1] if found else {})
        if failed:
            rank, code = find_cause(failed)
            if is_final(code) or (not lost and restarts == self.plan.restarts):
                self.end(exit_status(code), f"rank {rank} {describe_end(code)}; the others were stopped")
                return
            if not lost:
                restarts += 1
                said = [f"rank {rank} {describe_end(code)}, restart {restarts} of at most {self.plan.restarts}", *said]
        if found is None:
            if now > max(self.until, self.began + self.plan.wait):
                few = f"{sum(free.values())} ranks are there and --min-ranks is {self.plan.least}"
                self.end(HANG, "; ".join([*said, f"{few}, and no more came within {self.plan.wait:g} s"]))
            self.report_waiting(free, now)
            return
        self.began, self.is_silent = 0.0, True
        choice = elastic.describe_choice(*found, free, self.plan.most)
        self.start(*found, f"{', '.join(said)}; going on with {choice}" if said else choice, restarts)

    def start(self, shape: elastic.Shape, shares: dict[int, int], line: str, restarts: int) -> None:
        place, first = {}, 0
        for n, ranks in shares.items():
            place[str(n)] = [self.machines[n].id, first, ranks]
            first += ranks
        new = {"number": self.decision["number"] + 1, "place": place, "ranks": shape.ranks, "flags": shape.flags}
        self.publish(**new, line=line, restarts=restarts, stop=False, orderly=False)

    def explain(self, lost: list[int], free: dict[int, int], shares: dict[int, int]) -> list[str]:
        """Say what changed: ["machine 2 was lost", "machine 4 joins"]."""
        if not self.place and len(free) < self.plan.nodes:
            return [f"{len(free)} of {self.plan.nodes} machines came within {self.plan.wait:g} s"]
        said = []
        for n in lost:
            one = self.machines[n]
            if one.state == FREE and one.id == self.place[n][0]:
                said.append(f"on machine {n} only {one.ranks} devices answer")
            elif one.state in (GONE, FINISHED):
                said.append(f"machine {n} {one.why if one.state == GONE else 'has finished'}")
            else:
                said.append(f"machine {n} was lost")
        joining = [n for n in shares if n not in self.place or self.machines[n].id != self.place[n][0]]
        return [*said, *(f"machine {n} joins" for n in joining if self.place)]

    def report_waiting(self, free: dict[int, int], now: float) -> None:
        if self.is_silent and now - self.began > connect.SILENCE:
            self.is_silent = False
            missing = format_ranks([n for n in range(self.plan.nodes) if n not in free])
            until = max(self.until, self.began + self.plan.wait) if self.place else self.until
            say(f"waiting for machine {missing}, up to {max(until - now, 0):.0f} s more")

    def see_off(self, seconds: float) -> None:
        """Keep the store until the other machines have read the end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            now = self.look()
            if not any(n and one.is_there(now) for n, one in self.machines.items()):
                return
            time.sleep(0.1)


class ElasticMeeting(agent.Meeting):
    """One machine's side: its record, and the decisions that it follows."""

    def __init__(self, plan: Plan, store: TCPStore, until: float) -> None:
        super().__init__(plan, store, until)
        self.store: Store = PrefixStore("elastic", store)
        self.row: dict[str, Any] = {"state": FREE, "ranks": plan.processes, "failed": {}, "beat": 0, "why": "ended"}
        self.row["id"] = self.store.add(f"came/{plan.node}", 1)
        self.council = Council(plan, self.store, until) if plan.node == 0 else None
        self.decision: dict[str, Any] = {"number": 0}
        self.read_at, self.lock, self.ended = 0.0, threading.Lock(), threading.Event()
        self.first = (-1, time.monotonic())  # the beat of machine 0, and when it changed
        self.is_replaced = False
        threading.Thread(target=self.beat, daemon=True).start()

    def ask(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except RuntimeError as error:
            raise Over(
                HANG, f"machine 0 at {self.plan.address} is gone, and no machine can go on without it"
            ) from error

    def announce(self, **changes: Any) -> None:
        with self.lock:
            self.row |= changes
            self.row["beat"] += 1
            row = json.dumps(self.row)
            self.ask(lambda: self.store.set(f"machine/{self.plan.node}", row))

    def beat(self) -> None:
        with contextlib.suppress(Over):
            while not self.ended.wait(BEAT):
                self.announce()
                self.is_replaced = self.ask(lambda: self.store.add(f"came/{self.plan.node}", 0)) > self.row["id"]

    def read(self) -> dict[str, Any]:
        """Return machine 0's decision; raise Over if the run has ended, or nobody decides."""
        self.read_at = time.monotonic()
        if self.is_replaced:
            raise Over(UNAVAILABLE, f"another launcher came as machine {self.plan.node}; this one ends")
        if not self.ask(lambda: self.store.check(["decision"])):
            return {"number": 0}
        decision: dict[str, Any] = json.loads(self.ask(lambda: self.store.get("decision")))
        if over := decision.get("over"):
            raise Over(over["status"], over["line"])
        return decision

    def next_rendezvous(self) -> RendezvousInfo:
        self.announce(state=FREE)
        was_spare = False
        while True:
            if self.council:
                self.ask(self.council.decide)
            decision = self.read()
            own = decision.get("place", {}).get(str(self.plan.node))
            if decision["number"] > self.decision["number"] and not decision["stop"]:
                if own and own[0] == self.row["id"]:
                    break
                if not was_spare:
                    was_spare = True
                    say(f"machine {self.plan.node} waits as a spare: the run has {decision['ranks']} ranks")
            self.require_machine_0()
            time.sleep(0.1)
        self.decision = decision
        self.announce(state=RUNNING, failed={}, number=decision["number"])
        say(decision["line"])
        os.environ[ATTEMPT] = decision["line"]
        self.run_id = f"{RUN_ID}{decision['number']}"
        nodes = sorted(map(int, decision["place"]))
        own_store = PrefixStore(f"agents/{decision['number']}", self.store)
        here = RendezvousStoreInfo(self.plan.address, self.port)
        return RendezvousInfo(own_store, nodes.index(self.plan.node), len(nodes), here)

    def require_machine_0(self) -> None:
        """Raise Over if machine 0 does not beat, though its store may answer."""
        if self.council or not self.ask(lambda: self.store.check(["machine/0"])):
            return
        beat = json.loads(self.ask(lambda: self.store.get("machine/0")))["beat"]
        if beat != self.first[0]:
            self.first = (beat, time.monotonic())
        elif time.monotonic() - self.first[1] > 6 * SILENT:
            raise Over(HANG, f"machine 0 at {self.plan.address} does not answer; no machine goes on without it")

    def num_nodes_waiting(self) -> int:
        """Return above 0 if the ranks must stop; torch's agent then calls next_rendezvous."""
        if self.council:
            self.ask(self.council.watch)
        if time.monotonic() - self.read_at < POLL:
            return 0
        decision = self.read()
        self.decision["orderly"] = bool(decision.get("orderly"))
        return int(decision["number"] != self.decision["number"] or decision["stop"])


class ElasticAgent(agent.Agent):
    meeting = ElasticMeeting

    def __init__(self, plan: Plan, program: list[str], store: TCPStore, until: float) -> None:
        super().__init__(plan, program, store, until)
        self.program = program
        self.uses_devices = not re.search(r"--device[= ]cpu", " ".join(program)) and devices.count_accelerators() > 0
        assert isinstance(handler := self._worker_group.spec.rdzv_handler, ElasticMeeting)
        self.there = handler

    def _assign_worker_ranks(self, store: Store, rank: int, size: int, spec: WorkerSpec) -> list[Worker]:
        """Take the ranks that machine 0 gave this machine."""
        decision = self.there.decision
        _, first, ranks = decision["place"][str(self.plan.node)]
        spec.local_world_size, spec.args = ranks, (*self.program, *decision["flags"])
        self._remaining_restarts = spec.max_restarts - decision["restarts"]
        self.failed = {}
        world = decision["ranks"]
        return [Worker(n, first + n, first + n, world, world) for n in range(ranks)]

    def settle_failure(self) -> None:
        """Leave the decision to machine 0, which knows whether a machine was lost."""
        self.there.announce(failed={str(rank): code for rank, code in self.failed.items()})
        self._remaining_restarts += 1  # torch takes one

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._pcontext is not None:
            if self.there.decision.get("orderly") and not self.failed:
                self._pcontext.close(signal.SIGTERM, GRACE)
            else:
                agent.stop_hopeless(self._pcontext)
        if self.uses_devices and self.failed and find_cause(self.failed)[1] not in LOST + STOPPED:
            self.there.announce(ranks=devices.show_answering(self.plan.processes))

    def _exit_barrier(self) -> None:
        """Machine 0 ends the run when its ranks are done; the others wait for its word."""
        if self.there.council:
            self.there.council.end(DONE, "the run is finished")
            return
        self.there.announce(state=FINISHED)
        until = time.monotonic() + GRACE
        try:
            while time.monotonic() < until and self.there.read()["number"] == self.there.decision["number"]:
                time.sleep(POLL)
        except Over as over:
            if over.status != DONE:
                raise

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """Say that this machine leaves before a signal is passed on: then its ranks do not fail."""
        error = sys.exc_info()[1]
        if isinstance(error, SignalException):
            why = f"was stopped by {signal.Signals(error.sigval).name}"
            with contextlib.suppress(Over, RuntimeError):
                self.there.announce(why=why, state=GONE)
                if self.there.council:
                    status = 128 + (signal.SIGTERM if death_sig == signal.SIGHUP else death_sig)
                    self.there.council.end(status, f"machine 0 {why}, which ends the run")
        elif isinstance(error, Over) and error.status not in (DONE, SIGTERM, SIGINT) and self._pcontext is not None:
            agent.stop_hopeless(self._pcontext)
            return
        super()._shutdown(death_sig, timeout)

    def leave(self) -> None:
        self.there.ended.set()
        with contextlib.suppress(Over, RuntimeError), connect.no_stderr():
            self.there.announce(state=GONE)
            if self.there.council:
                if "over" not in self.there.council.decision:
                    self.there.council.end(HANG, "machine 0 ended")
                self.there.council.see_off(GRACE)
