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
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import bad_data
from meshwright.checkpoint.boxes import plus
from meshwright.checkpoint.pickle import pickles
from meshwright.checkpoint.run_state import check_json, check_saved_state
from meshwright.checkpoint.sources import MappedSource, aligned
from meshwright.compat.formats.adam import (
    MOMENTS,
    WITHOUT,
    match_numbered,
    step_counts,
    unreadable_state,
)
from meshwright.compat.formats.megatron import names, sharded
from meshwright.compat.formats.megatron import state as megatron_state
from meshwright.compat.formats.megatron.sharded import ModelSizes, Parameter, RankFile, Stretch
from meshwright.compat.formats.table import MEGATRON

MODEL, MODEL_ALONE, SHARD, FLAT = (
    "model_optim_rng.pt",
    "model_rng.pt",
    "optim.pt",
    "distrib_optim.pt",
)
# Largest difference of copies, relative to the norm: some versions let them drift by rounding.
DRIFT = 1e-3


def open_megatron(
    folder: Path, trust: bool = False, heads: int | None = None, optimizer: bool = True
) -> MappedSource:
    """Open one step; `heads` is for files that do not state them.

    Without `optimizer` its state is not read, unless the file is ours: then its masters are the
    weights, as in our own format.
    """
    ranks = [
        RankFile(path, tp, pp, read_tree(path, trust))
        for (tp, pp), path in sorted(model_files(folder).items())
    ]
    first = ranks[0]
    notes: list[str] = []
    args = megatron_state.namespace(first.tree.get("args"))
    version = require_equal(ranks, "checkpoint_version")
    layers = name_parameters(folder, ranks, args.get("num_layers"))
    sizes = sharded.measure_model(folder, ranks, layers, args, heads)
    check_copies(ranks, notes)

    # Where the run was; a release is weights alone.
    own = read_own(first)
    state: dict[str, Any] = {}
    if folder.name != "release":
        state = own["state"] if own else read_state(ranks, args, sizes, trust, notes)

    # The optimizer's state. Of a tree of ours the masters are read in any case, as the weights.
    if ("optimizer" in first.tree) if own else (state and optimizer):
        steps = [step for rank in ranks for step in read_optimizer(rank, trust)]
        if not own:
            state["optimizer_steps"] = max(steps, default=state["iteration"])
        if not (state and optimizer):
            for rank in ranks:
                for p in rank.parameters:
                    p.values = {"": p.values[""]}
    source = megatron_state.as_source(MEGATRON, folder, ranks, sizes, args, notes, float(version))
    vocab = megatron_state.true_vocabulary(first.tree, args)
    if own:
        source.config = own["config"]
        vocab = own["vocab"]
    source.version = str(version)
    if float(version) < 2:  # Megatron's spelling, which scripts read
        source.version_note = (
            f" succesfully fixed query-key-values ordering for checkpoint version {version}"
        )
    layout = f"{1 + ranks[-1].tp} tensor x {1 + ranks[-1].pp} pipeline ranks"
    return megatron_state.finish_source(source, state, layout, vocab)


def read_state(
    ranks: Sequence[RankFile],
    args: dict[str, Any],
    sizes: ModelSizes,
    trust: bool,
    notes: list[str],
) -> dict[str, Any]:
    """Return where the run was, from the first file and what a sharded optimizer has beside it."""
    iteration = require_equal(ranks, "iteration")
    tree = ranks[0].tree
    if beside := shards(ranks[0]):
        tree = tree | read_tree(beside[0], trust)
    state = megatron_state.run_state(tree, args, iteration, sizes.positions, notes)
    return state.as_saved() if state else {}


def read_own(rank: RankFile) -> dict[str, Any] | None:
    """Return the settings and state that this package wrote beside the tree; None if it did not."""
    own: dict[str, Any] | None = rank.tree.get("meshwright")
    if own is None:
        return None
    vocab = own.get("vocab", "") if isinstance(own, dict) else ""
    if not (vocab is None or (type(vocab) is int and vocab > 0)):
        raise bad_data(f"{rank.path}: its entry `meshwright` is not what Meshwright writes")
    check_saved_state(own.get("state"), rank.path)
    check_json(own.get("config"), rank.path)
    return own


# Files


