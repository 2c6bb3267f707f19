"""Closed forms for a search: memory and time of a layout, to some percent. No torch.

A rank holds weights, gradients and optimizer state throughout, which training/sizes.py knows to the
byte. What passes keep is so much of a layer for each micro-batch in flight, and what the fullest
moment needs beside that. Layouts that differ in one setting share most of these parts, so each part
is computed once: `Run` is what a search keeps, `LayoutSizes` what it changes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwright.apps.plan import timing, traffic
from meshwright.apps.plan.memory import RankMemory, batch_bytes, buffer_bytes, context_bytes
from meshwright.apps.plan.timing import Step, StepTerms
from meshwright.base.device import NVIDIA
from meshwright.base.device_profiles import DeviceProfile, Links
from meshwright.config.fields import with_settings
from meshwright.config.schema import Model, Parallel, TrainConfig
from meshwright.model.counts import layer_matrices, padded_size
from meshwright.model.kind import block_kind
from meshwright.optim.rule_table import CHUNK, MUON_CHUNK, is_beyond_torch, is_rounded
from meshwright.parallel.pipeline_schedule import (
    ScheduleName,
    most_sent,
    schedule,
)
from meshwright.training import inflight_rule
from meshwright.training.parameters import (
    WIDTHS,
    count,
    data_parts,
    shapes_of_layer,
    shapes_of_rank,
    stage_numbers,
)
from meshwright.training.sizes import held_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WITHIN = 0.05  # by which estimates of tensors are off, but for rare cases
NEAR = 0.03  # by which 95 of 100 are off at most: a search leaves out what is further away
FLOAT, LONG = 4, 8  # bytes
MANY = 4  # micro-batches of a step; with more, the mean work on gradients hardly changes
ROUNDS = 2  # of as many micro-batches as pipeline ranks, after which no rank holds more
RESERVED = 1.02, 1.12  # what torch's allocator takes for a byte of tensors, and with ZeRO 3


class LayoutSizes(NamedTuple):
    """How a run is divided over its devices: the settings that a search changes, by their names."""

    tensor_model_parallel_size: int
    sequence_parallel: bool
    context_parallel_size: int
    pipeline_model_parallel_size: int
    fp8_format: Literal["e4m3", "hybrid"] | None
    micro_batch_size: int
    pipeline_schedule: ScheduleName = "1f1b"
    num_layers_per_virtual_pipeline_stage: int | None = None
    zero_stage: int = 0
    recompute_granularity: Literal["full", "selective"] | None = None

    def ordered(self, name: ScheduleName, virtual: int | None, zero: int) -> LayoutSizes:
        """Return the layout with a schedule, the layers of its virtual stages and a ZeRO stage."""
        # By position: a search makes one for each layout, and _replace takes twice as long.
        return LayoutSizes(*self[:6], name, virtual, zero, self.recompute_granularity)


@dataclass(frozen=True, eq=False)
class Run:
    """What the layouts of a search have in common. Two are never equal, so it is a quick key."""

    config: TrainConfig
    vocabulary: int
    profile: DeviceProfile
    links: Links

    def config_of(self, layout: LayoutSizes) -> TrainConfig:
        return with_settings(self.config, **layout._asdict())

    @functools.cached_property
    def runs_ahead(self) -> bool:
        """Whether steps are submitted while the device computes the one before."""
        return inflight_rule.runs_ahead(self.config)

    def padded(self, layout: LayoutSizes) -> int:
        m = self.config.model
        tp = layout.tensor_model_parallel_size
        return padded_size(self.vocabulary, m.make_vocab_size_divisible_by, tp, m.pad_vocab_size_to)

    def chunks(self, layout: LayoutSizes, layers: int | None) -> int:
        """Return the stages of each pipeline rank, if virtual ones have so many layers."""
        pp = layout.pipeline_model_parallel_size
        if pp == 1 or not layers:
            return 1
        return max(1, (self.config.model.num_layers or 0) // (pp * layers))

    @functools.cached_property
    def batches(self) -> list[int]:
        return self.config.batches

    def data_ranks(self, layout: LayoutSizes) -> int:
        tp = layout.tensor_model_parallel_size
        cp = layout.context_parallel_size
        return max(1, self.config.world // (tp * cp * layout.pipeline_model_parallel_size))

    def micro_batches(self, layout: LayoutSizes) -> int:
        return max(
            1, self.config.global_batch // (layout.micro_batch_size * self.data_ranks(layout))
        )


def layout_of(c: TrainConfig) -> LayoutSizes:
    """Return the layout of a configuration."""
    # A layout's fields have the names of settings, which lie in three groups of the configuration.
    values = {
        name: getattr(group, name)
        for group in (c.parallel, c.precision, c.training)
        for name in LayoutSizes._fields
        if hasattr(group, name)
    }
    return LayoutSizes(**values | {"micro_batch_size": c.micro_batch})


# Memory: what passes keep


class LayerBytes(NamedTuple):
    """Bytes of a layer, for a micro-batch on one rank."""

    saved: float  # for the backward pass
    again: float  # the layer's input: all that is kept of a layer that runs once more
    first: float  # the part of it that the first layer of a stage lacks
    passing: float  # during the backward pass, beside what is saved


class EndBytes(NamedTuple):
    """Bytes outside of the layers, for a micro-batch on one rank."""

    stream: float  # the hidden states, as stages exchange them
    shared: float  # by all layers: positions, rotary tables, dropout's hashes
    head: float  # logits, and what else is saved for the head and the loss
    passing: float  # during the head's passes


def layer_bytes(c: TrainConfig) -> LayerBytes:
    """Return what the norms, attention and the MLP of a layer keep of a micro-batch."""
    m = c.model
    p = c.parallel
    low = WIDTHS[c.precision.dtype]
    tp = p.tensor_model_parallel_size
    cp = p.context_parallel_size
    hidden = m.hidden_size or 0
    heads = m.num_attention_heads or 1
    is_fused = block_kind(c.training, m, c.precision, NVIDIA) == "fused"
    is_fp8 = bool(c.precision.fp8_format)
    # Torch has no kernel for groups of heads in full precision: their scores are tensors, which
    # selective recomputation does not keep. Other kernels keep none.
    has_scores = low > 2 and m.groups < heads
    is_selective = has_scores and c.training.recompute_granularity == "selective"

    # The elements of tensors. Inner ones have all tokens, the residual stream a part of them.
    length = c.data.seq_length or 0
    tokens = c.micro_batch * length // cp
    sequence = p.sequence_parallel and tp > 1
    rows = tokens // tp if sequence else tokens
    queries = tokens * heads * m.head_dim // tp
    keys = tokens * m.groups * m.head_dim // tp
    qkv = queries + 2 * keys
    inner = tokens * m.ffn // tp
    wide = (2 if m.gated else 1) * inner

    # Norms save the residual stream, and one or two numbers of each row.
    stream = rows * hidden * (FLOAT if c.precision.fp32_residual_connection else low)
    branch = rows * hidden * low
    norms = stream if m.use_parallel_residual else 2 * stream
    norms += 2 * rows * FLOAT
    if m.normalization == "LayerNorm":  # a mean beside the deviation
        norms += 2 * rows * FLOAT

    # Products save their inputs, in fp8 transposed; where rows are gathered first, all of them.
    gathered = (tokens if is_fp8 else rows) * hidden
    inputs = (2 * gathered + inner) * (1 if is_fp8 else low) + queries * is_fp8

    # Attention saves q, k, v, its output and a number of each row; some ways need copies.
    sums = tokens * heads // tp * FLOAT
    attention = (qkv + queries) * low + (0 if is_selective else sums)
    if cp > 1 and not is_selective:  # its output by head and by token
        attention += queries * low
    attention += copies_of_heads(m, queries, keys, p, is_fused) * low

    scores = 0
    if has_scores:
        scores = c.micro_batch * length**2 * heads // tp // cp * low
    # Dropout keeps the dropped scores and a mask of one byte for each.
    dropped = scores + scores // low if m.attention_dropout > 0 else 0
    if scores and not is_selective:
        attention += scores + dropped + 3 * queries * low

    # The activation saves its input; plain code also the activated half of a gated one.
    activation = wide * low
    if m.gated and not is_fused and m.activation != "liglu":
        activation += inner * low

    # A backward pass holds gradients of the stream, of a branch and of an activation's input.
    passing = stream
    if m.hidden_dropout > 0 or stream != branch:
        passing += branch
    passing += wide * low * (1 if is_fused else 2)
    if low > 2:  # a product's gradient is added to the total
        passing += (2 if m.gated else 1) * m.ffn // tp * hidden * low
    # Gradients of the scores; with selective recomputation the scores themselves come on top.
    passing = max(passing, 3 * scores + dropped if is_selective else 2 * scores)

    saved = norms + inputs + attention + activation
    return LayerBytes(saved, stream + branch, stream, passing)


def copies_of_heads(m: Model, queries: int, keys: int, p: Parallel, is_fused: bool) -> int:
    """Return the elements that are kept on the way from the first product to attention."""
    is_exchanged = p.context_parallel_size > 1  # attention has a copy of its own
    if is_fused and m.qk_layernorm:
        # The kernel keeps the product that it reads, of which values are views.
        return queries + 2 * keys if is_exchanged else queries + keys
    normed = queries + keys if m.qk_layernorm else 0
    if is_exchanged:
        return normed
    if m.position == "rope":
        return normed + queries + keys
    is_copied = p.tensor_model_parallel_size < m.groups < (m.num_attention_heads or 1)
    return normed + queries if is_copied else normed


def end_bytes(c: TrainConfig, padded: int) -> EndBytes:
    """Return what the ends of a network keep of a micro-batch, and what stages exchange."""
    m = c.model
    p = c.parallel
    low = WIDTHS[c.precision.dtype]
    tp = p.tensor_model_parallel_size
    hidden = m.hidden_size or 0
    columns = (c.data.seq_length or 0) // p.context_parallel_size
    tokens = c.micro_batch * columns
    sequence = p.sequence_parallel and tp > 1
    rows = tokens // tp if sequence else tokens
    width = FLOAT if c.precision.fp32_residual_connection else low
    stream = rows * hidden * width

    # What all layers read: positions, three numbers of a row with sequence parallelism, angles.
    shared = columns * LONG
    if sequence:
        shared += 3 * rows * LONG
    if m.position == "rope":
        shared += columns * m.rotating * FLOAT
    # A hash of each row for each place with dropout: two in a layer, and the embedding's.
    if m.hidden_dropout > 0 or m.dropout_of_embeddings > 0:
        shared += (2 * (m.num_layers or 0) + 1) * rows * FLOAT

    # Logits are kept once, or before and after their cap; the loss keeps two numbers a token.
    logits = tokens * padded // tp * low
    if m.final_logit_softcapping:
        logits *= 2
    head = logits + stream + rows * hidden * low + 2 * tokens * FLOAT
    passing = (rows + 2 * tokens * sequence) * hidden * low
    return EndBytes(stream, shared, head, passing)


@functools.lru_cache(4096)
def in_flight(
    name: ScheduleName, pp: int, rank: int, number: int, chunks: int
) -> NDArray[np.int32]:
    """Return the micro-batches that a rank has in flight, a row for each moment that may be full.

    There are two columns for each chunk of layers: the micro-batches that wait for their backward
    pass, and whether a backward pass is running.
    """
    import numpy as np

    live = [0] * chunks
    moments = set[tuple[int, ...]]()
    for op, chunk, _ in schedule(name, pp, rank, number, chunks):
        if op == "F":
            live[chunk] += 1
        else:
            moments.add((*live, *(other == chunk for other in range(chunks))))
            live[chunk] -= 1
    return np.array([*moments], np.int32)


class RankShape(NamedTuple):
    """The part of the network that a pipeline rank has."""

    stages: tuple[int, ...]  # layers of each
    layers: int  # of all
    has_first: bool
    has_last: bool
    layer: int  # parameters of a layer
    rest: int  # of what is outside of the layers
    table: int  # of the head's table
    parts: int  # into which ZeRO cuts all of these

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.rest


def passes_bytes(
    run: Run, layout: LayoutSizes, shape: RankShape, layer: LayerBytes, ends: EndBytes, rank: int
) -> float:
    """Return the bytes at the fullest moment of a rank's passes, beside what is held throughout."""
    import numpy as np

    pp = layout.pipeline_model_parallel_size
    name = layout.pipeline_schedule
    chunks = run.chunks(layout, layout.num_layers_per_virtual_pipeline_stage)
    # A shape is shared by layouts with other virtual stages: then its layers are cut evenly.
    stages = shape.stages if len(shape.stages) == chunks else (shape.layers // chunks,) * chunks
    live = list[float]()
    backward = list[float]()
    for chunk, layers in enumerate(stages):
        is_last = shape.has_last and chunk == chunks - 1
        kept, again = kept_bytes(run, layout, layer, layers)
        head = ends.head if is_last else ends.stream
        live.append(kept + ends.shared + head)
        freed = head if is_last else 0.0  # before the layers' backward pass
        backward.append(max(again + layer.passing - freed, ends.passing * is_last))

    number = run.micro_batches(layout)
    # GPipe holds all micro-batches of a step; the other schedules no more after some rounds.
    number = number if name == "gpipe" else min(number, ROUNDS * pp)
    moments = in_flight(name if pp > 1 else "1f1b", pp, rank, number, chunks)
    # Gradients on their way to the stage before, which the first stage does not send.
    sent = 0.0
    if pp > 1 and (chunks > 1 or not shape.has_first):
        sent = most_sent(chunks) * ends.stream
    levels = moments @ np.array([*live, *backward])
    return float(levels.max()) + sent


def kept_bytes(
    run: Run, layout: LayoutSizes, layer: LayerBytes, layers: int
) -> tuple[float, float]:
    """Return what some layers keep, and what of them runs once more at the fullest moment."""
    if layout.recompute_granularity != "full":
        return layers * layer.saved, 0.0
    number = min(run.config.training.recompute_num_layers, layers)
    if run.config.training.recompute_method == "block":
        # The last layer's backward pass is the fullest: it runs again only if all layers do.
        again = layer.saved if number == layers else 0.0
        return number * layer.again + (layers - number) * layer.saved, again
    # Each segment keeps its input, and one of them at a time has run once more.
    return -(-layers // number) * layer.again - layer.first, number * layer.saved


# Memory: what a rank holds


def sharded_bytes(
    run: Run, layout: LayoutSizes, shape: RankShape, layer: LayerBytes
) -> tuple[float, float]:
    """Return the weights and gradients that ZeRO 2 and 3 hold in full for a while.

    Gradients are those beside what passes keep, which may be less than all at their moment.
    """
    low = WIDTHS[run.config.precision.dtype]
    parts = shape.parts
    if layout.zero_stage < 2 or parts == 1:
        return 0.0, 0.0
    full = max(low, FLOAT)
    kept = kept_bytes(run, layout, layer, 1)[0]
    others = min(1, shape.layers - 1)
    if layout.zero_stage == 2:
        # Gradients of the head and a layer are there at once, and others whose sums still run.
        summed = full * (1 + 1 / parts)
        beside = max(0.0, shape.layer * summed - kept)
        running = min(2, shape.layers - 1)
        now = (shape.table + shape.layer) * full + running * beside
        if run.micro_batches(layout) == 1:
            return 0.0, now
        # The micro-batch before has left its last bucket's sum: of the embedding, or of a layer.
        last = shape.rest if shape.has_first else others * shape.layer
        then = (shape.layer + last) * summed + shape.table * full
        return 0.0, max(now, then)
    # Two layers and all outside of them are gathered. There are a layer's gradients, or the sum of
    # those of the layer before.
    weights = (shape.rest + (1 + others) * shape.layer) * low
    layer_gradients = max(shape.layer * low, others * (shape.layer * full - kept))
    during = weights, shape.table * low + layer_gradients
    after = (
        weights - shape.layer * low,
        shape.layer * (low + full) - kept - layer.passing,
    )
    # Whichever moment needs more: within the layers' backward pass, or right after it.
    return max(during, after, key=sum)


def muon_bytes(c: TrainConfig) -> float:
    """Return what Muon's update takes for a while, in numbers of 16 bits."""
    p = c.parallel
    tp = p.tensor_model_parallel_size
    data = c.dp * p.context_parallel_size // p.num_distributed_optimizer_instances
    layers = (c.model.num_layers or 0) / p.pipeline_model_parallel_size
    matrices = layer_matrices(c.model).values()

    # One rank takes a chunk of matrices at once: two tensors of their size, three of the smaller
    # square.
    if tp * data == 1:
        largest = max(matrices, key=math.prod)
        size = math.prod(largest)
        number = min(layers, max(1, MUON_CHUNK // size))
        return 2 * number * (2 * size + 3 * min(largest) ** 2)

    # A rank has its own matrices' updates, what it sends back of them, and its part of all.
    of_all = layers * sum(map(math.prod, matrices))
    ranks = tp * data
    at_once = min(of_all, MUON_CHUNK * ranks)
    cut = tp * (data if p.zero_stage else 1)
    sent = min(at_once, MUON_CHUNK * cut) / cut
    own = at_once / tp / data
    part = min(sent, MUON_CHUNK)
    return 2 * (own + 2 * sent + part)


def update_bytes(c: TrainConfig) -> float:
    """Return what the update takes for a while."""
    o = c.optimizer
    if o.optimizer == "muon":
        return muon_bytes(c)

    # AdamW and SGD work in place, by torch's kernels or ours; what neither has goes by chunks.
    is_gathered = c.parallel.zero_stage == 3 and data_parts(c) > 1
    is_rounded_sgd = o.optimizer == "sgd" and is_rounded(o)
    if not (o.optimizer == "lion" or is_rounded_sgd or (is_beyond_torch(o) and is_gathered)):
        return 0.0
    shapes = shapes_of_layer(c.model, c.parallel.tensor_model_parallel_size)
    # A state of fewer bits goes parameter by parameter, and takes two tensors more.
    if is_rounded(o):
        return 6 * FLOAT * min(CHUNK, max(map(math.prod, shapes.values())))
    return 4 * FLOAT * min(CHUNK, count(shapes))


# What layouts share: each part is computed without the settings that it does not depend on.


@functools.lru_cache(1 << 14)
def activations(run: Run, layout: LayoutSizes) -> tuple[LayerBytes, EndBytes, int]:
    """Return what a micro-batch takes of a layer and outside, and of memory that ranks map."""
    c = run.config_of(layout)
    ends = end_bytes(c, run.padded(layout))
    return layer_bytes(c), ends, traffic.symmetric_rows(c, run.profile.symmetric_ranks)


@functools.lru_cache(1 << 14)
def held_by(run: Run, layout: LayoutSizes, rank: int) -> tuple[RankShape, dict[str, int], float]:
    """Return what a pipeline rank has, the bytes of it by kind, and what its update takes."""
    c = run.config_of(layout)
    padded = run.padded(layout)
    own = stage_numbers(c, rank)
    unit, *outer = [count(shapes) for shapes, _ in shapes_of_rank(c, padded, rank)]
    has_last = len(c.stages) - 1 in own
    stages = tuple(c.stages[s] for s in own)
    # Outside of the layers, the largest unit of the last stage is the head's table.
    table = max(outer, default=0) if has_last else 0
    shape = RankShape(
        stages=stages,
        layers=sum(stages),
        has_first=0 in own,
        has_last=has_last,
        layer=unit,
        rest=sum(outer),
        table=table,
        parts=data_parts(c),
    )
    held = held_bytes(c, padded, rank, run.profile.kind)
    held["buffers"] = buffer_bytes(c, padded, rank, run.profile)
    return shape, held, update_bytes(c)


@functools.lru_cache(1 << 14)
def beside(run: Run, layout: LayoutSizes) -> tuple[float, int]:
    """Return the bytes of a micro-batch's tokens, and of the driver and its libraries."""
    c = run.config_of(layout)
    return batch_bytes(c) / max(1, c.micro_batches(c.global_batch)), context_bytes(c, run.profile)


def without_passes(run: Run, layout: LayoutSizes) -> LayoutSizes:
    """Return a layout without the settings of passes alone: the key for what a rank holds."""
    # Only with a given --pipeline-layout do virtual stages change how many layers a rank has.
    name = layout.pipeline_schedule
    virtual = layout.num_layers_per_virtual_pipeline_stage
    if not run.config.parallel.pipeline_layout:
        name, virtual = "1f1b", None
    return LayoutSizes(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        sequence_parallel=False,
        context_parallel_size=1,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        fp8_format=layout.fp8_format,
        micro_batch_size=1,
        pipeline_schedule=name,
        num_layers_per_virtual_pipeline_stage=virtual,
        zero_stage=layout.zero_stage,
    )


def without_stages(layout: LayoutSizes) -> LayoutSizes:
    """Return a layout without pipeline and ZeRO: the key for the memory of a layer's passes."""
    return layout._replace(
        pipeline_model_parallel_size=1,
        pipeline_schedule="1f1b",
        num_layers_per_virtual_pipeline_stage=None,
        zero_stage=0,
    )


# The memory of a rank


def rank_bytes(run: Run, layout: LayoutSizes, rank: int) -> dict[str, int]:
    """Return the bytes of a pipeline rank's tensors by kind."""
    # Three parts, each computed without the settings that it does not depend on.
    layer, ends, mapped = activations(run, without_stages(layout))
    shape, held, update = held_by(run, without_passes(run, layout), rank)
    passes = passes_bytes(run, layout, shape, layer, ends, rank)
    weights, gradients = sharded_bytes(run, layout, shape, layer)
    if layout.zero_stage == 3 and shape.parts > 1 and run.micro_batches(layout) == 1:
        # The last step's sums are freed first, and these come one by one while activations go.
        gradients = max(gradients - held["gradients"], -passes)
    # Gradients below 0: at their moment passes keep less than at their fullest. The update comes
    # after the passes, so the rank needs the larger of the two.
    kept = max(0.0, gradients)
    activations_bytes = max(passes + min(0.0, gradients), update - weights - kept)
    out = dict(held)
    for kind, size in (
        ("weights", weights),
        ("gradients", kept),
        ("buffers", mapped),
        ("activations", activations_bytes),
    ):
        out[kind] = held.get(kind, 0) + round(size)
    return out


def memory_of_ranks(c: TrainConfig, padded: int, profile: DeviceProfile) -> list[RankMemory]:
    """Return the memory of each pipeline rank, estimated."""
    run = Run(c, padded, profile, profile.links)
    layout = layout_of(c)
    batches = batch_bytes(c)
    context = context_bytes(c, profile)
    out = []
    for rank in range(layout.pipeline_model_parallel_size):
        kinds = rank_bytes(run, layout, rank) | {"batches": batches}
        reserved = round(reserved_bytes(layout, sum(kinds.values())))
        out.append(RankMemory(kinds, context, functools.partial(int, reserved)))
    return out


def reserved_bytes(layout: LayoutSizes, allocated: float) -> float:
    """Return what torch's allocator takes for so many bytes of tensors, as a rule."""
    return allocated * RESERVED[layout.zero_stage == 3]


def need_of(run: Run, layout: LayoutSizes) -> int:
    """Return the bytes of tensors and the context of a layout's fullest rank."""
    pp = layout.pipeline_model_parallel_size
    layers = run.config.model.num_layers or 0
    # One of the ends, or a rank in the middle that has a layer more.
    ranks = {0, pp - 1}
    if layers % pp or run.config.parallel.pipeline_layout:
        ranks |= {1 % pp, pp // 2}
    tensors = 0
    for rank in ranks:
        kinds = rank_bytes(run, layout, rank)
        tensors = max(tensors, sum(kinds.values()))
    tokens, context = beside(run, work_key(run, layout))
    return tensors + round(tokens * run.micro_batches(layout)) + context


def held_of(run: Run, layout: LayoutSizes) -> int:
    """Return the bytes that the first rank holds throughout."""
    return sum(held_by(run, without_passes(run, layout), 0)[1].values())


# Time


class Seconds(NamedTuple):
    """Seconds of a micro-batch's passes: of the device, and of the host that launches them."""

    forward: float
    backward: float
    host_forward: float
    host_backward: float

    def times(self, number: int) -> Seconds:
        return Seconds(*[number * x for x in self])

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*map(operator.add, self, other))

    def passes(self) -> tuple[float, float]:
        """Return the seconds forward and backward, of whatever is slower."""
        return max(self.forward, self.host_forward), max(self.backward, self.host_backward)


class EstimatedWork(NamedTuple):
    """The work of a micro-batch in the parts of a network."""

    layer: Seconds  # the mean of all
    first: Seconds  # the embedding
    last: Seconds  # the head and the loss
    message: float  # seconds between two stages
    host: float  # its seconds to launch it all, where it may run ahead within a step
    shard: float  # its further seconds in each direction of a layer with ZeRO 3


@functools.lru_cache(1 << 14)
def work_of(run: Run, layout: LayoutSizes, number: int, in_graphs: bool) -> EstimatedWork:
    """Return the work of one of so many micro-batches, in CUDA graphs or not."""
    c = run.config_of(layout)
    terms = StepTerms(c, run.padded(layout), run.profile, run.links)
    terms.count = number
    layers = c.model.num_layers or 1
    waits = terms.pp > 1  # for messages, at the end of each pass
    # Recomputation by block takes the first layers of a stage, so a stage is the smallest whole;
    # otherwise the mean over all layers is taken.
    own = layers
    if c.training.recompute_method == "block":
        own = max(1, layers // terms.pp)
    stage = terms.stage_of(terms.kinds(0, own), own, False, False)
    head = terms.head()
    embedding = Step(terms.embedding(False), terms.embedding(True))

    # Without CUDA graphs the host launches all this.
    launches = waits and not in_graphs

    def seconds(step: Step, of: int = 1) -> Seconds:
        device = [way.device_seconds / of for way in step]
        host = [launches * way.host / of for way in step]
        return Seconds(*device, *host)

    message = terms.sending("pipeline", traffic.message_bytes(c)) if waits else 0.0
    # In a pipeline each pass takes what is slower, device or host; without one the host may run
    # ahead within a step, so its seconds are added up on their own.
    host = 0.0
    if not waits and not in_graphs:
        host = sum(work.host for step in (stage, embedding, head) for work in step)
    shard = waits * terms.launching({"collective": timing.SHARD_LAUNCHES})
    return EstimatedWork(
        seconds(stage, own), seconds(embedding), seconds(head), message, host, shard
    )


class MicroBatch(NamedTuple):
    """Seconds of a step's micro-batches in a pipeline."""

    number: int
    ranks: list[tuple[float, int]]  # seconds of one, and messages that an end of the pipeline lacks
    gap: float  # of a rank's only stage, in which it keeps the others waiting
    message: float
    forward: float  # of the slowest rank
    backward: float
    host: float

    def seconds_with(self, pp: int, chunks: int) -> float:
        """Return the seconds of all passes with so many stages on each rank."""
        # The slowest rank does one thing at a time, and waits for each message that it needs.
        slowest = 0.0
        for seconds, lacking in self.ranks:
            waiting = (2 * chunks - lacking) * self.message
            slowest = max(slowest, seconds + waiting)
        # Before and after, each other rank runs one stage.
        around = self.gap / chunks + 2 * self.message
        return self.number * slowest + (pp - 1) * around


@functools.lru_cache(256)
def micro_batches_of(
    run: Run, layout: LayoutSizes, sizes: tuple[int, ...], virtual: int | None
) -> list[MicroBatch]:
    """Return the seconds of micro-batches of these sizes, from those of a layer and both ends.

    `virtual`: the layers of a virtual stage.
    """
    pp = layout.pipeline_model_parallel_size
    samples = run.config.global_batch // run.data_ranks(layout)
    key = work_key(run, layout)
    shapes = ranks_of(run, layout)
    # The ends of the pipeline have a neighbour less, and so a message less each way.
    ends = [shape.has_first + shape.has_last for shape in shapes]
    out = list[MicroBatch]()
    for size in sizes:
        number = max(1, samples // size)
        # The key leaves out what decides whether there are graphs.
        full = layout._replace(micro_batch_size=size, num_layers_per_virtual_pipeline_stage=virtual)
        in_graphs = terms_of(run, full).has_graphs
        taken = 1 if number == 1 else MANY
        work = work_of(run, key._replace(micro_batch_size=size), taken, in_graphs)
        layer = work.layer
        first = work.first
        last = work.last
        if layout.zero_stage == 3:
            # Weights are gathered in each pass, which the host launches.
            layer = layer._replace(
                host_forward=layer.host_forward + work.shard,
                host_backward=layer.host_backward + work.shard,
            )
        ranks = list[tuple[float, int]]()
        slowest = (0.0, 0.0)
        for shape, lacking in zip(shapes, ends, strict=True):
            # What a rank does for one micro-batch; the slowest of them decides about the others.
            own = layer.times(shape.layers)
            own = own.plus(first) if shape.has_first else own
            own = own.plus(last) if shape.has_last else own
            forward, backward = own.passes()
            ranks.append((forward + backward, lacking))
            if forward + backward > slowest[0] + slowest[1]:
                slowest = forward, backward
        # A rank's only stage, if layers are divided evenly: so long it keeps the others waiting.
        gap = sum(layer.passes()) * (run.config.model.num_layers or 1) / pp
        out.append(MicroBatch(number, ranks, gap, work.message, *slowest, work.host))
    return out


def ranks_of(run: Run, layout: LayoutSizes) -> tuple[RankShape, ...]:
    """Return what the first, a middle and the last pipeline rank have."""
    return kinds_of_ranks(run, without_passes(run, layout)._replace(zero_stage=0))


@functools.lru_cache(1 << 14)
def kinds_of_ranks(run: Run, layout: LayoutSizes) -> tuple[RankShape, ...]:
    pp = layout.pipeline_model_parallel_size
    # The ends differ; ranks in between are alike, so one stands for all.
    return tuple(held_by(run, layout, rank)[0] for rank in sorted({0, pp // 2, pp - 1}))


class AfterPasses(NamedTuple):
    """Seconds of what follows the passes."""

    update: float
    sums: float  # over data-parallel ranks, if nothing runs beside them
    hidden: float  # if passes do
    host: float  # to launch the update


@functools.lru_cache(1 << 14)
def after_passes(run: Run, layout: LayoutSizes, parameters: int, layers: int) -> AfterPasses:
    terms = terms_of(run, layout._replace(pipeline_schedule="1f1b"))
    # Sums take this long with no pass to run beside, and with passes without end.
    sums = terms.data_parallel(parameters, layers, 0.0, 0.0)
    hidden = terms.data_parallel(parameters, layers, math.inf, math.inf)
    update = terms.update(parameters)
    return AfterPasses(update, sums, hidden, terms.update_host())


@functools.lru_cache(1 << 14)
def terms_of(run: Run, layout: LayoutSizes) -> StepTerms:
    return StepTerms(run.config_of(layout), run.padded(layout), run.profile, run.links)


def step_seconds(
    run: Run, layout: LayoutSizes, micro: Sequence[int], virtual: Sequence[int | None]
) -> list[list[float]]:
    """Return the seconds of steps, by the size of virtual stages and then by the micro-batch."""
    pp = layout.pipeline_model_parallel_size
    zero = layout.zero_stage
    # Of each size of virtual stages, on which it depends whether there are CUDA graphs.
    rows = [micro_batches_of(run, layout, tuple(micro), size) for size in virtual]
    longest, shortest = rows[0][0].number, rows[0][-1].number
    largest = max(ranks_of(run, layout), key=lambda shape: shape.parameters)

    # What follows the passes grows evenly with the number of micro-batches, or not at all.
    plain = without_passes(run, layout)._replace(context_parallel_size=layout.context_parallel_size)
    ends = []
    for samples in (micro[0], micro[-1]):
        key = plain._replace(micro_batch_size=samples if zero > 1 else 1)
        ends.append(after_passes(run, key, largest.parameters, largest.layers))
    most, least = ends
    steps = max(1, longest - shortest)

    # Sums over data-parallel ranks run beside the backward pass, and with ZeRO 2 and 3 beside more.
    def after(batch: MicroBatch) -> float:
        share = (batch.number - shortest) / steps
        sums = least.sums + share * (most.sums - least.sums)
        hidden = least.hidden + share * (most.hidden - least.hidden)
        # The passes that the sums run beside.
        passes = batch.backward
        if zero == 3:
            passes += batch.forward
        if zero > 1:
            passes *= batch.number
        beside = min(1.0, passes / sums) if sums else 0.0
        return least.update + sums - beside * (sums - hidden)

    # Where no step is submitted ahead, the device waits while the host prepares one.
    between = run.profile.seconds["step"]
    prepare = run.profile.seconds["prepare"]
    if not run.runs_ahead:
        between = between + prepare
        prepare = 0.0
    slowest = run.profile.reached["slowest"] if run.config.world > 1 else 1.0
    out = list[list[float]]()
    for size, batches in zip(virtual, rows, strict=True):
        chunks = run.chunks(layout, size)
        row = list[float]()
        for batch in batches:
            on_device = batch.seconds_with(pp, chunks) + after(batch)
            on_host = batch.number * batch.host + least.host + prepare if batch.host else 0.0
            row.append((max(on_device, on_host) + between) / slowest)
        out.append(row)
    return out


def work_key(run: Run, layout: LayoutSizes) -> LayoutSizes:
    """Return a layout with only the settings that decide about the work of a micro-batch."""
    pp = layout.pipeline_model_parallel_size
    zero = layout.zero_stage
    name = layout.pipeline_schedule
    if pp > 1:
        name = "1f1b"
        # ZeRO 3 in a pipeline has no CUDA graphs either; what it gathers is added per layer.
        zero = min(zero, 2)
        pp = pp if run.config.training.recompute_method == "block" else 2
    return LayoutSizes(
        *layout[:3], pp, *layout[4:6], name, None, zero, layout.recompute_granularity
    )
