"""The addition and norm of norm.py as one Triton kernel for each direction.

Used on CUDA only; tests compare them with the plain reference. E is the bytes of an activation's
element, R those of a residual's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.base import device as devices
from meshwright.kernels.fp8 import Into, fp8_arguments
from meshwright.kernels.grid import cdiv, norm_launch, norm_programs, norm_tile
from meshwright.kernels.norm import NormWeights, Operands, SavedRows
from meshwright.kernels.triton.dropout import keep_mask, threshold_of
from meshwright.kernels.triton.fp8 import encode, raise_amax

IN_FLIGHT = 96 << 10  # bytes of shared memory that rows in flight may take


@triton.jit
def _norm_forward(
    residual,
    pending,
    bias,
    rows,
    weight,
    shift,
    x,
    y,
    means,
    rstds,
    count,
    threshold,
    scale,
    eps,
    fp8_scale,
    amax,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    PLUS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set x, y, means and rstds; residual, bias, rows, shift, means (RMSNorm) and x may be None.

    Bytes moved for each element: 2 R + 2 E; without a residual 3 E, without an x 2 E. With an
    fp8_scale y is fp8, one byte an element instead of E, of numbers rounded to the weight's format,
    and raises the amax, if any. With dropout and 32,768 x 1,024 bfloat16 an H200 moves 3.8 of its
    4.8 TB/s, with rows of 2,560 3.0.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * WIDTH + c[None, :]
    is_row = row < count
    is_column = c < WIDTH
    inside = is_column[None, :]
    mask = is_row[:, None] & inside
    # x = residual + dropout(pending + bias)
    z = tl.load(pending + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        added = tl.load(bias + c, mask=is_column, other=0.0).to(tl.float32)
        z += added[None, :]
    if rows is not None:
        hashes = tl.load(rows + row, mask=is_row, other=0)
        keep = keep_mask(hashes[:, None], c[None, :], threshold)
        z = tl.where(keep, z * scale, 0.0)
    if residual is not None:
        z += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if x is not None:
        stored = z.to(x.dtype.element_ty)
        tl.store(x + at, stored, mask=mask)
        z = stored.to(tl.float32)
    # y = norm(x), of x as it is stored
    if means is not None:
        mean = tl.sum(z, 1) / WIDTH
        tl.store(means + row, mean, mask=is_row)
        z = tl.where(inside, z - mean[:, None], 0.0)
    variance = tl.sum(z * z, 1) / WIDTH
    rstd = 1.0 / tl.sqrt(variance + eps)
    tl.store(rstds + row, rstd, mask=is_row)
    w = tl.load(weight + c, mask=is_column, other=0.0).to(tl.float32) + PLUS
    out = z * rstd[:, None] * w[None, :]
    if shift is not None:
        more = tl.load(shift + c, mask=is_column, other=0.0).to(tl.float32)
        out += more[None, :]
    if fp8_scale is None:
        tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)
    else:
        rounded = out.to(weight.dtype.element_ty).to(tl.float32)
        q, size = encode(rounded, tl.load(fp8_scale), LARGEST, WIDE)
        tl.store(y + at, q, mask=mask)
        if amax is not None:
            # Rows beyond the end have a size too: that of the norm's bias.
            size = tl.where(mask, size, 0.0)
            raise_amax(amax, tl.max(tl.max(size, 1), 0))


@triton.jit
def _norm_backward(
    dx,
    dy,
    x,
    means,
    rstds,
    rows,
    weight,
    of_residual,
    of_pending,
    partials,
    count,
    threshold,
    scale,
    PLUS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Set of_residual, of_pending, and partials [3, programs, C]: norm's weight, bias; added bias.

    dx, means (RMSNorm), rows and one of the two gradients may be None. Each program takes every
    n-th group of rows and keeps its sums in registers. Bytes moved for each element: E + 3 R, and E
    for a gradient of pending that differs from the residual's; R less without dx. An H200 moves
    3.9 TB/s of its 4.8 as above, with rows of 2,560 2.5.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    c = tl.arange(0, BLOCK)
    inside = c < WIDTH
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32) + PLUS
    w = w[None, :]
    of_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    of_shift = tl.zeros((ROWS, BLOCK), tl.float32)
    of_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(program * ROWS, count, programs * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        is_row = row < count
        at = row.to(tl.int64)[:, None] * WIDTH + c[None, :]
        mask = is_row[:, None] & inside[None, :]
        # Zeros beyond the row's end add nothing to any sum: each has a factor of dy.
        d = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row, mask=is_row, other=0.0)[:, None]
        if means is not None:
            z -= tl.load(means + row, mask=is_row, other=0.0)[:, None]
            of_shift += d
        z *= rstd
        of_weight += d * z
        # The gradient of x: through the norm, and that of x itself. With w = dy * weight,
        #     dx = (w - z mean(w z) - mean(w)) * rstd, of which RMSNorm lacks the last mean.
        d *= w
        projection = tl.sum(d * z, 1) / WIDTH
        grad = d - z * projection[:, None]
        if means is not None:
            mean = tl.sum(d, 1) / WIDTH
            grad -= mean[:, None]
        grad *= rstd
        if dx is not None:
            grad += tl.load(dx + at, mask=mask, other=0.0).to(tl.float32)
        if of_residual is not None:
            tl.store(of_residual + at, grad.to(of_residual.dtype.element_ty), mask=mask)
        if rows is not None:
            hashes = tl.load(rows + row, mask=is_row, other=0)
            keep = keep_mask(hashes[:, None], c[None, :], threshold)
            grad = tl.where(keep, grad * scale, 0.0)
        if of_pending is not None:
            tl.store(of_pending + at, grad.to(of_pending.dtype.element_ty), mask=mask)
        of_bias += grad
    # This program's row of each of the three matrices of partial sums.
    at = partials + program.to(tl.int64) * WIDTH + c
    part = programs.to(tl.int64) * WIDTH
    tl.store(at, tl.sum(of_weight, 0), mask=inside)
    if means is not None:
        tl.store(at + part, tl.sum(of_shift, 0), mask=inside)
    tl.store(at + 2 * part, tl.sum(of_bias, 0), mask=inside)


def forward(
    operands: Operands, norm: NormWeights, into: Into | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return x and y [N, width], and the rows' means, None for RMSNorm, and 1 / deviations [N]."""
    pending = operands.pending
    count, width = pending.shape
    x = None
    if operands.adds:
        x = torch.empty_like(pending if operands.residual is None else operands.residual)
    y = into.out if into is not None else torch.empty_like(pending, dtype=norm.weight.dtype)
    rstds = torch.empty(count, dtype=torch.float32, device=pending.device)
    means = torch.empty_like(rstds) if norm.centers else None
    # A thread holds 16 numbers of a row of 2,048 to 8,192, and fewer of a shorter one.
    rows, block = norm_tile(width)
    warps = 4 if block <= 2048 else 8 if block <= 4096 else 16
    with torch.accelerator.device_index(pending.device.index):
        _norm_forward[(cdiv(count, rows),)](
            *operands[:4],
            norm.weight,
            norm.bias,
            x,
            y if into is None else y.view(torch.uint8),
            means,
            rstds,
            count,
            threshold_of(operands.p),
            1.0 / (1.0 - operands.p),
            norm.eps,
            *fp8_arguments(into),
            norm.plus,
            width,
            rows,
            block,
            num_warps=warps,
        )
    return pending if x is None else x, y, means, rstds


