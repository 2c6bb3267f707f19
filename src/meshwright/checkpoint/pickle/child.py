"""Read a pickle as data, in the child process of base/sandbox.py, which `pickles.py` asks.

A pickle is a program. Python's unpickler runs it here, and every name in it stands for something of
this file: a function, for what makes tensors and containers, or a class whose objects record their
arguments and state. A program can call and change nothing else, so nothing that a file names is
imported or called. Every class here has a `__setstate__`, or no attributes that can be set: the
unpickler would set them without one.

Tensors and long byte strings stay in the file, and the answer says where they are. It is a tree of
lists that begin with a word, such as ["tuple", 1, ["tensor", "float32", ...]], and of plain values.

Why not torch.load(weights_only=True): importing torch takes seconds; it maps only archives since
torch 1.6, no older files nor parts of files (.distcp); and it refuses the Namespaces, enumerations
and counters of honest files unless each class is imported or named before.

This file imports nothing of ours, nor torch.
"""

from __future__ import annotations

import functools
import gc
import io
import os
import pickle
import resource
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of torch.save before 1.6
LONG = 1 << 16  # bytes: longer byte strings stay in the file
DEPTH = 100  # of the tree
# bytes of all its values, with shared parts counted each time; of one beside texts
COST = 128 << 20
STEP = 64
DIMENSIONS = 16

# Packages whose classes appear in honest checkpoints as settings and counters; they become Inert.
PACKAGES = (
    *(
        "megatron",
        "deepspeed",
        "libai",
        "oneflow",
        "apex",
        "transformer_engine",
        "fp16",
        "mpu",
        "pathlib",
    ),
    *("torch.distributed.checkpoint", "torch.nn.functional"),
)
INERT_NAMES = {
    *(
        "_io.BytesIO",
        "io.BytesIO",
        "numpy.ndarray",
        "builtins.slice",
        "builtins.complex",
        "builtins.range",
    ),
    *(f"builtins.{name}" for name in ("list", "dict", "tuple", "int", "float", "str", "bool")),
    *(
        "torch.device",
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
    ),
}
# the latter from transformers' converters
NAMESPACES = {"argparse.Namespace", "types.SimpleNamespace"}

# Names of torch's types, and the bytes of a number.
SIZES = dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1)
SIZES |= dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2)
SIZES |= dict.fromkeys(("int32", "uint32", "float32"), 4)
SIZES |= dict.fromkeys(("int64", "uint64", "float64"), 8)
STORAGES = dict(
    Double="float64",
    Float="float32",
    Half="float16",
    BFloat16="bfloat16",
    Long="int64",
    Int="int32",
)
STORAGES |= dict(Short="int16", Char="int8", Byte="uint8", Bool="bool", Untyped="uint8")
STORAGE_MODULES = ("torch", "torch.cuda", "torch.storage")
# NumPy's codes: kind and bytes, such as f8.
NUMPY = {
    f"{kind[0]}{bits // 8}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
NUMPY |= {"f2": "float16", "f4": "float32", "f8": "float64", "b1": "bool"}


class RefusedPickle(ValueError):
    """A pickle that is not read, and why."""


def read(request: dict[str, Any]) -> Any:
    """Return what a file, or its bytes from `begin` to `end`, holds."""
    # All that is built here is kept until the answer: the collector would walk it again and again.
    gc.disable()
    with open(request["path"], "rb", buffering=0) as file:
        part = OpenPart(file.fileno(), request["begin"], request["end"])
        try:
            return read_archive(part) if part.at(0, 4) == b"PK\3\4" else read_stream(part)
        except (RefusedPickle, MemoryError):
            raise
        except (pickle.UnpicklingError, EOFError) as error:
            raise RefusedPickle(f"its pickle is damaged: {error}") from error
        except Exception as error:  # damaged and hostile files fail in any way
            raise RefusedPickle(f"damaged: {error!r:.300}") from error


# Files


class OpenPart(io.RawIOBase):
    """A part of an open file, read as a file of its own."""

    def __init__(self, file: int, begin: int, end: int) -> None:
        self.file = file
        self.begin = begin
        self.size = end - begin
        self.position = 0

    def at(self, position: int, size: int) -> bytes:
        if not 0 <= position < self.size:
            return b""
        return os.pread(self.file, min(size, self.size - position), self.begin + position)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + (0, self.position, self.size)[whence]
        if position < 0:
            raise OSError("a place before the file's beginning")
        self.position = position
        return position

    def readinto(self, buffer: Any) -> int:
        data = self.at(self.position, len(buffer))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


class Program:
    """A pickle as the unpickler reads it, which leaves long byte strings in the file.

    It has no `peek`, so that the unpickler reads nothing in advance.
    """

    def __init__(self, part: OpenPart) -> None:
        self.part = part
        self.file = io.BufferedReader(part)
        self.read = self.file.read
        self.readline = self.file.readline
        self.tell = self.file.tell
        self.ends = set[int]()  # of long byte strings, in the file
        # The unpickler makes those, which take addresses, though no memory.
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY and hard == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (soft + part.size, hard))

    def readinto(self, buffer: memoryview) -> int:
        """Fill a byte string; a long one gets only its place, in its last eight bytes."""
        if len(buffer) < LONG:
            return self.file.readinto(buffer)
        end = self.file.seek(len(buffer), os.SEEK_CUR)
        if end > self.part.size:
            raise RefusedPickle(
                f"it ends at byte {self.part.size:,}, but a byte string in it at {end:,}"
            )
        self.ends.add(self.part.begin + end)
        buffer[-8:] = (self.part.begin + end).to_bytes(8, "little")
        return len(buffer)


