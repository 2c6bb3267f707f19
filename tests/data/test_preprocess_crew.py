"""Preprocessing by several workers and ranks: always the bytes of one process; killed at any moment, it goes on."""

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.data.format import writer as writing
from meshwright.data.format.indexed import Indexed
from meshwright.data.prepare import journal, preprocess, text
from meshwright.data.prepare import workers as crew
from meshwright.data.prepare.preprocess import Preprocess, PreprocessConfig
from meshwright.errors import BAD_DATA, HANG, IO, LOCKED, UserError
from meshwright.settings.schema import Tokenizer

ROOT = Path(__file__).parents[2]
SMALL = """
import sys
from meshwright.data.prepare import containers, journal, preprocess, text
text.PIECE, containers.CHUNK, preprocess.MIB, journal.SECONDS = 3000, 1000, 1, 0
from meshwright.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def small(monkeypatch):
    """Many pieces of little text, and workers for them. Forked, for they inherit this."""
    monkeypatch.setattr(text, "PIECE", 3000)
    monkeypatch.setattr(preprocess, "MIB", 1)
    monkeypatch.setattr(journal, "SECONDS", 0)
    context = crew.multiprocessing.get_context("fork")
    monkeypatch.setattr(crew.multiprocessing, "get_context", lambda kind: context)


def corpus(path, documents=2000, seed=0, bad=0.0):
    rng = random.Random(seed)
    lines = []
    for n in range(documents):
        lines.append(json.dumps({"text": f"document {n} " + "x" * rng.randrange(200), "title": "t" * rng.randrange(3)}))
        if rng.random() < bad:
            lines[-1] = lines[-1][:-2]
    path.write_text("\n".join(lines))


def work(tmp_path, output, paths, **settings):
    p = Preprocess(input=[str(x) for x in paths], output_prefix=str(tmp_path / output), append_eod=True, **settings)
    stdout, stderr = io.StringIO(), io.StringIO()
    preprocess.run(PreprocessConfig(p, Tokenizer(tokenizer_type="ByteTokenizer")), stdout, stderr)
    return stdout.getvalue(), stderr.getvalue()


def made(tmp_path, output, *keys):
    return [
        (tmp_path / f"{output}_{key}_document.{end}").read_bytes()
        for key in keys or ("text",)
        for end in ("bin", "idx")
    ]


def left(tmp_path, output):
    return sorted(p.name for p in tmp_path.glob(f"{output}*") if p.suffix in (".tmp", ".progress"))


@pytest.mark.parametrize("workers", [2, 5])
def test_workers_write_the_bytes_of_one(tmp_path, small, workers, monkeypatch):
    """Files, streams, several keys, bad lines."""
    corpus(tmp_path / "a", bad=0.05)
    corpus(tmp_path / "b", 700, seed=1)
    subprocess.run(["gzip", str(tmp_path / "b")], check=True)
    inputs = [tmp_path / "a", tmp_path / "b.gz", tmp_path / "a"]
    told, crews = [], []
    real = crew.Crew.__init__
    monkeypatch.setattr(
        crew.Crew, "__init__", lambda self, size, *given: (crews.append(size), real(self, size, *given))[0]
    )
    for output, size in (("one", 1), ("many", workers)):
        told.append(work(tmp_path, output, inputs, workers=size, json_keys=["text", "title"], on_error="skip"))
    assert made(tmp_path, "one", "text", "title") == made(tmp_path, "many", "text", "title")
    assert told[0][1].splitlines()[-1] == told[1][1].splitlines()[-1]
    assert "bad lines" in told[0][1]
    assert left(tmp_path, "") == []
    assert crews == [workers]


def test_the_first_bad_line_of_the_input_is_told_whoever_finds_one(tmp_path, small):
    corpus(tmp_path / "a", bad=0.2, seed=3)
    lines = (tmp_path / "a").read_bytes().splitlines()
    first = next(n for n, one in enumerate(lines, 1) if not one.endswith(b"}"))
    for workers in (1, 4):
        with pytest.raises(UserError, match=rf"/a:{first}: not JSON .*mend the line") as caught:
            work(tmp_path, "out", [tmp_path / "a"], workers=workers)
        assert caught.value.status == BAD_DATA
        assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_bad_line_late_in_the_input_loses_nothing(tmp_path, small):
    """The same command with --on-error skip goes on where it stopped."""
    corpus(tmp_path / "a")
    with open(tmp_path / "a", "a") as file:
        file.write("\n{bad\n" + json.dumps({"text": "last"}))
    work(tmp_path, "skip", [tmp_path / "a"], workers=1, on_error="skip")
    for workers in (1, 3):
        with pytest.raises(UserError, match="/a:2001: not JSON"):
            work(tmp_path, "out", [tmp_path / "a"], workers=workers)
        assert left(tmp_path, "out")
        _, stderr = work(tmp_path, "out", [tmp_path / "a"], workers=workers, on_error="skip")
        assert "continuing after" in stderr and "1 not JSON, first " in stderr and "/a:2001" in stderr
        assert made(tmp_path, "out") == made(tmp_path, "skip")
        assert left(tmp_path, "out") == []


def test_a_full_disk_while_the_index_is_written(tmp_path, small, monkeypatch):
    """What is encoded stays: the same command writes the index alone."""
    corpus(tmp_path / "a")
    work(tmp_path, "whole", [tmp_path / "a"], workers=1)

    def full(*given):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(writing, "write_index", full)
        with pytest.raises(
            UserError, match="No space left on device: nothing was published; free space and the same command"
        ):
            work(tmp_path, "out", [tmp_path / "a"], workers=2)
    assert left(tmp_path, "out") and not (tmp_path / "out_text_document.idx").exists()
    _, stderr = work(tmp_path, "out", [tmp_path / "a"], workers=2)
    assert "continuing after 2,000 documents" in stderr or "continuing after 1," in stderr
    assert made(tmp_path, "out") == made(tmp_path, "whole") and left(tmp_path, "out") == []


def test_another_output_that_begins_alike_is_left_alone(tmp_path, small):
    """A finished run removes the parts of ranks of its own output; another's may be hours of work."""
    corpus(tmp_path / "a", 50)
    names = ("{}_text_document.part00001.bin.tmp", "{}.part00001.progress")
    for name in names:
        for output in ("out", "out-b"):
            (tmp_path / name.format(output)).touch()
    work(tmp_path, "out", [tmp_path / "a"], workers=1)
    assert left(tmp_path, "out") == sorted(name.format("out-b") for name in names)


