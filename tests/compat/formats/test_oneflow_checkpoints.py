"""LiBai's and OneFlow-GPT's folders, written here by code that shares nothing with the reader."""

import os
import pickle
import re
import shutil
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers import error_of
from meshwright.__main__ import main
from meshwright.checkpoint import loading, native
from meshwright.checkpoint.huggingface import reader as huggingface
from meshwright.compat.formats.libai import reader as oneflow
from meshwright.config.schema import Model
from meshwright.model.gpt import GPT
from meshwright.model.positions import Positions

pytestmark = pytest.mark.whole

LAYERS, WIDTH, HEADS, FFN, VOCAB, PADDED, LENGTH = 2, 24, 3, 40, 50, 64, 12
# [in, out]
MATRICES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, FFN),
    "down": (FFN, WIDTH),
}


def make_weights():
    """Return a GPT's weights for x @ w + b; the columns of qkv are [head, 3, head_dim]."""
    random = np.random.default_rng(0)

    def draw(*shape):
        return random.normal(size=shape).astype(np.float32) * 0.3

    layers = [
        {name: (draw(*shape), draw(shape[1])) for name, shape in MATRICES.items()}
        | {name: (1 + draw(WIDTH), draw(WIDTH)) for name in ("norm1", "norm2")}
        for _ in range(LAYERS)
    ]
    wte = draw(PADDED, WIDTH)
    wte[VOCAB:] = 0
    return {
        "wte": wte,
        "wpe": draw(LENGTH, WIDTH),
        "final": (1 + draw(WIDTH), draw(WIDTH)),
        "layers": layers,
    }


@pytest.fixture(scope="module")
def weights():
    return make_weights()


