"""Preprocess JSON lines: what is kept, counted and printed, and how it fails."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from corpora import line, preprocess_inputs, texts_in

from helpers import error_of, tokens_of
from meshwright.base.errors import BAD_DATA, IO
from meshwright.config.schema import TokenizerFlags
from meshwright.config.text_inputs import TextInputs
from meshwright.data.files.indexed import Indexed
from meshwright.data.text import preprocess, reading


def work(tmp_path, given, tokenizer="ByteTokenizer", vocab_size=None, **settings):
    """Preprocess a file's content (bytes) or the named inputs; return stdout and stderr."""
    if isinstance(given, bytes):
        (tmp_path / "in.jsonl").write_bytes(given)
        given = [str(tmp_path / "in.jsonl")]
    flags = TokenizerFlags(tokenizer_type=tokenizer, vocab_size=vocab_size)
    return preprocess_inputs(
        settings.pop("output_prefix", tmp_path / "out"), *given, tokenizer=flags, **settings
    )


def require_refusal(status, words, act):
    assert re.search(words, error_of(act, status))


FEW = "--split can only keep whole ones of them for validation; --document-length 4000 cuts longer ones into parts"


@pytest.mark.flag("preprocess.output_prefix append_eod dataset_impl")
def test_documents_in_order_with_eod(tmp_path):
    settings = {"append_eod": True, "log_interval": 1, "dataset_impl": "lazy"}
    stdout, stderr = work(tmp_path, line("ab") + b"\n" + line("é") + b"\n", **settings)
    data = Indexed(tmp_path / "out_text_document")
    assert [tokens_of(data, i).tolist() for i in range(2)] == [[97, 98, 256], [195, 169, 256]]
    assert (data.dtype, data.doc_idx.tolist()) == (np.dtype("<u2"), [0, 1, 2])
    lines = stdout.splitlines()
    assert lines[0] == f"Opening {tmp_path / 'in.jsonl'}"
    assert lines[1:5] == [
        "> building ByteTokenizer tokenizer ...",
        " > padded vocab (size: 257) with 127 dummy tokens (new size: 384)",
        "Vocab size: 257",
        f"Output prefix: {tmp_path / 'out'}",
    ]
    assert lines[5].startswith("Time to startup: ")
    assert lines[6] == (
        f"wrote {tmp_path / 'out'}_text_document.bin/.idx: 2 documents, 2 sequences, 6 tokens "
        "(the largest document has 3), 12 bytes (uint16)"
    )
    notice, *processed = stderr.splitlines()
    assert notice == "--dataset-impl lazy: written as mmap, which every loader reads"
    assert [w.split("(")[0] for w in processed] == [
        "Processed 2 documents ",
        f"note: 2 documents: {FEW}",
    ]
    assert (
        lines[5].removeprefix("Time to startup: ").partition(".")[2].isdigit()
        and len(lines[5].split(".")[1]) == 2
    )


@pytest.mark.flag("document_length")
def test_a_book_is_cut_into_documents(tmp_path):
    """At ends of paragraphs; nothing is lost, and each part ends as a document does."""
    book = "".join(f"Chapter {n}\n\n{'A line of prose. ' * 9}\n\n" for n in range(50))
    (tmp_path / "book.txt").write_text(book)
    advice = "note: 1 document: no --split can keep text of it for validation; --document-length 4000 cuts longer "
    assert advice in preprocess_inputs(tmp_path / "x", tmp_path / "book.txt")[1]
    out, err = preprocess_inputs(
        tmp_path / "x", tmp_path / "book.txt", document_length=500, append_eod=True
    )
    parts = texts_in(tmp_path / "x_text_document")
    assert "".join(parts) == book and all(
        len(part) <= 500 and part.endswith("\n\n") for part in parts
    )
    assert (
        len(parts) > 15
        and f" {len(parts)} documents, {len(parts)} sequences" in out
        and "note:" not in err
    )
    assert Indexed(tmp_path / "x_text_document").doc_idx.tolist() == list(range(len(parts) + 1))
    _, err = preprocess_inputs(tmp_path / "x", tmp_path / "book.txt", document_separator="")
    assert (
        "note: 100 documents, half of them of 153 tokens or fewer" not in err
        and "100 documents" in err
    )


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_document_of_more_than_a_million_tokens_is_named(tmp_path, monkeypatch, name):
    """Several documents that nothing divides become one."""
    monkeypatch.setattr(preprocess, "LONG_DOCUMENT", 99)
    for size, is_long in ((99, False), (100, True)):
        text = "x" * size
        (tmp_path / name).write_bytes(line(text) if name == "a.jsonl" else text.encode())
        out, err = preprocess_inputs(tmp_path / "x", tmp_path / name)
        assert f"1 documents, 1 sequences, {size} tokens (the largest document has {size}), " in out
        cure = (
            "give each a line or row"
            if name == "a.jsonl"
            else "divide them by lines <|endoftext|>, or name"
        )
        warning = (
            f"warning: the largest document has 100 tokens; if it was meant as several, {cure}"
        )
        assert (warning in err) == is_long == ("warning" in err)