class Archive:
    """A zip archive of torch.save: its entries, and where their bytes are."""

    def __init__(self, part: OpenPart) -> None:
        self.part = part
        try:
            self.directory = zipfile.ZipFile(io.BufferedReader(part))
        except (zipfile.BadZipFile, OSError) as error:
            what = "it begins as a zip archive, whose directory is cut short or damaged"
            raise RefusedPickle(f"{what}: {error}") from error
        every = self.directory.infolist()
        self.entries = {entry.filename: entry for entry in every}
        if len(self.entries) < len(every):
            raise RefusedPickle("two entries of the archive have one name")
        # All entries are below one name, whatever it is, and one of them is the pickle.
        pickles = [
            name for name in self.entries if name.count("/") == 1 and name.endswith("/data.pkl")
        ]
        self.prefix = pickles[0].removesuffix("data.pkl") if len(pickles) == 1 else ""
        is_foreign = any(not name.startswith(self.prefix) for name in self.entries)
        # A file of TorchScript has the second pickle.
        if not self.prefix or is_foreign or f"{self.prefix}constants.pkl" in self.entries:
            raise RefusedPickle("a zip archive, but not one of torch.save's")

    def find(self, name: str) -> tuple[int, int] | None:
        """Return where the bytes of an entry begin and end in the archive."""
        entry = self.entries.get(self.prefix + name)
        if entry is None:
            return None
        if entry.compress_type or entry.flag_bits & 1:
            raise RefusedPickle(
                f"its entry {name!r} is compressed or encrypted; torch.save does neither"
            )
        # In front of the bytes are a header of 30 bytes, the name, and what may follow the name.
        header = self.part.at(entry.header_offset, 30)
        if header[:4] != b"PK\3\4":
            raise RefusedPickle(f"its entry {name!r} is not where the directory says")
        begin = entry.header_offset + len(header) + sum(struct.unpack_from("<2H", header, 26))
        end = begin + entry.file_size
        if end > self.directory.start_dir:
            raise RefusedPickle(f"its entry {name!r} ends at byte {end:,}, beyond the directory")
        return begin, end


def read_archive(part: OpenPart) -> Any:
    """Read a zip archive of torch.save."""
    archive = Archive(part)
    order = archive.find("byteorder")
    if order and part.at(order[0], min(order[1] - order[0], 10)) != b"little":
        raise RefusedPickle(
            "its numbers are big-endian; load it on a big-endian machine and convert it there"
        )

    # Read the pickle, which names storages.
    begin, end = archive.find("data.pkl") or (0, 0)
    program = Program(OpenPart(part.file, part.begin + begin, part.begin + end))
    reader = Reader(program)
    tree = reader.load()

    # Find them in the archive.
    places: dict[str, int] = {}
    extents = [(begin, end)]
    for key, size in reader.storages.items():
        extent = archive.find(f"data/{key}")
        if extent is None:
            raise RefusedPickle(f"there is no storage {key[:100]!r}")
        begin, end = extent
        if size > end - begin:
            raise RefusedPickle(
                f"the storage {key!r} has {end - begin:,} bytes, its pickle says {size:,}"
            )
        places[key] = part.begin + begin
        extents.append(extent)
    # An archive may name the same bytes many times, so that a small file fills the memory.
    extents.sort()
    if any(end > begin for (_, end), (begin, _) in zip(extents, extents[1:], strict=False)):
        raise RefusedPickle("two entries of the archive overlap")
    return Answer(places, program.ends).encode(tree)


