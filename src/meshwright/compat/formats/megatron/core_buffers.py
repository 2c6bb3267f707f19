"""Megatron-Core's distributed optimizer in memory order ("dp_reshardable", default since 2025).

Flat buckets of masters and moments do not say which parameter is where. The order is rebuilt for
both kinds of layer (Megatron-Core's, Transformer Engine's): the last parameter first, each from a
multiple of 64 elements, a bucket ending after a parameter. It is proved: all sizes of buckets must
agree, and the masters, rounded, must be the model's weights.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

import torch

from meshwright.checkpoint.boxes import Shape
from meshwright.checkpoint.sources import MappedSource, TensorView
from meshwright.compat.formats.adam import MOMENTS
from meshwright.compat.formats.megatron import sharded
from meshwright.compat.formats.megatron.sharded import Boxes, ModelSizes, Parameter, RankFile
from meshwright.parallel import shard

PREFIX = r"(?:chained_0\.)?optimizer\.distributed\.dp_group_idx_"
KEY = re.compile(
    PREFIX + r"(\d+)\.gbuf_idx_(\d+)\.dtype_.+\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)"
)
# What is beside the tensors, equal on every rank.
BESIDE = re.compile(PREFIX + r"0\.(optimizer|grad_scaler)/shard_0_1")
ALIGNED = 64  # elements
# A layer's parts in module order: Megatron-Core's own, and with Transformer Engine's fused norms.
ORDERS = (
    ("ln_1", "attn.proj", "attn.qkv", "attn.ln_q", "attn.ln_k", "ln_2", "mlp.fc", "mlp.proj"),
    ("attn.proj", "ln_1", "attn.qkv", "attn.ln_q", "attn.ln_k", "ln_2", "mlp.fc", "mlp.proj"),
)

Buckets = dict[int, dict[str, tuple[Shape, Boxes]]]  # by number, by kind: size and parts


def by_parameter(
    source: MappedSource,
    tensors: Mapping[str, tuple[Shape, Boxes]],
    sizes: ModelSizes,
    tensor_ranks: int,
) -> dict[str, list[TensorView]]:
    """Return masters and moments of a source that has only weights, or raise ValueError."""
    groups: dict[int, dict[int, Buckets]] = {}  # by rank, by chunk of the model
    for key, tensor in tensors.items():
        if match := KEY.fullmatch(key):
            group, chunk, bucket = map(int, match.groups()[:3])
            buckets = groups.setdefault(group, {}).setdefault(chunk, {})
            buckets.setdefault(bucket, {})[match[4]] = tensor

    # Data ranks share their buffers here, so there is a group for each tensor rank and stage.
    stages, rest = divmod(len(groups), tensor_ranks)
    chunks = len(next(iter(groups.values()), ()))
    is_complete = not rest and stages > 0 and sorted(groups) == list(range(len(groups)))
    if not is_complete or sizes.layers % (stages * chunks):
        raise ValueError(
            f"it has buffers of {len(groups)} ranks, {tensor_ranks} tensor ranks, {sizes.layers} layers"
        )

    # Try one order after the other: a wrong one shows in the sizes or in the masters.
    why = ValueError("it has no buffers")
    for order in ORDERS:
        try:
            ranks = [RankFile(source.folder, tp, 0, {}, [[]]) for tp in range(tensor_ranks)]
            for group, by_chunk in groups.items():
                # Tensor ranks are counted first, then stages.
                stage, tp = divmod(group, tensor_ranks)
                for chunk, buckets in by_chunk.items():
                    position = range(chunk * stages + stage, stages * chunks)
                    parameters = filled(source, order, position, buckets, tensor_ranks)
                    ranks[tp].chunks[0] += parameters
            views = sharded.lay_out(ranks, dataclasses.replace(sizes, t=tensor_ranks), 3.0)
            check_masters(source, views)
            return views
        except ValueError as error:
            why = error
    raise why


def filled(
    source: MappedSource, order: Sequence[str], position: range, buckets: Buckets, tensor_ranks: int
) -> list[Parameter]:
    """Return the parameters of the chunk of the model at `position.start`, with their values.

    `position.stop` is the number of such chunks.
    """
    waiting = list(module_order(source, order, position))[::-1]
    out = []
    for number in sorted(buckets):
        by_kind = buckets[number]
        end = 0
        if set(by_kind) != {"param", *MOMENTS}:
            raise ValueError(f"bucket {number} has only {sorted(by_kind)}")
        (size,) = by_kind["param"][0]
        # As many parameters as the bucket has room for.
        while waiting:
            name, copy = waiting[0]
            shape = rank_shape(name, source.tensors[name].shape, tensor_ranks)
            begin = -(-end // ALIGNED) * ALIGNED
            if begin + prod(shape) > size:
                break
            end = begin + prod(shape)
            p = Parameter(name, re.sub(r"h\.\d+\.", "", name), torch.empty(shape, device="meta"))
            for kind, (_, boxes) in by_kind.items():
                add_from_bucket(p, "" if kind == "param" else kind, begin, boxes)
            if not copy:
                out.append(p)
            waiting.pop(0)
        if end != size:
            raise ValueError(f"bucket {number} has {size:,} elements, where {end:,} are expected")
    if waiting:
        raise ValueError(f"{waiting[0][0]} is in no bucket")
    return out


def module_order(
    source: MappedSource, order: Sequence[str], position: range
) -> Iterator[tuple[str, bool]]:
    """Yield a chunk's parameters in the order of its modules: (name, is the last stage's copy)."""
    first = position.start == 0
    last = len(position) == 1
    layers = 1 + max(sharded.layers_of(source.tensors))
    begin = position.start * layers // position.stop
    end = (position.start + 1) * layers // position.stop
    names = ["wte.weight", "wpe.weight"] if first else []
    for layer, part, kind in product(range(begin, end), order, ("weight", "bias")):
        names.append(f"h.{layer}.{part}.{kind}")
    if last:
        names += ["ln_f.weight", "ln_f.bias", "lm_head.weight"]
    yield from ((name, False) for name in names if name in source.tensors)
    # The last stage computes the logits with a copy of the table, which comes last.
    if last and not first and "lm_head.weight" not in source.tensors:
        yield "wte.weight", True


def rank_shape(name: str, shape: Shape, tensor_ranks: int) -> Shape:
    """Return the shape of a tensor rank's part; a gate's halves are stacked."""
    cut = shard.rule(name).cut
    sizes = list(shape)
    if cut is not None:
        sizes[cut] //= tensor_ranks
    # Ours has a dimension for the halves.
    gated = ".mlp.fc." in name and len(sizes) == (3 if name.endswith("weight") else 2)
    if gated:
        gate, rows, *rest = sizes
        sizes = [gate * rows, *rest]
    return tuple(sizes)


def add_from_bucket(p: Parameter, kind: str, begin: int, boxes: Boxes) -> None:
    """Add the parameter's elements, which start at `begin` in a bucket that was saved in parts."""
    # A part may hold the end of one parameter and the beginning of the next.
    end = begin + prod(p.shape)
    for (at,), values in boxes:
        low = max(begin, at)
        high = min(end, at + len(values))
        if low < high:
            p.add(kind, low - begin, values[low - at : high - at])


def check_masters(source: MappedSource, views: Mapping[str, list[TensorView]]) -> None:
    """Compare numbers of each master's first row, rounded, with the model's."""
    for name, info in source.tensors.items():
        for offset, master in views.get(name, ()):
            # At most 64 numbers: enough to tell layers, which are alike, from each other.
            some = [1] * master.ndim
            some[-1] = min(master.shape[-1], 64)
            model = torch.empty(some, dtype=getattr(torch, info.dtype))
            box = offset, tuple(some)
            source.fill({name: (info.shape, [box], model)})
            first_row = master[tuple(map(slice, some))]
            if not sharded.is_rounded(model, first_row):
                raise ValueError(f"the masters at the place of {name} are not the model's weights")
