"""Dataclasses to command-line flags: one field, one flag, one line of help.

argparse does the splitting; this file adds what it lacks and users of Megatron need: exact names with other spellings,
retired flags answered with the new one, "did you mean", values from a preset, a file and the environment, the source
of each value, and every mistake of a command line listed at once.

Precedence: defaults < --preset < --config FILE < MESHWRIGHT_* < command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import os
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from meshwright import config as settings
from meshwright.errors import BAD_DATA, UserError

C = TypeVar("C")

RETIRED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--data-parallel-size": "the number of started processes",
}

# Flags of another world: accepted with the number of values they take, told once a run, and why they do nothing here.
NO_EFFECT: dict[str, tuple[int, str]] = {
    "--DDP-impl": (1, "gradients live in one flat buffer, whatever the choice"),
    "--use-flash-attn": (0, "torch's attention picks the fastest kernel by itself"),
    "--no-masked-softmax-fusion": (0, "no fused softmax kernel is compiled"),
    "--no-bias-dropout-fusion": (0, "no fusion changes the result here"),
    "--no-scale-tril-softmax-dropout-fusion": (0, "no fusion changes the result here"),
    "--multihead-attention-fusion": (0, "queries, keys and values are one matrix always"),
    "--no-query-key-layer-scaling": (0, "attention scores are float32, so no scaling is needed"),
    "--apply-query-key-layer-scaling": (0, "attention scores are float32, so no scaling is needed"),
    "--attention-softmax-in-fp32": (0, "the softmax is float32 always"),
    "--accumulate-allreduce-grads-in-fp32": (0, "gradients are accumulated in float32 always"),
    "--no-gradient-accumulation-fusion": (0, "gradients are accumulated in float32 in place always"),
    "--no-async-tensor-model-parallel-allreduce": (0, "there is no tensor parallelism yet"),
    "--no-contiguous-buffers-in-local-ddp": (0, "gradients live in one flat buffer always"),
    "--no-persist-layer-norm": (0, "torch's layer norm is used always"),
    "--no-scatter-gather-tensors-in-pipeline": (0, "there is no pipeline yet"),
    "--use-cpu-initialization": (0, "weights are drawn on the CPU always, so that no layout changes them"),
    "--lazy-mpu-init": (1, "nothing is initialised by an outer program"),
    "--empty-unused-memory-level": (1, "torch's allocator keeps its cache"),
    "--transformer-impl": (1, "there is one implementation, picked for the device"),
    "--no-data-sharding": (0, "samples are read in one order, whatever the ranks"),
    "--use-rdma": (0, "NCCL finds InfiniBand by itself"),
    "--no-initialization": (0, "weights are always initialised"),
    "--no-barrier-with-level-1-timing": (0, "timers need no barrier on one device"),
    "--distribute-saved-activations": (0, "there is no tensor parallelism yet"),
}

# Flags of the same programs that belong to other models than GPT: refused, by what they are for.
OTHER_MODELS = {
    "BERT": ("bert", "mask-prob", "short-seq-prob", "classes-fraction", "data-per-class-fraction", "onnx-safe"),
    "retrieval models": ("biencoder", "ict", "retriever", "indexer", "evidence-data", "titles-data", "block-data",
                         "embedding-path", "query-in-block", "use-one-sent-docs", "retro", "head-lr-mult"),
    "vision models": ("dino", "swin", "vision", "img-", "patch-dim", "num-channels", "num-classes", "mask-type",
                      "mask-factor", "iter-per-epoch", "sample-rate"),
    "encoder-decoder models": ("decoder-", "encoder-num-layers", "vocab-extra-ids", "pipeline-model-parallel-split"),
    "FP8 through Transformer Engine": ("fp8-",),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[C]):
    """A resolved configuration, where each value came from, and the control flags."""

    config: C
    sources: dict[str, str]
    given: dict[str, Any]  # what file, environment and command line said, without defaults and preset
    notices: list[str]
    dry_run: bool
    print_config: bool


class _Parser(argparse.ArgumentParser):
    """argparse without abbreviations, usage dumps and its own exit."""

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)


def fields(cls: type) -> dict[str, tuple[str, dataclasses.Field[Any], Any]]:
    """field name -> (group name, field, type) of a configuration class made of groups."""
    out = {}
    for group_name, group in groups(cls).items():
        hints = typing.get_type_hints(group)
        for f in dataclasses.fields(group):
            out[f.name] = (group_name, f, hints[f.name])
    return out


@functools.cache
def groups(cls: type) -> dict[str, type]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def parse(
    cls: type[C], argv: list[str], prog: str, positional: str | None = None, check: bool = True, about: str = ""
) -> Parsed[C]:
    """Resolve a command line; `positional` names the field that one bare argument sets."""
    parser = _parser(cls, prog, positional, about)
    for word in argv:
        name = word.split("=")[0]
        if name in RETIRED:
            raise UserError(f"{name} is no longer valid; use {RETIRED[name]}")
    given_by_flag, unknown = parser.parse_known_args(argv)
    cli = {k: v for k, v in vars(given_by_flag).items() if v is not None}
    control = {k: cli.pop(k, None) for k in ("preset", "config_file", "dry_run", "print_config")}
    notices = [
        f"{name} is accepted and has no effect: {why}"
        for name, (_, why) in NO_EFFECT.items()
        if cli.pop("no_effect_" + name, None) is not None
    ]
    complaints = [_unknown(word, parser) for word in unknown if word.startswith("-") and word != "-"]
    if unknown and not complaints:
        complaints.append(f"unexpected argument {unknown[0]!r}")

    layers: list[tuple[str, dict[str, Any]]] = []
    if control["preset"]:
        known = fields(cls)
        preset = {k: v for k, v in settings.PRESETS[control["preset"]].items() if k in known}
        layers.append((f"preset {control['preset']}", preset))
    if control["config_file"]:
        layers.append((control["config_file"], read_file(cls, Path(control["config_file"]))))
    layers.append(("environment", _environment(cls)))
    layers.append(("command line", cli))
    built, sources = build(cls, layers)
    given = {k: v for label, layer in layers[1 if control["preset"] else 0 :] for k, v in layer.items()}
    if check:
        complaints += built.problems()  # type: ignore[attr-defined]
    if complaints:
        raise UserError("\n  ".join(["", *complaints]) if len(complaints) > 1 else complaints[0])
    return Parsed(built, sources, given, notices, bool(control["dry_run"]), bool(control["print_config"]))


def build(cls: type[C], layers: list[tuple[str, dict[str, Any]]]) -> tuple[C, dict[str, str]]:
    """Lay the layers over the defaults; return the configuration and each value's source."""
    known = fields(cls)
    values: dict[str, dict[str, Any]] = {g: {} for g in groups(cls)}
    sources = dict.fromkeys(known, "default")
    for label, layer in layers:
        for name, value in layer.items():
            values[known[name][0]][name] = value
            sources[name] = label
    return cls(**{g: kind(**values[g]) for g, kind in groups(cls).items()}), sources


