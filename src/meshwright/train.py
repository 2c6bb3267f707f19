"""Pre-train a GPT: `meshwright train`, `pretrain_gpt.py`, or `run(config)` from Python.

Read `run` for the order of things and `train_step` for one batch: data/loader.py reads it from disk, train_step runs it
through the model, parallel/zero.py turns its gradients into new weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from meshwright import flags
from meshwright.config import TrainConfig
from meshwright.errors import BAD_DATA, DONE, NON_FINITE, SIGINT, SIGTERM, UserError
from meshwright.model import counts
from meshwright.preflight import (
    be_deterministic,
    differences,
    dry_run,
    guard_existing,
    pick_device,
    refuse_other_ranks,
    require_files,
    require_memory,
    saved_settings,
    vocabulary,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from meshwright.data.loader import Batch, Dataset
    from meshwright.metrics import Timers
    from meshwright.model.gpt import GPT
    from meshwright.parallel.zero import ParameterStore
    from meshwright.tokenizers import Tokenizer


def main(argv: list[str]) -> int:
    dry = "--dry-run" in argv
    parsed = flags.parse(
        TrainConfig,
        argv,
        "meshwright train",
        check=not dry,
        about="Pre-train a GPT. Without --save nothing is written.",
    )
    if parsed.print_config:
        print(flags.to_toml(parsed.config, parsed.sources))
        return DONE
    flags.tell(parsed)
    if dry:
        return dry_run(parsed.config)
    return run(parsed.config, command=["meshwright", "train", *argv])


@dataclasses.dataclass
class Progress:
    """The counters of a run; with the weights and moments they are its whole state, for randomness needs none."""

    iteration: int = 0  # every attempt, skipped ones too
    consumed_train_samples: int = 0  # likewise
    schedule_samples: int = 0  # of successful steps: what the schedule sees


def run(config: TrainConfig, command: list[str] | None = None) -> int:
    """Train as configured and return the exit status; raise UserError for what the user can mend."""
    began = time.perf_counter()
    from meshwright.checkpoint import store
    from meshwright.metrics import Timers, say, tell_time

    problems = config.problems()
    if problems:
        raise UserError(flags.listed(problems))
    c = config.checkpoint
    refuse_other_ranks()
    require_files(config)
    device = pick_device(config)
    if config.precision.deterministic_mode:
        be_deterministic()
    where = c.run_dir or c.save
    folder = Path(where) if where else None

    with contextlib.ExitStack() as held:
        for flag, root in {
            Path(p).resolve(): (n, p) for n, p in (("--run-dir", c.run_dir), ("--save", c.save)) if p
        }.values():
            if Path(root).exists() and not Path(root).is_dir():
                raise UserError(f"{flag} {root} is a file, not a folder")
            held.enter_context(store.lock(root))
        if c.save:
            guard_existing(config)
        # What follows is said in the order and the words of Megatron's log, which people's scripts read.
        timers = Timers()
        tokenizer, vocab, padded = introduce(config, folder)
        say(f"time to initialize megatron (seconds): {time.perf_counter() - began:.3f}")
        tell_time("after megatron is initialized")

        timers.start("model-and-optimizer-setup")
        trainer = Trainer(config, device, vocab, padded)
        trainer.load_or_initialise(timers)
        timers.stop("model-and-optimizer-setup")
        tell_time("after model, optimizer, and learning rate scheduler are built")

        timers.start("train/valid/test-data-iterators-setup")
        trainer.open_data()
        timers.stop("train/valid/test-data-iterators-setup")
        tell_time("after dataloaders are built")
        say("done with setup ...")
        timers.tell("model-and-optimizer-setup", "train/valid/test-data-iterators-setup")

        trainer.open_folder(folder, tokenizer, command or [])
        held.callback(trainer.metrics.close)
        say("training ...")
        tell_time("before the start of training step")
        with catch_signals(config.training.exit_signal_handler) as asked:
            reason = trainer.train(asked)
            if reason == ALL_DONE:
                tell_time("after training is done")
                trainer.validate("valid", "the end of training for val data", 0, asked)
            if c.save and trainer.progress.iteration:
                trainer.save()
            if reason == ALL_DONE:
                trainer.validate("test", "the end of training for test data", 0, asked)
        status = DONE
        if asked:
            say(f"exiting program after receiving {asked[0].name}.")
            reason, status = asked[0].name, SIGINT if asked[0] is signal.SIGINT else SIGTERM
        trainer.metrics.row("end", trainer.progress.iteration, reason=reason, status=status, time=time.time())
        if folder is not None:
            write_report(folder)
        return status


ALL_DONE = "all iterations done"


class Trainer:
    """The parts of a run, and what is done with them: load, train, validate, save."""

    def __init__(self, config: TrainConfig, device: torch.device, vocab: int, padded: int) -> None:
        import torch

        from meshwright import lr_schedule, precision
        from meshwright.kernels.pick import pick
        from meshwright.metrics import say
        from meshwright.model.gpt import GPT
        from meshwright.parallel.zero import ParameterStore

        assert config.data.seq_length
        self.config, self.device, self.vocab, self.padded = config, device, vocab, padded
        self.positions = config.model.max_position_embeddings or config.data.seq_length
        say("building GPT model ...")
        block, self.why = pick(config.model, device)
        parameters = counts.parameters(config.model, padded, self.positions)
        require_memory(config, parameters, padded, device)
        with torch.device("meta"):
            self.model = GPT(config.model, vocab, padded, self.positions, block, config.training.recompute)
        say(f" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {parameters}")
        say(f" > running the {self.why}")
        self.params = ParameterStore(self.model, config.optimizer, precision.dtype(config.precision), device)
        self.scaler = precision.LossScale(config.precision)
        self.schedule = lr_schedule.from_config(config)
        say(f"> learning rate decay style: {self.schedule.style}")
        self.progress = Progress()
        self.loaded: int | None = None  # the step this run continues from

    def load_or_initialise(self, timers: Timers) -> None:
        from meshwright.checkpoint import native, store
        from meshwright.metrics import say
        from meshwright.model.gpt import initialise

        c = self.config.checkpoint
        loaded = None
        if c.load:
            timers.start("load-checkpoint")
            root, step = store.split_path(c.load)
            named = self.params.named_state()
            loaded = native.load(root, named, verify=c.verify, say=say, accept=self.accept, step=step)
            timers.stop("load-checkpoint")
            timers.tell("load-checkpoint")
            if loaded is None and c.exit_on_missing_checkpoint:
                raise UserError(
                    f"--load {c.load}: no checkpoint there, and --exit-on-missing-checkpoint is set", BAD_DATA
                )
            self.loaded = loaded.step if loaded else None
        if loaded is None:
            initialise(self.params.masters(), self.config.model, self.vocab, self.config.training.seed)
        self.params.publish_weights()

    def accept(self, state: dict[str, Any], saved: dict[str, Any]) -> None:
        """Take over a checkpoint's counters before its tensors are read, or refuse it."""
        from meshwright import lr_schedule
        from meshwright.metrics import say

        for line in differences(self.config, saved):
            say(line)
        self.schedule, lines = lr_schedule.resume(self.schedule, state["schedule"], self.config)
        for line in lines:
            say(line)
        self.progress = Progress(**{f.name: state[f.name] for f in dataclasses.fields(Progress)})
        self.scaler.load(state["loss_scale"])
        self.params.steps = state["optimizer_steps"]

    def open_data(self) -> None:
        from meshwright.data.datasets import build_datasets
        from meshwright.metrics import say

        self.data = build_datasets(self.config, self.vocab, say)
        if self.data["train"] is None and self.progress.iteration < (self.config.training.train_iters or 0):
            raise UserError(f"--split {self.config.data.split!r} leaves no document for training", BAD_DATA)

    def open_folder(self, folder: Path | None, tokenizer: Tokenizer | None, command: list[str]) -> None:
        """The settings, the vocabulary, the log; the first moment when something is written."""
        import torch

        from meshwright import tokenizers
        from meshwright.checkpoint import native, store
        from meshwright.metrics import Metrics

        c, t, seq = self.config, self.config.training, self.config.data.seq_length
        assert t.train_iters is not None and seq
        kept = store.split_path(c.checkpoint.load)[0] / "tokenizer" if c.checkpoint.load else None
        if self.loaded is not None and kept and tokenizer and not tokenizers.is_same(tokenizer, kept):
            raise UserError(
                f"the vocabulary's files are not those in {kept}, which this checkpoint was trained with: the same ids "
                "would mean other text. Leave the vocabulary flags out to take the run's own",
                BAD_DATA,
            )
        if c.checkpoint.save and self.progress.iteration < t.train_iters:
            store.check_writable(c.checkpoint.save, native.bytes_of(self.params.named_state()))
        if c.checkpoint.save and c.checkpoint.save_overwrite and store.held(c.checkpoint.save):
            print(f"moved earlier checkpoints to {store.move_aside(c.checkpoint.save)}")
        if folder is not None:
            keep_settings(folder, c, tokenizer)
        flops = counts.flops_per_token(c.model, self.padded, seq, t.recompute)
        interval, bar = c.logging.log_interval, c.logging.progress
        self.metrics = Metrics(folder, t.train_iters, c.global_batch, seq, flops, self.device, interval, bar)
        self.metrics.row(
            "start", self.progress.iteration, time=time.time(), command=command, version=_version(),
            torch=torch.__version__, python=platform.python_version(), device=_device_name(self.device),
            host=platform.node(), parameters=counts.parameters(c.model, self.vocab, self.positions), block=self.why,
            dtype=c.precision.dtype, tokens_per_step=c.global_batch * seq, train_iters=t.train_iters,
        )  # fmt: skip

    def steps(self, dataset: Dataset, consumed: int, wrap: bool = False) -> Generator[list[Batch], None, None]:
        """Endless: the micro-batches of one step after the other, from this sample on."""
        from meshwright.data.loader import Loader

        assert self.config.training.micro_batch_size
        workers, pin = self.config.data.num_workers, self.device.type == "cuda"
        batch, number = self.config.training.micro_batch_size, self.config.micro_batches
        return iter(Loader(dataset, batch, number, consumed, workers, self.vocab, wrap=wrap, pin=pin))

    def train(self, asked: list[signal.Signals]) -> str:
        """All steps that are left, unless something ends them early; returns what ended them."""
        import torch

        from meshwright.metrics import say

        t, c, p = self.config.training, self.config.checkpoint, self.progress
        assert t.train_iters is not None
        if p.iteration >= t.train_iters:
            say(f" > nothing is left to train: step {p.iteration} of {t.train_iters} is done")
            return ALL_DONE
        assert self.data["train"] is not None
        with contextlib.closing(self.steps(self.data["train"], p.consumed_train_samples)) as batches:
            last = time.perf_counter()
            while p.iteration < t.train_iters:
                lr, wd = self.schedule.lr(p.schedule_samples), self.schedule.wd(p.schedule_samples)
                scale = self.scaler.scale
                update = train_step(
                    self.model, self.params, next(batches), t.seed, lr, wd, scale, t.loss_mean, self.device
                )
                loss, norm = torch.stack(update).tolist()  # the one wait for the device

                skipped = not (math.isfinite(loss) and math.isfinite(norm))  # then the store left everything as it was
                overflow = skipped and math.isfinite(loss) and self.config.precision.fp16
                p.iteration += 1
                p.consumed_train_samples += self.config.global_batch
                p.schedule_samples += 0 if skipped else self.config.global_batch
                self.scaler.update(overflow)
                now = time.perf_counter()
                next_lr = self.schedule.lr(p.schedule_samples)
                self.metrics.step(
                    p.iteration, p.consumed_train_samples, loss, norm, lr, next_lr, scale, skipped, now - last
                )
                if skipped and not (overflow and self.scaler.may_overflow(scale)):
                    self.metrics.row("end", p.iteration, reason="not finite", status=NON_FINITE, time=time.time())
                    raise UserError(not_finite(p, loss, norm, scale, self.config), NON_FINITE)

                pause = time.perf_counter()
                if p.iteration % t.eval_interval == 0:
                    self.validate("valid", f"iteration {p.iteration}", -1, asked)
                if c.save and c.save_interval and p.iteration % c.save_interval == 0:
                    self.save()
                last = now + time.perf_counter() - pause  # neither counts as time of a step
                if asked:
                    return asked[0].name
                if t.exit_interval and p.iteration % t.exit_interval == 0:
                    say(f"exiting program at iteration {p.iteration}")
                    return f"--exit-interval {t.exit_interval}"
        return ALL_DONE

    def validate(self, name: str, prefix: str, ahead: int, asked: list[signal.Signals]) -> None:
        """Each validation reads the samples after the one before; which ones is a function of the iteration."""
        t, dataset = self.config.training, self.data[name]
        if dataset is None or not t.eval_iters or asked:
            return
        before = self.progress.iteration // t.eval_interval + ahead if name == "valid" else 0
        with contextlib.closing(
            self.steps(dataset, before * t.eval_iters * self.config.global_batch, wrap=True)
        ) as steps:
            loss = evaluate(self.model, steps, t.eval_iters, self.device, asked)
        if asked:  # a grace of seconds may be running: saving comes first
            return
        self.metrics.validation(self.progress.iteration, "test" if name == "test" else "validation", prefix, loss)

    def save(self) -> None:
        from meshwright.checkpoint import native, store
        from meshwright.metrics import say

        folder, start = self.config.checkpoint.save, time.perf_counter()
        assert folder
        state = dataclasses.asdict(self.progress) | {
            "schedule": dataclasses.asdict(self.schedule), "loss_scale": self.scaler.state(), "skips": [],
            "optimizer_steps": self.params.steps, "true_vocab_size": self.vocab, "padded_vocab_size": self.padded,
            "positions": self.positions,
        }  # fmt: skip
        named, settings = self.params.named_state(), saved_settings(self.config)
        root, _ = store.split_path(self.config.checkpoint.load or folder)
        again = self.progress.iteration == self.loaded and root.resolve() == Path(folder).resolve()
        if again and native.as_json(native.read_state(root, self.progress.iteration)) != native.as_json(state):
            say(f" > nothing was trained since step {self.loaded} was saved: it stays as it is")
            return
        self.metrics.sync()
        if native.save(folder, self.progress.iteration, named, state, settings, say=say):
            self.metrics.row("save", self.progress.iteration, seconds=round(time.perf_counter() - start, 3))


