"""The block of fused kernels equals the plain block, forward and backward."""

import dataclasses

import pytest
import torch

from helpers import TINY
from meshwright.config import schema
from meshwright.model.fused import FusedBlock
from meshwright.model.gpt import GPT, Block, Options, initialise
from meshwright.model.loss import loss_sum, token_losses
from meshwright.model.pick import options
from meshwright.model.positions import Positions

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
MODELS = {
    "gpt2": {},
    "no-dropout": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "llama": LLAMA,
    "partial-rotation": {**LLAMA, "rotary_percent": 0.5, "hidden_dropout": 0.0},
    "no-norm-bias": {"layernorm_bias": False, "add_bias_linear": False},
    "yarn": {
        **LLAMA,
        "rope_scaling": "yarn",
        "original_max_position_embeddings": 8,
        "hidden_dropout": 0.0,
    },
    "1p": {"apply_layernorm_1p": True, "add_qkv_bias": True},
    "post-norm": {"apply_residual_connection_post_layernorm": True, "squared_relu": True},
    "one-query-group": {"num_query_groups": 1},
    "qk-norm": {**LLAMA, "qk_layernorm": True},
    "qk-norm-learned": {"qk_layernorm": True, "apply_layernorm_1p": True, "hidden_dropout": 0.0},
    "qk-norm-partial": {
        **LLAMA,
        "qk_layernorm": True,
        "normalization": "LayerNorm",
        "add_qkv_bias": True,
        "rotary_percent": 0.5,
        "kv_channels": 24,
    },
    "parallel": {"use_parallel_residual": True},
    "neox": {
        "use_parallel_residual": True,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "hidden_dropout": 0.0,
        "qk_layernorm": True,
    },
}


# Of a CPU: what torch attends with on a GPU has no float64 there.
ON_CPU = MODELS | {
    "qk-norm-window": {**LLAMA, "qk_layernorm": True, "window_size": "5,0"},
}


def results(m, block, device, dtype, recompute=None, fp32_residual=False):
    """Return the loss and the gradients of a randomised model in training."""
    how = Options(recompute=recompute, fp32_residual=fp32_residual, fused=block is FusedBlock)
    with torch.device("meta"):
        model = GPT(m, 61, 64, 16, block, how)
    model = model.to(torch.float32).to_empty(device="cpu")
    initialise(model.named_parameters(), m, 61, 1)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 or name.endswith("bias"):
                p.add_(torch.randn(p.shape, generator=random) * 0.3)
    model = model.to(device, dtype).train()
    tokens = torch.randint(61, (3, 17), generator=random).to(device)
    where = Positions(samples=torch.arange(5, 8, device=device), seed=9, first_sample=5)
    losses = token_losses(model(tokens[:, :-1], where), tokens[:, 1:], 61)
    (loss_sum(losses, None) / 48).backward()
    return {"losses": losses.detach(), **{n: p.grad for n, p in model.named_parameters()}}


# Every model with each value of both options, and all four pairs of values.
WAYS = [
    (name, recompute, (recompute == "full") is (number % 2 == 0))
    for number, name in enumerate(ON_CPU)
    for recompute in (None, "full")
]


@pytest.mark.parametrize(("name", "recompute", "fp32_residual"), WAYS)
def test_equals_the_plain_block(name, recompute, fp32_residual):
    m = dataclasses.replace(TINY, **ON_CPU[name])
    cpu = torch.device("cpu")
    want = results(m, Block, cpu, torch.float64)
    got = results(m, FusedBlock, cpu, torch.float32, recompute, fp32_residual)
    for part, x in want.items():
        torch.testing.assert_close(
            got[part].double(), x.double(), rtol=1e-4, atol=1e-5, msg=lambda s, n=part: f"{n}: {s}"
        )


@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_on_a_gpu_are_as_exact_as_the_plain_block(name, dtype):
    """Errors against float64: at most those of torch's own operations, with some room."""
    m = dataclasses.replace(TINY, **{"hidden_size": 256, **MODELS[name], "attention_dropout": 0.0})
    gpu = torch.device("cuda")
    want = results(m, Block, gpu, torch.float64)
    plain, fused = results(m, Block, gpu, dtype), results(m, FusedBlock, gpu, dtype)
    for part, x in want.items():
        size = x.double().norm()
        # The scores hardly depend on a bias of all keys, for example: of such a gradient rounding
        # leaves only noise, which is compared with the products that it is a sum of.
        before, found, _ = part.partition("ln_q" if "ln_q" in part else "ln_k")
        if found:
            size = max(size, want[f"{before}qkv.weight"].double().norm() / 100)
        theirs, ours = ((y[part].double() - x.double()).norm() / size for y in (plain, fused))
        assert ours <= 1.5 * theirs + (1e-5 if dtype is torch.float32 else 2e-3), (
            part,
            ours,
            theirs,
        )


def test_choice():
    t, p, cpu, gpu = (
        schema.Training(),
        schema.Precision(),
        torch.device("cpu"),
        torch.device("cuda"),
    )
    assert (
        not options(t, TINY, p, cpu).fused
        and options(dataclasses.replace(t, fused_kernels="on"), TINY, p, cpu).fused
    )
    assert options(t, TINY, p, gpu).fused and not options(t, TINY, p, gpu).compiled
    for change in ({"fused_kernels": "off"}, {"compile": "on"}):
        how = options(dataclasses.replace(t, **change), TINY, p, gpu)
        assert how.compiled and not how.fused
    # Today's networks run on fused kernels.
    modern = dataclasses.replace(
        TINY, **LLAMA, qk_layernorm=True, squared_relu=True, use_parallel_residual=True
    )
    assert options(t, modern, p, gpu).fused
