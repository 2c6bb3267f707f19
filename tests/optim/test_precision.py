"""The loss scale of fp16 against a reference, and steps that are not finite."""

import json
import math
import random

import pytest
import torch

from helpers import open_step
from meshwright.config.schema import Precision
from meshwright.optim.loss_scale import LossScale, dtype_of
from meshwright.training import micro_step
from stores import is_equal

pytestmark = pytest.mark.whole  # seconds, not moments


def test_formats():
    assert dtype_of(Precision()) is torch.float32
    assert dtype_of(Precision(bf16=True)) is torch.bfloat16
    assert dtype_of(Precision(fp16=True)) is torch.float16
    assert dtype_of(Precision(params_dtype="float64")) is torch.float64


class ByHand:
    """Megatron's DynamicGradScaler."""

    def __init__(self, scale, least, window, hysteresis):
        self.scale, self.least, self.window, self.first = scale, least, window, hysteresis
        self.growth, self.hysteresis = 0, hysteresis

    def update(self, overflow):
        if overflow:
            self.growth = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale * 0.5, self.least)
        else:
            self.growth += 1
            if self.growth == self.window:
                self.growth, self.hysteresis = 0, self.first
                self.scale *= 2


@pytest.mark.parametrize(
    ("window", "hysteresis", "least"), [(3, 2, 1.0), (7, 1, 1.0), (1000, 2, 1.0), (2, 3, 64.0)]
)
def test_dynamic_scale(window, hysteresis, least):
    """Compare 4,000 random overflows and clean steps, with a resume in the middle."""
    p = Precision(
        fp16=True,
        loss_scale_window=window,
        hysteresis=hysteresis,
        initial_loss_scale=2.0**10,
        min_loss_scale=least,
    )
    ours, want = LossScale(p), ByHand(2.0**10, least, window, hysteresis)
    rng = random.Random(0)
    for step in range(4000):
        overflow = rng.random() < 0.2
        ours.update(overflow)
        want.update(overflow)
        assert (ours.scale, ours.clean, ours.hysteresis) == (
            want.scale,
            want.growth,
            want.hysteresis,
        ), step
        if step == 2000:
            state = json.loads(json.dumps(ours.state()))
            ours = LossScale(p)
            ours.load(state)


def test_a_scale_of_another_kind_is_not_taken_over():
    """The scale of another format, or a constant one, is ignored."""
    dynamic, constant = Precision(fp16=True), Precision(fp16=True, loss_scale=128.0)
    s = LossScale(dynamic)
    for p in (Precision(bf16=True), Precision(), constant):
        s.load(LossScale(p).state())
        assert s.scale == 2.0**32
    s = LossScale(constant)
    s.load(LossScale(dynamic).state())
    assert s.scale == 128.0


# Runs


@pytest.fixture
def breaking(monkeypatch):
    """Return breaking(iterations): their losses become NaN or `value`; `alone` spares gradients."""

    real = micro_step.loss_sum

    def arrange(iterations, value=math.nan, alone=False):
        calls = []

        def broken(*args):
            total = real(*args)
            if not torch.is_grad_enabled():
                return total
            calls.append(total)
            # the second of two micro-batches
            hit = (len(calls) + 1) // 2 in iterations and len(calls) % 2 == 0
            return (total + value if alone else total * value) if hit else total

        monkeypatch.setattr(micro_step, "loss_sum", broken)

    return arrange


