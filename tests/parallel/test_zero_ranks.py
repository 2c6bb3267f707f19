"""ZeRO 0 to 2, and replicas of a sharded store, equal one process with every rank's samples."""

import dataclasses
import faulthandler
import itertools
import math

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

LAYOUTS = [{"shard": 2}, {"shard": 4}, {"replicas": 2, "shard": 2}, {"replicas": 2}]
STEPS = 3


def sampled(names, *axes, quick):
    """Parametrize by all combinations; `make test` runs those whose indices are in `quick`."""
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        label = "-".join(
            "x".join(f"{k}{n}" for k, n in v.items()) if isinstance(v, dict) else str(v)
            for v in values
        )
        marks = [] if places in quick else [pytest.mark.long]
        cases.append(pytest.param(*values, id=label.replace("torch.", ""), marks=marks))
    return pytest.mark.parametrize(names, cases)


# Parameters that a micro-batch's loss does not depend on: the first and the last of a layer that
# the backward pass reaches, some of a part, a full part, a full layer.
SOME = {"h.0.mlp.proj.weight", "h.0.mlp.proj.bias", "h.0.ln_1.bias", "ln_f.weight", "wpe.weight"}
PARTS = ("ln_1", "ln_2", "attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")
LAYER = {f"h.1.{part}.{name}" for part in PARTS for name in ("weight", "bias")}
UNUSED = {
    "none": lambda step, k, micro: set(),
    "on odd steps": lambda step, k, micro: SOME if step % 2 else set(),
    "in the first": lambda step, k, micro: SOME | LAYER if k == 0 else set(),
    "in the last": lambda step, k, micro: SOME | LAYER if k == micro - 1 else set(),
    "in all but one": lambda step, k, micro: SOME if k != step % micro else set(),
    "ever": lambda step, k, micro: SOME | LAYER,
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


def check_exact(layout, micro, unused, rule, m, state="float32"):
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


@sampled(("sizes", "micro"), LAYOUTS, [1, 3], quick=[(0, 0), (1, 1), (2, 1), (3, 0)])
def test_float64_equals_one_process(sizes, micro):
    on_ranks(check_exact, sizes, micro, "none", "adam", GATED)


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


@sampled(
    ("sizes", "unused"),
    [LAYOUTS[0], LAYOUTS[2]],
    list(UNUSED)[1:],
    quick=[(0, 0), (0, 2), (0, 4), (1, 5)],
)
def test_parameters_unused_by_some_losses(sizes, unused):
    on_ranks(check_exact, sizes, 3, unused, "adam", TINY)


@sampled(
    ("sizes", "rule"),
    LAYOUTS,
    ["sgd", "muon", "lion", "levers"],
    quick=[(0, 0), (1, 1), (2, 2), (0, 3)],
)
def test_other_rules_equal_one_process(sizes, rule):
    on_ranks(check_exact, sizes, 2, "none", rule, GATED)


@sampled(
    ("sizes", "rule", "state"),
    LAYOUTS,
    ["adam", "muon", "lion"],
    ["bfloat16", "float8"],
    quick=[(0, 0, 1), (0, 1, 1), (2, 2, 0)],
)
def test_state_of_fewer_bits_equals_one_process(sizes, rule, state):
    on_ranks(check_exact, sizes, 2, "none", rule, GATED, state)


def check_low(layout, micro, dtype):
    """Compare bit for bit if sums have only one order (also with one process, for two terms)."""
    o = Optimizer(clip_grad=0.0)
    # A tied table is the sum of two terms for each micro-batch, which ranks add in another order.
    m = dataclasses.replace(TINY, untie_embeddings_and_output_weights=micro == 1)
    # two of four ranks hold only padding of the token table
    one, alone = make(m, o, dtype, padded=128)
    first = assembled([alone.named_state(False)])[0]
    divided = [make(m, o, dtype, padded=128, layout=layout, zero=stage) for stage in (0, 1, 2)]
    for step in range(STEPS):
        every = work(step, layout, micro)
        norm, wanted_sums = one_step(one, alone, list(itertools.chain(*every)), 1e-3)
        for model, store in divided:
            assert (
                store.share.dtype is store.master.dtype is torch.float32
                and store.weights.dtype is dtype
            )
            got, sums = one_step(model, store, every[layout.at("replicas", "shard")], 1e-3)
            assert got.item() == pytest.approx(norm.item(), rel=1e-2 if step else 1e-6)
            assert sums.tolist() == pytest.approx(wanted_sums.tolist(), rel=1e-2 if step else 1e-6)
            zeros = zeros_of(summed(store))
            assert int(store.count_zero_gradients()) == zeros
            if step == 0:  # keys' biases have rounding errors only
                assert zeros == pytest.approx(int(alone.count_zero_gradients()), abs=8)
    stages = [everything(store) for _, store in divided]
    for (model, store), values in zip(divided, stages, strict=True):
        check_published(model, store, values)
        assert store.weight_norm().item() == pytest.approx(alone.weight_norm().item(), rel=1e-4)
        assert store.steps == STEPS
    want = assembled([alone.named_state()])[0]
    if micro == 1:
        assert is_equal(stages[1], stages[2])
    if layout.world == 2:
        assert is_equal(stages[0], stages[1])
        # A CPU adds a table's gradient row by row into its total: float32 rounds otherwise alone.
        assert micro > 1 or dtype is torch.float32 or is_equal(stages[0], want)
    near = 1e-4 if micro == 1 and dtype is torch.float32 else 0.1
    for values in stages:
        assert values.keys() == want.keys()
        apart, moved = (
            sum((a[n] - b[n]).square().sum() for n in first).sqrt()
            for a, b in ((values, want), (want, first))
        )
        assert apart < near * moved, (apart, moved)


@sampled(
    ("sizes", "micro", "dtype"),
    LAYOUTS,
    [1, 3],
    [torch.bfloat16, torch.float32],
    quick=[(0, 0, 1), (2, 1, 0)],
)
def test_low_precision(sizes, micro, dtype):
    on_ranks(check_low, sizes, micro, dtype)


# far below half a step of 16 bits for most weights; rounding of float32
RATE, UNIT = 1e-6, 2.0**-24


def make_fully_sharded(m, o, dtype, layout, zero, offload):
    from meshwright.parallel.fsdp import FullyShardedStore

    with torch.device("meta"):
        model = GPT(m, VOCAB, 64, 16)
    store = FullyShardedStore([model], StoreSpec(o, dtype, CPU, VOCAB, offload, layout, zero))
    store.initialise(lambda masters: initialise(masters, m, VOCAB, 1))
    return model, store


def small_step(model, store, batches, scale):
    """Take a step at RATE; return the masters after it, of all ranks."""
    store.clear_gradients()
    losses_of(model, batches, scale)
    store.step(StepScalars(RATE, 0.1, scale))
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
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float16, 1024.0)):
        m, o = GATED, Optimizer(clip_grad=0.0)
        every = [[batch for ((batch, _),) in work(step, layout, 1)] for step in range(2)]
        one, alone = make(m, o, dtype)
        parts = []
        for batch in every[0]:
            alone.clear_gradients()
            losses_of(one, [batch], scale)
            parts.append({name: gradient(alone, name) / scale for name in alone.shapes})
        before = assembled([alone.named_state(False)])[0]
        wanted = [small_step(one, alone, batches, scale) for batches in every]
        has_gradient = {
            n: torch.stack([p[n][: len(x)] for p in parts]).abs().amin(0) > 0
            for n, x in before.items()
        }
        weights = torch.cat([before[n][has_gradient[n]] for n in before])
        assert (
            len(weights) > 5000
            and (0.5 * torch.finfo(dtype).eps * weights.abs() > RATE).float().mean() > 0.8
        )
        cases = [
            (zero, offload)
            for zero in (0, 1, 2, 3)
            for offload in (False, True)
            if zero < 3 or layout.shard > 1
        ]
        for zero, offload in cases:
            make_it = make_fully_sharded if zero == 3 else make
            model, store = make_it(m, o, dtype, layout=layout, zero=zero, offload=offload)
            steps = [
                small_step(model, store, [batches[layout.at("replicas", "shard")]], scale)
                for batches in every
            ]
            # torch's fully_shard takes gradients of micro-batches in 16 bits, others in float32.
            allowed = allowed_updates(
                alone, parts, before, torch.finfo(dtype).eps if zero == 3 else UNIT
            )
            for name, start in before.items():
                got, want = (x[0][name].double() - start for x in (steps, wanted))
                moved, master = has_gradient[name], steps[-1][name]
                assert ((got - want).abs() <= allowed[name]).all(), (dtype, zero, offload, name)
                assert (got != 0)[moved].float().mean() > 0.95, (dtype, zero, offload, name)
                assert (master != master.to(dtype))[moved].float().mean() > 0.95, (
                    dtype,
                    zero,
                    offload,
                    name,
                )
            apart, total = (
                sum((a[n].double() - b[n]).square().sum() for n in before).sqrt()
                for a, b in ((steps[-1], wanted[-1]), (wanted[-1], before))
            )
            assert apart < 0.05 * total, (dtype, zero, offload, apart, total)


