"""Read torch.save files (a zip, or before 1.6 a stream) and plain pickles without running them.

A child process reads the pickle (`child.py`) and says what it holds and where its tensors lie. Here
the answer becomes values. Tensors are views of the mapped file and take no memory before they are
used. The child may have been misled, so what it says is checked against the file.
"""

from __future__ import annotations

import argparse
import io
import math
import mmap
import pickle
import stat
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.base import host
from meshwright.base.errors import bad_data
from meshwright.base.sandbox import Sandbox
from meshwright.checkpoint.pickle import child

READ = Sandbox(child.read, memory=512 << 20, seconds=10)
# Python has named it since 3.13; the number is Linux's.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# Keys of a file that collisions could make slow: a table of n takes up to n * n / 2 comparisons.
KEYS = 10_000
PLAIN_KEY = 1 << 22  # integers up to here are not counted among them
PAIR_KEY = 1 << 31  # the largest integer within a tuple
PAIR = 8  # the most parts of a tuple

mappings: weakref.WeakValueDictionary[tuple[int, ...], mmap.mmap] = weakref.WeakValueDictionary()


def load_pickle(
    path: str | Path, begin: int = 0, length: int | None = None, trust: bool = False
) -> Any:
    """Return the object in a file or a part of one, its tensors as views of the file on the CPU.

    Foreign objects become `Stub`s, byte strings of 64 KiB and more memoryviews, NumPy's arrays
    tensors, OrderedDict dict. With `trust` torch.load reads it, which runs whatever the file says.
    """
    path = Path(path)
    full = memoryview(mapped(path))
    end = len(full) if length is None else begin + length
    if not 0 <= begin < end <= len(full):
        raise bad_data(
            f"{path}: it has {len(full):,} bytes, and bytes {begin:,} to {end:,} are wanted"
        )
    try:
        if trust:
            return run_trusted(path, None if length is None and begin == 0 else full[begin:end])
        # Python's collector would walk a long answer again and again as it grows.
        with READ.kept(), host.collector_off():
            answer = READ({"path": str(path.absolute()), "begin": begin, "end": end})
            return AnswerDecoder(full).decode(answer)
    except Exception as error:  # damaged, hostile and trusted files can fail in any way
        reason = str(error) if type(error) is ValueError else f"damaged: {error!r:.300}"
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
            # torch wants writable memory; the mapping is private, so the file never changes.
            flags = mmap.MAP_PRIVATE | NO_RESERVE
            access = mmap.PROT_READ | mmap.PROT_WRITE
            with open(path, "rb") as file:
                mapping = mmap.mmap(file.fileno(), status.st_size, flags, access)
            mappings[key] = mapping
        return mapping
    except OSError as error:
        raise bad_data(f"cannot read {path}: {error.strerror or error}") from error


def run_trusted(path: Path, part: memoryview | None) -> Any:
    """Run the file, as the user asked with --trust-pickle."""
    content = memoryview(mapped(path)) if part is None else part
    head = bytes(content[:32])
    is_zip = head.startswith(b"PK\3\4")
    # torch.save's file, a zip or its older form, or else a plain pickle.
    is_torch = is_zip or child.MAGIC.to_bytes(10, "little") in head
    if is_torch:
        file = path if part is None else io.BytesIO(part)
        maps = is_zip and part is None
        return torch.load(file, "cpu", weights_only=False, mmap=maps)
    return pickle.loads(content)  # noqa: S301  the user trusts the file


# What the child's answer stands for


@dataclass(frozen=True, slots=True, eq=False)
class ForeignName:
    """A class or function that a file names."""

    module: str
    name: str

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}>"


class Stub:
    """Arguments and state of an object of a foreign class; a state's items read as attributes."""

    __slots__ = ("module", "name", "args", "state")

    def __init__(self, module: str, name: str, args: tuple[Any, ...], state: Any) -> None:
        self.module = module
        self.name = name
        self.args = args
        self.state = state

    def __getattr__(self, name: str) -> Any:
        # Python asks here for slots too, as long as they are not set.
        is_own = name.startswith("__") or name in Stub.__slots__
        if is_own or type(self.state) is not dict or name not in self.state:
            raise AttributeError(f"{self.name} has no {name}")
        return self.state[name]

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name} object>"


