"""Check the batches, the length of a run and the schedule of its updates."""

from __future__ import annotations

import itertools

from meshwright.config.check_values import out_of_bounds
from meshwright.config.fields import spelling
from meshwright.config.schema import LENGTHS, Optimizer, TrainConfig

LEAST_EPS = 1e-9  # of AdamW, with moments in 8 bits


def state_problems(o: Optimizer) -> list[str]:
    """Check that the format of the optimizer's state holds what the rule divides by."""
    if o.optimizer_state_dtype == "float8" and o.optimizer not in ("sgd", "lion") and o.adam_eps < LEAST_EPS:
        return [
            f"--adam-eps {o.adam_eps:g} with --optimizer-state-dtype float8, whose second moments end at the square of "
            f"5e-9: give --adam-eps {LEAST_EPS:g} or more, or --optimizer-state-dtype bfloat16"
        ]
    return []


def kept_by(batch: int, c: TrainConfig) -> int | None:
    """Return the largest micro-batch, up to that of `c`, of which its ranks can make a batch."""
    return next((micro for micro in range(c.micro_batch, 0, -1) if batch % (micro * c.dp) == 0), None)


def batch_problems(c: TrainConfig) -> list[str]:
    """Check micro-batch, accumulation, global batch, ramp-up and the length of the run."""
    t = c.training
    micro, batch, number = t.micro_batch_size, t.global_batch_size, t.num_accumulation_steps
    if out_of_bounds(t):
        return []  # reported already
    if micro == "auto" and number is not None:
        return [
            f"--micro-batch-size auto contradicts --num-accumulation-steps {number}; give --global-batch-size instead"
        ]
    if micro == "auto" and batch is None:
        return ["--micro-batch-size auto needs --global-batch-size: samples of one step"]
    p = c.parallel
    if micro == "auto" and (p.model_ranks > 1 or p.zero_stage > 1):
        layout = f"ZeRO {p.zero_stage}" if p.model_ranks == 1 else f"a model on {p.model_ranks} ranks"
        return [f"--micro-batch-size auto with {layout}: each rank measures alone what fits; give a number"]
    out = []
    ranks = f" x {c.dp} data-parallel ranks" if c.dp > 1 else ""
    if micro is None and not (batch and number):
        out.append("--micro-batch-size is needed: samples of one forward pass (or auto)")
    elif isinstance(micro, int) and batch and number and micro * number * c.dp != batch:
        out.append(
            f"--micro-batch-size {micro} x --num-accumulation-steps {number}{ranks} is {micro * number * c.dp}, "
            f"not the --global-batch-size {batch}; leave one of the three out"
        )
    elif batch and batch % (unit := (number or 1 if micro is None else c.micro_batch) * c.dp):
        product = f"--num-accumulation-steps {number}" if micro is None else f"--micro-batch-size {micro}"
        product += f"{ranks} = {unit}" if ranks else ""
        nearest = max(1, round(batch / unit)) * unit
        less = kept_by(batch, c) if isinstance(micro, int) else None
        keeps = f"--micro-batch-size {less} keeps the batch and its losses, and " if less else ""
        out.append(
            f"--global-batch-size {batch} is not a multiple of {product}; {keeps}the nearest multiple is {nearest}"
        )
    if not c.lengths:
        others = ", ".join(map(spelling, LENGTHS[1:]))
        out.append(f"--train-iters is needed: how many steps (or one of {others})")
    elif len(c.lengths) > 1:
        both = "both" if len(c.lengths) == 2 else "all"
        out.append(f"{' and '.join(map(spelling, c.lengths))} {both} set the length of the run; give one")
    if t.step_batch_size_schedule is not None:
        out += batch_schedule_problems(c)
    elif t.rampup_batch_size:
        out += rampup_problems(c)
    is_counted = not out and c.lengths[0] not in ("train_iters", "train_epochs") and t.train_tokens != "auto"
    if is_counted and c.steps == 0:
        length = f"{spelling(c.lengths[0])} {getattr(t, c.lengths[0])}"
        least = f"{c.batch(0)} samples"
        if c.lengths[0] == "train_tokens":
            least += f", which are {c.batch(0) * (c.data.seq_length or 0):,} tokens"
        out.append(f"{length} is less than one global batch of {least}; raise it, or lower the batch")
    return out


def rampup_problems(c: TrainConfig) -> list[str]:
    ramp, batch, micro = c.training.rampup_batch_size, c.global_batch, c.micro_batch
    flag = f"--rampup-batch-size {' '.join(map(str, ramp))}"
    if len(ramp) != 3 or min(ramp) <= 0:
        return [f"{flag}: give three numbers above 0: START INCREMENT SAMPLES"]
    start, increment, samples = ramp
    out = []
    if c.lengths == ["train_iters"]:
        out.append(f"{flag} needs the length in samples: --train-samples or --train-tokens instead of --train-iters")
    if samples / start > 10**6:
        out.append(f"{flag}: up to {samples / start:.0f} steps of ramp-up; give at most a million")
    elif start > batch or (batch - start) % increment:
        out.append(f"{flag}: --global-batch-size {batch} is never reached from {start} in steps of {increment}")
    elif start % (micro * c.dp) or increment % (micro * c.dp):
        # auto counts as 1: a divisor of every size is chosen.
        ranks = f" x {c.dp} data-parallel ranks = {micro * c.dp}" if c.dp > 1 else ""
        unit = f"--micro-batch-size {c.training.micro_batch_size or micro}{ranks}"
        out.append(f"{flag}: {start} and {increment} must be multiples of {unit}")
    return out


