"""Files that appear complete or not at all, and the names in our folders that lead elsewhere."""

from __future__ import annotations

import ast
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

import meshwright
from helpers import TINY_FLAGS
from meshwright.__main__ import main
from meshwright.base import files
from meshwright.base.errors import BAD_DATA, DONE, IO, USAGE, UnfitFile
from meshwright.training.state.folder import write_report

SECRET = "ssh-ed25519 AAAA the user's own\n"
PACKAGE = Path(meshwright.__file__).parent


def plant(kind: str, path: Path, elsewhere: Path) -> None:
    """Put something that is no file of ours in the place of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    targets = {
        "link": elsewhere / "secret",
        "dangling": elsewhere / "new",
        "itself": path.name,
        "folder": elsewhere / "folder",
        "device": "/dev/null",
    }
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(targets[kind])


KINDS = ("link", "dangling", "itself", "folder", "device", "pipe")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of the user that nothing in a run folder may change."""
    folder = tmp_path / "elsewhere"
    (folder / "folder").mkdir(parents=True)
    (folder / "secret").write_text(SECRET)
    (folder / "folder" / "log.txt").write_text(SECRET)
    return folder


def is_untouched(elsewhere: Path) -> bool:
    inner = elsewhere / "folder"
    names = (
        sorted(path.name for path in elsewhere.iterdir()),
        [path.name for path in inner.iterdir()],
    )
    texts = {path.read_text() for path in (elsewhere / "secret", inner / "log.txt")}
    return names == (["folder", "secret"], ["log.txt"]) and texts == {SECRET}


@pytest.mark.promise("writes through no link")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_ours_is_not_written_through_a_link(
    tmp_path: Path, elsewhere: Path, kind: str
) -> None:
    path = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    plant(kind, path, elsewhere)
    ways = [
        lambda: files.replacing(path).__enter__(),
        lambda: files.own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
        lambda: files.own_file(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC),
        lambda: files.own_folder(path),
        lambda: files.make_anew(path),
        lambda: files.lock(path, 0.0).__enter__(),
    ]
    what = "not a regular file" if kind == "pipe" else "a link, which is not followed"
    for way in ways:
        with pytest.raises(
            UnfitFile, match=f"{what}, so nothing is written there; put the file"
        ) as refused:
            way()
        assert refused.value.filename == str(path)
    assert is_untouched(elsewhere) and [found.name for found in path.parent.iterdir()] == [
        path.name
    ]


@pytest.mark.promise("A path that you type may be a link")
def test_a_path_that_the_user_typed_may_be_a_link(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "page.html").symlink_to(elsewhere / "secret")
    with files.replacing(tmp_path / "page.html", typed=True) as file:
        file.write(b"a page")
    assert (elsewhere / "secret").read_text() == "a page" and (tmp_path / "page.html").is_symlink()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["folder", "secret"]


def test_two_threads_that_write_one_file_do_not_share_its_temporary_one(tmp_path: Path) -> None:
    both, names, path = threading.Barrier(2, timeout=60), list[str](), tmp_path / "record"

    def write(text: bytes) -> None:
        with files.replacing(path) as file:
            both.wait()
            names.append(file.name)
            file.write(text)
            both.wait()

    threads = [threading.Thread(target=write, args=[letter * 100_000]) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*names}) == 2 and path.read_bytes() in (b"a" * 100_000, b"b" * 100_000)
    assert all(Path(name).name.startswith(f"record.{os.getpid()}.") for name in names)
    assert [found.name for found in tmp_path.iterdir()] == ["record"]


# Commands on a folder that someone else has made


