"""The forward pass of a rank's part of GPT, in tensors of which only the size counts.

It mirrors model/gpt.py and model/fused.py, and training/step.py for the loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.apps.plan.functions import FLOAT, LONG, Formats, Functions, HeadCounts, NormOptions
from meshwright.apps.plan.tensors import Allocation, GraphNode, Memory, Sized, differentiate, recomputed
from meshwright.apps.plan.zero import REST, Buckets, Shards, begin_step, end_step
from meshwright.base.device import NVIDIA
from meshwright.config.schema import Model, Precision, TrainConfig
from meshwright.model import counts
from meshwright.model.counts import layer_matrices
from meshwright.model.kind import block_kind
from meshwright.parallel import shard
from meshwright.parallel.pipeline_schedule import SPLIT_BACKWARD
from meshwright.training.parameters import WIDTHS, cut_shape, data_parts, flat_size, shapes_of_layer


@dataclass(frozen=True)
class Stage:
    """The part of the network that runs as one: some layers, with the embedding or the head."""

    layers: int
    has_embedding: bool = True
    has_head: bool = True
    begin: int = 0  # number of the first layer
    is_fed_here: bool = False  # the stage before is on the same rank
    feeds_here: bool = False  # the stage behind is


@dataclass(frozen=True)
class PassSizes:
    """All settings that the memory of a forward and backward pass depends on."""

    model: Model
    precision: Precision
    micro_batch: int
    length: int  # tokens of a sample
    padded: int  # size of the vocabulary
    tp: int
    cp: int
    sequence: bool  # parallelism
    splits_backward: bool  # a pipeline computes gradients of weights later
    granularity: str | None  # of recomputation
    method: str | None
    recomputed_layers: int
    micro_batches: int  # of a step, at most 2: the others are as the second
    parts: int  # that ZeRO 2 cuts gradients into as they come, or 1
    shards: int  # of weights and gradients with ZeRO 3, or 1
    offloads: bool  # what is summed goes to host memory
    is_fused: bool  # blocks are of fused kernels
    resets_positions: bool  # each sample has positions of its own
    processors: int  # of the device

    @property
    def formats(self) -> Formats:
        low = WIDTHS[self.precision.dtype]
        return Formats(low, max(low, 4) if self.precision.fp32_residual_connection else low, max(low, 4))

    def bucket_of(self, name: str) -> str:
        """Return the bucket of ZeRO 2 that a parameter's gradient is in."""
        return shard.bucket(name, self.tp, self.sequence, self.splits_backward)

    @property
    def writes_first_products(self) -> bool:
        """Whether a step's first micro-batch needs less memory than others."""
        return self.shards == 1 and (self.precision.fp8_format is not None or self.formats.low > 2)


def sizes_of(config: TrainConfig, padded: int, processors: int) -> PassSizes:
    """Return what the memory of a run's passes depends on."""
    p, t = config.parallel, config.training
    assert config.data.seq_length
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    return PassSizes(
        config.model,
        config.precision,
        config.micro_batch,
        config.data.seq_length,
        padded,
        tp,
        p.context_parallel_size,
        p.sequence_parallel and tp > 1,
        pp > 1 and p.pipeline_schedule in SPLIT_BACKWARD,
        t.recompute_granularity,
        t.recompute_method,
        t.recompute_num_layers,
        min(2, config.micro_batches(config.global_batch)),
        data_parts(config) if p.zero_stage == 2 else 1,
        data_parts(config) if p.zero_stage == 3 else 1,
        p.offloads,
        block_kind(t, config.model, config.precision, NVIDIA) == "fused",
        config.data.document_effects[1],
        processors,
    )


class SharedSizes(NamedTuple):
    """What a forward pass makes once for all layers, as model/positions.py does."""

    places: list[Sized]  # of tokens, and of the residual stream's rows
    rotation: list[Sized]
    sites: Sized | None  # hashes of dropout


