"""One table of texts: kind x container x encoding x damage -> documents, and what is none.

Whatever holds the bytes of a text and however they are cut, its documents are the same, and so is
what is wrong in them, each at its line or row.
"""

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import re
import sqlite3
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import limits
from meshwright.data.text.inputs import find_inputs
from meshwright.data.text.pieces import cut_inputs
from meshwright.data.text.records import CUT_SHORT, Document, Rejected, options_of

TEXTS = ["one é\n", 'two "quoted", and\ntwo\tlines;\n', "三 | < four\n"]
LINE = "<|endoftext|>\n"


def read(path: object, **flags: object) -> tuple[list[Document], list[Rejected]]:
    """Return the documents of an input and what is none, files that are passed over among it."""
    given = TextInputs(input=[str(path)], **flags)
    pieces = cut_inputs(find_inputs(given).inputs, given)
    records = [record for piece in pieces for record in piece.read(options_of(given))]
    documents = [record for record in records if isinstance(record, Document)]
    return documents, [record for record in records if isinstance(record, Rejected)]


# Kinds: the name, the content, and its documents.


def table(texts: list[str], sign: str) -> str:
    out = io.StringIO()
    rows = [[n, text, 5] for n, text in enumerate(texts)]
    csv.writer(out, delimiter=sign).writerows([["id", "text", "stars"], *rows])
    return out.getvalue()


def article(title: str, text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    head = f"<page>\n  <title>{title}</title>\n  <ns>0</ns>\n"
    return f"{head}  <revision>\n    <text>{escaped}</text>\n  </revision>\n</page>\n"


PAGE = "<html><head><title>T &amp; é</title></head><p>one<br>three</html>\n"
PAGE_TEXT = "T & é\n\none\nthree \n"
ARTICLES = "".join(
    article(*one) for one in (("A", "one é"), ("R", "#redirect [[A]]"), ("B", "三 | < four"))
)
ARTICLE_TEXTS = ["A\n\none é\n", "B\n\n三 | < four\n"]
LINES = "".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in TEXTS)
KINDS = {
    "lines": ("a.jsonl", LINES, TEXTS),
    "text": ("a.txt", LINE.join(TEXTS), TEXTS),
    "a mark within": ("a.txt", LINE.join([TEXTS[0], "\ufeff" + TEXTS[1]]), TEXTS[:2]),
    "crlf": ("a.txt", LINE.join(TEXTS).replace("\n", "\r\n"), TEXTS),
    "page": ("a.html", PAGE, [PAGE_TEXT]),
    "text with pages": (
        "a.txt",
        LINE.join([TEXTS[0], PAGE, TEXTS[1], PAGE]),
        [TEXTS[0], PAGE_TEXT, TEXTS[1], PAGE_TEXT],
    ),
    "CSV": ("a.csv", table(TEXTS, ","), TEXTS),
    "semicolons": ("a.csv", table(TEXTS, ";"), TEXTS),
    "TSV": ("a.TSV", table(TEXTS, "\t"), TEXTS),
    "dump": (
        "a.xml",
        f"<?xml version='1.0'?>\n<mediawiki>\n{ARTICLES}</mediawiki>\n",
        ARTICLE_TEXTS,
    ),
    "crlf dump": (
        "a.xml",
        f"<mediawiki>\n{ARTICLES}</mediawiki>\n".replace("\n", "\r\n"),
        ARTICLE_TEXTS,
    ),
    "dump in a line": (
        "a.xml",
        f"<mediawiki>{ARTICLES}</mediawiki>".replace("\n", ""),
        ARTICLE_TEXTS,
    ),
    "pages of a dump": ("a.xml", ARTICLES, ARTICLE_TEXTS),
}

# Containers: what is written, and where it is found.
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": zstandard.ZstdCompressor().compress,
}
ARCHIVES = ("tar", "tgz", "zip")
CONTAINERS = (
    "file",
    "unnamed",
    "folder",
    "stdin",
    "packed stdin",
    "layers",
    *PACKERS,
    "members",
    *ARCHIVES,
)


