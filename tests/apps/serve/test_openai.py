"""OpenAI's completions and chat: every field, streams, log-probabilities, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from sites import LENGTH, LOGPROB, TOP, Site, Template, site

from meshwright.apps.serve import openai
from meshwright.data.tokenizers import Bytes
from meshwright.generation.requests import Event, Request


def texts(answer: dict[str, Any]) -> list[str]:
    assert [c["index"] for c in answer["choices"]] == list(range(len(answer["choices"])))
    return [c["text"] for c in answer["choices"]]


def test_prompts_in_all_forms(fake: Site) -> None:
    assert texts(fake.complete(prompt="abc", max_tokens=5)) == ["abcab"]
    assert texts(fake.complete(prompt=["abc", "xy"], max_tokens=3)) == ["abc", "xyx"]
    assert texts(fake.complete(prompt=[97, 98], max_tokens=3)) == ["aba"]
    assert texts(fake.complete(prompt=[[97], [98]], max_tokens=2)) == ["aa", "bb"]
    assert fake.complete(max_tokens=2)["usage"]["prompt_tokens"] == 1  # the beginning of a document
    answer = fake.complete(prompt="ab", model="fake", user="me")
    assert texts(answer) == ["ab" * 8] and answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 16, "total_tokens": 18}
    assert (
        answer["object"] == "text_completion"
        and answer["id"].startswith("cmpl-")
        and answer["model"] == "fake"
    )


def test_several_texts_and_their_random_numbers(fake: Site) -> None:
    del fake.decoder.submitted[:]
    answer = fake.complete(prompt=["ab", "cd"], n=2, seed=-5, max_tokens=2)
    assert texts(answer) == ["ab", "ab", "cd", "cd"] and answer["usage"]["prompt_tokens"] == 4
    assert [(r.seed, r.stream) for r in fake.decoder.submitted] == [
        (2**63 - 5, n) for n in range(4)
    ]
    fake.complete(prompt="a")
    fake.complete(prompt="a")
    assert fake.decoder.submitted[-1].seed != fake.decoder.submitted[-2].seed
    assert texts(fake.complete(prompt=["ab"], n=1, best_of=3, max_tokens=2)) == ["ab"]
    assert fake.decoder.submitted[-1].logprobs == 0


def test_sampling_flags_arrive(fake: Site) -> None:
    body = dict(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.2,
        max_tokens=3,
        stop=["x", "y"],
    )
    fake.complete(prompt="a", **body)
    request = fake.decoder.submitted[-1]
    s = request.options
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty) == (
        0.5,
        0.9,
        7,
        0.1,
        1.2,
    )
    assert s.out_seq_length == 3 and request.stop == ("x", "y")
    fake.complete(prompt="a", presence_penalty=-1, frequency_penalty=0.5)
    request = fake.decoder.submitted[-1]
    assert (request.presence_penalty, request.frequency_penalty) == (-1, 0.5)
    fake.complete(prompt="a", top_p=1, top_k=-1, temperature=0)
    assert (
        (s := fake.decoder.submitted[-1].options).top_p == 0 and s.top_k == 0 and s.temperature == 0
    )
    fake.complete(prompt="a", top_p=0)
    assert 0 < fake.decoder.submitted[-1].options.top_p < 1e-9  # the likeliest token alone


def test_stop_strings(fake: Site) -> None:
    answer = fake.complete(prompt="abcdef", stop="de", max_tokens=20, logprobs=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
    assert (
        choice["logprobs"]["tokens"] == ["a", "b", "c"]
        and answer["usage"]["completion_tokens"] == 5
    )
    assert (
        "".join(
            p["choices"][0]["text"]
            for p in fake.stream(prompt="abcdef", stop=["de"], max_tokens=20)
        )
        == "abc"
    )


def test_a_stop_string_behind_half_a_character_leaves_its_own_tokens_out(fake: Site) -> None:
    """The half became a character of its own, behind which the text was cut."""
    prompt = [97, 0xC3, 98, 99]
    whole = fake.complete(prompt=prompt, max_tokens=4, logprobs=0)["choices"][0]
    assert whole["text"] == "a\ufffdbc" and whole["logprobs"]["text_offset"] == [0, 1, 2, 3]
    choice = fake.complete(prompt=prompt, max_tokens=4, logprobs=0, stop="b")["choices"][0]
    assert choice["text"] == "a\ufffd" and choice["logprobs"]["tokens"] == ["a", "bytes:\\xc3"]


def test_an_end_of_document_is_no_text(fake: Site) -> None:
    choice = fake.complete(prompt=[97, 98, 256], max_tokens=9, logprobs=1)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop") and len(
        choice["logprobs"]["tokens"]
    ) == 2


def test_echo_and_logprobs(fake: Site) -> None:
    answer = fake.complete(prompt="aé", echo=True, logprobs=2, max_tokens=2)
    choice = answer["choices"][0]
    assert choice["text"] == "aéa\ufffd"  # cut inside a character
    found = choice["logprobs"]
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3"]
    assert found["token_logprobs"] == [None] + [LOGPROB] * 4 and found["text_offset"] == [
        0,
        1,
        1,
        2,
        3,
    ]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][3] == {"b": TOP[0], "a": LOGPROB}


@pytest.mark.parametrize("length", [0, 1])
def test_what_the_evaluation_harness_reads(fake: Site, length: int) -> None:
    """lm-evaluation-harness sums [context:-1] of the answer, and compares with the likeliest."""
    ids = [[97, 98, 99, 100], [97, 98]]
    answer = fake.complete(
        prompt=ids, echo=True, logprobs=1, max_tokens=length, temperature=0, seed=1234
    )
    for choice, prompt in zip(answer["choices"], ids, strict=True):
        found = choice["logprobs"]
        assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(prompt) + length
        assert found["token_logprobs"][0] is None
        assert [max(t.values()) for t in found["top_logprobs"][1:]] == [TOP[0]] * (
            len(prompt) + length - 1
        )
        assert choice["text"] == bytes(prompt + prompt[:length]).decode()
    assert answer["usage"]["completion_tokens"] == 2 * length


def test_a_stream(fake: Site) -> None:
    parts = fake.stream(
        prompt=["aé", "xy"],
        max_tokens=6,
        logprobs=1,
        echo=True,
        stream_options={"include_usage": True},
    )
    assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == 12
    assert all(p["usage"] is None for p in parts[:-1])
    whole = fake.complete(prompt=["aé", "xy"], max_tokens=6, logprobs=1, echo=True)["choices"]
    for index in (0, 1):
        mine = [p["choices"][0] for p in parts[:-1] if p["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == whole[index]["text"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
        for name, values in whole[index]["logprobs"].items():
            assert [v for c in mine for v in c["logprobs"][name]] == values
    assert len({p["id"] for p in parts}) == 1


def test_chat(fake: Site) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    status, answer, _ = fake.ask(
        "POST", "/v1/chat/completions", {"messages": turns, "max_completion_tokens": 3}
    )
    assert status == 200 and answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "aba",
        "refusal": None,
    }
    body = {"messages": turns, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    found = fake.ask("POST", "/v1/chat/completions", body)[1]["choices"][0]["logprobs"]["content"]
    assert (
        found[0]["token"] == "a"
        and found[0]["bytes"] == [97]
        and len(found[0]["top_logprobs"]) == 2
    )
    parts = fake.stream("/v1/chat/completions", messages=turns, max_tokens=3)
    deltas = [p["choices"][0]["delta"] for p in parts]
    assert deltas[0] == {"role": "assistant", "content": "a"} and "role" not in deltas[1]
    assert "".join(d.get("content", "") for d in deltas) == "aba"
    assert (
        parts[0]["object"] == "chat.completion.chunk"
        and parts[-1]["choices"][0]["finish_reason"] == "length"
    )
    # Without a length, the answer may fill the model's.
    assert (
        fake.ask("POST", "/v1/chat/completions", {"messages": turns})[1]["usage"]["total_tokens"]
        == LENGTH
    )


def test_a_dialogue_without_a_template_is_one_text(fake: Site) -> None:
    turns = [("system", "be"), ("user", "so"), ("assistant", " it"), ("user", "and")]
    body = {"messages": [{"role": role, "content": text} for role, text in turns], "max_tokens": 1}
    assert fake.ask("POST", "/v1/chat/completions", body)[0] == 200
    assert bytes(fake.decoder.submitted[-1].prompt) == b"be\nso it\nand"


def test_chat_with_a_template() -> None:
    with site(template=Template()) as running:
        turns = [{"role": "developer", "content": "be"}, {"role": "user", "content": "so"}]
        answer = running.ask("POST", "/v1/chat/completions", {"messages": turns})[1]
        assert bytes(running.decoder.submitted[0].prompt) == b"s:be|u:so|"
        assert (
            answer["choices"][0]["message"]["content"] == "s:be"
            and answer["choices"][0]["finish_reason"] == "stop"
        )
        # as in a terminal's chat: the first word has no space
        assert running.decoder.submitted[0].is_alone


TABLE = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())
LARGE = [
    ({"temperature": 10**400}, None),
    ({"stop": "x" * 201}, "stop"),
    ({"prompt": "x" * (512 * LENGTH + 1)}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
]


@pytest.mark.parametrize(
    ("body", "param"), [*TABLE["completions"], *LARGE], ids=lambda v: json.dumps(v)[:40]
)
@pytest.mark.fault("F30")
def test_refusals_name_the_field(fake: Site, body: dict[str, Any], param: str | None) -> None:
    status, error = fake.error(**{"prompt": "ab", **body})
    assert status == 400 and error["type"] == "invalid_request_error" and error["param"] == param
    assert param is None or param in error["message"] or "tokens" in error["message"]


def test_neutral_values_are_accepted(fake: Site) -> None:
    fixed = {name: neutral[0] for name, (neutral, _) in openai.NEUTRAL.items()}
    fake.complete(prompt="a", suffix=None, best_of=None, stream_options=None, metadata={}, **fixed)
    chat = {name: neutral[0] for name, (neutral, _) in openai.CHAT_NEUTRAL.items() if neutral}
    turns = [{"role": "user", "content": "a"}]
    assert (
        fake.ask(
            "POST", "/v1/chat/completions", {"messages": turns, "max_tokens": 2, **fixed, **chat}
        )[0]
        == 200
    )


@pytest.mark.parametrize(("body", "message"), TABLE["chat"], ids=str)
def test_chat_refusals(fake: Site, body: dict[str, Any], message: str) -> None:
    status, error = fake.error("/v1/chat/completions", **body)
    assert status == 400 and message in error["message"]


def test_a_dialogue_that_is_too_long_is_refused(fake: Site) -> None:
    turns = [{"role": "user", "content": "a" * LENGTH}]
    status, error = fake.error("/v1/chat/completions", messages=turns)
    assert status == 400 and f"this model reads {LENGTH} tokens" in error["message"]


@pytest.mark.parametrize("template", [None, Template()])
def test_old_turns_are_left_out_if_asked_for(template: Template | None) -> None:
    """As in a terminal's chat; otherwise a dialogue that is too long is refused."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"{n:02}" * 8} for n in range(7)]
    body = {"messages": [{"role": "system", "content": "S"}, *turns], "max_tokens": 40}
    with site(template=template) as running:
        assert running.error("/v1/chat/completions", **body)[1]["code"] == "context_length_exceeded"
        status, answer, _ = running.ask(
            "POST", "/v1/chat/completions", {**body, "truncation": "auto"}
        )
        prompt = bytes(running.decoder.submitted[-1].prompt).decode()
        assert status == 200 and answer["usage"]["total_tokens"] <= LENGTH
        if template is None:
            assert prompt == "S\n" + "".join(f"{n:02}" * 8 + "\n" * (n % 2) for n in range(7))[-46:]
        else:
            assert prompt == "s:S|u:" + "06" * 8 + "|"
        assert len(prompt) <= LENGTH - LENGTH // 4
        short = {"messages": turns[:1], "max_tokens": 9, "truncation": "auto"}
        assert (
            running.ask("POST", "/v1/chat/completions", short)[1]["usage"]["completion_tokens"] == 9
        )