def test_many_small_inputs(tmp_path, small, monkeypatch):
    """What is noted of each piece does not grow with the number of inputs."""
    for n in range(300):
        corpus(tmp_path / f"in-{n:03}", 3, seed=n)
    longest = []
    real = journal.Journal.note
    monkeypatch.setattr(
        journal.Journal, "note", lambda self, state: (longest.append(len(json.dumps(state))), real(self, state))
    )
    work(tmp_path, "out", sorted(tmp_path.glob("in-*")), workers=2)
    assert len(Indexed(tmp_path / "out_text_document")) == 900
    assert max(longest) < 300


def test_a_journal_stays_small(tmp_path, monkeypatch):
    """And whatever a kill leaves of it, its last whole line is true."""
    monkeypatch.setattr(journal, "LONGEST", 500)
    path, belongs = tmp_path / "x.progress", {"a": 1}
    with journal.Journal(str(path), belongs, io.StringIO()) as one:
        for n in range(200):
            one.note({"n": n})
            assert path.stat().st_size < 600
    for cut in range(1, 40):
        content = path.read_bytes()
        path.write_bytes(content[:-1] if cut > 1 else content)
        with journal.Journal(str(path), belongs, io.StringIO()) as again:
            assert again.state is None or 150 < again.state["n"] < 200
            if again.state is None:
                break


def test_a_stream_cut_short(tmp_path, small):
    """Stops by default; kept to its last whole line with --on-error skip, and counted."""
    corpus(tmp_path / "a")
    corpus(tmp_path / "b", 50, seed=1)
    whole = (tmp_path / "a").read_bytes()
    packed = subprocess.run(["gzip", "-c"], input=whole, capture_output=True, check=True).stdout
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    for workers in (1, 3):
        with pytest.raises(UserError, match=r"cut.gz is cut short or damaged \(Compressed file ended.*on-error skip"):
            work(tmp_path, "out", [tmp_path / "cut.gz", tmp_path / "b"], workers=workers)
        _, stderr = work(tmp_path, "out", [tmp_path / "cut.gz", tmp_path / "b"], workers=workers, on_error="skip")
        assert "left out 1 bad lines: 1 input cut short, first " in stderr
        got = made(tmp_path, "out")[0]
        tail = made_of(tmp_path, "b")
        assert got.endswith(tail) and len(got) > len(tail) and made_of(tmp_path, "a").startswith(got[: -len(tail)])


