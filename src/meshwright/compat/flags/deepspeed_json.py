"""Read a DeepSpeed JSON file: it fills settings that no flag gives; contradictions are refused.

MAPPED keys are settings here, IDLE keys change no result, and REFUSED keys would change one.
CURRICULUM is a section that makes one setting.
"auto" leaves a key to the flags. Unknown keys are errors, which DeepSpeed ignores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from meshwright.base.files import read_small, read_table, unique_keys
from meshwright.base.hints import did_you_mean
from meshwright.config.fields import group_values, spelling, with_settings
from meshwright.config.length_schedule import LengthSchedule
from meshwright.config.problem import Problem, plain, stated
from meshwright.config.schema import TrainConfig

JSON_LIMIT = 4 << 20  # bytes


def number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 2**62:
        raise ValueError("a number")
    return float(value)


def integer(value: Any) -> int:
    if type(value) not in (int, float) or value % 1:  # NaN, which is true, for infinity and NaN
        raise ValueError("a whole number")
    return int(value)


def switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def stage(value: Any) -> int:
    if value not in (0, 1, 2, 3):  # or a boolean, DeepSpeed's oldest form
        raise ValueError("0, 1, 2 or 3")
    return int(value)


def power(value: Any) -> float:
    if not -100 <= integer(value) <= 100:
        raise ValueError("a power of two from -100 to 100")
    return math.ldexp(1.0, integer(value))


# Forms of a curriculum that --seq-length-schedule has too: its word, and the keys of its numbers.
CURVES = {
    "fixed_linear": ("linear", "total_curriculum_step", "difficulty_step"),
    "fixed_root": ("root", "total_curriculum_step", "difficulty_step", "root_degree"),
}


def curriculum(section: Any) -> LengthSchedule:
    """Return DeepSpeed's curriculum of sequence lengths; ValueError says what is wrong with it."""

    def read(of: Any, where: str, keys: Sequence[str], others: Sequence[str] = ()) -> list[Any]:
        given = of if isinstance(of, dict) else {}
        if lacking := [key for key in keys if key not in given]:
            raise ValueError(f'{where} needs "{lacking[0]}"')
        if unknown := set(given) - {*keys, *others}:
            raise ValueError(f'{where} has an unknown key "{min(unknown)}"')
        return [given[key] for key in keys]

    def whole(value: Any) -> int:
        try:
            return integer(value)
        except ValueError:
            raise ValueError(f"{json.dumps(value)[:100]} is not a whole number") from None

    keys = ("curriculum_type", "min_difficulty", "max_difficulty", "schedule_type")
    kind, low, high, form = read(section, "it", keys, ("enabled", "schedule_config"))
    if kind != "seqlen":
        raise ValueError(
            f'"curriculum_type" is {json.dumps(kind)[:100]}, and only "seqlen" is known'
        )
    first, last = whole(low), whole(high)
    details = section.get("schedule_config")
    where = '"schedule_config"'
    # DeepSpeed asks for the next length only while the last one is below the highest.
    if first >= last:
        return LengthSchedule.read(f"0:{first}")
    if isinstance(form, str) and form in CURVES:
        curve, *keys_of_curve = CURVES[form]
        numbers = map(whole, read(details, where, keys_of_curve))
        return LengthSchedule.read(":".join(map(str, (curve, first, last, *numbers))))
    if form != "fixed_discrete":
        forms = '"fixed_linear", "fixed_root" and "fixed_discrete"'
        raise ValueError(f'"schedule_type" is {json.dumps(form)[:100]}; {forms} are known')
    lengths, ends = read(details, where, ("difficulty", "max_step"))
    if not (isinstance(lengths, list) and isinstance(ends, list) and len(lengths) == len(ends) + 1):
        raise ValueError(f'{where} needs one more number in "difficulty" than in "max_step"')
    # Each length holds up to the step of its "max_step", the last one for ever.
    stages = list(zip([0, *map(whole, ends)], map(whole, lengths), strict=True))
    reached = next((i for i, (_, length) in enumerate(stages) if length >= last), len(stages))
    words = [f"{steps}:{length}" for steps, length in stages[: reached + 1]]
    return LengthSchedule.read(" ".join(words))


def device(value: Any) -> str:
    if value not in (None, "none", "cpu"):
        raise ValueError('"cpu" or "none": offloading to NVMe is not supported')
    return value or "none"


