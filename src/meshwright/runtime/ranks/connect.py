"""Connect the ranks of a run, on the store of rank 0 or of torch's agent.

torch.distributed carries everything, but if something goes wrong at the start, it is silent for
minutes and then prints a C++ trace. Here the ranks count one another on the store, before and after
they connect, so that a missing rank is named within START_SECONDS. The groups' own time-outs are
those of the run from the beginning: gloo's messages between two ranks keep the first one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from meshwright.base import device as devices
from meshwright.base.console import no_stderr
from meshwright.base.errors import HANG, UNAVAILABLE, USAGE, UserError
from meshwright.config.problem import SettingsError
from meshwright.runtime.ranks.compare import format_ranks
from meshwright.runtime.ranks.interfaces import choose_interface, describe_interfaces
from meshwright.runtime.ranks.lost import bare_message, is_lost_rank
from meshwright.runtime.ranks.orphans import die_with_launcher
from meshwright.runtime.ranks.team import Team, connect_tree
from meshwright.runtime.ranks.world import OR_UNSET, START_SECONDS, VARIABLES, World

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
    from torch.distributed import ProcessGroup

    from meshwright.config.schema import Parallel

T = TypeVar("T")

SILENCE = 10  # seconds of waiting before it is said for whom
LOOKS = 4096  # at the verdict of a meeting, by all in a second: the store serves tens of thousands
LISTING_SECONDS = 5  # for one process to list who is missing, before another one does
# after a deadline, until a store that says nothing is given up
ANSWER_SECONDS = 2 * LISTING_SECONDS
CONNECT_SECONDS = 10.0  # that ranks have at least to connect, once all are there
# torch's time-out where a watchdog decides: others wait while one rank makes progress
WATCHED = timedelta(days=1)

_runs_met = 0  # a second run in these processes needs fresh keys on the store
_served: dict[tuple[str, int], TCPStore] = {}  # the stores that this process serves


def join_ranks(
    world: World,
    backend: str,
    timeout_minutes: float = 10,
    device: torch.device | None = None,
    seconds: float | None = None,
    is_watched: bool = False,
) -> Team:
    """Connect all ranks; raise UserError with the missing ones if they do not come in `seconds`.

    `backend` is "gloo", the device's own, or both as "cpu:gloo,cuda:nccl". The team's groups are
    gloo's in any case. With `is_watched` the caller starts a watchdog, and torch's own time-outs
    are a last resort.
    """
    die_with_launcher()
    if world.size == 1:
        return Team()
    timeout = WATCHED if is_watched else timedelta(minutes=timeout_minutes)
    until = deadline(START_SECONDS if seconds is None else seconds)
    # On a CPU no rank has a device of its own.
    bound = device if device is not None and device.type != "cpu" else None
    if backend != "gloo" and ":" not in backend:
        assert device is not None
        backend = f"{device.type}:{backend}"
    try:
        store, groups = _meet_and_connect(world, backend, timeout, bound, until)
    except UserError:
        if (world.address, world.port) in _served:
            time.sleep(1)  # the others still read the reason from this process
        raise
    if bound is not None:
        import torch

        torch.accelerator.set_device_index(bound)
    team = Team(world.rank, world.size, groups, timeout, store)
    if bound is not None and backend != "gloo":
        require_own_devices(team, bound)
    return team


def _meet_and_connect(
    world: World, backend: str, timeout: timedelta, device: torch.device | None, until: float
) -> tuple[PrefixStore, tuple[ProcessGroup, ...]]:
    """Return the run's store and the team's groups; raise UserError soon after the deadline."""
    server = f"rank 0, or its launcher, at {world.address}:{world.port}"
    # First all ranks find one another on the store; then they connect, and meet again.
    store, end = within(until, lambda: _meet_on_store(world, until), server)
    assert world.address is not None and world.port is not None
    choose_interface(world.address, world.port, backend)
    store.set_timeout(timeout)
    connecting = _in_thread(lambda: _connect_groups(world, backend, store, timeout, device))
    unconnected = (
        f"rank {world.rank} reached the store at {world.address}:{world.port} but not every other rank; "
        f"{describe_interfaces(world.address, world.port, backend)}"
    )
    try:
        wait([connecting], end - time.monotonic())
        if connecting.done():
            connecting.result()
        within(end, lambda: _meet_again(world, store, end), server)
        if not connecting.done():
            raise UserError(unconnected, HANG)
        return store, connecting.result()
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise UserError(f"{unconnected} ({bare_message(error)})", HANG) from None


def _in_thread(act: Callable[[], T]) -> Future[T]:
    """Begin a call whose end may never come: torch's wait for a process that is stopped."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def within(until: float, act: Callable[[], T], server: str) -> T:
    """Return what `act` asks of a store; raise UserError if the store has not answered in time."""
    stderr = os.dup(2)
    try:
        done = _in_thread(act)
        wait([done], max(until - time.monotonic(), 0) + ANSWER_SECONDS)
        if not done.done():
            os.dup2(stderr, 2)  # the call has silenced it
            raise UserError(f"{server} does not answer; see whether its process is stopped", HANG)
        return done.result()
    finally:
        os.close(stderr)


