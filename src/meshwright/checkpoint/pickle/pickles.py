"""Read torch.save files (a zip, or before 1.6 a stream) and plain pickles without running them.

unpickler.py reads the mapped file: tensors are views of it and take no memory before they are used.
Writing is by hand because torch.save needs all tensors in memory at once. Here a tensor may be a
`Later`, made when its bytes are due and dropped after them; torch.load sees the same file.
"""

from __future__ import annotations

import argparse
import functools
import io
import math
import mmap
import pickle
import stat
import struct
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.base.errors import bad_data
from meshwright.checkpoint.boxes import strides
from meshwright.checkpoint.pickle import archive
from meshwright.checkpoint.pickle.unpickler import STORAGES, PickleReader
from meshwright.checkpoint.publish import Write

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of torch.save before 1.6
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # named since Python 3.13

STORAGE_CLASSES: dict[torch.dtype, Any] = {
    getattr(torch, dtype): getattr(torch, f"{name}Storage") for name, dtype in STORAGES.items() if name != "Untyped"
}

# Reading

mappings: weakref.WeakValueDictionary[tuple[int, ...], mmap.mmap] = weakref.WeakValueDictionary()


def load_pickle(path: str | Path, begin: int = 0, length: int | None = None, trust: bool = False) -> Any:
    """Return the object in a file or a part of one, its tensors as views of the file on the CPU.

    Foreign objects become `Stub`s, byte strings of 64 KiB and more memoryviews, NumPy's arrays
    tensors, OrderedDict dict. With `trust` torch.load reads it, which runs whatever the file says.
    """
    path = Path(path)
    full = memoryview(mapped(path))
    end = len(full) if length is None else begin + length
    if not 0 <= begin < end <= len(full):
        raise bad_data(f"{path}: it has {len(full):,} bytes, and bytes {begin:,} to {end:,} are wanted")
    data = full[begin:end]
    try:
        if trust:
            return run_trusted(path, None if length is None and begin == 0 else data)
        return read_archive(data) if bytes(data[:4]) == b"PK\3\4" else read_stream(data)
    except Exception as error:  # damaged, hostile and trusted files can fail in any way
        reason = str(error) if type(error) in (ValueError, *ValueError.__subclasses__()) else f"damaged: {error!r:.300}"
        raise bad_data(f"{path}: not a checkpoint that can be read: {reason}") from error


def mapped(path: Path) -> mmap.mmap:
    """Return the file, mapped once for all its readers without reserving memory."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise bad_data(f"{path}: {'empty' if stat.S_ISREG(status.st_mode) else 'not a file'}")
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        mapping = mappings.get(key)
        if mapping is None:
            flags, access = mmap.MAP_PRIVATE | NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            with open(path, "rb") as file:
                mapping = mmap.mmap(file.fileno(), status.st_size, flags, access)
            mappings[key] = mapping
        return mapping
    except OSError as error:
        raise bad_data(f"cannot read {path}: {error.strerror or error}") from error


def run_trusted(path: Path, part: memoryview | None) -> Any:
    """Run the file, as the user asked with --trust-pickle."""
    head = bytes(memoryview(mapped(path))[:32] if part is None else part[:32])
    is_zip = head.startswith(b"PK\3\4")
    if is_zip or MAGIC.to_bytes(10, "little") in head:
        file = path if part is None else io.BytesIO(part)
        return torch.load(file, "cpu", weights_only=False, mmap=is_zip and part is None)
    with open(path, "rb") if part is None else io.BytesIO(part) as plain:
        return pickle.load(plain)  # noqa: S301  the user trusts the file


def read_archive(data: memoryview) -> Any:
    records = archive.find_records(data)
    programs = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    prefix = programs[0].removesuffix("data.pkl") if len(programs) == 1 else ""
    if not prefix or any(not name.startswith(prefix) for name in records) or f"{prefix}constants.pkl" in records:
        raise ValueError("a zip archive, but not one of torch.save's")
    order = records.get(f"{prefix}byteorder")
    if order and bytes(data[order.begin : order.end][:10]) != b"little":
        raise ValueError("its numbers are big-endian; load it on a big-endian machine and convert it there")

    def locate(key: str, size: int) -> int:
        record = records.get(f"{prefix}data/{key}")
        if record is None:
            raise ValueError(f"there is no storage {key[:100]!r}")
        if size > record.end - record.begin:
            raise ValueError(f"the storage {key!r} has {record.end - record.begin:,} bytes, its pickle says {size:,}")
        return record.begin

    program = records[programs[0]]
    return PickleReader(data, locate, program.begin, program.end).load()


def read_stream(data: memoryview) -> Any:
    """Read a plain pickle, or torch's old form.

    That is a series of pickles (magic number, version, machine, object, keys of the storages), then
    the storages.
    """
    if bytes(data[257:262]) == b"ustar":
        raise ValueError("a tar archive of torch 0.1; load it with torch.load and save it again")
    reader = PickleReader(data)
    first = reader.load()
    if type(first) is not int or first != MAGIC:
        return first
    version, system = reader.load(), reader.load()
    if version != PROTOCOL or type(system) is not dict or not system.get("little_endian"):
        what = f"torch's old form in version {version!r:.20}, or big-endian"
        raise ValueError(f"{what}; load it with torch.load and save it again")
    begin, sizes, places = reader.position, dict[str, int](), dict[str, int]()

    def announce(key: str, size: int) -> None:
        if sizes.setdefault(key, size) != size:
            raise ValueError(f"the storage {key!r} has two sizes, {sizes[key]:,} and {size:,} bytes")

    reader.place = announce  # the object is read twice, since its storages' places follow it
    reader.load()
    keys = reader.load()
    if type(keys) is not list or any(type(key) is not str for key in keys) or set(keys) != set(sizes):
        raise ValueError("the storages that follow are not those of its tensors")
    at = reader.position
    for key in keys:
        (count,) = struct.unpack("<q", data[at : at + 8])
        places[key], at = at + 8, at + 8 + sizes[key]
        if at > len(data) or (count and sizes[key] % count) or (not count and sizes[key]):
            what = f"the storage {key!r} of {sizes[key]:,} bytes"
            raise ValueError(f"{what} is cut short, or declared to have {count:,} numbers")
    reader.place, reader.position = lambda key, size: places[key], begin
    return reader.load()


# Writing


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
            return torch._utils._rebuild_tensor_v2, (stored, 0, shape, strides(shape), False, OrderedDict())
        allowed = (torch._utils._rebuild_tensor_v2, OrderedDict, argparse.Namespace, *STORAGE_CLASSES.values())
        if type(value) in (argparse.Namespace, OrderedDict, torch.dtype) or any(value is known for known in allowed):
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
    entries: dict[str, Callable[[], archive.Data]] = {"data.pkl": file.getvalue, "byteorder": sys.byteorder.encode}
    entries |= {f"data/{key}": functools.partial(tensor_bytes, tensor) for key, tensor in enumerate(pickler.tensors)}
    entries["version"] = lambda: b"3\n"
    archive.write_archive(send, ((f"archive/{name}", make) for name, make in entries.items()))


def tensor_bytes(tensor: torch.Tensor | Later) -> memoryview:
    made = tensor.make() if isinstance(tensor, Later) else tensor
    if tuple(made.shape) != tuple(tensor.shape) or made.dtype != tensor.dtype:
        promised = f"{tuple(tensor.shape)} {tensor.dtype}"
        raise ValueError(f"{promised} was promised, {tuple(made.shape)} {made.dtype} was made")
    flat = made.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
