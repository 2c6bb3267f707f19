"""Write torch.save files, tensor after tensor.

Written by hand because torch.save needs all tensors in memory at once. Here a tensor may be a
`Later`, made when its bytes are due and dropped after them; torch.load sees the same file. Torch
aligns records to 64 bytes, so each is padded.
"""

from __future__ import annotations

import argparse
import functools
import io
import math
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint.boxes import strides
from meshwright.checkpoint.pickle.child import STORAGES
from meshwright.checkpoint.publish import Write

STORAGE_CLASSES: dict[torch.dtype, Any] = {
    getattr(torch, dtype): getattr(torch, f"{name}Storage")
    for name, dtype in STORAGES.items()
    if name != "Untyped"
}
HEADER = 30  # bytes of an entry's header, without its name
ALIGN = 64
PAD = struct.Struct("<2sH")  # head of a padding block: torch's letters, size
SIZES64 = 20  # bytes that zipfile adds to an entry's header
Data = bytes | bytearray | memoryview


@dataclass(frozen=True, eq=False)
class Later:
    """A tensor that is made when its bytes are written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


class StorageReference(NamedTuple):
    """A storage in the pickle."""

    key: str
    dtype: torch.dtype
    numbers: int


class TensorPickler(pickle.Pickler):
    """Writes tensors as torch does, their bytes elsewhere; refuses what our reader would."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[torch.Tensor | Later] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, Later)):
            shape = tuple(value.shape)
            stored = StorageReference(str(len(self.tensors)), value.dtype, math.prod(shape))
            self.tensors.append(value)
            # From the storage's beginning, without a gradient and without hooks.
            arguments: tuple[Any, ...] = (stored, 0, shape, strides(shape), False, OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments
        # The pickler's own way, for objects of these classes and for what the file names.
        named = (
            torch._utils._rebuild_tensor_v2,
            OrderedDict,
            argparse.Namespace,
            *STORAGE_CLASSES.values(),
        )
        is_named = any(value is known for known in named)
        if is_named or type(value) in (argparse.Namespace, OrderedDict, torch.dtype):
            return NotImplemented
        raise TypeError(f"a {type(value).__name__} is not written into a checkpoint")

    def persistent_id(self, value: Any) -> Any:
        if type(value) is StorageReference:
            return "storage", STORAGE_CLASSES[value.dtype], value.key, "cpu", value.numbers
        return None


def write_torch_file(tree: Any, send: Write) -> None:
    """Write a tree of containers, numbers, strings, Namespaces and tensors as torch.save does."""
    file = io.BytesIO()
    pickler = TensorPickler(file)
    pickler.dump(tree)
    # The entries in the order in which torch writes them.
    entries: dict[str, Callable[[], Data]] = {
        "data.pkl": file.getvalue,
        "byteorder": sys.byteorder.encode,
    }
    for key, tensor in enumerate(pickler.tensors):
        entries[f"data/{key}"] = functools.partial(tensor_bytes, tensor)
    entries["version"] = lambda: b"3\n"
    write_archive(send, ((f"archive/{name}", make) for name, make in entries.items()))


def tensor_bytes(tensor: torch.Tensor | Later) -> memoryview:
    made = tensor.make() if isinstance(tensor, Later) else tensor
    # The pickle says already what it is.
    shape = tuple(tensor.shape)
    if tuple(made.shape) != shape or made.dtype != tensor.dtype:
        actual = f"{tuple(made.shape)} {made.dtype}"
        raise ValueError(f"{shape} {tensor.dtype} was promised, {actual} was made")
    on_host = made.detach().cpu()
    flat = on_host.contiguous().view(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy().data)


# The zip archive


class AppendOnlyFile:
    """A file for zipfile that can only be appended to."""

    def __init__(self, send: Callable[[Data], None]) -> None:
        self.send = send
        self.position = 0

    def write(self, data: Data) -> int:
        self.send(data)
        self.position += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def write_archive(
    send: Callable[[Data], None], entries: Iterable[tuple[str, Callable[[], Data]]]
) -> None:
    """Write entries; each function makes its bytes when they are due."""
    stream = AppendOnlyFile(send)
    with zipfile.ZipFile(stream, "w") as out:  # type: ignore[call-overload]  # write() and flush() are all it needs
        for name, make in entries:
            info = zipfile.ZipInfo(name)
            begin = stream.position + HEADER + len(name.encode()) + PAD.size + SIZES64
            padding = -begin % ALIGN
            info.extra = PAD.pack(b"FB", padding) + bytes(padding)
            with out.open(info, "w", force_zip64=True) as file:
                file.write(make())
