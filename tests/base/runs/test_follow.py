"""metrics.jsonl read as it grows: half-written lines, resumes, other files, many rows."""

import json
import os

import numpy as np
import pytest
from pages import check_row, step_row

from meshwright.apps.watch.overview import Watcher
from meshwright.base.runs import follow
from meshwright.base.runs.follow import RunTail
from meshwright.base.runs.history import read_history


def start_row(attempt=1, iteration=0, **more):
    return {
        "event": "start",
        "attempt": attempt,
        "iteration": iteration,
        "time": 1.7e9,
        "train_iters": 9,
    } | more


def text_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def append(folder, *rows, cut=None):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(text_of(rows)[:cut])


@pytest.fixture
def follower(tmp_path):
    return RunTail(tmp_path)


def look(run):
    """Look once; return how many parts were read."""
    published = []
    run.read_new(lambda: published.append(1))
    return len(published)


def steps(run):
    return run.column("iteration").tolist()


def test_it_grows(tmp_path, follower):
    assert look(follower) == 0 and not follower.file_state
    append(tmp_path, start_row(), step_row(1, 5.0))
    assert look(follower) == 1 and steps(follower) == [1]
    assert look(follower) == 0
    append(tmp_path, step_row(2, 4.0), check_row(2, 4.5), step_row(3, "nan", memory=2**30, mfu=0.5))
    assert look(follower) == 1 and steps(follower) == [1, 2, 3]
    np.testing.assert_array_equal(follower.column("loss"), [5.0, 4.0, np.nan])
    np.testing.assert_array_equal(follower.column("memory"), [np.nan, np.nan, 2**30])
    (check,) = follower.record.validations
    assert (check.iteration, check.loss) == (2, 4.5) and follower.record.attempts[0].last == 3


def test_a_resume_cuts_the_half_line_and_undoes_steps(tmp_path, follower):
    append(tmp_path, start_row(), *(step_row(i, 9.0) for i in range(1, 6)), check_row(4, 4.0))
    append(
        tmp_path,
        {"event": "scores", "iteration": 4, "scores": {"a": 1.0}},
        step_row(6, 9.0),
        cut=-20,
    )
    look(follower)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    os.truncate(tmp_path / "metrics.jsonl", whole.rfind(b"\n") + 1)  # as metrics._count_starts does
    append(tmp_path, start_row(2, 3), step_row(4, 1.0))
    look(follower)
    assert steps(follower) == [1, 2, 3, 4] and follower.column("loss")[-1] == 1.0
    assert not follower.record.validations and follower.record.scores == {"a": {}}
    assert [s.loss for s in read_history(tmp_path).steps] == follower.column("loss").tolist()


@pytest.mark.parametrize("how", ["replaced", "rewritten", "longer"])
def test_another_file_in_its_place(tmp_path, follower, how):
    append(tmp_path, start_row(), *(step_row(i, 9.0) for i in range(1, 4)))
    look(follower)
    new = text_of(
        [start_row(time=1.8e9), *(step_row(i, 2.0) for i in range(1, 9 if how == "longer" else 2))]
    )
    if how == "replaced":
        (tmp_path / "new").write_text(new)
        os.replace(tmp_path / "new", tmp_path / "metrics.jsonl")
    else:
        (tmp_path / "metrics.jsonl").write_text(new)
    look(follower)
    assert set(follower.column("loss")) == {2.0} and len(follower.record.attempts) == 1


def test_damage_is_shown_and_the_rest_is_read(tmp_path, follower):
    append(tmp_path, start_row(), step_row(1, 5.0))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("nonsense\n[]\n\n")
    append(
        tmp_path,
        {"event": "step", "iteration": 2},
        {"event": "validation", "iteration": 2},
        step_row(3, 4.0),
    )
    append(
        tmp_path,
        step_row(4, 4.0) | {"loss": "much"},
        {"event": "scores", "iteration": 4, "scores": 5},
    )
    look(follower)
    assert steps(follower) == [1, 3] and len(follower.damage) == 7
    append(tmp_path, start_row(command=["\udcff"]), step_row(1, 3.0))  # a name that is not text
    look(follower)
    assert steps(follower) == [1] and follower.record.attempts[-1].start["command"] == ["\udcff"]


