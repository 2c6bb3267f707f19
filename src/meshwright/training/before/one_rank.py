"""Set up one rank of many in this process, without the other ranks and without its device.

`meshwright train --dry-run --rank R --world-size N` ends here. It runs a run's own code: the
layout's process groups, which torch fakes, and the network with its parameter store, on the meta
device. So the cost of a rank's set-up, and its errors, are known before N ranks start.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.checkpoint import loading
from meshwright.checkpoint.sources import Source, TensorBoxes
from meshwright.config.data_paths import prefixes
from meshwright.config.fields import with_settings
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TrainConfig
from meshwright.parallel.layout import DIMENSIONS, Layout, connect, layout_of
from meshwright.training.forecast import find_forecast
from meshwright.training.network import Spec, build_network
from meshwright.training.state.resume import open_options

PLACES = dict(zip(DIMENSIONS, ("pipeline", "replica", "data", "context", "tensor"), strict=True))
NAMED = 4  # ranks or files that a line names


def describe_rank(config: TrainConfig, vocab: int, padded: int) -> list[str]:
    """Return lines about a rank: its place, its groups, its parameters, files and memory."""
    rank, world = config.parallel.rank, config.world
    assert rank is not None
    if rank >= world:
        raise SettingsError(
            f"{{rank={rank}}} does not fit {{world_size={world}}}; ranks count from 0 to {world - 1}"
        )
    # The time and memory that this takes are what a rank's set-up will take on its host.
    before, began = peak_memory(), time.perf_counter()
    # The fake backend makes groups of any size in one process, and sends nothing.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        layout = connect(layout_of(config, rank))
        groups = {
            name: dist.get_process_group_ranks(group) for name, group in layout.groups.items()
        }
        parameters = list[int]()
        spec = Spec(without_device(config), layout, torch.device("meta"), vocab, padded)
        net = build_network(spec, parameters.append)
        named = net.store.named_state()
    finally:
        dist.destroy_process_group()
    seconds = time.perf_counter() - began
    mebibytes = (peak_memory() - before) / 2**20
    took = f"{seconds:.1f} s and {mebibytes:.0f} MiB of host memory"
    return [
        f"rank {rank} of {world}: {describe_place(layout)}",
        *(f"  group {name}: {describe_ranks(ranks)}" for name, ranks in groups.items()),
        f"  parameters: {sum(parameters):,}",
        *(f"  reads {line}" for line in describe_files(config, named)),
        *describe_planned(config, padded, layout),
        f"  set up without its device in {took}",
    ]


def without_device(config: TrainConfig) -> TrainConfig:
    """Return the settings without what only a device can do: fp8, pinned and symmetric memory."""
    maps_none = {"tp_overlap": "off", "data_parallel_sums": "collectives"}
    return with_settings(
        config, cpu_optimizer=False, remote_device="none", fp8_format=None, **maps_none
    )


def describe_planned(config: TrainConfig, padded: int, layout: Layout) -> list[str]:
    """Return a line about the rank's memory, if the plan is installed."""
    forecast = find_forecast()
    if forecast is None:
        return []
    kinds = forecast.memory_of_rank(config, padded, layout.at("pp"))
    sizes = [f"{kind} {size / 2**30:,.2f} GiB" for kind, size in kinds.items() if size]
    return [f"  memory, estimated by the plan: {', '.join(sizes)}"]


def describe_place(layout: Layout) -> str:
    places = []
    for name, size in zip(DIMENSIONS, layout.shape, strict=True):
        if size > 1:
            places.append(f"{PLACES[name]} {layout.at(name)} of {size}")
    return ", ".join(places)


def describe_ranks(ranks: list[int]) -> str:
    """Return the ranks of a group in words; of many, the first ones and the last."""
    if len(ranks) <= NAMED:
        return f"ranks {', '.join(map(str, ranks))}"
    first = ", ".join(map(str, ranks[: NAMED - 1]))
    return f"{len(ranks)} ranks, {first} ... {ranks[-1]}"


def describe_files(config: TrainConfig, named: TensorBoxes) -> Iterator[str]:
    """Yield the files that a rank with these tensors reads: of tokens, and of a checkpoint."""
    for prefix in prefixes(config.data):
        yield f"{prefix}.idx and, through a map, {prefix}.bin"
    if not config.checkpoint.load:
        return
    source = loading.open_checkpoint(config.checkpoint.load, open_options(config))
    if source is None:
        return  # the run would begin anew
    wanted = sorted(files_of(source, named))
    listed = ", ".join(wanted[:NAMED])
    if len(wanted) > NAMED:
        listed += f" and {len(wanted) - NAMED} more"
    yield f"{len(wanted)} of the checkpoint's files, {listed}"


def files_of(source: Source, named: TensorBoxes) -> set[str]:
    """Return the files of a checkpoint that hold a part of these tensors' boxes."""
    files: set[str] = set()
    for name, (_, boxes, _) in named.items():
        if name not in source.tensors:
            continue
        for file, stored in source.parts(name):
            if file not in files and any(meet(stored.offset, stored.size, *box) for box in boxes):
                files.add(file)
    return files


def meet(
    a: tuple[int, ...], a_size: tuple[int, ...], b: tuple[int, ...], b_size: tuple[int, ...]
) -> bool:
    """Return whether two boxes have an element in common."""
    return all(x < y + n and y < x + m for x, m, y, n in zip(a, a_size, b, b_size, strict=True))


def peak_memory() -> int:
    """Return the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
