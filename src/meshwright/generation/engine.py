"""A trained model from its folder, and decoding with a key/value cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright import tokenizers
from meshwright.checkpoint import loading, native
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.saved_model import SavedModel, describe, open_saved
from meshwright.checkpoint.sources import Named, Source
from meshwright.checkpoint.steps import NATIVE
from meshwright.errors import BAD_DATA, UserError
from meshwright.model.attention import Cache, Where
from meshwright.model.gpt import GPT
from meshwright.model.pick import pick
from meshwright.settings import checks, flags
from meshwright.settings.schema import Model, TrainConfig
from meshwright.settings.schema import Tokenizer as TokenizerFlags
from meshwright.tokenizers import Tokenizer

# What `decode` and `complete` take after the model.
Options = tuple[list[list[int]], int, int, int, Callable[[int, Tensor], int], bool]


@dataclass(frozen=True)
class Found:
    """A checkpoint's model, checked against the flags and ready to be built."""

    saved: SavedModel
    model: Model
    vocab: int
    padded: int
    positions: int
    tokenizer: Tokenizer

    @property
    def source(self) -> Source:
        """The step, without the rows that only pad its tables."""
        return self.saved.source


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
    """Check the newest complete step under `folder`, or the step that it names, against the flags `given`."""
    return check_fit(open_saved(folder, options=open_options(given), given=given), given, vocabulary)


def open_options(given: Mapping[str, Any]) -> OpenOptions:
    return OpenOptions(
        given.get("verify", "read"), given.get("trust_pickle", False), given.get("num_attention_heads"), optimizer=False
    )


def check_fit(saved: SavedModel, given: Mapping[str, Any], vocabulary: TokenizerFlags) -> Found:
    """Refuse flags and a vocabulary that do not fit the checkpoint, and a model that this version cannot run."""
    source, where = saved.source, saved.source.folder
    positions = saved.require_positions()
    # A model of a later version must not load as another one.
    later = checks.not_yet(TrainConfig(model=saved.model))
    if later:
        raise UserError("\n  ".join([f"{where} holds a model that this version cannot run:", *later]), BAD_DATA)
    impl = given.get("attention_impl", saved.model.attention_impl)
    model = dataclasses.replace(saved.model, max_position_embeddings=positions, attention_impl=impl)
    saved = dataclasses.replace(saved, model=model)
    tokenizer = find_tokenizer(vocabulary, saved)
    vocab = saved.vocab_size or tokenizer.size
    wrong = saved.contradictions(given)
    if (given.get("seq_length") or 0) > positions:
        wrong.append(f"--seq-length {given['seq_length']}, the checkpoint has {positions} positions")
    if wrong:
        listed = "\n  ".join([f"these flags contradict {where} (leave them out, it knows them):", *wrong])
        raise UserError(listed, BAD_DATA)
    if tokenizer.size > saved.rows or (source.kind == NATIVE and tokenizer.size != vocab):
        more = ", one of them --tokenizer-type NullTokenizer's end of documents" * (
            tokenizer.name == tokenizers.Null.name
        )
        raise UserError(
            f"the vocabulary has {tokenizer.size} ids{more}, the checkpoint {vocab}: {where} was trained with another one",
            BAD_DATA,
        )
    saved = dataclasses.replace(saved, source=source.of_vocabulary(vocab))
    padded = tokenizers.padded_size(vocab, model.make_vocab_size_divisible_by, 1, model.pad_vocab_size_to)
    return Found(saved, model, vocab, padded, positions, tokenizer)


def find_tokenizer(t: TokenizerFlags, saved: SavedModel) -> Tokenizer:
    """Return the tokenizer of the flags if they name files, else the run's own."""
    tokenizer = tokenizers.resolve(t, saved.tokenizer_folder)
    if tokenizer is None:
        raise tokenizers.missing_error(saved.root, saved.vocab_size or saved.rows)
    if saved.tokenizer_folder is not None:
        tokenizers.require_same(tokenizer, saved.tokenizer_folder)
    return tokenizer


def load(
    folder: str, given: Mapping[str, Any], vocabulary: TokenizerFlags, dtype: torch.dtype, device: torch.device
) -> Run:
    """The model of `find`, its weights read into `dtype` on `device`; of an older step where the newest is damaged."""
    looked: list[tuple[Found, GPT]] = []

    def accept(source: Source) -> Source:
        found = check_fit(describe(source, given), given, vocabulary)
        with torch.device("meta"):
            block, _ = pick(found.model, device)
            model = GPT(found.model, found.vocab, found.padded, found.positions, block)
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
    length = given.get("seq_length") or found.saved.seq_length or found.positions
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
