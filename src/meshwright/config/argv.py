"""Read the words of a command line: flags with their values, and words without a flag.

`syntax_of` derives a command's flags from its dataclass, and `read_argv` takes a command line apart
by them. Values stay text here: those of files and the environment are converted in the same place.
All mistakes are collected, so that one message can list them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.base.hints import nearest, our_word
from meshwright.config.dialects import (
    equal,
    known_elsewhere,
    no_effect,
    old_switches,
    two_in_one,
)
from meshwright.config.fields import (
    cached,
    config_fields,
    default_of,
    inner_type,
    is_flat,
    is_list,
    spelling,
    switches,
    word_of,
)
from meshwright.config.problem import Problem, names_in, plain, with_value
from meshwright.config.schema import TrainConfig

Count = int | Literal["*", "+"]  # words after a flag: so many, any number, or at least one

NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


# A setting that releases up to 0.18 had and saved, and what it is now.
REMOVED_SETTINGS = {"spike_window": 128}


# What a command takes.


@dataclass(frozen=True)
class Option:
    """What a flag sets, and the words that follow it."""

    target: str  # the name of the setting
    count: Count = 1
    value: Any = None  # what a switch sets, which no word follows
    also: tuple[str, Any] | None = (
        None  # another setting that it gives a value, if nothing else does
    )


@dataclass(frozen=True)
class Positional:
    """A setting given by words without a flag."""

    target: str
    word: str  # its placeholder
    takes_list: bool
    is_required: bool


@dataclass(frozen=True)
class Syntax:
    """All that may stand on the command line of a command."""

    options: Mapping[str, Option]  # by each spelling of a flag
    positionals: tuple[Positional, ...]
    required: Mapping[str, str]  # settings without a default -> how a message names them
    names_follow: bool  # the first word without a flag begins the command line of another program
    used: Collection[str] | None  # the settings that the command uses, if it accepts others
    advice: str = "see --help"  # where a flag that the command lacks may belong


@cached
def syntax_of(cls: type, positional: str | None = None) -> Syntax:
    """Return the syntax of a command; words without a flag set the field named `positional`."""
    by_name = config_fields(cls)
    options: dict[str, Option] = {}
    if not is_flat(cls):
        # A flag of ours wins over another program's of the same name, so these come first.
        for name, (count, _) in no_effect().items():
            options[name] = Option(name, *_idle(count))
    options |= dict.fromkeys(("-h", "--help", "--help-all"), Option("help", 0, True))
    positionals = [_positional_of(*by_name[positional][1:])] if positional else []
    required: dict[str, str] = {}
    names_follow = False
    for name, (_, f, kind) in by_name.items():
        is_positional = f.metadata["positional"]
        if is_positional:
            positionals.append(_positional_of(f, kind))
        else:
            options |= _options_of(f, kind)
        if default_of(f) is dataclasses.MISSING:
            required[name] = word_of(f) if is_positional else spelling(name)
        names_follow |= is_positional == "rest"
    if not is_flat(cls):
        options |= _control_options(cls) | _foreign_options(by_name)
    used = getattr(cls, "USES", None)
    advice = getattr(
        cls, "ADVICE", "flags of COMMAND go after it" if names_follow else "see --help"
    )
    return Syntax(options, tuple(positionals), required, names_follow, used, advice)


def _positional_of(f: dataclasses.Field[Any], kind: Any) -> Positional:
    return Positional(f.name, word_of(f), is_list(kind), default_of(f) is dataclasses.MISSING)


def _options_of(f: dataclasses.Field[Any], kind: Any) -> dict[str, Option]:
    """Return the flags of one field."""
    if inner_type(kind) is bool:
        on, off = switches(f)
        options = dict.fromkeys(on, Option(f.name, 0, True))
        return options | dict.fromkeys(off, Option(f.name, 0, False))
    count: Count = 1
    if is_list(kind):
        count = "+" if default_of(f) is dataclasses.MISSING else "*"
    return dict.fromkeys((spelling(f.name), *f.metadata["aliases"]), Option(f.name, count))


def has_control(cls: type, name: str) -> bool:
    """Return whether a command takes one of the flags beside its settings."""
    if name in ("recipe", "depth"):
        return issubclass(cls, TrainConfig)
    # A preset sets a network, so a command without one would not do what it says.
    return name != "preset" or "num_layers" in config_fields(cls)


def _control_options(cls: type) -> dict[str, Option]:
    """Return the flags that choose other layers of settings, or what is done with the result."""
    options = {
        "--preset": Option("preset"),
        "--config": Option("config_file"),
        "--recipe": Option("recipe"),
        "--depth": Option("depth"),
        "--print-config": Option("print_config", 0, True),
        "--dry-run": Option("dry_run", 0, True),
    }
    return {flag: option for flag, option in options.items() if has_control(cls, option.target)}


def _foreign_options(by_name: Mapping[str, Any]) -> dict[str, Option]:
    """Return the flags of other programs that stand for settings of this command."""
    options: dict[str, Option] = {}
    for name, (target, value) in equal().items():
        if target in by_name:
            options[name] = Option(target, 0, value)
    for name, (target, *also) in two_in_one().items():
        if target in by_name:
            options[name] = Option(target, also=(also[0], also[1]))
    # These have a target of their own: what they set depends on other settings.
    for switch, (target, _) in old_switches().items():
        if target in by_name:
            name = spelling(switch)
            options[name] = Option(switch, 0, True)
            options[f"--no-{name[2:]}"] = Option(switch, 0, False)
    return options


def _idle(count: int | str) -> tuple[Count, Any]:
    """Return the count and the value of a flag without effect."""
    if isinstance(count, str):
        return "*", None
    return count, None if count else True


# What was typed.


@dataclass
class Typed:
    """A command line, taken apart."""

    # setting -> text, list of texts or a switch's value
    values: dict[str, Any] = field(default_factory=dict)
    # The same, of settings that a flag for another one sets too.
    implied: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)  # without a flag
    unknown: list[str] = field(default_factory=list)  # flags that the command does not have
    has_set_aside: bool = False  # words after such a flag, which may be its values
    problems: list[Problem] = field(default_factory=list)
    # Setting -> the flags that gave it a value, each with its last one.
    names: dict[str, dict[str, str]] = field(default_factory=dict)

    def missing(self, syntax: Syntax) -> dict[str, str]:
        """Return the settings without a default that are not given -> how messages name them."""
        return {name: shown for name, shown in syntax.required.items() if name not in self.values}


def read_argv(argv: Sequence[str], syntax: Syntax) -> Typed:
    """Take a command line apart."""
    typed = Typed()
    at = 0
    while at < len(argv):
        word, after = argv[at], argv[at + 1 :]
        at += 1
        name, equals, value = _split_flag(word, syntax)
        if name in syntax.options:
            at += _read_flag(typed, name, value if equals else None, after, syntax)
        elif word == "--" and syntax.positionals:  # no flag follows
            typed.words += after
            break
        elif _is_flag(word, syntax):
            typed.unknown.append(word)
            # The words after it may be its values: they are taken for nothing else.
            if not (equals or syntax.names_follow):
                set_aside = len(_up_to_next_flag(after, syntax))
                at += set_aside
                typed.has_set_aside |= set_aside > 0
        elif syntax.names_follow:
            typed.words += [word, *after]
            break
        else:
            typed.words.append(word)
    typed.problems += _given_twice(typed)
    _place_words(typed, syntax)
    typed.values = typed.implied | typed.values
    return typed


def _split_flag(word: str, syntax: Syntax) -> tuple[str, str, str]:
    """Return the flag, `=` and the value of `--flag=value`; --seq_length is --seq-length."""
    name, equals, value = word.partition("=")
    hyphenated = name.replace("_", "-")
    # Some of Megatron's flags have underscores of their own, and win as they are.
    if name.startswith("--") and name not in syntax.options and hyphenated in syntax.options:
        name = hyphenated
    return name, equals, value


def _is_flag(word: str, syntax: Syntax) -> bool:
    """Return whether a word is no value: negative numbers and what has blanks are values."""
    if not word.startswith("-") or word == "-":
        return False
    if _split_flag(word, syntax)[0] in syntax.options:
        return True
    # What is no flag here may be one of another program, and is reported.
    return not NEGATIVE_NUMBER.fullmatch(word) and " " not in word


def _up_to_next_flag(words: Sequence[str], syntax: Syntax) -> list[str]:
    return list(itertools.takewhile(lambda word: not _is_flag(word, syntax), words))


def _read_flag(
    typed: Typed, name: str, joined: str | None, after: Sequence[str], syntax: Syntax
) -> int:
    """Note what a flag sets, and return how many of the words after it are its values.

    Args:
        joined: What was written after `=`, if anything was.
        after: The words after the flag.
    """
    option = syntax.options[name]
    values = [joined] if joined is not None else _up_to_next_flag(after, syntax)
    typed.implied |= [option.also] if option.also else []

    if option.count == 0:
        typed.values[option.target] = option.value
        # Some programs read `--fp16 False` as true.
        if joined is None and not (values and values[0].lower() in ("true", "false")):
            return 0
        written = f"{name} {values[0]}" if joined is None else f"{name}={joined}"
        said = f"{plain(written)}: this flag takes no value; write it alone, or leave it out"
        typed.problems.append(Problem((option.target,), said))
        values = values[:1]
    elif len(values) < _least_words(option.count):
        typed.problems.append(Problem((option.target,), _too_few(name, option.count, after)))
    elif option.count == 1:
        values = values[:1]
        typed.values[option.target] = values[0]
        typed.names.setdefault(option.target, {})[name.replace("_", "-")] = values[0]
    else:
        if isinstance(option.count, int):
            values = values[: option.count]
        typed.values[option.target] = values
    return len(values) if joined is None else 0


def _least_words(count: Count) -> int:
    if isinstance(count, int):
        return count
    return 1 if count == "+" else 0


def _too_few(name: str, count: Count, after: Sequence[str]) -> str:
    """Say that values are missing after a flag."""
    wanted = "one argument" if count in (1, "+") else f"{count} arguments"
    text = f"argument {name}: expected {wanted}"
    # Such as -1e-4x or -.5,3, which is no number and so was read as a flag.
    if after and re.match(r"-[\d.]", after[0]):
        text += f"; a value that begins with - is written {name}={plain(after[0])}"
    return text


def _given_twice(typed: Typed) -> list[Problem]:
    """Report settings that are given by two names, with different values."""
    problems = []
    for target, values in typed.names.items():
        # One name given twice is no mistake: its last value counts, as scripts rely on.
        if len(set(values.values())) > 1:
            names = " and ".join(values)
            text = f"{names} are names of one setting, with different values; give one"
            problems.append(Problem((target,), text))
    return problems


def _place_words(typed: Typed, syntax: Syntax) -> None:
    """Give the words without a flag to the settings that take them; the others stay."""
    for positional in syntax.positionals:
        if not typed.words:
            return
        name = positional.target
        if positional.takes_list:
            # Words without a flag come before those of the flag.
            typed.values[name] = [*typed.words, *typed.values.get(name, [])]
            typed.words = []
            continue
        word = typed.words.pop(0)
        # The setting may have been given by its flag as well.
        if typed.values.setdefault(name, word) != word:
            both = f"{plain(word)} and {with_value(name, typed.values[name])} name two folders; give one"
            typed.problems.append(Problem((name,), both))


def maybe_set_aside(typed: Typed, syntax: Syntax) -> tuple[str, ...]:
    """Return the settings that words after an unknown flag may be, if they are not its values."""
    if not typed.has_set_aside:
        return ()
    targets = [positional.target for positional in syntax.positionals]
    return tuple(target for target in targets if target not in typed.values)


def answer_unknown(word: str, syntax: Syntax) -> Problem:
    """Return what is said of a flag that the command does not have."""
    name = word.partition("=")[0]
    hyphenated = name.replace("_", "-")
    # The dialects know their own spelling, or only the hyphenated one.
    if answer := known_elsewhere(name, name) or known_elsewhere(hyphenated, name):
        return Problem(names_in(answer), answer)

    unknown = f"unknown flag {plain(name)}"
    # A flag that the command accepts and does not use is no good advice.
    known = {}
    for flag, option in syntax.options.items():
        if syntax.used is None or option.target in syntax.used:
            known[flag] = option.target
    if ours := our_word("flags", hyphenated[2:], {*known, *known.values()}):
        return Problem(names_in(ours), f"{unknown}; here it is {ours}")
    removed = hyphenated[2:].replace("-", "_")
    if removed in REMOVED_SETTINGS:
        always = REMOVED_SETTINGS[removed]
        return Problem((), f"{unknown}; it was removed and is always {always}, leave it out")
    # argparse, and so other trainers, take the beginning of one flag alone for that flag.
    longer = [flag for flag in known if flag.startswith(hyphenated)]
    near = longer[0] if len(longer) == 1 else nearest(hyphenated, known, cutoff=0.8)
    if near:
        return Problem((known[near],), f"{unknown}; did you mean {near}?")
    return Problem((), f"{unknown}; {syntax.advice}")
