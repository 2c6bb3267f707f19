"""What the update allocates beside its state, as optim/muon.py and elementwise.py do."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator

from meshwright.apps.plan.tensors import Memory, Sized
from meshwright.config.schema import Optimizer, TrainConfig
from meshwright.model.counts import layer_shapes
from meshwright.optim.rule_table import (
    CHUNK,
    GRAM,
    MUON_CHUNK,
    MUON_RESTART,
    STATE,
    MatrixForm,
    Rule,
    Treatment,
    assign,
    form_of,
    is_beyond_torch,
    is_rounded,
    packed,
    treatment_of,
)
from meshwright.parallel import shard
from meshwright.parallel.shard import aligned
from meshwright.training.parameters import Shapes, bucket_of, data_parts, flat_size, shapes_of_rank


def update_events(config: TrainConfig, padded: int, pipeline_rank: int) -> Memory:
    """Return the memory after an update, with all that it has allocated and freed."""
    memory, o, p = Memory(), config.optimizer, config.parallel
    memory.kind = "optimizer"
    units = [] if p.offloads else shapes_of_rank(config, padded, pipeline_rank)
    data = config.dp * p.context_parallel_size // p.num_distributed_optimizer_instances
    layer, layers = units[0] if units else ({}, 0)
    for treatment, shapes in own_parts(config, layer).items():  # each has an optimizer
        if treatment.rule == "muon" and data * p.tensor_model_parallel_size > 1:
            HomeUpdate(memory, config, shapes, data).run(layers)
        elif treatment.rule == "muon":
            update_own(memory, config, shapes, layers)
    rule = elementwise_rule(config)
    if rule is not None:
        update_elementwise(memory, rule, largest_part(config, units, rule), o)
    return memory


def elementwise_rule(config: TrainConfig) -> Rule | None:
    """Return the rule of optim/elementwise.py by which parameters are updated, if any."""
    o = config.optimizer
    if o.optimizer == "lion":
        return "lion"
    if o.optimizer == "sgd":
        return "sgd" if is_rounded(o) else None
    return "adamw" if is_beyond_torch(o) and is_cut_by_parameter(config) else None  # elsewhere a kernel updates


def is_cut_by_parameter(config: TrainConfig) -> bool:
    """Whether ranks share each parameter, not flat buffers."""
    return config.parallel.zero_stage == 3 and data_parts(config) > 1


def own_parts(config: TrainConfig, unit: Shapes) -> dict[Treatment, Shapes]:
    """Return the parts of a unit's parameters that the first data rank updates, in their order."""
    o, parts, kinds = config.optimizer, data_parts(config), dict[Treatment, Shapes]()
    for name, shape in unit.items():
        kinds.setdefault(treatment_of(o, config.model, name, len(shape)), {})[name] = shape
    own_bucket = {name: shape for name, shape in unit.items() if bucket_of(config, name) not in shard.LATE}
    left = flat_size(own_bucket, parts) // parts  # of the rank's share
    for _, shapes in sorted(kinds.items(), reverse=True):
        for name, shape in shapes.items():
            if is_cut_by_parameter(config):
                dimension, _, rows = shard.rows(shape, parts)
                shapes[name] = (*shape[:dimension], rows, *shape[dimension + 1 :])
            elif name in own_bucket:  # the first rank's share of the others, all layers' together, has all of this
                size = min(aligned(math.prod(shape)), left)
                shapes[name] = shape if size >= math.prod(shape) else (size,)
                left -= size
    return kinds


def largest_part(config: TrainConfig, units: list[tuple[Shapes, int]], rule: Rule) -> int:
    """Return the most elements that an elementwise rule updates at once, on the first data rank.

    They are those of a parameter if the state is rounded, else of all in a unit that are treated
    alike.
    """
    out, is_cut = 0, is_cut_by_parameter(config)
    for unit, _ in units:
        for treatment, shapes in own_parts(config, unit).items():
            if treatment.rule == rule:
                sizes = [math.prod(shape) if is_cut else aligned(math.prod(shape)) for shape in shapes.values()]
                out = max(out, *(sizes if is_cut or is_rounded(config.optimizer) else [sum(sizes)]))
    return out


