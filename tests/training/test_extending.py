"""docs/extending.md: its example is the file, learns and resumes; each part of it is used."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn

import meshwright
from helpers import TINY_FLAGS, open_step, printed_losses, read_losses
from meshwright.__main__ import main
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.config.fields import with_settings
from meshwright.config.schema import Optimizer, TrainConfig
from meshwright.data.loader import Mock
from meshwright.model.gpt import GPT
from meshwright.model.layers import Embedding, Linear
from meshwright.parallel.layout import Layout
from meshwright.training.network import Spec, require_rated_tables
from meshwright.training.run import Caller

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "extending.py"
PAGE = (ROOT / "docs" / "extending.md").read_text()


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("extending", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(folder, step):
    return safetensors.numpy.load_file(folder / f"iter_{step:07d}" / "rank_00000.safetensors")


def train_as(settings: TrainConfig, caller: Caller) -> int:
    """Train a model, with a loss and on data, of the caller's own; return the status."""
    own = {"model": caller.model, "loss": caller.loss, "datasets": caller.datasets}
    return meshwright.train(settings, **own).status


def parts(example):
    """Return model, loss and data of the example."""

    def model(*sizes, options):
        return GPT(*sizes, block=example.Parallel, options=options)

    return model, example.z_loss, {"train": example.Sums(10**9, 1), "valid": None, "test": None}


def changed(settings, group, **values):
    """Return settings with other values in one of their groups."""
    return dataclasses.replace(
        settings, **{group: dataclasses.replace(getattr(settings, group), **values)}
    )


def test_page_contains_the_file():
    assert re.findall(r"```python\n(.*?)```\n", PAGE, re.S)[0] == EXAMPLE.read_text()


@pytest.mark.promise("Code that you give is run with your rights")
def test_the_example_learns_and_continues(example, tmp_path, monkeypatch, capsys):
    """The program stops halfway and resumes; an uninterrupted run has the same weights."""
    steps = 40
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path / "sums"), str(steps)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert (
        end.value.code == 0
        and "at iteration 20" in out
        and re.search(r"^7\+5=.*^\d of 5 right$", out, re.M | re.S)
    )
    first, *_, last = read_losses(tmp_path / "sums")
    assert abs(first - math.log(257)) < 0.1 and last < 0.7 * first

    model, loss, datasets = parts(example)
    uninterrupted = example.settings(str(tmp_path / "uninterrupted"), steps)
    datasets = datasets | {"valid": example.Sums(10**6, seed=2)}
    assert train_as(uninterrupted, Caller(model, loss, datasets)) == 0
    capsys.readouterr()
    printed = [printed_losses(tmp_path / name) for name in ("sums", "uninterrupted")]
    assert printed[0] == printed[1] and len(printed[0]) == steps
    a, b = tensors(tmp_path / "sums", steps), tensors(tmp_path / "uninterrupted", steps)
    assert a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


