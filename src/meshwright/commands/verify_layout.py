"""`meshwright verify-layout`: compare a layout with one process, on the ranks at hand."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright import console
from meshwright.commands import launch
from meshwright.errors import DONE, UserError
from meshwright.launch.launcher import LaunchPlan, build_program
from meshwright.ranks.world import World, find_world
from meshwright.settings import checks, data_paths, flags
from meshwright.settings.schema import Model, TrainConfig

if TYPE_CHECKING:
    from meshwright.verify.compare import Comparison
    from meshwright.verify.small_run import Place

STEPS = 3  # unless --verify-layout gives another number
MOST_RANKS = 64  # that are started here, each a process of 300 MB


def main(argv: list[str]) -> int:
    return launch.run_rank(argv, lambda words, world: command_line(argv, words, world))


def command_line(argv: list[str], words: list[str], world: World) -> int:
    about = (
        "Train a small model in the layout of these flags, which are those of train, and in one process, in float64; "
        "compare gradients, weights, optimizer state, losses, dropout, sample order and resuming. Without a launcher, "
        "start the ranks here, on the CPU."
    )
    given = flags.parse_settings(TrainConfig, words, "meshwright verify-layout", check=False, about=about)
    if given.print_config:
        print(flags.to_toml(given.config, given.sources))
        return DONE
    config = given.config
    launched = launch.relaunch(config.parallel, ["verify-layout", *argv])
    if launched is not None:
        return launched
    stated = complete_from_checkpoint(config, given.sources)
    ranks = world.size if world.launcher != "none" else ranks_wanted(stated)
    words = [f"--world-size={ranks}", *missing(stated, ranks), *words]
    parsed = flags.parse_settings(TrainConfig, words, "meshwright verify-layout")
    config = complete_from_checkpoint(parsed.config, parsed.sources)
    if problems := checks.problems(config, needs_data=False):
        raise UserError(flags.listed(problems))
    if world.launcher == "none" and ranks > 1:
        return start(config, argv)
    return compare(config, ["meshwright", "verify-layout", *argv])


def complete_from_checkpoint(config: TrainConfig, sources: Mapping[str, str]) -> TrainConfig:
    """Take the architecture from --load, which is all that is read there."""
    if not config.checkpoint.load:
        return config
    from meshwright.training.state.resume import checkpoint_architecture

    config = checkpoint_architecture(config, {name for name, source in sources.items() if source != "default"})
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, load=None))


def ranks_wanted(c: TrainConfig) -> int:
    """Return the ranks to start: those named, or what the sizes need, with two for data."""
    p = c.parallel
    return p.world_size or 2 * p.model_ranks * p.num_distributed_optimizer_instances


def missing(c: TrainConfig, ranks: int) -> list[str]:
    """Return flags for what a training needs and nothing names, small and divisible."""
    m, p, t = c.model, c.parallel, c.training
    tp, pp, cp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
    heads = m.num_attention_heads or (tp * cp if m.hidden_size else 2 * tp * cp)
    virtual = p.num_layers_per_virtual_pipeline_stage
    has_length = t.train_iters or t.train_samples or t.train_tokens
    has_batch = t.micro_batch_size or t.num_accumulation_steps
    values = {
        "num-layers": None if m.num_layers else 2 * pp * (virtual or 1),
        "hidden-size": None if m.hidden_size else 8 * heads,
        "num-attention-heads": None if m.num_attention_heads else heads,
        "seq-length": None if c.data.seq_length else 16 * tp * cp,
        "lr": None if c.optimizer.lr else 1e-2,
        "train-iters": None if has_length else 10,
        "micro-batch-size": None if has_batch else 1,
        "attention-dropout": 0 if cp > 1 and m.attention_dropout == Model().attention_dropout else None,
        "global-batch-size": None if has_batch or t.global_batch_size else 2 * ranks,
    }
    return [*(f"--{name}={value}" for name, value in values.items() if value is not None), "--mock-data"]


def start(c: TrainConfig, argv: list[str]) -> int:
    """Start the ranks on this machine, on the CPU unless the flags name a device."""
    if c.world > MOST_RANKS:
        raise UserError(
            f"{c.world} ranks are too many to start here (at most {MOST_RANKS}); give --world-size "
            f"{2 * c.parallel.model_ranks}, which has two data-parallel ranks, or run under a launcher"
        )
    on_cpu = ["--device", "cpu"] if c.parallel.device == "auto" else []
    from meshwright.launch import agent  # imports torch

    program = build_program(["verify-layout", f"--world-size={c.world}", *argv, *on_cpu])
    return agent.launch_ranks(LaunchPlan(c.world), program)


def compare(config: TrainConfig, command: list[str]) -> int:
    """Compare on this rank; rank 0 prints the table."""
    from meshwright import device as devices
    from meshwright.ranks.connect import join_ranks
    from meshwright.ranks.lost import reporting
    from meshwright.training.before.preflight import pick_backend, require_equal_settings
    from meshwright.verify import certificate
    from meshwright.verify.small_run import Place

    p, steps = config.parallel, config.training.verify_layout or STEPS
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, verify_layout=steps))
    here = find_world(os.environ, p.local_rank)
    device = devices.open_device(p.device, here.local_rank)
    with reporting(here, p.distributed_timeout_minutes):
        backend = pick_backend(p, device, here.rank == 0)
        team = join_ranks(here, backend, p.distributed_timeout_minutes, device, p.start_timeout_seconds)
        console.set_stream("stdout" if team.is_lead else None)
        mock = dataclasses.replace(config, data=dataclasses.replace(data_paths.without(config.data), mock_data=True))
        require_equal_settings(team, mock)
        place = Place(team, device)
        certificate.verify(config, place, command, lambda made, line: show(config, place, made, line))
    return DONE


def show(config: TrainConfig, place: Place, made: Comparison, line: str) -> None:
    from meshwright.report.page import CERTIFICATE
    from meshwright.verify.certificate import table

    for row in [*table(config, made, place), "", line]:
        console.show(row)
    if root := config.checkpoint.run_dir or config.checkpoint.save:
        console.show(f"certificate: {Path(root) / CERTIFICATE}")
