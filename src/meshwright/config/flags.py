"""Resolve flags: defaults < --preset < --recipe < --config FILE < MESHWRIGHT_* < command line.

Each value has a source, flags of other programs and misspelt ones are answered, and all mistakes
are listed at once; `argv.py` reads the command line. A configuration is a dataclass of groups,
such as `TrainConfig`; a flat one, such as that of `report`, reads no files or environment.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import reprlib
import shlex
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from meshwright.base import console, registry
from meshwright.base.errors import BAD_DATA, DONE, UNAVAILABLE, UserError
from meshwright.base.files import GivenTwice, parse_toml, parse_yaml, read_small
from meshwright.base.hints import find_address, nearest, our_word, refuse_address
from meshwright.base.storage import addresses
from meshwright.config import check_values, checks, dialects, help, notices, presets, recipes
from meshwright.config.argv import (
    REMOVED_SETTINGS,
    Syntax,
    answer_unknown,
    maybe_set_aside,
    read_argv,
    syntax_of,
)
from meshwright.config.dialects import (
    equal,
    known_elsewhere,
    no_effect,
    old_switches,
    other_values,
    unset,
)
from meshwright.config.fields import (
    as_text,
    choices_of,
    config_fields,
    config_groups,
    default_of,
    every_config,
    form_of,
    group_values,
    inner_type,
    is_flat,
    spelling,
    typed_flags,
    word_of,
)
from meshwright.config.problem import (
    GivenAs,
    Problem,
    SettingsError,
    Wording,
    in_words,
    listed,
    names_in,
    plain,
    require,
    with_missing_last,
    with_value,
)
from meshwright.config.schema import AMOUNTS, LENGTHS, OUTCOME, TrainConfig

POWERS = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}  # of ten, as people abbreviate them
# Flags beside the settings; the first four may be given in Python too.
CONTROL = ("preset", "recipe", "depth", "config_file", "dry_run", "print_config")
SETTINGS_LIMIT = 4 << 20  # bytes of a file of settings
SETTINGS_ARE = "give settings in TOML, or in YAML in a file that ends in .yaml"
ENVIRONMENT = "environment"  # the source of a value of MESHWRIGHT_*
C = TypeVar("C")

# Units of one length: a unit given in a higher layer removes the others from lower layers.
UNITS_OF_A_LENGTH = (
    ("train_iters", "train_samples", "train_tokens", "train_epochs"),
    ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens"),
)
REPLACES = {
    name: [other for other in units if other != name]
    for units in UNITS_OF_A_LENGTH
    for name in units
}
REPLACES["step_batch_size_schedule"] = ["global_batch_size", "rampup_batch_size"]

# Words of other programs for values of ours, too different for a suggestion by spelling.
OTHER_VALUES = {
    "hf": "huggingface",
    "k8s": "kubernetes",
    "GPT2Tokenizer": "GPT2BPETokenizer",
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
}
# for choices that have these words; YAML reads `on` as True
SWITCHED = {"true": "on", "false": "off"}
# Why some words are not among the choices.
REFUSED_WORDS = {
    "nanogpt": "; its ckpt.pt is read, not written",
    "litgpt": "; its folders are read, not written",
    "gguf": "; llama.cpp's convert_hf_to_gguf.py makes it of a huggingface folder",
}
# Values that releases up to 0.18 knew and saved: no measurement showed that they pay.
REMOVED_VALUES = {
    ("pipeline_schedule", "zero-bubble"): "1f1b",
    ("pipeline_schedule", "zbv"): "1f1b",
}
for (_, word), same in REMOVED_VALUES.items():
    REFUSED_WORDS[word] = f"; it was removed; {same} computes the same but for rounding"


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[C]):
    """A resolved configuration, the source of each value, and the control flags."""

    config: C
    sources: dict[str, str]
    notices: list[str]
    ignored: dict[str, Any]  # flags that were given and have no effect
    dry_run: bool
    print_config: bool
    recipe: str = ""
    # in which problems name the settings
    words: Wording = dataclasses.field(default_factory=Wording)


class SwitchSource(str):
    """The source of a value that an older switch stands for."""


def parse_settings(
    cls: type[C],
    argv: list[str],
    prog: str,
    positional: str | None = None,
    check: bool = True,
    about: str = "",
    values: Mapping[str, Any] | None = None,
) -> Parsed[C]:
    """Resolve a command line; `positional` names the field that arguments without a flag set.

    `values` are settings by name, from Python: they win over the command line, and problems name
    settings as keyword arguments.
    """
    syntax = syntax_of(cls, positional)
    if (topic := help.requested_topic(argv, syntax.names_follow)) is not None:
        help.show_help(help.Command(cls, prog, about, positional), topic)
        raise SystemExit(DONE)
    reader = LayerReader(cls)
    words = Wording(
        "keywords" if values or (values is not None and not argv) else "flags", reader.given
    )
    with in_words(words):
        return _resolve(reader, argv, syntax, check, values or {}, words)


def _resolve(
    reader: LayerReader,
    argv: list[str],
    syntax: Syntax,
    check: bool,
    values: Mapping[str, Any],
    words: Wording,
) -> Parsed[Any]:
    """Read the layers, lay them over each other and check the outcome."""
    cls, problems = reader.cls, reader.problems
    # Known before anything is read, so that a problem names a flag as it was typed.
    typed = {name: GivenAs(flag) for name, flag in typed_flags(cls, argv).items()}
    reader.given.update(typed)
    cli, values = _read_command_line(reader, argv, syntax), dict(values)
    control = {k: cli.pop(k, None) for k in CONTROL} | {
        k: values.pop(k) for k in CONTROL[:4] if k in values
    }

    # The layers, each over those before it.
    # Each layer is read in full: mistakes of a lower one are reported though a higher one wins.
    layers = _layers_below(reader, control["preset"], control["config_file"])
    problems += _for_one_start(reader, layers, {*cli, *values})
    of_command_line = reader.convert_all(cli, lambda name: typed.get(name, GivenAs(spelling(name))))
    layers.append(
        (
            "command line",
            of_command_line | reader.convert_all(values, lambda name: GivenAs(name, "=")),
        )
    )
    recipe, choices = _fit_layers(reader, control, layers)
    if is_flat(cls):
        require(problems)
    built: Any
    built, sources = build_config(cls, layers)
    sources.update(recipes.explained(recipe, choices, sources))
    words.remarks.update(recipes.remarks(sources, built))
    # A problem of the layers is one of the depth that gave them.
    if sources.get("num_layers", "").endswith(": --depth"):
        reader.given["num_layers"] = words.how_given("depth")

    # What the outcome lacks or contradicts.
    remote = check_values.remote_paths(built)  # before a file is opened
    if (check or control["dry_run"]) and isinstance(built, TrainConfig) and not remote:
        built = _with_deepspeed(built, sources, reader)
    # A checkpoint completes the settings of a run that loads one; they are checked after that.
    is_complete = not (isinstance(built, TrainConfig) and built.checkpoint.load)
    reader.notices += _from_environment(sources) + (
        notices.without_effect(built, words) if is_complete else []
    )
    reader.notices += _unused(cls, layers[-1][1])
    if choices and isinstance(built, TrainConfig):
        reader.notices.append("\n".join(recipes.describe(recipe, choices, built)))
    found = checks.problems(built) if check and is_complete else remote
    # What follows from a mistake that is reported already would hide it.
    found = _relevant(found, problems, control, is_recipe_refused=not recipe)
    require(problems + with_missing_last(found) if problems else found)
    built = localized(built)
    only_prints = bool(control["dry_run"]), bool(control["print_config"])
    return Parsed(built, sources, reader.notices, reader.ignored, *only_prints, recipe, words)


def _read_command_line(reader: LayerReader, argv: list[str], syntax: Syntax) -> dict[str, Any]:
    """Return the values of a command line as texts, by field."""
    problems = reader.problems
    typed = read_argv(argv, syntax)
    problems += typed.problems
    # A word that follows an unknown flag may be what such a setting seems to lack.
    unsure = maybe_set_aside(typed, syntax)
    for word in typed.unknown:
        if word.startswith("--"):
            problem = answer_unknown(word, syntax)
            problems.append(Problem((*problem.about, *unsure), problem.text))
    reported = {name for problem in typed.problems for name in problem.about} | {*unsure}
    lacking = {name: shown for name, shown in typed.missing(syntax).items() if name not in reported}
    # Nothing more is known without what the command needs; a misspelt flag is often the reason.
    if lacking:
        required = f"the following arguments are required: {', '.join(lacking.values())}"
        problems.append(Problem(tuple(lacking), plain(required)))
        require(problems)

    for name in [name for name in typed.values if name in no_effect()]:
        reader.note_ignored(name, typed.values.pop(name), "")

    # What is left is the only mistake, or it follows from another one.
    stray = [word for word in typed.unknown if not word.startswith("--")] + typed.words
    if stray and not problems:
        advice = _advice_of_word(stray[0], reader)
        problems.append(Problem(unsure, f"unexpected argument {plain(repr(stray[0]))}{advice}"))
        # read it, so that nothing in it is missed
        if "{config_file}" in advice and os.path.isfile(stray[0]):
            typed.values.setdefault("config_file", stray[0])
    return typed.values


def _relevant(
    found: Sequence[Problem],
    problems: Sequence[Problem],
    control: Mapping[str, Any],
    is_recipe_refused: bool,
) -> list[Problem]:
    """Return the problems of the outcome that do not only follow from other problems."""
    # Nothing reliable is known of a setting that was given and could not be read.
    unread = {name for problem in problems for name in problem.about}
    out = [problem for problem in found if unread.isdisjoint(problem.about)]
    if control["dry_run"]:  # it writes nothing
        out = [problem for problem in out if "output_prefix" not in problem.about]
    # so that it sets nothing
    if is_recipe_refused and (control["recipe"] or control["depth"] is not None):
        out = [problem for problem in out if problem.kind != "missing"]
    return out


def _for_one_start(
    reader: LayerReader, layers: Sequence[tuple[str, dict[str, Any]]], typed: Collection[str]
) -> list[Problem]:
    """Refuse flags for one start, such as --trust-pickle, where the user may not see them."""
    once = {name for name, (_, f, _) in reader.fields.items() if f.metadata["once"]}
    once = once.difference(typed)  # what is typed too is seen
    problems = []
    for _, layer in layers:
        for name in sorted(once & layer.keys()):
            if layer[name] != default_of(reader.fields[name][1]):
                text = (
                    f"{{{name}}}: it is for one start, so neither a file nor a variable can set it; give it with the start "
                    "itself, or leave it out there"
                )
                problems.append(Problem((name,), text))
    return problems


def _merged(layers: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the values of several layers, of which later ones win."""
    out: dict[str, Any] = {}
    for _, layer in layers:
        replaced = {other for name in layer for other in REPLACES.get(name, ())}
        # A length in one unit takes the place of those in other units, as in build_config.
        out = {name: value for name, value in out.items() if name not in replaced} | layer
    return out


