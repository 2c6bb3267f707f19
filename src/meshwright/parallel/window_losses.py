"""The losses and right labels of windows of tokens, by a model that is whole or cut over ranks.

Every measure of an evaluation cuts its texts into `Window`s and adds up what `score_windows`
returns for each. A `Scorer` runs the model, in whatever layout that is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.data.loader import Batch
from meshwright.data.windows import Window
from meshwright.kernels.cross_entropy import cross_entropy
from meshwright.model.gpt import GPT
from meshwright.model.loss import first_positions
from meshwright.model.positions import Positions
from meshwright.parallel import comm
from meshwright.parallel.layout import Layout
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.parallel.tensor import combine_over


class WindowBatch(NamedTuple):
    """Windows as a micro-batch, padded on the right, where causal attention does not look."""

    tokens: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64
    counted: Tensor  # [B, T] bool
    ranges: int = 0  # of positions, whose losses are returned too


AT_ONCE = 64  # full micro-batches whose windows are sorted by length and given to a scorer together
WIDTH = 16  # micro-batches are multiples of this wide: few widths need few variants of a kernel

# Micro-batches to [rows of all of them, 2 + ranges] float64 on the host: the nats of a row's
# counted predictions, how many of these have the likeliest token as their label, and the nats of
# each range of positions.
Scorer = Callable[[list[WindowBatch]], Tensor]


def score_windows(
    scorer: Scorer,
    windows: Iterable[Window],
    length: int,
    batch: int,
    fixed: bool = False,
    ranges: int = 0,
) -> Iterator[Tensor]:
    """Yield [n, 2 + ranges], what the scorer returns for each window in order, some at a time.

    A micro-batch has `batch` windows of `length` predictions, or more shorter ones; windows are
    sorted by length, because a row is padded to the longest, in steps of WIDTH. With `fixed` every
    micro-batch is [batch, length], for a network that runs no other shape.
    """
    waiting = iter(windows)
    while portion := list(itertools.islice(waiting, AT_ONCE * batch)):
        order = sorted(range(len(portion)), key=lambda i: -len(portion[i].tokens))
        batches = []
        at = 0
        while at < len(order):
            longest = max(1, len(portion[order[at]].tokens) - 1)
            width = length
            if not fixed:
                width = min(length, -(-longest // WIDTH) * WIDTH)
            count = batch * length // width
            some = [portion[i] for i in order[at : at + count]]
            rows = make_rows(some, count if fixed else 0, width)
            batches.append(rows._replace(ranges=ranges))
            at += count
        # After these come the rows that fill the last micro-batch.
        values = scorer(batches)[: len(portion)]
        # Back from the order of lengths to that of the windows.
        ordered = values.new_empty(values.shape)
        ordered[order] = values
        yield ordered


def make_rows(windows: list[Window], at_least: int, width: int) -> WindowBatch:
    """Return a micro-batch of these windows, and of empty rows if they are fewer than asked for."""
    count = max(len(windows), at_least)
    tokens = torch.zeros(count, width, dtype=torch.int64)
    labels = torch.zeros_like(tokens)
    counted = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (ids, first) in enumerate(windows):
        window = torch.as_tensor(ids, dtype=torch.int64)
        n = len(ids) - 1
        tokens[row, :n] = window[:-1]
        labels[row, :n] = window[1:]
        counted[row, first:n] = True
    return WindowBatch(tokens, labels, counted)


def plain_scorer(model: GPT) -> Scorer:
    """Score with a whole model on one device."""
    device = model.wte.weight.device

    def run(batches: list[WindowBatch]) -> Tensor:
        model.eval()
        values = []
        with torch.inference_mode():
            for b in batches:
                logits = model(b.tokens.to(device), Positions())
                values.append(count_hits(logits, b, model.vocab))
                del logits  # before the next ones take as much memory
            return torch.cat(values).cpu()

    return run


def score_part(net: ParallelModel, vocab: int, batches: list[WindowBatch]) -> Tensor:
    """Score with this rank's part of a model: the sum of all ranks' results is that of a scorer.

    Copies of the model share out the micro-batches, and context ranks the columns of each. All run
    equally many passes, because with ZeRO 3 they gather weights for each other: surplus ones repeat
    a micro-batch and do not count.
    """
    layout = net.layout
    # Copy d takes the micro-batches d, d + dp and so on; numbers beyond the last one are surplus.
    copy = layout.at("replicas", "shard")
    numbers = [turn + copy for turn in range(0, len(batches), layout.dp)]
    cut = [cut_columns(batches[i % len(batches)], layout) for i in numbers]

    def count_part(logits: Tensor, i: int) -> Tensor:
        # Tensor ranks have the logits of some ids, context ranks those of some columns.
        return count_hits(
            logits,
            cut[i],
            vocab,
            first=layout.at("tp") * logits.shape[-1],
            group=layout.group("tp"),
            column=layout.at("cp") * logits.shape[1],
        )

    inputs = [Batch(rows.tokens, rows.labels, torch.arange(len(rows.tokens))) for rows in cut]
    results = net.infer(inputs, count_part)
    # What this rank has no part in stays 0.
    out = []
    for rows in batches:
        shape = len(rows.tokens), 2 + rows.ranges
        out.append(torch.zeros(shape, dtype=torch.float64, device=net.device))
    if net.has_results:
        for i, values in zip(numbers, results, strict=True):
            if i < len(batches):
                out[i] = values
    return torch.cat(out)


def cut_columns(rows: WindowBatch, layout: Layout) -> WindowBatch:
    """Return the micro-batch with this context rank's columns."""
    return WindowBatch(
        columns_of(rows.tokens, layout),
        columns_of(rows.labels, layout),
        columns_of(rows.counted, layout),
        rows.ranges,
    )


