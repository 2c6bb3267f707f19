"""A trained model from a checkpoint folder, with its tokenizer."""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, get_type_hints, overload

import torch
from torch import Tensor

from meshwright.base.errors import BAD_DATA, UserError, bad_data, not_a_run
from meshwright.base.hints import did_you_mean, our_word
from meshwright.base.python310 import Unpack
from meshwright.base.records import lone_surrogate
from meshwright.checkpoint import loading, native
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.saved_model import SavedModel, describe_model
from meshwright.checkpoint.sources import Source, TensorBoxes
from meshwright.checkpoint.steps import NATIVE
from meshwright.config import check_layout, check_values
from meshwright.config.flags import convert_value
from meshwright.config.problem import Problem, SettingsError, listed, plain, with_value
from meshwright.config.schema import Data, Model, Parallel, Sampling, TokenizerFlags, TrainConfig
from meshwright.data import tokenizers
from meshwright.data.tokenizers import Tokenizer
from meshwright.generation import decoder
from meshwright.generation.requests import Request
from meshwright.generation.sharded import ShardedModel
from meshwright.model import counts
from meshwright.model.cache import Cache
from meshwright.model.gpt import GPT
from meshwright.model.positions import Positions
from meshwright.parallel.layout import Layout
from meshwright.parallel.parallel_model import ParallelModel, build_parallel_model
from meshwright.parallel.shard import Sharding
from meshwright.parallel.window_losses import Scorer, plain_scorer
from meshwright.runtime.ranks.team import ALONE, Team

ONE_RANK = Layout()
TextOrIds = str | Sequence[int] | Tensor


class Filters(TypedDict, total=False):
    """Flags of sampling that `generate` passes on."""

    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float


class TextOptions(Filters, total=False):
    """Options of `generate`."""

    max_new_tokens: int
    temperature: float
    greedy: bool
    seed: int
    stop: str | Sequence[str]
    batch_size: int


@dataclass(frozen=True)
class LanguageModel:
    """A trained model with its tokenizer.

    `logits` and `generate` may be called in several threads; one call waits for the other.

    Fields:
        model: the network, a torch.nn.Module in evaluation mode.
        tokenizer: `encode(text) -> ids`, `decode(ids) -> text`, `eod`, `size`.
        step: the training step of the checkpoint.
        seq_length: the longest sequence, prompt and continuation together, in tokens.
        tokenizer_folder: the folder that kept the run's tokenizer, perhaps with a chat template.
    """

    model: GPT
    tokenizer: Tokenizer
    step: int
    seq_length: int
    # of a model that is cut over several ranks, whose `model` is one part
    sharded: ShardedModel | None = None
    tokenizer_folder: Path | None = None
    # by slots
    decoders: dict[int, decoder.Decoder] = field(default_factory=dict, repr=False, compare=False)
    # of the cache and graphs
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in this or another process needs; it makes its own cache and lock."""
        state = dict(vars(self))
        del state["decoders"], state["lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, decoders={}, lock=threading.RLock())

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self, tokens: Tensor, where: Positions, last_only: bool = False) -> Tensor:
        """Map tokens [B, T] to logits as GPT.forward does, in the model's layout."""
        run = self.model if self.sharded is None else self.sharded.forward
        logits: Tensor = run(tokens, where, last_only=last_only)
        return logits

    def rearrange(self, cache: Cache, rows: Tensor, used: int) -> None:
        """Call `Cache.rearrange` in the model's layout."""
        if self.sharded is None:
            cache.rearrange(rows, used)
        else:
            self.sharded.rearrange(cache, rows, used)

    @property
    def scorer(self) -> Scorer:
        """What scores windows of text, in the model's layout."""
        return plain_scorer(self.model) if self.sharded is None else self.sharded.score

    def encode(self, text: TextOrIds) -> list[int]:
        """Return token ids; ids are checked against the vocabulary and returned as they are."""
        if isinstance(text, str):
            if half := lone_surrogate(text):
                raise UserError(f"the text has {half}, half a character; leave it out")
            return list(self.tokenizer.encode(text))
        if isinstance(text, bytes | bytearray):  # whose items are numbers too
            raise UserError(f"{str(text)[:60]} is bytes; give text, as by .decode()")
        try:
            ids = [operator.index(i) for i in text]
        except TypeError as error:
            raise UserError(
                f"{str(text)[:60]} is neither a text nor a list of token ids ({error})"
            ) from None
        for i in ids:
            if not 0 <= i < self.model.vocab:
                raise UserError(
                    f"token id {i} is outside of the vocabulary, 0 ... {self.model.vocab - 1}"
                )
        return ids

    @torch.inference_mode()
    def logits(self, text: TextOrIds) -> Tensor:
        """Return the logits [T, V] of the token that follows each of the T tokens of `text`.

        The sequence is used as given: no end-of-document token is put in front of it.
        """
        ids = self.encode(text)
        if not 0 < len(ids) <= self.seq_length:
            raise UserError(
                f"the text has {len(ids)} tokens; the model reads 1 to {self.seq_length}"
            )
        with self.lock:
            out = self.forward(torch.tensor([ids], device=self.device), Positions())
        return out[0, :, : self.model.vocab]

    @overload
    def generate(self, prompt: TextOrIds = "", **options: Unpack[TextOptions]) -> str: ...
    @overload
    def generate(
        self, prompt: list[str] | list[list[int]], **options: Unpack[TextOptions]
    ) -> list[str]: ...
    def generate(
        self,
        prompt: TextOrIds | list[str] | list[list[int]] = "",
        *,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        greedy: bool = False,
        seed: int = 1234,
        stop: str | Sequence[str] = (),
        batch_size: int = 8,
        **filters: Unpack[Filters],
    ) -> str | list[str]:
        """Return the continuation of a prompt, without the prompt; a list of them for a list.

        It ends before a `stop` string, at an end-of-document token, after `max_new_tokens`, or at
        `seq_length` tokens. The same seed gives the same text; prompts of a list draw different
        numbers, and `batch_size` of them advance at once. `top_k`, `top_p` and `min_p` of 0 are
        off, and `repetition_penalty` of 1.
        """
        if unknown := filters.keys() - Filters.__annotations__.keys():
            raise TypeError(f"generate() {'; '.join(map(_no_option, sorted(unknown)))}")
        numbers: dict[str, Any] = dict(filters, max_new_tokens=max_new_tokens, greedy=greedy)
        numbers |= {"temperature": temperature, "seed": seed, "batch_size": batch_size}
        numbers = _as_typed(numbers)
        seed, batch_size = numbers.pop("seed"), numbers.pop("batch_size")
        options = Sampling(out_seq_length=numbers.pop("max_new_tokens"), **numbers)
        if batch_size < 1:
            raise UserError(f"batch_size {batch_size} must be above 0")
        ends = (stop,) if isinstance(stop, str) else stop
        if not isinstance(ends, list | tuple) or not all(isinstance(s, str) for s in ends):
            raise UserError(f"stop {ends!r} is neither a string nor a list of strings")
        is_list = isinstance(prompt, list | tuple) and all(
            isinstance(p, str | list | tuple) for p in prompt
        )
        prompts: Any = prompt if is_list else [prompt]
        requests = [
            Request(self.encode(p), options, seed, n, tuple(ends)) for n, p in enumerate(prompts)
        ]
        for number, request in enumerate(requests):
            if len(request.prompt) >= self.seq_length:
                has = f"{'prompt ' + str(number) if is_list else 'the prompt'} has {len(request.prompt)} tokens"
                raise UserError(f"{has}; the model reads {self.seq_length}, shorten it")
        with self.lock:
            texts = [text.text for text in decoder.complete(self, requests, batch_size)]
        return texts if is_list else texts[0]

    def decoder(self, slots: int, length: int) -> decoder.Decoder:
        """Return an idle decoder for texts of `length` tokens; the last one is kept."""
        length = min(length, self.seq_length)
        latest = self.decoders.get(slots)
        if latest is None or latest.length < length or latest.waiting or latest.active:
            self.decoders.clear()  # frees its cache
            latest = self.decoders[slots] = decoder.Decoder(self, slots, length)
        return latest


