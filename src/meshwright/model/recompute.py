"""What attention computed in a forward pass, for the layers that are recomputed.

A fused kernel that drops at random draws from the device's generator. Run again within a CUDA
graph, where nothing can be seeded, it would drop others. So its results are kept, two bytes for
each element of the residual stream, and only what is around it is recomputed. torch's selective
checkpointing would do the same, but for every operation of the layer, which costs the host more
than the kernels take.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from meshwright.base import device as devices

if TYPE_CHECKING:
    from meshwright.model.positions import Shared

aten = torch.ops.aten
KERNELS = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)


class AttentionResults:
    """The results of attention in some layers, in their order."""

    def __init__(self) -> None:
        self.results: deque[Any] = deque()
        self.is_again = False

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs layers with these results at hand, in both passes."""

        def run_with_results(
            residual: Tensor | None, pending: Tensor, shared: Shared, *rest: Any
        ) -> Any:
            shared.kept = self
            try:
                return run(residual, pending, shared, *rest)
            finally:  # the second pass ends early, once it has all that the backward pass needs
                shared.kept = None
                self.end_pass(devices.is_capturing(pending.device))

        return run_with_results

    @property
    def has_all(self) -> bool:
        """Whether this is the second pass, and the first one has kept results."""
        return self.is_again and bool(self.results)

    def used(self) -> contextlib.AbstractContextManager[Any]:
        """Keep the results in the first pass; in the second, hand them out instead of computing."""
        return _Kernels(self)

    def end_pass(self, is_captured: bool) -> None:
        """End a pass over the layers; refuse one in a CUDA graph that would draw a second time."""
        if is_captured and not self.is_again and not self.results:
            raise RuntimeError(
                "this attention kernel would draw other dropout when it is recomputed"
            )
        self.is_again = True

    def of(self, compute: Callable[[], Any]) -> Any:
        """Return the results of a kernel, from the first pass if this is the second."""
        if self.is_again:
            return self.results.popleft()
        results = compute()
        # Without autograd's history, which belongs to the tensors of this pass.
        self.results.append(tree_map_only(Tensor, Tensor.detach, results))
        return results


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces torch's attention kernels, below autograd, which records them as usual."""

    def __init__(self, kept: AttentionResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def compute() -> Any:
            return function(*args, **(kwargs or {}))

        return self.kept.of(compute) if function in KERNELS else compute()
