"""Predictions in words: the verdict on memory, the layout as flags, and tables."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.apps.plan.estimate import WITHIN
from meshwright.apps.plan.goodput import ExpectedGoodput, Interruptions
from meshwright.apps.plan.memory import can_measure
from meshwright.apps.plan.prediction import Prediction, find_machine
from meshwright.apps.plan.search import Found, Settings, least_change
from meshwright.base.device import NVIDIA
from meshwright.base.errors import UserError
from meshwright.base.progress import duration
from meshwright.base.records import align_columns
from meshwright.config import checks, flags
from meshwright.config.fields import spelling
from meshwright.config.schema import TrainConfig
from meshwright.model import counts
from meshwright.training.sizes import describe_layout, ranks_of_machine

# Settings of a layout, in the order of its flags.
LAYOUT = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_schedule",
    "context_parallel_size",
    "zero_stage",
    "cpu_optimizer",
    "micro_batch_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "fp16",
    "bf16",
    "fp8_format",
)
DAY = 86_400


def gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"


def giga(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"


def as_flags(settings: Mapping[str, Any]) -> str:
    """Return settings as words of a command line."""
    words = []
    for name, value in settings.items():
        flag = spelling(name)
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{flag[2:]}")
        else:
            words.append(f"{flag} {'none' if value is None else shlex.quote(str(value))}")
    return " ".join(words)


def layout_settings(config: TrainConfig) -> Settings:
    """Return the settings of a layout that are not the defaults of train, and the micro-batch."""
    # Only what differs is given, so the flags are those that a user would type.
    ours = flags.to_dict(config)
    defaults = flags.to_dict(TrainConfig())
    return {name: ours[name] for name in LAYOUT if ours[name] != defaults[name]}


def verdict(prediction: Prediction, search: bool = True) -> str:
    """Say whether a layout fits, and with `search` the least change that makes it fit."""
    sizes = f"{gib(prediction.need_of_device)} of {gib(prediction.machine.profile.memory_bytes)}"
    if prediction.machine.sharers > 1:
        sizes += f", which {prediction.machine.sharers} ranks of a machine share"
    if prediction.fits:
        return f"fits, {gib(prediction.left)} left: {sizes}"
    lack = f"does not fit: {sizes}, {gib(-prediction.left)} too much"
    if not search:
        return lack
    # Settings of the layout and formats are changed; the number of devices stays.
    found = least_change(prediction)
    if found is None:
        return f"{lack}; no change of layout makes it fit: take more devices, or a smaller model"
    settings, changed = found
    change = f"{as_flags(settings)} ({gib(changed.left)} left)"
    return f"{lack}; the least change that makes it fit: {change}"


def predict_here(
    config: TrainConfig,
    device: str | None,
    vocabulary: int = 50_257,
    ranks_here: int | None = None,
    measures: bool = False,
) -> Prediction | None:
    """Predict a run on a device, by default this machine's; None without a profile of it.

    `ranks_here` are the ranks of one machine, by default those that the settings say.
    With `measures` its memory is measured if that is possible: not where a run trains.
    """
    kind = config.parallel.device.partition(":")[0]
    if checks.problems(config, needs_data=False):
        return None
    # Accelerators of other makers have no profile.
    if device is None and kind not in ("auto", NVIDIA, "cpu"):
        return None
    try:
        machine = find_machine(device or ("cpu" if kind == "cpu" else None))
        machine = machine.shared_by(ranks_here or ranks_of_machine(config))
        prediction = Prediction(config, machine, vocabulary)
        if measures:
            prediction = prediction.measured()
        # A GPU is asked for, and this machine has none.
        if device is None and kind == NVIDIA and machine.profile.kind == "cpu":
            return None
        return prediction if prediction.ranks and prediction.time else None
    except UserError:
        if device is not None:
            raise
        return None


def verdict_here(prediction: Prediction) -> str:
    """Return the verdict of a plan on this machine's devices, with the time of a step."""
    seconds = f"a step takes about {duration(prediction.time.seconds)}"
    return f"plan on {prediction.machine.profile.title}: {verdict(prediction)}; {seconds}"