class SizedGPT:
    """A stage's forward passes on one rank."""

    def __init__(
        self,
        sizes: PassSizes,
        stage: Stage,
        memory: Memory,
        buckets: Buckets | None = None,
        shards: Shards | None = None,
    ) -> None:
        m = sizes.model
        assert m.hidden_size and m.num_attention_heads
        self.sizes, self.m, self.stage, self.memory = sizes, m, stage, memory
        tp, cp = sizes.tp, sizes.cp
        self.hidden, self.padded, self.batch = m.hidden_size, sizes.padded // tp, sizes.micro_batch
        self.f = Functions(memory, sizes.formats, sizes.tp, sizes.cp, sizes.sequence, sizes.processors)
        self.f.recomputes_attention = sizes.granularity == "selective"
        self.f.drops_attention = m.attention_dropout > 0
        self.columns = sizes.length // cp
        self.tokens = self.batch * self.columns  # of the layers' inner tensors
        self.rows = self.tokens // tp if sizes.sequence else self.tokens  # of the residual stream
        shapes = shapes_of_layer(m, tp)
        self.matrices = {name: widths(shapes[f"{name}.weight"]) for name in layer_matrices(m)}
        heads, groups = m.num_attention_heads // tp // cp, max(1, m.groups // tp // cp)
        copies_queries = heads > groups and m.groups // tp > 1
        self.heads = HeadCounts(self.batch, sizes.length, heads, groups, m.head_dim, copies_queries)
        self.buckets = buckets or (make_buckets(memory, sizes, [stage]) if sizes.parts > 1 else None)
        if self.buckets is not None:
            self.f.begin, self.f.end = self.buckets.begin, self.buckets.end
            self.f.begin_vectors = self.buckets.begin_late if sizes.splits_backward else self.buckets.begin
        self.shards = shards or (make_shards(memory, sizes, stage) if sizes.shards > 1 else None)
        if self.shards is not None:
            self.f.keep = self.shards.keep
        self.ends_at_qkv = sizes.bucket_of("h.0.ln_1.weight") in shard.LATE  # without the norms' gradients
        self.drops, self.centers = m.hidden_dropout > 0, m.normalization == "LayerNorm"

    # The whole network

    def forward(self, stream: Sized | None = None) -> Sized:
        """Return logits, or the stage's output."""
        if self.shards is not None:
            self.shards.enter(REST)
        shared = SharedSizes(self.places(), self.rotation(), self.dropout_rows())
        sites = shared.sites
        residual, pending = None, self.embed(shared.places[0]) if stream is None else stream
        if stream is None and self.m.embedding_dropout and sites is not None:
            pending = self.f.dropout(pending, sites)
        self.joins_embedding = stream is None and self.m.embedding_dropout is None  # with dropout, in the first norm
        del stream
        for layers, again in self.stretches():
            if again:
                residual, pending = recomputed(self.run, residual, pending, layers, shared)
            else:
                residual, pending = self.run(residual, pending, layers, shared)
        if not self.stage.has_head:
            return self.left(self.join(residual, pending, sites), REST)
        pending = self.ends(pending, "ln_f")
        if self.sizes.is_fused:
            _, y = self.f.add_norm(residual, pending, self.hidden, self.norm(sites))
        else:
            x = self.join(residual, pending, sites)
            y = self.f.converted(self.f.norm(x, self.hidden, self.centers), self.sizes.formats.low)
            del x
        self.memory.kind = "logits"
        self.f.unit = "lm_head" if self.m.untie_embeddings_and_output_weights else "wte"
        # One stage with both ends uses a tied table twice.
        ends = self.f.unit == "lm_head" or not self.stage.has_embedding
        y = self.begins(y, "ln_f")
        logits = self.f.column_parallel(y, (self.padded, self.hidden), ends=ends)
        if self.m.final_logit_softcapping:
            logits = self.f.softcap(logits)
        self.memory.kind = "activations"
        return self.left(logits, REST)

    def places(self) -> list[Sized]:
        """Return the places of tokens; with sequence parallelism, three numbers of each row."""
        of_rows = (2 + self.sizes.resets_positions) * self.sizes.sequence
        return [self.memory.new(n, LONG) for n in (self.columns, *[self.rows] * of_rows)]

    def rotation(self) -> list[Sized]:
        """Return the cosines and sines of rotary positions."""
        half = self.columns * self.m.rotating // 2 * (self.batch if self.sizes.resets_positions else 1)
        return [self.memory.new(half, FLOAT) for _ in range(2)] if self.m.position == "rope" else []

    def dropout_rows(self) -> Sized | None:
        """Return the hashes of each place with dropout."""
        if not (self.drops or self.m.dropout_of_embeddings > 0):
            return None
        assert self.m.num_layers
        samples, columns = self.memory.new(self.rows, LONG), self.memory.new(self.rows, LONG)
        rows = self.memory.new((2 * self.m.num_layers + 1) * self.rows, 4)
        del samples, columns
        return rows

    def stretches(self) -> list[tuple[range, bool]]:
        """Return layers that run together, and whether they are recomputed, as GPT.stretches."""
        begin, n = self.stage.begin, self.sizes.recomputed_layers
        here = range(begin, begin + self.stage.layers)
        if self.sizes.granularity != "full":
            return [(here, False)]
        if self.sizes.method == "block":
            return [(here[i : i + 1], True) for i in range(len(here[:n]))] + [(here[n:], False)]
        return [(here[i : i + n], True) for i in range(0, len(here), n)]

    def embed(self, at: Sized) -> Sized:
        """Return the embeddings of the tokens."""
        x = self.rows_of_table() if self.sizes.tp > 1 else self.f.new(self.rows * self.hidden)
        if x.node is None:
            x.node = GraphNode([], [], lambda gradient: self.give_rows_of_table("wte", self.rows))
        if self.m.embed_layernorm:
            x = self.begins(self.f.norm(self.ends(x, "ln_emb"), self.hidden, self.centers), "ln_emb")
        if self.m.position == "learned":
            columns = self.rows if self.sizes.sequence else self.columns
            places = self.f.new(columns * self.hidden)
            places.node = GraphNode([], [at], lambda gradient: self.give_rows_of_table("wpe", columns))
            y = self.f.new(x.elements)
            y.node = GraphNode([x, places], [], self.back_to_places)
            x = y
            del places, y
        return self.f.converted(x, self.sizes.formats.stream)

    def rows_of_table(self) -> Sized:
        """Return the rows of the table that some of the tensor ranks hold, of all tokens."""
        ids, own = self.memory.new(self.tokens, LONG), self.memory.new(self.tokens, 1)
        x = self.f.new(self.tokens * self.hidden)
        x.node = GraphNode([], [ids], self.give_table)
        y = self.f.new(x.elements)
        elements = x.elements
        y.node = GraphNode([x], [own], lambda gradient: [self.f.new(elements)])
        del x
        return self.f.added_up(y)

    def give_table(self, gradient: Sized) -> list[Sized | None]:
        """Give the table a gradient of its own size."""
        if self.shards is not None:
            self.shards.keep("wte", self.padded * self.hidden)
            return []
        table = self.f.new(self.padded * self.hidden)
        if self.buckets is not None:
            self.buckets.begin("wte")
            del table
            self.buckets.end("wte")
        return []

    def join(self, residual: Sized | None, pending: Sized, sites: Sized | None) -> Sized:
        """Return residual + dropout(pending)."""
        if sites is not None and self.drops:
            pending = self.f.dropout(pending, sites)
        return pending if residual is None else self.f.add(residual, pending)

    def back_to_places(self, gradient: Sized) -> list[Sized | None]:
        is_summed = self.batch > 1 and not self.sizes.sequence
        return [gradient, self.f.new(self.columns * self.hidden) if is_summed else gradient]

    def give_rows_of_table(self, table: str, rows: int) -> list[Sized | None]:
        """Sort the tokens to add their rows to a table's gradient."""
        if self.shards is not None:
            size = self.padded if table == "wte" else self.m.max_position_embeddings or self.sizes.length
            self.shards.keep(table, size * self.hidden)
            return []
        if self.buckets is not None:
            self.buckets.begin(table)
        order = [self.memory.new(rows, LONG) for _ in range(3)]
        del order
        if self.buckets is not None:
            self.buckets.end(table)
        return []

    def begins(self, x: Sized, unit: str) -> Sized:
        """Return x, whose gradient is followed by those of a unit's parameters."""
        begin = self.f.begin
        return x if self.buckets is None else marked(x, lambda: begin(unit))

    def begins_vectors(self, x: Sized) -> Sized:
        """Return x, whose gradient is followed by those of a layer's norm, not of products."""
        if self.buckets is None or not self.sizes.splits_backward:
            return x
        return marked(x, self.buckets.begin_late)

    def ends(self, x: Sized, unit: str) -> Sized:
        """Return x, whose gradient follows all those of the parameters of a unit."""
        end = self.f.end
        return x if self.buckets is None else marked(x, lambda: end(unit))

    def run(
        self, residual: Sized | None, pending: Sized, layers: range, shared: SharedSizes
    ) -> tuple[Sized | None, Sized]:
        for i in layers:
            self.f.unit = f"h.{i}"
            pending = pending if self.sizes.splits_backward else self.ends(pending, self.f.unit)
            pending = self.entered(pending, self.f.unit)
            residual, pending = self.block(i, residual, pending, shared)
            pending = self.left(pending, f"h.{i}")
        return residual, pending

    def entered(self, x: Sized, unit: str) -> Sized:
        """Return the input of a unit whose weights ZeRO 3 gathers."""
        shards = self.shards
        if shards is None:
            return x
        shards.enter(unit)
        return marked(x, lambda: shards.end(unit))

    def left(self, x: Sized, unit: str) -> Sized:
        """Return its output."""
        shards = self.shards
        if shards is None:
            return x
        shards.leave(unit)
        return marked(x, lambda: shards.begin(unit))

    # A layer

    def norm(self, sites: Sized | None, adds: bool = True, ends: str = "") -> NormOptions:
        return NormOptions(adds, self.centers, sites if self.drops else None, ends)

    def first_norm(self, residual: Sized | None, sites: Sized | None) -> NormOptions:
        """Return the options of a layer's first norm, whose gradients are its last."""
        adds = residual is not None or (self.drops and sites is not None)
        return self.norm(sites, adds, "" if self.sizes.splits_backward else self.f.unit)

    def block(self, i: int, residual: Sized | None, pending: Sized, shared: SharedSizes) -> tuple[Sized, Sized]:
        """Run a layer, as FusedBlock of model/fused.py does."""
        if not self.sizes.is_fused:
            return self.plain_block(i, residual, pending, shared)
        f, m, post_norm = self.f, self.m, self.m.apply_residual_connection_post_layernorm
        is_fp8 = self.sizes.precision.multiplies_fp8(i, m.num_layers or 0)
        is_joint = is_fp8 and self.sizes.tp == 1 and not post_norm
        sites = shared.sites
        entering = shared if residual is not None or self.joins_embedding else shared._replace(sites=None)
        base, q, k, v = (self.enter_fp8 if is_joint else self.enter)(residual, pending, is_fp8, entering)
        o = f.attend(q, k, v, self.heads)
        branch = f.row_parallel(f.flattened(o, self.heads), self.matrices["attn.proj"], is_fp8=is_fp8)
        fc, proj = self.matrices["mlp.fc"], self.matrices["mlp.proj"]
        if is_joint:
            return f.norm_mlp(base, branch, self.norm(sites), fc, proj, m.add_bias_linear)
        x, z = f.add_norm(base, branch, self.hidden, self.norm(sites))
        z = self.begins_vectors(z)
        u = f.column_parallel(z, fc, is_fp8=is_fp8)
        a = f.activate(u, fc[0], proj[1], m.add_bias_linear)
        del u
        return f.converted(z, x.width) if post_norm else x, f.row_parallel(a, proj, m.add_bias_linear, is_fp8)

    def plain_block(self, i: int, residual: Sized | None, pending: Sized, shared: SharedSizes) -> tuple[Sized, Sized]:
        """Run a layer of torch's own functions, as Block of model/gpt.py does."""
        f, m, h, low = self.f, self.m, self.hidden, self.sizes.formats.low
        is_fp8 = self.sizes.precision.multiplies_fp8(i, m.num_layers or 0)
        sites = shared.sites
        x = self.join(residual, pending, None if residual is None and not self.joins_embedding else sites)
        y, post_norm = f.converted(f.norm(x, h, self.centers), low), m.apply_residual_connection_post_layernorm
        base = f.converted(y, x.width) if post_norm else x
        qkv = f.column_parallel(y, self.matrices["attn.qkv"], m.qkv_bias, is_fp8, ends=self.ends_at_qkv)
        q, k, v = f.split_plainly(qkv, self.heads, shared.rotation, m.qk_layernorm, self.centers)
        o = f.flattened(f.attend(q, k, v, self.heads), self.heads)
        branch = f.row_parallel(o, self.matrices["attn.proj"], m.add_bias_linear, is_fp8)
        del qkv, q, k, v, o
        stream = self.join(base, branch, sites)
        del base, branch
        z = f.converted(f.norm(x if m.use_parallel_residual else stream, h, self.centers), low)
        z = self.begins_vectors(z)
        fc, proj = self.matrices["mlp.fc"], self.matrices["mlp.proj"]
        leaving = f.converted(z, x.width) if post_norm else stream
        u = f.column_parallel(z, fc, m.add_bias_linear, is_fp8)
        a = f.activate_plainly(u, m.activation)
        del u
        return leaving, f.row_parallel(a, proj, m.add_bias_linear, is_fp8)

    def enter(
        self, residual: Sized | None, pending: Sized, is_fp8: bool, shared: SharedSizes
    ) -> tuple[Sized, Sized, Sized, Sized]:
        """Return the residual stream, and attention's inputs."""
        x, y = self.f.add_norm(residual, pending, self.hidden, self.first_norm(residual, shared.sites))
        qkv = self.f.column_parallel(y, self.matrices["attn.qkv"], is_fp8=is_fp8, ends=self.ends_at_qkv)
        q, k, v = self.f.split_heads(qkv, self.heads, shared.rotation, self.m.qkv_bias)
        return self.f.converted(y, x.width) if self.m.apply_residual_connection_post_layernorm else x, q, k, v

    def enter_fp8(
        self, residual: Sized | None, pending: Sized, is_fp8: bool, shared: SharedSizes
    ) -> tuple[Sized, Sized, Sized, Sized]:
        """Do the same by one function."""
        norm, qkv = self.first_norm(residual, shared.sites), self.matrices["attn.qkv"]
        return self.f.norm_heads(residual, pending, norm, qkv, self.heads, shared.rotation, self.m.qkv_bias)

    # The loss

    def loss(self, logits: Sized) -> Sized:
        """Return the loss: the backward pass overwrites the logits with their gradient."""
        lse = self.memory.new(self.tokens, FLOAT)
        losses = self.memory.new(self.tokens, FLOAT)
        kept = logits.view()

        def backward(gradient: Sized) -> list[Sized | None]:
            copy = self.memory.new(self.tokens, FLOAT)
            del copy
            return [kept.view()]

        losses.node = GraphNode([logits], [lse], backward)
        return losses

    def begin_micro_batch(self, is_first: bool) -> None:
        self.f.adds_gradients = not is_first or self.sizes.parts > 1
        self.f.knows_scales = not is_first

    def run_step(self) -> None:
        """Run the kinds of micro-batches forward and backward, without a pipeline."""
        if self.shards is not None:
            begin_step(self.memory, [self.shards])
        for is_first in (True, False)[: min(self.sizes.micro_batches, 2)]:
            self.begin_micro_batch(is_first)
            differentiate([(self.total(self.loss(self.forward())), None)])
            if self.shards is not None:
                self.shards.finish()
        if self.shards is not None:
            end_step(self.memory, [self.shards])
        self.buckets = None

    def passes(self, is_first: bool) -> Iterator[None]:
        """Run the passes of a stage of a pipeline: forward, backward, and what is deferred."""
        received, arrived = None, list[Sized]()

        def keep(gradient: Sized) -> list[Sized | None]:
            arrived.append(gradient)
            return []

        if not self.stage.has_embedding:
            elements, width = self.rows * self.hidden, self.sizes.formats.stream
            memory = Allocation(self.memory, 0 if self.stage.is_fed_here else elements * width, "activations")
            received = Sized(memory, elements, width, GraphNode([], [], keep))
            del memory
        self.f.waiting = [] if self.sizes.splits_backward else None
        self.begin_micro_batch(is_first)
        output = self.forward(received)
        output = self.total(self.loss(output)) if self.stage.has_head else output
        yield
        gradient = None if self.stage.has_head else self.received_gradient(output)
        differentiate([(output, gradient and gradient.view())])
        del output, gradient, received
        if self.shards is not None:
            self.shards.finish()
        left = sum(x.data.size for x in arrived) if self.stage.is_fed_here else 0
        arrived.clear()
        if left:
            self.memory.note(self.memory.handed, left, "activations")
        yield
        self.compute_deferred()
        yield

    def received_gradient(self, output: Sized) -> Sized:
        data = Allocation(self.memory, output.elements * output.width, "activations", self.stage.feeds_here)
        return Sized(data, output.elements, output.width)

    def compute_deferred(self) -> None:
        """Compute the gradients of weights; those of a unit come one after the other."""
        waiting = self.f.waiting or []
        while waiting:
            product = waiting.pop(0)
            self.f.give_product(*product.matrix, product.unit)
            if not waiting or waiting[0].unit != product.unit:
                self.f.end(product.unit)
        self.f.waiting = None

    def total(self, losses: Sized) -> Sized:
        """Return the sum of the losses."""
        total = self.memory.new(1, FLOAT)
        total.node = GraphNode([losses], [], lambda gradient: [self.memory.new(1, FLOAT)])
        return total


