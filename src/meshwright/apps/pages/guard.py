"""Check the origin, the key and the size of a request, and write errors as JSON.

A page of another site can send requests to this machine from a reader's browser. Three checks keep
it out: the Host header must name this server or be a bare address (a name that its owner points at
127.0.0.1 later is refused), an Origin must be this server's own, and what a browser marks as
cross-site may only open a page.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from meshwright.apps.pages.protocol import LARGEST_HEADER, error_object
from meshwright.base.errors import UserError
from meshwright.base.fields import Refusal
from meshwright.base.python310 import timeout

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Observe = Callable[[str, int, float], None]  # path, status and seconds of an answer

# How much of a refused body is read so that the answer arrives: bytes, and seconds without any.
LEFTOVER = 256 << 20, 1.0
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [  # of every answer
    (b"content-security-policy", POLICY),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


@dataclass(frozen=True)
class Limits:
    """Who may ask, and how much.

    Fields:
        hosts: names of the server beside localhost, this machine's and bare addresses.
        advice: what to do about another name.
    """

    api_key: str | None = None
    hosts: Collection[str] = ()
    body: int = 8 << 20  # bytes
    read_seconds: float = 10.0
    answer_seconds: float = 600.0
    own_hosts: frozenset[str] = field(
        default_factory=lambda: frozenset({"localhost", socket.gethostname().lower()})
    )
    advice: str = "name it with --allowed-hosts"

    def check(
        self, scope: Scope, headers: dict[bytes, bytes], open_paths: Collection[str] = ()
    ) -> None:
        """Raise Refusal for a request of another site's page, or without the key."""
        names = self.own_hosts | {host.lower() for host in self.hosts}
        check_caller(scope["method"], headers, names, self.advice)
        if self.api_key is None or scope["path"] in open_paths:
            return
        sent = headers.get(b"authorization", b"").strip()
        # In constant time, so that answers do not tell how much of a guess is right.
        if not hmac.compare_digest(sent, b"Bearer " + self.api_key.encode()):
            refused = Refusal(
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                code="invalid_api_key",
                status=401,
            )
            refused.headers = {"www-authenticate": "Bearer"}
            raise refused


def check_caller(
    method: str, headers: Mapping[bytes, bytes], names: Collection[str], hint: str
) -> None:
    """Raise Refusal for a request that names another server or comes from another site's page.

    `names` are the server's own, in lower case; `hint` says what to do about another.
    """
    # A name that another site's owner points at this machine is not one of ours.
    host = headers.get(b"host", b"").decode("latin-1")
    if not is_own_host(host, names):
        message = f"the Host header is {host[:100]!r}, which is not this server; {hint}"
        raise Refusal(message, code="host_not_allowed", status=403)
    origin = headers.get(b"origin")
    if origin is not None and _netloc(origin.decode("latin-1")) != host.lower():
        message = "requests from pages of other origins are refused"
        raise Refusal(message, code="origin_not_allowed", status=403)

    # What a browser marks as another site's may only open a page, by a link.
    if headers.get(b"sec-fetch-site") not in (b"cross-site", b"same-site"):
        return
    is_navigation = method == "GET" and headers.get(b"sec-fetch-mode") == b"navigate"
    is_page = headers.get(b"sec-fetch-dest", b"document") == b"document"
    if not (is_navigation and is_page):
        message = "requests from pages of other sites are refused"
        raise Refusal(message, code="origin_not_allowed", status=403)


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header is an address or one of these names, with or without a port."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
        urlsplit(f"//{host}").port  # noqa: B018 - raises if it is no number
    except ValueError:
        return False
    # A bare address cannot be pointed elsewhere by anyone's name server.
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name in names


def _netloc(origin: str) -> str | None:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc.lower() if parts.scheme in ("http", "https") else None


def ignore(path: str, status: int, seconds: float) -> None:
    """Observe no request."""


