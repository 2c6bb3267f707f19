"""Object storage by the library obstore: bounded reads and writes, retried, with clear errors.

Credentials, region and endpoint come from the environment, as other programs read them. They are
neither printed nor written to a file.
"""

from __future__ import annotations

import datetime
import functools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from meshwright.base.errors import BAD_DATA, IO, UNAVAILABLE, UserError, first_line
from meshwright.base.storage.addresses import address_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

PATIENCE = datetime.timedelta(minutes=3)  # in which a request is repeated
TRIES = 40  # of one request by the library
PAUSE = datetime.timedelta(seconds=0.1)  # before the second of them; then twice as long each time
REPEATS = 5  # of a request whose answer broke off
SMALL = 64 << 20  # bytes of an object that is read at once
PART = 16 << 20  # bytes of a part of an upload
MOST_PARTS = 9_000  # S3 takes 10,000
CURES = {
    "UnauthenticatedError": "set the credentials, such as AWS_ACCESS_KEY_ID or GOOGLE_APPLICATION_CREDENTIALS",
    "PermissionDeniedError": "the credentials may not do this; ask for the right, or give another address",
    "NotFoundError": "check the names of the bucket and of the object",
}
ELSE = "check the network, the bucket's name and region, and AWS_ENDPOINT_URL for other services than Amazon's"
# By scheme: the variables of which one gives credentials, and who gives those of a machine's role.
CREDENTIALS = {
    "s3": (
        (
            "AWS_ACCESS_KEY_ID",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_SKIP_SIGNATURE",
            "AWS_METADATA_ENDPOINT",
        ),
        "169.254.169.254",
    ),
    "gs": (
        (
            "GOOGLE_APPLICATION_CREDENTIALS",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_SKIP_SIGNATURE",
        ),
        "metadata.google.internal",
    ),
}
SETTING = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (~/.aws is not read; with Amazon's tool: "
    'eval "$(aws configure export-credentials --format env)"), or AWS_SKIP_SIGNATURE=true for a public bucket',
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a key, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
}
MISSING = ("NotFoundError", "FileNotFoundError")
CONFLICT = ("AlreadyExistsError", "FileExistsError", "PreconditionError")

_sizes: dict[Path, dict[str, int]] = {}  # of the objects below folders


