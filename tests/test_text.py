"""What `preprocess` reads: pieces of lines, compressed streams, archives, tables; and what is said of damaged ones."""

import bz2
import gzip
import io
import json
import lzma
import random
import sys
import tarfile

import pytest

from conftest import tokens_of
from meshwright import preprocess
from meshwright.config import Preprocess, PreprocessConfig, Tokenizer
from meshwright.data import containers, sentences, text
from meshwright.data.indexed import Indexed
from meshwright.data.text import BadLine, lines_of, look, pieces, read_place, units
from meshwright.errors import UNAVAILABLE, UserError


def line(text, **more):
    return json.dumps({"text": text, **more}, ensure_ascii=False).encode()


def texts_of(*paths, keys=("text",)):
    return list(text.read_texts([str(p) for p in paths], list(keys)))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_pieces_of_a_file_hold_each_line_once(tmp_path, monkeypatch, size):
    """However lines and pieces lie: the lines that begin in each piece are together those of the file."""
    rng = random.Random(size)
    for _ in range(50):
        content = b"\n".join(b"x" * rng.choice([0, 0, 1, 2, 5, 40]) for _ in range(rng.randrange(12)))
        content += b"\n" * rng.randrange(2)
        path = tmp_path / "in"
        path.write_bytes(content)
        monkeypatch.setattr(text, "REST", rng.choice([1, 3, 1000]))
        places = [read_place(str(path), a, min(a + size, len(content))) for a in range(0, len(content), size)]
        found = [data[first:stop] for data, first, stop in places]
        assert b"".join(found) == content
        assert [bytes(one) for place in places for one in lines_of(*place)] == content.removesuffix(b"\n").split(
            b"\n"
        ) * bool(content)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_a_stream_is_cut_at_line_ends(size):
    rng = random.Random(size)
    for _ in range(200):
        content = b"\n".join(b"x" * rng.choice([0, 1, 5, 40]) for _ in range(rng.randrange(12)))
        chunks, at = [], 0
        while at < len(content):
            step = rng.randrange(1, 20)
            chunks.append(content[at : at + step])
            at += step
        found = list(text.cut(iter(chunks), size))
        assert b"".join(found) == content
        assert all(part.endswith(b"\n") for part in found[:-1])


def test_a_line_too_long_is_one_bad_line(tmp_path, monkeypatch):
    """In a file and in a stream; its neighbours are kept, and it is never held whole."""
    monkeypatch.setattr(text, "LONGEST", 5000)
    monkeypatch.setattr(text, "PIECE", 1000)
    monkeypatch.setattr(text, "REST", 100)
    content = line("a") + b"\n" + line("z" * 9000) + b"\n" + line("b") + b"\n" + line("y" * 8000)
    (tmp_path / "plain").write_bytes(content)
    with gzip.open(tmp_path / "packed", "wb") as file:
        file.write(content)
    monkeypatch.setattr(containers, "CHUNK", 700)
    for name in ("plain", "packed"):
        found = [one for piece in pieces(look([str(tmp_path / name)])) for one in units(piece, ["text"])]
        kinds = [one.kind if isinstance(one, BadLine) else one[0] for one in found]
        assert kinds == ["a", "longer than 5,000 bytes", "b", "longer than 5,000 bytes"]


PACK = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}


@pytest.mark.parametrize("kind", [*PACK, "zst"])
def test_compressed_lines(tmp_path, monkeypatch, kind):
    """Known by their first bytes, whatever their name; several members one after the other; through a pipe too."""
    import zstandard

    pack = PACK.get(kind) or zstandard.ZstdCompressor().compress
    parts = [b"".join(line(f"{n} of {m} é") + b"\n" for n in range(500)) for m in range(3)]
    wanted = [f"{n} of {m} é" for m in range(3) for n in range(500)]
    packed = b"".join(pack(part) for part in parts)
    (tmp_path / "any.name").write_bytes(packed)
    assert texts_of(tmp_path / "any.name") == wanted
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(packed)))
    assert texts_of("-") == wanted
    for share in (0.2, 0.5, 0.9, 0.999):  # cut short: all whole lines before that, and then why
        (tmp_path / "cut").write_bytes(packed[: int(len(packed) * share)])
        found = list(pieces(look([str(tmp_path / "cut")])))
        assert found[-1].kind == "broken"
        kept = [one[0] for piece in found[:-1] for one in units(piece, ["text"])]
        assert kept == wanted[: len(kept)]
        assert len(kept) >= {"bz2": 0, "zst": 0, "xz": 0}.get(kind, 200) * (share > 0.5)
        with pytest.raises(UserError, match="is cut short or damaged"):
            texts_of(tmp_path / "cut")


