"""Reading for `preprocess`: pieces of lines, compressed streams, archives, tables, and damage."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import sys
import tarfile
import time
import tracemalloc
import zlib
from dataclasses import replace
from itertools import islice, pairwise, repeat

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from corpora import line

from helpers import error_of
from meshwright.base.errors import IO, UNAVAILABLE, UserError
from meshwright.config.text_inputs import SEPARATOR, TextInputs
from meshwright.data.text import containers, divide, limits, reading, tables
from meshwright.data.text.divide import LINES, Slice, by_separator
from meshwright.data.text.inputs import find_inputs
from meshwright.data.text.jsonl import lines_of
from meshwright.data.text.pieces import cut_inputs
from meshwright.data.text.records import CUT_SHORT, Document, ReadOptions, Rejected


def texts_of(*paths, keys=("text",)):
    return list(reading.read_texts(TextInputs(input=[str(p) for p in paths], json_keys=list(keys))))


def pieces_of(*paths, ranks=(0, 1), **flags):
    given = TextInputs(input=[str(p) for p in paths], **flags)
    return list(cut_inputs(find_inputs(given).inputs, given, *ranks))


@pytest.mark.parametrize("size", [1, 3, 64])
def test_pieces_of_a_file_hold_each_line_once(tmp_path, monkeypatch, size):
    """Wherever lines and pieces begin, the lines of all pieces together are those of the file."""
    rng = random.Random(size)
    for _ in range(50):
        content = b"\n".join(
            b"x" * rng.choice([0, 0, 1, 2, 5, 40]) for _ in range(rng.randrange(12))
        )
        content += b"\n" * rng.randrange(2)
        path = tmp_path / "in"
        path.write_bytes(content)
        monkeypatch.setattr(limits, "REST", rng.choice([1, 3, 1000]))
        borders = pairwise([*range(0, len(content), size), len(content)])
        slices = [divide.read_range(str(path), begin, end, LINES) for begin, end in borders]
        assert b"".join(one.content for one in slices) == content
        lines = content.removesuffix(b"\n").split(b"\n") if content else []
        assert [
            bytes(line) for one in slices for line in lines_of(one.data, one.first, one.stop)
        ] == lines


PACK = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": zstandard.ZstdCompressor().compress,
}


def kinds_and_places(path):
    return [
        (getattr(one, "reason", one), place.removeprefix(f"{path}:"))
        for one, place in units_in(path)
    ]


@pytest.mark.parametrize("kind", PACK)
def test_what_follows_a_compressed_stream_is_reported(tmp_path, kind):
    """Plain lines or a damaged stream are reported after the complete part; zeros are padding."""
    first, second = PACK[kind](line("a") + b"\n"), PACK[kind](line("b"))
    path = tmp_path / "a"
    for behind in (
        line("b"),
        b"\0" * 8 + line("b"),
        b"?" + second[1:],
        second[:3],
        second[: len(second) // 2],
    ):
        path.write_bytes(first + behind)
        whole, (why, _) = units_in(path)
        assert whole == ("a", f"{path}:1") and why
    for behind in (b"", bytes(512), bytes(1 << 19)):
        path.write_bytes(first + behind + second + behind)
        assert texts_of(path) == ["a", "b"]
    path.write_bytes(first[:12] + b"\xaa" * 300)
    ((why, _),) = units_in(path)
    assert why.reason == CUT_SHORT and why.detail


@pytest.mark.parametrize(
    "content", [b"BZh is how bzip2 begins", b"PAR1 too", "BZh é".encode() * 200]
)
def test_a_text_that_begins_like_another_kind(tmp_path, content):
    (tmp_path / "a.tar").write_bytes(archive({"a.txt": content, "b.txt": b"b"}))
    assert texts_of(tmp_path / "a.tar") == [content.decode(), "b"]
    (tmp_path / "a").write_bytes(content)
    assert texts_of(tmp_path / "a") == [content.decode()]


def archive(files, mode="w"):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def test_archives_of_text_files(tmp_path):
    """As in openwebtext: an archive of compressed archives of text files."""
    inner = {f"{n}.txt": f"document {n} é\nof two lines".encode() for n in range(30)}
    first = archive(dict(list(inner.items())[:10]), "w:xz")
    second = lzma.compress(archive(dict(list(inner.items())[10:20])))
    outer = {"urls-0.xz": first, "urls-1.xz": second, **dict(list(inner.items())[20:])}
    path = tmp_path / "a.tar.xz"
    path.write_bytes(archive(outer, "w:xz"))
    assert texts_of(path) == [content.decode() for content in inner.values()]
    assert str(records_in(path)[3].place) == f"{path}:urls-0.xz/3.txt"


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_ends_with_its_zeros(tmp_path, mode):
    """A damaged or cut header, or missing zeros at the end, are reported; an archive may follow."""
    files, path = {f"{n}.txt": b"%d" % n for n in range(30)}, tmp_path / "a.tar"
    pack = gzip.compress if mode == "w:gz" else bytes
    whole = archive(files)
    assert len(whole) == 30 * 1024 + 1024 or not whole[30 * 1024 :].strip(b"\0")
    flipped = bytearray(whole)
    flipped[20 * 1024 + 130] ^= 1
    for content in (
        bytes(flipped),
        whole[: 20 * 1024],
        whole[: 20 * 1024 + 100],
        whole[: 20 * 1024 + 513],
    ):
        path.write_bytes(pack(content))
        *kept, (why, where) = units_in(path)
        assert (
            [one for one, _ in kept] == [str(n) for n in range(20)] and where == str(path) and why
        )
    for behind in (b"", bytes(1 << 15)):
        path.write_bytes(pack(whole + behind + whole))
        assert texts_of(path) == [str(n) for n in range(30)] * 2
    path.write_bytes(pack(whole + b"no archive" * 100))
    assert kinds_and_places(path)[29] == ("29", "29.txt") and len(kinds_and_places(path)) == 31


def test_a_damaged_member_costs_itself(tmp_path):
    """Also an archive in an archive; JSON lines before it are kept; a cut is reported once."""
    rng, path = random.Random(0), tmp_path / "a.tar"
    lines = b"".join(line(f"{n} {rng.randbytes(50).hex()}") + b"\n" for n in range(1000))
    packed, inner = gzip.compress(lines), archive({"x.txt": b"x", "y.txt": b"y"})
    files = {"a.txt": b"a", "b.txt.gz": packed[:-4000], "c.jsonl.gz": packed[:-4000]}
    files |= {"d.tar": inner[:1200], "e.txt": b"e", "f.bz2": b"BZh91AY&SY" + bytes(100)}
    path.write_bytes(archive(files))
    found = kinds_and_places(path)
    bad = "damaged member"
    count = sum(":" in place for _, place in found)
    assert count > 500 and found[2] == (json.loads(lines.splitlines()[0])["text"], "c.jsonl.gz:1")
    kinds, places = zip(*(one for one in found if ":" not in one[1]), strict=True)
    assert kinds == ("a", bad, bad, "x", bad, "e", bad)
    assert places == ("a.txt", "b.txt.gz", "c.jsonl.gz", "d.tar/x.txt", "d.tar", "e.txt", "f.bz2")
    path.write_bytes(archive({"a.txt": b"a", "b.tar": archive({"b.txt.gz": packed})})[:9000])
    found = units_in(path)
    assert [one for one, _ in found][:1] == ["a"] and [where for _, where in found[1:]] == [
        str(path)
    ]


def test_no_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert "--input - cannot be read: the standard input is closed" in error_of(
        lambda: texts_of("-"), IO
    )


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    (tmp_path / "a").write_bytes(line("a") + b"\n" + line("b"))
    whole = pieces_of(tmp_path / "a")
    os.truncate(tmp_path / "a", 9)
    message = error_of(lambda: list(whole[0].read(ReadOptions())))
    assert "a has become shorter while it was read: it ends at byte 9" in message


def test_tables(tmp_path):
    """Parquet files, a folder of them, and a data set as Hugging Face's library saves it."""
    rows = [f"row {n} é" for n in range(3000)]
    table = pyarrow.table({"id": range(3000), "text": rows, "title": [r.upper() for r in rows]})
    folder = tmp_path / "tables"
    (folder / "deeper").mkdir(parents=True)
    pyarrow.parquet.write_table(table.slice(0, 1000), folder / "a.parquet", row_group_size=70)
    pyarrow.parquet.write_table(table.slice(1000), folder / "deeper" / "b.parquet")
    assert texts_of(folder / "a.parquet") == rows[:1000]
    assert texts_of(folder) == rows
    assert texts_of(folder / "a.parquet", keys=("title", "text"))[:4] == [
        "ROW 0 É",
        "row 0 é",
        "ROW 1 É",
        "row 1 é",
    ]
    saved = tmp_path / "saved"
    saved.mkdir()
    for n, part in enumerate((table.slice(0, 1700), table.slice(1700))):
        with pyarrow.ipc.new_stream(str(saved / f"data-{n}.arrow"), table.schema) as out:
            out.write_table(part, max_chunksize=100)
    (saved / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": f"data-{n}.arrow"} for n in range(2)]})
    )
    assert texts_of(saved) == rows
    several = tmp_path / "several"
    several.mkdir()
    (several / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        UserError, match="holds several data sets; name one of them, such as .*several/train"
    ):
        texts_of(several)
    with pytest.raises(
        UserError,
        match="2 files: 2 tables with no column 'body'; choose one of text with --json-keys .text, title.$",
    ):
        texts_of(folder, keys=("body",))


