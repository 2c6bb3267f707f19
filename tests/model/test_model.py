"""The network: equal to itself in any batch and precision, with its masks, draws and graphs."""

import dataclasses
import functools

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import TINY
from meshwright.base import device as devices
from meshwright.config import schema as config
from meshwright.model import attention, counts, gpt, pick, positions
from meshwright.model import recompute as attention_results
from meshwright.model.cache import Cache, ContinuedTexts
from meshwright.model.fused import FusedBlock
from meshwright.model.gpt import GPT, Block, Options, initialise
from meshwright.model.loss import loss_sum, token_losses
from meshwright.model.positions import Positions
from stores import tokens

STILL = dataclasses.replace(TINY, hidden_dropout=0.0, attention_dropout=0.0)


def compiling(test):
    """Mark a test as a GPU test with slow compilation and foreign warnings."""
    for mark in (pytest.mark.timeout(500), pytest.mark.filterwarnings("ignore")):
        test = mark(test)
    return pytest.mark.skipif(
        not torch.cuda.is_available(), reason="compiled layers are for a GPU"
    )(test)


def make(m=TINY, vocab=61, padded=64, positions=16, dtype=torch.float32, seed=1, options=None):
    """Return an initialised model, as at the start of a run."""
    with torch.device("meta"):
        model = GPT(m, vocab, padded, positions, options=options)
    model = model.to(dtype).to_empty(device="cpu")
    initialise(model.named_parameters(), m, vocab, seed)
    return model


def randomise(model, std=0.3):
    """Randomise biases and norms too, whose initial values could hide a mistake."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                torch.randn(p.shape, generator=g, dtype=torch.float64) * std
                + (".ln_" in f".{name}" and p.ndim == 1)
            )
            if name in ("wte.weight", "lm_head.weight"):
                p[model.vocab :] = 0
    return model


def training(seed=9, samples=3, **more):
    return Positions(samples=torch.arange(samples), seed=seed, **more)


def test_flops_by_megatrons_formula():
    for layers, h, heads, seq, v in [(24, 1024, 16, 1024, 50304), (32, 2560, 32, 2048, 50304)]:
        m = config.Model(num_layers=layers, hidden_size=h, num_attention_heads=heads)
        want = 72 * layers * h * h * (1 + seq / (6 * h) + v / (12 * layers * h))
        assert counts.flops_per_token(m, v, seq) == pytest.approx(want)
        m = dataclasses.replace(m, window_size="255,0", window_attn_skip_freq="4")
        narrow = 72 * layers * h * h * 3 / 4 * (seq - 256) / (6 * h)  # of three in four layers
        assert counts.flops_per_token(m, v, seq) == pytest.approx(want - narrow)
        assert counts.flops_per_token(m, v, 128) == counts.flops_per_token(
            dataclasses.replace(m, window_size=None), v, 128
        )


def test_names_and_shapes_are_those_of_the_checkpoint():
    model = make()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert [n for n in shapes if ".0." in n or not n.startswith("h.")] == [
        "wte.weight",
        "wpe.weight",
        *(
            f"h.0.{m}.{x}"
            for m in ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc", "mlp.proj")
            for x in ("weight", "bias")
        ),
        "ln_f.weight",
        "ln_f.bias",
    ]
    assert shapes["wte.weight"] == (64, 32) and shapes["h.1.attn.qkv.weight"] == (96, 32)
    everything = dataclasses.replace(
        TINY,
        glu_activation="geglu",
        qk_layernorm=True,
        embed_layernorm=True,
        num_query_groups=2,
        kv_channels=6,
        untie_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=True,
    )
    assert {
        n: tuple(p.shape) for n, p in make(everything).named_parameters() if ".1." not in n
    } == {
        "wte.weight": (64, 32),
        "ln_emb.weight": (32,),
        "h.0.ln_1.weight": (32,),
        "h.0.attn.qkv.weight": (2 * (2 + 2) * 6, 32),
        "h.0.attn.qkv.bias": (2 * (2 + 2) * 6,),
        "h.0.attn.ln_q.weight": (6,),
        "h.0.attn.ln_k.weight": (6,),
        "h.0.attn.proj.weight": (32, 24),
        "h.0.ln_2.weight": (32,),
        "h.0.mlp.fc.weight": (2, 128, 32),
        "h.0.mlp.proj.weight": (32, 128),
        "ln_f.weight": (32,),
        "lm_head.weight": (64, 32),
    }


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
@pytest.mark.parametrize("block", [Block, FusedBlock])
def test_cache_equals_whole(impl, block):
    """Logits with cached keys and values, in chunks, equal those of the full sequence."""
    m = dataclasses.replace(TINY, attention_impl=impl)
    model = GPT(m, 61, 64, 16, block)
    initialise(model.named_parameters(), m, 61, 1)
    model.eval()
    x = tokens()
    whole = model(x, Positions())
    cache, slots = Cache(4, 16), torch.tensor([2, 0, 3])
    parts = []
    for a, b in ((0, 5), (5, 6), (6, 11), (11, 16)):
        where = Positions(cached=ContinuedTexts(cache, slots, torch.full((3,), a), b if a else 0))
        parts.append(model(x[:, a:b], where))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_dropout_is_on_in_training_only():
    model, x = make(), tokens()
    assert not torch.equal(model.train()(x, training()), model.eval()(x, training()))
    assert torch.equal(model.train()(x, training()), model.train()(x, training()))
    assert not torch.equal(
        model(x, training()), model(x, Positions(samples=torch.arange(3) + 1, seed=9))
    )
    assert not torch.equal(model(x, training()), model(x, training(seed=10)))
    # without sample numbers there is none
    assert torch.equal(model(x, Positions()), model.eval()(x, Positions()))


def test_fused_dropout_depends_on_the_first_sample_and_the_layer():
    """The kernel's generator is seeded for each layer, so a resumed run draws the same."""
    model, x = (
        make(dataclasses.replace(TINY, attention_impl="sdpa", hidden_dropout=0.0)).train(),
        tokens(),
    )
    a = model(x, training(first_sample=5))
    torch.rand(7)
    assert torch.equal(a, model(x, training(first_sample=5)))
    assert not torch.equal(a, model(x, training(first_sample=6)))
    states = []
    for layer in (0, 1):
        attention.seed_dropout(training(first_sample=5), layer, torch.device("cpu"))
        states.append(torch.rand(4))
    assert not torch.equal(*states)


