"""Sweeps: their points, what ends early, what a second start repeats, and the table.

Most runs here are a program that writes the rows of a training and takes no time.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import warm
from helpers import TINY_FLAGS
from meshwright.__main__ import main
from meshwright.apps.tune import points, results, sweep
from meshwright.apps.tune.points import read_space
from meshwright.apps.tune.sweep_command import show_results
from meshwright.base.errors import BAD_DATA, IO, USAGE, UserError
from meshwright.base.runs import sweeps

# Writes 8 steps and validations whose loss is that of --lr, waiting at step 5 while a file named
# `wait` is beside the run; a rate of 9 diverges, and SIGTERM or SIGINT end it as a training ends.
PROGRAM = """
import json, os, signal, sys, time
words = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
folder, lr = words.get("save") or words["run-dir"], float(words["lr"])
os.makedirs(folder, exist_ok=True)
ended = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: ended.append(number))
rows = open(folder + "/metrics.jsonl", "a", buffering=1)
def write(**row):
    rows.write(json.dumps({"attempt": 1, "time": time.time(), **row}) + "\\n")
write(event="start", iteration=0, train_iters=8)
for i in range(1, 9):
    step = dict(iteration=i, consumed_samples=i, loss=lr, grad_norm=1.0, lr=lr, skipped=False, ms=1.0)
    write(event="step", tokens_per_second=1.0, **step)
    write(event="validation", iteration=i, name="validation", loss=lr + i, ppl=1.0, seconds=0.0)
    while i == 5 and os.path.exists(os.path.dirname(folder) + "/wait") and not ended:
        time.sleep(0.01)
    if ended:
        write(event="end", iteration=i, reason="signal", status=128 + ended[0])
        sys.exit(128 + ended[0])
    if lr == 9:
        sys.exit(70)
write(event="end", iteration=8, reason="done", status=0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.02)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "sweep"


def make(folder: Path, rates: list[str], **plan: Any) -> sweep.Sweep:
    listed = list(read_space([f"lr={','.join(rates)}"], []).points(1, 0))
    made = sweep.Sweep(sweep.SweepPlan(folder, **plan), sweep.join_runs(folder, listed, []), [])
    made.program = [sys.executable, "-IS", str(folder.parent / "program.py")]
    return made


def states(made: sweep.Sweep) -> dict[str, str]:
    return {name: run.state for name, run in made.runs.items()}


def listed(*grid: str, random: tuple[str, ...] = (), draws: int = 3) -> list[points.Point]:
    return list(read_space(grid, random).points(draws, 0))


def test_a_grid_has_every_combination_and_a_colon_joins_flags() -> None:
    assert {point["depth"] for point in listed(random=("depth=1..3",), draws=20)} == {"1", "2", "3"}
    both = listed("lr=1e-4,0.001 hidden-size:num-layers=64:2,128:4")
    assert [tuple(point.values()) for point in both] == [
        ("0.0001", "64", "2"),
        ("0.0001", "128", "4"),
        ("0.001", "64", "2"),
        ("0.001", "128", "4"),
    ]
    assert points.name_of_point(both[0]) == "lr=0.0001,hidden-size=64,num-layers=2"


def test_done_runs_are_not_repeated_and_new_values_are_added(folder: Path) -> None:
    first = make(folder, ["1", "2"])
    assert first.run([{}, {}]) == 0
    second = make(folder, ["2", "3", "9"])
    assert states(second) == {"lr=1": "done", "lr=2": "done", "lr=3": "waiting", "lr=9": "waiting"}
    assert second.run([{}]) == 0
    assert states(second) == {"lr=1": "done", "lr=2": "done", "lr=3": "done", "lr=9": "diverged"}
    starts = {
        name: (folder / name / "metrics.jsonl").read_text().count('"start"') for name in second.runs
    }
    assert set(starts.values()) == {1}


