"""Learning rate and weight decay as pure functions of the samples of successful steps.

Samples rather than iterations, so that a changing batch size follows the same curve (Megatron's
convention). With --seq-length-schedule samples have different lengths, and a decay in tokens
follows the tokens that the samples of successful steps have given (Megatron-DeepSpeed's follows
those of all steps). A step uses the samples of the steps before it: with a warm-up the first rate
is 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.config.length_schedule import LengthSchedule
from meshwright.config.problem import SettingsError
from meshwright.config.schema import DECAY_RAMPS, TrainConfig

read_lengths = functools.cache(LengthSchedule.read)


@dataclass(frozen=True)
class Schedule:
    """All parameters of the curves; saved with a checkpoint and compared on resume."""

    max_lr: float
    min_lr: float
    warmup: float  # samples
    decay: float  # samples
    style: str
    start_wd: float
    end_wd: float
    wd_samples: int
    wd_style: str
    init_lr: float = 0.0
    wsd_samples: float = 0  # length of the final decay
    wsd_style: str = "exponential"
    # Where the decay follows tokens: --seq-length-schedule, and the samples of its steps.
    lengths: str = ""
    lengths_batch: int = 0
    warmup_unit: str = "samples"

    def counted(self, samples: float) -> float:
        """Return the tokens that so many samples give, or their number where it is what counts."""
        if not self.lengths:
            return samples
        return self.lengths_batch * read_lengths(self.lengths).tokens(samples / self.lengths_batch)

    def samples_of(self, counted: float) -> float:
        """Return the samples that give so many tokens: the inverse of `counted`."""
        if not self.lengths:
            return counted
        return self.lengths_batch * read_lengths(self.lengths).steps(counted / self.lengths_batch)

    def lr(self, samples: float, tokens: float | None = None) -> float:
        """Return the rate after so many samples, which gave these tokens.

        Without `tokens` they are those of the schedule's first steps. Steps that were skipped, or
        taken before this schedule of lengths was given, make a difference.
        """
        # Megatron's formulas, in its order of operations.
        now, warmup = self.counted(samples), self.counted(self.warmup)
        if self.lengths and tokens is not None:
            now = tokens
        risen, whole = (now, warmup) if self.warmup_unit == "tokens" else (samples, self.warmup)
        if self.warmup > 0 and risen <= whole:
            return self.init_lr + (self.max_lr - self.init_lr) * risen / whole
        if self.style == "constant":
            return self.max_lr
        if now > self.counted(self.decay):
            return self.min_lr
        if self.style == "inverse-square-root":
            fallen = self.max_lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(now, 1))
            return max(self.min_lr, fallen)
        return self.min_lr + (self.max_lr - self.min_lr) * self._left(now, warmup)

    def _left(self, now: float, warmup: float) -> float:
        """Return the position between the lowest rate (0) and the highest (1)."""
        style = self.style
        # `ratio` is the part of the fall that is over.
        if style == "WSD":  # stable, then a final decay in a style of its own
            style = self.wsd_style
            begin = self.counted(self.decay - self.wsd_samples)
            ratio = max(now - begin, 0) / (self.counted(self.decay) - begin)
        else:
            # A warm-up in samples may have given fewer tokens than its samples give by `counted`.
            ratio = max(now - warmup, 0) / (self.counted(self.decay) - warmup)
        if style == "exponential":
            return 2.0 * math.pow(0.5, ratio) - 1.0
        if style == "minus_sqrt":
            return 1 - math.sqrt(ratio)
        if style == "linear":
            return 1 - ratio
        return 0.5 * (math.cos(math.pi * ratio) + 1)

    def wd(self, samples: float, tokens: float | None = None) -> float:
        # In proportion to the rate, so that rate x decay falls as its square.
        if self.wd_style == "rate":
            return self.end_wd * (self.lr(samples, tokens) / self.max_lr) if self.max_lr else 0.0
        if self.wd_style == "constant" or samples > self.wd_samples:
            return self.end_wd
        # A ramp, linear or of a cosine.
        ratio = samples / self.wd_samples
        grown = ratio
        if self.wd_style != "linear":
            grown = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1)
        return self.start_wd + (self.end_wd - self.start_wd) * grown


def build_schedule(c: TrainConfig) -> Schedule:
    o = c.optimizer
    ramp = o.ramps_decay
    by_samples = o.lr_warmup_iters or o.lr_warmup_samples
    return Schedule(
        max_lr=o.lr or 0.0,
        min_lr=o.min_lr,
        warmup=c.warmup_samples,
        decay=c.decay_samples,
        style=o.lr_decay_style,
        start_wd=(o.start_weight_decay or 0.0) if ramp else o.weight_decay,
        end_wd=(o.end_weight_decay or 0.0) if ramp else o.weight_decay,
        wd_samples=c.samples or c.steps * c.global_batch,
        wd_style=o.weight_decay_incr_style,
        init_lr=o.lr_warmup_init,
        wsd_samples=c.wsd_samples,
        wsd_style=o.lr_wsd_decay_style,
        lengths=str(c.training.seq_length_schedule) if c.decays_by_tokens else "",
        lengths_batch=c.global_batch if c.decays_by_tokens else 0,
        warmup_unit="tokens" if c.decays_by_tokens and not by_samples else "samples",
    )


class ScheduleValue(NamedTuple):
    """How a field of Schedule is named when a run is resumed."""

    title: str  # in Megatron's log
    flags: str  # the flags that set it
    length: str = ""  # name in an error, of a value counted in samples
    is_megatrons: bool = True  # otherwise it is logged only if it differs


VALUES = {
    "max_lr": ScheduleValue("learning rate", "{lr}"),
    "min_lr": ScheduleValue("minimum learning rate", "{min_lr}"),
    "warmup": ScheduleValue(
        "warmup iterations",
        "{lr_warmup_fraction}, -iters or -samples",
        length="length of the warm-up",
    ),
    "decay": ScheduleValue(
        "total number of iterations",
        "{lr_decay_iters} or -samples, or {global_batch_size}",
        length="length of the learning rate's decay",
    ),
    "style": ScheduleValue("learning rate decay style", "{lr_decay_style}"),
    "start_wd": ScheduleValue("start weight decay", "{weight_decay} or {start_weight_decay}"),
    "end_wd": ScheduleValue("end weight decay", "{weight_decay} or {end_weight_decay}"),
    "wd_samples": ScheduleValue(
        "total number of weight decay iterations",
        "{train_iters}, {train_samples} or {global_batch_size}",
        length="length of the weight decay's ramp",
    ),
    "wd_style": ScheduleValue("weight decay incr style", "{weight_decay_incr_style}"),
    "init_lr": ScheduleValue("initial learning rate", "{lr_warmup_init}", is_megatrons=False),
    "wsd_samples": ScheduleValue(
        "WSD decay",
        "{lr_wsd_decay_iters} or -samples",
        length="length of WSD's decay",
        is_megatrons=False,
    ),
    "wsd_style": ScheduleValue("WSD decay style", "{lr_wsd_decay_style}", is_megatrons=False),
    # What follows says how samples are counted in tokens.
    "lengths": ScheduleValue(
        "lengths of samples in a decay by tokens", "{seq_length_schedule}", is_megatrons=False
    ),
    "lengths_batch": ScheduleValue(
        "batch in a decay by tokens", "{global_batch_size}", is_megatrons=False
    ),
    "warmup_unit": ScheduleValue(
        "unit of the warm-up", "{lr_warmup_tokens} or -samples", is_megatrons=False
    ),
}


def warn_of_idle_steps(
    s: Schedule,
    c: TrainConfig,
    total: int,
    iteration: int = 0,
    consumed: int = 0,
    scheduled: int = 0,
    tokens: int | None = None,
) -> list[str]:
    """Return a warning if steps to come run at learning rate 0, or the run ends within its warm-up.

    `total` counts all steps of the run, the other numbers what was done before: steps, samples, and
    the schedule's samples and tokens. The first step of a warm-up is at rate 0 by design and does
    not count.
    """
    if c.optimizer.lr is None or c.training.skip_train:
        return []
    size = c.global_batch
    # The tokens that were read beyond those that this schedule of lengths would have given.
    more = tokens - s.counted(scheduled) if s.lengths and tokens is not None else 0
    decay = s.samples_of(s.counted(s.decay) - more) if more else s.decay
    # The first number of samples at which the rate is 0. The inverse square root falls to the
    # lowest rate only after the last sample of the decay; the others reach it there.
    never = 1 << 62
    zero: float
    if not s.max_lr:
        zero = 0
    elif s.min_lr or s.style == "constant":
        zero = never
    else:
        zero = decay + (s.style == "inverse-square-root")
    # The first step at this rate: one by one while the batch grows, then by division.
    step = iteration
    now = scheduled
    while step < total and now < zero:
        batch = c.batch(consumed - scheduled + now)
        if batch >= size:
            break
        step += 1
        now += batch
    first = min(total, step + max(0, math.ceil((zero - now) / size)))
    by_steps = c.samples is None
    override = ", with --override-opt_param-scheduler" if iteration else ""
    if first < total:
        if first == iteration:
            which = f"all {total - iteration:,} steps"
        else:
            which = f"steps {first + 1:,} to {total:,} ({total - first:,} steps)"
        why = "--lr is 0"
        if s.max_lr:
            flag = f"--lr-decay-iters {total}" if by_steps else f"--lr-decay-samples {c.samples}"
            if s.lengths:
                flag = f"--lr-decay-tokens {c.tokens_of(total * size) + more:.0f}"
            why = f"the decay ends after {decay / size:,.10g} steps and --min-lr is 0; give {flag} or a --min-lr above 0"
        return [f"{which} would run at learning rate 0: {why}{override}"]
    # A warm-up that outlasts the run.
    end = now + (total - step) * size
    if iteration < total and s.init_lr < s.max_lr and end <= s.warmup:
        flag = f"--lr-warmup-samples {max(1, end // 10)}"
        if by_steps:
            flag = f"--lr-warmup-iters {max(1, total // 10)}"
        share = c.optimizer.lr_warmup_fraction
        now_by = ""
        if share:
            now_by = f" (now --lr-warmup-fraction {share:g} of {s.decay / size:,.10g} steps)"
        return [
            f"the run ends within its warm-up: it has {total:,} steps, the warm-up {s.warmup / size:,.10g}, so the "
            f"learning rate only reaches {s.lr(end):.3g} of --lr {s.max_lr:g}; give, say, {flag}{override}{now_by}"
        ]
    return []


def resume_schedule(
    ours: Schedule, saved: dict[str, Any], c: TrainConfig
) -> tuple[Schedule, list[str]]:
    """Return the schedule to continue with and Megatron's nine log lines.

    A difference raises SettingsError unless one of the two flags decides which value holds.
    """
    lines = []
    different = []
    values = {}
    before = Schedule(**saved)
    overrides = c.optimizer.override_opt_param_scheduler
    takes_saved = c.optimizer.use_checkpoint_opt_param_scheduler
    has_ramp = (before if takes_saved else ours).wd_style in DECAY_RAMPS
    for name, value in VALUES.items():
        new = getattr(ours, name)
        old = getattr(before, name)
        # Megatron's log has nine lines; other values have one only where they differ and matter.
        is_used = "WSD" in (ours.style, before.style) or not name.startswith("wsd")
        if not value.is_megatrons and (new == old or not is_used):
            continue
        if overrides:
            values[name] = new
            lines.append(f" > overriding {value.title} value to {new}")
            continue
        # Without a ramp the weight decay's length says nothing: ours may differ, and holds.
        matters = name != "wd_samples" or has_ramp
        if not is_same_length(name, before, ours) and matters and not takes_saved:
            different.append(describe_difference(name, before, ours, c))
        values[name] = old if matters else new
        lines.append(f" > using checkpoint value {old} for {value.title}")
    # One error lists all differences, and the flags that decide between the two schedules.
    if different:
        head = "the schedule differs from the checkpoint's"
        override = "add {override_opt_param_scheduler=True}"
        if ours.decay > before.decay:
            head = f"to train longer, {override} (this stretches the decay); {head}"
        saved_one = "with the checkpoint's, {use_checkpoint_opt_param_scheduler=True}"
        ways = f"to continue with these settings, {override}; {saved_one}"
        anew = "to begin anew from the checkpoint's weights, add {finetune=True}, with a {save} of its own"
        raise SettingsError("\n  ".join([f"{head}:", *different, ways, anew]))
    return dataclasses.replace(ours, **values), lines


def is_same_length(name: str, before: Schedule, ours: Schedule) -> bool:
    """Return whether a field is the same in both.

    In a decay by tokens lengths are the same if they have as many tokens: these are other samples
    where the lengths of samples differ, which is a difference of its own.
    """
    old, new = getattr(before, name), getattr(ours, name)
    if old == new or not (before.lengths and ours.lengths):
        return bool(old == new)
    in_tokens = ["decay"]
    if before.warmup_unit == ours.warmup_unit == "tokens":
        in_tokens.append("warmup")
    return name in in_tokens and math.isclose(before.counted(old), ours.counted(new))


def describe_difference(name: str, before: Schedule, ours: Schedule, c: TrainConfig) -> str:
    """Return both values of a field that differs, and the flags that set it."""
    value = VALUES[name]
    size = c.global_batch
    old = getattr(before, name)
    new = getattr(ours, name)
    flags = value.flags

    def show(x: Any) -> str:
        return f"{x:,.10g} samples = {x / size:,.10g} steps of {size}" if value.length else f"{x}"

    if name == "decay" and before.lengths:
        flags = f"{{lr_decay_tokens={before.counted(old):.0f}}} keeps the checkpoint's"
    elif name == "decay" and c.samples is not None:
        flags = f"{{lr_decay_samples={old}}} keeps the checkpoint's"
    elif name == "decay" and old % size == 0:
        flags = f"{{lr_decay_iters={old // size}}} keeps the checkpoint's"
    if name == "decay" and new > old and not before.min_lr and before.style != "constant":
        flags += ", but every step after it runs at learning rate 0, since {min_lr} is 0"
    title = value.length or value.title
    return f"{title}: the checkpoint has {show(old)}, the settings say {show(new)} ({flags})"
