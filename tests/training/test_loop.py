"""Around the steps of a run: early ends, skipped ranges, checkpoints, resuming and the log."""

import functools
import io
import json
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from helpers import SMALL_FLAGS, flip_bit, open_step, read_rows, write_counting
from meshwright.__main__ import main
from meshwright.apps.plan.part import PlanForecast
from meshwright.base import device
from meshwright.base.device_profiles import DeviceProfile
from meshwright.base.runs import history as report
from meshwright.checkpoint import manifests, native, steps
from meshwright.config import schema
from meshwright.config.fields import spelling
from meshwright.data.files.writer import Writer
from meshwright.training import inflight, loop, validation
from meshwright.training.log import metrics

CHECKPOINTS = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def steps_in(folder):
    return sorted(steps.list_steps(folder))


@pytest.fixture
def after(monkeypatch):
    """after(n, action) calls the action after n steps."""
    real, done = loop.train_step, []

    def set_up(n, action):
        def step(*a):
            out = real(*a)
            done.append(1)
            if len(done) == n:
                action()
            return out

        monkeypatch.setattr(loop, "train_step", step)

    return set_up


# Ends


@pytest.mark.flag("kill_switch_path")
def test_kill_switch(run, after, tmp_path):
    switch, save = tmp_path / "stop", tmp_path / "save"
    after(2, switch.touch)
    got = run("--kill-switch-path", switch, "--save", save)
    assert got.status == 0 and got.column("iteration") == [1, 2] and steps_in(save) == [2]
    assert f"exiting program at iteration 2: kill switch {switch}" in got.out
    assert got.column("reason", "end") == [f"kill switch {switch}"]
    # still there: nothing is trained
    again = run("--kill-switch-file", switch, "--save", save, "--load", save)
    assert again.status == 0 and again.column("iteration") == [] and steps_in(save) == [2]


@pytest.mark.flag("exit_duration_in_mins")
def test_exit_duration_in_mins(run, after, tmp_path, monkeypatch):
    clock, real = [0.0], loop.time.perf_counter
    monkeypatch.setattr("time.perf_counter", lambda: real() + clock[0])
    after(3, lambda: clock.__setitem__(0, 61.0))
    got = run("--exit-duration-in-mins", "1", "--save", tmp_path / "save")
    assert (
        got.status == 0
        and got.column("iteration") == [1, 2, 3]
        and steps_in(tmp_path / "save") == [3]
    )
    assert re.search(
        r"exiting program at iteration 3: 1\.\d+ minutes, more than --exit-duration-in-mins 1\n",
        got.out,
    )


@pytest.mark.flag("exit_interval")
def test_exit_interval_does_not_leave_where_it_began(run, tmp_path):
    save = tmp_path / "save"
    first = run("--exit-interval", 2, "--save", save)
    assert first.status == 0 and first.column("iteration") == [1, 2] and steps_in(save) == [2]
    assert first.column("reason", "end") == ["--exit-interval 2"]
    assert run("--exit-interval", 2, "--save", save, "--load", save).column("iteration") == [3, 4]


@pytest.mark.flag("skip_train")
def test_evaluation_only(run, tmp_path, finished):
    save = tmp_path / "save"
    finished(save)
    losses = [row["loss"] for row in read_rows(save, "validation")]
    before = {p: p.read_bytes() for p in save.rglob("*") if p.is_file()}
    for flag in ("--skip-train", "--eval-only"):
        got = run(flag, "--load", save, "--save", save)
        assert got.status == 0 and got.column("iteration") == [] and "skipping training" in got.out
        assert got.column("loss", "validation") == losses[-2:]
        assert {p: p.read_bytes() for p in save.rglob("*") if p.is_file()} == before


# Skipped iterations


@pytest.mark.flag("skip_train_iteration_range")
def test_skipped_iterations_use_up_their_samples(run, tmp_path, monkeypatch):
    """Iterations 3 and 4 are skipped; 5 sees its own samples; the schedule is two steps behind."""
    flags = (
        "--lr",
        "1e-2",
        "--lr-decay-style",
        "constant",
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
    )
    got = run(*flags, "--skip-train-iteration-range", "3-4", "--save", tmp_path / "s")
    assert got.column("iteration") == [1, 2, 5, 6] and got.column("consumed_samples") == [
        4,
        8,
        20,
        24,
    ]
    assert "Skipped iterations 3 to 4 due to --skip-train-iteration-range flag." in got.out
    state = open_step(tmp_path / "s", 6).state
    assert state["schedule_samples"] == 16 and state["optimizer_steps"] == 4
    assert state["skips"] == [[8, "passed over to 16"]]
    whole = run(*flags)
    assert (
        got.column("loss")[:2] == whole.column("loss")[:2]
        and got.column("loss")[2] != whole.column("loss")[4]
    )
    samples, real = [], loop.train_step

    def noting(net, batches, *rest):
        samples.append([int(i) for b in batches for i in b.sample_ids])
        return real(net, batches, *rest)

    monkeypatch.setattr(loop, "train_step", noting)
    run(*flags, "--skip-train-iteration-range", "1-1", "3-5")
    assert samples == [[4, 5, 6, 7], [20, 21, 22, 23]]


