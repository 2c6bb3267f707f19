"""`meshwright launch`: start a command or a script as several ranks, on one machine or many."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable

from meshwright.base import registry
from meshwright.base.errors import DONE, UNAVAILABLE, UserError
from meshwright.base.host import require_address_space
from meshwright.config import flags, help
from meshwright.config.pages import LAUNCHED
from meshwright.config.problem import SettingsError
from meshwright.config.schema import Parallel
from meshwright.runtime.launch.launcher import (
    LaunchConfig,
    LaunchPlan,
    build_program,
    find_bounds,
    launch_flags_of,
    make_plan,
)
from meshwright.runtime.ranks.lost import REPORT_SECONDS
from meshwright.runtime.ranks.world import World, find_world, number_of, require_world_size


def main(argv: list[str]) -> int:
    about = f"Start COMMAND, {', '.join(LAUNCHED)} or a Python script, as several ranks. Flags of launch go before it."
    parsed = flags.parse_settings(LaunchConfig, argv, "meshwright launch", about=about)
    config = parsed.config
    words = config.command
    if not words:
        raise UserError(
            f"nothing to start; name {', '.join(LAUNCHED)} with its flags, or a Python script"
        )
    # Help is printed by the command itself, once, and starts nothing.
    if words[0] in LAUNCHED and help.requested_topic(words) is not None:
        return int(registry.find("commands", words[0])(words[1:]))
    if config.write is not None and config.engine != "torch":
        raise SettingsError(
            f"{{engine={config.engine}}} starts the command now, {{write}} writes a file; give only one"
        )
    if config.write is not None:
        from meshwright.runtime.launch import engines
        from meshwright.training.before.resolve import complete_settings

        # A file for a cluster may be started days later, by someone else.
        require_room(config, words)
        return engines.write_engine_file(config, parsed.sources, words, complete_settings)
    if config.write_to or config.image or config.overwrite:
        raise SettingsError("{write_to}, {image} and {overwrite=True} need {write=ENGINE}")
    program = build_program(words)
    if config.engine == "ray":
        return run_on_ray(config, words)
    plan = make_plan(config)
    # Check before any rank starts: without room for torch each would fail in odd ways.
    require_address_space()
    if plan.least_ranks:
        return run_elastic(plan, program, words)
    from meshwright.runtime.launch import agent

    return agent.launch_ranks(plan, program)


def require_room(config: LaunchConfig, words: list[str]) -> None:
    """Refuse to write a training that cannot fit the devices of --gpu."""
    from meshwright.runtime.launch.elastic import is_train, parse_train
    from meshwright.training.before.resolve import complete_settings
    from meshwright.training.forecast import find_forecast

    if config.gpu == "any" or not is_train(words) or not config.nproc_per_node.isdigit():
        return
    if (forecast := find_forecast()) is None:
        return
    ranks = int(config.nproc_per_node) * (config.nnodes or 1)
    training = parse_train([*words, "--dry-run"], ranks, complete_settings)
    if reason := forecast.why_too_large(training, None if config.gpu == "auto" else config.gpu):
        raise SettingsError(f"{reason}; {{gpu}} any writes it all the same")


def run_elastic(plan: LaunchPlan, program: list[str], words: list[str]) -> int:
    """Launch with the ranks that are there. Machine 0 decides, so it alone must know what fits."""
    from meshwright.runtime.launch import members
    from meshwright.runtime.launch.elastic import find_shapes
    from meshwright.training.before.resolve import complete_settings

    if plan.node == 0:
        shapes = find_shapes(words, plan.least_ranks, plan.most_ranks, complete_settings)
        plan = dataclasses.replace(plan, shapes=tuple(shapes))
    return members.launch_elastic(plan, program)


def run_on_ray(config: LaunchConfig, words: list[str]) -> int:
    """Launch on a Ray cluster: that of RAY_ADDRESS, one that runs here, or a new local one."""
    # These flags say where machines are, which Ray knows by itself.
    for name in ("node_rank", "master_addr", "master_port", "node_ips"):
        if getattr(config, name) is not None:
            raise SettingsError(
                f"{{engine=ray}} and {{{name}}}: Ray places the ranks; leave {{{name}}} out"
            )
    count = config.nproc_per_node
    if config.max_ranks is None and not re.fullmatch("[1-9][0-9]{0,3}", count):
        raise SettingsError(
            "{engine=ray} needs {max_ranks}, or {nproc_per_node} and {nnodes} as numbers"
        )
    ranks = config.max_ranks or int(count) * (config.nnodes or 1)
    least, most = find_bounds(config, ranks)
    try:
        from meshwright.runtime.launch import on_ray
    except ImportError as error:
        missing = f"--engine ray needs Ray Train ({error})"
        raise UserError(f"{missing}; pip install 'meshwright[ray]'", UNAVAILABLE) from None
    from meshwright.training.before.resolve import complete_settings

    workers = (least, most) if most else int(count) * (config.nnodes or 1)
    uses_gpu = on_ray.has_gpus() and not re.search(r"--device[= ]cpu", " ".join(words))
    return on_ray.fit(
        words, workers, use_gpu=uses_gpu, failures=config.max_restarts, complete=complete_settings
    )


def run_rank(argv: list[str], command_line: Callable[[list[str], World], int]) -> int:
    """Call a command's `command_line` with the flags and the place of this rank.

    Rank 0 alone prints help, settings and dry runs, and the first rank of each machine the errors
    in the flags, which are the same on all ranks.
    """
    world = find_world(os.environ, number_of(argv, "--local-rank"))
    # A question gets one answer, however many ranks were started.
    if world.rank and (
        help.requested_topic(argv) is not None or {"--dry-run", "--print-config"}.intersection(argv)
    ):
        return DONE
    try:
        # The launcher's number of ranks is a default, which a flag may only repeat.
        words = argv if world.size == 1 else [f"--world-size={world.size}", *argv]
        if world.size > 1:  # before the batch size is divided by it
            require_world_size(world, number_of(argv, "--world-size"))
        return command_line(words, world)
    except UserError as error:
        # The machine's first rank reports this; a launcher stops it as soon as another one ends.
        if world.local_rank and not error.everywhere:
            time.sleep(REPORT_SECONDS)
        raise


def relaunch(parallel: Parallel, world: World, argv: list[str]) -> int | None:
    """Start `argv` on OneFlow's number of ranks and return the status; None if this is a rank."""
    words = launch_flags_of(parallel, world)
    return None if words is None else main([*words, *argv])
