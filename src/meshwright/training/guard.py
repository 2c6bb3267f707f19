"""Reactions to a step that is not finite: skip it, go back to a checkpoint, or end the run.

All ranks call these together: they decide by numbers that are already summed over them.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Protocol

from meshwright.console import remark
from meshwright.errors import NON_FINITE, UserError
from meshwright.settings.grammar import ON_NONFINITE, reaction

if TYPE_CHECKING:
    from meshwright.settings.schema import TrainConfig
    from meshwright.training.metrics import Metrics
    from meshwright.training.resume import Progress, State
    from meshwright.training.step import Submitted


class Run(Protocol):
    """The parts of loop.Trainer that are needed here."""

    config: TrainConfig
    state: State
    metrics: Metrics
    last: float

    @property
    def progress(self) -> Progress: ...

    def discard_submitted(self) -> None: ...

    def close_batches(self) -> None: ...

    def save(self) -> None: ...


class Guard:
    def __init__(self, trainer: Run) -> None:
        self.trainer, config = trainer, trainer.config
        self.on_nonfinite = reaction(config.training.on_nonfinite, ON_NONFINITE) or ("stop", 0)
        self.applied = 0  # samples of applied steps when the run began or was last rolled back

    def begin(self) -> None:
        self.applied = self.trainer.progress.schedule_samples

    def note_save(self) -> None:
        """Count rollbacks anew if the checkpoint to be saved has further steps."""
        p = self.trainer.progress
        if p.schedule_samples > self.applied:
            p.rollbacks = 0

    def nonfinite(self, step: Submitted, loss: float, norm: float) -> None:
        """React to a step that was not applied, and is no overflow that fp16's scale deals with."""
        t, (word, times) = self.trainer, self.on_nonfinite
        number = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        what = f"iteration {step.iteration} (samples up to {step.consumed}): {number}{self.at_scale(step)}"
        if word == "skip" and t.progress.nonfinite_in_a_row <= times:
            return
        t.discard_submitted()
        if word == "rollback":
            self.roll_back(step, what, "--on-nonfinite", times)
        else:
            raise self.failure(f"{what}, so this step was not applied")

    def at_scale(self, step: Submitted) -> str:
        precision = self.trainer.config.precision
        kind = "smallest" if precision.loss_scale is None else "constant"
        return f" at the {kind} loss scale {step.settings.scale}" if precision.fp16 else ""

    def failure(self, what: str) -> UserError:
        c = self.trainer.config
        kept = f"; the weights and the checkpoints in {c.checkpoint.save} are unchanged" if c.checkpoint.save else ""
        cure = f"lower --lr (now {c.optimizer.lr}), warm up longer{' or use --bf16' if c.precision.fp16 else ''}"
        return UserError(f"{what}{kept}; {cure}", NON_FINITE, everywhere=True)

    def roll_back(self, step: Submitted, what: str, flag: str, times: int) -> None:
        """Load the newest checkpoint and pass over the samples from there to the end of this step.

        The iterations in between count as done, as with --skip-train-iteration-range, so that no
        number of a step or sample occurs twice. A checkpoint that is saved now keeps this decision.
        """
        t, p, begun = self.trainer, self.trainer.progress, time.perf_counter()
        done = p.rollbacks
        if done >= times:
            again = f"this run has gone back {done} times without saving a checkpoint of further steps"
            raise self.failure(f"{what}; {again} ({flag} rollback:{times})")
        to = t.state.roll_back()
        if to is None:
            save, every = t.config.checkpoint.save, t.config.checkpoint.save_interval
            now = f"--save-interval is {every}" if every else "--save-interval is not given"
            none = f"{flag} rollback:{times} cannot go back: {save} holds no checkpoint yet"
            raise self.failure(f"{what}; {none} ({now}; --save-at-start saves the first weights)")
        begin, self.applied = p.consumed_train_samples, p.schedule_samples
        p.iteration, p.consumed_train_samples = step.iteration, step.consumed
        p.rollbacks, p.nonfinite_in_a_row = done + 1, 0
        t.close_batches()
        t.state.skips.append([begin, f"rolled back, passed over to {step.consumed}"])
        seconds = time.perf_counter() - begun
        row = {"from_sample": begin, "to_sample": step.consumed, "rollbacks": done + 1}
        t.metrics.roll_back(to, step.iteration, seconds=round(seconds, 3), reason=what, **row)
        remark(
            f"WARNING: {what}; rolled back to step {to}, passing over iterations {to + 1} to {step.iteration} and "
            f"their samples {begin} to {step.consumed}: rollback {done + 1} of {times}, {seconds:.1f} s"
        )
        t.save()
        t.last = time.perf_counter()
