"""fp16's loss scale against the rule written out by hand."""

import random

import pytest
import torch

from meshwright.config import Precision
from meshwright.precision import LossScale, dtype


def test_formats():
    assert dtype(Precision()) is torch.float32
    assert dtype(Precision(bf16=True)) is torch.bfloat16
    assert dtype(Precision(fp16=True)) is torch.float16
    assert dtype(Precision(params_dtype="float64")) is torch.float64


@pytest.mark.parametrize(("window", "hysteresis"), [(3, 2), (7, 1), (1000, 2)])
def test_dynamic_scale(window, hysteresis):
    """4,000 seeded overflows and clean steps; resumed in the middle."""
    p = Precision(fp16=True, loss_scale_window=window, hysteresis=hysteresis, initial_loss_scale=2.0**10)
    ours = LossScale(p)
    scale, good, left = 2.0**10, 0, hysteresis
    rng = random.Random(0)
    for step in range(4000):
        overflow = rng.random() < 0.2
        ours.update(overflow)
        if overflow:
            good, left = 0, left - 1
            if left <= 0:
                scale = max(scale / 2, 1.0)
        else:
            good += 1
            if good == window:
                good, left, scale = 0, hysteresis, scale * 2
        assert (ours.scale, ours.clean, ours.hysteresis) == (scale, good, left), step
        if step == 2000:
            state = ours.state()
            ours = LossScale(p)
            ours.load(state)


def test_the_first_overflow_is_forgiven():
    s = LossScale(Precision(fp16=True))
    scales = []
    for _ in range(3):
        s.update(True)
        scales.append(s.scale)
    assert scales == [2.0**32, 2.0**31, 2.0**30]


def test_constant_scale_and_other_formats_never_move():
    for p, want in ((Precision(fp16=True, loss_scale=128.0), 128.0), (Precision(bf16=True), 1.0), (Precision(), 1.0)):
        s = LossScale(p)
        for overflow in (True, False, True):
            s.update(overflow)
        assert s.scale == want
