"""This process's place among the ranks, from the variables that its launcher set."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.base.errors import UserError
from meshwright.config.problem import SettingsError

START_SECONDS = 30.0  # from the start of a process until all ranks must be there
# set by an elastic launch for its ranks: with how many it starts, and why
ATTEMPT = "_MESHWRIGHT_ATTEMPT"
RUN_ID = "meshwright-"  # how TORCHELASTIC_RUN_ID begins under our launcher
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
        missing = " and ".join(
            n for n, v in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if v is None
        )
        if missing:
            verb, them = ("are", "them") if " " in missing else ("is", "it")
            raise UserError(
                f"WORLD_SIZE={size} is set, but {missing} {verb} not; set {them} to where rank 0 listens{OR_UNSET}"
            )
    one_node = address in ("localhost", "127.0.0.1", "::1")
    name = next((n for n in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if n in environ), None)
    local_size = _number(environ, name) if name else size if one_node else 1
    if "LOCAL_RANK" in environ:
        local_rank = _number(environ, "LOCAL_RANK")
    else:  # alone on its node, unless all ranks are on this one
        local_rank = flag if flag is not None else rank if one_node else 0
        local_size = max(local_size, local_rank + 1) if name is None else local_size
    by = "deepspeed" if "CROSS_RANK" in environ else VARIABLES
    if "TORCHELASTIC_RUN_ID" in environ:
        by = (
            "meshwright launch" if environ["TORCHELASTIC_RUN_ID"].startswith(RUN_ID) else "torchrun"
        )
    return _checked(
        World(rank, size, local_rank, local_size, address, port, by), "RANK", "WORLD_SIZE"
    )


def _by_mpi(environ: Mapping[str, str], by: str, prefix: str) -> World:
    if f"{prefix}SIZE" not in environ:
        raise UserError(f"{prefix}RANK={environ[f'{prefix}RANK']} is set and {prefix}SIZE is not")
    rank = _number(environ, f"{prefix}RANK")
    size = _number(environ, f"{prefix}SIZE")
    # The second names are Hydra's, the launcher of MPICH and Intel MPI.
    local_rank = next(
        (_number(environ, n) for n in (f"{prefix}LOCAL_RANK", "MPI_LOCALRANKID") if n in environ),
        None,
    )
    count = next(
        (_number(environ, n) for n in (f"{prefix}LOCAL_SIZE", "MPI_LOCALNRANKS") if n in environ),
        None,
    )
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
        port = _port(job or str(os.getppid()))
    local_rank = rank if local_rank is None else local_rank
    world = World(rank, size, local_rank, size if count is None else count, address, port, by)
    return _checked(world, f"{prefix}RANK", f"{prefix}SIZE")


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
    nodes = environ.get(
        "SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", environ.get("SLURM_JOB_NODELIST"))
    )
    if address is None:
        if not nodes:
            raise UserError(
                f"srun started {size} ranks without SLURM_NODELIST; set MASTER_ADDR to rank 0's node"
            )
        address = first_host(nodes)
    if port is None:
        # Steps of one job may run side by side.
        port = _port(".".join(environ.get(n, "0") for n in ("SLURM_JOB_ID", "SLURM_STEP_ID")))
    local_rank = _number(environ, "SLURM_LOCALID") if "SLURM_LOCALID" in environ else 0
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    if per_node is not None:
        node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
        counts = tasks_per_node(per_node)
        local_size = counts[min(node, len(counts) - 1)]
    else:
        local_size = (
            _number(environ, "SLURM_NTASKS_PER_NODE")
            if "SLURM_NTASKS_PER_NODE" in environ
            else local_rank + 1
        )
    world = World(rank, size, local_rank, local_size, address, port, "srun")
    return _checked(world, "SLURM_PROCID", "SLURM_NTASKS")


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's list: node01 for node[01-03,07],gpu5."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes.strip())
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else nodes


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node: [2, 2, 2, 1] for SLURM's 2(x3),1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UserError(f"SLURM_TASKS_PER_NODE={text} is not of the form 2(x3),1")
        times = int((match[2] or "1")[:7])
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


def _master(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    port = _number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None
    if port is not None and not 0 < port < 65536:
        raise UserError(f"MASTER_PORT={port} is not a port; use 1 to 65535")
    return environ.get("MASTER_ADDR") or None, port


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


def require_world_size(world: World, wanted: int | None) -> None:
    """Raise UserError if the flag --world-size differs from what the launcher started."""
    if wanted is not None and wanted != world.size:
        by = (
            "one process, without a launcher"
            if world.launcher == "none"
            else f"{world.size}, by {world.launcher}"
        )
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
