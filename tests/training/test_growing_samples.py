"""Runs with --seq-length-schedule: what they read, what they log, and how they go on."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphs_on_cpu import Recorder, stand_in
from helpers import SMALL_FLAGS, TINY_FLAGS, TinyRun, printed_losses, read_rows
from meshwright.__main__ import main
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig
from meshwright.data.loader import DocumentEnds, Loader, LoaderSpec, Mock
from meshwright.model import counts
from meshwright.training.log.lines import Interval, RunSizes
from meshwright.training.setup import sizes_of_run

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
