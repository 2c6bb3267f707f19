"""Learning rate, weight decay and batch ramp-up against Megatron's formulas; changes on resume."""

import dataclasses
import itertools
import math
import random

import pytest

from meshwright.base.errors import UserError
from meshwright.config import checks
from meshwright.config import schema as config
from meshwright.optim.schedule import (
    VALUES,
    Schedule,
    build_schedule,
    resume_schedule,
    warn_of_idle_steps,
)

LR, LEAST = 1.5e-4, 1e-5


def settings(batch=2, iters=5000, seq=None, ramp=(), samples=None, tokens=None, **optimizer):
    o = config.Optimizer(**{"lr": LR, "min_lr": LEAST, **optimizer})
    t = config.Training(
        micro_batch_size=1,
        global_batch_size=batch,
        train_iters=None if samples or tokens else iters,
        train_samples=samples,
        train_tokens=tokens,
        rampup_batch_size=list(ramp),
    )
    return config.TrainConfig(optimizer=o, training=t, data=config.Data(seq_length=seq))


def megatron_lr(n, style, w, d, wsd, rates):
    """Return the rate after n samples, with w of warm-up and d of decay."""
    (wsd, wsd_style), (init, high, low) = wsd, rates
    if w > 0 and n <= w:
        return init + (high - init) * n / w
    if style == "constant":
        return high
    if n > d:
        return low
    if style == "inverse-square-root":
        return max(low, high * max(w, 1) ** 0.5 / max(n, 1) ** 0.5)
    ratio = (n - w) / (d - w)
    assert 0 <= ratio <= 1
    if style == "linear":
        share = 1.0 - ratio
    elif style == "cosine":
        share = 0.5 * (math.cos(math.pi * ratio) + 1.0)
    else:
        start, share = d - wsd, 1.0
        if n > start:
            r = (n - start) / wsd
            share = {
                "linear": 1.0 - r,
                "cosine": 0.5 * (math.cos(math.pi * r) + 1.0),
                "exponential": 2.0 * math.pow(0.5, r) - 1.0,
                "minus_sqrt": 1.0 - math.sqrt(r),
            }[wsd_style]
    return low + share * (high - low)


def megatron_wd(n, style, start, end, length):
    if n > length or style == "constant":
        return end
    r = n / length
    return start + (end - start) * (
        r if style == "linear" else 0.5 * (math.cos(math.pi * (1 - r)) + 1.0)
    )


def near(value):
    return pytest.approx(value, rel=1e-12, abs=1e-18)


# The curves

STYLES = [("linear", ""), ("cosine", ""), ("constant", ""), ("inverse-square-root", "")]
STYLES += [("cosine", "linear")]  # which has no effect
STYLES += [("WSD", shape) for shape in ("exponential", "linear", "cosine", "minus_sqrt")]


@pytest.mark.parametrize(("style", "wsd"), STYLES)
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("init", [0.0, 3e-5])
def test_curve(style, wsd, warmup, init):
    """Compare every sample from the warm-up to beyond the decay."""
    more = {"lr_wsd_decay_style": wsd, "lr_wsd_decay_iters": 25} if wsd else {}
    c = settings(
        batch=4,
        iters=100,
        lr_decay_style=style,
        lr_warmup_iters=warmup,
        lr_decay_iters=80,
        lr_warmup_init=init,
        **more,
    )
    assert not [p for p in map(str, checks.problems(c)) if "--lr" in p]
    s = build_schedule(c)
    for n in range(420):
        want = megatron_lr(n, style, 4 * warmup, 320, (100, wsd), (init, LR, LEAST))
        assert s.lr(n) == near(want), n
        assert s.wd(n) == 0.01


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_weight_decay_ramp(style):
    ramp = {"weight_decay_incr_style": style, "start_weight_decay": 0.1, "end_weight_decay": 0.9}
    s = build_schedule(settings(batch=4, iters=100, **ramp))
    for n in range(500):
        assert s.wd(n) == near(megatron_wd(n, style, 0.1, 0.9, 400)), n
    assert (
        s.wd(0) == near(0.1)
        and s.wd(200) == near(0.5)
        and s.wd(400) == near(0.9)
        and s.wd(401) == 0.9
    )
    assert (s.wd(100) == near(0.3)) == (style == "linear")
    assert build_schedule(settings(samples=777, **ramp)).wd_samples == 777
    down = build_schedule(
        settings(batch=4, iters=100, **ramp | {"start_weight_decay": 0.9, "end_weight_decay": 0.0})
    )
    assert down.wd(200) == near(0.45) and down.wd(400) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("style", ["linear", "cosine", "WSD", "constant"])
