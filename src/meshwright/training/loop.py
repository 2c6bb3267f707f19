"""The training loop of one rank: `Trainer.train` is the loop, `Trainer.step` one global batch.

A step takes the loader's next batch (data/loader.py) to train_step (step.py), then `settle`. On an
accelerator the next step is submitted before the numbers of the last one are read, so that the
device need not wait for the host; see `Trainer.runs_ahead`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import platform
import signal
import time
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from meshwright import device as devices
from meshwright.console import notice, remark, say, say_time, show
from meshwright.data.datasets import Datasets, check_datasets, continue_datasets, count_used, list_epochs, make_marks
from meshwright.data.loader import Batch, Loader, LoaderSpec
from meshwright.data.samples import Dataset
from meshwright.errors import HANG, NON_FINITE, UserError
from meshwright.model import counts
from meshwright.model.gpt import initialise
from meshwright.optim.loss_scale import LossScale
from meshwright.optim.schedule import warn_of_idle_steps
from meshwright.parallel.store import ALL_MET, DRAWING_THREADS, HAS_GRADIENTS
from meshwright.ranks.pulse import pulse
from meshwright.ranks.team import Team
from meshwright.ranks.watchdog import Watchdog
from meshwright.settings.grammar import skipped
from meshwright.tokenizers import Tokenizer
from meshwright.training import network
from meshwright.training.before import memory
from meshwright.training.before.sizes import describe_long_step, parameters_of_ranks
from meshwright.training.beside import scores
from meshwright.training.beside.samples import Samples
from meshwright.training.health.guard import Guard
from meshwright.training.health.replicas import Replicas
from meshwright.training.health.stop import StopConditions
from meshwright.training.health.stragglers import Stragglers
from meshwright.training.log.lines import FORMS, MEGATRON, Check
from meshwright.training.log.metrics import Attempt, Metrics, Timers
from meshwright.training.log.profile import profiler
from meshwright.training.log.screen import Beginning, LineScreen
from meshwright.training.state import folder as run_folder
from meshwright.training.state.resume import Progress, State
from meshwright.training.step import StepSettings, Submitted, Update, evaluate, train_step
from meshwright.version import our_version

ALL_DONE = "all iterations done"


class Trainer:
    """The parts of a run on one rank: network, data, log and checkpoints."""

    def __init__(self, spec: network.Spec, team: Team, timers: Timers) -> None:
        self.config, self.layout, self.device = spec.config, spec.layout, spec.device
        self.vocab, self.padded, self.team, self.timers = spec.vocab, spec.padded, team, timers
        say("building GPT model ...")
        if spec.model is None:
            share = parameters_of_ranks(self.config, spec.padded, spec.positions)[self.layout.at("pp")]
            columns = spec.padded // self.layout.tp
            team.run_on_all(lambda: memory.require_memory(self.config, share, columns, self.device))
        self.net = network.build(spec, self.report_parameters)
        say(f" > running the {self.net.execution}")
        if spec.device.type != "cpu" or self.config.training.cuda_graphs == "on":
            without = self.net.without_graphs
            say(f" > CUDA graphs: {f'off, because {without}' if without else 'on, from step 3'}")
        if self.config.training.compile == "on" and not self.net.is_compiled:
            remark(" > note: --compile on has no effect on layers with the reference attention")
        scaler = LossScale(self.config.precision)
        self.state = State(self.config, self.net, scaler, spec.vocab, spec.padded, spec.positions, team)
        say(f"> learning rate decay style: {self.state.schedule.style}")
        self.has_loaded = False
        self.train_batches: Generator[list[Batch], None, None] | None = None
        self.last = time.perf_counter()  # the end of the last step
        self.may_have_to_stop = True  # whether any rank may have a reason to
        self.scores: scores.Scores | None = None  # of --eval-tasks
        self.samples: Samples | None = None  # of --sample-interval
        self.submitted: Submitted | None = None  # the last step, if it is not settled
        self.unwritten: Callable[[], None] | None = None  # writes the log of the last step that is
        self.guard = Guard(weakref.proxy(self))
        self.stragglers = Stragglers(None, self.config.logging.log_interval)
        every = self.config.parallel.check_replicas_interval
        self.replicas = Replicas(self.net, team, every, self.config.checkpoint.save)
        # A step's learning rate and loss scale must not depend on whether the one before was
        # applied, so one that is not applied must end the run, or undo the one submitted since.
        # Timers wait for each step anyway.
        c = self.config
        is_sure = not c.precision.fp16 and self.guard.on_nonfinite[0] != "skip"
        self.runs_ahead = devices.is_asynchronous(self.device) and is_sure and c.logging.timing_log_level == "0"

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def report_parameters(self, number: int) -> None:
        mine = [self.layout.at("tp"), self.layout.at("pp"), number]
        for tp, pp, count in sorted({tuple(x) for x in self.team.gather(mine)}):
            say(f" > number of parameters on (tensor, pipeline) model parallel rank ({tp}, {pp}): {count}")

    # Set-up, in the order in which `run` calls it

    def load_or_initialise(self) -> None:
        is_loaded = bool(self.config.checkpoint.load)
        with self.timers.startup.phase("weights", "loading the weights" if is_loaded else "drawing the weights"):
            if is_loaded:
                with self.timers.phase("load-checkpoint"):
                    self.has_loaded = self.state.load()
                self.timers.print_phases("load-checkpoint")
            if not self.has_loaded:
                own = getattr(self.net.parts[0], "initialise", None)  # a custom model's, which may use one generator
                m, seed, draw = self.config.model, self.config.training.seed, own or initialise
                threads = 1 if own else min(DRAWING_THREADS, devices.cores())
                self.net.store.initialise(lambda masters: draw(masters, m, self.vocab, seed), threads)
            self.net.store.publish_weights()

    def fit_micro_batch(self) -> None:
        """Resolve `--micro-batch-size auto`."""
        if self.config.training.micro_batch_size == "auto":
            preferred = self.state.micro_batch_before
            with self.timers.startup.phase("micro-batch", "trying micro-batches"):
                size, reason = memory.fit_micro_batch(self.net, self.config, self.vocab, preferred, self.team)
            remark(f" > --micro-batch-size auto: {size} ({reason})")
            t = dataclasses.replace(self.config.training, micro_batch_size=size)
            self.config = self.state.config = dataclasses.replace(self.config, training=t)

    def open_data(self, tokenizer: Tokenizer | None, datasets: Datasets | None) -> None:
        p = self.progress
        self.marks = make_marks(self.config.data, tokenizer)
        at = (p.iteration, p.consumed_train_samples) if self.will_train else None
        self.data = data = self.team.run_lead_first(self.open_files) if datasets is None else datasets
        self.team.run_on_all(lambda: check_datasets(self.config, data, datasets is not None, at))
        self.state.set_epochs(list_epochs(data.get("train")))
        if self.config.logging.sample_interval:
            self.samples = Samples(self.config, self.net, self.vocab, tokenizer)
        if self.config.logging.eval_tasks:
            made = self.config, self.net, self.vocab, tokenizer, self.team
            beside = self.config.logging.eval_tasks_device
            self.scores = scores.ScoresBeside(*made, self.state.save_weights) if beside else scores.Scores(*made)

    def open_files(self) -> Datasets:
        """Open the data sets that the flags name.

        The blends are those recorded in the checkpoint and any added since. A finished run refuses
        others too, as it would if it went on.
        """
        past, consumed = self.state.blends, self.progress.consumed_train_samples
        if self.config.training.skip_train:  # a validation starts at the first sample, whatever was trained on
            past, consumed = None, 0
        data, blends = continue_datasets(self.config, self.vocab, past, consumed)
        if self.will_train:
            self.state.blends = blends
        last = self.state.blends.blends[-1].begin if self.state.blends else 0
        d = dataclasses.replace(self.config.data, blend_change_at=str(last) if last else None)  # for config.toml
        self.config = self.state.config = dataclasses.replace(self.config, data=d)
        return data

    def open_folder(
        self, folder: Path | None, tokenizer: Tokenizer | None, command: list[str], screen: LineScreen | None = None
    ) -> None:
        """Write the settings and the vocabulary, and open the log.

        Before this, the run has only written locks, probes and caches.
        """
        c, p, seq = self.config, self.progress, self.config.data.seq_length
        assert seq
        self.state.check(tokenizer, self.will_train)
        self.team.run_on_lead(lambda: run_folder.prepare(folder, c, tokenizer, self.will_train))
        flops = counts.flops_per_token(c.model, self.padded, seq, c.training.recompute)
        # The state that all ranks would save together holds each parameter once.
        own = self.net.store.named_state(False, to_save=True)
        parameters = sum(self.team.gather(sum(x.numel() for _, _, x in own.values())))
        if screen is not None:
            show(screen.begin(self.beginning(folder, tokenizer, parameters)))
        if self.device.type == "cpu" and self.will_train and (long := describe_long_step(flops * c.global_batch * seq)):
            remark(f"WARNING: {long}")
        attempt = Attempt(p.iteration, p.consumed_train_samples, self.total_steps(), flops, screen)
        self.metrics = Metrics(folder if self.team.is_lead else None, c, attempt, self.timers, self.team)
        metrics = self.metrics
        self.state.saver.note_loss = lambda step, why: metrics.row("save-failed", step, reason=why)
        # A "start" replaces earlier rows from this iteration on, an "evaluate" none.
        event = "evaluate" if c.training.skip_train else "start"
        row: dict[str, Any] = {"command": command, "version": our_version(), "torch": torch.__version__}
        row |= {"python": platform.python_version(), "device": devices.name(self.device), "host": platform.node()}
        row |= {"parameters": parameters, "block": self.net.execution, "dtype": c.precision.dtype}
        startup = self.timers.startup
        row |= {"startup": startup.seconds, "ready": round(time.perf_counter() - startup.began, 3)}
        self.metrics.row(event, p.iteration, **row, tokens_per_step=c.global_batch * seq, train_iters=c.steps)

    def beginning(self, folder: Path | None, tokenizer: Tokenizer | None, parameters: int) -> Beginning:
        p = self.progress
        return Beginning(
            self.config,
            folder,
            tokenizer,
            self.vocab,
            self.padded,
            parameters,
            device=devices.name(self.device),
            iteration=p.iteration,
            total=self.total_steps(),
            loaded=self.config.checkpoint.load if self.has_loaded else None,
            best=None if p.best_iteration is None or p.best_loss is None else (p.best_iteration, p.best_loss),
        )

    # The loop

    def train(self, stop: StopConditions) -> str:
        """Take all steps that are left, unless `stop` ends the run; return the reason to end."""
        if self.config.training.skip_train:
            say("skipping training (--skip-train) ...")
            return ALL_DONE
        self.begin()
        with contextlib.ExitStack() as held:
            profile = held.enter_context(profiler(self.config.logging, self.metrics.folder, self.device))
            gc.freeze()  # the collector need not look again at what was built so far
            held.callback(gc.unfreeze)
            held.callback(self.close_batches)
            held.push(self.finish_at_end)
            held.callback(self.timers.startup.end_wait)
            self.timers.startup.wait("taking the first step, for which kernels are loaded or compiled")
            self.last = time.perf_counter()
            while not self.is_done:
                if reason := self.reason_to_stop(stop):
                    return reason
                if self.skip_iterations():
                    continue
                profile(self.progress.iteration + 1, self.finish)
                self.step(stop)
                self.validate_and_save(stop)
        say_time("after training is done")
        self.report_samples_used(aloud=True)
        return ALL_DONE

    def begin(self) -> None:
        """Do what precedes the first step: print warnings and the beginning, save at the start."""
        p = self.progress
        self.guard.begin()
        done = (p.iteration, p.consumed_train_samples, p.schedule_samples)
        for line in warn_of_idle_steps(self.state.schedule, self.config, self.total_steps(), *done):
            notice(f"WARNING: {line}")
        say("training ...", FORMS.get(self.config.logging.log_format, MEGATRON).start)
        say_time("before the start of training step")
        if self.is_done:
            remark(f" > nothing is left to train: step {p.iteration} of {self.total_steps()} is done")
        if (c := self.config.checkpoint).save and c.save_at_start and not p.iteration:
            self.save()

    def step(self, stop: StopConditions) -> None:
        """Update the weights with the next global batch."""
        begun = time.perf_counter()
        pulse.enter("data", self.progress.iteration + 1)
        with self.timers.time("batch-generator", 2):
            micro_batches = self.next_batch()
        waited = time.perf_counter() - begun
        pulse.enter("forward-backward")
        settings = self.step_settings(stop)
        update = train_step(self.net, micro_batches, settings, self.timers.time)
        self.record(self.count(settings, update, waited))
        self.replicas.after(self.progress.iteration, at_once=not self.runs_ahead)

    def record(self, submitted: Submitted) -> None:
        """Record this step, or the one before while the device computes this one."""
        if self.runs_ahead:
            before, self.submitted = self.submitted, submitted
            if before is not None:
                self.settle(before)
                self.write_log()
        else:
            self.write_log()  # of the step before, while the device computes this one
            self.settle(submitted)
            if not devices.is_asynchronous(self.device):
                self.write_log()

    def next_batch(self) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch."""
        if self.train_batches is None:
            data = self.data["train"]
            assert data is not None
            self.train_batches = self.batches(data, self.progress.consumed_train_samples, self.config.batch)
        return next(self.train_batches)

    def read_again(self, step: Submitted) -> list[Batch]:
        """Return this rank's micro-batches of a step that was taken."""
        data = self.data["train"]
        assert data is not None
        with contextlib.closing(self.batches(data, step.consumed - step.size, self.config.batch)) as again:
            return next(again)

    def step_settings(self, stop: StopConditions) -> StepSettings:
        samples, t, state = self.progress.schedule_samples, self.config.training, self.state
        wants_stop = self.team.size > 1 and (stop.reason() is not None or state.saver.failed)
        lr, weight_decay = state.schedule.lr(samples), state.schedule.wd(samples)
        return StepSettings(t.seed, lr, weight_decay, state.scaler.scale, t.loss_mean, wants_stop)

    def count(self, settings: StepSettings, update: Update, waited: float) -> Submitted:
        """Count a step as applied, which `settle` corrects, and begin to read its numbers."""
        p, extras = self.progress, {}
        if self.config.logging.log_num_zeros_in_grad:
            extras["num_zeros"] = self.net.store.count_zero_gradients()
        if self.config.logging.log_params_norm:
            extras["params_norm"] = self.net.store.weight_norm()
        if (times := self.net.store.times) is not None:
            extras |= {"arrived": times[HAS_GRADIENTS], "met": times[ALL_MET]}
        numbers = torch.cat([update, *(x.double().view(1) for x in extras.values())]) if extras else update
        size, scheduled = self.config.batch(p.consumed_train_samples), p.schedule_samples
        p.iteration += 1
        p.consumed_train_samples += size
        p.schedule_samples += size
        done, read = (p.iteration, p.consumed_train_samples), devices.start_read(numbers)
        return Submitted(*done, scheduled, size, settings, 1e3 * waited, tuple(extras), read)

    def settle(self, step: Submitted, reacts: bool = True) -> None:
        """Wait for a step's numbers, after which its log is to be written.

        Correct the counters and the loss scale if the step was not applied, and react to that.
        """
        p, c, scaler, settings = self.progress, self.config, self.state.scaler, step.settings
        loss, norm, wanting_stop, *values = step.numbers()
        shown = dict(zip(step.extras, values, strict=True))
        if "met" in shown:
            self.stragglers.note(step.iteration, step.data_ms, shown.pop("arrived"), shown.pop("met"))
        if self.state.schedule.wd_style != "constant":
            shown["weight_decay"] = settings.weight_decay
        self.may_have_to_stop = self.team.size == 1 or wanting_stop > 0

        skipped = not (math.isfinite(loss) and math.isfinite(norm))  # then the store left the weights as they were
        overflow = skipped and math.isfinite(loss) and c.precision.fp16
        scaler.update(skipped)
        harmless = overflow and scaler.may_overflow(settings.scale)
        scheduled = step.scheduled + (0 if skipped else step.size)
        p.nonfinite_in_a_row = p.nonfinite_in_a_row + 1 if skipped and not harmless else 0
        row = {"batch": step.size, "loss": loss, "grad_norm": norm, "lr": settings.lr, "loss_scale": settings.scale}
        row |= {"skipped": skipped, "data_ms": round(step.data_ms, 3), **shown}
        now, next_lr = time.perf_counter(), self.state.schedule.lr(scheduled)
        done = step.iteration, step.consumed, now - self.last
        self.unwritten = functools.partial(self.metrics.step, *done, next_lr, row)
        self.last = now
        if skipped:  # whatever was submitted since then does not count
            p.iteration, p.consumed_train_samples, p.schedule_samples = step.iteration, step.consumed, scheduled
        if reacts and p.nonfinite_in_a_row:
            self.guard.nonfinite(step, loss, norm)
        elif reacts and not skipped:
            self.guard.applied(step, loss)

    def finish(self, reacts: bool = True) -> None:
        """Wait for the step that was submitted last, and log it."""
        step, self.submitted = self.submitted, None
        if step is not None:
            self.settle(step, reacts)
        self.write_log()
        if reacts:
            self.replicas.look()

    def discard_submitted(self) -> bool:
        """Wait for a step that was submitted after one that does not count; log the latter.

        Return whether there was one that changed the weights.
        """
        step, self.submitted = self.submitted, None
        self.write_log()
        self.replicas.pending = None  # what it compared does not count either
        return step is not None and all(map(math.isfinite, step.numbers()[:2]))

    def finish_at_end(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Call `finish` as the loop ends; an error that ended it counts more than any in here.

        After an error other ranks may be gone, so nothing is done that would need them.
        """
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            self.finish(reacts=kind is None)

    def write_log(self) -> None:
        """Log the last step that was settled, unless that is done."""
        write, self.unwritten = self.unwritten, None
        if write is not None:
            write()
        for iteration, lag in self.stragglers.changes() if self.team.is_lead else ():
            self.metrics.straggler(iteration, lag)

    # Around the steps

    @property
    def will_train(self) -> bool:
        return not (self.is_done or self.config.training.skip_train)

    @property
    def is_done(self) -> bool:
        c, p = self.config, self.progress
        if c.samples is None:
            return p.iteration >= c.steps
        return p.consumed_train_samples + c.batch(p.consumed_train_samples) > c.samples

    def total_steps(self) -> int:
        """Return the steps already taken plus those to come.

        With --train-samples the earlier ones may have had other sizes.
        """
        c, iteration, consumed = self.config, self.progress.iteration, self.progress.consumed_train_samples
        if c.samples is None:
            return c.steps
        while (size := c.batch(consumed)) < c.global_batch and consumed + size <= c.samples:
            iteration, consumed = iteration + 1, consumed + size
        return iteration + max(c.samples - consumed, 0) // c.global_batch

    def batches(
        self,
        dataset: Dataset,
        consumed: int,
        step_size: Callable[[int], int],
        at_end: Literal["raise", "wrap", "mask"] = "raise",
    ) -> Generator[list[Batch], None, None]:
        """Yield the micro-batches of each step from this sample on, without end."""
        at, length, cp = self.layout.at, self.config.data.seq_length, self.layout.cp
        assert length
        columns = None if cp == 1 else slice(at("cp") * length // cp, (at("cp") + 1) * length // cp)
        spec = LoaderSpec(
            self.config.micro_batch,
            step_size,
            self.vocab,
            workers=self.config.data.num_workers,
            marks=self.marks,
            rank=at("replicas", "shard"),
            ranks=self.layout.dp,
            columns=columns,
            length=length + 1,
            device=self.device,
            at_end=at_end,
        )
        return iter(Loader(dataset, spec, consumed))

    def close(self) -> None:
        """End what is under way and close the log; wait for a save in flight."""
        with contextlib.ExitStack() as held:
            held.callback(self.metrics.close)
            held.callback(self.state.saver.close)
            if self.net.graphs is not None:
                held.callback(self.net.graphs.captured.clear)  # NCCL waits for graphs of its collectives
            if self.scores is not None:
                self.scores.close()

    def close_batches(self) -> None:
        """End the thread that reads ahead."""
        if self.train_batches is not None:
            self.train_batches.close()
            self.train_batches = None

    def skip_iterations(self) -> bool:
        """Mark the iterations of a --skip-train-iteration-range that begins here as done.

        Return whether there was one.
        """
        p = self.progress
        for first, last in skipped(self.config.data.skip_train_iteration_range):
            if first <= p.iteration + 1 <= last:
                self.finish()
                self.close_batches()
                begin = p.consumed_train_samples
                while p.iteration < last and not self.is_done:
                    p.iteration += 1
                    p.consumed_train_samples += self.config.batch(p.consumed_train_samples)
                remark(f"Skipped iterations {first} to {p.iteration} due to --skip-train-iteration-range flag.")
                self.metrics.row("skip", p.iteration, first=first, from_sample=begin, to=p.consumed_train_samples)
                self.state.skips.append([begin, f"passed over to {p.consumed_train_samples}"])
                return True
        return False

    def reason_to_stop(self, stop: StopConditions) -> str | None:
        """Return why the run must end before the next step, the same on every rank, or None."""
        iteration, every = self.progress.iteration, self.config.training.exit_interval
        reason = self.gather_reasons(stop) if self.may_have_to_stop else None
        # Do not stop at the iteration where this attempt began, or a resumed run would end
        # immediately.
        if not reason and every and iteration % every == 0 and iteration != (self.state.loaded or 0):
            reason = f"--exit-interval {every}"
        if reason:
            self.finish()
        if reason and not stop.signal:
            say(f"exiting program at iteration {iteration}: {reason}")
        return reason

    def gather_reasons(self, stop: StopConditions) -> str | None:
        """Return the first reason to stop that any rank has, or None.

        Raise the error of a background save that failed.
        """
        everyone = self.team.gather([stop.reason(), stop.signal, self.state.saver.failed])
        if any(failed for _, _, failed in everyone):
            self.state.saver.wait()  # raises the failure on every rank
        for _, number, _ in everyone:
            if number is not None and stop.signal is None:
                stop.signal = signal.Signals(number)
        self.may_have_to_stop = self.team.size == 1
        return next((reason for reason, *_ in everyone if reason), None)

    def validate_and_save(self, stop: StopConditions) -> None:
        """Do what follows some steps, and counts in no step's time: print GPUs, validate, save."""
        t, c, g, p = self.config.training, self.config.checkpoint, self.config.logging, self.progress
        is_best, saves = False, bool(c.save and c.save_interval and p.iteration % c.save_interval == 0)
        validates, prints = p.iteration % t.eval_interval == 0, p.iteration in g.nvidia_smi_at
        samples = self.samples if p.iteration % (g.sample_interval or 1) == 0 else None
        scores = self.scores if self.scores is not None and self.scores.are_due(p.iteration) else None
        if self.scores is not None:
            self.scores.collect(self.metrics)
        if not (saves or validates or prints or samples or scores):
            return
        self.finish()
        self.stragglers.pause()
        pause = time.perf_counter()
        if prints:
            self.metrics.print_gpus()
        if validates:
            loss = self.validate("valid", f"iteration {p.iteration}", -1, stop)
            is_best = math.isfinite(loss) and (p.best_loss is None or loss < p.best_loss)
            if is_best:
                p.best_iteration, p.best_loss = p.iteration, loss
        if samples:
            pulse.enter("samples")
            samples.write(p.iteration, self.metrics)
        if saves or (c.save and is_best and c.keep_best):
            self.save()
        if scores:
            self.score(scores.run, stop)
        self.last += time.perf_counter() - pause

    def score(self, act: Callable[..., None], stop: StopConditions) -> None:
        """Call one of the methods of `scores` for the weights after the last step."""
        self.finish()
        pulse.enter("scores")
        p, is_alone = self.progress, self.team.size == 1
        act(p.iteration, p.consumed_train_samples, self.metrics, lambda: is_alone and stop.signal is not None)

    def validate(self, name: str, prefix: str, ahead: int, stop: StopConditions) -> float:
        """Return the mean loss of the "valid" or "test" sets, printing each; NaN if none."""
        pulse.enter("validation")
        sets = [(key, data) for key, data in self.data.items() if data is not None and key.split("/")[0] == name]
        losses = [self.validate_set(key, data, prefix, ahead, stop) for key, data in sets]
        return sum(losses) / len(losses) if losses else math.nan

    def validate_set(self, key: str, dataset: Dataset, prefix: str, ahead: int, stop: StopConditions) -> float:
        """Return the mean loss of one set, or NaN if it was not computed.

        Each validation reads the samples after those of the one before, as a function of the
        iteration; with --full-validation it reads all of them.
        """
        t, p, size = self.config.training, self.progress, self.config.global_batch
        is_alone = self.team.size == 1
        if not t.eval_iters or (stop.signal and is_alone):
            return math.nan
        name, _, set_name = key.partition("/")
        is_full = name == "valid" and self.config.data.full_validation
        before = p.iteration // t.eval_interval + ahead if name == "valid" and not is_full else 0
        steps = -(-len(dataset) // size) if is_full else t.eval_iters
        at_end: Literal["mask", "wrap"] = "mask" if is_full else "wrap"
        begun = time.perf_counter()
        batches = self.batches(dataset, before * t.eval_iters * size, lambda consumed: size, at_end)
        with contextlib.closing(batches):
            loss = evaluate(self.net, itertools.islice(batches, steps), lambda: is_alone and stop.signal is not None)
        if stop.signal and is_alone:  # saving comes first: the process may be killed within seconds
            return math.nan
        shown = "test" if name == "test" else "validation"
        check = Check(p.iteration, shown, prefix, loss, set_name, time.perf_counter() - begun)
        self.metrics.validation(p.consumed_train_samples, check)
        if not math.isfinite(loss) and self.guard.on_nonfinite[0] != "skip":
            message = f"iteration {p.iteration}: the loss on the {key} set is {loss}, so this step is not saved; "
            message += f"lower --lr (now {self.config.optimizer.lr}) or warm up longer"
            raise UserError(message, NON_FINITE, everywhere=True)
        return loss

    def report_samples_used(self, aloud: bool = False) -> None:
        """Log how many samples of each blended data set were used; `aloud` prints them too."""
        p = self.progress
        used = count_used(self.data.get("train"), p.consumed_train_samples) if self.team.is_lead else {}
        if used:
            self.metrics.row("used", p.iteration, consumed_samples=p.consumed_train_samples, samples=used)
        for prefix, number in sorted(used.items(), key=lambda item: -item[1])[:20] if aloud else ():
            say(f" > samples of each data set so far: {number:12d} {prefix}")

    def watch(self, watchdog: Watchdog | None) -> None:
        """Take part in what the watchdog does: give it the times of steps, record what it finds."""
        if watchdog is not None:
            watchdog.at_end = self.report_hang
            self.stragglers.watchdog = watchdog if self.config.logging.log_straggler else None

    def report_hang(self, text: str) -> None:
        """Record that the watchdog, whose thread calls this, is about to end the run."""
        self.metrics.record_failure(self.progress.iteration, UserError(text, HANG))

    def save(self) -> None:
        pulse.enter("save")
        self.replicas.require_equal(self.progress.iteration)
        self.guard.note_save()
        self.report_samples_used()
        self.metrics.sync()
        seconds = self.state.save()
        if seconds is not None:
            is_in_flight = self.state.saver.in_flight
            self.metrics.row("save", self.progress.iteration, seconds=round(seconds, 3), background=is_in_flight)
