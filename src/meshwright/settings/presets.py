"""Architecture and recipe of known models, each number with its source. Never parallel sizes."""

from __future__ import annotations

from typing import Any


def _megatron(layers: int, hidden: int, heads: int, seq: int, micro: int, batch: int, **more: Any) -> dict[str, Any]:
    """With the recipe of Megatron-LM's examples/pretrain_gpt.sh, which the other systems' scripts share."""
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": seq,
        "max_position_embeddings": seq,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        "train_iters": 500_000,
        "lr": 1.5e-4,
        "min_lr": 1e-5,
        "lr_decay_style": "cosine",
        "lr_decay_iters": 320_000,
        "lr_warmup_fraction": 0.01,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
    } | more


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Radford et al. 2019, table 2: four sizes of 12 to 48 layers, 1024 positions; dropout 0.1, batch 512."""
    return _megatron(layers, hidden, heads, 1024, 4, 512)


def _gpt3(layers: int, hidden: int, heads: int, batch: int, lr: float) -> dict[str, Any]:
    """Brown et al. 2020, table 2.1 (batch given there in tokens of 2048-token sequences) and appendix B.

    300 billion tokens in all, cosine decay to a tenth over 260 billion, 375 million tokens of warm-up.
    """
    steps = 300_000_000_000 // (batch * 2048)
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "lr": lr,
        "min_lr": lr / 10,
        "lr_decay_style": "cosine",
        "lr_decay_iters": steps * 260 // 300,
        "lr_warmup_fraction": round(0.375 / 260, 6),
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "adam_beta2": 0.95,
        "train_iters": steps,
        "micro_batch_size": 1,
        "global_batch_size": batch,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _ascend(
    layers: int,
    hidden: int,
    heads: int,
    seq: int,
    batch: int,
    micro: int,
    lr: float,
    least: float,
    recompute: bool = True,
    scale: float | None = None,
) -> dict[str, Any]:
    """Ascend's GPT-2_for_PyTorch, test/train_full_8p.sh: five sizes, no dropout, fp16 from a scale of 2^12.

    Its global batch is spread over 8 devices; here as everywhere micro-batches make it up.
    """
    return _megatron(
        layers,
        hidden,
        heads,
        seq,
        micro,
        batch,
        lr=lr,
        min_lr=least,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fp16=True,
        initial_loss_scale=2.0**12,
        loss_scale_window=500.0,
        loss_scale=scale,
        split="949,50,1",
        checkpoint_activations=recompute,
        log_interval=100,
        eval_interval=1000,
        eval_iters=10,
        num_workers=16,
    )


def _oneflow(layers: int, hidden: int, heads: int, seq: int, micro: int, batch: int) -> dict[str, Any]:
    """OneFlow-Benchmark's LanguageModeling/GPT, examples/: the sizes of the scripts named beside them, with the recipe of
    examples/pretrain.sh, which they share."""
    return _megatron(
        layers,
        hidden,
        heads,
        seq,
        micro,
        batch,
        fp16=True,
        checkpoint_activations=True,
        split="949,50,1",
        seed=12345,
        log_interval=100,
    )


# Architecture and recipe, never parallel sizes. The GPT-2 recipe is Megatron-LM's examples/pretrain_gpt.sh.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-117m": _gpt2(12, 768, 12),
    "gpt2-345m": _gpt2(24, 1024, 16),
    "gpt2-762m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    "ascend-345m": _ascend(24, 1024, 16, 1024, 16, 4, 1.5e-4, 1.5e-5),
    "ascend-1.3b": _ascend(24, 2048, 16, 1024, 32, 8, 2e-4, 2e-5),
    "ascend-2.7b": _ascend(32, 2560, 32, 2048, 32, 8, 1.6e-4, 1.6e-5),
    "ascend-3.7b": _ascend(32, 3072, 32, 2048, 16, 4, 1.2e-4, 1.2e-5),
    "ascend-345m-without-mp": _ascend(24, 1024, 16, 1024, 64, 8, 1.5e-4, 1e-5, False, 65536.0),
    "oneflow-117m": _oneflow(12, 768, 12, 1024, 8, 8),  # pretrain_117M.sh
    "oneflow-345m": _oneflow(24, 1024, 16, 1024, 8, 8),  # pretrain_345M.sh
    "oneflow-16x1536": _oneflow(16, 1536, 16, 2048, 8, 16),  # pretrain_1n8d_2x4x1_16_1536x16.sh
    "oneflow-24x2304": _oneflow(24, 2304, 24, 2048, 8, 512),  # distribute_pretrain_4n8d_2x4x4_512_2304x24.sh
    "gpt3-125m": _gpt3(12, 768, 12, 256, 6e-4),
    "gpt3-350m": _gpt3(24, 1024, 16, 256, 3e-4),
    "gpt3-760m": _gpt3(24, 1536, 16, 256, 2.5e-4),
    "gpt3-1.3b": _gpt3(24, 2048, 16, 512, 2e-4),  # the paper says 24 heads of 128, which 2048 does not hold
    "gpt3-2.7b": _gpt3(32, 2560, 32, 512, 1.6e-4),
    "gpt3-6.7b": _gpt3(32, 4096, 32, 1024, 1.2e-4),
    "gpt3-13b": _gpt3(40, 5120, 40, 1024, 1.0e-4),  # the paper's 5140 is not a multiple of its 40 heads
    "gpt3-175b": _gpt3(96, 12288, 96, 1536, 0.6e-4),
}
