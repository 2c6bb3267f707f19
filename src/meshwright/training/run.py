"""Pre-train a GPT: `meshwright train`, `pretrain_gpt.py`, or `run(config)` from Python.

Read `run` for the order of things, and network.py's train_step for one batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright import console
from meshwright import device as devices
from meshwright.checkpoint import publish
from meshwright.console import say, say_arguments, say_time
from meshwright.device import use_deterministic_algorithms
from meshwright.errors import UserError
from meshwright.launch import rendezvous
from meshwright.launch.team import Team
from meshwright.launch.world import find_world, require_world_size
from meshwright.parallel.layout import connect, layout_of
from meshwright.settings import checks, flags
from meshwright.settings import command as commands
from meshwright.settings import data_paths as datapaths
from meshwright.settings import deepspeed_json as deepspeed
from meshwright.settings.schema import Data, TrainConfig
from meshwright.tokenizers import Tokenizer
from meshwright.training.folder import write_report
from meshwright.training.preflight import pick_backend, require_files, same_on_all, same_vocabulary
from meshwright.training.resume import guard_existing
from meshwright.training.saver import check_export
from meshwright.training.stop import Ending

if TYPE_CHECKING:
    import torch

    from meshwright.data.datasets import Datasets
    from meshwright.training.network import Loss, Model


WORD = 3.0  # seconds that the reporting rank has before the others end: a launcher stops all as soon as one has


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
    world = find_world(os.environ, p.local_rank)
    require_world_size(world, p.world_size)
    config = dataclasses.replace(config, parallel=dataclasses.replace(p, world_size=world.size))
    if command is None:  # from Python; a command line's flags have the file's settings already
        config = with_deepspeed(config, tells=world.rank == 0)
    if datasets is not None:  # the files are neither read nor remembered
        config = dataclasses.replace(config, data=without_files(config.data))
    problems = checks.problems(config, data=datasets is None)
    if problems:
        raise UserError(flags.listed(problems))
    require_files(config)
    device = devices.pick(p.device, world.local_rank)
    if config.precision.deterministic_mode:
        use_deterministic_algorithms()
    try:
        backend = pick_backend(config, device, world.rank == 0)
        team = rendezvous.join(world, backend, p.distributed_timeout_minutes, device, p.start_timeout_seconds)
        return run_on_rank(config, device, team, model, loss, datasets, command or [], began)
    except Exception as error:
        told = (
            (rendezvous.explain_lost_rank(error) if world.size > 1 else None) or out_of_memory(error, config) or error
        )
        if isinstance(told, UserError) and world.size > 1:
            alone = f"rank {world.rank}: {told}" if world.rank and not told.everywhere else str(told)
            if told.everywhere and world.local_rank:  # the first rank of each machine tells it
                time.sleep(WORD)
                alone = ""
            told = UserError(alone, told.status, everywhere=True)
        if told is error:
            raise
        raise told from error
    finally:
        rendezvous.leave()


def out_of_memory(error: Exception, config: TrainConfig) -> UserError | None:
    t = config.training
    less = "" if t.recompute == "full" else ", or --recompute-granularity full"
    return commands.out_of_memory(
        error,
        f"a smaller --micro-batch-size (now {t.micro_batch_size or config.micro_batch}) or --seq-length (now "
        f"{config.data.seq_length}){less}",
    )


def with_deepspeed(config: TrainConfig, tells: bool) -> TrainConfig:
    """With what --deepspeed_config says; whatever is not at its default was said by the caller."""
    defaults = flags.to_dict(TrainConfig())
    given = {name for name, value in flags.to_dict(config).items() if value != defaults[name]}
    config, notes = deepspeed.apply(config, given)
    for note in notes if tells else ():
        print(f"note: {note}", file=sys.stderr)
    return config


def without_files(d: Data) -> Data:
    return dataclasses.replace(datapaths.without(d), multiple_validation_sets=False, validation_set_names=[])


def run_on_rank(
    config: TrainConfig,
    device: torch.device,
    team: Team,
    model: Model | None,
    loss: Loss | None,
    datasets: Datasets | None,
    command: list[str],
    began: float,
) -> int:
    """One rank's way through the run, all ranks side by side; rank 0 speaks and keeps the folders."""
    from meshwright.training.loop import ALL_DONE, Trainer
    from meshwright.training.metrics import Timers

    console.set_stream("stdout" if team.is_lead else None)
    same_on_all(team, config)
    layout = connect(layout_of(config, team.rank), rendezvous.timeout())
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
                held.enter_context(publish.lock(root))
            if c.save:
                guard_existing(config)
            check_export(config)

        team.run_on_lead(take_folders)
        # What follows is said in the order and the words of Megatron's log, which people's scripts read.
        timers = Timers(int(config.logging.timing_log_level), config.logging.timing_log_option, device, team)
        tokenizer, vocab, padded = introduce(config, folder, team)
        say(f"time to initialize megatron (seconds): {time.perf_counter() - began:.3f}")
        say_time("after megatron is initialized")

        with timers.phase("model-and-optimizer-setup"):
            trainer = Trainer(config, device, vocab, padded, model, loss, timers, layout, team)
            trainer.load_or_initialise()
            trainer.fit_micro_batch()
        say_time("after model, optimizer, and learning rate scheduler are built")

        with timers.phase("train/valid/test-data-iterators-setup"):
            trainer.open_data(tokenizer, datasets)
        say_time("after dataloaders are built")
        say("done with setup ...")
        timers.tell("model-and-optimizer-setup", "train/valid/test-data-iterators-setup")

        trainer.open_folder(folder, tokenizer, command)
        held.callback(trainer.metrics.close)
        held.callback(trainer.state.saver.close)  # which waits for a save in flight
        ending = Ending(config.training, began, saves=c.save is not None)
        with ending.catching():
            reason = trainer.train(ending)
            if reason == ALL_DONE:
                trainer.validate("valid", "the end of training for val data", 0, ending)
            if c.save and trainer.progress.iteration and not config.training.skip_train:
                trainer.save()
            if reason == ALL_DONE:
                trainer.validate("test", "the end of training for test data", 0, ending)
            trainer.state.saver.wait()
            if reason == ALL_DONE:
                trainer.state.saver.export(tokenizer)
            elif c.save_hf:
                say(
                    f" > --save-hf: nothing is written before the training is done; `meshwright convert {c.save} {c.save_hf} "
                    "--to huggingface` does it now"
                )
        if ending.signal:
            reason = ending.signal.name
            say(f"exiting program after receiving {reason}.")
        trainer.metrics.row("end", trainer.progress.iteration, reason=reason, status=ending.status, time=time.time())
        if folder is not None and team.is_lead:
            write_report(folder)
        return ending.status


