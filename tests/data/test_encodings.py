"""Text in other encodings than UTF-8, bad bytes, and what --on-error makes of them."""

import gzip
import re
import zipfile

import pyarrow
import pyarrow.parquet
import pytest
from corpora import line, preprocess_inputs, texts_in

from helpers import error_of
from meshwright.__main__ import main
from meshwright.apps.quickstart.collect import InputDocuments
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import charsets, limits, reading
from meshwright.data.text.inputs import find_inputs

NOVEL = (
    "第一回　宴桃园豪杰三结义\n话说天下大势，分久必合，合久必分。\n周末七国分争，并入于秦。\n" * 20
)
FRENCH = "Le café où il était né n'existe plus.\nOn l'a brûlé à la fin de l'été.\n" * 20


def read(*paths, **flags):
    """Return the documents, and the lines about what was left out."""
    given = TextInputs(input=[str(path) for path in paths], **flags)
    found = find_inputs(given)
    return list(reading.read_texts(given, found)), found.left_out(given.on_error, given.encoding)


def preprocess(tmp_path, *paths, **flags):
    _, err = preprocess_inputs(tmp_path / "out" / "x", *paths, **flags)
    return texts_in(tmp_path / "out" / "x_text_document"), err


@pytest.mark.parametrize("size", [1 << 20, 100])
@pytest.mark.flag("preprocess.encoding evaluate.encoding")
def test_an_encoding_is_named_and_suggested(tmp_path, monkeypatch, size):
    """A file, a packed one, one of an archive and of a folder, small or not."""
    monkeypatch.setattr(limits, "PIECE", size)
    content, folder = NOVEL.encode("gb18030"), tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_bytes(content)
    (tmp_path / "b.gz").write_bytes(gzip.compress(content))
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as pack:
        pack.writestr("a.txt", content)
    (tmp_path / "d.jsonl").write_bytes('{"text": "天下"}\n'.encode("gb18030"))
    for path in (folder / "a.txt", folder, tmp_path / "b.gz", tmp_path / "c.zip"):
        assert read(path, encoding="gb18030") == ([NOVEL], [])
    assert read(tmp_path / "d.jsonl", encoding="GB18030") == (["天下"], [])
    message = error_of(lambda: read(folder / "a.txt"))
    assert "a.txt:1: not UTF-8 at byte 0 (0xb5; of the first " in message
    assert message.endswith("); it looks like gb18030, which --encoding gb18030 reads")
    (folder / "u.txt").write_text(NOVEL)  # texts in UTF-8 beside it are read as such
    assert read(folder, encoding="gb18030")[0] == [NOVEL, NOVEL]


def test_few_characters_at_the_beginning_may_be_utf8_by_chance(tmp_path, monkeypatch):
    """The bytes of "一" in GB 18030 are a Cyrillic letter in UTF-8; later ones show which it is."""
    monkeypatch.setattr(limits, "PIECE", 100)
    texts = ["one is 一", "x" * 5000, "天下"]
    (tmp_path / "a.jsonl").write_bytes(
        b"".join(f'{{"text": "{text}"}}\n'.encode("gb18030") for text in texts)
    )
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "c.txt").write_bytes("\n".join(texts).encode("gb18030"))
    want = [*texts, *texts, "\n".join(texts)]
    assert read(tmp_path, encoding="gb18030") == (want, [])
    assert read(*sorted(tmp_path.iterdir()), encoding="gb18030") == (want, [])


def test_what_a_text_looks_like():
    assert charsets.guess(FRENCH.encode("latin-1")) == charsets.guess(b"caf\xe9") == "cp1252"
    assert (
        charsets.guess(NOVEL.encode("gb18030"))
        == charsets.guess(NOVEL.encode("gb2312", "ignore"))
        == "gb18030"
    )
    for text, name in (
        (NOVEL[:900], "utf-8"),
        ("Привет, мир. Как дела? " * 9, "cp1251"),
        ("日本語の文章です。" * 9, "cp932"),
    ):
        assert charsets.guess(text.encode(name) + b"\xff") == ""


