"""Optimizer state in 16 and 8 bits: formats, random rounding, places, and the kernels' codes."""

import math

import pytest
import torch

from meshwright.kernels import moments
from meshwright.kernels.moments import Place, PlaceDraws

FORMATS = [torch.bfloat16, torch.int8, torch.uint8]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLACE = Place(12345, 70, 3, 24, 40)
NEVER = torch.zeros((), device=DEVICE)


def step(number=1):
    return torch.tensor(float(number), device=DEVICE)


def codes_of(dtype):
    """Return all codes but those of what is not finite."""
    if dtype is torch.bfloat16:
        every = torch.arange(-(1 << 15), 1 << 15, device=DEVICE).to(torch.int16).view(dtype)
        return every[every.isfinite()]
    info = torch.iinfo(dtype)
    return torch.arange(info.min, info.max + 1, device=DEVICE).to(dtype)


def stored(values, dtype, number=1, place=PLACE, is_second=None):
    code = torch.empty(values.shape, dtype=dtype, device=DEVICE)
    is_second = dtype is torch.uint8 if is_second is None else is_second
    moments.store(values, code, PlaceDraws(place, step(number)), NEVER, is_second)
    return code


def spread(count, dtype, seed=0):
    """Return numbers of all sizes that a format has, and beyond."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * 2.0 ** torch.empty(count).uniform_(
        -60, 12, generator=generator
    )
    return (x.abs() if dtype is torch.uint8 else x).to(DEVICE)


@pytest.mark.parametrize("dtype", FORMATS)
def test_stored_numbers_keep_their_codes(with_kernels, dtype):
    """Whatever is drawn; and a format's numbers grow with its codes."""
    codes = codes_of(dtype)
    if with_kernels and dtype is torch.bfloat16:  # Triton's interpreter takes long
        codes = codes[::11]
    values = moments.expanded(codes)
    for number in range(1, 4):
        assert torch.equal(moments.expanded(stored(values, dtype, number)), values)
    again = torch.empty_like(codes)
    moments.assign(again, values)
    assert torch.equal(moments.expanded(again), values)
    if dtype is not torch.bfloat16:
        half = values[values >= 0].unique()
        assert len(half) == (128 if dtype is torch.int8 else 256) and half[0] == 0
        steps = half[5:] / half[4:-1]
        assert steps.min().item() == pytest.approx(8 / 7) and steps.max().item() == pytest.approx(
            1.25
        )
    least, largest = (values[values > 0].min().item(), values.max().item())
    if dtype is torch.int8:
        assert (least, largest) == (2.0**-28, 28.0)
    elif dtype is torch.uint8:
        assert (least, largest) == (2.0**-55, 896.0)


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_is_to_a_neighbour_and_right_in_the_mean(with_kernels, dtype):
    values = spread(200, dtype)
    every = codes_of(dtype)
    known = moments.expanded(every).unique()
    within = values.clamp(known[0], known[-1])
    at = torch.searchsorted(known, within).clamp(1, len(known) - 1)
    low, high = known[at - 1], known[at]
    low = torch.where(within == high, high, low)
    times = 40 if with_kernels else 512
    got = torch.stack(
        [moments.expanded(stored(values, dtype, number)) for number in range(1, times + 1)]
    )
    assert ((got == low) | (got == high)).all()
    apart = (got.double().mean(0) - within.double()).abs()
    bound = 5 * (high - low).double() / (2 * math.sqrt(times))
    fits = apart <= bound
    if dtype is torch.uint8:  # what is not 0 never becomes 0
        fits |= values < known[1]
        assert (got[:, values > moments.NOTHING] > 0).all()
        assert not stored(torch.full((99,), moments.NOTHING, device=DEVICE), dtype).any()
    assert fits.all()
    distant = (within - low) / (high - low)
    assert (
        (got != got[0])
        .any(0)[(distant > 0.2) & (distant < 0.8) & (values.abs() > known[known > 0][0])]
        .all()
    )


