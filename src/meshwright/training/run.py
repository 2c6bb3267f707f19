"""Pre-train a GPT: `run` prepares one rank, `run_on_rank` has the order of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import console
from meshwright import device as devices
from meshwright.checkpoint import publish, steps
from meshwright.console import logged_to, remark, say, say_arguments, say_time, show
from meshwright.errors import HANG, UserError
from meshwright.parallel.layout import connect, layout_of
from meshwright.ranks.connect import join_ranks
from meshwright.ranks.lost import reporting
from meshwright.ranks.pulse import pulse
from meshwright.ranks.team import Team
from meshwright.ranks.watchdog import Watchdog, watched
from meshwright.ranks.world import ATTEMPT, find_world, require_world_size
from meshwright.settings import checks, data_paths, flags
from meshwright.settings import command as commands
from meshwright.settings.other_programs import argument_dump, deepspeed_json
from meshwright.settings.schema import TrainConfig
from meshwright.tokenizers import Tokenizer
from meshwright.training.before.preflight import (
    build_vocabulary_on_all,
    pick_backend,
    require_equal_settings,
    require_files,
)
from meshwright.training.health.stop import StopConditions
from meshwright.training.log.startup import Startup
from meshwright.training.state.folder import goodput_of, write_report
from meshwright.training.state.resume import guard_existing, guard_run_folder
from meshwright.training.state.saver import check_export

if TYPE_CHECKING:
    import torch

    from meshwright.data.datasets import Datasets
    from meshwright.parallel.layout import Layout
    from meshwright.training.log.metrics import Metrics
    from meshwright.training.loop import Trainer
    from meshwright.training.network import Model
    from meshwright.training.state.state import State
    from meshwright.training.step import Loss


# Compares the layout with one process before the run begins: --verify-layout.
Rehearse = Callable[["TrainConfig", "Layout", "torch.device", "Team", "Job"], None]


@dataclass(frozen=True)
class Job:
    """Replacements for our own parts of a run, and its caller."""

    model: Model | None
    loss: Loss | None
    datasets: Datasets | None
    command: list[str]
    handle_signals: bool
    idle: Mapping[str, Any]
    startup: Startup
    watchdog: Watchdog | None
    rehearse: Rehearse | None = None


def run(
    config: TrainConfig,
    model: Model | None = None,
    loss: Loss | None = None,
    datasets: Datasets | None = None,
    *,
    command: list[str] | None = None,
    handle_signals: bool = False,
    idle: Mapping[str, Any] | None = None,
    rehearse: Rehearse | None = None,
) -> int:
    """Train as configured and return the exit status.

    Raise UserError for errors that the user can fix.

    `model`, `loss` and `datasets` replace our own: docs/extending.md shows all three. Under a
    launcher every rank calls this. With `handle_signals` a first SIGTERM or Ctrl-C, or a signal of
    --exit-signal, finishes the step and saves, unless the settings say --no-exit-signal-handler;
    without it signals are left to the caller. `idle` are given flags without effect, which the log
    shows. `rehearse` is called before the run begins if --verify-layout asks for it.
    """
    p = config.parallel
    here = find_world(os.environ, p.local_rank)
    startup = Startup(prints=here.rank == 0)
    require_world_size(here, p.world_size)
    config = dataclasses.replace(config, parallel=dataclasses.replace(p, world_size=here.size))
    if command is None:  # a command line's flags include the file's settings already
        config = apply_deepspeed_file(config, prints=here.rank == 0)
    if datasets is not None:
        data = dataclasses.replace(data_paths.without(config.data), multiple_validation_sets=False)
        config = dataclasses.replace(config, data=dataclasses.replace(data, validation_set_names=[]))
    if problems := checks.problems(config, needs_data=datasets is None):
        raise UserError(flags.listed(problems))
    require_files(config)
    for folder in filter(None, (config.checkpoint.save, config.checkpoint.run_dir)) if here.rank == 0 else ():
        publish.require_unlocked(folder)
    with startup.phase("torch", "importing torch and opening the device"):
        device = devices.open_device(p.device, here.local_rank)
    if config.precision.deterministic_mode:
        devices.use_deterministic_algorithms()
    with reporting(here, p.distributed_timeout_minutes, lambda error: out_of_memory(error, config)):
        backend = pick_backend(p, device, here.rank == 0)
        with startup.phase("ranks", "waiting for all ranks"):
            minutes, seconds = p.distributed_timeout_minutes, p.start_timeout_seconds
            team = join_ranks(here, backend, minutes, device, seconds, is_watched=True)
        with watched(here, team, minutes, config.checkpoint.run_dir or config.checkpoint.save) as watchdog:
            job = Job(model, loss, datasets, command or [], handle_signals, idle or {}, startup, watchdog, rehearse)
            status = run_on_rank(config, device, team, job)
        if status > 128 and here.launcher == "torchrun" and team.is_lead:
            after = "what torchrun prints after this line, and its status 1, is its way to end after a signal"
            print(f"the run has ended as it was asked to, with status {status}; {after}", file=sys.stderr, flush=True)
    return status


def out_of_memory(error: Exception, config: TrainConfig) -> UserError | None:
    t = config.training
    recompute = "" if t.recompute_granularity == "full" else ", or --recompute-granularity full"
    micro = f"a smaller --micro-batch-size (now {t.micro_batch_size or config.micro_batch})"
    return commands.out_of_memory(error, f"{micro} or --seq-length (now {config.data.seq_length}){recompute}")


def apply_deepspeed_file(config: TrainConfig, prints: bool) -> TrainConfig:
    """Apply the file of --deepspeed_config, except to settings that are not defaults."""
    defaults = flags.to_dict(TrainConfig())
    given = {name for name, value in flags.to_dict(config).items() if value != defaults[name]}
    config, notes, wrong = deepspeed_json.merge_deepspeed(config, given)
    if wrong:
        raise UserError(flags.listed(wrong))
    for note in notes if prints else ():
        print(f"note: {note}", file=sys.stderr)
    return config


def run_on_rank(config: TrainConfig, device: torch.device, team: Team, job: Job) -> int:
    """Run one rank from set-up to exit status; rank 0 prints and writes the folders.

    The lines are printed in the order and the words of Megatron's log, which users' scripts read.
    """
    c, startup = config.checkpoint, job.startup
    with startup.phase("modules", "importing Meshwright"):
        from meshwright.training import setup
        from meshwright.training.log.screen import open_screen
        from meshwright.training.log.timers import Timers
        from meshwright.training.loop import Trainer
        from meshwright.training.network import Spec

    screen = open_screen(config.logging) if team.is_lead else None
    console.set_stream("stdout" if team.is_lead else None, screen)
    folder = Path(root) if (root := c.run_dir or c.save) else None
    values = argument_dump.dumped_arguments(config, job.idle, pick_backend(config.parallel, device))
    with contextlib.ExitStack() as held:
        if screen is not None:
            held.callback(console.set_stream, "stdout")  # what the caller does next has no screen
            held.callback(screen.close)
        require_equal_settings(team, config)
        layout = connect(layout_of(config, team.rank), team.timeout)
        open_log = held.enter_context(logged_to(folder / "log.txt" if folder and team.is_lead else None))
        team.run_on_lead(lambda: lock_folders(config, held))
        if job.rehearse is not None and config.training.verify_layout:
            job.rehearse(config, layout, device, team, job)
        timers = Timers(int(config.logging.timing_log_level), config.logging.timing_log_option, device, team, startup)
        with startup.phase("tokenizer", "reading the tokenizer"):
            tokenizer, vocab, padded = print_settings(config, folder, team, values)
        say(f"time to initialize megatron (seconds): {time.perf_counter() - startup.began:.3f}")
        say_time("after megatron is initialized")
        with timers.phase("model-and-optimizer-setup"):
            spec = Spec(config, layout, device, vocab, padded, job.model, job.loss)
            state = setup.build_state(spec, team, timers)
        say_time("after model, optimizer, and learning rate scheduler are built")

        with timers.phase("train/valid/test-data-iterators-setup"), startup.phase("data", "opening the data"):
            feed = setup.open_feed(state, tokenizer, job.datasets)
            samples, scores = setup.open_samples(state, tokenizer), setup.open_scores(state, tokenizer)
        say_time("after dataloaders are built")
        say("done with setup ...")
        timers.print_phases("model-and-optimizer-setup", "train/valid/test-data-iterators-setup")

        metrics = setup.open_log(state, folder, tokenizer, timers, job.command, screen)
        stop = StopConditions(config.training, startup.began, c.save is not None, lambda: newest_step(c.save))
        trainer = Trainer(state, feed, metrics, timers, stop, job.watchdog, samples, scores)
        record_hangs(job.watchdog, state, metrics)
        say(startup.line())
        open_log()
        held.callback(trainer.close)
        with stop.handle_signals() if job.handle_signals else contextlib.nullcontext():
            try:
                reason = trainer.train()
                finish(trainer, reason, tokenizer)
            except BaseException as error:
                metrics.record_failure(state.progress.iteration, error)
                raise
        report_end(trainer, reason, folder)
        return stop.status


def record_hangs(watchdog: Watchdog | None, state: State, metrics: Metrics) -> None:
    """Have the watchdog's thread record that it is about to end the run."""
    if watchdog is not None:
        watchdog.at_end = lambda text: metrics.record_failure(state.progress.iteration, UserError(text, HANG))


