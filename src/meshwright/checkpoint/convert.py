"""Convert a checkpoint of any program into another format, one tensor at a time to save memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from meshwright.base.console import notice
from meshwright.base.errors import BAD_DATA, LOCKED, UserError
from meshwright.base.hints import find_address, refuse_address
from meshwright.base.progress import progress_bar
from meshwright.checkpoint import formats, loading, native, owner, publish, steps
from meshwright.checkpoint.averages import has_average, is_average
from meshwright.checkpoint.boxes import Box
from meshwright.checkpoint.huggingface import writer as huggingface_writer
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.manifests import DamagedCheckpoint
from meshwright.checkpoint.publish import Produce
from meshwright.checkpoint.saved_model import SavedModel, describe_model
from meshwright.checkpoint.sources import Source, TensorBoxes, TensorInfo, flat_zeros
from meshwright.config import check_values, fields, flags
from meshwright.config.fields import spelling
from meshwright.config.problem import (
    GivenAs,
    Problem,
    SettingsError,
    Wording,
    in_words,
    listed,
    plain,
    require,
)
from meshwright.config.schema import (
    ARCHITECTURE,
    DESCRIBING,
    STATED,
    GenerateConfig,
    TokenizerFlags,
)
from meshwright.data import tokenizers
from meshwright.model import counts

if TYPE_CHECKING:
    import torch

TargetFormat = Literal["native", "torch", "huggingface"]
DType = Literal["float32", "float16", "bfloat16"]
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class ConversionTarget:
    """The folder to write, the format, the type of the weights (None: unchanged), and the ranks."""

    folder: Path
    to: TargetFormat = "native"
    dtype: DType | None = None
    optimizer: bool = True
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def wants_optimizer(self) -> bool:
        return self.optimizer and self.to != "huggingface"

    def __post_init__(self) -> None:
        if self.to not in ("native", "torch", "huggingface"):
            raise UserError(
                f"no format {self.to!r}; give native, torch or huggingface{flags.REFUSED_WORDS.get(self.to, '')}"
            )
        if self.dtype is not None and self.dtype not in get_args(DType):
            raise UserError(f"dtype {self.dtype!r} is unknown; give {', '.join(get_args(DType))}")
        for size in (self.tensor_parallel, self.pipeline_parallel):
            if not isinstance(size, int) or size < 1:
                raise UserError(
                    "the numbers of tensor and of pipeline ranks must be whole and above 0"
                )
        if self.to != "torch" and (self.tensor_parallel, self.pipeline_parallel) != (1, 1):
            why = f"the format {self.to} has no ranks, since any layout loads it"
            raise UserError(f"{why}; leave the target's sizes out, or choose torch")
        if self.to == "torch":
            formats.require_written(self.to)


@dataclass(frozen=True)
class Converted:
    """How much was written, and how long it took."""

    tensors: int
    bytes: int
    seconds: float


# How `convert` names what the command names by a flag of its own.
WORDS = Wording(
    "keywords",
    {
        "no_optimizer": GivenAs("optimizer=False"),
        "target_tensor_parallel_size": GivenAs("tensor_parallel", "="),
        "target_pipeline_parallel_size": GivenAs("pipeline_parallel", "="),
    },
)


@in_words(WORDS)
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: TargetFormat = "native",
    *,
    dtype: DType | None = None,
    optimizer: bool = True,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    **settings: Any,
) -> Converted:
    """Convert a checkpoint, or the newest one in a folder, into the new folder `target`.

    `to` is our own format, Megatron-LM's ("torch", cut for `tensor_parallel` x `pipeline_parallel`
    ranks) or Hugging Face's. Keyword settings (`num_attention_heads`, `vocab_file`, `verify`, ...)
    complete what the source does not say. Raise UserError if the conversion is impossible.
    """
    if idle := settings.keys() - DESCRIBING:
        raise UserError(f"convert() does not use {', '.join(sorted(idle))}; leave it out")
    for path in (source, target):
        if address := find_address(os.fspath(path)):
            raise UserError(refuse_address(address))
    wanted = ConversionTarget(
        Path(target), to, dtype, optimizer, tensor_parallel, pipeline_parallel
    )
    return prepare_conversion(Path(source), wanted, settings).run()


@dataclass(frozen=True)
class PreparedConversion:
    """A conversion that has been checked and not yet run."""

    path: Path
    source: Source
    target: ConversionTarget
    config: GenerateConfig
    tokenizer: tokenizers.Tokenizer | None

    def run(self) -> Converted:
        began = time.perf_counter()
        try:
            tensors, size = write_target(self)
        except DamagedCheckpoint as damage:
            raise DamagedCheckpoint(f"{damage}{suggest_older(self.path, self.source)}") from damage
        return Converted(tensors, size, time.perf_counter() - began)


def prepare_conversion(
    source: str | Path, target: ConversionTarget, settings: Mapping[str, Any]
) -> PreparedConversion:
    """Open the source and check that it, the settings and its tokenizer fit together."""
    if unknown := settings.keys() - fields.config_fields(GenerateConfig).keys():
        raise UserError(f"unknown settings: {', '.join(sorted(unknown))}")
    given = flags.from_saved(GenerateConfig, settings, "settings")
    config, _ = flags.build_config(GenerateConfig, [("settings", given)])
    require(check_values.unusable(config) + check_values.planned_values(config))
    c = config.checkpoint
    heads = config.model.num_attention_heads
    options = OpenOptions(
        c.verify, c.trust_pickle, heads, target.wants_optimizer, c.weights, c.average_last
    )
    opened = loading.require_checkpoint(source, options)
    for note in opened.notes:
        notice(note)
    complete, tokenizer = complete_source(opened, given, config.tokenizer)
    return PreparedConversion(Path(source), complete, target, config, tokenizer)


def suggest_older(path: Path, source: Source) -> str:
    """Suggest an older step; it is not taken unasked, because it was trained for less long."""
    older = None
    if source.folder.resolve() != path.resolve():
        with contextlib.suppress(UserError):
            older, _ = steps.find_step(path, below=source.step)
    return f"; {older.folder} is older and looks intact: give that path" if older else ""


# The source


def complete_source(
    source: Source, given: Mapping[str, Any], t: TokenizerFlags
) -> tuple[Source, tokenizers.Tokenizer | None]:
    """Complete the source by the flags, cut it to its true vocabulary, and find its tokenizer."""
    saved = describe_model(source, given)
    where = source.folder
    tokenizer = find_tokenizer(saved, t)

    # The true size of the vocabulary: as the flags say, then the source, then its tokenizer. The
    # null tokenizer's flag counts one id less than it has.
    own = tokenizer.size if tokenizer else None
    is_null = tokenizer is not None and tokenizer.name == tokenizers.Null.name
    size = (own if is_null else t.vocab_size) or source.vocab or own
    most = source.vocab or saved.rows
    wrong = saved.contradictions(given)
    if size is not None and (size > most or (size < most and not source.counts_padding)):
        text = f"a vocabulary of {size:,} ids, the checkpoint has {most:,}{'' if source.vocab else ' rows'}"
        wrong.append(Problem(("vocab_size",), text))
    if wrong:
        heading = (
            f"these settings contradict {plain(where)} (leave out what the checkpoint says itself):"
        )
        raise SettingsError(listed(wrong, heading), BAD_DATA)
    if size is None:
        raise UserError(
            f"{where} has {saved.rows:,} rows for tokens and does not say how many are padding: give --true-vocab-size "
            f"(GPT-2: 50257; {saved.rows} if there is none), or the files of its vocabulary"
        )
    if (rows := source.vocab) and size < rows:
        notice(
            f"{rows - size:,} of {rows:,} rows for tokens are cut off, the vocabulary has {size:,} ids"
        )
    source = source.of_vocabulary(size)

    # Flags fill in the network where it is silent, and win over how it was trained.
    source.config = {name: given[name] for name in ARCHITECTURE if name in given} | source.config
    source.config |= {name: given[name] for name in STATED if name in given}
    if saved.positions is not None:
        source.config.setdefault("max_position_embeddings", saved.positions)
    if missing := [spelling(name) for name in REQUIRED if not source.config.get(name)]:
        raise UserError(
            f"{where} does not describe its network completely; give {', '.join(missing)}"
        )
    return source, tokenizer


def find_tokenizer(saved: SavedModel, t: TokenizerFlags) -> tokenizers.Tokenizer | None:
    """Return the tokenizer of the flags, or the one kept with the checkpoint, if any."""
    saved_folder = None if tokenizers.is_named(t) else saved.tokenizer_folder
    try:
        # The size in the flags may be that of a table which is wider than a saved vocabulary.
        wanted = dataclasses.replace(t, vocab_size=None) if saved_folder else t
        return tokenizers.resolve_tokenizer(wanted, saved_folder)
    except UserError as error:
        if saved_folder is None or saved_folder != saved.root:
            raise
        notice(f"its tokenizer is left out: {error}")
        return None


@dataclass
class Selection(Source):
    """The tensors of another source, perhaps without optimizer state or in another `dtype`."""

    inner: Source = field(kw_only=True)
    optimizer: bool = True
    dtype: str | None = None  # of the weights
    average: bool = True  # of --ema
    advance: Callable[[int], None] = lambda count: None  # counts the bytes read

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        chosen = {}
        for name, info in self.inner.tensors.items():
            if "/" not in name:
                chosen[name] = TensorInfo(info.shape, self.dtype or info.dtype)
            elif self.average if is_average(name) else self.optimizer:
                chosen[name] = info
        return chosen

    def parts(self, name: str) -> list[tuple[str, Box]]:
        return self.inner.parts(name)

    def of_vocabulary(self, size: int) -> Selection:
        return dataclasses.replace(self, inner=self.inner.of_vocabulary(size), vocab=size)

    @property
    def bytes(self) -> int:
        return sum(
            math.prod(info.shape) * native.SIZES[native.NAMES[info.dtype]]
            for info in self.tensors.values()
        )

    def fill(self, want: TensorBoxes) -> None:
        self.inner.fill(want)
        self.advance(native.bytes_of(want))


def select(
    source: Source, optimizer: bool = True, dtype: str | None = None, average: bool = True
) -> Selection:
    common = {f.name: getattr(source, f.name) for f in dataclasses.fields(Source)}
    return Selection(**common, inner=source, optimizer=optimizer, dtype=dtype, average=average)


# Writing


def write_target(conversion: PreparedConversion) -> tuple[int, int]:
    """Write the target; return the number of tensors and of bytes."""
    source = conversion.source
    target = conversion.target
    optimizer = target.wants_optimizer and source.has_optimizer
    if target.to == "native" and optimizer and target.dtype not in (None, "float32"):
        raise SettingsError(
            f"{{dtype={target.dtype}}} would round the weights that a run goes on from; leave the optimizer's state out "
            "by {no_optimizer}"
        )
    # Megatron keeps weights in half precision beside the masters.
    half = target.to == "torch" and optimizer and target.dtype != "float32"
    average = target.optimizer and target.to == "native"
    if target.optimizer and not average and has_average(source):
        notice(
            "the average of --ema is left out; --weights ema converts it in the place of the weights"
        )
    chosen = select(source, optimizer, None if half else target.dtype, average)
    total = chosen.bytes
    with progress_bar("convert", total) as chosen.advance:
        if target.to == "huggingface":
            for note in huggingface_writer.write_huggingface(
                chosen, target.folder, tokenizer=conversion.tokenizer
            ):
                notice(note)
        else:
            write_step(chosen, conversion)
    return len(chosen.tensors), total


def write_step(source: Selection, conversion: PreparedConversion) -> None:
    """Write a step, in our format or as Megatron's tree, by the protocol of every save."""
    folder = conversion.target.folder
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} exists and is not a folder; give another one", LOCKED)
    # A conversion that was killed leaves a lock and a step that was never finished.
    existing = [
        path.name for path in folder.glob("*") if path.name != ".lock" and path.suffix != ".tmp"
    ]
    if existing:
        what = f"{folder} already holds {min(existing)}, and nothing is overwritten"
        raise UserError(f"{what}; give another folder, or remove this one", LOCKED)
    to = conversion.target.to
    files = native_files(source) if to == "native" else files_for_megatron(source, conversion)
    step = source.step or int(to == "torch")  # Megatron takes no iteration 0
    is_new = not folder.exists()
    try:
        with owner.lock_folder(folder, "give another folder"):
            publish.write_step(folder, step, files, bytes_needed=source.bytes)
            save_tokenizer(conversion.tokenizer, source, folder)
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def save_tokenizer(tokenizer: tokenizers.Tokenizer | None, source: Source, folder: Path) -> None:
    assert source.vocab
    if tokenizer is not None and tokenizer.size == source.vocab:
        tokenizers.save_tokenizer(tokenizer, folder / "tokenizer")
    elif tokenizer is not None:
        can_cut = source.counts_padding and tokenizer.size < source.vocab
        cure = f"; --true-vocab-size {tokenizer.size} cuts the rest off" if can_cut else ""
        notice(
            f"no tokenizer is kept: it has {tokenizer.size:,} ids, the table {source.vocab:,} rows{cure}"
        )