def put(
    container: str, folder: Path, name: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> object:
    """Write a file in a container; return what --input names."""
    path = folder / name
    if container == "folder":
        path = folder / "in" / name
        path.parent.mkdir(exist_ok=True)
    elif container == "unnamed":
        path = folder / "any"
    elif container in PACKERS:  # whatever its name says
        path, content = folder / f"{name}.gz", PACKERS[container](content)
    elif container == "members":  # of one stream
        half = len(content) // 2
        path, content = (
            folder / f"{name}.gz",
            gzip.compress(content[:half]) + gzip.compress(content[half:]),
        )
    elif container == "layers":
        path, content = folder / f"{name}.gz", gzip.compress(lzma.compress(content))
    elif container in ("tar", "tgz"):
        path, content = (
            folder / f"all.{container}",
            tar_of(name, content, "w:gz" if container == "tgz" else "w"),
        )
    elif container == "zip":
        path = folder / "all.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, content)
        return path
    elif container in ("stdin", "packed stdin"):
        packed = gzip.compress(content) if container == "packed stdin" else content
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(packed)))
        return "-"
    path.write_bytes(content)
    return path.parent if container == "folder" else path


def tar_of(name: str, content: bytes, mode: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


# Of a codec, the mark before the text and the flags that it needs.
ENCODINGS: dict[str, tuple[str, dict[str, str]]] = {
    "utf-8": ("", {}),
    "utf-8-sig": ("", {}),
    "utf-16": ("", {}),
    "utf-32": ("", {}),
    "utf-16-le": ("\ufeff", {}),
    "utf-16-be": ("\ufeff", {}),
    "gb18030": ("", {"encoding": "gb18030"}),
}


def is_held(kind: str, container: str) -> bool:
    """Return whether the container can hold the kind: CSV needs its name, dumps are no members."""
    needs_name = kind in ("CSV", "semicolons", "TSV")
    return not (needs_name and container in ("unnamed", "stdin", "packed stdin")) and not (
        "dump" in kind and container in ARCHIVES
    )


MATRIX = [
    (kind, container) for kind in KINDS for container in CONTAINERS if is_held(kind, container)
]


@pytest.mark.parametrize(("kind", "container"), MATRIX)
def test_the_documents_do_not_depend_on_container_encoding_and_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, container: str
) -> None:
    name, text, want = KINDS[kind]
    for codec, (mark, flags) in ENCODINGS.items():
        for size in (1 << 20, 40) if codec == "utf-8" else (40,):
            monkeypatch.setattr(limits, "PIECE", size)
            monkeypatch.setattr(limits, "REST", 16)
            monkeypatch.setattr(limits, "CHUNK", 7 if size == 40 else 1 << 18)
            path = put(container, tmp_path, name, (mark + text).encode(codec), monkeypatch)
            documents, rejected = read(path, **flags)
            assert [document.texts for document in documents] == [(text,) for text in want], (
                codec,
                size,
            )
            assert rejected == [], (codec, size)


PAGES = {
    '<meta charset="gb2312"><p>朱镕基'.encode("gb18030"): "朱镕基\n",
    '<META content="text/html; charset=iso-8859-1" http-equiv=Content-Type>“é”'.encode(
        "cp1252"
    ): "“é”\n",
    '<?xml version="1.0" encoding="ISO-8859-2"?><html>ł'.encode("iso-8859-2"): "ł\n",
    "<meta charset=utf-16>é".encode(): "é\n",  # cannot be true of ASCII
    "<meta charset=hex>é".encode(): "é\n",
    "<meta charset=utf-7>é".encode(): "é\n",
    "<meta charset=unknown-1>é".encode(): "é\n",
}


@pytest.mark.parametrize("container", ["file", "folder", "gz", "tar"])
def test_a_page_has_the_charset_that_it_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: str
) -> None:
    """Whatever --encoding names."""
    for page, want in PAGES.items():
        path = put(container, tmp_path, "a.html", page, monkeypatch)
        for flags in (
            ({}, {"encoding": "utf-16-le"})
            if b"charset=u" not in page and b"hex" not in page
            else ({},)
        ):
            documents, rejected = read(path, **flags)
            assert ([document.texts[0] for document in documents], rejected) == ([want], []), page


