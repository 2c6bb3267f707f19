"""Choice of the linear maps that multiply in fp8: the four of each layer, but not attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from meshwright import device as devices
from meshwright.errors import UserError
from meshwright.kernels.fp8 import Recipe, Scales
from meshwright.settings.schema import Precision

MAPS = ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")


def require(p: Precision, device: torch.device) -> None:
    """Refuse fp8 where no matrix unit has it."""
    if p.fp8_format and not devices.has_fp8(device):
        raise UserError(
            f"--fp8-format {p.fp8_format} needs a GPU of NVIDIA with fp8 (compute capability 8.9 or more), but this "
            f"run is on {devices.name(device)}; leave it out"
        )


def attach(parts: Sequence[Any], p: Precision, device: torch.device) -> Scales | None:
    """Let these parts of a GPT multiply as `p` says; return the scales, None without fp8."""
    if not p.fp8_format:
        return None
    found = {
        f"h.{i}.{name}": block.get_submodule(name)
        for part in parts
        for i, block in part.h.items()
        if p.multiplies_fp8(int(i), part.layers)
        for name in MAPS
    }
    is_hybrid, uses_max = p.fp8_format == "hybrid", p.fp8_amax_compute_algo == "max"
    scales = Scales(Recipe(is_hybrid, p.fp8_margin, p.fp8_amax_history_len, uses_max), device)
    for name, product in scales.add(found).items():
        # Tensor parallelism has replaced the product by one that sums or gathers around another.
        around = vars(found[name]).get("product")
        found[name].product = product if around is None else functools.partial(around, by=product)
    return scales
