"""Muon's matrices at their owners: where each is orthogonalised, and how it gets there and back.

Newton-Schulz iterations need a full matrix. ZeRO and tensor parallelism leave a part of it on each
rank, and without them every data-parallel rank would compute the same. So each parameter has an
owner among the ranks that share it: those of ZeRO (without it, all data-parallel and context ranks)
times those of tensor parallelism. A pipeline stage has owners of its own, and so has each replica
of a sharded store. Owners follow from names and shapes alone, longest processing time first: the
costliest parameter goes to the rank with the least to do.

    on every rank   momentum of its own part, which stays there: checkpoints know no owners
      all-to-all    the look-ahead of each part goes to its owner, in 16 bits
    at the owner    orthogonalise all matrices of one shape at once
      all-to-all    each rank gets the update of its part, in 16 bits, and subtracts it

For P parameters of matrices, n ranks that share them and p parts, a rank sends

    ZeRO 1 to 3, tensor      (n - 1)/n 2P/p bytes to the owner, and as many back (p = n)
    ZeRO 0                   nothing to the owner, (n - 1)/n 2P bytes back (p = 1)
    ZeRO 0 with tensor t     (t - 1)/t 2P/n to the owner, (n - 1)/n 2P/t back (p = t)

These follow the gradients' sums, which are as without Muon, and precede the gathering of new
weights. Laying each matrix into one rank's part of a bucket instead would send nothing more, but no
layout by whole matrices divides a layer's bucket equally: of its four or five matrices, most ranks
would have none, and collectives of equal parts would carry the padding. Parts that are brought
together need no other layout, and serve rows (ZeRO 3) and tensor parallelism alike.

Rounds bound the memory: in one, an owner has at most about MUON_CHUNK elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from meshwright.optim.muon import Stacks
from meshwright.optim.rule_table import MUON_CHUNK, MatrixForm, assign, packed
from meshwright.parallel import comm, shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SharedParameter(NamedTuple):
    """A parameter that ranks share."""

    name: str
    form: MatrixForm
    is_sharded: bool  # between tensor ranks


@dataclass(frozen=True)
class Sharers:
    """The ranks that share parameters, this one among them: tensor ranks are neighbours."""

    group: ProcessGroup
    rank: int
    data: int  # data-parallel and context ranks
    tensor: int
    is_sharded: bool  # each data rank has a part
    # parameter, data rank, tensor rank -> its part
    boxes_of: Callable[[str, int, int], list[shard.Box]]

    @property
    def size(self) -> int:
        return self.data * self.tensor

    @property
    def parts(self) -> int:
        return (self.data if self.is_sharded else 1) * self.tensor

    def boxes(self, p: SharedParameter, rank: int) -> list[shard.Box]:
        """Return the part of a parameter that a rank updates."""
        return self.boxes_of(p.name, *divmod(rank, self.tensor))

    def sends(self, p: SharedParameter, rank: int, owner: int) -> bool:
        """Whether a rank sends its part to the owner; of equal parts only the nearest is sent."""
        data, tensor = divmod(rank, self.tensor)
        owner_data, owner_tensor = divmod(owner, self.tensor)
        if not self.is_sharded and data != owner_data:
            return False
        return p.is_sharded or tensor == owner_tensor


class Parcels:
    """The values of one exchange on one side: how many go to or come from each rank, and where."""

    def __init__(self, ranks: int, contents: Iterable[tuple[int, int, int]]) -> None:
        """Place (rank, parameter, elements) by rank, in their order."""
        self.sizes = [0] * ranks
        self.places = dict[tuple[int, int], slice]()
        begin = 0
        for rank, number, size in sorted(contents, key=lambda content: content[0]):
            self.places[rank, number] = slice(begin, begin + size)
            self.sizes[rank] += size
            begin += size
        self.total = begin


@dataclass(frozen=True)
class Round:
    """Parameters that are updated together."""

    members: list[int]
    sent: Parcels
    received: Parcels
    returns: list[tuple[Parcels, Parcels]]  # sent and received, some members at a time


class OwnerRanks:
    """The owners of an optimizer's parameters."""

    def __init__(self, parameters: list[SharedParameter], sharers: Sharers, steps: int) -> None:
        self.parameters = parameters
        self.sharers = sharers
        # Each step needs them again.
        self.boxes = functools.cache(lambda i, rank: sharers.boxes(parameters[i], rank))
        self.owners = dict[int, int]()
        self.rounds = list[Round]()
        # A round has so many matrices that each owner has a chunk of them; `loads` goes on from
        # round to round, so that the costs of all of them are even.
        sizes = [math.prod(p.form.shape) for p in parameters]
        loads = [0.0] * sharers.size
        for members in packed(
            range(len(parameters)),
            sizes,
            MUON_CHUNK * sharers.size,
        ):
            costs = {i: parameters[i].form.cost(steps) for i in members}
            self.owners |= assign(costs, loads)
            # A rank receives its part of each update, so that MUON_CHUNK elements arrive at a time.
            pieces = packed(members, sizes, MUON_CHUNK * sharers.parts)
            self.rounds.append(self._round(members, pieces))

    def _round(self, members: list[int], pieces: list[list[int]]) -> Round:
        s = self.sharers
        mine = {i: elements(self.boxes(i, s.rank)) for i in members}

        def at_owner(some: list[int]) -> list[tuple[int, int, int]]:
            """Return the parts (rank, member, elements) of those members that this rank owns."""
            parts = []
            for i in some:
                if self.owners[i] == s.rank:
                    sizes = [elements(self.boxes(i, rank)) for rank in range(s.size)]
                    parts += [(rank, i, size) for rank, size in enumerate(sizes)]
            return parts

        def sends(rank: int, i: int) -> bool:
            return s.sends(self.parameters[i], rank, self.owners[i])

        # To the owner: what each rank sends of its own, and what this owner receives of everyone.
        sent = [(self.owners[i], i, mine[i]) for i in members if sends(s.rank, i)]
        received = [(r, i, size) for r, i, size in at_owner(members) if sends(r, i)]
        # Back: updates go to every rank that has a part, whether it sent one or not.
        returns = []
        for some in pieces:
            own = [(self.owners[i], i, mine[i]) for i in some]
            returns.append((Parcels(s.size, at_owner(some)), Parcels(s.size, own)))
        return Round(
            members,
            Parcels(s.size, sent),
            Parcels(s.size, received),
            returns,
        )

    def collect(
        self, one_round: Round, ahead: Iterable[tuple[int, Tensor]], like: Tensor
    ) -> Stacks:
        """Send look-aheads to their owners; return this owner's, stacked by form.

        `ahead` yields the look-ahead of this rank's part of each member, `like` has their format
        and the device.
        """
        sent = one_round.sent
        received = one_round.received
        values = like.new_empty(sent.total)
        for i, look_ahead in ahead:
            place = sent.places.get((self.owners[i], i))
            if place is not None:
                values[place] = look_ahead.flatten()
        if self.sharers.parts > 1:  # else each parameter is whole where it is
            values = comm.exchange(values, sent.sizes, received.sizes, self.sharers.group)
        # Matrices of one form are orthogonalised at once, so they lie in one tensor.
        own: dict[MatrixForm, list[int]] = {}
        for i in one_round.members:
            if self.owners[i] == self.sharers.rank:
                own.setdefault(self.parameters[i].form, []).append(i)
        stacks = {}
        for form, numbers in own.items():
            stacks[form] = numbers, like.new_empty(len(numbers), *form.shape)
        copy_all(self._views(stacks, received, values))
        return stacks

    def give_back(
        self, one_round: Round, updates: Stacks, like: Tensor
    ) -> Iterator[list[tuple[int, Tensor]]]:
        """Send the updates from their owners; yield those of this rank's parts, some at a time."""
        for sent, received in one_round.returns:
            out = like.new_empty(sent.total)
            copy_all((to, value) for value, to in self._views(updates, sent, out))
            values = comm.exchange(out, sent.sizes, received.sizes, self.sharers.group)
            # A rank without a part of a matrix receives nothing of it.
            parts = []
            for (_, i), place in received.places.items():
                if place.start < place.stop:
                    parts.append((i, values[place]))
            yield parts

    def _views(
        self, stacks: Stacks, parcels: Parcels, flat: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each box of stacked parameters, and where its values are in the parcels."""
        own: dict[int, Tensor] = {}
        for numbers, stack in stacks.values():
            own.update(zip(numbers, stack, strict=True))
        for (rank, i), place in parcels.places.items():
            if i not in own:
                continue
            begin = place.start
            for offsets, sizes in self.boxes(i, rank):
                box = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
                end = begin + math.prod(sizes)
                yield own[i][box], flat[begin:end].view(sizes)
                begin = end


def elements(boxes: list[shard.Box]) -> int:
    return sum(math.prod(sizes) for _, sizes in boxes)


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first."""
    if pairs := list(pairs):
        torch._foreach_copy_([to for to, _ in pairs], [value for _, value in pairs])
