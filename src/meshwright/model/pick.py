"""Choice of the block class: the fastest for this configuration and device, and why."""

from __future__ import annotations

import torch
from torch import nn

from meshwright import device as devices
from meshwright.model.attention import is_reference
from meshwright.model.gpt import Block, Options
from meshwright.settings.schema import Model, Precision, Training


def options(t: Training, m: Model, p: Precision, device: torch.device) -> Options:
    """Return how to run the network on this device."""
    wanted = devices.has_kernels(device) if t.compile == "auto" else t.compile == "on"
    compiled = wanted and not is_reference(m.attention_impl, m.attention_dropout, device)
    fp32_residual = p.fp32_residual_connection and (p.fp16 or p.bf16)
    recompute = (t.recompute, t.recompute_method, t.recompute_num_layers, t.checkpoint_in_cpu)
    return Options(*recompute, fp32_residual, compiled)


def pick(m: Model, device: torch.device, compiled: bool = False) -> tuple[type[Block], str]:
    """Return the block class, which must equal the plain `Block`, and a description for the log."""
    if m.attention_impl == "reference":
        attention = "reference attention, as asked for"
    elif is_reference(m.attention_impl, m.attention_dropout, device):
        attention = "reference attention, whose dropout depends on no micro-batch"
    else:
        attention = "torch's fused attention"
    how = "compiled" if compiled else "plain"
    return Block, f"{how} PyTorch block on {device.type} with {attention}"


def compile_blocks(model: nn.Module) -> None:
    """Compile each block separately: a quarter of the network's compile time, the same speed.

    All blocks share their graphs because nothing in them depends on the layer's number: one graph
    for the first block, which has no residual yet, one for the others, and both without gradients.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for block in model.h.children() if hasattr(model, "h") else [model]:  # type: ignore[union-attr]
        # block.compile() would include the hooks that wait for weights or gather them.
        block.forward = torch.compile(block.forward, dynamic=False)
