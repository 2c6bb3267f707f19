"""The web application of `watch`: a page of three files, and what it asks for."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.errors import UNAVAILABLE, UserError
from meshwright.fields import Refusal
from meshwright.watch.curves import Axis, View, curves
from meshwright.watch.overview import Watcher, describe_samples, nulls
from meshwright.web.callers import check_caller
from meshwright.web.protocol import make_server

# Address: package, file and type. The colours and the form are those of the page of `report`.
FILES = {
    "/": ("meshwright.watch", "page.html", "text/html"),
    "/page.css": ("meshwright.report", "page.css", "text/css"),
    "/watch.css": ("meshwright.watch", "watch.css", "text/css"),
    **{f"/{name}": ("meshwright.watch", name, "text/javascript") for name in ("watch.js", "chart.js", "words.js")},
}
EVERY, SILENCE = 0.5, 15.0  # seconds between events, and after which nothing new is sent again
RUNS, POINTS = 64, 4000  # most of one request
READ_SECONDS = 10.0  # for a request's header
LOCAL = {"localhost"}  # addresses are known anyway
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Guard:
    """Refuse what other sites' pages send, as serving.callers explains; add headers to answers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        app = self.app
        try:
            check_caller(scope["method"], dict(scope["headers"]), LOCAL, "open the address that was printed")
        except Refusal as refused:
            app = PlainTextResponse(f"{refused}\n", refused.status)
        await app(scope, receive, send_with_headers)


def make_app(watcher: Watcher) -> Starlette:
    """Return the application; the caller starts the watcher."""

    def answer(value: Any) -> Response:
        return Response(json.dumps(nulls(value)), media_type="application/json")

    def state(request: Request) -> Response:
        return answer(watcher.state())

    def draw(request: Request) -> Response:
        asked = request.query_params
        try:
            view, folders = read_view(asked), asked.getlist("run")[:RUNS]
            runs = {folder: watcher.run_in(folder) for folder in folders}
        except (KeyError, ValueError) as error:
            return PlainTextResponse(f"{error}\n", 400)
        out = {}
        for folder, run in runs.items():
            with run.lock:
                out[folder] = curves(run, view)
        return answer(out)

    def samples(request: Request) -> Response:
        try:
            run, iteration = watcher.run_in(request.query_params["run"]), int(request.query_params["step"])
        except (KeyError, ValueError) as error:
            return PlainTextResponse(f"{error}\n", 400)
        return answer(describe_samples(run, iteration))

    async def events(request: Request) -> Response:
        return StreamingResponse(event_stream(watcher), media_type="text/event-stream")

    routes = [Route(address, file_route(*file)) for address, file in FILES.items()]
    api = {"state": state, "curves": draw, "samples": samples, "events": events}
    return Starlette(routes=[*routes, *(Route(f"/api/{name}", f) for name, f in api.items())])


def file_route(package: str, name: str, kind: str) -> Callable[[Request], Response]:
    content = resources.files(package).joinpath(name).read_bytes()
    return lambda request: Response(content, media_type=f"{kind}; charset=utf-8")


def read_view(asked: Any) -> View:
    """Return the view that a query asks for; raise ValueError if it asks for nonsense."""
    default = View()
    axis = asked.get("axis", default.axis)
    begin, end = (float(asked.get(name, getattr(default, name))) for name in ("begin", "end"))
    points, smooth = int(asked.get("points", default.points)), float(asked.get("smooth", default.smooth))
    if axis not in get_args(Axis) or math.isnan(begin) or math.isnan(end):
        raise ValueError(f"axis {axis!r} is none of {', '.join(get_args(Axis))}, or begin or end is not a number")
    if not (10 <= points <= POINTS and 0 <= smooth <= 0.5):
        raise ValueError(f"points {points} must be from 10 to {POINTS}, smooth {smooth} from 0 to 0.5")
    return View(axis, begin, end, points, smooth)


async def event_stream(watcher: Watcher) -> AsyncIterator[str]:
    """Yield the state as server-sent events: at once, and whenever something was read."""
    sent, waited = -1, 0.0
    while not watcher.is_over():
        if watcher.version != sent or waited >= SILENCE:
            sent, waited = watcher.version, 0.0
            text = json.dumps(await asyncio.to_thread(watcher.state))
            yield f"data: {text}\n\n"
        await asyncio.sleep(EVERY)
        waited += EVERY


def serve_page(watcher: Watcher, port: int, opened: Callable[[int], None]) -> None:
    """Serve the page on this machine's own address until a signal."""
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        hint = "choose another --port, or 0 for any free one"
        raise UserError(f"--port {port}: {os.strerror(error.errno or 0)}; {hint}", UNAVAILABLE) from None
    http = make_server(Guard(make_app(watcher)), READ_SECONDS)
    watcher.is_over = lambda: http.should_exit
    watcher.start()
    try:
        opened(listening.getsockname()[1])
        asyncio.run(http.serve([listening]))
    finally:
        watcher.stopping.set()
        listening.close()
