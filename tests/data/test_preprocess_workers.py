"""Preprocess with several workers and in shards: the bytes of one process, also after any kill."""

import contextlib
import fcntl
import io
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpora import preprocess_inputs

import on_ranks  # noqa: F401  so that the fork server has imported torch
from helpers import error_of
from meshwright.__main__ import main
from meshwright.base.errors import HANG, IO, LOCKED, USAGE, UserError
from meshwright.config.text_inputs import Preprocess, PreprocessConfig
from meshwright.data.files import writer as writing
from meshwright.data.files.indexed import Indexed
from meshwright.data.text import encoder, journal, limits, pieces, preprocess, workers
from meshwright.data.text.records import ReadOptions


@pytest.fixture
def small(monkeypatch):
    """Cut small inputs into many pieces, and fork the workers so that they inherit this."""
    monkeypatch.setattr(limits, "PIECE", 3000)
    monkeypatch.setattr(limits, "CHUNK", 1000)
    monkeypatch.setattr(preprocess, "MIB", 1)
    monkeypatch.setattr(journal, "NOTE_EVERY", 0)
    monkeypatch.setattr(workers, "start_method", lambda: "fork")


def write_corpus(path, documents=2000, seed=0, bad=0.0):
    rng = random.Random(seed)
    lines = []
    for n in range(documents):
        lines.append(
            json.dumps(
                {
                    "text": f"document {n} " + "x" * rng.randrange(200),
                    "title": "t" * rng.randrange(3),
                }
            )
        )
        if rng.random() < bad:
            lines[-1] = lines[-1][:-2]
    path.write_text("\n".join(lines))
    return path


def write_folder(path, documents=800):
    """Write a folder of small texts, JSON lines among them, and files that are passed over."""
    rng = random.Random(documents)
    for n in range(documents):
        file = path / f"part {n % 9}" / f"{n}.{rng.choice(['txt', 'md', 'py'])}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            rng.choice(
                [f"file {n} " + "ü" * rng.randrange(200), f'{{"text": "{n}"}}\n{{"text": "b"}}', ""]
            )
        )
    write_corpus(path / "part 4" / "many.jsonl", 200)
    (path / "part 1" / "1.css").write_text("p {}")
    (path / "part 2" / "x.txt").write_bytes(b"\0")
    return path


def run(folder, output, *inputs, **settings):
    """Preprocess the inputs; return what was printed on stderr."""
    return preprocess_inputs(folder / output, *inputs, **{"append_eod": True, **settings})[1]


def output_bytes(folder, output, *keys):
    files = [
        f"{output}_{key}_document.{end}" for key in keys or ("text",) for end in ("bin", "idx")
    ]
    return [(folder / name).read_bytes() for name in files]


def leftovers(folder, output=""):
    return sorted(
        p.name
        for p in folder.glob(f"{output}*")
        if p.suffix in (".tmp", ".progress") or ".part" in p.name
    )


@pytest.mark.flag("workers")
def test_workers_write_the_bytes_of_one(tmp_path, small, monkeypatch):
    """Files and streams, several keys, bad lines."""
    a, b = write_corpus(tmp_path / "a", bad=0.05), write_corpus(tmp_path / "b", 700, seed=1)
    subprocess.run(["gzip", str(b)], check=True)
    pools, real = [], workers.ProcessPoolExecutor
    monkeypatch.setattr(
        workers, "ProcessPoolExecutor", lambda n, *given: (pools.append(n), real(n, *given))[1]
    )
    settings = {"json_keys": ["text", "title"], "on_error": "skip"}
    printed = [
        run(tmp_path, f"by{n}", a, tmp_path / "b.gz", a, workers=n, **settings) for n in (1, 3)
    ]
    assert output_bytes(tmp_path, "by1", "text", "title") == output_bytes(
        tmp_path, "by3", "text", "title"
    )
    assert printed[0].splitlines()[-1] == printed[1].splitlines()[-1] and "bad lines" in printed[0]
    assert leftovers(tmp_path) == [] and pools == [3]


def test_results_wait_in_bounded_numbers(small, monkeypatch):
    """While the first piece is slow, the pieces read ahead and their results stay few."""
    taken = []
    monkeypatch.setattr(
        encoder.Encoder,
        "__call__",
        lambda self, piece, stop: (piece.number, [time.sleep(0.1 * (piece.number == 0))]),
    )
    some = (taken.append(n) or pieces.Piece(n, "", ()) for n in range(50))
    results = workers.encode_pieces(
        some, lambda: encoder.Encoder(None, None, ReadOptions(), "u2"), 2, False
    )
    for number, (piece, encoded, _) in enumerate(results):
        assert piece.number == encoded == number and len(taken) <= number + workers.AHEAD * 2


