"""Averaged weights in the place of a step's own: those of --ema, and the mean of several steps.

Both are sources of weights alone, which everything that reads a checkpoint can read: commands that
use a model, conversions, and runs that begin anew from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.base.errors import BAD_DATA, bad_data
from meshwright.checkpoint import steps
from meshwright.checkpoint.boxes import Box, Shape
from meshwright.checkpoint.manifests import DamagedCheckpoint
from meshwright.checkpoint.native import Described, NativeSource
from meshwright.checkpoint.saved_model import GPT_NETWORK
from meshwright.checkpoint.sources import Source, TensorBoxes, TensorInfo
from meshwright.checkpoint.steps import NATIVE, StepLocation
from meshwright.config.problem import SettingsError
from meshwright.optim.rule_table import AVERAGE
from meshwright.runtime.ranks.team import Team

PIECE = 1 << 22  # elements that are averaged at a time


@dataclass
class WeightsOf(Source):
    """Weights made from those of opened steps; without a state, so a run begins anew from them."""

    inner: list[NativeSource] = field(kw_only=True)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: info for name, info in self.inner[0].tensors.items() if "/" not in name}

    @property
    def identity(self) -> str:
        return "\n".join(source.identity for source in self.inner)

    def parts(self, name: str) -> list[tuple[str, Box]]:
        return self.inner[0].parts(name)

    def share(self, wanted: Described, team: Team) -> None:
        """Let each step keep what this rank needs of it."""
        for source in self.inner:
            source.share(wanted, team)


@dataclass
class MovingAverageOf(WeightsOf):
    """The average that --ema kept, under the names of the weights."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name.partition("/")[0]: info
            for name, info in self.inner[0].tensors.items()
            if is_average(name)
        }

    def parts(self, name: str) -> list[tuple[str, Box]]:
        return self.inner[0].parts(stored_name(name))

    def share(self, wanted: Described, team: Team) -> None:
        kinds = {stored_name(name): kind for name, kind in wanted.kinds.items()}
        boxes = [
            [(list(map(stored_name, names)), own) for names, own in rows] for rows in wanted.boxes
        ]
        self.inner[0].share(Described(kinds, boxes), team)

    def fill(self, want: TensorBoxes) -> None:
        self.inner[0].fill({stored_name(name): boxed for name, boxed in want.items()})


@dataclass
class MeanOf(WeightsOf):
    """The mean of the weights of several steps, added up in float64 a piece at a time."""

    def fill(self, want: TensorBoxes) -> None:
        import torch

        for name, (shape, boxes, tensor) in want.items():
            dtype = getattr(torch, self.tensors[name].dtype)
            flat = tensor.detach().view(-1)
            start = 0
            # The boxes follow each other in the tensor, and so do the pieces of each.
            whole = [Box(tuple(offset), tuple(size)) for offset, size in boxes]
            for offset, size in (piece for box in whole for piece in pieces(box)):
                target = flat[start : start + math.prod(size)]
                start += target.numel()
                read = torch.empty(target.numel(), dtype=dtype)
                total = torch.zeros(target.numel(), dtype=torch.float64)
                for source in self.inner:
                    self.read_piece(source, {name: (shape, [(offset, size)], read)})
                    total += read
                target.copy_(total / len(self.inner))

    def read_piece(self, source: NativeSource, want: TensorBoxes) -> None:
        try:
            source.fill(want)
        except DamagedCheckpoint as damage:
            # This error is passed on: at damage, an older step would be read for the newest.
            raise SettingsError(
                f"a step of {{average_last}} is damaged: {damage}; name an older one",
                BAD_DATA,
            ) from damage


def stored_name(name: str) -> str:
    """Return the name under which a checkpoint has a weight's average."""
    return f"{name}/{AVERAGE}"


def pieces(box: Box) -> Iterator[tuple[Shape, Shape]]:
    """Cut a box into smaller ones that follow each other in the order of its elements."""
    if math.prod(box.size) <= PIECE:
        yield box
        return
    # Along the first dimension that can be cut: only then do all elements of the first half come
    # before those of the second.
    d = next(d for d, n in enumerate(box.size) if n > 1)
    length = box.size[d]
    middle = length // 2
    for begin, end in ((0, middle), (middle, length)):
        offset = list(box.offset)
        size = list(box.size)
        offset[d] += begin
        size[d] = end - begin
        yield from pieces(Box(tuple(offset), tuple(size)))


def is_average(name: str) -> bool:
    """Return whether a tensor of a checkpoint is the average of a weight."""
    return name.endswith(f"/{AVERAGE}")


def has_average(source: Source) -> bool:
    """Return whether a checkpoint holds an average of --ema."""
    return any(map(is_average, source.tensors))


# Opening


Open = Callable[[StepLocation], NativeSource]


def moving_average_of(source: Source) -> Source:
    """Return the average that --ema kept in a step."""
    if not isinstance(source, NativeSource) or not has_average(source):
        raise SettingsError(
            f"{source.folder} holds no average of {{ema}}; leave {{weights=ema}} out", BAD_DATA
        )
    return MovingAverageOf(**as_weights(source), inner=[source])


def mean_of(
    source: Source, location: StepLocation, number: int, reopen: Open, team: Team
) -> Source:
    """Return the mean of a step and the ones before it, `number` in all; `reopen` opens these."""
    if not isinstance(source, NativeSource):
        raise SettingsError(
            f"{source.folder}: {{average_last}} reads our own steps, not {source.kind}'s; leave it out",
            BAD_DATA,
        )
    # The steps before it, of which there must be enough.
    numbers: list[int] = team.run_on_rank_0(
        lambda: [n for n in steps.list_steps(location.root) if n < location.step]
    )
    if len(numbers) < number - 1:
        has = f"{location.root} has {len(numbers) + 1} up to step {location.step:,}"
        raise SettingsError(
            f"{{average_last={number}}} reads the newest {number} saved steps, and {has}; give a smaller one",
            BAD_DATA,
        )
    opened = [source]
    for step in numbers[: number - 1]:
        folder = steps.step_folder(location.root, step)
        try:
            opened.append(reopen(StepLocation(NATIVE, folder, step, location.root)))
        except DamagedCheckpoint as damage:
            why = f"--average-last {number} reads {folder.name} too, which is damaged: {damage}"
            raise bad_data(f"{why}; name another step, or give a smaller number") from damage

    # A folder may hold steps of another run, which was continued with other settings.
    for other in opened[1:]:
        if shapes_of(source) != shapes_of(other):
            raise SettingsError(
                f"{source.folder} and {other.folder.name} hold different networks; give {{average_last=0}}",
                BAD_DATA,
            )
    return MeanOf(**as_weights(source), inner=opened)


def shapes_of(source: NativeSource) -> dict[str, Shape]:
    """Return the shapes of the weights alone."""
    return {name: info.shape for name, info in source.tensors.items() if "/" not in name}


def as_weights(source: NativeSource) -> dict[str, Any]:
    """Return the fields of a source without a run's state, which belongs to other weights."""
    common = {f.name: getattr(source, f.name) for f in dataclasses.fields(Source)}
    # What the state says of the network itself is kept.
    positions = source.state.get("positions")
    network = source.state.get("network", GPT_NETWORK)
    known = {"max_position_embeddings": positions} if positions else {}
    return common | {
        "config": source.config | known,
        "state": {} if network == GPT_NETWORK else {"network": network},
    }