def introduce(config: TrainConfig, folder: Path | None) -> tuple[Tokenizer | None, int, int]:
    """Who we are; returns the tokenizer, if there is one, the true and the padded vocabulary size."""
    from meshwright import precision
    from meshwright.metrics import say, tell_arguments

    t = config.training
    say("using world size: 1, data-parallel-size: 1, tensor-model-parallel size: 1, pipeline-model-parallel size: 1 ")
    say(f"using {precision.dtype(config.precision)} for parameters ...")
    tell_arguments(flags.to_dict(config) | {"world_size": 1, "rank": 0, "data_parallel_size": 1})
    if not t.global_batch_size:
        say(f"setting global batch size to {config.global_batch}")
    say(f"setting number of micro-batches to constant {config.micro_batches}")
    tokenizer, vocab, padded = vocabulary(config, folder, say)
    say("> initializing torch distributed ...")
    say("> initialized tensor model parallel with size 1")
    say("> initialized pipeline model parallel with size 1")
    say(f"> setting random seeds to {t.seed} ...")
    return tokenizer, vocab, padded


def train_step(
    model: GPT, params: ParameterStore, batches: list[Batch], seed: int, lr: float, weight_decay: float, scale: float,
    loss_mean: str, device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One update from the micro-batches of one global batch; returns its loss and its unclipped gradient norm.

    The loss of every token weighs the same, wherever the masks lie: sums are divided by the unmasked tokens of the whole
    batch, counted beforehand. `microbatch` weighs every micro-batch the same instead.
    """
    import torch

    from meshwright.model.attention import Where
    from meshwright.model.loss import loss_sum

    model.train()
    params.clear_gradients()
    unmasked = [b.labels.numel() if b.loss_mask is None else int(b.loss_mask.sum()) for b in batches]
    total = torch.zeros((), dtype=torch.float64 if params.full is torch.float64 else torch.float32, device=device)
    for batch, mine in zip(batches, unmasked, strict=True):
        where = Where(None, None, seed, int(batch.sample_ids[0]))
        assert batch.doc_ids is None, "document masks are not built yet"
        b = batch.to(device)
        where.samples = b.sample_ids
        logits = model(b.tokens, where, b.position_ids)  # [B, T, padded vocabulary]
        weight = max(sum(unmasked), 1) if loss_mean == "global" else max(mine, 1) * len(batches)
        loss = loss_sum(logits, b.labels, b.loss_mask) / weight
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total, params.step(lr, weight_decay, scale, total)


def evaluate(
    model: GPT, batches: Iterator[list[Batch]], steps: int, device: torch.device, asked: list[signal.Signals]
) -> float:
    """Mean loss of the unmasked tokens of `steps` global batches, without dropout; given up when asked to stop."""
    import torch

    from meshwright.model.attention import Where
    from meshwright.model.loss import loss_sum

    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for _, micro in zip(range(steps), batches, strict=False):
            if asked:
                break
            for batch in micro:
                b = batch.to(device)
                total += float(loss_sum(model(b.tokens, Where(), b.position_ids), b.labels, b.loss_mask))
                tokens += b.labels.numel() if b.loss_mask is None else int(b.loss_mask.sum())
    return total / max(tokens, 1)


def not_finite(progress: Progress, loss: float, norm: float, scale: float, config: TrainConfig) -> str:
    """What to do about a NaN."""
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
    kept = (
        f"; the weights and the checkpoints in {config.checkpoint.save} are as before it"
        if config.checkpoint.save
        else ""
    )
    hint = f" at the least loss scale {scale}" if config.precision.fp16 else ""
    return (
        f"iteration {progress.iteration} (samples up to {progress.consumed_train_samples}): {what}{hint}, so this step "
        f"was not applied{kept}. A lower --lr (now {config.optimizer.lr}), a longer warm-up or --bf16 usually helps"
    )


@contextlib.contextmanager
def catch_signals(on: bool) -> Iterator[list[signal.Signals]]:
    """A list that gets the first SIGTERM or SIGINT; the second one ends the process at once."""
    asked: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            os._exit(SIGINT if number == signal.SIGINT else SIGTERM)
        asked.append(signal.Signals(number))
        with contextlib.suppress(OSError):  # not print: it may be what was interrupted
            os.write(2, f"{asked[0].name}: finishing this step and saving; once more to stop at once\n".encode())

    if not on:
        yield asked
        return
    before = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keep_settings(folder: Path, config: TrainConfig, tokenizer: Tokenizer | None) -> None:
    """config.toml, which runs this again, and the vocabulary, so that generate needs no flags."""
    from meshwright import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "config.toml.new"
    new.write_text(flags.to_toml(config), encoding="utf-8")
    os.replace(new, folder / "config.toml")
    if tokenizer is not None:
        tokenizers.save(tokenizer, folder / "tokenizer")


def write_report(folder: Path) -> None:
    """The page with pictures; a run is not spoilt by a picture that failed."""
    from meshwright import report

    try:
        report.write(folder)
    except Exception as e:
        print(f"note: no report.html: {e}", file=sys.stderr)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("meshwright")
    except PackageNotFoundError:
        return "uninstalled"


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
