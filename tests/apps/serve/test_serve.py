"""`meshwright serve` with a real model: its texts, its flags, its clients, and how it ends."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sites import Site, wait_until

from helpers import free_port, train_on_texts
from meshwright import load
from meshwright.__main__ import main
from meshwright.apps.serve import app
from meshwright.base.errors import BAD_DATA, NON_FINITE, UNAVAILABLE, USAGE
from meshwright.base.fields import Refusal
from meshwright.config.schema import Sampling
from meshwright.data import tokenizers
from meshwright.generation import beam
from meshwright.generation.requests import Request

SHAPE = "--num-layers=1 --hidden-size=16 --num-attention-heads=2 --seq-length=48 --max-position-embeddings=48 "
SHAPE += "--micro-batch-size=8 --lr=1e-2 --hidden-dropout=0 --attention-dropout=0 --train-iters=8"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    texts = ["the cat sat.", "a dog ran."] * 300
    return Path(train_on_texts(folder, texts, ["--tokenizer-type=ByteTokenizer"], SHAPE.split()))


def visit(run: Path, client: Callable[[Site], None], *argv: str, end: int = signal.SIGTERM) -> int:
    """Serve in this thread while a client is at work in another, until a signal."""
    port, failures = free_port(), list[BaseException]()

    def work() -> None:
        site = Site(port, None, None, None)  # type: ignore[arg-type]
        try:
            wait_until(lambda: _answers(site), 30)
            client(site)
        except BaseException as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), end)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        status = main(["serve", str(run), "--device=cpu", f"--port={port}", *argv])
    finally:
        thread.join(30)
    if failures:
        raise failures[0]
    return status


def _answers(site: Site) -> bool:
    try:
        return site.ask("GET", "/health")[0] == 200
    except OSError:
        return False


@pytest.mark.promise("A model says what it has learned", "Texts are not filtered")
def test_texts_are_the_models(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load(run, device="cpu")
    prompts = ["the c", "a", "d"]
    greedy = [model.generate(p, greedy=True, max_new_tokens=9) for p in prompts]
    sampled = model.generate("the", seed=5, max_new_tokens=20)
    logits = model.logits("the c").log_softmax(-1)
    ids = model.encode("the c")
    best = beam.search_beams(
        model, Request(model.encode("a"), Sampling(out_seq_length=9)), beam.BeamOptions(3)
    )
    wanted = [float(logits[at, ids[at + 1]]) for at in range(4)]

    def client(site: Site) -> None:
        answer = site.complete(prompt=prompts, max_tokens=9, temperature=0)
        assert [c["text"] for c in answer["choices"]] == greedy
        assert site.complete(prompt="the", max_tokens=20, seed=5)["choices"][0]["text"] == sampled
        scored = site.complete(prompt=[ids], max_tokens=0, echo=True, logprobs=1)["choices"][0][
            "logprobs"
        ]
        assert scored["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-5)
        for found, top in zip(
            scored["token_logprobs"][1:], scored["top_logprobs"][1:], strict=True
        ):
            assert max(top.values()) >= found
        status, answer, _ = site.ask(
            "PUT", "/api", {"prompts": ["a"], "tokens_to_generate": 9, "top_k": 1}
        )
        assert status == 200 and answer["text"] == ["a" + greedy[1]]
        status, answer, _ = site.ask(
            "PUT", "/api", {"prompts": ["a"], "tokens_to_generate": 9, "beam_width": 3}
        )
        assert status == 200 and answer["text"] == ["a" + t.text for t in best]
        assert (
            answer["scores"] == [t.score for t in best]
            and "".join(answer["segments"][0]) == answer["text"][0]
        )

    assert visit(run, client) == 0
    assert "serving run, step 8, on http://127.0.0.1:" in capsys.readouterr().out


def test_the_openai_client(run: Path) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")

    def client(site: Site) -> None:
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{site.port}/v1", api_key="letters-and-digits"
        ) as c:
            assert c.models.list().data[0].id == "run"
            whole = c.completions.create(
                model="run", prompt="the", max_tokens=8, temperature=0, logprobs=1
            )
            parts = c.completions.create(
                model="run", prompt="the", max_tokens=8, temperature=0, stream=True
            )
            assert "".join(p.choices[0].text for p in parts) == whole.choices[0].text
            turns = [{"role": "user", "content": "the"}]
            talk = c.chat.completions.create(
                model="run", messages=turns, max_tokens=8, temperature=0, logprobs=True
            )
            said = c.chat.completions.create(
                model="run", messages=turns, max_tokens=8, temperature=0, stream=True
            )
            assert (
                "".join(p.choices[0].delta.content or "" for p in said)
                == talk.choices[0].message.content
            )
            with pytest.raises(openai.NotFoundError):
                c.completions.create(model="other", prompt="a")
            with pytest.raises(openai.BadRequestError, match="suffix"):
                c.completions.create(model="run", prompt="a", suffix="b")

    assert visit(run, client, "--api-key=letters-and-digits") == 0


@pytest.mark.fault("F33")
def test_sigterm_lets_answers_finish(run: Path) -> None:
    """A stream that is at work ends with [DONE]; new connections are refused."""
    found: dict[str, Any] = {}

    def client(site: Site) -> None:
        s = site.connect()
        body = json.dumps(
            {"prompt": "a", "max_tokens": 40, "stream": True, "n": 8, "logprobs": 5}
        ).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        s.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
        s.recv(1)

        def read() -> None:
            out = b""
            while part := s.recv(1 << 16):
                out += part
            s.close()
            found["text"], found["end"] = out, time.monotonic()

        found["reader"] = threading.Thread(target=read)
        found["reader"].start()

    began = time.monotonic()
    assert visit(run, client) == 0
    found["reader"].join(5)
    assert b"data: [DONE]" in found["text"] and time.monotonic() - began < 10


@pytest.mark.flag(
    """host port api_key api_key_file allowed_hosts served_model_name serve.chat_template slots queue max_body_size
    read_timeout request_timeout"""
)
def test_every_flag_of_the_server_arrives(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SimpleNamespace()

    def note(served: Any, limits: Any, slots: int, queue: int, listening: socket.socket) -> int:
        vars(seen).update(
            served=served, limits=limits, slots=slots, queue=queue, at=listening.getsockname()
        )
        listening.close()
        return 0

    monkeypatch.setattr(app, "run_server", note)
    (tmp_path / "key").write_text("a-long-secret\n")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    port = free_port()
    argv = f"--host 127.0.0.2 --port {port} --api-key-file {tmp_path}/key --allowed-hosts box.lan --slots 3 --queue 5 "
    argv += f"--served-model-name small --chat-template {tmp_path}/chat.jinja --max-body-size 999 --read-timeout 2.5 "
    argv += "--request-timeout 7 --device cpu"
    assert main(["serve", str(run), *argv.split()]) == 0
    assert (seen.slots, seen.queue, seen.at) == (3, 5, ("127.0.0.2", port))
    limits = seen.limits
    assert (limits.api_key, limits.body, limits.read_seconds, limits.answer_seconds) == (
        "a-long-secret",
        999,
        2.5,
        7,
    )
    limits.check({"method": "GET", "path": "/"}, {b"host": b"box.lan"}, ["/"])
    with pytest.raises(Refusal, match="other.lan"):
        limits.check({"method": "GET", "path": "/"}, {b"host": b"other.lan"})
    assert seen.served.name == "small" and seen.served.template.path == tmp_path / "chat.jinja"
    assert main(["serve", str(run), f"--port={port}", "--device=cpu", "--api-key=another-one"]) == 0
    assert (
        seen.limits.api_key == "another-one"
        and seen.served.name == "run"
        and seen.served.template is None
    )


def test_the_template_beside_the_runs_tokenizer(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As chat uses it; a template that is none is found before the model is loaded."""
    seen: list[Any] = []
    monkeypatch.setattr(app, "run_server", lambda served, *more: seen.append(served.template) or 0)
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/tokenizer/chat_template.jinja").write_text("{{ messages[0].content }}")
    assert main(["serve", str(tmp_path / "run"), "--device=cpu", "--port=0"]) == 0
    assert seen[0].path == tmp_path / "run/tokenizer/chat_template.jinja"
    assert main(["serve", str(run), "--dry-run", f"--chat-template={tmp_path}"]) == BAD_DATA


