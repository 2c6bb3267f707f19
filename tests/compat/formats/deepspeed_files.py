"""Write DeepSpeed checkpoints of a Megatron model: with DeepSpeed on CPU, or older forms by hand.

The model is a tree of parameters with Megatron's names; its loss depends on each of them. DeepSpeed
reports what it held, which is saved as `truth_0.pt`: for each parameter the master and both
moments, complete on every data rank. Tried with DeepSpeed 0.19.8 on torch 2.13:

    DS_BUILD_OPS=0 pip install --no-build-isolation --no-deps --target PEERS deepspeed
    pip install --no-deps --target PEERS einops hjson msgpack ninja psutil py-cpuinfo

and PEERS on PYTHONPATH. (It also needs packaging, pydantic, tqdm.) The second half of this file
shares nothing with DeepSpeed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

Values = dict[str, dict[str, torch.Tensor]]  # by kind and name
MOMENTS = ("exp_avg", "exp_avg_sq")
H, F, V, P, L = 8, 14, 16, 5, 3
SCHEDULER = {
    "max_lr": 1e-3,
    "min_lr": 1e-5,
    "warmup_steps": 16,
    "num_steps": 24,
    "decay_style": "cosine",
}
SCHEDULER |= {"decay_steps": 800, "warmup_tokens": 0, "num_tokens": 0, "decay_tokens": None}
ARGS = Namespace(
    num_attention_heads=2, weight_decay=0.1, consumed_train_samples=24, global_batch_size=8
)
WEIGHTS: dict[str, tuple[int, ...]] = {
    "input_layernorm": (H,),
    "self_attention.query_key_value": (3 * H, H),
    "self_attention.dense": (H, H),
    "post_attention_layernorm": (H,),
    "mlp.dense_h_to_4h": (F, H),
    "mlp.dense_4h_to_h": (H, F),
}
LAYER = {
    f"{n}.{kind}": s if kind == "weight" else s[:1]
    for n, s in WEIGHTS.items()
    for kind in ("weight", "bias")
}
EMBEDDING = {"word_embeddings.weight": (V, H), "position_embeddings.weight": (P, H)}
NORM = {"weight": (H,), "bias": (H,)}
# Which dimension tensor parallelism cuts.
CUT = {
    "word_embeddings.weight": 0,
    "query_key_value.weight": 0,
    "query_key_value.bias": 0,
    "dense.weight": 1,
    "dense_h_to_4h.weight": 0,
    "dense_h_to_4h.bias": 0,
    "dense_4h_to_h.weight": 1,
}


def cut_of(name: str) -> int | None:
    return CUT.get(".".join(name.split(".")[-2:]))


def share(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    cut = cut_of(name)
    return tuple(n // tp if d == cut else n for d, n in enumerate(shape))


# By DeepSpeed


class Leaf(nn.Module):
    """Parameters and a loss of them; a separate module, since ZeRO-3 gathers by module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(
            ((p.float() * 3).sin().sum() for p in self.parameters(recurse=False)), torch.zeros(())
        )


class Tree(nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]], tp: int, tag: str = "") -> None:
        super().__init__()
        for name, shape in shapes.items():
            at: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(at, part):
                    at.add_module(part, Leaf())
                at = getattr(at, part)
            at.register_parameter(last, nn.Parameter(noise(tag + name, share(name, shape, tp), tp)))

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        for module in self.modules():
            if isinstance(module, Leaf):
                x = module(x)
        if any(True for _ in self.parameters(recurse=False)):
            x = Leaf.forward(self, x)  # type: ignore[arg-type]
        return x


def noise(name: str, shape: tuple[int, ...], tp: int) -> torch.Tensor:
    """Return numbers that depend on the name, and on the rank if the tensor is cut."""
    rank = dist.get_rank() % tp if cut_of(name) is not None else 0
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) * 8 + rank)
    )


