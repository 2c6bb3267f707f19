"""A step of DeepSpeed with a Megatron model (Megatron-DeepSpeed of BigScience and Microsoft), opened: `global_step500/`.

Weights, of tensor rank 0 here:
    layer_03-model_00-model_states.pt   of a pipeline: a layer each, numbered as in the pipeline's list of modules
    mp_rank_00_model_states.pt          of a tensor rank and stage: without a pipeline all weights; and what is known beside
    zero_pp_rank_0_mp_rank_00_model_states.pt   ZeRO-3: shapes alone
Masters and moments, of data rank 0: `[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt`, flat buffers by group of parameters,
each data rank a share of them. Which parameter has which elements is said by `param_slice_mappings` since DeepSpeed 0.7;
before, and in ZeRO-3, it follows from the order of `param_shapes`. Without ZeRO they are in the mp_rank files, by number.
A universal checkpoint, `global_step500_universal/`, has a folder for each parameter, joined already.

Written by hand because DeepSpeed's own readers need the model built, or make a copy of everything, and unpickle whatever
the files hold. Here each stretch of a buffer becomes views of the mapped file; names, shapes and joins are megatron.py's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.checkpoint.boxes import Shape
from meshwright.checkpoint.formats import megatron_names as names
from meshwright.checkpoint.formats import megatron_state, pickles
from meshwright.checkpoint.formats.megatron import (
    WITHOUT,
    check_copies,
    check_values,
    decayed_first,
    flattened,
    numbered,
    tensor_of,
)
from meshwright.checkpoint.formats.megatron_ranks import (
    COPY,
    MOMENTS,
    Parameter,
    Rank,
    Sizes,
    as_boxes,
    check_complete,
    check_shapes,
    lay_out,
    whole,
)
from meshwright.checkpoint.formats.torch_dist import empty, state_of
from meshwright.checkpoint.sources import Mapped
from meshwright.errors import BAD_DATA, UserError

if TYPE_CHECKING:
    import torch

LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
SHAPES = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
SHARE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
KINDS = ("", *MOMENTS)

Files = dict[tuple[int, ...], Path]


def open(folder: Path, trust: bool = False, heads: int | None = None, optimizer: bool = True) -> Mapped:
    """`heads`: for folders that do not say. Without `optimizer` its state is not looked at, unless the weights are in it."""
    models = [pickles.load(path, trust=trust) for path in model_files(folder)]
    args, notes = megatron_state.namespace(models[0].get("args")), list[str]()
    joined = (folder / "zero").is_dir()
    ranks, layers = universal(folder, trust) if joined else of_tensor_ranks(folder, models, trust)
    held = len({p.name.split(".")[1] for p in ranks[0].parameters if p.name.startswith("h.")})
    check_complete(folder, ranks, args.get("num_layers", held))
    sizes = Sizes.of(ranks[0], ranks, args, heads)
    check_shapes(ranks, sizes)
    if joined and sizes.gates == 2 and int(args.get("tensor_model_parallel_size", len(models))) > 1:
        check_gates(folder, layers, trust)
    third = ranks[0].parameters[0].tensor.is_meta
    if not third:
        check_copies(ranks, notes)
    beside: dict[str, Any] = {}
    if joined and optimizer:
        beside = universal_states(folder, ranks[0], layers, trust)
    elif optimizer or third:
        beside = optimizer_states(folder, ranks, layers, models, trust, notes)
    pieces = lay_out(ranks, sizes, float(models[0].get("checkpoint_version", 3.0)))
    config = megatron_state.config(args, sizes, pieces, notes)
    source = Mapped("DeepSpeed", folder, 0, config=config, notes=notes, pieces=pieces)
    if beside or (joined and not optimizer) or matching(folder, SHARE) or isinstance(models[0].get("optimizer"), dict):
        tree = {"iteration": models[0].get("global_steps", 0), **models[0], "optimizer": beside}
        source.state = state_of(tree, args, sizes, notes)
        source.step = source.state.get("iteration", 0)
    stages = max(1, len(models) // len(ranks)) if not joined else int(args.get("pipeline_model_parallel_size", 1))
    tp = int(args.get("tensor_model_parallel_size", 1)) if joined else len(ranks)
    source.layout = f"{'universal, from ' if joined else ''}{tp} tensor x {stages} pipeline ranks"
    vocab = megatron_state.true_vocabulary(models[0], args)
    return source.of_vocabulary(vocab) if vocab else source


# Files


def matching(folder: Path, pattern: re.Pattern[str]) -> Files:
    """By the numbers in their names, in order: rank 10 comes after rank 9."""
    found = sorted(
        (tuple(map(int, m.groups())), path) for path in folder.iterdir() if (m := pattern.fullmatch(path.name))
    )
    if len(dict(found)) < len(found):
        raise UserError(f"{folder}: two files of {found[0][1].name}'s kind have the same numbers", BAD_DATA)
    return dict(found)


def all_there(folder: Path, what: str, numbers: Sequence[int]) -> None:
    missing = sorted(set(range(len(numbers))) - set(numbers))
    if missing or not numbers:
        raise UserError(f"{folder}: there is no file of {what} {missing[0] if missing else 0}", BAD_DATA)


def model_files(folder: Path) -> list[Path]:
    """Of each tensor rank and stage."""
    found = matching(folder, MODEL) or {(mp,): path for (dp, mp), path in matching(folder, SHAPES).items() if dp == 0}
    all_there(folder, "tensor and pipeline rank", [mp for (mp,) in found])
    return list(found.values())


# Names


def ours(key: str, layers: Sequence[int]) -> names.Name | None:
    """Of a parameter's name in DeepSpeed; `layers`: which numbers in the pipeline are layers of the model."""
    key = key.removeprefix("module.")
    if found := re.fullmatch(r"tied_modules\.\w+\.(.+)", key):
        return names.of_megatron(f"embedding.{found[1]}")
    found = re.fullmatch(r"(\d+)\.(.+)", key)
    if not found:
        return names.of_megatron(key)
    number, rest = int(found[1]), found[2]
    if rest in ("weight", "bias"):
        return names.of_megatron(f"encoder.final_layernorm.{rest}")
    if rest.startswith(("word_embeddings.", "position_embeddings.")):
        return names.of_megatron(f"embedding.{rest}")
    if rest == "lm_head.weight":
        return names.of_megatron("output_layer.weight")
    return names.of_megatron(f"encoder.layers.{layers.index(number)}.{rest}") if number in layers else None


