"""Architecture and recipe of known models, each number with its source. Never parallel sizes.

A preset gives flags, no vocabulary: that comes with the tokenizer. The vocabulary of its source is
kept beside it, so that numbers of parameters can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UserError
from meshwright.settings.hints import did_you_mean

SIZES = "num_layers hidden_size num_attention_heads seq_length micro_batch_size global_batch_size".split()


@dataclass(frozen=True)
class Family:
    """Presets of one source, with the size of its vocabulary."""

    source: str
    vocabulary: int
    presets: dict[str, dict[str, Any]]
    is_script: bool = False  # repeats a program's script: its schedule is kept for any length


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
_FP16 = {"fp16": True, "split": "949,50,1", "recompute_granularity": "full", "log_interval": 100}


def _ascend(*sizes: int, lr: float, min_lr: float, **more: Any) -> dict[str, Any]:
    """Ascend's GPT-2_for_PyTorch, test/train_full_8p.sh: no dropout, fp16 from a scale of 2^12.

    Its global batch is spread over 8 devices; on fewer, micro-batches make it up.
    """
    recipe = _FP16 | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "initial_loss_scale": 2.0**12}
    recipe |= {"loss_scale_window": 500.0, "loss_scale": None}
    recipe |= {"eval_interval": 1000, "eval_iters": 10, "num_workers": 16}
    return _megatron(*sizes, lr=lr, min_lr=min_lr, **recipe | more)


def _oneflow(*sizes: int) -> dict[str, Any]:
    """OneFlow-Benchmark's LanguageModeling/GPT, examples/pretrain.sh; sizes of the script named."""
    return _megatron(*sizes, **_FP16, seed=12345)


