"""Architecture and recipe of known models, each number with its source. Never parallel sizes."""

from __future__ import annotations

from typing import Any

SIZES = "num_layers hidden_size num_attention_heads seq_length micro_batch_size global_batch_size".split()


def _megatron(*sizes: int, **more: Any) -> dict[str, Any]:
    """Return SIZES with the recipe of Megatron-LM's examples/pretrain_gpt.sh."""
    recipe = {"train_iters": 500_000, "lr": 1.5e-4, "min_lr": 1e-5, "lr_decay_style": "cosine", "clip_grad": 1.0}
    recipe |= {"lr_decay_iters": 320_000, "lr_warmup_fraction": 0.01, "weight_decay": 0.01}
    return dict(zip(SIZES, sizes, strict=True)) | {"max_position_embeddings": sizes[3]} | recipe | more


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Radford et al. 2019, table 2: 1024 positions, dropout 0.1, batch 512."""
    return _megatron(layers, hidden, heads, 1024, 4, 512)


def _gpt3(layers: int, hidden: int, heads: int, batch: int, lr: float) -> dict[str, Any]:
    """Brown et al. 2020, table 2.1 (batch in tokens of 2048-token sequences) and appendix B.

    300 billion tokens, cosine decay to a tenth over 260 billion, 375 million tokens of warm-up.
    """
    steps = 300_000_000_000 // (batch * 2048)
    recipe = {"lr": lr, "min_lr": lr / 10, "train_iters": steps, "lr_decay_iters": steps * 260 // 300}
    recipe |= {"lr_warmup_fraction": round(0.375 / 260, 6), "weight_decay": 0.1, "adam_beta2": 0.95}
    return _megatron(layers, hidden, heads, 2048, 1, batch, hidden_dropout=0.0, attention_dropout=0.0, **recipe)


# What the scripts of Ascend and OneFlow share.
_FP16 = {"fp16": True, "split": "949,50,1", "checkpoint_activations": True, "log_interval": 100}


def _ascend(*sizes: int, lr: float, min_lr: float, **more: Any) -> dict[str, Any]:
    """Ascend's GPT-2_for_PyTorch, test/train_full_8p.sh: no dropout, fp16 from a scale of 2^12.

    Its global batch is spread over 8 devices; on fewer, micro-batches make it up.
    """
    recipe = _FP16 | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "initial_loss_scale": 2.0**12}
    recipe |= {
        "loss_scale_window": 500.0,
        "loss_scale": None,
        "eval_interval": 1000,
        "eval_iters": 10,
        "num_workers": 16,
    }
    return _megatron(*sizes, lr=lr, min_lr=min_lr, **recipe | more)


def _oneflow(*sizes: int) -> dict[str, Any]:
    """OneFlow-Benchmark's LanguageModeling/GPT, examples/pretrain.sh; sizes of the script named."""
    return _megatron(*sizes, **_FP16, seed=12345)


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-117m": _gpt2(12, 768, 12),
    "gpt2-345m": _gpt2(24, 1024, 16),
    "gpt2-762m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    "ascend-345m": _ascend(24, 1024, 16, 1024, 4, 16, lr=1.5e-4, min_lr=1.5e-5),
    "ascend-1.3b": _ascend(24, 2048, 16, 1024, 8, 32, lr=2e-4, min_lr=2e-5),
    "ascend-2.7b": _ascend(32, 2560, 32, 2048, 8, 32, lr=1.6e-4, min_lr=1.6e-5),
    "ascend-3.7b": _ascend(32, 3072, 32, 2048, 4, 16, lr=1.2e-4, min_lr=1.2e-5),
    "ascend-345m-without-mp": _ascend(
        24, 1024, 16, 1024, 8, 64, lr=1.5e-4, min_lr=1e-5, checkpoint_activations=False, loss_scale=65536.0
    ),
    "oneflow-117m": _oneflow(12, 768, 12, 1024, 8, 8),  # pretrain_117M.sh
    "oneflow-345m": _oneflow(24, 1024, 16, 1024, 8, 8),  # pretrain_345M.sh
    "oneflow-16x1536": _oneflow(16, 1536, 16, 2048, 8, 16),  # pretrain_1n8d_2x4x1_16_1536x16.sh
    "oneflow-24x2304": _oneflow(24, 2304, 24, 2048, 8, 512),  # distribute_pretrain_4n8d_2x4x4_512_2304x24.sh
    "gpt3-125m": _gpt3(12, 768, 12, 256, 6e-4),
    "gpt3-350m": _gpt3(24, 1024, 16, 256, 3e-4),
    "gpt3-760m": _gpt3(24, 1536, 16, 256, 2.5e-4),
    "gpt3-1.3b": _gpt3(24, 2048, 16, 512, 2e-4),  # the paper's 24 heads of 128 do not make up 2048
    "gpt3-2.7b": _gpt3(32, 2560, 32, 512, 1.6e-4),
    "gpt3-6.7b": _gpt3(32, 4096, 32, 1024, 1.2e-4),
    "gpt3-13b": _gpt3(40, 5120, 40, 1024, 1.0e-4),  # the paper's 5140 is not a multiple of its 40 heads
    "gpt3-175b": _gpt3(96, 12288, 96, 1536, 0.6e-4),
}
