"""Helpers that several test modules share."""

import contextlib
import io
import json
import os
import random
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from meshwright.__main__ import main
from meshwright.base.errors import BAD_DATA, UserError
from meshwright.checkpoint import native, steps
from meshwright.checkpoint.native import BoxedTensor
from meshwright.config import schema as settings
from meshwright.data import tokenizers
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer

TINY = settings.Model(
    num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16
)

# Flags of a run that takes a fraction of a second.
TINY_FLAGS = (
    "--num-layers=2 --hidden-size=32 --num-attention-heads=4 --seq-length=16 --max-position-embeddings=16 "
    "--micro-batch-size=2 --global-batch-size=4 --lr=1e-2 --train-iters=6 --eval-interval=3 --eval-iters=1 "
    "--log-interval=1 --mock-data --vocab-size=64 --num-workers=0 --device=cpu --no-tensorboard"
).split()
# Half of its time, for what happens around the steps.
SMALL_FLAGS = [*TINY_FLAGS, "--num-layers=1", "--micro-batch-size=4"]


def open_step(root: str | os.PathLike[str], step: int) -> native.NativeSource:
    """Open a native step, with its state and its settings."""
    return native.open_native(steps.step_folder(os.fspath(root), step), step)


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


def blend_rule(shares: list[float], size: int) -> tuple[list[int], list[int]]:
    """Apply the rule of blends: return the data set of each sample, and its number there."""
    taken, which, number = [0] * len(shares), [], []
    for i in range(size):
        behind = [share * float(max(i, 1)) - n for share, n in zip(shares, taken, strict=True)]
        best = behind.index(max(behind))
        which.append(best)
        number.append(taken[best])
        taken[best] += 1
    return which, number


def write_counting(prefix: str | os.PathLike[str], sizes: list[int], first: int = 0) -> None:
    """Write documents whose tokens count up from `first`; another `first` gives other tokens."""
    with Writer(os.fspath(prefix), np.int32) as writer:
        for n in sizes:
            writer.add(np.arange(first, first + n))
            writer.end_document()
            first += n


def read_rows(folder: Path, event: str = "step") -> list[dict[str, Any]]:
    """Return the rows of one event in metrics.jsonl."""
    path = folder / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [row for row in rows if row["event"] == event]


def read_losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder)]


class TinyRun:
    """A run of TINY_FLAGS and more: its exit status, what it printed, and its rows."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], *argv: object) -> None:
        capsys.readouterr()
        self.folder = folder
        self.status = main(["train", *TINY_FLAGS, "--run-dir", str(folder), *map(str, argv)])
        self.out, self.err = capsys.readouterr()

    def column(self, name: str, event: str = "step") -> list[Any]:
        return [row[name] for row in read_rows(self.folder, event)]

    @property
    def losses(self) -> list[float]:
        return self.column("loss")


def printed_losses(folder: Path) -> list[str]:
    """Return the lines of `report --losses`: iteration, loss, gradient norm and rate, exactly."""
    with captured_output() as (lines, _):
        assert main(["report", "--losses", str(folder)]) == 0
    return lines


def train_on_texts(folder: Path, texts: list[str], tokenizer: list[str], flags: list[str]) -> Path:
    """Preprocess the texts, a document each, and train on them; return the run folder."""
    prefix = str(folder / "a")
    Path(f"{prefix}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = ["--input", f"{prefix}.jsonl", "--output-prefix", prefix, "--append-eod"]
    run = [*"--eval-iters=0 --num-workers=0 --device=cpu --save".split(), str(folder / "run")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.training.run.write_report", lambda folder: None)
        assert main(["preprocess", *files, *tokenizer]) == 0
        assert (
            main(["train", *flags, *run, "--data-path", f"{prefix}_text_document", *tokenizer]) == 0
        )
    return folder / "run"


def spaced_words(folder: Path) -> tokenizers.HuggingFace:
    """Return a vocabulary of words with a space, which it leaves out where a text begins."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    library = Tokenizer(
        models.BPE(vocab={"▁a": 0, "▁b": 1, "</s>": 2}, merges=[], ignore_merges=True)
    )
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    library.save(str(folder / "tokenizer.json"))
    return tokenizers.HuggingFace(folder)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# Tensors, boxes and files of checkpoints

DTYPES = [getattr(torch, name) for name in native.TORCH.values()]
Box = tuple[tuple[int, ...], tuple[int, ...]]


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return reproducible random values of any type."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def hold_equal(a: native.TensorBoxes, b: native.TensorBoxes) -> bool:
    """Return whether both hold equal tensors under the names of `a`."""
    return all(torch.equal(a[name][2], b[name][2]) for name in a)


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def random_boxes(shape: tuple[int, ...], rng: random.Random) -> list[Box]:
    """Return boxes that make up a tensor of this shape, by random cuts."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(rng.randrange(6)):
        offset, size = boxes.pop(rng.randrange(len(boxes)))
        dims = [d for d in range(len(shape)) if size[d] > 1]
        if not dims:
            boxes.append((offset, size))
            continue
        d = rng.choice(dims)
        n = rng.randrange(1, size[d])
        boxes.append((offset, size[:d] + (n,) + size[d + 1 :]))
        boxes.append(
            (
                offset[:d] + (offset[d] + n,) + offset[d + 1 :],
                size[:d] + (size[d] - n,) + size[d + 1 :],
            )
        )
    rng.shuffle(boxes)
    return boxes


def box_slices(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))


def box_elements(full: torch.Tensor, boxes: list[Box]) -> torch.Tensor:
    """Return the elements of the boxes, one box after the other."""
    return torch.cat([full[box_slices(*box)].reshape(-1) for box in boxes])


def blank(named: native.TensorBoxes) -> dict[str, BoxedTensor]:
    """Return the same entries with other values, to be loaded into."""
    return {
        name: BoxedTensor(shape, boxes, torch.full_like(tensor, 77))
        for name, (shape, boxes, tensor) in named.items()
    }


def error_of(call: Callable[[], object], status: int = BAD_DATA) -> str:
    """Return the message of the UserError that the call must raise."""
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.status == status
    return str(caught.value)


def refused(status: int, words: str, call: Callable[[], object]) -> None:
    """Check that the call raises a UserError with this status, in whose message `words` match."""
    message = error_of(call, status)
    assert re.search(words, message), message


def named(name: object) -> tokenizers.Tokenizer:
    """Return the tokenizer of --tokenizer."""
    return tokenizers.build_tokenizer(settings.TokenizerFlags(tokenizer=str(name)))
