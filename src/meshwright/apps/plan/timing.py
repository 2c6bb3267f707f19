"""The time of a training step, from a configuration and a device's profile. No torch.

A step is the sum of what a rank does: matrix products at the speed that the device reaches, the
attention kernel, passes over memory (norms, activations, loss), the update, what communication adds
to these, the pipeline's waiting, and the host where it is slower than the device. What is executed
was measured (measure/work.py), or comes from a closed form, which is enough to rank layouts. Bytes
sent come from traffic.py, the schedule from timeline.py, as in training.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.apps.plan import timeline, traffic
from meshwright.apps.plan.measure.operations import Heads, Operations, StepOperations
from meshwright.apps.plan.memory import can_measure
from meshwright.base.device import NVIDIA
from meshwright.base.device_profiles import (
    ATTENTION_PASSES,
    ATTENTION_ROWS,
    ATTENTION_STARTS,
    LAUNCHES,
    LAYER_LAUNCHES,
    DeviceProfile,
    Links,
    LinkSpeed,
)
from meshwright.config.matrices import MATRICES
from meshwright.config.schema import Model as Shape
from meshwright.config.schema import Optimizer, TrainConfig
from meshwright.model import counts
from meshwright.model.kind import BlockKind, block_kind
from meshwright.optim.rule_table import form_of, state_bytes
from meshwright.parallel.pipeline_schedule import stages_of
from meshwright.training import graph_rule, inflight_rule
from meshwright.training.parameters import parameters_of_ranks
from meshwright.training.sizes import rows

# The closed form: the bytes and the kernels of a layer's passes, as multiples of a fused block's.
BLOCKS: dict[BlockKind, tuple[float, float]] = {
    "fused": (1.0, 1.0),
    "compiled": (1.4, 1.0),
    "plain": (2.2, 2.5),
}
# The host's time to launch communication in each direction of a layer, in collectives: for an
# exchange between tensor ranks (plain, overlapped), for context ranks, and for a unit of ZeRO 3.
# From steps without CUDA graphs on two H100: benchmarks/records/2026-11-28-four-gpus.
TENSOR_LAUNCHES = (1, 1.5)
CONTEXT_LAUNCHES = 2.5
SHARD_LAUNCHES = 5
HOST_UPDATE = 40e9  # bytes per second of an update in host memory, on 16 cores beside an H200
# Numbers of full size that an update reads and writes for a parameter, with those of the norm.
UPDATE_NUMBERS = {"adam": 8, "adamw": 8, "sgd": 7, "muon": 8, "lion": 38}
# The same with --cautious-weight-decay, where no kernel updates: AdamW's in ZeRO 3 alone.
CAUTIOUS_NUMBERS = {"adam": 54, "adamw": 54, "lion": 44}


@dataclass(frozen=True)
class StepTime:
    """A step of one rank, and what follows for the run."""

    seconds: float
    parts: dict[str, float]  # seconds by kind; they add up to `seconds`
    bubble: float  # share of the step that the pipeline waits
    bytes_sent: dict[str, int]  # by dimension
    tokens_per_second: float  # of all ranks
    mfu: float  # share of the peak that the model's own operations take


class Work(NamedTuple):
    """Seconds of one pass over a layer or another part, by kind."""

    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    tensor: float = 0.0  # communication between tensor ranks that nothing hides
    context: float = 0.0
    host: float = 0.0  # to launch all this, if no CUDA graph does

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Work:
        return Work(*(factor * x for x in self))

    @property
    def device_seconds(self) -> float:
        return sum(self[:-1])  # all but the host's


class Step(NamedTuple):
    """Work of a micro-batch in one stage."""

    forward: Work
    backward: Work


def measured_operations(
    config: TrainConfig, padded: int, profile: DeviceProfile
) -> StepOperations | None:
    """Return what a step executes, by the measurement that its memory is known from.

    None if torch is not there, or the step cannot be measured: other devices have other blocks.
    """
    if not can_measure() or profile.kind != NVIDIA:
        return None
    from meshwright.apps.plan.measure.work import is_measurable, operations_of_step

    return operations_of_step(config, padded) if is_measurable(config) else None


def terms_of(
    config: TrainConfig,
    padded: int,
    profile: DeviceProfile,
    links: Links | None = None,
    measured: StepOperations | None = None,
) -> StepTerms:
    """Return the terms of a step, by what was measured or else by the closed form."""
    links = links or profile.links
    if measured is None:
        return StepTerms(config, padded, profile, links)
    return MeasuredTerms(config, padded, profile, links, measured)


def muon_flops(o: Optimizer, m: Shape, layers: float, ranks: int) -> float:
    """Return the operations of orthogonalising layers' matrices on the busiest owner rank."""
    costs = []
    for name, shape in counts.layer_shapes(m).items():
        if len(shape) > 1:
            form = form_of(o, m, f"h.0.{name}", shape)
            costs.append(form.cost(o.muon_num_ns_steps))
    # A matrix is not divided, so no rank has less than the largest.
    return max(layers * sum(costs) / ranks, *costs)