def saved(folder, step):
    """Return every tensor of a checkpoint, and its counters."""
    import safetensors.torch

    tensors = {}
    for path in sorted((folder / f"iter_{step:07d}").glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(path)
    assert tensors
    return tensors, open_step(folder, step).state


BASE = "--eval-iters 0 --lr-decay-style constant --lr-decay-iters 9".split()


def saving(folder):
    return "--save", str(folder), "--save-interval", "1"


FORMATS = [
    [],
    ["--bf16"],
    ["--params-dtype", "float64"],
    ["--optimizer", "sgd"],
    ["--optimizer", "lion"],
    ["--optimizer", "muon"],
    ["--cpu-optimizer"],
]


@pytest.mark.parametrize(
    ("value", "alone"), [(math.nan, False), (math.inf, False), (math.nan, True), (-math.inf, True)]
)
@pytest.mark.parametrize("flags", FORMATS, ids=lambda f: "".join(f) or "fp32")
@pytest.mark.fault("F20")
def test_a_bad_loss_never_reaches_the_weights(run, breaking, tmp_path, flags, value, alone):
    """With skip:1, iteration 3 saves the tensors of iteration 2, and 4 continues from them."""
    breaking({3}, value, alone)
    got = run(*BASE, *flags, "--train-iters", "4", "--on-nonfinite", "skip:1", *saving(tmp_path))
    assert got.status == 0 and got.column("skipped") == [False, False, True, False]
    assert got.losses[2] == str(value) and all(
        isinstance(x, float) for x in got.losses[:2] + got.losses[3:]
    )
    (a, before), (b, after), (c, end) = (saved(tmp_path, i) for i in (2, 3, 4))
    assert is_equal(a, b) and not is_equal(b, c) and all(x.isfinite().all() for x in c.values())
    counters = [
        (s["iteration"], s["consumed_train_samples"], s["schedule_samples"])
        for s in (before, after, end)
    ]
    assert counters == [(2, 8, 8), (3, 12, 8), (4, 16, 12)]
    assert (
        before["optimizer_steps"]
        == after["optimizer_steps"]
        == end["optimizer_steps"] - (not {"sgd", "lion"} & set(flags))
    )
    assert [s["nonfinite_in_a_row"] for s in (before, after, end)] == [0, 1, 0]
    lines = [line for line in got.out.splitlines() if line.startswith(" iteration ")]
    assert ["skipped iterations:   1" in x and "nan iterations:   1" in x for x in lines] == [
        False,
        False,
        True,
        False,
    ]
    assert f" | lm loss: {value} | loss scale: " in lines[2]


@pytest.mark.parametrize("flags", FORMATS[1:2], ids=lambda f: "".join(f) or "fp32")
@pytest.mark.fault("F20")
def test_stop(run, breaking, tmp_path, flags):
    """By default: exit 70 with a reason, no checkpoint; the run resumes from the previous one."""
    clean = run(*BASE, *flags)
    breaking({4})
    got = run(*BASE, *flags, *saving(tmp_path))
    assert got.status == 70 and got.column("skipped") == [False, False, False, True]
    assert (
        "iteration 4 (samples up to 16): the loss is nan, so this step was not applied" in got.err
    )
    assert (
        f"the checkpoints in {tmp_path} are unchanged; continue" in got.err
        and "computed again, it is finite" in got.err
    )
    assert got.column("status", "end") == [70]
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == [
        "iter_0000001",
        "iter_0000002",
        "iter_0000003",
    ]
    breaking(set())
    rest = run(*BASE, *flags, "--load", str(tmp_path))
    assert rest.losses == clean.losses[3:] and len(rest.losses) == 3


@pytest.mark.flag("on_nonfinite")
@pytest.mark.fault("F20")
def test_on_nonfinite(run, breaking, tmp_path):
    """--on-nonfinite skip:2 skips two in a row; a third ends the run; a resume keeps the count."""
    breaking({2, 3, 5, 6})
    got = run(*BASE, "--on-nonfinite", "skip:2", "--train-iters", "7")
    assert got.status == 0 and got.column("skipped") == [i in (2, 3, 5, 6) for i in range(1, 8)]
    breaking({2, 3, 4})
    got = run(*BASE, "--on-nonfinite", "skip:2", "--train-iters", "7", *saving(tmp_path / "a"))
    assert (
        got.status == 70 and got.column("iteration") == [1, 2, 3, 4] and "iteration 4 " in got.err
    )
    breaking({2})
    assert run(*BASE, "--train-iters", "7").status == 70  # stop
    save = str(tmp_path / "b")
    breaking({1, 2})
    got = run(*BASE, "--on-nonfinite", "skip:2", "--train-iters", "2", *saving(save))
    assert got.status == 0 and open_step(save, 2).state["nonfinite_in_a_row"] == 2
    breaking({1})  # the third in a row, the first of this attempt
    got = run(*BASE, "--on-nonfinite", "skip:2", "--load", save)
    assert got.status == 70 and got.column("iteration") == [3]
    breaking({2})
    got = run(*BASE, "--on-nonfinite", "skip:2", "--load", save)
    assert got.status == 0 and got.column("skipped") == [False, True, False, False]


def test_an_overflow_is_not_a_non_finite_step(run):
    """fp16 from 2^32 skips steps even under `stop`; samples count, the schedule does not move."""
    flags = "--fp16 --train-iters 24 --eval-iters 0 --lr-decay-style constant --lr-warmup-iters 8"
    got = run(*flags.split())
    skipped, scales = got.column("skipped"), got.column("loss_scale")
    first = skipped.index(False)
    assert got.status == 0 and 5 < first < 23 and skipped == [True] * first + [False] * (24 - first)
    assert scales == [2.0 ** (32 - max(0, i - 1)) for i in range(first)] + [2.0 ** (33 - first)] * (
        24 - first
    )
    assert got.column("consumed_samples") == [4 * i for i in range(1, 25)]
    assert got.column("lr") == pytest.approx(
        [0.01 * min(1, max(0, i - first) / 8) for i in range(24)]
    )
    assert all(isinstance(x, float) for x in got.losses)
    lines = [line for line in got.out.splitlines() if line.startswith(" iteration ")]  # one a step
    assert [
        f" | lm loss: {loss:.6E} | " in line for line, loss in zip(lines, got.losses, strict=True)
    ] == [True] * 24


def test_a_constant_scale_that_never_fits(run):
    """Nineteen overflows in a row are skipped; the twentieth ends the run."""
    got = run("--fp16", "--loss-scale", str(2.0**40), "--train-iters", "30", "--eval-iters", "0")
    assert (
        got.status == 70
        and got.column("loss_scale") == [2.0**40] * 20
        and "the gradient norm is" in got.err
    )
