"""A GPU that is not there: patches that let the program take torch's meta device for one.

Tensors on the meta device have sizes and lifetimes, but no numbers. Triton's kernels and all
collectives do nothing, and what torch itself has for GPUs alone is written here as far as it
allocates memory. Nothing but a measurement may run within these patches.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)
from torch.utils import _device

from meshwright.apps.plan.measure.account import META, Account
from meshwright.apps.plan.measure.standin import triton_or_standin
from meshwright.base import device as devices
from meshwright.base.device import NVIDIA
from meshwright.config.schema import Model, Precision, TrainConfig, Training
from meshwright.kernels import adamw, fp8
from meshwright.model import attention, gpt, pick, recompute
from meshwright.model.kind import BlockKind, block_kind
from meshwright.parallel import comm, layout
from meshwright.parallel.layout import Layout

PROCESSORS = 132  # of an H100 and H200; they decide about small sums only
SHARDING = _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state
FUSED_DEVICES = "_get_fused_kernels_supported_devices"  # torch's function for fused optimizers
COLLECTIVES = ("all_reduce", "all_to_all_single", "broadcast", "send", "recv", "isend")
# `with META` keeps a list of torch's functions; it is made here, before any of them is replaced.
_device._device_constructors()


@contextlib.contextmanager
def pretended_gpu(account: Account) -> Iterator[None]:
    """Let the program take the meta device for a GPU, and its ranks for connected ones."""
    zeros = torch.zeros
    done = functools.partial(collective, account)

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: account.recorder.launch(
            kernel, args, kwargs, account.section
        )

    with triton_or_standin() as triton, contextlib.ExitStack() as stack:
        for owner, name, value in (
            # The device
            (devices, "has_kernels", lambda device: device == META),
            (devices, "has_fp8", lambda device: True),
            (devices, "is_hopper_or_later", lambda device: True),
            (devices, "is_accelerator", lambda device: False),
            (devices, "processors", lambda device: PROCESSORS),
            (devices, "counts_draws", lambda device: False),
            (devices, "seed_generator", lambda *_: None),
            (pick, "block_kind", kind_of_block),
            (recompute.AttentionResults, "used", lambda kept: account.keeping(kept)),
            (gpt, "save_on_cpu", saved_elsewhere),
            (torch.accelerator, "device_index", lambda i: contextlib.nullcontext()),
            # Kernels
            (triton.runtime.jit.KernelInterface, "__getitem__", launch),
            (F, "scaled_dot_product_attention", functools.partial(attend, account)),
            (attention, "flex_kernel", lambda: functools.partial(attend_by_blocks, account)),
            (F, "rms_norm", functools.partial(fused_norm, account)),
            (torch, "_scaled_mm", functools.partial(scaled_product, account)),
            (fp8.Scales, "_settle", lambda self: None),  # which reads numbers
            (torch, "zeros", lambda *size, pin_memory=False, **more: zeros(*size, **more)),
            # Updates
            (adamw, "make_table", make_table),
            (sys.modules["torch.optim.optimizer"], FUSED_DEVICES, lambda: ["meta", "cpu"]),
            (torch, "_fused_sgd_", functools.partial(update, account, "_fused_sgd_")),
            (torch, "_fused_adamw_", functools.partial(update, account, "_fused_adamw_")),
            # Other ranks
            (comm, "exchange", lambda x, sent, received, group: x.new_empty(sum(received))),
            (comm, "gather_into", done("all_gather")),
            (comm, "scatter_into", done("reduce_scatter")),
            (dist, "get_world_size", lambda group=None: group.count),
            (dist, "get_rank", lambda group=None: 0),
            *((dist, name, done(name)) for name in COLLECTIVES),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextlib.contextmanager
def pretended_rank(config: TrainConfig, pipeline_rank: int, account: Account) -> Iterator[Layout]:
    """Yield the layout of the first rank of a pipeline rank, within pretended_gpu."""
    # ZeRO 3 shards by fully_shard, which asks for a group of torch's own.
    plain = connected(config, pipeline_rank)
    if config.parallel.zero_stage < 3 or plain.size("shard", "cp") == 1:
        with pretended_gpu(account):
            yield plain
        return
    with pretended_shards(plain.size("shard", "cp"), account) as group:
        yield replace(plain, groups=plain.groups | {"shard": group})


@contextlib.contextmanager
def pretended_shards(ranks: int, account: Account) -> Iterator[Any]:
    """Yield the group of ranks over which fully_shard shards, within pretended_gpu.

    fully_shard takes the meta device for memory that is still to come, and frees gathered weights
    by emptying their storage. So what it asks of a device is answered here, and sizes are counted.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    done = functools.partial(collective, account)

    def allocate(x: Tensor) -> None:
        account.hold(x, True)

    def free(x: Tensor) -> None:
        account.hold(x, False)

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with pretended_gpu(account), contextlib.ExitStack() as stack:
            for owner, name, value in (
                (_fully_shard, "_get_device_from_mesh", lambda mesh: META),
                (_fsdp_init, "_move_states_to_device", lambda *_: None),
                (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
                # From torch 2.15 on; it takes every buffer that is not a CPU's for one of a GPU.
                (_fsdp_collectives, "record_grad_output_stream", lambda *_: None),
                (_fsdp_param, "alloc_storage", allocate),
                (_fsdp_param_group, "alloc_storage", allocate),
                (_fsdp_param, "free_storage", free),
                *((module, "_get_device_handle", lambda _: torch.cpu) for module in SHARDING),
                (dist, "all_gather_into_tensor", done("all_gather_into_tensor")),
                (dist, "reduce_scatter_tensor", done("reduce_scatter_tensor")),
            ):
                if hasattr(owner, name):  # which of torch's modules have it depends on its version
                    stack.enter_context(mock.patch.object(owner, name, value))
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


# Other ranks


class PretendedGroup:
    """A process group of which only the size matters."""

    def __init__(self, size: int) -> None:
        self.count = size
        self.group_name = "counted"

    def size(self) -> int:
        return self.count


class Done:
    """A collective that has ended."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


def collective(account: Account, name: str) -> Callable[..., Done]:
    """Return what takes the place of a collective."""

    def call(*args: Any, **kwargs: Any) -> Done:
        account.recorder.collective(name, args, kwargs, account.section)
        return Done()

    return call


def connected(config: TrainConfig, pipeline_rank: int) -> Layout:
    """Return the layout of the first rank of a pipeline rank, with groups that send nothing."""
    plain = layout.layout_of(config, 0) if config.world > 1 else Layout()
    plain = replace(plain, rank=pipeline_rank * plain.world // plain.pp)
    sizes = {name: plain.size(*dims) for name, dims in layout.GROUPS.items()}
    sizes |= dict.fromkeys(layout.LANES, plain.pp)
    sizes["embedding"] = 1
    if pipeline_rank in (0, plain.pp - 1):  # the ranks that share a tied embedding
        sizes["embedding"] = plain.pp
    groups: dict[str, Any] = {}
    for name, size in sizes.items():
        if size > 1:  # a dimension of one rank has no group
            groups[name] = PretendedGroup(size)
    return replace(plain, groups=groups)


# Kernels


def kind_of_block(t: Training, m: Model, p: Precision, kind: str) -> BlockKind:
    """Return the kind of block on a GPU; compiled ones are measured as plain ones."""
    chosen = block_kind(t, m, p, NVIDIA)
    return "plain" if chosen == "compiled" else chosen


def saved_elsewhere(pin_memory: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Let go of the tensors that a graph would keep on the host."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: (x.shape, x.dtype), lambda kept: new(*kept[0], dtype=kept[1])
    )


def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def make_table(ranges: list[adamw.FlatRange], device: torch.device) -> Tensor:
    """Return a table of AdamW's without its numbers, which would need memory of the host."""
    return new(2, sum((r.end - r.begin) // adamw.BLOCK for r in ranges), dtype=torch.int32)


def update(account: Account, name: str, *args: Any, **_: Any) -> None:
    """Take the place of torch's fused optimizers."""
    account.recorder.fused(name, args, account.section)


class FlashAttention(torch.autograd.Function):
    """torch's flash attention, with the memory that its source takes for a moment."""

    @staticmethod
    def forward(
        ctx: Any, account: Account, q: Tensor, k: Tensor, v: Tensor, dropout: float
    ) -> Tensor:
        batch, heads, tokens, width = q.shape

        def compute() -> tuple[Tensor, ...]:
            """Make what the kernel makes: its output, a number a row, a generator's state."""
            account.recorder.attention(q, k, v, dropout, False, account.section)
            out = new(batch, tokens, heads, width, dtype=q.dtype).transpose(1, 2)
            rng_state = new(2, dtype=torch.int64)
            return out, new(batch, heads, tokens), rng_state, new(1, dtype=torch.int64)

        out, *rest = compute() if account.kept is None else account.kept.of(compute)
        ctx.save_for_backward(q, k, v, out, *rest)
        ctx.account = account
        ctx.dropout = dropout
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        batch, heads, tokens, width = q.shape
        groups = k.shape[1]
        ctx.account.recorder.attention(q, k, v, ctx.dropout, True, ctx.account.section)

        def like_heads(count: int) -> Tensor:
            return new(batch, tokens, count, width, dtype=q.dtype)

        dq = like_heads(heads).transpose(1, 2)
        dk = like_heads(groups).transpose(1, 2)
        dv = like_heads(groups).transpose(1, 2)
        # Sums of dq in full precision, padded to blocks, and a number for each row.
        rows = -(-tokens // 128) * 128
        columns = -(-width // 32) * 32
        held = [new(batch, rows, heads, columns), new(batch, heads, rows)]
        if groups < heads:  # the gradients of keys and values before they are summed over groups
            held += [like_heads(heads), like_heads(heads)]
        return None, dq, dk, dv, None


class FusedNorm(torch.autograd.Function):
    """RMSNorm as one kernel, which torch has for GPUs alone."""

    @staticmethod
    def forward(ctx: Any, account: Account, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, new(*x.shape[:-1], 1))
        ctx.account = account
        y = torch.empty_like(x)
        account.recorder.fused("rms_norm", (x, weight, y), account.section)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        account = ctx.account
        dx = torch.empty_like(x)
        dw = torch.empty_like(weight)
        account.recorder.fused("rms_norm_backward", (x, weight, grad, dx, dw), account.section)
        return None, dx, dw


def fused_norm(account: Account, x: Tensor, _: Any, weight: Tensor, eps: float) -> Tensor:
    return FusedNorm.apply(account, x, weight)  # type: ignore[no-any-return,no-untyped-call]


def attend(
    account: Account,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as torch chooses on a GPU.

    No kernel takes groups of heads in full precision, or with a mask.
    """
    if enable_gqa and (q.dtype is torch.float32 or attn_mask is not None):
        return attend_by_scores(q, k, v, attn_mask, dropout_p)
    return FlashAttention.apply(account, q, k, v, dropout_p)  # type: ignore[no-any-return,no-untyped-call]


def attend_by_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float
) -> Tensor:
    """Attend by the steps of aten::_scaled_dot_product_attention_math on a GPU."""
    heads = q.shape[1]
    tokens = q.shape[2]
    scale = q.shape[3] ** -0.25
    q = q * scale
    if mask is None:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=META).tril()
    if mask.dtype is torch.bool:
        mask = torch.where(mask, torch.zeros((), device=META), torch.zeros((), device=META))
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1) * scale).add_(mask)
    # A softmax, and which rows are masked, are there for a moment.
    unsafe = new(*scores.shape), new(*scores.shape, dtype=torch.bool)
    scores = torch.ops.aten._safe_softmax(scores, -1)
    del unsafe
    if dropout_p:
        scores = torch.native_dropout(scores, dropout_p, True)[0]
    return torch.matmul(scores.to(v.dtype), v)


def attend_by_blocks(
    account: Account, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Attend as FlexAttention does, whose kernels keep as much as flash attention."""
    return FlashAttention.apply(account, q, k, v, 0.0)  # type: ignore[no-any-return,no-untyped-call]


def scaled_product(
    account: Account,
    a: Tensor,
    b: Tensor,
    *_: Any,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    **__: Any,
) -> Tensor:
    """Multiply in fp8."""
    product = new(len(a), b.shape[1], dtype=out_dtype) if out is None else out
    account.recorder.fused("_scaled_mm", (a, b, product), account.section)
    return product
