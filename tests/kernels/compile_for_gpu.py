"""Compile the Triton kernels for an H100 or H200 on a machine without one, and print what each
takes.

usage: python tests/kernels/compile_for_gpu.py [NAME ...]

Triton's interpreter accepts programs that the compiler refuses. Here every launch compiles its
kernel and does not run it, so that the calls below exercise the real launchers; results are noise.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from meshwright.base import device
from meshwright.kernels import (
    activation,
    adamw,
    decode,
    dropout,
    embedding,
    fp8,
    gradients,
    heads,
    moments,
    muon,
    norm,
    qk_norm,
    symmetric,
)
from meshwright.kernels.cross_entropy import cross_entropy, losses_and_normalisers
from meshwright.kernels.softcap import softcap
from meshwright.kernels.triton import clock as clock_triton
from meshwright.kernels.triton import fp8 as fp8_triton

compiled = {}  # by the compiler's key


def compile_only() -> None:
    """Let launches compile for sm_90, and report CPU tensors as if they were on a GPU."""
    there = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(there)
    os.environ.setdefault(*device.FUSED_MULTIPLY_ADD)
    run = JITFunction.run

    def record(self, *args, grid, warmup, **options):  # type: ignore[no-untyped-def]
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled[kernel.hash] = kernel

    JITFunction.run = record
    device.has_kernels = device.is_hopper_or_later = lambda device: True


def take(*shape, dtype=torch.bfloat16):  # type: ignore[no-untyped-def]
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def backward(*outputs):  # type: ignore[no-untyped-def]
    torch.autograd.backward(outputs, [torch.zeros_like(out) for out in outputs])


def hashes():  # type: ignore[no-untyped-def]
    return dropout.rows(1, torch.arange(8))


def norms() -> None:
    for width in (1024, 2560):
        weights = norm.NormWeights(take(width), take(width), 1e-5)
        backward(
            *norm.add_norm(take(8, width), take(8, width), take(width), hashes(), 0.1, weights)
        )
    weights, wide = (
        norm.NormWeights(take(1024), None, 1e-5, 1.0, centers=False),
        take(8, 1024, dtype=torch.float32),
    )
    backward(*norm.add_norm(wide, take(8, 1024), None, None, 0.0, weights))


def norms_of_all_widths() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (64, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 8192):
            weights = norm.NormWeights(take(width, dtype=dtype), take(width, dtype=dtype), 1e-5)
            x, pending, bias = (
                take(*shape, dtype=dtype) for shape in ((8, width), (8, width), (width,))
            )
            backward(*norm.add_norm(x, pending, bias, hashes(), 0.1, weights))
            backward(*norm.add_norm(x, pending, bias, None, 0.0, weights))


def sums() -> None:
    gradients.from_rows(take(1024), take(64, 1024))
    gradients.from_rows(take(1000), take(64, 1000, dtype=torch.float32))


def losses() -> None:
    backward(cross_entropy(take(8, 50304), torch.zeros(8, dtype=torch.int64), 50257))
    backward(*losses_and_normalisers(take(8, 50304), torch.zeros(8, dtype=torch.int64), 50257))
    backward(softcap(take(8, 50304), 30.0))


def dropouts() -> None:
    backward(dropout.dropout(take(8, 1024), hashes(), 0.1))
    for seed in (1, 2**40):
        dropout.site_rows(seed, 3, torch.arange(8)[:, None], torch.arange(64))


def activations() -> None:
    for kind in ("gelu", "gelu-tanh", "squared-relu"):
        backward(activation.activate(kind, take(8, 4096), take(4096)))
    for kind in ("swiglu", "geglu"):
        backward(activation.activate(kind, take(8, 4096), take(4096)))


def splits() -> None:
    angles = tuple(torch.zeros(1, 8, 1, 32) for _ in range(2))
    for rotation in (None, angles):
        backward(
            *heads.split_heads(take(2, 8, 1536), heads.HeadSizes(4, 4, 64), rotation, take(1536))
        )


def normed_splits() -> None:
    one = torch.ones(())
    for width, rotating in ((96, 48), (128, 128), (256, 0)):
        sizes = heads.HeadSizes(4, 2, width)
        angles = tuple(torch.zeros(1, 8, 1, rotating // 2) for _ in range(2))
        rotation = angles if rotating else None
        columns = 4 * (2 + 2) * width
        for shift, bias in ((None, None), (take(width), take(columns))):
            weights = norm.NormWeights(take(width), shift, 1e-5, 0.0, shift is not None)
            pair = qk_norm.HeadNorms(weights, weights)
            qkv = take(2, 8, columns)
            backward(*qk_norm.split_and_norm_heads(qkv, sizes, rotation, bias, pair))
            grads = [take(2, 8, count, width).detach() for count in (8, 4, 4)]
            into = fp8.Into(torch.empty(16, columns, dtype=torch.float8_e5m2), one, one)
            qk_norm.pack(grads, qkv.detach(), sizes, rotation, pair, bias is not None, into)


def symmetric_products() -> None:
    x, r = (torch.zeros(2, 256, k, dtype=torch.float16) for k in (512, 256))
    for a in (x, x.mT.contiguous().mT):
        symmetric.symmetric_product(a, a, None, 2.0)
    symmetric.symmetric_product(r, r, r, 2.0, 3.0, 4.0)
    odd = torch.zeros(2, 272, 272, dtype=torch.float16)
    symmetric.symmetric_product(odd, odd, odd, 2.0, 3.0, 4.0)


def muons() -> None:
    matrices = [torch.zeros(512, 512) for _ in range(2)]
    one = torch.ones(())
    ahead, norms = muon.advance(matrices, [m.clone() for m in matrices], one, one, 0.95)
    updates = muon.normalise(ahead, norms, torch.float16)
    copies = [m.bfloat16() for m in matrices]
    for is_cautious in (False, True):
        muon.subtract(matrices, updates, one, one, one, is_cautious)
        muon.subtract(matrices, updates, one, one, one, is_cautious, copies)


def updates() -> None:
    settings, cpu = adamw.AdamWConstants(0.9, 0.95, 1e-8), torch.device("cpu")
    table, one = (
        adamw.make_table([adamw.FlatRange(0, 4096)], cpu),
        torch.ones((), dtype=torch.float64),
    )
    flats = [torch.zeros(4096) for _ in range(4)]
    adamw.sum_squares(flats[0], table)
    for loss in (one, one.float()):
        constants = adamw.make_constants(settings, 1.0, cpu, [(1.0, 1.0)])
        decision = adamw.decide(constants, (one, loss, one, one, one), torch.zeros(()))
    for weights in (None, *(flats[0].to(dtype) for dtype in (torch.bfloat16, torch.float16))):
        for is_cautious in (False, True):
            rule = settings._replace(is_cautious=is_cautious)
            adamw.update_blocks(adamw.AdamWBuffers(*flats, weights), table, rule, decision)
    draws = moments.make_block_draws([(moments.Place(1, 0, 0, 64, 64), 32)], torch.ones(()))
    for formats in ((torch.bfloat16, torch.bfloat16), (torch.int8, torch.uint8)):
        codes = [flats[0].to(dtype) for dtype in formats]
        adamw.update_blocks(
            adamw.AdamWBuffers(flats[0], *codes, flats[1], None), table, settings, decision, draws
        )
        for code in codes:
            moments.store(
                flats[0],
                code,
                moments.PlaceDraws(moments.Place(1, 0, 0, 64, 64), torch.ones(())),
                torch.zeros(()),
            )


def tables() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        embedding.add_rows(
            torch.zeros(64, 1024),
            torch.zeros(8, dtype=torch.int64),
            torch.zeros(8, 1024, dtype=dtype),
        )


def casts() -> None:
    x, one = torch.zeros(64, 64, dtype=torch.bfloat16), torch.ones(())
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        out = torch.empty(64, 64, dtype=dtype)
        fp8_triton.quantise(x, one, one, out, torch.empty_like(out))
    fp8_triton.transpose_into(out, torch.empty_like(out))
    fp8_triton.quantise(x, one, None, out, None)
    cast = x, out, torch.empty_like(out), 0
    fp8_triton.quantise_many(cast, fp8_triton.prepare_casts([cast], None), one, one)


def casts_in_kernels() -> None:
    one, grad = torch.ones(()), torch.empty(8, 4096, dtype=torch.float8_e5m2)
    x, y = grad.view(torch.float8_e4m3fn), torch.empty(8, 1024, dtype=torch.float8_e4m3fn)
    for amax in (one, None):
        into = fp8.Into(x, one, amax)
        activation.forward("gelu-tanh", take(8, 4096).detach(), into)
        activation.forward("swiglu", take(8, 8192).detach(), into)
        join = norm.operands_of(take(8, 1024), take(8, 1024), take(1024), None, 0.0)
        norm.forward(join, norm.NormWeights(take(1024), take(1024), 1e-5), fp8.Into(y, one, amax))
    into = fp8.Into(grad, one, one)
    activation.backward("gelu-tanh", take(8, 4096).detach(), take(8, 4096).detach(), True, into)
    activation.backward("swiglu", take(8, 4096).detach(), take(8, 2048).detach(), True, into)
    angles = tuple(torch.zeros(1, 8, 1, 32) for _ in range(2))
    for rotation in (None, angles):
        into = fp8.Into(torch.empty(16, 3072, dtype=torch.float8_e4m3fn), one, one)
        heads.pack(
            [take(2, 8, 16, 64).detach() for _ in range(3)],
            heads.HeadSizes(16, 1, 64),
            rotation,
            True,
            into,
        )


def decoding() -> None:
    norms = [
        norm.NormWeights(take(1024), take(1024), 1e-5),
        norm.NormWeights(take(1024), None, 1e-5, centers=False),
        None,
    ]
    angles = tuple(torch.zeros(256, 32) for _ in range(2))
    x, slots = take(1, 1024), torch.arange(1)
    state = decode.TextState(slots, slots, slots, slots > 1)
    for wpe in (None, take(256, 1024)):
        decode.embed(state, slots, take(50304, 1024), wpe)
    for draws in (None, decode.Draws(slots.double(), slots)):
        decode.choose_tokens(take(1, 50304), 50257, slots, state, 50256, draws)
    for weights, kind in zip(norms, ("gelu-tanh", "swiglu", ""), strict=True):
        decode.linear(
            x, decode.DecodeLinear(take(4096, 1024), take(4096), weights, kind), None if kind else x
        )
    decode.linear(x, decode.DecodeLinear(take(50304, 1024), None, norms[0]))
    for rows in (1, 64):
        for groups, per_group, head in ((16, 1, 64), (4, 4, 128), (2, 1, 96)):
            caches = [
                torch.zeros(rows + 1, 320, groups, head, dtype=torch.bfloat16) for _ in range(2)
            ]
            texts = decode.CachedTexts(*caches, torch.arange(rows), torch.arange(rows + 1), 256)
            qkv = take(rows, groups * (per_group + 2) * head)
            rms = norm.NormWeights(take(head), None, 1e-5, centers=False)
            layer = norm.NormWeights(take(head), take(head), 1e-5)
            for weights in (None, qk_norm.HeadNorms(rms, rms), qk_norm.HeadNorms(layer, layer)):
                decode.attend(
                    qkv,
                    texts,
                    heads.HeadSizes(groups, per_group, head),
                    angles if groups == 4 else None,
                    weights,
                )


def clocks() -> None:
    clock_triton.stamp[(1,)](torch.zeros(2, dtype=torch.int64), 1, num_warps=1)


CALLS = {
    f.__name__: f
    for f in (
        norms,
        sums,
        losses,
        dropouts,
        activations,
        splits,
        normed_splits,
        muons,
        symmetric_products,
        updates,
        tables,
        casts,
        casts_in_kernels,
        decoding,
        clocks,
    )
}
MORE = {f.__name__: f for f in (norms_of_all_widths,)}


def usage(cubin: bytes) -> dict[str, int]:
    """Return registers of a thread, and bytes of stack and local memory, which spills take."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}


def main(names: list[str]) -> None:
    compile_only()
    for name in names or CALLS:
        (CALLS | MORE)[name]()
    for kernel in compiled.values():
        file, took, facts = (
            Path(inspect.getfile(kernel.src.fn.fn)).stem,
            usage(kernel.asm["cubin"]),
            kernel.metadata,
        )
        print(
            f"{file}.{facts.name}: {facts.num_warps} warps, {took['REG']} registers, {facts.shared} bytes of shared "
            f"memory, {took['STACK'] + took['LOCAL']} spilled"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