@pytest.mark.flag("stop_at")
def test_worse_runs_end_at_their_fraction(folder: Path) -> None:
    """Runs wait after step 4 of 8 until the losses of all are known: the best two of four go on."""
    folder.mkdir()
    made = make(folder, ["4", "1", "3", "2"], stop_at=(0.5,))
    real_reason = made.reason_to_stop
    seen: set[str] = set()

    def reason(run: sweep.SweepRun) -> str:
        seen.update(name for name, each in made.runs.items() if 4 in each.rungs)
        if len(seen) < 4:
            return ""
        why = real_reason(run)
        if not why and sum(child.is_stopped for child in made.children.values()) + 2 >= len(
            made.children
        ):
            (folder / "wait").unlink(missing_ok=True)
        return why

    made.reason_to_stop = reason  # type: ignore[method-assign]
    (folder / "wait").touch()
    assert made.run([{}] * 4) == 0
    assert states(made) == {"lr=4": "stopped", "lr=1": "done", "lr=3": "stopped", "lr=2": "done"}
    assert made.runs["lr=4"].note == "8.0000 at step 4: not among the best 2 of 4"
    again = make(folder, ["4", "1", "3", "2"], stop_at=(0.5,))
    assert again.run([{}]) == 0 and states(again) == states(made)


@pytest.mark.parametrize("state", ["interrupted", "running"])  # the latter, if the sweep was killed
def test_an_interrupted_run_is_taken_up_by_the_next_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    folder.mkdir()
    (folder / "wait").touch()
    made = make(folder, ["1", "2"])

    def interrupt(run: sweep.SweepRun) -> None:
        if run.read(folder).count >= 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(made, "note_rungs", lambda run: interrupt(run) if made.children else None)
    with pytest.raises(KeyboardInterrupt):
        made.run([{}])
    assert states(made) == {"lr=1": "interrupted", "lr=2": "waiting"}
    (folder / "wait").unlink()
    record = (folder / sweeps.RECORD).read_text()
    (folder / sweeps.RECORD).write_text(record.replace("interrupted", state))
    second = make(folder, ["1", "2"])
    assert second.run([{}]) == 0
    assert states(second) == {"lr=1": "done", "lr=2": "done"}


def test_a_failed_run_names_its_log_and_is_tried_again(folder: Path) -> None:
    made = make(folder, ["1"])
    made.program = [sys.executable, "-c", "import sys; sys.exit(65)"]
    assert made.run([{}]) == 1
    assert made.runs["lr=1"].state == "failed" and "lr=1.log" in made.runs["lr=1"].note
    assert make(folder, ["1"]).run([{}]) == 0


@pytest.mark.flag("sweep.json")
def test_the_table_is_sorted_and_seeds_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = read_space(["lr=2,1", "seed=1,2"], []).points(1, 0)
    runs = sweep.join_runs(folder, list(grid), [])
    for run, loss in zip(runs.values(), (4.0, 5.0, 3.0, 3.5), strict=True):
        write_run(folder / run.name, loss)
        run.state = "done"
        run.read(folder)
    swept = results.swept_points(list(runs.values()))
    assert [(o.point, o.held_out, o.seeds) for o in swept] == [
        ({"lr": "1"}, 3.25, 2),
        ({"lr": "2"}, 4.5, 2),
    ]
    assert results.table(swept)[1].split() == "1 3.2500 0.3536 2 3.0000 160 0.2 s done".split()
    assert results.write_picture(folder, swept).read_text().count("lr") >= 1
    show_results(folder, list(runs.values()), True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["point"] for row in rows] == [{"lr": "1"}, {"lr": "2"}]


def test_results_may_diverge_and_have_any_letters(folder: Path) -> None:
    runs = {}
    for text, seed, loss in (("a$\\b$", "1", math.nan), ("a$\\b$", "2", 1.0), ("b$_", "1", 2.0)):
        run = runs[text, seed] = sweep.SweepRun(
            f"{len(runs)}", {"data_path": text, "seed": seed}, "done"
        )
        write_run(folder / run.name, loss)
        run.read(folder)
    swept = results.swept_points(list(runs.values()))
    assert [(o.held_out, o.spread) for o in swept][0] == (2.0, None) and swept[1].spread is None
    assert results.write_picture(folder, swept).is_file()


