"""µP and CompleteP: factors by hand, and training as with the papers' multipliers."""

import dataclasses
import math

import pytest
import torch
from torch.func import functional_call

from helpers import TINY_FLAGS, open_step
from meshwright.__main__ import main
from meshwright.base.errors import BAD_DATA
from meshwright.config import checks, flags
from meshwright.config.schema import Model, Optimizer, TrainConfig
from meshwright.model.gpt import GPT, initialise
from meshwright.model.loss import loss_sum, token_losses
from meshwright.model.positions import Positions
from meshwright.optim.rule_table import param_group_of
from stores import VOCAB, kinds, make, take_step, tokens

# Width 4 times and depth 3 times that of the base.
GROWN = Model(
    num_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    mup_base_hidden_size=16,
    mup_base_num_layers=1,
)
UNTIED = dataclasses.replace(GROWN, untie_embeddings_and_output_weights=True)

# Parameter -> rate and decay by AdamW, rate and decay by Muon.
TABLE = {
    "wte.weight": (1, 1, 1, 1),
    "wpe.weight": (1, 1, 1, 1),
    "ln_emb.weight": (1, 0, 1, 0),
    "h.2.ln_1.weight": (1, 0, 1, 0),
    "h.0.attn.qkv.weight": (1 / 4, 4, 1 / 2, 2),
    "h.0.attn.qkv.bias": (1, 0, 1, 0),
    "h.0.attn.ln_q.weight": (1, 0, 1, 0),
    "h.0.attn.proj.weight": (1 / 12, 12, 1 / 6, 6),
    "h.0.attn.proj.bias": (1 / 3, 0, 1 / 3, 0),
    "h.1.mlp.fc.weight": (1 / 4, 4, 1 / 2, 2),
    "h.1.mlp.fc.bias": (1, 0, 1, 0),
    "h.1.mlp.proj.weight": (1 / 12, 12, 1 / 6, 6),
    "h.1.mlp.proj.bias": (1 / 3, 0, 1 / 3, 0),
}
TIED_END = {"ln_f.weight": (1 / 4, 0, 1 / 4, 0), "ln_f.bias": (1 / 4, 0, 1 / 4, 0)}
UNTIED_END = {"ln_f.weight": (1, 0, 1, 0), "lm_head.weight": (1 / 4, 4, 1 / 4, 4)}


@pytest.mark.parametrize(
    ("m", "end"), [(GROWN, TIED_END), (UNTIED, UNTIED_END)], ids=["tied", "untied"]
)
def test_param_groups(m, end):
    for name, want in (TABLE | end).items():
        dimensions = 1 if name.endswith("bias") or ".ln_" in f".{name}" else 2
        for kind, expected in (("adamw", want[:2]), ("lion", want[:2]), ("muon", want[2:])):
            assert param_group_of(Optimizer(optimizer=kind), m, name, dimensions)[
                1:
            ] == pytest.approx(expected), name


def test_every_parameter_is_treated_so_in_a_store():
    _, store = make(UNTIED, model=UNTIED)
    found = {name: param_group[1:] for name, param_group in kinds(store).items()}
    for name in found.keys() & (TABLE | UNTIED_END).keys():
        assert found[name] == pytest.approx((TABLE | UNTIED_END)[name][:2])
    assert len(set(found.values())) == 5


def drawn(m):
    with torch.device("meta"):
        model = GPT(m, VOCAB, VOCAB, 16)
    values = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    initialise(values.items(), m, VOCAB, 1)
    return values


@pytest.mark.parametrize("m", [GROWN, UNTIED, dataclasses.replace(GROWN, apply_layernorm_1p=True)])
def test_initial_values(m):
    """They have the base's spread, times the multipliers that the papers leave in the network."""
    for name, x in drawn(m).items():
        module = name.split(".")[-2]
        if name.endswith("bias"):
            assert not x.any()
        elif module.startswith("ln_"):
            want = 1 / 4 if module == "ln_f" and not m.untie_embeddings_and_output_weights else 1.0
            assert (x == want - m.apply_layernorm_1p).all(), name
        else:
            hidden = 1 / 2 / 3 / math.sqrt(2) if module == "proj" else 1 / 2
            std = {"wte": 1, "wpe": 1, "lm_head": 1 / 4}.get(module, hidden)
            assert x.std().item() == pytest.approx(0.02 * std, rel=0.05), name
    at_base = dataclasses.replace(m, mup_base_hidden_size=64, mup_base_num_layers=3)
    plain = dataclasses.replace(m, mup_base_hidden_size=None, mup_base_num_layers=None)
    assert all(torch.equal(x, drawn(plain)[name]) for name, x in drawn(at_base).items())