def read_stream(part: OpenPart) -> Any:
    """Read a plain pickle, or torch's old form.

    That is a series of pickles (magic number, version, machine, object, keys of the storages), then
    the storages.
    """
    if part.at(257, 5) == b"ustar":
        raise RefusedPickle("a tar archive of torch 0.1; load it with torch.load and save it again")
    # The first pickle is a magic number, or all that there is.
    program = Program(part)
    first = Reader(program)
    tree = first.load()
    if type(tree) is not int or tree != MAGIC:
        if first.storages:
            raise RefusedPickle(
                "a reference to something outside of it, where a plain pickle has no storages"
            )
        return Answer({}, program.ends).encode(tree)
    # Then come four more.
    version = Reader(program).load()
    system = Reader(program).load()
    if version != PROTOCOL or type(system) is not dict or not system.get("little_endian"):
        what = f"torch's old form in version {version!r:.20}, or big-endian"
        raise RefusedPickle(f"{what}; load it with torch.load and save it again")
    reader = Reader(program)
    tree = reader.load()
    keys = Reader(program).load()
    are_names = type(keys) is list and all(type(key) is str for key in keys)
    if not are_names or set(keys) != set(reader.storages):
        raise RefusedPickle("the storages that follow are not those of its tensors")
    # Then the storages, each behind its number of elements.
    at = program.tell()
    places: dict[str, int] = {}
    for key in keys:
        size = reader.storages[key]
        (count,) = struct.unpack("<q", part.at(at, 8))
        places[key] = part.begin + at + 8
        at += 8 + size
        if at > part.size or (count and size % count) or (not count and size):
            what = f"the storage {key!r} of {size:,} bytes"
            raise RefusedPickle(f"{what} is cut short, or declared to have {count:,} numbers")
    return Answer(places, program.ends).encode(tree)


# What stands for the objects of a file


class Inert:
    """Arguments and state of an object; each class that a file names is a subclass."""

    __slots__ = ("args", "state")
    module = name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        self = super().__new__(cls)
        self.args = args
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:  # of a class derived from dict
        if self.state is None:
            self.state = {}
        if type(self.state) is not dict:
            raise RefusedPickle(f"it sets items of {self.name}, which has another state")
        self.state[key] = value


# One for all files: a class refers to itself, so without the collector it would stay anyway.
@functools.cache
def inert_class(module: str, name: str) -> type[Inert]:
    return type(name, (Inert,), {"__slots__": (), "module": module, "name": name})


class Function:
    """A function of this file that stands for one that files call."""

    __slots__ = ("module", "name", "call")

    def __init__(self, module: str, name: str, call: Callable[..., Any]) -> None:
        self.module = module
        self.name = name
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __setstate__(self, state: Any) -> None:
        raise RefusedPickle(f"it sets the state of the function {self.name}")


class Table(dict[Any, Any]):
    """An OrderedDict and its like."""

    def __setstate__(self, state: Any) -> None:
        """Do nothing: torch notes the versions of modules here."""


class NumberType(NamedTuple):
    """A type of torch's or NumPy's."""

    name: str

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", "|", "="):
            raise RefusedPickle("a NumPy array of numbers that are not little-endian")


class StorageRange(NamedTuple):
    """Elements of a storage: all, or in files before torch 1.6 a part."""

    type: str
    key: str
    first: int
    numbers: int


class Tensor(NamedTuple):
    """A view of a storage, whose numbers are taken as being of this type."""

    type: str
    storage: StorageRange
    numbers: int  # in the storage
    offset: int
    size: list[int]
    stride: list[int]


class Array:
    """A NumPy array, or one of its numbers, which has no shape."""

    __slots__ = ("type", "shape", "is_fortran", "raw")

    def __init__(
        self, raw: Any = b"", number: Any = None, shape: Any = (), order: Any = "C"
    ) -> None:
        self.raw = raw
        self.type = number
        self.shape = shape
        self.is_fortran = order == "F"

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.type, self.is_fortran, self.raw = state


# What its functions become


def tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    is_of_sizes = are_sizes((offset,)) and are_sizes(size) and are_sizes(stride)
    if not isinstance(storage, StorageRange) or not is_of_sizes:
        raise RefusedPickle("a tensor made of something other than a storage and numbers")
    return Tensor(
        storage.type,
        storage,
        storage.numbers,
        offset,
        list(size),
        list(stride),
    )


