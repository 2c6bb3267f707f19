"""Foreign pickles, torch's two forms and plain ones, read back equal without copies."""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import functools
import io
import os
import pickle
import random
import re
import subprocess
import sys
import warnings
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import error_of
from meshwright.base.errors import BAD_DATA, UserError
from meshwright.checkpoint.pickle import child, pickles, writer


@pytest.fixture(scope="module", autouse=True)
def reader() -> Iterator[None]:
    """One process reads the pickles of all these tests."""
    with pickles.READ.kept():
        yield


def tree() -> dict[str, Any]:
    """Return a tree of everything that files of Megatron, DeepSpeed and torch contain."""
    random.seed(1)
    np.random.seed(1)
    w = torch.randn(4, 3)
    return {
        "w": w,
        "tied": w,
        "transposed": w.t(),
        "row": w[2],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "dtypes": [
            torch.arange(3).to(getattr(torch, name))
            for name in "bfloat16 half double int bool".split()
        ],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.0),
        "bytes": torch.get_rng_state()[:9],
        "args": argparse.Namespace(
            lr=1.5e-4, layers=[1, 2], params_dtype=torch.bfloat16, name="größe", none=None
        ),
        "ordered": collections.OrderedDict(x=1),
        "default": collections.defaultdict(list, {0: [1]}),
        "set": {1, 2},
        "numbers": [True, -5, 255, 65536, 2**40, -(2**70), 0.1, None, (), (1,), (1, 2, 3, 4)],
        "raw": b"abc",
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "numpy_scalar": np.float64(2.5),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "size": torch.Size([2, 3]),
        (torch.float32, 0): "key",
    }


def equals(a: Any, b: Any) -> bool:
    """Whether what was read equals what was saved; dicts are plain and arrays tensors."""
    if isinstance(b, np.ndarray):
        b = torch.from_numpy(np.ascontiguousarray(b))
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b.detach())
    if isinstance(b, dict):
        return type(a) is dict and list(a) == list(b) and all(equals(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        kind = tuple if type(b) is torch.Size else type(b)
        return len(a) == len(b) and isinstance(a, kind) and all(map(equals, a, b))
    return type(a) is type(b) and a == b if not isinstance(b, np.floating) else a == b.item()


@pytest.mark.parametrize("zipped", (True, False))
def test_files_of_torch_save_come_back_as_views_of_the_file(tmp_path: Path, zipped: bool) -> None:
    path, saved = tmp_path / "model.pt", tree()
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)

    read = pickles.load_pickle(path)

    assert equals(read, saved)
    assert read["tied"].data_ptr() == read["w"].data_ptr() == read["transposed"].data_ptr()
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [
        [int(x, 16) for x in line.split()[0].split("-")]
        for line in lines
        if line.endswith(str(path))
    ]
    for tensor in (read["w"], read["row"], *read["dtypes"]):
        assert any(low <= tensor.data_ptr() < high for low, high in mapped)
    # mapped once
    assert len(mapped) == 1 and pickles.load_pickle(path)["w"].data_ptr() == read["w"].data_ptr()


@pytest.mark.parametrize("protocol", (2, 3, 4, 5))
@pytest.mark.promise("They are read in a process of their own")
def test_plain_pickles(tmp_path: Path, protocol: int) -> None:
    saved = {
        key: value
        for key, value in tree().items()
        if "torch.Tensor" not in str(type(value)) and key not in ("parameter", "dtypes")
    } | {"long": bytes(range(256)) * 300}
    (tmp_path / "plain").write_bytes(pickle.dumps(saved, protocol))
    read = pickles.load_pickle(tmp_path / "plain")
    assert read["long"] == saved["long"] and isinstance(
        read["long"], memoryview if protocol > 2 else bytes
    )
    assert equals(read | {"long": saved["long"]}, saved)


def test_numpy_arrays_that_are_large_stay_in_the_file(tmp_path: Path) -> None:
    for protocol in (4, 5):
        array = np.arange(200_000, dtype=np.float32).reshape(400, 500)
        (tmp_path / f"{protocol}").write_bytes(
            pickle.dumps({"w": array, "f": np.asfortranarray(array)}, protocol)
        )
        read = pickles.load_pickle(tmp_path / f"{protocol}")
        assert equals(read, {"w": array, "f": array})
        assert str(tmp_path / f"{protocol}") in next(
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if int(line.split("-")[0], 16)
            <= read["w"].data_ptr()
            < int(line.split()[0].split("-")[1], 16)
        )


class Mode(enum.Enum):
    CAUSAL = 2


class Scaler:
    def __init__(self) -> None:
        self.cur_scale = 65536.0


class Settings(dict[str, int]):
    pass


@pytest.mark.promise("A name in it stands for a function of ours or for an inert record")
def test_classes_of_known_packages_are_inert(tmp_path: Path) -> None:
    """Their objects are recorded with their contents, and their modules never imported."""
    for kind in (Mode, Scaler, Settings):
        kind.__module__ = "megatron.core.nowhere"
    try:
        body = {
            "mode": Mode.CAUSAL,
            "scaler": Scaler(),
            "settings": Settings(a=1),
            "io": io.BytesIO(b"abc"),
        }
        pickler = pickle._Pickler  # type: ignore[attr-defined]  # the C one insists on importing what it names
        file = io.BytesIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pickler, "save_global", save_name)
            patch.setitem(pickler.dispatch, type, save_name)
            pickler(file, 4).dump(body)
    finally:
        for kind in (Mode, Scaler, Settings):
            kind.__module__ = __name__
    (tmp_path / "x.pkl").write_bytes(file.getvalue())

    read = pickles.load_pickle(tmp_path / "x.pkl")

    mode, scaler, settings = read["mode"], read["scaler"], read["settings"]
    assert (mode.module, mode.name, mode.args) == ("megatron.core.nowhere", "Mode", (2,))
    assert scaler.cur_scale == 65536.0 and repr(scaler) == "<megatron.core.nowhere.Scaler object>"
    assert settings.state == {"a": 1} and read["io"].state[0] == b"abc"
    with pytest.raises(AttributeError, match="Scaler has no other"):
        scaler.other  # noqa: B018


