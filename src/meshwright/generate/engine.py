"""A trained model from its folder, and decoding with a key/value cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright import flags, tokenizers
from meshwright.checkpoint import native, store
from meshwright.checkpoint.store import Say
from meshwright.config import GenerateConfig, Model, TrainConfig, not_yet, spelling
from meshwright.config import Tokenizer as TokenizerFlags
from meshwright.errors import BAD_DATA, UserError
from meshwright.kernels.pick import pick
from meshwright.model.attention import Cache, Where
from meshwright.model.gpt import GPT
from meshwright.tokenizers import Tokenizer

# What `decode` and `complete` take after the model.
Options = tuple[list[list[int]], int, int, int, Callable[[int, Tensor], int], bool]

# Flags that must equal the checkpoint's if given, since the weights were trained with them.
ARCHITECTURE = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels",
                "max_position_embeddings", "layernorm_epsilon", "untie_embeddings_and_output_weights",
                "bias_gelu_fusion", "openai_gelu")  # fmt: skip
# Where a default or another flag decides, what is compared is the outcome.
OUTCOME = {"ffn_hidden_size": "ffn", "kv_channels": "head_dim", "bias_gelu_fusion": "gelu", "openai_gelu": "gelu"}


@dataclass(frozen=True)
class Found:
    """What a run's folder says about its newest whole checkpoint."""

    root: Path
    step: int
    config: TrainConfig
    vocab: int
    padded: int
    positions: int
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Run:
    """A trained model, ready to read and write text."""

    model: GPT
    tokenizer: Tokenizer
    step: int
    length: int  # of the longest sequence: --seq-length, or as trained
    device: torch.device


def given(parsed: flags.Parsed[Any]) -> dict[str, Any]:
    """What flags, environment, file and preset say; the rest is the checkpoint's to say."""
    values = flags.to_dict(parsed.config)
    return {name: values[name] for name, source in parsed.sources.items() if source != "default"}


def find(folder: str, given: Mapping[str, Any], vocabulary: TokenizerFlags, say: Say) -> Found:
    """The newest whole step under `folder`, or that step if it names one; `given` are flags, to be compared with it."""
    root, step = store.split_path(folder)
    if step is None:
        step, notes = store.latest(root)
        for note in notes:
            say(note)
    if step is None:
        raise UserError(f"no checkpoint in {folder}", BAD_DATA)
    state, saved = native.read_state(root, step), native.read_config(root, step)
    where = str(store.step_folder(root, step))
    config, _ = flags.build(TrainConfig, [("checkpoint", flags.from_saved(TrainConfig, saved, where))])
    try:
        vocab, padded, positions = (int(state[n]) for n in ("true_vocab_size", "padded_vocab_size", "positions"))
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where}/state.json does not tell the sizes of a model", BAD_DATA) from None
    later = not_yet(GenerateConfig(model=config.model))  # a model of a later version must not load as another one
    if later:
        raise UserError("\n  ".join([f"{where} holds a model that this version cannot run:", *later]), BAD_DATA)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, max_position_embeddings=positions))
    tokenizer = find_tokenizer(vocabulary, [root, *([Path(saved["run_dir"])] if saved.get("run_dir") else [])], vocab)
    out = contradictions(given, config.model, positions)
    if tokenizer.size != vocab:
        out.append(f"the vocabulary has {tokenizer.size} ids, the checkpoint {vocab}")
    if out:
        told = "\n  ".join([f"these flags contradict {where} (leave them out, it knows them):", *out])
        raise UserError(told, BAD_DATA)
    return Found(root, step, config, vocab, padded, positions, tokenizer)


def contradictions(given: Mapping[str, Any], saved: Model, positions: int) -> list[str]:
    """Every flag that says something else than the checkpoint; what was left to a default counts as written out."""
    asked = dataclasses.replace(saved, **{n: given[n] for n in ARCHITECTURE if n in given})
    out = []
    for name in ARCHITECTURE:
        ours, theirs = (getattr(m, OUTCOME.get(name, name)) for m in (asked, saved))
        if name in given and ours != theirs:
            out.append(f"{spelling(name)} {given[name]}, the checkpoint has {theirs}")
    if (given.get("seq_length") or 0) > positions:
        out.append(f"--seq-length {given['seq_length']}, the checkpoint has {positions} positions")
    return out