def tensor_of_bytes(storage: Any, *args: Any) -> Tensor:
    """Return a tensor on a storage of bytes; strides and offset count elements."""
    # These are the arguments of torch._utils._rebuild_tensor_v3.
    offset, size, stride, _, _, kind, *_ = args
    if not isinstance(kind, NumberType):
        raise RefusedPickle("a tensor without a type")
    made = tensor(storage, offset, size, stride)
    numbers = made.numbers * SIZES[made.type] // SIZES[kind.name]
    return made._replace(type=kind.name, numbers=numbers)


def parameter(data: Any, *_: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise RefusedPickle("a parameter that is not a tensor")
    return data


def tensor_of_class(function: Any, _type: Any, args: Any, _state: Any) -> Any:
    if not isinstance(function, Function) or type(args) is not tuple:
        raise RefusedPickle("a tensor of a class of its own")
    return function(*args)


def are_sizes(values: Any) -> bool:
    is_short = type(values) in (tuple, list) and len(values) <= DIMENSIONS
    return is_short and all(type(v) is int and 0 <= v < 1 << 60 for v in values)


def size(numbers: Any) -> tuple[int, ...]:
    if not are_sizes(numbers):
        raise RefusedPickle("a torch.Size that is not made of numbers")
    return tuple(numbers)


def mapping(*args: Any) -> Table:
    """Return an OrderedDict's or defaultdict's items; a defaultdict's function is left out."""
    return Table(args[0]) if args and isinstance(args[0], (list, tuple, dict)) else Table()


def encoded(text: Any = b"", encoding: Any = "latin1") -> Any:
    """Return bytes, which pickles of protocol 2 spell as text."""
    if type(text) is str and encoding in ("latin1", "latin-1"):
        return text.encode("latin1")
    if isinstance(text, (bytes, bytearray)):
        return text
    raise RefusedPickle("an encoding that bytes do not need")


def member(kind: Any, name: Any) -> Inert:
    """Stand for getattr() of an enum, by which some versions of Python write a member."""
    if not isinstance(kind, type) or not issubclass(kind, Inert) or type(name) is not str:
        raise RefusedPickle("getattr() of something other than an enum. It was not run")
    return kind(name)


def numpy_type(code: Any, *_: Any) -> NumberType:
    if type(code) is not str or code.lstrip("<|=") not in NUMPY:
        raise RefusedPickle(
            f"a NumPy array of {str(code)[:20] if type(code) is str else 'objects'}: not numbers"
        )
    return NumberType(NUMPY[code.lstrip("<|=")])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": tensor,
    "torch._utils._rebuild_tensor_v2": tensor,
    "torch._utils._rebuild_tensor_v3": tensor_of_bytes,
    "torch._utils._rebuild_parameter": parameter,
    "torch._utils._rebuild_parameter_with_state": parameter,
    "torch._tensor._rebuild_from_type_v2": tensor_of_class,
    "torch.Size": size,
    "collections.OrderedDict": mapping,
    "collections.defaultdict": lambda _factory=None, *items: mapping(*items),
    "collections.Counter": mapping,
    "builtins.set": lambda values=(): set(values),
    "builtins.frozenset": lambda values=(): set(values),
    "builtins.bytearray": encoded,
    "builtins.bytes": encoded,
    "builtins.getattr": member,
    "_codecs.encode": encoded,
    "numpy.core.multiarray._reconstruct": lambda *_: Array(),
    "numpy.core.multiarray.scalar": lambda number, raw: Array(raw, number, None),
    "numpy.core.numeric._frombuffer": Array,
    "numpy.dtype": numpy_type,
}


