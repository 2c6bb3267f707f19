"""CUDA graphs of the training step: its kernels are launched by one call, not one by one.

At small micro-batches the host takes longer to launch the kernels than the device to run them. A
graph records the kernels of a micro-step once; a replay then starts them all.

A step of n micro-batches consists of up to three pieces, which share one pool of memory:

    first    forward and backward; gradients overwrite the totals
    middle   forward and backward; gradients are added
    last     the same, then the sums over the ranks, the clipping and the update

With one micro-batch, first and last are one piece. A piece reads its batch and its numbers
(learning rate, loss scale, ...) from tensors that never move; each micro-batch is copied into these
before its replay. The first steps of each kind run as usual, on the same stream: they compile
kernels, fill caches and show how much memory a step needs. A step of another shape runs as usual,
and so does each step with shorter samples, as --seq-length-schedule may have hundreds of lengths.

The Python code of a piece runs at its capture only, so it must not depend on values on the device,
nor may the parameter store's own state change between replays. A failed capture executes nothing
and costs a line in the log: the steps then run as usual.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.console import remark
from meshwright.base.errors import first_line
from meshwright.data.loader import Batch
from meshwright.model.attention import seed_dropout
from meshwright.model.positions import Positions
from meshwright.parallel.agree import on_all
from meshwright.training.micro_step import DIVISOR, NUMBERS, Network, Position, micro_step

if TYPE_CHECKING:
    from meshwright.parallel.store import Store

WARM_UP = 2  # steps of each kind that run as usual
TENSORS = ("tokens", "labels", "sample_ids", "loss_mask", "position_ids", "doc_ids")


StepShape = tuple[Any, ...]  # steps with equal ones can be run by the same pieces


class Backend(Protocol):
    """The way to capture and replay; tests have one for CPUs."""

    def prepare(self) -> None:
        """Finish all work and free what is cached."""

    def has_room(self) -> bool:
        """Return whether the memory suffices for graphs and for a validation beside them."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the work that `run` submits, without executing it; return how to execute it."""

    def discard(self) -> None:
        """Free the memory of all captures."""


@dataclass
class Captured:
    """The pieces of one kind of step, and the tensors that they read."""

    batch: Batch
    numbers: Tensor  # [NUMBERS] float64
    replays: list[Callable[[], None]]  # first, middle if there is one, last

    def replay(self, i: int, count: int) -> None:
        """Run the piece for micro-batch i of the step."""
        self.replays[0 if i == 0 else -1 if i == count - 1 else 1]()


class Graphs:
    """The captured pieces of a run's steps."""

    most_pieces = 3  # steps of more micro-batches replay the middle one several times
    run_piece = staticmethod(micro_step)

    def __init__(
        self,
        backend: Backend,
        parts: list[Any],
        store: Store,
        needs_room: bool,
        totals: int,
        width: int,
    ) -> None:
        """`width` is the number of columns of the steps that are captured."""
        self.backend, self.parts, self.store, self.needs_room = backend, parts, store, needs_room
        self.width = width
        # An Update (micro_step.py): every step overwrites it.
        self.totals = torch.zeros(totals, dtype=torch.float64, device=store.device)
        self.seen: Counter[StepShape] = Counter()
        self.captured: dict[StepShape, Captured] = {}
        self.why_off = ""  # why steps run as usual since a capture failed

    def replay(
        self, net: Network, batches: list[Batch], numbers: Tensor, counted: Tensor | None, seed: int
    ) -> bool:
        """Take a step by its captured pieces; return False, with nothing done, if it has none."""
        captured = self.find(net, batches, seed)
        if captured is None:
            return False
        for i, batch in enumerate(batches):
            copy_into(captured.batch, batch)
            captured.numbers.copy_(numbers[i], non_blocking=True)
            if counted is not None:
                captured.numbers[DIVISOR] = counted
            # The pieces read the seed of dropout from the device.
            dropped = Positions(seed=seed, first_sample=batch.first_sample, heads=net.heads)
            seed_dropout(dropped, 0, net.device)
            captured.replay(i, len(batches))
        return True

    def find(self, net: Network, batches: list[Batch], seed: int) -> Captured | None:
        """Return the pieces for a step, captured after the warm-up; None: it runs as usual."""
        kind = shape_of(batches, self.most_pieces)
        is_short = batches[0].tokens.shape[1] < self.width
        if self.why_off or is_short or kind is None or not self.store.is_settled:
            return None
        if kind not in self.captured:
            self.seen[kind] += 1
            if self.seen[kind] > WARM_UP:
                self.capture(kind, net, batches, seed)
        if kind in self.captured:
            self.store.wait_for_weights()  # a step that ran as usual may still gather some
        return self.captured.get(kind)

    def capture(self, kind: StepShape, net: Network, batches: list[Batch], seed: int) -> None:
        self.store.wait_for_weights()  # a graph cannot wait for what began outside of it
        self.backend.prepare()

        def find_room() -> str:
            if not self.needs_room or self.backend.has_room():
                return ""
            return "a step takes so much memory that none would be left for a validation"

        def try_recording() -> str:
            try:
                self.captured[kind] = self.record(net, batches, seed)
            except Exception as error:  # the same error in an ordinary step has a clearer message
                self.store.forget_collectives()  # what the capture has left behind
                for part in self.parts:
                    part.zero_grad(set_to_none=True)
                return f"the capture failed: {type(error).__name__}: {first_line(error)}"
            return ""

        world = dist.group.WORLD if self.store.layout.world > 1 else None
        reason = on_all(world, self.store.device, find_room, try_recording)
        if reason:
            self.why_off = reason
            self.release()
            remark(f" > CUDA graphs: off, because {reason}")

    def release(self) -> None:
        """Free all captures; the next step of each kind is captured again."""
        self.captured.clear()
        self.backend.discard()

    def record(self, net: Network, batches: list[Batch], seed: int) -> Captured:
        """Make the tensors that the pieces of a step read, and capture the pieces."""
        batch = batches[0].copy(self.store.device)
        numbers = torch.ones(NUMBERS, dtype=torch.float64, device=batch.tokens.device)
        end = len(batches) - 1
        # The first, one in the middle, and the last; with fewer micro-batches some are the same.
        replays = []
        for i in sorted({0, min(1, end), end}):
            arguments = net, seed, batch, numbers, self.totals, Position(i == 0, i == end)
            replays.append(self.backend.capture(functools.partial(self.run_piece, *arguments)))
        return Captured(batch, numbers, replays)


def copy_into(to: Batch, batch: Batch) -> None:
    """Copy a batch into one of the same shapes; the host does not wait if it is pinned memory."""
    for name in TENSORS:
        x = getattr(batch, name)
        if x is not None:
            getattr(to, name).copy_(x, non_blocking=True)


def shape_of(batches: list[Batch], most_pieces: int) -> StepShape | None:
    """Return the shape of a step's batches and which pieces it has; None if the shapes differ."""
    shapes: set[StepShape] = set()
    for batch in batches:
        tensors = [getattr(batch, name) for name in TENSORS]
        shapes.add(tuple(None if x is None else (x.shape, x.dtype) for x in tensors))
    if len(shapes) != 1:
        return None
    return (*shapes.pop(), min(len(batches), most_pieces))


assert set(TENSORS) == {f.name for f in fields(Batch)} - {"first_sample", "unmasked"}
