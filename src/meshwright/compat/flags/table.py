"""The dialects that compat registers."""

from __future__ import annotations

from meshwright.compat.flags import argument_dump, deepspeed_json, megatron_flags
from meshwright.config.dialects import Dialect

MEGATRON = Dialect(
    equal=megatron_flags.EQUAL,
    old_switches=megatron_flags.OLD_SWITCHES,
    no_effect=megatron_flags.NO_EFFECT,
    answer=megatron_flags.known_elsewhere,
    arguments=argument_dump.dumped_arguments,
)
DEEPSPEED = Dialect(fill=deepspeed_json.merge_deepspeed)
