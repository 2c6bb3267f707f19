"""The plan's part in a training: forecasts of the memory and the time that it will take.

The plan is registered as `plan` in the group `meshwright.parts`. Without it a run refuses only what
cannot fit by the sizes of sizes.py, and measures where the plan would have predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from meshwright.base import registry
from meshwright.config.schema import TrainConfig


class StepComparison(Protocol):
    """The first steps of a run beside their prediction."""

    def note(self, seconds: float) -> bool:
        """Add a step; return whether there are now enough to compare."""

    def compare(self, stats: Mapping[str, int], mapped: int = 0) -> list[str]:
        """Return lines about the time and memory of rank 0, and never raise.

        `stats` are torch's; they leave out `mapped`, the bytes that other ranks map.
        """


class Forecast(Protocol):
    """A run's questions to the plan.

    An answer is None if the plan does not know the device or has nothing to object. `padded` is the
    padded size of the vocabulary.
    """

    def verdict(
        self, config: TrainConfig, vocabulary: int, ranks_here: int
    ) -> tuple[bool, str] | None:
        """Return whether a run with so many ranks here fits this machine, and a line about it."""

    def why_too_large(self, config: TrainConfig, device: str | None) -> str | None:
        """Return why a run cannot fit a device, by default this machine's accelerator."""

    def memory_of_rank(
        self, config: TrainConfig, padded: int, pipeline_rank: int
    ) -> dict[str, int]:
        """Return the bytes of a pipeline rank at the peak of a step, by kind."""

    def planned_bytes(self, config: TrainConfig, padded: int, size: int) -> int:
        """Return the most bytes of tensors during a micro-batch of `size` samples."""

    def compare_steps(
        self, config: TrainConfig, vocabulary: int, product: str
    ) -> StepComparison | None:
        """Return a comparison with the first steps on a device, by its product's name."""

    def describe_long_step(self, flops: float) -> str | None:
        """Return a sentence about a step if it takes minutes on this machine's CPU cores."""


def find_forecast() -> Forecast | None:
    """Return the plan, if it is part of this installation."""
    plan = registry.find("parts", "plan")
    return plan() if plan is not None else None