def _connect_groups(
    world: World, backend: str, store: Store, timeout: timedelta, device: torch.device | None
) -> tuple[ProcessGroup, ...]:
    """Connect the team's groups, which are returned, and torch's group of all ranks."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    probe = None
    groups = connect_tree(store, world.rank, world.size, timeout)
    # Between nodes a firewall may allow only the store's port. Rank 0 decides for all, since a rank
    # without its launcher's variables guesses how many are on its node.
    if world.rank == 0:
        store.set("spans nodes", str(world.size > world.local_size))
    if store.get("spans nodes") == b"True" and "gloo" in backend:  # each rank will connect to each
        probe = dist.ProcessGroupGloo(PrefixStore("probe", store), world.rank, world.size, timeout)
    if device is not None:
        torch.accelerator.set_device_index(device)
    # No device_id: with it, messages between two ranks would wait for those of their group.
    run_store = PrefixStore("run", store)
    dist.init_process_group(
        backend, store=run_store, rank=world.rank, world_size=world.size, timeout=timeout
    )
    del probe  # not earlier: others may still have been connecting to it
    return groups


def _meet_again(world: World, store: PrefixStore, until: float) -> None:
    """Meet all ranks once they have connected, or have had the time for it."""
    from torch._C._distributed_c10d import PrefixStore

    # On a connection of its own: in the other one, a thread may wait.
    again = PrefixStore("connected", store.clone())  # type: ignore[attr-defined]
    meet_all(again, world.rank, world.size, until + 1, have_met=True)


def _meet_on_store(world: World, until: float) -> tuple[PrefixStore, float]:
    """Meet all ranks on the store of rank 0 or of torch's agent.

    Return the run's part of it, and until when the ranks are to connect, which is the same for all.
    """
    global _runs_met
    assert world.address is not None and world.port is not None
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = world.rank == 0 and not is_agents
    address = (world.address, world.port)
    store = _served.get(address) or connect_store(*address, serves, until, "rank 0")
    if serves:
        _served[address] = store

    from torch._C._distributed_c10d import PrefixStore

    # A restarted run meets on the same store of an agent; ranks of other jobs must not be counted.
    names = ("TORCHELASTIC_RUN_ID", *["TORCHELASTIC_RESTART_COUNT"] * is_agents)
    prefix = "/".join(["meshwright", *(os.environ.get(n, "0") for n in names), str(_runs_met)])
    _runs_met += 1
    have_met = threading.Event()
    try:
        if world.launcher == "torchrun" and is_agents:
            prefix = f"meshwright/{_name_attempt(PrefixStore('meshwright/names', store), world.rank, until, have_met)}"
        run_store = PrefixStore(prefix, store)
        left = meet_all(
            run_store,
            world.rank,
            world.size,
            until,
            advice=OR_UNSET * (world.launcher == VARIABLES),
        )
    finally:
        have_met.set()
    return run_store, time.monotonic() + max(left, CONNECT_SECONDS)


def _name_attempt(store: Store, rank: int, until: float, have_met: threading.Event) -> str:
    """Return the name that rank 0 gives this attempt on a store that serves several.

    When machines come or go, torchrun starts all ranks anew with the same restart count, which
    those that came later do not even share. So each rank leaves a random word, and rank 0 answers
    every word until all have met.
    """
    word = uuid.uuid4().hex
    if rank > 0:
        with no_stderr():
            store.set(f"word/{store.add('words', 1)}", word)
        pause = 0.02
        # Rank 0 may come later, and answers those who are here by then.
        while not _has(store, f"answer/{word}"):
            if time.monotonic() > until:
                raise UserError(
                    "rank 0 did not come in time; start it, or see in its log why it ended", HANG
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return store.get(f"answer/{word}").decode()

    def answer() -> None:
        waiting: set[int] = set()
        last_seen = 0
        with contextlib.suppress(RuntimeError):  # the store is closed
            while not have_met.wait(0.02):
                if (last := store.add("words", 0)) > last_seen:
                    waiting |= set(range(last_seen + 1, last + 1))
                    last_seen = last
                for n in [n for n in waiting if store.check([f"word/{n}"])]:
                    store.set(f"answer/{store.get(f'word/{n}').decode()}", word)
                    waiting.remove(n)

    threading.Thread(target=answer, daemon=True).start()
    return word


def require_own_devices(team: Team, device: torch.device) -> None:
    """Raise UserError if two ranks use one device; NCCL's own error names neither."""
    name = f"{devices.device_identity(device)} of {socket.gethostname()}"
    store = team.store
    assert store is not None
    # The first rank of each device leaves its number there.
    first = int(store.compare_set(f"device/{name}", "", str(team.rank)))
    holders = {} if first == team.rank else {name: [first, team.rank]}
    holders = team.merge(holders, _join_holders)
    if holders:
        name, ranks = max(holders.items(), key=lambda item: len(item[1]))
        raise UserError(
            f"ranks {format_ranks(ranks)} share one {device.type} device, {name}; start one rank per device, or check "
            f"whether {devices.HIDES.get(device.type, 'a variable')} hides the others",
            everywhere=True,
        )


