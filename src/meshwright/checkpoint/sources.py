"""An opened checkpoint of any program: its tensors under our names, none of them read yet.

Our own format is `Native` in native.py. Every other one is a `Mapped`: a table from our names to
views of mapped files, each one box of our tensor. A matrix that is transposed there, split over
ranks, or in another order of rows is a table of more and smaller views.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.checkpoint.boxes import Box, Shape, check_cover, intersection, minus, not_empty, plus, split_boxes
from meshwright.errors import BAD_DATA, UserError
from meshwright.optim.schedule import Schedule
from meshwright.parallel import shard

if TYPE_CHECKING:
    import torch

# Tensors to load or save: name -> (global shape, boxes as (offset, size), tensor). The tensor is
# contiguous and holds the elements of its boxes, each in row order, one box after the other.
TensorBoxes = Mapping[str, tuple[Shape, Sequence[tuple[Shape, Shape]], "torch.Tensor"]]


class TensorInfo(NamedTuple):
    """Shape and type of a tensor that has not been read."""

    shape: Shape
    dtype: str  # torch's name: "float32"


@dataclass
class Source(abc.ABC):
    """One step of a checkpoint.

    Names are ours: `h.0.attn.qkv.weight`, and with optimizer state `h.0.attn.qkv.weight/exp_avg`.
    """

    kind: str  # "Megatron", "Hugging Face", ...: see steps.py
    folder: Path  # of the step, or its only file
    step: int
    version: str = "3.0"  # Megatron's format number, for the log
    config: dict[str, Any] = field(default_factory=dict)  # the known settings, under our names
    state: dict[str, Any] = field(default_factory=dict)  # as resume.State saves it; empty for weights alone
    vocab: int | None = None  # the true size, or None if unknown: then the tables may be padded
    notes: list[str] = field(default_factory=list)  # to be printed
    layout: str = ""  # the ranks over which its files are split, for people
    root: Path | None = None  # of the run, which may hold tokenizer/

    @property
    @abc.abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @abc.abstractmethod
    def fill(self, want: TensorBoxes) -> None:
        """Read the wanted tensors; names and shapes have been compared before."""

    def parts(self, name: str) -> list[tuple[str, Box]]:
        """List the boxes of a tensor with the file that each is in."""
        raise NotImplementedError

    def of_vocabulary(self, size: int) -> Source:
        """Return this source without the rows that only pad its tables."""
        raise NotImplementedError

    @property
    def identity(self) -> str:
        """A text that is equal on two nodes only if they see the same files."""
        return repr((sorted(self.tensors.items()), sorted(self.state.items()), sorted(self.config.items())))

    @property
    def has_optimizer(self) -> bool:
        return any("/" in name for name in self.tensors)


class TensorView(NamedTuple):
    """A box of our tensor, as a view of that size on another program's file."""

    offset: Shape
    tensor: torch.Tensor


# Files that tensors may be mapped from; other files of a run end otherwise or begin with a dot.
ENDINGS = ("", ".pt", ".bin", ".safetensors", ".distcp")
EDGE, FILES = 1 << 16, 10_000  # bytes hashed at each end of a file, and the most files


