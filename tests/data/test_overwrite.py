"""Commands that are run again: the same ones change nothing, others never replace in silence."""

import gzip
import json
import shlex
from pathlib import Path

import pytest

from meshwright.__main__ import main
from meshwright.base.errors import LOCKED, SIGINT
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer
from meshwright.data.text import inputs

SHORT = ["one text", "another text"]
LONG = [f"text number {n}" for n in range(20)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("short.jsonl", SHORT)
    write("long.jsonl", LONG)
    return tmp_path


def write(name, texts):
    Path(name).write_text(
        "".join(json.dumps({"text": text, "title": "t"}) + "\n" for text in texts)
    )


def call(capsys, *words):
    capsys.readouterr()
    return main(list(words)), *capsys.readouterr()


def preprocess(capsys, name, *more):
    words = f"preprocess --input {name} --output-prefix out --tokenizer byte".split()
    return call(capsys, *words, *more)


def files(folder="."):
    """Return the content and the time of each file under a folder."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_dry_run_says_what_would_become_of_the_output(here, capsys):
    status, out, _ = preprocess(capsys, "long.jsonl", "--dry-run")
    assert (
        status == 0
        and out.endswith("would write out_text_document.bin/.idx\n")
        and not list(here.glob("out*"))
    )
    assert preprocess(capsys, "long.jsonl")[0] == 0
    before = files()
    status, out, _ = preprocess(capsys, "long.jsonl", "--dry-run")
    assert (
        status == 0
        and "out_text_document.bin/.idx is already there, unchanged" in out
        and "would write" not in out
    )
    status, _, err = preprocess(capsys, "short.jsonl", "--dry-run")
    assert status == LOCKED
    assert (
        "made with other inputs (long.jsonl then, short.jsonl now): they are kept; add --overwrite to replace them, "
        "as Megatron's tools do unasked, or choose another --output-prefix" in err
    )
    assert (
        "would write" in preprocess(capsys, "short.jsonl", "--dry-run", "--overwrite")[1]
        and files() == before
    )


def test_the_next_command_reads_the_same_text(here, capsys):
    Path("my text").mkdir()
    Path("my text/a.css").write_text("a\n---\nb\n---\n")
    Path("my text/b.css").write_text("no")
    flags = ["--include", "*.css", "--exclude", "b.*", "--document-separator=---"]
    train = ["train-tokenizer", "--input", "my text", *flags]
    train += ["--vocab-size", "257", "--output", "vocabulary"]
    status, _, err = call(capsys, *train)
    assert status == 0
    following = shlex.split(err.splitlines()[-1].removeprefix("next: meshwright "))
    assert call(capsys, *following)[0] == 0 and len(Indexed("PREFIX_text_document")) == 2


@pytest.mark.flag("preprocess.overwrite")
def test_preprocess_replaces_other_data_only_with_overwrite(here, capsys):
    assert preprocess(capsys, "long.jsonl")[0] == 0
    before = files()
    for name, more, words in (
        (
            "short.jsonl",
            [],
            "made with other inputs (long.jsonl then, short.jsonl now): they are kept; add --overwrite",
        ),
        ("long.jsonl", ["--append-eod"], "made with other settings (--append-eod): they"),
        (
            "short.jsonl",
            ["--json-keys", "text", "title"],
            "made with other inputs (long.jsonl then, short.jsonl now) and settings",
        ),
    ):
        status, _, err = preprocess(capsys, name, *more)
        assert (
            status == LOCKED
            and "out_text_document.bin and out_text_document.idx exist already, " in err
        )
        assert words in err and files() == before
    status, _, err = call(
        capsys,
        *"preprocess --input long.jsonl --output-prefix out --tokenizer-type NullTokenizer --vocab-size 9".split(),
    )
    assert status == LOCKED and "made with other tokenizer" in err and files() == before
    with Path("short.jsonl").open("ab") as file:  # a bad input never costs the old data
        file.write(b"{")
    assert (
        preprocess(capsys, "short.jsonl", "--overwrite")[0] == 65
        and len(Indexed("out_text_document")) == 20
    )
    write("short.jsonl", SHORT)
    assert (
        preprocess(capsys, "short.jsonl", "--overwrite")[0] == 0
        and len(Indexed("out_text_document")) == 2
    )
    assert "unchanged" in preprocess(capsys, "short.jsonl")[1]
    assert preprocess(capsys, "long.jsonl")[0] == LOCKED


def test_what_has_changed_is_named(here, capsys):
    assert preprocess(capsys, "long.jsonl")[0] == 0
    write("long.jsonl", SHORT)
    assert (
        "inputs (of the same names, but changed): they are kept"
        in preprocess(capsys, "long.jsonl")[2]
    )
    Path("texts").mkdir()
    for n in range(5):
        Path(f"texts/{n}.txt").write_text("text")
    err = preprocess(capsys, "texts")[2]
    assert "inputs (long.jsonl then, 5 files, 0.txt 1.txt 2.txt ... now): they are kept" in err
    assert preprocess(capsys, "texts", "--overwrite")[0] == 0
    Path("texts/4.txt").rename("texts/5.txt")
    assert "inputs (others of the same first names): they" in preprocess(capsys, "texts")[2]
    record = Path("out_text_document.origin.json")
    for damage in ('{"files": "x", "first": 3}', '{"files": 2, "first": [1, 2]}', '"0"'):
        known = json.loads(record.read_text())
        known["made_from"]["inputs"] = json.loads(damage)
        record.write_text(json.dumps(known))
        assert preprocess(capsys, "texts")[0] == LOCKED


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("a.txt", "plain text"),
        ("a.txt.gz", "plain text and CSV"),
        ("a.csv", "CSV"),
        ("a.jsonl", ""),
    ],
)
def test_what_an_earlier_release_read_otherwise_is_not_called_unchanged(
    here, capsys, monkeypatch, name, kinds
):
    """Neither tokens nor a vocabulary; a reader that has not changed since is not in the record."""
    content = b'{"text": "one"}\n' if name == "a.jsonl" else b"text\none\n"
    Path(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    words = [name, "--workers", "1"]
    train = ["train-tokenizer", "--input", name, "--output", "vocabulary", "--vocab-size", "260"]
    with monkeypatch.context() as patched:
        patched.setattr(inputs.Inputs, "readers", {})  # as 0.17.0 wrote the records
        assert preprocess(capsys, *words)[0] == call(capsys, *train)[0] == 0
    said = f"(the same files, but another release read {kinds} in another way): they are kept; add --overwrite"
    for status, _, err in (preprocess(capsys, *words), call(capsys, *train)):
        assert (status, said in err) == ((LOCKED, True) if kinds else (0, False))
    assert (
        preprocess(capsys, *words, "--overwrite")[0] == call(capsys, *train, "--overwrite")[0] == 0
    )
    assert "unchanged" in preprocess(capsys, *words)[1] and "unchanged" in call(capsys, *train)[1]


def test_data_of_other_programs_are_never_replaced_in_silence(here, capsys):
    with Writer("out_text_document", "uint16") as writer:
        writer.add([1, 2, 3])
        writer.end_document()
    before = files()
    status, _, err = preprocess(capsys, "long.jsonl")
    assert status == LOCKED and "nothing says how they were made" in err and files() == before
    # The record of data that another program has replaced since says nothing about the new ones.
    assert preprocess(capsys, "long.jsonl", "--overwrite")[0] == 0
    Path("out_text_document.bin").write_bytes(bytes(2))
    assert preprocess(capsys, "long.jsonl")[0] == LOCKED


@pytest.mark.fault("F23")
def test_a_kill_between_two_pairs_goes_on(here, capsys, monkeypatch):
    """One of the two pairs has its name already: the same command still goes on."""
    finish, calls = Writer.finish, iter(range(9))

    def kill(writer):
        if next(calls) == 1:
            raise KeyboardInterrupt
        finish(writer)

    monkeypatch.setattr(Writer, "finish", kill)
    keys = ["--json-keys", "text", "title"]
    assert preprocess(capsys, "long.jsonl", *keys)[0] == SIGINT
    assert Path("out_text_document.idx").exists() and not Path("out_title_document.idx").exists()
    monkeypatch.setattr(Writer, "finish", finish)
    assert preprocess(capsys, "short.jsonl", *keys)[0] == LOCKED
    assert preprocess(capsys, "long.jsonl", *keys)[0] == 0
    assert len(Indexed("out_text_document")) == len(Indexed("out_title_document")) == 20
    assert "unchanged" in preprocess(capsys, "long.jsonl", *keys)[1]


@pytest.mark.fault("F23")
def test_a_kill_while_data_are_replaced_leaves_no_mixture(here, capsys, monkeypatch):
    """No old data stand beside the new tokenizer, and the same command goes on."""
    assert preprocess(capsys, "short.jsonl")[0] == 0

    def kill(writer):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "finish", kill)
        assert preprocess(capsys, "long.jsonl", "--overwrite")[0] == SIGINT
    assert not Path("out_text_document.idx").exists()
    assert preprocess(capsys, "long.jsonl")[0] == 0 and len(Indexed("out_text_document")) == 20
    Path("out_text_document.idx").unlink()  # as after a kill between the two files
    assert preprocess(capsys, "long.jsonl")[0] == 0 and len(Indexed("out_text_document")) == 20


def test_output_within_the_folder_of_the_text_is_not_read(here, capsys):
    """`--input .` twice: vocabularies, token files and their records are no text."""
    Path("prose.txt").write_text("one text")
    train = "train-tokenizer --input . --output vocabulary --vocab-size 260".split()
    words = "preprocess --input . --output-prefix out --tokenizer vocabulary".split()
    assert call(capsys, *train)[0] == 0
    assert call(capsys, *words)[0] == 0 and len(Indexed("out_text_document")) == 23
    assert "unchanged" in call(capsys, *words)[1] and "unchanged" in call(capsys, *train)[1]


def test_a_vocabulary_is_never_replaced_in_silence(here, capsys):
    train = ["train-tokenizer", "--input", "long.jsonl", "--output", "vocabulary", "--vocab-size"]
    status, _, err = call(capsys, *train, "260")
    following = "next: meshwright preprocess --input long.jsonl --tokenizer vocabulary --append-eod --output-prefix PREFIX"
    assert status == 0 and following in err
    before = files("vocabulary")
    assert sorted(before) == [
        f"vocabulary/{name}" for name in ("merges.txt", "vocab.json", "vocab.origin.json")
    ]
    status, out, _ = call(capsys, *train, "260")
    assert (
        status == 0
        and "vocabulary/vocab.json and vocabulary/merges.txt are already there, unchanged" in out
    )
    status, _, err = call(capsys, *train, "261")
    assert (
        status == LOCKED
        and "made with other settings (--vocab-size): they are kept; add --overwrite" in err
    )
    assert files("vocabulary") == before
    assert (
        call(capsys, *train, "261", "--overwrite")[0] == 0
        and "unchanged" in call(capsys, *train, "261")[1]
    )
    Path("vocabulary/vocab.origin.json").unlink()
    Path("vocabulary/merges.txt").unlink()
    status, _, err = call(capsys, *train, "261")
    assert status == LOCKED and "vocabulary/vocab.json exists already, and nothing says" in err


@pytest.mark.flag("merging.overwrite")
def test_data_merge_replaces_other_data_only_with_overwrite(here, capsys):
    for name in ("a", "b"):
        with Writer(name, "uint16") as writer:
            writer.add([ord(name)] * 5)
            writer.end_document()
    merge = ["data", "merge", "--output-prefix", "m"]
    assert call(capsys, *merge, "a", "b")[0] == 0
    before = files()
    status, out, _ = call(capsys, *merge, "a", "b")
    assert status == 0 and out == "m.bin/.idx is already there, unchanged\n" and files() == before
    status, _, err = call(capsys, *merge, "b", "a")
    assert (
        status == LOCKED
        and "m.bin and m.idx exist already, made with other inputs" in err
        and files() == before
    )
    assert call(capsys, *merge, "b", "a", "--overwrite")[0] == 0
    assert Path("m.bin").read_bytes() == Path("b.bin").read_bytes() + Path("a.bin").read_bytes()
