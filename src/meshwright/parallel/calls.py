"""Calls of rank 0 that every rank carries out: rank 0 reads and prints, all ranks compute.

A call is the name of an action, which every rank has registered, with small tensors of the host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.ranks.team import Team

END = ""  # the action after which the others leave
FOREVER = timedelta(days=365)  # a person may think about the next prompt


class Calls:
    """The actions of all ranks of a team, which rank 0 calls and the others follow."""

    def __init__(self, team: Team) -> None:
        self.team = team.clone(FOREVER)
        self.actions: dict[str, Callable[..., Any]] = {}

    def call(self, name: str, *tensors: Tensor) -> Any:
        """Run an action on every rank with rank 0's tensors of int64; return rank 0's result."""
        if self.team.size > 1:
            self._send(name, tensors)
        return self.actions[name](*tensors)

    def follow(self) -> bool:
        """Carry out what rank 0 calls, until it ends; return whether it succeeded."""
        while True:
            name, tensors = self._receive()
            if name == END:
                (succeeded,) = tensors
                return bool(succeeded)
            self.actions[name](*tensors)

    def end(self, succeeded: bool) -> None:
        """Let the other ranks leave."""
        if self.team.size > 1:
            self._send(END, (torch.tensor(int(succeeded)),))

    def sum(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors of the host."""
        self.team.sum(x)
        return x

    def _send(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        # The name and the shapes as JSON, padded to whole numbers of int64, then the numbers.
        shapes = [list(x.shape) for x in tensors]
        text = json.dumps([name, *shapes]).encode()
        text += b" " * (-len(text) % 8)
        head = torch.frombuffer(bytearray(text), dtype=torch.int64)
        numbers = [x.flatten() for x in tensors]
        body = torch.cat([head, *numbers])
        # Others must know how much to expect before they can receive it.
        sizes = torch.tensor([len(head), len(body)])
        self.team.broadcast(sizes)
        self.team.broadcast(body)

    def _receive(self) -> tuple[str, list[Tensor]]:
        sizes = torch.empty(2, dtype=torch.int64)
        self.team.broadcast(sizes)
        begin, length = sizes.tolist()
        body = torch.empty(length, dtype=torch.int64)
        self.team.broadcast(body)
        name, *shapes = json.loads(body[:begin].numpy().tobytes())
        tensors = []
        for shape in shapes:
            end = begin + math.prod(shape)
            tensors.append(body[begin:end].view(shape))
            begin = end
        return name, tensors
