"""Runs on several ranks: continued in other layouts, ended by signals, time or a NaN."""

import math
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


def curve(folder):
    """Return the last attempt's losses and norms, and validations, by iteration."""
    steps = {r["iteration"]: (r["loss"], r["grad_norm"]) for r in read_rows(folder)}
    valid = {
        r["iteration"]: r["loss"]
        for r in read_rows(folder, "validation")
        if r["name"] == "validation"
    }
    return steps, valid


def sampled(cases, quick):
    """Return the cases as parameters; those not named in `quick` are for `make test-long`."""
    return [
        pytest.param(case, id=name, marks=[] if name in quick else pytest.mark.long)
        for name, case in cases.items()
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run of one process."""
    folder = tmp_path_factory.mktemp("one")
    assert main(["train", *FLAGS, "--save", str(folder)]) == 0
    return folder


TP2, PP2, CP2 = (
    "--tensor-model-parallel-size=2",
    "--pipeline-model-parallel-size=2",
    "--context-parallel-size=2",
)
CHAINS = {
    "tp2pp2-zero2-one": [(4, f"{TP2} {PP2}"), (2, "--zero-stage=2"), (1, "")],
    "one-zero3tp2-pp2": [(1, ""), (4, f"--zero-stage=3 {TP2} --sequence-parallel"), (2, PP2)],
    "pp2zero1-cp2-dp4": [(4, f"{PP2} --zero-stage=1"), (2, CP2), (4, "")],
}


@pytest.mark.parametrize("chain", sampled(CHAINS, ["one-zero3tp2-pp2"]))
@pytest.mark.fault("F5")
def test_a_run_continues_in_another_layout(tmp_path, uninterrupted, chain):
    """Three attempts in different layouts have the losses, norms and validations of one process."""
    for n, (world, layout) in enumerate(chain, 1):
        flags = [
            *layout.split(),
            "--save",
            "run",
            "--load",
            "run",
            *(["--exit-interval=3"] if n < len(chain) else []),
        ]
        statuses, outputs = on_ranks(world, *flags, folder=tmp_path)
        assert statuses == [0] * world, outputs[0][-3000:]
        assert not any(text.strip() for text in outputs[1:]), outputs[1]  # only rank 0 prints
    steps, valid = curve(tmp_path / "run")
    wanted_steps, wanted_valid = curve(uninterrupted)
    assert len(steps) == 9
    for i, want in wanted_steps.items():
        assert steps[i] == pytest.approx(want, rel=1e-9), i
    assert valid == pytest.approx(wanted_valid, rel=1e-9)


VALIDATED = {
    "dp2": (2, "--global-batch-size=16"),
    "pp2": (2, PP2),
    "cp2": (2, CP2),
    "tp2dp2": (4, f"{TP2} --zero-stage=1"),
}


@pytest.mark.parametrize("case", sampled(VALIDATED, ["pp2", "tp2dp2"]))
def test_full_validation_on_ranks(tmp_path, case):
    """Every sample counts once in sets that no batch size divides, with masked tokens."""
    world, layout = case
    for n, tokens in enumerate((400, 333)):
        with Writer(tmp_path / f"d{n}", np.uint16) as writer:
            for k in range(0, tokens, 20):
                writer.add([*((k + n + i) * 7 % 63 for i in range(19)), 63])
                writer.end_document()
    data = "--no-mock-data --tokenizer-type=NullTokenizer --vocab-size=63 --eod-mask-loss --full-validation".split()
    data += ["--train-iters=2", "--eval-interval=2", f"--train-data-path={tmp_path}/d0"]
    data += ["--valid-data-path", f"{tmp_path}/d0", f"{tmp_path}/d1", "--multiple-validation-sets"]
    one = [flag for flag in layout.split() if flag.startswith("--global")]
    assert main(["train", *FLAGS, *data, *one, "--run-dir", str(tmp_path / "one")]) == 0
    statuses, outputs = on_ranks(
        world, *data, *layout.split(), "--run-dir", "many", folder=tmp_path
    )
    assert statuses == [0] * world, outputs[0][-3000:]
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
    statuses, outputs = on_ranks(4, TP2, "--save=run", *ENDLESS, *clock, folder=tmp_path)
    assert statuses == [0] * 4, outputs[0][-3000:]
    (step,) = (tmp_path / "run").glob("iter_*")
    assert 0 < open_step(tmp_path / "run", int(step.name[5:])).state["iteration"] < 100000
    assert "exiting program at iteration" in outputs[0]


@pytest.mark.fault("F20")
def test_not_finite_on_all_ranks(tmp_path):
    """With an infinite loss every rank exits with 70, and one reports it."""
    statuses, outputs = on_ranks(2, "--lr=1e300", TP2, "--save=run", folder=tmp_path)
    assert statuses == [70] * 2, outputs[0][-2000:]
    assert "was not applied" in outputs[0] and not outputs[1].strip()


def test_validation_without_training(tmp_path, uninterrupted):
    """A pipeline validates and tests a checkpoint of one process without a step."""
    statuses, outputs = on_ranks(
        2, PP2, "--skip-train", "--load", uninterrupted, "--run-dir=again", folder=tmp_path
    )
    assert statuses == [0] * 2, outputs[0][-3000:]
    want, got = (
        {r["name"]: r["loss"] for r in read_rows(folder, "validation")}
        for folder in (uninterrupted, tmp_path / "again")
    )
    assert got["test"] == pytest.approx(want["test"], rel=1e-9) and math.isfinite(got["validation"])
    assert not read_rows(tmp_path / "again")


@pytest.mark.fault("F1")
def test_a_killed_rank_is_reported(tmp_path):
    """If a rank is killed, the other exits with 75 and a message at once."""
    thread = strike(tmp_path, signal.SIGKILL)
    statuses, outputs = on_ranks(2, *ENDLESS, "--run-dir=run", "--eval-iters=0", folder=tmp_path)
    thread.join(10)
    assert sorted(statuses) == [-9, 75] and any(
        "rank" in text and "answer" in text for text in outputs
    ), outputs