def test_skipping_the_rest_of_the_run(run):
    got = run("--skip-train-iteration-range", "4-100")
    assert (
        got.status == 0
        and got.column("iteration") == [1, 2, 3]
        and got.column("iteration", "skip") == [6]
    )


# Lengths and batches


@pytest.mark.flag("train_samples train_tokens")
@pytest.mark.parametrize("flags", [("--train-samples", "22"), ("--train-tokens", str(22 * 16 + 5))])
def test_length_in_samples(run, flags):
    """22 samples hold five batches of 4; the schedule counts samples."""
    got = run("--train-iters", "none", *flags)
    assert got.status == 0 and got.column("consumed_samples") == [4, 8, 12, 16, 20]
    assert got.column("lr") == pytest.approx([1e-2 * (1 - n / 22) for n in range(0, 20, 4)])
    assert "    train:      22\n" in got.out


@pytest.mark.flag("rampup_batch_size")
def test_rampup_batch_size(run):
    """2, then 3, then 4 samples, each for half of 8 consumed ones."""
    flags = ("--train-iters", "none", "--train-samples", "20", "--micro-batch-size", "1")
    got = run(*flags, "--rampup-batch-size", "2", "1", "8")
    assert got.column("batch") == [2, 2, 3, 3, 4, 4] and got.column("consumed_samples") == [
        2,
        4,
        7,
        10,
        14,
        18,
    ]
    assert (
        "will use batch size rampup starting from global batch size 2 to global batch size 4"
        in got.out
    )
    assert [int(b) for b in re.findall(r"global batch size: +(\d+) \|", got.out)] == got.column(
        "batch"
    )


@pytest.mark.flag("num_accumulation_steps")
def test_accumulation_steps(run):
    by_size = run("--micro-batch-size", 2, "--global-batch-size", 4)
    for size in ("micro", "global"):
        other = ("--micro-batch-size", 2) if size == "global" else ()
        got = run(*other, f"--{size}-batch-size", "none", "--num-accumulation-steps", 2)
        assert got.losses == by_size.losses


# Checkpoints


@pytest.mark.flag("save_at_start")
def test_save_at_start(run, tmp_path):
    save = tmp_path / "save"
    assert run("--save-at-start", "--save", save).status == 0 and steps_in(save) == [0, 6]
    assert open_step(save, 0).state["consumed_train_samples"] == 0
    again = run("--load", save / "iter_0000000", "--save", tmp_path / "other", "--save-init")
    assert again.status == 0 and again.column("loss") == run().column("loss")


@pytest.mark.flag("keep_last keep_every")
@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (("--keep-last", 2), [5, 6]),
        (("--keep-last", 1, "--keep-every", 2), [2, 4, 6]),
        (("--keep-last", 1, "--save-retain-interval", 3), [3, 6]),
    ],
)
def test_keep_last_and_every(run, tmp_path, flags, left):
    save = tmp_path / "save"
    got = run("--save", save, "--save-interval", 1, *flags)
    assert got.status == 0 and steps_in(save) == left
    assert steps.latest(save) == (6, []) and not list(save.glob("*.tmp"))
    assert len(re.findall(r" > removed step \d", got.out)) == 6 - len(left)


@pytest.mark.flag("keep_best")
def test_keep_best(run, tmp_path, monkeypatch):
    """The losses of the validations are made up; the best is at step 2, between two saves."""
    made_up = iter([5.0, 3.0, 4.0, float("nan"), 3.5, 4.5, 4.0, 4.0])
    monkeypatch.setattr(validation, "evaluate", lambda *a: next(made_up))
    save = tmp_path / "save"
    skip = ("--on-nonfinite", "skip:1")
    got = run(
        "--save",
        save,
        "--save-interval",
        3,
        "--eval-interval",
        1,
        "--keep-best",
        "--keep-last",
        1,
        *skip,
    )
    assert got.status == 0 and steps_in(save) == [2, 6]
    assert (save / steps.BEST).read_text() == "2"
    state = open_step(save, 6).state
    assert (state["best_iteration"], state["best_loss"]) == (2, 3.0)
    made_up = iter([3.2, 2.9, 2.9, 2.9])  # a resumed run knows the best before it
    more = "--train-iters 8 --override-opt_param-scheduler --eval-interval 1".split()
    got = run("--save", save, "--load", save, "--keep-best", "--keep-last", 1, *more)
    assert steps_in(save) == [8] and (save / steps.BEST).read_text() == "8"


