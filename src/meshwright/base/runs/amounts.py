"""The tokens that a run has read by each of its steps, also where its samples grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.base.runs.history import LoggedStep

Numbers = npt.NDArray[np.float64]


def tokens_read(
    iterations: Numbers, samples: Numbers, lengths: Numbers, settings: dict[str, Any]
) -> Numbers | None:
    """Return the tokens read by the end of each step; None if they are unknown.

    `samples` are those consumed by the end of each step. `lengths` are the tokens of each of its
    samples as its row states them, NaN where it does not: there the length is that of the settings.
    """
    length = settings.get("seq_length")
    if not isinstance(length, int) or length <= 0:
        return None
    is_stated = np.isfinite(lengths)
    if not is_stated.any():
        return samples * length if settings.get("seq_length_schedule") is None else None

    # Samples of several lengths are added up, so that the rows of all steps are needed.
    if (np.diff(iterations, prepend=0.0) != 1).any():
        return None
    new_samples = np.diff(samples, prepend=0.0)
    return np.cumsum(new_samples * np.where(is_stated, lengths, length))


def tokens_of_steps(steps: Sequence[LoggedStep], settings: dict[str, Any]) -> Numbers | None:
    """Return tokens_read of the steps of a history."""
    rows = []
    for step in steps:
        length = np.nan if step.length is None else step.length
        rows.append((step.iteration, step.consumed_samples, length))
    iterations, samples, lengths = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return tokens_read(iterations, samples, lengths, settings)
