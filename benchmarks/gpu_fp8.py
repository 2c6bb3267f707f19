"""Check and time the fp8 kernels on a GPU: every byte of the cast, the products, their speed.

    python benchmarks/gpu_fp8.py [--sizes 32768x1024 16384x2048] [--tiles 64x128x4 32x128x4 ...]

Prints "WRONG" where a figure is not what it must be, goes on, and ends with the number of them.
"""

from __future__ import annotations

import argparse
import itertools
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import fp8, fp8_triton
from meshwright.kernels.fp8 import E4M3, E5M2, LARGEST, Recipe, Scales
from meshwright.kernels.gradients import multiply_into

GPU = torch.device("cuda", 0)
wrong = 0


def line(label: str, text: str, is_right: bool = True) -> None:
    global wrong
    wrong += not is_right
    print(f"{label:42}  {text}{'' if is_right else '   WRONG'}", flush=True)


def milliseconds(f: Callable[[], Any], repeat: int = 20) -> float:
    """Return the median time of a call."""
    for _ in range(3):
        f()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    for event in events[:-1]:
        event.record()
        f()
    events[-1].record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))[repeat // 2]


def wanted(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    y = torch.where(x.isfinite(), (x.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype]), torch.nan)
    return y.to(dtype).view(torch.uint8)


def check_bytes() -> None:
    """Compare both layouts with torch's cast, with fresh numbers and poisoned memory each time."""
    shapes = [(64, 128), (70, 136), (3, 16), (4099, 1040), (32768, 1024), (16384, 8192), (1024, 50304)]
    for (n, c), dtype, scale, special in itertools.product(shapes, (E4M3, E5M2), (1.0, 3e4, 1e-3), (False, True)):
        x = torch.randn(n, c, device=GPU).bfloat16() * torch.rand(n, 1, device=GPU).bfloat16()
        if special:
            x.view(-1)[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan], device=GPU)
        out, turned = fp8.empty((n, c), dtype, GPU, True)
        assert turned is not None
        for y in (out, turned):
            y.view(torch.uint8).random_()
        amax, by = torch.zeros(4, device=GPU), torch.full((4,), scale, device=GPU)
        fp8_triton.quantise(x, by[0], amax[0], out, turned, LARGEST[dtype])
        right = wanted(x, by[0], dtype)
        bad = int((out.view(torch.uint8) != right).sum()), int((turned.view(torch.uint8)[:, :n] != right.t()).sum())
        padding = int(turned.view(torch.uint8)[:, n:].count_nonzero())
        high = x.where(x.isfinite(), 0).abs().amax().float()
        label = f"bytes {n}x{c} {str(dtype)[13:]} *{scale:g}{' inf' * special}"
        is_right = not any(bad) and not padding and bool(amax[0] == high)
        if not is_right or scale == 1.0:
            line(label, f"{bad[0]} and {bad[1]} of {n * c:,} differ, {padding} in the padding", is_right)


class Total:
    """A sink, which is overwritten each time."""

    def __init__(self, shape: torch.Size) -> None:
        self.total = torch.full(shape, torch.nan, device=GPU)

    def begin(self) -> tuple[Tensor, bool]:
        return self.total, False

    def end(self) -> None:
        pass


def a_map(inside: int, outside: int, hybrid: bool) -> tuple[Scales, fp8.Product, torch.nn.Parameter]:
    scales = Scales(Recipe(hybrid), GPU)
    here = scales.add(["h.0.mlp.fc"])["h.0.mlp.fc"]
    weight = torch.nn.Parameter((torch.randn(outside, inside, device=GPU) * 0.02).bfloat16())
    return scales, here, weight


