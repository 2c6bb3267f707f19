"""AdamW over flat buffers: the kernels, their references and torch's fused AdamW agree."""

import math

import pytest
import torch

from meshwright.base import device as devices
from meshwright.kernels import adamw, gradients, moments

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SETTINGS = adamw.AdamWConstants(0.9, 0.95, 1e-8)
# Roundings of float32 in exp_avg_sq: two of the gradient's factor, which its square doubles, and
# one each of the square, of its product with 1 - beta2 and of the sum.
BOUND = 7 * 2**-24
SIZE = 128 * 43  # two full programs and a part
# Gaps, which another rule updates, and pieces of three kinds, whose weights lie elsewhere.
KINDS = [(1.0, 0.0), (1.0, 1.0), (0.3, 2.5)]  # factors of rate and decay
PIECES = [(0, 7, 1, 1), (7, 8, 0, 0), (20, 39, 2, 24), (40, 42, 0, 8)]
RANGES = [adamw.FlatRange(128 * a, 128 * b, kind, 128 * target) for a, b, kind, target in PIECES]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Run the kernels on a CPU in Triton's interpreter."""
    monkeypatch.setattr(devices, "has_kernels", lambda device: True)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def numbers(total, loss=1.0, lr=1e-2, weight_decay=0.1, scale=1.0):
    values = [
        torch.tensor(x, dtype=torch.float64, device=DEVICE)
        for x in (total, loss, lr, weight_decay, scale)
    ]
    return tuple(values)


def make(dtype, low):
    """Return buffers and table; other elements of the copy are NaN, to show what was written."""
    table = adamw.make_table(RANGES, DEVICE)
    state = [torch.zeros(table.shape[1] * 128, dtype=dtype, device=DEVICE) for _ in range(2)]
    weights = None if low is None else torch.full((SIZE,), math.nan, dtype=low, device=DEVICE)
    return adamw.AdamWBuffers(
        draw(SIZE, dtype=dtype), *state, draw(SIZE, seed=1, dtype=dtype), weights
    ), table


def owned():
    mask = torch.zeros(SIZE, dtype=torch.bool, device=DEVICE)
    for begin, end, *_ in RANGES:
        mask[begin:end] = True
    return mask


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [0.0, 0.7])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_steps_equal_torchs(low, clip, scale):
    """Compare five steps, one of them not finite, with torch's fused AdamW and with float64."""
    ours, table = make(torch.float32, low)
    constants = adamw.make_constants(SETTINGS, clip, DEVICE, KINDS)
    step = torch.zeros((), device=DEVICE)
    theirs = {}
    for dtype in (torch.float32, torch.float64):
        pieces = [torch.nn.Parameter(ours.master[a:b].to(dtype, copy=True)) for a, b, *_ in RANGES]
        groups = [
            {"params": [p], "weight_decay": 0.1 * KINDS[kind][1]}
            for p, (_, _, kind, _) in zip(pieces, RANGES, strict=True)
        ]
        theirs[dtype] = (
            torch.optim.AdamW(groups, betas=SETTINGS[:2], eps=SETTINGS.eps, fused=True),
            pieces,
        )
    first = ours.master.clone()
    for i in range(5):
        gradient = draw(SIZE, seed=10 + i) * 10.0 ** (2 * i - 9)
        ours.gradients.copy_(gradient * scale)
        if is_bad := i == 2:
            ours.gradients[5] = math.inf
        total = adamw.sum_squares(ours.gradients, table)
        kept = [x.clone() for x in (ours.exp_avg, ours.exp_avg_sq, ours.master)]
        lr = 1e-2 / (i + 1)
        decision = adamw.decide(constants, numbers(total.item(), lr=lr, scale=scale), step)
        adamw.update_blocks(ours, table, SETTINGS, decision)
        if is_bad:
            assert (
                all(map(torch.equal, kept, ours[1:4])) and step == 2 and not decision[adamw.FINITE]
            )
            continue
        exact = gradient[owned()].double().norm()
        assert decision[adamw.NORM].item() == pytest.approx(exact.item(), rel=2e-7)
        shrink = min(1.0, clip / (exact.item() + 1e-6)) if clip else 1.0
        assert decision[adamw.SHRINK].item() == pytest.approx(shrink, rel=2e-7)
        for dtype, (optimizer, pieces) in theirs.items():
            for p, (a, b, *_) in zip(pieces, RANGES, strict=True):
                p.grad = gradient[a:b].to(dtype) * shrink
            for group, (_, _, kind, _) in zip(optimizer.param_groups, RANGES, strict=True):
                group["lr"] = lr * KINDS[kind][0]
            optimizer.step()
    assert step == 4
    for dtype, (optimizer, pieces) in theirs.items():
        at = 0
        for p, (a, b, *_) in zip(pieces, RANGES, strict=True):
            state = optimizer.state[p]
            for got, want in (
                (ours.exp_avg[at : at + b - a], state["exp_avg"]),
                (ours.exp_avg_sq[at : at + b - a], state["exp_avg_sq"]),
                (ours.master[a:b], p.detach()),
            ):
                torch.testing.assert_close(
                    got.to(dtype), want, rtol=1e-6, atol=3e-7 * float(want.abs().max())
                )
                assert (got - want).norm() < BOUND * want.norm()
            at += b - a
    assert torch.equal(ours.master[~owned()], first[~owned()])
    if low is not None:
        got = torch.cat([ours.weights[target : target + b - a] for a, b, _, target in RANGES])
        want = torch.cat([ours.master[a:b] for a, b, *_ in RANGES]).to(low)
        assert torch.equal(got, want) or low is torch.bfloat16  # which the interpreter truncates
        torch.testing.assert_close(
            got, want, rtol=0 if DEVICE.type != "cpu" else torch.finfo(low).eps, atol=0
        )
        assert ours.weights.isnan().sum() == SIZE - owned().sum()