class CountingGenerator:
    """Stands in for CUDA's generator, which counts what each attention draws; notes the places."""

    def __init__(self, monkeypatch, capturing=False):
        self.number, self.offset, self.places = 0, 0, []
        for name in ("seed_generator", "count_drawn"):
            monkeypatch.setattr(devices, name, getattr(self, name))
        monkeypatch.setattr(devices, "counts_draws", lambda device: True)
        monkeypatch.setattr(devices, "is_capturing", lambda device: capturing)
        real = attention.fused

        def fused(q, k, v, mask, slopes, p):
            if p:
                self.places.append((self.number, self.offset))
                self.offset += q[..., 0].numel() * (1 if mask is None else 2)  # by another kernel
            return real(q, k, v, mask, slopes, 0.0)

        monkeypatch.setattr(attention, "fused", fused)

    def seed_generator(self, device, number, offset=None):
        self.number, self.offset = number, offset

    def count_drawn(self, device):
        return self.offset


class CountedKernels(TorchDispatchMode):
    """Counts the calls of attention kernels."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in attention_results.KERNELS
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("method, layers", [("uniform", 1), ("uniform", 2), ("block", 1)])
def test_attention_that_draws_is_not_computed_again(monkeypatch, method, layers):
    """Its results are kept; gradients are those without recomputation."""
    m = dataclasses.replace(TINY, attention_impl="sdpa", attention_dropout=0.0)
    where = training(first_sample=5)
    plain = losses_and_gradients(make(m).train(), tokens(), where)
    monkeypatch.setattr(GPT, "draws", lambda *_: True)
    options = Options("full", recompute_method=method, recompute_layers=layers)
    with CountedKernels() as counted:
        kept = losses_and_gradients(make(m, options=options).train(), tokens(), where)
    assert counted.count == m.num_layers
    assert torch.equal(plain[0], kept[0])
    assert all(torch.equal(grad, kept[1][name]) for name, grad in plain[1].items())


@pytest.mark.parametrize("recompute", [None, "full"])
def test_each_layer_draws_its_dropout_after_the_layer_before(monkeypatch, recompute):
    """A stage of a pipeline draws from the same places of the generator.

    So does recomputation, if the kernel is not one whose results are kept.
    """
    monkeypatch.setattr(attention_results, "KERNELS", ())
    generator = CountingGenerator(monkeypatch)
    m = dataclasses.replace(TINY, attention_impl="sdpa", hidden_dropout=0.0)
    model, x = make(m, options=Options(recompute=recompute)).train(), tokens()
    model(x, training(first_sample=5)).sum().backward()
    each = x.numel() * m.num_attention_heads
    (seed, _), *_ = generator.places
    assert generator.places[:2] == [(seed, 0), (seed, each)]
    assert set(generator.places[2:]) == (
        set(generator.places[:2]) if recompute == "full" else set()
    )
    stage = make(m).train()
    stage.keep(range(1, 2), has_embedding=False, has_head=True)
    generator.places.clear()
    for _ in range(2):
        stage(x, training(first_sample=5), stream=torch.zeros(*x.shape, m.hidden_size))
    # the first shows how many a layer draws
    assert generator.places == [(seed, 0), (seed, each), (seed, each)]
    model(x, training(first_sample=6))
    assert generator.places[-1][0] != seed
    windows = make(dataclasses.replace(m, window_size="3,0", window_attn_skip_freq="2")).train()
    generator.places.clear()
    windows(x, training(first_sample=5))
    assert generator.places == [(seed, 0), (seed, 2 * each)]


def test_nothing_is_seeded_while_a_graph_is_captured(monkeypatch):
    generator = CountingGenerator(monkeypatch, capturing=True)
    m = dataclasses.replace(TINY, attention_impl="sdpa", hidden_dropout=0.0)
    make(m).train()(tokens(), training(first_sample=5))
    assert [number for number, _ in generator.places] == [0, 0]
    assert [offset for _, offset in generator.places] == [
        0,
        tokens().numel() * m.num_attention_heads,
    ]


def test_dropout_does_not_depend_on_the_micro_batch():
    """With the reference attention, logits depend on neither other samples nor later tokens."""
    model = make(dtype=torch.float64).train()
    x = tokens()
    together = model(x, Positions(samples=torch.arange(5, 8), seed=9, first_sample=5))
    alone = model(x[1:2], Positions(samples=torch.tensor([6]), seed=9, first_sample=6))
    torch.testing.assert_close(together[1:2], alone, rtol=1e-12, atol=1e-12)
    start = model(x[:, :9], Positions(samples=torch.arange(5, 8), seed=9, first_sample=5))
    torch.testing.assert_close(together[:, :9], start, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_the_reference_are_float32(dtype):
    """Scores may exceed float16's 65,504, and differ by less than bfloat16 resolves."""
    for size in (100.0, 6.0):
        q = torch.full((1, 2, 1, 64), size).to(dtype)
        k = q.clone()
        k[0, 1, 0, 0] -= 1 / 0.75  # the second key's score is a little lower
        v = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).to(dtype)
        scores = (q.double()[0, 1, 0] * k.double()[0, :, 0]).sum(-1) / 8
        got = attention.reference(q, k, v, None, Positions(), 0.0, 0)
        assert got[0, 1, 0, 0].item() == pytest.approx(scores.softmax(0)[0].item(), rel=2**-8)
        assert got[0, 1, 0, 0] > 0.5


