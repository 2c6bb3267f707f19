"""Which layers of a stage are measured, and what all of its layers allocate.

Layers that are alike allocate alike. So of each run of them only a few are measured, and what the
one in their middle does is repeated for those that were left out: each piece of memory that it
allocates is allocated by every copy, and freed as many layers before or after as in the
measurement.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.apps.plan.measure.account import Section, StepRecord
from meshwright.apps.plan.measure.allocator import MemoryEvent
from meshwright.config.schema import TrainConfig

LONGEST_PERIOD = 8  # layers after which a pattern of them may repeat
# How many layers later a gradient or gathered weights may be freed. Memory that lives longer is
# freed at one place, whatever layer it is of.
NEAR = 2


@dataclass(frozen=True)
class Unit:
    """Layers that are measured, and how many such groups of layers they stand for."""

    layers: tuple[int, ...]  # their numbers in the model
    copies: int = 1
    kind: object = None  # all by which layers may differ


def choose_units(config: TrainConfig, stage: range, least: int) -> list[Unit]:
    """Return the layers of a stage that are measured: of those alike, `least` in a row."""
    groups = recomputed_groups(config, stage)
    kinds = [kind_of_group(config, group, again) for group, again in groups]
    units = list[Unit]()
    at = 0
    while at < len(groups):
        # Layers may alternate, for example windows and full attention, so a unit is a period.
        period, count = longest_repeat(kinds[at:])
        if count <= least:
            units.append(Unit(tuple(groups[at][0]), 1, kinds[at]))
            at += 1
            continue
        # The one in the middle stands for those that are not measured.
        for number in range(least):
            begin = at + number * period
            chosen = slice(begin, begin + period)
            layers = [i for group, _ in groups[chosen] for i in group]
            copies = count - least + 1 if number == least // 2 else 1
            units.append(Unit(tuple(layers), copies, tuple(kinds[chosen])))
        at += count * period
    return units


def recomputed_groups(config: TrainConfig, stage: range) -> list[tuple[range, bool]]:
    """Return groups of layers and whether each is recomputed as one, as GPT.stretches does."""
    t = config.training
    size = t.recompute_num_layers
    is_full = t.recompute_granularity == "full"
    if is_full and t.recompute_method != "block":
        return [(stage[i : i + size], True) for i in range(0, len(stage), size)]

    # Layers by themselves, of which recomputation by block takes the first ones.
    again = 0
    if is_full:
        again = size
    return [(stage[i : i + 1], i < again) for i in range(len(stage))]


def kind_of_group(config: TrainConfig, group: range, again: bool) -> tuple[object, ...]:
    """Return all by which a layer may differ from another."""
    m = config.model
    precision = config.precision
    windowed = set(m.windowed_layers)
    kinds: list[object] = [again]
    for i in group:
        kinds.append((i in windowed, precision.multiplies_fp8(i, m.num_layers or 0)))
    return tuple(kinds)


def longest_repeat(kinds: Sequence[object]) -> tuple[int, int]:
    """Return the period and number of the repetitions at the begin that cover the most."""
    best = (1, 1)
    covered = 1
    # The shortest period wins among those that cover as much.
    for period in range(1, min(LONGEST_PERIOD, len(kinds)) + 1):
        count = 1
        while kinds[count * period : (count + 1) * period] == kinds[:period]:
            count += 1
        if count > 1 and count * period > covered:
            best = (period, count)
            covered = count * period
    return best


class Span(NamedTuple):
    """The part of a step in which a unit runs, or what lies between units."""

    step: int
    section: Section  # its layer is the number of a unit


class LayerPlace(NamedTuple):
    """Where an event is in the extended steps; places are in the order of time."""

    span: int  # number of the span
    run: int  # which run of the span's unit, in the order in which its copies run
    at: int  # number of the event in the measurement


class Placed(NamedTuple):
    """An event of the extended steps."""

    span: Span
    event: MemoryEvent


def extend(record: StepRecord, units: Sequence[Sequence[Unit]]) -> list[Placed]:
    """Return all events after the set-up with all layers of the stages; `units`: of each chunk."""
    return Extension(record, units).run()


class Extension:
    """The measurement of some units, into which their copies are placed."""

    def __init__(self, record: StepRecord, units: Sequence[Sequence[Unit]]) -> None:
        self.events = record.events
        self.units = units
        self.firsts = [first_copies(chunk) for chunk in units]
        unit_of: list[list[int]] = []  # by chunk and measured layer
        for chunk in units:
            numbers: list[int] = []
            for number, unit in enumerate(chunk):
                numbers += [number] * len(unit.layers)
            unit_of.append(numbers)

        # Marks of the layers of one unit that follow each other become one span.
        self.spans, self.begins = list[Span](), list[int]()
        step = 0
        for begin, section in record.marks:
            if section.phase == "begin":
                step += 1
            if section.layer is not None:
                section = section._replace(layer=unit_of[section.chunk][section.layer])
            span = Span(step, section)
            if not self.spans or self.spans[-1] != span:
                self.spans.append(span)
                self.begins.append(begin)
        # In which order the copies of each span's unit run, and to which span each event belongs.
        self.numbers = {span: number for number, span in enumerate(self.spans)}
        self.forward = [self.runs_forward(number) for number in range(len(self.spans))]
        self.span_of = list[int]()  # by event
        ends = [*self.begins[1:], len(self.events)]
        for number, (begin, end) in enumerate(zip(self.begins, ends, strict=True)):
            self.span_of += [number] * (end - begin)

    def run(self) -> list[Placed]:
        # The key of memory is the number of the event that allocates it.
        freed: dict[int, int] = {}
        for at, event in enumerate(self.events):
            if event.key != at:
                freed[event.key] = at

        # Each copy of a unit allocates memory of its own, and some copy frees it.
        timed = list[tuple[LayerPlace, MemoryEvent]]()
        keys = itertools.count()
        for at, event in enumerate(self.events):
            span = self.span_of[at]
            if event.key != at or self.spans[span].step == 0:  # freed, or allocated by the set-up
                continue
            for copy in range(self.copies(span)):
                begin = LayerPlace(span, self.run_of(span, copy), at)
                key = next(keys)
                timed.append((begin, event._replace(key=key)))
                if at in freed:
                    end = max(begin, self.place_of_end(span, copy, freed[at]))
                    timed.append((end, event._replace(key=key, size=-event.size)))
        # Into the order of time: by span, by run of its unit, by event.
        timed.sort(key=lambda each: each[0])
        return [Placed(self.spans[place.span], event) for place, event in timed]

    def copies(self, span: int) -> int:
        """Return how often a span runs in the whole stage."""
        _, section = self.spans[span]
        return 1 if section.layer is None else self.units[section.chunk][section.layer].copies

    def runs_forward(self, span: int) -> bool:
        """Return whether the first copy of a span's unit runs first."""
        before = self.neighbour(span, -1)
        after = self.neighbour(span, 1)
        return (before is not None and before < span) or (after is not None and after > span)

    def neighbour(self, span: int, step: int) -> int | None:
        """Return the same part of the step of another unit of the chunk."""
        number, section = self.spans[span]
        if section.layer is None:
            return None
        return self.numbers.get(Span(number, section._replace(layer=section.layer + step)))

    def run_of(self, span: int, copy: int) -> int:
        # Backward passes come to the last copy first.
        return copy if self.forward[span] else self.copies(span) - 1 - copy

    def place_of_end(self, span: int, copy: int, at: int) -> LayerPlace:
        """Return where the memory that a copy of a span's unit allocates is freed."""
        there = self.span_of[at]
        begin = self.spans[span].section
        end = self.spans[there].section
        # What nothing repeats is freed once, after the last copy.
        fixed = LayerPlace(there, self.copies(there) - 1, at)
        if begin.layer is None or end.layer is None or begin.chunk != end.chunk:
            return fixed
        distance = end.layer - begin.layer
        if abs(distance) > NEAR:
            return fixed
        # The layer at the same distance from this copy.
        firsts = self.firsts[begin.chunk]
        number = firsts[begin.layer] + copy + distance
        unit = bisect.bisect_right(firsts, number) - 1
        other = self.neighbour(there, unit - end.layer)
        if other is None:
            return fixed
        run = self.run_of(other, number - firsts[unit])
        return LayerPlace(other, run, self.begins[other] + at - self.begins[there])


def first_copies(units: Sequence[Unit]) -> list[int]:
    """Return the number of each unit's first copy among all units of the stage."""
    return list(itertools.accumulate((unit.copies for unit in units[:-1]), initial=0))
