"""Runs of one layer."""

import functools
from collections.abc import Callable

import pytest

from helpers import TinyRun


@pytest.fixture
def run(run: Callable[..., TinyRun]) -> Callable[..., TinyRun]:
    """run(flag, ...) trains a model of one layer."""
    return functools.partial(run, "--num-layers=1")
