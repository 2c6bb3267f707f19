"""LAMBADA, WikiText and perplexity: transformers' numbers with the same weights; the command."""

import hashlib
import json
import math
import re

import pytest
import torch

from meshwright.__main__ import main
from meshwright.apps.evaluate import lambada, results, wikitext
from meshwright.apps.evaluate.command import EvaluateConfig, Scoring, choose_measure, step_folders
from meshwright.base import console
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.data.tokenizers import Bytes
from meshwright.data.windows import Window
from meshwright.generation import ranks
from meshwright.training.tasks import Scored, TaskFile
from on_ranks import make_team, run_ranks

LENGTH = 32  # of conftest.py


@pytest.fixture(scope="module")
def theirs(exported):
    """The exported model and tokenizer, as transformers reads them."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    return model, transformers.AutoTokenizer.from_pretrained(exported)


@pytest.fixture
def evaluate(trained, capsys):
    """A function of flags that returns the status, the results of --json and what was printed."""

    def call(*argv, json_lines=True):
        capsys.readouterr()
        words = [
            "evaluate",
            str(trained),
            "--device=cpu",
            *["--json"] * json_lines,
            *map(str, argv),
        ]
        status = main(words)
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()] if json_lines else out, err

    return call


def nats_and_hits(model, ids, first):
    """Return the loss of the labels from prediction `first` on, and whether each is the arg max."""
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0, first:].double()
    labels = torch.tensor(ids[1:])[first:]
    return -logits.log_softmax(-1).gather(1, labels[:, None]).sum().item(), (
        logits.argmax(-1) == labels
    ).tolist()


@pytest.mark.flag("task valid_data strict_lambada")
@pytest.mark.parametrize("strict", [False, True])
def test_lambada_equals_transformers(theirs, evaluate, files, strict):
    model, tokenizer = theirs
    losses, right = [], 0
    for line in (files / "lambada_test.jsonl").read_text().splitlines():
        text = json.loads(line)["text"]
        if strict:
            context, _, word = text.rpartition(" ")
            label = tokenizer.encode(" " + word)
            ids = (tokenizer.encode(context) + label)[-LENGTH - 1 :]
        else:
            label, ids = [0], tokenizer.encode(text)[-LENGTH - 1 :]
        nats, hits = nats_and_hits(model, ids, len(ids) - 1 - len(label))
        losses.append(nats)
        right += all(hits)
    flags = [
        "--task=LAMBADA",
        "--valid-data",
        files / "lambada_test.jsonl",
        *["--strict-lambada"] * strict,
    ]
    status, [got], _ = evaluate(*flags)
    assert status == 0 and got["task"] == ("lambada-strict" if strict else "lambada")
    assert got["variant"].startswith(
        "strict: the whole last word" if strict else "not strict: the last token"
    )
    assert got["sha256"] == hashlib.sha256((files / "lambada_test.jsonl").read_bytes()).hexdigest()
    want = {
        "correct": right,
        "examples": 6,
        "accuracy": right / 6,
        "perplexity": math.exp(sum(losses) / 6),
    }
    assert got["values"] == pytest.approx(want, rel=1e-4) and right > 0
    by_name, [same], _ = evaluate(
        f"--eval-tasks={got['task']}={files / 'lambada_test.jsonl'}", "--micro-batch-size=1"
    )
    assert by_name == 0 and same["values"] == pytest.approx(got["values"], rel=1e-6)


def test_wikitext_equals_transformers(theirs, evaluate, files):
    """The windows are those of transformers' own recipe for perplexity with a stride."""
    (model, tokenizer), stride = theirs, 5
    raw = (files / "wiki.test.tokens").read_text()
    text = wikitext.detokenize(raw, "wiki")
    ids, total, end = tokenizer.encode(text), 0.0, 0
    for begin in range(0, len(ids) - 1, stride):
        stop = min(begin + LENGTH, len(ids) - 1)
        total += nats_and_hits(model, ids[begin : stop + 1], max(end - begin, 0))[0]
        end = stop
        if stop == len(ids) - 1:
            break
    ratio = (len(ids) - 1) / (len(raw.strip().split(" ")) - 1)
    loss = total / (len(ids) - 1)
    flags = ["--overlapping-eval", stride]
    status, [got], _ = evaluate(
        "--task=WIKITEXT103", "--valid-data", files / "wiki.test.tokens", *flags
    )
    assert (
        status == 0
        and got["variant"] == f"wiki detokenizer, windows of 32 tokens that advance by {stride}"
    )
    assert got["values"] == pytest.approx(
        {
            "loss": loss,
            "perplexity": math.exp(loss),
            "adjusted_perplexity": math.exp(min(20, loss * ratio)),
            "token_ratio": ratio,
            "bits_per_byte": total / math.log(2) / len(raw.encode()),
            "tokens": len(ids),
            "words": len(raw.strip().split(" ")),
        },
        rel=1e-4,
    )


