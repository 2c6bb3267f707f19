"""Runs on several ranks: validated by all, ended by signals, time or a NaN."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from helpers import TINY_FLAGS, open_step, read_rows
from meshwright.__main__ import main
from meshwright.data.files.writer import Writer
from on_ranks import environments, run_programs

pytestmark = [pytest.mark.whole, pytest.mark.timeout(120)]
SCRIPT = Path(__file__).parents[2] / "pretrain_gpt.py"
MORE = "--num-layers=4 --params-dtype=float64 --attention-dropout=0 --global-batch-size=8 --lr-decay-iters=9"
FLAGS = [*TINY_FLAGS, *MORE.split(), "--train-iters=9", "--eval-interval=3"]
ENDLESS = ["--train-iters=100000", "--lr-decay-iters=100000"]


def on_ranks(world, *flags, folder):
    """Run `pretrain_gpt.py` on `world` ranks; return exit statuses and outputs."""
    words = [*FLAGS, *map(str, flags)]
    return run_programs(SCRIPT, [words] * world, environments(world), folder)


TP2, PP2 = "--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2"


def test_full_validation_on_ranks(tmp_path):
    """Every sample counts once in sets that no batch size divides, with masked tokens."""
    for n, tokens in enumerate((400, 333)):
        with Writer(tmp_path / f"d{n}", np.uint16) as writer:
            for k in range(0, tokens, 20):
                writer.add([*((k + n + i) * 7 % 63 for i in range(19)), 63])
                writer.end_document()
    data = "--no-mock-data --tokenizer-type=NullTokenizer --vocab-size=63 --eod-mask-loss --full-validation".split()
    data += ["--train-iters=2", "--eval-interval=2", f"--train-data-path={tmp_path}/d0"]
    data += ["--valid-data-path", f"{tmp_path}/d0", f"{tmp_path}/d1", "--multiple-validation-sets"]
    data += ["--global-batch-size=16"]
    assert main(["train", *FLAGS, *data, "--run-dir", str(tmp_path / "one")]) == 0
    statuses, outputs = on_ranks(2, *data, "--run-dir", "many", folder=tmp_path)
    assert statuses == [0] * 2, outputs[0][-3000:]
    want, got = (
        [(r["set"], r["loss"]) for r in read_rows(tmp_path / name, "validation")]
        for name in ("one", "many")
    )
    assert [name for name, _ in got] == ["d0", "d1"] * 2 == [name for name, _ in want]
    assert [loss for _, loss in got] == pytest.approx([loss for _, loss in want], rel=1e-9)


def strike(folder, number):
    """Send a signal to the last rank once the first step is in the log."""
    others = set(multiprocessing.active_children())  # processes that stay for all tests

    def wait():
        log = folder / "run/metrics.jsonl"
        while not log.exists() or '"step"' not in log.read_text():
            time.sleep(0.05)
        os.kill(max(p.pid for p in multiprocessing.active_children() if p not in others), number)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.fault("F16")
def test_one_ranks_signal_ends_all(tmp_path):
    """If one rank gets a signal, all finish and save the same step, and exit with its status."""
    thread = strike(tmp_path, signal.SIGTERM)
    statuses, outputs = on_ranks(2, PP2, "--save=run", *ENDLESS, folder=tmp_path)
    thread.join(10)
    assert statuses == [143] * 2, outputs
    assert len(list((tmp_path / "run").glob("iter_*"))) == 1 and "SIGTERM" in outputs[0]


def test_the_clock_ends_all(tmp_path):
    """Time runs out at different moments on the ranks; all save the same step and exit.

    However long the start takes, a step is taken.
    """
    clock = ["--exit-duration-in-mins=0.0001", "--eval-iters=0"]
    statuses, outputs = on_ranks(2, TP2, "--save=run", *ENDLESS, *clock, folder=tmp_path)
    assert statuses == [0] * 2, outputs[0][-3000:]
    (step,) = (tmp_path / "run").glob("iter_*")
    assert 0 < open_step(tmp_path / "run", int(step.name[5:])).state["iteration"] < 100000
    assert "exiting program at iteration" in outputs[0]


@pytest.mark.long
@pytest.mark.fault("F20")
def test_not_finite_on_all_ranks(tmp_path):
    """With an infinite loss every rank exits with 70, and one reports it."""
    statuses, outputs = on_ranks(2, "--lr=1e300", TP2, "--save=run", folder=tmp_path)
    assert statuses == [70] * 2, outputs[0][-2000:]
    assert "was not applied" in outputs[0] and not outputs[1].strip()


@pytest.mark.fault("F1")
def test_a_killed_rank_is_reported(tmp_path):
    """If a rank is killed, the other exits with 75 and a message at once."""
    thread = strike(tmp_path, signal.SIGKILL)
    statuses, outputs = on_ranks(2, *ENDLESS, "--run-dir=run", "--eval-iters=0", folder=tmp_path)
    thread.join(10)
    assert sorted(statuses) == [-9, 75] and any(
        "rank" in text and "answer" in text for text in outputs
    ), outputs
