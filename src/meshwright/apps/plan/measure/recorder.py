"""Count what a measured step executes: torch's operations, Triton's kernels, collectives.

An operation of torch touches the tensors that it takes and makes; a view touches nothing. What a
Triton kernel reads and writes is read from its source: the parameters whose addresses reach
`tl.load`, and `tl.store` or an atomic operation. So a new kernel needs no declaration.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.apps.plan.measure.account import Section, StepObserver, is_backward, tensors_in
from meshwright.apps.plan.measure.operations import Heads, TracedOperation
from meshwright.base.device_profiles import ATTENTION_PASSES

# Operations that make or change a tensor without a kernel, beside views.
NO_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "set_",
    "resize_",
    "_local_scalar_dense",
    "record_stream",
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_", "_scaled_mm", "_int_mm"}
# Operations that read as much of their first tensor as they write, at the places of an index.
GATHERS = {"embedding", "index", "index_select", "gather"}
SCATTERS = {
    "index_put",
    "index_put_",
    "index_add",
    "index_add_",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
}
# Operations that change a tensor without reading it.
OVERWRITES = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "_foreach_copy_",
    "_foreach_zero_",
}
SORT_PASSES = 8  # over keys and values, by a radix sort of 32 bits
# Of an element at an address in a table: those of weights' copies, and all others.
COPY_BYTES = 2
ADDRESSED_BYTES = 4
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class OperationRecorder(StepObserver):
    """A count of the operations of the last step that it is told of, by section."""

    def __init__(self) -> None:
        self.sections: dict[Section, Counter[TracedOperation]] = defaultdict(Counter)
        self.last = Section("set-up")
        self.node: object = None  # of the backward pass, in which the last operation ran

    def count(self, operation: TracedOperation, section: Section) -> None:
        if section.phase == "begin" and self.last.phase == "update":  # another step
            self.sections.clear()
        self.last = section
        self.sections[section][operation] += 1
        # Autograd's own work on the host, once for each node that it runs.
        node = node_of_backward()
        if node is not None and node != self.node:
            self.sections[section][TracedOperation("host", "node", "node")] += 1
        self.node = node

    def operation(self, func: Any, args: Any, kwargs: Any, out: Any, section: Section) -> None:
        self.count(operation_of(func, args, kwargs, out), section)

    def launch(
        self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], section: Section
    ) -> None:
        self.count(launch_of(kernel, args), section)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, is_backward: bool, section: Section
    ) -> None:
        self.count(attention_of(q, k, dropout > 0, is_backward), section)

    def fused(self, name: str, tensors: Iterable[Any], section: Section) -> None:
        leaves = tensors_in(list(tensors))
        if name in PRODUCTS:
            a, b, out = leaves
            operation = product_of(name, a, b, [out], out.dtype is torch.float32)
        else:
            moved = sum(map(size_of, leaves))
            if name.startswith("_fused"):  # an optimizer reads and writes all that it has
                moved *= 2
            operation = TracedOperation("pass", name, "torch", bytes=moved)
        self.count(operation, section)

    def collective(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], section: Section
    ) -> None:
        self.count(TracedOperation("host", name, "collective"), section)


def node_of_backward() -> object:
    """Return a key of the running node of the backward pass; None in other passes.

    To keep the node itself would keep the memory that it has saved.
    """
    if not is_backward():
        return None
    node = torch._C._current_autograd_node()
    return node and (node._sequence_nr(), id(getattr(node, "variable", None)))


# Operations of torch


def operation_of(func: Any, args: Any, kwargs: Any, out: Any) -> TracedOperation:
    """Return the operation of a call that the dispatcher made."""
    name = func._schema.name.removeprefix("aten::")
    if func.namespace == "c10d":
        return TracedOperation("host", name, "collective")
    # The copies of fully_shard count with the collectives around which they run.
    if func.namespace == "fsdp":
        return TracedOperation("host", name, "torch")
    taken = tensors_in((args, kwargs))
    made = tensors_in(out)
    is_on_host = all(x.device.type == "cpu" for x in [*taken, *made])
    if func.is_view or name in NO_KERNEL or is_on_host:
        return TracedOperation("host", name, "view")
    if name in PRODUCTS:
        return product_in(name, func._overloadname, args, made)
    moved = bytes_of(func, name, args, kwargs, taken, made)
    return TracedOperation("pass", name, "torch", bytes=moved)


def product_in(name: str, overload: str, args: Any, made: list[Tensor]) -> TracedOperation:
    """Return the product of an operation; its factors are the first two matrices, or the next."""
    others = list(made)
    if name.startswith(("addmm", "baddbmm")):
        added, a, b = args[:3]
        if added.dim() > 1:  # a bias is read in the kernel's end
            others.append(added)
    else:
        a, b = args[:2]
    return product_of(name, a, b, others, overload.endswith("out"))


def product_of(
    name: str, a: Tensor, b: Tensor, others: Sequence[Tensor], is_total: bool
) -> TracedOperation:
    """Return a product; `is_total`: it goes into given memory, as the gradients of weights do."""
    rest = sum(map(size_of, others))
    totals = rest if is_total else 0.0
    return TracedOperation(
        "product",
        name,
        "torch",
        flops=2.0 * a.numel() * b.shape[-1],
        bytes=size_of(a) + size_of(b) + rest - totals,
        dtype="fp8" if a.dtype in FP8 else str(a.dtype).removeprefix("torch."),
        totals=totals,
    )


def attention_of(q: Tensor, k: Tensor, draws: bool, is_backward: bool) -> TracedOperation:
    """Return a causal attention, with the FLOPs of the full square forward."""
    batch, heads, rows, width = q.shape
    keys = k.shape[2]
    return TracedOperation(
        "attention",
        "attention backward" if is_backward else "attention",
        "torch",
        flops=4.0 * batch * heads * rows * keys * width,
        bytes=ATTENTION_PASSES * size_of(q) if is_backward else 0,
        heads=Heads(keys, width, draws, is_backward),
    )


def bytes_of(
    func: Any, name: str, args: Any, kwargs: Any, taken: list[Tensor], made: list[Tensor]
) -> float:
    """Return the bytes that an operation reads and writes."""
    if name in GATHERS:  # the rows are read and written; of the table, no more
        return 2.0 * sum(map(size_of, made)) + sum(map(size_of, taken[1:]))
    if name in SCATTERS:  # the rows are read, and added to what is read and written
        return 3.0 * size_of(taken[-1]) + sum(map(size_of, taken[1:-1]))
    if name in ("sort", "argsort"):
        return float(SORT_PASSES * sum(map(size_of, made)))

    # Each tensor is read or written once, and those that change are both.
    changed = written(func, args, kwargs)
    changed_ids = set(map(id, changed))
    moved = 0
    for x in (*taken, *made):
        if id(x) not in changed_ids:
            moved += size_of(x)
    # A tensor that is changed in place is read too.
    times = 1 if name in OVERWRITES or "out" in kwargs else 2
    return float(moved + times * sum(map(size_of, changed)))


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operation writes to."""
    out: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            out += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
    return out


