"""`meshwright data ...`: every verb on intact and on damaged files."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import struct
import subprocess
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import run_data, write_pair

import warm
from meshwright.__main__ import main
from meshwright.apps.datasets import forecast
from meshwright.base.errors import BAD_DATA, IO, UserError
from meshwright.config.schema import TokenizerFlags
from meshwright.data import ahead
from meshwright.data.files import merge, verify
from meshwright.data.files.indexed import HEADER, Indexed
from meshwright.data.statistics import document_lengths, summary, token_counts
from meshwright.data.text import limits
from meshwright.data.tokenizers import build_tokenizer, keep_beside

ROOT = Path(__file__).parents[2]
EOD = 256
TRAIN = (
    "--seq-length 16 --train-samples 400 --micro-batch-size 2 --global-batch-size 8 "
    "--eval-iters 2 --eval-interval 20"
).split()


def make_documents(
    count: int, seed: int = 0, eod: int | None = EOD, most: int = 3
) -> list[list[list[int]]]:
    """Return documents of 0 to `most` sequences of letters, each document with its end."""
    rng = np.random.RandomState(seed)
    out = []
    for _ in range(count):
        sequences = [
            rng.randint(97, 123, rng.randint(1, 40)).tolist()
            for _ in range(rng.randint(0, most + 1))
        ]
        if sequences and eod is not None:
            sequences[-1].append(eod)
        out.append(sequences)
    return out


def check(prefix: str) -> verify.Findings:
    return verify.check_pair(prefix, 257, EOD, True, lambda count: None)


def two_pairs(folder: Path) -> list[str]:
    return [write_pair(folder / name, make_documents(60, n)) for n, name in enumerate("ab", 1)]


# verify


@pytest.mark.flag("prefixes checksums")
def test_intact_files_and_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_pair(Path(name), make_documents(50, ord(name)))
    sums = str(tmp_path / "sums")
    status, out, _ = run_data(
        "verify", "a", "b", "--checksums", sums, "--tokenizer-type", "ByteTokenizer"
    )
    lines = out.splitlines()
    assert (
        status == 0
        and len(lines) == 3
        and all(": intact: 50 documents" in line for line in lines[:2])
    )
    assert "all of the documents end with 256" in lines[0]
    names = ("a.idx", "a.bin", "b.idx", "b.bin")
    expected = {f"{hashlib.sha256(Path(name).read_bytes()).hexdigest()}  {name}" for name in names}
    assert set(Path(sums).read_text().splitlines()) == expected
    assert run_data("verify", "a", "b", "--checksums", sums)[0] == 0  # compared now
    kept = Path("b.bin").read_bytes()
    # still an id of the vocabulary
    Path("b.bin").write_bytes(kept[:-4] + bytes([kept[-4] ^ 1]) + kept[-3:])
    status, out, err = run_data("verify", "a", "b", "--checksums", sums)
    assert (
        status == 65
        and "b.bin has the SHA-256" in out
        and "a: intact" in out
        and "1 problem, listed above" in err
    )


def test_several_problems_are_reported_together(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2, 3, EOD]], [[4, EOD]], [[5, 6, EOD]]])
    n = 3
    raw = bytearray(Path(f"{prefix}.idx").read_bytes())
    struct.pack_into("<q", raw, HEADER.size + 4 * n + 8, 2)  # the pointer of sequence 1
    struct.pack_into("<q", raw, HEADER.size + 12 * n + 8, 3)  # border 1, so that border 2 goes back
    Path(f"{prefix}.idx").write_bytes(raw)
    ids = np.fromfile(f"{prefix}.bin", np.uint16)
    ids[[1, 4]] = 300
    ids.tofile(f"{prefix}.bin")
    found = check(prefix)
    told = "\n".join(found.problems)
    assert len(found.problems) == 3, told
    assert "sequence 1 has a pointer that is not the sum" in told
    assert "document border 2 lies before" in told
    assert "2 ids are not in 0 ... 256, the tokenizer's; the first is 300 at token 1" in told


def test_uncounted_ends_of_documents_are_recognised(tmp_path: Path) -> None:
    """As Megatron-LM wrote in summer 2023: the end of document is in .bin, but in no length."""
    documents = [s for s in make_documents(60) if s]
    prefix = write_pair(tmp_path / "a", documents)
    write_pair(tmp_path / "b", [[*sequences[:-1], sequences[-1][:-1]] for sequences in documents])
    Path(tmp_path / "b.bin").write_bytes(Path(f"{prefix}.bin").read_bytes())
    for extra in ([], ["--tokenizer-type", "ByteTokenizer"]):
        status, out, _ = run_data("verify", str(tmp_path / "b"), *extra)
        assert (
            status == 65
            and f"the {len(documents)} end-of-document ids (256) are in .bin, but in no length"
            in out
        )
    ids = np.fromfile(tmp_path / "b.bin", np.uint16)
    ids[-1] = 5  # so many ids too many, but not all are ends
    ids.tofile(tmp_path / "b.bin")
    assert "cut short or belongs to other data" in run_data("verify", str(tmp_path / "b"))[1]


def test_share_of_documents_that_end(tmp_path: Path) -> None:
    a = write_pair(tmp_path / "a", [*[[[1, EOD]]] * 3, [[1, 2]]])
    status, out, err = run_data("verify", a, "--tokenizer-type", "ByteTokenizer")
    assert status == 0 and "75.00% of the documents end with 256" in out
    assert "1 of 4 documents do not end with 256" in err


def test_small_blocks_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of three elements, their borders are everywhere."""
    documents = [[], *make_documents(60, 5), [], []]
    prefix = write_pair(tmp_path / "a", documents)
    whole = check(prefix)
    lengths = Counter(sum(map(len, d)) for d in documents)
    monkeypatch.setattr("meshwright.base.files.BLOCK", 6)  # bytes, three tokens
    monkeypatch.setattr("meshwright.data.files.indexed.BLOCK", 3)
    monkeypatch.setattr("meshwright.data.statistics.SHORT", 20)
    assert check(prefix) == whole and not whole.problems
    counted = document_lengths(Indexed(prefix))
    assert dict(zip(*map(np.ndarray.tolist, counted), strict=True)) == dict(lengths)
    assert token_counts(Indexed(prefix)).sum() == len(Indexed(prefix).tokens)


