"""What every reader of a run says of several validation sets, and the rows that are read alone."""

import json
import os
import tracemalloc

import pytest
from pages import check_row, step_row

from meshwright.__main__ import main
from meshwright.apps.report.compare import figures, read_runs
from meshwright.apps.report.page import headlines
from meshwright.apps.watch.curves import View, curves
from meshwright.apps.watch.overview import describe_run
from meshwright.base.errors import UnfitFile, UserError
from meshwright.base.runs.follow import RunTail
from meshwright.base.runs.history import read_history, read_settings
from meshwright.base.runs.rows import (
    METRICS,
    ROW_LIMIT,
    find_last_step,
    holds_steps,
    read_new_rows,
    read_rows,
)
from meshwright.training.log.metrics import _count_starts

START = {"event": "start", "attempt": 1, "iteration": 0, "time": 1.7e9}
END = {"event": "end", "attempt": 1, "iteration": 4, "reason": "all iterations done", "status": 0}


def write_rows(folder, rows, tail=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


@pytest.fixture
def two_sets(tmp_path):
    """Validated on two sets after steps 2 and 4, and again at the end."""
    losses = [(2, "a", 2.0), (2, "b", 5.0), (4, "a", 3.0), (4, "b", 3.0)]
    checks = [check_row(i, loss) | {"set": name} for i, name, loss in losses]
    checks += [
        check_row(4, loss) | {"set": name, "end": True} for name, loss in (("a", 3.5), ("b", 4.5))
    ]
    return write_rows(tmp_path, [START, *(step_row(i, 6.0 - i) for i in range(1, 5)), *checks, END])


def test_best_and_last_of_several_sets_are_means_everywhere(two_sets):
    """As --keep-best compares them: the lowest loss of one set is not the best of the run."""
    run = RunTail(two_sets)
    run.read_new(lambda: None)
    on_the_page = describe_run(run, "a", 0.0)
    assert (on_the_page["best"], on_the_page["validation"]) == ([3.0, 4], 4.0)
    compared = figures(read_runs([two_sets])[0])
    assert (compared["best_validation"], compared["final_validation"]) == (3.0, 4.0)
    history = read_history(two_sets)
    assert history.best_validation() == (4, 3.0) and history.mean_validations() == [
        (2, 3.5),
        (4, 3.0),
        (4, 4.0),
    ]
    shown = dict(headlines(history, {}))
    for name, last, best in (("a", "3.5000", "2.0000 at 2"), ("b", "4.5000", "3.0000 at 4")):
        assert shown[f"final validation loss on {name}"] == last
        assert shown[f"best validation loss on {name}"] == best


def test_the_validation_at_the_end_hides_no_other(two_sets):
    run = RunTail(two_sets)
    run.read_new(lambda: None)
    drawn = curves(run, View())["checks"]
    assert drawn["validation on a"] == {
        "x": [2.0, 4.0, 4.0],
        "y": [2.0, 3.0, 3.5],
        "step": [2, 4, 4],
    }


def test_new_rows(tmp_path, monkeypatch):
    assert read_new_rows(tmp_path) == ([], 0)
    write_rows(tmp_path, [START, step_row(1, 5.0)], '{"event": "st')
    rows, end = read_new_rows(tmp_path)
    assert [row["event"] for row in rows] == ["start", "step"] and read_new_rows(tmp_path, end) == (
        [],
        end,
    )
    write_rows(tmp_path, [START, step_row(1, 5.0), step_row(2, 4.0)], "nonsense\n[]\n")
    assert [row["iteration"] for row in read_new_rows(tmp_path, end)[0]] == [2]
    assert [row["iteration"] for row in read_new_rows(tmp_path, end + 1)[0]] == []  # within a line
    monkeypatch.setattr("meshwright.base.runs.rows.ROWS_LIMIT", 200)
    assert len(read_rows(tmp_path)) == 3 > len(read_new_rows(tmp_path)[0])


def test_the_last_step_and_how_its_attempt_ended(tmp_path):
    assert find_last_step(tmp_path) is None and not holds_steps(tmp_path)
    write_rows(tmp_path, [START])
    assert find_last_step(tmp_path) is None and not holds_steps(tmp_path)
    many = [step_row(i, 5.0) for i in range(1, 1000)]
    write_rows(tmp_path, [START, *many], '{"event": "step", "iterat')
    assert os.path.getsize(tmp_path / "metrics.jsonl") > 1 << 16  # only the end of it is read
    assert find_last_step(tmp_path) == (999, "was killed after step 999") and holds_steps(tmp_path)
    end = {"event": "end", "attempt": 1, "iteration": 999, "reason": "SIGTERM", "status": 143}
    write_rows(tmp_path, [START, *many, end])
    assert find_last_step(tmp_path) == (999, "ended after step 999 (SIGTERM)")


GROWING = """
[data]
seq_length = 32
[training]
seq_length_schedule = "0:8 2:16 3:32"
"""


def amounts_everywhere(folder):
    """Return the tokens (or samples) that each reader of a run prints, with their unit."""
    run = RunTail(folder)
    run.read_new(lambda: None)
    on_the_page = describe_run(run, "a", 0.0)
    (compared,) = read_runs([folder])
    shown = dict(headlines(read_history(folder), read_settings(folder)))
    return {
        "watch": (on_the_page["amount"], on_the_page["unit"]),
        "axis": (curves(run, View("tokens"))["range"][1], on_the_page["unit"]),
        "compare": (compared.amount(4), compared.unit),
        "report": (int(shown["tokens"]), "tokens") if "tokens" in shown else None,
    }


def test_the_tokens_of_growing_samples_are_added_up_everywhere(tmp_path):
    """A skipped step has read its samples too; a rollback makes a run read some again."""
    lengths = {1: 8, 2: 8, 3: 16, 4: 32}
    steps = [step_row(i, 5.0, length=length) for i, length in lengths.items()]
    steps[1]["skipped"] = True
    rollback = {"event": "rollback", "attempt": 1, "iteration": 3, "to": 1, "time": 1.7e9}
    write_rows(tmp_path, [START, *steps[:3], rollback, *steps[1:]])
    (tmp_path / "config.toml").write_text(GROWING)
    found = amounts_everywhere(tmp_path)
    assert found == dict.fromkeys(found, (4 * (8 + 8 + 16 + 32), "tokens"))
    # Step 2 was as long as those before its schedule began, and its row does not say so.
    del steps[1]["length"]
    write_rows(tmp_path, [START, *steps])
    found = amounts_everywhere(tmp_path)
    assert found == dict.fromkeys(found, (4 * (8 + 32 + 16 + 32), "tokens"))


def test_tokens_are_unknown_without_the_rows_of_all_steps(tmp_path):
    steps = [step_row(i, 5.0, length=8 * i) for i in (2, 3, 4)]
    write_rows(tmp_path, [START, *steps])
    (tmp_path / "config.toml").write_text(GROWING)
    found = amounts_everywhere(tmp_path)
    assert found.pop("report") is None
    assert found == dict.fromkeys(found, (16, "samples"))


def test_a_rollback_undoes_all_that_came_later(tmp_path):
    def made_at(i):
        sample = {"event": "sample", "iteration": i, "number": 0, "prompt": "A", "text": str(i)}
        score = {"event": "scores", "iteration": i, "scores": {"a": float(i)}}
        average = {"event": "average", "iteration": i, "steps": [1, i], "loss": float(i)}
        return [check_row(i, float(i)), sample, score, average]

    rollback = {"event": "rollback", "attempt": 1, "iteration": 4, "to": 2, "time": 1.7e9}
    rows = [step_row(i, 5.0) for i in range(1, 5)]
    write_rows(tmp_path, [START, *rows, *made_at(2), *made_at(3), *made_at(4), rollback])
    history = read_history(tmp_path)
    assert [step.iteration for step in history.steps] == [1, 2]
    assert [v.iteration for v in history.validations] == [2]
    assert [*history.samples] == [(2, 0)]
    assert [*history.means] == [2] and history.scores == {"a": {2: 2.0}}


# Files that are none


def read_every_way(folder):
    """Return what each reader of a run says of its metrics.jsonl."""
    readers = [
        read_history,
        holds_steps,
        _count_starts,
        lambda f: RunTail(f).read_new(lambda: None),
    ]
    for reader in readers:
        with pytest.raises((UserError, UnfitFile)) as refused:
            reader(folder)
        yield str(refused.value)


@pytest.mark.promise("devices, pipes, links out of it and holes")
def test_a_hole_in_the_rows_takes_no_memory(tmp_path):
    """30 GB without an end of a line are refused after the longest row that is read."""
    path = write_rows(tmp_path, [START]) / METRICS
    os.truncate(path, 30 << 30)
    tracemalloc.start()
    try:
        assert all("no row ends within" in why for why in read_every_way(tmp_path))
        assert (
            find_last_step(tmp_path) is None and tracemalloc.get_traced_memory()[1] < 8 * ROW_LIMIT
        )
    finally:
        tracemalloc.stop()


@pytest.mark.promise("devices, pipes, links out of it and holes")
def test_pipes_devices_and_links_out_of_a_run_are_not_read(tmp_path):
    folder, path = tmp_path / "run", tmp_path / "run" / METRICS
    folder.mkdir()
    os.mkfifo(path)
    assert (
        all("not a regular file" in why for why in read_every_way(folder))
        and find_last_step(folder) is None
    )
    write_rows(tmp_path, [START, step_row(1, 5.0)])
    for target in ("/dev/zero", tmp_path / METRICS):
        path.unlink()
        path.symlink_to(target)
        assert all("a link out of" in why for why in read_every_way(folder))
        assert find_last_step(folder) is None
        (folder / "config.toml").symlink_to(target)
        with pytest.raises(UnfitFile, match="a link out of"):
            read_settings(folder)
        (folder / "config.toml").unlink()


def test_a_file_of_settings_is_bounded(tmp_path, capsys):
    path = tmp_path / "config.toml"
    for make, why in [
        (lambda: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda: path.touch() or os.truncate(path, 30 << 30), "more than 4,194,304 bytes"),
    ]:
        make()
        assert main(["train", "--config", str(path)]) == 2 and why in capsys.readouterr().err
        path.unlink()


def test_a_report_names_the_file_that_is_none(tmp_path, capsys):
    os.mkfifo(tmp_path / METRICS)
    assert main(["report", str(tmp_path)]) == 65
    assert capsys.readouterr().err.endswith(f"{METRICS}: not a regular file, so it is not read\n")
