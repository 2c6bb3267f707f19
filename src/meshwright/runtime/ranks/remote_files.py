"""Files on another machine of the run: a rank there serves them, and others read ranges of them.

Collectives would not do, because a rank finds out only while it reads what it needs.
`multiprocessing.connection` frames the messages and authenticates both sides; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
from collections.abc import Mapping
from mmap import mmap
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from multiprocessing.context import AuthenticationError
from pathlib import Path

from meshwright.base.errors import HANG, IO, UserError
from meshwright.base.files import open_plain
from meshwright.runtime.ranks.interfaces import GLOO, list_addresses

LARGEST = 64 << 20  # bytes that a request may ask for
SHORT = 4096  # bytes of a request, and of an answer that is no data
PATIENCE = 120.0  # seconds in which an answer must begin

Address = tuple[str, int]


def served_address() -> str:
    """Return the address of this machine for the others, on the interface that gloo uses."""
    name = os.environ.get(GLOO, "").split(",")[0]
    addresses = list_addresses().get(name)
    if addresses:
        return addresses[0]
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


class FileServer:
    """Serves the files below a folder whose relative names match a pattern, to who has the key."""

    def __init__(self, root: Path, pattern: str, key: bytes) -> None:
        self.root = root
        self.pattern = re.compile(pattern)
        self.key = key
        # Without a key of its own it accepts at once: whoever does not answer the challenge keeps a
        # thread of his own waiting, and nobody else.
        self.listener = Listener((served_address(), 0), backlog=128)
        self.address: Address = self.listener.address  # type: ignore[assignment]
        self.is_closed = False
        threading.Thread(target=self._accept, name="file server", daemon=True).start()

    def close(self) -> None:
        self.is_closed = True
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            socket.create_connection(self.address, 1).close()
        self.listener.close()

    def _accept(self) -> None:
        while not self.is_closed:
            try:
                connection = self.listener.accept()
            except OSError:
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        # It ends when the other side closes the connection, or turns out not to know the key.
        with connection, contextlib.suppress(AuthenticationError, EOFError, OSError, ValueError):
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            while not self.is_closed:
                name, begin, size = json.loads(connection.recv_bytes(SHORT))
                data = b""
                problem = ""
                try:
                    data = self._read(name, begin, size)
                except (OSError, TypeError, ValueError) as error:
                    problem = getattr(error, "strerror", None) or str(error)
                connection.send_bytes(problem[:SHORT].encode()[:SHORT])
                if not problem:
                    connection.send_bytes(data)

    def _read(self, name: str, begin: int, size: int) -> bytes:
        if not self.pattern.fullmatch(name) or not 0 < size <= LARGEST:
            raise ValueError(f"{name[:200]!r} is not served")
        with open_plain(self.root / name) as file:
            data = os.pread(file.fileno(), size, begin)
            while 0 < len(data) < size:  # a call may read only a part
                more = os.pread(file.fileno(), size - len(data), begin + len(data))
                if not more:
                    break
                data += more
        if len(data) != size:
            raise ValueError(f"it ends before byte {begin + size:,}")
        return data


class RemoteFiles:
    """The files that other ranks serve, by the rank."""

    def __init__(self, addresses: Mapping[int, Address], key: bytes) -> None:
        self.addresses = addresses
        self.key = key
        self.idle: list[tuple[int, Connection]] = []  # connections that no thread uses now
        self.lock = threading.Lock()

    def read(self, rank: int, name: str, begin: int, into: bytearray | mmap) -> None:
        """Fill a buffer with what a file of that rank has from byte `begin` on."""
        host, port = self.addresses[rank]
        where = f"{name} on rank {rank} ({host}:{port})"
        try:
            connection = self._connect(rank)
            connection.send_bytes(json.dumps([name, begin, len(into)]).encode())
            if not connection.poll(PATIENCE):
                raise UserError(f"{where}: no answer in {PATIENCE:.0f} s", HANG)
            problem = connection.recv_bytes(SHORT).decode(errors="replace")
            if not problem:
                connection.recv_bytes_into(into)
        except (AuthenticationError, EOFError, OSError) as error:
            why = getattr(error, "strerror", None) or str(error) or "the connection was closed"
            raise UserError(
                f"cannot read {where}: {why}; open all ports between the nodes", IO
            ) from error
        with self.lock:
            self.idle.append((rank, connection))
        if problem:
            raise UserError(f"cannot read {where}: {problem}", IO)

    def close(self) -> None:
        for _, connection in self.idle:
            connection.close()
        self.idle.clear()

    def _connect(self, rank: int) -> Connection:
        """Return a connection to that rank, which this thread alone uses."""
        with self.lock:
            for pair in self.idle:
                if pair[0] == rank:
                    self.idle.remove(pair)
                    return pair[1]
        return Client(tuple(self.addresses[rank]), authkey=self.key)