def test_the_example_reports_user_errors(example, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert example.main(str(tmp_path / "file"), 4) == 2
    err = capsys.readouterr().err
    assert "extending: error: " in err and "file' is a file, not a folder" in err


@pytest.fixture(scope="module")
def all_three(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three") / "run"
    assert train_as(example.settings(str(folder), 4), Caller(*parts(example))) == 0
    return folder


@pytest.mark.promise("a network, data set or script of yours")
def test_the_block_is_used(example, all_three, tmp_path):
    model, loss, datasets = parts(example)
    assert train_as(example.settings(str(tmp_path), 4), Caller(None, loss, datasets)) == 0
    assert read_losses(tmp_path)[0] != read_losses(all_three)[0]
    assert "h.0.ln_2.weight" in tensors(tmp_path, 4) and "h.0.ln_2.weight" not in tensors(
        all_three, 4
    )


def test_the_loss_is_used(example, all_three, tmp_path):
    """Logits are about 0 at the initial weights, so the z-loss is 1e-4 ln(257)^2 = 0.0031."""
    model, loss, datasets = parts(example)
    assert train_as(example.settings(str(tmp_path), 4), Caller(model, None, datasets)) == 0
    assert read_losses(all_three)[0] - read_losses(tmp_path)[0] == pytest.approx(
        1e-4 * math.log(257) ** 2, rel=0.02
    )


@pytest.mark.promise("a network, data set or script of yours")
def test_the_data_are_used(example, all_three, tmp_path):
    """Samples 0 to 63 are read in order, once each; other data give other losses."""
    model, loss, datasets = parts(example)
    read = []

    class Recorded(example.Sums):
        def __getitem__(self, k):
            read.append(k)
            return super().__getitem__(k)

    settings = example.settings(str(tmp_path / "a"), 4)
    settings = changed(settings, "data", num_workers=0)
    assert train_as(settings, Caller(model, loss, datasets | {"train": Recorded(10**9, 1)})) == 0
    assert read == list(range(64)) and read_losses(tmp_path / "a") == read_losses(all_three)
    other = {"train": Mock(256, 10**6, example.SEQ, 1)}
    assert (
        train_as(example.settings(str(tmp_path / "b"), 4), Caller(model, loss, datasets | other))
        == 0
    )
    assert read_losses(tmp_path / "b") != read_losses(all_three)


def test_generate_refuses_another_network(all_three, capsys):
    """Some names and shapes agree, but the text would be an untrained network's."""
    assert main(["generate", str(all_three), "--device=cpu", "--prompt=1+1="]) == 65
    assert (
        "holds a GPT of Parallel, which only the program that made it builds"
        in capsys.readouterr().err
    )


def test_another_network_does_not_continue(example, tmp_path):
    model, loss, datasets = parts(example)
    settings = example.settings(str(tmp_path / "a"), 4, 2)
    assert train_as(settings, Caller(model, loss, datasets)) == 0
    with pytest.raises(
        UserError, match="holds a GPT of Parallel but this run builds a GPT of Block"
    ):
        train_as(example.settings(str(tmp_path / "a"), 4), Caller(None, loss, datasets))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.register_buffer("scale", torch.ones(3)), "has buffers: scale"),
        (
            lambda model: setattr(model, "head_weight", model.wte.weight),
            "parameters with two names",
        ),
        (lambda model: model.wte.weight.requires_grad_(False), "without requires_grad: wte"),
        (lambda model: setattr(model, "drop", nn.Dropout(0.1)), "has drop, whose"),
    ],
)
def test_a_model_that_a_checkpoint_cannot_hold_is_refused(example, change, message):
    def model(*sizes, options):
        network = GPT(*sizes, options=options)
        change(network)
        return network

    with pytest.raises(UserError, match=message):
        train_as(example.settings(None, 2), Caller(model, None, parts(example)[2]))


def test_missing_training_data_are_refused(example):
    with pytest.raises(UserError, match='no "train"'):
        train_as(example.settings(None, 2), Caller(datasets={}))


def test_data_without_the_three_methods_are_refused_by_name(example):
    given = parts(example)[2] | {"valid": [np.arange(49)]}
    with pytest.raises(UserError, match=r'datasets\["valid"\], a list, has no locate'):
        train_as(example.settings(None, 2), Caller(datasets=given))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"validation": None},
            r'datasets\["validation"\] is read by nothing; name it train, valid',
        ),
        ({"valid": Mock(256, 0, 48, 1)}, r'datasets\["valid"\] has no sample'),
    ],
)
def test_data_that_no_run_would_read_are_refused(example, more, message):
    given = parts(example)[2] | more
    with pytest.raises(UserError, match=message):
        train_as(example.settings(None, 2), Caller(datasets=given))


class Fewer(GPT):
    """A network that returns fewer columns than the vocabulary has ids."""

    def forward(self, *given, **more):
        return super().forward(*given, **more)[..., :200]


