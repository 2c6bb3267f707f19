"""Which blend a run reads from which sample on: what a checkpoint remembers of its training data, and what may change in it.

From the sample of a change on the new shares hold, and every data set goes on at the sample after its last used one, in its
own order. A data set's order is fixed when it first takes part, as Megatron would build it for the need known then. Where a
change makes a need larger, all epochs of that order are read to their end, and then further ones, each shuffled by itself
(changing.py); Megatron would build a longer order, in which samples that were seen come again and others never.

A data set is known by the fingerprint of its files, not by their place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.console import say
from meshwright.data.blend import samples_needed
from meshwright.data.format.indexed import fingerprint
from meshwright.data.plan import Part
from meshwright.errors import USAGE, UserError


@dataclass(frozen=True)
class Known:
    """A data set that has taken part."""

    prefix: str
    documents: tuple[int, int]  # first and end
    weight: float | None  # as given
    samples: int  # asked for when its order was made


@dataclass(frozen=True)
class Blended:
    """From this sample of the run on, these shares of the data sets, in the order that decides between equals."""

    begin: int
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class History:
    sources: dict[str, Known]
    blends: tuple[Blended, ...]

    def state(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        known = {n: [k.prefix, list(k.documents), k.weight, k.samples] for n, k in self.sources.items()}
        return {"sources": known, "blends": [[b.begin, [list(pair) for pair in b.shares]] for b in self.blends]}

    @classmethod
    def of(cls, state: dict[str, Any] | None) -> History | None:
        """None of a checkpoint that remembers none: an older one, or of random tokens."""
        if state is None:
            return None
        known = {n: Known(prefix, (first, end), w, k) for n, (prefix, (first, end), w, k) in state["sources"].items()}
        blends = [Blended(begin, tuple((n, share) for n, share in pairs)) for begin, pairs in state["blends"]]
        return cls(known, tuple(blends))

    def lines(self, most: int = 8) -> list[str]:
        """For people."""
        out = []
        for one in self.blends:
            told = [f"{share:.4g} {self.sources[name].prefix}" for name, share in one.shares[:most]]
            more = [f"and {len(one.shares) - most} more"] if len(one.shares) > most else []
            out.append(f"blend from sample {one.begin} on: {', '.join([*told, *more])}")
        return out


def names(parts: Sequence[Part]) -> list[str]:
    """Of each its own; files that are alike are told apart by their order."""
    seen: Counter[str] = Counter()
    out = []
    for part in parts:
        name = fingerprint(part.prefix)
        seen[name] += 1
        out.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return out


def begin(parts: Sequence[Part]) -> History:
    called = names(parts)
    known = {
        name: Known(p.prefix, (p.documents.start, p.documents.stop), p.source.weight, p.samples)
        for name, p in zip(called, parts, strict=True)
    }
    return History(known, (Blended(0, tuple((n, p.share) for n, p in zip(called, parts, strict=True))),))


def follow(past: History | None, parts: Sequence[Part], size: int, consumed: int, change_at: str | None) -> History:
    """The history that a run of `size` samples goes on with; another blend is refused unless a sample is said for it."""
    now = begin(parts)
    if past is None:
        if consumed and change_at is not None:
            raise UserError(
                "--blend-change-at: the checkpoint does not remember its blend, being older than this; without the flag it "
                "goes on with the blend given, from the same sample number on"
            )
        return now
    last = past.blends[-1]
    if is_same(last, now.blends[0]):
        if change_at not in (None, "now", str(last.begin)):
            raise UserError(
                f"--blend-change-at {change_at}: the blend given holds from sample {last.begin} on already: leave the flag "
                "out, or give another blend"
            )
        return now_told(past, now)
    if len(past.blends) == 1 and change_at is None and as_written(past) == as_written(now):
        return now  # the files have other contents, which resume.py tells
    if change_at is None:
        raise UserError(refusal(past, now, consumed))
    return changed(past, now, size, consumed, consumed if change_at == "now" else int(change_at))


def is_same(one: Blended, other: Blended) -> bool:
    """The same data sets in the same proportion, in whichever order they were said."""
    mine, theirs = dict(one.shares), dict(other.shares)
    return mine.keys() == theirs.keys() and all(math.isclose(mine[n], theirs[n], rel_tol=1e-12) for n in mine)


def as_written(history: History) -> list[tuple[str, float | None]]:
    return [(known.prefix, known.weight) for known in history.sources.values()]


def now_told(past: History, now: History) -> History:
    """The past, with the places where its files lie today. One blend alone is built anew, for the need of today."""
    if len(past.blends) == 1 and past.blends[0].shares == now.blends[0].shares:
        return now
    for name, known in now.sources.items():
        require_documents(past.sources[name], known)
    if len(past.blends) == 1:  # said in another order: the first one decides between equals
        return History({n: now.sources[n] for n in past.sources}, past.blends)
    there = {n: replace(k, prefix=now.sources[n].prefix) if n in now.sources else k for n, k in past.sources.items()}
    return History(there, past.blends)


def changed(past: History, now: History, size: int, consumed: int, at: int) -> History:
    """Another blend from sample `at` on; one that was to come after it does not come."""
    if at < consumed:
        raise UserError(
            f"--blend-change-at {at}: {consumed} samples are used already; give {consumed} (or now), or a later sample"
        )
    sources = dict(past.sources)
    for name, share in now.blends[0].shares:
        samples = samples_needed(max(size - at, 1), share)
        if name in sources:
            require_documents(sources[name], now.sources[name])
            samples = sources[name].samples
        sources[name] = replace(now.sources[name], samples=samples)
    kept = tuple(b for b in past.blends if b.begin < at)
    new = Blended(at, now.blends[0].shares)
    out = History(sources, kept if kept and is_same(kept[-1], new) else (*kept, new))
    say(f" > the blend changes at sample {at}:")
    for line in out.lines():
        say(f" >   {line}")
    return out


def require_documents(before: Known, now: Known) -> None:
    if before.documents != now.documents:
        raise UserError(
            f"{now.prefix}: the training set has documents {now.documents[0]} to {now.documents[1]} of it, in the checkpoint "
            f"{before.documents[0]} to {before.documents[1]}: with another --split or range its samples would be others, "
            "some to come again and some never; give the checkpoint's",
            USAGE,
        )


def refusal(past: History, now: History, consumed: int) -> str:
    """What is different, and both ways out."""
    before, after = dict(past.blends[-1].shares), dict(now.blends[0].shares)
    told = [f"{past.sources[n].prefix} is not in it" for n in before if n not in after]
    told += [f"{now.sources[n].prefix} is new" for n in after if n not in before]
    told += [
        f"{now.sources[n].prefix} has the share {after[n]:.4g}, it had {before[n]:.4g}"
        for n in after
        if n in before and not math.isclose(before[n], after[n], rel_tol=1e-12)
    ]
    more = [f"and {len(told) - 8} more"] if len(told) > 8 else []
    return (
        f"the training data are not blended as in the checkpoint: {'; '.join([*told[:8], *more])}. Read from its beginning, "
        f"another blend would repeat some samples and leave out others: give the checkpoint's blend, or --blend-change-at now "
        f"(or a sample from {consumed} on) to go over to this one there, each data set going on after its last used sample"
    )