@pytest.mark.parametrize("cores", [1, 2])
def test_blocks_and_processes_read_the_same(tmp_path, follower, monkeypatch, cores):
    rows = [start_row(), *(step_row(i, 1 + 1 / i) for i in range(1, 400)), start_row(2, 200)]
    rows += [*(step_row(i, 2 + 1 / i) for i in range(201, 300)), check_row(299, 3.0)]
    append(tmp_path, *rows)
    append(tmp_path, step_row(300, 1.0), cut=-5)
    for name, value in {"TASK_BYTES": 4000, "PARSED_BYTES": 700, "PARALLEL_BYTES": 10_000}.items():
        monkeypatch.setattr(follow, name, value)
    monkeypatch.setattr(follow.host, "cores", lambda: cores)
    assert look(follower) > 10
    assert steps(follower) == list(range(1, 300)) and follower.record.attempts[1].last == 299
    assert follower.column("loss").tolist() == [
        1 + 1 / i if i <= 200 else 2 + 1 / i for i in range(1, 300)
    ]
    assert len(follower.record.validations) == 1


def test_runs_below_a_folder_and_runs_that_begin_later(tmp_path):
    for name in ("a", "deep/b", ".hidden/c", "a/inner", "1/2/3/4"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        append(tmp_path / "runs" / name, start_row(), step_row(1, 5.0))
    watcher = Watcher([tmp_path / "runs", tmp_path / "later"])
    watcher.search()
    watcher.update()
    found = watcher.state()["runs"]
    assert [(run["name"], run["state"]) for run in found] == [
        ("a", "running"),
        ("deep/b", "running"),
        ("later", "waiting"),
    ]
    (tmp_path / "later" / "x").mkdir(parents=True)
    append(tmp_path / "later" / "x", start_row(), step_row(1, 5.0))
    watcher.search()
    watcher.update()
    assert [run["name"] for run in watcher.state()["runs"]] == ["a", "deep/b", "x"]
    with pytest.raises(KeyError):
        watcher.run_in("/etc")


def test_the_state(tmp_path, monkeypatch):
    for name, lr in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(
            f"[data]\nseq_length = 16\n[optimizer]\nlr = {lr}.0\n"
        )
        append(
            tmp_path / name,
            start_row(),
            *(step_row(i, 6.0 - i) for i in range(1, 4)),
            check_row(2, 4.0),
        )
        append(tmp_path / name, check_row(3, 4.5), step_row(4, "inf", skipped=True))
    append(
        tmp_path / "b",
        {
            "event": "end",
            "attempt": 1,
            "iteration": 4,
            "reason": "done",
            "status": 0,
            "time": 1.8e9,
        },
    )
    append(
        tmp_path / "b", {"event": "sample", "iteration": 4, "number": 0, "prompt": "A", "text": "b"}
    )
    watcher = Watcher([tmp_path / "a", tmp_path / "b"])
    watcher.search()
    watcher.update()
    a, b = watcher.state()["runs"]
    assert (a["state"], b["state"]) == ("running", "ended") and b["attempts"][0]["end"] == "done"
    assert (a["step"], a["amount"], a["unit"], a["skipped"]) == (4, 16 * 16, "tokens", 1)
    assert (a["best"], a["validation"], a["left"]) == ([4.0, 2], 4.5, 5 * 0.01) and a["loss"] == 3.0
    assert a["seconds"] == pytest.approx(4 * 0.01)
    assert (
        watcher.state()["different"] == {"lr": [1.0, 2.0]}
        and b["samples"] == [4]
        and a["slow"] == []
    )
    lag = {
        "event": "straggler",
        "attempt": 1,
        "iteration": 3,
        "rank": 1,
        "slow": True,
        "text": "rank 1 (n) takes 2.0 x",
    }
    for is_slow, said in ((True, ["rank 1 (n) takes 2.0 x (step 3)"]), (False, [])):
        append(tmp_path / "a", lag | {"slow": is_slow})
        watcher.update()
        assert watcher.state()["runs"][0]["slow"] == said
    monkeypatch.setattr("meshwright.apps.watch.overview.PATIENCE", -1.0)
    assert watcher.state()["runs"][0]["state"] == "silent"


def test_a_file_that_cannot_be_read_is_tried_again(tmp_path, monkeypatch):
    append(tmp_path, start_row(), step_row(1, 5.0))
    watcher = Watcher([tmp_path])
    watcher.search()
    read = follow.parse_range

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(follow, "parse_range", fail)
    watcher.update()
    watcher.update()
    (run,) = watcher.state()["runs"]
    assert "Input/output error" in run["problem"] and run["steps"] == 0
    monkeypatch.setattr(follow, "parse_range", read)
    watcher.update()
    (run,) = watcher.state()["runs"]
    assert (run["problem"], run["steps"]) == ("", 1)