def test_the_first_bad_line_of_the_input_is_reported(tmp_path, small):
    """Whichever worker finds one first."""
    a = write_corpus(tmp_path / "a", bad=0.2, seed=3)
    first = next(
        n for n, line in enumerate(a.read_bytes().splitlines(), 1) if not line.endswith(b"}")
    )
    message = error_of(lambda: run(tmp_path, "out", a, workers=4))
    assert f"/a:{first}: not JSON " in message and "mend the line" in message
    assert os.listdir(tmp_path) == ["a"]


def test_a_bad_line_late_in_the_input_loses_nothing(tmp_path, small):
    """The same command with --on-error skip continues where it stopped."""
    a = write_corpus(tmp_path / "a")
    with open(a, "a") as file:
        file.write("\n{bad\n" + json.dumps({"text": "last"}))
    run(tmp_path, "skip", a, workers=1, on_error="skip")
    with pytest.raises(UserError, match="/a:2001: not JSON"):
        run(tmp_path, "out", a, workers=3)
    assert leftovers(tmp_path, "out")
    stderr = run(tmp_path, "out", a, workers=3, on_error="skip")
    assert "continuing after" in stderr and re.search("1 not JSON, first .*/a:2001", stderr)
    assert output_bytes(tmp_path, "out") == output_bytes(tmp_path, "skip")
    assert leftovers(tmp_path, "out") == []


def test_a_full_disk_while_the_index_is_written(tmp_path, small, monkeypatch):
    """What is encoded stays; the same command writes the index alone."""
    a = write_corpus(tmp_path / "a")
    run(tmp_path, "complete", a, workers=1)

    def raise_full(*given):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(writing, "write_index", raise_full)
        message = error_of(lambda: run(tmp_path, "out", a, workers=2), IO)
    assert "No space left on device; nothing was published: free space and run the same" in message
    assert leftovers(tmp_path, "out") and not (tmp_path / "out_text_document.idx").exists()
    stderr = run(tmp_path, "out", a, workers=2)
    assert "continuing after 2,000 documents" in stderr or "continuing after 1," in stderr
    assert (
        output_bytes(tmp_path, "out") == output_bytes(tmp_path, "complete")
        and leftovers(tmp_path, "out") == []
    )


