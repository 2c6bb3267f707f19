"""Follow `meshwright train` from its words to the first step, and count what is to be read.

LANDMARKS are the functions that a reader looks for on this way. The files that lead there are
those on the stack when they are called; a landmark's own file ends a branch of the way.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import meshwright
from helpers import TINY_FLAGS
from meshwright.__main__ import main
from meshwright.data.files.writer import Writer

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="code objects of Python 3.10 have no qualified name"
)
SOURCE = Path(meshwright.__file__).parent
MOST_THAT_LEAD, MOST_IN_ALL = 10, 22
LANDMARKS = {
    "runtime/ranks/world.py": "find_world",
    "config/checks.py": "training_problems",
    "training/before/resolve.py": "find_vocabulary",
    "base/device.py": "open_device",
    "runtime/ranks/connect.py": "join_ranks",
    "training/before/preflight.py": "require_equal_ranks",
    "parallel/layout.py": "connect",
    "training/before/memory.py": "require_memory",
    "training/network.py": "build_network",
    "training/state/state.py": "State.__init__",
    "data/datasets.py": "continue_datasets",
    "data/feed.py": "Feed.__init__",
    "training/state/folder.py": "prepare",
    "training/log/metrics.py": "Metrics.__init__",
    "training/loop.py": "Trainer.step",
}


def follow(argv: list[str]) -> tuple[Counter[str], set[str]]:
    """Return how often each landmark was met before the first step ended, and who led there."""
    met, leads = Counter[str](), set[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        name = file_of(frame)
        if event != "call" or LANDMARKS.get(name) != frame.f_code.co_qualname:
            return
        met[LANDMARKS[name]] += 1
        outer = frame.f_back
        while outer is not None:
            leads.add(file_of(outer))
            outer = outer.f_back

    sys.setprofile(note)
    try:
        assert main(argv) == 0
    finally:
        sys.setprofile(None)
    return met, leads - {""}


def file_of(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(SOURCE)) if path.is_relative_to(SOURCE) else ""


def test_the_way_of_train_to_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Writer(tmp_path / "data", np.uint16) as writer:
        for n in range(9):
            writer.add(np.arange(n, n + 30) % 61)
            writer.end_document()
    given = [word for word in TINY_FLAGS if word != "--mock-data"]
    data = ["--data-path", str(tmp_path / "data"), "--eval-iters=0"]
    met, leads = follow(
        ["train", *given, *data, "--train-iters=1", "--run-dir", str(tmp_path / "run")]
    )
    assert met == Counter(LANDMARKS.values())  # each once
    in_all = leads | LANDMARKS.keys()
    with capsys.disabled():
        print(f"\nargv to the first step: {len(leads)} files lead: {', '.join(sorted(leads))}")
        print(f"{len(in_all)} files with the ends: {', '.join(sorted(in_all - leads))}")
    assert len(leads) <= MOST_THAT_LEAD, leads
    assert len(in_all) <= MOST_IN_ALL, in_all
