"""Saves of a run: between two steps, at its beginning and end, and after it went back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.base.console import say
from meshwright.data.samples import OrderedSamples
from meshwright.runtime.ranks.heartbeat import heartbeat

if TYPE_CHECKING:
    from meshwright.data.feed import Feed
    from meshwright.training.health.guard import Guard
    from meshwright.training.health.replicas import Replicas
    from meshwright.training.log.metrics import Metrics
    from meshwright.training.state.state import State


class Saving:
    """The saves of a run, with their rows in the log; all ranks save together."""

    between_steps = True

    def __init__(
        self, state: State, feed: Feed, metrics: Metrics, guard: Guard, replicas: Replicas | None
    ) -> None:
        self.state, self.feed, self.metrics = state, feed, metrics
        self.guard, self.replicas = guard, replicas
        self.settings, self.progress = state.config.checkpoint, state.progress

    def due(self, step: int) -> bool:
        """Return whether to save this step: regularly, or because a validation noted it as best."""
        c = self.settings
        is_regular = bool(c.save_interval) and step % (c.save_interval or 1) == 0
        is_best = c.keep_best and self.progress.best_iteration == step
        return bool(c.save) and (is_regular or is_best)

    def run(self, step: int) -> None:
        heartbeat.enter("save")
        # A checkpoint of damaged weights would spoil every run that goes on from it.
        if self.replicas is not None:
            self.replicas.require_equal(step)
        self.guard.note_save()
        self.report_samples_used()
        # A step's rows must be on disk before its checkpoint.
        self.metrics.sync()
        seconds = self.state.save()
        self.record_failures()
        if seconds is not None:
            is_in_flight = self.state.saver.in_flight
            self.metrics.row("save", step, seconds=round(seconds, 3), background=is_in_flight)

    def run_at_start(self) -> None:
        """Save the first weights, with --save-at-start."""
        if self.settings.save and self.settings.save_at_start and not self.progress.iteration:
            self.run(0)

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight has failed."""
        background = self.state.saver.background
        return background is not None and background.failed

    def wait(self) -> None:
        """Wait for the save in flight; raise its failure on every rank."""
        self.state.saver.wait()
        self.record_failures()

    def record_failures(self) -> None:
        """Log the saves that failed, after which the run goes on: --save-error warn."""
        for step, reason in self.state.saver.take_failures():
            self.metrics.row("save-failed", step, reason=reason)

    def report_samples_used(self, aloud: bool = False) -> None:
        """Log how many samples of each blended data set were used; `aloud` prints them too."""
        consumed = self.progress.consumed_train_samples
        train = self.feed.datasets.get("train") if self.state.team.is_rank_0 else None
        if not isinstance(train, OrderedSamples):
            return
        used = train.count_used(consumed)
        if not used:
            return
        self.metrics.row("used", self.progress.iteration, consumed_samples=consumed, samples=used)
        if aloud:
            # A blend may have thousands of files; metrics.jsonl has them all.
            most_used = sorted(used.items(), key=lambda item: -item[1])[:20]
            for prefix, number in most_used:
                say(f" > samples of each data set so far: {number:12d} {prefix}")
