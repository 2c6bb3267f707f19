"""Check the batches, the length of a run and the schedule of its updates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from meshwright.config.check_values import out_of_bounds
from meshwright.config.problem import Problem, missing, named, stated, with_value
from meshwright.config.schema import LENGTHS, Optimizer, TrainConfig

# Of AdamW, with moments in 8 bits: the root of a second moment is 0 below 5e-9, and with a smaller
# epsilon an update would be divided by almost nothing.
LEAST_EPS = 1e-9
BY_STEPS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
IN_OTHER_UNITS = (
    "lr_decay_samples",
    "lr_decay_tokens",
    "lr_warmup_samples",
    "lr_warmup_tokens",
    "lr_wsd_decay_samples",
)
# What a batch that grows asks of the length of the run.
IN_SAMPLES = (
    "needs the length in samples: {train_samples} or {train_tokens} instead of {train_iters}"
)


def state_problems(o: Optimizer) -> list[Problem]:
    """Check that the format of the optimizer's state holds what the rule divides by."""
    if (
        o.optimizer_state_dtype == "float8"
        and o.optimizer not in ("sgd", "lion")
        and o.adam_eps < LEAST_EPS
    ):
        text = (
            f"{stated(o, 'adam_eps')} with {{optimizer_state_dtype=float8}}, whose second moments end at the square of "
            f"5e-9: give {with_value('adam_eps', LEAST_EPS)} or more, or {{optimizer_state_dtype=bfloat16}}"
        )
        return [Problem(("adam_eps", "optimizer_state_dtype"), text)]
    return []


def kept_by(batch: int, c: TrainConfig) -> int | None:
    """Return the largest micro-batch, up to that of `c`, of which its ranks can make a batch."""
    for micro in range(c.micro_batch, 0, -1):
        if batch % (micro * c.dp) == 0:
            return micro
    return None


def batch_problems(c: TrainConfig) -> list[Problem]:
    """Check micro-batch, accumulation, global batch, ramp-up and the length of the run."""
    t = c.training
    if out_of_bounds(t):
        return []  # reported already
    if t.micro_batch_size == "auto" and (problem := _measured_problem(c)):
        return [problem]
    # The length of the run has one unit.
    out = _sizes_problems(c)
    if not c.lengths:
        others = ", ".join(f"{{{name}}}" for name in LENGTHS[1:])
        text = f"{{train_iters}} is needed: how many steps (or one of {others})"
        out.append(Problem(LENGTHS, text, "missing"))
    elif len(c.lengths) > 1:
        both = "both" if len(c.lengths) == 2 else "all"
        text = f"{named(c.lengths)} {both} set the length of the run; give one"
        out.append(Problem(tuple(c.lengths), text))
    if t.step_batch_size_schedule is not None:
        out += batch_schedule_problems(c)
    elif t.rampup_batch_size:
        out += rampup_problems(c)
    if t.seq_length_schedule is not None:
        out += length_schedule_problems(c)
    if out or c.lengths[0] in ("train_iters", "train_epochs") or t.train_tokens == "auto":
        # Nothing reliable can be counted, or the length is in steps or not known yet.
        return out
    # A length in samples or tokens may be less than one step.
    if c.steps == 0:
        least = f"{c.batch(0)} samples"
        if c.lengths[0] == "train_tokens":
            least += f", which are {c.batch(0) * c.sample_length(1):,} tokens"
        text = f"{stated(t, c.lengths[0])} is less than one global batch of {least}; raise it, or lower the batch"
        out.append(Problem((c.lengths[0], "global_batch_size"), text))
    return out


def _measured_problem(c: TrainConfig) -> Problem | None:
    """Check that a micro-batch can be measured."""
    t = c.training
    p = c.parallel
    micro = "{micro_batch_size=auto}"
    # What is measured decides the number of micro-batches.
    if t.num_accumulation_steps is not None:
        both = f"{micro} contradicts {stated(t, 'num_accumulation_steps')}; give {{global_batch_size}} instead"
        return Problem(("micro_batch_size", "num_accumulation_steps"), both)
    if t.global_batch_size is None:
        return Problem(
            ("global_batch_size",), f"{micro} needs {{global_batch_size}}: samples of one step"
        )
    if p.model_ranks > 1 or p.zero_stage > 1:
        layout = (
            f"ZeRO {p.zero_stage}" if p.model_ranks == 1 else f"a model on {p.model_ranks} ranks"
        )
        text = f"{micro} with {layout}: each rank measures alone what fits; give a number"
        return Problem(("micro_batch_size",), text)
    return None


