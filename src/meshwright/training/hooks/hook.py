"""The hooks of the loop: a run's work beside its steps. loop.py lists them in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from meshwright.runtime.ranks.heartbeat import heartbeat

if TYPE_CHECKING:
    from meshwright.training.hooks.eval_tasks import Scores
    from meshwright.training.hooks.samples import SampleWriter
    from meshwright.training.log.metrics import Metrics
    from meshwright.training.state.state import Progress


class Hook(Protocol):
    """A part of a run that may act after each step.

    With `between_steps` it acts once all steps under way are finished and logged, and its time is
    no part of any step's.
    """

    between_steps: bool

    def due(self, step: int) -> bool:
        """Return whether to act after this step; every rank has the same answer."""

    def run(self, step: int) -> None:
        """Act after the step."""


class PrintGpus:
    """The lines of --nvidia-smi-at."""

    between_steps = True

    def __init__(self, steps: list[int], metrics: Metrics) -> None:
        self.steps, self.metrics = steps, metrics

    def due(self, step: int) -> bool:
        return step in self.steps

    def run(self, step: int) -> None:
        self.metrics.print_gpus()


class WriteSamples:
    """The texts of --sample-interval."""

    between_steps = True

    def __init__(self, writer: SampleWriter, interval: int, metrics: Metrics) -> None:
        self.writer, self.interval, self.metrics = writer, interval, metrics

    def due(self, step: int) -> bool:
        return step % self.interval == 0

    def run(self, step: int) -> None:
        heartbeat.enter("samples")
        self.writer.write(step, self.metrics)


class CollectScores:
    """The scores of --eval-tasks that a process beside the run has computed since the last step."""

    between_steps = False

    def __init__(self, scores: Scores, metrics: Metrics) -> None:
        self.scores, self.metrics = scores, metrics

    def due(self, step: int) -> bool:
        return True

    def run(self, step: int) -> None:
        self.scores.collect(self.metrics)


class ScoreTasks:
    """The scores of --eval-tasks for the weights after a step."""

    between_steps = True

    def __init__(
        self,
        scores: Scores,
        progress: Progress,
        metrics: Metrics,
        is_cut_short: Callable[[], bool],
    ) -> None:
        self.scores, self.progress, self.metrics = scores, progress, metrics
        self.is_cut_short = is_cut_short

    def due(self, step: int) -> bool:
        return step % self.scores.interval == 0

    def run(self, step: int) -> None:
        heartbeat.enter("scores")
        consumed = self.progress.consumed_train_samples
        self.scores.run(step, consumed, self.metrics, self.is_cut_short)

    def finish(self) -> None:
        """Score the weights after the last step."""
        heartbeat.enter("scores")
        p = self.progress
        self.scores.finish(p.iteration, p.consumed_train_samples, self.metrics, self.is_cut_short)
