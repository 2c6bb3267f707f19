"""Reactions to a step that is not finite, and to a loss spike: go back to a checkpoint, or end.

All ranks call these together: they decide by numbers that are already summed over them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from meshwright.console import remark
from meshwright.errors import NON_FINITE, UserError
from meshwright.settings.grammar import ON_NONFINITE, ON_SPIKE, reaction
from meshwright.training.health.diagnosis import Origin, find

if TYPE_CHECKING:
    from meshwright.data.loader import Batch
    from meshwright.ranks.team import Team
    from meshwright.settings.schema import TrainConfig
    from meshwright.training.log.metrics import Metrics
    from meshwright.training.state.resume import Progress, State
    from meshwright.training.step import Network, Submitted


class Run(Protocol):
    """The parts of loop.Trainer that are needed here."""

    config: TrainConfig
    net: Network
    team: Team
    state: State
    metrics: Metrics
    last: float

    @property
    def progress(self) -> Progress: ...

    def discard_submitted(self) -> bool: ...

    def close_batches(self) -> None: ...

    def read_again(self, step: Submitted) -> list[Batch]: ...

    def save(self) -> None: ...


def spread(losses: Collection[float]) -> tuple[float, float]:
    """Return the median of losses and their deviation, which outliers among them hardly move.

    1.4826 x the median absolute deviation is the standard deviation of normal values. It is at
    least a thousandth of the median, so that equal losses do not make a spike of the next.
    """
    middle = statistics.median(losses)
    return middle, max(1.4826 * statistics.median(abs(x - middle) for x in losses), 1e-3 * abs(middle), 1e-9)


class Guard:
    def __init__(self, trainer: Run) -> None:
        self.trainer, config = trainer, trainer.config
        self.on_nonfinite = reaction(config.training.on_nonfinite, ON_NONFINITE) or ("stop", 0)
        self.on_spike = reaction(config.training.on_spike, ON_SPIKE) or ("off", 0)
        self.in_spike = False  # whether the last loss was one's
        self.since = 0  # samples of applied steps when the run began or was last rolled back

    def begin(self) -> None:
        self.since = self.trainer.progress.schedule_samples

    def note_save(self) -> None:
        """Count rollbacks anew if the checkpoint to be saved has further steps."""
        p = self.trainer.progress
        if p.schedule_samples > self.since:
            p.rollbacks = 0

    def nonfinite(self, step: Submitted, loss: float, norm: float) -> None:
        """React to a step that was not applied, and is no overflow that fp16's scale deals with."""
        t, (word, times) = self.trainer, self.on_nonfinite
        has_changed, begun = t.discard_submitted(), time.perf_counter()
        origin = self.locate(step, math.isfinite(loss))
        if has_changed and not origin.is_state:
            origin = origin._replace(text=f"{origin.text} (with the weights after the next step, already under way)")
        number = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        what = f"iteration {step.iteration} (samples up to {step.consumed}): {number}{self.at_scale(step)}"
        row = {"loss": loss, "grad_norm": norm, "where": origin.text, "seconds": round(time.perf_counter() - begun, 3)}
        t.metrics.row("nonfinite", step.iteration, **row, **origin.facts)
        if word == "rollback":
            self.roll_back(step, f"{what}; {origin.text}", "--on-nonfinite", times, origin)
        elif word == "skip" and t.progress.nonfinite_in_a_row <= times:
            remark(f"WARNING: {what}, so this step was not applied; {origin.text}")
        else:
            raise self.failure(f"{what}, so this step was not applied; {origin.text}", origin)

    def locate(self, step: Submitted, has_loss: bool) -> Origin:
        t = self.trainer
        try:
            return find(t.net, t.team, t.read_again(step), step.settings, has_loss)
        except Exception as error:  # the step's own end says more than a failed search
            line = (str(error).splitlines() or [""])[0]
            text = f"where it began was not found: {type(error).__name__}: {line}"
            return Origin(text, {"kind": "unknown"})
        finally:
            t.last = time.perf_counter()

    def at_scale(self, step: Submitted) -> str:
        precision = self.trainer.config.precision
        kind = "smallest" if precision.loss_scale is None else "constant"
        return f" at the {kind} loss scale {step.settings.scale}" if precision.fp16 else ""

    def applied(self, step: Submitted, loss: float) -> None:
        """React to the loss of an applied step if it is a spike; keep it for the next ones."""
        t, (word, times) = self.trainer, self.on_spike
        losses, factor = t.state.losses, t.config.training.spike_factor
        if word == "off":
            return
        middle, deviation = spread(losses) if len(losses) == losses.maxlen else (loss, 1.0)
        losses.append(loss)
        is_spike = loss > middle + factor * deviation
        is_new, self.in_spike = is_spike and not self.in_spike, is_spike
        if not is_spike or (word == "warn" and not is_new):
            return
        before = f"the median of the {losses.maxlen} before"
        far = f"{(loss - middle) / deviation:.1f} deviations above {middle:.4f}, {before}"
        what = f"iteration {step.iteration} (samples up to {step.consumed}): the loss {loss:.4f} is {far}"
        if word != "warn":
            t.discard_submitted()
            t.progress.iteration = step.iteration
        t.metrics.row("spike", step.iteration, loss=loss, median=middle, deviation=deviation)
        if word == "warn":
            remark(f"WARNING: {what}; --on-spike rollback:K would go back to a checkpoint")
        elif word == "rollback":
            self.roll_back(step, what, "--on-spike", times)
        else:
            saved = f"the checkpoints in {t.config.checkpoint.save} are of earlier steps; "
            cure = f"continue with --on-spike rollback:K, or lower --lr (now {t.config.optimizer.lr})"
            saved = saved if t.config.checkpoint.save else ""
            raise UserError(f"{what} (--on-spike stop); {saved}{cure}", NON_FINITE, everywhere=True)

    def failure(self, what: str, origin: Origin | None) -> UserError:
        c = self.trainer.config
        is_fault = origin is not None and (origin.is_state or origin.is_transient)
        kept = f"; the checkpoints in {c.checkpoint.save} are unchanged"
        cure = f"lower --lr (now {c.optimizer.lr}), warm up longer{' or use --bf16' if c.precision.fp16 else ''}"
        cure = "continue from the newest checkpoint" if is_fault else cure
        return UserError(f"{what}{kept if c.checkpoint.save else ''}; {cure}", NON_FINITE, everywhere=True)

    def roll_back(self, step: Submitted, what: str, flag: str, times: int, origin: Origin | None = None) -> None:
        """Load the newest checkpoint and pass over the samples from there to the end of this step.

        The iterations in between count as done, as with --skip-train-iteration-range, so that no
        number of a step or sample occurs twice. A checkpoint that is saved now keeps this decision.
        """
        t, p, begun = self.trainer, self.trainer.progress, time.perf_counter()
        done = p.rollbacks
        if done >= times:
            again = f"this run has gone back {done} times without saving a checkpoint of further steps"
            raise self.failure(f"{what}; {again} ({flag} rollback:{times})", origin)
        to = t.state.roll_back()
        if to is None:
            save, every = t.config.checkpoint.save, t.config.checkpoint.save_interval
            now = f"--save-interval is {every}" if every else "--save-interval is not given"
            none = f"{flag} rollback:{times} cannot go back: {save} holds no checkpoint yet"
            raise self.failure(f"{what}; {none} ({now}; --save-at-start saves the first weights)", origin)
        begin, self.since = p.consumed_train_samples, p.schedule_samples
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
