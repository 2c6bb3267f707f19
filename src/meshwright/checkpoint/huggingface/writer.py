"""Write a Hugging Face folder that `AutoModelForCausalLM` and `AutoTokenizer` load unchanged.

The settings decide the network: GPT-2 for learned positions; for rotary ones GPT-NeoX with
LayerNorm, else Llama, or Mistral, Ministral, Qwen 2 or 3 for options that Llama lacks. Settings
that theirs cannot express are refused in one list.

The safetensors files are written by hand, the header and then one tensor after the other, since the
library needs all of a file's tensors in memory. Here one is, plus a strip of it if transposed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.base.errors import BAD_DATA, LOCKED, USAGE, UserError, bad_data
from meshwright.base.files import naming_file, sync, write_all
from meshwright.base.storage.copies import read_note
from meshwright.checkpoint import exports
from meshwright.checkpoint.boxes import Shape
from meshwright.checkpoint.huggingface import names
from meshwright.checkpoint.manifests import sha256
from meshwright.checkpoint.native import NAMES, PART, SIZES, TORCH, safetensors_header
from meshwright.checkpoint.publish import write_durably
from meshwright.checkpoint.saved_model import SavedModel, describe_model
from meshwright.checkpoint.sources import Source, flat_zeros
from meshwright.config.schema import Model
from meshwright.data.tokenizers import CHAT_TEMPLATE, GPT2BPE, Tokenizer, save_tokenizer
from meshwright.data.vocabularies import (
    CHAT_CONFIG,
    Llama2,
    SentencePiece,
    WordPiece,
    read_bytes,
    read_chat_config,
)

MAX_SHARD = 5_000_000_000  # bytes, the limit that transformers has used for years
MARK = "meshwright.json"  # in a run's export: which run, and the files as written
Boxes = list[tuple[Shape, Shape]]
Spans = list[tuple[int, int]]
Ids = dict[str, int | None]


class ExportedTensor(NamedTuple):
    """A tensor of theirs as consecutive boxes of one of ours."""

    name: str
    ours: str
    boxes: Boxes
    read: Shape  # of the joined boxes
    dtype: str  # safetensors' name
    transposed: bool

    @property
    def shape(self) -> Shape:
        return self.read[::-1] if self.transposed else self.read

    @property
    def bytes(self) -> int:
        return math.prod(self.read) * SIZES[self.dtype]


def write_huggingface(
    source: Source,
    folder: Path,
    tokenizer: Tokenizer | None = None,
    run: Path | None = None,
    again: bool = False,
) -> list[str]:
    """Write the complete folder or nothing; return notes for the user.

    `again` may replace an earlier export of the `run`.
    """
    saved = describe_model(source)
    m = exports.without_idle_window(saved.model, saved.require_positions())
    saved = dataclasses.replace(saved, model=m)
    kind = require_expressible(m, source.folder, BAD_DATA)
    folder = folder.resolve()  # a link stays, its target is filled
    refuse_occupied(folder, run if again else None)
    parts = list(WRITERS[family(kind)](ExportPlan(source, m)))
    notes: list[str] = []

    # The folder is written under another name beside its place, so that it appears at once.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as own:
        temporary = Path(own) / folder.name  # with the permissions that any new folder has
        temporary.mkdir()
        ids = write_tokenizer(temporary, saved, tokenizer, notes)
        config = describe_config(kind, saved, parts[0]) | ids
        write_json(temporary / "config.json", config)
        write_json(temporary / "generation_config.json", {"_from_model_config": True} | ids)
        write_tensors(temporary, source, parts)
        if run is not None:
            write_json(temporary / MARK, {"run": name_of(run), "files": files_of(temporary)})
        sync(temporary)
        # An empty folder is replaced by the rename itself; an earlier export goes with `own`.
        if folder.exists() and any(folder.iterdir()):
            folder.rename(Path(own) / "before")
        temporary.rename(folder)
        sync(folder.parent)
    return notes


def require_expressible(m: Model, where: Path, status: int = USAGE) -> str:
    """Return the kind of network that expresses the model, or refuse with every obstacle."""
    kind = choose_architecture(m)
    if obstacles := exports.obstacles(m, family(kind)):
        raise UserError(
            "\n  ".join([f"{where}: {ARCHITECTURES[kind]} cannot express", *obstacles]), status
        )
    return kind


def export_notices(m: Model) -> list[str]:
    """Return a line, before a training, if its model will have no form in Hugging Face's format."""
    kind = choose_architecture(m)
    obstacles = exports.obstacles(m, family(kind))
    advice = "; --swiglu has one" if m.position == "rope" and not m.gated else ""
    if not obstacles:
        return []
    line = f"the model cannot be exported to Hugging Face's format: {ARCHITECTURES[kind]} cannot express "
    return [line + ", ".join(obstacles) + advice]