def test_a_column_of_lists_is_refused_by_its_type(tmp_path):
    """A named table at once, with the columns of text; in a folder it is passed over."""
    lists, write = (
        pyarrow.table({"text": [["a"], ["b"]], "id": ["x", "y"], "n": [1, 2]}),
        pyarrow.parquet.write_table,
    )
    write(lists, tmp_path / "lists.parquet")
    choose = r"choose one of text with --json-keys \(id\), or write its text as a column first"
    with pytest.raises(
        UserError, match=rf"lists.parquet has list<.*string> in column 'text'; {choose}"
    ):
        texts_of(tmp_path / "lists.parquet")
    write(lists.select(["n"]), tmp_path / "numbers.parquet")
    encoded = pyarrow.array(["a", "b"]).dictionary_encode()
    write(pyarrow.table({"text": encoded}), tmp_path / "texts.parquet")
    assert texts_of(tmp_path) == ["a", "b"]
    passed = find_inputs(TextInputs(input=[str(tmp_path)])).passed.line()
    counts, *cures = passed.splitlines()
    assert re.fullmatch(
        r"passed .*: 1 table with list<.*string> in column 'text', 1 table with no column 'text'",
        counts,
    )
    assert re.fullmatch(rf"    .*/lists.parquet: {choose}", cures[0])
    assert cures[1:] == [f"    {tmp_path}/numbers.parquet: none of its columns is text: n"]