def archive(files, mode="w"):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def test_archives_of_text_files(tmp_path):
    """As openwebtext's: an archive of compressed archives of text files."""
    inner = {f"{n}.txt": f"document {n} é\nof two lines".encode() for n in range(30)}
    first = archive(dict(list(inner.items())[:10]), "w:xz")
    second = lzma.compress(archive(dict(list(inner.items())[10:20])))
    outer = {"urls-0.xz": first, "urls-1.xz": second, **dict(list(inner.items())[20:])}
    for name, content in {
        "a.tar": archive(outer),
        "a.tar.xz": archive(outer, "w:xz"),
        "a.tgz": archive(outer, "w:gz"),
    }.items():
        (tmp_path / name).write_bytes(content)
        assert texts_of(tmp_path / name) == [content.decode() for content in inner.values()]
    (piece,) = pieces(look([str(tmp_path / "a.tar")]))
    assert text.place_of(piece, 3, 1) == f"{tmp_path / 'a.tar'}:urls-0.xz/3.txt"
    whole = (tmp_path / "a.tar.xz").read_bytes()
    (tmp_path / "cut.tar.xz").write_bytes(whole[: len(whole) // 2])
    assert list(pieces(look([str(tmp_path / "cut.tar.xz")])))[-1].kind == "broken"
    (tmp_path / "latin.tar").write_bytes(archive({"x.txt": b"caf\xe9"}))
    with pytest.raises(UserError, match=r"latin.tar:x.txt: not UTF-8 \(byte 0xe9"):
        texts_of(tmp_path / "latin.tar")


def test_tables(tmp_path):
    """Parquet files, a folder of them, and a data set as Hugging Face's library saves it."""
    import pyarrow
    import pyarrow.parquet

    rows = [f"row {n} é" for n in range(3000)]
    table = pyarrow.table({"id": range(3000), "text": rows, "title": [r.upper() for r in rows]})
    folder = tmp_path / "tables"
    (folder / "deeper").mkdir(parents=True)
    pyarrow.parquet.write_table(table.slice(0, 1000), folder / "a.parquet", row_group_size=70)
    pyarrow.parquet.write_table(table.slice(1000), folder / "deeper" / "b.parquet")
    assert texts_of(folder / "a.parquet") == rows[:1000]
    assert texts_of(folder) == rows
    assert texts_of(folder / "a.parquet", keys=("title", "text"))[:4] == ["ROW 0 É", "row 0 é", "ROW 1 É", "row 1 é"]
    saved = tmp_path / "saved"
    saved.mkdir()
    for n, part in enumerate((table.slice(0, 1700), table.slice(1700))):
        with (
            pyarrow.OSFile(str(saved / f"data-{n}.arrow"), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(part, max_chunksize=100)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"data-{n}.arrow"} for n in range(2)]}))
    assert texts_of(saved) == rows
    several = tmp_path / "several"
    several.mkdir()
    (several / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="holds several data sets: name one of them, such as .*several/train"):
        texts_of(several)
    with pytest.raises(UserError, match="has no column 'body': --json-keys names one of id, text, title"):
        texts_of(folder, keys=("body",))
    nulls = pyarrow.table({"text": ["a", None, "b"]})
    pyarrow.parquet.write_table(nulls, tmp_path / "nulls.parquet")
    with pytest.raises(UserError, match=r"nulls.parquet: row 2: null under 'text'"):
        texts_of(tmp_path / "nulls.parquet")
    (tmp_path / "cut.parquet").write_bytes((folder / "a.parquet").read_bytes()[:3000])
    with pytest.raises(UserError, match="cut.parquet cannot be read"):
        texts_of(tmp_path / "cut.parquet")


