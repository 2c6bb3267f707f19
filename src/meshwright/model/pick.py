"""Which block runs: the fastest that this configuration and this device allow, and why, for the log."""

from __future__ import annotations

import torch
from torch import nn

from meshwright import device as devices
from meshwright.model.attention import is_reference
from meshwright.model.gpt import Block, Options
from meshwright.settings.schema import Model, Precision, Training


def options(t: Training, m: Model, p: Precision, device: torch.device) -> Options:
    """How the network is run on this device."""
    wanted = devices.has_kernels(device) if t.compile == "auto" else t.compile == "on"
    compiled = wanted and not is_reference(m.attention_impl, m.attention_dropout, device)
    fp32_residual = p.fp32_residual_connection and (p.fp16 or p.bf16)
    return Options(t.recompute, t.recompute_method, t.recompute_num_layers, fp32_residual, compiled)


def pick(m: Model, device: torch.device, compiled: bool = False) -> tuple[type[Block], str]:
    """The block class and the reason. Every other block must equal `Block`, which is the plain twin."""
    if m.attention_impl == "reference":
        attention = "reference attention, as asked for"
    elif is_reference(m.attention_impl, m.attention_dropout, device):
        attention = "reference attention, whose dropout depends on no micro-batch"
    else:
        attention = "torch's fused attention"
    how = "compiled" if compiled else "plain"
    return Block, f"{how} PyTorch block on {device.type} with {attention}"


def compile_blocks(model: nn.Module) -> None:
    """Each block by itself: a quarter of the time that compiling the whole network takes, for the same speed.

    All blocks share their graphs, since nothing in them depends on the layer's number: one for the first block, which has
    no residual yet, one for the others, and these again without gradients.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for block in model.h.children() if hasattr(model, "h") else [model]:  # type: ignore[union-attr]
        # Not block.compile(): that would take in hooks, in which weights are waited for or gathered.
        block.forward = torch.compile(block.forward, dynamic=False)