@pytest.mark.parametrize("m", [GROWN, UNTIED], ids=["tied", "untied"])
def test_training_is_that_with_multipliers_in_the_network(m):
    """AdamW with CompleteP's rates, decays and forward multipliers gives the same network."""
    width, depth, lr, wd = 4, 3, 3e-3, 0.1
    end = "lm_head" if m.untie_embeddings_and_output_weights else "ln_f"
    multipliers = {"proj": 1 / depth, end: 1 / width}
    model, store = make(m, Optimizer(clip_grad=0.0, adam_eps=1e-14), torch.float64, model=m)
    with torch.device("meta"):
        plain = GPT(m, VOCAB, 64, 16)
    factor = {
        name: multipliers.get(name.split(".")[-2], 1.0) for name, _ in plain.named_parameters()
    }
    own = {
        name: (p.detach() / factor[name]).requires_grad_() for name, p in model.named_parameters()
    }
    first, second = ({name: torch.zeros_like(x) for name, x in own.items()} for _ in range(2))
    for step in range(3):
        batch = (tokens() + step) % VOCAB
        take_step(model, store, [batch], lr, wd)
        weights = {name: x * factor[name] for name, x in own.items()}
        logits = functional_call(plain.eval(), weights, (batch, Positions()))
        loss = loss_sum(token_losses(logits, batch, VOCAB), None) / 50
        for (name, x), g in zip(
            own.items(), torch.autograd.grad(loss, list(own.values())), strict=True
        ):
            is_hidden = name.startswith("h.") and x.ndim > 1
            rate, decay = (lr / width, wd * width) if is_hidden else (lr, wd * (x.ndim > 1))
            first[name].lerp_(g, 0.1)
            second[name].lerp_(g * g, 0.001)
            root = (second[name] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-14
            with torch.no_grad():
                x.mul_(1 - rate * decay).sub_(rate * first[name] / (1 - 0.9 ** (step + 1)) / root)
    for name, p in model.named_parameters():
        if not name.endswith("qkv.bias"):  # the gradient of a key's bias is 0 but for rounding
            assert (p.detach() - own[name].detach() * factor[name]).abs().max() < 1e-4 * lr, name


def parse(words):
    return flags.parse_settings(
        TrainConfig, [*TINY_FLAGS, *words.split()], "meshwright test", check=False
    ).config


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mup-base-hidden-size 16 --optimizer sgd", "no factors for --optimizer sgd"),
        ("--mup-base-num-layers 1 --init-method-xavier-uniform", "spread of initial weights"),
        (
            "--mup-base-num-layers 1 --apply-residual-connection-post-layernorm",
            "adds to the residual stream",
        ),
        (
            "--mup-base-hidden-size 16 --optimizer muon --muon-split-qkv groups",
            "do not grow with the width",
        ),
        ("--mup-base-hidden-size 16 --apply-layernorm-1p --bf16", "in 16 bits too coarse"),
        (
            "--mup-base-hidden-size 16 --ckpt-format torch --save x",
            "has no place for --mup-base-hidden-size",
        ),
    ],
)
def test_what_cannot_work_is_refused(words, said):
    problems = [*map(str, checks.problems(parse(words)))]
    assert len(problems) == 1 and said in problems[0], problems


def test_a_resumed_run_has_the_same_base(tmp_path, capsys, monkeypatch):
    """It takes over what the checkpoint says; another base is for --finetune."""
    monkeypatch.setattr("meshwright.training.run.write_report", lambda folder: None)
    run = [
        "train",
        *TINY_FLAGS,
        "--eval-iters=0",
        "--lr-decay-iters=9",
        "--save",
        str(tmp_path / "run"),
    ]
    assert main([*run, "--mup-base-hidden-size=8", "--train-iters=2"]) == 0
    assert main([*run, "--load", str(tmp_path / "run"), "--train-iters=3"]) == 0
    assert open_step(tmp_path / "run", 3).config["mup_base_hidden_size"] == 8
    capsys.readouterr()
    other = ["--mup-base-hidden-size=16", "--load", str(tmp_path / "run"), "--train-iters=4"]
    assert main([*run, *other]) == BAD_DATA
    assert "--mup-base-hidden-size 16, the checkpoint has 8" in capsys.readouterr().err
    assert main([*run[:-1], str(tmp_path / "tuned"), *other, "--finetune"]) == 0
    assert open_step(tmp_path / "tuned", 4).config["mup_base_hidden_size"] == 16
