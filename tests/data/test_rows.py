"""CSV, TSV and SQLite, and data sets of the Hugging Face Hub by a stand-in for its library."""

import csv
import gzip
import io
import json
import random
import re
import sqlite3
import sys
import types
import zipfile

import pyarrow
import pyarrow.parquet
import pytest
from corpora import texts_in

from helpers import error_of
from meshwright.__main__ import main
from meshwright.apps.quickstart import command as quickstart
from meshwright.base.errors import IO, UNAVAILABLE, USAGE
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import hub_sets, limits, reading
from meshwright.data.text.inputs import find_inputs


def read(*paths, **flags):
    """Return the documents, and the lines about what was left out."""
    given = TextInputs(input=[str(path) for path in paths], **flags)
    found = find_inputs(given)
    return list(reading.read_texts(given, found)), found.left_out(given.on_error)


def table_of(texts, **form):
    """Return texts as CSV, in the second of three columns."""
    out = io.StringIO()
    csv.writer(out, **form).writerows(
        [["id", "review", "stars"], *([n, text, 5] for n, text in enumerate(texts))]
    )
    return out.getvalue().encode()


TEXTS = ['a "quoted", one', "two\nlines", "tab\tand; semicolon", "é模型", "", "last | one"]


def test_csv_and_tsv_are_tables(tmp_path, monkeypatch):
    """By name, in a folder or archive; with other signs between fields and charsets."""
    monkeypatch.setattr(limits, "PIECE", 60)
    texts = [f"{n} {random.Random(n).choice(TEXTS)}" for n in range(40)]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.csv").write_bytes(table_of(texts))
    with zipfile.ZipFile(tmp_path / "e.zip", "w") as pack:
        pack.writestr("reviews.csv", table_of(texts))
        pack.writestr("other.csv", b"id\n1\n")
    (folder / "other.csv").write_bytes(b"id,note\n1,2\n")
    passed = [
        "passed over 1 file: 1 table with no column 'review'; choose one of text with --json-keys (id, note)"
    ]
    assert read(folder, json_keys=["review"]) == (texts, passed)
    assert read(tmp_path / "e.zip", json_keys=["review"]) == (
        texts,
        [passed[0].replace("id, note", "id")],
    )
    (folder / "a.csv").write_bytes(table_of(texts, lineterminator="\r", quoting=csv.QUOTE_ALL))
    assert read(folder, json_keys=["review"]) == (texts, passed)
    (tmp_path / "f.csv").write_bytes(b"id;review\r1;a, b, c\r")
    assert read(tmp_path / "f.csv", json_keys=["review"]) == (["a, b, c"], [])
    message = error_of(lambda: read(folder / "a.csv"))
    assert (
        "a.csv has no column 'text'; choose one of text with --json-keys (id, review, stars)"
        in message
    )
    (tmp_path / "h.csv").write_bytes(b"id,review text\n1,a\n")
    message = error_of(lambda: read(tmp_path / "h.csv", json_keys=["review", "text"]))
    assert message.endswith(
        "with --json-keys (id, review text); did you mean 'review text' in quotes?"
    )


@pytest.fixture
def database(tmp_path):
    with sqlite3.connect(tmp_path / "a b?.db") as made:
        made.execute('CREATE TABLE "my ""posts" (id INTEGER, body TEXT)')
        made.executemany('INSERT INTO "my ""posts" VALUES (?, ?)', [(1, "one\n"), (2, "zwei é")])
    made.close()
    return tmp_path / "a b?.db"


