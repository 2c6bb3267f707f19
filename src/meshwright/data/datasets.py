"""The data of a run: token files, split, to the samples of train, validation and test. Prints what Megatron prints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.console import say
from meshwright.data.blend import Blend
from meshwright.data.changing import Chain, build
from meshwright.data.format.indexed import Indexed, check_vocabulary
from meshwright.data.history import History, follow, names
from meshwright.data.loader import Cyclic, Dataset, Marks, Mock, Samples
from meshwright.data.plan import Part, Wanted, documents, needed, targets, wanted
from meshwright.data.plan import parts as parts_of
from meshwright.data.samples import split_bounds
from meshwright.errors import BAD_DATA, UserError
from meshwright.settings.schema import Data, TrainConfig
from meshwright.tokenizers import Tokenizer

Datasets = Mapping[str, Dataset | None]  # "train", "valid", "test"; of several, "valid/NAME" and "test/NAME"
TITLES = {"train": "train", "valid": "validation", "test": "test"}


def marks(d: Data, tokenizer: Tokenizer | None) -> Marks | None:
    """What the ends of documents are to change, None if nothing."""
    if not (d.eod_mask_loss or d.reset_position_ids or d.reset_attention_mask):
        return None
    if tokenizer is None:
        raise UserError(
            "--eod-mask-loss, --reset-position-ids and --reset-attention-mask need a tokenizer, which knows the "
            "end of a document: give its flags instead of --vocab-size alone",
            everywhere=True,
        )
    return Marks(tokenizer.eod, d.eod_mask_loss, d.reset_position_ids, d.reset_attention_mask)


def check_datasets(config: TrainConfig, data: Datasets, own: bool, at: tuple[int, int] | None) -> None:
    """Whether the data, the user's `own` or what the flags name, reaches to the end of the run.

    `at`: iterations and samples behind us, None if nothing will be trained.
    """
    for name, dataset in data.items() if own else ():
        parts = {"len": "__len__", "[k]": "__getitem__", "locate": "locate"}
        lacking = [told for told, method in parts.items() if dataset is not None and not hasattr(dataset, method)]
        if lacking:
            why = f"a {type(dataset).__name__}, has no {' and no '.join(lacking)}"
            raise UserError(f'datasets["{name}"], {why}: docs/extending.md says what each does', BAD_DATA)
    if at is None:
        return
    train = data.get("train")
    if train is None:
        why = f"--split {config.data.split!r} leaves no document for training"
        raise UserError('datasets: there is no "train" to train on' if own else why, BAD_DATA)
    (iteration, consumed), size = at, config.global_batch
    last = consumed + (config.steps - iteration) * size
    if config.samples is None and last > len(train):
        if own:
            raise UserError(f'datasets["train"] has {len(train)} samples, the run needs {last}', BAD_DATA)
        raise UserError(
            f"{consumed} samples are consumed and {config.steps - iteration} steps of {size} would "
            f"end at {last}, but the data set is built for {config.steps} steps of {size}: another "
            "--global-batch-size than before needs the length in samples, --train-samples instead of --train-iters"
        )


def build_datasets(config: TrainConfig, vocab_size: int) -> dict[str, Dataset | None]:
    """The data of a run that begins, by "train", "valid" and "test", or "valid/NAME" where several sets are validated on."""
    return continue_datasets(config, vocab_size, None, 0)[0]


def continue_datasets(
    config: TrainConfig, vocab_size: int, past: History | None, consumed: int
) -> tuple[dict[str, Dataset | None], History | None]:
    """The same after so many samples, and the history of its blends. None where there is nothing to read, or no need to."""
    t, d = config.training, config.data
    assert d.seq_length
    sizes, out = targets(config), dict[str, Dataset | None](dict.fromkeys(TITLES))
    say("> building train, validation, and test datasets ...")
    say(" > datasets target sizes (minimum size):")
    for title, samples in zip(("train:      ", "validation: ", "test:       "), sizes.values(), strict=True):
        say(f"    {title}{samples}")
    say("> building train, validation, and test datasets for GPT ...")
    history = None
    if d.mock_data:
        for n, name in enumerate(sizes):
            out[name] = Mock(vocab_size, sizes[name], d.seq_length, t.seed + n) if name in needed(config) else None
    else:
        for want, parts in open_parts(config, vocab_size):
            if want.key != want.paths.split:
                out.pop(want.paths.split, None)
            if want.key == "train":
                history = follow(past, parts, want.samples, consumed, d.blend_change_at)
                out["train"] = build_train(config, want, parts, history, consumed, vocab_size)
            else:
                out[want.key] = build_split(config, want, parts)
    if d.dataloader_type == "cyclic":
        whole = ("valid",) if d.full_validation else ()
        out = {n: x if x is None or n.startswith(whole) and whole else Cyclic(x) for n, x in out.items()}
    say("> finished creating GPT datasets ...")
    return out, history


def open_parts(config: TrainConfig, vocab_size: int) -> list[tuple[Wanted, list[Part]]]:
    """The documents of each wanted set; every pair of files is opened once."""
    d, opened = config.data, dict[str, Indexed]()
    sets = wanted(config)
    if any(want.paths.divided for want in sets):
        say("Single data path provided for train, valid & test")
        say(f"data_prefix: {d.data_path or d.data_args_path}")
    else:
        say("Separate data paths provided for train, valid & test. Split string will be ignored.")
    for want in sets:
        for source in want.paths.sources:
            if source.prefix not in opened:
                indexed = opened[source.prefix] = open_indexed(source.prefix, d.mmap_warmup, vocab_size)
                if want.paths.divided:
                    say(" > dataset split:")
                    bounds = split_bounds(d.split, len(indexed), d.split_arithmetic)
                    for name, a, b in zip(TITLES, bounds, bounds[1:], strict=False):
                        say_documents(TITLES[name], range(a, b))
            if not want.paths.divided:
                title = want.paths.name or TITLES[want.paths.split]
                say_documents(title, documents(d, want.paths, source, len(opened[source.prefix])))
    return [(want, parts_of(config, want, opened.__getitem__)) for want in sets]


def say_documents(title: str, mine: range) -> None:
    say(f"    {title}:")
    say(f"     document indices in [{mine.start}, {mine.stop}) total of {len(mine)} documents")


def build_split(config: TrainConfig, want: Wanted, parts: list[Part]) -> Dataset | None:
    """The samples of one set: of one pair of files, or a blend of several."""
    if not parts:
        return None
    made = [build_samples(config, want.key, p.indexed, p.documents, p.samples) for p in parts]
    if len(want.paths.sources) == 1 and want.paths.sources[0].weight is None:
        return made[0]
    if want.whole:
        return Chain(made)
    return Blend(made, [p.share for p in parts], want.samples, cache_folder(config, parts[0].prefix))


def build_train(
    config: TrainConfig, want: Wanted, parts: list[Part], history: History, consumed: int, vocab_size: int
) -> Dataset | None:
    """The training set: one blend, as a split's, or one after the other."""
    place = {name: part for name, part in zip(names(parts), parts, strict=True)}
    if len(history.blends) == 1:
        return build_split(config, want, [replace(place[n], share=share) for n, share in history.blends[0].shares])
    opened: dict[str, Indexed] = {name: part.indexed for name, part in place.items()}

    def indexed_of(name: str) -> Indexed:
        if name not in opened:  # one that the blend given has no longer, and that is still to be read from
            opened[name] = open_indexed(history.sources[name].prefix, config.data.mmap_warmup, vocab_size)
        return opened[name]

    def samples(name: str, number: int, more: int) -> Samples:
        return build_samples(config, "train", indexed_of(name), range(*history.sources[name].documents), number, more)

    def one_epoch(name: str) -> int:
        first, end = history.sources[name].documents
        tokens = indexed_of(name).tokens_of(first, end)
        return max(1, (tokens - 1) // (config.data.seq_length or 1))

    return build(history, want.samples, consumed, samples, one_epoch, cache_folder(config, parts[0].prefix))


def build_samples(config: TrainConfig, key: str, indexed: Indexed, mine: range, number: int, more: int = 0) -> Samples:
    d, seed = config.data, (config.training.seed + more) % 2**32
    assert d.seq_length
    return Samples(
        indexed, mine, number, d.seq_length, seed, d.last_epoch_cutoff, cache_folder(config, indexed.prefix), key
    )


def epochs(dataset: object) -> list[list[Any]]:
    """Of each pair of files how often it is read, and whether the last time is shuffled apart; nothing of other data."""
    if isinstance(dataset, Cyclic):
        return epochs(dataset.dataset)
    if isinstance(dataset, Blend):
        return [
            one for part in dataset.parts for one in epochs(part)
        ]  # of a blend that changes: nothing, its order stays
    return [[dataset.epochs, dataset.apart]] if isinstance(dataset, Samples) else []


def cache_folder(config: TrainConfig, prefix: str) -> Path:
    given = config.data.data_cache_path
    return Path(given) if given else Path(prefix).parent / "index-cache"


def open_indexed(prefix: str, warmup: bool, vocab_size: int) -> Indexed:
    start = time.perf_counter()
    say(" > building dataset index ...")
    if warmup:
        say("    warming up index mmap file...")
        read_through(f"{prefix}.idx")
    indexed = Indexed(prefix)
    say("    reading sizes...")
    say("    reading pointers...")
    say("    reading document index...")
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
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass
