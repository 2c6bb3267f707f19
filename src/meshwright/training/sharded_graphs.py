"""CUDA graphs of the passes with ZeRO 3: torch's fully_shard gathers and frees weights within them.

All that fully_shard does between the passes of a step, it does in each step alike, on streams that
begin and end with the step's own. So whenever a pass is captured or replayed, it must begin with no
weight gathered, as it also ends. The update follows as usual: its kernels are few, and torch's
optimizers take numbers from the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwright.config.problem import SettingsError
from meshwright.data.loader import Batch
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.training.graphs import Captured, Graphs, StepShape, shape_of
from meshwright.training.micro_step import (
    Network,
    Position,
    forward_backward,
    untimed,
    update_weights,
)


@dataclass
class CapturedPasses(Captured):
    """The passes of one kind of step, with the gradients that they write."""

    gradients: list[Any]


class ShardedGraphs(Graphs):
    """The captured passes of a run whose weights are sharded."""

    has_begun = False  # whether a capture has run any of fully_shard's code

    def replay(
        self, net: Network, batches: list[Batch], numbers: Tensor, counted: Tensor | None, seed: int
    ) -> bool:
        if not super().replay(net, batches, numbers, counted, seed):
            return False
        kind = shape_of(batches, self.most_pieces)
        assert kind is not None
        captured: Any = self.captured[kind]
        # A step that ran as usual has left gradients of its own.
        store: Any = net.store
        for parameter, gradient in zip(store.parameters.values(), captured.gradients, strict=True):
            parameter.grad = gradient
        heartbeat.enter("optimizer")
        update_weights(net, captured.numbers if store.reads_tensors else numbers[-1], self.totals)
        return True

    def find(self, net: Network, batches: list[Batch], seed: int) -> Captured | None:
        # A forward pass without a backward pass, as in a validation, leaves its last weights
        # gathered. A capture would take them as they are; a replay would leave them out of date.
        self.store.forget_gathered()
        return super().find(net, batches, seed)

    def capture(self, kind: StepShape, net: Network, batches: list[Batch], seed: int) -> None:
        self.has_begun = False
        super().capture(kind, net, batches, seed)
        if self.why_off and self.has_begun:
            # fully_shard waits for the end of the pass that it was in: later ones would have no
            # gradients.
            raise SettingsError(
                f"CUDA graphs: {self.why_off}, and ZeRO 3 cannot go on after that; "
                "start again with {cuda_graphs=off}",
                everywhere=True,
            )

    def record(self, net: Network, batches: list[Batch], seed: int) -> Captured:
        self.has_begun = True
        passes = super().record(net, batches, seed)
        store: Any = net.store
        gradients = [parameter.grad for parameter in store.parameters.values()]
        return CapturedPasses(passes.batch, passes.numbers, passes.replays, gradients)

    @staticmethod
    def run_piece(
        net: Network, seed: int, batch: Batch, scalars: Tensor, totals: Tensor, position: Position
    ) -> None:
        forward_backward(net, seed, untimed, batch, scalars, totals, position)
