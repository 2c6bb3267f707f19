"""What a run will read: its sets of data, the documents and the share of each pair of files, and how many samples of each.

It follows from the settings and the lengths of the files alone, and without torch: what counts samples ahead of a run asks
here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.console import notice
from meshwright.data.blend import normalised, samples_needed
from meshwright.data.format.indexed import Indexed
from meshwright.data.samples import split_bounds
from meshwright.errors import BAD_DATA, UserError
from meshwright.settings import data_paths as datapaths
from meshwright.settings.data_paths import SPLITS, PathSet, Source
from meshwright.settings.schema import Data, TrainConfig


@dataclass(frozen=True)
class Wanted:
    """A set of data that a run needs, and of how many samples."""

    paths: PathSet
    samples: int
    whole: bool = False  # every sample once instead: --full-validation

    @property
    def key(self) -> str:
        return self.paths.key


@dataclass(frozen=True)
class Part:
    """The documents of a pair of files that belong to a set."""

    source: Source
    indexed: Indexed
    documents: range
    tokens: int
    share: float  # of the set's samples; all shares together are 1
    samples: int  # that are asked for: Megatron's order of all of them follows from this number

    @property
    def prefix(self) -> str:
        return self.indexed.prefix


def targets(config: TrainConfig) -> dict[str, int]:
    """Samples of a training set, of each validation set and of each test set; Megatron's numbers."""
    t, size = config.training, config.global_batch
    return {
        "train": config.samples or config.steps * size,
        "valid": (config.steps // t.eval_interval + 1) * t.eval_iters * size,
        "test": t.eval_iters * size,
    }


def needed(config: TrainConfig) -> dict[str, int]:
    """The same, without what nothing will be read of."""
    skipped = {"train"} if config.training.skip_train else set()
    return {split: n for split, n in targets(config).items() if n and split not in skipped}


def wanted(config: TrainConfig) -> list[Wanted]:
    """The sets of data of a run that reads files."""
    d, sizes = config.data, needed(config)
    try:
        sets = datapaths.path_sets(d)
    except ValueError as error:  # a file that the flags name has changed since they were checked
        raise UserError(str(error)) from None
    return [Wanted(s, sizes[s.split], d.full_validation and s.split == "valid") for s in sets if s.split in sizes]


def documents(d: Data, paths: PathSet, source: Source, n: int) -> range:
    """Of a file's n documents those of a set."""
    if paths.divided:
        bounds, i = split_bounds(d.split, n, d.split_arithmetic), SPLITS.index(paths.split)
        return range(bounds[i], bounds[i + 1])
    return range(round(source.begin * float(n)), round(source.end * float(n)))  # bigscience's rounding


def parts(config: TrainConfig, want: Wanted, opened: Callable[[str], Indexed]) -> list[Part]:
    """Of one set; what has no token, or no weight, drops out with its weight. Empty if nothing is left."""
    d, paths = config.data, want.paths
    assert d.seq_length
    kept: list[tuple[float, Source, Indexed, range, int]] = []
    there = used = 0
    flag = f"--split {d.split}" if paths.divided else paths.flag
    for source in paths.sources:
        indexed = opened(source.prefix)
        mine = documents(d, paths, source, len(indexed))
        there, used = there + len(indexed), used + len(mine)
        tokens = indexed.tokens_of(mine.start, mine.stop)
        weight = float(tokens) if source.weight is None else source.weight
        if tokens and weight and not (want.whole and tokens <= d.seq_length):
            kept.append((weight, source, indexed, mine, tokens))
            continue
        why = f"of {len(indexed)} documents is empty" if not tokens else "has the weight 0"
        if tokens and weight:
            why = f"has {tokens} tokens, less than one sample of {d.seq_length} + 1"
        notice(f"{flag}: the {want.key} split of {indexed.prefix} {why}, so it is left out")
    total = sum(tokens for *_, tokens in kept)
    if paths.split == "train" and total <= d.seq_length:
        raise UserError(
            f"the training split ({used} of {there} documents) has {total} tokens, but one sample takes "
            f"--seq-length {d.seq_length} + 1: give more data, a shorter --seq-length or another {flag.split()[0]}",
            BAD_DATA,
        )
    shares = normalised([weight for weight, *_ in kept]) if kept else []
    alone = len(paths.sources) == 1 and paths.sources[0].weight is None
    out = []
    for share, (_, source, indexed, mine, tokens) in zip(shares, kept, strict=True):
        number = want.samples if alone else samples_needed(want.samples, share)
        if want.whole:
            number = (tokens - 1) // d.seq_length
        elif tokens <= d.seq_length:
            notice(
                f"the {want.key} split of {indexed.prefix} has {tokens} tokens: each sample of {d.seq_length} + 1 repeats "
                "its documents"
            )
        out.append(Part(source, indexed, mine, tokens, share, number))
    return out
