"""How the processes of a run connect, check that they agree, and find out that one is gone.

torch.distributed carries everything, but if something goes wrong at the start, it is silent for
minutes and then prints a C++ trace. Here the ranks first count one another on the store, so that a
missing rank is named within START_SECONDS.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from meshwright import device as devices
from meshwright.errors import HANG, UNAVAILABLE, USAGE, UserError
from meshwright.ranks.orphans import die_with_launcher
from meshwright.ranks.team import Team
from meshwright.ranks.world import START_SECONDS, World

SILENCE = 10  # seconds of waiting before it is said for whom

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store, TCPStore


# Connecting

_minutes = 10.0  # the time-out that `join` was given
_patience = 1  # times as long torch waits, where a watchdog decides
_joined = 0  # how often `join` ran: a second run in these processes needs fresh keys on the store
_store: tuple[TCPStore, str] | None = None  # the store of this run, and its prefix there
_hosted: dict[tuple[str, int], TCPStore] = {}  # the stores that this process serves


def join(
    world: World,
    backend: str = "gloo",
    timeout_minutes: float = 10,
    device: torch.device | None = None,
    seconds: float | None = None,
    is_watched: bool = False,
) -> Team:
    """Connect all ranks; raise UserError with the missing ones if they do not come in `seconds`.

    `backend` is "gloo", the device's own, or both as "cpu:gloo,cuda:nccl". The team's group always
    serves CPU tensors, through gloo. With `is_watched` the caller starts a watchdog, and torch's
    own time-outs are a last resort.
    """
    global _minutes, _patience
    die_with_launcher()
    _minutes, _patience = timeout_minutes, 3 if is_watched else 1
    if world.size == 1:
        return Team()
    until = deadline(START_SECONDS if seconds is None else seconds)
    store, prefix = _open_store(world, until)

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if ":" not in backend and backend != "gloo":
        assert device is not None
        backend = f"{device.type}:{backend}"
    if ":" in backend and "cpu:" not in backend:
        backend = f"cpu:gloo,{backend}"
    probe = None
    bound = device if device is not None and device.type != "cpu" else None
    try:
        if world.size > world.local_size:  # between nodes a firewall may allow only the store's port
            left = datetime.timedelta(seconds=max(until - time.monotonic(), 10.0))
            probe = dist.ProcessGroupGloo(PrefixStore(f"{prefix}/probe", store), world.rank, world.size, left)
        if bound is not None:
            torch.accelerator.set_device_index(bound)
        # No device_id: with it, messages between two ranks would wait for those of their group.
        run = PrefixStore(f"{prefix}/run", store)
        # All ranks meet in this group, perhaps while one of them saves for long.
        longest = max(timeout(), datetime.timedelta(days=1)) if is_watched else timeout()
        dist.init_process_group(backend, store=run, rank=world.rank, world_size=world.size, timeout=longest)
    except RuntimeError as error:
        if explain_lost_rank(error) is None:
            raise
        raise UserError(
            f"rank {world.rank} reached the store at {world.address}:{world.port} but not every other rank; open all "
            f"ports between the nodes ({_first_line(error)})",
            HANG,
        ) from None
    del probe  # not earlier: others may still have been connecting to it
    team = Team(world.rank, world.size, dist.group.WORLD)
    if bound is not None and backend != "gloo":
        require_own_devices(team, bound)
    return team


def _open_store(world: World, until: float) -> tuple[TCPStore, str]:
    """Meet all ranks on the store of rank 0 or of torch's agent; return it and a key prefix."""
    global _joined, _store
    assert world.address is not None and world.port is not None
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = world.rank == 0 and not is_agents
    place = (world.address, world.port)
    store = _hosted.get(place) or connect(*place, hosts, until, "rank 0")
    if hosts:
        _hosted[place] = store

    from torch._C._distributed_c10d import PrefixStore

    # A restarted run meets on the same store of an agent; ranks of other jobs must not be counted.
    names = ("TORCHELASTIC_RUN_ID", *["TORCHELASTIC_RESTART_COUNT"] * is_agents)
    prefix = "/".join(["meshwright", *(os.environ.get(n, "0") for n in names), str(_joined)])
    _joined += 1
    met = threading.Event()
    try:
        if world.launcher == "torchrun" and is_agents:
            prefix = f"meshwright/{_name_attempt(PrefixStore('meshwright/names', store), world.rank, until, met)}"
        meet(PrefixStore(prefix, store), world.rank, world.size, until)
    except UserError:
        if hosts:
            time.sleep(1)  # the others still read the reason from this process
        raise
    finally:
        met.set()
    store.set_timeout(timeout())
    _store = store, prefix
    _choose_interface(world.address, world.port)
    return store, prefix