def backward(
    dx: Tensor | None, dy: Tensor, saved: SavedRows
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of residual, pending, and [3, programs, width] of the parameters."""
    x = saved.x
    count, width = x.shape
    # Without dropout one tensor is the gradient of both.
    of_residual = torch.empty_like(x) if saved.of_residual else None
    is_one = saved.of_residual and saved.rows is None and saved.dtype is x.dtype
    of_pending = None if is_one else torch.empty_like(x, dtype=saved.dtype)
    rows, block = norm_tile(width)
    launch = norm_launch(width)
    programs = norm_programs(width, count, devices.processors(x.device))
    partials = torch.empty(3, programs, width, dtype=torch.float32, device=x.device)
    # As many rows in flight as their bytes allow.
    element = sum(t.element_size() for t in (dx, dy, x) if t is not None)
    stages = max(1, min(launch.stages, IN_FLIGHT // (rows * block * element)))
    # A bound on registers is an option of NVIDIA's compiler.
    options = {} if launch.registers is None or torch.version.hip else {"maxnreg": launch.registers}
    with torch.accelerator.device_index(x.device.index):
        _norm_backward[(programs,)](
            dx,
            dy,
            x,
            saved.mean,
            saved.rstd,
            saved.rows,
            saved.weight,
            of_residual,
            of_pending,
            partials,
            count,
            threshold_of(saved.p),
            1.0 / (1.0 - saved.p),
            saved.plus,
            width,
            rows,
            block,
            stages,
            num_warps=launch.warps,
            **options,
        )
    out = of_residual if of_pending is None else of_pending
    assert out is not None
    return of_residual, out, partials
