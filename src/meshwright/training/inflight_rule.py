"""Whether the host submits a step before the last one has ended, from settings alone. No torch."""

from __future__ import annotations

from meshwright.config.schema import TrainConfig


def runs_ahead(config: TrainConfig) -> bool:
    """Return whether a device that computes by itself gets a step while it computes another.

    With a scaled loss, or if a bad step is skipped, the next one depends on the last one's numbers.
    Timers wait for each step anyway.
    """
    skips = config.training.on_nonfinite.word == "skip"
    return not (config.precision.fp16 or skips) and config.logging.timing_log_level == "0"
