"""Open `torch_dist` folders of Megatron-Core, and torch.distributed.checkpoint's with its names.

`.metadata`, a plain pickle, lists each tensor's boxes with their file and byte. torch's own reader
unpickles it unguarded, hence this one by hand: boxes become views of mapped files.

Equal layers are one tensor there, whose first dimension is the layer. Optimizer state is stored
like the parameters, or as stretches of each rank's share ("fully_sharded_model_space"): one more
dimension, the last for the place in the share, the others counting shares. State saved as it lies
in memory ("dp_reshardable") names no parameter: core_buffers.py. Of two older kinds
("dp_zero_gather_scatter", "fully_sharded_bucket_space") only the weights are read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.base.errors import bad_data
from meshwright.checkpoint.boxes import Box, Shape, inside, plus
from meshwright.checkpoint.claims import FalseClaim, claimed, claimed_shape
from meshwright.checkpoint.pickle import pickles
from meshwright.checkpoint.sources import MappedSource
from meshwright.compat.formats.megatron import core_buffers, names, sharded
from meshwright.compat.formats.megatron import state as megatron_state
from meshwright.compat.formats.megatron.sharded import Boxes, Parameter, RankFile
from meshwright.compat.formats.table import TORCH_DIST

PREFIX = re.compile(r"(?:(?:model|module)\d*\.)*")
STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)"
)
BUFFERS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
BESIDE = re.compile(
    r".*(_extra_state.*|inv_freq)|((rng|rerun)_state|optimizer|opt_param_scheduler|iteration|args)\b.*"
)
# Options of networks that we do not build, and their values that change nothing.
OFF = "multi_latent_attention mtp_num_layers hybrid_attention_ratio rotary_interleaved quick_geglu"
OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(OFF.split(), (False,)),  # or 0
    "no_rope_freq": (),
    "softmax_type": ("vanilla",),
    "position_embedding_type": ("learned_absolute", "rope", "none"),
}

LAYERS, PARTS = 1 << 13, 1 << 18  # of one tensor: a thousand layers have been trained


class DistTensor(NamedTuple):
    """A tensor as the folder holds it."""

    shape: Shape
    boxes: Boxes


class NameParts(NamedTuple):
    """The parts of a tensor's name."""

    name: names.ParameterName
    stacked: bool  # all layers in one tensor, whose first dimension counts them
    half: int | None  # of a gated MLP's first product, if its halves are separate


def open_torch_dist(
    folder: Path, trust: bool = False, heads: int | None = None, optimizer: bool = True
) -> MappedSource:
    """Open one step; `heads` is for folders that do not state them.

    Without `optimizer` its state is not read.
    """
    common: dict[str, Any] = {}
    if (folder / "common.pt").exists():
        common = pickles.load_pickle(folder / "common.pt", trust=trust)
    metadata = pickles.load_pickle(folder / ".metadata", trust=trust)
    tensors = map_tensors(folder, metadata, trust, optimizer)
    if optimizer and isinstance(common.get("optimizer"), dict):
        common["optimizer"] = {**common["optimizer"], **beside_buffers(folder, metadata, trust)}
    return from_tensors(folder, common, tensors, heads)


def from_tensors(
    folder: Path, common: dict[str, Any], tensors: dict[str, DistTensor], heads: int | None
) -> MappedSource:
    args = megatron_state.namespace(common.get("args"))
    notes: list[str] = []
    for option, harmless in OTHERS.items():
        if args.get(option) is not None and args[option] not in harmless:
            raise bad_data(
                f"{folder}: its model has {option} {args[option]}, which we do not build"
            )
    rank = RankFile(folder, 0, 0, common, [list(named_parameters(folder, tensors))])
    layers = sharded.layers_of(p.name for p in rank.parameters)
    sizes = sharded.measure_model(folder, [rank], 1 + max(layers, default=-1), args, heads)
    complete_optimizer(rank)
    source = megatron_state.as_source(TORCH_DIST, folder, [rank], sizes, args, notes)
    # Flat buffers name no parameter; without their order, the weights can still be used.
    if not source.has_optimizer and any(map(BUFFERS.match, tensors)):
        try:
            joined = core_buffers.by_parameter(source, tensors, sizes, tensor_ranks(tensors))
            source = dataclasses.replace(source, views=joined)
        except ValueError as error:
            notes.append(
                f" > note: {folder} keeps the optimizer's state as it lay in memory (unlike with "
                "--dist-ckpt-optim-fully-reshardable), and its parameters cannot be identified: "
                f"{error}. Add --no-load-optim to load only the weights"
            )
    state: dict[str, Any] = {}
    if source.has_optimizer or isinstance(common.get("optimizer"), dict):
        state = megatron_state.state_beside_weights(common, args, sizes.positions, notes)
    layout = f"tables of tokens over {tensor_ranks(tensors)} tensor ranks"
    return megatron_state.finish_source(
        source, state, layout, megatron_state.true_vocabulary(common, args)
    )


