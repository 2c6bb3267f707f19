"""The kind of block that computes a layer, from settings alone. No torch."""

from __future__ import annotations

from typing import Literal

from meshwright.base import device as devices
from meshwright.config.fast_paths import FUSED_BLOCK, unknown_to
from meshwright.config.schema import Model, Precision, Training

BlockKind = Literal["fused", "compiled", "plain"]


def uses_reference(impl: str, p: float, kind: str) -> bool:
    """Whether the reference runs.

    On a CPU fused dropout is no faster, and would change with the size of the micro-batch.
    """
    return impl == "reference" or (impl == "auto" and p > 0 and kind == "cpu")


def block_kind(t: Training, m: Model, p: Precision, kind: str) -> BlockKind:
    """Return the fastest kind of block on a device of this kind, such as cuda."""
    has_kernels = kind == devices.NVIDIA

    # Fused kernels come first: they start without a compilation.
    is_fused = t.fused_kernels == "on"
    if t.fused_kernels == "auto":
        is_known = not unknown_to(FUSED_BLOCK, m)
        is_fused = has_kernels and p.dtype != "float64" and is_known and t.compile != "on"
    if is_fused:
        return "fused"

    # The reference exists to be read and compared with, so it runs as it is written.
    is_compiled = has_kernels if t.compile == "auto" else t.compile == "on"
    if is_compiled and not uses_reference(m.attention_impl, m.attention_dropout, kind):
        return "compiled"
    return "plain"
