"""The update of the parameters from their summed gradients, whichever way they are stored.

`FlatStore` (flat.py, ZeRO 0 to 2) and `FullyShardedStore` (fsdp.py, ZeRO 3) decide where weights,
gradients and optimizer state are in memory, and how the ranks sum gradients.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.base import device as devices
from meshwright.config.schema import Model, Optimizer
from meshwright.kernels import clock, gradients
from meshwright.kernels.fp8 import Scales
from meshwright.kernels.moments import Place, Rounding, place_of
from meshwright.optim import rules
from meshwright.optim.adamw import FlatAdamW
from meshwright.optim.average import MovingAverage
from meshwright.optim.muon import Spread
from meshwright.optim.own_rule import OwnRule
from meshwright.optim.rule_table import AVERAGE, form_of
from meshwright.parallel import shard
from meshwright.parallel.layout import Layout
from meshwright.parallel.owner_ranks import OwnerRanks, SharedParameter, Sharers
from meshwright.parallel.symmetric_memory import BufferMapper

# times of a step: when a rank has its own gradients, and when all ranks have met
HAS_GRADIENTS = 0
ALL_MET = 1
DRAWING_THREADS = 16  # most tensors of initial weights that are drawn at once
DRAWN_BYTES = 8 << 30  # most bytes of initial weights that are drawn at once
Named = dict[str, tuple[tuple[int, ...], list[shard.Box], Tensor]]
Draw = Callable[[Iterable[tuple[str, Tensor]]], None]
RuleState = dict[str, Tensor]
SAVED_AS = {key: saved_as for names in rules.STATE.values() for key, saved_as in names.items()} | {
    AVERAGE: AVERAGE
}


class Member(NamedTuple):
    """A parameter, or a part of one, as its optimizer has it."""

    name: str
    values: nn.Parameter
    state: RuleState
    place: Place  # of its first element
    copy: Tensor | None = None  # its weights in the network's format, if the update writes them


Updated = dict[rules.ParamGroup, list[Member]]


class UpdateRange(NamedTuple):
    """A range of this rank's elements that are updated and counted alike."""

    is_counted: bool  # in norms; False for a copy of what another rank counts
    begin: int  # offset in the sharded buffers
    master: nn.Parameter  # its .grad holds the gradients on the device of the update
    state: RuleState
    rule: rules.Rule = "adamw"
    target: int = 0  # offset of its weights in the full buffer


@dataclass(frozen=True)
class StoreSpec:
    """The settings of a run that a parameter store needs besides the model."""

    optimizer: Optimizer
    dtype: torch.dtype  # of weights and activations
    device: torch.device
    vocab: int  # true size; rows beyond it are padding
    offload: bool = False  # keep masters and optimizer state in host memory
    layout: Layout = Layout()
    zero: int = 0  # ZeRO stage
    sequence_parallel: bool = False
    tied: bool = False  # the first and last pipeline stages share the token table
    mapper: BufferMapper | None = None  # for sums by copy engines
    model: Model | None = None  # of a GPT, whose parameters' names and heads the update knows