def test_weight_decay_in_proportion_to_the_rate(style):
    """It warms up and falls with the rate, and is --weight-decay at the peak."""
    how = {
        "lr_decay_style": style,
        "lr_warmup_iters": 10,
        "lr_decay_iters": 80,
        "lr_wsd_decay_iters": 30,
    }
    s = build_schedule(
        settings(
            iters=100, weight_decay=0.3, weight_decay_incr_style="rate", lr_warmup_init=1e-6, **how
        )
    )
    for n in range(0, 210):
        assert s.wd(n) == near(0.3 * s.lr(n) / LR), n
    assert s.wd(20) == 0.3 and s.wd(0) == near(0.3 * 1e-6 / LR)
    assert s.wd(200) == (0.3 if style == "constant" else near(0.3 * LEAST / LR))


# Lengths


def test_golden_numbers_of_the_345m_run():
    s = build_schedule(
        settings(lr_decay_iters=320000, lr_warmup_fraction=0.01, lr_decay_style="cosine")
    )
    assert (s.warmup, s.decay, s.wd_samples) == (6400.0, 640000, 10000)


@pytest.mark.parametrize(
    ("given", "want"),  # warm-up, decay, anneal, weight decay in samples
    [
        ({"iters": 50}, (0, 200, 0, 200)),
        ({"iters": 50, "lr_decay_iters": 40}, (0, 160, 0, 200)),
        ({"iters": 50, "lr_decay_iters": 40, "lr_warmup_iters": 3}, (12, 160, 0, 200)),
        ({"iters": 50, "lr_decay_iters": 40, "lr_warmup_fraction": 0.1}, (16, 160, 0, 200)),
        ({"iters": 50, "lr_warmup_fraction": 0.0}, (0, 200, 0, 200)),
        ({"iters": 50, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 7}, (0, 200, 28, 200)),
        ({"samples": 203}, (0, 203, 0, 203)),
        ({"samples": 203, "lr_warmup_samples": 11}, (11, 203, 0, 203)),
        ({"samples": 203, "lr_decay_samples": 150, "lr_warmup_fraction": 0.1}, (15, 150, 0, 203)),
        ({"samples": 203, "lr_decay_tokens": 1509, "lr_warmup_tokens": 119}, (11, 150, 0, 203)),
        ({"samples": 203, "lr_decay_style": "WSD", "lr_wsd_decay_samples": 30}, (0, 203, 30, 203)),
        ({"tokens": 2039}, (0, 203, 0, 203)),
        ({"tokens": 2039, "lr_decay_samples": 150, "lr_warmup_tokens": 200}, (20, 150, 0, 203)),
        ({"tokens": 2039, "ramp": (2, 2, 40), "lr_decay_tokens": 1500}, (0, 150, 0, 203)),
    ],
)
def test_lengths(given, want):
    """Batches have 4 samples of 10 tokens; an incomplete sample does not count."""
    c = settings(batch=4, seq=10, **given)
    assert not [
        p for p in map(str, checks.problems(c)) if "--lr" in p or "--train" in p or "--rampup" in p
    ]
    s = build_schedule(c)
    assert (s.warmup, s.decay, s.wsd_samples, s.wd_samples) == pytest.approx(want)


# The batch ramp-up


