"""A run killed at any moment and started again computes the same losses, bit for bit, with dropout.

The controls leave one thing out when resuming, and must differ.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from faults.harness import (
    LAUNCHERS,
    LAYOUTS,
    PRECISIONS,
    Case,
    Harm,
    Run,
    kill_at_random,
    write_data,
)

pytestmark = [pytest.mark.whole, pytest.mark.timeout(300)]

# "retention" comes after the third save, which removes the first.
POINTS = (
    "begin after_mkdir written_unsynced shard_done manifest_unsynced before_rename after_rename "
    "before_tracker after_tracker retention"
).split()
OF_RANK_1 = POINTS[:1] + POINTS[2:4]
SHORT = Case("dp2", "fp16", steps=12)
# Rank 1 writes a file of its own only where it holds something that rank 0 does not.
SHARDED = Case("zero3", "fp16", steps=12)
CASES = [Case(*pair) for pair in itertools.product(LAYOUTS, PRECISIONS)]


class Runs:
    """Runs in folders of their own, with undisturbed ones of the same cases to compare with."""

    def __init__(self, root: Path) -> None:
        self.root, self.data, self.count = root, write_data(root / "data"), itertools.count()
        self.clean: dict[Case, tuple[list[tuple[Any, ...]], float]] = {}

    def of(self, case: Case) -> tuple[Run, float]:
        """Return a run that has not begun, and the seconds that it takes undisturbed."""
        if case not in self.clean:
            run = Run(case, self.data, self.root / f"clean-{next(self.count)}")
            forkserver.ensure_running()  # the first launch starts it
            began = time.perf_counter()
            run.finish()
            self.clean[case] = (run.losses(), time.perf_counter() - began)
            assert len(self.clean[case][0]) == case.steps
        losses, seconds = self.clean[case]
        return Run(case, self.data, self.root / str(next(self.count)), losses), seconds


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("kill"))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout}-{case.precision}")
@pytest.mark.fault("F1")
def test_kills_at_random_moments(runs: Runs, case: Case, figures: Callable[..., None]) -> None:
    """Kill launcher or rank, under both launchers."""
    for launcher in LAUNCHERS:
        run, seconds = runs.of(case)
        totals = kill_at_random(
            run, random.Random(f"{case}{launcher}"), 3, seconds, launcher, programs=False
        )
        figures(**totals.figures())
        assert totals.kills == 3 and totals.differing == totals.orphans == 0, (
            totals,
            run.log(),
        )


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.fault("F1")
def test_kills_of_programs(runs: Runs, launcher: str, figures: Callable[..., None]) -> None:
    """The same without forks: launcher and ranks are programs, as on any machine."""
    run, _ = runs.of(Case("tp2", steps=60))
    rng = random.Random(launcher)
    for victim in (0.0, 0.5, 0.9, 0.0):
        run.launch(launcher, Harm(after=rng.uniform(5, 8), victim=victim), programs=True)
    run.finish(launcher, programs=True)
    totals = run.check()
    figures(**totals.figures())
    assert totals.differing == totals.orphans == 0 and totals.kills, (totals, run.log())


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "point"), [*((0, point) for point in POINTS), *((1, point) for point in OF_RANK_1)]
)
@pytest.mark.fault("F2")
def test_kill_at_each_point_of_the_save(
    runs: Runs, rank: int, point: str, figures: Callable[..., None]
) -> None:
    run, _ = runs.of(SHARDED if rank else SHORT)
    (run.path / "tokenizer").mkdir(parents=True)
    # where a kill may fall as well
    for left in ("config.toml.4711.tmp", "tokenizer/meta.json.4711.tmp"):
        (run.path / left).touch()
    run.launch(harm=Harm(point=point, rank=rank))
    run.finish()
    totals = run.check()
    figures(save_kills=totals.kills, **totals.figures())
    assert totals.kills == 1 and totals.differing == totals.orphans == 0, (totals, run.log())
    assert totals.recomputed <= 3 and not list(run.path.glob("**/*.tmp"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.fault("F1", "F4")
def test_kills_during_the_recovery(runs: Runs, launcher: str, figures: Callable[..., None]) -> None:
    """After a kill, kill the next launches while they start and load."""
    run, seconds = runs.of(SHORT)
    rng = random.Random(launcher)
    run.launch(launcher, Harm(point="after_rename"))
    for _ in range(2):
        run.launch(launcher, Harm(after=rng.uniform(0.05, 0.5) * seconds, victim=rng.random()))
    run.finish(launcher)
    totals = run.check()
    figures(recovery_kills=totals.kills - 1, **totals.figures())
    assert totals.differing == totals.orphans == 0, (totals, run.log())


@pytest.mark.long
@pytest.mark.parametrize("forget", ["random numbers", "data", "moments"])
@pytest.mark.fault("F3")
def test_control_without_restoring_differs(
    runs: Runs, forget: str, figures: Callable[..., None]
) -> None:
    """If this passed with equal losses, the tests above would prove nothing."""
    run, _ = runs.of(SHORT)
    run.launch(harm=Harm(point="after_tracker"))
    run.finish(harm=Harm(forget=forget))
    totals = run.check()
    figures(control_differs=f"{totals.differing}/{totals.losses}")
    assert totals.differing > SHORT.steps // 2
