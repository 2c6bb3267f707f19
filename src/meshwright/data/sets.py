"""The sets of data that a run reads: their files, the documents of each, and how many samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.base.console import notice, silence
from meshwright.base.errors import BAD_DATA
from meshwright.config.data_paths import SPLITS, PathSet, TokenFiles, path_sets, path_settings
from meshwright.config.problem import FLAGS, SettingsError, stated
from meshwright.config.schema import Data, TrainConfig
from meshwright.data.blend import normalise, samples_needed
from meshwright.data.files.indexed import Indexed
from meshwright.data.packing import pack_files
from meshwright.data.samples import split_bounds


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
class SetPart:
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
    t = config.training
    size = config.global_batch
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
    d = config.data
    sizes = needed_sizes(config)
    try:
        sets = path_sets(d)
    except ValueError as error:  # a file that the flags name has changed since they were checked
        raise SettingsError(str(error)) from None
    return [
        SetSpec(s, sizes[s.split], d.full_validation and s.split == "valid")
        for s in sets
        if s.split in sizes
    ]


def document_range(d: Data, paths: PathSet, source: TokenFiles, n: int) -> range:
    """Return which of a file's n documents belong to a set."""
    if paths.divided:
        bounds = split_bounds(d.split, n, d.split_arithmetic)
        i = SPLITS.index(paths.split)
        return range(bounds[i], bounds[i + 1])
    # bigscience's rounding
    begin = round(source.begin * float(n))
    end = round(source.end * float(n))
    return range(begin, end)


def find_parts(
    config: TrainConfig, spec: SetSpec, open_files: Callable[[str], Indexed]
) -> list[SetPart]:
    """Return the parts of one set, without those that have no token or no weight."""
    d = config.data
    paths = spec.paths
    assert d.seq_length
    weighed: list[tuple[float, SetPart]] = []
    total_documents = used_documents = 0
    flag = "{split}" if paths.divided else paths.flag
    later = set[str]()  # prefixes that a later stage of the blend reads, whatever their weight now
    if spec.key == "train":
        for stage in d.blend_stages:
            later.update(prefix for prefix, _ in stage.weights)

    # Leave out what cannot or shall not give a sample.
    for source in paths.sources:
        indexed = open_files(source.prefix)
        documents = document_range(d, paths, source, len(indexed))
        total_documents += len(indexed)
        used_documents += len(documents)
        tokens = indexed.tokens_of(documents.start, documents.stop)
        weight = float(tokens) if source.weight is None else source.weight
        if not tokens:
            why = f"of {len(indexed)} documents is empty"
        elif not weight and source.prefix not in later:
            why = "has the weight 0"
        elif spec.in_full and tokens <= d.seq_length and d.packing == "stream":
            why = f"has {tokens} tokens, less than one sample of {d.seq_length} + 1"
        else:
            weighed.append((weight, SetPart(source, indexed, documents, tokens, 0.0, 0)))
            continue
        if not paths.divided or d.split.shares[SPLITS.index(paths.split)]:  # else 0 was asked for
            given = FLAGS.render(stated(d, "split") if paths.divided else paths.flag)
            notice(f"{given}: the {spec.key} split of {indexed.prefix} {why}, so it is left out")
    # One sample must come out of all of them together; a packed one may be shorter.
    total = sum(part.tokens for _, part in weighed)
    if paths.split == "train" and total <= d.seq_length and (d.packing == "stream" or not total):
        raise SettingsError(
            f"the training split ({used_documents} of {total_documents} documents) has {total} tokens, but one "
            f"sample takes {{seq_length={d.seq_length}}} + 1; give more data, a shorter {{seq_length}} or another "
            f"{flag}",
            BAD_DATA,
        )
    shares = normalise([weight for weight, _ in weighed]) if weighed else []
    parts = [part for _, part in weighed]
    return [size_part(config, spec, *sized) for sized in zip(parts, shares, strict=True)]


def samples_of_epochs(config: TrainConfig) -> int:
    """Return the samples of --train-epochs readings of the training data, whatever the weights."""
    d = config.data
    epochs = config.training.train_epochs
    if d.mock_data or not path_settings(d) or d.seq_length is None or epochs is None:
        raise SettingsError(
            "{train_epochs} counts readings of token files, which {data_path} or the like must name; "
            "give {train_iters} instead"
        )
    paths = next((s for s in path_sets(d) if s.split == "train"), None)
    with silence():  # the run says which parts are left out
        parts = find_parts(config, SetSpec(paths, 0), Indexed) if paths else []
        if d.packing != "stream":
            samples = sum(samples_of_epoch(config, part.indexed, part.documents) for part in parts)
            return int(epochs * samples)
    # In a stream, all readings together are cut every S tokens.
    tokens = sum(part.tokens for part in parts)
    return max(int(epochs * tokens) - 1, 0) // d.seq_length


def samples_of_epoch(config: TrainConfig, indexed: Indexed, documents: range) -> int:
    """Return the samples that one reading of some documents gives."""
    d = config.data
    assert d.seq_length
    if d.packing == "stream":
        return (indexed.tokens_of(documents.start, documents.stop) - 1) // d.seq_length
    # With the training's own seed, so that it finds the packing in the cache.
    seed = config.training.seed % 2**32
    folder = cache_folder(d, indexed.prefix)
    _, bins = pack_files(indexed, documents, d.seq_length, seed, folder)
    return len(bins) - 1


def cache_folder(d: Data, prefix: str) -> Path:
    return Path(d.data_cache_path) if d.data_cache_path else Path(prefix).parent / "index-cache"


def count_epochs(config: TrainConfig) -> TrainConfig:
    """Return the configuration with --train-epochs, if it is given, as --train-samples."""
    epochs = config.training.train_epochs
    if epochs is None:
        return config
    samples = samples_of_epochs(config)
    training = replace(config.training, train_epochs=None, train_samples=samples)
    config = replace(config, training=training)
    if config.is_over(0, 0):
        raise SettingsError(
            f"{{train_epochs={epochs:g}}} is {samples} samples of this data, less than one global batch "
            f"of {config.batch(0)}; raise it"
        )
    return config


def size_part(config: TrainConfig, spec: SetSpec, part: SetPart, share: float) -> SetPart:
    """Return the part with its share, and with the samples that are asked of it."""
    d = config.data
    assert d.seq_length
    sources = spec.paths.sources
    alone = len(sources) == 1 and sources[0].weight is None
    number = spec.samples if alone else samples_needed(spec.samples, share)
    if spec.in_full:
        number = samples_of_epoch(config, part.indexed, part.documents)
    elif alone and d.packing != "stream" and d.dataloader_type == "cyclic":
        # One epoch, which is shuffled again and again, however long the run is.
        number = 1
    elif part.tokens <= d.seq_length and d.packing == "stream":
        notice(
            f"the {spec.key} split of {part.prefix} has {part.tokens} tokens: each sample of {d.seq_length} + 1 "
            "repeats its documents"
        )
    return replace(part, share=share, samples=number)
