"""A run that goes back in place holds what loading that step anew gives: every tensor and number.

Both trainers are walked attribute by attribute, so state that is added later is compared too.
"""

from __future__ import annotations

import functools
import math
import shutil
import time
import types
from collections.abc import Callable, Mapping, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import TINY_FLAGS
from meshwright.base import device as devices
from meshwright.base.console import silence
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.parallel.layout import Layout
from meshwright.runtime.ranks.team import ALONE
from meshwright.training import micro_step
from meshwright.training.before.resolve import find_vocabulary
from meshwright.training.health.stop import StopConditions
from meshwright.training.inflight import Submitted
from meshwright.training.log.metrics import Metrics
from meshwright.training.log.timers import Startup, Timers
from meshwright.training.loop import Trainer
from meshwright.training.network import Spec
from meshwright.training.setup import build_state, open_feed, sizes_of_run
from meshwright.training.state.state import SPIKE_WINDOW
from meshwright.training.step import StepSettings

CPU = torch.device("cpu")
SAVED, BAD, BATCH = 2, 4, 4  # the run goes back from step 4 to the weights of step 2
FLAGS = [
    *TINY_FLAGS,
    "--num-layers=1",
    "--micro-batch-size=4",
    "--train-iters=20",
    "--log-interval=100",
]
FLAGS += [f"--save-interval={SAVED}", f"--eval-interval={BAD + SAVED}"]
NEXT = 4.21  # about the loss of the first steps
NONFINITE, SPIKE = "--on-nonfinite=rollback:2", "--on-spike=rollback:2"
FP8 = "--bf16 --fp8-format=hybrid --attention-dropout=0 --fp8-amax-history-len=3 --fp8-amax-compute-algo=max"

# Which start of the program it is, and how long it took: all else is the state of the run.
OF_A_START = {
    ".state.loaded",
    ".state.has_loaded",
    ".state.micro_batch_before",
    ".state.saver.folder",
    ".in_flight.ended",
    ".in_flight.spent",
    ".metrics.iteration",
    ".metrics.seconds",
    ".stop.began",
}
LOGGED = (".metrics.run.", ".metrics.since_line", ".metrics.recent")  # what this start has logged
WITHIN_A_STEP = (".state.net.",)  # what each step writes before it reads it

ATOMS = (
    bool,
    int,
    float,
    str,
    bytes,
    type(None),
    Path,
    torch.dtype,
    torch.device,
    torch.Size,
    range,
    slice,
)
FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    type,
    functools.partial,
)
Found = dict[str, Any]


def walk(x: Any, path: str, found: Found, seen: dict[int, Any]) -> None:
    """Add each tensor, number and text that an object leads to, by the way to it.

    Settings never change. Of functions, and of what Python and torch keep for themselves, the type.
    """
    if isinstance(x, ATOMS):
        found[path] = repr(x)
        return
    if id(x) in seen or type(x).__module__.startswith("meshwright.config"):
        return
    seen[id(x)] = x
    if isinstance(x, Tensor):
        found[path] = x.dtype, x.shape, x.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        walk({**vars(x), "grad": x.grad} if x.is_leaf else vars(x), f"{path}.", found, seen)
    elif isinstance(x, np.ndarray | np.generic):
        found[path] = x.dtype, x.shape, x.tobytes()
    elif isinstance(x, Mapping):
        for number, (key, value) in enumerate(x.items()):
            walk(value, f"{path}[{key if isinstance(key, ATOMS) else number}]", found, seen)
        found[path] = len(x)
    elif isinstance(x, list | tuple | Set) or type(x).__name__ == "deque":
        for number, value in enumerate(sorted(x) if isinstance(x, Set) else x):
            walk(value, f"{path}[{number}]", found, seen)
        found[path] = len(x)
    elif not isinstance(x, FUNCTIONS) and is_walked(x):
        for name, value in vars(x).items():
            walk(value, f"{path}.{name}", found, seen)
    else:
        found[path] = type(x).__name__


def is_walked(x: Any) -> bool:
    is_ours = type(x).__module__.startswith("meshwright")
    return hasattr(x, "__dict__") and (is_ours or isinstance(x, nn.Module | torch.optim.Optimizer))


def everything(trainer: Trainer) -> Found:
    found: Found = {}
    walk(trainer, "", found, {})
    return found


def different(a: Found, b: Found, left_out: tuple[str, ...] = ()) -> list[str]:
    """Return the ways to what differs in the state of two runs."""
    paths = [
        path
        for path in a.keys() | b.keys()
        if path not in OF_A_START and not path.startswith((*LOGGED, *left_out))
    ]
    return sorted(path for path in paths if a.get(path, "missing") != b.get(path, "missing"))


def start(folder: Path, words: list[str]) -> Trainer:
    """Return a trainer that has loaded the newest step of a folder, or drawn its weights."""
    kept = [f"--save={folder}", *[f"--load={folder}"] * folder.exists()]
    config = flags.parse_settings(TrainConfig, [*FLAGS, *words, *kept], "meshwright train").config
    vocabulary = find_vocabulary(config, None)
    spec = Spec(config, Layout(), CPU, vocabulary.size, vocabulary.padded)
    state, timers = build_state(spec, ALONE, Startup(prints=False)), Timers(0, "minmax", CPU, ALONE)
    feed, metrics = (
        open_feed(state, vocabulary.tokenizer, None),
        Metrics(None, config, sizes_of_run(state), timers, ALONE),
    )
    return Trainer(
        state, feed, metrics, timers, StopConditions(config.training, time.perf_counter())
    )


