"""litgpt's folders, written from transformers' networks, whose logits they must give."""

from pathlib import Path

import pytest
import torch
import yaml
from foreign import read_tensors

from helpers import error_of
from meshwright.__main__ import main
from meshwright.checkpoint import loading, native
from meshwright.config.schema import Model
from meshwright.model.gpt import GPT
from meshwright.model.positions import Positions

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.whole

PADDED, LENGTH, HEADS, HEAD = 64, 16, 4, 8
SIZES = dict(
    vocab_size=PADDED,
    max_position_embeddings=LENGTH,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
)
TABLE = yaml.safe_load(Path(__file__).with_name("litgpt.yaml").read_text())
KINDS = TABLE["networks"]
NEOX = KINDS["pythia"][2]
# Theirs, each with litgpt's in its place.
NAMES = """
    gpt_neox. transformer.  model. transformer.  layers. h.  embed_in wte  embed_tokens wte
    input_layernorm norm_1  post_attention_layernorm norm_2  final_layer_norm ln_f
    transformer.norm. transformer.ln_f.  attention.dense attn.proj  self_attn.o_proj attn.proj
    mlp.dense_h_to_4h mlp.fc  mlp.dense_4h_to_h mlp.proj  mlp.gate_proj mlp.fc_1
    mlp.up_proj mlp.fc_2  mlp.down_proj mlp.proj  self_attn.q_norm attn.norm_q
    self_attn.k_norm attn.norm_k  attention.query_key_value attn.attn  embed_out lm_head
""".split()


def network(kind):
    architecture, changes, _ = KINDS[kind]
    config = getattr(transformers, f"{architecture}Config")(
        **SIZES | changes, attn_implementation="eager"
    )
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                torch.randn(p.shape, generator=random) * (0.2 if p.ndim > 1 else 0.5)
                + (p.ndim == 1)
            )
    return model


def litgpts(model, older=False):
    """Return the tensors as litgpt has them; older versions keep rows of qkv by group."""
    out = {}
    for name, tensor in model.state_dict().items():
        for theirs, litgpts in zip(NAMES[::2], NAMES[1::2], strict=True):
            name = name.replace(theirs, litgpts)
        out[name] = tensor
    for name in [name for name in out if "q_proj" in name]:
        q, k, v = (out.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv")
        by_group = zip(q.chunk(2), k.chunk(2), v.chunk(2), strict=True)
        out[name.replace("self_attn.q_proj", "attn.attn")] = torch.cat(
            [torch.cat(parts) for parts in by_group]
        )
    for name in [name for name in out if ".attn.attn." in name and not older]:
        tensor, groups = out.pop(name), getattr(model.config, "num_key_value_heads", HEADS)
        parts = tensor.unflatten(0, (groups, -1)).split([HEADS // groups * HEAD, HEAD, HEAD], 1)
        out[name.replace("attn.attn", "attn.qkv")] = torch.cat(
            [part.flatten(0, 1) for part in parts]
        )
    return out


def save(folder, tree, config):
    folder.mkdir(exist_ok=True)
    torch.save(tree, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.dump(config))
    return folder


@pytest.mark.parametrize(
    ("kind", "older"), [*((kind, False) for kind in KINDS), ("pythia", True), ("llama", True)]
)
@torch.no_grad()
def test_logits(kind, older, tmp_path):
    model = network(kind)
    folder = save(tmp_path / "out", litgpts(model, older), KINDS[kind][2])
    for path in (folder, folder / "lit_model.pth"):
        source = loading.require_checkpoint(path)
        assert (source.kind, source.vocab, source.folder, source.notes) == (
            "litgpt",
            PADDED,
            folder,
            [],
        )
    ours = GPT(Model(**source.config), PADDED, PADDED, LENGTH).eval()
    source.fill({name: native.undivided(p.detach()) for name, p in ours.named_parameters()})
    ids = torch.randint(PADDED, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    want = model(ids).logits
    torch.testing.assert_close(
        ours(ids, Positions()), want, rtol=1e-5, atol=1e-5 * float(want.abs().max())
    )


def test_commands_read_it(tmp_path, capsys):
    """With the optimizer's state of a training, which is not read, and a compiled model's names."""
    tensors = {f"_orig_mod.{name}": tensor for name, tensor in litgpts(network("pythia")).items()}
    path = str(save(tmp_path / "out", {"model": tensors, "optimizer": {}, "iter_num": 4}, NEOX))
    read = f"--device=cpu --tokenizer-type=NullTokenizer --vocab-size={PADDED - 1}".split()
    train = [
        *read,
        *"--mock-data --micro-batch-size=1 --train-iters=2 --lr=1e-3 --eval-iters=0".split(),
    ]
    for command in (
        [
            "train",
            *train,
            "--seq-length",
            str(LENGTH),
            "--load",
            path,
            "--finetune",
            "--save",
            str(tmp_path / "run"),
        ],
        ["generate", path, *read, "--prompt", "1 2 3", "--max-new-tokens=2"],
        ["convert", path, str(tmp_path / "hf"), "--to", "huggingface"],
    ):
        assert main(command) == 0, command
    assert "only the weights of lit_model.pth are read" in capsys.readouterr().out
    again, source = loading.require_checkpoint(tmp_path / "hf"), loading.require_checkpoint(path)
    assert all(
        torch.equal(read_tensors(again)[name], tensor)
        for name, tensor in read_tensors(source).items()
    )


def test_what_is_refused(tmp_path):
    tensors = litgpts(network("pythia"))
    for changes, words in TABLE["refused"]:
        folder = save(tmp_path / "out", tensors, NEOX | changes)
        said = error_of(lambda folder=folder: loading.open_checkpoint(folder))
        assert words in said and str(folder) in said, said
    for text, words in (("[1", "not YAML"), ("3", "not a table of settings")):
        (folder / "model_config.yaml").write_text(text)
        assert words in error_of(lambda: loading.open_checkpoint(folder))
    (folder / "model_config.yaml").unlink()
    assert "model_config.yaml does not exist" in error_of(lambda: loading.open_checkpoint(folder))
    for tree in ([3], {"model": [3]}, {"model": {"transformer.wte.weight": 3}}):
        save(folder, tree, NEOX)
        assert str(folder) in error_of(lambda: loading.open_checkpoint(folder))
    (folder / "lit_model.pth").unlink()
    (folder / "lit_model.pth").mkdir()
    assert "is in parts, one a rank" in error_of(lambda: loading.open_checkpoint(folder))
