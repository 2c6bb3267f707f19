"""How the processes of a run connect, are compared, and learn that one is gone.

torch.distributed carries everything. By hand is what it lacks: what goes wrong at the start is minutes of silence and then
a C++ trace. Here ranks count one another on the store before they connect, so that who is missing has a name within
START_SECONDS.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright import device as devices
from meshwright.errors import HANG, UNAVAILABLE, UNEXPECTED, USAGE, UserError
from meshwright.launch.team import Team
from meshwright.launch.world import World

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store, TCPStore

START_SECONDS = 30.0  # from a process's start until all ranks must be there
LAUNCHER_PID = "_MESHWRIGHT_LAUNCHER_PID"  # set by our launcher for what it starts; no setting, hence the underscore


# Connecting.

_minutes = 10.0  # of the time-out that `join` was given
_joined = 0  # times: a second run in these processes must not meet the first one's traces on the store
_hosted: dict[tuple[str, int], TCPStore] = {}  # which serves it too


def join(
    world: World,
    backend: str = "gloo",
    timeout_minutes: float = 10,
    device: torch.device | None = None,
    seconds: float | None = None,
) -> Team:
    """Connect all ranks. `backend` is "gloo", the device's own, or both as "cpu:gloo,cuda:nccl".

    The team's group serves CPU tensors through gloo always. Whoever is not there in time is named.
    """
    global _minutes, _joined
    die_with_parent()
    _minutes = timeout_minutes
    if world.size == 1:
        return Team()
    assert world.address is not None and world.port is not None
    until = deadline(START_SECONDS if seconds is None else seconds)
    hosts = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    place = (world.address, world.port)
    store = _hosted.get(place) or connect(*place, hosts, until, "rank 0")
    if hosts:
        _hosted[place] = store

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    # A restarted run meets again on the same store; another job that came to the wrong port must not be counted.
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    mine = PrefixStore("/".join(["meshwright", *(os.environ.get(n, "0") for n in names), str(_joined)]), store)
    _joined += 1
    try:
        meet(mine, world.rank, world.size, until)
    except UserError:
        if hosts:
            time.sleep(1)  # the others still ask this process what is wrong
        raise
    store.set_timeout(timeout())
    _choose_interface(world.address, world.port)
    if ":" not in backend and backend != "gloo":
        assert device is not None
        backend = f"{device.type}:{backend}"
    if ":" in backend and "cpu:" not in backend:
        backend = f"cpu:gloo,{backend}"
    probe = None
    bound = device if device is not None and device.type != "cpu" else None
    try:
        if world.size > world.local_size:  # between nodes a firewall may pass the store's port and no other
            left = datetime.timedelta(seconds=max(until - time.monotonic(), 10.0))
            probe = dist.ProcessGroupGloo(PrefixStore("probe", mine), world.rank, world.size, left)
        if bound is not None:
            torch.accelerator.set_device_index(bound)
        dist.init_process_group(
            backend, store=PrefixStore("run", mine), rank=world.rank, world_size=world.size, timeout=timeout()
        )  # without a device_id, with which messages between two ranks would wait for those of their whole group
    except RuntimeError as error:
        if explain_lost_rank(error) is None:
            raise
        raise UserError(
            f"rank {world.rank} reached the store at {world.address}:{world.port} but could not connect to every other "
            f"rank: all ports between the nodes must be open ({_first_line(error)})",
            HANG,
        ) from None
    del probe  # not before: others may still have been connecting to it
    team = Team(world.rank, world.size, dist.group.WORLD)
    if bound is not None and backend != "gloo":
        require_own_devices(team, bound)
    return team


def require_own_devices(team: Team, device: torch.device) -> None:
    """Two ranks on one device: NCCL's words for it name neither."""
    holders: dict[str, list[int]] = {}
    for rank, where in enumerate(team.gather(f"{devices.identity(device)} of {socket.gethostname()}")):
        holders.setdefault(where, []).append(rank)
    where, ranks = max(holders.items(), key=lambda item: len(item[1]))
    if len(ranks) > 1:
        raise UserError(
            f"ranks {format_ranks(ranks)} have one {device.type} device between them, {where}: start one rank for each device, and "
            f"see whether {devices.HIDES.get(device.type, 'a variable')} hides the others",
            everywhere=True,
        )


def timeout() -> datetime.timedelta:
    """The time-out of this run's collectives: torch gives a new group its own default, not the first group's."""
    return datetime.timedelta(minutes=_minutes)