def columns_of(x: Tensor, layout: Layout) -> Tensor:
    """Return this context rank's columns of [B, T], padded so that all have as many."""
    if layout.cp == 1:
        return x
    padded = F.pad(x, (0, -x.shape[1] % layout.cp))
    return padded.chunk(layout.cp, 1)[layout.at("cp")].contiguous()


def count_hits(
    logits: Tensor,
    rows: WindowBatch,
    vocab: int,
    first: int = 0,
    group: ProcessGroup | None = None,
    column: int = 0,
) -> Tensor:
    """Return [B, 2 + ranges] float64: what a `Scorer` returns for these rows.

    For the ranges, the first column of `rows` is at position `column`. The logits [B, T, ...] may
    cover only the ids from `first` on; the ranks of `group` have the others. `rows` may be on the
    host, from where the places that count are sent without a wait.
    """
    flat = logits.flatten(0, 1)
    labels = rows.labels.flatten().to(logits.device)
    places = rows.counted.flatten().nonzero().squeeze(1).to(logits.device)
    # Only where few places count: else a copy would take more time and memory than it saves.
    if 2 * len(places) < len(flat):
        flat = flat[places]
        labels = labels[places]
    losses = right = flat.new_zeros(len(flat))
    if len(flat):
        losses = cross_entropy(flat, labels, vocab, first, combine_over(group))
        known = flat[:, : max(vocab - first, 0)]
        right = likeliest(known, first, group) == labels
    both = torch.stack([losses.double(), right.double()], dim=1)
    # If all places were computed, those that do not count are left out now.
    if len(both) != len(places):
        both = both[places]
    dense = both.new_zeros(rows.labels.numel(), 2).index_copy_(0, places, both)
    dense = dense.view(*rows.labels.shape, 2)
    if not rows.ranges:
        return dense.sum(1)
    # The nats of each range: a product with a matrix that says which range a column is in.
    columns = torch.arange(column, column + dense.shape[1], device=dense.device)
    firsts = torch.tensor(first_positions(1 << 31)[: rows.ranges], device=dense.device)
    numbers = torch.bucketize(columns, firsts, right=True) - 1
    in_range = F.one_hot(numbers, rows.ranges).double()
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
    negative = (-token - first).where(high == highest, -(1 << 40))
    return -comm.all_reduce(negative, group, "max")
