"""The public Python API: lazy, typed, usable in a notebook, documented by an example that runs."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright
import meshwright.training.run
from helpers import TINY_FLAGS
from meshwright.__main__ import main
from meshwright.base import console
from meshwright.checkpoint.owner import lock_folder
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.runtime.ranks.world import World
from meshwright.training.health.stop import print_from_handler
from meshwright.training.log.screen import NotebookScreen

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
FLAGS = [f for f in TINY_FLAGS if not f.startswith("--vocab-size")] + [
    "--tokenizer-type=ByteTokenizer"
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api") / "run"
    return meshwright.train(FLAGS, save=str(folder))


@pytest.fixture(scope="module")
def m(run):
    return meshwright.load(run.folder, device="cpu")


@pytest.mark.whole
def test_a_number_of_ranks_that_were_not_started_is_refused():
    """In whichever way it is given; nothing trains on fewer ranks without a word."""
    alone = [*FLAGS, "--micro-batch-size=1"]
    config = flags.parse_settings(TrainConfig, [*alone, "--world-size=4"], "test").config
    calls = [
        lambda: meshwright.train(config),
        lambda: meshwright.train([*alone, "--world-size=4"]),
        lambda: meshwright.train(alone, world_size=4),
        lambda: meshwright.train([*alone, "--world_size", "4"], datasets={"train": None}),
    ]
    for call in calls:
        with pytest.raises(meshwright.UserError, match="4, but started as one process"):
            call()


def test_importing_is_cheap():
    code = (
        "import sys, meshwright; assert 'train' in dir(meshwright); meshwright.TrainConfig; meshwright.__version__\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loading_prints_warnings_only(run, tmp_path, capsys):
    meshwright.load(run.folder)
    assert capsys.readouterr() == ("", "")
    shutil.copytree(run.folder, tmp_path / "run")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("six")
    assert meshwright.load(tmp_path / "run").step == 6
    out, err = capsys.readouterr()
    assert not out and re.fullmatch("WARNING: .*\n", err), err


def test_a_notebook_shows_twelve_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)  # as IPython's kernel does
    # rich then displays what it forms
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    many = "--train-iters=40 --num-layers=1 --eval-interval=20 --save-interval=20 --keep-last=1"
    many = [*many.split(), f"--save={tmp_path}"]
    assert not NotebookScreen().console.is_jupyter
    meshwright.train([*FLAGS, *many])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) <= 12 and not err, out + err
    assert lines[0].startswith(f"Meshwright {meshwright.__version__}: ") and "40 steps" in lines[0]
    steps = [int(line.split()[0]) for line in lines[2:-3]]
    assert steps == [7, 14, 21, 28, 35, 40]
    assert [line.split()[0] for line in lines[-3:]] == [
        "done",
        "loss",
        "folder",
    ] and "in validation" in lines[-2]
    assert "iteration       39/" in (tmp_path / "log.txt").read_text()


def test_quiet(tmp_path, capsys):
    assert (
        meshwright.train(
            FLAGS, train_iters=2, save=str(tmp_path), sample_prompts=["a"], quiet=True
        ).status
        == 0
    )
    assert capsys.readouterr() == ("", "")
    assert "iteration        2/" in (tmp_path / "log.txt").read_text()
    meshwright.train(FLAGS, train_iters=1)
    assert "iteration        1/" in capsys.readouterr().out


def test_quiet_holds_in_a_signal_handler(capfd):
    with console.quiet(True):
        print_from_handler("stopping")
    print_from_handler("saving")
    assert capfd.readouterr().err == "saving\n"


def test_every_name_resolves():
    for name in meshwright.__all__:
        assert getattr(meshwright, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = meshwright.trian


@pytest.mark.whole
def test_the_page(tmp_path, monkeypatch, capsys):
    """Run every Python block of docs/python.md, in order, in one process."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    out = capsys.readouterr().out
    assert (
        "0 run " in out
        and "torch.Size([16, 257])" in out
        and "there is no folder no-such-folder" in out
        and " 65\n" in out
    )
    assert (tmp_path / "run-torch").is_dir()