def layers_of(keys: Sequence[str]) -> list[int]:
    """Which numbers of the pipeline's list are layers of the model."""
    found = (re.fullmatch(r"(\d+)\.(?:self_)?attention\..+", key.removeprefix("module.")) for key in keys)
    return sorted({int(m[1]) for m in found if m})


def parameters(folder: Path, tensors: Mapping[str, torch.Tensor], layers: Sequence[int]) -> Iterator[Parameter]:
    """The first of each name: the last stage's copies of the embedding are left out."""
    seen: set[str] = set()
    for key, tensor in tensors.items():
        if names.NO_PARAMETER.fullmatch(key.rpartition("layers.")[2]):
            continue
        name = ours(key, layers)
        if name is None:
            raise UserError(f"{folder}: {key[:200]} is no parameter of a GPT that is known here", BAD_DATA)
        if name.full() not in seen and name.ours != COPY:
            seen.add(name.full())
            yield Parameter(name.full(), name.ours, tensor)


# Weights


def of_tensor_ranks(folder: Path, models: Sequence[dict[str, Any]], trust: bool) -> tuple[list[Rank], list[int]]:
    """Each tensor rank with the parameters of all stages; which numbers of the pipeline's list are layers."""
    files = matching(folder, LAYER)
    count = 1 + max((tp for _, tp in files), default=len(models) - 1)
    if len(models) % count:
        raise UserError(
            f"{folder}: files of {len(models)} ranks, which are no stages of {count} tensor ranks", BAD_DATA
        )
    ranks, layers = [], list[int]()
    for tp in range(count):
        if files:
            tensors = layer_tensors(folder, [path for (_, t), path in files.items() if t == tp], trust)
        else:
            tensors = dict(flattened(models[tp].get("module")))
        shapes = {name: tuple(shape) for group in models[tp].get("param_shapes") or () for name, shape in group.items()}
        if not files and any(t.numel() != prod(shapes.get(key, t.shape)) for key, t in tensors.items()):
            tensors = {key: empty(shape) for key, shape in shapes.items()}  # ZeRO-3 keeps no whole weights
        layers = layers_of(list(tensors))
        ranks.append(Rank(folder, tp, 0, {}, [list(parameters(folder, tensors, layers))]))
    return ranks, layers


