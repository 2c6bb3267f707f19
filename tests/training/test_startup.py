"""Seconds of each phase before the first step, and what the log says while one takes long."""

import threading
import time
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from helpers import read_rows, write_counting
from meshwright.base import console
from meshwright.base.console import say
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.config.schema import Checkpoint, Model, TrainConfig
from meshwright.runtime.ranks.world import World
from meshwright.training import setup
from meshwright.training.before.resolve import require_fit, resolve
from meshwright.training.log import timers
from meshwright.training.log.timers import Startup

PHASES = "tokenizer torch ranks modules model weights data".split()


def test_a_run_records_its_phases(run):
    got = run("--train-iters", 1, "--eval-iters", 0)
    (row,) = read_rows(got.folder, "start")
    assert list(row["startup"]) == PHASES and all(
        seconds >= 0 for seconds in row["startup"].values()
    )
    assert " > ready to train after " in got.out


def test_what_is_decided_before_the_start_is_final(run, monkeypatch):
    """No part of a run replaces the settings; what the start finds is kept beside them."""
    built, build = [], setup.build_trainer

    def note(decided, *more):
        built.append((decided, build(decided, *more)))
        return built[0][1]

    monkeypatch.setattr(setup, "build_trainer", note)
    assert run("--train-iters", 1, "--eval-iters", 0).status == 0
    [(decided, trainer)] = built
    state = trainer.state
    assert decided.config is trainer.config is state.config is state.saver.config
    for record in (decided, decided.config, decided.vocabulary, decided.caller):
        with pytest.raises(FrozenInstanceError):
            setattr(record, fields(record)[0].name, None)
    with pytest.raises(AttributeError):
        state.config = decided.config
    state.found["micro_batch_size"] = 1
    assert (state.config.micro_batch, state.recorded.micro_batch) == (4, 1)


@pytest.mark.parametrize("length", ["--train-epochs=2", "--train-iters=2"])
def test_a_rank_without_the_data_says_so_when_all_have_met(tmp_path, length):
    words = "--num-layers=1 --hidden-size=8 --num-attention-heads=1 --seq-length=8 --max-position-embeddings=8 --lr=1"
    data = ["--micro-batch-size=1", "--tokenizer=byte", f"--data-path={tmp_path / 'text'}", length]
    config = flags.parse_settings(
        TrainConfig, [*words.split(), *data], "meshwright train", check=False
    ).config
    resolved = resolve(config, World(rank=1, size=2), command=[])
    assert "missing" in str(resolved.problem) and not resolved.identity
    with pytest.raises(UserError, match="missing"):
        resolve(config, World(), command=[])


def test_the_path_of_a_checkpoint_may_have_backslashes():
    config = replace(TrainConfig(), checkpoint=Checkpoint(load=r"C:\1\group"))
    config = replace(config, model=Model(num_layers=1, hidden_size=8, num_attention_heads=3))
    with pytest.raises(UserError) as caught:
        require_fit(config, {"num_attention_heads": 3})
    assert r"--num-attention-heads 3 of C:\1\group" in str(caught.value)


def test_a_long_phase_is_named_once(capsys, monkeypatch):
    monkeypatch.setattr(timers, "PATIENCE", 0.01)
    one = Startup(prints=True)
    with one.phase("weights", "drawing the weights"):
        one.timer.join()
        time.sleep(0.12)
    with pytest.raises(KeyError), one.phase("data", "opening the data"):
        raise KeyError
    time.sleep(0.05)
    say(one.line())
    out = capsys.readouterr().out
    assert out.count("\n") == 2 and out.startswith(
        " > drawing the weights ...\n > ready to train after 0."
    )
    assert set(one.seconds) == {"weights", "data"} and one.seconds["weights"] > 0.1
    assert out.endswith(f"s: weights {one.seconds['weights']:.1f}\n")


def test_the_thread_that_waits_is_over(monkeypatch):
    """It holds the trainer, whose tensors it must not free while Python shuts down."""

    class Late(threading.Timer):
        def run(self):
            super().run()
            time.sleep(0.05)

    monkeypatch.setattr(threading, "Timer", Late)
    startup = Startup(prints=True)
    startup.wait("taking the first step")
    timer = startup.timer
    startup.end_wait()
    assert not timer.is_alive()


class AtOnce:
    """Stand in for a timer whose thread does its work as soon as it starts."""

    def __init__(self, seconds, function, args=()):
        self.function, self.args = function, args

    def start(self):
        self.function(*self.args)

    def cancel(self):
        pass

    def join(self):
        pass


class AtLast(AtOnce):
    """The same for one whose thread does it when it is waited for."""

    def start(self):
        pass

    def join(self):
        self.function(*self.args)


def test_other_ranks_are_silent(capsys, monkeypatch):
    monkeypatch.setattr(threading, "Timer", AtLast)
    for prints in (True, False):
        with Startup(prints).phase("ranks", "waiting for all ranks"):
            pass
        assert capsys.readouterr().out == (" > waiting for all ranks ...\n" if prints else "")


@pytest.mark.parametrize(("timer", "count"), [(AtOnce, 1), (AtLast, 0)])
def test_the_wait_for_the_first_step_ends_with_it(run, monkeypatch, timer, count):
    monkeypatch.setattr(threading, "Timer", timer)
    out = run("--train-iters", 2, "--eval-iters", 0).out
    waits = "taking the first step, for which kernels are loaded or compiled ..."
    assert out.count(waits) == count
    assert out.find(waits) < out.index("iteration        1/")


MISTAKES = {
    "of the checkpoint": "--load SAVE --lr 1".split(),
    "of the data": "--no-mock-data --data-path SAVE/data --split 0,1,0".split(),
    "of an export beside the run": "--sample-interval 1 --sample-prompts a".split(),
    "of a task": ["--eval-tasks", "lambada=none.jsonl"],
}


@pytest.mark.parametrize("words", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_comes_before_the_arguments(run, tmp_path, words):
    """Found in the set-up, it is all that is printed but for remarks."""
    if "--load" in words:
        run("--save", tmp_path)
    write_counting(tmp_path / "data", [60])
    got = run(*(word.replace("SAVE", str(tmp_path)) for word in words))
    assert got.status in (2, 65) and got.err.startswith("meshwright train: error: ")
    assert "arguments" not in got.out and "..." not in got.out


def test_lines_that_are_held_back_are_printed_in_time_or_after_a_defect(capsys, monkeypatch):
    with pytest.raises(UserError), console.held_back():
        console.say("settings")
        console.remark("step 6 is damaged")
        raise UserError("no step is left")
    assert capsys.readouterr().out == "step 6 is damaged\n"
    with pytest.raises(ZeroDivisionError), console.held_back():
        console.say("settings")
        raise ZeroDivisionError
    assert capsys.readouterr().out == "settings\n"
    monkeypatch.setattr(console, "PATIENCE", 0.01)
    with console.held_back():
        console.say("settings")
        time.sleep(0.1)
        assert capsys.readouterr().out == "settings\n"
