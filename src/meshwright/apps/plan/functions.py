"""The memory of the network's functions: what each allocates, saves for its backward pass, frees.

The functions mirror those of model/, kernels/ and parallel/ by name: the same tensors in the same
order, held by the same variables, with sizes in the place of numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.apps.plan.tensors import GraphNode, Memory, Sized, recomputed
from meshwright.kernels import grid

FLOAT, LONG = 4, 8  # bytes
Matrix = tuple[int, int]  # outputs and inputs


@dataclass(frozen=True)
class Formats:
    """Bytes of an element."""

    low: int  # of weights and activations
    stream: int  # of the residual stream
    full: int  # of gradients' totals


@dataclass(frozen=True)
class HeadCounts:
    """What a rank's attention sees."""

    batch: int
    length: int  # tokens of a sample
    heads: int
    groups: int
    dim: int
    copies_queries: bool  # to split them from keys and values

    @property
    def columns(self) -> int:
        return (self.heads + 2 * self.groups) * self.dim


class NormOptions(NamedTuple):
    """How a branch is added to the residual stream, and the sum normalised."""

    adds: bool  # the sum is not the branch itself
    centers: bool
    sites: Sized | None  # the hashes of dropout, if there is any
    ends: str = ""  # the unit of which the norm's gradients are the last


class DeferredProduct(NamedTuple):
    """The gradient of a weight, which a pipeline computes later."""

    matrix: Matrix
    unit: str
    gradient: Sized
    x: Sized


