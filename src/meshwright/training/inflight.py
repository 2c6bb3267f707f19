"""The steps under way: submitted to the device, then settled by their numbers, then logged.

The host runs ahead if it submits the next step before this one is known to be finite. The next
step's learning rate and loss scale must then not depend on this one, so a bad step must end the run
or undo the step after it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from meshwright.base import device as devices
from meshwright.parallel.store import ALL_MET, HAS_GRADIENTS
from meshwright.training import inflight_rule

if TYPE_CHECKING:
    from meshwright.config.schema import TrainConfig
    from meshwright.training.health.replicas import Replicas
    from meshwright.training.health.stragglers import Stragglers
    from meshwright.training.log.metrics import Metrics
    from meshwright.training.micro_step import Update
    from meshwright.training.state.state import State
    from meshwright.training.step import StepSettings


class Submitted(NamedTuple):
    """A step that the device may still be computing."""

    iteration: int
    consumed: int  # samples, with this step's
    consumed_tokens: int  # likewise
    scheduled: int  # samples of the learning rate's schedule, without this step's
    scheduled_tokens: int  # likewise
    size: int  # samples
    length: int  # tokens of each
    settings: StepSettings
    data_ms: float  # the wait for its batch
    names: tuple[str, ...]  # of its numbers; most are columns of metrics.jsonl
    ended: Any  # the device's mark of its end
    numbers: Callable[[], list[float]]  # waits for the device


class Settled(NamedTuple):
    """A step whose numbers are known and have corrected the counters."""

    step: Submitted
    loss: float
    norm: float
    is_applied: bool
    votes: float  # ranks that want the run to stop


def steps_ahead(config: TrainConfig, device: torch.device) -> int:
    """Return how many steps are submitted beyond the one whose numbers are awaited."""
    return int(devices.is_asynchronous(device) and inflight_rule.runs_ahead(config))


class InFlight:
    """At most `ahead` submitted steps; each is settled once and logged once, in order."""

    def __init__(
        self,
        state: State,
        metrics: Metrics,
        stragglers: Stragglers | None,
        replicas: Replicas | None,
    ) -> None:
        self.state, self.metrics = state, metrics
        self.stragglers, self.replicas = stragglers, replicas
        self.ahead = steps_ahead(state.config, state.net.device)
        # A step is logged while the device computes the next one.
        self.logs_late = devices.is_asynchronous(state.net.device) and not self.ahead
        self.submitted = deque[Submitted]()
        self.unwritten: Callable[[], None] | None = None  # writes the log of the last settled step
        # The device's mark of the end of the last settled step, or of a pause since then.
        self.ended: Any = devices.mark(state.net.device)
        self.spent = 0.0  # seconds of the next step that passed before that pause

    def add(self, update: Update, settings: StepSettings, data_ms: float) -> None:
        """Count a step as applied, which `settle` corrects, and begin to read its numbers."""
        p, net, logging = self.state.progress, self.state.net, self.state.config.logging
        # Further numbers go with those of the update, in one copy to the host.
        extras: dict[str, torch.Tensor] = {}
        if logging.log_num_zeros_in_grad:
            extras["num_zeros"] = net.store.count_zero_gradients()
        if logging.log_params_norm:
            extras["params_norm"] = net.store.weight_norm()
        times = net.store.times
        if times is not None:
            extras |= {"arrived": times[HAS_GRADIENTS], "met": times[ALL_MET]}
        numbers = update
        if extras:
            numbers = torch.cat([update, *(x.double().view(1) for x in extras.values())])
        config = self.state.config
        size, length = config.batch(p.consumed_train_samples), config.sample_length(p.iteration + 1)
        scheduled, scheduled_tokens = p.schedule_samples, p.schedule_tokens
        p.iteration += 1
        p.consumed_train_samples += size
        p.consumed_train_tokens += size * length
        p.schedule_samples += size
        p.schedule_tokens += size * length
        # Marked before the numbers are copied, so that it has been passed when they are here.
        ended = devices.mark(net.device)
        self.submitted.append(
            Submitted(
                iteration=p.iteration,
                consumed=p.consumed_train_samples,
                consumed_tokens=p.consumed_train_tokens,
                scheduled=scheduled,
                scheduled_tokens=scheduled_tokens,
                size=size,
                length=length,
                settings=settings,
                data_ms=data_ms,
                names=(*net.update_columns, *extras),
                ended=ended,
                numbers=devices.start_read(numbers),
            )
        )
        if self.logs_late:
            self.write_log()  # of the step before

    def settle(self, keep: int = 0) -> Iterator[Settled]:
        """Wait for each submitted step but the last `keep`; yield it, then log it."""
        while len(self.submitted) > keep:
            yield self.correct(self.submitted.popleft())
            if not self.logs_late:
                self.write_log()

    def correct(self, step: Submitted) -> Settled:
        """Wait for a step's numbers; correct counters and loss scale if it was not applied."""
        state, settings = self.state, step.settings
        p, schedule = state.progress, state.schedule
        numbers = dict(zip(step.names, step.numbers(), strict=True))
        loss, norm, votes = (numbers.pop(name) for name in ("loss", "grad_norm", "votes"))
        if "met" in numbers:
            arrived, met = numbers.pop("arrived"), numbers.pop("met")
            if self.stragglers is not None:
                self.stragglers.note(step.iteration, step.data_ms, arrived, met)
        if schedule.wd_style != "constant":
            numbers["weight_decay"] = settings.weight_decay

        # A step that is not finite has left the weights as they were.
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        state.scaler.update(skipped)
        # fp16's loss scale is found by overflows, which are no reason to act while it may fall.
        overflow = skipped and math.isfinite(loss) and state.config.precision.fp16
        harmless = overflow and state.scaler.may_overflow(settings.scale)
        scheduled = step.scheduled + (0 if skipped else step.size)
        tokens = step.scheduled_tokens + (0 if skipped else step.size * step.length)
        p.nonfinite_in_a_row = p.nonfinite_in_a_row + 1 if skipped and not harmless else 0
        if state.config.training.seq_length_schedule is not None:
            numbers["length"] = step.length
        row = {
            "batch": step.size,
            "loss": loss,
            "grad_norm": norm,
            "lr": settings.lr,
            "loss_scale": settings.scale,
            "skipped": skipped,
            "data_ms": round(step.data_ms, 3),
            **numbers,
        }
        next_lr = schedule.lr(scheduled, tokens)
        logged = step.iteration, step.consumed, self.seconds_of(step), next_lr
        self.unwritten = functools.partial(self.metrics.step, *logged, row)
        if skipped:  # whatever was submitted since then does not count
            p.iteration = step.iteration
            p.consumed_train_samples = step.consumed
            p.consumed_train_tokens = step.consumed_tokens
            p.schedule_samples, p.schedule_tokens = scheduled, tokens
        return Settled(step, loss, norm, not skipped, votes)

    def seconds_of(self, step: Submitted) -> float:
        """Return the device's seconds from the last step's end to this one's, without pauses.

        The host's clock would not do: it may read a step's numbers long after the step has ended.
        """
        seconds = self.spent + devices.seconds_between(self.ended, step.ended)
        self.ended, self.spent = step.ended, 0.0
        return seconds

    def write_log(self) -> None:
        """Log the last settled step, unless it is logged already."""
        # Forgotten first, so that a row that fails to be written is not written twice.
        write, self.unwritten = self.unwritten, None
        if write is not None:
            write()
        if self.stragglers is None or not self.state.team.is_rank_0:
            return
        for iteration, lag in self.stragglers.changes():
            warning = "WARNING: " if lag.is_slow else ""
            self.metrics.event("straggler", iteration, f" > {warning}{lag}", **lag.facts())

    def drop(self) -> bool:
        """Log the settled step and forget those submitted since, which do not count.

        Return whether one of these changed the weights.
        """
        dropped = list(self.submitted)
        self.submitted.clear()
        self.write_log()
        if self.replicas is not None:
            self.replicas.forget()
        return any(all(map(math.isfinite, step.numbers()[:2])) for step in dropped)

    def finish_alone(self) -> None:
        """Settle and log all steps without reacting to them: other ranks may be gone."""
        for _ in self.settle():
            pass
        self.write_log()

    def restart_clock(self) -> None:
        """Time the next step from now on."""
        self.ended, self.spent = devices.mark(self.state.net.device), 0.0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the block out of the next step's time; no step may be under way."""
        device = self.state.net.device
        begun = devices.mark(device)
        devices.synchronize(device)
        self.spent += devices.seconds_between(self.ended, begun)
        yield
        self.ended = devices.mark(device)
