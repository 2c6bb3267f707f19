"""Combinations of network options against the reference, with a cache, recomputed, and counted."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import reference_gpt
from meshwright.config.schema import Model
from meshwright.kernels import dropout
from meshwright.model import attention, counts, positions
from meshwright.model.cache import Cache, ContinuedTexts
from meshwright.model.gpt import GPT, Options
from meshwright.model.loss import loss_sum, token_losses
from meshwright.model.positions import Positions

VOCAB, PADDED, POSITIONS, B, T, SEED = 13, 16, 10, 2, 8, 2**40 + 7

LLAMA3 = {
    "rope_scaling": "llama3",
    "rope_scaling_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = LLAMA3 | {
    "rope_scaling": "yarn",
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "rope_attention_factor": 1.25,
}
LLAMA3 |= {"rope_low_freq_factor": 0.5, "rope_high_freq_factor": 2.0}
WORDS = {
    "rope": {"position_embedding_type": "rope"},
    "rotary": {"position_embedding_type": "rotary"},
    "half": {"rotary_percent": 0.5},
    "base": {"rotary_base": 50.0},
    "linear": {"rope_scaling": "linear", "rope_scaling_factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "alibi": {"position_embedding_type": "alibi"},
    "nopos": {"position_embedding_type": "none"},
    "6heads": {"hidden_size": 24, "num_attention_heads": 6},
    "12heads": {"hidden_size": 24, "num_attention_heads": 12},
    "gqa": {"num_query_groups": 2},
    "mqa": {"group_query_attention": True},
    "wide": {"kv_channels": 12},
    "narrow": {"kv_channels": 4},
    "ffn": {"ffn_hidden_size": 20},
    "swiglu": {"swiglu": True},
    "glu-swiglu": {"glu_activation": "swiglu"},
    "geglu": {"glu_activation": "geglu"},
    "reglu": {"glu_activation": "reglu"},
    "liglu": {"glu_activation": "liglu"},
    "relu2": {"squared_relu": True},
    "erf": {"bias_gelu_fusion": False},
    "openai": {"bias_gelu_fusion": True},
    "rms": {"normalization": "RMSNorm"},
    "normbias": {"layernorm_bias": False},
    "1p": {"apply_layernorm_1p": True},
    "eps": {"layernorm_epsilon": 0.3},
    "embdrop": {"embedding_dropout": 0.4},
    "embdrop-only": {"embedding_dropout": 0.4, "hidden_dropout": 0.0},
    "qknorm": {"qk_layernorm": True},
    "embnorm": {"embed_layernorm": True},
    "postnorm": {"apply_residual_connection_post_layernorm": True},
    "parallel": {"use_parallel_residual": True},
    "nobias": {"add_bias_linear": False},
    "qkvbias": {"add_bias_linear": False, "add_qkv_bias": True},
    "untied": {"untie_embeddings_and_output_weights": True},
    "3layers": {"num_layers": 3},
    "capped": {"final_logit_softcapping": 1.5},
    "window": {"window_size": "2,0"},
    "alternate": {"window_size": "3", "window_attn_skip_freq": "2"},
    "listed": {"window_size": "1,0", "window_attn_skip_freq": "[0]+[1]*2"},
    "wider": {"window_size": "7,0"},
}

TABLE = [
    "gpt2",
    "rope half erf untied parallel",  # GPT-NeoX
    "gqa swiglu rms parallel embdrop",
    "erf nobias normbias",  # nanoGPT
    "rope half qknorm embnorm normbias 1p",
    "erf untied embnorm embdrop capped wider",
    "openai postnorm wide embdrop-only",
    "relu2 1p nobias eps",
    "rope rms swiglu nobias untied gqa",  # Llama
    "rope rms geglu nobias wide gqa capped linear alternate",  # Gemma 2, but for its norms
    "rope rms swiglu nobias untied gqa window",  # Mistral
    "rope half qknorm liglu mqa yarn",
    "rope base rms eps 1p qkvbias geglu 3layers llama3 listed",
    "rotary wide half gqa reglu postnorm linear",
    "rotary base qknorm rms relu2 embnorm yarn",
    "rope 6heads gqa erf 1p qkvbias llama3",
    "alibi embnorm erf",
    "alibi 6heads gqa glu-swiglu nobias window",
    "alibi 12heads rms swiglu untied",
    "alibi 12heads mqa postnorm eps qknorm alternate",
    "alibi narrow relu2 qkvbias 1p",
    "nopos reglu 1p qknorm",
    "nopos mqa geglu rms qkvbias ffn",
    "nopos 6heads openai untied 3layers listed",
    "gqa liglu ffn embnorm rms eps embdrop",
    "mqa narrow openai qknorm nobias wider",
    "wide swiglu qkvbias postnorm 1p embdrop-only",
    "glu-swiglu narrow gqa untied eps",
    "rope half rms qknorm embnorm postnorm untied gqa wide glu-swiglu 3layers 1p",
    "alibi postnorm rms embnorm qknorm mqa reglu untied qkvbias",
]

# Fields that shape nothing here: sizes that every model has, and what is tested on its own.
ELSEWHERE = """num_layers hidden_size num_attention_heads max_position_embeddings make_vocab_size_divisible_by
pad_vocab_size_to init_method_std init_method_xavier_uniform zero_init_projections hidden_dropout attention_dropout
attention_impl mup_base_hidden_size mup_base_num_layers num_experts""".split()

every = pytest.mark.parametrize("words", TABLE)
# Combinations with one way of attention each, in turn.
turns = pytest.mark.parametrize(
    ("words", "impl"), list(zip(TABLE, ["sdpa", "reference"] * len(TABLE), strict=False))
)


@functools.cache
def config_of(words: str) -> Model:
    fields = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "hidden_dropout": 0.2}
    for word in words.split():
        fields |= WORDS.get(word, {})
    return Model(**fields, attention_dropout=0.2, attention_impl="reference")


def build(m: Model, options: Options | None = None) -> GPT:
    """Return a model with random weights: biases of 0 and norms of 1 would hide mistakes."""
    model = GPT(m, VOCAB, PADDED, POSITIONS, options=options).double()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.3, generator=random)
            if ".ln_" in f".{name}" and name.endswith("weight") and not m.apply_layernorm_1p:
                p += 1
    return model


def weights(model: GPT) -> reference_gpt.Weights:
    """Return weights by name, without the padding of tables."""
    tables = ("wte.weight", "lm_head.weight")
    return {
        n: p.detach().numpy()[: VOCAB if n in tables else None] for n, p in model.named_parameters()
    }


@functools.cache
def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    tokens, labels = random.integers(0, VOCAB, (2, B, T))
    mask = np.ones((B, T))
    mask[0, 2] = mask[1, 5:7] = 0
    return tokens, labels, mask


# Positions documents end: in sample 0 after 3 tokens, in sample 1 after 1 and 5.
DOCUMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2, 2]])
RESTARTED = np.array([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 0, 1, 2]])
PLACES = {
    "one document": {},
    "documents": {"doc_ids": DOCUMENTS},
    "restarted": {"position_ids": RESTARTED},
    "both": {"doc_ids": DOCUMENTS, "position_ids": RESTARTED},
}


def where_of(places: dict[str, np.ndarray], **more) -> Positions:
    ids = {k: torch.from_numpy(v) for k, v in places.items()}
    return Positions(documents=ids.get("doc_ids"), position_ids=ids.get("position_ids"), **more)


def allowed(m: Model, places: str) -> bool:
    """Return whether ALiBi's distance is defined: not for restarts within a document."""
    return m.position != "alibi" or places != "restarted"


