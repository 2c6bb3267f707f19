"""Measure what a start and a loss cost a run of N ranks, on a machine with two cores.

    python benchmarks/thousand_ranks.py measure --to RECORD  # appends to RECORD/costs-ranks.jsonl
    python benchmarks/thousand_ranks.py draw --to RECORD     # docs/scaling.svg, from these

The code is that of a run. The store of the meeting is torch's, on sockets, with a thread for each
rank; the tree of small values has queues in the place of sockets, and counts what they carry; a
rank's groups are torch's fake ones, its tensors are on the meta device; the machines of an elastic
run live on a simulated clock.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "runtime" / "launch")]

# torch's store looks up the name of each address; where nobody answers, that takes 10 s a process.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import describe_machine  # noqa: E402
from simulated import LostMachine  # noqa: E402
from torch._C._distributed_c10d import PrefixStore, TCPStore  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from meshwright.config import flags  # noqa: E402
from meshwright.config.schema import TrainConfig  # noqa: E402
from meshwright.parallel.layout import connect, layout_of  # noqa: E402
from meshwright.runtime.ranks import connect as meetings  # noqa: E402
from meshwright.runtime.ranks.compare import require_equal  # noqa: E402
from meshwright.runtime.ranks.team import Team, connect_tree  # noqa: E402
from meshwright.runtime.ranks.watchdog import Sign, Watchdog  # noqa: E402
from meshwright.training.before import one_rank  # noqa: E402
from meshwright.training.state.resume import saved_settings  # noqa: E402
from team_threads import on_threads  # noqa: E402

PROCESSES = 4  # that hold the ranks of a meeting
LONG = timedelta(minutes=10)
FLAGS = (
    "--preset=gpt3-175b --mock-data --vocab-size=51200 --train-iters=10 --tensor-model-parallel-size=8 "
    "--pipeline-model-parallel-size=8 --bf16 --micro-batch-size=1 --global-batch-size=32768 --sequence-parallel "
    "--zero-stage=1 --lr=1e-4"
).split()


class CountedStore:
    """A client of the store that counts its requests, and the bytes of keys and values."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests, self.size = store, 0, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            result = getattr(self.store, name)(*values)
            self.requests += 1
            self.size += len(json.dumps(values)) + (len(result) if isinstance(result, bytes) else 8)
            return result

        return call


# The meeting, on torch's store


def meet_some(ranks: range, size: int, port: int, barrier: Any, results: Any) -> None:
    """Let some of the ranks meet; report seconds, requests and bytes of each."""
    stores: list[Any] = []
    rows: list[Any] = []

    def join() -> None:
        stores.append(TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False))

    def meet(rank: int, store: CountedStore) -> None:
        meetings.meet_all(store, rank, size, time.monotonic() + 500)  # type: ignore[arg-type]
        rows.append([time.monotonic(), store.requests, store.size])

    began = time.monotonic()
    run_threads([join] * len(ranks))
    connected = time.monotonic() - began
    barrier.wait()
    met = time.monotonic()
    run_threads(
        [lambda r=r, s=s: meet(r, CountedStore(s)) for r, s in zip(ranks, stores, strict=True)]
    )
    results.put([connected, [[at - met, *rest] for at, *rest in rows]])
    results.close()
    results.join_thread()
    os._exit(0)


