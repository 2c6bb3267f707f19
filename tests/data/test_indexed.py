"""The .bin/.idx pair: every byte, every damage, and the state after a killed or failed writer."""

import itertools
import multiprocessing
import os
import re
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from corpora import write_older, write_pair

from helpers import error_of
from meshwright.base.errors import IO, UserError
from meshwright.data.files import indexed as indexed_module
from meshwright.data.files.indexed import HEADER, Indexed, fingerprint
from meshwright.data.files.merge import merge_pairs
from meshwright.data.files.verify import check_pair
from meshwright.data.files.writer import Writer
from meshwright.data.statistics import summary


def refused(words, prefix, in_full=False):
    assert re.search(words, error_of(lambda: Indexed(prefix, in_full)))


def test_every_byte(tmp_path):
    write_pair(tmp_path / "x", [[[1, 2, 3], [4]], [], [[65535]]])
    assert (tmp_path / "x.bin").read_bytes() == bytes([1, 0, 2, 0, 3, 0, 4, 0, 255, 255])
    assert (tmp_path / "x.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        b"\x01\x00\x00\x00\x00\x00\x00\x00"  # version
        b"\x08"  # uint16
        b"\x03\x00\x00\x00\x00\x00\x00\x00"  # sequences
        b"\x04\x00\x00\x00\x00\x00\x00\x00"  # documents + 1
        b"\x03\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00"  # sizes
        # pointers
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00"
        # document index: the second one is empty
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"
        b"\x02\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


@pytest.fixture
def pair(tmp_path):
    prefix = write_pair(tmp_path / "x", [[[i, i, i]] for i in range(20)])
    return prefix, tmp_path / "x.idx", tmp_path / "x.bin"


@pytest.fixture(params=[0, 1 << 22])
def full(request, monkeypatch):
    """Check in some places, as for a large file, and in full."""
    monkeypatch.setattr(indexed_module, "FULL", request.param)


@pytest.mark.fault("F24")
@pytest.mark.promise("Sizes, pointers and types that contradict one another are refused")
def test_truncated_everywhere(pair, full):
    prefix, idx, bin_ = pair
    whole = idx.read_bytes()
    for cut in {len(whole) * n // 16 for n in range(16)} | {8, 9, 33, 34, len(whole) - 1}:
        idx.write_bytes(whole[:cut])
        refused("x.idx is damaged|x.idx is not", prefix)
    idx.write_bytes(whole + b"\x00")
    refused("damaged", prefix)
    idx.write_bytes(whole)
    tokens = bin_.read_bytes()
    for wrong in (tokens[:-1], tokens + b"\x00\x00", b""):
        bin_.write_bytes(wrong)
        refused(f"x.bin has {len(wrong)} bytes, but its .idx describes 120", prefix)
    bin_.unlink()
    refused("x.bin does not exist", prefix)
    idx.unlink()
    refused("x.idx does not exist; --data-path is the prefix", prefix)


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, b"Q", "is not a token index"),
        (9, b"\x02", "version 2"),
        (17, b"\x63", "code 99 is not one of"),
        (17, b"\x06", "code 6 is not one of"),  # float64
        (17, b"\x04", "sequence 1 has a pointer"),  # another item size
        (18, b"\x15", "21 sequences"),
        (18, b"\xff" * 8, "18,446,744,073,709,551,615 sequences"),
        (26, b"\xff" * 8, "18,446,744,073,709,551,615 documents"),
        (34, b"\x04", "sequence 1 has a pointer that is not the sum"),
        (34, b"\xff\xff\xff\xff", "sequence 0 has a length below 0"),
        (34 + 4 * 20, b"\x02", "sequence 0 has a pointer"),
        (34 + 4 * 20 + 8 * 10 + 7, b"\x80", "sequence 10 has a pointer"),
        (34 + 12 * 20, b"\x01", "the document borders run from 1 to 20, not from 0 to the 20"),
        (
            34 + 12 * 20 + 8 * 5,
            b"\x63",
            "document border 5 lies before the one before it or beyond the sequences",
        ),
        (34 + 12 * 20 + 8 * 20, b"\x13", "run from 0 to 19, not from 0 to the 20 sequences"),
    ],
)
@pytest.mark.fault("F24")
def test_damaged(pair, offset, value, words, full):
    prefix, idx, _ = pair
    content = bytearray(idx.read_bytes())
    content[offset : offset + len(value)] = value
    idx.write_bytes(content)
    refused(words, prefix)


