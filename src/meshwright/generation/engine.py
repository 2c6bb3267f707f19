"""A trained model from its folder, and decoding with a key/value cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright import tokenizers
from meshwright.checkpoint import loading, native
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.sources import Named, Source
from meshwright.checkpoint.steps import NATIVE
from meshwright.errors import BAD_DATA, UserError
from meshwright.model.attention import Cache, Where
from meshwright.model.gpt import GPT, OURS
from meshwright.model.pick import pick
from meshwright.settings import checks, flags
from meshwright.settings import schema as config
from meshwright.settings.schema import GenerateConfig, Model, TrainConfig
from meshwright.settings.schema import Tokenizer as TokenizerFlags
from meshwright.tokenizers import Tokenizer

# What `decode` and `complete` take after the model.
Options = tuple[list[list[int]], int, int, int, Callable[[int, Tensor], int], bool]


@dataclass(frozen=True)
class Found:
    """What a folder says about its newest whole checkpoint."""

    source: Source
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


def find(folder: str, given: Mapping[str, Any], vocabulary: TokenizerFlags) -> Found:
    """The newest whole step under `folder`, or that step if it names one; `given` are flags, to be compared with it."""
    source = loading.open_any(folder, open_options(given))
    if source is None:
        raise UserError(f"no checkpoint in {folder}", BAD_DATA)
    return look_at(source, given, vocabulary)


def open_options(given: Mapping[str, Any]) -> OpenOptions:
    return OpenOptions(
        given.get("verify", "read"), given.get("trust_pickle", False), given.get("num_attention_heads"), optimizer=False
    )


def look_at(source: Source, given: Mapping[str, Any], vocabulary: TokenizerFlags) -> Found:
    root, state, saved, where = source.root or source.folder, source.state, source.config, str(source.folder)
    if state.get("network", OURS) != OURS:
        raise UserError(f"{where} holds a {state['network']}, which only the program that made it builds", BAD_DATA)
    untold = {n: v for n, v in given.items() if n in config.ARCHITECTURE and n not in saved}
    told = flags.from_saved(TrainConfig, saved | untold, where)
    trained, _ = flags.build(TrainConfig, [("checkpoint", told)])
    try:
        positions = int(state.get("positions") or saved.get("max_position_embeddings") or given["seq_length"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where} does not tell how long its sequences are: give --seq-length", BAD_DATA) from None
    later = checks.not_yet(
        GenerateConfig(model=trained.model)
    )  # a model of a later version must not load as another one
    if later:
        raise UserError("\n  ".join([f"{where} holds a model that this version cannot run:", *later]), BAD_DATA)
    impl = given.get("attention_impl", trained.model.attention_impl)
    model = dataclasses.replace(trained.model, max_position_embeddings=positions, attention_impl=impl)
    trained = dataclasses.replace(trained, model=model)
    rows = source.tensors["wte.weight"].shape[0]
    folders = [root, *([Path(saved["run_dir"])] if saved.get("run_dir") else [])]
    tokenizer = find_tokenizer(vocabulary, folders, source.vocab or rows)
    vocab = source.vocab or tokenizer.size
    if out := contradictions(given, model, positions):
        listed = "\n  ".join([f"these flags contradict {where} (leave them out, it knows them):", *out])
        raise UserError(listed, BAD_DATA)
    if tokenizer.size > rows or (source.kind == NATIVE and tokenizer.size != vocab):
        more = ", one of them --tokenizer-type NullTokenizer's end of documents" * (
            tokenizer.name == tokenizers.Null.name
        )
        raise UserError(
            f"the vocabulary has {tokenizer.size} ids{more}, the checkpoint {vocab}: {where} was trained with another one",
            BAD_DATA,
        )
    source = source.of_vocabulary(vocab)
    padded = tokenizers.padded_size(vocab, model.make_vocab_size_divisible_by, 1, model.pad_vocab_size_to)
    return Found(source, trained, vocab, padded, positions, tokenizer)


def contradictions(given: Mapping[str, Any], saved: Model, positions: int) -> list[str]:
    """Every flag that says something else than the checkpoint; what was left to a default counts as written out."""
    named = {n: given[n] for n in config.ARCHITECTURE if n in given}
    out = checks.contradictions(dataclasses.replace(saved, **named), saved, named)
    if (given.get("seq_length") or 0) > positions:
        out.append(f"--seq-length {given['seq_length']}, the checkpoint has {positions} positions")
    return out


def find_tokenizer(t: TokenizerFlags, folders: list[Path], size: int) -> Tokenizer:
    """The flags' vocabulary if they name files, else the run's own."""
    kept = tokenizers.kept_by(*folders)
    files = t.vocab_file or t.merge_file or t.tokenizer_model
    if kept is None and not files and t.tokenizer_type not in ("ByteTokenizer", "NullTokenizer"):
        raise tokenizers.unnamed(folders[0], size)
    tokenizer = tokenizers.build(t, kept)
    if kept is not None:
        tokenizers.require_same(tokenizer, kept)
    return tokenizer


def load(
    folder: str, given: Mapping[str, Any], vocabulary: TokenizerFlags, dtype: torch.dtype, device: torch.device
) -> Run:
    """The model of `find`, its weights read into `dtype` on `device`; of an older step where the newest is damaged."""
    looked: list[tuple[Found, GPT]] = []

    def accept(source: Source) -> Source:
        found = look_at(source, given, vocabulary)
        with torch.device("meta"):
            block, _ = pick(found.config.model, device)
            model = GPT(found.config.model, found.vocab, found.padded, found.positions, block)
        looked.append((found, model.to(dtype).to_empty(device=device).eval()))
        return found.source

    def want(source: Source) -> Named:
        model, out = looked[-1][1], {}
        for name, p in model.named_parameters():
            p.requires_grad_(False)
            rows = model.vocab if name in ("wte.weight", "lm_head.weight") else p.shape[0]
            p[rows:] = 0
            out[name] = native.full_entry(p[:rows])
        return out

    if loading.load(folder, want, options=open_options(given), accept=accept) is None:
        raise UserError(f"no checkpoint in {folder}", BAD_DATA)
    found, model = looked[-1]
    length = given.get("seq_length") or found.config.data.seq_length or found.positions
    return Run(model, found.tokenizer, found.source.step, min(length, found.positions), device)


def decode(
    model: GPT,
    prompts: list[list[int]],
    max_new: int,
    seq_length: int,
    eod: int,
    choose: Callable[[int, Tensor], int],
    use_cache: bool = True,
) -> Iterator[list[int | None]]:
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
        where = Where(columns=torch.arange(fed, column, device=device), caches=caches)
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
    model: GPT,
    prompts: list[list[int]],
    max_new: int,
    seq_length: int,
    eod: int,
    choose: Callable[[int, Tensor], int],
    use_cache: bool = True,
) -> list[tuple[list[int], bool]]:
    """`decode` to its end: each row's new tokens without the last `eod`, and whether that came."""
    rows: list[list[int]] = [[] for _ in prompts]
    for new in decode(model, prompts, max_new, seq_length, eod, choose, use_cache):
        for row, token in zip(rows, new, strict=True):
            if token is not None:
                row.append(token)
    return [(row[:-1], True) if row and row[-1] == eod else (row, False) for row in rows]
