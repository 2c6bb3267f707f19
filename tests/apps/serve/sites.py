"""A server in a thread, on a decoder that repeats each prompt, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from meshwright.apps.pages import protocol
from meshwright.apps.pages.guard import Limits
from meshwright.apps.serve.app import TextServer
from meshwright.apps.serve.openai import ServedModel
from meshwright.apps.serve.scheduler import Scheduler
from meshwright.base.errors import UserError
from meshwright.data import tokenizers
from meshwright.generation.requests import Event, Request

LENGTH = 64
LOGPROB = -0.5
TOP = [-0.25, -0.5, -1.0]  # of the likeliest token's neighbours in the alphabet


class Repeating:
    """A decoder whose texts repeat their prompt; a step takes `pause` seconds."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause, self.steps, self.most = pause, 0, 0
        self.rows: dict[int, tuple[Request, int]] = {}
        self.submitted: list[Request] = []
        self.error: BaseException | None = None
        self.gate = threading.Event()  # steps wait while it is not set
        self.gate.set()
        self._ids = itertools.count()

    def submit(self, request: Request) -> int:
        if request.prompt[0] == 0:
            raise UserError("no text begins with 0")
        self.submitted.append(request)
        row = next(self._ids)
        self.rows[row] = request, 0
        self.most = max(self.most, len(self.rows))
        return row

    def cancel(self, row: int) -> None:
        self.rows.pop(row, None)

    def step(self) -> list[Event]:
        self.gate.wait(20)
        time.sleep(self.pause)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.steps += 1
        out = []
        for row, (request, n) in list(self.rows.items()):
            length, k = request.options.out_seq_length, request.logprobs
            if n == 0 and request.echo:
                for at, token in enumerate(request.prompt):
                    is_last = not length and at == len(request.prompt) - 1
                    scored = (None, []) if k is None or at == 0 else (LOGPROB, top(token, k))
                    out.append(
                        Event(row, token, *scored, "length" if is_last else None, echoed=True)
                    )
            if length:
                token, n = request.prompt[n % len(request.prompt)], n + 1
                text = "".join(map(chr, (request.prompt * n)[:n]))
                finish = "stop" if token == 256 or any(s in text for s in request.stop) else None
                finish = finish or ("length" if n == length else None)
                out.append(
                    Event(
                        row, token, *((None, []) if k is None else (LOGPROB, top(token, k))), finish
                    )
                )
                self.rows[row] = request, n
            if not length or finish:
                del self.rows[row]
        return out


def top(token: int, k: int) -> list[tuple[int, float]]:
    return [(token + 1, TOP[0]), (token, TOP[1]), (token + 2, TOP[2])][:k]


class Template:
    """A template that marks turns, whose answers end at `|`."""

    stop = ("|",)

    def encode(self, tokenizer: tokenizers.Bytes, messages: list[dict[str, str]]) -> list[int]:
        return tokenizer.encode("".join(f"{m['role'][0]}:{m['content']}|" for m in messages))


def fake_served(template: Any = None) -> ServedModel:
    network = SimpleNamespace(vocab=257)
    model = SimpleNamespace(tokenizer=tokenizers.Bytes(), seq_length=LENGTH, model=network, step=7)
    return ServedModel(model, "fake", template)  # type: ignore[arg-type]


class Site:
    """A running server."""

    def __init__(self, port: int, decoder: Any, scheduler: Scheduler, server: TextServer) -> None:
        self.port, self.decoder, self.scheduler, self.server = port, decoder, scheduler, server

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Return the status, the body, parsed if it is JSON, and the headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(
                method, path, raw, kind | {k.replace("_", "-"): v for k, v in headers.items()}
            )
            reply = connection.getresponse()
            data = reply.read()
            found = {k.lower(): v for k, v in reply.getheaders()}
            is_json = found.get("content-type", "").startswith("application/json")
            return reply.status, json.loads(data) if is_json else data, found
        finally:
            connection.close()

    def complete(self, **body: Any) -> dict[str, Any]:
        status, answer, _ = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer

    def error(
        self, path: str = "/v1/completions", method: str = "POST", **body: Any
    ) -> tuple[int, dict[str, Any]]:
        status, answer, _ = self.ask(method, path, body)
        return status, answer["error"]

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        """Return the events of a stream; the last is [DONE]."""
        status, data, headers = self.ask("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), data
        parts = data.decode().split("\n\n")
        assert parts.pop() == "" and all(p.startswith("data: ") for p in parts)
        assert parts.pop() == "data: [DONE]"
        return [json.loads(p.removeprefix("data: ")) for p in parts]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def exchange(self, raw: bytes) -> bytes:
        """Send bytes and return everything that comes back."""
        with self.connect() as s:
            with contextlib.suppress(OSError):
                s.sendall(raw)
            return read_all(s)


def read_all(s: socket.socket) -> bytes:
    out = b""
    with contextlib.suppress(OSError):
        while part := s.recv(1 << 16):
            out += part
    return out


@contextlib.contextmanager
def site(
    pause: float = 0.0,
    slots: int = 4,
    queue: int = 16,
    template: Any = None,
    limits: Limits | None = None,
) -> Iterator[Site]:
    """Run a server until the end of the block."""
    decoder, limits = Repeating(pause), limits or Limits()
    scheduler = Scheduler(decoder, slots, queue)
    server = TextServer(fake_served(template), scheduler, limits)
    http_server = protocol.make_server(server.app, limits.read_seconds)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        port = listening.getsockname()[1]

        async def serve() -> None:
            scheduler.on_break = http_server.stop
            scheduler.start()
            try:
                await http_server.serve([listening])
            finally:
                await asyncio.to_thread(scheduler.close)

        thread = threading.Thread(target=asyncio.run, args=[serve()])
        thread.start()
        wait_until(lambda: http_server.started)
        try:
            yield Site(port, decoder, scheduler, server)
        finally:
            http_server.stop()
            thread.join(20)
            assert not thread.is_alive()


def wait_until(is_so: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)
