"""Score windows of tokens with a model, whole or cut over ranks: their loss and right labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.data.loader import Batch
from meshwright.kernels.cross_entropy import cross_entropy
from meshwright.model.gpt import GPT
from meshwright.model.loss import first_positions
from meshwright.model.positions import Positions
from meshwright.parallel import comm
from meshwright.parallel.cut_model import CutModel
from meshwright.parallel.layout import Layout
from meshwright.parallel.tensor import combine_over


class WindowBatch(NamedTuple):
    """Windows as a micro-batch, padded on the right, where causal attention does not look."""

    tokens: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64
    counted: Tensor  # [B, T] bool
    ranges: int = 0  # of positions, whose losses are returned too


# Micro-batches to [rows of all of them, 2 + ranges] float64 on the host: the nats of a row's
# counted predictions, how many of these have the likeliest token as their label, and the nats of
# each range of positions.
Scorer = Callable[[list[WindowBatch]], Tensor]


def plain_scorer(model: GPT) -> Scorer:
    """Score with a whole model on one device."""
    device = model.wte.weight.device

    def run(batches: list[WindowBatch]) -> Tensor:
        model.eval()
        with torch.inference_mode():
            return torch.cat(
                [count_hits(model(b.tokens.to(device), Positions()), b, model.vocab) for b in batches]
            ).cpu()

    return run


def score_part(net: CutModel, vocab: int, batches: list[WindowBatch]) -> Tensor:
    """Score with this rank's part of a model: the sum of all ranks' results is that of a scorer.

    Copies of the model share out the micro-batches, and context ranks the columns of each. All run
    equally many passes, because with ZeRO 3 they gather weights for each other: surplus ones repeat
    a micro-batch and do not count.
    """
    layout = net.layout
    numbers = [turn + layout.at("replicas", "shard") for turn in range(0, len(batches), layout.dp)]
    cut = [cut_columns(batches[i % len(batches)], layout) for i in numbers]

    def count_part(logits: Tensor, i: int) -> Tensor:
        column = layout.at("cp") * logits.shape[1]
        return count_hits(logits, cut[i], vocab, layout.at("tp") * logits.shape[-1], layout.group("tp"), column)

    results = net.infer([Batch(rows.tokens, rows.labels, torch.arange(len(rows.tokens))) for rows in cut], count_part)
    out = [torch.zeros(len(rows.tokens), 2 + rows.ranges, dtype=torch.float64, device=net.device) for rows in batches]
    for i, values in zip(numbers, results, strict=True) if net.has_results else ():
        if i < len(batches):
            out[i] = values
    return torch.cat(out)


def cut_columns(rows: WindowBatch, layout: Layout) -> WindowBatch:
    """Return the micro-batch with this context rank's columns."""
    tokens, labels, counted = (columns_of(x, layout) for x in (rows.tokens, rows.labels, rows.counted))
    return WindowBatch(tokens, labels, counted, rows.ranges)


def columns_of(x: Tensor, layout: Layout) -> Tensor:
    """Return this context rank's columns of [B, T], padded so that all have as many."""
    if layout.cp == 1:
        return x
    return F.pad(x, (0, -x.shape[1] % layout.cp)).chunk(layout.cp, 1)[layout.at("cp")].contiguous()


def count_hits(
    logits: Tensor, rows: WindowBatch, vocab: int, first: int = 0, group: ProcessGroup | None = None, column: int = 0
) -> Tensor:
    """Return [B, 2] float64: the nats of each row's counted predictions, and how many are right.

    With ranges of positions, the nats of each follow; the first column of `rows` is at `column`.

    The logits [B, T, ...] may cover only the ids from `first` on; the ranks of `group` have the
    others. `rows` may be on the host, from where the places that count are sent without a wait.
    """
    flat, labels = logits.flatten(0, 1), rows.labels.flatten().to(logits.device)
    places = rows.counted.flatten().nonzero().squeeze(1).to(logits.device)
    if 2 * len(places) < len(flat):  # else a copy would take more time and memory than what it saves
        flat, labels = flat[places], labels[places]
    losses = right = flat.new_zeros(len(flat))
    if len(flat):
        losses = cross_entropy(flat, labels, vocab, first, combine_over(group))
        right = likeliest(flat[:, : max(vocab - first, 0)], first, group) == labels
    both = torch.stack([losses.double(), right.double()], dim=1)
    if len(both) != len(places):
        both = both[places]
    dense = both.new_zeros(rows.labels.numel(), 2).index_copy_(0, places, both)
    dense = dense.view(*rows.labels.shape, 2)
    if not rows.ranges:
        return dense.sum(1)
    columns = torch.arange(column, column + dense.shape[1], device=dense.device)
    firsts = torch.tensor(first_positions(1 << 31)[: rows.ranges], device=dense.device)
    in_range = F.one_hot(torch.bucketize(columns, firsts, right=True) - 1, rows.ranges).double()
    return torch.cat((dense.sum(1), dense[..., 0] @ in_range), 1)


def likeliest(logits: Tensor, first: int, group: ProcessGroup | None) -> Tensor:
    """Return the token with the largest logit in each row, the lowest of equal ones."""
    if group is None:
        return logits.argmax(-1)
    if not logits.shape[1]:  # this rank's ids are all padding
        logits = logits.new_full((len(logits), 1), -torch.inf)
    high, token = logits.max(-1)
    highest = comm.all_reduce(high, group, "max")
    # The smallest id, as a maximum: other ranks' rows have one that is larger than any.
    return -comm.all_reduce((-token - first).where(high == highest, -(1 << 40)), group, "max")
