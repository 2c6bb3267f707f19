"""Time and error of each Triton kernel on one GPU, in a table.

usage: python benchmarks/gpu_kernels.py [NAME ...] [--shape SHAPE] [--sweep] [--compiled]
                                        [--json FILE]

NAME selects kernels by the start of their names, as "norm backward"; `--sweep` also times each with
other numbers of warps, programs and stages, and `--compiled` what torch.compile makes of the plain
reference, its time over the kernel's. A time is the median of five replays of a CUDA graph
that runs the kernel on several sets of fresh inputs, together larger than the L2 cache. The
bandwidth is the bytes that the kernel must move, divided by that time, and is compared with a copy
of 1 GiB in the same run. The error is ||out - exact|| / ||exact|| against float64, the worst of the
outputs. A case that fails is printed, and the others go on. Without a GPU the kernels run once,
tiny, in Triton's interpreter: times mean nothing there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import GPU, attempt, distance, doubled, new_parser, print_head, print_row, seconds_of

if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when kernels are defined

from meshwright.kernels import (
    activation,
    adamw,
    dropout,
    embedding,
    gradients,
    grid,
    heads,
    muon,
    norm,
    qk_norm,
)  # noqa: E402
from meshwright.kernels.triton import activation as activation_triton  # noqa: E402
from meshwright.kernels.triton import adamw as adamw_triton  # noqa: E402
from meshwright.kernels.triton import cross_entropy as cross_entropy_triton  # noqa: E402
from meshwright.kernels.triton import dropout as dropout_triton  # noqa: E402
from meshwright.kernels.triton import embedding as embedding_triton  # noqa: E402
from meshwright.kernels.triton import gradients as gradients_triton  # noqa: E402
from meshwright.kernels.triton import heads as heads_triton  # noqa: E402
from meshwright.kernels.triton import muon as muon_triton  # noqa: E402
from meshwright.kernels.triton import norm as norm_triton  # noqa: E402
from meshwright.kernels.triton import qk_norm as qk_norm_triton  # noqa: E402
from meshwright.kernels.triton import softcap as softcap_triton  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
SETS_BYTES = 256 << 20  # of all sets of inputs, five times the L2 cache of an H200
LEAST_SECONDS = 2e-3  # that a graph should take
Outputs = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Case:
    """One kernel at one shape; `run` and `exact` take what `make` returns."""

    name: str
    shape: str
    make: Callable[[], tuple[Any, ...]]
    run: Callable[..., Outputs]
    exact: Callable[..., Outputs]  # the outputs in float64
    bytes: int  # that must be moved
    flops: int = 0
    compared: Callable[[Outputs], Outputs] = lambda out: out  # such as the sums of partial sums
    # set each variant and yield its name; restore
    variants: Callable[[], Iterator[str]] | None = None
    plain: Callable[..., Any] | None = None  # the same by torch alone, which torch.compile takes


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, mean: float = 0.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) + mean).to(dtype)


def shapes(*there: tuple[int, int]) -> Iterable[tuple[int, int]]:
    return there if GPU else [(5, 72)]


NORM_SHAPES = [(32768, 1024), (1024, 1024), (16384, 2048), (16384, 2560)]


def vary(
    constants: dict[Any, Any], names: Sequence[Any], tried: Iterable[Sequence[Any]]
) -> Iterator[str]:
    """Give constants other values, and yield a label of each set of values; then restore them."""
    known = [constants[name] for name in names]
    try:
        for values in tried:
            constants.update(zip(names, values, strict=True))
            labels = (
                f"{x}" if isinstance(x, tuple) else f"{n} {x}"
                for n, x in zip(names, values, strict=True)
            )
            yield ", ".join(dict.fromkeys(labels))
    finally:
        constants.update(zip(names, known, strict=True))


def norm_cases() -> Iterator[Case]:
    """LayerNorm in bf16, with residual and bias, without and with dropout."""
    for n, width in shapes(*NORM_SHAPES):
        for p in (0.0, 0.1):
            yield norm_forward(n, width, p)
            yield norm_backward(n, width, p)


def norm_weights(width: int) -> norm.NormWeights:
    return norm.NormWeights(draw(width, mean=1.0), draw(width), 1e-5)


def hashes(n: int, p: float) -> torch.Tensor | None:
    return dropout.rows(1, torch.arange(n, device=DEVICE)) if p else None


def norm_forward(n: int, width: int, p: float) -> Case:
    return Case(
        f"norm forward, dropout {p}",
        f"{n} x {width}",
        lambda: (
            norm.Operands(draw(n, width), draw(n, width), draw(width), hashes(n, p), p),
            norm_weights(width),
        ),
        norm_triton.forward,
        lambda operands, weights: norm.forward.plain(
            norm.Operands(*doubled(operands)), norm.NormWeights(*doubled(weights))
        ),
        n * width * 2 * 4,
        plain=norm.forward.plain,  # type: ignore[attr-defined]
    )


def norm_backward(n: int, width: int, p: float) -> Case:
    def make() -> tuple[Any, ...]:
        x = draw(n, width)
        mean, rstd = x.float().mean(1), (x.float().var(1, correction=0) + 1e-5).rsqrt()
        rest = p, 0.0, True, x.dtype
        return (
            draw(n, width),
            draw(n, width),
            norm.SavedRows(x, mean, rstd, hashes(n, p), draw(width, mean=1.0), *rest),
        )

    def exact(dx: torch.Tensor, dy: torch.Tensor, saved: norm.SavedRows) -> Outputs:
        wide = norm.SavedRows(*doubled(saved))._replace(dtype=torch.float64)
        return norm.backward.plain(dx.double(), dy.double(), wide)

    def variants() -> Iterator[str]:
        block = max(1024, 1 << (width - 1).bit_length())
        known = grid.BACKWARD[block]
        doubled_warps = known._replace(warps=known.warps * 2, registers=None)
        tried = [known._replace(programs=n) for n in (1, 2, 3, 4, 6) if n != known.programs]
        tried += [doubled_warps._replace(programs=n) for n in (1, 2, 4)]
        tried += [
            known._replace(stages=1),
            known._replace(stages=2),
            known._replace(registers=None),
        ]
        tried += [known._replace(rows=2), known._replace(rows=8)]
        return vary(grid.BACKWARD, [block], ([launch] for launch in tried))

    return Case(
        f"norm backward, dropout {p}",
        f"{n} x {width}",
        make,
        norm_triton.backward,
        exact,
        n * width * 2 * (5 if p else 4),
        compared=lambda out: (*out[:2], out[2].sum(1)),  # type: ignore[union-attr]
        variants=variants,
        plain=norm.backward.plain,  # type: ignore[attr-defined]
    )


def column_cases() -> Iterator[Case]:
    for n, width in shapes((32768, 1024), (1024, 1024), (32768, 4096)):
        yield Case(
            "columns: sums",
            f"{n} x {width}",
            lambda n=n, width=width: (draw(n, width),),
            lambda x: [gradients_triton.sum_rows(x)],
            lambda x: [x.double().sum(0, keepdim=True)],
            n * width * 2,
            compared=lambda out: [out[0].sum(0)],  # type: ignore[union-attr]
            plain=gradients.sum_rows.plain,  # type: ignore[attr-defined]
        )
    for n, width in shapes((528, 1024), (256, 1024), (132, 4096)):
        yield Case(
            "columns: three totals",
            f"3 x {n} x {width}",
            lambda n=n, width=width: (
                draw(3, n, width, dtype=torch.float32),
                [(draw(width, dtype=torch.float32), False) for _ in range(3)],
            ),
            lambda partials, places: (
                gradients_triton.reduce_into(places, partials) or [t for t, _ in places]
            ),
            lambda partials, places: list(partials.double().sum(1)),
            3 * n * width * 4,
            plain=lambda partials, places: gradients.reduce_into.plain(places, partials),  # type: ignore[attr-defined]
        )


def activation_cases() -> Iterator[Case]:
    """GELU and SwiGLU in bf16; backward also sums the columns."""
    for n, width in shapes((32768, 4096), (1024, 4096)):
        yield from activation_pair("gelu-tanh", n, width)
    for n, width in shapes((16384, 5504)):
        yield from activation_pair("swiglu", n, width)


def activation_pair(kind: str, n: int, width: int) -> Iterator[Case]:
    inputs = 2 if kind == "swiglu" else 1

    def differentiate(u: torch.Tensor, grad: torch.Tensor) -> Outputs:
        _, pull_back = torch.func.vjp(
            lambda x: activation.plain(kind, activation.halves(kind, x)), u.float()
        )
        (du,) = pull_back(grad.float())
        return du.to(u.dtype), du.sum(0)

    yield Case(
        f"activation {kind} forward",
        f"{n} x {inputs} x {width}",
        lambda: (draw(n, inputs * width),),
        lambda u: [activation_triton.forward(kind, u)],
        lambda u: [activation.forward(kind, u.double())],
        n * width * 2 * (inputs + 1),
        variants=activation_blocks,
        plain=lambda u: activation.forward.plain(kind, u),  # type: ignore[attr-defined]
    )
    yield Case(
        f"activation {kind} backward",
        f"{n} x {inputs} x {width}",
        lambda: (draw(n, inputs * width), draw(n, width)),
        lambda u, grad: activation_triton.backward(kind, u, grad, True),
        lambda u, grad: activation.backward(kind, u.double(), grad.double(), True),
        n * width * 2 * (2 * inputs + 1),
        compared=lambda out: (out[0], out[1].sum(0)),  # type: ignore[union-attr]
        variants=activation_tiles,
        plain=differentiate,
    )


def activation_blocks() -> Iterator[str]:
    tried = (1024, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8)
    return vary(vars(activation_triton), ["BLOCK", "WARPS"], tried)


def activation_tiles() -> Iterator[str]:
    """Vary both tiles at once: the number of rows chooses between them."""
    tile = activation_triton.TILE
    tried = [tile._replace(stages=n) for n in (1, 3, 4)] + [
        tile._replace(rows=n) for n in (32, 64, 256)
    ]
    tried += [tile._replace(step=n) for n in (8, 32)] + [
        tile._replace(columns=256, step=n, warps=8) for n in (8, 16)
    ]
    return vary(vars(activation_triton), ["TILE", "SMALL"], ([other, other] for other in tried))


def heads_cases() -> Iterator[Case]:
    """Attention's first product in bf16: GPT's heads, then with RoPE, then grouped with RoPE."""
    gpt, grouped = heads.HeadSizes(16, 1, 64), heads.HeadSizes(8, 4, 128)
    for b, t in shapes((32, 1024), (1, 1024)):
        yield heads_backward(b, t, gpt, rotated=False)
        yield heads_forward(b, t, gpt)
        yield heads_backward(b, t, gpt, rotated=True)
    for b, t in shapes((8, 2048)):
        yield heads_forward(b, t, grouped)
        yield heads_backward(b, t, grouped, rotated=True)
    for b, t in shapes((32, 1024), (1, 1024)):
        yield from normed_heads(b, t, gpt)
    for b, t in shapes((8, 2048)):
        yield from normed_heads(b, t, heads.HeadSizes(16, 1, 128))
        yield from normed_heads(b, t, grouped)


def angles(t: int, sizes: heads.HeadSizes) -> tuple[torch.Tensor, torch.Tensor]:
    angle = draw(1, t, 1, sizes.head_dim // 2, dtype=torch.float32)
    return angle.cos(), angle.sin()


def heads_shape(b: int, t: int, sizes: heads.HeadSizes) -> str:
    return f"{b} x {t} x ({sizes.groups * sizes.per_group} + 2 x {sizes.groups}) x {sizes.head_dim}"


def heads_forward(b: int, t: int, sizes: heads.HeadSizes) -> Case:
    groups, per_group, dim = sizes
    return Case(
        "heads forward, RoPE",
        heads_shape(b, t, sizes),
        lambda: (draw(b, t, groups * (per_group + 2) * dim), angles(t, sizes)),
        lambda qkv, rotation: heads_triton.rotate_qk(qkv, sizes, rotation),
        lambda qkv, rotation: heads.split_and_rotate(qkv.double(), sizes, rotation)[:2],
        b * t * groups * (per_group + 1) * dim * 2 * 2,
        variants=heads_tiles,
        plain=lambda qkv, rotation: heads.rotate_qk.plain(qkv, sizes, rotation),  # type: ignore[attr-defined]
    )


def heads_backward(b: int, t: int, sizes: heads.HeadSizes, rotated: bool) -> Case:
    groups, per_group, dim = sizes

    def make() -> tuple[Any, ...]:
        grads = (draw(b, n, t, dim).transpose(1, 2) for n in (groups * per_group, groups, groups))
        return tuple(grads), angles(t, sizes) if rotated else None

    return Case(
        f"heads backward{', RoPE' if rotated else ''}",
        heads_shape(b, t, sizes),
        make,
        lambda grads, rotation: heads_triton.pack(grads, sizes, rotation, True),
        lambda grads, rotation: heads.pack(doubled(grads), sizes, rotation, True),
        b * t * groups * (per_group + 2) * dim * 2 * 2,
        compared=lambda out: (out[0], out[1].sum(0)),  # type: ignore[union-attr]
        variants=heads_tiles,
        plain=lambda grads, rotation: heads.pack.plain(grads, sizes, rotation, True),  # type: ignore[attr-defined]
    )


def normed_heads(b: int, t: int, sizes: heads.HeadSizes) -> Iterator[Case]:
    """RMSNorm of queries and keys with RoPE; the product before adds no bias."""
    groups, per_group, dim = sizes
    slots = groups * (per_group + 1)  # of queries and keys

    def norms(dtype: torch.dtype = torch.bfloat16) -> qk_norm.HeadNorms:
        torch.manual_seed(0)
        weights = (norm.NormWeights(draw(dim, mean=1.0), None, 1e-5, 0.0, False) for _ in range(2))
        return qk_norm.HeadNorms(*(w._replace(weight=w.weight.to(dtype)) for w in weights))

    def product() -> torch.Tensor:
        return draw(b, t, groups * (per_group + 2) * dim)

    def gradients_of_heads() -> tuple[torch.Tensor, ...]:
        counts = groups * per_group, groups, groups
        return tuple(draw(b, n, t, dim).transpose(1, 2) for n in counts)

    def summed(out: Any) -> Outputs:
        return out.of_qkv, out.of_q.sum(1), out.of_k.sum(1)

    shape = heads_shape(b, t, sizes)
    yield Case(
        "heads forward, QK-norm, RoPE",
        shape,
        lambda: (product(), angles(t, sizes), norms()),
        lambda qkv, rotation, ours: qk_norm_triton.norm_qk(qkv, sizes, rotation, ours),
        lambda qkv, rotation, _: qk_norm.norm_qk(
            qkv.double(), sizes, rotation, norms(torch.float64)
        ),
        b * t * slots * dim * 2 * 2,
        variants=lambda: heads_tiles(qk_norm_triton, "TILE"),
        plain=lambda qkv, rotation, ours: qk_norm.norm_qk.plain(qkv, sizes, rotation, ours),  # type: ignore[attr-defined]
    )
    yield Case(
        "heads backward, QK-norm, RoPE",
        shape,
        lambda: (gradients_of_heads(), product(), angles(t, sizes), norms()),
        lambda grads, qkv, rotation, ours: qk_norm_triton.pack(
            grads, qkv, sizes, rotation, ours, False
        ),
        lambda grads, qkv, rotation, _: qk_norm.pack(
            doubled(grads), qkv.double(), sizes, rotation, norms(torch.float64), False
        ),
        b * t * (2 * groups * (per_group + 2) + slots) * dim * 2,
        compared=summed,
        variants=lambda: heads_tiles(qk_norm_triton, "PACK_TILE"),
        plain=lambda grads, qkv, rotation, ours: qk_norm.pack.plain(  # type: ignore[attr-defined]
            grads, qkv, sizes, rotation, ours, False
        ),
    )


def heads_tiles(module: Any = heads_triton, name: str = "TILE") -> Iterator[str]:
    known = getattr(module, name)
    tried = [known._replace(stages=n) for n in (1, 3, 4)] + [
        known._replace(samples=n) for n in (1, 4, 32)
    ]
    tried += [
        known._replace(step=n, warps=w) for n, w in ((16, 2), (16, 4), (32, 2), (64, 4), (64, 8))
    ]
    return vary(vars(module), [name], ([tile] for tile in tried))


def muon_cases() -> Iterator[Case]:
    """The elementwise passes over the matrices of 24 layers."""
    for rows, columns in shapes((1024, 4096), (1024, 1024)):
        count = 24 if GPU else 2
        number = torch.full((), 0.5, device=DEVICE)

        def make(rows: int = rows, columns: int = columns, count: int = count) -> tuple[Any, ...]:
            lists = tuple(list(draw(count, rows, columns, dtype=torch.float32)) for _ in range(2))
            for some in lists:
                muon_triton.addresses(some)  # a graph cannot copy them from the host
            return lists

        def advance(gradients: Any, moments: Any, number: torch.Tensor = number) -> Outputs:
            ahead, norms = muon_triton.advance(gradients, moments, number, number * 0, 0.95)
            return [ahead, norms, *moments]

        def ahead(gradients: Any, moments: Any) -> Outputs:
            now, old = torch.stack(gradients).double() * 2, torch.stack(moments).double()
            new = old.lerp(now, 0.05)
            out = now.lerp(new, 0.95)
            return [out, out.norm(dim=(1, 2)), *new]

        def with_updates(make: Callable[[], tuple[Any, ...]] = make) -> tuple[Any, ...]:
            weights, updates = make()
            return weights, torch.stack(updates).half()

        def apply(weights: Any, updates: Any, number: torch.Tensor = number) -> Outputs:
            muon_triton.subtract(weights, updates, number, number, number * 0)
            return weights  # type: ignore[no-any-return]

        def applied(weights: Any, updates: Any) -> Outputs:
            return list((torch.stack(weights).double() - updates.double()) / 2)

        def advance_plainly(gradients: Any, moments: Any, number: torch.Tensor = number) -> Outputs:
            return muon.advance.plain(gradients, moments, number, number * 0, 0.95)  # type: ignore[attr-defined,no-any-return]

        def apply_plainly(weights: Any, updates: Any, number: torch.Tensor = number) -> None:
            muon.subtract.plain(weights, updates, number, number, number * 0)  # type: ignore[attr-defined]

        shape, size = f"{count} x {rows} x {columns}", count * rows * columns
        yield Case("muon: advance", shape, make, advance, ahead, size * 14, plain=advance_plainly)
        yield Case(
            "muon: apply", shape, with_updates, apply, applied, size * 10, plain=apply_plainly
        )


def adamw_cases() -> Iterator[Case]:
    """The norm and the update of a model of 355 M and one of 1.3 G parameters."""
    for size in (355 << 20, 1300 << 20) if GPU else (128 * 40,):
        yield norm_of_gradients(size)
        for low in (None, torch.bfloat16):
            yield adamw_update(size, low)


def norm_of_gradients(size: int) -> Case:
    table = adamw.make_table([adamw.FlatRange(0, size)], torch.device(DEVICE))

    def exact(x: torch.Tensor) -> Outputs:
        return [sum(part.double().square().sum() for part in x.split(1 << 26))]

    def variants() -> Iterator[str]:
        tried = (1056, 16), (4096, 16), (8192, 16), (2048, 8), (2048, 32)
        return vary(vars(adamw_triton), ["PROGRAMS", "ROWS"], tried)

    run = adamw_triton.sum_squares
    return Case(
        "adamw: squares",
        str(size),
        lambda: (torch.randn(size, device=DEVICE),),
        lambda x: [run(x, table)],
        exact,
        size * 4,
        variants=variants,
        plain=lambda x: [x.double().square().sum()],
    )


def adamw_update(size: int, low: torch.dtype | None) -> Case:
    """The first 2^20 elements are compared; all in float64 would not fit."""
    table, settings = (
        adamw.make_table([adamw.FlatRange(0, size, True)], torch.device(DEVICE)),
        adamw.AdamWConstants(0.9, 0.95, 1e-8),
    )
    decision = torch.tensor([1.0, 0.5, 1.0, 0.5, 1.5, *[1e-3, 1e-2] * adamw.KINDS], device=DEVICE)

    def make() -> tuple[Any, ...]:
        flats = [torch.randn(size, device=DEVICE) for _ in range(4)]
        flats[2].abs_()
        return (*flats, None if low is None else torch.zeros(size, dtype=low, device=DEVICE))

    def run(*flats: torch.Tensor | None) -> Outputs:
        adamw_triton.update_blocks(flats, table, settings, decision)
        return flats[1:]

    def exact(
        g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, p: torch.Tensor, w: torch.Tensor | None
    ) -> Outputs:
        factor, inverse_root, decay, step_size = decision[
            adamw.FACTOR : adamw.OF_KINDS + 2
        ].double()
        g, m, v, p = (x[: 1 << 20].double() for x in (g, m, v, p))
        m, v = m * 0.9 + g * factor * 0.1, v * 0.95 + (g * factor).square() * 0.05
        p = p * (1 - decay) - step_size * m / (v.sqrt() * inverse_root + 1e-8)
        return [m, v, p, None if w is None else p.to(w.dtype).double()]

    def update(
        g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, p: torch.Tensor, w: torch.Tensor | None
    ) -> None:
        """Do the same to every element, without a table."""
        factor, root, decay, step_size = decision[adamw.FACTOR : adamw.OF_KINDS + 2]
        new = adamw.advance(p, g * factor, [m, v], settings, decay, step_size, root)
        for old, value in zip((p, m, v), new, strict=True):
            old.copy_(torch.where(decision[adamw.FINITE] > 0, value, old))
        if w is not None:
            w.copy_(p)

    def variants() -> Iterator[str]:
        return vary(
            vars(adamw_triton), ["ROWS", "WARPS"], ((4, 4), (8, 4), (8, 8), (16, 4), (32, 8))
        )

    return Case(
        f"adamw: update{', weights in bf16' if low else ''}",
        str(size),
        make,
        run,
        exact,
        size * (28 if low is None else 30),
        compared=lambda out: [None if x is None else x[: 1 << 20] for x in out],
        variants=variants,
        plain=update,
    )


def embedding_cases() -> Iterator[Case]:
    """The token table's gradient; ids are as frequent as words, by the inverse of their rank."""
    for n, width in shapes((32768, 1024), (1024, 1024)):

        def make(n: int = n, width: int = width) -> tuple[Any, ...]:
            ids = (50000 ** torch.rand(n, device=DEVICE)).long()
            return draw(50304, width, dtype=torch.float32), ids, draw(n, width)

        def run(total: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> Outputs:
            embedding.add_rows(total, ids, rows)
            return [total]

        yield Case(
            "embedding: add rows",
            f"{n} x {width}",
            make,
            run,
            lambda total, ids, rows: [total.double().index_add_(0, ids, rows.double())],
            n * width * 2,
            plain=embedding.add_rows.plain,  # type: ignore[attr-defined]
            variants=embedding_tiles,
        )


def embedding_tiles() -> Iterator[str]:
    tried = (
        (16, 256, 4),
        (16, 512, 4),
        (16, 512, 8),
        (8, 512, 4),
        (4, 1024, 4),
        (8, 1024, 4),
        (8, 1024, 8),
        (32, 256, 8),
    )
    return vary(vars(embedding_triton), ["ROWS", "COLUMNS", "WARPS"], tried)


def loss_cases() -> Iterator[Case]:
    """Cross entropy of bf16 logits of GPT-2's vocabulary; backward overwrites them."""
    for n, width in shapes((32768, 50304), (1024, 50304)):
        vocab = min(width, 50257)

        def make(n: int = n, width: int = width, vocab: int = vocab) -> tuple[Any, ...]:
            return draw(n, width), torch.randint(0, vocab, (n,), device=DEVICE)

        def with_gradients(n: int = n, width: int = width, vocab: int = vocab) -> tuple[Any, ...]:
            logits, labels = draw(n, width), torch.randint(0, vocab, (n,), device=DEVICE)
            return logits, labels, logits.float().logsumexp(1), draw(n, dtype=torch.float32)

        def normalise(logits: torch.Tensor, labels: torch.Tensor, vocab: int = vocab) -> Outputs:
            x = logits[:, :vocab].float()
            return x.logsumexp(1), x.gather(1, labels[:, None]).squeeze(1)

        def overwrite(*given: torch.Tensor, vocab: int = vocab) -> Outputs:
            cross_entropy_triton.overwrite(*given, vocab)
            return given[:1]

        def overwrite_plainly(
            logits: torch.Tensor,
            labels: torch.Tensor,
            lse: torch.Tensor,
            grad: torch.Tensor,
            vocab: int = vocab,
        ) -> Outputs:
            ids = torch.arange(logits.shape[1], device=logits.device)
            p = (logits.float() - lse[:, None]).exp() - (ids == labels[:, None]).float()
            logits.copy_(torch.where(ids < vocab, p * grad[:, None], 0.0))
            return [logits]

        def exact_overwrite(*given: torch.Tensor, vocab: int = vocab) -> Outputs:
            logits, labels, lse, grad = (x[:512] for x in given)
            p = logits[:, :vocab].double().softmax(1)
            p.scatter_add_(1, labels[:, None], -torch.ones_like(p[:, :1]))
            return [
                torch.nn.functional.pad(p * grad.double()[:, None], (0, logits.shape[1] - vocab))
            ]

        yield Case(
            "cross entropy: log-sum-exp",
            f"{n} x {width}",
            make,
            lambda logits, labels, vocab=vocab: cross_entropy_triton.log_sum_exp(
                logits, labels, vocab
            ),
            lambda logits, labels: normalise(logits[:512], labels[:512]),
            n * width * 2,
            compared=lambda out: [x[:512] for x in out],  # type: ignore[index]
            plain=normalise,
        )
        yield Case(
            "cross entropy: overwrite",
            f"{n} x {width}",
            with_gradients,
            overwrite,
            exact_overwrite,
            n * width * 2 * 2,
            compared=lambda out: [x[:512] for x in out],  # type: ignore[index]
            plain=overwrite_plainly,
        )


def dropout_cases() -> Iterator[Case]:
    for n, width in shapes((32768, 1024), (1024, 1024)):
        yield Case(
            "dropout",
            f"{n} x {width}",
            lambda n=n, width=width: (draw(n, width), hashes(n, 0.1), 0.1),
            lambda x, rows, p: [dropout_triton.drop(x, rows, p)],
            lambda x, rows, p: [dropout.mask_and_scale(x.double(), rows, p)],
            n * width * 2 * 2,
            plain=dropout.mask_and_scale,
        )


def softcap_cases() -> Iterator[Case]:
    for n, width in shapes((32768, 50304)):
        yield Case(
            "softcap: bound",
            f"{n} x {width}",
            lambda n=n, width=width: (draw(n, width), 30.0),
            lambda x, cap: [softcap_triton.bound(x, cap)],
            lambda x, cap: [torch.tanh(x[:512].double() / cap) * cap],
            n * width * 2 * 2,
            compared=lambda out: [x[:512] for x in out],  # type: ignore[index]
            plain=lambda x, cap: torch.tanh(x.float() / cap).mul(cap).to(x.dtype),
        )


GROUPS: list[Callable[[], Iterator[Case]]] = [  # a part adds its own here
    norm_cases,
    column_cases,
    activation_cases,
    heads_cases,
    muon_cases,
    adamw_cases,
    embedding_cases,
    loss_cases,
    dropout_cases,
    softcap_cases,
]


def copy_bandwidth() -> float:
    """Return bytes per second, read and written, of a copy of 1 GiB."""
    size = (1 << 30) if GPU else 1 << 20
    pairs = [
        tuple(torch.ones(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        for _ in range(2)
    ]
    return 2 * size / seconds_of(lambda a, b: a.copy_(b), pairs, least=LEAST_SECONDS)


def error(case: Case, given: tuple[Any, ...]) -> float:
    exact = case.exact(*given)  # first: some kernels overwrite their inputs
    out = case.compared(case.run(*given))
    pairs = zip(out, case.compared(exact), strict=True)
    return max(distance(a, b) for a, b in pairs if a is not None and b is not None)


def compiled_over(case: Case, sets: list[tuple[Any, ...]], time_of_one: float) -> float | None:
    """Return the time of torch.compile's code for the plain reference over the kernel's."""
    if case.plain is None:
        return None
    torch._dynamo.reset()
    compiled = torch.compile(case.plain, dynamic=False)
    return round(seconds_of(compiled, sets, least=LEAST_SECONDS) / time_of_one, 2)


def measure(case: Case, copy: float, variant: str, compiles: bool) -> dict[str, Any]:
    """Return a row of the table."""
    count = max(2, min(32, SETS_BYTES // case.bytes + 1)) if GPU else 1
    sets = [case.make() for _ in range(count)]
    worst = error(case, case.make())
    time_of_one = seconds_of(case.run, sets, least=LEAST_SECONDS)
    return {
        "kernel": case.name + variant,
        "shape": case.shape,
        "us": round(time_of_one * 1e6, 2),
        "GB/s": round(case.bytes / time_of_one / 1e9),
        "% of copy": round(100 * case.bytes / time_of_one / copy, 1),
        "TFLOP/s": round(case.flops / time_of_one / 1e12, 1),
        "error": float(f"{worst:.1e}"),
    } | (
        {"compiled": attempt("compiled", compiled_over, case, sets, time_of_one)}
        if compiles
        else {}
    )


def print_case(
    case: Case, copy: float, variant: str = "", compiles: bool = False
) -> dict[str, Any]:
    """Print the row of a case, and return it."""
    row = attempt(f"{case.name}{variant}, {case.shape}", measure, case, copy, variant, compiles)
    if row is None:
        return {"kernel": case.name + variant, "shape": case.shape, "failed": True}
    print_row(*row.values())
    return dict(row)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--shape", default="", help="only this one, as it is printed")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name() if GPU else 'CPU, interpreted'}: copy {copy / 1e9:.0f} GB/s\n"
    )
    print_head(
        "kernel",
        "shape",
        "us",
        "GB/s",
        "% of copy",
        "TFLOP/s",
        "error",
        *["compiled"] * args.compiled,
    )
    rows = []
    for case in (case for group in GROUPS for case in group()):
        if args.names and not any(case.name.startswith(name) for name in args.names):
            continue
        if args.shape and case.shape != args.shape:
            continue
        rows.append(print_case(case, copy, compiles=args.compiled))
        for variant in case.variants() if args.sweep and case.variants else ():
            rows.append(print_case(case, copy, f" {variant}"))
    if args.json:
        args.json.write_text(json.dumps({"copy GB/s": copy / 1e9, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
