"""Files that try to run code, or to waste memory or time, when a checkpoint is opened.

They are made by hand, without the readers in checkpoint/. Each has a name, its opener, a part of
the reason for its refusal or OPENS, and a function that writes it. `runs`: its code would run if
the file were trusted, which a test shows, so that no payload is a dud.
"""

from __future__ import annotations

import argparse
import copy
import copyreg
import hashlib
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint.formats import HUGGING_FACE
from meshwright.compat.formats.table import DEEPSPEED, MEGATRON, TORCH_DIST

MEGABYTE = 1 << 20
UNTRUSTED = "trust-pickle runs it"
OPENS = "nothing in it is followed or run, so that it is opened like any other"


class Case(NamedTuple):
    name: str
    opener: str  # "pickle", "native", or the name of a format
    says: str
    # the file or folder to be made, and the marker that its code would make
    write: Callable[[Path, Path], None]
    runs: bool = False
    measured: bool = False  # it is after memory or time, so it gets a process of its own
    dear: bool = False  # it takes seconds


CASES: list[Case] = []

# The instructions of pickles, put together


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    raw = value.to_bytes(9, "little", signed=True)
    return b"\x8a\x09" + raw


def named(full: str) -> bytes:
    module, _, name = full.rpartition(".")
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def many(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def call(function: str | bytes, *args: bytes) -> bytes:
    return (named(function) if isinstance(function, str) else function) + many(*args) + b"R"


def storage(key: str = "0", count: int = 4, kind: str = "torch.FloatStorage") -> bytes:
    return many(text("storage"), named(kind), text(key), text("cpu"), number(count)) + b"Q"


def tensor(place: bytes, size: list[int], stride: list[int], offset: int = 0) -> bytes:
    sizes, strides = many(*map(number, size)), many(*map(number, stride))
    hooks = call("collections.OrderedDict")
    return call(
        "torch._utils._rebuild_tensor_v2", place, number(offset), sizes, strides, b"\x89", hooks
    )


def program(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def touch(marker: Path) -> bytes:
    return text(f"touch '{marker}'")


def system(marker: Path) -> bytes:
    return call("os.system", touch(marker))


def python(marker: Path) -> bytes:
    return text(f"open({str(marker)!r}, 'w')")


def attribute(of: bytes, name: str) -> bytes:
    return call("builtins.getattr", of, text(name))


def dotted(module: str, name: str) -> bytes:
    """Name a global by STACK_GLOBAL."""
    return text(module) + text(name) + b"\x93"


# Their containers


def zipped(path: Path, files: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", kind) as out:
        for name, data in files.items():
            out.writestr(name, data)


def torch_file(path: Path, body: bytes, more: dict[str, bytes] | None = None) -> None:
    files = {
        "a/data.pkl": body,
        "a/byteorder": b"little",
        "a/data/0": bytes(16),
        "a/version": b"3\n",
    }
    zipped(path, files | (more or {}))


def old_file(path: Path, body: bytes, keys: list[str], storages: bytes) -> None:
    """Write a file as torch.save did before 1.6."""
    system = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    head = b"".join(pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, system))
    path.write_bytes(head + body + pickle.dumps(keys, 2) + storages)


# How cases are declared

Body = Callable[[Path], bytes]


def in_zip(name: str, says: str, body: Body, runs: bool = False) -> None:
    """Declare a case: the pickle in a torch.save file."""
    CASES.append(
        Case(
            name, "pickle", says, lambda path, marker: torch_file(path, program(body(marker))), runs
        )
    )


def in_file(name: str, says: str, content: Body, runs: bool = False) -> None:
    """Declare a case: a file as it is."""
    CASES.append(
        Case(
            name, "pickle", says, lambda path, marker: void(path.write_bytes(content(marker))), runs
        )
    )


def in_folder(
    name: str, opener: str, says: str, write: Callable[[Path, Path], Any], runs: bool = False
) -> None:
    def prepared(path: Path, marker: Path) -> None:
        path.mkdir()
        write(path, marker)

    CASES.append(Case(name, opener, says, prepared, runs))


def void(_: Any) -> None: ...


# Code that is called, in every way that pickles have

in_zip("reduce os.system", UNTRUSTED, system, True)
in_zip("Python 2's name of eval", UNTRUSTED, lambda m: call("__builtin__.eval", python(m)), True)
in_zip(
    "getattr finds os.system", UNTRUSTED, lambda m: call(attribute(named("os.path"), "x"), touch(m))
)
in_zip(
    "getattr of a known class",
    "not callable",
    lambda m: call(attribute(named("torch.Tensor"), "__subclasses__")),
)
LOADS = "torch.storage._load_from_bytes"
in_zip(
    "a pickle in bytes, through torch's storages",
    UNTRUSTED,
    lambda m: call(LOADS, quoted(program(system(m)))),
)
in_zip(
    "pickle.loads of bytes",
    UNTRUSTED,
    lambda m: call("pickle.loads", quoted(program(system(m)))),
    True,
)
in_zip(
    "NEWOBJ",
    UNTRUSTED,
    lambda m: named("subprocess.Popen") + many(many(text("touch"), text(str(m)))) + b"\x81",
)
in_zip(
    "NEWOBJ_EX with keywords",
    "keyword",
    lambda m: named("megatron.x.Y") + b")}" + text("args") + b"Ns\x92",
)
in_zip("INST", UNTRUSTED, lambda m: b"(" + touch(m) + b"ios\nsystem\n", True)
in_zip("OBJ", UNTRUSTED, lambda m: b"(" + named("os.system") + touch(m) + b"o", True)
in_zip("STACK_GLOBAL", UNTRUSTED, lambda m: dotted("os", "system") + many(touch(m)) + b"R", True)
in_zip(
    "STACK_GLOBAL with dots",
    UNTRUSTED,
    lambda m: call(dotted("torch.serialization", "os.system"), touch(m)),
)
in_zip(
    "globals of a function",
    UNTRUSTED,
    lambda m: dotted("collections", "OrderedDict.__init__.__globals__"),
)
in_zip(
    "a known package",
    "not callable",
    lambda m: call(call(dotted("megatron.os", "system"), touch(m)), touch(m)),
)


def registered(marker: Path) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if ("os", "system") not in copyreg._extension_registry:  # type: ignore[attr-defined]
            copyreg.add_extension("os", "system", 0x71)
    return call(b"\x82\x71", touch(marker))


in_zip("EXT1, the registry of extensions", "unregistered extension", registered)
in_zip(
    "copyreg._reconstructor",
    UNTRUSTED,
    lambda m: call("copyreg._reconstructor", named("os.system"), b"N", b"N"),
)
in_zip("PERSID", "reference", lambda m: b"Pos.system\n")
in_zip(
    "BINPERSID of another kind",
    "reference",
    lambda m: many(*map(text, ("module", "os", "system")), b"NN") + b"Q",
)
in_zip("a persistent id of tuples", "reference", lambda m: b"N" + b"\x85" * 50_000 + b"Q")

# State that is set

in_zip(
    "the state of a tensor",
    "slot state",
    lambda m: tensor(storage(), [4], [1]) + many(b"N", b"N") + b"b",
)
in_zip("the state of a list", "list.*no attribute", lambda m: b"]}" + text("__setstate__") + b"Nsb")
in_zip(
    "the state of a function",
    "state of the function Size",
    lambda m: named("torch.Size") + b"}" + text("call") + b"Nsb",
)
in_zip(
    "slots of a Namespace",
    "Namespace of something other",
    lambda m: named("argparse.Namespace") + b")\x81N}\x86b",
)
in_zip(
    "items of a Namespace",
    OPENS,
    lambda m: named("argparse.Namespace") + b")\x81" + text("a") + b"Ns",
)
in_zip("append to a stub", "no attribute 'append'", lambda m: call("megatron.x.Y") + b"Na")
in_zip("arrays of objects", "NumPy array of 'O8'|NumPy array of O8", lambda m: array(b"]", "O8"))
in_zip(
    "an array in too few bytes", "NumPy array of", lambda m: array(quoted(bytes(8)), "f8", 1 << 40)
)
in_zip("an array of records", "NumPy array", lambda m: array(quoted(bytes(8)), "V8"))
BOMB = zlib.compress(bytes(MEGABYTE))
in_zip("decode a bomb", UNTRUSTED, lambda m: call("_codecs.decode", quoted(BOMB), text("zlib")))


def quoted(raw: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(raw)) + raw


def array(raw: bytes, code: str, count: int = 1) -> bytes:
    dtype = call("numpy.dtype", text(code), b"\x89", b"\x88")
    empty = call(
        "numpy.core.multiarray._reconstruct", named("numpy.ndarray"), many(b"K\0"), quoted(b"b")
    )
    return empty + many(b"K\1", many(number(count)), dtype, b"\x89", raw) + b"b"


# Tensors that reach beyond their storage

in_zip(
    "a tensor longer than its storage",
    "on a storage of 4",
    lambda m: tensor(storage(), [1 << 20], [1]),
)
in_zip(
    "a product beyond 64 bits",
    "on a storage of 4",
    lambda m: tensor(storage(), [1 << 32, 1 << 32, 16], [0, 0, 0]),
)
in_zip(
    "a number repeated for ever", "on a storage of 4", lambda m: tensor(storage(), [1 << 40], [0])
)
in_zip("a stride below zero", "something other", lambda m: tensor(storage(), [4], [-1]))
in_zip(
    "a storage longer than its record",
    "has 16 bytes",
    lambda m: tensor(storage(count=1 << 30), [1], [1]),
)
in_zip("a storage that is not there", "no storage", lambda m: tensor(storage("7"), [1], [1]))
in_zip(
    "a storage outside of the archive",
    "no storage",
    lambda m: tensor(storage("../../../etc/passwd"), [1], [1]),
)
REBUILD = "torch._utils._rebuild_parameter"
in_zip(
    "a parameter that is no tensor",
    "not a tensor",
    lambda m: call(REBUILD, text("x"), b"\x89", b"N"),
)
in_zip("torch.Size of texts", "torch.Size", lambda m: call("torch.Size", many(text("x"))))
in_zip(
    "a tensor of a class of its own",
    "calls a|class of its own",
    lambda m: call(
        "torch._tensor._rebuild_from_type_v2",
        named("megatron.x.f"),
        named("torch.Tensor"),
        b")",
        b"N",
    ),
)

# Memory and time

UNMEASURED = len(CASES)
in_file("4 GB of bytes, as declared", "MiB", lambda m: program(b"B\xff\xff\xff\xff"))
in_file("a number of 2 GB", "MiB", lambda m: program(b"\x8b\xff\xff\xff\x7f"))
in_file("20 million lists", "MiB", lambda m: program(b"]" * 20_000_000))
in_file(
    "2 million objects",
    "MiB",
    lambda m: program(named("megatron.x.Y") + b"q\0](" + b"h\0)R" * 2_200_000 + b"e"),
)
in_file("a million instructions for nothing", OPENS, lambda m: program(b"N0" * 500_000 + b"N"))
in_file(
    "texts of wide letters",
    "MiB",
    lambda m: program(b"](" + text("\U0001f600" + "a" * (3 * MEGABYTE)) * 12 + b"e"),
)
in_file("tuples in tuples", "deep", lambda m: program(b"N" + b"\x85" * 100_000))
in_file("lists in lists", "deep", lambda m: program(b"]" * 100_000 + b"a" * 99_999))
in_file(
    "a billion laughs", "MiB", lambda m: program(laughs(b"]q\0", b"](" + b"h\0" * 10 + b"eq\0", 9))
)
in_file(
    "keys that laugh",
    "more than 1 s",
    lambda m: program(b"}" + laughs(b")q\0", b"h\0h\0\x86q\0", 60) + b"Ns"),
)
in_file("a set of long texts", "as a key", lambda m: program(b"\x8f(" + text("x" * 5000) + b"\x90"))
in_file(
    "numbers that all hash to zero", "a int as a key", lambda m: program(b"}" + collisions(1000))
)


in_file(
    "20,000 pairs as keys", "more than 10,000 keys", lambda m: program(b"}" + small_pairs(20_000))
)


DEAR = {"20 million lists", "2 million objects", "a billion laughs"}
CASES[UNMEASURED:] = [
    case._replace(measured=True, dear=case.name in DEAR) for case in CASES[UNMEASURED:]
]


def laughs(first: bytes, then: bytes, count: int) -> bytes:
    """Make values that each hold the previous one ten times; the last is on the stack."""
    return first + b"0".join([b""] + [then] * count)


def small_pairs(count: int) -> bytes:
    return b"".join(number(i) + b"K\1\x86Ns" for i in range(count))


def collisions(count: int) -> bytes:
    return b"".join(number(i * ((1 << 61) - 1)) + b"Ns" for i in range(1, count) if i < 4000)


# Archives

EVIL = program(call("os.system", text("true")))
in_file(
    "an archive in the place of the pickle",
    "damaged|reference to something outside",
    lambda m: nested(m),
)


def compressed(path: Path, marker: Path) -> None:
    """Write a pickle that is compressed a thousandfold."""
    zipped(path, {"a/data.pkl": bytes(20 * MEGABYTE)}, zipfile.ZIP_DEFLATED)


def long_entries(count: int) -> Callable[[Path, Path], None]:
    """Write entries with names of 65 kB, in which a smiley makes each letter take four bytes."""
    return lambda path, m: zipped(
        path, {f"a/{i:04d}{'x' * 65_000}\N{GRINNING FACE}": b"" for i in range(count)}
    )


for title, says, write in (
    ("a pickle that is compressed a thousandfold", "compressed", compressed),
    ("names of 5 MB", "not one of torch.save", long_entries(80)),
):
    CASES.append(Case(title, "pickle", says, write, measured=True))
for title, says, other in (
    ("an entry outside of the archive", OPENS, "a/../../x"),
    ("an entry of another archive", "not one of torch.save", "b/x"),
    ("TorchScript, which is code", "not one of torch.save", "a/constants.pkl"),
):
    CASES.append(
        Case(
            title,
            "pickle",
            says,
            lambda path, m, other=other: torch_file(path, program(b"}"), {other: b"x"}),
        )  # type: ignore[misc]
    )


def nested(marker: Path) -> bytes:
    inner, outer = io.BytesIO(), io.BytesIO()
    for file, body in ((inner, program(system(marker))), (outer, b"")):
        with zipfile.ZipFile(file, "w") as out:
            out.writestr("a/data.pkl", body or inner.getvalue())
    return outer.getvalue()


HONEST = program(tensor(storage(), [4], [1]))


def bent(change: Callable[[bytearray], bytearray | None]) -> Callable[[Path, Path], None]:
    """Return a writer of an honest archive with some bytes changed."""

    def write(path: Path, marker: Path) -> None:
        torch_file(path, HONEST)
        raw = bytearray(path.read_bytes())
        path.write_bytes(change(raw) or raw)

    return write


def put(raw: bytearray, at: int, form: str, value: int) -> None:
    struct.pack_into(form, raw, at, value)


def entry_of(raw: bytearray, name: bytes) -> int:
    return raw.rindex(name) - 46


def with_size(name: bytes, size: int) -> Callable[[bytearray], None]:
    return lambda raw: struct.pack_into("<2L", raw, entry_of(raw, name) + 20, size, size)


def with_64_bits(raw: bytearray) -> bytearray:
    """Claim a directory of 2**40 entries."""
    at = raw.rindex(b"PK\5\6")
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1 << 40, 1 << 40, 100, at - 100)
    return raw[:at] + end + struct.pack("<4sLQL", b"PK\6\7", 0, at, 1) + raw[at:]


for title, says, change in (
    ("entries that overlap", "overlap", with_size(b"a/data.pkl", len(HONEST) + 95)),
    ("a record beyond the end", "beyond the directory", with_size(b"a/data/0", 1 << 30)),
    (
        "a record elsewhere",
        "not where the directory",
        lambda raw: put(raw, entry_of(raw, b"a/data/0") + 42, "<L", 7),
    ),
    ("a directory of 2**40 entries", "directory", with_64_bits),
    ("a directory that ends too early", "directory", lambda raw: put(raw, len(raw) - 10, "<L", 9)),
):
    CASES.append(Case(title, "pickle", says, bent(change)))


def twice(path: Path, marker: Path) -> None:
    """Write two pickles of one name; some readers check the first and run the second."""
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as out:
        warnings.simplefilter("ignore")
        out.writestr("a/data.pkl", program(b"}"))
        out.writestr("a/data.pkl", program(system(marker)))


CASES.append(Case("two entries of one name", "pickle", "two entries", twice))

# The forms before the zip archive, and pickles without torch


def old(
    name: str, says: str, body: Body, keys: list[str], storages: bytes, runs: bool = False
) -> None:
    CASES.append(
        Case(
            name,
            "pickle",
            says,
            lambda path, m: old_file(path, program(body(m)), keys, storages),
            runs,
        )
    )


def old_storage(view: bytes = b"N") -> bytes:
    return (
        many(text("storage"), named("torch.FloatStorage"), text("0"), text("cpu"), number(4), view)
        + b"Q"
    )


FOUR = struct.pack("<q", 4) + bytes(16)
old("the old form: reduce", UNTRUSTED, system, [], b"", True)
GOOD, VIEW = (
    tensor(old_storage(), [4], [1]),
    tensor(old_storage(many(text("v"), number(3), number(99))), [1], [1]),
)
old("the old form: a view beyond its storage", "a view of elements", lambda m: VIEW, ["0"], FOUR)
old("the old form: a storage that is cut short", "cut short", lambda m: GOOD, ["0"], FOUR[:9])
in_file(
    "the old form: code in the place of its number", UNTRUSTED, lambda m: program(system(m)), True
)
TEXTUAL = "cos\nsystem\n(S\"touch '{}'\"\ntR."
in_file(
    "a pickle of protocol 0", "instruction|" + UNTRUSTED, lambda m: TEXTUAL.format(m).encode(), True
)
in_file("a pickle of protocol 5", UNTRUSTED, lambda m: b"\x80\x05" + system(m) + b".", True)
in_file("buffers outside of the pickle", "out-of-band", lambda m: b"\x80\x05\x97.")
in_file("an array of objects of NumPy", "damaged", lambda m: npy(m))
in_file("a tar archive", "tar archive", lambda m: tar(m))


def npy(marker: Path) -> bytes:
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + program(system(marker))


def tar(marker: Path) -> bytes:
    import tarfile

    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as out:
        body = program(system(marker))
        info = tarfile.TarInfo("pickle")
        info.size = len(body)
        out.addfile(info, io.BytesIO(body))
    return file.getvalue()


# Folders of torch.distributed.checkpoint


class Payload:
    """An object that an honest writer is made to write."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


KEY = "decoder.final_layernorm.weight"


def distributed(folder: Path, body: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(body, checkpoint_id=folder, no_dist=True)


def with_metadata(folder: Path, **changes: Any) -> None:
    """Write an honest folder, then change where its first tensor lies."""
    import torch

    distributed(folder, {KEY: torch.ones(4)})
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)  # noqa: S301  written a line above
    for info in metadata.storage_data.values():
        vars(info).update(changes)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def hostile_item(folder: Path, marker: Path) -> None:
    import torch

    with_metadata(folder, relative_path="evil.distcp", offset=0, length=10**9)
    torch.save(Payload(marker), folder / "evil.distcp")
    with_metadata(
        folder,
        relative_path="evil.distcp",
        offset=0,
        length=(folder / "evil.distcp").stat().st_size,
    )


def hostile_common(folder: Path, marker: Path) -> None:
    import torch

    with_metadata(folder)
    torch.save({"args": Payload(marker)}, folder / "common.pt")


def metadata_that_runs(folder: Path, marker: Path) -> None:
    (folder / ".metadata").write_bytes(program(system(marker)))


in_folder("dcp: metadata", TORCH_DIST, UNTRUSTED, metadata_that_runs, True)
in_folder("dcp: a tensor's item", TORCH_DIST, UNTRUSTED, hostile_item, True)
in_folder("dcp: common.pt", TORCH_DIST, UNTRUSTED, hostile_common, True)
in_folder(
    "dcp: a file outside",
    TORCH_DIST,
    "outside",
    lambda p, m: with_metadata(p, relative_path="../../etc/passwd"),
)
in_folder(
    "dcp: an offset below zero", TORCH_DIST, "wanted", lambda p, m: with_metadata(p, offset=-5)
)
in_folder(
    "dcp: a length beyond the file",
    TORCH_DIST,
    "wanted",
    lambda p, m: with_metadata(p, length=1 << 60),
)


def with_sizes(**sizes: Any) -> Callable[[Path, Path], None]:
    """Return a writer of an honest folder whose metadata list more tensors, stored nowhere."""

    def write(folder: Path, marker: Path) -> None:
        with_metadata(folder)
        with open(folder / ".metadata", "rb") as file:
            metadata = pickle.load(file)  # noqa: S301  written a line above
        entries = metadata.state_dict_metadata
        for key, size in sizes.items():
            more = copy.copy(entries[KEY])
            more.size, more.chunks = size, []
            entries[key] = more
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return write


STACKED = "decoder.layers.self_attention.linear_qkv.weight"
LONG = [1] * 20_000
in_folder("dcp: a size of 1e308", TORCH_DIST, "a size of", with_sizes(**{STACKED: (1e308, 4)}))


# Folders of DeepSpeed and Megatron


def tiny(layer: int = 0) -> dict[str, Any]:
    """Return the weights of a GPT of one layer, of width 2."""
    import torch

    shapes = {
        "input_layernorm": (2,),
        "self_attention.query_key_value": (6, 2),
        "self_attention.dense": (2, 2),
    }
    shapes |= {
        "post_attention_layernorm": (2,),
        "mlp.dense_h_to_4h": (8, 2),
        "mlp.dense_4h_to_h": (2, 8),
    }
    out = {
        f"encoder.layers.{layer}.{name}.weight": torch.ones(shape) for name, shape in shapes.items()
    }
    out |= {
        f"encoder.layers.{layer}.{name}.bias": torch.ones(shape[0])
        for name, shape in shapes.items()
    }
    out |= {f"encoder.final_layernorm.{kind}": torch.ones(2) for kind in ("weight", "bias")}
    return out | {
        f"embedding.{name}_embeddings.weight": torch.ones(4, 2) for name in ("word", "position")
    }


def megatrons(
    layer: int = 0, name: str = "mp_rank_00", **changes: Any
) -> Callable[[Path, Path], None]:
    """Return a writer of a folder of Megatron-LM; changes are of its arguments."""

    def write(folder: Path, marker: Path) -> None:
        import torch

        tree = {
            "iteration": 1,
            "checkpoint_version": 3.0,
            "optimizer": {"param_groups": []},
            "model": tiny(layer),
        }
        tree |= {key: value for key, value in changes.items() if key in tree}
        sizes = {
            "num_layers": 1,
            "num_attention_heads": 1,
            "global_batch_size": 1,
            "consumed_train_samples": 1,
        }
        (folder / name).mkdir()
        torch.save(
            tree | {"args": argparse.Namespace(**sizes | changes)},
            folder / name / "model_optim_rng.pt",
        )

    return write


def deepspeeds(layer: int = 0, **changes: Any) -> Callable[[Path, Path], None]:
    def write(folder: Path, marker: Path) -> None:
        import torch

        args = argparse.Namespace(
            **{"num_layers": 1, "num_attention_heads": 1, "global_batch_size": 1} | changes
        )
        tree = {"module": tiny(layer), "args": args, "global_steps": 1, "iteration": 1} | changes
        state = {n: {"exp_avg": t, "exp_avg_sq": t} for n, t in enumerate(tree["module"].values())}
        tree["optimizer"] = {"param_groups": [{"params": list(state), "step": 1}], "state": state}
        torch.save(tree, folder / "mp_rank_00_model_states.pt")

    return write


SHARED = {f"encoder.layers.{i}.mlp.dense_h_to_4h.weight": LONG for i in range(60_000)}
for title, kind, says, write in (
    ("DeepSpeed: a layer of a high number", DEEPSPEED, "missing", deepspeeds(999_999_999)),
    (
        "DeepSpeed: 60,000 names that share a list",
        DEEPSPEED,
        "MiB",
        deepspeeds(param_shapes=[SHARED]),
    ),
    (
        "DeepSpeed: a shape of 17 sizes",
        DEEPSPEED,
        "16 sizes",
        deepspeeds(param_shapes=[{"a": [1] * 17}]),
    ),
    (
        "Megatron: a rank of a high number",
        MEGATRON,
        "no file",
        megatrons(name="mp_rank_99999_99999"),
    ),
    (
        "Megatron: a thousand million layers",
        MEGATRON,
        "10{9} in its arg",
        megatrons(num_layers=10**9),
    ),
):
    in_folder(title, kind, says, write)

# Folders of Hugging Face

GPT2: dict[str, Any] = {
    "n_layer": 1,
    "n_embd": 8,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 32,
    "n_ctx": 16,
}
GPT2 |= {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}


def safetensors(header: bytes, data: bytes = bytes(64), size: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + data


def one_tensor(**changes: Any) -> bytes:
    return json.dumps(
        {"wte.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]} | changes}
    ).encode()


def with_tensors(raw: bytes, name: str = "model.safetensors") -> Callable[[Path, Path], None]:
    def write(folder: Path, marker: Path) -> None:
        (folder / "config.json").write_text(json.dumps(GPT2))
        (folder / name).write_bytes(raw)

    return write


def hugging(name: str, says: str, raw: bytes, file: str = "model.safetensors") -> None:
    in_folder(f"huggingface: {name}", HUGGING_FACE, says, with_tensors(raw, file))


DEEP = b"[" * 100_000 + b"]" * 100_000
OVERLAP = json.dumps(
    {name: {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]} for name in "ab"}
).encode()
HUGE = one_tensor(shape=[10**9] * 8)
hugging(
    "a header of 200 MB, as declared",
    "safetensors|instruction",
    safetensors(b"{}", size=200 * MEGABYTE),
)
hugging(
    "a tensor beyond the file",
    "safetensors",
    safetensors(one_tensor(data_offsets=[0, 1 << 40], shape=[1 << 38])),
)
hugging("a shape of 10**72", "safetensors", safetensors(HUGE))
hugging(
    "a thousand million dimensions", "safetensors", safetensors(one_tensor(shape=[1] * 100_000))
)
hugging(
    "a header of lists in lists", "safetensors|instruction", safetensors(b'{"a":' + DEEP + b"}")
)
NOTES = {"__metadata__": {str(i): "x" * 99 for i in range(250_000)}}
hugging("notes of 30 MB", "", safetensors(json.dumps(NOTES).encode(), b""))


def with_files(**files: Any) -> Callable[[Path, Path], None]:
    def write(folder: Path, marker: Path) -> None:
        for name, value in ({"config_json": GPT2} | files).items():
            raw = value if isinstance(value, bytes) else json.dumps(value).encode()
            (folder / name.replace("_json", ".json").replace("_index", ".index")).write_bytes(raw)

    return write


def index_of(file: str) -> dict[str, Any]:
    return {"model.safetensors_index_json": {"weight_map": {"wte.weight": file}}}


def sparse(name: str) -> Callable[[Path, Path], None]:
    """Return a writer of a file of 100 MB, none of which is on the disk."""

    def write(folder: Path, marker: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, 100 * MEGABYTE)

    return write


def bin_that_runs(folder: Path, marker: Path) -> None:
    with_files()(folder, marker)
    torch_file(folder / "pytorch_model.bin", program(system(marker)))


def remote_code(folder: Path, marker: Path) -> None:
    config = {"model_type": "evil", "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
    with_files(config_json=config)(folder, marker)
    (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')")


def link_out(folder: Path, marker: Path) -> None:
    with_files()(folder, marker)
    (marker.parent / "secret").write_bytes(safetensors(one_tensor()))
    (folder / "model.safetensors").symlink_to(marker.parent / "secret")


def device(folder: Path, marker: Path) -> None:
    with_files()(folder, marker)
    (folder / "model.safetensors").symlink_to("/dev/zero")


def in_hugging(
    name: str, says: str, write: Callable[[Path, Path], Any], runs: bool = False
) -> None:
    in_folder(f"huggingface: {name}", HUGGING_FACE, says, write, runs)


in_hugging("pytorch_model.bin", UNTRUSTED, bin_that_runs, True)
in_hugging("code for the model", "'evil' model", remote_code)
in_hugging("a link out of the folder", "outside", link_out)
in_hugging("a link to a device", "", device)
in_hugging("an index that leads out", "outside", with_files(**index_of("../secret.safetensors")))
in_hugging("a config of 100 MB", "bytes", sparse("config.json"))

# Our own


def native(folder: Path, files: dict[str, bytes], more: dict[str, Any] | None = None) -> None:
    """Write a step with a correct manifest, whatever its files say."""
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    table: dict[str, Any] = {
        n: {"size": len(r), "sha256": hashlib.sha256(r).hexdigest()} for n, r in files.items()
    }
    body: dict[str, Any] = {
        "format": "meshwright checkpoint 1",
        "chunk": 16 << 20,
        "files": table | (more or {}),
    }
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(body, sort_keys=True, indent=1))


EMPTY = dict.fromkeys(("state.json", "config.json", "index.json"), b"{}")


def with_box(**changes: Any) -> Callable[[Path, Path], None]:
    box = {
        "file": "rank_00000.safetensors",
        "begin": 0,
        "end": 16,
        "offset": [0],
        "size": [4],
    } | changes
    index = {"tensors": {"ln_f.weight": {"shape": [4], "dtype": "F32", "boxes": [box]}}}
    files = {"index.json": json.dumps(index).encode(), "rank_00000.safetensors": bytes(16)}
    return lambda folder, marker: native(folder, EMPTY | files)


def native_link(folder: Path, marker: Path) -> None:
    with_box()(folder, marker)
    (folder / "rank_00000.safetensors").rename(marker.parent / "elsewhere")
    (folder / "rank_00000.safetensors").symlink_to(marker.parent / "elsewhere")


OUTSIDE: dict[str, Any] = {"../secret": {"size": 3, "sha256": "0" * 64}}


def in_native(name: str, says: str, write: Callable[[Path, Path], Any]) -> None:
    in_folder(f"native: {name}", "native", says, write)


in_native(
    "a file outside of the folder",
    "plain name",
    lambda p, m: native(p, {"state.json": b"{}"}, OUTSIDE),
)
in_native("a file that is a link", "a link", native_link)
in_native(
    "a manifest of lists in lists", "JSON", lambda p, m: (p / "manifest.json").write_bytes(DEEP)
)
in_native(
    "a manifest of 100 MB",
    "bytes",
    sparse("manifest.json"),
)
in_native("NaN", "NaN", lambda p, m: native(p, EMPTY | {"state.json": b'{"a":NaN}'}))
in_native("a box in no file", "index", with_box(file="../secret"))
in_native("a box beyond its file", "outside", with_box(begin=1 << 40, end=(1 << 40) + 16))