def layer_tensors(folder: Path, paths: Sequence[Path], trust: bool) -> dict[str, torch.Tensor]:
    """Under the names that the pipeline's module gives them."""
    return {
        f"{int(path.name[6:].partition('-')[0])}.{key}": tensor
        for path in paths
        for key, tensor in flattened(pickles.load(path, trust=trust))
    }


def universal(folder: Path, trust: bool) -> tuple[list[Rank], list[int]]:
    """Each parameter joined over all ranks, in a folder of its name."""
    found = sorted(path.name for path in (folder / "zero").iterdir() if (path / "fp32.pt").is_file())
    layers = layers_of(found)
    tensors = {name: of_file(folder / "zero" / name / "fp32.pt", trust) for name in found}
    return [Rank(folder, 0, 0, {}, [list(parameters(folder, tensors, layers))])], layers


def of_file(path: Path, trust: bool) -> torch.Tensor:
    value = pickles.load(path, trust=trust)
    tensor: torch.Tensor = value["param"] if isinstance(value, dict) else value
    return tensor


def check_gates(folder: Path, layers: Sequence[int], trust: bool) -> None:
    """Of tensor ranks ds_to_universal puts the halves of a gated MLP together each for itself only where it is told to, and
    notes that in the file; else they lie rank by rank, and the shapes do not show it."""
    for path in sorted((folder / "zero").glob("*/*.pt")):
        name = ours(path.parent.name, layers) if path.stem in ("fp32", *MOMENTS) else None
        if name is None or not name.ours.startswith("mlp.fc."):
            continue
        told = pickles.load(path, trust=trust)
        if not isinstance(told, dict) or (told.get("param_n_sub_params") != 2 and "sub_param_shape" not in told):
            raise UserError(
                f"{path}: the MLP is gated, and its halves lie mixed by tensor rank, for it has no param_n_sub_params: name "
                "it in parameter_with_2_sub_params_cat_dim_0 and convert again, or load the checkpoint that it is made of",
                BAD_DATA,
            )


def universal_states(folder: Path, rank: Rank, layers: Sequence[int], trust: bool) -> dict[str, Any]:
    """Give each parameter its moments; what is known beside. Nothing if some are not there."""
    by_name = {p.name: p for p in rank.parameters}
    step = None
    for path in (path for path in (folder / "zero").iterdir() if (path / "fp32.pt").is_file()):
        if not all((path / f"{kind}.pt").is_file() for kind in MOMENTS):
            return {}
        name = ours(path.name, layers)
        p = by_name.get(name.full()) if name else None
        if p is None:  # a buffer, or a copy
            continue
        p.values = {kind: whole(of_file(path / f"{kind or 'fp32'}.pt", trust)) for kind in KINDS}
        if step is None and (path / "step.pt").is_file():
            step = pickles.load(path / "step.pt", trust=trust)
    check_filled(folder, rank)
    return {"param_groups": [{"step": step}]}


# Masters and moments


class Stretch(NamedTuple):
    """Elements of a parameter that lie in a row in a group's buffer of one data rank."""

    p: Parameter
    begin: int  # in the parameter
    group: int
    start: int  # in the buffer
    numel: int


