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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from meshwright.config.schema import TrainConfig

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
    "matrices": ("shard", "cp", "tp"),  # Muon gathers matrices over it
}

# Bytes of a tensor rank's rows from which copies are worth their waits. On two H200s, 8 MiB (4,096
# rows of 1,024) made a step 8 % slower and 40 MiB (8,192 of 2,560) 6 % faster.
WORTHWHILE_BYTES = 16 << 20
MORE_ROOMS = 2  # rooms that a tensor rank maps for sums of rows, besides one for each rank's rows
LANES = ("forward", "backward", "forward around", "backward around")

# How often the ranks of a world have connected a layout: a process may be in several worlds, one
# after the other, and in each with other ranks.
_connected: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


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
        # The digits of the rank's number, the fastest dimension first.
        position = {}
        rest = self.rank
        for name, size in reversed(list(zip(DIMENSIONS, self.shape, strict=True))):
            rest, position[name] = divmod(rest, size)
        number = 0
        for name in DIMENSIONS:
            if name in names:
                number = number * getattr(self, name) + position[name]
        return number

    def size(self, *names: str) -> int:
        return math.prod(getattr(self, name) for name in names)

    def offsets(self, *names: str) -> list[int]:
        """Return the numbers of the ranks that are first in all dimensions but these, in order."""
        numbers = [0]
        stride = self.world
        for name, size in zip(DIMENSIONS, self.shape, strict=True):
            stride //= size
            if name in names:
                steps = [stride * position for position in range(size)]
                numbers = [number + step for number in numbers for step in steps]
        return numbers

    def members(self, *names: str) -> list[list[int]]:
        """Return all groups of ranks that differ in these dimensions only, each in order."""
        offsets = self.offsets(*names)
        firsts = self.offsets(*(d for d in DIMENSIONS if d not in names))
        return [[first + n for n in offsets] for first in firsts]

    def peers(self, *names: str) -> list[int]:
        """Return this rank's group among `members`."""
        offsets = self.offsets(*names)
        first = self.rank - offsets[self.at(*names)]
        return [first + n for n in offsets]

    def group(self, name: str) -> ProcessGroup | None:
        """Return a process group, or None if it has only this rank."""
        if name == "matrices" and name not in self.groups:
            name = "shard" if self.tp == 1 else "tp"
        return self.groups.get(name)


def connect(layout: Layout, timeout: timedelta | None = None) -> Layout:
    """Return the layout with its process groups; every rank of an initialised world must call this.

    Without `timeout`, a new group has torch's default, not the default group's.
    """
    if layout.world == 1:
        return layout
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    number = _connected[world] = _connected.get(world, 0) + 1
    ranks = {name: layout.peers(*dims) for name, dims in GROUPS.items()}
    pipeline = layout.peers("pp")
    ranks["embedding"] = sorted({pipeline[0], pipeline[-1]})
    ranks |= dict.fromkeys(LANES, pipeline)  # one direction each, so that messages cannot deadlock
    if ranks["matrices"] in (ranks["shard"], ranks["tp"]):
        del ranks["matrices"]  # `Layout.group` names the other one
    # A middle stage of the pipeline is not among the embedding's ranks.
    groups = {}
    for name, members in ranks.items():
        if len(members) > 1 and layout.rank in members:
            groups[name] = new_group(f"{name} {number}", members, timeout)
    return replace(layout, groups=groups)


def new_group(name: str, ranks: list[int], timeout: timedelta | None) -> ProcessGroup:
    """Create the process group of these ranks, which alone call this.

    torch's own `new_group` either has every rank of the run call it for every group, or names a
    group after its ranks, so that a later group of the same ranks would find the sockets of one
    that was destroyed.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from meshwright.runtime.ranks import gloo

    # "cpu:gloo,cuda:nccl" would open thousands of sockets in a large run, for tensors of no group.
    by_device = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
    backend = next((backend for kind, backend in by_device.items() if kind != "cpu"), "gloo")
    if backend == "gloo":
        backend = gloo.register()
    group: ProcessGroup
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        c10d._get_default_store(),
        f"{name} of rank {ranks[0]}",  # type: ignore[arg-type]  # only newer torch has GroupName
        timeout=timeout or c10d._get_default_timeout(dist.Backend(backend)),
    )
    c10d._world.pg_group_ranks[group] = {rank: n for n, rank in enumerate(ranks)}
    return group


def layout_of(config: TrainConfig, rank: int) -> Layout:
    p = config.parallel
    replicas = p.num_distributed_optimizer_instances
    shard = config.dp // replicas
    cp = p.context_parallel_size
    tp = p.tensor_model_parallel_size
    return Layout(p.pipeline_model_parallel_size, replicas, shard, cp, tp, rank)
