"""`meshwright convert SRC DST --to native|torch|huggingface`: a checkpoint of any program as another one's.

One tensor after the other, so that a model of any size is converted in little memory. What the source does not say of its
network, the usual flags do (`--num-attention-heads 16 --true-vocab-size 50257` for the 345M release of 2019).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from meshwright import tokenizers
from meshwright.checkpoint import loading, native, publish, steps
from meshwright.checkpoint.boxes import Box
from meshwright.checkpoint.formats import huggingface_writer
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.manifests import Damaged
from meshwright.checkpoint.publish import Produce
from meshwright.checkpoint.saved_model import SavedModel, describe
from meshwright.checkpoint.sources import Known, Named, Source
from meshwright.checkpoint.steps import HUGGING_FACE
from meshwright.console import notice, say
from meshwright.errors import BAD_DATA, DONE, LOCKED, UserError
from meshwright.progress import progress_bar
from meshwright.settings import checks, flags
from meshwright.settings.schema import ARCHITECTURE, Checkpoint, Data, Model, Tokenizer, flag, spelling

if TYPE_CHECKING:
    import torch

ABOUT = "Write a checkpoint of any program as another one's: convert SRC DST --to native|torch|huggingface."


NEEDED = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class Conversion:
    """What becomes what."""

    paths: list[str] = flag([], "SRC DST: a checkpoint or a folder of them, and the folder that is written")
    to: Literal["native", "torch", "huggingface"] | None = flag(
        None, "our format, Megatron-LM's tree of torch files, or a folder for transformers"
    )
    target_tensor_parallel_size: int = flag(1, "of --to torch: tensor-parallel ranks", bound="above 0")
    target_pipeline_parallel_size: int = flag(1, "of --to torch: pipeline stages", bound="above 0")
    dtype: Literal["float32", "float16", "bfloat16"] | None = flag(None, "of the weights (none: as they are)")
    no_optimizer: bool = flag(False, "leave optimizer state out")


@dataclass(frozen=True)
class ConvertConfig:
    """Everything a conversion is made of."""

    conversion: Conversion = Conversion()
    model: Model = Model()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()

    USES: ClassVar[frozenset[str]] = frozenset(
        {f.name for group in (Conversion, Model, Tokenizer) for f in dataclasses.fields(group)}
        | {"seq_length", "verify", "trust_pickle"}
    )


@dataclass
class Chosen(Source):
    """Those tensors of another source that are wanted, in the type that is wanted, and told when they are read."""

    inner: Source | None = None
    optimizer: bool = True
    dtype: str | None = None
    tell: Callable[[int], None] = field(default=lambda count: None)

    @classmethod
    def of(cls, inner: Source, **choice: Any) -> Chosen:
        return cls(**{f.name: getattr(inner, f.name) for f in dataclasses.fields(Source)}, inner=inner, **choice)

    @property
    def tensors(self) -> Mapping[str, Known]:
        assert self.inner
        return {
            name: Known(known.shape, self.dtype or known.dtype if "/" not in name else known.dtype)
            for name, known in self.inner.tensors.items()
            if self.optimizer or "/" not in name
        }

    @property
    def bytes(self) -> int:
        return sum(math.prod(known.shape) * native.SIZES[native.NAMES[known.dtype]] for known in self.tensors.values())

    def fill(self, want: Named) -> None:
        assert self.inner
        self.inner.fill(want)
        self.tell(native.bytes_of(want))

    def parts(self, name: str) -> Iterable[tuple[str, Box]]:
        assert self.inner
        return self.inner.parts(name)

    def of_vocabulary(self, size: int) -> Chosen:
        assert self.inner
        return dataclasses.replace(self, vocab=size, inner=self.inner.of_vocabulary(size))


def main(argv: list[str]) -> int:
    parsed = flags.parse(ConvertConfig, argv, "meshwright convert", positional="paths", check=False, about=ABOUT)
    if parsed.print_config:
        print(flags.to_toml(parsed.config, parsed.sources))
        return DONE
    flags.tell(parsed)
    c = parsed.config
    if wrong := checks.unusable(c) + checks.not_yet(c):
        raise UserError(flags.listed(wrong))
    if len(c.conversion.paths) != 2 or c.conversion.to is None:
        raise UserError("two folders and --to are needed: meshwright convert SRC DST --to native|torch|huggingface")
    targets = (c.conversion.target_tensor_parallel_size, c.conversion.target_pipeline_parallel_size)
    if c.conversion.to != "torch" and targets != (1, 1):
        raise UserError(
            f"--to {c.conversion.to} has no ranks: --target-... sizes are for --to torch; any layout loads it"
        )
    given = {name: v for name, v in flags.to_dict(c).items() if parsed.sources[name] != "default"}
    src, dst = map(Path, c.conversion.paths)
    source = loading.open_any(
        src, OpenOptions(c.checkpoint.verify, c.checkpoint.trust_pickle, c.model.num_attention_heads)
    )
    if source is None:
        raise UserError(f"no checkpoint in {src}", BAD_DATA)
    for note in source.notes:
        notice(note)
    source, tokenizer = complete(source, given, c.tokenizer)
    if parsed.dry_run:
        print(f"{source.folder} ({source.kind}) would become {dst} ({c.conversion.to}); nothing was written")
        return DONE
    began = time.perf_counter()
    try:
        tensors, size = convert(source, dst, c, tokenizer)
    except Damaged as damage:
        raise Damaged(f"{damage}{older(src, source)}") from damage
    took = time.perf_counter() - began
    say(
        f"{source.folder} ({source.kind}) -> {dst} ({c.conversion.to}): {tensors:,} tensors, {size:,} bytes in {took:.1f} s, "
        f"{size / max(took, 1e-9) / 1e6:,.0f} MB/s"
    )
    return DONE


def older(src: Path, source: Source) -> str:
    """What could be converted instead: not without being asked to, for it is another training's length."""
    place = None
    if source.folder.resolve() != src.resolve():
        with contextlib.suppress(UserError):
            place, _ = steps.find(src, below=source.step)
    return f"; {place.folder} is older and looks whole: give that path" if place else ""