@sampled(("sizes",), LAYOUTS, quick=[(1,)])
def test_masters_keep_what_16_bits_lose(sizes):
    on_ranks(check_masters, sizes)


def check_non_finite(layout, dtype):
    """A non-finite gradient or loss on the last rank only leaves no trace on any rank."""
    here = layout.rank == layout.world - 1
    bad = itertools.cycle([math.nan, math.inf, -math.inf])
    for stage in (0, 1, 2):
        model, store = make(GATED, dtype=dtype, layout=layout, zero=stage)
        other, undisturbed = make(GATED, dtype=dtype, layout=layout, zero=stage)
        mine = [work(step, layout, 2)[layout.at("replicas", "shard")] for step in range(STEPS)]
        for m, s in ((model, store), (other, undisturbed)):
            assert one_step(m, s, mine[0])[0].isfinite()
        store._wait_for(store.buckets)
        before, weights = snapshot(store), store.weights.clone()
        spots = [
            ("wte.weight", 0),
            ("h.1.mlp.fc.weight", -1),
            ("h.0.ln_1.bias", 3),
            ("ln_f.weight", -1),
            (None, 0),
        ]
        for name, at in spots:
            for micro in (0, 1):
                value, main_grad = (
                    next(bad),
                    getattr(model.get_parameter(name), "main_grad", None)
                    if here and name
                    else None,
                )

                def spoil(
                    *parts, store=store, at=at, value=value, main_grad=main_grad, micro=micro
                ):
                    if store.is_last_backward == bool(micro):
                        main_grad.begin()[0].view(-1)[at] = value
                    type(main_grad).end(main_grad, *parts)

                if main_grad is not None:
                    main_grad.end = spoil
                store.clear_gradients()
                for i, (batch, _) in enumerate(mine[1]):
                    store.begin_backward(i == 1)
                    losses_of(model, [batch])
                sums = torch.tensor([value if here and name is None else 1.0, 2.0])
                norm = store.step(StepScalars(1e-2, 0.1, 1.0), sums)
                assert norm.isfinite() == (name is None), (stage, name)
                assert sums[0].isfinite() == (name is not None) and sums[1] == 2 * layout.world
                store._wait_for(store.buckets)
                assert is_equal(before, snapshot(store)) and torch.equal(weights, store.weights), (
                    stage,
                    name,
                    value,
                )
                if main_grad is not None:
                    del main_grad.end
        for i in range(1, STEPS):
            got, want = one_step(model, store, mine[i]), one_step(other, undisturbed, mine[i])
            assert (
                torch.equal(got[0], want[0]) and got[0].isfinite() and torch.equal(got[1], want[1])
            )
            assert int(store.count_zero_gradients()) == int(undisturbed.count_zero_gradients())
        assert is_equal(snapshot(store), snapshot(undisturbed)) and is_equal(
            everything(store), everything(undisturbed)
        )


