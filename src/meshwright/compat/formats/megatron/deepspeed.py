"""Open a step of Megatron-DeepSpeed (BigScience's or Microsoft's): `global_step500/`.

Weights, here of tensor rank 0:
    layer_03-model_00-model_states.pt   one layer, by its number in the pipeline's list of modules
    mp_rank_00_model_states.pt          one rank: settings, and without a pipeline weights
    zero_pp_rank_0_mp_rank_00_model_states.pt   ZeRO-3: shapes only
Each data rank's share of one flat buffer of masters and moments per group of parameters is in
`[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt`; its order is that of `param_slice_mappings`, or
before DeepSpeed 0.7 and in ZeRO-3 of `param_shapes`. Without ZeRO it is in the mp_rank files.
A universal checkpoint, `global_step500_universal/`, has a folder per parameter, already joined.

Written by hand because DeepSpeed's own readers need the model built, or copy everything, and
unpickle whatever the files hold. Here each stretch of a buffer becomes views of the mapped file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import bad_data
from meshwright.checkpoint.boxes import Shape
from meshwright.checkpoint.claims import claimed_shape
from meshwright.checkpoint.pickle import pickles
from meshwright.checkpoint.sources import MappedSource
from meshwright.compat.formats.adam import MOMENTS, WITHOUT, match_numbered, numbered_state
from meshwright.compat.formats.megatron import names, sharded
from meshwright.compat.formats.megatron import state as megatron_state
from meshwright.compat.formats.megatron.reader import (
    check_copies,
    check_values,
    decayed_first,
    flattened,
)
from meshwright.compat.formats.megatron.sharded import Parameter, RankFile, Stretch
from meshwright.compat.formats.table import DEEPSPEED

LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
SHAPES = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
SHARE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
KINDS = ("", *MOMENTS)

Files = dict[tuple[int, ...], Path]
Layers = Mapping[int, int]  # number in the pipeline's list of modules -> layer of the model


def open_deepspeed(
    folder: Path, trust: bool = False, heads: int | None = None, optimizer: bool = True
) -> MappedSource:
    """Open one step; `heads` is for folders that do not state them.

    Without `optimizer` its state is not read, unless it holds the weights.
    """
    models = [pickles.load_pickle(path, trust=trust) for path in model_files(folder)]
    first = models[0]
    args = megatron_state.namespace(first.get("args"))
    notes: list[str] = []

    # The weights: joined in a universal checkpoint, else by rank.
    joined = (folder / "zero").is_dir()
    if joined:
        ranks, layers = read_universal(folder, trust)
    else:
        ranks, layers = read_tensor_ranks(folder, models, trust)
    layer_count = len(sharded.layers_of(p.name for p in ranks[0].parameters))
    sizes = sharded.measure_model(folder, ranks, args.get("num_layers", layer_count), args, heads)
    if joined and sizes.gates == 2 and int(args.get("tensor_model_parallel_size", len(models))) > 1:
        check_gates(folder, layers, trust)

    # The optimizer's state, in which ZeRO-3 has the weights too.
    is_zero3 = ranks[0].parameters[0].tensor.is_meta
    if not is_zero3:
        check_copies(ranks, notes)
    beside: dict[str, Any] = {}
    if joined and optimizer:
        beside = universal_states(folder, ranks[0], layers, trust)
    elif optimizer or is_zero3:
        beside = optimizer_states(folder, ranks, layers, models, trust, notes)
    version = float(first.get("checkpoint_version", 3.0))
    source = megatron_state.as_source(DEEPSPEED, folder, ranks, sizes, args, notes, version)

    # Where the run was; a folder that never had an optimizer's state is one of weights alone.
    state: dict[str, Any] = {}
    is_inside = isinstance(first.get("optimizer"), dict)
    if beside or (joined and not optimizer) or matching(folder, SHARE) or is_inside:
        tree = {"iteration": first.get("global_steps", 0), **first, "optimizer": beside}
        state = megatron_state.state_beside_weights(tree, args, sizes.positions, notes)
    # Messages say how many ranks wrote it; a universal checkpoint has that only in its arguments.
    if joined:
        tp = int(args.get("tensor_model_parallel_size", 1))
        stages = int(args.get("pipeline_model_parallel_size", 1))
        layout = f"universal, from {tp} tensor x {stages} pipeline ranks"
    else:
        stages = max(1, len(models) // len(ranks))
        layout = f"{len(ranks)} tensor x {stages} pipeline ranks"
    vocab = megatron_state.true_vocabulary(first, args)
    return megatron_state.finish_source(source, state, layout, vocab)


# Files


def matching(folder: Path, pattern: re.Pattern[str]) -> Files:
    """Return the files by the numbers in their names, in numerical order."""
    numbered: list[tuple[tuple[int, ...], Path]] = []
    for path in folder.iterdir():
        if match := pattern.fullmatch(path.name):
            numbered.append((tuple(map(int, match.groups())), path))
    numbered.sort()
    files = dict(numbered)
    # Such as layer_3 and layer_03.
    if len(files) < len(numbered):
        raise bad_data(f"{folder}: two files like {numbered[0][1].name} have the same numbers")
    return files


def require_all(folder: Path, what: str, numbers: Sequence[int]) -> None:
    # The files are numbered from 0 on, without a gap unless one is missing.
    missing = sorted(set(range(len(numbers))) - set(numbers))
    if not numbers:
        missing = [0]
    if missing:
        raise bad_data(f"{folder}: there is no file for {what} {missing[0]}")


def model_files(folder: Path) -> list[Path]:
    """Return the file of each tensor rank and stage."""
    files = matching(folder, MODEL) or {
        (mp,): path for (dp, mp), path in matching(folder, SHAPES).items() if dp == 0
    }
    require_all(folder, "tensor and pipeline rank", [mp for (mp,) in files])
    return list(files.values())


# Names


def our_name(key: str, layers: Layers) -> names.ParameterName | None:
    """Return our name for DeepSpeed's; `layers` has the numbers that are layers."""
    key = key.removeprefix("module.")
    if match := re.fullmatch(r"tied_modules\.\w+\.(.+)", key):
        return names.parse_name(f"embedding.{match[1]}")
    match = re.fullmatch(r"(\d+)\.(.+)", key)
    if not match:
        return names.parse_name(key)
    # A module of the pipeline's list: what is in it shows what it is.
    number = int(match[1])
    rest = match[2]
    if rest in ("weight", "bias"):
        return names.parse_name(f"encoder.final_layernorm.{rest}")
    if rest.startswith(("word_embeddings.", "position_embeddings.")):
        return names.parse_name(f"embedding.{rest}")
    if rest == "lm_head.weight":
        return names.parse_name("output_layer.weight")
    return names.parse_name(f"encoder.layers.{layers[number]}.{rest}") if number in layers else None


