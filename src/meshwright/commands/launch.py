"""`meshwright launch`: start a command or a script as several ranks, on one machine or many."""

from __future__ import annotations

import os

from meshwright.errors import UserError
from meshwright.launch.launcher import TOGETHER, LaunchConfig, build_program, make_plan
from meshwright.launch.world import find_world
from meshwright.settings import flags
from meshwright.settings.schema import Parallel


def main(argv: list[str]) -> int:
    about = f"Start COMMAND, {', '.join(TOGETHER)} or a Python script, as several ranks. Flags of launch go before it."
    given = flags.parse(LaunchConfig, argv, "meshwright launch", about=about).config
    words = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not words:
        raise UserError(f"nothing to start; name {', '.join(TOGETHER)} with its flags, or a Python script")
    program = build_program(words)
    plan = make_plan(given)
    from meshwright.launch import agent  # imports torch

    return agent.run(plan, program)


def relaunch(parallel: Parallel, argv: list[str]) -> int | None:
    """Start `argv` on OneFlow's number of ranks and return the status; None if this is a rank."""
    words = wanted(parallel)
    return None if words is None else main([*words, *argv])


def wanted(parallel: Parallel) -> list[str] | None:
    """Translate OneFlow's flags to those of launch; None if this process does the work itself."""
    here, nodes = parallel.num_gpus_per_node, parallel.num_nodes
    world = find_world(os.environ, parallel.local_rank)
    if world.launcher != "none":
        if here * nodes not in (1, world.size):
            raise UserError(
                f"--num-gpus-per-node {here} x --num-nodes {nodes} are {here * nodes} ranks, but {world.launcher} "
                f"started {world.size}; leave these flags out under a launcher, or start {here * nodes}"
            )
        return None
    ips = [ip for ip in (parallel.node_ips or "").replace(" ", "").split(",") if ip]
    if len(ips) != nodes and (nodes > 1 or ips):
        raise UserError(f"--node-ips names {len(ips)} addresses, --num-nodes is {nodes}; give one for each machine")
    if here * nodes == 1:
        return None
    words = ["--nproc-per-node", str(here), "--nnodes", str(nodes)]
    return [*words, "--node-ips", ",".join(ips)] if nodes > 1 else words
