"""Measure what a run's ranks allocate in a process of its own: JSON in, JSON out.

Where something trains, nothing may be patched; memory.measure_in_child starts this. It prints for
each rank the bytes by kind at the peak of a step, and all that is allocated and freed in order.
"""

from __future__ import annotations

import json
import os
import sys

from meshwright.apps.plan.measure.stages import memory_of_steps
from meshwright.config import flags
from meshwright.config.schema import TrainConfig


def main() -> None:
    given = json.load(sys.stdin)
    os.nice(given["niceness"])
    # Settings come as a checkpoint has them, so that none is lost on the way.
    saved = flags.from_saved(TrainConfig, given["settings"], "the settings")
    config, _ = flags.build_config(TrainConfig, [("", saved)])
    measured = []
    for rank in given["ranks"]:
        steps = memory_of_steps(config, given["padded"], rank)
        measured.append((steps.peak, steps.events))
    json.dump(measured, sys.stdout)


if __name__ == "__main__":
    main()