def write_run(folder: Path, loss: float) -> None:
    folder.mkdir(parents=True)
    step = {
        "event": "step",
        "consumed_samples": 10,
        "loss": 3.0,
        "grad_norm": 1.0,
        "lr": 1.0,
        "skipped": False,
    }
    rows: list[dict[str, Any]] = [
        {"event": "start", "attempt": 1, "iteration": 0, "train_iters": 1, "time": 1.0},
        {**step, "iteration": 1, "ms": 100.0, "tokens_per_second": 1.0, "attempt": 1, "time": 1.1},
        {
            "event": "validation",
            "iteration": 1,
            "name": "validation",
            "loss": loss,
            "ppl": 1.0,
            "attempt": 1,
        },
        {"event": "end", "iteration": 1, "reason": "done", "status": 0, "attempt": 1, "time": 1.1},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text("[data]\nseq_length = 16\n")


@pytest.mark.flag("jobs devices_per_run")
def test_devices_are_divided_among_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep.devices, "count_accelerators", lambda: 4)
    monkeypatch.setattr(sweep.devices, "hiding_variable", lambda: "CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(sweep.host, "cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert sweep.find_slots(None, 2, "auto") == [
        {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "3,5"},
        {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in sweep.find_slots(6, 1, "cuda")] == list(
        "356735"
    )
    assert sweep.find_slots(2, 1, "cpu") == [{"OMP_NUM_THREADS": "8"}] * 2
    with pytest.raises(UserError, match="this machine has 4"):
        sweep.find_slots(None, 8, "auto")


@pytest.mark.flag("grid seeds")
def test_every_run_is_checked_before_one_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", str(tmp_path / "s"), "--grid", "num-attention-heads=4,5", "--", *TINY_FLAGS]
    assert main(words) == 2
    assert "num-attention-heads=5: " in capsys.readouterr().err and not (tmp_path / "s").exists()
    assert main(["sweep", str(tmp_path / "s"), "--seeds=2", "--dry-run", "--", *TINY_FLAGS]) == 0
    assert [
        line.split("--seed=")[1].split()[0] for line in capsys.readouterr().out.splitlines()[1:]
    ] == ["1235"]


def test_a_start_that_trained_nothing_binds_no_later_one(folder: Path) -> None:
    plan = sweep.SweepPlan(folder, ("--device=none",))
    (started,) = (runs := sweep.join_runs(folder, [{"lr": "1"}], ["--device=none"])).values()
    folder.mkdir(exist_ok=True)
    sweep.Sweep(plan, runs, []).write()
    assert list(sweep.join_runs(folder, [{"lr": "2"}], ["--device=cpu"])) == ["lr=2"]
    started.state = "done"
    sweep.Sweep(plan, runs, []).write()
    with pytest.raises(UserError, match="choose another folder"):
        sweep.join_runs(folder, [{"lr": "2"}], ["--device=cpu"])


@pytest.mark.flag("random draws draw_seed no_checkpoints")
def test_draws_and_what_runs_save_follow_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def commands(*words: str) -> list[str]:
        flags = ["--random", "lr=1e-4..1e-2", "--dry-run", *words, "--", *TINY_FLAGS]
        assert main(["sweep", str(tmp_path / "s"), *flags]) == 0
        return capsys.readouterr().out.splitlines()

    two = commands("--draws=2")
    assert len(two) == 2 and all("--save=" in line for line in two)
    assert commands("--draws=3")[:2] == two and commands("--draws=2", "--draw-seed=1")[0] != two[0]
    unsaved = commands("--draws=2", "--no-checkpoints")
    assert len(unsaved) == 2 and all(
        "--run-dir=" in line and "--save=none" in line for line in unsaved
    )


def test_too_many_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = ",".join(map(str, range(1, 201)))
    grid = ["--grid", f"train-iters={many}", f"seed={many}"]
    assert main(["sweep", str(tmp_path / "s"), *grid, "--", *TINY_FLAGS]) == USAGE
    assert "40,000 runs" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_no_run_writes_into_anothers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    monkeypatch.setenv("MESHWRIGHT_RUN_DIR", "elsewhere")
    monkeypatch.setenv("MESHWRIGHT_SAVE", "elsewhere")
    for keeps, saved in (((), str(folder / "seed=7")), (("--no-checkpoints",), None)):
        plan = sweep.SweepPlan(folder, tuple(TINY_FLAGS), checkpoints=not keeps)
        c = plan.read_settings("seed=7", {"seed": "7"}).checkpoint
        assert (c.save, c.run_dir) == (saved, str(folder / "seed=7"))
        assert f"--load={saved or 'none'}" in plan.command("seed=7", {"seed": "7"})


@pytest.mark.parametrize(
    ("grid", "shared"),
    [
        ("lr=1e-3,5e-3 save-hf=x", "--save-hf x: 2 runs"),
        ("lr=1e-3,5e-3 tensorboard-dir=x,y", "--tensorboard-dir x: 2 runs"),
        ("lr:save-hf=1e-3:x,5e-3:y", ""),
        ("lr=1e-3,0.001 save-hf=x,none", ""),  # both rates are one run
    ],
)
def test_listed_folders_are_not_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], grid: str, shared: str
) -> None:
    words = ["sweep", str(tmp_path / "s"), "--grid", grid, "--dry-run", "--", *TINY_FLAGS]
    assert main(words) == (USAGE if shared else 0)
    assert shared in capsys.readouterr().err