@sampled(
    ("sizes", "dtype"), LAYOUTS, [torch.float64, torch.float32, torch.bfloat16], quick=[(0, 0)]
)
@pytest.mark.fault("F20")
def test_a_non_finite_number_on_one_rank_stops_all(sizes, dtype):
    on_ranks(check_non_finite, sizes, dtype)


def check_offload(layout):
    for dtype, stage in itertools.product((torch.float32, torch.bfloat16), (0, 1, 2)):
        outcomes = []
        for offload in (False, True):
            model, store = make(
                GATED, Optimizer(clip_grad=0.5), dtype, layout=layout, zero=stage, offload=offload
            )
            results = [
                one_step(model, store, work(i, layout, 2)[layout.at("replicas", "shard")])
                for i in range(STEPS)
            ]
            check_published(model, store, everything(store))
            steps = {
                f"step {i}": torch.cat([norm[None], sums]) for i, (norm, sums) in enumerate(results)
            }
            outcomes.append(snapshot(store) | steps)
        assert is_equal(*outcomes), (dtype, stage)


@sampled(("sizes",), LAYOUTS, quick=[(0,)])
def test_offload_changes_nothing(sizes):
    on_ranks(check_offload, sizes)


def check_taken_over(layout):
    """Continue from the state of one process or another stage, loaded through `named_state`."""

    def hand_over(values, store):
        for name, (shape, boxes, tensor) in store.named_state().items():
            assert values[name].shape == shape
            at = 0
            for offsets, size in boxes:
                box = values[name][
                    tuple(slice(o, o + n) for o, n in zip(offsets, size, strict=True))
                ]
                tensor.view(-1)[at : at + box.numel()] = box.flatten()
                at += box.numel()
        store.publish_weights()

    o = Optimizer(clip_grad=0.5)
    one, alone = make(GATED, o, torch.float64)
    every = [work(step, layout, 2) for step in range(6)]
    for i in range(2):
        one_step(one, alone, list(itertools.chain(*every[i])))
    taken = []
    for stage in (0, 1, 2):
        model, store = make(GATED, o, torch.float64, seed=2 + stage, layout=layout, zero=stage)
        hand_over(assembled([alone.named_state()])[0], store)
        store.steps = alone.steps
        assert is_equal(everything(store), assembled([alone.named_state()])[0])
        taken.append((model, store))
    for i in range(2, 6):
        one_step(one, alone, list(itertools.chain(*every[i])))
        for model, store in taken:
            one_step(model, store, every[i][layout.at("replicas", "shard")])
            close(everything(store), assembled([alone.named_state()])[0], 1e-12)
        taken.append(taken.pop(0))
        hand_over(everything(taken[0][1]), taken[1][1])  # from stage to stage