def widths(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the outputs and inputs of a matrix, or of a stack of them."""
    return math.prod(shape[:-1]), shape[-1]


def make_buckets(memory: Memory, sizes: PassSizes, stages: list[Stage]) -> Buckets:
    """Return the buckets of all stages of a rank with ZeRO 2."""
    m, elements = sizes.model, Counter[str]()
    layer = {f"h.0.{name}": shape for name, shape in counts.layer_shapes(m).items()}
    outer = counts.outer_shapes(m, sizes.padded, m.max_position_embeddings or sizes.length)
    first, last = any(stage.has_embedding for stage in stages), any(stage.has_head for stage in stages)
    layers, late = sum(stage.layers for stage in stages), {"ln_f": last, "wpe": first, "ln_emb": first}
    for name, shape in (layer | outer).items():
        unit = sizes.bucket_of(name)
        times = late.get(shard.unit(name), layers) if unit in shard.LATE else 1
        elements[unit] += flat_size({name: cut_shape(name, shape, sizes.tp)}, 1) * times
    return Buckets(memory, elements, sizes.parts, sizes.formats.full)


def make_shards(memory: Memory, sizes: PassSizes, stage: Stage) -> Shards:
    """Return the units of a stage with ZeRO 3."""
    m, tp = sizes.model, sizes.tp
    outer = counts.outer_shapes(m, sizes.padded, m.max_position_embeddings or sizes.length)
    tied, first, last = not m.untie_embeddings_and_output_weights, stage.has_embedding, stage.has_head
    held = {"wte": first or (last and tied), "wpe": first, "ln_emb": first, "ln_f": last, "lm_head": last}
    units = {f"h.{i}": shapes_of_layer(m, tp) for i in range(stage.begin, stage.begin + stage.layers)}
    units[REST] = {name: cut_shape(name, shape, tp) for name, shape in outer.items() if held[shard.unit(name)]}
    shards = Shards(memory, units, sizes.shards, (sizes.formats.low, sizes.formats.full))
    shards.keeps_last, shards.keeps_sums = first and last, not sizes.offloads
    return shards


def marked(x: Sized, arrive: Callable[[], object]) -> Sized:
    """Return x, and call `arrive` when its gradient has come."""

    def backward(gradient: Sized) -> list[Sized | None]:
        arrive()
        return [gradient]

    return x.view(GraphNode([x], [], backward))