def made_of(tmp_path, name):
    work(tmp_path, f"only-{name}", [tmp_path / name], workers=1)
    return made(tmp_path, f"only-{name}")[0]


SLOW = SMALL.replace(
    "from meshwright.__main__",
    """import time
from meshwright.data.prepare import encoding
real = encoding.Encoder.__call__
encoding.Encoder.__call__ = lambda *given: (time.sleep(0.005), real(*given))[1]
from meshwright.__main__""",
)


def start(tmp_path, *flags, program=SMALL, **more):
    command = [sys.executable, "-c", program, "preprocess", "--tokenizer-type", "ByteTokenizer", "--append-eod", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **more}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes)


def noted(tmp_path):
    path = tmp_path / "out.progress"
    return path.stat().st_size if path.exists() else 0


@pytest.mark.whole
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_bytes(tmp_path, packed):
    """kill -9 of all its processes at seeded moments; no .idx beside an incomplete .bin, ever."""
    corpus(tmp_path / "in.jsonl", 6000)
    name = "in.jsonl"
    if packed:
        subprocess.run(["gzip", str(tmp_path / "in.jsonl")], check=True)
        name += ".gz"
    flags = ["--input", name, "--workers", "2", "--output-prefix"]
    assert start(tmp_path, *flags, "whole").communicate() and made(tmp_path, "whole")
    rng, resumed, idx = random.Random(7 + packed), 0, tmp_path / "out_text_document.idx"
    for _ in range(2):
        idx.unlink(missing_ok=True)
        for _ in range(5):
            size = noted(tmp_path) + rng.randrange(200, 8000)  # bytes: a piece is about 130
            process = start(tmp_path, *flags, "out", program=SLOW)
            while process.poll() is None and noted(tmp_path) < size:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.01))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _, stderr = process.communicate()
            resumed += "continuing after" in stderr
            assert not idx.exists() or made(tmp_path, "out") == made(tmp_path, "whole")
        process = start(tmp_path, *flags, "out")
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr
        resumed += "continuing after" in stderr
        assert made(tmp_path, "out") == made(tmp_path, "whole")
        assert left(tmp_path, "out") == []
    assert resumed >= 6


@pytest.mark.whole
def test_a_worker_that_is_killed_is_told_and_the_rest_goes_on(tmp_path):
    corpus(tmp_path / "in.jsonl", 3000)
    flags = ["--input", "in.jsonl", "--output-prefix", "out", "--workers", "2"]
    process = start(tmp_path, *flags, program=SLOW.replace("0.005", "0.05"))
    time.sleep(1.0)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == HANG
    assert "a worker process was ended by signal 9" in stderr and "Traceback" not in stderr
    assert left(tmp_path, "out") and not (tmp_path / "out_text_document.idx").exists()
    process = start(tmp_path, *flags)
    _, stderr = process.communicate()
    assert process.returncode == 0 and "continuing after" in stderr
    work(tmp_path, "whole", [tmp_path / "in.jsonl"], workers=1)
    assert made(tmp_path, "out") == made(tmp_path, "whole")


@pytest.mark.whole
def test_ranks_share_the_input_and_make_the_same_files(tmp_path):
    """Three processes as a launcher starts them, on files and a stream; then one of them is killed, and all start again."""
    corpus(tmp_path / "a.jsonl", bad=0.02)
    corpus(tmp_path / "b.jsonl", 900, seed=1)
    subprocess.run(["gzip", str(tmp_path / "b.jsonl")], check=True)
    flags = [
        "--input",
        "a.jsonl",
        "b.jsonl.gz",
        "a.jsonl",
        "--json-keys",
        "text",
        "title",
        "--on-error",
        "skip",
        "--workers",
        "2",
    ]
    process = start(tmp_path, *flags, "--output-prefix", "whole")
    alone = process.communicate()
    assert process.returncode == 0, alone
    port = str(random.randrange(20000, 40000))

    def together(output):
        common = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        flags_of = [*flags, "--output-prefix", output]
        ranks = [start(tmp_path, *flags_of, RANK=str(n), LOCAL_RANK=str(n), **common) for n in range(3)]
        told = [rank.communicate(timeout=60) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0, 0], told
        return told

    told = together("ranks")
    assert made(tmp_path, "ranks", "text", "title") == made(tmp_path, "whole", "text", "title")
    assert left(tmp_path, "ranks") == []
    assert told[1][0] == told[2][0] == "" and told[0][0].splitlines()[-1] == alone[0].splitlines()[-1].replace(
        "whole", "ranks"
    )
    assert told[0][1].splitlines()[-1] == alone[1].splitlines()[-1]  # how many bad lines, and the first of each kind