# What is known of the source


def complete(source: Source, given: Mapping[str, Any], t: Tokenizer) -> tuple[Source, tokenizers.Tokenizer | None]:
    """The source with all that the flags add, its true vocabulary, and its tokenizer if there is one."""
    where = str(source.folder)
    asked = {name: given[name] for name in ARCHITECTURE if name in given}
    saved = describe(source, given)
    wrong = saved.contradictions(given)
    tokenizer = find_tokenizer(saved, t)
    rows = saved.rows
    size = (tokenizer.size if tokenizer and tokenizer.name == tokenizers.Null.name else t.vocab_size) or source.vocab
    if size is None and tokenizer is not None:
        size = tokenizer.size
    most, padded = (
        source.vocab or rows,
        source.vocab is None or source.kind == HUGGING_FACE,
    )  # theirs counts padding as ids
    if size is not None and (size > most or (size < most and not padded)):
        wrong.append(f"a vocabulary of {size:,} ids, the checkpoint has {most:,}{'' if source.vocab else ' rows'}")
    if wrong:
        raise UserError(
            "\n  ".join([f"these flags contradict {where} (what it says itself need not be said):", *wrong]), BAD_DATA
        )
    if size is None:
        raise UserError(
            f"{where} has {rows:,} rows for tokens and does not say how many are padding: give --true-vocab-size (GPT-2: "
            f"50257; {rows} if there is none), or the files of its vocabulary"
        )
    if source.vocab and size < source.vocab:
        notice(
            f"{source.vocab - size:,} of {source.vocab:,} rows for tokens are cut off, the vocabulary has {size:,} ids"
        )
    source = source.of_vocabulary(size)
    source.config = asked | source.config
    if saved.positions is not None:
        source.config.setdefault("max_position_embeddings", saved.positions)
    if missing := [spelling(name) for name in NEEDED if not source.config.get(name)]:
        raise UserError(f"{where} does not say everything of its network: give {', '.join(missing)}")
    return source, tokenizer


def find_tokenizer(saved: SavedModel, t: Tokenizer) -> tokenizers.Tokenizer | None:
    """By the flags, or that of the run, or the one in a folder of Hugging Face."""
    if t.vocab_file or t.merge_file or t.tokenizer_model:
        return tokenizers.build(t)
    kept = saved.tokenizer_folder
    if kept is None:
        return tokenizers.build(t) if t.tokenizer_type in ("ByteTokenizer", "NullTokenizer") else None
    try:
        return tokenizers.build(dataclasses.replace(t, vocab_size=None), kept)
    except UserError as error:
        if kept != saved.root:
            raise
        notice(f"its tokenizer is left out: {error}")
        return None


# Writing