def test_the_documents_lines(evaluate, files):
    """Megatron's lines, which scripts read, and the figures once more."""
    status, out, _ = evaluate(
        "--task=LAMBADA", "--valid-data", files / "lambada_test.jsonl", json_lines=False
    )
    lines = out.splitlines()
    at = next(
        i for i, line in enumerate(lines) if line.startswith(" validation results on LAMBADA")
    )
    assert status == 0 and lines[at - 1] == lines[at + 1] == "-" * (len(lines[at]) + 1)
    number = r"\d\.\d{4}E[+-]\d\d"
    said = rf" validation results on LAMBADA \| number correct: {number} \| total examples: 6.0000E\+00 \| avg accuracy: "
    assert re.fullmatch(said + number, lines[at])
    assert f"> building lambada dataset from {files / 'lambada_test.jsonl'} ..." in lines
    assert (
        " > found 6 samples." in lines
        and "> working on iteration: 0" in lines
        and lines[-1] == "done :-)"
    )
    out = evaluate(
        "--task=WIKITEXT103", "--valid-data", files / "wiki.test.tokens", json_lines=False
    )[1]
    assert " validation results on WIKITEXT103 | avg loss: " in out and " | token ratio: " in out
    assert "sha256" in out and "wiki detokenizer" in out


@pytest.mark.flag("folders evaluate.steps results_path evaluate.picture")
def test_several_checkpoints_in_one_call(evaluate, trained, files, tmp_path):
    tasks = (
        f"--eval-tasks=lambada={files / 'lambada_test.jsonl'},wikitext={files / 'wiki.test.tokens'}"
    )
    picture, path = tmp_path / "more" / "scores.svg", tmp_path / "results.json"
    status, out, _ = evaluate(
        tasks, "--steps=all", "--results-path", path, "--picture", picture, json_lines=False
    )
    results = json.loads(path.read_text())
    assert status == 0
    assert [(r["step"], r["task"]) for r in results] == [
        (n, t) for n in (10, 20) for t in ("lambada", "wikitext")
    ]
    assert results[1]["values"]["adjusted_perplexity"] > results[3]["values"]["adjusted_perplexity"]
    rows = [line.split() for line in out.splitlines()]
    assert [f"{results[3]['values']['loss']:,.4f}" in row for row in rows if row[:1] == ["20"]] == [
        False,
        True,
    ]
    shown = picture.read_text()
    assert "lambada accuracy" in shown and "wikitext adjusted perplexity" in shown
    alone = evaluate(tasks, "--steps=10")[1]
    assert [r["values"] for r in alone] == [r["values"] for r in results[:2]]
    both = evaluate(tasks, trained / "iter_0000010", json_lines=False)
    assert both[0] == 0 and str(trained) in both[1]


def on_two_ranks(run, spec, out):
    team = make_team()
    words = [
        "--load",
        run,
        "--device=cpu",
        "--world-size=2",
        "--tensor-model-parallel-size=2",
        spec,
    ]
    parsed = flags.parse_settings(EvaluateConfig, words, "test", check=False)
    folders = step_folders([run], "all")
    scoring = Scoring(parsed.config.evaluate, folders, choose_measure(parsed.config, [], False, 8))
    with console.only_warnings():
        ranks.serve_ranks(
            parsed.config,
            flags.given_settings(parsed),
            scoring.work,
            torch.device("cpu"),
            team,
            folders,
        )
    if team.is_rank_0:
        results.write_results(scoring.results, out)