def find_tokenizer(t: TokenizerFlags, folders: list[Path], size: int) -> Tokenizer:
    """The flags' vocabulary if they name files, else the run's own."""
    kept = next((f / "tokenizer" for f in folders if (f / "tokenizer" / "meta.json").is_file()), None)
    files = t.vocab_file or t.merge_file or t.tokenizer_model
    if kept is None and not files and t.tokenizer_type not in ("ByteTokenizer", "NullTokenizer"):
        raise UserError(
            f"{folders[0]} holds no tokenizer/ folder, so the vocabulary must be named: --vocab-file and --merge-file, "
            f"--tokenizer-model, or, for a model of bare ids, --tokenizer-type NullTokenizer --vocab-size {size - 1}"
        )
    return tokenizers.build(t, kept)


def load(
    folder: str, given: Mapping[str, Any], vocabulary: TokenizerFlags, dtype: torch.dtype, device: torch.device,
    verify: str, say: Say,
) -> Run:  # fmt: skip
    """The model of `find`, its weights read into `dtype` on `device`."""
    found = find(folder, given, vocabulary, say)
    with torch.device("meta"):
        block, _ = pick(found.config.model, device)
        model = GPT(found.config.model, found.vocab, found.padded, found.positions, block)
    model = model.to(dtype).to_empty(device=device).eval()
    want = {}
    for name, p in model.named_parameters():
        p.requires_grad_(False)
        rows = model.vocab if name in ("wte.weight", "lm_head.weight") else p.shape[0]
        p[rows:] = 0
        want[name] = native.whole(p[:rows])
    native.load(found.root, want, verify=verify, say=say, step=found.step, optimizer=False)
    length = given.get("seq_length") or found.config.data.seq_length or found.positions
    return Run(model, found.tokenizer, found.step, min(length, found.positions), device)


def decode(
    model: GPT, prompts: list[list[int]], max_new: int, seq_length: int, eod: int,
    choose: Callable[[int, Tensor], int], use_cache: bool = True,
) -> Iterator[list[int | None]]:  # fmt: skip
    """Continue a batch of prompts; yield each row's new token, or None where it has none.

    All rows move one column at a time from the end of the shortest prompt, longer prompts keeping their own tokens, so
    positions agree and one cache serves all. A row ends with the token `eod` (which is yielded), after max_new tokens, or
    when it fills seq_length.
    """
    assert prompts and all(0 < len(p) <= seq_length for p in prompts)
    device = model.wte.weight.device
    ends = [min(seq_length, len(p) + max_new) for p in prompts]
    tokens = torch.full((len(prompts), max(ends)), eod, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    done = [end <= len(p) for p, end in zip(prompts, ends, strict=True)]
    caches = {i: Cache(len(prompts), max(ends)) for i in range(model.layers)} if use_cache else {}
    fed, column = 0, min(map(len, prompts))
    while not all(done):
        where = Where(positions=torch.arange(fed, column, device=device), caches=caches)
        with torch.inference_mode():
            logits = model(tokens[:, fed:column], where, last_only=True)[:, 0, : model.vocab]
        fed = column if use_cache else 0
        new: list[int | None] = [None] * len(prompts)
        for row, prompt in enumerate(prompts):
            if column < len(prompt) or done[row]:
                continue
            token = new[row] = choose(row, logits[row])
            done[row] = token == eod or column + 1 == ends[row]
        known = [p[column] if column < len(p) else t for p, t in zip(prompts, new, strict=True)]
        tokens[:, column] = torch.tensor([eod if t is None else t for t in known])
        column += 1
        yield new


def complete(
    model: GPT, prompts: list[list[int]], max_new: int, seq_length: int, eod: int,
    choose: Callable[[int, Tensor], int], use_cache: bool = True,
) -> list[tuple[list[int], bool]]:  # fmt: skip
    """`decode` to its end: each row's new tokens without the last `eod`, and whether that came."""
    rows: list[list[int]] = [[] for _ in prompts]
    for new in decode(model, prompts, max_new, seq_length, eod, choose, use_cache):
        for row, token in zip(rows, new, strict=True):
            if token is not None:
                row.append(token)
    return [(row[:-1], True) if row and row[-1] == eod else (row, False) for row in rows]
