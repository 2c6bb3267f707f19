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
            start, flat = 0, tensor.detach().view(-1)
            whole = [Box(tuple(offset), tuple(size)) for offset, size in boxes]
            for offset, size in (piece for box in whole for piece in pieces(box)):
                target = flat[start : start + math.prod(size)]
                start += target.numel()
                read = torch.empty(target.numel(), dtype=getattr(torch, self.tensors[name].dtype))
                total = torch.zeros(target.numel(), dtype=torch.float64)
                for source in self.inner:
                    try:
                        source.fill({name: (shape, [(offset, size)], read)})
                    # else an older step would be read in place of the newest
                    except DamagedCheckpoint as damage:
                        raise SettingsError(
                            f"a step of {{average_last}} is damaged: {damage}; name an older one",
                            BAD_DATA,
                        ) from damage
                    total += read
                target.copy_(total / len(self.inner))


def stored_name(name: str) -> str:
    """Return the name under which a checkpoint has a weight's average."""
    return f"{name}/{AVERAGE}"


def pieces(box: Box) -> Iterator[tuple[Shape, Shape]]:
    """Cut a box into smaller ones that follow each other in the order of its elements."""
    d = next((d for d, n in enumerate(box.size) if n > 1), None)
    if d is None or math.prod(box.size) <= PIECE:
        yield box
        return
    middle = box.size[d] // 2
    for begin, end in ((0, middle), (middle, box.size[d])):
        offset = box.offset[:d] + (box.offset[d] + begin,) + box.offset[d + 1 :]
        yield from pieces(Box(offset, box.size[:d] + (end - begin,) + box.size[d + 1 :]))


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
    numbers: list[int] = team.run_on_lead(
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
    for other in opened[1:]:
        shapes = [
            {n: info.shape for n, info in each.tensors.items() if "/" not in n}
            for each in (source, other)
        ]
        if shapes[0] != shapes[1]:
            raise SettingsError(
                f"{source.folder} and {other.folder.name} hold different networks; give {{average_last=0}}",
                BAD_DATA,
            )
    return MeanOf(**as_weights(source), inner=opened)


def as_weights(source: NativeSource) -> dict[str, Any]:
    """Return the fields of a source without a run's state, which belongs to other weights."""
    common = {f.name: getattr(source, f.name) for f in dataclasses.fields(Source)}
    positions, network = source.state.get("positions"), source.state.get("network", GPT_NETWORK)
    known = {"max_position_embeddings": positions} if positions else {}
    return common | {
        "config": source.config | known,
        "state": {} if network == GPT_NETWORK else {"network": network},
    }
