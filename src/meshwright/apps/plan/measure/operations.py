"""What a step executes, operation by operation: FLOPs, bytes moved, launches. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from meshwright.apps.plan.measure.account import Section

Kind = Literal["product", "attention", "pass", "host"]
# The keys of LAUNCHES in base/device_profiles.py.
Launch = Literal["view", "torch", "triton", "node", "collective"]


class Heads(NamedTuple):
    """What decides the speed of an attention kernel."""

    keys: int  # that a query may meet
    width: int  # of a head
    draws: bool  # whether it has dropout
    is_backward: bool


class TracedOperation(NamedTuple):
    """One call of a kernel, or work of the host alone."""

    kind: Kind
    name: str
    launch: Launch
    flops: float = 0.0
    bytes: float = 0.0  # read and written
    dtype: str = ""  # of a product's factors; "fp8" for a pass that rounds to it
    totals: float = 0.0  # bytes of a product's results that go into sums in full precision
    heads: Heads | None = None


Operations = Mapping[TracedOperation, float]  # how often each is executed


class PassOperations(NamedTuple):
    """What a micro-batch executes in a stage."""

    forward: Operations
    backward: Operations


class StepOperations(NamedTuple):
    """What a rank executes in a step."""

    stages: tuple[PassOperations, ...]  # of all ranks, a mean micro-batch
    update: Operations


def total(parts: Iterable[tuple[Operations, float]]) -> Counter[TracedOperation]:
    """Return the sum of some operations, each so many times."""
    out: Counter[TracedOperation] = Counter()
    for operations, times in parts:
        for operation, count in operations.items():
            out[operation] += times * count  # type: ignore[assignment]
    return out


# The operations of all layers, from those of the few that were measured

# The pass to which the work of a phase belongs: 0 is forward, 1 backward.
WAYS = {
    "begin": 0,
    "embedding": 0,
    "layer": 0,
    "head": 0,
    "head backward": 1,
    "layer backward": 1,
    "embedding backward": 1,
}
STATE = frozenset(["zeros_like"])  # what torch's optimizers execute in their first update alone


class LayerGroup(Protocol):
    """Layers that were measured, and how many such groups they stand for."""

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def copies(self) -> int: ...


class RankOperations(NamedTuple):
    """What a pipeline rank executes: micro-batches in each of its chunks, and the update."""

    first: tuple[PassOperations, ...]  # a step's first micro-batch, which writes gradients
    later: tuple[PassOperations, ...]  # another one, which adds to them
    update: Operations


def operations_of_rank(
    sections: Mapping[Section, Operations], chunks: Sequence[Sequence[LayerGroup]], growth: float
) -> RankOperations:
    """Return what a rank executes with all layers of its chunks.

    `growth`: its parameters as a multiple of those that were measured. Its update moves that
    multiple of the bytes, by the same number of kernels.
    """
    copies = [[group.copies for group in chunk for _ in group.layers] for chunk in chunks]
    passes: dict[tuple[int, int], list[Counter[TracedOperation]]] = defaultdict(
        lambda: [Counter(), Counter()]
    )
    update: Counter[TracedOperation] = Counter()
    for section, operations in sections.items():
        if section.phase == "update":
            for operation, count in operations.items():
                if operation.name in STATE:
                    continue
                update[operation._replace(bytes=growth * operation.bytes)] += count  # type: ignore[assignment]
        elif section.phase in WAYS:
            times = 1 if section.layer is None else copies[section.chunk][section.layer]
            place = passes[section.chunk, max(section.micro_batch, 0)][WAYS[section.phase]]
            for operation, count in operations.items():
                place[operation] += times * count  # type: ignore[assignment]
    last = max((number for _, number in passes), default=0)
    first, later = (
        tuple(PassOperations(*passes[chunk, number]) for chunk in range(len(chunks)))
        for number in (0, last)
    )
    return RankOperations(first, later, update)