def refuse_occupied(folder: Path, run: Path | None) -> None:
    """Refuse to write over anything but an unchanged export of the same run."""
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if is_empty or not folder.exists():
        return
    mark = read_note(folder / MARK)
    if run is None or mark.get("run") != name_of(run):
        what = "is not empty" if folder.is_dir() else "is not a folder"
        raise UserError(
            f"{folder} {what}, and nothing is overwritten; give another folder, or remove it",
            LOCKED,
        )
    if mark.get("files") != files_of(folder):
        raise UserError(
            f"{folder} was changed since this run wrote it; give another folder", LOCKED
        )


def name_of(run: Path) -> str:
    """Return a hash of the run's path, since the folder may be given to others."""
    return sha256([str(run.resolve()).encode(errors="surrogateescape")])


def files_of(folder: Path) -> dict[str, list[int]]:
    """Return sizes and times, which reveal a change."""
    states = {path.name: path.lstat() for path in folder.iterdir() if path.name != MARK}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in states.items()}


# Architectures


def choose_architecture(m: Model) -> str:
    """Return the kind of network that comes closest to the model."""
    if m.position != "rope":
        return "gpt2"
    if m.normalization == "LayerNorm":
        return "gpt_neox"
    if m.qk_layernorm:
        return "qwen3"
    if m.add_qkv_bias and not m.add_bias_linear:
        return "qwen2"
    if m.windowed_layers:
        return "mistral" if len(m.windowed_layers) == m.num_layers else "ministral"
    return "llama"


def family(kind: str) -> str:
    """Return the column of the table of exports that describes a kind of network."""
    return {"gpt2": "gpt2", "gpt_neox": "neox"}.get(kind, "llama")


def describe_config(kind: str, saved: SavedModel, wte: ExportedTensor) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": wte.shape[0],
    }
    config |= {"torch_dtype": TORCH[wte.dtype]} | exports.settings_of(saved, family(kind))
    if "rope_theta" in config:  # transformers 4 reads rope_theta and rope_scaling, 5 this
        rotation = {"rope_theta": config["rope_theta"], "rope_type": "default"}
        config["rope_parameters"] = rotation | (config["rope_scaling"] or {})
    return config | exports.sliding_window(saved.model, kind)


# Tensors


class ExportPlan(NamedTuple):
    """Makes the parts of the tensors to write."""

    source: Source
    m: Model

    def part(
        self, name: str, ours: str, spans: Spans | None = None, transposed: bool = False
    ) -> ExportedTensor:
        """Return rows of one of our tensors; all of them without `spans`."""
        info = self.source.tensors[ours]
        rows, *inner = info.shape
        boxes: Boxes = []
        count = 0
        for begin, end in spans or [(0, rows)]:
            boxes.append(((begin, *(0 for _ in inner)), (end - begin, *inner)))
            count += end - begin
        shape_read = (count, *inner)
        is_turned = transposed and len(shape_read) == 2  # a bias is not
        return ExportedTensor(name, ours, boxes, shape_read, NAMES[info.dtype], is_turned)

    def copies(self, stored: dict[str, str], transposed: bool = False) -> Iterator[ExportedTensor]:
        """Yield the weights and biases that exist."""
        for ours, theirs in stored.items():
            for end in (".weight", ".bias"):
                if ours + end in self.source.tensors:
                    yield self.part(theirs + end, ours + end, transposed=transposed)

    def qkv(self) -> list[Spans]:
        """Return the rows of all queries, keys and values."""
        d = self.m.head_dim
        queries = (self.m.num_attention_heads or 1) // self.m.groups
        spans: list[Spans] = [[], [], []]
        at = 0
        # Ours are by group: its queries, its key, its value.
        for _ in range(self.m.groups):
            for rows, count in zip(spans, (queries * d, d, d), strict=True):
                rows.append((at, at + count))
                at += count
        return spans


