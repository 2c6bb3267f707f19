"""Ranks for which the others wait are named, once, and the run goes on."""

import time

import pytest

from helpers import TINY_FLAGS, read_rows
from meshwright.training.health.stragglers import Stragglers
from on_ranks import train_on_ranks

FLAGS = [f for f in TINY_FLAGS if not f.startswith(("--global", "--train-iters", "--eval"))]
FLAGS += "--global-batch-size=4 --train-iters=20 --num-layers=1 --micro-batch-size=1".split()
FLAGS += "--log-interval=4 --distributed-timeout-minutes=0.05".split()


def arrive_late(rank):
    """Have rank 1 come ten seconds later by its clock, however busy the machine is.

    Each step takes a moment, in which the ranks learn of each other's times.
    """
    real = Stragglers.note

    def note(stragglers, iteration, data_ms, arrived, met):
        time.sleep(0.05)
        real(stragglers, iteration, data_ms, arrived + 1e10 * rank, met)

    Stragglers.note = note


@pytest.mark.flag("log_straggler")
@pytest.mark.whole
@pytest.mark.fault("F18")
def test_a_slow_rank_is_named_and_the_run_goes_on(tmp_path):
    argv = [*FLAGS, f"--run-dir={tmp_path / 'run'}"]
    assert train_on_ranks(2, argv, tmp_path, arrive_late) == [0, 0]
    out = (tmp_path / "log-0").read_text()
    rows = read_rows(tmp_path / "run", "straggler")
    assert [(row["rank"], row["slow"]) for row in rows] == [(1, True)] and rows[0]["ratio"] > 1.9, (
        out
    )
    assert f" > WARNING: {rows[0]['text']}\n" in out and out.count("x the median step time") == 1
    assert len(read_rows(tmp_path / "run")) == 20


class Board:
    """Stands in for the watchdog, with what the ranks post."""

    def __init__(self):
        self.board, self.posted = None, []

    def post(self, values):
        self.posted.append(values)

    def take_board(self):
        board, self.board = self.board, None
        return board


def test_named_once_and_when_well_again():
    board = Board()
    stragglers = Stragglers(board, 1)
    for times, said in (
        (
            [10, 10.5, 9.8, 29],
            ["rank 3 (d) takes 2.9 x the median step time: 29.0 ms; the median is 10.0 ms"],
        ),
        ([10, 10, 10, 31], []),
        ([10, 10, 10, 13], []),  # below 1.5, but not below 1.25
        ([10, 10, 10, 12], ["rank 3 (d) is no longer slow: 1.2 x the median step time"]),
        ([0.1, 0.1, 0.9, 0.1], []),  # noise
        (
            [10, 30, 30, 10],
            [
                f"rank {r} ({h}) takes 3.0 x the median step time: 30.0 ms; the median is 10.0 ms"
                for r, h in ((1, "b"), (2, "c"))
            ],
        ),
    ):
        board.board = [(host, 7, ms, 0.0) for host, ms in zip("abcd", times, strict=True)]
        assert [str(lag) for _, lag in stragglers.changes()] == said
    assert stragglers.changes() == []


def test_a_step_after_a_pause_does_not_count():
    board = Board()
    stragglers = Stragglers(board, 2)
    for step, (arrived, met) in enumerate([(1, 2), (5, 6), (9, 10), (15, 16)], 1):
        if step == 3:
            stragglers.pause()
        stragglers.note(step, 1.0, arrived * 1e6, met * 1e6)
    assert board.posted == [(2, 3.0, 1.0), (4, 5.0, 1.0)]
