"""Shared by all tests: few threads, because two tests run at once, and a small model to train."""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for name in [n for n in os.environ if n.startswith("MESHWRIGHT_")]:
    del os.environ[name]

import numpy.typing as npt  # noqa: E402
import pytest  # noqa: E402

from meshwright import console  # noqa: E402
from meshwright.checkpoint import native, steps  # noqa: E402
from meshwright.data.format.indexed import Indexed  # noqa: E402
from meshwright.settings import flags  # noqa: E402
from meshwright.settings import schema as settings  # noqa: E402

TINY = settings.Model(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16)

# Flags of a run of a fraction of a second.
TINY_FLAGS = [
    *(
        "--num-layers=2",
        "--hidden-size=32",
        "--num-attention-heads=4",
        "--seq-length=16",
        "--max-position-embeddings=16",
    ),
    *("--micro-batch-size=2", "--global-batch-size=4", "--lr=1e-2", "--train-iters=6", "--eval-interval=3"),
    *(
        "--eval-iters=1",
        "--log-interval=1",
        "--mock-data",
        "--vocab-size=64",
        "--num-workers=0",
        "--device=cpu",
        "--no-tensorboard",
    ),
]


def opened(root: str | os.PathLike[str], step: int) -> native.Native:
    """A step of ours, with its state and its settings."""
    return native.open_step(steps.step_folder(os.fspath(root), step), step)


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second, a tiny run a tenth: only tests marked `pictures` draw."""
    if request.node.get_closest_marker("pictures") is None:
        monkeypatch.setattr("meshwright.training.run.write_report", lambda folder: None)


@pytest.fixture(autouse=True)
def everything_is_said() -> None:
    """By the process of the tests, whatever a command before chose."""
    console.speak("stdout")


@contextlib.contextmanager
def heard() -> Iterator[tuple[list[str], list[str]]]:
    """Lines that are said in the block, and notices; filled at its end."""
    out, err = io.StringIO(), io.StringIO()
    said: tuple[list[str], list[str]] = ([], [])
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield said
    finally:
        said[0].extend(out.getvalue().splitlines())
        said[1].extend(err.getvalue().splitlines())


def tokens_of(indexed: Indexed, i: int) -> npt.NDArray[Any]:
    """Of one sequence."""
    start = int(indexed.pointers[i]) // indexed.dtype.itemsize
    return indexed.tokens[start : start + int(indexed.sizes[i])]


@pytest.fixture
def tiny_flags() -> list[str]:
    return list(TINY_FLAGS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Every run tells which flags of the vocabulary still answer "not yet", and shows the tables that tests have made."""
    for report in terminalreporter.getreports("passed"):
        for name, table in report.user_properties if report.when == "call" else ():
            if name == "table":
                terminalreporter.write_line(f"\n{table}\n")
    later: dict[int, set[str]] = {}
    for configuration in settings.EVERY:
        for _, f, _ in flags.fields(configuration).values():
            if flags.is_not_yet(f):
                later.setdefault(f.metadata["step"], set()).add(settings.spelling(f.name))
    for step, names in sorted(later.items()):
        terminalreporter.write_line(f"not yet, step {step}: {len(names)} flags: {' '.join(sorted(names))}")
