"""A local web application: packaged files and routes behind one guard."""

from __future__ import annotations

import importlib.resources
from collections.abc import Awaitable, Callable, Sequence

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshwright.apps.pages.guard import Limits, Observe, RequestGuard, ignore
from meshwright.base.fields import Refusal

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PAGE_CSS = ("meshwright.apps.pages", "page.css")  # the colours and the form of every page


def make_site(
    files: dict[str, tuple[str, str]],
    routes: Sequence[Route],
    limits: Limits,
    observe: Observe = ignore,
    open_paths: Sequence[str] = (),
) -> RequestGuard:
    """Return an application of packaged files and routes.

    `files` names the package and the file at each path. They and `open_paths` need no key;
    `observe` is called for each answer.
    """
    pages = [Route(path, answer_with_file(*file)) for path, file in files.items()]
    handlers = {HTTPException: refuse_path, Exception: raise_again}
    app = Starlette(routes=[*pages, *routes], exception_handlers=handlers)
    return RequestGuard(app, limits, {*files, *open_paths}, observe)


def answer_with_file(package: str, name: str) -> Callable[[Request], Awaitable[Response]]:
    # Read once, at the start: a file that is missing fails there.
    content = importlib.resources.files(package).joinpath(name).read_bytes()
    kind = TYPES[name.rpartition(".")[2]]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8")

    return answer


def json_response(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def refuse_path(request: Request, error: Exception) -> Response:
    """Raise what the guard writes in JSON; starlette would answer in plain text."""
    assert isinstance(error, HTTPException)
    # starlette's own words say neither the path nor what to do.
    messages = {
        404: f"there is no path {request.url.path[:100]}",
        405: f"{request.method[:20]} is not for this path",
    }
    refusal = Refusal(messages.get(error.status_code, error.detail), status=error.status_code)
    refusal.headers = {k.lower(): v for k, v in (error.headers or {}).items()}
    raise refusal


async def raise_again(request: Request, error: Exception) -> Response:
    raise error
