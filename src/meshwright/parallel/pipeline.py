"""Running a pipeline schedule: each rank walks down its own list of actions and sends what the next stage waits for.

Hand-written because torch's executor knows neither changing numbers of micro-batches nor sums of gradients that begin
inside of a backward pass; its schedules are the oracle in the tests, and its zero-bubble lists are run here. A stage sends
the residual stream forward and its gradient back, through one group for each direction (and, where a rank's chunks make the
way go around or turn back, for that), so that messages arrive in the order in which they were sent and none waits behind
one that waits for it. A message is asked for when it is needed: asked for earlier, NCCL would wait for it on processors of the
GPU which the computation then lacks (2 % of a step).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import device as devices
from meshwright.errors import UserError
from meshwright.kernels.linear import Waiting, compute, later
from meshwright.parallel.layout import Layout
from meshwright.parallel.pipeline_schedule import OWN, V_SHAPED, Action, Kind, schedule, stages_of

if TYPE_CHECKING:
    from meshwright.data.loader import Batch
    from meshwright.model.gpt import GPT

TRIED = {
    "cpu": ("2.13",),
    devices.NVIDIA: ("2.11",),
}  # versions of torch whose zero-bubble lists were run here, by device

# A part of the network, a micro-batch and the stream that comes in: the stream that goes out, or at the end the loss.
Forward = Callable[["GPT", "Batch", Tensor | None], Tensor]


class Held(NamedTuple):
    """Of a micro-batch on its way: what came in, what went out, and whether that has been sent."""

    came: Tensor | None
    went: Tensor
    sent: Any


class Pipeline:
    """The stages of one rank: `parts`, one for each chunk of layers."""

    def __init__(
        self, layout: Layout, kind: Kind, parts: list[GPT], hidden: int, sequence: bool, dtype: torch.dtype
    ) -> None:
        """`hidden`, `sequence`, `dtype`: of the residual stream that is sent."""
        self.layout, self.kind, self.parts = layout, kind, parts
        self.hidden, self.sequence, self.dtype = hidden, sequence, dtype
        self.rank, self.size = layout.at("pp"), layout.pp
        self.ranks = next(ranks for ranks in layout.members("pp") if layout.rank in ranks)
        self.stages = stages_of(kind, self.rank, self.size, len(parts))
        self.handed: dict[tuple[int, int, int], Tensor] = {}  # from one stage of this rank to another

    def open(self, device: torch.device) -> None:
        """A first message on every way. NCCL connects two ranks then, for which the hosts of both wait: in one order, and not
        within a schedule, in which they would wait for one another."""
        x, ends = torch.zeros(1, device=device), self.size * len(self.parts) - 1
        for stage in (*range(0, ends, 2), *range(1, ends, 2)):
            for begin, way in ((stage, 1), (stage + 1, -1)):
                source, to = self.rank_of(begin), self.rank_of(begin + way)
                if source != to and self.rank == source:
                    dist.send(x, self.ranks[to], group=self._lane(begin, way))
                elif source != to and self.rank == to:
                    dist.recv(x, self.ranks[source], group=self._lane(begin, way))

    def train(
        self, batches: list[Batch], forward: Forward, scale: float, begins: Callable[[bool], None]
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches; returns the last stage's losses. `begins` is told before each backward
        pass whether it is its part's last one."""
        held: dict[tuple[int, int], Held] = {}
        losses: list[Tensor] = []
        returned: list[tuple[Any, Tensor]] = []
        waiting: dict[tuple[int, int], Waiting] = {}
        actions = listed(self.kind, self.size, self.rank, len(batches), len(self.parts))
        is_split = any(action.op in "IW" for action in actions)
        queue: Waiting = []

        def act(action: Action, came: Tensor | None) -> None:
            op, chunk, i = action
            part, stage = self.parts[chunk], self.stages[chunk]
            if op == "F":
                if came is not None:
                    came.requires_grad_()
                went = forward(part, batches[i], came)
                if part.last:
                    losses.append(went.detach())
                    went = went * scale
                held[chunk, i] = Held(came, went, None if part.last else self._send(went.detach(), stage, 1, i))
            elif op == "W":
                compute(waiting.pop((chunk, i)))
            else:
                first, went, sent = held.pop((chunk, i))
                if sent is not None:
                    sent.wait()
                begins(i == len(batches) - 1 and not is_split)
                torch.autograd.backward(went, came)
                if op == "I":
                    waiting[chunk, i] = list(queue)
                    queue.clear()
                else:
                    compute(queue)
                if first is not None:
                    assert first.grad is not None
                    work = self._send(first.grad, stage, -1, i)
                    if work is not None:
                        returned.append((work, first.grad))
                        forget_received(returned)

        with contextlib.ExitStack() as stack:
            if is_split:
                queue = stack.enter_context(later())
            self._run(actions, batches, act)
        for work, _ in returned:
            work.wait()
        return losses

    def evaluate(self, batches: list[Batch], forward: Forward) -> list[Tensor]:
        """Forward alone; returns the last stage's results."""
        results: list[Tensor] = []
        sent: list[tuple[Any, Tensor]] = []

        def act(action: Action, came: Tensor | None) -> None:
            part = self.parts[action.chunk]
            went = forward(part, batches[action.microbatch], came)
            if part.last:
                results.append(went)
                return
            work = self._send(went, self.stages[action.chunk], 1, action.microbatch)
            if work is not None:
                sent.append((work, went))
                forget_received(sent)

        order = [Action("F", chunk, i) for chunk in range(len(self.parts)) for i in range(len(batches))]
        self._run(order, batches, act)
        for work, _ in sent:
            work.wait()
        return results

    def _run(self, actions: list[Action], batches: list[Batch], act: Callable[[Action, Tensor | None], None]) -> None:
        for action in actions:
            act(action, self._receive(action, batches[action.microbatch]))

    def _receive(self, action: Action, batch: Batch) -> Tensor | None:
        """What an action needs from another stage, if anything."""
        part, stage = self.parts[action.chunk], self.stages[action.chunk]
        if action.op == "W" or (part.first if action.op == "F" else part.last):
            return None
        way = 1 if action.op == "F" else -1
        source = self.rank_of(stage - way)
        if source == self.rank:
            return self.handed.pop((stage, way, action.microbatch))
        rows = (1, batch.tokens.numel() // self.layout.tp) if self.sequence else batch.tokens.shape
        buffer = torch.empty(*rows, self.hidden, dtype=self.dtype, device=batch.tokens.device)
        dist.recv(buffer, self.ranks[source], group=self._lane(stage - way, way))
        return buffer

    def _send(self, x: Tensor, stage: int, way: int, microbatch: int) -> Any:
        to = self.rank_of(stage + way)
        if to == self.rank:
            self.handed[stage + way, way, microbatch] = x
            return None
        return dist.isend(x.contiguous(), self.ranks[to], group=self._lane(stage, way))

    def rank_of(self, stage: int) -> int:
        turn, place = divmod(stage, self.size)
        return self.size - 1 - place if turn and self.kind in V_SHAPED else place

    def _lane(self, sender: int, way: int) -> Any:
        """The group for messages from a stage to the next one, or back: one direction between two ranks each."""
        low = min(sender, sender + way)
        around = low >= self.size if self.kind in V_SHAPED else (low + 1) % self.size == 0
        return self.layout.groups[("forward" if way > 0 else "backward") + " around" * around]


def listed(kind: Kind, size: int, rank: int, microbatches: int, chunks: int) -> list[Action]:
    """The actions of a schedule, ours or torch's zero-bubble ones, whose lists are made here without a process group."""
    if kind in OWN:
        return schedule(kind, size, rank, microbatches, chunks)
    from torch.distributed.pipelining import schedules as theirs

    name = {"zero-bubble": "ScheduleInterleavedZeroBubble", "zbv": "ScheduleZBVZeroBubble"}[kind]
    made: Any = object.__new__(getattr(theirs, name))
    made.pp_group_size, made._n_microbatches = size, microbatches
    made._num_stages = made.num_stages = size * chunks
    made.n_local_stages, made.number_of_rounds = chunks, max(1, microbatches // size)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages_of(kind, rank, size, chunks))}
    found = [one for one in made._calculate_single_rank_operations(rank) if one is not None]
    return [Action(one.computation_type.value, chunk_of[one.stage_index], one.microbatch_index) for one in found]


def require_tried(kind: Kind, device: torch.device) -> None:
    """Torch's lists are no public interface: they are run where they have been tried."""
    version, tried = ".".join(torch.__version__.split(".")[:2]), TRIED.get(device.type, ())
    if kind not in OWN and version not in tried:
        where = f"with torch {' and '.join(tried)}" if tried else f"on {' and '.join(TRIED)} alone"
        raise UserError(
            f"--pipeline-schedule {kind} runs torch's own list, which is tried {where}; this is torch {torch.__version__} on "
            f"{device.type}: give --pipeline-schedule 1f1b"
        )


def forget_received(sent: list[tuple[Any, Tensor]]) -> None:
    """Free what has arrived, without waiting: the receiver may need this rank before it asks."""
    while sent and sent[0][0].is_completed():
        sent.pop(0)


def stages(make: Callable[[], GPT], layers: list[int], layout: Layout, kind: Kind = "1f1b") -> list[GPT]:
    """This rank's stages of the network: the whole of it, without the others' parts. `layers` of each stage, in order."""
    if layout.pp == 1:
        return [make()]
    parts = []
    for stage in stages_of(kind, layout.at("pp"), layout.pp, len(layers) // layout.pp):
        part, begin = make(), sum(layers[:stage])
        part.keep(range(begin, begin + layers[stage]), stage == 0, stage == len(layers) - 1)
        parts.append(part)
    return parts