def _fit_layers(
    reader: LayerReader, control: Mapping[str, Any], layers: list[tuple[str, dict[str, Any]]]
) -> tuple[str, dict[str, recipes.Choice]]:
    """Add the layer of a recipe; fit the preset's schedule to a length, which may be `auto`.

    Return the name of the recipe and its choices; problems are added to the reader's.
    """
    preset = control["preset"]
    number_below = 1 if preset else 0  # a recipe lies over the preset alone
    upper = layers[number_below:]
    above = _merged(upper)
    is_auto = issubclass(reader.cls, TrainConfig) and above.get("train_tokens") == "auto"
    try:
        depth = convert_value(int | None, control["depth"])
    except ValueError as error:
        reader.problems.append(Problem(("depth",), f"{{depth}}: {plain(error)}"))
        return "", {}
    recipe = control["recipe"] or (recipes.IMPLIED if depth is not None else "")
    if recipe and (wrong := recipes.problems(recipe, depth, preset, above)):
        reader.problems += wrong
        return "", {}
    others = [name for name in LENGTHS if name != "train_tokens" and above.get(name)]
    if is_auto and others:
        both = f"{{{others[0]}}} and {{train_tokens=auto}} both set the length of the run; give one"
        reader.problems.append(Problem((others[0], "train_tokens"), both))
        return "", {}

    choices: dict[str, recipes.Choice] = {}
    if recipe or is_auto:
        given = recipes.Given(dict(above), depth, preset, is_auto)
        if is_auto:
            del given.settings["train_tokens"]
        found = _choices(reader, recipe, given, layers[:number_below])
        if found is None:
            return "", {}
        choices = found

    # What was `auto` is a number from here on, wherever it was given.
    if is_auto and choices:
        above["train_tokens"] = choices["train_tokens"].value
        for _, layer in upper:
            if layer.get("train_tokens") == "auto":
                layer["train_tokens"] = above["train_tokens"]
    if preset:
        label = layers[0][0]
        fitted = presets.fitted(preset, above)
        layers[0] = label, {name: fitted[name] for name in fitted if name in reader.fields}
    if recipe:
        values = {name: choice.value for name, choice in choices.items()}
        layers.insert(number_below, (f"recipe {recipe}", values))
    return recipe, choices


def _choices(
    reader: LayerReader,
    recipe: str,
    given: recipes.Given,
    below: Sequence[tuple[str, dict[str, Any]]],
) -> dict[str, recipes.Choice] | None:
    """Return what a recipe or --train-tokens auto decides; None if the sizes allow no rule."""
    draft: Any = build_config(reader.cls, [*below, ("", given.settings)])[0]
    outside: list[Problem] = []
    for group in group_values(draft):
        outside += check_values.out_of_bounds(group)
    if outside:
        reader.problems += outside
        return None
    if recipe:
        try:
            return recipes.apply_recipe(recipe, draft, given)
        except OverflowError:
            text = f"{with_value('recipe', recipe)}: no run can have these sizes; give smaller ones"
            reader.problems.append(Problem(("recipe",), text))
            return None
    if not (draft.model.num_layers and draft.model.hidden_size):
        reader.problems.append(recipes.NO_SIZES)
        return {}
    return {"train_tokens": recipes.auto_tokens(draft)}


def _layers_below(
    reader: LayerReader, preset: str | None, file: str | None
) -> list[tuple[str, dict[str, Any]]]:
    """Return the layers that the command line overrides."""
    layers = []
    if preset:
        presets.require_preset(preset, "{preset}: ")
        values = presets.PRESETS[preset]
        # A command that only reads a model has no settings of a schedule.
        ours = {name: values[name] for name in values if name in reader.fields}
        layers.append((f"preset {preset}", ours))
    if file:
        if address := find_address(file):
            raise SettingsError(f"{{config_file}} {plain(refuse_address(address))}")
        layers.append((file, reader.read_file(Path(file))))
    if not is_flat(reader.cls):
        layers.append((ENVIRONMENT, reader.read_environment()))
    return layers


