"""Written by `meshwright launch --write`, version 0.16.0.

Submit it from the folder that holds this file; the variable is the time to save after `ray job stop`:

    ray job submit --working-dir . \
        --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300"}}' -- python driver.py

One launcher is started on each of NODES nodes. Python, FOLDER and the paths in COMMAND must be the
same on all of them. Crashes, time-outs and lost nodes are started again and continue from the
checkpoints of the command; mistakes in settings and bad data are not.
"""

import os
import signal
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = 2
RESOURCES = {"CPU": 32, "GPU": 8}  # of each node
FOLDER = '/home/me/work'  # where relative paths in the command begin
PORT = 29500  # free on the first node
RESTARTS = 20  # most starts after the first
FINAL = (2, 65, 70, 73, 74, 76)  # statuses after which another start would end the same way
ENVIRONMENT = {}
LAUNCH = ['--nproc-per-node', '8', '--wait', '600']
COMMAND = [
    'train',
    '--preset', 'gpt2-345m',
    '--bf16',
    '--zero-stage', '1',
    '--data-path', 'corpus_text_document',
    '--save', 'run',
    '--load', 'run',
    '--save-interval', '1000',
]
stopped = []  # signals that were not passed on yet


@ray.remote(max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def launch(node, first):
    """Run the launcher of one node; when the task is cancelled, let the run save."""
    place = ["--nnodes", str(NODES), "--node-rank", str(node), "--master-addr", first, "--master-port", str(PORT)]
    words = [sys.executable, "-u", "-m", "meshwright", "launch", *LAUNCH, *place, *COMMAND]
    process = subprocess.Popen(words, cwd=FOLDER, env={**os.environ, **ENVIRONMENT})
    while process.poll() is None:
        try:
            time.sleep(1)
        except KeyboardInterrupt:
            process.terminate()
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def start(group):
    """Start all launchers and return the status that explains how they ended."""

    def on(node, function, **resources):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        return function.options(scheduling_strategy=where, **resources)

    given = {"num_cpus": RESOURCES["CPU"], "num_gpus": RESOURCES.get("GPU", 0)}
    first = ray.get(on(0, address, num_cpus=1).remote())
    tasks = [on(node, launch, **given).remote(node, first) for node in range(NODES)]

    while len(ray.wait(tasks, num_returns=NODES, timeout=1)[0]) < NODES:
        for task in tasks if stopped else []:
            ray.cancel(task)
        stopped.clear()
    statuses = []
    for task in tasks:
        try:
            statuses.append(ray.get(task))
        except ray.exceptions.TaskCancelledError:
            statuses.append(143)
        except ray.exceptions.RayError as error:  # the node or its worker is lost
            print(error, file=sys.stderr)
            statuses.append(75)
    return next((status for status in statuses if status in FINAL), max(statuses))


def main():
    ray.init()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    for restart in range(RESTARTS + 1):
        if restart:
            print(f"status {status}; restart {restart} of at most {RESTARTS}", file=sys.stderr, flush=True)
        group = placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD")
        ray.get(group.ready())
        status = start(group)
        remove_placement_group(group)
        if status in (0, 130, 143, *FINAL):
            break
    return status


if __name__ == "__main__":
    sys.exit(main())