# Damage.


class Damage(NamedTuple):
    """A text, its documents, and why others are none, each with its line or row if it has one."""

    name: str
    content: bytes
    documents: list[str]
    rejected: list[tuple[str, int]]
    repaired: list[str] | None = None  # the documents with --on-error replace, if they are others
    longest: int = 1 << 28


def csv_of(*rows: str, header: str = "id,text,stars") -> bytes:
    return "\n".join([header, *rows, ""]).encode("utf-8", "surrogateescape")


FEW = "too few fields, probably because a line break in a text lacks quotes"
MANY = "too many fields, probably because a ',' in a text lacks quotes"
HALF = "perhaps half a row"
LONG = "x" * 90
DUMP_END = "</mediawiki>\n"
DAMAGES = {
    "no texts under the key": Damage(
        "a.jsonl",
        b'{"text": "a"}\n{"text": 3}\n\n{"no": 1}\n{"text": null}\n{"text": "b"}\n',
        ["a", "b"],
        [("no text under 'text'", 2), ("no key 'text'", 4), ("null under 'text'", 5)],
    ),
    "no JSON": Damage(
        "a.jsonl",
        b'{"text": "a"}\nnot JSON\n[1]\n{"text": "\\ud800"}\n{"text": "b", "x": NaN, "\\ud800": 1}\n'
        + b"[" * 99,
        ["a", "b"],
        [
            ("not JSON", 2),
            ("not a JSON object", 3),
            ("lone surrogate under 'text'", 4),
            ("not JSON", 6),
        ],
    ),
    "a line that is not UTF-8": Damage(
        "a.jsonl",
        b'{"text": "a"}\n{"text": "\xe9"}\n{"text": "b"}',
        ["a", "b"],
        [("not UTF-8", 2)],
        ["a", "�", "b"],
    ),
    "an array": Damage(
        "a.json", b'[{"text": "a"}, {"text": "b"}]', [], [("part of a JSON array", 1)]
    ),
    "a long line": Damage(
        "a.jsonl",
        b'{"text": "a"}\n{"text": "%s"}\n{"text": "b"}\nno\n{"text": "%s"}'
        % ((LONG * 9).encode(), (LONG * 9).encode()),
        ["a", "b"],
        [("longer than 80 bytes", 2), ("not JSON", 4), ("longer than 80 bytes", 5)],
        longest=80,
    ),
    "a line of text that is not UTF-8": Damage(
        "a.txt",
        b"a\n<|endoftext|>\nb\nc\xe9c\nd\n",
        ["a\n", "b\nd\n"],
        [("not UTF-8", 4)],
        ["a\n", "b\nc�c\nd\n"],
    ),
    "a document that is no text": Damage(
        "a.txt",
        b"a\n<|endoftext|>\nb\0\n<|endoftext|>\nand then c\n",
        ["a\n", "and then c\n"],
        [("binary", 3)],
    ),
    "a long document": Damage(
        "a.txt",
        f"a\n{LINE}{LONG}\n{LONG}\n{LINE}b\n{LINE}{LONG * 9}".encode(),
        ["a\n", "b\n"],
        [("longer than 80 bytes", 3), ("longer than 80 bytes", 8)],
        longest=80,
    ),
    "a page that is not UTF-8": Damage(
        "a.html", b"<p>o\xe9<p>two\xc3\xa9", ["\ntwoé\n"], [("not UTF-8", 1)], ["o�\n\ntwoé\n"]
    ),
    "other numbers of fields": Damage(
        "a.csv",
        csv_of("1,a,5", "2,so, what,5", "3", "4,so", "5,b,5"),
        ["a", "b"],
        [(MANY, 2), (FEW, 3), (FEW, 4)],
    ),
    "a quote that does not close": Damage(
        "a.csv",
        csv_of("1,a,5", '2,"open,5', "3,c,5"),
        ["a"],
        [("not CSV (unexpected end of data)", 2)],
    ),
    "a row that is not UTF-8": Damage(
        "a.csv",
        csv_of("1,a,5", "2,\udce9,5", "3,b,5"),
        ["a", "b"],
        [("not UTF-8", 2)],
        ["a", "�", "b"],
    ),
    "a line break in the first column": Damage(
        "a.csv",
        csv_of("a,0", "one", "two,1", "b,2", header="text,n"),
        ["a", "b"],
        [(FEW, 2), (HALF, 3)],
    ),
    "a line break in the last column": Damage(
        "a.csv",
        csv_of("0,a", "1,one", "two", "2,b", header="n,text"),
        ["a", "b"],
        [(HALF, 2), (FEW, 3)],
    ),
    "a line break between": Damage(
        "a.csv",
        csv_of("0,a,5", "1,one", "", "two", "three,5", "2,b,5"),
        ["a", "b"],
        [(FEW, 2), (FEW, 3), (FEW, 4)],
    ),
    "empty fields at the end": Damage(
        "a.csv",
        csv_of("1,a", "2,b,", "3,c,,,,,", "4,,,,,", "5,d,x,y", header="id,text,,"),
        ["a", "b", "c", "", "d"],
        [],
    ),
    "fields without a column": Damage(
        "a.csv", csv_of("1", "2,b,,,x", header="id,text,,"), [], [(FEW, 1), (MANY, 2)]
    ),
    "pages that are damaged": Damage(
        "a.xml",
        (
            "<mediawiki>\n"
            + article("A", "a")
            + article("B", "b").replace("</text>", "")
            + article("C", "c")
        ).encode()
        + article("", "d").replace("</title>", "").encode()
        + article("E", "e").encode()[:-20],
        ["A\n\na\n", "C\n\nc\n"],
        [("damaged page", 9), ("damaged page", 23), ("page cut short", 30)],
    ),
    "a page of a dump that is not UTF-8": Damage(
        "a.xml",
        ("<mediawiki>\n" + article("A", "a")).encode()
        + article("B", "b\udce9").encode("utf-8", "surrogateescape"),
        ["A\n\na\n"],
        [("not UTF-8", 9)],
        ["A\n\na\n", "B\n\nb�\n"],
    ),
    "a long page": Damage(
        "a.xml",
        (article("A", "a") + article("B", LONG * 5) + article("C", "c")).encode(),
        ["A\n\na\n", "C\n\nc\n"],
        [("page longer than 200 bytes", 8)],
        longest=200,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_is_named_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """The neighbours are kept, in a file and in its pieces, in a stream and in an archive."""
    name, content, want, reasons, repaired, longest = DAMAGES[damage]
    monkeypatch.setattr(limits, "LONGEST", longest)
    monkeypatch.setattr(limits, "REST", 16)
    monkeypatch.setattr(limits, "CHUNK", 30)
    kind = {"csv": "CSV", "xml": "dump"}.get(name.rpartition(".")[2], "")
    for container in ("file", "folder", "gz", "stdin", "tar", "zip"):
        is_passed = container == "folder" and (name == "a.json" or b"\0" in content)  # as a whole
        if not is_held(kind, container) or is_passed:
            continue
        if container == "stdin" and name in ("a.html", "a.xml", "a.json") and longest == 1 << 28:
            continue  # what it is shows by its name alone
        for size in (40, 1 << 20) if longest == 1 << 28 else (40,):
            monkeypatch.setattr(limits, "PIECE", size)
            for how, expected in (("skip", want), ("replace", repaired)):
                if expected is None:
                    continue
                path = put(container, tmp_path, name, content, monkeypatch)
                documents, rejected = read(path, on_error=how)
                about = (container, size, how)
                assert [document.texts[0] for document in documents] == expected, about
                if how == "replace":
                    assert [d.repaired for d in documents] == [
                        "�" in d.texts[0] for d in documents
                    ] and not rejected
                    continue
                assert [one.reason for one in rejected] == [reason for reason, _ in reasons], about
                # A text that is read as a whole names its line for a bad byte alone.
                numbers = [int(re.search(r"\d*$", str(one.place))[0] or 0) for one in rejected]
                is_whole = name in ("a.txt", "a.xml") and (container != "file" or size > 40)
                lines = [
                    n if n or not is_whole else line
                    for n, (_, line) in zip(numbers, reasons, strict=True)
                ]
                assert lines == [line for _, line in reasons], about
                is_named = container not in ("folder", "tar", "zip")
                assert all(
                    one.is_error == (is_named or one.reason != "binary") for one in rejected
                ), about


@pytest.mark.parametrize(
    ("kind", "packer"), [("lines", "gz"), ("text", "xz"), ("CSV", "bz2"), ("dump", "zst")]
)
def test_what_precedes_a_cut_is_kept(tmp_path: Path, kind: str, packer: str) -> None:
    """Then comes why the rest is not there."""
    texts = [f"{n} {'é' * (n % 50)} {n * n}\n" for n in range(2000)]
    if kind == "dump":
        content, want = "".join(article(str(n), text) for n, text in enumerate(texts)), len(texts)
    elif kind == "CSV":
        content, want = table(texts, ","), len(texts)
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        content, want = (lines if kind == "lines" else LINE.join(texts)), len(texts)
    packed = PACKERS[packer](content.encode())
    path = tmp_path / f"{KINDS[kind][0]}.{packer}"
    path.write_bytes(packed)
    whole, rejected = read(path)
    assert len(whole) == want and not rejected
    for share in (0.0, 0.2, 0.9, 0.999):
        path.write_bytes(packed[: max(int(len(packed) * share), 40)])
        kept, (last,) = read(path, on_error="skip")
        assert [one.texts for one in kept] == [
            one.texts for one in whole[: len(kept)]
        ] and last.reason == CUT_SHORT
        assert packer != "gz" or share < 0.9 or len(kept) > 500


# Tables, which are read where they are.


def parquet(column: pyarrow.Array) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(column)), "text": column}), out)
    return out.getvalue()