def _parser(cls: type, prog: str, positional: str | None, about: str) -> _Parser:
    parser = _Parser(prog=prog, allow_abbrev=False, description=about, argument_default=argparse.SUPPRESS)
    if positional:
        parser.add_argument(positional, nargs="?", metavar="DIR", help="folder of a run, the same as --load DIR")
    control = parser.add_argument_group("Where settings come from")
    control.add_argument("--preset", choices=sorted(settings.PRESETS), help="architecture and recipe of a known model")
    control.add_argument("--config", dest="config_file", metavar="FILE", help="TOML or YAML file of these names")
    control.add_argument(
        "--print-config", action="store_true", help="print the resolved file with the source of each value"
    )
    control.add_argument("--dry-run", action="store_true", help="check everything, build nothing, write nothing")
    known = fields(cls)
    for group_name, group in groups(cls).items():
        section = parser.add_argument_group(group_name.capitalize(), (group.__doc__ or "").splitlines()[0])
        for f in dataclasses.fields(group):
            _add(section, f, known[f.name][2])
    for name, (count, _) in NO_EFFECT.items():
        action: dict[str, Any] = {"nargs": count} if count else {"action": "store_true"}
        parser.add_argument(name, dest="no_effect_" + name, help=argparse.SUPPRESS, **action)
    return parser


