"""Keep torch from importing its compiler before something is compiled.

torch imports it at the first call of each function that it leaves uncompiled, such as the step of
an optimizer: a second and 140 MB in every process of a run that compiles nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind", bound=type[torch.optim.Optimizer])


def spare(function: Callable[..., Any]) -> None:
    """Let calls of a function that torch leaves uncompiled import nothing.

    torch keeps the uncompiled form in an attribute, and imports its compiler if it is missing. A
    torch that does it otherwise only starts more slowly.
    """
    plain = inspect.unwrap(function)

    def call(*args: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return plain(*args, **named)
        vars(plain).pop("__dynamo_disable", None)  # the next call makes it as torch does
        return function(*args, **named)

    # A form that torch has already made stays.
    vars(plain).setdefault("__dynamo_disable", call)


def spare_step(kind: Kind) -> Kind:
    """Return the optimizer without the wrapper of its step, which imports the compiler.

    What the wrapper does, namely turning gradients off, is left to the caller.
    """
    return type(kind.__name__, (kind,), {"step": inspect.unwrap(kind.step)})  # type: ignore[return-value]
