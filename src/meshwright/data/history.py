"""How the training blend changes: the blends that a checkpoint remembers, and how a run continues.

From the sample of a change on, the new shares hold, and every data set continues after its last
used sample, in its own order. That order is fixed when the data set first takes part, as Megatron
would build it for the number of samples needed then. Where a change needs more, it is read to its
end, and then further epochs, each shuffled apart (datasets.build_phases); Megatron would build a
longer order, in which some used samples come again and others never come.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.base.console import notice, remark
from meshwright.base.errors import USAGE, UserError
from meshwright.base.storage.addresses import shown
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TrainConfig
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
        sources = {}
        for name, source in self.sources.items():
            documents = list(source.documents)
            sources[name] = [source.prefix, documents, source.weight, source.samples]
        blends = [[blend.begin, list(map(list, blend.shares))] for blend in self.blends]
        return {"sources": sources, "blends": blends}

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> BlendHistory | None:
        """Return a checkpoint's history; None if it has none: another program's, or mock data."""
        if state is None:
            return None
        sources = {}
        for name, (prefix, (first, end), weight, samples) in state["sources"].items():
            sources[name] = BlendSource(prefix, (first, end), weight, samples)
        blends = [BlendPhase(begin, tuple(map(tuple, pairs))) for begin, pairs in state["blends"]]
        return cls(sources, tuple(blends))

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
    names = []
    counts = Counter[str]()
    for part in parts:
        name = fingerprint(part.prefix)
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return names


def begin_history(parts: Sequence[SetPart], size: int, c: TrainConfig) -> BlendHistory:
    """Return the blends that the flags give a run of `size` samples."""
    # The blend from the beginning on, and those of --blend-stages.
    named = dict(zip(unique_names(parts), parts, strict=True))
    first = tuple((name, part.share) for name, part in named.items() if part.share)
    phases = [BlendPhase(0, first)]
    for stage in c.data.blend_stages:
        begin = stage.first_sample(size, c.samples_with)
        if begin <= phases[-1].begin:
            raise SettingsError(
                f"{{blend_stages}}: the stage from {stage.start} on begins at sample {begin}, the blend before it at "
                f"{phases[-1].begin}; give stages in their order"
            )
        given = dict(stage.weights)
        weights = {}
        for name, part in named.items():
            if weight := given.get(part.source.prefix):
                weights[name] = weight
        if not weights:
            raise SettingsError(
                f"{{blend_stages}}: no data set of the stage from {stage.start} on has documents for training"
            )
        shares = normalise(list(weights.values()))
        phases.append(BlendPhase(begin, tuple(zip(weights, shares, strict=True))))

    # How many samples all of them need of each data set, whose order follows from this number.
    needed = dict.fromkeys(named, 0)
    ends = [min(phase.begin, size) for phase in phases[1:]] + [size]
    for phase, end in zip(phases, ends, strict=True):
        for name, share in phase.shares:
            needed[name] += samples_needed(max(end - phase.begin, 0), share)
    sources = {}
    for name, part in named.items():
        documents = (part.documents.start, part.documents.stop)
        samples = part.samples if len(phases) == 1 else max(1, needed[name])
        sources[name] = BlendSource(shown(part.prefix), documents, part.source.weight, samples)
    return BlendHistory(sources, tuple(phases))


def continue_history(
    past: BlendHistory | None, parts: Sequence[SetPart], size: int, consumed: int, c: TrainConfig
) -> BlendHistory:
    """Return the history with which a run of `size` samples continues.

    Another blend than the checkpoint's is refused, unless --blend-change-at gives its first sample.
    """
    now = begin_history(parts, size, c)
    change_at = c.data.blend_change_at
    if c.data.blend_stages:
        return continue_stages(past, now, size, consumed)

    # Nothing is remembered.
    if past is None:
        if consumed and change_at is not None:
            raise SettingsError(
                "{blend_change_at}: the checkpoint remembers no blend; leave it out, and the run continues with the "
                "blend given, from the same sample number on"
            )
        return now
    # The blend stays.
    last = past.blends[-1]
    if is_same_blend(last, now.blends[0]):
        if change_at not in (None, "now", str(last.begin)):
            raise SettingsError(
                f"{{blend_change_at={change_at}}}: the blend given holds from sample {last.begin} on already; leave "
                "the flag out, or give another blend"
            )
        return update_paths(past, now)
    # Another blend, which must be meant.
    if change_at is None:
        is_same_request = prefixes_and_weights(past) == prefixes_and_weights(now)
        if len(past.blends) == 1 and is_same_request:
            # These are the same files with other contents, which resume.py reports.
            return now
        raise UserError(explain_refusal(past, now, consumed))
    at = consumed if change_at == "now" else int(change_at)
    return change_blend(past, now, size, consumed, at)


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
    # The stages cannot change, nor what their data sets are; the paths of these may.
    are_same = len(past.blends) == len(now.blends)
    for before, after in zip(past.blends, now.blends, strict=False):
        if before.begin != after.begin or not is_same_blend(before, after):
            are_same = False
    if not are_same:
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
    ours = dict(a.shares)
    theirs = dict(b.shares)
    if ours.keys() != theirs.keys():
        return False
    return all(is_same_share(ours[name], theirs[name]) for name in ours)


def is_same_share(a: float, b: float) -> bool:
    """Return whether two shares are equal but for rounding: weights may be given in other units."""
    return math.isclose(a, b, rel_tol=1e-12)


def prefixes_and_weights(history: BlendHistory) -> list[tuple[str, float | None]]:
    return [(source.prefix, source.weight) for source in history.sources.values()]


def update_paths(past: BlendHistory, now: BlendHistory) -> BlendHistory:
    """Return the past with today's paths of its files."""
    blends = past.blends
    if len(blends) == 1 and blends[0].shares == now.blends[0].shares:
        # The order is made anew, for the number of samples needed today.
        return now
    for name, source in now.sources.items():
        require_same_documents(past.sources[name], source)
    # If the files are given in another order, the past order still decides between equals.
    if len(blends) == 1:
        sources = {name: now.sources[name] for name in past.sources}
        return BlendHistory(sources, blends)
    sources = dict(past.sources)
    for name, source in now.sources.items():
        sources[name] = replace(sources[name], prefix=source.prefix)
    return BlendHistory(sources, blends)