# inspect


@pytest.mark.flag("prefix top inspection.json")
def test_counts_lengths_and_frequent_tokens(tmp_path: Path) -> None:
    documents = make_documents(100, 4)
    prefix = write_pair(tmp_path / "a", documents)
    lengths = sorted(sum(map(len, d)) for d in documents)
    tokens = Counter(i for d in documents for s in d for i in s)
    status, out, _ = run_data(
        "inspect", prefix, "--json", "--top", "5", "--tokenizer-type", "ByteTokenizer"
    )
    facts = json.loads(out)
    assert status == 0 and (facts["documents"], facts["tokens"]) == (100, sum(lengths))
    assert facts["sequences"] == sum(map(len, documents)) and facts["mean_length"] == pytest.approx(
        np.mean(lengths)
    )
    assert [facts["quantiles"][q] for q in ("0", "0.5", "0.95", "1")] == [
        lengths[k] for k in (0, 49, 94, 99)
    ]
    assert {(o["id"], o["count"]) for o in facts["most_frequent"]} == set(tokens.most_common(5))
    assert all(o["text"] == (chr(o["id"]) if o["id"] < 256 else "") for o in facts["most_frequent"])
    assert sum(count for *_, count in facts["histogram"]) == 100
    assert all(count == sum(a <= n <= b for n in lengths) for a, b, count in facts["histogram"])
    _, out, _ = run_data("inspect", prefix, "--top", "2")
    assert "100 documents" in out and out.count("#") > 30 and "most frequent of" in out
    assert "most_frequent" not in summary(Indexed(prefix), 0, None)


def test_inspect_may_lose_its_reader(tmp_path: Path) -> None:
    """`inspect | head` succeeds; a `verify` whose result was not read does not."""
    prefix = write_pair(tmp_path / "a", make_documents(20))
    for verb, status in (("inspect", 0), ("verify", 74)):
        end, pipe = os.pipe()
        os.close(end)
        done = subprocess.run([warm.programs() / "meshwright", "data", verb, prefix], stdout=pipe)
        os.close(pipe)
        assert done.returncode == status, verb


