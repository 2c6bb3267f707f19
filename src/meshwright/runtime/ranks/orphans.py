"""End a rank whose launcher is gone: it would train on for ever, beside the next run.

A launcher that gets SIGKILL cannot stop its ranks. Our own launcher, and torchrun as the direct
parent, start ranks from their main thread, so the kernel can kill these ranks: PR_SET_PDEATHSIG
fires when the thread that forked ends. Others start ranks from threads that end early (Open MPI)
or through a program between; there a thread waits for the end of those processes.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from meshwright.base.errors import UNEXPECTED
from meshwright.runtime.ranks.processes import inspect_process, read_proc
from meshwright.runtime.ranks.world import in_srun

# set by our launcher for its ranks; not a setting, hence the underscore
LAUNCHER_PID = "_MESHWRIGHT_LAUNCHER_PID"
POLL_SECONDS = 1.0  # between two looks where the kernel has no pidfd
PR_SET_PDEATHSIG = 1

# Variables that only launchers set. RANK is none: people set it in a shell, and leave that.
TORCHRUN = "TORCHELASTIC_RUN_ID"
DEEPSPEED = "CROSS_RANK"
SLURM = "SLURM_PROCID"
LAUNCH_VARIABLES = (TORCHRUN, DEEPSPEED, "OMPI_COMM_WORLD_RANK", "PMI_RANK", SLURM)
# No launchers, even if a child has variables that these lack: who leaves a shell leaves a run.
NO_LAUNCHERS = {
    "sh",
    "bash",
    "dash",
    "zsh",
    "fish",
    "ksh",
    "csh",
    "tcsh",
    "tmux",
    "screen",
    "sshd",
    "login",
    "su",
    "sudo",
    "init",
    "systemd",
}

_watched = False


def die_with_launcher() -> None:
    """End with the launcher that started this process; do nothing without one."""
    global _watched
    own = os.environ.pop(LAUNCHER_PID, None)  # children of this process are not the launcher's
    if own and own.isdigit():
        _watched = True
        _die_with_parent(int(own))
    elif _watched or not sys.platform.startswith("linux"):
        return
    elif pids := launchers(os.environ):
        _watched = True
        # torchrun forks its ranks from its main thread, so that the kernel can end them with it.
        if TORCHRUN in os.environ and len(pids) == 1:
            _die_with_parent(pids[0])
        threading.Thread(target=_end_with, args=(pids,), name="launcher", daemon=True).start()
    elif _has_lost_torchrun(os.environ):
        os.write(2, b"torchrun ended before this rank began; start the run again\n")
        os._exit(UNEXPECTED)


def _die_with_parent(launcher: int) -> None:
    if os.getppid() == launcher and sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        try:
            os.kill(launcher, 0)
        except OSError:  # it ended before this was set
            os._exit(UNEXPECTED)


def _has_lost_torchrun(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun, an ancestor while it lives, ended before this process looked."""
    if not {TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_RANK"} <= environ.keys():
        return False
    pid = os.getppid()
    while pid > 1:
        name, parent, inherited = inspect_process(pid)
        if inherited.get(TORCHRUN) != environ[TORCHRUN]:
            return name in ("systemd", "init")  # of a user, which takes in the children of the dead
        pid = parent
    first = read_proc(1, "cmdline").split(b"\0")[0]
    # in a container, torchrun may be the first process
    return pid == 1 and first != b"" and b"python" not in first


def launchers(environ: Mapping[str, str]) -> list[int]:
    """Return the processes from our parent to the one that set the launcher's variables, or none.

    That one is the nearest ancestor that was itself started without them. Several launchers may be
    nested (srun starts torchrun); programs between them and us (bash, numactl) count as well.
    """
    marks = {
        name: environ[name]
        for name in LAUNCH_VARIABLES
        if name in environ and (name != SLURM or in_srun(environ))
    }
    chain: list[int] = []
    length = 0  # of the chain up to the one that set the variables
    pid = os.getppid()
    while marks and pid > 1:
        name, parent, inherited = inspect_process(pid)
        chain.append(pid)
        for mark in [n for n, value in marks.items() if inherited.get(n) != value]:
            if name in NO_LAUNCHERS:
                return chain[:length]
            del marks[mark]
            length = len(chain)
            # deepspeed starts one more program on each machine, which sets the variables.
            if mark == DEEPSPEED and parent > 1 and b"deepspeed" in read_proc(parent, "cmdline"):
                chain.append(parent)
                length = len(chain)
                parent = inspect_process(parent)[1]
        pid = parent
    return chain[:length]


def _end_with(pids: list[int]) -> None:
    """Wait until one of these processes ends; then end this one at once, as PDEATHSIG would."""
    parent = pids[0]
    try:
        poll = select.poll()
        for pid in pids:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        while os.getppid() == parent and not poll.poll():
            pass
    except ProcessLookupError:
        pass  # it has ended already
    except (AttributeError, OSError):  # an old kernel, or a sandbox
        while os.getppid() == parent and all(Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