def newest_step(folder: str | None) -> int | None:
    """Return the number of the last step that a run has saved."""
    return next(iter(steps.list_steps(folder)), None) if folder else None


def lock_folders(config: TrainConfig, held: contextlib.ExitStack) -> None:
    """Lock --run-dir and --save for this run, and refuse what must not be overwritten."""
    c = config.checkpoint
    named = {Path(p).resolve(): (flag, p) for flag, p in (("--run-dir", c.run_dir), ("--save", c.save)) if p}
    for flag, root in named.values():
        if Path(root).exists() and not Path(root).is_dir():
            raise UserError(f"{flag} {root} is a file, not a folder")
        held.enter_context(publish.lock(root))
    if c.save:
        guard_existing(config)
    guard_run_folder(config)
    check_export(config)


def finish(trainer: Trainer, reason: str, tokenizer: Tokenizer | None) -> None:
    """Validate, save and export after the loop."""
    from meshwright.training.loop import ALL_DONE

    pulse.enter("end")
    config, c = trainer.config, trainer.config.checkpoint
    if reason == ALL_DONE:
        trainer.validate("valid", is_at_end=True)
    if c.save and trainer.progress.iteration and not config.training.skip_train:
        trainer.save()
    if reason == ALL_DONE:
        trainer.validate("test", is_at_end=True)
        if trainer.scores is not None:
            trainer.score(trainer.scores.finish)
    trainer.state.saver.wait()
    trainer.record_failed_saves()
    trainer.state.saver.require_saved(trainer.progress.iteration)
    if lost := trainer.state.saver.lost:
        remark(f" > note: saving failed at iterations {', '.join(map(str, lost))}; the last state is saved")
    if reason == ALL_DONE:
        trainer.state.saver.export(tokenizer)
    elif c.save_hf:
        convert = f"run `meshwright convert {c.save} {c.save_hf} --to huggingface` to convert the current checkpoint"
        remark(f" > --save-hf: not written, because training is not finished; {convert}")