# JSON key -> setting, and the conversion of its value.
MAPPED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "train_batch_size": ("global_batch_size", integer),
    "train_micro_batch_size_per_gpu": ("micro_batch_size", integer),
    "gradient_accumulation_steps": ("num_accumulation_steps", integer),
    "gradient_clipping": ("clip_grad", number),
    "zero_optimization": ("zero_stage", stage),
    "zero_optimization.stage": ("zero_stage", stage),
    "zero_optimization.offload_optimizer.device": ("cpu_optimizer", lambda v: device(v) == "cpu"),
    "zero_optimization.cpu_offload": ("cpu_optimizer", switch),
    "zero_optimization.offload_param.device": ("remote_device", device),
    "fp16.enabled": ("fp16", switch),
    "fp16.loss_scale": ("loss_scale", lambda v: number(v) or None),  # 0: dynamic
    "fp16.initial_scale_power": ("initial_loss_scale", power),
    "fp16.loss_scale_window": ("loss_scale_window", number),
    "fp16.hysteresis": ("hysteresis", integer),
    "fp16.min_loss_scale": ("min_loss_scale", number),
    "bf16.enabled": ("bf16", switch),
    "bfloat16.enabled": ("bf16", switch),
    "steps_per_print": ("steps_per_print", lambda v: 2**31 - 1 if v == math.inf else integer(v)),
    "wall_clock_breakdown": ("timing_log_level", lambda v: "1" if switch(v) else "0"),
    "activation_checkpointing.cpu_checkpointing": ("checkpoint_in_cpu", switch),
}

CURRICULUM = "curriculum_learning"
MAPPED[CURRICULUM] = ("seq_length_schedule", curriculum)

_TABLES = read_table("compat/flags/deepspeed_json.toml")
IDLE = {
    f"{section}.{key}".lstrip(".")
    for section, keys in _TABLES["idle"].items()
    for key in keys.split()
}
SECTIONS = {key.rsplit(".", 1)[0] for key in (*MAPPED, *IDLE) if "." in key}
REFUSED: dict[str, str] = _TABLES["refused"]
OURS: dict[str, str] = _TABLES["ours"]


def merge_deepspeed(
    config: TrainConfig, given: Collection[str]
) -> tuple[TrainConfig, list[str], list[Problem]]:
    """Fill a configuration from --deepspeed_config; return it, notices and every problem.

    `given` are the settings with a source: they must agree with the file, and never change. Loss
    scale and precision alone are the file's, as in Megatron-DeepSpeed, whose own scripts give
    others.
    """
    path = config.parallel.deepspeed_config
    if not path:
        return config, [], []
    try:
        found, notices, wrong = _sort_keys(read_deepspeed(path), path)
    except ValueError as error:
        return config, [], [_problem(config, plain(error))]

    # Keys that have no effect, or do not contradict a flag that says more.
    if not found.get("fp16.enabled", config.precision.fp16):
        found = {k: v for k, v in found.items() if k == "fp16.enabled" or not k.startswith("fp16.")}
    if found.get("wall_clock_breakdown") == "0" or "timing_log_level" in given:
        found.pop("wall_clock_breakdown", None)

    known = {n: v for group in group_values(config) for n, v in vars(group).items()}
    # The engine casts the model to the file's precision, whatever format Megatron made it in.
    casts_to = _only_precision(found)
    flag = {"fp16": "bf16", "bf16": "fp16"}.get(casts_to, "")
    is_cast = flag in given and known[flag]
    if is_cast:
        given = {*given} - {"fp16", "bf16"}
        found |= {"fp16.enabled": casts_to == "fp16", "bf16.enabled": casts_to == "bf16"}
        notices.append(
            f'{path}: "{casts_to}.enabled" is true, which counts instead of --{flag}: this run is {casts_to}'
        )

    # Each value, compared with that of the flag or of another key for the same setting.
    taken: dict[str, Any] = {}
    for key, value in found.items():
        name, _ = MAPPED[key]
        if name not in given and name not in taken:
            taken[name] = value
            continue
        have = known[name] if name in given else taken[name]
        if have == value:
            continue
        if name == "loss_scale":
            taken[name] = value
            notices.append(
                f'{path}: "{key}" is {_format(value, name)}, which counts instead of --loss-scale {_format(have, name)}'
            )
        else:
            other = f"{{{name}}} is" if name in given else "another key says"
            wrong.append(
                f'"{key}" is {_format(value, name)}, but {other} {_format(have, name)}; change one'
            )

    # Values that contradict others.
    if found.get("fp16.enabled") and (found.get("bf16.enabled") or found.get("bfloat16.enabled")):
        wrong.append('"fp16.enabled" and "bf16.enabled" are both true; change one')
        taken = {name: value for name, value in taken.items() if name not in ("fp16", "bf16")}
    if taken.get("zero_stage") == 0 and config.parallel.zero_stage == 1:
        wrong.append(
            '"zero_optimization.stage" is 0, but {use_distributed_optimizer=True} is ZeRO 1; change one'
        )

    # Fill in, and say what was.
    filled = _fill_accumulation(config, taken, wrong)
    sets = [
        spelling(n) + ("" if v is True else f" {_format(v, n)}")
        for n, v in taken.items()
        if v != known[n]
    ]
    if sets:
        notices.insert(0, f"{path} sets {', '.join(sets)}")
    if taken.get("fp16") and not is_cast:
        notices.append(f'{path}: "fp16.enabled" is true and --fp16 is not given: this run is fp16')
    return filled, notices, [_problem(config, text) for text in wrong]


