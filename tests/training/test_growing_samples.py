"""Runs with --seq-length-schedule: what they read, what they log, and how they go on."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from graphs_on_cpu import Recorder, stand_in
from helpers import SMALL_FLAGS, TINY_FLAGS, TinyRun, open_step, printed_losses, read_rows
from meshwright.__main__ import main
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig
from meshwright.data.loader import DocumentEnds, Loader, LoaderSpec, Mock
from meshwright.model import counts
from meshwright.runtime.ranks.team import ALONE
from meshwright.training.log.lines import Interval, RunSizes
from meshwright.training.log.metrics import Metrics
from meshwright.training.log.timers import Timers
from meshwright.training.setup import sizes_of_run
from meshwright.training.state.state import Progress, State

LENGTHS = "--seq-length-schedule=0:4 2:8 4:16"
Run = Callable[..., TinyRun]


def test_a_step_reads_the_beginnings_of_its_samples() -> None:
    ends = DocumentEnds(5, mask_loss=True, reset_positions=True, reset_attention=True)
    data = Mock(9, 40, 16, seed=2)

    def batches(length_at: Callable[[int], int | None], **more: Any) -> Any:
        spec = LoaderSpec(2, lambda _: 4, 9, document_ends=ends, length_at=length_at, **more)
        return iter(Loader(data, spec, 8, iteration=2))

    whole, short = batches(lambda _: None), batches({3: 5, 4: 9, 5: 17}.get)
    # A context rank's columns are those of what is read.
    half = batches({3: 5, 4: 9, 5: 17}.get, columns=lambda n: slice(n // 2, n))
    for length in (4, 8, 16):
        for all_of_it, a, b in zip(next(whole), next(short), next(half), strict=True):
            assert a.sample_ids.equal(all_of_it.sample_ids)
            for name in ("tokens", "labels", "loss_mask", "position_ids", "doc_ids"):
                cut = getattr(all_of_it, name)[:, :length]
                assert getattr(a, name).equal(cut), name
                if name != "doc_ids":  # attention needs those of all columns
                    assert getattr(b, name).equal(cut[:, length // 2 :]), name
            assert a.unmasked == b.unmasked == int(a.loss_mask.sum())


@pytest.mark.flag("seq_length_schedule")
def test_the_length_of_each_step_is_logged(run: Run) -> None:
    got = run(LENGTHS, "--train-iters", 6)
    assert got.status == 0 and got.column("length") == [4, 4, 8, 8, 16, 16]
    lengths = re.findall(r"curriculum seqlen: +(\d+) \|", got.out)
    assert lengths == ["4", "4", "8", "8", "16", "16"]
    for length, ms, speed in zip(
        got.column("length"), got.column("ms"), got.column("tokens_per_second"), strict=True
    ):
        assert speed == pytest.approx(4 * length / ms * 1e3, rel=1e-3)
    # Validations read whole samples, in a run without a schedule too.
    whole = run("--train-iters", 6)
    assert "length" not in read_rows(whole.folder)[0]
    positions = [row["by_position"].keys() for row in read_rows(got.folder, "validation")]
    assert positions == [row["by_position"].keys() for row in read_rows(whole.folder, "validation")]
    assert got.losses[4:] != whole.losses[4:]  # the weights are others


def test_tokens_and_operations_of_an_interval() -> None:
    sizes = RunSizes(
        9, None, 16, 4, 2, flops_per_token=100.0, peak=None, shorter={4: 40.0, 8: 60.0}
    )
    steps = [{"batch": 4, "length": n} for n in (4, 8, 16)]
    interval = Interval(sizes, 3, 12, 1e-3, steps, seconds=2.0, memory=None)
    assert interval.tokens_per_second == 4 * (4 + 8 + 16) / 2
    assert interval.flops == 4 * (4 * 40 + 8 * 60 + 16 * 100) / 2 / 2


def test_the_time_left_is_that_of_samples_of_the_last_length() -> None:
    """That may be below --seq-length: samples then stay shorter."""
    argv = [*TINY_FLAGS, "--seq-length-schedule=0:4 4:8"]
    config = parse_settings(TrainConfig, argv, "meshwright train", check=False).config
    state: Any = types.SimpleNamespace(
        recorded=config,
        config=config,
        padded=64,
        total_steps=lambda: 10,
        team=types.SimpleNamespace(size=1),
        net=types.SimpleNamespace(device=torch.device("cpu")),
        progress=types.SimpleNamespace(iteration=0, consumed_train_samples=0),
    )
    sizes = sizes_of_run(state)
    for length, longer in ((4, 2), (8, 1)):
        # Of 10 steps of 4 samples, 8 are done, the last of them in a second.
        steps = [{"batch": 4, "length": length}]
        interval = Interval(sizes, 8, 32, 1e-3, steps, seconds=1.0, memory=None)
        assert interval.seconds_left == 2 * longer
        assert interval.flops == 4 * length * counts.flops_per_token(config.model, 64, length, None)


@pytest.mark.parametrize(
    ("words", "sizes", "planned"),
    [
        (LENGTHS, [(4, 4), (4, 8), (4, 16), (4, 16)], [3.0, 4.0]),
        ("--rampup-batch-size 2 2 8 --train-samples 20", [(2, None), (4, None)], [2.0]),
        ("--seq-length-schedule=0:4 4:8", [(4, 4), (4, 8)], []),
    ],
)
def test_the_plan_is_beside_steps_of_its_size(
    words: str, sizes: list[tuple[int, int | None]], planned: list[float]
) -> None:
    """It is for whole samples and the whole batch, which take longer than the first steps."""
    given = [words] if "=" in words else [*words.split(), "--train-iters=none"]
    argv = [*TINY_FLAGS, "--micro-batch-size=1", "--log-interval=100", *given]
    config = parse_settings(TrainConfig, argv, "meshwright train").config
    sizes_of = RunSizes(9, None, 16, 4, 1, flops_per_token=1.0, peak=None, shorter={4: 1.0, 8: 1.0})
    cpu = torch.device("cpu")
    metrics = Metrics(None, config, sizes_of, Timers(0, "minmax", cpu, ALONE), ALONE)
    metrics.comparison = MagicMock(**{"note.return_value": False})
    for step, (batch, length) in enumerate(sizes, 1):
        values = {"batch": batch, "loss": 1.0, "skipped": False}
        if length is not None:
            values["length"] = length
        metrics.step(step, 4 * step, float(step), 1e-3, values)
    assert [call.args[0] for call in metrics.comparison.note.call_args_list] == planned


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_run_goes_on_exactly_within_its_schedule(tmp_path: Path, stop: int) -> None:
    more = [LENGTHS, "--train-tokens=500", "--train-iters=none", "--lr-decay-tokens=400"]
    more += ["--lr-warmup-iters=1", "--num-workers=1", "--hidden-dropout=0.1", "--min-lr=1e-4"]

    def train(name: str, *words: str) -> None:
        folder = str(tmp_path / name)
        assert main(["train", *SMALL_FLAGS, *more, "--save", folder, "--load", folder, *words]) == 0

    train("whole")
    train("parts", f"--exit-interval={stop}")
    train("parts")
    whole = printed_losses(tmp_path / "whole")
    assert whole == printed_losses(tmp_path / "parts") and len(whole) == 10
    assert [row["length"] for row in read_rows(tmp_path / "parts")] == [4, 4, 8, 8, *[16] * 6]


@pytest.mark.parametrize("counting", ["--train-tokens=2000", "--lr-decay-tokens=400"])
def test_a_count_of_tokens_keeps_the_batch(run: Run, tmp_path: Path, counting: str) -> None:
    """Each step counts as so many samples of one length."""
    words = [LENGTHS, "--eval-iters=0", "--save", str(tmp_path), "--load", str(tmp_path)]
    words += ["--override-opt_param-scheduler", "--train-iters=9", "--exit-interval=2"]
    assert run(*words, counting).status == 0
    other = run(*words, counting, "--global-batch-size=8")
    name = counting.split("=")[0]
    assert other.status and f"was 4, and {name} with --seq-length-schedule counts" in other.err
    assert run(*words, "--global-batch-size=8").status == 0


def test_only_whole_samples_are_captured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each length a graph would be kept: hundreds of them would fill the device."""
    stand_in(monkeypatch)
    flags = ["--seq-length-schedule=0:8 4:16", "--train-iters", 8, "--eval-iters", 1]
    graphed = run(*flags)
    calls = [call.split()[0] for call in Recorder.made[0].calls]
    # Steps 5 and 6 are the first whole ones, and 7 and 8 are replayed.
    assert calls.count("capture") == 1 and calls.count("replay") == 2
    assert graphed.losses == run(*flags, "--cuda-graphs", "off").losses


