"""The training loop of one rank: `Trainer.train` is the loop, `Trainer.step` one global batch.

    next batch (data/feed.py) -> step (step.py) -> its numbers, once they are known (inflight.py) ->
    the guard, which ends or undoes the run if they are bad -> the hooks -> a reason to stop?

What a run does beside its steps is a list of hooks (hooks/hook.py).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable

from meshwright.base.console import notice, remark, say, say_time
from meshwright.data.feed import Feed
from meshwright.data.loader import Batch
from meshwright.optim.schedule import warn_of_idle_steps
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.runtime.ranks.watchdog import Watchdog
from meshwright.training.health.guard import Guard
from meshwright.training.health.replicas import Replicas, copies_in
from meshwright.training.health.stop import StopConditions
from meshwright.training.health.stragglers import Stragglers
from meshwright.training.hooks.eval_tasks import Scores
from meshwright.training.hooks.hook import CollectScores, Hook, PrintGpus, ScoreTasks, WriteSamples
from meshwright.training.hooks.samples import SampleWriter
from meshwright.training.hooks.saving import Saving
from meshwright.training.inflight import InFlight, steps_ahead
from meshwright.training.log.lines import FORMS, MEGATRON
from meshwright.training.log.metrics import Metrics
from meshwright.training.log.profile import profiler
from meshwright.training.log.timers import Startup, Timers
from meshwright.training.micro_step import untimed
from meshwright.training.state.state import State
from meshwright.training.step import StepSettings, train_step
from meshwright.training.validation import Validator

ALL_DONE = "all iterations done"


class Trainer:
    """A run on one rank, made of finished parts."""

    def __init__(
        self,
        state: State,
        feed: Feed,
        metrics: Metrics,
        timers: Timers,
        stop: StopConditions,
        watchdog: Watchdog | None = None,
        samples: SampleWriter | None = None,
        scores: Scores | None = None,
    ) -> None:
        """`samples` are those of --sample-interval, `scores` those of --eval-tasks."""
        self.state, self.feed, self.metrics = state, feed, metrics
        self.timers, self.stop, self.scores = timers, stop, scores
        self.config, self.progress = state.config, state.progress
        self.net, self.team = state.net, state.team
        self.time = timers.time if timers.level else untimed
        self.may_have_to_stop = True  # whether the ranks have to compare their reasons

        # These parts look at each step's numbers: the guard reacts to bad ones, the others report.
        logging = self.config.logging
        self.stragglers = None
        if watchdog and logging.log_straggler:
            self.stragglers = Stragglers(watchdog, logging.log_interval)
        self.replicas = self.make_replicas()
        self.in_flight = InFlight(state, metrics, self.stragglers, self.replicas)
        self.guard = Guard(state, metrics, self.in_flight, feed)

        # These parts act between steps.
        is_cut_short = functools.partial(stop.cuts_short, state.team)
        self.validation = Validator(state, feed, metrics, is_cut_short)
        self.saving = Saving(state, feed, metrics, self.guard, self.replicas)
        self.score_tasks = None
        if scores is not None:
            self.score_tasks = ScoreTasks(scores, self.progress, metrics, is_cut_short)
        self.hooks = self.list_hooks(samples)

    def make_replicas(self) -> Replicas | None:
        """Return the comparison of --check-replicas-interval if any rank holds copies."""
        interval = self.config.parallel.check_replicas_interval
        copies = copies_in(self.net.store) if interval else []
        if not copies:
            return None
        at_once = not steps_ahead(self.config, self.net.device)
        save = self.config.checkpoint.save
        return Replicas(self.net, self.team, copies, interval, save, at_once)

    def list_hooks(self, samples: SampleWriter | None) -> list[Hook]:
        """Return the hooks in the order in which they run.

        The order matters, since a hook relies on those before it:

        * copies are compared first, so that no damaged weights are validated or saved;
        * the validation notes the best step, which is then due to be saved;
        * the scores come after the save: they take long and change nothing, and if the process is
          killed meanwhile, the step is saved.
        """
        logging, metrics = self.config.logging, self.metrics
        hooks: list[Hook | None] = [
            self.replicas,
            CollectScores(self.scores, metrics) if self.scores else None,
            PrintGpus(logging.nvidia_smi_at, metrics),
            self.validation,
            WriteSamples(samples, logging.sample_interval or 1, metrics) if samples else None,
            self.saving,
            self.score_tasks,
        ]
        return [hook for hook in hooks if hook is not None]

    def train(self, startup: Startup) -> str:
        """Take all steps that are left, unless something stops the run; return why it ended."""
        if self.config.training.skip_train:
            say("skipping training (--skip-train) ...")
            return ALL_DONE
        self.begin()
        with contextlib.ExitStack() as block:
            # Whatever begins here ends in the opposite order, however the run ends.
            logging, begun = self.config.logging, self.progress.iteration
            profile = None
            if logging.profile:
                profile = block.enter_context(
                    profiler(logging, self.metrics.folder, self.net.device)
                )
            gc.freeze()  # the collector need not look again at what was built so far
            block.callback(gc.unfreeze)
            block.callback(self.feed.close)
            block.callback(startup.end_wait)
            # The first step can take minutes, during which nothing else would be logged.
            doing = "taking the first step, for which kernels are loaded or compiled"
            startup.wait(doing, is_over=lambda: self.metrics.iteration > begun)
            try:
                reason = self.take_steps(profile)
                self.finish()
            except BaseException:
                # Log the steps under way. An error of the logging must not hide this one.
                with contextlib.suppress(Exception):
                    self.in_flight.finish_alone()
                raise
        if reason == ALL_DONE:
            say_time("after training is done")
            self.saving.report_samples_used(aloud=True)
        return reason

    def take_steps(self, profile: Callable[[int, Callable[[], None]], None] | None) -> str:
        """Take steps until the run is done or something stops it; return the reason."""
        self.in_flight.restart_clock()
        while not self.state.is_done:
            if reason := self.reason_to_stop():
                return reason
            if self.skip_iterations():
                continue
            if profile is not None:
                profile(self.progress.iteration + 1, self.finish)
            self.step()
            self.run_hooks_between_steps()
        return ALL_DONE

    def begin(self) -> None:
        """Print warnings and the beginning, and save the first weights if --save-at-start asks."""
        p, total = self.progress, self.state.total_steps()
        done = (p.iteration, p.consumed_train_samples, p.schedule_samples, p.schedule_tokens)
        for line in warn_of_idle_steps(self.state.schedule, self.config, total, *done):
            notice(f"WARNING: {line}")
        say("training ...", FORMS.get(self.config.logging.log_format, MEGATRON).start)
        say_time("before the start of training step")
        if self.state.is_done:
            remark(f" > nothing is left to train: step {p.iteration} of {total} is done")
        self.saving.run_at_start()

    def step(self) -> None:
        """Update the weights with the next global batch."""
        # Data: a thread of the feed has usually read this batch already.
        begun = time.perf_counter()
        heartbeat.enter("data", self.progress.iteration + 1)
        with self.time("batch-generator", 2):
            micro_batches = self.next_batch()
        waited = time.perf_counter() - begun

        # Forward, backward and update. To a GPU the host only submits them.
        heartbeat.enter("forward-backward")
        settings = self.step_settings()
        update = train_step(self.net, micro_batches, settings, self.time)

        # The device may still compute this step while the one before it is settled.
        self.in_flight.add(update, settings, 1e3 * waited)
        self.settle(keep=self.in_flight.ahead)
        step = self.progress.iteration
        for hook in self.hooks:  # those that may run beside the device's work
            if not hook.between_steps and hook.due(step):
                hook.run(step)

    def next_batch(self) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch."""
        return self.feed.next(self.progress.consumed_train_samples, self.progress.iteration)

    def step_settings(self) -> StepSettings:
        """Return the numbers of the next update, and whether this rank votes to stop."""
        t = self.config.training
        state = self.state
        done = self.progress.schedule_samples, self.progress.schedule_tokens
        lr, weight_decay = state.schedule.lr(*done), state.schedule.wd(*done)
        # A single rank needs no vote; several have to stop after the same step.
        wants_stop = False
        if self.team.size > 1:
            wants_stop = self.stop.reason() is not None or self.saving.has_failed
        return StepSettings(t.seed, lr, weight_decay, state.scaler.scale, t.loss_mean, wants_stop)

    def settle(self, keep: int = 0) -> None:
        """Wait for the submitted steps but the last `keep`, and react to each."""
        for settled in self.in_flight.settle(keep):
            # The ranks' votes came with the step's numbers. Only if there is one do several ranks
            # compare their reasons.
            self.may_have_to_stop = self.team.size == 1 or settled.votes > 0
            if self.guard.react(settled):
                self.saving.run(self.progress.iteration)
                self.in_flight.restart_clock()

    def run_hooks_between_steps(self) -> None:
        """Run the due hooks while no step is under way, outside of any step's time."""
        step = self.progress.iteration
        with contextlib.ExitStack() as pause:
            is_paused = False
            for hook in self.hooks:
                if not hook.between_steps or not hook.due(step):
                    continue
                if not is_paused:  # the clocks stand still from the first hook on
                    self.finish()
                    if self.stragglers is not None:
                        self.stragglers.pause()
                    pause.enter_context(self.in_flight.pause())
                    is_paused = True
                hook.run(step)

    def finish(self) -> None:
        """Wait for all submitted steps, react to them and log them."""
        self.settle()
        self.in_flight.write_log()
        if self.replicas is not None:
            self.replicas.look()

    def close(self) -> None:
        """End the scores, free the graphs, wait for a save in flight, then close the log."""
        # Callbacks run in the opposite order, and all of them even if one fails.
        with contextlib.ExitStack() as block:
            block.callback(self.metrics.close)
            block.callback(self.state.saver.close)
            if self.net.graphs is not None:
                # NCCL would wait for graphs of its collectives when it shuts down.
                block.callback(self.net.graphs.captured.clear)
            if self.scores is not None:
                self.scores.close()

    def skip_iterations(self) -> bool:
        """Pass over a --skip-train-iteration-range that begins here; return whether one does."""
        p, passed = self.progress, self.state.range_to_skip()
        if passed is None:
            return False
        self.finish()
        self.feed.close()
        first, begin = passed.first, p.consumed_train_samples
        self.state.pass_over(passed.last)
        remark(
            f"Skipped iterations {first} to {p.iteration} due to --skip-train-iteration-range flag."
        )
        self.metrics.row(
            "skip", p.iteration, first=first, from_sample=begin, to=p.consumed_train_samples
        )
        return True

    def reason_to_stop(self) -> str | None:
        """Return why the run must end before the next step, the same on every rank, or None."""
        iteration, every = self.progress.iteration, self.config.training.exit_interval
        has_stepped = iteration != (self.state.loaded or 0)  # in this attempt

        # Any rank's signal, time limit, kill switch or failed save.
        reason = None
        if self.may_have_to_stop:
            reason, has_failed = self.stop.agree(self.team, self.saving.has_failed, has_stepped)
            if has_failed:
                self.saving.wait()  # raises the failure on every rank
            self.may_have_to_stop = self.team.size == 1
        # A run that resumes at such a step must not end before it has taken another.
        if not reason and every and iteration % every == 0 and has_stepped:
            reason = f"--exit-interval {every}"

        if reason:
            self.finish()
            if not self.stop.signal:  # a signal is reported at the very end
                say(f"exiting program at iteration {iteration}: {reason}")
        return reason
