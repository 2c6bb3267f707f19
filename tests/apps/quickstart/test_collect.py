"""What is held out, how long documents are cut, and what is too little."""

import json
import random
import re

import pytest
import zstandard

from helpers import error_of
from meshwright.apps.quickstart import collect
from meshwright.apps.quickstart.collect import InputDocuments
from meshwright.apps.quickstart.start import open_texts
from meshwright.base.errors import BAD_DATA, UserError
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import limits


def documents_of(path, limit=1e9, **given):
    return InputDocuments(TextInputs(input=[str(path)], **given), limit)


def words(number, seed=0):
    chance = random.Random(seed)
    return "".join(
        "abcdefgh"[chance.randrange(8)] * chance.randrange(1, 5) + " " for _ in range(number)
    )


def sides(folder):
    return [
        [json.loads(x)["text"] for x in (folder / f"{n}.jsonl").read_text().splitlines()]
        for n in ("train", "held_out")
    ]


def test_one_twentieth_is_held_out_and_never_trained_on(tmp_path):
    texts = [words(100, seed) for seed in range(1000)]
    facts = collect.collect(texts, tmp_path)
    train, held_out = sides(tmp_path)
    assert sorted(train + held_out) == sorted(texts) and 20 < len(held_out) < 90
    assert facts.documents == 1000 and facts.wide == 0
    assert (facts.train_parts, facts.held_out_parts) == (
        len(train),
        len(held_out),
    ) and "cut" not in facts.describe()
    assert (facts.train_bytes, facts.held_out_bytes) == tuple(
        sum(map(len, side)) for side in (train, held_out)
    )
    before = held_out
    collect.collect(reversed(texts), tmp_path)
    assert sorted(sides(tmp_path)[1]) == sorted(before)  # depends on the text alone


def test_one_long_document_is_cut_at_paragraphs(tmp_path):
    long = "\n\n".join(words(50, seed) for seed in range(2000))
    facts = collect.collect([long], tmp_path)
    train, held_out = sides(tmp_path)
    assert 0.04 < len("".join(held_out)) / len(long) < 0.07 and all(
        part.endswith(" \n\n") for part in train[:-1]
    )
    assert len("".join(train + held_out)) == len(long)
    parts = len(train) + len(held_out)
    assert facts.describe().startswith(
        f"1 document, cut into {parts} parts: {len(train)} to learn from ("
    )


@pytest.mark.parametrize("seed", range(5))
def test_some_of_a_large_text_in_few_parts_is_held_out(tmp_path, monkeypatch, seed):
    """Two hundred large parts, of which two in a thousand are to be held out."""
    monkeypatch.setattr(collect, "LONGEST_PART", 400)
    facts = collect.collect(
        [words(130, 1000 * seed + n) for n in range(200)], tmp_path, expected=1e8
    )
    assert 1 <= facts.held_out_parts < 4 and len(sides(tmp_path)[1]) == facts.held_out_parts


def test_a_large_text_has_a_sample_for_the_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "SAMPLE_BYTES", 20_000)
    facts = collect.collect([words(100, seed) for seed in range(1000)], tmp_path)
    assert facts.sample == str(tmp_path / "sample.jsonl")
    sample = {json.loads(x)["text"] for x in (tmp_path / "sample.jsonl").read_text().splitlines()}
    assert 10_000 < sum(map(len, sample)) < 40_000 and sample <= set(sides(tmp_path)[0])


def test_too_little_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="too few to learn from; give at least 20,000") as caught:
        collect.collect([words(1000)], tmp_path)
    assert caught.value.status == BAD_DATA


def test_a_short_time_leaves_enough_of_a_large_text(tmp_path):
    """However few minutes are given, the text is not refused as too little."""
    (tmp_path / "a.txt").write_text("\n".join(words(20, n) for n in range(5000)))
    texts = TextInputs(input=[str(tmp_path / "a.txt")])
    documents = open_texts(texts, minutes=1e-6, device="cpu")
    facts = collect.collect(documents, tmp_path)
    assert documents.is_sample and facts.train_bytes > collect.LEAST_BYTES


@pytest.mark.parametrize("name", ["one.txt", "one.txt.zst", "two/long.jsonl"])
def test_a_document_larger_than_the_limit_is_cut(tmp_path, monkeypatch, name):
    """Parts of it are drawn, from everywhere in it, whether it is the only one or not."""
    monkeypatch.setattr(limits, "PIECE", 1 << 16)
    text = "".join(f"{n} {words(20, n)}\n" for n in range(5000))
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    content = json.dumps({"text": text}) if name.endswith(".jsonl") else text
    file.write_bytes(
        zstandard.compress(content.encode()) if name.endswith(".zst") else content.encode()
    )
    if file.parent != tmp_path:
        (file.parent / "short.md").write_text("short")
    limit = min(len(text), file.stat().st_size) // 5
    documents = documents_of(file if file.parent == tmp_path else file.parent, limit)
    drawn = list(documents)
    assert documents.is_sample and 0.5 * limit < sum(map(len, drawn)) < 1.6 * limit
    numbers = [int(n) for part in drawn for n in re.findall(r"\d+", part)]
    assert min(numbers) < 1000 and max(numbers) > 4000
    assert len(set(drawn)) == len(drawn) and all(part in text + "short" for part in drawn)


def test_an_earlier_quickstart_in_the_folder_is_no_text(tmp_path):
    for name in ("a.txt", "x-model/.meshwright-quickstart", "x-model/train.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}')
    assert list(documents_of(tmp_path)) == ["a"]


def test_text_that_is_not_utf8_is_the_reason(tmp_path):
    """Of a named text at once, of a folder and of lines once nothing is left; never "0 bytes"."""
    novel = ("话说天下大势，分久必合。\n" * 5000).encode("gb18030")
    (tmp_path / "a.txt").write_bytes(novel)
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "' + "天下".encode("gb18030") + b'"}\n')
    for path, reason in (
        ("a.txt", "); it looks like gb18030, which --encoding gb18030 reads"),
        ("", "holds no text; left out 1 bad line: 1 not UTF-8, first "),
        ("b.jsonl", "b.jsonl holds no text; left out 1 bad line: 1 not UTF-8, first "),
    ):
        message = error_of(lambda path=path: list(documents_of(tmp_path / path)))
        assert reason in message and (path or "passed over 1 file: 1 not UTF-8" in message)
    assert list(documents_of(tmp_path / "a.txt", encoding="gb18030")) == [novel.decode("gb18030")]
    (tmp_path / "a.txt").write_bytes("话\n".encode() + b"\xe9\n")
    documents = documents_of(tmp_path / "a.txt", on_error="skip")
    assert list(documents) == ["话\n"] and documents.left_out() == [
        f"left out 1 bad line: 1 not UTF-8, first {tmp_path / 'a.txt'}:2"
    ]


def test_a_text_of_equal_parts_is_refused(tmp_path):
    """Parts with the same text are all on one side."""
    with pytest.raises(
        UserError,
        match="all parts of the text are the same, so none can be held out; give other text",
    ):
        collect.collect(["a\n" * 100_000], tmp_path)