@pytest.mark.parametrize(
    "kind", [{}, {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True}]
)
def test_a_float32_residual_stream(kind):
    """In bfloat16, only the residual stream is float32, and the logits are more accurate."""
    m = dataclasses.replace(STILL, num_layers=8, **kind)
    exact, errors, formats = randomise(make(m, dtype=torch.float64), 0.15), [], []
    rounded = {n: p.detach().bfloat16() for n, p in exact.named_parameters()}
    exact.load_state_dict(rounded)  # the same weights in all three
    x = tokens()
    with torch.no_grad():
        want = exact(x, Positions())[..., :61]
    for wide in (False, True):
        model = make(m, dtype=torch.bfloat16, options=Options(fp32_residual=wide)).train()
        model.load_state_dict(rounded)
        for block in model.h.values():
            block.register_forward_hook(
                lambda block, args, out: formats.append(tuple(o.dtype for o in out))
            )
        logits = model(x, training())
        errors.append((logits[..., :61].double() - want).square().mean().sqrt().item())
        assert logits.dtype is torch.bfloat16
        loss = loss_sum(token_losses(logits, x, 61), None)
        loss.backward()
        assert loss.isfinite()
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name
            assert p.grad.dtype is torch.bfloat16
    assert formats == [(torch.bfloat16, torch.bfloat16)] * 8 + [(torch.float32, torch.bfloat16)] * 8
    assert errors[1] < 0.8 * errors[0]


