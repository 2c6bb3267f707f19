"""A model that is cut over several ranks, as rank 0 calls it: forward passes and scores.

Every rank keeps the keys and values of its own layers and heads. Rank 0 gets the logits of the full
vocabulary, so that tokens are chosen there by the same code as in one process.
"""

from __future__ import annotations

import itertools
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from meshwright.model.cache import Cache, ContinuedTexts
from meshwright.model.positions import Positions
from meshwright.parallel.calls import Calls
from meshwright.parallel.parallel_model import ModelInput, ParallelModel
from meshwright.parallel.window_losses import WindowBatch, score_part
from meshwright.runtime.ranks.team import Team


class ShardedModel:
    """The ranks of a layout. All make one; then rank 0 calls what has no underscore."""

    def __init__(self, model: ParallelModel, padded: int, team: Team) -> None:
        self.model, self.padded, self.calls = model, padded, Calls(team)
        self.calls.actions |= {
            "forward": self._forward,
            "rearrange": self._rearrange,
            "score": self._score,
        }
        # of the caches in use on rank 0
        self.numbers: WeakKeyDictionary[Cache, int] = WeakKeyDictionary()
        self.fresh = itertools.count()
        self.caches: dict[int, Cache] = {}  # this rank's parts of them

    def forward(self, tokens: Tensor, where: Positions, last_only: bool = False) -> Tensor:
        """Return what the whole model would for these tokens; rank 0's own cache stays empty."""
        # The other ranks get integers and tensors only: caches are told apart by numbers.
        head = [int(last_only)]
        rest: list[Tensor] = []
        cached = where.cached
        if cached is not None:
            cache = cached.cache
            if cache not in self.numbers:
                self.numbers[cache] = next(self.fresh)
            head += [self.numbers[cache], cache.slots, cache.length, cached.seen]
            # Caches that rank 0 has dropped are not among these numbers, and are dropped there too.
            alive = torch.tensor(list(self.numbers.values()))
            rest = [alive, cached.slots, cached.used]
            if cached.ends is not None:
                rest.append(cached.ends)
        logits: Tensor = self.calls.call(
            "forward", torch.tensor(head), tokens.cpu(), *(x.cpu() for x in rest)
        )
        return logits

    @torch.inference_mode()
    def _forward(self, head: Tensor, tokens: Tensor, *rest: Tensor) -> Tensor | None:
        model = self.model
        where = Positions(heads=model.heads)
        last_only, *of_cache = head.tolist()
        if of_cache:
            number, slots, length, seen = of_cache
            alive, *rows = rest
            in_use = set(alive.tolist())
            self.caches = {n: cache for n, cache in self.caches.items() if n in in_use}
            cache = self.caches.setdefault(number, Cache(slots, length))
            at, used, *ends = (x.to(model.device) for x in rows)
            where.cached = ContinuedTexts(cache, at, used, seen, *ends)
        inputs = [ModelInput(tokens.to(model.device), where)]
        logits = model.run_passes(
            inputs, lambda logits, i: model.gather_ids(logits), bool(last_only)
        )
        shape = (len(tokens), 1 if last_only else tokens.shape[1], self.padded)
        return model.send_to_rank_0(logits[0] if logits else None, shape)

    def rearrange(self, cache: Cache, rows: Tensor, used: int) -> None:
        self.calls.call("rearrange", torch.tensor([self.numbers[cache], used]), rows.cpu())

    @torch.inference_mode()
    def _rearrange(self, head: Tensor, rows: Tensor) -> None:
        number, used = head.tolist()
        self.caches[number].rearrange(rows.to(self.model.device), used)

    def score(self, batches: list[WindowBatch]) -> Tensor:
        """Score micro-batches as a `Scorer` does; copies of the model share them out."""
        ranges = torch.tensor([rows.ranges for rows in batches])
        tensors: list[Tensor] = []
        for rows in batches:
            # int64 for all, `counted` too, as calls send it
            tensors += [rows.tokens.long(), rows.labels.long(), rows.counted.long()]
        values: Tensor = self.calls.call("score", ranges, *tensors)
        return values

    @torch.inference_mode()
    def _score(self, ranges: Tensor, *tensors: Tensor) -> Tensor:
        # `score` sends three tensors for each micro-batch.
        batches = []
        left = iter(tensors)
        for count in ranges.tolist():
            batches.append(WindowBatch(next(left), next(left), next(left).bool(), count))
        (part,) = self.model.parts
        losses = score_part(self.model, part.vocab, batches)
        return self.calls.sum(losses.cpu())
