"""A folder of Megatron-LM from 2019 to 2023, or of a program that grew from it, opened: `iter_0005000/` or `release/`.

One file per tensor and pipeline rank holds that rank's part of everything: the model as nested dictionaries, and the
optimizer's state by number only. Whose state number 7 is follows from the order in which Megatron went through its
parameters; that order is rebuilt here, and proved as far as a file allows: every shape must agree, and the beginnings of
every master weight, rounded, must be the model's own. A master and its moments have one number, so that the right masters
prove the moments' places. What this does not prove: norms that are all still near 1 pass in any order, and where the weights
are float32 in one file with the state there are no masters, and the shapes alone speak. The state has one of these forms:

    whole       in the same file, with float32 masters of half-precision weights, or without where the weights are float32
    sharded     early 2023: `mp_rank_00_003/optim.pt` for each data rank, one slice each of a flat buffer
    flat        since May 2023: `distrib_optim.pt`, the whole buffer; since autumn 2023 in buckets

Written by hand, for Megatron-LM's own loader of these is gone, and needed its code, its layout and a GPU. Nothing is copied:
a table of views is made (sources.Mapped), and pickles are read by the allow-list of pickles.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.boxes import Shape
from meshwright.checkpoint.formats import megatron_names as names
from meshwright.checkpoint.formats import megatron_state, pickles
from meshwright.checkpoint.formats.megatron_ranks import (
    COPY,
    MOMENTS,
    Parameter,
    Rank,
    Sizes,
    as_boxes,
    check_complete,
    check_shapes,
    is_rounded,
    lay_out,
    whole,
)
from meshwright.checkpoint.sources import Mapped, aligned, check_json, check_state
from meshwright.errors import BAD_DATA, UserError

if TYPE_CHECKING:
    import torch

MODEL, MODEL_ALONE, SHARD, FLAT = "model_optim_rng.pt", "model_rng.pt", "optim.pt", "distrib_optim.pt"
WITHOUT = "add --no-load-optim to take the weights alone"
# largest difference, relative to the norm, of what should be equal: some versions let copies
# drift by rounding
SAME = 1e-3


def open(folder: Path, trust: bool = False, heads: int | None = None, optimizer: bool = True) -> Mapped:
    """`heads`: for the files that do not say. Without `optimizer` its state is not looked at, unless the file is ours: then
    the masters in it are the weights, as in our own format."""
    ranks = [Rank(path, tp, pp, read(path, trust)) for (tp, pp), path in sorted(files(folder).items())]
    first, notes = ranks[0], list[str]()
    args, version = megatron_state.namespace(first.tree.get("args")), same(ranks, "checkpoint_version")
    name_parameters(folder, ranks, args.get("num_layers"))
    sizes = Sizes.of(first, ranks, args, heads)
    check_shapes(ranks, sizes)
    check_copies(ranks, notes)
    own, state = words_of_ours(first), dict[str, Any]()
    if folder.name != "release":
        iteration = same(ranks, "iteration")
        tree = first.tree | (read(shards(first)[0], trust) if shards(first) else {})
        state = own["state"] if own else megatron_state.state(tree, args, iteration, sizes.positions, notes)
    if ("optimizer" in first.tree) if own else (state and optimizer):
        steps = [step for rank in ranks for step in read_optimizer(rank, trust)]
        if not own:
            state["optimizer_steps"] = max(steps, default=state["iteration"])
        if not (state and optimizer):
            for p in (p for rank in ranks for p in rank.parameters):
                p.values = {"": p.values[""]}
    pieces = lay_out(ranks, sizes, float(version))
    config, vocab = megatron_state.config(args, sizes, pieces, notes), megatron_state.true_vocabulary(first.tree, args)
    if own:
        config, vocab = own["config"], own["vocab"]
    source = Mapped(
        "Megatron", folder, state.get("iteration", 0), str(version), config, state, notes=notes, pieces=pieces
    )
    tp, pp = (len({getattr(rank, of) for rank in ranks}) for of in ("tp", "pp"))
    source.layout = f"{tp} tensor x {pp} pipeline ranks"
    return source.of_vocabulary(vocab) if vocab else source


def words_of_ours(rank: Rank) -> dict[str, Any] | None:
    """What this package wrote beside the tree: all that is known of the run, in its own words. None: another program's."""
    own: dict[str, Any] | None = rank.tree.get("meshwright")
    if own is None:
        return None
    vocab = own.get("vocab", "") if isinstance(own, dict) else ""
    if not (vocab is None or (type(vocab) is int and vocab > 0)):
        raise UserError(f"{rank.path}: what it has under the key meshwright is not what Meshwright writes", BAD_DATA)
    check_state(own.get("state"), rank.path)
    check_json(own.get("config"), rank.path)
    return own


