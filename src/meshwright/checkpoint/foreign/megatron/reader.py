"""Open a step of Megatron-LM from 2019 to 2023, or of its descendants: `iter_0005000/`, `release/`.

One file per tensor and pipeline rank holds that rank's part: the model as nested dictionaries, and
the optimizer's state by number, in the order in which Megatron went through its parameters. That
order is rebuilt here and proved: every shape must agree, and the beginnings of masters, rounded,
must be the model's own. (This does not prove the order of norms that are all near 1, or of float32
weights in one file with their state, which have no masters.) The state has one of these forms:

    one file    beside the weights, with float32 masters if the weights have half precision
    sharded     early 2023: `mp_rank_00_003/optim.pt` per data rank, each a slice of a flat buffer
    flat        since May 2023: `distrib_optim.pt`, the whole buffer; since autumn 2023 in buckets

Written by hand: Megatron-LM's own loader is gone, and needed its code, its layout and a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.boxes import Shape
from meshwright.checkpoint.foreign.megatron import names
from meshwright.checkpoint.foreign.megatron import state as megatron_state
from meshwright.checkpoint.foreign.megatron.sharded import (
    COPY,
    MOMENTS,
    Parameter,
    RankFile,
    as_boxes,
    is_rounded,
    measure_model,
    one_box,
)
from meshwright.checkpoint.foreign.pickle import pickles
from meshwright.checkpoint.sources import MappedSource, aligned, check_json, check_state
from meshwright.errors import UserError, bad_data

if TYPE_CHECKING:
    import torch

MODEL, MODEL_ALONE, SHARD, FLAT = "model_optim_rng.pt", "model_rng.pt", "optim.pt", "distrib_optim.pt"
WITHOUT = "add --no-load-optim to load only the weights"
# Largest difference of copies, relative to the norm: some versions let them drift by rounding.
DRIFT = 1e-3


def open_megatron(folder: Path, trust: bool = False, heads: int | None = None, optimizer: bool = True) -> MappedSource:
    """Open one step; `heads` is for files that do not state them.

    Without `optimizer` its state is not read, unless the file is ours: then its masters are the
    weights, as in our own format.
    """
    ranks = [RankFile(path, tp, pp, read(path, trust)) for (tp, pp), path in sorted(files(folder).items())]
    first, notes = ranks[0], list[str]()
    args, version = megatron_state.namespace(first.tree.get("args")), require_equal(ranks, "checkpoint_version")
    layers = name_parameters(folder, ranks, args.get("num_layers"))
    sizes = measure_model(folder, ranks, layers, args, heads)
    check_copies(ranks, notes)
    own, state = read_own(first), dict[str, Any]()
    if folder.name != "release":
        iteration = require_equal(ranks, "iteration")
        tree = first.tree | (read(shards(first)[0], trust) if shards(first) else {})
        state = own["state"] if own else megatron_state.state(tree, args, iteration, sizes.positions, notes)
    if ("optimizer" in first.tree) if own else (state and optimizer):
        steps = [step for rank in ranks for step in read_optimizer(rank, trust)]
        if not own:
            state["optimizer_steps"] = max(steps, default=state["iteration"])
        if not (state and optimizer):
            for p in (p for rank in ranks for p in rank.parameters):
                p.values = {"": p.values[""]}
    source = megatron_state.as_source("Megatron", folder, ranks, sizes, args, notes, float(version))
    vocab = megatron_state.true_vocabulary(first.tree, args)
    if own:
        source.config, vocab = own["config"], own["vocab"]
    source.state, source.step, source.version = state, state.get("iteration", 0), str(version)
    source.layout = f"{1 + ranks[-1].tp} tensor x {1 + ranks[-1].pp} pipeline ranks"
    return source.of_vocabulary(vocab) if vocab else source


def read_own(rank: RankFile) -> dict[str, Any] | None:
    """Return the settings and state that this package wrote beside the tree; None if it did not."""
    own: dict[str, Any] | None = rank.tree.get("meshwright")
    if own is None:
        return None
    vocab = own.get("vocab", "") if isinstance(own, dict) else ""
    if not (vocab is None or (type(vocab) is int and vocab > 0)):
        raise bad_data(f"{rank.path}: its entry `meshwright` is not what Meshwright writes")
    check_state(own.get("state"), rank.path)
    check_json(own.get("config"), rank.path)
    return own


# Files


def files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the file of each (tensor rank, stage); all must be there."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*/model*_rng.pt")):
        at = re.fullmatch(r"mp_rank_(\d{2,})(?:_(\d{3,}))?", path.parent.name)
        if at and path.name in (MODEL, MODEL_ALONE):
            other = found.setdefault((int(at[1]), int(at[2] or 0)), path)
            if other != path:
                raise bad_data(f"{path} and {other} belong to the same rank; remove one of them")
    if not found:
        raise bad_data(f"{folder}: no mp_rank_*/{MODEL} in it")
    t, p = (1 + max(n) for n in zip(*found, strict=True))
    missing = [f"{tp}, {pp}" for tp, pp in product(range(t), range(p)) if (tp, pp) not in found]
    if missing:
        raise bad_data(f"{folder}: of {t} x {p} tensor and pipeline ranks these have no file: ({'), ('.join(missing)})")
    return found


def read(path: Path, trust: bool) -> dict[str, Any]:
    tree = pickles.load_pickle(path, trust=trust)
    if not isinstance(tree, dict):
        raise bad_data(f"{path}: holds a {type(tree).__name__}, not the dictionary of a Megatron checkpoint")
    return tree


def shards(rank: RankFile) -> list[Path]:
    """Return the files of the data ranks' slices of the optimizer's state, if it was sharded."""
    found = sorted(rank.path.parent.parent.glob(f"{rank.path.parent.name}_*/{SHARD}"))
    if [path.parent.name for path in found] != [f"{rank.path.parent.name}_{d:03d}" for d in range(len(found))]:
        raise bad_data(f"{rank.path.parent}_*/{SHARD}: data ranks are missing; {WITHOUT}")
    return found


def require_equal(ranks: Sequence[RankFile], key: str) -> Any:
    """Return a number that all files must agree on."""
    values = {str(rank.path): rank.tree.get(key, 0) for rank in ranks}
    (path, value), *others = values.items()
    for other, another in others:
        if another != value:
            raise bad_data(f"{path} has {key} {value}, {other} has {another}: they are not of one checkpoint")
    if type(value) not in (int, float):
        raise bad_data(f"{path}: {key} is {value!r}, not a number")
    return value


# Names


def name_parameters(folder: Path, ranks: Sequence[RankFile], stated: Any) -> int:
    """Give each tensor our name; return the number of layers.

    With virtual stages, layers are counted through chunk 0 of every stage, then through chunk 1.
    """
    trees = {(rank.tp, rank.pp): [flat(rank, tree) for tree in models(rank)] for rank in ranks}
    stages, chunks = 1 + ranks[-1].pp, len(trees[0, 0])
    if any(len(each) != chunks for each in trees.values()):
        raise bad_data(f"{folder}: the ranks have different numbers of virtual stages")
    begin, begins = 0, {}
    for chunk, pp in product(range(chunks), range(stages)):
        begins[pp, chunk] = begin
        numbers = {name.layer for name, _ in trees[0, pp][chunk] if name.layer is not None}
        if numbers != set(range(len(numbers))):
            raise bad_data(f"{folder}: layers are missing on stage {pp}, it has {sorted(numbers)}")
        begin += len(numbers)
    if isinstance(stated, int) and stated != begin:
        raise bad_data(f"{folder}: has {begin} layers in its files and {stated} in its arguments")
    for rank in ranks:
        for chunk, tree in enumerate(trees[rank.tp, rank.pp]):
            rank.chunks.append([parameter(name, tensor, begins[rank.pp, chunk]) for name, tensor in tree])
    return begin


def parameter(name: names.ParameterName, tensor: torch.Tensor, begin: int) -> Parameter:
    ours = re.sub(r"^attn\.(query|key_value)\.", "attn.qkv.", name.ours)
    return Parameter(name._replace(ours=ours).full(begin), name.ours, tensor)


def models(rank: RankFile) -> list[Any]:
    if "model" in rank.tree:
        return [rank.tree["model"]]
    count = next(n for n in range(len(rank.tree) + 1) if f"model{n}" not in rank.tree)
    if not count:
        raise bad_data(f"{rank.path}: has no model, only {sorted(map(str, rank.tree))[:20]}")
    return [rank.tree[f"model{n}"] for n in range(count)]


def flat(rank: RankFile, tree: Any) -> list[tuple[names.ParameterName, torch.Tensor]]:
    """Return the parameters in the file's order, which is the model's."""
    out = []
    for key, tensor in flattened(tree):
        if not names.NO_PARAMETER.fullmatch(key):
            name = names.parse_name(key)
            if name is None:
                raise bad_data(f"{rank.path}: {key[:200]} is not a known parameter of a GPT")
            out.append((name, tensor.detach()))
    return out


def flattened(tree: Any, before: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dictionaries in their order, under joined names."""
    import torch

    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict):
            yield from flattened(value, f"{before}{key}.")
        elif isinstance(value, torch.Tensor):
            yield f"{before}{key}", value


