"""Programs that start warm: forks of a process that has imported torch.

`programs()` is a folder with `python`, `python3`, `torchrun` and `meshwright`. Each hands its
words, variables, folder and standard files to a server, which forks; it passes signals on, and ends
as the fork does. In a fork, sys.executable is such a program too. Words that are not known here,
such as `python -c`, are run by the real interpreter.

Such a start takes 0.1 seconds of a core in place of two or more. It proves nothing of imports,
memory, limits or orphans: tests of those start the real sys.executable.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import multiprocessing
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing import forkserver, process
from pathlib import Path
from typing import Any, NoReturn

from on_ranks import PRELOAD

ROOT = Path(__file__).parents[1]
SCRIPTS = {"torchrun": "torch.distributed.run", "meshwright": "meshwright"}
PACKAGES = ("meshwright", "torch", "oneflow_gpt")  # whose modules are known by -m
# It imports little, because it is what remains of a start.
CLIENT = """#!{python} -IS
import os, signal, socket, sys
words = sys.argv[1:]
while words[:1] == ["-u"] or words[:1] == ["-W"]:
    words = words[1 + (words[0] == "-W") :]
is_module = len(words) > 1 and words[0] == "-m" and words[1].split(".")[0] in {packages!r}
is_known = is_module or (words and words[0].endswith(".py"))
if not is_known and os.path.basename(sys.argv[0]) not in {scripts!r}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import json
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
for number in {signals!r}:
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
umask = os.umask(0)
os.umask(umask)
socket.send_fds(server, [json.dumps([sys.argv, os.getcwd(), umask, dict(os.environ)]).encode()], [0, 1, 2])
status = int(server.recv(9) or -9)
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
PASSED_ON = [
    int(n) for n in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
]


@functools.cache
def programs() -> Path:
    """Return the folder of the programs; the first call starts their server."""
    folder, owner = tempfile.mkdtemp(prefix="warm-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child that exits runs this too
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    address = f"{folder}/socket"
    passed_on = [int(signal.SIGINT), *PASSED_ON]
    client = CLIENT.format(
        python=sys.executable,
        scripts=list(SCRIPTS),
        packages=PACKAGES,
        address=address,
        signals=passed_on,
    )
    for name in ("python", "python3", *SCRIPTS):
        Path(folder, name).write_text(client)
        Path(folder, name).chmod(0o755)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [*PRELOAD, "meshwright.runtime.launch.agent", "torch.distributed.run"]
    )
    server = context.Process(target=serve, args=(address,), daemon=True)
    server.start()
    while not os.path.exists(address):
        assert server.is_alive()
        time.sleep(0.01)
    return Path(folder)


def python() -> str:
    """Return the program to be used in place of sys.executable."""
    return str(programs() / "python")


def serve(address: str) -> None:
    """Fork for each client, until the test process ends."""
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    selector, clients = selectors.DefaultSelector(), dict[int, socket.socket]()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is wake:
                wake.recv(4096)
                end_clients(clients, selector)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                request, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
                if not request:  # killed before it asked
                    client.close()
                elif pid := os.fork():
                    clients[pid] = client
                    selector.register(client, selectors.EVENT_READ, pid)
                else:
                    signal.set_wakeup_fd(-1)
                    for other in (listener, wake, woken, client, *clients.values()):
                        other.close()
                    selector.close()
                    become(json.loads(request), files)
                for file in files:
                    os.close(file)
            elif key.data in clients:
                numbers = clients[key.data].recv(64)
                # without its client, a program is killed
                for number in numbers or [signal.SIGKILL]:
                    os.kill(key.data, number)
                if not numbers:
                    selector.unregister(key.fileobj)


def end_clients(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Give the statuses of programs that ended to their clients."""
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        client = clients.pop(pid)
        if client.fileno() in selector.get_map():
            selector.unregister(client)
            with contextlib.suppress(OSError):  # the client was killed
                client.send(str(os.waitstatus_to_exitcode(status)).encode())
        client.close()


def become(request: list[Any], files: list[int]) -> NoReturn:
    """Be the program, as an interpreter started anew would be."""
    argv, folder, umask, environ = request
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.umask(umask)
    os.environ.clear()
    os.environ.update(environ)
    for number in (signal.SIGCHLD, *PASSED_ON):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 1
    try:
        forget_parent()
        status = run_program(argv)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # torch's names the rank
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # its reader may be gone
                file.flush()
        os._exit(status)


def forget_parent() -> None:
    """Reset what a process inherits by a fork."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    current = multiprocessing.current_process()
    current.name, current._config, process._parent_process = "MainProcess", {}, None  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = (
        server._inherited_fds
    ) = None


def run_program(argv: list[str]) -> int:
    """Run the program of these words; return its status."""
    name, words = Path(argv[0]).name, argv[1:]
    sys.executable = str(Path(argv[0]).with_name("python"))
    is_unbuffered = False
    while words[:1] in (["-u"], ["-W"]):
        is_unbuffered |= words[0] == "-u"
        if words[0] == "-W":
            warnings.simplefilter(words.pop(1))  # type: ignore[arg-type]
        words = words[1:]
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open_text(1, is_unbuffered)
    sys.stderr = sys.__stderr__ = open_text(2, is_unbuffered)
    module = SCRIPTS.get(name) or (words[1] if words[0] == "-m" else "")
    rest = words if name in SCRIPTS else words[2:] if module else words[1:]
    first = os.getcwd() if module else os.path.dirname(os.path.abspath(words[0]))
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # An environment may borrow the packages of another one, by a .pth file.
    prefixes = (sys.prefix, sys.base_prefix)
    installed = [
        path for path in sys.path if path.startswith(prefixes) or path.endswith("-packages")
    ]
    sys.path[:] = [first, *filter(None, given), *installed, str(ROOT / "src")]
    sys.argv = [module or words[0], *rest]
    try:
        if module:
            for loaded in (module, f"{module}.__main__"):
                sys.modules.pop(loaded, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def open_text(file: int, is_unbuffered: bool) -> io.TextIOWrapper:
    """Open standard output or standard error as the interpreter does."""
    return io.TextIOWrapper(
        open(file, "wb", 0 if is_unbuffered else -1, closefd=False),
        encoding="utf-8",
        errors="strict" if file == 1 else "backslashreplace",
        line_buffering=file == 2 or os.isatty(file),
        write_through=is_unbuffered,
    )