def test_a_float32_residual_under_recomputation_and_dropout():
    grads = []
    for options in (Options(fp32_residual=True), Options("full", fp32_residual=True)):
        model = make(dtype=torch.bfloat16, options=options).train()
        loss_sum(token_losses(model(tokens(), training()), tokens(), 61), None).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    "more", [{}, {"swiglu": True, "apply_layernorm_1p": True}, {"normalization": "RMSNorm"}]
)
def test_a_model_outside_of_a_run_is_initialised(more):
    """GPT(...) alone has usable weights, like every torch module."""
    torch.use_deterministic_algorithms(True)  # torch then fills new memory with NaN
    try:
        model = GPT(dataclasses.replace(TINY, **more), 11, 16, 8)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(p.isfinite().all() for p in model.parameters())
    assert model(torch.zeros(1, 8, dtype=torch.long), Positions()).isfinite().all()


def test_initial_weights_depend_on_name_and_seed_only():
    a = make()
    b = make(dataclasses.replace(TINY, num_layers=2), padded=61, dtype=torch.float64)
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        n = min(len(p), len(q))
        assert torch.equal(p[:n].double(), q[:n]), name
    assert a.wte.weight[:61].std().item() == pytest.approx(0.02, rel=0.1)
    # 0.02 / sqrt(2 x 2 layers)
    assert a.h["0"].mlp.proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert not torch.equal(make(seed=2).wte.weight, a.wte.weight)
    assert (a.wte.weight[61:] == 0).all()


def test_initial_weights_are_golden():
    """These values must not change between versions: a seed identifies a run."""
    model = make()
    assert model.wte.weight[0, :3].tolist() == pytest.approx(GOLDEN, rel=1e-6)


GOLDEN = [0.004147826693952084, -0.012225081212818623, 0.009814441204071045]


def test_initial_weights_by_kind():
    """Biases are 0, norms 1 (stored as 0 with 1p); Xavier's bound is sqrt(6 / (in + out))."""
    for one, norms in ((False, 1.0), (True, 0.0)):
        m = dataclasses.replace(
            TINY, apply_layernorm_1p=one, qk_layernorm=True, embed_layernorm=True
        )
        for name, p in make(m).named_parameters():
            if p.ndim == 1:
                assert (p == (0.0 if name.endswith("bias") else norms)).all(), name
    drawn = dict(make(TINY).named_parameters())
    for name, p in make(dataclasses.replace(TINY, zero_init_projections=True)).named_parameters():
        is_zero = name.endswith("proj.weight")
        assert (
            torch.equal(p, torch.zeros_like(p) if is_zero else drawn[name])
            and drawn[name].any() >= is_zero
        ), name
    m = dataclasses.replace(TINY, init_method_xavier_uniform=True, swiglu=True, ffn_hidden_size=48)
    for name, p in make(m, padded=61).named_parameters():
        if name.endswith("weight") and p.ndim > 1:
            rows, columns = p.numel() // p.shape[-1], p.shape[-1]
            bound = (6 / (rows + columns)) ** 0.5
            assert 0.97 * bound < p.abs().max() <= bound, name
    gate = make(m).h["0"].mlp.fc
    assert gate.weight.shape == (2, 48, 32) and (gate.bias == 0).all()


COMPILED = {
    "gpt2": {},
    "no dropout": {"hidden_dropout": 0.0},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "num_query_groups": 2,
    },
    "alibi": {"position_embedding_type": "alibi"},
    "postnorm": {
        "apply_residual_connection_post_layernorm": True,
        "squared_relu": True,
        "qk_layernorm": True,
    },
}


def compiled_case(kind, documents, length=200):
    """Return a configuration, tokens and their positions; documents of 70 tokens span blocks."""
    m = dataclasses.replace(
        TINY,
        hidden_size=64,
        max_position_embeddings=length,
        attention_dropout=0.0,
        num_layers=3,
        **COMPILED[kind],
    )
    x = torch.randint(0, 61, (3, length), generator=torch.Generator().manual_seed(0)).cuda()

    def where(step=0):
        out = Positions(
            samples=torch.arange(3, device="cuda") + 3 * step, seed=9, first_sample=3 * step
        )
        if documents:
            places = torch.arange(length, device="cuda").expand(3, length) + step
            out.documents, out.position_ids = places // 70, places % 70
        return out

    return m, x, where


def on_gpu(m, options):
    model = (
        randomise(make(m, positions=m.max_position_embeddings, options=options), 0.1).cuda().train()
    )
    if options.compiled:
        pick.compile_blocks(model)
    return model