def _llama(
    *sizes: int, ffn: int, groups: int, tokens: float, lr: float, warmup: int = 2000, **more: Any
) -> dict[str, Any]:
    """Return Llama's network with the recipe of its papers: AdamW, cosine to a tenth, no dropout.

    Touvron et al. 2023, "LLaMA", section 2.3: betas 0.9 and 0.95, weight decay 0.1, clipping at 1.
    The warm-up, given in steps, becomes a share of the run: a shorter run has a shorter one.
    """
    out: dict[str, Any] = dict(zip(SIZES, sizes, strict=True)) | {"ffn_hidden_size": ffn, "swiglu": True}
    out |= {"position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False}
    out |= {"num_query_groups": groups} if groups < sizes[2] else {}
    out |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    steps = round(tokens / (sizes[3] * sizes[5]))
    least = float(f"{lr / 10:.6g}")
    out |= {"train_iters": steps, "lr": lr, "min_lr": least, "lr_warmup_fraction": round(warmup / steps, 6)}
    out |= {"lr_decay_style": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 1.0}
    return out | more


_SMALL_SMOLLM2: dict[str, Any] = {"lr": 3e-3, "last": 0.2, "rotary_base": 100_000.0}
_UNTIED = {"untie_embeddings_and_output_weights": True}
# Without the scaling of frequencies by which 3.2 reaches 128k tokens.
_LLAMA3: dict[str, Any] = {"rotary_base": 500_000.0, "groups": 8, "lr": 3e-4, "warmup": 8000}


def _smollm2(*sizes: int, ffn: int, groups: int, tokens: float, lr: float, last: float, **more: Any) -> dict[str, Any]:
    """Allal et al. 2025, "SmolLM2": constant rate, then linear decay to 0 over the share `last`."""
    out = _llama(*sizes, ffn=ffn, groups=groups, tokens=tokens, lr=lr, **more)
    out |= {"min_lr": 0.0, "lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}
    return out | {"lr_wsd_decay_iters": round(out["train_iters"] * last)}


def _qwen3(*sizes: int, ffn: int, lr: float, **more: Any) -> dict[str, Any]:
    """Yang et al. 2025, "Qwen3 Technical Report", table 1, and the models' config.json.

    Heads of 128 columns, eight groups, normalized queries and keys. The first stage of its training
    reads sequences of 4096 tokens. Rates and batches are not published; these are Llama's.
    """
    more |= {"qk_layernorm": True, "rotary_base": 1e6, "layernorm_epsilon": 1e-6}
    more |= {"kv_channels": 128} if sizes[1] != 128 * sizes[2] else {}
    return _llama(*sizes, ffn=ffn, groups=8, tokens=1e12, lr=lr, **more)


def _cpu(*sizes: int, lr: float, steps: int) -> dict[str, Any]:
    """Return a network and recipe for CPUs, the ones that `meshwright quickstart` chooses among.

    They were compared at equal time on two cores: Muon, the network of Qwen 3, small batches and
    few wide heads helped most.
    """
    out: dict[str, Any] = dict(zip(SIZES, sizes, strict=True)) | {"swiglu": True, "qk_layernorm": True}
    out |= {"position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False}
    out |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "optimizer": "muon", "adam_beta2": 0.98}
    out |= {"train_iters": steps, "lr": lr, "min_lr": lr / 100, "lr_warmup_fraction": 0.02, "weight_decay": 0.1}
    return out | {"log_interval": 20, "eval_interval": 500, "eval_iters": 20}


FAMILIES: tuple[Family, ...] = (
    Family(
        "For CPUs: measured with Meshwright on two cores, see docs/presets.md",
        8192,
        {
            "tiny": _cpu(6, 256, 4, 256, 8, 8, lr=6e-3, steps=2000),
            "mini": _cpu(6, 384, 6, 256, 16, 16, lr=4e-3, steps=4000),
            "small": _cpu(8, 512, 8, 512, 8, 32, lr=3e-3, steps=5000),
        },
    ),
    Family(
        'GPT-2: Radford et al. 2019, "Language Models are Unsupervised ...", table 2',
        50257,
        {
            "gpt2-117m": _gpt2(12, 768, 12),
            "gpt2-345m": _gpt2(24, 1024, 16),
            "gpt2-762m": _gpt2(36, 1280, 20),
            "gpt2-1.5b": _gpt2(48, 1600, 25),
        },
    ),
    Family(
        'GPT-3: Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1',
        50257,
        {
            "gpt3-125m": _gpt3(12, 768, 12, 256, 6e-4),
            "gpt3-350m": _gpt3(24, 1024, 16, 256, 3e-4),
            "gpt3-760m": _gpt3(24, 1536, 16, 256, 2.5e-4),
            "gpt3-1.3b": _gpt3(24, 2048, 16, 512, 2e-4),  # the paper's 24 heads of 128 do not make up 2048
            "gpt3-2.7b": _gpt3(32, 2560, 32, 512, 1.6e-4),
            "gpt3-6.7b": _gpt3(32, 4096, 32, 1024, 1.2e-4),
            "gpt3-13b": _gpt3(40, 5120, 40, 1024, 1.0e-4),  # the paper's 5140 is not a multiple of its 40 heads
            "gpt3-175b": _gpt3(96, 12288, 96, 1536, 0.6e-4),
        },
    ),
    Family(
        'SmolLM2: Allal et al. 2025, "SmolLM2: When Smol Goes Big", and model cards',
        49152,
        {
            "smollm2-135m": _smollm2(30, 576, 9, 2048, 8, 512, ffn=1536, groups=3, tokens=2e12, **_SMALL_SMOLLM2)
            | {"init_method_std": 1 / 24},
            "smollm2-360m": _smollm2(32, 960, 15, 2048, 4, 512, ffn=2560, groups=5, tokens=4e12, **_SMALL_SMOLLM2),
            "smollm2-1.7b": _smollm2(
                24, 2048, 32, 2048, 1, 1024, ffn=8192, groups=32, tokens=11e12, lr=5e-4, last=0.1, rotary_base=130_000.0
            ),
        },
    ),
    Family(
        'TinyLlama: Zhang et al. 2024, "TinyLlama: An Open-Source Small Language Model"',
        32000,
        {"tinyllama-1.1b": _llama(22, 2048, 32, 2048, 1, 1024, ffn=5632, groups=4, tokens=3e12, lr=4e-4, **_UNTIED)},
    ),
    Family(
        'Llama 2: Touvron et al. 2023, "Llama 2: Open Foundation ... Models", 2.2',
        32000,
        {"llama2-7b": _llama(32, 4096, 32, 4096, 1, 1024, ffn=11008, groups=32, tokens=2e12, lr=3e-4, **_UNTIED)},
    ),
    Family(
        'Llama 3: Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3',
        128256,
        {
            # Cards give the shapes of 3.2, which is pruned and distilled; the recipe is that of 8B.
            "llama3.2-1b": _llama(16, 2048, 32, 8192, 1, 512, ffn=8192, tokens=9e12, **_LLAMA3),
            "llama3.2-3b": _llama(28, 3072, 24, 8192, 1, 512, ffn=8192, tokens=9e12, **_LLAMA3),
            "llama3-8b": _llama(32, 4096, 32, 8192, 1, 512, ffn=14336, tokens=15e12, **_LLAMA3, **_UNTIED),
        },
    ),
    Family(
        'Qwen3: Yang et al. 2025, "Qwen3 Technical Report", table 1; recipe: Llama\'s',
        151936,
        {
            "qwen3-0.6b": _qwen3(28, 1024, 16, 4096, 1, 512, ffn=3072, lr=4e-4),
            "qwen3-1.7b": _qwen3(28, 2048, 16, 4096, 1, 512, ffn=6144, lr=4e-4),
            "qwen3-4b": _qwen3(36, 2560, 32, 4096, 1, 1024, ffn=9728, lr=3e-4),
            "qwen3-8b": _qwen3(36, 4096, 32, 4096, 1, 1024, ffn=12288, lr=3e-4, **_UNTIED),
        },
    ),
    Family(
        "Ascend ModelZoo, GPT-2_for_PyTorch: test/train_full_8p.sh",
        50257,
        {
            "ascend-345m": _ascend(24, 1024, 16, 1024, 4, 16, lr=1.5e-4, min_lr=1.5e-5),
            "ascend-1.3b": _ascend(24, 2048, 16, 1024, 8, 32, lr=2e-4, min_lr=2e-5),
            "ascend-2.7b": _ascend(32, 2560, 32, 2048, 8, 32, lr=1.6e-4, min_lr=1.6e-5),
            "ascend-3.7b": _ascend(32, 3072, 32, 2048, 4, 16, lr=1.2e-4, min_lr=1.2e-5),
            "ascend-345m-without-mp": _ascend(
                24, 1024, 16, 1024, 8, 64, lr=1.5e-4, min_lr=1e-5, recompute_granularity=None, loss_scale=65536.0
            ),
        },
        is_script=True,
    ),
    Family(
        "OneFlow-Benchmark, LanguageModeling/GPT: examples/*.sh",
        50257,
        {
            "oneflow-117m": _oneflow(12, 768, 12, 1024, 8, 8),  # pretrain_117M.sh
            "oneflow-345m": _oneflow(24, 1024, 16, 1024, 8, 8),  # pretrain_345M.sh
            "oneflow-16x1536": _oneflow(16, 1536, 16, 2048, 8, 16),  # pretrain_1n8d_2x4x1_16_1536x16.sh
            "oneflow-24x2304": _oneflow(24, 2304, 24, 2048, 8, 512),  # distribute_pretrain_4n8d_2x4x4_512_2304x24.sh
        },
        is_script=True,
    ),
)

# Other names in use.
ALIASES = {"gpt2-124m": "gpt2-117m", "gpt2-355m": "gpt2-345m", "gpt2-774m": "gpt2-762m", "gpt2-1558m": "gpt2-1.5b"}
PRESETS: dict[str, dict[str, Any]] = {name: values for family in FAMILIES for name, values in family.presets.items()}
PRESETS |= {alias: PRESETS[name] for alias, name in ALIASES.items()}


def require_preset(name: str, where: str = "") -> None:
    """Refuse a name that no preset has; suggest one."""
    if name not in PRESETS:
        hint = did_you_mean(name.lower(), PRESETS, 0.7) or "; `meshwright presets` lists them"
        raise UserError(f"{where}no preset {name!r}{hint}")


def family_of(name: str) -> Family:
    return next(f for f in FAMILIES if ALIASES.get(name, name) in f.presets)


def fitted(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's settings; a length given otherwise stretches or shortens its schedule.

    Without that, a run of 2,000 steps would end inside the warm-up of one of 320,000.
    """
    out, steps = dict(PRESETS[name]), PRESETS[name]["train_iters"]
    parts = {n: out[n] / steps for n in ("lr_decay_iters", "lr_wsd_decay_iters") if n in out}
    units = ("iters", "samples", "tokens")
    unit = next((u for u in units if given.get(f"train_{u}")), None)
    if not unit or family_of(name).is_script:
        return out
    length, in_steps = given[f"train_{unit}"], unit == "iters"
    if unit == "tokens":
        length //= given.get("seq_length") or out["seq_length"]
    for part, share in parts.items():
        del out[part]
        if not any(part.replace("iters", u) in given for u in units):
            out[part if in_steps else part.replace("iters", "samples")] = max(1, round(length * share))
    if not in_steps:
        del out["train_iters"]
    return out
