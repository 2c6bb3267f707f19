"""`meshwright launch`: start a command or a script as several ranks, on one machine or many."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import time
from collections.abc import Callable

from meshwright.errors import DONE, UNAVAILABLE, UserError
from meshwright.host import require_address_space
from meshwright.launch.launcher import TOGETHER, LaunchConfig, Plan, build_program, find_bounds, make_plan, wanted
from meshwright.ranks.lost import REPORT_SECONDS
from meshwright.ranks.world import World, find_world, require_world_size
from meshwright.settings import flags, help
from meshwright.settings.fields import spelling
from meshwright.settings.schema import Parallel


def main(argv: list[str]) -> int:
    about = f"Start COMMAND, {', '.join(TOGETHER)} or a Python script, as several ranks. Flags of launch go before it."
    parsed = flags.parse_settings(LaunchConfig, argv, "meshwright launch", about=about)
    given = parsed.config
    words = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not words:
        raise UserError(f"nothing to start; name {', '.join(TOGETHER)} with its flags, or a Python script")
    if words[0] in TOGETHER and help.asked(words) is not None:
        return int(importlib.import_module(f"meshwright.commands.{words[0]}").main(words[1:]))
    if given.write is not None and given.engine != "torch":
        raise UserError(f"--engine {given.engine} starts the command now, --write writes a file; give only one")
    if given.write is not None:
        from meshwright.launch import engines
        from meshwright.training.state.resume import checkpoint_architecture

        return engines.write(given, parsed.sources, words, checkpoint_architecture)
    if given.write_to or given.image or given.overwrite:
        raise UserError("--write-to, --image and --overwrite need --write ENGINE")
    program = build_program(words)
    if given.engine == "ray":
        return run_on_ray(given, words)
    plan = make_plan(given)
    require_address_space()
    if plan.least:
        return run_elastic(plan, program, words)
    from meshwright.launch import agent  # imports torch

    return agent.run(plan, program)


def run_elastic(plan: Plan, program: list[str], words: list[str]) -> int:
    """Launch with the ranks that are there. Machine 0 decides, so it alone must know what fits."""
    from meshwright.launch import members  # imports torch
    from meshwright.launch.elastic import find_shapes
    from meshwright.training.state.resume import checkpoint_architecture

    shapes = find_shapes(words, plan.least, plan.most, checkpoint_architecture) if plan.node == 0 else []
    return members.run(dataclasses.replace(plan, shapes=tuple(shapes)), program)


def run_on_ray(given: LaunchConfig, words: list[str]) -> int:
    """Launch on a Ray cluster: that of RAY_ADDRESS, one that runs here, or a new local one."""
    for name in ("node_rank", "master_addr", "master_port", "node_ips"):
        if getattr(given, name) is not None:
            raise UserError(f"--engine ray and {spelling(name)}: Ray places the ranks; leave {spelling(name)} out")
    count = given.nproc_per_node
    if given.max_ranks is None and not re.fullmatch("[1-9][0-9]{0,3}", count):
        raise UserError("--engine ray needs --max-ranks, or --nproc-per-node and --nnodes as numbers")
    least, most = find_bounds(given, given.max_ranks or int(count) * (given.nnodes or 1))
    try:
        from meshwright.launch import on_ray
    except ImportError as error:
        missing = f"--engine ray needs Ray Train ({error})"
        raise UserError(f"{missing}; pip install 'meshwright[ray]'", UNAVAILABLE) from None
    from meshwright.training.state.resume import checkpoint_architecture

    workers = (least, most) if most else int(count) * (given.nnodes or 1)
    uses_gpu = on_ray.has_gpus() and not re.search(r"--device[= ]cpu", " ".join(words))
    return on_ray.fit(words, workers, use_gpu=uses_gpu, failures=given.max_restarts, complete=checkpoint_architecture)


def run_rank(argv: list[str], command_line: Callable[[list[str], World], int]) -> int:
    """Call a command's `command_line` with the flags and the place of this rank.

    Rank 0 alone prints help, settings and dry runs, and the first rank of each machine the errors
    in the flags, which all ranks are given.
    """
    world = find_world(os.environ, None)
    if world.rank and (help.asked(argv) is not None or {"--dry-run", "--print-config"}.intersection(argv)):
        return DONE
    try:
        words = argv if world.size == 1 else [f"--world-size={world.size}", *argv]
        if world.size > 1 and (said := re.search(r"--world-size[= ](\d{1,9})( |$)", " ".join(argv))):
            require_world_size(world, int(said[1]))  # before the batch size is divided by it
        return command_line(words, world)
    except UserError as error:
        if world.local_rank and not error.everywhere:
            time.sleep(REPORT_SECONDS)
        raise


def relaunch(parallel: Parallel, argv: list[str]) -> int | None:
    """Start `argv` on OneFlow's number of ranks and return the status; None if this is a rank."""
    words = wanted(parallel)
    return None if words is None else main([*words, *argv])
