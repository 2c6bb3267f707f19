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
import math
import os
import re
import reprlib
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from meshwright.errors import BAD_DATA, UserError
from meshwright.settings import checks
from meshwright.settings import deepspeed_json as deepspeed
from meshwright.settings import schema as settings
from meshwright.settings.megatron_flags import NO_EFFECT, known_elsewhere
from meshwright.settings.presets import PRESETS

C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[C]):
    """A resolved configuration, where each value came from, and the control flags."""

    config: C
    sources: dict[str, str]
    notices: list[str]
    dry_run: bool
    print_config: bool


class _Parser(argparse.ArgumentParser):
    """argparse without abbreviations, usage dumps and its own exit."""

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)


def _every_group() -> set[str]:
    return {g for cls in settings.EVERY for g in groups(cls)}


def fields(cls: type) -> dict[str, tuple[str, dataclasses.Field[Any], Any]]:
    """field name -> (group name, field, type) of a configuration class made of groups."""
    out = {}
    for group_name, group in groups(cls).items():
        hints = typing.get_type_hints(group)
        for f in dataclasses.fields(group):
            out[f.name] = (group_name, f, hints[f.name])
    return out


def groups(cls: type) -> dict[str, type]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def parse(
    cls: type[C], argv: list[str], prog: str, positional: str | None = None, check: bool = True, about: str = ""
) -> Parsed[C]:
    """Resolve a command line; `positional` names the field that one bare argument sets."""
    parser = _parser(cls, prog, positional, about)
    argv, complaints = _without_switch_values(argv, parser)
    said, unknown = parser.parse_known_args(argv)
    cli = vars(said)
    control = {k: cli.pop(k, None) for k in ("preset", "config_file", "dry_run", "print_config")}
    bare = cli.pop("bare", None)
    if positional and is_list(fields(cls)[positional][2]):
        words = [*(bare or []), *(word for word in unknown if not word.startswith("-"))]  # before and after other flags
        unknown = [word for word in unknown if word.startswith("-")]
        cli.update({positional: [*words, *cli.get(positional, [])]} if words else {})
    elif positional and bare is not None and cli.setdefault(positional, bare) != bare:
        complaints.append(f"{bare} and {settings.spelling(positional)} {cli[positional]} name two folders: give one")
    notices = [
        f"{name} is accepted and has no effect: {why}"
        for name, (_, why) in NO_EFFECT.items()
        if cli.pop("no_effect_" + name, None) is not None
    ]
    complaints += [_unknown(word, parser) for word in unknown if word.startswith("--")]
    if unknown and not complaints:
        complaints.append(f"unexpected argument {unknown[0]!r}")

    layers: list[tuple[str, dict[str, Any]]] = []
    if control["preset"]:
        known = fields(cls)
        preset = {k: v for k, v in PRESETS[control["preset"]].items() if k in known}
        layers.append((f"preset {control['preset']}", preset))
    if control["config_file"]:
        layers.append((control["config_file"], read_file(cls, Path(control["config_file"]), complaints, notices)))
    layers.append(("environment", _environment(cls, complaints, notices)))
    layers.append(("command line", _convert_all(cls, cli, "", complaints, notices)))
    built, sources = build(cls, layers)
    if (check or control["dry_run"]) and isinstance(built, settings.TrainConfig):
        built = _with_deepspeed(built, sources, notices, complaints)
    notices += checks.notices(built)
    used = getattr(cls, "USES", None)
    notices += [
        f"{settings.spelling(name)} has no effect on this command"
        for name, value in layers[-1][1].items()  # a file may be a training's: only what was typed is told
        if used is not None and name not in used and value != default_of(fields(cls)[name][1])
    ]
    later = isinstance(built, settings.TrainConfig) and built.checkpoint.load  # will complete them: checked after that
    if check and not later:  # a value that could not be read is not also called missing
        told = {c.split()[0].rstrip(":") for c in complaints}
        complaints += [p for p in checks.problems(built) if p.split()[0] not in told]
    if complaints:
        raise UserError(listed(complaints))
    return Parsed(built, sources, notices, bool(control["dry_run"]), bool(control["print_config"]))


