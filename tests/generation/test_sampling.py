"""Choosing a token: what each filter keeps, the distribution that is drawn from, and the limits."""

import math

import pytest
import torch

from meshwright.errors import NON_FINITE, UserError
from meshwright.generation import sampling
from meshwright.settings.schema import Sampling

INF = float("inf")


def cases(n=200):
    """Rows of logits of many sizes and shapes: flat, peaked, with ties, with impossible tokens."""
    random = torch.Generator().manual_seed(0)
    for _ in range(n):
        size = int(torch.randint(1, 40, (), generator=random))
        logits = torch.randn(size, generator=random) * 10 ** float(torch.rand((), generator=random) * 3 - 1)
        if torch.rand((), generator=random) < 0.4:
            logits = logits.round()  # ties
        if size > 1 and torch.rand((), generator=random) < 0.3:
            logits[torch.randint(0, size, (size // 2,), generator=random)] = -INF
        if logits.max().isfinite():
            yield logits, random


def kept(logits):
    return {i for i, x in enumerate(logits.tolist()) if x > -INF}


def test_top_k_keeps_the_largest_and_their_equals():
    for logits, random in cases():
        k = int(torch.randint(1, len(logits) + 3, (), generator=random))
        border = sorted(logits.tolist(), reverse=True)[min(k, len(logits)) - 1]
        assert kept(sampling.top_k(logits, k)) == {i for i, x in enumerate(logits.tolist()) if x >= border and x > -INF}
    assert kept(sampling.top_k(torch.tensor([1.0, 2.0, 2.0, 0.0]), 1)) == {1, 2}
    assert torch.equal(sampling.top_k(logits, 1000), logits)


def test_top_p_keeps_the_smallest_set_that_passes_p():
    for logits, random in cases():
        p = float(torch.rand((), generator=random))
        probabilities = logits.softmax(-1).tolist()
        stay = kept(sampling.top_p(logits, p))
        order = sorted(range(len(logits)), key=lambda i: -probabilities[i])
        assert order[0] in stay or probabilities[order[0]] in [
            probabilities[i] for i in stay
        ]  # the first, or its equal
        mass = math.fsum(probabilities[i] for i in stay)
        assert mass >= p - 1e-5
        assert mass - min(probabilities[i] for i in stay) <= p + 1e-5  # one fewer would not pass
        assert min(probabilities[i] for i in stay) >= max([probabilities[i] for i in order if i not in stay], default=0)


def test_top_p_by_hand():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    for p, want in ((0.01, {1}), (0.49, {1}), (0.51, {1, 3}), (0.74, {1, 3}), (0.76, {1, 2, 3}), (0.95, {0, 1, 2, 3})):
        assert kept(sampling.top_p(logits, p)) == want, p
    assert kept(sampling.top_p(logits, 1.0)) == {0, 1, 2, 3}
    assert kept(sampling.top_p(torch.zeros(4), 0.4)) == {0, 1}  # ties: in the order of their ids


def test_filters_do_not_change_what_they_keep():
    for logits, _ in cases(50):
        for filtered in (sampling.top_k(logits, 3), sampling.top_p(logits, 0.7)):
            stay = filtered > -INF
            assert torch.equal(filtered[stay], logits[stay])


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        (Sampling(), [0.1, 0.2, 0.3, 0.4]),
        (Sampling(top_k=2), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(top_p=0.65), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(temperature=0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        (Sampling(temperature=0.5, top_k=3), [0, 4 / 29, 9 / 29, 16 / 29]),
        (Sampling(greedy=True, temperature=9), [0, 0, 0, 1]),
    ],
)
def test_frequencies(settings, want):
    """Each count within four standard deviations of its expectation, the impossible never."""
    logits, stream, n = torch.tensor([0.1, 0.2, 0.3, 0.4]).log() + 50, sampling.generator(1, 0), 4_000
    counts = torch.bincount(torch.tensor([sampling.choose(logits, settings, stream) for _ in range(n)]), minlength=4)
    for count, p in zip(counts.tolist(), want, strict=True):
        assert abs(count - n * p) <= 4 * math.sqrt(n * p * (1 - p)), (counts, want)


def test_temperature_limits():
    logits = torch.tensor([3.0, -2.0, 2.9, 0.0])
    cold, hot = Sampling(temperature=1e-38), Sampling(temperature=1e30)
    stream = sampling.generator(5, 0)
    assert {sampling.choose(logits, cold, stream) for _ in range(50)} == {0}
    assert {sampling.choose(logits, hot, stream) for _ in range(200)} == {0, 1, 2, 3}
    assert torch.allclose(sampling.apply_temperature(logits, 2.0).softmax(-1), (logits / 2).softmax(-1))


def test_draw_at_the_borders_of_the_shares():
    logits = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]).log()  # shares: 1 to 0.25, 3 to 1, the others none
    for uniform, want in ((0.0, 1), (0.2499, 1), (0.2501, 3), (1 - 2**-53, 3)):
        assert sampling.draw(logits, uniform) == want
    assert sampling.draw(torch.tensor([0.0]), 1 - 2**-53) == 0


def test_an_impossible_token_is_never_drawn():
    for logits, random in cases():
        for uniform in (0.0, 1 - 2**-53, float(torch.rand((), dtype=torch.float64, generator=random))):
            assert logits[sampling.draw(logits, uniform)] > -INF


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_precision_logits(dtype):
    logits = torch.tensor([0.0, 60000.0, 59000.0], dtype=dtype)
    for settings in (Sampling(greedy=True), Sampling(), Sampling(top_p=0.9), Sampling(temperature=0.1, top_k=2)):
        assert sampling.choose(logits, settings, sampling.generator(0, 0)) == 1


@pytest.mark.parametrize("bad", [[0.0, math.nan], [0.0, INF], [-INF, -INF], [math.nan, math.nan]])
@pytest.mark.parametrize("greedy", [True, False])
def test_logits_that_are_not_finite_are_refused(bad, greedy):
    with pytest.raises(UserError, match="not finite") as caught:
        sampling.choose(torch.tensor(bad), Sampling(greedy=greedy), sampling.generator(0, 0))
    assert caught.value.status == NON_FINITE


def test_streams_differ_by_seed_and_sample_and_repeat():
    first = {
        (seed, n): torch.rand(3, generator=sampling.generator(seed, n)).tolist() for seed in range(9) for n in range(99)
    }
    assert len({tuple(values) for values in first.values()}) == len(first)
    assert torch.rand(3, generator=sampling.generator(4, 7)).tolist() == first[4, 7]
    sampling.generator(-1, 2**40), sampling.generator(2**64, 0)  # any seed