def test_a_journal_is_replaced_in_one_step(tmp_path, monkeypatch):
    """No command continues with another's state, and none with half of one."""
    path, printed = tmp_path / "x.progress", io.StringIO()
    for n in range(3):
        with journal.open_journal(path, {"a": 1}, printed) as progress:
            assert progress.state == ({"n": n - 1} if n else None)
            progress.note({"n": n})
    complete = path.read_bytes()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(
            journal.os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with journal.open_journal(path, {"b": 2}, printed) as progress:
            assert progress.state is None
            progress.note({"n": 9})  # killed here: another command's state is gone by now
    assert "x.progress is of another command" in printed.getvalue() and not path.exists()
    for cut in range(len(complete)):
        path.write_bytes(complete[:cut])
        with journal.open_journal(path, {"a": 1}, printed) as progress:
            assert progress.state is None
    assert [p.name for p in tmp_path.iterdir()] == ["x.progress.tmp"]


def start(folder, log, *inputs, delay, **settings):
    """Start `run` in a process group of its own, slowed down by `delay` seconds for each piece."""

    def child():
        os.setsid()
        real = encoder.Encoder.__call__
        encoder.Encoder.__call__ = lambda *given, **more: (time.sleep(delay), real(*given, **more))[
            1
        ]
        try:
            (folder / log).write_text(run(folder, "out", *inputs, **settings))
        except UserError as error:
            (folder / log).write_text(str(error))
            os._exit(error.status)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process


def kill_group(process, progress):
    """Kill a process and its workers, and wait until none of them holds the lock on the output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    with contextlib.suppress(FileNotFoundError), open(f"{progress}.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@pytest.mark.whole
@pytest.mark.parametrize(
    "form",
    [
        pytest.param("lines", marks=pytest.mark.long),
        "folder",
        pytest.param("packed", marks=pytest.mark.long),
    ],
)
@pytest.mark.fault("F23")
def test_killed_at_any_moment_it_continues_and_ends_with_the_same_bytes(tmp_path, small, form):
    """kill -9 of all its processes at seeded moments; never an .idx beside an incomplete .bin."""
    rng = random.Random(form)
    source = (
        write_folder(tmp_path / "in")
        if form == "folder"
        else write_corpus(tmp_path / "in.jsonl", 3000)
    )
    if form == "packed":
        subprocess.run(["gzip", str(source)], check=True)
        source = tmp_path / "in.jsonl.gz"
    run(tmp_path, "complete", source, workers=1)
    expected = output_bytes(tmp_path, "complete")
    progress, idx = tmp_path / "out.progress", tmp_path / "out_text_document.idx"

    def noted():
        with contextlib.suppress(FileNotFoundError):
            return json.loads(progress.read_bytes())["state"]["pieces"]
        return 0

    for _ in range(2):
        pieces_then = noted() + rng.randrange(1, 20)
        process = start(tmp_path, "log", source, delay=0.002, workers=2)
        while process.is_alive() and noted() < pieces_then:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        kill_group(process, progress)
        assert not idx.exists() or output_bytes(tmp_path, "out") == expected
    assert "continuing after" in run(tmp_path, "out", source, workers=2)
    assert output_bytes(tmp_path, "out") == expected and leftovers(tmp_path, "out") == []


@pytest.mark.whole
@pytest.mark.parametrize("victim", ["worker", "parent"])
@pytest.mark.fault("F23")
def test_killed_alone(tmp_path, small, victim):
    """A killed worker is reported and the rest continues; workers end with a killed parent."""
    source = write_corpus(tmp_path / "in.jsonl", 600)
    process = start(tmp_path, "log", source, delay=0.02, workers=2)
    children = []
    while len(children) < 2 or not (tmp_path / "out.progress").exists():
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(process.pid if victim == "parent" else int(children[0]), signal.SIGKILL)
    process.join(20)
    assert process.exitcode == (-signal.SIGKILL if victim == "parent" else HANG)
    if victim == "worker":
        assert "a worker process was ended by signal 9" in (tmp_path / "log").read_text()
    until = time.monotonic() + 10
    while (
        any(os.path.exists(f"/proc/{child}/exe") for child in children) and time.monotonic() < until
    ):
        time.sleep(0.01)
    assert not any(os.path.exists(f"/proc/{child}/exe") for child in children)
    assert leftovers(tmp_path, "out") and not (tmp_path / "out_text_document.idx").exists()
    assert "continuing after" in run(tmp_path, "out", source, workers=2)
    run(tmp_path, "complete", source, workers=1)
    assert output_bytes(tmp_path, "out") == output_bytes(tmp_path, "complete")


@pytest.mark.flag("shard")
def test_merged_shards_are_the_bytes_of_one_process(tmp_path, small):
    """A compressed file, which is read in order, falls to one of them; each counts its own."""
    a = write_corpus(tmp_path / "a.jsonl", 800, bad=0.02)
    subprocess.run(["gzip", str(write_corpus(tmp_path / "b.jsonl", 400, seed=1))], check=True)
    inputs, given = [a, tmp_path / "b.jsonl.gz", a], {"json_keys": ["text", "title"]}
    given |= {"on_error": "skip", "workers": 1}
    run(tmp_path, "alone", *inputs, **given)
    for number in (2, 1, 3):
        run(tmp_path, "out", *inputs, shard=f"{number}/3", **given)
    for key in given["json_keys"]:
        name = f"{key}_document"
        parts = [str(tmp_path / f"out-{number}-of-3_{name}") for number in (1, 2, 3)]
        assert all(len(Indexed(part)) for part in parts)
        assert (
            main(["data", "merge", *parts, "--output-prefix", str(tmp_path / f"out_{name}")]) == 0
        )
    assert output_bytes(tmp_path, "out", *given["json_keys"]) == output_bytes(
        tmp_path, "alone", *given["json_keys"]
    )
    assert leftovers(tmp_path) == []


def test_a_merge_names_the_parts_that_it_lacks(tmp_path, small, capsys):
    a = write_corpus(tmp_path / "a.jsonl", 800)
    for number in (1, 2, 3):
        run(tmp_path, "out", a, workers=1, shard=f"{number}/3")
    parts = [str(tmp_path / f"out-{number}-of-3_text_document") for number in (1, 2, 3)]
    lacking = "warning: 1 of the 3 parts of out_text_document are not merged (--shard 2/3); merge"
    for given, warns in ((parts, False), (parts[::2], True)):
        assert main(["data", "merge", *given, "--output-prefix", str(tmp_path / f"{warns}")]) == 0
        assert (lacking in (said := capsys.readouterr().err)) is warns and (
            "warning" in said
        ) is warns


def test_a_shard_without_text(tmp_path, small):
    a = write_corpus(tmp_path / "a", 1)
    words = "no token under 'text' in part 2/2 of .*; the other parts can be merged without it$"
    with pytest.raises(UserError, match=words):
        run(tmp_path, "out", a, workers=1, shard="2/2")
    assert list(tmp_path.glob("out*document*")) == []


def test_several_processes_are_told_to_divide_the_input(tmp_path, small, monkeypatch, capsys):
    """Under torchrun or srun; each may be given a shard there."""
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    a = write_corpus(tmp_path / "a", 50)
    argv = ["preprocess", "--input", str(a), "--output-prefix", str(tmp_path / "out")]
    argv += ["--tokenizer-type", "ByteTokenizer", "--workers", "1"]
    assert main(argv) == USAGE
    assert "started as 2 processes" in (said := capsys.readouterr().err) and "--shard 1/2" in said
    assert not list(tmp_path.glob("out*"))
    assert main([*argv, "--shard", "2/2"]) == 0
    assert (tmp_path / "out-2-of-2_text_document.idx").exists()


def test_two_writers_of_one_output(tmp_path, small, monkeypatch):
    monkeypatch.setattr(journal, "PATIENCE", 0)
    a = write_corpus(tmp_path / "a", 10)
    with journal.open_journal(tmp_path / "out.progress", {}, io.StringIO()):
        assert "another process is writing" in error_of(lambda: run(tmp_path, "out", a), LOCKED)


def test_an_interrupted_run_of_another_command_is_not_continued(tmp_path, small, monkeypatch):
    a, real = write_corpus(tmp_path / "a"), preprocess.Totals.add_piece

    def interrupt(**settings):
        calls = iter(range(100))

        def fail(*given):
            real(*given)
            if next(calls) == 20:
                raise UserError("full", IO)

        with monkeypatch.context() as patched:
            patched.setattr(preprocess.Totals, "add_piece", fail)
            with pytest.raises(UserError, match="full"):
                run(tmp_path, "out", a, workers=1, **settings)
        assert leftovers(tmp_path, "out")

    run(tmp_path, "complete", a, workers=1)
    for settings, words in (
        ({}, "continuing after"),
        ({"json_keys": ["text", "title"]}, "is of another command"),
    ):
        interrupt(**settings)
        assert words in run(tmp_path, "out", a, workers=1)
        assert output_bytes(tmp_path, "out") == output_bytes(tmp_path, "complete")
    interrupt()
    with open(a, "a") as file:
        file.write("\n" + json.dumps({"text": "one more", "title": ""}))
    assert "its input has changed" in run(tmp_path, "out", a, workers=1)
    assert len(Indexed(tmp_path / "out_text_document")) == 2001
    interrupt()
    (tmp_path / "out_text_document.bin.tmp").write_bytes(b"")
    assert "continuing" not in run(tmp_path, "out", a, workers=1)
    assert len(Indexed(tmp_path / "out_text_document")) == 2001


@pytest.mark.fault("F26")
def test_an_input_that_changes_while_it_is_read(tmp_path, small, monkeypatch):
    a, real = write_corpus(tmp_path / "a"), preprocess.Totals.add_piece

    def count(*given):
        real(*given)
        with open(a, "a") as file:
            file.write("\n")

    monkeypatch.setattr(preprocess.Totals, "add_piece", count)
    message = error_of(lambda: run(tmp_path, "out", a, workers=1))
    assert re.search(r"/a has changed while it was read \([\d,]+ bytes then, [\d,]+ now\)", message)
    assert leftovers(tmp_path, "out") == []

    # of the same size, of which there is nothing to compare
    def touch(*given):
        real(*given)
        os.utime(a, ns=(0, 0))

    monkeypatch.setattr(preprocess.Totals, "add_piece", touch)
    message = error_of(lambda: run(tmp_path, "out", a, workers=1))
    assert message.endswith("/a has changed while it was read; start again when it is complete")


@pytest.mark.fault("F26")
def test_an_input_that_vanishes_while_it_is_read(tmp_path, small, monkeypatch):
    paths = [write_corpus(tmp_path / name, 50) for name in ("a", "b")]
    real = preprocess.Totals.add_piece

    def unlink(*given):
        real(*given)
        paths[1].unlink(missing_ok=True)

    monkeypatch.setattr(preprocess.Totals, "add_piece", unlink)
    message = error_of(lambda: run(tmp_path, "out", *paths, workers=1), IO)
    assert message.endswith("it has vanished; start again when it is there and readable")


def test_a_closed_stdout(tmp_path, monkeypatch):
    """Closed by whatever started the command: no traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", None)
    write_corpus(tmp_path / "a", 10)
    flags = "--tokenizer-type ByteTokenizer --output-prefix out --workers 1 --input a"
    assert main(["preprocess", *flags.split()]) == 0
    sys.stdout.close()
    assert (tmp_path / "out_text_document.idx").exists()


def test_no_key():
    from meshwright.config.checks import problems

    config = PreprocessConfig(Preprocess(input=["x"], output_prefix="y", json_keys=[]))
    assert [*map(str, problems(config))] == ["--json-keys names no key; give at least one"]