class Pair(GPT):
    def forward(self, *given, **more):
        return super().forward(*given, **more), None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Fewer, r"returned a tensor of shape \(16, 48, 200\); return .*at least 257 ids"),
        (Pair, "returned an object of type tuple; return logits"),
        (lambda *sizes, options: nn.Identity(), "the model has no parameters"),
        (lambda *sizes, options: None, "an object of type NoneType; return an nn.Module"),
    ],
)
@pytest.mark.parametrize("has_loss", [False, True])
def test_what_is_no_network_is_refused(example, model, message, has_loss):
    _, loss, datasets = parts(example)
    with pytest.raises(UserError, match=message):
        train_as(example.settings(None, 2), Caller(model, loss if has_loss else None, datasets))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logits, batch: None, "an object of type NoneType; return a tensor"),
        (lambda logits, batch: logits[..., 0].detach(), "a loss without a gradient"),
    ],
)
def test_what_is_no_loss_is_refused(example, loss, message):
    with pytest.raises(UserError, match=message):
        train_as(example.settings(None, 2), Caller(None, loss, parts(example)[2]))


def test_samples_of_another_length_are_refused(example):
    with pytest.raises(
        UserError, match=r"sample 0 .* of shape \(48,\); give 49 int64, seq_length \+ 1$"
    ):
        train_as(
            example.settings(None, 2),
            Caller(datasets={"train": Mock(256, 10**6, example.SEQ - 1, 1)}),
        )


def test_a_network_without_h_is_compiled_as_one(example, monkeypatch):
    made = []
    monkeypatch.setattr(
        torch, "compile", lambda f, **how: made.append(type(f.__self__).__name__) or f
    )
    settings = example.settings(None, 2)
    t = dataclasses.replace(settings.training, compile="on", eval_iters=0)
    assert (
        train_as(
            dataclasses.replace(settings, training=t), Caller(bigram(), None, parts(example)[2])
        )
        == 0
    )
    assert made == ["Bigram"]


def test_a_network_is_compiled_on_a_gpu(example):
    """The fused kernels compute our own blocks, and are refused by name for others."""
    settings = example.settings(None, 2)
    for made, compiled in ((None, False), (bigram(), True)):
        options = Spec(settings, Layout(), torch.device("cuda"), 257, 384, made).options
        assert options.compiled == compiled and options.fused != compiled
    settings = changed(settings, "training", fused_kernels="on")
    with pytest.raises(UserError, match="fused_kernels='on' is for the layers of our own models"):
        train_as(settings, Caller(bigram(), None, parts(example)[2]))


def test_a_network_has_no_factors_of_mup(example):
    settings = example.settings(None, 2)
    settings = changed(settings, "model", mup_base_hidden_size=8)
    with pytest.raises(UserError, match="mup_base_hidden_size is for the layers of our own models"):
        train_as(settings, Caller(bigram(), None, parts(example)[2]))


def bigram():
    """Return the network of the page that has no blocks."""
    names = {"nn": nn, "Embedding": Embedding, "Linear": Linear}
    exec(re.findall(r"```python\n(.*?)```\n", PAGE, re.S)[1], names)
    return names["Bigram"]


def test_network_without_blocks(example, tmp_path):
    """The page's network resumes exactly, and is initialised and saved by its names.

    It is not compiled: on a GPU two runs of one compiled network differ in their last bits.
    """
    _, loss, datasets = parts(example)
    for folder, stops in (("uninterrupted", [None]), ("resumed", [5, None])):
        for stop in stops:
            settings = with_settings(
                example.settings(str(tmp_path / folder), 12, stop), compile="off"
            )
            assert train_as(settings, Caller(bigram(), loss, datasets)) == 0
    losses = read_losses(tmp_path / "uninterrupted")
    assert losses == read_losses(tmp_path / "resumed") and len(losses) == 12
    a, b = tensors(tmp_path / "uninterrupted", 12), tensors(tmp_path / "resumed", 12)
    assert a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)
    names = {n for n in a if "/" not in n}
    assert names == {"wte.weight", "lm_head.weight", "lm_head.bias"}
    assert a["wte.weight"].shape == a["lm_head.weight"].shape == (257, 64)
    assert losses[-1] < losses[0]