def test_several_checkpoints_on_two_ranks(evaluate, trained, files, tmp_path):
    """Each is loaded by both ranks, one after the other; the scores are those of one process."""
    spec = f"--eval-tasks=lambada-strict={files / 'lambada_test.jsonl'}"
    run_ranks(on_two_ranks, 2, str(trained), spec, str(tmp_path / "out.json"))
    _, want, _ = evaluate(spec, "--steps=all")
    got = json.loads((tmp_path / "out.json").read_text())
    assert [r["step"] for r in got] == [r["step"] for r in want] == [10, 20]
    for mine, theirs in zip(got, want, strict=True):
        assert mine["values"] == pytest.approx(theirs["values"], rel=1e-5)


def test_detokenizers():
    """The tables are those of Megatron's evaluation."""
    raw = ' = The Valley = \n \n It was " good " , and cost 1 @,@ 000 @.@ 5 yen ; a well @-@ known ( old ) one . \n'
    want = ' = The Valley =\n\nIt was "good", and cost 1,000.5 yen; a well-known (old) one.\n'
    assert wikitext.detokenize(raw, "wiki") == want
    assert (
        wikitext.detokenize("b ' c ' [ d ] 4 ° N \n = = e = =\n", "wiki")
        == "b 'c' [d] 4°N\n== e ==\n"
    )
    assert wikitext.detokenize("it is n't $ 10 N \n more", "ptb") == "it isn't $10 N\nmore"
    assert wikitext.detokenize(" as it is . ", "lambada") == " as it is . "
    paths = {
        "ptb/valid.txt": "ptb",
        "data/wiki.test.tokens": "wiki",
        "lambada.jsonl": "lambada",
        "book.txt": "wiki",
    }
    assert {path: wikitext.pick_table(path) for path in paths} == paths


def test_the_words_that_lambada_counts():
    """A long passage loses its beginning, one of a single word follows an end of document."""
    texts = ["he saw the sign", "sign", "x" * 40]
    strict, last = (
        [task.cut(text, Bytes(), TaskFile("", "", 20, 10)) for text in texts]
        for task in (lambada.STRICT_LAMBADA, lambada.LAMBADA)
    )
    assert all(len(windows) == 1 for windows in (*strict, *last))
    # nats, and right letters of 5, 5 and 20
    hits = torch.tensor([[1.0, 5.0], [2.0, 4.0], [3.0, 20.0]])
    got = lambada.LAMBADA.measure(Scored(texts, strict, hits))
    assert got == {
        "correct": 2,
        "examples": 3,
        "accuracy": 2 / 3,
        "perplexity": pytest.approx(math.exp(2)),
    }
    strict, last = ([window for [window] in made] for made in (strict, last))
    assert [bytes(w.tokens[w.first + 1 :]) for w in strict] == [b" sign", b" sign", b"x" * 21][
        :2
    ] + [b"x" * 20]
    assert strict[0].tokens == [*b"he saw the sign"] and strict[1].tokens[0] == 256
    assert [w.counted for w in last] == [1, 1, 1] and len(last[2].tokens) == 21


def test_an_infinite_loss_is_no_finite_perplexity():
    values = torch.tensor([[math.inf, 1.0], [1.0, 0.0]], dtype=torch.float64)
    measures = lambada.LAMBADA.measure(Scored(["a b"] * 2, [[Window([1, 2])]] * 2, values))
    assert measures["accuracy"] == 0.5 and measures["perplexity"] == math.inf


def test_limit_is_that_of_passages(evaluate, files):
    _, [found], _ = evaluate(
        "--task=LAMBADA", f"--valid-data={files}/lambada_test.jsonl", "--limit=2"
    )
    assert found["values"]["examples"] == 2 and found["variant"].endswith("; at most the first 2")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "has no example"),
        ('{"text": " "}', "its text is empty"),
        ('{"text": "a \\ud800"}', "surrogates not allowed"),
    ],
)
def test_bad_lambada_files(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match="LAMBADA is JSON lines|no example") as caught:
        lambada.read_examples(str(tmp_path / "a.jsonl"))
    assert message in str(caught.value)


def test_help_says_where_the_files_come_from(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    shown = capsys.readouterr().out
    assert "openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl" in shown
    assert f"SHA-256 {lambada.OPENAI_SHA256}" in shown
