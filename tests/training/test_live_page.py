"""The page of a run that goes on: drawn beside it, seldom, and once after a failure."""

import json
import time

import pytest

from helpers import TinyRun, read_rows
from meshwright.training.state import folder as run_folder
from meshwright.training.state.folder import LivePage


@pytest.fixture
def started(tmp_path):
    rows = [{"event": "start", "attempt": 1, "iteration": 0, "train_iters": 5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.pictures
def test_a_process_draws_it(started):
    page = LivePage(started)
    page.update()
    assert page.process is None  # a short run draws once, at its end
    page.next = 0.0
    page.update()
    assert page.process is not None and page.process.wait(60) == 0
    assert "</b>: step 0 of 5" in (started / "report.html").read_text()
    used = run_folder.children_seconds() - page.used
    assert page.next >= page.begun + page.EVERY
    page.next = 0.0
    page.update()  # the time of the next one follows from what this one took
    assert page.process is None and page.next == pytest.approx(
        page.begun + max(30.0, 50 * used), abs=1
    )


@pytest.mark.pictures
def test_the_end_stops_drawing_and_a_failure_draws_once_more(started):
    page = LivePage(started)
    page.next = 0.0
    page.update()
    process = page.process
    page.close(failed=True)
    assert process.returncode is not None and page.is_closed
    until = time.monotonic() + 60
    while not (started / "report.html").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert (started / "report.html").exists()


def test_a_run_keeps_its_page_up_to_date(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(LivePage, "FIRST", 0.0)
    monkeypatch.setattr(LivePage, "EVERY", 0.0)
    monkeypatch.setattr(LivePage, "draw", lambda page: drawn.append(len(read_rows(page.folder))))
    assert TinyRun(tmp_path, capsys).status == 0 and drawn == [1, 2, 3, 4, 5, 6]
    drawn.clear()
    assert TinyRun(tmp_path / "b", capsys, "--skip-train").status == 0 and drawn == []


@pytest.mark.parametrize(
    "error, status", [(OSError(28, "disk full"), 1), (KeyboardInterrupt(), 130)]
)
def test_a_failure_is_recorded(tmp_path, capsys, monkeypatch, error, status):
    from meshwright.training.loop import Trainer

    drawn = []
    monkeypatch.setattr(LivePage, "draw", lambda page: drawn.append(1))

    def fail(self):
        raise error

    monkeypatch.setattr(Trainer, "run_hooks_between_steps", fail)
    assert TinyRun(tmp_path, capsys).status in (74, 130)
    (end,) = read_rows(tmp_path, "end")
    assert (end["status"], end["iteration"]) == (status, 1) and drawn == [1]
    assert end["reason"] == (str(error) or "KeyboardInterrupt")
