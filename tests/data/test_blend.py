"""Blends: Megatron's rule as a plain loop, and the documents that make up each split."""

import json
import math
import re
from itertools import islice

import numpy as np
import pytest
from corpora import build_and_capture, data_config

from helpers import blend_rule, captured_output, error_of, write_counting
from meshwright.base.errors import USAGE
from meshwright.config import checks
from meshwright.data import blend
from meshwright.data.blend import Blend, blend_order, normalise
from meshwright.data.files.indexed import Indexed
from meshwright.data.loader import Cyclic, Loader, LoaderSpec, Mock, Samples


def check(weights, size):
    shares = np.array(normalise(weights))
    shares /= shares.sum()
    which, number = blend_order(shares, size)
    assert (which.dtype, number.dtype) == (np.int16, np.int64)
    assert (which.tolist(), number.tolist()) == blend_rule(shares.tolist(), size), (weights, size)


def test_order_by_hand():
    """Three data sets of 1/2, 1/4 and 1/4.

    How far each is behind at sample i, from 0 to 3 and from 4 to 7:

    0 (as 1): 1/2 1/4 1/4   1: -1/2 1/4 1/4   2: 0 -1/2 1/2   3: 1/2 -1/4 -1/4
    4: 0 0 0                5: -1/2 1/4 1/4   6: 0 -1/2 1/2   7: 1/2 -1/4 -1/4
    """
    which, number = blend_order(np.array([0.5, 0.25, 0.25]), 9)
    assert which.tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 0]
    assert number.tolist() == [0, 0, 0, 1, 2, 1, 1, 3, 4]
    which, number = blend_order(np.array([1.0]), 5)
    assert (which.tolist(), number.tolist()) == ([0] * 5, [0, 1, 2, 3, 4])
    assert [len(part) for part in blend_order(np.array([1.0]), 0)] == [0, 0]


def test_order_on_random_cases(monkeypatch):
    walks, real = [], blend.walk
    monkeypatch.setattr(blend, "walk", lambda *a: walks.append(len(a[1])) or real(*a))
    rng = np.random.default_rng(1)
    for case in range(200):
        # so that small cases have several blocks
        monkeypatch.setattr(blend, "ROWS", int(rng.choice([2, 5, 40])))
        monkeypatch.setattr(blend, "PIECES", int(rng.choice([1, 3, 20])))
        n = int(rng.integers(1, 12))
        weights = [
            rng.random(n),
            rng.integers(1, 5, n) / 10,
            np.ones(n),
            10.0 ** rng.integers(-7, 1, n),
            rng.integers(1, 10**9, n).astype(float),
        ][case % 5]
        check(weights.tolist(), int(rng.integers(0, 700)))
    assert min(walks) == 1 and len(walks) > 1000  # corrections did happen


@pytest.mark.parametrize("weights", [[0.3, 0.7], [5, 1, 1e-4, 3], [1] * 7, [0.1, 0.2, 0.3, 0.4]])
def test_order_of_large_blocks(weights):
    check(weights, 60_000)


def test_a_wrong_guess_is_corrected(monkeypatch):
    """Pieces that never fall into step are walked in turn; the order is the same."""
    monkeypatch.setattr(np, "floor", lambda x: np.zeros_like(x))
    check([0.5, 0.3, 0.2], 900)


@pytest.fixture
def files(tmp_path):
    for n, sizes in enumerate(([30] * 20, [50] * 10, [7] * 40)):
        write_counting(tmp_path / f"p{n}", sizes, n * 1000)
    return tmp_path


def build(vocab=3000, **settings):
    config = data_config(**settings)
    assert not [p for p in checks.problems(config) if "data" in p.text]
    return build_and_capture(config, vocab)


def paths(folder, *values):
    return [str(folder / v) if isinstance(v, str) else str(v) for v in values]


def test_a_blend_is_its_parts_in_order(files):
    made, lines, notices = build(data_path=paths(files, 3, "p0", 1, "p1"))
    assert notices == []
    for name, size, documents in (
        ("train", 40, (range(14), range(7))),
        ("valid", 12, (range(14, 18), range(7, 9))),
        ("test", 4, (range(18, 20), range(9, 10))),
    ):
        shares = [0.75, 0.25]
        parts = [
            Samples(
                Indexed(files / f"p{n}"), documents[n], math.ceil(size * shares[n] * 1.005), 8, 1234
            )
            for n in range(2)
        ]
        assert len(made[name]) == size
        for k, (which, number) in enumerate(zip(*blend_rule(shares, size), strict=True)):
            assert made[name][k].tolist() == parts[which][number].tolist()
            assert made[name].locate(k, 8) == parts[which].locate(number, 8)
        for k in (-1, size):
            with pytest.raises(IndexError):
                made[name][k]
    records = [json.loads(path.read_text()) for path in (files / "index-cache").glob("*.json")]
    # 30.15 and 10.05, rounded up
    assert {r["samples"] for r in records if r.get("name") == "train"} == {31, 11}
    assert [line for line in lines if line.startswith(("Single", "data_prefix", "Separate"))] == [
        "Single data path provided for train, valid & test",
        f"data_prefix: {paths(files, 3, 'p0', 1, 'p1')}",
    ]
    assert (
        lines.count("    number of documents: 20")
        == lines.count("    number of documents: 10")
        == 1
    )
    at = lines.index(" > building indices for blendable datasets ...")
    assert lines[at + 1 : at + 4] == [
        " > sample ratios:",
        "   dataset 0, input: 0.75, achieved: 0.75",
        "   dataset 1, input: 0.25, achieved: 0.25",
    ]
    assert re.fullmatch(
        r"> elapsed time for building blendable dataset indices: \d+\.\d\d \(sec\)", lines[at + 4]
    )
    assert "> size of blendable dataset: 40 samples" in lines