# Files


def map_tensors(folder: Path, metadata: Any, trust: bool, optimizer: bool) -> dict[str, DistTensor]:
    """Return every tensor with its boxes, those of a model mapped; other entries are not read."""
    # The tensors that are stated, which alone have chunks.
    tensors: dict[str, DistTensor] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue
        shape = claimed_shape(entry.size, str(key)[:200])
        is_state = STATE.fullmatch(key) or BUFFERS.match(key)
        if optimizer or not is_state:
            tensors[key] = DistTensor(shape, [])

    # Their parts, each a file or a part of one.
    seen: set[tuple[str, int]] = set()
    for index, info in metadata.storage_data.items():
        key = index.fqn
        tensor = tensors.get(key)
        if tensor is None:
            continue
        if not (STATE.fullmatch(key) or core_buffers.KEY.fullmatch(key) or parse_parts(key)):
            continue
        is_plain = re.fullmatch(r"\w[\w.-]*", info.relative_path)
        if not is_plain or getattr(info, "transform_descriptors", None):
            raise bad_data(
                f"{folder}: {index.fqn} lies outside the folder or is compressed: {info.relative_path}"
            )
        if (info.relative_path, info.offset) in seen:
            raise bad_data(
                f"{folder}: {key} shares byte {info.offset} of {info.relative_path} with another part"
            )
        seen.add((info.relative_path, info.offset))
        view = pickles.load_pickle(folder / info.relative_path, info.offset, info.length, trust)
        at = (0,) * view.ndim
        if index.offset is not None:
            at = claimed_shape(index.offset, "an offset")
        if not inside(Box(at, tuple(view.shape)), tensor.shape):
            raise bad_data(
                f"{folder}: a part of {index.fqn} {tensor.shape} is {tuple(view.shape)} at {at}"
            )
        tensor.boxes.append((at, view))

    # A tensor of which no part is stored is refused where it is used.
    for key, tensor in tensors.items():
        covered = sum(view.numel() for _, view in tensor.boxes)
        if tensor.boxes and covered != prod(tensor.shape):
            raise bad_data(
                f"{folder}: parts of {key} {tensor.shape} are missing or duplicated: {covered:,} elements"
            )
    return tensors


def beside_buffers(folder: Path, metadata: Any, trust: bool) -> dict[str, Any]:
    """Return groups and loss scale, which other kinds of optimizer state keep in common.pt."""
    out = {}
    for index, info in metadata.storage_data.items():
        match = core_buffers.BESIDE.fullmatch(index.fqn)
        if match and re.fullmatch(r"\w[\w.-]*", info.relative_path):
            path = folder / info.relative_path
            out[match[1]] = pickles.load_pickle(path, info.offset, info.length, trust)[0]
    return out


# Names


def parse_parts(key: str) -> NameParts | None:
    """Return the parts of a name, or None if it is no known parameter of a GPT."""
    key = PREFIX.sub("", key, count=1)
    half = {"_w": 0, "_v": 1}.get(key[-2:])
    if half is not None:
        key = key[:-2]
    # The name of a stack has no number of a layer, that of a parameter must have one.
    stacked = re.match(r"decoder\.layers\.(?!\d)", key) is not None
    if stacked:
        key = key.replace("layers.", "layers.0.", 1)
    name = names.parse_name(key)
    return None if name is None else NameParts(name, stacked, half)


