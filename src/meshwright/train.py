"""Pre-train a GPT: `meshwright train`, `pretrain_gpt.py`, or `run(config)` from Python.

Read `run` for the order of things, and network.py's train_step for one batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import device as devices
from meshwright import flags, launch
from meshwright.config import TrainConfig, allowed_in_a_row, skipped
from meshwright.ending import Ending
from meshwright.errors import BAD_DATA, DONE, NON_FINITE, UserError
from meshwright.model import counts
from meshwright.parallel import start
from meshwright.parallel.layout import Layout, connect
from meshwright.parallel.team import Team
from meshwright.preflight import (
    be_deterministic,
    checkpoint_architecture,
    differences,
    dry_run,
    guard_existing,
    layout_of,
    our_version,
    pick_backend,
    require_files,
    require_memory,
    same_on_all,
    saved_settings,
    vocabulary,
)

if TYPE_CHECKING:
    import torch

    from meshwright.data.loader import Batch, Dataset
    from meshwright.metrics import Timers
    from meshwright.network import Loss, Model
    from meshwright.tokenizers import Tokenizer

    Datasets = Mapping[str, Dataset | None]  # "train", "valid", "test"


def main(argv: list[str]) -> int:
    world = start.find(os.environ, None)
    try:
        return command_line(argv, world)
    except UserError as error:
        if world.local_rank and not error.everywhere:  # the machine's first rank was given the same flags
            time.sleep(WORD)
        raise


WORD = 3.0  # seconds that the rank that tells has for it: a launcher stops all as soon as one has ended


def command_line(argv: list[str], world: start.World) -> int:
    dry = "--dry-run" in argv
    parsed = flags.parse(
        TrainConfig,
        argv if world.size == 1 else [f"--world-size={world.size}", *argv],
        "meshwright train",
        check=not dry,
        about="Pre-train a GPT. Without --save nothing is written.",
    )
    given = {name for name, source in parsed.sources.items() if source != "default"}
    config = checkpoint_architecture(parsed.config, given)
    before, now = flags.to_dict(parsed.config), flags.to_dict(config)
    parsed.sources.update({name: f"checkpoint {config.checkpoint.load}" for name in now if now[name] != before[name]})
    if parsed.print_config:
        print(flags.to_toml(config, parsed.sources))
        return DONE
    launched = None if dry else launch.relaunch(config.parallel, ["train", *argv])
    if launched is not None:
        return launched
    if world.local_rank == 0:
        flags.tell(parsed)
    return dry_run(config) if dry else run(config, command=["meshwright", "train", *argv])


@dataclasses.dataclass
class Progress:
    """The counters of a run; with the weights and moments they are its whole state, for randomness needs none."""

    iteration: int = 0  # every attempt, skipped ones too
    consumed_train_samples: int = 0  # likewise
    schedule_samples: int = 0  # of successful steps: what the schedule sees
    nonfinite_in_a_row: int = 0
    best_iteration: int | None = None  # of the least validation loss
    best_loss: float | None = None


def run(
    config: TrainConfig,
    model: Model | None = None,
    loss: Loss | None = None,
    datasets: Datasets | None = None,
    *,
    command: list[str] | None = None,
) -> int:
    """Train as configured and return the exit status; raise UserError for what the user can mend.

    `model`, `loss` and `datasets` take the place of our own: docs/extending.md shows all three. Under a launcher every rank
    calls this.
    """
    began = time.perf_counter()
    p = config.parallel
    world = start.find(os.environ, p.local_rank)
    start.check_size(world, p.world_size)
    config = dataclasses.replace(config, parallel=dataclasses.replace(p, world_size=world.size))
    problems = config.problems(data=datasets is None)
    if problems:
        raise UserError(flags.listed(problems))
    require_files(config)
    device = devices.pick(p.device, world.local_rank)
    if config.precision.deterministic_mode:
        be_deterministic()
    try:
        team = start.join(world, pick_backend(config, device, world.rank == 0), p.distributed_timeout_minutes, device)
        return run_on_rank(config, device, team, model, loss, datasets, command or [], began)
    except Exception as error:
        told = (start.lost(error) if world.size > 1 else None) or error
        if isinstance(told, UserError) and world.size > 1:
            alone = f"rank {world.rank}: {told}" if world.rank else str(told)
            if told.everywhere and world.rank:
                time.sleep(WORD)
                alone = ""
            told = UserError(alone, told.status, everywhere=True)
        if told is error:
            raise
        raise told from error
    finally:
        start.leave()


def run_on_rank(
    config: TrainConfig, device: torch.device, team: Team, model: Model | None, loss: Loss | None,
    datasets: Datasets | None, command: list[str], began: float,
) -> int:  # fmt: skip
    """One rank's way through the run, all ranks side by side; rank 0 speaks and keeps the folders."""
    from meshwright import metrics
    from meshwright.checkpoint import store
    from meshwright.metrics import Timers, say, tell_time

    metrics.speak(team.leads)
    same_on_all(team, config)
    layout = connect(layout_of(config, team.rank))
    c = config.checkpoint
    where = c.run_dir or c.save
    folder = Path(where) if where else None

    with contextlib.ExitStack() as held:

        def take_folders() -> None:
            for flag, root in {
                Path(p).resolve(): (n, p) for n, p in (("--run-dir", c.run_dir), ("--save", c.save)) if p
            }.values():
                if Path(root).exists() and not Path(root).is_dir():
                    raise UserError(f"{flag} {root} is a file, not a folder")
                held.enter_context(store.lock(root))
            if c.save:
                guard_existing(config)

        team.lead(take_folders)
        # What follows is said in the order and the words of Megatron's log, which people's scripts read.
        timers = Timers(int(config.logging.timing_log_level), config.logging.timing_log_option, device, team)
        tokenizer, vocab, padded = introduce(config, folder)
        say(f"time to initialize megatron (seconds): {time.perf_counter() - began:.3f}")
        tell_time("after megatron is initialized")

        timers.start("model-and-optimizer-setup")
        trainer = Trainer(config, device, vocab, padded, model, loss, timers, layout, team)
        trainer.load_or_initialise()
        trainer.fit_micro_batch()
        timers.stop("model-and-optimizer-setup")
        tell_time("after model, optimizer, and learning rate scheduler are built")

        timers.start("train/valid/test-data-iterators-setup")
        trainer.open_data(tokenizer, datasets)
        timers.stop("train/valid/test-data-iterators-setup")
        tell_time("after dataloaders are built")
        say("done with setup ...")
        timers.tell("model-and-optimizer-setup", "train/valid/test-data-iterators-setup")

        trainer.open_folder(folder, tokenizer, command)
        held.callback(trainer.metrics.close)
        ending = Ending(config.training, began, saves=c.save is not None)
        with ending.catching():
            reason = trainer.train(ending)
            if reason == ALL_DONE:
                trainer.validate("valid", "the end of training for val data", 0, ending)
            if c.save and trainer.progress.iteration and not config.training.skip_train:
                trainer.save()
            if reason == ALL_DONE:
                trainer.validate("test", "the end of training for test data", 0, ending)
        if ending.signal:
            reason = ending.signal.name
            say(f"exiting program after receiving {reason}.")
        trainer.metrics.row("end", trainer.progress.iteration, reason=reason, status=ending.status, time=time.time())
        if folder is not None and team.leads:
            write_report(folder)
        return ending.status


