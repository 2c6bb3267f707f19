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
from typing import TYPE_CHECKING, Any, NamedTuple

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


class ForwardPass(NamedTuple):
    """The tensors of a micro-batch that a stage keeps until its backward pass."""

    source: Tensor | None
    output: Tensor
    sending: Any  # torch's work object, None if nothing was sent


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

    def train(
        self,
        tokens: Sequence[Tensor],
        forward: Forward,
        scale: float,
        before_backward: Callable[[bool], None],
    ) -> list[Tensor]:
        """Run forward and backward of micro-batches [B, T]; return the last stage's losses.

        `before_backward` is called before each backward pass with whether it is its stage's last.
        """
        passes: dict[tuple[int, int], ForwardPass] = {}  # those whose backward pass is to come
        losses: list[Tensor] = []
        actions = schedule(self.schedule, self.size, self.rank, len(tokens), len(self.parts))
        most = most_sent(len(self.parts))

        def run_action(action: Action, received: Tensor | None) -> None:
            op, chunk, i = action
            part = self.parts[chunk]
            stage = self.stages[chunk]
            if op == "F":
                # What was received is a leaf, whose gradient goes back to the stage before.
                if received is not None:
                    received.requires_grad_()
                output = forward(part, i, received)
                sending = None
                if part.has_head:
                    losses.append(output.detach())
                    output = output * scale
                else:
                    sending = self._send(output.detach(), stage, 1)
                passes[chunk, i] = ForwardPass(received, output, sending)
            else:
                # The output's memory may go once it has been sent.
                source, output, sending = passes.pop((chunk, i))
                if sending is not None:
                    sending.wait()
                before_backward(i == len(tokens) - 1)
                torch.autograd.backward(output, received)
                if source is not None:
                    assert source.grad is not None
                    self._send_and_keep(source.grad, stage, -1)
                    if len(self.sent) > most:
                        work, _ = self.sent.pop(0)
                        work.wait()

        self._run(actions, tokens, run_action)
        return losses

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
        # With sequence parallelism the stream is a tensor rank's share of all tokens, in one row.
        rows = (1, tokens.numel() // self.layout.tp) if self.sequence else tokens.shape
        buffer = torch.empty(*rows, self.hidden, dtype=self.dtype, device=tokens.device)
        dist.recv(buffer, self.rank_of(sender), group=self._lane(sender, way))
        return buffer

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