def run_threads(acts: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_meeting(size: int) -> dict[str, Any]:
    store = TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    number = min(PROCESSES, size)
    barrier, results = context.Barrier(number), context.Queue()
    share = size // number
    parts = [range(n * share, (n + 1) * share) for n in range(number)]
    started = [
        context.Process(target=meet_some, args=(part, size, store.port, barrier, results))
        for part in parts
    ]
    for process in started:
        process.start()
    before = time.process_time()  # this process only serves
    rows = [results.get(timeout=500) for _ in parts]
    served = time.process_time() - before
    for process in started:
        process.join()
    each = [row for _, some in rows for row in some]
    return {
        "seconds to connect": max(seconds for seconds, _ in rows),
        "seconds": max(row[0] for row in each),
        "requests of a rank": max(row[1] for row in each),
        "bytes of a rank": max(row[2] for row in each),
        "requests at rank 0": sum(row[1] for row in each),
        "seconds of a processor at rank 0": served,
    }


# The tree of small values


def measure_exchanges(size: int) -> dict[str, Any]:
    settings = saved_settings(configuration(size))
    text = len(json.dumps(settings))
    acts: dict[str, Callable[[Team], Any]] = {
        "comparison of settings": lambda team: require_equal(team, settings),
        "run_on_all": lambda team: team.run_on_all(lambda: None),
        "run_on_rank_0": lambda team: team.run_on_rank_0(lambda: "x" * 1000),
        "gather": lambda team: team.gather(team.rank),
    }
    row: dict[str, Any] = {"bytes if each sent its settings to each": text * (size - 1)}
    for name, act in acts.items():
        results, received = on_threads(size, act)
        assert not [result for result in results if isinstance(result, Exception)]
        row[f"{name}: bytes at a leaf"] = sum(received[-1]) if size % 16 != 1 else sum(received[-2])
        row[f"{name}: bytes at rank 0"] = sum(received[0])
        row[f"{name}: messages at rank 0"] = len(received[0])
    return row


def measure_tree(size: int, is_mesh: bool = False) -> dict[str, Any]:
    """Connect all ranks over gloo, in threads: a tree, or each with each."""
    store = dist.HashStore()
    groups: dict[int, Any] = {}

    def join(rank: int) -> None:
        if is_mesh:
            groups[rank] = dist.ProcessGroupGloo(PrefixStore("mesh", store), rank, size, LONG)
        else:
            groups[rank] = connect_tree(PrefixStore("one", store), rank, size, LONG)

    wall, processor = time.monotonic(), time.process_time()
    run_threads([lambda rank=rank: join(rank) for rank in range(size)])
    return {
        "seconds": time.monotonic() - wall,
        "seconds of a processor": time.process_time() - processor,
    }


def measure_latency(count: int = 300) -> dict[str, Any]:
    """Measure an exchange of two ranks that are processes: up and down one level."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    started = [
        context.Process(target=exchange_often, args=(rank, port.port, count, results))
        for rank in range(2)
    ]
    for process in started:
        process.start()
    seconds = max(results.get(timeout=100) for _ in started)
    for process in started:
        process.join()
    return {"milliseconds of an exchange between two processes": 1000 * seconds}


def exchange_often(rank: int, port: int, count: int, results: Any) -> None:
    store = TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False)
    team = Team(rank, 2, connect_tree(store, rank, 2, LONG))
    team.wait()
    began = time.monotonic()
    for _ in range(count):
        team.total(rank)
    results.put((time.monotonic() - began) / count)
    team.wait()


# One rank


def configuration(size: int) -> TrainConfig:
    words = [*FLAGS, f"--world-size={size}", "--rank=5"]
    return flags.parse_settings(TrainConfig, words, "meshwright train", check=False).config


def measure_groups(size: int) -> dict[str, Any]:
    layout = layout_of(configuration(size), 5)
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=size)
    connect(layout)  # which imports
    tracemalloc.start()
    began = time.thread_time()
    layout = connect(layout)
    seconds, memory = time.thread_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    dist.destroy_process_group()
    return {
        "groups of a rank": len(layout.groups),
        "seconds": seconds,
        "bytes of Python's memory": memory,
    }


def measure_set_up(size: int) -> dict[str, Any]:
    config = configuration(size)
    one_rank.describe_rank(config, 51200, 51200)  # which imports
    began = time.monotonic()
    one_rank.describe_rank(config, 51200, 51200)
    seconds = time.monotonic() - began
    tracemalloc.start()
    one_rank.describe_rank(config, 51200, 51200)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"seconds": seconds, "bytes of Python's memory": memory}


# The watchdog


def measure_signs(size: int) -> dict[str, Any]:
    """Have one rank read the heartbeats of all, as up to eight do that wait for long."""
    server = TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    for rank in range(size):
        server.set(
            f"sign/{rank}",
            json.dumps(Sign(call="loop.py:120 in step", doing="forward-backward of step 7")),
        )
    store = CountedStore(
        TCPStore("127.0.0.1", server.port, None, False, LONG, wait_for_workers=False)
    )
    reader = SimpleNamespace(store=store, world=SimpleNamespace(size=size))
    began = time.monotonic()
    signs = Watchdog.read_all(reader, "sign")  # type: ignore[arg-type]
    assert len(signs) == size
    return {
        "seconds to read all signs": time.monotonic() - began,
        "requests": store.requests,
        "bytes": store.size,
    }


# A lost machine


def measure_loss(size: int) -> dict[str, Any]:
    run = LostMachine(size // 8).simulate()
    requests, sizes = run.steady
    others = range(1, run.machines)
    return {
        "seconds until all know": max(run.learned.values()) - run.lost_at,
        "seconds until the others start": max(run.resumed.values()) - run.lost_at,
        "requests of a machine, a second": max(requests[n] for n in others) / 10,
        "bytes of a machine, a second": max(sizes[n] for n in others) / 10,
        "requests of machine 0, a second": requests[0] / 10,
        "bytes of machine 0, a second": sizes[0] / 10,
    }


MEASURED: dict[str, tuple[Callable[..., dict[str, Any]], tuple[int, ...]]] = {
    "meeting": (measure_meeting, (8, 64, 512, 4096)),
    "small values": (measure_exchanges, (8, 64, 512, 4096)),
    "connections: tree": (measure_tree, (8, 16, 64, 256)),
    "connections: each with each": (lambda size: measure_tree(size, True), (8, 16, 64, 128)),
    "groups": (measure_groups, (64, 512, 4096, 32768)),
    "set-up of a rank": (measure_set_up, (64, 512, 4096, 32768)),
    "heartbeats": (measure_signs, (8, 64, 512, 4096)),
    "lost machine": (measure_loss, (128, 512, 4096)),
}


def measure(to: Path, names: list[str], ranks: list[int]) -> None:
    print(describe_machine("torch"))
    with (to / "costs-ranks.jsonl").open("a") as file:
        for name, (act, sizes) in MEASURED.items():
            for size in (ranks or sizes) if not names or name in names else ():
                row = {"what": name, "ranks": size} | act(size)
                print(json.dumps(row), flush=True)
                file.write(json.dumps(row) + "\n")
        if not names:
            row = {"what": "exchange", "ranks": 2} | measure_latency()
            print(json.dumps(row))
            file.write(json.dumps(row) + "\n")


# The picture

# Panels: title, and lines as (what, value, label, factor).
PANELS = [
    (
        "seconds",
        [
            ("meeting", "seconds of a processor at rank 0", "a core of rank 0, for the meeting"),
            ("set-up of a rank", "seconds", "set-up of a rank"),
            ("groups", "seconds", "groups of a rank"),
            ("lost machine", "seconds until all know", "a lost machine is known"),
            ("lost machine", "seconds until the others start", "the others start"),
        ],
    ),
    (
        "bytes that a rank or a machine receives",
        [
            ("small values", "comparison of settings: bytes at a leaf", "comparison of settings"),
            ("small values", "comparison of settings: bytes at rank 0", "the same, at rank 0"),
            ("small values", "bytes if each sent its settings to each", "before: settings of all"),
            (
                "lost machine",
                "bytes of a machine, a second",
                "a machine of an elastic run, a second",
            ),
        ],
    ),
]


def read_rows(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (record / "costs-ranks.jsonl").read_text().splitlines()]


def draw(record: Path) -> None:
    from matplotlib.figure import Figure

    from meshwright.apps.pages import plot

    rows = read_rows(record)
    figure = Figure(figsize=(9, 5), layout="constrained")
    figure.patch.set_visible(False)
    colours = (plot.LINE, plot.POINT, plot.INK, plot.BAD, "#4f9d69")
    for axes, (title, lines) in zip(figure.subplots(1, 2), PANELS, strict=True):
        plot.style(axes, "ranks")
        for (what, value, label), colour in zip(lines, colours, strict=False):
            points = sorted(
                (row["ranks"], row[value]) for row in rows if row["what"] == what and value in row
            )
            axes.plot(*zip(*points, strict=True), color=colour, marker=".", lw=1.4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title, color=plot.INK, fontsize=10)
        axes.legend(
            fontsize=8,
            frameon=False,
            labelcolor=plot.INK,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.15),
        )
    (ROOT / "docs" / "scaling.svg").write_text(plot.svg_of(figure, "what N ranks cost"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("act", choices=["measure", "draw"])
    parser.add_argument("--to", type=Path, required=True, help="folder of the record")
    parser.add_argument("--only", nargs="*", default=[], help=f"some of: {', '.join(MEASURED)}")
    parser.add_argument(
        "--ranks", type=int, nargs="*", default=[], help="numbers of ranks (none: some for each)"
    )
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    measure(given.to, given.only, given.ranks) if given.act == "measure" else draw(given.to)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads of hundreds of ranks would be joined one by one


if __name__ == "__main__":
    main()