class RequestGuard:
    """The outermost application: checks requests, counts answers, turns errors into JSON.

    `open_paths` need no key; `observe` is called for each answer.
    """

    def __init__(
        self, app: App, limits: Limits, open_paths: Collection[str], observe: Observe
    ) -> None:
        self.app = app
        self.limits = limits
        self.open_paths = open_paths
        self.observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        status = 0
        is_read = False

        async def reply(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
            await send(message)

        async def read() -> MutableMapping[str, Any]:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body")
            return message

        try:
            try:
                self._check(scope)
                await self.app(scope, read, reply)
            except Exception as error:
                refused = as_refused(error)
                if status:  # the answer has begun: cut it off
                    raise
                # What nobody foresaw goes to the log; the client is told no more than that.
                if refused.status == 500 and refused is not error:
                    traceback.print_exc(file=sys.stderr)
                await self._refuse(refused, None if is_read else receive, reply)
        finally:
            # 499: the client left before the answer.
            self.observe(scope["path"], status or 499, time.monotonic() - began)

    def _check(self, scope: Scope) -> None:
        pairs: list[tuple[bytes, bytes]] = scope["headers"]
        # uvicorn bounds what waits for the end of a header, not one that came in one piece.
        if sum(len(name) + len(value) for name, value in pairs) > LARGEST_HEADER:
            raise Refusal(
                f"the header is longer than {LARGEST_HEADER} bytes; send a shorter one", status=431
            )
        names = [name for name, _ in pairs]
        for name in (b"host", b"origin", b"content-length", b"authorization", b"content-type"):
            if names.count(name) > 1:
                raise Refusal(f"duplicate header {name.decode()}; send it once")
        if scope["http_version"] not in ("1.0", "1.1"):
            raise Refusal(f"HTTP/{scope['http_version'][:9]} is not supported; use HTTP/1.1")
        # The first of several headers of a name counts.
        headers = dict(reversed(pairs))
        # Servers and proxies disagree about which of the two counts, which hides requests.
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise Refusal(
                "content-length and transfer-encoding cannot be combined; send one of them"
            )
        self.limits.check(scope, headers, self.open_paths)
        # That it is a number, h11 has checked.
        if int(headers.get(b"content-length", b"0")) > self.limits.body:
            raise too_large(self.limits.body)

    async def _refuse(self, refused: Refusal, receive: Receive | None, send: Send) -> None:
        """Send an error; close the connection, after some of a body that was not read."""
        body = orjson.dumps(error_of(refused))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        headers |= refused.headers
        raw = [(k.encode(), v.encode()) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": refused.status, "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        # Closing while bytes wait unread resets the connection, and the client loses the answer.
        if receive is not None:
            await read_leftover(receive)
        await send({"type": "http.response.body", "body": b""})


async def read_leftover(receive: Receive) -> None:
    """Read a body and forget it, up to a size, and while it comes; the protocol bounds the time."""
    left, seconds = LEFTOVER
    with contextlib.suppress(TimeoutError):
        async with timeout(seconds) as waiting:
            while left > 0:
                message = await receive()
                if message["type"] != "http.request":
                    return
                left -= len(message["body"])
                if not message.get("more_body"):
                    return
                waiting.reschedule(asyncio.get_running_loop().time() + seconds)


def too_large(most: int) -> Refusal:
    return Refusal(
        f"the body is larger than {most} bytes; send less, or raise --max-body-size", status=413
    )


def as_refused(error: Exception) -> Refusal:
    """Return what a client is answered for an exception."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, TimeoutError):
        message = (
            "the answer was not complete in time; ask for fewer tokens, or raise --request-timeout"
        )
        return Refusal(message, code="timeout", status=503)
    if isinstance(error, UserError):  # of the decoder, which knows its own limits
        return Refusal(str(error))
    return Refusal("internal error; see the server's log", status=500)


def error_of(refused: Refusal) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    if refused.status >= 500:
        kind = "server_error"
    error = error_object(refused.message, kind, refused.param, refused.code)
    return error | {"message": refused.message}
