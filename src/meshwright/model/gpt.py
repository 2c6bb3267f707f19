"""GPT: the whole network in one file, independent of ranks, groups and files.

    tokens -> wte (+ wpe) -> [ln_1 -> attn -> +, ln_2 -> mlp -> +] x layers -> ln_f -> logits

With --use-parallel-residual ln_2 reads the stream as it was before attention.

A block takes and returns (residual, pending): pending is the last branch's output before dropout
and the addition, so that a fused kernel can combine that addition with the next norm. `join` adds.
The places where it does are numbered (0: the embedding's dropout, 2i+1: after attention i, 2i+2:
after MLP i), and that number is the dropout's site.

Names are those of the checkpoint: wte, wpe, ln_emb, h.{i}.ln_1, h.{i}.attn.qkv, h.{i}.attn.ln_q,
h.{i}.attn.ln_k, h.{i}.attn.proj, h.{i}.ln_2, h.{i}.mlp.fc, h.{i}.mlp.proj, ln_f, lm_head. i is the
layer's number in the full model; modules that an option switches off do not exist.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from meshwright.base import device as devices
from meshwright.config.schema import Model
from meshwright.kernels import dropout
from meshwright.kernels.linear import linear
from meshwright.kernels.softcap import softcap
from meshwright.model.attention import Attention, seed_dropout
from meshwright.model.kind import uses_reference
from meshwright.model.layers import MLP, Embedding, Linear, Norm
from meshwright.model.positions import Positions, Shared, share
from meshwright.model.recompute import AttentionResults
from meshwright.optim.mup import factors_of


@dataclass(frozen=True)
class Options:
    """How the network is run; changes results only by rounding."""

    recompute: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_layers: int = 1
    inputs_on_host: bool = False  # of recomputed layers
    fp32_residual: bool = False
    compiled: bool = False  # compile each block
    fused: bool = False  # blocks of fused kernels (fused.py)


class Block(nn.Module):
    def __init__(self, m: Model, layer: int, options: Options) -> None:
        super().__init__()
        assert m.hidden_size
        self.p = m.hidden_dropout
        self.post_norm = m.apply_residual_connection_post_layernorm
        self.parallel = m.use_parallel_residual
        self.ln_1 = Norm(m, m.hidden_size)
        self.attn = Attention(m, layer, options.recompute == "selective")
        self.ln_2 = Norm(m, m.hidden_size)
        self.mlp = MLP(m)

    def forward(
        self,
        residual: Tensor | None,
        pending: Tensor,
        shared: Shared,
        before: Tensor | None,
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`before` and `after` are the dropout rows of the two joins; None is no dropout."""
        x = join(residual, pending, before, self.p)
        y = self.ln_1(x)
        branch = self.attn(y, shared)
        stream = join(y.to(x.dtype) if self.post_norm else x, branch, after, self.p)
        z = self.ln_2(x if self.parallel else stream)
        if self.post_norm:
            stream = z.to(x.dtype)
        # The MLP's output is left pending for the next block's first join.
        return stream, self.mlp(z)

    @staticmethod
    def end(
        residual: Tensor | None, pending: Tensor, rows: Tensor | None, p: float, norm: Norm
    ) -> Tensor:
        """Add the last branch to the stream and return its norm, which the head multiplies."""
        return norm(join(residual, pending, rows, p))  # type: ignore[no-any-return]


def join(residual: Tensor | None, pending: Tensor, rows: Tensor | None, p: float) -> Tensor:
    """Return residual + dropout(pending), float32 if the residual is; the embedding has none."""
    if rows is not None:
        pending = dropout.dropout(pending, rows, p)
    return pending if residual is None else residual + pending