def optimizer_states(
    folder: Path,
    ranks: Sequence[Rank],
    layers: Sequence[int],
    models: Sequence[dict[str, Any]],
    trust: bool,
    notes: list[str],
) -> dict[str, Any]:
    """Fill the parameters' values, stage after stage; a later stage's copy of the embedding is not read."""
    files, beside = matching(folder, SHARE), dict[str, Any]()
    done: set[tuple[int, str]] = set()
    for mp, model in enumerate(models):
        tp = mp % len(ranks)
        waiting = {p.name: p for p in ranks[tp].parameters if (tp, p.name) not in done}
        shares = [path for (_, m), path in files.items() if m == mp]
        if shares:
            all_there(folder, f"model rank {mp} and data rank", [dp for dp, m in files if m == mp])
            trees = [state_dict(path, pickles.load(path, trust=trust)) for path in shares]
            from_shares(waiting, model, trees, layers)
            beside = described(trees[0])
        elif isinstance(model.get("optimizer"), dict) and len(models) == len(ranks):
            from_whole(folder, list(waiting.values()), model["optimizer"])
            beside = described(model["optimizer"])
        elif isinstance(model.get("optimizer"), dict) and mp == 0:
            notes.append(
                f" > note: {folder} is of a pipeline without ZeRO, which numbers the optimizer's state by stage: the weights "
                f"alone are taken; {WITHOUT.partition(' to ')[0]}"
            )
        done |= {(tp, name) for name, p in waiting.items() if p.values}
    for rank in ranks if beside else ():
        check_filled(folder, rank)
    if not beside and ranks[0].parameters[0].tensor.is_meta:
        raise UserError(f"{folder}: ZeRO-3 keeps the weights in *_optim_states.pt, and there are none", BAD_DATA)
    return beside


def state_dict(path: Path, tree: Any) -> dict[str, Any]:
    found = tree.get("optimizer_state_dict") if isinstance(tree, dict) else None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no state of an optimizer; {WITHOUT}", BAD_DATA)
    return found


def check_filled(folder: Path, rank: Rank) -> None:
    for p in rank.parameters:
        for kind in KINDS:
            held = sum(values.numel() for _, values in p.values.get(kind, ()))
            if held != prod(p.shape):
                raise UserError(
                    f"{folder}: of {p.name} {p.shape} the optimizer's files hold {held:,} elements of {kind or 'the master'}; "
                    f"{WITHOUT}",
                    BAD_DATA,
                )
        if not p.tensor.is_meta:
            check_values(rank, p)


def from_shares(
    waiting: Mapping[str, Parameter], model: dict[str, Any], trees: Sequence[dict[str, Any]], layers: Sequence[int]
) -> None:
    """Of all data ranks."""
    at: dict[str, int] = {}  # how far each parameter has come

    def known(key: str) -> Parameter | None:
        name = ours(key, layers)
        if name is None:
            raise ValueError(f"the optimizer has {key}, which the weights' files have not")
        return waiting.get(name.full())

    shapes = [{key: tuple(shape) for key, shape in group.items()} for group in model.get("param_shapes") or ()]
    third = "fp32_flat_groups" in trees[0]
    for number, tree in enumerate(trees):
        buffers = buffers_of(tree, third)
        if third:
            stretches = of_third(known, shapes, number, len(trees), [len(b) for b in buffers[""]])
        elif "param_slice_mappings" in tree:
            stretches = of_mapping(known, tree["param_slice_mappings"], at)
        else:
            stretches = of_order(known, shapes, number, [[len(b) for b in buffers_of(t, third)[""]] for t in trees])
        for p, begin, group, start, count in stretches:
            for kind in KINDS:
                p.values.setdefault(kind, []).extend(
                    as_boxes(p, begin, begin + count, buffers[kind][group][start : start + count])
                )


def buffers_of(tree: Mapping[str, Any], third: bool) -> dict[str, list[torch.Tensor]]:
    """By kind, a flat buffer for each group."""
    masters = list(tree["fp32_flat_groups" if third else "single_partition_of_fp32_groups"])
    base = tree["optimizer_state_dict" if third else "base_optimizer_state"]
    states = [base["state"][key] for key in sorted(base["state"])] if isinstance(base, dict) else base
    if len(states) != len(masters):
        raise ValueError(f"{len(masters)} groups of masters, {len(states)} of moments")
    return {"": masters} | {kind: [state[kind].reshape(-1) for state in states] for kind in MOMENTS}


