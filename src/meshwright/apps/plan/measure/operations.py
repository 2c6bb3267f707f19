"""What a step executes, operation by operation: FLOPs, bytes moved, what the host launches. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

Kind = Literal["product", "attention", "pass", "host"]
Launch = Literal["view", "torch", "triton", "node", "collective"]  # see LAUNCHES of base/device_profiles.py


class Heads(NamedTuple):
    """What decides the speed of an attention kernel."""

    keys: int  # that a query may meet
    width: int  # of a head
    draws: bool  # whether it has dropout
    is_backward: bool


class Operation(NamedTuple):
    """One call of a kernel, or work of the host alone."""

    kind: Kind
    name: str
    launch: Launch
    flops: float = 0.0
    bytes: float = 0.0  # read and written
    dtype: str = ""  # of a product's factors; "fp8" for a pass that rounds to it
    totals: float = 0.0  # bytes of sums in full precision that a product writes, and reads if it adds to them
    heads: Heads | None = None


Operations = Mapping[Operation, float]  # how often each is executed


class PassOperations(NamedTuple):
    """What a micro-batch executes in a stage: forward, backward, and deferred gradients of weights."""

    forward: Operations
    backward: Operations
    weights: Operations


class StepOperations(NamedTuple):
    """What a rank executes in a step."""

    stages: tuple[PassOperations, ...]  # of all ranks, a mean micro-batch
    update: Operations


def total(parts: Iterable[tuple[Operations, float]]) -> Counter[Operation]:
    """Return the sum of some operations, each so many times."""
    out: Counter[Operation] = Counter()
    for operations, times in parts:
        for operation, count in operations.items():
            out[operation] += times * count  # type: ignore[assignment]
    return out
