"""Steps that are not finite: the way back to a checkpoint, and what names the fault."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from helpers import TINY_FLAGS, TinyRun, flip_bit, open_step, read_rows
from meshwright.base.runs.history import read_history
from meshwright.checkpoint import steps
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.training import loop, micro_step
from meshwright.training.health import guard
from meshwright.training.hooks.saving import Saving
from meshwright.training.state.state import SPIKE_WINDOW
from on_ranks import environments, run_programs

pytestmark = pytest.mark.whole  # seconds, not moments

BASE = "--eval-iters 0 --train-iters 9 --lr-decay-style constant --lr-decay-iters 9".split()


@pytest.fixture
def spoiling(monkeypatch):
    """Return spoiling(samples, by): multiply the loss of batches that begin with one of these."""
    real = micro_step.loss_sum
    bad: dict[int, float] = {}
    seen: list[int] = []

    def forward(net, part, batch, *rest):
        seen.append(batch.first_sample)
        return real_forward(net, part, batch, *rest)

    real_forward = micro_step.forward_part
    monkeypatch.setattr(micro_step, "forward_part", forward)
    monkeypatch.setattr(micro_step, "loss_sum", lambda *a: real(*a) * bad.get(seen[-1], 1))
    return lambda *samples, by=math.nan: (bad.clear(), bad.update(dict.fromkeys(samples, by)))


def saving(folder, every=2):
    return "--save", folder, "--save-interval", every


@pytest.mark.fault("F20")
def test_rollback(run, spoiling, tmp_path):
    """Step 6 is bad: the weights of step 4 go on with the samples after it."""
    save = tmp_path / "a"
    spoiling(20)
    got = run(*BASE, "--on-nonfinite", "rollback:1", *saving(save))
    assert got.status == 0 and got.column("iteration") == list(range(1, 10))
    assert got.column("skipped") == [i == 6 for i in range(1, 10)]
    [row] = read_rows(got.folder, "rollback")
    assert (
        row["iteration"],
        row["to"],
        row["from_sample"],
        row["to_sample"],
        row["rollbacks"],
    ) == (6, 4, 16, 24, 1)
    assert (
        "rolled back to step 4, passing over iterations 5 to 6 and their samples 16 to 24: rollback 1 of 1"
        in got.out
    )
    assert [s.iteration for s in read_history(got.folder).steps] == [1, 2, 3, 4, 7, 8, 9]
    state = open_step(save, 9).state
    assert state["skips"] == [[16, "rolled back, passed over to 24"]] and state["rollbacks"] == 0
    assert (
        state["schedule_samples"] == 28 == 4 * state["optimizer_steps"]
        and state["consumed_train_samples"] == 36
    )
    # The same as a run that was never there: it passes over iterations 5 and 6.
    spoiling()
    want = run(*BASE, "--skip-train-iteration-range", "5-6")
    assert got.losses[6:] == want.losses[4:] and got.losses[:4] == want.losses[:4]
    # Killed after the rollback: what it saved keeps the decision, though nothing is bad any more.
    for n in (8, 9):
        (steps.step_folder(save, n) / "index.json").unlink()
    assert open_step(save, 6).state["rollbacks"] == 1
    again = run(*BASE, "--load", save)
    assert again.column("iteration") == [7, 8, 9] and again.losses == got.losses[6:]


def test_rollbacks_are_counted_until_there_is_a_further_checkpoint(run, spoiling, tmp_path):
    spoiling(12, 16, 20)  # iterations 4, 5, 6: each goes back to the weights of step 3
    got = run(*BASE, "--on-nonfinite", "rollback:2", *saving(tmp_path / "a", 3))
    assert (
        got.status == 70
        and got.column("to", "rollback") == [3, 4]
        and got.column("iteration")[-1] == 6
    )
    assert (
        "gone back 2 times without saving a checkpoint of further steps (--on-nonfinite rollback:2)"
        in got.err
    )
    # the count is kept
    resumed = run(*BASE, "--on-nonfinite", "rollback:2", "--load", tmp_path / "a")
    assert resumed.status == 2 and "give --save" in resumed.err
    resumed = run(
        *BASE, "--on-nonfinite", "rollback:2", "--load", tmp_path / "a", *saving(tmp_path / "a", 3)
    )
    assert resumed.status == 70 and resumed.column("iteration") == [6]
    spoiling(12, 20)  # after iteration 5 a further step is saved at 6 ... but that one is bad again
    got = run(*BASE, "--on-nonfinite", "rollback:1", *saving(tmp_path / "b", 1))
    assert got.status == 0 and got.column("to", "rollback") == [3, 5]


@pytest.mark.fault("F20")
def test_rollback_without_a_checkpoint(run, spoiling, tmp_path):
    spoiling(4)
    got = run(*BASE, "--on-nonfinite", "rollback:3", *saving(tmp_path / "a", 5))
    assert (
        got.status == 70
        and "holds no checkpoint yet (--save-interval is 5; --save-at-start" in got.err
    )
    assert "are unchanged" not in got.err  # of checkpoints there
    got = run(*BASE, "--on-nonfinite", "rollback:3", "--save-at-start", *saving(tmp_path / "b", 5))
    assert got.status == 0 and got.column("to", "rollback") == [0]


@pytest.mark.fault("F20")
def test_rollback_passes_over_a_damaged_checkpoint(run, spoiling, tmp_path, monkeypatch):
    """It waits for a save in flight, and takes an older step if the newest one is damaged."""
    spoiling(20)
    save, real = tmp_path / "a", Saving.run

    def damage(self, step):
        real(self, step)
        if step == 4:
            self.state.saver.wait()
            flip_bit(next(steps.step_folder(save, 4).glob("*.safetensors")), 4000)

    monkeypatch.setattr(Saving, "run", damage)
    got = run(*BASE, "--on-nonfinite", "rollback:1", "--async-save", *saving(save))
    assert got.status == 0 and got.column("to", "rollback") == [2]
    assert open_step(save, 9).state["skips"] == [[8, "rolled back, passed over to 24"]]


SPIKE = (*BASE, "--train-iters", "14")


@pytest.fixture
def judge_after(monkeypatch):
    """judge_after(n) judges a loss by the n losses before it, which a short run has."""
    window = "meshwright.training.state.state.SPIKE_WINDOW"
    return lambda count: monkeypatch.setattr(window, count)


@pytest.mark.flag("on_spike")
@pytest.mark.fault("F20")
def test_a_spike(run, spoiling, judge_after, tmp_path):
    """Step 11 spikes, and 12 too; by default that is one warning, and no other number changes."""
    judge_after(8)
    spoiling(40, 42, 44, 46, by=3.0)
    got, off = run(*SPIKE), run(*SPIKE, "--on-spike", "off")
    assert got.losses == off.losses and got.out.count("WARNING") == 1 and "WARNING" not in off.out
    assert (
        "WARNING: iteration 11 (samples up to 44): the loss 12." in got.out
        and "median of the 8 before" in got.out
    )
    [row] = read_rows(got.folder, "spike")
    assert row["iteration"] == 11 and (row["loss"] - row["median"]) / row["deviation"] > 10
    stopped = run(*SPIKE, "--on-spike", "stop", *saving(tmp_path / "a"))
    assert (
        stopped.status == 70
        and stopped.losses == got.losses[:11]
        and "(--on-spike stop); the checkpoi" in stopped.err
    )
    assert max(steps.list_steps(tmp_path / "a")) == 10
    back = run(*SPIKE, "--on-spike", "rollback:2", *saving(tmp_path / "b", 4))
    assert back.status == 0 and back.column("to", "rollback") == [8, 11]  # to one set of weights
    assert back.column("from_sample", "rollback") == [32, 44] and back.column(
        "to_sample", "rollback"
    ) == [44, 48]
    assert len(open_step(tmp_path / "b", 14).state["losses"]) == 8
    spoiling()
    for n in (12, 14):
        (steps.step_folder(tmp_path / "b", n) / "index.json").unlink()
    resumed = run(
        *SPIKE, "--on-spike", "rollback:2", "--load", tmp_path / "b", "--save", tmp_path / "b"
    )
    assert resumed.column("iteration") == [12, 13, 14]


@pytest.mark.flag("spike_factor")
def test_what_is_a_spike(run, spoiling, judge_after):
    """Their median deviation counts, so one loss that stands out does not hide the next."""
    losses = [2.0 + 0.01 * (-1) ** i for i in range(7)] + [50.0]
    middle, deviation = guard.spread(losses)
    assert middle == 2.01 and deviation == pytest.approx(1.4826 * 0.01, rel=1.0)
    assert guard.spread([3.0] * 8) == (3.0, 3e-3)
    spoiling(40, by=1.05)
    judge_after(8)
    assert run(*SPIKE, "--spike-factor", "0.1").out.count("the loss") > 0
    assert run(*SPIKE, "--spike-factor", "1000").out.count("the loss") == 0
    # too few
    judge_after(14)
    assert run(*SPIKE, "--spike-factor", "0.001").out.count("the loss") == 0
    refused = run(*SPIKE, "--on-spike", "skip:1")
    assert "neither off, warn, stop nor roll" in refused.err


@pytest.mark.parametrize(("window", "notices"), [(SPIKE_WINDOW, 0), (64, 1)])
def test_a_saved_window_for_spikes(tmp_path, window, notices):
    """Earlier releases had a setting for it, which the config.toml of each of their runs states."""
    config = tmp_path / "config.toml"
    config.write_text(f"[training]\nspike_window = {window}\n")
    parsed = flags.parse_settings(TrainConfig, ["--config", str(config)], "train", check=False)
    said = f"spike_window = {window} in {config} was removed; it is always {SPIKE_WINDOW}"
    assert parsed.notices.count(said) == notices


def test_the_first_line_of_a_recovery(run, tmp_path, monkeypatch):
    """It says what was found, passed over and verified, and what is done again."""
    save, folder = tmp_path / "a", tmp_path / "run"
    saved = (*BASE, "--save", save, "--save-interval", 2, "--run-dir", folder)
    real = loop.Trainer.step

    def die(self):
        if self.progress.iteration == 7:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(loop.Trainer, "step", die)
    assert run(*saved).status == 130
    rows = [
        line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"end"' not in line
    ]
    # killed, so nothing says how it ended
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    flip_bit(next(steps.step_folder(save, 6).glob("*.safetensors")), 4000)
    (save / "iter_0000008.tmp").mkdir()
    monkeypatch.setattr(loop.Trainer, "step", real)
    got = run(*saved, "--load", save)
    [line] = [line for line in got.out.splitlines() if line.startswith(" > found steps")]
    start, damage, left, verified, end = line.split("; ")
    assert (
        start == f" > found steps 6, 4, 2 in {save}"
        and left == "iter_0000008.tmp was never finished"
    )
    assert (
        damage.startswith("6: skipped, damaged (")
        and "rank_00000.safetensors: bytes 0 to" in damage
    )
    assert verified.startswith("4: verified (4 files, 0.2 MB, ") and verified.endswith(" s)")
    assert (
        end
        == "resuming at step 4, redoing 3 steps since: the attempt before was killed after step 7"
    )
    again = run(
        *saved,
        "--load",
        save,
        "--train-iters",
        "10",
        "--override-opt_param-scheduler",
        "--verify",
        "full",
    )
    assert "; 9: verified in full (" in again.out and "; resuming at step 9\n" in again.out


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "layout", ["--zero-stage=1", "--zero-stage=3", "--pipeline-model-parallel-size=2"]
)
def test_rollback_on_ranks(tmp_path, capsys, layout):
    """Only the samples of one rank are bad; all go back, and on as one process would."""
    script = Path(__file__).with_name("spoilt_run.py")
    environ = [each | {"SPOILT": "22"} for each in environments(2)]
    exact = ("--params-dtype=float64", "--attention-dropout=0")
    flags = (*TINY_FLAGS, *BASE, *exact, layout, "--on-nonfinite=rollback:1", *saving("a"))
    statuses, outputs = run_programs(script, [[str(x) for x in flags]] * 2, environ, tmp_path)
    assert statuses == [0, 0], outputs
    [row] = read_rows(tmp_path / "a", "rollback")
    assert (row["iteration"], row["to"]) == (6, 4) and "on rank 1 (" in row["reason"]
    want = TinyRun(tmp_path / "want", capsys, *BASE, *exact, "--skip-train-iteration-range", "5-6")
    got = [x["loss"] for x in read_rows(tmp_path / "a") if x["iteration"] > 6]
    assert got == pytest.approx(want.losses[4:], rel=1e-9)
