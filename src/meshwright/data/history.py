"""How the training blend changes: the blends that a checkpoint remembers, and how a run continues.

From the sample of a change on, the new shares hold, and every data set continues after its last
used sample, in its own order. That order is fixed when the data set first takes part, as Megatron
would build it for the number of samples needed then. Where a change needs more, it is read to its
end, and then further epochs, each shuffled apart (datasets.build_phases); Megatron would build a
longer order, in which some used samples come again and others never come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.base.console import notice, remark
from meshwright.base.errors import USAGE, UserError
from meshwright.base.storage.addresses import shown
from meshwright.config.problem import SettingsError
from meshwright.config.schema import Data
from meshwright.data.blend import normalise, samples_needed
from meshwright.data.files.indexed import fingerprint
from meshwright.data.sets import SetPart


@dataclass(frozen=True)
class BlendSource:
    """A data set that has taken part in the training."""

    prefix: str
    documents: tuple[int, int]  # first and end
    weight: float | None  # as given
    samples: int  # asked for when its order was made


@dataclass(frozen=True)
class BlendPhase:
    """A blend from a sample of the run on: shares, in the order that decides between equals."""

    begin: int
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class BlendHistory:
    """The blends of a training set, and the data sets that took part in any of them."""

    sources: dict[str, BlendSource]  # by the fingerprint of the files, not by their path
    blends: tuple[BlendPhase, ...]

    def state(self) -> dict[str, Any]:
        """Return the history as JSON, for a checkpoint."""
        sources = {
            n: [s.prefix, list(s.documents), s.weight, s.samples] for n, s in self.sources.items()
        }
        return {
            "sources": sources,
            "blends": [[b.begin, [list(pair) for pair in b.shares]] for b in self.blends],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> BlendHistory | None:
        """Return a checkpoint's history; None if it is too old for one, or of random tokens."""
        if state is None:
            return None
        saved = state["sources"].items()
        sources = {
            n: BlendSource(prefix, (a, b), weight, count)
            for n, (prefix, (a, b), weight, count) in saved
        }
        return cls(
            sources,
            tuple(BlendPhase(begin, tuple(map(tuple, pairs))) for begin, pairs in state["blends"]),
        )

    def lines(self) -> list[str]:
        """Describe each blend in a line."""
        out = []
        for phase in self.blends:
            shares = [f"{share:.4g} {self.sources[name].prefix}" for name, share in phase.shares]
            out.append(f"blend from sample {phase.begin} on: {', '.join(first_eight(shares))}")
        return out


def first_eight(items: list[str]) -> list[str]:
    return [*items[:8], f"and {len(items) - 8} more"] if len(items) > 8 else items


def unique_names(parts: Sequence[SetPart]) -> list[str]:
    """Return a name for each part; parts with equal files are numbered in their order."""
    names = [fingerprint(part.prefix) for part in parts]
    counts = [names[: n + 1].count(name) for n, name in enumerate(names)]
    return [
        name if count == 1 else f"{name}#{count}" for name, count in zip(names, counts, strict=True)
    ]


def begin_history(parts: Sequence[SetPart], size: int, d: Data) -> BlendHistory:
    """Return the blends that the flags give a run of `size` samples."""
    named = dict(zip(unique_names(parts), parts, strict=True))
    phases = [
        BlendPhase(0, tuple((name, part.share) for name, part in named.items() if part.share))
    ]
    for stage in d.blend_stages:
        begin = stage.first_sample(size, d.seq_length or 1)
        if begin <= phases[-1].begin:
            raise SettingsError(
                f"{{blend_stages}}: the stage from {stage.start} on begins at sample {begin}, the blend before it at "
                f"{phases[-1].begin}; give stages in their order"
            )
        given = dict(stage.weights)
        weights = [
            (name, weight)
            for name, part in named.items()
            if (weight := given.get(part.source.prefix))
        ]
        if not weights:
            raise SettingsError(
                f"{{blend_stages}}: no data set of the stage from {stage.start} on has documents for training"
            )
        shares = normalise([weight for _, weight in weights])
        phases.append(
            BlendPhase(
                begin,
                tuple((name, share) for (name, _), share in zip(weights, shares, strict=True)),
            )
        )
    needed = dict.fromkeys(named, 0)
    ends = [min(phase.begin, size) for phase in phases[1:]] + [size]
    for phase, end in zip(phases, ends, strict=True):
        for name, share in phase.shares:
            needed[name] += samples_needed(max(end - phase.begin, 0), share)
    sources = {
        name: BlendSource(
            shown(p.prefix),
            (p.documents.start, p.documents.stop),
            p.source.weight,
            p.samples if len(phases) == 1 else max(1, needed[name]),
        )
        for name, p in named.items()
    }
    return BlendHistory(sources, tuple(phases))


def continue_history(
    past: BlendHistory | None, parts: Sequence[SetPart], size: int, consumed: int, d: Data
) -> BlendHistory:
    """Return the history with which a run of `size` samples continues.

    Another blend than the checkpoint's is refused, unless --blend-change-at gives its first sample.
    """
    now, change_at = begin_history(parts, size, d), d.blend_change_at
    if d.blend_stages:
        return continue_stages(past, now, size, consumed)
    if past is None:
        if consumed and change_at is not None:
            raise SettingsError(
                "{blend_change_at}: the checkpoint is too old to remember its blend; leave it out, and the run "
                "continues with the blend given, from the same sample number on"
            )
        return now
    last = past.blends[-1]
    if is_same_blend(last, now.blends[0]):
        if change_at not in (None, "now", str(last.begin)):
            raise SettingsError(
                f"{{blend_change_at={change_at}}}: the blend given holds from sample {last.begin} on already; leave "
                "the flag out, or give another blend"
            )
        return update_paths(past, now)
    if (
        len(past.blends) == 1
        and change_at is None
        and prefixes_and_weights(past) == prefixes_and_weights(now)
    ):
        return now  # the same files with other contents: resume.py reports that
    if change_at is None:
        raise UserError(explain_refusal(past, now, consumed))
    return change_blend(
        past, now, size, consumed, consumed if change_at == "now" else int(change_at)
    )


