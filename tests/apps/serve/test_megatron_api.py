"""Megatron-LM's `PUT /api` and its client."""

from __future__ import annotations

import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from sites import LOGPROB, Site

ROOT = Path(__file__).resolve().parents[3]


def put(fake: Site, **body: Any) -> Any:
    status, answer, _ = fake.ask("PUT", "/api", body)
    assert status == 200, answer
    return answer


def test_texts(fake: Site) -> None:
    answer = put(fake, prompts=["ab", "xyz"], tokens_to_generate=3, no_log=True)
    assert answer == {
        "text": ["ababa", "xyzxyz"],
        "segments": [list("ababa"), list("xyzxyz")],
        "logprobs": None,
    }


def test_the_default_length_is_64(fake: Site) -> None:
    status, answer, _ = fake.ask("PUT", "/api", {"prompts": ["a"]})
    assert status == 400 and "tokens_to_generate 64" in answer["message"]


def test_scores(fake: Site) -> None:
    answer = put(fake, prompts=["abc"], tokens_to_generate=2, logprobs=True)
    assert answer["text"] == ["abcab"] and answer["logprobs"] == [[LOGPROB] * 4]
    answer = put(fake, prompts=["abc"], tokens_to_generate=0, logprobs=True)
    assert answer["text"] == ["abc"] and answer["logprobs"] == [[LOGPROB] * 2]


def test_the_beginning_of_a_document(fake: Site) -> None:
    answer = put(fake, prompts=["", "ab"], add_BOS=True, tokens_to_generate=2)
    # The decoder of the tests repeats the token that begins a document, which ends the text.
    assert answer["text"] == ["", "ab"] and answer["segments"] == [[""], ["", "a", "b"]]


def test_ends_of_lines(fake: Site) -> None:
    assert put(fake, prompts=["ab\nc"], tokens_to_generate=9, stop_on_eol=True)["text"] == [
        "ab\ncab\n"
    ]
    assert put(fake, prompts=["a\n\nb"], tokens_to_generate=9, stop_on_double_eol=True)["text"] == [
        "a\n\nba\n\n"
    ]
    # The prompt's end of line and the first new one are an empty line together.
    assert put(fake, prompts=["\nab\n"], tokens_to_generate=9, stop_on_double_eol=True)["text"] == [
        "\nab\n\n"
    ]


def test_sampling_flags_arrive(fake: Site) -> None:
    put(fake, prompts=["a", "b"], tokens_to_generate=2, temperature=0.7, top_k=5, random_seed=9)
    s = fake.decoder.submitted[-1].options
    assert (s.temperature, s.top_k, s.top_p) == (0.7, 5, 0)
    assert [(r.seed, r.stream) for r in fake.decoder.submitted[-2:]] == [(9, 0), (9, 1)]
    put(fake, prompts=["a"], tokens_to_generate=2, top_p=0.9)
    assert fake.decoder.submitted[-1].options.top_p == 0.9


def test_rules_of_top_p_and_colons_arrive(fake: Site) -> None:
    rules = dict(top_p=0.9, top_p_decay=0.5, top_p_bound=0.2, prevent_newline_after_colon=True)
    put(fake, prompts=["a"], tokens_to_generate=2, **rules)
    request = fake.decoder.submitted[-1]
    assert (request.top_p_decay, request.top_p_floor, request.forbidden_pair) == (
        0.5,
        0.2,
        (ord(":"), ord("\n")),
    )


REFUSED = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())["megatron"]


@pytest.mark.parametrize(
    ("body", "word"),
    [*REFUSED, ({"prompts": ["a"] * 129}, "prompts")],
    ids=lambda v: json.dumps(v)[:40],
)
def test_refusals(fake: Site, body: dict[str, Any], word: str) -> None:
    status, answer, _ = fake.ask(
        "PUT", "/api", {"prompts": ["ab"], "tokens_to_generate": 4, **body}
    )
    assert status == 400 and word in answer["message"]


def test_megatrons_client(
    fake: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints the answer to a prompt and a length; a length that is no number is asked again."""
    script = ROOT / "compat/megatron-lm/tools/text_generation_cli.py"
    monkeypatch.setattr(sys, "argv", [str(script), f"localhost:{fake.port}"])
    monkeypatch.setenv("http_proxy", "http://localhost:9")  # is for other addresses
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n4\n\nbye\n0\n"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    out, err = capsys.readouterr()
    assert "Megatron Response: \nababab\n" in out
    assert "'bye' is not a whole number from 0" in out
    assert ended.value.code == 1 and "Error 400" in err  # the empty prompt
