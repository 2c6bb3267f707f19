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

from meshwright.base import device as devices
from meshwright.base.errors import UNEXPECTED, UserError
from meshwright.parallel import comm
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.store import Store
from meshwright.runtime.ranks.team import Team
from meshwright.training.micro_step import Network

WIDTH = 4096  # words that share a row of multipliers
ROWS = 1024  # rows of words that are hashed at once: the products take 32 MiB
NAMED = 4  # ranks that an error names
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
    layout = store.layout
    named = store.weights_by_name()

    # Weights, which ranks that differ only in their data hold alike under any store.
    of_replicas = layout.members(*store.sharding.replicated)
    weights = Copies("weights", of_replicas, named)
    kinds = [weights]
    if isinstance(store, FlatStore):
        # Whatever ZeRO 1 and 2 cut, each rank of these groups has all weights, in one tensor.
        weights.groups = layout.members("replicas", "shard", "cp")
        weights.flat = store.weights
        if store.master is not store.weights and not store.offload:
            # ZeRO cuts the masters; the replicas of a shard hold the same ones.
            parts = {}
            for name in named:
                begin, low, high = store.local_range(name)
                end = begin + high - low
                parts[name] = store.master[begin:end]
            kinds.append(Copies("master weights", of_replicas, parts, store.master))

    # Weights that tensor ranks hold uncut, such as those of norms.
    uncut = {name: x for name, x in named.items() if not store.sharding.is_sharded(name)}
    kinds.append(Copies("weights", layout.members("tp"), uncut))
    if store.sharding.tied:  # the first and the last stage have the token table
        ends = [sorted({stages[0], stages[-1]}) for stages in layout.members("pp")]
        table = {name: x for name, x in named.items() if name == "wte.weight"}
        kinds.append(Copies("token tables", ends, table))
    return [kind for kind in kinds if any(len(group) > 1 for group in kind.groups)]


def words(x: Tensor) -> Tensor:
    """Return a tensor's bits as integers, in pairs where its values have 2 bytes."""
    x = x.detach().reshape(-1)
    size = x.element_size()
    # Half as many products; a view as 4 bytes must begin and end at a multiple of them.
    if size == 2 and x.numel() % 2 == 0 and x.storage_offset() % 2 == 0:
        size = 4
    return x.view(INTEGERS[size])


def multipliers(count: int, device: torch.device) -> Tensor:
    """Return an odd number for each place, so that no bit's change is lost modulo 2^64."""
    return (2 * torch.arange(count, device=device) + 1) * ODD


@torch.no_grad()
def digest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a hash [] int64 of the tensors' exact bits: a sum of products, modulo 2^64."""
    # Sums of integers are the same in any order, and so on any device.
    sums = [torch.zeros(1, dtype=torch.int64, device=device)]
    for tensor in joined(tensors):
        bits = words(tensor)
        factors = multipliers(WIDTH, bits.device)
        rest = len(bits) % WIDTH
        even = len(bits) - rest
        # Whole rows, a block of them at a time.
        rows_of_words = bits[:even].view(-1, WIDTH)
        for block in torch.split(rows_of_words, ROWS):
            of_rows = (block * factors).sum(1)
            sums.append(of_rows.to(device))
        # The rest, which fills no row.
        of_rest = (bits[even:] * factors[:rest]).sum()
        sums.append(of_rest[None].to(device))
    # The rows have factors too, so that two rows that are exchanged are found.
    rows = torch.cat(sums)
    return (rows * multipliers(len(rows), device)).sum()


