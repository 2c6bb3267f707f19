"""A pickle read as data: containers, numbers, strings, tensors, and inert notes of everything else.

Python's unpickler calls what a file names; this one calls nothing. A global is looked up in our own table, never
imported, and stands for a function of ours, a dtype, or a `Name` that can do nothing; what a file makes of a `Name` is a
`Stub`, which remembers what it was given. Written by hand, and not derived from pickle.Unpickler, because that lets a
file of 20 bytes allocate gigabytes (memo numbers, declared lengths) and hash a tuple of tuples for ever. Here each object
is counted before it is made, so memory and time end at COST, and the program itself is read from the mapped file.
"""

from __future__ import annotations

import argparse
import math
import pickle
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.device import NVIDIA

if TYPE_CHECKING:
    import torch

COST = 128 << 20  # bytes of memory, by sys.getsizeof, and
STEP = 24  # for each instruction: 5 million of them take about two seconds
LONG_BYTES = 1 << 16  # longer byte strings stay in the mapped file
LONG_TEXT = 4 << 20
DEPTH, VALUES = 100, 20_000_000  # of the finished tree, as one sees it who walks through it

# Packages whose classes stand in honest checkpoints as settings and counters: taken down as Stubs, never imported.
INERT = (
    *("megatron", "deepspeed", "libai", "oneflow", "apex", "transformer_engine", "fp16", "mpu", "pathlib"),
    *("torch.distributed.checkpoint", "torch.nn.functional"),
)
INERT_NAMES = {
    *("_io.BytesIO", "io.BytesIO", "numpy.ndarray", "builtins.slice", "builtins.complex", "builtins.range"),
    *(
        f"builtins.{name}" for name in ("list", "dict", "tuple", "int", "float", "str", "bool")
    ),  # as a defaultdict's kind
    *("torch.device", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.serialization._get_layout"),
}
DTYPES = {
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"),
    *("uint64", "bool", "float8_e4m3fn", "float8_e5m2"),
}
STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "Untyped": "uint8",
}
NUMPY = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u8": "uint64",
    "u4": "uint32",
    "u2": "uint16",
    "u1": "uint8",
    "b1": "bool",
}


class Refused(ValueError):
    """Why a pickle is not read on."""


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A class or function that a file names."""

    module: str
    name: str

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}>"


class Stub:
    """What an object of a class that is not ours was made of; a state that is a dict is read as attributes."""

    __slots__ = ("module", "name", "args", "state")

    def __init__(self, of: Name, args: tuple[Any, ...]) -> None:
        self.module, self.name, self.args = of.module, of.name, args
        self.state: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Stub.__slots__ or type(self.state) is not dict or name not in self.state:
            raise AttributeError(f"{self.name} has no {name}")
        return self.state[name]

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name} object>"


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """One of ours that stands for one that files call."""

    call: Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Elements of a mapped file; `begin` none: its place is not known yet."""

    dtype: torch.dtype
    begin: int | None
    count: int


Place = Callable[[str, int], int | None]  # a storage's key and size in bytes -> where it begins


