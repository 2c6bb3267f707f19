"""Flags as fields of dataclasses: `flag` takes all that is known of one."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING as MISSING
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from meshwright.base.python310 import Self, Unpack
from meshwright.config.pages import PAGES

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class FlagSpec(TypedDict, total=False):
    """What is known of a flag beside its default, its help and its other spellings."""

    only: tuple[Any, ...] | None  # values that work so far
    bound: Literal[">0", ">=0", "[0,1)", "[0,1]"] | None  # range of a number
    needs: str | tuple[str, ...]  # keys of `notices.CONDITIONS`, without which it has no effect
    # a word without a flag; "rest": all that follow; in flat classes
    positional: Literal[True, "rest"] | None
    word: str  # placeholder of a positional argument, if it is not the field's name
    # What a flag of text holds. Only words may be empty; paths and forms hold no address.
    value: Literal["DIR", "FILE", "PATH", "PREFIX", "FORM", "NAME", "WORDS"] | None
    remote: bool  # a path that may also be an address of object storage, such as s3://bucket/run
    docs: str  # pages of docs/ that explain it
    hidden: bool  # accepted, and not offered by completion
    # A resumed run may not change it, may with --finetune, notes the change, or is free to.
    resume: Literal["refuse", "tune", "note", "free"]
    # An option of the network: the value of networks before it existed, and of other programs'.
    absent: Any
    only_trains: bool  # such an option that decides how weights are trained, not what they compute
    inherited: bool  # a run that loads a checkpoint takes it over, unless a flag is given
    # for one start of a run: typed, never from a file or the environment, nor in its config.toml
    once: bool
    outcome: str  # property that it decides with others or by a default; that is compared on resume
    # drawn by the tests' fuzz, copied by verify-layout's baseline
    proof: Literal["baseline fuzz", "baseline", "fuzz", ""]
    read: Literal["model", "run", ""]  # commands that read a model use it, to describe or to run it


class TextForm:
    """A setting in a small language, such as rollback:3: read once; `str` gives the text back."""

    text: str

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the setting of a text; raise ValueError, which says what is wrong with it."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:  # a list of settings looks as it was given
        return repr(self.text)


PATHS = ("DIR", "FILE", "PATH", "PREFIX")
# Facets that neither a flag nor its group states.
DEFAULTS: dict[str, Any] = dict.fromkeys(FlagSpec.__annotations__)
DEFAULTS |= {"needs": (), "proof": "baseline fuzz"}
DEFAULTS |= {"absent": MISSING, "only_trains": False, "resume": "note"}
DEFAULTS |= {"word": "", "docs": "", "outcome": "", "read": ""}


def flag(
    default: Any, text: str | Callable[[], str], *aliases: str, **spec: Unpack[FlagSpec]
) -> Any:
    """Return a dataclass field that is a flag; the default `MISSING` makes it required.

    A text that depends on installed packages is a function, which `help_of` calls.
    """
    # `own` remembers which facets the flag states itself, so that its group leaves them.
    own: dict[str, Any] = {"help": text, "aliases": aliases, **spec}
    if isinstance(own.get("needs"), str):
        own["needs"] = (own["needs"],)
    metadata = DEFAULTS | own | {"own": frozenset(own)}
    if isinstance(default, list):
        # A dataclass takes no list as a default, which all configurations would share.
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def help_of(f: dataclasses.Field[Any]) -> str:
    """Return the help of a flag."""
    text: str | Callable[[], str] = f.metadata["help"]
    return text if isinstance(text, str) else text()


def group(**spec: Unpack[FlagSpec]) -> Callable[[type[T]], type[T]]:
    """Return a decorator that gives these facets to a class's flags without their own."""

    def decorate(cls: type[T]) -> type[T]:
        # This runs before `dataclass` turns the fields into its class.
        for f in vars(cls).values():
            if isinstance(f, dataclasses.Field):
                stated = {
                    name: value for name, value in spec.items() if name not in f.metadata["own"]
                }
                f.metadata = types.MappingProxyType({**f.metadata, **stated})
        return cls

    return decorate