@dataclass
class MappedSource(Source):
    """Another program's checkpoint; checks that the pieces cover each tensor exactly once."""

    pieces: dict[str, list[TensorView]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        index: dict[str, dict[str, Any]] = {}
        for name, pieces in self.pieces.items():
            ends = zip(*(plus(p.offset, tuple(p.tensor.shape)) for p in pieces), strict=True)
            boxes = [{"offset": p.offset, "size": tuple(p.tensor.shape)} for p in pieces]
            dtypes = {p.tensor.dtype for p in pieces}
            if len(dtypes) > 1:
                raise UserError(f"{self.folder}: the parts of {name} are of several types: {dtypes}", BAD_DATA)
            index[name] = {"shape": tuple(map(max, ends)), "boxes": boxes}
        try:
            check_cover(index)
        except ValueError as error:
            raise UserError(f"{self.folder}: parts are missing or duplicated: {error}", BAD_DATA) from error
        self._tensors = {
            name: TensorInfo(index[name]["shape"], str(pieces[0].tensor.dtype).removeprefix("torch."))
            for name, pieces in self.pieces.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def identity(self) -> str:
        """With the files' names, sizes and ends: other numbers make another checkpoint."""
        return repr((super().identity, [(str(p.relative_to(self.folder)), *edges(p)) for p in files_in(self.folder)]))

    def fill(self, want: TensorBoxes) -> None:
        for name, (_, boxes, tensor) in want.items():
            for box, flat in split_boxes(boxes, tensor.detach().view(-1)):
                self._fill_box(name, box, flat.view(box.size))

    def _fill_box(self, name: str, box: Box, target: torch.Tensor) -> None:
        for offset, theirs in self.pieces[name]:
            low, high = intersection(box, Box(offset, tuple(theirs.shape)))
            if not_empty(low, high):
                there = tuple(slice(a, b) for a, b in zip(minus(low, offset), minus(high, offset), strict=True))
                here = tuple(slice(a, b) for a, b in zip(minus(low, box.offset), minus(high, box.offset), strict=True))
                target[here].copy_(aligned(theirs[there]))

    def parts(self, name: str) -> list[tuple[str, Box]]:
        return [(self.folder.name, Box(p.offset, tuple(p.tensor.shape))) for p in self.pieces[name]]

    def of_vocabulary(self, size: int) -> MappedSource:
        cut = {}
        for name, pieces in self.pieces.items():
            if not shard.rule(name.partition("/")[0]).rows:
                cut[name] = pieces
                continue
            rows = self.tensors[name].shape[0]
            if rows < size:
                raise UserError(f"{self.folder}: {name} has {rows:,} rows, the vocabulary {size:,} ids", BAD_DATA)
            cut[name] = [TensorView(p.offset, p.tensor[: size - p.offset[0]]) for p in pieces if p.offset[0] < size]
        return dataclasses.replace(self, vocab=size, pieces=cut)


def files_in(folder: Path) -> list[Path]:
    """List the first files in the order of their names; a checkpoint may also be a single file."""
    if folder.is_file():
        return [folder]
    found = (path for path in sorted(folder.rglob("*")) if path.suffix in ENDINGS and path.name[0] != ".")
    return list(itertools.islice((path for path in found if path.is_file() and os.access(path, os.R_OK)), FILES))


def edges(path: Path) -> tuple[int, str]:
    """Return a file's size and the SHA-256 of its first and last bytes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(EDGE)
        file.seek(max(size - EDGE, 0))
        return size, hashlib.sha256(first + file.read(EDGE)).hexdigest()


COUNTERS = "iteration consumed_train_samples schedule_samples optimizer_steps nonfinite_in_a_row rollbacks".split()
SCALE = {"dynamic": False, "scale": 1.0, "growth_tracker": 0, "hysteresis_tracker": 0}


def check_json(value: Any, where: object) -> None:
    """Refuse what cannot be a run's settings or state, since anyone may have made the file."""
    try:
        if not isinstance(value, dict):
            raise TypeError(f"{value!r:.100} is no dictionary")
        json.dumps(value, allow_nan=False, sort_keys=True)
    except (RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{where}: not what a run saves: {error!r:.300}", BAD_DATA) from error


def check_state(state: Any, where: object) -> None:
    """Refuse a state that is not as resume.State saves it, with the types that a run needs."""
    check_json(state, where)
    wrong = [name for name in COUNTERS if type(n := state.get(name, 0)) is not int or n < 0]
    losses = state.get("losses", [])
    if not isinstance(losses, list) or any(type(x) not in (int, float) for x in losses):
        wrong.append("losses")
    scale, curve = state.get("loss_scale", SCALE), state.get("schedule", {})
    if not isinstance(scale, dict) or any(type(scale.get(name)) not in (bool, int, float) for name in SCALE):
        wrong.append("loss_scale")
    kinds = {f.name: (str,) if f.type == "str" else (int, float) for f in dataclasses.fields(Schedule)}
    if not isinstance(curve, dict) or any(type(v) not in kinds.get(name, ()) for name, v in curve.items()):
        wrong.append("schedule")
    elif missing := [n for n in kinds if "schedule" in state and n not in curve and not hasattr(Schedule, n)]:
        wrong.append(f"schedule (no {missing[0]})")
    elif curve:
        try:
            schedule = Schedule(**curve)
            for samples in (0, schedule.decay, schedule.wd_samples):
                schedule.lr(samples)
                schedule.wd(samples)
        except (ArithmeticError, TypeError, ValueError) as error:
            wrong.append(f"schedule ({error})")
    if wrong:
        raise UserError(f"{where}: not what a run saves: {', '.join(wrong)}", BAD_DATA)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied if it is unaligned: within a file it may begin at any byte."""
    import torch

    if tensor.data_ptr() % tensor.element_size() == 0 or not tensor.numel():
        return tensor
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.from_numpy(tensor.view(as_int).numpy().copy()).view(tensor.dtype)
