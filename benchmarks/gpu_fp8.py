"""Check and time the fp8 kernels on a GPU: every byte of the cast, the products, their speed.

    python benchmarks/gpu_fp8.py [--parts bytes casts ...] [--sizes 32768x1024] [--tiles ...]

Prints "WRONG" where a figure is not what it must be, goes on, and ends with the number of them.
After `casts`, the other parts run with the fastest tiles, which it prints as kernels/triton/fp8.py
must have them.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import describe_machine, distance, new_parser, seconds_of
from torch import Tensor

from meshwright.config.schema import Model, Precision
from meshwright.kernels import activation, fp8, heads, norm
from meshwright.kernels.fp8 import E4M3, E5M2, LARGEST, Into, Recipe, Scales
from meshwright.kernels.gradients import multiply_into
from meshwright.kernels.triton import fp8 as fp8_triton
from meshwright.model import fp8 as model_fp8
from meshwright.model.fused import FusedBlock
from meshwright.model.gpt import GPT, Options, initialise
from meshwright.model.positions import Positions, share

GPU = torch.device("cuda", 0)
wrong = 0


def line(label: str, text: str, is_right: bool = True) -> None:
    global wrong
    wrong += not is_right
    print(f"{label:42}  {text}{'' if is_right else '   WRONG'}", flush=True)


def wanted(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    y = torch.where(
        x.isfinite(), (x.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype]), torch.nan
    )
    return y.to(dtype).view(torch.uint8)


def check_bytes() -> None:
    """Compare both layouts with torch's cast, with fresh numbers and poisoned memory each time."""
    shapes = [
        (64, 128),
        (70, 136),
        (3, 16),
        (4099, 1040),
        (32768, 1024),
        (16384, 8192),
        (1024, 50304),
    ]
    for (n, c), dtype, scale, special in itertools.product(
        shapes, (E4M3, E5M2), (1.0, 3e4, 1e-3), (False, True)
    ):
        x = torch.randn(n, c, device=GPU).bfloat16() * torch.rand(n, 1, device=GPU).bfloat16()
        if special:
            x.view(-1)[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan], device=GPU)
        out, turned = fp8.empty_casts((n, c), dtype, GPU, True)
        assert turned is not None
        for y in (out, turned):
            y.view(torch.uint8).random_()
        amax, by = torch.zeros(4, device=GPU), torch.full((4,), scale, device=GPU)
        fp8_triton.quantise(x, by[0], amax[0], out, turned)
        right = wanted(x, by[0], dtype)
        bad = (
            int((out.view(torch.uint8) != right).sum()),
            int((turned.view(torch.uint8)[:, :n] != right.t()).sum()),
        )
        padding = int(turned.view(torch.uint8)[:, n:].count_nonzero())
        high = x.where(x.isfinite(), 0).abs().amax().float()
        label = f"bytes {n}x{c} {str(dtype)[13:]} *{scale:g}{' inf' * special}"
        is_right = not any(bad) and not padding and bool(amax[0] == high)
        if not is_right or scale == 1.0:
            line(
                label,
                f"{bad[0]} and {bad[1]} of {n * c:,} differ, {padding} in the padding",
                is_right,
            )


class Total:
    """A main_grad, which is overwritten each time."""

    def __init__(self, shape: torch.Size) -> None:
        self.total = torch.full(shape, torch.nan, device=GPU)

    def begin(self) -> tuple[Tensor, bool]:
        return self.total, False

    def end(self) -> None:
        pass


def a_map(
    inside: int, outside: int, hybrid: bool
) -> tuple[Scales, fp8.Fp8Product, torch.nn.Parameter]:
    scales = Scales(Recipe(hybrid), GPU)
    here = scales.add(["h.0.mlp.fc"])["h.0.mlp.fc"]
    weight = torch.nn.Parameter((torch.randn(outside, inside, device=GPU) * 0.02).bfloat16())
    return scales, here, weight


