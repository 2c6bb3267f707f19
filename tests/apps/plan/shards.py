"""ZeRO 3 on torch's meta device, for accounting.py: fully_shard, whose collectives do nothing.

fully_shard takes the meta device for memory that is still to come, and frees gathered weights by
emptying their storage. So what it asks of a device is answered here, and sizes are counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from accounting import META, PADDED, Account, account, account_steps, connected, done, pretended_gpu
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.config.schema import TrainConfig
from meshwright.parallel.layout import Layout

MODULES = _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state


def account_any(config: TrainConfig, pipeline_rank: int = 0) -> tuple[int, int]:
    """Return the bytes that a rank holds after its set-up, and most in two steps."""
    if config.parallel.zero_stage < 3 or config.dp * config.parallel.context_parallel_size == 1:
        return account(config, pipeline_rank)
    counter = Account()
    with pretended_shards(config, pipeline_rank, counter) as layout, counter:
        return account_steps(config, layout, counter, PADDED)


@contextlib.contextmanager
def pretended_shards(config: TrainConfig, pipeline_rank: int, counter: Account) -> Iterator[Layout]:
    """Yield the layout of a rank that shares each parameter with the ranks of its group."""
    layout = connected(config, pipeline_rank)
    ranks = layout.size("shard", "cp")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with pretended_gpu(), contextlib.ExitStack() as stack:
            for owner, name, value in (
                (_fully_shard, "_get_device_from_mesh", lambda mesh: META),
                (_fsdp_init, "_move_states_to_device", lambda *_: None),
                (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
                # From torch 2.15 on; it takes every buffer that is not a CPU's for one of a GPU.
                (_fsdp_collectives, "record_grad_output_stream", lambda *_: None),
                (_fsdp_param, "alloc_storage", lambda x: counter.hold(x, True)),
                (_fsdp_param_group, "alloc_storage", lambda x: counter.hold(x, True)),
                (_fsdp_param, "free_storage", lambda x: counter.hold(x, False)),
                *((module, "_get_device_handle", lambda _: torch.cpu) for module in MODULES),
                *((dist, name, done) for name in ("all_gather_into_tensor", "reduce_scatter_tensor")),
            ):
                if hasattr(owner, name):  # which of torch's modules have it depends on its version
                    stack.enter_context(mock.patch.object(owner, name, value))
            yield replace(layout, groups=layout.groups | {"shard": dist.group.WORLD})
    finally:
        dist.destroy_process_group()
