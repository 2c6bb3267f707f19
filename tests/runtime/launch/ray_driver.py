"""Train on a Ray cluster of this machine, from which workers are taken while the training goes on.

Arguments: the folder of the run, and `worker` (one of two is killed) or `node` (one of two nodes,
with one of four workers, is lost and comes back).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elastic_runs
import ray
from ray.cluster_utils import Cluster

from meshwright.runtime.launch import on_ray

QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
}


def wait(ready: Callable[[], bool]) -> None:
    while not ready():
        time.sleep(0.2)


def train_on(folder: Path, ranks: int, steps: int = 15) -> None:
    """Wait until `ranks` ranks have taken more steps."""

    def last() -> int:
        order = elastic_runs.read_order(folder / "samples")
        return max((n for n, (size, _) in order.items() if size == ranks), default=0)

    before = elastic_runs.last_step(folder)
    wait(lambda: last() > before + steps)


def kill_worker(folder: Path, cluster: Cluster, node: Any) -> None:
    rank = max((folder / "samples").iterdir(), key=lambda path: path.stat().st_mtime)
    stat = Path(f"/proc/{rank.stem}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)  # its parent, Ray's worker
    train_on(folder, 2)


def lose_node(folder: Path, cluster: Cluster, node: Any) -> None:
    cluster.remove_node(node, allow_graceful=False)
    train_on(folder, 3)
    cluster.add_node(num_cpus=1, resources={"rank": 1})
    train_on(folder, 4)


def main(folder: Path, what: str) -> int:
    size, act = {"worker": ((2, 2), kill_worker), "node": ((2, 4), lose_node)}[what]
    cluster = Cluster()
    cluster.add_node(
        num_cpus=8, resources={"rank": size[1] - 1}, include_dashboard=False, _system_config=QUICK
    )
    node = cluster.add_node(num_cpus=1, resources={"rank": 1})
    ray.init(address=cluster.address)

    command = [str(elastic_runs.RECORDER), *elastic_runs.make_flags(folder)]
    status: list[int] = []

    def fit() -> None:
        status.append(on_ray.fit(command, size, resources={"CPU": 0, "rank": 1}, resize_seconds=5))

    fitting = threading.Thread(target=fit)  # nodes are added in the main thread only
    fitting.start()
    train_on(folder, size[1])
    act(folder, cluster, node)
    (folder / "end").touch()
    fitting.join()
    ray.shutdown()  # before the cluster, whose end would end this process
    cluster.shutdown()
    return status[0]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
