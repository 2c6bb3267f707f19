"""Learning rate against Megatron's formulas written out again, and what a resumed run does with a changed schedule."""

import dataclasses
import math

import pytest

from meshwright import config
from meshwright.errors import UserError
from meshwright.lr_schedule import Schedule, from_config, resume


def settings(batch=2, iters=5000, **optimizer):
    o = config.Optimizer(**{"lr": 1.5e-4, "min_lr": 1e-5, **optimizer})
    return config.TrainConfig(
        optimizer=o, training=config.Training(micro_batch_size=1, global_batch_size=batch, train_iters=iters)
    )


def test_golden_numbers_of_the_345m_run():
    s = from_config(settings(lr_decay_iters=320000, lr_warmup_fraction=0.01, lr_decay_style="cosine"))
    assert (s.warmup, s.decay, s.wd_samples) == (6400.0, 640000, 10000)


@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 10])
def test_curve(style, warmup):
    s = from_config(settings(batch=4, iters=100, lr_decay_style=style, lr_warmup_iters=warmup, lr_decay_iters=80))
    w, d = 4 * warmup, 320
    for n in range(0, 420, 3):
        if w and n <= w:
            want = 1.5e-4 * n / w
        elif style == "constant":
            want = 1.5e-4
        elif n > d:
            want = 1e-5
        else:
            r = (n - w) / (d - w)
            want = 1e-5 + 1.4e-4 * ((1 - r) if style == "linear" else (math.cos(math.pi * r) + 1) / 2)
        assert s.lr(n) == pytest.approx(want, rel=1e-12), n
        assert s.wd(n) == 0.01


def test_first_step_of_a_warm_up_is_zero():
    assert from_config(settings(lr_warmup_fraction=0.01)).lr(0) == 0.0
    assert from_config(settings()).lr(0) == 1.5e-4


def test_resume_prints_megatrons_nine_lines():
    c = settings(lr_decay_iters=320000, lr_warmup_fraction=0.01, lr_decay_style="cosine")
    s, lines = resume(from_config(c), dataclasses.asdict(from_config(c)), c)
    assert s == from_config(c)
    assert lines == [
        " > using checkpoint value 0.00015 for learning rate",
        " > using checkpoint value 1e-05 for minimum learning rate",
        " > using checkpoint value 6400.0 for warmup iterations",
        " > using checkpoint value 640000 for total number of iterations",
        " > using checkpoint value cosine for learning rate decay style",
        " > using checkpoint value 0.01 for start weight decay",
        " > using checkpoint value 0.01 for end weight decay",
        " > using checkpoint value 10000 for total number of weight decay iterations",
        " > using checkpoint value constant for weight decay incr style",
    ]


def test_a_changed_schedule_needs_a_decision():
    saved = dataclasses.asdict(from_config(settings(lr_decay_iters=100)))
    with pytest.raises(UserError) as e:
        resume(from_config(settings(lr=3e-4, lr_decay_iters=200)), saved, settings(lr=3e-4, lr_decay_iters=200))
    text = str(e.value)
    for part in (
        "0.00015",
        "0.0003",
        "--lr",
        "200",
        "400",
        "--override-opt_param-scheduler",
        "--use-checkpoint-opt_param",
    ):
        assert part in text
    ours = settings(lr=3e-4, override_opt_param_scheduler=True)
    assert resume(from_config(ours), saved, ours)[0].max_lr == 3e-4
    theirs = settings(lr=3e-4, use_checkpoint_opt_param_scheduler=True)
    s, lines = resume(from_config(theirs), saved, theirs)
    assert s == dataclasses.replace(Schedule(**saved), wd_samples=s.wd_samples) and "0.00015" in lines[0]


def test_a_longer_run_with_constant_decay_needs_none():
    saved = dataclasses.asdict(from_config(settings(iters=100, lr_decay_iters=1000)))
    longer = settings(iters=200, lr_decay_iters=1000)
    assert resume(from_config(longer), saved, longer)[0].wd_samples == 400