def test_train_takes_flags_keywords_and_a_config(run, tmp_path):
    assert run.status == 0 and [s.iteration for s in run.history.steps] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(meshwright.UserError, match="already holds iter_0000006"):
        meshwright.train(run.config)
    checkpoint = dataclasses.replace(run.config.checkpoint, load=str(run.folder))
    again = meshwright.train(dataclasses.replace(run.config, checkpoint=checkpoint))
    assert again.status == 0  # complete, so nothing is left to do
    words = " ".join(FLAGS)
    other = meshwright.train(words, train_iters=2, run_dir=str(tmp_path / "b"))
    assert [s.loss for s in other.history.steps] == [s.loss for s in run.history.steps[:2]]
    with pytest.raises(meshwright.UserError, match="kept no history"):
        _ = meshwright.train(words, train_iters=1).history


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: meshwright.train(nmu_layers=2), "unknown setting 'nmu_layers'.*num_layers"),
        (lambda: meshwright.train(preset="gpt2-117"), "no preset 'gpt2-117'.*gpt2-117m"),
        (lambda: meshwright.train("--help"), "belongs to the command line"),
        (
            lambda: meshwright.train(FLAGS, train_iters="many"),
            "^train_iters: 'many' is not a whole number",
        ),
        (lambda: meshwright.train(FLAGS, num_gpus_per_node=2), "meshwright launch"),
        (lambda: meshwright.train(meshwright.TrainConfig(), seed=1), "beside a TrainConfig"),
        (lambda: meshwright.load("nowhere", device="abacus"), "^device abacus: torch sees no such"),
        (lambda: meshwright.load("nowhere", bf16=True), "load\\(\\) does not use bf16"),
        (lambda: meshwright.evaluate("nowhere", "text"), "give a list of documents"),
        (lambda: meshwright.convert("nowhere", "there", to="onnx"), "native, torch or huggingface"),
        (
            lambda: meshwright.convert("nowhere", "there", to="huggingface", dtype="int8"),
            "dtype 'int8' is unknown; give float32, float16, bfloat16",
        ),
        (
            lambda: meshwright.convert("nowhere", "there", to="torch", tensor_parallel="2"),
            "must be whole and above 0",
        ),
        # of a kind that no setting has
        (lambda: meshwright.train(FLAGS, eval_iters=None), "eval_iters: it is None; leave it out"),
        (lambda: meshwright.train(FLAGS, save=b"run"), "save: b'run' is not text"),
        (lambda: meshwright.train(FLAGS, save=("a", "b")), "save: \\('a', 'b'\\) is not text"),
        (lambda: meshwright.train(FLAGS, split=[9, 1, 0]), "split: .* as on the command line"),
        (lambda: meshwright.train("--save 'run"), "cannot be divided into words: No closing"),
        (lambda: meshwright.train({"save": "run"}), "an object of type dict; give flags"),
        (lambda: meshwright.train(["--num-layers", 2]), "2 among the flags is no text"),
        (lambda: meshwright.train(FLAGS, model=nn.Linear(1, 1)), "model is a Linear; give the f"),
        (lambda: meshwright.train(FLAGS, loss="mean"), "loss is a str; give a function"),
        (lambda: meshwright.train(FLAGS, datasets=[1]), "datasets is a list; give a mapping"),
        (lambda: meshwright.generate(None, "a"), "the model is a NoneType; give what load"),
        (lambda: meshwright.evaluate(None, ["a"]), "the model is a NoneType; give what load"),
        (lambda: meshwright.evaluate("nowhere", 5), "texts is of type int; give a list"),
    ],
)
def test_mistakes_raise_one_class(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(meshwright.UserError, match=f"(?s){message}"):
        call()
    assert not list(tmp_path.iterdir())


WRITTEN = ["--lr", "fast", "--seq-length=8"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: meshwright.train(preset="gpt2-117m"),
            "data_path is needed (a prefix written by `meshwright prep",
        ),
        (
            lambda: meshwright.train(bf16=True, fp16=True),
            "fp16=True and bf16=True cannot be combined",
        ),
        (
            lambda: meshwright.train(num_layers=2, mock_data=True),
            "(or preset, which gives a whole architecture)",
        ),
        (
            lambda: meshwright.train(batch_size=2, lora=True),
            "no setting batch_size; here it is micro_batch_size",
        ),
        (
            lambda: meshwright.train(lora=True),
            "lora is refused: load=DIR with finetune=True trains",
        ),
        (
            lambda: meshwright.train(WRITTEN, num_layers=0),
            "hidden_size, num_attention_heads, micro_batch_size, ",
        ),
        # as the caller writes them
        (lambda: meshwright.train(WRITTEN), "--num-layers, --hidden-size"),
        (
            lambda: meshwright.convert("nowhere", "x", num_attention_heads=0),
            "num_attention_heads=0 must be above 0",
        ),
        (
            lambda: meshwright.convert("a", "b", tensor_parallel=2),
            "leave the target's sizes out, or choose torch",
        ),
        (
            lambda: meshwright.generate("a/--save/flag", "x"),
            "there is no folder a/--save/flag; give the save folder",
        ),
    ],
)
def test_errors_name_what_the_caller_wrote(call, said):
    with pytest.raises(meshwright.UserError) as caught:
        call()
    assert said in str(caught.value)


