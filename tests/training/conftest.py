"""Runs of SMALL_FLAGS."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import SMALL_FLAGS, TinyRun
from meshwright.__main__ import main


@pytest.fixture
def run(run: Callable[..., TinyRun]) -> Callable[..., TinyRun]:
    """run(flag, ...) trains a model of one layer, with one micro-batch a step."""
    return functools.partial(run, *SMALL_FLAGS)


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of SMALL_FLAGS."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.training.run.write_report", lambda folder: None)
        assert main(["train", *SMALL_FLAGS, "--save", str(folder)]) == 0
    return folder


@pytest.fixture
def finished(saved_run: Path) -> Callable[[Path], object]:
    """finished(folder) makes a copy of the folder of a run of SMALL_FLAGS."""
    return functools.partial(shutil.copytree, saved_run)
