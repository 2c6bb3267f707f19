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
import struct
import threading
import time
from collections.abc import Mapping
from io import BufferedReader
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
PIECE = 1 << 20  # bytes of a message with data: what a server holds in memory for a connection
SHORT = 4096  # bytes of a request, and of an answer that is no data
PATIENCE = 120  # seconds in which the next byte of an answer must come

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


def limit_waits(connection: Connection, seconds: int) -> None:
    """Let a read or write fail after so many seconds without a byte; 0 sets no limit."""
    limit = struct.pack("ll", seconds, 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class FileServer:
    """Serves the files below a folder whose relative names match a pattern, to who has the key."""

    def __init__(self, root: Path, pattern: str, key: bytes) -> None:
        self.root = root
        self.pattern = re.compile(pattern)
        self.key = key
        # Without a key of its own it accepts at once: whoever does not answer the challenge keeps a
        # thread of his own waiting, and nobody else.
        self.listener = Listener((served_address(), 0), backlog=128)
        self.address: Address = self.listener.address
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
            except OSError:  # perhaps too many files are open
                time.sleep(0.1)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        # It ends when the other side closes the connection, or turns out not to know the key.
        with connection, contextlib.suppress(AuthenticationError, EOFError, OSError, ValueError):
            limit_waits(connection, PATIENCE)
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            limit_waits(connection, 0)  # the next request may come much later
            while not self.is_closed:
                name, begin, size = json.loads(connection.recv_bytes(SHORT))
                try:
                    file = self._open(name, begin, size)
                except (OSError, TypeError, ValueError) as error:
                    problem = getattr(error, "strerror", None) or str(error)
                    connection.send_bytes(problem[:SHORT].encode()[:SHORT])
                    continue
                with file:
                    connection.send_bytes(b"")
                    send_pieces(connection, file, size)

    def _open(self, name: str, begin: int, size: int) -> BufferedReader:
        """Open a file at the first byte that is asked for, if all of them may be sent."""
        if not self.pattern.fullmatch(name) or not 0 < size <= LARGEST or begin < 0:
            raise ValueError(f"{name[:200]!r} is not served")
        path = self.root / name
        file = open_plain(path, path.parent)  # the folder may be a link, which a user has made
        if os.fstat(file.fileno()).st_size < begin + size:
            file.close()
            raise ValueError(f"it ends before byte {begin + size:,}")
        file.seek(begin)
        return file


def send_pieces(connection: Connection, file: BufferedReader, size: int) -> None:
    """Send the next bytes of a file; raise EOFError if it has become shorter."""
    buffer = memoryview(bytearray(min(size, PIECE)))
    while size:
        count = file.readinto(buffer[: min(size, PIECE)])
        if not count:
            raise EOFError
        connection.send_bytes(buffer[:count])
        size -= count


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
            problem = connection.recv_bytes(SHORT).decode(errors="replace")
            got = 0
            while not problem and got < len(into):
                got += connection.recv_bytes_into(into, got)
        except BlockingIOError:
            raise UserError(f"cannot read {where}: no answer in {PATIENCE} s", HANG) from None
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
        connection = Client(self.addresses[rank])
        limit_waits(connection, PATIENCE)
        answer_challenge(connection, self.key)
        deliver_challenge(connection, self.key)
        return connection
