"""Train under Ray Train: its workers are the ranks, and Ray replaces those that it loses.

    from meshwright.runtime.launch import on_ray
    status = on_ray.fit(["train", "--preset", "gpt2-345m", ...], workers=(2, 8), use_gpu=True)

Each worker runs the command as a process of its own, which can save on a signal and dies with the
worker. Ray chooses the number of workers; the flags of an elastic launch follow it. This module
needs the extra `ray`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from meshwright.base import host
from meshwright.base.errors import DONE, HANG, SIGTERM
from meshwright.runtime.launch import elastic
from meshwright.runtime.launch.agent import GRACE_SECONDS, LOST, describe_end, exit_status, is_final
from meshwright.runtime.launch.launcher import build_program
from meshwright.runtime.ranks.orphans import LAUNCHER_PID
from meshwright.runtime.ranks.world import ATTEMPT

ASK_SECONDS = 2.0  # between a worker's questions whether the run is to stop
CAUSE_SECONDS = 3.0  # in which the cause of a failure may show after a rank that only lost another
_child: subprocess.Popen[bytes] | None = None  # the rank of this worker
_is_stopped = False


@ray.remote(num_cpus=0)
class Notes:
    """What the driver and the workers say to one another."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.is_stopping = False

    def stop(self) -> None:
        self.is_stopping = True

    def end(self, status: int) -> None:
        self.status = status

    def read(self) -> tuple[bool, int | None]:
        return self.is_stopping, self.status


def fit(
    command: list[str],
    workers: int | tuple[int, int],
    *,
    use_gpu: bool = False,
    resources: dict[str, float] | None = None,
    failures: int = 3,
    resize_seconds: float = 60.0,
    storage: str | None = None,
    complete: elastic.CompleteSettings = elastic.take_as_given,
) -> int:
    """Run `command` (train and its flags, or a script) on Ray's workers and return its status.

    `workers` is their number, or the least and the most of them; `resources` are those of each,
    `failures` the most restarts, `resize_seconds` the time between two looks for more resources.
    `storage` holds Ray's own notes of the run, in its folder `ray` (none: --save), which all nodes
    must share; `complete` may take a model's settings from --load. In the main thread, SIGTERM
    lets the run save.
    """
    least, most = (workers, workers) if isinstance(workers, int) else workers
    shapes = elastic.find_shapes(command, least, most, complete)
    build_program(command)
    ray.init(ignore_reinit_error=True)
    # On this node: it may lose others.
    driver_node = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    notes: Any = Notes.options(scheduling_strategy=driver_node).remote()  # type: ignore[attr-defined]
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={
            "command": command,
            "shapes": shapes,
            "notes": notes,
            "folder": os.getcwd(),
        },
        torch_config=RankConfig(),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=use_gpu,
            resources_per_worker=resources,
            elastic_resize_monitor_interval_s=resize_seconds,
        ),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=failures),
            storage_path=os.path.abspath(storage or elastic.save_folder(command) or "."),
            name="ray",
        ),
    )
    # Python handles signals in the main thread alone.
    is_main = threading.current_thread() is threading.main_thread()
    with host.handled([signal.SIGTERM] * is_main, lambda number, frame: notes.stop.remote()):
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            print(f"meshwright on Ray: {error}", file=sys.stderr)
            return HANG
    status: int | None = ray.get(notes.read.remote())[1]
    return status or DONE


def has_gpus() -> bool:
    ray.init(ignore_reinit_error=True)
    return bool(ray.cluster_resources().get("GPU"))


class RankConfig(TorchConfig):  # type: ignore[misc]
    """Ray's settings without its connections: the ranks connect themselves."""

    @property
    def backend_cls(self) -> type[Backend]:
        return RayBackend


class RayBackend(Backend):  # type: ignore[misc]
    """Where the ranks of each attempt meet, and their end before the next one."""

    share_cuda_visible_devices = True
    sizes: list[int] = []  # the numbers of workers of all attempts

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        address, port = worker_group.execute_single(0, find_address)
        attempts = len(self.sizes)
        size = len(worker_group)
        why = "on Ray"
        if attempts:
            why = f"attempt {attempts + 1} on Ray, with {size} workers after {self.sizes[-1]}"
        self.sizes = [*self.sizes, size]
        worker_group.execute(
            set_variables, {"MASTER_ADDR": address, "MASTER_PORT": str(port), ATTEMPT: why}
        )

    def on_shutdown(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Let the ranks save, if all are there, before Ray starts others in their place."""
        worker_group.execute(stop_rank)


def set_variables(values: dict[str, str]) -> None:
    # its method itself would be sent with a copy of the driver's variables
    os.environ.update(values)


def find_address() -> tuple[str, int]:
    """Return this node's address and a free port."""
    # The system chooses a port, which is free again when this socket closes.
    with socket.socket() as s:
        s.bind(("", 0))
        return ray.util.get_node_ip_address(), s.getsockname()[1]


def stop_rank() -> None:
    global _is_stopped
    _is_stopped = True
    if _child is not None and _child.poll() is None:
        _child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            _child.wait(GRACE_SECONDS)


def run_rank(job: dict[str, Any]) -> None:
    """Run one rank as a child of this worker; raise if it fails and another start may help."""
    global _child
    context = ray.train.get_context()
    rank = context.get_world_rank()
    size = context.get_world_size()
    # Shapes begin with the largest; take the first that these workers suffice for.
    shape = next(shape for shape in job["shapes"] if shape.ranks <= size)
    if rank >= shape.ranks:
        return  # idle: so many ranks would not fit the command
    why = f"{os.environ[ATTEMPT]}: {shape.ranks} of {size} ranks{shape.describe()}"
    world = {
        "RANK": rank,
        "WORLD_SIZE": shape.ranks,
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": min(context.get_local_world_size(), shape.ranks),
        LAUNCHER_PID: os.getpid(),
    }
    environ = os.environ | {name: str(value) for name, value in world.items()} | {ATTEMPT: why}
    words = [sys.executable, *build_program(job["command"]), *shape.flags]
    _child = subprocess.Popen(words, env=environ, cwd=job["folder"])
    asked = time.monotonic()
    notes = job["notes"]
    while _child.poll() is None:
        time.sleep(0.1)
        if time.monotonic() - asked > ASK_SECONDS:
            asked = time.monotonic()
            if ray.get(notes.read.remote())[0] and not _is_stopped:
                _child.terminate()
                # It is asked to save once, and not again within that time.
                asked += GRACE_SECONDS
    if (code := _child.returncode) == DONE or _is_stopped:
        return
    is_stopping, status = ray.get(notes.read.remote())
    if is_final(code) or (is_stopping and exit_status(code) == SIGTERM):
        ray.get(notes.end.remote(exit_status(code)))
        return
    # Another rank may say why, which ends the run; a failure here would start it again.
    if code in LOST:
        time.sleep(CAUSE_SECONDS)
        if ray.get(notes.read.remote())[1] is not None:
            return
    raise RuntimeError(f"rank {rank} {describe_end(code)}")