def test_with_json_standard_output_has_the_records_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: sweep.Sweep, slots: list[dict[str, str]]) -> int:
        for each in self.runs.values():
            self.say(each, "started")
        return 0

    monkeypatch.setattr(sweep.Sweep, "run", run)
    words = ["sweep", str(tmp_path), "--grid", "lr=1e-3,5e-3", "--json", "--", *TINY_FLAGS]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert [one["point"] for one in json.loads(out)] == [{"lr": "0.001"}, {"lr": "0.005"}]
    assert err.count("started") == 2


def test_points_that_differ_have_different_names() -> None:
    points_of = [{"data_path": text} for text in ("a;b", "a-b", "a b", "a/b")]
    assert len({points.name_of_point(point) for point in points_of}) == 4
    stages = listed("blend-stages='5: 1 a' '9: 1 b'|'7: 1 a'")
    assert [points.words_of(point) for point in stages] == [
        ["--blend-stages", "5: 1 a", "9: 1 b"],
        ["--blend-stages", "7: 1 a"],
    ]
    assert points.words_of(listed("ffn-hidden-size=none")[0]) == ["--ffn-hidden-size=none"]


RUN = {"point": {"seed": "1"}, "state": "done", "note": ""}


HOSTILE = {
    "a NUL in a name": {"runs": {"lr=1\0": RUN}},
    "a name that leads out": {"runs": {"../lr=1": RUN}},
    "a text for words": {"words": 7},
    "a NUL in a point": {"runs": {"seed=1": RUN | {"point": {"seed": "1\0"}}}},
    "an unknown state": {"runs": {"seed=1": RUN | {"state": "perhaps"}}},
    "a number for a run": {"runs": {"seed=1": 7}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_is_refused_in_words(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path, [])
    record = json.loads((tmp_path / sweeps.RECORD).read_text()) | HOSTILE[name]
    (tmp_path / sweeps.RECORD).write_text(json.dumps(record))
    for command in ("sweep", "report"):
        assert main([command, str(tmp_path)]) == BAD_DATA
        assert f"{sweeps.RECORD} is not the record of a sweep: " in capsys.readouterr().err


def test_a_record_that_is_no_file_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / sweeps.RECORD)
    assert main(["sweep", str(tmp_path)]) in (BAD_DATA, IO)
    assert f"error: {tmp_path / sweeps.RECORD}: " in capsys.readouterr().err


@pytest.mark.promise("What allows code to run, and every other flag for one start")
def test_a_record_gives_no_flag_for_one_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever made the folder would have a pickle of its run read as code."""
    write_record(tmp_path, ["--mock-data", "--trust-pickle"])
    assert main(["sweep", str(tmp_path)]) == USAGE
    why = f"--trust-pickle in {tmp_path / sweeps.RECORD}: a flag for one start is taken from the command line alone"
    assert why in capsys.readouterr().err
    write_record(tmp_path, [])
    text = (
        (tmp_path / sweeps.RECORD).read_text().replace('{"seed": "1"}', '{"trust_pickle": "true"}')
    )
    (tmp_path / sweeps.RECORD).write_text(text)
    assert main(["sweep", str(tmp_path), "--dry-run"]) == USAGE
    assert "--trust-pickle is for one start, not for a run; leave it out" in capsys.readouterr().err


def test_flags_of_train_stay_those_of_the_first_start(tmp_path: Path) -> None:
    write_record(tmp_path, ["--lr=1"])
    with pytest.raises(UserError, match="choose another folder"):
        sweep.join_runs(tmp_path, [], ["--lr=2"])
    assert list(sweep.join_runs(tmp_path, [{"seed": "2"}], ["--lr=1"])) == ["seed=1", "seed=2"]


def test_without_checkpoints_an_interrupted_run_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.training.run.write_report", lambda folder: None)
    command = sweep.SweepPlan(tmp_path, tuple(TINY_FLAGS), checkpoints=False).command(
        "a", {"train_iters": "2"}
    )
    for _ in range(2):
        assert main(command) == 0
    assert "holds the curves" not in capsys.readouterr().err


def write_record(folder: Path, train_flags: list[str]) -> None:
    (folder / sweeps.RECORD).write_text(
        json.dumps(
            {"words": ["--grid", "seed=1"], "train_flags": train_flags, "runs": {"seed=1": RUN}}
        )
    )


def test_report_compares_the_runs_of_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path, [])
    record = json.loads((tmp_path / sweeps.RECORD).read_text())
    record["runs"]["seed=2"] = record["runs"]["seed=1"]
    (tmp_path / sweeps.RECORD).write_text(json.dumps(record))
    for name in record["runs"]:
        write_run(tmp_path / name, 3.0)
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == [
        "seed=1",
        "seed=2",
    ]


@pytest.mark.long  # whole programs
def test_a_sweep_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    """The training that was going on resumes from its checkpoint."""
    folder, rest = (
        tmp_path / "sweep",
        ["--", *TINY_FLAGS, "--train-iters=120", "--save-interval=10"],
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [warm.python(), "-m", "meshwright", "sweep", str(folder)]
    process = subprocess.Popen([*start, "--grid", "lr=1e-2", *rest], env=environment)
    run = folder / "lr=0.01"
    while not (run / "latest_checkpointed_iteration.txt").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert sweep.read_runs_of_sweep(folder)["lr=0.01"].state == "interrupted"
    assert subprocess.run(start, env=environment).returncode == 0
    tail = sweep.read_runs_of_sweep(folder)["lr=0.01"]
    assert tail.state == "done" and tail.tail is not None
    first, second = tail.tail.record.attempts
    assert 0 < first.last == second.began < second.last == 120


@pytest.mark.flag("sweep_dir")
def test_a_folder_alone_goes_on_with_the_words_of_the_first_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    assert main(["sweep", str(folder)]) == 2
    assert "holds no sweep" in capsys.readouterr().err
    record = {"words": ["old", "--grid", "seed=1,2"], "train_flags": TINY_FLAGS, "runs": {}}
    (folder / sweeps.RECORD).write_text(json.dumps(record))
    assert main(["sweep", str(folder), "--jobs=2", "--dry-run"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        "--keep-last=1"
    ] * 2