def test_a_limit_of_shapes_grows_with_the_lengths(run: Run) -> None:
    with torch._dynamo.config.patch(recompile_limit=8):
        assert run(LENGTHS, "--train-iters", 1).status == 0
        assert torch._dynamo.config.recompile_limit == 32 + 3


def test_advice_about_a_decay_in_tokens(run: Run, tmp_path: Path) -> None:
    """The decay of 900 tokens ends within the 20th step: its samples and steps are no flag's."""
    words = ["--seq-length-schedule=0:4 4:8 8:16", "--train-tokens=1000", "--train-iters=none"]
    words += [
        "--eval-iters=0",
        "--save",
        str(tmp_path / "saved"),
        "--load",
        str(tmp_path / "saved"),
    ]
    assert run(*words, "--lr-decay-tokens=900", "--exit-interval=2").status == 0
    other = run(*words, "--lr-decay-tokens=950")
    assert other.status and "--lr-decay-tokens 900 keeps the checkpoint's" in other.err
    kept = run(*words, "--lr-decay-tokens=900", "--lr-warmup-iters=20")
    assert kept.status and "shorten it to 19 or less" in kept.err


def in_folder(folder: Path) -> list[str]:
    return ["--eval-iters=0", "--save", str(folder), "--load", str(folder)]


