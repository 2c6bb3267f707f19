"""Scoring text: each token once with any windows and batches; input files."""

import json
import math
import random
import shutil
from collections import defaultdict

import pytest
import torch

from helpers import train_on_texts
from meshwright.__main__ import main
from meshwright.apps.evaluate.perplexity import Score
from meshwright.config.schema import Model, TokenizerFlags
from meshwright.data import tokenizers
from meshwright.data.windows import Window, window_spans
from meshwright.generation import language_model
from meshwright.model.gpt import GPT
from meshwright.model.loss import range_names
from meshwright.model.positions import Positions
from meshwright.parallel import window_losses
from on_ranks import run_ranks

TEXT = "die Katze saß auf der Matte. " * 3
LENGTH = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model of bytes that has read TEXT a little."""
    flags = "--num-layers=2 --hidden-size=32 --num-attention-heads=4 --micro-batch-size=8 --lr=1e-2 --train-iters=30"
    lengths = [f"--seq-length={LENGTH}", f"--max-position-embeddings={LENGTH}"]
    folder = tmp_path_factory.mktemp("learn")
    return train_on_texts(
        folder, [TEXT] * 50, ["--tokenizer-type=ByteTokenizer"], [*flags.split(), *lengths]
    )


@pytest.fixture
def score(run, capsys):
    """A function of flags that returns the status, the values of --json and standard error."""

    def call(*argv):
        capsys.readouterr()
        status = main(
            [
                "evaluate",
                str(run),
                "--device=cpu",
                "--params-dtype=float64",
                "--json",
                *map(str, argv),
            ]
        )
        captured = capsys.readouterr()
        return status, json.loads(captured.out) if captured.out else None, captured.err

    return call


def plain_losses(model, ids, length, stride):
    """Yield the nats of ids[1:], one token at a time, each with the context of its window."""
    end = length
    for at in range(1, len(ids)):
        if at > end:
            end = min(end + stride, len(ids) - 1)
        seen = ids[max(0, end - length) : at]
        logits = model(torch.tensor([seen]), Positions())[0, -1, : model.vocab].double().tolist()
        log_sum = max(logits) + math.log(math.fsum(math.exp(x - max(logits)) for x in logits))
        yield len(seen) - 1, log_sum - logits[ids[at]]


@pytest.mark.flag("evaluate.input")
def test_figures_equal_a_plain_computation(score, run, tmp_path):
    """The figures equal those of a plain computation with the same weights."""
    path = tmp_path / "held out.txt"
    path.write_text(TEXT[:50])
    status, got, _ = score("--input", path)
    raw = TEXT[:50].encode()
    model = language_model.load_model(
        str(run), {}, TokenizerFlags(), torch.float64, torch.device("cpu")
    ).model
    by_range = defaultdict(list)
    with torch.no_grad():
        for column, loss in plain_losses(model, [256, *raw], LENGTH, LENGTH // 2):
            by_range[column.bit_length()].append(loss)
    nats = sum(map(sum, by_range.values()))
    assert status == 0 and (got["tokens"], got["bytes"], got["documents"]) == (
        len(raw),
        len(raw),
        1,
    )
    assert got["loss"] == pytest.approx(nats / len(raw), rel=1e-9)
    assert got["perplexity"] == pytest.approx(math.exp(nats / len(raw)), rel=1e-9)
    assert got["bits_per_byte"] == pytest.approx(nats / len(raw) / math.log(2), rel=1e-9)
    means = [sum(losses) / len(losses) for _, losses in sorted(by_range.items())]
    assert list(got["by_position"].values()) == pytest.approx(means, rel=1e-9)
    assert list(got["by_position"]) == range_names(LENGTH)
    path.write_text("QZ#%XW!" * 5)
    assert score("--input", path)[1]["loss"] > 3 > got["loss"]  # it knows its own text better


@pytest.mark.flag("evaluate.json_keys")
def test_each_key_of_a_line_is_a_document(score, tmp_path):
    """Blank lines are skipped, and lines may end in any way."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        '{"text": "eins", "more": "saß"}\r\n\n{"text": "zwei", "more": "", "n": 3}'.encode()
    )
    one, both = score("--input", path)[1], score("--input", path, "--json-keys", "text", "more")[1]
    assert (one["documents"], one["bytes"]) == (2, 8) and (both["documents"], both["bytes"]) == (
        4,
        12,
    )
    more = score("--input", path, "--json-key", "more")[1]
    assert both["loss"] * 12 == pytest.approx(one["loss"] * 8 + more["loss"] * 4, rel=1e-9)


