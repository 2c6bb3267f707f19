"""Any text as input: folders, plain files, HTML, archives, standard input."""

import bz2
import gzip
import io
import lzma
import os
import random
import re
import tarfile
import zipfile

import pytest
import zstandard
from corpora import preprocess_inputs, texts_in

from helpers import error_of
from meshwright.__main__ import main
from meshwright.apps.quickstart.collect import InputDocuments
from meshwright.base.errors import BAD_DATA, IO, USAGE
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import charsets, folders, html_pages, limits, pieces, reading
from meshwright.data.text.inputs import find_inputs


def read(*paths, **flags):
    """Return the documents of the inputs, and the line of what was passed over."""
    given = TextInputs(input=[str(path) for path in paths], **flags)
    found = find_inputs(given)
    documents = list(reading.read_texts(given, found))
    return documents, found.passed.line() if found.passed else ""


def preprocess(tmp_path, *paths, **flags):
    """Return the documents of the token files, standard output and standard error."""
    printed = preprocess_inputs(tmp_path / "out" / "x", *paths, **flags)
    return texts_in(tmp_path / "out" / "x_text_document"), *printed


def fill(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


PHOTO = b"\x89PNG\r\n\x1a\n\0\0\0"
FILES = {
    "b.txt": "b\n",
    "a/z.py": "print()\n",
    "a/b.md": "# b\n",
    "a/page.html": "<p>one<script>no</script> &amp; two",
    "a/lines.jsonl": '{"text": "l1"}\n{"text": "l2"}\n',
    "a/config.json": '{\n "a": 1\n}',
    "a/small.json": '{"a": 1}',
    "a/lines.json": '{"text": "l3"}',
    "style.css": "p {}",
    "LICENSE": "free",
    "empty.txt": "",
    "blank.txt": " \n",
    "picture.txt": PHOTO,
    "latin.txt": b"caf\xe9",
    "late.txt": b"x" * 2000 + b"\xe9",
    "wide.txt": "x".encode("utf-16"),
    ".hidden/x.txt": "hidden",
    ".x.txt": "hidden",
    "node_modules/x.js": "hidden",
    "p.txt.gz": gzip.compress(b"p\n"),
    "q.rst.xz": lzma.compress(b"q\n"),
    "r.org.bz2": bz2.compress(b"r\n"),
    "s.tex.zst": zstandard.compress(b"s\n"),
    "t.jsonl.gz": gzip.compress(b'{"text": "t"}'),
}
READ = [
    "# b\n",
    "l3",
    "l1",
    "l2",
    "one & two\n",
    "print()\n",
    "b\n",
    "p\n",
    "q\n",
    "r\n",
    "s\n",
    "t",
    "x",
]


@pytest.mark.flag("preprocess.include preprocess.exclude evaluate.include evaluate.exclude")
def test_a_folder(tmp_path):
    """Files by suffix in the order of their paths; what is passed over is counted."""
    fill(tmp_path / "in", FILES)
    documents, passed = read(tmp_path / "in")
    assert documents == READ
    kinds = "2 not UTF-8, 1 JSON lines with no key 'text', 1 not JSON lines, 2 empty, 1 binary, "
    kinds += "2 with other suffixes (no suffix, .css)"
    assert passed.startswith("passed over 9 files: ") and passed.endswith("; choose with --include")
    found, named = re.subn(r"2 not UTF-8 \(([^()]+:1, [^()]+:1)\)", "2 not UTF-8", passed)
    assert named == 1 and sorted(found.split(": ")[1].split("; ")[0].split(", ")) == sorted(
        kinds.split(", ")
    )
    documents, out, err = preprocess(tmp_path, tmp_path / "in")
    assert documents == READ and f"Opening {tmp_path / 'in'}: 16 files\n" in out
    assert err.count("passed over") == 1 and passed in err.splitlines()
    assert read(tmp_path / "in", include=["*.css", "a/*.md"])[0] == ["# b\n", "p {}"]
    assert read(tmp_path / "in", include=["L*", ".x.txt", ".hidden"])[0] == [
        "hidden",
        "hidden",
        "free",
    ]
    everything = read(tmp_path / "in", include=["*"], exclude=["a", "[p-t].*"])
    assert everything[0] == ["free", "b\n", "p {}", "x"]
    assert "not chosen by --include and --exclude" in everything[1]
    assert read(tmp_path / "in" / "b.txt", tmp_path / "in" / "a", exclude=["*.html", "z.*"])[0] == [
        "b\n",
        "# b\n",
        "l3",
        "l1",
        "l2",
    ]


def test_a_file_that_vanishes_or_changes_while_it_is_read(tmp_path, monkeypatch):
    folder = fill(tmp_path / "in", {"a.txt": "a", "b.txt": "b"})
    real = pieces.WholeFile.read

    def act(change):
        def changing(part, options):
            if part.path.endswith("a.txt"):
                change()
            return real(part, options)

        monkeypatch.setattr(pieces.WholeFile, "read", changing)
        return lambda: preprocess(tmp_path, folder)

    assert "in has changed while it was read" in error_of(
        act(lambda: (folder / "b.txt").write_text("bb")), BAD_DATA
    )
    message = error_of(act(lambda: (folder / "b.txt").unlink()), IO)
    assert "b.txt cannot be read: it has vanished; start again when it is there" in message


def test_suffixes_are_counted_and_a_pdf_is_one_once(tmp_path):
    names = ("a.pdf", "b.PDF", "c.aux", "d.aux", "e.log", *(f"{n}.x{n}" for n in range(10)))
    fill(tmp_path, {"a.txt": "a", "p.xml": b"%PDF-1.7", **dict.fromkeys(names, "%PDF-1.7")})
    odd = ", ".join(f"1 .x{n}" for n in range(10))
    want = f"passed over 16 files: 2 PDF, 1 XML other than wiki dumps, 13 with other suffixes (2 .aux, {odd}, 1 .log)"
    assert read(tmp_path) == (["a"], f"{want}; choose with --include")


def test_odd_things_in_a_folder(tmp_path, monkeypatch):
    """Links that loop, pipes, odd names, a damaged file, nothing at all."""
    folder = tmp_path / "in"
    folder.mkdir()
    assert "in holds no text; nothing is there" in error_of(lambda: read(folder))
    fill(folder, {"a.txt": PHOTO, "b.bin": b""})
    message = error_of(lambda: preprocess(tmp_path, folder))
    assert (
        "passed over 2 files: 1 binary, 1 with other suffixes (.bin); choose with --include"
        in message
    )
    fill(
        folder,
        {"a.txt": b"\xef\xbb\xbfa\r\nb\r\n", "new\nline.txt": "n", "sub/with space.txt": "s"},
    )
    os.symlink(folder, folder / "sub" / "up")
    os.symlink("gone", folder / "gone.txt")
    os.symlink("self.txt", folder / "self.txt")
    os.symlink(folder / "a.txt", folder / "link.txt")
    os.mkfifo(folder / "pipe.txt")
    documents, passed = read(folder)
    assert documents == ["a\nb\n", "a\nb\n", "n", "s"]
    assert "2 broken links" in passed and "1 pipe or device" in passed
    with open(os.fsencode(folder) + b"/\xff\n.txt", "wb") as file:
        file.write(b"q")
    assert preprocess(tmp_path, folder)[0] == [*documents, "q"]
    fill(folder, {"z.txt.gz": gzip.compress(b"z" * 1000)[:-9]})
    assert "z.txt.gz: damaged file (Compressed file ended" in error_of(lambda: read(folder))
    assert "1 damaged file, first " in preprocess(tmp_path, folder, on_error="skip")[2]
    fill(folder, {"z.txt.gz": "no", "l.jsonl": '{"text": "l"}\n{"text": 1}'})
    assert "l.jsonl:2: no text under 'text'" in error_of(lambda: preprocess(tmp_path, folder))
    assert preprocess(tmp_path, folder, on_error="skip")[0] == [
        "a\nb\n",
        "l",
        *documents[1:],
        "no",
        "q",
    ]
    monkeypatch.setattr(
        folders.os, "listdir", lambda place: (_ for _ in ()).throw(PermissionError(13, "denied"))
    )
    assert "cannot be read: denied; make it readable, or leave it out with --exclude" in error_of(
        lambda: read(folder), IO
    )


@pytest.mark.parametrize("pattern", ["sub/*.txt", "sub", "corpus/sub/a.txt", "./sub/"])
def test_a_pattern_with_a_folder_meets_paths_in_folders_and_named_files(tmp_path, pattern):
    folder = fill(tmp_path / "corpus", {"sub/a.txt": "a", "b.txt": "b", "sub/deeper/c.md": "c"})
    is_below = "corpus" not in pattern
    kept = {"sub/*.txt": ["b", "c"], "corpus/sub/a.txt": ["b", "a", "c"]}.get(pattern, ["b"])
    assert read(folder, exclude=[pattern])[0] == kept
    files = [folder / "b.txt", folder / "sub" / "a.txt"]
    named = ["b"] if pattern != "sub" and not pattern.endswith("/") else ["b", "a"]
    assert read(*files, exclude=[pattern])[0] == named
    if is_below and "*" in pattern:
        assert read(folder, include=[pattern])[0] == read(*files, include=[pattern])[0] == ["a"]


def test_files_given_by_name(tmp_path):
    """JSON lines under any name; anything else is one document, and what is no text an error."""
    folder = fill(
        tmp_path,
        {
            "a": '\n{"text": "json"}',
            "b.css": "p {}\r\n",
            "c.py": "{\n}",
            "d.json": '{"text": "d"}',
            "e": PHOTO,
        },
    )
    assert read(*(folder / name for name in ("c.py", "b.css", "a", "d.json")))[0] == [
        "{\n}",
        "p {}\n",
        "json",
        "d",
    ]
    assert "e: binary (NUL byte at 8)" in error_of(lambda: read(folder / "e"))


def noise(size, least=1):
    rng = random.Random(size)
    return bytes(rng.randrange(least, 256) for _ in range(size))


PHOTOS = {
    "small": PHOTO + noise(500),
    "large": PHOTO + noise(5000),
    "without NUL": noise(3000),
    "short": PHOTO,
}


@pytest.mark.parametrize("content", PHOTOS.values(), ids=PHOTOS)
def test_a_photo_among_texts_is_called_binary(tmp_path, monkeypatch, content):
    """Refused if it is named, passed over in a folder; no encoding is blamed."""
    monkeypatch.setattr(limits, "PIECE", 1000)
    fill(tmp_path, {"a.txt": "a", "b.png": content, "in/a.txt": "a", "in/b.txt": content})
    cure = "such a file holds no text: leave it out with --exclude, or all such files with --on-error skip"
    paths = [tmp_path / "a.txt", tmp_path / "b.png"]
    for flags in ({}, {"document_separator": ""}, {"encoding": "gb18030"}, {"on_error": "replace"}):
        given = TextInputs(input=[*map(str, paths)], **flags)
        for act in (
            lambda given=given: find_inputs(given),
            lambda given=given: InputDocuments(given, 1e9),
        ):
            assert re.search(r"b\.png: binary \(.*\); " + cure, error_of(act)), flags
        assert read(*paths, **flags, exclude=["*.png"])[0] == ["a"]
        assert read(tmp_path / "in", **flags) == (["a"], "passed over 1 file: 1 binary")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert "-: binary (" in error_of(lambda: read("-"))
    assert read(*paths, on_error="skip")[0][0] == "a"


def test_what_is_no_text_is_refused_by_its_kind(tmp_path, capsys):
    """A device may never end; token files and an output without a name are slips."""
    assert "/dev/zero is a device; give" in error_of(lambda: read("/dev/zero"))
    fill(tmp_path, {"t.txt": "text", "x.bin": "\0", "x.idx": "\0"})
    assert (
        f"x.bin holds tokens already; give the text, or train on them: --data-path {tmp_path / 'x'}"
        in error_of(lambda: read(tmp_path / "x.bin"))
    )
    out = ["--output-prefix", f"{tmp_path}/", "--tokenizer", "byte"]
    assert main(["preprocess", "--input", str(tmp_path / "t.txt"), *out]) == USAGE
    assert f"{tmp_path}/ ends in /; give the beginning" in capsys.readouterr().err


@pytest.mark.flag("preprocess.document_separator evaluate.document_separator")
@pytest.mark.parametrize("separator", ["<|endoftext|>", "", "é"])
def test_separators(tmp_path, monkeypatch, separator):
    """Plain text of any size, in pieces of any size, packed or not: the same documents."""
    rng = random.Random(1)
    for size in (2, 7, 300):
        monkeypatch.setattr(limits, "PIECE", size)
        monkeypatch.setattr(limits, "REST", rng.choice([1, 9, 1000]))
        monkeypatch.setattr("meshwright.data.text.limits.CHUNK", rng.choice([5, 30]))
        for _ in range(6):
            words = ["", "word", separator + "x", " " + separator, "é" * 9, separator, separator]
            content = "\n".join(
                rng.choice(words) for _ in range(rng.randrange(1, 40))
            ) + "\n" * rng.randrange(2)
            lines, want = content.splitlines(keepends=True), [""]
            for line in lines:
                if line.rstrip("\n") == separator:
                    want.append("")
                else:
                    want[-1] += line
            want = [document for document in want if document.strip()]
            crlf = content.replace("\n", "\r\n")
            fill(tmp_path, {"a.txt": crlf, "b": gzip.compress(content.encode())})
            with tarfile.open(tmp_path / "c.tar", "w") as tar:
                tar.add(tmp_path / "a.txt", "c.txt")
            for name in ("a.txt", "b", "c.tar"):
                assert read(tmp_path / name, document_separator=separator)[0] == want, (
                    size,
                    name,
                    content,
                )


def with_pages(count, first):
    """Return documents, of which every fifth is a page from the `first` on, and their texts."""
    rng, documents = random.Random(first), []
    for n in range(count):
        text = f"<p>{n} a < b\n{'é' * rng.choice([1, 1, 20, 400])}\n"
        page = f"<html><head><meta charset=gbk></head>\n<body>\n{text}<br>end</body></html>\n"
        documents.append((page, html_pages.page_text(page)) if n % 5 == first else (text, text))
    return zip(*documents, strict=True)


@pytest.mark.parametrize(("count", "first"), [(12, 0), (12, 3), (1, 0)])
@pytest.mark.parametrize("separator", ["<|endoftext|>", ""])
@pytest.mark.parametrize("size", [60, 1 << 20])
def test_each_document_is_a_page_or_a_text_by_itself(
    tmp_path, monkeypatch, size, separator, count, first
):
    """The same documents in a file, packed, in a stream or an archive, wherever pieces begin."""
    monkeypatch.setattr(limits, "PIECE", size)
    monkeypatch.setattr("meshwright.data.text.limits.CHUNK", 70)
    documents, texts = with_pages(count, first)
    content = f"{separator}\n".join(documents).encode()
    fill(
        tmp_path,
        {"in/a.txt": content, "b.gz": gzip.compress(content), "c.txt": charsets.BOM + content},
    )
    fill(
        tmp_path,
        {"d.txt": content.decode().encode("utf-16"), "e.txt": content.replace(b"\n", b"\r\n")},
    )
    with tarfile.open(tmp_path / "f.tar", "w") as tar:
        tar.add(tmp_path / "in" / "a.txt", "a")
    for name in ("in/a.txt", "in", "b.gz", "c.txt", "d.txt", "e.txt", "f.tar"):
        assert read(tmp_path / name, document_separator=separator) == ([*texts], ""), name
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert read("-", document_separator=separator) == ([*texts], "")


def test_pages_of_a_divided_text_may_each_have_their_charset(tmp_path, monkeypatch):
    """Unless --encoding names that of the file; a file that is named as a page is one."""
    monkeypatch.setattr(limits, "PIECE", 30)
    pages = [
        f"<html><meta charset={name}>".encode() + "é朱"[n].encode(name)
        for n, name in enumerate(["cp1252", "gbk"])
    ]
    plain_text = "朱镕基\n".encode("gbk")
    fill(
        tmp_path,
        {
            "a.txt": b"\n<|endoftext|>\n".join([*pages, "é".encode()]),
            "b.html": pages[0] + b"\n<|endoftext|>\na",
        },
    )
    fill(tmp_path, {"c.txt": b"\n<|endoftext|>\n".join([plain_text, pages[1], plain_text])})
    assert read(tmp_path / "a.txt") == (["é \n", "朱 \n", "é"], "")
    assert read(tmp_path / "b.html") == (["é <|endoftext|> a\n"], "")
    assert read(tmp_path / "c.txt", encoding="gb18030") == (["朱镕基\n\n", "朱 \n", "朱镕基\n"], "")


def test_archives(tmp_path):
    """Members are read as the files of a folder are, whatever their suffix."""
    files = {
        "p/a.txt": "a",
        "p/b": "b",
        "p/c.html": "<b>c</b>",
        "p/d.png": PHOTO,
        "p/e.json": "{\n}",
        "p/f.jsonl": '{"text": "f"}',
        "p/g.txt.gz": gzip.compress(b"g"),
        "p/h.txt": "",
    }
    with zipfile.ZipFile(tmp_path / "z.zip", "w", zipfile.ZIP_DEFLATED) as pack:
        for name, content in files.items():
            pack.writestr(name, content)
    fill(tmp_path / "in", files)
    with tarfile.open(tmp_path / "z.tgz", "w:gz") as tar:
        tar.add(tmp_path / "in" / "p", "p")
    for name in ("z.zip", "z.tgz"):
        documents, passed = read(tmp_path / name)
        assert sorted(documents) == ["a", "b", "c\n", "f", "g"]
        assert (
            passed == "passed over 3 files: 1 binary, 1 not JSON lines, 1 empty"
            or "3 files" in passed
        )
        assert sorted(read(tmp_path / name, exclude=["*.jsonl", "[a-b]*"])[0]) == ["c\n", "g"]
    fill(tmp_path, {"z.zip.gz": gzip.compress((tmp_path / "z.zip").read_bytes())})
    assert "z.zip.gz is a zip archive in a stream" in error_of(lambda: read(tmp_path / "z.zip.gz"))
    content = bytearray((tmp_path / "z.zip").read_bytes())
    content[34] ^= 255  # of the first member
    fill(tmp_path, {"bad.zip": bytes(content), "cut.zip": bytes(content[:300])})
    assert "bad.zip:p/a.txt: damaged member" in error_of(lambda: read(tmp_path / "bad.zip"))
    assert sorted(preprocess(tmp_path, tmp_path / "bad.zip", on_error="skip")[0]) == [
        "b",
        "c\n",
        "f",
        "g",
    ]
    assert "cut.zip is cut short or damaged" in error_of(lambda: read(tmp_path / "cut.zip"))


def test_html():
    page = """<!DOCTYPE html><html><head><title>T &amp; x</title><style>p{}</style><script>if (a<b) x("</p>")</script>
    </head><body><h1>Head</h1><p>One <b>bo</b>ld&nbsp;text
    next</p><ul><li>a<li>b</ul><pre>  x
    y</pre><table><tr><td>1<td>2</tr></table><![foo[ x ]]><!-- no > -->z<br>end &lt;x&gt; &eacute; &#x4e2d; &amp"""
    want = "T & x\n\nHead\n\nOne bold text next\n\na\nb\n\n  x\n    y\n\n1 2\n\nz\nend <x> é 中 &\n"
    assert html_pages.page_text(page) == want