def layer_numbers(keys: Sequence[str]) -> dict[int, int]:
    """Return which layer of the model each number of the pipeline's list is."""
    numbers = set()
    for key in keys:
        match = re.fullmatch(r"(\d+)\.(?:self_)?attention\..+", key.removeprefix("module."))
        if match:
            numbers.add(int(match[1]))
    return {number: layer for layer, number in enumerate(sorted(numbers))}


def name_parameters(
    folder: Path, tensors: Mapping[str, torch.Tensor], layers: Layers
) -> Iterator[Parameter]:
    """Yield the first of each name, without the last stage's copies of the embedding."""
    seen: set[str] = set()
    for key, tensor in tensors.items():
        if names.NO_PARAMETER.fullmatch(key.rpartition("layers.")[2]):
            continue
        name = our_name(key, layers)
        if name is None:
            raise bad_data(f"{folder}: {key[:200]} is not a known parameter of a GPT")
        if name.full() not in seen and name.ours != sharded.COPY:
            seen.add(name.full())
            yield Parameter(name.full(), name.ours, tensor)


# Weights


def read_tensor_ranks(
    folder: Path, models: Sequence[dict[str, Any]], trust: bool
) -> tuple[list[RankFile], Layers]:
    """Return each tensor rank with the parameters of all stages, and the numbers of the layers."""
    files = matching(folder, LAYER)
    count = 1 + max((tp for _, tp in files), default=len(models) - 1)
    if len(models) % count:
        raise bad_data(
            f"{folder}: files of {len(models)} ranks, not a multiple of {count} tensor ranks"
        )
    ranks = []
    layers: dict[int, int] = {}
    for tp in range(count):
        # A pipeline's layers are files of their own, which all stages share.
        if files:
            own = [path for (_, rank), path in files.items() if rank == tp]
            tensors = layer_tensors(folder, own, trust)
        else:
            tensors = dict(flattened(models[tp].get("module")))

        # ZeRO-3 stores no weights here: their tensors are empty, and only shapes are stated.
        shapes: dict[str, Shape] = {}
        for group in stated_shapes(models[tp]):
            shapes |= group
        is_empty = any(t.numel() != prod(shapes.get(key, t.shape)) for key, t in tensors.items())
        if is_empty and not files:
            tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
        layers = layer_numbers(list(tensors))
        ranks.append(RankFile(folder, tp, 0, {}, [list(name_parameters(folder, tensors, layers))]))
    return ranks, layers


