"""The training loop of one rank: `Trainer.train` is the loop, `Trainer.step` one global batch.

A step takes the feed's next batch (data/feed.py) to train_step (step.py), then the steps under way
(inflight.py) to the guard, which ends or undoes the run if one is bad.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Literal

from meshwright.base.console import notice, remark, say, say_time
from meshwright.base.errors import NON_FINITE
from meshwright.config.problem import SettingsError
from meshwright.data.feed import Feed
from meshwright.data.loader import Batch
from meshwright.data.samples import Dataset, OrderedSamples
from meshwright.optim.schedule import warn_of_idle_steps
from meshwright.runtime.ranks.pulse import pulse
from meshwright.runtime.ranks.watchdog import Watchdog
from meshwright.training.beside.eval_tasks import Scores
from meshwright.training.beside.samples import SampleWriter
from meshwright.training.health.guard import Guard
from meshwright.training.health.replicas import Replicas, copies_in
from meshwright.training.health.stop import StopConditions
from meshwright.training.health.stragglers import Stragglers
from meshwright.training.inflight import InFlight
from meshwright.training.log.lines import FORMS, MEGATRON, Check
from meshwright.training.log.metrics import Metrics
from meshwright.training.log.profile import profiler
from meshwright.training.log.timers import Startup, Timers
from meshwright.training.loss_parts import LossParts
from meshwright.training.micro_step import untimed
from meshwright.training.state.state import State
from meshwright.training.step import StepSettings, train_step
from meshwright.training.validation import evaluate

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
        self.state, self.feed, self.metrics, self.timers, self.stop = (
            state,
            feed,
            metrics,
            timers,
            stop,
        )
        self.config, self.progress, self.net, self.team = (
            state.config,
            state.progress,
            state.net,
            state.team,
        )
        self.samples, self.scores = samples, scores  # of --sample-interval and --eval-tasks
        logging, every = self.config.logging, self.config.parallel.check_replicas_interval
        self.time = timers.time if timers.level else untimed
        self.stragglers = (
            Stragglers(watchdog, logging.log_interval)
            if watchdog and logging.log_straggler
            else None
        )
        copies = copies_in(self.net.store) if every else []
        self.replicas = (
            Replicas(self.net, self.team, copies, every, self.config.checkpoint.save)
            if copies
            else None
        )
        self.in_flight = InFlight(state, metrics, self.stragglers, self.replicas)
        self.guard = Guard(state, metrics, self.in_flight, feed)
        self.may_have_to_stop = True  # whether any rank may have a reason to

    def train(self, startup: Startup) -> str:
        """Take all steps that are left, unless something stops the run; return why it ended."""
        if self.config.training.skip_train:
            say("skipping training (--skip-train) ...")
            return ALL_DONE
        self.begin()
        with contextlib.ExitStack() as block:
            g, begun = self.config.logging, self.progress.iteration
            profile = (
                block.enter_context(profiler(g, self.metrics.folder, self.net.device))
                if g.profile
                else None
            )
            gc.freeze()  # the collector need not look again at what was built so far
            block.callback(gc.unfreeze)
            block.callback(self.feed.close)
            block.callback(startup.end_wait)
            doing = "taking the first step, for which kernels are loaded or compiled"
            startup.wait(doing, is_over=lambda: self.metrics.iteration > begun)
            try:
                reason = self.take_steps(profile)
                self.finish()
            except BaseException:  # counts more than any error in here
                with contextlib.suppress(Exception):
                    self.in_flight.finish_alone()
                raise
        if reason == ALL_DONE:
            say_time("after training is done")
            self.report_samples_used(aloud=True)
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
            self.validate_and_save()
        return ALL_DONE

    def begin(self) -> None:
        """Do what precedes the first step: print warnings and the beginning, save at the start."""
        p = self.progress
        done = (p.iteration, p.consumed_train_samples, p.schedule_samples)
        for line in warn_of_idle_steps(
            self.state.schedule, self.config, self.state.total_steps(), *done
        ):
            notice(f"WARNING: {line}")
        say("training ...", FORMS.get(self.config.logging.log_format, MEGATRON).start)
        say_time("before the start of training step")
        if self.state.is_done:
            remark(
                f" > nothing is left to train: step {p.iteration} of {self.state.total_steps()} is done"
            )
        if (c := self.config.checkpoint).save and c.save_at_start and not p.iteration:
            self.save()

    def step(self) -> None:
        """Update the weights with the next global batch."""
        begun = time.perf_counter()
        pulse.enter("data", self.progress.iteration + 1)
        with self.time("batch-generator", 2):
            micro_batches = self.next_batch()
        waited = time.perf_counter() - begun
        pulse.enter("forward-backward")
        settings = self.step_settings()
        update = train_step(self.net, micro_batches, settings, self.time)
        self.in_flight.add(update, settings, 1e3 * waited)
        self.settle(keep=self.in_flight.ahead)
        if self.replicas is not None:
            self.replicas.after(self.progress.iteration, at_once=not self.in_flight.ahead)

    def next_batch(self) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch."""
        return self.feed.next(self.progress.consumed_train_samples)

    def step_settings(self) -> StepSettings:
        samples, t, state = self.progress.schedule_samples, self.config.training, self.state
        wants_stop = self.team.size > 1 and (
            self.stop.reason() is not None or self.has_failed_to_save
        )
        lr, weight_decay = state.schedule.lr(samples), state.schedule.wd(samples)
        return StepSettings(t.seed, lr, weight_decay, state.scaler.scale, t.loss_mean, wants_stop)

    @property
    def has_failed_to_save(self) -> bool:
        """Whether the save in flight has failed."""
        background = self.state.saver.background
        return background is not None and background.failed

    def settle(self, keep: int = 0) -> None:
        """Wait for the submitted steps but the last `keep`, and react to each."""
        for settled in self.in_flight.settle(keep):
            self.may_have_to_stop = self.team.size == 1 or settled.votes > 0
            if self.guard.react(settled):
                self.save()
                self.in_flight.restart_clock()

    def finish(self) -> None:
        """Wait for all submitted steps, react to them and log them."""
        self.settle()
        self.in_flight.write_log()
        if self.replicas is not None:
            self.replicas.look()

    def close(self) -> None:
        """End what is under way and close the log; wait for a save in flight."""
        with contextlib.ExitStack() as block:
            block.callback(self.metrics.close)
            block.callback(self.state.saver.close)
            if self.net.graphs is not None:
                # NCCL waits for graphs of its collectives
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
        reason = None
        if self.may_have_to_stop:
            reason, has_failed = self.stop.agree(self.team, self.has_failed_to_save, has_stepped)
            if has_failed:
                self.wait_for_save()  # raises the failure on every rank
            self.may_have_to_stop = self.team.size == 1
        # a resumed run would end at once
        if not reason and every and iteration % every == 0 and has_stepped:
            reason = f"--exit-interval {every}"
        if reason:
            self.finish()
        if reason and not self.stop.signal:
            say(f"exiting program at iteration {iteration}: {reason}")
        return reason

    def validate_and_save(self) -> None:
        """Do what follows some steps, and counts in no step's time: print GPUs, validate, save."""
        t, c, g, p = (
            self.config.training,
            self.config.checkpoint,
            self.config.logging,
            self.progress,
        )
        is_best, saves = (
            False,
            bool(c.save and c.save_interval and p.iteration % c.save_interval == 0),
        )
        validates, prints = p.iteration % t.eval_interval == 0, p.iteration in g.nvidia_smi_at
        samples = self.samples if p.iteration % (g.sample_interval or 1) == 0 else None
        scores = (
            self.scores
            if self.scores is not None and p.iteration % self.scores.interval == 0
            else None
        )
        if self.scores is not None:
            self.scores.collect(self.metrics)
        if not (saves or validates or prints or samples or scores):
            return
        self.finish()
        if self.stragglers is not None:
            self.stragglers.pause()
        with self.in_flight.pause():
            if prints:
                self.metrics.print_gpus()
            if validates:
                loss = self.validate("valid")
                is_best = math.isfinite(loss) and (p.best_loss is None or loss < p.best_loss)
                if is_best:
                    p.best_iteration, p.best_loss = p.iteration, loss
            if samples:
                pulse.enter("samples")
                samples.write(p.iteration, self.metrics)
            if saves or (c.save and is_best and c.keep_best):
                self.save()
            if scores:
                self.score(scores.run)

    def score(self, act: Callable[..., None]) -> None:
        """Call one of the methods of `scores` for the weights after the last step."""
        self.finish()
        pulse.enter("scores")
        act(
            self.progress.iteration,
            self.progress.consumed_train_samples,
            self.metrics,
            self.is_cut_short,
        )

    def is_cut_short(self) -> bool:
        """Return whether a signal ends what is done between steps; ranks would not agree on it."""
        return self.team.size == 1 and self.stop.signal is not None

    def validate(self, name: Literal["valid", "test"], is_at_end: bool = False) -> float:
        """Return the mean loss of the sets of a split, printing each; NaN if none."""
        pulse.enter("validation")
        sets = self.feed.sets_of(name)
        averaged, seconds = self.validate_average(sets, is_at_end)
        losses = [
            self.validate_set(key, data, is_at_end, averaged.get(key), seconds)
            for key, data in sets.items()
        ]
        return sum(losses) / len(losses) if losses else math.nan

    def validate_average(
        self, sets: Mapping[str, Dataset], is_at_end: bool
    ) -> tuple[dict[str, float], float]:
        """Return the losses of the average of --ema, {} without one, and the seconds of each."""
        begun, store = time.perf_counter(), self.net.store
        if store.average is None or not sets or not self.config.training.eval_iters:
            return {}, 0.0
        with store.averaged():
            losses = {key: self.loss_on(key, dataset, is_at_end) for key, dataset in sets.items()}
        return losses, (time.perf_counter() - begun) / len(sets)

    def validate_mean(self, plain: float) -> None:
        """Validate the mean of --average-last at the end of a run, beside the last step's loss.

        The mean takes the place of the weights: nothing may train or save them afterwards.
        """
        c, sets, begun = self.config.checkpoint, self.feed.sets_of("valid"), time.perf_counter()
        if not (sets and self.config.training.eval_iters and c.save) or self.is_cut_short():
            return
        pulse.enter("validation")
        averaged = self.state.load_mean()
        if not averaged:
            return
        losses = [self.loss_on(key, dataset, is_at_end=True) for key, dataset in sets.items()]
        loss, seconds = sum(losses) / len(losses), round(time.perf_counter() - begun, 3)
        which = f"the mean of the weights of steps {', '.join(f'{step:,}' for step in averaged)}"
        keep = f"meshwright convert {c.save} DIR --average-last {len(averaged)} writes it"
        line = f" > --average-last: {which} has a validation loss of {loss:.4f}, the last step {plain:.4f}; {keep}"
        self.metrics.event(
            "average", self.progress.iteration, line, steps=averaged, loss=loss, seconds=seconds
        )

    def validate_set(
        self,
        key: str,
        dataset: Dataset,
        is_at_end: bool,
        averaged: float | None,
        more_seconds: float,
    ) -> float:
        """Return the mean loss of one set, or NaN if it was not computed, and record it.

        `averaged` is the loss of the average of --ema, which took `more_seconds`.
        """
        p, begun = self.progress, time.perf_counter()
        if not self.config.training.eval_iters or self.is_cut_short():
            return math.nan
        name, _, set_name = key.partition("/")
        assert self.config.data.seq_length
        parts = LossParts(dataset, self.config.data.seq_length, self.net)
        loss = self.loss_on(key, dataset, is_at_end, parts)
        if self.is_cut_short():  # saving comes first: the process may be killed within seconds
            return math.nan
        shown = "test" if name == "test" else "validation"
        seconds = time.perf_counter() - begun + more_seconds
        by_parts = parts.by_position, parts.by_data
        check = Check(p.iteration, shown, loss, is_at_end, set_name, seconds, *by_parts, averaged)
        self.metrics.validation(p.consumed_train_samples, check)
        if not math.isfinite(loss) and self.guard.on_nonfinite.word != "skip":
            message = f"iteration {p.iteration}: the loss on the {key} set is {loss}, so this step is not saved; "
            message += f"lower {{lr}} (now {self.config.optimizer.lr}) or warm up longer"
            raise SettingsError(message, NON_FINITE, everywhere=True)
        return loss

    def loss_on(
        self, key: str, dataset: Dataset, is_at_end: bool, parts: LossParts | None = None
    ) -> float:
        """Return the mean loss of the network's weights on one set.

        Each validation reads the samples after those of the one before, as a function of the
        iteration; with --full-validation it reads all of them.
        """
        t, p, size = self.config.training, self.progress, self.config.global_batch
        name = key.partition("/")[0]
        is_full = name == "valid" and self.config.data.full_validation
        before = (
            p.iteration // t.eval_interval - (not is_at_end)
            if name == "valid" and not is_full
            else 0
        )
        steps = -(-len(dataset) // size) if is_full else t.eval_iters
        at_end: Literal["mask", "wrap"] = "mask" if is_full else "wrap"
        with contextlib.closing(
            self.feed.validate(dataset, before * t.eval_iters * size, size, at_end)
        ) as batches:
            return evaluate(self.net, itertools.islice(batches, steps), self.is_cut_short, parts)

    def report_samples_used(self, aloud: bool = False) -> None:
        """Log how many samples of each blended data set were used; `aloud` prints them too."""
        p = self.progress
        train = self.feed.datasets.get("train") if self.team.is_lead else None
        used = (
            train.count_used(p.consumed_train_samples)
            if isinstance(train, OrderedSamples)
            else dict[str, int]()
        )
        if used:
            self.metrics.row(
                "used", p.iteration, consumed_samples=p.consumed_train_samples, samples=used
            )
        for prefix, number in sorted(used.items(), key=lambda item: -item[1])[:20] if aloud else ():
            say(f" > samples of each data set so far: {number:12d} {prefix}")

    def save(self) -> None:
        pulse.enter("save")
        if self.replicas is not None:
            self.replicas.require_equal(self.progress.iteration)
        self.guard.note_save()
        self.report_samples_used()
        self.metrics.sync()
        seconds = self.state.save()
        self.record_failed_saves()
        if seconds is not None:
            is_in_flight = self.state.saver.in_flight
            self.metrics.row(
                "save", self.progress.iteration, seconds=round(seconds, 3), background=is_in_flight
            )

    def record_failed_saves(self) -> None:
        """Log the saves that failed, after which the run goes on: --save-error warn."""
        for step, reason in self.state.saver.take_failures():
            self.metrics.row("save-failed", step, reason=reason)

    def wait_for_save(self) -> None:
        self.state.saver.wait()
        self.record_failed_saves()