@pytest.mark.flag("overlapping_eval")
def test_overlapping_eval(score, tmp_path):
    """The stride changes the context, not the tokens; at most it is the sequence length."""
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    by_stride = {
        stride: score("--input", path, "--overlapping-eval", stride)[1] for stride in (1, 8, 16, 99)
    }
    assert len({v["tokens"] for v in by_stride.values()}) == 1
    assert (
        len({v["loss"] for v in by_stride.values()}) == 3
        and by_stride[99]["loss"] == by_stride[16]["loss"]
    )
    assert [v["stride"] for v in by_stride.values()] == [1, 8, 16, 16]
    # the default is half the length
    assert score("--input", path)[1]["loss"] == by_stride[8]["loss"]
    short = score("--input", path, "--seq-length", 4)[1]
    assert (short["sequence_length"], short["stride"]) == (4, 2)


@pytest.mark.flag("evaluate.json")
def test_json_and_table_show_the_same_numbers(run, capsys, tmp_path):

    path = tmp_path / "a.txt"
    path.write_text("die Katze")
    capsys.readouterr()
    assert main(["evaluate", str(run), "--device=cpu", "--input", str(path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    positions = {f"loss at {name}": loss for name, loss in values.pop("by_position").items()}
    assert list(positions) == [
        "loss at 0",
        "loss at 1",
        "loss at 2-3",
        "loss at 4-7",
        "loss at 8-15",
    ]
    assert (
        list(values)
        == "step documents tokens bytes loss perplexity bits_per_byte sequence_length stride".split()
    )
    values |= positions
    assert main(["evaluate", str(run), "--device=cpu", "--input", str(path)]) == 0
    table = capsys.readouterr().out
    assert "{" not in table
    for name, value in values.items():
        shown = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
        assert f"  {name.replace('_', ' '):16} {shown}\n" in table


def test_half_precision(run, capsys, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    got = []
    for more in (["--bf16"], []):
        capsys.readouterr()
        assert (
            main(["evaluate", str(run), "--device=cpu", "--json", "--input", str(path), *more]) == 0
        )
        got.append(json.loads(capsys.readouterr().out)["loss"])
    assert got[0] == pytest.approx(got[1], rel=2e-2) and got[0] != got[1]


def test_windows_count_every_token_once():
    """For all small sizes, windows come in order and none is longer than allowed."""
    for n in range(40):
        for length in range(1, 12):
            for stride in range(1, length + 1):
                counted = []
                for begin, first, end in window_spans(n, length, stride):
                    assert 0 <= begin <= first < end <= n and end - begin <= length
                    # the context is as long as it can be
                    assert begin == 0 or end - begin == length
                    counted += range(first, end)
                assert counted == list(range(n))


def small_model():
    torch.manual_seed(0)
    return GPT(Model(num_layers=1, hidden_size=8, num_attention_heads=2), 31, 32, 9).double().eval()


def test_windows_are_scored_in_any_batches():
    """Nats and labels that are the likeliest token, in order, also where every shape is fixed."""
    model, rng = small_model(), random.Random(0)
    windows = [
        Window([rng.randrange(31) for _ in range(n + 1)], rng.randrange(n + 1))
        for n in rng.choices(range(10), k=300)
    ]
    want = []
    with torch.no_grad():
        for ids, first in windows:
            logits = model(torch.tensor([ids[:-1] or [0]]), Positions())[
                0, : len(ids) - 1, :31
            ].log_softmax(-1)
            labels = torch.tensor(ids[1:], dtype=torch.int64)
            picked = logits.gather(1, labels[:, None])[first:].sum()
            want.append([-picked, (logits.argmax(-1) == labels)[first:].sum()])
    shapes = []

    def scorer(batches):
        shapes.extend(b.tokens.shape for b in batches)
        return window_losses.plain_scorer(model)(batches)

    for batch, fixed in ((1, False), (4, False), (500, False), (4, True)):
        shapes.clear()
        got = torch.cat(list(window_losses.score_windows(scorer, windows, 9, batch, fixed)))
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))
        assert all(b * t <= batch * 9 for b, t in shapes) and (not fixed or set(shapes) == {(4, 9)})
    assert torch.tensor(want)[:, 1].sum() > 0


def check_cut_logits():
    torch.manual_seed(1)
    logits, counted = torch.randint(0, 9, (2, 40, 16)).double(), torch.rand(2, 40) < 0.5
    labels = logits[..., :10].argmax(-1)  # all right but every third
    labels[:, ::3] = torch.randint(0, 10, labels[:, ::3].shape)
    rank = torch.distributed.get_rank()
    for some in (counted, torch.ones_like(counted), torch.zeros_like(counted)):
        rows = window_losses.WindowBatch(labels, labels, some)
        want = window_losses.count_hits(logits, rows, 10)
        part = logits[..., 4 * rank : 4 * rank + 4]
        got = window_losses.count_hits(part, rows, 10, 4 * rank, torch.distributed.group.WORLD)
        torch.testing.assert_close(got, want)


def test_ranks_that_hold_parts_of_the_logits():
    """Equal logits, of which the first counts; one rank has padded ids, another nothing else."""
    run_ranks(check_cut_logits, 4)


def test_a_rank_without_ids_finds_the_likeliest_of_the_others(monkeypatch):
    """257 ids, padded to 512, leave the last of four tensor ranks none."""
    whole = torch.randn(6, 257)
    high, token = whole.max(-1)
    of_others = iter([high, -token])
    monkeypatch.setattr(
        window_losses.comm,
        "all_reduce",
        lambda x, *_: torch.maximum(x, next(of_others).to(x.dtype)),
    )
    assert window_losses.likeliest(whole[:, 257:], 384, object()).tolist() == token.tolist()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, "does not exist"),
        ("a.jsonl", b'{"text": ""}\n\n', "no text to score"),
        ("a.txt", b"gut\xff", "at byte 3"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', ":2:"),
    ],
)
def test_bad_input_is_refused(score, tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    status, got, err = score("--input", path)
    assert (
        status == 65
        and got is None
        and message in err
        and str(path) in err
        and "Traceback" not in err
    )


@pytest.mark.parametrize(
    ("flags", "status", "messages"),
    [
        (
            "--input=FILE --num-layers=5 --seq-length=99",
            65,
            ["--num-layers 5, the checkpoint has 2", "h 99, the checkp"],
        ),
        ("--input=FILE --load=/nowhere", 65, ["/nowhere"]),
        ("--input=FILE --steps=\N{SUPERSCRIPT TWO}", 2, ["is neither all nor numbers"]),
        ("--input=FILE --steps=7", 65, ["--steps 7", "has no step 7; its steps: 30"]),
    ],
)
def test_bad_flags_are_refused(score, tmp_path, flags, status, messages):
    (tmp_path / "a.txt").write_text("a")
    got, _, err = score(*flags.replace("FILE", str(tmp_path / "a.txt")).split())
    assert got == status and all(message in err for message in messages), err


def test_a_loss_that_is_not_finite_is_an_error(score, monkeypatch, tmp_path):
    load = language_model.load_model

    def damaged(*args, **layout):
        found = load(*args, **layout)
        found.model.ln_f.weight.fill_(math.nan)
        return found

    monkeypatch.setattr(language_model, "load_model", damaged)
    (tmp_path / "a.txt").write_text("a")
    status, got, err = score("--input", tmp_path / "a.txt")
    assert status == 70 and got is None and "not finite" in err


@pytest.mark.flag("limit")
def test_limit_is_that_of_documents(score, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} {TEXT}"}) + "\n" for n in range(5))
    )
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} {TEXT}"}) + "\n" for n in range(2))
    )
    _, limited, _ = score("--input", tmp_path / "a.jsonl", "--limit", 2)
    _, all_of_few, _ = score("--input", tmp_path / "b.jsonl")
    assert limited == all_of_few and limited["documents"] == 2
    status, _, err = score("--eval-tasks", f"wikitext={tmp_path}/a.jsonl", "--limit", 2)
    assert status == 2 and "--limit 2: WikiText is one text" in err