@pytest.mark.flag("inspection.picture")
def test_picture(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", make_documents(20))
    picture = tmp_path / "new" / "a.png"
    assert run_data("inspect", prefix, "--picture", str(picture))[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "--picture" in run_data("inspect", prefix, "--picture", "a.doc")[2]


@pytest.mark.flag("document")
def test_one_document(tmp_path: Path) -> None:
    documents = make_documents(20, 9)
    prefix = write_pair(tmp_path / "a", documents)
    number = max(range(20), key=lambda n: len(documents[n]))
    ids = [i for s in documents[number] for i in s]
    _, out, _ = run_data(
        "inspect", prefix, "--document", str(number), "--tokenizer-type", "ByteTokenizer"
    )
    assert out == bytes(i for i in ids if i < 256).decode() + "\n"
    facts = json.loads(run_data("inspect", prefix, "--document", str(number))[1])
    assert facts["ids"] == ids and facts["sequences"] == len(documents[number])
    status, _, err = run_data("inspect", prefix, "--document", "20")
    assert status == 65 and "has 20 documents, 0 to 19" in err


@pytest.mark.flag("sample sample_set")
def test_one_training_sample(tmp_path: Path) -> None:
    """Its ids are those of the training."""
    from meshwright.cli.data import InspectConfig
    from meshwright.config import flags
    from meshwright.data.datasets import build_datasets

    a, b = two_pairs(tmp_path)
    argv = ["--data-path", "3", a, "1", b, *TRAIN]
    config = flags.parse_settings(InspectConfig, [*argv, "--sample", "7"], "test").config
    with contextlib.redirect_stdout(io.StringIO()):
        expected = build_datasets(config, 257)
    for name in ("train", "valid"):
        status, out, _ = run_data("inspect", *argv, "--sample", "7", "--sample-set", name, "--json")
        facts = json.loads(out)
        dataset = expected[name]
        assert status == 0 and dataset is not None and facts["ids"] == dataset[7].tolist()
        assert sum(piece["tokens"] for piece in facts["pieces"]) == 17
    _, out, _ = run_data("inspect", a, "--sample", "3", *TRAIN, "--tokenizer-type", "ByteTokenizer")
    assert out.startswith("sample 3 of train: 17 tokens") and "--- " in out
    assert "both name the data" in run_data("inspect", a, "--sample", "3", *argv)[2]
    _, _, err = run_data("inspect", *argv, "--sample", "7", "--sample-set", "other")
    assert "there is no such set; there are train" in err


@pytest.mark.parametrize("how", ["one pair", "blend", "cyclic", "chain", "random"])
def test_stretches_are_at_their_reported_places(tmp_path: Path, how: str) -> None:
    """In every kind of data set, a stretch's tokens follow one another at its place in the file."""
    from meshwright.data.blend import Blend, Chain, Remainder
    from meshwright.data.loader import Cyclic, Mock, Samples

    prefixes = [
        write_pair(tmp_path / name, [[], *make_documents(30, n), []]) for n, name in enumerate("ab")
    ]
    a, b = (Samples(Indexed(prefix), range(len(Indexed(prefix))), 60, 64, 5) for prefix in prefixes)
    kinds: dict[str, Any] = {
        "one pair": a,
        "blend": Blend([a, Remainder(b, 3)], [0.6, 0.4], 50),
        "cyclic": Cyclic(b),
    }
    dataset = {**kinds, "chain": Chain([a, Remainder(b, 7)]), "random": Mock(9, 60, 64, 1)}[how]
    for k in range(50):
        ids, found = dataset[k].tolist(), ahead.find_stretches(dataset, k)
        assert [first for first, *_ in found] == [
            0,
            *(stop for _, stop, _ in found[:-1]),
        ] and found[-1][1] == len(ids)
        for first, stop, told in found if how != "random" else ():
            assert told == dataset.locate(k, first)
            token, sequence, prefix = re.fullmatch(
                r"token (\d+) of document (\d+) in (.*)", told
            ).groups()  # type: ignore[union-attr]
            start = int(Indexed(prefix).pointers[int(sequence)]) // 2 + int(token)
            assert Indexed(prefix).sequence_at(start) == Indexed(prefix).sequence_at(
                start + stop - first - 1
            )
            assert Indexed(prefix).tokens[start : start + stop - first].tolist() == ids[first:stop]


def test_a_file_name_stands_for_its_prefix(tmp_path: Path) -> None:
    a = write_pair(tmp_path / "a", make_documents(20, 1))
    odd = write_pair(tmp_path / "odd.bin", make_documents(5, 2))  # a prefix that ends so
    for end in ("", ".bin", ".idx"):
        assert run_data("verify", a + end)[1].startswith(f"{a}: intact: 20 documents")
        assert json.loads(run_data("inspect", a + end, "--json")[1])["prefix"] == a
    assert len(run_data("verify", f"{a}.bin", f"{a}.idx", odd)[1].splitlines()) == 2
    status, told, _ = run_data(
        "merge", f"{a}.bin", f"{a}.idx", odd, odd, "--output-prefix", str(tmp_path / "x")
    )
    assert status == 0 and "merged 3 datasets" in told and "30 documents" in told
    for argv in (
        ["inspect", f"{a}2"],
        ["merge", a, f"{a}2", "--output-prefix", str(tmp_path / "y")],
    ):
        status, _, err = run_data(*argv)
        assert (
            status == 65
            and f"{a}2.idx does not exist; {a}2 must be the prefix" in err
            and "--data-path" not in err
        )
    assert (
        f"{a}2.idx does not exist; {a}2 must be the prefix of a .bin and an .idx\n"
        in run_data("verify", f"{a}2.bin")[1]
    )


def test_verify_asks_whether_a_similar_name_was_meant(tmp_path: Path) -> None:
    a = write_pair(tmp_path / "out_text_document", make_documents(2, 1))
    for typed in (
        "out",
        "out_text_documen",
        "out_text_document.tokenizer",
        "out_text_document.json",
    ):
        line = f"{tmp_path / typed}.idx does not exist; did you mean {a}?\n"
        assert run_data("verify", str(tmp_path / typed))[:2] == (65, line)
    write_pair(tmp_path / "out_text_document2", make_documents(2, 1))
    Path(f"{a}.idx").unlink()  # of a pair whose other file is there, no other is meant
    assert run_data("verify", a)[1] == f"{a}.idx does not exist\n"


# index and plan


def test_indices_built_ahead_are_the_trainings(tmp_path: Path) -> None:
    """Given all flags of a training, which then has nothing to build, nor has a second run."""
    a, b = two_pairs(tmp_path)
    argv = ["--data-path", "3", a, "1", b, *(word if word != "400" else "16" for word in TRAIN)]
    argv += "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --lr 1e-3 --tokenizer-type ByteTokenizer".split()
    argv += ["--device", "cpu", "--no-tensorboard"]
    status, out, _ = run_data("index", *argv, "--bf16", "--save", "nowhere", "--clip-grad", "1")
    assert (
        status == 0
        and re.search(r"built \d+ indices", out)
        and "building the indices on rank 0" in out
    )
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "index-cache").iterdir()}
    assert "nothing to build" in run_data("index", *argv)[1]
    with (
        contextlib.redirect_stdout(io.StringIO()) as log,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        assert main(["train", *argv]) == 0
    assert (
        "iteration        2/" in log.getvalue()
        and "building the indices on rank 0" not in log.getvalue()
    )
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "index-cache").iterdir()
    } == before
    assert not Path("nowhere").exists()