def leave() -> None:
    """Give the connections back, after an error too: torch otherwise aborts the process when Python ends."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return

    def destroy() -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    # In a thread, for a device's library may wait there for a rank that is gone.
    ending = threading.Thread(target=destroy, daemon=True)
    ending.start()
    ending.join(10)
    # gloo's threads may still hold the last tensors: giving them back while Python ends would abort the process.
    time.sleep(0.1)


def deadline(seconds: float) -> float:
    """`seconds` after this process's start on time.monotonic(), for importing torch counts; a third of it is left."""
    now = time.monotonic()
    began = now
    with contextlib.suppress(OSError, AttributeError, ValueError, IndexError), open("/proc/self/stat") as f:
        ticks = int(f.read().rpartition(")")[2].split()[19])
        began -= time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return max(began + seconds, now + seconds / 3)


def connect(address: str, port: int, hosts: bool, until: float, who: str) -> TCPStore:
    """The store at address:port, opened by who hosts it (port 0: any free one); what stands in the way, in words.

    Plain sockets try first: torch's store tells its failures as C++ traces, and waits forever for a program that
    accepts the connection and says nothing.
    """
    if hosts:
        _require_free(port)
    else:
        _require_reached(address, port, until, who)
    made: list[TCPStore] = []
    failed: list[RuntimeError] = []

    def make() -> None:
        from torch._C._distributed_c10d import TCPStore

        left = datetime.timedelta(seconds=max(until - time.monotonic(), 1.0))
        try:
            # multi_tenant: an agent of torch in this process that asks for the port gets the same store
            made.append(TCPStore(address, port, None, hosts, left, wait_for_workers=False, multi_tenant=True))
        except RuntimeError as error:
            failed.append(error)

    import torch.distributed  # noqa: F401  before the clock of the thread runs

    thread = threading.Thread(target=make, daemon=True)
    with no_stderr():
        thread.start()
        thread.join(max(until - time.monotonic(), 1.0) + 5)  # a thread within C++ must not see Python end
    if made:
        return made[0]
    if failed and "EADDRINUSE" in str(failed[0]):
        raise _occupied(port)
    if hosts:
        raise UserError(
            f"this is {who}, which must be reached at {address}, and cannot reach itself there: is it an address of this "
            f"machine ({socket.gethostname()})? Set MASTER_ADDR or --master-addr to one",
            UNAVAILABLE,
        )
    raise UserError(
        f"{address}:{port} answers, but not as {who} of this run: another program has the port; choose another "
        "MASTER_PORT or --master-port",
        UNAVAILABLE,
    )


def _require_free(port: int) -> None:
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind((host, port))
            return  # ::, where there is IPv6, stands for both
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _occupied(port) from None
            if error.errno == errno.EACCES:
                raise UserError(f"port {port} needs root's rights: choose one from 1024 on", UNAVAILABLE) from None


def _occupied(port: int) -> UserError:
    return UserError(
        f"port {port} of this machine ({socket.gethostname()}) is in use, perhaps by another run: choose another "
        "MASTER_PORT or --master-port",
        UNAVAILABLE,
    )


def _require_reached(address: str, port: int, until: float, who: str) -> None:
    began = time.monotonic()
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(min(left, 5.0), 0.1)).close()
            return
        except socket.gaierror as error:
            why = f"no address is known by the name {address} ({error.strerror})"
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > until - 0.2:
            raise UserError(
                f"{who} at {address}:{port} could not be reached within {time.monotonic() - began:.0f} s: {why}. Is it "
                "started, are MASTER_ADDR and MASTER_PORT the same everywhere, and does a firewall let the port through?",
                UNAVAILABLE,
            )
        time.sleep(min(0.2, max(left, 0.0)))


def meet(store: Store, me: int, size: int, until: float, noun: str = "rank") -> None:
    """Return when all are here; otherwise everyone raises the same words.

    Every one counts itself; who finds all present, or something wrong, writes the verdict that all wait for. They ask
    again and again, for torch's own waiting writes lines about each time-out.
    """
    try:
        with no_stderr():
            _await_verdict(store, me, size, until, noun)
            verdict = json.loads(store.get("verdict"))
    except RuntimeError as error:
        raise UserError(
            f"{noun} 0, or its launcher, went away while all were gathering: its words tell why", HANG
        ) from error
    if verdict["words"]:
        raise UserError(verdict["words"], verdict["status"])