def convert(source: Source, dst: Path, c: ConvertConfig, tokenizer: tokenizers.Tokenizer | None) -> tuple[int, int]:
    """Write it; the tensors and bytes that were."""
    to = c.conversion.to
    optimizer = to != "huggingface" and not c.conversion.no_optimizer and source.has_optimizer
    if to == "native" and optimizer and c.conversion.dtype not in (None, "float32"):
        raise UserError(
            f"--dtype {c.conversion.dtype} would round the weights that a run goes on from: add --no-optimizer"
        )
    # Megatron has weights in half precision beside the masters.
    half = to == "torch" and optimizer and c.conversion.dtype != "float32"
    chosen = Chosen.of(source, optimizer=optimizer, dtype=None if half else c.conversion.dtype)
    total = chosen.bytes
    with progress_bar("", total) as chosen.tell:
        if to == "huggingface":
            for note in huggingface_writer.write(chosen, dst, tokenizer=tokenizer):
                notice(note)
        else:
            write_step(chosen, dst, c, tokenizer)
    return len(chosen.tensors), total


def write_step(source: Chosen, dst: Path, c: ConvertConfig, tokenizer: tokenizers.Tokenizer | None) -> None:
    """A step of ours, in our format or in Megatron's tree, by the protocol of every save."""
    if dst.exists() and not dst.is_dir():
        raise UserError(f"{dst} is there and no folder: give another one", LOCKED)
    held = [
        path.name for path in dst.glob("*") if path.name != ".lock" and path.suffix != ".tmp"
    ]  # of one that was killed
    if held:
        raise UserError(f"{dst} already holds {min(held)}, and nothing is written over: give another folder", LOCKED)
    files = native_files(source) if c.conversion.to == "native" else megatron_files(source, c)
    # Megatron takes no iteration 0.
    step = source.step or int(c.conversion.to == "torch")
    new = not dst.exists()
    try:
        with publish.lock(dst):
            publish.write_step(dst, step, files, bytes_needed=source.bytes)
            keep(tokenizer, source, dst)
    except BaseException:
        if new:
            shutil.rmtree(dst, ignore_errors=True)
        raise


def keep(tokenizer: tokenizers.Tokenizer | None, source: Source, dst: Path) -> None:
    assert source.vocab
    if tokenizer is not None and tokenizer.size == source.vocab:
        tokenizers.save(tokenizer, dst / "tokenizer")
    elif tokenizer is not None:
        cut = source.kind == HUGGING_FACE and tokenizer.size < source.vocab
        cure = f"; --true-vocab-size {tokenizer.size} cuts the rest off" if cut else ""
        notice(f"no tokenizer is kept: it has {tokenizer.size:,} ids, the table {source.vocab:,} rows{cure}")


def native_files(source: Source) -> dict[str, Produce]:
    """What native.save would write, each tensor read when its bytes are due."""
    import torch

    def fetch(run: native.Run) -> torch.Tensor:
        """Into memory of the system, to which it goes back at once: the allocator would keep what was freed between others."""
        count, size = run.flat.numel(), run.flat.element_size()
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # Python's default would be memory for several processes
        memory = mmap.mmap(-1, max(count, 1) * size, private)
        tensor = torch.frombuffer(memory, dtype=run.flat.dtype)[:count]
        source.fill({run.key: (run.box.size, [(run.box.offset, run.box.size)], tensor)})
        return tensor

    shapes = {
        name: native.full_entry(torch.empty(known.shape, dtype=getattr(torch, known.dtype), device="meta"))
        for name, known in source.tensors.items()
    }
    sizes = {"true_vocab_size": source.vocab, "positions": describe(source).require_positions()}
    config = source.config if source.state else source.config | {"max_position_embeddings": sizes["positions"]}
    return native.files_of(shapes, sizes | source.state, config, fetch)[0]


def megatron_files(source: Chosen, c: ConvertConfig) -> dict[str, Produce]:
    from meshwright.checkpoint.formats import megatron_writer

    if c.conversion.dtype:
        source.config |= {"fp16": c.conversion.dtype == "float16", "bf16": c.conversion.dtype == "bfloat16"}
    t, p = c.conversion.target_tensor_parallel_size, c.conversion.target_pipeline_parallel_size
    assert source.vocab
    padded = tokenizers.padded_size(source.vocab, c.model.make_vocab_size_divisible_by, t, c.model.pad_vocab_size_to)
    return megatron_writer.files(source, t, p, padded, source.has_optimizer)