def check_products() -> None:
    """Compare with float64, and with the emulation that tests on a CPU rely on."""
    for n, inside, outside, hybrid in [
        (2048, 1024, 4096, False),
        (2048, 1024, 3072, True),
        (1000, 4096, 1024, True),
    ]:
        scales, here, weight = a_map(inside, outside, hybrid)
        x = torch.randn(n, inside, device=GPU).bfloat16().requires_grad_()
        bias = torch.randn(outside, device=GPU).bfloat16().requires_grad_()
        grad = torch.randn(n, outside, device=GPU).bfloat16() * 1e-5
        for use in ("first", "second", "into a total"):
            if use == "into a total":
                weight.main_grad = Total(weight.shape)  # type: ignore[attr-defined]
            x.grad = weight.grad = bias.grad = None
            y = here(x, weight, bias)
            y.backward(grad)
            of_weight = weight.main_grad.total if use == "into a total" else weight.grad  # type: ignore[attr-defined]
            assert x.grad is not None and of_weight is not None and bias.grad is not None
            exact = [
                F.linear(x.double(), weight.double(), bias.double()),
                grad.double() @ weight.double(),
            ]
            exact += [grad.double().t() @ x.double(), grad.double().sum(0)]
            errors = [
                distance(a, b)
                for a, b in zip((y, x.grad, of_weight, bias.grad), exact, strict=True)
            ]
            limit = 0.09 if hybrid else 0.06
            is_right = max(errors[:3]) < limit and errors[3] < 0.01
            text = "y, dx, dW, db off by " + ", ".join(f"{e:.4f}" for e in errors)
            line(
                f"product {n}x{inside}->{outside} {'hybrid' if hybrid else 'e4m3'} {use}",
                text,
                is_right,
            )
            scales.update()
            scales.refresh()
    a, b = (torch.randn(512, 1024, device=GPU).to(E4M3) for _ in range(2))
    one = torch.ones(2, 4, device=GPU)[:, 0]  # 16 bytes apart, as a product demands
    for is_fast in (True, False):
        got = fp8.multiply(a, b, (one[0], one[1]), torch.float32, is_fast=is_fast)
        error = distance(got, a.double() @ b.double().t())
        line(f"product of fp8 against float64, fast {is_fast}", f"off by {error:.1e}", error < 1e-2)


def gigabytes(label: str, f: Callable[[], Any], moved: int) -> float:
    """Print the time of a call and bytes a second, and return the time."""
    ms = 1e3 * seconds_of(f, [()] * 20, graph=False)
    line(label, f"{ms:7.3f} ms {moved / ms / 1e6:7,.0f} GB/s")
    return ms


def time_casts(sizes: list[list[int]], tiles: list[fp8_triton.CastTile]) -> None:
    """Time the cast and the transposition by tile; the best are in kernels/triton/fp8.py."""
    for n, h in sizes:
        c = 4 * h
        x, one = torch.randn(n, c, device=GPU).bfloat16(), torch.ones(4, device=GPU)
        out, turned = fp8.empty_casts((n, c), E4M3, GPU, True)
        assert turned is not None

        def cast(turned: Tensor | None = turned) -> None:
            fp8_triton.quantise(x, one[0], one[1], out, turned)  # noqa: B023

        def turn() -> None:
            fp8_triton.transpose_into(out, turned)  # noqa: B023

        found: dict[str, list[tuple[float, fp8_triton.CastTile]]] = {"CAST": [], "TRANSPOSE": []}
        for tile in tiles:
            fp8_triton.CAST = fp8_triton.TRANSPOSE = tile
            for name, f, moved in (("CAST", cast, 4), ("TRANSPOSE", turn, 2)):
                if name == "CAST" and tile.rows * tile.columns > 128 * 32 * tile.warps:
                    continue  # it would take more registers than there are
                turned.view(torch.uint8).random_()
                ms = gigabytes(f"{name} {n}x{c} {' '.join(map(str, tile))}", f, moved * n * c)
                found[name].append((ms, tile))
                if not torch.equal(turned.view(torch.uint8), out.view(torch.uint8).t()):
                    line(f"{name} {tile}", "wrong bytes", False)
        for name, each in found.items():
            ms, tile = min(each)
            line(f"best {n}x{c}", f"{name} = {tile}, {ms:.3f} ms")
            setattr(fp8_triton, name, tile)
        gigabytes(f"cast {n}x{c}, one layout", lambda: cast(None), 3 * n * c)  # noqa: B023
        gigabytes(f"cast, then transpose {n}x{c}", lambda: (cast(None), turn()), 5 * n * c)  # noqa: B023