def stated_shapes(model: dict[str, Any]) -> list[dict[str, Shape]]:
    """Return the shapes that a rank's file states, group after group."""
    groups = model.get("param_shapes") or ()
    return [
        {name: claimed_shape(shape, str(name)[:200]) for name, shape in group.items()}
        for group in groups
    ]


def layer_tensors(folder: Path, paths: Sequence[Path], trust: bool) -> dict[str, torch.Tensor]:
    """Return the tensors under the names that the pipeline's module gives them."""
    out = {}
    for path in paths:
        number = int(path.name[6:].partition("-")[0])  # layer_03-...
        for key, tensor in flattened(pickles.load_pickle(path, trust=trust)):
            out[f"{number}.{key}"] = tensor
    return out


def read_universal(folder: Path, trust: bool) -> tuple[list[RankFile], Layers]:
    """Return one rank with every parameter, each joined in a folder of its name."""
    folders = sorted(
        path.name for path in (folder / "zero").iterdir() if (path / "fp32.pt").is_file()
    )
    layers = layer_numbers(folders)
    tensors = {name: read_tensor(folder / "zero" / name / "fp32.pt", trust) for name in folders}
    parameters = list(name_parameters(folder, tensors, layers))
    return [RankFile(folder, 0, 0, {}, [parameters])], layers


def read_tensor(path: Path, trust: bool) -> torch.Tensor:
    value = pickles.load_pickle(path, trust=trust)
    return value["param"] if isinstance(value, dict) else value  # type: ignore[no-any-return]


def check_gates(folder: Path, layers: Layers, trust: bool) -> None:
    """Require that the halves of a gated MLP were joined separately.

    ds_to_universal does so only for parameters that it is configured for, and notes it in the file;
    otherwise the halves lie rank by rank, which the shapes do not show.
    """
    for path in sorted((folder / "zero").glob("*/*.pt")):
        name = our_name(path.parent.name, layers) if path.stem in ("fp32", *MOMENTS) else None
        if name is None or not name.ours.startswith("mlp.fc."):
            continue
        saved = pickles.load_pickle(path, trust=trust)
        if not isinstance(saved, dict) or (
            saved.get("param_n_sub_params") != 2 and "sub_param_shape" not in saved
        ):
            raise bad_data(
                f"{path}: the MLP is gated, and without param_n_sub_params its halves are mixed by tensor rank; name "
                "it in parameter_with_2_sub_params_cat_dim_0 and convert again, or load the original checkpoint"
            )


def universal_states(folder: Path, rank: RankFile, layers: Layers, trust: bool) -> dict[str, Any]:
    """Give each parameter its moments; return settings, empty if some are missing."""
    by_name = {p.name: p for p in rank.parameters}
    step = None
    for path in (path for path in (folder / "zero").iterdir() if (path / "fp32.pt").is_file()):
        if not all((path / f"{kind}.pt").is_file() for kind in MOMENTS):
            return {}
        name = our_name(path.name, layers)
        p = by_name.get(name.full()) if name else None
        if p is None:  # a buffer, or a copy
            continue
        p.values = {
            kind: sharded.one_box(read_tensor(path / f"{kind or 'fp32'}.pt", trust))
            for kind in KINDS
        }
        if step is None and (path / "step.pt").is_file():
            step = pickles.load_pickle(path / "step.pt", trust=trust)
    check_filled(folder, rank)
    return {"param_groups": [{"step": step}]}


# Masters and moments