@pytest.mark.promise("`meshwright serve` listens on this machine only")
def test_megatrons_script(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(app, "run_server", lambda *given: seen.append(given[-1].getsockname()) or 0)
    path = Path(__file__).parents[3] / "compat/megatron-lm/tools/run_text_generation_server.py"
    argv = f"--load {run} --port {free_port()} --device cpu --micro-batch-size 1 --top_p 0.9 --log-interval 1"
    monkeypatch.setattr("sys.argv", [str(path), *argv.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0 and seen[0][0] == "127.0.0.1"
    assert "flags of sampling have no effect" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "example.lan"])
@pytest.mark.promise("`meshwright serve` listens on this machine only")
def test_other_machines_need_a_key(
    host: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(run), "--host", host]) == USAGE
    assert "--api-key-file" in capsys.readouterr().err


def test_damaged_weights_are_found_before_anyone_asks(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "meshwright.model.gpt.GPT.forward", lambda *_, **__: torch.full((1, 1, 257), float("nan"))
    )
    assert main(["serve", str(run), "--device=cpu", "--port=0"]) == NON_FINITE


def test_what_is_missing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("short")
    assert main(["serve", str(run), "--api-key-file", f"{tmp_path}/key"]) == USAGE
    assert main(["serve", str(run), "--api-key-file", f"{tmp_path}/none"]) == USAGE
    assert main(["serve", str(tmp_path), "--device=cpu", "--port=0"]) == BAD_DATA
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(run), f"--port={taken.getsockname()[1]}"]) == UNAVAILABLE
    assert "cannot be listened on" in capsys.readouterr().err
    assert main(["serve", str(run), "--dry-run"]) == 0
    assert "the flags fit step 8" in capsys.readouterr().out


@pytest.mark.long  # imports transformers
def test_the_folder_for_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers, and so vLLM, reads what the command of docs/serving.md writes of a run."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = ["the cat sat on the mat.", "a dog ran over the hill."] * 100
    tokenizers.train_bpe(texts, 280, tmp_path / "tok")
    names = [f"--vocab-file={tmp_path}/tok/vocab.json", f"--merge-file={tmp_path}/tok/merges.txt"]
    assert train_on_texts(tmp_path, texts, names, SHAPE.split()) == tmp_path / "run"
    page = (Path(__file__).parents[3] / "docs/serving.md").read_text()
    [line] = [line for line in page.splitlines() if line.startswith("meshwright convert")]
    monkeypatch.chdir(tmp_path)
    assert main(line.split()[1:]) == 0
    folder = tmp_path / "run-hf"
    words, hf = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert str(hf.dtype) == "torch.bfloat16" and (folder / "config.json").exists()
    ours = load(folder, device="cpu")
    for prompt in ("the c", "a dog"):
        ids = words(prompt, return_tensors="pt")
        assert ids.input_ids[0].tolist() == ours.encode(prompt)
        found = hf.float().generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
        text = words.decode(found, skip_special_tokens=True)
        assert text == prompt + ours.generate(prompt, greedy=True, max_new_tokens=12)
