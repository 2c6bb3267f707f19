"""What the update allocates beside its state, as optim/muon.py, lion.py and cautious.py do."""

from __future__ import annotations

import functools
import math

from meshwright.optim.rule_table import GRAM, LION_CHUNK, MUON_CHUNK, MUON_STAGE, STATE_CHUNK, is_rounded, treatment_of
from meshwright.plan.parameters import data_parts, flat_size, shapes_of_rank
from meshwright.plan.tensors import Memory, Sized
from meshwright.settings.schema import TrainConfig


def update_events(config: TrainConfig, padded: int, pipeline_rank: int) -> Memory:
    """Return the memory after an update, with all that it has allocated and freed."""
    memory, o, p = Memory(), config.optimizer, config.parallel
    memory.kind = "optimizer"
    units = [] if p.offloads else shapes_of_rank(config, padded, pipeline_rank)
    if o.optimizer == "muon":
        counts: dict[tuple[int, int], int] = {}
        for unit, times in units:
            for name, shape in unit.items():
                if treatment_of(o, config.model, name, len(shape)).rule == "muon":
                    matrix = (shape[-2], shape[-1])
                    counts[matrix] = counts.get(matrix, 0) + math.prod(shape[:-2]) * times
        for (rows, columns), number in counts.items():
            each = max(1, MUON_CHUNK // (rows * columns))
            for size in {min(each, number), number % each} - {0}:
                update_muon(memory, size, rows, columns, o.muon_num_ns_steps)
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


def update_muon(memory: Memory, n: int, rows: int, columns: int, steps: int) -> None:
    """Update n matrices of one shape."""
    m, k = sorted((rows, columns))
    new = functools.partial(memory.new, n * m * k, 2)
    ahead = new()
    x = new()
    del ahead
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
    del first, x


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