def far(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def check_products() -> None:
    """Compare with float64, and with the emulation that tests on a CPU rely on."""
    for n, inside, outside, hybrid in [(2048, 1024, 4096, False), (2048, 1024, 3072, True), (1000, 4096, 1024, True)]:
        scales, here, weight = a_map(inside, outside, hybrid)
        x = torch.randn(n, inside, device=GPU).bfloat16().requires_grad_()
        bias = torch.randn(outside, device=GPU).bfloat16().requires_grad_()
        grad = torch.randn(n, outside, device=GPU).bfloat16() * 1e-5
        for use in ("first", "second", "into a total"):
            if use == "into a total":
                weight.sink = Total(weight.shape)  # type: ignore[attr-defined]
            x.grad = weight.grad = bias.grad = None
            y = here(x, weight, bias)
            y.backward(grad)
            of_weight = weight.sink.total if use == "into a total" else weight.grad  # type: ignore[attr-defined]
            assert x.grad is not None and of_weight is not None and bias.grad is not None
            exact = [F.linear(x.double(), weight.double(), bias.double()), grad.double() @ weight.double()]
            exact += [grad.double().t() @ x.double(), grad.double().sum(0)]
            errors = [far(a, b) for a, b in zip((y, x.grad, of_weight, bias.grad), exact, strict=True)]
            limit = 0.09 if hybrid else 0.06
            is_right = max(errors[:3]) < limit and errors[3] < 0.01
            text = "y, dx, dW, db off by " + ", ".join(f"{e:.4f}" for e in errors)
            line(f"product {n}x{inside}->{outside} {'hybrid' if hybrid else 'e4m3'} {use}", text, is_right)
            scales.update()
            scales.refresh()
    a, b = (torch.randn(512, 1024, device=GPU).to(E4M3) for _ in range(2))
    one = torch.ones(2, 4, device=GPU)[:, 0]  # 16 bytes apart, as a product demands
    for is_fast in (True, False):
        got = fp8.multiply(a, b, (one[0], one[1]), torch.float32, is_fast=is_fast)
        error = far(got, a.double() @ b.double().t())
        line(f"product of fp8 against float64, fast {is_fast}", f"off by {error:.1e}", error < 1e-2)


def time_casts(sizes: list[list[int]], tiles: list[list[int]]) -> None:
    for (n, c), tile, is_turned in itertools.product(sizes, tiles, (True, False)):
        x, out = torch.randn(n, 4 * c, device=GPU).bfloat16(), None
        fp8_triton.ROWS, fp8_triton.COLUMNS, fp8_triton.WARPS = tile
        out, turned = fp8.empty((n, 4 * c), E4M3, GPU, is_turned)
        numbers = torch.ones(4, device=GPU)
        ms = milliseconds(lambda: fp8_triton.quantise(x, numbers[0], numbers[1], out, turned, 448.0))  # noqa: B023
        moved = x.numel() * (4 if is_turned else 3)
        layouts = "both layouts" if is_turned else "one layout"
        line(f"cast {n}x{4 * c} {'x'.join(map(str, tile))} {layouts}", f"{ms:7.3f} ms {moved / ms / 1e6:7,.0f} GB/s")


def time_products(sizes: list[list[int]]) -> None:
    """Time the maps of a layer: bare products and products with casts, in fp8 and bfloat16."""
    for n, h in sizes:
        sums = [0.0] * 4
        for name, inside, outside in (("qkv", h, 3 * h), ("proj", h, h), ("fc", h, 4 * h), ("mlp.proj", 4 * h, h)):
            scales, here, weight = a_map(inside, outside, False)
            weight.sink = Total(weight.shape)  # type: ignore[attr-defined]
            total = weight.sink.total  # type: ignore[attr-defined]
            x, bias = torch.randn(n, inside, device=GPU).bfloat16(), torch.zeros(outside, device=GPU).bfloat16()
            grad, low = torch.randn(n, outside, device=GPU).bfloat16() * 1e-5, weight.detach()
            here(x.requires_grad_(), weight, bias)
            scales.update()
            casts = [scales.cast(slot, y.detach(), True, True) for slot, y in enumerate((x, weight, grad))]
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

            each = [milliseconds(f) for f in (plain, bare, cast, whole)]
            rate = 6 * n * inside * outside / 1e9
            text = "bf16 {:.3f} ms ({:.0f} TFLOP/s), fp8 {:.3f} ({:.0f}), casts {:.3f}, all with autograd {:.3f}"
            line(f"products {n}x{h} {name}", text.format(each[0], rate / each[0], each[1], rate / each[1], *each[2:]))
            sums = [a + b for a, b in zip(sums, each, strict=True)]
        text = "bf16 {:.3f} ms, fp8 {:.3f}, casts {:.3f}, all with autograd {:.3f}".format(*sums)
        line(f"products {n}x{h} of a layer", f"{text}; gain {sums[0] / (sums[1] + sums[2]):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["32768x1024", "16384x2048"], help="tokens x hidden size")
    tiles = ["64x128x4", "32x128x4", "64x64x4", "128x64x4", "128x128x8", "64x128x8"]
    parser.add_argument("--tiles", nargs="+", default=tiles, help="rows x columns x warps of the cast")
    given = parser.parse_args()
    sizes = [list(map(int, size.split("x"))) for size in given.sizes]
    kept = fp8_triton.ROWS, fp8_triton.COLUMNS, fp8_triton.WARPS
    tried = [list(map(int, tile.split("x"))) for tile in given.tiles]
    print(f"{torch.cuda.get_device_name(GPU)}, torch {torch.__version__}")
    for part in (check_bytes, check_products, lambda: time_casts(sizes, tried), lambda: time_products(sizes)):
        try:
            part()
        except Exception:
            line("stopped", traceback.format_exc(), False)
        fp8_triton.ROWS, fp8_triton.COLUMNS, fp8_triton.WARPS = kept
    print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
