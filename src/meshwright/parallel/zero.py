"""The parameter store: every weight, gradient and optimizer number in a few flat buffers, whole or divided (ZeRO 0 to 2).

Hand-written because torch keeps one small tensor per weight, while everything that follows the backward pass is fastest,
simplest to shard and simplest to save as one long vector:

    weights    [n]      the model's parameters are views of this (bfloat16, float16, float32 or float64)
    gradients  [n]      float32 (float64 in tests); each micro-batch is added in place
    share      [n / r]  of those gradients, summed over the ranks, this rank's part; without ZeRO, `gradients` itself
    master     [n / r]  float32; the same buffer as `weights` when the formats are equal and nothing is divided
    state      [n / r]  what the update rule remembers: exp_avg and exp_avg_sq, or a momentum

The vector is made of buckets, one for each layer and one for each part outside of the layers. As soon as the last
micro-batch has left its gradients in a bucket, its sum over the data-parallel ranks begins, while the backward pass goes on:

    ZeRO 0   all-reduce of the bucket                                  every rank updates everything
    ZeRO 1   reduce-scatter: of each bucket a rank gets one r-th part  it updates that, and new weights are all-gathered,
    ZeRO 2   the same after every micro-batch, so that whole            which the next forward pass waits for layer by layer
             gradients exist of three buckets at most

With `offload` masters and state lie in host memory, and the update is made there. Every parameter starts at a multiple of
ALIGN numbers, so that matrix products read aligned memory; the gaps stay 0.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.model.gpt import GPT
from meshwright.optim import rules
from meshwright.parallel import comm, shard
from meshwright.parallel.layout import Layout
from meshwright.parallel.parts import Parts
from meshwright.settings.schema import Optimizer

ALIGN = 128
Named = dict[str, tuple[tuple[int, ...], list[shard.Box], Tensor]]
Draw = Callable[[Iterable[tuple[str, Tensor]]], None]


class Kind(NamedTuple):
    """Parameters that are updated and counted alike."""

    rule: rules.Rule
    decays: bool
    copied: bool  # every tensor rank holds all of it


@dataclass
class Bucket:
    """Consecutive numbers of the flat buffers."""

    begin: int
    partial: bool  # the tensor ranks' gradients are to be summed as well
    size: int = 0
    spans: dict[str, tuple[int, torch.Size]] = field(default_factory=dict)  # name -> offset in the bucket, shape
    kinds: list[tuple[Kind, int, int]] = field(default_factory=list)  # and the offsets between which they lie
    gradients: Tensor | None = None  # whole
    seen: set[str] = field(default_factory=set)  # gradients that have come in this backward pass
    sums: list[tuple[Any, Tensor | None]] = field(default_factory=list)  # under way
    done: bool = False  # summed in this step
    gathering: Any = None  # new weights under way


class Piece(NamedTuple):
    """Numbers of this rank, all of one kind."""

    counted: bool  # in norms: a copy of what another rank counts is not
    begin: int  # in the buffers of parts, if there are
    master: nn.Parameter  # its .grad: the gradients where the update is made
    state: dict[str, Tensor]


@dataclass(frozen=True)
class StoreSpec:
    """Everything a parameter store needs to know about a run besides the model."""

    optimizer: Optimizer
    dtype: torch.dtype  # of weights and activations
    device: torch.device
    vocab: int  # true size; rows beyond it are padding
    offload: bool = False  # keep masters and optimizer state in host memory
    layout: Layout = Layout()
    zero: int = 0  # ZeRO stage
    sequence_parallel: bool = False
    tied: bool = False  # the first and last pipeline stages share the token table


class Store(Parts):
    """What every parameter store does alike, and does last: one update from summed gradients, whole or divided.

    Norm of the gradients over all ranks -> clip factor -> torch's fused update, which also unscales and clips. A non-finite
    norm or loss leaves every number as it was, on the device, without asking the host (Muon, which torch has not fused, must
    ask).
    """

    pieces: list[Piece]
    updates: dict[tuple[rules.Rule, bool], torch.optim.Optimizer]  # by rule, and whether weights decay

    def __init__(self, spec: StoreSpec, replicated: tuple[str, ...]) -> None:
        super().__init__(spec.layout, spec.vocab, spec.sequence_parallel, spec.tied, replicated)
        self.optimizer, self.dtype, self.device, self.offload = spec.optimizer, spec.dtype, spec.device, spec.offload
        self.full = torch.float64 if spec.dtype is torch.float64 else torch.float32
        self.home = torch.device("cpu") if spec.offload else spec.device

    # Weights

    shapes: dict[str, torch.Size]  # of this rank's tensor part of each parameter

    def initialise(self, draw: Draw) -> None:
        """Fill the masters by drawing whole tensors, of which this rank keeps its part: no layout changes a value."""
        names = iter(self.shapes)
        while some := list(itertools.islice(names, 8)):  # drawn by as many threads
            whole = {name: torch.zeros(self.whole_shape(name, self.shapes[name])) for name in some}
            draw(whole.items())
            for name, tensor in whole.items():
                self.keep(name, self.cut(name, tensor))

    def keep(self, name: str, tensor: Tensor) -> None:
        """This rank's part of a tensor, of which the tensor ranks' parts are cut already, as its masters."""
        raise NotImplementedError

    # The update

    def make_updates(
        self, members: dict[tuple[rules.Rule, bool], list[tuple[nn.Parameter, dict[str, Tensor]]]]
    ) -> None:
        """torch's optimizers, with a state made now and not in the first step, so that a checkpoint can be loaded into it."""
        self.updates = {}
        for (rule, decays), updated in members.items():
            update = self.updates[rule, decays] = rules.make(self.optimizer, rule, [p for p, _ in updated])
            for p, state in updated:
                update.state[p] = dict(state)
                if rule == "adamw":
                    update.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=self.home)

    def finish_sums(self) -> None:
        """Wait until the gradients are summed over the ranks."""
        raise NotImplementedError

    def publish_weights(self) -> None:
        """Masters to weights, after a step, an initialisation or a load."""
        raise NotImplementedError

    def summed(self, piece: Piece) -> Tensor:
        """A piece's gradients, on the device."""
        assert piece.master.grad is not None
        return piece.master.grad

    def take_gradients(self) -> None:
        """To where the update is made."""

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of each parameter's summed gradient, without rows beyond the true vocabulary."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, scale: float, told: Tensor | None = None) -> Tensor:
        """Clip and update; the gradients carry the loss scale. `told`, numbers with the loss first, become their sums over all
        ranks. Returns the unclipped norm; no update if it or the loss is not finite."""
        self.finish_sums()
        squares = self.squares([self.summed(p) for p in self.pieces if p.counted])
        told = squares[None] if told is None else told
        if self.layout.world > 1:
            both = torch.cat([told.to(squares).view(-1), squares[None]])
            dist.all_reduce(both)
            told.copy_(both[:-1].view_as(told))
            squares = both[-1]
        norm = (squares.sqrt() / scale).to(self.full)
        shrink = (
            norm.new_ones(())
            if self.optimizer.clip_grad == 0
            else (self.optimizer.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        )
        finite = norm.isfinite() & told.view(-1)[0].isfinite()
        self.take_gradients()
        for (rule, decays), update in self.updates.items():
            self._update(rule, update, lr, weight_decay if decays else 0.0, shrink, scale, finite)
        self.publish_weights()
        return norm

    def _update(
        self,
        rule: rules.Rule,
        update: torch.optim.Optimizer,
        lr: float,
        wd: float,
        shrink: Tensor,
        scale: float,
        finite: Tensor,
    ) -> None:
        settings = update.param_groups[0]
        settings["lr"], settings["weight_decay"] = lr, wd
        # Muon is not fused; and the fused kernels' divisor is float32, too coarse for float64's tests.
        if rule == "muon" or self.full is torch.float64:
            if rule == "muon" and not finite:
                return
            factor = (shrink / scale).where(finite, 0.0)  # the gaps between parameters stay 0
            torch._foreach_mul_([p.grad for p in settings["params"]], factor.to(self.home))
        else:  # torch's own way of handing both to a fused kernel, which divides by grad_scale and skips on found_inf
            update.grad_scale = (scale / shrink).to(self.home)  # type: ignore[attr-defined]
        if rule != "muon":
            update.found_inf = (~finite).float().to(self.home)  # type: ignore[attr-defined]
        update.step()

    def _adam(self) -> list[Tensor]:
        return [s["step"] for (rule, _), u in self.updates.items() if rule == "adamw" for s in u.state.values()]

    @property
    def steps(self) -> int:
        """Adam's t: successful steps. It lives on the device, which alone knows of skipped ones."""
        return int(next((step.item() for step in self._adam()), 0))

    @steps.setter
    def steps(self, value: int) -> None:
        for step in self._adam():
            step.fill_(value)

    # Numbers for the log

    def zeros(self) -> Tensor:
        """How many gradients are exactly 0, the gaps between parameters not counted."""
        zero = [torch.sum(x == 0) for name, x in self.each_gradient() if self.is_counted(name)]
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        return self._of_all_ranks(torch.stack([x.to(none) for x in zero]).sum() if zero else none)

    def norm(self) -> Tensor:
        """Of all weights."""
        squares = self.squares([p.master.detach() for p in self.pieces if p.counted])
        return self._of_all_ranks(squares).sqrt()

    def _of_all_ranks(self, x: Tensor) -> Tensor:
        if self.layout.world > 1:
            dist.all_reduce(x)
        return x

    def squares(self, flats: list[Tensor]) -> Tensor:
        """Sum of squares, float64. On a CPU torch adds float32 squares one after the other, a hundred million of which lose a
        percent: there short rows are added first."""
        if not flats:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        if flats[0].device.type != "cpu":
            return torch.stack(torch._foreach_norm(flats)).double().square().sum()
        rows: list[Any] = [flats[0].new_zeros(1)]
        for x in (x.flatten() for x in flats):
            rest = x.numel() % ALIGN
            rows += [torch.linalg.vector_norm(x[: len(x) - rest].view(-1, ALIGN), dim=1)] * (len(x) > rest)
            rows += [torch.linalg.vector_norm(x[len(x) - rest :])[None]] * (rest > 0)
        return torch.cat(rows).double().square().sum().to(self.device)


class ParameterStore(Store):
    """Owns the memory of `model` (built on the meta device) from here on."""

    def __init__(self, model: nn.Module | list[nn.Module], spec: StoreSpec) -> None:
        """`model` may be a list: the parts of it that one pipeline rank runs."""
        models = model if isinstance(model, list) else [model]
        self.divided = spec.zero > 0 and spec.layout.group("shard") is not None
        super().__init__(spec, ("replicas",) if self.divided else ("replicas", "shard", "cp"))
        self.keeps_whole = spec.zero < 2 or not self.divided
        self.parts = self.layout.size("shard", "cp") if self.divided else 1
        self.place = self.layout.at("shard", "cp") if self.divided else 0
        self.added: set[str] = set()  # parameters with a gradient in this step
        self.under_way: list[Bucket] = []  # ZeRO 2: whose sums have begun
        self.buckets: dict[str, Bucket] = {}
        self.bucket: dict[str, Bucket] = {}  # of each parameter
        self.shapes = {}
        self._lay_out(models)
        self._allocate()
        for part in models:
            self._take_over(part)
        self._make_pieces()
        self.last = True

    # What lies where

    def _lay_out(self, models: list[nn.Module]) -> None:
        units: dict[str, dict[Kind, dict[str, torch.Size]]] = {}
        for name, p in itertools.chain(*(part.named_parameters() for part in models)):
            unit = "partial" if self.is_partial(name) else shard.unit(name)
            kind = Kind(rules.rule(self.optimizer, name, p), rules.decays(name, p), not self.is_cut(name))
            units.setdefault(unit, {}).setdefault(kind, {})[name] = p.shape
        begin = 0
        for unit, kinds in units.items():
            bucket = self.buckets[unit] = Bucket(begin, unit == "partial")
            for kind, members in sorted(kinds.items(), reverse=True):
                start = bucket.size
                for name, shape in members.items():
                    bucket.spans[name] = (bucket.size, shape)
                    self.bucket[name], self.shapes[name] = bucket, shape
                    bucket.size += -(-shape.numel() // ALIGN) * ALIGN
                bucket.kinds.append((kind, start, bucket.size))
            bucket.size += -bucket.size % (ALIGN * self.parts)
            begin += bucket.size
        self.size = begin

    def _allocate(self) -> None:
        def zeros(size: int, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned)

        part = self.size // self.parts
        self.weights = zeros(self.size, self.dtype, self.device)
        self.gradients = zeros(self.size if self.keeps_whole else 0, self.full, self.device)
        self.share = zeros(part, self.full, self.device) if self.divided else self.gradients
        apart = self.dtype is not self.full or self.offload or self.divided
        self.master = zeros(part, self.full, self.home) if apart else self.weights
        pinned = self.offload and self.device.type != "cpu"  # for the speed of the copy
        self.host_share = zeros(part, self.full, self.home, pinned) if self.offload else self.share
        self.leaving = zeros(part if self.offload else 0, self.dtype, self.home, pinned)  # new weights, on their way
        for bucket in self.buckets.values():
            if self.keeps_whole:
                bucket.gradients = self.gradients[bucket.begin : bucket.begin + bucket.size]

    def _take_over(self, model: nn.Module) -> None:
        """Make the model's parameters views of the weights."""
        here = [name for name, _ in model.named_parameters()]
        for bucket in self.buckets.values():
            for name in here & bucket.spans.keys():
                offset, shape = bucket.spans[name]
                # .data: new weights that arrive for one layer are no change of another's that autograd has kept.
                parameter = nn.Parameter(_view(self.weights.data, (bucket.begin + offset, shape)))
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, parameter)
                self._accumulate_into(bucket, name, parameter)
        if (
            self.divided
        ):  # new weights are waited for where they are needed; who wrote another network may call no layer
            layers = {u for u in map(shard.unit, here) if "." in u and isinstance(model, GPT)}
            rest = [u for u in self.buckets if "." not in u or not isinstance(model, GPT)]
            model.register_forward_pre_hook(lambda *_: self._wait_for(rest))
            for unit in layers:
                model.get_submodule(unit).register_forward_pre_hook(lambda *_, unit=unit: self._wait_for([unit]))

    def part_of(self, bucket: Bucket) -> tuple[int, int]:
        """Where this rank's part of a bucket begins: in the bucket, and in the buffers of parts."""
        return self.place * (bucket.size // self.parts), bucket.begin // self.parts

    def _make_pieces(self) -> None:
        """This rank's part in pieces of one kind."""
        self.pieces = []
        updated: dict[tuple[rules.Rule, bool], list[tuple[nn.Parameter, dict[str, Tensor]]]] = {}
        for bucket in self.buckets.values():
            first, begin = self.part_of(bucket)
            for kind, kind_begin, kind_end in bucket.kinds:
                low, high = max(kind_begin, first), min(kind_end, first + bucket.size // self.parts)
                if low >= high:
                    continue
                mine = slice(begin + low - first, begin + high - first)
                master = nn.Parameter(self.master[mine])
                master.grad = self.host_share[mine]
                state = {name: torch.zeros_like(master.detach()) for name in rules.STATE[kind.rule]}
                name = next(n for n, (offset, _) in bucket.spans.items() if kind_begin <= offset)
                self.pieces.append(Piece(self.is_counted(name), mine.start, master, state))
                several = [(master, state)]
                if kind.rule == "muon":  # matrix by matrix
                    spans = [(at - low, shape) for at, shape in bucket.spans.values() if low <= at < high]
                    parts = [
                        [x for span in spans for x in rules.matrices(_view(flat, span))]
                        for flat in (master, master.grad, *state.values())
                    ]
                    several = []
                    for values, grad, *kept in zip(*parts, strict=True):
                        matrix = nn.Parameter(values)
                        matrix.grad = grad
                        several.append((matrix, dict(zip(state, kept, strict=True))))
                updated.setdefault((kind.rule, kind.decays), []).extend(several)
        self.make_updates(updated)

    # Weights

    def keep(self, name: str, tensor: Tensor) -> None:
        to, low, high = self.mine(name)
        self.master[to : to + high - low] = tensor.flatten()[low:high].to(self.home)

    def mine(self, name: str) -> tuple[int, int, int]:
        """Where this rank's part of a parameter begins in the buffers of parts; from which to which number it goes."""
        bucket = self.bucket[name]
        first, begin = self.part_of(bucket)
        offset, shape = bucket.spans[name]
        low = max(offset, first)
        high = max(low, min(offset + shape.numel(), first + bucket.size // self.parts))
        return begin + low - first, low - offset, high - offset

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in full precision, padded rows included; of one process, which holds them whole."""
        assert self.layout.tp == self.parts == 1
        for bucket in self.buckets.values():
            for name, (offset, shape) in bucket.spans.items():
                yield name, _view(self.master, (bucket.begin + offset, shape))

    def publish_weights(self) -> None:
        """Masters to weights, after a step, an initialisation or a load."""
        if self.master is self.weights:
            return
        new = self.leaving.copy_(self.master) if self.offload else self.master  # from the host in the lower precision
        if not self.divided:
            self.weights.copy_(new, non_blocking=True)
            return
        self._wait_for(self.buckets)
        # First what is outside of the layers, which is waited for together, before the first one.
        for _, bucket in sorted(self.buckets.items(), key=lambda item: "." in item[0]):
            _, begin = self.part_of(bucket)
            mine = new[begin : begin + bucket.size // self.parts].to(self.device, self.dtype, non_blocking=True)
            whole = self.weights[bucket.begin : bucket.begin + bucket.size]
            bucket.gathering = comm.gather_into(whole, mine, group=self.layout.group("shard"), async_op=True)

    def _wait_for(self, units: Iterable[str]) -> None:
        for unit in units:
            if self.buckets[unit].gathering is not None:
                self.buckets[unit].gathering.wait()
                self.buckets[unit].gathering = None

    # Gradients

    def clear_gradients(self) -> None:
        """Before a step. Each parameter's first gradient overwrites what was there."""
        self.added = set()
        if not self.keeps_whole:
            self.share.zero_()
        for bucket in self.buckets.values():
            bucket.done = False
        self.last = True

    @property
    def last(self) -> bool:
        """Whether the backward pass that comes is the step's last one, for the layers it goes through. Set before each."""
        return self._last

    @last.setter
    def last(self, value: bool) -> None:
        self._last = value
        for bucket in self.buckets.values():
            bucket.seen.clear()

    def _accumulate_into(self, bucket: Bucket, name: str, parameter: nn.Parameter) -> None:
        """Add each new gradient to its total at once, and free it; then see whether the bucket is full."""
        offset, shape = bucket.spans[name]

        def add(p: Tensor) -> None:
            assert p.grad is not None
            if bucket.gradients is None:  # ZeRO 2: for this micro-batch
                bucket.gradients = torch.zeros(bucket.size, dtype=self.full, device=self.device)
            total = bucket.gradients[offset : offset + shape.numel()].view(shape)
            if name in self.added or not self.keeps_whole:
                total.add_(p.grad)
            else:
                total.copy_(p.grad)
            self.added.add(name)
            p.grad = None
            bucket.seen.add(name)
            if len(bucket.seen) == len(bucket.spans) and not bucket.partial:
                if not self.keeps_whole:
                    self._sum(bucket)
                elif self.last:
                    self._sum_full_ones()

        parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    @property
    def order(self) -> list[Bucket]:
        return sorted(reversed(self.buckets.values()), key=lambda bucket: bucket.partial)

    def _sum_full_ones(self) -> None:
        """In one order, the layers' own from the last to the first, in which they become full unless a rank's losses leave a
        parameter out: sums that begin in another order on another rank would be mixed up."""
        for bucket in self.order:
            if bucket.done:
                continue
            if bucket.partial or len(bucket.seen) < len(bucket.spans):
                return
            self._sum(bucket)

    def _sum(self, bucket: Bucket) -> None:
        """Begin the sum over the ranks that hold the same weights."""
        bucket.done = self.last
        whole, group = bucket.gradients, self.layout.group
        assert whole is not None
        if bucket.partial:
            comm.total(whole, group("tp"))
        if self.divided:
            _, begin = self.part_of(bucket)
            part = self.share[begin : begin + bucket.size // self.parts]
            if not self.keeps_whole:  # other micro-batches' sums are there
                part, bucket.gradients = torch.empty_like(part), None
                self.under_way.append(bucket)
                if len(self.under_way) > 2:
                    self._finish(self.under_way.pop(0))
            work = comm.scatter_into(part, whole, group=group("shard"), async_op=True)
            bucket.sums.append((work, None if self.keeps_whole else part))
        elif group("gradients") is not None:
            bucket.sums.append((dist.all_reduce(whole, group=group("gradients"), async_op=True), None))

    def _finish(self, bucket: Bucket) -> None:
        """Wait for the sums that are under way."""
        for work, part in bucket.sums:
            work.wait()
            if part is not None:
                _, begin = self.part_of(bucket)
                self.share[begin : begin + len(part)] += part
        bucket.sums.clear()

    def finish_sums(self) -> None:
        for bucket in self.order:
            if not self.keeps_whole and bucket.gradients is None and bucket.spans.keys() <= self.added:
                continue  # all micro-batches' sums have begun
            if not bucket.done:  # it has parameters that some or all of this step's losses do not depend on
                if bucket.gradients is None:
                    bucket.gradients = torch.zeros(bucket.size, dtype=self.full, device=self.device)
                for name in bucket.spans.keys() - self.added if self.keeps_whole else ():
                    _view(bucket.gradients, bucket.spans[name]).zero_()
                self.last = True
                self._sum(bucket)
        for bucket in self.buckets.values():
            self._finish(bucket)
        self.under_way.clear()
        if self.divided:
            comm.total(self.share, self.layout.group("replicas"))
        ends = self.layout.group("embedding") if self.tied else None
        if ends is not None:
            bucket = self.buckets["wte"]
            _, begin = self.part_of(bucket)
            comm.total(self.share[begin : begin + bucket.size // self.parts], ends)

    def take_gradients(self) -> None:
        if self.offload:
            self.host_share.copy_(self.share)

    def summed(self, piece: Piece) -> Tensor:
        return self.share[piece.begin : piece.begin + piece.master.numel()]

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.shapes:
            to, low, high = self.mine(name)
            high = max(low, min(high, math.prod(self.saved(name, self.shapes[name])[2])))
            yield name, self.share[to : to + high - low]

    def named_state(self, with_optimizer: bool = True, to_save: bool = False) -> Named:
        """This rank's part of what a checkpoint holds: name -> (global shape, boxes as (offsets, sizes), tensor), the
        vocabulary at its true size. `to_save`: without what another rank saves."""
        out: Named = {}
        for name, bucket in self.bucket.items():
            if to_save and not self.is_counted(name):
                continue
            to, low, high = self.mine(name)
            whole, place, part = self.saved(name, self.shapes[name])
            high = max(low, min(high, math.prod(part)))
            boxes = [(tuple(map(operator.add, o, place)), n) for o, n in shard.boxes(tuple(part), low, high)]
            kind = next(kind for kind, a, b in bucket.kinds if a <= bucket.spans[name][0] < b)
            piece = next((p for p in self.pieces if p.begin <= to < p.begin + p.master.numel()), None)
            flats = {"": self.master[to : to + high - low]}
            if with_optimizer:
                for key, called in rules.STATE[kind.rule].items():
                    at = to - piece.begin if piece else 0
                    flats[f"/{called}"] = piece.state[key][at : at + high - low] if piece and boxes else self.master[:0]
            for suffix, flat in flats.items():
                shaped = flat.view(boxes[0][1]) if len(boxes) == 1 else flat
                out[name + suffix] = (tuple(whole), boxes, shaped.detach())
        return out


def _view(flat: Tensor, span: tuple[int, torch.Size]) -> Tensor:
    offset, shape = span
    return flat.detach()[offset : offset + shape.numel()].view(shape)