class Store:
    """Base of the parameter stores: one update from summed gradients, sharded or not.

    Norm of the gradients over all ranks -> clip factor -> fused update, which also unscales and
    clips. If the norm or the loss is not finite, nothing changes. The device decides this without
    synchronising with the host.
    """

    update_ranges: list[UpdateRange]
    updates: dict[rules.ParamGroup, torch.optim.Optimizer]
    shapes: dict[str, torch.Size]  # of this tensor rank's part of each parameter
    flat: FlatAdamW | None = None  # the update of what AdamW owns, where Triton runs
    average: MovingAverage | None = None  # of the masters: --ema
    # of updates, float32 [] on their device, where torch lacks our AdamW
    counter: Tensor | None = None
    # whether `step` takes tensors as its numbers, so that a CUDA graph can hold it
    reads_tensors = False

    def __init__(
        self, spec: StoreSpec, replicated: tuple[str, ...], is_sharded: bool = True
    ) -> None:
        self.layout = spec.layout
        self.model = spec.model
        self.is_sharded = is_sharded
        self.sharding = shard.Sharding(
            spec.layout, spec.vocab, spec.sequence_parallel, spec.tied, replicated
        )
        self.optimizer = spec.optimizer
        self.dtype = spec.dtype
        self.device = spec.device
        self.offload = spec.offload
        self.full_dtype = torch.float64 if spec.dtype is torch.float64 else torch.float32
        self.update_device = torch.device("cpu") if spec.offload else spec.device
        self.scales: Scales | None = None  # of fp8 products
        # Sees or replaces the summed gradients of each step.
        self.observer: Callable[[], None] | None = None
        # Of the last step, in ns.
        self.times = clock.new_times(2, spec.device) if spec.layout.world > 1 else None

    # Weights

    def initialise(self, draw: Draw, threads: int = 1) -> None:
        """Draw full tensors and keep this rank's part, so that no layout changes a value.

        With several threads each draws one tensor at a time; there are fewer threads where the
        tensors would need more than DRAWN_BYTES on the host. With one, tensors are drawn in order,
        eight at a time.
        """
        self._draw_masters(draw, threads)
        if self.average is not None:
            self.average.restart()

    def _draw_masters(self, draw: Draw, threads: int) -> None:
        shapes = {
            name: self.sharding.full_shape(name, shape) for name, shape in self.shapes.items()
        }

        def fill(names: Iterable[str]) -> None:
            full = {name: torch.zeros(shapes[name]) for name in names}
            draw(full.items())
            for name, tensor in full.items():
                self.set_master(name, self.sharding.cut(name, tensor))

        if threads == 1:
            names = iter(shapes)
            while batch := list(itertools.islice(names, 8)):
                fill(batch)
            return
        # Large ones first, so that no thread is left with one at the end.
        largest_first = sorted(shapes, key=lambda name: -math.prod(shapes[name]))
        most_bytes = 4 * math.prod(shapes[largest_first[0]]) if shapes else 0
        threads = max(1, min(threads, DRAWN_BYTES // max(most_bytes, 1)))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(torch.no_grad()(fill), ([name] for name in largest_first)))
        devices.synchronize(self.update_device)

    def set_master(self, name: str, tensor: Tensor) -> None:
        """Copy this rank's part of `tensor`, which is this tensor rank's cut of the parameter."""

    def weights_by_name(self) -> dict[str, Tensor]:
        """Return the weights that this rank holds, by parameter."""
        raise NotImplementedError

    # Update

    def make_updates(self, members: Updated) -> None:
        """Create torch's optimizers and their state, which a checkpoint may then fill."""
        self.updates = {}
        if rules.is_beyond_torch(self.optimizer):
            self.counter = (
                torch.zeros((), device=self.update_device) if self.flat is None else self.flat.step
            )
        for param_group, updated in members.items():
            spread = self._spread(updated) if param_group.rule == "muon" else None
            parameters = [member.values for member in updated]
            update = rules.make_optimizer(
                self.optimizer, param_group.rule, parameters, self.counter, spread
            )
            self.updates[param_group] = update
            if self.counter is not None and rules.is_rounded(self.optimizer):
                assert isinstance(update, OwnRule)
                update.rounding = Rounding(
                    {member.values: member.place for member in updated}, self.counter
                )
            for _, p, state, *_ in updated:
                update.state[p] = dict(state)
                if param_group.rule == "adamw" and self.counter is None:
                    update.state[p]["step"] = torch.zeros(
                        (), dtype=torch.float32, device=self.update_device
                    )
        self.reads_tensors = not self.offload and all(
            isinstance(x, OwnRule) for x in self.updates.values()
        )

    def _spread(self, members: list[Member]) -> Spread:
        """Return the forms of Muon's parameters, and their owners if several ranks share them."""
        layout = self.layout
        group = self.layout.group("matrices")
        names = [name for name, *_ in members]
        copies = [member.copy for member in members if member.copy is not None] or None
        full = [self.sharding.full_shape(name, self.shapes[name]) for name in names]
        if group is None:  # matrix by matrix, also of a gate
            full = [tuple(p.shape) for _, p, *_ in members]
        forms = [
            form_of(self.optimizer, self.model, name, shape)
            for name, shape in zip(names, full, strict=True)
        ]
        if group is None:
            return Spread(forms, self.device, copies=copies)
        at = layout.at("shard", "cp", "tp")
        data = layout.size("shard", "cp")
        sharers = Sharers(group, at, data, layout.tp, self.is_sharded, self.boxes_of)
        parameters = [
            SharedParameter(name, form, self.sharding.is_sharded(name))
            for name, form in zip(names, forms, strict=True)
        ]
        owners = OwnerRanks(parameters, sharers, self.optimizer.muon_num_ns_steps)
        return Spread(forms, self.device, owners, copies)

    def place_of(self, name: str) -> Place:
        """Return where this tensor rank's part of a parameter is in the full one."""
        shape = self.shapes[name]
        full = self.sharding.full_shape(name, shape)
        offsets = self.sharding.offsets(name, shape, self.layout.at("tp"))
        return place_of(name, full, offsets, shape)

    def new_state(self, rule: rules.Rule, like: Tensor) -> RuleState:
        """Return the state of a rule before the first step."""
        formats = {
            key: rules.state_dtype(self.optimizer, key, self.full_dtype)
            for key in rules.STATE[rule]
        }
        return {key: torch.zeros_like(like, dtype=dtype) for key, dtype in formats.items()}

    def boxes_of(self, name: str, data: int, tensor: int) -> list[shard.Box]:
        """Return the part of a parameter that a rank of this replica and stage updates."""
        raise NotImplementedError

    def finish_sums(self) -> None:
        """Wait until the gradients are summed over the ranks."""

    def publish_weights(self, has_all: bool = True) -> None:
        """Copy masters to weights after a step, an initialisation or a load.

        Without `has_all`, AdamW over flat buffers has written its own.
        """

    def summed(self, elements: UpdateRange) -> Tensor:
        """Return a range's summed gradients, on the training device."""
        assert elements.master.grad is not None
        return elements.master.grad

    def take_gradients(self) -> None:
        """Copy the summed gradients to the device of the update."""

    def begin_backward(self, is_last: bool) -> None:
        """Prepare for a backward pass; `is_last`: the step's last one through its layers."""

    def clear_gradients(self) -> None:
        """Prepare for a step, whose first gradients overwrite those of the last one."""
        raise NotImplementedError

    def forget_collectives(self) -> None:
        """Drop collectives that a failed capture of a CUDA graph recorded: they never ran."""

    def wait_for_weights(self) -> None:
        """Wait until no collective uses the weights."""

    def renew_weights(self) -> None:
        """Publish masters that something else than a step has changed."""
        self.forget_gathered()
        self.publish_weights()
        self.wait_for_weights()  # a CUDA graph cannot

    def forget_gathered(self) -> None:
        """Free weights that were gathered for a pass, which a load has made out of date."""

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of each summed gradient, without padded rows of the vocabulary."""
        raise NotImplementedError

    def named_state(
        self, with_optimizer: bool = True, to_save: bool = False, with_average: bool | None = None
    ) -> Named:
        """Return this rank's part of a checkpoint, with the vocabulary at its true size.

        Name -> (global shape, boxes as (offsets, sizes), tensor). `to_save` leaves out what another
        rank saves. The average of --ema comes with the optimizer's state, unless `with_average`
        says otherwise.
        """
        out: Named = {}
        with_average = with_optimizer if with_average is None else with_average
        for name in self.shapes:
            if to_save and not self.sharding.is_counted(name):
                continue
            shape, boxes, master, state = self.state_of(name)
            out[name] = shape, boxes, master
            out |= {
                f"{name}/{SAVED_AS[key]}": (shape, boxes, values)
                for key, values in state.items()
                if (with_average if key == AVERAGE else with_optimizer)
            }
        return out

    def state_of(self, name: str) -> tuple[tuple[int, ...], list[shard.Box], Tensor, RuleState]:
        """Return a parameter's full shape, and the boxes, masters and state of this rank's part.

        The state includes the average of --ema.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, scalars: rules.StepScalars, sums: Tensor | None = None) -> Tensor:
        """Clip and update; return the unclipped norm.

        The gradients arrive multiplied by the scale, which is divided out. `sums`, whose first
        element is the loss, is replaced by its sum over all ranks. Without a finite norm and loss,
        nothing is updated.
        """
        self.note_time(HAS_GRADIENTS)
        self.finish_sums()
        if self.observer is not None:
            self.observer()
        flat = self.flat
        squares = self.sum_of_squares()
        sums = squares[None] if sums is None else sums
        if self.layout.world > 1:
            both = torch.cat([sums.to(squares).view(-1), squares[None]])
            dist.all_reduce(both)
            self.note_time(ALL_MET)
            sums.copy_(both[:-1].view_as(sums))
            squares = both[-1]
        loss = sums.view(-1)[0]
        if flat is None:
            clip = self.optimizer.clip_grad
            check = rules.GradientCheck(
                *gradients.clip_and_check(squares, loss, scalars.scale, clip, self.full_dtype)
            )
            if self.counter is not None:
                self.counter += check.is_finite.to(self.update_device)
        else:
            check = flat.clip_and_check(squares, loss, scalars)
        self.take_gradients()
        self.wait_for_weights()  # which kernels of the update write
        for (_, rate, decay), update in self.updates.items():
            update.param_groups[0].update(
                lr=scalars.lr * rate, weight_decay=scalars.weight_decay * decay
            )
            self._update(update, check, scalars.scale)
        if flat is not None:
            flat.update(check)
        if self.scales is not None:  # the new weights are then cast with new scales
            self.scales.update()
        self.publish_weights(flat is None)
        if self.average is not None:
            self.average.update(check.is_finite)
        return check.norm

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squares of this rank's summed gradients that count."""
        if self.flat is not None:
            return self.flat.squares()
        return self.squares([self.summed(p) for p in self.update_ranges if p.is_counted])

    def note_time(self, moment: int) -> None:
        if self.times is not None:
            clock.stamp(self.times, moment)

    def _update(
        self, update: torch.optim.Optimizer, check: rules.GradientCheck, scale: float | Tensor
    ) -> None:
        # torch's fused kernels divide by a float32, too coarse for float64 tests.
        if not isinstance(update, OwnRule) and self.full_dtype is torch.float64:
            # the gaps between parameters stay 0
            factor = (check.shrink / scale).where(check.is_finite, 0.0)
            torch._foreach_mul_(
                [p.grad for p in update.param_groups[0]["params"]], factor.to(self.update_device)
            )
        else:  # torch's interface to its fused kernels: divide by grad_scale, skip if found_inf
            update.grad_scale = (scale / check.shrink).to(self.update_device)  # type: ignore[attr-defined]
        update.found_inf = (~check.is_finite).float().to(self.update_device)  # type: ignore[attr-defined]
        update.step()

    def _adam_steps(self) -> list[Tensor]:
        if self.flat is not None:
            return [self.flat.step]
        if self.counter is not None:
            return [self.counter]
        return [
            s["step"]
            for t, u in self.updates.items()
            if t.rule == "adamw"
            for s in u.state.values()
        ]

    @property
    def steps(self) -> int:
        """Adam's t: the number of successful steps, kept on the device, which decides on skips.

        Other rules count them only with a cautious decay or a state of fewer bits.
        """
        return int(next((step.item() for step in self._adam_steps()), 0))

    @steps.setter
    def steps(self, value: int) -> None:
        for step in self._adam_steps():
            step.fill_(value)

    # The average of --ema

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the network compute with the average in this block; all ranks enter it together.

        Afterwards masters, weights and scales of fp8 are what they were, bit for bit. An error ends
        the run, and other ranks may not be there to publish weights: then nothing is put back.
        """
        with contextlib.nullcontext() if self.scales is None else self.scales.trial(is_shared=True):
            self._swap_average()
            yield
        self._swap_average()

    @torch.no_grad()
    def _swap_average(self) -> None:
        assert self.average is not None
        self.wait_for_weights()
        self.average.swap()
        self.renew_weights()

    # Scales of fp8

    @property
    def is_settled(self) -> bool:
        """Whether the next step runs the same code as later ones, as CUDA graphs must."""
        return self.scales is None or self.scales.is_settled

    def set_scales(self, scales: Scales | None) -> None:
        """Update the scales of the products with each step, alike on ranks with the same layers."""
        self.scales = scales
        groups = [
            group for name in ("gradients", "tp") if (group := self.layout.group(name)) is not None
        ]

        def combine(amax: Tensor) -> None:
            for group in groups:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group)

        if scales is not None and groups:
            scales.combine = combine
        # Ranks of these groups may have parts of one tensor of a micro-batch.
        sharing = [group for name in ("tp", "cp") if (group := self.layout.group(name)) is not None]

        def combine_parts(amax: Tensor) -> None:
            for group in sharing:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group)

        if scales is not None and sharing:
            scales.combine_parts = combine_parts

    # Statistics for the log

    def count_zero_gradients(self) -> Tensor:
        """Count the gradients that are exactly 0, without the gaps between parameters."""
        counts = [
            torch.sum(x == 0) for name, x in self.each_gradient() if self.sharding.is_counted(name)
        ]
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        return self._sum_over_ranks(
            torch.stack([x.to(none) for x in counts]).sum() if counts else none
        )

    def weight_norm(self) -> Tensor:
        squares = self.squares([p.master.detach() for p in self.update_ranges if p.is_counted])
        return self._sum_over_ranks(squares).sqrt()

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        if self.layout.world > 1:
            dist.all_reduce(x)
        return x

    def squares(self, flats: list[Tensor]) -> Tensor:
        """Return the sum of squares in float64.

        On a CPU torch adds float32 squares sequentially, which loses a percent over a hundred
        million elements, so the norms of short rows are taken first there.
        """
        if not flats:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        if flats[0].device.type != "cpu":
            return torch.stack(torch._foreach_norm(flats)).double().square().sum()
        norms: list[Tensor] = []
        for x in (x.flatten() for x in flats):
            rows = len(x) // shard.ALIGN
            rest = x[len(x) - len(x) % shard.ALIGN :]
            norms += [
                x[: rows * shard.ALIGN].view(rows, shard.ALIGN).norm(dim=1),
                rest.norm()[None],
            ]
        return torch.cat(norms).double().square().sum().to(self.device)