def joined(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors flat; small ones together, which takes fewer kernels."""
    small: list[Tensor] = []
    elements = 0
    for x in tensors:
        if x.numel() >= WIDTH * ROWS:
            yield x
            continue
        small.append(x.reshape(-1))
        elements += x.numel()
        if elements >= WIDTH * ROWS:
            yield torch.cat(small)
            small, elements = [], 0
    if small:
        yield torch.cat(small)


class Replicas:
    """The comparisons of one run; a hook of the loop.

    The hashes are read after the next step, or with `at_once` after the same one.
    """

    between_steps = False

    def __init__(
        self,
        net: Network,
        team: Team,
        copies: list[Copies],
        every: int,
        saves_to: str | None,
        at_once: bool,
    ) -> None:
        self.net, self.team, self.copies = net, team, copies
        self.every, self.saves_to, self.at_once = every, saves_to, at_once
        self.pending: tuple[int, Callable[[], list[float]]] | None = None

    def due(self, step: int) -> bool:
        return self.pending is not None or step % self.every == 0

    def run(self, step: int) -> None:
        """Look at the last comparison, and begin the next one every so many steps."""
        self.look()
        if step % self.every == 0:
            self.begin(step)
            if self.at_once:
                self.look()

    def require_equal(self, iteration: int) -> None:
        """Compare the weights now, as they are about to be saved."""
        self.look()
        self.begin(iteration)
        self.look()

    def begin(self, iteration: int) -> None:
        """Hash the weights and exchange the hashes, without waiting for the device."""
        device = self.net.device
        with devices.on_stream(self.net.stream):
            self.net.store.wait_for_weights()
            hashes = torch.stack([kind.digest(device) for kind in self.copies])
            table = hashes[None]
            if self.net.layout.world > 1:
                table = hashes.new_empty(self.net.layout.world, len(hashes))
                comm.gather_into(table.view(-1), hashes)
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
        own = {name: int(digest([x], x.device)) for name, x in kind.tensors.items()}
        everyone = self.team.gather([socket.gethostname(), own])
        hosts = [host for host, _ in everyone]
        hashes = [of_rank for _, of_rank in everyone]
        wrong = find_differing(kind.groups, hashes)

        kept = ""
        if self.saves_to:
            kept = f"; nothing was saved since they were equal: go on from {self.saves_to}"
        if not wrong:
            what = f"the copies of the {kind.what} differed and are equal again: suspect the memory of a GPU{kept}"
            return UserError(f"iteration {iteration}: {what}", UNEXPECTED, everywhere=True)
        first, (ranks, agreeing) = next(iter(wrong.items()))
        if agreeing:
            differ = f"{kind.what} that differ from the other {agreeing} copies"
        else:
            differ = f"different {kind.what}, and no majority shows which are right"
        more = f" and {len(wrong) - 1} other parameters" if len(wrong) > 1 else ""
        holders = name_ranks(ranks, hosts)
        what = f"{holders} {differ}, first in {first}{more}{kept}; check the memory of that machine"
        return UserError(f"iteration {iteration}: {what}", UNEXPECTED, everywhere=True)


def find_differing(
    groups: list[list[int]], hashes: list[dict[str, int]]
) -> dict[str, tuple[list[int], int]]:
    """Return parameter -> the ranks that differ from the majority, and how many agree.

    Where no majority is larger than the next group, all ranks differ and none agrees.
    """
    wrong: dict[str, tuple[list[int], int]] = {}
    for group in groups:
        for name in hashes[group[0]]:
            counts = Counter(hashes[rank].get(name) for rank in group)
            (common, agreeing), *others = counts.most_common()
            if not others or name in wrong:
                continue
            if others[0][1] == agreeing:
                wrong[name] = list(group), 0
            else:
                wrong[name] = [r for r in group if hashes[r].get(name) != common], agreeing
    return wrong


def name_ranks(ranks: list[int], hosts: list[str]) -> str:
    """Return the subject and verb of what ranks hold, with the hosts of the first ones."""
    named = [f"{rank} ({hosts[rank]})" for rank in ranks[:NAMED]]
    if len(ranks) > NAMED:
        named.append(f"{len(ranks) - NAMED} more")
    *others, last = named
    if not others:
        return f"rank {last} holds"
    return f"ranks {', '.join(others)} and {last} hold"