def batch_schedule_problems(c: TrainConfig) -> list[str]:
    t = c.training
    flag = f"--step-batch-size-schedule {t.step_batch_size_schedule!r}"
    if t.rampup_batch_size:
        return ["--step-batch-size-schedule contradicts --rampup-batch-size; give only one of them"]
    try:
        starts, batches = zip(*c.batch_schedule or [(0, 0)], strict=True)
    except ValueError as error:
        return [f"{flag}: {error}; write for example '0:768 250B:1536'"]
    out = []
    if starts[0] or any(a >= b for a, b in itertools.pairwise(starts)):
        out.append(f"{flag}: its tokens must begin with 0 and grow, by a sample of {c.data.seq_length} or more")
    if min(batches) < 1 or any(a >= b for a, b in itertools.pairwise(batches)):
        out.append(f"{flag}: its batches must grow, from 1")
    if batches[-1] != c.global_batch:
        out.append(f"{flag} ends with a batch of {batches[-1]}, not of {c.global_batch}; leave --global-batch-size out")
    if c.lengths == ["train_iters"]:
        out.append(f"{flag} needs the length in samples: --train-samples or --train-tokens instead of --train-iters")
    unit = c.micro_batch * c.dp
    if not out and (odd := [n for n in batches if n % unit]):
        ranks = f" x {c.dp} data-parallel ranks = {unit}" if c.dp > 1 else ""
        out.append(f"{flag}: {odd[0]} is not a multiple of --micro-batch-size {t.micro_batch_size}{ranks}")
    return out


def schedule_problems(c: TrainConfig, has_length: bool) -> list[str]:
    """Check the update and its schedule; `has_length`: the length of the run is known."""
    o, t = c.optimizer, c.training
    out = []
    if o.lr is None and not t.skip_train:
        out.append("--lr is needed: the peak learning rate")
    for name in ("min_lr", "lr_warmup_init"):
        if o.lr is not None and getattr(o, name) > o.lr > 0:
            out.append(f"{spelling(name)} {getattr(o, name)} is above --lr {o.lr}")
    if o.head_lr is not None and not c.model.untie_embeddings_and_output_weights:
        out.append(
            "--head-lr: the output layer is the token table; give --embedding-lr, or "
            "--untie-embeddings-and-output-weights for a layer of its own"
        )
    if o.cautious_weight_decay and o.optimizer == "sgd":
        out.append(
            "--cautious-weight-decay: SGD adds its decay to the gradient; choose another --optimizer or leave it out"
        )
    by_steps = [n for n in ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters") if getattr(o, n)]
    names = "lr_decay_samples lr_decay_tokens lr_warmup_samples lr_warmup_tokens lr_wsd_decay_samples"
    by_samples = [n for n in names.split() if getattr(o, n)]
    in_steps = "train_iters" in c.lengths
    wrong = by_samples if in_steps else by_steps
    if wrong and c.lengths:
        length, unit = spelling(c.lengths[0]), "steps" if in_steps else "samples"
        out.append(f"{' and '.join(map(spelling, wrong))} cannot be mixed with {length}; give all lengths in {unit}")
    warmups = [n for n in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens") if getattr(o, n)]
    warmups += ["lr_warmup_fraction"] * (o.lr_warmup_fraction is not None)
    if len(warmups) > 1:
        out.append(f"{' and '.join(map(spelling, sorted(warmups)))} both set the warm-up; give one")
    if o.lr_decay_samples and o.lr_decay_tokens:
        out.append("--lr-decay-samples and --lr-decay-tokens both set the decay; give one")
    if o.muon_num_ns_steps >= 100:
        out.append(f"--muon-num-ns-steps {o.muon_num_ns_steps} must be below 100; 5 are enough")
    if o.muon_tp_mode == "blockwise":
        out.append("--muon-tp-mode blockwise would make the result depend on the layout; give distributed")
    if out or wrong or out_of_bounds(o) or not has_length or not c.steps:
        return out
    if c.decay_samples <= c.warmup_samples:
        decay, warmup = (
            f"{x / c.global_batch:g} iterations" if c.samples is None else f"{x:g} samples"
            for x in (c.decay_samples, c.warmup_samples)
        )
        fitting = (c.decay_samples - 1) // c.global_batch
        most = f" to {fitting} or less" if warmups[0] == "lr_warmup_iters" and fitting > 0 else ""
        out.append(
            f"{spelling(warmups[0])}: the warm-up of {warmup} is not below the decay's {decay}; shorten it{most}"
        )
    if o.lr_decay_style == "WSD" and not 0 < c.wsd_samples <= c.decay_samples - c.warmup_samples:
        out.append(
            "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples, the length of its last part "
            "between the warm-up and the end of the decay"
        )
    if not o.ramps_decay:
        for name in ("start_weight_decay", "end_weight_decay"):
            if getattr(o, name) is not None:
                out.append(f"{spelling(name)} needs --weight-decay-incr-style linear or cosine")
    elif o.start_weight_decay is None or o.end_weight_decay is None:
        style = f"--weight-decay-incr-style {o.weight_decay_incr_style}"
        out.append(f"{style} needs --start-weight-decay and --end-weight-decay")
    return out