def test_shares_of_several_ranks_are_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PIECE", 100)
    paths = []
    for n in range(4):
        content = b"".join(line(f"{n}.{k}") + b"\n" for k in range(100 + 50 * n))
        paths.append(str(tmp_path / f"{n}"))
        (tmp_path / f"{n}").write_bytes(gzip.compress(content) if n == 2 else content)
    inputs = look(paths)
    whole = list(pieces(inputs))
    for size in (1, 2, 3, 5, 50):
        parts = [list(text.shared(inputs, rank, size)) for rank in range(size)]
        assert [piece for part in parts for piece in part] == whole
        if size <= 3:
            assert min(map(len, parts)) > 3


@pytest.fixture
def punkt(tmp_path, monkeypatch):
    """NLTK with a model of nearly nothing, in the place where its downloader puts them."""
    import nltk

    folder = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "toylang"
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("dr\n")
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    sentences.build.cache_clear()
    yield "toylang"
    sentences.build.cache_clear()


def test_sentences(tmp_path, punkt):
    """Each is a sequence; the end of document is behind the last; with --keep-newlines they are together the text."""
    content = "Dr. Who is here. He left!\n\nWhy? No answer"
    assert sentences.build(punkt, False)(content) == ["Dr. Who is here.", "He left!", "Why?", "No answer"]
    assert "".join(sentences.build(punkt, True)(content)) == content
    (tmp_path / "in.jsonl").write_bytes(line(content) + b"\n" + line("") + b"\n" + line("One."))
    tokenizer = Tokenizer(tokenizer_type="ByteTokenizer")
    for keep, first in ((False, b"Dr. Who is here."), (True, b"Dr. Who is here. ")):
        p = Preprocess(input=[str(tmp_path / "in.jsonl")], output_prefix=str(tmp_path / "out"), append_eod=True, lang=punkt,
                       split_sentences=True, keep_newlines=keep)  # fmt: skip
        preprocess.run(PreprocessConfig(p, tokenizer), io.StringIO(), io.StringIO())
        data = Indexed(tmp_path / "out_text_sentence")
        assert data.doc_idx.tolist() == [0, 4, 4, 5]
        assert bytes(tokens_of(data, 0).tolist()) == first
        assert [tokens_of(data, n).tolist()[-1] == 256 for n in range(5)] == [False, False, False, True, True]


def test_sentences_without_nltk_or_its_model(punkt, monkeypatch):
    with pytest.raises(
        UserError, match="needs NLTK's model of klingon: pip install nltk; python -m nltk.downloader"
    ) as caught:
        sentences.build("klingon", False)
    assert caught.value.status == UNAVAILABLE
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)
    with pytest.raises(
        UserError, match="needs NLTK and its model of english: pip install nltk; python -m nltk.downloader"
    ):
        sentences.build("english", False)


def test_packages_that_are_not_there(tmp_path, monkeypatch):
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd....")
    (tmp_path / "a.parquet").write_bytes(b"PAR1....")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name, package in (("a.zst", "zstandard"), ("a.parquet", "pyarrow")):
        with pytest.raises(
            UserError, match=rf"needs the package {package}: pip install 'meshwright\[data\]'"
        ) as caught:
            texts_of(tmp_path / name)
        assert caught.value.status == UNAVAILABLE


def test_flags_of_sentences_belong_together():
    from meshwright.checks import problems

    told = problems(PreprocessConfig(Preprocess(input=["x"], output_prefix="y", keep_newlines=True, lang="german")))
    assert told == ["--keep-newlines belongs to --split-sentences", "--lang belongs to --split-sentences"]
