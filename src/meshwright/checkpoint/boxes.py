"""Boxes: where parts of a tensor lie, whether they overlap, and whether they cover it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


class Box(NamedTuple):
    offset: Shape
    size: Shape


def check_cover(index: Mapping[str, Any]) -> None:
    """Check that the boxes of each tensor in the index hold every element exactly once."""
    for name, tensor in index.items():
        boxes = tensor["boxes"]
        shape = tuple(tensor["shape"])
        # With the form given, since an array of no boxes has no dimensions.
        form = len(boxes), len(shape)
        low = np.array([box["offset"] for box in boxes], np.int64).reshape(form)
        sizes = np.array([box["size"] for box in boxes], np.int64).reshape(form)
        # As many elements as the tensor has, and none twice: then none is missing.
        covered = int(sizes.prod(axis=1).sum())
        size = math.prod(shape)
        overlap = overlapping(low, low + sizes)
        if covered != size or overlap:
            raise ValueError(
                f"{name} {shape} has {size:,} elements, the boxes of all ranks hold {covered:,}"
                f"{', some of them twice' if overlap else ''}"
            )


def plus(a: Shape, b: Shape) -> Shape:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def minus(a: Shape, b: Shape) -> Shape:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def not_empty(low: Shape, high: Shape) -> bool:
    return all(a < b for a, b in zip(low, high, strict=True))


def intersection(a: Box, b: Box) -> tuple[Shape, Shape]:
    """Return the lowest and the highest corner of what both have, if that is `not_empty`."""
    ends = map(min, plus(a.offset, a.size), plus(b.offset, b.size))
    return tuple(map(max, a.offset, b.offset)), tuple(ends)


def split_boxes(
    boxes: Iterable[tuple[Shape, Shape]], flat: torch.Tensor
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield each box with its part of a flat tensor that holds one box after the other."""
    start = 0
    for box in (Box(tuple(offset), tuple(size)) for offset, size in boxes):
        end = start + math.prod(box.size)
        yield box, flat[start:end]
        start = end


def overlapping(low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> bool:
    """Return whether two of these boxes [n, dimensions] share an element.

    Of thousands of boxes, only those are compared that meet along the dimension with most cuts.
    """
    dimensions = low.shape[1]
    if len(low) < 2 or not dimensions:
        return len(low) > 1
    d = max(range(dimensions), key=lambda d: len(np.unique(low[:, d])))
    order = low[:, d].argsort()
    low = low[order]
    high = high[order]
    # Along d, box i meets of the boxes behind it those that begin before it ends.
    ends = np.searchsorted(low[:, d], high[:, d])
    for i, end in enumerate(ends.tolist()):
        others = slice(i + 1, end)
        begin_both = np.maximum(low[i], low[others])
        end_both = np.minimum(high[i], high[others])
        if (begin_both < end_both).all(axis=1).any():
            return True
    return False


def strides(size: Shape) -> Shape:
    return tuple(math.prod(size[d + 1 :]) for d in range(len(size)))


def position(box: Box, point: Shape) -> int:
    """Return the index within the box of the element at `point` of the global tensor."""
    return sum(x * s for x, s in zip(minus(point, box.offset), strides(box.size), strict=True))


def inside(box: Box, shape: Shape) -> bool:
    if not len(box.offset) == len(box.size) == len(shape):
        return False
    return all(
        offset >= 0 and size >= 0 and offset + size <= length
        for offset, size, length in zip(box.offset, box.size, shape, strict=True)
    )