def test_the_repr_of_a_score_has_its_measures():
    """Loss 512 / 256 = 2, e^2 = 7.389, 512 nats = 738.65 bits of 1,000 bytes."""
    shown = "Score(loss=2.0000, perplexity=7.3891, bits_per_byte=0.7387, documents=2, tokens=256, bytes=1,000)"
    assert repr(Score(512.0, 256, 1000, 2, {"0": 3.0})) == shown


def test_dry_run(run, capsys, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    assert main(["evaluate", str(run), "--input", str(tmp_path / "a.txt"), "--dry-run"]) == 0
    assert "nothing was loaded" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_running_out_of_memory_is_explained(monkeypatch, capsys, run, tmp_path, command):
    def fail(*args, **more):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has more")

    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.setattr(language_model, "load_model", fail)
    what = ["--input", str(tmp_path / "a.txt")] if command == "evaluate" else ["--prompt", "some"]
    assert main([command, str(run), "--device=cpu", "--micro-batch-size=3", *what]) == 2
    err = capsys.readouterr().err
    assert (
        "out of memory: Tried to allocate 2.00 GiB" in err and "--micro-batch-size (now 3)" in err
    )


def test_flags_without_effect_are_noted(score, tmp_path):

    (tmp_path / "a.txt").write_text("some text")
    status, _, err = score("--input", tmp_path / "a.txt", "--train-iters", 7)
    assert status == 0 and "note: --train-iters has no effect on this command" in err
    status, _, err = score("--input", tmp_path / "a.txt", "--micro-batch-size", 2)
    assert status == 0 and "has no effect" not in err


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"PMI_RANK": "3", "PMI_SIZE": "4"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
    ],
)
def test_only_rank_0_prints(monkeypatch, capsys, environ):
    """The others neither print nor read what only prints; they find no folder."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **environ}.items():
        monkeypatch.setenv(name, value)
    assert main(["evaluate", "none", "--input", "none", "--dry-run"]) == 0
    assert capsys.readouterr() == ("", "")


def test_token_files(run, score, tmp_path):
    """--data-path gives what the text of the files gives; with --split, their second part."""
    (tmp_path / "t.jsonl").write_text((json.dumps({"text": TEXT}) + "\n") * 50)
    by_text = score("--input", tmp_path / "t.jsonl")[1]
    data = run.parent / "a_text_document"
    assert score("--data-path", data)[1] == by_text == score("--data-path", f"{data}.bin")[1]
    part = score("--data-path", data, "--split", "6,4,0")[1]
    assert (part["documents"], part["loss"]) == (20, pytest.approx(by_text["loss"]))


def test_token_files_of_another_tokenizer_are_refused(run, score, tmp_path):
    """Their ids are in the vocabulary, and mean other text."""
    data = tmp_path / "other"
    for ending in (".bin", ".idx"):
        shutil.copy(run.parent / f"a_text_document{ending}", f"{data}{ending}")
    by_bytes = score("--data-path", data)[1]["loss"]
    tokenizers.keep_beside(tokenizers.Null(200), str(data))
    status, scored, err = score("--data-path", data)
    assert status == 65 and scored is None
    assert "the model has another tokenizer (ByteTokenizer, 257 ids)" in err
    assert "other.tokenizer: NullTokenizer, 201 ids" in err and "--input" in err
    tokenizers.keep_beside(tokenizers.Bytes(), str(data))
    assert score("--data-path", data)[1]["loss"] == by_bytes


def test_a_split_without_validation_is_named(run, score):
    status, scored, err = score("--data-path", run.parent / "a_text_document", "--split", "100,0,0")
    assert status == 65 and scored is None
    assert "--split 100,0,0 leaves none of the 50 documents" in err and "second share" in err