def test_tokens_stay_counted_when_the_schedule_changes(run: Run, tmp_path: Path) -> None:
    """Two steps of whole samples, four that grow, and two of whole ones again."""
    words = [*in_folder(tmp_path), "--train-samples=32", "--train-iters=none", "--min-lr=0"]
    words += ["--override-opt_param-scheduler", "--lr-decay-style=linear", "--num-layers=1"]
    decay = "--lr-decay-tokens=600"
    assert run(*words, decay, "--exit-interval=2").status == 0
    grown = run(*words, decay, LENGTHS, "--exit-interval=6")
    whole = run(*words, "--lr-decay-samples=46")
    assert (grown.status, whole.status) == (0, 0)
    lengths = [16, 16, 8, 8, 16, 16, 16, 16]
    for last, applied in ((2, lengths[:2]), (6, lengths[:6]), (8, lengths)):
        state = open_step(str(tmp_path), last).state
        assert state["consumed_train_tokens"] == state["schedule_tokens"] == 4 * sum(applied)
    rates = [1e-2 * (1 - 4 * sum(lengths[:step]) / 600) for step in range(2, 6)]
    assert grown.column("lr") == pytest.approx(rates)


def test_a_rate_in_tokens_follows_those_of_applied_steps(run: Run, tmp_path: Path) -> None:
    """The first steps overflow: the lengths that they had are not those of the applied ones."""
    words = [*in_folder(tmp_path), LENGTHS, "--fp16", "--initial-loss-scale=4294967296"]
    words += ["--hysteresis=1", "--lr-decay-tokens=4000", "--lr-decay-style=linear"]
    words += ["--weight-decay-incr-style=rate", "--train-iters=24"]
    got = run(*words)
    assert got.status == 0
    tokens = 0
    skipped = got.column("skipped")
    assert 4 < sum(skipped) < 20
    for row in read_rows(got.folder, "step"):
        share = 1 - tokens / 4000
        assert row["lr"] == pytest.approx(1e-2 * share), row["iteration"]
        assert row["weight_decay"] == pytest.approx(0.01 * share), row["iteration"]
        tokens += 0 if row["skipped"] else 4 * row["length"]
    state = open_step(str(tmp_path), 24).state
    assert state["schedule_tokens"] == tokens
    assert state["consumed_train_tokens"] == 4 * sum(got.column("length"))


def test_iterations_passed_over_consume_tokens(run: Run, tmp_path: Path) -> None:
    words = [*in_folder(tmp_path), LENGTHS, "--skip-train-iteration-range=2-3"]
    assert run(*words).status == 0
    state = open_step(str(tmp_path), 6).state
    assert state["consumed_train_tokens"] == 4 * (4 + 4 + 8 + 8 + 16 + 16)
    assert state["schedule_tokens"] == 4 * (4 + 8 + 16 + 16)


