"""The parameter store: every weight, gradient and optimizer number in a few flat buffers.

Hand-written because torch keeps one small tensor per weight, while everything that follows the backward pass is fastest,
simplest to shard and simplest to save as one long vector. For each decay group (matrices decay, vectors do not):

    weights    [n]  the model's parameters are views of this (bfloat16, float16, float32 or float64)
    gradients  [n]  float32 (float64 in tests); each micro-batch is added in place
    master     [n]  float32; the same buffer as `weights` when the formats are equal
    exp_avg, exp_avg_sq [n]

One step: norm of the gradients over both groups -> clip factor -> one fused AdamW that also unscales and clips ->
masters copied to the weights. A non-finite norm leaves every number as it was, on the device, without asking the host.
Every parameter starts at a multiple of ALIGN numbers, so that matrix products read aligned memory; the gaps stay 0.
One process holds everything here; sharding (ZeRO 1 and 2) cuts the same buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright import optimizer
from meshwright.config import Optimizer
from meshwright.model.gpt import GPT

ALIGN = 128


@dataclass
class Group:
    decays: bool
    spans: dict[str, tuple[int, torch.Size]]  # name -> offset, shape
    weights: Tensor
    gradients: Tensor
    master: nn.Parameter


class ParameterStore:
    """Owns the memory of `model` (built on the meta device) from here on."""

    def __init__(self, model: GPT, o: Optimizer, dtype: torch.dtype, device: torch.device) -> None:
        self.vocab, self.clip_grad = model.vocab, o.clip_grad
        self.full = torch.float64 if dtype is torch.float64 else torch.float32
        self.groups = [self._group(model, decays, dtype, device) for decays in (True, False)]
        self.adamw = optimizer.adamw(o, [(g.master, g.decays) for g in self.groups])
        for g in self.groups:  # made now, not in the first step, so that a checkpoint can be loaded into them
            self.adamw.state[g.master] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(g.master),
                "exp_avg_sq": torch.zeros_like(g.master),
            }

    def _group(self, model: GPT, decays: bool, dtype: torch.dtype, device: torch.device) -> Group:
        full, spans, size = self.full, {}, 0
        members = {n: p for n, p in model.named_parameters() if optimizer.decays(n, p) == decays}
        for name, p in members.items():
            spans[name] = (size, p.shape)
            size += -(-p.numel() // ALIGN) * ALIGN
        weights = torch.zeros(size, dtype=dtype, device=device)
        gradients = torch.zeros(size, dtype=full, device=device)
        master = nn.Parameter(weights if dtype is full else torch.zeros(size, dtype=full, device=device))
        master.grad = gradients
        for name, (offset, shape) in spans.items():
            view = slice(offset, offset + shape.numel())
            parameter = nn.Parameter(weights[view].view(shape))
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, parameter)
            if dtype is full:
                parameter.grad = gradients[view].view(shape)  # autograd adds into it in place
            else:
                _accumulate_into(parameter, gradients[view].view(shape))
        return Group(decays, spans, weights, gradients, master)

    def publish_weights(self) -> None:
        """Masters to weights, after a step, an initialisation or a load."""
        for g in self.groups:
            if g.weights.dtype is not g.master.dtype:
                g.weights.copy_(g.master.detach())

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in full precision, padded rows included."""
        for g in self.groups:
            for name, (offset, shape) in g.spans.items():
                yield name, g.master.detach()[offset : offset + shape.numel()].view(shape)

    def clear_gradients(self) -> None:
        for g in self.groups:
            g.gradients.zero_()

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, scale: float, loss: Tensor | None = None) -> Tensor:
        """Clip and update; the gradients carry the loss scale. Returns the unclipped norm; no update if it or the loss
        is not finite."""
        norms = [torch.linalg.vector_norm(g.gradients) for g in self.groups]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms)) / scale
        shrink = norm.new_ones(()) if self.clip_grad == 0 else (self.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        # torch's own way of handing both to the fused kernel, which divides by grad_scale and skips on found_inf
        if norm.dtype is torch.float64:  # the kernel's divisor is float32: too coarse for tests that compare layouts
            for g in self.groups:
                g.gradients.mul_(shrink / scale)
        else:
            self.adamw.grad_scale = scale / shrink  # type: ignore[attr-defined]
        finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite()
        self.adamw.found_inf = (~finite).float()  # type: ignore[attr-defined]
        for settings in self.adamw.param_groups:
            settings["lr"] = lr
            settings["weight_decay"] = weight_decay if settings["decays"] else 0.0
        self.adamw.step()
        self.publish_weights()
        return norm

    @property
    def steps(self) -> int:
        """Adam's t: successful steps."""
        return int(self.adamw.state[self.groups[0].master]["step"].item())

    @steps.setter
    def steps(self, value: int) -> None:
        for g in self.groups:
            self.adamw.state[g.master]["step"].fill_(value)

    def named_state(self) -> dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]], Tensor]]:
        """What a checkpoint holds: name -> (global shape, boxes as (offsets, sizes), tensor). Vocabulary at its true size."""
        out = {}
        for g in self.groups:
            moments = self.adamw.state[g.master]
            for name, (offset, shape) in g.spans.items():
                rows = self.vocab if name in ("wte.weight", "lm_head.weight") else shape[0]
                true = (rows, *shape[1:])
                view = slice(offset, offset + shape.numel() // shape[0] * rows)
                box = [((0,) * len(true), true)]
                out[name] = (true, box, g.master.detach()[view].view(true))
                out[f"{name}/exp_avg"] = (true, box, moments["exp_avg"][view].view(true))
                out[f"{name}/exp_avg_sq"] = (true, box, moments["exp_avg_sq"][view].view(true))
        return out


def _accumulate_into(parameter: nn.Parameter, total: Tensor) -> None:
    """Add each new low-precision gradient to its float32 total at once, and free it."""

    def add(p: Tensor) -> None:
        total.add_(p.grad)  # type: ignore[arg-type]
        p.grad = None

    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
