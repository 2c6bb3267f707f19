"""Validation: the mean loss on data sets, between two steps and at the end of a run."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.errors import BAD_DATA, NON_FINITE
from meshwright.config.problem import SettingsError
from meshwright.data.feed import Feed
from meshwright.data.loader import Batch
from meshwright.data.samples import Dataset
from meshwright.model.loss import loss_sum
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.training.log.lines import Check
from meshwright.training.log.metrics import Metrics
from meshwright.training.loss_parts import LossParts
from meshwright.training.micro_step import Network
from meshwright.training.state.state import State
from meshwright.training.step import CHECK_MASKS


class Validator:
    """The validations of one run; every rank takes part."""

    between_steps = True

    def __init__(
        self, state: State, feed: Feed, metrics: Metrics, is_cut_short: Callable[[], bool]
    ) -> None:
        """`is_cut_short` tells whether a signal ends a validation."""
        self.state, self.feed, self.metrics = state, feed, metrics
        self.is_cut_short = is_cut_short
        self.config, self.progress, self.net = state.config, state.progress, state.net

    def due(self, step: int) -> bool:
        return step % self.config.training.eval_interval == 0

    def run(self, step: int) -> None:
        """Validate, and note the step if its loss is the lowest so far."""
        p = self.progress
        loss = self.validate("valid")
        # A validation that was cut short has no loss.
        if math.isfinite(loss) and (p.best_loss is None or loss < p.best_loss):
            p.best_iteration, p.best_loss = step, loss

    def validate(self, split: Literal["valid", "test"], is_at_end: bool = False) -> float:
        """Print the loss on each set of a split and return their mean, NaN if there is no set."""
        heartbeat.enter("validation")
        sets = self.feed.sets_of(split)
        averaged, seconds = self.validate_average(sets, is_at_end)
        losses = [
            self.validate_set(key, dataset, is_at_end, averaged.get(key), seconds)
            for key, dataset in sets.items()
        ]
        return sum(losses) / len(losses) if losses else math.nan

    def validate_average(
        self, sets: Mapping[str, Dataset], is_at_end: bool
    ) -> tuple[dict[str, float], float]:
        """Return the average's loss on each set ({} without --ema), and the seconds for a set."""
        begun, store = time.perf_counter(), self.net.store
        if store.average is None or not sets or not self.config.training.eval_iters:
            return {}, 0.0
        with store.averaged():
            losses = {key: self.loss_on(key, dataset, is_at_end) for key, dataset in sets.items()}
        return losses, (time.perf_counter() - begun) / len(sets)

    def validate_set(
        self,
        key: str,
        dataset: Dataset,
        is_at_end: bool,
        averaged: float | None,
        more_seconds: float,
    ) -> float:
        """Return and record the mean loss on one set; NaN, without a record, if it was cut short.

        `averaged` is the loss of the average of --ema, which took `more_seconds`.
        """
        begun = time.perf_counter()
        if not self.config.training.eval_iters or self.is_cut_short():
            return math.nan
        assert self.config.data.seq_length
        parts = LossParts(dataset, self.config.data.seq_length, self.net)
        loss = self.loss_on(key, dataset, is_at_end, parts)
        # After a signal nothing may delay the save: the process may be killed within seconds.
        if self.is_cut_short():
            return math.nan

        split, _, set_name = key.partition("/")
        check = Check(
            self.progress.iteration,
            "test" if split == "test" else "validation",
            loss,
            is_at_end,
            set_name,
            time.perf_counter() - begun + more_seconds,
            parts.by_position,
            parts.by_data,
            averaged,
        )
        self.metrics.validation(self.progress.consumed_train_samples, check)
        if not math.isfinite(loss) and self.config.training.on_nonfinite.word != "skip":
            raise SettingsError(
                f"iteration {self.progress.iteration}: the loss on the {key} set is {loss}, so this "
                f"step is not saved; lower {{lr}} (now {self.config.optimizer.lr}) or warm up longer",
                NON_FINITE,
                everywhere=True,
            )
        return loss

    def loss_on(
        self, key: str, dataset: Dataset, is_at_end: bool, parts: LossParts | None = None
    ) -> float:
        """Return the mean loss of the network's weights on one set.

        On a validation set each validation goes on where the one before ended, which the iteration
        tells; with --full-validation it reads the whole set. A test set is read from its beginning.
        """
        t, size = self.config.training, self.config.global_batch
        is_valid = key.partition("/")[0] == "valid"
        steps, first = t.eval_iters, 0
        at_end: Literal["mask", "wrap"] = "wrap"
        if is_valid and self.config.data.full_validation:
            # Masked samples fill up the last batch.
            steps, at_end = -(-len(dataset) // size), "mask"
        elif is_valid:
            # The validations before this one; at the end, the step may have had its regular one.
            earlier = self.progress.iteration // t.eval_interval - (not is_at_end)
            first = earlier * t.eval_iters * size
        with contextlib.closing(self.feed.validate(dataset, first, size, at_end)) as batches:
            return evaluate(self.net, itertools.islice(batches, steps), self.is_cut_short, parts)

    def validate_mean(self, plain: float) -> None:
        """Validate the mean of --average-last at the end of a run; log its loss beside `plain`.

        `plain` is the loss of the last step. The mean replaces the weights: nothing may train or
        save them afterwards.
        """
        c = self.config.checkpoint
        sets = self.feed.sets_of("valid")
        begun = time.perf_counter()
        if not (sets and self.config.training.eval_iters and c.save) or self.is_cut_short():
            return
        heartbeat.enter("validation")
        averaged = self.state.load_mean()
        if not averaged:
            return
        losses = [self.loss_on(key, dataset, is_at_end=True) for key, dataset in sets.items()]
        loss = sum(losses) / len(losses)
        seconds = round(time.perf_counter() - begun, 3)
        numbers = ", ".join(f"{step:,}" for step in averaged)
        which = f"the mean of the weights of steps {numbers}"
        keep = f"meshwright convert {c.save} DIR --average-last {len(averaged)} writes it"
        line = f" > --average-last: {which} has a validation loss of {loss:.4f}, the last step {plain:.4f}; {keep}"
        self.metrics.event(
            "average", self.progress.iteration, line, steps=averaged, loss=loss, seconds=seconds
        )


def first_term(
    net: Network, batches: list[Batch], samples: list[list[int]], parts: LossParts | None
) -> Callable[[Tensor, int], Tensor]:
    """Return the function that computes the reported loss of micro-batch i from its logits."""

    def compute(logits: Tensor, i: int) -> Tensor:
        # The other terms, such as the z loss, only move the weights.
        losses, *_ = net.loss(logits, batches[i]).values()
        if parts is not None and net.has_results:
            parts.add(samples[i], batches[i], losses)
        return loss_sum(losses, batches[i].loss_mask)

    return compute


@torch.no_grad()
def evaluate(
    net: Network,
    batches: Iterator[list[Batch]],
    should_stop: Callable[[], bool] = lambda: False,
    parts: LossParts | None = None,
) -> float:
    """Return the mean loss of the unmasked tokens of these global batches, without dropout.

    Stop early once `should_stop` is true before a batch; the mean is then that of the batches so
    far. `parts` takes the losses by data set and position.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=net.device)  # loss, tokens
    is_stopped = False
    for micro_batches in batches:
        heartbeat.tick()
        if is_stopped := should_stop():
            break
        on_device = [batch.to(net.device) for batch in micro_batches]
        samples = [batch.sample_ids.tolist() for batch in micro_batches]
        losses = net.infer(on_device, first_term(net, on_device, samples, parts))
        if net.has_results:
            for loss in losses:
                sums[0] += loss
            # Context ranks share samples, and each counts all tokens of them: one count is added.
            sums[1] += 0 if net.layout.at("cp") else sum(b.unmasked for b in micro_batches)
    if net.layout.world > 1:
        dist.all_reduce(sums)
    if parts is not None:
        parts.merge()
    total, tokens = sums.tolist()
    if not tokens and not is_stopped:
        raise SettingsError(
            f"every token of the validation set is masked; {CHECK_MASKS}", BAD_DATA, True
        )
    return total / max(tokens, 1)  # type: ignore[no-any-return]