@pytest.mark.parametrize("dtype", FORMATS)
def test_kernels_store_the_codes_of_their_reference(monkeypatch, dtype):
    from meshwright.kernels import references

    values, codes = spread(2000, dtype), []
    for uses_kernels in (False, True):
        monkeypatch.setattr(
            references, "is_triton", lambda x, uses_kernels=uses_kernels: uses_kernels
        )
        for place in (
            PLACE,
            Place(2**32 - 1, 2**33 + 5, 2**31 + 7, 1 << 31, 0),
            Place(0, 0, 0, 1, 2),
        ):
            codes.append([stored(values, dtype, 77, place, second) for second in (False, True)])
    for plain, kernel in zip(codes[:3], codes[3:], strict=True):
        assert torch.equal(plain[0], kernel[0]) and torch.equal(plain[1], kernel[1])
        assert not torch.equal(plain[0], plain[1])
    assert not torch.equal(codes[0][0], codes[2][0])


def test_draws_are_uniform_and_independent():
    """In the first and second moment's halves, from step to step, and from element to element."""
    place, count = Place(99, 0, 0, 1 << 20, 0), 1 << 14
    draws = [moments.halves(moments.draw(place, step(n), count)) for n in (1, 2)]
    rows = [x.double() / 65536 - 0.5 for pair in draws for x in pair]
    rows += [rows[0].roll(1), rows[0].roll(64)]
    table = torch.stack(rows)
    assert (table.mean(1).abs() < 5 * math.sqrt(1 / 12 / count)).all()
    correlation = torch.corrcoef(table) - torch.eye(len(rows), device=DEVICE)
    assert correlation.abs().max() < 5 / math.sqrt(count)


def reference(name, position, number):
    """Return an element's 32 random bits by Python's integers."""

    def mix(x):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ x >> shift) * factor % 2**32
        return x ^ x >> 16

    return mix(position % 2**32 ^ mix(mix(number ^ 0x9E3779B9) ^ name))


@pytest.mark.parametrize(
    ("full", "box"),
    [
        ((6, 10), ((2, 0), (3, 10))),  # rows
        ((6, 10), ((0, 5), (6, 5))),  # columns
        ((6, 10), ((2, 5), (4, 5))),  # rows and columns
        ((2, 6, 5), ((0, 3, 0), (2, 3, 5))),  # a gate
        ((2, 6, 5), ((1, 2, 0), (1, 2, 5))),
        ((7,), ((3,), (4,))),
        ((), ((), ())),
    ],
)
def test_every_part_draws_what_the_full_tensor_does(full, box):
    place = moments.place_of("h.0.mlp.fc.weight", full, (0,) * len(full), full)
    whole = moments.draw(place, step(5), math.prod(full)).view(full)
    assert [x % 2**32 for x in whole.flatten().tolist()] == [
        reference(place.name, n, 5) for n in range(math.prod(full))
    ]
    offsets, sizes = box
    cut = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].flatten()
    part = moments.place_of("h.0.mlp.fc.weight", full, offsets, sizes)
    for low in range(len(cut)):
        assert torch.equal(moments.draw(part.after(low), step(5), len(cut) - low), cut[low:])
    blocks = moments.make_block_draws([(part.after(1), 1), (place, 2)], step(5))
    drawn = moments.draw_blocks(blocks)
    assert torch.equal(drawn[0, : len(cut) - 1], cut[1:])
    assert torch.equal(drawn[1:].flatten()[: math.prod(full)], whole.flatten())


@pytest.mark.parametrize("target", [torch.float32, *FORMATS[:2]])
@pytest.mark.parametrize("source", [torch.float32, *FORMATS[:2]])
def test_a_first_moment_changes_its_format(source, target):
    """By rounding to the nearest, without any draw."""
    x = spread(1000, torch.int8).clamp(-28, 28)
    before, after = (
        torch.empty(1000, dtype=source, device=DEVICE),
        torch.empty(1000, dtype=target, device=DEVICE),
    )
    moments.assign(before, x)
    moments.assign(after, before)
    want, got = moments.expanded(before), moments.expanded(after)
    eps = {torch.float32: 0, torch.bfloat16: 2**-8, torch.int8: 2**-3}
    assert (
        (got - want).abs() <= eps[target] * want.abs() + (2.0**-29 if target is torch.int8 else 0)
    ).all()
    assert source is not target or torch.equal(before, after)
