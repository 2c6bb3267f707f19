"""Seconds of each phase before the first step, and what the log says while one takes long."""

import time

import pytest

from helpers import read_rows
from meshwright.console import say
from meshwright.training.log import timers
from meshwright.training.log.timers import Startup

PHASES = "tokenizer torch ranks modules model weights data".split()


def test_a_run_records_its_phases(run):
    got = run("--train-iters", 1, "--eval-iters", 0)
    (row,) = read_rows(got.folder, "start")
    assert list(row["startup"]) == PHASES and all(seconds >= 0 for seconds in row["startup"].values())
    assert " > ready to train after " in got.out


def test_a_long_phase_is_named_once(capsys, monkeypatch):
    monkeypatch.setattr(timers, "PATIENCE", 0.01)
    one = Startup(prints=True)
    with one.phase("weights", "drawing the weights"):
        time.sleep(0.12)
    with pytest.raises(KeyError), one.phase("data", "opening the data"):
        raise KeyError
    time.sleep(0.05)
    say(one.line())
    out = capsys.readouterr().out
    assert out.count("\n") == 2 and out.startswith(" > drawing the weights ...\n > ready to train after 0.")
    assert out.endswith("s: weights 0.1\n") and set(one.seconds) == {"weights", "data"}


def test_other_ranks_are_silent(capsys, monkeypatch):
    monkeypatch.setattr(timers, "PATIENCE", 0.0)
    with Startup(prints=False).phase("ranks", "waiting for all ranks"):
        time.sleep(0.03)
    assert capsys.readouterr().out == ""


def test_the_wait_for_the_first_step_ends_with_it(run, monkeypatch):
    monkeypatch.setattr(timers, "PATIENCE", 0.0)
    out = run("--train-iters", 2, "--eval-iters", 0).out
    assert out.count("taking the first step, for which kernels are loaded or compiled ...") == 1
    assert out.index("taking the first step") < out.index("iteration        1/")
