"""ZeRO 0 to 2, and replicas of a sharded store, equal one process with every rank's samples."""

import contextlib
import dataclasses
import faulthandler
import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from helpers import TINY
from meshwright.config.schema import Optimizer
from meshwright.model.gpt import GPT, initialise
from meshwright.optim.rules import StepScalars
from meshwright.parallel.layout import Layout, connect
from meshwright.parallel.shard import ALIGN
from meshwright.parallel.store import StoreSpec
from on_ranks import run_ranks
from stores import CPU, GATED, VOCAB, gradient, is_equal, kinds, losses_of, make, snapshot, tokens

pytestmark = pytest.mark.whole  # seconds, not moments

SHARDS, COPIES = {"shard": 2}, {"replicas": 2, "shard": 2}
STEPS = 3
HALF = torch.float16  # which Triton's interpreter rounds as a GPU does


# Parameters that a micro-batch's loss does not depend on: the first and the last of a layer that
# the backward pass reaches, some of a part, a full part, a full layer.
SOME = {"h.0.mlp.proj.weight", "h.0.mlp.proj.bias", "h.0.ln_1.bias", "ln_f.weight", "wpe.weight"}
PARTS = ("ln_1", "ln_2", "attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")
LAYER = {f"h.1.{part}.{name}" for part in PARTS for name in ("weight", "bias")}
UNUSED = {
    "none": lambda step, k, micro: set(),
    "in the last": lambda step, k, micro: SOME | LAYER if k == micro - 1 else set(),
    "in turn": lambda step, k, micro: {
        n for i, n in enumerate(sorted(SOME)) if i % 3 == (k + step) % 3
    },
}


def on_ranks(body, sizes, *args):
    run_ranks(guarded, math.prod(sizes.values()), body, sizes, *args)


def guarded(body, sizes, *args):
    """Print the stack of a rank that hangs, and end the test."""
    faulthandler.dump_traceback_later(240, exit=True)
    body(connect(Layout(**sizes, rank=dist.get_rank())), *args)
    faulthandler.cancel_dump_traceback_later()


def work(step, layout, micro, unused="none"):
    """Return each data rank's micro-batches: (batch, parameters it leaves out)."""

    def micro_batch(r, k):
        return (tokens() + 5 * (micro * (step * layout.dp + r) + k)) % VOCAB, UNUSED[unused](
            step, k, micro
        )

    return [[micro_batch(r, k) for k in range(micro)] for r in range(layout.dp)]


def one_step(model, store, mine, lr=1e-2):
    """Take a step; return the norm, and the sums over ranks of losses and of micro-batches."""
    store.clear_gradients()
    total = 0.0
    for i, (batch, unused) in enumerate(mine):
        store.begin_backward(i == len(mine) - 1)
        left_out = [p for n, p in model.named_parameters() if n in unused]
        for p in left_out:
            p.requires_grad_(False)
        total += losses_of(model, [batch])
        for p in left_out:
            p.requires_grad_(True)
    sums = torch.tensor([total, len(mine)], dtype=torch.float64)
    return store.step(StepScalars(lr, 0.1, 1.0), sums), sums


def assembled(parts):
    """Assemble the ranks' parts, which must agree; return tensors and copies of each element."""
    values, counts = {}, {}
    for part in parts:
        for name, (shape, boxes, tensor) in part.items():
            value = values.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
            count = counts.setdefault(name, torch.zeros(shape, dtype=torch.int))
            assert value.shape == shape and value.dtype == tensor.dtype
            numbers = (
                tensor.flatten().split([math.prod(size) for _, size in boxes])
                if boxes
                else [tensor]
            )
            assert boxes or tensor.numel() == 0
            for (offsets, size), x in zip(boxes, numbers, strict=False):
                box = tuple(slice(o, o + n) for o, n in zip(offsets, size, strict=True))
                assert count[box].shape == size
                assert torch.equal(
                    torch.where(count[box] == 0, x.view(size), value[box]), x.view(size)
                ), name
                value[box] = x.view(size)
                count[box] += 1
    return values, counts


