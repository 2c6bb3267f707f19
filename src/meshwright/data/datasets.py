"""From the flags to the samples of train, validation and test, with Megatron's lines on the way."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.base.console import say
from meshwright.base.errors import BAD_DATA, bad_data
from meshwright.base.files import allow_open_files
from meshwright.base.storage import copies
from meshwright.config.problem import SettingsError
from meshwright.config.schema import Data, TrainConfig
from meshwright.data.blend import Blend, Chain, Remainder
from meshwright.data.files.indexed import Indexed, check_vocabulary
from meshwright.data.history import BlendHistory, continue_history, unique_names
from meshwright.data.loader import Cyclic, DocumentEnds, Mock, Samples
from meshwright.data.packing import Packed
from meshwright.data.samples import Dataset, FileSamples, split_bounds
from meshwright.data.sets import (
    SetPart,
    SetSpec,
    cache_folder,
    document_range,
    find_parts,
    needed_sets,
    needed_sizes,
    target_sizes,
)
from meshwright.data.tokenizers import Tokenizer

# Keys: "train", "valid" and "test", or "valid/NAME" and "test/NAME" where a split has several sets.
Datasets = Mapping[str, Dataset | None]
TITLES = {"train": "train", "valid": "validation", "test": "test"}


def make_document_ends(d: Data, tokenizer: Tokenizer | None) -> DocumentEnds | None:
    """Return the effects of document ends that the flags ask for, or None if there are none."""
    # packed samples say where documents begin
    if d.packing != "stream" or not any(d.document_effects):
        return None
    if tokenizer is None:
        raise SettingsError(
            "{eod_mask_loss=True}, {reset_position_ids=True} and {reset_attention_mask=True} need a tokenizer, which "
            "knows the end of a document; give its flags instead of {vocab_size} alone",
            everywhere=True,
        )
    return DocumentEnds(tokenizer.eod, *d.document_effects)


def check_datasets(
    config: TrainConfig, data: Datasets, own: bool, at: tuple[int, int] | None
) -> None:
    """Refuse data that do not reach to the end of the run.

    `own`: they are the user's own data sets, not what the flags name. `at`: the iterations and
    samples that are done, None if nothing will be trained.
    """
    if own and config.data.packing != "stream":
        raise SettingsError(
            f"{{packing={config.data.packing}}} packs token files, not data sets of your own; leave it out",
            BAD_DATA,
        )
    # Data sets of the user's own have the methods of `Dataset`.
    methods = {"len": "__len__", "[k]": "__getitem__", "locate": "locate"}
    for name, dataset in data.items():
        if not own:
            continue
        if name not in TITLES and not name.startswith("valid/"):
            raise bad_data(
                f'datasets["{name}"] is read by nothing; name it train, valid, valid/NAME or test'
            )
        if dataset is None:
            continue
        lacking = [shown for shown, method in methods.items() if not hasattr(dataset, method)]
        if lacking:
            why = f"a {type(dataset).__name__}, has no {' and no '.join(lacking)}"
            raise bad_data(f'datasets["{name}"], {why}; docs/extending.md describes each')
        if not len(dataset):
            raise bad_data(f'datasets["{name}"] has no sample; give it some, or None in its place')
    if at is None:
        return
    train = data.get("train")
    if train is None:
        why = f"--split {config.data.split!r} leaves no document for training"
        raise bad_data('datasets: there is no "train" to train on' if own else why)
    # There are enough samples for the steps that are left.
    iteration, consumed = at
    size = config.global_batch
    last = consumed + (config.steps - iteration) * size
    if config.samples is None and last > len(train):
        if own:
            raise bad_data(f'datasets["train"] has {len(train)} samples, the run needs {last}')
        raise SettingsError(
            f"{consumed} samples are consumed and {config.steps - iteration} steps of {size} would "
            f"end at {last}, but the data set is built for {config.steps} steps of {size}; with another "
            "batch than before, give the length in samples: {train_samples} instead of {train_iters}"
        )


def build_datasets(config: TrainConfig, vocab_size: int) -> dict[str, Dataset | None]:
    """Return the data sets of a new run."""
    return continue_datasets(config, vocab_size, None, 0)[0]


def continue_datasets(
    config: TrainConfig, vocab_size: int, past: BlendHistory | None, consumed: int
) -> tuple[dict[str, Dataset | None], BlendHistory | None]:
    """Return the data sets of a run that has consumed so many samples, and its blends' history.

    A data set is None where there is nothing to read, or no need to.
    """
    t = config.training
    d = config.data
    assert d.seq_length
    sizes = target_sizes(config)
    out = dict[str, Dataset | None](dict.fromkeys(TITLES))
    # Megatron's lines, which scripts read.
    say("> building train, validation, and test datasets ...")
    say(" > datasets target sizes (minimum size):")
    for name, samples in sizes.items():
        say(f"    {TITLES[name] + ':':12}{samples}")
    say("> building train, validation, and test datasets for GPT ...")
    history = None
    if d.mock_data:
        needed = needed_sizes(config)
        for n, name in enumerate(sizes):
            if name in needed:
                out[name] = Mock(vocab_size, sizes[name], d.seq_length, t.seed + n)
    else:
        for spec, parts in open_parts(config, vocab_size):
            # Sets with names of their own take the place of the one without, unless it has data.
            if spec.paths.name and out.get(spec.paths.split) is None:
                out.pop(spec.paths.split, None)
            if spec.key == "train":
                history = continue_history(past, parts, spec.samples, consumed, config)
                out["train"] = build_train(config, spec, parts, history, consumed, vocab_size)
            else:
                out[spec.key] = build_set(config, spec, parts)
    # A set that is read in full is read in its order, and once.
    if d.dataloader_type == "cyclic":
        for name, dataset in out.items():
            if dataset is not None and not (d.full_validation and name.startswith("valid")):
                out[name] = Cyclic(dataset)
    say("> finished creating GPT datasets ...")
    return out, history


def open_parts(config: TrainConfig, vocab_size: int) -> list[tuple[SetSpec, list[SetPart]]]:
    """Open every pair of files once, and return the parts of each needed set."""
    d = config.data
    opened = dict[str, Indexed]()
    sets = needed_sets(config)
    sources = [source.prefix for spec in sets for source in spec.paths.sources]
    count = len(set(sources))
    # Each map holds an open file: of the two of a data set, and of three arrays for each split.
    allow_open_files(2 * count + 3 * len(sources), f"{count:,} data sets")
    if any(spec.paths.divided for spec in sets):
        say("Single data path provided for train, valid & test")
        say(f"data_prefix: {d.data_path or d.data_args_path}")
    else:
        say("Separate data paths provided for train, valid & test. Split string will be ignored.")
    for spec in sets:
        for source in spec.paths.sources:
            if source.prefix not in opened:
                indexed = open_indexed(source.prefix, d.mmap_warmup, vocab_size)
                opened[source.prefix] = indexed
                if spec.paths.divided:
                    say(" > dataset split:")
                    bounds = split_bounds(d.split, len(indexed), d.split_arithmetic)
                    for name, a, b in zip(TITLES, bounds, bounds[1:], strict=False):
                        say_documents(TITLES[name], range(a, b))
            if not spec.paths.divided:
                title = spec.paths.name or TITLES[spec.paths.split]
                number = len(opened[source.prefix])
                say_documents(title, document_range(d, spec.paths, source, number))
    return [(spec, find_parts(config, spec, opened.__getitem__)) for spec in sets]


def say_documents(title: str, documents: range) -> None:
    say(f"    {title}:")
    say(
        f"     document indices in [{documents.start}, {documents.stop}) total of {len(documents)} documents"
    )


def build_set(config: TrainConfig, spec: SetSpec, parts: list[SetPart]) -> Dataset | None:
    """Return the samples of one pair of files, or a blend of several."""
    if not parts:
        return None
    made = [build_samples(config, spec.key, p.indexed, p.documents, p.samples) for p in parts]
    if len(spec.paths.sources) == 1 and spec.paths.sources[0].weight is None:
        return made[0]
    if spec.in_full:
        return Chain(made)
    shares = [p.share for p in parts]
    return Blend(made, shares, spec.samples, cache_folder(config.data, parts[0].prefix))


def build_train(
    config: TrainConfig,
    spec: SetSpec,
    parts: list[SetPart],
    history: BlendHistory,
    consumed: int,
    vocab_size: int,
) -> Dataset | None:
    """Return the training set: one blend, as for any set, or a blend that changes."""
    by_name = dict(zip(unique_names(parts), parts, strict=True))
    if len(history.blends) == 1:
        # In the history's order, which decides between equals, and with its shares.
        (blend,) = history.blends
        parts = [replace(by_name[name], share=share) for name, share in blend.shares]
        return build_set(config, spec, parts)
    opened = {name: part.indexed for name, part in by_name.items()}

    def build_more(name: str, made: int) -> FileSamples:
        source = history.sources[name]
        # A data set that has left the blend may still be read from.
        if name not in opened:
            opened[name] = open_indexed(source.prefix, config.data.mmap_warmup, vocab_size)
        # A request for one sample builds a whole epoch.
        number = 1 if made else source.samples
        return build_samples(config, "train", opened[name], range(*source.documents), number, made)

    folder = cache_folder(config.data, parts[0].prefix)
    return build_phases(history, spec.samples, consumed, build_more, folder)


class Phases(Chain):
    """The blends of a history, each for its samples of the run, and the prefixes of their parts."""

    def __init__(self, blends: Sequence[Blend], prefixes: Sequence[Sequence[str]]) -> None:
        super().__init__(blends)
        self.blends = list(blends)
        self.prefixes = prefixes

    def count_used(self, consumed: int) -> Counter[str]:
        used = Counter[str]()
        begins = [0, *self.ends[:-1]]
        for blend, prefixes, begin in zip(self.blends, self.prefixes, begins, strict=True):
            for prefix, count in zip(prefixes, blend.count_parts(consumed - begin), strict=True):
                used[prefix] += count
        return used


def build_phases(
    history: BlendHistory,
    size: int,
    consumed: int,
    build_more: Callable[[str, int], FileSamples],
    folder: Path | None,
) -> Phases:
    """Return the run's `size` samples.

    `build_more(name, made)` returns a data set's first order where `made` is 0, else one further
    epoch, shuffled with `made` added to the seed. Data sets whose last sample is among the
    `consumed` ones are not opened: their files may be gone.
    """
    chains = dict[str, Chain]()
    used = Counter[str]()
    blends = []
    still_read = set[str]()

    # The order of each blend; its data sets go on where the blends before have left them. Their
    # chains are filled below, once it is known how far they are read.
    phases = [phase for phase in history.blends if phase.begin < size]
    ends = [*(phase.begin for phase in phases[1:]), size]
    for phase, end in zip(phases, ends, strict=True):
        samples = end - phase.begin
        names = [name for name, _ in phase.shares]
        shares = [share for _, share in phase.shares]
        tails = [Remainder(chains.setdefault(name, Chain([])), used[name]) for name in names]
        blend = Blend(tails, shares, samples, folder)
        blends.append(blend)
        for name, count in zip(names, blend.count_parts(samples), strict=True):
            used[name] += count
        if end > consumed:
            still_read.update(names)

    # The samples of the data sets that are still read.
    for name, chain in chains.items():
        if name not in still_read:
            continue
        chain.append(build_more(name, 0))
        # More samples are needed than the first order has: all of it, then further epochs.
        while len(chain) < used[name]:
            chain.append(build_more(name, len(chain.parts)))
    prefixes = [[history.sources[name].prefix for name, _ in phase.shares] for phase in phases]
    return Phases(blends, prefixes)


def build_samples(
    config: TrainConfig, key: str, indexed: Indexed, documents: range, number: int, more: int = 0
) -> FileSamples:
    """Return `number` samples or more; `more` is added to the seed."""
    d = config.data
    seed = (config.training.seed + more) % 2**32
    assert d.seq_length
    folder = cache_folder(d, indexed.prefix)
    if d.packing == "best-fit":
        return Packed(indexed, documents, number, d.seq_length, seed, folder)
    return Samples(indexed, documents, number, d.seq_length, seed, d.last_epoch_cutoff, folder, key)


def open_indexed(prefix: str, warmup: bool, vocab_size: int) -> Indexed:
    start = time.perf_counter()
    say(" > building dataset index ...")
    if warmup:
        say("    warming up index mmap file...")
        read_through(f"{prefix}.idx")
    indexed = Indexed(prefix)
    for part in ("sizes", "pointers", "document index"):
        say(f"    reading {part}...")
    if warmup:
        say("    warming up data mmap file...")
        read_through(f"{prefix}.bin")
    say("    creating numpy buffer of mmap...")
    say("    creating memory view of numpy buffer...")
    check_vocabulary(indexed, vocab_size)
    say(f" > finished creating indexed dataset in {time.perf_counter() - start:4f} seconds")
    say(f"    number of documents: {len(indexed)}")
    return indexed


def read_through(path: str) -> None:
    copies.need(path, [(0, os.path.getsize(path))])
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass
