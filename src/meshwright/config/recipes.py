"""Recipes: all settings of a training that follow from the size of its model, each with its reason.

A recipe lies over a preset, whose sizes it keeps, and under --config, the environment and flags.
What these give counts in the rules too: another batch has another learning rate. The values and
numbers are in recipes.toml; here are the rules that compute the others.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import struct
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.base.files import read_table
from meshwright.base.hints import did_you_mean, find_address
from meshwright.config import presets
from meshwright.config.data_paths import path_sets, path_settings
from meshwright.config.fields import (
    config_fields,
    default_of,
    inner_type,
    spelling,
    switches,
    with_settings,
)
from meshwright.config.notices import CONDITIONS
from meshwright.config.problem import Problem, plain, with_value
from meshwright.config.schema import ABSENT, LENGTHS, Data, Model, TrainConfig

RECIPES: dict[str, dict[str, Any]] = read_table("config/recipes.toml")
IMPLIED = "modern"  # by --depth alone
# Settings that a preset or a flag gives and a recipe keeps.
SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
)
BY_STEPS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
# one of them given replaces the recipe's
ACTIVATIONS = {"swiglu", "squared_relu", "glu_activation"}
# Options of a preset's network that a recipe keeps: they belong to its sizes, or it states them.
KEPT = {
    "rope_scaling",
    "window_size",
    "window_attn_skip_freq",
    "qk_layernorm",
    "mup_base_hidden_size",
    "mup_base_num_layers",
}
# Settings of a preset that belong to its own network or schedule.
RESET = (
    *("swiglu", "squared_relu", "glu_activation", "ffn_hidden_size", "rotary_percent"),
    *("add_qkv_bias", "embed_layernorm", "apply_layernorm_1p"),
    *(name for name in ABSENT if name not in KEPT),
    *("embedding_dropout", "init_method_std", "embedding_lr", "head_lr", "vector_lr"),
    *("weight_decay_incr_style", "cautious_weight_decay"),
    *("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"),
    *("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    *("rampup_batch_size", "adam_beta1", "adam_beta2", "adam_eps"),
)
NO_SIZES = Problem(
    ("train_tokens", "num_layers", "hidden_size", "num_attention_heads"),
    "{train_tokens=auto} counts the parameters of the layers; give the size too, by {preset}, {depth} or "
    "{num_layers}, {hidden_size} and {num_attention_heads}",
)
WIDTH = 100  # columns of the lines that explain a recipe
# Code of a token type in .idx -> bytes; data/, which reads these files, may not be imported here.
ITEM_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}


class Choice(NamedTuple):
    """A value that a recipe sets, and why."""

    value: Any
    reason: str


@dataclass
class Draft:
    """The settings so far: the recipe's choices under what is `given`."""

    config: TrainConfig
    given: set[str]
    choices: dict[str, Choice] = field(default_factory=dict)

    def choose(self, name: str, value: Any, reason: str) -> None:
        # A size that is given is no choice of the recipe. Other settings that are given stay among
        # the choices, so that an explanation can tell what the recipe would have set.
        if name in SIZES and name in self.given:
            return
        self.choices[name] = Choice(value, reason)
        if name not in self.given:
            self.config = with_settings(self.config, **{name: value})

    def value(self, name: str) -> Any:
        return _value(self.config, name)


def _field(name: str) -> dataclasses.Field[Any]:
    return config_fields(TrainConfig)[name][1]


class Given(NamedTuple):
    """What a recipe starts from: settings above it, and a depth or a preset."""

    settings: dict[str, Any]
    depth: int | None
    preset: str | None
    is_auto: bool  # --train-tokens auto, which `settings` leave out


def problems(
    recipe: str, depth: int | None, preset: str | None, given: Mapping[str, Any]
) -> list[Problem]:
    """Return what is wrong with a recipe or a depth; `given` are settings above a preset."""
    out = []
    if recipe not in RECIPES:
        known = f"{', '.join(RECIPES)}{did_you_mean(recipe, RECIPES, 0.6)}"
        out.append(Problem(("recipe",), f"{{recipe}} {plain(repr(recipe))} is none of {known}"))
    if depth is not None:
        stated_depth = with_value("depth", depth)
        if depth < 1:
            out.append(Problem(("depth",), f"{stated_depth} must be above 0"))
        if preset:
            both = f"{stated_depth} and {with_value('preset', preset)} both set the size; give one"
            out.append(Problem(("depth", "preset"), both))
        if given.get("num_layers", depth) != depth:
            both = f"{stated_depth} and {with_value('num_layers', given['num_layers'])} are one setting; give one"
            out.append(Problem(("depth", "num_layers"), both))
    elif not preset and "num_layers" not in given:
        wanted = "{depth=N}, or {preset=NAME}, or {num_layers} and {hidden_size}"
        text = f"{with_value('recipe', recipe)} needs the size of the model: give {wanted}"
        out.append(Problem(("recipe",), text))
    return out


def apply_recipe(name: str, config: TrainConfig, given: Given) -> dict[str, Choice]:
    """Return the choices of a recipe; `config` has the preset's values and the given ones."""
    recipe = RECIPES[name]
    preset = given.preset
    numbers = recipe["numbers"]
    sizes = set(SIZES).intersection(presets.PRESETS[preset]) if preset else set[str]()
    if config.model.gated == recipe["rows"]["swiglu"][0]:
        # The preset's width fits an MLP with as many matrices.
        sizes.add("ffn_hidden_size")
    draft = Draft(config, {*given.settings, *sizes})
    if preset:
        _reset(draft, name)
    _choose_rows(draft, recipe["rows"], given)
    # Each rule reads what those before it chose: the width decides the length and the parameters,
    # these the tokens, the tokens the batch, and all of them the rates.
    _choose_width(draft, given.depth, numbers)
    if "like" in recipe:
        _follow_preset(draft, recipe["like"], given)
        return draft.choices
    _choose_head(draft, numbers)
    _choose_length(draft, numbers)
    _choose_tokens(draft)
    _choose_batch(draft, numbers)
    if not given.is_auto:
        _choose_steps(draft)
    _choose_rates(draft, numbers)
    _choose_decay(draft, numbers)
    _choose_lines(draft, numbers)
    return draft.choices


def _choose_rows(draft: Draft, rows: Mapping[str, tuple[Any, str]], given: Given) -> None:
    """Choose the settings that have one value for all sizes."""
    activation_is_given = any(given.settings.get(name) for name in ACTIVATIONS)
    for setting, (value, reason) in rows.items():
        if setting == "cautious_weight_decay" and draft.value("optimizer") == "sgd":
            continue  # which has none
        if setting in ACTIVATIONS and activation_is_given:
            continue
        # A setting without effect beside those that are given would only confuse.
        needs = _field(setting).metadata["needs"]
        if all(CONDITIONS[need](draft.config) for need in needs):
            draft.choose(setting, value, reason)


def _reset(draft: Draft, name: str) -> None:
    """Return what belongs to a preset's own network or schedule to the defaults."""
    for setting in RESET:
        default = default_of(_field(setting))
        if setting not in draft.given and draft.value(setting) != default:
            draft.choose(
                setting, default, f"the preset's; recipe {name} has its own network and schedule"
            )


def _choose_width(draft: Draft, depth: int | None, n: Mapping[str, Any]) -> None:
    if depth is not None:
        draft.choose("num_layers", depth, "--depth")
    layers = draft.value("num_layers")
    unit = n["width_unit"]
    width = math.ceil(layers * n["width_of_layer"] / unit) * unit
    draft.choose(
        "hidden_size", width, f"{n['width_of_layer']} x the layers, in multiples of {unit}"
    )
    # A width that is given comes before the recipe's.
    width = draft.value("hidden_size")
    head = n["wide_head"] if width >= n["wide_from"] else n["narrow_head"]
    # A width that is given may be no multiple of these heads; one head always works.
    sizes = (head, n["narrow_head"], 32, 16, 8)
    head = next((size for size in sizes if width % size == 0), width)
    reason = f"heads of {head}"
    if head >= 128:
        reason += ": fewer and wide ones are faster on a GPU"
    draft.choose("num_attention_heads", width // head, reason)


def _choose_head(draft: Draft, n: Mapping[str, Any]) -> None:
    is_untied = draft.value("hidden_size") >= n["untie_from"]
    reason = (
        "a head of its own: 10 % fewer tokens to a loss at 124M in the records of modded-nanogpt"
    )
    if not is_untied:
        reason = f"below a width of {n['untie_from']} the token table learns faster as the head: loss 2.43, not 2.53"
    draft.choose("untie_embeddings_and_output_weights", is_untied, reason)


def _choose_length(draft: Draft, n: Mapping[str, Any]) -> None:
    own_width = draft.value("hidden_size")
    # The list grows from width 0, so that the last that is not above the own one counts.
    length = next(length for width, length in reversed(n["lengths"]) if own_width >= width)
    draft.choose(
        "seq_length", length, f"at a width of {own_width}: wider models use longer contexts"
    )


def layer_parameters(m: Model) -> int:
    """Return the parameters of the layers' matrices."""
    # Biases, norms and tables are left out.
    width = m.hidden_size or 0
    # Queries and output have all heads, keys and values one for each group.
    heads = 2 * (m.num_attention_heads or 1) + 2 * m.groups
    attention = heads * m.head_dim * width
    mlp = (3 if m.gated else 2) * width * m.ffn
    return (m.num_layers or 0) * (attention + mlp)


def auto_tokens(config: TrainConfig) -> Choice:
    """Return the tokens of --train-tokens auto: so many a parameter, few readings of the data."""
    n = RECIPES[IMPLIED]["numbers"]
    parameters = layer_parameters(config.model)
    per_parameter = n["tokens_of_parameter"]
    tokens = per_parameter * parameters
    reason = f"{per_parameter} for each of {_short(parameters)} parameters of the layers"
    # Repeated data teaches less with each reading, so that a small set ends the run earlier.
    available = training_tokens(config.data)
    if available and n["epochs"] * available < tokens:
        tokens = n["epochs"] * available
        readings = f"{n['epochs']} readings of the {_short(available)} tokens of the data"
        reason = f"{readings}; {reason} would be more"
    return Choice(max(tokens, 1), reason)


def training_tokens(d: Data) -> int | None:
    """Return about how many tokens the training data has, or None if that is not known at once."""
    if d.mock_data or not path_settings(d):
        return None
    try:
        paths = next(s for s in path_sets(d) if s.split == "train")
        tokens = 0.0
        for source in paths.sources:
            tokens += (source.end - source.begin) * _tokens_of(source.prefix)
        # --split gives a part of these paths to validation and test.
        shares = d.split.shares if paths.divided else (1.0,)
        return int(tokens * shares[0] / sum(shares))
    except (ValueError, OSError, StopIteration, KeyError, ZeroDivisionError, struct.error):
        return None  # reported where they are read


def _tokens_of(prefix: str) -> int:
    """Return the tokens of a pair of files: the size of one by the type that the other names."""
    if find_address(prefix):
        # Object storage would have to be asked.
        raise ValueError(prefix)
    with open(f"{prefix}.idx", "rb") as file:
        # Megatron's header: 9 bytes of magic, a version of 8 and the code of the type.
        magic, _, code = struct.unpack("<9sQB", file.read(18))
    if magic != b"MMIDIDX\x00\x00":
        raise ValueError(prefix)
    return os.path.getsize(Path(f"{prefix}.bin")) // ITEM_SIZES[code]


def _choose_tokens(draft: Draft) -> None:
    # A preset's length belongs to its own schedule.
    if not draft.given.intersection(LENGTHS):
        draft.config = with_settings(draft.config, **dict.fromkeys(LENGTHS))
        draft.choose("train_tokens", *auto_tokens(draft.config))


def _tokens(draft: Draft, batch: int | None = None) -> float | None:
    """Return the tokens of the run; None if they follow from a batch that is not chosen yet."""
    t = draft.config.training
    length = draft.config.data.seq_length or 1
    if t.train_iters is not None:
        batch = batch or t.global_batch_size
        return None if batch is None else t.train_iters * batch * length
    if t.train_epochs is not None:
        # Data whose size is not known at once counts as what --train-tokens auto would read.
        tokens = training_tokens(draft.config.data) or auto_tokens(draft.config).value
        return t.train_epochs * tokens
    if draft.config.lengths == ["train_samples"] and t.train_samples:
        return t.train_samples * length
    return int(t.train_tokens or 1)


def _best_batch(draft: Draft, n: Mapping[str, Any]) -> int:
    """Return the samples of a step that suit the tokens of the run: a power of two.

    A run of S steps reads S b tokens, so that its batch is b = c (S b / d) ** p, which is
    (c (S / d) ** p) ** (1 / (1 - p)).
    """
    tokens = _tokens(draft)
    length = draft.config.data.seq_length or 1
    c = n["batch_tokens"]
    d = n["batch_at"]
    p = n["batch_power"]
    if tokens is not None:
        best = c * (tokens / d) ** p
    else:
        steps = draft.config.training.train_iters or 1
        best = (c * (steps / d) ** p) ** (1 / (1 - p))
    # Take the power of 2 that is nearest in ratio: 2.9 to 5.6 samples become 4.
    exponent = round(math.log2(best / length))
    return 1 << max(0, exponent)


def _choose_batch(draft: Draft, n: Mapping[str, Any]) -> None:
    t = draft.config.training
    length = draft.config.data.seq_length or 1
    batch = _best_batch(draft, n)
    tokens = _tokens(draft, batch) or 1
    sizes = f"{_short(batch * length)} tokens for {_short(tokens)}"
    reason = f"grows with the tokens of the run ** {n['batch_power']}: {sizes}"
    draft.choose("global_batch_size", batch, reason)
    if t.num_accumulation_steps is None:
        _choose_micro_batch(draft, n)


def _choose_steps(draft: Draft) -> None:
    """Choose a length in steps in place of tokens, as a schedule that is given in steps needs.

    With --seq-length-schedule the two units may stand side by side.
    """
    if "train_tokens" not in draft.choices or not draft.given.intersection(BY_STEPS):
        return
    if draft.config.training.seq_length_schedule is not None:
        return
    tokens, reason = draft.choices.pop("train_tokens")
    length = draft.config.data.seq_length or 1
    batch = draft.config.training.global_batch_size or 1
    draft.config = with_settings(draft.config, train_tokens=None)
    steps = max(1, tokens // (length * batch))
    draft.choose("train_iters", steps, f"{_short(tokens)} tokens: {reason}")


def _choose_micro_batch(draft: Draft, n: Mapping[str, Any]) -> None:
    """Choose the measured size, or one by tokens where a rank cannot measure what fits all."""
    p = draft.config.parallel
    dp = draft.config.dp
    length = draft.config.data.seq_length or 1
    if p.model_ranks == 1 and p.zero_stage <= 1:
        draft.choose("micro_batch_size", "auto", "what fits is measured before training")
        return
    # Double the size as long as the ranks can still make whole batches of it.
    total = draft.config.training.global_batch_size or 1
    size = 1
    while 2 * size * length <= n["micro_tokens"] and total % (2 * size * dp) == 0:
        size *= 2
    draft.choose(
        "micro_batch_size", size, f"up to {n['micro_tokens']:,} tokens, which keep a device busy"
    )


def _choose_rates(draft: Draft, n: Mapping[str, Any]) -> None:
    """Choose rates that fall with the width, and follow the root of a batch that is given."""
    rule = draft.value("optimizer")
    if rule == "adamw":
        rule = "adam"  # by another name
    if rule not in n["lr"]:
        # No rate was measured, so --lr is needed.
        return

    # The rate of the best batch. muP scales it to the width itself.
    base = draft.value("mup_base_hidden_size")
    rate = n["lr"][rule] * n["lr_width"] / (base or draft.value("hidden_size"))
    rate = min(rate, n["lr_most"])
    reason = f"{n['lr'][rule]:g} at a width of {n['lr_width']}, falling with the width"
    if base:
        reason += f"; this is for the width of --mup-base-hidden-size {base}"
    if rate == n["lr_most"]:
        reason += f", at most {n['lr_most']:g}"

    # The rate follows the root of another batch, which is known to hold for a few doublings only.
    best = draft.choices["global_batch_size"].value
    ratio = (draft.config.training.global_batch_size or best) / best
    factor = min(max(math.sqrt(ratio), 0.5), 2)
    if ratio != 1:
        reason += f"; and with the root of the batch, which is {ratio:g} times {best}"
    draft.choose("lr", _rounded(rate * factor), reason)

    # Each rule has a warm-up of its own.
    warmup_reasons = {
        "muon": "Muon needs little warm-up",
        "adam": "AdamW at this rate needs a long warm-up",
    }
    draft.choose("lr_warmup_fraction", n["warmup"][rule], warmup_reasons[rule])
    if rule == "muon":
        # Muon moves matrices alone; AdamW, with rates of its own, moves tables and vectors.
        other = _rounded(n["other_lr"] * (draft.config.optimizer.lr or rate) / rate)
        draft.choose("embedding_lr", other, "AdamW's rate for a table does not fall with the width")
        draft.choose("vector_lr", other, "AdamW's rate for vectors does not fall with the width")


def _choose_decay(draft: Draft, n: Mapping[str, Any]) -> None:
    """Choose weight decay from the share of the run after which a weight has forgotten its past.

    It is 1 / (lr x weight decay x steps), and falls with the tokens a parameter ("Power Lines", for
    AdamW: Bergsma et al. 2025, arXiv 2505.13738).
    """
    t = draft.config.training
    o = draft.config.optimizer
    if not o.lr:
        return
    tokens = _tokens(draft) or 1
    step_tokens = (draft.config.data.seq_length or 1) * (t.global_batch_size or 1)
    steps = tokens / step_tokens
    ratio = tokens / max(layer_parameters(draft.config.model), 1)
    share = n["timescale"] * ratio ** n["timescale_power"]
    # A decay that falls with the rate is weaker on average, so that it begins higher.
    factor = n["falling_decay"] if o.weight_decay_incr_style == "rate" else 1
    low, high = n["weight_decay_range"]
    decay = _rounded(min(max(factor / (share * o.lr * steps), low), high))
    reason = (
        f"weights forget after {share:.2g} times the run, best at {ratio:.2g} tokens a parameter"
    )
    draft.choose("weight_decay", decay, f"{reason}; from {low:g} to {high:g}")


def _choose_lines(draft: Draft, n: Mapping[str, Any]) -> None:
    """Choose how often the run logs and validates, so that a short one has a readable curve too."""
    length = draft.config.data.seq_length or 1
    batch = draft.config.training.global_batch_size or 1
    tokens = _tokens(draft) or 1
    steps = int(tokens / (length * batch))

    lines = n["log_lines"]
    usual_interval = default_of(_field("log_interval"))
    interval = max(1, steps // lines)
    draft.choose("log_interval", min(interval, usual_interval), f"{lines} lines or more")

    validations = n["validations"]
    interval = max(1, steps // validations)
    draft.choose("eval_interval", interval, f"{validations} validations")

    # A step takes about as long as three forward passes.
    batches = round(3 * n["validation_share"] * steps / validations)
    batches = min(max(batches, 1), 100)
    share = n["validation_share"]
    draft.choose("eval_iters", batches, f"about {share:.0%} of the time")


def _follow_preset(draft: Draft, like: str, given: Given) -> None:
    """Take all but the sizes from a preset, with its schedule fitted to the length of the run."""
    length = presets.PRESETS[like]["seq_length"]
    draft.choose("seq_length", length, f"as preset {like}")
    settings = given.settings | {"seq_length": draft.value("seq_length")}
    if given.is_auto:
        draft.choose("train_tokens", *auto_tokens(draft.config))
        settings["train_tokens"] = draft.choices["train_tokens"].value
    for name, value in presets.fitted(like, settings).items():
        if name in SIZES:
            continue
        earlier = draft.choices.get(name)
        draft.choose(name, value, earlier.reason if earlier else f"as preset {like}")


def explained(
    recipe: str, choices: Mapping[str, Choice], sources: Mapping[str, str]
) -> dict[str, str]:
    """Return the sources of what a recipe or --train-tokens auto decides, with the reasons."""
    label = f"recipe {recipe}"
    out = {}
    for name, (_, reason) in choices.items():
        if sources[name] == label:
            out[name] = f"{label}: {reason}"
        elif name == "train_tokens" and sources[name] != "default":  # it was given as auto
            out[name] = f"{sources[name]} (auto: {reason})"
    return out


def remarks(sources: Mapping[str, str], config: Any) -> dict[str, tuple[Any, str]]:
    """Return the values that a recipe chose, by the sources from `explained`, and that it did."""
    out = {}
    for name, source in sources.items():
        # "recipe NAME: reason", but for a depth, which the user gave; or "SOURCE (auto: reason)"
        match = re.match(r"recipe (\S+): (?!--depth$)|.* \((auto): ", source)
        if match is None:
            continue
        value = _value(config, name)
        kind = config_fields(TrainConfig)[name][2]
        chooser = with_value("recipe", match[1]) if match[1] else "{train_tokens=auto}"
        # A switch has only one other value, which can be named.
        other = with_value(name, not value) if inner_type(kind) is bool else f"{{{name}}}"
        out[name] = value, f"chosen by {chooser}; {other} overrides it"
    return out


def describe(recipe: str, choices: Mapping[str, Choice], config: TrainConfig) -> list[str]:
    """Return lines about a recipe: what it sets, why, and what is given instead."""
    used = {}
    others = []
    for name, choice in choices.items():
        if _value(config, name) == choice.value:
            used[name] = choice
        else:
            others.append(name)
    if not recipe:
        return [f"--train-tokens auto is {value:,}: {reason}" for value, reason in used.values()]
    layers = config.model.num_layers
    counted = "1 layer" if layers == 1 else f"{layers} layers"
    size = f"{_short(layer_parameters(config.model))} parameters in {counted}"
    out = [f"--recipe {recipe} sets, for {size}:"]
    out += _aligned([(as_flag(name, choice.value), choice.reason) for name, choice in used.items()])
    if others:
        out.append("these are given instead of its values:")
        rows = []
        for name in others:
            given = as_flag(name, _value(config, name))
            rows.append((given, f"recipe: {_shown(choices[name].value)}"))
        out += _aligned(rows)
    return out


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    left = max(len(words) for words, _ in rows) + 4
    lines = []
    for words, reason in rows:
        heading = f"  {words}"
        for line in textwrap.wrap(reason, max(WIDTH - left, 30)):
            lines.append(f"{heading:<{left}}{line}")
            heading = ""  # of a reason's first line only
    return lines


def _value(config: TrainConfig, name: str) -> Any:
    return getattr(getattr(config, config_fields(TrainConfig)[name][0]), name)


def as_flag(name: str, value: Any) -> str:
    """Return a setting as words of a command line."""
    _, f, kind = config_fields(TrainConfig)[name]
    if inner_type(kind) is bool:
        on, off = switches(f)
        return on[0] if value else off[0]
    if not isinstance(value, list):
        value = ["none" if value is None else value]
    return shlex.join([spelling(name), *map(str, value)])


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _rounded(number: float) -> float:
    return float(f"{number:.2g}")


def _short(number: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:g}"
