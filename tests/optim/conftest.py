"""Runs of SMALL_FLAGS."""

import functools
from collections.abc import Callable

import pytest

from helpers import SMALL_FLAGS, TinyRun


@pytest.fixture
def run(run: Callable[..., TinyRun]) -> Callable[..., TinyRun]:
    """run(flag, ...) trains a model of one layer, with one micro-batch a step."""
    return functools.partial(run, *SMALL_FLAGS)
