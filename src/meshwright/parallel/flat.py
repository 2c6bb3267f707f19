"""Parameter store for ZeRO 0 to 2: weights, gradients and optimizer state in a few flat buffers.

Hand-written because torch keeps one small tensor per weight, while everything after the backward
pass is fastest, simplest to shard and simplest to save as one long vector:

    weights    [n]      the model's parameters are views of it (bfloat16, float16, float32, float64)
    gradients  [n]      float32 (float64 in tests); each micro-batch is added in place
    share      [n / r]  this rank's part of the gradients, summed over the ranks; without ZeRO it
                        is `gradients` itself
    master     [n / r]  float32; the same buffer as `weights` if the formats are equal and nothing
                        is sharded
    state      [n / r]  the rule's state: exp_avg and exp_avg_sq, exp_avg alone, or a momentum;
                        float32, or rounded to fewer bits (kernels/moments.py)
    average    [n / r]  of the masters, with --ema

The vector consists of buckets: one per layer and one per part outside the layers. A bucket's sum
over the data-parallel ranks, by collectives or by copy engines (symmetric_memory.py), starts as
soon as the last micro-batch has filled it, while the backward pass continues:

    ZeRO 0   all-reduce the bucket; every rank updates everything
    ZeRO 1   reduce-scatter it; each rank updates its 1/r of the bucket, and the new weights are
             all-gathered, which the next forward pass waits for layer by layer
    ZeRO 2   the same after every micro-batch, so that full gradients of at most three buckets exist

A gradient reaches its bucket without a copy. The store gives each parameter a `main_grad`; the
backward pass of a product (kernels/gradients.py) adds into the main_grad's total itself, or
autograd's hook does:

    kernels/gradients.from_product(parameter, ...)       backward of one use of the parameter
      total, adds = parameter.main_grad.begin()               its view of bucket.gradients
      total += grad^T @ x                                or = for the step's first micro-batch
      parameter.main_grad.end()                               one part has come
        FlatMainGrad.end -> FlatStore.sum_over_ranks     if it was the bucket's last: start the sum

With `offload`, masters and state stay in host memory and are updated there. Every parameter starts
at a multiple of ALIGN elements so that matrix products read aligned memory; the gaps stay 0.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.base import device as devices
from meshwright.kernels import adamw
from meshwright.kernels.matmul import put_into
from meshwright.kernels.moments import Place
from meshwright.model.gpt import GPT
from meshwright.optim import rules
from meshwright.optim.adamw import FlatAdamW
from meshwright.optim.average import MovingAverage
from meshwright.optim.rule_table import AVERAGE
from meshwright.parallel import comm, shard
from meshwright.parallel.store import Member, RuleState, Store, StoreSpec, Updated, UpdateRange
from meshwright.parallel.symmetric_memory import BufferMapper


class UpdateKind(NamedTuple):
    """Properties that decide how a parameter is updated and counted."""

    param_group: rules.ParamGroup
    copied: bool  # every tensor rank holds a full copy


class PendingSum(NamedTuple):
    """An asynchronous collective; its tensors are referenced here until it is finished."""

    work: Any
    source: Tensor
    part: Tensor | None = None  # ZeRO 2: this micro-batch's result, to be added to the share


@dataclass
class Bucket:
    """A contiguous range of the flat buffers."""

    begin: int
    # Gradients are summed over the tensor ranks too, once a step, after the last micro-batch.
    partial: bool
    size: int = 0
    # name -> offset in the bucket, shape
    spans: dict[str, tuple[int, torch.Size]] = field(default_factory=dict)
    # kind, first offset, end
    kinds: list[tuple[UpdateKind, int, int]] = field(default_factory=list)
    gradients: Tensor | None = None  # full, not sharded
    seen: set[str] = field(default_factory=set)  # gradients received in this backward pass
    parts_received: dict[str, int] = field(default_factory=dict)  # of each gradient
    sums: list[PendingSum] = field(default_factory=list)
    is_summed: bool = False  # in this step
    gathering: tuple[Any, Tensor] | None = None  # pending all-gather of new weights, and its input


class FlatStore(Store):
    """Store for ZeRO 0 to 2; allocates and owns the memory of models built on the meta device."""

    def __init__(self, models: list[nn.Module], spec: StoreSpec) -> None:
        is_sharded = spec.zero > 0 and spec.layout.group("shard") is not None
        axes = ("replicas",) if is_sharded else ("replicas", "shard", "cp")
        super().__init__(spec, axes, is_sharded)
        # Full ones, from micro-batch to micro-batch.
        self.keeps_gradients = spec.zero < 2 or not self.is_sharded
        self.shard_count = self.layout.size("shard", "cp") if self.is_sharded else 1
        self.shard_index = self.layout.at("shard", "cp") if self.is_sharded else 0
        self.added: set[str] = set()  # parameters that received a gradient in this step
        self.pending_buckets: list[Bucket] = []  # ZeRO 2: buckets with sums in progress
        self.buckets: dict[str, Bucket] = {}
        self.bucket_of: dict[str, Bucket] = {}  # by parameter
        self.shapes = {}
        self._lay_out(models)
        # The order in which sums start.
        self.sum_order = sorted(reversed(self.buckets.values()), key=lambda bucket: bucket.partial)
        self._allocate(spec.mapper)
        for part in models:
            self._take_over(part)
        self._make_update_ranges()
        if self.optimizer.ema:
            self.average = MovingAverage(self.optimizer.ema, [self.master])
        self.begin_backward(is_last=True)

    # Memory layout

    def _lay_out(self, models: list[nn.Module]) -> None:
        # The shapes of each bucket's parameters, by how these are updated.
        units: dict[str, dict[UpdateKind, dict[str, torch.Size]]] = {}
        for name, p in itertools.chain(*(part.named_parameters() for part in models)):
            unit = shard.bucket(name, self.layout.tp, self.sharding.sequence)
            param_group = rules.param_group(self.optimizer, self.model, name, p)
            kind = UpdateKind(param_group, copied=not self.sharding.is_sharded(name))
            units.setdefault(unit, {}).setdefault(kind, {})[name] = p.shape
        # One bucket after the other, in it one kind after the other: a kind is one range.
        begin = 0
        for unit, kinds in units.items():
            bucket = self.buckets[unit] = Bucket(begin, unit == "partial")
            for kind, members in sorted(kinds.items(), reverse=True):
                start = bucket.size
                for name, shape in members.items():
                    bucket.spans[name] = (bucket.size, shape)
                    self.bucket_of[name] = bucket
                    self.shapes[name] = shape
                    bucket.size += shard.aligned(shape.numel())
                bucket.kinds.append((kind, start, bucket.size))
            bucket.size = shard.aligned(bucket.size, self.shard_count)
            begin += bucket.size
        self.size = begin

    def _allocate(self, mapper: BufferMapper | None) -> None:
        def zeros(
            size: int, dtype: torch.dtype, device: torch.device, pinned: bool = False
        ) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned)

        # The full buffers, in symmetric memory if copy engines sum and gather them.
        part = self.size // self.shard_count
        self.symmetric_gradients = mapper.zeros(self.size, self.full_dtype) if mapper else None
        self.symmetric_weights = (
            mapper.zeros(self.size, self.dtype) if mapper and self.is_sharded else None
        )
        if self.symmetric_gradients:
            self.symmetric_gradients.reserve(max(bucket.size for bucket in self.buckets.values()))
            self.gradients = self.symmetric_gradients.own
        else:
            kept = self.size if self.keeps_gradients else 0
            self.gradients = zeros(kept, self.full_dtype, self.device)
        if self.symmetric_weights:
            self.weights = self.symmetric_weights.own
        else:
            self.weights = zeros(self.size, self.dtype, self.device)
        # This rank's part: the same memory as a full buffer where nothing sets them apart.
        self.share = self.gradients
        if self.is_sharded:
            self.share = zeros(part, self.full_dtype, self.device)
        self.master = self.weights
        if self.dtype is not self.full_dtype or self.offload or self.is_sharded:
            self.master = zeros(part, self.full_dtype, self.update_device)
        # With offload, the gradients on the host, and the new weights to be copied to the device.
        pinned = self.offload and self.device.type != "cpu"  # for fast copies
        self.host_share = self.share
        if self.offload:
            self.host_share = zeros(part, self.full_dtype, self.update_device, pinned)
        self.outgoing = zeros(part if self.offload else 0, self.dtype, self.update_device, pinned)
        for bucket in self.buckets.values():
            if self.keeps_gradients:
                bucket.gradients = self.gradients[bucket.begin : bucket.begin + bucket.size]

    def _take_over(self, model: nn.Module) -> None:
        """Make the model's parameters views of the weights."""
        names = [name for name, _ in model.named_parameters()]
        for bucket in self.buckets.values():
            for name in names & bucket.spans.keys():
                offset, shape = bucket.spans[name]
                # Use .data because all layers share this storage: autograd must not treat an update
                # of one layer's weights as a change to another's.
                parameter = nn.Parameter(_view(self.weights.data, (bucket.begin + offset, shape)))
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, parameter)
                self._accumulate_into(bucket, name, parameter, uses_of(model, name))
        # Wait for new weights as late as possible: layer by layer in a GPT, before the whole
        # forward pass in a custom model, which may not call its layers.
        if self.is_sharded:
            layers: set[str] = set()
            rest = list(self.buckets)
            if isinstance(model, GPT):
                layers = {unit for unit in map(shard.unit, names) if "." in unit}
                rest = [unit for unit in self.buckets if "." not in unit]
            model.register_forward_pre_hook(lambda *_: self._wait_for(rest))
            for unit in layers:
                model.get_submodule(unit).register_forward_pre_hook(
                    lambda *_, unit=unit: self._wait_for([unit])
                )

    def own_part(self, bucket: Bucket, index: int | None = None) -> tuple[int, int, int]:
        """Return where a rank's part begins, in the bucket and in sharded buffers, and its size.

        Without `index`, it is this rank's.
        """
        size = bucket.size // self.shard_count
        if index is None:
            index = self.shard_index
        return index * size, bucket.begin // self.shard_count, size

    def own_share(self, bucket: Bucket) -> Tensor:
        """Return this rank's part of the summed gradients."""
        _, begin, size = self.own_part(bucket)
        return self.share[begin : begin + size]

    def _ranges(self) -> Iterator[tuple[Bucket, UpdateKind, adamw.FlatRange]]:
        """Cut this rank's part into ranges of one kind."""
        numbers = {
            param_group: number for number, param_group in enumerate(self._adamw_param_groups())
        }
        for bucket in self.buckets.values():
            first, begin, size = self.own_part(bucket)
            for kind, kind_begin, kind_end in bucket.kinds:
                low = max(kind_begin, first)
                high = min(kind_end, first + size)
                if low < high:
                    sharded = begin + low - first, begin + high - first
                    number = numbers.get(kind.param_group, 0)
                    yield bucket, kind, adamw.FlatRange(*sharded, number, bucket.begin + low)

    def _adamw_param_groups(self) -> list[rules.ParamGroup]:
        param_groups = {
            kind.param_group for bucket in self.buckets.values() for kind, *_ in bucket.kinds
        }
        return sorted(param_group for param_group in param_groups if param_group.rule == "adamw")

    def _make_update_ranges(self) -> None:
        """Make a piece of each range, and hand it to its optimizer."""
        self.update_ranges = []
        updated: Updated = {}
        # AdamW's ranges are updated in one launch, where there is a kernel for it.
        is_float = self.full_dtype is torch.float32
        has_kernel = devices.has_kernels(self.device) and is_float and not self.offload
        own: list[adamw.FlatRange] = []
        places: list[tuple[Place, int]] = []
        for bucket, kind, r in self._ranges():
            if kind.param_group.rule == "adamw" and has_kernel:
                own.append(r)
                for _, begin, end, place in self._parts_of(bucket, r):
                    places.append((place, (end - begin) // shard.ALIGN))
        if own:
            weights = None if self.master is self.weights else self.weights
            flats = (self.share, self.master, weights)
            self.flat = FlatAdamW(self.optimizer, self._adamw_param_groups(), own, flats, places)
        # The other ranges go to an optimizer of their parameter group; Muon's follow by matrices.
        counted: list[adamw.FlatRange] = []
        for bucket, kind, r in self._ranges():
            rule = kind.param_group.rule
            master = nn.Parameter(self.master[r.begin : r.end])
            master.grad = self.host_share[r.begin : r.end]
            if self.flat is not None and rule == "adamw":
                state = self.flat.states[r]
            else:
                state = self.new_state(rule, master.detach())
            begin = next(begin for k, begin, _ in bucket.kinds if k == kind)
            first = next(n for n, (at, _) in bucket.spans.items() if begin <= at)
            if rule != "muon" and (self.flat is None or rule != "adamw"):
                updated.setdefault(kind.param_group, []).extend(
                    self._members(bucket, r, first, master, state)
                )
            is_counted = self.sharding.is_counted(first)
            if is_counted:
                counted.append(r)
            self.update_ranges.append(
                UpdateRange(is_counted, r.begin, master, state, rule, r.target)
            )
        if self.flat is not None:
            self.flat.count(counted)
        for bucket in self.buckets.values():
            for kind, begin, end in bucket.kinds:
                if kind.param_group.rule != "muon":
                    continue
                for name, (offset, _) in bucket.spans.items():
                    if begin <= offset < end:
                        updated.setdefault(kind.param_group, []).extend(self._matrices(name))
        self.make_updates(updated)

    def _parts_of(
        self, bucket: Bucket, r: adamw.FlatRange
    ) -> Iterator[tuple[str, int, int, Place]]:
        """Yield a range's parameters: name, elements in the sharded buffers, place of the first.

        The gap behind a parameter counts as its elements.
        """
        first = r.target - bucket.begin
        end = r.target - bucket.begin + r.end - r.begin
        for name, (offset, shape) in bucket.spans.items():
            low = max(offset, first)
            high = min(offset + shard.aligned(shape.numel()), end)
            if low < high:
                to = r.begin - first
                yield name, to + low, to + high, self.place_of(name).after(low - offset)

    def _members(
        self, bucket: Bucket, r: adamw.FlatRange, first: str, master: nn.Parameter, state: RuleState
    ) -> Iterator[Member]:
        """Yield a range for its optimizer; if this rounds its state, parameter by parameter."""
        parts = list(self._parts_of(bucket, r))
        if not rules.is_rounded(self.optimizer):
            yield Member(first, master, state, parts[0][-1])
            return
        for name, begin, end, place in parts:
            values = nn.Parameter(self.master[begin:end])
            values.grad = self.host_share[begin:end]
            part = {key: x[begin - r.begin : end - r.begin] for key, x in state.items()}
            yield Member(name, values, part, place)

    def _matrices(self, name: str) -> list[Member]:
        """Return views of this rank's part of a parameter and its state, as Muon updates them.

        A rank that shares none has them matrix by matrix; others may have nothing of a parameter.
        Where AdamW's kernel writes its weights in the network's format, Muon's writes the copy too.
        """
        to, low, high = self.local_range(name)
        (key,) = rules.STATE["muon"]
        moments = self.new_state("muon", self.master[:0])[key]
        if low < high:
            owned = self._range_at(to)
            assert owned is not None
            moments = owned.state[key][to - owned.begin :]
        buffers = [self.master[to:], self.host_share[to:], moments]
        if self.flat is not None and self.master is not self.weights:
            bucket = self.bucket_of[name]
            buffers.append(self.weights[bucket.begin + bucket.spans[name][0] + low :])
        views: list[list[Tensor]] = []
        for x in buffers:
            values = x.detach()[: high - low]
            if high - low < self.shapes[name].numel():
                views.append([values])
                continue
            whole = values.view(self.shapes[name])
            is_shared = self.layout.group("matrices") is not None
            views.append([whole] if is_shared else rules.matrices(whole))
        out = []
        place = self.place_of(name).after(low)
        for values, grad, moment, *copy in zip(*views, strict=True):
            matrix = nn.Parameter(values)
            matrix.grad = grad
            out.append(Member(name, matrix, {key: moment}, place, *copy))
            place = place.after(values.numel())
        return out

    # Weights

    def set_master(self, name: str, tensor: Tensor) -> None:
        to, low, high = self.local_range(name)
        # The slice is taken where the tensor is: only this rank's part goes to the device.
        self.master[to : to + high - low].copy_(tensor.flatten()[low:high])

    def weights_by_name(self) -> dict[str, Tensor]:
        out = {}
        for name, bucket in self.bucket_of.items():
            offset, shape = bucket.spans[name]
            out[name] = _view(self.weights, (bucket.begin + offset, shape))
        return out

    def _range_at(self, to: int) -> UpdateRange | None:
        """Return the range with an element of the sharded buffers, if one has it."""
        for owned in self.update_ranges:
            if owned.begin <= to < owned.begin + owned.master.numel():
                return owned
        return None

    def local_range(self, name: str, index: int | None = None) -> tuple[int, int, int]:
        """Return where a rank's part is in its sharded buffers, and its range of elements.

        Without `index`, it is this rank's.
        """
        bucket = self.bucket_of[name]
        first, begin, size = self.own_part(bucket, index)
        offset, shape = bucket.spans[name]
        low = max(offset, first)
        high = max(low, min(offset + shape.numel(), first + size))
        return begin + low - first, low - offset, high - offset

    def publish_weights(self, has_all: bool = True) -> None:
        if self.master is self.weights:
            return
        self.wait_for_weights()
        if has_all:
            self._copy_all()
        else:
            for p in self.update_ranges:
                if p.rule not in ("adamw", "muon"):  # whose kernels have written them
                    self.weights[p.target : p.target + p.master.numel()].copy_(p.master)
        if self.is_sharded:
            self._gather_weights()
        if self.scales is not None:
            self.wait_for_weights()
            self.scales.refresh()

    def _copy_all(self) -> None:
        # To a device, the copy in the lower precision.
        new = self.outgoing.copy_(self.master) if self.offload else self.master
        if not self.is_sharded:
            self.weights.copy_(new, non_blocking=True)
            return
        for bucket in self.buckets.values():
            _, begin, size = self.own_part(bucket)
            self._own_weights(bucket).copy_(new[begin : begin + size], non_blocking=True)

    def _own_weights(self, bucket: Bucket) -> Tensor:
        """Return the weights that this rank updates."""
        first, _, size = self.own_part(bucket)
        return self.weights[bucket.begin + first : bucket.begin + first + size]

    def _gather_weights(self) -> None:
        """Start to gather the ranks' parts, in place."""
        # Buckets outside the layers come first: all are waited for before the first layer.
        for _, bucket in sorted(self.buckets.items(), key=lambda item: "." in item[0]):
            full = self.weights[bucket.begin : bucket.begin + bucket.size]
            own = self._own_weights(bucket)
            if self.symmetric_weights:
                work = self.symmetric_weights.gather(bucket.begin, bucket.size)
            else:
                work = comm.gather_into(full, own, group=self.layout.group("shard"), async_op=True)
            bucket.gathering = work, own

    def _wait_for(self, units: Iterable[str]) -> None:
        for unit in units:
            bucket = self.buckets[unit]
            if bucket.gathering is not None:
                work, _ = bucket.gathering
                work.wait()
                bucket.gathering = None

    def forget_collectives(self) -> None:
        for bucket in self.buckets.values():
            bucket.gathering = None
            bucket.sums.clear()
        self.pending_buckets.clear()

    # Gradients

    def clear_gradients(self) -> None:
        """Prepare for a step. Each parameter's first gradient overwrites the old one."""
        self.added = set()
        if not self.keeps_gradients:
            self.share.zero_()
        for bucket in self.buckets.values():
            bucket.is_summed = False
        self.begin_backward(is_last=True)

    def begin_backward(self, is_last: bool) -> None:
        self.is_last_backward = is_last
        for bucket in self.buckets.values():
            bucket.seen.clear()
            bucket.parts_received.clear()

    def _accumulate_into(
        self, bucket: Bucket, name: str, parameter: nn.Parameter, uses: int
    ) -> None:
        """Have each new gradient added to its total: by a hook that then frees it, or by kernels.

        Kernels do so in one part for each of the parameter's `uses` in the network; 0 is unknown.
        """
        main_grad = FlatMainGrad(self, bucket, name, uses)

        def add(p: Tensor) -> None:
            if p.grad is None:  # kernels have put it into the total
                return
            total, adds = main_grad.begin()
            put_into(total, p.grad, adds)
            p.grad = None
            main_grad.end(max(uses, 1))  # autograd has waited for all uses

        parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        if uses:
            parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def sum_full_buckets(self) -> None:
        """Start sums in a fixed order, from the last layer to the first.

        Buckets usually fill in this order, but not if a rank's losses leave a parameter out; sums
        started in different orders on different ranks would be mixed up.
        """
        for bucket in self.sum_order:
            if bucket.is_summed:
                continue
            if bucket.partial or len(bucket.seen) < len(bucket.spans):
                return
            self.sum_over_ranks(bucket)

    def sum_over_ranks(self, bucket: Bucket) -> None:
        """Start the sum over the ranks that hold the same weights."""
        bucket.is_summed = self.is_last_backward
        full = bucket.gradients
        group = self.layout.group
        assert full is not None
        if bucket.partial:
            comm.total(full, group("tp"))
        if self.is_sharded:
            bucket.sums.append(self._scatter(bucket, full))
        elif self.symmetric_gradients:
            bucket.sums.append(
                PendingSum(self.symmetric_gradients.total(bucket.begin, bucket.size), full)
            )
        elif (ranks := group("gradients")) is not None:
            bucket.sums.append(PendingSum(dist.all_reduce(full, group=ranks, async_op=True), full))

    def _scatter(self, bucket: Bucket, full: Tensor) -> PendingSum:
        """Start to sum a bucket into the ranks' shares; ZeRO 2 frees it when that has ended."""
        part = self.own_share(bucket)
        if self.symmetric_gradients:
            return PendingSum(
                self.symmetric_gradients.scatter(bucket.begin, bucket.size, part), full
            )
        if not self.keeps_gradients:  # the share holds other micro-batches' sums
            part, bucket.gradients = torch.empty_like(part), None
            bucket.seen.clear()  # its memory is gone; the next backward pass fills a new one
            bucket.parts_received.clear()
            self.pending_buckets.append(bucket)
            if len(self.pending_buckets) > 2:
                self._finish(self.pending_buckets.pop(0))
        work = comm.scatter_into(part, full, group=self.layout.group("shard"), async_op=True)
        return PendingSum(work, full, None if self.keeps_gradients else part)

    def _finish(self, bucket: Bucket) -> None:
        """Wait for the sums in progress."""
        for pending in bucket.sums:
            pending.work.wait()
            if pending.part is not None:
                self.own_share(bucket).add_(pending.part)
        bucket.sums.clear()

    def finish_sums(self) -> None:
        for bucket in self.sum_order:
            # ZeRO 2 frees full gradients when their sum starts.
            has_started = bucket.gradients is None and bucket.spans.keys() <= self.added
            if self.keeps_gradients:
                has_started = bucket.is_summed
            if not has_started:
                self._complete(bucket)
        for bucket in self.buckets.values():
            self._finish(bucket)
        self.pending_buckets.clear()
        if self.is_sharded:
            comm.total(self.share, self.layout.group("replicas"))
        if self.sharding.tied and "wte" in self.buckets:
            comm.total(self.own_share(self.buckets["wte"]), self.layout.group("embedding"))

    def _complete(self, bucket: Bucket) -> None:
        """Sum a bucket although some losses of this step do not depend on all of its parameters."""
        if bucket.gradients is None:
            bucket.gradients = torch.zeros(bucket.size, dtype=self.full_dtype, device=self.device)
        if self.keeps_gradients:  # those of the last step are still there
            for name in bucket.spans.keys() - self.added:
                _view(bucket.gradients, bucket.spans[name]).zero_()
        self.begin_backward(is_last=True)
        self.sum_over_ranks(bucket)

    def take_gradients(self) -> None:
        if self.offload:
            self.host_share.copy_(self.share)

    def wait_for_weights(self) -> None:
        self._wait_for(self.buckets)

    def summed(self, elements: UpdateRange) -> Tensor:
        return self.share[elements.begin : elements.begin + elements.master.numel()]

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.shapes:
            to, low, high = self._saved_range(name)
            yield name, self.share[to : to + high - low]

    def _saved_range(self, name: str) -> tuple[int, int, int]:
        """Return this rank's `local_range` of a parameter without the vocabulary's padding."""
        to, low, high = self.local_range(name)
        _, _, saved = self.sharding.saved_part(name, self.shapes[name])
        end = min(high, math.prod(saved))
        # A part may hold nothing but padding.
        return to, low, max(low, end)

    def boxes_of(self, name: str, data: int, tensor: int) -> list[shard.Box]:
        _, low, high = self.local_range(name, data if self.is_sharded else 0)
        offsets = self.sharding.offsets(name, self.shapes[name], tensor)
        return _boxes_at(offsets, shard.boxes(self.shapes[name], low, high))

    def state_of(self, name: str) -> tuple[tuple[int, ...], list[shard.Box], Tensor, RuleState]:
        # Where the part lies, here and in the full tensor.
        to, low, high = self._saved_range(name)
        full, offsets, part = self.sharding.saved_part(name, self.shapes[name])
        boxes = _boxes_at(offsets, shard.boxes(tuple(part), low, high))

        def cut(flat: Tensor, begin: int) -> Tensor:
            values = flat[to - begin : to - begin + high - low].detach()
            return values.view(boxes[0][1]) if len(boxes) == 1 else values

        # The optimizer's state; one of no elements where this rank updates none of the tensor.
        bucket = self.bucket_of[name]
        offset, _ = bucket.spans[name]
        kind = next(kind for kind, begin, end in bucket.kinds if begin <= offset < end)
        state = self.new_state(kind.param_group.rule, self.master[:0])
        owned = self._range_at(to)
        if owned and boxes:
            state = {key: cut(owned.state[key], owned.begin) for key in state}
        if self.average is not None:
            state[AVERAGE] = cut(self.average.values[0], 0)
        return tuple(full), boxes, cut(self.master, 0), state


class FlatMainGrad:
    """The total of a parameter's gradient, to which hooks and kernels add: a gradients.MainGrad."""

    def __init__(self, store: FlatStore, bucket: Bucket, name: str, uses: int) -> None:
        self.store = store
        self.bucket = bucket
        self.name = name
        self.uses = uses
        self.span = bucket.spans[name]
        # kept gradients of the bucket, and the part of them
        self.view: tuple[Tensor, Tensor] | None = None

    def begin(self) -> tuple[Tensor, bool]:
        store = self.store
        bucket = self.bucket
        if bucket.gradients is None:  # ZeRO 2: one micro-batch's
            bucket.gradients = torch.zeros(bucket.size, dtype=store.full_dtype, device=store.device)
        if not store.keeps_gradients:
            return _view(bucket.gradients, self.span), True
        if self.view is None or self.view[0] is not bucket.gradients:
            self.view = bucket.gradients, _view(bucket.gradients, self.span)
        return self.view[1], self.name in store.added

    def end(self, parts: int = 1) -> None:
        """Count the parts of a gradient; start the sums of buckets that have all of theirs."""
        store = self.store
        bucket = self.bucket
        store.added.add(self.name)
        received = bucket.parts_received.get(self.name, 0) + parts
        bucket.parts_received[self.name] = received
        if received < self.uses:
            return
        bucket.seen.add(self.name)
        if len(bucket.seen) < len(bucket.spans) or bucket.partial:
            return
        if not store.keeps_gradients:
            store.sum_over_ranks(bucket)
        elif store.is_last_backward:
            store.sum_full_buckets()


def uses_of(model: nn.Module, name: str) -> int:
    """Return in how many places the network uses a parameter; 0 if unknown, as in custom models."""
    if not isinstance(model, GPT):
        return 0
    is_tied = model.has_embedding and model.has_head and model.lm_head is None
    return 2 if name == "wte.weight" and is_tied else 1


def _boxes_at(offsets: Iterable[int], boxes: Iterable[shard.Box]) -> list[shard.Box]:
    """Return a part's boxes where they are in the full tensor."""
    return [(tuple(map(operator.add, begin, offsets)), sizes) for begin, sizes in boxes]


def _view(flat: Tensor, span: tuple[int, torch.Size]) -> Tensor:
    offset, shape = span
    return flat.detach()[offset : offset + shape.numel()].view(shape)
