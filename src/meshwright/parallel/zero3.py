"""The parameter store of ZeRO 3: torch's fully_shard holds the weights, of which each rank has some rows, and gathers a layer's
before it runs. Shards are the full-precision masters; forward and backward see them in the lower precision.

Only the update is ours (zero.py), because torch's knows neither clipping over pipeline stages nor fp16's agreement of all
ranks. fully_shard sees the tensor ranks' parts as plain parameters; what is cut twice is known to the table alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwright import optimizer
from meshwright.config import Optimizer
from meshwright.parallel import comm
from meshwright.parallel.layout import Layout
from meshwright.parallel.zero import Draw, Named, Piece, Store


class FullyShardedStore(Store):
    """Owns the memory of the `models` (built on the meta device), the parts that one pipeline rank runs."""

    def __init__(
        self, models: list[Any], o: Optimizer, dtype: torch.dtype, device: torch.device, vocab: int, offload: bool,
        layout: Layout, sequence: bool, tied: bool,
    ) -> None:  # fmt: skip
        super().__init__(o, dtype, device, vocab, offload, layout, sequence, tied, ("replicas",))
        # A layer's output is a view; nothing writes into it (model.gpt.join adds out of place).
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        mesh = mesh_of(layout, device)
        low = dtype if dtype is not self.full else None
        # The residual stream may be wider than the weights: it stays as it is.
        precision = MixedPrecisionPolicy(low, self.full if low else None, cast_forward_inputs=False)
        more: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu")} if offload else {}
        self.shapes: dict[str, torch.Size] = {}  # of this rank's tensor part, before it is cut into rows
        self.parameters: dict[str, Any] = {}
        for model in models:
            model.to(self.full)
            self.shapes |= {name: p.shape for name, p in model.named_parameters()}
            for block in model.h.children():
                fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=precision, **more)
            fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=precision, **more)
            for module in model.modules():
                if isinstance(module, FSDPModule):  # losses are divided by the global batch's tokens already
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            model.to_empty(device=self.home)
            self.parameters |= dict(model.named_parameters())
        self.last = True  # gradients are summed after every micro-batch: nothing waits for the last one
        self._make_pieces(o)

    def _make_pieces(self, o: Optimizer) -> None:
        self.pieces, self.named = [], {}
        updated: dict[tuple[optimizer.Rule, bool], list[tuple[nn.Parameter, dict[str, Tensor]]]] = {}
        for name, p in self.parameters.items():
            local = p.to_local().detach()
            local.zero_()
            master = nn.Parameter(local)
            rule = optimizer.rule(o, name, local)
            state = {key: torch.zeros_like(local) for key in optimizer.STATE[rule]}
            piece = self.named[name] = Piece(self.is_counted(name), 0, master, state)
            self.pieces.append(piece)
            updated.setdefault((rule, optimizer.decays(name, local)), []).append((master, state))
        self.make_updates(o, updated)

    def rows(self, name: str) -> tuple[int, int]:
        """This rank's rows, as torch cuts them: equal portions, of which the last may be short."""
        count, ranks, place = self.shapes[name][0], self.layout.size("shard", "cp"), self.layout.at("shard", "cp")
        each = -(-count // ranks)
        first = min(place * each, count)
        return first, min(first + each, count)

    def initialise(self, draw: Draw) -> None:
        """Fill the masters by drawing whole tensors, of which this rank keeps its part: no layout changes a value."""
        for name, piece in self.named.items():
            whole = torch.zeros(self.whole_shape(name, self.shapes[name]))
            draw([(name, whole)])
            first, end = self.rows(name)
            piece.master.data.copy_(self.cut(name, whole)[first:end])

    def publish_weights(self) -> None:
        """The shards are the weights: the next forward pass gathers them."""

    def clear_gradients(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def finish_sums(self) -> None:
        partial = []
        for name, piece in self.named.items():
            grad = self.parameters[name].grad
            piece.master.grad = torch.zeros_like(piece.master) if grad is None else grad.to_local()
            if self.is_partial(name):
                partial.append(piece.master.grad)
        if partial:  # all at once
            flat = torch.cat([x.flatten() for x in partial])
            comm.total(flat, self.layout.group("tp"))
            torch._foreach_copy_(
                [x.view(-1) for x in partial], list(flat.split_with_sizes([x.numel() for x in partial]))
            )
        ends = self.layout.group("embedding") if self.tied else None
        if ends is not None:
            table = self.named["wte.weight"].master.grad
            assert table is not None
            comm.total(table, ends)

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        for name, piece in self.named.items():
            yield name, self.summed(piece)

    def named_state(self, with_optimizer: bool = True, to_save: bool = False) -> Named:
        """As ParameterStore's."""
        out: Named = {}
        for name, piece in self.named.items():
            if to_save and not self.is_counted(name):
                continue
            shape = self.shapes[name]
            row = shape.numel() // shape[0]
            first, end = self.rows(name)
            whole, boxes, high = self.boxes(name, shape, first * row, end * row)
            flats = {"": piece.master.detach()}
            if with_optimizer:
                rule = next(rule for (rule, _), u in self.updates.items() if piece.master in u.state)
                flats |= {f"/{optimizer.STATE[rule][key]}": flat for key, flat in piece.state.items()}
            for suffix, flat in flats.items():
                kept = flat.flatten()[: high - first * row]
                out[name + suffix] = (whole, boxes, kept.view(boxes[0][1]) if len(boxes) == 1 else kept)
        return out


def mesh_of(layout: Layout, device: torch.device) -> DeviceMesh:
    """Over which weights are divided, within each replica."""
    group, replicas = layout.group("shard"), layout.group("replicas")
    assert group is not None
    if replicas is None:
        return DeviceMesh.from_group(group, device.type)
    ranks = next(m for m in layout.members("replicas", "shard", "cp") if layout.rank in m)
    table = torch.tensor(ranks).view(layout.replicas, -1)
    return DeviceMesh.from_group([replicas, group], device.type, mesh=table, mesh_dim_names=("replicas", "shard"))