@pytest.mark.parametrize(("code", "dtype"), [(4, np.int32), (8, np.uint16)])
def test_the_older_format(tmp_path, code, dtype, full):
    """It says what the newer one says; merged, it is the newer one."""
    documents = [[[1, 2, 3], [4]], [], [[9] * 50], [[65535 // code]]]
    newer = write_pair(tmp_path / "newer", documents, dtype)
    older = write_older(tmp_path / "older", documents, code, dtype)
    merge_pairs([older], str(tmp_path / "merged"), False)
    for ending in (".idx", ".bin"):
        assert Path(f"{tmp_path}/merged{ending}").read_bytes() == Path(newer + ending).read_bytes()
    a, b = Indexed(newer), Indexed(older)
    assert isinstance(b.sizes.base, memoryview) and b.sizes.tolist() == a.sizes.tolist()
    for number in range(4):
        assert a.document(number).tolist() == b.document(number).tolist()
    assert [a.sequence_at(token) for token in range(55)] == [*map(b.sequence_at, range(55))]
    facts, others = (summary(data, 3, None) | {"prefix": ""} for data in (a, b))
    assert (facts.pop("format"), others.pop("format")) == ("mmap", "lazy/cached")
    assert facts == others
    found = check_pair(older, 65536, None, False, lambda size: None)
    assert not found.problems and f"({np.dtype(dtype).name}, lazy/cached format)" in found.line("")


@pytest.fixture
def older(tmp_path):
    return write_older(tmp_path / "x", [[[i, i, i]] for i in range(20)])


@pytest.mark.fault("F24")
def test_truncated_older_format(older, full):
    idx, bin_ = Path(f"{older}.idx"), Path(f"{older}.bin")
    whole = idx.read_bytes()
    for cut in (8, 55, 56, 100, len(whole) - 1):
        idx.write_bytes(whole[:cut])
        refused("x.idx is damaged", older)
    idx.write_bytes(whole + b"\x00")
    refused("damaged", older)
    idx.write_bytes(whole)
    bin_.write_bytes(bin_.read_bytes()[:-1])
    refused("x.bin has 239 bytes, but its .idx describes 240", older)


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (8, b"\x02", "version 2"),
        (16, b"\x06", "code 6 is not one of"),
        (16, b"\x08", "tokens of 4 bytes, but uint16 has 2"),
        (24, b"\x00", "tokens of 0 bytes, but int32 has 4"),
        (32, b"\xff" * 8, "18,446,744,073,709,551,615 sequences have 20 sizes"),
        (32, b"\xff" * 16, "18,446,744,073,709,551,615 sequences and 21 documents need"),
        (48, b"\xff" * 8, "18,446,744,073,709,551,615 documents"),
        (56 + 8 * 3, b"\x09", "sequence 3 does not have one dimension"),
        (224, b"\x01", "sequence 0 has a pointer"),
        (224 + 8 * 7 + 7, b"\x80", "sequence 7 has a pointer"),
        (224 + 8 * 20, b"\x01", "the last offset is 1, but the sequences have 60 tokens"),
        (392, b"\x04", "sequence 1 has a pointer that is not the sum"),
        (392, b"\xff" * 8, "sequence 0 has a length below 0"),
        (392 + 8 * 5 + 4, b"\x01", "sequence 5 has a length above 2,147,483,647"),
        (552 + 8 * 5, b"\x63", "document border 5 lies before the one before it or beyond"),
    ],
)
@pytest.mark.fault("F24")
def test_damaged_older_format(older, offset, value, words, full):
    idx = Path(f"{older}.idx")
    content = bytearray(idx.read_bytes())
    content[offset : offset + len(value)] = value
    idx.write_bytes(content)
    refused(words, older)


@pytest.mark.fault("F24")
def test_other_inconsistencies(pair):
    prefix, idx, bin_ = pair
    content = idx.read_bytes()
    idx.write_bytes(content + b"\x00" * 20)
    refused("multimodal", prefix)
    # the last size has no pointer after it: only the .bin's length tells
    changed = bytearray(content)
    changed[34 + 4 * 19] = 2
    idx.write_bytes(changed)
    refused("describes 118", prefix)
    idx.write_bytes(HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, 0, 0))
    bin_.write_bytes(b"")
    refused("the document borders run from -1 to 0", prefix)