def broken(tmp_path):
    """Return a text, a page, lines of JSON, a table and a dump, each with one broken line."""
    (tmp_path / "a.txt").write_bytes("één\ntwé\n".encode() + b"dr\xe9i\n" + "vièr".encode())
    (tmp_path / "b.html").write_bytes(b"<p>o\xe9<p>two\xc3\xa9\xc3\xa9")
    (tmp_path / "c.jsonl").write_bytes(line("a") + b'\n{"text": "\xe9"}\n' + line("b"))
    column = pyarrow.array([b"a", b"\xe9", b"b"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "d.parquet")
    page = b"<page><title>%s</title><revision><text>x%s</text></revision></page>\n"
    (tmp_path / "e.xml").write_bytes(b"<mediawiki>\n" + page % (b"A", b"") + page % (b"B", b"\xe9"))
    return [tmp_path / name for name in ("a.txt", "b.html", "c.jsonl", "d.parquet", "e.xml")]


SKIPPED = ["één\ntwé\nvièr", "\ntwoéé\n", "a", "b", "a", "b", "A\n\nx\n"]
MENDED = ["één\ntwé\ndr�i\nvièr", "o�\n\ntwoéé\n", "a", "�", "b", "a", "�", "b"]
MENDED += ["A\n\nx\n", "B\n\nx�\n"]


@pytest.mark.flag("evaluate.on_error")
@pytest.mark.parametrize(
    ("how", "want", "done"), [("skip", SKIPPED, "left out"), ("replace", MENDED, "mended")]
)
def test_a_broken_line_is_left_out_or_mended(tmp_path, how, want, done):
    paths = broken(tmp_path)
    documents, err = preprocess(tmp_path, *paths, on_error=how, workers=1)
    line = f"{done} 5 bad lines: 5 not UTF-8, first {paths[0]}:3"
    assert documents == want and f"{line}\n" in err
    assert read(*paths, on_error=how) == (want, [line])


def test_replace_mends_bytes_alone(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "\xe9"}\n{"text": 3}')
    message = error_of(lambda: read(tmp_path / "c.jsonl", on_error="replace"))
    assert "c.jsonl:2: no text under 'text' (int); mend the line, or leave such lines" in message


def test_the_message_names_byte_line_and_both_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "PIECE", 300)
    separated = "é\n<|endoftext|>\n" * 100
    (tmp_path / "a.txt").write_bytes(separated.encode() + "é".encode() + b"\xe9\n")
    at, lines = len(separated.encode()) + 2, separated.count("\n") + 1
    want = f"a.txt:{lines}: not UTF-8 at byte {at:,} (0xe9); mend the line, put U+FFFD for such bytes with --on-error "
    want += "replace, or leave such lines out with --on-error skip"
    for run in (lambda: read(tmp_path / "a.txt"), lambda: preprocess(tmp_path, tmp_path / "a.txt")):
        assert want in error_of(run)


def test_a_folder_suggests_what_a_file_does(tmp_path):
    """Its encoding, although a few bytes are odd; then what keeps the rest."""
    content = "".join(f"{n}{NOVEL}" for n in range(9)).encode("gb18030")
    odd = [content.index(b"\n", at) for at in (3000, 9000, 12000)]
    for at in reversed(odd):
        content = content[:at] + b"\x81" + content[at:]
    (tmp_path / "novel.txt").write_bytes(content)
    lines, first = content.count(b"\n"), content.count(b"\n", 0, odd[0]) + 1
    for encoding, line_number, cure in (
        ("", 1, "it looks like gb18030, which --encoding gb18030 reads"),
        (
            "gb18030",
            first,
            f"3 of {lines} lines are not gb18030: --on-error replace keeps the rest",
        ),
        ("big5", 1, "360 of 540 lines are not: --encoding names another encoding"),
    ):
        message = error_of(
            lambda encoding=encoding: list(documents_of(tmp_path, encoding=encoding))
        )
        assert f"1 not UTF-8 ({tmp_path}/novel.txt:{line_number}); {cure}" in message
        assert ("novel.txt reads like gb18030, not big5" in message) == (encoding == "big5")
    (tmp_path / "sql.txt").write_text("a")
    mended = documents_of(tmp_path, encoding="gb18030", on_error="replace")
    assert [text.count("�") for text in mended] == [3, 0]
    want = [f"mended 3 bad lines: 3 not gb18030, first {tmp_path}/novel.txt:{first}"]
    assert mended.left_out() == want == read(tmp_path, encoding="gb18030", on_error="replace")[1]
    _, err = preprocess(
        tmp_path, tmp_path / "novel.txt", encoding="gb18030", on_error="replace", workers=1
    )
    assert want[0] in err


def documents_of(path, **flags):
    return InputDocuments(TextInputs(input=[str(path)], **flags), 1e9)


def test_any_byte_that_cannot_be_decoded_is_named():
    for byte in range(128, 256):
        marked = charsets.to_utf8(b"a" + bytes([byte]) + b"b", "ascii")
        with pytest.raises(UnicodeDecodeError) as caught:
            marked.decode()
        assert (
            charsets.broken_byte(caught.value) == byte
            and marked.decode("utf-8-sig", "replace") == "a�b"
        )


def test_control_characters_are_counted():
    assert charsets.why_binary(b"\xff\x01") == "1 control character in 2 bytes"
    assert charsets.why_binary(b"\xff\x01\x02") == "2 control characters in 3 bytes"


def test_a_pdf_is_named(tmp_path):
    (tmp_path / "a b.pdf").write_bytes(b"%PDF-1.7\n1 0 obj\n" + b"text " * 200)
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"%PDF-1.7\n"))
    message = error_of(lambda: read(tmp_path / "a b.pdf"))
    # Without a flag: not every command is given its text by one.
    said = f"{tmp_path}/a b.pdf is a PDF; convert it to text first: pdftotext '"
    assert message.startswith(said) and message.endswith("a b.txt'")
    assert "b.gz is a PDF" in error_of(lambda: read(tmp_path / "b.gz"))
    (tmp_path / "a.txt").write_text("a")
    assert read(tmp_path, include=["*.pdf", "*.txt"]) == (
        ["a"],
        ["passed over 2 files: 1 PDF, 1 not chosen by --include and --exclude"],
    )


