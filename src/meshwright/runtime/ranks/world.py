"""This process's place among the ranks, from the variables that its launcher set."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.base.errors import UserError
from meshwright.config.problem import SettingsError
from meshwright.runtime.ranks.processes import inspect_process

START_SECONDS = 30.0  # from the start of a process until all ranks must be there
# set by an elastic launch for its ranks: with how many it starts, and why
ATTEMPT = "_MESHWRIGHT_ATTEMPT"
RUN_ID = "meshwright-"  # how TORCHELASTIC_RUN_ID begins under our launcher
LOOPBACK = ("localhost", "127.0.0.1", "::1")
VARIABLES = "RANK and WORLD_SIZE"  # the name of a launcher that sets no variable of its own
OR_UNSET = " or, for one process, `unset RANK WORLD_SIZE`"


@dataclass(frozen=True)
class World:
    """The place that the launcher gave this process; without a launcher it is World()."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str | None = None  # where rank 0 listens
    port: int | None = None
    launcher: str = "none"


def find_world(environ: Mapping[str, str], local_rank: int | None = None) -> World:
    """Return this process's place; `local_rank` is the flag of some launchers, LOCAL_RANK wins.

    torchrun's variables come first, because srun or mpirun may start torchrun itself; then MPI's,
    whose processes may run inside a SLURM step of other sizes; then srun's.
    """
    if "RANK" in environ:
        return _by_torch(environ, local_rank)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _by_mpi(environ, "OpenMPI", "OMPI_COMM_WORLD_")
    # srun may set PMI's variables too; then they say the same as its own.
    pmi = (environ.get("PMI_RANK"), environ.get("PMI_SIZE"))
    if pmi[0] is not None and pmi != (environ.get("SLURM_PROCID"), environ.get("SLURM_NTASKS")):
        return _by_mpi(environ, "MPI", "PMI_")
    if in_srun(environ):
        return _by_slurm(environ)
    if "WORLD_SIZE" in environ and _number(environ, "WORLD_SIZE") > 1:
        size = environ["WORLD_SIZE"]
        raise UserError(
            f"WORLD_SIZE={size} is set and RANK is not; set RANK for each process, or unset WORLD_SIZE"
        )
    return World(local_rank=local_rank or 0)


