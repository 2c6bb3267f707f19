"""A run killed at any moment and started again gives the same losses, bit for bit, with dropout.

Each launch is a separate process, forked from a server that has imported torch, so that a kill is a
real SIGKILL and a launch takes a fraction of a second. The controls leave one thing out when
resuming, and must differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers import printed_losses
from meshwright.__main__ import main
from meshwright.data.format.writer import Writer
from ranks import PRELOAD

pytestmark = pytest.mark.whole  # seconds, not moments

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(PRELOAD)

STEPS = 40
FLAGS = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
 --global-batch-size 4 --lr 1e-2 --lr-warmup-fraction .2 --train-iters {STEPS} --eval-interval 10 --eval-iters 1
 --log-interval 10 --vocab-size 64 --device cpu --save-interval 3 --split 80,10,10""".split()

POINTS = (
    "begin after_mkdir written_unsynced shard_done manifest_unsynced before_rename after_rename "
    "before_tracker after_tracker"
).split()


def _train(folder: Path, point: str | None, control: str | None) -> None:
    """One launch: the same command every time."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from meshwright.checkpoint import publish
    from meshwright.training import resume
    from meshwright.training import run as train

    torch.set_num_threads(1)
    if point is not None:

        def reached(name: str) -> None:
            seen = folder / f"seen-{name}"
            if name == point and not seen.exists():
                seen.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        publish.reached = reached
    if control == "data":
        original = resume.Progress

        @dataclasses.dataclass
        class Forgetful(original):  # type: ignore[misc,valid-type]
            def __post_init__(self) -> None:
                self.consumed_train_samples = 0

        resume.Progress = Forgetful  # type: ignore[misc]
    if control == "optimizer":
        from meshwright.parallel.zero import ParameterStore

        publish = ParameterStore.publish_weights

        def forget_moments(self: ParameterStore, *more: object) -> None:
            publish(self, *more)
            if not getattr(self, "cleared", False):
                self.cleared = True  # type: ignore[attr-defined]
                for piece in self.pieces:
                    piece.state["exp_avg"].zero_()

        ParameterStore.publish_weights = forget_moments  # type: ignore[method-assign]
    train.write_report = lambda folder: None  # drawing takes longer than the run
    run = str(folder / "run")
    with open(folder / "log", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        status = main(["train", *FLAGS, "--data-path", str(folder.parent / "data"), "--save", run, "--load", run])
    os._exit(status)


def launch(folder: Path, kill_after: float | None = None, point: str | None = None, control: str | None = None) -> int:
    process = FORK.Process(target=_train, args=(folder, point, control))
    process.start()
    if kill_after is not None:
        time.sleep(kill_after)
        if process.pid and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def finish(folder: Path) -> None:
    status = launch(folder)
    assert status == 0, (folder / "log").read_text()[-2000:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], float]:
    """The data, and the losses and seconds of an undisturbed run."""
    root = tmp_path_factory.mktemp("kill")
    rng = np.random.RandomState(0)
    with Writer(root / "data", np.uint16) as writer:
        for _ in range(60):
            writer.add(rng.randint(0, 64, rng.randint(5, 60)))
            writer.end_document()
    (root / "clean").mkdir()
    (root / "warm").mkdir()
    finish(root / "warm")
    start = time.perf_counter()
    finish(root / "clean")
    took = time.perf_counter() - start
    clean = printed_losses(root / "clean" / "run")
    assert len(clean) == STEPS and printed_losses(root / "warm" / "run") == clean
    return root, clean, took


@pytest.mark.whole
@pytest.mark.parametrize("wanted", [8, pytest.param(20, marks=pytest.mark.long)])
def test_kills_at_random_moments(
    undisturbed: tuple[Path, list[str], float], wanted: int, figures: Callable[..., None]
) -> None:
    """Kill each run until a launch finishes, then begin the next, until `wanted` kills have hit."""
    root, clean, took = undisturbed
    rng, kills, launches, runs, differing = random.Random(wanted), 0, 0, 0, 0
    while kills < wanted:
        folder = root / f"random-{wanted}-{runs}"
        folder.mkdir()
        status = -signal.SIGKILL
        while status == -signal.SIGKILL:
            launches += 1
            status = launch(folder, kill_after=rng.uniform(0.1, 0.9) * took if kills < wanted else None)
            kills += status == -signal.SIGKILL
        assert status == 0, (folder / "log").read_text()[-2000:]
        runs += 1
        differing += sum(a != b for a, b in zip(printed_losses(folder / "run"), clean, strict=True))
        assert not list(folder.glob("run/*.tmp"))
    figures(kills=kills, launches=launches, differing=f"{differing}/{STEPS * runs}")
    assert differing == 0


@pytest.mark.parametrize("point", POINTS)
def test_kill_at_each_point_of_the_save(undisturbed: tuple[Path, list[str], float], point: str) -> None:
    root, clean, _ = undisturbed
    folder = root / point
    (folder / "run/tokenizer").mkdir(parents=True)
    for left in ("config.toml.4711.tmp", "tokenizer/meta.json.4711.tmp"):  # where a kill may fall as well
        (folder / "run" / left).touch()
    assert launch(folder, point=point) == -signal.SIGKILL
    finish(folder)
    assert printed_losses(folder / "run") == clean
    assert not list(folder.glob("run/**/*.tmp"))


@pytest.mark.parametrize("control", ["data", "optimizer"])
def test_control_without_restoring_differs(undisturbed: tuple[Path, list[str], float], control: str) -> None:
    """If this passed with equal losses, the tests above would prove nothing."""
    root, clean, took = undisturbed
    folder = root / f"control-{control}"
    folder.mkdir()
    assert launch(folder, point="after_tracker") == -signal.SIGKILL
    assert launch(folder, control=control) == 0
    assert printed_losses(folder / "run") != clean