def test_large_files_are_checked_in_places(tmp_path, monkeypatch):
    """A full check finds all damage, a quick one moved pointers and files of other sizes."""
    n = 3000
    prefix = write_pair(tmp_path / "x", [[[1] * (1 + k % 5)] for k in range(n)], np.int32)
    monkeypatch.setattr(indexed_module, "PROBE", 8)
    monkeypatch.setattr(indexed_module, "BLOCK", 100)
    idx, whole = tmp_path / "x.idx", (tmp_path / "x.idx").read_bytes()
    reads = []
    real = indexed_module.FileColumn.read
    monkeypatch.setattr(
        indexed_module.FileColumn, "read", lambda *a: reads.append(len(x := real(*a))) or x
    )
    monkeypatch.setattr(indexed_module, "FULL", 1000)
    quick = Indexed(prefix)
    assert sum(reads) < 3 * 64 * 9 + 9
    assert np.array_equal(quick.sizes, Indexed(prefix, in_full=True).sizes)
    for at in range(0, n, 77):
        content = bytearray(whole)
        content[34 + 4 * at] += 1
        idx.write_bytes(content)
        refused(f"sequence {at + 1:,} has a pointer that is not the sum", prefix, in_full=True)
        # All pointers that follow are changed too: only the length of the .bin shows it.
        np.frombuffer(content, "<i8", n, 34 + 4 * n)[at + 1 :] += 4
        idx.write_bytes(content)
        refused("x.bin has 36,000 bytes, but its .idx describes 36,004", prefix)
    assert len(indexed_module.ranges_to_check(1001, False)) == 64


def test_a_hundred_million_documents_open_immediately(tmp_path):
    """The documents are empty, in a sparse file."""
    n = 10**8
    (tmp_path / "x.bin").write_bytes(b"")
    with open(tmp_path / "x.idx", "wb") as idx:
        idx.write(HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, n, n + 1))
        idx.seek(HEADER.size + 12 * n + 8 * n)
        idx.write(n.to_bytes(8, "little"))

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def seconds_to_open():
        start = time.thread_time()  # other threads of the test process don't count
        assert Indexed(tmp_path / "x").tokens_of(0, n) == 0
        return time.thread_time() - start

    before = resident()
    opened = Indexed(tmp_path / "x")
    assert resident() - before < 50e6
    assert min(seconds_to_open() for _ in range(5)) < 0.1  # the least of five, on a busy machine
    assert (len(opened), int(opened.doc_idx[-1])) == (n, n)


@pytest.mark.fault("F26")
def test_fingerprint_tells_large_data_apart(tmp_path):
    marks = []
    for changed in (0, 50_000, 99_998):
        lengths = np.ones(100_000, dtype=np.int64)  # an .idx above the size that is hashed in full
        lengths[changed] = 2
        with Writer(tmp_path / "big", np.uint8) as writer:
            writer.append(
                np.zeros(lengths.sum(), np.uint8), lengths, np.arange(1, len(lengths) + 1)
            )
        marks.append(fingerprint(tmp_path / "big"))
    assert len(set(marks)) == 3


def test_disk_full(pair):
    """A limit on the size of files fails writes as a full disk does."""
    prefix, idx, bin_ = pair
    before = idx.read_bytes(), bin_.read_bytes()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for size in (5_000_000, 500):  # fails in add; fails in the last flush
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (400, old[1]))
            refused_write = pytest.raises(
                UserError, match="cannot be written .*nothing was published"
            )
            with refused_write as caught, Writer(prefix, np.uint16) as writer:
                writer.add(np.zeros(size, np.uint16))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert caught.value.status == IO
        assert (idx.read_bytes(), bin_.read_bytes()) == before
        assert len(list(idx.parent.iterdir())) == 2
    signal.signal(signal.SIGXFSZ, ignored)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error_of(lambda: Writer(tmp_path / "file" / "x", np.uint16), IO)


def write_and_be_killed(prefix, limit):
    """Write a pair, and end at the call number `limit` of those that publish it."""
    calls = itertools.count(1)

    def counted(real):
        def call(*args, **kwargs):
            if next(calls) == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    write_pair(prefix, [[[7] * 50]])


@pytest.mark.fault("F23")
def test_killed_at_every_point_of_publishing(pair):
    """There is the old pair, the new pair or no .idx, never an .idx with a .bin of another."""
    prefix, idx, bin_ = pair
    seen, fork = [], multiprocessing.get_context("fork")
    for limit in range(1, 20):
        write_pair(prefix, [[[i, i, i]] for i in range(20)])
        process = fork.Process(target=write_and_be_killed, args=(prefix, limit))
        process.start()
        process.join()
        seen.append("no .idx" if not idx.exists() else f"{len(Indexed(prefix))} sequences")
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert process.exitcode == 0 and seen[-1] == "1 sequences"
    assert set(seen) == {"20 sequences", "no .idx", "1 sequences"}
