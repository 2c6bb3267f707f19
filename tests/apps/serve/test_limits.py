"""Hostile and unlucky clients: malformed, slow, too large, too many, from elsewhere, gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from sites import Repeating, Site, read_all, site, wait_until

from meshwright.apps.pages import guard, protocol
from meshwright.apps.pages.guard import Limits
from meshwright.apps.serve.scheduler import ModelFailed, QueueFull, Scheduler
from meshwright.base.errors import UserError
from meshwright.data.tokenizers import Bytes
from meshwright.data.vocabularies import explain_failures

READ = 0.6  # seconds


@pytest.fixture(scope="module")
def hasty() -> Iterator[Site]:
    """A server with little patience."""
    with site(limits=Limits(read_seconds=READ, body=100_000)) as running:
        yield running


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def post(
    body: bytes, *headers: str, path: str = "/v1/completions", length: int | None = None
) -> bytes:
    size = f"Content-Length: {len(body) if length is None else length}"
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        size,
        *headers,
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


# Malformed requests


def malformed(rng: random.Random) -> bytes:
    """Return a request that must be refused; some are broken in several ways."""
    good = {"prompt": "ab", "max_tokens": 4}
    text = json.dumps(good).encode()
    huge = rng.choice([2**31, 2**63, 10**30, 1e308, -1])
    kinds = [
        lambda: rng.randbytes(rng.randint(1, 300)) + b"\r\n\r\n",
        lambda: b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        lambda: b"GET  /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        lambda: b"GET /health HTTP/1.1\r\n\r\n",  # no Host
        lambda: b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        lambda: b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        lambda: (
            rng.choice([b"PUT", b"DELETE", b"BREW"])
            + b" /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n"
        ),
        lambda: post(text, path=f"/{rng.randbytes(6).hex()}"),
        lambda: post(text[: rng.randint(1, len(text) - 1)]),
        lambda: post(text, length=-5),
        lambda: post(text, length=10**12),
        lambda: post(text, "Transfer-Encoding: chunked"),
        lambda: post(text, "Content-Length: 7"),
        lambda: post(text, "Transfer-Encoding: gzip"),
        lambda: post(text, "Expect: 100-continue").replace(b"application/json", b"text/plain"),
        lambda: post(rng.randbytes(rng.randint(1, 200))),
        lambda: post(b"[" * 5000),
        lambda: post(b'{"prompt": "\xff\xfe"}'),
        lambda: post(b'{"prompt": "\\ud800"}'),
        lambda: post(json.dumps({**good, "temperature": huge}).encode()),
        lambda: post(json.dumps({**good, "\x00": 1}).encode()),
        lambda: post(rng.choice([b"null", b"[]", b"3", b'"a"', b"", b"{}{}", b'{"prompt": NaN}'])),
    ]
    return rng.choice(kinds)()


def memory() -> int:
    """Return this process's memory in bytes; the server is in it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.fault("F30")
@pytest.mark.promise("Malformed requests get an error with a reason")
def test_malformed_requests_are_refused(
    hasty: Site, monkeypatch: pytest.MonkeyPatch, figures: Callable[..., None]
) -> None:
    monkeypatch.setattr(guard, "LEFTOVER", (1 << 20, 0.01))
    rng, found, sizes = random.Random(1), Counter[int](), []
    for number in range(400):
        raw = malformed(rng)
        reply = hasty.exchange(raw)
        if not reply:  # the connection was reset while the request was being sent
            continue
        found[status_of(reply)] += 1
        assert 400 <= status_of(reply) < 500, (raw[:200], reply[:200])
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"], raw[:200]
        if number in (150, 399):
            sizes.append(memory())
    assert found.total() > 380 and set(found) == {400, 404, 405, 413, 415, 431}, found
    assert sizes[1] - sizes[0] < 8 << 20, sizes
    assert hasty.ask("GET", "/health")[0] == 200
    wait_until(lambda: hasty.scheduler.seats == 0)
    figures(
        http_5xx=f"{sum(found[n] for n in found if n >= 500)}/{found.total()}",
        http_growth_mb=[(sizes[1] - sizes[0]) / 1e6],
    )


