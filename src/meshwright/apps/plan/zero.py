"""What ZeRO 2 and 3 hold of gradients and weights while a micro-batch passes."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

from meshwright.apps.plan.tensors import GATHERING, GRADIENTS, SUMMING, Memory, Sized
from meshwright.parallel import shard
from meshwright.parallel.shard import aligned
from meshwright.training.parameters import Shapes

REST = "rest"  # the unit outside of the layers
LAST = "lm_head.weight", "ln_f.weight", "ln_emb.weight", "wpe.weight", "wte.weight"  # of its parameters, from the end


class Buckets:
    """Gradients of ZeRO 2, as in parallel/flat.py: a unit's, in full until its sum has ended."""

    def __init__(self, memory: Memory, sizes: Counter[str], parts: int, width: int) -> None:
        """`sizes`: elements of each unit (`h.0`: of a layer) and of those of shard.LATE."""
        self.memory, self.sizes, self.parts, self.width = memory, sizes, parts, width
        self.filling: dict[str, Sized] = {}
        self.sums: dict[str, list[tuple[Sized, Sized]]] = {}  # by unit: the full gradients, and the rank's part of them
        self.pending: list[str] = []

    def begin(self, unit: str) -> None:
        """Allocate the gradients of a unit before its first one comes.

        With those of the first unit come those that are summed last.
        """
        self.begin_late()
        self.fill(unit)

    def begin_late(self, *_: object) -> None:
        """Allocate the gradients that are kept until the end of the step."""
        for unit in shard.LATE:
            self.fill(unit)

    def fill(self, unit: str) -> None:
        size = self.sizes["h.0" if unit.startswith("h.") else unit]
        if size and unit not in self.filling:
            self.filling[unit] = self.memory.new(aligned(size, self.parts), self.width, "gradients")

    def end(self, unit: str) -> None:
        """Start to sum a unit's gradients; two sums are in progress at most."""
        if unit in self.filling:
            full = self.filling.pop(unit)
            part = self.memory.new(full.elements // self.parts, self.width, "gradients")
            self.pending.append(unit)
            if len(self.pending) > 2:
                self.sums.pop(self.pending.pop(0), None)
            self.sums.setdefault(unit, []).append((full, part))


class Shards:
    """The units of one stage with ZeRO 3, as torch's fully_shard treats them.

    A unit is a layer, or what a stage has outside of its layers, which comes last. Its weights are
    gathered into a buffer before they are used, and copied from there; gradients are copied into
    a buffer that is summed.
    """

    def __init__(self, memory: Memory, units: dict[str, Shapes], ranks: int, widths: tuple[int, int]) -> None:
        """`widths`: bytes of a gathered weight, and of a gradient that is summed."""
        self.memory, self.units, self.ranks, (self.low, self.full) = memory, units, ranks, widths
        self.following = dict(zip(units, list(units)[1:-1], strict=False))  # layers alone gather the next one
        self.own = {unit: sum(own_size(shape, ranks) for shape in shapes.values()) for unit, shapes in units.items()}
        self.gate = sum(
            math.prod(shape)
            for shape in next(iter(units.values())).values()
            if len(shape) > 2 and is_reordered(shape, ranks)
        )
        self.keeps_sums = True  # on the device
        self.keeps_last = True  # weights of the last layer and the rest, from forward to backward
        self.gathering: dict[str, Sized] = {}
        self.weights: dict[str, list[Sized]] = {}
        self.last: Sized | None = None  # a buffer that is kept until the next is copied from
        self.passed: list[str] = []  # units, in the order of forward passes
        self.places: dict[str, list[int]] = {unit: [] for unit in units}  # of each unit there
        self.backward: set[str] = set()  # units whose backward pass has begun
        self.gradients: dict[str, dict[str, list[Sized]]] = {}
        self.summed: Sized | None = None
        self.kept: dict[str, Sized] | None = None  # the rank's part of the sums

    def gather(self, unit: str) -> None:
        """Start to gather a unit's weights."""
        if unit not in self.weights and unit not in self.gathering:
            new = functools.partial(self.memory.new, width=self.low, kind="weights", stream=GATHERING)
            cast = new(self.own[unit]) if self.low != self.full else None
            self.gathering[unit] = new(self.own[unit] * self.ranks)
            del cast

    def copy_out(self, unit: str) -> Sized | None:
        """Copy a unit's weights from their buffer, which is returned."""
        if unit not in self.gathering:
            return None
        new, shapes = self.memory.new, self.units[unit].values()
        self.weights[unit] = [new(own_size(shape, self.ranks) * self.ranks, self.low, "weights") for shape in shapes]
        ordered = [new(math.prod(x), self.low, "weights") for x in shapes if is_reordered(x, self.ranks)]
        del ordered
        return self.gathering.pop(unit)

    def enter(self, unit: str) -> None:
        """Gather a unit's weights before it runs forward, and start with the next layer's."""
        self.gather(unit)
        if unit in self.gathering:
            self.last = self.copy_out(unit)
        if unit not in self.backward and unit in self.following:
            self.gather(self.following[unit])

    def leave(self, unit: str) -> None:
        """Free a unit's weights after it has run forward, unless its backward pass is next."""
        if not self.backward:
            if not self.keeps_last or unit in self.following:
                self.weights.pop(unit)
            if self.units[unit]:  # fully_shard notes none without parameters
                self.places[unit].append(len(self.passed))
                self.passed.append(unit)
        if self.backward or unit == REST:
            self.last = None

    def begin(self, unit: str) -> None:
        """Gather a unit's weights for its backward pass, and start with those needed next."""
        if unit in self.backward:
            return
        self.backward.add(unit)
        self.gather(unit)
        self.copy_out(unit)
        if self.places[unit] and (place := self.places[unit].pop()):
            self.gather(self.passed[place - 1])

    def keep(self, name: str, elements: int) -> None:
        """Keep a gradient of a layer or a table; a table's second one is added to the first."""
        unit = name if name in self.units else REST
        gradients = self.gradients.setdefault(unit, {})
        if not gradients:
            vectors = [math.prod(shape) for name, shape in self.units[unit].items() if shard.is_vector(name)]
            gradients["vectors"] = [self.memory.new(size, self.low, "gradients") for size in vectors]
        new = [self.memory.new(elements, self.low, "gradients")]
        if name not in gradients:  # of a layer, the last parameter's comes first
            gradients[name] = new
        elif unit != REST:
            kind = "gate" if elements == self.gate and "gate" not in gradients else "others"
            gradients.setdefault(kind, []).extend(new)
        else:
            gradients[name] = [self.memory.new(elements, self.low, "gradients")]  # autograd's sum of both

    def end(self, unit: str) -> None:
        """Sum a unit's gradients; the buffer of the last sum is kept until then."""
        self.weights.pop(unit, None)
        self.summed = None
        if gradients := self.gradients.pop(unit, None):
            # Variables of torch's still refer to the last gradient, and to one put in order.
            held = gradients.get(self.named_last(unit)), gradients.pop("gate", [])
            gradients["ordered"] = [self.memory.new(x.elements, x.width, "gradients") for x in held[1]]
            summed = self.memory.new(self.own[unit] * self.ranks, self.full, "gradients")
            gradients.clear()
            part = self.memory.new(self.own[unit], self.full, "gradients", SUMMING)
            self.summed = summed
            del held
            if self.kept is not None:
                self.kept.setdefault(unit, part)

    def named_last(self, unit: str) -> str:
        """Return as what the gradient of a unit's last parameter is kept."""
        names = self.units[unit]
        if unit != REST:
            return "vectors" if "mlp.proj.bias" in names else unit
        last = next(name for name in LAST if name in names)
        return "vectors" if last.startswith("ln") else last.removesuffix(".weight")

    def finish(self) -> None:
        """End a micro-batch's backward pass."""
        self.end(REST)
        self.summed = self.last = None
        self.passed.clear()
        for places in self.places.values():
            places.clear()
        self.backward.clear()
        self.gathering.clear()


def is_reordered(shape: tuple[int, ...], ranks: int) -> bool:
    """Whether a rank's rows do not lie one behind the other."""
    return shard.rows(shape, ranks)[0] > 0


def own_size(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of the first rank's rows."""
    dimension, _, count = shard.rows(shape, ranks)
    return count * math.prod(shape) // shape[dimension]


def begin_step(memory: Memory, shards: Sequence[Shards]) -> None:
    """Free the last step's sums of all stages of a rank, which count as held throughout."""
    for each in shards:
        each.kept = {} if each.keeps_sums else None
    memory.note(GRADIENTS, -sums_of(shards), "gradients")


def end_step(memory: Memory, shards: Sequence[Shards]) -> None:
    for each in shards:
        each.kept = None
    memory.note(GRADIENTS, sums_of(shards), "gradients")


def sums_of(shards: Sequence[Shards]) -> int:
    """Return the bytes of the summed gradients that a rank keeps on the device."""
    return sum(each.full * sum(each.own.values()) for each in shards if each.keeps_sums)
