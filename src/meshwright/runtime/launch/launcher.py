"""The flags of `meshwright launch`, which starts a command or a script as several ranks.

    meshwright launch --nproc-per-node 8 train --num-layers 24 ...
    meshwright launch --nproc-per-node 8 --node-ips 10.0.0.1,10.0.0.2 pretrain_gpt.py ...

This module reads the flags and imports no torch; `agent` starts and watches the ranks.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.base import device as devices
from meshwright.base import host
from meshwright.base.errors import UNAVAILABLE, UserError
from meshwright.config.fields import flag
from meshwright.config.grammar import Machines
from meshwright.config.pages import LAUNCHED
from meshwright.config.problem import SettingsError, with_value
from meshwright.config.schema import Parallel
from meshwright.runtime.launch.elastic import Shape
from meshwright.runtime.ranks.world import START_SECONDS, World

PORT = 29500  # torchrun's default


@dataclass(frozen=True)
class LaunchPlan:
    """The processes to start, and their addresses."""

    processes: int  # on each machine
    nodes: int = 1
    node: int = 0  # the number of this machine
    address: str = "127.0.0.1"  # of machine 0
    port: int = 0  # there; 0 is any free one, for a single machine
    restarts: int = 0
    wait: float = START_SECONDS  # seconds for the other machines to come
    least_ranks: int = 0  # with which to go on when machines are lost; 0: all are needed
    most_ranks: int = 0  # to use of those that are there
    # what the command can run on, the largest first; known to machine 0
    shapes: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class LaunchConfig:
    """Settings of `meshwright launch`, with torch.distributed.launch's spellings in underscores."""

    nproc_per_node: str = flag(
        "auto",
        "ranks on each machine: a number, gpu, cpu, or auto for one per accelerator",
        "--nproc_per_node",
        value="FORM",
    )
    nnodes: int | None = flag(
        None, "number of machines; give each of them the same command (none: 1)"
    )
    node_rank: int | None = flag(None, "number of this machine, from 0", "--node_rank")
    master_addr: str | None = flag(None, "address of machine 0", "--master_addr", value="NAME")
    master_port: int | None = flag(
        None,
        f"port on machine 0 (none: {PORT}, or any free port on a single machine)",
        "--master_port",
    )
    node_ips: Machines | None = flag(
        None,
        "A,B,...: addresses of all machines, instead of the three flags above; each finds its own number",
        "--node_ips",
        value="FORM",
    )
    max_restarts: int = flag(
        0, "most restarts after a crash, a time-out or a signal", "--max_restarts"
    )
    min_ranks: int | None = flag(
        None,
        "go on with as few ranks when machines or devices are lost, and with more when they are back",
    )
    max_ranks: int | None = flag(None, "most ranks to use; others are spares (none: all)")
    wait: float = flag(START_SECONDS, "seconds to wait for the other machines at the start")
    engine: Literal["torch", "ray"] = flag(
        "torch",
        "who starts and replaces the ranks: torch's agent here, or Ray Train on a cluster (extra ray)",
    )
    write: Literal["slurm", "kubernetes", "jobset", "skypilot", "ray", "docker"] | None = flag(
        None, "start nothing; write the command into a file for this engine"
    )
    write_to: str | None = flag(None, "file for --write (none: print it)", value="FILE")
    overwrite: bool = flag(False, "let --write-to replace a file")
    gpu: str = flag(
        "auto",
        "device of the cluster, such as h100: --write refuses a training that does not fit it (auto: the GPU of this "
        "machine, if it has one; any: write without this check)",
        value="FORM",
        docs="plan",
    )
    image: str | None = flag(
        None, "container image in the file of --write (none: meshwright:VERSION)", value="FORM"
    )
    command: list[str] = flag(
        [],
        "one of our commands or a Python script, with its flags",
        positional="rest",
        value="NAME",
    )


def build_program(words: list[str]) -> list[str]:
    """Return the arguments of Python for one rank."""
    name = words[0]
    if name in LAUNCHED:
        return ["-u", "-m", "meshwright", *words]
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"there is no script {name} in {Path.cwd()}")
        return ["-u", *words]
    if name.startswith("-"):
        raise UserError(
            f"launch has no flag {name} (see `meshwright launch --help`); put COMMAND's flags after it"
        )
    raise UserError(f"{name} is neither one of {', '.join(LAUNCHED)} nor a Python script (NAME.py)")


