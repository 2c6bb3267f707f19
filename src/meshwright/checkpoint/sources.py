"""An opened checkpoint of any program: its tensors under our names, none of them read yet.

Our own format is `NativeSource` in native.py. Every other one is a `MappedSource`: a table from our
names to views of mapped files, each one box of our tensor. A matrix that is transposed there, split
over ranks, or in another order of rows is a table of more and smaller views.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.base.errors import bad_data
from meshwright.base.files import sample
from meshwright.base.host import returned_memory
from meshwright.checkpoint.boxes import (
    Box,
    Shape,
    check_cover,
    intersection,
    minus,
    not_empty,
    plus,
    split_boxes,
)
from meshwright.checkpoint.formats import all_formats
from meshwright.optim.rule_table import AVERAGE
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


def flat_zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers to read into, whose memory, unlike torch's, the system has back at once."""
    import torch

    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(returned_memory(count * dtype.itemsize), dtype=dtype)


@dataclass
class Source(abc.ABC):
    """One step of a checkpoint.

    Names are ours: `h.0.attn.qkv.weight`, and with optimizer state `h.0.attn.qkv.weight/exp_avg`.
    """

    kind: str  # "native", or the name of a record in formats.py
    folder: Path  # of the step, or its only file
    step: int = 0
    version: str = "3.0"  # Megatron's format number, for the log
    version_note: str = ""  # a line of the log, behind the version
    config: dict[str, Any] = field(default_factory=dict)  # the known settings, under our names
    # as a run saves it (run_state.py); empty for weights alone
    state: dict[str, Any] = field(default_factory=dict)
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

    @abc.abstractmethod
    def parts(self, name: str) -> list[tuple[str, Box]]:
        """List the boxes of a tensor with the file that each is in."""

    def of_vocabulary(self, size: int) -> Source:
        """Return this source without the rows that only pad its tables, of which ours have none."""
        if size != self.vocab:
            raise bad_data(
                f"{self.folder} was made with a vocabulary of {self.vocab:,} ids, not {size:,}"
            )
        return self

    @property
    def identity(self) -> str:
        """A text that is equal on two nodes only if they see the same files."""
        return repr(
            (sorted(self.tensors.items()), sorted(self.state.items()), sorted(self.config.items()))
        )

    @property
    def counts_padding(self) -> bool:
        """Whether its vocabulary's size may include rows of padding."""
        theirs = all_formats().get(self.kind)
        return self.vocab is None or (theirs is not None and theirs.counts_padding)

    @property
    def has_optimizer(self) -> bool:
        return any("/" in name and not name.endswith(f"/{AVERAGE}") for name in self.tensors)


class TensorView(NamedTuple):
    """A box of our tensor, as a view of that size on another program's file."""

    offset: Shape
    tensor: torch.Tensor


# Files that tensors may be mapped from; other files of a run end otherwise or begin with a dot.
ENDINGS = ("", ".pt", ".bin", ".safetensors", ".distcp")
EDGE, FILES = 1 << 16, 10_000  # bytes hashed at each end of a file, and the most files


@dataclass
class MappedSource(Source):
    """Another program's checkpoint; checks that the views cover each tensor exactly once."""

    views: dict[str, list[TensorView]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        index: dict[str, dict[str, Any]] = {}
        for name, views in self.views.items():
            boxes = [Box(v.offset, tuple(v.tensor.shape)) for v in views]
            dtypes = {v.tensor.dtype for v in views}
            if len(dtypes) > 1:
                raise bad_data(f"{self.folder}: the parts of {name} are of several types: {dtypes}")
            # Nothing states the shape of the whole: it ends where the last of its parts do.
            ends = zip(*(plus(box.offset, box.size) for box in boxes), strict=True)
            index[name] = {
                "shape": tuple(map(max, ends)),
                "boxes": [box._asdict() for box in boxes],
            }
        try:
            check_cover(index)
        except ValueError as error:
            raise bad_data(f"{self.folder}: parts are missing or duplicated: {error}") from error
        self._tensors = {
            name: TensorInfo(
                index[name]["shape"], str(views[0].tensor.dtype).removeprefix("torch.")
            )
            for name, views in self.views.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def identity(self) -> str:
        """With the files' names, sizes and ends: other numbers make another checkpoint."""
        facts = [
            (str(p.relative_to(self.folder)), p.stat().st_size, sample(p, EDGE, 2))
            for p in files_in(self.folder)
        ]
        return repr((super().identity, facts))

    def fill(self, want: TensorBoxes) -> None:
        for name, (_, boxes, tensor) in want.items():
            whole = tensor.detach().view(-1)
            for box, flat in split_boxes(boxes, whole):
                self._fill_box(name, box, flat.view(box.size))

    def _fill_box(self, name: str, box: Box, target: torch.Tensor) -> None:
        from meshwright.kernels import moments

        for offset, stored in self.views[name]:
            view = Box(offset, tuple(stored.shape))
            low, high = intersection(box, view)
            if not_empty(low, high):
                # The shared elements have one place in the view and another in the wanted box.
                in_view = slices(minus(low, offset), minus(high, offset))
                in_box = slices(minus(low, box.offset), minus(high, box.offset))
                moments.assign(target[in_box], aligned(stored[in_view]))

    def parts(self, name: str) -> list[tuple[str, Box]]:
        return [(self.folder.name, Box(v.offset, tuple(v.tensor.shape))) for v in self.views[name]]

    def of_vocabulary(self, size: int) -> MappedSource:
        # Only tables have rows of padding, which are the last.
        cut = {}
        for name, views in self.views.items():
            if not shard.rule(name.partition("/")[0]).rows:
                cut[name] = views
                continue
            rows = self.tensors[name].shape[0]
            if rows < size:
                raise bad_data(
                    f"{self.folder}: {name} has {rows:,} rows, the vocabulary {size:,} ids"
                )
            cut[name] = [
                TensorView(v.offset, v.tensor[: size - v.offset[0]])
                for v in views
                if v.offset[0] < size
            ]
        return dataclasses.replace(self, vocab=size, views=cut)


def slices(low: Shape, high: Shape) -> tuple[slice, ...]:
    return tuple(map(slice, low, high))


def files_in(folder: Path) -> list[Path]:
    """List the first files in the order of their names; a checkpoint may also be a single file."""
    if folder.is_file():
        return [folder]
    found: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if path.suffix not in ENDINGS or path.name[0] == ".":
            continue
        if path.is_file() and os.access(path, os.R_OK):
            found.append(path)
            if len(found) == FILES:
                break
    return found


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied if it is unaligned: within a file it may begin at any byte."""
    import torch

    if tensor.data_ptr() % tensor.element_size() == 0 or not tensor.numel():
        return tensor
    # numpy reads such memory, but has no bfloat16, so the copy is made of integers.
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    copy = tensor.view(as_int).numpy().copy()
    return torch.from_numpy(copy).view(tensor.dtype)