@sampled(("sizes",), LAYOUTS, quick=[(0,)])
def test_a_state_is_taken_over(sizes):
    on_ranks(check_taken_over, sizes)


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


@sampled(("sizes",), LAYOUTS[:3], quick=[(1,), (2,)])
def test_memory_layout(sizes):
    on_ranks(check_memory, sizes)


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


def check_pending(layout, dtype):
    """Nothing is read or overwritten before the pending collective has been waited for."""
    mine = [work(step, layout, 2)[layout.at("replicas", "shard")] for step in range(STEPS)]
    for stage in (0, 1, 2):
        outcomes = []
        for names in ([], ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]):
            model, store = make(TINY, Optimizer(clip_grad=0.0), dtype, layout=layout, zero=stage)
            with pytest.MonkeyPatch.context() as patch:
                for name in names:
                    patch.setattr(dist, name, lazy(getattr(dist, name)))
                results = [
                    torch.cat([norm[None], sums])
                    for norm, sums in (one_step(model, store, x) for x in mine)
                ]
                values = everything(store)
                check_published(model, store, values)
            outcomes.append(values | {f"step {i}": x for i, x in enumerate(results)})
        assert is_equal(*outcomes), stage


@sampled(("sizes", "dtype"), LAYOUTS[1:3], [torch.float32, torch.bfloat16], quick=[(0, 1), (1, 0)])
def test_pending_collectives_are_awaited(sizes, dtype):
    on_ranks(check_pending, sizes, dtype)


def check_uneven(layout, micro):
    """The last rank's losses leave out parameters that the others' use (refused with ZeRO 2)."""
    for stage in (0, 1):
        one, alone = make(TINY, Optimizer(clip_grad=0.5), torch.float64)
        model, store = make(
            TINY, Optimizer(clip_grad=0.5), torch.float64, layout=layout, zero=stage
        )
        for step in range(STEPS):
            every = work(step, layout, micro)
            every[-1][0] = (every[-1][0][0], SOME | LAYER if step % 2 else SOME)
            want = one_step(one, alone, list(itertools.chain(*every)))
            got = one_step(model, store, every[layout.at("replicas", "shard")])
            torch.testing.assert_close(
                got, want, rtol=1e-12, atol=0, msg=f"stage {stage}, step {step}"
            )
            close(everything(store), assembled([alone.named_state()])[0], 1e-12)


@pytest.mark.parametrize("micro", [1, 3])
def test_parameters_unused_on_one_rank(micro):
    on_ranks(check_uneven, LAYOUTS[0], micro)
