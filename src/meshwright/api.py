"""The public functions: train, load, generate, evaluate, convert.

They raise UserError for whatever the caller can correct, never exit the interpreter, and leave
signals alone unless asked. Keyword settings have the names and values of docs/flags.md, and errors
name them so.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from meshwright.base import console, registry
from meshwright.base import device as devices
from meshwright.base.errors import UNAVAILABLE, UserError, bad_data
from meshwright.base.records import lone_surrogate
from meshwright.config import check_values, flags
from meshwright.config.problem import KEYWORDS, Wording, in_words, require
from meshwright.config.schema import DESCRIBING, GenerateConfig, TrainConfig

if TYPE_CHECKING:
    from meshwright.apps.evaluate.perplexity import Score
    from meshwright.base.runs.history import History
    from meshwright.checkpoint.sources import Source
    from meshwright.data.datasets import Datasets
    from meshwright.generation.language_model import LanguageModel
    from meshwright.runtime.ranks.world import World
    from meshwright.training.micro_step import Loss
    from meshwright.training.network import Model

DType = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class TrainResult:
    """The result of a training.

    Fields:
        status: 0, or with `handle_signals` 130 (Ctrl-C) or 143 (SIGTERM) if it was stopped.
        folder: the run folder (`run_dir`, else `save`), or None if the run wrote nothing.
        config: the settings that it used.
    """

    status: int
    folder: Path | None
    config: TrainConfig

    @property
    def history(self) -> History:
        """Steps, validations and attempts, read from the run folder."""
        from meshwright.base.runs.history import read_history

        if self.folder is None:
            raise UserError("the run kept no history; give save or run_dir")
        return read_history(self.folder)


def train(
    config: TrainConfig | Sequence[str] | str = (),
    /,
    *,
    model: Model | None = None,
    loss: Loss | None = None,
    datasets: Datasets | None = None,
    handle_signals: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> TrainResult:
    """Train in this process, as `meshwright train` does.

    `config` is a TrainConfig, or flags as a list or one string. Keyword settings win over flags:
    `train(preset="gpt2-117m", data_path=["corpus_text_document"], train_iters=100, save="run")`.
    `model`, `loss` and `datasets` replace the package's own: see docs/extending.md. Under a
    launcher such as torchrun every rank calls this function. With `handle_signals` (main thread
    only), Ctrl-C and SIGTERM finish the step and save. With `quiet` nothing is printed.
    """
    from meshwright.runtime.launch.launcher import launch_flags_of
    from meshwright.runtime.ranks.world import find_world, number_of
    from meshwright.training.before.resolve import Caller
    from meshwright.training.run import run

    if handle_signals and threading.current_thread() is not threading.main_thread():
        raise UserError(
            "handle_signals=True works in the main thread only; leave it out in this one"
        )
    _require_own_parts(model, loss, datasets)
    given: TrainConfig | list[str]
    if isinstance(config, TrainConfig):
        given, local_rank = config, config.parallel.local_rank
    else:  # a script's own words, among which some launchers put this flag
        given = _words(config)
        keyword = f"--local-rank={settings.get('local_rank')}"
        local_rank = number_of([*given, keyword], "--local-rank")
    with console.quiet(quiet):
        world = find_world(os.environ, local_rank)
        config, ignored, words, start = _complete(given, settings, world, datasets is not None)
        if launch_flags_of(config.parallel, world) is not None:
            raise UserError(
                "train() runs in this process; start several ranks with `meshwright launch` or torchrun"
            )
        with in_words(words):
            caller = Caller(model, loss, datasets, handle_signals, start)
            status = run(config, world, caller, ignored=ignored)
    folder = config.checkpoint.run_dir or config.checkpoint.save
    return TrainResult(status, Path(folder) if folder else None, config)


def _words(given: Sequence[str] | str) -> list[str]:
    """Return flags, given as a list or one string, as words; a path may be one too."""
    if isinstance(given, str):
        try:
            return shlex.split(given)
        except ValueError as error:  # a quote without its other one
            raise UserError(
                f"the flags {given[:100]!r} cannot be divided into words: {error}; give a list of words"
            ) from None
    if not isinstance(given, list | tuple):
        kind = type(given).__name__
        raise UserError(
            f"train() was given an object of type {kind}; give flags as one string or a list, or keywords"
        )
    words = []
    for word in given:
        text = os.fspath(word) if isinstance(word, os.PathLike) else word
        if not isinstance(text, str):
            raise UserError(f"{word!r:.60} among the flags is no text; write it in quotes")
        words.append(text)
    return words


def _require_own_parts(model: object, loss: object, datasets: object) -> None:
    """Refuse a model, a loss or data sets of a kind that no run can use."""
    see = "docs/extending.md describes it"
    # A network can be called too, but it is not what builds one.
    is_network = hasattr(model, "named_parameters") and not isinstance(model, type)
    if model is not None and (is_network or not callable(model)):
        kind = type(model).__name__
        raise UserError(f"model is a {kind}; give the function or class that builds one: {see}")
    if loss is not None and not callable(loss):
        kind = type(loss).__name__
        raise UserError(f"loss is a {kind}; give a function: {see}")
    if datasets is not None and not isinstance(datasets, Mapping):
        kind = type(datasets).__name__
        raise UserError(f"datasets is a {kind}; give a mapping such as {{'train': ...}}: {see}")


def _complete(
    config: TrainConfig | list[str], settings: dict[str, Any], world: World, has_data: bool
) -> tuple[TrainConfig, Mapping[str, Any], Wording, Source | None]:
    """Return the checked settings of a training, those without effect, and how errors name them.

    The last element is another program's checkpoint of --load, if it was opened for its settings.
    """
    from meshwright.training.before.resolve import (
        check_settings,
        complete_from_start,
        note_export,
    )

    if isinstance(config, TrainConfig):
        if settings:
            raise UserError(
                f"settings {', '.join(settings)} were given beside a TrainConfig; put them into it"
            )
        with in_words(KEYWORDS):
            return check_settings(config, world, has_data), {}, KEYWORDS, None
    if only_prints := {"-h", "--help", "--print-config", "--dry-run"}.intersection(config):
        raise UserError(
            f"{', '.join(sorted(only_prints))} belongs to the command line, not to train()"
        )
    # The batch is divided by the number of ranks. The caller's own number, which comes later, wins.
    if world.size > 1 and config:
        config = [f"--world-size={world.size}", *config]
    elif world.size > 1:
        settings = {"world_size": world.size} | settings
    parsed = flags.parse_settings(
        TrainConfig, config, "meshwright.train", values=settings, check=not has_data
    )
    with in_words(parsed.words):
        completed, start = complete_from_start(parsed)
        if has_data or completed.checkpoint.load:  # the parsing has not checked all of them
            completed = check_settings(completed, world, has_data)
    note_export(parsed, completed)
    flags.print_notices(parsed)
    return completed, parsed.ignored, parsed.words, start


@in_words(KEYWORDS)
def load(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    dtype: DType = "float32",
    **settings: Any,
) -> LanguageModel:
    """Load the newest complete step of a checkpoint folder, or the step folder that `path` names.

    The folder may be of any program that docs/checkpoints.md lists. `device` is a name such as
    "cpu", "cuda" or "cuda:1" (default: an accelerator if there is one). Keyword settings are those
    of `meshwright generate` that describe a model, for what the folder does not state:
    `vocab_file`, `merge_file`, `tokenizer_model`, `num_attention_heads`, `seq_length`, ...
    """
    import torch

    from meshwright.generation import language_model

    if device is not None:
        settings["device"] = device
    if dtype not in get_args(DType):
        raise UserError(f"dtype {dtype!r} is unknown; give {', '.join(get_args(DType))}")
    values = {**settings, "load": os.fspath(path)}
    parsed = flags.parse_settings(GenerateConfig, [], "meshwright.load", values=values, check=False)
    if ignored := settings.keys() - DESCRIBING - {"device"}:
        raise UserError(
            f"load() does not use {', '.join(sorted(ignored))}; leave it out (precision is dtype=)"
        )
    c = parsed.config
    require(check_values.unusable(c))
    where = devices.open_device(c.parallel.device)
    with console.only_warnings():
        return language_model.load_model(
            os.fspath(path), flags.given_settings(parsed), c.tokenizer, getattr(torch, dtype), where
        )


@overload
def generate(
    model: LanguageModel | str | os.PathLike[str], prompt: str = "", **options: Any
) -> str: ...
@overload
def generate(
    model: LanguageModel | str | os.PathLike[str], prompt: list[str], **options: Any
) -> list[str]: ...
@in_words(KEYWORDS)
def generate(
    model: LanguageModel | str | os.PathLike[str], prompt: str | list[str] = "", **options: Any
) -> str | list[str]:
    """Return the continuation of a prompt, or of each; options are LanguageModel.generate's."""
    return _loaded(model).generate(prompt, **options)