def losses_and_gradients(model, x, where):
    model.zero_grad()
    losses = token_losses(model(x, where), x, 61)
    loss_sum(losses, None).backward()
    return losses.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_near(got, want):
    """Compare relative to each gradient's largest element, or a thousandth of the largest of all.

    The gradient of a key norm's bias is 0 except for rounding: it does not change the softmax.
    """
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    largest = max(g.abs().max() for g in want[1].values())
    for name, g in want[1].items():
        assert (got[1][name] - g).abs().max() < 1e-4 * max(g.abs().max(), largest / 1000), name


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("kind", COMPILED)
@compiling
def test_compiled_blocks_equal_plain_ones(kind, documents, recompute):
    """Compare float32 losses and gradients, and with them the masks of hidden dropout.

    There is no attention dropout, which a compiled kernel may draw differently.
    """
    torch._dynamo.reset()
    m, x, where = compiled_case(kind, documents)
    flex = documents or m.position == "alibi"
    results = []
    for compiled in (False, True):
        mask = positions.share(m, where(), x, torch.float32, compiled).mask
        assert type(mask).__name__ == (
            "BlockMask" if flex and compiled else "Tensor" if flex else "NoneType"
        )
        results.append(
            losses_and_gradients(on_gpu(m, Options(recompute, compiled=compiled)), x, where())
        )
    assert_near(*results)


def test_the_reference_gets_dense_masks_on_a_gpu_too(monkeypatch):
    monkeypatch.setattr(positions.devices, "has_kernels", lambda device: True)
    x = torch.zeros(1, 8, dtype=torch.int64)
    for impl, kind in (("auto", "BlockMask"), ("reference", "Tensor")):
        m = dataclasses.replace(TINY, attention_dropout=0.0, attention_impl=impl)
        where = Positions(documents=torch.zeros(1, 8, dtype=torch.int32))
        assert type(positions.share(m, where, x, torch.float32, True).mask).__name__ == kind


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("kind", ["alibi", "gpt2", "llama"])
@compiling
def test_flex_attention_in_plain_blocks(kind, recompute, monkeypatch):
    """Without compiled blocks it equals the dense mask, and is compiled once for all layers."""
    torch._dynamo.reset()
    m, x, where = compiled_case(kind, documents=True)
    model = on_gpu(m, Options(recompute))
    graphs = torch._dynamo.utils.counters["stats"]
    for step in range(3):
        want = losses_and_gradients(model, x, where(step))
        with monkeypatch.context() as patch:
            patch.setattr(
                gpt, "share", lambda *arguments: positions.share(*arguments[:-1], flex=True)
            )
            assert isinstance(gpt.share(m, where(), x, torch.float32, False).mask, BlockMask)
            graphs.clear()
            assert_near(losses_and_gradients(model, x, where(step)), want)
            assert graphs["unique_graphs"] == (step == 0), f"step {step}"


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # from torch's tracing
def test_flex_attention_is_compiled_once_for_a_shape(monkeypatch):
    """Other documents and other slopes of ALiBi give other masks but no other graph."""
    traced = []

    def keep(graph, inputs):
        traced.append(graph)
        return graph.forward

    torch._dynamo.reset()
    attention.compiled_flex.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    m = dataclasses.replace(STILL, position_embedding_type="alibi")
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        for length in (16, 16, 16, 12):
            q, k, v = torch.randn(3, 2, length, m.num_attention_heads, 8)
            documents = torch.randint(0, 2, (2, length)).cumsum(1)
            where = Positions(documents=documents)
            dense = positions.share(m, where, documents, torch.float32, False)
            slopes = positions.slopes_of(m, None, q.device).float()
            blocks = positions.block_mask(documents, length, q.device, 0)
            want = attention.fused(q, k, v, dense.mask, None, 0.0)
            torch.testing.assert_close(attention.fused(q, k, v, blocks, slopes, 0.0), want)
    attention.compiled_flex.cache_clear()
    assert len(traced) == 2