def size_of(x: Tensor) -> int:
    """Return the bytes that reading a tensor moves: what is expanded is read once."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * x.element_size()


# Triton's kernels


def launch_of(kernel: Any, args: Sequence[Any]) -> TracedOperation:
    """Return the launch of a Triton kernel with these arguments, in the order of its parameters.

    A kernel that takes a table of addresses has the number of elements at each as `size`; one that
    takes `ids` touches as many rows of its `total`.
    """
    given = dict(zip(kernel.arg_names, args, strict=False))
    name = kernel.fn.__name__
    if name == "_symmetric_product":
        return symmetric_product_of(given)
    reads, writes = accesses(kernel)
    moved, rounds = 0.0, False
    for parameter, value in given.items():
        if not isinstance(value, Tensor):
            continue
        rounds = rounds or value.dtype in (torch.uint8, *FP8)
        touched = size_of(value)
        ids = given.get("ids")
        if parameter == "total" and isinstance(ids, Tensor):
            touched = min(touched, ids.numel() * size_of(value[0]))
        moved += touched * ((parameter in reads) + (parameter in writes))
        # A table of addresses: the memory at each of them is touched.
        pointed = f"*{parameter}"
        if times := (pointed in reads) + (pointed in writes):
            size = COPY_BYTES if parameter == "copies" else ADDRESSED_BYTES
            moved += times * value.numel() * given.get("size", 0) * size
    return TracedOperation("pass", name, "triton", bytes=moved, dtype="fp8" if rounds else "")


def symmetric_product_of(given: Mapping[str, Any]) -> TracedOperation:
    """Return a product of matrices [n, m, k] of which the tiles up to the diagonal are computed."""
    a = given["a"]
    out = given["out"]
    rows = given["ROWS"]
    columns = given["COLUMNS"]
    tiles = sum(i * rows // columns + 1 for i in range(-(-given["m"] // rows)))
    return TracedOperation(
        "product",
        "symmetric",
        "triton",
        flops=2.0 * out.shape[0] * tiles * rows * columns * given["k"],
        bytes=2 * size_of(a.base) + size_of(out),
        dtype=str(out.dtype).removeprefix("torch."),
    )


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
    """A visitor that follows the addresses of a kernel's parameters through its variables."""

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
            for one, own in zip(target.elts, value.elts, strict=True):
                self.assign(one, own)
        elif isinstance(target, ast.Name):
            # A name may hold several addresses over the loop, so none is forgotten.
            origins = self.origins.setdefault(target.id, set())
            origins.update(self.sources(value))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("load", "store") or name.startswith("atomic_"):
            accessed = self.sources(node.args[0])
            if name != "store":
                self.reads |= accessed
            if name != "load":
                self.writes |= accessed
            return
        # A kernel that calls another accesses by what it passes on.
        called = self.kernel_of(node.func)
        if called is None:
            return
        reads, writes = accesses(called)
        for parameter, value in zip(called.arg_names, node.args, strict=False):
            if parameter in reads:
                self.reads |= self.sources(value)
            if parameter in writes:
                self.writes |= self.sources(value)

    def kernel_of(self, func: ast.expr) -> Any:
        """Return the Triton function that is called, or None if it is not one."""
        # A name of the kernel's module, or of a module that this one has imported.
        found = None
        if isinstance(func, ast.Name):
            found = self.names.get(func.id)
        elif isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            found = getattr(self.names.get(func.value.id), func.attr, None)
        is_kernel = hasattr(found, "arg_names") and hasattr(found, "fn")
        return found if is_kernel else None

    def sources(self, value: ast.expr) -> set[str]:
        """Return the parameters that an address is computed from; a loaded number is not one."""
        if isinstance(value, ast.Name):
            return self.origins.get(value.id, set())
        if isinstance(value, ast.Call):
            name = value.func.attr if isinstance(value.func, ast.Attribute) else ""
            # A loaded number becomes an address: what lies there is "*" and the table's name.
            if name == "to" and "pointer_type" in ast.unparse(value.args[0]):
                loaded = value.func.value  # type: ignore[attr-defined]
                return {f"*{source}" for source in self.sources(loaded.args[0])}
            if name == "load" or self.kernel_of(value.func) is not None:
                return set()
        found = set[str]()
        for child in ast.iter_child_nodes(value):
            if isinstance(child, ast.expr):
                found |= self.sources(child)
        return found