class Machine:
    """Pickles of one piece of memory, one after the other, within one allowance.

    `place` finds the storages of tensors; without it a pickle that mentions one is refused.
    """

    def __init__(self, data: memoryview, place: Place | None = None, position: int = 0, end: int | None = None) -> None:
        self.data, self.place, self.position = data, place, position
        self.end = len(data) if end is None else end  # of the program
        self.cost = 0
        self.globals: dict[str, Any] = {}
        self.flat: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self.forget()

    def forget(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        self.arrays: dict[int, torch.Tensor] = {}  # by id, of NumPy's arrays

    def load(self) -> Any:
        """The next pickle's object: a tree without cycles, that can be walked through."""
        self.forget()
        while True:
            if self.position >= self.end:
                self.take(1)
            code = self.data[self.position]
            self.position += 1
            self.charge(STEP)
            if code == STOP:
                break
            operation = OPERATIONS.get(code)
            if operation is None:
                raise Refused(
                    f"instruction {bytes([code])!r} at byte {self.position - 1:,} is in no checkpoint we know"
                )
            operation(self)
        result = self.stack.pop()
        self.measure(result, {})
        self.forget()
        return result

    # Bytes and allowances

    def take(self, count: int) -> memoryview:
        if count < 0 or self.position + count > self.end:
            raise Refused(f"it ends at byte {self.end:,}, and {count:,} more are to come at {self.position:,}")
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def line(self) -> str:
        raw = bytes(self.data[self.position : self.position + 1024])
        end = raw.find(b"\n")
        if end < 0:
            raise Refused(f"no line ends after byte {self.position:,}")
        self.position += end + 1
        return raw[:end].decode()

    def charge(self, bytes_: int) -> None:
        self.cost += bytes_
        if self.cost > COST:
            raise Refused(f"its objects would take more than {COST >> 20} MiB; its tensors do not count")

    def push(self, value: Any) -> None:
        self.charge(sys.getsizeof(value))
        self.stack.append(value)

    def push_text(self, count: int, encoding: str = "utf-8") -> None:
        if count > LONG_TEXT:
            raise Refused(f"a text of {count:,} bytes, at most {LONG_TEXT:,} are read")
        self.push(str(self.take(count), encoding))

    def push_bytes(self, count: int) -> None:
        raw = self.take(count)
        self.push(bytes(raw) if count < LONG_BYTES else raw)

    def items(self) -> list[Any]:
        """What stands above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def push_above(self, make: Callable[[list[Any]], Any]) -> None:
        self.push(make(self.items()))

    # Instructions that need more than a line

    def remember(self, number: int) -> None:
        gap = number + 1 - len(self.memo)
        if gap > 0:
            self.charge(10 * gap)
            self.memo.extend([None] * gap)
        self.memo[number] = self.stack[-1]

    def mark(self) -> None:
        self.charge(100)
        self.marks.append(self.stack)
        self.stack = []

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise Refused(f"it appends to {type(target).__name__}, not a list")
        before = sys.getsizeof(target)
        self.charge(16 * len(values))
        target.extend(values)
        self.charge(max(0, sys.getsizeof(target) - before))

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Stub):  # of a class derived from dict
            self.charge(100)
            target.state = {} if target.state is None else target.state
            target = target.state
        if type(target) is not dict:
            raise Refused(f"it sets items of {type(target).__name__}, not of a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            before = sys.getsizeof(target)
            target[self.key(key)] = value
            self.charge(16 + sys.getsizeof(target) - before)

    def add_items(self, values: Iterable[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise Refused(f"it adds to {type(target).__name__}, not to a set")
        for value in values:
            before = sys.getsizeof(target)
            target.add(self.key(value))
            self.charge(16 + sys.getsizeof(target) - before)

    def key(self, key: Any) -> Any:
        """A key that is hashed and compared in an instant: long and nested ones can be made to take for ever."""
        for part in key if type(key) is tuple and len(key) <= 64 else [key]:
            if (
                not (type(part) in (str, bytes) and len(part) <= 1024)
                and not (type(part) is int and abs(part) < 1 << 60)
                and not (part is None or type(part) is bool or isinstance(part, Stub) or is_dtype(part))
            ):
                raise Refused(f"a {type(key).__name__} as a key")
        return key

    def reduce(self, function: Any, args: Any) -> None:
        if type(args) is not tuple:
            raise Refused(f"{function!r} is called with {type(args).__name__}, not a tuple")
        if isinstance(function, Name):
            self.push(Stub(function, args))
        elif isinstance(function, Function):
            self.push(function.call(*args))
        else:
            raise Refused(f"it calls a {type(function).__name__}")

    def build(self, state: Any) -> None:
        target = self.stack[-1]
        if isinstance(target, Stub):
            target.state = state
        elif type(target) is argparse.Namespace and type(state) is dict and all(type(k) is str for k in state):
            self.charge(sys.getsizeof(state))
            vars(target).update(state)
        elif id(target) in self.arrays and type(state) is tuple:
            _, shape, dtype, fortran, raw = state
            target.data = self.array(raw, dtype, shape, "F" if fortran else "C")
        elif is_dtype(target) and type(state) is tuple and len(state) > 1 and state[1] in ("<", "|", "="):
            pass  # of NumPy, little-endian
        elif type(target) is dict and type(state) is dict:
            pass  # an OrderedDict's attributes: torch notes versions of modules there
        else:
            raise Refused(f"it sets the state of a {type(target).__name__}")

    def persistent(self, pid: Any) -> None:
        if self.place is None or type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
            raise Refused("a reference to something outside of it that is no storage of a tensor")
        _, dtype, key, _, count, *view = pid
        if not is_dtype(dtype) or type(key) is not str or type(count) is not int or count < 0:
            raise Refused("a storage without type, key or size")
        begin = self.place(key, count * dtype.itemsize)
        if view and view[0] is not None:  # in files before torch 1.6: a part of another storage
            _, offset, size = view[0]
            if not 0 <= offset <= offset + size <= count:
                raise Refused(f"a view of elements {offset:,} to {offset + size:,} on a storage of {count:,}")
            begin, count = None if begin is None else begin + offset * dtype.itemsize, size
        self.push(Storage(dtype, begin, count))

    # Globals

    def find(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > 500:
            raise Refused("a global without a name, or with one of more than 500 letters")
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if full not in self.globals:
            self.charge(500)
            self.globals[full] = self.resolve(full, module, name)
        return self.globals[full]

    def resolve(self, full: str, module: str, name: str) -> Any:
        import torch

        if module == "torch" and name in DTYPES and hasattr(torch, name):
            return getattr(torch, name)
        kind, storage, _ = name.partition("Storage")
        if module in ("torch", f"torch.{NVIDIA}", "torch.storage") and storage and kind in STORAGES:
            return getattr(torch, STORAGES[kind])
        ours = FUNCTIONS.get(full)
        if ours is not None:
            return Function(lambda *args: ours(self, *args))
        if full in ("argparse.Namespace", "types.SimpleNamespace"):  # the latter in what transformers' scripts convert
            return Function(argparse.Namespace)
        if full in INERT_NAMES or any(f"{module}.".startswith(f"{known}.") for known in INERT):
            return Name(module, name)
        raise Refused(
            f"it names {full}, which is neither numbers nor settings, and was not run. --trust-pickle runs it, "
            "and with it whatever its author put in: only for files you trust"
        )

    # What the functions of files are for us

    def tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
        import torch

        if not isinstance(storage, Storage) or not ints((offset,)) or not ints(size) or not ints(stride):
            raise Refused("a tensor that is made of something else than a storage and numbers")
        self.charge(1500)
        if storage.begin is None:
            return torch.empty(0)
        count = math.prod(size)
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if (count and last >= storage.count) or count > storage.count:
            raise Refused(
                f"a tensor of {size}, strides {stride}, from {offset:,} on a storage of {storage.count:,} numbers"
            )
        if not count:
            return torch.empty(size, dtype=storage.dtype)
        place = storage.dtype, storage.begin
        if place not in self.flat:
            self.flat[place] = torch.frombuffer(self.data, dtype=place[0], count=storage.count, offset=place[1])
        return self.flat[place].as_strided(size, stride, offset)

    def tensor_v3(
        self, storage: Any, offset: Any, size: Any, stride: Any, _g: Any, _h: Any, dtype: Any, *_: Any
    ) -> Any:
        """Of a storage of bytes; strides and offset count elements."""
        if not isinstance(storage, Storage) or not is_dtype(dtype):
            raise Refused("a tensor without a storage or type")
        count = storage.count * storage.dtype.itemsize // dtype.itemsize
        return self.tensor(Storage(dtype, storage.begin, count), offset, size, stride)

    def same(self, tensor: Any, *_: Any) -> torch.Tensor:
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise Refused("a parameter that is no tensor")
        return tensor

    def of_type(self, function: Any, _type: Any, args: Any, _state: Any) -> Any:
        if not isinstance(function, Function) or type(args) is not tuple:
            raise Refused("a tensor of a class of its own")
        return function.call(*args)

    def size(self, numbers: Any) -> tuple[int, ...]:
        if not ints(numbers):
            raise Refused("a torch.Size that is not of numbers")
        return tuple(numbers)

    def mapping(self, *args: Any) -> dict[Any, Any]:
        """An OrderedDict or defaultdict; dicts keep their order, and have no attributes to be set."""
        result: dict[Any, Any] = {}
        if args and isinstance(args[0], (list, tuple, dict)):
            self.stack.append(result)
            for key, value in args[0].items() if isinstance(args[0], dict) else args[0]:
                self.set_items([key, value])
            self.stack.pop()
        return result

    def collection(self, values: Any = ()) -> set[Any]:
        if type(values) not in (list, tuple):
            raise Refused("a set of something else than a list")
        self.stack.append(set())
        self.add_items(values)
        result: set[Any] = self.stack.pop()
        return result

    def encoded(self, text: Any = b"", encoding: Any = "latin1") -> Any:
        """Bytes, as pickles of protocol 2 spell them."""
        if type(text) is str and encoding in ("latin1", "latin-1"):
            return text.encode("latin1")
        if isinstance(text, (bytes, memoryview)):
            return text
        raise Refused("an encoding that bytes do not need")

    def member(self, of: Any, name: Any) -> Stub:
        """getattr() of a class of theirs: how some versions of Python write an enum's value."""
        if not isinstance(of, Name) or type(name) is not str:
            raise Refused("getattr() of something else than an enum. It was not run")
        return Stub(of, (name,))

    def empty_array(self, *_: Any) -> torch.Tensor:
        import torch

        self.charge(1500)
        array = torch.empty(0)
        self.arrays[id(array)] = array
        return array

    def numpy_type(self, code: Any, *_: Any) -> Any:
        import torch

        if type(code) is not str or code.lstrip("<|=") not in NUMPY:
            raise Refused(f"a NumPy array of {str(code)[:20] if type(code) is str else 'objects'}: not numbers")
        return getattr(torch, NUMPY[code.lstrip("<|=")])

    def scalar(self, dtype: Any, raw: Any) -> Any:
        return self.array(raw, dtype, (), "C").item()

    def array(self, raw: Any, dtype: Any, shape: Any, order: Any = "C") -> torch.Tensor:
        """Numbers in the file itself, where they are many."""
        import torch

        raw = raw.encode("latin1") if type(raw) is str else raw
        shape = (shape,) if type(shape) is int else shape
        if not isinstance(raw, (bytes, memoryview)) or not is_dtype(dtype) or not ints(shape):
            raise Refused("a NumPy array that is not numbers")
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise Refused(f"a NumPy array of {shape} in {len(raw):,} bytes")
        self.charge(1500)
        if not len(raw):
            return torch.empty(shape, dtype=dtype)
        if isinstance(raw, bytes):
            self.charge(len(raw))
        flat = torch.frombuffer(raw if isinstance(raw, memoryview) else bytearray(raw), dtype=dtype)
        return (
            flat.view(tuple(shape[::-1])).permute(*reversed(range(len(shape))))
            if order == "F"
            else flat.view(tuple(shape))
        )

    # The finished tree

    def measure(self, value: Any, known: dict[int, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
        """How many values one meets who walks through it, and how deep: a few lists that hold each other make billions."""
        children: Iterable[Any]
        if isinstance(value, (list, tuple, set)):
            children = value
        elif isinstance(value, dict):
            children = value.values()
        elif isinstance(value, argparse.Namespace):
            children = vars(value).values()
        else:
            return 1, 0
        seen = known.get(id(value))
        if seen is None:
            self.charge(150)
            known[id(value)] = (0, DEPTH + 1)  # until it is done: a tree that holds itself is as deep as can be
            total, height = 1, 0
            for child in children:
                count, below = self.measure(child, known, depth + 1) if depth < DEPTH else (1, DEPTH)
                total, height = total + count, max(height, below + 1)
            seen = known[id(value)] = total, height
        if seen[1] > DEPTH or seen[0] > VALUES:
            raise Refused(f"its containers hold themselves, or each other {DEPTH} deep, or {VALUES:,} times")
        return seen


def is_dtype(value: Any) -> bool:
    import torch

    return isinstance(value, torch.dtype)


def ints(values: Any) -> bool:
    return (
        type(values) in (tuple, list) and len(values) <= 16 and all(type(v) is int and 0 <= v < 1 << 60 for v in values)
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": Machine.tensor,
    "torch._utils._rebuild_tensor_v2": Machine.tensor,
    "torch._utils._rebuild_tensor_v3": Machine.tensor_v3,
    "torch._utils._rebuild_parameter": Machine.same,
    "torch._utils._rebuild_parameter_with_state": Machine.same,
    "torch._tensor._rebuild_from_type_v2": Machine.of_type,
    "torch.Size": Machine.size,
    "collections.OrderedDict": Machine.mapping,
    "collections.defaultdict": Machine.mapping,
    "collections.Counter": Machine.mapping,
    "builtins.set": Machine.collection,
    "builtins.frozenset": Machine.collection,
    "builtins.bytearray": Machine.encoded,
    "builtins.bytes": Machine.encoded,
    "builtins.getattr": Machine.member,
    "_codecs.encode": Machine.encoded,
    "numpy.core.multiarray._reconstruct": Machine.empty_array,
    "numpy.core.multiarray.scalar": Machine.scalar,
    "numpy.core.numeric._frombuffer": Machine.array,
    "numpy.dtype": Machine.numpy_type,
}


def put_object(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.reduce(machine.stack.pop(), args)


def new_object_with_keywords(machine: Machine) -> None:
    keywords = machine.stack.pop()
    if type(keywords) is not dict or keywords:
        raise Refused("an object that is made with keywords")
    put_object(machine)


def global_by_line(machine: Machine) -> None:
    module = machine.line()
    machine.stack.append(machine.find(module, machine.line()))


def global_by_stack(machine: Machine) -> None:
    name = machine.stack.pop()
    machine.stack.append(machine.find(machine.stack.pop(), name))


def last(machine: Machine, count: int) -> tuple[Any, ...]:
    values = tuple(machine.stack[-count:])
    del machine.stack[-count:]
    if len(values) < count:
        raise Refused("an instruction without what it takes")
    return values


def integer(text: str) -> int | bool:
    if text in ("00", "01"):
        return text == "01"
    if len(text) > 40:
        raise Refused("a number of more than 40 digits")
    return int(text.removesuffix("L"))


def long(machine: Machine, count: int) -> int:
    if count > 255:
        raise Refused(f"a number of {count:,} bytes")
    return int.from_bytes(machine.take(count), "little", signed=True)


STOP = pickle.STOP[0]
# The instructions of protocols 2 to 5, without the registry of extensions, buffers outside of the
# file, and what is left
# of protocols 0 and 1.
OPERATIONS: dict[int, Callable[[Machine], object]] = {
    code[0]: operation
    for code, operation in {
        pickle.PROTO: lambda m: m.take(1),
        pickle.FRAME: lambda m: m.take(8),
        pickle.MARK: lambda m: m.mark(),
        pickle.POP: lambda m: m.stack.pop() if m.stack else m.items(),
        pickle.POP_MARK: lambda m: m.items(),
        pickle.DUP: lambda m: m.stack.append(m.stack[-1]),
        pickle.NONE: lambda m: m.stack.append(None),
        pickle.NEWTRUE: lambda m: m.stack.append(True),
        pickle.NEWFALSE: lambda m: m.stack.append(False),
        pickle.INT: lambda m: m.push(integer(m.line())),
        pickle.LONG: lambda m: m.push(integer(m.line())),
        pickle.BININT: lambda m: m.push(m.number("<i")),
        pickle.BININT1: lambda m: m.push(m.number("<B")),
        pickle.BININT2: lambda m: m.push(m.number("<H")),
        pickle.LONG1: lambda m: m.push(long(m, m.number("<B"))),
        pickle.LONG4: lambda m: m.push(long(m, m.number("<i"))),
        pickle.BINFLOAT: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
        pickle.SHORT_BINSTRING: lambda m: m.push_text(m.number("<B"), "latin1"),
        pickle.BINSTRING: lambda m: m.push_text(m.number("<i"), "latin1"),
        pickle.SHORT_BINUNICODE: lambda m: m.push_text(m.number("<B")),
        pickle.BINUNICODE: lambda m: m.push_text(m.number("<I")),
        pickle.BINUNICODE8: lambda m: m.push_text(m.number("<Q")),
        pickle.SHORT_BINBYTES: lambda m: m.push_bytes(m.number("<B")),
        pickle.BINBYTES: lambda m: m.push_bytes(m.number("<I")),
        pickle.BINBYTES8: lambda m: m.push_bytes(m.number("<Q")),
        pickle.BYTEARRAY8: lambda m: m.push_bytes(m.number("<Q")),
        pickle.EMPTY_TUPLE: lambda m: m.stack.append(()),
        pickle.TUPLE1: lambda m: m.push(last(m, 1)),
        pickle.TUPLE2: lambda m: m.push(last(m, 2)),
        pickle.TUPLE3: lambda m: m.push(last(m, 3)),
        pickle.TUPLE: lambda m: m.push_above(tuple),
        pickle.EMPTY_LIST: lambda m: m.push([]),
        pickle.EMPTY_DICT: lambda m: m.push({}),
        pickle.EMPTY_SET: lambda m: m.push(set()),
        pickle.FROZENSET: lambda m: m.push_above(m.collection),
        pickle.APPEND: lambda m: m.extend([m.stack.pop()]),
        pickle.APPENDS: lambda m: m.extend(m.items()),
        pickle.SETITEM: lambda m: m.set_items(list(last(m, 2))),
        pickle.SETITEMS: lambda m: m.set_items(m.items()),
        pickle.ADDITEMS: lambda m: m.add_items(m.items()),
        pickle.GLOBAL: global_by_line,
        pickle.STACK_GLOBAL: global_by_stack,
        pickle.REDUCE: put_object,
        pickle.NEWOBJ: put_object,
        pickle.NEWOBJ_EX: new_object_with_keywords,
        pickle.BUILD: lambda m: m.build(m.stack.pop()),
        pickle.BINPERSID: lambda m: m.persistent(m.stack.pop()),
        pickle.BINPUT: lambda m: m.remember(m.number("<B")),
        pickle.LONG_BINPUT: lambda m: m.remember(m.number("<I")),
        pickle.MEMOIZE: lambda m: m.remember(len(m.memo)),
        pickle.BINGET: lambda m: m.stack.append(m.memo[m.number("<B")]),
        pickle.LONG_BINGET: lambda m: m.stack.append(m.memo[m.number("<I")]),
    }.items()
}