def _unused(cls: type, typed: Mapping[str, Any]) -> list[str]:
    """Report flags of the command line that the command accepts and does not use."""
    used = getattr(cls, "USES", None)
    if used is None:
        return []
    by_name = config_fields(cls)
    out = []
    for name, value in typed.items():
        # An older switch is off by default, and used if what it stands for is.
        is_switch = name in old_switches()
        target = old_switches()[name][0] if is_switch else name
        default = False if is_switch else default_of(by_name[name][1])
        if target not in used and value != default:
            out.append(f"{spelling(name)} has no effect on this command")
    return out


def _advice_of_word(word: str, reader: LayerReader) -> str:
    """Return which flag takes an argument that stands without one, or an empty string."""
    if "prompt" in reader.fields:
        return (
            "; give the file to {prompts}"
            if os.path.isfile(word)
            else "; give the text to {prompt}"
        )
    if "input" in reader.fields and os.path.exists(word):
        return "; give it to {input}"
    is_settings = not is_flat(reader.cls) and word.endswith((".toml", ".yaml", ".yml", ".py"))
    return "; give it to {config_file}" if is_settings else ""


def _from_environment(sources: Mapping[str, str]) -> list[str]:
    """Name the settings that the environment decides, which no command line shows."""
    names = [
        f"MESHWRIGHT_{name.upper()}"
        for name, source in sources.items()
        if source.startswith(ENVIRONMENT)
    ]
    return [f"from the environment: {', '.join(names)}"] if names else []


def _with_deepspeed(config: Any, sources: dict[str, str], reader: LayerReader) -> Any:
    """Let the file of --deepspeed_config fill what is still at its default."""
    given = {n for n, source in sources.items() if source != "default"}
    if isinstance(sources["zero_stage"], SwitchSource):  # ZeRO 1 leaves a higher stage to the file
        given.remove("zero_stage")
    filled, notices, problems = dialects.fill_from_file(config, given)
    before, after = to_dict(config), to_dict(filled)
    for name in after:
        if after[name] != before[name]:
            sources[name] = str(config.parallel.deepspeed_config)
    if config.parallel.deepspeed_config:  # the switch beside it says the same
        reader.notices = [
            notice for notice in reader.notices if not notice.startswith("--deepspeed is accepted")
        ]
    reader.notices += notices
    reader.problems += problems
    return filled


def build_config(
    cls: type[C], layers: list[tuple[str, dict[str, Any]]]
) -> tuple[C, dict[str, str]]:
    """Lay the layers over the defaults; return the configuration and each value's source."""
    by_name = config_fields(cls)
    values: dict[str, dict[str, Any]] = {g: {} for g in config_groups(cls)}
    sources = dict.fromkeys(by_name, "default")
    for label, layer in layers:
        replaced = {other for name in layer for other in REPLACES.get(name, ())}
        for name in replaced - layer.keys():
            if name in by_name:
                values[by_name[name][0]].pop(name, None)
                sources[name] = "default"
        for name in layer.keys() & by_name.keys():
            values[by_name[name][0]][name] = layer[name]
            sources[name] = label
        # Those that are off first: one that is on wins over another name for the same.
        switches = layer.keys() & old_switches().keys()
        for switch in sorted(switches, key=lambda name: (layer[name], name)):
            name, value = old_switches()[switch]
            group = values[by_name[name][0]]
            if layer[switch]:
                group[name] = _with_switch(group.get(name), value)
                sources[name] = SwitchSource(f"{label} ({spelling(switch)})")
            # One that is off takes back what a lower layer's switch has set, and no more.
            elif name not in layer and group.get(name) == value:
                del group[name]
                sources[name] = "default"
    if is_flat(cls):
        return cls(**values[""]), sources
    _fill_global_batch(values.get("training", {}))
    return cls(**{g: kind(**values[g]) for g, kind in config_groups(cls).items()}), sources