def introduce(config: TrainConfig, folder: Path | None, team: Team) -> tuple[Tokenizer | None, int, int]:
    """Who we are; returns the tokenizer, if there is one, the true and the padded vocabulary size."""
    from meshwright.optim.loss_scale import dtype_of

    t = config.training
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    say(
        f"using world size: {config.world}, data-parallel-size: {config.dp}, tensor-model-parallel size: {tp}, "
        f"pipeline-model-parallel size: {pp} "
    )
    say(f"using {dtype_of(config.precision)} for parameters ...")
    say_arguments(flags.to_dict(config) | {"rank": 0, "data_parallel_size": config.dp})
    if not t.global_batch_size:
        say(f"setting global batch size to {config.global_batch}")
    if t.rampup_batch_size:
        least, increment, samples = t.rampup_batch_size
        say(
            f"will use batch size rampup starting from global batch size {least} to global batch size "
            f"{config.global_batch} with batch size increments {increment} over {samples} samples."
        )
    elif t.micro_batch_size != "auto":
        say(f"setting number of micro-batches to constant {config.micro_batches(config.global_batch)}")
    tokenizer, vocab, padded = same_vocabulary(config, folder, team)
    say("> initializing torch distributed ...")
    say(f"> initialized tensor model parallel with size {tp}")
    say(f"> initialized pipeline model parallel with size {pp}")
    say(f"> setting random seeds to {t.seed} ...")
    return tokenizer, vocab, padded
