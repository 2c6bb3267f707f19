"""Measure the memory of a run's ranks in a process of its own: JSON in, JSON out.

Where something trains, nothing may be patched; memory.measure_in_child starts this.
"""

from __future__ import annotations

import json
import os
import sys

from meshwright.apps.plan.memory import DeviceFacts, memory_of_rank
from meshwright.config import flags
from meshwright.config.schema import TrainConfig


def main() -> None:
    os.nice(10)  # the training beside it goes first
    given = json.load(sys.stdin)
    saved = flags.from_saved(TrainConfig, given["settings"], "the settings")
    config, _ = flags.build_config(TrainConfig, [("", saved)])
    ranks = [memory_of_rank(config, given["padded"], rank, DeviceFacts(**given["profile"])) for rank in given["ranks"]]
    out = [{"kinds": each.kinds, "context": each.context, "reserved": each.reserved} for each in ranks]
    json.dump({"ranks": out}, sys.stdout)


if __name__ == "__main__":
    main()