@pytest.mark.flag("preprocess.table evaluate.table")
def test_sqlite(tmp_path, database):
    assert read(database, json_keys=["body"]) == (["one\n", "zwei é"], [])  # its only table
    with sqlite3.connect(database) as made:
        made.execute('CREATE VIEW short AS SELECT body AS text FROM "my ""posts" WHERE id = 1')
        made.execute("CREATE TABLE odd (text)")
        made.executemany("INSERT INTO odd VALUES (?)", [("a",), (None,), (3,), (b"\xff",)])
        made.execute("INSERT INTO odd VALUES (CAST(x'e9' AS TEXT))")
    made.close()
    assert read(database, table="short")[0] == read(tmp_path, table="short")[0] == ["one\n"]
    assert 'has the tables my "posts, short, odd; name one of them with --table' in error_of(
        lambda: read(database)
    )
    assert "has the tables" in error_of(lambda: read(database, table="none"))
    assert "has no column 'text'; choose one of text with --json-keys (body)" in error_of(
        lambda: read(database, table='my "posts')
    )
    assert "a b?.db: row 2: null under 'text'" in error_of(lambda: read(database, table="odd"))
    documents, (left_out,) = read(database, table="odd", on_error="skip")
    assert (
        documents[0] == "a"
        and "1 not UTF-8" in left_out
        and "2 no text under 'text', first" in left_out
    )
    (tmp_path / "a.txt").write_text("a")
    assert read(tmp_path) == (["a"], ["passed over 1 file: 1 SQLite database, which needs --table"])
    assert "--table x names a table of an SQLite database, but no --input is one" in error_of(
        lambda: read(tmp_path / "a.txt", table="x"), USAGE
    )
    sqlite3.connect(tmp_path / "none.db").execute("PRAGMA user_version = 1").connection.close()
    assert (
        error_of(lambda: read(tmp_path / "none.db"))
        == f"{tmp_path / 'none.db'} has no table; name another file"
    )
    (tmp_path / "cut.db").write_bytes(database.read_bytes()[:5000])
    assert "cut.db is cut short or damaged (" in error_of(
        lambda: read(tmp_path / "cut.db", table="short")
    )
    (tmp_path / "z.gz").write_bytes(gzip.compress(database.read_bytes()))
    assert "z.gz is a table (sqlite) in a stream" in error_of(lambda: read(tmp_path / "z.gz"))


def test_a_database_that_needs_a_table_and_a_column_says_both(database):
    with sqlite3.connect(database) as made:
        made.execute("CREATE TABLE users (name VARCHAR(9), born DATE, note)")
    made.close()
    message = error_of(lambda: read(database))
    assert (
        'has the tables my "posts (body), users (name, note); name one of them with --table, and its'
        in message
    )
    assert message.endswith("its column of text with --json-keys")
    message = error_of(lambda: read(database, json_keys=["body"]))
    assert message.endswith('has the tables my "posts, users; name one of them with --table')


PAIRS = [("one", "A"), ("", "B"), ("three", "C"), (None, "D"), ("five", "")]


def several_keys(folder, form):
    """Return a file of this form with the pairs in its columns."""
    path = folder / f"in.{form}"
    records = [{"n": n, "body": body, "my title": title} for n, (body, title) in enumerate(PAIRS)]
    if form == "jsonl":
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    elif form == "csv":  # a row of too many fields, for the null
        lines = [
            f"{r['body']},{r['my title']},{r['n']}" if r["body"] is not None else ",,,,x"
            for r in records
        ]
        path.write_text("\n".join(["body,my title,n", *lines]))
    elif form == "sqlite":
        with sqlite3.connect(path) as made:
            made.execute('CREATE TABLE posts (n INTEGER, body TEXT, "my title" TEXT)')
            made.executemany(
                "INSERT INTO posts VALUES (?, ?, ?)", [tuple(record.values()) for record in records]
            )
        made.close()
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


@pytest.mark.parametrize("form", ["jsonl", "csv", "sqlite", "parquet"])
def test_several_keys_of_a_table_are_those_of_json_lines(tmp_path, capsys, form):
    """Each in files of its own, aligned; a row without one of the texts is left out of both."""
    path, prefixes = (
        several_keys(tmp_path, form),
        [str(tmp_path / f"o_{key}_document") for key in ("body", "my_title")],
    )
    argv = f"preprocess --input {path} --tokenizer byte --output-prefix {tmp_path}/o".split()
    argv += ["--workers", "1"]
    assert main([*argv, "--json-keys", "body", "my title", "body", "--on-error", "skip"]) == 0
    assert [texts_in(prefix) for prefix in prefixes] == [
        ["one", "", "three", "five"],
        ["A", "B", "C", ""],
    ]
    err = capsys.readouterr().err
    assert f"next: meshwright train --data-path {' '.join(prefixes)} --save RUN ...\n" in err
    assert "left out 1 bad line:" in err and "--document-separator" not in err
    assert (
        main([*argv, "--json-keys", "body", "head", "--output-prefix", str(tmp_path / "other")])
        == 65
    )
    err = capsys.readouterr().err
    assert re.search(
        r"no (key|column) 'head'.*; choose one of text with --json-keys \(body, my title", err
    )


class StandIn(types.ModuleType):
    """What this package uses of the library `datasets`."""

    def __init__(self, content):
        super().__init__("datasets")
        self.content, self.asked = content, []
        self.config = types.SimpleNamespace()
        self.utils = types.SimpleNamespace(
            logging=types.SimpleNamespace(set_verbosity_error=lambda: None)
        )

    def disable_progress_bars(self):
        pass

    def load_dataset(self, name, config, *, split, streaming, revision):
        assert streaming
        self.asked.append((name, config, split, revision))
        if isinstance(self.content, Exception):
            raise self.content
        return Split(self.content)


