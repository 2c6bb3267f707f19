"""What is looked at before a run begins: settings against files, devices, memory and the checkpoint. Nothing is written.

`meshwright train --dry-run` ends here. Each check says in words what is wrong, with both numbers and the flag to change.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import device as devices
from meshwright import flags
from meshwright.config import (
    ARCHITECTURE,
    Checkpoint,
    Data,
    Logging,
    Model,
    Parallel,
    TrainConfig,
    blend,
    contradictions,
)
from meshwright.config import (
    Tokenizer as TokenizerFlags,
)
from meshwright.errors import BAD_DATA, DONE, LOCKED, USAGE, UserError
from meshwright.model import counts
from meshwright.parallel.layout import Layout

if TYPE_CHECKING:
    import torch

    from meshwright.parallel.team import Team
    from meshwright.tokenizers import Tokenizer


def require_files(config: TrainConfig) -> None:
    """The data must be there before anything long begins."""
    for prefix in prefixes(config.data):
        missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").exists()]
        if missing:
            raise UserError(
                f"data {prefix}: there is no {' and no '.join(missing)}; `meshwright preprocess` writes both, and "
                "the prefix is their name without the ending",
                BAD_DATA,
            )


def pick_backend(config: TrainConfig, device: torch.device, tells: bool = False) -> str:
    """How ranks talk: gloo between the hosts, and on an accelerator what its maker gives beside it."""
    import torch.distributed as dist

    wanted = config.parallel.distributed_backend
    if device.type == "cpu":
        if tells and wanted not in (None, "gloo"):  # the documents' commands say nccl
            print(f"note: --distributed-backend {wanted} has no effect: on a CPU ranks talk by gloo", file=sys.stderr)
        return "gloo"
    if wanted and ":" in wanted:
        return wanted
    return f"cpu:gloo,{device.type}:{wanted or dist.get_default_backend_for_device(device)}"


def layout_of(config: TrainConfig, rank: int) -> Layout:
    p = config.parallel
    replicas = p.num_distributed_optimizer_instances
    return Layout(
        p.pipeline_model_parallel_size, replicas, config.dp // replicas, p.context_parallel_size,
        p.tensor_model_parallel_size, rank,
    )  # fmt: skip


def our_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("meshwright")
    except PackageNotFoundError:  # a clone that is not installed
        return "uninstalled"


def same_on_all(team: Team, config: TrainConfig) -> None:
    """Ranks that were started with other settings, versions or data are refused before anything is computed."""
    if team.size == 1:
        return
    import platform

    import numpy
    import torch

    from meshwright.parallel import start

    ours = saved_settings(config) | {
        "meshwright": our_version(), "torch": torch.__version__, "numpy": numpy.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    start.compare(team, {name: value for name, value in ours.items() if name != "local_rank"})


def be_deterministic() -> None:
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def guard_existing(config: TrainConfig) -> None:
    """A folder that holds checkpoints of another run is refused before anything is built, unless they may be moved."""
    from meshwright.checkpoint import store

    c = config.checkpoint
    assert c.save
    existing = store.held(c.save)
    continued = c.load and not c.finetune and Path(c.load).resolve() == Path(c.save).resolve()
    if continued and c.save_overwrite:
        raise UserError("--save-overwrite starts anew and --load continues the same folder: give one of them")
    if existing and c.finetune and not c.save_overwrite and c.load and Path(c.load).resolve() == Path(c.save).resolve():
        raise UserError(
            f"--finetune starts a new run, but --save {c.save} holds the one that is loaded: give another folder",
            LOCKED,
        )
    if existing and not continued and not c.save_overwrite:
        raise UserError(
            f"--save {c.save} already holds {existing[-1]}: add --load {c.save} to continue it, or --save-overwrite to "
            "move it aside" + (f" and continue from {c.load}" if c.load else " and start anew"),
            LOCKED,
        )


def vocabulary(
    config: TrainConfig, folder: Path | None, say: Callable[[str], None]
) -> tuple[Tokenizer | None, int, int]:
    """The tokenizer if the flags name one, the true and the padded size."""
    from meshwright import tokenizers

    t, m = config.tokenizer, config.model
    bare = t.vocab_size is not None and not (t.vocab_file or t.merge_file or t.tokenizer_model)
    loaded = Path(config.checkpoint.load) if config.checkpoint.load else None
    if loaded is not None and loaded.name.startswith("iter_"):
        loaded = loaded.parent
    kept = next((f / "tokenizer" for f in (folder, loaded) if f is not None and (f / "tokenizer").is_dir()), None)
    if (
        bare
        and t.tokenizer_type != "ByteTokenizer"
        and (config.data.mock_data or t.tokenizer_type == "GPT2BPETokenizer")
    ):
        say(f"> no tokenizer: the vocabulary's size is given, {t.vocab_size}")
        tokenizer, vocab = None, t.vocab_size
    else:
        say(f"> building {t.tokenizer_type} tokenizer ...")
        tokenizer = tokenizers.build(t, kept)
        vocab = tokenizer.size
    assert vocab
    tp = config.parallel.tensor_model_parallel_size
    padded = tokenizers.padded_size(vocab, m.make_vocab_size_divisible_by, tp, m.pad_vocab_size_to)
    say(tokenizers.padding_line(vocab, padded))
    return tokenizer, vocab, padded


def bytes_per_parameter(config: TrainConfig) -> tuple[float, float]:
    """On the device, and in host memory with --cpu-optimizer: weight, gradient, master where it is not the weight, moments."""
    low, full = config.precision.dtype in ("float16", "bfloat16"), 8 if config.precision.dtype == "float64" else 4
    update: float = full * (2 if config.optimizer.optimizer in ("adam", "adamw") else 1)  # Muon's embeddings: at least
    p, weight = config.parallel, float(2 if low else full)
    parts = config.dp * p.context_parallel_size // p.num_distributed_optimizer_instances if p.zero else 1
    gradient = full if p.zero < 2 else full / parts
    weight = weight / parts if p.zero == 3 else weight
    kept = (update + full * (low or parts > 1 or p.offloads)) / parts  # moments and master
    share = full / parts if 0 < p.zero < 2 and parts > 1 else 0  # of the summed gradients
    if p.offloads:
        return weight + gradient + share, kept + full / parts
    return weight + gradient + share + kept, 0


def require_memory(config: TrainConfig, parameters: int, padded: int, device: torch.device) -> None:
    """What cannot fit by any means is refused before memory is asked for: the state, and one micro-batch's logits."""
    have = devices.total_memory(device)
    micro, seq = config.micro_batch, config.data.seq_length
    assert seq
    width = 2 if config.precision.dtype in ("float16", "bfloat16") else 4
    here, host = bytes_per_parameter(config)
    state, logits = parameters * (here + host if device.type == "cpu" else here), micro * seq * padded * width
    if state + logits > have:
        raise UserError(
            f"this needs at least {(state + logits) / 2**30:,.1f} GiB: {state / 2**30:,.1f} for {parameters:,} parameters "
            f"with their optimizer, {logits / 2**30:,.1f} for the logits of {micro} x {seq} tokens; the device "
            f"has {have / 2**30:,.1f} GiB: a smaller model, --micro-batch-size or --seq-length"
        )