def _name_attempt(store: Store, me: int, until: float, met: threading.Event) -> str:
    """Return the name that rank 0 gives this attempt on a store that serves several.

    When machines come or go, torchrun starts all ranks anew with the same restart count, which
    those that came later do not even share. So each rank leaves a random word, and rank 0 answers
    every word until all have met.
    """
    mine = uuid.uuid4().hex
    if me > 0:
        with no_stderr():
            store.set(f"word/{store.add('words', 1)}", mine)
            while not store.check([f"answer/{mine}"]):
                if time.monotonic() > until:
                    raise UserError("rank 0 did not come in time; start it, or see in its log why it ended", HANG)
                time.sleep(0.02)
            return store.get(f"answer/{mine}").decode()

    def answer() -> None:
        waiting: set[int] = set()
        known = 0
        with contextlib.suppress(RuntimeError):  # the store is closed
            while not met.wait(0.02):
                if (last := store.add("words", 0)) > known:
                    waiting |= set(range(known + 1, last + 1))
                    known = last
                for n in [n for n in waiting if store.check([f"word/{n}"])]:
                    store.set(f"answer/{store.get(f'word/{n}').decode()}", mine)
                    waiting.remove(n)

    threading.Thread(target=answer, daemon=True).start()
    return mine


def require_own_devices(team: Team, device: torch.device) -> None:
    """Raise UserError if two ranks use one device; NCCL's own error names neither."""
    holders: dict[str, list[int]] = {}
    for rank, where in enumerate(team.gather(f"{devices.identity(device)} of {socket.gethostname()}")):
        holders.setdefault(where, []).append(rank)
    where, ranks = max(holders.items(), key=lambda item: len(item[1]))
    if len(ranks) > 1:
        raise UserError(
            f"ranks {format_ranks(ranks)} share one {device.type} device, {where}; start one rank per device, or check "
            f"whether {devices.HIDES.get(device.type, 'a variable')} hides the others",
            everywhere=True,
        )


def timeout() -> datetime.timedelta:
    """Return the time-out of this run's collectives; torch would give a new group its default."""
    return datetime.timedelta(minutes=_patience * _minutes)


def own_store(name: str) -> Store:
    """Return the run's store for another thread: on a connection and under a prefix of its own."""
    from torch._C._distributed_c10d import PrefixStore

    assert _store is not None
    store, prefix = _store
    return PrefixStore(f"{prefix}/{name}", store.clone())  # type: ignore[attr-defined]


def leave() -> None:
    """Close the connections, after an error too: otherwise torch aborts the process at its end."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return

    def destroy() -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    # In a thread, because a device's library may wait here for a rank that is gone.
    ending = threading.Thread(target=destroy, daemon=True)
    with contextlib.suppress(RuntimeError):  # there may be no memory for a thread
        ending.start()
        ending.join(10)
    # gloo's threads may still hold the last tensors; freeing them while Python ends would abort it.
    time.sleep(0.1)


def deadline(seconds: float) -> float:
    """Return the time.monotonic() of this process's age of `seconds`, or a third from now."""
    began = now = time.monotonic()
    with contextlib.suppress(OSError, AttributeError, ValueError, IndexError), open("/proc/self/stat") as f:
        ticks = int(f.read().rpartition(")")[2].split()[19])
        began -= time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return max(began + seconds, now + seconds / 3)


def connect(address: str, port: int, hosts: bool, until: float, who: str) -> TCPStore:
    """Return the store at address:port, which the host opens (port 0: any free one).

    `who` names the host in errors. Plain sockets try first: torch's store reports failures as C++
    traces, and waits forever for a program that accepts the connection and sends nothing.
    """
    listening = None
    if hosts:
        port, listening = _listen(address, port)
    else:
        _require_reached(address, port, until, who)
    made: list[TCPStore] = []
    failed: list[RuntimeError] = []

    def make() -> None:
        from torch._C._distributed_c10d import TCPStore

        left = datetime.timedelta(seconds=max(until - time.monotonic(), 1.0))
        # multi_tenant: torch's agent in this process gets the same store when it asks for it
        more = {"wait_for_workers": False, "multi_tenant": True, "master_listen_fd": listening}
        try:
            made.append(TCPStore(address, port, None, hosts, left, **more))  # type: ignore[arg-type]
        except RuntimeError as error:
            failed.append(error)

    import torch.distributed  # noqa: F401  importing must not count as waiting

    thread = threading.Thread(target=make, daemon=True)
    with no_stderr():
        thread.start()
        thread.join(max(until - time.monotonic(), 1.0) + 5)  # Python must not end while a thread is in C++
    if made:
        return made[0]
    if failed and "EADDRINUSE" in str(failed[0]):
        raise _occupied(port)
    if hosts:
        raise UserError(
            f"this is {who}, but cannot reach itself at {address}; set MASTER_ADDR or --master-addr to an address of "
            f"this machine ({socket.gethostname()})",
            UNAVAILABLE,
        )
    raise UserError(
        f"{address}:{port} answers, but not as {who} of this run; choose another MASTER_PORT or --master-port",
        UNAVAILABLE,
    )


