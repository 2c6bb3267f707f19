"""Rows, figures and files of `meshwright bench`, with real runs and with made-up logs."""

import io
import json
import os
import sys

import pytest
import torch

import warm
from helpers import TINY_FLAGS
from meshwright.__main__ import main
from meshwright.apps.bench import bench, peers, programs, rows, runs, table
from meshwright.apps.bench.rows import BenchRow
from meshwright.apps.bench.runs import BenchPlan
from meshwright.config import flags
from meshwright.config.schema import TrainConfig

TINY = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --vocab-size 16 --device cpu --lr 1e-3"
ROW = BenchRow("tiny", f"{TINY} --micro-batch-size 1", steps=9)


@pytest.mark.parametrize("name", [*rows.ABOUT, "h200", *rows.presets()])
def test_train_accepts_every_row(name, tmp_path):
    for row in rows.rows_of(name, 2):
        _, *words = [w for w in BenchPlan(tmp_path, has_profile=True).command(row) if w != "launch"]
        words = words[words.index("train") + 1 :] if "train" in words else words
        config = flags.parse_settings(
            TrainConfig, [f"--world-size={row.gpus}", *words], "bench"
        ).config
        assert config.training.train_iters == row.steps + runs.TRACED_STEPS
        assert config.model.hidden_size and config.logging.profile_step_start == row.steps + 1
        assert not row.beside or row.beside in [one.name for one in rows.rows_of(name, 2)]


@pytest.mark.parametrize("name, steps", [("startup", None), ("cpu", 3), ("cpu", 5)])
def test_train_accepts_fewer_steps_than_the_warm_up(name, steps, tmp_path):
    for row in rows.rows_of(name, 2):
        words = BenchPlan(tmp_path, steps=steps).command(row)
        words = words[words.index("train") + 1 :]
        config = flags.parse_settings(
            TrainConfig, [f"--world-size={row.gpus}", *words], "bench"
        ).config
        assert config.training.train_iters == (steps or row.steps)