def _sizes_problems(c: TrainConfig) -> list[Problem]:
    """Check that micro-batches, accumulation steps and ranks make the global batch."""
    t = c.training
    micro = t.micro_batch_size
    batch = t.global_batch_size
    number = t.num_accumulation_steps
    ranks = f" x {c.dp} data-parallel ranks" if c.dp > 1 else ""
    if micro is None and not (batch and number):
        return [missing("micro_batch_size", "samples of one forward pass (or auto)")]
    of_batch = stated(t, "global_batch_size")
    # If all three are given, their product must be right.
    if isinstance(micro, int) and batch and number:
        product = micro * number * c.dp
        if product != batch:
            factors = f"{stated(t, 'micro_batch_size')} x {stated(t, 'num_accumulation_steps')}"
            text = f"{factors}{ranks} is {product}, not the {of_batch}; leave one of the three out"
            three = ("micro_batch_size", "num_accumulation_steps", "global_batch_size")
            return [Problem(three, text)]

    # Without a micro-batch, the number of them is what has to divide the batch.
    factor = "micro_batch_size"
    unit = c.micro_batch * c.dp
    if micro is None:
        factor = "num_accumulation_steps"
        unit = (number or 1) * c.dp
    if not batch or batch % unit == 0:
        return []
    divisor = stated(t, factor)
    if ranks:
        divisor += f"{ranks} = {unit}"
    text = f"{of_batch} is not a multiple of {divisor}; "
    if isinstance(micro, int) and (less := kept_by(batch, c)):
        text += f"{with_value('micro_batch_size', less)} keeps the batch and its losses, and "
    multiple = max(1, round(batch / unit))
    text += f"the nearest multiple is {multiple * unit}"
    return [Problem(("global_batch_size", factor), text)]


def rampup_problems(c: TrainConfig) -> list[Problem]:
    t = c.training
    batch = c.global_batch
    flag = stated(t, "rampup_batch_size")
    about = ("rampup_batch_size",)
    numbers = t.rampup_batch_size
    if len(numbers) != 3 or min(numbers) <= 0:
        return [Problem(about, f"{flag}: give three numbers above 0: START INCREMENT SAMPLES")]
    start, increment, samples = numbers
    unit = c.micro_batch * c.dp
    out = []
    if c.lengths == ["train_iters"]:
        out.append(Problem((*about, "train_iters"), f"{flag} {IN_SAMPLES}"))
    # The number of steps is found by walking them, so that it is bounded.
    steps = samples / start
    if steps > 10**6:
        text = f"{flag}: up to {steps:.0f} steps of ramp-up; give at most a million"
        out.append(Problem(about, text))
    elif start > batch or (batch - start) % increment:
        size = with_value("global_batch_size", batch)
        text = f"{flag}: {size} is never reached from {start} in steps of {increment}"
        out.append(Problem((*about, "global_batch_size"), text))
    elif start % unit or increment % unit:
        # auto counts as 1: a divisor of every size is chosen.
        factor = with_value("micro_batch_size", t.micro_batch_size or c.micro_batch)
        ranks = f" x {c.dp} data-parallel ranks = {unit}" if c.dp > 1 else ""
        text = f"{flag}: {start} and {increment} must be multiples of {factor}{ranks}"
        out.append(Problem((*about, "micro_batch_size"), text))
    return out