def records_in(path):
    return [
        record
        for piece in pieces_of(path)
        for record in piece.read(ReadOptions(separator=SEPARATOR))
    ]


def units_in(path):
    """Return the text of each document of a file, or why it has none, with its place."""
    records = records_in(path)
    return [(one.texts[0] if isinstance(one, Document) else one, place_of(one)) for one in records]


def place_of(record):
    return str(replace(record.place, note=""))


def rows_of(piece):
    (part,) = piece.parts
    return range(part.begin, part.end)


def texts_in(piece):
    return [record.texts[0] for record in piece.read(ReadOptions())]


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(limits, "PIECE", 20_000)
    monkeypatch.setattr(tables, "BATCH_BYTES", 3000)
    rng = random.Random(0)
    return pyarrow.table(
        {"text": [f"{n} {rng.randbytes(50).hex()}" for n in range(5000)], "n": range(5000)}
    )


def write_table(table, path, kind, cuts=(0, 3, 3, 2000, 2030, 2070, 5000)):
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2400, use_dictionary=False)
    else:
        with getattr(pyarrow.ipc, f"new_{kind}")(str(path), table.schema) as out:
            for begin, end in pairwise(cuts):
                out.write_batch(table.combine_chunks().to_batches()[0].slice(begin, end - begin))


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_pieces_of_a_table_are_alike_and_read_in_one_pass(tmp_path, table, kind, monkeypatch):
    """Small row groups are joined, large ones divided; any order gives the same rows."""
    path, rows = tmp_path / "t.arrow", table.column("text").to_pylist()
    write_table(table, path, kind)
    whole = pieces_of(path)
    ranges = [rows_of(piece) for piece in whole]
    assert [one.start for one in ranges] == [0, *(one.stop for one in ranges[:-1])] and ranges[
        -1
    ].stop == 5000
    assert len(whole) > 20 and max(map(len, ranges)) <= 200
    assert [one.done for one in whole] == sorted(one.done for one in whole)
    assert whole[-1].done >= path.stat().st_size - 8  # the end mark of a stream
    entered, real = [], tables._TableReader._enter
    monkeypatch.setattr(
        tables._TableReader,
        "_enter",
        lambda self, start: (entered.append(start), real(self, start))[1],
    )
    tables._reader.cache_clear()
    for one in [*whole[::2], *whole[1::2]]:
        assert texts_in(one) == [rows[n] for n in rows_of(one)]
    assert len(entered) <= 4 * len({one.parts[0].start for one in whole})
    assert str(list(whole[5].read(ReadOptions()))[2].place) == f"{path}: row {whole[5].begin + 3}"


