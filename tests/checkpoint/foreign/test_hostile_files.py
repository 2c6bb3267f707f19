"""Every hostile file is refused with a reason, runs nothing, and takes little memory and time."""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hostile
import pytest
import safetensors.torch  # noqa: F401  so that no process that is measured loads it, or torch
import torch  # noqa: F401

from meshwright.checkpoint import loading, native
from meshwright.checkpoint.foreign.huggingface import reader as huggingface
from meshwright.checkpoint.foreign.pickle import pickles
from meshwright.checkpoint.registry import TORCH_DIST
from meshwright.checkpoint.steps import StepLocation
from meshwright.errors import BAD_DATA, UserError

pytestmark = pytest.mark.whole

MEMORY, SECONDS = 200 << 20, 5.0
OPENERS: dict[str, Callable[[Path, bool], Any]] = {
    "native": lambda path, _: native.open_native(path, 1, verify="full"),
    "pickle": lambda path, trust: pickles.load_pickle(path, trust=trust),
    "huggingface": lambda path, trust: huggingface.open_huggingface(path, trust=trust),
    "dcp": lambda path, trust: loading.open_step(
        StepLocation(TORCH_DIST, path, 1, path), loading.OpenOptions(trust=trust)
    ),
}


class Outcome(NamedTuple):
    """How opening a file ended: error, CPU seconds, peak bytes of memory."""

    case: hostile.Case
    path: Path
    marker: Path
    kind: str
    text: str
    seconds: float
    memory: int


def anonymous(process: int) -> int:
    text = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)  # missing once the process has ended
    return int(found[1]) * 1024 if found else 0


def open_all(cases: Sequence[hostile.Case], folder: Path, trust: bool = False) -> Iterator[Outcome]:
    """Open the files in turn in one forked process; its peak memory counts for each of them."""
    folder.mkdir()
    paths = [(folder / str(number) / "file", folder / str(number) / "marker") for number in range(len(cases))]
    for case, (path, marker) in zip(cases, paths, strict=True):
        path.parent.mkdir()
        case.write(path, marker)
    reads, writes = os.pipe()
    began = time.monotonic()
    with warnings.catch_warnings(action="ignore"):  # about threads, which pytest-xdist has
        child = os.fork()
    if not child:
        for case, (path, _) in zip(cases, paths, strict=True):
            os.write(writes, json.dumps(outcome_of(OPENERS[case.opener], path, trust)).encode() + b"\n")
        os._exit(0)
    os.close(writes)
    before, most, ended = anonymous(child), 0, 0
    while not ended:
        most = max(most, anonymous(child) - before)
        ended, status, _ = os.wait4(child, os.WNOHANG)
        if not ended and time.monotonic() - began > 60:
            os.kill(child, 9)
        time.sleep(0.003)
    with open(reads) as pipe:
        outcomes = [json.loads(line) for line in pipe]
    outcomes += [("killed", f"by signal {status}", 0.0)] * (len(cases) - len(outcomes))
    for case, (path, marker), outcome in zip(cases, paths, outcomes, strict=True):
        yield Outcome(case, path, marker, *outcome, most)


def outcome_of(open_it: Callable[[Path, bool], Any], path: Path, trust: bool) -> tuple[str, str, float]:
    began = time.process_time()
    try:
        open_it(path, trust)
        kind, text = "opened", ""
    except UserError as error:
        kind, text = "refused" if error.status == BAD_DATA else f"status {error.status}", str(error)
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
    return kind, text[:2000], time.process_time() - began


@pytest.mark.fault("F27", "F28")
@pytest.mark.promise(
    "Files outside of the folder are never opened",
    "What a file says about sizes is checked before memory is taken",
    "Checkpoints of other programs are pickles",
    "every instruction that would call or change an object is taken out",
    "Nothing falls back to that without the flag",
    "Folders of Hugging Face bring no code",
    "A folder whose model is a Python file of its own is refused",
    "Names and links that lead out of the folder are refused",
)
def test_hostile_files(tmp_path: Path, figures: Callable[..., None]) -> None:
    """None of them runs, whatever opens it, and each is refused with its reason."""
    small = [case for case in hostile.CASES if not case.measured]
    outcomes = list(open_all(small, tmp_path / "small"))
    for number, case in enumerate(case for case in hostile.CASES if case.measured):
        outcomes += open_all([case], tmp_path / str(number))
    wrong = []
    for case, path, marker, kind, text, seconds, memory in outcomes:
        good = kind == "refused" and re.search(case.says, text) and str(path) in text and len(text) <= 1500
        if not good or marker.exists() or memory > MEMORY or seconds > SECONDS:
            wrong.append(f"{case.name}: {kind} {seconds:.1f} s, {memory >> 20} MB: {text[:300]}")
    count, executed = len(hostile.CASES), sum(outcome.marker.exists() for outcome in outcomes)
    refused, most = sum(outcome.kind == "refused" for outcome in outcomes), max(o.memory for o in outcomes)
    figures(hostile_refused=f"{refused}/{count}", pickles_run=f"{executed}/{count}", hostile_mb=[most / 1e6])
    assert not wrong, "\n".join(wrong)
    assert len({outcome.case.name for outcome in outcomes}) == count == 156 and not executed


@pytest.mark.flag("trust_pickle")
@pytest.mark.fault("F27")
@pytest.mark.promise(
    "`--trust-pickle` passes the file to `torch.load` instead", "a network, data set or script of yours"
)
def test_their_payloads_work(tmp_path: Path) -> None:
    """The same files do run where the user trusts them, so none of them is a dud."""
    outcomes = open_all([case for case in hostile.CASES if case.runs], tmp_path / "trusted", trust=True)
    duds = [f"{case.name}: {kind} {text}" for case, _, marker, kind, text, *_ in outcomes if not marker.exists()]
    assert not duds, "\n".join(duds)