def _add(section: Any, f: dataclasses.Field[Any], kind: Any) -> None:
    """The argparse entries of one field."""
    default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc]
    text = f.metadata["help"] + (f" (default: {default})" if default not in (None, [], False) else "")
    if f.metadata["only"] is not None and f.metadata["step"]:
        text += " [not yet]" if default in f.metadata["only"] and len(f.metadata["only"]) == 1 else ""
    text = text.replace("%", "%%")
    name, aliases = settings.spelling(f.name), f.metadata["aliases"]
    if kind is bool:
        off = [a for a in aliases if a.startswith(("--disable", "--no-"))]
        on = [name, *(a for a in aliases if a not in off)]
        if not f.name.startswith("no_"):
            off.append("--no-" + name[2:])
        shown = {True: text if default is False else argparse.SUPPRESS, False: text if default else argparse.SUPPRESS}
        section.add_argument(*on, dest=f.name, action="store_const", const=True, help=shown[True])
        if off:
            section.add_argument(*off, dest=f.name, action="store_const", const=False, help=shown[False])
        return
    options: dict[str, Any] = {"dest": f.name, "help": text, "type": functools.partial(convert, kind)}
    options["type"].__name__ = _type_name(kind)  # argparse names it in its message
    if typing.get_origin(kind) is list:
        options.update(nargs="*", type=typing.get_args(kind)[0])
    options["metavar"] = _metavar(kind)
    section.add_argument(name, *aliases, **options)


def _inner(kind: Any) -> Any:
    """int of `int | None`, and so on."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(kind) if a is not type(None))
    return kind


def _choices(kind: Any) -> tuple[Any, ...]:
    inner = _inner(kind)
    return typing.get_args(inner) if typing.get_origin(inner) is typing.Literal else ()


def _type_name(kind: Any) -> str:
    return "choice" if _choices(kind) else getattr(_inner(kind), "__name__", str(kind))


def _metavar(kind: Any) -> str:
    if _choices(kind):
        return "{" + ",".join(map(str, _choices(kind))) + "}"
    return {"int": "N", "float": "X", "str": "TEXT", "list": "X"}.get(_type_name(kind), "X")


def convert(kind: Any, value: Any) -> Any:
    """A value from a flag, a file or the environment as the field's type; ValueError in words if it is not one."""
    choices, inner = _choices(kind), _inner(kind)
    if value is None or (isinstance(value, str) and value.lower() == "none" and inner is not kind):
        return None
    if choices:
        if value in choices:
            return value
        raise argparse.ArgumentTypeError(f"{value!r} is none of {', '.join(map(str, choices))}")
    if inner is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("1", "true", "yes", "0", "false", "no"):
            return str(value).lower() in ("1", "true", "yes")
        raise argparse.ArgumentTypeError(f"{value!r} is not true or false")
    if typing.get_origin(inner) is list:
        item = typing.get_args(inner)[0]
        values = value if isinstance(value, list) else str(value).split()
        return [convert(item, v) for v in values]
    try:
        if inner is int and isinstance(value, float | str) and not str(value).lstrip("+-").isdigit():
            as_float = float(value)  # 1e6 and 2000.0 are whole numbers too
            if as_float != int(as_float):
                raise ValueError
            return int(as_float)
        if isinstance(value, bool | list | dict):
            raise ValueError
        return inner(value)
    except (ValueError, OverflowError):
        wanted = {"int": "a whole number", "float": "a number", "str": "a text"}[inner.__name__]
        raise argparse.ArgumentTypeError(f"{value!r} is not {wanted}") from None


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    name = word.split("=")[0]
    for model, starts in OTHER_MODELS.items():
        if name.startswith(tuple("--" + s for s in starts)):
            return f"{name} is for {model}; Meshwright pre-trains GPT"
    known = list(parser._option_string_actions)
    near = difflib.get_close_matches(name.replace("_", "-"), known, 1, cutoff=0.7)
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "; see --help")


