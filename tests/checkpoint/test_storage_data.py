"""Token files in object storage: their bytes are right or refused, whatever changes meanwhile."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import TINY_FLAGS, error_of
from meshwright.__main__ import main
from meshwright.base.errors import BAD_DATA, USAGE
from meshwright.base.storage import addresses, copies, store
from meshwright.config.schema import Data, TrainConfig
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer
from meshwright.data.loader import Samples
from meshwright.training.before.resolve import NO_VOCABULARY, identity_of
from s3 import Bucket, serving_bucket

pytest.importorskip("obstore")
ADDRESS = "s3://bucket/data/text"
BLOCK = 4096


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(copies, "BLOCK", BLOCK)
    copies.sparse_copy.cache_clear()
    with serving_bucket(monkeypatch) as served:
        yield served
    copies.sparse_copy.cache_clear()


@pytest.fixture
def versions(bucket: Bucket, tmp_path: Path) -> dict[str, dict[str, bytes]]:
    """Return two pairs of token files of the same lengths, of which storage has the first."""
    made = {
        name: write_pair(tmp_path / name, seed) for seed, name in enumerate(("first", "second"))
    }
    bucket.objects |= made["first"]
    return made


def write_pair(folder: Path, seed: int, tokens: int = 1_000) -> dict[str, bytes]:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    with Writer(str(folder / "text"), np.uint16) as writer:
        for _ in range(8):
            writer.add(rng.integers(0, 64, tokens))
            writer.end_document()
    return {f"data/text.{end}": (folder / f"text.{end}").read_bytes() for end in ("bin", "idx")}


def start() -> Indexed:
    """Open the files as a new process does."""
    copies.sparse_copy.cache_clear()
    store.forget()
    copies.prepare_tokens(local())
    return Indexed(local())


def local() -> str:
    return addresses.localize(ADDRESS)


def read(indexed: Indexed, begin: int = 0, end: int | None = None) -> bytes:
    end = len(indexed.tokens) if end is None else end
    indexed.need([(begin, end)])
    return indexed.tokens[begin:end].tobytes()


def test_a_file_that_is_replaced_during_a_run_ends_it_by_name(
    bucket: Bucket, versions: dict[str, dict[str, bytes]]
) -> None:
    first, second = (versions[name]["data/text.bin"] for name in ("first", "second"))
    indexed = start()
    assert read(indexed, 0, 10) == first[:20]
    bucket.objects["data/text.bin"] = second
    assert "s3://bucket/data/text.bin has changed" in error_of(lambda: read(indexed), BAD_DATA)
    bucket.objects["data/text.bin"] = first
    assert read(start()) == first
    bucket.objects["data/text.bin"] = second
    assert read(start()) == second


def test_an_index_that_is_replaced_while_it_is_copied_is_refused(
    bucket: Bucket, versions: dict[str, dict[str, bytes]]
) -> None:
    def replace(method: str, key: str) -> None:
        if key.endswith(".idx"):
            bucket.objects |= versions["second"]
            bucket.objects["data/text.idx"] = bytes(len(bucket.objects["data/text.idx"]))

    bucket.faults = replace
    assert "s3://bucket/data/text.idx has changed" in error_of(start, BAD_DATA)
    bucket.faults = lambda method, key: None
    bucket.objects |= versions["second"]
    assert read(start()) == versions["second"]["data/text.bin"]


def test_a_run_trains_on_one_version_or_ends(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = (write_pair(tmp_path / name, seed, 100_000) for seed, name in enumerate("ab"))
    bucket.objects |= first
    given = [word for word in TINY_FLAGS if word != "--mock-data"]
    read_samples = Samples.read

    def replace_and_read(samples: Samples, numbers: list[int]) -> Any:
        bucket.objects |= second
        return read_samples(samples, numbers)

    monkeypatch.setattr(Samples, "read", replace_and_read)
    words = ["--data-path", ADDRESS, "--split=90,10,0", "--save", str(tmp_path / "run")]
    assert main(["train", *given, *words]) == BAD_DATA
    assert "s3://bucket/data/text.bin has changed while it was read" in capsys.readouterr().err


def test_a_copy_without_its_map_is_refused_and_made_anew(
    bucket: Bucket, versions: dict[str, dict[str, bytes]]
) -> None:
    read(start(), 0, 10)
    copies.map_of(Path(f"{local()}.bin")).unlink()
    copies.sparse_copy.cache_clear()
    assert "no map of its blocks" in error_of(lambda: Indexed(local()), BAD_DATA)
    assert read(start()) == versions["first"]["data/text.bin"]


def test_blocks_that_a_crash_has_lost_are_read_again(
    bucket: Bucket, versions: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map has reached the disk, and the blocks have not; the machine starts twice since."""
    expected = versions["first"]["data/text.bin"]
    assert read(start()) == expected
    lose_blocks()
    bucket.log.clear()
    monkeypatch.setattr(copies, "boot_id", lambda: "second")
    read(start(), 0, 10)  # the first block is right, the others are not looked at
    monkeypatch.setattr(copies, "boot_id", lambda: "third")
    assert read(start()) == expected
    blocks = -(-len(expected) // BLOCK)
    assert [key for _, key in bucket.log].count("data/text.bin") == blocks - 1


def lose_blocks() -> None:
    """Lose all blocks but the first."""
    size = os.path.getsize(f"{local()}.bin")
    os.truncate(f"{local()}.bin", BLOCK)
    os.truncate(f"{local()}.bin", size)


def no_boot_id() -> str:
    raise FileNotFoundError


def test_blocks_are_summed_once_after_the_machine_has_started(
    bucket: Bucket, versions: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = versions["first"]["data/text.bin"]
    blocks = -(-len(expected) // BLOCK)
    summed, checksum = [], copies.checksum
    monkeypatch.setattr(copies, "checksum", lambda block: summed.append(1) or checksum(block))
    read(start())
    for boot_id, count in ((copies.boot_id, 0), (lambda: "second", blocks), (lambda: "second", 0)):
        monkeypatch.setattr(copies, "boot_id", boot_id)
        summed.clear()
        bucket.log.clear()
        assert read(start()) == expected
        assert "data/text.bin" not in [key for _, key in bucket.log]
        assert len(summed) == 2 * count, boot_id  # a mark is made anew


def test_blocks_are_always_summed_where_the_time_of_the_start_is_unknown(
    bucket: Bucket, versions: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "boot_id", no_boot_id)
    read(start())
    lose_blocks()
    assert read(start()) == versions["first"]["data/text.bin"]


def test_a_copy_of_the_folder_that_lacks_blocks_reads_them_again(
    bucket: Bucket,
    versions: dict[str, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process has filled it meanwhile: the .bin was copied before its map."""
    read(start())
    shutil.copytree(tmp_path / "cache", tmp_path / "copied")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copied"))
    lose_blocks()
    assert read(start()) == versions["first"]["data/text.bin"]


def test_files_beside_a_pair_leave_its_blocks_here(
    bucket: Bucket, versions: dict[str, dict[str, bytes]]
) -> None:
    """Neighbours may have the same beginning, also as large files; the tokenizer is copied anew."""
    tokenizer = "data/text.tokenizer/meta.json"
    bucket.objects[tokenizer] = b"first"
    read(start())
    beside = {"data/text.v2.bin": b"v2", "data/text.v2.idx": b"v2", "data/text.origin.json": b"{}"}
    bucket.objects |= beside | {tokenizer: b"second"}
    bucket.log.clear()
    assert read(start()) == versions["first"]["data/text.bin"]
    assert {key for _, key in bucket.log if key} == {tokenizer}
    assert Path(f"{local()}.tokenizer/meta.json").read_bytes() == b"second"
    bucket.log.clear()
    start()
    assert not {key for _, key in bucket.log if key}


def test_a_copy_that_was_made_anew_is_read_in_the_same_process(
    bucket: Bucket, versions: dict[str, dict[str, bytes]]
) -> None:
    read(start())
    bucket.objects |= versions["second"]
    copies.prepare_tokens(local())
    assert read(Indexed(local())) == versions["second"]["data/text.bin"]


def test_a_block_that_was_not_written_does_not_count(
    bucket: Bucket, versions: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed = start()
    write = os.pwrite

    def fill_disk(fd: int, data: bytes, at: int) -> int:
        if len(data) > copies.MARK:
            raise OSError(28, "No space left on device")
        return write(fd, data, at)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as refused:
        patch.setattr(os, "pwrite", fill_disk)
        read(indexed, 0, 10)
    assert refused.value.filename == f"{local()}.bin"
    marks = copies.map_of(Path(f"{local()}.bin")).read_bytes().partition(b"\n")[2]
    assert not any(marks)
    assert read(indexed) == versions["first"]["data/text.bin"]


def test_a_copy_that_is_replaced_after_it_was_mapped_is_not_read_as_zeros(
    bucket: Bucket, versions: dict[str, dict[str, bytes]]
) -> None:
    indexed = start()
    read(indexed)
    bucket.objects |= versions["second"]
    start()  # another process, on the same machine
    assert "was replaced while it was read" in error_of(lambda: read(indexed), BAD_DATA)


def test_ranks_compare_the_objects_that_they_have_copied(
    bucket: Bucket, versions: dict[str, dict[str, bytes]]
) -> None:
    config = TrainConfig(data=Data(data_path=[local()]))
    start()
    before = identity_of(config, NO_VOCABULARY)
    bucket.salts["data/text.bin"] = b"another version"
    start()
    differing = {
        name for name, value in identity_of(config, NO_VOCABULARY).items() if before[name] != value
    }
    assert differing == {f"--data-path {ADDRESS} (its objects)"}


def test_documents_are_read_before_they_are_scored(
    bucket: Bucket, versions: dict[str, dict[str, bytes]]
) -> None:
    indexed = start()
    documents = [indexed.document(n).tobytes() for n in range(8)]
    assert b"".join(documents) == versions["first"]["data/text.bin"]


def test_a_map_of_an_earlier_release_is_not_believed(
    bucket: Bucket, versions: dict[str, dict[str, bytes]]
) -> None:
    start()
    copies.map_of(Path(f"{local()}.bin")).write_bytes(b"\1" * 20)
    copies.sparse_copy.cache_clear()
    assert "no map of its blocks" in error_of(lambda: Indexed(local()), BAD_DATA)
    assert read(start()) == versions["first"]["data/text.bin"]


def test_commands_for_local_files_refuse_a_sparse_copy(
    bucket: Bucket, versions: dict[str, dict[str, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    assert main(["data", "verify", local()]) == USAGE
    assert "with holes between them; copy both objects" in capsys.readouterr().err