def test_a_prompts_end_alone_if_asked_for(fake: Site) -> None:
    body = {"prompt": ["a" * LENGTH + "bc", "x"], "max_tokens": LENGTH - 3}
    assert fake.error(**body)[1]["code"] == "context_length_exceeded"
    assert fake.complete(**body, truncation="auto")["usage"]["total_tokens"] == 4 + 2 * (LENGTH - 3)
    assert [bytes(request.prompt) for request in fake.decoder.submitted[-2:]] == [b"abc", b"x"]
    status, error = fake.error(**{**body, "max_tokens": LENGTH}, truncation="auto")
    assert status == 400 and error["param"] == "prompt"


def test_models(fake: Site) -> None:
    listed = fake.ask("GET", "/v1/models")[1]["data"]
    assert (
        listed == [fake.ask("GET", "/v1/models/fake")[1]] and listed[0]["max_model_len"] == LENGTH
    )
    assert listed[0]["has_chat_template"] is False  # the page then offers no chat
    with site(template=Template()) as running:
        assert running.ask("GET", "/v1/models")[1]["data"][0]["has_chat_template"] is True
    assert fake.ask("GET", "/v1/models/other/one")[0] == 404
    status, error = fake.error(prompt="a", model="gpt-4")
    assert status == 404 and error["code"] == "model_not_found" and "'fake'" in error["message"]


def test_what_the_decoder_refuses(fake: Site) -> None:
    status, error = fake.error(prompt=[0, 1])
    assert status == 400 and error["message"] == "no text begins with 0"
    _, data, _ = fake.ask("POST", "/v1/completions", {"prompt": [0, 1], "stream": True})
    assert "no text begins with 0" in data.decode()


def test_the_best_of_several() -> None:
    texts = [openai.ChoiceText(Bytes(), Request([97], logprobs=0)) for _ in range(2)]
    for text, logprobs in zip(texts, ([-1.0, -3.0], [-1.5]), strict=True):
        for logprob in logprobs:
            text.push(Event(0, 98, logprob))
    assert [t.mean for t in texts] == [-2.0, -1.5]
