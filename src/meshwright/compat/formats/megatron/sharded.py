"""Shared steps of the readers of Megatron-style sharded checkpoints: Megatron, -Core, DeepSpeed.

A reader finds the files, reads their trees and gives each rank's tensors our names (`Parameter`).
`measure_model` derives the model's `Sizes` from the shapes and checks every shape against them.
The reader then adds optimizer state, and `lay_out` makes the table of views into our tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.base.errors import BAD_DATA, bad_data
from meshwright.checkpoint.boxes import Shape, split_boxes
from meshwright.checkpoint.claims import claimed, claimed_heads
from meshwright.checkpoint.sources import TensorView, aligned
from meshwright.config.problem import SettingsError
from meshwright.parallel import shard

COPY = "wte.copy"

Boxes = list[tuple[Shape, "torch.Tensor"]]  # parts of a rank's tensor: offset and elements


class RowMap(NamedTuple):
    """Where rows of a rank's tensor belong in ours.

    `to` has one dimension more if the MLP is gated: which half.
    """

    rows: slice
    to: Shape


@dataclass
class Parameter:
    """A rank's part of one parameter."""

    name: str  # ours: "h.3.attn.qkv.weight"
    part: str  # "attn.qkv.weight", or "attn.query.weight", which is a part of ours
    tensor: torch.Tensor  # as the rank holds it
    # What is read: under "" the weights, under "exp_avg" and so on the optimizer's state.
    values: dict[str, Boxes] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    def add(self, kind: str, begin: int, values: torch.Tensor) -> None:
        """Add a flat tensor of the elements from `begin` on to the values of a kind."""
        self.values.setdefault(kind, []).extend(cut_flat(self.shape, begin, values))

    @property
    def is_replicated(self) -> bool:
        """Whether every tensor rank holds the complete parameter."""
        return shard.rule(self.name).cut is None or self.part.startswith("attn.key_value.")


@dataclass
class RankFile:
    """The file of tensor rank `tp` of pipeline stage `pp`; `chunks` are its virtual stages."""

    path: Path
    tp: int
    pp: int
    tree: dict[str, Any]
    chunks: list[list[Parameter]] = field(default_factory=list)

    @property
    def parameters(self) -> list[Parameter]:
        return [p for chunk in self.chunks for p in chunk]


