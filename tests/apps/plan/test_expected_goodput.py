"""Save intervals and goodput: Young's and Daly's, and a simulation of failing runs."""

from __future__ import annotations

import math
import random

import pytest

from meshwright.apps.plan.goodput import Interruptions, expect


def test_the_interval_is_youngs_where_saves_are_short() -> None:
    losses = Interruptions(between=36_000, stall=2, restart=300)
    assert losses.interval == pytest.approx(math.sqrt(2 * 2 * 36_000), rel=0.01)
    best = losses.goodput(losses.interval)
    assert all(best >= losses.goodput(losses.interval * factor) for factor in (0.5, 0.9, 1.1, 2))


def test_a_save_ends_before_the_next_begins() -> None:
    assert Interruptions(36_000, 0.1, 300, written=900).interval == 900
    assert Interruptions(10, 30, 0).interval == 10, (
        "Daly: saves longer than twice the time between failures"
    )


def test_goodput_is_that_of_simulated_failures() -> None:
    losses, interval, draw = (
        Interruptions(between=5_000, stall=20, restart=200),
        500.0,
        random.Random(1),
    )
    useful, clock, fails = 0.0, 0.0, draw.expovariate(1 / 5_000)
    while useful < 4e6:
        need = interval + losses.stall
        if fails >= need:
            fails -= need
            clock += need
            useful += interval
            continue
        clock += fails
        while (fails := draw.expovariate(1 / 5_000)) < losses.restart:
            clock += fails
        clock, fails = clock + losses.restart, fails - losses.restart
    assert losses.goodput(interval) == pytest.approx(useful / clock, rel=0.02)


def test_failures_are_counted_over_the_lengthened_run() -> None:
    losses = Interruptions(between=3_600, stall=5, restart=300)
    expected = expect(losses, step=2.0, seconds=360_000)
    assert expected.hours_between_failures == 1 and expected.save_interval == expected.best_interval
    assert expected.failures == pytest.approx(100 / expected.share)
    worse = expect(losses, 2.0, None, save_interval=5_000)
    assert worse.failures is None and worse.save_interval == 5_000 and worse.share < expected.share
    assert expect(losses, 2.0, 100.0, save_interval=10**8).failures == math.inf
