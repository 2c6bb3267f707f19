"""The server of the live page: what it answers, and whom it refuses."""

import hashlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib import resources

import pytest
from pages import step_row

from meshwright.__main__ import main
from meshwright.base.errors import UNAVAILABLE, USAGE

for package in ("starlette", "uvicorn", "httpx2"):
    pytest.importorskip(
        package, reason=f"{package} is not installed: pip install 'meshwright[serve,test]'"
    )

from starlette.testclient import TestClient  # noqa: E402

from meshwright.apps.watch import app as application  # noqa: E402
from meshwright.apps.watch.overview import Watcher  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    rows = [{"event": "start", "attempt": 1, "iteration": 0, "time": 1.7e9, "train_iters": 9}]
    rows += [step_row(i, 5.0 - i) for i in range(1, 4)]
    rows += [{"event": "sample", "iteration": 2, "number": 0, "prompt": "A", "text": "<b>b"}]
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def watcher(folder):
    out = Watcher([folder])
    out.search()
    out.update()
    return out


@pytest.fixture
def client(watcher):
    return TestClient(application.make_app(watcher), base_url="http://localhost:6400")


@pytest.mark.promise("It changes nothing in a run")
def test_the_files_and_their_headers(client):
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    for address, (_, name) in application.FILES.items():
        answer = client.get(address)
        kind = kinds[name.rpartition(".")[2]]
        assert (
            answer.status_code == 200 and answer.headers["content-type"] == f"{kind}; charset=utf-8"
        ), name
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert client.get("/watch").status_code == 404 and client.post("/api/state").status_code == 405
    assert "content-security-policy" in client.get("/nothing").headers


@pytest.mark.promise("Their pages load nothing from elsewhere")
def test_the_page_has_no_outside_resources_and_nothing_inline():
    for name in ("page.html", "watch.css", "watch.js", "chart.js", "words.js"):
        text = resources.files("meshwright.apps.watch").joinpath(name).read_text()
        assert not re.search(
            r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|innerHTML|eval\(| style=| on\w+=\"",
            text,
        ), name
    page = resources.files("meshwright.apps.watch").joinpath("page.html").read_text()
    script = resources.files("meshwright.apps.watch").joinpath("watch.js").read_text()
    for used in re.findall(r'\$\("([\w-]+)"\)', script):
        assert f'id="{used}"' in page, used


def test_the_library_for_curves_is_a_release_with_its_licence():
    """uPlot 1.6.32, as published, so that whoever reads the page's code knows whose it is."""
    folder = resources.files("meshwright.apps.watch").joinpath("vendor")
    script = folder.joinpath("uPlot.iife.min.js").read_bytes()
    assert (
        hashlib.sha256(script).hexdigest()
        == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    )
    assert b"(v1.6.32)" in script and "MIT License" in folder.joinpath("LICENSE-uPlot").read_text()
    assert not re.search(
        rb"https?://(?!github.com/leeoniya/uPlot)|eval\(|fetch\(|XMLHttpRequest|import\(", script
    )


def test_both_languages_have_the_same_words():
    """Each word that the page uses is there in both."""
    folder = resources.files("meshwright.apps.watch")
    english, chinese = re.findall(
        r"^  \w\w: \{(.*?)^  \},", folder.joinpath("words.js").read_text(), re.M | re.S
    )
    keys = [re.findall(r'(\w+): (?:"|\{)', text) for text in (english, chinese)]
    assert keys[0] == keys[1] and len(set(keys[0])) > 50
    used = set(re.findall(r'data-word="(\w+)"', folder.joinpath("page.html").read_text()))
    for name in ("watch.js", "chart.js"):
        used |= set(re.findall(r'\bword\("(\w+)"\)', folder.joinpath(name).read_text()))
    states = {"waiting", "reading", "empty", "running", "silent", "ended", "failed"}
    assert used | states <= set(keys[0])


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 200),
        ({"Host": "[::1]:9"}, 200),
        ({"Origin": "http://localhost:6400", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example:6400"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:8000"}, 403),
        (
            {
                "Sec-Fetch-Site": "cross-site",
                "Sec-Fetch-Mode": "no-cors",
                "Sec-Fetch-Dest": "script",
            },
            403,
        ),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 403),
        (
            {
                "Sec-Fetch-Site": "cross-site",
                "Sec-Fetch-Mode": "navigate",
                "Sec-Fetch-Dest": "iframe",
            },
            403,
        ),
        (
            {
                "Sec-Fetch-Site": "cross-site",
                "Sec-Fetch-Mode": "navigate",
                "Sec-Fetch-Dest": "document",
            },
            200,
        ),
    ],
)
@pytest.mark.promise("It has no key", "Other sites' pages cannot")
def test_who_may_ask(client, headers, status):
    answer = client.get("/api/state", headers=headers)
    assert answer.status_code == status and "access-control-allow-origin" not in answer.headers
    assert (status == 200) == ("runs" in answer.text)


