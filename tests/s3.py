"""A small S3 server on loopback: objects, ranges, lists, parts and conditions, with faults.

Google's storage is asked the same way, except for conditions, which compare versions.

It keeps everything in memory. `faults` is asked before each request: it may return a status to
answer instead, "cut" to close the connection in mid-body, or "flip" to change a byte of the body.
It may also change `objects`, as another writer would, `salts`, so that an object of the same bytes
gets another tag, and `listed`, which lists show in place of the objects while it is set: some
services answer with lists that are out of date.
"""

import base64
import contextlib
import datetime
import hashlib
import itertools
import re
import threading
import time
import urllib.parse
import xml.sax.saxutils
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from meshwright.base.storage import store

Fault = int | str | None


class Bucket(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.listed: dict[str, bytes] | None = None
        self.salts: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.numbers = itertools.count()
        self.faults: Callable[[str, str], Fault] = lambda method, key: None
        self.log: list[tuple[str, str]] = []
        self.guard = threading.Lock()
        self.delay = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def tag(self, key: str, data: bytes) -> str:
        return f'"{hashlib.md5(data + self.salts.get(key, b"")).hexdigest()}"'

    def generation(self, key: str, data: bytes | None) -> str:
        """Return what stands for an object's version in Google's storage, 0 for none."""
        return "0" if data is None else str(int(self.tag(key, data)[1:13], 16) + 1)

    def marks(self, key: str, data: bytes) -> dict[str, str]:
        return {"ETag": self.tag(key, data), "x_goog_generation": self.generation(key, data)}

    def handle_error(self, request: object, address: object) -> None:
        """Keep silent about clients that are gone."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait 40 ms
    server: Bucket

    def log_message(self, *words: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", fault: Fault = None, **headers: str) -> None:
        self.send_response(status)
        length = headers.pop("length", str(len(body)))
        for name, value in {
            "Content-Length": length,
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if fault == "flip" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
        if fault == "cut":
            self.close_connection = True

    def handle_request(self) -> None:
        server = self.server
        url = urllib.parse.urlsplit(self.path)
        key = urllib.parse.unquote(url.path.partition("/bucket")[2].lstrip("/"))
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(server.delay)
        with server.guard:
            server.log.append((self.command, key))
            fault = server.faults(self.command, key)
        if isinstance(fault, int):
            return self.answer(fault, b"<Error><Code>SlowDown</Code></Error>")
        if fault == "cut" and self.command in ("PUT", "POST", "DELETE"):
            self.close_connection = True
            return None
        with server.guard:
            return getattr(self, f"of_{self.command.lower()}")(key, query, data, fault)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_request

    def of_get(self, key: str, query: dict[str, str], data: bytes, fault: Fault) -> None:
        if not key:
            return self.list(query)
        if (content := self.server.objects.get(key)) is None:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        tag, marks = self.server.tag(key, content), self.server.marks(key, content)
        if self.headers.get("If-Match", tag) != tag:
            return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        if span := self.headers.get("Range"):
            begin, end = span.removeprefix("bytes=").split("-")
            part = content[int(begin) : int(end) + 1]
            about = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(content)}"
            return self.answer(206, part, fault, **marks, Content_Range=about)
        return self.answer(200, content, fault, **marks)

    def of_head(self, key: str, query: dict[str, str], data: bytes, fault: Fault) -> None:
        if (content := self.server.objects.get(key)) is None:
            return self.answer(404)
        return self.answer(200, length=str(len(content)), **self.server.marks(key, content))

    def of_put(self, key: str, query: dict[str, str], data: bytes, fault: Fault) -> None:
        stated = self.headers.get("x-amz-checksum-sha256")
        if stated and base64.b64decode(stated) != hashlib.sha256(data).digest():
            return self.answer(400, b"<Error><Code>BadDigest</Code></Error>")
        if "uploadId" in query:
            self.server.parts[query["uploadId"]][int(query["partNumber"])] = data
            return self.answer(200, ETag=self.server.tag(key, data))
        content = self.server.objects.get(key)
        generation = self.server.generation(key, content)
        if self.headers.get("x-goog-if-generation-match", generation) != generation:
            return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        if self.headers.get("If-None-Match") == "*" and content is not None:
            return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        if (wanted := self.headers.get("If-Match")) and (
            content is None or self.server.tag(key, content) != wanted
        ):
            return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        self.server.objects[key] = data
        return self.answer(200, **self.server.marks(key, data))

    def of_post(self, key: str, query: dict[str, str], data: bytes, fault: Fault) -> None:
        if "uploads" in query:
            number = str(next(self.server.numbers))
            self.server.parts[number] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            return self.answer(200, text.encode())
        if "delete" in query:
            names = re.findall("<Key>(.*?)</Key>", data.decode())
            for name in names:
                self.server.objects.pop(xml.sax.saxutils.unescape(name), None)
            rows = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return self.answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())
        parts = self.server.parts.pop(query["uploadId"])
        content = self.server.objects[key] = b"".join(parts[n] for n in sorted(parts))
        tag = self.server.tag(key, content)
        text = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
        return self.answer(200, text.encode())

    def of_delete(self, key: str, query: dict[str, str], data: bytes, fault: Fault) -> None:
        self.server.parts.pop(query.get("uploadId", ""), None)
        if "uploadId" not in query:
            self.server.objects.pop(key, None)
        self.answer(204)

    def list(self, query: dict[str, str]) -> None:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        shown = self.server.objects if self.server.listed is None else self.server.listed
        keys = sorted(key for key in shown if key.startswith(prefix) and key > after)
        rest, keys = keys[100:], keys[:100]
        rows = "".join(
            f"<Contents><Key>{xml.sax.saxutils.escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{self.server.tag(key, shown[key])}</ETag><Size>{len(shown[key])}</Size></Contents>"
            for key in keys
        )
        more = f"<NextContinuationToken>{keys[-1]}</NextContinuationToken>" if rest else ""
        text = f"<ListBucketResult><IsTruncated>{str(bool(rest)).lower()}</IsTruncated>{more}{rows}</ListBucketResult>"
        self.answer(200, text.encode())


@contextlib.contextmanager
def serving_bucket(patch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Serve s3://bucket to this process and its children."""
    bucket = Bucket()
    thread = threading.Thread(target=bucket.serve_forever, args=(0.01,))
    thread.start()
    for name, value in {
        "ENDPOINT_URL": bucket.url,
        "ACCESS_KEY_ID": "x",
        "SECRET_ACCESS_KEY": "y",
    }.items():
        patch.setenv(f"AWS_{name}", value)
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setattr(store, "PAUSE", datetime.timedelta(milliseconds=5))
    store.forget()
    try:
        yield bucket
    finally:
        bucket.shutdown()
        bucket.server_close()
        thread.join()
        store.forget()
