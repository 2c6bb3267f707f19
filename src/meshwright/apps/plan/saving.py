"""The size of a checkpoint and the time that it takes, from settings alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.apps.plan import traffic
from meshwright.base.device_profiles import DeviceProfile
from meshwright.config.schema import TrainConfig
from meshwright.optim.rule_table import state_bytes
from meshwright.training.parameters import parameters_of_ranks

STALL = 1.13  # times the seconds of the copies to the host; a save also waits for the step


@dataclass(frozen=True)
class SaveTime:
    """A save of all ranks."""

    bytes: int
    stall: float  # seconds that training waits
    seconds: float  # until the bytes are on the disk


def save_time(config: TrainConfig, padded: int, profile: DeviceProfile) -> SaveTime:
    """Predict a save in the native format; every machine writes to a disk of its own speed."""
    p = config.parallel
    o = config.optimizer
    _, full = traffic.number_bytes(config)

    # Bytes of a parameter: its master, its average and its moments.
    each = full
    if o.ema > 0:
        each += full
    if not config.checkpoint.no_save_optim:
        moments = 2 if o.optimizer in ("adam", "adamw") else 1
        each += moments * state_bytes(o, full)
    tp = p.tensor_model_parallel_size
    of_ranks = parameters_of_ranks(config, padded)
    total = tp * sum(of_ranks) * each

    # The fullest rank copies its part to the host, and each machine writes what its ranks have.
    savers = traffic.groups(config)["data"].size if p.zero_stage else 1
    own = max(of_ranks) * each / savers
    copying = STALL * own / profile.storage["host"]
    ranks = min(config.world, tp * len(of_ranks) * savers)
    machines = max(1, ranks // profile.links.gpus_per_node)
    writing = total / machines / profile.storage["disk"]

    # Training goes on beside the writing, unless a step works in the same memory.
    seconds = copying + writing
    in_background = profile.kind != "cpu" and not p.offloads
    return SaveTime(total, copying if in_background else seconds, seconds)
