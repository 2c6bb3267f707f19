"""Pre-train a GPT: `run` prepares one rank, and `run_on_rank` is a run in order."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.base import console, registry
from meshwright.base import device as devices
from meshwright.base.console import logged_to, remark, say, say_arguments, say_time, show
from meshwright.base.errors import UNAVAILABLE, UnfitFile, bad_data
from meshwright.base.files import require_unlinked
from meshwright.checkpoint import owner, publish
from meshwright.config import command as commands
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TrainConfig
from meshwright.data.tokenizers import Tokenizer
from meshwright.parallel.layout import connect, layout_of
from meshwright.runtime.ranks.connect import join_ranks, pick_backend
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.runtime.ranks.lost import reporting
from meshwright.runtime.ranks.team import Team
from meshwright.runtime.ranks.watchdog import Watchdog, watched
from meshwright.runtime.ranks.world import ATTEMPT, World, require_world_size
from meshwright.training.before.preflight import require_equal_ranks
from meshwright.training.before.resolve import (
    Caller,
    TrainingRun,
    complete_from_others,
    resolve,
)
from meshwright.training.log.timers import Startup
from meshwright.training.sizes import smaller_sizes
from meshwright.training.state import folder as run_folder
from meshwright.training.state.folder import goodput_of, write_report
from meshwright.training.state.resume import guard_existing, note_kept_model, note_texts

if TYPE_CHECKING:
    import torch

    from meshwright.parallel.layout import Layout
    from meshwright.training.loop import Trainer


def run(
    config: TrainConfig,
    world: World,
    caller: Caller = Caller(),  # noqa: B008
    command: list[str] | None = None,
    ignored: Mapping[str, Any] | None = None,
) -> int:
    """Train as configured and return the exit status; under a launcher every rank calls this.

    The settings have been checked: by the command line, by `complete_from_start` or by
    `check_settings`. `ignored` are given flags that have no effect; the log shows them. An error
    that the user can fix is a UserError.
    """
    startup = Startup(prints=world.rank == 0 and not console.is_notebook())
    require_world_size(world, config.parallel.world_size)
    with startup.phase("tokenizer", "reading the tokenizer"):
        resolved = resolve(config, world, command, ignored, caller)
    return run_resolved(resolved, startup)


def run_resolved(resolved: TrainingRun, startup: Startup) -> int:
    """Import torch, wait for all ranks, and train; return the exit status."""
    world, p = resolved.world, resolved.config.parallel
    minutes = p.distributed_timeout_minutes

    # Everything that can be refused without torch has been: its import takes seconds.
    with startup.phase("torch", "importing torch and opening the device"):
        device = devices.open_device(p.device, world.local_rank)
    if resolved.config.precision.deterministic_mode:
        devices.use_deterministic_algorithms()

    # From here on each failure is reported once, by the rank that can say most about it.
    with reporting(world, minutes, commands.out_of_memory):
        backend = pick_backend(p, device, world.rank == 0)
        with startup.phase("ranks", "waiting for all ranks"):
            team = join_ranks(
                world, backend, minutes, device, p.start_timeout_seconds, is_watched=True
            )
        resolved = complete_from_others(resolved, team)
        with watched(
            world, team, minutes, str(resolved.folder) if resolved.folder else None
        ) as watchdog:
            status = run_on_rank(resolved, device, backend, team, startup, watchdog)
        if status > 128 and world.launcher == "torchrun" and team.is_rank_0:
            after = "what torchrun prints after this line, and its status 1, is its way to end after a signal"
            print(
                f"the run has ended as it was asked to, with status {status}; {after}",
                file=sys.stderr,
                flush=True,
            )
    return status


def run_on_rank(
    resolved: TrainingRun,
    device: torch.device,
    backend: str,
    team: Team,
    startup: Startup,
    watchdog: Watchdog | None,
) -> int:
    """Run one rank from set-up to exit status; rank 0 prints and writes the folders.

    Lines have the order and the words of Megatron's log, which users' scripts read.
    """
    config, vocabulary, folder = resolved.config, resolved.vocabulary, resolved.folder
    caller = resolved.caller
    with startup.phase("modules", "importing Meshwright"):
        from meshwright.training import setup
        from meshwright.training.log.screen import open_screen
        from meshwright.training.network import Spec

    # Rank 0's lines go to standard output (as the screen forms them) and log.txt, others' nowhere.
    screen = open_screen(config.logging) if team.is_rank_0 else None
    console.set_stream("stdout" if team.is_rank_0 else None, screen)
    with contextlib.ExitStack() as block:
        if screen is not None:
            block.callback(console.set_stream, "stdout")  # what the caller does next has no screen
            block.callback(screen.close)

        # The ranks have met: require the same settings and files, then connect their groups.
        require_equal_ranks(team, resolved.identity, resolved.problem)
        layout = connect(layout_of(config, team.rank), team.timeout)

        # Lock the folders for this run. log.txt is opened only when the set-up has succeeded.
        open_log = block.enter_context(
            logged_to(folder / "log.txt" if folder and team.is_rank_0 else None)
        )
        team.run_on_rank_0(lambda: lock_folders(config, block))
        users = run_folder.find_users(config, team)
        team.run_on_all(lambda: lock_own_disk(config, team, users, block))
        run_folder.bring_records(config, team)

        if config.training.verify_layout:  # before the run's own parts take the memory
            find_rehearsal()(resolved, layout, device, team)

        # Build the parts. What is logged meanwhile is held back, so that a mistake that is found
        # late does not follow hundreds of lines of settings.
        with console.held_back():
            print_settings(resolved, backend)
            say(f"time to initialize megatron (seconds): {time.perf_counter() - startup.began:.3f}")
            say_time("after megatron is initialized")
            sizes = vocabulary.size, vocabulary.padded
            spec = Spec(
                config, layout, device, *sizes, caller.model, caller.loss, resolved.switches
            )
            trainer = setup.build_trainer(resolved, spec, team, startup, watchdog, screen, users)
            block.callback(trainer.close)
            say(startup.line())
        open_log()

        # Take the steps, then validate, save and export.
        with trainer.stop.handle_signals() if caller.handle_signals else contextlib.nullcontext():
            try:
                with commands.explain_out_of_memory(smaller_sizes(config)):
                    reason = trainer.train(startup)
                    finish_run(trainer, reason, vocabulary.tokenizer)
            except BaseException as error:
                trainer.metrics.record_failure(trainer.progress.iteration, error)
                raise
        report_end(trainer, reason, folder)
        return trainer.stop.status


def find_rehearsal() -> Callable[[TrainingRun, Layout, torch.device, Team], None]:
    """Return the function that compares a layout with one process before the run begins.

    It is registered as `verify-layout` in the group `meshwright.parts`.
    """
    rehearse: Callable[[TrainingRun, Layout, torch.device, Team], None] | None
    rehearse = registry.find("parts", "verify-layout")
    if rehearse is None:
        raise SettingsError(
            f"{{verify_layout}} cannot compare layouts: {registry.LACKING}, or leave it out",
            UNAVAILABLE,
        )
    return rehearse


def lock_folders(config: TrainConfig, block: contextlib.ExitStack) -> None:
    """Lock the run's folders until the block ends, and note what else they hold."""
    c = config.checkpoint
    roots = {}
    for name in ("run_dir", "save"):
        if path := getattr(c, name):
            roots[Path(path).resolve()] = path, f"change {{{name}}}"
    # In order of their paths: a folder is locked before those in it, and released after them.
    for _, (root, remedy) in sorted(roots.items()):
        block.enter_context(owner.lock_folder(root, remedy))
        refuse_links(Path(root))
    note_kept_model(c)
    note_texts(c)