ALL_DONE = "all iterations done"


class Trainer:
    """The parts of a run, and what is done with them: load, train, validate, save."""

    def __init__(
        self, config: TrainConfig, device: torch.device, vocab: int, padded: int, model: Model | None, loss: Loss | None,
        timers: Timers, layout: Layout, team: Team,
    ) -> None:  # fmt: skip
        from meshwright import lr_schedule, network, precision
        from meshwright.metrics import say

        assert config.data.seq_length
        self.config, self.device, self.vocab, self.padded, self.timers = config, device, vocab, padded, timers
        self.layout, self.team = layout, team
        self.positions = config.model.max_position_embeddings or config.data.seq_length
        say("building GPT model ...")
        if model is None:
            share = counts.parameters(config.model, padded, self.positions) // (layout.tp * layout.pp)
            require_memory(config, share, padded // layout.tp, device)

        def tell_size(parameters: int) -> None:
            for tp, pp, number in sorted(
                {tuple(x) for x in team.gather([layout.at("tp"), layout.at("pp"), parameters])}
            ):
                say(f" > number of parameters on (tensor, pipeline) model parallel rank ({tp}, {pp}): {number}")

        self.net = network.build(config, layout, device, vocab, padded, self.positions, model, loss, tell_size)
        say(f" > running the {self.net.why}")
        if config.training.compile == "on" and not self.net.why.startswith("compiled"):
            say(" > note: --compile on has no effect on layers with the reference attention")
        self.params = self.net.store
        self.scaler = precision.LossScale(config.precision)
        self.schedule = lr_schedule.from_config(config)
        say(f"> learning rate decay style: {self.schedule.style}")
        self.progress = Progress()
        self.skips: list[Any] = []  # (first sample, rule) of samples not trained on, for the record
        self.last = time.perf_counter()  # end of the last step
        self.loaded: int | None = None  # the step this run continues from
        self.micro_batch_before: int | None = None  # of the run it continues
        self.ends = True  # whether it is to be asked if the run shall end

    def load_or_initialise(self) -> None:
        from meshwright.checkpoint import native, store
        from meshwright.metrics import say
        from meshwright.model.gpt import initialise

        c = self.config.checkpoint
        loaded = None
        if c.load:
            self.timers.start("load-checkpoint")
            root, step = store.split_path(c.load)
            with_optimizer = not (c.finetune or c.no_load_optim)
            loaded = native.load(
                root, self.params.named_state(with_optimizer), verify=c.verify, say=say, accept=self.accept, step=step,
                optimizer=with_optimizer, team=self.team,
            )  # fmt: skip
            self.timers.stop("load-checkpoint")
            self.timers.tell("load-checkpoint")
            needs = {"--exit-on-missing-checkpoint": c.exit_on_missing_checkpoint, "--finetune": c.finetune,
                     "--no-load-optim": c.no_load_optim, "--skip-train": self.config.training.skip_train}  # fmt: skip
            if loaded is None and any(needs.values()):
                flag = next(name for name, given in needs.items() if given)
                raise UserError(f"--load {c.load}: no checkpoint there, and {flag} needs one", BAD_DATA)
            self.loaded = loaded.step if loaded and not c.finetune else None
        if loaded is None:
            draw, m, seed = (
                getattr(self.net.parts[0], "initialise", initialise),
                self.config.model,
                self.config.training.seed,
            )
            self.params.initialise(lambda masters: draw(masters, m, self.vocab, seed))
        self.params.publish_weights()

    def accept(self, state: dict[str, Any], saved: dict[str, Any]) -> None:
        """Take over a checkpoint's counters before its tensors are read, or refuse it."""
        from meshwright import lr_schedule
        from meshwright.metrics import say
        from meshwright.model.gpt import OURS

        if state.get("network", OURS) != self.net.name:
            raise UserError(
                f"the checkpoint holds a {state.get('network', OURS)}, this run builds a {self.net.name}: the same "
                "weights would mean another network",
                BAD_DATA,
            )
        for line in differences(self.config, saved):
            say(line)
        if self.config.checkpoint.finetune:
            say(" > --finetune: the weights alone are taken over; step, samples and schedule begin at 0")
            return
        if self.config.training.skip_train:  # nothing is compared that nothing will follow
            self.schedule = lr_schedule.Schedule(**state["schedule"])
        else:
            self.schedule, lines = lr_schedule.resume(self.schedule, state["schedule"], self.config)
            for line in lines:
                say(line)
        self.progress = Progress(**{f.name: state[f.name] for f in dataclasses.fields(Progress) if f.name in state})
        self.scaler.load(state["loss_scale"])
        self.skips = state["skips"]
        self.params.steps = 0 if self.config.checkpoint.no_load_optim else state["optimizer_steps"]
        before = saved.get("micro_batch_size")
        self.micro_batch_before = before if isinstance(before, int) else None

    def fit_micro_batch(self) -> None:
        """Resolve `--micro-batch-size auto`, by running the network on samples of random ids."""
        import torch

        from meshwright import fit
        from meshwright.data.loader import Batch
        from meshwright.metrics import say
        from meshwright.model.loss import loss_sum
        from meshwright.network import forward

        t, length = self.config.training, self.config.data.seq_length
        if t.micro_batch_size != "auto":
            return
        assert length
        sizes = [size // self.config.dp for size in (self.config.global_batch, *t.rampup_batch_size[:2])]

        def attempt(size: int) -> None:
            ids = torch.randint(self.vocab, (size, length + 1), generator=torch.Generator().manual_seed(0))
            places = torch.arange(length).expand(size, length)
            d = self.config.data
            batch = Batch(
                ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.arange(size),
                torch.ones(size, length) if d.eod_mask_loss else None, places if d.reset_position_ids else None,
                places.int() // 64 if d.reset_attention_mask else None,
            )  # fmt: skip
            self.params.last = False  # nothing is sent: another rank may just have run out of memory
            b = batch.to(self.device)
            loss_sum(self.net.loss(forward(self.net, self.net.parts[0], b, t.seed), b), b.loss_mask).backward()  # type: ignore[no-untyped-call]

        self.net.train()
        chosen, told = fit.largest(attempt, sizes, self.device, self.micro_batch_before)
        chosen = min(self.team.gather(chosen))
        say(f" > --micro-batch-size auto: {chosen} ({told})")
        t = dataclasses.replace(t, micro_batch_size=chosen)
        self.config = dataclasses.replace(self.config, training=t)

    def open_data(self, tokenizer: Tokenizer | None, datasets: Datasets | None) -> None:
        from meshwright.data.datasets import build_datasets
        from meshwright.data.loader import Marks
        from meshwright.data.samples import quiet, to_stderr
        from meshwright.metrics import say

        notice = to_stderr if self.team.leads else quiet

        d = self.config.data
        self.marks = None
        if d.eod_mask_loss or d.reset_position_ids or d.reset_attention_mask:
            if tokenizer is None:
                raise UserError(
                    "--eod-mask-loss, --reset-position-ids and --reset-attention-mask need a tokenizer, which knows the "
                    "end of a document: give its flags instead of --vocab-size alone"
                )
            self.marks = Marks(tokenizer.eod, d.eod_mask_loss, d.reset_position_ids, d.reset_attention_mask)

        def build() -> dict[str, Dataset | None]:
            return build_datasets(self.config, self.vocab, say, notice)

        # Rank 0 builds the indices, which the others then find.
        self.data = datasets if datasets is not None else self.team.first(build)
        if self.data.get("train") is None and not self.is_done and not self.config.training.skip_train:
            why = f"--split {d.split!r} leaves no document for training"
            raise UserError(why if datasets is None else 'datasets: there is no "train" to train on', BAD_DATA)
        p, size = self.progress, self.config.global_batch
        last = p.consumed_train_samples + (self.config.steps - p.iteration) * size
        if self.config.samples is None and not self.is_done and last > len(self.data.get("train") or range(last)):
            have = len(self.data["train"] or ())
            if datasets is not None:
                raise UserError(f'datasets["train"] has {have} samples, the run needs {last}', BAD_DATA)
            raise UserError(
                f"{p.consumed_train_samples} samples are consumed and {self.config.steps - p.iteration} steps of {size} would "
                f"end at {last}, but the data set is built for {self.config.steps} steps of {size}: another "
                "--global-batch-size than before needs the length in samples, --train-samples instead of --train-iters"
            )

    def open_folder(self, folder: Path | None, tokenizer: Tokenizer | None, command: list[str]) -> None:
        """The settings, the vocabulary, the log; the first moment when something is written."""
        import torch

        from meshwright import tokenizers
        from meshwright.checkpoint import native, store
        from meshwright.metrics import Metrics

        c, seq = self.config, self.config.data.seq_length
        assert seq
        kept = store.split_path(c.checkpoint.load)[0] / "tokenizer" if c.checkpoint.load else None
        if self.loaded is not None and kept and tokenizer and not tokenizers.is_same(tokenizer, kept):
            raise UserError(
                f"the vocabulary's files are not those in {kept}, which this checkpoint was trained with: the same ids "
                "would mean other text. Leave the vocabulary flags out to take the run's own",
                BAD_DATA,
            )
        if c.checkpoint.save and not self.is_done and not c.training.skip_train:
            store.check_writable(c.checkpoint.save, native.bytes_of(self.state_to_save(), self.team), self.team)

        def prepare() -> None:
            if c.checkpoint.save and c.checkpoint.save_overwrite and store.held(c.checkpoint.save):
                print(f"moved earlier checkpoints to {store.move_aside(c.checkpoint.save)}")
            if folder is not None:
                keep_settings(folder, c, tokenizer)

        self.team.lead(prepare)
        flops = counts.flops_per_token(c.model, self.padded, seq, c.training.recompute)
        # What all ranks would save holds each number once.
        own = self.params.named_state(False, to_save=True)
        parameters = sum(self.team.gather(sum(x.numel() for _, _, x in own.values())))
        p = self.progress
        self.metrics = Metrics(
            folder if self.team.leads else None, c, flops, self.device, self.timers, p.iteration, p.consumed_train_samples,
            self.team,
        )  # fmt: skip
        self.metrics.row(
            "start", self.progress.iteration, time=time.time(), command=command, version=our_version(),
            torch=torch.__version__, python=platform.python_version(), device=devices.name(self.device),
            host=platform.node(), parameters=parameters, block=self.net.why, dtype=c.precision.dtype,
            tokens_per_step=c.global_batch * seq, train_iters=c.steps,
        )  # fmt: skip

    def batches(
        self, dataset: Dataset, consumed: int, batch: Callable[[int], int], wrap: bool = False
    ) -> Generator[list[Batch], None, None]:
        """Endless: the micro-batches of one step after the other, from this sample on."""
        from meshwright.data.loader import Loader

        at, micro, length = self.layout.at, self.config.micro_batch, self.config.data.seq_length
        assert length
        columns = length // self.layout.cp
        mine = None if self.layout.cp == 1 else slice(at("cp") * columns, (at("cp") + 1) * columns)
        return iter(Loader(
            dataset, micro, batch, consumed, self.config.data.num_workers, self.vocab, self.marks,
            at("replicas", "shard"), self.layout.dp, wrap, self.device, mine,
        ))  # fmt: skip

    @property
    def is_done(self) -> bool:
        c, p = self.config, self.progress
        if c.samples is None:
            return p.iteration >= c.steps
        return p.consumed_train_samples + c.batch(p.consumed_train_samples) > c.samples

    def train(self, ending: Ending) -> str:
        """All steps that are left, unless something ends them early; returns what ended them."""
        from meshwright.metrics import profiler, say, tell_time

        t, c, p = self.config.training, self.config.checkpoint, self.progress
        if t.skip_train:
            say("skipping training (--skip-train) ...")
            return ALL_DONE
        say("training ...")
        tell_time("before the start of training step")
        if self.is_done:
            say(f" > nothing is left to train: step {p.iteration} of {self.config.steps} is done")
        if c.save and c.save_at_start and not p.iteration:
            self.save()
        with contextlib.ExitStack() as held:
            profile = held.enter_context(profiler(self.config.logging, self.metrics.folder, self.device))
            gc.freeze()  # what was built so far stays: the collector need not look at it again and again
            held.callback(gc.unfreeze)
            batches, self.last = None, time.perf_counter()
            while not self.is_done:
                early = self.asked_to_end(ending) or self.exit_interval()
                if early:
                    if not ending.signal:
                        say(f"exiting program at iteration {p.iteration}: {early}")
                    return early
                if self.pass_over():
                    batches = None
                    continue
                if batches is None:
                    data = self.data["train"]
                    assert data is not None
                    batches = self.batches(data, p.consumed_train_samples, self.config.batch)
                    held.callback(batches.close)
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
        tell_time("after training is done")
        return ALL_DONE

    def asked_to_end(self, ending: Ending) -> str | None:
        """What any rank was asked to end for; asked about only when the last step's sums say that one was."""
        if not self.ends:
            return None
        told = self.team.gather([ending.reason(), ending.signal])
        for _, signal in told:
            if signal is not None and ending.signal is None:
                ending.take(signal)
        self.ends = self.team.size == 1
        return next((reason for reason, _ in told if reason), None)

    def step(self, batches: Iterator[list[Batch]], ending: Ending) -> None:
        """One update and what follows from its loss: counters, loss scale, log."""
        import torch

        from meshwright.network import train_step

        t, p, g = self.config.training, self.progress, self.config.logging
        lr, wd = self.schedule.lr(p.schedule_samples), self.schedule.wd(p.schedule_samples)
        size, scale = self.config.batch(p.consumed_train_samples), self.scaler.scale
        with self.timers.time("batch-generator", 2):
            micro = next(batches)
        stop = self.team.size > 1 and ending.reason() is not None
        update = train_step(self.net, micro, t.seed, lr, wd, scale, t.loss_mean, stop, self.timers.time)
        asked = {"num_zeros": g.log_num_zeros_in_grad, "params_norm": g.log_params_norm}
        more = [f() for f, on in zip((self.params.zeros, self.params.norm), asked.values(), strict=True) if on]
        told = torch.stack([x.double() for x in (*update, *more)])
        loss, norm, ends, *values = told.tolist()  # the one wait for the device
        self.ends = self.team.size == 1 or ends > 0

        skipped = not (math.isfinite(loss) and math.isfinite(norm))  # then the store left everything as it was
        if self.schedule.wd_style != "constant":
            asked |= {"weight_decay": True}
            values.append(wd)
        overflow = skipped and math.isfinite(loss) and self.config.precision.fp16
        self.scaler.update(skipped)
        harmless = overflow and self.scaler.may_overflow(scale)
        p.iteration += 1
        p.consumed_train_samples += size
        p.schedule_samples += 0 if skipped else size
        p.nonfinite_in_a_row = p.nonfinite_in_a_row + 1 if skipped and not harmless else 0
        now = time.perf_counter()
        self.metrics.step(
            p.iteration, p.consumed_train_samples, now - self.last, self.schedule.lr(p.schedule_samples),
            batch=size, loss=loss, grad_norm=norm, lr=lr, loss_scale=scale, skipped=skipped,
            **dict(zip((n for n, on in asked.items() if on), values, strict=True)),
        )  # fmt: skip
        self.last = now
        if p.nonfinite_in_a_row > (allowed_in_a_row(t.on_nonfinite) or 0):
            self.metrics.row("end", p.iteration, reason="not finite", status=NON_FINITE, time=time.time())
            raise UserError(not_finite(p, loss, norm, scale, self.config), NON_FINITE, everywhere=True)

    def exit_interval(self) -> str | None:
        """Only after a step of this attempt: a resumed run must not leave at once where the last one left."""
        every, i = self.config.training.exit_interval, self.progress.iteration
        return f"--exit-interval {every}" if every and i % every == 0 and i != (self.loaded or 0) else None

    def pass_over(self) -> bool:
        """Count the iterations of a --skip-train-iteration-range and their samples without training on them."""
        from meshwright.metrics import say

        p = self.progress
        for first, last in skipped(self.config.data.skip_train_iteration_range):
            if first <= p.iteration + 1 <= last:
                begin = p.consumed_train_samples
                while p.iteration < last and not self.is_done:
                    p.iteration += 1
                    p.consumed_train_samples += self.config.batch(p.consumed_train_samples)
                say(f"Skipped iterations {first} to {p.iteration} due to --skip-train-iteration-range flag.")
                self.metrics.row("skip", p.iteration, first=first, from_sample=begin, to=p.consumed_train_samples)
                self.skips.append([begin, f"passed over to {p.consumed_train_samples}"])
                return True
        return False

    def validate(self, name: str, prefix: str, ahead: int, ending: Ending) -> float:
        """Each validation reads the samples after the one before; which ones is a function of the iteration. NaN: none."""
        t, dataset, size = self.config.training, self.data.get(name), self.config.global_batch
        if dataset is None or not t.eval_iters or (ending.signal and self.team.size == 1):
            return math.nan
        from meshwright.network import evaluate

        before = self.progress.iteration // t.eval_interval + ahead if name == "valid" else 0
        batches = self.batches(dataset, before * t.eval_iters * size, lambda consumed: size, wrap=True)
        with contextlib.closing(batches):
            cut = (lambda: ending.signal is not None) if self.team.size == 1 else (lambda: False)
            loss = evaluate(self.net, itertools.islice(batches, t.eval_iters), cut)
        if ending.signal and self.team.size == 1:  # a grace of seconds may be running: saving comes first
            return math.nan
        p = self.progress
        shown = "test" if name == "test" else "validation"
        self.metrics.validation(p.iteration, p.consumed_train_samples, shown, prefix, loss)
        if not math.isfinite(loss) and allowed_in_a_row(t.on_nonfinite) == 0:
            self.metrics.row("end", p.iteration, reason="not finite", status=NON_FINITE, time=time.time())
            raise UserError(
                f"iteration {p.iteration}: the loss on the {name} set is {loss}, so this step is not saved; the weights are "
                f"finite but of no use. A lower --lr (now {self.config.optimizer.lr}) or a longer warm-up usually helps",
                NON_FINITE,
                everywhere=True,
            )
        return loss

    def state_to_save(self) -> Any:
        return self.params.named_state(not self.config.checkpoint.no_save_optim, to_save=True)

    def save(self) -> None:
        from meshwright.checkpoint import native, store
        from meshwright.metrics import say

        c, p, start = self.config.checkpoint, self.progress, time.perf_counter()
        folder = c.save
        assert folder
        state = dataclasses.asdict(p) | {
            "schedule": dataclasses.asdict(self.schedule), "loss_scale": self.scaler.state(), "skips": self.skips,
            "optimizer_steps": self.params.steps, "true_vocab_size": self.vocab, "padded_vocab_size": self.padded,
            "positions": self.positions, "network": self.net.name,
        }  # fmt: skip
        root, _ = store.split_path(c.load or folder)
        again = p.iteration == self.loaded and root.resolve() == Path(folder).resolve()
        if again and native.as_json(native.read_state(root, p.iteration)) != native.as_json(state):
            say(f" > nothing was trained since step {self.loaded} was saved: it stays as it is")
            return
        self.metrics.sync()
        tensors, settings = self.state_to_save(), saved_settings(self.config)
        if native.save(folder, p.iteration, tensors, state, settings, say=say, team=self.team):
            self.metrics.row("save", p.iteration, seconds=round(time.perf_counter() - start, 3))

        def tidy() -> None:
            if c.keep_best and p.best_iteration in store.steps(folder):  # at each save: a kill may have come between
                store.write_tracker(folder, p.best_iteration, store.BEST)
            if c.keep_last:
                for step in store.prune(folder, c.keep_last, c.keep_every, p.best_iteration if c.keep_best else None):
                    say(f" > removed step {step}: --keep-last {c.keep_last}")

        self.team.lead(tidy)


def introduce(config: TrainConfig, folder: Path | None) -> tuple[Tokenizer | None, int, int]:
    """Who we are; returns the tokenizer, if there is one, the true and the padded vocabulary size."""
    from meshwright import precision
    from meshwright.metrics import say, tell_arguments

    t = config.training
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    say(
        f"using world size: {config.world}, data-parallel-size: {config.dp}, tensor-model-parallel size: {tp}, "
        f"pipeline-model-parallel size: {pp} "
    )
    say(f"using {precision.dtype(config.precision)} for parameters ...")
    tell_arguments(flags.to_dict(config) | {"rank": 0, "data_parallel_size": config.dp})
    if not t.global_batch_size:
        say(f"setting global batch size to {config.global_batch}")
    if t.rampup_batch_size:
        start, increment, samples = t.rampup_batch_size
        say(
            f"will use batch size rampup starting from global batch size {start} to global batch size "
            f"{config.global_batch} with batch size increments {increment} over {samples} samples."
        )
    elif t.micro_batch_size != "auto":
        say(f"setting number of micro-batches to constant {config.micro_batches(config.global_batch)}")
    tokenizer, vocab, padded = vocabulary(config, folder, say)
    say("> initializing torch distributed ...")
    say(f"> initialized tensor model parallel with size {tp}")
    say(f"> initialized pipeline model parallel with size {pp}")
    say(f"> setting random seeds to {t.seed} ...")
    return tokenizer, vocab, padded


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
        f"was not applied{kept}. A lower --lr (now {config.optimizer.lr}), a longer warm-up or --bf16 usually helps"
    )


def keep_settings(folder: Path, config: TrainConfig, tokenizer: Tokenizer | None) -> None:
    """config.toml, which runs this again, and the vocabulary, so that generate needs no flags."""
    from meshwright import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "config.toml.new"
    new.write_text(flags.to_toml(as_started_anywhere(config)), encoding="utf-8")
    os.replace(new, folder / "config.toml")
    if tokenizer is not None:
        tokenizers.save(tokenizer, folder / "tokenizer")


def as_started_anywhere(config: TrainConfig) -> TrainConfig:
    """Without the number of ranks, which the next launcher decides."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, world_size=None))


def write_report(folder: Path) -> None:
    """The page with pictures; a run is not spoilt by a picture that failed."""
    from meshwright import report

    try:
        report.write(folder)
    except Exception as e:
        print(f"note: no report.html: {e}", file=sys.stderr)
