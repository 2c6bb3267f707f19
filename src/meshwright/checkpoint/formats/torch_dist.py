"""Megatron-Core's `torch_dist` folders, and those of torch.distributed.checkpoint with the same names: read, not written.

`.metadata` says of each tensor its shape and its boxes, and of each box in which file and at which byte it lies, as an
archive of torch.save of its own. torch's reader unpickles all of that with nothing held back, which is why this one is
written by hand: everything goes through pickles.load, and the boxes become views of the mapped files.

Layers that are alike are one tensor there, with a first dimension for the layer. Optimizer state is stored like the
parameters (all optimizers that are not distributed, and "fully_reshardable"), or as stretches of each rank's share
("fully_sharded_model_space", 2024 and 2025): one dimension more, the last for the place in the share, the others counting
shares. What lies as in memory ("dp_reshardable") names no parameter: core_buffers.py. Of the two other kinds there were
("dp_zero_gather_scatter", "fully_sharded_bucket_space") the weights alone are read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.checkpoint.boxes import Box, Shape, inside, plus
from meshwright.checkpoint.formats import core_buffers, megatron_state, pickles
from meshwright.checkpoint.formats import megatron_names as names
from meshwright.checkpoint.formats.megatron_ranks import (
    Boxes,
    Parameter,
    Rank,
    Sizes,
    check_complete,
    check_shapes,
    lay_out,
)
from meshwright.checkpoint.sources import Mapped
from meshwright.errors import BAD_DATA, UserError
from meshwright.parallel import shard

if TYPE_CHECKING:
    import torch

PREFIX = re.compile(r"(?:(?:model|module)\d*\.)*")
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
BUFFERS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
BESIDE = re.compile(
    r".*_extra_state.*|.*inv_freq|(rng_state|rerun_state|optimizer|opt_param_scheduler|iteration|args)\b.*"
)
# Options that make another network than ours, and their values that do not.
OTHERS: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False,),
    "mtp_num_layers": (0,),
    "hybrid_attention_ratio": (0.0,),
    "rotary_interleaved": (False,),
    "use_rope_scaling": (False,),
    "rotary_seq_len_interpolation_factor": (1,),
    "softmax_type": ("vanilla",),
    "window_size": (),
    "no_rope_freq": (),
    "quick_geglu": (False,),
    "position_embedding_type": ("learned_absolute", "rope", "none"),
}


class Stored(NamedTuple):
    """A tensor as it lies there."""

    shape: Shape
    boxes: Boxes


class Meaning(NamedTuple):
    """What the name of a tensor there says."""

    name: names.Name
    stacked: bool  # all layers in one tensor, whose first dimension counts them
    half: int | None  # of a gated MLP's first product, where its halves are kept apart


def open(folder: Path, trust: bool = False, heads: int | None = None, optimizer: bool = True) -> Mapped:
    """`heads`: for folders that do not say. Without `optimizer` its state is not looked at."""
    common = pickles.load(folder / "common.pt", trust=trust) if (folder / "common.pt").exists() else {}
    metadata = pickles.load(folder / ".metadata", trust=trust)
    tensors = stored(folder, metadata, trust, optimizer)
    if optimizer and isinstance(common.get("optimizer"), dict):
        common["optimizer"] = {**common["optimizer"], **beside_buffers(folder, metadata, trust)}
    return of_parts(folder, common, tensors, heads)


def of_parts(folder: Path, common: dict[str, Any], tensors: dict[str, Stored], heads: int | None) -> Mapped:
    args, notes = megatron_state.namespace(common.get("args")), list[str]()
    for option, harmless in OTHERS.items():
        if args.get(option) is not None and args[option] not in harmless:
            raise UserError(f"{folder}: its model has {option} {args[option]}, which we do not build", BAD_DATA)
    rank = Rank(folder, 0, 0, common, [list(parameters(folder, tensors))])
    check_complete(folder, [rank], 1 + max(layer_of(p) for p in rank.parameters))
    sizes = Sizes.of(rank, [rank], args, heads)
    check_shapes([rank], sizes)
    complete_optimizer(rank)
    pieces = lay_out([rank], sizes, 3.0)
    config = megatron_state.config(args, sizes, pieces, notes)
    source = Mapped("Megatron-Core", folder, 0, config=config, notes=notes, pieces=pieces)
    if not source.has_optimizer and any(map(BUFFERS.match, tensors)):
        try:
            joined = core_buffers.by_parameter(source, tensors, sizes, tensor_ranks(tensors))
            source = dataclasses.replace(source, pieces=joined)
        except ValueError as error:
            notes.append(
                f" > note: {folder} keeps the optimizer's state as it lay in memory (--dist-ckpt-optim-fully-reshardable would "
                f"not), and it cannot be told apart: {error}. Add --no-load-optim to take the weights alone"
            )
    if source.has_optimizer or isinstance(common.get("optimizer"), dict):
        source.state = state_of(common, args, sizes, notes)
        source.step = source.state.get("iteration", 0)
    source.layout = f"tables of tokens over {tensor_ranks(tensors)} tensor ranks"
    vocab = megatron_state.true_vocabulary(common, args)
    return source.of_vocabulary(vocab) if vocab else source


def layer_of(p: Parameter) -> int:
    return int(p.name.split(".")[1]) if p.name.startswith("h.") else -1


# Files


def stored(folder: Path, metadata: Any, trust: bool, optimizer: bool) -> dict[str, Stored]:
    """Every tensor with its boxes, those of a model mapped; what is no tensor is never looked at."""
    told = metadata.state_dict_metadata
    found = {key: Stored(tuple(told[key].size), []) for key in told if hasattr(told[key], "chunks")}
    if not optimizer:
        found = {key: tensor for key, tensor in found.items() if not STATE.fullmatch(key) and not BUFFERS.match(key)}
    for index, info in metadata.storage_data.items():
        tensor = found.get(index.fqn)
        if tensor is None or not (
            STATE.fullmatch(index.fqn) or core_buffers.KEY.fullmatch(index.fqn) or meaning(index.fqn)
        ):
            continue
        if not re.fullmatch(r"\w[\w.-]*", info.relative_path) or getattr(info, "transform_descriptors", None):
            raise UserError(
                f"{folder}: {index.fqn} lies outside of it or is compressed: {info.relative_path}", BAD_DATA
            )
        view = pickles.load(folder / info.relative_path, info.offset, info.length, trust)
        at = tuple(index.offset) if index.offset is not None else (0,) * view.ndim
        if not inside(Box(at, tuple(view.shape)), tensor.shape):
            raise UserError(f"{folder}: a part of {index.fqn} {tensor.shape} is {tuple(view.shape)} at {at}", BAD_DATA)
        tensor.boxes.append((at, view))
    for key, tensor in found.items():
        held = sum(view.numel() for _, view in tensor.boxes)
        if tensor.boxes and held != prod(tensor.shape):
            raise UserError(
                f"{folder}: parts of {key} {tensor.shape} are missing or there twice: {held:,} elements", BAD_DATA
            )
    return found


def beside_buffers(folder: Path, metadata: Any, trust: bool) -> dict[str, Any]:
    """What is kept in common.pt with other kinds of optimizer state: groups with their number of steps, the loss scale."""
    return {
        found[1]: pickles.load(folder / info.relative_path, info.offset, info.length, trust)[0]
        for index, info in metadata.storage_data.items()
        if (found := core_buffers.BESIDE.fullmatch(index.fqn)) and re.fullmatch(r"\w[\w.-]*", info.relative_path)
    }


# Names


def meaning(key: str) -> Meaning | None:
    """None: it is no parameter of a GPT that is known here."""
    key = PREFIX.sub("", key, count=1)
    half = {"_w": 0, "_v": 1}.get(key[-2:])
    key = key if half is None else key[:-2]
    stacked = re.match(r"decoder\.layers\.(?!\d)", key) is not None
    name = names.of_megatron(key.replace("layers.", "layers.0.", 1) if stacked else key)
    return None if name is None else Meaning(name, stacked, half)


def parameters(folder: Path, tensors: Mapping[str, Stored]) -> Iterator[Parameter]:
    """Each parameter with its weights, and what the optimizer holds of it."""
    found: dict[str, Parameter] = {}
    strange = [key for key in tensors if not (STATE.fullmatch(key) or meaning(key) or BESIDE.fullmatch(key))]
    if strange:
        raise UserError(f"{folder}: {strange[0][:200]} is no parameter of a GPT that is known here", BAD_DATA)
    for key, tensor in tensors.items():
        if not STATE.fullmatch(key) and (means := meaning(key)):
            add(found, "", means, tensor)
    shapes = {PREFIX.sub("", key, count=1): tensor.shape for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        if state := STATE.fullmatch(key):
            kind, theirs = state[1].removeprefix("fp32_"), PREFIX.sub("", state[2], count=1)
            if means := meaning(theirs):
                add(found, kind, means, straight(tensor, shapes[theirs]))
    yield from found.values()


def straight(tensor: Stored, shape: Shape) -> Stored:
    """Stretches of shares as boxes of the whole."""
    if len(tensor.shape) == len(shape):
        return tensor
    share = tuple(n // count for n, count in zip(shape, tensor.shape[:-1], strict=True))
    if prod(tensor.shape) != prod(shape) or prod(share) != tensor.shape[-1]:
        raise ValueError(f"{shape} is not cut into shares of {tensor.shape}")
    boxes = []
    for (*which, begin), values in tensor.boxes:
        at, start, flat = tuple(i * n for i, n in zip(which, share, strict=True)), 0, values.reshape(-1)
        for offset, size in shard.boxes(share, begin, begin + len(flat)):
            boxes.append((plus(at, offset), flat[start : start + prod(size)].view(size)))
            start += prod(size)
    return Stored(shape, boxes)


def add(found: dict[str, Parameter], kind: str, means: Meaning, tensor: Stored) -> None:
    """Give the parameter, or each layer's, its boxes of this kind."""
    layers = tensor.shape[0] if means.stacked else 1
    shape = tensor.shape[1:] if means.stacked else tensor.shape
    rows = shape[0] if means.half is not None else 0
    for layer in range(layers):
        name = (means.name._replace(layer=layer) if means.stacked else means.name).full()
        whole = (2 * rows or shape[0], *shape[1:])
        p = found.setdefault(name, Parameter(name, means.name.ours, empty(whole)))
        for offset, view in tensor.boxes:
            if means.stacked:
                if not offset[0] <= layer < offset[0] + len(view):
                    continue
                offset, view = offset[1:], view[layer - offset[0]]
            p.values.setdefault(kind, []).append(((offset[0] + rows * (means.half or 0), *offset[1:]), view))


