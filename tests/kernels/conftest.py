"""Tests of a Triton kernel are skipped where Triton is not installed; those of its twin run."""

from collections.abc import Generator

import pytest


def skip_without_triton() -> Generator[None, object, object]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
    pytest.skip("Triton is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from skip_without_triton())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from skip_without_triton())