def arrow(column: pyarrow.Array, new: Callable[..., object]) -> bytes:
    out, made = io.BytesIO(), pyarrow.table({"n": range(len(column)), "text": column})
    with new(out, made.schema) as writer:
        writer.write_table(made)
    return out.getvalue()


def sqlite(values: list[bytes | None]) -> bytes:
    with (
        tempfile.NamedTemporaryFile(suffix=".db") as file,
        contextlib.closing(sqlite3.connect(file.name)) as database,
    ):
        database.execute("CREATE TABLE posts (n INTEGER, text TEXT)")
        for n, value in enumerate(values):
            database.execute("INSERT INTO posts VALUES (?, CAST(? AS TEXT))", (n, value))
        database.commit()
        return Path(file.name).read_bytes()


VALUES = [b"a", b"caf\xe9", None, "é".encode(), b""]
COLUMN = pyarrow.array(VALUES, pyarrow.binary()).view(pyarrow.string())
TABLES = {
    "a.parquet": lambda: parquet(COLUMN),
    "a.arrow": lambda: arrow(COLUMN, pyarrow.ipc.new_file),
    "stream.arrow": lambda: arrow(COLUMN, pyarrow.ipc.new_stream),
    "a.db": lambda: sqlite(VALUES),
}


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By the first bytes where a name may be another's; none of them comes in a stream."""
    content = TABLES[name]()
    for container in ("file", "folder", *(["unnamed"] if name != "stream.arrow" else [])):
        path = put(container, tmp_path, name, content, monkeypatch)
        flags = {"table": "posts"} if name == "a.db" else {}
        documents, rejected = read(path, on_error="skip", **flags)
        assert [document.texts[0] for document in documents] == ["a", "é", ""]
        assert [one.reason for one in rejected] == ["not UTF-8", "null under 'text'"]
        assert [re.search(r": row (\d)$", str(one.place))[1] for one in rejected] == ["2", "3"]
        assert rejected[0].detail == "byte 0xe9 at 3 under 'text'"
        documents, rejected = read(path, on_error="replace", **flags)
        assert [document.texts[0] for document in documents] == ["a", "caf�", "é", ""]
        assert [document.repaired for document in documents] == [0, 1, 0, 0]
        (tmp_path / "in" / name).unlink(missing_ok=True)