def test_parts_never_run_out(monkeypatch):
    """Half a percent more than the share is enough for any size and weights."""
    assert [blend.samples_needed(size, 0.25) for size in (1, 40, 1000)] == [1, 11, 252]
    rng = np.random.default_rng(2)
    for _ in range(300):
        shares = normalise(rng.pareto(1, int(rng.integers(1, 30))).tolist())
        size = int(rng.integers(1, 300))
        which, _ = blend_order(np.array(shares), size)
        counts = np.bincount(which, minlength=len(shares)).tolist()
        assert all(n <= blend.samples_needed(size, s) for n, s in zip(counts, shares, strict=True))


def test_without_weights_the_tokens_of_the_split_decide(files):
    made, _, _ = build(data_path=paths(files, "p0", "p1", "p2"), train_iters=100)
    for name, tokens in (
        ("train", [420, 350, 196]),
        ("valid", [120, 100, 56]),
        ("test", [60, 50, 28]),
    ):
        size = len(made[name])
        assert made[name].dataset_idx.tolist() == blend_rule(normalise(tokens), size)[0]
    weighed, _, _ = build(data_path=paths(files, 420, "p0", 350, "p1", 196, "p2"), train_iters=100)
    assert all(np.array_equal(made["train"][k], weighed["train"][k]) for k in range(200))


def test_what_is_empty_drops_out_with_its_weight(files):
    write_counting(files / "one", [40], 2500)
    made, _, notices = build(
        data_path=paths(files, 0.5, "one", 0.3, "p0", 0, "p1", 0.2, "p2"), split="8,1,1"
    )
    assert len(made["train"].parts) == 3
    assert np.bincount(made["train"].dataset_idx).tolist() == [20, 12, 8]
    for name in ("valid", "test"):
        [a, b] = normalise([0.3, 0.2])
        assert made[name].dataset_idx.tolist() == blend_rule([a, b], len(made[name]))[0]
        assert [part.indexed.prefix for part in made[name].parts] == paths(files, "p0", "p2")
    empty, zero = f"{files}/one of 1 documents is empty", f"{files}/p1 has the weight 0"
    left_out = [("train", zero), ("valid", empty), ("valid", zero), ("test", empty), ("test", zero)]
    assert notices == [
        f"--split 8,1,1: the {name} split of {why}, so it is left out" for name, why in left_out
    ]
    made, _, notices = build(data_path=paths(files, 1, "p0", 1, "p1"), split="9,1,0")
    assert made["test"] is None and len(made["valid"]) == 12
    assert not notices  # nothing was asked for
    message = error_of(lambda: build(data_path=paths(files, 1, "p0", 1, "p1"), split="0,1,0"))
    assert re.search(
        r"training split \(0 of 30 documents\) has 0 tokens.* another --split", message
    )
    write_counting(files / "short", [5])
    made, _, notices = build(data_path=paths(files, 1, "p0", 1, "short"), split="1,0,0")
    assert len(made["train"]) == 40
    assert (
        f"the train split of {files}/short has 5 tokens: each sample of 8 + 1 repeats" in notices[0]
    )


def test_separate_paths_are_whole_files(files):
    made, lines, notices = build(
        train_data_path=paths(files, "p0"),
        valid_data_path=paths(files, 1, "p1", 1, "p2"),
        eval_iters=3,
    )
    assert notices == []
    assert made["train"].doc_idx[:20].max() == 19 and len(made["train"]) >= 40
    assert isinstance(made["valid"], Blend) and len(made["valid"]) == 18
    assert made["test"] is None
    assert (
        "Separate data paths provided for train, valid & test. Split string will be ignored."
        in lines
    )
    assert [line for line in lines if "document indices" in line] == [
        f"     document indices in [0, {n}) total of {n} documents" for n in (20, 10, 40)
    ]
    whole, _, _ = build(data_path=paths(files, "p0"), split="1,0,0")
    assert all(np.array_equal(made["train"][k], whole["train"][k]) for k in range(40))
    write_counting(files / "none", [0, 0])
    made, _, [notice] = build(
        train_data_path=paths(files, "p0"), test_data_path=paths(files, "none")
    )
    assert made["test"] is None
    assert (
        notice
        == f"--test-data-path: the test split of {files}/none of 2 documents is empty, so it is left out"
    )
    message = error_of(lambda: build(train_data_path=paths(files, "none")))
    assert re.search(r"\(2 of 2 documents\) has 0 tokens.* another --train-data-path", message)


