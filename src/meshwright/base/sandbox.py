"""Calls into a child process that takes bounded memory and time, for work on strangers' files.

The child is `sandboxed.py`, which imports nothing of ours but the file of one function. Requests
and answers are lines of JSON. The child is not trusted: whoever asks checks the answer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from meshwright.base import sandboxed
from meshwright.base.python310 import SAFE_PATH

ANSWER = 64 << 20  # bytes of an answer
PATIENCE = 300.0  # seconds for an answer, where the child's own limit is time of a processor


class Sandbox:
    """A function that runs in a child process, which is started when it is called.

    The function's file imports nothing of ours. It takes and returns what JSON can say, within
    `memory` bytes and for each call `seconds` of a processor. Calls raise ValueError with the
    reason where it fails. The child serves all calls until it is stopped, or ends at a limit.
    """

    def __init__(self, function: Callable[[Any], Any], memory: int, seconds: int) -> None:
        self.function = function
        self.memory = memory
        self.seconds = seconds
        self.child: subprocess.Popen[bytes] | None = None
        self.keepers = 0
        self.lock = threading.Lock()
        atexit.register(self.stop)

    def __call__(self, request: Any) -> Any:
        line = json.dumps(request).encode() + b"\n"
        with self.lock:
            # in a fork of this process, poll() says 0
            if self.child is None or self.child.poll() is not None:
                self.start()
            try:
                answer = json.loads(self.exchange(line))
            except (OSError, ValueError, RecursionError):
                self.stop()
                limits = f"{self.seconds} s or {self.memory >> 20} MiB, or writes more than {ANSWER >> 20} MiB"
                raise ValueError(f"it takes more than {limits}") from None
            # such as Ctrl-C: the answer that is still due is not the next call's
            except BaseException:
                self.stop()
                raise
        # The function itself has failed, and said why.
        if "result" not in answer:
            raise ValueError(answer["error"])
        return answer["result"]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Let the calls within the block share a child, which ends with the outermost block."""
        self.keepers += 1
        try:
            yield
        finally:
            self.keepers -= 1
            if not self.keepers:
                self.stop()

    def exchange(self, line: bytes) -> bytearray:
        """Return the answer to a line, cut short if the child ends, is late or writes too much."""
        assert self.child and self.child.stdin and self.child.stdout
        self.child.stdin.write(line)
        self.child.stdin.flush()
        got = bytearray()
        until = time.monotonic() + PATIENCE
        while not got.endswith(b"\n") and len(got) < ANSWER:
            left = max(0, until - time.monotonic())
            ready, _, _ = select.select([self.child.stdout], [], [], left)
            if not ready:  # it is late
                break
            part = os.read(self.child.stdout.fileno(), 1 << 20)
            if not part:  # it has ended
                break
            got += part
        return got

    def start(self) -> None:
        self.stop()
        code = self.function.__code__
        limits = [str(self.memory), str(self.seconds)]
        # SAFE_PATH keeps the program from importing the files beside it.
        words = [
            sys.executable,
            SAFE_PATH,
            sandboxed.__file__,
            code.co_filename,
            code.co_name,
            *limits,
        ]
        self.child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        """End the child; in a fork of the process that started it, only let go of it."""
        if self.child is not None:
            with contextlib.suppress(OSError), self.child:
                self.child.kill()  # does nothing to the child of another process
            self.child = None
