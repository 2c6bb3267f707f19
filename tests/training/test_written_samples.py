"""Samples of --sample-interval: the texts of `generate`, in every layout, and no other losses."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import meshwright
from helpers import TINY_FLAGS, read_rows, spaced_words
from layouts import FLAGS, run_all
from meshwright.base.errors import USAGE
from meshwright.config import flags
from meshwright.config.schema import Sampling, TrainConfig
from meshwright.generation.decoder import complete
from meshwright.generation.requests import Request
from meshwright.training.hooks import samples as written
from meshwright.training.hooks.samples import SampleWriter, in_one_line

BYTES = ["--tokenizer=byte", "--vocab-size=257", "--sample-interval=2"]


@pytest.fixture
def run(run):
    """run(flag, ...) trains with two layers and two micro-batches."""
    return functools.partial(run, *TINY_FLAGS)


def samples(run):
    return [
        (row["iteration"], row["number"], row["prompt"], row["text"])
        for row in read_rows(run.folder, "sample")
    ]


@pytest.mark.flag("sample_interval sample_prompts sample_length sample_temperature")
def test_flags(run, tmp_path):
    """The texts are those that `generate` writes from the step's checkpoint with the same seed."""
    prompts = ["--sample-prompts", "a b", "c", "--sample-length=9"]
    saved = run(*BYTES, *prompts, "--hidden-dropout=0.1", f"--save={tmp_path}/saved")
    assert saved.status == 0, saved.err
    found = samples(saved)
    assert [row[:3] for row in found] == [
        (i, n, p) for i in (2, 4, 6) for n, p in ((0, "a b"), (1, "c"))
    ]
    plain = run(*BYTES[:2], "--hidden-dropout=0.1")
    assert [x.hex() for x in plain.losses] == [x.hex() for x in saved.losses]
    assert plain.column("loss", "validation") == saved.column("loss", "validation")
    assert " > sample at iteration 6: a b|" in saved.out and not samples(plain)
    model = meshwright.load(f"{tmp_path}/saved")
    options = Sampling(temperature=0.8, out_seq_length=9)
    requests = [
        Request(model.encode(prompt), options, 1234, n) for n, prompt in enumerate(("a b", "c"))
    ]
    assert [new.text.removesuffix("�") for new in complete(model, requests, 2)] == [
        text for i, *_, text in found if i == 6
    ]
    likeliest = run(
        *BYTES, "--sample-prompts=a b", "--sample-temperature=0", "--hidden-dropout=0.1"
    )
    (new,) = complete(
        model, [Request(model.encode("a b"), Sampling(greedy=True, out_seq_length=64))], 1
    )
    # up to the sequence length
    assert samples(likeliest)[-1][3] == new.text and len(new.tokens) == 13


def test_no_gradient_is_kept(run, monkeypatch):
    """The activations of a sample would take as much memory as a training step's."""
    enabled, real = set(), SampleWriter.pad

    def note(writer, texts):
        enabled.add(torch.is_grad_enabled())
        return real(writer, texts)

    monkeypatch.setattr(SampleWriter, "pad", note)
    assert run(*BYTES, "--sample-length=1").status == 0 and enabled == {False}


@pytest.mark.promise("Samples in the log cannot move the cursor of a terminal")
def test_a_terminal_is_safe():
    assert in_one_line("a\n b\tc\x1b[2J\x00é") == "a b c\ufffd[2J\ufffdé"


def test_refused_and_noted(run):
    without = run("--sample-interval=2")
    assert (
        without.status == USAGE
        and "--sample-interval writes text, for which the run needs a tok" in without.err
    )
    long = run(*BYTES, "--sample-prompts", "sixteen letters!")
    assert (
        long.status == USAGE
        and "'sixteen letters!' has 16 tokens; the model reads 16, shorten it" in long.err
    )
    bytes_ = run(*BYTES, "--sample-prompts", "a\udcff", "--sample-length=1")
    assert bytes_.status == 0 and {prompt for _, _, prompt, _ in samples(bytes_)} == {"a\ufffd"}
    nothing = run(*BYTES, "--sample-length=1")
    assert [prompt for _, _, prompt, _ in samples(nothing)] == [""] * 3
    idle = run("--sample-prompts=a", "--train-iters=1")
    assert "--sample-prompts has no effect without --sample-interval" in idle.err + idle.out


def test_the_text_continues_the_prompt(tmp_path, monkeypatch):
    """With the space before its first word, which a SentencePiece model leaves out of a text."""
    monkeypatch.setattr(written, "runs_one_shape", lambda net: True)
    line = "--seq-length 8 --sample-interval 1 --sample-prompts|a||".split("|")
    config = flags.parse_settings(
        TrainConfig, [*line[0].split(), *line[1:-1]], "meshwright test", check=False
    ).config
    samples, rows = SampleWriter(config, None, 3, spaced_words(tmp_path)), []
    monkeypatch.setattr(samples, "generate", lambda: [[0, 1], [0, 1]])
    samples.write(3, SimpleNamespace(sample=lambda *row: rows.append(row)))
    assert rows == [(3, 0, "a", " a b"), (3, 1, "", "a b")]


class Numbers:
    """A tokenizer of ids."""

    eod = 36

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


PROMPTS = ["1 2 3", "11", "4 5 6 7 8 9 10", "3"]


def texts_of(trainer):
    """Return the logits behind the prompts, and their continuations."""
    samples = SampleWriter(trainer.config, trainer.net, trainer.state.vocab, Numbers())
    return samples.next_logits(samples.ids).tolist(), samples.generate()


LAYOUTS = [
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2 --micro-batch-size 2",
    "--context-parallel-size 2",
    "--zero-stage 3 --micro-batch-size 2",
]


@pytest.mark.long
def test_layouts():
    def config(line, world):
        more = f"{line} --world-size {world} --sample-interval 1 --sample-length 7 --sample-prompts".split()
        return flags.parse_settings(
            TrainConfig, [*FLAGS.split(), *more, *PROMPTS], "meshwright test"
        ).config

    ((logits, plain),) = run_all({"": config("--micro-batch-size 4", 1)}, 1, 1, read=texts_of)[""]
    assert all(text for text in plain) and len(set(map(str, plain))) == len(PROMPTS)
    for line, ranks in run_all(
        {line: config(line, 2) for line in LAYOUTS}, 2, 1, read=texts_of
    ).items():
        for found, texts in ranks:
            np.testing.assert_allclose(found, logits, rtol=0, atol=1e-9, err_msg=line)
            assert texts == plain, line


def test_a_character_cut_at_the_end_is_left_out(monkeypatch):
    monkeypatch.setattr(written, "text_until_stop", lambda *_: ("话\N{REPLACEMENT CHARACTER}", 0))
    writer = SimpleNamespace(prompts=[""], requests=[None], tokenizer=None, generate=lambda: [[1]])
    rows = []
    SampleWriter.write(writer, 3, SimpleNamespace(sample=lambda *row: rows.append(row)))
    assert rows == [(3, 0, "", "话")]