def lock_own_disk(
    config: TrainConfig, team: Team, users: publish.Users, block: contextlib.ExitStack
) -> None:
    """Lock the folder of --save on a machine that has one of its own; rank 0 has locked its own."""
    save = config.checkpoint.save or ""
    first = publish.is_first_user(users, team) and publish.are_on_own_disks(save, users)
    if first and not team.is_rank_0:
        guard_existing(config)
        block.enter_context(owner.lock_folder(save))
        refuse_links(Path(save))


def refuse_links(root: Path) -> None:
    """Refuse links now that would otherwise end the run when it writes its records."""
    for name in ("config.toml", "metrics.jsonl", "tokenizer", "tensorboard"):
        try:
            require_unlinked(root / name)
        except UnfitFile as error:
            raise bad_data(f"{error.filename}: {error.strerror}") from None


def finish_run(trainer: Trainer, reason: str, tokenizer: Tokenizer | None) -> None:
    """Validate, save and export after the loop."""
    from meshwright.training.loop import ALL_DONE

    heartbeat.enter("end")
    config, c = trainer.config, trainer.config.checkpoint

    # Validate before the last save: a step whose validation loss is not finite is not saved.
    loss = math.nan
    if reason == ALL_DONE:
        loss = trainer.validation.validate("valid", is_at_end=True)
    if c.save and trainer.progress.iteration and not config.training.skip_train:
        trainer.saving.run(trainer.progress.iteration)

    # These take long and only read the weights, so a save in the background can go on meanwhile.
    if reason == ALL_DONE:
        trainer.validation.validate("test", is_at_end=True)
        if trainer.score_tasks is not None:
            trainer.score_tasks.finish()

    # Require the last step on disk and, if --save is there, in object storage.
    trainer.saving.wait()
    trainer.state.saver.require_saved(trainer.progress.iteration)
    trainer.team.run_on_all(lambda: trainer.state.saver.end_upload(at_end=True))
    if lost := trainer.state.saver.lost:
        remark(
            f" > note: saving failed at iterations {', '.join(map(str, lost))}; the last state is saved"
        )

    # The export and the mean of several steps read checkpoints, which are complete now.
    if reason == ALL_DONE:
        trainer.state.saver.export(tokenizer)
        if c.average_last:
            trainer.validation.validate_mean(loss)
    elif c.save_hf:
        convert = f"run `meshwright convert {c.save} {c.save_hf} --to huggingface` to convert the current checkpoint"
        remark(f" > --save-hf: not written, because training is not finished; {convert}")