class StepTerms:
    """The terms of one step, by the closed form."""

    def __init__(
        self, config: TrainConfig, padded: int, profile: DeviceProfile, links: Links
    ) -> None:
        self.config = config
        self.padded = padded
        self.profile = profile
        self.links = links
        self.layers: dict[tuple[bool, bool], Step] = {}
        self.stages: dict[tuple[object, ...], Step] = {}
        m = config.model
        p = config.parallel
        self.m = m
        self.p = p
        self.tp = p.tensor_model_parallel_size
        self.cp = p.context_parallel_size
        self.pp = p.pipeline_model_parallel_size
        self.seq = config.data.seq_length or 0
        self.hidden = m.hidden_size or 0
        self.rows = rows(config)
        self.rows_of_stream = self.rows // self.tp if p.sequence_parallel else self.rows
        self.low, self.full = traffic.number_bytes(config)
        self.count = max(1, config.micro_batches(config.global_batch))
        self.groups = traffic.groups(config)
        # Bytes, and for Muon's products FLOPs, per second.
        self.passes_speed = profile.bandwidth * profile.reached["passes"]
        self.update_speed = profile.bandwidth * profile.reached["update"]
        half = profile.peaks.get("float16", profile.flops(config.precision.dtype))
        self.muon_speed = half * profile.reached["muon"]

    @functools.cached_property
    def has_graphs(self) -> bool:
        return graph_rule.reason_against(self.config, self.profile.kind) is None

    @functools.cached_property
    def block(self) -> BlockKind:
        c = self.config
        kind = block_kind(c.training, c.model, c.precision, self.profile.kind)
        return "plain" if kind == "compiled" and c.precision.fp8_format else kind

    # Links

    def link(self, dimension: str) -> tuple[LinkSpeed, float]:
        """Return the slowest link of a dimension's ring, and its bytes per second of a rank."""
        size, stride = self.groups[dimension]
        inside = max(1, min(size, self.links.gpus_per_node // stride))
        if size <= inside:
            return self.links.within, self.links.within.bandwidth
        # Each rank of the group in a machine brings its own way out of it.
        between = min(self.links.between.bandwidth * inside, self.links.within.bandwidth)
        return self.links.between, between

    def sending(
        self, dimension: str, size: float, messages: int = 1, copies: bool = False
    ) -> float:
        """Return the seconds of sending so many bytes in a dimension."""
        if not size:
            return 0.0
        link, bandwidth = self.link(dimension)
        share = link.copies if copies else link.collectives
        return size / (bandwidth * share) + messages * link.latency

    def launching(self, launches: Mapping[str, float]) -> float:
        """Return the host's seconds of so many launches of each kind."""
        return sum(count * self.profile.seconds[LAUNCHES[kind]] for kind, count in launches.items())

    # Work of a layer

    def product(self, outputs: int, inputs: int, dtype: str) -> float:
        moved = self.low * (self.rows * (inputs + outputs) + inputs * outputs)
        return self.product_seconds(2.0 * self.rows * outputs * inputs, moved, dtype)

    def product_seconds(self, flops: float, moved: float, dtype: str) -> float:
        speed = self.profile.flops(dtype)
        return self.least_seconds(flops, moved, speed, slower=max(1.0, self.half_speed / speed))

    @functools.cached_property
    def half_speed(self) -> float:
        return self.profile.flops("bfloat16" if "bfloat16" in self.profile.peaks else "float16")

    def least_seconds(self, flops: float, moved: float, speed: float, slower: float = 1.0) -> float:
        """Return the seconds that a product's FLOPs or bytes take, and more if it is small.

        One that does not fill the device computes few tiles, which take as many times longer as
        the device is slower than with numbers of 16 bits.
        """
        least = max(flops / speed, moved / (self.profile.bandwidth * 0.85))
        return math.hypot(least, slower * self.profile.seconds["product"])

    def a_pass(self, size: float, kernels: float = 1) -> float:
        """Return the seconds of reading or writing so many bytes by some kernels."""
        # A kernel takes some time however little it moves.
        return size / self.passes_speed + kernels * self.profile.seconds["pass"]

    def products_of_layer(self, is_fp8: bool) -> float:
        """Return the seconds of a layer's products forward; each gradient takes as long."""
        low = self.config.precision.dtype
        total = 0.0
        for name, (outputs, inputs) in counts.layer_matrices(self.m).items():
            # Tensor parallelism shards the outputs of a branch's first matrix, the second's inputs.
            matrix = MATRICES[name]
            if matrix.pair == "first":
                outputs //= self.tp
            else:
                inputs //= self.tp
            total += self.product(outputs, inputs, "fp8" if is_fp8 and matrix.fp8 else low)
        return total

    def attention(self, windowed: bool) -> tuple[float, float]:
        """Return the seconds of a layer's attention forward and backward, of a rank's heads."""
        m = self.m
        flops = counts.attention_flops(m, self.seq, windowed) * (self.rows / self.tp)
        keys = m.window + 1 if windowed else self.seq
        forward = Heads(keys, m.head_dim, m.attention_dropout > 0, False)
        backward = forward._replace(is_backward=True)
        return (
            self.attention_seconds(flops, forward, windowed),
            self.attention_seconds(flops, backward, windowed),
        )

    def attention_seconds(self, flops: float, heads: Heads, windowed: bool = False) -> float:
        """Return the seconds of an attention kernel from the FLOPs of all scores, forward."""
        profile = self.profile
        blocks = max(1.0, heads.keys / ATTENTION_ROWS)
        # Half of a causal square is computed, and the diagonal's blocks whole.
        share = (blocks + 1) / blocks
        if not windowed:
            share /= 2
        # Kernels are compiled for widths of 64 and multiples of 128.
        width = 64 if heads.width <= 64 else -(-heads.width // 128) * 128
        # Forward makes two products, backward five.
        products = 2.5 if heads.is_backward else 1.0
        computed = flops * share * width / heads.width * products

        # What comes on top, as shares of this: the start of each row of blocks, and dropout.
        starts = ATTENTION_STARTS / (blocks + 1)
        drawing = 0.0
        if heads.draws:
            way = "_backward" if heads.is_backward else ""
            drawing = 1 / profile.reached[f"attention_dropout{way}"] - 1
        speed = profile.attention(width, self.config.precision.dtype)[heads.is_backward]
        return computed / speed * (1 + starts + drawing) + profile.seconds["attention"]

    def layer(self, windowed: bool, is_fp8: bool) -> Step:
        """Return the work of a layer for one micro-batch."""
        m = self.m
        products = self.products_of_layer(is_fp8)

        # Bytes that passes read and write: the residual stream, the heads and the MLP's middle,
        # each so many times.
        stream = self.rows_of_stream * self.hidden * self.low
        heads = self.rows * (m.num_attention_heads or 1) * m.head_dim * self.low / self.tp
        middle = self.rows * m.ffn * self.low / self.tp
        key_share = 1 + 2 * m.groups / (m.num_attention_heads or 1)
        gates = 2 if m.gated else 1
        forward = 8 * stream + (gates + 1) * middle
        if m.position == "rope" or m.qk_layernorm:
            forward += 2 * key_share * heads
        backward = 9 * stream + (2 * gates + 1) * middle
        backward += (2 * key_share + ATTENTION_PASSES + key_share * m.qk_layernorm) * heads
        if m.use_parallel_residual:
            # The norms' kernels read the stream once more; what attention adds is a pass apart.
            forward += stream
        if m.hidden_dropout > 0:
            backward += stream
        if is_fp8:
            forward += 2 * stream + heads + middle
            backward += 2 * (2 * stream + key_share * heads + gates * middle)

        # The seconds of each direction on the device, and of the host that launches it.
        more_bytes, more_kernels = BLOCKS[self.block]
        casts = 4 if is_fp8 else 0
        launches = LAYER_LAUNCHES["plain" if self.block == "plain" else "fused"]
        ways = []
        attention = self.attention(windowed)
        for way, moved in enumerate((forward, backward)):
            kernels = more_kernels * LAYER_LAUNCHES["fused"][way]["triton"] + casts
            passes = self.a_pass(more_bytes * moved, kernels)
            host = self.launching(launches[way])
            ways.append(Work(products, attention[way], passes, host=host))
        first, second = ways
        # The backward pass multiplies twice: for the inputs' gradient and for the weights' own,
        # which is written to the gradients' total.
        size = sum(outputs * inputs for outputs, inputs in counts.layer_matrices(m).values())
        weights = Work(products, passes=self.gradients(size / self.tp))
        return Step(first, second + weights)

    def gradients(self, size: float) -> float:
        """Return the seconds of writing so many gradients, and of reading those to be added to."""
        # The first micro-batch writes the total, each further one reads it and writes it.
        return size * self.full * (2 - 1 / self.count) / self.update_speed

    def tensor_waits(self, products: float) -> tuple[float, float]:
        """Return the seconds that tensor parallelism adds to a layer, forward and backward."""
        if self.tp == 1:
            return 0.0, 0.0
        sent = traffic.tensor_bytes(self.config)
        messages, messages_back = traffic.tensor_messages(self.config)
        forward = self.sending("tensor", sent.layer_forward, messages)
        backward = self.sending("tensor", sent.layer_backward, messages_back)
        if self.overlaps_matmuls:
            share = self.links.within.collectives / self.links.within.copies
            return forward * share * 0.8, backward * share * 0.8
        # The sum of the activations' gradient runs beside the product of the weights' own.
        return forward, max(backward / 3, backward - products)

    @functools.cached_property
    def overlaps_matmuls(self) -> bool:
        ranks_within = self.links.gpus_per_node if self.links.within.copies else 1
        return traffic.overlaps_matmuls(self.config, ranks_within)

    def waits(self, layers: int) -> tuple[Work, Work]:
        """Return what communication adds to layers for a micro-batch, forward and backward."""
        # Two messages: what goes to the heads' ranks, and what comes back.
        context = self.sending("context", traffic.context_bytes(self.config), 2)
        ways = []
        for tensor, count in zip(
            self.tensor_waits(self.products_of_layer(False)), self.exchanges(), strict=True
        ):
            host = self.launching({"collective": count})
            ways.append(Work(tensor=tensor, context=context, host=host))
        first, second = ways
        forward = first.times(layers)
        backward = second.times(layers)

        # Recomputation repeats what the forward pass sends, but for the last sum of a segment.
        again, segments = traffic.recomputed(self.config, layers)
        if again:
            redone = first.times(again)
            if self.tp > 1:
                sent = traffic.tensor_bytes(self.config)
                unneeded = segments * sent.last_sum / (again * sent.layer_forward)
                redone = redone._replace(tensor=redone.tensor * (1 - unneeded))
            backward += redone
        return forward, backward

    def waits_of_head(self) -> tuple[Work, Work]:
        """Return what communication adds to the head and the loss."""
        end = self.wait_of_embedding()
        if self.tp == 1:
            return end, end
        loss = self.sending("tensor", traffic.tensor_bytes(self.config).loss, 3)
        return end + Work(tensor=loss), end

    def wait_of_embedding(self) -> Work:
        """Return what communication adds to the embedding, in each direction."""
        if self.tp == 1:
            return Work()
        return Work(tensor=self.sending("tensor", traffic.tensor_bytes(self.config).end / 2))

    def exchanges(self) -> tuple[float, float]:
        """Return the host's launches for a layer's communication, forward and backward."""
        others = 0.0
        if self.cp > 1:
            others += CONTEXT_LAUNCHES
        if self.p.zero_stage == 3 and self.groups["data"].size > 1:
            others += SHARD_LAUNCHES
        if self.tp == 1:
            return others, others
        each = TENSOR_LAUNCHES[self.overlaps_matmuls]
        forward, backward = traffic.tensor_messages(self.config)
        return forward * each + others, backward * each + others

    # Stages

    def stage(self, number: int) -> Step:
        """Return the work of a stage for one micro-batch."""
        sizes = self.config.stages
        kinds = self.kinds(sum(sizes[:number]), sizes[number])
        is_first = number == 0
        is_last = number == len(sizes) - 1
        key = (*kinds.items(), is_first, is_last)
        if key not in self.stages:
            self.stages[key] = self.stage_of(kinds, sizes[number], is_first, is_last)
        return self.stages[key]

    def all_stages(self) -> list[Step]:
        return [self.stage(number) for number in range(len(self.config.stages))]

    def kinds(self, begin: int, count: int) -> dict[tuple[bool, bool], int]:
        """Return how many layers of a stage have a window or not, and multiply in fp8 or not."""
        m = self.m
        precision = self.config.precision
        if not m.window and not precision.first_last_layers_bf16:
            return {(False, bool(precision.fp8_format)): count}
        windowed = set(m.windowed_layers)
        layers = m.num_layers or 0
        kinds = Counter[tuple[bool, bool]]()
        for i in range(begin, begin + count):
            kinds[i in windowed, precision.multiplies_fp8(i, layers)] += 1
        return dict(kinds)

    def stage_of(
        self, kinds: dict[tuple[bool, bool], int], count: int, is_first: bool, is_last: bool
    ) -> Step:
        forward = backward = Work()
        for kind, layers in kinds.items():
            if kind not in self.layers:
                self.layers[kind] = self.layer(*kind)
            layer = self.layers[kind]
            forward += layer.forward.times(layers)
            backward += layer.backward.times(layers)
        # Recomputation repeats its layers' forward pass before their backward pass.
        again, _ = traffic.recomputed(self.config, count)
        m = self.config.model
        redone = forward
        if m.attention_dropout > 0 and m.attention_impl != "reference":  # its results are kept
            redone = forward._replace(attention=0.0)
        backward += redone.times(again / count)
        if is_first:
            forward += self.embedding(False)
            backward += self.embedding(True)
        if is_last:
            head = self.head()
            forward += head.forward
            backward += head.backward
        first, second = self.waits(count)
        return Step(forward + first, backward + second)

    def embedding(self, backward: bool) -> Work:
        """Return the work of the embedding in one direction."""
        size = self.rows * self.hidden * self.low
        times = 5 if backward else 3
        passes = self.a_pass(times * size, 3)
        host = self.launching({"torch": 8})
        return Work(passes=passes, host=host) + self.wait_of_embedding()

    def head(self) -> Step:
        """Return the work of the last norm, the head and the loss."""
        # The vocabulary is divided over tensor ranks, and the head multiplies all tokens.
        columns = self.padded // self.tp
        product = self.product(columns, self.hidden, self.config.precision.dtype)
        logits = self.rows * columns * self.low
        stream = self.rows_of_stream * self.hidden * self.low
        capped = 2 if self.m.final_logit_softcapping else 0
        host = self.launching({"torch": 6, "triton": 3})
        first, second = self.waits_of_head()
        forward = self.a_pass(4 * stream + (1 + capped) * logits, 2)
        backward = self.a_pass(4 * stream + (2 + capped) * logits, 3)
        return Step(
            Work(product, passes=forward, host=host) + first,
            Work(product, passes=backward, host=host)
            + second
            + Work(product, passes=self.gradients(columns * self.hidden)),
        )

    # The step

    def passes_seconds(self, work: Work) -> float:
        """Return the seconds of some work, on the device or, if that takes longer, on the host."""
        if self.has_graphs:
            return work.device_seconds
        return max(work.device_seconds, work.host)

    def result(self) -> StepTime:
        """Return a step of the slowest rank."""
        config = self.config
        profile = self.profile
        stages = self.all_stages()

        # The passes of all micro-batches on the slowest rank.
        own = stages_of(self.slowest_rank(stages), self.pp, config.chunks)
        work = Work()
        forward = backward = 0.0
        for s in own:
            stage = stages[s]
            for part in stage:
                work += part
            # Without CUDA graphs a pass takes what is slower, so each is looked at by itself.
            forward += self.passes_seconds(stage.forward)
            backward += self.passes_seconds(stage.backward)
        work = work.times(self.count)
        busy = self.count * (forward + backward) if self.pp > 1 else work.device_seconds
        passes = self.pass_of_micro_batches(stages, busy)

        # The update, and communication beside it.
        parameters = max(parameters_of_ranks(config, self.padded))
        layers = sum(config.stages[s] for s in own)
        update = self.update(parameters)
        exposed = self.data_parallel(parameters, layers, forward, backward)

        # The host.
        between = profile.seconds["step"]
        prepare = profile.seconds["prepare"]
        # Where no step is submitted ahead, the device waits while the host prepares one.
        if not inflight_rule.runs_ahead(config):
            between = between + prepare
            prepare = 0.0
        host = busy - work.device_seconds
        if self.pp == 1 and not self.has_graphs:  # the host runs ahead of the device within a step
            host = max(0.0, work.host + self.update_host() + prepare - busy - update - exposed)

        parts = {
            "products": work.products,
            "attention": work.attention,
            "passes": work.passes,
            "tensor": work.tensor,
            "context": work.context,
            "host": host,
            "pipeline": passes - busy,
            "update": update,
            "data": exposed,
            "between steps": between,
        }
        total = sum(parts.values())
        # Ranks wait for the slowest device in every step.
        if config.world > 1:
            slow = total * (1 / profile.reached["slowest"] - 1)
            parts["slowest rank"] = slow
            total += slow

        tokens = config.global_batch * self.seq / total
        per_token = counts.flops_per_token(self.m, self.padded, self.seq)
        peak = profile.peaks.get(config.precision.dtype) or profile.peaks["float16"]
        return StepTime(
            seconds=total,
            parts={name: seconds for name, seconds in parts.items() if seconds},
            bubble=(passes - busy) / total,
            bytes_sent=traffic.bytes_sent(config, self.padded),
            tokens_per_second=tokens,
            mfu=tokens * per_token / (peak * config.world),
        )

    def slowest_rank(self, stages: list[Step]) -> int:
        def seconds(rank: int) -> float:
            own = stages_of(rank, self.pp, self.config.chunks)
            return sum(part.device_seconds for s in own for part in stages[s])

        return max(range(self.pp), key=seconds)

    def pass_of_micro_batches(self, stages: list[Step], busy: float) -> float:
        """Return the seconds from the first forward pass to the last backward pass."""
        if self.pp == 1:
            return busy
        kind = self.p.pipeline_schedule
        times = self.stage_times(stages)
        return timeline.makespan(kind, self.pp, self.count, self.config.chunks, times)

    def stage_times(self, stages: list[Step]) -> timeline.StageTimes:
        """Return the seconds of each stage's passes and of a message."""
        forward = tuple(self.passes_seconds(stage.forward) for stage in stages)
        backward = tuple(self.passes_seconds(stage.backward) for stage in stages)
        size = traffic.message_bytes(self.config)
        message = self.sending("pipeline", size)
        return timeline.StageTimes(forward, backward, message)

    def update_host(self) -> float:
        """Return the host's seconds to launch the update."""
        return self.launching({"torch": 10, "triton": 10})

    def update(self, parameters: float) -> float:
        """Return the seconds of clipping and updating so many parameters of a rank."""
        config, o, profile = self.config, self.config.optimizer, self.profile
        data = self.groups["data"].size
        # With ZeRO a rank updates its shard.
        shards = data if self.p.zero_stage else 1
        own = parameters / shards

        # Bytes that are read and written.
        is_gathered = self.p.zero_stage == 3 and shards > 1
        numbers = UPDATE_NUMBERS[o.optimizer]
        if o.cautious_weight_decay and (is_gathered or o.optimizer == "lion"):
            numbers = CAUTIOUS_NUMBERS.get(o.optimizer, numbers)
        if o.ema:
            numbers += 3  # read with the master, and written
        size = own * (numbers * self.full + self.low)
        saved = self.full - state_bytes(o, self.full)  # of each moment, which is read and written
        size -= own * 2 * saved * (2 if o.optimizer in ("adam", "adamw") else 1)
        if config.precision.fp8_format:  # weights are cast, and transposed
            size += own * (self.low + 2)

        # On the host: its memory limits the update; gradients come to it, and weights go back.
        if self.p.offloads:
            return size / HOST_UPDATE + own * (self.full + self.low) / profile.storage["host"]
        seconds = size / self.update_speed
        if o.optimizer == "muon":
            layers = (self.m.num_layers or 0) / self.pp
            seconds += muon_flops(o, self.m, layers, self.tp * data) / self.muon_speed
            seconds += self.sending_owners()
        return seconds

    def sending_owners(self) -> float:
        """Return the seconds in which Muon's matrices go to their owners and back."""
        dimension = "data" if self.groups["data"].size > 1 else "tensor"
        return self.sending(dimension, traffic.owner_bytes(self.config), 2)

    def data_parallel(
        self, parameters: float, layers: int, forward: float, backward: float
    ) -> float:
        """Return the seconds that sums and gathers over the data-parallel ranks add to a step.

        The rank has so many parameters and layers, and its passes of a micro-batch take so long.
        """
        if self.groups["data"].size * self.groups["replicas"].size == 1:
            return 0.0
        zero = self.p.zero_stage
        within = self.links.within
        sent, replicas = traffic.data_bytes(self.config, parameters)
        link, bandwidth = self.link("data")
        may_copy = zero < 2 and self.p.data_parallel_sums != "collectives"
        copies = may_copy and link is within and within.copies > 0
        seconds = self.sending("data", sent, layers + 2, copies)

        # It runs beside the last backward pass; with ZeRO 2 and 3, beside all of them.
        beside = self.count * backward if zero > 1 else backward
        if zero == 3:
            beside += self.count * forward
        hidden = min(seconds, beside)
        # On a slow network most of a collective is waiting, which takes nothing from products.
        lost = self.profile.reached["beside_copies" if copies else "beside_collectives"]
        if link is self.links.between:
            lost *= bandwidth / within.bandwidth
        return seconds - hidden + hidden * lost + self.sending("replicas", replicas)


class MeasuredTerms(StepTerms):
    """The terms of a step whose operations were measured, with communication by the closed form."""

    def __init__(
        self,
        config: TrainConfig,
        padded: int,
        profile: DeviceProfile,
        links: Links,
        measured: StepOperations,
    ) -> None:
        super().__init__(config, padded, profile, links)
        self.measured = measured

    def stage(self, number: int) -> Step:
        """Return the work of a stage for one micro-batch."""
        forward, backward = map(self.work, self.measured.stages[number])
        waits = [self.waits(self.config.stages[number])]
        if number == 0:
            waits.append((self.wait_of_embedding(),) * 2)
        if number == len(self.config.stages) - 1:
            waits.append(self.waits_of_head())
        # Communication is not measured: its time is that of the links.
        for first, second in waits:  # what the host launches for them was measured
            forward += first._replace(host=0.0)
            backward += second._replace(host=0.0)
        return Step(forward, backward)

    def work(self, operations: Operations) -> Work:
        """Return the work of some operations."""
        reached = self.profile.reached
        seconds = self.profile.seconds
        products = attention = passes = host = 0.0
        for op, count in operations.items():
            host += count * seconds[LAUNCHES[op.launch]]
            if op.kind == "product":
                products += count * self.product_seconds(op.flops, op.bytes, op.dtype)
                passes += count * op.totals / self.update_speed
            elif op.heads is not None:
                attention += count * self.attention_seconds(op.flops, op.heads)
                passes += count * op.bytes / self.passes_speed
            elif op.kind == "pass":
                # A pass that rounds to fp8 is slower.
                slower = reached["passes"] / reached["passes_fp8"] if op.dtype else 1.0
                passes += count * self.a_pass(slower * op.bytes)
        return Work(products, attention, passes, host=host)

    def update(self, parameters: float) -> float:
        seconds = 0.0
        for op, count in self.measured.update.items():
            if op.kind == "product":
                seconds += count * self.least_seconds(op.flops, op.bytes, self.muon_speed)
            elif op.kind == "pass":
                seconds += count * (op.bytes / self.update_speed + self.profile.seconds["pass"])
        if self.config.optimizer.optimizer == "muon":
            seconds += self.sending_owners()
        return seconds

    def update_host(self) -> float:
        return self.work(self.measured.update).host