def of_mapping(known: Any, mappings: Sequence[Mapping[str, Any]], at: dict[str, int]) -> Iterator[Stretch]:
    """Each data rank says what it has; a parameter goes on where the rank before ended."""
    for group, mapping in enumerate(mappings):
        for key, address in mapping.items():
            begin = at.get(key, 0)
            at[key] = begin + address.numel
            if p := known(key):
                yield Stretch(p, begin, group, address.start, address.numel)


def of_order(
    known: Any, shapes: Sequence[Mapping[str, Shape]], number: int, sizes: Sequence[Sequence[int]]
) -> Iterator[Stretch]:
    """The parameters of a group lie one after the other in the ranks' buffers, joined."""
    for group, parts in enumerate(shapes):
        low = sum(size[group] for size in sizes[:number])
        high, place = low + sizes[number][group], 0
        for key, shape in parts.items():
            begin, end = max(place, low), min(place + prod(shape), high)
            if begin < end and (p := known(key)):
                yield Stretch(p, begin - place, group, begin - low, end - begin)
            place += prod(shape)


def of_third(
    known: Any, shapes: Sequence[Mapping[str, Shape]], number: int, count: int, sizes: Sequence[int]
) -> Iterator[Stretch]:
    """ZeRO-3 gives every data rank an equal share of every parameter, the last one filled up; groups follow on each other."""
    group, start = 0, 0
    for key, shape in ((key, shape) for part in shapes for key, shape in part.items()):
        share = -(-prod(shape) // count)
        begin, left = number * share, share
        while left:
            while start == sizes[group]:
                group, start = group + 1, 0
            n = min(left, sizes[group] - start)
            real = min(n, prod(shape) - begin)
            if real > 0 and (p := known(key)):
                yield Stretch(p, begin, group, start, real)
            begin, start, left = begin + n, start + n, left - n


def from_whole(folder: Path, waiting: list[Parameter], tree: dict[str, Any]) -> None:
    """Without ZeRO: by number, in torch's own form, or with masters beside it, each apart or a group in a row."""
    inner = tree.get("optimizer_state_dict", tree)
    groups = [[p for p in decayed_first(waiting) if (p.tensor.ndim == 1) == flat] for flat in (False, True)]
    if len(inner["param_groups"]) == 1:
        groups = [waiting]
    states, masters = numbered(folder, tree)
    if "fp32_groups_flat" in tree:
        for i, (group, row) in enumerate(zip(groups, tree["fp32_groups_flat"], strict=True)):
            start = 0
            for p in group:
                end = start + prod(p.shape)
                for kind, buffer in (("", row), *((kind, states[i][kind]) for kind in MOMENTS)):
                    p.values[kind] = as_boxes(p, 0, end - start, buffer.reshape(-1)[start:end])
                start = end
        return
    order = [p for group in groups for p in group]
    for p, master, state in zip(order, masters or [p.tensor for p in order], states, strict=True):
        p.values = {kind: whole(tensor_of(folder, state.get(kind), p.shape, p)) for kind in MOMENTS}
        p.values[""] = whole(tensor_of(folder, master, p.shape, p))


def described(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What a state says beside its tensors, as Megatron's would."""
    base = tree.get("base_optimizer_state", tree.get("optimizer_state_dict", tree))
    states, groups = (base["state"].values(), base["param_groups"]) if isinstance(base, dict) else (base, [{}])
    told = [state["step"] for state in (*states, *groups) if "step" in state]
    step = max(told, default=tree.get("base_optimizer_state_step"))
    out = {"param_groups": [{**group, "step": step} for group in groups], "loss_scaler": tree.get("loss_scaler")}
    if tree.get("dynamic_loss_scale") and "scale_window" in tree:  # without ZeRO
        clean = max(tree["cur_iter"] - tree["last_overflow_iter"] - 1, 0) % tree["scale_window"]
        out["grad_scaler"] = {"scale": tree["cur_scale"], "growth_tracker": clean, "hysteresis_tracker": 1}
    return out
