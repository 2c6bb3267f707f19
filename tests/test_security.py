"""Promises of SECURITY.md that no other file tests: files, and the network."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers import TINY_FLAGS, write_counting
from meshwright.__main__ import main
from meshwright.checkpoint import manifests, publish, steps
from meshwright.data.files.indexed import Indexed
from meshwright.data.loader import Samples
from meshwright.generation import templates
from meshwright.runtime.ranks import connect, interfaces

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    """The folder of a run with a report, and the connections that it asked for."""
    folder, asked = tmp_path_factory.mktemp("trained") / "run", list[object]()

    def refuse(*args: object, **more: object) -> Any:
        asked.append(args)
        raise OSError("no network here")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (socket.socket, "connect"),
            (socket.socket, "connect_ex"),
            (socket, "getaddrinfo"),
        ):
            patch.setattr(owner, name, refuse)
        argv = [
            *TINY_FLAGS,
            "--tensorboard",
            "--train-iters=2",
            "--eval-iters=0",
            "--save",
            str(folder),
        ]
        assert main(["train", *argv]) == 0
    return folder, asked


# Files


def is_tensor(entry: object) -> bool:
    return isinstance(entry, dict) and "data_offsets" in entry


@pytest.mark.promise("Our checkpoints hold no code", "A step is a folder of safetensors and JSON")
def test_a_step_is_safetensors_and_json(trained: tuple[Path, list[object]]) -> None:
    files = list(steps.step_folder(trained[0], 2).iterdir())
    assert len(files) == 5
    for path in files:
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size] if path.suffix == ".safetensors" else raw)
        assert path.suffix in (".safetensors", ".json") and isinstance(header, dict)
        ends = [entry["data_offsets"][1] for entry in header.values() if is_tensor(entry)]
        assert not ends or len(raw) == 8 + size + max(ends)  # nothing else is in it


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.promise("Cached indices are loaded without pickle")
def test_a_cached_index_runs_nothing(tmp_path: Path) -> None:
    write_counting(tmp_path / "x", [30, 20, 10, 40])
    args = (Indexed(tmp_path / "x"), range(0, 4), 12, 8, 1)
    made = Samples(*args, cache_dir=tmp_path / "cache")
    good = [made.doc_idx.copy(), made.shuffle_idx.copy()]  # they are views of the files
    paths = list((tmp_path / "cache").glob("*.npy"))
    for path in paths:
        np.save(path, np.array([Payload(tmp_path / "marker")], dtype=object), allow_pickle=True)
    again = Samples(*args, cache_dir=tmp_path / "cache")
    assert paths and not (tmp_path / "marker").exists()
    assert np.array_equal(again.doc_idx, good[0]) and np.array_equal(again.shuffle_idx, good[1])
    for path in paths:
        np.load(path, allow_pickle=False)  # written anew
        assert b"marker" not in path.read_bytes()
    np.save(
        tmp_path / "again.npy",
        np.array([Payload(tmp_path / "marker")], dtype=object),
        allow_pickle=True,
    )
    np.load(tmp_path / "again.npy", allow_pickle=True)
    assert (tmp_path / "marker").exists()  # the payload works


@pytest.mark.promise("Archives are read in memory")
def test_names_in_archives_are_no_paths(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "z.zip", "w") as pack:
        for name in ("../up.txt", "../../far.txt", f"{tmp_path}/absolute.txt"):
            pack.writestr(name, f"the text of {name}")
    argv = [
        "--input",
        f"{folder}/z.zip",
        "--output-prefix",
        f"{folder}/out",
        "--tokenizer-type",
        "ByteTokenizer",
    ]
    before = {path for path in tmp_path.rglob("*")}
    assert main(["preprocess", *argv, "--workers=1"]) == 0
    new = {path for path in tmp_path.rglob("*")} - before
    assert new and all(
        str(path.relative_to(folder)).startswith("out_text_document") for path in new
    )
    assert len(Indexed(folder / "out_text_document")) == 3


@pytest.mark.promise("Their pages load nothing from elsewhere")
def test_a_report_loads_nothing(trained: tuple[Path, list[object]]) -> None:
    page = (trained[0] / "report.html").read_text()
    assert "<h1>" in page
    assert not re.search(
        r"""(?:src|href|action|data)=["']?(?!data:|#)[^>]*//|@import|url\(""", page
    )


