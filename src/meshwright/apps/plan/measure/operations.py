"""What a step executes, operation by operation: FLOPs, bytes moved, and what the host does for it.

`Recorder` is told of each operation of a step that runs on meta tensors, and counts equal ones. An
operation of torch touches the tensors that it takes and makes; a view touches nothing. What a
Triton kernel reads and writes is read from its source: the parameters whose addresses reach
`tl.load`, and `tl.store` or an atomic operation. So a new kernel needs no declaration.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Kind = Literal["product", "attention", "pass", "host"]
Host = Literal["view", "torch", "triton", "node", "collective"]


class Heads(NamedTuple):
    """What decides the speed of an attention kernel."""

    keys: int  # that a query meets
    width: int  # of a head
    windowed: bool
    draws: bool  # whether it has dropout
    is_backward: bool


class Operation(NamedTuple):
    """One call of a kernel, or work of the host alone."""

    kind: Kind
    name: str
    host: Host  # what the host does to call it: base/device_profiles.py has the seconds
    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = ""  # of a product's factors
    heads: Heads | None = None


Operations = Mapping[Operation, float]  # how often each is executed

# Operations that make or change a tensor without a kernel, beside views.
NO_KERNEL = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view lift_fresh set_ resize_ "
    "_local_scalar_dense record_stream".split()
)
PRODUCTS = frozenset("mm addmm bmm baddbmm addmm_ baddbmm_ _scaled_mm _int_mm".split())
# Operations that read as much of their first tensor as they write, at the places of an index.
GATHERS = frozenset("embedding index index_select gather".split())
SCATTERS = frozenset("index_put index_put_ index_add index_add_ scatter scatter_ scatter_add scatter_add_".split())
OVERWRITES = frozenset("copy_ fill_ zero_ normal_ uniform_ _foreach_copy_ _foreach_zero_".split())
SORT_PASSES = 8  # over keys and values, by a radix sort of 32 bits
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Recorder:
    """Counts a step's operations by section, as an Account reports them."""

    def __init__(self) -> None:
        self.sections: dict[Hashable, Counter[Operation]] = defaultdict(Counter)
        self.node: Any = None  # of the backward pass, in which the last operation ran

    def executed(self, func: Any, args: Any, kwargs: Any, out: Any, section: Hashable) -> None:
        """Count an operation of torch."""
        self.count_node(section)
        self.sections[section][operation_of(func, args, kwargs or {}, out)] += 1

    def launched(self, kernel: Any, args: Sequence[Any], section: Hashable) -> None:
        """Count a launch of a Triton kernel."""
        self.count_node(section)
        self.sections[section][launch_of(kernel, args)] += 1

    def moved(self, name: str, tensors: Iterable[Tensor], section: Hashable) -> None:
        """Count a kernel of torch that has none for meta tensors, and touches these tensors once."""
        self.sections[section][Operation("pass", name, "torch", bytes=sum(map(size_of, tensors)))] += 1

    def multiplied(self, a: Tensor, b: Tensor, out: Tensor, section: Hashable) -> None:
        """Count a product of matrices that torch does not know on the meta device."""
        self.sections[section][product_of("_scaled_mm", a, b, [out])] += 1

    def attended(self, q: Tensor, k: Tensor, draws: bool, is_backward: bool, section: Hashable) -> None:
        """Count a causal attention kernel with q [B, heads, T, width] and k [B, groups, keys, width]."""
        self.sections[section][attention_of(q, k, draws, is_backward)] += 1

    def sent(self, name: str, section: Hashable) -> None:
        """Count a collective or message, whose seconds on the links are those of traffic.py."""
        self.sections[section][Operation("host", name, "collective")] += 1

    def count_node(self, section: Hashable) -> None:
        """Count a node of the backward pass when its first operation runs."""
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        if node is not None and node is not self.node:
            self.sections[section][Operation("host", "node", "node")] += 1
        self.node = node


def extended(few: Operations, more: Operations, units: float) -> Counter[Operation]:
    """Return the operations of a stage with so many units of layers more than `few` has.

    `more` are those with one unit more. Operations whose sizes depend on the number of layers, as
    those of flat buffers, then count negatively in one size: their sums are right.
    """
    out: Counter[Operation] = Counter()
    for operation in {**few, **more}:
        count = few.get(operation, 0)
        out[operation] = count + units * (more.get(operation, 0) - count)  # type: ignore[assignment]
    return out


# Operations of torch


def operation_of(func: Any, args: Any, kwargs: Any, out: Any) -> Operation:
    """Return the operation of a call that the dispatcher made."""
    name = func._schema.name.removeprefix("aten::")
    taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    is_on_host = all(x.device.type == "cpu" for x in [*taken, *made])
    if func.is_view or name in NO_KERNEL or is_on_host:
        return Operation("host", name, "view")
    if name in PRODUCTS:
        return product_in(name, args, made)
    return Operation("pass", name, "torch", bytes=bytes_of(func, name, args, kwargs, taken, made))


