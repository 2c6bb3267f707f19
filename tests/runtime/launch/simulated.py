"""The machines of an elastic run in one process, on a clock of their own: the launcher's own code.

A thread stands for each machine, and one for its beats. Only one thread runs at a time; the clock
goes on when it sleeps. A dictionary stands for the store, and counts what each machine asks of it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from meshwright.runtime.launch import agent, members
from meshwright.runtime.launch.elastic import Shape
from meshwright.runtime.launch.launcher import LaunchPlan

MONITOR_SECONDS = 0.05  # as in runtime/launch/agent.py


class Ended(BaseException):
    """The end of a simulated thread."""


class Clock:
    """Time that goes on from the waking of one thread to that of the next."""

    def __init__(self) -> None:
        self.now, self.numbers, self.dead = 0.0, itertools.count(), set[int]()
        self.sleepers: list[tuple[float, int, threading.Event]] = []
        self.own = threading.local()
        self.finished, self.is_over = threading.Event(), False
        self.error: Exception | None = None

    def monotonic(self) -> float:
        return self.now

    def start(self, act: Callable[[], Any], machine: int) -> None:
        """Have a thread of a machine call `act` when others sleep."""
        woken = threading.Event()

        def run() -> None:
            woken.wait()
            self.own.machine = machine
            with contextlib.suppress(Ended):
                self.go_on()
                try:
                    act()
                except Exception as error:
                    self.error = error
                    self.end()
            self.wake_next()

        heapq.heappush(self.sleepers, (self.now, next(self.numbers), woken))
        threading.Thread(target=run, daemon=True).start()

    def sleep(self, seconds: float) -> None:
        woken = threading.Event()
        heapq.heappush(self.sleepers, (self.now + seconds, next(self.numbers), woken))
        self.wake_next()
        woken.wait()
        self.go_on()

    def go_on(self) -> None:
        if self.is_over or self.own.machine in self.dead:
            raise Ended

    def wake_next(self) -> None:
        if not self.sleepers:
            self.finished.set()
            return
        at, _, woken = heapq.heappop(self.sleepers)
        self.now = max(self.now, at)
        woken.set()

    def end(self) -> None:
        """End all threads, of which the caller is one."""
        self.is_over = True
        raise Ended


class CountedStore:
    """A store of all machines, as one of them sees it under a prefix."""

    port = 1

    def __init__(
        self, values: dict[str, bytes], requests: Counter[int], sizes: Counter[int], machine: int
    ) -> None:
        self.values, self.requests, self.sizes, self.machine, self.prefix = (
            values,
            requests,
            sizes,
            machine,
            "",
        )

    def under(self, prefix: str) -> CountedStore:
        view = CountedStore(self.values, self.requests, self.sizes, self.machine)
        view.prefix = f"{self.prefix}{prefix}/"
        return view

    def count(self, size: int) -> None:
        self.requests[self.machine] += 1
        self.sizes[self.machine] += size

    def set(self, key: str, value: str) -> None:
        self.count(len(key) + len(value))
        self.values[self.prefix + key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        texts = [self.values[self.prefix + key] for key in keys]
        self.count(sum(map(len, keys)) + sum(map(len, texts)))
        return texts

    def check(self, keys: list[str]) -> bool:
        self.count(sum(map(len, keys)))
        return all(self.prefix + key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        self.count(len(key) + 8)
        text = self.values[self.prefix + key] = b"%d" % (
            int(self.values.get(self.prefix + key, 0)) + number
        )
        return int(text)


class LostMachine:
    """A run of several machines, of which one vanishes without a word after some seconds."""

    def __init__(
        self, machines: int, ranks: int = 8, lost_at: float = 30.0, stop_seconds: float = 5.0
    ) -> None:
        """`stop_seconds` is what a machine takes to end its ranks, which wait for the lost ones."""
        self.clock, self.machines, self.ranks = Clock(), machines, ranks
        self.lost_at, self.stop_seconds, self.lost = lost_at, stop_seconds, machines - 1
        self.requests, self.sizes = Counter[int](), Counter[int]()  # by machine
        # in the 10 s before the loss
        self.steady: tuple[Counter[int], Counter[int]] = Counter(), Counter()
        self.started, self.learned, self.resumed = (
            dict[int, float](),
            dict[int, float](),
            dict[int, float](),
        )
        self.lines: list[str] = []

    def simulate(self) -> LostMachine:
        values: dict[str, bytes] = {}
        with self.patched():
            for node in range(self.machines):
                store = CountedStore(values, self.requests, self.sizes, node)
                self.clock.start(lambda node=node, store=store: self.live(node, store), node)  # type: ignore[misc]
            self.clock.start(self.lose, -1)
            self.clock.wake_next()
            assert self.clock.finished.wait(300)
        if self.clock.error is not None:
            raise self.clock.error
        return self

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        clock = self.clock

        class Event:
            def wait(self, seconds: float) -> bool:
                clock.sleep(seconds)
                return False

        def thread(target: Callable[[], Any], daemon: bool) -> Any:
            machine = clock.own.machine
            return SimpleNamespace(start=lambda: clock.start(target, machine))

        replaced = {
            "time": SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep),
            "threading": SimpleNamespace(Event=Event, Lock=threading.Lock, Thread=thread),
            "PrefixStore": lambda prefix, store: store.under(prefix),
            "say": self.lines.append,
        }
        with contextlib.ExitStack() as patches:
            for name, value in replaced.items():
                patches.enter_context(mock.patch.object(members, name, value))
            patches.enter_context(mock.patch.dict("os.environ"))
            yield

    def live(self, node: int, store: CountedStore) -> None:
        """Do what torch's agent does with the meeting of a machine."""
        whole = range(self.machines * self.ranks // 64, 0, -1)
        shapes = tuple(
            Shape(64 * number, self.ranks, number * 64 // self.ranks) for number in whole
        )
        plan = LaunchPlan(
            self.ranks,
            self.machines,
            node,
            "m0",
            1,
            0,
            30.0,
            64,
            self.machines * self.ranks,
            shapes,
        )
        meeting = members.ElasticMeeting(plan, store, 30.0)  # type: ignore[arg-type]
        while True:
            meeting.next_rendezvous()
            if self.clock.now < self.lost_at:
                self.started[node] = self.clock.now
            else:
                self.resumed[node] = self.clock.now
                assignments = meeting.decision["assignments"]
                if len(self.resumed) == len(assignments):
                    self.clock.end()
            while not meeting.num_nodes_waiting():
                self.clock.sleep(MONITOR_SECONDS)
            self.learned[node] = self.clock.now
            self.clock.sleep(self.stop_seconds)

    def lose(self) -> None:
        self.clock.sleep(self.lost_at - 10)
        before = self.requests.copy(), self.sizes.copy()
        self.clock.sleep(10)
        self.steady = self.requests - before[0], self.sizes - before[1]
        self.clock.dead.add(self.lost)


assert agent.HOPELESS_SECONDS == 5  # the default of stop_seconds