@pytest.mark.promise(
    "Checksums are no signatures", "Whoever can write to a folder can replace a checkpoint"
)
def test_checksums_are_no_signatures(tmp_path: Path) -> None:
    publish.write_step(tmp_path, 1, {"state.json": lambda write: write(b'{"step": 1}')})
    folder = steps.step_folder(tmp_path, 1)
    (folder / "state.json").write_bytes(b'{"step": 2}')
    with pytest.raises(manifests.DamagedCheckpoint):
        manifests.verify_step(folder, full=True)
    entry = publish.write_file(tmp_path / "other", lambda write: write(b'{"step": 2}'))
    (folder / manifests.MANIFEST).write_bytes(manifests.encode_manifest({"state.json": entry}))
    manifests.verify_step(folder, full=True)


def test_a_template_may_loop(tmp_path: Path) -> None:
    text = "{% for i in range(300) %}{% for j in range(300) %}x{% endfor %}{% endfor %}"
    assert (
        len(templates.ChatTemplate(tmp_path / "x", text).render([{"role": "user", "content": "a"}]))
        == 90_000
    )


# Network


def listening() -> set[str]:
    """Return the addresses that this process listens on, as in /proc/net/tcp."""
    inodes = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    out = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                out.add(fields[1])
    return out


@pytest.mark.promise(
    "Ranks trust the network between them",
    "The store where ranks meet asks for no password",
    "the store and gloo listen on 127.0.0.1 only",
)
def test_the_store_of_one_machine_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the store reads and writes it; on one machine only its users do."""
    before, until = listening(), time.monotonic() + 20
    store = connect.connect_store("127.0.0.1", 0, True, until, "rank 0")
    assert listening() - before == {f"0100007F:{store.port:04X}"}
    store.set("secret", "1")
    other = connect.connect_store("127.0.0.1", store.port, False, until, "rank 0")
    assert other.get("secret") == b"1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is set back
    interfaces.choose_interface("127.0.0.1", store.port, "gloo")
    names = dict((name, number) for number, name in socket.if_nameindex())
    assert os.environ["GLOO_SOCKET_IFNAME"] in names and "lo" in os.environ["GLOO_SOCKET_IFNAME"]


PICKLES = re.compile(
    r"\.(?:all_gather_object|gather_object|(?:broadcast|scatter|send|recv)_object_list)\(|\btorch\.(?:load|save)\("
    r"|^ *(?:import|from) (?:pickle|cPickle|marshal|shelve|dill|cloudpickle|joblib)\b",
    re.MULTILINE,
)


@pytest.mark.promise("What ranks send one another is tensors and JSON")
def test_only_readers_of_other_formats_know_pickle() -> None:
    source = ROOT / "src" / "meshwright"
    known = {
        source / "checkpoint" / "pickle" / name for name in ("child.py", "pickles.py", "writer.py")
    }
    found = {path: PICKLES.findall(path.read_text()) for path in source.rglob("*.py")}
    assert {path for path, uses in found.items() if uses} == known
    # torch.load is what --trust-pickle runs; what we write takes no function of torch.
    assert all("torch.save(" not in uses for uses in found.values())


@pytest.mark.promise(
    "Nothing is sent or downloaded unless you ask for it",
    "A training run of files that are here opens no connection",
)
def test_training_opens_no_connection(trained: tuple[Path, list[object]]) -> None:
    assert not trained[1]


@pytest.mark.promise("It speaks plain HTTP", "No text is written to a log")
def test_the_server_speaks_plain_http_and_logs_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    from serve.sites import site

    with site() as running:
        assert (
            running.complete(prompt="confidential", max_tokens=12)["choices"][0]["text"]
            == "confidential"
        )
        assert running.error(prompt="confidential", bogus="confidential")[0] == 400
        assert b"HTTP/1.1 200" in running.exchange(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
    captured = capfd.readouterr()
    assert "confidential" not in captured.out + captured.err


@pytest.mark.promise("`meshwright watch` listens on this machine only")
def test_the_live_page_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from meshwright.apps.watch import app

    found = []

    async def serve(sockets: list[socket.socket]) -> None:
        found.extend(s.getsockname()[0] for s in sockets)

    fake = SimpleNamespace(serve=serve, should_exit=False)
    monkeypatch.setattr(app, "make_server", lambda *_: fake)
    monkeypatch.setattr(app, "make_app", lambda _: None)
    watcher = SimpleNamespace(start=lambda: None, stopping=SimpleNamespace(set=lambda: None))
    app.serve_page(watcher, 0, lambda port: None)  # type: ignore[arg-type]
    assert found == ["127.0.0.1"]