def save_name(pickler: Any, value: Any, name: str | None = None) -> None:
    pickler.save(value.__module__)
    pickler.save(name or value.__qualname__)
    pickler.write(pickle.STACK_GLOBAL)


@pytest.mark.whole  # the import takes a second
def test_a_folder_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    """The metadata is read, and each item as a part of a file."""
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.randn(3, 4), "half": torch.ones(5).bfloat16(), "step": 7}
    with warnings.catch_warnings():  # that it is a single process
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    read = pickles.load_pickle(tmp_path / ".metadata")

    assert read.state_dict_metadata["w"].chunks[0].sizes == (3, 4)
    assert read.state_dict_metadata["w"].properties.state[0] == torch.float32
    assert isinstance(read, pickles.Stub) and read.name == dcp.Metadata.__name__
    items = {
        index.fqn: pickles.load_pickle(tmp_path / place.relative_path, place.offset, place.length)
        for index, place in read.storage_data.items()
    }
    assert equals(items, {name: state[name] for name in items}) and set(items) == set(state)


def test_every_damage_is_refused(tmp_path: Path) -> None:
    """Files cut anywhere or with any byte changed are read, or refused by name."""
    good = {True: tmp_path / "new", False: tmp_path / "old"}
    for zipped, path in good.items():
        saved = {"w": torch.ones(5), "n": [1, "x"], "a": argparse.Namespace(b=2)}
        torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    rng, refused = random.Random(5), 0
    for attempt in range(400):
        raw = bytearray(good[attempt % 2 == 0].read_bytes())
        if attempt % 4 < 2:
            del raw[rng.randrange(len(raw)) :]
        else:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path = tmp_path / f"{attempt}"
        path.write_bytes(raw)
        try:
            pickles.load_pickle(path)
        except UserError as error:
            refused += 1
            assert error.status == BAD_DATA and str(path) in str(error) and len(str(error)) < 1000
    assert 200 <= refused < 400


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no pickle at all")
    (tmp_path / "tar").write_bytes(bytes(257) + b"ustar" + bytes(300))
    (tmp_path / "safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}              ")
    (tmp_path / "big").write_bytes(
        archive_of({"archive/data.pkl": pickle.dumps({}, 2), "archive/byteorder": b"big"})
    )
    says = {
        ".": "not a file",
        "absent": "No such file",
        "empty": "empty",
        "text": "its pickle is damaged: invalid load key, 'n'",
    }
    says |= {"tar": "tar archive", "safetensors": "load key", "big": "big-endian"}
    for name, said in says.items():
        assert re.search(said, error_of(partial(pickles.load_pickle, tmp_path / name)))
    with pytest.raises(UserError, match="bytes 10 to 30 are wanted"):
        pickles.load_pickle(tmp_path / "text", 10, 20)