def _convert_all(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    known, out = fields(cls), {}
    spelled = {a.lstrip("-").replace("-", "_"): n for n, (_, f, _) in known.items() for a in f.metadata["aliases"]}
    for key, value in values.items():
        name = key.replace("-", "_")
        name = spelled.get(name, name)
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UserError(f"{where}: unknown setting {key!r}" + (f"; did you mean {near[0]}?" if near else ""))
        try:
            out[name] = convert(known[name][2], value)
        except argparse.ArgumentTypeError as e:
            raise UserError(f"{where}: {key}: {e}") from None
    return out


def read_file(cls: type, path: Path) -> dict[str, Any]:
    """The settings of a TOML or YAML file, flat or in sections named after the groups."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--config {path}: {e.strerror if isinstance(e, OSError) else 'not UTF-8 text'}") from None
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml

            data = yaml.safe_load(text) or {}
        else:
            data = tomllib.loads(text)
    except Exception as e:
        raise UserError(f"--config {path}: {e}") from None
    if not isinstance(data, dict):
        raise UserError(f"--config {path}: not a table of settings")
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(value if isinstance(value, dict) and key in groups(cls) else {key: value})
    return _convert_all(cls, flat, f"--config {path}")


def _environment(cls: type) -> dict[str, Any]:
    prefix = "MESHWRIGHT_"
    found = {k[len(prefix) :].lower(): v for k, v in os.environ.items() if k.startswith(prefix)}
    # A shell may hold settings for several commands: only a name that no command knows is a mistake.
    every = (settings.TrainConfig, settings.GenerateConfig, settings.PreprocessConfig)
    elsewhere = {n for other in every for n in fields(other)} - set(fields(cls))
    return _convert_all(cls, {k: v for k, v in found.items() if k not in elsewhere}, "environment MESHWRIGHT_*")


def to_dict(config: Any) -> dict[str, Any]:
    """Flat name -> value, as saved with a checkpoint."""
    return {n: v for f in dataclasses.fields(config) for n, v in dataclasses.asdict(getattr(config, f.name)).items()}


def to_toml(config: Any, sources: Mapping[str, str] | None = None) -> str:
    """The configuration as a file that --config reads back; a value's source in a comment if sources are given.

    tomllib only reads; JSON's texts, numbers and lists are TOML's too, so writing takes these few lines.
    """
    lines = []
    for g in dataclasses.fields(config):
        lines.append(f"[{g.name}]")
        group = getattr(config, g.name)
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            line = f"# {f.name} = none" if value is None else f"{f.name} = {json.dumps(value)}"
            lines.append(f"{line}  # {sources[f.name]}" if sources else line)
        lines.append("")
    return "\n".join(lines)


def from_saved(cls: type[C], saved: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a checkpoint that this class has, converted; names it does not have are left out."""
    known = fields(cls)
    try:
        return _convert_all(cls, {k: v for k, v in saved.items() if k in known}, where)
    except UserError as e:
        raise UserError(str(e), BAD_DATA) from None


def tell(parsed: Parsed[Any], say: Callable[[str], None] | None = None) -> None:
    """Print what has no effect, once."""
    for notice in parsed.notices:
        (say or functools.partial(print, file=sys.stderr))(f"note: {notice}")
