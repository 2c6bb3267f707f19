"""The elementwise passes of the Muon update over many matrices of one shape.

`advance` reads the gradients and returns what Newton-Schulz orthogonalises after `normalise`;
`subtract` subtracts the result from the weights, and may write their copies in the network's format
too, for which nobody then has to read them again. `advance` and `subtract` leave everything as it
was if `skipped` is not 0, which the host never reads. On CUDA each is one Triton kernel over all
matrices; the plain references of these two take one matrix after the other. As in torch, the update
is computed in 16 bits; only matrices of float64, by which layouts are compared, keep their format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels import moments as formats
from meshwright.kernels.references import reference

SMALLEST_NORM = 1e-7


@reference("muon.advance", of=lambda gradients, *_: gradients[0])
def advance(
    gradients: list[Tensor],
    moments: list[Tensor],
    scale: Tensor,
    skipped: Tensor,
    momentum: float,
    draws: list[formats.PlaceDraws] | None = None,
) -> tuple[Tensor, Tensor]:
    """Update the moments; return Nesterov's look-ahead [n, *shape] and its norms [n].

    The gradients are divided by `scale`. The look-ahead is in bfloat16, or in float64 as they are.
    With `draws`, the moments have fewer bits.
    """
    dtype = gradients[0].dtype
    low = dtype if dtype is torch.float64 else torch.bfloat16
    out = gradients[0].new_empty(len(gradients), *gradients[0].shape, dtype=low)
    for i, (gradient, moment, ahead) in enumerate(zip(gradients, moments, out, strict=True)):
        now = gradient / scale
        new = formats.expanded(moment, dtype).lerp(now, 1 - momentum)
        # Nesterov: the gradient, moved towards the new moment.
        ahead.copy_(now.lerp(new, momentum))
        if draws is None:
            moment.copy_(torch.where(skipped > 0, moment, new))
        else:
            formats.store(new, moment, draws[i], skipped)
    # Norms of what was rounded, as Newton-Schulz reads it, but summed in float32 or float64.
    dimensions = tuple(range(1, out.ndim))
    return out, torch.linalg.vector_norm(out, dim=dimensions, dtype=dtype)


@reference("muon.normalise")
def normalise(x: Tensor, norms: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [n, r, c] / its norms [n] in a format.

    As in torch, norms and quotients are rounded to the format of x first.
    """
    divisors = norms.to(x.dtype).clamp(min=SMALLEST_NORM)[:, None, None]
    return torch.div(x, divisors, out=torch.empty_like(x, dtype=dtype))


@reference("muon.subtract", of=lambda weights, *_: weights[0])
def subtract(
    weights: list[Tensor],
    updates: Tensor,
    decay: Tensor,
    rate: Tensor,
    skipped: Tensor,
    is_cautious: bool = False,
    copies: list[Tensor] | None = None,
) -> None:
    """Set each weight, and its copy in another format, to decay * weight - rate * its update.

    A cautious decay leaves out elements whose update has the other sign.
    """
    for i, (weight, update) in enumerate(zip(weights, updates, strict=True)):
        new = moved(weight, update, decay, rate, is_cautious)
        weight.copy_(torch.where(skipped > 0, weight, new))
        if copies is not None:
            copies[i].copy_(torch.where(skipped > 0, copies[i], new))


def moved(weight: Tensor, update: Tensor, decay: Tensor, rate: Tensor, is_cautious: bool) -> Tensor:
    kept = torch.where(update * weight >= 0, decay, 1.0) if is_cautious else decay
    return weight * kept - update * rate
