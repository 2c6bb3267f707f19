"""Worker processes that encode pieces and write them side by side into the files, in the order of the input.

Hand-written because a pool hands every result back through the parent: at the speed of the encoder that copy alone would cost a
tenth of a core. Here a worker keeps its tokens, tells their number, and is told at which byte they belong once all pieces ahead
of them are counted. In the meantime it encodes the next one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from meshwright.data.format.writer import put
from meshwright.data.prepare.encoding import Array, Encoder, Made
from meshwright.data.prepare.text import Piece
from meshwright.errors import HANG, IO, UserError

Commit = Callable[[int, Piece, Made], list[int]]  # in order: where each key's tokens belong, in bytes
Written = Callable[[int], None]  # told when the tokens of a piece are in the file


def work_alone(
    todo: Iterator[tuple[int, Piece]],
    make: Callable[[], Encoder],
    paths: list[str],
    stop: bool,
    commit: Commit,
    written: Written,
) -> None:
    """The same in this process."""
    encoder, files = make(), [os.open(path, os.O_WRONLY) for path in paths]
    try:
        for number, piece in todo:
            made, tokens = encoder(piece, stop)
            write(files, commit(number, piece, made), tokens, paths)
            written(number)
    finally:
        for file in files:
            os.close(file)


def write(files: list[int], offsets: list[int], tokens: list[Array], paths: list[str]) -> None:
    for file, offset, array, path in zip(files, offsets, tokens, paths, strict=True):
        try:
            put(file, array, offset)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {error.strerror}; free space and start the same command again, it goes "
                "on where it was",
                IO,
            ) from None


class Stopped(Exception):
    """Another thread has failed; it tells why."""


class Crew:
    """`size` processes, each with a thread here that speaks with it."""

    def __init__(
        self,
        size: int,
        todo: Iterator[tuple[int, Piece]],
        make: Callable[[], Encoder],
        paths: list[str],
        stop: bool,
        commit: Commit,
        written: Written,
    ) -> None:
        self.todo, self.commit, self.written = todo, commit, written
        self.taking, self.turn = threading.Lock(), threading.Condition()
        self.next: int | None = None
        self.error: BaseException | None = None
        # A fork costs nothing, but not where torch's threads run: their locks would never be free again in the child.
        kind = "fork" if sys.platform == "linux" and "torch" not in sys.modules else "spawn"
        self.kind, context = kind, multiprocessing.get_context(kind)
        self.ends: list[Connection] = []
        self.processes = []
        for _ in range(size):
            mine, theirs = context.Pipe()
            self.ends.append(mine)
            given = self.ends if kind == "fork" else []
            process: Any = context.Process(  # type: ignore[attr-defined]
                target=_work, args=(theirs, given, make, paths, stop), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)

    def run(self) -> None:
        threads = [threading.Thread(target=self._serve, args=(n,), daemon=True) for n in range(len(self.ends))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)  # an interrupt comes through
            if self.error is not None:
                raise self.error
        finally:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                process.join()

    def _serve(self, n: int) -> None:
        end, process = self.ends[n], self.processes[n]
        before: int | None = None  # the piece whose tokens the worker has still to write
        try:
            task = self._take()
            self._send(end, process, task and task[1])
            while task:
                made = self._answer(end, process)
                if before is not None:
                    self.written(before)
                following = self._take()
                self._send(end, process, following and following[1])
                self._send(end, process, self._in_turn(task, made))
                before, task = task[0], following
            if before is not None:
                self._answer(end, process)
                self.written(before)
        except Stopped:
            pass
        except BaseException as error:
            with self.turn:
                self.error = self.error or error
                self.turn.notify_all()
            for other in self.processes:  # whose threads wait for their answers
                with contextlib.suppress(OSError):
                    other.kill()

    def _take(self) -> tuple[int, Piece] | None:
        with self.taking:
            if self.error is not None:
                raise Stopped
            task = next(self.todo, None)
            if task is not None and self.next is None:
                self.next = task[0]
            return task

    def _in_turn(self, task: tuple[int, Piece], made: Made) -> list[int]:
        number, piece = task
        with self.turn:
            while self.next != number:
                if self.error is not None:
                    raise Stopped
                self.turn.wait()
            offsets = self.commit(number, piece, made)
            self.next = number + 1
            self.turn.notify_all()
        return offsets

    def _send(self, end: Connection, process: Any, what: Any) -> None:
        try:
            end.send(what)
        except (BrokenPipeError, ConnectionResetError):
            self._answer(end, process)  # why it is gone

    def _answer(self, end: Connection, process: Any) -> Any:
        try:
            answer = end.recv()
        except (EOFError, OSError):
            if self.error is not None:
                raise Stopped from None
            process.join(5)
            code = process.exitcode
            how = f"by signal {-code}" if code and code < 0 else f"with status {code}"
            why = ", perhaps for lack of memory (--workers sets their number)" if code == -signal.SIGKILL else ""
            if self.kind == "spawn" and self.next == 0:
                why = ": a script that calls this with torch imported must do so under `if __name__ == '__main__':`"
            raise UserError(
                f"a worker process was ended {how}{why}; start the same command again, it goes on where it was", HANG
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _work(end: Connection, others: list[Connection], make: Callable[[], Encoder], paths: list[str], stop: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:  # a copy kept open here would hide from the others that the parent is gone
        other.close()
    try:
        encoder, files = make(), [os.open(path, os.O_WRONLY) for path in paths]
        held: list[Array] | None = None
        piece = end.recv()
        while piece is not None:
            made, tokens = encoder(piece, stop)
            if held is not None:
                write(files, end.recv(), held, paths)
            end.send(made)
            held, piece = tokens, end.recv()
        if held is not None:
            write(files, end.recv(), held, paths)
            end.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
    except UserError as error:
        with contextlib.suppress(OSError):
            end.send(error)
    except BaseException as error:  # a defect: its traceback is told here, and what it is there
        traceback.print_exc()
        with contextlib.suppress(OSError):
            end.send(RuntimeError(f"{type(error).__name__}: {error}"))
