"""litgpt's folders, written from transformers' networks, whose logits they must give."""

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

PADDED, LENGTH, WIDTH, HEADS, HEAD, FFN = 64, 16, 32, 4, 8, 40
SIZES = {
    "vocab_size": PADDED,
    "max_position_embeddings": LENGTH,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": HEADS}
# Settings of every network, and of the kinds.
COMMON = {
    "name": "mine",
    "hf_config": {"name": "mine", "org": "me"},
    "block_size": LENGTH,
    "n_layer": 2,
}
COMMON |= {
    "n_embd": WIDTH,
    "vocab_size": 50,
    "padding_multiple": 64,
    "padded_vocab_size": PADDED,
    "head_size": HEAD,
}
COMMON |= {
    "n_head": HEADS,
    "intermediate_size": FFN,
    "norm_eps": 1e-5,
    "rope_base": 10000,
    "n_expert": 0,
}
COMMON |= {
    "gelu_approximate": "none",
    "lm_head_bias": False,
    "norm_1": True,
    "rope_adjustments": None,
}
COMMON |= {
    "scale_embeddings": False,
    "sliding_window_size": None,
    "rope_condense_ratio": 1,
    "attn_bias": False,
}
COMMON |= {"final_logit_softcapping": None, "norm_qk": False, "norm_qk_type": "default"}
NEOX = COMMON | {
    "norm_class_name": "LayerNorm",
    "mlp_class_name": "GptNeoxMLP",
    "bias": True,
    "n_query_groups": HEADS,
}
NEOX |= {"parallel_residual": True, "rotary_percentage": 0.25}
LLAMA = COMMON | {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "bias": False,
    "n_query_groups": 2,
}
LLAMA |= {"parallel_residual": False, "rotary_percentage": 1.0}
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = LLAMA | {"rope_adjustments": FACTORS | {"original_max_seq_len": 8}, "rope_base": 100}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "original_max_position_embeddings": 8,
    **FACTORS,
}
KINDS = {
    "pythia": ("GPTNeoX", {}, NEOX),
    "llama": ("Llama", {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}, LLAMA),
    "llama3": (
        "Llama",
        {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3},
        SCALED,
    ),
    "windows in turn": (
        "Ministral",
        {
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50},
        }
        | {
            "head_dim": HEAD,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        LLAMA | {"sliding_window_size": 4, "sliding_window_indices": [1, 0, 1], "rope_base": 50},
    ),
    "qwen3": (
        "Qwen3",
        {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "head_dim": HEAD},
        LLAMA | {"norm_qk": True},
    ),
}
NAMES = {
    "gpt_neox.": "transformer.",
    "model.": "transformer.",
    "layers.": "h.",
    "embed_in": "wte",
    "embed_tokens": "wte",
}
NAMES |= {
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "final_layer_norm": "ln_f",
}
NAMES |= {
    "transformer.norm.": "transformer.ln_f.",
    "attention.dense": "attn.proj",
    "self_attn.o_proj": "attn.proj",
}
NAMES |= {
    "mlp.dense_h_to_4h": "mlp.fc",
    "mlp.dense_4h_to_h": "mlp.proj",
    "mlp.gate_proj": "mlp.fc_1",
}
NAMES |= {"mlp.up_proj": "mlp.fc_2", "mlp.down_proj": "mlp.proj", "self_attn.q_norm": "attn.norm_q"}
NAMES |= {
    "self_attn.k_norm": "attn.norm_k",
    "attention.query_key_value": "attn.attn",
    "embed_out": "lm_head",
}


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
        for theirs, litgpts in NAMES.items():
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
    down = "transformer.h.0.mlp.proj.weight"
    for changes, words in (
        ({"n_expert": 8}, "n_expert is 8"),
        (
            {"rope_adjustments": {"low_freq_factor": 8.0}},
            "rope_adjustments is {'low_freq_factor': 8.0}",
        ),
        (
            {"sliding_window_size": 8, "sliding_window_indices": [1]},
            "sliding_window_indices is [1]; it must be a 0 or",
        ),
        ({"norm_1": False}, "norm_1 is False"),
        ({"mlp_class_name": "LLaMAMoE"}, "mlp_class_name is LLaMAMoE"),
        ({"n_query_groups": 3}, "n_head 4 is not a multiple of n_query_groups 3"),
        ({"n_layer": "2"}, "model_config.yaml: n_layer is '2'; it must be an integer"),
        ({"intermediate_size": 48}, f"{down} is [32, 40], by model_config.yaml it is [32, 48]"),
    ):
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
