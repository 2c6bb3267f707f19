"""Commands that read a run: a run in object storage gives them what the same run on a disk does."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import TINY_FLAGS, captured_output
from meshwright.__main__ import main
from meshwright.apps.watch import command as watch
from meshwright.apps.watch.overview import Watcher
from meshwright.base.errors import USAGE
from meshwright.base.storage import addresses, copies, store
from meshwright.checkpoint import mirror
from s3 import Bucket, serving_bucket

pytest.importorskip("obstore")
RUN = "s3://bucket/runs/a"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bucket, Path]]:
    """Train a run on a disk, and copy it to a bucket."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch, serving_bucket(patch) as bucket:
        given = [word for word in TINY_FLAGS if "--train-iters" not in word]
        words = f"--train-iters 4 --save-interval 2 --tokenizer byte --vocab-size 257 --save {folder}/a".split()
        assert main(["train", *given, *words]) == 0
        for path in (folder / "a").rglob("*"):
            if path.is_file() and not path.name.startswith("."):
                bucket.objects[f"runs/{path.relative_to(folder)}"] = path.read_bytes()
        yield bucket, folder


@pytest.fixture
def both(
    runs: tuple[Bucket, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], tuple[list[str], list[str]]]]:
    """Return a function that runs a command with the run on the disk and in the bucket.

    It returns what each prints.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    mirror.fetch.cache_clear()
    store.forget()

    def run(command: str) -> tuple[list[str], list[str]]:
        printed = []
        for name in (f"{runs[1]}/a", RUN):
            with captured_output() as (out, _):
                assert (
                    main(
                        [
                            name if word == "RUN" else word.replace("RUN", name)
                            for word in command.split()
                        ]
                    )
                    == 0
                )
            printed.append(
                [line.replace(name, "RUN").replace(f"{runs[1]}/a", "RUN") for line in out]
            )
        return printed[0], printed[1]

    yield run
    copies.sparse_copy.cache_clear()


@pytest.mark.parametrize(
    "command",
    [
        "inspect RUN --full --tensors",
        "report RUN RUN --json",
        "evaluate RUN --steps all --input text.txt --json --device cpu",
        "generate RUN --prompt a --max-new-tokens 3 --device cpu --seed 1",
    ],
)
def test_a_command_prints_the_same(
    both: Callable[[str], tuple[list[str], list[str]]], tmp_path: Path, command: str
) -> None:
    (tmp_path / "text.txt").write_text("a text")
    local, remote = both(command)
    assert local == remote and local


def test_pages_and_conversions_are_written_here(
    both: Callable[[str], tuple[list[str], list[str]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", RUN]) == USAGE
    assert "--output is needed" in capsys.readouterr().err
    assert main(["report", RUN, "--output", "page.html"]) == 0
    assert "loss" in (tmp_path / "page.html").read_text()
    assert main(["convert", RUN, "hf", "--to", "huggingface"]) == 0
    assert (tmp_path / "hf/model.safetensors").exists()
    assert "/cache/" not in capsys.readouterr().out


def test_the_page_of_watch_follows_a_run(
    runs: tuple[Bucket, Path],
    both: Callable[[str], tuple[list[str], list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bucket, content = runs[0], runs[0].objects["runs/a/metrics.jsonl"]
    bucket.objects["runs/a/metrics.jsonl"] = content[: content.index(b"\n") + 1]
    monkeypatch.setattr(watch, "FETCH_SECONDS", 0.05)

    def look(watcher: Watcher, port: int, show: object) -> None:
        watcher.search()
        watcher.update()
        (run,) = watcher.runs.values()
        assert not run.count
        bucket.objects["runs/a/metrics.jsonl"] = content
        until = time.monotonic() + 20
        while not run.count and time.monotonic() < until:
            time.sleep(0.05)
            watcher.update()
        assert run.column("iteration").tolist() == [1, 2, 3, 4]

    monkeypatch.setattr("meshwright.apps.watch.app.serve_page", look)
    assert main(["watch", "s3://bucket/runs"]) == 0
    assert not list(Path(addresses.localize(RUN)).glob("iter_*/rank_*"))
    assert main(["watch", "s3://bucket/nothing"]) != 0
    assert "there is no folder s3://bucket/nothing" in capsys.readouterr().err


def test_an_address_to_write_to_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "in", RUN, "--to", "native"]) == USAGE
    assert (
        "DST s3://bucket/runs/a is an address, not a path of this machine"
        in capsys.readouterr().err
    )