def _loaded(model: LanguageModel | str | os.PathLike[str]) -> LanguageModel:
    """Return a model that is loaded or named by its folder."""
    if isinstance(model, str | os.PathLike):
        return load(model)
    from meshwright.generation.language_model import LanguageModel

    # Models of other libraries have a generate() too.
    if not isinstance(model, LanguageModel):
        kind = type(model).__name__
        raise UserError(f"the model is a {kind}; give what load() returned, or a folder")
    return model


@in_words(KEYWORDS)
def evaluate(
    model: LanguageModel | str | os.PathLike[str],
    texts: Iterable[str],
    *,
    stride: int | None = None,
    batch_size: int = 8,
) -> Score:
    """Score documents: loss per token, perplexity, bits per byte.

    `texts` are the documents. Documents longer than the model's `seq_length` are read in windows
    that advance by `stride` tokens (default: half of `seq_length`); the tokens that consecutive
    windows share are scored once and are context in the later one.
    """
    try:
        from meshwright.apps.evaluate.perplexity import score_texts
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("meshwright.apps"):
            raise
        raise UserError(
            f"evaluate() has nothing to score with: {registry.LACKING}", UNAVAILABLE
        ) from None
    if isinstance(texts, str):
        raise UserError("texts is one string; give a list of documents")
    if not isinstance(texts, Iterable):
        raise UserError(f"texts is of type {type(texts).__name__}; give a list of documents")
    m = _loaded(model)
    documents = list(texts)
    for number, document in enumerate(documents):
        if not isinstance(document, str):
            kind = type(document).__name__
            raise UserError(f"texts[{number}] is of type {kind}; give a list of strings")
        if half := lone_surrogate(document):
            raise UserError(f"texts[{number}] has {half}, half a character; leave it out")
    if not any(documents):
        raise bad_data("there is no text to score")
    advance = m.seq_length // 2 or 1 if stride is None else _whole("stride", stride)
    batch_size = _whole("batch_size", batch_size)
    if not 0 < advance <= m.seq_length or batch_size < 1:
        raise UserError(
            f"stride {advance} must be 1 to {m.seq_length} and batch_size {batch_size} above 0"
        )
    return score_texts(m.scorer, m.tokenizer, documents, m.seq_length, advance, batch_size)


def _whole(name: str, value: int) -> int:
    """Return a number that must be whole, by the rules of settings."""
    try:
        number: int = flags.convert_value(int, value)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    return number