# Settings that a continued run may change without a word: they change nothing that is computed, or are told elsewhere.
_FREE = {*ARCHITECTURE,
         *(f.name for g in (Parallel, Checkpoint, Logging, TokenizerFlags) for f in dataclasses.fields(g)),
         *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_decay_tokens", "lr_warmup_fraction",
           "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens", "lr_warmup_init", "lr_wsd_decay_style",
           "lr_wsd_decay_iters", "lr_wsd_decay_samples", "weight_decay", "start_weight_decay", "end_weight_decay",
           "weight_decay_incr_style", "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler",
           "data_cache_path", "data_impl", "mmap_warmup", "num_workers", "micro_batch_size", "exit_interval",
           "exit_duration_in_mins", "exit_signal_handler", "kill_switch_path", "skip_train", "on_nonfinite", "compile",
           "recompute_granularity", "recompute_method", "recompute_num_layers", "checkpoint_activations",
           "recompute_activations", "deterministic_mode", "make_vocab_size_divisible_by", "pad_vocab_size_to",
           "init_method_std", "init_method_xavier_uniform", "initial_loss_scale", "data_fingerprint")}  # fmt: skip


def differences(config: TrainConfig, saved: dict[str, Any]) -> list[str]:
    """A line for each setting that is not what the checkpoint was trained with; another architecture is refused."""
    model = Model(**{f.name: saved[f.name] for f in dataclasses.fields(Model) if f.name in saved})
    contradicted = contradictions(config.model, model, [n for n in ARCHITECTURE if n != "max_position_embeddings"])
    if contradicted:
        raise UserError("\n  ".join(["these flags contradict the checkpoint:", *contradicted]), BAD_DATA)
    ours = saved_settings(config)
    out = [
        f" > note: {name} is {_shown(ours[name])}, the checkpoint was trained with {_shown(saved[name])}"
        for name in ours
        if name not in _FREE and name in saved and saved[name] != ours[name]
    ]
    if (
        all(saved.get(n) == ours[n] for n in ("data_path", "train_data_path"))
        and saved.get("data_fingerprint") != ours["data_fingerprint"]
    ):
        out.append(
            " > note: the files of --data-path have changed since the checkpoint; what follows reads the new ones"
        )
    return out


def _shown(value: Any) -> Any:
    return "not set" if value in (None, []) else value