class AnswerDecoder:
    """Makes values of the lists of `child.Answer`, whose places must lie within the mapped file."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.slow_keys = 0
        self.decoders: dict[str, Callable[..., Any]] = {
            "list": lambda *parts: list(self.all(parts)),
            "tuple": lambda *parts: tuple(self.all(parts)),
            "set": lambda *parts: {self.checked_key(value) for value in self.all(parts)},
            "dict": self.table,
            "bytes": bytes.fromhex,
            "range": self.byte_range,
            "type": number_type,
            "tensor": self.tensor,
            "array": self.array,
            "namespace": lambda state: argparse.Namespace(**self.decode(state)),
            "object": lambda module, name, args, state: Stub(
                module, name, tuple(self.all(args)), self.decode(state)
            ),
            "class": ForeignName,
        }

    def decode(self, node: Any) -> Any:
        if type(node) is list:
            return self.decoders[node[0]](*node[1:])
        if type(node) not in child.PLAIN:
            raise ValueError(f"the process that reads it answered with a {type(node).__name__}")
        return node

    def all(self, nodes: Any) -> Iterator[Any]:
        return map(self.decode, nodes)

    def table(self, *parts: Any) -> dict[Any, Any]:
        keys = self.all(parts[::2])
        values = self.all(parts[1::2])
        items = zip(keys, values, strict=True)
        return {self.checked_key(key): value for key, value in items}

    def checked_key(self, key: Any) -> Any:
        """Return the key if it is quick to hash and compare; a long or nested one may never end.

        Hashes of texts are random in each process; tuples and large numbers can be made to collide.
        """
        is_tuple = type(key) is tuple and len(key) <= PAIR
        # Old optimizers number parameters by their addresses.
        largest = PAIR_KEY if is_tuple else 1 << 60
        parts = key if is_tuple else [key]
        for part in parts:
            kind = type(part)
            is_short = kind in (str, bytes) and len(part) <= 1024
            is_small = kind is int and abs(part) < largest
            is_single = part is None or kind in (bool, torch.dtype) or isinstance(part, Stub)
            if not (is_short or is_small or is_single):
                raise ValueError(f"a {type(key).__name__} as a key")
        if is_tuple or (type(key) is int and abs(key) > PLAIN_KEY):
            self.slow_keys += 1
            if self.slow_keys > KEYS:
                raise ValueError(f"more than {KEYS:,} keys that are tuples or large numbers")
        return key

    def byte_range(self, begin: int, end: int) -> memoryview:
        size = len(self.data)
        if not 0 <= begin <= end <= size:
            raise ValueError(f"bytes {begin:,} to {end:,} of a file of {size:,}")
        return self.data[begin:end]

    def tensor(
        self, kind: str, begin: int, count: int, offset: int, size: Any, stride: Any
    ) -> torch.Tensor:
        """Return a view of `count` numbers that begin at a byte of the file."""
        dtype = number_type(kind)
        if not all(map(child.are_sizes, ((begin, count, offset), size, stride))):
            raise ValueError("a tensor of something other than sizes")
        raw = self.byte_range(begin, begin + count * dtype.itemsize)
        # The view must lie within the storage, and not be larger: a stride of 0 repeats numbers.
        numbers = math.prod(size)
        last = offset
        for n, step in zip(size, stride, strict=True):
            last += (n - 1) * step
        if (numbers and last >= count) or numbers > count:
            what = f"a tensor of {tuple(size)}, strides {tuple(stride)}, from {offset:,}"
            raise ValueError(f"{what} on a storage of {count:,} numbers")
        if not numbers:
            return torch.empty(size, dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).as_strided(size, stride, offset)

    def array(self, kind: str, shape: Any, is_fortran: bool, raw: Any) -> Any:
        """Return NumPy's array as a tensor, or a number: a view of the file if it is large."""
        dtype = number_type(kind)
        data = self.decode(raw)
        sizes = [] if shape is None else shape
        if not child.are_sizes(sizes) or math.prod(sizes) * dtype.itemsize != len(data):
            raise ValueError(f"a NumPy array of {sizes} in {len(data):,} bytes")
        if not len(data):
            return torch.empty(sizes, dtype=dtype)
        # Short byte strings are copied, since a tensor on them could be written to.
        memory = data if isinstance(data, memoryview) else bytearray(data)
        flat = torch.frombuffer(memory, dtype=dtype)
        if shape is None:
            return flat.item()
        if is_fortran:
            return flat.view(sizes[::-1]).permute(*reversed(range(len(sizes))))
        return flat.view(sizes)


def number_type(name: str) -> torch.dtype:
    if name not in child.SIZES:
        raise ValueError(f"numbers of type {name:.20}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
