"""Parameter store for ZeRO 3: torch's fully_shard shards the weights by rows.

fully_shard gathers a layer's weights before the layer runs. The shards are the full-precision
masters; forward and backward see them in the lower precision.

Only the update is our own (store.py): torch's neither clips across pipeline stages nor makes all
ranks agree to skip an fp16 overflow. fully_shard sees the tensor ranks' parts as plain parameters;
only the table in shard.py knows how they are cut.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from meshwright.kernels.fp8 import Scales
from meshwright.kernels.moments import Place, place_of
from meshwright.optim import rules
from meshwright.optim.average import MovingAverage
from meshwright.optim.rule_table import AVERAGE
from meshwright.parallel import comm, shard
from meshwright.parallel.layout import Layout
from meshwright.parallel.store import Member, RuleState, Store, StoreSpec, Updated, UpdateRange


class FullyShardedStore(Store):
    """Store for ZeRO 3; allocates and owns the memory of `models`, a pipeline rank's stages."""

    def __init__(self, models: list[Any], spec: StoreSpec) -> None:
        super().__init__(spec, ("replicas",))
        layout = spec.layout
        dtype = spec.dtype
        device = spec.device
        # A layer's output is a view, but nothing writes to it (gpt.join adds out of place).
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        mesh = make_mesh(layout, device)
        self.ranks = layout.size("shard", "cp")
        low = dtype if dtype is not self.full_dtype else None
        # The residual stream may be wider than the weights, so inputs are not cast.
        precision = MixedPrecisionPolicy(
            low, self.full_dtype if low else None, cast_forward_inputs=False
        )
        arguments: dict[str, Any] = {}
        if spec.offload:
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        self.shapes: dict[str, torch.Size] = {}  # before the cut into rows
        self.parameters: dict[str, Any] = {}
        arguments |= {
            "mesh": mesh,
            "mp_policy": precision,
            "shard_placement_fn": lambda p: Shard(shard.rows(p.shape, self.ranks)[0]),
        }
        self.models: list[Any] = models
        for model in models:
            model.to(self.full_dtype)
            self.shapes |= {name: p.shape for name, p in model.named_parameters()}
            # Keep what backward needs first, unless other micro-batches run forward in between.
            *blocks, last = model.h.children()
            for block in blocks:
                fully_shard(block, reshard_after_forward=True, **arguments)
            fully_shard(last, reshard_after_forward=self.layout.pp > 1, **arguments)
            fully_shard(model, reshard_after_forward=self.layout.pp > 1, **arguments)
            # Gather the next before this one runs.
            for block, following in itertools.pairwise([*blocks, last]):
                block.set_modules_to_forward_prefetch([following])
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # Sums, not means: losses are already divided by the tokens.
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            model.to_empty(device=self.update_device)
            self.parameters |= dict(model.named_parameters())
        self._make_update_ranges()

    def begin_backward(self, is_last: bool) -> None:
        if self.layout.replicas > 1:  # the last pass alone sums over them
            for model in self.models:
                model.set_requires_all_reduce(is_last)

    def _make_update_ranges(self) -> None:
        self.update_ranges = []
        self.named = {}
        updated: Updated = {}
        for name, p in self.parameters.items():
            local = p.to_local().detach()
            local.zero_()
            master = nn.Parameter(local)
            param_group = rules.param_group(self.optimizer, self.model, name, local)
            state = self.new_state(param_group.rule, local)
            owned = self.named[name] = UpdateRange(self.sharding.is_counted(name), 0, master, state)
            self.update_ranges.append(owned)
            member = Member(name, master, state, self.place_of(name))
            updated.setdefault(param_group, []).append(member)
        self.make_updates(updated)
        if self.optimizer.ema:
            masters = [owned.master.detach() for owned in self.update_ranges]
            self.average = MovingAverage(self.optimizer.ema, masters)
            self.averages = dict(zip(self.named, self.average.values, strict=True))

    def place_of(self, name: str) -> Place:
        full = self.sharding.full_shape(name, self.shapes[name])
        boxes = self.boxes_of(name, self.layout.at("shard", "cp"), self.layout.at("tp"))
        if not boxes:  # no element: any place will do
            return place_of(name, full, (0,) * len(full), full)
        offsets, sizes = boxes[0]
        return place_of(name, full, offsets, sizes)

    def rows(self, name: str, position: int | None = None) -> tuple[int, int, int]:
        """Return a rank's (none: this one's) rows: dimension, start, length."""
        if position is None:
            position = self.layout.at("shard", "cp")
        return shard.rows(self.shapes[name], self.ranks, position)

    def boxes_of(self, name: str, data: int, tensor: int) -> list[shard.Box]:
        dimension, first, size = self.rows(name, data)
        offsets = self.sharding.offsets(name, self.shapes[name], tensor)
        part = list(self.shapes[name])
        offsets[dimension] += first
        part[dimension] = size
        return [(tuple(offsets), tuple(part))] if size else []

    def set_master(self, name: str, tensor: Tensor) -> None:
        self.named[name].master.data.copy_(tensor.narrow(*self.rows(name)))

    def weights_by_name(self) -> dict[str, Tensor]:
        return {name: owned.master.detach() for name, owned in self.named.items()}

    def publish_weights(self, has_all: bool = True) -> None:
        """Scale the weights for fp8; the shards are the weights, which the next pass gathers."""
        if self.scales is None:
            return
        amaxes = []
        for product in self.scales.products:
            master = self.named[f"{product.name}.weight"].master.detach()
            # A rank may have no rows. The largest number is rounded as it is when it is gathered.
            amax = master.abs().amax() if master.numel() else master.new_zeros(())
            amaxes.append(amax.to(self.device, self.dtype).float())
        self.scales.scale_weights(amaxes)

    def set_scales(self, scales: Scales | None) -> None:
        super().set_scales(scales)
        if scales is not None:
            scales.keeps_casts = False  # a rank has no whole weights between the passes

    def forget_gathered(self) -> None:
        for model in self.models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def clear_gradients(self) -> None:
        for name, p in self.parameters.items():
            # Both would keep the memory of the last step's.
            p.grad = None
            self.named[name].master.grad = None

    def finish_sums(self) -> None:
        partial = []
        for name, owned in self.named.items():
            grad = self.parameters[name].grad
            if grad is None:  # no loss of this step depends on it
                owned.master.grad = torch.zeros_like(owned.master)
            else:
                owned.master.grad = grad.to_local()
            if shard.is_partial(name, self.layout.tp, self.sharding.sequence):
                partial.append(owned.master.grad)
        # Norms and biases whose gradients are sums over the tensor ranks: in one collective.
        if partial:
            views = [x.view(-1) for x in partial]
            flat = self._total(torch.cat(views), "tp")
            parts = flat.split_with_sizes([len(x) for x in views])
            torch._foreach_copy_(views, list(parts))
        if self.sharding.tied and self.layout.group("embedding") is not None:
            table = self.named["wte.weight"].master.grad
            assert table is not None
            table.copy_(self._total(table, "embedding"))

    def _total(self, x: Tensor, group: str) -> Tensor:
        return comm.total(x.to(self.device, copy=True), self.layout.group(group))

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        for name, owned in self.named.items():
            dimension, _, count = self._saved_rows(name)
            yield name, self.summed(owned).narrow(dimension, 0, count)

    def _saved_rows(self, name: str) -> tuple[int, int, int]:
        """Return this rank's `rows` of a parameter without the vocabulary's padding."""
        dimension, first, size = self.rows(name)
        _, _, saved = self.sharding.saved_part(name, self.shapes[name])
        true = saved[dimension] - first
        # A rank may have nothing but padding.
        return dimension, first, max(0, min(size, true))

    def state_of(self, name: str) -> tuple[tuple[int, ...], list[shard.Box], Tensor, RuleState]:
        # Where the rows lie in the full tensor.
        dimension, first, count = self._saved_rows(name)
        full, offsets, part = self.sharding.saved_part(name, self.shapes[name])
        offsets[dimension] += first
        part[dimension] = count
        boxes = [(tuple(offsets), tuple(part))] if all(part) else []

        # The master weights and the optimizer's state.
        owned = self.named[name]
        kept = dict(owned.state)
        if self.average is not None:
            kept[AVERAGE] = self.averages[name]
        state = {key: values.narrow(dimension, 0, count) for key, values in kept.items()}
        master = owned.master.detach().narrow(dimension, 0, count)
        return tuple(full), boxes, master, state


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the mesh over which weights are sharded, within each replica."""
    group = layout.group("shard")
    replicas = layout.group("replicas")
    assert group is not None
    kind = "cpu" if device.type == "meta" else device.type  # a mesh needs a device with memory
    if replicas is None:
        return DeviceMesh.from_group(group, kind)
    ranks = layout.peers("replicas", "shard", "cp")
    table = torch.tensor(ranks).view(layout.replicas, -1)
    return DeviceMesh.from_group(
        [replicas, group], kind, mesh=table, mesh_dim_names=("replicas", "shard")
    )
