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
from meshwright.errors import BAD_DATA, DONE, LOCKED, NON_FINITE, SIGINT, SIGTERM, USAGE, UserError
from meshwright.model import counts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from meshwright.data.loader import Batch
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
    if dry:
        return dry_run(parsed.config)
    flags.tell(parsed)
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
    import torch

    from meshwright.checkpoint import native, store
    from meshwright.data.datasets import build_datasets
    from meshwright.data.loader import Loader
    from meshwright.kernels.pick import pick
    from meshwright.lr_schedule import from_config, resume
    from meshwright.metrics import Metrics, Timers, say, tell_arguments, tell_time
    from meshwright.model.gpt import GPT, initialise
    from meshwright.parallel.zero import ParameterStore
    from meshwright.precision import LossScale, dtype

    problems = config.problems()
    if problems:
        raise UserError("\n  ".join(["", *problems]))
    c, t = config.checkpoint, config.training
    assert t.train_iters is not None and t.micro_batch_size and config.data.seq_length
    refuse_other_ranks()
    device = pick_device(config)
    if config.precision.deterministic_mode:
        be_deterministic()
    where = c.run_dir or c.save
    folder = Path(where) if where else None

    with contextlib.ExitStack() as held:
        for root in {Path(p).resolve(): p for p in (c.save, c.run_dir) if p}.values():
            held.enter_context(store.lock(root))
        if c.save:
            guard_existing(config)

        # Who we are, in the order and the words of Megatron's log.
        timers = Timers()
        say(
            "using world size: 1, data-parallel-size: 1, tensor-model-parallel size: 1, pipeline-model-parallel size: 1 "
        )
        say(f"using {dtype(config.precision)} for parameters ...")
        tell_arguments(flags.to_dict(config) | {"world_size": 1, "rank": 0, "data_parallel_size": 1})
        if not t.global_batch_size:
            say(f"setting global batch size to {config.global_batch}")
        say(f"setting number of micro-batches to constant {config.micro_batches}")
        tokenizer, vocab, padded = vocabulary(config, folder)
        say("> initializing torch distributed ...")
        say("> initialized tensor model parallel with size 1")
        say("> initialized pipeline model parallel with size 1")
        say(f"> setting random seeds to {t.seed} ...")
        say(f"time to initialize megatron (seconds): {time.perf_counter() - began:.3f}")
        tell_time("after megatron is initialized")

        # The model, its memory, and where it left off.
        timers.start("model-and-optimizer-setup")
        say("building GPT model ...")
        positions = config.model.max_position_embeddings or config.data.seq_length
        block, why = pick(config.model, device)
        with torch.device("meta"):
            model = GPT(config.model, vocab, padded, positions, block, t.recompute)
        parameters = counts.parameters(config.model, padded, positions)
        say(f" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {parameters}")
        say(f" > running the {why}")
        params = ParameterStore(model, config.optimizer, dtype(config.precision), device)
        schedule, scaler, progress = from_config(config), LossScale(config.precision), Progress()
        say(f"> learning rate decay style: {schedule.style}")

        def accept(state: dict[str, Any], saved: dict[str, Any]) -> None:
            nonlocal schedule, progress
            for line in differences(config, saved):
                say(line)
            schedule, lines = resume(schedule, state["schedule"], config)
            for line in lines:
                say(line)
            progress = Progress(**{f.name: state[f.name] for f in dataclasses.fields(Progress)})
            scaler.load(state["loss_scale"])
            params.steps = state["optimizer_steps"]

        timers.start("load-checkpoint")
        loaded = None
        if c.load:
            loaded = native.load(c.load, params.named_state(), verify=c.verify, say=say, accept=accept)
            if loaded is None and c.exit_on_missing_checkpoint:
                raise UserError(
                    f"--load {c.load}: no checkpoint there, and --exit-on-missing-checkpoint is set", BAD_DATA
                )
        if loaded is None:
            initialise(params.masters(), config.model, vocab, t.seed)
        params.publish_weights()
        timers.stop("load-checkpoint")
        if c.load:
            timers.tell("load-checkpoint")
        timers.stop("model-and-optimizer-setup")
        tell_time("after model, optimizer, and learning rate scheduler are built")

        # The data.
        timers.start("train/valid/test-data-iterators-setup")
        data = build_datasets(config, vocab, say)
        timers.stop("train/valid/test-data-iterators-setup")
        tell_time("after dataloaders are built")
        say("done with setup ...")
        timers.tell("model-and-optimizer-setup", "train/valid/test-data-iterators-setup")
        if data["train"] is None and progress.iteration < t.train_iters:
            raise UserError(f"--split {config.data.split!r} leaves no document for training", BAD_DATA)

        # The folder: the settings, the vocabulary, the log.
        if c.save:
            store.check_writable(c.save, native.bytes_of(params.named_state()))
        if folder is not None:
            keep_settings(folder, config, tokenizer)
        flops = counts.flops_per_token(config.model, padded, config.data.seq_length, t.recompute)
        metrics = Metrics(
            folder, t.train_iters, config.global_batch, config.data.seq_length, flops, device,
            config.logging.log_interval, config.logging.progress,
        )  # fmt: skip
        held.callback(metrics.close)
        metrics.row(
            "start", progress.iteration, time=time.time(), command=command or [], version=_version(),
            torch=torch.__version__, python=platform.python_version(), device=_device_name(device), host=platform.node(),
            parameters=counts.parameters(config.model, vocab, positions), block=why, dtype=config.precision.dtype,
            tokens_per_step=config.global_batch * config.data.seq_length, train_iters=t.train_iters,
        )  # fmt: skip

        def save() -> None:
            assert c.save
            start = time.perf_counter()
            state = dataclasses.asdict(progress) | {
                "schedule": dataclasses.asdict(schedule), "loss_scale": scaler.state(), "optimizer_steps": params.steps,
                "true_vocab_size": vocab, "padded_vocab_size": padded, "positions": positions, "skips": [],
            }  # fmt: skip
            if native.save(c.save, progress.iteration, params.named_state(), state, flags.to_dict(config), say=say):
                metrics.row("save", progress.iteration, seconds=round(time.perf_counter() - start, 3))

        def validate(name: str, first: int, prefix: str) -> None:
            dataset = data[name]
            if dataset is not None and t.eval_iters:
                with contextlib.closing(steps(dataset, first, wrap=True)) as batches:
                    loss = evaluate(model, batches, t.eval_iters, device)
                metrics.validation(progress.iteration, "test" if name == "test" else "validation", prefix, loss)

        def steps(dataset: Any, consumed: int, wrap: bool = False) -> Generator[list[Batch], None, None]:
            assert t.micro_batch_size
            workers, pin = config.data.num_workers, device.type == "cuda"
            return iter(
                Loader(dataset, t.micro_batch_size, config.micro_batches, consumed, workers, vocab, wrap=wrap, pin=pin)
            )

        say("training ...")
        tell_time("before the start of training step")
        reason, status = "all iterations done", DONE
        per_validation = t.eval_iters * config.global_batch
        with catch_signals(t.exit_signal_handler) as asked, contextlib.ExitStack() as reading:
            if progress.iteration < t.train_iters:
                batches = reading.enter_context(
                    contextlib.closing(steps(data["train"], progress.consumed_train_samples))
                )
            last = time.perf_counter()
            while progress.iteration < t.train_iters:
                lr, wd = schedule.lr(progress.schedule_samples), schedule.wd(progress.schedule_samples)
                scale, at_least = scaler.scale, config.precision.min_loss_scale
                loss, norm = train_step(model, params, next(batches), t.seed, lr, wd, scale, t.loss_mean, device)
                loss, norm = torch.stack((loss, norm)).tolist()  # the one wait for the device

                skipped = not math.isfinite(norm)  # the store left everything as it was
                progress.iteration += 1
                progress.consumed_train_samples += config.global_batch
                progress.schedule_samples += 0 if skipped else config.global_batch
                overflow = skipped and math.isfinite(loss) and config.precision.fp16
                scaler.update(overflow)
                now = time.perf_counter()
                metrics.step(
                    progress.iteration, progress.consumed_train_samples, loss, norm, lr,
                    schedule.lr(progress.schedule_samples), scale, skipped, now - last,
                )  # fmt: skip
                last = now
                if skipped and not (overflow and (not scaler.dynamic or scale > at_least)):
                    metrics.row("end", progress.iteration, reason="not finite", status=NON_FINITE)
                    raise UserError(not_finite(progress, loss, norm, scale, config), NON_FINITE)

                if progress.iteration % t.eval_interval == 0:
                    first = (progress.iteration // t.eval_interval - 1) * per_validation
                    validate("valid", first, f"iteration {progress.iteration}")
                    last = time.perf_counter()
                if c.save and c.save_interval and progress.iteration % c.save_interval == 0:
                    save()
                    last = time.perf_counter()
                if asked:
                    reason, status = f"{asked[0].name}", SIGINT if asked[0] is signal.SIGINT else SIGTERM
                    say(f"exiting program after receiving {asked[0].name}.")
                    break
                if t.exit_interval and progress.iteration % t.exit_interval == 0:
                    reason = f"--exit-interval {t.exit_interval}"
                    say(f"exiting program at iteration {progress.iteration}")
                    break
        left_early = reason != "all iterations done"
        if not left_early:
            tell_time("after training is done")
            first = progress.iteration // t.eval_interval * per_validation
            validate("valid", first, "the end of training for val data")
        if c.save and progress.iteration:
            save()
        if not left_early:
            validate("test", 0, "the end of training for test data")
        metrics.row("end", progress.iteration, reason=reason, status=status)
        if folder is not None:
            write_report(folder)
        return status


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
        b = batch.to(device)
        where.samples = b.sample_ids
        logits = model(b.tokens, where, b.position_ids)  # [B, T, padded vocabulary]
        weight = max(sum(unmasked), 1) if loss_mean == "global" else max(mine, 1) * len(batches)
        loss = loss_sum(logits, b.labels, b.loss_mask) / weight
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total, params.step(lr, weight_decay, scale)


def evaluate(model: GPT, batches: Iterator[list[Batch]], steps: int, device: torch.device) -> float:
    """Mean loss of the unmasked tokens of `steps` global batches, without dropout."""
    import torch

    from meshwright.model.attention import Where
    from meshwright.model.loss import loss_sum

    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for _, micro in zip(range(steps), batches, strict=False):
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
        print(f"{asked[0].name}: finishing this step and saving; once more to stop at once", file=sys.stderr)

    if not on:
        yield asked
        return
    before = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def refuse_other_ranks() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise UserError(
            f"started as {world} processes, but training on several devices is not yet there (planned for step 3): "
            "start one process, for example with --nproc_per_node 1"
        )


def pick_device(config: Any) -> torch.device:
    """--device, or a GPU if there is one."""
    import torch

    wanted = config.parallel.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU (nvidia-smi shows whether the driver does)")
    if wanted == "cpu" and "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun sets one thread per process when it starts several; one process may use the machine
        torch.set_num_threads(os.cpu_count() or 1)
    return torch.device(wanted)


def be_deterministic() -> None:
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def guard_existing(config: TrainConfig) -> None:
    """Starting anew onto a folder that holds checkpoints is refused before the first step, or moves them aside."""
    from meshwright.checkpoint import store

    c = config.checkpoint
    assert c.save
    existing = store.held(c.save)
    if not existing or c.load:
        return
    if not c.save_overwrite:
        raise UserError(
            f"--save {c.save} already holds {existing[-1]}: add --load {c.save} to continue it, or --save-overwrite to "
            "move it aside and start anew",
            LOCKED,
        )
    print(f"moved earlier checkpoints to {store.move_aside(c.save)}")


def vocabulary(config: TrainConfig, folder: Path | None) -> tuple[Tokenizer | None, int, int]:
    """The tokenizer if the flags name one, the true and the padded size."""
    from meshwright import tokenizers
    from meshwright.metrics import say

    t, m = config.tokenizer, config.model
    bare = t.vocab_size is not None and not (t.vocab_file or t.merge_file or t.tokenizer_model)
    kept = folder / "tokenizer" if folder is not None and (folder / "tokenizer").is_dir() else None
    if (
        bare
        and t.tokenizer_type != "ByteTokenizer"
        and (config.data.mock_data or t.tokenizer_type == "GPT2BPETokenizer")
    ):
        say(f"> no tokenizer: the vocabulary's size is given, {t.vocab_size}")
        tokenizer, vocab = None, t.vocab_size
    else:
        say(f"> building {t.tokenizer_type} tokenizer ...")
        tokenizer = tokenizers.build(t, kept)
        vocab = tokenizer.size
    assert vocab
    padded = tokenizers.padded_size(vocab, m.make_vocab_size_divisible_by, 1, m.pad_vocab_size_to)
    say(f" > padded vocab (size: {vocab}) with {padded - vocab} dummy tokens (new size: {padded})")
    return tokenizer, vocab, padded


# Settings that change what a continued run computes: told when they differ from the checkpoint's.
_WATCHED = ("seed", "data_path", "split", "split_arithmetic", "seq_length", "global_batch_size", "hidden_dropout",
            "attention_dropout", "fp16", "bf16", "params_dtype", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad",
            "train_iters", "eval_interval", "eval_iters", "loss_mean", "layernorm_epsilon", "bias_gelu_fusion",
            "num_attention_heads", "kv_channels")  # fmt: skip


def differences(config: TrainConfig, saved: dict[str, Any]) -> list[str]:
    """A line for each setting that is not what the checkpoint was trained with; the heads cannot be changed at all."""
    ours = flags.to_dict(config)
    out = []
    for name in _WATCHED:
        if name in saved and saved[name] != ours[name]:
            out.append(f" > note: {name} is {ours[name]}, the checkpoint was trained with {saved[name]}")
    heads = [n for n in ("num_attention_heads", "kv_channels") if n in saved and saved[n] != ours[n]]
    if heads:
        raise UserError(
            "the flags contradict the checkpoint: "
            + ", ".join(f"{n} {ours[n]} against {saved[n]}" for n in heads)
            + "; shapes alone would not show it, the model would only be wrong",
            BAD_DATA,
        )
    return out


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
    except (UserError, OSError, ImportError) as e:
        print(f"note: no report.html: {e}", file=sys.stderr)


def dry_run(config: TrainConfig) -> int:
    """Check everything without torch and without writing: settings, files, sizes."""
    problems = config.problems()
    later = [p for p in problems if p.startswith(("--data-path is needed", "--vocab-size"))]
    if len(problems) > len(later):
        raise UserError("\n  ".join(["", *(p for p in problems if p not in later)]), USAGE)
    m, d, t = config.model, config.data, config.training
    assert d.seq_length and t.train_iters
    for prefix in d.data_path:
        from meshwright.data.indexed import Indexed

        print(f"data {prefix}: {len(Indexed(prefix)):,} documents")
    from meshwright import tokenizers

    named = config.tokenizer.vocab_file or config.tokenizer.tokenizer_model
    if named or config.tokenizer.tokenizer_type in ("ByteTokenizer", "NullTokenizer"):
        vocab = tokenizers.build(config.tokenizer).size
    else:
        vocab = config.tokenizer.vocab_size or 50257
    padded = tokenizers.padded_size(vocab, m.make_vocab_size_divisible_by, 1, m.pad_vocab_size_to)
    positions = m.max_position_embeddings or d.seq_length
    n = counts.parameters(m, padded, positions)
    tokens = config.global_batch * d.seq_length
    flops = counts.flops_per_token(m, padded, d.seq_length, t.recompute) * tokens
    each = {"float64": 32, "float32": 16}.get(config.precision.dtype, 18)  # weights, gradients, master and two moments
    print(f"parameters: {n:,} (vocabulary {vocab:,} padded to {padded:,})")
    print(f"one step: {tokens:,} tokens, {flops / 1e12:,.1f} TFLOP, {config.micro_batches} micro-batches")
    print(f"the run: {t.train_iters:,} steps, {tokens * t.train_iters / 1e9:,.1f} billion tokens")
    print(f"memory of weights, gradients and optimizer: {n * each / 2**30:,.1f} GiB, activations apart")
    for p in later:
        print(f"before it can start: {p}")
    print("nothing was built and nothing written")
    return DONE


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("meshwright")
    except PackageNotFoundError:
        return "uninstalled"


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
