"""Helpers that several test modules share: a small model to train, what was printed, what a step
holds.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from meshwright.checkpoint import native, steps
from meshwright.data.format.indexed import Indexed
from meshwright.settings import schema as settings

TINY = settings.Model(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16)

# Flags of a run that takes a fraction of a second.
TINY_FLAGS = [
    "--num-layers=2",
    "--hidden-size=32",
    "--num-attention-heads=4",
    "--seq-length=16",
    "--max-position-embeddings=16",
    "--micro-batch-size=2",
    "--global-batch-size=4",
    "--lr=1e-2",
    "--train-iters=6",
    "--eval-interval=3",
    "--eval-iters=1",
    "--log-interval=1",
    "--mock-data",
    "--vocab-size=64",
    "--num-workers=0",
    "--device=cpu",
    "--no-tensorboard",
]


def open_step(root: str | os.PathLike[str], step: int) -> native.Native:
    """Open a native step, with its state and its settings."""
    return native.open_step(steps.step_folder(os.fspath(root), step), step)


@contextlib.contextmanager
def captured_output() -> Iterator[tuple[list[str], list[str]]]:
    """Capture the lines that the block prints on stdout and on stderr.

    Both lists are filled at its end.
    """
    out, err = io.StringIO(), io.StringIO()
    lines: tuple[list[str], list[str]] = ([], [])
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield lines
    finally:
        lines[0].extend(out.getvalue().splitlines())
        lines[1].extend(err.getvalue().splitlines())


def tokens_of(indexed: Indexed, i: int) -> npt.NDArray[Any]:
    """Return the tokens of sequence `i`."""
    start = int(indexed.pointers[i]) // indexed.dtype.itemsize
    return indexed.tokens[start : start + int(indexed.sizes[i])]