def batch_schedule_problems(c: TrainConfig) -> list[Problem]:
    t = c.training
    flag = stated(t, "step_batch_size_schedule")
    about = ("step_batch_size_schedule",)
    if t.rampup_batch_size:
        text = "{step_batch_size_schedule} contradicts {rampup_batch_size}; give only one of them"
        return [Problem((*about, "rampup_batch_size"), text)]
    starts, batches = zip(*c.batch_schedule, strict=True)
    out = []
    # Starts are in samples here: two in tokens may be within one sample.
    if starts[0] or not _grows(starts):
        text = f"{flag}: its tokens must begin with 0 and grow, by a sample of {c.data.seq_length} or more"
        out.append(Problem(about, text))
    if min(batches) < 1 or not _grows(batches):
        out.append(Problem(about, f"{flag}: its batches must grow, from 1"))
    if batches[-1] != c.global_batch:
        text = f"{flag} ends with a batch of {batches[-1]}, not of {c.global_batch}; leave {{global_batch_size}} out"
        out.append(Problem((*about, "global_batch_size"), text))
    if c.lengths == ["train_iters"]:
        out.append(Problem((*about, "train_iters"), f"{flag} {IN_SAMPLES}"))
    # This check comes last, since it is about batches that are right otherwise.
    unit = c.micro_batch * c.dp
    odd = [batch for batch in batches if batch % unit]
    if odd and not out:
        ranks = f" x {c.dp} data-parallel ranks = {unit}" if c.dp > 1 else ""
        text = f"{flag}: {odd[0]} is not a multiple of {stated(t, 'micro_batch_size')}{ranks}"
        out.append(Problem((*about, "micro_batch_size"), text))
    return out


def length_schedule_problems(c: TrainConfig) -> list[Problem]:
    """Check the lengths of samples; what ranks must divide them is checked with the layout."""
    t, d = c.training, c.data
    flag = stated(t, "seq_length_schedule")
    about = ("seq_length_schedule",)
    out = []
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if getattr(t, name):
            text = f"{{seq_length_schedule}} contradicts {{{name}}}: both make the first steps small; give one"
            out.append(Problem((*about, name), text))
    longest = max(c.sample_lengths)
    if d.seq_length is not None and longest > d.seq_length:
        text = f"{flag}: its {longest} tokens are above {stated(d, 'seq_length')}; let the lengths end with that"
        out.append(Problem((*about, "seq_length"), text))
    return out