def test_a_damaged_row_group_costs_what_follows_in_it(tmp_path, table, monkeypatch):
    """File and row are reported in any order of reading, and the next row group is read."""
    rows = table.column("text").to_pylist()
    write_table(table, tmp_path / "t", "parquet")
    content = bytearray((tmp_path / "t").read_bytes())
    at = len(content) // 4
    content[at : at + 20_000] = bytes(255 - byte for byte in content[at : at + 20_000])
    (tmp_path / "t").write_bytes(content)
    entered, real = [], tables._TableReader._enter
    monkeypatch.setattr(
        tables._TableReader,
        "_enter",
        lambda self, start: (entered.append(start), real(self, start))[1],
    )
    found = units_in(tmp_path / "t")
    assert len(entered) == 2  # what is known to be damaged is not read again for each piece
    kept = [one for one, _ in found if isinstance(one, str)]
    bad = [(one, place) for one, place in found if isinstance(one, Rejected)]
    first = next(n for n, (one, _) in enumerate(found) if isinstance(one, Rejected))
    assert kept == rows[:first] + rows[2400:] and bad
    assert {one.reason for one, _ in bad} == {"damaged table"}
    assert bad[0][
        1
    ] == f"{tmp_path / 't'}: row {first + 1}" and f"from row {first + 1:,} on" in str(bad[0][0])
    whole = pieces_of(tmp_path / "t")
    backwards = {one.begin: list(one.read(ReadOptions())) for one in whole[::-1]}
    assert backwards == {one.begin: list(one.read(ReadOptions())) for one in whole}


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
@pytest.mark.fault("F22")
def test_tables_damaged_anywhere_are_reported(tmp_path, table, kind):
    write_table(table, tmp_path / "whole", kind)
    whole, rng, reported = (tmp_path / "whole").read_bytes(), random.Random(3), 0
    for n in range(6):
        content = bytearray(whole)
        at = rng.randrange(8, len(whole) - 8)
        content[at : at + 200] = rng.randbytes(min(200, len(whole) - at))
        path = tmp_path / f"{n}.arrow"
        path.write_bytes(content if n % 3 else whole[:at])
        try:
            reported += any(not isinstance(one, str) for one, _ in units_in(path))
        except UserError as error:
            assert f"{n}.arrow" in str(error)
            reported += 1
    assert reported >= 2


def test_a_table_with_two_columns_of_a_name(tmp_path):
    table = pyarrow.table([["a"], ["b"], ["c"]], names=["text", "text", "id"])
    pyarrow.parquet.write_table(table, tmp_path / "t")
    message = error_of(lambda: texts_of(tmp_path / "t"))
    assert "t has 2 columns 'text'; choose one of text with --json-keys (id)" in message
    assert "t has no column 'body'" in error_of(lambda: texts_of(tmp_path / "t", keys=("body",)))
    assert "did you mean text id, with spaces?" in error_of(
        lambda: texts_of(tmp_path / "t", keys=("text,id",))
    )
    (tmp_path / "t.csv").write_text("text,text\na,b\n")
    assert "2 columns 'text'; give them different names" in error_of(
        lambda: texts_of(tmp_path / "t.csv")
    )
    assert texts_of(tmp_path / "t", keys=("id",)) == ["c"]


@pytest.mark.fault("F26")
def test_a_table_that_was_replaced_is_read_again(tmp_path):
    """Even by one of the same size and date."""
    for content in ("abc", "xyz"):
        pyarrow.parquet.write_table(pyarrow.table({"text": [content]}), tmp_path / "new")
        os.utime(tmp_path / "new", ns=(10**18, 10**18))
        os.replace(tmp_path / "new", tmp_path / "t")
        assert texts_of(tmp_path / "t") == [content]


@pytest.mark.parametrize(
    "foreign",
    ['{"a": 1}', "[1]", "{", "", '{"_data_files": 3, "splits": "x"}', '{"_data_files": [{}]}'],
)
def test_a_folder_with_files_of_other_programs(tmp_path, foreign):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "t.parquet")
    for name in ("state.json", "dataset_dict.json"):
        (tmp_path / name).write_text(foreign)
    assert texts_of(tmp_path) == ["a"]
    (tmp_path / "state.json").write_text(
        '{"_data_files": [{"filename": "t.parquet"}, {"filename": "gone.arrow"}]}'
    )
    message = error_of(lambda: texts_of(tmp_path))
    assert (
        f"state.json names 2 files, of which 1 are missing, such as {tmp_path}/gone.arrow"
        in message
    )


