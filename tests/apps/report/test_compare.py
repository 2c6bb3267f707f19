"""Two runs side by side: their numbers, as text, JSON and a page; and the picture of schedules."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from pages import Page
from pages import check_row as check
from pages import step_row as step

from helpers import TINY_FLAGS
from meshwright.__main__ import main
from meshwright.apps.pages.styles import COLOURS, style_of


@pytest.fixture
def run(tmp_path):
    def write(name, rows, settings="[data]\nseq_length = 16\n"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        start = {"event": "start", "attempt": 1, "iteration": 0}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [start, *rows]))
        (folder / "config.toml").write_text(settings)
        return str(folder)

    return write


def compared(capsys, *words):
    """Exit status and what --json says."""
    status = main(["report", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


# The first step is slow, as one that compiles: the median speed is that of the others.
A = [step(i, 4 - i / 8, tokens_per_second=6400.0 if i > 1 else 100.0) for i in range(1, 11)]
B = [step(i, 4 - i / 8 + (0.25 if i == 6 else 0.125 if i > 3 else 0)) for i in range(1, 13)]


def test_numbers(run, capsys):
    a = run("a", [*A, check(5, 3.5), check(10, 3.0), check(10, 9.0, "test")])
    b = run("b", [*B, check(5, 2.75), check(10, 3.25), check(12, 3.25)])
    status, found = compared(capsys, a, b)
    assert status == 0 and found["unit"] == "tokens" and found["settings"] == {}
    first, second = found["runs"]
    assert (first["name"], first["steps"], first["amount"]) == ("a", 10, 640)
    assert (first["final_loss"], first["final_validation"], first["best_validation"]) == (
        2.75,
        3.0,
        3.0,
    )
    assert (second["final_validation"], second["best_validation"]) == (3.25, 2.75)
    assert (first["tokens_per_second"], first["seconds"]) == (6400.0, pytest.approx(0.1))
    (d,) = found["differences"]
    assert (d["runs"], d["common_steps"], d["first"]) == (["a", "b"], 10, 4)
    assert d["largest"] == {"loss": 0.25, "iteration": 6}
    assert d["largest_relative"] == {"share": 0.25 / 3.25, "iteration": 6}
    assert d["mean_of_last_tenth"] == 0.125
    assert d["validation"] == {"5": -0.75, "10": 0.25}
    assert d["reached"] == [
        {"run": "b", "loss_of": "a", "kind": "validation", "loss": 3.0, "after": 5 * 64},
        {"run": "a", "loss_of": "b", "kind": "validation", "loss": 3.25, "after": 10 * 64},
    ]
    assert not list(Path(a).glob("*.html"))
    itself = compared(capsys, a, a)[1]["differences"][0]
    assert itself["first"] is None and {r["after"] for r in itself["reached"]} == {640}


def test_the_training_loss_counts_where_there_is_no_validation(run, capsys):
    """Its median: a spike downwards has not reached anything."""
    a = run("a", [step(i, 5 - i / 100) for i in range(1, 201)])
    b = run("b", [step(i, 1.0 if i == 30 else 5 - i / 50, batch=2) for i in range(1, 201)])
    (d,) = compared(capsys, a, b)[1]["differences"]
    ours, theirs = d["reached"]
    assert ours["kind"] == "training" and ours["loss"] == pytest.approx(3.015, abs=0.006)
    assert ours["after"] == pytest.approx(100 * 2 * 16, rel=0.02) and theirs["after"] is None


def test_numbers_that_are_none(run, capsys):
    """Two NaNs of one iteration are equal; a NaN against a number is beyond every tolerance."""
    a, b, c = (
        run(n, [step(1, 2.0), step(2, x), step(3, 1.0)])
        for n, x in (("a", "nan"), ("b", "nan"), ("c", 5.0))
    )
    assert compared(capsys, a, b, "--tolerance", "0")[0] == 0
    status, found = compared(capsys, a, c, "--tolerance", "1e9")
    (d,) = found["differences"]
    assert status == 1 and d["largest"] == {"loss": "inf", "iteration": 2}
    assert d["largest_relative"] == {"share": "inf", "iteration": 2}


def test_tolerance(run, capsys):
    a, b = run("a", A), run("b", B)
    assert (
        main(["report", a, b, "--json", "--tolerance", "0.25"]) == 0 and not capsys.readouterr().err
    )
    assert main(["report", a, b, "--json", "--tolerance", "0.24"]) == 1
    assert "the losses differ by 0.25, more than --tolerance 0.24" in capsys.readouterr().err
    assert compared(capsys, a, a, "--tolerance", "0")[0] == 0
    later = run("later", [step(20, 1.0)])
    assert compared(capsys, a, later)[0] == 0
    assert main(["report", a, later, "--json", "--tolerance", "1"]) == 65
    assert "no iteration in common" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_the_text_of_a_comparison(run, capsys):
    common = "[data]\nseq_length = 16\n"
    a = run(
        "x/run", [*A, check(5, 3.5)], f'[checkpoint]\nsave = "a"\n{common}[optimizer]\nlr = 0.1\n'
    )
    b = run(
        "y/run",
        [*B, check(5, 3.0)],
        f'[checkpoint]\nsave = "b"\n{common}[optimizer]\nlr = 0.2\nmin_lr = 0.1\n',
    )
    assert main(["report", a, b]) == 0
    out = capsys.readouterr().out
    # the folders' names are the same, so their paths are printed
    assert out.splitlines()[0].split() == [a, b]
    for line in (
        "steps 10 12",
        "tokens 640 768",
        "common steps 10",
        "first difference in any bit iteration 4",
        "largest difference +0.25 at 6",
        "largest relative difference 7.69% at 6",
        "last validation difference -0.5 at 5",
        "it reaches the first's final validation loss 3.5000 after 320 tokens",
        "the first reaches its final validation loss 3.0000 never",
    ):
        assert line in re.sub(" +", " ", out), line
    differ = out.split("settings that differ:\n")[1].splitlines()
    assert differ == [
        "  lr: 0.1 | 0.2",
        "  min_lr: none | 0.1",
        '  save: "a" | "b"',
        f"{a}/compare.html",
    ]
    assert main(["report", a, a]) == 0
    out = capsys.readouterr().out
    assert "none: equal to the last bit" in out and "no setting differs" in out


@pytest.mark.usefixtures("undrawn")
def test_losses_on_other_data_are_not_said_to_be_reached(run, capsys):
    a, b = (run(name, [*A, check(5, 3.5)], f"[data]\nsplit = '{name}'\n") for name in "ab")
    assert main(["report", a, b]) == 0
    out = capsys.readouterr().out
    assert "these losses are not comparable" in out and "reaches" not in out


@pytest.mark.usefixtures("undrawn")
def test_rounding_is_no_difference(run, capsys):
    a = run("a", [*A, check(10, 3.0)])
    b = run("b", [{**r, "loss": r["loss"] * (1 - 1e-7)} for r in A] + [check(10, 3.0 - 3e-7)])
    assert main(["report", a, b]) == 0
    out = re.sub(" +", " ", capsys.readouterr().out)
    assert "the first reaches its final validation loss 3.0000 after 640 tokens" in out
    assert "largest relative difference 1e-7 at" in out


def test_page(run, tmp_path, capsys):
    evil = "<script>alert('1')</script>".replace("/", "\\")
    a = run("a" + evil, [*A, step(11, "nan"), check(5, 3.5)])
    b = run(
        "b",
        [step(i, 3 - i / 100, batch=8) for i in range(1, 101)],
        '[data]\nseq_length = 16\npath = "<b>"\n',
    )
    target = tmp_path / "page.html"
    assert main(["report", a, b, "--output", str(target)]) == 0
    assert capsys.readouterr().out.endswith(f"{target}\n") and not list(Path(a).glob("*.html"))
    text = target.read_text()
    page = Page(text)
    assert len(page.drawings) == 3
    for said in (
        "a" + evil,
        "b",
        "━ ━",
        "points: validation",
        "━━━ ●",
        '"<b>"',
        "Difference",
        "Learning rate",
    ):
        assert said in page.said, said
    assert "◆" not in page.said
    for drawing in page.drawings.values():  # b's line alone is dashed, once if it is smoothed
        assert len(re.findall(r"stroke-dasharray: [\d., ]+", drawing)) == 1
        assert re.search(r">\s*tokens\s*<", drawing) and not re.search(
            r">\s*iteration\s*<", drawing
        )


def test_steps_of_equal_size_are_drawn_over_iterations(run, capsys):
    a, b = run("a", A), run("b", B, "")
    main(["report", a, b])
    drawings = Page((Path(a) / "compare.html").read_text()).drawings
    assert all(re.search(r">\s*iteration\s*<", drawing) for drawing in drawings.values())
    assert "samples " in capsys.readouterr().out  # b's sequence length is not known


def test_more_than_two_are_compared_with_the_first(run, capsys):
    folders = [run(n, [step(1, loss)]) for n, loss in (("a", 1.0), ("b", 2.0), ("c", 4.0))]
    found = compared(capsys, *folders)[1]["differences"]
    assert [(d["runs"], d["largest"]["loss"]) for d in found] == [
        (["a", "b"], 1.0),
        (["a", "c"], 3.0),
    ]


def test_many_runs(run, capsys):
    """Each has its own colour and line; a legend names what is drawn, and no more."""
    folders = [run(f"run-{n}", [step(i, n + 4 - i / 8) for i in range(1, 9)]) for n in range(9)]
    later = run("later", [step(20, 1.0), check(20, 2.0)])
    assert main(["report", *folders, later]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["steps", "tokens"] and lines[1].split()[:3] == [
        "run-0",
        "8",
        "512",
    ]
    text = (Path(folders[0]) / "compare.html").read_text()
    legends = [re.findall(r"</b> ([^<]*)</span>", part) for part in text.split("<figure")[1:]]
    names = [f"run-{n}" for n in range(9)]
    assert legends == [[*names, "later"], names[1:], [*names, "later"]]
    assert len({style_of(n) for n in range(32)}) == 32


@pytest.mark.parametrize("page", ["#ffffff", "#15181d"])
def test_colours_are_clear_on_light_and_dark_pages(page):
    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    assert len(set(COLOURS)) == 8
    for colour in COLOURS:
        dark, light = sorted((luminance(colour) + 0.05, luminance(page) + 0.05))
        assert light / dark >= 3, colour


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the last matplotlib for Python 3.10 writes other numbers"
)
def test_the_picture_of_the_schedules_is_what_the_code_does():
    path = Path(__file__).parents[3] / "docs" / "schedules.py"
    spec = importlib.util.spec_from_file_location("schedules", path)
    schedules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(schedules)
    assert schedules.PICTURE.read_text() == schedules.draw(), (
        "make docs/schedules.svg anew: python docs/schedules.py"
    )


@pytest.mark.usefixtures("undrawn")
def test_cautions(tmp_path, capsys):
    """Steps of other sizes, and validations on other data, are noted."""
    cases = (
        ("b", "--global-batch-size=8", "not equal tokens here"),
        ("c", "--eval-iters=2", "validated on other data (eval_iters)"),
        ("d", "--lr=1", ""),
    )
    for name, flag, words in (("a", "--lr=1e-2", None), *cases):
        folder = str(tmp_path / name)
        assert main(["train", *TINY_FLAGS, "--train-iters=2", "--run-dir", folder, flag]) == 0
        if words is None:
            continue
        capsys.readouterr()
        assert main(["report", str(tmp_path / "a"), folder]) == 0
        out = capsys.readouterr().out
        assert words in out and ("note:" in out) == bool(words)
        assert words in (tmp_path / "a" / "compare.html").read_text()


def test_equal_settings_are_no_difference(run, capsys):
    """A setting left open means the same as its outcome."""
    a, b = run("a", A), run("b", B)
    for folder, text in (
        (a, "max_position_embeddings = 64\nffn_hidden_size = 128"),
        (b, "swiglu = false"),
    ):
        lines = f"[model]\nhidden_size = 32\n{text}\n[data]\nseq_length = 64\n"
        Path(folder, "config.toml").write_text(lines)
    assert compared(capsys, a, b)[1]["settings"] == {}
    Path(b, "config.toml").write_text("[model]\nhidden_size = 64\n[data]\nseq_length = 64\n")
    assert compared(capsys, a, b)[1]["settings"].keys() == {"hidden_size", "ffn_hidden_size"}