def test_index_needs_only_what_decides_it(tmp_path: Path) -> None:
    a = write_pair(tmp_path / "a", make_documents(60))
    status, _, err = run_data("index", "--data-path", a)
    assert status == 2 and all(
        f"--{name}" in err for name in ("seq-length", "train-iters", "global-batch-size")
    )
    large = f"index --data-path {a} --seq-length 16 --train-iters 4 --micro-batch-size 2".split()
    large += "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4".split()
    status, _, err = run_data(*large)
    assert status == 2 and "will run on 32 ranks" in err
    assert run_data(*large, "--global-batch-size", "8")[0] == 0
    (tmp_path / "file").write_text("")
    status, _, err = run_data(
        "index", "--data-path", a, *TRAIN, "--data-cache-path", str(tmp_path / "file")
    )
    assert status == 74 and "cannot write to" in err and "--data-cache-path" in err


def test_indices_that_stayed_in_memory_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever kept them out of the cache, with or without older ones there."""
    from meshwright.data.index_cache import Storage

    a = write_pair(tmp_path / "a", make_documents(60))
    assert run_data("index", "--data-path", a, *TRAIN)[0] == 0
    assert "nothing to build: all 6 index arrays" in run_data("index", "--data-path", a, *TRAIN)[1]
    monkeypatch.setattr(
        "meshwright.data.loader.cached_indices", lambda folder, key, parts, build: build(Storage())
    )
    status, out, err = run_data("index", "--data-path", a, *TRAIN)
    assert (
        status == 74
        and "6 of 6 index arrays are in memory alone" in err
        and "nothing to build" not in out
    )


@pytest.mark.flag("planning.json")
def test_plan_counts_what_the_training_reads(tmp_path: Path) -> None:
    from meshwright.apps.datasets.commands import PlanConfig
    from meshwright.config import flags
    from meshwright.data.blend import Blend
    from meshwright.data.datasets import build_datasets

    prefixes = [write_pair(tmp_path / name, make_documents(60, n)) for n, name in enumerate("abc")]
    blend = [word for pair in zip(("5", "0.3", "2"), prefixes, strict=True) for word in pair]
    argv = ["--data-path", *blend, *TRAIN, "--split", "80,20,0"]
    status, out, _ = run_data("plan", *argv, "--json")
    facts = json.loads(out)
    sets = {one["set"]: one for one in facts["sets"]}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        data = build_datasets(flags.parse_settings(PlanConfig, argv, "test").config, 257)
    for name in ("train", "valid"):
        blend, sources = data[name], sets[name]["sources"]
        assert (
            status == 0
            and isinstance(blend, Blend)
            and sets[name]["counted"] == "in the real order"
        )
        assert [s["samples"] for s in sources] == np.bincount(
            blend.dataset_idx, minlength=3
        ).tolist()
        for source, part in zip(sources, blend.parts, strict=True):
            mine = part.indexed.sizes[source["first_document"] :][: source["documents"]]  # type: ignore[attr-defined]
            epochs = source["samples"] * 16 / mine.sum()
            assert source["tokens"] == mine.sum() and source["epochs"] == pytest.approx(epochs)
    assert sum(s["samples"] for s in sets["train"]["sources"]) == 400
    _, out, err = run_data("plan", *[w if w != "400" else "40000" for w in argv])
    assert "train: 40,000 samples, 640,000 tokens" in out and "times over in training" in err


def test_plan_refuses_other_tokenizers_as_a_training_does(tmp_path: Path) -> None:
    """Those of two files, and one that the flags name beside that of the data."""
    a, b = two_pairs(tmp_path)
    for prefix, size in ((a, 1000), (b, 2000)):
        keep_beside(
            build_tokenizer(TokenizerFlags(tokenizer_type="NullTokenizer", vocab_size=size)), prefix
        )
    status, out, err = run_data("plan", "--data-path", a, b, *TRAIN)
    assert status == BAD_DATA and "made with different tokenizers" in err and not out
    status, out, err = run_data("plan", "--data-path", a, *TRAIN, "--tokenizer-type=ByteTokenizer")
    assert status == BAD_DATA and "the flags name another tokenizer" in err and not out
    assert run_data("plan", "--data-path", a, *TRAIN)[0] == 0


@pytest.mark.flag("train_epochs")
def test_a_length_in_epochs(tmp_path: Path) -> None:
    """All data count, whatever their weights; the schedule is in samples."""
    a, b = two_pairs(tmp_path)
    tokens = sum(int(Indexed(prefix).sizes.sum()) for prefix in (a, b))
    begin = TRAIN.index("--train-samples")
    rest = [*TRAIN[:begin], *TRAIN[begin + 2 :]]
    blend = ["--data-path", "5", a, "1", b, *rest, "--split", "1,0,0"]
    samples = (2 * tokens - 1) // 16
    status, out, _ = run_data("plan", *blend, "--train-epochs", "2")
    assert status == 0 and f"train: {samples:,} samples" in out
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --lr 1e-3 --tokenizer-type ByteTokenizer"
    argv = ["train", "--data-path", a, *rest, *model.split(), "--device=cpu", "--dry-run"]
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        assert main([*argv, "--train-epochs", "0.5"]) == 0
        assert "--train-epochs 0.5 of this data: --train-samples " in err.getvalue()
        assert main([*argv, "--train-epochs", "1e-9"]) != 0
        assert "is 0 samples of this data, less than one global batch of" in err.getvalue()


def test_plan_of_a_set_without_a_document(tmp_path: Path) -> None:
    a, _ = two_pairs(tmp_path)
    status, out, err = run_data("plan", "--data-path", a, *TRAIN, "--split", "99,0.01,0")
    assert status == 0 and out.count("tokens read") == 1
    assert (
        "valid: none; --split 99,0.01,0 leaves it no document\n\ntest: none; --split 99,0.01,0 gives it no share"
        in out
    )
    assert (
        "valid is no set of this training: --split 99,0.01,0 leaves it no document" in err
        and "test is" not in err
    )


def test_plan_of_more_samples_than_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two_pairs(tmp_path)
    argv = ["--data-path", "5", a, "1", b, *TRAIN, "--json"]
    exact = json.loads(run_data("plan", *argv)[1])["sets"][0]["sources"]
    monkeypatch.setattr(forecast, "EXACT", 10)
    told = json.loads(run_data("plan", *argv)[1])["sets"][0]
    assert told["counted"].startswith("from the shares")
    assert all(
        abs(a["samples"] - b["samples"]) <= 1 for a, b in zip(exact, told["sources"], strict=True)
    )


# merge


def megatrons_merge(prefixes: list[str]) -> tuple[bytes, list[int], list[int]]:
    """Return tokens, lengths and borders as Megatron's builder joins them."""
    tokens, sizes, borders = b"", list[int](), [0]
    for prefix in prefixes:
        one = Indexed(prefix)
        borders += [len(sizes) + int(b) for b in one.doc_idx[1:]]
        sizes += one.sizes.tolist()
        tokens += Path(f"{prefix}.bin").read_bytes()
    return tokens, sizes, borders


