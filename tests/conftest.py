"""Settings of every test: one thread, because two tests run at once.

No pictures; output not redirected.
"""

import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for name in [n for n in os.environ if n.startswith("MESHWRIGHT_")]:
    del os.environ[name]
# Programs that tests start take half as long, and so does collecting, if what was compiled is kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell's script has its background commands ignore Ctrl-C, and programs that they start do too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if sys.version_info < (3, 11):  # tests use what Python 3.11 has brought under its name there
    import contextlib

    from meshwright.base import python310

    sys.modules["tomllib"] = python310.tomllib

    class chdir(contextlib.AbstractContextManager[None]):  # noqa: N801
        def __init__(self, folder: str | Path) -> None:
            self.folder, self.before = folder, list[str]()

        def __enter__(self) -> None:
            self.before.append(os.getcwd())
            os.chdir(self.folder)

        def __exit__(self, *error: object) -> None:
            os.chdir(self.before.pop())

    contextlib.chdir = chdir  # type: ignore[misc, assignment]

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when kernels are defined

import selection  # noqa: E402
from faults import summary  # noqa: E402
from helpers import TINY_FLAGS, TinyRun  # noqa: E402
from meshwright.base import console, device  # noqa: E402

os.environ.setdefault(*device.FUSED_MULTIPLY_ADD)


def mend_interpreter() -> None:
    """Let Triton 3.6, which torch 2.11 asks for, loop to a loaded bound beside numpy 2.4.

    Its interpreter calls int() on arrays of one element, which numpy refuses since; later ones
    squeeze them.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch_and_squeeze(tensor: Any, scope: Any = None) -> None:
        patch_tensor(tensor, *([scope] if scope is not None else []))
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_and_squeeze


mend_interpreter()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file whose tests are all left out."""
    return (
        True
        if "not whole" in config.option.markexpr and selection.is_slow(collection_path)
        else None
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would look at every test again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave slow tests to `make test`, and most cases of thinned ones to `make test-long`."""
    names = [f"{item.path.name}::{getattr(item, 'originalname', item.name)}" for item in items]
    for item, marker in zip(
        items, selection.mark(names, not torch.cuda.is_available()), strict=True
    ):
        if marker:
            item.add_marker(marker)
        if faults := [fault for mark in item.iter_markers("fault") for fault in mark.args]:
            item.user_properties.append(("faults", faults))


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """figures(kills=8, differing="0/160", mttr=[1.2, 0.9]) adds to the lines of the faults."""
    return lambda **found: record_property("figures", found)


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the report, which takes a second where a tiny run takes a tenth: only tests marked
    `pictures` draw it.
    """
    if request.node.get_closest_marker("pictures") is None:
        monkeypatch.setattr("meshwright.training.run.write_report", lambda folder: None)
        monkeypatch.setattr("meshwright.training.state.folder.LivePage.draw", lambda page: None)


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let os.fsync only check its descriptor: a disk takes milliseconds.

    test_durability.py follows each fsync.
    """
    monkeypatch.setattr(os, "fsync", lambda fd: os.fstat(fd) and None)


@pytest.fixture(autouse=True)
def say_on_stdout() -> None:
    """Print lines on stdout, whatever an earlier command chose."""
    console.set_stream("stdout")


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., TinyRun]:
    """run(flag, ...) trains a tiny model in a folder of its own: run0, run1, ..."""
    count = itertools.count()
    return lambda *argv: TinyRun(tmp_path / f"run{next(count)}", capsys, *argv)


@pytest.fixture
def tiny_flags() -> list[str]:
    return list(TINY_FLAGS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the tables that tests made, and the faults that they injected."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties if report.when == "call" else ():
            if name == "table":
                terminalreporter.write_line(f"\n{text}\n")
    ends = [
        terminalreporter.getreports(outcome) for outcome in ("passed", "failed", "error", "skipped")
    ]
    # A module that is skipped while it is collected has a report of another kind.
    of_tests = (
        report for reports in ends for report in reports if hasattr(report, "user_properties")
    )
    for line in summary.lines(of_tests):
        terminalreporter.write_line(line)