def memory_lines(prediction: Prediction) -> list[str]:
    """Return the memory of the fullest rank by kind, and the verdict."""
    rank = prediction.fullest
    count = len(prediction.ranks)
    memory = prediction.ranks[rank]
    place = f", pipeline rank {rank} of {count}" if count > 1 else ""
    how = "measured on tensors without memory"
    if not prediction.is_measured:
        how = estimated_how(prediction)
    rows = [(kind, gib(size)) for kind, size in memory.kinds.items() if size]
    rows += [
        ("allocated", gib(memory.allocated)),
        ("reserved", gib(memory.reserved)),
        ("context", gib(memory.context)),
    ]
    head = f"memory of the fullest rank{place}, {how}"
    return [head, *indented(rows), f"  {verdict(prediction)}"]


def time_how(prediction: Prediction) -> str:
    """Return where the operations of a step come from."""
    if prediction.operations is None:
        return "estimated by closed forms"
    return "from its operations, measured"


def estimated_how(prediction: Prediction) -> str:
    """Return how near an estimate is, and what a better one needs."""
    how = f"estimated, within about {100 * WITHIN:g} %"
    if prediction.machine.profile.kind == "cpu" or can_measure():
        return how
    return f"{how}; install torch to measure it"


def indented(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines with the first column on the left and numbers on the right."""
    names = align_columns([row[:1] for row in rows])
    numbers = align_columns([row[1:] for row in rows], to_the_right=True)
    width = max(map(len, names))
    lines = []
    for name, rest in zip(names, numbers, strict=True):
        lines.append(f"  {name.ljust(width)}  {rest}")
    return lines


def sent_lines(prediction: Prediction) -> list[str]:
    """Return the bytes that a rank sends in a step, by dimension."""
    rows = [(name, giga(size)) for name, size in prediction.time.bytes_sent.items()]
    return ["sent by a rank in a step", *indented(rows)] if rows else []


def time_lines(prediction: Prediction, length: float | None, price: float | None) -> list[str]:
    """Return the time of a step and of the run; `length` is in steps."""
    time = prediction.time
    c = prediction.config
    rows = [(name, f"{seconds:,.3f} s") for name, seconds in time.parts.items()]
    rows += [
        ("step", f"{time.seconds:,.3f} s"),
        ("tokens per second", f"{time.tokens_per_second:,.0f}"),
        ("MFU", f"{100 * time.mfu:.1f} %"),
    ]
    if c.parallel.pipeline_model_parallel_size > 1:
        rows.append(("waiting in the pipeline", f"{100 * time.bubble:.1f} %"))
    lines = [f"time, {time_how(prediction)}", *indented(rows)]
    if length is None:
        return lines

    # The whole run, if its length is known. Its first steps may be smaller than the one planned.
    tokens = c.tokens_of(c.samples or length * c.global_batch) / 1e9
    seconds = length * time.seconds
    days = seconds / DAY
    hours = seconds * c.world / 3600
    most = "at most " if len(c.sample_lengths) > 1 or c.batch(0) < c.global_batch else ""
    run = f"  {length:,.0f} steps, {tokens:,.1f} billion tokens: {most}{days:,.2f} days"
    run += f", {hours:,.0f} device-hours"
    if price is not None:
        run += f", {hours * price:,.0f} at {price:g} an hour"
    return [*lines, run]


def layout_line(prediction: Prediction) -> str:
    """Return the layout in words."""
    c = prediction.config
    p = c.parallel
    # Each part is said only where it makes a difference.
    parts = [describe_layout(c)]
    if p.pipeline_model_parallel_size > 1:
        several = f", {c.chunks} stretches of layers on each rank" if c.chunks > 1 else ""
        parts.append(f"schedule {p.pipeline_schedule}{several}")
    if p.sequence_parallel and p.tensor_model_parallel_size > 1:
        parts.append("sequence parallel")
    if c.dp * p.context_parallel_size > 1:
        parts.append(f"ZeRO {p.zero_stage}")
    count = c.micro_batches(c.global_batch)
    parts.append(f"{count:,} micro-batch{'es' * (count != 1)} of {c.micro_batch}")
    if c.training.recompute_granularity:
        parts.append(f"recompute {c.training.recompute_granularity}")
    dtype = c.precision.dtype
    if c.precision.fp8_format:
        dtype = f"fp8 {c.precision.fp8_format} in {dtype}"
    return "; ".join([*parts, dtype])


def table_of(predictions: Sequence[Prediction]) -> list[list[str]]:
    """Return a head and a row for each layout."""
    head = "TP SP PP chunks schedule CP DP ZeRO micro recompute fp8 step tokens/s MFU memory"
    rows = [head.split()]
    for one in predictions:
        c = one.config
        p = one.config.parallel
        time = one.time
        tp = p.tensor_model_parallel_size
        pp = p.pipeline_model_parallel_size
        rows.append(
            [
                str(tp),
                "yes" if p.sequence_parallel and tp > 1 else "-",
                str(pp),
                str(c.chunks),
                p.pipeline_schedule if pp > 1 else "-",
                str(p.context_parallel_size),
                str(c.dp),
                str(p.zero_stage),
                str(c.micro_batch),
                c.training.recompute_granularity or "-",
                c.precision.fp8_format or "-",
                f"{time.seconds:,.3f} s",
                f"{time.tokens_per_second:,.0f}",
                f"{100 * time.mfu:.1f} %",
                gib(one.need),
            ]
        )
    return rows


def found_lines(found: Found, keep: int) -> list[str]:
    """Return the table of a search, what was refused and why."""
    best = found.fitting[:keep]
    lines = ["", f"the best {len(best)} layouts", *align_columns(table_of(best), True)]
    lines.append(
        f"{found.too_large:,} layouts that may be as fast do not fit; {found.slower:,} are estimated to be slower, or "
        "were not needed"
    )
    refused = found.refusals.listed()
    if refused:
        total = sum(count for count, _ in refused)
        lines.append(f"refused: {total:,} combinations, each with all that it leads to")
        lines += [f"  {count:>6,}  {reason}" for count, reason in refused]
    return lines


def title(prediction: Prediction) -> str:
    """Return the size of the model and the devices in a few words."""
    c = prediction.config
    # Learned positions count as parameters; without a number of them there is one for each token.
    positions = c.model.max_position_embeddings or c.data.seq_length or 0
    size = counts.parameters(c.model, prediction.vocabulary, positions)
    devices = f"{c.world:,} x {prediction.machine.profile.title}"
    if (sharers := prediction.machine.sharers) > 1:
        devices = (
            f"{c.world:,} ranks, {sharers} on each machine: {prediction.machine.profile.title}"
        )
    return f"{size:,} parameters on {devices}"


def head_lines(prediction: Prediction) -> list[str]:
    """Return what is planned: model, devices, links and layout."""
    c = prediction.config
    links = prediction.machine.links
    kind = "ranks" if prediction.machine.sharers > 1 else "devices"
    speeds = f"{links.within.bandwidth / 1e9:g} GB/s within a machine"
    if c.world > links.gpus_per_node:
        speeds += f", {links.between.bandwidth / 1e9:g} GB/s to others"
    return [
        title(prediction),
        f"vocabulary {prediction.vocabulary:,}, padded to {prediction.padded:,}",
        f"{c.global_batch:,} samples of {c.data.seq_length:,} tokens a step",
        *([f"{links.gpus_per_node} {kind} a machine: {speeds}"] if c.world > 1 else []),
        layout_line(prediction),
    ]


def checkpoint_lines(losses: Interruptions, goodput: ExpectedGoodput, size: int) -> list[str]:
    """Return the size and stall of a checkpoint, and what failures cost."""
    rows = [
        ("checkpoint", giga(size)),
        ("training waits for it", f"{losses.stall:,.1f} s"),
        ("written after", f"{losses.stall + losses.written:,.1f} s"),
        ("hours between failures", f"{goodput.hours_between_failures:,.1f}"),
        ("best save interval", f"{goodput.best_interval:,} steps"),
        ("goodput", f"{100 * goodput.share:.1f} %"),
    ]
    if goodput.failures is not None:
        # In the table they follow the hours between failures.
        rows.insert(4, ("failures until the end", f"{goodput.failures:,.1f}"))
    return ["checkpoints and failures", *indented(rows)]


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON has it: sizes in bytes, times in seconds."""
    memory = prediction.ranks[prediction.fullest]
    return {
        "layout": layout_settings(prediction.config),
        "data_parallel_size": prediction.config.dp,
        "fits": prediction.fits,
        "left_bytes": prediction.left,
        "fullest_rank": prediction.fullest,
        "memory_is": "measured" if prediction.is_measured else "estimated",
        "memory": {
            "kinds": memory.kinds,
            "allocated": memory.allocated,
            "reserved": memory.reserved,
            "context": memory.context,
            "total": memory.total,
        },
        "time_is": "estimated" if prediction.operations is None else "measured",
        "time": dataclasses.asdict(prediction.time),
    }