def test_links_and_devices_in_an_archive_are_skipped(tmp_path):
    path = tmp_path / "t.tar"
    path.write_bytes(archive({"../a.txt": b"a", "b.json": line("b")}))
    with tarfile.open(path, "a") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE):
            member = tarfile.TarInfo("link.json")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    assert kinds_and_places(path) == [("a", "../a.txt"), ("b", "b.json:1")]


def test_skippable_frames_of_zstd(tmp_path):
    """They may be anywhere; pzstd writes one first."""
    one, two = (zstandard.compress(line(name) + b"\n") for name in ("one", "two"))
    for number in (0x50, 0x5F):
        skipped = bytes([number, 0x2A, 0x4D, 0x18, 3, 0, 0, 0]) + b"abc"
        (tmp_path / "a").write_bytes(skipped + one + skipped + skipped + two + skipped)
        assert texts_of(tmp_path / "a") == ["one", "two"]


def test_several_layers_of_compression(tmp_path):
    (tmp_path / "b.tar").write_bytes(gzip.compress(gzip.compress(archive({"a.txt": b"b"}))))
    assert texts_of(tmp_path / "b.tar") == ["b"]
    packed = line("a")
    for _ in range(9):
        packed = gzip.compress(packed)
    (tmp_path / "a").write_bytes(packed)
    assert "compressed more than 4 times" in error_of(lambda: texts_of(tmp_path / "a"))


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
@pytest.mark.fault("F28")
@pytest.mark.promise("What a small file unpacks to is read in pieces of bounded size")
def test_a_small_file_that_unpacks_to_much(tmp_path, monkeypatch, kind):
    """300 MB in one line of a few kilobytes: one bad line, in bounded memory."""
    packer = {
        "gz": lambda: zlib.compressobj(1, wbits=31),
        "xz": lambda: lzma.LZMACompressor(preset=0),
        "zst": lambda: zstandard.ZstdCompressor(level=1).compressobj(),
    }[kind]()
    packed = packer.compress(line("a") + b"\n") + b"".join(
        packer.compress(bytes(1 << 20)) for _ in range(300)
    )
    (tmp_path / "a").write_bytes(packed + packer.compress(b"\n" + line("b")) + packer.flush())
    monkeypatch.setattr(limits, "LONGEST", 1 << 22)
    largest, real = [0], containers.chunks
    monkeypatch.setattr(
        containers, "chunks", lambda file: (largest.append(len(one)) or one for one in real(file))
    )
    tracemalloc.start()
    try:
        kinds = [kind for kind, _ in kinds_and_places(tmp_path / "a")]
        assert kinds == ["a", "longer than 4,194,304 bytes", "b"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(largest) <= limits.CHUNK and peak < 150 << 20


@pytest.mark.parametrize("division", [LINES, by_separator(SEPARATOR)], ids=["lines", "texts"])
@pytest.mark.fault("F28")
@pytest.mark.promise("What a small file unpacks to is read in pieces of bounded size")
def test_a_stream_without_line_ends_takes_linear_time(division):
    """Looking at each chunk again with the next takes seconds for lines, minutes for texts."""
    chunk, count = b"x" * (1 << 12), 1 << 12
    began = time.process_time()
    (cut,) = divide.cut_stream(repeat(chunk, count), limits.PIECE, division, Slice(""))
    assert len(cut.content) == len(chunk) * count
    assert time.process_time() - began < 0.5


def claims(kind, size, body=b""):
    """Return a member of a tar archive whose header claims another size than its body has."""
    info = tarfile.TarInfo("a.txt")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT) + body


@pytest.mark.parametrize("size", [1 << 62, 1 << 85, 1 << 40], ids=str)
@pytest.mark.parametrize(
    "kind",
    [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.CHRTYPE, b"S", b"?"],
)
@pytest.mark.fault("F28")
@pytest.mark.promise("What a small file unpacks to is read in pieces of bounded size")
def test_a_member_of_an_archive_that_claims_much(tmp_path, kind, size):
    """Neither skipping nor reading it goes on beyond the end, and what precedes it is kept."""
    whole, path = archive({"x.txt": b"x"})[:1024], tmp_path / "a.tar"
    path.write_bytes(whole + claims(kind, size, b"b" * 600))
    began = time.process_time()
    found = units_in(path)
    assert found[0] == ("x", f"{path}:x.txt") and all(
        where.startswith(str(path)) for _, where in found
    )
    assert time.process_time() - began < 1


