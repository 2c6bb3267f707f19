"""The forward pass of a rank's part of GPT, in tensors of which only the size counts.

It mirrors model/gpt.py and model/fused.py, and training/step.py for the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.model.counts import layer_matrices
from meshwright.parallel.pipeline_schedule import SPLIT_BACKWARD
from meshwright.plan.functions import FLOAT, LONG, Formats, Functions, HeadCounts
from meshwright.plan.parameters import WIDTHS, shapes_of_layer
from meshwright.plan.tensors import Memory, Node, Sized, differentiate, recomputed
from meshwright.settings.schema import Model, Precision, TrainConfig


@dataclass(frozen=True)
class Stage:
    """The part of the network that runs as one: some layers, with the embedding or the head."""

    layers: int
    has_embedding: bool = True
    has_head: bool = True


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
    z_loss: bool
    processors: int  # of the device

    @property
    def formats(self) -> Formats:
        low = WIDTHS[self.precision.dtype]
        return Formats(low, max(low, 4) if self.precision.fp32_residual_connection else low, max(low, 4))


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
        bool(t.z_loss_coef),
        processors,
    )


class SizedGPT:
    """A stage's forward passes on one rank."""

    def __init__(self, sizes: PassSizes, stage: Stage, memory: Memory) -> None:
        m = sizes.model
        assert m.hidden_size and m.num_attention_heads
        self.sizes, self.m, self.stage, self.memory = sizes, m, stage, memory
        tp, cp = sizes.tp, sizes.cp
        self.hidden, self.padded, self.batch = m.hidden_size, sizes.padded // tp, sizes.micro_batch
        self.f = Functions(memory, sizes.formats, tp, sizes.sequence, sizes.processors)
        self.columns = sizes.length // cp
        self.tokens = self.batch * self.columns  # of the layers' inner tensors
        self.rows = self.tokens // tp if sizes.sequence else self.tokens  # of the residual stream
        shapes = shapes_of_layer(m, tp)
        self.matrices = {name: widths(shapes[f"{name}.weight"]) for name in layer_matrices(m)}
        heads, groups = m.num_attention_heads // tp // cp, max(1, m.groups // tp // cp)
        self.heads = HeadCounts(self.batch, sizes.length, heads, groups, m.head_dim)
        self.drops, self.centers = m.hidden_dropout > 0, m.normalization == "LayerNorm"

    # The whole network

    def forward(self, stream: Sized | None = None) -> Sized:
        """Return logits, or the stage's output."""
        places, rotation = self.memory.new(self.columns, LONG), self.rotation()
        sites = self.dropout_rows()
        residual, pending = None, self.embed(places) if stream is None else stream
        del stream
        for layers, again in self.stretches():
            if again:
                residual, pending = recomputed(self.run, residual, pending, layers, sites, rotation)
            else:
                residual, pending = self.run(residual, pending, layers, sites, rotation)
        if not self.stage.has_head:
            return self.join(residual, pending, sites)
        _, y = self.f.add_norm(residual, pending, self.hidden, True, self.drops, self.centers, sites)
        self.memory.kind = "logits"
        logits = self.f.column_parallel(y, self.hidden, self.padded)
        self.memory.kind = "activations"
        return logits

    def rotation(self) -> list[Sized]:
        """Return the cosines and sines of rotary positions."""
        half = self.columns * self.m.rotating // 2
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

    def stretches(self) -> list[tuple[int, bool]]:
        """Return numbers of layers that run together, and whether they are recomputed."""
        here, n = self.stage.layers, self.sizes.recomputed_layers
        if self.sizes.granularity != "full":
            return [(here, False)]
        if self.sizes.method == "block":
            return [(1, True)] * min(n, here) + [(max(here - n, 0), False)]
        return [(min(n, here - i), True) for i in range(0, here, n)]

    def embed(self, at: Sized) -> Sized:
        """Return the embeddings of the tokens."""
        x = self.f.new(self.rows * self.hidden)
        x.node = Node([], [], lambda gradient: self.give_rows_of_table(self.rows))
        if self.m.position == "learned":
            columns = self.columns
            places = self.f.new(columns * self.hidden)
            places.node = Node([], [at], lambda gradient: self.give_rows_of_table(columns))
            y = self.f.new(x.elements)
            y.node = Node([x, places], [], self.back_to_places)
            x = y
        return x

    def join(self, residual: Sized | None, pending: Sized, sites: Sized | None) -> Sized:
        """Return residual + dropout(pending)."""
        if sites is not None and self.drops:
            pending = self.f.dropout(pending, sites)
        return pending if residual is None else self.f.add(residual, pending)

    def back_to_places(self, gradient: Sized) -> list[Sized | None]:
        return [gradient, self.f.new(self.columns * self.hidden) if self.batch > 1 else gradient]

    def give_rows_of_table(self, rows: int) -> list[Sized | None]:
        """Sort the tokens to add their rows to a table's gradient."""
        order = [self.memory.new(rows, LONG) for _ in range(3)]
        del order
        return []

    def run(
        self, residual: Sized | None, pending: Sized, layers: int, sites: Sized | None, rotation: list[Sized]
    ) -> tuple[Sized | None, Sized]:
        for _ in range(layers):
            residual, pending = self.block(residual, pending, sites, rotation)
        return residual, pending

    # A layer

    def block(
        self, residual: Sized | None, pending: Sized, sites: Sized | None, rotation: list[Sized]
    ) -> tuple[Sized, Sized]:
        """model/fused.py: FusedBlock.forward"""
        f, m, h = self.f, self.m, self.hidden
        adds = residual is not None or self.drops
        x, y = f.add_norm(residual, pending, h, adds, self.drops, self.centers, sites)
        outputs, inputs = self.matrices["attn.qkv"]
        q, k, v = f.split_heads(f.column_parallel(y, inputs, outputs), self.heads, rotation, m.qkv_bias)
        base = y if m.apply_residual_connection_post_layernorm else x
        del x, y
        if self.sizes.granularity == "selective":
            o = recomputed(f.flash, q, k, v, self.heads)
        else:
            o = f.flash(q, k, v, self.heads)
        outputs, inputs = self.matrices["attn.proj"]
        branch = f.row_parallel(o, inputs, outputs)
        x, z = f.add_norm(base, branch, h, True, self.drops, self.centers, sites)
        outputs, inputs = self.matrices["mlp.fc"]
        columns, width = self.matrices["mlp.proj"]
        u = f.column_parallel(z, inputs, outputs)
        a = f.activate(u, outputs, width, m.add_bias_linear)
        del u
        stream = z if m.apply_residual_connection_post_layernorm else x
        return stream, f.row_parallel(a, width, columns, m.add_bias_linear)

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

        losses.node = Node([logits], [lse], backward)
        return losses

    def run_step(self) -> None:
        """Run a micro-batch forward and backward, without a pipeline."""
        tokens, labels = self.memory.new(self.tokens, LONG), self.memory.new(self.tokens, LONG)
        differentiate([(self.total(self.loss(self.forward())), None)])
        del tokens, labels

    def passes(self) -> Iterator[None]:
        """Run the passes of a stage of a pipeline: forward, backward, and what is deferred."""
        received, arrived = None, list[Sized]()

        def keep(gradient: Sized) -> list[Sized | None]:
            arrived.append(gradient)
            return []

        if not self.stage.has_embedding:
            received = self.f.new(self.rows * self.hidden, self.sizes.formats.stream)
            received.node = Node([], [], keep)
        tokens = self.memory.new(self.tokens, LONG)
        self.f.waiting = [] if self.sizes.splits_backward else None
        output = self.forward(received)
        output = self.total(self.loss(output)) if self.stage.has_head else output
        yield
        gradient = None if self.stage.has_head else self.f.new(output.elements, output.width)
        differentiate([(output, gradient)])
        del output, gradient, received, tokens
        arrived.clear()
        yield
        for _ in self.f.waiting or ():
            self.f.give_product(1, 1)
        self.f.waiting = None
        yield

    def total(self, losses: Sized) -> Sized:
        """Return the sum of the losses."""
        total = self.memory.new(1, FLOAT)
        total.node = Node([losses], [], lambda gradient: [self.memory.new(1, FLOAT)])
        return total


def widths(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the outputs and inputs of a matrix, or of a stack of them."""
    return math.prod(shape[:-1]), shape[-1]
