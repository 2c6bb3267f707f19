"""Reactions to a step that is not finite, and to a loss spike: go back to a checkpoint, or end.

All ranks call these together: they decide by numbers that are already summed over them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from meshwright.base.console import remark
from meshwright.base.errors import NON_FINITE, UserError, first_line
from meshwright.checkpoint import steps
from meshwright.config.problem import SettingsError, with_value
from meshwright.training.health.diagnosis import Origin, find_origin

if TYPE_CHECKING:
    from meshwright.data.feed import Feed
    from meshwright.training.inflight import InFlight, Settled, Submitted
    from meshwright.training.log.metrics import Metrics
    from meshwright.training.state.state import State


def spread(losses: Collection[float]) -> tuple[float, float]:
    """Return the median of losses and their deviation; outliers hardly move either.

    1.4826 x the median absolute deviation is the standard deviation of normal values. The result is
    at least a thousandth of the median, so that after equal losses not every other one is a spike.
    """
    middle = statistics.median(losses)
    deviation = 1.4826 * statistics.median(abs(x - middle) for x in losses)
    return middle, max(deviation, 1e-3 * abs(middle), 1e-9)


class Guard:
    """Judges each settled step; all ranks judge alike."""

    def __init__(self, state: State, metrics: Metrics, in_flight: InFlight, feed: Feed) -> None:
        self.state, self.metrics, self.in_flight, self.feed = state, metrics, in_flight, feed
        self.config, self.progress = state.config, state.progress
        self.on_nonfinite, self.on_spike = (
            self.config.training.on_nonfinite,
            self.config.training.on_spike,
        )
        self.in_spike = False  # whether the last loss was part of a spike
        # The applied steps' samples when this attempt began or was last rolled back.
        self.since = self.progress.schedule_samples

    def note_save(self) -> None:
        """Count rollbacks anew if the checkpoint to be saved has further steps."""
        if self.progress.schedule_samples > self.since:
            self.progress.rollbacks = 0

    def react(self, settled: Settled) -> bool:
        """React to a step if it is bad; return whether the run went back, so that it must be saved.

        An overflow that fp16's loss scale deals with is not bad.
        """
        if self.progress.nonfinite_in_a_row:
            return self.nonfinite(settled.step, settled.loss, settled.norm)
        return settled.is_applied and self.applied(settled.step, settled.loss)

    def nonfinite(self, step: Submitted, loss: float, norm: float) -> bool:
        """React to a step that was not applied."""
        word, times = self.on_nonfinite.word, self.on_nonfinite.times
        # This step has left the weights as they were; the one under way may have changed them.
        has_changed = self.in_flight.drop()
        begun = time.perf_counter()
        origin = self.locate(step, math.isfinite(loss))
        if has_changed and not origin.is_state:
            origin = origin._replace(
                text=f"{origin.text} (with the weights after the next step, already under way)"
            )
        number = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
        where = f"iteration {step.iteration} (samples up to {step.consumed})"
        what = f"{where}: {number}{self.at_scale(step)}"
        row = {
            "loss": loss,
            "grad_norm": norm,
            "where": origin.text,
            "seconds": round(time.perf_counter() - begun, 3),
        }
        self.metrics.row("nonfinite", step.iteration, **row, **origin.facts)
        if word == "rollback":
            return self.roll_back(step, f"{what}; {origin.text}", "on_nonfinite", times, origin)
        if word != "skip" or self.progress.nonfinite_in_a_row > times:
            raise self.failure(f"{what}, so this step was not applied; {origin.text}", origin)
        remark(f"WARNING: {what}, so this step was not applied; {origin.text}")
        return False

    def locate(self, step: Submitted, has_loss: bool) -> Origin:
        try:
            # No step keeps its batch, which is read from disk again.
            batches = self.feed.read_again(step.consumed - step.size, step.iteration - 1)
            return find_origin(self.state.net, self.state.team, batches, step.settings, has_loss)
        except Exception as error:  # a failed search must not hide why the step is not applied
            text = f"where it began was not found: {type(error).__name__}: {first_line(error)}"
            return Origin(text, {"kind": "unknown"})
        finally:
            self.in_flight.restart_clock()

    def at_scale(self, step: Submitted) -> str:
        precision = self.config.precision
        kind = "smallest" if precision.loss_scale is None else "constant"
        return f" at the {kind} loss scale {step.settings.scale}" if precision.fp16 else ""

    def applied(self, step: Submitted, loss: float) -> bool:
        """React to the loss of an applied step if it is a spike; keep it for the next ones."""
        word, times = self.on_spike.word, self.on_spike.times
        losses = self.state.losses
        if word == "off":
            return False
        # No loss is a spike before the window is full.
        middle, deviation = spread(losses) if len(losses) == losses.maxlen else (loss, 1.0)
        losses.append(loss)
        is_spike = loss > middle + self.config.training.spike_factor * deviation
        is_new = is_spike and not self.in_spike
        self.in_spike = is_spike
        # One warning is enough for a spike of several steps.
        if not is_spike or (word == "warn" and not is_new):
            return False
        before = f"the median of the {losses.maxlen} before"
        far = f"{(loss - middle) / deviation:.1f} deviations above {middle:.4f}, {before}"
        what = f"iteration {step.iteration} (samples up to {step.consumed}): the loss {loss:.4f} is {far}"
        if word != "warn":
            self.in_flight.drop()
            self.progress.iteration = step.iteration
        self.metrics.row("spike", step.iteration, loss=loss, median=middle, deviation=deviation)
        if word == "warn":
            remark(f"WARNING: {what}; --on-spike rollback:K would go back to a checkpoint")
            return False
        if word == "rollback":
            return self.roll_back(step, what, "on_spike", times)
        save = self.config.checkpoint.save
        saved = f"the checkpoints in {save} are of earlier steps; " if self.has_saved() else ""
        cure = f"continue with {{on_spike=rollback:K}}, or lower {{lr}} (now {self.config.optimizer.lr})"
        raise SettingsError(
            f"{what} ({{on_spike=stop}}); {saved}{cure}", NON_FINITE, everywhere=True
        )

    def has_saved(self) -> bool:
        """Return whether there is a checkpoint to go on from; all ranks ask."""
        save = self.config.checkpoint.save
        if not save:
            return False
        found: bool = self.state.team.run_on_rank_0(lambda: bool(steps.list_checkpoints(save)))
        return found

    def failure(self, what: str, origin: Origin | None) -> UserError:
        c = self.config
        has_saved = self.has_saved()
        # A fault of the hardware says nothing against the settings.
        if origin is not None and (origin.is_state or origin.is_transient):
            cure = "continue from the newest checkpoint" if has_saved else "start again"
        else:
            cure = f"lower {{lr}} (now {c.optimizer.lr}), warm up longer"
            if c.precision.fp16:
                cure += " or use {bf16=True}"
        kept = ""
        if has_saved:
            kept = f"; the checkpoints in {c.checkpoint.save} are unchanged"
        return SettingsError(f"{what}{kept}; {cure}", NON_FINITE, everywhere=True)

    def roll_back(
        self, step: Submitted, what: str, setting: str, times: int, origin: Origin | None = None
    ) -> bool:
        """Load the newest checkpoint and pass over the samples from there to the end of this step.

        The iterations in between count as done, as with --skip-train-iteration-range, so that no
        number of a step or sample occurs twice. A checkpoint that is saved now keeps this decision.
        """
        p, c, begun = self.progress, self.config.checkpoint, time.perf_counter()
        done, rule = p.rollbacks, with_value(setting, f"rollback:{times}")
        if done >= times:
            again = (
                f"this run has gone back {done} times without saving a checkpoint of further steps"
            )
            raise self.failure(f"{what}; {again} ({rule})", origin)
        to = self.state.roll_back()
        if to is None:
            now = f"{{save_interval}} is {c.save_interval or 'not given'}"
            none = f"{rule} cannot go back: {c.save} holds no checkpoint yet"
            raise self.failure(
                f"{what}; {none} ({now}; {{save_at_start=True}} saves the first weights)", origin
            )
        begin, self.since = p.consumed_train_samples, p.schedule_samples
        p.iteration, p.consumed_train_samples = step.iteration, step.consumed
        p.consumed_train_tokens = step.consumed_tokens
        # `done` was read before the checkpoint's older count was loaded.
        p.rollbacks, p.nonfinite_in_a_row = done + 1, 0
        self.in_spike = False
        # The loader has read samples ahead that are passed over.
        self.feed.close()
        self.state.skips.append([begin, f"rolled back, passed over to {step.consumed}"])
        seconds = time.perf_counter() - begun
        row = {"from_sample": begin, "to_sample": step.consumed, "rollbacks": done + 1}
        self.metrics.roll_back(to, step.iteration, seconds=round(seconds, 3), reason=what, **row)
        remark(
            f"WARNING: {what}; rolled back to step {to}, passing over iterations {to + 1} to {step.iteration} and "
            f"their samples {begin} to {step.consumed}: rollback {done + 1} of {times}, {seconds:.1f} s"
        )
        return True