@pytest.mark.parametrize("uses_kernels", [True, False])
def test_a_cautious_decay_spares_what_the_update_turns_away_from_0(monkeypatch, uses_kernels):
    """Compare three steps with a step without decay and the decay of the elements that have one."""
    monkeypatch.setattr(devices, "has_kernels", lambda device: uses_kernels)
    buffers, table = make(torch.float32, None)
    constants, step = (
        adamw.make_constants(SETTINGS, 0.0, DEVICE, KINDS),
        torch.zeros((), device=DEVICE),
    )
    factors = torch.zeros(SIZE, device=DEVICE)
    for begin, end, kind, _ in RANGES:
        factors[begin:end] = math.prod(KINDS[kind])
    for i in range(3):
        buffers.gradients.copy_(draw(SIZE, seed=20 + i))
        buffers.gradients[:64], buffers.master[32:96] = 0.0, 0.0
        before = [x.clone() for x in buffers[:4]]
        values = numbers(1.0, lr=0.1, weight_decay=0.5)
        decision = adamw.decide(constants, values, step)
        adamw.update_blocks(buffers, table, SETTINGS._replace(is_cautious=True), decision)
        plain = adamw.AdamWBuffers(*before, None)
        decision[adamw.OF_KINDS :: 2] = 0.0
        master = before[3].clone()
        adamw.update_blocks(plain, table, SETTINGS, decision)
        decays = (master - plain.master) * master >= 0
        assert 0.3 < decays[owned()].float().mean() < 0.7
        want = plain.master - decays * 0.1 * 0.5 * factors * master
        torch.testing.assert_close(buffers.master, want, rtol=1e-5, atol=1e-6)
        assert all(map(torch.equal, buffers[1:3], plain[1:3]))


