"""Compare the weights that several ranks hold copies of, bit for bit, while the run goes on.

Data-parallel ranks update their copies alike, and tensor ranks those parameters that are not cut. A
copy that differs, by a bad memory cell, a bad unit of arithmetic or a defect, would spoil every
later step and checkpoint unseen.

Every --check-replicas-interval steps each rank hashes what it holds, on its device, and the ranks
exchange the hashes: 8 bytes for each kind of copy. All ranks read the same table, so they decide
alike. On an accelerator it is read one step later, when it has long arrived. Before a save the
weights are compared at once.

With ZeRO 1 and 2 the gathered weights are compared; masters only between replicas of the shards.
With ZeRO 3 nothing is held twice except by such replicas and by tensor ranks.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright import device as devices
from meshwright.errors import UNEXPECTED, UserError
from meshwright.parallel import comm
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.store import Store
from meshwright.ranks.team import Team
from meshwright.training.step import Network

WIDTH = 4096  # words that share a row of multipliers
ROWS = 1024  # of words that are hashed at once: the products take 32 MiB
ODD = 0x1E3779B97F4A7C15
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Copies:
    """Tensors that the ranks of each group hold alike."""

    what: str
    groups: list[list[int]]
    tensors: dict[str, Tensor]  # by parameter
    flat: Tensor | None = None  # all of them in one

    def digest(self, device: torch.device) -> Tensor:
        return digest(self.tensors.values() if self.flat is None else [self.flat], device)


def copies_in(store: Store) -> list[Copies]:
    """Return what this layout holds more than once: the same kinds on every rank."""
    layout, held = store.layout, store.weights_by_name()
    weights = Copies("weights", layout.members(*store.sharding.replicated), held)
    kinds = [weights]
    if isinstance(store, FlatStore):
        weights.groups, weights.flat = layout.members("replicas", "shard", "cp"), store.weights
        if store.master is not store.weights and not store.offload:
            ranges = ((name, *store.local_range(name)) for name in held)
            parts = {name: store.master[begin : begin + high - low] for name, begin, low, high in ranges}
            kinds.append(Copies("master weights", layout.members(*store.sharding.replicated), parts, store.master))
    uncut = {name: x for name, x in held.items() if not store.sharding.is_cut(name)}
    kinds.append(Copies("weights", layout.members("tp"), uncut))
    if store.sharding.tied:  # the first and the last stage have the token table
        ends = [sorted({g[0], g[-1]}) for g in layout.members("pp")]
        table = {name: x for name, x in held.items() if name == "wte.weight"}
        kinds.append(Copies("token tables", ends, table))
    return [kind for kind in kinds if any(len(group) > 1 for group in kind.groups)]


def words(x: Tensor) -> Tensor:
    """Return a tensor's bits as integers, in pairs where its values have 2 bytes."""
    x, size = x.detach().reshape(-1), x.element_size()
    if size == 2 and x.numel() % 2 == 0 and x.storage_offset() % 2 == 0:
        size = 4
    return x.view(INTEGERS[size])


def multipliers(count: int, device: torch.device) -> Tensor:
    """Return an odd number for each place, so that no bit's change is lost modulo 2^64."""
    return (2 * torch.arange(count, device=device) + 1) * ODD


@torch.no_grad()
def digest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a hash [] int64 of the tensors' exact bits: a sum of products, modulo 2^64."""
    sums = [torch.zeros(1, dtype=torch.int64, device=device)]
    for bits in map(words, joined(tensors)):
        factors = multipliers(WIDTH, bits.device)
        even = len(bits) - len(bits) % WIDTH
        blocks = torch.split(bits[:even].view(-1, WIDTH), ROWS)
        sums += [(block * factors).sum(1).to(device) for block in blocks]
        sums.append((bits[even:] * factors[: len(bits) - even]).sum()[None].to(device))
    rows = torch.cat(sums)
    return (rows * multipliers(len(rows), device)).sum()


def joined(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors flat; small ones together, which takes fewer kernels."""
    small: list[Tensor] = []
    for x in tensors:
        if x.numel() < WIDTH * ROWS:
            small.append(x.reshape(-1))
        else:
            yield x
        if sum(x.numel() for x in small) >= WIDTH * ROWS:
            yield torch.cat(small)
            small = []
    if small:
        yield torch.cat(small)


class Replicas:
    """The comparisons of one run."""

    def __init__(self, net: Network, team: Team, every: int, saves_to: str | None = None) -> None:
        self.net, self.team, self.every, self.saves_to = net, team, every, saves_to
        self.copies = copies_in(net.store) if every else []
        self.pending: tuple[int, Callable[[], list[float]]] | None = None

    def after(self, iteration: int, at_once: bool) -> None:
        """Look at the last comparison, and begin one if this step is due."""
        self.look()
        if self.copies and iteration % self.every == 0:
            self.begin(iteration)
            if at_once:
                self.look()

    def require_equal(self, iteration: int) -> None:
        """Compare the weights now, which are about to be saved."""
        self.look()
        if self.copies:
            self.begin(iteration)
            self.look()

    def begin(self, iteration: int) -> None:
        """Hash the weights and exchange the hashes, without waiting for the device."""
        device = self.net.device
        with devices.on_stream(self.net.stream):
            self.net.store.wait_for_weights()
            mine = torch.stack([kind.digest(device) for kind in self.copies])
            table = mine[None]
            if self.net.layout.world > 1:
                table = mine.new_empty(self.net.layout.world, len(mine))
                comm.gather_into(table.view(-1), mine)
            self.pending = iteration, devices.start_read(table)

    def look(self) -> None:
        """Raise UserError on every rank if the copies of the last comparison differ."""
        if self.pending is None:
            return
        (iteration, read), self.pending = self.pending, None
        table = read()
        for number, kind in enumerate(self.copies):
            for group in kind.groups:
                if len({table[rank][number] for rank in group}) > 1:  # type: ignore[index]
                    raise self.explain(iteration, kind)

    def forget(self) -> None:
        """Forget the last comparison: the step that it was made after does not count."""
        self.pending = None

    def explain(self, iteration: int, kind: Copies) -> UserError:
        """Find out which ranks hold which parameters differently; every rank calls this."""
        mine = {name: int(digest([x], x.device)) for name, x in kind.tensors.items()}
        everyone = self.team.gather([socket.gethostname(), mine])
        wrong: dict[str, tuple[list[int], int]] = {}  # parameter -> ranks that differ, ranks that agree
        for group in kind.groups:
            for name in everyone[group[0]][1]:
                held = Counter(everyone[rank][1].get(name) for rank in group)
                (common, most), *others = held.most_common()
                if others and name not in wrong:
                    is_split = others[0][1] == most
                    ranks = [r for r in group if is_split or everyone[r][1].get(name) != common]
                    wrong[name] = ranks, 0 if is_split else most
        first, (ranks, agreeing) = next(iter(wrong.items()), ("none any more", ([], 0)))
        shown = ", ".join(f"rank {rank} ({everyone[rank][0]})" for rank in ranks[:4]) + ", ..." * (len(ranks) > 4)
        more = f" and {len(wrong) - 1} other parameters" * (len(wrong) > 1)
        if agreeing:
            what = f"{shown} has other {kind.what} than {agreeing} ranks that agree: {first}{more}"
        else:
            what = f"{shown} have different {kind.what}, and no majority shows which are right: {first}{more}"
        kept = f"; nothing was saved since they were equal: go on from {self.saves_to}" * bool(self.saves_to)
        advice = "check the memory of that machine"
        return UserError(f"iteration {iteration}: {what}{kept}; {advice}", UNEXPECTED, everywhere=True)
