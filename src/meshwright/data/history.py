"""The data that a run reads: its sets, their files and sizes, and how the training blend changes.

From the sample of a change on, the new shares hold, and every data set continues after its last
used sample, in its own order. That order is fixed when the data set first takes part, as Megatron
would build it for the number of samples needed then. Where a change needs more, it is read to its
end, and then further epochs, each shuffled apart (datasets.build_phases); Megatron would build a
longer order, in which some used samples come again and others never come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.console import notice, remark
from meshwright.data.blend import normalise, samples_needed
from meshwright.data.files.indexed import Indexed, fingerprint
from meshwright.data.samples import split_bounds
from meshwright.errors import BAD_DATA, USAGE, UserError
from meshwright.settings.data_paths import SPLITS, PathSet, TokenFiles, path_sets
from meshwright.settings.grammar import split_shares
from meshwright.settings.schema import Data, TrainConfig

# What a run reads


@dataclass(frozen=True)
class SetSpec:
    """A set of data that a run needs, and how many samples of it."""

    paths: PathSet
    samples: int
    in_full: bool = False  # read every sample once instead: --full-validation

    @property
    def key(self) -> str:
        return self.paths.key


@dataclass(frozen=True)
class Part:
    """The documents of a pair of files that belong to a set."""

    source: TokenFiles
    indexed: Indexed
    documents: range
    tokens: int
    share: float  # of the set's samples; the shares of a set add up to 1
    samples: int  # samples asked for: Megatron's order of all of them follows from this number

    @property
    def prefix(self) -> str:
        return self.indexed.prefix


def target_sizes(config: TrainConfig) -> dict[str, int]:
    """Return Megatron's numbers of samples of a training, validation and test set."""
    t, size = config.training, config.global_batch
    return {
        "train": config.samples or config.steps * size,
        "valid": (config.steps // t.eval_interval + 1) * t.eval_iters * size,
        "test": t.eval_iters * size,
    }


def needed_sizes(config: TrainConfig) -> dict[str, int]:
    """Return the target sizes of the splits that will be read."""
    skipped = {"train"} if config.training.skip_train else set()
    return {split: n for split, n in target_sizes(config).items() if n and split not in skipped}


def needed_sets(config: TrainConfig) -> list[SetSpec]:
    """Return the sets of data of a run that reads files."""
    d, sizes = config.data, needed_sizes(config)
    try:
        sets = path_sets(d)
    except ValueError as error:  # a file that the flags name has changed since they were checked
        raise UserError(str(error)) from None
    return [SetSpec(s, sizes[s.split], d.full_validation and s.split == "valid") for s in sets if s.split in sizes]


def document_range(d: Data, paths: PathSet, source: TokenFiles, n: int) -> range:
    """Return which of a file's n documents belong to a set."""
    if paths.divided:
        bounds, i = split_bounds(d.split, n, d.split_arithmetic), SPLITS.index(paths.split)
        return range(bounds[i], bounds[i + 1])
    return range(round(source.begin * float(n)), round(source.end * float(n)))  # bigscience's rounding


def find_parts(config: TrainConfig, spec: SetSpec, open_files: Callable[[str], Indexed]) -> list[Part]:
    """Return the parts of one set, without those that have no token or no weight."""
    d, paths = config.data, spec.paths
    assert d.seq_length
    kept: list[tuple[float, Part]] = []
    documents = used = 0
    flag = f"--split {d.split}" if paths.divided else paths.flag
    for source in paths.sources:
        indexed = open_files(source.prefix)
        mine = document_range(d, paths, source, len(indexed))
        documents, used = documents + len(indexed), used + len(mine)
        tokens = indexed.tokens_of(mine.start, mine.stop)
        weight = float(tokens) if source.weight is None else source.weight
        if not tokens:
            why = f"of {len(indexed)} documents is empty"
        elif not weight:
            why = "has the weight 0"
        elif spec.in_full and tokens <= d.seq_length:
            why = f"has {tokens} tokens, less than one sample of {d.seq_length} + 1"
        else:
            kept.append((weight, Part(source, indexed, mine, tokens, 0.0, 0)))
            continue
        if not paths.divided or split_shares(d.split)[SPLITS.index(paths.split)]:  # else 0 was asked for
            notice(f"{flag}: the {spec.key} split of {indexed.prefix} {why}, so it is left out")
    total = sum(part.tokens for _, part in kept)
    if paths.split == "train" and total <= d.seq_length:
        raise UserError(
            f"the training split ({used} of {documents} documents) has {total} tokens, but one sample takes "
            f"--seq-length {d.seq_length} + 1; give more data, a shorter --seq-length or another {flag.split()[0]}",
            BAD_DATA,
        )
    shares = normalise([weight for weight, _ in kept]) if kept else []
    return [size_part(d, spec, part, share) for share, (_, part) in zip(shares, kept, strict=True)]


def size_part(d: Data, spec: SetSpec, part: Part, share: float) -> Part:
    """Return the part with its share, and with the samples that are asked of it."""
    assert d.seq_length
    sources = spec.paths.sources
    alone = len(sources) == 1 and sources[0].weight is None
    number = spec.samples if alone else samples_needed(spec.samples, share)
    if spec.in_full:
        number = (part.tokens - 1) // d.seq_length
    elif part.tokens <= d.seq_length:
        notice(
            f"the {spec.key} split of {part.prefix} has {part.tokens} tokens: each sample of {d.seq_length} + 1 "
            "repeats its documents"
        )
    return replace(part, share=share, samples=number)


# What a checkpoint remembers


@dataclass(frozen=True)
class KnownSource:
    """A data set that has taken part in the training."""

    prefix: str
    documents: tuple[int, int]  # first and end
    weight: float | None  # as given
    samples: int  # asked for when its order was made


@dataclass(frozen=True)
class Phase:
    """A blend from a sample of the run on: shares, in the order that decides between equals."""

    begin: int
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class History:
    """The blends of a training set, and the data sets that took part in any of them."""

    sources: dict[str, KnownSource]  # by the fingerprint of the files, not by their path
    blends: tuple[Phase, ...]

    def state(self) -> dict[str, Any]:
        """Return the history as JSON, for a checkpoint."""
        known = {n: [k.prefix, list(k.documents), k.weight, k.samples] for n, k in self.sources.items()}
        return {"sources": known, "blends": [[b.begin, [list(pair) for pair in b.shares]] for b in self.blends]}

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> History | None:
        """Return a checkpoint's history; None if it is too old for one, or of random tokens."""
        if state is None:
            return None
        known = {n: KnownSource(p, (a, b), weight, count) for n, (p, (a, b), weight, count) in state["sources"].items()}
        return cls(known, tuple(Phase(begin, tuple(map(tuple, pairs))) for begin, pairs in state["blends"]))

    def lines(self) -> list[str]:
        """Describe each blend in a line."""
        out = []
        for phase in self.blends:
            shares = [f"{share:.4g} {self.sources[name].prefix}" for name, share in phase.shares]
            out.append(f"blend from sample {phase.begin} on: {', '.join(first_eight(shares))}")
        return out


def first_eight(items: list[str]) -> list[str]:
    return [*items[:8], f"and {len(items) - 8} more"] if len(items) > 8 else items


def unique_names(parts: Sequence[Part]) -> list[str]:
    """Return a name for each part; parts with equal files are numbered in their order."""
    names = [fingerprint(part.prefix) for part in parts]
    counts = [names[: n + 1].count(name) for n, name in enumerate(names)]
    return [name if count == 1 else f"{name}#{count}" for name, count in zip(names, counts, strict=True)]


def begin_history(parts: Sequence[Part]) -> History:
    names = unique_names(parts)
    known = {
        name: KnownSource(p.prefix, (p.documents.start, p.documents.stop), p.source.weight, p.samples)
        for name, p in zip(names, parts, strict=True)
    }
    return History(known, (Phase(0, tuple((n, p.share) for n, p in zip(names, parts, strict=True))),))


def continue_history(
    past: History | None, parts: Sequence[Part], size: int, consumed: int, change_at: str | None
) -> History:
    """Return the history with which a run of `size` samples continues.

    Another blend than the checkpoint's is refused, unless --blend-change-at gives its first sample.
    """
    now = begin_history(parts)
    if past is None:
        if consumed and change_at is not None:
            raise UserError(
                "--blend-change-at: the checkpoint is too old to remember its blend; leave the flag out, and the run "
                "continues with the blend given, from the same sample number on"
            )
        return now
    last = past.blends[-1]
    if is_same_blend(last, now.blends[0]):
        if change_at not in (None, "now", str(last.begin)):
            raise UserError(
                f"--blend-change-at {change_at}: the blend given holds from sample {last.begin} on already; leave "
                "the flag out, or give another blend"
            )
        return update_paths(past, now)
    if len(past.blends) == 1 and change_at is None and prefixes_and_weights(past) == prefixes_and_weights(now):
        return now  # the same files with other contents: resume.py reports that
    if change_at is None:
        raise UserError(explain_refusal(past, now, consumed))
    return change_blend(past, now, size, consumed, consumed if change_at == "now" else int(change_at))


def is_same_blend(a: Phase, b: Phase) -> bool:
    """Return whether both have the same data sets in the same proportions, in any order."""
    ours, theirs = dict(a.shares), dict(b.shares)
    return ours.keys() == theirs.keys() and all(math.isclose(ours[n], theirs[n], rel_tol=1e-12) for n in ours)


def prefixes_and_weights(history: History) -> list[tuple[str, float | None]]:
    return [(known.prefix, known.weight) for known in history.sources.values()]


def update_paths(past: History, now: History) -> History:
    """Return the past with today's paths of its files."""
    if len(past.blends) == 1 and past.blends[0].shares == now.blends[0].shares:
        return now  # with a new order, for the number of samples needed today
    for name, known in now.sources.items():
        require_same_documents(past.sources[name], known)
    if len(past.blends) == 1:  # given in another order: the past order decides between equals
        return History({n: now.sources[n] for n in past.sources}, past.blends)
    sources = {n: replace(k, prefix=now.sources[n].prefix) if n in now.sources else k for n, k in past.sources.items()}
    return History(sources, past.blends)


def change_blend(past: History, now: History, size: int, consumed: int, at: int) -> History:
    """Return the history with another blend from sample `at` on, and no later changes."""
    if at < consumed:
        raise UserError(
            f"--blend-change-at {at}: {consumed} samples are used already; give {consumed} (or now), or a later sample"
        )
    sources = dict(past.sources)
    for name, share in now.blends[0].shares:
        samples = samples_needed(max(size - at, 1), share)
        if name in sources:
            require_same_documents(sources[name], now.sources[name])
            samples = sources[name].samples
        sources[name] = replace(now.sources[name], samples=samples)
    kept = tuple(b for b in past.blends if b.begin < at)
    new = Phase(at, now.blends[0].shares)
    out = History(sources, kept if kept and is_same_blend(kept[-1], new) else (*kept, new))
    remark(f" > the blend changes at sample {at}:")
    for line in out.lines():
        remark(f" >   {line}")
    return out


def require_same_documents(before: KnownSource, now: KnownSource) -> None:
    if before.documents != now.documents:
        raise UserError(
            f"{now.prefix}: the training set has documents {now.documents[0]} to {now.documents[1]} of it, in the "
            f"checkpoint {before.documents[0]} to {before.documents[1]}; give the checkpoint's --split or range, "
            "because with another one some samples would come again and some never",
            USAGE,
        )


def explain_refusal(past: History, now: History, consumed: int) -> str:
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
        "after its last used sample"
    )