@pytest.mark.parametrize("taken", ["out", "out/tiny"])
def test_a_place_that_is_taken_is_named_before_the_first_row(taken, tmp_path, capsys):
    place = tmp_path / taken
    place.parent.mkdir(exist_ok=True)
    place.write_text("")
    assert main(["bench", "cpu", "--out", str(tmp_path / "out")]) == 2
    assert f"{place} exists already; choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, names",
    [
        ("", []),
        ("--peers", [*peers.PACKAGES]),
        ("--peer-names megatron-core transformers", ["megatron-core", "transformers"]),
    ],
)
def test_other_programs_are_chosen_by_name(words, names, monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(bench.Bench, "run", lambda self, rows: found.extend(self.plan.peers))
    assert (
        main(["bench", "cpu", "--out", str(tmp_path / "out"), *words.split()]) == 0
        and found == names
    )


def test_a_closed_pipe_ends_a_bench_quietly(tmp_path, monkeypatch, capsys):
    """The reader takes two lines; the files have the row that it did not wait for."""
    lines = []

    class Head(io.StringIO):
        def write(self, text):
            lines.append(text)
            if len(lines) > 4:
                raise BrokenPipeError

    monkeypatch.setattr(os, "dup2", lambda *files: None)
    monkeypatch.setattr(sys, "stdout", Head())
    monkeypatch.setattr(
        bench,
        "measure_row",
        lambda row, plan, say: {"name": row.name, "failed": "no", "startup": {}},
    )
    argv = ["bench", "cpu", "--rows", "Llama", "--out", str(tmp_path / "out")]
    assert main(argv) == 0 and not capsys.readouterr().err
    (row,) = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert row["name"] == "tiny Llama" and "FAILED: no" in (tmp_path / "out/table.txt").read_text()


def test_a_row_on_several_gpus_brings_the_one_beside_it():
    assert [one.name for one in rows.chosen(["layouts"], "DP4 ZeRO-3", 4)] == [
        "345M micro-batch 4",
        "345M micro-batch 4 DP4 ZeRO-3",
        "2.7B",
        "2.7B DP4 ZeRO-3",
    ]
    # No GPU has room for it alone.
    assert [one.name for one in rows.chosen(["layouts"], "8B fp8", 2)] == ["Llama 3 8B fp8 ZeRO-3"]
    assert rows.default_sets(0) == ["cpu"]


@pytest.mark.parametrize(
    ("words", "pattern", "names"),
    [
        (["cpu", "--gpus=2"], "^tiny DP2", ["tiny", "tiny DP2"]),
        (["--gpus=1"], "^345M fp8$", ["345M fp8"]),
    ],
)
def test_rows_are_listed_by_their_pattern(words, pattern, names, capsys):
    """With a set and without one."""
    assert main(["bench", *words, "--list", "--rows", pattern]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == names


def test_a_run_of_the_command(tmp_path, capsys, monkeypatch):
    """One row that works and one that train refuses, with a flag of train after --."""
    monkeypatch.setattr(sys, "executable", warm.python())
    bad = BenchRow("bad", f"{TINY} --micro-batch-size 0", steps=3)
    plan = BenchPlan(tmp_path / "out", steps=6, extra=("--log-interval", "2"))
    assert bench.Bench(plan, "meshwright bench", 0).run([bad, ROW]) == 1
    out = capsys.readouterr().out
    assert (
        "bad                            FAILED: --micro-batch-size 0" in out
        and "2 rows, 1 failed" in out
    )
    found = json.loads((tmp_path / "out/results.json").read_text())
    failed, done = found["rows"]
    assert failed["status"] == 2 and done["failed"] is None and done["steps"] == 6
    assert 0 < done["first_step_seconds"] <= done["seconds"] and done["tokens_per_second"] > 0
    assert sum(done["startup"].values()) == pytest.approx(done["first_step_seconds"], abs=0.1)
    assert (
        done["command"].startswith("meshwright train --num-layers 1")
        and "--log-interval 2" in done["command"]
    )
    assert "elapsed time" in (tmp_path / "out/tiny/log.txt").read_text()
    assert (tmp_path / "out/table.txt").read_text().splitlines() == out.splitlines()[:-1]
    assert (tmp_path / "out/bench.png").stat().st_size > 5000


def write_metrics(folder, speeds):
    entries = [{"event": "start", "startup": {"torch": 1.5}, "block": "plain", "parameters": 5}]
    for n, speed in enumerate(speeds):
        row = {
            "tokens_per_second": speed,
            "ms": 1e3 / speed,
            "mfu": 0.5,
            "memory": 2**30 + n,
            "loss": 3.0 - n,
        }
        entries.append({"event": "step", "iteration": n + 1, **row})
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(e) + "\n" for e in entries) + '{"event": "st'
    )


def fake(monkeypatch, speeds, status=0):
    def follow(row, plan, on_step):
        write_metrics(plan.folder(row), speeds)
        return 103.0, status, 100.0

    monkeypatch.setattr(runs, "run_to_end", follow)


def test_figures(tmp_path, monkeypatch):
    """The first third is warm-up, steps after the row's own are traced; a cut line is left out."""
    fake(monkeypatch, [1, 1, 1, 10, 20, 30, 40, 50, 60, 0.1, 0.1])
    found = runs.measure_row(ROW, BenchPlan(tmp_path))
    assert (found["tokens_per_second"], found["steps"], found["peak_bytes"]) == (35, 9, 2**30 + 8)
    assert (found["first_loss"], found["last_loss"], found["mfu"]) == (3.0, -5.0, 0.5)
    assert found["startup"] == {"torch": 1.5, "first step": 1.0, "the rest": 0.5}
    assert table.lines_of(found)[0].split() == "tiny 35 29.2 50.0 1.0 3.0 3.0000 -5.0000".split()
    two = {**found, "name": "two", "gpus": 2, "beside": "tiny", "tokens_per_second": 63.0}
    table.add_ratio(two, [found])
    assert table.lines_of(two)[1].strip() == "1.80 x tiny with 2 ranks, 90.0% each"