def check_copies(ranks: Sequence[RankFile], notes: list[str]) -> None:
    """Compare copies of replicated tensors and of the token table: note rounding, refuse more."""
    first: dict[tuple[str, str, int], tuple[RankFile, torch.Tensor]] = {}
    differ: list[str] = []
    for rank in ranks:
        for p in rank.parameters:
            key = (p.name, p.part, -1 if p.is_replicated else rank.tp)
            if p.part == COPY:
                key = ("wte.weight", "wte.weight", rank.tp)
            if key not in first:
                first[key] = rank, p.tensor
                continue
            other, tensor = first[key]
            # Sample the rows of a large table.
            some = slice(None, None, max(p.shape[0] // 64, 1) if p.part == COPY else 1)
            error = difference(tensor[some], p.tensor[some])
            if not error <= DRIFT:
                raise bad_data(
                    f"{other.path} and {rank.path} must hold the same {p.name}, and differ by {error:.2g} of its norm: "
                    "they are not of one checkpoint, or it is damaged"
                )
            differ += [p.name] * (error > 0)
    if differ:
        notes.append(
            f" > note: {len(differ)} tensors that are kept more than once differ by rounding, such as {differ[0]}: the "
            "first rank's are used"
        )


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    import torch

    a, b = aligned(a), aligned(b)
    if torch.equal(a, b):
        return 0.0
    a, b = a.double(), b.double()
    return float((a - b).norm() / a.norm())


# The optimizer's state


def read_optimizer(rank: RankFile, trust: bool) -> Iterator[int]:
    """Fill the parameters' `values`; yield every step count of Adam in the files."""
    beside, tree = shards(rank), rank.tree.get("optimizer")
    if (path := rank.path.with_name(FLAT)).exists():
        from_flat(rank, path, read(path, trust))
    elif beside:
        tree = from_shards(rank, beside, trust)
    else:
        from_one_file(rank, tree)
    for p in rank.parameters:
        check_values(rank, p)
    inner = inner_state(rank.path, tree)
    for entry in (*inner["param_groups"], *inner.get("state", {}).values()):
        if isinstance(entry, dict) and "step" in entry:
            yield int(entry["step"])


def inner_state(path: Path, tree: Any) -> dict[str, Any]:
    """Return torch's own state_dict, which may lie within Megatron's."""
    for key in ("optimizer", "optimizer_state_dict"):
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
    if not isinstance(tree, dict) or not isinstance(tree.get("param_groups"), list):
        raise unknown(path, "it is not laid out as Megatron's")
    return tree


def unknown(path: Path, why: str) -> UserError:
    return bad_data(f"{path}: the optimizer's state cannot be read, {why}; {WITHOUT}")


def decayed_first(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Sort into Megatron's two groups: with weight decay, then biases and norms without.

    In 2019 the modules' kinds decided the group, later the number of dimensions.
    """
    return sorted(parameters, key=lambda p: p.tensor.ndim == 1)


def numbered(path: Path, tree: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the state of each parameter, group after group, and the masters if there are any."""
    inner = inner_state(path, tree)
    state = inner.get("state")
    keys = [key for group in inner["param_groups"] for key in group.get("params", ())]
    if not isinstance(state, dict) or not all(isinstance(state.get(key), dict) for key in keys):
        raise unknown(path, "parameters have no state")
    kinds = ("fp32_from_fp16_params", "fp32_from_fp16", "shard_fp32_from_float16_groups", "fp32_groups")
    masters: list[Any] = next((tree[kind] for kind in kinds if kind in tree), [])
    return [state[key] for key in keys], [master for group in masters for master in group]


def from_one_file(rank: RankFile, tree: Any) -> None:
    states, masters = numbered(rank.path, tree)
    order, masters = decayed_first(rank.parameters), masters[::-1]
    if len(states) != len(order):
        raise unknown(rank.path, f"it is of {len(states)} parameters, the model has {len(order)}")
    for p, state in zip(order, states, strict=True):
        p.values = {kind: one_box(tensor_of(rank.path, state.get(kind), p.shape, p)) for kind in MOMENTS}
        if p.tensor.element_size() > 2:  # more than half precision: its own master
            p.values[""] = one_box(p.tensor)
        else:
            p.values[""] = one_box(tensor_of(rank.path, masters.pop() if masters else None, p.shape, p))
    if masters:
        raise unknown(rank.path, f"{len(masters)} master weights belong to no parameter")


def tensor_of(path: Path, value: Any, shape: Shape, p: Parameter) -> torch.Tensor:
    """Return the value if it is a tensor of this shape."""
    import torch

    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
        held = tuple(value.shape) if isinstance(value, torch.Tensor) else "nothing"
        raise unknown(path, f"at the place of {p.name} {shape} it has {held}")
    return value.detach()


def from_flat(rank: RankFile, path: Path, tree: dict[Any, Any]) -> None:
    """Read a buffer per chunk, last parameter first, or several padded buckets."""
    for number, chunk in enumerate(rank.chunks):
        by_type = tree.get(number)
        if not isinstance(by_type, dict) or len(by_type) != 1 or "per_bucket_numel" in tree:
            raise unknown(path, "its buffers are not laid out as in 2023")
        (buffers,) = by_type.values()
        for kind in ("", *MOMENTS):
            held = buffers.get(kind or "param") if isinstance(buffers, dict) else None
            for p, view in in_buckets(path, held if isinstance(held, list) else [held], chunk[::-1]):
                p.values[kind] = one_box(view)


def in_buckets(path: Path, buckets: list[Any], waiting: list[Parameter]) -> Iterator[tuple[Parameter, torch.Tensor]]:
    """Yield each waiting parameter with its values from the buckets."""
    import torch

    at = 0
    for bucket in buckets:
        if not isinstance(bucket, torch.Tensor) or bucket.ndim != 1:
            raise unknown(path, "a buffer is not a row of numbers")
        start = 0
        while at < len(waiting) and start + prod(waiting[at].shape) <= len(bucket):
            end = start + prod(waiting[at].shape)
            yield waiting[at], bucket[start:end].view(waiting[at].shape)
            start, at = end, at + 1
    if at < len(waiting):
        raise unknown(path, f"it ends before {waiting[at].name}")


def from_shards(rank: RankFile, paths: Sequence[Path], trust: bool) -> Any:
    """Join the data ranks' equal parts of each chunk's buffer, last parameter first.

    Each rank numbers the parameters of its own part from first to last.
    """
    trees = [read(path, trust).get("optimizer") for path in paths]
    for p in rank.parameters:
        p.values = {kind: [] for kind in ("", *MOMENTS)}
    for number, (path, tree) in enumerate(zip(paths, trees, strict=True)):
        states, masters = numbered(path, tree)
        mine = [part for chunk in rank.chunks for part in parts_of_buffer(chunk, number, len(paths))]
        mine.sort(key=lambda part: part[0].tensor.ndim == 1)
        if len(mine) != len(states) or len(masters) not in (0, len(mine)):
            raise unknown(path, f"it is of {len(states)} slices, {len(mine)} are expected")
        for i, (p, begin, end) in enumerate(mine):
            values = {kind: states[i].get(kind) for kind in MOMENTS}
            values[""] = masters[i] if masters else p.tensor.reshape(-1)[begin:end]
            for kind, value in values.items():
                p.values[kind] += as_boxes(p, begin, end, tensor_of(path, value, (end - begin,), p))
    return trees[0]


def parts_of_buffer(chunk: Sequence[Parameter], number: int, count: int) -> Iterator[tuple[Parameter, int, int]]:
    """Yield the parameters of which a data rank has elements [begin, end), in the model's order."""
    total = start = sum(prod(p.shape) for p in chunk)
    size = -(-total // count)
    for p in chunk:
        start -= prod(p.shape)
        begin, end = max(number * size - start, 0), min((number + 1) * size - start, prod(p.shape))
        if begin < end:
            yield p, begin, end


def check_values(rank: RankFile, p: Parameter) -> None:
    """Compare the first and last row of each box of masters with the model: layers are alike."""
    for offset, master in p.values[""]:
        model = p.tensor[tuple(slice(o, o + n) for o, n in zip(offset, master.shape, strict=True))]
        for row in {0, len(master) - 1}:
            if not is_rounded(*(x[row : row + 1].flatten()[:64] for x in (model, master))):
                raise unknown(rank.path, f"the master weights at the place of {p.name} are not those of the model")