def time_weights(sizes: list[list[int]]) -> None:
    """Check and time the cast of 24 layers' weights, one by one and in one launch."""
    for _, h in sizes:
        scales = Scales(Recipe(), GPU)
        maps = list(scales.add(map(str, range(96))).values())
        shapes = [(3 * h, h), (h, h), (4 * h, h), (h, 4 * h)] * 24
        for here, shape in zip(maps, shapes, strict=True):
            here.know((torch.randn(shape, device=GPU) * 0.02).bfloat16())
        right = [[x.clone() for x in here.cast[:2]] for here in maps if here.cast is not None]  # type: ignore[union-attr]
        elements = sum(a * b for a, b in shapes)

        def one_by_one() -> None:
            for here in maps:  # noqa: B023
                here.refresh()

        gigabytes(f"{len(maps)} weights of {h}, one by one", one_by_one, 4 * elements)
        for here in maps:
            for x in here.cast[:2]:  # type: ignore[index]
                x.view(torch.uint8).random_()  # type: ignore[union-attr]
        gigabytes(f"{len(maps)} weights of {h}, one launch", scales.refresh, 4 * elements)
        pairs = (
            (a, b)
            for here, kept in zip(maps, right, strict=True)
            for a, b in zip(here.cast[:2], kept, strict=True)
        )  # type: ignore[index]
        bad = sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)  # type: ignore[union-attr]
        line(f"{len(maps)} weights of {h}", f"{bad} bytes differ", not bad)