def dropout_factors(m: Model, samples: torch.Tensor) -> dict[int, np.ndarray]:
    """Return the factors of the documented masks, for the reference's `drop`."""
    columns, heads = torch.arange(T), torch.arange(m.num_attention_heads)
    hidden = dropout.rows(SEED, samples[:, None], columns)
    scores = dropout.rows(SEED, samples[:, None, None], heads[:, None], columns)
    out = {}
    for site in range(2 * m.num_layers + 1):
        p = m.hidden_dropout if site or m.embedding_dropout is None else m.embedding_dropout
        out[site] = dropout.keep(dropout.at_site(hidden, site), m.hidden_size, p).double() / (1 - p)
    for i in range(m.num_layers):
        out[~i] = dropout.keep(dropout.at_site(scores, ~i), T, m.attention_dropout).double() / 0.8
    return {site: x.numpy() for site, x in out.items()}


def mean_loss(model: GPT, where: Positions) -> torch.Tensor:
    tokens, labels, mask = map(torch.from_numpy, batch())
    return loss_sum(token_losses(model(tokens, where), labels, VOCAB), mask) / mask.sum()


def training_loss(model: GPT, places: str = "one document") -> torch.Tensor:
    return mean_loss(
        model.train(),
        where_of(PLACES[places], samples=torch.arange(3, 3 + B), seed=SEED, first_sample=3),
    )


def test_every_option_meets_others():
    """Each field and word appears in at least two different combinations."""
    assert len(TABLE) == len(set(TABLE)) >= 20
    default = Model()
    for f in dataclasses.fields(Model):
        if f.name in ELSEWHERE:
            continue
        users = [
            words
            for words in TABLE
            if getattr(config_of(words), f.name) != getattr(default, f.name)
        ]
        assert len(users) >= 2, f"--{f.name} is in {users} only"
    for word in WORDS:
        company = [frozenset(words.split()) - {word} for words in TABLE if word in words.split()]
        assert len(set(company)) >= 2, f"{word} is in {len(company)} combinations"
    activations = "gelu-tanh gelu squared-relu swiglu geglu reglu liglu".split()
    assert {config_of(words).activation for words in TABLE} == set(activations)