def logits(weights, tokens):
    w = torch.from_numpy
    x = w(weights["wte"])[tokens] + w(weights["wpe"])[: tokens.shape[1]]
    batch, length = tokens.shape

    def norm(x, pair):
        return F.layer_norm(x, (WIDTH,), w(pair[0]), w(pair[1]), 1e-5)

    for layer in weights["layers"]:

        def linear(name, x, layer=layer):
            return x @ w(layer[name][0]) + w(layer[name][1])

        parts = linear("qkv", norm(x, layer["norm1"])).view(batch, length, HEADS, 3, WIDTH // HEADS)
        q, k, v = parts.permute(3, 0, 2, 1, 4)
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), float("-inf"))
        x = x + linear(
            "out", (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        )
        x = x + linear("down", F.gelu(linear("up", norm(x, layer["norm2"]))))
    return norm(x, weights["final"]) @ w(weights["wte"])[:VOCAB].T


def write_variable(folder, array, stride=False):
    folder.mkdir(parents=True)
    array = np.ascontiguousarray(array)
    (folder / "out").write_bytes(array.tobytes())
    dims = "".join(f"  dim: {n}\n" for n in array.shape)
    strides = "".join(f"  dim: {s // array.itemsize}\n" for s in array.strides)
    strides = f"stride {{\n{strides}}}\n" if stride else ""
    kind = {"float32": "kFloat", "float16": "kFloat16", "int64": "kInt64"}[str(array.dtype)]
    (folder / "meta").write_text(f"shape {{\n{dims}}}\n{strides}data_type: {kind}\n")


def write_oneflow_gpt(folder, weights):
    """Write a folder per variable, with Adam's moments and the counter."""

    def put(name, array):
        write_variable(folder / f"model-{name}", array)
        for moment in ("m", "v"):
            write_variable(folder / f"model-{name}-{moment}", np.zeros_like(array))

    put("wte", weights["wte"])
    put("wpe", weights["wpe"])
    pairs = {"layernorm_f": weights["final"]}
    names = {"qkv": "attn-c_attn", "out": "attn-c_proj", "up": "mlp-c_fc", "down": "mlp-c_proj"}
    names |= {"norm1": "layernorm_1", "norm2": "layernorm_2"}
    for i, layer in enumerate(weights["layers"]):
        pairs |= {f"h{i}-{theirs}": layer[name] for name, theirs in names.items()}
    for name, pair in pairs.items():
        for kind, array in zip(
            ("gamma", "beta") if "norm" in name else ("weight", "bias"), pair, strict=True
        ):
            put(f"{name}-{kind}", array)
    write_variable(folder / "System-Train-TrainStep-train", np.array([500], np.int64))
    (folder / "snapshot_done").touch()


def libai_state(weights, turned):
    """Return LiBai's state dict: [in, out] in the spring of 2022, [out, in] later."""
    out = {
        "GPT_model.embeddings.token_embeddings.weight": weights["wte"],
        "GPT_model.embeddings.position_embeddings.weight": weights["wpe"],
        "GPT_model.transformer.layernorm_f.weight": weights["final"][0],
        "GPT_model.transformer.layernorm_f.bias": weights["final"][1],
    }
    names = {
        "qkv": "self_attention.query_key_value",
        "out": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
    }
    names |= {
        "down": "mlp.dense_4h_to_h",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
    }
    for i, layer in enumerate(weights["layers"]):
        for name, theirs in names.items():
            weight, bias = layer[name]
            out[f"GPT_model.transformer.layers.{i}.{theirs}.weight"] = (
                weight.T if turned else weight
            )
            out[f"GPT_model.transformer.layers.{i}.{theirs}.bias"] = bias
    return out


@pytest.fixture
def flow_tensor(monkeypatch):
    """A class that pickles like oneflow.Tensor: made without arguments, then given its state."""

    class Tensor:
        pass

    Tensor.__module__, Tensor.__qualname__ = "oneflow", "Tensor"
    module = types.ModuleType("oneflow")
    module.Tensor = Tensor
    monkeypatch.setitem(sys.modules, "oneflow", module)

    def make(**state):
        tensor = Tensor()
        tensor.__dict__.update(state)
        return tensor

    return make


def write_libai(root, state, flow_tensor, form, yaml=True):
    """Write `model_0000499/model` in one of the forms of flow.save, with the files around it."""
    folder = root / "model_0000499"
    folder.mkdir(parents=True)
    if form == "folders":
        for name, array in state.items():
            write_variable(folder / "model" / name, array)
        (folder / "model" / "snapshot_done").touch()
    elif form == "pickle and folders":
        data = {}
        for i, (name, array) in enumerate(state.items()):
            write_variable(folder / "model" / f"global_tensor_{i}", array, stride=True)
            data[name] = flow_tensor(path=f"global_tensor_{i}")
        (folder / "model" / "pickled_data").write_bytes(
            pickle.dumps({"protocol_version": 1, "data": data})
        )
    else:
        data = {
            name: flow_tensor(data=np.ascontiguousarray(array), device="cpu")
            for name, array in state.items()
        }
        (folder / "model").write_bytes(
            pickle.dumps({"protocol_version": 1, "oneflow": None, "data": data})
        )
    (folder / "lr_scheduler").mkdir()
    (root / "last_checkpoint").write_text("model_0000499")
    if yaml:
        (root / "config.yaml").write_text(
            f"model:\n  _target_: libai.models.GPTForPreTraining\n  cfg: {{num_attention_heads: {HEADS}, "
            "layernorm_epsilon: 1.0e-05, output_dropout_prob: 0.05, embedding_dropout_prob: 0.1, "
            "initializer_range: 0.03, "
            "apply_residual_post_layernorm: false, bias_gelu_fusion: true}\n"
        )
    return folder


def assert_same_logits(source, weights):
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    source = source.of_vocabulary(VOCAB)
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_attention_heads": HEADS}
    model = GPT(Model(**still | source.config), VOCAB, VOCAB, LENGTH).eval()
    named = dict(model.named_parameters())
    assert named.keys() == source.tensors.keys()
    with torch.no_grad():
        source.fill({name: native.undivided(p.detach()) for name, p in named.items()})
        torch.testing.assert_close(
            model(tokens, Positions()), logits(weights, tokens), rtol=1e-5, atol=1e-5
        )


def test_oneflow_gpt(weights, tmp_path):
    write_oneflow_gpt(tmp_path / "iter500_snapshot", weights)
    source = oneflow.open_libai(tmp_path / "iter500_snapshot", heads=HEADS)
    assert source.kind == "OneFlow-GPT" and source.state == {} and source.vocab is None
    assert (source.config["num_layers"], source.config["ffn_hidden_size"]) == (LAYERS, FFN)
    assert_same_logits(source, weights)
    found = loading.open_checkpoint(tmp_path)
    assert found is not None and found.kind == "OneFlow-GPT" and found.tensors == source.tensors


def test_oneflow_gpt_is_converted(weights, tmp_path, capsys):
    write_oneflow_gpt(tmp_path / "run" / "iter500_snapshot", weights)
    words = [
        "convert",
        str(tmp_path / "run"),
        str(tmp_path / "hf"),
        "--to=huggingface",
        f"--true-vocab-size={VOCAB}",
    ]
    assert main(words) != 0 and "give --num-attention-heads" in capsys.readouterr().err
    assert main([*words, f"--num-attention-heads={HEADS}"]) == 0
    assert_same_logits(huggingface.open_huggingface(tmp_path / "hf"), weights)


@pytest.mark.parametrize(
    ("form", "turned"), [("folders", False), ("pickle and folders", True), ("pickle", True)]
)
def test_libai(form, turned, weights, flow_tensor, tmp_path):
    folder = write_libai(tmp_path, libai_state(weights, turned), flow_tensor, form)
    source = oneflow.open_libai(folder)
    assert (
        source.kind == "LiBai"
        and source.config["num_attention_heads"] == HEADS
        and not source.notes
    )
    assert (source.config["hidden_dropout"], source.config["init_method_std"]) == (0.05, 0.03)
    assert source.config["embedding_dropout"] == 0.1
    assert_same_logits(source, weights)
    found = loading.open_checkpoint(tmp_path)
    assert found is not None and found.kind == "LiBai"


def test_heads_come_from_the_flags_if_no_file_states_them(weights, flow_tensor, tmp_path):
    folder = write_libai(tmp_path, libai_state(weights, True), flow_tensor, "folders", yaml=False)
    assert not oneflow.open_libai(folder).config.keys() & {"num_attention_heads", "hidden_dropout"}
    assert oneflow.open_libai(folder, heads=HEADS).config["num_attention_heads"] == HEADS
    bad = "model: !!python/object:os.system {}"
    for text in (bad, "[" * 2_000, "model: 3", "model: {cfg: {num_attention_heads: x}}"):
        (tmp_path / "config.yaml").write_text(text)
        source = oneflow.open_libai(folder)
        assert "cannot be read" in source.notes[0] and "num_attention_heads" not in source.config


def test_damage_is_refused(weights, flow_tensor, tmp_path):
    write_oneflow_gpt(tmp_path / "good", weights)
    qkv = "model-h0-attn-c_attn-weight"

    def libai(state, form="pickle and folders", **changes):
        def make(folder):
            shutil.rmtree(folder)
            write_libai(folder.parent / "libai", state, flow_tensor, form).rename(folder)
            for name, content in changes.items():
                (folder / "model" / name).write_bytes(content)

        return make

    def link(folder):
        os.rename(folder / qkv / "out", folder.parent / "elsewhere")
        (folder / qkv / "out").symlink_to(folder.parent / "elsewhere")

    state, inner = libai_state(weights, True), "GPT_model.transformer."
    outside = {
        "protocol_version": 1,
        "data": {next(iter(state)): flow_tensor(path="../../elsewhere")},
    }
    for how, said in [
        (lambda f: shutil.rmtree(f / qkv), r"h.0.attn.qkv.weight: missing"),
        (lambda f: (f / qkv / "out").write_bytes(b"x"), "1 bytes, by meta it has"),
        (link, "not a plain file"),
        (
            libai(state | {f"{inner}layernorm_f.bias": np.ones(3, np.float32)}),
            "ln_f.bias: .3., expected .24.",
        ),
        (libai(state, pickled_data=pickle.dumps(outside)), "not a plain folder"),
        (libai(state, pickled_data=b"cos\nsystem\n(S'true'\ntR."), "os.system|posix.system"),
    ]:
        shutil.copytree(tmp_path / "good", tmp_path / "x")
        how(tmp_path / "x")
        assert re.search(said, error_of(lambda: oneflow.open_libai(tmp_path / "x")))
        for name in ("x", "libai"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