def product_in(name: str, args: Any, made: list[Tensor]) -> Operation:
    """Return the product of an operation whose factors are its first two matrices, or the next ones."""
    adds = name.startswith(("addmm", "baddbmm"))
    factors = args[1:3] if adds else args[:2]
    added = [args[0]] if adds and args[0].dim() > 1 else []  # a bias is read in the kernel's end
    return product_of(name, factors[0], factors[1], [*made, *added])


def product_of(name: str, a: Tensor, b: Tensor, others: Sequence[Tensor]) -> Operation:
    flops = 2.0 * a.numel() * b.shape[-1]
    dtype = "fp8" if a.dtype in FP8 else str(a.dtype).removeprefix("torch.")
    return Operation("product", name, "torch", flops, sum(map(size_of, (a, b, *others))), dtype)


def attention_of(q: Tensor, k: Tensor, draws: bool, is_backward: bool) -> Operation:
    """Return a causal attention, with the FLOPs of the full square."""
    (batch, heads, rows, width), keys = q.shape, k.shape[2]
    flops = 4.0 * batch * heads * rows * keys * width * (2.5 if is_backward else 1.0)
    name = "attention backward" if is_backward else "attention"
    return Operation("attention", name, "torch", flops, heads=Heads(keys, width, False, draws, is_backward))


def bytes_of(func: Any, name: str, args: Any, kwargs: Any, taken: list[Tensor], made: list[Tensor]) -> float:
    """Return the bytes that an operation reads and writes."""
    if name in GATHERS:
        return 2.0 * sum(map(size_of, made)) + sum(map(size_of, taken[1:]))
    if name in SCATTERS:
        return 3.0 * size_of(taken[-1]) + sum(map(size_of, taken[1:-1]))
    if name in ("sort", "argsort"):
        return float(SORT_PASSES * sum(map(size_of, made)))
    changed = [x for x in written(func, args, kwargs)]
    own = {id(x) for x in changed}
    new = [x for x in made if id(x) not in own]
    read = [x for x in taken if id(x) not in own]
    again = 1 if name in OVERWRITES or "out" in kwargs else 2  # what is changed in place is read too
    return float(sum(map(size_of, (*read, *new))) + again * sum(map(size_of, changed)))


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operation writes to."""
    out: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            out += [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    return out


def size_of(x: Tensor) -> int:
    """Return the bytes that reading a tensor moves: what is expanded is read once."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * x.element_size()


# Triton's kernels


def launch_of(kernel: Any, args: Sequence[Any]) -> Operation:
    """Return the launch of a Triton kernel with these arguments, in the order of its parameters."""
    reads, writes = accesses(kernel)
    total = 0.0
    for name, value in zip(kernel.arg_names, args, strict=False):
        if isinstance(value, Tensor):
            size = getattr(value, "addressed_bytes", None) or size_of(value)
            total += size * ((name in reads) + (name in writes))
    return Operation("pass", kernel.fn.__name__, "triton", bytes=total)


@functools.cache
def accesses(kernel: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the parameters of a Triton kernel that it reads from, and that it writes to."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    reader = AddressReader(kernel)
    before = -1
    while before != (before := reader.found()):  # until no loop brings an address to another name
        reader.visit(tree)
    return frozenset(reader.reads), frozenset(reader.writes)


class AddressReader(ast.NodeVisitor):
    """Follows the addresses of a kernel's parameters through its variables."""

    def __init__(self, kernel: Any) -> None:
        self.names = kernel.fn.__globals__
        self.origins: dict[str, set[str]] = {name: {name} for name in kernel.arg_names}
        self.reads: set[str] = set()
        self.writes: set[str] = set()

    def found(self) -> int:
        return len(self.reads) + len(self.writes) + sum(map(len, self.origins.values()))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self.assign(target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        self.assign(node.target, node.value)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, own in zip(target.elts, value.elts, strict=True):
                self.assign(each, own)
        elif isinstance(target, ast.Name):
            self.origins.setdefault(target.id, set()).update(self.sources(value))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "load":
            self.reads |= self.sources(node.args[0])
        elif name == "store":
            self.writes |= self.sources(node.args[0])
        elif name.startswith("atomic_"):
            self.reads |= self.sources(node.args[0])
            self.writes |= self.sources(node.args[0])
        elif (called := self.kernel_of(node.func)) is not None:
            reads, writes = accesses(called)
            for parameter, value in zip(called.arg_names, node.args, strict=False):
                self.reads |= self.sources(value) if parameter in reads else set()
                self.writes |= self.sources(value) if parameter in writes else set()

    def kernel_of(self, func: ast.expr) -> Any:
        """Return the Triton function that is called, or None if it is not one."""
        if isinstance(func, ast.Name):
            found = self.names.get(func.id)
        elif isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            found = getattr(self.names.get(func.value.id), func.attr, None)
        else:
            found = None
        return found if hasattr(found, "arg_names") and hasattr(found, "fn") else None

    def sources(self, value: ast.expr) -> set[str]:
        """Return the parameters that an address is computed from; a loaded number is not one."""
        if isinstance(value, ast.Name):
            return self.origins.get(value.id, set())
        if isinstance(value, ast.Call):
            name = value.func.attr if isinstance(value.func, ast.Attribute) else ""
            if name == "load" or self.kernel_of(value.func) is not None:
                return set()
        children = (child for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr))
        return set().union(*map(self.sources, children))
