"""`meshwright data dedup`: a brute-force reference, files, and mistakes."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import resource
import shlex
import sys
from pathlib import Path

import pytest
from corpora import run_data

from meshwright.apps.datasets import dedup
from meshwright.apps.datasets.dedup import Similarity
from meshwright.base.errors import BAD_DATA, DONE, LOCKED


def write(path: Path, texts: list[str]) -> str:
    lines = [
        json.dumps({"id": n, "text": text}, ensure_ascii=False) for n, text in enumerate(texts)
    ]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def read(path: Path) -> list[int]:
    return [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()]


def make_texts(families: int, seed: int) -> list[str]:
    """Return texts of which some are changed copies of others, in several alphabets."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgh中文字符éß ", k=rng.randint(2, 7))) for _ in range(400)]
    out = []
    for _ in range(families):
        text = rng.choices(words, k=rng.randint(15, 60))
        for share in rng.choices([0, 0.02, 0.05, 0.1, 0.2, 0.5], k=rng.randint(1, 4)):
            out.append(
                " ".join(rng.choice(words) if rng.random() < share else word for word in text)
            )
    rng.shuffle(out)
    return out


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "OPEN_FILES", 4)
    paths = [tmp_path / f"{n}.jsonl" for n in range(60)]
    for n, path in enumerate(paths):
        path.write_text(json.dumps({"text": f"{n % 30} " * 9}) + "\n")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 20, limits[1])
    )
    try:
        dedup.deduplicate(list(map(str, paths)), str(tmp_path / "out"), Similarity())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (tmp_path / "out").read_text() == "".join(path.read_text() for path in paths[:30])


def pieces(text: str, size: int) -> set[str]:
    return {text[i : i + size] for i in range(max(len(text) - size + 1, 1))}


def reference(texts: list[str], rule: Similarity) -> dict[int, tuple[int, float]]:
    """Compare every document with every earlier one that is kept."""
    sets = [pieces(text, rule.shingle) for text in texts]
    kept: list[int] = []
    out = {}
    for i, mine in enumerate(sets):
        indices = [(j, len(mine & sets[j]) / len(mine | sets[j])) for j in kept]
        found = next(((j, index) for j, index in indices if index >= rule.threshold), None)
        if found:
            out[i] = found
        else:
            kept.append(i)
    return out


@pytest.mark.flag("threshold shingle num_seeds num_bands deduplication.seed")
@pytest.mark.parametrize("threshold, shingle, bands", [(0.7, 5, 20), (0.4, 3, 100), (1, 8, 10)])
def test_removes_what_comparing_all_pairs_removes(
    tmp_path: Path, threshold: float, shingle: int, bands: int
) -> None:
    rule = Similarity(threshold=threshold, shingle=shingle, bands=bands)
    texts = [*make_texts(40, 5), "", "ab", "ab", "", "abc", "数据", "数据"]
    expected = reference(texts, rule)
    assert 10 < len(expected) < len(texts) - 10
    found = dedup.deduplicate(
        [write(tmp_path / "in.jsonl", texts)], str(tmp_path / "out.jsonl"), rule
    )
    assert found.removed == expected and found.documents == len(texts)
    assert read(tmp_path / "out.jsonl") == [i for i in range(len(texts)) if i not in expected]


@pytest.mark.flag("inputs deduplication.output_file removed_file json_key deduplication.overwrite")
def test_files_and_their_lines(tmp_path: Path) -> None:
    """Lines are kept byte for byte, in the order of the files; bad ones are counted."""
    text = "a text that is long enough to be compared with others, one piece after the other"
    first = b'\xef\xbb\xbf{"text": "%b", "n": 1e400}\r\n\n{"text": 5}\nnot json\n' % text.encode()
    (tmp_path / "a.jsonl").write_bytes(first + b'{ "text" : "quite another one, with \\u00e9" }')
    (tmp_path / "b.jsonl").write_bytes(
        b'{"text": "%b", "url": "copy"}\n' % text.replace("one", "a").encode()
    )
    (tmp_path / "empty.jsonl").touch()
    given = [str(tmp_path / name) for name in ("a.jsonl", "empty.jsonl", "b.jsonl")]
    out, removed = tmp_path / "new/out.jsonl", tmp_path / "removed.jsonl"
    again = [*given, "--output-file", str(out), "--removed-file", str(removed)]
    status, told, err = run_data("dedup", *again)
    assert (
        status == DONE
        and "kept 2 of 3 documents" in told
        and "0 with the same pieces" in told
        and "1 similar" in told
    )
    assert "left out 2 bad lines" in err and f"{given[0]}:3" in err and f"{given[0]}:4" in err
    lines = (
        b'{"text": "%b", "n": 1e400}\n{ "text" : "quite another one, with \\u00e9" }\n'
        % text.encode()
    )
    assert out.read_bytes() == lines
    (row,) = map(json.loads, removed.read_text().splitlines())
    index = len(pieces(text, 5) & pieces(text.replace("one", "a"), 5)) / len(
        pieces(text, 5) | pieces(text.replace("one", "a"), 5)
    )
    assert row == {"removed": f"{given[2]}:1", "kept": f"{given[0]}:1", "jaccard": round(index, 4)}
    assert "already there, unchanged" in run_data("dedup", *again)[1]
    status, _, err = run_data("dedup", *again, "--threshold", "0.99")
    assert status == LOCKED and "--overwrite" in err and out.read_bytes() == lines
    assert (
        run_data("dedup", *again, "--threshold", "0.99", "--overwrite")[0] == DONE
        and len(out.read_bytes().splitlines()) == 3
    )
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.jsonl"]


def test_a_packed_file_is_refused_with_the_command_that_unpacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    status, _, err = run_data("dedup", "a.jsonl.gz", "--output-file", "out")
    assert status == BAD_DATA and "lines are read more than once; unpack it: gunzip -k" in err


def test_the_command_that_takes_lines_from_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["some text", "another"], "n": [1, 2]}), "my table.parquet"
    )
    command = (
        run_data("dedup", "my table.parquet", "--output-file", "out")[2]
        .splitlines()[-1]
        .partition(": python ")[2]
    )
    words = shlex.split(command)
    assert words[-2:] == [">", "my table.jsonl"]
    monkeypatch.setattr(sys, "argv", words[1:-2])
    with Path(words[-1]).open("w") as lines, contextlib.redirect_stdout(lines):
        exec(words[1])
    assert run_data("dedup", "my table.jsonl", "--output-file", "out")[0] == DONE
    assert len(Path("out").read_text().splitlines()) == 2