@pytest.mark.flag("datasets merging.output_prefix")
@pytest.mark.parametrize("how", ["serial", "distributed"])
def test_merged_files_are_megatrons(tmp_path: Path, how: str) -> None:
    sets = [make_documents(30, 1), [], make_documents(1, 2), [[], []], make_documents(200, 3)]
    sets.append(make_documents(30, 4, most=1))
    prefixes = [write_pair(tmp_path / f"in{n}", documents) for n, documents in enumerate(sets)]
    out = str(tmp_path / "new" / "out")
    status, told, _ = run_data("merge", *prefixes, "--output-prefix", out, "--merge", how)
    tokens, sizes, borders = megatrons_merge(prefixes)
    made = Indexed(out)
    assert status == 0 and "merged 6 datasets" in told
    assert Path(f"{out}.bin").read_bytes() == tokens
    assert (made.sizes.tolist(), made.doc_idx.tolist()) == (sizes, borders)
    direct = write_pair(tmp_path / "direct", [d for documents in sets for d in documents])
    assert Path(f"{direct}.idx").read_bytes() == Path(f"{out}.idx").read_bytes()
    assert sorted(os.listdir(tmp_path / "new")) == ["out.bin", "out.idx", "out.origin.json"]


@pytest.mark.flag("merging.input")
def test_merge_of_a_folder_and_its_script(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    prefixes = [
        write_pair(tmp_path / "in" / name, make_documents(10, n))
        for n, name in enumerate(["b", "a", "c"])
    ]
    out = tmp_path / "in" / "merged"
    for _ in range(2):  # its own output is not read the second time
        status, _, _ = run_data(
            "merge", "--input", str(tmp_path / "in"), "--output-prefix", str(out)
        )
        assert (
            status == 0 and Path(f"{out}.bin").read_bytes() == megatrons_merge(sorted(prefixes))[0]
        )
    Path(tmp_path / "in" / "d.idx").write_bytes(b"")
    status, _, err = run_data(
        "merge", "--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "x")
    )
    assert (
        status == 65 and "d is a .idx without a .bin" in err and not (tmp_path / "x.idx").exists()
    )


def test_merge_refuses_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (
        write_pair(tmp_path / "a", make_documents(5)),
        write_pair(tmp_path / "b", make_documents(5), np.int32),
    )
    status, _, err = run_data("merge", a, b, "--output-prefix", str(tmp_path / "x"))
    assert status == 65 and f"{a} has uint16 tokens and {b} int32" in err
    status, _, err = run_data("merge", a, "--output-prefix", a)
    assert status == 2 and "one of the files that are read" in err and Indexed(a)
    Path(f"{b}.bin").write_bytes(b"")
    assert run_data("merge", b, "--output-prefix", str(tmp_path / "x"))[0] == 65
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("", (), {"free": 10})())
    status, _, err = run_data("merge", a, "--output-prefix", str(tmp_path / "x"))
    assert status == 74 and "10 bytes free" in err
    assert not list(tmp_path.glob("x*"))
    assert "give either" in run_data("merge", "--output-prefix", "x")[2]


