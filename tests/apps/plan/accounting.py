"""The memory of real training steps without a GPU: its code runs on torch's meta device.

Tensors there have sizes and lifetimes, but no numbers. The program takes the device for a GPU,
Triton's kernels and collectives do nothing, and every allocation is counted as torch's allocator
would round it. Memory that torch's own operations take for a moment is not seen, except that of
flash attention, which is written here from its source.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.base import device as devices
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.data.loader import Batch
from meshwright.kernels import fp8
from meshwright.model import pick
from meshwright.model.kind import block_kind
from meshwright.parallel import comm, layout
from meshwright.parallel.flat import FlatStore
from meshwright.training.network import Spec, build_network
from meshwright.training.step import StepSettings, train_step

META = torch.device("meta")
_device._device_constructors()  # `with META` keeps a list of torch's functions, as they are before any is replaced
PADDED = 1024


class Account(TorchDispatchMode):
    """Counts the bytes of the tensors that are made on the meta device in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.counted = WeakIdKeyDictionary()  # by storage: its bytes, and those that it holds now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.dtype_out:  # which torch 2.11 cannot do on the meta device
            return (kwargs or {})["out"]
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.note, out)
        return out

    def note(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if x.device == META and not isinstance(x, DTensor) and storage not in self.counted:
            size = -(-storage.nbytes() // 512) * 512
            self.counted[storage] = sizes = [size, size]
            self.count(size)
            weakref.finalize(storage, lambda: self.count(-sizes[1]))

    def hold(self, x: Tensor, is_held: bool) -> None:
        """Count a tensor whose storage was emptied or filled again."""
        sizes = self.counted[x.untyped_storage()]
        before, sizes[1] = sizes[1], sizes[0] * is_held
        self.count(sizes[1] - before)

    def hold_only(self, tensors: Iterable[Tensor]) -> None:
        """Forget all others so far: those that fully_shard has before there is memory for them."""
        for sizes in self.counted.values():
            sizes[1] = 0
        self.now = 0
        for x in tensors:
            self.hold(x, True)

    def count(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, t, d = q.shape
        o, lse = new(b, t, h, d, dtype=q.dtype).transpose(1, 2), new(b, h, t)
        ctx.save_for_backward(q, k, v, o, lse, new(2, dtype=torch.int64), new(1, dtype=torch.int64))
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *_ = ctx.saved_tensors
        (b, h, t, d), groups = q.shape, k.shape[1]
        dq, dk, dv = (new(b, t, n, d, dtype=q.dtype).transpose(1, 2) for n in (h, groups, groups))
        rows, columns = -(-t // 128) * 128, -(-d // 32) * 32
        held = [new(b, rows, h, columns), new(b, h, rows)]
        if groups < h:
            held += [new(b, t, h, d, dtype=q.dtype), new(b, t, h, d, dtype=q.dtype)]
        return dq, dk, dv


class FusedNorm(torch.autograd.Function):
    """RMSNorm as one kernel, which torch has for GPUs alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, new(*x.shape[:-1], 1))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class Group:
    """A process group of which only the size matters."""

    def __init__(self, size: int) -> None:
        self.count, self.group_name = size, "counted"

    def size(self) -> int:
        return self.count


class Done:
    """A collective that has ended."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


def done(*_: Any, **__: Any) -> Done:
    return Done()


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Let the program take the meta device for a GPU, and its ranks for connected ones."""
    kernels, zeros = triton.runtime.jit.KernelInterface, torch.zeros
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (devices, "has_kernels", lambda device: device == META),
            (pick, "block_kind", lambda t, m, p, kind: block_kind(t, m, p, "cuda")),
            (devices, "has_fp8", lambda device: True),
            (devices, "is_accelerator", lambda device: False),
            (devices, "processors", lambda device: 132),
            (devices, "counts_draws", lambda device: False),
            (devices, "seed_generator", lambda *_: None),
            (kernels, "__getitem__", lambda self, grid: lambda *_, **__: None),
            (torch.accelerator, "device_index", lambda i: contextlib.nullcontext()),
            (F, "scaled_dot_product_attention", attend),
            (F, "rms_norm", lambda x, _, weight, eps: FusedNorm.apply(x, weight)),
            (torch, "_scaled_mm", scaled_product),
            (fp8.Scales, "_settle", lambda self: None),  # which reads numbers
            (torch, "zeros", lambda *size, pin_memory=False, **more: zeros(*size, **more)),
            (sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices", lambda: ["meta", "cpu"]),
            *((torch, name, done) for name in ("_fused_sgd_", "_fused_adamw_")),
            (comm, "exchange", lambda x, sent, received, group: x.new_empty(sum(received))),
            (comm, "gather_into", done),
            (comm, "scatter_into", done),
            *((dist, name, done) for name in ("all_reduce", "all_to_all_single", "send", "recv", "isend", "broadcast")),
            (dist, "get_world_size", lambda group=None: group.count),
            (dist, "get_rank", lambda group=None: 0),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, enable_gqa: bool) -> Tensor:
    """Attend as torch chooses on a GPU: no kernel takes groups of heads in full precision."""
    if enable_gqa and q.dtype is torch.float32:
        return attend_by_scores(q, k, v, dropout_p)
    return FlashAttention.apply(q, k, v)


def attend_by_scores(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """Do as aten::_scaled_dot_product_attention_math does on a GPU."""
    t, scale = q.shape[2], q.shape[3] ** -0.25
    q = q * scale
    mask = torch.ones(t, t, dtype=torch.bool, device=META).tril()
    mask = torch.where(mask, torch.zeros((), device=META), torch.zeros((), device=META))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1) * scale).add_(mask)
    unsafe = new(*scores.shape), new(*scores.shape, dtype=torch.bool)  # softmax, and which rows are masked
    scores = torch.ops.aten._safe_softmax(scores, -1)
    del unsafe
    if dropout_p:
        scores = torch.native_dropout(scores, dropout_p, True)[0]
    return torch.matmul(scores, v)


def scaled_product(
    a: Tensor, b: Tensor, *_: Any, out_dtype: torch.dtype, out: Tensor | None = None, **__: Any
) -> Tensor:
    return new(len(a), b.shape[1], dtype=out_dtype) if out is None else out


def config_of(*words: str) -> TrainConfig:
    """Return the settings of a run of random tokens."""
    common = "--mock-data --train-iters 3 --lr 1e-3 --vocab-size 1000".split()
    return flags.parse_settings(TrainConfig, [*common, *words], "meshwright train").config


def connected(config: TrainConfig, pipeline_rank: int) -> layout.Layout:
    """Return the layout of the first rank of a pipeline rank, with groups that send nothing."""
    plain = layout.layout_of(config, 0) if config.world > 1 else layout.Layout()
    plain = replace(plain, rank=pipeline_rank * plain.world // plain.pp)
    sizes = {name: plain.size(*dims) for name, dims in layout.GROUPS.items()}
    sizes |= dict.fromkeys(layout.LANES, plain.pp)
    sizes["embedding"] = plain.pp if pipeline_rank in (0, plain.pp - 1) else 1
    return replace(plain, groups={name: Group(n) for name, n in sizes.items() if n > 1})


def account(config: TrainConfig, pipeline_rank: int = 0, padded: int = PADDED) -> tuple[int, int]:
    """Return the bytes that a rank holds after its set-up, and most in two steps."""
    with pretended_gpu(), Account() as counter:
        return account_steps(config, connected(config, pipeline_rank), counter, padded)


def account_steps(
    config: TrainConfig, connections: layout.Layout, counter: Account, padded: int, steps: int = 2
) -> tuple[int, int]:
    """Return the bytes that a rank holds after its set-up, and most in some steps."""
    batch, length, d = config.micro_batch, (config.data.seq_length or 0), config.data
    columns = length // config.parallel.context_parallel_size
    ids = torch.zeros(batch, columns, dtype=torch.int64)
    mask = torch.ones(batch, columns) if d.eod_mask_loss else None
    one = Batch(ids, ids, torch.arange(batch), mask, ids if d.reset_position_ids else None)
    net = build_network(Spec(config, connections, META, 1000, padded))
    if not isinstance(net.store, FlatStore):
        averages = net.store.average.values if net.store.average else ()
        state = (x for part in net.store.update_ranges for x in (part.master, *part.state.values()))
        counter.hold_only([*state, *averages])
    held = counter.peak = counter.now
    for _ in range(steps):
        train_step(net, [one] * config.micro_batches(config.global_batch), StepSettings(1, 1e-3, 0.1))
    return held, counter.peak