def test_blanks_of_a_key_and_rows_without_text(tmp_path):
    rows = [{"review text": text} for text in ("good", "", "bad", "")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, err = preprocess_inputs(tmp_path / "x", tmp_path / "in.jsonl", json_keys=["review text"])
    assert (
        "x_review_text_document.bin/.idx: 4 documents (2 without text, which have no sequence), 2 sequences"
        in out
    )
    assert "note: in the names of the files, _ stands for the blanks of review text" in err
    message = error_of(
        lambda: preprocess_inputs(tmp_path / "x", tmp_path / "in.jsonl", json_keys=["a b", "a_b"]),
        2,
    )
    assert message.startswith("--json-keys 'a b' 'a_b' differ in blanks alone")


def test_large_vocabulary_is_int32(tmp_path):
    work(tmp_path, line("65498 1"), "NullTokenizer", 65498)
    assert Indexed(tmp_path / "out_text_document").dtype == np.uint16
    work(tmp_path, line("65499 1"), "NullTokenizer", 65499)
    data = Indexed(tmp_path / "out_text_document")
    assert (data.dtype, tokens_of(data, 0).tolist()) == (np.dtype("<i4"), [65499, 1])


@pytest.mark.promise("Lines that are no text are counted and named")
def test_good_lines_of_any_shape_are_kept(tmp_path):
    big = "z" * 1_000_000
    content = (
        b"\xef\xbb\xbf" + line("bom") + b"\r\n"
        b"\r\n   \n\t\n\n" + line("crlf") + b"\r\n"
        b'{"text": "nan elsewhere", "score": NaN}\n'
        b'{"text": "half elsewhere", "title": "\\ud800"}\n'
        b'{"text": "pair \\ud83d\\ude42", "n": 123456789012345678901234567890}\n'
        b'{"text": "more digits than Python takes", "n": '
        + b"9" * 5000
        + b"}\n"
        + json.dumps({"text": "line\u2028separator \u0085 \x00"}, ensure_ascii=False).encode()
        + b"\n"
        + line(big)
        + b"\n"
        + line("last, without a line feed")
    )
    _, stderr = work(tmp_path, content)
    assert "left out" not in stderr
    wanted = [
        "bom",
        "crlf",
        "nan elsewhere",
        "half elsewhere",
        "pair \U0001f642",
        "more digits than Python takes",
        "line\u2028separator \u0085 \x00",
    ]
    assert texts_in(tmp_path / "out_text_document") == [*wanted, big, "last, without a line feed"]


BAD = {
    b'{"text": "caf\xe9"}': ("not UTF-8", "byte 0xe9 at column 14"),
    b'{"text": "x"': ("not JSON", "Expecting ',' delimiter at column 13"),
    b"[" * 100_000: ("not JSON", "its brackets are nested too deeply"),
    # a byte order mark in the middle of a file
    b"\xef\xbb\xbf" + line("x"): ("not JSON", "column 1"),
    b'["text"]': ("not a JSON object", "but a list"),
    b'{"body": "x"}': ("no key 'text'", "keys: body"),
    b'{"text": null}': ("null under 'text'", "NoneType"),
    b'{"text": 5}': ("no text under 'text'", "int"),
    b'{"text": "\\udc00 x"}': ("lone surrogate under 'text'", r"\\udc00"),
}


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_line_stops_by_default(tmp_path, bad):
    words = rf"in.jsonl:2: {BAD[bad][0]} \(.*{BAD[bad][1]}.*--on-error skip"
    require_refusal(BAD_DATA, words, lambda: work(tmp_path, line("x") + b"\n" + bad + b"\n"))
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_key_is_wrong(tmp_path):
    """The first line says which keys there are, with or without text; a later one is a bad line."""
    wrong, skip = (
        b'{"body": "x", "n": 1, "title": "y"}\n',
        "leave such lines out with --on-error skip",
    )
    choose = "choose one of text with --json-keys (body, title)"
    first = f"in.jsonl:1: no key 'text' (keys: body, n, title); {choose}, or {skip} (nothing was written)"
    assert error_of(lambda: work(tmp_path, wrong)).endswith(first)
    later = f"in.jsonl:2: no key 'text' (keys: body, n, title); mend the line, or {skip} (nothing was written)"
    assert error_of(lambda: work(tmp_path, line("x") + b"\n" + wrong)).endswith(later)
    nothing = f"first {tmp_path}/in.jsonl:1) (keys: body, n, title; {choose}): nothing was written"
    assert error_of(lambda: work(tmp_path, wrong, on_error="skip")).endswith(nothing)
    assert "; keys: " not in error_of(lambda: work(tmp_path, b"{}\n", on_error="skip"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_bytes(wrong)
    want = f"passed over 1 file: 1 JSON lines with no key 'text'; {choose}"
    assert error_of(lambda: work(tmp_path, [str(tmp_path / "in")])).endswith(want)


@pytest.mark.parametrize(
    "names, keys", [(("role", "content"), ["text"]), (("from", "value"), ["my chat"])]
)
def test_lists_of_chat_messages_get_the_command_that_makes_texts_of_them(tmp_path, names, keys):
    chat = [
        dict(zip(names, message, strict=True))
        for message in (("user", "Why?"), ("assistant", 'It\'s "so".\n'))
    ]
    content = json.dumps({"id": 1, "my chat": chat}).encode()
    message = error_of(lambda: work(tmp_path, content, json_keys=keys))
    assert (
        "'my chat' lists the messages of a chat; make one text of each line first: jq -c '"
        in message
    )
    command = message.partition("first: ")[2].partition(", or leave")[0]
    if shutil.which("jq"):
        made = subprocess.run(
            shlex.split(command), input=content, capture_output=True, check=True
        ).stdout
        assert json.loads(made) == {"text": 'user: Why?\nassistant: It\'s "so".\n'}
    assert "lists the messages" not in error_of(
        lambda: work(tmp_path, b'{"messages": [{"role": 1}]}')
    )


def test_plain_text_named_like_json_lines_gets_a_hint(tmp_path):
    path = tmp_path / "in.jsonl"
    for read in (
        lambda: list(reading.read_texts(TextInputs(input=[str(path)]))),
        lambda: work(tmp_path, [str(path)]),
    ):
        path.write_text("\nOnce upon a time\nthere was.\n\nThe end.\n")
        hint = r'in.jsonl:2: not JSON .*one {"text": "..."} a line is expected; plain text is called .txt'
        require_refusal(BAD_DATA, hint, read)
        path.write_text('{"text": "x"}\nno\n')
        require_refusal(BAD_DATA, r"in.jsonl:2: not JSON \([^)]*\)(?!; in)", read)


def test_a_line_that_the_tokenizer_refuses_is_bad(tmp_path):
    content = line("1 2") + b"\n" + line("3 x") + b"\n" + line("4")
    words = "in.jsonl:2: refused by the tokenizer .*'x'"
    require_refusal(BAD_DATA, words, lambda: work(tmp_path, content, "NullTokenizer", 9))
    _, stderr = work(tmp_path, content, "NullTokenizer", 9, on_error="skip")
    assert "1 refused by the tokenizer" in stderr
    assert Indexed(tmp_path / "out_text_document").tokens.tolist() == [1, 2, 4]


@pytest.mark.flag("preprocess.json_keys")
def test_keys_stay_aligned_when_a_text_is_empty(tmp_path):
    content = b"\n".join(
        [line("a", title="A"), line("", title="B"), line("c", title="C"), b'{"text": "d"}']
    )
    stdout, _ = work(
        tmp_path, content, json_keys=["text", "title", "text"], append_eod=True, on_error="skip"
    )
    assert texts_in(tmp_path / "out_text_document") == ["a", "", "c"]
    assert texts_in(tmp_path / "out_title_document") == ["A", "B", "C"]
    assert Indexed(tmp_path / "out_text_document").doc_idx.tolist() == [0, 1, 1, 2]
    assert stdout.count("wrote ") == 2
    assert "3 documents (1 without text, which have no sequence), 2 sequences, 4 tokens" in stdout


@pytest.mark.flag("preprocess.input")
def test_several_inputs_patterns_and_standard_input(tmp_path, monkeypatch):
    for name in ("b1", "b0", "a"):
        (tmp_path / f"{name}.json").write_bytes(line(name))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line("stdin"))))
    given = [str(tmp_path / "b*.json"), "-", str(tmp_path / "a.json")]
    stdout, _ = work(tmp_path, given, workers=1)
    assert texts_in(tmp_path / "out_text_document") == ["b0", "b1", "stdin", "a"]
    assert [w.split("/")[-1] for w in stdout.splitlines()[:4]] == [
        "b0.json",
        "b1.json",
        "Opening -",
        "a.json",
    ]


