"""The paths of the server: OpenAI's, Megatron's, the page, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from meshwright.apps.pages.guard import (
    Limits,
    Receive,
    Scope,
    Send,
    as_refused,
    error_of,
    too_large,
)
from meshwright.apps.pages.protocol import make_server
from meshwright.apps.pages.site import PAGE_CSS, json_response, make_site
from meshwright.apps.serve import megatron, openai
from meshwright.apps.serve.metrics import ServerMetrics
from meshwright.apps.serve.openai import OpenAICall, ServedModel
from meshwright.apps.serve.scheduler import QueuedRequest, Scheduler
from meshwright.base import console
from meshwright.base.errors import DONE
from meshwright.base.fields import Fields, Refusal, parse_object
from meshwright.base.python310 import timeout
from meshwright.config.schema import Sampling
from meshwright.generation.decoder import Decoder, run_requests
from meshwright.generation.requests import Request

FILES = {
    "/": ("meshwright.apps.serve", "page.html"),
    "/base.css": PAGE_CSS,
    "/page.css": ("meshwright.apps.serve", "page.css"),
    "/page.js": ("meshwright.apps.serve", "page.js"),
}
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


class TextServer:
    """The ASGI application, and what its paths share."""

    def __init__(self, served: ServedModel, scheduler: Scheduler, limits: Limits) -> None:
        self.served = served
        self.scheduler = scheduler
        self.limits = limits
        self.metrics = ServerMetrics()
        routes = [
            Route(
                "/v1/completions",
                Endpoint(self, partial(self.generate, openai.read_completion)),
                methods=["POST"],
            ),
            Route(
                "/v1/chat/completions",
                Endpoint(self, partial(self.generate, openai.read_chat)),
                methods=["POST"],
            ),
            Route("/api", Endpoint(self, self.megatron), methods=["PUT"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
        ]
        self.paths = {*FILES, *(route.path for route in routes)}
        self.app = make_site(FILES, routes, limits, self.observe, ["/health"])

    def observe(self, path: str, status: int, seconds: float) -> None:
        # Paths that nobody serves are one: anyone could make up millions.
        self.metrics.requests[path if path in self.paths else "other", status] += 1
        self.metrics.observe("request_seconds", seconds)

    # Text

    async def generate(
        self, read: Callable[[Fields, ServedModel], OpenAICall], f: Fields, send: Send
    ) -> None:
        # A long prompt takes a while to encode, in which others are answered.
        call = await asyncio.to_thread(read, f, self.served)
        job = QueuedRequest(call.requests, self.limits.answer_seconds)
        self.metrics.tokens["prompt_tokens_total"] += call.prompt_tokens
        began = time.monotonic()
        job.on_first = lambda: self.metrics.observe("first_token_seconds", time.monotonic() - began)
        try:
            with self.scheduler.generating(job):
                if call.stream:
                    await self._stream(call, job, send)
                else:
                    await send_json(send, await openai.answer_call(call, self.served, job))
        finally:
            self.metrics.tokens["generated_tokens_total"] += job.generated

    async def _stream(self, call: OpenAICall, job: QueuedRequest, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        try:
            async with contextlib.aclosing(openai.stream_call(call, self.served, job)) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except Exception as error:  # the status has been sent: the error is the last event
            part = openai.sse(error_of(as_refused(error)))
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def megatron(self, f: Fields, send: Send) -> None:
        call = await asyncio.to_thread(megatron.read_call, f, self.served)
        await send_json(
            send,
            await megatron.answer_megatron(
                call, self.served, self.scheduler, self.limits.answer_seconds
            ),
        )

    # Facts

    def model_object(self) -> dict[str, Any]:
        # OpenAI's fields, vLLM's length, and our own.
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "meshwright",
            "max_model_len": self.served.model.seq_length,
            "step": self.served.model.step,
            "has_chat_template": self.served.template is not None,
        }

    async def models(self, request: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [self.model_object()]})

    async def one_model(self, request: HttpRequest) -> Response:
        if request.path_params["name"] != self.served.name:
            raise Refusal(
                f"this server has {self.served.name!r} only", "model", "model_not_found", 404
            )
        return json_response(self.model_object())

    async def health(self, request: HttpRequest) -> Response:
        broken = self.scheduler.broken is not None
        return json_response({"status": "failed" if broken else "ok"}, 503 if broken else 200)

    async def show_metrics(self, request: HttpRequest) -> Response:
        text = self.metrics.text(self.scheduler.active, self.scheduler.waiting)
        return Response(text, media_type="text/plain; version=0.0.4")


class Endpoint:
    """A path that answers a JSON body as long as its client is there and time is left."""

    def __init__(
        self, server: TextServer, answer: Callable[[Fields, Send], Awaitable[None]]
    ) -> None:
        self.server = server
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self.server.limits
        request = HttpRequest(scope)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = f"the Content-Type is {kind[:50]!r}; send a body of application/json"
            raise Refusal(message, status=415)
        fields = Fields(parse_object(await read_body(receive, limits)))
        # Whichever comes first: the answer is complete, or its client has left.
        with self.server.scheduler.seat():
            # The answer ends when the client leaves, which frees its rows of the decoder.
            work = asyncio.ensure_future(self.answer(fields, send))
            gone = asyncio.ensure_future(until_gone(receive))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                await cancel(work, gone)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Receive, limits: Limits) -> bytes:
    # The size is checked as parts arrive: what a client announces need not be true.
    parts, size = [], 0
    try:
        async with timeout(limits.read_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal("the client left", status=408)
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limits.body:
                    raise too_large(limits.body)
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        late = f"the body was not complete after {limits.read_seconds:g} s; send it faster"
        raise Refusal(late, status=408) from None


async def send_json(send: Send, value: Any) -> None:
    body = orjson.dumps(value)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def run_server(
    served: ServedModel, limits: Limits, slots: int, queue: int, listening: socket.socket
) -> int:
    """Serve on a listening socket until a signal, or until the decoder fails."""
    decoder = Decoder(served.model, slots)
    # Compile kernels, and find damaged weights, before anyone waits.
    for _ in run_requests(decoder, [Request([], Sampling(out_seq_length=4))]):
        pass
    scheduler = Scheduler(decoder, slots, queue, served.model.device)
    http = make_server(TextServer(served, scheduler, limits).app, limits.read_seconds)

    def stop() -> None:
        http.should_exit = True

    async def serve() -> None:
        scheduler.on_break = stop
        scheduler.start()
        try:
            await http.serve([listening])
        finally:
            # The thread may be in a step for some time.
            await asyncio.to_thread(scheduler.close)

    # With port 0 the system has chosen one.
    host, port = listening.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    console.say(
        f"serving {served.name}, step {served.model.step}, on http://{where}:{port} (Ctrl-C stops)"
    )
    asyncio.run(serve())
    if scheduler.broken is not None:
        raise scheduler.broken
    console.say("stopped")
    return DONE