def _as_typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `generate` as the types that they have; refuse a value of another type."""
    kinds = get_type_hints(TextOptions)
    out = {}
    for name, value in options.items():
        if value is None:
            raise UserError(f"{name} is None; leave it out for its default")
        try:
            out[name] = convert_value(kinds[name], value)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
    return out


def _no_option(name: str) -> str:
    known = ["prompt", *TextOptions.__annotations__]
    ours = our_word("generate", name, known)
    return f"has no {name}" + (f"; here it is {ours}" if ours else did_you_mean(name, known))


# Loading


@dataclass(frozen=True)
class CheckedModel:
    """A checkpoint's model, checked against the flags and ready to be built."""

    saved: SavedModel  # its source is without the rows that only pad tables
    model: Model
    vocab: int
    padded: int
    positions: int
    tokenizer: Tokenizer
    layers: list[int]  # of each pipeline stage

    @property
    def source(self) -> Source:
        return self.saved.source


def open_checked(folder: str, given: Mapping[str, Any], vocabulary: TokenizerFlags) -> CheckedModel:
    """Check the flags against the step that `folder` names, else its newest complete one."""
    source = loading.require_checkpoint(folder, open_options(given))
    return check_model(describe_model(source, given), given, vocabulary)


def open_options(given: Mapping[str, Any]) -> OpenOptions:
    return OpenOptions(
        given.get("verify", "read"),
        given.get("trust_pickle", False),
        given.get("num_attention_heads"),
        optimizer=False,
        weights=given.get("weights", "plain"),
        average_last=given.get("average_last", 0),
    )