def make_plan(config: LaunchConfig) -> LaunchPlan:
    """Check the flags and work out what this machine starts."""
    # The machines, and where the first of them is.
    ips = config.node_ips.addresses if config.node_ips else ()
    nodes = config.nnodes if config.nnodes is not None else len(ips) or 1
    require_numbers(config, nodes)
    if ips and len(ips) != nodes:
        raise SettingsError(
            f"{{node_ips}} names {len(ips)} addresses, {{nnodes}} is {nodes}; give one for each machine"
        )
    if ips and config.master_addr not in (None, ips[0]):
        raise SettingsError(
            f"{{master_addr={config.master_addr}}} is not the first of {{node_ips}}, {ips[0]}; give only one"
        )
    address = config.master_addr or (ips[0] if ips else None)
    node = config.node_rank
    if nodes > 1 and address is None:
        raise SettingsError(
            f"{{nnodes={nodes}}} needs {{master_addr}} with {{node_rank}}, or {{node_ips}}"
        )
    # The number of this machine: given, or the place of its address in the list.
    if nodes > 1 and node is None:
        if not ips:
            raise SettingsError(
                f"{{nnodes={nodes}}} needs {{node_rank}}, the number of this machine from 0 to {nodes - 1}"
            )
        node = find_own_number(ips)
    if not 0 <= (node or 0) < nodes:
        raise SettingsError(
            f"{{node_rank={node}}} does not fit {{nnodes={nodes}}}; machines count from 0 to {nodes - 1}"
        )
    if config.node_ips is not None and not ips:
        raise SettingsError("{node_ips} names no machine; give the address of each")
    if not 0 < config.wait <= 10**6:
        raise SettingsError(f"{{wait={config.wait:g}}} must be above 0 seconds and at most {10**6}")
    if config.max_restarts < 0:
        raise SettingsError(f"{{max_restarts={config.max_restarts}}} must be 0 or more")
    # One machine needs no port that others know.
    port = config.master_port or (PORT if nodes > 1 else 0)
    count = count_processes(config.nproc_per_node)
    least, most = find_bounds(config, count * nodes)
    return LaunchPlan(
        count,
        nodes,
        node or 0,
        address or "127.0.0.1",
        port,
        config.max_restarts,
        config.wait,
        least,
        most,
    )


def require_numbers(config: LaunchConfig, nodes: int) -> None:
    if nodes < 1:
        raise SettingsError(f"{{nnodes={nodes}}} must be 1 or more")
    if config.master_port is not None and not 0 < config.master_port < 65536:
        raise SettingsError(f"{{master_port={config.master_port}}} is not a port; use 1 to 65535")


def find_bounds(config: LaunchConfig, ranks: int) -> tuple[int, int]:
    """Return the least and the most ranks of an elastic run, or zeros."""
    if config.min_ranks is None and config.max_ranks is None:
        return 0, 0
    for name in ("min_ranks", "max_ranks"):
        number = getattr(config, name)
        if number is not None and number < 1:
            raise SettingsError(f"{with_value(name, number)} must be 1 or more")
    least = config.min_ranks or 1
    most = config.max_ranks or ranks
    if least > most:
        bound = f"{{max_ranks={most}}}" if config.max_ranks else f"all {ranks}"
        raise SettingsError(f"{{min_ranks={least}}} is above {bound}")
    if least > ranks:
        raise SettingsError(
            f"{{min_ranks={least}}} is above the {ranks} ranks of {{nnodes}} and {{nproc_per_node}}"
        )
    return least, min(most, ranks)


def count_processes(text: str) -> int:
    """Return the number of ranks that --nproc-per-node asks for on this machine."""
    if re.fullmatch("[1-9][0-9]{0,3}", text):
        return int(text)
    if text == "cpu":
        return host.cores()
    if text not in ("auto", "gpu"):
        raise SettingsError(
            f"{{nproc_per_node={text[:50]}}} is neither a number from 1 to 9999 nor one of auto, gpu, cpu"
        )
    count = devices.count_accelerators()
    if text == "gpu" and not count:
        raise SettingsError(
            "{nproc_per_node=gpu}: torch sees no accelerator on this machine; give a number, or cpu"
        )
    return count or 1


def find_own_number(addresses: Sequence[str]) -> int:
    """Return the position of this machine's address in the list."""
    # A machine with two networks may be there twice: then its number is not certain.
    own = [n for n, address in enumerate(addresses) if _is_own(address)]
    if len(own) != 1:
        which = f"none of --node-ips {','.join(addresses)} is"
        if own:
            which = f"{len(own)} of --node-ips are"
        advice = (
            "give the machines' own, or this one's number as --node-rank of `meshwright launch`"
        )
        raise UserError(f"{which} an address of this machine ({socket.gethostname()}); {advice}")
    return own[0]


def _is_own(address: str) -> bool:
    try:
        infos = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SettingsError(
            f"the name {address} in {{node_ips}} has no address ({error.strerror})", UNAVAILABLE
        ) from None
    for family, _, _, _, (ip, _, *scope) in infos:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect((ip, 1, *scope))  # sends nothing; it looks up the route
            if s.getsockname()[0] == ip:  # a machine reaches itself from the same address
                return True
    return False


def launch_flags_of(parallel: Parallel, world: World) -> list[str] | None:
    """Translate OneFlow's flags to those of launch; None if this process does the work itself."""
    per_node = parallel.num_gpus_per_node
    nodes = parallel.num_nodes
    # A launcher has started this rank already; the flags may only repeat its numbers.
    if world.launcher != "none":
        if per_node * nodes not in (1, world.size):
            raise SettingsError(
                f"{{num_gpus_per_node={per_node}}} x {{num_nodes={nodes}}} are {per_node * nodes} ranks, but "
                f"{world.launcher} started {world.size}; leave these flags out under a launcher, or start "
                f"{per_node * nodes}"
            )
        return None
    ips = parallel.node_ips.addresses if parallel.node_ips else ()
    if nodes > 1 and len(ips) < nodes:
        raise SettingsError(
            f"{{node_ips}} names {len(ips)} addresses, {{num_nodes}} is {nodes}; give one for each machine"
        )
    if per_node * nodes == 1:
        return None
    words = ["--nproc-per-node", str(per_node), "--nnodes", str(nodes)]
    if nodes > 1:
        words += ["--node-ips", ",".join(ips[:nodes])]  # more are spare
    return words
