"""The cost of the checks of a run: a step with and without them, in turns.

usage: python benchmarks/trust_cost.py [--pairs N] [--steps N] [--check-every K] -- FLAGS OF TRAIN

Off: the plain step. On: the watchdog with its heartbeats over a store, the times of each step
for naming slow ranks, and the hash of the weights every K steps; K is smaller than the default, so
that few steps show it. Then each part is measured alone, and its share of a step at the defaults is
computed. One process does all of it, as each rank of a larger run would; the exchange of 8 bytes a
rank is left out. The hash of saved files (SHA-256, in the background on a GPU) is timed beside it.
"""

from __future__ import annotations

import datetime
import hashlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
from common import describe_machine, new_parser, print_head, print_row

from meshwright.apps.bench.bench import find_commit
from meshwright.base import console
from meshwright.base import device as devices
from meshwright.config import flags
from meshwright.config.schema import Parallel, TrainConfig
from meshwright.kernels import clock
from meshwright.parallel.layout import Layout
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.runtime.ranks.team import Team
from meshwright.runtime.ranks.watchdog import Watchdog, thread_time
from meshwright.runtime.ranks.world import World
from meshwright.training import network
from meshwright.training.before.resolve import TrainingRun, Vocabulary
from meshwright.training.health.replicas import Copies, Replicas
from meshwright.training.health.stop import StopConditions
from meshwright.training.log.timers import Startup, Timers
from meshwright.training.loop import Trainer
from meshwright.training.setup import build_state, open_feed, open_log

NEEDED = "--mock-data --eval-iters 0 --train-iters 1000000 --log-interval 1000000 --lr 1e-5".split()


def main(argv: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="turns of off and on (default: 5)")
    parser.add_argument(
        "--steps", type=int, default=20, help="steps of each half of a turn (default: 20)"
    )
    parser.add_argument(
        "--check-every", type=int, default=5, help="steps between hashes while on (default: 5)"
    )
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args(argv)
    trainer = open_trainer([*NEEDED, *given.flags])
    every = given.check_every
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    run(trainer, 5, False, every)  # kernels are loaded, graphs captured
    run(trainer, 5, True, every)
    used = lived = 0.0
    for turn in range(given.pairs):
        for name in ("off", "on") if turn % 2 == 0 else ("on", "off"):
            watchdog = start_watchdog() if name == "on" else None
            begun = time.perf_counter()
            seconds[name].append(run(trainer, given.steps, name == "on", every))
            if watchdog is not None:
                lived += time.perf_counter() - begun
                used += sum(thread_time(thread.ident or 0) for thread in watchdog.threads)
                watchdog.stop()
    report(trainer, seconds, every, used / lived)
    return 0


def open_trainer(words: list[str]) -> Trainer:
    console.set_stream(None)
    config = flags.parse_settings(TrainConfig, words, "trust_cost").config
    device, team = devices.open_device(config.parallel.device, 0), Team()
    timers = Timers(0, "minmax", device, team)
    vocab = config.tokenizer.vocab_size or 50257
    padded = (
        -(-vocab // config.model.make_vocab_size_divisible_by)
        * config.model.make_vocab_size_divisible_by
    )
    state = build_state(network.Spec(config, Layout(), device, vocab, padded), team, Startup())
    resolved = TrainingRun(config, Vocabulary(None, vocab, padded))
    feed, stop = open_feed(state, None, None), StopConditions(config.training, time.perf_counter())
    trainer = Trainer(state, feed, open_log(state, resolved, timers, Startup()), timers, stop)
    store = trainer.net.store
    # As on a rank of several: the weights and the masters are what other ranks hold too.
    held = store.weights_by_name()
    copies = [Copies("weights", [[0]], held, getattr(store, "weights", None))]
    if getattr(store, "master", None) is not getattr(store, "weights", None):
        copies.append(Copies("masters", [[0]], {}, store.master))  # type: ignore[union-attr]
    trainer.replicas = Replicas(trainer.net, trainer.team, copies, 1, None, at_once=False)
    trainer.hooks.insert(0, trainer.replicas)
    return trainer


def start_watchdog() -> Watchdog:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store = TCPStore(
        "127.0.0.1", 0, None, True, datetime.timedelta(seconds=30), wait_for_workers=False
    )
    return Watchdog(World(address="127.0.0.1", port=store.port), PrefixStore("w", store), 10.0)


def run(trainer: Trainer, steps: int, is_on: bool, every: int) -> float:
    """Return the seconds of a step."""
    store, device = trainer.net.store, trainer.net.device
    trainer.replicas.every = every if is_on else 1 << 40
    if trainer.net.graphs is None:  # graphs keep the kernels that they were captured with
        store.times = clock.new_times(2, device) if is_on else None
    devices.synchronize(device)
    begun = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    trainer.finish()
    devices.synchronize(device)
    return (time.perf_counter() - begun) / steps


def report(trainer: Trainer, seconds: dict[str, list[float]], every: int, threads: float) -> None:
    """Print both ways in turns, then each part alone, which is above the noise of a busy machine.

    `threads` is the processor's time of the watchdog's threads for each second of the run.
    """
    default, device = Parallel().check_replicas_interval, trainer.net.device
    off, on = (statistics.median(seconds[name]) for name in ("off", "on"))
    parameters = sum(x.numel() for x in trainer.net.store.weights_by_name().values())
    graphs = "on" if trainer.net.graphs is not None and not trainer.net.graphs.why_off else "off"
    print(
        f"commit {find_commit()}, {describe_machine('torch')}, {parameters:,} parameters, CUDA graphs {graphs}\n"
    )
    print_head("turn", "off, ms a step", f"on (hash every {every})", "on / off")
    for n, (a, b) in enumerate(zip(seconds["off"], seconds["on"], strict=True), 1):
        print_row(n, f"{1e3 * a:.3f}", f"{1e3 * b:.3f}", f"{b / a:.4f}")
    print_row("median", f"{1e3 * off:.3f}", f"{1e3 * on:.3f}", f"{on / off:.4f}")
    print()
    replicas, times = trainer.replicas, clock.new_times(2, device)
    hashed = alone(lambda: (replicas.begin(0), replicas.look()), 5, device)
    stamped = 2 * alone(lambda: clock.stamp(times, 0), 100, device) if times is not None else 0.0
    phases = 4 * alone(lambda: heartbeat.enter("data", 1), 1000, device)
    parts = {
        f"hash of the copies, every {default} steps": hashed / default,
        "times of a step": stamped,
        "phases of a step": phases,
        "threads of the watchdog": threads * off,
    }
    print_head("part alone, at defaults", "ms a step", "share")
    for name, cost in (parts | {"all": sum(parts.values())}).items():
        print_row(name, f"{1e3 * cost:.4f}", f"{cost / off:.4%}")
    print(f"\none hash, waited for: {1e3 * hashed:.3f} ms", end="; ")
    data = bytes(1 << 26)
    begun = time.perf_counter()
    hashlib.sha256(data).digest()
    print(
        f"SHA-256 of saved files: {len(data) / (time.perf_counter() - begun) / 1e9:.2f} GB/s on one core"
    )


def alone(act: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the median seconds of an act, of five rounds of `count`."""
    rounds = []
    for _ in range(5):
        devices.synchronize(device)
        begun = time.perf_counter()
        for _ in range(count):
            act()
        devices.synchronize(device)
        rounds.append((time.perf_counter() - begun) / count)
    return statistics.median(rounds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
