"""Choosing a token: what each filter keeps, the distribution that is drawn from, and the limits."""

import math

import pytest
import torch

from meshwright.config.schema import Sampling
from meshwright.generation import sampling
from meshwright.generation.sampling import ChoiceParts, Controls
from meshwright.kernels import draws

INF = float("inf")


def cases(n=200):
    """Rows of logits of many sizes and shapes: flat, peaked, with ties, with impossible tokens."""
    random = torch.Generator().manual_seed(0)
    for _ in range(n):
        size = int(torch.randint(1, 40, (), generator=random))
        logits = torch.randn(size, generator=random) * 10 ** float(
            torch.rand((), generator=random) * 3 - 1
        )
        if torch.rand((), generator=random) < 0.4:
            logits = logits.round()  # ties
        if size > 1 and torch.rand((), generator=random) < 0.3:
            logits[torch.randint(0, size, (size // 2,), generator=random)] = -INF
        if logits.max().isfinite():
            yield logits, random


def row(x, dtype=torch.float64):
    return torch.tensor([x], dtype=dtype)


def filtered(logits, top_k=0, top_p=0.0, min_p=0.0):
    return sampling.filter_logits(logits[None], row(top_k, torch.int64), row(top_p), row(min_p))[0]


def choose(logits, settings, n=1, seed=1):
    """Return the choices for the first n positions of one stream."""
    numbers = [torch.full((n,), x, dtype=torch.float64) for x in sampling.control_numbers(settings)]
    k, key = (torch.full((n,), x) for x in (settings.top_k, sampling.stream_key(seed, 0)))
    rows = logits.expand(n, -1)
    return sampling.sample_tokens(
        rows, ChoiceParts.of(settings), Controls(*numbers, k, key), torch.arange(n)
    ).tolist()


def kept(logits):
    return {i for i, x in enumerate(logits.tolist()) if x > -INF}


def test_top_k_keeps_the_largest_and_their_equals():
    for logits, random in cases():
        k = int(torch.randint(1, len(logits) + 3, (), generator=random))
        border = sorted(logits.tolist(), reverse=True)[min(k, len(logits)) - 1]
        assert kept(filtered(logits, k)) == {
            i for i, x in enumerate(logits.tolist()) if x >= border and x > -INF
        }
    assert kept(filtered(torch.tensor([1.0, 2.0, 2.0, 0.0]), 1)) == {1, 2}
    assert torch.equal(filtered(logits, 1000), logits)


def test_top_p_keeps_the_smallest_set_that_passes_p():
    for logits, random in cases():
        p = float(torch.rand((), generator=random))
        probabilities = logits.softmax(-1).tolist()
        stay = kept(filtered(logits, top_p=p))
        order = sorted(range(len(logits)), key=lambda i: -probabilities[i])
        assert order[0] in stay or probabilities[order[0]] in [
            probabilities[i] for i in stay
        ]  # the first, or its equal
        mass = math.fsum(probabilities[i] for i in stay)
        assert mass >= p - 1e-5
        assert mass - min(probabilities[i] for i in stay) <= p + 1e-5  # one fewer would not pass
        assert min(probabilities[i] for i in stay) >= max(
            [probabilities[i] for i in order if i not in stay], default=0
        )


def test_min_p_keeps_a_share_of_the_likeliest():
    for logits, random in cases():
        p = float(torch.rand((), generator=random))
        probabilities = logits.double().softmax(-1).tolist()
        assert kept(filtered(logits.double(), min_p=p)) == {
            i for i, x in enumerate(probabilities) if x >= p * max(probabilities) and x > 0
        }


def test_the_penalty():
    logits, seen = (
        torch.tensor([[2.0, -2.0, 1.0, -1.0]]),
        torch.tensor([[True, True, False, False]]),
    )
    assert sampling.penalise(logits, seen, row(4.0)).tolist() == [[0.5, -8.0, 1.0, -1.0]]
    assert torch.equal(sampling.penalise(logits, seen, row(1.0)), logits)


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        (Sampling(), [0.1, 0.2, 0.3, 0.4]),
        (Sampling(top_k=2), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(top_p=0.65), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(temperature=0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        (Sampling(temperature=0.5, top_k=3), [0, 4 / 29, 9 / 29, 16 / 29]),
        (Sampling(min_p=0.6), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(greedy=True, temperature=9), [0, 0, 0, 1]),
    ],
)
def test_frequencies(settings, want):
    """Each count within four standard deviations of its expectation, the impossible never."""
    logits, n = torch.tensor([0.1, 0.2, 0.3, 0.4]).log() + 50, 4_000
    counts = torch.bincount(torch.tensor(choose(logits, settings, n)), minlength=4)
    for count, p in zip(counts.tolist(), want, strict=True):
        assert abs(count - n * p) <= 4 * math.sqrt(n * p * (1 - p)), (counts, want)


def test_temperature_limits():
    logits = torch.tensor([3.0, -2.0, 2.9, 0.0])
    assert set(choose(logits, Sampling(temperature=1e-38), 50)) == {0}
    assert set(choose(logits, Sampling(temperature=1e30), 200)) == {0, 1, 2, 3}
    scaled = sampling.apply_temperature(logits[None].double(), row(2.0))
    assert torch.allclose(scaled.softmax(-1), (logits[None].double() / 2).softmax(-1))


def test_uniform_numbers():
    """They fill (0, 1), differ by seed, stream, position and token, and are these for ever."""
    names = [(seed, stream) for seed in range(6) for stream in range(20)]
    key = torch.tensor([sampling.stream_key(*name) for name in names])
    u = torch.stack([draws.uniforms(key, torch.full_like(key, at), 50) for at in range(4)])
    assert len(u.unique()) == u.numel() == 24_000 and u.min() > 0 and u.max() < 1
    counts = torch.histc(u, 20, 0, 1)
    # chi squared, 19 degrees of freedom, 1 in 1,000
    assert ((counts - 1200) ** 2 / 1200).sum() < 45
    assert abs(torch.corrcoef(u.flatten(0, 1).T).fill_diagonal_(0)).max() < 0.2
    known = draws.uniforms(torch.tensor([sampling.stream_key(1234, 7)]), torch.tensor([5]), 3)
    assert [round(x, 12) for x in known[0].tolist()] == KNOWN
    sampling.stream_key(-1, 2**40), torch.tensor([sampling.stream_key(2**64, 0)])  # any seed


KNOWN = [0.160338358625, 0.736290894747, 0.845256706998]