class Split:
    def __init__(self, content, keys=("id", "text")):
        self.content, self.column_names = content, list(keys)

    def select_columns(self, keys):
        return Split(self.content, keys)

    def take(self, count):
        return Split(self.content[:count], self.column_names)

    def __iter__(self):
        for row in self.content:
            if isinstance(row, Exception):
                raise row
            yield {key: row[key] for key in self.column_names}


@pytest.fixture
def library(monkeypatch):
    made = StandIn([{"id": n, "text": f"text {n}\n"} for n in range(9)])
    monkeypatch.setitem(sys.modules, "datasets", made)
    monkeypatch.setattr("meshwright.base.hub.require_address", lambda endpoint: None)
    monkeypatch.setattr(
        "huggingface_hub.dataset_info", lambda name, timeout: types.SimpleNamespace(sha="c0ffee")
    )
    return made


@pytest.mark.parametrize(
    ("address", "asked", "count"),
    [
        ("hf://org/name", ("org/name", None, "train", "c0ffee"), 9),
        ("hf://org/na.me-2/con_fig:test", ("org/na.me-2", "con_fig", "test", "c0ffee"), 9),
        ("hf://datasets/org/name:validation[:4]", ("org/name", None, "validation", "c0ffee"), 4),
    ],
)
def test_data_sets_of_the_hub(library, address, asked, count):
    assert read(address) == ([f"text {n}\n" for n in range(count)], []) and library.asked == [asked]


def test_a_data_set_of_the_hub_to_tokens(tmp_path, library, capsys, monkeypatch):
    """The same revision is not read again; another one is other data."""
    argv = f"preprocess --input hf://org/name --output-prefix {tmp_path}/x --tokenizer byte".split()
    assert (
        main([*argv, "--dry-run"]) == 0 and "1 of the Hugging Face Hub" in capsys.readouterr().out
    )
    assert main([*argv, "--workers", "1"]) == 0 and not library.asked[1:]
    assert texts_in(tmp_path / "x_text_document") == [f"text {n}\n" for n in range(9)]
    assert (
        main(argv) == 0
        and "already there, unchanged" in capsys.readouterr().out
        and not library.asked[1:]
    )
    monkeypatch.setattr(
        "huggingface_hub.dataset_info", lambda name, timeout: types.SimpleNamespace(sha="bad")
    )
    assert main(argv) == 73 and "hf://org/name@bad" not in library.asked
    assert "name@c0ffee then, name@bad now" in capsys.readouterr().err
    assert str(quickstart.default_folder("hf://org/name/config:train[:9]")) == "config-model"


def test_what_goes_wrong_with_the_hub(library, monkeypatch):
    for address in ("hf://name", "hf://org/name:train[5%]", "hf://org/name/"):
        assert (
            f"{address} is not the name of a data set; write hf://org/name[/config][:split]"
            in error_of(lambda address=address: read(address), USAGE)
        )
    assert (
        "hf://org/name has no column 'body'; choose one of text with --json-keys (id, text)"
        in error_of(lambda: read("hf://org/name", json_keys=["body"]))
    )
    library.content[3] = {"id": 3, "text": None}
    assert "hf://org/name: row 4: null under 'text'" in error_of(lambda: read("hf://org/name"))
    library.content[3] = ConnectionError("gone\nnow")
    assert "hf://org/name cannot be read to its end: gone; start" in error_of(
        lambda: read("hf://org/name"), IO
    )
    library.content = ValueError("Bad split: x. Available splits: ['train']")
    assert "--input hf://org/name:x: Bad split: x. Available splits" in error_of(
        lambda: read("hf://org/name:x")
    )

    def unreachable(endpoint):
        raise OSError

    monkeypatch.setattr("meshwright.base.hub.require_address", unreachable)
    library.content = ConnectionError("Couldn't reach 'org/name' on the Hub")
    message = error_of(lambda: read("hf://org/name"), UNAVAILABLE)
    assert (
        "is not available (Couldn't reach 'org/name' on the Hub); to read it without a network, put"
        in message
    )
    assert library.asked[-1] == ("org/name", None, "train", None) and library.config.HF_HUB_OFFLINE
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "needs the package datasets: pip install 'meshwright[datasets]'" in error_of(
        lambda: read("hf://org/name"), UNAVAILABLE
    )
    assert hub_sets.parse("hf://a/b").rows is None