def archive_of(entries: dict[str, bytes]) -> bytes:
    out = bytearray()
    writer.write_archive(
        out.extend, ((name, lambda data=data: data) for name, data in entries.items())
    )
    return bytes(out)


@pytest.mark.fault("F27")
@pytest.mark.promise(
    "A name in it stands for a function of ours or for an inert record",
    "Nothing falls back to that without the flag",
)
def test_an_unknown_class_is_refused_by_name_and_only_trust_runs_it(tmp_path: Path) -> None:
    class Secret:
        def __reduce__(self) -> Any:
            return (print, ("executed",))

    for name in ("zip", "old", "plain"):
        path = tmp_path / name
        if name == "plain":
            path.write_bytes(pickle.dumps(Secret()))
        else:
            torch.save({"x": Secret()}, path, _use_new_zipfile_serialization=name == "zip")
        with pytest.raises(
            UserError, match=rf"{name}: .*it names builtins.print.*--trust-pickle runs it"
        ):
            pickles.load_pickle(path)
        assert pickles.load_pickle(path, trust=True) in ({"x": None}, None)


class FixedAnswer:
    """Stands for the sandbox."""

    kept = contextlib.nullcontext

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, request: Any) -> Any:
        return self.answer


LIES = {
    "a tensor beyond the file": ["tensor", "float32", 96, 2, 0, [2], [1]],
    "a tensor before the file": ["tensor", "float32", -8, 2, 0, [2], [1]],
    "a tensor longer than its storage": ["tensor", "float32", 0, 2, 0, [3], [1]],
    "a tensor repeated for ever": ["tensor", "float32", 0, 2, 0, [1 << 40], [0]],
    "strides beyond the storage": ["tensor", "float32", 0, 4, 0, [2, 2], [1 << 30, 1]],
    "a stride below zero": ["tensor", "float32", 0, 4, 3, [4], [-1]],
    "an offset below zero": ["tensor", "float32", 8, 4, -1, [1], [1]],
    "sizes that are no numbers": ["tensor", "float32", 0, 4, 0, ["4"], [1]],
    "a size of a fraction": ["tensor", "float32", 0, 4, 0, [0.5], [1]],
    "a begin of a fraction": ["tensor", "float32", 0.5, 4, 0, [1], [1]],
    "strides of another number": ["tensor", "float32", 0, 4, 0, [2, 2], [1]],
    "a thousand dimensions": ["tensor", "float32", 0, 4, 0, [1] * 1000, [1] * 1000],
    "a type that there is not": ["tensor", "load", 0, 4, 0, [1], [1]],
    "bytes beyond the file": ["range", 0, 101],
    "bytes before the file": ["range", -1, 50],
    "bytes backwards": ["range", 50, 40],
    "an array longer than its bytes": ["array", "float64", [1 << 40], False, ["bytes", "00" * 8]],
    "an array of bytes beyond the file": ["array", "uint8", [200], False, ["range", 0, 200]],
    "an array of no bytes": ["array", "uint8", [4], False, "abcd"],
    "a word that there is not": ["eval", "1"],
    "no word": [],
    "a table of JSON": {"a": 1},
    "a list as a key": ["dict", ["list"], 1],
    "a key without a value": ["dict", 1],
    "a key of many parts": ["dict", ["tuple", *range(9)], 1],
    "a Namespace of a list": ["namespace", ["list"]],
    "lists in lists": functools.reduce(lambda inner, _: ["list", inner], range(5000), 1),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.fault("F28")
@pytest.mark.promise("Its answer is not trusted: a place outside of the file is refused")
def test_the_child_is_not_trusted(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it answers is refused unless it lies within the file."""
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    monkeypatch.setattr(pickles, "READ", FixedAnswer(["tensor", "float32", 92, 2, 0, [2], [1]]))
    assert pickles.load_pickle(path).tolist() == [0, 0]
    monkeypatch.setattr(pickles, "READ", FixedAnswer(LIES[lie]))
    assert "not a checkpoint that can be read" in error_of(partial(pickles.load_pickle, path))


def test_the_child_imports_neither_torch_nor_ours(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(child.__file__).parent)!r}); import child; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "child" in modules and not {"torch", "numpy", "meshwright"} & set(modules)


# Writing


def written(path: Path, body: Any) -> Path:
    with open(path, "wb") as file:
        writer.write_torch_file(body, file.write)
    return path


def test_torch_load_reads_what_we_write(tmp_path: Path) -> None:
    body = tree() | {"later": writer.Later((2, 3), torch.half, lambda: torch.ones(2, 3).half())}
    for key in (
        *"numpy numpy_scalar fortran default size parameter ordered set raw".split(),
        (torch.float32, 0),
    ):
        del body[key]
    path = written(tmp_path / "ours.pt", body)
    expected = body | {"later": torch.ones(2, 3).half()}

    with torch.serialization.safe_globals([argparse.Namespace]):
        assert equals(torch.load(path, weights_only=True), expected)
    read = torch.load(path, weights_only=False, mmap=True)
    assert equals(read, expected) and equals(pickles.load_pickle(path), expected)
    assert read["tied"].data_ptr() == read["w"].data_ptr()
    in_file = [
        tensor for tensor in pickles.load_pickle(path).values() if isinstance(tensor, torch.Tensor)
    ]
    # files begin at a page
    assert len(in_file) > 5 and all(tensor.data_ptr() % 64 == 0 for tensor in in_file)


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Each tensor is made in its turn, and dropped before the next but one."""
    alive: list[weakref.ref[Any]] = []

    def make() -> torch.Tensor:
        assert sum(ref() is not None for ref in alive) <= 1
        memory = np.full(100, len(alive), np.float32)
        alive.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    path = written(tmp_path / "x.pt", [writer.Later((100,), torch.float32, make) for _ in range(5)])
    assert [tensor[7].item() for tensor in torch.load(path)] == [0, 1, 2, 3, 4]


def test_values_that_our_reader_refuses_are_not_written(tmp_path: Path) -> None:
    for value in (Scaler(), Mode.CAUSAL, len, np.float64(1), torch.device("cpu")):
        with pytest.raises(TypeError, match="is not written into a checkpoint"):
            written(tmp_path / "x", {"x": value})
    with pytest.raises(ValueError, match=r"\(2,\) torch.float32 was promised, \(3,\)"):
        written(tmp_path / "x", writer.Later((2,), torch.float32, lambda: torch.ones(3)))


def test_archives_of_more_than_4_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 5 GiB of zeros is a hole in both files, and its checksum is skipped."""
    size, crc32 = 5 << 30, zlib.crc32
    with open(tmp_path / "zeros", "wb") as zeros:
        zeros.truncate(size)
    table = torch.from_file(str(tmp_path / "zeros"), True, size, dtype=torch.uint8)
    monkeypatch.setattr(
        zipfile, "crc32", lambda part, crc=0: 0 if len(part) == size else crc32(part, crc)
    )
    with open(tmp_path / "x.pt", "wb") as file:

        def write(data: bytes | bytearray | memoryview) -> None:
            if len(data) == size:
                file.seek(size, os.SEEK_CUR)
            else:
                file.write(data)

        writer.write_torch_file({"table": table, "after": torch.arange(3)}, write)

    for read in (pickles.load_pickle(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt", mmap=True)):
        assert (
            read["table"].shape == (size,)
            and read["table"][-1] == 0
            and torch.equal(read["after"], torch.arange(3))
        )
    with zipfile.ZipFile(tmp_path / "x.pt") as other:
        assert (
            other.getinfo("archive/data/0").file_size == size
            and len(other.read("archive/data/1")) == 24
        )
