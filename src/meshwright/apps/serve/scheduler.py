"""Continuous batching behind the server: one thread drives the decoder, requests wait here.

The event loop admits a request (or refuses it when too many are at work), gives its texts to the
thread, and gets their tokens back, all of a step in one call. Texts enter the decoder one by one as
slots become free, each request in turn, so that a request of 128 texts holds nobody up for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import torch

from meshwright.base import device as devices
from meshwright.base.errors import UserError
from meshwright.base.fields import Refusal
from meshwright.base.python310 import timeout_at
from meshwright.generation.decoder import Decoder
from meshwright.generation.requests import Event, Request

T = TypeVar("T")


class QueueFull(Refusal):
    """Raised when the queue is full; the client may try again after some seconds."""

    def __init__(self, seconds: int) -> None:
        super().__init__(
            "too many requests are at work; try again later", code="queue_full", status=429
        )
        self.headers = {"retry-after": str(seconds)}


class ModelFailed(Refusal):
    """Raised for requests at work when the decoder failed, and for all after it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="model_failed", status=500)


class QueuedRequest:
    """The texts of one request, and their tokens as they come."""

    def __init__(self, requests: Sequence[Request], seconds: float) -> None:
        self.deadline = asyncio.get_running_loop().time() + seconds
        self.on_first: Callable[[], None] = lambda: None  # called at the first token
        self.generated = 0  # tokens so far
        # Texts that are not in the decoder yet; the thread takes them.
        self.pending = deque(enumerate(requests))
        self.active: set[int] = set()  # ids in the decoder, known to the thread
        self.unfinished = len(requests)
        self.arrived: asyncio.Queue[tuple[int, Event] | Exception] = asyncio.Queue()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield each token with the number of its text; raise TimeoutError at the deadline."""
        while self.unfinished:
            async with timeout_at(self.deadline):
                item = await self.arrived.get()
            if isinstance(item, Exception):
                raise item
            if not self.generated and not item[1].echoed:
                self.on_first()
            self.generated += not item[1].echoed
            self.unfinished -= item[1].finish is not None
            yield item


class Scheduler:
    """The thread that drives a decoder of `slots` rows, and the requests at work or waiting."""

    def __init__(
        self, decoder: Decoder, slots: int, queue: int, device: torch.device | None = None
    ) -> None:
        self.decoder = decoder
        self.slots = slots
        self.queue = queue
        self.device = device
        self.seats = 0  # requests at work or waiting
        self.broken: BaseException | None = None  # what ended the thread, if not close()
        self.on_break: Callable[[], None] = lambda: None  # called in the event loop
        self._seconds = 1.0  # of a request, a moving mean
        # The thread alone changes these: the loop asks it to, through the inbox.
        self._turns: deque[QueuedRequest] = deque()
        self._rows: dict[int, tuple[QueuedRequest, int]] = {}
        # Other threads change no state of the decoder's: they leave commands for it here.
        self._inbox: deque[Callable[[], None]] = deque()
        self._calls: deque[tuple[Generator[None, None, Any], asyncio.Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop  # set by start
        self._thread = threading.Thread(target=self._work, name="decoder", daemon=True)

    # In the event loop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """End the thread after the step that it is in."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(10)

    @property
    def active(self) -> int:
        """Texts in the decoder."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Requests of which no text is in the decoder yet."""
        return sum(not job.active for job in list(self._turns))

    @contextlib.contextmanager
    def seat(self) -> Iterator[None]:
        """Count a request as at work or waiting; raise QueueFull if there are too many."""
        if self.broken is not None:
            raise ModelFailed(f"the decoder failed: {self.broken}")
        if self.seats >= self.slots + self.queue:
            # The mean time of a request: for those at work, and for each round of those waiting.
            rounds = 1 + self.queue / self.slots
            raise QueueFull(max(1, min(60, round(self._seconds * rounds))))
        self.seats += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.seats -= 1
            # A moving mean over the last ten requests or so.
            self._seconds += 0.1 * (time.monotonic() - began - self._seconds)

    @contextlib.contextmanager
    def generating(self, job: QueuedRequest) -> Iterator[None]:
        """Generate a job's texts in the block; what is unfinished at its end is cancelled."""
        self._tell(lambda: self._turns.append(job))
        try:
            yield
        finally:
            self._tell(lambda: self._drop(job))

    async def call(self, work: Generator[None, None, T]) -> T:
        """Return what a generator returns that the thread advances between steps."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._tell(lambda: self._calls.append((work, done)))
        return await done

    def _tell(self, command: Callable[[], None]) -> None:
        """Let the thread run a command between its steps; once it has failed, run it here."""
        with self._changed:
            self._inbox.append(command)
            self._changed.notify()
        if self.broken is not None:
            self._fail_all()

    # In the thread

    def _work(self) -> None:
        try:
            devices.set_current(self.device)
            # A round: commands, new texts, a step of one search, a token of each text.
            while self._wait():
                while self._inbox:
                    self._inbox.popleft()()
                self._admit()
                if self._calls:
                    self._call(*self._calls.popleft())
                if self._rows:
                    self._step()
        except BaseException as error:
            self.broken = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._break)

    def _wait(self) -> bool:
        """Wait for something to do; return False at the end."""
        with self._changed:
            while not (self._closed or self._inbox or self._calls or self._turns or self._rows):
                self._changed.wait()
            return not self._closed

    def _step(self) -> None:
        """Advance all texts by a token; bad logits and a lack of memory end them all."""
        try:
            events = self.decoder.step()
        except (UserError, RuntimeError) as error:
            if not isinstance(error, UserError) and not devices.is_out_of_memory(error):
                raise
            for job in self._jobs():
                self._drop(job)
                self._loop.call_soon_threadsafe(job.arrived.put_nowait, ModelFailed(str(error)))
            return
        # One call into the event loop brings the tokens of all texts.
        batch = []
        for event in events:
            job, number = self._rows[event.id]
            if event.finish is not None:
                del self._rows[event.id]
                job.active.discard(event.id)
            batch.append((job, (number, event)))
        if batch:
            # One call for all of a step's tokens: each wakes the loop.
            self._loop.call_soon_threadsafe(_put_all, batch)

    def _call(self, work: Generator[None, None, Any], done: asyncio.Future[Any]) -> None:
        """Advance a generator by a step, unless its caller has left; by turns with others.

        Bad logits and a lack of memory end it alone; any other error ends the thread.
        """
        result = None
        error: Exception | None = None
        try:
            if not done.cancelled():
                next(work)
                self._calls.append((work, done))
            return
        except StopIteration as end:
            result = end.value
        except UserError as e:
            error = e
        except BaseException as e:
            if not devices.is_out_of_memory(e):
                self._calls.append((work, done))  # whose caller _fail_all answers
                raise
            error = ModelFailed(str(e))

        def settle() -> None:
            if not done.done():  # the caller may have been cancelled
                done.set_exception(error) if error else done.set_result(result)

        self._loop.call_soon_threadsafe(settle)

    def _drop(self, job: QueuedRequest) -> None:
        """Cancel what is waiting or at work of a request."""
        with contextlib.suppress(ValueError):
            self._turns.remove(job)
        job.pending.clear()
        for row in list(job.active):
            self.decoder.cancel(row)
            del self._rows[row]
        job.active.clear()

    def _admit(self) -> None:
        """Give texts to the decoder while it has free slots, of each request in turn."""
        while self._turns and len(self._rows) < self.slots:
            job = self._turns.popleft()
            number, request = job.pending.popleft()
            try:
                # A request that cannot be decoded is answered; the others go on.
                row = self.decoder.submit(request)
            except UserError as error:
                self._loop.call_soon_threadsafe(job.arrived.put_nowait, error)
                continue
            job.active.add(row)
            self._rows[row] = job, number
            # The others come before the next text of this request.
            if job.pending:
                self._turns.append(job)

    def _jobs(self) -> list[QueuedRequest]:
        # A request may have texts at work and others waiting.
        both = itertools.chain(self._turns, (job for job, _ in self._rows.values()))
        return list({id(job): job for job in both}.values())

    # In the event loop, after the thread has ended by an error

    def _break(self) -> None:
        self._fail_all()
        self.on_break()

    def _fail_all(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        for job in self._jobs():
            job.active.clear()
            job.arrived.put_nowait(ModelFailed(f"the decoder failed: {self.broken}"))
        for _, done in self._calls:
            if not done.done():
                done.set_exception(ModelFailed(f"the decoder failed: {self.broken}"))
        self._turns.clear()
        self._rows.clear()
        self._calls.clear()


def _put_all(batch: Sequence[tuple[QueuedRequest, tuple[int, Event]]]) -> None:
    for job, item in batch:
        job.arrived.put_nowait(item)
