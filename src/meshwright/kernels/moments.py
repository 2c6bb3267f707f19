"""Optimizer state in 16 or 8 bits, rounded at random by a hash of each element's place.

Hand-written because no format of torch holds a second moment in 8 bits, and none rounds at random.
Rounded to the nearest, a moment would stand still: with beta2 = 0.999 a step changes exp_avg_sq by
a thousandth, and half the distance between neighbours in bfloat16 is two to four. So a number
between two codes becomes the upper one with the probability of its distance from the lower one, and
the mean of many steps is right. The draw is a hash of

    (name of the parameter, position in the full tensor, number of the update)

so any layout stores the same codes, a resumed run goes on exactly, and nothing is drawn from a
generator. Codes have no common scale of a block, since the blocks of two layouts would differ.

    bfloat16   float32's upper 16 bits
    int8       signed: a sign, 5 bits of exponent, 2 of mantissa; from 2^-28 = 4e-9 to 28
    uint8      of numbers that are never negative: 6 bits of exponent, 2 of mantissa; from
               2^-55 (the square of 5e-9, less than Adam's usual eps) to 896

A larger number becomes the largest code. A smaller one becomes 0 or the smallest; in uint8 always
the smallest, so that Adam does not divide a kept first moment by 0, unless it is below 2^-80, as
are the squares of gradients that are 0 but for float64's rounding.

Both formats of 8 bits end with the second bit of float32's mantissa: a code is `(bits + draw) >>
21` less a constant. Its smallest exponent has no implicit 1, as usual.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.kernels.dropout import MASK, as_int32, mix, shuffled
from meshwright.kernels.references import reference

LOW_BITS = 21  # of float32, which the formats of 8 bits leave out
# The least exponent of a format's normal numbers, and its largest code.
INT8 = (-26, 127)
UINT8 = (-53, 255)
NOTHING = 2.0**-80  # less than this is 0 as uint8
STEP_KEY = 0x9E3779B9
CHUNK = 1 << 22  # elements that are rounded at a time without Triton; a few copies in 64 bits


class Place(NamedTuple):
    """Where consecutive elements of a part of a tensor are in the full tensor.

    The element i is number low + i of the part, which is at first + (low + i) + gap * ((low + i)
    // run) of the full one: the part has `run` elements of each row, say.
    """

    name: int  # hash of the parameter's name
    first: int
    low: int
    run: int
    gap: int

    def after(self, elements: int) -> Place:
        return self._replace(low=self.low + elements)


class PlaceDraws(NamedTuple):
    """The draws for elements that are consecutive in a part of a parameter."""

    place: Place
    step: Tensor  # the number of this update, float32 []

    def after(self, elements: int) -> PlaceDraws:
        return PlaceDraws(self.place.after(elements), self.step)


@dataclass(frozen=True)
class Rounding:
    """How an optimizer rounds the state of its parameters."""

    places: dict[nn.Parameter, Place]
    step: Tensor  # the number of this update, float32 []

    def draws(self, p: nn.Parameter) -> PlaceDraws:
        return PlaceDraws(self.places[p], self.step)


def place_of(name: str, full: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Place:
    """Return the place of a box of a tensor: cut in one dimension, or in the first and another."""
    split = [d for d in range(len(full)) if sizes[d] != full[d]]
    cut = max(split, default=0)
    # A run, consecutive in both tensors, spans the last dimension that is cut and those after it.
    # All gaps between runs are equal only if no dimension before is cut but the first.
    if any(0 < d < cut for d in split):
        raise ValueError(f"{name}: a part {list(sizes)} of {list(full)} has no simple place")
    first = 0
    for size, offset in zip(full, offsets, strict=True):
        first = first * size + offset
    run = max(1, math.prod(sizes[cut:]))
    # From a run's end to the next one's begin; a part cut in the first dimension alone is one run.
    gap = math.prod(full[cut:]) - run if cut else 0
    return Place(
        zlib.crc32(name.encode()),
        first,
        0,
        run,
        gap,
    )


def draw(place: Place, step: Tensor, count: int) -> Tensor:
    """Return 32 random bits for each of the elements, int32 [count]."""
    local = torch.arange(place.low, place.low + count, device=step.device)
    position = local + place.first
    # Without a gap, a division for each element is saved.
    if place.gap:
        position += local.div(place.run, rounding_mode="floor") * place.gap
    name = torch.full((), place.name, device=step.device)
    return hashed(position, name, step)


def hashed(position: Tensor, names: Tensor, step: Tensor) -> Tensor:
    """Hash positions and hashes of names, int64 tensors that broadcast, and a step."""
    of_step = mix((step.long() & MASK) ^ STEP_KEY)
    key = mix(of_step ^ names)
    bits = shuffled(as_int32((position & MASK) ^ key))
    # The last shift of `mix`, which `shuffled` leaves out.
    return bits ^ (bits >> 16 & 0xFFFF)


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the draws for a first and a second moment, of 16 bits each."""
    return bits & 0xFFFF, bits >> 16 & 0xFFFF


def rounded(x: Tensor, dtype: torch.dtype, draws: Tensor) -> Tensor:
    """Return x in fewer bits, rounded by draws of 16 bits."""
    x = x.float()
    if dtype is torch.bfloat16:
        # bfloat16 is the upper half of a float32; the draw carries into it or does not.
        upper = (x.view(torch.int32) + draws) >> 16
        return upper.to(torch.int16).view(torch.bfloat16)
    # A draw of 21 bits: the 16 that there are, and the middle of the 32 it stands for.
    wide = (draws << LOW_BITS - 16) + (1 << LOW_BITS - 17)
    return encoded(x, dtype, wide)


def encoded(x: Tensor, dtype: torch.dtype, draws: Tensor | int) -> Tensor:
    """Return float32 numbers as codes of 8 bits; 21 bits of `draws` are added to those left out."""
    least, largest = INT8 if dtype is torch.int8 else UINT8
    size = x.abs()
    # float32's exponent, of bias 127, becomes 1 for `least`; 2 bits of mantissa follow it.
    upper = size.view(torch.int32) + draws >> LOW_BITS
    normal = upper - (least + 126 << 2)
    # The codes below 4 have no implicit 1: they are quarters of 2^least. Larger numbers, whose code
    # is `normal`, are bounded so that none overflows here.
    low = size.clamp(max=2.0**least)
    quarters = low * 2.0 ** (2 - least)
    small = (quarters + draws * 2.0**-LOW_BITS).int()
    code = torch.where(size < 2.0**least, small, normal)
    code = code.clamp(max=largest)
    if dtype is torch.int8:
        # The sign is the highest bit, not a complement.
        signed = torch.where(x < 0, code - 128, code)
        return signed.to(torch.int8)
    code = torch.where(size > NOTHING, code.clamp(min=1), code)
    return code.to(torch.uint8)


def expanded(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return stored numbers in a wider format; the very same tensor if it has that."""
    if code.dtype not in (torch.int8, torch.uint8):
        return code.to(dtype)
    least, largest = INT8 if code.dtype is torch.int8 else UINT8
    # `largest` is the mask of all bits but the sign's.
    size = code.int() & largest
    upper = size + (least + 126 << 2)
    normal = upper << LOW_BITS
    # Codes below 4 have no exponent and no implicit 1.
    small = size * 2.0 ** (least - 2)
    value = torch.where(size < 4, small, normal.view(torch.float32))
    if code.dtype is torch.int8:
        value = torch.where(code < 0, -value, value)
    return value.to(dtype)


def assign(target: Tensor, values: Tensor) -> None:
    """Copy state of any format to one of any other, rounded to the nearest."""
    if target.dtype is values.dtype:
        target.copy_(values)
    elif target.dtype in (torch.int8, torch.uint8):
        # Half a code is added in place of a draw.
        wide = expanded(values).to(target.device).contiguous()
        half = 1 << LOW_BITS - 1
        target.copy_(encoded(wide, target.dtype, half))
    elif values.dtype in (torch.int8, torch.uint8):
        target.copy_(expanded(values, target.dtype))
    else:
        target.copy_(values)


@reference("moments.store", of=lambda values, *_: values)
def store(
    values: Tensor, code: Tensor, draws: PlaceDraws, skipped: Tensor, is_second: bool = False
) -> None:
    """Round values into `code`, both contiguous, unless `skipped` is not 0."""
    flat = values.reshape(-1)
    out = code.view(-1)
    for begin in range(0, len(flat), CHUNK):
        some = flat[begin : begin + CHUNK]
        to = out[begin : begin + CHUNK]
        bits = draw(draws.place.after(begin), draws.step, len(some))
        half = halves(bits)[is_second]
        new = rounded(some, code.dtype, half)
        to.copy_(torch.where(skipped > 0, to, new))


class BlockDraws(NamedTuple):
    """The draws for blocks of 128 elements that are consecutive in a compact state."""

    parts: Tensor  # int32 [blocks]: the number of each block's place
    # int32 [places, 5]; from `low` the first element of the place's first block is subtracted
    places: Tensor
    step: Tensor


def make_block_draws(places: Sequence[tuple[Place, int]], step: Tensor) -> BlockDraws:
    """Return the draws for parts of so many blocks each."""
    rows = []
    counts: list[int] = []
    for place, blocks in places:
        # Elements count from the first of the state, not of the part.
        rows.append(place.after(-128 * sum(counts)))
        counts.append(blocks)
    numbers = torch.arange(len(places))
    parts = torch.repeat_interleave(numbers, torch.tensor(counts, dtype=torch.int64))
    # Positions are hashed modulo 2^32, so that their lower halves are enough.
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 5)
    table = as_int32(table & MASK)
    return BlockDraws(parts.to(step.device, torch.int32), table.to(step.device), step)


def draw_blocks(draws: BlockDraws) -> Tensor:
    """Return 32 random bits for each element of the blocks, int32 [blocks, 128]."""
    rows = draws.places.long()[draws.parts.long()]
    names, first, low, run, gap = (rows & MASK).unsqueeze(2).unbind(1)
    elements = torch.arange(128 * len(rows), device=rows.device)
    elements = elements.view(-1, 128)
    local = (elements + low) & MASK
    # As `draw`: one gap after each run.
    runs = local // run
    position = first + local + runs * gap
    return hashed(position, names, draws.step)
