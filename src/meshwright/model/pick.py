"""Choice of the block class: the fastest for this configuration and device, and why."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.config.schema import Model, Precision, Training
from meshwright.model.attention import compile_each_shape
from meshwright.model.fused import FusedBlock
from meshwright.model.gpt import Block, Options
from meshwright.model.kind import block_kind, uses_reference


def options(t: Training, m: Model, p: Precision, device: torch.device) -> Options:
    """Return how to run the network on this device."""
    kind = block_kind(t, m, p, device.type)
    return Options(
        recompute=t.recompute_granularity,
        recompute_method=t.recompute_method,
        recompute_layers=t.recompute_num_layers,
        inputs_on_host=t.checkpoint_in_cpu,
        fp32_residual=p.fp32_residual_connection and (p.fp16 or p.bf16),
        compiled=kind == "compiled",
        fused=kind == "fused",
    )


def pick(m: Model, device: torch.device, options: Options) -> tuple[type[Block], str]:
    """Return the block class, which must equal the plain `Block`, and a description for the log."""
    if m.attention_impl == "reference":
        attention = "reference attention, as asked for"
    elif uses_reference(m.attention_impl, m.attention_dropout, device.type):
        attention = "reference attention, whose dropout depends on no micro-batch"
    else:
        attention = "fused attention"
    if options.fused:
        return FusedBlock, f"block of fused kernels on {device.type} with {attention}"
    how = "compiled" if options.compiled else "plain"
    return Block, f"{how} PyTorch block on {device.type} with {attention}"


def compile_blocks(model: nn.Module) -> None:
    """Compile each block separately: a quarter of the network's compile time, the same speed.

    All blocks share their graphs because nothing in them depends on the layer's number: one graph
    for the first block, which has no residual yet, one for the others, and both without gradients.
    """
    for block in model.h.children() if hasattr(model, "h") else [model]:  # type: ignore[union-attr]
        # block.compile() would include the hooks that wait for weights or gather them.
        block.forward = compile_each_shape(block.forward)
