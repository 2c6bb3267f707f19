"""A foreign folder's settings and tensors, each requested by name and checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.base.errors import UserError, bad_data
from meshwright.checkpoint.claims import claimed, claimed_heads
from meshwright.checkpoint.gpt import one_view
from meshwright.checkpoint.sources import TensorView

Tensors = Mapping[str, "torch.Tensor"]
Views = dict[str, list[TensorView]]


class Bound(NamedTuple):
    kinds: tuple[type, ...]
    holds: Callable[[Any], bool]
    text: str


COUNT = Bound((int,), lambda value: 0 < value < 1 << 31, "an integer of at least 1")
POSITIVE = Bound((float, int), lambda value: value > 0, "a number above 0")
NUMBER = Bound((int,), lambda value: 0 <= value < 1 << 31, "an integer from 0 on")
WINDOW = Bound((int,), lambda value: 1 < value < 1 << 31, "an integer of at least 2")
SHARE = Bound((float, int), lambda value: 0 <= value < 1, "in [0, 1)")


class ForeignFolder:
    """A folder's settings and tensors; each is requested by name and checked."""

    def __init__(self, folder: Path, file: str, config: dict[str, Any], tensors: Tensors) -> None:
        self.folder = folder
        self.config = config
        self.tensors = tensors
        self.file = file
        self.notes: list[str] = []
        self.used: set[str] = set()

    def refused(self, what: str, cure: str) -> UserError:
        return bad_data(
            f"{self.folder / self.file}: {what}, which this package does not compute; {cure}"
        )

    def get(
        self,
        key: str,
        bound: Bound,
        default: float | None = None,
        among: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return a number of the settings, or of a part of them, that keeps its bound."""
        settings = self.config if among is None else among
        value = default if settings.get(key) is None else settings[key]
        if isinstance(value, bool) or not isinstance(value, bound.kinds) or not bound.holds(value):
            raise bad_data(
                f"{self.folder / self.file}: {key} is {repr(value)[:100]}; it must be {bound.text}"
            )
        return bound.kinds[0](value)

    def sizes(self, width: str, heads: str, layers: str) -> tuple[int, int, int]:
        """Return the numbers under these keys, of layers at most as many as there are tensors."""
        # A wrong number of layers could make a loop over them endless, so it is checked first.
        most = len(self.tensors)
        why = "it has no more tensors"
        count = claimed(self.get(layers, COUNT), f"{layers} of {self.file}", most, why=why)
        h = self.get(width, COUNT)
        return h, claimed_heads(count, self.get(heads, COUNT), self.file), count

    def note_defaults(self, **defaults: float) -> None:
        """Note which of these keys the file leaves to transformers' defaults."""
        if missing := [key for key in defaults if self.config.get(key) is None]:
            values = ", ".join(f"{key} {defaults[key]:g}" for key in missing)
            self.notes.append(
                f" > note: {self.file} does not state all settings; transformers' defaults are used: {values}"
            )

    def want(self, key: str, *good: Any, default: Any = None) -> Any:
        """Return a setting that must have one of these values."""
        value = self.config.get(key, default)
        if value not in good:
            raise self.refused(
                f"{key} is {str(value)[:100]}", f"{' or '.join(map(str, good))} would do"
            )
        return value

    def has(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int | None) -> torch.Tensor:
        """Return a tensor of this shape; None stands for any size."""
        if name not in self.tensors:
            raise bad_data(f"{self.folder} has no tensor {name}")
        tensor = self.tensors[name]
        self.used.add(name)
        # Settings and tensors come from two files, which may not belong together.
        if len(shape) != tensor.ndim or any(
            b not in (a, None) for a, b in zip(tensor.shape, shape, strict=True)
        ):
            wanted = [size or "any" for size in shape]
            raise bad_data(
                f"{self.folder}: {name} is {list(tensor.shape)}, by {self.file} it is {wanted}"
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise bad_data(
                f"{self.folder}: {name} holds {tensor.dtype}; quantised weights are not read"
            )
        return tensor

    def add_head(self, pieces: Views, wte: torch.Tensor, tied: bool, name: str = "lm_head") -> bool:
        """Add the output table if it is separate; return whether it is."""
        if not self.has(f"{name}.weight") and tied:
            return False
        head = self.take(f"{name}.weight", *wte.shape)
        # Some programs save a tied table twice, and some say that it is tied though it is not.
        if tied:
            if head.dtype == wte.dtype and head.equal(wte):
                return False
            ties = f"{self.file} ties the output table to the embedding"
            self.notes.append(f"{ties}; their numbers differ: they stay separate")
        pieces["lm_head.weight"] = one_view(head)
        return True

    def check_used(self) -> None:
        """Refuse tensors of another network; buffers that old versions saved do not count."""
        # Such buffers are causal masks and frequencies, which follow from the settings.
        buffer = r"(.*\.)?((attn|attention)\.(masked_)?bias|rotary_emb\.inv_freq)"
        left = [
            name
            for name in self.tensors
            if name not in self.used and not re.fullmatch(buffer, name)
        ]
        if left:
            shown = ", ".join(left[:5]) + ", ..." * (len(left) > 5)
            raise bad_data(
                f"{self.folder}: {len(left)} tensors have no place in this network: {shown}"
            )