@pytest.mark.promise("`report` and `watch` show what stands in it as text")
def test_state_curves_and_samples(client, folder):
    (run,) = client.get("/api/state").json()["runs"]
    assert (run["name"], run["step"], run["dash"]) == ("run", 3, [])
    found = client.get(
        "/api/curves", params={"run": str(folder), "axis": "time", "smooth": 0}
    ).json()
    assert found[str(folder)]["lines"]["loss"]["y"] == [4.0, 3.0, 2.0]
    assert client.get("/api/samples", params={"run": str(folder), "step": 2}).json() == [
        {"number": 0, "prompt": "A", "text": "<b>b"}
    ]
    assert client.get("/api/samples", params={"run": str(folder), "step": 3}).json() == []


@pytest.mark.parametrize(
    "query",
    [
        "run=/etc",
        "points=1e9",
        "begin=nan",
        "smooth=2",
        "end=x",
        "run=",
    ],
)
@pytest.mark.fault("F30")
def test_nonsense_is_refused(client, query):
    assert client.get(f"/api/curves?{query}").status_code == 400


def test_flags(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["watch", str(tmp_path / "file"), "--port", "70000"]) == USAGE
    err = capsys.readouterr().err
    # a page that waits for ever for a misspelt name
    assert main(["watch", str(tmp_path / "fil")]) == USAGE
    assert f"fil does not exist; did you mean {tmp_path / 'file'}?" in capsys.readouterr().err
    assert (
        "file is a file; give the folder of a run" in err
        and "--port 70000 must be at most 65535" in err
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", str(tmp_path), "--port", str(port)]) == UNAVAILABLE
    assert (
        f"--port {port}: Address already in use; choose another --port" in capsys.readouterr().err
    )


def test_without_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in ("watch.app", "pages.protocol"):
        monkeypatch.delitem(sys.modules, f"meshwright.apps.{name}", raising=False)
    assert main(["watch", str(tmp_path)]) == UNAVAILABLE
    assert (
        "watch needs uvicorn: install it with pip install 'meshwright[serve]'"
        in capsys.readouterr().err
    )


def test_the_whole_program(folder):
    """Events arrive while the file grows, and Ctrl-C ends the program at once, without an error."""
    command = [sys.executable, "-m", "meshwright", "watch", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address, hint = (process.stdout.readline().strip() for _ in range(2))
        assert "Ctrl-C ends the page" in hint
        with urllib.request.urlopen(address + "api/events", timeout=20) as events:

            def next_step():
                while not (line := events.readline()).startswith(b"data: "):
                    assert line
                return json.loads(line[6:])["runs"][0].get("step")

            steps = [next_step()]
            while steps[-1] != 3:
                steps.append(next_step())
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(step_row(4, 1.0)) + "\n")
            assert next_step() == 4
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
            assert time.monotonic() - begun < 5
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
        process.communicate()
