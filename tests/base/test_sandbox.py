"""Calls into a child process: its limits, its end, and whose child it is."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.base import sandbox, sandboxed
from meshwright.base.sandbox import Sandbox


def work(request: Any) -> Any:
    """Do what a request says; this file is also the child's."""
    what, amount = request
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "loop":
        while True:
            pass
    if what == "sleep":
        time.sleep(amount)
    if what == "raise":
        raise ValueError("x" * amount)
    if what == "nest":
        for _ in range(amount):
            request = [request]
    taken = bytes(amount) if what == "take" else b""
    return {"write": "x" * amount, "nest": request}.get(what, [os.getpid(), len(taken)])


@pytest.fixture(scope="module")
def call() -> Iterator[Sandbox]:
    made = Sandbox(work, memory=256 << 20, seconds=1)
    yield made
    made.stop()


def is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def test_calls_share_a_child(call: Sandbox) -> None:
    first, second = call(["take", 1000]), call(["take", 2000])
    assert first[0] == second[0] != os.getpid() and (first[1], second[1]) == (1000, 2000)
    call.stop()
    assert not is_alive(first[0])


@pytest.mark.parametrize(
    ("what", "amount", "says"),
    [
        ("take", 1 << 30, "it needs more than 256 MiB"),
        ("loop", 0, "it takes more than 1 s or 256 MiB"),
        ("crash", 0, "it takes more than 1 s or 256 MiB"),
        ("write", sandbox.ANSWER, "or writes more than 64 MiB"),
        ("nest", 100_000, "recursion"),
        ("raise", 100_000, "^x{1000}$"),
    ],
)
@pytest.mark.promise("Memory and time are bounded")
def test_limits(what: str, amount: int, says: str, call: Sandbox) -> None:
    """Each is refused, and the next call is served."""
    with pytest.raises(ValueError, match=says):
        call([what, amount])
    assert call(["take", 3])[1] == 3


@pytest.mark.promise(
    "A system without a limit of memory for a process, such as macOS, bounds only the time"
)
def test_a_system_without_a_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(sandboxed.resource, "setrlimit", refuse)
    sandboxed.limit_addresses(1 << 20)
    assert (
        sandboxed.answer(work, b'["take", 3]', 1 << 20)
        == json.dumps({"result": [os.getpid(), 3]}).encode()
    )


def test_an_answer_that_never_comes(call: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PATIENCE", 0.1)
    with pytest.raises(ValueError, match="takes more than"):
        call(["sleep", 3600])


def test_an_interrupted_call_leaves_no_answer_to_the_next(
    call: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sandbox.select, "select", interrupt)
        call(["take", 1])
    assert call(["take", 2])[1] == 2


def test_a_child_is_kept_within_the_outermost_block(call: Sandbox) -> None:
    with call.kept():
        with call.kept():
            process = call(["take", 1])[0]
        assert call(["take", 1])[0] == process
    assert not is_alive(process)


def test_a_fork_has_a_child_of_its_own(call: Sandbox) -> None:
    """Two processes that wrote into one pipe would read each other's answers."""
    process = call(["take", 1])[0]
    reads, writes = os.pipe()
    fork = os.fork()
    if not fork:
        try:
            os.write(writes, str(call(["take", 1])[0]).encode())
            call.stop()
        finally:
            os._exit(0)
    os.waitpid(fork, 0)
    assert int(os.read(reads, 100)) != process
    assert call(["take", 1])[0] == process
