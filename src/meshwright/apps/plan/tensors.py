"""Tensors of which only the size counts, and the order in which autograd frees them.

A `Memory` notes what is allocated and freed. Python's own counting of references frees a tensor, as
it does in a real step: it lives while a local variable of a function, a node of the graph or a
gradient on its way refers to it. The backward pass visits the nodes in torch's order, the latest
first, and a node lets go of what it saved as soon as it has run.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

GRADIENTS = -1  # key of the last step's gradients, which a step of ZeRO 3 begins by freeing
HANDED = -1000  # key of a gradient that one stage of a rank leaves for another one, times its micro-batch from 1
ROUNDING = 512  # bytes to which torch's allocator rounds up
MAIN, GATHERING, SUMMING = range(3)  # streams; torch's fully_shard has two of its own

Gradients = Sequence["Sized | None"]
Event = tuple[int, int, str, int]  # key of a tensor, its bytes (negative: freed), its kind, its stream


def rounded(size: int) -> int:
    """Return the bytes that torch's allocator takes for so many."""
    return -(-size // ROUNDING) * ROUNDING


class Memory:
    """The bytes that tensors hold, and all that is allocated and freed, in order."""

    def __init__(self) -> None:
        self.now = self.peak = self.peak_at = 0
        self.events: list[Event] = []
        self.keys = itertools.count()
        self.kind = "activations"  # of what is allocated next
        self.handed = HANDED  # key of the gradient that this micro-batch hands over

    def new(self, elements: int, width: int = 4, kind: str | None = None, stream: int = MAIN) -> Sized:
        """Return a tensor of so many elements of `width` bytes."""
        return Sized(Allocation(self, elements * width, kind or self.kind, stream=stream), elements, width)

    def note(self, key: int, size: int, kind: str, stream: int = MAIN) -> None:
        self.events.append((key, size, kind, stream))
        self.now += size
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, len(self.events)


def kinds_of(events: Sequence[Event]) -> dict[str, int]:
    """Return the bytes by kind that are left after these events."""
    out: dict[str, int] = {}
    for _, size, kind, _ in events:
        out[kind] = out.get(kind, 0) + size
    return out


class Allocation:
    """Memory that one or several tensors share; it is freed when none refers to it."""

    __slots__ = ("key", "kind", "memory", "size", "stream")

    def __init__(self, memory: Memory, size: int, kind: str, was_handed: bool = False, stream: int = MAIN) -> None:
        self.memory, self.kind, self.size, self.stream = memory, kind, rounded(size), stream
        self.key = memory.handed if was_handed else next(memory.keys)
        if not was_handed:
            memory.note(self.key, self.size, kind, stream)

    def __del__(self) -> None:
        self.memory.note(self.key, -self.size, self.kind, self.stream)


class Sized:
    """A tensor's size, and the node of the graph that made it."""

    __slots__ = ("data", "elements", "node", "output", "sums", "width")

    def __init__(
        self, data: Allocation, elements: int, width: int, node: GraphNode | None = None, output: int = 0
    ) -> None:
        self.data, self.elements, self.width, self.node, self.output = data, elements, width, node, output
        self.sums: Sized | None = None  # kept with a gradient for the next function, see kernels/gradients.py

    def view(self, node: GraphNode | None = None, output: int = 0) -> Sized:
        """Return a tensor in the same memory; without a node, one that needs no gradient."""
        return Sized(self.data, self.elements, self.width, node, output)

    def part(self, elements: int) -> Sized:
        """Return a part of the tensor."""
        return Sized(self.data, elements, self.width, self.node, self.output)


class AllSaved(Exception):
    """Ends functions that run once more, when nothing is left that they save."""


class KeptInputs:
    """Functions that keep only their inputs: at their backward pass they run once more."""

    def __init__(self, run: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self.run, self.inputs = run, inputs
        self.again: list[Any] | None = None  # what each node saved when it ran once more
        self.count = 0

    def keep(self, saved: Sequence[Any]) -> Any:
        """Return what a node of the first run keeps, or note what one of the second run does."""
        if self.again is not None:
            self.again.append(saved)
            if len(self.again) == self.count:
                raise AllSaved
            return ()
        self.count += 1
        return self, self.count - 1

    def restore(self, number: int) -> Any:
        """Return what a node saved; the first one that asks runs all once more."""
        if self.again is None:
            self.again = []
            with self.recording(), contextlib.suppress(AllSaved):
                self.run(*(x.view() if isinstance(x, Sized) else x for x in self.inputs))
        saved, self.again[number] = self.again[number], ()
        return saved

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Let the nodes that are made keep nothing themselves."""
        before, GraphNode.stretch = GraphNode.stretch, self
        try:
            yield
        finally:
            GraphNode.stretch = before


class GraphNode:
    """A function of the graph: what it saved, and what its backward pass allocates."""

    numbers = itertools.count()
    stretch: KeptInputs | None = None

    def __init__(
        self,
        inputs: Sequence[Sized | None],
        saved: Sequence[Any],
        backward: Callable[..., Gradients],
        outputs: int = 1,
        takes_saved: bool = False,
    ) -> None:
        """`backward` maps the outputs' gradients to those of the inputs; it refers to no tensor.

        With `takes_saved` it takes what was saved, first.
        """
        self.number = next(GraphNode.numbers)
        self.inputs = [None if x is None or x.node is None else (x.node, x.output) for x in inputs]
        self.outputs, self.takes_saved = outputs, takes_saved
        self.is_again = GraphNode.stretch is not None and bool(saved)
        self.saved = GraphNode.stretch.keep(saved) if self.is_again and GraphNode.stretch else saved
        self.backward: Any = backward

    def differentiate(self, gradients: Sequence[Sized | None]) -> list[Sized | None]:
        """Run the backward pass and let go of what was saved."""
        if self.is_again and self.saved:
            stretch, number = self.saved  # the last node keeps the stretch's inputs until its end
            self.saved = stretch.restore(number)
        arguments = (self.saved, *gradients) if self.takes_saved else gradients
        results = list(self.backward(*arguments))
        self.backward = None
        return results


def recomputed(run: Callable[..., Any], *inputs: Any) -> Any:
    """Run functions that keep only their inputs, as torch's checkpoint does."""
    stretch = KeptInputs(run, inputs)
    with stretch.recording():
        return run(*inputs)


def differentiate(outputs: Sequence[tuple[Sized, Sized | None]]) -> None:
    """Run the backward passes of all that these outputs, given with their gradients, depend on."""
    waiting: dict[GraphNode, list[Sized | None]] = {}
    queue: list[tuple[int, GraphNode]] = []

    def give(node: GraphNode, output: int, gradient: Sized | None) -> None:
        if node not in waiting:
            waiting[node] = [None] * node.outputs
            heapq.heappush(queue, (-node.number, node))
        earlier = waiting[node][output]
        waiting[node][output] = gradient if earlier is None else add(earlier, gradient)

    for x, gradient in outputs:
        assert x.node is not None
        give(x.node, x.output, gradient)
    del outputs, x, gradient
    while queue:
        _, node = heapq.heappop(queue)
        results = node.differentiate(waiting.pop(node))
        node.saved = ()
        while results:
            source, result = node.inputs.pop(0), results.pop(0)
            if source is not None and result is not None:
                give(*source, result)
            del result


def add(a: Sized, b: Sized | None) -> Sized:
    """Return the sum of two gradients, in the first one's memory if nothing else is there."""
    assert b is not None
    if sys.getrefcount(a.data) > 2:
        return Sized(Allocation(a.data.memory, a.elements * a.width, a.data.kind), a.elements, a.width)
    return a