def optimizer_states(
    folder: Path,
    ranks: list[RankFile],
    layers: Layers,
    models: list[dict[str, Any]],
    trust: bool,
    notes: list[str],
) -> dict[str, Any]:
    """Fill the parameters' values, stage by stage, without later copies of the embedding."""
    files = matching(folder, SHARE)
    beside: dict[str, Any] = {}
    done: set[tuple[int, str]] = set()
    for mp, model in enumerate(models):
        # Tensor ranks are counted first, then stages.
        tp = mp % len(ranks)
        waiting = {p.name: p for p in ranks[tp].parameters if (tp, p.name) not in done}
        shares = [path for (_, m), path in files.items() if m == mp]
        # With ZeRO it is in shares, else beside the weights of the rank.
        if shares:
            require_all(
                folder, f"model rank {mp} and data rank", [dp for dp, m in files if m == mp]
            )
            trees = [state_dict(path, pickles.load_pickle(path, trust=trust)) for path in shares]
            from_shares(waiting, model, trees, layers)
            beside = settings_of(trees[0])
        elif isinstance(model.get("optimizer"), dict) and len(models) == len(ranks):
            from_one_file(folder, list(waiting.values()), model["optimizer"])
            beside = settings_of(model["optimizer"])
        elif isinstance(model.get("optimizer"), dict) and mp == 0:
            notes.append(
                f" > note: {folder} is of a pipeline without ZeRO, which numbers the optimizer's state by stage: only "
                f"the weights are used; {WITHOUT.partition(' to ')[0]}"
            )
        done |= {(tp, name) for name, p in waiting.items() if p.values}
    for rank in ranks if beside else ():
        check_filled(folder, rank)
    if not beside and ranks[0].parameters[0].tensor.is_meta:
        raise bad_data(
            f"{folder}: ZeRO-3 keeps the weights in *_optim_states.pt, and there is no such file"
        )
    return beside


def state_dict(path: Path, tree: Any) -> dict[str, Any]:
    inner = tree.get("optimizer_state_dict") if isinstance(tree, dict) else None
    if not isinstance(inner, dict):
        raise bad_data(f"{path}: holds no optimizer state; {WITHOUT}")
    return inner


def check_filled(folder: Path, rank: RankFile) -> None:
    for p in rank.parameters:
        for kind in KINDS:
            filled = sum(values.numel() for _, values in p.values.get(kind, ()))
            if filled != prod(p.shape):
                raise bad_data(
                    f"{folder}: of {p.name} {p.shape} the optimizer's files hold {filled:,} elements "
                    f"of {kind or 'the master'}; {WITHOUT}"
                )
        if not p.tensor.is_meta:
            check_values(rank, p)


def from_shares(
    waiting: Mapping[str, Parameter],
    model: dict[str, Any],
    trees: Sequence[dict[str, Any]],
    layers: Layers,
) -> None:
    """Add the stretches of all data ranks to the waiting parameters."""
    at: dict[str, int] = {}  # elements of each parameter so far

    def parameter_of(key: str) -> Parameter | None:
        name = our_name(key, layers)
        if name is None:
            raise ValueError(f"the optimizer has {key}, which the weights' files do not have")
        return waiting.get(name.full())

    shapes = stated_shapes(model)
    is_zero3 = "fp32_flat_groups" in trees[0]
    for number, tree in enumerate(trees):
        buffers = flat_buffers(tree, is_zero3)
        if is_zero3:
            own_sizes = [len(buffer) for buffer in buffers[""]]
            stretches = zero3_stretches(parameter_of, shapes, number, len(trees), own_sizes)
        elif "param_slice_mappings" in tree:
            stretches = mapped_stretches(parameter_of, tree["param_slice_mappings"], at)
        else:
            sizes = [[len(b) for b in flat_buffers(t, is_zero3)[""]] for t in trees]
            stretches = ordered_stretches(parameter_of, shapes, number, sizes)
        sharded.fill_stretches(stretches, buffers)


def flat_buffers(tree: Mapping[str, Any], is_zero3: bool) -> dict[str, list[torch.Tensor]]:
    """Return by kind a flat buffer per group."""
    masters = list(tree["fp32_flat_groups" if is_zero3 else "single_partition_of_fp32_groups"])
    base = tree["optimizer_state_dict" if is_zero3 else "base_optimizer_state"]
    # torch's own form has a state by number; DeepSpeed's leaner one is a list.
    states = base
    if isinstance(base, dict):
        states = [base["state"][key] for key in sorted(base["state"])]
    if len(states) != len(masters):
        raise ValueError(f"{len(masters)} groups of masters, {len(states)} of moments")
    buffers = {"": masters}
    for kind in MOMENTS:
        buffers[kind] = [state[kind].reshape(-1) for state in states]
    return buffers