def test_load(run):
    m = meshwright.load(run.folder, device="cpu", dtype="float64")
    assert isinstance(m, meshwright.LanguageModel) and m.step == 6 and m.seq_length == 16
    logits = m.logits("abc")
    assert logits.shape == (3, 257) and logits.dtype == torch.float64
    assert torch.equal(logits, m.logits(m.encode("abc"))) and torch.equal(
        logits, m.logits(torch.tensor([97, 98, 99]))
    )
    assert m.generate("a", max_new_tokens=4, seed=3) == m.generate("a", max_new_tokens=4, seed=3)
    greedy = m.generate("a", max_new_tokens=1, greedy=True)
    # The continuation is what it adds to the prompt's text, not its own tokens' text.
    assert "a" + greedy == m.tokenizer.decode([*m.encode("a"), int(m.logits("a")[-1].argmax())])
    assert meshwright.generate(run.folder, "a", max_new_tokens=1, greedy=True) == greedy


def test_a_model_can_be_copied(m):
    """With a cache and a lock of its own, also to another process."""
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):  # noqa: S301  made here
        assert other.lock is not m.lock and not other.decoders
        assert torch.equal(other.logits("abc"), m.logits("abc"))


def test_the_network_maps_ids_to_logits(m):
    """Called with ids alone it returns what `logits` does, without the columns that only pad."""
    ids = torch.tensor([m.encode("abc"), m.encode("xyz")])
    logits = m.model(ids)
    assert logits.shape == (2, 3, 257) and m.model.wte.weight.shape[0] > 257
    assert torch.allclose(logits[0], m.logits("abc"), atol=1e-6) and torch.allclose(
        logits[1], m.logits("xyz"), atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature -1 must not be below 0"),
        ({"prompt": "x" * 16}, "16 tokens; the model reads 16"),
        ({"prompt": [999]}, "token id 999"),
        ({"prompt": ["a", "x" * 16]}, "prompt 1 has 16 tokens; the model reads 16, shorten it"),
        ({"prompt": ["a", 1]}, "['a', 1] is neither a text nor a list of token ids"),
        ({"prompt": 5}, "5 is neither a text nor a list of token ids"),
        ({"batch_size": 0}, "batch_size 0 must be above 0"),
        ({"max_new_tokens": 3.5}, "max_new_tokens: 3.5 is not a whole number"),
        ({"max_new_tokens": None}, "max_new_tokens is None; leave it out for its default"),
        ({"temperature": "hot"}, "temperature: 'hot' is not a number"),
        ({"temperature": float("nan")}, "temperature: nan is not a number"),
        ({"top_k": 2.5}, "top_k: 2.5 is not a whole number"),
        ({"seed": "x"}, "seed: 'x' is not a whole number"),
        ({"stop": None}, "stop None is neither a string nor a list of strings"),
        ({"prompt": "a\ud800"}, "the text has \\ud800, half a character; leave it out"),
    ],
)
def test_generate_refuses_what_makes_no_sense(m, options, message):
    with pytest.raises(meshwright.UserError, match=re.escape(message)):
        m.generate(options.pop("prompt", "a"), **options)


def test_convert_names_its_own_keywords(run, tmp_path):
    to = str(tmp_path / "to")
    with pytest.raises(meshwright.UserError, match="goes on from; .* by optimizer=False$"):
        meshwright.convert(run.folder, to, dtype="float16")
    with pytest.raises(meshwright.UserError, match=r"heads cannot be divided by 3 \(tensor_para"):
        meshwright.convert(run.folder, to, to="torch", tensor_parallel=3)
    assert meshwright.convert(run.folder, to, dtype="float16", optimizer=False).tensors


def test_options_of_transformers_are_answered_with_ours(m):
    words = {
        "do_sample": "greedy",
        "max_length": "max_new_tokens",
        "num_beams": "`meshwright generate --beam-width`",
    }
    for name, ours in words.items():
        with pytest.raises(
            TypeError, match=rf"^generate\(\) has no {name}; here it is {re.escape(ours)}"
        ):
            m.generate("a", **{name: 1})
    with pytest.raises(
        TypeError, match=r" has no max_new_token; did you mean max_new_tokens\?; has no q$"
    ):
        m.generate("a", q=1, max_new_token=2)