class GPT(nn.Module):
    """The model. Rows from `vocab` to `padded`, for speed, are zero and never predicted."""

    def __init__(
        self,
        m: Model,
        vocab: int,
        padded: int,
        positions: int,
        block: type[Block] = Block,
        options: Options | None = None,
    ) -> None:
        super().__init__()
        assert m.hidden_size and m.num_layers
        self.m = m
        self.options = options or Options()
        self.vocab = vocab
        self.layers = m.num_layers
        self.wte = Embedding(padded, m.hidden_size)
        self.wpe = Embedding(positions, m.hidden_size) if m.position == "learned" else None
        self.ln_emb = Norm(m, m.hidden_size) if m.embed_layernorm else None
        self.h = nn.ModuleDict({str(i): block(m, i, self.options) for i in range(m.num_layers)})
        # A block of a custom model need not say how the network ends.
        self.end = getattr(block, "end", Block.end)
        self.has_embedding = self.has_head = True
        # shape -> how many numbers a layer's attention draws
        self.drawn: dict[tuple[int, int, bool], int] = {}
        self.ln_f = Norm(m, m.hidden_size)
        untied = m.untie_embeddings_and_output_weights
        self.lm_head = Linear(m.hidden_size, padded, bias=False) if untied else None

    def keep(self, layers: range, has_embedding: bool, has_head: bool) -> None:
        """Delete all but these layers and, if asked for, the embedding and the head."""
        self.has_embedding = has_embedding
        self.has_head = has_head
        for i in set(map(int, self.h)) - set(layers):
            del self.h[str(i)]
        if not has_embedding:
            self.wpe = self.ln_emb = None
        if not has_head:
            del self.ln_f
            self.lm_head = None
        # A tied head multiplies by the embedding's weight, so the last stage keeps that too.
        if not has_embedding and (not has_head or self.lm_head is not None):
            del self.wte

    def forward(
        self,
        tokens: Tensor,
        where: Positions | None = None,
        last_only: bool = False,
        stream: Tensor | None = None,
    ) -> Tensor:
        """Map tokens [B, T] to logits [B, T, padded], or [B, 1, padded] with `last_only`.

        Only the first `vocab` logits count; a call without `where`, for texts from their beginning
        and without dropout, returns these alone. A stage that is not the first continues the
        residual `stream`; one that is not the last returns it.
        """
        if where is None:
            return self.forward(tokens, Positions(), last_only, stream)[..., : self.vocab]
        shared = share(
            self.m,
            where,
            tokens,
            next(self.parameters()).dtype,
            self.options.compiled or self.options.fused,
        )
        sites = self.dropout_rows(where)
        here = [int(i) for i in self.h]

        # The input of this stage's first layer.
        residual: Tensor | None = None
        if stream is not None:
            pending = stream
            sites[2 * here[0]] = None  # the previous stage has added its last branch
        else:
            pending = self.embed(tokens, where)
            # An embedding with a dropout probability of its own drops here, others in a join.
            if self.m.embedding_dropout is not None:
                pending = join(None, pending, sites[0], self.m.embedding_dropout)
                sites[0] = None

        for layers, again in self.stretches():
            if self.training and again:
                # The residual stream's dropout is a function of positions, and attention's results
                # are kept if it draws, so no generator's state is needed for the second pass.
                run = self.run_twice(shared.where, pending.device)
                with self.keep_inputs(pending.device.type != "cpu"):
                    given = residual, pending, shared, sites, layers
                    residual, pending = checkpoint(
                        run, *given, use_reentrant=False, preserve_rng_state=False
                    )
            else:
                residual, pending = self.run(residual, pending, shared, sites, layers)

        # Add the last branch, which is still pending; on the last stage the head follows.
        rows = sites[2 * here[-1] + 2]
        p = self.m.hidden_dropout
        if not self.has_head:
            return join(residual, pending, rows, p)
        y = self.end(residual, pending, rows, p, self.ln_f)
        if last_only:
            if where.cached is None or where.cached.ends is None:
                y = y[:, -1:]
            else:
                # Padding follows the shorter texts.
                ends = where.cached.ends[:, None, None]
                y = y.gather(1, ends.expand(-1, 1, y.shape[-1]))
        return self.head(y)

    def embed(self, tokens: Tensor, where: Positions) -> Tensor:
        x: Tensor = self.wte(tokens)
        if self.ln_emb is not None:
            x = self.ln_emb(x)
        if self.wpe is not None:
            at = where.stream or where
            x = x + self.wpe(at.columns if at.position_ids is None else at.position_ids)
        if self.options.fp32_residual and x.dtype is not torch.float64:
            x = x.float()
        return x

    def stretches(self) -> Iterator[tuple[list[int], bool]]:
        """Yield groups of layers, and whether backward recomputes a group from its input."""
        here = [int(i) for i in self.h]
        n = self.options.recompute_layers
        if self.options.recompute != "full":
            yield here, False
        elif self.options.recompute_method == "block":
            # The first n layers, each for itself.
            for i in here[:n]:
                yield [i], True
            yield here[n:], False
        else:
            # Uniformly: all layers, n at a time.
            for i in range(0, len(here), n):
                yield here[i : i + n], True

    def keep_inputs(self, pinned: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context that decides where the inputs of recomputed layers are kept."""
        if self.options.inputs_on_host:
            return save_on_cpu(pin_memory=pinned)
        return contextlib.nullcontext()

    def run(
        self,
        residual: Tensor | None,
        pending: Tensor,
        shared: Shared,
        sites: list[Tensor | None],
        layers: list[int],
    ) -> tuple[Tensor | None, Tensor]:
        draws = self.draws(shared.where, pending.device)
        for i in layers:
            layer = functools.partial(
                self.h[str(i)], residual, pending, shared, sites[2 * i], sites[2 * i + 1]
            )
            residual, pending = self.seeded(i, layer, shared, pending.device) if draws else layer()
        return residual, pending

    def run_twice(self, where: Positions, device: torch.device) -> Callable[..., Any]:
        """Return `run` for layers that are recomputed; attention that draws runs once."""
        if self.draws(where, device) and not self.options.compiled:
            return AttentionResults().around(self.run)
        return self.run

    def draws(self, where: Positions, device: torch.device) -> bool:
        """Return whether attention draws its dropout, which the reference hashes from positions."""
        p = self.m.attention_dropout if self.training and where.samples is not None else 0.0
        return p > 0 and not uses_reference(self.m.attention_impl, p, device.type)

    def seeded(
        self,
        i: int,
        layer: Callable[[], tuple[Tensor, Tensor]],
        shared: Shared,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Run layer i, whose attention draws from the device's generator.

        The first layer shows how many numbers each of them draws. A pipeline rank without it runs
        the first of its own once more, as if it were that.
        """
        if shared.kept is not None and shared.kept.has_all:  # nothing is drawn a second time
            return layer()
        where = shared.where
        assert where.samples is not None and where.columns is not None
        shape = len(where.samples), where.length or len(where.columns), shared.mask is None
        counts = devices.counts_draws(device) and not devices.is_capturing(device)
        if i and counts and shape not in self.drawn:
            kept, shared.kept = shared.kept, None
            with torch.no_grad():
                self.seeded(0, layer, shared, device)
            shared.kept = kept
        seed_dropout(where, i, device, self.drawn.get(shape, 0))
        out = layer()
        if not i and counts and shape not in self.drawn:
            self.drawn[shape] = devices.count_drawn(device)
        return out

    def drawn_by_layer(self, samples: int, columns: int) -> int:
        """Return how many numbers attention has drawn in a layer for a batch of this size.

        The masks of a run's batches are all of one kind.
        """
        return next((n for shape, n in self.drawn.items() if shape[:2] == (samples, columns)), 0)

    def dropout_rows(self, where: Positions) -> list[Tensor | None]:
        """Return each site's hashes of (seed, sample, place, site), [B, T] or as the stream."""
        count = 2 * self.layers + 1
        branches = self.m.hidden_dropout > 0
        embedding = self.m.dropout_of_embeddings > 0
        if not (branches or embedding) or not self.training or where.samples is None:
            return [None] * count
        # Under sequence parallelism the stream has other rows than attention.
        samples = where.samples[:, None]
        columns = where.columns
        if where.stream is not None and where.stream.samples is not None:
            samples = where.stream.samples
            columns = where.stream.columns
        assert columns is not None
        rows = dropout.site_rows(where.seed, count, samples, columns)
        sites: list[Tensor | None] = list(rows.unbind())
        if not embedding:
            sites[0] = None
        if not branches:
            sites[1:] = [None] * (count - 1)
        return sites

    def head(self, y: Tensor) -> Tensor:
        weight = self.wte.weight if self.lm_head is None else self.lm_head.weight
        return self.finish(self.product(y, weight))

    def finish(self, logits: Tensor) -> Tensor:
        """Return the logits as losses and sampling take them; any way to compute them ends here."""
        cap = self.m.final_logit_softcapping
        return softcap(logits, cap) if cap else logits

    product = staticmethod(linear)  # tensor parallelism replaces it, as a Linear's


def name_of(model: nn.Module) -> str:
    """Return the network's name, saved in checkpoints: tensors alone do not identify it."""
    blocks = [type(block).__name__ for block in getattr(model, "h", nn.ModuleDict()).children()]
    return " of ".join([type(model).__name__, *blocks[:1]])


@torch.no_grad()
def initialise(masters: Iterable[tuple[str, Tensor]], m: Model, vocab: int, seed: int) -> None:
    """Fill the weights: normal(0, std), proj weights std / sqrt(2 layers) or 0, biases 0, norms 1.

    With --mup-base-hidden-size and --mup-base-num-layers the factors of optim/mup.py apply, to
    values as at the base.

    Each tensor is drawn in full, at the true vocabulary size, in float32 on the CPU, from a
    generator seeded by (seed, name). Its values depend on nothing else: not on the device, the
    precision, the padding, the layout or other tensors.
    """
    layers = m.mup_base_num_layers or m.num_layers or 0
    for name, p in masters:
        kind = name.removesuffix(".weight").split(".")[-1]
        factor = factors_of(m, name, p.ndim > 1).initial
        if name.endswith("bias") or (kind == "proj" and m.zero_init_projections):
            p.zero_()
        elif p.ndim == 1:
            # A norm's weight is stored minus one with --apply-layernorm-1p.
            is_less = m.apply_layernorm_1p and kind.startswith("ln_")
            p.fill_(factor - 1.0 if is_less else factor)
        else:
            # Only 63 bits of the hash are the seed: it is not negative as a signed number either.
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            random = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

            # Draw in place where p is a plain tensor of the format that is drawn.
            true_rows = vocab if kind in ("wte", "lm_head") else p.shape[0]
            is_own = p.dtype == torch.float32 and p.device.type == "cpu" and p.is_contiguous()
            shape = true_rows, *p.shape[1:]
            draw = p[:true_rows] if is_own else torch.empty(shape)
            if m.init_method_xavier_uniform:
                # The bound is for a matrix [out, in]; the two of a gated MLP count as one.
                inputs = draw.shape[-1]
                outputs = draw.numel() // inputs
                bound = math.sqrt(6 / (outputs + inputs))
                draw.uniform_(-bound, bound, generator=random)
            else:
                std = m.init_method_std
                # As in GPT-2: each of the 2 x layers branches adds to the stream's variance.
                if kind == "proj":
                    std = std / (2 * layers) ** 0.5
                draw.normal_(0, std * factor, generator=random)

            # Rows for speed alone are zero, and stay so: nothing predicts them.
            if not is_own:
                p[:true_rows] = draw.to(p.device)
            p[true_rows:] = 0