def check_complete(folder: Path, ranks: Sequence[RankFile], layers: int) -> None:
    """Require the same names on all ranks of a stage, equal layers, and all that a GPT needs."""
    by_stage: dict[int, list[str]] = {}
    for rank in ranks:
        own = [p.name for p in rank.parameters]
        differ = sorted(set(by_stage.setdefault(rank.pp, own)) ^ set(own))
        if differ:
            raise bad_data(f"{rank.path}: {differ[0]} is not on all tensor ranks of this stage")

    # What one layer has, all must have.
    present = [p.name for rank in ranks if rank.tp == 0 for p in rank.parameters]
    needed = {
        "attn.qkv.weight",
        "attn.proj.weight",
        "mlp.fc.weight",
        "mlp.proj.weight",
        "ln_1.weight",
        "ln_2.weight",
    }
    parts = needed | {name.split(".", 2)[2] for name in present if name.startswith("h.")}
    want = {
        "wte.weight",
        "ln_f.weight",
        *(f"h.{i}.{part}" for i in range(layers) for part in parts),
    }
    if missing := sorted(want - set(present)):
        raise bad_data(
            f"{folder}: {', '.join(missing[:8])} {'are' if missing[1:] else 'is'} missing"
        )


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the complete model, from the shapes; `heads` cannot be derived."""

    t: int
    layers: int
    hidden: int
    heads: int
    head_dim: int
    groups: int
    ffn: int
    gates: int  # 2: the MLP is gated
    gate_last: bool  # BigScience multiplies the first half by the activation of the second
    rows: int  # of the token table
    positions: int | None

    @classmethod
    def from_shapes(
        cls, ranks: Sequence[RankFile], args: Mapping[str, Any], heads: int | None
    ) -> ModelSizes:
        # A shape of each kind; whether all layers are alike is checked later.
        first = ranks[0]
        shapes = {p.part: p.shape for rank in ranks for p in rank.parameters}
        qkv = shapes.get("attn.qkv.weight", (0, 0))
        wte = shapes["wte.weight"]
        fc = shapes["mlp.fc.weight"]
        proj = shapes["mlp.proj.weight"]
        if any(len(shape) != 2 for shape in (qkv, wte, fc, proj)):
            raise bad_data(f"{first.path}: a weight that should be a matrix is not one")

        # The heads, which must divide the columns that they fill together.
        t = 1 + ranks[-1].tp
        heads = args.get("num_attention_heads", heads)
        width = shapes["attn.proj.weight"][-1] * t
        if not isinstance(heads, int) or heads < 1 or width % heads:
            if heads is None:
                raise SettingsError(
                    f"{first.path} does not say how many heads there are: give {{num_attention_heads}}",
                    BAD_DATA,
                )
            what = f"{width} columns for its heads, not a multiple of --num-attention-heads {heads}"
            raise bad_data(f"{first.path} has {what}")
        head_dim = width // heads
        ffn = proj[1] * t
        # The rows of qkv are those of the queries and, twice, of the groups; a query apart from key
        # and value is multi-query attention.
        groups = 1
        if "attn.query.weight" not in shapes:
            groups = (qkv[0] * t // max(head_dim, 1) - heads) // 2
        return cls(
            t=t,
            layers=len(layers_of(p.name for rank in ranks for p in rank.parameters)),
            hidden=wte[1],
            heads=heads,
            head_dim=head_dim,
            groups=groups,
            ffn=ffn,
            gates=2 if fc[0] * t == 2 * ffn else 1,
            gate_last="glu_activation" in args,
            rows=wte[0] * t,
            positions=shapes.get("wpe.weight", (None,))[0],
        )

    def rank_shape(self, part: str) -> Shape:
        """Return the shape that a rank's tensor must have."""
        h = self.hidden
        width = self.heads * self.head_dim
        kind, _, last = part.rpartition(".")
        out, into = {
            "wte": (self.rows // self.t, h),
            "lm_head": (self.rows // self.t, h),
            "wpe": (self.positions or 0, h),
            "attn.qkv": ((width + 2 * self.groups * self.head_dim) // self.t, h),
            "attn.query": (width // self.t, h),
            "attn.key_value": (2 * self.head_dim, h),
            "attn.proj": (h, width // self.t),
            "attn.ln_q": (self.head_dim, None),
            "attn.ln_k": (self.head_dim, None),
            "mlp.fc": (self.gates * self.ffn // self.t, h),
            "mlp.proj": (h, self.ffn // self.t),
        }.get(kind, (h, None))
        return (out,) if into is None or last == "bias" else (out, into)

    def row_maps(self, p: Parameter, tp: int, version: float) -> list[RowMap]:
        """Return where the rows of a rank's tensor belong in ours."""
        rows, *columns = shape = self.rank_shape(p.part)
        rest = (0,) * len(columns)
        # Key and value of multi-query attention come behind all queries.
        if p.part.startswith("attn.key_value."):
            return [RowMap(slice(0, rows), (self.heads * self.head_dim, *rest))]
        if p.part.startswith("attn.qkv.") and version < 2:
            return self.older_qkv(rows // 3, rest, tp, version)
        # A rank has its part of both halves, one after the other.
        if p.part.startswith("mlp.fc.") and self.gates == 2:
            half = rows // 2
            begin = tp * half
            first, second = (1, 0) if self.gate_last else (0, 1)
            return [
                RowMap(slice(0, half), (first, begin, *rest)),
                RowMap(slice(half, 2 * half), (second, begin, *rest)),
            ]
        # All others lie there as here.
        to = [0] * len(shape)
        if (cut := shard.rule(p.name).cut) is not None:
            to[cut] = tp * shape[cut]
        return [RowMap(slice(0, rows), tuple(to))]

    def older_qkv(self, width: int, rest: Shape, tp: int, version: float) -> list[RowMap]:
        """Map version 0, [3, heads, head_dim], or 1, [heads, head_dim, 3], to ours."""
        n = self.head_dim
        out = []
        for head, which in product(range(width // n), range(3)):
            # In ours, [heads, 3, head_dim], and in version 1 a head begins at the same row.
            begin = 3 * head * n
            if version < 1:
                first = which * width + head * n
                rows = slice(first, first + n)
            else:
                rows = slice(begin + which, begin + 3 * n, 3)
            out.append(RowMap(rows, (3 * tp * width + begin + which * n, *rest)))
        return out


def measure_model(
    folder: Path, ranks: list[RankFile], layers: int, args: Mapping[str, Any], heads: int | None
) -> ModelSizes:
    """Return the model's sizes once every tensor is there and fits them."""
    present = len(layers_of(p.name for rank in ranks for p in rank.parameters))
    layers = claimed(
        layers, "the number of layers", present, why=f"it holds {present:,}, some may be missing"
    )
    check_complete(folder, ranks, layers)
    sizes = ModelSizes.from_shapes(ranks, args, heads)
    claimed_heads(sizes.layers, sizes.heads, "num_attention_heads")
    for rank in ranks:
        for p in rank.parameters:
            want = sizes.rank_shape("wte.weight" if p.part == COPY else p.part)
            if p.shape != want:
                why = f"{sizes.heads} heads of {sizes.head_dim} and the other shapes; is --num-attention-heads right?"
                raise bad_data(f"{rank.path}: {p.name} is {p.shape}, but {want} follows from {why}")
    return sizes


def cut_flat(shape: Shape, begin: int, values: torch.Tensor) -> Boxes:
    """Return a flat tensor of the elements of a shape from `begin` on as boxes."""
    boxes = shard.boxes(shape, begin, begin + len(values))
    return [(box.offset, part.view(box.size)) for box, part in split_boxes(boxes, values)]


def layers_of(names: Iterable[str]) -> set[int]:
    """Return the numbers of the layers that the names of parameters mention."""
    return {int(name.split(".")[1]) for name in names if name.startswith("h.")}


def one_box(tensor: torch.Tensor) -> Boxes:
    return [((0,) * tensor.ndim, tensor)]


class Stretch(NamedTuple):
    """Consecutive elements of a parameter in one of several flat buffers."""

    p: Parameter
    begin: int  # in the parameter
    buffer: int
    start: int  # in the buffer
    numel: int


def fill_stretches(
    stretches: Iterable[Stretch], buffers: Mapping[str, Sequence[torch.Tensor]]
) -> None:
    """Give parameters their values of each kind from the buffers of that kind."""
    for p, begin, buffer, start, numel in stretches:
        for kind, rows in buffers.items():
            values = rows[buffer][start : start + numel]
            if len(values) != numel:
                raise ValueError(f"a buffer ends within {p.name}")
            p.add(kind, begin, values)


def is_rounded(model: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether the numbers are equal up to the last bit of the model's type."""
    model, master = aligned(model), aligned(master).to(model.dtype)
    return model.double().allclose(master.double(), rtol=torch.finfo(model.dtype).eps, atol=1e-7)


# The table


def lay_out(
    ranks: Sequence[RankFile], sizes: ModelSizes, version: float
) -> dict[str, list[TensorView]]:
    """Return where each rank's values lie in our tensors."""
    views: dict[str, list[TensorView]] = {}
    for rank in ranks:
        for p in rank.parameters:
            if p.part == COPY or (p.is_replicated and rank.tp):
                continue
            row_maps = sizes.row_maps(p, rank.tp, version)
            values = p.values or {"": one_box(p.tensor)}
            for kind, boxes in values.items():
                table = views.setdefault(f"{p.name}/{kind}" if kind else p.name, [])
                for row_map, (offset, box) in product(row_maps, boxes):
                    table += place_box(row_map, offset, box)
    return views


def place_box(row_map: RowMap, offset: Shape, box: torch.Tensor) -> Iterator[TensorView]:
    """Yield the part of a box in these rows; rows with a step occur only in complete tensors."""
    rows = row_map.rows
    first, *columns = offset
    low = max(rows.start, first)
    high = min(rows.stop, first + len(box))
    if low >= high:
        return
    # In ours a gated MLP has one dimension more, before the rows.
    at = list(row_map.to)
    row = len(at) - box.ndim
    at[row] += low - rows.start
    for i, column in enumerate(columns, row + 1):
        at[i] += column
    part = box[low - first : high - first : rows.step]
    yield TensorView(tuple(at), part.unsqueeze(0) if row else part)