def test_a_header_that_unpacks_to_much(tmp_path):
    """A name of a hundred megabytes, packed to a few kilobytes, and holes of an exabyte."""
    path = tmp_path / "a.tar.gz"
    packer = zlib.compressobj(1, wbits=31)
    packed = packer.compress(
        archive({"x.txt": b"x"})[:1024] + claims(tarfile.GNUTYPE_LONGNAME, 1 << 30)
    )
    packed += b"".join(packer.compress(b"n" * (1 << 20)) for _ in range(100))
    path.write_bytes(packed + packer.flush())
    tracemalloc.start()
    try:
        (kept, _), (why, where) = units_in(path)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert (
        kept == "x" and "a header of more than 1,048,576 bytes" in str(why) and where == str(path)
    )


def repeating(path, text, rows, **how):
    """Write a table whose rows all repeat one text, which is stored once."""
    texts = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array([text])
    )
    table = pyarrow.table({"text": texts})
    if path.suffix == ".arrow":
        with (
            pyarrow.OSFile(str(path), "wb") as file,
            pyarrow.ipc.new_file(file, table.schema) as writer,
        ):
            writer.write_table(table)
    else:
        sizes = {"data_page_size": 1 << 30, "dictionary_pagesize_limit": 1 << 30}
        pyarrow.parquet.write_table(
            table, path, store_schema=False, write_statistics=False, **sizes, **how
        )


@pytest.mark.parametrize("kind", ["zstd", "none", "arrow"])
@pytest.mark.fault("F28")
@pytest.mark.promise("What a small file unpacks to is read in pieces of bounded size")
def test_a_table_that_repeats_a_long_text(tmp_path, kind):
    """Rows are weighed by what they may unpack to: 8 GB here, mostly of less than a kilobyte."""
    path = tmp_path / ("a.arrow" if kind == "arrow" else "a.parquet")
    repeating(path, "a" * (1 << 20), 8192, compression=kind)
    pieces = pieces_of(path)
    assert len(pieces) == 8192 // tables.UNPACKED and rows_of(pieces[-1]).stop == 8192
    assert {len(rows_of(piece)) for piece in pieces} == {tables.UNPACKED}
    assert [len(record.texts[0]) for record in islice(pieces[1].read(ReadOptions()), 2)] == [
        1 << 20
    ] * 2


@pytest.mark.parametrize("dictionary", [True, False])
def test_a_column_that_unpacks_to_much(tmp_path, monkeypatch, dictionary):
    """Neither is unpacked: a large dictionary, and a large page in a few bytes."""
    monkeypatch.setattr(tables, "DICTIONARY", 1 << 20)
    path = tmp_path / "a.parquet"
    texts = pyarrow.table({"text": ["a" * (5 << 20)]})
    options = {
        "use_dictionary": dictionary,
        "dictionary_pagesize_limit": 1 << 30,
        "write_statistics": False,
    }
    pyarrow.parquet.write_table(texts, path, compression="brotli", **options)
    (record,) = records_in(path)
    assert record.reason == CUT_SHORT and "would unpack to" in record.detail


def test_a_json_array_is_reported_once(tmp_path):
    many = [{"text": str(n)} for n in range(5)]
    path = tmp_path / "a.json"
    for content in (json.dumps(many), json.dumps(many, indent=1)):
        path.write_text(content)
        first, *others = [str(one) for one, _ in units_in(path) if isinstance(one, Rejected)]
        assert "one object a line is needed: jq -c '.[]'" in first and "jq" not in "".join(others)
    path.write_text("[Chapter 1]\n")
    assert "jq" not in str(units_in(path)[0][0])


def test_a_table_in_a_stream_is_reported(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"PAR1\x15\x04\x15"))
    assert "a.gz is a table (parquet) in a stream" in error_of(lambda: texts_of(tmp_path / "a.gz"))


def test_missing_packages(tmp_path, monkeypatch):
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd....")
    (tmp_path / "a.parquet").write_bytes(b"PAR1\x15\x04\x15")
    for name in ("zstandard", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for name, package in (("a.zst", "zstandard"), ("a.parquet", "pyarrow")):
        message = error_of(lambda name=name: texts_of(tmp_path / name), UNAVAILABLE)
        assert f"needs the package {package}: pip install 'meshwright[data]'" in message
