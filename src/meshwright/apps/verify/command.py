"""`meshwright verify-layout`: compare a layout with one process, on the ranks at hand."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.base import console
from meshwright.base.errors import DONE
from meshwright.cli import launch
from meshwright.config import checks, data_paths, flags
from meshwright.config.fields import with_settings
from meshwright.config.problem import SettingsError, require
from meshwright.config.schema import Model, TrainConfig
from meshwright.runtime.launch.launcher import LaunchPlan, build_program
from meshwright.runtime.ranks.world import World

if TYPE_CHECKING:
    import torch

    from meshwright.apps.verify.compare import Comparison
    from meshwright.parallel.layout import Layout
    from meshwright.runtime.ranks.team import Team
    from meshwright.training.before.resolve import TrainingRun
    from meshwright.training.small_run import RankSetup

STEPS = 3  # unless --verify-layout gives another number
MOST_RANKS = 64  # that are started here, each a process of 300 MB


def main(argv: list[str]) -> int:
    return launch.run_rank(argv, lambda words, world: command_line(argv, words, world))


def command_line(argv: list[str], words: list[str], world: World) -> int:
    about = (
        "Train a small model in the layout of these flags, which are those of train, and in one process, in float64; "
        "compare gradients, weights, optimizer state, losses, dropout, sample order and resuming. Then compare "
        "masters, moments and loss scale in the run's own precision. Without a launcher, start the ranks here, on the "
        "CPU."
    )
    given = flags.parse_settings(
        TrainConfig, words, "meshwright verify-layout", check=False, about=about
    )
    if given.print_config:
        print(flags.to_toml(given.config, given.sources))
        return DONE
    launched = launch.relaunch(given.config.parallel, world, ["verify-layout", *argv])
    if launched is not None:
        return launched

    # Fill in what a training needs and these flags do not name, and read all of them again.
    stated = complete_from_checkpoint(given)
    ranks = world.size if world.launcher != "none" else ranks_wanted(stated)
    words = [f"--world-size={ranks}", *missing(stated, ranks), *words]
    parsed = flags.parse_settings(TrainConfig, words, "meshwright verify-layout")
    config = complete_from_checkpoint(parsed)
    require(checks.problems(config, needs_data=False), parsed.words)
    if world.launcher == "none" and ranks > 1:
        return start_ranks(config, argv)
    return compare_on_this_rank(config, world, ["meshwright", "verify-layout", *argv])


def complete_from_checkpoint(parsed: flags.Parsed[TrainConfig]) -> TrainConfig:
    """Take the architecture from --load, which is all that is read here."""
    if not parsed.config.checkpoint.load:
        return parsed.config
    from meshwright.training.before.resolve import complete_settings

    return with_settings(complete_settings(parsed), load=None)


def ranks_wanted(c: TrainConfig) -> int:
    """Return the ranks to start: those named, or what the sizes need, with two for data."""
    p = c.parallel
    return p.world_size or 2 * p.model_ranks * p.num_distributed_optimizer_instances


def missing(c: TrainConfig, ranks: int) -> list[str]:
    """Return flags for all that a training needs and nothing names, with small, divisible sizes."""
    m = c.model
    p = c.parallel
    t = c.training
    pp = p.pipeline_model_parallel_size
    cp = p.context_parallel_size
    unit = p.tensor_model_parallel_size * cp  # the ranks that divide heads and tokens
    values: dict[str, object] = {}

    # The model.
    heads = m.num_attention_heads or (unit if m.hidden_size else 2 * unit)
    if not m.num_layers:
        values["num-layers"] = 2 * pp * (p.num_layers_per_virtual_pipeline_stage or 1)
    if not m.hidden_size:
        values["hidden-size"] = 8 * heads
    if not m.num_attention_heads:
        values["num-attention-heads"] = heads
    if not c.data.seq_length:
        values["seq-length"] = 16 * unit
    # Context parallelism has no dropout of attention. Where it is a default, nobody asked for it.
    if cp > 1 and m.attention_dropout == Model().attention_dropout:
        values["attention-dropout"] = 0

    # The training.
    if not c.optimizer.lr:
        values["lr"] = 1e-2
    if not c.lengths:
        values["train-iters"] = 10
    if not t.micro_batch_size and not t.num_accumulation_steps:
        values["micro-batch-size"] = 1
        if not t.global_batch_size:
            values["global-batch-size"] = 2 * ranks
    words = [f"--{name}={value}" for name, value in values.items()]

    if c.data.packing == "stream":
        return [*words, "--mock-data"]
    # Random tokens cannot be packed, so the run needs a path, which nobody reads.
    return words if data_paths.path_settings(c.data) else [*words, "--data-path=unread"]


def start_ranks(c: TrainConfig, argv: list[str]) -> int:
    """Start the ranks on this machine, on the CPU unless the flags name a device."""
    if c.world > MOST_RANKS:
        raise SettingsError(
            f"{c.world} ranks are too many to start here (at most {MOST_RANKS}); give {{world_size}} "
            f"{2 * c.parallel.model_ranks}, which has two data-parallel ranks, or run under a launcher"
        )
    on_cpu = ["--device", "cpu"] if c.parallel.device == "auto" else []
    from meshwright.runtime.launch import agent

    program = build_program(["verify-layout", f"--world-size={c.world}", *argv, *on_cpu])
    return agent.launch_ranks(LaunchPlan(c.world), program)


def compare_on_this_rank(config: TrainConfig, world: World, command: list[str]) -> int:
    """Compare on this rank; rank 0 prints the table."""
    from meshwright.apps.verify.certificate import verify_layout
    from meshwright.base import device as devices
    from meshwright.runtime.ranks.connect import join_ranks, pick_backend
    from meshwright.runtime.ranks.lost import reporting
    from meshwright.runtime.ranks.watchdog import watched
    from meshwright.training.before.preflight import require_equal_ranks
    from meshwright.training.before.resolve import NO_VOCABULARY, identity_of
    from meshwright.training.small_run import RankSetup

    p = config.parallel
    minutes = p.distributed_timeout_minutes
    steps = config.training.verify_layout or STEPS
    config = with_settings(config, verify_layout=steps)
    device = devices.open_device(p.device, world.local_rank)
    with reporting(world, minutes):
        backend = pick_backend(p, device, world.rank == 0)
        team = join_ranks(world, backend, minutes, device, p.start_timeout_seconds, is_watched=True)
        console.set_stream("stdout" if team.is_rank_0 else None)
        # The ranks must have the same settings, but may name other paths of data.
        mock = with_settings(
            dataclasses.replace(config, data=data_paths.without(config.data)), mock_data=True
        )
        setup = RankSetup(team, device)
        with watched(world, team, minutes, folder=None):
            require_equal_ranks(team, identity_of(mock, NO_VOCABULARY))
            verify_layout(config, setup, command, functools.partial(show_comparison, config, setup))
    return DONE


def rehearse(resolved: TrainingRun, layout: Layout, device: torch.device, team: Team) -> None:
    """Verify the layout of a run before it begins; stop the run if it differs."""
    from meshwright.apps.verify.certificate import verify_layout
    from meshwright.training.small_run import RankSetup

    groups = dict(layout.groups)
    caller = resolved.caller

    def connect(baseline: Layout) -> Layout:
        """Give the baseline the run's own groups, so that it makes none."""
        return dataclasses.replace(baseline, groups=dict(groups))

    def show(comparison: Comparison, line: str) -> None:
        console.remark(f" > {line}")

    setup = RankSetup(team, device, connect, caller.model, caller.loss)
    verify_layout(resolved.config, setup, resolved.command, show)


def show_comparison(
    config: TrainConfig, setup: RankSetup, comparison: Comparison, line: str
) -> None:
    from meshwright.apps.pages.runs import CERTIFICATE
    from meshwright.apps.verify.certificate import comparison_table

    for row in [*comparison_table(config, comparison, setup), "", line]:
        console.show(row)
    if root := config.checkpoint.run_dir or config.checkpoint.save:
        console.show(f"certificate: {Path(root) / CERTIFICATE}")