@pytest.mark.parametrize("queries", [16, 5, 1])
def test_a_window_is_megatrons(queries):
    """The formula of its get_sliding_window_causal_mask, for the last queries of 16 keys."""
    ones = torch.ones(queries, 16, dtype=torch.bool)
    for left in (1, 3, 15, 20):
        want = ones.triu(16 - queries - left).tril(16 - queries)
        cached = ContinuedTexts(Cache(1, 16), torch.tensor([0]), torch.tensor([16 - queries]), 16)
        where, m = Positions(cached=cached), dataclasses.replace(TINY, window_size=f"{left},0")
        shared = positions.share(
            m, where, torch.zeros(1, queries, dtype=torch.int64), torch.float32, False
        )
        assert torch.equal(shared.window_mask[0, 0], want) and shared.mask[0, 0, -1].all()


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_blocks_of_a_window(documents):
    """A block is left out if no query sees a key of it, and full if each query sees all."""
    block, length = positions.FLEX_BLOCK, 5 * positions.FLEX_BLOCK - 40
    ids = torch.rand(2, length, generator=torch.Generator().manual_seed(1)).lt(0.005).cumsum(1)
    where, places = Positions(documents=ids if documents else None), torch.arange(length)

    def by_element(counts, indices):
        marked = torch.zeros(*indices.shape[:3], 6).scatter(
            3, torch.where(torch.arange(5) < counts[..., None], indices, 5).long(), 1.0
        )
        return (
            marked[:, 0, :, :5]
            .bool()
            .repeat_interleave(block, 1)
            .repeat_interleave(block, 2)[:, :length, :length]
        )

    for window in (0, 1, block - 1, block, block + 1, 2 * block - 1, length):
        want = positions.dense_mask(
            TINY, where, (places - places[:, None])[None], torch.float32, window
        )[:, 0]
        mask = positions.block_mask(where.documents, length, places.device, window)
        some = by_element(mask.kv_num_blocks, mask.kv_indices)
        full = by_element(mask.full_kv_num_blocks, mask.full_kv_indices)
        exact = mask.mask_mod(torch.arange(len(want))[:, None, None], 0, places[:, None], places)
        assert torch.equal(full | (some & exact), want), window
        if window and not documents:  # no block is visited in vain
            visited = (some | full)[0, ::block, ::block]
            assert visited.tolist() == [
                [bool(x.any()) for x in y.split(block, 1)] for y in want[0].split(block)
            ]


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("kind", COMPILED)
@compiling
def test_blocks_are_compiled_once(kind, documents):
    """The first block and all others have a graph each, and later steps compile nothing."""
    torch._dynamo.reset()
    m, x, where = compiled_case(kind, documents)
    model, plain = on_gpu(m, Options(compiled=True)), on_gpu(m, Options())
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    for step in range(4):
        assert_near(
            losses_and_gradients(model, x, where(step)), losses_and_gradients(plain, x, where(step))
        )
        assert graphs["unique_graphs"] == 2, f"step {step}"


@pytest.mark.parametrize("recompute", [None, "full"])
@compiling
def test_attention_dropout_in_compiled_blocks(recompute):
    """Dropout is seeded by layer and sample, so recomputation and earlier draws do not matter."""
    torch._dynamo.reset()
    m, x, where = compiled_case("llama", False)
    m = dataclasses.replace(m, attention_dropout=0.3)
    want = losses_and_gradients(on_gpu(m, Options(compiled=True)), x, where())
    torch.rand(5, device="cuda")
    model = on_gpu(m, Options(recompute, compiled=True))
    assert_near(losses_and_gradients(model, x, where()), want)
    assert not torch.equal(losses_and_gradients(model, x, where(1))[0], want[0])


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # from torch's tracing
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"position_embedding_type": "alibi"},
        {"position_embedding_type": "rope", "num_query_groups": 2, "swiglu": True},
    ],
)
def test_blocks_share_two_graphs(monkeypatch, more):
    """All blocks but the first share one graph, with the plain results (no code generation)."""
    from torch._dynamo.utils import counters

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: real(f, backend="aot_eager", **how))
    m = config.Model(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,
        attention_impl="sdpa",
        **more,
    )
    runs = []
    for compiled in (False, True):
        torch.compiler.reset()
        counters.clear()
        model = GPT(m, 61, 64, 16, options=Options(compiled=compiled)).train()
        initialise(((n, p.detach()) for n, p in model.named_parameters()), m, 61, 1)
        if compiled:
            pick.compile_blocks(model)
        for step in range(3):
            ids = torch.arange(32).view(2, 16) + step
            documents = (ids % 16 > 5 + step).int()
            where = Positions(torch.arange(2) + 2 * step, None, 7, 2 * step, None, documents)
            token_losses(model(ids, where), ids, 61).sum().backward()
        runs.append([p.grad.clone() for p in model.parameters()])
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
