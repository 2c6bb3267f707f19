"""The network for one new token of each row, by the few kernels of kernels/decode.py.

A layer of one row is five kernels: the first product with the norm before it and its bias; the
norms of heads, the rotation, the cache and attention; the output product, added to the residual
stream; the MLP's first product with norm and activation; its second product, added. A library
multiplies several rows faster; each norm of the stream with the addition before it is then a kernel
of its own, as most activations are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.base import device as devices
from meshwright.config.fast_paths import CAPTURED_DECODER, unknown_to
from meshwright.config.fields import spelling
from meshwright.config.matrices import matrices_of
from meshwright.kernels import decode, norm
from meshwright.kernels.decode import CachedTexts, DecodeLinear, TextState
from meshwright.kernels.heads import HeadSizes
from meshwright.kernels.linear import linear
from meshwright.kernels.qk_norm import HeadNorms
from meshwright.model.cache import Cache
from meshwright.model.fused import FusedBlock, weights_of
from meshwright.model.gpt import GPT, Block
from meshwright.model.rotary import rotations

DIMS = (64, 96, 128)  # of a head
MATRICES_OF_A_STEP = {"attn.qkv", "attn.proj", "mlp.fc", "mlp.proj"}


class DecodeLayer(NamedTuple):
    """A layer's number, its four products, and its heads' sizes and norms."""

    number: int
    qkv: DecodeLinear
    proj: DecodeLinear
    fc: DecodeLinear
    out: DecodeLinear
    sizes: HeadSizes
    norms: HeadNorms | None


class DecodeStep:
    """One token of each row, by fused kernels; the model's parameters must stay where they are."""

    def __init__(self, model: GPT, cache: Cache) -> None:
        self.model = model
        self.cache = cache
        # Cosines and sines of all places of the cache, among which a step looks up its tokens'. In
        # float32, but for tests, which compare the step in float64.
        wte = model.wte.weight
        self.rotation: tuple[Tensor, Tensor] | None = None
        if model.m.position == "rope":
            ids = torch.arange(cache.room, device=wte.device)
            exact = torch.float64 if wte.dtype is torch.float64 else torch.float32
            cos, sin = rotations(model.m, ids[:, None], exact)
            self.rotation = cos.contiguous(), sin.contiguous()
        self.layers = [layer_of(int(i), block) for i, block in model.h.items()]
        head = wte if model.lm_head is None else model.lm_head.weight
        self.head = DecodeLinear(head, None, weights_of(model.ln_f))

    def __call__(self, state: TextState, slots: Tensor, longest: int) -> Tensor:
        """Return the logits [B, padded] of the slots' last tokens, and add these to the cache.

        No text has `longest` tokens or more before them.
        """
        model = self.model
        wpe = None if model.wpe is None else model.wpe.weight
        x = decode.embed(state, slots, model.wte.weight, wpe)
        if len(slots) == 1:
            return self.run_row(x, slots, state.used, longest)
        return self.run_rows(x, slots, state.used, longest)

    def attend(
        self, layer: DecodeLayer, columns: Tensor, slots: Tensor, used: Tensor, longest: int
    ) -> Tensor:
        """Return the attention [B, heads head_dim] of the columns of the layer's first product."""
        sizes = layer.sizes
        like = columns.new_empty(1, 1, sizes.groups, sizes.head_dim)
        texts = CachedTexts(*self.cache.of_layer(layer.number, like), slots, used, longest)
        return decode.attend(columns, texts, sizes, self.rotation, layer.norms)

    def run_row(self, x: Tensor, slots: Tensor, used: Tensor, longest: int) -> Tensor:
        for layer in self.layers:
            # Attention, added to the stream; its first product takes the norm of x.
            columns = decode.linear(x, layer.qkv)
            o = self.attend(layer, columns, slots, used, longest)
            stream = decode.linear(o, layer.proj, x)
            # The MLP, likewise.
            z = x if self.model.m.use_parallel_residual else stream
            y = decode.linear(z, layer.fc)
            x = decode.linear(y, layer.out, stream)
        logits = decode.linear(x, self.head)
        return self.model.finish(logits)

    def run_rows(self, x: Tensor, slots: Tensor, used: Tensor, longest: int) -> Tensor:
        # The last branch and its bias are pending: the next norm's kernel adds them to the stream.
        residual: Tensor | None = None
        pending = x
        bias = None
        for layer in self.layers:
            proj = layer.proj
            residual, y = add_norm(residual, pending, bias, layer.qkv)
            columns = linear(y, layer.qkv.weight, layer.qkv.bias)
            o = self.attend(layer, columns, slots, used, longest)
            if self.model.m.use_parallel_residual:
                # The MLP's norm is of the stream as it was before attention.
                _, y = add_norm(None, residual, None, layer.fc)
                residual = residual + linear(o, proj.weight, proj.bias)
            else:
                residual, y = add_norm(residual, linear(o, proj.weight), proj.bias, layer.fc)
            pending = linear(decode.expand(y, layer.fc), layer.out.weight)
            bias = layer.out.bias
        _, y = add_norm(residual, pending, bias, self.head)
        return self.model.finish(linear(y, self.head.weight))