def _grows(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def schedule_problems(c: TrainConfig, has_length: bool) -> list[Problem]:
    """Check the update and its schedule; `has_length`: the length of the run is known."""
    o = c.optimizer
    out = _rates_problems(c) + _units_problems(c)
    warmups = _warmups(o)
    if len(warmups) > 1:
        text = f"{named(sorted(warmups))} both set the warm-up; give one"
        out.append(Problem(tuple(warmups), text))
    # A decay in steps beside one of these mixes units, which is reported above.
    if o.lr_decay_samples and o.lr_decay_tokens:
        both = ("lr_decay_samples", "lr_decay_tokens")
        out.append(Problem(both, f"{named(both)} both set the decay; give one"))
    if o.muon_num_ns_steps >= 100:
        text = f"{stated(o, 'muon_num_ns_steps')} must be below 100; 5 are enough"
        out.append(Problem(("muon_num_ns_steps",), text))
    if o.muon_tp_mode == "blockwise":
        text = (
            "{muon_tp_mode=blockwise} would make the result depend on the layout; give distributed"
        )
        out.append(Problem(("muon_tp_mode",), text))
    # The parts of the schedule are compared in samples, which only valid settings have.
    if out or out_of_bounds(o) or not has_length or not c.steps:
        return out
    return _decay_problems(c, warmups) + _weight_decay_problems(o)


def _rates_problems(c: TrainConfig) -> list[Problem]:
    """Check the rates, and that each has something to move."""
    o = c.optimizer
    out = []
    if o.lr is None and not c.training.skip_train:
        out.append(missing("lr", "the peak learning rate"))
    # The curve runs between these and the peak. A peak of 0 trains nothing, and is allowed.
    for name in ("min_lr", "lr_warmup_init"):
        if o.lr is not None and getattr(o, name) > o.lr > 0:
            out.append(Problem((name, "lr"), f"{stated(o, name)} is above {stated(o, 'lr')}"))
    # The other rates follow the schedule as multiples of the peak.
    if o.lr == 0:
        for name in ("embedding_lr", "head_lr", "vector_lr"):
            if getattr(o, name):
                text = "follows the schedule of {lr}, which is 0; give {lr} a value, however small"
                out.append(Problem((name, "lr"), f"{stated(o, name)} {text}"))
    if o.head_lr is not None and not c.model.untie_embeddings_and_output_weights:
        text = (
            "{head_lr}: the output layer is the token table; give {embedding_lr}, or "
            "{untie_embeddings_and_output_weights=True} for a layer of its own"
        )
        out.append(Problem(("head_lr",), text))
    if o.cautious_weight_decay and o.optimizer == "sgd":
        text = "SGD adds its decay to the gradient; choose another {optimizer} or leave it out"
        out.append(
            Problem(
                ("cautious_weight_decay", "optimizer"), f"{{cautious_weight_decay=True}}: {text}"
            )
        )
    return out


def _units_problems(c: TrainConfig) -> list[Problem]:
    """Check that a run in steps has a schedule in steps, and one in samples or tokens none."""
    o = c.optimizer
    if c.training.seq_length_schedule is not None:
        # Steps have one size, which converts them. A warm-up in tokens needs the decay's clock.
        by_tokens = ("lr_warmup_tokens", "lr_decay_tokens")
        if o.lr_warmup_tokens and not o.lr_decay_tokens:
            text = "{lr_warmup_tokens} with {seq_length_schedule} needs {lr_decay_tokens} too; give both"
            return [Problem((*by_tokens, "seq_length_schedule"), text)]
        return []
    # Between steps and samples only a constant batch could convert.
    in_steps = "train_iters" in c.lengths
    misfits = IN_OTHER_UNITS if in_steps else BY_STEPS
    wrong = [name for name in misfits if getattr(o, name)]
    if not wrong or not c.lengths:
        return []
    advice = f"give all lengths in {'steps' if in_steps else 'samples'}"
    text = f"{named(wrong)} cannot be mixed with {{{c.lengths[0]}}}; {advice}"
    return [Problem((*wrong, c.lengths[0]), text)]


def _warmups(o: Optimizer) -> list[str]:
    """Return the settings that give the length of the warm-up."""
    lengths = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens")
    out = [name for name in lengths if getattr(o, name)]
    # The default of the lengths is 0, while a fraction of 0 is a length that was given.
    if o.lr_warmup_fraction is not None:
        out.append("lr_warmup_fraction")
    return out


def _decay_problems(c: TrainConfig, warmups: Sequence[str]) -> list[Problem]:
    """Check that the parts of the schedule fit into its length."""

    def length(samples: float) -> str:
        """Return a length in the unit of the run."""
        if c.samples is None:
            return f"{samples / c.global_batch:g} iterations"
        return f"{samples:g} samples"

    out = []
    if c.decay_samples <= c.warmup_samples:
        flag = warmups[0]
        text = f"the warm-up of {length(c.warmup_samples)} is not below the decay's {length(c.decay_samples)}"
        text += "; shorten it"
        fitting = math.ceil(c.decay_samples / c.global_batch) - 1
        if flag == "lr_warmup_iters" and fitting > 0:
            text += f" to {fitting} or less"
        out.append(Problem((flag,), f"{{{flag}}}: {text}"))
    # WSD's last part is within the decay, which begins after the warm-up.
    between = c.decay_samples - c.warmup_samples
    o = c.optimizer
    if o.lr_decay_style == "WSD" and not 0 < c.wsd_samples <= between:
        ways = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")
        given = [stated(o, name) for name in ways if getattr(o, name)]
        text = (
            f"{{lr_decay_style=WSD}} needs {{{ways[0]}}} or {{{ways[1]}}}, the length of its last part "
            "between the warm-up and the end of the decay"
        )
        if given:
            text = (
                f"{given[0]} is more than the {length(max(between, 0))} between the warm-up and the end of the decay; "
                "shorten it, or lengthen the decay"
            )
        out.append(Problem(("lr_decay_style", *ways), text))
    return out


def _weight_decay_problems(o: Optimizer) -> list[Problem]:
    """Check that a weight decay that changes has both ends, and one that does not has none."""
    ends = ("start_weight_decay", "end_weight_decay")
    if not o.ramps_decay:
        needed = "needs {weight_decay_incr_style=linear} or cosine"
        return [
            Problem((name,), f"{{{name}}} {needed}")
            for name in ends
            if getattr(o, name) is not None
        ]
    if o.start_weight_decay is None or o.end_weight_decay is None:
        text = f"{stated(o, 'weight_decay_incr_style')} needs {named(ends)}"
        return [Problem(("weight_decay_incr_style", *ends), text)]
    return []
