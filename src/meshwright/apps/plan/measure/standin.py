"""A stand-in for Triton on machines that lack it: its kernels can be imported, but not run.

A measurement launches no kernel, so that all it needs is functions with `kernel[grid](...)` and
the names that their modules use when they are imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from meshwright.kernels import triton as kernels

NAMES = (
    "triton",
    "triton.language",
    "triton.runtime",
    "triton.runtime.jit",
    "triton.tools",
    "triton.tools.tensor_descriptor",
)


class KernelInterface:
    """A function for a GPU, as much of it as a measurement asks for."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.__name__ = fn, fn.__name__
        self.arg_names = list(inspect.signature(fn).parameters)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        raise NotImplementedError(f"{self.__name__} needs Triton, which this machine lacks")


class Descriptor:
    """A tensor as a kernel reads it block by block."""

    def __init__(self, base: Any, *_: Any) -> None:
        self.base = base

    from_tensor = classmethod(lambda cls, x, block: cls(x, block))


class Anything:
    """The value of any name of triton.language."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs else self


class Language(ModuleType):
    """triton.language, whose names are annotations or used within kernels."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    return KernelInterface if fn is None else KernelInterface(fn)


@contextlib.contextmanager
def triton_or_standin() -> Iterator[Any]:
    """Yield Triton's module or a stand-in; modules that imported the latter are forgotten."""
    if importlib.util.find_spec("triton") is not None:
        import triton.runtime.jit

        yield triton
        return
    modules = {
        name: (Language if name.endswith("language") else ModuleType)(name) for name in NAMES
    }
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    vars(modules["triton"])["jit"] = jit
    vars(modules["triton.runtime.jit"])["KernelInterface"] = KernelInterface
    vars(modules["triton.tools.tensor_descriptor"])["TensorDescriptor"] = Descriptor
    with known(modules):  # to our kernels alone: torch would take it for the real one
        importers = {name: importlib.import_module(name) for name in names_of_kernels()}
    for name in importers:
        del sys.modules[name]
    with known(importers):
        yield modules["triton"]


@contextlib.contextmanager
def known(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Let these modules be found in this block alone."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


def names_of_kernels() -> list[str]:
    return [
        f"{kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)
    ]