def test_a_pipe_is_read_from_its_start(tmp_path):
    pipe, words = tmp_path / "pipe", line("from a pipe")
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"printf '%s' '{words.decode()}' > {pipe}"]):
        work(tmp_path, [str(pipe)], workers=1)
    assert texts_in(tmp_path / "out_text_document") == ["from a pipe"]


def test_inputs_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    within = str(tmp_path / "file" / "x")
    for status, words, given, settings in (
        (BAD_DATA, "nowhere does not exist", ["nowhere"], {}),
        (BAD_DATA, "in.jsonl is cut short or damaged", b"\xfd7zXZ\x00...", {}),
        (BAD_DATA, "in.jsonl is cut short or damaged", [str(tmp_path)], {}),
        (BAD_DATA, "no token under 'text'", b"\n\n", {}),
        (BAD_DATA, "no token under 'text' .*1 bad line: 1 not JSON", b"{", {"on_error": "skip"}),
        (IO, "cannot be written", line("x"), {"output_prefix": within}),
    ):
        require_refusal(
            status,
            words,
            lambda given=given, settings=settings: work(tmp_path, given, workers=1, **settings),
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "in.jsonl"]


@pytest.mark.flag("preprocess.log_interval")
def test_a_bar_on_a_terminal(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    _, stderr = work(tmp_path, b"\n".join([line("x")] * 20), log_interval=1, stderr=Terminal())
    assert "━" in stderr and "Processed 20 documents" in stderr.splitlines()[-3]  # a note follows