def _with_deepspeed(config: Any, sources: dict[str, str], notices: list[str], complaints: list[str]) -> Any:
    """The file of --deepspeed_config fills what is still at its default."""
    filled, notes, wrong = deepspeed.merge(config, {n for n, source in sources.items() if source != "default"})
    before, after = to_dict(config), to_dict(filled)
    sources.update({n: str(config.parallel.deepspeed_config) for n in after if after[n] != before[n]})
    notices += notes
    complaints += wrong
    return filled


def listed(complaints: list[str]) -> str:
    return "\n  ".join(["", *complaints]) if len(complaints) > 1 else complaints[0]


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
    known = fields(cls)
    many = positional is not None and is_list(known[positional][2])
    metavar = "DIR" if positional == "load" else positional.rstrip("s").upper() if positional else ""
    bare = f"[{metavar}{' ...' if many else ''}] " if positional else ""
    usage = f"{prog} {bare}[flags]"  # all of them are listed below it
    more = "The other flags of a training are taken too, for documents pass them; one without effect is told."
    parser = _Parser(
        prog,
        usage,
        allow_abbrev=False,
        description=about,
        argument_default=argparse.SUPPRESS,
        epilog=more if hasattr(cls, "USES") else None,
    )
    parser._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")  # -1e-3 is a number too
    if positional:
        what = "folder of a run" if positional == "load" else known[positional][1].metadata["help"]
        parser.add_argument(
            "bare",
            nargs="*" if many else "?",
            metavar=metavar,
            help=f"{what}; the same as {settings.spelling(positional)}",
        )
    control = parser.add_argument_group("Where settings come from")
    control.add_argument("--preset", choices=sorted(PRESETS), help="architecture and recipe of a known model")
    control.add_argument("--config", dest="config_file", metavar="FILE", help="TOML or YAML file of these names")
    control.add_argument(
        "--print-config", action="store_true", help="print the resolved file with the source of each value"
    )
    control.add_argument("--dry-run", action="store_true", help="check everything, build nothing, write nothing")
    used = getattr(cls, "USES", known)
    for group_name, group in groups(cls).items():
        section: Any = parser  # of flags that are taken and not shown
        if any(f.name in used for f in dataclasses.fields(group)):
            title = group_name.capitalize().replace("_", " ")
            section = parser.add_argument_group(title, (group.__doc__ or "").splitlines()[0])
        for f in dataclasses.fields(group):
            _add(section, f, known[f.name][2], shown=f.name in used)
    for name, (count, _) in NO_EFFECT.items():
        if name in parser._option_string_actions:  # this command has a use for it
            continue
        action: dict[str, Any] = {"nargs": count} if count else {"action": "store_true"}
        parser.add_argument(name, dest="no_effect_" + name, help=argparse.SUPPRESS, **action)
    return parser


def _add(section: Any, f: dataclasses.Field[Any], kind: Any, shown: bool) -> None:
    """The argparse entries of one field."""
    default = default_of(f)
    text = f.metadata["help"] + (f" (default: {default})" if default not in (None, [], False) else "")
    text += " [not yet]" if is_not_yet(f) else ""
    text = text.replace("%", "%%")
    name, aliases = settings.spelling(f.name), f.metadata["aliases"]
    if _inner(kind) is bool:
        off = [a for a in aliases if a.startswith(("--disable", "--no-"))]
        on = [name, *(a for a in aliases if a not in off)]
        if not f.name.startswith("no_"):
            off.insert(0, "--no-" + name[2:])
        helps = {
            True: text if shown and default is False else argparse.SUPPRESS,
            False: "switch off: " + text if shown and default else argparse.SUPPRESS,
        }
        section.add_argument(*on, dest=f.name, action="store_const", const=True, help=helps[True])
        if off:
            section.add_argument(*off, dest=f.name, action="store_const", const=False, help=helps[False])
        return
    # Values stay texts here: those of all layers are converted, and complained about, in one place.
    many = {"nargs": "*"} if is_list(kind) else {}
    text = text if shown else argparse.SUPPRESS
    section.add_argument(name, *aliases, dest=f.name, help=text, metavar=_metavar(kind), **many)


