"""What the update allocates beside its state, as optim/muon.py, lion.py and cautious.py do."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable

from meshwright.model.counts import layer_shapes
from meshwright.optim.rule_table import (
    GRAM,
    LION_CHUNK,
    MUON_CHUNK,
    MUON_STAGE,
    STATE_CHUNK,
    MatrixForm,
    assign,
    form_of,
    is_rounded,
    packed,
    treatment_of,
)
from meshwright.parallel.shard import aligned
from meshwright.plan.parameters import Shapes, data_parts, flat_size, shapes_of_layer, shapes_of_rank
from meshwright.plan.tensors import Memory, Sized
from meshwright.settings.schema import TrainConfig


def update_events(config: TrainConfig, padded: int, pipeline_rank: int) -> Memory:
    """Return the memory after an update, with all that it has allocated and freed."""
    memory, o, p = Memory(), config.optimizer, config.parallel
    memory.kind = "optimizer"
    units = [] if p.offloads else shapes_of_rank(config, padded, pipeline_rank)
    if o.optimizer == "muon":
        data = config.dp * p.context_parallel_size // p.num_distributed_optimizer_instances
        layer, layers = units[0] if units else ({}, 0)
        local = {n: shape for n, shape in layer.items() if treatment_of(o, config.model, n, len(shape)).rule == "muon"}
        if data * p.tensor_model_parallel_size > 1:
            HomeUpdate(memory, config, local, data).run(layers)
        else:
            update_own(memory, config, local, layers)
    elif o.optimizer == "lion":
        largest = max((flat_size(unit, 1) for unit, _ in units), default=0) // data_parts(config)
        update_lion(memory, min(largest, LION_CHUNK), o.cautious_weight_decay, is_rounded(o))
    elif is_rounded(o) and (o.optimizer == "sgd" or p.zero_stage == 3):
        shapes = [shape for unit, _ in units for shape in unit.values()]
        largest = max(map(math.prod, shapes), default=0) // data_parts(config)
        update_rounded(memory, min(largest, STATE_CHUNK), 1 if o.optimizer == "sgd" else 2)
    is_plain = p.zero_stage == 3 and data_parts(config) > 1 and not is_rounded(o)  # elsewhere a kernel updates
    if o.cautious_weight_decay and is_plain:
        named = ((name, shape) for unit, _ in units for name, shape in unit.items())
        sizes = [math.prod(s) for name, s in named if treatment_of(o, config.model, name, len(s)).rule == "adamw"]
        update_cautious(memory, min(max(sizes, default=0) // data_parts(config), LION_CHUNK))
    return memory


def update_own(memory: Memory, config: TrainConfig, shapes: Shapes, layers: int) -> None:
    """Update all matrices on a rank that shares none."""
    counts: dict[tuple[int, int], int] = {}
    for shape in shapes.values():
        matrix = (shape[-2], shape[-1])
        counts[matrix] = counts.get(matrix, 0) + math.prod(shape[:-2]) * layers
    for (rows, columns), number in counts.items():
        each = max(1, MUON_CHUNK // (rows * columns))
        for size in {min(each, number), number % each} - {0}:
            ahead = memory.new(size * rows * columns, 2)
            x = memory.new(size * rows * columns, 2)
            del ahead
            x = orthogonalised(memory, x, size, rows, columns, config.optimizer.muon_num_ns_steps)
            del x


class HomeUpdate:
    """Muon's update where ranks share matrices, on the first of them: parallel/homes.py."""

    def __init__(self, memory: Memory, config: TrainConfig, shapes: Shapes, data: int) -> None:
        """Take a tensor rank's part of a layer's matrices, and the number of its data ranks."""
        p, self.steps, self.memory = config.parallel, config.optimizer.muon_num_ns_steps, memory
        self.tensor, self.is_sharded = p.tensor_model_parallel_size, p.zero_stage > 0 and data > 1
        self.ranks, self.parts = data * self.tensor, (data if self.is_sharded else 1) * self.tensor
        full = layer_shapes(config.model)
        self.forms = [form_of(config.optimizer, config.model, name, full[name.removeprefix("h.0.")]) for name in shapes]
        # ZeRO 1 and 2 cut a bucket, which begins with the matrices; ZeRO 3 cuts each of them.
        sizes = [math.prod(shape) for shape in shapes.values()]
        share = flat_size(shapes_of_layer(config.model, self.tensor), data) // data
        begins = itertools.accumulate(map(aligned, sizes), initial=0)
        self.own = [min(size, max(0, share - begin)) for size, begin in zip(sizes, begins, strict=False)]
        if p.zero_stage == 3:
            self.own = [size // data for size in sizes]
        elif not self.is_sharded:
            self.own = sizes

    def new(self, elements: int) -> Sized:
        return self.memory.new(elements, 2)

    def run(self, layers: int) -> None:
        forms, own = self.forms * layers, self.own * layers
        sizes, loads = [math.prod(form.shape) for form in forms], [0.0] * self.ranks
        for members in packed(range(len(forms)), sizes, MUON_CHUNK * self.ranks):
            costs = {i: forms[i].cost(self.steps) for i in members}
            homes = assign(costs, loads)
            mine = [i for i, home in homes.items() if home == 0]
            nearest = [i for i, home in homes.items() if self.is_sharded or home < self.tensor]
            updates = self.orthogonalise(self.collect(nearest, mine, own, sizes, forms), mine, forms)
            copies = self.ranks // self.parts  # of each part, for the ranks that hold it
            for piece in packed(costs, sizes, MUON_CHUNK * self.parts):
                out = self.new(copies * sum(sizes[i] for i in piece if homes[i] == 0))
                values = self.new(sum(own[i] for i in piece))
                self.stack_all(piece, own)
                del out, values
            del updates

    def collect(
        self, sends: list[int], mine: list[int], own: list[int], sizes: list[int], forms: list[MatrixForm]
    ) -> list[tuple[MatrixForm, Sized]]:
        """Return the look-aheads of this home's parameters, by form."""
        sent = self.new(sum(own[i] for i in sends))
        self.stack_all(sends, own)
        if self.parts > 1:
            received = self.new(sum(sizes[i] for i in mine))
            sent = received
            del received
        kinds = dict.fromkeys(forms[i] for i in mine)
        stacks = [(form, self.new(sum(sizes[i] for i in mine if forms[i] == form))) for form in kinds]
        del sent
        return stacks

    def stack_all(self, numbers: Iterable[int], own: list[int]) -> None:
        """Stack parts of one size at a time, and let go of those before."""
        x = None
        for size, count in Counter(own[i] for i in numbers if own[i]).items():
            each = max(1, MUON_CHUNK // size)
            for begin in range(0, count, each):
                x = self.new(size * min(each, count - begin))
        del x

    def orthogonalise(
        self, stacks: list[tuple[MatrixForm, Sized]], mine: list[int], forms: list[MatrixForm]
    ) -> list[Sized]:
        updates = []
        while stacks:
            form, ahead = stacks.pop(0)
            size, number = math.prod(form.shape), sum(forms[i] == form for i in mine)
            each = max(1, MUON_CHUNK // size)
            parts = []
            for count in [min(each, number - begin) for begin in range(0, number, each)]:
                parts.append(self.orthogonalise_all(form, count))
            updates.append(parts[0] if len(parts) == 1 else self.new(number * size))
            del ahead, parts
        return updates

    def orthogonalise_all(self, form: MatrixForm, count: int) -> Sized:
        """Orthogonalise the matrices of `count` parameters, kind by kind."""
        out = []
        for number, rows, columns in form.matrices:
            section = self.new(count * number * rows * columns) if form.sections else None
            x = self.new(count * number * rows * columns)
            x = orthogonalised(self.memory, x, count * number, rows, columns, self.steps)
            if form.sections and max(rows, columns) != max(form.shape[-2:]):
                x = self.new(x.elements)
            out.append(x)
            del section, x
        return self.new(count * math.prod(form.shape)) if form.sections else out[0]


def orthogonalised(memory: Memory, x: Sized, n: int, rows: int, columns: int, steps: int) -> Sized:
    """Return n matrices x of one shape after the iterations."""
    m, k = sorted((rows, columns))
    new = functools.partial(memory.new, n * m * k, 2)
    first = x
    if 2 * k >= GRAM * m:
        for begin in range(0, steps, MUON_STAGE):
            q = polynomial_of_gram(memory, n * m * m, min(MUON_STAGE, steps - begin))
            x = new()
            del q
    else:
        for _ in range(steps):
            r = memory.new(n * m * m, 2)
            q = memory.new(n * m * m, 2)
            x = new()
            del r, q
    del first
    return x


def polynomial_of_gram(memory: Memory, size: int, steps: int) -> Sized:
    new = functools.partial(memory.new, size, 2)
    r, q = new(), None
    for step in range(steps):
        p = new()
        q = p if q is None else new()
        if step + 1 < steps:
            once = new()
            r = new()
            del once
        del p
    del r
    assert q is not None
    return q


def update_rounded(memory: Memory, size: int, moments: int) -> None:
    """Update a chunk of the parameters, whose state has fewer bits."""
    new = functools.partial(memory.new, size, 4)
    now = new()
    old, moved = [new() for _ in range(moments)], [new() for _ in range(moments)]
    decayed, root = new(), new()
    ratio = new()
    del root
    step = new()
    del ratio
    weight = new()
    del step, decayed
    chosen = new()
    del now, old, moved, weight, chosen


def update_lion(memory: Memory, size: int, is_cautious: bool = False, is_rounded: bool = False) -> None:
    """Update a chunk of the parameters."""
    new = functools.partial(memory.new, size, 4)
    now = new()
    moment = new() if is_rounded else None
    parts = new(), new()
    ahead = new()
    del parts
    kept = new() if is_cautious else None
    decayed, step = new(), new()
    weight = new()
    del decayed, step
    chosen = new()
    del now, ahead, kept, weight, chosen, moment


def update_cautious(memory: Memory, size: int) -> None:
    """Update a chunk of the parameters by AdamW with a cautious decay."""
    new = functools.partial(memory.new, size, 4)
    now = new()
    mean, square = new(), new()
    del now
    root = new()
    update = new()
    del root
    product = new()
    is_decayed = memory.new(size, 1)
    del product
    decayed = new()
    decay = new()
    del is_decayed, decayed
    weight = new()
    del decay
    chosen = new()
    del mean, square, update, weight, chosen