def change_blend(
    past: BlendHistory, now: BlendHistory, size: int, consumed: int, at: int
) -> BlendHistory:
    """Return the history with another blend from sample `at` on, and no later changes."""
    if at < consumed:
        raise SettingsError(
            f"{{blend_change_at={at}}}: {consumed} samples are used already; "
            f"give {consumed} (or now), or a later sample"
        )
    # A data set that took part already keeps its order, which its number of samples gave it.
    sources = dict(past.sources)
    for name, share in now.blends[0].shares:
        samples = samples_needed(max(size - at, 1), share)
        if name in sources:
            require_same_documents(sources[name], now.sources[name])
            samples = sources[name].samples
        sources[name] = replace(now.sources[name], samples=samples)
    # Changes that were planned for later are forgotten.
    blends = [blend for blend in past.blends if blend.begin < at]
    new = BlendPhase(at, now.blends[0].shares)
    if not blends or not is_same_blend(blends[-1], new):
        blends.append(new)
    out = BlendHistory(sources, tuple(blends))
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
    before = dict(past.blends[-1].shares)
    after = dict(now.blends[0].shares)
    changes = [f"{past.sources[n].prefix} is not in it" for n in before if n not in after]
    changes += [f"{now.sources[n].prefix} is new" for n in after if n not in before]
    for n in after:
        if n in before and not is_same_share(before[n], after[n]):
            prefix = now.sources[n].prefix
            changes.append(f"{prefix} has the share {after[n]:.4g}, it had {before[n]:.4g}")
    return (
        f"the training data are not blended as in the checkpoint: {'; '.join(first_eight(changes))}. Read from its "
        "beginning, another blend would repeat some samples and leave out others; give the checkpoint's blend, or "
        f"--blend-change-at now (or a sample from {consumed} on) to change to this one, each data set continuing "
        "after its last used sample, or --finetune, with a --save of its own, to begin anew from the weights"
    )