class ChangedObject(UserError):
    """An object is not the one any more that is being read."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"{address} has changed while it was read; start again when it is complete", BAD_DATA
        )


class Entry(NamedTuple):
    """An object in a listing."""

    size: int
    tag: str | None  # differs after a change


class BucketObjects:
    """The objects of one bucket, by key."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.objects = open_bucket(bucket)
        # What a conditional write compares: Google's storage knows no tags there.
        self.condition: Literal["version", "e_tag"] = (
            "version" if bucket.startswith("gs:") else "e_tag"
        )

    def get(self, key: str) -> tuple[bytes, str | None] | None:
        """Return a small object and its tag, or None if there is none."""

        def act() -> tuple[bytes, str | None]:
            result = self.objects.get(key)
            if result.meta["size"] > SMALL:
                raise UserError(
                    f"{self.bucket}/{key}: {result.meta['size']:,} bytes, above the limit of {SMALL:,}",
                    IO,
                )
            return bytes(result.bytes()), result.meta[self.condition]

        return self.ask(key, act, MISSING)

    def read(self, key: str, begin: int, size: int, tag: str | None) -> memoryview:
        """Return a range of an object, all of it; raise ChangedObject if it has another tag.

        Without a tag, the caller has hashes of what it expects.
        """
        # A tag makes storage refuse to send what has changed.
        options: Any = {"range": (begin, begin + size)} | ({"if_match": tag} if tag else {})
        data = self.ask(
            key,
            lambda: self.objects.get(key, options=options).bytes(),
            (*CONFLICT, *MISSING) if tag else (),
        )
        if data is None:
            raise ChangedObject(f"{self.bucket}/{key}")
        if len(data) != size:
            raise UserError(
                f"{self.bucket}/{key}: ends at byte {begin + len(data):,}; it is shorter than before",
                IO,
            )
        return memoryview(data)

    def entry(self, key: str) -> Entry | None:
        """Return what a listing would say of an object, None if there is none."""
        meta = self.ask(key, lambda: self.objects.head(key), MISSING)
        return Entry(meta["size"], meta["e_tag"]) if meta else None

    def put(self, key: str, data: bytes | Path, mode: Any = "overwrite") -> str | None:
        """Write an object and return its tag; a large file is sent in parts.

        With the mode "create", or {"e_tag": tag} with a tag that `get` or such a call returned,
        return None if there is an object already, or one with another tag.
        """
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        # A conditional write is one request: storage compares and writes at once.
        in_parts = size > PART and mode == "overwrite"
        part = max(PART, -(-size // MOST_PARTS))
        if isinstance(data, Path) and not in_parts:
            data = data.read_bytes()  # it may be gone, or longer, at the next try
        wanted: Any = mode if isinstance(mode, str) else {self.condition: mode["e_tag"]}
        result = self.ask(
            key,
            lambda: self.objects.put(
                key, data, mode=wanted, use_multipart=in_parts, chunk_size=part
            ),
            CONFLICT if mode != "overwrite" else (),
        )
        return result["e_tag" if mode == "overwrite" else self.condition] if result else None

    def entries(self, prefix: str) -> dict[str, Entry]:
        """Return the objects below a prefix, by their keys without it."""
        prefix = prefix.rstrip("/") + "/" if prefix else ""

        def act() -> dict[str, Entry]:
            found = {}
            for page in self.objects.list(prefix or None):
                for meta in page:
                    key = meta["path"].removeprefix(prefix)
                    found[key] = Entry(meta["size"], meta["e_tag"])
            return found

        return self.ask(prefix, act) or {}

    def delete(self, keys: list[str]) -> None:
        """Delete objects, one after the other."""
        for key in keys:
            self.ask(key, functools.partial(self.objects.delete, key), MISSING)

    def ask(self, key: str, act: Callable[[], T], none_for: tuple[str, ...] = ()) -> T | None:
        """Return what `act` returns, or None for some errors of the library; explain others.

        The library repeats requests, but not one whose answer broke off before another writer
        changed the object, as a run's owner does: that is repeated here.
        """
        import obstore.exceptions as library

        until = time.monotonic() + PATIENCE.total_seconds()
        for left in reversed(range(REPEATS)):
            try:
                return act()
            except (library.BaseError, OSError) as error:
                kind = type(error).__name__
                if kind in none_for:
                    return None
                # An answer that broke off raises this kind of error alone.
                if kind == "GenericError" and left and time.monotonic() < until:
                    continue
                reason = first_line(error)[:300]
                status = BAD_DATA if kind in MISSING else IO
                scheme = self.bucket.partition("://")[0]
                # that of a role was asked
                if scheme in CREDENTIALS and CREDENTIALS[scheme][1] in reason:
                    raise no_credentials(self.bucket, "gives none") from None
                raise UserError(
                    f"{self.bucket}/{key}: {reason}; {CURES.get(kind, ELSE)}", status
                ) from None
        raise AssertionError("the last failure is raised")


def require_credentials(bucket: str) -> None:
    """Refuse a bucket without credentials at once: the library asks for a role for minutes."""
    scheme = bucket.partition("://")[0]
    names, giver = CREDENTIALS.get(scheme, ((), ""))
    # Google's own tool leaves a login there.
    login = Path("~/.config/gcloud/application_default_credentials.json").expanduser()
    if not giver or any(os.environ.get(name) for name in names):
        return
    if scheme == "gs" and login.exists():
        return

    # None are given: a machine of the cloud has a server that gives those of its role.
    try:
        socket.create_connection((giver, 80), timeout=2).close()
    except OSError:
        raise no_credentials(bucket, "does not answer") from None


def no_credentials(bucket: str, what: str) -> UserError:
    scheme = bucket.partition("://")[0]
    _, giver = CREDENTIALS[scheme]
    role = f"this machine has no role ({giver} {what})"
    return UserError(f"{bucket}: no credentials are given, and {role}; {SETTING[scheme]}", IO)


def open_bucket(bucket: str) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise UserError(
            f"{bucket} needs the package obstore, which is not installed: pip install 'meshwright[cloud]'",
            UNAVAILABLE,
        ) from None
    require_credentials(bucket)
    open_url: Any = from_url  # its overloads know no mapping of settings
    seconds = datetime.timedelta(seconds=1)
    # Storage may be away for minutes; a training waits for it instead of ending.
    options: dict[str, Any] = {"timeout": PATIENCE, "connect_timeout": 10 * seconds}
    # S3 checks the hash of what arrives. Another service that speaks S3 may have no TLS.
    more: dict[str, Any] = {"checksum_algorithm": "SHA256"} if bucket.startswith("s3:") else {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if bucket.startswith("s3:") and endpoint:
        more["endpoint"] = endpoint
        options["allow_http"] = endpoint.startswith("http://")
    backoff = {"init_backoff": PAUSE, "max_backoff": 15 * seconds, "base": 2}
    retries: Any = {"max_retries": TRIES, "retry_timeout": PATIENCE, "backoff": backoff}
    try:
        objects: ObjectStore = open_url(
            bucket, client_options=options, retry_config=retries, **more
        )
        return objects
    except (BaseError, ValueError) as error:
        raise UserError(f"{bucket}: {str(error)[:300]}; {ELSE}", IO) from None


@functools.cache
def store_of(bucket: str) -> BucketObjects:
    return BucketObjects(bucket)


def locate(path: str | Path) -> tuple[BucketObjects, str]:
    """Return the store and the key of a local path that stands for an address."""
    address = address_of(path)
    assert address is not None
    return store_at(address)


def store_at(address: str) -> tuple[BucketObjects, str]:
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    return store_of(f"{scheme}://{bucket}"), key.rstrip("/")


def size_of(path: Path) -> int | None:
    """Return the size of the object that a path stands for, if there is one."""
    if address_of(path) is None:
        return None
    # One listing answers for all names in a folder.
    if path.name not in _sizes.get(path.parent, ()):
        store, key = locate(path.parent)
        _sizes[path.parent] = {name: entry.size for name, entry in store.entries(key).items()}
    return _sizes[path.parent].get(path.name)


def forget_sizes(folder: Path) -> None:
    """Ask storage anew for the sizes below a folder: another writer may have removed some."""
    _sizes.pop(folder, None)


def forget() -> None:
    """Open the stores anew when they are needed."""
    store_of.cache_clear()
    _sizes.clear()


os.register_at_fork(after_in_child=forget)  # the library's threads are the parent's
