"""The network: equal to transformers' GPT-2, to its plain attention, to itself under recomputation and in any precision."""

import dataclasses

import pytest
import torch

from conftest import TINY
from meshwright import config
from meshwright.model import counts
from meshwright.model.attention import Cache, Where
from meshwright.model.gpt import GPT, initialise
from meshwright.model.loss import loss_sum, token_losses
from meshwright.parallel.zero import ParameterStore

CPU = torch.device("cpu")


def make(m=TINY, vocab=61, padded=64, positions=16, dtype=torch.float32, seed=1, **more):
    with torch.device("meta"):
        model = GPT(m, vocab, padded, positions, **more)
    store = ParameterStore(model, config.Optimizer(), dtype, CPU)
    initialise(store.masters(), m, vocab, seed)
    store.publish_weights()
    return model, store


def tokens(b=3, t=16, vocab=61):
    return torch.randint(0, vocab, (b, t), generator=torch.Generator().manual_seed(0))


def test_parameter_count_of_gpt2_345m():
    m = config.Model(num_layers=24, hidden_size=1024, num_attention_heads=16)
    assert counts.parameters(m, 50304, 1024) == 354_871_296
    with torch.device("meta"):
        model = GPT(m, 50257, 50304, 1024)
    assert sum(p.numel() for p in model.parameters()) == 354_871_296


@pytest.mark.parametrize("untied", [False, True])
def test_counts_agree_with_the_model(untied):
    m = dataclasses.replace(TINY, ffn_hidden_size=48, kv_channels=4, untie_embeddings_and_output_weights=untied)
    model, _ = make(m)
    assert counts.parameters(m, 64, 16) == sum(p.numel() for p in model.parameters())


def test_flops_by_megatrons_formula():
    for layers, h, heads, seq, v in [(24, 1024, 16, 1024, 50304), (32, 2560, 32, 2048, 50304)]:
        m = config.Model(num_layers=layers, hidden_size=h, num_attention_heads=heads)
        want = 72 * layers * h * h * (1 + seq / (6 * h) + v / (12 * layers * h))
        assert counts.flops_per_token(m, v, seq) == pytest.approx(want)


def test_names_and_shapes_are_those_of_the_checkpoint():
    model, store = make()
    assert [n for n, _ in model.named_parameters() if ".0." in n or not n.startswith("h.")] == [
        "wte.weight", "wpe.weight",
        *(f"h.0.{m}.{x}" for m in ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc", "mlp.proj") for x in ("weight", "bias")),
        "ln_f.weight", "ln_f.bias",
    ]  # fmt: skip
    shapes = {n: s for n, (s, _, _) in store.named_state().items()}
    assert shapes["wte.weight"] == (61, 32) and shapes["h.1.attn.qkv.weight"] == (96, 32)
    assert shapes["wte.weight/exp_avg"] == (61, 32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_logits_and_gradients_equal_transformers_gpt2(gelu):
    """Random weights, biases and norms too, copied over by name; transformers stores linears transposed and [3, head]."""
    transformers = pytest.importorskip("transformers")
    m = dataclasses.replace(TINY, hidden_dropout=0.0, attention_dropout=0.0, bias_gelu_fusion=gelu == "tanh")
    ours, store = make(m, dtype=torch.float64)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            activation_function="gelu_new" if gelu == "tanh" else "gelu",
        )
    ).double()  # fmt: skip
    g = torch.Generator().manual_seed(3)
    state = theirs.state_dict()
    with torch.no_grad():
        for _, p in store.masters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.3)
        for name, p in ours.named_parameters():
            value = p.detach()[:61] if name == "wte.weight" else p.detach()
            where = "transformer." + name.replace("attn.qkv", "attn.c_attn").replace("attn.proj", "attn.c_proj")
            where = where.replace("mlp.fc", "mlp.c_fc").replace("mlp.proj", "mlp.c_proj")
            if "qkv" in name:  # rows [head, 3, d] -> [3, head, d]
                value = value.view(4, 3, 8, -1).transpose(0, 1).reshape(96, -1).squeeze(-1)
            state[where].copy_(value.T if value.ndim == 2 and ("attn" in name or "mlp" in name) else value)
        store.groups[0].master[61 * 32 : 64 * 32] = 0  # padded rows
    x = tokens()
    mine, want = ours(x, Where()), theirs(x).logits
    torch.testing.assert_close(mine[..., :61], want, rtol=1e-10, atol=1e-10)
    assert (mine[..., 61:] == float("-inf")).all()
    (loss_sum(mine[:, :-1], x[:, 1:], None) / x[:, 1:].numel()).backward()
    (loss_sum(want[:, :-1], x[:, 1:], None) / x[:, 1:].numel()).backward()
    torch.testing.assert_close(ours.wte.weight.grad[:61], theirs.transformer.wte.weight.grad, rtol=1e-9, atol=1e-12)
    assert (ours.wte.weight.grad[61:] == 0).all()
    torch.testing.assert_close(
        ours.h["0"].mlp.fc.weight.grad.T, theirs.transformer.h[0].mlp.c_fc.weight.grad, rtol=1e-9, atol=1e-12
    )