def test_only_what_is_needed_is_built(files):
    for mock in (False, True):
        where = {"mock_data": True} if mock else {"data_path": paths(files, "p0")}
        made, _, notices = build(**where, skip_train=True)
        assert [name for name in made if made[name] is None] == ["train"]
        made, _, more = build(**where, eval_iters=0)
        assert [name for name in made if made[name] is None] == ["valid", "test"]
        assert notices == more == []
    made, _, _ = build(
        train_data_path=["not there"], valid_data_path=paths(files, "p0"), skip_train=True
    )
    assert made["train"] is None and made["valid"]


def test_target_in_samples(files):
    made, lines, _ = build(data_path=paths(files, 1, "p0"), train_iters=None, train_samples=51)
    # 25 steps
    assert lines[2:5] == ["    train:      51", "    validation: 12", "    test:       4"]
    assert len(made["train"]) == 51


@pytest.mark.parametrize("source", ["files", "mock"])
def test_cyclic_wraps_every_split(files, source):
    where = (
        {"mock_data": True} if source == "mock" else {"data_path": paths(files, 1, "p0", 2, "p1")}
    )
    plain, _, _ = build(**where)
    made, _, _ = build(**where, dataloader_type="cyclic")
    for name in made:
        assert isinstance(made[name], Cyclic)
        n = len(plain[name])
        read = sorted(made[name][k].tolist() for k in range(n, 2 * n))
        assert read == sorted(plain[name][k].tolist() for k in range(n))
    made, _, _ = build(data_path=paths(files, "p0"), split="1", dataloader_type="cyclic")
    assert made["valid"] is None


def test_missing_files_and_foreign_ids_name_the_file(files):
    assert "nowhere.idx does not exist" in error_of(
        lambda: build(data_path=paths(files, 1, "p0", 1, "nowhere"))
    )
    message = error_of(lambda: build(vocab=1400, data_path=paths(files, 1, "p0", 1, "p1")))
    assert re.search(rf"{files}/p1.bin has id 1400 in document 8, .* 0 ... 1399", message)
    parts = [Samples(Indexed(files / f"p{n}"), range(10), 20, 8, 1) for n in range(2)]
    loader = Loader(Blend(parts, [0.5, 0.5], 40), LoaderSpec(1, lambda _: 1, 1000))
    message = error_of(lambda: list(islice(loader, 2)))
    assert re.search(
        rf"sample 1 has id 1\d+ \(token \d+ of document \d in {files}/p1\), .* 0 ... 999", message
    )


def test_cache_is_used_checked_and_keyed(tmp_path, monkeypatch):
    calls, real = [], blend_order
    monkeypatch.setattr(blend, "blend_order", lambda *a: calls.append(1) or real(*a))
    parts = [Mock(50, 100, 4, n) for n in range(3)]
    notices = []

    def make(weights, size):
        with captured_output() as (_, printed):
            made = Blend(parts, weights, size, tmp_path / "cache")
        notices.extend(printed)
        return made

    first = make([0.2, 0.3, 0.5], 50)
    again = make([0.2, 0.3, 0.5], 50)
    assert len(calls) == 1 and first.dataset_idx.tolist() == again.dataset_idx.tolist()
    assert (again.dataset_idx.dtype, again.sample_idx.dtype) == (np.int16, np.int64)
    assert make([0.3, 0.2, 0.5], 50).dataset_idx.tolist() != first.dataset_idx.tolist()
    assert len(make([0.2, 0.3, 0.5], 51)) == 51
    assert len(calls) == 3 and notices == []
    for record in (tmp_path / "cache").glob("*.json"):
        assert json.loads(record.read_text())["version"] == blend.VERSION
    assert len(list((tmp_path / "cache").iterdir())) == 9
    wanted = first.dataset_idx.tolist()  # before its memory-mapped file is damaged
    for path in (tmp_path / "cache").glob("*_dataset_idx.npy"):
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert make([0.2, 0.3, 0.5], 50).dataset_idx.tolist() == wanted
    assert len(calls) == 4
    assert len(notices) == 1 and "is damaged" in notices[0]


def test_more_data_sets_than_16_bits_can_number():
    parts = [Mock(9, 1, 4, 1)] * 2**15
    assert "a blend of 32,768 data sets; at most 32,767" in error_of(
        lambda: Blend(parts, [1.0] * len(parts), 10), USAGE
    )
