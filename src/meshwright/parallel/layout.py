"""The parallel layout: the size of every dimension, this rank's position, and the process groups.

The rank order is Megatron's, fastest first: tensor, context, data, pipeline. Data ranks are
`replicas` x `shard`: ZeRO shards over the ranks of one replica (and over its context ranks, which
hold the same weights), and replicas hold copies.

Hand-written over torch.distributed groups: DeviceMesh makes a group for each dimension, even those
of size 1, and has no public name for the unions of dimensions needed here. A group exists only
where more than one rank belongs to it; if all sizes are 1, there is none and nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from meshwright.settings.schema import TrainConfig

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import ProcessGroup

DIMENSIONS = ("pp", "replicas", "shard", "cp", "tp")  # slowest first
# Group -> dimensions in which its ranks differ.
GROUPS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "gradients": ("replicas", "shard", "cp"),  # gradients of the same weights are summed over it
    "shard": ("shard", "cp"),  # optimizer state is sharded over it
    "replicas": ("replicas",),
}

LANES = ("forward", "backward", "forward around", "backward around")


@dataclass(frozen=True)
class Layout:
    """Sizes of the dimensions and this rank's number. `connect` fills `groups`."""

    pp: int = 1
    replicas: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    rank: int = 0
    groups: dict[str, ProcessGroup] = field(default_factory=dict, compare=False)

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.pp, self.replicas, self.shard, self.cp, self.tp)

    @property
    def dp(self) -> int:
        return self.replicas * self.shard

    def at(self, *names: str) -> int:
        """Return this rank's position in a dimension, or in several combined."""
        position, rest = {}, self.rank
        for name, size in reversed(list(zip(DIMENSIONS, self.shape, strict=True))):
            rest, position[name] = divmod(rest, size)
        number = 0
        for name in DIMENSIONS:
            if name in names:
                number = number * getattr(self, name) + position[name]
        return number

    def size(self, *names: str) -> int:
        return math.prod(getattr(self, name) for name in names)

    def members(self, *names: str) -> list[list[int]]:
        """Return all groups of ranks that differ in these dimensions only, each in order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            other = replace(self, rank=rank)
            groups.setdefault(tuple(other.at(n) for n in DIMENSIONS if n not in names), []).append(rank)
        return list(groups.values())

    def group(self, name: str) -> ProcessGroup | None:
        """Return a process group, or None if it has only this rank."""
        return self.groups.get(name)


def connect(layout: Layout, timeout: timedelta | None = None) -> Layout:
    """Return the layout with its process groups; every rank of an initialised world must call this.

    Without `timeout`, a new group has torch's default, not the default group's.
    """
    if layout.world == 1:
        return layout
    groups = {name: new_group(layout.members(*dims), layout.rank, timeout) for name, dims in GROUPS.items()}
    pipelines = layout.members("pp")
    groups["embedding"] = new_group([sorted({g[0], g[-1]}) for g in pipelines], layout.rank, timeout)
    for lane in LANES:  # one direction each, so that messages cannot deadlock
        groups[lane] = new_group(pipelines, layout.rank, timeout)
    return replace(layout, groups={name: g for name, g in groups.items() if g is not None})


def new_group(members: Sequence[Sequence[int]], rank: int, timeout: timedelta | None) -> ProcessGroup | None:
    """Create a process group for each list of ranks; return the one of `rank`, if any."""
    import torch.distributed as dist

    from meshwright.parallel import gloo

    # "cpu:gloo,cuda:nccl" would open thousands of sockets in a large run, for tensors of no group.
    by_device = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
    backend = next((name for kind, name in by_device.items() if kind != "cpu"), None)
    if backend in (None, "gloo"):
        backend = gloo.register()
    own = None
    for ranks in members:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            if rank in ranks:
                own = group
    return own


def layout_of(config: TrainConfig, rank: int) -> Layout:
    p = config.parallel
    replicas = p.num_distributed_optimizer_instances
    shard, cp, tp = config.dp // replicas, p.context_parallel_size, p.tensor_model_parallel_size
    return Layout(p.pipeline_model_parallel_size, replicas, shard, cp, tp, rank)
