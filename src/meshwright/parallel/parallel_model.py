"""One rank's part of a model that may be cut over ranks, and forward passes of all parts together.

All ranks of one copy of the model call these passes together, with the same micro-batches. A stage
receives the residual stream, computes its layers and sends the stream on; the last one has the
logits, each tensor rank those of its ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.model.gpt import GPT
from meshwright.model.positions import Positions, StreamPositions
from meshwright.parallel import comm
from meshwright.parallel.layout import Layout
from meshwright.parallel.pipeline import Pipeline, stages
from meshwright.parallel.tensor import SampleColumns, shard_layers

if TYPE_CHECKING:
    from meshwright.config.schema import Model
    from meshwright.data.loader import Batch

# (logits of this rank's ids, number of the micro-batch) -> result
Finish = Callable[[Tensor, int], Tensor]


class ModelInput(NamedTuple):
    """A micro-batch as the model reads it."""

    tokens: Tensor  # [B, T] int64
    where: Positions


@dataclass(kw_only=True)
class ParallelModel:
    """One rank's part of a model, with what it needs to run together with the other ranks."""

    parts: list[Any]  # the complete model, or the stages of one pipeline rank
    device: torch.device
    layout: Layout = Layout()
    sequence: bool = False  # sequence parallelism
    heads: range | None = None  # the attention heads computed on this rank
    columns: SampleColumns = field(default_factory=SampleColumns)  # what sequence parallelism reads
    pipeline: Pipeline | None = None

    @property
    def has_results(self) -> bool:
        """Whether this rank's results count: the last stage's do, once per tensor group."""
        return (self.pipeline is None or self.parts[-1].has_head) and not self.layout.at("tp")

    def where(self, b: Batch, seed: int | None) -> Positions:
        """Return the positions of this rank's part of a micro-batch; no seed means no dropout."""
        t = b.tokens.shape[1]
        device = b.tokens.device
        layout = self.layout
        samples = None if seed is None else b.sample_ids
        w = Positions(
            samples,
            seed=seed or 0,
            first_sample=b.first_sample,
            position_ids=b.position_ids,
            documents=b.doc_ids,
            heads=self.heads,
        )
        # A context rank's tokens are some columns of each sample; attention sees all columns.
        first = layout.at("cp") * t
        if layout.cp > 1:
            w.columns = torch.arange(first, first + t, device=device)
            w.length = t * layout.cp
        if self.sequence:
            w.stream = self.stream_of(b, samples, first)
        return w

    def stream_of(self, b: Batch, samples: Tensor | None, first: int) -> StreamPositions:
        """Return the positions of the tokens between a tensor rank's parts of the layers."""
        t = b.tokens.shape[1]
        rank = self.layout.at("tp")
        # With sequence parallelism a rank has some of all tokens [B t], as one row.
        rows = b.tokens.numel() // self.layout.tp
        n = torch.arange(rank * rows, (rank + 1) * rows, device=b.tokens.device)
        columns = first + n % t
        of_samples = None if samples is None else samples[n // t][None]
        ids = None
        if b.position_ids is not None:
            ids = b.position_ids.flatten()[n][None]
        return StreamPositions(of_samples, columns[None], ids)

    def infer(
        self, batches: Sequence[Batch], finish: Finish, seed: int | None = None
    ) -> list[Tensor]:
        """Return what `finish` makes of each micro-batch's logits; no seed means no dropout.

        Ranks without the model's head return nothing.
        """
        # Changing the mode goes through all modules, so it is done only where it changes.
        drops = seed is not None
        for part in self.parts:
            if part.training != drops:
                part.train(drops)
        on_device = [batch.to(self.device) for batch in batches]
        inputs = [ModelInput(b.tokens, self.where(b, seed)) for b in on_device]
        return self.run_passes(inputs, finish)

    def run_part(
        self, part: Any, given: ModelInput, stream: Tensor | None, **options: bool
    ) -> Tensor:
        """Return a part's logits or, before the last stage, the next stage's `stream`."""
        self.columns.number = given.tokens.shape[1]
        # A custom model need not take `stream`, so it is not passed to the first stage.
        if stream is None:
            return part(given.tokens, given.where, **options)  # type: ignore[no-any-return]
        return part(given.tokens, given.where, stream=stream, **options)  # type: ignore[no-any-return]

    @torch.no_grad()
    def run_passes(
        self, inputs: Sequence[ModelInput], finish: Finish, last_only: bool = False
    ) -> list[Tensor]:
        """Run the passes of `infer`; with `last_only` the logits are those of the last tokens."""
        options = {"last_only": True} if last_only else {}

        def run_and_finish(part: Any, i: int, stream: Tensor | None) -> Tensor:
            out = self.run_part(part, inputs[i], stream, **options)
            # A custom model, which has no pipeline, need not say whether it has a head.
            return finish(out, i) if self.pipeline is None or part.has_head else out

        if self.pipeline is not None:
            return self.pipeline.evaluate([tokens for tokens, _ in inputs], run_and_finish)
        return [run_and_finish(self.parts[0], i, None) for i in range(len(inputs))]

    # Generation, which has one stage on each pipeline rank

    def open_pipeline(self) -> None:
        """Connect the ranks, all in the same order, before the first pass."""
        comm.open_all(self.layout, self.device)
        if self.layout.pp > 1:
            (part,) = self.parts
            dtype = next(part.parameters()).dtype
            self.pipeline = Pipeline(
                self.layout, "1f1b", self.parts, part.m.hidden_size, False, dtype
            )
            self.pipeline.open(self.device)
            # From the last stage to the first there is one more path.
            self.send_to_rank_0(torch.zeros(1, dtype=dtype, device=self.device), (1,))

    def gather_ids(self, logits: Tensor) -> Tensor:
        """Return the logits of all ids, from every tensor rank's own."""
        group = self.layout.group("tp")
        if group is None:
            return logits
        # The ranks' parts come one below the other, and belong side by side.
        parts = comm.all_gather(logits, group).chunk(self.layout.tp)
        return torch.cat(parts, -1)

    def send_to_rank_0(self, x: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """Pass a tensor of the last stage to rank 0; return it there, as on one stage alone."""
        if self.pipeline is None or self.layout.at("tp"):
            return x
        lane = self.layout.groups["forward around"]
        received = None
        (part,) = self.parts
        if part.has_head:
            assert x is not None and x.shape == shape
            dist.send(x.contiguous(), self.pipeline.ranks[0], group=lane)
        elif part.has_embedding:
            received = torch.empty(shape, dtype=self.pipeline.dtype, device=self.device)
            dist.recv(received, self.pipeline.ranks[-1], group=lane)
        return received


def build_parallel_model(
    m: Model,
    sizes: tuple[int, int, int],
    layers: list[int],
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
) -> ParallelModel:
    """Build this rank's part of a model to evaluate or generate with; its weights are not set.

    `sizes` are the vocabulary's, true and padded, and the number of positions. `layers` holds the
    number of layers of each pipeline stage.
    """
    # Cut before memory is allocated: on the meta device a tensor has a shape only.
    with torch.device("meta"):
        (part,) = stages(lambda: GPT(m, *sizes), layers, layout)
        heads = shard_layers(part, layout, None, SampleColumns())
    part.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    return ParallelModel(parts=[part], device=device, layout=layout, heads=heads)