def _problem(config: TrainConfig, text: str) -> Problem:
    return Problem(("deepspeed_config",), f"{stated(config.parallel, 'deepspeed_config')}: {text}")


def _sort_keys(file: dict[str, Any], path: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the converted values of MAPPED keys, notices, and what is wrong with other keys."""
    found: dict[str, Any] = {}
    notices: list[str] = []
    wrong: list[str] = []
    idle: list[str] = []
    for key, value in _leaves(file):
        if key == CURRICULUM:
            try:
                if _is_curriculum_on(value):
                    found[key] = curriculum(value)
                elif value and "enabled" not in value:
                    notices.append(f'{path}: "{key}" is off, as it has no "enabled"')
            except ValueError as error:
                wrong.append(f'"{key}": {error}')
        elif key in MAPPED:
            # "auto" leaves a setting to the program: to the flags, here.
            try:
                if value != "auto":
                    found[key] = MAPPED[key][1](value)
            except ValueError as error:
                wrong.append(f'"{key}" is {json.dumps(value)[:100]}, not {error}')
        elif key in REFUSED:
            if not _is_off(value):
                wrong.append(f'"{key}" is not supported: {REFUSED[key]}')
        elif key in SECTIONS:
            wrong.append(f'"{key}" is {json.dumps(value)[:100]}, not a section {{...}}')
        elif key in OURS:
            notices.append(f'{path}: the section "{key}" is not read: {OURS[key]} count')
        elif key in IDLE:
            idle.append(key)
        else:
            wrong.append(
                f'unknown key "{key}"{did_you_mean(key, [*MAPPED, *REFUSED, *OURS, *IDLE])}'
            )
    if idle:
        notices.append(f"{path}: without effect here: {', '.join(idle)}")
    return found, notices, wrong


def _only_precision(found: dict[str, Any]) -> str:
    """Return "fp16" or "bf16" if the file turns on one of them, else nothing."""
    is_on = {
        "fp16": found.get("fp16.enabled"),
        "bf16": found.get("bf16.enabled") or found.get("bfloat16.enabled"),
    }
    names = [name for name in is_on if is_on[name]]
    return names[0] if len(names) == 1 else ""


def _fill_accumulation(config: TrainConfig, taken: dict[str, Any], wrong: list[str]) -> TrainConfig:
    """Fill the configuration; accumulation steps count only if the batch sizes leave them open."""
    # The steps follow from the batch sizes, which may come from the file or from flags.
    steps = taken.pop("num_accumulation_steps", None)
    filled = with_settings(config, **taken)
    t = filled.training
    dp = filled.dp
    if steps is None:
        return filled
    if not (t.global_batch_size and isinstance(t.micro_batch_size, int) and t.micro_batch_size > 0):
        taken["num_accumulation_steps"] = steps
        return with_settings(config, **taken)
    if (unit := t.micro_batch_size * dp) * steps != t.global_batch_size:
        wrong.append(
            f'"gradient_accumulation_steps" is {steps}, but a batch of {t.global_batch_size} makes '
            f"{t.global_batch_size / unit:g} steps of {t.micro_batch_size} x {dp} data-parallel ranks; change one"
        )
    return filled


def read_deepspeed(path: str) -> dict[str, Any]:
    """Return the file's object; ValueError says what is wrong, such as a repeated key."""
    try:
        found = json.loads(
            read_small(path, JSON_LIMIT, pipes=True).decode(), object_pairs_hook=unique_keys
        )
    except OSError as error:
        raise ValueError(error.strerror) from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        comment = (
            "; JSON has no comments" if error.doc[error.pos :].startswith(("//", "#", "/*")) else ""
        )
        raise ValueError(
            f"line {error.lineno}, column {error.colno}: {error.msg}{comment}"
        ) from None
    if not isinstance(found, dict):
        raise ValueError("not a table of settings")
    return found


def _leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys with those of their sections, such as "fp16.enabled", and values."""
    for key, value in section.items():
        if prefix + key not in SECTIONS:
            yield prefix + key, value
        elif isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:  # as in "offload_param": null
            yield prefix + key, value


def _is_off(value: Any) -> bool:
    """Return whether a refused key is switched off; -1 is "none" where DeepSpeed wants a number."""
    if isinstance(value, dict) and value:
        return value.get("enabled", True) in (False, "auto")
    return not value or value == -1


def _is_curriculum_on(section: Any) -> bool:
    """Return whether a curriculum is used: as in DeepSpeed, only one with "enabled" is."""
    if not (isinstance(section, dict) and section):
        return bool(section)
    enabled = section.get("enabled")
    try:
        return enabled not in (None, "auto") and switch(enabled)
    except ValueError as error:
        raise ValueError(f'"enabled" is {json.dumps(enabled)[:100]}, not {error}') from None


def _format(value: Any, name: str) -> str:
    """Return a setting's value as JSON and flags both spell it."""
    if value is None:
        return "dynamic" if name == "loss_scale" else "none"
    if isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