def test_front_matter_stays(tmp_path):
    text = "---\ntitle: A\n---\n\n# A\n"
    (tmp_path / "a.md").write_text(text)
    assert read(tmp_path / "a.md")[0] == read(tmp_path)[0] == [text]


TRADITIONAL = (
    "第一回　宴桃園豪傑三結義\n話說天下大勢，分久必合，合久必分。\n周末七國分爭，並入於秦。\n" * 20
)


def novels(folder):
    folder.mkdir()
    (folder / "new.txt").write_bytes(NOVEL.encode("gb18030"))
    (folder / "old.txt").write_bytes(TRADITIONAL.encode("big5"))
    (folder / "utf.txt").write_text(NOVEL * 40)
    return folder


def test_each_file_has_a_guess_of_its_own(tmp_path):
    assert (
        charsets.guess(TRADITIONAL.encode("big5"))
        == charsets.guess(TRADITIONAL.encode("cp950"))
        == "big5"
    )
    assert charsets.guess(TRADITIONAL.encode("gb18030")) == "gb18030"
    (line,) = read(novels(tmp_path / "in"))[1]
    assert "new.txt:1: it looks like gb18030, which --encoding gb18030 reads\n" in line
    assert line.endswith("old.txt:1: it looks like big5, which --encoding big5 reads")


@pytest.mark.parametrize(
    ("encoding", "name", "other"), [("gb18030", "old.txt", "big5"), ("big5", "new.txt", "gb18030")]
)
def test_a_text_that_reads_like_another_encoding(tmp_path, encoding, name, other):
    *_, warning = read(novels(tmp_path / "in"), encoding=encoding, on_error="replace")[1]
    start = f"warning: {tmp_path}/in/{name} reads like {other}, not {encoding}: of the first "
    assert warning.startswith(start) and re.search(
        rf"lines {other} decodes (\d+), {encoding} decodes \d+$", warning
    )


@pytest.mark.parametrize("encoding", ["gb2312", "GBK"])
def test_older_names_are_read_as_gb18030(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("朱镕基和㐀\n".encode("gb18030"))
    assert read(tmp_path / "a.txt", encoding=encoding) == (["朱镕基和㐀\n"], [])
    (tmp_path / "a.txt").write_bytes(b"a \xff b\n")
    want = f"mended 1 bad line: 1 not {encoding}, first {tmp_path}/a.txt:1"
    assert read(tmp_path / "a.txt", encoding=encoding, on_error="replace")[1] == [want]


def test_quickstart_stops_if_much_of_the_text_is_in_another_encoding(tmp_path):
    folder = novels(tmp_path / "in")
    (folder / "utf.txt").write_text(NOVEL)
    message = error_of(lambda: list(documents_of(folder)))
    assert f"meshwright quickstart {folder} --encoding=gb18030`" in message
    assert message.endswith("--exclude new.txt old.txt")


def test_dry_run_checks_a_file_that_was_named(tmp_path, capsys):
    folder = novels(tmp_path / "in")
    argv = ["preprocess", "--tokenizer", "byte", "--dry-run", "--input"]
    assert main([*argv, str(folder / "old.txt")]) == 65
    assert "it looks like big5" in capsys.readouterr().err
    assert main([*argv, str(folder)]) == 0
    size = f"would read {(folder / 'utf.txt').stat().st_size:,} bytes"
    assert f"{size} with " in capsys.readouterr().out
    assert main(["preprocess", "--dry-run", "--input", str(folder)]) == 0
    assert (
        f"{size}: 3 of plain text" in (out := capsys.readouterr().out)
        and "a tokenizer is needed" in out
    )


@pytest.mark.parametrize("how", ["replace", "skip"])
def test_many_mended_or_dropped_lines_get_a_warning(tmp_path, how):
    """Above three percent, and ten lines; of lines of plain text as of those of JSON."""
    for name, form in (("a.txt", b"caf%b\n"), ("b.jsonl", b'{"text": "caf%b\\n\\n"}\n')):
        path, preprocessed = tmp_path / name, tmp_path / f"{name}-{how}"
        for bad, warning in (
            (40, "warning: 4% of 1,000 lines are not UTF-8; the likely cause is another"),
            (20, ""),
        ):
            path.write_bytes(form % b"\xe9" * bad + form % b"e" * (1000 - bad))
            left_out = read(path, on_error=how)[1]
            assert len(left_out) == 1 + bool(warning) and left_out[-1].startswith(warning)
            err = preprocess_inputs(preprocessed, path, on_error=how)[1]
            assert (warning in err) if warning else "warning:" not in err
            documents = documents_of(path, on_error=how)
            assert list(documents) and documents.left_out() == left_out
    path.write_bytes(b'{"text": 3}\n' * 11 + b'{"text": "x"}\n' * 9)
    if how == "skip":
        assert read(path, on_error=how)[1][-1] == "warning: 55% of 20 lines were left out"