class Reader(pickle.Unpickler):  # noqa: S301  whatever it finds is of this file
    """Reads one pickle."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, encoding="latin1")
        self.found: dict[str, Any] = {}
        self.storages: dict[str, int] = {}  # key -> bytes

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class or function."""
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if full not in self.found:
            self.found[full] = self.stand_in(full, module, name)
        return self.found[full]

    def stand_in(self, full: str, module: str, name: str) -> Any:
        kind, storage, _ = name.partition("Storage")
        if module == "torch" and name in SIZES:
            return NumberType(name)
        if module in STORAGE_MODULES and storage and kind in STORAGES:
            return NumberType(STORAGES[kind])
        if full in FUNCTIONS:
            return Function(module, name, FUNCTIONS[full])
        if full in INERT_NAMES | NAMESPACES or any(
            f"{module}.".startswith(f"{package}.") for package in PACKAGES
        ):
            return inert_class(module, name)
        raise RefusedPickle(
            f"it names {full}, which is neither numbers nor settings, and was not run. --trust-pickle runs it, "
            "and with it whatever its author put in: only for files you trust"
        )

    def persistent_load(self, pid: Any) -> StorageRange:
        """Return the storage that a reference to something outside of the pickle names."""
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
            raise RefusedPickle(
                "a reference to something outside of it that is not a storage of a tensor"
            )
        _, kind, key, _, count, *view = pid
        if (
            not isinstance(kind, NumberType)
            or type(key) is not str
            or type(count) is not int
            or count < 0
        ):
            raise RefusedPickle("a storage without type, key or size")
        size = count * SIZES[kind.name]
        first = 0
        if self.storages.setdefault(key, size) != size:
            raise RefusedPickle(
                f"the storage {key!r} has two sizes, {self.storages[key]:,} and {size:,} bytes"
            )
        if view and view[0] is not None:
            _, first, part = view[0]
            if not 0 <= first <= first + part <= count:
                raise RefusedPickle(
                    f"a view of elements {first:,} to {first + part:,} on a storage of {count:,}"
                )
            count = part
        return StorageRange(kind.name, key, first, count)


# The answer

PLAIN = (type(None), bool, int, float, str)
LISTS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "set"}


class Answer:
    """What was read, as lists that JSON can write."""

    def __init__(self, places: dict[str, int], ends: set[int]) -> None:
        self.places = places
        self.ends = ends
        self.cost = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind is str:
            # one letter above U+FFFF makes all of them take four bytes
            self.charge(sys.getsizeof(value))
        if kind in PLAIN:
            return value
        self.charge(
            STEP * (1 + len(value) if isinstance(value, (list, tuple, set, frozenset, dict)) else 1)
        )
        if depth > DEPTH:
            raise RefusedPickle(f"its containers hold themselves, or each other {DEPTH} deep")
        if kind in LISTS:
            return [LISTS[kind], *[self.encode(child, depth + 1) for child in value]]
        # Dicts become keys and values in turn, since JSON has no keys but texts.
        if kind in (dict, Table):
            return [
                "dict",
                *[self.encode(part, depth + 1) for item in value.items() for part in item],
            ]
        if kind in (bytes, bytearray):
            return self.encode_bytes(value)
        if kind is NumberType:
            return ["type", value.name]
        # A tensor is where its storage begins in the file.
        if kind is Tensor:
            begin = self.places[value.storage.key] + value.storage.first * SIZES[value.storage.type]
            return [
                "tensor",
                value.type,
                begin,
                value.numbers,
                value.offset,
                value.size,
                value.stride,
            ]
        if kind is Array:
            return self.encode_array(value)
        # Objects of foreign classes are what they were made of.
        if isinstance(value, Inert):
            if f"{value.module}.{value.name}" in NAMESPACES:
                state = {} if value.state is None else value.state
                if (
                    value.args
                    or type(state) is not dict
                    or not all(type(key) is str for key in state)
                ):
                    raise RefusedPickle("a Namespace of something other than attributes")
                return ["namespace", self.encode(state, depth + 1)]
            arguments = [self.encode(argument, depth + 1) for argument in value.args]
            return [
                "object",
                value.module,
                value.name,
                arguments,
                self.encode(value.state, depth + 1),
            ]
        if isinstance(value, Function) or (isinstance(value, type) and issubclass(value, Inert)):
            return ["class", value.module, value.name]
        raise RefusedPickle(f"it holds a {kind.__name__}, which is no value")

    def charge(self, size: int) -> None:
        self.cost += size
        if self.cost > COST:
            raise RefusedPickle(
                f"its values would take more than {COST >> 20} MiB, not counting tensors"
            )

    def encode_bytes(self, value: bytes | bytearray) -> Any:
        end = int.from_bytes(value[-8:], "little")
        if len(value) >= LONG and end in self.ends:
            return ["range", end - len(value), end]
        self.charge(len(value))
        return ["bytes", value.hex()]

    def encode_array(self, array: Array) -> Any:
        raw = array.raw.encode("latin1") if type(array.raw) is str else array.raw
        shape = [array.shape] if type(array.shape) is int else array.shape
        is_shape = shape is None or are_sizes(shape)
        if (
            type(raw) not in (bytes, bytearray)
            or type(array.type) is not NumberType
            or not is_shape
        ):
            raise RefusedPickle("a NumPy array that is not numbers")
        bytes_of_it = self.encode_bytes(raw)
        return [
            "array",
            array.type.name,
            None if shape is None else list(shape),
            bool(array.is_fortran),
            bytes_of_it,
        ]
