"""The web application of `watch`: the files of its page, and what it asks for."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, get_args

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from meshwright.apps.pages.guard import Limits, RequestGuard
from meshwright.apps.pages.protocol import make_server
from meshwright.apps.pages.site import PAGE_CSS, make_site
from meshwright.apps.watch.curves import Axis, View, curves, loss_units
from meshwright.apps.watch.overview import Watcher, describe_samples
from meshwright.base.errors import UNAVAILABLE
from meshwright.base.fields import Fields, Refusal
from meshwright.base.records import json_ready
from meshwright.base.runs.follow import RunTail
from meshwright.config.problem import SettingsError

FILES = {
    "/": ("meshwright.apps.watch", "page.html"),
    "/page.css": PAGE_CSS,
    "/watch.css": ("meshwright.apps.watch", "watch.css"),
    "/watch.js": ("meshwright.apps.watch", "watch.js"),
    "/chart.js": ("meshwright.apps.watch", "chart.js"),
    "/words.js": ("meshwright.apps.watch", "words.js"),
    "/uPlot.iife.min.js": ("meshwright.apps.watch", "vendor/uPlot.iife.min.js"),
    "/uPlot.min.css": ("meshwright.apps.watch", "vendor/uPlot.min.css"),
}
# Seconds between looks for news, and of silence after which the state is sent again.
EVENT_SECONDS, SILENCE_SECONDS = 0.5, 15.0
MOST_RUNS, MOST_POINTS = 64, 4000  # of one request
READ_SECONDS = 10.0  # for a request's header
LIMITS = Limits(
    own_hosts=frozenset({"localhost"}),
    advice="open the address that was printed",
    read_seconds=READ_SECONDS,
)


def make_app(watcher: Watcher) -> RequestGuard:
    """Return the application; the caller starts the watcher."""

    def answer(value: Any) -> Response:
        # JSON has no NaN, and JavaScript reads null as a gap.
        text = json.dumps(json_ready(value, lambda x: None))
        return Response(text, media_type="application/json")

    def state(request: Request) -> Response:
        return answer(watcher.state())

    def find_run(folder: Any) -> RunTail:
        try:
            return watcher.run_in(str(folder))
        except KeyError:
            raise Refusal("no run in this folder is watched", "run") from None

    def draw(request: Request) -> Response:
        folders = request.query_params.getlist("run")[:MOST_RUNS]
        view = read_view(query_fields(request, without="run"))
        runs = {folder: find_run(folder) for folder in folders}
        unit, factors = loss_units(list(runs.values()))
        out = {}
        for (folder, run), factor in zip(runs.items(), factors, strict=True):
            # The thread that follows the runs adds rows meanwhile.
            with run.lock:
                out[folder] = curves(run, view, factor)
            out[folder]["loss_unit"] = unit
        return answer(out)

    def samples(request: Request) -> Response:
        f = query_fields(request)
        run = find_run(f.take("run"))
        iteration = f.integer("step", None, 0, 2**53)
        f.refuse_rest()
        if iteration is None:
            raise Refusal("step is required", "step")
        return answer(describe_samples(run, iteration))

    async def events(request: Request) -> Response:
        return StreamingResponse(event_stream(watcher), media_type="text/event-stream")

    routes = [
        Route("/api/state", state),
        Route("/api/curves", draw),
        Route("/api/samples", samples),
        Route("/api/events", events),
    ]
    return make_site(FILES, routes, LIMITS)


def query_fields(request: Request, without: str = "") -> Fields:
    """Return the fields of an address, of which numbers are numbers."""
    values: dict[str, Any] = {}
    for name, text in request.query_params.items():
        if name == without:
            continue
        try:
            # A folder stays text, though its name may be a number.
            values[name] = orjson.loads(text) if name != "run" else text
        except orjson.JSONDecodeError:
            values[name] = text
    return Fields(values)


def read_view(f: Fields) -> View:
    """Return the view that a query asks for."""
    default = View()
    axis = f.text("axis", default.axis)
    if axis not in get_args(Axis):
        raise Refusal(f"axis {axis!r} must be one of {', '.join(get_args(Axis))}", "axis")
    view = View(
        axis,  # type: ignore[arg-type]
        f.number("begin", default.begin),
        f.number("end", default.end),
        f.integer("points", default.points, 10, MOST_POINTS),
        f.number("smooth", default.smooth, 0, 0.5),
    )
    f.refuse_rest()
    return view


async def event_stream(watcher: Watcher) -> AsyncIterator[str]:
    """Yield the state as server-sent events: at once, and whenever something was read."""
    sent = -1
    waited = 0.0
    while not watcher.is_over():
        # Silence makes proxies and browsers give the connection up.
        if watcher.version != sent or waited >= SILENCE_SECONDS:
            sent = watcher.version
            waited = 0.0
            text = json.dumps(await asyncio.to_thread(watcher.state))
            yield f"data: {text}\n\n"
        await asyncio.sleep(EVENT_SECONDS)
        waited += EVENT_SECONDS


def serve_page(watcher: Watcher, port: int, opened: Callable[[int], None]) -> None:
    """Serve the page on this machine's own address until a signal."""
    try:
        # On this machine's own address alone: a run's samples and paths are nobody else's.
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        hint = "choose another --port, or 0 for any free one"
        raise SettingsError(
            f"{{port={port}}}: {os.strerror(error.errno or 0)}; {hint}", UNAVAILABLE
        ) from None
    http = make_server(make_app(watcher), READ_SECONDS)
    # Streams of events would hold the server's end up.
    watcher.is_over = lambda: http.should_exit
    watcher.start()
    try:
        opened(listening.getsockname()[1])
        asyncio.run(http.serve([listening]))
    finally:
        watcher.stopping.set()
        listening.close()
