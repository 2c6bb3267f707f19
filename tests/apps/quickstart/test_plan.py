"""The choice of vocabulary, model and steps, as a table."""

import pytest

from meshwright.apps.quickstart import plan
from meshwright.apps.quickstart.plan import SIZES, MeasuredSpeed, plan_training


def expected(size):
    """Stand in for the plan's prediction: larger products are more efficient."""
    return size.cost(4096) ** -0.7


CPU = MeasuredSpeed(SIZES[0], 7_000, expected)  # two cores
GPU = MeasuredSpeed(SIZES[4], 1_500_000, expected, accelerator=True)


@pytest.mark.parametrize(
    "size, wide, accelerator, expected",
    [
        (20_000, 0, False, 512),
        (1_000_000, 0, False, 1024),
        (4_000_000, 0, True, 2048),
        (13_000_000, 0, False, 4096),
        (13_000_000, 0.6, False, 8192),  # Chinese
        (5_000_000_000, 0, False, 4096),
        (50_000_000, 0, True, 8192),
        (5_000_000_000, 0, True, 32768),
    ],
)
def test_vocabulary(size, wide, accelerator, expected):
    assert plan.vocabulary_for(size, wide, accelerator) == expected


@pytest.mark.parametrize(
    "tokens, machine, minutes, hidden, steps, dropout, limit",
    [
        (3_500_000, CPU, 1, 128, 370, 0, "time"),
        (3_500_000, CPU, 8, 128, 3240, 0, "time"),
        (3_500_000, CPU, 60, 192, 15_410, 0.1, "time"),
        (300_000, CPU, 8, 128, 3240, 0.2, "time"),
        (30_000, CPU, 60, 128, 350, 0.2, "text"),  # small: more would be learnt by heart
        (500, CPU, 8, 128, 20, 0.2, "text"),
        (30_000_000, GPU, 8, 512, 21_970, 0.2, "text"),
        (600_000_000, GPU, 10, 768, 12_080, 0, "time"),
    ],
)
def test_plan(tokens, machine, minutes, hidden, steps, dropout, limit):
    p = plan_training(tokens, machine, minutes * 60)
    assert (p.size.hidden, p.dropout, p.limit) == (hidden, dropout, limit)
    assert p.steps == pytest.approx(steps, rel=0.01) and p.steps % 10 == 0
    if limit == "time":  # with its validations
        needed = plan.validating(p.steps) * p.steps * p.size.tokens / machine.speed(p.size)
        assert 0.95 * minutes * 60 < needed <= minutes * 60


def test_a_slow_machine_makes_a_few_steps():
    assert plan_training(10**6, MeasuredSpeed(SIZES[0], 50, expected), 1).steps == plan.FEWEST_STEPS


def test_the_trial_fits_text_time_and_plan():
    """On an accelerator it has the size that the plan would choose."""
    fast, slow = (lambda size, factor=factor: factor * expected(size) for factor in (1e12, 1e9))
    assert (
        plan.trial_size(10**9, False, fast, 600)
        == SIZES[0]
        == plan.trial_size(1000, True, fast, 600)
    )
    assert plan.trial_size(10**9, True, fast, 600) == SIZES[5]
    assert (
        plan.trial_size(10**9, True, slow, 600).hidden
        < plan.trial_size(10**9, True, fast, 60).hidden
    )


def test_an_accelerator_gets_larger_batches():
    """Up to 8,192 tokens, as far as the text gives enough steps."""
    small = SIZES[0]
    assert [plan.grow(small, n).tokens for n in (300_000, 400_000, 800_000, 10**7)] == [
        1024,
        2048,
        4096,
        8192,
    ]
    assert plan.grow(small, 10**7).lr == 2 * small.lr and plan.grow(SIZES[4], 10**9) == SIZES[4]
    p = plan_training(
        900_000, MeasuredSpeed(plan.grow(small, 900_000), 300_000, expected, accelerator=True), 600
    )
    assert p.size.tokens == 4096 and p.steps > plan.ENOUGH_STEPS
    assert plan_training(900_000, CPU, 600).size.tokens == 1024
