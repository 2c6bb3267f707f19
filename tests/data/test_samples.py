"""The tokens of sample k, compared with Megatron's seven steps as plain slow Python."""

import builtins
import errno
import json
import multiprocessing
import os
import re
import sys
import time

import numpy as np
import pytest
from corpora import build_and_capture, data_config, write_pair

from helpers import captured_output, error_of, tokens_of
from meshwright.base.errors import TOO_OLD
from meshwright.config.grammar import Split
from meshwright.data import index_cache, loader, samples
from meshwright.data.datasets import check_vocabulary
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.verify import damaged_caches
from meshwright.data.loader import Mock, Samples
from meshwright.data.samples import build_indices, epochs_needed, split_bounds


def data(prefix, sizes, vocab=1000, dtype=np.uint16):
    rng = np.random.default_rng(sum(sizes))
    return Indexed(write_pair(prefix, [[rng.integers(0, vocab, n).tolist()] for n in sizes], dtype))


def build(sizes, documents, *arguments):
    return build_indices(
        sizes, documents, int(sizes[documents.start : documents.stop].sum()), *arguments
    )


def seven_steps(sizes, documents, num_samples, length, seed, cutoff):
    """Follow the specification, one token at a time."""
    per_epoch = sum(sizes[d] for d in documents)  # 1
    epochs = 1  # 2
    while (epochs * per_epoch - 1) // length < num_samples:
        epochs += 1
    rng = np.random.RandomState(seed)  # 3
    before = ((epochs - 1) * per_epoch - 1) // length  # 4
    apart = epochs > 1 and num_samples - before < int(cutoff * ((per_epoch - 1) // length))
    doc_idx = []  # 5
    for part in [epochs - 1, 1] if apart else [epochs]:
        order = np.array(list(documents) * part, dtype=np.int32)
        rng.shuffle(order)
        doc_idx += order.tolist()
    total = (epochs * per_epoch - 1) // length
    rows, place, offset = [(0, 0)], 0, 0  # 6
    for _ in range(total):
        remaining = length + 1
        while remaining > 0:
            left = sizes[doc_idx[place]] - offset
            remaining -= left
            if remaining <= 0:
                offset += remaining + left - 1
            else:
                place, offset = place + 1, 0
        rows.append((place, offset))
    shuffle_idx = []  # 7
    for a, b in [(0, before), (before, total)] if apart else [(0, total)]:
        order = np.arange(a, b, dtype=np.uint32)
        rng.shuffle(order)
        shuffle_idx += order.tolist()
    return doc_idx, rows, shuffle_idx, epochs, apart


@pytest.fixture(params=["numpy", "fast"])
def loops(request, monkeypatch):
    """Build with numpy's loops, and with numba's."""
    if request.param == "fast":
        pytest.importorskip("numba", reason="numba is not installed")
    monkeypatch.setattr(samples, "LARGE", 0 if request.param == "fast" else sys.maxsize)
    return request.param


def test_seven_steps_on_random_cases(monkeypatch, loops):
    monkeypatch.setattr(samples, "BLOCK", 7)  # so that small cases have several blocks
    rng = np.random.default_rng(1)
    seen = set()
    for case in range(320):
        sizes = rng.integers(0 if case % 3 else 1, rng.choice([2, 5, 60]), rng.integers(1, 40))
        start = int(rng.integers(0, len(sizes)))
        documents = range(start, int(rng.integers(start, len(sizes))) + 1)
        if not sizes[documents.start : documents.stop].sum():
            continue
        arguments = (
            int(rng.integers(0, 80)),
            int(rng.choice([1, 2, 7, 30])),
            int(rng.integers(0, 9)),
        )
        cutoff = float(rng.choice([0.80, 0.95]))
        doc, rows, shuffle, epochs, apart = seven_steps(
            sizes.tolist(), documents, *arguments, cutoff
        )
        got = build(sizes.astype(np.int32), documents, *arguments, cutoff)
        assert got[0].tolist() == doc
        assert got[1].tolist() == [list(row) for row in rows]
        assert got[2].tolist() == shuffle
        assert epochs_needed(tokens := int(sizes[documents].sum()), *arguments[:2], cutoff) == (
            epochs,
            apart,
        ), tokens
        assert [a.dtype for a in got] == [np.int32, np.int32, np.uint32]
        seen.add((apart, min(epochs, 3), cutoff))
    # 1, 2 or more epochs, the last apart or not (a single one never is), both cutoffs
    assert len(seen) == 10


@pytest.mark.parametrize(
    "limit", [5, 255, 256, 2**31 - 1, 2**31, 2**32 - 2, 2**32 + 300, 2**40 + 7]
)
def test_numbas_random_numbers_are_numpys(limit):
    """Numbers up to i, i - 1, ..., also for arrays too large to be shuffled in a test."""
    fast = pytest.importorskip("meshwright.data.numba_indices", reason="numba is not installed")
    for seed in range(3):
        rng = np.random.RandomState(seed)
        rng.random_sample(7)
        _, key, at, *_ = rng.get_state()
        key, words, out = (
            key.copy(),
            np.empty(624, np.uint32),
            np.empty(min(1000, limit) + 1, np.int64),
        )
        fast._temper(key, words)
        at = fast.draw_numbers(key, words, at, limit, out)
        # RandomState.randint draws as its shuffle does, width by width
        for k, got in enumerate(out[:-1].tolist()):
            top = limit - k + 1
            assert got == rng.randint(0, top, dtype=np.uint32 if top <= 2**32 else np.uint64), k
        assert (at, key.tolist()) == (rng.get_state()[2], rng.get_state()[1].tolist())


def test_widths_of_numbers():
    assert samples.index_dtypes(2**31, 2**31 - 1, 2**32 - 3) == (np.int32, np.int32, np.uint32)
    assert samples.index_dtypes(2**31 + 1, 2**31, 2**32 - 2) == (np.int64, np.int64, np.int64)


def test_sums_beyond_31_bits(loops):
    sizes = np.array([2**31 - 1, 3, 2**30, 0, 2**31 - 1], np.int32)
    tokens, length = int(sizes.sum(dtype=np.int64)), 10**7 + 19
    doc_idx, rows, _ = build_indices(sizes, range(5), tokens, tokens // length, length, 3, 0.8)
    ends = np.cumsum(sizes[doc_idx], dtype=np.int64).tolist()
    for k, (place, offset) in enumerate(rows.tolist()[1:], start=1):
        assert (ends[place - 1] if place else 0) + offset == k * length and k * length < ends[place]
    assert len(rows) == (tokens - 1) // length + 1


def test_lengths_that_contradict_the_pointers(loops):
    message = error_of(
        lambda: build_indices(np.array([10, 5], np.int32), range(2), 40, 4, 4, 1, 0.8)
    )
    assert "sizes of the .idx give 3 samples, its pointers 9; it is damaged" in message


def test_numba_is_for_large_data_and_may_be_absent(monkeypatch):
    assert samples.compiled_loops(samples.LARGE - 1) is None
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("numba"):
            raise ImportError(name)
        return real(name, *rest)

    for module in ("numba", "meshwright.data.numba_indices"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delattr("meshwright.data.numba_indices", raising=False)
    with captured_output() as (_, notices):
        assert samples.compiled_loops(samples.LARGE) is None
    assert notices == []


def test_samples_are_the_stream_cut_every_s_tokens(tmp_path):
    sizes = [3, 0, 10, 1, 1, 25, 7]
    indexed = data(tmp_path / "x", sizes)
    made = Samples(indexed, range(0, 7), 20, 4, seed=3)
    stream = np.concatenate([tokens_of(indexed, d) for d in made.doc_idx]).tolist()
    assert (len(made), made.epochs) == (23, 2)
    for k in range(len(made)):
        j = int(made.shuffle_idx[k])
        assert made[k].tolist() == stream[j * 4 : j * 4 + 5]
    numbers = np.random.default_rng(1).permutation(len(made)).tolist()
    assert made.read(numbers).tolist() == [made[k].tolist() for k in numbers]
    for k in (-1, len(made)):
        with pytest.raises(IndexError):
            made[k]


@pytest.mark.flag("split_arithmetic")
def test_split_golden_numbers():
    assert split_bounds(Split.read("700,200,100"), 2456, "rounded") == [0, 1719, 2210, 2456]
    for arithmetic in ("rounded", "cumulative"):
        assert split_bounds(Split.read("949,50,1"), 79000, arithmetic) == [0, 74971, 78921, 79000]
    assert split_bounds(Split.read("949,50,1"), 50, "rounded") == [0, 48, 50, 50]
    assert split_bounds(Split.read("949,50,1"), 50, "cumulative") == [0, 47, 50, 50]
    assert split_bounds(Split.read("949,50,1"), 500, "rounded") == [0, 475, 500, 500]
    assert split_bounds(Split.read("949,50,1"), 500, "cumulative") == [0, 474, 500, 500]
    assert split_bounds(Split.read("969, 30, 1"), 1000, "rounded") == [0, 969, 999, 1000]
    assert split_bounds(Split.read("90/10"), 10, "rounded") == [0, 9, 10, 10]
    assert split_bounds(Split.read("100"), 10, "cumulative") == [0, 10, 10, 10]
    assert split_bounds(Split.read("0,1,1"), 11, "rounded") == [
        0,
        0,
        5,
        11,
    ]  # Megatron's shift gives -1: the last document twice


def config(prefix, **changes):
    return data_config(**{"data_path": [str(prefix)], **changes})


def test_lines_of_the_log(tmp_path):
    data(tmp_path / "x", [30] * 20)
    settings = config(tmp_path / "x")
    made, first, notices = build_and_capture(settings)
    assert notices == []
    lengths = {name: len(made[name]) for name in made}
    assert lengths == {"train": 52, "valid": 14, "test": 7}
    again, lines, _ = build_and_capture(settings)
    assert {name: len(again[name]) for name in made} == lengths
    expected = rf"""
> building train, validation, and test datasets ...
 > datasets target sizes \(minimum size\):
    train:      40
    validation: 12
    test:       4
> building train, validation, and test datasets for GPT ...
Single data path provided for train, valid & test
data_prefix: \['{tmp_path}/x'\]
 > building dataset index ...
    reading sizes...
    reading pointers...
    reading document index...
    creating numpy buffer of mmap...
    creating memory view of numpy buffer...
 > finished creating indexed dataset in \d\.\d{{6}} seconds
    number of documents: 20
 > dataset split:
    train:
     document indices in \[0, 14\) total of 14 documents
    validation:
     document indices in \[14, 18\) total of 4 documents
    test:
     document indices in \[18, 20\) total of 2 documents
""" + "".join(
        rf""" > loading doc-idx mapping from {tmp_path}/index-cache/[0-9a-f]{{32}}_doc_idx.npy
 > loading sample-idx mapping from {tmp_path}/index-cache/[0-9a-f]{{32}}_sample_idx.npy
 > loading shuffle-idx mapping from {tmp_path}/index-cache/[0-9a-f]{{32}}_shuffle_idx.npy
    loaded indexed file in \d\.\d{{3}} seconds
    total number of samples: {rows}
    total number of epochs: 1
"""
        for rows in (53, 15, 8)
    )
    pattern = (expected + "> finished creating GPT datasets ...").strip("\n").split("\n")
    assert len(lines) == len(pattern)
    for line, wanted in zip(lines, pattern, strict=True):
        assert re.fullmatch(wanted, line), (wanted, line)
    built = [
        line
        for line in first
        if line not in lines and "loaded" not in line and "finished" not in line
    ]
    assert built[:6] == [
        " > WARNING: could not find index map files, building the indices on rank 0 ...",
        " > only one epoch required, setting separate_last_epoch to False",
        built[2],
        built[3],
        " > building shuffle index with split [0, 52) and [52, 52) ...",
        built[5],
    ]
    for line, part in ((built[2], "doc"), (built[3], "sample"), (built[5], "shuffle")):
        assert re.fullmatch(
            rf" > elasped time to build and save {part}-idx mapping \(seconds\): \d\.\d{{6}}", line
        )


@pytest.mark.flag("last_epoch_cutoff")
def test_line_about_the_last_epoch():
    with captured_output() as (lines, _):
        build(np.array([100]), range(1), 110, 1, 0, 0.95)
    assert lines[0] == (
        " > last epoch number of samples (11) is smaller than 95% of number of samples per epoch (99), "
        "setting separate_last_epoch to True"
    )
    assert " > building shuffle index with split [0, 99) and [99, 199) ..." in lines
    with captured_output() as (lines, _):
        build(np.array([100]), range(1), 190, 1, 0, 0.8)
    words = "(91) is larger than 80% of number of samples per epoch (99), setting separate_last_epoch to False"
    assert words in lines[0]


def cache_files(folder):
    return sorted(folder.iterdir())


def has_equal_indices(a, b):
    return all(
        np.array_equal(getattr(a, f), getattr(b, f))
        for f in ("doc_idx", "sample_idx", "shuffle_idx")
    )


@pytest.mark.fault("F25")
@pytest.mark.promise("Cached indices are loaded without pickle")
def test_damaged_caches_are_rebuilt(tmp_path):
    indexed, cache = data(tmp_path / "x", [30, 20, 10, 40]), tmp_path / "cache"
    other = tmp_path / "other"
    Samples(indexed, range(0, 4), 13, 8, 1, cache_dir=other)

    def make():
        with captured_output() as (_, notices):
            made = Samples(indexed, range(0, 4), 12, 8, 1, cache_dir=cache)
        return made, notices

    good, _ = make()
    files = cache_files(cache)
    assert [p.name[33:] for p in files if p.suffix == ".npy"] == [
        "doc_idx.npy",
        "sample_idx.npy",
        "shuffle_idx.npy",
    ]
    for path in files:
        whole = path.read_bytes()
        [foreign] = [p for p in cache_files(other) if p.name[32:] == path.name[32:]]
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 64
        damages = [b"", whole[: len(whole) // 2], whole[:-2], foreign.read_bytes() + b" "]
        damages += [bytes(flipped)] if path.suffix == ".npy" else [b"[]", b'{"crc32": 3}']
        for damage in damages:
            path.write_bytes(damage)
            made, notices = make()
            assert has_equal_indices(made, good) and path.read_bytes() == whole
            assert len(notices) == 1 and "is damaged" in notices[0]
        if path.suffix == ".npy":
            path.unlink()
            assert has_equal_indices(make()[0], good) and path.exists()
    assert cache_files(cache) == files  # no temporary file is left


def build_in(number, folder):
    def build(room):
        time.sleep(0.1)
        array = room.array("doc", 1, np.int32)
        array[:] = number
        return [array]

    [array] = index_cache.cached_indices(folder, {"a": 1}, ["doc"], build)
    (folder.parent / f"read by {number}").write_text(f"{array[0]}")


def test_processes_of_one_machine_build_once_and_machines_each(tmp_path):
    """Processes on one folder stand for a machine; the other folder is another machine's."""
    fork = multiprocessing.get_context("fork")
    folders = [tmp_path / name for name in ("one", "one", "one", "two")]
    started = [fork.Process(target=build_in, args=given) for given in enumerate(folders)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    *together, alone = [(tmp_path / f"read by {number}").read_text() for number in range(4)]
    assert len(set(together)) == 1 and together[0] in "012" and alone == "3"
    for folder in folders:
        assert [p.suffix for p in cache_files(folder)] == [".json", ".npy"]


def test_without_locks_several_build_equal_indices(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("meshwright.base.files.fcntl.flock", flock)
    indexed, cache = data(tmp_path / "x", [30, 20, 10, 40]), tmp_path / "cache"
    real, inner = samples.build_indices, []

    def twice(*a):
        if not inner:
            inner.append(None)
            # another builder, done before this one
            inner[0] = Samples(indexed, range(0, 4), 12, 8, 1, cache_dir=cache)
        return real(*a)

    monkeypatch.setattr(loader, "build_indices", twice)
    made = Samples(indexed, range(0, 4), 12, 8, 1, cache_dir=cache)
    assert has_equal_indices(made, inner[0])
    assert [p.suffix for p in cache_files(cache)] == [".json", ".npy", ".npy", ".npy"]


@pytest.mark.fault("F25")
def test_files_of_a_killed_builder_are_removed(tmp_path):
    indexed, cache = data(tmp_path / "x", [30, 20, 10, 40]), tmp_path / "cache"
    good = Samples(indexed, range(0, 4), 12, 8, 1, cache_dir=cache)
    files = cache_files(cache)
    [record] = [p for p in files if p.suffix == ".json"]
    record.unlink()
    for name in (f"{files[-1].name}.0123abcd.tmp", f"{record.stem}.lock"):
        (cache / name).write_bytes(b"half")
    assert has_equal_indices(Samples(indexed, range(0, 4), 12, 8, 1, cache_dir=cache), good)
    assert cache_files(cache) == files


def test_a_full_disk_leaves_the_indices_in_memory(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(index_cache.os, "posix_fallocate", full)
    indexed = data(tmp_path / "x", [30, 20, 10, 40])
    with captured_output() as (_, notices):
        made = Samples(indexed, range(0, 4), 12, 8, 1, cache_dir=tmp_path / "cache")
    assert has_equal_indices(made, Samples(indexed, range(0, 4), 12, 8, 1))
    assert len(notices) == 1 and notices[0].startswith("cannot write the index cache to ")
    assert "(No space left on device); indices are kept in memory" in notices[0]
    assert cache_files(tmp_path / "cache") == []


def test_large_cache_files_are_measured_at_a_start_and_read_by_verify(tmp_path, monkeypatch):
    monkeypatch.setattr(index_cache, "SMALL", 100)
    indexed, cache = data(tmp_path / "x", [30, 20, 10, 40]), tmp_path / "index-cache"
    good = Samples(indexed, range(0, 4), 12, 8, 1, cache_dir=cache)
    path = next(cache.glob("*_sample_idx.npy"))
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"0", b""):
        path.write_bytes(damaged)
        assert damaged_caches(tmp_path)[1]
        with captured_output() as (_, notices):
            assert has_equal_indices(good, Samples(indexed, range(0, 4), 12, 8, 1, cache_dir=cache))
        assert "is damaged" in notices[0] and path.read_bytes() == content
    assert damaged_caches(tmp_path) == (1, [])
    path.write_bytes(content[:-9] + bytes(9))
    count, [problem] = damaged_caches(tmp_path)
    assert count == 1 and f"the checksum of {path.name} differs" in problem


def test_an_entry_of_a_release_before_0_15_is_built_again(tmp_path):
    indexed, cache = data(tmp_path / "x", [30, 20, 10, 40]), tmp_path / "index-cache"
    good = Samples(indexed, range(0, 4), 12, 8, 1, cache_dir=cache)
    [record] = cache.glob("*.json")
    content = record.read_text()
    facts = json.loads(content)
    del facts["bytes"]  # its checksums of large files were those of samples
    record.write_text(json.dumps(facts))
    assert TOO_OLD in damaged_caches(tmp_path)[1][0]
    with captured_output() as (_, notices):
        assert has_equal_indices(good, Samples(indexed, range(0, 4), 12, 8, 1, cache_dir=cache))
    assert TOO_OLD in notices[0] and record.read_text() == content


def test_small_splits(tmp_path):
    data(tmp_path / "x", [30] * 10 + [5])
    made, _, notices = build_and_capture(config(tmp_path / "x", split="10,1,0"))
    # 5 tokens again and again, as in Megatron
    assert made["test"] is None and len(made["valid"]) >= 12
    (notice,) = notices  # and none of the test split, of which 0 was asked
    assert re.search("the valid split of .*/x has 5 tokens", notice)
    _, _, notices = build_and_capture(config(tmp_path / "x", split="100,10,1"))
    assert re.match(
        "--split 100,10,1: the test split of .*/x of 11 documents is empty, so it is left",
        notices[-1],
    )

    message = error_of(
        lambda: build_and_capture(config(tmp_path / "x", split="10,1", seq_length=300))
    )
    assert (
        "training split (10 of 11 documents) has 300 tokens, " in message
        and "--seq-length 300 + 1" in message
    )
    message = error_of(lambda: build_and_capture(config(tmp_path / "x", split="0,1,1")))
    assert "training split (0 of 11 documents) has 0 tokens" in message
    assert build_and_capture(config(tmp_path / "x", split="10,1", seq_length=299, train_iters=1))[
        0
    ]["train"]


def test_ids_of_another_vocabulary(tmp_path):
    indexed = data(tmp_path / "x", [10] * 50, vocab=500)
    top = int(indexed.tokens.max())
    at = int(indexed.tokens.argmax())
    check_vocabulary(indexed, top + 1)
    message = error_of(lambda: check_vocabulary(indexed, top))
    assert re.search(f"id {top} in document {at // 10}, .* ids are 0 ... {top - 1}", message)
    assert "another tokenizer" in error_of(
        lambda: build_and_capture(config(tmp_path / "x"), vocab=top)
    )
    negative = Indexed(write_pair(tmp_path / "neg", [[[1, -1]]], np.int32))
    assert "id -1 in document 0" in error_of(lambda: check_vocabulary(negative, 10))
    tokens = np.zeros(3_000_000, np.uint16)
    tokens[-1] = 9
    large = Indexed(write_pair(tmp_path / "large", [[tokens]]))
    assert "id 9 in document 0" in error_of(lambda: check_vocabulary(large, 9))


@pytest.mark.flag("mock_data")
def test_mock_data():
    settings = config("", mock_data=True, data_path=[])
    made, lines, _ = build_and_capture(settings, vocab=11)
    assert {name: len(d) for name, d in made.items()} == {"train": 40, "valid": 12, "test": 4}
    assert (
        lines[0].startswith("> building train")
        and lines[-1] == "> finished creating GPT datasets ..."
    )
    train = made["train"]
    assert train[7].tolist() == Mock(11, 100, 8, 1234)[7].tolist()
    assert train[7].shape == (9,) and train[7].dtype == np.int64
    everything = np.stack([train[k] for k in range(40)])
    assert everything.min() == 0 and everything.max() == 10
    assert len(np.unique(everything, axis=0)) == 40
    assert train[0].tolist() != made["valid"][0].tolist()
    with pytest.raises(IndexError):
        train[40]
    # Frozen: a resumed run must see the same data with any version of numpy.
    assert Mock(1000, 5, 3, 1234)[4].tolist() == [983, 227, 693, 541]


@pytest.mark.flag("data_cache_path mmap_warmup")
def test_warm_up_and_cache_path(tmp_path):
    data(tmp_path / "x", [30] * 20)
    _, lines, _ = build_and_capture(
        config(tmp_path / "x", mmap_warmup=True, data_cache_path=str(tmp_path / "elsewhere"))
    )
    assert "    warming up data mmap file..." in lines
    assert not (tmp_path / "index-cache").exists()
    assert len(os.listdir(tmp_path / "elsewhere")) == 12