def _listen(address: str, port: int) -> tuple[int, int | None]:
    """Return the port and, if no other machine can reach the address, a socket that listens there.

    torch's own would listen on all addresses of this machine, and nobody who connects is asked for
    a secret. A name of this machine is no such address: others may find a network's behind it.
    """
    _require_free(port)
    if address != "localhost" and not address.startswith("127."):
        return port, None
    try:
        own = socket.create_server((address, port), backlog=1024)
    except OSError:
        raise _occupied(port) from None
    return own.getsockname()[1], own.detach()


def _require_free(port: int) -> None:
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind((host, port))
            return  # with IPv6, :: stands for both
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _occupied(port) from None
            if error.errno == errno.EACCES:
                raise UserError(f"port {port} needs root privileges; choose one from 1024", UNAVAILABLE) from None


def _occupied(port: int) -> UserError:
    return UserError(
        f"port {port} of this machine ({socket.gethostname()}) is in use; choose another MASTER_PORT or --master-port",
        UNAVAILABLE,
    )


def _require_reached(address: str, port: int, until: float, who: str) -> None:
    began, is_silent = time.monotonic(), True
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(min(left, 5.0), 0.1)).close()
            return
        except socket.gaierror as error:
            why = f"the name {address} has no address ({error.strerror})"
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > until - 0.2:
            raise UserError(
                f"{who} at {address}:{port} could not be reached within {time.monotonic() - began:.0f} s: {why}; check "
                "that it was started, with the same MASTER_ADDR and MASTER_PORT, and that no firewall blocks the port",
                UNAVAILABLE,
            )
        if is_silent and time.monotonic() - began > SILENCE:
            is_silent = False
            text = f"waiting for {who} at {address}:{port}, up to {max(left, 0):.0f} s more: {why}"
            print(text, file=sys.stderr, flush=True)
        time.sleep(min(0.2, max(left, 0.0)))


def meet(store: Store, me: int, size: int, until: float, noun: str = "rank") -> None:
    """Return when all are here; otherwise raise the same UserError in every process.

    Each process counts itself; the one that finds all present, or a problem, writes the verdict
    that all wait for. They poll, because torch's own waiting prints lines about each time-out.
    """
    try:
        with os.fdopen(os.dup(2), "w") as stderr, no_stderr():
            _await_verdict(store, me, size, until, noun, stderr)
            verdict = json.loads(store.get("verdict"))
    except RuntimeError as error:
        raise UserError(f"{noun} 0, or its launcher, exited during startup; see its log", HANG) from error
    if verdict["problem"]:
        raise UserError(verdict["problem"], verdict["status"])


def _await_verdict(store: Store, me: int, size: int, until: float, noun: str, stderr: TextIO) -> None:
    began, is_silent = time.monotonic(), me == 0
    theirs = int(store.compare_set("size", "", str(size)))
    if theirs != size:
        problem = f"{noun} {me} was started as one of {size} {noun}s, others as one of {theirs}"
        _set_verdict(store, f"{problem}; give all the same number", USAGE)
    elif store.add(f"arrived/{me}", 1) > 1:
        problem = f"two processes came as {noun} {me} of {size}; give each its own number"
        _set_verdict(store, f"{problem}, or choose another port if another run uses this one")
    elif store.add("count", 1) == size:
        _set_verdict(store, "")
    pause = 0.01
    while not store.check(["verdict"]):
        now = time.monotonic()
        if now > until or (is_silent and now - began > SILENCE):
            missing = [n for n in range(size) if not store.check([f"arrived/{n}"])]
        if is_silent and now - began > SILENCE and missing:
            is_silent = False
            text = f"waiting for {noun} {format_ranks(missing)}, up to {max(until - now, 0):.0f} s more"
            print(text, file=stderr, flush=True)
        if now > until:
            came = f"{size - len(missing)} of {size} {noun}s came within {time.monotonic() - began:.0f} s"
            gone = f"missing: {noun} {format_ranks(missing)}" if missing else "one of them has exited"
            _set_verdict(store, f"{came}; {gone}. Start it, or see in its log why it ended", HANG)
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _set_verdict(store: Store, problem: str, status: int = UNAVAILABLE) -> None:
    store.compare_set("verdict", "", json.dumps({"problem": problem, "status": status}))


