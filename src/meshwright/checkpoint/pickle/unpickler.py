"""Read a pickle as data: containers, numbers, strings, tensors, inert records of all else.

A pickle is a program. `translate` keeps the instructions that only build values; a program whose
declared sizes exceed COST is refused before it runs. An instruction that would call or change an
object (REDUCE, BUILD, ...) becomes a reference to something outside the pickle, which Python's
unpickler hands to us, as it does every global. Nothing that a file names is imported or called: a
global stands for a function of ours, a dtype, or a `ForeignName`, whose objects are `Stub`s.

Why not a library: pickle.Unpickler alone would let a file of 20 bytes allocate gigabytes, hash a
tuple of tuples for ever, and call `__setstate__`. torch.load(weights_only=True) calls nothing
foreign, but bounds neither memory nor time; maps only archives since torch 1.6, not the older form
nor parts of a file (.distcp); and refuses the Namespaces, enumerations and counters of honest
files unless each class is imported or named before.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
import pickletools
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.base.device import NVIDIA

COST = 128 << 20  # bytes of memory that one file's objects may take, where each instruction counts
STEP = 24  # bytes: 5 million of them take some seconds
LONG_BYTES = 1 << 16  # longer byte strings stay in the mapped file
LONG_TEXT, LONG_LINE, LONG_NUMBER = 4 << 20, 1024, 255  # bytes
DEPTH, VALUES = 100, 2_000_000  # limits of the finished tree, with shared parts counted each time
KEYS = 10_000  # of a file that collisions could make slow: a table of n such takes up to n * n / 2 comparisons
PLAIN_KEY, PAIR_KEY, PAIR = 1 << 22, 1 << 31, 8  # integers as keys and in tuples, and parts of a tuple

# Packages whose classes appear in honest checkpoints as settings and counters; they become Stubs.
INERT = (
    *("megatron", "deepspeed", "libai", "oneflow", "apex", "transformer_engine", "fp16", "mpu", "pathlib"),
    *("torch.distributed.checkpoint", "torch.nn.functional"),
)
INERT_NAMES = {
    *("_io.BytesIO", "io.BytesIO", "numpy.ndarray", "builtins.slice", "builtins.complex", "builtins.range"),
    *(f"builtins.{name}" for name in ("list", "dict", "tuple", "int", "float", "str", "bool")),
    *("torch.device", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.serialization._get_layout"),
}
DTYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool".split()
DTYPES += ["float8_e4m3fn", "float8_e5m2"]
STORAGES = dict(Double="float64", Float="float32", Half="float16", BFloat16="bfloat16", Long="int64", Int="int32")
STORAGES |= dict(Short="int16", Char="int8", Byte="uint8", Bool="bool", Untyped="uint8")
# NumPy's codes: kind and bytes, such as f8.
NUMPY = {f"{kind[0]}{bits // 8}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
NUMPY |= {"f2": "float16", "f4": "float32", "f8": "float64", "b1": "bool"}


class RefusedPickle(ValueError):
    """A pickle that is not read, and why."""


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

    def __init__(self, kind: ForeignName, args: tuple[Any, ...]) -> None:
        self.module, self.name, self.args = kind.module, kind.name, args
        self.state: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Stub.__slots__ or type(self.state) is not dict or name not in self.state:
            raise AttributeError(f"{self.name} has no {name}")
        return self.state[name]

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name} object>"


@dataclass(frozen=True, slots=True, eq=False)
class AllowedFunction:
    """A function of ours that stands for one that files call."""

    call: Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class StorageRange:
    """Elements of a mapped file; `begin` is None while their place is not known yet."""

    dtype: torch.dtype
    begin: int | None
    count: int


FindStorage = Callable[[str, int], int | None]  # a storage's key and size in bytes -> where it begins

# Instructions

LENGTHS = {op.code.encode("latin1")[0]: op.arg.n if op.arg else 0 for op in pickletools.opcodes}
PREFIXES = {
    pickletools.TAKEN_FROM_ARGUMENT1: struct.Struct("<B"),
    pickletools.TAKEN_FROM_ARGUMENT4: struct.Struct("<i"),
    pickletools.TAKEN_FROM_ARGUMENT4U: struct.Struct("<I"),
    pickletools.TAKEN_FROM_ARGUMENT8U: struct.Struct("<Q"),
}


def codes(names: str) -> dict[int, str]:
    """Return the instructions of these names in pickle, by code."""
    return {getattr(pickle, name)[0]: name for name in names.split()}


STOP, FRAME, GLOBAL, BINPUT = codes("STOP FRAME GLOBAL BINPUT")
PUTS, LONGS = codes("BINPUT LONG_BINPUT"), codes("LONG1 LONG4")
TEXTS = codes("SHORT_BINUNICODE BINUNICODE BINUNICODE8")
STRINGS = codes("SHORT_BINSTRING BINSTRING")  # texts of Python 2
BYTES = codes("SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8")

# Instructions that are copied, and the memory that each takes beside STEP and its argument. Missing
# are the registry of extensions, buffers outside the file and most of protocols 0 and 1.
COSTS = dict.fromkeys(codes("PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE EMPTY_TUPLE"), 0)
COSTS |= dict.fromkeys(codes("GLOBAL STACK_GLOBAL BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET"), 0)
COSTS |= dict.fromkeys(codes("INT LONG BININT BININT1 BININT2 BINFLOAT"), 32)
COSTS |= dict.fromkeys(codes("TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST"), 72)
COSTS |= dict.fromkeys(LONGS | TEXTS | STRINGS | BYTES, 72)
COSTS |= {pickle.EMPTY_DICT[0]: 80, pickle.EMPTY_SET[0]: 232}
PLAIN = {code: STEP + cost for code, cost in COSTS.items() if not LENGTHS[code] and code != STOP}

# Instructions that are replaced: how the operands become a tuple, and the method of PickleReader.
CALLS = {
    pickle.REDUCE: (pickle.TUPLE2, "reduce"),
    pickle.NEWOBJ: (pickle.TUPLE2, "reduce"),
    pickle.NEWOBJ_EX: (pickle.TUPLE3, "reduce"),
    pickle.BUILD: (pickle.TUPLE2, "build"),
    pickle.APPEND: (pickle.TUPLE1 + pickle.TUPLE2, "extend"),
    pickle.APPENDS: (pickle.TUPLE + pickle.TUPLE2, "extend"),
    pickle.SETITEM: (pickle.TUPLE2 + pickle.TUPLE2, "set_items"),
    pickle.SETITEMS: (pickle.TUPLE + pickle.TUPLE2, "set_items"),
    pickle.ADDITEMS: (pickle.TUPLE + pickle.TUPLE2, "add_items"),
    pickle.FROZENSET: (pickle.TUPLE + pickle.TUPLE1, "make_set"),
    pickle.BINPERSID: (pickle.TUPLE1, "find_storage"),
}
METHODS = [*dict.fromkeys(method for _, method in CALLS.values()), "find_bytes"]
CALL_COST = 200


def reference(method: str) -> bytes:
    """Return instructions that hand the tuple on top of the stack to a method of PickleReader."""
    return pickle.BININT1 + bytes([METHODS.index(method)]) + pickle.TUPLE2 + pickle.BINPERSID


REPLACED = {code[0]: operands + reference(method) for code, (operands, method) in CALLS.items()}


class TranslatedUnpickler(pickle.Unpickler):  # noqa: S301  it loads only what `translate` let through
    """Runs a translated program; every global and every reference is the reader's to answer."""

    def __init__(self, program: io.BytesIO, reader: PickleReader) -> None:
        super().__init__(program, encoding="latin1")
        self.reader = reader

    def find_class(self, module: str, name: str) -> Any:
        return self.reader.find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        operands, method = pid
        return getattr(self.reader, METHODS[method])(*operands)