def _fill_global_batch(training: dict[str, Any]) -> None:
    """Take the last batch of a schedule as the global batch; `checks` reports mistakes in it."""
    schedule = training.get("step_batch_size_schedule")
    if schedule is not None and training.get("global_batch_size") is None:
        training["global_batch_size"] = schedule.stages[-1][1]


def _with_switch(current: Any, value: Any) -> Any:
    """Return what an older switch makes of a setting."""
    # A switch for ZeRO 1 does not lower a stage that was given.
    return max(current, value) if type(current) is type(value) is int else value


def current_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved settings with older switches and values as the settings that they stand for."""
    out = {
        name: REMOVED_VALUES.get((name, value), value) if isinstance(value, str) else value
        for name, value in saved.items()
        if name not in old_switches()
    }
    for switch, (name, value) in old_switches().items():
        if saved.get(switch) is True:
            out[name] = _with_switch(out.get(name), value)
    return out


def switches_in_effect(config: Any, given: Mapping[str, Any]) -> dict[str, bool]:
    """Return the given older switches whose meaning is the configuration's."""
    values = to_dict(config)
    in_effect = {}
    for switch, (name, value) in old_switches().items():
        if given.get(switch) and _with_switch(values[name], value) == values[name]:
            in_effect[switch] = True
    return in_effect


# Values.


def words_in(text: str) -> list[str]:
    """Return the values of a list in one text; quotes keep one with blanks together."""
    try:
        return shlex.split(text)
    except ValueError:  # an apostrophe
        return text.split()


def convert_value(kind: Any, value: Any) -> Any:
    """Return a value of any layer as the field's type; raise ValueError if it is not one."""
    words = [
        typing.get_args(k) for k in typing.get_args(kind) if typing.get_origin(k) is typing.Literal
    ]
    if words and value in words[0]:  # beside numbers, as in `int | Literal["auto"]`
        return value
    choices, inner = choices_of(kind), inner_type(kind)
    # Where a value may be missing, none means that it is.
    is_optional = inner is not kind
    if is_optional and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    is_several = typing.get_origin(inner) is list
    if value is None and not is_several:
        raise ValueError("it is None; leave it out for its default")
    if choices:
        return _convert_choice(choices, value)
    if inner is bool:
        word = str(value).lower() if isinstance(value, bool | int | str) else ""
        if word in ("1", "true", "yes", "0", "false", "no"):
            return word in ("1", "true", "yes")
        raise ValueError(f"{_short(value)} is not true or false")
    if is_several:
        if value is None:
            value = []
        elif isinstance(value, str):
            value = words_in(value)
        elif not isinstance(value, list | tuple):
            value = [value]
        return [convert_value(typing.get_args(inner)[0], each) for each in value]
    if (form := form_of(inner)) is not None:
        if _is_no_text(value):
            raise ValueError(f"{_short(value)} is not text; write it as on the command line")
        if value == "":
            raise ValueError("it is empty; leave it out, or is a shell variable unset?")
        return form.read(str(value))
    return _convert_plain(inner, value)


def _convert_choice(choices: tuple[Any, ...], value: Any) -> str:
    word = str(value)
    if word not in choices:
        word = OTHER_VALUES.get(word, SWITCHED.get(word.lower(), word))
    if word in choices:
        return word
    listed = ", ".join(map(str, choices))
    raise ValueError(f"{_short(value)} is none of {listed}{REFUSED_WORDS.get(word, '')}")


def _is_no_text(value: Any) -> bool:
    """Return whether a value from Python or a file has no text of its own: a bool, or several."""
    # Numbers, dates and paths have one.
    return isinstance(value, bool | Iterable) and not isinstance(value, str)


def _convert_plain(kind: Any, value: Any) -> Any:
    """Return a value as int, float or str."""
    try:
        if kind is str and _is_no_text(value):
            raise ValueError
        if isinstance(value, bool | list | dict):
            raise ValueError
        if kind is int and isinstance(value, float | str):
            if str(value).lstrip("+-").isdigit():
                return int(value)
            as_float = float(value)  # 1e6 and 2000.0 are whole numbers too
            if as_float != int(as_float):
                raise ValueError
            return int(as_float)
        if kind is float and not math.isfinite(float(value)):
            raise ValueError
        return kind(value)
    except (ValueError, TypeError, OverflowError):
        wanted = {"int": "a whole number", "float": "a number", "str": "text"}[kind.__name__]
        advice = ""
        if isinstance(value, str):
            # 300b and 1.5 M, as people abbreviate
            large = re.fullmatch(r"([\d.]{1,20}) ?([kmbtg])", value.strip(), re.I)
            if large:
                advice = f"; write {large[1]}e{POWERS[large[2].lower()]}"
        raise ValueError(f"{_short(value)} is not {wanted}{advice}") from None


