"""torch's elastic agent, with our way of meeting, of retrying and of waiting.

It imports torch; launch.py imports it late.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from meshwright.launch import rendezvous
from meshwright.launch.outcome import GRACE, RETRIED, Plan, ending, first, patience, say
from meshwright.launch.world import RUN_ID


def agent(plan: Plan, program: list[str], store: TCPStore, until: float) -> Agent:
    spec = WorkerSpec(
        role="rank",
        local_world_size=plan.processes,
        entrypoint=sys.executable,
        args=tuple(program),
        rdzv_handler=Meeting(plan, store, until),
        max_restarts=plan.restarts,
        monitor_interval=0.05,
    )
    agent = Agent(spec, DefaultLogsSpecs(log_dir=os.devnull))
    agent.plan, agent.machines = plan, store
    return agent


class Meeting(RendezvousHandler):
    """The machines count one another on our store, which the ranks then use too."""

    attempts = 0
    run_id = ""

    def __init__(self, plan: Plan, store: TCPStore, until: float) -> None:
        self.plan, self.store, self.until = plan, store, until

    def next_rendezvous(self) -> RendezvousInfo:
        # After a failure the others first stop their ranks, which have 30 seconds.
        end = self.until if self.attempts == 0 else time.monotonic() + 30 + self.plan.wait
        rendezvous.meet(
            PrefixStore(f"machines/{self.attempts}", self.store), self.plan.node, self.plan.nodes, end, "machine"
        )
        self.run_id = self.store.compare_set("run", "", f"{RUN_ID}{os.getpid()}-{time.time_ns()}").decode()
        own = PrefixStore(f"agents/{self.attempts}", self.store)
        self.attempts += 1
        return RendezvousInfo(
            own, self.plan.node, self.plan.nodes, RendezvousStoreInfo(self.plan.address, self.store.port)
        )

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


class Agent(LocalElasticAgent):
    signals = 0
    plan: Plan
    machines: TCPStore
    failed: Mapping[int, int] = {}  # exit code by rank, of those that ended by themselves
    since: float | None = None  # when the first of them did

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The agent stops all when one has failed.

        First wait for the reason, or for those that still save.
        """
        started = getattr(self._pcontext, "subprocess_handlers", {})
        codes = {worker_group.workers[n].global_rank: one.proc.poll() for n, one in started.items()}
        self.failed = {rank: code for rank, code in codes.items() if code}
        if self.failed and None in codes.values():
            self.since = self.since or time.monotonic()
            if time.monotonic() - self.since < max(patience(code) for code in self.failed.values()):
                return RunResult(state=WorkerState.HEALTHY)
        self.since = None
        result: RunResult = super()._monitor_workers(worker_group)
        if not result.is_failed():
            return result
        self.failed = self.failed or {rank: one.exitcode for rank, one in result.failures.items()}
        rank, code = first(self.failed)
        if code not in RETRIED and 0 <= code <= 128:  # it would end the same way again
            self._remaining_restarts = 0
        elif self._remaining_restarts > 0:
            number = self.plan.restarts - self._remaining_restarts + 1
            say(f"rank {rank} {ending(code)}; starting again ({number} of at most {self.plan.restarts})")
        return result

    def _exit_barrier(self) -> None:
        """Machine 0 keeps the store until all are done.

        Torch's barrier makes the others wait on a store that goes.
        """
        until = time.monotonic() + GRACE
        others = [f"done/{n}" for n in range(1, self.plan.nodes)]
        while self.plan.node == 0 and not self.machines.check(others) and time.monotonic() < until:
            time.sleep(0.1)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """Pass a signal on and wait; the second one is passed on too, and then there is little
        patience.
        """
        if self._pcontext is None:
            return
        said = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
        grace = (int(said) if said.isdecimal() else GRACE) if self.signals == 0 else 5
        self.signals += 1
        self._pcontext.close(death_sig, grace)
