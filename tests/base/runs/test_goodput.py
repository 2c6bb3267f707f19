"""The share of a run's time that went into steps which count."""

import json

import pytest
from pages import step_row

from helpers import error_of, printed_losses
from meshwright.apps.watch.overview import describe_run
from meshwright.base.errors import TOO_OLD
from meshwright.base.runs.follow import RunTail
from meshwright.base.runs.goodput import read_goodput
from meshwright.base.runs.history import read_history
from meshwright.base.runs.rows import METRICS


def start(attempt, iteration, time, ready):
    return {
        "event": "start",
        "attempt": attempt,
        "iteration": iteration,
        "time": time,
        "ready": ready,
        "command": [],
    }


def step(attempt, i, time, **more):
    return (
        step_row(i, 5.0 - i / 9, attempt=attempt, ms=10_000.0, time=time, mfu=None, memory=None)
        | more
    )


def event(kind, attempt, iteration, time, **more):
    return {"event": kind, "attempt": attempt, "iteration": iteration, "time": time, **more}


# Begun at 990; killed at 1055, two steps after its checkpoint; begun again at 1080, done at 1131.
ROWS = [
    start(1, 0, 1000.0, 10.0),
    *(step(1, i, 1000.0 + 10 * i) for i in range(1, 6)),
    event("save", 1, 3, 1052.0, seconds=2.0),
    event("validation", 1, 5, 1055.0, seconds=3.0, name="validation", loss=2.0, ppl=7.4),
    start(2, 3, 1100.0, 20.0),
    *(step(2, i, 1070.0 + 10 * i) for i in range(4, 7)),
    event("end", 2, 6, 1131.0, reason="all iterations done", status=0),
]


def measured(folder, rows):
    """Return what the history says, after checking that the page of watch says the same."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_goodput(read_history(folder))
    follower = RunTail(folder)
    follower.read_new(lambda: None)
    page = describe_run(follower, "a", 0.0)
    if found is None:
        assert "goodput" not in page
    else:
        assert (page["goodput"], page["recovery"]) == pytest.approx(
            (found.share, found.mean_recovery)
        )
    return found


def test_every_second_goes_somewhere(tmp_path):
    found = measured(tmp_path, ROWS)
    assert (found.wall, found.good, found.recoveries) == (141.0, 60.0, [55.0])
    lost = {
        "start-up": 30.0,
        "down": 25.0,
        "steps undone": 20.0,
        "steps not applied": 0.0,
        "saves": 2.0,
    }
    assert (
        found.lost == lost | {"validations": 3.0, "other": 1.0}
        and found.good + sum(found.lost.values()) == 141.0
    )
    assert found.line() == (
        "goodput 42.6 %: 1 min 00 s of 2 min 21 s in steps that count; start-up 30.0 s, down 25.0 s, steps undone "
        "20.0 s, saves 2.0 s, validations 3.0 s, other 1.0 s; 1 recovery, 55.0 s from the last row to the next step"
    )


def test_a_clock_that_is_set_back_between_attempts(tmp_path):
    """The pause is unknown then; a recovery takes the time from the new start to its first step."""
    late = [row | {"time": row["time"] + 1e6} if row["attempt"] == 1 else row for row in ROWS]
    found = measured(tmp_path, late)
    assert (found.wall, found.lost["down"], found.recoveries) == (116.0, 0.0, [30.0])


def test_steps_that_are_undone_or_not_applied(tmp_path):
    """A rollback takes steps 2 and 3 away, and step 3 was not applied anyway."""
    rows = [
        start(1, 0, 1000.0, 0.0),
        step(1, 1, 1010.0),
        step(1, 2, 1020.0),
        step(1, 3, 1030.0, skipped=True),
    ]
    rows += [
        event("rollback", 1, 3, 1034.0, to=1, seconds=4.0),
        step(1, 4, 1044.0),
        step(1, 5, 1054.0, skipped=True),
    ]
    found = measured(tmp_path, rows[:4])
    assert (
        found.good == 20.0
        and found.lost["steps not applied"] == 10.0
        and found.mean_recovery is None
    )
    found = measured(tmp_path, rows)
    assert (found.wall, found.good, found.lost["steps undone"], found.lost["rollbacks"]) == (
        54.0,
        20.0,
        20.0,
        4.0,
    )
    assert found.lost["steps not applied"] == 10.0
    assert [line.split()[0] for line in printed_losses(tmp_path)] == ["1", "4", "5"]


@pytest.mark.parametrize(
    "reason, is_loss",
    [("SIGINT", False), ("kill switch /x", False), ("--exit-interval 5", False), ("SIGTERM", True)],
)
def test_a_stop_by_hand_is_no_loss(tmp_path, reason, is_loss):
    """Nobody waited for the run after it, and it recovered from nothing."""
    stopped = [*ROWS[:8], event("end", 1, 3, 1055.0, reason=reason, status=0), *ROWS[8:]]
    found = measured(tmp_path, stopped)
    assert found.wall == (141.0 if is_loss else 116.0) and found.recoveries == (
        [55.0] if is_loss else []
    )
    assert found.lost["down"] == (25.0 if is_loss else 0.0)


def test_rows_of_a_release_before_0_15_are_refused(tmp_path):
    """Its steps had no time; the page of watch says so and shows nothing."""
    rows = [{k: v for k, v in r.items() if k != "time" or r["event"] != "step"} for r in ROWS]
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = error_of(lambda: read_history(tmp_path))
    assert message.startswith(f"{tmp_path / METRICS} {TOO_OLD}; ")
    follower = RunTail(tmp_path)
    follower.read_new(lambda: None)
    assert set(follower.damage) == {f"it {TOO_OLD}"} and not follower.count


@pytest.mark.whole
def test_a_run_says_it_at_its_end(run, tmp_path):
    got = run("--save", tmp_path / "a")
    [line] = [line for line in got.out.splitlines() if line.startswith(" > goodput ")]
    assert "in steps that count; start-up" in line and "validations" in line
    found = read_goodput(read_history(got.folder))
    assert found.line() in line and 0 < found.good == sum(got.column("ms")) / 1e3
    assert found.good + sum(found.lost.values()) == pytest.approx(found.wall)
    again = run("--save", tmp_path / "a", "--load", tmp_path / "a", "--skip-train")
    assert "goodput" not in again.out