def continue_stages(
    past: BlendHistory | None, now: BlendHistory, size: int, consumed: int
) -> BlendHistory:
    """Return the history of a run with --blend-stages, which is new or has had them before."""
    for phase in now.blends:
        if phase.begin >= size:
            notice(
                f"--blend-stages: the stage from sample {phase.begin} on is not reached; the run has {size} samples"
            )
    if past is None:
        if consumed:
            raise SettingsError(
                "{blend_stages}: the checkpoint remembers no blend; leave it out, and the run continues with the "
                "blend given, from the same sample number on"
            )
        for line in now.lines():
            remark(f" > {line}")
        return now
    pairs = list(zip(past.blends, now.blends, strict=False))
    if len(past.blends) != len(now.blends) or not all(
        a.begin == b.begin and is_same_blend(a, b) for a, b in pairs
    ):
        raise SettingsError(
            f"{{blend_stages}}: the stages are not the checkpoint's: {'; '.join(past.lines())}; now: "
            f"{'; '.join(now.lines())}. Give the same ones (with BEGIN as a sample if the run's length has changed), "
            "or leave it out and give one blend with {blend_change_at}"
        )
    for name, source in now.sources.items():
        require_same_documents(past.sources[name], source)
    kept = {
        name: replace(source, prefix=now.sources[name].prefix)
        for name, source in past.sources.items()
    }
    return BlendHistory(kept, past.blends)


def is_same_blend(a: BlendPhase, b: BlendPhase) -> bool:
    """Return whether both have the same data sets in the same proportions, in any order."""
    ours, theirs = dict(a.shares), dict(b.shares)
    return ours.keys() == theirs.keys() and all(
        math.isclose(ours[n], theirs[n], rel_tol=1e-12) for n in ours
    )


def prefixes_and_weights(history: BlendHistory) -> list[tuple[str, float | None]]:
    return [(source.prefix, source.weight) for source in history.sources.values()]


def update_paths(past: BlendHistory, now: BlendHistory) -> BlendHistory:
    """Return the past with today's paths of its files."""
    if len(past.blends) == 1 and past.blends[0].shares == now.blends[0].shares:
        return now  # with a new order, for the number of samples needed today
    for name, source in now.sources.items():
        require_same_documents(past.sources[name], source)
    if len(past.blends) == 1:  # given in another order: the past order decides between equals
        return BlendHistory({n: now.sources[n] for n in past.sources}, past.blends)
    sources = {
        n: replace(k, prefix=now.sources[n].prefix) if n in now.sources else k
        for n, k in past.sources.items()
    }
    return BlendHistory(sources, past.blends)


def change_blend(
    past: BlendHistory, now: BlendHistory, size: int, consumed: int, at: int
) -> BlendHistory:
    """Return the history with another blend from sample `at` on, and no later changes."""
    if at < consumed:
        raise SettingsError(
            f"{{blend_change_at={at}}}: {consumed} samples are used already; "
            f"give {consumed} (or now), or a later sample"
        )
    sources = dict(past.sources)
    for name, share in now.blends[0].shares:
        samples = samples_needed(max(size - at, 1), share)
        if name in sources:
            require_same_documents(sources[name], now.sources[name])
            samples = sources[name].samples
        sources[name] = replace(now.sources[name], samples=samples)
    earlier = tuple(b for b in past.blends if b.begin < at)
    new = BlendPhase(at, now.blends[0].shares)
    out = BlendHistory(
        sources, earlier if earlier and is_same_blend(earlier[-1], new) else (*earlier, new)
    )
    remark(f" > the blend changes at sample {at}:")
    for line in out.lines():
        remark(f" >   {line}")
    return out


def require_same_documents(before: BlendSource, now: BlendSource) -> None:
    if before.documents != now.documents:
        raise SettingsError(
            f"{now.prefix}: the training set has documents {now.documents[0]} to {now.documents[1]} of it, in the "
            f"checkpoint {before.documents[0]} to {before.documents[1]}; give the checkpoint's {{split}} or range, "
            "because with another one some samples would come again and some never",
            USAGE,
        )


def explain_refusal(past: BlendHistory, now: BlendHistory, consumed: int) -> str:
    """Say how the blends differ, and name both ways out."""
    before, after = dict(past.blends[-1].shares), dict(now.blends[0].shares)
    changes = [f"{past.sources[n].prefix} is not in it" for n in before if n not in after]
    changes += [f"{now.sources[n].prefix} is new" for n in after if n not in before]
    changes += [
        f"{now.sources[n].prefix} has the share {after[n]:.4g}, it had {before[n]:.4g}"
        for n in after
        if n in before and not math.isclose(before[n], after[n], rel_tol=1e-12)
    ]
    return (
        f"the training data are not blended as in the checkpoint: {'; '.join(first_eight(changes))}. Read from its "
        "beginning, another blend would repeat some samples and leave out others; give the checkpoint's blend, or "
        f"--blend-change-at now (or a sample from {consumed} on) to change to this one, each data set continuing "
        "after its last used sample, or --finetune, with a --save of its own, to begin anew from the weights"
    )