class PickleReader:
    """Reads the pickles in a piece of memory, one after the other, within one allowance.

    `place` finds the storages of tensors; without it a pickle that mentions one is refused.
    """

    def __init__(
        self, data: memoryview, place: FindStorage | None = None, position: int = 0, end: int | None = None
    ) -> None:
        self.data, self.place, self.position = data, place, position
        self.end = len(data) if end is None else end  # of the program
        self.cost, self.slow_keys = 0, 0
        self.globals: dict[str, Any] = {}
        self.flat: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self.arrays: dict[int, torch.Tensor] = {}  # NumPy's arrays, by id
        self.long: list[memoryview] = []

    def load(self) -> Any:
        """Return the next pickle's object: a tree without cycles, which can be walked."""
        result = TranslatedUnpickler(self.translate(), self).load()
        self.measure(result, {})
        self.arrays, self.long = {}, []
        return result

    # The program

    def translate(self) -> io.BytesIO:
        """Return the next program without calls, frames and long byte strings."""
        data, end, out = self.data, self.end, io.BytesIO()
        copied = at = self.position
        code, memory = -1, 0
        while code != STOP:
            start = at
            code = data[at] if at < end else -1
            if code in PLAIN:
                self.charge(PLAIN[code])
                at += 1
                continue
            replaced, length = REPLACED.get(code), LENGTHS.get(code, 0)
            if replaced is None and code not in COSTS:
                self.check_end(at, 1)
                raise RefusedPickle(f"instruction {bytes([code])!r} at byte {at:,} is in no checkpoint we know")
            at = begin = at + 1
            cost = STEP + COSTS.get(code, CALL_COST)
            if length > 0:
                self.check_end(at, length)
                at += length
                if code in PUTS:
                    number = data[begin] if code == BINPUT else int.from_bytes(data[begin:at], "little")
                    cost, memory = cost + 16 * max(0, number - memory), max(number, memory)
            elif length < 0:
                begin, at = self.argument(code, at, length)
                cost += 2 * (at - begin)
                if code == GLOBAL:
                    self.find(*str(data[begin : at - 1], "utf-8").split("\n"))  # refused before anything runs
                if code in TEXTS:
                    cost += sys.getsizeof(str(data[begin:at], "utf-8", "surrogatepass"))
                elif code in BYTES and at - begin >= LONG_BYTES:
                    replaced = pickle.BININT + len(self.long).to_bytes(4, "little") + pickle.TUPLE1
                    replaced += reference("find_bytes")
                    cost = CALL_COST
                    self.long.append(data[begin:at])
            self.charge(cost)
            if replaced is not None or code == FRAME:
                out.write(data[copied:start])
                out.write(replaced or b"")
                copied = at
        out.write(data[copied:at])
        out.seek(0)
        self.position = at
        return out

    def argument(self, code: int, at: int, kind: int) -> tuple[int, int]:
        """Return where an argument begins and ends whose length the file declares."""
        begin = at
        if kind == pickletools.UP_TO_NEWLINE:
            for _ in range(2 if code == GLOBAL else 1):
                length_of_line = bytes(self.data[at : min(at + LONG_LINE, self.end)]).find(b"\n")
                if length_of_line < 0:
                    raise RefusedPickle(f"no line ends within {LONG_LINE:,} bytes after byte {at:,}")
                at += length_of_line + 1
            return begin, at
        prefix = PREFIXES[kind]
        self.check_end(at, prefix.size)
        (length,) = prefix.unpack_from(self.data, at)
        if code in LONGS and length > LONG_NUMBER:
            raise RefusedPickle(f"a number of {length:,} bytes; at most {LONG_NUMBER} are read")
        if code in TEXTS | STRINGS and length > LONG_TEXT:
            raise RefusedPickle(f"a text of {length:,} bytes; at most {LONG_TEXT:,} are read")
        at += prefix.size
        self.check_end(at, length)
        return at, at + length

    def check_end(self, at: int, count: int) -> None:
        if count < 0 or at + count > self.end:
            raise RefusedPickle(f"it ends at byte {self.end:,}, but byte {at:,} needs {count:,} more")

    def charge(self, count: int) -> None:
        self.cost += count
        if self.cost > COST:
            raise RefusedPickle(f"its objects would take more than {COST >> 20} MiB, not counting tensors")

    # The instructions that are replaced

    def find_bytes(self, number: int) -> memoryview:
        return self.long[number]

    def reduce(self, function: Any, args: Any, keywords: Any = None) -> Any:
        """Return what our function makes of the arguments, or a Stub for a foreign one."""
        if keywords:
            raise RefusedPickle("an object that is made with keywords")
        if type(args) is not tuple:
            raise RefusedPickle(f"{function!r:.200} is called with {type(args).__name__}, not a tuple")
        if isinstance(function, ForeignName):
            return Stub(function, args)
        if not isinstance(function, AllowedFunction):
            raise RefusedPickle(f"it calls a {type(function).__name__}")
        return function.call(*args)

    def build(self, target: Any, state: Any) -> Any:
        """Set the state of an object that may have one."""
        if isinstance(target, Stub):
            target.state = state
        elif type(target) is argparse.Namespace and type(state) is dict and all(type(k) is str for k in state):
            self.charge(sys.getsizeof(state))
            vars(target).update(state)
        elif id(target) in self.arrays and type(state) is tuple:
            _, shape, dtype, fortran, raw = state
            target.data = self.array(raw, dtype, shape, "F" if fortran else "C")
        elif type(target) is torch.dtype and type(state) is tuple and len(state) > 1 and state[1] in ("<", "|", "="):
            pass  # a little-endian type of NumPy
        elif type(target) is dict and type(state) is dict:
            pass  # attributes of an OrderedDict, where torch notes the versions of modules
        else:
            raise RefusedPickle(f"it sets the state of a {type(target).__name__}")
        return target

    def extend(self, target: Any, values: tuple[Any, ...]) -> Any:
        if type(target) is not list:
            raise RefusedPickle(f"it appends to {type(target).__name__}, not a list")
        before = sys.getsizeof(target)
        self.charge(16 * len(values))
        target.extend(values)
        self.charge(max(0, sys.getsizeof(target) - before))
        return target

    def set_items(self, target: Any, values: Sequence[Any]) -> Any:
        items = target
        if isinstance(target, Stub):  # its class is derived from dict
            self.charge(100)
            items = target.state = {} if target.state is None else target.state
        if type(items) is not dict:
            raise RefusedPickle(f"it sets items of {type(items).__name__}, not of a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            before = sys.getsizeof(items)
            items[self.key(key)] = value
            self.charge(16 + sys.getsizeof(items) - before)
        return target

    def add_items(self, target: Any, values: Iterable[Any]) -> Any:
        if type(target) is not set:
            raise RefusedPickle(f"it adds to {type(target).__name__}, not to a set")
        for value in values:
            before = sys.getsizeof(target)
            target.add(self.key(value))
            self.charge(16 + sys.getsizeof(target) - before)
        return target

    def make_set(self, values: Any = ()) -> Any:
        if type(values) not in (list, tuple):
            raise RefusedPickle("a set of something other than a list")
        return self.add_items(set(), values)

    def key(self, key: Any) -> Any:
        """Return the key if it is quick to hash and compare; a long or nested one may never end.

        Hashes of texts are random in each process; tuples and large numbers can be made to collide.
        """
        is_tuple = type(key) is tuple and len(key) <= PAIR
        largest = PAIR_KEY if is_tuple else 1 << 60  # old optimizers number parameters by their addresses
        for part in key if is_tuple else [key]:
            if (
                not (type(part) in (str, bytes) and len(part) <= 1024)
                and not (type(part) is int and abs(part) < largest)
                and not (part is None or type(part) is bool or isinstance(part, Stub) or type(part) is torch.dtype)
            ):
                raise RefusedPickle(f"a {type(key).__name__} as a key")
        if is_tuple or (type(key) is int and abs(key) > PLAIN_KEY):
            self.slow_keys += 1
            if self.slow_keys > KEYS:
                raise RefusedPickle(f"more than {KEYS:,} keys that are tuples or large numbers")
        return key

    def find_storage(self, pid: Any) -> StorageRange:
        """Return the storage that a persistent id names."""
        if self.place is None or type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
            raise RefusedPickle("a reference to something outside of it that is not a storage of a tensor")
        _, dtype, key, _, count, *view = pid
        if type(dtype) is not torch.dtype or type(key) is not str or type(count) is not int or count < 0:
            raise RefusedPickle("a storage without type, key or size")
        begin = self.place(key, count * dtype.itemsize)
        if view and view[0] is not None:  # in files before torch 1.6: a part of another storage
            _, offset, size = view[0]
            if not 0 <= offset <= offset + size <= count:
                raise RefusedPickle(f"a view of elements {offset:,} to {offset + size:,} on a storage of {count:,}")
            begin, count = None if begin is None else begin + offset * dtype.itemsize, size
        return StorageRange(dtype, begin, count)

    # Globals

    def find(self, module: str, name: str) -> Any:
        """Return what stands for a global."""
        if len(module) + len(name) > 500:
            raise RefusedPickle("a global whose name has more than 500 letters")
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if full not in self.globals:
            self.charge(500)
            self.globals[full] = self.resolve(full, module, name)
        return self.globals[full]

    def resolve(self, full: str, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES and hasattr(torch, name):
            return getattr(torch, name)
        kind, storage, _ = name.partition("Storage")
        if module in ("torch", f"torch.{NVIDIA}", "torch.storage") and storage and kind in STORAGES:
            return getattr(torch, STORAGES[kind])
        if full in FUNCTIONS:
            return AllowedFunction(getattr(self, FUNCTIONS[full]))
        if full in ("argparse.Namespace", "types.SimpleNamespace"):  # the latter from transformers' converters
            return AllowedFunction(argparse.Namespace)
        if full in INERT_NAMES or any(f"{module}.".startswith(f"{package}.") for package in INERT):
            return ForeignName(module, name)
        raise RefusedPickle(
            f"it names {full}, which is neither numbers nor settings, and was not run. --trust-pickle runs it, "
            "and with it whatever its author put in: only for files you trust"
        )

    # The functions that files call

    def tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
        if not isinstance(storage, StorageRange) or not all(map(are_sizes, ((offset,), size, stride))):
            raise RefusedPickle("a tensor made of something other than a storage and numbers")
        self.charge(1500)
        if storage.begin is None:
            return torch.empty(0)
        count = math.prod(size)
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if (count and last >= storage.count) or count > storage.count:
            what = f"a tensor of {size}, strides {stride}, from {offset:,}"
            raise RefusedPickle(f"{what} on a storage of {storage.count:,} numbers")
        if not count:
            return torch.empty(size, dtype=storage.dtype)
        key = storage.dtype, storage.begin
        if key not in self.flat:
            self.flat[key] = torch.frombuffer(self.data, dtype=key[0], count=storage.count, offset=key[1])
        return self.flat[key].as_strided(size, stride, offset)

    def tensor_of_bytes(self, storage: Any, *args: Any) -> torch.Tensor:
        """Return a tensor on a storage of bytes; strides and offset count elements."""
        offset, size, stride, _, _, dtype, *_ = args
        if not isinstance(storage, StorageRange) or type(dtype) is not torch.dtype:
            raise RefusedPickle("a tensor without a storage or type")
        count = storage.count * storage.dtype.itemsize // dtype.itemsize
        return self.tensor(StorageRange(dtype, storage.begin, count), offset, size, stride)

    def parameter(self, tensor: Any, *_: Any) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise RefusedPickle("a parameter that is not a tensor")
        return tensor

    def tensor_of_class(self, function: Any, _type: Any, args: Any, _state: Any) -> Any:
        if not isinstance(function, AllowedFunction) or type(args) is not tuple:
            raise RefusedPickle("a tensor of a class of its own")
        return function.call(*args)

    def size(self, numbers: Any) -> tuple[int, ...]:
        if not are_sizes(numbers):
            raise RefusedPickle("a torch.Size that is not made of numbers")
        return tuple(numbers)

    def mapping(self, *args: Any) -> dict[Any, Any]:
        """Return a dict for an OrderedDict or defaultdict, in its order."""
        result: dict[Any, Any] = {}
        if args and isinstance(args[0], (list, tuple, dict)):
            for key, value in args[0].items() if isinstance(args[0], dict) else args[0]:
                self.set_items(result, (key, value))
        return result

    def encoded(self, text: Any = b"", encoding: Any = "latin1") -> Any:
        """Return bytes, which pickles of protocol 2 spell as text."""
        if type(text) is str and encoding in ("latin1", "latin-1"):
            self.charge(len(text))
            return text.encode("latin1")
        if isinstance(text, (bytes, bytearray, memoryview)):
            return text
        raise RefusedPickle("an encoding that bytes do not need")

    def member(self, kind: Any, name: Any) -> Stub:
        """Stand for getattr() of an enum, by which some versions of Python write a member."""
        if not isinstance(kind, ForeignName) or type(name) is not str:
            raise RefusedPickle("getattr() of something other than an enum. It was not run")
        return Stub(kind, (name,))

    def empty_array(self, *_: Any) -> torch.Tensor:
        self.charge(1500)
        array = torch.empty(0)
        self.arrays[id(array)] = array
        return array

    def numpy_type(self, code: Any, *_: Any) -> Any:
        if type(code) is not str or code.lstrip("<|=") not in NUMPY:
            raise RefusedPickle(f"a NumPy array of {str(code)[:20] if type(code) is str else 'objects'}: not numbers")
        return getattr(torch, NUMPY[code.lstrip("<|=")])

    def scalar(self, dtype: Any, raw: Any) -> Any:
        return self.array(raw, dtype, (), "C").item()

    def array(self, raw: Any, dtype: Any, shape: Any, order: Any = "C") -> torch.Tensor:
        """Return NumPy's array as a tensor: a view of the file if it is large."""
        raw = raw.encode("latin1") if type(raw) is str else raw
        shape = (shape,) if type(shape) is int else shape
        is_raw = isinstance(raw, (bytes, bytearray, memoryview))
        if not is_raw or type(dtype) is not torch.dtype or not are_sizes(shape):
            raise RefusedPickle("a NumPy array that is not numbers")
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise RefusedPickle(f"a NumPy array of {shape} in {len(raw):,} bytes")
        self.charge(1500)
        if not len(raw):
            return torch.empty(shape, dtype=dtype)
        if not isinstance(raw, memoryview):
            self.charge(len(raw))
            raw = bytearray(raw)
        flat = torch.frombuffer(raw, dtype=dtype)
        if order == "F":
            return flat.view(tuple(shape[::-1])).permute(*reversed(range(len(shape))))
        return flat.view(tuple(shape))

    # The finished tree

    def measure(self, value: Any, measured: dict[int, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
        """Return the number of values that a full walk visits, and its depth.

        Lists that share children can expand to billions.
        """
        children: Iterable[Any]
        if isinstance(value, (list, tuple, set)):
            children = value
        elif isinstance(value, dict):
            children = value.values()
        elif isinstance(value, argparse.Namespace):
            children = vars(value).values()
        else:
            return 1, 0
        seen = measured.get(id(value))
        if seen is None:
            self.charge(150)
            measured[id(value)] = (0, DEPTH + 1)  # while unfinished: a tree that holds itself is too deep
            total, height = 1, 0
            for child in children:
                count, below = self.measure(child, measured, depth + 1) if depth < DEPTH else (1, DEPTH)
                total, height = total + count, max(height, below + 1)
            seen = measured[id(value)] = total, height
        if seen[1] > DEPTH or seen[0] > VALUES:
            raise RefusedPickle(f"its containers hold themselves, or each other {DEPTH} deep, or {VALUES:,} times")
        return seen


def are_sizes(values: Any) -> bool:
    is_short = type(values) in (tuple, list) and len(values) <= 16
    return is_short and all(type(v) is int and 0 <= v < 1 << 60 for v in values)


FUNCTIONS = {
    "torch._utils._rebuild_tensor": "tensor",
    "torch._utils._rebuild_tensor_v2": "tensor",
    "torch._utils._rebuild_tensor_v3": "tensor_of_bytes",
    "torch._utils._rebuild_parameter": "parameter",
    "torch._utils._rebuild_parameter_with_state": "parameter",
    "torch._tensor._rebuild_from_type_v2": "tensor_of_class",
    "torch.Size": "size",
    "collections.OrderedDict": "mapping",
    "collections.defaultdict": "mapping",
    "collections.Counter": "mapping",
    "builtins.set": "make_set",
    "builtins.frozenset": "make_set",
    "builtins.bytearray": "encoded",
    "builtins.bytes": "encoded",
    "builtins.getattr": "member",
    "_codecs.encode": "encoded",
    "numpy.core.multiarray._reconstruct": "empty_array",
    "numpy.core.multiarray.scalar": "scalar",
    "numpy.core.numeric._frombuffer": "array",
    "numpy.dtype": "numpy_type",
}
