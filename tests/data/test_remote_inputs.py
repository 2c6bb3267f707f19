"""Texts in object storage give the documents of the same files on a disk."""

import gzip
import io
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from corpora import preprocess_inputs, texts_in

from helpers import captured_output, error_of
from meshwright.__main__ import main
from meshwright.base.errors import BAD_DATA, IO
from meshwright.base.storage import store, texts
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import reading, workers
from meshwright.data.text.inputs import Inputs, find_inputs
from s3 import Bucket, serving_bucket

pytest.importorskip("obstore")


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(
        json.dumps({"text": f"line {n} " + "é" * (n % 50)}).encode() + b"\n"
        for n in range(first, count)
    )


def zip_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


FILES = {
    "a.jsonl": lines(1_000),
    "b.jsonl.gz": gzip.compress(lines(600)),
    "deep/c.jsonl.zst": zstandard.compress(lines(500, 400)),
    "deep/d.txt": b"a text\r\nof two lines\n<|endoftext|>\nanother\n",
    "deep/e.csv": b"n,text\n1,one\n2,two\n",
    "deep/f.zip": zip_of({"x.txt": b"in an archive", "y.jsonl": lines(3)}),
    "deep/photo.png": b"\x89PNG\r\n\x1a\n\0\0\0",
    "deep/.hidden.txt": b"hidden",
    "deep/empty.txt": b"",
    "made/config.toml": b"x",
    "made/metrics.jsonl": lines(2),
}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    """Serve the files in a bucket, and write them to a disk."""
    monkeypatch.setattr(texts, "BLOCK", 8192)
    with serving_bucket(monkeypatch) as served:
        for name, content in FILES.items():
            served.objects[f"corpus/{name}"] = content
            path = tmp_path / "corpus" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield served


def documents(*inputs: str, **flags: list[str]) -> tuple[list[str], Inputs]:
    given = TextInputs(input=list(inputs), **flags)
    return list(reading.read_texts(given, found := find_inputs(given))), found


@pytest.mark.parametrize(
    "pattern",
    ["a.jsonl", "", "deep", "**/*.jsonl*", "d*", "?.jsonl", "deep/[c-e].*", "deep/f.zip"],
)
def test_documents_are_those_of_a_disk(bucket: Bucket, tmp_path: Path, pattern: str) -> None:
    ours, found = documents(f"s3://bucket/corpus/{pattern}")
    theirs, local = documents(f"{tmp_path}/corpus/{pattern}")
    assert ours == theirs and ours
    if pattern != "":
        assert {
            kind: n for kind, n in found.passed.counts.items() if "folders" not in kind
        } == local.passed.counts
    assert all(source.path.startswith("s3://bucket/corpus/") for source in found.inputs)


@pytest.mark.parametrize("fault", [503, "cut"])
def test_reads_that_fail_are_repeated(bucket: Bucket, tmp_path: Path, fault: int | str) -> None:
    rng = random.Random(0)
    bucket.faults = lambda method, key: fault if rng.random() < 0.3 else None
    assert documents("s3://bucket/corpus")[0] == documents(f"{tmp_path}/corpus")[0]


def test_preprocess_writes_the_same_token_files(bucket: Bucket, tmp_path: Path) -> None:
    preprocess_inputs(tmp_path / "b", tmp_path / "corpus", workers=1)
    printed = preprocess_inputs(tmp_path / "a", "s3://bucket/corpus", workers=1)
    for ending in ("bin", "idx"):
        name = f"text_document.{ending}"
        assert (tmp_path / f"a_{name}").read_bytes() == (tmp_path / f"b_{name}").read_bytes()
    assert workers.start_method() == "spawn"  # the library's threads would be missing in a fork
    assert "Opening s3://bucket/corpus: 6 files, 1 of them an archive (f.zip)" in printed[0]
    assert len(texts_in(tmp_path / "a_text_document")) > 1_000
    words = "preprocess --input s3://bucket/corpus --tokenizer byte --output-prefix".split()
    bucket.objects["corpus/deep/d.txt"] += b"more\n"
    with captured_output() as (_, err):
        assert main([*words, f"{tmp_path}/a"]) != 0
    assert "they are kept; add --overwrite" in " ".join(err)


def test_an_object_that_is_replaced_meanwhile_is_refused(bucket: Bucket) -> None:
    given = TextInputs(input=["s3://bucket/corpus/a.jsonl"])
    found = find_inputs(given)
    bucket.objects["corpus/a.jsonl"] = lines(1_000, 1)
    reason = error_of(lambda: list(reading.read_texts(given, found)), BAD_DATA)
    assert (
        reason
        == "s3://bucket/corpus/a.jsonl has changed while it was read; start again when it is complete"
    )


def test_what_cannot_be_read_is_named(bucket: Bucket) -> None:
    assert "no object has this name" in error_of(lambda: documents("s3://bucket/nothing"), BAD_DATA)
    bucket.objects["t.parquet"] = b"PAR1" + bytes(100) + b"PAR1"
    assert "copy it here first" in error_of(lambda: documents("s3://bucket/t.parquet"), BAD_DATA)
    bucket.objects["paper.pdf"] = b"%PDF-1.4"
    assert "pdftotext" in error_of(lambda: documents("s3://bucket/paper.pdf"), BAD_DATA)
    bucket.faults = lambda method, key: 403
    assert "the credentials may not do this" in error_of(
        lambda: documents("s3://bucket/corpus"), IO
    )


def test_other_commands_read_texts_in_storage(bucket: Bucket, tmp_path: Path) -> None:
    words = ["train-tokenizer", "--input", "s3://bucket/corpus/a.jsonl", "--vocab-size", "300"]
    assert main([*words, "--output", str(tmp_path / "tokenizer")]) == 0
    store.forget()
    with captured_output() as (out, _):
        assert main(["preprocess", "--dry-run", "--input", "s3://bucket/corpus/*.jsonl*"]) == 0
    assert "s3://bucket/corpus/a.jsonl" in " ".join(out)
