"""A rank that hangs is named with its phase and stacks, and all end with status 75 in time."""

import ctypes
import functools
import os
import re
import signal
import time

import pytest

from helpers import TINY_FLAGS, read_rows
from meshwright.base.errors import HANG
from meshwright.checkpoint import steps
from meshwright.runtime.ranks import watchdog
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.training import loop, setup, validation
from meshwright.training.hooks import saving
from meshwright.training.state import saver
from on_ranks import train_on_ranks

pytestmark = pytest.mark.whole

FLAGS = [f for f in TINY_FLAGS if not f.startswith(("--global", "--train-iters"))]
FLAGS += ["--global-batch-size=4", "--train-iters=9"]


def loop_for_ever(*_):
    while True:
        pass


def read_for_ever(*_):
    os.read(os.pipe()[0], 1)


def hold_the_lock(*_):
    """Wait in C for a mutex that this thread has: unlike a sleep, no signal ends that."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)
    # Woken, any thread may print the stacks, and this one goes on before: it is still here then.
    for _ in range(1000):
        time.sleep(0.01)


def wait_for_others(trainer, *_):
    trainer.team.gather(None)


PLACES = {
    "step": (loop, "train_step", 2),
    "data": (loop.Trainer, "next_batch", 3),
    "validation": (validation.Validator, "validate_set", 1),
    "save": (saver.Saver, "write", 1),
    "startup": (setup, "build_network", 1),
    "end": (saving.Saving, "report_samples_used", 2),
}


def hang(act, place, wrong, seconds, rank):
    """Have one rank `act` in a call of one of the PLACES."""
    watchdog.EXIT_SECONDS = seconds
    owner, name, at = PLACES[place]
    real, calls = getattr(owner, name), []

    def call(*more, **named):
        calls.append(1)
        if rank == wrong and len(calls) == at:
            act(*more)
        return real(*more, **named)

    setattr(owner, name, call)


def run(tmp_path, act, place, minutes, *flags, wrong=1, seconds=watchdog.EXIT_SECONDS, world=2):
    """Return the exit statuses, all output, and the seconds from the last row to the end."""
    argv = [
        *FLAGS,
        f"--save={tmp_path / 'run'}",
        f"--distributed-timeout-minutes={minutes}",
        *flags,
    ]
    statuses = train_on_ranks(
        world, argv, tmp_path, functools.partial(hang, act, place, wrong, seconds)
    )
    text = "".join((tmp_path / f"log-{rank}").read_text() for rank in range(world))
    metrics = tmp_path / "run" / "metrics.jsonl"
    return statuses, text, time.time() - metrics.stat().st_mtime if metrics.exists() else 0.0


@pytest.mark.fault("F17")
def test_a_stopped_rank(tmp_path):
    statuses, text, _ = run(tmp_path, stop, "step", 0.03, seconds=0.3)
    assert statuses == [HANG, HANG], text
    assert re.search(r"error: rank 1 \(\S+\) hangs in forward-backward of step 2, ", text)
    assert (
        "no heartbeat" in text
        and "(--distributed-timeout-minutes 0.03)" in text
        and "Traceback" not in text
    )
    stacks = [(tmp_path / "run" / f"stacks-rank{rank}.txt").read_text() for rank in range(2)]
    assert " in stop\n" in stacks[1] and " in _finish\n" in stacks[0], stacks
    (end,) = read_rows(tmp_path / "run", "end")
    assert end["status"] == HANG and "rank 1" in end["reason"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("act", "place", "said"),
    [
        (
            loop_for_ever,
            "step",
            r"rank 1 \(\S+\) hangs in forward-backward of step 2, .* in loop_for_ever \(no progr",
        ),
        (
            read_for_ever,
            "data",
            r"rank 1 \(\S+\) hangs in data of step 3, at .* in read_for_ever \(no progress",
        ),
        (
            loop_for_ever,
            "validation",
            r"rank 1 \(\S+\) hangs in validation of step 3, at .* in loop_for_ever",
        ),
        (stop, "save", r"rank 1 \(\S+\) hangs in save of step 9, .* \(no heartbeat"),
        (
            loop_for_ever,
            "startup",
            r"rank 1 \(\S+\) hangs in startup, building the model, at .* in loop_for_ever",
        ),
        (loop_for_ever, "end", r"rank 1 \(\S+\) hangs in save of step 9, at .* in loop_for_ever"),
        # Its neighbour has it print its stacks by a signal, then kills it.
        (hold_the_lock, "step", r"rank 1 .* hangs in .* \(no heartbeat"),
        (
            wait_for_others,
            "data",
            r"rank 1 \(\S+\) hangs in data of step 3, at .* in wait_for_others \(no prog",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:12]),
)
@pytest.mark.fault("F17")
def test_every_way_to_hang(tmp_path, act, place, said):
    minutes = 0.08
    statuses, text, took = run(tmp_path, act, place, minutes)
    ends = [HANG, -signal.SIGKILL if act is hold_the_lock else HANG]
    assert statuses == ends and re.search(said, text), text
    assert "Traceback" not in text and took < 60 * minutes + 10
    if place != "startup":
        assert act.__name__ in (tmp_path / "run" / "stacks-rank1.txt").read_text()


@pytest.mark.long
def test_rank_0_serves_the_store_and_is_stopped(tmp_path):
    statuses, text, took = run(tmp_path, stop, "step", 0.08, wrong=0)
    assert statuses == [HANG, HANG] and "has not answered for" in text and took < 0.08 * 60 + 10, (
        text
    )
    assert (
        "rank 0 hangs in forward-backward of step 2 (its process is stopped): rank 1 in optimizer"
        in text
    )


def save_slowly(*_):
    for _ in range(12):
        time.sleep(0.5)
        heartbeat.tick()


def wait_a_while(*_):
    time.sleep(3)


@pytest.mark.long
@pytest.mark.parametrize("act", [save_slowly, wait_a_while])
def test_a_slow_save_is_no_hang(tmp_path, act):
    """The others wait for longer than the time-out, or for most of it."""
    statuses, text, _ = run(tmp_path, act, "save", 0.06, "--save-interval=3", wrong=0)
    assert (
        statuses == [0, 0]
        and "hangs" not in text
        and sorted(steps.list_steps(tmp_path / "run")) == [3, 6, 9]
    ), text