class Mpu:
    """Megatron's groups, tensor ranks fastest."""

    def __init__(self, tp: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.tp, self.dp = tp, world // tp
        tensor = [dist.new_group([d * tp + t for t in range(tp)]) for d in range(self.dp)]
        data = [dist.new_group([d * tp + t for d in range(self.dp)]) for t in range(tp)]
        self.tensor, self.data = tensor[rank // tp], data[rank % tp]

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank() % self.tp

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self.tp

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_data_parallel_world_size(self) -> int:
        return self.dp

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_data_parallel_group(self) -> Any:
        return self.data

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


class Scheduler:
    """Stands for Megatron's scheduler."""

    def step(self, *_: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return SCHEDULER


def body(folder: str, stage: int, options: dict[str, Any]) -> None:
    """Run three steps on each rank.

    Options: tp, pp (a pipeline), bf16, fp16, float32 accumulation.
    """
    warnings.simplefilter("ignore")
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, not used
    import deepspeed
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None  # would compile
    tp, pp = options.get("tp", 1), options.get("pp", 0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**6,
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    if options.get("bf16"):
        config["bf16"] = {"enabled": True}
    if options.get("fp16"):
        config["fp16"] = {"enabled": True, "initial_scale_power": 4}
    if options.get("float32 accumulation"):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = pipeline(tp, pp) if pp else full_model(tp)
    sizes = {p: len(getattr(p, "ds_shape", p.shape)) for p in model.parameters()}
    groups = [
        {"params": [p for p in sizes if sizes[p] > 1], "weight_decay": 0.1},
        {"params": [p for p in sizes if sizes[p] == 1], "weight_decay": 0.0},
    ]
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        config=config,
        optimizer=torch.optim.Adam(groups, lr=1e-2),
        lr_scheduler=Scheduler(),
        mpu=None if pp or tp == 1 else Mpu(tp),
    )
    for _ in range(3):
        if pp:
            engine.train_batch(iter(lambda: (torch.ones(1), torch.ones(1)), None))
        else:
            engine.backward(engine(torch.ones(1)))
            engine.step()
    if hasattr(optimizer, "_hp_optimizer_states_linked"):  # to a state that Adam has made since
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    truth = {
        name: held(p, optimizer, stage, options) for name, p in engine.module.named_parameters()
    }
    torch.save(truth, Path(folder) / f"truth_{rank}.pt")
    client_state = {"iteration": 3, "args": ARGS, "checkpoint_version": 3.0, **settings(tp)}
    engine.save_checkpoint(folder, client_state=client_state)


def settings(tp: int) -> dict[str, Any]:
    """Return what Megatron-DeepSpeed states for joining a universal checkpoint."""
    cut = [r".*(dense|dense_4h_to_h)\.weight"]
    whole_ones = [r".*norm\.(weight|bias)", r"\d+\.(weight|bias)"]
    whole_ones += [r".*position_embeddings\.weight", r".*(dense|dense_4h_to_h)\.bias"]
    return {
        "universal_checkpoint_info": {
            "universal_checkpoint_version": 0.2,
            "original_vocab_size": V,
            "padded_vocab_size": V,
            "vocabulary_parameter_patterns": [r".*word_embeddings\.weight"],
            "tp_replicated_parameter_patterns": whole_ones,
            "parameter_with_row_parallelism_patterns": cut,
            "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\..*"],
        }
    }


def held(p: Any, optimizer: Any, stage: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if stage or options.get("float32 accumulation"):
        out = {kind: safe_get_full_optimizer_state(p, kind) for kind in MOMENTS}
        return {k: v.clone() for k, v in (out | {"": safe_get_full_fp32_param(p)}).items()}
    master = p
    if hasattr(optimizer, "fp32_groups"):
        pairs = zip(sum(optimizer.fp16_groups, []), sum(optimizer.fp32_groups, []), strict=True)
        master = next(full for half, full in pairs if half is p)
    if master not in optimizer.optimizer.state if hasattr(optimizer, "optimizer") else False:
        return {"": p.detach().clone()}
    state = (optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer).state[master]
    return {"": master.detach().clone()} | {kind: state[kind].clone() for kind in MOMENTS}


def full_model(tp: int) -> nn.Module:
    shapes = {f"language_model.embedding.{name}": shape for name, shape in EMBEDDING.items()}
    for i in range(L):
        shapes |= {
            f"language_model.encoder.layers.{i}.{name}": shape for name, shape in LAYER.items()
        }
    shapes |= {
        f"language_model.encoder.final_layernorm.{name}": shape for name, shape in NORM.items()
    }
    return Tree(shapes, tp)


def pipeline(tp: int, pp: int) -> Any:
    """Return BigScience's pipeline: cast, embedding, transpose, layers, transpose, norm, head."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    embed = TiedLayerSpec(
        "embed", Tree, EMBEDDING, tp, "e", tied_weight_attr="word_embeddings.weight"
    )
    tied = {"forward_fn": lambda module, x: module(x), "tied_weight_attr": "word_embeddings.weight"}
    head = TiedLayerSpec("embed", Tree, EMBEDDING, tp, "e", **tied)
    layers = [LayerSpec(Tree, LAYER, tp, str(i)) for i in range(L)]
    return PipelineModule(
        [
            lambda x: x,
            embed,
            lambda x: x,
            *layers,
            lambda x: x,
            LayerSpec(Tree, NORM, tp, "n"),
            head,
        ],
        topology=PipeModelDataParallelTopology(
            num_pp=pp, num_mp=tp, num_dp=dist.get_world_size() // tp // pp
        ),
        loss_fn=lambda x, _: x.mean(),
        partition_method="uniform",
    )


def universal(folder: str) -> None:
    """Join with DeepSpeed's own program, on one rank."""
    warnings.simplefilter("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.checkpoint import ds_to_universal

    folders = {"input_folder": folder, "output_folder": f"{folder}_universal"}
    off = {"keep_temp_folder": False, "strict": False, "inject_missing_state": False}
    ds_to_universal.main(Namespace(**folders, **off, num_extract_workers=1, num_merge_workers=1))


def zero_to_fp32(folder: str) -> None:
    """Read the masters with DeepSpeed's own program, on one rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    masters = get_fp32_state_dict_from_zero_checkpoint(folder)
    torch.save({name: t.clone() for name, t in masters.items()}, Path(folder) / "fp32.pt")


# By hand

SAVED = {"args": ARGS, "iteration": 30, "lr_scheduler": SCHEDULER, "checkpoint_version": 3.0}


class Address:
    """DeepSpeed's record of a stretch."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


class Scaler:
    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter, self.scale_window = (
            512.0,
            30,
            9,
            1000,
        )
        self.cur_hysteresis, self.delayed_shift = 2, 2


@contextlib.contextmanager
def as_deepspeeds() -> Iterator[None]:
    """Give our classes DeepSpeed's names, for the pickles."""
    here = {
        "deepspeed.utils.tensor_fragment": ("fragment_address", Address),
        "deepspeed.runtime.fp16.loss_scaler": ("DynamicLossScaler", Scaler),
    }
    parents = ["deepspeed", "deepspeed.utils", "deepspeed.runtime", "deepspeed.runtime.fp16"]
    with pytest.MonkeyPatch.context() as patch:
        for module in (*parents, *here):
            patch.setitem(sys.modules, module, types.ModuleType(module))
        for module, (name, theirs) in here.items():
            setattr(sys.modules[module], name, theirs)
            theirs.__module__, theirs.__qualname__, theirs.__name__ = module, name, name
        yield


def model(gated: bool = False, untied: bool = False, embedding_norm: bool = False) -> Values:
    """Return values by kind, and by name in a model without a pipeline."""
    shapes = {f"embedding.{name}": shape for name, shape in EMBEDDING.items()}
    if embedding_norm:
        shapes |= {
            "embedding.word_embeddings.norm.weight": (H,),
            "embedding.word_embeddings.norm.bias": (H,),
        }
    for i in range(L):
        shapes |= {f"encoder.layers.{i}.{name}": shape for name, shape in LAYER.items()}
        if gated:
            fc = f"encoder.layers.{i}.mlp.dense_h_to_4h"
            shapes |= {f"{fc}.weight": (2 * F, H), f"{fc}.bias": (2 * F,)}
    shapes |= {f"encoder.final_layernorm.{name}": shape for name, shape in NORM.items()}
    if untied:
        shapes["output_layer.weight"] = (V, H)
    generator = torch.Generator().manual_seed(4)
    return {
        kind: {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
        for kind in ("", *MOMENTS)
    }


def of_rank(name: str, tensor: torch.Tensor, tp: int, rank: int, gated: bool) -> torch.Tensor:
    cut = 0 if name == "output_layer.weight" else cut_of(name)
    if cut is None:
        return tensor
    if gated and "dense_h_to_4h" in name:  # each rank some rows of both halves
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp, cut)[rank]


def in_pipeline(name: str) -> tuple[int, str, str]:
    """Return the module's number, the name in its file, and the name in the module."""
    if name.startswith("encoder.layers."):
        number, rest = name.removeprefix("encoder.layers.").split(".", 1)
        return int(number) + 3, rest, f"{int(number) + 3}.{rest}"
    if name.startswith("encoder.final"):
        return L + 4, name.rpartition(".")[2], f"{L + 4}.{name.rpartition('.')[2]}"
    if name == "output_layer.weight":
        return L + 5, "lm_head.weight", f"{L + 5}.lm_head.weight"
    rest = name.removeprefix("embedding.")
    return 1, rest, f"tied_modules.embed.{rest}"


def write(
    root: Path,
    values: Values,
    *,
    tp: int = 1,
    pp: int = 0,
    dp: int = 2,
    stage: int = 1,
    mapping: bool = True,
    gated: bool = False,
    only_weights: bool = False,
) -> Path:
    """Write a checkpoint; `pp` 0 means no pipeline, no `mapping` the form before DeepSpeed 0.7."""
    folder = root / "global_step30"
    folder.mkdir()
    stages = max(pp, 1)
    for mp in range(tp * stages):
        mine = {
            kind: {
                n: of_rank(n, t, tp, mp % tp, gated)
                for n, t in tensors.items()
                if on_stage(n, mp // tp, stages)
            }
            for kind, tensors in values.items()
        }
        called = {n: in_pipeline(n)[2] if pp else f"language_model.{n}" for n in mine[""]}
        by_dimension = [[n for n, t in mine[""].items() if t.ndim == ndim] for ndim in (2, 1)]
        shapes = [
            OrderedDict((called[n], mine[""][n].shape) for n in group) for group in by_dimension
        ]
        weights = {n: t.bfloat16() for n, t in mine[""].items()}
        module = (
            None
            if pp
            else {called[n]: torch.empty(0) if stage == 3 else t for n, t in weights.items()}
        )
        state = {"module": module, "param_shapes": None if only_weights else shapes, **SAVED}
        state["checkpoint_info"] = {"original_vocab_size": V - 3}
        if pp:
            save_layers(folder, weights, mp % tp)
        for d in range(dp if stage == 3 else 1):
            name = f"zero_pp_rank_{d}_mp_rank_{mp:02d}" if stage == 3 else f"mp_rank_{mp:02d}"
            torch.save(state, folder / f"{name}_model_states.pt")
        for d in range(0 if only_weights else dp):
            tree = (
                third(mine, d, dp)
                if stage == 3
                else shared(mine, by_dimension, called, d, dp, mapping)
            )
            with as_deepspeeds():
                torch.save(
                    {"optimizer_state_dict": tree | {"loss_scaler": Scaler(), "zero_stage": stage}},
                    folder
                    / f"{'bf16_' if mapping else ''}zero_pp_rank_{d}_mp_rank_{mp:02d}_optim_states.pt",
                )
    return folder


def on_stage(name: str, stage: int, stages: int) -> bool:
    """Return whether a stage holds the parameter; the last has the embedding too."""
    if name.startswith("embedding."):
        return stage in (0, stages - 1)
    if not name.startswith("encoder.layers."):
        return stage == stages - 1
    return int(name.split(".")[2]) * stages // L == stage


def save_layers(folder: Path, weights: dict[str, torch.Tensor], tp: int) -> None:
    files: dict[int, dict[str, torch.Tensor]] = {}
    for name, t in weights.items():
        number, key, _ = in_pipeline(name)
        files.setdefault(number, {})[key] = t
    for number, tensors in files.items():
        torch.save(tensors, folder / f"layer_{number:02d}-model_{tp:02d}-model_states.pt")


def shared(
    mine: Values, groups: list[list[str]], called: Any, rank: int, ranks: int, mapping: bool
) -> dict[str, Any]:
    """Return one data rank's state of ZeRO-1 and -2: an equal part of each group's padded row."""
    masters, states, mappings = [], [], []
    for group in groups:
        rows = {
            kind: torch.cat([tensors[n].reshape(-1) for n in group])
            for kind, tensors in mine.items()
        }
        part = -(-len(rows[""]) // (2 * ranks)) * 2
        low, high = rank * part, (rank + 1) * part
        filled = {
            k: nn.functional.pad(row, (0, part * ranks - len(row)))[low:high]
            for k, row in rows.items()
        }
        masters.append(rows[""][low:high].clone())
        states.append(
            {kind: filled[kind].clone() for kind in MOMENTS} | {"step": torch.tensor(30.0)}
        )
        mappings.append(OrderedDict())
        begin = 0
        for n in group:
            end = begin + mine[""][n].numel()
            if max(begin, low) < min(end, high):
                mappings[-1][called[n]] = Address(
                    min(end, high) - max(begin, low), max(begin, low) - low
                )
            begin = end
    base = {
        "state": dict(enumerate(states)),
        "param_groups": [{"params": [i], "lr": 0.1} for i in range(len(groups))],
    }
    saved = {"single_partition_of_fp32_groups": masters, "partition_count": [ranks] * len(groups)}
    if mapping:
        return saved | {"base_optimizer_state": base, "param_slice_mappings": mappings}
    return saved | {"base_optimizer_state": states, "base_optimizer_state_step": 30}


def third(mine: Values, rank: int, ranks: int) -> dict[str, Any]:
    """Return state of ZeRO-3: an equal part of each parameter, in groups of five parameters."""
    order = sorted(mine[""], key=lambda n: mine[""][n].ndim, reverse=True)

    def row(kind: str, names: list[str]) -> torch.Tensor:
        parts = []
        for n in names:
            flat = mine[kind][n].reshape(-1)
            part = -(-len(flat) // ranks)
            parts.append(
                torch.nn.functional.pad(flat, (0, part * ranks - len(flat)))[
                    rank * part : (rank + 1) * part
                ]
            )
        return torch.cat(parts)

    groups = [order[i : i + 5] for i in range(0, len(order), 5)]
    states = {
        i: {kind: row(kind, group) for kind in MOMENTS} | {"step": torch.tensor(30.0)}
        for i, group in enumerate(groups)
    }
    return {
        "fp32_flat_groups": [row("", group) for group in groups],
        "optimizer_state_dict": {"state": states, "param_groups": [{"params": list(states)}]},
    }


def joined_by_hand(root: Path, values: Values) -> Path:
    """Write a universal checkpoint; matrices have the newer form of a file, a dictionary."""
    folder = root / "global_step30_universal"
    for kind, tensors in values.items():
        for n, t in tensors.items():
            path = folder / "zero" / in_pipeline(n)[2] / f"{kind or 'fp32'}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"param": t, "cat_dim": 0} if t.ndim == 2 else t, path)
            torch.save(torch.tensor(30.0), path.with_name("step.pt"))
    torch.save(SAVED, folder / "mp_rank_00_model_states.pt")
    return folder