def export_gpt2(plan: ExportPlan) -> Iterator[ExportedTensor]:
    q, k, v = plan.qkv()
    yield from plan.copies(
        {ours: f"transformer.{theirs}" for ours, theirs in names.GPT2_OUTSIDE.items()}
    )
    for i in range(plan.m.num_layers or 0):
        ours = f"h.{i}"
        theirs = f"transformer.h.{i}"
        linear = dict(names.GPT2_LINEAR)
        qkv = linear.pop("attn.qkv")
        for end in (".weight", ".bias"):
            yield plan.part(
                f"{theirs}.{qkv}{end}", f"{ours}.attn.qkv{end}", q + k + v, transposed=True
            )
        yield from plan.copies(
            {f"{ours}.{a}": f"{theirs}.{b}" for a, b in linear.items()}, transposed=True
        )
        yield from plan.copies(
            {f"{ours}.{a}": f"{theirs}.{b}" for a, b in names.GPT2_NORMS.items()}
        )
    yield from plan.copies({"lm_head": names.HEAD})


def export_llama(plan: ExportPlan) -> Iterator[ExportedTensor]:
    spans = plan.qkv()
    yield from plan.copies(
        {ours: f"model.{theirs}" for ours, theirs in names.LLAMA_OUTSIDE.items()}
    )
    stored = names.LLAMA_NORMS | names.LLAMA_LINEAR
    for i in range(plan.m.num_layers or 0):
        ours = f"h.{i}"
        theirs = f"model.layers.{i}"
        # Where we have one tensor, attn.qkv or a gated mlp.fc, Llama has several.
        for end in (".weight", ".bias"):
            qkv = f"{ours}.attn.qkv{end}"
            if qkv in plan.source.tensors:
                for name, rows in zip(names.LLAMA_QKV, spans, strict=True):
                    yield plan.part(f"{theirs}.{name}{end}", qkv, rows)
            gates = f"{ours}.mlp.fc{end}"
            if gates in plan.source.tensors:
                for half, name in enumerate(names.LLAMA_GATES):
                    part = plan.part(f"{theirs}.{name}{end}", gates, [(half, half + 1)])
                    yield part._replace(read=part.read[1:])  # without the dimension of the halves
        yield from plan.copies({f"{ours}.{a}": f"{theirs}.{b}" for a, b in stored.items()})
    yield from plan.copies({"lm_head": names.HEAD})


def export_neox(plan: ExportPlan) -> Iterator[ExportedTensor]:
    yield from plan.copies(
        {ours: f"gpt_neox.{theirs}" for ours, theirs in names.NEOX_OUTSIDE.items()}
    )
    for i in range(plan.m.num_layers or 0):
        yield from plan.copies(
            {f"h.{i}.{a}": f"gpt_neox.layers.{i}.{b}" for a, b in names.NEOX_LAYER.items()}
        )
    yield from plan.copies({"lm_head": names.NEOX_HEAD})


WRITERS = {"gpt2": export_gpt2, "llama": export_llama, "neox": export_neox}
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM"}
ARCHITECTURES |= {
    name.lower(): f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3")
}


# Files


def write_tensors(folder: Path, source: Source, parts: list[ExportedTensor]) -> None:
    shards: list[list[ExportedTensor]] = [[]]
    size = 0
    for part in parts:
        if shards[-1] and size + part.bytes > MAX_SHARD:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.bytes
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", source, parts)
        return
    where = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, source, shard)
        where.update(dict.fromkeys((part.name for part in shard), name))
    total = sum(part.bytes for part in parts)
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": where},
    )


def write_safetensors(path: Path, source: Source, parts: list[ExportedTensor]) -> None:
    # The widest first, so that every element is aligned.
    parts = sorted(parts, key=lambda part: -SIZES[part.dtype])
    head = safetensors_header((part.name, part.dtype, part.shape) for part in parts)
    with naming_file(path), path.open("xb", buffering=0) as file:
        write_all(file.fileno(), memoryview(head))
        for part in parts:
            for strip in strips(source, part):
                write_all(file.fileno(), strip)
        os.fsync(file.fileno())


