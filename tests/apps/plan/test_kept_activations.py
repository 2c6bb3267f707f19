"""The closed form beside measured memory for each option of the network, a value of each group."""

from __future__ import annotations

import pytest
from test_estimate import config_of, error

from network_values import VALUES

OWN_SIZES = {"layers", "heads", "ffn", "sequence"}  # of this test's model
# ALiBi's reference attention has temporaries that the closed form leaves out.
LESS_NEAR = {"--position-embedding-type alibi": 0.012}


def options() -> list[str]:
    """Return the last value of each group, and those that are less near."""
    last = [list(values)[-1] for group, values in VALUES.items() if group not in OWN_SIZES]
    return [*last, *LESS_NEAR]


@pytest.mark.parametrize("words", options())
def test_what_an_option_keeps_for_the_backward_pass_is_known(words: str) -> None:
    assert abs(error(config_of(words, 1), 0)) < LESS_NEAR.get(words, 0.003)