def default_of(f: dataclasses.Field[Any]) -> Any:
    return f.default_factory() if callable(f.default_factory) else f.default


def is_not_yet(f: dataclasses.Field[Any]) -> bool:
    """Only its default works before the release in which it is planned."""
    return bool(f.metadata["only"] == (default_of(f),) and f.metadata["step"] > 0)


def _inner(kind: Any) -> Any:
    """int of `int | None`, and so on."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(kind) if a is not type(None))
    return kind


def is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is list


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
    words = [typing.get_args(k) for k in typing.get_args(kind) if typing.get_origin(k) is typing.Literal]
    if words and value in words[0]:  # a word beside numbers, as in `int | Literal["auto"]`
        return value
    choices, inner = _choices(kind), _inner(kind)
    if value is None or (isinstance(value, str) and value.lower() == "none" and inner is not kind):
        return None
    if choices:
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)  # YAML's on is True
        if word in choices:
            return word
        raise argparse.ArgumentTypeError(f"{_short(value)} is none of {', '.join(map(str, choices))}")
    if inner is bool:
        word = str(value).lower() if isinstance(value, bool | int | str) else ""
        if word in ("1", "true", "yes", "0", "false", "no"):
            return word in ("1", "true", "yes")
        raise argparse.ArgumentTypeError(f"{_short(value)} is not true or false")
    if typing.get_origin(inner) is list:
        values = value.split() if isinstance(value, str) else value if isinstance(value, list) else [value]
        return [convert(typing.get_args(inner)[0], v) for v in values]
    try:
        if inner is int and isinstance(value, float | str) and not str(value).lstrip("+-").isdigit():
            as_float = float(value)  # 1e6 and 2000.0 are whole numbers too
            if as_float != int(as_float):
                raise ValueError
            return int(as_float)
        if isinstance(value, bool | list | dict) or (inner is float and not math.isfinite(float(value))):
            raise ValueError
        return inner(value)
    except (ValueError, TypeError, OverflowError):
        wanted = {"int": "a whole number", "float": "a number", "str": "a text"}[inner.__name__]
        raise argparse.ArgumentTypeError(f"{_short(value)} is not {wanted}") from None


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    name = word.split("=")[0]
    near = difflib.get_close_matches(name.replace("_", "-"), list(parser._option_string_actions), 1, cutoff=0.8)
    hint = f"; did you mean {near[0]}?" if near else "; see --help"
    return known_elsewhere(name) or f"unknown flag {name}{hint}"


def _short(value: Any) -> str:
    """For a message: a few lines of YAML can stand for gigabytes."""
    return (repr(value) if isinstance(value, str) else reprlib.repr(value))[:100]


def _without_switch_values(argv: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """A switch takes no value: `--fp16 False`, which some programs read as true, is answered, not guessed at."""
    switches = {name for name, action in parser._option_string_actions.items() if action.nargs == 0}
    kept: list[str] = []
    told = []
    for word in argv:
        name, equals, _ = word.partition("=")
        if equals and name in switches:
            kept.append(name)
            told.append(word)
        elif kept and kept[-1] in switches and word.lower() in ("true", "false"):
            told.append(f"{kept[-1]} {word}")
        else:
            kept.append(word)
    return kept, [f"{t}: this flag takes no value; write it alone, or leave it out" for t in told]


def _convert_all(
    cls: type, values: Mapping[str, Any], where: str, complaints: list[str], notices: list[str]
) -> dict[str, Any]:
    """Names and values of one layer as fields and their types; what is wrong is added to `complaints`."""
    known, out = fields(cls), {}
    idle = {name.lstrip("-").replace("-", "_"): (name, why) for name, (_, why) in NO_EFFECT.items()}
    spelled = {a.lstrip("-").replace("-", "_"): n for n, (_, f, _) in known.items() for a in f.metadata["aliases"]}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        name = name if name in known else spelled.get(name, name)
        if name in idle and name not in known:
            notices.append("{} is accepted and has no effect: {}".format(*idle[name]) + where)
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            elsewhere = known_elsewhere("--" + name.replace("_", "-"))
            complaints.append(
                (elsewhere or f"unknown setting {str(key)[:100]!r}") + where + ("" if elsewhere else hint)
            )
            continue
        try:
            out[name] = value if name == "prompt" and isinstance(value, str) else convert(known[name][2], value)
        except argparse.ArgumentTypeError as e:
            complaints.append(f"{settings.spelling(name)}{where}: {e}")
    return out


def read_file(cls: type, path: Path, complaints: list[str], notices: list[str]) -> dict[str, Any]:
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
    except Exception as e:  # a hostile file can break a reader in many ways, depth of nesting among them
        raise UserError(f"--config {path}: {e}") from None
    if not isinstance(data, dict):
        raise UserError(f"--config {path}: not a table of settings")
    flat: dict[Any, Any] = {}
    for key, value in data.items():
        flat.update(value if isinstance(value, dict) and key in _every_group() else {key: value})
    return _convert_all(cls, _mine(cls, flat), f" in {path}", complaints, notices)


def _mine(cls: type, found: Mapping[Any, Any]) -> dict[Any, Any]:
    """A file or a shell may hold settings for several commands: only a name that no command knows is a mistake."""
    elsewhere = {n for other in settings.EVERY for n in fields(other)} - set(fields(cls))
    return {k: v for k, v in found.items() if str(k).replace("-", "_") not in elsewhere}


def _environment(cls: type, complaints: list[str], notices: list[str]) -> dict[str, Any]:
    prefix = "MESHWRIGHT_"
    found = {k[len(prefix) :].lower(): v for k, v in os.environ.items() if k.startswith(prefix)}
    return _convert_all(cls, _mine(cls, found), " in the environment (MESHWRIGHT_*)", complaints, notices)


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
            line = f"# {f.name} = none" if value is None else f"{f.name} = {_toml(value)}"
            lines.append(f"{line}  # {sources[f.name]}" if sources else line)
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one control character JSON allows


def from_saved(cls: type[C], saved: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a checkpoint that this class has, converted; names it does not have are left out."""
    known, complaints = fields(cls), list[str]()
    out = _convert_all(cls, {k: v for k, v in saved.items() if k in known}, f" in {where}", complaints, [])
    if complaints:
        raise UserError(listed(complaints), BAD_DATA)
    return out


