"""Skip tests of Triton kernels where Triton is not installed; those of references run."""

from collections.abc import Generator

import pytest

from meshwright.kernels import references


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


@pytest.fixture(params=["plain", "triton"])
def with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run the plain reference, or the kernels whatever the device."""
    monkeypatch.setattr(references, "is_triton", lambda x: request.param == "triton")
    return bool(request.param == "triton")
