"""THE table of values of the network's settings, which tests at random and in lists draw from.

The fuzz draws from it on CPUs and on GPUs, and drawn plans and the decoder's tests take each group
that they have no list of their own for. A new option of the network is one group here.
"""

from __future__ import annotations

from meshwright.config import flags
from meshwright.config.schema import Model, TrainConfig

Chances = dict[str, int]  # flags -> weight
VALUES: dict[str, Chances] = {
    "layers": {
        f"--num-layers {n}": w for n, w in {1: 1, 2: 4, 3: 2, 4: 5, 5: 1, 6: 1, 8: 1}.items()
    },
    "heads": {
        "--hidden-size 16 --num-attention-heads 2": 3,
        "--hidden-size 32 --num-attention-heads 8": 5,
        "--hidden-size 24 --num-attention-heads 6": 2,
        "--hidden-size 24 --num-attention-heads 3": 1,
        "--hidden-size 15 --num-attention-heads 3": 1,
        "--hidden-size 20 --num-attention-heads 5 --kv-channels 4": 1,
        "--hidden-size 10 --num-attention-heads 4 --kv-channels 6": 1,
        "--hidden-size 16 --num-attention-heads 1": 1,
    },
    "groups": {
        "": 6,
        "--group-query-attention": 1,
        "--num-query-groups 2": 3,
        "--num-query-groups 3": 1,
        "--num-query-groups 4": 2,
    },
    "ffn": {"": 4, "--ffn-hidden-size 24": 2, "--ffn-hidden-size 36": 1, "--ffn-hidden-size 20": 1},
    "activation": {
        "": 5,
        "--no-bias-gelu-fusion": 1,
        "--no-bias-gelu-fusion --openai-gelu": 1,
        "--swiglu": 3,
        "--squared-relu": 1,
        "--glu-activation geglu": 1,
        "--glu-activation reglu": 1,
        "--glu-activation liglu": 1,
    },
    "position": {
        "": 4,
        "--max-position-embeddings 40": 1,
        "--position-embedding-type rope": 3,
        "--position-embedding-type rope --rotary-percent 0.5 --rotary-base 500": 2,
        "--position-embedding-type rope --rope-scaling linear --rope-scaling-factor 2": 1,
        "--position-embedding-type rope --rope-scaling llama3 --original-max-position-embeddings 8 "
        "--rope-low-freq-factor 0.3 --rope-high-freq-factor 0.8": 1,
        "--position-embedding-type rope --rope-scaling yarn --original-max-position-embeddings 8 "
        "--beta-fast 0.9 --beta-slow 0.1 --rope-attention-factor 1.5": 1,
        "--position-embedding-type alibi": 2,
        "--position-embedding-type none": 1,
    },
    "window": {"": 4, "--window-size 3,0": 1, "--window-size 6 --window-attn-skip-freq 2": 1},
    "norm": {
        "": 4,
        "--normalization RMSNorm": 3,
        "--apply-layernorm-1p": 1,
        "--disable-layernorm-bias": 1,
        "--normalization RMSNorm --apply-layernorm-1p": 1,
        "--layernorm-epsilon 1e-3": 1,
    },
    "norm of heads": {"": 2, "--qk-layernorm": 1},
    "bias": {"": 3, "--disable-bias-linear": 1, "--disable-bias-linear --add-qkv-bias": 1},
    "norm of embeddings": {"": 3, "--embed-layernorm": 1},
    "residual": {
        "": 3,
        "--apply-residual-connection-post-layernorm": 1,
        "--use-parallel-residual": 1,
    },
    "initial": {
        "": 3,
        "--init-method-xavier-uniform": 1,
        "--init-method-std 0.2": 2,
        "--init-method-std 0.2 --zero-init-projections": 1,
    },
    "carried over": {
        "": 6,
        "--mup-base-hidden-size 8": 1,
        "--mup-base-num-layers 1": 1,
        "--mup-base-hidden-size 5 --mup-base-num-layers 3": 1,
    },
    "logits": {"": 3, "--final-logit-softcapping 2": 1},
    "head": {"": 2, "--untie-embeddings-and-output-weights": 1},
    "sequence": {
        "--seq-length 8": 4,
        "--seq-length 16": 3,
        "--seq-length 12": 3,
        "--seq-length 9": 1,
    },
}
# The same groups where a GPU has other sizes, or another path for the value.
ON_GPU: dict[str, Chances] = {
    "heads": {
        "--hidden-size 64 --num-attention-heads 4": 4,
        "--hidden-size 32 --num-attention-heads 2": 3,
        "--hidden-size 128 --num-attention-heads 2": 2,
        "--hidden-size 48 --num-attention-heads 3": 1,
    },
    "groups": {"": 4, "--num-query-groups 2": 1},
    "ffn": {"": 4, "--ffn-hidden-size 96": 1},
    "position": {
        "": 8,
        "--position-embedding-type rope": 6,
        "--position-embedding-type rope --rotary-percent 0.5 --rotary-base 500": 2,
        "--position-embedding-type alibi": 1,
        "--position-embedding-type none": 1,
    },
    "window": {"": 24, "--window-size 3,0": 1},
    "norm of heads": {"": 8, "--qk-layernorm": 1},
    "residual": {
        "": 8,
        "--apply-residual-connection-post-layernorm": 1,
        "--use-parallel-residual": 1,
    },
}


def words_beyond(listed: set[str]) -> dict[str, list[str]]:
    """Return the flags of each group that a test has no list of its own for."""
    return {name: list(chances) for name, chances in VALUES.items() if name not in listed}


def models_beyond(listed: set[str]) -> dict[str, Model]:
    """Return a network for each value of these groups, named by its flags."""
    size = "--num-layers 2 --hidden-size 16 --num-attention-heads 2".split()
    return {
        words: flags.parse_settings(
            TrainConfig, [*size, *words.split()], "meshwright test", check=False
        ).config.model
        for group in words_beyond(listed).values()
        for words in group
        if words
    }
