"""Which block runs: the fastest that this configuration and this device allow, and why, for the log."""

from __future__ import annotations

import torch

from meshwright import config
from meshwright.model.gpt import Block


def pick(model: config.Model, device: torch.device) -> tuple[type[Block], str]:
    """The block class and the reason. Every other block must equal `Block`, which is the plain twin."""
    if model.attention_impl == "reference":
        attention = "reference attention, as asked for"
    elif model.attention_impl == "auto" and model.attention_dropout > 0 and device.type == "cpu":
        attention = "reference attention, whose dropout depends on no micro-batch"
    else:
        attention = "torch's scaled_dot_product_attention"
    return Block, f"plain PyTorch block on {device.type} with {attention}"