def test_padding_changes_nothing():
    narrow, _ = make(padded=61)
    wide, _ = make(padded=128)
    x = tokens()
    torch.testing.assert_close(narrow(x, Where()), wide(x, Where())[..., :61])


@pytest.mark.parametrize("impl", ["sdpa", "auto"])
def test_fused_attention_equals_reference(impl):
    m = dataclasses.replace(TINY, hidden_dropout=0.0, attention_dropout=0.0)
    a, _ = make(dataclasses.replace(m, attention_impl=impl))
    b, _ = make(dataclasses.replace(m, attention_impl="reference"))
    x = tokens()
    torch.testing.assert_close(a(x, Where()), b(x, Where()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_causal(impl):
    """A later token changes no earlier logit."""
    model, _ = make(dataclasses.replace(TINY, attention_impl=impl))
    model.eval()
    x = tokens()
    y = x.clone()
    y[:, 9] = (y[:, 9] + 1) % 61
    assert torch.equal(model(x, Where())[:, :9], model(y, Where())[:, :9])
    assert not torch.equal(model(x, Where())[:, 9], model(y, Where())[:, 9])


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_cache_equals_whole(impl):
    """Token by token, and in chunks, with the keys and values kept."""
    model, _ = make(dataclasses.replace(TINY, attention_impl=impl))
    model.eval()
    x = tokens()
    whole = model(x, Where())
    where = Where(caches={i: Cache(3, 16) for i in range(2)})
    parts = []
    for a, b in ((0, 5), (5, 6), (6, 11), (11, 16)):
        where.positions = torch.arange(a, b)
        parts.append(model(x[:, a:b], where))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_recomputation_changes_nothing(impl):
    """Gradients are bit-equal with dropout on, although no random state is saved."""
    grads = []
    for recompute in (False, True):
        model, store = make(dataclasses.replace(TINY, attention_impl=impl), recompute=recompute)
        model.train()
        loss_sum(model(tokens(), Where(torch.arange(3), None, 9, 0)), tokens(), None).backward()
        grads.append([g.gradients.clone() for g in store.groups])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert grads[0][0].abs().sum() > 0


def test_dropout_is_on_in_training_only():
    model, _ = make()
    x, where = tokens(), lambda: Where(torch.arange(3), None, 9, 0)
    assert not torch.equal(model.train()(x, where()), model.eval()(x, where()))
    assert torch.equal(model.train()(x, where()), model.train()(x, where()))
    assert not torch.equal(model(x, where()), model(x, Where(torch.arange(3) + 1, None, 9, 1)))


def test_dropout_does_not_depend_on_the_micro_batch():
    """With the reference attention, the CPU's choice, a sample's logits are its own."""
    model, _ = make(dtype=torch.float64)
    model.train()
    x = tokens()
    together = model(x, Where(torch.arange(5, 8), None, 9, 5))
    alone = model(x[1:2], Where(torch.tensor([6]), None, 9, 6))
    torch.testing.assert_close(together[1:2], alone, rtol=1e-12, atol=1e-12)


def test_initial_weights_depend_on_name_and_seed_only():
    a, _ = make()
    b, _ = make(dataclasses.replace(TINY, num_layers=2), padded=61, dtype=torch.float64)
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        n = min(len(p), len(q))
        assert torch.equal(p[:n].double(), q[:n]), name
    assert a.wte.weight[:61].std().item() == pytest.approx(0.02, rel=0.1)
    assert a.h["0"].mlp.proj.weight.std().item() == pytest.approx(0.01, rel=0.1)  # 0.02 / sqrt(2 x 2 layers)
    assert not torch.equal(make(seed=2)[0].wte.weight, a.wte.weight)
    assert (a.wte.weight[61:] == 0).all()


def test_initial_weights_are_golden():
    """Part of the promise that a seed names a run: these values must not change between versions."""
    model, _ = make()
    assert model.wte.weight[0, :3].tolist() == pytest.approx(GOLDEN, rel=1e-6)


GOLDEN = [0.004147826693952084, -0.012225081212818623, 0.009814441204071045]


def test_loss_is_float32_cross_entropy():
    logits = torch.randn(2, 5, 61, dtype=torch.bfloat16)
    labels = tokens(2, 5)
    want = torch.nn.functional.cross_entropy(logits.float().view(-1, 61), labels.view(-1), reduction="sum")
    torch.testing.assert_close(loss_sum(logits, labels, None), want)
    mask = torch.zeros(2, 5)
    mask[0, :2] = 1
    torch.testing.assert_close(loss_sum(logits, labels, mask), token_losses(logits, labels)[0, :2].sum())