def all_ranks(layout, named):
    """Gather each rank's dictionary of tuples that end in a tensor."""
    parts = [None] * layout.world  # as arrays, which are pickled faster
    arrays = {
        name: (*more, x if x.dtype is torch.bfloat16 else x.numpy())
        for name, (*more, x) in named.items()
    }
    dist.all_gather_object(parts, arrays)
    return [
        {name: (*more, torch.as_tensor(x)) for name, (*more, x) in part.items()} for part in parts
    ]


def everything(store, with_optimizer=True):
    """Assemble all ranks' state; check that one rank saves each element and all copies hold it."""
    held, saved = store.named_state(with_optimizer), store.named_state(with_optimizer, to_save=True)
    for name, (shape, boxes, x) in saved.items():
        assert (shape, boxes) == held[name][:2] and torch.equal(x, held[name][2])
    parts = all_ranks(
        store.layout, {name: (*held[name][:2], name in saved, held[name][2]) for name in held}
    )
    values, counts = assembled(
        [{n: (s, b, x) for n, (s, b, _, x) in part.items()} for part in parts]
    )
    assert all((c == store.layout.world // store.shard_count).all() for c in counts.values())
    once, counts = assembled(
        [{n: (s, b, x) for n, (s, b, mine, x) in part.items() if mine} for part in parts]
    )
    assert is_equal(once, values) and all((c == 1).all() for c in counts.values())
    return values


def summed(store):
    """Assemble the summed gradients from the ranks' parts."""
    mine = {}
    for bucket in store.buckets.values():
        for name, (_, shape) in bucket.spans.items():
            to, low, high = store.local_range(name)
            mine[name] = (shape, low, store.share[to : to + high - low])
    out = {
        name: torch.full((shape.numel(),), math.nan, dtype=store.full_dtype)
        for name, (shape, _, _) in mine.items()
    }
    for part in all_ranks(store.layout, mine):
        for name, (_, low, x) in part.items():
            out[name][low : low + len(x)] = x
    return {name: x.view(mine[name][0]) for name, x in out.items()}


def check_published(model, store, values):
    """Check that every rank's weights equal all ranks' masters in the weights' format."""
    store._wait_for(store.buckets)
    for name, p in model.named_parameters():
        want = values[name].to(p.dtype)
        assert torch.equal(p.detach()[: len(want)], want) and not p[len(want) :].any(), name


def close(a, b, bound):
    """Check the largest difference, relative to the largest element."""
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() <= bound * b[name].abs().max(), (
            name,
            a[name],
            b[name],
        )


RATES = {"embedding_lr": 0.02, "head_lr": 0.005, "vector_lr": 0.04}
LEVERS = Optimizer(lr=0.01, clip_grad=0.5, cautious_weight_decay=True, **RATES)


def check_exact(layout, micro, unused, rule, m, state):
    """Compare everything, also the average of --ema, in all float64 steps with one process.

    Codes of fewer bits are equal.
    """
    o = LEVERS if rule == "levers" else Optimizer(optimizer=rule, clip_grad=0.5)
    o = dataclasses.replace(o, ema=0.3, optimizer_state_dtype=state)
    one, alone = make(m, o, torch.float64)
    divided = [make(m, o, torch.float64, layout=layout, zero=stage) for stage in (0, 1, 2)]
    for stage, (_, store) in enumerate(divided):
        assert is_equal(everything(store), assembled([alone.named_state()])[0])
        part, updated = (
            store.size // (layout.shard if stage else 1),
            sum(p.master.numel() for p in store.update_ranges),
        )
        assert store.share.numel() == store.master.numel() == updated + gaps(store) == part
        assert store.gradients.numel() == (0 if stage == 2 and layout.shard > 1 else store.size)
    for step in range(STEPS):
        every = work(step, layout, micro, unused)
        want = one_step(one, alone, list(itertools.chain(*every)))
        for stage, (model, store) in enumerate(divided):
            got = one_step(model, store, every[layout.at("replicas", "shard")])
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
            torch.testing.assert_close(store.weight_norm(), alone.weight_norm(), rtol=1e-12, atol=0)
            assert store.steps == alone.steps
            if 0 < step < STEPS - 1:
                continue
            values = everything(store)
            close(values, assembled([alone.named_state()])[0], 1e-12)
            check_published(model, store, values)
            sums = summed(store)
            close(sums, {name: gradient(alone, name) for name in sums}, 1e-12)
            assert int(store.count_zero_gradients()) == zeros_of(sums), (step, stage)


def zeros_of(sums):
    """Count zeros, without the rows beyond the vocabulary."""
    true = (g[:VOCAB] if n in ("wte.weight", "lm_head.weight") else g for n, g in sums.items())
    return sum(int((g == 0).sum()) for g in true)


def gaps(store):
    """Count the padding elements at the end of buckets in this rank's part."""
    parts = [(*store.own_part(b), b.kinds[-1][2]) for b in store.buckets.values()]
    return sum(max(0, min(size, first + size - end)) for first, _, size, end in parts)


@pytest.mark.parametrize(
    ("sizes", "micro", "unused", "rule", "m", "state"),
    [
        (COPIES, 2, "in turn", "levers", GATED, "float32"),
        (SHARDS, 2, "in the last", "muon", TINY, "float8"),
    ],
)
def test_every_number_equals_one_process(sizes, micro, unused, rule, m, state):
    on_ranks(check_exact, sizes, micro, unused, rule, m, state)


def check_kernels_copies(layout):
    from meshwright.base import device as devices

    m = dataclasses.replace(TINY, num_layers=1)  # the interpreter is slow
    for zero in (0, 1, 2):
        with mock.patch.object(devices, "has_kernels", lambda device: True):
            model, store = make(m, Optimizer(optimizer="muon"), HALF, layout=layout, zero=zero)
        first = everything(store)
        store.clear_gradients()
        for batch, _ in work(0, layout, 1)[layout.at("replicas", "shard")]:
            losses_of(model, [batch])
        with mock.patch.object(devices, "has_kernels", lambda device: True):
            store.step(StepScalars(0.01, 0.1))
        values = everything(store)
        assert all(not torch.equal(values[name], first[name]) for name in store.shapes)
        check_published(model, store, values)


def test_kernels_write_the_copies_of_a_rank_s_part():
    """AdamW's and Muon's kernels, in Triton's interpreter, where a rank updates some elements."""
    pytest.importorskip("triton", reason="Triton is not installed")
    on_ranks(check_kernels_copies, SHARDS)


def check_even_shards(layout):
    from meshwright.parallel.fsdp import FullyShardedStore

    m = dataclasses.replace(GATED, num_layers=8)
    with torch.device("meta"):
        model = GPT(m, VOCAB, 64, 16)
    spec = StoreSpec(Optimizer(), torch.float32, torch.device("cpu"), VOCAB, layout=layout, zero=3)
    store = FullyShardedStore([model], spec)
    here = sum(p.master.numel() for p in store.update_ranges)
    assert here * layout.shard == sum(shape.numel() for shape in store.shapes.values()), (
        layout.rank,
        here,
    )


def test_zero_3_shards_evenly():
    """This includes a gate's weight [2, F, H], which torch would give to two ranks only."""
    on_ranks(check_even_shards, {"shard": 4})


# far below half a step of 16 bits for most weights; rounding of float32
RATE, UNIT = 1e-6, 2.0**-24
LOW = torch.bfloat16


def make_fully_sharded(m, o, dtype, layout, zero, offload):
    from meshwright.parallel.fsdp import FullyShardedStore

    with torch.device("meta"):
        model = GPT(m, VOCAB, 64, 16)
    store = FullyShardedStore([model], StoreSpec(o, dtype, CPU, VOCAB, offload, layout, zero))
    store.initialise(lambda masters: initialise(masters, m, VOCAB, 1))
    return model, store


def small_step(model, store, batches):
    """Take a step at RATE; return the masters after it, of all ranks."""
    store.clear_gradients()
    losses_of(model, batches)
    store.step(StepScalars(RATE, 0.1, 1.0))
    named = store.named_state(False)
    return assembled(all_ranks(store.layout, named) if store.layout.world > 1 else [named])[0]


def allowed_updates(alone, parts, masters, unit):
    """Return how far an update may be from that of one process, element by element.

    Ranks add the gradients of the same micro-batches in another order, and each addition rounds by
    `unit`. If a gradient g changes by d, Adam's first step lr g / (|g| + eps) changes by at most
    4 lr d / (|g| + eps). The decay and the step round the master once each, in both runs.
    """
    out = {}
    for name, master in masters.items():
        rows = slice(0, len(master))  # without padding
        each = torch.stack([part[name][rows].double() for part in parts])
        apart = (len(parts) - 1) * unit * each.abs().sum(0)
        size = each.sum(0).abs() + alone.optimizer.adam_eps
        out[name] = 4 * RATE * apart / size + 4 * UNIT * (master.abs() + RATE)
    return out


def check_masters(layout):
    """Updates far below half a step of 16 bits reach the masters of every store."""
    m, o = GATED, Optimizer(clip_grad=0.0)
    batches = [batch for ((batch, _),) in work(0, layout, 1)]
    one, alone = make(m, o, LOW)
    parts = []
    for batch in batches:
        alone.clear_gradients()
        losses_of(one, [batch])
        parts.append({name: gradient(alone, name).clone() for name in alone.shapes})
    before = assembled([alone.named_state(False)])[0]
    wanted = small_step(one, alone, batches)
    has_gradient = {
        n: torch.stack([p[n][: len(x)] for p in parts]).abs().amin(0) > 0 for n, x in before.items()
    }
    weights = torch.cat([before[n][has_gradient[n]] for n in before])
    assert len(weights) > 5000
    assert (0.5 * torch.finfo(LOW).eps * weights.abs() > RATE).float().mean() > 0.8
    for zero, offload in ((0, False), (1, True), (2, False), (3, False)):
        make_it = make_fully_sharded if zero == 3 else make
        model, store = make_it(m, o, LOW, layout=layout, zero=zero, offload=offload)
        masters = small_step(model, store, [batches[layout.at("replicas", "shard")]])
        # torch's fully_shard takes gradients of micro-batches in 16 bits, others in float32.
        unit = torch.finfo(LOW).eps if zero == 3 else UNIT
        allowed = allowed_updates(alone, parts, before, unit)
        for name, start in before.items():
            got, want = (x[name].double() - start for x in (masters, wanted))
            moved, master = has_gradient[name], masters[name]
            assert ((got - want).abs() <= allowed[name]).all(), (zero, name)
            assert (got != 0)[moved].float().mean() > 0.95, (zero, name)
            assert (master != master.to(LOW))[moved].float().mean() > 0.95, (zero, name)


def test_masters_keep_what_16_bits_lose():
    on_ranks(check_masters, {"shard": 3})


@contextlib.contextmanager
def spoilt(model, store, micro):
    """Make a number of a gradient infinite in one of two micro-batches."""
    main_grad = model.get_parameter("h.1.mlp.fc.weight").main_grad

    def spoil(*parts):
        if store.is_last_backward == bool(micro):
            main_grad.begin()[0].view(-1)[-1] = math.inf
        type(main_grad).end(main_grad, *parts)

    main_grad.end = spoil
    yield
    del main_grad.end


def check_non_finite(layout):
    """A gradient or a loss on the last rank that is not finite leaves no trace on any rank."""
    is_last = layout.rank == layout.world - 1
    first, second = (work(step, layout, 2)[layout.at("replicas", "shard")] for step in range(2))
    for stage in (0, 1, 2):
        model, store = make(GATED, dtype=torch.float64, layout=layout, zero=stage)
        other, undisturbed = make(GATED, dtype=torch.float64, layout=layout, zero=stage)
        for m, s in ((model, store), (other, undisturbed)):
            assert one_step(m, s, first)[0].isfinite()
        for micro in (0, 1, None):
            is_gradient = micro is not None
            spoiling = is_last and is_gradient
            store.clear_gradients()
            with spoilt(model, store, micro) if spoiling else contextlib.nullcontext():
                for i, (batch, _) in enumerate(second):
                    store.begin_backward(i == 1)
                    losses_of(model, [batch])
            sums = torch.tensor([1.0 if is_gradient or not is_last else math.nan, 2.0])
            norm = store.step(StepScalars(1e-2, 0.1, 1.0), sums)
            assert norm.isfinite() == (not is_gradient), (stage, micro)
            assert sums[0].isfinite() == is_gradient and sums[1] == 2 * layout.world
            assert is_equal(snapshot(store), snapshot(undisturbed)), (stage, micro)
        for m, s in ((model, store), (other, undisturbed)):
            one_step(m, s, second)
        assert is_equal(everything(store), everything(undisturbed))


@pytest.mark.fault("F20")
def test_a_non_finite_number_on_one_rank_stops_all():
    on_ranks(check_non_finite, SHARDS)


def check_memory(layout):
    """Parts are multiples of ALIGN; ZeRO 2 keeps no full gradients, and few sums pending."""
    for stage in (0, 1, 2):
        model, store = make(GATED, dtype=torch.bfloat16, layout=layout, zero=stage)
        assert store.shard_count == (layout.shard if stage else 1) and store.keeps_gradients == (
            stage < 2
        )
        for bucket in store.buckets.values():
            assert (
                bucket.size % (ALIGN * store.shard_count) == 0
                and bucket.begin % (ALIGN * store.shard_count) == 0
            )
            assert all(offset % ALIGN == 0 for offset, _ in bucket.spans.values())
        assert kinds(store) == kinds(make(GATED)[1])
        most = []

        def count_pending(grad, store=store, most=most):
            most.append(
                sum(b.gradients is not None or bool(b.sums) for b in store.buckets.values())
            )

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(count_pending)
        one_step(model, store, work(0, layout, 3)[layout.at("replicas", "shard")])
        if stage == 2:
            assert 1 <= max(most) <= 3 < len(store.buckets) and store.gradients.numel() == 0
            assert not any(b.gradients is not None or b.sums for b in store.buckets.values())
        assert all(p.grad is None for p in model.parameters())


def test_memory_layout():
    on_ranks(check_memory, SHARDS)


class Lazy:
    """A collective that starts when it is waited for."""

    def __init__(self, begin):
        self.begin = begin

    def wait(self):
        begin, self.begin = self.begin, None
        if begin is not None:
            begin()


def lazy(collective):
    def begin(*args, async_op=False, **more):
        return Lazy(lambda: collective(*args, **more)) if async_op else collective(*args, **more)

    return begin


def check_pending(layout):
    """Nothing is read or overwritten before the pending collective has been waited for."""
    mine = [work(step, layout, 2)[layout.at("replicas", "shard")] for step in range(2)]
    for stage in (0, 1, 2):
        outcomes = []
        for names in ([], ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]):
            model, store = make(TINY, Optimizer(clip_grad=0.0), LOW, layout=layout, zero=stage)
            with pytest.MonkeyPatch.context() as patch:
                for name in names:
                    patch.setattr(dist, name, lazy(getattr(dist, name)))
                steps = [
                    torch.cat([n[None], sums])
                    for n, sums in (one_step(model, store, x) for x in mine)
                ]
                values = everything(store)
                check_published(model, store, values)
            outcomes.append(values | {"steps": torch.stack(steps)})
        assert is_equal(*outcomes), stage


def test_pending_collectives_are_awaited():
    on_ranks(check_pending, COPIES)


def check_uneven(layout):
    """The last rank's losses leave out parameters that the others' use (refused with ZeRO 2)."""
    o = Optimizer(clip_grad=0.5)
    for stage in (0, 1):
        one, alone = make(TINY, o, torch.float64)
        model, store = make(TINY, o, torch.float64, layout=layout, zero=stage)
        for step in range(2):
            every = work(step, layout, 1)
            every[-1][0] = (every[-1][0][0], SOME | LAYER if step % 2 else SOME)
            one_step(one, alone, list(itertools.chain(*every)))
            one_step(model, store, every[layout.at("replicas", "shard")])
            close(everything(store), assembled([alone.named_state()])[0], 1e-12)


def test_parameters_unused_on_one_rank():
    on_ranks(check_uneven, SHARDS)