def test_a_tuple_is_a_list_and_a_path_is_text(tmp_path):
    """The setting's own values, not the text that Python prints of the whole."""
    words = [*FLAGS, "--run-dir", tmp_path / "run"]
    config = meshwright.train(words, sample_prompts=("a b", "c"), data_path=None).config
    assert config.logging.sample_prompts == ["a b", "c"] and config.data.data_path == []
    assert config.checkpoint.run_dir == str(tmp_path / "run")


def test_bytes_are_no_ids(m):
    with pytest.raises(meshwright.UserError, match="is bytes; give text, as by .decode"):
        m.generate(b"abc")


def test_numbers_of_evaluate_are_whole(m):
    for wrong in ({"stride": 1.5}, {"batch_size": "two"}):
        with pytest.raises(meshwright.UserError, match="is not a whole number"):
            meshwright.evaluate(m, ["some text"], **wrong)


def test_a_step_that_is_not_there_is_named_with_those_that_are(run):
    with pytest.raises(meshwright.UserError, match="no step 999 in .*; there (is|are) "):
        meshwright.load(run.folder / "iter_0000999")


def test_a_folder_in_use_is_named_by_its_own_setting(tmp_path):
    folder = tmp_path / "run {1}"
    with (
        lock_folder(folder),
        pytest.raises(meshwright.UserError, match=r"run \{1\} is in use .* or change run_dir$"),
    ):
        meshwright.train(FLAGS, run_dir=folder)


def test_generate_takes_a_list(run, m, tmp_path):
    options = {"max_new_tokens": 4, "seed": 3}
    texts = m.generate(["ab", "c", "ab", ""], **options)
    assert len(texts) == 4 and texts[0] == m.generate("ab", **options) != texts[2]
    assert texts == m.generate(["ab", "c", "ab", ""], batch_size=1, **options)
    assert texts == m.generate([list(b"ab"), [99], list(b"ab"), []], **options)
    assert (
        meshwright.generate(run.folder, ["ab", "c"], **options) == texts[:2]
        and m.generate([]) == []
    )
    (tmp_path / "prompts.txt").write_text("ab\nc\nab\n")
    argv = f"generate {run.folder} --prompts {tmp_path}/prompts.txt --output {tmp_path}/o.jsonl --max-new-tokens 4"
    assert main([*argv.split(), "--seed=3", "--device=cpu"]) == 0
    assert [
        json.loads(line)["text"] for line in (tmp_path / "o.jsonl").read_text().splitlines()
    ] == texts[:3]


def test_evaluate(run):
    m = meshwright.load(run.folder, dtype="float64")
    score = meshwright.evaluate(m, ["abc"])
    ids = [m.tokenizer.eod, *b"abc"]
    expected = -m.logits(ids[:-1]).log_softmax(-1)[range(3), ids[1:]].mean()
    assert score.loss == pytest.approx(float(expected)) and (
        score.tokens,
        score.bytes,
        score.documents,
    ) == (3, 3, 1)


@pytest.mark.parametrize(
    ("texts", "message"),
    [(["a", 5], "texts[1] is of type int"), (["\ud800"], "texts[0] has \\ud800, half a")],
)
def test_evaluate_refuses_what_is_no_text(m, texts, message):
    with pytest.raises(meshwright.UserError, match=re.escape(message)):
        meshwright.evaluate(m, texts)


def test_training_in_a_thread(tmp_path):
    """Neither signal handlers nor sys.exit: a notebook's thread can train."""
    results = []

    def work():
        with pytest.raises(meshwright.UserError, match="main thread only"):
            meshwright.train(FLAGS, train_iters=1, handle_signals=True)
        trained = meshwright.train(FLAGS, train_iters=1, run_dir=str(tmp_path / "r"))
        results.append(trained.status)
        checkpoint = dataclasses.replace(trained.config.checkpoint, run_dir=str(tmp_path / "s"))
        again = dataclasses.replace(trained.config, checkpoint=checkpoint)
        results.append(
            meshwright.training.run.run(
                again, World(), meshwright.training.run.Caller(handle_signals=True)
            )
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [0, 0]


def test_no_environment_is_left_behind(run):
    assert not any(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def test_a_model_of_another_library_is_refused():
    """It may have a generate() too, and nothing else that is needed."""
    other = type("GPT2LMHeadModel", (), {"generate": print})()
    for use in (meshwright.generate, meshwright.evaluate):
        with pytest.raises(meshwright.UserError, match="the model is a GPT2LMHeadModel; give what"):
            use(other, ["a text"])