def test_two_writers_of_one_output(tmp_path, small):
    corpus(tmp_path / "a", 10)
    with journal.Journal(str(tmp_path / "out.progress"), {}, io.StringIO()):
        with pytest.raises(UserError, match="another process is writing") as caught:
            work(tmp_path, "out", [tmp_path / "a"])
        assert caught.value.status == LOCKED


def test_an_interrupted_run_of_another_command_is_not_gone_on_with(tmp_path, small, monkeypatch):
    corpus(tmp_path / "a")

    def interrupted(**settings):
        calls = iter(range(100))

        def fail(*args, real=crew.write):
            real(*args)
            if next(calls) == 20:
                raise UserError("full", IO)

        with monkeypatch.context() as patched:
            patched.setattr(crew, "write", fail)
            with pytest.raises(UserError, match="full"):
                work(tmp_path, "out", [tmp_path / "a"], workers=1, **settings)
        assert left(tmp_path, "out")

    work(tmp_path, "whole", [tmp_path / "a"], workers=1)
    interrupted()
    _, stderr = work(tmp_path, "out", [tmp_path / "a"], workers=1)
    assert "continuing after" in stderr and made(tmp_path, "out") == made(tmp_path, "whole")
    interrupted(json_keys=["text", "title"])
    _, stderr = work(tmp_path, "out", [tmp_path / "a"], workers=1)
    assert "is of another command" in stderr and made(tmp_path, "out") == made(tmp_path, "whole")
    interrupted()
    with open(tmp_path / "a", "a") as file:
        file.write("\n" + json.dumps({"text": "one more", "title": ""}))
    _, stderr = work(tmp_path, "out", [tmp_path / "a"], workers=1)
    assert "its input has changed" in stderr and len(Indexed(tmp_path / "out_text_document")) == 2001
    interrupted()
    (tmp_path / "out_text_document.bin.tmp").write_bytes(b"")
    _, stderr = work(tmp_path, "out", [tmp_path / "a"], workers=1)
    assert "going on" not in stderr and len(Indexed(tmp_path / "out_text_document")) == 2001


@pytest.mark.whole
def test_ranks_that_are_not_alike_are_refused(tmp_path):
    """Another flag, another input; and one whose input is missing ends the other in words too."""
    corpus(tmp_path / "a.jsonl", 300)
    corpus(tmp_path / "b.jsonl", 310)
    for n, (own, words, status) in enumerate(
        [
            (
                ["--input", "a.jsonl", "--json-keys", "text", "title"],
                '--json-keys: ["text"] on rank 0, ["text", "title"]',
                2,
            ),
            (["--input", "b.jsonl"], "--input 1: ", 2),
            (["--input", "nowhere"], "--input nowhere does not exist", BAD_DATA),
        ]
    ):
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randrange(20000, 40000))}
        flags = [["--input", "a.jsonl"], own]
        ranks = [start(tmp_path, *flags[k], "--output-prefix", f"out{n}", RANK=str(k), **common) for k in range(2)]
        told = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [status, status], told
        assert words in told[0] + told[1] and "Traceback" not in told[0] + told[1]


def test_an_input_that_changes_while_it_is_read(tmp_path, small, monkeypatch):
    corpus(tmp_path / "a")
    real = crew.write

    def write(*given):
        real(*given)
        with open(tmp_path / "a", "a") as file:
            file.write("\n")

    monkeypatch.setattr(crew, "write", write)
    with pytest.raises(
        UserError, match=r"/a has changed while it was read \([\d,]+ bytes then, [\d,]+ now\)"
    ) as caught:
        work(tmp_path, "out", [tmp_path / "a"], workers=1)
    assert caught.value.status == BAD_DATA and left(tmp_path, "out") == []


def test_closed_streams(tmp_path):
    """By who started it: no traceback."""
    corpus(tmp_path / "a", 10)
    command = (
        f"{sys.executable} -m meshwright preprocess --tokenizer-type ByteTokenizer --output-prefix out --input a >&-"
    )
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out_text_document.idx").exists()


def test_no_key(tmp_path):
    from meshwright.settings.checks import problems

    config = PreprocessConfig(Preprocess(input=["x"], output_prefix="y", json_keys=[]))
    assert problems(config) == ["--json-keys names no key"]
