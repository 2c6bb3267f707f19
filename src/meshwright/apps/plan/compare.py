"""A prediction beside what the first steps of a run measured, and a faster way to take them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread

from meshwright.apps.plan.memory import RankMemory, measure_in_child
from meshwright.apps.plan.prediction import Machine, Prediction
from meshwright.apps.plan.search import divisors
from meshwright.base.device_profiles import profile_of
from meshwright.base.errors import UserError, first_line
from meshwright.config import checks
from meshwright.config.fields import with_settings
from meshwright.config.schema import TrainConfig

STEPS = 10  # after which a run is compared
WARM_UP = 3  # of them, which compile and record graphs
NEAR = 0.05  # a term that differs by less is not named
GAIN = 0.1  # share of a step's time that a suggestion saves at least
ALIKE = 0.02  # share of a step's time by which suggestions differ without a reason to choose
MARGIN = 0.05  # of the memory, which a suggestion leaves free: its memory is estimated
HELD = ("weights", "gradients", "optimizer", "buffers")


@dataclass
class Measured:
    """The steps of a run so far, to be compared with its plan once."""

    prediction: Prediction
    seconds: list[float] = field(default_factory=list)
    child: Thread | None = None  # that waits for the plan's memory
    memory: RankMemory | None = None  # of rank 0

    def start(self) -> None:
        """Measure the plan's memory in a process of its own, beside the first steps."""
        self.child = Thread(target=self.measure, daemon=True)
        self.child.start()

    def measure(self) -> None:
        one = self.prediction
        found = measure_in_child(one.config, one.padded, one.machine.profile, [0])
        self.memory = found[0] if found else None

    def note(self, seconds: float) -> bool:
        """Add a step; return whether there are enough, and their plan is measured."""
        self.seconds.append(seconds)
        return len(self.seconds) >= STEPS and (self.child is None or not self.child.is_alive())

    def compare(self, stats: Mapping[str, int], mapped: int = 0) -> list[str]:
        """Return lines about time and memory of rank 0.

        `stats` are torch's, `mapped` the bytes that other ranks map, which these leave out. A plan
        that fails does not end the run; one that could not be measured is not compared.
        """
        if self.memory is None:
            return []
        try:
            lines = compare(self.prediction, self.memory, self.seconds, stats, mapped)
            faster = suggest(self.prediction, statistics.median(self.seconds[WARM_UP:]))
            return lines if faster is None else [*lines, faster]
        except UserError:  # a format that the profile does not have
            return []
        except Exception as error:
            return [
                f"plan: could not be compared with the first steps: {type(error).__name__}: {first_line(error)}"
            ]


def plan_of_run(config: TrainConfig, vocabulary: int, product: str) -> Measured | None:
    """Return the plan of a run on a device, by its product's name; None without a profile."""
    profile = profile_of(product)
    if profile is None:
        return None
    measured = Measured(Prediction(config, Machine(profile, profile.links), vocabulary))
    measured.start()
    return measured


def compare(
    prediction: Prediction,
    memory: RankMemory,
    seconds: Sequence[float],
    stats: Mapping[str, int],
    mapped: int = 0,
) -> list[str]:
    """Return predicted beside measured time and memory, and which term is off the most."""
    # Time.
    time = prediction.time
    step = statistics.median(seconds[WARM_UP:])
    slow = step / time.seconds - 1
    time_line = f"plan: step {time.seconds * 1e3:,.1f} ms predicted, {step * 1e3:,.1f} ms measured ({100 * slow:+.1f} %)"
    if abs(slow) > NEAR:
        # The largest part is the likeliest to be off, though it need not be the one.
        largest = max(time.parts, key=lambda part: time.parts[part])
        part = f"{largest}, {time.parts[largest] * 1e3:,.1f} ms"
        time_line += f"; the largest part predicted is {part}"

    # Memory, in three terms.
    held = sum(memory.kinds.get(kind, 0) for kind in HELD)
    current = stats["allocated_bytes.all.current"] + mapped
    peak = stats["allocated_bytes.all.peak"] + mapped
    reserved = stats["reserved_bytes.all.peak"] + mapped
    # What tensors hold between steps, what a step adds to that, and what the allocator adds.
    off = {
        "weights, gradients and optimizer": current - held,
        "activations and other tensors of a step": peak - current - (memory.allocated - held),
        "the allocator": reserved - peak - (memory.reserved - memory.allocated),
    }
    name = max(off, key=lambda term: abs(off[term]))
    memory_line = (
        f"plan: {gib(memory.allocated)} GiB of tensors predicted, {gib(peak)} measured; "
        f"reserved {gib(memory.reserved)} and {gib(reserved)}"
    )
    if abs(off[name]) > NEAR * memory.reserved:
        takes = "take" if " and " in name else "takes"
        memory_line += f"; {name} {takes} {off[name] / 2**30:+,.2f} GiB"
    return [time_line, memory_line]


def suggest(prediction: Prediction, step: float) -> str | None:
    """Return a line about settings of the same layout that make a step of these seconds shorter.

    The commands that people copy were written for smaller devices: with more memory larger
    micro-batches fit, and recomputation is not needed. Neither changes more than rounding.
    """
    config, t = prediction.config, prediction.config.training
    sizes = [config.micro_batch]
    # Other sizes would change the loss or the batch, or not suit all batches of a ramp-up.
    if t.loss_mean == "global" and not t.num_accumulation_steps and len(config.batches) == 1:
        sizes = [n for n in divisors(config.global_batch // config.dp) if n >= config.micro_batch]
    given = t.recompute_granularity
    memory = prediction.machine.profile.memory_bytes
    candidates = list[Prediction]()
    for kind in dict.fromkeys((given, None)):
        for size in sizes:
            other = with_settings(config, micro_batch_size=size, recompute_granularity=kind)
            if checks.problems(other, needs_data=False):
                continue
            candidate = replace(prediction, config=other)
            if candidate.left >= MARGIN * memory:
                candidates.append(candidate)
    if not candidates:
        return None
    # Of those that are nearly the fastest, the one that needs the least memory.
    fastest = min(one.time.seconds for one in candidates)
    nearly = [one for one in candidates if one.time.seconds <= (1 + ALIKE) * fastest]
    best = min(nearly, key=lambda one: one.need)
    ratio = best.time.seconds / prediction.time.seconds
    if ratio > 1 - GAIN:
        return None
    changes = []
    if best.config.micro_batch != config.micro_batch:
        changes.append(f"with --micro-batch-size {best.config.micro_batch}")
    if best.config.training.recompute_granularity != given:
        changes.append("without recomputation")
    return (
        f"plan: {' and '.join(changes)} a step takes about {ratio * step * 1e3:,.1f} ms, {100 * (1 - ratio):.0f} % less, "
        f"and {gib(best.need)} of {gib(memory)} GiB"
    )


def gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"