def train_to(trainer: Trainer, iteration: int) -> None:
    while trainer.progress.iteration < iteration:
        if not trainer.skip_iterations():
            trainer.step()
            trainer.run_hooks_between_steps()
    trainer.finish()
    trainer.state.saver.wait()


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """spoil(step, by) multiplies the loss of a step."""
    forward, loss_sum = micro_step.forward_part, micro_step.loss_sum
    bad, seen = dict[int, float](), list[int]()

    def noting(net: Any, part: Any, batch: Any, *rest: Any) -> Any:
        seen.append(batch.first_sample)
        return forward(net, part, batch, *rest)

    monkeypatch.setattr(micro_step, "forward_part", noting)
    monkeypatch.setattr(micro_step, "loss_sum", lambda *a: loss_sum(*a) * bad.get(seen[-1], 1.0))
    return lambda iteration, by: bad.update({(iteration - 1) * BATCH: by})


def go_back_and_load(
    folder: Path, words: list[str], spoil: Callable[[int, float], None], by: float
) -> None:
    with silence():
        live = start(folder / "live", words)
        full = [NEXT + 0.01 * (-1) ** n for n in range(SPIKE_WINDOW)]
        live.state.losses.extend(full)
        train_to(live, SAVED)
        shutil.copytree(folder / "live", folder / "loaded")
        spoil(BAD, by)
        train_to(live, BAD)
        spoil(BAD, 1.0)
        loaded = start(folder / "loaded", words)
        p = loaded.progress
        assert (p.iteration, p.consumed_train_samples, p.schedule_samples) == (2, 8, 8)
        p.iteration, p.consumed_train_samples, p.rollbacks = 4, 16, 1
        p.consumed_train_tokens *= 2
        loaded.state.skips.append([8, "rolled back, passed over to 16"])
        loaded.saving.run(loaded.progress.iteration)
        loaded.state.saver.wait()
    assert different(everything(live), everything(loaded), WITHIN_A_STEP) == []
    with silence():
        for trainer in (live, loaded):
            train_to(trainer, BAD + 2)
    assert different(everything(live), everything(loaded)) == []
    assert live.progress.best_iteration == 6
    # The mean at the end has no step that was undone.
    assert [iteration for iteration, _ in live.metrics.recent] == [1, 2, 5, 6]


def overwrite(trainer: Trainer, number: int) -> None:
    """Give all that a checkpoint keeps another value, and what the guard knows of the last loss."""
    p, state, store = trainer.progress, trainer.state, trainer.net.store
    generator = torch.Generator().manual_seed(number)
    for _, _, x in store.named_state().values():
        x.copy_(torch.rand(x.shape, generator=generator))
    counters: list[tuple[Any, str]] = [(p, field.name) for field in fields(p)]
    counters += [
        (state.scaler, name) for name in vars(state.scaler) if name not in ("p", "dynamic")
    ]
    counters += [(store, "steps"), (trainer.guard, "since")]
    for n, (owner, name) in enumerate(counters):
        setattr(owner, name, 10 * number + n)
    state.losses.clear()
    state.losses.extend([float(number)] * (4 + number))
    state.skips = [[number, "passed over"]]
    trainer.guard.in_spike = True
    assert store.average is not None
    store.average.count.fill_(number)


def test_a_run_that_went_back_is_the_one_that_was_loaded(tmp_path: Path) -> None:
    words = f"--hidden-size=8 --vocab-size=16 --fp16 --ema=0.9 --optimizer=muon --keep-best {SPIKE}".split()
    with silence():
        live = start(tmp_path / "live", words)
        overwrite(live, 1)
        live.state.save()
        shutil.copytree(tmp_path / "live", tmp_path / "loaded")
        overwrite(live, 2)
        settings = StepSettings(0, 1.0, 0.0, 1.0, "global", False)
        live.guard.roll_back(
            Submitted(30, 120, 1920, 116, 1856, 4, 16, settings, 0.0, (), None, list),
            "a spike",
            "--on-spike",
            99,
        )
        loaded = start(tmp_path / "loaded", words)
    loaded.progress.iteration, loaded.progress.consumed_train_samples = 30, 120
    loaded.progress.consumed_train_tokens = 1920
    loaded.progress.nonfinite_in_a_row, loaded.progress.rollbacks = 0, 27
    loaded.state.skips.append([11, "rolled back, passed over to 120"])
    loaded.state.saver.kept = None
    assert different(everything(live), everything(loaded)) == []


@pytest.mark.parametrize(
    ("words", "by"),
    [
        (
            f"--fp16 --initial-loss-scale=256 --loss-scale-window=3 --ema=0.9 --optimizer=muon {SPIKE}",
            50.0,
        ),
        (f"{FP8} --ema=0.9 {NONFINITE}", math.nan),
    ],
)
def test_trained_on_it_stays_so(
    tmp_path: Path,
    spoil: Callable[[int, float], None],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    by: float,
) -> None:
    monkeypatch.setattr(devices, "has_fp8", lambda device: True)
    go_back_and_load(tmp_path, words.split(), spoil, by)
