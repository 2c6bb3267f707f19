"""CUDA graphs of a pipeline rank: one for each forward and backward pass of a step.

Between the passes the host sends and receives, as without graphs: recorded messages could be
executed in an order in which two ranks wait for each other. The passes are captured in the order of
the schedule and share one pool of memory, so that together they take as much as without graphs.

What a rank receives is copied to a tensor that never moves, and what it sends is copied from one.
The update is a graph of its own, because the stage before waits for what the last pass sends. A
rank that has nothing more to send records the update with its last pass, in which the sums over the
data-parallel ranks then begin, layer by layer. On the others the sums follow, while these ranks
would wait for the first stage anyway.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.model.attention import seed_dropout
from meshwright.model.positions import Positions
from meshwright.parallel.pipeline import AutogradPasses
from meshwright.parallel.pipeline_schedule import Action
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.training.graphs import Graphs, StepShape, copy_into
from meshwright.training.micro_step import (
    DIVISOR,
    NUMBERS,
    VOTE,
    VOTES,
    Network,
    forward_stage,
    untimed,
    update_weights,
)


@dataclass
class CapturedStages:
    """The passes of a step and the tensors that they read: `Passes` that replay them."""

    net: Network
    seed: int  # of dropout, for the whole run
    batches: list[Batch]
    numbers: Tensor  # [micro-batches, NUMBERS] float64
    incoming: Tensor  # what was received
    outgoing: Tensor  # what is to be sent
    first_samples: list[int] = field(default_factory=list)  # of the step's micro-batches
    replays: dict[Action, Callable[[], None]] = field(default_factory=dict)
    update: Callable[[], None] | None = None  # None: the last pass does it

    def forward(self, chunk: int, i: int, stream: Tensor | None) -> Tensor | None:
        heartbeat.tick()
        self.seed_dropout(chunk, i)
        return self.replay(Action("F", chunk, i), stream)

    def backward(self, chunk: int, i: int, gradient: Tensor | None) -> Tensor | None:
        return self.replay(Action("B", chunk, i), gradient)

    def seed_dropout(self, chunk: int, i: int) -> None:
        """Seed what a stage's attention draws for a micro-batch, as its first layer would."""
        net, part = self.net, self.net.parts[chunk]
        samples, columns = self.batches[i].tokens.shape
        where = Positions(seed=self.seed, first_sample=self.first_samples[i], heads=net.heads)
        # A context rank's attention sees the columns of all ranks.
        drawn = part.drawn_by_layer(samples, columns * net.layout.cp)
        seed_dropout(where, min(map(int, part.h)), net.device, drawn)

    def replay(self, action: Action, received: Tensor | None) -> Tensor | None:
        if received is not None:
            self.incoming.copy_(received)
        self.replays[action]()
        part = self.net.parts[action.chunk]
        ends_here = part.has_head if action.op == "F" else part.has_embedding
        # A copy, because the next pass may be faster than the message.
        return None if ends_here else self.outgoing.clone()


class StageGraphs(Graphs):
    """The captured passes of a pipeline rank's steps."""

    most_pieces = sys.maxsize  # every micro-batch has its own

    def replay(
        self, net: Network, batches: list[Batch], numbers: Tensor, counted: Tensor | None, seed: int
    ) -> bool:
        captured: Any = self.find(net, batches, seed)
        if captured is None:
            return False
        assert net.pipeline is not None
        for to, batch in zip(captured.batches, batches, strict=True):
            copy_into(to, batch)
        captured.first_samples = [batch.first_sample for batch in batches]
        captured.numbers.copy_(numbers, non_blocking=True)
        if counted is not None:
            captured.numbers[:, DIVISOR] = counted
        self.totals.zero_()
        self.totals[VOTES].copy_(captured.numbers[0, VOTE])
        net.pipeline.train([batch.tokens for batch in captured.batches], captured)
        if captured.update is not None:
            heartbeat.enter("optimizer")
            captured.update()
        return True

    def capture(self, kind: StepShape, net: Network, batches: list[Batch], seed: int) -> None:
        # Only steps of one number of micro-batches are kept, because each pass has a graph. They go
        # before it is decided whether there is room for others.
        if self.captured:
            self.release()
        super().capture(kind, net, batches, seed)

    def record(self, net: Network, batches: list[Batch], seed: int) -> Any:
        """Capture the passes of a step in their order, and its update."""
        pipeline, store = net.pipeline, self.store
        assert pipeline is not None
        copies = [batch.copy(store.device) for batch in batches]
        numbers = torch.ones(len(batches), NUMBERS, dtype=torch.float64, device=store.device)
        stream = pipeline.new_stream(copies[0].tokens)
        captured = CapturedStages(
            net, seed, copies, numbers, torch.zeros_like(stream), torch.zeros_like(stream)
        )
        actions = pipeline.actions(len(batches))
        last = actions[-1]
        ends_with_update = net.parts[last.chunk].has_embedding

        # A rank's sums over data-parallel ranks can begin only where the graph waits for them.
        def begin_backward(chunk: int, i: int) -> None:
            is_last = (chunk, i) == (last.chunk, last.microbatch)
            store.begin_backward(is_last and ends_with_update)

        def forward(part: Any, i: int, received: Tensor | None) -> Tensor:
            return forward_stage(
                net, part, seed, untimed, copies[i], numbers[i], self.totals, received
            )

        passes = AutogradPasses(net.parts, forward, begin_backward)

        def run_pass(action: Action) -> None:
            op, chunk, i = action
            part = net.parts[chunk]
            if op == "F":
                # The next message will be received before this input's backward pass.
                given = None if part.has_embedding else captured.incoming.clone()
                out = passes.forward(chunk, i, given)
            else:
                out = passes.backward(chunk, i, None if part.has_head else captured.incoming)
            if out is not None:
                captured.outgoing.copy_(out)

        def update() -> None:
            update_weights(net, numbers[-1], self.totals)
            store.wait_for_weights()

        def end() -> None:
            run_pass(last)
            update()

        store.clear_gradients()
        for action in actions[:-1]:
            captured.replays[action] = self.backend.capture(functools.partial(run_pass, action))
        if ends_with_update:
            captured.replays[last] = self.backend.capture(end)
        else:
            captured.replays[last] = self.backend.capture(functools.partial(run_pass, last))
            captured.update = self.backend.capture(update)
        return captured
