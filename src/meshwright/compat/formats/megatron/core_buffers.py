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
# no tensors: equal on every rank
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
            groups.setdefault(group, {}).setdefault(chunk, {}).setdefault(bucket, {})[match[4]] = (
                tensor
            )
    stages, rest = divmod(len(groups), tensor_ranks)
    chunks = len(next(iter(groups.values()), ()))
    if (
        rest
        or not stages
        or sorted(groups) != list(range(len(groups)))
        or sizes.layers % (stages * chunks)
    ):
        raise ValueError(
            f"it has buffers of {len(groups)} ranks, {tensor_ranks} tensor ranks, {sizes.layers} layers"
        )
    why = ValueError("it has no buffers")
    for order in ORDERS:
        try:
            ranks = [RankFile(source.folder, tp, 0, {}, [[]]) for tp in range(tensor_ranks)]
            for group, by_chunk in groups.items():
                for chunk, buckets in by_chunk.items():
                    position = range(chunk * stages + group // tensor_ranks, stages * chunks)
                    ranks[group % tensor_ranks].chunks[0] += filled(
                        source, order, position, buckets, tensor_ranks
                    )
            views = sharded.lay_out(ranks, dataclasses.replace(sizes, t=tensor_ranks), 3.0)
            check_masters(source, views)
            return views
        except ValueError as error:
            why = error
    raise why


def filled(
    source: MappedSource, order: Sequence[str], position: range, buckets: Buckets, tensor_ranks: int
) -> list[Parameter]:
    """Return the parameters of the chunk of the model at `position.start`, with their values."""
    waiting = list(module_order(source, order, position))[::-1]
    out = []
    for number in sorted(buckets):
        by_kind, end = buckets[number], 0
        if set(by_kind) != {"param", *MOMENTS}:
            raise ValueError(f"bucket {number} has only {sorted(by_kind)}")
        (size,) = by_kind["param"][0]
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
            out += [] if copy else [p]
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
    first, last = position.start == 0, len(position) == 1
    layers = 1 + max(sharded.layers_of(source.tensors))
    own_layers = range(
        position.start * layers // position.stop, (position.start + 1) * layers // position.stop
    )
    names = ["wte.weight", "wpe.weight"] * first
    names += [
        f"h.{layer}.{part}.{kind}"
        for layer in own_layers
        for part in order
        for kind in ("weight", "bias")
    ]
    names += ["ln_f.weight", "ln_f.bias", "lm_head.weight"] * last
    yield from ((name, False) for name in names if name in source.tensors)
    if last and not first and "lm_head.weight" not in source.tensors:
        yield "wte.weight", True


def rank_shape(name: str, shape: Shape, tensor_ranks: int) -> Shape:
    """Return the shape of a tensor rank's part; a gate's halves are stacked."""
    cut = shard.rule(name).cut
    if cut is not None:
        at = len(shape) + cut
        shape = tuple(n // tensor_ranks if i == at else n for i, n in enumerate(shape))
    gated = ".mlp.fc." in name and len(shape) == (3 if name.endswith("weight") else 2)
    return (shape[0] * shape[1], *shape[2:]) if gated else shape


def add_from_bucket(p: Parameter, kind: str, begin: int, boxes: Boxes) -> None:
    """Add the parameter's elements, which start at `begin` in a bucket that was saved in parts."""
    for (at,), values in boxes:
        low, high = max(begin, at), min(begin + prod(p.shape), at + len(values))
        if low < high:
            p.add(kind, low - begin, values[low - at : high - at])


def check_masters(source: MappedSource, views: Mapping[str, list[TensorView]]) -> None:
    """Compare numbers of each master's first row, rounded, with the model's."""
    for name in source.tensors:
        for offset, master in views.get(name, ()):
            some = (*(1 for _ in master.shape[:-1]), min(master.shape[-1], 64))
            model = torch.empty(some, dtype=getattr(torch, source.tensors[name].dtype))
            source.fill({name: (source.tensors[name].shape, [(offset, some)], model)})
            if not sharded.is_rounded(model, master[tuple(slice(0, n) for n in some)]):
                raise ValueError(f"the masters at the place of {name} are not the model's weights")