def _join_holders(tables: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Return the ranks of each device that several have."""
    joined: dict[str, set[int]] = {}
    for table in tables:
        for name, ranks in table.items():
            joined.setdefault(name, set()).update(ranks)
    return {name: sorted(ranks) for name, ranks in joined.items()}


def deadline(seconds: float) -> float:
    """Return the time.monotonic() of this process's age of `seconds`, or a third from now."""
    began = now = time.monotonic()
    with (
        contextlib.suppress(OSError, AttributeError, ValueError, IndexError),
        open("/proc/self/stat") as f,
    ):
        ticks = int(f.read().rpartition(")")[2].split()[19])
        began -= time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return max(began + seconds, now + seconds / 3)


def connect_store(address: str, port: int, serves: bool, until: float, who: str) -> TCPStore:
    """Return the store at address:port, which one process serves (port 0: any free one).

    `who` names that process in errors. Plain sockets try first: torch's store reports failures as
    C++ traces, and waits forever for a program that accepts the connection and sends nothing.
    """
    listening = None
    if serves:
        port, listening = _listen(address, port)
    else:
        _require_reached(address, port, until, who)
    stores: list[TCPStore] = []
    errors: list[RuntimeError] = []

    def make() -> None:
        from torch._C._distributed_c10d import TCPStore

        left = timedelta(seconds=max(until - time.monotonic(), 1.0))
        # multi_tenant: torch's agent in this process gets the same store when it asks for it
        more = {"wait_for_workers": False, "multi_tenant": True, "master_listen_fd": listening}
        try:
            stores.append(TCPStore(address, port, None, serves, left, **more))  # type: ignore[arg-type]
        except RuntimeError as error:
            errors.append(error)

    import torch.distributed  # noqa: F401  importing must not count as waiting

    thread = threading.Thread(target=make, daemon=True)
    with no_stderr():
        thread.start()
        # Python must not end while a thread is in C++
        thread.join(max(until - time.monotonic(), 1.0) + 5)
    if stores:
        return stores[0]
    # Another program took the port between our look and torch's own.
    if errors and "EADDRINUSE" in str(errors[0]):
        raise _occupied(port)
    why = (
        f"{address}:{port} answers, but not as {who} of this run; see whether {who} is stopped, or choose another "
        "MASTER_PORT or --master-port"
    )
    if serves:
        why = (
            f"this is {who}, but cannot reach itself at {address}; set MASTER_ADDR or --master-addr to an address of "
            f"this machine ({socket.gethostname()})"
        )
    raise UserError(why, UNAVAILABLE)


def _listen(address: str, port: int) -> tuple[int, int | None]:
    """Return the port and, if no other machine can reach the address, a socket that listens there.

    torch's own would listen on all addresses of this machine, and asks those who connect for no
    secret. A name of this machine does not count as local: it may be that of a network's address.
    """
    _require_free(port)
    if address != "localhost" and not address.startswith("127."):
        return port, None
    try:
        listening = socket.create_server((address, port), backlog=1024)
    except OSError:
        raise _occupied(port) from None
    return listening.getsockname()[1], listening.detach()


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
                raise UserError(
                    f"port {port} needs root privileges; choose one from 1024", UNAVAILABLE
                ) from None


def _occupied(port: int) -> UserError:
    return SettingsError(
        f"port {port} of this machine ({socket.gethostname()}) is in use; "
        "choose another MASTER_PORT or {master_port}",
        UNAVAILABLE,
    )


def _require_reached(address: str, port: int, until: float, who: str) -> None:
    began = time.monotonic()
    is_silent = True
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


def meet_all(
    store: Store,
    number: int,
    size: int,
    until: float,
    noun: str = "rank",
    advice: str = "",
    have_met: bool = False,
) -> float:
    """Return when all are here; otherwise raise the same UserError in every process.

    Return the seconds that are left to the process that came last.

    Each process counts itself; the one that finds all present, or a problem, writes the verdict
    that all wait for. They poll, because torch's own waiting prints lines about each time-out.
    """
    try:
        _await_verdict(store, number, size, until, noun, advice, have_met)
        with no_stderr():
            verdict = json.loads(store.get("verdict"))
    except RuntimeError as error:
        raise UserError(
            f"{noun} 0, or its launcher, exited during startup; see its log", HANG
        ) from error
    if verdict["problem"]:
        raise UserError(verdict["problem"], verdict["status"], everywhere=verdict["everywhere"])
    return float(verdict["left"])


def _await_verdict(
    store: Store, number: int, size: int, until: float, noun: str, advice: str, have_met: bool
) -> None:
    began = time.monotonic()
    is_silent = number == 0
    _arrive(store, number, size, until, noun)
    # Looks become rarer, the more so in a large run, whose ranks all ask one store.
    pause = 0.01
    longest = max(0.25, size / LOOKS)
    listed_at = until
    while not _has(store, "verdict"):
        now = time.monotonic()
        if is_silent and now - began > SILENCE and (missing := _find_missing(store, size)):
            is_silent = False
            text = f"waiting for {noun} {format_ranks(missing)}, up to {max(until - now, 0):.0f} s more"
            them = "it" if len(missing) == 1 else "them"
            text += f"; start {them}{advice}" if advice else ""
            print(text, file=sys.stderr, flush=True)
        if now > listed_at:
            listed_at += LISTING_SECONDS
            turn = round((listed_at - until) / LISTING_SECONDS)
            with no_stderr():
                # one process, and another if that one ends
                lists = store.add(f"lists {turn}", 1) == 1
            if lists:
                missing = _find_missing(store, size)
                came = f"{size - len(missing)} of {size} {noun}s "
                came += "connected" if have_met else "came"
                gone = "one of them has exited"
                if missing:
                    gone = f"missing: {noun} {format_ranks(missing)}"
                cure = f"Start it, or see in its log why it ended{advice}"
                if have_met:
                    cure = "It came, and then stopped or ended; see its log"
                problem = f"{came} within {now - began:.0f} s; {gone}. {cure}"
                _set_verdict(store, problem, HANG, everywhere=0 not in missing)
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _arrive(store: Store, number: int, size: int, until: float, noun: str) -> None:
    """Count this process; write the verdict if it is the last one, or one too many."""
    with no_stderr():
        first_size = int(store.compare_set("size", "", str(size)))
        if first_size != size:
            mine = f"{noun} {number} was started as one of {size} {noun}s"
            problem = f"{mine}, others as one of {first_size}; give all the same number"
            _set_verdict(store, problem, USAGE)
        elif store.add(f"arrived/{number}", 1) > 1:
            problem = f"two processes came as {noun} {number} of {size}; give each its own number"
            problem += ", or choose another port if another run uses this one"
            _set_verdict(store, problem)
        elif store.add("count", 1) == size:
            _set_verdict(store, "", left=until - time.monotonic())


def _find_missing(store: Store, size: int) -> list[int]:
    with no_stderr():
        return find_missing(store, "arrived", 0, size)


def find_missing(store: Store, key: str, first: int, end: int) -> list[int]:
    """Return the numbers of a range that have no key, by few questions if they are few."""
    if store.check([f"{key}/{n}" for n in range(first, end)]):
        return []
    if end - first == 1:
        return [first]
    # Ask for each half: few that are missing take few questions, however many ranks there are.
    middle = (first + end) // 2
    return find_missing(store, key, first, middle) + find_missing(store, key, middle, end)


def _has(store: Store, key: str) -> bool:
    with no_stderr():
        return store.check([key])


def _set_verdict(
    store: Store,
    problem: str,
    status: int = UNAVAILABLE,
    everywhere: bool = False,
    left: float = 0.0,
) -> None:
    """Write the outcome; a problem is reported `everywhere` by the first rank of each machine."""
    verdict = {"problem": problem, "status": status, "everywhere": everywhere, "left": left}
    store.compare_set("verdict", "", json.dumps(verdict))


def pick_backend(p: Parallel, device: torch.device, prints: bool = False) -> str:
    """Return the backend of torch.distributed: gloo on CPUs, the device's default elsewhere."""
    import torch.distributed as dist

    wanted = p.distributed_backend
    if device.type == "cpu":
        if prints and wanted not in (None, "gloo"):
            print(
                f"note: --distributed-backend {wanted} has no effect: on a CPU the ranks use gloo",
                file=sys.stderr,
            )
        return "gloo"
    return wanted or str(dist.get_default_backend_for_device(device))