def strips(source: Source, part: ExportedTensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in their order; a transposed one in strips, for speed copied twice."""
    import torch

    dtype = getattr(torch, TORCH[part.dtype])
    tensor = flat_zeros(math.prod(part.read), dtype).view(part.read)
    source.fill({part.ours: (source.tensors[part.ours].shape, part.boxes, tensor)})
    if not part.transposed:
        yield tensor.view(-1).view(torch.uint8).numpy().data
        return
    # A strip has as many columns as fill a part, but at least one.
    count = max(1, PART // (tensor.shape[0] * tensor.element_size()))
    for columns in torch.split(tensor, count, dim=1):
        # Transposed straight from the whole, each element would miss the processor's caches.
        strip = columns.contiguous().t().contiguous()
        yield strip.view(-1).view(torch.uint8).numpy().data


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_durably(path, json.dumps(value, indent=2, sort_keys=True).encode() + b"\n")


def write_tokenizer(
    folder: Path, saved: SavedModel, tokenizer: Tokenizer | None, notes: list[str]
) -> Ids:
    """Write what `AutoTokenizer` reads; return the ids at the begin and end of a text.

    Without a tokenizer both are None: the library's default would end a text at an ordinary id.
    """
    if tokenizer is None:
        notes.append("no tokenizer is written: the source has none, and no flag names one")
        return {"bos_token_id": None, "eos_token_id": None}
    if tokenizer.size > saved.rows:
        what = (
            f"the tokenizer has {tokenizer.size:,} ids, {saved.source.folder} {saved.rows:,} rows"
        )
        raise bad_data(f"{what}; give the model's own tokenizer")
    begin = tokenizer.bos if isinstance(tokenizer, Llama2) else tokenizer.eod
    ids: Ids = {"bos_token_id": begin, "eos_token_id": tokenizer.eod}
    library = tokenizer.as_library()

    # What only Meshwright reads, and all there is where the library has no equivalent.
    if isinstance(tokenizer, SentencePiece | WordPiece) or (library is None and tokenizer.files):
        # Not beside config.json, where AutoTokenizer would take the files for another tokenizer's.
        save_tokenizer(tokenizer, folder / "tokenizer")
    if library is None:
        kept = f"{' and '.join(tokenizer.files)} in its tokenizer/ are for Meshwright"
        cure = (
            f"AutoTokenizer needs a folder with the vocabulary of the model's own program; {kept}"
        )
        what = f"no tokenizer.json with the same ids can be made of this {tokenizer.name}"
        none = f"no tokenizer is written: Hugging Face has no equivalent of {tokenizer.name}"
        notes.append(f"{what}: {cure}" if tokenizer.files else none)
        return ids

    # What AutoTokenizer reads.
    write_durably(folder / "tokenizer.json", library.to_str(pretty=True).encode())
    for name, path in tokenizer.files.items() if isinstance(tokenizer, GPT2BPE) else ():
        write_durably(folder / name, read_bytes(path))
    word = library.id_to_token(tokenizer.eod)
    words = {
        "bos_token": library.id_to_token(begin),
        "eos_token": word,
        "unk_token": word if isinstance(tokenizer, GPT2BPE) else None,
    }
    fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    fixed["model_max_length"] = saved.require_positions()
    fixed |= write_chat_template(folder, tokenizer)
    write_json(
        folder / CHAT_CONFIG, {name: w for name, w in words.items() if w is not None} | fixed
    )
    return ids


def write_chat_template(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Copy the chat template beside the tokenizer's files; return its settings, if it has some."""
    settings: dict[str, Any] = {}
    for beside in {path.parent for path in tokenizer.files.values()}:
        if (path := beside / CHAT_TEMPLATE).is_file():
            write_durably(folder / CHAT_TEMPLATE, read_bytes(path))
        config = read_chat_config(beside)
        if not path.is_file() and not config.get("chat_template"):
            continue
        # Its answers may end with a token of their own.
        for name in ("chat_template", "eos_token"):
            if name in config:
                settings[name] = config[name]
    return settings