def mapped_stretches(
    parameter_of: Any, mappings: Sequence[Mapping[str, Any]], at: dict[str, int]
) -> Iterator[Stretch]:
    """Yield the stretches that a rank states; each continues where the previous rank ended."""
    for group, mapping in enumerate(mappings):
        for key, address in mapping.items():
            begin = at.get(key, 0)
            at[key] = begin + address.numel
            if p := parameter_of(key):
                yield Stretch(p, begin, group, address.start, address.numel)


def ordered_stretches(
    parameter_of: Any,
    shapes: Sequence[Mapping[str, Shape]],
    number: int,
    sizes: Sequence[Sequence[int]],
) -> Iterator[Stretch]:
    """Yield one rank's stretches where a group's parameters fill the joined buffers in order."""
    for group, parts in enumerate(shapes):
        # This rank's stretch of the joined buffer of the group.
        low = sum(size[group] for size in sizes[:number])
        high = low + sizes[number][group]
        position = 0
        for key, shape in parts.items():
            begin = max(position, low)
            end = min(position + prod(shape), high)
            if begin < end and (p := parameter_of(key)):
                yield Stretch(p, begin - position, group, begin - low, end - begin)
            position += prod(shape)


def zero3_stretches(
    parameter_of: Any,
    shapes: Sequence[Mapping[str, Shape]],
    number: int,
    count: int,
    sizes: Sequence[int],
) -> Iterator[Stretch]:
    """Yield one rank's stretches under ZeRO-3: an equal, padded share of every parameter."""
    group = 0
    start = 0  # in the group's buffer
    for key, shape in ((key, shape) for part in shapes for key, shape in part.items()):
        numel = prod(shape)
        share = -(-numel // count)
        begin = number * share
        left = share
        # A share may go on in the buffer of the next group.
        while left:
            while start == sizes[group]:
                group += 1
                start = 0
            n = min(left, sizes[group] - start)
            real = min(n, numel - begin)  # without padding
            if real > 0 and (p := parameter_of(key)):
                yield Stretch(p, begin, group, start, real)
            begin += n
            start += n
            left -= n


def from_one_file(folder: Path, waiting: list[Parameter], tree: dict[str, Any]) -> None:
    """Read state without ZeRO: by number, in torch's own form, or with masters beside it.

    The masters are separate tensors, or one flat tensor per group.
    """
    state_dict = tree.get("optimizer_state_dict", tree)
    order = decayed_first(waiting) if len(state_dict["param_groups"]) > 1 else waiting
    if "fp32_groups_flat" in tree:
        states, _ = numbered_state(folder, tree)
        rows = {kind: [state[kind].reshape(-1) for state in states] for kind in MOMENTS}
        sharded.fill_stretches(
            flat_stretches(order, len(states)), {"": tree["fp32_groups_flat"], **rows}
        )
        return
    weights = [(p.name, p.tensor) for p in order]
    for p, values in zip(order, match_numbered(folder, tree, weights), strict=True):
        p.values = {kind: sharded.one_box(tensor) for kind, tensor in values.items()}


def flat_stretches(order: Sequence[Parameter], groups: int) -> Iterator[Stretch]:
    """Yield each parameter's stretch of its group's buffer: what decays, then norms and biases."""
    starts = [0] * groups
    for p in order:
        numel = prod(p.shape)
        group = int(groups > 1 and p.tensor.ndim == 1)
        yield Stretch(p, 0, group, starts[group], numel)
        starts[group] += numel


def settings_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings beside a state's tensors in Megatron's form."""
    base = tree.get("base_optimizer_state", tree.get("optimizer_state_dict", tree))
    states: Any = base
    groups: list[dict[str, Any]] = [{}]
    if isinstance(base, dict):
        states = base["state"].values()
        groups = base["param_groups"]
    # Adam's step is in a state, in a group, or beside both.
    steps = [state["step"] for state in (*states, *groups) if "step" in state]
    step = max(steps, default=tree.get("base_optimizer_state_step"))
    out = {
        "param_groups": [{**group, "step": step} for group in groups],
        "loss_scaler": tree.get("loss_scaler"),
    }
    if tree.get("dynamic_loss_scale") and "scale_window" in tree:  # without ZeRO
        clean = max(tree["cur_iter"] - tree["last_overflow_iter"] - 1, 0) % tree["scale_window"]
        out["grad_scaler"] = {
            "scale": tree["cur_scale"],
            "growth_tracker": clean,
            "hysteresis_tracker": 1,
        }
    return out
