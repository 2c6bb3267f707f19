"""Execution of a pipeline schedule: each rank runs its own list of actions and sends the results.

Hand-written because torch's executor supports neither a changing number of micro-batches nor
gradient sums that start within a backward pass; its schedules are the oracle in the tests. A stage
sends the residual stream forward and its gradient back, through one group per direction (and others
where the path wraps around from the last rank to the first), so that messages arrive in the
order sent and cannot deadlock. A message is received only when it is needed: NCCL would wait for an
earlier request on processors of the GPU that the computation needs (2 % of a step).

A gradient is kept until it has arrived. Few may be on their way at a time, so that memory does not
depend on how far the host is ahead of the GPU: see `most_sent` of pipeline_schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.layout import Layout
from meshwright.parallel.pipeline_schedule import (
    Action,
    ScheduleName,
    most_sent,
    schedule,
    stages_of,
)

if TYPE_CHECKING:
    from meshwright.model.gpt import GPT

# (stage, number of the micro-batch, incoming stream) -> outgoing stream, or the last stage's result
Forward = Callable[["GPT", int, Tensor | None], Tensor]


class Passes(Protocol):
    """The passes of this rank's stages, which CUDA graphs may replay."""

    def forward(self, chunk: int, i: int, stream: Tensor | None) -> Tensor | None:
        """Run a stage on micro-batch i; return the next stage's input, None on the last one."""

    def backward(self, chunk: int, i: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the stage's input, given its output's; None on the first one."""


class AutogradPasses:
    """Passes by autograd, as without a pipeline."""

    def __init__(
        self,
        parts: list[GPT],
        forward: Forward,
        before_backward: Callable[[int, int], None],
    ) -> None:
        """`forward` ends with the loss, multiplied by its scale.

        `before_backward` is called with each backward pass's chunk and micro-batch.
        """
        self.parts = parts
        self.run = forward
        self.before_backward = before_backward
        # (chunk, micro-batch) -> input and output, if the backward pass is to come
        self.kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def forward(self, chunk: int, i: int, stream: Tensor | None) -> Tensor | None:
        part = self.parts[chunk]
        # What was received is a leaf, whose gradient goes back to the stage before.
        if stream is not None:
            stream.requires_grad_()
        output = self.run(part, i, stream)
        self.kept[chunk, i] = stream, output
        return None if part.has_head else output.detach()

    def backward(self, chunk: int, i: int, gradient: Tensor | None) -> Tensor | None:
        stream, output = self.kept.pop((chunk, i))
        self.before_backward(chunk, i)
        torch.autograd.backward(output, gradient)
        if stream is None:
            return None
        assert stream.grad is not None
        return stream.grad


class Pipeline:
    """The stages of one rank: `parts`, one per chunk of layers."""

    def __init__(
        self,
        layout: Layout,
        name: ScheduleName,
        parts: list[GPT],
        hidden: int,
        sequence: bool,
        dtype: torch.dtype,
    ) -> None:
        """`hidden`, `sequence` (parallelism) and `dtype` describe the stream that is sent."""
        self.layout = layout
        self.schedule = name
        self.parts = parts
        self.hidden = hidden
        self.sequence = sequence
        self.dtype = dtype
        self.rank = layout.at("pp")
        self.size = layout.pp
        self.ranks = layout.peers("pp")
        self.stages = stages_of(self.rank, self.size, len(parts))
        self.sent: list[tuple[Any, Tensor]] = []  # messages on their way

    def open(self, device: torch.device) -> None:
        """Send a first message on every path, in a fixed order.

        NCCL connects two ranks at their first message, and both hosts wait for it; within a
        schedule they would wait for each other.
        """
        x = torch.zeros(1, device=device)
        last = self.size * len(self.parts) - 1
        # First the pairs of stages that begin at an even one, which can connect at the same time,
        # then the others.
        for stage in (*range(0, last, 2), *range(1, last, 2)):
            for begin, way in ((stage, 1), (stage + 1, -1)):
                lane = self._lane(begin, way)
                source = self.rank_of(begin)
                to = self.rank_of(begin + way)
                if self.layout.rank == source:
                    dist.send(x, to, group=lane)
                elif self.layout.rank == to:
                    dist.recv(x, source, group=lane)

    def train(self, tokens: Sequence[Tensor], passes: Passes) -> None:
        """Run the forward and backward passes of micro-batches [B, T]."""
        most = most_sent(len(self.parts))
        # What was sent must stay until it has arrived. An output's backward pass waits for that.
        outputs: dict[tuple[int, int], tuple[Any, Tensor]] = {}

        def run_action(action: Action, received: Tensor | None) -> None:
            op, chunk, i = action
            stage = self.stages[chunk]
            if op == "F":
                output = passes.forward(chunk, i, received)
                if output is not None:
                    outputs[chunk, i] = self._send(output, stage, 1), output
                return
            if (chunk, i) in outputs:
                work, _ = outputs.pop((chunk, i))
                work.wait()
            gradient = passes.backward(chunk, i, received)
            if gradient is not None:
                self._send_and_keep(gradient, stage, -1)
                if len(self.sent) > most:
                    work, _ = self.sent.pop(0)
                    work.wait()

        self._run(self.actions(len(tokens)), tokens, run_action)

    def actions(self, count: int) -> list[Action]:
        """Return what this rank does in a step of so many micro-batches."""
        return schedule(self.schedule, self.size, self.rank, count, len(self.parts))

    def evaluate(self, tokens: Sequence[Tensor], forward: Forward) -> list[Tensor]:
        """Run forward only; return the last stage's results."""
        results: list[Tensor] = []

        def run_action(action: Action, received: Tensor | None) -> None:
            part = self.parts[action.chunk]
            output = forward(part, action.microbatch, received)
            if part.has_head:
                results.append(output)
            else:
                self._send_and_keep(output, self.stages[action.chunk], 1)
                # Let go of what has been sent, but wait for nothing: the receiver may need another
                # message first.
                while self.sent and self.sent[0][0].is_completed():
                    self.sent.pop(0)

        # Without backward passes, all micro-batches may go through one chunk before the next.
        order = [
            Action("F", chunk, i) for chunk in range(len(self.parts)) for i in range(len(tokens))
        ]
        self._run(order, tokens, run_action)
        return results

    def _run(
        self,
        actions: list[Action],
        tokens: Sequence[Tensor],
        run_action: Callable[[Action, Tensor | None], None],
    ) -> None:
        for action in actions:
            run_action(action, self._receive(action, tokens[action.microbatch]))
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def _receive(self, action: Action, tokens: Tensor) -> Tensor | None:
        """Return what an action needs from another stage, if anything."""
        part = self.parts[action.chunk]
        is_forward = action.op == "F"
        # The first stage begins with tokens, and the last one's backward pass with the loss.
        begins_here = part.has_embedding if is_forward else part.has_head
        if begins_here:
            return None
        way = 1 if is_forward else -1
        sender = self.stages[action.chunk] - way
        buffer = self.new_stream(tokens)
        dist.recv(buffer, self.rank_of(sender), group=self._lane(sender, way))
        return buffer

    def new_stream(self, tokens: Tensor) -> Tensor:
        """Return memory for the residual stream of a micro-batch's tokens [B, T]."""
        # With sequence parallelism the stream is a tensor rank's share of all tokens, in one row.
        rows = (1, tokens.numel() // self.layout.tp) if self.sequence else tokens.shape
        return torch.empty(*rows, self.hidden, dtype=self.dtype, device=tokens.device)

    def _send(self, x: Tensor, stage: int, way: int) -> Any:
        return dist.isend(x.contiguous(), self.rank_of(stage + way), group=self._lane(stage, way))

    def _send_and_keep(self, x: Tensor, stage: int, way: int) -> None:
        self.sent.append((self._send(x, stage, way), x))

    def rank_of(self, stage: int) -> int:
        """Return the rank, among all of the run, that has a stage."""
        return self.ranks[stage % self.size]

    def _lane(self, sender: int, way: int) -> Any:
        """Return the group for messages from a stage to the next or previous one.

        Between two ranks, each group is used in one direction only.
        """
        name = "forward" if way > 0 else "backward"
        # From the last rank to the first, where the next chunk of layers begins.
        low = min(sender, sender + way)
        if (low + 1) % self.size == 0:
            name += " around"
        return self.layout.groups[name]


def stages(make: Callable[[], GPT], layers: list[int], layout: Layout) -> list[GPT]:
    """Return this rank's stages: full networks with the other stages' layers deleted.

    `layers` holds the number of layers of each stage, in order.
    """
    if layout.pp == 1:
        return [make()]
    parts = []
    for stage in stages_of(layout.at("pp"), layout.pp, len(layers) // layout.pp):
        part = make()
        begin = sum(layers[:stage])
        own = range(begin, begin + layers[stage])
        part.keep(own, has_embedding=stage == 0, has_head=stage == len(layers) - 1)
        parts.append(part)
    return parts