def named_parameters(folder: Path, tensors: Mapping[str, DistTensor]) -> Iterator[Parameter]:
    """Yield each parameter with its weights and its optimizer state."""
    by_name: dict[str, Parameter] = {}
    strange = [
        key
        for key in tensors
        if not (STATE.fullmatch(key) or parse_parts(key) or BESIDE.fullmatch(key))
    ]
    if strange:
        raise bad_data(f"{folder}: {strange[0][:200]} is not a known parameter of a GPT")
    # The weights first, whose shapes show how their state is cut.
    for key, tensor in tensors.items():
        if not STATE.fullmatch(key) and (means := parse_parts(key)):
            add(by_name, "", means, tensor)
    shapes = {PREFIX.sub("", key, count=1): tensor.shape for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        if state := STATE.fullmatch(key):
            kind = state[1].removeprefix("fp32_")
            theirs = PREFIX.sub("", state[2], count=1)
            if means := parse_parts(theirs):
                add(by_name, kind, means, join_shares(tensor, shapes[theirs]))
    yield from by_name.values()


def join_shares(tensor: DistTensor, shape: Shape) -> DistTensor:
    """Return stretches of shares as boxes of the complete tensor."""
    if len(tensor.shape) == len(shape):
        return tensor
    # It is [shares along each dimension ..., elements of a share].
    *counts, size = tensor.shape
    share = tuple(n // count for n, count in zip(shape, counts, strict=True))
    if prod(tensor.shape) != prod(shape) or prod(share) != size:
        raise ValueError(f"{shape} is not cut into shares of {tensor.shape}")
    boxes = []
    for (*which, begin), values in tensor.boxes:
        # The share begins at `at`, and the stretch is one or more boxes within it.
        at = tuple(i * n for i, n in zip(which, share, strict=True))
        flat = values.reshape(-1)
        for offset, part in sharded.cut_flat(share, begin, flat):
            boxes.append((plus(at, offset), part))
    return DistTensor(shape, boxes)


def add(by_name: dict[str, Parameter], kind: str, means: NameParts, tensor: DistTensor) -> None:
    """Give the parameter, or each layer's, its boxes of this kind."""
    layers = 1
    shape = tensor.shape
    if means.stacked:
        layers, *rest = tensor.shape
        shape = tuple(rest)
    if not tensor.boxes:
        raise FalseClaim(f"no part of {means.name.ours} is stored, whose sizes are {tensor.shape}")
    claimed(layers, f"the number of layers of {means.name.ours}", LAYERS)
    parts = sum(len(view) for _, view in tensor.boxes) if means.stacked else 0
    claimed(parts, f"the parts of the layers of {means.name.ours}", PARTS)

    # The parameters, those of a gated MLP with both halves.
    rows = shape[0] if means.half is not None else 0
    full = (2 * rows or shape[0], *shape[1:])
    parameters = []
    for layer in range(layers):
        name = (means.name._replace(layer=layer) if means.stacked else means.name).full()
        if name not in by_name:
            empty = torch.empty(full, device="meta")
            by_name[name] = Parameter(name, means.name.ours, empty)
        parameters.append(by_name[name])

    # Their boxes: one of a stack is of as many layers as it is long.
    first_row = rows * (means.half or 0)
    for offset, view in tensor.boxes:
        if means.stacked:
            first, begin, *columns = offset
            by_layer = list(zip(parameters[first:], view, strict=False))
        else:
            begin, *columns = offset
            by_layer = [(parameters[0], view)]
        at = (first_row + begin, *columns)
        for p, part in by_layer:
            p.values.setdefault(kind, []).append((at, part))


# What is beside the tensors


def complete_optimizer(rank: RankFile) -> None:
    """Put masters in the weights' place; drop state that lacks moments of any parameter."""
    is_complete = all({"exp_avg", "exp_avg_sq"} <= set(p.values) for p in rank.parameters)
    has_masters = is_complete and all("param" in p.values for p in rank.parameters)
    for p in rank.parameters:
        masters = p.values.pop("param", [])
        if has_masters:
            p.values[""] = masters
        if not is_complete:
            p.values = {"": p.values[""]}


def tensor_ranks(tensors: Mapping[str, DistTensor]) -> int:
    """Return over how many ranks the table of tokens is cut."""
    return next(
        len(t.boxes)
        for key, t in tensors.items()
        if key.endswith("embedding.word_embeddings.weight")
    )