# Files


def files(folder: Path) -> dict[tuple[int, int], Path]:
    """(tensor rank, stage) -> its file; all of them must be there."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*/model*_rng.pt")):
        at = re.fullmatch(r"mp_rank_(\d{2,})(?:_(\d{3,}))?", path.parent.name)
        if at and path.name in (MODEL, MODEL_ALONE):
            other = found.setdefault((int(at[1]), int(at[2] or 0)), path)
            if other != path:
                raise UserError(f"{path} and {other} are of the same rank: which one is meant?", BAD_DATA)
    if not found:
        raise UserError(f"{folder}: no mp_rank_*/{MODEL} in it", BAD_DATA)
    t, p = (1 + max(n) for n in zip(*found, strict=True))
    missing = [f"{tp}, {pp}" for tp, pp in product(range(t), range(p)) if (tp, pp) not in found]
    if missing:
        raise UserError(
            f"{folder}: of {t} x {p} tensor and pipeline ranks these have no file: ({'), ('.join(missing)})", BAD_DATA
        )
    return found


def read(path: Path, trust: bool) -> dict[str, Any]:
    tree = pickles.load(path, trust=trust)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds a {type(tree).__name__}, not the dictionary of a Megatron checkpoint", BAD_DATA)
    return tree


def shards(rank: Rank) -> list[Path]:
    """The data ranks' slices of the optimizer's state, where it was saved so."""
    found = sorted(rank.path.parent.parent.glob(f"{rank.path.parent.name}_*/{SHARD}"))
    if [path.parent.name for path in found] != [f"{rank.path.parent.name}_{d:03d}" for d in range(len(found))]:
        raise UserError(f"{rank.path.parent}_*/{SHARD}: data ranks are missing; {WITHOUT}", BAD_DATA)
    return found


def same(ranks: Sequence[Rank], key: str) -> Any:
    """A number that all files must agree on."""
    values = {str(rank.path): rank.tree.get(key, 0) for rank in ranks}
    (path, value), *others = values.items()
    for other, another in others:
        if another != value:
            raise UserError(
                f"{path} has {key} {value}, {other} has {another}: they are not of one checkpoint", BAD_DATA
            )
    if type(value) not in (int, float):
        raise UserError(f"{path}: {key} is {value!r}, not a number", BAD_DATA)
    return value


# Names


def name_parameters(folder: Path, ranks: Sequence[Rank], told: Any) -> None:
    """Give each tensor our name. Of virtual stages chunk 0 of every stage comes first, then chunk 1: layers count on in that
    order, however many each of them has."""
    trees = {(rank.tp, rank.pp): [flat(rank, tree) for tree in models(rank)] for rank in ranks}
    stages, chunks = 1 + ranks[-1].pp, len(trees[0, 0])
    if any(len(each) != chunks for each in trees.values()):
        raise UserError(f"{folder}: the ranks have different numbers of virtual stages", BAD_DATA)
    begin, begins = 0, {}
    for chunk, pp in product(range(chunks), range(stages)):
        begins[pp, chunk] = begin
        numbers = {name.layer for name, _ in trees[0, pp][chunk] if name.layer is not None}
        if numbers != set(range(len(numbers))):
            raise UserError(f"{folder}: layers are missing on stage {pp}, it has {sorted(numbers)}", BAD_DATA)
        begin += len(numbers)
    if isinstance(told, int) and told != begin:
        raise UserError(f"{folder}: has {begin} layers in its files and {told} in its arguments", BAD_DATA)
    for rank in ranks:
        for chunk, tree in enumerate(trees[rank.tp, rank.pp]):
            rank.chunks.append([parameter(name, tensor, begins[rank.pp, chunk]) for name, tensor in tree])
    check_complete(folder, ranks, begin)


def parameter(name: names.Name, tensor: torch.Tensor, begin: int) -> Parameter:
    ours = re.sub(r"^attn\.(query|key_value)\.", "attn.qkv.", name.ours)
    return Parameter(name._replace(ours=ours).full(begin), name.ours, tensor)


def models(rank: Rank) -> list[Any]:
    if "model" in rank.tree:
        return [rank.tree["model"]]
    count = next(n for n in range(len(rank.tree) + 1) if f"model{n}" not in rank.tree)
    if not count:
        raise UserError(f"{rank.path}: has no model in it, only {sorted(map(str, rank.tree))[:20]}", BAD_DATA)
    return [rank.tree[f"model{n}"] for n in range(count)]


def flat(rank: Rank, tree: Any) -> list[tuple[names.Name, torch.Tensor]]:
    """The parameters in the file's order, which is that of the model."""
    out = []
    for key, tensor in flattened(tree):
        if not names.NO_PARAMETER.fullmatch(key):
            name = names.of_megatron(key)
            if name is None:
                raise UserError(f"{rank.path}: {key[:200]} is no parameter of a GPT that is known here", BAD_DATA)
            out.append((name, tensor.detach()))
    return out