def _await_verdict(store: Store, me: int, size: int, until: float, noun: str) -> None:
    began = time.monotonic()
    theirs = int(store.compare_set("size", "", str(size)))
    if theirs != size:
        _judge(
            store,
            f"{noun} {me} was started as one of {size} {noun}s, others as one of {theirs}: give all the same number",
            USAGE,
        )
    elif store.add(f"arrived/{me}", 1) > 1:
        _judge(
            store,
            f"two processes came as {noun} {me} of {size}: each needs its own number, or another run has this port",
        )
    elif store.add("count", 1) == size:
        _judge(store, "")
    pause = 0.01
    while not store.check(["verdict"]):
        if time.monotonic() > until:
            missing = [n for n in range(size) if not store.check([f"arrived/{n}"])]
            came = f"{size - len(missing)} of {size} {noun}s came within {time.monotonic() - began:.0f} s"
            gone = f"missing: {noun} {format_ranks(missing)}" if missing else "one of them went away again"
            _judge(store, f"{came}; {gone}. Did it fail before this, or was it not started?", HANG)
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _judge(store: Store, words: str, status: int = UNAVAILABLE) -> None:
    store.compare_set("verdict", "", json.dumps({"words": words, "status": status}))


def _choose_interface(address: str, port: int) -> None:
    """gloo takes the address of the machine's name, which is often 127.0.1.1 or of another network: take the interface
    that leads to rank 0 instead, unless the user chose."""
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        there = {name for _, name in socket.if_nameindex()}
        if not there & set(chosen.split(",")):
            raise UserError(
                f"GLOO_SOCKET_IFNAME={chosen} names no network interface of this machine, which has {', '.join(sorted(there))}"
            )
    if chosen or not sys.platform.startswith("linux"):
        return
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((socket.gethostbyname(address), port))  # sends nothing: it looks up the route
        own = s.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == own:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
                    return


@contextlib.contextmanager
def no_stderr() -> Iterator[None]:
    """The process's own error output goes nowhere: C++ writes to it directly."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def die_with_parent() -> None:
    """A rank ends with our launcher, even when that is killed: else it could train beside the run that follows it."""
    text = os.environ.pop(LAUNCHER_PID, None)  # what this process starts is not the launcher's child
    if not text or not text.isdigit():
        return
    launcher = int(text)
    if os.getppid() == launcher and sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher and not _alive(launcher):  # it went before this was set
        os._exit(UNEXPECTED)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# Comparing.

SHOWN = 20  # differing fields


def require_equal(team: Team, mine: dict[str, Any]) -> None:
    """Named values that must be the same on every rank; everyone raises what differs and who has what."""
    if team.size == 1:
        return
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    if len(set(team.gather(digest))) == 1:
        return
    everyone: list[dict[str, Any]] = team.gather(mine)
    names = list(dict.fromkeys(name for values in everyone for name in values))
    differing = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, values in enumerate(everyone):
            holders.setdefault(_shown(values[name]) if name in values else "nothing", []).append(rank)
        if len(holders) > 1:
            told = [
                f"{value} on rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}" for value, ranks in holders.items()
            ]
            differing.append(f"{name}: {', '.join(told)}")
    if not differing:
        return
    more = [f"and {len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
    head = "the ranks were not started alike; give all of them the same command, files and versions:"
    raise UserError("\n  ".join([head, *differing[:SHOWN], *more]), everywhere=True)


def _shown(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) and value else json.dumps(value, sort_keys=True)


def format_ranks(numbers: list[int]) -> str:
    """0-2, 5 of [0, 1, 2, 5]."""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][-1] + 1:
            out[-1][1:] = [n]
        else:
            out.append([n])
    return ", ".join("-".join(map(str, pair)) for pair in out)


# Losing.


def explain_lost_rank(error: BaseException) -> UserError | None:
    """The words for torch's error when another rank went away or did not answer in time; None for any other error."""
    if not isinstance(error, RuntimeError):
        return None
    import torch.distributed as dist

    text = str(error)
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        gone = True
    elif isinstance(error, dist.DistBackendError):  # NCCL's, wrong use of it among them
        gone = bool(_NCCL.search(text))
    else:
        gone = "gloo/" in text and "enforce fail" not in text and bool(_GLOO.search(text))
        gone |= text.startswith("Application timeout caused pair closure")  # gloo's too, of what waited beside it
    if not gone:
        return None
    return UserError(
        f"another rank ended, or did not answer within --distributed-timeout-minutes {_minutes:g}: its own words, if it "
        f"had any, are above or in its node's log ({_first_line(error)})",
        HANG,
    )


_GLOO = re.compile(
    r"closed by peer|reset by peer|Socket closed|Broken pipe|[Tt]imed? ?out|No route to host|Network is unreachable|"
    r"Connection refused"
)
_NCCL = re.compile(
    r"ncclRemoteError|ncclSystemError|communicator was aborted|[Tt]imed out|[Tt]imeout|Connection (closed|reset)"
)


def _first_line(error: BaseException) -> str:
    """What torch said, without its place in the sources and its advice."""
    line = str(error).strip().split("\n")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).split(". This is typically")[0][:200]