def _choose_interface(address: str, port: int) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to rank 0, unless the user chose one.

    gloo itself takes that of the machine's name, often 127.0.1.1 or of another network.
    """
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        names = sorted(name for _, name in socket.if_nameindex())
        if not {*names} & {*chosen.split(",")}:
            has = f"which has {', '.join(names)}"
            raise UserError(f"GLOO_SOCKET_IFNAME={chosen} names no network interface of this machine, {has}")
    if chosen or not sys.platform.startswith("linux"):
        return
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((socket.gethostbyname(address), port))  # sends nothing; it looks up the route
        own = s.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == own:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
                    return


@contextlib.contextmanager
def no_stderr() -> Iterator[None]:
    """Discard the process's error output, to which C++ code writes directly."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# Comparing

SHOWN = 20  # differing values that an error lists


def require_equal(team: Team, mine: dict[str, Any]) -> None:
    """Raise UserError on every rank if these named values differ; it lists who has which."""
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
            each = [f"{value} on rank{'s' * (len(r) > 1)} {format_ranks(r)}" for value, r in holders.items()]
            differing.append(f"{name}: {', '.join(each)}")
    if not differing:
        return
    more = [f"and {len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
    head = "the ranks were started differently; give all of them the same command, files and versions:"
    raise UserError("\n  ".join([head, *differing[:SHOWN], *more]), everywhere=True)


def _shown(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) and value else json.dumps(value, sort_keys=True)


def format_ranks(numbers: list[int]) -> str:
    """Return [0, 1, 2, 5] as "0-2, 5"."""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][-1] + 1:
            out[-1][1:] = [n]
        else:
            out.append([n])
    return ", ".join("-".join(map(str, pair)) for pair in out)


# Losing a rank

# Seconds for the reporting rank to print: a launcher stops all ranks when the first one ends.
REPORT_SECONDS = 3.0


def error_to_report(error: Exception, here: World) -> Exception:
    """Return the error that this rank should print; its text is empty if another rank does."""
    reported = (explain_lost_rank(error) if here.size > 1 else None) or error
    if not isinstance(reported, UserError) or here.size == 1:
        return reported
    message = str(reported)
    if not reported.everywhere:
        message = f"rank {here.rank}: {message}" if here.rank else message
    elif here.local_rank:  # the first rank of each machine prints it
        time.sleep(REPORT_SECONDS)
        message = ""
    return UserError(message, reported.status, everywhere=True)


@contextlib.contextmanager
def reporting(here: World, explain: Callable[[Exception], Exception | None] = lambda error: None) -> Iterator[None]:
    """Raise the errors of the block as this rank should print them, and leave at its end.

    `explain` may return a better error in the place of one.
    """
    try:
        yield
    except Exception as error:
        reported = error_to_report(explain(error) or error, here)
        if reported is error:
            raise
        raise reported from error
    finally:
        leave()


def explain_lost_rank(error: BaseException) -> UserError | None:
    """Return the error to raise for torch's if another rank exited or did not answer, else None."""
    if not isinstance(error, RuntimeError):
        return None
    import torch.distributed as dist

    text = str(error)
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        is_gone = True
    elif isinstance(error, dist.DistBackendError):  # NCCL's, wrong usage included
        is_gone = bool(_NCCL.search(text))
    else:
        is_gone = "gloo/" in text and "enforce fail" not in text and bool(_GLOO.search(text))
        is_gone |= text.startswith("Application timeout caused pair closure")  # gloo's, for others that waited
    if not is_gone:
        return None
    return UserError(
        f"another rank ended, or did not answer within --distributed-timeout-minutes {_minutes:g}; its own error, if "
        f"any, is above or in its node's log ({_first_line(error)})",
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
    """Return torch's message without its source location and advice."""
    line = str(error).strip().split("\n")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).split(". This is typically")[0][:200]
