"""The report reads what runs write: repeated steps, cut lines, NaN; its page is one file."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from pages import Page, check_row, step_row

from helpers import error_of
from meshwright.__main__ import main
from meshwright.apps.report.page import write_report
from meshwright.base.runs.history import PATIENCE, final_loss, read_history

EVIL = "<script>alert('1')</script>"


def start(attempt, iteration, **more):
    row = {
        "event": "start",
        "attempt": attempt,
        "iteration": iteration,
        "time": 1.8e9,
        "command": ["train", EVIL],
    }
    row |= {"parameters": 1234567, "device": "cpu" + EVIL, "dtype": "float32", "version": "0.1.0"}
    return row | more


def step(attempt, i, loss, **more):
    return (
        step_row(i, loss, attempt=attempt, loss_scale=1.0, tflops=0.1, mfu=None, memory=None) | more
    )


def check(attempt, i, loss, name="validation"):
    return check_row(i, loss, name) | {"attempt": attempt}


# Killed after step 5 with a checkpoint of step 3; the second attempt repeats 4 and 5.
ROWS = [
    start(1, 0),
    *(step(1, i, 5 - i / 3) for i in range(1, 6)),
    check(1, 3, 2.5),
    check(1, 5, 1.0),
    start(2, 3),
    *(step(2, i, 4 - i / 7) for i in range(4, 7)),
    check(2, 6, 3.0),
    check(2, 6, 3.5, "test"),
    {"event": "later", "iteration": 6},
    {"event": "end", "attempt": 2, "iteration": 6, "reason": "all iterations done", "status": 0},
]


def end_row(iteration, reason="all iterations done", status=0):
    row = {"event": "end", "attempt": 1, "iteration": iteration}
    return row | {"reason": reason, "status": status}


def run_folder(tmp_path, rows, tail=""):
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    (folder / "config.toml").write_text(
        f'[model]\nnum_layers = 2\n[data]\nseq_length = 16\npath = "{EVIL}"\n'
    )
    return folder


def test_losses_by_position_and_data_set_are_drawn(tmp_path):
    rows = [start(1, 0), *(step(1, i, 5 - i / 3) for i in range(1, 5))]
    parts = [
        {"by_position": {"0": 5.0, "1": 4.0, "2-3": 3.0 - i}, "by_data": {"x/a": 2.0, "x/b": 3.5}}
        for i in (1, 2)
    ]
    rows += [check(1, i, 3.0) | part for i, part in zip((2, 4), parts, strict=True)]
    rows.append(rows[-1] | {"end": True})  # the last step is validated twice
    text = write_report(run_folder(tmp_path, rows)).read_text()
    drawings = Page(text).drawings
    assert ">2-3</text>" in drawings["Validation loss by position"] and "step 4" in text
    assert "Validation loss by data set" in drawings and "b: 3.5000" in text
    assert text.count("</b> step 4") == 1 == text.count("</b> step 2")
    broken = check(1, 4, 3.0) | {"by_position": [1.0]}
    (tmp_path / "a run/metrics.jsonl").write_text(json.dumps(broken) + "\n")
    assert "not a row that a run writes" in error_of(lambda: read_history(tmp_path / "a run"))


def losses(folder, capsys):
    assert main(["report", "--losses", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_losses_are_exact_and_the_last_of_each_iteration(tmp_path, capsys):
    expected = [5 - i / 3 for i in range(1, 4)] + [4 - i / 7 for i in range(4, 7)]
    assert losses(run_folder(tmp_path, ROWS), capsys) == [
        f"{i} {loss.hex()} {(0.5).hex()} {(0.1 / i).hex()}" for i, loss in enumerate(expected, 1)
    ]


def test_numbers_that_are_not_finite(tmp_path, capsys):
    rows = [start(1, 0), step(1, 1, "nan", grad_norm="inf"), step(1, 2, "-inf")]
    lines = losses(run_folder(tmp_path, rows), capsys)
    assert lines == [f"1 nan inf {(0.1).hex()}", f"2 -inf {(0.5).hex()} {(0.05).hex()}"]


def test_a_later_start_undoes_what_came_after_it(tmp_path, capsys):
    rows = [
        start(1, 0),
        *(step(1, i, 1.0) for i in range(1, 6)),
        check(1, 5, 0.1),
        start(2, 2),
        step(2, 3, 2.0),
    ]
    folder = run_folder(tmp_path, rows)
    assert [line.split()[0] for line in losses(folder, capsys)] == ["1", "2", "3"]
    assert read_history(folder).validations == []


@pytest.mark.parametrize("tail", ['{"event": "ste', '{"event": "step", "iteration": 7', "\0\0\0"])
def test_a_last_line_cut_by_a_kill_is_no_row(tmp_path, capsys, tail):
    assert len(losses(run_folder(tmp_path, ROWS, tail), capsys)) == 6


NOT_JSON, WRONG_KIND = "it is not JSON", "a value is not of the kind that its column has"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        *((line, NOT_JSON) for line in ("garbage", "[" * 100_000, "\udcff")),
        *((line, WRONG_KIND) for line in ("3", json.dumps(step(1, 2, "many")))),
        ('{"event": "step", "iteration": 2, "time": 1}', "'loss' is missing"),
        (json.dumps(step(1, 2, 5.0) | {"ms": "nan"}), "nan is not a time"),
        ('{"event": "start", "attempt": 2, "iteration": 2, "time": "inf"}', "inf is not a time"),
    ],
)
@pytest.mark.promise("A run folder is data")
def test_any_other_damaged_line_is_an_error_that_names_it(tmp_path, capsys, damage, why):
    folder = run_folder(tmp_path, ROWS)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[2] = damage
    (folder / "metrics.jsonl").write_bytes(
        ("\n".join(lines) + "\n").encode(errors="surrogateescape")
    )
    assert main(["report", "--losses", str(folder)]) == 65
    said = f"metrics.jsonl:3 is not a row that a run writes: {why}; remove that line to read the others\n"
    assert said in capsys.readouterr().err


def test_missing_folder_metrics_and_broken_settings(tmp_path, capsys):
    assert (
        main(["report", str(tmp_path / "none")]) == 65
        and "there is no folder" in capsys.readouterr().err
    )
    assert (
        main(["report", str(tmp_path)]) == 65
        and "holds no metrics.jsonl" in capsys.readouterr().err
    )
    folder = run_folder(tmp_path, ROWS)
    (folder / "config.toml").write_text("[model")
    assert (
        main(["report", str(folder)]) == 65 and "config.toml is damaged" in capsys.readouterr().err
    )
    assert not (folder / "report.html").exists()


@pytest.mark.promise("`report` and `watch` show what stands in it as text")
def test_page(tmp_path, capsys):
    folder = run_folder(tmp_path, ROWS)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    text = (folder / "report.html").read_text()
    parsed = Page(text)
    words = [
        "2.5000 at 3",
        "2027-01-15 08:00:00 UTC",
        "0 to 5",
        "3 to 6",
        "killed: no end recorded",
        EVIL,
    ]
    words += [
        "all iterations done (exit status 0)",
        f"meshwright train --config '{folder}/config.toml'",
    ]
    words += "1,234,567 3.1429 3.0000 20.09 6,400 384 resumed seq_length validation test".split()
    assert [word for word in words if word not in parsed.said] == []
    assert len(parsed.drawings) == 5 and "Peak memory" not in text
    first = (folder / "report.html").read_bytes()
    write_report(folder)
    assert (folder / "report.html").read_bytes() == first  # the same run, the same page
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.toml",
        "metrics.jsonl",
        "report.html",
    ]


def test_a_phone_shows_labels_that_can_be_read(tmp_path):
    """An image takes all 358 of 390 pixels; its labels of 9 points must keep 9 pixels or more."""
    text = write_report(run_folder(tmp_path, ROWS)).read_text()
    page = Page(text)
    wide = text.count('<figure class="wide">')
    drawings = [*page.narrow, *[svg for title, svg in page.drawings.items() if title != "Loss"]]
    assert wide == len(page.narrow) == 1
    for svg in drawings:
        points = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
        assert 9 * 358 / points >= 9


def test_output_elsewhere(tmp_path, capsys):
    folder = run_folder(tmp_path, [start(1, 0), step(1, 1, 2.0, memory=3 * 2**30, mfu=0.5)])
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    said = Page((tmp_path / "page.html").read_text()).said
    assert "Peak memory" in said and "3.00 GiB" in said and "50.0%" in said
    assert not (folder / "report.html").exists()
    assert main(["report", str(folder), "--output", str(tmp_path / "none" / "page.html")]) == 74


@pytest.mark.parametrize(
    "rows",
    [
        [],
        ROWS[:2],
        [{"event": "start", "attempt": 1, "iteration": 0}],
    ],
)
def test_runs_that_hardly_began(tmp_path, rows):
    folder = run_folder(tmp_path, rows)
    (folder / "config.toml").unlink()
    said = Page(write_report(folder).read_text()).said
    assert ("nothing to draw" in said) == (len(rows) < 2)


def test_a_command_line_of_bytes_that_are_no_text(tmp_path):
    folder = run_folder(tmp_path, [start(1, 0, command=["train", "--save", "\udcff"])])
    assert "--save" in write_report(folder).read_text()


def test_a_long_run_gives_a_small_page_and_keeps_its_spike(tmp_path):
    rows = [start(1, 0), *(step(1, i, 2.0 + i % 7 / 10) for i in range(1, 6001))]
    rows[4325]["loss"] = 99.0
    text = write_report(run_folder(tmp_path, rows)).read_text()
    assert len(text) < 400_000
    assert "training, median of 241 steps" in text and re.search(
        r">\s*100\s*<", Page(text).drawings["Loss"]
    )


def test_losses_start_without_heavy_libraries(tmp_path):
    code = (
        "import sys; from meshwright.apps.report.command import main; main(['--losses', sys.argv[1]]); "
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(run_folder(tmp_path, ROWS))],
        check=True,
        stdout=subprocess.DEVNULL,
    )


@pytest.mark.usefixtures("undrawn")
def test_only_the_page_of_a_running_run_reloads_itself(tmp_path):
    steps = [step(1, i, 2.0, ms=500) for i in range(1, 11)]
    folder = run_folder(tmp_path, [start(1, 0, train_iters=100), *steps])
    metrics = folder / "metrics.jsonl"
    text = write_report(folder).read_text()
    said = Page(text).said
    assert ": step 10 of 100; about 45.0 s left; updated 20" in said
    assert "latest training loss" in said
    for part in ('<progress max="100" value="10">', "location.reload()", 'http-equiv="refresh"'):
        assert part in text
    long_ago = time.time() - PATIENCE - 1
    os.utime(metrics, (long_ago, long_ago))
    text = write_report(folder).read_text()
    assert "no end recorded: still running, or killed since 20" in Page(text).said
    assert "reload" not in text
    with metrics.open("a") as file:
        file.write(json.dumps(end_row(10, "SIGTERM", 143)) + "\n")
    text = write_report(folder).read_text()
    assert "last attempt: SIGTERM (exit status 143)" in Page(text).said
    assert "reload" not in text and "refresh" not in text and "<progress" not in text


@pytest.mark.parametrize(
    ("last", "kept", "words"),
    [
        (
            2.0,
            False,
            "the lowest loss, 2.0000, was at step 30, the last of 3: a longer training may lower it further.",
        ),
        (
            2.51,
            False,
            "which is 0.0100 higher. The difference is within noise, since each validation reads other",
        ),
        (
            3.0,
            False,
            "(overfitting). More text, fewer steps, a lower --lr, or more dropout and weight decay help.\n"
            "With --keep-best, a run keeps the checkpoint of its lowest validation loss.",
        ),
        (3.0, True, "The best step is kept: run/iter_0000020."),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_the_best_and_the_last_validation_are_explained(tmp_path, last, kept, words):
    checks = [check(1, i, loss) for i, loss in ((10, 2.75), (20, 2.5), (30, last))]
    folder = run_folder(tmp_path, [start(1, 0), step(1, 30, 2.0), *checks, end_row(30)])
    if kept:
        (folder / "config.toml").write_text('[checkpoint]\nsave = "run"\nkeep_best = true\n')
    said = Page(write_report(folder).read_text()).said
    for part in words.split("\n"):
        assert part in said


@pytest.mark.usefixtures("undrawn")
def test_samples_that_grow_are_counted_as_samples(tmp_path, capsys):
    """Their lengths are not known from the settings alone."""
    folder = run_folder(tmp_path, [start(1, 0), step(1, 1, 5.0), step(1, 2, 4.0)])
    counted = []
    for more in ("", '[training]\nseq_length_schedule = "4,16:9"\n'):
        (folder / "config.toml").write_text(f"[data]\nseq_length = 16\n{more}")
        said = Page(write_report(folder).read_text()).said
        assert main(["report", str(folder), str(folder)]) == 0
        amounts = re.findall(r"^(tokens|samples) +\d", capsys.readouterr().out, re.M)
        counted.append(("\ntokens\n" in said, amounts))
    assert counted == [(True, ["tokens"]), (False, ["samples"])]


@pytest.mark.usefixtures("undrawn")
def test_one_definition_of_each_final_figure(tmp_path, capsys):
    """The screen, the page and the comparison agree; the last weights may be validated twice."""
    steps = [step(1, i, 5 - i / 100, skipped=i == 99) for i in range(1, 101)]
    folder = run_folder(tmp_path, [start(1, 0), *steps, check(1, 50, 4.5), check(1, 100, 4.0)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(check(1, 100, 4.25) | {"end": True}) + "\n")
        file.write(json.dumps(end_row(100, "")) + "\n")
    (folder / "config.toml").write_text("[data]\nseq_length = 16\n[logging]\nlog_interval = 4\n")
    mean = (5 - 0.96 + 5 - 0.97 + 5 - 0.98 + 5 - 1.0) / 4
    said = Page(write_report(folder).read_text()).said
    assert f"final training loss, mean of 4 steps\n{mean:.4f}" in said
    assert "final validation loss\n4.2500" in said and "best validation loss\n4.0000 at 100" in said
    assert "Step 100 was validated twice, on other batches: 4.0000, at the end 4.2500." in said
    assert main(["report", "--json", str(folder), str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["runs"][0]
    assert (first["final_loss"], first["final_loss_steps"]) == (pytest.approx(mean), 4)
    assert (first["final_validation"], first["best_validation"]) == (4.25, 4.0)
    assert found["differences"][0]["validation"] == {"50": 0.0, "100": 0.0}
    assert final_loss([5.0] * 1000 + [4.0] * 20, 1000) == (4.0, 20)  # a fiftieth of a long run
