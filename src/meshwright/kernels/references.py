"""Choose between a Triton kernel and its plain reference, and set the reference's precision.

A function in this folder computes with torch alone. `@reference` replaces it, for tensors on a GPU
that Triton compiles for, by the function of the same task in kernels/triton/, which is imported
when it first runs: a machine without Triton never asks for it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from meshwright.base import device as devices

P = ParamSpec("P")
R = TypeVar("R")


def is_triton(x: Tensor) -> bool:
    """Return whether the Triton kernel runs; all of them compute in float32."""
    return devices.has_kernels(x.device) and x.dtype is not torch.float64


def _first(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def launcher(kernel: str) -> Callable[..., Any]:
    """Return a function of kernels/triton/, such as "norm.forward"."""
    # Imported here: a machine without Triton never comes to this line.
    module, _, name = kernel.partition(".")
    return getattr(importlib.import_module(f"meshwright.kernels.triton.{module}"), name)  # type: ignore[no-any-return]


def reference(
    kernel: str, of: Callable[..., Tensor] = _first
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let `kernel`, such as "norm.forward" of kernels/triton/, run where there is Triton.

    `of` takes the arguments and returns the tensor whose device and format decide; without it, that
    is the first argument. The decorated function stays reachable as the attribute `plain`.
    """

    def decorate(plain: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(plain)
        def choose(*args: P.args, **kwargs: P.kwargs) -> R:
            if not is_triton(of(*args, **kwargs)):
                return plain(*args, **kwargs)
            return launcher(kernel)(*args, **kwargs)  # type: ignore[no-any-return]

        choose.plain = plain  # type: ignore[attr-defined]
        return choose

    return decorate


def upcast(x: Tensor) -> Tensor:
    """Return x in float32; float64 stays."""
    return x if x.dtype is torch.float64 else x.float()