def _by_torch(environ: Mapping[str, str], flag: int | None) -> World:
    """torchrun, torch.distributed.launch, deepspeed, and ours."""
    if "WORLD_SIZE" not in environ:
        raise UserError(f"RANK={environ['RANK']} is set and WORLD_SIZE is not; set both{OR_UNSET}")
    rank = _number(environ, "RANK")
    size = _number(environ, "WORLD_SIZE")
    address, port = _master(environ)
    if size > 1:
        wanted = {"MASTER_ADDR": address, "MASTER_PORT": port}
        absent = [name for name, value in wanted.items() if value is None]
        if absent:
            missing = " and ".join(absent)
            verb, them = ("are", "them") if len(absent) > 1 else ("is", "it")
            raise UserError(
                f"WORLD_SIZE={size} is set, but {missing} {verb} not; set {them} to where rank 0 listens{OR_UNSET}"
            )
    one_node = address in LOOPBACK
    # Without variables of its own, a rank is alone on its node, unless all are on this one.
    given_size = _first_number(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    local_rank = _first_number(environ, "LOCAL_RANK")
    if local_rank is None:
        local_rank = flag
    if local_rank is None:
        local_rank = rank if one_node else 0
    local_size = given_size
    if local_size is None:
        local_size = size if one_node else local_rank + 1
    # Messages name what started the rank, and some code depends on it.
    by = "deepspeed" if "CROSS_RANK" in environ else VARIABLES
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if run_id is not None:
        by = "meshwright launch" if run_id.startswith(RUN_ID) else "torchrun"
    world = World(rank, size, local_rank, local_size, address, port, by)
    return _checked(world, "RANK", "WORLD_SIZE")


def _by_mpi(environ: Mapping[str, str], by: str, prefix: str) -> World:
    if f"{prefix}SIZE" not in environ:
        raise UserError(f"{prefix}RANK={environ[f'{prefix}RANK']} is set and {prefix}SIZE is not")
    rank = _number(environ, f"{prefix}RANK")
    size = _number(environ, f"{prefix}SIZE")
    # The second names are Hydra's, the launcher of MPICH and Intel MPI.
    local_rank = _first_number(environ, f"{prefix}LOCAL_RANK", "MPI_LOCALRANKID")
    count = _first_number(environ, f"{prefix}LOCAL_SIZE", "MPI_LOCALNRANKS")
    address, port = _master(environ)
    is_one_node = count is None or count == size  # unless it is known to be otherwise
    if size > 1 and address is None:
        if not is_one_node:
            raise UserError(
                f"{by} started {size} ranks, {count} of them on this node; set MASTER_ADDR to rank 0's node and pass "
                "it on (mpirun -x MASTER_ADDR, or -genv)"
            )
        address = "127.0.0.1"
    if size > 1 and port is None:
        names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID")
        job = next((environ[n] for n in names if n in environ), "")
        if not (job or is_one_node):
            raise UserError(
                f"{by} started {size} ranks on several nodes; set MASTER_PORT to a free port there"
            )
        # Processes of one job have its number in common, or their launcher on one node.
        port = _port(job or str(_started_by(f"{prefix}RANK", environ)))
    if local_rank is None:
        local_rank = rank
    if count is None:
        count = size
    world = World(rank, size, local_rank, count, address, port, by)
    return _checked(world, f"{prefix}RANK", f"{prefix}SIZE")


def _started_by(variable: str, environ: Mapping[str, str]) -> int:
    """Return the process that gave this rank its variable: scripts may lie between the two."""
    pid = os.getppid()
    while pid > 1:
        _, parent, inherited = inspect_process(pid)
        if inherited.get(variable) != environ[variable]:
            return pid
        pid = parent
    return os.getppid()


def in_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process; a batch script has such variables too."""
    if "SLURM_PROCID" not in environ or environ.get("SLURM_NTASKS", "1") == "1":
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    return step is not None or environ.get("ENVIRONMENT") != "BATCH"


def _by_slurm(environ: Mapping[str, str]) -> World:
    rank = _number(environ, "SLURM_PROCID")
    size = _number(environ, "SLURM_NTASKS")
    address, port = _master(environ)
    if address is None:
        names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
        nodes = next((environ[name] for name in names if name in environ), None)
        if not nodes:
            raise UserError(
                f"srun started {size} ranks without SLURM_NODELIST; set MASTER_ADDR to rank 0's node, which is "
                "localhost if all are on this machine"
            )
        address = first_host(nodes)
    if port is None:
        # Steps of one job may run side by side.
        job = environ.get("SLURM_JOB_ID", "0")
        step = environ.get("SLURM_STEP_ID", "0")
        port = _port(f"{job}.{step}")
    # srun says how many tasks a node has; variables set by hand often do not.
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    if per_node is None:
        local_size = _first_number(environ, "SLURM_NTASKS_PER_NODE")
    else:
        node = _first_number(environ, "SLURM_NODEID") or 0
        counts = tasks_per_node(per_node)
        local_size = counts[min(node, len(counts) - 1)]
    nodes_of_step = _first_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    is_one_node = local_size == size or nodes_of_step == 1 or address in LOOPBACK
    local_rank = _first_number(environ, "SLURM_LOCALID")
    if local_rank is None:
        local_rank = rank if is_one_node else 0
    if local_size is None:
        local_size = size if is_one_node else local_rank + 1
    world = World(rank, size, local_rank, local_size, address, port, "srun")
    return _checked(world, "SLURM_PROCID", "SLURM_NTASKS")


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's list: node01 for node[01-03,07],gpu5."""
    # Up to the first comma outside of brackets; of these, their first number.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes.strip())
    if first is None:
        return nodes
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node: [2, 2, 2, 1] for SLURM's 2(x3),1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UserError(f"SLURM_TASKS_PER_NODE={text} is not of the form 2(x3),1")
        times = int((match[2] or "1")[:7])  # of more digits too, it is above the limit
        if not 0 < times <= 10**6:
            raise UserError(
                f"SLURM_TASKS_PER_NODE={text[:100]}: x{match[2]} is not a number of nodes"
            )
        counts += [int(match[1])] * times
    return counts


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise UserError(f"{name}={text!r} in the environment is not a whole number from 0")
    return int(text)


def _first_number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the number in the first of some variables that is set."""
    for name in names:
        if name in environ:
            return _number(environ, name)
    return None


def _master(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    address = environ.get("MASTER_ADDR") or None
    if not environ.get("MASTER_PORT"):
        return address, None
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT={port} is not a port; use 1 to 65535")
    return address, port


def _port(job: str) -> int:
    """Return a port for the job, the same in all its processes, below those that systems assign."""
    return 20000 + zlib.crc32(job.encode()) % 10000


def _checked(world: World, rank: str, size: str) -> World:
    if world.size < 1:
        raise UserError(f"{size}={world.size}: there must be at least 1 process")
    if world.rank >= world.size:
        raise UserError(
            f"{rank}={world.rank} does not fit {size}={world.size}: ranks count from 0 to {world.size - 1}"
        )
    if world.local_size > world.size:
        raise UserError(
            f"{world.local_size} ranks on this node, but {size}={world.size}: the variables disagree"
        )
    if world.local_rank >= world.local_size:
        raise UserError(
            f"local rank {world.local_rank} does not fit {world.local_size} ranks on this node; count from 0"
        )
    return world


def number_of(words: Sequence[str], flag: str) -> int | None:
    """Return the number that a launcher's flag has on a command line that is not parsed yet.

    As for other flags, `-` and `_` are the same, and the last one counts.
    """
    number = None
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") == flag:
            text = value if has_value else following
            number = int(text) if re.fullmatch(r"\d{1,9}", text) else number
    return number


def require_world_size(world: World, wanted: int | None) -> None:
    """Raise UserError if the flag --world-size differs from what the launcher started."""
    if wanted is None or wanted == world.size:
        return
    by = f"{world.size}, by {world.launcher}"
    if world.launcher == "none":
        by = "one process, without a launcher"
    raise SettingsError(
        f"{{world_size={wanted}}}, but started as {by}; start {wanted}, as with meshwright launch --nproc-per-node "
        f"{wanted}, or change {{world_size}} to {world.size}"
    )


def is_idle(world: World, ranks: int, work: str) -> bool:
    """Return whether `work` needs fewer ranks than were started, and not this one; then say so."""
    if world.rank < ranks:
        return False
    where = f"ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0"
    print(f"{work} runs on {where}; this rank has nothing to do", file=sys.stderr)
    return True
