"""Check where a request comes from.

A page of another site can send requests to this machine from a reader's browser. Three checks keep
it out: the Host header must name this server or be a bare address (a name that its owner points at
127.0.0.1 later is refused), an Origin must be this server's own, and what a browser marks as
cross-site may only open a page.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from meshwright.fields import Refusal


def check_caller(method: str, headers: Mapping[bytes, bytes], names: Collection[str], hint: str) -> None:
    """Raise Refusal for a request that names another server or comes from another site's page.

    `names` are the server's own, in lower case; `hint` says what to do about another.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    if not is_own_host(host, names):
        message = f"the Host header is {host[:100]!r}, which is not this server; {hint}"
        raise Refusal(message, code="host_not_allowed", status=403)
    origin = headers.get(b"origin")
    if origin is not None and _netloc(origin.decode("latin-1")) != host.lower():
        raise Refusal("requests from pages of other origins are refused", code="origin_not_allowed", status=403)
    is_page = headers.get(b"sec-fetch-dest", b"document") == b"document"
    opens = headers.get(b"sec-fetch-mode") == b"navigate" and method == "GET" and is_page
    if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site") and not opens:
        raise Refusal("requests from pages of other sites are refused", code="origin_not_allowed", status=403)


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header is an address or one of these names, with or without a port."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
        urlsplit(f"//{host}").port  # noqa: B018 - raises if it is no number
    except ValueError:
        return False
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