def report_end(trainer: Trainer, reason: str, folder: Path | None) -> None:
    """Record how the run ended, draw its page, and print what to do next."""
    from meshwright.training.loop import ALL_DONE

    is_done, metrics, stop = reason == ALL_DONE, trainer.metrics, trainer.stop
    if stop.signal:
        reason = stop.signal.name
        say(f"exiting program after receiving {reason}.")
    metrics.row("end", trainer.progress.iteration, reason=reason, status=stop.status)
    if folder is not None and trainer.team.is_rank_0:
        if metrics.page is not None:
            metrics.page.close()
        if not trainer.config.training.skip_train and (goodput := goodput_of(folder)):
            (remark if goodput.recoveries else say)(f" > {goodput.line()}")
        write_report(folder)
    if metrics.screen is not None:
        metrics.stop_bar()
        show(
            metrics.screen.outcome(reason, is_done, trainer.progress.iteration, metrics.final_loss)
        )


def print_settings(resolved: TrainingRun, backend: str) -> None:
    """Print the head of the log; `backend` is the one that connects the ranks."""
    from meshwright.optim.loss_scale import dtype_of

    config = resolved.config
    t = config.training
    if attempt := os.environ.get(ATTEMPT):
        remark(f" > {attempt}")
    tp, pp = (
        config.parallel.tensor_model_parallel_size,
        config.parallel.pipeline_model_parallel_size,
    )
    say(
        f"using world size: {config.world}, data-parallel-size: {config.dp}, tensor-model-parallel size: {tp}, "
        f"pipeline-model-parallel size: {pp} "
    )
    say(f"using {dtype_of(config.precision)} for parameters ...")

    # All settings under Megatron's names, then the samples of a step.
    say_arguments(resolved.arguments | {"distributed_backend": backend})
    if not t.global_batch_size:
        say(f"setting global batch size to {config.global_batch}")
        if config.dp > 1:
            ranks = (
                f"{config.global_batch // config.dp} from each of {config.dp} data-parallel ranks"
            )
            remark(
                f" > note: a step has {config.global_batch} samples, {ranks}; --global-batch-size sets their number"
            )
    if t.rampup_batch_size:
        start, increment, samples = t.rampup_batch_size
        say(
            f"will use batch size rampup starting from global batch size {start} to global batch size "
            f"{config.global_batch} with batch size increments {increment} over {samples} samples."
        )
    elif t.step_batch_size_schedule:
        steps = ", ".join(
            f"{batch} from {start:,} samples on" for start, batch in config.batch_schedule
        )
        say(f"will use the global batch sizes {steps}.")
    elif t.micro_batch_size != "auto":
        say(
            f"setting number of micro-batches to constant {config.micro_batches(config.global_batch)}"
        )

    # The vocabulary and the ranks.
    resolved.vocabulary.print_lines()
    say("> initializing torch distributed ...")
    say(f"> initialized tensor model parallel with size {tp}")
    say(f"> initialized pipeline model parallel with size {pp}")
    say(f"> setting random seeds to {t.seed} ...")