def update_own(memory: Memory, config: TrainConfig, shapes: Shapes, layers: int) -> None:
    """Update all matrices on a rank that shares none, those of a gate one by one."""
    steps, counts = config.optimizer.muon_num_ns_steps, Counter[MatrixForm]()
    for name, shape in shapes.items():
        counts[form_of(config.optimizer, config.model, name, shape[-2:])] += math.prod(shape[:-2]) * layers
    for form, number in counts.items():
        rows, columns = form.shape
        size = rows * columns
        each = max(1, MUON_CHUNK // size)
        for count in {min(each, number), number % each} - {0}:
            ahead = memory.new(count * size, 2)
            if form.sections:
                x = orthogonalise_all(memory, form, count, steps)
                del ahead, x
                continue
            x = memory.new(count * size, 2)
            del ahead
            x = orthogonalised(memory, x, count, rows, columns, steps)
            del x


class HomeUpdate:
    """Muon's update where ranks share matrices, on the first of them: parallel/homes.py."""

    def __init__(self, memory: Memory, config: TrainConfig, shapes: Shapes, data: int) -> None:
        """Take the rank's parts of a layer's matrices, and the number of its data ranks."""
        p, self.steps, self.memory = config.parallel, config.optimizer.muon_num_ns_steps, memory
        self.tensor, self.is_sharded = p.tensor_model_parallel_size, p.zero_stage > 0 and data > 1
        self.ranks, self.parts = data * self.tensor, (data if self.is_sharded else 1) * self.tensor
        full = layer_shapes(config.model)
        self.forms = [form_of(config.optimizer, config.model, name, full[name.removeprefix("h.0.")]) for name in shapes]
        self.sizes = [math.prod(form.shape) for form in self.forms]
        self.shapes = list(shapes.values())

    def new(self, elements: int) -> Sized:
        return self.memory.new(elements, 2)

    def run(self, layers: int) -> None:
        """Update the parameters, with the lifetimes of `Muon._update_at_homes`."""
        self.forms *= layers
        self.sizes *= layers
        self.shapes *= layers
        own, loads = [math.prod(shape) for shape in self.shapes], [0.0] * self.ranks
        updates, x = list[Sized](), None
        for members in packed(range(len(self.forms)), self.sizes, MUON_CHUNK * self.ranks):
            homes = assign({i: self.forms[i].cost(self.steps) for i in members}, loads)
            mine = [i for i in members if homes[i] == 0]
            stacks = self.collect(members, homes, mine)
            updates.clear()
            updates = self.orthogonalise(stacks, mine)
            copies = self.ranks // self.parts  # of each part, for the ranks that hold it
            out = None
            for piece in packed(members, self.sizes, MUON_CHUNK * self.parts):
                out = self.new(copies * sum(self.sizes[i] for i in piece if homes[i] == 0))
                values = self.new(sum(own[i] for i in piece))
                returned = sorted(piece, key=homes.__getitem__)
                for count, shape in self.chunks(returned, lambda i: (self.forms[i].scale, self.shapes[i])):
                    x = self.new(count * math.prod(shape))
            del out
        del updates, x, values

    def collect(self, members: list[int], homes: dict[int, int], mine: list[int]) -> list[tuple[MatrixForm, Sized]]:
        """Return the look-aheads of this home's parameters, by form."""
        nearest = [i for i in members if self.is_sharded or homes[i] < self.tensor]
        sent, ahead = self.new(sum(math.prod(self.shapes[i]) for i in nearest)), None
        for count, shape in self.chunks(members, self.shapes.__getitem__):
            ahead = self.new(count * math.prod(shape))
        if self.parts > 1:
            received = self.new(sum(self.sizes[i] for i in mine))
            sent = received
            del received
        kinds = Counter(self.forms[i] for i in mine)
        stacks = [(form, self.new(count * math.prod(form.shape))) for form, count in kinds.items()]
        del sent, ahead
        return stacks

    def chunks(self, numbers: Iterable[int], kind: Callable[[int], Hashable]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield how many parameters are stacked, and their shape: `optim.muon.chunks`."""
        counts: dict[Hashable, list[int]] = {}
        for i in numbers:
            if math.prod(self.shapes[i]):
                counts.setdefault(kind(i), []).append(i)
        for alike in counts.values():
            shape = self.shapes[alike[0]]
            each = max(1, MUON_CHUNK // math.prod(shape))
            yield from ((min(each, len(alike) - begin), shape) for begin in range(0, len(alike), each))

    def orthogonalise(self, stacks: list[tuple[MatrixForm, Sized]], mine: list[int]) -> list[Sized]:
        updates = []
        while stacks:
            form, ahead = stacks.pop(0)
            size, number = math.prod(form.shape), sum(self.forms[i] == form for i in mine)
            each = max(1, MUON_CHUNK // size)
            counts = [min(each, number - begin) for begin in range(0, number, each)]
            parts = [orthogonalise_all(self.memory, form, count, self.steps) for count in counts]
            updates.append(parts[0] if len(parts) == 1 else self.new(number * size))
            del ahead, parts
        return updates


def orthogonalise_all(memory: Memory, form: MatrixForm, count: int, steps: int) -> Sized:
    """Orthogonalise the matrices of `count` parameters, kind by kind."""
    new = functools.partial(memory.new, width=2)
    is_copied = bool(form.sections) and not form.by_group and form.matrices[0][1] > form.sections[0]
    kinds = [(n * count, rows, columns) for n, rows, columns in form.matrices]
    sections, out = [new(math.prod(kind)) for kind in kinds if is_copied], []
    for kind in kinds:
        x = new(math.prod(kind))
        x = orthogonalised(memory, x, *kind, steps)
        if form.sections and max(kind[1:]) != max(form.shape[-2:]):
            x = new(x.elements)
        out.append(x)
    sections.clear()
    return new(count * math.prod(form.shape)) if form.sections else out[0]


def orthogonalised(memory: Memory, x: Sized, n: int, rows: int, columns: int, steps: int) -> Sized:
    """Return n matrices x of one shape after the iterations."""
    m, k = sorted((rows, columns))
    new = functools.partial(memory.new, n * m * k, 2)
    first = x
    if 2 * k >= GRAM * m:
        for begin in range(0, steps, MUON_RESTART):
            q = polynomial_of_gram(memory, n * m * m, min(MUON_RESTART, steps - begin))
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


def update_elementwise(memory: Memory, rule: Rule, size: int, o: Optimizer) -> None:
    """Update a chunk of a parameter."""
    size = min(size, CHUNK)
    new = functools.partial(memory.new, size, 4)
    now = new()
    old = [expanded(memory, size, key, o) for key in STATE[rule] if is_rounded(o)]
    if rule == "adamw":
        weight, moved = update_adamw(memory, size, o.cautious_weight_decay)
    elif rule == "lion":
        weight, moved = update_lion(memory, size, o.cautious_weight_decay)
    else:
        ahead, product = new(), new()
        del product
        step = new()
        weight, moved = new(), [ahead]
        del ahead, step
    chosen = new()
    del now, old, weight, moved, chosen


def expanded(memory: Memory, size: int, key: str, o: Optimizer) -> Sized:
    """Return a moment of fewer bits in float32."""
    parts = []
    if o.optimizer_state_dtype == "float8":
        parts = [memory.new(size, 4) for _ in range(3 if key == "exp_avg_sq" else 4)]  # a sign takes one
        parts.append(memory.new(size, 1))
    out = memory.new(size, 4)
    del parts
    return out


def update_adamw(memory: Memory, size: int, is_cautious: bool) -> tuple[Sized, list[Sized]]:
    """Return the new weight and moments."""
    new = functools.partial(memory.new, size, 4)
    m, v = new(), new()
    root = new()
    update = new()
    del root
    decayed = new()
    if is_cautious:
        product = new()
        is_decayed = memory.new(size, 1)
        del product
        decayed = new()
        del is_decayed
    weight = new()
    del decayed, update
    return weight, [m, v]


def update_lion(memory: Memory, size: int, is_cautious: bool) -> tuple[Sized, list[Sized]]:
    """Return the new weight and moment."""
    new = functools.partial(memory.new, size, 4)
    parts = new(), new()
    ahead = new()
    del parts
    kept = new() if is_cautious else None
    decayed, step = new(), new()
    weight = new()
    del ahead, kept, decayed, step
    parts = new(), new()
    moment = new()
    del parts
    return weight, [moment]
