"""The report reads what runs write: repeated steps, cut lines, NaN; the page needs nothing from outside."""

import json
import math

import pytest

from meshwright.__main__ import main


def write_run(folder, rows, tail=""):
    folder.mkdir(exist_ok=True)
    folder.joinpath("metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    folder.joinpath("config.toml").write_text("[model]\nnum_layers = 2 # <b>\n")
    return folder


def start(attempt, iteration):
    return {"event": "start", "attempt": attempt, "iteration": iteration, "time": 1.8e9, "command": ["train", "<x>"],
            "parameters": 1000, "device": "cpu", "dtype": "float32", "train_iters": 6, "tokens_per_step": 64}  # fmt: skip


def step(attempt, i, loss):
    return {"event": "step", "attempt": attempt, "iteration": i, "consumed_samples": 4 * i, "loss": loss, "grad_norm": 0.5,
            "lr": 0.1 / i, "loss_scale": 1.0, "skipped": False, "ms": 10.0, "tokens_per_second": 6400.0, "memory": None}  # fmt: skip


def check(i, loss):
    return {
        "event": "validation",
        "attempt": 1,
        "iteration": i,
        "name": "validation",
        "loss": loss,
        "ppl": math.exp(loss),
    }


ROWS = [start(1, 0), *(step(1, i, 5 - i / 3) for i in range(1, 6)), check(3, 4.0), start(2, 3),
        *(step(2, i, 4 - i / 7) for i in range(4, 7)), check(6, 3.0), {"event": "later", "iteration": 6}]  # fmt: skip


def test_losses_are_exact_and_the_last_of_each_iteration(tmp_path, capsys):
    assert main(["report", "--losses", str(write_run(tmp_path / "r", ROWS))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[3] == f"4 {(4 - 4 / 7).hex()} {(0.5).hex()} {(0.1 / 4).hex()}"
    assert lines[2].split()[1] == (5 - 3 / 3).hex()


def test_steps_after_the_checkpoint_of_a_later_attempt_are_dropped(tmp_path, capsys):
    rows = [start(1, 0), *(step(1, i, 1.0) for i in range(1, 6)), start(2, 2), step(2, 3, 2.0)]
    main(["report", "--losses", str(write_run(tmp_path / "r", rows))])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3"]


def test_a_line_cut_by_a_kill_is_no_row(tmp_path, capsys):
    assert main(["report", "--losses", str(write_run(tmp_path / "r", ROWS, '{"event": "ste'))]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_another_damaged_line_is_an_error(tmp_path, capsys):
    folder = write_run(tmp_path / "r", ROWS)
    text = folder.joinpath("metrics.jsonl").read_text().splitlines()
    folder.joinpath("metrics.jsonl").write_text("\n".join([*text[:2], "garbage", *text[3:]]) + "\n")
    assert main(["report", str(folder)]) == 65 and "metrics.jsonl:3" in capsys.readouterr().err


def test_nan_is_shown(tmp_path, capsys):
    assert main(["report", "--losses", str(write_run(tmp_path / "r", [start(1, 0), step(1, 1, "nan")]))]) == 0
    assert capsys.readouterr().out.startswith("1 nan ")


def test_missing_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 65 and "no such file" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[:2], [step(1, 1, "nan"), step(1, 2, 1.0)]])
def test_page(tmp_path, capsys, rows):
    folder = write_run(tmp_path / "r", rows)
    assert main(["report", str(folder)]) == 0
    page = folder.joinpath("report.html").read_text()
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert "&lt;b&gt;" in page and "<x>" not in page
    for outside in ("<script", "<link", "src=", "@import", "url(http"):
        assert outside not in page
    if rows is ROWS:
        assert page.count("<svg") == 4 and "3.0000 at step 6" in page and "20.09" in page
        assert page.count("<tr><td>") == 2 and "cut off" in page
