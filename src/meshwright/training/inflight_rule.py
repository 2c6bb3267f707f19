"""The rule whether the host submits a step before the last has ended, by settings. No torch."""

from __future__ import annotations

from meshwright.config.schema import TrainConfig


def runs_ahead(config: TrainConfig) -> bool:
    """Return whether an asynchronous device is given a step while it still computes another.

    With a scaled loss, or if bad steps are skipped, a step depends on the last one's numbers.
    Timers wait for each step anyway.
    """
    skips = config.training.on_nonfinite.word == "skip"
    return not (config.precision.fp16 or skips) and config.logging.timing_log_level == "0"