def test_first_weights_are_drawn_by_name(example, tmp_path):
    """Biases are 0, vectors 1, `proj` is divided by sqrt(2 x 2 layers); or the network draws."""
    _, loss, datasets = parts(example)
    made = []

    class Named(nn.Module):
        def __init__(self, m, vocab, padded, positions, options):
            super().__init__()
            self.wte = Embedding(padded, 64)
            self.any = Linear(64, 64)
            self.proj = Linear(64, 64, bias=False)
            self.scale = nn.Parameter(torch.full((64,), 7.0))
            made.append(self)

        def forward(self, tokens, where):
            x = self.wte(tokens)
            return (x + self.scale * self.proj(self.any(x))) @ self.wte.weight.T

    class Own(Named):
        def initialise(self, masters, m, vocab, seed):
            for name, p in masters:
                p.fill_(0.01 * len(name))

    for kind in (Named, Own):
        settings = example.settings(None, 1)  # one step, at rate 0: the warm-up begins
        assert train_as(settings, Caller(kind, loss, datasets)) == 0
    weights, own = ({n: p.detach() for n, p in network.named_parameters()} for network in made)
    assert (weights["any.bias"] == 0).all() and (weights["scale"] == 1).all()
    for name, std in (("wte.weight", 0.02), ("any.weight", 0.02), ("proj.weight", 0.01)):
        assert float(weights[name][:257].std()) == pytest.approx(std, rel=0.05)
    assert (weights["wte.weight"][257:] == 0).all()
    assert (own["scale"] == own["scale"][0]).all() and float(own["scale"][0]) == pytest.approx(0.05)
    assert float(own["any.bias"][0]) == pytest.approx(0.08)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_of_another_shape_is_refused(example, reduction):
    def loss(logits, batch):
        return nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch.labels.flatten(), reduction=reduction
        )

    with pytest.raises(UserError, match="one loss for each token"):
        train_as(example.settings(None, 2), Caller(None, loss, parts(example)[2]))


def test_a_loss_beside_our_z_loss_is_refused(example):
    settings = example.settings(None, 2)
    settings = changed(settings, "training", z_loss_coef=1e-4)
    with pytest.raises(UserError, match="z_loss_coef is a term of our own loss"):
        meshwright.train(settings, loss=example.z_loss, datasets=parts(example)[2])


def test_too_few_samples_are_refused(example):
    with pytest.raises(UserError, match="has 100 samples, the run needs 320"):
        train_as(example.settings(None, 20), Caller(None, None, {"train": example.Sums(100, 1)}))


def test_muon_without_layers_is_refused(example):
    settings = example.settings(None, 2)
    settings = changed(settings, "optimizer", optimizer="muon")
    with pytest.raises(UserError, match="but this model has none"):
        train_as(settings, Caller(bigram(), None, parts(example)[2]))


@pytest.mark.parametrize("setting", ["embedding_lr", "head_lr"])
def test_a_rate_for_tables_that_the_model_lacks_is_refused(setting):
    names = {"h.0.weight", "head.weight"}
    require_rated_tables(Optimizer(), names)
    require_rated_tables(
        Optimizer(embedding_lr=1e-3, head_lr=1e-3), {"wte.weight", "lm_head.weight"}
    )
    with pytest.raises(UserError, match="which this model lacks; leave it out"):
        require_rated_tables(Optimizer(**{setting: 1e-3}), names)


def test_custom_data_needs_no_files(tmp_path: Path) -> None:
    """Paths of token files in the settings are neither opened nor saved."""
    argv = [f for f in TINY_FLAGS if f != "--mock-data"] + [
        "--data-path",
        "none",
        "--save",
        str(tmp_path),
    ]
    config = flags.parse_settings(TrainConfig, argv, "test").config
    data = {"train": Mock(64, 24, 16, 1), "valid": Mock(64, 24, 16, 2), "test": None}
    assert train_as(config, Caller(datasets=data)) == 0
    assert open_step(tmp_path, 6).config["data_fingerprint"] == []
