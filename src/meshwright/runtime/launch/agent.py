"""Start the ranks of a launch, watch them, and say how they ended.

torch's elastic agent does the work. Added to torchrun are: the exit status of the rank that failed
(torchrun's is 1), retries according to it, ranks that end with their launcher even if it is killed,
and plain errors for a port in use, a missing machine and a failed rank. This module imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from meshwright.base.console import no_stderr
from meshwright.base.errors import DONE, HANG, MEANINGS, RETRIED, SIGINT, SIGTERM, WARNINGS
from meshwright.base.host import cores
from meshwright.runtime.launch.launcher import LaunchPlan
from meshwright.runtime.ranks import connect
from meshwright.runtime.ranks.orphans import LAUNCHER_PID
from meshwright.runtime.ranks.world import RUN_ID

GRACE_SECONDS = 300  # that ranks have to save after a signal
# seconds for ranks to end after another one failed, when they cannot save together any more
HOPELESS_SECONDS = 5
TEARDOWN_SECONDS = 30  # after SIGKILL, in which a device's driver frees the memory of a rank
PASSED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *WARNINGS)
# A repeat within these seconds is a duplicate: a terminal signals the whole process group, and a
# script passes the signal on.
REPEAT_SECONDS = 2


def launch_ranks(plan: LaunchPlan, program: list[str], kind: type[Agent] | None = None) -> int:
    """Start the ranks, watch them, and return the status of the one that failed first."""
    until = connect.deadline(plan.wait)
    store = connect.connect_store(plan.address, plan.port, plan.node == 0, until, "machine 0")
    # Everything that torch's agent changes in this process is put back at the end.
    environ = dict(os.environ)
    _prepare_environment(plan)
    agent = (kind or Agent)(plan, program, store, until)
    handlers = {n: signal.getsignal(n) for n in PASSED_SIGNALS}
    logging.disable(logging.CRITICAL)  # torch logs each step, and a table of failures
    try:
        failed = agent.run().is_failed()
    except SignalException as error:
        return status_of_signal(error.sigval)
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environ)
        agent.leave()
    if not failed:
        return DONE
    rank, code = find_cause(agent.failed)
    others = "; the others were stopped" if plan.processes * plan.nodes > 1 else ""
    say(f"rank {rank} {describe_end(code)}{others}")
    return exit_status(code)


def _prepare_environment(plan: LaunchPlan) -> None:
    """Set the variables that the ranks inherit."""
    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(
        number.name for number in PASSED_SIGNALS
    )
    if "OMP_NUM_THREADS" not in os.environ:
        # torchrun gives each rank one thread, which makes a CPU's training slow.
        threads = max(cores() // plan.processes, 1)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if plan.processes > 1:
            ranks = f"{plan.processes} ranks here, of {cores()} cores"
            say(f"OMP_NUM_THREADS={threads} for each of {ranks}; set it to choose")
    root = str(Path(__file__).parents[3])
    if "site-packages" not in root:  # a clone that is not installed
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        )


def say(line: str) -> None:
    print(f"meshwright launch: {line}", file=sys.stderr, flush=True)


class MachineMeeting(StaticTCPRendezvous):
    """The meeting of the machines: they count one another on our store, which the ranks use too."""

    attempts = 0
    store: Store

    def __init__(self, plan: LaunchPlan, store: TCPStore, until: float) -> None:
        super().__init__(plan.address, store.port, plan.node, plan.nodes, run_id="", timeout=0)
        self.plan = plan
        self.store = store
        self.until = until

    def next_rendezvous(self) -> RendezvousInfo:
        plan = self.plan
        # After a failure the other machines first stop their ranks, which have 30 seconds.
        end = self.until if self.attempts == 0 else time.monotonic() + 30 + plan.wait
        # Each attempt has keys of its own, so that none counts ranks of the one before.
        machines = PrefixStore(f"machines/{self.attempts}", self.store)
        connect.within(
            end,
            lambda: connect.meet_all(machines, plan.node, plan.nodes, end, "machine"),
            f"machine 0 at {plan.address}:{self.master_port}",
        )
        # Whoever comes first names the run for all machines.
        self.run_id = self.store.compare_set(
            "run", "", f"{RUN_ID}{os.getpid()}-{time.time_ns()}"
        ).decode()
        store = PrefixStore(f"agents/{self.attempts}", self.store)
        self.attempts += 1
        return RendezvousInfo(
            store, plan.node, plan.nodes, RendezvousStoreInfo(plan.address, self.master_port)
        )


class Agent(LocalElasticAgent):
    meeting_type = MachineMeeting

    def __init__(self, plan: LaunchPlan, program: list[str], store: TCPStore, until: float) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=plan.processes,
            entrypoint=sys.executable,
            args=tuple(program),
            rdzv_handler=self.meeting_type(plan, store, until),
            max_restarts=plan.restarts,
            monitor_interval=0.05,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self.plan = plan
        self.store = store
        self.failed: Mapping[int, int] = {}  # exit code by rank, of those that ended on their own
        self.since: float | None = None  # when the first of them ended
        self.is_stopping = False  # by a signal, not a warning

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """After a failure, wait for its cause and for ranks that still save; then stop all."""
        # torch itself reports a failure only after it has stopped the others.
        started = getattr(self._pcontext, "subprocess_handlers", {})
        codes = {
            worker_group.workers[n].global_rank: worker.proc.poll() for n, worker in started.items()
        }
        self.failed = {rank: code for rank, code in codes.items() if code}
        # While others run on, as long as the most patient of the codes allows.
        if self.failed and None in codes.values():
            self.since = self.since or time.monotonic()
            longest = max(map(patience, self.failed.values()))
            if time.monotonic() - self.since < longest:
                return RunResult(state=WorkerState.HEALTHY)
        self.since = None
        if self.failed and self._pcontext is not None and find_cause(self.failed)[1] not in STOPPED:
            stop_hopeless(self._pcontext)  # torch would give them 30 seconds
        result: RunResult = super()._monitor_workers(worker_group)
        if not result.is_failed():
            return result
        self.failed = self.failed or {
            rank: failure.exitcode for rank, failure in result.failures.items()
        }
        self.settle_failure()
        return result

    def settle_failure(self) -> None:
        """Decide whether the ranks start again."""
        rank, code = find_cause(self.failed)
        if is_final(code):
            self._remaining_restarts = 0
        elif self._remaining_restarts > 0:
            number = self.plan.restarts - self._remaining_restarts + 1
            say(
                f"rank {rank} {describe_end(code)}; starting again ({number} of at most {self.plan.restarts})"
            )

    def leave(self) -> None:
        """Say to machine 0 that this one needs its store no more."""
        if self.plan.node > 0:
            with contextlib.suppress(RuntimeError), no_stderr():
                self.store.set(f"done/{self.plan.node}", "")

    def _exit_barrier(self) -> None:
        """Keep machine 0's store until all are done; torch's barrier waits on a closed store."""
        if self.plan.node > 0:
            return
        until = time.monotonic() + GRACE_SECONDS
        others = [f"done/{n}" for n in range(1, self.plan.nodes)]
        while not self.store.check(others) and time.monotonic() < until:
            time.sleep(0.1)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """Pass a signal on and wait; pass a second one on too, and then wait only briefly."""
        if self._pcontext is None:
            return
        setting = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
        grace = int(setting) if setting.isdecimal() else GRACE_SECONDS
        if self.is_stopping:  # a second signal
            grace = 5
        # What is left hangs or is stopped, and no rank can save alone.
        if HANG in self.failed.values():
            grace = REPEAT_SECONDS
        self.is_stopping |= death_sig not in WARNINGS
        _ignore_repeats()
        self._pcontext.close(death_sig, grace)


def _ignore_repeats() -> None:
    """Pass on no warnings from now on, and other signals only after REPEAT_SECONDS."""
    until = time.monotonic() + REPEAT_SECONDS

    def handle(number: int, _: object) -> None:
        if time.monotonic() > until and number not in WARNINGS:
            raise SignalException(f"signal {number}", signal.Signals(number))

    for number in PASSED_SIGNALS:
        signal.signal(number, handle)


def stop_hopeless(ranks: PContext) -> None:
    """Stop ranks that wait for one that is gone, perhaps in a call that never returns."""
    ranks.close(signal.SIGTERM, HOPELESS_SECONDS)
    ranks.close(signal.SIGKILL, TEARDOWN_SECONDS)


# How ranks end. An exit code below 0 is a signal, as in subprocess.

WARNED = tuple(128 + number for number in WARNINGS)
LOST = (HANG, -signal.SIGABRT)  # the end of ranks that lost another one; NCCL aborts
STOPPED = (SIGTERM, SIGINT, -signal.SIGTERM, *WARNED)
HINTS: dict[int, str] = {
    signal.SIGKILL: " (as the system does when memory runs out)",
    signal.SIGABRT: " (as NCCL does when another rank does not answer)",
    signal.SIGBUS: " (as happens when a file in use is cut short, or /dev/shm is full)",
}


def find_cause(failed: Mapping[int, int]) -> tuple[int, int]:
    """Return the rank and exit code that explain a failure, which soon ends other ranks as well.

    An exit with a reason comes before a crash, a crash before a stop, a stop before a lost rank.
    """

    def weight(code: int) -> int:
        if code in LOST:
            return 3
        if code in STOPPED:
            return 2
        has_reason = code in MEANINGS and code not in RETRIED
        return 0 if code < 0 or has_reason else 1

    return min(failed.items(), key=lambda pair: weight(pair[1]))


def patience(code: int) -> float:
    """Return the seconds that the other ranks have to end on their own after one ended so."""
    if code in (SIGTERM, SIGINT, *WARNED):  # they save together, and end together
        return 30
    return 3 if code in LOST + STOPPED else 0  # the cause is still to come


def is_final(code: int) -> bool:
    """Return whether another start would end the same way."""
    return code in WARNED or (code not in RETRIED and 0 <= code <= 128)


def status_of_signal(number: int) -> int:
    return 128 + (signal.SIGTERM if number == signal.SIGHUP else number)


def exit_status(code: int) -> int:
    """Return the status as a shell gives it."""
    if code == -signal.SIGABRT:  # NCCL's, after waiting too long for another rank
        return HANG
    return code if code >= 0 else 128 - code


def describe_end(code: int) -> str:
    if code < 0:
        names = {int(s): s.name for s in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}{HINTS.get(-code, '')}"
    meaning = ""
    if code in MEANINGS:
        meaning = f" ({MEANINGS[code]})"
    elif code in STOPPED:
        meaning = " (stopped by a signal)"
    return f"ended with status {code}{meaning}"