def writers(
    n: int, h: int
) -> Iterator[tuple[str, tuple[int, int], Callable[[Any], tuple[Any, ...]], int]]:
    """Yield kernels that may write fp8: name, its shape, the kernel, bytes an element that it reads
    (and writes in 16 bits in any case).
    """

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=GPU).bfloat16()

    x, pending, weight, shift = draw(n, h), draw(n, h), draw(h), draw(h)
    join = norm.operands_of(x, pending, weight, None, 0.0)
    weights = norm.NormWeights(weight, shift, 1e-5)
    yield "norm", (n, h), lambda into: norm.forward(join, weights, into)[1:2], 6
    u, grad = draw(n, 4 * h), draw(n, 4 * h)
    for kind in ("gelu-tanh", "squared-relu"):
        yield kind, (n, 4 * h), lambda into: (activation.forward(kind, u, into),), 2  # noqa: B023
        yield (
            f"gradient of {kind}",
            (n, 4 * h),
            lambda into: activation.backward(kind, u, grad, True, into),  # noqa: B023
            4,
        )
    half = grad[:, : 2 * h].contiguous()
    yield (
        "gradient of swiglu",
        (n, 4 * h),
        lambda into: activation.backward("swiglu", u, half, True, into),
        3,
    )
    grads = [draw(n // 1024, 1024, h // 64, 64) for _ in range(3)]
    angles = torch.randn(1, 1024, 1, 32, device=GPU)
    for name, rotation in (("heads", None), ("rotated heads", (angles.cos(), angles.sin()))):
        sizes = heads.HeadSizes(h // 64, 1, 64)
        yield (
            f"gradient of {name}",
            (n, 3 * h),
            lambda into: heads.pack(grads, sizes, rotation, True, into),  # noqa: B023
            2,
        )


def check_and_time_writers(sizes: list[list[int]]) -> None:
    """Compare kernels that write fp8 with a cast of what they write in bfloat16, and time both."""
    for n, h in sizes:
        for (name, shape, make, read), dtype in itertools.product(writers(n, h), (E4M3, E5M2)):
            y, *rest = make(None)
            scale, results = 0.7 * LARGEST[dtype] / y.abs().max().float().view(1), []
            for is_fused in (False, True):
                out, _ = fp8.empty_casts(shape, dtype, GPU, False)
                out.view(torch.uint8).random_()
                into = Into(out, scale, torch.zeros(1, device=GPU))
                _, *again = make(into) if is_fused else (into.fill(y), *rest)
                results.append((out.view(torch.uint8), into.amax, again))
            (a, high, sums), (b, our_high, our_sums) = results
            assert high is not None and our_high is not None
            bad = int((a != b).sum())
            far_off = max(
                (distance(q, p.double()) for p, q in zip(sums, our_sums, strict=True)), default=0.0
            )
            # the two may be contracted differently
            same = bool(high == our_high) and far_off < 1e-6
            text = f"{bad} of {a.numel():,} bytes differ; amax {float(high == our_high):.0f}, sums off by {far_off:.1e}"
            line(f"{name} {n}x{h} {str(dtype)[13:]}", text, bad == 0 and same)
            if dtype is E4M3:
                elements = shape[0] * shape[1]
                gigabytes(f"{name}, 16 bits", lambda: make(None), (read + 2) * elements)  # noqa: B023
                gigabytes(f"{name}, fp8", lambda: make(into), (read + 1) * elements)  # noqa: B023


def time_blocks(sizes: list[list[int]]) -> None:
    """Time forward and backward of blocks, in bfloat16, in fp8, and in fp8 with casts apart."""
    for n, h in sizes:
        m = Model(
            num_layers=4,
            hidden_size=h,
            num_attention_heads=h // 64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        for name in ("bf16", "fp8, casts apart", "fp8"):
            torch.manual_seed(0)
            with torch.device(GPU):
                model = GPT(m, 64, 64, 1024, FusedBlock, Options(fused=True)).bfloat16().train()
                initialise(model.named_parameters(), m, 64, 1)
                x = torch.randn(n // 1024, 1024, h).bfloat16().requires_grad_()
            for p in model.parameters():
                p.main_grad = Total(p.shape)  # type: ignore[attr-defined]
            where = Positions(columns=torch.arange(1024, device=GPU))
            shared, none = (
                share(m, where, torch.zeros(n // 1024, 1024, device=GPU), torch.bfloat16, False),
                [None] * 9,
            )
            if name != "bf16":
                model_fp8.attach_fp8([model], Precision(bf16=True, fp8_format="e4m3"), GPU)
            if name == "fp8, casts apart":
                for block in model.h.children():
                    del block.enter, block.transform

            def run() -> None:
                out = model.run(None, x, shared, none, list(range(4)))  # noqa: B023
                torch.autograd.backward([y for y in out if y is not None], [x.detach()] * 2)  # noqa: B023

            for _ in range(3):
                run()
            ms = 1e3 * seconds_of(run)
            line(
                f"block of {n}x{h}, {name}",
                f"{ms / 4:.3f} ms a layer, forward and backward in a CUDA graph",
            )


def time_products(sizes: list[list[int]]) -> None:
    """Time the maps of a layer: bare products and products with casts, in fp8 and bfloat16."""
    for n, h in sizes:
        sums = [0.0] * 4
        for name, inside, outside in (
            ("qkv", h, 3 * h),
            ("proj", h, h),
            ("fc", h, 4 * h),
            ("mlp.proj", 4 * h, h),
        ):
            scales, here, weight = a_map(inside, outside, False)
            weight.main_grad = Total(weight.shape)  # type: ignore[attr-defined]
            total = weight.main_grad.total  # type: ignore[attr-defined]
            x, bias = (
                torch.randn(n, inside, device=GPU).bfloat16(),
                torch.zeros(outside, device=GPU).bfloat16(),
            )
            grad, low = torch.randn(n, outside, device=GPU).bfloat16() * 1e-5, weight.detach()
            here(x.requires_grad_(), weight, bias)
            scales.update()
            casts = [
                scales.cast(slot, y.detach(), True, True)
                for slot, y in enumerate((x, weight, grad))
            ]
            (qx, qx_t, ix), (qw, qw_t, iw), (qg, qg_t, ig) = casts
            assert qx_t is not None and qw_t is not None and qg_t is not None

            def bare() -> None:
                fp8.multiply(qx, qw, (ix, iw), torch.bfloat16, bias)  # noqa: B023
                fp8.multiply(qg, qw_t, (ig, iw), torch.bfloat16)  # noqa: B023
                fp8.multiply(qg_t, qx_t, (ig, ix), torch.float32, out=total, is_fast=False)  # noqa: B023

            def plain() -> None:
                F.linear(x.detach(), low, bias)  # noqa: B023
                torch.mm(grad, low)  # noqa: B023
                multiply_into(total, grad.t(), x.detach(), False)  # noqa: B023

            def cast() -> None:
                for slot, y in ((0, x), (2, grad)):  # noqa: B023
                    scales.cast(slot, y.detach(), True, True)  # noqa: B023

            def whole() -> None:
                torch.autograd.grad(here(x, weight, bias), [x], grad)  # noqa: B023

            each = [1e3 * seconds_of(f, [()] * 20, graph=False) for f in (plain, bare, cast, whole)]
            rate = 6 * n * inside * outside / 1e9
            text = "bf16 {:.3f} ms ({:.0f} TFLOP/s), fp8 {:.3f} ({:.0f}), casts {:.3f}, all with autograd {:.3f}"
            line(
                f"products {n}x{h} {name}",
                text.format(each[0], rate / each[0], each[1], rate / each[1], *each[2:]),
            )
            sums = [a + b for a, b in zip(sums, each, strict=True)]
        text = "bf16 {:.3f} ms, fp8 {:.3f}, casts {:.3f}, all with autograd {:.3f}".format(*sums)
        line(f"products {n}x{h} of a layer", f"{text}; gain {sums[0] / (sums[1] + sums[2]):.2f}")


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["32768x1024"], help="tokens x hidden size")
    kinds = [
        "128x128x16x4",
        "128x128x16x4x0",
        "128x64x8x4",
        "128x64x8x4x0",
        "64x128x8x4",
        "64x64x4x4",
    ]
    kinds += ["128x128x8x4", "128x128x8x8", "256x64x16x4", "64x128x4x1"]
    parser.add_argument(
        "--tiles", nargs="+", default=kinds, help="rows x columns x warps x pack[x down] of Tile"
    )
    parts = {
        "bytes": lambda: check_bytes(),
        "casts": lambda: time_casts(sizes, tiles),
        "weights": lambda: time_weights(sizes),
        "writers": lambda: check_and_time_writers(sizes),
        "blocks": lambda: time_blocks(sizes),
        "products": lambda: (check_products(), time_products(sizes)),
    }
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=parts, help="what to do")
    given = parser.parse_args()
    sizes = [list(map(int, size.split("x"))) for size in given.sizes]
    tiles = [fp8_triton.CastTile(*map(int, tile.split("x"))) for tile in given.tiles]
    print(describe_machine("torch", "triton"))
    for name in given.parts:
        began = time.perf_counter()
        try:
            parts[name]()
        except Exception:
            line("stopped", traceback.format_exc(), False)
        line(f"{name} done", f"{time.perf_counter() - began:.0f} s")
    print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