def spelling(name: str) -> str:
    """Return the flag of a field; three underscores are kept, as in Megatron."""
    if name == "config_file":
        return "--config"
    flag = "--" + name.replace("_", "-")
    # Scripts for Megatron write --override-opt_param-scheduler and --deepspeed_config.
    return flag.replace("opt-param", "opt_param").replace("deepspeed-config", "deepspeed_config")


def is_flat(config: Any) -> bool:
    """Return whether a configuration's own fields are flags, not groups of them."""
    return "help" in dataclasses.fields(config)[0].metadata


def group_values(config: Any) -> list[Any]:
    """Return the groups of settings of a configuration; a flat one is its own only group."""
    if is_flat(config):
        return [config]
    return [getattr(config, f.name) for f in dataclasses.fields(config)]


def every_config() -> list[type]:
    """Return the configurations whose settings a file or the environment may hold."""
    configs = [
        pkgutil.resolve_name(name) for name in dict.fromkeys(page.config for page in PAGES.values())
    ]
    return [config for config in configs if not is_flat(config)]


def config_groups(cls: type) -> dict[str, type]:
    """Return group name -> dataclass, a command's own first; a flat configuration has one, ""."""
    if is_flat(cls):
        return {"": cls}
    hints = typing.get_type_hints(cls)
    # dataclasses.fields begins with those that are inherited.
    own = sorted(dataclasses.fields(cls), key=lambda f: f.name not in cls.__annotations__)
    return {f.name: hints[f.name] for f in own}


def cached(function: F) -> F:
    """Cache a function of a class; mypy does not take a type[C] for functools.cache's Hashable."""
    return typing.cast(F, functools.cache(function))


def with_settings(config: T, /, **values: Any) -> T:
    """Return a configuration in which some settings, whatever their groups, have other values."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        group = config_fields(type(config))[name][0]
        before = getattr(getattr(config, group), name)
        # Groups without a change stay the same objects, and keep what they have computed.
        if before != value or type(before) is not type(value):  # 1 is not True
            groups.setdefault(group, {})[name] = value
    if not groups:
        return config
    changed = {}
    for group, given in groups.items():
        changed[group] = dataclasses.replace(getattr(config, group), **given)
    return typing.cast(T, dataclasses.replace(typing.cast(Any, config), **changed))


def baseline_settings(group: Any) -> dict[str, Any]:
    """Return the settings of a group that verify-layout's small baseline shares with the run."""
    shared = [f.name for f in dataclasses.fields(group) if "baseline" in f.metadata["proof"]]
    return {name: getattr(group, name) for name in shared}


@cached
def config_fields(cls: type) -> Mapping[str, tuple[str, dataclasses.Field[Any], Any]]:
    """Return field name -> (group name, field, type) of a configuration class."""
    out = {}
    for group_name, group in config_groups(cls).items():
        hints = typing.get_type_hints(group)
        for f in dataclasses.fields(group):
            # A name is unique among all groups, so that a flag needs no group.
            out[f.name] = (group_name, f, hints[f.name])
    return types.MappingProxyType(out)


def default_of(f: dataclasses.Field[Any]) -> Any:
    """Return the default; MISSING if the flag is required."""
    return f.default_factory() if callable(f.default_factory) else f.default


def is_not_yet(f: dataclasses.Field[Any]) -> bool:
    """Return whether no value of the flag works yet."""
    return bool(f.metadata["only"] == (None,))


def not_yet(f: dataclasses.Field[Any], kind: Any) -> str:
    """Return "not yet", with the values that do not work if others do; empty if all work."""
    if is_not_yet(f):
        return "not yet"
    lacking = [
        str(c) for c in choices_of(kind) if f.metadata["only"] and c not in f.metadata["only"]
    ]
    return f"not yet: {', '.join(lacking)}" if lacking else ""