@pytest.mark.flag("finetune")
def test_finetune_takes_the_weights_alone(run, tmp_path, finished):
    a, b = tmp_path / "a", tmp_path / "b"
    finished(a)
    # with another schedule
    got = run("--finetune", "--load", a, "--save", b, "--lr", "1e-3", "--train-iters", 1)
    assert (
        got.status == 0 and got.column("iteration") == [1] and got.column("consumed_samples") == [4]
    )
    last = run(
        "--load", a, "--save", tmp_path / "c", "--train-iters", 7, "--override-opt_param-scheduler"
    )
    # other samples, trained weights
    assert got.column("loss") != last.column("loss") and got.column("loss")[0] < 4.2
    refused = run("--finetune", "--load", a, "--save", a)
    assert refused.status == 73 and "--finetune starts a new run" in refused.err


def test_a_start_that_may_be_a_new_run_is_refused(run, tmp_path):
    """A shorter length, other data or both: one refusal names both ways out."""
    a, b, first, other = (tmp_path / name for name in ("a", "b", "first", "other"))
    write_counting(first, [60])
    write_counting(other, [58], first=1)

    def start(*argv):
        return run("--no-mock-data", "--split=1", "--eval-iters=0", "--data-path", *argv)

    assert start(first, "--save", a).status == 0
    longer = "--train-iters 9 --lr 1".split()
    for data, more in (
        (first, ()),
        (first, ("--train-iters", 2)),
        (other, longer),
        (other, longer[2:]),
    ):
        for again in ([], ["--dry-run"]):
            refused = start(data, "--load", a, "--save", b, *more, *again)
            assert refused.status == 2 and "to begin anew, add --finetune" in refused.err
            assert ("raise --train-iters" in refused.err) == (more != longer)
            assert ("add --blend-change-at now" in refused.err) == (data == other)
    refused = start(first, "--load", a, "--save", a, "--train-iters", 2)
    assert refused.status == 2 and "raise --train-iters" in refused.err
    blend = start(
        1, first, 1, other, "--load", a, "--save", b, "--train-iters", 8, "--lr-decay-iters", 6
    )
    assert blend.status == 2 and "is new" in blend.err and "--finetune" in blend.err
    tuned = start(other, "--load", a, "--save", b, "--train-iters", 2, "--lr", "1e-3", "--finetune")
    assert tuned.status == 0 and tuned.column("iteration") == [1, 2]
    assert start(first, "--load", a, "--save", a).status == 0  # the same command again


@pytest.mark.flag("no_load_optim")
def test_no_load_optim(run, tmp_path, finished):
    """Step and schedule continue, moments and Adam's t begin at zero."""
    save, flags = tmp_path / "a", ("--train-iters", 8, "--override-opt_param-scheduler")
    finished(save)
    got = run("--load", save, "--no-load-optim", "--save", tmp_path / "b", *flags)
    assert got.status == 0 and got.column("iteration") == [7, 8]
    assert open_step(tmp_path / "b", 8).state["optimizer_steps"] == 2
    whole = run("--load", save, *flags)
    assert (
        got.column("loss")[0] == whole.column("loss")[0]
        and got.column("loss")[1] != whole.column("loss")[1]
    )


@pytest.mark.flag("no_save_optim")
def test_no_save_optim(run, tmp_path):
    save = tmp_path / "a"
    run("--save", save, "--no-save-optim", "--train-iters", 3)
    names = native.read_index(save / "iter_0000003", manifests.verify_step(save / "iter_0000003"))
    assert names and not [n for n in names if "/" in n]
    refused = run("--load", save, "--override-opt_param-scheduler")
    assert refused.status == 65 and "--no-load-optim or --finetune" in refused.err
    assert run("--load", save, "--no-load-optim", "--override-opt_param-scheduler").column(
        "iteration"
    ) == [4, 5, 6]


def test_another_optimizer_is_refused(run, tmp_path):
    rules = ("adam", "sgd", "lion", "muon")
    for rule in rules:
        run("--save", tmp_path / rule, "--train-iters", 3, "--optimizer", rule)
    for saved, chosen in zip(rules, (*rules[1:], rules[0]), strict=True):
        more = ["--dry-run"] * (saved != "sgd")  # a dry run says the same
        refused = run(
            "--load",
            tmp_path / saved,
            "--optimizer",
            chosen,
            "--override-opt_param-scheduler",
            *more,
        )
        assert refused.status == 65 and "another --optimizer" in refused.err, (saved, chosen)