@pytest.mark.parametrize("formats", [(torch.bfloat16, torch.bfloat16), (torch.int8, torch.uint8)])
def test_state_in_fewer_bits(monkeypatch, formats):
    """Kernel and reference update from the same codes; new ones differ where a rounding decides.

    The masters follow the moments before these are rounded.
    """
    # rows of 16 in blocks of 128
    cut = moments.place_of("h.0.attn.proj.weight", (40, 48), (0, 16), (40, 16))
    full = moments.place_of("wte.weight", (2176,), (0,), (2176,))
    both = []
    for uses_kernels in (True, False):
        monkeypatch.setattr(
            devices, "has_kernels", lambda device, uses_kernels=uses_kernels: uses_kernels
        )
        buffers, table = make(torch.float32, torch.bfloat16)
        codes = [draw(x.numel(), seed=7 + k).square() for k, x in enumerate(buffers[1:3])]
        step = torch.zeros((), device=DEVICE)
        blocks = moments.make_block_draws([(cut, 5), (full, table.shape[1] - 5)], step)
        for k, dtype in enumerate(formats):
            codes[k] = torch.zeros_like(codes[k], dtype=dtype).copy_(
                moments.rounded(codes[k], dtype, torch.zeros_like(codes[k], dtype=torch.int32))
            )
        buffers = buffers._replace(exp_avg=codes[0], exp_avg_sq=codes[1])
        wide = buffers._replace(
            exp_avg=moments.expanded(codes[0]),
            exp_avg_sq=moments.expanded(codes[1]),
            master=buffers.master.clone(),
            weights=buffers.weights.clone(),
        )
        constants = adamw.make_constants(SETTINGS, 1.0, DEVICE, KINDS)
        decision = adamw.decide(constants, numbers(4.0), step)
        adamw.update_blocks(wide, table, SETTINGS, decision)
        adamw.update_blocks(buffers, table, SETTINGS, decision, blocks)
        assert torch.equal(buffers.master, wide.master)
        bits = moments.halves(moments.draw_blocks(blocks).flatten())
        for k in (0, 1):
            assert torch.equal(buffers[1 + k], moments.rounded(wide[1 + k], formats[k], bits[k]))
        kept = [x.clone() for x in codes]
        adamw.update_blocks(buffers, table, SETTINGS, decision * 0, blocks)  # not finite
        assert all(map(torch.equal, kept, codes))
        both.append(kept)
    for kernel, plain in zip(*both, strict=True):
        apart = (moments.expanded(kernel) - moments.expanded(plain)).abs() > 0
        assert apart.float().mean() < 1e-3
        assert (kernel != 0).float().mean() > 0.9


@pytest.mark.parametrize(
    ("total", "loss", "applied"),
    [
        (1.0, 1.0, 1),
        (math.nan, 1.0, 0),
        (math.inf, 1.0, 0),
        (1.0, math.nan, 0),
        (1.0, -math.inf, 0),
    ],
)
@pytest.mark.parametrize("uses_kernels", [True, False])
def test_only_finite_steps_count(total, loss, applied, uses_kernels, monkeypatch):
    """The kernel and its reference make the check that every other update follows."""
    monkeypatch.setattr(devices, "has_kernels", lambda device: uses_kernels)
    step, values = torch.zeros((), device=DEVICE), numbers(total, loss, scale=4.0)
    decision = adamw.decide(adamw.make_constants(SETTINGS, 0.1, DEVICE, KINDS), values, step)
    norm, shrink, is_finite = gradients.clip_and_check(
        values[0], values[1], 4.0, 0.1, torch.float32
    )
    assert step == applied == decision[adamw.FINITE] == is_finite
    if applied:
        torch.testing.assert_close(
            decision[[adamw.NORM, adamw.SHRINK]], torch.stack([norm, shrink])
        )


def test_many_tiles_of_one_program(monkeypatch):
    """A program sums every n-th tile when there are more tiles than programs."""
    from meshwright.kernels.triton import adamw as adamw_triton

    monkeypatch.setattr(adamw_triton, "PROGRAMS", 2)
    x = draw(128 * 100)
    total = adamw.sum_squares(x, adamw.make_table([adamw.FlatRange(0, 128 * 99)], DEVICE))
    assert total.item() == pytest.approx(float(x[: 128 * 99].double().square().sum()), rel=1e-7)