def flattened(tree: Any, before: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of dictionaries within each other, in their order, under joined names."""
    import torch

    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict):
            yield from flattened(value, f"{before}{key}.")
        elif isinstance(value, torch.Tensor):
            yield f"{before}{key}", value


def check_copies(ranks: Sequence[Rank], notes: list[str]) -> None:
    """What every tensor rank holds whole, and the last stage's copy of the token table, should be equal to the last bit."""
    first: dict[tuple[str, str, int], tuple[Rank, torch.Tensor]] = {}
    differ: list[str] = []
    for rank in ranks:
        for p in rank.parameters:
            key = (p.name, p.part, -1 if p.kept_whole else rank.tp)
            if p.part == COPY:
                key = ("wte.weight", "wte.weight", rank.tp)
            if key not in first:
                first[key] = rank, p.tensor
                continue
            other, tensor = first[key]
            some = slice(None, None, max(p.shape[0] // 64, 1) if p.part == COPY else 1)  # of a large table some rows
            error = difference(tensor[some], p.tensor[some])
            if not error <= SAME:
                raise UserError(
                    f"{other.path} and {rank.path} must hold the same {p.name}, and differ by {error:.2g} of its norm: "
                    "they are not of one checkpoint, or it is damaged",
                    BAD_DATA,
                )
            differ += [p.name] * (error > 0)
    if differ:
        notes.append(
            f" > note: {len(differ)} tensors that are kept more than once differ by rounding, such as {differ[0]}: the first "
            "rank's are taken"
        )


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    import torch

    a, b = aligned(a), aligned(b)
    if torch.equal(a, b):
        return 0.0
    a, b = a.double(), b.double()
    return float((a - b).norm() / a.norm())


# The optimizer's state


def read_optimizer(rank: Rank, trust: bool) -> Iterator[int]:
    """Fill the parameters' `values`; Adam's numbers of steps, as often as they are told."""
    beside, tree = shards(rank), rank.tree.get("optimizer")
    if (path := rank.path.with_name(FLAT)).exists():
        from_flat(rank, path, read(path, trust))
    elif beside:
        tree = from_shards(rank, beside, trust)
    else:
        from_whole(rank, tree)
    for p in rank.parameters:
        check_values(rank, p)
    inner = inner_state(rank.path, tree)
    for told in (*inner["param_groups"], *inner.get("state", {}).values()):
        if isinstance(told, dict) and "step" in told:
            yield int(told["step"])


def inner_state(path: Path, tree: Any) -> dict[str, Any]:
    """torch's own state_dict, within Megatron's or alone."""
    for key in ("optimizer", "optimizer_state_dict"):
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
    if not isinstance(tree, dict) or not isinstance(tree.get("param_groups"), list):
        raise unknown(path, "it is not laid out as Megatron's")
    return tree


def unknown(path: Path, why: str) -> UserError:
    return UserError(f"{path}: the optimizer's state cannot be read, {why}; {WITHOUT}", BAD_DATA)


def decayed_first(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Megatron's order of two groups: with weight decay, and biases and norms without. In 2019 the modules' kinds decided
    it, later the number of dimensions."""
    return sorted(parameters, key=lambda p: p.tensor.ndim == 1)


def numbered(path: Path, tree: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """The state of each parameter of the groups, one after the other, and the masters, if there are any."""
    inner = inner_state(path, tree)
    state = inner.get("state")
    keys = [key for group in inner["param_groups"] for key in group.get("params", ())]
    if not isinstance(state, dict) or not all(isinstance(state.get(key), dict) for key in keys):
        raise unknown(path, "parameters have no state")
    kinds = ("fp32_from_fp16_params", "fp32_from_fp16", "shard_fp32_from_float16_groups", "fp32_groups")
    masters: list[Any] = next((tree[kind] for kind in kinds if kind in tree), [])
    return [state[key] for key in keys], [master for group in masters for master in group]


def from_whole(rank: Rank, tree: Any) -> None:
    states, masters = numbered(rank.path, tree)
    order, masters = decayed_first(rank.parameters), masters[::-1]
    if len(states) != len(order):
        raise unknown(rank.path, f"it is of {len(states)} parameters, the model has {len(order)}")
    for p, state in zip(order, states, strict=True):
        p.values = {kind: whole(tensor_of(rank.path, state.get(kind), p.shape, p)) for kind in MOMENTS}
        if p.tensor.element_size() > 2:  # what is not of half precision is its own master
            p.values[""] = whole(p.tensor)
        else:
            p.values[""] = whole(tensor_of(rank.path, masters.pop() if masters else None, p.shape, p))
    if masters:
        raise unknown(rank.path, f"{len(masters)} master weights belong to no parameter")


def tensor_of(path: Path, value: Any, shape: Shape, p: Parameter) -> torch.Tensor:
    import torch

    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
        held = tuple(value.shape) if isinstance(value, torch.Tensor) else "nothing"
        raise unknown(path, f"at the place of {p.name} {shape} it has {held}")
    return value.detach()


def from_flat(rank: Rank, path: Path, tree: dict[Any, Any]) -> None:
    """One buffer per chunk in which the last parameter comes first, or several, each filled up at its end."""
    for number, chunk in enumerate(rank.chunks):
        by_type = tree.get(number)
        if not isinstance(by_type, dict) or len(by_type) != 1 or "per_bucket_numel" in tree:
            raise unknown(path, "its buffers are not laid out as in 2023")
        (buffers,) = by_type.values()
        for kind in ("", *MOMENTS):
            held = buffers.get(kind or "param") if isinstance(buffers, dict) else None
            for p, view in in_buckets(path, held if isinstance(held, list) else [held], chunk[::-1]):
                p.values[kind] = whole(view)


def in_buckets(
    path: Path, buckets: Sequence[Any], waiting: Sequence[Parameter]
) -> Iterator[tuple[Parameter, torch.Tensor]]:
    import torch

    at = 0
    for bucket in buckets:
        if not isinstance(bucket, torch.Tensor) or bucket.ndim != 1:
            raise unknown(path, "a buffer is no row of numbers")
        start = 0
        while at < len(waiting) and start + prod(waiting[at].shape) <= len(bucket):
            end = start + prod(waiting[at].shape)
            yield waiting[at], bucket[start:end].view(waiting[at].shape)
            start, at = end, at + 1
    if at < len(waiting):
        raise unknown(path, f"it ends before {waiting[at].name}")


def from_shards(rank: Rank, paths: Sequence[Path], trust: bool) -> Any:
    """Each data rank holds an equal part of each chunk's buffer, in which the last parameter comes first, and of its own part
    numbers the parameters from first to last."""
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
            told = {kind: states[i].get(kind) for kind in MOMENTS}
            told[""] = masters[i] if masters else p.tensor.reshape(-1)[begin:end]
            for kind, value in told.items():
                p.values[kind] += as_boxes(p, begin, end, tensor_of(path, value, (end - begin,), p))
    return trees[0]


def parts_of_buffer(chunk: Sequence[Parameter], number: int, count: int) -> Iterator[tuple[Parameter, int, int]]:
    """Which elements of which parameters the data rank has, in the model's order."""
    total = start = sum(prod(p.shape) for p in chunk)
    size = -(-total // count)
    for p in chunk:
        start -= prod(p.shape)
        begin, end = max(number * size - start, 0), min((number + 1) * size - start, prod(p.shape))
        if begin < end:
            yield p, begin, end


def check_values(rank: Rank, p: Parameter) -> None:
    """A master weight, rounded, is the model's: of each box the beginnings of its first and last row are compared. A wrong
    order would pass the shapes alone, for layers are alike."""
    for offset, master in p.values[""]:
        model = p.tensor[tuple(slice(o, o + n) for o, n in zip(offset, master.shape, strict=True))]
        for row in {0, len(master) - 1}:
            if not is_rounded(*(x[row : row + 1].flatten()[:64] for x in (model, master))):
                raise unknown(rank.path, f"the master weights at the place of {p.name} are not those of the model")