def reference() -> str:
    """docs/flags.md: a table for each group of settings."""
    out = [
        "# Flags",
        "",
        "Made from the dataclasses in `src/meshwright/config.py`; a test compares. Every flag is also a",
        "setting of `--config FILE` (`--seq-length` is `seq_length`) and of the environment (`MESHWRIGHT_SEQ_LENGTH`).",
        "A switch `--x` also has `--no-x`. *Not yet*: only the default works, anything else is refused in words.",
        "",
    ]
    for name, group in {name: group for cls in settings.EVERY for name, group in groups(cls).items()}.items():
        out += [f"## {name.capitalize().replace('_', ' ')}", "", (group.__doc__ or "").splitlines()[0], ""]
        out += ["| flag | other spellings | default | meaning |", "|---|---|---|---|"]
        for f in dataclasses.fields(group):
            aliases, default = " ".join(f"`{a}`" for a in f.metadata["aliases"]), default_of(f)
            shown = "" if default in (None, []) else f"`{json.dumps(default)}`"
            meaning = f.metadata["help"] + (" *(not yet)*" if is_not_yet(f) else "")
            cells = [f"`{settings.spelling(f.name)}`", aliases, shown, meaning.replace("|", "\\|")]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)


def tell(parsed: Parsed[Any], say: Callable[[str], None] | None = None) -> None:
    """Print what has no effect, once."""
    for notice in parsed.notices:
        (say or functools.partial(print, file=sys.stderr))(f"note: {notice}")