def test_a_run_that_was_stopped_counts_by_its_steps(tmp_path, monkeypatch):
    fake(monkeypatch, [1, 4, 4, 4], status=-15)
    assert runs.measure_row(ROW, BenchPlan(tmp_path))["tokens_per_second"] == 4
    fake(monkeypatch, [1, 4], status=-15)
    assert (
        runs.measure_row(BenchRow("two", ROW.flags), BenchPlan(tmp_path))["failed"]
        == "stopped after 300 s (--seconds)"
    )


def test_the_time_of_a_row_is_limited(tmp_path):
    found = runs.measure_row(ROW, BenchPlan(tmp_path, seconds=0.05))
    assert (
        found["status"]
        and found["failed"] == "stopped after 0.05 s (--seconds)"
        and found["seconds"] < 15
    )


@pytest.mark.parametrize("more", ["", '("done", 4, 0.0)'])
def test_peers_beside_a_row(more, tmp_path, monkeypatch):
    """The best micro-batch counts, also if time or memory end before its longer run."""
    program = f"""import json, sys
        for event, micro, speed in [("tried", 2, 10.0), ("tried", 4, 40.0), {more}]:
            row = dict(event=event, version="1", micro=micro, tokens_per_second=speed)
            print(json.dumps(row), file=open(sys.argv[-1], "a"))"""
    script = tmp_path / "peer.py"
    script.write_text("\n".join(line.removeprefix("        ") for line in program.splitlines()))
    popen = peers.subprocess.Popen
    monkeypatch.setattr(
        peers.subprocess,
        "Popen",
        lambda words, **k: popen([sys.executable, script, words[-1]], **k),
    )
    (tmp_path / "tiny").mkdir()
    row, plan = (
        BenchRow("tiny", "--device cpu", peers=(2, 4)),
        BenchPlan(tmp_path, peers=tuple(peers.PACKAGES), peer_seconds=30),
    )
    (found,) = peers.compare_with_peers(row, plan, {"tokens_per_second": 60.0}, lambda text: None)
    assert found["ratio"] == 1.5 and found["tried"] == {2: 10.0, 4: 40.0}
    assert table.describe_peer(found) == "1.50 x transformers 1 (40 tokens/s, micro-batch 4; 2: 10)"
    found["tried"][8] = 0
    assert table.describe_peer(found).endswith("micro-batch 4; 2: 10; 8: too large)")


@pytest.mark.long  # imports transformers
def test_a_step_of_transformers(tmp_path):
    """The real program, in this process: it learns its four batches by heart."""
    pytest.importorskip("transformers")
    import torch

    from meshwright.apps.bench import programs

    torch.manual_seed(0)
    llama = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
    argv = f"{TINY} --micro-batch-size 1 {llama} --hidden-dropout 0 --attention-dropout 0 --lr 1e-2".split()
    programs.main(
        {"program": "transformers", "flags": argv, "micros": [2, 1], "steps": 12},
        tmp_path / "found",
    )
    *tried, done = map(json.loads, (tmp_path / "found").read_text().splitlines())
    assert [one["micro"] for one in tried] == [2, 1] and done["event"] == "done"
    assert done["losses"][-1] < done["losses"][0] and len(done["losses"]) == 12


def test_memory_that_is_not_enough_is_a_speed_of_zero():
    import torch

    from meshwright.apps.bench.programs import Trial

    def step(tokens):
        raise torch.OutOfMemoryError("out of memory")

    assert Trial(step, 8, 16, torch.device("cpu")).speed(2, 5) == 0


def test_a_step_of_the_plain_program(monkeypatch):
    """It accumulates the flags' micro-batches, and recomputation changes nothing."""
    monkeypatch.setattr(torch, "compile", lambda network, **_: network)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for more in ("2", "4", "2 --checkpoint-activations"):
        dry = "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 4 --micro-batch-size"
        argv = [*TINY_FLAGS, *f"{dry} {more}".split()]
        config = flags.parse_settings(TrainConfig, argv, "bench").config
        torch.manual_seed(0)
        step = programs.plain_gpt(config, 128, torch.device("cpu"))
        losses.append([step(tokens).item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1]) and losses[0] == losses[2]
    assert losses[0][0] > losses[0][-1]
