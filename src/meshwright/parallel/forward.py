"""Forward passes of a model that is cut over ranks, without gradients: evaluation, generation.

All ranks of one copy of the model call `Runner.run` together, with the same tokens. A stage
receives the residual stream, computes its layers and sends the stream on; the last one has the
logits, each tensor rank those of its ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.model.attention import Where
from meshwright.model.gpt import GPT
from meshwright.parallel import comm
from meshwright.parallel.layout import Layout
from meshwright.parallel.pipeline import Pipeline, stages
from meshwright.parallel.tensor import spread
from meshwright.settings.schema import Model


def as_is(logits: Tensor) -> Tensor:
    return logits


class Piece(NamedTuple):
    """A micro-batch."""

    tokens: Tensor  # [B, T] int64
    where: Where
    finish: Callable[[Tensor], Tensor] = as_is  # what the last stage makes of this rank's logits


def build(m: Model, vocab: int, padded: int, positions: int, layers: list[int], layout: Layout) -> Runner:
    """Build this rank's part of the model on the meta device.

    `layers` holds the number of layers of each pipeline stage.
    """
    with torch.device("meta"):
        (part,) = stages(lambda: GPT(m, vocab, padded, positions), layers, layout)
        heads = spread(part, layout, None, 0)
    return Runner(part, layout, heads, padded)


class Runner:
    """One rank's part of a model, and its passes together with the other ranks."""

    def __init__(self, model: GPT, layout: Layout, heads: range | None, padded: int) -> None:
        self.model, self.layout, self.heads, self.padded = model, layout, heads, padded
        self.pipeline: Pipeline | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        self.model.to(dtype).to_empty(device=device).eval().requires_grad_(False)

    def open(self) -> None:
        """Connect the ranks, all in the same order, before the first pass."""
        comm.open_all(self.layout, self.device)
        if self.layout.pp > 1:
            hidden = self.model.m.hidden_size or 0
            self.pipeline = Pipeline(self.layout, "1f1b", [self.model], hidden, False, self.dtype)
            self.pipeline.open(self.device)
            self.send_to_lead(torch.zeros(1, dtype=self.dtype, device=self.device), (1,))

    def columns(self, x: Tensor) -> Tensor:
        """Return this context rank's columns of [B, T], padded so that all have as many."""
        if self.layout.cp == 1:
            return x
        return F.pad(x, (0, -x.shape[1] % self.layout.cp)).chunk(self.layout.cp, 1)[self.layout.at("cp")].contiguous()

    def where(self, columns: int) -> Where:
        """Return the positions of sequences that a pass reads whole; a context rank has a part."""
        if self.layout.cp == 1:
            return Where(heads=self.heads)
        first = self.layout.at("cp") * columns
        here = torch.arange(first, first + columns, device=self.device)
        return Where(columns=here, length=columns * self.layout.cp, heads=self.heads)

    @torch.inference_mode()
    def run(self, pieces: list[Piece], last_only: bool = False) -> list[Tensor]:
        """Return what the last stage makes of the micro-batches' logits, [B, T or 1, ids].

        The ids are those of this tensor rank; other stages return nothing.
        """

        def forward(part: GPT, piece: Piece, stream: Tensor | None) -> Tensor:
            out: Tensor = part(piece.tokens, piece.where, last_only=last_only, stream=stream)
            return piece.finish(out) if part.last else out

        if self.pipeline is not None:
            return self.pipeline.evaluate(pieces, forward)
        return [forward(self.model, piece, None) for piece in pieces]

    def gather_ids(self, logits: Tensor) -> Tensor:
        """Return the logits of all ids, from every tensor rank's own."""
        group = self.layout.group("tp")
        return logits if group is None else torch.cat(comm.all_gather(logits, group).chunk(self.layout.tp), -1)

    def send_to_lead(self, x: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """Pass a tensor of the last stage to rank 0; return it there, as on one stage alone."""
        if self.pipeline is None or self.layout.at("tp"):
            return x
        lane, got = self.layout.groups["forward around"], None
        if self.model.last:
            assert x is not None and x.shape == shape
            dist.send(x.contiguous(), self.pipeline.ranks[0], group=lane)
        elif self.model.first:
            got = torch.empty(shape, dtype=self.dtype, device=self.device)
            dist.recv(got, self.pipeline.ranks[-1], group=lane)
        return got