def test_slopes_of_alibi():
    """The example of Press et al. for 8 heads, and four more by their rule."""
    twelve = [*(2.0**-i for i in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert [reference_gpt.slope_of(i, 12) for i in range(12)] == pytest.approx(twelve)
    assert positions.alibi_slopes(12, torch.device("cpu")).tolist() == pytest.approx(twelve)


@turns
def test_logits_equal_the_reference(words, impl):
    m = dataclasses.replace(config_of(words), attention_impl=impl)
    model, tokens = build(m).eval(), batch()[0]
    for places in filter(functools.partial(allowed, m), PLACES):
        with torch.no_grad():
            got = model(torch.from_numpy(tokens), where_of(PLACES[places]))[..., :VOCAB]
        want = reference_gpt.logits(weights(model), m, tokens, **PLACES[places])
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10, err_msg=places)


@every
def test_gradients_equal_the_reference(words):
    """With dropout, a loss mask and restarts at documents, compare two derivatives per parameter:
    in a random direction and at an entry."""
    m = config_of(words)
    model = build(m)
    loss = training_loss(model, "both")
    loss.backward()
    where = {**PLACES["both"], "drop": dropout_factors(m, torch.arange(3, 3 + B))}
    w, random = weights(model), np.random.default_rng(3)
    assert loss.item() == pytest.approx(reference_gpt.loss(w, m, *batch(), **where), rel=1e-12)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert not p.grad[len(w[name]) :].any(), f"{name}: the padding has a gradient"
        grad = p.grad[: len(w[name])].numpy()
        single = np.zeros(grad.shape)
        # most tokens' rows have none
        used = random.choice(np.flatnonzero(grad)) if grad.any() else 0
        single.flat[used] = 1
        for d in (random.normal(size=grad.shape), single):
            want = reference_gpt.slope(w, name, d, m, *batch(), **where)
            assert (grad * d).sum() == pytest.approx(want, rel=1e-6, abs=1e-12), name


@every
def test_dropout_is_where_the_reference_has_it(words):
    """Without documents attention drops more."""
    m = config_of(words)
    model = build(m)
    where = {"drop": dropout_factors(m, torch.arange(3, 3 + B))}
    want = reference_gpt.loss(weights(model), m, *batch(), **where)
    assert training_loss(model).item() == pytest.approx(want, rel=1e-12)
    assert abs(mean_loss(model.eval(), Positions()).item() - want) > 1e-3


@turns
def test_a_cache_changes_nothing(words, impl):
    m = dataclasses.replace(config_of(words), attention_impl=impl)
    model, tokens = build(m).eval(), torch.from_numpy(batch()[0])
    cache, parts, start = Cache(B, T), [], 0
    with torch.inference_mode():
        at_once = model(tokens, Positions())
        for n in (3, 1, 4):
            cached = ContinuedTexts(
                cache, torch.arange(B), torch.full((B,), start), start + n if start else 0
            )
            where = Positions(cached=cached)
            parts.append(model(tokens[:, start : start + n], where))
            start += n
        last = model(tokens, Positions(), last_only=True)
    torch.testing.assert_close(torch.cat(parts, 1), at_once, rtol=0, atol=1e-10)
    torch.testing.assert_close(last, at_once[:, -1:], rtol=0, atol=1e-10)


# Options -> how often each of three layers' attentions runs, and how often their inner part
RECOMPUTED = {
    Options(): ([1, 1, 1], 3),
    Options("selective"): ([1, 1, 1], 6),
    Options("full"): ([2, 2, 2], 6),
    Options("full", None, 2): ([2, 2, 2], 6),
    Options("full", "uniform", 2): ([2, 2, 2], 6),
    Options("full", "uniform", 3): ([2, 2, 2], 6),
    Options("full", "block", 1): ([2, 1, 1], 4),
    Options("full", "block", 3): ([2, 2, 2], 6),
}


@turns
def test_recomputation_changes_no_bit(words, impl, monkeypatch):
    m = dataclasses.replace(config_of(words), attention_impl=impl, num_layers=3)
    inner = 0

    def counted(attend, *arguments):
        nonlocal inner
        inner += 1
        return attend(*arguments)

    for name in ("fused", "reference"):
        monkeypatch.setattr(attention, name, functools.partial(counted, getattr(attention, name)))
    first: dict[str, torch.Tensor] = {}
    for options, (runs, inner_runs) in RECOMPUTED.items():
        model, inner, seen = build(m, options), 0, [0, 0, 0]
        for i in range(3):
            model.h[str(i)].attn.qkv.register_forward_hook(
                lambda *_, i=i, seen=seen: seen.__setitem__(i, seen[i] + 1)
            )
        torch.manual_seed(len(first))  # whatever state the generator is in
        loss = training_loss(model, "both")
        loss.backward()
        assert (seen, inner) == (runs, inner_runs), options
        got = {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}
        first = first or got
        assert all(torch.equal(got[n], first[n]) for n in first), options
    assert all(x.any() for x in first.values())


@every
def test_counts_are_those_of_the_model(words):
    """Parameters and FLOPs; a forward pass is a third of a step, attention a full square.

    Windows are left out here, since a dense mask computes the full square, too.
    """
    m = dataclasses.replace(config_of(words), window_size=None)
    model = build(m).eval()
    assert counts.parameters(m, PADDED, POSITIONS) == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(torch.from_numpy(batch()[0]), Positions())
    assert counter.get_total_flops() * 3 == B * T * counts.flops_per_token(m, PADDED, T)