def test_merge_without_the_kernels_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = [write_pair(tmp_path / f"in{n}", make_documents(50, n)) for n in range(3)]

    def refused(*_: Any) -> int:
        raise OSError(18, "Invalid cross-device link")

    for copy in (refused, lambda *_: 0):
        monkeypatch.setattr(os, "copy_file_range", copy, raising=False)
        made = merge.merge_pairs(prefixes, str(tmp_path / "out"), False, overwrite=True)
        assert Path(f"{made.prefix}.bin").read_bytes() == megatrons_merge(prefixes)[0]


@pytest.mark.flag("merge")
def test_several_are_copied_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that wait for one another end with --merge distributed, not with serial."""
    prefixes = [write_pair(tmp_path / f"in{n}", make_documents(50, n)) for n in range(3)]
    meet, copy = threading.Barrier(3), merge.copy_tokens

    patience = [20.0]

    def together(*given: Any) -> None:
        meet.wait(patience[0])
        copy(*given)

    monkeypatch.setattr(merge, "copy_tokens", together)
    merging = ["merge", *prefixes, "--output-prefix", str(tmp_path / "out"), "--overwrite"]
    assert run_data(*merging, "--merge", "distributed")[0] == 0
    assert Path(tmp_path / "out.bin").read_bytes() == megatrons_merge(prefixes)[0]
    (tmp_path / "out.origin.json").unlink()
    patience[0] = 0.05
    with pytest.raises(threading.BrokenBarrierError):
        run_data(*merging, "--merge", "serial")


def test_merged_bytes_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = [write_pair(tmp_path / f"in{n}", make_documents(50, n)) for n in range(2)]
    monkeypatch.setattr(
        merge,
        "copy_tokens",
        lambda _, target, place, size, advance: os.pwrite(target, bytes(size), place),
    )
    with pytest.raises(UserError, match="differs from .*in0.bin at token 0"):
        merge.merge_pairs(prefixes, str(tmp_path / "out"), False)


def test_one_of_several_processes_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = write_pair(tmp_path / "a", make_documents(5))
    for rank in ("1", "0"):
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", **meeting}.items():
            monkeypatch.setenv(name, value)
        merging = f"merge --datasets {a} --output-prefix {tmp_path}/x --merge distributed"
        status, out, _ = run_data(*merging.split())
        assert status == 0 and (tmp_path / "x.idx").exists() == bool(out) == (rank == "0")


# merge-json


@pytest.mark.flag("json_path loose_text.output_file each_line loose_text.overwrite")
def test_loose_files_become_one(tmp_path: Path) -> None:
    place = tmp_path / "in"
    place.mkdir()
    # Without a final newline:
    (place / "b.json").write_bytes(
        b'{"text": "two"}\n\n{"text": bad}\r\n{"text": "three", "n": NaN}'
    )
    (place / "a.json").write_bytes(
        b'\xef\xbb\xbf{"text": "one \xc3\xa4"}\r\n[1]\n{"text": "\xff"}\n'
    )
    (place / "c.txt").write_text("first line\n\nsecond \u00e4\n", encoding="utf-8")
    (place / "d.txt").write_text("  \n")
    (place / "e.md").write_text("not read")
    (place / "g.jsonl.gz").write_bytes(b"not read")
    out = tmp_path / "out" / "merged.json"
    (place / "deeper").mkdir()
    (place / "deeper" / "f.txt").write_text("not read")
    status, told, err = run_data("merge-json", "--data_path", str(place), "--output_file", str(out))
    assert (
        "passed over 3 files: 1 in folders of this one, 2 with other suffixes (.md, .jsonl.gz); `meshwright preproc"
        in err
    )
    lines = out.read_bytes().splitlines()
    assert status == 0 and lines[0] == b'{"text": "one \xc3\xa4"}'
    assert [json.loads(line)["text"] for line in lines] == [
        "one ä",
        "two",
        "three",
        "first line\n\nsecond ä\n",
    ]
    assert "4 documents of 4 files; left out 3" in told
    kinds = ("1 not a JSON object, first", "1 not UTF-8", f"1 not JSON, first {place / 'b.json'}:3")
    assert all(kind in told for kind in kinds)
    again = ["merge-json", "--json-path", str(place), "--output-file", str(out)]
    # A system's error gets the advice that every command gives.
    long = str(tmp_path / ("n" * 300))
    for command in (again[:3], ["dedup", str(place / "a.json")]):
        status, _, err = run_data(*command, "--output-file", long)
        assert status == IO and f"{long}: File name too long; choose a shorter name" in err
    assert run_data(*again)[1].startswith(f"{out} is already there, unchanged: 4 documents")
    status, _, err = run_data(*again, "--each-line")
    assert status == 73 and "another content, which is kept; add --overwrite" in err
    assert out.read_bytes().splitlines() == lines and os.listdir(out.parent) == [out.name]
    assert run_data(*again, "--each-line", "--overwrite")[0] == 0
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()[3:]] == [
        "first line\n",
        "second ä\n",
    ]
    (tmp_path / "empty").mkdir()
    assert run_data("merge-json", "--json_path", str(tmp_path / "empty"))[0] == 65


def test_lines_too_long_for_memory_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LONGEST", 10)
    monkeypatch.setattr(limits, "PIECE", 4)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"one\n" + b"x" * 11 + b"\n0123456789\ntwo")
    (tmp_path / "in" / "b.txt").write_bytes(b"123456789\n")
    (tmp_path / "in" / "c.json").write_bytes(
        b'{"text": "%s"}\n{"t": 1}\n' % (b"x" * 99) + b"[" * 99
    )
    out = tmp_path / "out.json"
    merging = f"merge-json --json-path {tmp_path}/in --output-file {out} --each-line"
    status, told, _ = run_data(*merging.split())
    texts = [json.loads(line).get("text") for line in out.read_text().splitlines()]
    # The line of ten and its line feed are eleven.
    assert texts == ["one\n", "two", "123456789\n", None] and "left out 4 bad lines: " in told
    assert status == 0 and "longer than 10 bytes, first" in told


@pytest.mark.whole
@pytest.mark.parametrize(
    "words",
    [
        "openwebtext/merge_data.py --data_path in --output_file out.json",
        "openwebtext/merge_jsons.py --json_path in --output_file out.json",
        "preprocess_data.py --input in/a.json --output-prefix out --tokenizer-type ByteTokenizer",
        "merge_datasets.py --input in --output-prefix out",
        "merge_preprocessed_data.py --datasets in/b in/a --output-prefix out",
    ],
)
def test_scripts_of_megatrons_names(tmp_path: Path, words: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text('{"text": "x"}')
    prefixes = [
        write_pair(tmp_path / "in" / name, make_documents(5, n)) for n, name in enumerate("ab")
    ]
    program = [warm.programs() / "python", *f"{ROOT}/tools/{words}".split()]
    subprocess.run(program, cwd=tmp_path, check=True)
    if "preprocess_data" in words:
        assert (tmp_path / "out_text_document.bin").read_bytes() == b"x\0"
    elif "json" in words:
        assert (tmp_path / "out.json").read_text() == '{"text": "x"}\n'
    else:
        order = prefixes if "input" in words else prefixes[::-1]
        assert (tmp_path / "out.bin").read_bytes() == megatrons_merge(order)[0]
