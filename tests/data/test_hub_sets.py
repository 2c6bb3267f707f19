"""Data sets of the Hugging Face Hub by its own library, from a server that answers as the Hub."""

import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
import urllib.parse

import pyarrow
import pyarrow.parquet
import pytest

pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
REVISION = "0123456789abcdef0123456789abcdef01234567"


def parquet(*texts):
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(texts)), "text": texts}), out)
    return out.getvalue()


FILES = {
    "data/train-00000-of-00001.parquet": parquet("a", "b é", "c"),
    "data/test-00000-of-00001.parquet": parquet("t"),
}


def entry(path):
    return {
        "type": "file",
        "path": path,
        "oid": hashlib.sha1(FILES[path]).hexdigest(),
        "size": len(FILES[path]),
    }


class Hub(http.server.BaseHTTPRequestHandler):
    """The answers about one data set, `org/name`."""

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        kind, _, rest = (
            path.removeprefix("/api").removeprefix("/datasets/org/name").strip("/").partition("/")
        )
        inside = rest.partition("/")[2]
        if path.startswith("/api/datasets/org/name") and kind in ("", "revision"):
            about = {
                "id": "org/name",
                "sha": REVISION,
                "siblings": [{"rfilename": name} for name in FILES],
            }
            self.answer(200, json.dumps(about).encode())
        elif kind == "tree" and inside == "data":
            self.answer(200, json.dumps([entry(path) for path in FILES]).encode())
        elif kind == "tree":
            self.answer(
                200,
                json.dumps(
                    [{"type": "directory", "path": "data", "oid": "0" * 40, "size": 0}]
                ).encode(),
            )
        elif kind == "resolve" and inside in FILES:
            content, asked = (
                FILES[inside],
                self.headers.get("Range", "bytes=0-").removeprefix("bytes="),
            )
            begin, _, last = asked.partition("-")
            part = content[int(begin) : int(last or len(content)) + 1]
            where = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(content)}"
            self.answer(206 if "Range" in self.headers else 200, part, {"Content-Range": where})
        else:
            self.answer(
                404,
                b"",
                {"X-Error-Code": "EntryNotFound" if "org/name" in path else "RepoNotFound"},
            )

    do_HEAD = do_GET

    def answer(self, status, content, more=()):
        self.send_response(status)
        headers = {
            "Content-Length": len(content),
            "X-Repo-Commit": REVISION,
            "ETag": f'"{hash(content)}"',
            **dict(more),
        }
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *words):
        pass


SCRIPT = """
import json, sys
from meshwright.data.text.reading import read_texts
from meshwright.base.errors import UserError
from meshwright.config.text_inputs import TextInputs

def texts_of(address):
    try:
        return list(read_texts(TextInputs(input=[address])))
    except UserError as error:
        return str(error)

print(json.dumps([texts_of(address) for address in sys.argv[1:]]))
if "hf://org/name" in sys.argv:
    import datasets
    datasets.load_dataset("org/name")
"""


def texts_of(folder, endpoint, *addresses, **more):
    """Read in a process of its own: the libraries read their address when they are imported."""
    env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder), **more}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *addresses], env=env, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout), done.stderr


def test_streamed_from_a_server_and_then_from_the_cache(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint, name = f"http://127.0.0.1:{server.server_port}", "hf://org/name"
    got, said = texts_of(
        tmp_path, endpoint, name, f"{name}:test", f"{name}[:2]", f"{name}:x", "hf://org/other"
    )
    assert got[:3] == [["a", "b é", "c"], ["t"], ["a", "b é"]]
    assert got[3] == "--input hf://org/name:x: Bad split: x. Available splits: ['train', 'test']"
    assert got[4].startswith(
        "--input hf://org/other: the Hub has no data set org/other; check the name"
    )
    server.shutdown()
    server.server_close()
    (texts, message), said_offline = texts_of(
        tmp_path, endpoint, name, "hf://org/other", HF_HUB_OFFLINE="1"
    )
    assert (
        texts == ["a", "b é", "c"]
        and "to read it without a network, put it into the cache first" in message
    )
    assert (
        "hf://org/name: the Hub cannot be asked (" in said_offline and "cannot be asked" not in said
    )
