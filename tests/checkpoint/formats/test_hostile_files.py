"""Every hostile file is refused with a reason, runs nothing, and takes little memory and time."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
import safetensors.torch  # noqa: F401  so that no process that is measured loads it, or torch
import torch  # noqa: F401

from meshwright.checkpoint import loading
from meshwright.checkpoint.steps import TORCH_DIST, Place
from meshwright.errors import BAD_DATA, UserError

pytestmark = pytest.mark.whole

MEMORY, SECONDS = 200 << 20, 5.0


def opener(kind: str) -> Callable[[Path, bool], Any]:
    """What opens a file or folder, and whether to trust it."""
    module = {"pickle": "pickles", "dcp": "torch_dist"}.get(kind, kind)
    loaded = importlib.import_module(f"meshwright.checkpoint.{module}")
    if kind == "native":
        return lambda path, _: loaded.open_step(path, 1, verify="full")
    if kind == "pickle":
        return lambda path, trust: loaded.load(path, trust=trust)
    if kind == "dcp":
        return lambda path, trust: loading.open_place(
            Place(TORCH_DIST, path, 1, path), loading.OpenOptions(trust=trust)
        )
    return lambda path, trust: loaded.open(path, trust=trust)


def anonymous(process: int | str = "self") -> int:
    text = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)  # none: it has ended
    return int(found[1]) * 1024 if found else 0


class Outcome:
    """What a process of its own came to that opened a file: its error, bytes of memory at most, seconds of a processor."""

    def __init__(self, open_it: Callable[[Path, bool], Any], path: Path, trust: bool = False) -> None:
        reads, writes = os.pipe()
        began = time.monotonic()
        with warnings.catch_warnings(action="ignore"):  # of threads, which pytest-xdist has
            child = os.fork()
        if not child:
            told = outcome_of(open_it, path, trust)
            os.write(writes, json.dumps(told).encode()[:60_000])
            os._exit(0)
        os.close(writes)
        before, most, ended = anonymous(child), 0, 0
        while not ended:
            most = max(most, anonymous(child) - before)
            ended, status, used = os.wait4(child, os.WNOHANG)
            if not ended and time.monotonic() - began > 30:
                os.kill(child, 9)
            time.sleep(0.003)
        self.memory, self.seconds = most, used.ru_utime + used.ru_stime
        with open(reads) as pipe:
            text = pipe.read()
        self.kind, self.text = json.loads(text) if text else ("killed", f"by signal {status}")


def outcome_of(open_it: Callable[[Path, bool], Any], path: Path, trust: bool) -> tuple[str, str]:
    try:
        open_it(path, trust)
        return "opened", ""
    except UserError as error:
        return "refused" if error.status == BAD_DATA else f"status {error.status}", str(error)
    except BaseException as error:
        return type(error).__name__, str(error)[:500]


def test_hostile_files(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """None of them runs, whatever opens it: refused with the reason that is ours to give."""
    wrong, refused, executed, most = [], 0, 0, 0
    for number, case in enumerate(hostile.CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, marker = folder / "file", folder / "marker"
        case.write(path, marker)
        outcome = Outcome(opener(case.opener), path)
        executed += marker.exists()
        most = max(most, outcome.memory)
        good = outcome.kind == "refused" and re.search(case.says, outcome.text) and str(path) in outcome.text
        refused += bool(good)
        if (
            not good
            or marker.exists()
            or outcome.memory > MEMORY
            or outcome.seconds > SECONDS
            or len(outcome.text) > 1500
        ):
            wrong.append(
                f"{case.name}: {outcome.kind} {outcome.seconds:.1f} s, {outcome.memory >> 20} MB: {outcome.text[:300]}"
            )
        shutil.rmtree(folder)
    count = len(hostile.CASES)
    line = f"hostile: {refused} of {count} refused, {executed} executed, most memory {most / 1e6:.0f} MB"
    print(line)
    record_property("table", line)
    assert not wrong, "\n".join(wrong)
    assert len({case.name for case in hostile.CASES}) == count >= 45 and not executed


def test_their_payloads_work(tmp_path: Path) -> None:
    """The same files do run where the user trusts them, so that no file above is a dud."""
    duds = []
    for number, case in enumerate(case for case in hostile.CASES if case.runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, marker = folder / "file", folder / "marker"
        case.write(path, marker)
        outcome = Outcome(opener(case.opener), path, trust=True)
        if not marker.exists():
            duds.append(f"{case.name}: {outcome.kind} {outcome.text}")
    assert not duds, "\n".join(duds)