def report_end(trainer: Trainer, reason: str, folder: Path | None) -> None:
    """Record how the run ended, draw its page and say what to do next."""
    from meshwright.training.loop import ALL_DONE

    is_done, metrics, stop = reason == ALL_DONE, trainer.metrics, trainer.stop
    if stop.signal:
        reason = stop.signal.name
        say(f"exiting program after receiving {reason}.")
    metrics.row("end", trainer.progress.iteration, reason=reason, status=stop.status)
    if folder is not None and trainer.team.is_lead:
        metrics.page.close()
        if not trainer.config.training.skip_train and (found := goodput_of(folder)):
            (remark if found.recoveries else say)(f" > {found.line()}")
        write_report(folder)
    if metrics.screen is not None:
        metrics.stop_bar()
        show(metrics.screen.end(reason, is_done, trainer.progress.iteration, metrics.final_loss))


def print_settings(
    config: TrainConfig, folder: Path | None, team: Team, values: dict[str, Any]
) -> tuple[Tokenizer | None, int, int]:
    """Print the head of the log; return the tokenizer, true and padded vocabulary size."""
    from meshwright.optim.loss_scale import dtype_of

    t = config.training
    if attempt := os.environ.get(ATTEMPT):
        remark(f" > {attempt}")
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    say(
        f"using world size: {config.world}, data-parallel-size: {config.dp}, tensor-model-parallel size: {tp}, "
        f"pipeline-model-parallel size: {pp} "
    )
    say(f"using {dtype_of(config.precision)} for parameters ...")
    say_arguments(values)
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
    tokenizer, vocab, padded = build_vocabulary_on_all(config, folder, team)
    say("> initializing torch distributed ...")
    say(f"> initialized tensor model parallel with size {tp}")
    say(f"> initialized pipeline model parallel with size {pp}")
    say(f"> setting random seeds to {t.seed} ...")
    return tokenizer, vocab, padded