def saved_settings(config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint remembers of its making."""
    from meshwright.data.indexed import fingerprint

    return flags.to_dict(config) | {
        "world_size": None,
        "data_fingerprint": [fingerprint(prefix) for prefix in prefixes(config.data)],
    }


def prefixes(d: Data) -> list[str]:
    """Every pair of token files, once."""
    paths = (d.data_path, d.train_data_path, d.valid_data_path, d.test_data_path)
    return list(dict.fromkeys(prefix for values in paths for prefix in blend(values)[1]))


def checkpoint_architecture(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """With --use-checkpoint-args: what the checkpoint under --load says of the network, where no flag is given."""
    from meshwright.checkpoint import native, store

    if not config.checkpoint.use_checkpoint_args or not config.checkpoint.load:
        return config
    root, step = store.split_path(config.checkpoint.load)
    step = step if step is not None else store.latest(root)[0]
    if step is None:
        raise UserError(f"--use-checkpoint-args: no checkpoint in {root}", BAD_DATA)
    saved = native.read_config(root, step) | {"max_position_embeddings": native.read_state(root, step)["positions"]}
    wanted = {n: v for n, v in saved.items() if n in (*ARCHITECTURE, "seq_length", "vocab_size") and n not in given}
    known = flags.from_saved(TrainConfig, wanted, str(store.step_folder(root, step)))
    groups: dict[str, Any] = {"model": config.model, "data": config.data, "tokenizer": config.tokenizer}
    for name, group in groups.items():
        mine = {f.name for f in dataclasses.fields(group)}
        groups[name] = dataclasses.replace(group, **{n: v for n, v in known.items() if n in mine})
    return dataclasses.replace(config, **groups)


def dry_run(config: TrainConfig) -> int:
    """Check everything without torch and without writing: settings, files, sizes."""
    from meshwright import tokenizers
    from meshwright.data.indexed import Indexed

    problems = config.problems(data=False)
    if problems:
        raise UserError(flags.listed(problems), USAGE)
    later = config.problems()
    if config.checkpoint.save:
        guard_existing(config)
    m, d = config.model, config.data
    assert d.seq_length
    require_files(config)
    for prefix in prefixes(d):
        print(f"data {prefix}: {len(Indexed(prefix)):,} documents")
    v, where = config.tokenizer, config.checkpoint.run_dir or config.checkpoint.save
    folder = Path(where) if where else None
    kept = folder is not None and (folder / "tokenizer").is_dir()
    if v.tokenizer_type == "GPT2BPETokenizer" and not (v.vocab_file or v.merge_file or v.vocab_size or kept):
        vocab = 50257
        later.append("--vocab-file and --merge-file are needed (counted here as GPT-2's 50,257 ids)")
    else:
        _, vocab, _ = vocabulary(config, folder, lambda line: None)
    tp = config.parallel.tensor_model_parallel_size
    padded = tokenizers.padded_size(vocab, m.make_vocab_size_divisible_by, tp, m.pad_vocab_size_to)
    positions = m.max_position_embeddings or d.seq_length
    n = counts.parameters(m, padded, positions)
    tokens = config.global_batch * d.seq_length
    flops = counts.flops_per_token(m, padded, d.seq_length, config.training.recompute) * tokens
    here, host = bytes_per_parameter(config)
    print(f"parameters: {n:,} (vocabulary {vocab:,} padded to {padded:,})")
    auto = config.training.micro_batch_size == "auto"
    micro = (
        "the micro-batch is found at the start"
        if auto
        else f"{config.micro_batches(config.global_batch)} micro-batch(es)"
    )
    print(f"one step: {tokens:,} tokens, {_large(flops, 'FLOP')}, {micro}")
    in_all = (config.samples or config.steps * config.global_batch) * d.seq_length
    print(f"the run: {config.steps:,} steps, {in_all:,} tokens")
    beside = f" and {n * host / 2**30:,.1f} in host memory" if host else ""
    if config.world > 1:
        share = f"{config.dp} data-parallel ranks of {config.parallel.model_ranks}"
        n = n // (tp * config.parallel.pipeline_model_parallel_size)
        print(
            f"ranks: {config.world}, {share}; layers of each stage: {' '.join(map(str, config.stages))}; about {n:,} parameters"
        )
    print(f"memory of weights, gradients and optimizer: {n * here / 2**30:,.2f} GiB{beside}, activations apart")
    if config.checkpoint.load:
        check_loading(config)
    for p in later:
        print(f"before it can start: {p}")
    print("nothing was built and nothing written")
    return DONE


def _large(x: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if x >= size:
            return f"{x / size:,.1f} {prefix}{unit}"
    return f"{x / 1e6:,.1f} M{unit}"


def check_loading(config: TrainConfig) -> None:
    """What a run would say of its checkpoint before it reads a tensor."""
    from meshwright import lr_schedule
    from meshwright.checkpoint import native, store

    assert config.checkpoint.load
    root, step = store.split_path(config.checkpoint.load)
    step, notes = (step, []) if step is not None else store.latest(root)
    told = [
        f"it would {'take the weights of' if config.checkpoint.finetune else 'continue from'} step {step} in {root}"
        if step is not None
        else f"no checkpoint in {root}: it starts anew"
    ]
    if step is not None:
        told += differences(config, native.read_config(root, step))
    if step is not None and not config.checkpoint.finetune:
        lr_schedule.resume(lr_schedule.from_config(config), native.read_state(root, step)["schedule"], config)
    print("\n".join(notes + told))
