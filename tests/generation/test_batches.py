"""`generate --prompts`: texts for many prompts, options of each, JSON lines, beam search."""

import json

import pytest
from three_sentences import BEAR, CAT, DOG, LENGTH

import meshwright
from meshwright.base.errors import BAD_DATA
from meshwright.config.schema import Sampling
from meshwright.generation import batches
from meshwright.generation.prompts import Prompt


@pytest.fixture
def generate(program):
    """A function of flags and what is typed, which returns standard output and standard error."""

    def call(*argv, typed=None, status=0):
        got, out, err = program("generate", *argv, typed=typed)
        assert got == status, err
        return out, err

    return call


@pytest.fixture
def rows(generate, tmp_path):
    """A function of prompts, as text or objects, and flags, which returns the JSON lines."""

    def call(given, *argv):
        lines = [line if isinstance(line, str) else json.dumps(line) for line in given]
        (tmp_path / "given").write_text("\n".join(lines), encoding="utf-8")
        out, _ = generate("--prompts", tmp_path / "given", "--json", *argv)
        return [json.loads(line) for line in out.split("\n")[:-1]]

    return call


@pytest.mark.flag("prompts")
def test_lines_of_a_file_and_of_standard_input(generate, tmp_path):
    """Every line is a prompt, an empty one too; the texts come in their order."""
    (tmp_path / "p").write_bytes(b"the c\r\n\r\na d\nein B\n")
    expected = f"{CAT}\n{CAT}\n{DOG}\n{BEAR}\n"
    out, err = generate("--greedy", "--prompts", tmp_path / "p")
    assert out == expected and "4 texts, " in err and err.endswith(" tokens/s\n")
    assert generate("--greedy", "--prompts=-", typed="the c\n\na d\nein B")[0] == expected
    assert (
        generate("--greedy", "--prompts=-", "--micro-batch-size=1", typed="the c\n\na d\nein B")[0]
        == expected
    )


@pytest.mark.flag("texts.json")
def test_json_lines(rows):
    found = rows(["the c", "a d"], "--greedy", "--out-seq-length=7")
    assert found == [
        dict(
            index=0,
            sequence=0,
            prompt="the c",
            text="at sat.",
            tokens=[*b"at sat."],
            finish_reason="length",
        ),
        dict(
            index=1,
            sequence=0,
            prompt="a d",
            text="og ran.",
            tokens=[*b"og ran."],
            finish_reason="length",
        ),
    ]
    assert [row["finish_reason"] for row in rows(["the c", "a d"], "--greedy")] == ["stop", "stop"]


def test_each_line_has_options_of_its_own(rows):
    """They win over the flags; a line that gives none has the flags'."""
    given = [
        {"prompt": "the c", "max_tokens": 3, "id": {"a": 1}},
        {"prompt": "the c", "greedy": False, "temperature": 50, "seed": 3},
        {"prompt": "the c", "n": 2, "stop": ["s", "x"], "logprobs": 0},
        {"prompt": "a d", "stop": " r", "top_k": 1, "temperature": 1.0},
        {"prompt": "the c", "max_new_tokens": None},
    ]
    a, b, c, d, e, f = rows(given, "--greedy", "--stop", "t.")
    assert a["text"] == "at " and a["id"] == {"a": 1} and "id" not in e
    assert (
        b["text"] not in ("at sat.", "at sa")
        and f["text"] == "at sa"
        and f["finish_reason"] == "stop"
    )
    assert c["text"] == d["text"] == "at " and [c["sequence"], d["sequence"]] == [0, 1]
    assert (
        len(c["logprobs"]) == len(c["tokens"]) and "top_logprobs" not in c and "logprobs" not in e
    )
    assert e["text"] == "og" and [row["index"] for row in (a, b, c, d, e, f)] == [0, 1, 2, 2, 3, 4]


def test_a_seed_of_its_own_makes_a_prompt_independent(rows):
    """Otherwise a text depends on its number, and never on the batch."""
    one = {"prompt": "a", "temperature": 9, "max_tokens": 9, "n": 3, "seed": 5}
    alone = [row["text"] for row in rows([one])]
    assert (
        len(set(alone)) == 3
        and [row["text"] for row in rows([one | {"seed": 6}, one])][3:] == alone
    )
    flags = ["--temperature=9", "--out-seq-length=9", "--num-return-sequences=2"]
    many = [row["text"] for row in rows(["a"] * 5, *flags)]
    assert len(set(many)) == 10
    assert [row["text"] for row in rows(["a"] * 5, *flags, "--micro-batch-size=3")] == many
    assert [row["text"] for row in rows(["a"] * 5, *flags, "--seed=2")] != many


def test_a_reader_that_stops_leaves_no_request(run):
    m = meshwright.load(run, device="cpu")
    texts = batches.generate_texts(
        m, batches.encode_prompts(m, [Prompt("the c", Sampling())] * 9, "x"), 0, 4
    )
    next(texts)
    texts.close()
    (decoder,) = m.decoders.values()
    assert (decoder.waiting, decoder.active) == (0, 0)


