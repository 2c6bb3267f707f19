"""Choice of the linear maps that multiply in fp8: the four of each layer, but not attention.

A block of fused kernels then uses fp8_fused.py, unless tensor parallelism has put collectives
around its products.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.base import device as devices
from meshwright.config.matrices import matrices_of
from meshwright.config.problem import SettingsError
from meshwright.config.schema import Precision
from meshwright.kernels.fp8 import Fp8Product, Recipe, Scales
from meshwright.kernels.fp8_fused import Fp8Linear, norm_heads, norm_mlp
from meshwright.kernels.norm import Operands
from meshwright.model.fused import FusedBlock, weights_of
from meshwright.model.positions import Shared


def require_fp8(p: Precision, device: torch.device) -> None:
    """Refuse fp8 where no matrix unit has it."""
    if p.fp8_format and not devices.has_fp8(device):
        raise SettingsError(
            f"{{fp8_format={p.fp8_format}}} needs an NVIDIA GPU with fp8 (compute capability 8.9 or more), but this "
            f"run is on {devices.device_name(device)}; leave it out"
        )


def attach_fp8(parts: Sequence[Any], p: Precision, device: torch.device) -> Scales | None:
    """Let these parts of a GPT multiply as `p` says; return the scales, None without fp8."""
    if not p.fp8_format:
        return None
    found = {
        f"h.{i}.{name}": block.get_submodule(name)
        for part in parts
        for i, block in part.h.items()
        if p.multiplies_fp8(int(i), part.layers)
        for name, matrix in matrices_of(part.m).items()
        if matrix.fp8
    }
    recipe = Recipe(
        p.fp8_format == "hybrid",
        p.fp8_margin,
        p.fp8_amax_history_len,
        p.fp8_amax_compute_algo == "max",
        p.fp8_recipe == "tensorwise",
    )
    scales = Scales(recipe, device)
    for name, product in scales.add(found).items():
        # Tensor parallelism may have put a product here that sums or gathers around another.
        around = vars(found[name]).get("product")
        found[name].product = product if around is None else functools.partial(around, by=product)
    # The fused kernels write a norm's output in fp8 only. A block whose residual stream continues
    # with that output (`post_norm`) needs it in full, so its products stay apart.
    for part in parts:
        for block in part.h.values():
            if isinstance(block, FusedBlock) and not block.post_norm:
                fuse(block)
    return scales


def fuse(block: Any) -> None:
    """Let a block compute norms, activation and heads with the fp8 products beside them."""
    if isinstance(block.attn.qkv.product, Fp8Product):
        block.enter = functools.partial(enter, block)
    if isinstance(block.mlp.fc.product, Fp8Product):
        block.transform = functools.partial(transform, block)


def enter(
    block: FusedBlock, residual: Tensor | None, pending: Tensor, rows: Tensor | None, shared: Shared
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Replace FusedBlock.enter."""
    qkv = block.attn.qkv
    operands = Operands(residual, pending, None, rows, block.p)
    return norm_heads(
        operands,
        weights_of(block.ln_1),
        fp8_linear(qkv),
        block.sizes(len(qkv.weight)),
        shared.rotation,
        block.head_norms(),
    )


def transform(
    block: FusedBlock,
    residual: Tensor | None,
    pending: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Replace FusedBlock.transform."""
    mlp = block.mlp
    operands = Operands(residual, pending, bias, rows, block.p)
    return norm_mlp(
        operands, weights_of(block.ln_2), mlp.activation, fp8_linear(mlp.fc), fp8_linear(mlp.proj)
    )


def fp8_linear(layer: Any) -> Fp8Linear:
    return Fp8Linear(layer.product, layer.weight, layer.bias)