def empty(shape: Shape) -> torch.Tensor:
    """A shape alone."""
    import torch

    return torch.empty(shape, device="meta")


# What is beside the tensors


def complete_optimizer(rank: Rank) -> None:
    """Masters take the weights' place; without both moments of every parameter there is no state."""
    whole = all({"exp_avg", "exp_avg_sq"} <= set(p.values) for p in rank.parameters)
    masters = whole and all("param" in p.values for p in rank.parameters)
    for p in rank.parameters:
        first = p.values.pop("param", [])
        p.values[""] = first if masters else p.values[""]
        p.values = p.values if whole else {"": p.values[""]}


def tensor_ranks(tensors: Mapping[str, Stored]) -> int:
    """Over how many the table of tokens is cut."""
    return next(
        len(tensor.boxes) for key, tensor in tensors.items() if key.endswith("embedding.word_embeddings.weight")
    )


def state_of(tree: dict[str, Any], args: Mapping[str, Any], sizes: Sizes, notes: list[str]) -> dict[str, Any]:
    """As resume.State saves it: as much as is known. Without a schedule that of the flags is followed."""
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, dict) and isinstance(optimizer.get(0), dict):  # one of several in a chain
        optimizer = optimizer[0]
    iteration, said = int(tree.get("iteration", 0)), len(notes)
    state = megatron_state.state({**tree, "optimizer": optimizer}, args, iteration, sizes.positions, notes)
    if not state and len(notes) > said:  # it has one that cannot be followed
        return {}
    if not state:
        samples = int(args.get("consumed_train_samples") or iteration * megatron_state.batch_size(args))
        state = {"iteration": iteration, "consumed_train_samples": samples, "schedule_samples": samples}
    steps = [int(step) for key in ("step", "common_step") for step in values_of(optimizer, key) if step is not None]
    return state | {"optimizer_steps": max(steps, default=iteration)}


def values_of(tree: Any, key: str) -> Iterator[Any]:
    """Every value under this key in a tree of settings."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        if name == key:
            yield value
        else:
            yield from values_of(value, key)