def _short(value: Any) -> str:
    """Return a short form for messages: a few lines of YAML can stand for gigabytes."""
    return (repr(value) if isinstance(value, str) else reprlib.repr(value))[:100]


# Files and the environment.


class LayerReader:
    """Converts the values of each layer; collects problems, notices and how settings were given."""

    def __init__(self, cls: type) -> None:
        self.cls, self.fields = cls, config_fields(cls)
        self.problems: list[Problem] = []
        self.notices: list[str] = []
        self.ignored: dict[str, Any] = {}
        self.given: dict[str, GivenAs] = {}
        self.aliases = {
            _key(alias.lstrip("-")): n
            for n, (_, f, _) in self.fields.items()
            for alias in f.metadata["aliases"]
        }

    def convert_all(
        self, values: Mapping[Any, Any], how: Callable[[str], GivenAs]
    ) -> dict[str, Any]:
        """Return names and values of one layer as fields and values of their types.

        `how` returns how the layer names a setting.
        """
        out: dict[str, Any] = {}
        # The flags of other programs, as files and variables spell them.
        ignored = {_key(name.lstrip("-")): name for name in no_effect()}
        switches = {}
        for flag, (target, meant) in equal().items():
            if target in self.fields:
                switches[_key(flag.lstrip("-"))] = target, meant
        for key, value in values.items():
            given = how(str(key)[:100])
            name = _key(str(key))
            if name not in self.fields:
                name = self.aliases.get(name, name)
            if name in switches and value is True:
                name, value = switches[name]
            if name in self.fields:
                self._read_field(out, name, value, given)
            elif name in old_switches():
                self._read_switch(out, name, value, given)
            elif name in ignored:
                if value is not False:
                    self.note_ignored(ignored[name], value, given.place)
            elif answer := known_elsewhere(
                "--" + name.replace("_", "-"), plain(given.name + given.place)
            ):
                self.problems.append(Problem(names_in(answer), answer))
            else:
                self._refuse_unknown(name, given, how)
        self._check_switches(out)
        return out

    def _read_field(self, out: dict[str, Any], name: str, value: Any, given: GivenAs) -> None:
        _, f, kind = self.fields[name]
        if f.metadata["positional"]:
            given = given._replace(name=word_of(f))
        self.given[name] = given
        if name == "prompt" and isinstance(value, str):  # "none" is a prompt too
            out[name] = value
            return
        if isinstance(value, str) and (name, value) in other_values():
            word, reason = other_values()[name, value]
            self.notices.append(f"{given.name} {value} is {word} here: {reason}{given.place}")
            value = word
        try:
            converted = convert_value(kind, value)
        except ValueError as error:
            self._refuse(name, given, f": {error}")
            return
        out[name] = None if name in unset() and converted == unset()[name] else converted

    def _refuse(self, name: str, given: GivenAs, why: str) -> None:
        self.problems.append(Problem((name,), plain(given.name + given.place + why)))

    def _refuse_unknown(self, name: str, given: GivenAs, how: Callable[[str], GivenAs]) -> None:
        """Refuse a name that no setting has; suggest one."""
        text = f"unknown setting {plain(repr(given.name))}{plain(given.place)}"
        about: tuple[str, ...] = ()
        if ours := our_word("flags", name.replace("_", "-"), self.fields):
            text += f"; here it is {ours}"
            about = names_in(ours)
        near = nearest(name, self.fields)
        if near and not ours:
            text += f"; did you mean {how(near).name}?"
        if near and not about:
            about = (near,)
        self.problems.append(Problem(about, text))

    def _check_switches(self, layer: Mapping[str, Any]) -> None:
        """Report what older switches of one layer contradict or include."""
        on = [name for name in old_switches() if layer.get(name)]
        recomputed = {
            value
            for target, value in (old_switches()[name] for name in on)
            if target == "recompute_granularity"
        }
        # The setting itself may be given beside its switches.
        meant = {*recomputed, layer.get("recompute_granularity")} - {None}
        if recomputed and len(meant) > 1:
            text = "{recompute_granularity=selective} contradicts full recomputation; give one"
            self.problems.append(Problem(("recompute_granularity",), text))
        if "deepspeed_activation_checkpointing" in on and "checkpoint_activations" not in on:
            also = "Megatron-DeepSpeed does so only with --checkpoint-activations"
            self.notices.append(
                f"--deepspeed-activation-checkpointing recomputes whole layers; {also}"
            )
        stage = layer.get("zero_stage", 0)
        if "use_distributed_optimizer" in on and stage > 1:
            self.notices.append(
                f"--use-distributed-optimizer is --zero-stage 1; --zero-stage {stage} goes further"
            )

    def _read_switch(self, out: dict[str, Any], name: str, value: Any, given: GivenAs) -> None:
        if old_switches()[name][0] not in self.fields:
            return  # a file for several commands
        try:
            out[name] = convert_value(bool, value)
            if out[name]:
                self.given[name] = given
            if out[name] or name in self.ignored:
                self.ignored[name] = out[name]
        except ValueError as error:
            self._refuse(name, given, f": {error}")

    def note_ignored(self, name: str, value: Any, where: str) -> None:
        """Report a flag that has no effect, and keep what was given."""
        count, reason = no_effect()[name]
        self.notices.append(f"{name} is accepted and has no effect: {reason}{where}")
        if isinstance(value, list) and count == 1:
            value = value[0]  # the command line has lists of words
        self.ignored[_key(name.lstrip("-"))] = value

    def read_file(self, path: Path) -> dict[str, Any]:
        """Read a TOML, YAML or Python file, flat or in sections named after the groups."""
        if (settings := dialects.read_file(path)) is not None:
            return self._of_file(settings, path)
        file = with_value("config_file", path)
        if path.suffix == ".py":
            raise SettingsError(
                f"{file}: Python files cannot be read: {registry.LACKING}", UNAVAILABLE
            )
        try:
            # Editors of Windows begin a file with a byte order mark.
            text = read_small(path, SETTINGS_LIMIT, pipes=True).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as e:
            raise SettingsError(
                f"{file}: {e.strerror if isinstance(e, OSError) else 'not UTF-8 text'}"
            ) from None
        try:
            is_yaml = path.suffix in (".yaml", ".yml")
            data = parse_yaml(text) or {} if is_yaml else parse_toml(text)
        except GivenTwice as e:
            raise SettingsError(f"{file}: {plain(e)}; remove one") from None
        # a hostile file can break a reader in many ways, such as by deep nesting
        except Exception as e:
            raise SettingsError(f"{file}: {plain(e)}; {SETTINGS_ARE}") from None
        if not isinstance(data, dict):
            raise SettingsError(f"{file}: not a table of settings; {SETTINGS_ARE}")
        return self._of_file(data, path)

    def _of_file(self, settings: dict[Any, Any], path: Path) -> dict[str, Any]:
        values = self._without_others(self._flat(settings, path))
        # The config.toml of a run that an earlier release began must still continue it.
        for name, value in values.items():
            if isinstance(value, str) and (name, value) in REMOVED_VALUES:
                values[name] = same = REMOVED_VALUES[name, value]
                self.notices.append(
                    f"{name} {value} in {path} was removed; {same}, which computes the same but for rounding, is used"
                )
        for name in REMOVED_SETTINGS.keys() & values.keys():
            value = values.pop(name)
            always = REMOVED_SETTINGS[name]
            if value != always:
                self.notices.append(
                    f"{name} = {value} in {path} was removed; it is always {always}"
                )
        return self.convert_all(values, lambda key: GivenAs(key, " = ", f" in {path}"))

    def _flat(self, data: dict[Any, Any], path: Path) -> dict[Any, Any]:
        """Return the settings of a file without its sections; refuse one that is given twice."""
        flat: dict[Any, Any] = {}
        spelled: dict[str, Any] = {}
        for section, value in data.items():
            for key, setting in self._of_section(section, value).items():
                name = _key(str(key))
                name = self.aliases.get(name, name)
                if name in spelled:
                    before = plain(f"{key} in {path} is given twice")
                    values = f"as {_short(flat[spelled[name]])} and as {_short(setting)}"
                    text = f"{before}, {values}; remove one"
                    self.problems.append(Problem((name,) if name in self.fields else (), text))
                    continue
                spelled[name] = key
                flat[key] = setting
        return flat

    def _of_section(self, section: Any, value: Any) -> dict[Any, Any]:
        """Return what a file's section gives to this command, or a setting outside of sections.

        A file may hold sections for other commands, whose settings can have the names of ours.
        """
        if not isinstance(value, dict):
            return {section: value}
        if section in config_groups(self.cls):
            return value
        groups = [config_groups(cls).get(section) for cls in every_config()]
        theirs = {f.name for group in groups if group for f in dataclasses.fields(group)}
        if not theirs:
            return {section: value}
        return {key: setting for key, setting in value.items() if _key(str(key)) not in theirs}

    def read_environment(self) -> dict[str, Any]:
        prefix = "MESHWRIGHT_"
        values = {
            k[len(prefix) :].lower(): v for k, v in os.environ.items() if k.startswith(prefix)
        }
        return self.convert_all(
            self._without_others(values), lambda key: GivenAs(prefix + key.upper(), "=")
        )

    def _without_others(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """Leave out settings of other commands: a file or a shell may hold settings for several."""
        if all(_key(str(k)) in self.fields for k in values):
            return values  # which spares the import of all commands' configurations
        others = {name for other in every_config() for name in config_fields(other)}
        others -= set(self.fields)
        return {k: v for k, v in values.items() if _key(str(k)) not in others}


def _key(name: str) -> str:
    return name.replace("-", "_")


def given_settings(parsed: Parsed[Any]) -> dict[str, Any]:
    """Return the settings that were given by flags, environment, file or preset."""
    values = to_dict(parsed.config)
    return {name: values[name] for name, source in parsed.sources.items() if source != "default"}


def to_dict(config: Any) -> dict[str, Any]:
    """Return flat name -> value, as saved with a checkpoint."""
    out = {}
    for group in dataclasses.fields(config):
        for name, value in vars(getattr(config, group.name)).items():
            out[name] = as_text(value)
    return out


def localized(config: Any) -> Any:
    """Return settings in which local folders stand for the addresses of object storage."""
    root = getattr(getattr(config, "checkpoint", None), "local_dir", None)

    def localize(value: Any) -> Any:
        if isinstance(value, list):
            return [localize(each) for each in value]
        text = addresses.as_typed(value)
        if not addresses.is_address(text):
            return value
        return type(value)(addresses.localize(str(text), root))  # a Path stays one

    def of_group(group: Any) -> Any:
        names = [f.name for f in dataclasses.fields(group) if f.metadata["remote"]]
        values = {name: localize(getattr(group, name)) for name in names}
        return dataclasses.replace(group, **values)

    if is_flat(config):
        return of_group(config)
    groups = {f.name: of_group(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return dataclasses.replace(config, **groups)


def to_toml(
    config: Any, sources: Mapping[str, str] | None = None, only: Collection[str] | None = None
) -> str:
    """Return a file that --config reads back, with the sources of values as comments.

    `only` are the names of the settings to list, instead of all.
    """
    lines = []
    for g in dataclasses.fields(config):
        group = getattr(config, g.name)
        listed = [f for f in dataclasses.fields(group) if only is None or f.name in only]
        if not listed:
            continue
        lines.append(f"[{g.name}]")
        for f in listed:
            value = as_text(getattr(group, f.name))
            # TOML has no null.
            line = f"# {f.name} = none" if value is None else f"{f.name} = {_toml(value)}"
            lines.append(f"{line}  # {sources[f.name]}" if sources else line)
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    # tomllib only reads; JSON's strings, numbers and lists are also TOML's.
    text = addresses.shown(json.dumps(value, ensure_ascii=False))
    return text.replace("\x7f", "\\u007f")  # the one control character JSON allows


def from_saved(cls: type[C], saved: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of a checkpoint that this class has, converted to their types."""
    reader = LayerReader(cls)
    ours = {name: value for name, value in current_names(saved).items() if name in reader.fields}
    out = reader.convert_all(ours, lambda name: GivenAs(name, " = ", f" in {where}"))
    if reader.problems:
        raise SettingsError(listed(reader.problems), BAD_DATA)
    return out


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the recorded settings in which runs differ, but for those that amount to the same.

    None and the default that it stands for, or 2 steps and their samples, are no difference.
    """
    recorded = [*map(current_names, settings)]
    names = []
    for name in dict.fromkeys(itertools.chain(*recorded)):
        if any(s.get(name) != recorded[0].get(name) for s in recorded):
            names.append(name)
    configs = []
    try:
        for s in recorded:
            layer = from_saved(TrainConfig, s, "the settings")
            configs.append(build_config(TrainConfig, [("", layer)])[0])
    except UserError:  # edited by hand
        return names
    return [n for n in names if n not in {*AMOUNTS, *OUTCOME} or not _amounts_equal(n, configs)]


def _amounts_equal(name: str, configs: Sequence[TrainConfig]) -> bool:
    try:
        amounts = [
            AMOUNTS[name](c) if name in AMOUNTS else getattr(c.model, OUTCOME[name])
            for c in configs
        ]
    except (TypeError, ArithmeticError, ValueError):  # edited by hand
        return False
    return all(amount == amounts[0] for amount in amounts)


def print_notices(parsed: Parsed[Any]) -> None:
    for notice in parsed.notices:
        console.notice(f"note: {notice}")
