"""uvicorn's HTTP protocol with the limits that it lacks, and a server that ends by itself.

uvicorn waits for ever for a request's header and body and for a reader that takes nothing; 200
connections that send a byte every few seconds would stay. Here a connection is closed if a header
or a body is not complete in time, or if what was sent is not read in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import Any, Literal

import h11
import orjson
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

LARGEST_HEADER = 32 * 1024  # bytes
MOST_CONNECTIONS = 1000
DRAIN_SECONDS = 9  # for the answers that are at work when the server ends, of ten for all


class LimitedProtocol(H11Protocol):
    """A connection that may not be slow; `seconds` is set by `protocol`."""

    seconds = 10.0
    _phase: Literal["header", "body"] | None = None
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Each costs a descriptor, of which a process has few.
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self._watch(fresh=True)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        self._reading = self._writing = None
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self, fresh: bool = False) -> None:
        """Start the clock of a header or a body when it begins; bytes do not set it back."""
        state = self.conn.their_state
        phase = self._phase
        if state is h11.SEND_BODY:
            phase = "body"
        elif state is not h11.IDLE:
            phase = None
        elif fresh or self.conn.trailing_data[0]:
            phase = "header"
        elif phase == "body":  # between two requests uvicorn's own time-out applies
            phase = None
        # The clock runs on from the first byte, so sending slowly gains nothing.
        if phase == self._phase:
            return
        if self._reading is not None:
            self._reading.cancel()
        self._phase = phase
        self._reading = None
        if phase and not self.transport.is_closing():
            # A body gets a second more: the application waits as long for it, and answers first.
            seconds = self.seconds + (phase == "body")
            self._reading = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if (
            self._phase == "header"
            and not self.transport.is_closing()
            and self.conn.trailing_data[0]
        ):
            self.send_error(
                408, f"the header was not complete after {self.seconds:g} s; send it faster"
            )
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        # The reader takes nothing, and answers would pile up in memory.
        self._writing = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def send_400_response(self, msg: str) -> None:
        """Answer in JSON what h11 refuses: bad requests, and headers above the limit."""
        size = len(self.conn.trailing_data[0])
        if size > LARGEST_HEADER:
            self.send_error(
                431, f"the header is longer than {LARGEST_HEADER} bytes; send a shorter one"
            )
        else:
            self.send_error(400, "this is not a valid HTTP/1.1 request; send one")

    def send_error(self, status: int, message: str) -> None:
        body = orjson.dumps(error_object(message, "invalid_request_error"))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun
            self.transport.write(
                self.conn.send(h11.Response(status_code=status, headers=headers)) or b""
            )
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
            self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        self.transport.close()


def error_object(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's object of an error; Megatron's client reads the second `message`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class HttpServer(uvicorn.Server):
    """A server whose end by a signal is no failure; a second signal ends it at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
        try:
            for number in handled:
                loop.add_signal_handler(number, self.stop)
        except (ValueError, RuntimeError, NotImplementedError):  # not in the main thread
            handled = ()
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def make_server(app: Any, read_timeout: float) -> HttpServer:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the guard reports errors
    # uvicorn makes the protocols itself, so the limit is an attribute of their class.
    limited = type("LimitedProtocol", (LimitedProtocol,), {"seconds": read_timeout})
    config = uvicorn.Config(
        app,
        http=limited,
        ws="none",
        lifespan="off",
        loop="asyncio",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=LARGEST_HEADER,
        timeout_keep_alive=min(5, max(1, int(read_timeout))),
        timeout_graceful_shutdown=DRAIN_SECONDS,
        backlog=512,
    )
    return HttpServer(config)