def add_norm(
    residual: Tensor | None, pending: Tensor, bias: Tensor | None, layer: DecodeLinear
) -> tuple[Tensor, Tensor]:
    """Return the residual stream, and its norm, a layer's input."""
    assert layer.norm is not None
    x, y, _, _ = norm.forward(norm.operands_of(residual, pending, bias, None, 0.0), layer.norm)
    return x, y


def layer_of(number: int, block: Any) -> DecodeLayer:
    attn = block.attn
    mlp = block.mlp
    fc_bias = None if mlp.fc.bias is None else mlp.fc.bias.flatten()
    return DecodeLayer(
        number,
        DecodeLinear(attn.qkv.weight, attn.qkv.bias, weights_of(block.ln_1)),
        DecodeLinear(attn.proj.weight, attn.proj.bias),
        DecodeLinear(mlp.fc.weight.flatten(0, -2), fc_bias, weights_of(block.ln_2), mlp.activation),
        DecodeLinear(mlp.proj.weight, mlp.proj.bias),
        FusedBlock.sizes(block, len(attn.qkv.weight)),
        FusedBlock.head_norms(block),
    )


def reason_against(model: GPT) -> str | None:
    """Return why `DecodeStep` cannot run this network, or None."""
    if type(model) is not GPT:
        return "the network is a custom one"
    m = model.m
    weight = next(model.parameters())
    blocks = list(model.h.children())
    unknown = unknown_to(CAPTURED_DECODER, m)
    # Tensor parallelism replaces products; a pipeline stage lacks one end of the network or both.
    products = {model.product}
    products |= {block.attn.qkv.product for block in blocks if isinstance(block, Block)}
    is_whole = products == {linear} and model.has_embedding and model.has_head
    reasons = {
        "the device has no Triton kernels": not devices.has_kernels(weight.device),
        "weights are float64": weight.dtype is torch.float64,
        "blocks are custom ones": bool({*map(type, blocks)} - {Block, FusedBlock}),
        "the network is divided": not is_whole,
        "layers have windows": bool(m.windowed_layers),
        f"positions are of the kind {m.position}": m.position not in ("learned", "rope", "none"),
        "the residual stream is the norm's output": m.apply_residual_connection_post_layernorm,
        "embeddings are normalised": model.ln_emb is not None,
        "the residual stream is float32": model.options.fp32_residual,
        f"heads have {m.head_dim} numbers; kernels are for {DIMS}": m.head_dim not in DIMS,
        f"kernels do not know {', '.join(map(spelling, unknown))}": bool(unknown),
        "layers have other matrices": matrices_of(m).keys() != MATRICES_OF_A_STEP,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
