"""The training of one rank: the network, its data and its log, and the loop over steps.

`train` is the loop, `step` one update with what follows from it; network.py's train_step is its middle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import platform
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Literal

import torch

from meshwright import device as devices
from meshwright.console import say, say_time
from meshwright.data.datasets import Datasets, check_datasets, continue_datasets, count_used, list_epochs, make_marks
from meshwright.data.loader import Batch, Loader, LoaderSpec
from meshwright.data.samples import Dataset
from meshwright.errors import NON_FINITE, UserError
from meshwright.launch.team import Team
from meshwright.model import counts
from meshwright.model.gpt import initialise
from meshwright.optim.loss_scale import LossScale
from meshwright.parallel.layout import Layout
from meshwright.settings.command import our_version
from meshwright.settings.grammar import allowed_in_a_row, skipped
from meshwright.settings.schema import TrainConfig
from meshwright.tokenizers import Tokenizer
from meshwright.training import folder as run_folder
from meshwright.training import memory as fit
from meshwright.training import network
from meshwright.training.metrics import Metrics, Timers, profiler
from meshwright.training.network import Loss, Model
from meshwright.training.resume import Progress, State
from meshwright.training.sizes import parameters_of_ranks
from meshwright.training.step import evaluate, train_step
from meshwright.training.stop import Ending

ALL_DONE = "all iterations done"


class Trainer:
    """The parts of a run, and what is done with them: load, train, validate, save."""

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        vocab: int,
        padded: int,
        model: Model | None,
        loss: Loss | None,
        timers: Timers,
        layout: Layout,
        team: Team,
    ) -> None:
        assert config.data.seq_length
        self.config, self.device, self.vocab, self.padded, self.timers = config, device, vocab, padded, timers
        self.layout, self.team = layout, team
        positions = config.model.max_position_embeddings or config.data.seq_length
        say("building GPT model ...")
        if model is None:
            share = parameters_of_ranks(config, padded, positions)[layout.at("pp")]
            team.run_on_all(lambda: fit.require_memory(config, share, padded // layout.tp, device))

        def tell_size(parameters: int) -> None:
            for tp, pp, number in sorted(
                {tuple(x) for x in team.gather([layout.at("tp"), layout.at("pp"), parameters])}
            ):
                say(f" > number of parameters on (tensor, pipeline) model parallel rank ({tp}, {pp}): {number}")

        self.net = network.build(config, layout, device, vocab, padded, positions, model, loss, tell_size)
        say(f" > running the {self.net.why}")
        if config.training.compile == "on" and not self.net.why.startswith("compiled"):
            say(" > note: --compile on has no effect on layers with the reference attention")
        scaler = LossScale(config.precision)
        self.state = State(config, self.net, scaler, vocab, padded, positions, team)
        say(f"> learning rate decay style: {self.state.schedule.style}")
        self.last = time.perf_counter()  # end of the last step
        self.ask_to_end = True  # whether any rank may have been asked to end

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def load_or_initialise(self) -> None:
        loaded = False
        if self.config.checkpoint.load:
            with self.timers.phase("load-checkpoint"):
                loaded = self.state.load()
            self.timers.tell("load-checkpoint")
        if not loaded:
            draw, m, seed = (
                getattr(self.net.parts[0], "initialise", initialise),
                self.config.model,
                self.config.training.seed,
            )
            self.net.store.initialise(lambda masters: draw(masters, m, self.vocab, seed))
        self.net.store.publish_weights()

    def fit_micro_batch(self) -> None:
        """Resolve `--micro-batch-size auto`."""
        if self.config.training.micro_batch_size == "auto":
            size, told = fit.micro_batch(self.net, self.config, self.vocab, self.state.micro_batch_before, self.team)
            say(f" > --micro-batch-size auto: {size} ({told})")
            t = dataclasses.replace(self.config.training, micro_batch_size=size)
            self.config = self.state.config = dataclasses.replace(self.config, training=t)

    def open_data(self, tokenizer: Tokenizer | None, datasets: Datasets | None) -> None:
        p = self.progress
        self.marks = make_marks(self.config.data, tokenizer)
        at = (p.iteration, p.consumed_train_samples) if self.will_train else None
        data = self.team.run_lead_first(self.open_files) if datasets is None else datasets
        self.team.run_on_all(lambda: check_datasets(self.config, data, datasets is not None, at))
        self.data = data
        self.state.read_in(list_epochs(self.data.get("train")))

    def open_files(self) -> Datasets:
        """The flags' data, with the blends that the checkpoint remembers, and those from now on."""
        past, consumed = self.state.blends, self.progress.consumed_train_samples
        if self.will_train:
            data, self.state.blends = continue_datasets(self.config, self.vocab, past, consumed)
        else:  # nothing is read on from where it was
            data, _ = continue_datasets(self.config, self.vocab, None, 0)
        last = self.state.blends.blends[-1].begin if self.state.blends else 0
        d = dataclasses.replace(self.config.data, blend_change_at=str(last) if last else None)  # config.toml repeats it
        self.config = self.state.config = dataclasses.replace(self.config, data=d)
        return data

    @property
    def will_train(self) -> bool:
        return not (self.is_done or self.config.training.skip_train)

    def open_folder(self, folder: Path | None, tokenizer: Tokenizer | None, command: list[str]) -> None:
        """The settings, the vocabulary, the log; the first moment when something is written."""
        c, p, seq = self.config, self.progress, self.config.data.seq_length
        assert seq
        self.state.check(tokenizer, self.will_train)
        self.team.run_on_lead(lambda: run_folder.prepare(folder, c, tokenizer))
        flops = counts.flops_per_token(c.model, self.padded, seq, c.training.recompute)
        # What all ranks would save holds each number once.
        own = self.net.store.named_state(False, to_save=True)
        parameters = sum(self.team.gather(sum(x.numel() for _, _, x in own.values())))
        self.metrics = Metrics(
            folder if self.team.is_lead else None,
            c,
            flops,
            self.device,
            self.timers,
            p.iteration,
            p.consumed_train_samples,
            self.steps_in_all(),
            self.team,
        )
        event = "evaluate" if c.training.skip_train else "start"  # which begins history anew from this step on
        self.metrics.row(
            event,
            p.iteration,
            time=time.time(),
            command=command,
            version=our_version(),
            torch=torch.__version__,
            python=platform.python_version(),
            device=devices.name(self.device),
            host=platform.node(),
            parameters=parameters,
            block=self.net.why,
            dtype=c.precision.dtype,
            tokens_per_step=c.global_batch * seq,
            train_iters=c.steps,
        )

    def batches(
        self,
        dataset: Dataset,
        consumed: int,
        step_size: Callable[[int], int],
        at_end: Literal["raise", "wrap", "mask"] = "raise",
    ) -> Generator[list[Batch], None, None]:
        """Yield the micro-batches of each step from this sample on, without end."""
        at, length = self.layout.at, self.config.data.seq_length
        assert length
        columns = length // self.layout.cp
        spec = LoaderSpec(
            self.config.micro_batch,
            step_size,
            self.vocab,
            workers=self.config.data.num_workers,
            marks=self.marks,
            rank=at("replicas", "shard"),
            ranks=self.layout.dp,
            columns=None if self.layout.cp == 1 else slice(at("cp") * columns, (at("cp") + 1) * columns),
            length=length + 1,
            device=self.device,
            at_end=at_end,
        )
        return iter(Loader(dataset, spec, consumed))

    @property
    def is_done(self) -> bool:
        c, p = self.config, self.progress
        if c.samples is None:
            return p.iteration >= c.steps
        return p.consumed_train_samples + c.batch(p.consumed_train_samples) > c.samples

    def steps_in_all(self) -> int:
        """Those made and those to come. Under --train-samples the ones before may have had other sizes."""
        c, iteration, consumed = self.config, self.progress.iteration, self.progress.consumed_train_samples
        if c.samples is None:
            return c.steps
        while (size := c.batch(consumed)) < c.global_batch and consumed + size <= c.samples:
            iteration, consumed = iteration + 1, consumed + size
        return iteration + max(c.samples - consumed, 0) // c.global_batch

    def train(self, ending: Ending) -> str:
        """All steps that are left, unless something ends them early; returns what ended them."""
        t, c, p = self.config.training, self.config.checkpoint, self.progress
        if t.skip_train:
            say("skipping training (--skip-train) ...")
            return ALL_DONE
        say("training ...")
        say_time("before the start of training step")
        if self.is_done:
            say(f" > nothing is left to train: step {p.iteration} of {self.steps_in_all()} is done")
        if c.save and c.save_at_start and not p.iteration:
            self.save()
        with contextlib.ExitStack() as held:
            profile = held.enter_context(profiler(self.config.logging, self.metrics.folder, self.device))
            gc.freeze()  # what was built so far stays: the collector need not look at it again and again
            held.callback(gc.unfreeze)
            batches, self.last = None, time.perf_counter()
            held.callback(lambda: batches.close() if batches is not None else None)
            while not self.is_done:
                early = self.asked_to_end(ending) or self.exit_interval()
                if early:
                    if not ending.signal:
                        say(f"exiting program at iteration {p.iteration}: {early}")
                    return early
                if self.pass_over():
                    if batches is not None:
                        batches.close()  # a thread reads ahead for it
                    batches = None
                    continue
                if batches is None:
                    data = self.data["train"]
                    assert data is not None
                    batches = self.batches(data, p.consumed_train_samples, self.config.batch)
                profile(p.iteration + 1)
                self.step(batches, ending)

                pause = time.perf_counter()
                best = False
                if p.iteration % t.eval_interval == 0:
                    loss = self.validate("valid", f"iteration {p.iteration}", -1, ending)
                    best = math.isfinite(loss) and (p.best_loss is None or loss < p.best_loss)
                    if best:
                        p.best_iteration, p.best_loss = p.iteration, loss
                if c.save and ((best and c.keep_best) or (c.save_interval and p.iteration % c.save_interval == 0)):
                    self.save()
                self.last += time.perf_counter() - pause  # neither counts as time of a step
        say_time("after training is done")
        self.tell_used(aloud=True)
        return ALL_DONE

    def asked_to_end(self, ending: Ending) -> str | None:
        """What any rank was asked to end for; asked about only when the last step's sums say that one was."""
        if not self.ask_to_end:
            return None
        told = self.team.gather([ending.reason(), ending.signal, self.state.saver.failed])
        if any(failed for _, _, failed in told):
            self.state.saver.wait()  # which raises it, on every rank
        for _, signal, _ in told:
            if signal is not None and ending.signal is None:
                ending.take(signal)
        self.ask_to_end = self.team.size == 1
        return next((reason for reason, *_ in told if reason), None)

    def step(self, batches: Iterator[list[Batch]], ending: Ending) -> None:
        """One update and what follows from its loss: counters, loss scale, log."""
        t, p, g = self.config.training, self.progress, self.config.logging
        lr, wd = self.state.schedule.lr(p.schedule_samples), self.state.schedule.wd(p.schedule_samples)
        size, scale = self.config.batch(p.consumed_train_samples), self.state.scaler.scale
        with self.timers.time("batch-generator", 2):
            micro = next(batches)
        stop = self.team.size > 1 and (ending.reason() is not None or self.state.saver.failed)
        update = train_step(self.net, micro, t.seed, lr, wd, scale, t.loss_mean, stop, self.timers.time)
        more = {}
        if g.log_num_zeros_in_grad:
            more["num_zeros"] = self.net.store.zeros()
        if g.log_params_norm:
            more["params_norm"] = self.net.store.norm()
        told = torch.stack([x.double() for x in (*update, *more.values())])
        loss, norm, ends, *values = told.tolist()  # the one wait for the device
        shown = dict(zip(more, values, strict=True))
        self.ask_to_end = self.team.size == 1 or ends > 0

        skipped = not (math.isfinite(loss) and math.isfinite(norm))  # then the store left everything as it was
        if self.state.schedule.wd_style != "constant":
            shown["weight_decay"] = wd
        overflow = skipped and math.isfinite(loss) and self.config.precision.fp16
        self.state.scaler.update(skipped)
        harmless = overflow and self.state.scaler.may_overflow(scale)
        p.iteration += 1
        p.consumed_train_samples += size
        p.schedule_samples += 0 if skipped else size
        p.nonfinite_in_a_row = p.nonfinite_in_a_row + 1 if skipped and not harmless else 0
        now = time.perf_counter()
        self.metrics.step(
            p.iteration,
            p.consumed_train_samples,
            now - self.last,
            self.state.schedule.lr(p.schedule_samples),
            batch=size,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            loss_scale=scale,
            skipped=skipped,
            **shown,
        )
        self.last = now
        if p.nonfinite_in_a_row > (allowed_in_a_row(t.on_nonfinite) or 0):
            self.metrics.row("end", p.iteration, reason="not finite", status=NON_FINITE, time=time.time())
            raise UserError(not_finite(p, loss, norm, scale, self.config), NON_FINITE, everywhere=True)

    def exit_interval(self) -> str | None:
        """Only after a step of this attempt: a resumed run must not leave at once where the last one left."""
        every, i = self.config.training.exit_interval, self.progress.iteration
        return f"--exit-interval {every}" if every and i % every == 0 and i != (self.state.loaded or 0) else None

    def pass_over(self) -> bool:
        """Count the iterations of a --skip-train-iteration-range and their samples without training on them."""
        p = self.progress
        for first, last in skipped(self.config.data.skip_train_iteration_range):
            if first <= p.iteration + 1 <= last:
                begin = p.consumed_train_samples
                while p.iteration < last and not self.is_done:
                    p.iteration += 1
                    p.consumed_train_samples += self.config.batch(p.consumed_train_samples)
                say(f"Skipped iterations {first} to {p.iteration} due to --skip-train-iteration-range flag.")
                self.metrics.row("skip", p.iteration, first=first, from_sample=begin, to=p.consumed_train_samples)
                self.state.skips.append([begin, f"passed over to {p.consumed_train_samples}"])
                return True
        return False

    def validate(self, name: str, prefix: str, ahead: int, ending: Ending) -> float:
        """The mean loss of the sets of "valid" or "test", each with its own line; NaN if there is none."""
        sets = [(key, data) for key, data in self.data.items() if data is not None and key.split("/")[0] == name]
        losses = [self.validate_set(key, data, prefix, ahead, ending) for key, data in sets]
        return sum(losses) / len(losses) if losses else math.nan

    def validate_set(self, key: str, dataset: Dataset, prefix: str, ahead: int, ending: Ending) -> float:
        """Each validation reads the samples after the one before; which ones is a function of the iteration. With
        --full-validation it reads all of them. NaN: none."""
        t, size = self.config.training, self.config.global_batch
        if not t.eval_iters or (ending.signal and self.team.size == 1):
            return math.nan
        name, _, of = key.partition("/")
        whole = name == "valid" and self.config.data.full_validation
        before = self.progress.iteration // t.eval_interval + ahead if name == "valid" and not whole else 0
        steps = -(-len(dataset) // size) if whole else t.eval_iters
        batches = self.batches(
            dataset, before * t.eval_iters * size, lambda consumed: size, "mask" if whole else "wrap"
        )
        with contextlib.closing(batches):
            cut = (lambda: ending.signal is not None) if self.team.size == 1 else (lambda: False)
            loss = evaluate(self.net, itertools.islice(batches, steps), cut)
        if ending.signal and self.team.size == 1:  # a grace of seconds may be running: saving comes first
            return math.nan
        p = self.progress
        shown = "test" if name == "test" else "validation"
        self.metrics.validation(p.iteration, p.consumed_train_samples, shown, prefix, loss, of)
        if not math.isfinite(loss) and allowed_in_a_row(t.on_nonfinite) == 0:
            self.metrics.row("end", p.iteration, reason="not finite", status=NON_FINITE, time=time.time())
            raise UserError(
                f"iteration {p.iteration}: the loss on the {key} set is {loss}, so this step is not saved; the weights are "
                f"finite but of no use. A lower --lr (now {self.config.optimizer.lr}) or a longer warm-up usually helps",
                NON_FINITE,
                everywhere=True,
            )
        return loss

    def tell_used(self, aloud: bool = False) -> None:
        """Of a blend, the samples that were used of each data set so far: a row, and at the end of a training lines."""
        p = self.progress
        used = count_used(self.data.get("train"), p.consumed_train_samples) if self.team.is_lead else {}
        if used:
            self.metrics.row("used", p.iteration, consumed_samples=p.consumed_train_samples, samples=used)
        for prefix, number in sorted(used.items(), key=lambda item: -item[1])[:20] if aloud else ():
            say(f" > samples of each data set so far: {number:12d} {prefix}")

    def save(self) -> None:
        self.tell_used()
        self.metrics.sync()
        seconds = self.state.save()
        if seconds is not None:
            waited, goes_on = round(seconds, 3), self.state.saver.in_flight
            self.metrics.row("save", self.progress.iteration, seconds=waited, background=goes_on)


def not_finite(progress: Progress, loss: float, norm: float, scale: float, config: TrainConfig) -> str:
    """What to do about a NaN."""
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
    kept = (
        f"; the weights and the checkpoints in {config.checkpoint.save} are as before it"
        if config.checkpoint.save
        else ""
    )
    constant = config.precision.loss_scale is not None
    hint = f" at the {'constant' if constant else 'least'} loss scale {scale}" if config.precision.fp16 else ""
    return (
        f"iteration {progress.iteration} (samples up to {progress.consumed_train_samples}): {what}{hint}, so this step "
        f"was not applied{kept}. A lower --lr (now {config.optimizer.lr}) or a longer warm-up"
        f"{' or --bf16' if config.precision.fp16 else ''} usually helps"
    )
