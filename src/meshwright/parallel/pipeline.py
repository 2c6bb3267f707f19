"""Running a pipeline schedule: each rank walks down its own list of actions and sends what the next stage waits for.

Hand-written because torch's executor knows neither changing numbers of micro-batches nor sums of gradients that begin
inside of a backward pass; its schedules are the oracle in the tests, and its zero-bubble lists are run here. A stage sends
the residual stream forward and its gradient back, through one group for each direction (and, where a rank's chunks make the
way go around or turn back, for that), so that messages arrive in the order in which they were sent and none waits behind
one that waits for it. What the next action needs is asked for before the present one is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import UserError
from meshwright.kernels.linear import Waiting, compute, later
from meshwright.parallel.layout import Layout
from meshwright.parallel.pipeline_schedule import OWN, V_SHAPED, Action, Kind, schedule

if TYPE_CHECKING:
    from meshwright.data.loader import Batch
    from meshwright.model.gpt import GPT

TRIED = ("2.13",)  # versions of torch whose zero-bubble lists were run here

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
        self, layout: Layout, kind: Kind, parts: list[GPT], shape: Callable[[Batch], tuple[int, ...]], dtype: torch.dtype
    ) -> None:  # fmt: skip
        self.layout, self.kind, self.parts, self.shape, self.dtype = layout, kind, parts, shape, dtype
        self.rank, self.size = layout.at("pp"), layout.pp
        self.ranks = next(ranks for ranks in layout.members("pp") if layout.rank in ranks)
        self.stages = stages_of(kind, self.rank, self.size, len(parts))
        self.handed: dict[tuple[int, int, int], Tensor] = {}  # from one stage of this rank to another

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
        waiting = self._ask(actions[0], batches)
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            mine, waiting = waiting, self._ask(following, batches) if following else None
            if mine is not None:
                mine[0].wait()
            stage = self.stages[action.chunk]
            way = 1 if action.op == "F" else -1
            act(action, mine[1] if mine else self.handed.pop((stage, way, action.microbatch), None))

    def _ask(self, action: Action, batches: list[Batch]) -> tuple[Any, Tensor] | None:
        """Begin to receive what an action needs from another rank."""
        part, stage = self.parts[action.chunk], self.stages[action.chunk]
        if action.op == "W" or (part.first if action.op == "F" else part.last):
            return None
        way = 1 if action.op == "F" else -1
        source = self.rank_of(stage - way)
        if source == self.rank:
            return None
        batch = batches[action.microbatch]
        buffer = torch.empty(self.shape(batch), dtype=self.dtype, device=batch.tokens.device)
        return dist.irecv(buffer, self.ranks[source], group=self._lane(stage - way, way)), buffer

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


def stages_of(kind: Kind, rank: int, size: int, chunks: int) -> list[int]:
    """The numbers of a rank's stages."""
    return [rank, 2 * size - 1 - rank] if kind in V_SHAPED else [chunk * size + rank for chunk in range(chunks)]


def listed(kind: Kind, size: int, rank: int, microbatches: int, chunks: int) -> list[Action]:
    """The actions of a schedule, ours or torch's zero-bubble ones, whose lists are made here without a process group."""
    if kind in OWN:
        return schedule(kind, size, rank, microbatches, chunks)
    from torch.distributed.pipelining import schedules as theirs

    version = ".".join(torch.__version__.split(".")[:2])
    if version not in TRIED:
        raise UserError(
            f"--pipeline-schedule {kind} runs torch's own list, which is tried with torch {' and '.join(TRIED)}; this is "
            f"{torch.__version__}: give --pipeline-schedule 1f1b"
        )
    name = {"zero-bubble": "ScheduleInterleavedZeroBubble", "zbv": "ScheduleZBVZeroBubble",
            "dualpipev": "ScheduleDualPipeV"}[kind]  # fmt: skip
    made: Any = object.__new__(getattr(theirs, name))
    made.pp_group_size, made._n_microbatches, made._num_stages, made.num_stages = (
        size,
        microbatches,
        size * chunks,
        size * chunks,
    )
    made.n_local_stages, made.number_of_rounds = chunks, max(1, microbatches // size)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages_of(kind, rank, size, chunks))}
    actions = []
    for action in made._calculate_single_rank_operations(rank):
        for one in (getattr(action, "sub_actions", None) or [action]) if action is not None else ():
            op: Any = one.computation_type.value
            actions.append(Action(op, chunk_of[one.stage_index], one.microbatch_index))
    return actions


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
