"""The parts of a layer besides attention: linear maps, norms, and the MLP with its activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.schema import Model
from meshwright.kernels import activation
from meshwright.kernels.embedding import embedding
from meshwright.kernels.linear import linear
from meshwright.kernels.rms_norm import rms_norm


class Linear(nn.Linear):
    """A linear map that skips initialisation on the meta device, where torch would spend a second.

    `product` does the multiplication; tensor parallelism replaces it.
    """

    product = staticmethod(linear)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """An embedding that skips initialisation on the meta device."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension.

    Computed in the input's format and returned in the weight's; they differ only if the residual
    stream is float32. With --apply-layernorm-1p the weight is stored minus one.
    """

    def __init__(self, m: Model, width: int) -> None:
        super().__init__()
        self.eps = m.layernorm_epsilon
        self.plus = 1.0 if m.apply_layernorm_1p else 0.0
        self.weight = nn.Parameter(torch.full((width,), 1.0 - self.plus))
        self.centers = m.normalization == "LayerNorm"
        self.bias = nn.Parameter(torch.zeros(width)) if m.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.plus:
            weight = weight + self.plus
        if self.centers:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            y = F.layer_norm(x, weight.shape, weight, bias, self.eps)
        else:
            y = rms_norm(x, weight, self.eps)
        return y.to(self.weight.dtype)


class Gated(nn.Module):
    """Two maps of one input in one product: the gate and what it gates; weight [2, F, H]."""

    product = staticmethod(linear)

    def __init__(self, hidden: int, ffn: int, bias: bool) -> None:
        super().__init__()
        # One matrix, initialised as a Linear's is, and viewed as two.
        both = Linear(hidden, 2 * ffn, bias=False).weight.detach()
        self.weight = nn.Parameter(both.view(2, ffn, hidden))
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(2, ffn))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.product(x, self.weight, None if self.bias is None else self.bias.flatten())
        gate, up = y.chunk(2, dim=-1)
        return gate, up


class MLP(nn.Module):
    def __init__(self, m: Model) -> None:
        super().__init__()
        assert m.hidden_size
        self.activation = m.activation
        self.fc: Gated | Linear
        if m.gated:
            self.fc = Gated(m.hidden_size, m.ffn, m.add_bias_linear)
        else:
            self.fc = Linear(m.hidden_size, m.ffn, m.add_bias_linear)
        self.proj = Linear(m.ffn, m.hidden_size, m.add_bias_linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(activation.plain(self.activation, self.fc(x)))  # type: ignore[no-any-return]