def test_a_checkpoint_without_tokens(run: Run) -> None:
    """Other programs' have none: samples are taken to have had the lengths of the schedule."""
    config = parse_settings(TrainConfig, [*TINY_FLAGS, LENGTHS], "meshwright train").config
    state: Any = MagicMock(config=config, progress=Progress())
    State.take_over(state, {"consumed_train_samples": 20, "schedule_samples": 12})
    assert state.progress.consumed_train_tokens == 4 * (4 + 4 + 8 + 8 + 16)
    assert state.progress.schedule_tokens == 4 * (4 + 4 + 8)
    State.take_over(state, {"consumed_train_tokens": 7, "schedule_tokens": 5})
    assert (state.progress.consumed_train_tokens, state.progress.schedule_tokens) == (7, 5)


def test_lengths_in_tokens_that_would_be_miscounted(run: Run, tmp_path: Path) -> None:
    """The end of the run, and a decay without a schedule, are found in samples."""
    words = [*in_folder(tmp_path), "--train-iters=none", "--override-opt_param-scheduler"]
    assert run(*words, LENGTHS, "--train-tokens=960", "--exit-interval=3").status == 0
    # The three steps gave 64 tokens; as whole samples they would be 192.
    other = run(*words, "--train-tokens=960")
    assert other.status and "12 samples as 192 tokens" in other.err
    assert "and gave 64; give --train-samples 68 instead" in other.err
    decay = run(*words, "--train-samples=68", "--lr-decay-tokens=640")
    assert decay.status and "give --lr-decay-samples 48 instead" in decay.err
    # With a schedule the decay follows what was read, while the end of the run is still counted.
    later = "--seq-length-schedule=0:8 4:16"
    end = run(*words, later, "--train-tokens=960", "--dry-run")
    assert end.status and "12 samples as 96 tokens" in end.err
    assert "give --train-samples 70 instead" in end.err
    got = run(*words, later, "--train-samples=70", "--lr-decay-tokens=640", "--exit-interval=17")
    assert got.status == 0 and open_step(str(tmp_path), 17).state["consumed_train_tokens"] == 928


def test_lengths_in_tokens_after_another_batch(run: Run, tmp_path: Path) -> None:
    """The number of a step decides its length, which the samples before it do not tell."""
    words = [*in_folder(tmp_path), "--train-iters=none", "--override-opt_param-scheduler"]
    assert run(*words, "--train-samples=900", "--exit-interval=3").status == 0
    words += ["--global-batch-size=8", "--seq-length-schedule=0:4 4:8 5:16"]
    assert run(*words, "--train-samples=900", "--exit-interval=4").status == 0
    # Read are 12 samples of 16 tokens and 8 of 4. Step 5 reads 8 x 8, and those from step 6 on
    # 8 x 16, so that 1,000 tokens are 8 + 5 x 8 samples more, and some.
    end = run(*words, "--train-tokens=1000", "--dry-run")
    assert end.status and "and gave 224; give --train-samples 72 instead" in end.err
    got = run(*words, "--train-samples=72")
    assert got.status == 0 and open_step(str(tmp_path), 10).state["consumed_train_tokens"] == 928


def test_lengths_differ_and_the_decay_does_not(run: Run, tmp_path: Path) -> None:
    """The same tokens are other samples where the schedule of lengths is another."""
    words = [*in_folder(tmp_path), "--lr-decay-tokens=900"]
    assert run(*words, LENGTHS, "--lr-warmup-tokens=40", "--exit-interval=2").status == 0
    other = "--seq-length-schedule=0:4 2:8 3:16"
    got = run(*words, other, "--lr-warmup-tokens=40")
    assert (
        got.status and "lengths of samples in a decay by tokens: the checkpoint has 0:4" in got.err
    )
    assert "length of the" not in got.err
    got = run(*words, other, "--lr-warmup-tokens=50", "--lr-decay-tokens=800")
    assert "length of the warm-up" in got.err and "length of the learning rate's decay" in got.err


def test_steps_at_rate_0_after_a_change_of_the_schedule(run: Run, tmp_path: Path) -> None:
    """Whole samples have used up tokens that the schedule would have left."""
    words = [*in_folder(tmp_path), "--override-opt_param-scheduler"]
    assert run(*words, "--exit-interval=2").status == 0
    # 128 tokens are read; steps 3 to 6 read 32, 32, 64, 64. A decay of 224 ends after the fifth.
    got = run(*words, LENGTHS, "--lr-decay-tokens=224", "--dry-run")
    assert "steps 6 to 6 (1 steps) would run at learning rate 0" in got.out
    assert "--lr-decay-tokens 320 or" in got.out
    assert "rate 0" not in run(*words, LENGTHS, "--lr-decay-tokens=320", "--dry-run").out
