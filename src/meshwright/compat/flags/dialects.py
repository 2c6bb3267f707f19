"""The dialects of Megatron-LM and its family, of DeepSpeed's JSON files, and of lazy configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.compat.flags import deepspeed_json, lazy_config, megatron_flags
from meshwright.config.dialects import Dialect
from meshwright.config.schema import TrainConfig


def _arguments(config: TrainConfig, ignored: Mapping[str, Any], backend: str) -> dict[str, Any]:
    from meshwright.compat.flags import argument_dump  # only a run needs its table

    return argument_dump.dumped_arguments(config, ignored, backend)


MEGATRON = Dialect(
    equal=megatron_flags.EQUAL,
    old_switches=megatron_flags.OLD_SWITCHES,
    two_in_one=megatron_flags.TWO_IN_ONE,
    unset=megatron_flags.UNSET,
    other_values=megatron_flags.OTHER_VALUES,
    no_effect=megatron_flags.NO_EFFECT,
    answer=megatron_flags.known_elsewhere,
    arguments=_arguments,
)
DEEPSPEED = Dialect(fill=deepspeed_json.merge_deepspeed)
PYTHON = Dialect(suffix=".py", read=lazy_config.read_lazy_config)