def model_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the file of each (tensor rank, stage); all must be there."""
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*/model*_rng.pt")):
        # Without a pipeline the stage is not in the name.
        at = re.fullmatch(r"mp_rank_(\d{2,})(?:_(\d{3,}))?", path.parent.name)
        if at and path.name in (MODEL, MODEL_ALONE):
            tp, pp = at.groups("0")
            other = files.setdefault((int(tp), int(pp)), path)
            if other != path:
                raise bad_data(f"{path} and {other} belong to the same rank; remove one of them")
    if not files:
        raise bad_data(f"{folder}: no mp_rank_*/{MODEL} in it")
    t, p = (1 + max(n) for n in zip(*files, strict=True))
    # The folders' names may claim more ranks than a list could hold.
    lacking = (at for at in product(range(t), range(p)) if at not in files)
    if missing := list(islice(lacking, 8)):
        named = ", ".join(map(str, missing))
        raise bad_data(
            f"{folder}: of {t} x {p} tensor and pipeline ranks these have no file: {named}"
        )
    return files


def read_tree(path: Path, trust: bool) -> dict[str, Any]:
    tree = pickles.load_pickle(path, trust=trust)
    if not isinstance(tree, dict):
        raise bad_data(
            f"{path}: holds a {type(tree).__name__}, not the dictionary of a Megatron checkpoint"
        )
    return tree


def shards(rank: RankFile) -> list[Path]:
    """Return the files of the data ranks' slices of the optimizer's state, if it was sharded."""
    folder = rank.path.parent
    paths = sorted(folder.parent.glob(f"{folder.name}_*/{SHARD}"))
    # The data ranks are numbered from 0 on, without a gap.
    for d, path in enumerate(paths):
        if path.parent.name != f"{folder.name}_{d:03d}":
            raise bad_data(f"{folder}_*/{SHARD}: data ranks are missing; {WITHOUT}")
    return paths


def require_equal(ranks: Sequence[RankFile], key: str) -> Any:
    """Return a number that all files must agree on."""
    # Files of two checkpoints may have been copied into one folder.
    values = {str(rank.path): rank.tree.get(key, 0) for rank in ranks}
    (path, value), *others = values.items()
    for other, another in others:
        if another != value:
            raise bad_data(
                f"{path} has {key} {value}, {other} has {another}: they are not of one checkpoint"
            )
    if type(value) not in (int, float):
        raise bad_data(f"{path}: {key} is {value!r}, not a number")
    return value


# Names


def name_parameters(folder: Path, ranks: Sequence[RankFile], stated: Any) -> int:
    """Give each tensor our name; return the number of layers.

    With virtual stages, layers are counted through chunk 0 of every stage, then through chunk 1.
    """
    trees = {}
    for rank in ranks:
        trees[rank.tp, rank.pp] = [flat(rank, tree) for tree in models(rank)]
    stages = 1 + ranks[-1].pp
    chunks = len(trees[0, 0])
    if any(len(each) != chunks for each in trees.values()):
        raise bad_data(f"{folder}: the ranks have different numbers of virtual stages")

    # The first layer of each chunk: files number layers within their chunk, from 0 on.
    begin = 0
    begins = {}
    for chunk, pp in product(range(chunks), range(stages)):
        begins[pp, chunk] = begin
        tree = trees[0, pp][chunk]
        numbers = {name.layer for name, _ in tree if name.layer is not None}
        if numbers != set(range(len(numbers))):
            raise bad_data(f"{folder}: layers are missing on stage {pp}, it has {sorted(numbers)}")
        begin += len(numbers)
    if isinstance(stated, int) and stated != begin:
        raise bad_data(f"{folder}: has {begin} layers in its files and {stated} in its arguments")
    for rank in ranks:
        for chunk, tree in enumerate(trees[rank.tp, rank.pp]):
            first = begins[rank.pp, chunk]
            rank.chunks.append([parameter(name, tensor, first) for name, tensor in tree])
    return begin


def parameter(name: names.ParameterName, tensor: torch.Tensor, begin: int) -> Parameter:
    # With grouped queries, two tensors are parts of one of ours.
    ours = re.sub(r"^attn\.(query|key_value)\.", "attn.qkv.", name.ours)
    return Parameter(name._replace(ours=ours).full(begin), name.ours, tensor)


def models(rank: RankFile) -> list[Any]:
    """Return the model's chunks: virtual stages are numbered."""
    if "model" in rank.tree:
        return [rank.tree["model"]]
    found: list[Any] = []
    while (name := f"model{len(found)}") in rank.tree:
        found.append(rank.tree[name])
    if not found:
        raise bad_data(f"{rank.path}: has no model, only {sorted(map(str, rank.tree))[:20]}")
    return found


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
            if p.part == sharded.COPY:
                key = ("wte.weight", "wte.weight", rank.tp)
            if key not in first:
                first[key] = rank, p.tensor
                continue
            other, tensor = first[key]
            # Of the table of tokens, which is large, 64 rows or a few more.
            some = slice(None, None, max(p.shape[0] // 64, 1) if p.part == sharded.COPY else 1)
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
    a = aligned(a)
    b = aligned(b)
    if torch.equal(a, b):
        return 0.0
    a = a.double()
    b = b.double()
    return float((a - b).norm() / a.norm())


# The optimizer's state


def read_optimizer(rank: RankFile, trust: bool) -> Iterator[int]:
    """Fill the parameters' `values`; yield every step count of Adam in the files."""
    beside = shards(rank)
    tree = rank.tree.get("optimizer")
    if (path := rank.path.with_name(FLAT)).exists():
        from_flat(rank, path, read_tree(path, trust))
    elif beside:
        tree = from_shards(rank, beside, trust)
    else:
        order = decayed_first(rank.parameters)
        weights = [(p.name, p.tensor) for p in order]
        matched = match_numbered(rank.path, tree, weights, needs_masters=True)
        for p, values in zip(order, matched, strict=True):
            p.values = {kind: sharded.one_box(tensor) for kind, tensor in values.items()}
    for p in rank.parameters:
        check_values(rank, p)
    yield from step_counts(rank.path, tree)


def decayed_first(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Sort into Megatron's two groups: with weight decay, then biases and norms without.

    In 2019 the modules' kinds decided the group, later the number of dimensions.
    """
    return sorted(parameters, key=lambda p: p.tensor.ndim == 1)


def from_flat(rank: RankFile, path: Path, tree: dict[Any, Any]) -> None:
    """Read a buffer per chunk, last parameter first, or several padded buckets."""
    for number, chunk in enumerate(rank.chunks):
        by_type = tree.get(number)
        if not isinstance(by_type, dict) or len(by_type) != 1 or "per_bucket_numel" in tree:
            raise unreadable_state(path, "its buffers are not laid out as in 2023")
        (by_kind,) = by_type.values()

        # A buffer of each kind, whole or as a list of buckets.
        buffers: dict[str, list[Any]] = {}
        for kind in ("", *MOMENTS):
            buckets = by_kind.get(kind or "param") if isinstance(by_kind, dict) else None
            if not isinstance(buckets, list):
                buckets = [buckets]
            for bucket in buckets:
                if not isinstance(bucket, torch.Tensor) or bucket.ndim != 1:
                    raise unreadable_state(path, "a buffer is not a row of numbers")
            buffers[kind] = buckets
        sizes = {kind: [len(bucket) for bucket in buckets] for kind, buckets in buffers.items()}
        if any(each != sizes[""] for each in sizes.values()):
            raise unreadable_state(path, "the buffers of its masters and moments differ in size")
        sharded.fill_stretches(in_buckets(path, sizes[""], chunk[::-1]), buffers)


def in_buckets(path: Path, sizes: Sequence[int], waiting: Sequence[Parameter]) -> Iterator[Stretch]:
    """Yield each waiting parameter where it lies in buckets of these sizes."""
    left = list(waiting[::-1])
    for bucket, size in enumerate(sizes):
        start = 0
        # As many as it has room for; what is left behind them is padding.
        while left and start + prod(left[-1].shape) <= size:
            p = left.pop()
            numel = prod(p.shape)
            yield Stretch(p, 0, bucket, start, numel)
            start += numel
    if left:
        raise unreadable_state(path, f"it ends before {left[-1].name}")


def from_shards(rank: RankFile, paths: Sequence[Path], trust: bool) -> Any:
    """Join the data ranks' equal parts of each chunk's buffer, last parameter first.

    Each rank numbers the parameters of its own part from first to last.
    """
    trees = [read_tree(path, trust).get("optimizer") for path in paths]
    for number, (path, tree) in enumerate(zip(paths, trees, strict=True)):
        stretches: list[Stretch] = []
        for chunk in rank.chunks:
            stretches += parts_of_buffer(chunk, number, len(paths))
        # Megatron's two groups, as decayed_first has them.
        stretches.sort(key=lambda stretch: stretch.p.tensor.ndim == 1)
        weights = []
        for p, begin, _, _, numel in stretches:
            part = p.tensor.reshape(-1)[begin : begin + numel]
            weights.append((p.name, part))
        states = match_numbered(path, tree, weights)
        for stretch, values in zip(stretches, states, strict=True):
            for kind, tensor in values.items():
                stretch.p.add(kind, stretch.begin, tensor)
    return trees[0]


def parts_of_buffer(chunk: Sequence[Parameter], number: int, count: int) -> Iterator[Stretch]:
    """Yield what a data rank has of each parameter, in the model's order."""
    total = sum(prod(p.shape) for p in chunk)
    size = -(-total // count)
    low = number * size  # of this rank's part of the buffer
    position = total
    for p in chunk:
        numel = prod(p.shape)
        position -= numel  # the last parameter comes first
        begin = max(low - position, 0)
        end = min(low + size - position, numel)
        if begin < end:
            yield Stretch(p, begin, number, position + begin - low, end - begin)


def check_values(rank: RankFile, p: Parameter) -> None:
    """Compare the first and last row of each box of masters with the model: layers are alike."""
    for offset, master in p.values[""]:
        ends = plus(offset, tuple(master.shape))
        model = p.tensor[tuple(map(slice, offset, ends))]
        for row in {0, len(master) - 1}:
            ours = model[row : row + 1].flatten()[:64]
            theirs = master[row : row + 1].flatten()[:64]
            if not sharded.is_rounded(ours, theirs):
                raise unreadable_state(
                    rank.path,
                    f"the master weights at the place of {p.name} are not those of the model",
                )