class Functions:
    """The functions of one rank's part of a model."""

    def __init__(self, memory: Memory, formats: Formats, tp: int, cp: int, sequence: bool, processors: int) -> None:
        self.memory, self.formats, self.tp, self.processors = memory, formats, tp, processors
        self.sequence = sequence and tp > 1
        self.cp, self.recomputes_attention, self.drops_attention = cp, False, False
        self.adds_gradients = False  # to totals; a step's first ones are written there, except by ZeRO 2
        self.knows_scales = False  # of fp8; the first micro-batch of all has none before
        self.unit = ""  # of the parameters that are used next
        self.begin: Callable[[str], None] = lambda unit: None  # called before a unit's gradients are added to
        self.begin_vectors: Callable[[str], None] = lambda unit: None  # called before those of its biases are
        self.end: Callable[[str], None] = lambda unit: None  # called after a unit's last gradient
        self.keep: Callable[[str, int], None] | None = None  # called with a weight's gradient that no total takes
        self.waiting: list[DeferredProduct] | None = None  # weight gradients that a pipeline computes later

    def new(self, elements: int, width: int | None = None) -> Sized:
        return self.memory.new(elements, self.formats.low if width is None else width)

    # Products

    def give_product(self, outputs: int, inputs: int, unit: str) -> None:
        """Add a weight's gradient to its total, which a 16-bit product goes straight into."""
        self.begin(unit)
        if self.keep is not None:
            self.keep(unit, outputs * inputs)
        elif self.formats.low > 2 and self.adds_gradients:
            self.new(outputs * inputs)

    def give_rows(self, gradient: Sized, columns: int, has_bias: bool, unit: str) -> None:
        """Give a bias the sum of a gradient's rows."""
        if has_bias and gradient.sums is None:
            count = gradient.elements // columns
            rows = grid.summed_rows(count, grid.sum_slab(count, columns, self.processors))
            sums = self.new(rows * columns, self.formats.full)
            self.begin_vectors(unit)
            del sums
        elif has_bias:
            self.begin_vectors(unit)

    def linear(self, x: Sized, matrix: Matrix, has_bias: bool = False, ends: bool = False) -> Sized:
        """Return x @ W^T. `has_bias`: a bias gets its gradient here; `ends`: a unit's end here."""
        outputs, inputs = matrix
        y, needs_gradient, unit = self.new(x.elements // inputs * outputs), x.node is not None, self.unit

        def backward(saved: list[Sized], gradient: Sized) -> list[Sized | None]:
            if self.keep is not None:  # torch's own function, which takes a view
                gradient.sums = None
            of_x = self.new(gradient.elements // outputs * inputs) if needs_gradient else None
            if self.waiting is None:
                self.give_product(outputs, inputs, unit)
            else:
                self.waiting.append(DeferredProduct(matrix, unit, gradient.view(), saved[0]))  # without its sums
            if ends and self.waiting is None:
                self.end(unit)
            self.give_rows(gradient, outputs, has_bias and self.keep is None, unit)
            return [of_x]

        y.node = GraphNode([x], [x.view()], backward, takes_saved=True)
        return y

    def column_parallel(
        self, x: Sized, matrix: Matrix, has_bias: bool = False, is_fp8: bool = False, ends: bool = False
    ) -> Sized:
        """Multiply as a layer's first products and the head do: a rank has some of the outputs."""
        (outputs, inputs), unit = matrix, self.unit
        linear = self.fp8_linear if is_fp8 else self.linear
        if self.tp > 1 and (self.waiting is not None or is_fp8):
            x = self.gathered(x) if self.sequence else self.copied(x)
        if self.tp == 1 or self.waiting is not None or is_fp8:
            return linear(x, matrix, has_bias, ends)
        times = self.tp if self.sequence else 1
        rows = self.new(x.elements * times) if self.sequence else None
        y = self.new(x.elements // inputs * times * outputs)
        del rows

        def backward(gradient: Sized) -> list[Sized | None]:
            inner = gradient.elements // outputs * inputs
            rows = self.new(inner) if self.sequence else None
            partial = self.new(inner)
            back = self.new(inner // times)
            del partial
            self.give_rows(gradient, outputs, has_bias, unit)
            self.give_product(outputs, inputs, unit)
            if ends:
                self.end(unit)
            del rows
            return [back]

        y.node = GraphNode([x], [x.view()], backward)
        return y

    def row_parallel(self, x: Sized, matrix: Matrix, has_bias: bool = False, is_fp8: bool = False) -> Sized:
        """Multiply as a layer's second products do: partial sums, added up before the bias."""
        (outputs, inputs), unit = matrix, self.unit
        linear = self.fp8_linear if is_fp8 else self.linear
        if self.tp == 1:
            return linear(x, matrix, has_bias)
        if not self.sequence or self.waiting is not None or is_fp8:
            return self.add_bias(self.added_up(linear(x, matrix)), outputs, has_bias)
        partial = self.new(x.elements // inputs * outputs)
        y = self.new(partial.elements // self.tp)
        del partial

        def backward(gradient: Sized) -> list[Sized | None]:
            self.give_rows(gradient, outputs, has_bias, unit)
            rows = self.new(gradient.elements * self.tp)
            back = self.new(rows.elements // outputs * inputs)
            self.give_product(outputs, inputs, unit)
            return [back]

        y.node = GraphNode([x], [x.view()], backward)
        return y

    def added_up(self, x: Sized) -> Sized:
        """Sum partial results over the tensor ranks; with sequence parallelism keep own rows."""
        count, width, times = x.elements, x.width, self.tp if self.sequence else 1
        y = self.new(count // times, width)
        y.node = GraphNode([x], [], lambda gradient: [self.new(count, width) if self.sequence else gradient.view()])
        return y

    def gathered(self, x: Sized) -> Sized:
        count, width = x.elements, x.width
        y = self.new(count * self.tp, width)
        y.node = GraphNode([x], [], lambda gradient: [self.new(count, width)])
        return y

    def copied(self, x: Sized) -> Sized:
        count, width = x.elements, x.width
        return x.view(GraphNode([x], [], lambda gradient: [self.new(count, width)]))

    def add_bias(self, x: Sized, columns: int, has_bias: bool) -> Sized:
        if not has_bias:
            return x
        y, unit = self.new(x.elements, x.width), self.unit

        def backward(gradient: Sized) -> list[Sized | None]:
            self.give_rows(gradient, columns, True, unit)
            return [gradient]

        y.node = GraphNode([x], [], backward)
        return y

    def add(self, a: Sized, b: Sized) -> Sized:
        """Add a branch to the residual stream, which may be wider."""
        y, width = self.new(a.elements, a.width), b.width
        of_b = (lambda gradient: self.new(gradient.elements, width)) if width < a.width else (lambda gradient: gradient)
        y.node = GraphNode([a, b], [], lambda gradient: [gradient, of_b(gradient)])
        return y

    def dropout(self, x: Sized, sites: Sized) -> Sized:
        y, width = self.new(x.elements, x.width), x.width
        y.node = GraphNode([x], [sites], lambda gradient: [self.new(gradient.elements, width)])
        return y

    def converted(self, x: Sized, width: int) -> Sized:
        """Return x in another format, if it is another."""
        if x.width == width:
            return x
        y, before = self.new(x.elements, width), x.width
        y.node = GraphNode([x], [], lambda gradient: [self.new(gradient.elements, before)])
        return y

    def norm(self, x: Sized, columns: int, centers: bool) -> Sized:
        """Return torch's own norm of x."""
        rows, elements, width = x.elements // columns, x.elements, x.width
        y = self.new(elements, width)
        mean = self.new(rows, FLOAT) if centers else None
        rstd = self.new(rows, FLOAT)

        def backward(gradient: Sized) -> list[Sized | None]:
            of_x = self.new(elements, width)
            self.new(2 * columns, width)
            return [of_x]

        y.node = GraphNode([x], [x.view(), mean, rstd], backward)
        return y

    def split_plainly(
        self, qkv: Sized, sizes: HeadCounts, rotation: list[Sized], normed: bool, centers: bool
    ) -> tuple[Sized, Sized, Sized]:
        """Split qkv into heads by torch's own functions."""
        tokens, d = qkv.elements // sizes.columns, sizes.dim
        node = GraphNode([qkv], [], lambda *gradients: [self.new(tokens * sizes.columns)], 3)
        q, k, v = (qkv.view(node, i) for i in range(3))
        out = []
        for x, heads in ((q, sizes.heads), (k, sizes.groups)):
            part = x.part(tokens * heads * d)
            if heads == sizes.heads and sizes.copies_queries:
                part = self.ordered(part)
            if normed:
                part = self.norm(part, d, centers)
            if rotation:
                part = self.rotated(part, rotation)
            out.append(part)
        return out[0], out[1], v

    def rotated(self, x: Sized, rotation: list[Sized]) -> Sized:
        """Rotate halves of heads in float32."""
        half, elements = x.elements // 2, x.elements
        parts = []
        for _ in range(2):
            products = [self.new(half, FLOAT), self.new(half, FLOAT)]
            total = self.new(half, FLOAT)
            del products
            parts.append(self.new(half))
            del total
        y = self.new(elements)
        parts.clear()

        def backward(gradient: Sized) -> list[Sized | None]:
            wide = [self.new(half, FLOAT) for _ in range(4)]
            of_x = self.new(elements)
            del wide
            return [of_x]

        y.node = GraphNode([x], rotation, backward)
        return y

    def activate_plainly(self, u: Sized, kind: str) -> Sized:
        """Apply an activation by torch's own functions."""
        if kind == "squared-relu":
            return self.square(self.apply(u, keeps="result"))
        if not kind.endswith("glu"):
            return self.apply(u, keeps="input")
        half, elements = u.elements // 2, u.elements
        node = GraphNode([u], [], lambda *gradients: [self.new(elements)], 2)
        gate, up = (u.view(node, i).part(half) for i in range(2))
        if kind != "liglu":
            gate = self.apply(gate, keeps="result" if kind == "reglu" else "input")
        a = self.new(half)
        a.node = GraphNode([gate, up], [gate.view(), up.view()], lambda gradient: [self.new(half), self.new(half)])
        return a

    def apply(self, x: Sized, elements: int = 0, keeps: Literal["", "input", "result"] = "") -> Sized:
        """Apply a function whose backward pass may need its input or its result."""
        y, before, width = self.new(elements or x.elements, x.width), x.elements, x.width
        kept = {"": [], "input": [x.view()], "result": [y.view()]}[keeps]
        y.node = GraphNode([x], kept, lambda gradient: [self.new(before, width)])
        return y

    def square(self, x: Sized) -> Sized:
        y, elements = self.new(x.elements, x.width), x.elements

        def backward(gradient: Sized) -> list[Sized | None]:
            factors = self.new(elements), self.new(elements)
            of_x = self.new(elements)
            del factors
            return [of_x]

        y.node = GraphNode([x], [x.view()], backward)
        return y

    def softcap(self, logits: Sized) -> Sized:
        """Bound the logits; backward overwrites them with their gradient."""
        y = self.new(logits.elements, logits.width)
        y.node = GraphNode([logits], [logits.view()], lambda saved, gradient: [saved[0].view()], takes_saved=True)
        return y

    def exchanged(self, elements: int, inputs: list[Sized], copies: bool) -> Sized:
        """Exchange heads for columns with the context ranks; `copies`: to put them in order."""

        count = len(inputs)

        def backward(gradient: Sized) -> list[Sized | None]:
            ordered = self.new(elements) if copies else None
            back = self.new(elements)
            del ordered
            return [back.view() for _ in range(count)]

        sent = self.new(elements)
        received = self.new(elements)
        del sent
        out = self.new(elements) if copies else received
        return out.view(GraphNode(inputs, [], backward))

    def attend_by_scores(self, q: Sized, k: Sized, v: Sized, sizes: HeadCounts) -> Sized:
        """Attend by all scores: torch has no kernel for groups of heads in full precision."""
        each, square = sizes.batch * sizes.length * sizes.dim, sizes.length**2
        count, scores = sizes.heads * each, sizes.batch * sizes.heads * square
        q, k, v = q.part(count), k.part(sizes.groups * each), v.part(sizes.groups * each)
        q = self.apply(q)  # scaled
        ones = self.new(square, 1), self.new(square, 1)
        mask = self.new(square)
        del ones
        k, v = self.apply(k, count), self.apply(v, count)  # repeated for each head
        k, scaled = self.apply(k), k
        x = self.multiply(self.ordered(q) if sizes.batch > 1 else q, k, scores)  # of one sample, heads lie evenly
        unsafe = self.new(scores), self.new(scores, 1)  # softmax, and which rows are masked
        x = self.apply(x, keeps="result")
        del unsafe, q, k, scaled, mask
        if self.drops_attention:
            seen = self.new(scores, 1)
            x, node = self.new(scores), GraphNode([x], [seen], lambda gradient: [self.new(scores)])
            x.node = node
            del seen, node
        o = self.multiply(x, v, count)
        return self.ordered(o) if self.cp > 1 else o

    def multiply(self, a: Sized, b: Sized, elements: int) -> Sized:
        """Return the product of two tensors."""
        y, counts = self.new(elements), (a.elements, b.elements)
        y.node = GraphNode([a, b], [a.view(), b.view()], lambda gradient: [self.new(n) for n in counts])
        return y

    def ordered(self, x: Sized) -> Sized:
        """Return a copy with another order of dimensions, as a product needs it."""
        y = self.new(x.elements, x.width)
        y.node = GraphNode([x], [], lambda gradient: [gradient])
        return y

    def attend(self, q: Sized, k: Sized, v: Sized, sizes: HeadCounts) -> Sized:
        """Attend; context ranks exchange heads for columns before and after."""
        if self.cp > 1:
            return self.attend_exchanged(q, k, v, sizes)
        return recomputed(self.flash, q, k, v, sizes) if self.recomputes_attention else self.flash(q, k, v, sizes)

    def attend_exchanged(self, q: Sized, k: Sized, v: Sized, sizes: HeadCounts) -> Sized:
        """Attend to all columns with some of the heads, between two exchanges."""
        elements = sizes.batch * sizes.length * sizes.columns
        several = sizes.batch > 1
        between = self.exchanged(elements, [q, k, v], several)

        def backward(*gradients: Sized | None) -> list[Sized | None]:
            return [self.new(elements)]

        node = GraphNode([between], [], backward, 3)
        inner = between.view()
        q, k, v = inner.view(node), inner.view(node, 1), inner.view(node, 2)
        del inner, between
        o = recomputed(self.flash, q, k, v, sizes) if self.recomputes_attention else self.flash(q, k, v, sizes)
        del q, k, v
        return self.exchanged_back(o, several, one_head=sizes.heads == 1)

    def exchanged_back(self, o: Sized, several: bool, one_head: bool) -> Sized:
        elements = o.elements
        sent = self.new(elements) if several else None
        received = self.new(elements)
        del sent
        out = received if one_head else self.new(elements)
        del received

        def backward(gradient: Sized) -> list[Sized | None]:
            ordered = self.new(elements)
            back = self.new(elements)
            del ordered
            return [back]

        return out.view(GraphNode([o], [], backward))

    def flattened(self, o: Sized, sizes: HeadCounts) -> Sized:
        """Return attention's output by token, which may need a copy."""
        is_by_head = sizes.heads == 1 if self.cp > 1 else self.attends_by_scores(sizes)
        return self.ordered(o) if is_by_head else o

    def attends_by_scores(self, sizes: HeadCounts) -> bool:
        """Return whether torch has no kernel: for groups of heads in full precision."""
        return self.formats.low > 2 and sizes.groups < sizes.heads

    # Fused kernels

    def add_norm(self, residual: Sized | None, pending: Sized, columns: int, norm: NormOptions) -> tuple[Sized, Sized]:
        """Return x = residual + dropout(pending + bias), and its norm."""
        rows, elements = pending.elements // columns, pending.elements
        width = pending.width if residual is None else residual.width
        x = self.new(elements, width) if norm.adds else pending
        y = self.new(elements)
        rstd = self.new(rows, FLOAT)
        mean = self.new(rows, FLOAT) if norm.centers else None
        backward = self.norm_backward(residual, pending, columns, norm)
        node = GraphNode([residual, pending], [x.view(), mean, rstd, norm.sites], backward, 2)
        return x.view(node), y.view(node, 1)

    def norm_backward(
        self, residual: Sized | None, pending: Sized, columns: int, norm: NormOptions
    ) -> Callable[..., list[Sized | None]]:
        """Return the backward pass of `add_norm`."""
        rows, elements = pending.elements // columns, pending.elements
        width, of_width = pending.width if residual is None else residual.width, pending.width
        has_residual, drops, ends = residual is not None, norm.sites is not None, norm.ends

        def backward(dx: Sized | None, dy: Sized | None) -> list[Sized | None]:
            zeros = self.new(elements) if dy is None else None
            of_residual = self.new(elements, width) if has_residual else None
            is_one = of_residual is not None and not drops and of_width == width
            of_pending = of_residual.view() if is_one and of_residual else self.new(elements, of_width)
            of_pending.sums = self.new(3 * grid.norm_programs(columns, rows, self.processors) * columns, FLOAT)
            self.end(ends)
            del zeros
            return [of_residual, of_pending]

        return backward

    def activate(self, u: Sized, columns: int, outputs: int, has_bias: bool) -> Sized:
        """Return the activation of u [rows, columns], with `outputs` columns."""
        rows = u.elements // columns
        a = self.new(rows * outputs)

        def backward(gradient: Sized) -> list[Sized | None]:
            du = self.new(rows * columns)
            if has_bias:
                self.new(grid.cdiv(rows, grid.activation_rows(rows)) * columns, FLOAT)
            return [du]

        a.node = GraphNode([u], [u.view()], backward)
        return a

    def split_heads(
        self, qkv: Sized, sizes: HeadCounts, rotation: list[Sized], has_bias: bool
    ) -> tuple[Sized, Sized, Sized]:
        """Split qkv into heads; queries are copied if several share a key."""
        tokens, d, unit = qkv.elements // sizes.columns, sizes.dim, self.unit
        q, k, v = qkv, qkv, qkv
        if sizes.copies_queries:
            q = self.new(tokens * sizes.heads * d)
        if rotation:
            rotated = self.new(tokens * sizes.heads * d), self.new(tokens * sizes.groups * d)
            q, k = rotated

        def backward(*gradients: Sized | None) -> list[Sized | None]:
            of_qkv = self.new(tokens * sizes.columns)
            if has_bias:
                sums = self.new(grid.packed_parts(tokens // sizes.length, sizes.length) * sizes.columns, FLOAT)
                self.begin_vectors(unit)
                del sums
            return [of_qkv]

        node = GraphNode([qkv], rotation, backward, 3)
        return q.view(node), k.view(node, 1), v.view(node, 2)

    def flash(self, q: Sized, k: Sized, v: Sized, sizes: HeadCounts) -> Sized:
        """Return flash attention of q, k and v."""
        batch, t, heads, d = sizes.batch, sizes.length, sizes.heads, sizes.dim
        if self.attends_by_scores(sizes):
            return self.attend_by_scores(q, k, v, sizes)
        o = self.new(batch * t * heads * d)
        lse = self.new(batch * t * heads, FLOAT)
        state, unused = self.new(2, LONG), self.new(1, LONG)

        def backward(gradient: Sized) -> list[Sized | None]:
            dq, dk, dv = (self.new(batch * t * n * d) for n in (heads, sizes.groups, sizes.groups))
            rows, columns = -(-t // 128) * 128, -(-d // 32) * 32
            total, sums = self.new(batch * rows * heads * columns, FLOAT), self.new(batch * heads * rows, FLOAT)
            if sizes.groups < heads:
                each = self.new(batch * t * heads * d), self.new(batch * t * heads * d)
                del each
            del total, sums
            return [dq, dk, dv]

        return o.view(GraphNode([q, k, v], [q.view(), k.view(), v.view(), o, lse, state, unused], backward))

    # fp8

    def cast(self, elements: int, columns: int) -> tuple[Sized, Sized]:
        """Return a matrix in fp8, and its transposed, whose rows are padded."""
        rows = elements // columns
        transposed = self.new(columns * -(-rows // 16) * 16, 1)
        return self.new(elements, 1), transposed

    def written(self, elements: int, columns: int) -> tuple[Sized, Sized]:
        """Return what a function computes in fp8, or in 16 bits first to find its scale."""
        wide = None if self.knows_scales else self.new(elements)
        casts = self.cast(elements, columns)
        del wide
        return casts

    def give_fp8_product(self, outputs: int, inputs: int, unit: str) -> None:
        """Add a weight's gradient to its total, or write it there."""
        self.begin(unit)
        if self.adds_gradients:
            self.new(outputs * inputs, FLOAT)

    def fp8_linear(self, x: Sized, matrix: Matrix, has_bias: bool = False, ends: bool = False) -> Sized:
        """Return x @ W^T of both in fp8; the input is kept transposed."""
        outputs, inputs = matrix
        rows = x.elements // inputs
        q, transposed = self.cast(x.elements, inputs)
        y, unit = self.new(rows * outputs), self.unit
        del q

        def backward(gradient: Sized) -> list[Sized | None]:
            q = self.cast(gradient.elements, outputs)
            back = self.new(rows * inputs)
            self.give_fp8_product(outputs, inputs, unit)
            self.give_rows(gradient, outputs, has_bias, unit)
            if ends:
                self.end(unit)
            del q
            return [back]

        y.node = GraphNode([x], [transposed], backward)
        return y

    def norm_heads(
        self,
        residual: Sized | None,
        pending: Sized,
        norm: NormOptions,
        product: Matrix,
        sizes: HeadCounts,
        rotation: list[Sized],
        has_bias: bool,
    ) -> tuple[Sized, Sized, Sized, Sized]:
        """Return x, q, k and v: a norm, a product in fp8 and the split into heads."""
        outputs, columns = product
        x, qkv, saved = self.norm_product(residual, pending, norm, product)
        differentiate_norm, unit = self.norm_backward(residual, pending, columns, norm), self.unit
        tokens, d = qkv.elements // sizes.columns, sizes.dim
        q, k, v = qkv, qkv, qkv
        if sizes.copies_queries:
            q = self.new(tokens * sizes.heads * d)
        if rotation:
            rotated = self.new(tokens * sizes.heads * d), self.new(tokens * sizes.groups * d)
            q, k = rotated

        def backward(dx: Sized | None, *gradients: Sized | None) -> list[Sized | None]:
            parts = grid.packed_parts(tokens // sizes.length, sizes.length)
            sums = self.new(parts * outputs, FLOAT) if has_bias else None
            q = self.written(tokens * outputs, outputs)
            dy = self.new(tokens * columns)
            self.give_fp8_product(outputs, columns, unit)
            out = differentiate_norm(dx, dy)
            del q, dy, sums
            return out

        node = GraphNode([residual, pending], [*saved, *rotation], backward, 4)
        return x.view(node), q.view(node, 1), k.view(node, 2), v.view(node, 3)

    def norm_product(
        self, residual: Sized | None, pending: Sized, norm: NormOptions, product: Matrix
    ) -> tuple[Sized, Sized, list[Sized | None]]:
        """Return x, the product of its norm in fp8, and what is kept of both."""
        outputs, columns = product
        rows, elements = pending.elements // columns, pending.elements
        width = pending.width if residual is None else residual.width
        x = self.new(elements, width) if norm.adds else pending
        rstd = self.new(rows, FLOAT)
        mean = self.new(rows, FLOAT) if norm.centers else None
        q, transposed = self.written(elements, columns)
        out = self.new(rows * outputs)
        del q
        return x, out, [x.view(), mean, rstd, norm.sites, transposed]

    def norm_mlp(
        self, residual: Sized, pending: Sized, norm: NormOptions, first: Matrix, second: Matrix, has_bias: bool
    ) -> tuple[Sized, Sized]:
        """Return x and the MLP's output: a norm, two products in fp8 and the activation between."""
        (wide, columns), (outputs, inner) = first, second
        x, u, saved = self.norm_product(residual, pending, norm, first)
        differentiate_norm, unit = self.norm_backward(residual, pending, columns, norm), self.unit
        rows = pending.elements // columns
        q, transposed = self.written(rows * inner, inner)
        y = self.new(rows * outputs)
        del q

        def backward(dx: Sized | None, gradient: Sized) -> list[Sized | None]:
            q = self.cast(gradient.elements, outputs)
            self.give_rows(gradient, outputs, has_bias, unit)
            da = self.new(rows * inner)
            self.give_fp8_product(outputs, inner, unit)
            parts = grid.cdiv(rows, grid.activation_rows(rows))
            sums = self.new(parts * wide, FLOAT) if has_bias else None
            again = self.written(rows * wide, wide)
            del q
            dy = self.new(rows * columns)
            self.give_fp8_product(wide, columns, unit)
            out = differentiate_norm(dx, dy)
            del again, dy, da, sums
            return out

        node = GraphNode([residual, pending], [*saved, u, transposed], backward, 2)
        return x.view(node), y.view(node, 1)