@pytest.mark.flag("use_checkpoint_args")
def test_use_checkpoint_args(run, tmp_path, capsys):
    save = tmp_path / "a"
    run(
        "--save",
        save,
        "--train-iters",
        3,
        "--swiglu",
        "--position-embedding-type",
        "rope",
        "--num-query-groups",
        2,
    )
    rest = "--micro-batch-size=2 --global-batch-size=4 --lr=1e-2 --train-iters=4 --mock-data --eval-iters=0".split()
    rest += [
        "--device=cpu",
        "--use-checkpoint-args",
        "--override-opt_param-scheduler",
        "--load",
        str(save),
    ]
    assert main(["train", *rest, "--run-dir", str(tmp_path / "b")]) == 0
    text = (tmp_path / "b" / "config.toml").read_text()
    assert (
        "swiglu = true" in text
        and "num_query_groups = 2" in text
        and 'position_embedding_type = "rope"' in text
    )
    capsys.readouterr()
    assert (
        main(["train", *rest, "--dry-run"]) == 0
        and "continue from step 3" in capsys.readouterr().out
    )
    assert main(["train", *rest, "--num-layers", "3"]) == 65
    assert "--num-layers 3, the checkpoint has 1" in capsys.readouterr().err
    assert main(["train", *rest[:-1], str(tmp_path / "none")]) == 65


# The log


@pytest.mark.flag("log_params_norm log_num_zeros_in_grad")
def test_num_zeros_and_params_norm(run):
    got = run("--log-num-zeros-in-grad", "--log-params-norm")
    zeros, norms = got.column("num_zeros"), got.column("params_norm")
    assert len(zeros) == 6 and all(z == int(z) and z >= 0 for z in zeros) and len(set(norms)) == 6
    assert [f"{z:.1f}" for z in zeros] == re.findall(r"num zeros: ([\d.]+) \| params norm", got.out)
    assert [f"{n:.3f}" for n in norms] == re.findall(
        r"params norm: ([\d.]+) \| number of skipped", got.out
    )
    assert "num_zeros" not in read_rows(run().folder)[0]


LEVEL_1 = {"forward-backward", "optimizer"}
LEVEL_2 = LEVEL_1 | {"forward-compute", "backward-compute", "batch-generator"}


@pytest.mark.flag("timing_log_level timing_log_option")
@pytest.mark.parametrize(
    ("level", "option", "names", "form"),
    [
        (0, "minmax", set(), ""),
        (1, "minmax", LEVEL_1, r": \([\d.]+, [\d.]+\)"),
        (2, "max", LEVEL_2, r": [\d.]+"),
        (1, "all", LEVEL_1, ":\n     rank  0: [0-9.]+"),
    ],
)
def test_timers(run, level, option, names, form):
    got = run("--timing-log-level", level, "--timing-log-option", option, "--eval-iters", 0)
    after = got.out.split("\ntraining ...")[1]
    found = re.findall(r"    ([a-z-]+) \.+" + form, after)
    assert set(found) == names and len(found) == 6 * len(names)
    title = {"all": "times", "max": "max time"}.get(option, "(min, max) time")
    assert after.count(f"{title} across ranks (ms):") == (6 if names else 0)


