"""The choice of a token, against hand-made cases and against the probabilities themselves."""

from __future__ import annotations

import pytest
import torch

from meshwright.config import Sampling
from meshwright.errors import NON_FINITE, UserError
from meshwright.generate.sampling import choose, draw, generator, temper, top_k, top_p

INF = float("inf")


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def kept(logits: torch.Tensor) -> list[int]:
    return torch.nonzero(logits > -INF).flatten().tolist()


def test_temperature_is_a_division_that_never_overflows() -> None:
    logits = torch.tensor([1.0, 3.0, -2.0])
    torch.testing.assert_close(temper(logits, 0.7).softmax(-1), (logits / 0.7).softmax(-1))
    assert temper(logits, 1e-45).softmax(-1).tolist() == [0, 1, 0]
    assert temper(logits, INF).softmax(-1).tolist() == pytest.approx([1 / 3] * 3)


def test_top_k_keeps_the_largest_and_ties() -> None:
    logits = torch.tensor([0.0, 5.0, 3.0, 3.0, -1.0])
    assert kept(top_k(logits, 1)) == [1]
    assert kept(top_k(logits, 2)) == [1, 2, 3]
    assert kept(top_k(logits, 99)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.01, [1]), (0.49, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.81, [1, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_set_that_passes_p(p: float, expected: list[int]) -> None:
    assert kept(top_p(logs(0.05, 0.5, 0.15, 0.3), p)) == expected


def test_draw_gives_each_token_its_share() -> None:
    logits = logs(0.0, 0.25, 0.0, 0.5, 0.25, 0.0)
    assert [draw(logits, u) for u in (0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53, 1.0)] == [1, 1, 3, 3, 4, 4, 4]


def test_choices_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.6, 0.1, 0.25, 0.05])
    stream = generator(1, 0)
    drawn = [choose(probabilities.log(), Sampling(), stream) for _ in range(2000)]
    share = torch.bincount(torch.tensor(drawn), minlength=4) / 2000
    assert (share - probabilities).abs().max() < 0.04  # 3.6 standard deviations of the largest


def test_greedy_and_filters_in_order() -> None:
    logits = logs(0.3, 0.4, 0.2, 0.1)
    assert choose(logits, Sampling(greedy=True), generator(1, 0)) == 1
    assert choose(logits, Sampling(temperature=1e-6), generator(1, 0)) == 1
    # Hot, every token is equally likely: only the filter that comes after the temperature holds the set small.
    drawn = {choose(logits, Sampling(temperature=1e6, top_k=2), generator(1, i)) for i in range(50)}
    assert drawn == {0, 1}
    drawn = {choose(logits, Sampling(top_p=0.65), generator(1, i)) for i in range(50)}
    assert drawn == {0, 1}
    assert {choose(logits.half(), Sampling(), generator(1, i)) for i in range(100)} == {0, 1, 2, 3}


def test_a_seed_and_a_sample_number_are_one_stream() -> None:
    logits = torch.zeros(1000)

    def some(seed: int, sample: int) -> list[int]:
        stream = generator(seed, sample)
        return [choose(logits, Sampling(), stream) for _ in range(4)]

    assert some(1, 2) == some(1, 2)
    assert len({tuple(some(seed, sample)) for seed in range(8) for sample in range(8)}) == 64


@pytest.mark.parametrize("bad", [[0.0, float("nan")], [0.0, INF], [-INF, -INF]])
def test_logits_that_are_not_finite_are_an_error(bad: list[float]) -> None:
    with pytest.raises(UserError) as error:
        choose(torch.tensor(bad), Sampling(greedy=True), generator(1, 0))
    assert error.value.status == NON_FINITE


def test_padding_is_no_error() -> None:
    assert choose(torch.tensor([0.0, -INF]), Sampling(), generator(1, 0)) == 0
