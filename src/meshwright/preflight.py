"""What is looked at before a run begins: settings against files, devices, memory and the checkpoint. Nothing is written.

`meshwright train --dry-run` ends here. Each check says in words what is wrong, with both numbers and the flag to change.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import flags
from meshwright.config import ARCHITECTURE, Model, TrainConfig, contradictions
from meshwright.errors import BAD_DATA, DONE, LOCKED, USAGE, UserError
from meshwright.model import counts

if TYPE_CHECKING:
    import torch

    from meshwright.tokenizers import Tokenizer


def refuse_other_ranks() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise UserError(
            f"started as {world} processes, but training on several devices is not yet there (planned for step 3): "
            "start one process, for example with --nproc_per_node 1"
        )


def require_files(config: TrainConfig) -> None:
    """The data must be there before anything long begins."""
    for prefix in config.data.data_path:
        missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").exists()]
        if missing:
            raise UserError(
                f"--data-path {prefix}: there is no {' and no '.join(missing)}; `meshwright preprocess` writes both, and "
                "the prefix is their name without the ending",
                BAD_DATA,
            )


def pick_device(config: Any) -> torch.device:
    """--device, or a GPU if there is one."""
    import torch

    wanted = config.parallel.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU (nvidia-smi shows whether the driver does)")
    return torch.device(wanted)


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
    continued = c.load and Path(c.load).resolve() == Path(c.save).resolve()
    if continued and c.save_overwrite:
        raise UserError("--save-overwrite starts anew and --load continues the same folder: give one of them")
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
    kept = folder / "tokenizer" if folder is not None and (folder / "tokenizer").is_dir() else None
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
    padded = tokenizers.padded_size(vocab, m.make_vocab_size_divisible_by, 1, m.pad_vocab_size_to)
    say(tokenizers.padding_line(vocab, padded))
    return tokenizer, vocab, padded


def bytes_per_parameter(config: TrainConfig) -> int:
    """Weight, gradient, two moments, and a master where the weight is low precision."""
    return {"float64": 32, "float32": 16}.get(config.precision.dtype, 18)


def require_memory(config: TrainConfig, parameters: int, padded: int, device: torch.device) -> None:
    """What cannot fit by any means is refused before memory is asked for: the state, and one micro-batch's logits."""
    import torch

    if device.type == "cuda":
        have = torch.cuda.get_device_properties(device).total_memory
    else:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    t, seq = config.training, config.data.seq_length
    assert t.micro_batch_size and seq
    state, logits = parameters * bytes_per_parameter(config), t.micro_batch_size * seq * padded * 4
    if state + logits > have:
        raise UserError(
            f"this needs at least {(state + logits) / 2**30:,.1f} GiB: {state / 2**30:,.1f} for {parameters:,} parameters "
            f"with their optimizer, {logits / 2**30:,.1f} for the logits of {t.micro_batch_size} x {seq} tokens; the device "
            f"has {have / 2**30:,.1f} GiB: a smaller model, --micro-batch-size or --seq-length"
        )


# Settings that change what a continued run computes: told when they differ from the checkpoint's.
_WATCHED = ("seed", "data_path", "split", "split_arithmetic", "seq_length", "global_batch_size", "hidden_dropout",
            "attention_dropout", "fp16", "bf16", "params_dtype", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad",
            "train_iters", "eval_interval", "eval_iters", "loss_mean")  # fmt: skip


def differences(config: TrainConfig, saved: dict[str, Any]) -> list[str]:
    """A line for each setting that is not what the checkpoint was trained with; another architecture is refused."""
    model = Model(**{f.name: saved[f.name] for f in dataclasses.fields(Model) if f.name in saved})
    contradicted = contradictions(config.model, model, [n for n in ARCHITECTURE if n != "max_position_embeddings"])
    if contradicted:
        raise UserError("\n  ".join(["these flags contradict the checkpoint:", *contradicted]), BAD_DATA)
    ours = saved_settings(config)
    out = [
        f" > note: {name} is {ours[name]}, the checkpoint was trained with {saved[name]}"
        for name in _WATCHED
        if name in saved and saved[name] != ours[name]
    ]
    if saved.get("data_path") == ours["data_path"] and saved.get("data_fingerprint") != ours["data_fingerprint"]:
        out.append(
            " > note: the files of --data-path have changed since the checkpoint; what follows reads the new ones"
        )
    return out


def saved_settings(config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint remembers of its making."""
    from meshwright.data.indexed import fingerprint

    return flags.to_dict(config) | {"data_fingerprint": [fingerprint(prefix) for prefix in config.data.data_path]}


def dry_run(config: TrainConfig) -> int:
    """Check everything without torch and without writing: settings, files, sizes."""
    from meshwright import tokenizers
    from meshwright.data.indexed import Indexed

    problems = config.problems()
    later = [p for p in problems if p.startswith("--data-path is needed")]
    if len(problems) > len(later):
        raise UserError(flags.listed([p for p in problems if p not in later]), USAGE)
    refuse_other_ranks()
    if config.checkpoint.save:
        guard_existing(config)
    m, d, t = config.model, config.data, config.training
    assert d.seq_length and t.train_iters
    require_files(config)
    for prefix in d.data_path:
        print(f"data {prefix}: {len(Indexed(prefix)):,} documents")
    v, where = config.tokenizer, config.checkpoint.run_dir or config.checkpoint.save
    folder = Path(where) if where else None
    kept = folder is not None and (folder / "tokenizer").is_dir()
    if v.tokenizer_type == "GPT2BPETokenizer" and not (v.vocab_file or v.merge_file or v.vocab_size or kept):
        vocab = 50257
        later.append("--vocab-file and --merge-file are needed (counted here as GPT-2's 50,257 ids)")
    else:
        _, vocab, _ = vocabulary(config, folder, lambda line: None)
    padded = tokenizers.padded_size(vocab, m.make_vocab_size_divisible_by, 1, m.pad_vocab_size_to)
    positions = m.max_position_embeddings or d.seq_length
    n = counts.parameters(m, padded, positions)
    tokens = config.global_batch * d.seq_length
    flops = counts.flops_per_token(m, padded, d.seq_length, t.recompute) * tokens
    each = bytes_per_parameter(config)
    print(f"parameters: {n:,} (vocabulary {vocab:,} padded to {padded:,})")
    print(f"one step: {tokens:,} tokens, {flops / 1e12:,.3g} TFLOP, {config.micro_batches} micro-batches")
    print(f"the run: {t.train_iters:,} steps, {tokens * t.train_iters / 1e9:,.3g} billion tokens")
    print(f"memory of weights, gradients and optimizer: {n * each / 2**30:,.1f} GiB, activations apart")
    if config.checkpoint.load:
        check_loading(config)
    for p in later:
        print(f"before it can start: {p}")
    print("nothing was built and nothing written")
    return DONE


def check_loading(config: TrainConfig) -> None:
    """What a run would say of its checkpoint before it reads a tensor."""
    from meshwright import lr_schedule
    from meshwright.checkpoint import native, store

    assert config.checkpoint.load
    root, step = store.split_path(config.checkpoint.load)
    step, notes = (step, []) if step is not None else store.latest(root)
    told = [
        f"it would continue from step {step} in {root}"
        if step is not None
        else f"no checkpoint in {root}: it starts anew"
    ]
    if step is not None:
        told += differences(config, native.read_config(root, step))
        lr_schedule.resume(lr_schedule.from_config(config), native.read_state(root, step)["schedule"], config)
    print("\n".join(notes + told))