@pytest.mark.flag(
    """tensorboard tensorboard_dir tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard
    log_batch_size_to_tensorboard log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard
    log_memory_to_tensorboard log_world_size_to_tensorboard"""
)
def test_tensorboard(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = [
        f"--log-{x}-to-tensorboard"
        for x in ("batch-size", "world-size", "validation-ppl", "timers", "memory")
    ]
    flags += "--no-log-loss-scale-to-tensorboard --timing-log-level=1 --tensorboard-log-interval=2".split()
    got = run(
        "--tensorboard", "--tensorboard-dir", tmp_path / "tb", *flags, "--tensorboard-queue-size=3"
    )
    found = EventAccumulator(str(tmp_path / "tb")).Reload()
    names = {
        "lm loss",
        "lm loss validation",
        "lm loss validation ppl",
        "lm loss test",
        "lm loss test ppl",
    }
    names |= set("grad-norm learning-rate batch-size world-size".split())
    assert set(found.Tags()["scalars"]) == names | {
        "iteration-time",
        "forward-backward-time",
        "optimizer-time",
    }
    points = {e.step: e.value for e in found.Scalars("lm loss")}
    assert points == pytest.approx(
        {i: x for i, x in enumerate(got.column("loss"), 1) if i % 2 == 0}
    )
    run("--tensorboard")  # without a folder of its own: beside the run
    assert list((tmp_path / "run1" / "tensorboard").glob("events*"))


SMI = """#!/bin/sh
[ "$1 $2" = "--query-gpu=$FIELDS --format=csv" ] || exit 9
printf 'timestamp, name, memory.used [MiB]\n2026/11/22 15:00:00.123, NVIDIA H200, 1234 MiB\n'
"""


def fake_smi(folder, monkeypatch, script):
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(script.replace("$FIELDS", metrics.GPU_FIELDS))
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.flag("steps_per_print")
def test_deepspeeds_lines(run, tmp_path):
    """Every --steps-per-print steps, with the speed of the steps since the line before."""
    small = "--num-layers 1 --eval-iters 0 --train-iters 7 --log-interval 100".split()
    out = run(*small, "--steps-per-print", 3).out
    found = re.findall(
        r"^steps: (\d+) loss: (\d\.\d{4}) iter time \(s\): (\d+\.\d{3}) samples/sec: (\S+)$",
        out,
        re.M,
    )
    rows = [
        json.loads(line) for line in (tmp_path / "run0" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if row["event"] == "step"]
    assert [int(number) for number, *_ in found] == [3, 6]
    for number, loss, seconds, speed in found:
        last = steps[int(number) - 3 : int(number)]
        spent = sum(row["ms"] for row in last) / 1e3
        assert float(loss) == pytest.approx(last[-1]["loss"], abs=1e-4)
        assert float(seconds) == pytest.approx(spent / 3, abs=1e-3)
        # of rounded times
        assert float(speed) == pytest.approx(sum(row["batch"] for row in last) / spent, rel=1e-3)
    assert "samples/sec" not in run(*small).out


@pytest.mark.flag("nvidia_smi_at")
def test_nvidia_smi(run, tmp_path, monkeypatch, capsys):
    """Its lines follow the iteration's own, in the log too; without it one line says so once."""
    fake_smi(tmp_path / "bin", monkeypatch, f"{SMI}sleep 0.5\n")
    small = "--num-layers 1 --eval-iters 0 --train-iters 3 --log-interval 1".split()
    got = run(*small, "--nvidia-smi-at", 2)
    assert got.column("ms")[2] < 500  # it counts in no step's time
    lines = got.out.splitlines()
    at = lines.index("2026/11/22 15:00:00.123, NVIDIA H200, 1234 MiB")
    assert lines[at - 1].startswith("timestamp, name") and lines[at - 2].startswith(
        " iteration        2/"
    )
    assert lines[at] in (tmp_path / "run0" / "log.txt").read_text().splitlines()
    monkeypatch.setenv("PATH", str(tmp_path))
    got = run(*small, "--nvidia-smi-at", 1, 2, 9)
    assert got.out.count("there is no nvidia-smi here") == 1
    assert "--nvidia-smi-at 9: after the last step" in got.err


def test_nvidia_smi_of_other_machines(tmp_path, monkeypatch, capsys):
    """A machine's first rank prints; a failure, and one that hangs, are reported in one line."""
    mine = object.__new__(metrics.Metrics)
    mine.is_rank_0, mine.gpus_are_hidden, mine.config = False, False, schema.TrainConfig()
    fake_smi(tmp_path / "bin", monkeypatch, SMI)
    for is_first in (False, True):
        mine.is_first_of_machine = is_first
        mine.print_gpus()
    assert capsys.readouterr().out.count("1234 MiB\n") == 1
    monkeypatch.setattr(device, "SMI_SECONDS", 0.2)
    for script, why in (
        (
            "echo 'Driver/library version mismatch'; exit 18",
            "with status 18: Driver/library version mismatch",
        ),
        ("sleep 30", "no answer in 0.2 s"),
    ):
        mine.gpus_are_hidden = False
        fake_smi(tmp_path / "bin", monkeypatch, f"#!/bin/sh\n{script}\n")
        mine.print_gpus()
        mine.print_gpus()
        out = capsys.readouterr().out
        assert out.count("\n") == 1 and why in out


# Resuming


def bend(folder):
    """Damage a chunk of the weights, so that the manifest and the sizes still hold."""
    path = folder / "rank_00000.safetensors"
    flip_bit(path, 8 * path.stat().st_size - 1)


def test_keep_last_after_falling_back(run, tmp_path):
    """The newest step is damaged where only a full read notices; the one resumed from is kept."""
    save = tmp_path / "save"
    run("--save", save, "--save-interval", 2)
    bend(save / "iter_0000006")
    got = run("--save", save, "--load", save, "--keep-last", 2, "--exit-interval", 5)
    assert got.status == 0 and "skipping iter_0000006" in got.out and steps_in(save) == [4, 5, 6]
    got = run("--save", save, "--load", save, "--keep-last", 1)
    assert (
        got.column("iteration") == [6]
        and steps_in(save) == [6]
        and (save / "iter_0000006.damaged").is_dir()
    )


def config_of(folder):
    return tomllib.loads((folder / "config.toml").read_text())


def test_the_saved_settings_continue_the_run(tmp_path, capsys):
    """config.toml does not hold the flags that were for one start only."""
    a, b = tmp_path / "a", tmp_path / "b"
    train = ["train", *SMALL_FLAGS, "--save-interval", "2"]
    assert main([*train, "--save", str(a)]) == 0
    assert config_of(a)["checkpoint"]["load"] == str(a)
    kept = (a / "config.toml").read_text()
    assert main(["train", "--config", str(a / "config.toml"), "--eval-only"]) == 0
    assert (a / "config.toml").read_text() == kept
    assert main([*train, "--save", str(a), "--save-overwrite", "--exit-interval", "4"]) == 0
    for _ in range(2):
        assert main(["train", "--config", str(a / "config.toml"), "--exit-interval", "none"]) == 0
    assert steps_in(a) == [2, 4, 6] and len(list(a.glob("replaced-*"))) == 1
    tuned = [
        "--finetune",
        "--load",
        str(a),
        "--save",
        str(b),
        "--exit-interval",
        "3",
        "--local-rank",
        "0",
    ]
    assert main([*train, *tuned]) == 0
    capsys.readouterr()
    assert "local_rank" not in config_of(b)["parallel"]
    assert main(["train", "--config", str(b / "config.toml"), "--exit-interval", "none"]) == 0
    assert "at iteration 3\n" in capsys.readouterr().out and steps_in(b) == [2, 3, 4, 6]


def test_an_overridden_schedule_is_for_one_start(run, tmp_path):
    """The next start that changes the rate is asked about it again."""
    a = tmp_path / "a"
    assert run("--save", a, "--run-dir", a, "--exit-interval", 2).status == 0
    assert (
        run("--load", a, "--save", a, "--run-dir", a, "--lr=2e-2", "--override-lr-scheduler").status
        == 0
    )
    again = [
        "train",
        "--config",
        str(a / "config.toml"),
        "--train-iters=7",
        "--lr-decay-iters=6",
        "--dry-run",
    ]
    assert main(again) == 0
    assert main([*again, "--lr=0.5"]) == 2
    written = {name: value for group in config_of(a).values() for name, value in group.items()}
    once = {*schema.flags_with(schema.TrainConfig, "once", True)} - {"local_rank"}  # a launcher's
    for name in once:
        assert (
            written[name] in (False, "refuse", "plain")
            and f"`{spelling(name)}`" in CHECKPOINTS.read_text()
        )


@pytest.mark.fault("F4")
def test_a_finetune_killed_before_its_first_save_does_not_start_from_random_weights(
    run, tmp_path, finished
):
    a, b = tmp_path / "a", tmp_path / "b"
    finished(a)
    run("--finetune", "--load", a, "--save", b, "--run-dir", b)
    for step in b.glob("[il]*t*_*"):
        shutil.rmtree(step) if step.is_dir() else step.unlink()
    assert main(["train", "--config", str(b / "config.toml")]) == 65


@pytest.mark.fault("F2")
def test_a_kill_before_the_tracker_of_the_last_step(run, tmp_path):
    """The same command again writes the tracker."""
    save = tmp_path / "save"
    run("--save", save, "--load", save)
    (save / steps.TRACKER).write_text("3")
    got = run("--save", save, "--load", save)
    assert got.status == 0 and (save / steps.TRACKER).read_text() == "6"
    assert "  successfully saved checkpoint at iteration       6 to" in got.out


def test_a_longer_context_begins_from_the_same_weights(run, tmp_path):
    a = tmp_path / "a"
    rope = ("--position-embedding-type", "rope")
    run("--save", a, *rope)
    more = "--rotary-base 500000 --norm-epsilon 1e-6".split()
    got = run("--finetune", "--load", a, "--save", tmp_path / "b", *rope, *more)
    assert (
        got.status == 0
        and "note: rotary_base is 500000.0, the checkpoint was trained with 10000.0" in got.out
    )
    assert "note: layernorm_epsilon is 1e-06" in got.out
    yarn = "--rope-scaling yarn --original-max-position-embeddings 16".split()
    got = run("--finetune", "--load", a, "--save", tmp_path / "c", *rope, *yarn)
    assert (
        got.status == 0
        and "note: rope_scaling is yarn, the checkpoint was trained with none" in got.out
    )
    for flags in (("--rotary-base", 500000), yarn):
        refused = run("--load", a, *rope, *flags)
        assert refused.status == 65 and " ".join(map(str, flags[:2])) in refused.err
    refused = run("--load", tmp_path / "c", "--rope-scaling", "none")
    assert refused.status == 65 and "--rope-scaling none, the checkpoint has yarn" in refused.err
    refused = run("--finetune", "--load", a, *rope, "--hidden-size", 64)
    assert refused.status == 65


def token_files(tmp_path):
    with Writer(tmp_path / "data", np.uint16) as writer:
        for n in range(20):
            writer.add(np.arange(n, n + 30) % 60)
            writer.end_document()
    return ("--no-mock-data", "--data-path", tmp_path / "data", "--split", "80,20,0")


def test_more_epochs_are_another_order(run, tmp_path):
    """480 tokens are 29 samples per epoch; 24 are needed at first, then 28, then 32."""
    save, data = tmp_path / "save", token_files(tmp_path)
    more = (*data, "--save", save, "--load", save, "--lr-decay-iters", 6)
    run(*more)
    assert open_step(save, 6).state["epochs"] == [[1, False]]
    assert "epoch" not in "".join(
        line for line in run(*more, "--train-iters", 7).out.splitlines() if "note:" in line
    )
    got = run(*more, "--train-iters", 8)
    now, before = (
        "now 2 epochs, the last one shuffled separately",
        "at the checkpoint it was 1 epoch:",
    )
    assert f"note: the training set is {now}; {before}" in got.out
    assert open_step(save, 8).state["epochs"] == [[2, True]]


def test_a_folder_whose_name_is_not_utf8(tmp_path, monkeypatch):
    """With a standard output that is strict UTF-8, as in most terminals."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    )
    assert main(["train", *SMALL_FLAGS, "--save", folder, "--load", folder, "--tensorboard"]) == 0
    assert "caf\\udce9" in sys.stdout.buffer.getvalue().decode()
    assert "caf\udce9" in report.read_settings(Path(folder))["checkpoint"]["save"]
    assert (Path(folder) / "iter_0000006").is_dir()


# Combinations


@pytest.mark.parametrize(("flags", "status"), [((), 70), (("--on-nonfinite", "skip:1"), 0)])
def test_a_validation_that_is_not_finite(run, tmp_path, monkeypatch, flags, status):
    made_up = iter([float("nan")] + [4.0] * 4)
    monkeypatch.setattr(validation, "evaluate", lambda *a: next(made_up))
    save = tmp_path / "save"
    got = run("--save", save, "--save-interval", 1, *flags)
    assert got.status == status and steps_in(save) == ([1, 2] if status else [1, 2, 3, 4, 5, 6])
    assert ("the loss on the valid set is nan" in got.err) == bool(status)
    if not status:
        assert open_step(save, 6).state["best_loss"] == 4.0


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim", "--skip-train"])
@pytest.mark.fault("F11")
def test_a_missing_checkpoint_is_refused_where_one_is_needed(run, tmp_path, flag):
    refused = run("--load", tmp_path / "typo", flag)
    assert refused.status == 65 and f"but {flag} needs one" in refused.err and "no " in refused.err


def test_settings_of_a_checkpoint_that_is_not_there_yet(run, tmp_path):
    """The first start of a command with --use-checkpoint-args takes the settings that it gives."""
    folder = tmp_path / "save"
    first = run("--save", folder, "--load", folder, "--use-checkpoint-args")
    assert first.status == 0 and "could not find the metadata file" in first.out


def test_all_tokens_masked(run, monkeypatch):
    from meshwright.data import loader

    real = loader.Batch.__post_init__

    def masked(self):
        real(self)
        object.__setattr__(self, "unmasked", 0)

    monkeypatch.setattr(loader.Batch, "__post_init__", masked)
    got = run()
    assert (
        got.status == 65
        and "every token is masked in the global batch that starts at sample 0;" in got.err
    )


def test_a_step_of_minutes_is_announced(monkeypatch, capsys):
    monkeypatch.setattr("meshwright.base.host.cores", lambda: 2)
    monkeypatch.setattr(DeviceProfile, "flops", lambda *_: 6e10)
    forecast = PlanForecast()
    assert forecast.describe_long_step(3e12) is None
    assert "a step is 7 TFLOP, about 2 minutes on these 2 CPU cores" in forecast.describe_long_step(
        7.2e12
    )
    monkeypatch.setattr(DeviceProfile, "flops", lambda *_: 1.0)
    assert main(["train", *SMALL_FLAGS, "--train-iters", "1"]) == 0
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("WARNING: a step is 0 TFLOP, about ") == 1


# A log written while the device computes the next step


def test_the_log_of_a_device_that_computes_by_itself(run, monkeypatch, tmp_path):
    """The same lines and rows in the same order, whatever comes between the steps."""
    flags = (
        "--eval-interval 2 --save-interval 3 --exit-interval 7 --log-interval 1 --train-iters 9"
    ).split()
    flags += ["--skip-train-iteration-range", "5-5"]

    def record(folder):
        got = run(*flags, "--save", tmp_path / folder)
        events = [
            json.loads(line) for line in (got.folder / "metrics.jsonl").read_text().splitlines()
        ]
        kept = [
            (e["event"], e["iteration"], e.get("loss"), e.get("consumed_samples")) for e in events
        ]
        heads = [re.split(r"\d|/", line.strip())[0] for line in got.out.splitlines()]
        return kept, [
            head
            for head in heads
            if head.startswith(("iteration", "validation", "saving", "Skipped"))
        ]

    at_once = record("a")
    written = []
    real = inflight.InFlight.write_log
    monkeypatch.setattr(
        inflight.InFlight, "write_log", lambda t: (written.append(t.unwritten is None), real(t))
    )
    monkeypatch.setattr(device, "is_asynchronous", lambda d: True)
    assert record("b") == at_once
    assert [event for event, *_ in at_once[0]].count("step") == 6 and written.count(False) == 6


class SlowDevice:
    """A device whose steps take 2 s, of which the host waits 1.7 s to submit each.

    So it reads a step's numbers 1.7 s after their end, unless no further step was submitted.
    """

    def __init__(self, monkeypatch):
        self.host, self.free_at, real = 0.0, 0.0, device.start_read
        monkeypatch.setattr(device, "is_asynchronous", lambda d: True)
        monkeypatch.setattr(loop, "train_step", functools.partial(self.submit, loop.train_step))
        monkeypatch.setattr(validation, "evaluate", self.validate)
        monkeypatch.setattr(
            device, "start_read", lambda x: functools.partial(self.wait, self.free_at, real(x))
        )
        monkeypatch.setattr(device, "mark", lambda d: max(self.host, self.free_at))
        monkeypatch.setattr("time.perf_counter", lambda: self.host)

    def submit(self, take_step, *a):
        self.free_at = max(self.host, self.free_at) + 2.0
        self.host += 1.7
        return take_step(*a)

    def wait(self, end, read):
        self.host = max(self.host, end)
        return read()

    def validate(self, *a):
        self.host += 5.0
        return 1.0


def test_the_time_of_each_step_is_that_between_ends_on_the_device(run, monkeypatch):
    """Also of the last step, and of those before and after a validation and a save."""
    SlowDevice(monkeypatch)
    flags = (
        "--train-iters",
        7,
        "--eval-interval",
        3,
        "--eval-iters",
        1,
        "--save-interval",
        5,
        "--log-interval",
        1,
    )
    got = run(*flags)
    assert got.status == 0 and got.column("ms") == [2000.0] * 7
    assert re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", got.out) == ["2000.0"] * 7


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_is_not_finite_when_the_next_has_begun(run, monkeypatch, tmp_path, ahead):
    """The counters and the error are those of the bad step; later submissions are forgotten."""
    real, taken = loop.train_step, []

    def third_is_bad(*a):
        update = real(*a)
        taken.append(1)
        return update * float("nan") if len(taken) == 3 else update

    monkeypatch.setattr(loop, "train_step", third_is_bad)
    monkeypatch.setattr(device, "is_asynchronous", lambda d: ahead)
    got = run(
        "--save", tmp_path / "save", "--save-interval", 2, "--train-iters", 6, "--eval-interval", 9
    )
    assert got.status == 70 and len(taken) == 3 + ahead and steps_in(tmp_path / "save") == [2]
    assert got.column("iteration") == [1, 2, 3] and got.column("iteration", "end") == [3]
    assert "iteration 3 (samples up to 12): the loss is nan" in got.err


def test_a_data_error_after_a_submitted_step_logs_the_step(run, monkeypatch):
    real, batches = loop.Trainer.next_batch, []

    def third_fails(trainer):
        batches.append(1)
        if len(batches) == 3:
            raise OSError("the disk is gone")
        return real(trainer)

    monkeypatch.setattr(loop.Trainer, "next_batch", third_fails)
    monkeypatch.setattr(device, "is_asynchronous", lambda d: True)
    got = run()
    assert got.status and got.column("iteration") == [1, 2] and "the disk is gone" in got.err


@pytest.mark.flag("step_batch_size_schedule")
def test_step_batch_size_schedule(run):
    """2 samples until 64 tokens of 16 a sample are read, 3 until 0.16 K, then 4."""
    flags = (
        "--train-iters",
        "none",
        "--train-samples",
        "20",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "none",
    )
    got = run(*flags, "--step-batch-size-schedule", "0:2 64:3,0.16K:4")
    assert got.column("batch") == [2, 2, 3, 3, 4, 4] and got.column("consumed_samples") == [
        2,
        4,
        7,
        10,
        14,
        18,
    ]
    assert (
        "will use the global batch sizes 2 from 0 samples on, 3 from 4 samples on, 4 from 10 samples on."
        in got.out
    )
