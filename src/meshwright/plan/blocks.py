"""The forward pass of a rank's part of GPT, in tensors of which only the size counts.

It mirrors model/gpt.py and model/fused.py, and training/step.py for the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.model.counts import layer_matrices
from meshwright.plan.passes import FLOAT, LONG, Formats, Functions, HeadCounts
from meshwright.plan.tensors import Memory, Node, Sized, differentiate, recomputed
from meshwright.settings.schema import TrainConfig


@dataclass(frozen=True)
class Stage:
    """The part of the network that runs as one: some layers, with the embedding or the head."""

    layers: int
    has_embedding: bool
    has_head: bool


class SizedGPT:
    """A stage's forward passes on one rank."""

    def __init__(self, config: TrainConfig, padded: int, stage: Stage, memory: Memory, processors: int) -> None:
        m, p, precision = config.model, config.parallel, config.precision
        assert m.hidden_size and m.num_attention_heads and m.num_layers and config.data.seq_length
        self.config, self.m, self.stage, self.memory = config, m, stage, memory
        tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
        self.hidden, self.padded, self.batch = m.hidden_size, padded // tp, config.micro_batch
        low = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[precision.dtype]
        full = max(low, 4)
        stream = full if precision.fp32_residual_connection else low
        self.formats = Formats(low, stream, full)
        self.f = Functions(memory, self.formats, tp, p.sequence_parallel, processors)
        self.columns = config.data.seq_length // cp
        self.tokens = self.batch * self.columns  # of the layers' inner tensors
        self.rows = self.tokens // tp if self.f.sequence else self.tokens  # of the residual stream
        self.sizes = {n: (o, i) for n, (o, i) in layer_matrices(m).items()}
        for name, (outputs, inputs) in self.sizes.items():
            self.sizes[name] = (outputs, inputs // tp) if name.endswith("proj") else (outputs // tp, inputs)
        heads, groups = m.num_attention_heads // tp // cp, max(1, m.groups // tp // cp)
        self.heads = HeadCounts(self.batch, config.data.seq_length, heads, groups, m.head_dim)
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
        t, here = self.config.training, self.stage.layers
        n = t.recompute_num_layers
        if t.recompute_granularity != "full":
            return [(here, False)]
        if t.recompute_method == "block":
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

    def back_to_places(self, gradient: Sized) -> list[Sized | None]:
        return [gradient, self.f.new(self.columns * self.hidden) if self.batch > 1 else gradient]

    def give_rows_of_table(self, rows: int) -> list[Sized | None]:
        """Sort the tokens to add their rows to a table's gradient."""
        order = [self.memory.new(rows, LONG) for _ in range(3)]
        del order
        return []

    def run(self, residual: Sized | None, pending: Sized, layers: int, sites: Sized | None, rotation: list[Sized]) -> tuple[Sized | None, Sized]:
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
        outputs, inputs = self.sizes["attn.qkv"]
        q, k, v = f.split_heads(f.column_parallel(y, inputs, outputs), self.heads, rotation, m.qkv_bias)
        base = y if m.apply_residual_connection_post_layernorm else x
        del x, y
        if self.config.training.recompute_granularity == "selective":
            o = recomputed(f.flash, q, k, v, self.heads)
        else:
            o = f.flash(q, k, v, self.heads)
        outputs, inputs = self.sizes["attn.proj"]
        branch = f.row_parallel(o, inputs, outputs)
        x, z = f.add_norm(base, branch, h, True, self.drops, self.centers, sites)
        outputs, inputs = self.sizes["mlp.fc"]
        columns, width = self.sizes["mlp.proj"]
        u = f.column_parallel(z, inputs, outputs)
        a = f.activate(u, outputs, width, m.add_bias_linear)
        del u
        return z if m.apply_residual_connection_post_layernorm else x, f.row_parallel(a, width, columns, m.add_bias_linear)

    # The loss

    def loss(self, logits: Sized) -> Sized:
        """Return the loss: the backward pass overwrites the logits with their gradient."""
        lse, picked = self.memory.new(self.tokens, FLOAT), self.memory.new(self.tokens, FLOAT)
        losses = self.memory.new(self.tokens, FLOAT)
        kept = logits.view()

        def backward(gradient: Sized) -> list[Sized | None]:
            copy = self.memory.new(self.tokens, FLOAT)
            del copy
            return [kept.view()]

        losses.node = Node([logits], [lse], backward)
        return losses

    def forward_backward(self) -> None:
        """training/step.py: forward_backward"""
        tokens, labels = self.memory.new(self.tokens, LONG), self.memory.new(self.tokens, LONG)
        loss = self.loss(self.forward())
        total = self.memory.new(1, FLOAT)
        node, loss = loss.node, None
        total.node = node
        differentiate([(total, self.memory.new(1, FLOAT))])
        del tokens, labels
