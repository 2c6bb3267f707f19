"""Blends: Megatron's rule as a plain loop, and the documents that make up each split."""

import math
import re

import numpy as np
import pytest
from corpora import build_and_capture, data_config

from helpers import blend_rule, error_of, write_counting
from meshwright.base.errors import USAGE
from meshwright.config import checks
from meshwright.data import blend
from meshwright.data.blend import Blend, blend_order, normalise
from meshwright.data.files.indexed import Indexed
from meshwright.data.loader import Mock, Samples


def check(weights, size):
    shares = np.array(normalise(weights))
    shares /= shares.sum()
    which, number = blend_order(shares, size)
    assert (which.dtype, number.dtype) == (np.int16, np.int64)
    assert (which.tolist(), number.tolist()) == blend_rule(shares.tolist(), size), (weights, size)


def test_order_on_random_cases(monkeypatch):
    walks, real = [], blend.walk
    monkeypatch.setattr(blend, "walk", lambda *a: walks.append(len(a[1])) or real(*a))
    rng = np.random.default_rng(1)
    for case in range(80):
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
    assert min(walks) == 1 and len(walks) > 400  # corrections did happen


@pytest.mark.parametrize("weights", [[0.3, 0.7], [5, 1, 1e-4, 3]])
def test_order_of_large_blocks(weights):
    check(weights, 30_000)


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
    for _ in range(100):
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


def test_more_data_sets_than_16_bits_can_number():
    parts = [Mock(9, 1, 4, 1)] * 2**15
    assert "a blend of 32,768 data sets; at most 32,767" in error_of(
        lambda: Blend(parts, [1.0] * len(parts), 10), USAGE
    )
