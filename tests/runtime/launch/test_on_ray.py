"""`meshwright launch --engine ray`: its flags, and runs on a cluster of this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import sys
import types
from pathlib import Path
from typing import Any

import elastic_runs
import pytest

from meshwright.base.errors import UNAVAILABLE, UserError
from meshwright.cli import launch
from meshwright.training.before.resolve import complete_settings

HAS_RAY = all(importlib.util.find_spec(name) for name in ("ray", "pandas", "tensorboardX"))
DRIVER = str(Path(__file__).with_name("ray_driver.py"))


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    fake: Any = types.ModuleType("meshwright.runtime.launch.on_ray")
    fake.fit = lambda words, workers, **more: given.append((words, workers, more)) or 7
    fake.has_gpus = lambda: True
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(sys.modules["meshwright.runtime.launch"], "on_ray", fake, raising=False)
    more = {"use_gpu": True, "failures": 2, "complete": complete_settings}
    for words, workers in (
        ("--min-ranks 2 --max-ranks 4", (2, 4)),
        ("--max-ranks 4", (1, 4)),
        ("--nproc-per-node 4 --nnodes 2", 8),
        ("--nproc-per-node 4 --nnodes 2 --min-ranks 3", (3, 8)),
    ):
        assert (
            launch.main([*words.split(), "--engine=ray", "--max-restarts=2", "train", "--lr=1"])
            == 7
        )
        assert given.pop() == (["train", "--lr=1"], workers, more)
    assert launch.main("--engine=ray --max-ranks=2 train --device cpu".split()) == 7
    assert given.pop()[2]["use_gpu"] is False
    for words, message in (
        ("", "--engine ray needs --max-ranks"),
        ("--node-rank 1", "--engine ray and --node-rank"),
    ):
        with pytest.raises(UserError, match=message):
            launch.main(["--engine=ray", *words.split(), "train"])


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray() -> None:
    with pytest.raises(UserError, match=re.escape("pip install 'meshwright[ray]'")) as caught:
        launch.main(["--engine=ray", "--max-ranks=2", "train"])
    assert caught.value.status == UNAVAILABLE


@pytest.mark.long
@pytest.mark.skipif(not HAS_RAY, reason="Ray Train is not installed: pip install 'meshwright[ray]'")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what, workers", [("worker", [2]), ("node", [4, 3, 4])])
def test_a_run_goes_on(
    what: str, workers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray replaces a killed worker; without a node, there are fewer workers until it is back."""
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    process = elastic_runs.start(tmp_path, "log", ["-W", "ignore", DRIVER, str(tmp_path), what])
    try:
        assert process.wait() == 0, (tmp_path / "log").read_text()[-5000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (
        f"attempt {max(len(workers), 2)} on Ray, with {workers[-1]} workers"
        in (tmp_path / "log").read_text()
    )
    flags = elastic_runs.make_flags(tmp_path)
    assert elastic_runs.compare_with_one_process(tmp_path, flags, f"ray, a {what} lost") == workers