def megatron_batches(start, increment, ramp, whole, samples):
    """Return the global batch of every step by Megatron's calculator."""
    per_increment = ramp / ((whole - start) // increment)

    def current(consumed):
        return whole if consumed > ramp else start + int(consumed / per_increment) * increment

    consumed, sizes = 0, []
    while consumed <= ramp:
        sizes.append(current(consumed))
        consumed += sizes[-1]
    return sizes + [whole] * ((samples - consumed) // whole)


def test_ramp_up_equals_megatrons():
    rng, unlike = random.Random(0), set()
    for _ in range(150):
        start, increment = rng.randint(1, 24), rng.randint(1, 24)
        whole = start + increment * rng.randint(1, 12)
        ramp = rng.randint(1, 5000)
        samples = ramp + whole * rng.randint(2, 40) + rng.randrange(whole)
        c = settings(batch=whole, ramp=(start, increment, ramp), samples=samples)
        assert not [p for p in map(str, checks.problems(c)) if "--rampup" in p or "--train" in p]
        sizes = megatron_batches(start, increment, ramp, whole, samples)
        before = list(itertools.accumulate(sizes, initial=0))
        assert [c.batch(n) for n in before[:-1]] == sizes, (start, increment, ramp, whole)
        assert c.steps == len(sizes), (start, increment, ramp, whole, samples)
        assert before[-1] <= samples < before[-1] + whole
        unlike.add(tuple(sizes))
    assert len(unlike) > 130


def test_a_run_that_ends_within_its_ramp():
    """A batch that does not fit is left out."""
    c = settings(batch=8, ramp=(2, 2, 12), samples=19)
    assert [c.batch(n) for n in (0, 2, 4, 8, 12, 13, 100)] == [2, 2, 4, 6, 8, 8, 8]
    assert c.steps == 4  # 2, 2, 4, 6 are 14; 8 more would be 22
    assert settings(batch=8, ramp=(2, 2, 12), samples=22).steps == 5
    assert settings(batch=8, ramp=(8, 2, 12), samples=24).steps == 3  # from 8 to 8


def test_a_run_follows_schedule_and_ramp(run):
    """Batches are 2 2 4 4 6; a step's rate is that at the samples before it."""
    flags = "--train-iters none --train-samples 41 --rampup-batch-size 2 2 8 --global-batch-size 6 --lr 0.01"
    flags += " --lr-decay-style WSD --lr-wsd-decay-samples 14 --lr-wsd-decay-style minus_sqrt --lr-warmup-samples 5"
    flags += " --lr-warmup-init 0.001 --min-lr 0.002 --lr-decay-samples 37 --eval-iters 0"
    got = run(*flags.split())
    sizes = megatron_batches(2, 2, 8, 6, 41)
    assert sizes == [2, 2, 4, 6, 6, 6, 6, 6]
    before = list(itertools.accumulate(sizes, initial=0))
    assert (
        got.status == 0
        and got.column("batch") == sizes
        and got.column("consumed_samples") == before[1:]
    )
    want = [
        megatron_lr(n, "WSD", 5, 37, (14, "minus_sqrt"), (0.001, 0.01, 0.002)) for n in before[:-1]
    ]
    assert got.column("lr") == near(want)
    assert (
        f"iteration {len(sizes):8d}/{len(sizes):8d} | consumed samples: {before[-1]:12d} |"
        in got.out
    )


# Changed schedules on resume


def test_resume_prints_megatrons_nine_lines():
    c = settings(lr_decay_iters=320000, lr_warmup_fraction=0.01, lr_decay_style="cosine")
    s, lines = resume_schedule(build_schedule(c), dataclasses.asdict(build_schedule(c)), c)
    assert s == build_schedule(c)
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


FULL = Schedule(0.125, 0.0625, 11, 222, "WSD", 0.25, 0.75, 333, "linear", 0.03125, 44, "cosine")
ONE_BY_ONE = [
    ("max_lr", 0.5, "--lr"),
    ("min_lr", 0.015625, "--min-lr"),
    ("warmup", 17, "--lr-warmup-"),
    ("decay", 777, "--lr-decay-iters"),
    ("style", "constant", "--lr-decay-style"),
    ("start_wd", 0.375, "--start-weight-decay"),
    ("end_wd", 0.875, "--end-weight-decay"),
    ("wd_samples", 999, "--train-samples"),
    ("wd_style", "cosine", "--weight-decay-incr-style"),
    ("init_lr", 0.0078125, "--lr-warmup-init"),
    ("wsd_samples", 55, "--lr-wsd-decay-iters"),
    ("wsd_style", "minus_sqrt", "--lr-wsd-decay-style"),
    ("lengths", "0:8 5:16", "--seq-length-schedule"),
    ("lengths_batch", 7, "--global-batch-size"),
    ("warmup_unit", "tokens", "--lr-warmup-tokens"),
]


def test_every_value_is_listed():
    assert (
        [n for n, _, _ in ONE_BY_ONE]
        == [f.name for f in dataclasses.fields(Schedule)]
        == list(VALUES)
    )


@pytest.mark.flag("override_opt_param_scheduler use_checkpoint_opt_param_scheduler")
def test_a_changed_schedule_needs_a_decision():
    """Several changes are reported together and decided by either flag."""
    saved = dataclasses.asdict(build_schedule(settings(lr_decay_iters=100)))
    ours = settings(lr=3e-4, lr_decay_iters=200)
    with pytest.raises(UserError) as e:
        resume_schedule(build_schedule(ours), saved, ours)
    text = str(e.value)
    for part in "0.00015 0.0003 (--lr) --override-opt_param".split():
        assert part in text
    assert "200 samples = 100 steps of 2, the settings say 400 samples = 200 steps" in text
    assert "length of the learning rate's decay" in text and "--lr-decay-iters 100 keeps" in text
    assert "iterations" not in text
    ours = settings(lr=3e-4, override_opt_param_scheduler=True)
    assert resume_schedule(build_schedule(ours), saved, ours)[0].max_lr == 3e-4
    theirs = settings(lr=3e-4, use_checkpoint_opt_param_scheduler=True)
    s, lines = resume_schedule(build_schedule(theirs), saved, theirs)
    assert (
        s == dataclasses.replace(Schedule(**saved), wd_samples=s.wd_samples)
        and "0.00015" in lines[0]
    )


def test_the_checkpoints_ramp_has_the_checkpoints_length():
    """The checkpoint's style decides whether the length matters."""
    saved = dataclasses.asdict(dataclasses.replace(FULL, wd_style="linear", wd_samples=2000))
    ours = dataclasses.replace(FULL, wd_style="constant", wd_samples=4000)
    kept, lines = resume_schedule(ours, saved, settings(use_checkpoint_opt_param_scheduler=True))
    assert kept == Schedule(**saved)
    assert " > using checkpoint value 2000 for total number of weight decay iterations" in lines


def test_an_anneal_without_wsd_needs_none():
    saved = dataclasses.asdict(dataclasses.replace(FULL, style="linear"))
    ours = dataclasses.replace(FULL, style="linear", wsd_samples=1, wsd_style="linear")
    s, lines = resume_schedule(ours, saved, settings())
    assert len(lines) == 9 and [s.lr(n) for n in range(230)] == [
        Schedule(**saved).lr(n) for n in range(230)
    ]


def test_checkpoints_from_before_the_newer_three():
    """They warm up from 0 and have no WSD."""
    before = build_schedule(settings(lr_warmup_iters=5))
    saved = dataclasses.asdict(before)
    for name in ("init_lr", "wsd_samples", "wsd_style"):
        del saved[name]
    s, lines = resume_schedule(before, saved, settings())
    assert s == before and len(lines) == 9
    with pytest.raises(UserError, match=r"has 0\.0, the settings say 1e-06 \(--lr-warmup-init\)"):
        resume_schedule(dataclasses.replace(before, init_lr=1e-6), saved, settings())


def rates(c):
    """Return the learning rate of every step of a run, taken one by one."""
    s, now, out = build_schedule(c), 0, []
    for _ in range(c.steps):
        out.append(s.lr(now))
        now += c.batch(now)
    return out


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root", "constant", "WSD"])
@pytest.mark.parametrize("ramp", [(), (2, 2, 40)])
@pytest.mark.parametrize("decay", [5, 9, 11, 12, 13, 20])
def test_steps_at_rate_0_are_counted(style, ramp, decay):
    more = {"lr_wsd_decay_iters": 2} if style == "WSD" else {}
    c = settings(
        8,
        12,
        ramp=ramp,
        lr_decay_iters=decay,
        min_lr=0.0,
        lr_decay_style=style,
        lr_warmup_iters=2,
        **more,
    )
    zeros = [number for number, rate in enumerate(rates(c), 1) if rate == 0 and number > 1]
    (line,) = warn_of_idle_steps(build_schedule(c), c, c.steps) or [None]
    if zeros:
        assert line.startswith(
            f"steps {zeros[0]} to 12 ({len(zeros)} steps) would run at learning rate 0"
        )
        assert "--lr-decay-iters 12 or a --min-lr above 0" in line and "override" not in line
    else:
        assert line is None
    c = settings(
        8, 12, ramp=ramp, lr_decay_iters=decay, lr_decay_style=style, lr_warmup_iters=2, **more
    )
    assert not warn_of_idle_steps(build_schedule(c), c, c.steps)  # min_lr is above 0


@pytest.mark.parametrize("warm", [11, 12, 13])
def test_a_run_within_its_warm_up(warm):
    c = settings(8, 12, lr_decay_iters=100, lr_warmup_iters=warm)
    lines = warn_of_idle_steps(build_schedule(c), c, c.steps)
    assert bool(lines) == (warm >= 12)
    for line in lines:
        assert f"it has 12 steps, the warm-up {warm}" in line and "--lr-warmup-iters 1" in line