def test_a_defect_of_ours_is_an_error_500(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("meshwright.apps.serve.openai.read_completion", fail)
    with site() as running:
        status, error = running.error(prompt="a")
    assert status == 500 and error["type"] == "server_error" and "log" in error["message"]
    assert "ZeroDivisionError" in capsys.readouterr().err


# Sizes


@pytest.mark.fault("F30")
@pytest.mark.promise("Headers, bodies, time, the queue and the number of connections are limited")
def test_a_large_body_is_refused_at_once(hasty: Site) -> None:
    with hasty.connect() as s:
        s.sendall(post(b"", length=200 << 20))  # not a byte of it is sent
        assert status_of(s.recv(1 << 16)) == 413
    chunk = b"%x\r\n%s\r\n" % (60_000, b" " * 60_000)
    reply = hasty.exchange(
        post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + chunk * 2
    )
    assert status_of(reply) == 413 and b"100000 bytes" in reply


def test_a_client_that_sends_a_large_body_reads_the_answer(hasty: Site) -> None:
    """Also one that sends all of it first."""
    assert status_of(hasty.exchange(post(b" " * 500_000))) == 413
    status, answer, _ = hasty.ask("POST", "/v1/completions", b" " * (2 << 20))
    assert status == 413 and "larger than 100000 bytes" in answer["error"]["message"]


def test_a_tokenizer_that_panics_is_an_error_of_one_request(
    hasty: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the library raises then is a BaseException, which would end the server."""

    class PanicException(BaseException):
        pass

    def encode(self: Bytes, text: str) -> list[int]:
        with explain_failures("t.json: the tokenizer fails"):
            raise PanicException("index out of bounds")

    with monkeypatch.context() as m:
        m.setattr(Bytes, "encode", encode)
        status, error = hasty.error(prompt="ab")
        assert status == 400 and error["message"].startswith(
            "t.json: the tokenizer fails: index out of bounds"
        )
    assert hasty.complete(prompt="ab", max_tokens=1)


@pytest.mark.fault("F30")
@pytest.mark.promise("Headers, bodies, time, the queue and the number of connections are limited")
def test_a_large_header_is_refused(hasty: Site) -> None:
    """One that is a little too large is answered; the connection of a huge one may be reset."""
    begin = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-1: "
    assert (
        status_of(hasty.exchange(begin + b"y" * (protocol.LARGEST_HEADER - 100) + b"\r\n\r\n"))
        == 200
    )
    assert (
        status_of(hasty.exchange(begin + b"y" * (protocol.LARGEST_HEADER + 1000) + b"\r\n\r\n"))
        == 431
    )
    reply = hasty.exchange(begin + b"y" * (1 << 20) + b"\r\n\r\n")
    assert reply == b"" or status_of(reply) == 431
    assert hasty.ask("GET", "/health")[0] == 200


# Time


def slow_clients(running: Site) -> list[socket.socket]:
    """Open 200 connections: silent, with a slow header or body, or slow after a first request."""
    header = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    begins = [b"", header[:9], post(b'{"prom', length=50), header + header[:9]]
    opened = []
    for number in range(200):
        s = running.connect()
        s.setblocking(False)
        s.send(begins[number % 4])
        opened.append(s)
    return opened


def is_closed(s: socket.socket) -> bool:
    """Return whether the server has closed a connection; what it has sent is read."""
    try:
        while s.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    s.close()
    return True


@pytest.mark.fault("F31")
@pytest.mark.promise("Headers, bodies, time, the queue and the number of connections are limited")
def test_slow_clients_are_closed(hasty: Site, figures: Callable[..., None]) -> None:
    slow = dict(enumerate(slow_clients(hasty)))
    end = time.monotonic() + READ + 60  # a busy machine closes them later
    at, times = 0, list[float]()
    while slow and time.monotonic() < end:
        before = time.monotonic()
        assert hasty.ask("GET", "/health")[0] == 200
        times.append(time.monotonic() - before)
        at += 1
        for number, s in list(slow.items()):
            if number % 4:
                with contextlib.suppress(OSError):
                    s.send(b"x: y\r\nq"[at % 7 : at % 7 + 1])
            if is_closed(s):
                del slow[number]
        time.sleep(0.05)
    figures(slow_left=f"{len(slow)}/200", health_seconds=times)
    assert not slow, len(slow)
    wait_until(lambda: hasty.scheduler.seats == 0)


@pytest.mark.fault("F31")
def test_nobody_waits_for_slow_clients() -> None:
    """Others are answered before the patience with any slow client ends."""
    with site(limits=Limits(read_seconds=600)) as patient:
        slow = slow_clients(patient)
        for _ in range(10):
            assert patient.ask("GET", "/health")[0] == 200
            assert patient.complete(prompt="ab", max_tokens=1)
        assert not any([is_closed(s) for s in slow])
        for s in slow:
            s.close()


@pytest.mark.fault("F31")
def test_a_slow_header_is_named(hasty: Site) -> None:
    with hasty.connect() as s:
        s.sendall(b"GET / HTTP/1.1\r\nHo")
        assert status_of(read_all(s)) == 408


@pytest.mark.fault("F31")
def test_a_client_that_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pour(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        for _ in range(2000):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})  # type: ignore[operator]

    with site(limits=Limits(read_seconds=READ)) as running:
        monkeypatch.setattr(running.server.app, "app", pour)
        with running.connect() as s:
            s.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(READ + 0.3)
            assert len(read_all(s)) < 150_000_000


def test_an_answer_that_takes_too_long() -> None:
    with site(pause=0.05, limits=Limits(answer_seconds=0.2)) as running:
        status, error = running.error(prompt="a", max_tokens=40)
        assert status == 503 and error["code"] == "timeout"
        _, data, _ = running.ask(
            "POST", "/v1/completions", {"prompt": "a", "max_tokens": 40, "stream": True}
        )
        assert b'"text":"a"' in data and b'"code":"timeout"' in data and b"[DONE]" not in data
        wait_until(lambda: not running.decoder.rows)


@pytest.mark.fault("F31")
@pytest.mark.promise("Headers, bodies, time, the queue and the number of connections are limited")
def test_too_many_connections(monkeypatch: pytest.MonkeyPatch, hasty: Site) -> None:
    monkeypatch.setattr(protocol, "MOST_CONNECTIONS", 3)
    held = [hasty.connect() for _ in range(3)]
    time.sleep(0.05)
    assert hasty.exchange(HEALTH) == b""
    for s in held:
        s.close()
    wait_until(lambda: hasty.exchange(HEALTH) != b"")


# Who asks


@pytest.mark.parametrize(
    "host", ["localhost", "[::1]:80", "LOCALHOST:8000", "192.168.1.7", "my.name:1"]
)
def test_hosts_that_are_this_server(host: str) -> None:
    Limits(hosts=["my.name"]).check({"method": "GET", "path": "/"}, {b"host": host.encode()})


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "a:b", "[::1", "@localhost"],
)
@pytest.mark.promise("Requests that other sites' pages send through a browser are refused")
def test_hosts_that_are_not(fake: Site, host: str) -> None:
    status = fake.ask("GET", "/v1/models", None, Host=host)[0]
    assert status == (200 if host == "@localhost" else 403)  # what precedes @ is no name


@pytest.mark.promise("Requests that other sites' pages send through a browser are refused")
def test_pages_of_other_origins(fake: Site) -> None:
    own = f"http://127.0.0.1:{fake.port}"
    body = {"prompt": "a", "max_tokens": 1}
    assert (
        fake.ask("POST", "/v1/completions", body, Origin=own, Sec_Fetch_Site="same-origin")[0]
        == 200
    )
    for origin in (
        "http://evil.example",
        "null",
        f"http://localhost:{fake.port}",
        "http://127.0.0.1:1",
        "file://",
        "[",
    ):
        status, answer, _ = fake.ask("POST", "/v1/completions", body, Origin=origin)
        assert status == 403 and answer["error"]["code"] == "origin_not_allowed", origin
    assert fake.ask("GET", "/v1/models", None, Sec_Fetch_Site="cross-site")[0] == 403
    # a link
    assert (
        fake.ask("GET", "/", None, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
    )
    headers = fake.ask("GET", "/", None)[2]
    assert (
        "access-control-allow-origin" not in headers
        and "default-src 'none'" in headers["content-security-policy"]
    )
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.promise(
    "only the page itself and `/health` answer without it", "A key is all that protects a server"
)
def test_a_key() -> None:
    with site(limits=Limits(api_key="secret-key")) as running:
        for path in ("/", "/page.js", "/health"):
            assert running.ask("GET", path)[0] == 200
        for path in ("/v1/models", "/metrics", "/v1/models/fake"):
            assert running.ask("GET", path)[0] == 401
            assert running.ask("GET", path, None, Authorization="Bearer secret-key")[0] == 200
        status, answer, headers = running.ask(
            "PUT", "/api", {"prompts": ["a"]}, Authorization="Bearer wrong"
        )
        assert status == 401 and answer["message"] and headers["www-authenticate"] == "Bearer"


# Many at once


@pytest.mark.fault("F32")
@pytest.mark.promise("Headers, bodies, time, the queue and the number of connections are limited")
def test_load_is_answered_or_refused_and_never_mixed_up(figures: Callable[..., None]) -> None:
    """64 clients on 4 slots and a queue of 16: 200 or 429, and each gets its own text.

    The decoder waits until all have asked once, so that exactly 20 of these have a seat.
    """
    with site(pause=0.001, slots=4, queue=16) as running:
        found, first, lock = Counter[int](), Counter[int](), threading.Lock()
        running.decoder.gate.clear()

        def client(number: int) -> None:
            for turn in range(3):
                prompt = f"<{number}.{turn}>"
                body = {"prompt": prompt, "max_tokens": 30, "stream": bool(turn % 2)}
                status, answer, headers = running.ask("POST", "/v1/completions", body)
                with lock:
                    found[status] += 1
                    first[status] += turn == 0
                    if first[429] == 44:
                        running.decoder.gate.set()
                if status == 429:
                    assert 1 <= int(headers["retry-after"]) <= 60
                    continue
                text = (
                    answer["choices"][0]["text"]
                    if not turn % 2
                    else "".join(
                        json.loads(p[6:])["choices"][0]["text"]
                        for p in answer.decode().split("\n\n")[:-2]
                    )
                )
                assert text == (prompt * 30)[:30]

        with ThreadPoolExecutor(64) as pool:
            list(pool.map(client, range(64)))
        assert first == {200: 20, 429: 44} and set(found) == {200, 429} and found.total() == 192
        wait_until(lambda: running.scheduler.seats == 0)  # given back a moment after the answer
        assert running.decoder.most == 4 and running.scheduler.active == 0
        figures(answered=found[200], turned_away=found[429])


def test_retry_after_follows_the_time_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue asks for the moving mean of a request's time, for each waiting and one more."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        "meshwright.apps.serve.scheduler.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    scheduler = Scheduler(Repeating(), slots=1, queue=2)

    def seconds_when_full() -> int:
        with (
            scheduler.seat(),
            scheduler.seat(),
            scheduler.seat(),
            pytest.raises(QueueFull) as full,
            scheduler.seat(),
        ):
            pass
        return int(full.value.headers["retry-after"])

    def serve(seconds: float) -> None:
        for _ in range(60):
            with scheduler.seat():
                clock.now += seconds

    assert seconds_when_full() == 3  # before anything is known
    serve(8.0)
    assert seconds_when_full() == 24
    serve(100.0)
    assert seconds_when_full() == 60  # at most a minute


def test_a_large_request_does_not_hold_up_a_small_one() -> None:
    with site(pause=0.002, slots=2) as running:
        done: list[str] = []

        def large() -> None:
            running.complete(prompt=["ab"] * 40, max_tokens=10)
            done.append("large")

        thread = threading.Thread(target=large)
        thread.start()
        wait_until(lambda: running.scheduler.active)
        running.complete(prompt="c", max_tokens=10)
        done.append("small")
        thread.join()
        assert done == ["small", "large"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.fault("F32")
def test_work_stops_when_the_client_leaves(stream: bool) -> None:
    with site(pause=0.02) as running:
        s = running.connect()
        s.sendall(
            post(json.dumps({"prompt": "ab", "max_tokens": 60, "n": 3, "stream": stream}).encode())
        )
        wait_until(lambda: running.decoder.steps >= 3)
        s.close()
        wait_until(lambda: not running.decoder.rows)
        at = running.decoder.steps
        assert at <= 3 + 3
        time.sleep(0.1)
        assert running.decoder.steps == at and running.scheduler.seats == 0


@pytest.mark.fault("F32")
@pytest.mark.promise("Whoever has it may keep the server busy")
def test_a_client_that_leaves_the_queue() -> None:
    with site(pause=0.02, slots=1) as running:
        held = running.connect()
        held.sendall(post(json.dumps({"prompt": "ab", "max_tokens": 60}).encode()))
        wait_until(lambda: running.scheduler.active)
        with running.connect() as s:
            s.sendall(post(json.dumps({"prompt": "cd"}).encode()))
            wait_until(lambda: running.scheduler.waiting)
        wait_until(lambda: not running.scheduler.waiting)
        held.close()
        wait_until(lambda: running.scheduler.seats == 0)
        assert len(running.decoder.submitted) == 1


def test_logits_that_are_not_finite_end_the_texts_at_work_only(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from meshwright.base.errors import UserError

    with site() as running:
        running.decoder.error = UserError("the model's logits are not finite")
        status, error = running.error(prompt="ab")
        assert status == 500 and "not finite" in error["message"]
        assert running.complete(prompt="ab", max_tokens=2)


def test_a_decoder_that_fails_ends_the_server() -> None:
    with site() as running:
        running.decoder.error = ZeroDivisionError("broken")
        status, error = running.error(prompt="ab")
        assert status == 500 and error["code"] == "model_failed"
        assert isinstance(running.scheduler.broken, ZeroDivisionError)


@pytest.mark.parametrize(
    ("error", "message", "breaks"),
    [
        (RuntimeError("broken"), "the decoder failed: broken", True),
        (RuntimeError("out of memory. Tried to allocate 1 GiB"), "out of memory", False),
        (UserError("the model's logits are not finite"), "not finite", False),
    ],
)
def test_a_search_that_fails_is_answered(error: Exception, message: str, breaks: bool) -> None:
    """A lack of memory ends the search alone, as it ends texts; another error ends the server."""

    def search() -> Iterator[None]:
        yield
        raise error

    async def ask() -> None:
        scheduler = Scheduler(Repeating(), slots=1, queue=2)
        scheduler.start()
        with pytest.raises((ModelFailed, UserError), match=message):
            await asyncio.wait_for(scheduler.call(search()), 20)
        assert (scheduler.broken is not None) == breaks
        scheduler.close()

    asyncio.run(ask())


@pytest.mark.fault("F33")
def test_answers_that_take_longer_than_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ends cuts them off, and their texts stop."""
    monkeypatch.setattr(protocol, "DRAIN_SECONDS", 0.2)
    began = time.monotonic()
    with site(pause=0.05) as running:
        s = running.connect()
        s.sendall(post(json.dumps({"prompt": "ab", "max_tokens": 60, "stream": True}).encode()))
        wait_until(lambda: running.decoder.steps >= 2)
    assert time.monotonic() - began < 2 and not running.scheduler.seats
    with s:
        reply = read_all(s)
    assert b"data: " in reply and b"[DONE]" not in reply


def test_metrics(fake: Site) -> None:
    def values() -> dict[str, float]:
        status, text, headers = fake.ask("GET", "/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = values()
    fake.complete(prompt="abc", max_tokens=5)
    fake.error(bogus=1)
    fake.ask("GET", "/some/path")
    now = values()
    gained = {name: now[name] - before.get(name, 0) for name in now}
    assert (
        gained["meshwright_prompt_tokens_total"] == 3
        and gained["meshwright_generated_tokens_total"] == 5
    )
    assert gained['meshwright_requests_total{path="/v1/completions",status="400"}'] == 1
    assert gained['meshwright_requests_total{path="other",status="404"}'] == 1
    assert gained["meshwright_first_token_seconds_count"] == 1
    assert (
        now['meshwright_request_seconds_bucket{le="+Inf"}']
        == now["meshwright_request_seconds_count"]
    )