def native_files(source: Source) -> dict[str, Produce]:
    """Return what native.save_step would write, each tensor read when its bytes are due."""
    import torch

    shapes = {}
    for name, info in source.tensors.items():
        empty = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
        shapes[name] = native.undivided(empty)
    positions = describe_model(source).require_positions()
    state = {"true_vocab_size": source.vocab, "positions": positions} | source.state
    config = source.config
    # A state without an iteration is dropped when it is read, and the positions with it.
    if not source.state:
        config = config | {"max_position_embeddings": positions}
    files, _ = native.step_files(shapes, state, config, functools.partial(read_extent, source))
    return files


def read_extent(source: Source, extent: native.BoxToWrite) -> torch.Tensor:
    flat = extent.flat
    box = extent.box
    tensor = flat_zeros(flat.numel(), flat.dtype)
    source.fill({extent.key: (box.size, [(box.offset, box.size)], tensor)})
    return tensor


def files_for_megatron(source: Selection, conversion: PreparedConversion) -> dict[str, Produce]:
    target = conversion.target
    model = conversion.config.model
    if target.dtype:
        source.config |= {"fp16": target.dtype == "float16", "bf16": target.dtype == "bfloat16"}
    t = target.tensor_parallel
    p = target.pipeline_parallel
    assert source.vocab
    padded = counts.padded_size(
        source.vocab, model.make_vocab_size_divisible_by, t, model.pad_vocab_size_to
    )
    write = formats.require_written(target.to).load_writer()
    files: dict[str, Produce] = write(source, t, p, padded, source.has_optimizer)
    return files