def write_run(folder: Path) -> None:
    start = {
        "event": "start",
        "attempt": 1,
        "iteration": 0,
        "time": 1.0,
        "version": "1",
        "command": [],
        "world": 1,
    }
    step = dict.fromkeys(
        "consumed_samples loss grad_norm lr ms tokens_per_second skipped time".split(), 1.0
    )
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(
        f"{json.dumps(start)}\n{json.dumps({'event': 'step', 'iteration': 1} | step)}\n"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_is_not_written_through_a_link(
    tmp_path: Path,
    elsewhere: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("page", "compare"):  # drawing is slow
        monkeypatch.setattr(f"meshwright.apps.report.{module}.page", lambda *_: "<!doctype html>")
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        write_run(folder)
    plant(kind, run / "report.html", elsewhere)
    write_report(run)  # as a run does at its end
    assert capsys.readouterr().err.startswith("note: no report.html: ") and is_untouched(elsewhere)
    for name, folders in {"report.html": [run], "compare.html": [run, other]}.items():
        plant(kind, run / name, elsewhere)
        status = main(["report", *map(str, folders)])
        said = capsys.readouterr().err
        assert status in (USAGE, BAD_DATA) and f"{run / name}" in said and "Traceback" not in said
        assert is_untouched(elsewhere)
        page = tmp_path / "page.html"
        page.symlink_to(elsewhere / "page.html")  # which the user typed
        assert main(["report", *map(str, folders), "--output", str(page)]) == 0
        assert (elsewhere / "page.html").read_text().startswith("<!doctype html>")
        (elsewhere / "page.html").unlink()
        page.unlink()


TRAIN = [
    word
    for word in TINY_FLAGS
    if not word.startswith(("--vocab", "--no-tensorboard", "--train-iters"))
]
TRAIN += "--tokenizer=byte --tensorboard --keep-best --train-iters=3".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", *TRAIN, "--exit-interval=2", f"--save={folder}"]) == 0
    return folder


LINK = "a link, which is not followed, so nothing is written there; put the file or folder itself there, or remove it"
# What a training says of a link with this name, and its status.
NAMES = {
    "config.toml": (BAD_DATA, "config.toml: a link, which is not followed"),
    "metrics.jsonl": (BAD_DATA, "metrics.jsonl: a link out of"),
    ".lock": (IO, f"cannot lock {{run}}/.lock: {LINK}\n"),
    "latest_checkpointed_iteration.txt": (IO, f"latest_checkpointed_iteration.txt: {LINK}\n"),
    "tokenizer/meta.json": (BAD_DATA, "tokenizer/meta.json cannot be read: a link out of"),
    "tensorboard": (BAD_DATA, "tensorboard: a link, which is not followed"),
    "iter_0000003.tmp": (DONE, ""),
    "iter_0000003": (DONE, ""),
    "log.txt": (
        DONE,
        "log.txt: a link, which is not followed, so nothing is written there; put the file",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_training_writes_through_no_link_in_its_folder(
    trained: Path, tmp_path: Path, elsewhere: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    plant(
        "folder"
        if name.startswith(("iter", "tensorboard", "tokenizer")) and "." not in name
        else "link",
        run / name,
        elsewhere,
    )
    (tmp_path / "way").symlink_to(run)  # a run folder on another disk may be reached by a link
    words = [f"--save={tmp_path / 'way'}", f"--load={tmp_path / 'way'}"]
    status, said = NAMES[name]
    assert main(["train", *TRAIN, *words]) == status
    assert said.format(run=tmp_path / "way") in capsys.readouterr().err
    assert is_untouched(elsewhere)


def test_a_training_waits_for_no_pipe_in_its_folder(
    trained: Path, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    plant("pipe", run / "log.txt", elsewhere)
    assert main(["train", *TRAIN, f"--save={run}", f"--load={run}"]) == 0
    assert (
        "log.txt: not a regular file, so nothing is written there; put the file"
        in capsys.readouterr().err
    )


# Every place that writes


# Where the name is not one of ours in a folder: file, then why.
OTHERS = {
    "__main__.py": "/dev/null",
    "base/console.py": "/dev/null",
    "base/files.py": "what the others use",
    "apps/bench/calibrate.py": "a path of the command line; a file in a new temporary folder",
    "apps/bench/peers.py": "a folder that is new",
    "apps/bench/programs.py": "a file in that folder",
    "apps/bench/runs.py": "a folder that is new",
    "checkpoint/huggingface/writer.py": "a new temporary folder, which then gets its name",
    "checkpoint/pickle/writer.py": "an entry of an archive, in a stream",
    "checkpoint/publish.py": "a new step folder",
    "apps/tune/coordinates_command.py": "a path of the command line",
    "cli/preprocess.py": "/dev/null",
    "data/index_cache.py": "a name with a random word",
    "apps/evaluate/results.py": "paths of the command line",
    "generation/batches.py": "a path of the command line",
    "generation/megatron.py": "a path of the command line",
    "generation/terminal.py": "a file of the user's home",
    "apps/quickstart/folder.py": "checked just before",
    "base/storage/copies.py": "copies in the cache of this user",
    "data/tokenizers.py": "a new temporary folder",
    "training/hooks/eval_tasks.py": "a folder that is new",
}
WRITES = {"write_text", "write_bytes", "touch", "tofile", "open_memmap"}
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}


def writing_calls(source: str) -> list[ast.Call]:
    """Return the calls that open a file to write it, but for those by `opener=own_file`."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        is_method = isinstance(call.func, ast.Attribute)
        name = (
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        )
        inner = [part for argument in (*call.args, *call.keywords) for part in ast.walk(argument)]
        modes = {
            part.value
            for part in inner
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        opens = name == "open" and any(
            mode[:1] in "wax" or "+" in mode for mode in modes if 0 < len(mode) <= 3
        )
        flags = name == "open" and any(
            isinstance(part, ast.Attribute) and part.attr in WRITING_FLAGS for part in inner
        )
        own = any(keyword.arg == "opener" for keyword in call.keywords)
        if (opens or flags or (is_method and name in WRITES)) and not own:
            found.append(call)
    return found


def test_every_file_of_ours_is_opened_without_following_links() -> None:
    """A new place that writes uses `replacing` or `opener=own_file`, or is listed with a reason."""
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    some = {
        path: source
        for path, source in sources.items()
        if any(f"{name}(" in source for name in {*WRITES, "open"})
    }
    assert {path for path, source in some.items() if writing_calls(source)} == {*OTHERS}