def inner_type(kind: Any) -> Any:
    """Return `int` of `int | None`, and so on."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        # Of a union with words, as `int | Literal["auto"]`, this is the first type.
        return next(a for a in typing.get_args(kind) if a is not type(None))
    return kind


def is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is list


def form_of(kind: Any) -> type[TextForm] | None:
    """Return the form of a setting, or of the elements of a list, that is more than text."""
    plain = inner_type(kind)
    plain = typing.get_args(plain)[0] if is_list(plain) else plain
    return plain if isinstance(plain, type) and issubclass(plain, TextForm) else None


@cached
def forms_in(group: type) -> Mapping[str, type[TextForm]]:
    """Return the settings of a group that have a form."""
    forms = {name: form_of(kind) for name, (_, _, kind) in config_fields(group).items()}
    return {name: form for name, form in forms.items() if form is not None}


def read_forms(group: Any) -> None:
    """Read the settings of a new group that were given as text, as in `Data(split="8,1,1")`."""

    def read(name: str, form: type[TextForm], value: Any) -> Any:
        if isinstance(value, list):
            return [read(name, form, each) for each in value]
        # The value has been read already, or is None.
        if not isinstance(value, str):
            return value
        try:
            return form.read(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    for name, form in forms_in(type(group)).items():
        # The groups are frozen, and this is a part of making one.
        object.__setattr__(group, name, read(name, form, getattr(group, name)))


def as_text(value: Any) -> Any:
    """Return a value as files and checkpoints hold it."""
    if isinstance(value, list):
        return [as_text(each) for each in value]
    return str(value) if isinstance(value, TextForm) else value


def choices_of(kind: Any) -> tuple[Any, ...]:
    plain = inner_type(kind)
    return typing.get_args(plain) if typing.get_origin(plain) is typing.Literal else ()


def text_kind(f: dataclasses.Field[Any], kind: Any) -> str:
    """Return what a field of text holds, as `FlagSpec.value`; empty for all others."""
    plain = inner_type(kind)
    plain = typing.get_args(plain)[0] if is_list(plain) else plain
    if choices_of(kind) or not (plain in (str, Path) or form_of(kind)):
        return ""
    return f.metadata["value"] or ("PATH" if plain is Path else "FORM")


def placeholder(f: dataclasses.Field[Any], kind: Any) -> str:
    """Return what stands for the value of a flag."""
    # Short choices are listed in place of a word.
    plain = inner_type(kind)
    if listed := "|".join(map(str, choices_of(kind))):
        return listed if len(listed) < 12 else "NAME"
    if is_list(plain):
        (plain,) = plain.__args__
    text = text_kind(f, kind)
    word = text if text in PATHS else {int: "N", float: "X"}.get(plain, "TEXT")
    return f"{word} ..." if is_list(inner_type(kind)) else word


def word_of(f: dataclasses.Field[Any]) -> str:
    """Return the placeholder of a positional argument."""
    return f.metadata["word"] or f.name.rstrip("s").upper()


def switches(f: dataclasses.Field[Any]) -> tuple[list[str], list[str]]:
    """Return the flags that turn a boolean field on, and those that turn it off."""
    on = [spelling(f.name)]
    off = []
    # --no-no-x would help nobody.
    if not f.name.startswith("no_"):
        off.append("--no-" + on[0].removeprefix("--"))
    for alias in f.metadata["aliases"]:
        (off if alias.startswith(("--disable", "--no-")) else on).append(alias)
    return on, off


def typed_flags(cls: type, argv: Collection[str]) -> dict[str, str]:
    """Return field -> its flag as it was typed, also by another name or with underscores.

    --train-epochs stands for --train-samples too, which a run makes of it.
    """
    # By their hyphenated forms. If a flag is typed twice, the last one counts.
    typed = {}
    for place, word in enumerate(argv):
        if word.startswith("--"):
            flag = word.partition("=")[0]
            typed[flag.replace("_", "-")] = place, flag
    out = {}
    for name, (_, f, kind) in config_fields(cls).items():
        names = [spelling(name), *f.metadata["aliases"]]
        if inner_type(kind) is bool:
            names, _ = switches(f)
        given = [typed[plain] for word in names if (plain := word.replace("_", "-")) in typed]
        if given:
            _, out[name] = max(given)
    if "train_epochs" in out:
        out.setdefault("train_samples", out["train_epochs"])
    return out