@pytest.mark.flag("num_return_sequences")
def test_several_texts_of_a_prompt(generate):
    out, err = generate("--prompt", "the c", "--num-return-sequences=3", "--greedy")
    assert out == f"{CAT}\n" * 3 and "3 texts, 24 tokens in" in err


@pytest.mark.flag("texts.stop")
def test_stop_strings(generate):
    """A text ends before the first of them, whichever tokens it has."""
    assert generate("--greedy", "--prompt", "the c", "--stop", "xx", "sat", "t.")[0] == "the cat \n"
    assert (
        generate("--greedy", "--prompts=-", "--stop", "\\n", "sa", typed="the c\na d\n")[0]
        == f"the cat \n{DOG}\n"
    )
    out, err = generate("--greedy", "--prompt", "the c", "--stop", "sat")
    assert "sequence length" not in err and "1 text, 6 tokens in" in err


@pytest.mark.flag("logprobs")
def test_log_probabilities_are_the_models(rows, run):
    m = meshwright.load(run, device="cpu")
    (row,) = rows(["the c"], "--temperature=2", "--logprobs=2")
    ids = [*b"the c", *row["tokens"]]
    every = m.logits(ids)[4:-1].log_softmax(-1)
    assert row["logprobs"] == pytest.approx(
        every[range(len(row["tokens"])), row["tokens"]].tolist(), abs=1e-5
    )
    for position, top in zip(every, row["top_logprobs"], strict=True):
        values, ids = position.topk(2)
        assert list(map(int, top)) == ids.tolist() and [*top.values()] == pytest.approx(
            values.tolist(), abs=1e-5
        )


@pytest.mark.flag("beam_width length_penalty")
def test_beam_search(rows, generate):
    found = rows(["the", "a d"], "--beam-width=3", "--num-return-sequences=2", "--logprobs=0")
    assert [row["index"] for row in found] == [0, 0, 1, 1] and found[0]["text"] == " cat sat."
    assert found[0]["score"] > found[1]["score"] and len(found[0]["logprobs"]) == len(
        found[0]["tokens"]
    )
    mean = sum(found[0]["logprobs"]) / (len(found[0]["tokens"]) + 1)
    assert found[0]["score"] == pytest.approx(mean, rel=0.5)
    (row,) = rows(["the"], "--beam-width=3", "--length-penalty=0", "--logprobs=0")
    assert row["score"] < sum(row["logprobs"]) < 0  # the end of document counts too
    assert generate("--prompt", "the c", "--beam-width=2")[0] == f"{CAT}\n"


@pytest.mark.flag("output")
def test_output_appears_complete(generate, tmp_path, monkeypatch):
    """A *.jsonl file holds JSON lines; a run that fails leaves no file."""
    out, err = generate("--prompt=the c", "--greedy", "--output", tmp_path / "a.txt")
    assert (out, (tmp_path / "a.txt").read_text()) == (
        "",
        f"{CAT}\n",
    ) and f"wrote {tmp_path / 'a.txt'}" in err
    generate("--prompts=-", "--greedy", "--output", tmp_path / "b.jsonl", typed="ein B")
    assert json.loads((tmp_path / "b.jsonl").read_text())["text"] == "är."
    monkeypatch.setattr(batches, "as_text", lambda m, job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate("--prompt=a", "--output", tmp_path / "c")
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "b.jsonl"}


@pytest.mark.parametrize("key", ["prompt", "stop", "id"])
def test_half_a_character_is_refused(generate, tmp_path, key):
    """JSON may spell one, which no encoding has: neither the tokenizer's nor the output's."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "a", key: "a\ud800"}) + "\n")
    _, err = generate("--prompts", file, "--output", tmp_path / "o", status=BAD_DATA)
    assert f"--prompts {file}:2: lone surrogate (\\ud800, half a character); mend the line" in err


def test_all_bad_lines_are_listed(generate, tmp_path):
    """Before the model is loaded where that is possible, and before anything is written."""
    file = tmp_path / "p"
    file.write_text('{"prompt": "a"}\n\n{"prompt": 2}\n[]\n')
    _, err = generate("--prompts", file, "--output", tmp_path / "o", status=BAD_DATA)
    assert (
        f"--prompts {file}:3: " in err and f"--prompts {file}:4: " in err and "loading" not in err
    )
    file.write_text("a\n" + f"{'x' * LENGTH}\n" * 30)
    _, err = generate("--prompts", file, "--output", tmp_path / "o", status=BAD_DATA)
    assert (
        f"--prompts {file}, prompt 2 has {LENGTH} tokens; the model reads {LENGTH}, give a shorter one"
        in err
    )
    assert err.count("prompt ") == 20 and "and 10 more" in err and not (tmp_path / "o").exists()
    assert "no such file" in generate("--prompts", tmp_path / "none", status=BAD_DATA)[1]