def check_model(
    saved: SavedModel,
    given: Mapping[str, Any],
    vocabulary: TokenizerFlags,
    layout: Layout = ONE_RANK,
) -> CheckedModel:
    """Refuse later versions' models, and flags, a vocabulary or a layout that do not fit."""
    source = saved.source
    where = saved.source.folder
    positions = saved.require_positions()
    if later := check_values.planned_values(TrainConfig(model=saved.model)):
        heading = f"{plain(where)} holds a model that this version cannot run:"
        raise SettingsError(listed(later, heading), BAD_DATA)

    # How attention is computed is no part of the model: the flag may differ from the training's.
    impl = given.get("attention_impl", saved.model.attention_impl)
    model = dataclasses.replace(saved.model, max_position_embeddings=positions, attention_impl=impl)
    saved = dataclasses.replace(saved, model=model)
    tokenizer = find_tokenizer(vocabulary, saved)
    vocab = saved.vocab_size or tokenizer.size

    # The flags.
    wrong = saved.contradictions(given)
    if (given.get("seq_length") or 0) > positions:
        text = f"{with_value('seq_length', given['seq_length'])}, the checkpoint has {positions} positions"
        wrong.append(Problem(("seq_length",), text))
    if wrong:
        heading = (
            f"these settings contradict {plain(where)}; leave them out, the checkpoint has them:"
        )
        raise SettingsError(listed(wrong, heading), BAD_DATA)

    # The vocabulary. Other programs' checkpoints may have more rows than their tokenizer has ids.
    if tokenizer.size > saved.rows or (source.kind == NATIVE and tokenizer.size != vocab):
        size = f"{tokenizer.size} ids"
        if tokenizer.name == tokenizers.Null.name:
            size += ", including --tokenizer-type NullTokenizer's end-of-document id"
        message = f"the vocabulary has {size}, the checkpoint {vocab}; {where} was trained with another vocabulary"
        raise bad_data(message)
    saved = dataclasses.replace(saved, source=source.of_vocabulary(vocab))

    # The layout, by the checks of a training. Generation has no dropout for them to object to.
    p = Parallel(
        layout.tp,
        layout.pp,
        layout.cp,
        pipeline_layout=given.get("pipeline_layout"),
        world_size=layout.world,
    )
    config = TrainConfig(
        model=dataclasses.replace(model, attention_dropout=0.0),
        parallel=p,
        data=Data(seq_length=positions),
    )
    if wrong := check_layout.parallel_problems(config):
        raise SettingsError(listed(wrong, f"{plain(where)} cannot be divided so:"))
    padded = counts.padded_size(
        vocab, model.make_vocab_size_divisible_by, layout.tp, model.pad_vocab_size_to
    )
    return CheckedModel(saved, model, vocab, padded, positions, tokenizer, config.stages)


def find_tokenizer(t: TokenizerFlags, saved: SavedModel) -> Tokenizer:
    """Return the tokenizer of the flags if they name files, else the run's own."""
    tokenizer = tokenizers.resolve_tokenizer(t, saved.tokenizer_folder)
    if tokenizer is None:
        raise tokenizers.missing_error(saved.root, saved.vocab_size or saved.rows)
    if saved.tokenizer_folder is not None:
        tokenizers.require_same(tokenizer, saved.tokenizer_folder)
    return tokenizer


def load_model(
    folder: str,
    given: Mapping[str, Any],
    vocabulary: TokenizerFlags,
    dtype: torch.dtype,
    device: torch.device,
    *,
    layout: Layout = ONE_RANK,
    team: Team = ALONE,
) -> LanguageModel:
    """Build a checkpoint's model and read its weights as `dtype`; skip a damaged newest step.

    All ranks of the layout call this together, and each reads its own part.
    """
    # Of each step that was tried: if the newest is damaged, the one before may be another model.
    opened: list[tuple[CheckedModel, ParallelModel]] = []

    def accept(source: Source) -> Source:
        checked = check_model(describe_model(source, given), given, vocabulary, layout)
        sizes = checked.vocab, checked.padded, checked.positions
        model = build_parallel_model(checked.model, sizes, checked.layers, layout, dtype, device)
        opened.append((checked, model))
        return checked.source

    def want(source: Source) -> TensorBoxes:
        checked, model = opened[-1]
        sharding = Sharding(layout, checked.vocab)
        boxes: dict[str, Any] = {}
        for name, p in model.parts[0].named_parameters():
            full, offset, shape = sharding.saved_part(name, p.shape)
            # Rows that only pad a table are not saved; a rank may have nothing but them.
            p[shape[0] :] = 0
            box = (tuple(offset), tuple(shape))
            wanted = [box] if shape[0] else []
            boxes[name] = native.BoxedTensor(tuple(full), wanted, p[: shape[0]])
        return boxes

    options = open_options(given)
    loaded = loading.load_checkpoint(folder, want, options=options, accept=accept, team=team)
    if loaded is None:
        raise not_a_run(folder, "checkpoint")
    checked, model = opened[-1]
    model.open_pipeline()
    length = given.get("seq_length") or checked.saved.seq_length or checked.positions
    return LanguageModel(
        model.parts[0],
        checked.tokenizer,
        checked.source.step,
        seq_length=min(length, checked.positions),
        sharded=ShardedModel(model, checked.padded, team) if team.size > 1 else None,
        tokenizer_folder=checked.saved.tokenizer_folder,
    )
