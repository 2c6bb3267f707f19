"""AdamW over flat buffers, which reads all of a step's numbers on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.base import device as devices
from meshwright.config.schema import Optimizer
from meshwright.kernels import adamw
from meshwright.kernels.moments import Place, make_block_draws
from meshwright.optim.rules import (
    GradientCheck,
    ParamGroup,
    StepScalars,
    adamw_constants,
    is_rounded,
    state_dtype,
)


class FlatAdamW:
    """The state of AdamW for some ranges of flat buffers, and its update in one launch.

    A range's kind is a number of `param_groups`. `flats` are the summed gradients, the masters, and
    the weights if they are a copy of these. `places` are those of the parameters in the ranges, and
    the blocks of each; they are for a state of fewer bits.
    """

    def __init__(
        self,
        o: Optimizer,
        param_groups: list[ParamGroup],
        ranges: list[adamw.FlatRange],
        flats: tuple[Tensor, Tensor, Tensor | None],
        places: list[tuple[Place, int]],
    ) -> None:
        gradients, master, weights = flats
        device = master.device
        sizes = [r.end - r.begin for r in ranges]
        self.settings = adamw_constants(o)
        kinds = [(t.rate, t.decay) for t in param_groups]
        self.constants = adamw.make_constants(self.settings, o.clip_grad, device, kinds)
        self.table = adamw.make_table(ranges, device)
        self.step = torch.zeros((), device=device)
        # One tensor for all ranges, one after the other; each range's state is a view of it.
        exp_avg, exp_avg_sq = (
            torch.zeros(sum(sizes), dtype=state_dtype(o, key, master.dtype), device=device)
            for key in ("exp_avg", "exp_avg_sq")
        )
        self.draws = make_block_draws(places, self.step) if is_rounded(o) else None
        self.buffers = adamw.AdamWBuffers(gradients, exp_avg, exp_avg_sq, master, weights)
        # The state has the ranges one after the other, each a view that a checkpoint may fill.
        parts = zip(
            ranges, torch.split(exp_avg, sizes), torch.split(exp_avg_sq, sizes), strict=True
        )
        self.states = {r: {"exp_avg": m, "exp_avg_sq": v} for r, m, v in parts}
        self.counted = self.table[:, :0]  # until `count` says which

    def count(self, ranges: list[adamw.FlatRange]) -> None:
        """Count these ranges in the norm, whatever their rule."""
        self.counted = adamw.make_table(ranges, self.step.device)

    def squares(self) -> Tensor:
        """Return the sum of squares of the gradients that count."""
        return adamw.sum_squares(self.buffers.gradients, self.counted)

    def clip_and_check(self, squares: Tensor, loss: Tensor, scalars: StepScalars) -> GradientCheck:
        """Return the clip factor and whether the step is applied; count it if so."""
        if not isinstance(scalars.lr, Tensor):
            # In one transfer; a CUDA graph brings tensors of its own.
            on_host = torch.tensor(scalars, dtype=torch.float64)
            scalars = StepScalars(*devices.send(on_host, self.step.device).unbind())
        numbers = (squares, loss, *scalars)
        decision = adamw.decide(self.constants, numbers, self.step)  # type: ignore[arg-type]
        norm = decision[adamw.NORM]
        clip_factor = decision[adamw.SHRINK]
        is_finite = decision[adamw.FINITE] > 0
        return GradientCheck(norm, clip_factor, is_finite, decision)

    def update(self, check: GradientCheck) -> None:
        """Update masters, state and weights."""
        assert check.decision is not None
        adamw.update_blocks(self.buffers, self.table, self.settings, check.decision, self.draws)
