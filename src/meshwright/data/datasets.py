"""The data of a run: token files, split, to the samples of train, validation and test. Prints what Megatron prints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config import Data, TrainConfig
from meshwright.console import notice, say
from meshwright.data.blend import Blend, normalised, samples_needed
from meshwright.data.indexed import Indexed, check_vocabulary
from meshwright.data.loader import Cyclic, Dataset, Marks, Mock, Samples
from meshwright.data.samples import split_bounds
from meshwright.errors import BAD_DATA, UserError
from meshwright.tokenizers import Tokenizer
from meshwright.values import blend

Datasets = Mapping[str, Dataset | None]  # "train", "valid", "test"
TITLES = {"train": "train", "valid": "validation", "test": "test"}
Part = tuple[Indexed, range]  # token files, and the documents of them that a split has


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
    """The data of "train", "valid" and "test"; None where there is nothing to read, or no need to."""
    t, d = config.training, config.data
    assert d.seq_length
    targets = {
        "train": config.samples or config.steps * config.global_batch,
        "valid": (config.steps // t.eval_interval + 1) * t.eval_iters * config.global_batch,
        "test": t.eval_iters * config.global_batch,
    }
    say("> building train, validation, and test datasets ...")
    say(" > datasets target sizes (minimum size):")
    for title, samples in zip(("train:      ", "validation: ", "test:       "), targets.values(), strict=True):
        say(f"    {title}{samples}")
    say("> building train, validation, and test datasets for GPT ...")
    wanted = [name for name in targets if targets[name] and not (name == "train" and t.skip_train)]
    out: dict[str, Dataset | None] = dict.fromkeys(targets)
    if d.mock_data:
        for n, name in enumerate(targets):
            out[name] = Mock(vocab_size, targets[name], d.seq_length, t.seed + n) if name in wanted else None
    else:
        for name, (weights, parts) in open_parts(config, wanted, vocab_size).items():
            out[name] = build_split(config, name, weights, parts, targets[name])
    if d.dataloader_type == "cyclic":
        out = {name: None if dataset is None else Cyclic(dataset) for name, dataset in out.items()}
    say("> finished creating GPT datasets ...")
    return out


def open_parts(
    config: TrainConfig, wanted: list[str], vocab_size: int
) -> dict[str, tuple[list[float] | None, list[Part]]]:
    """The documents of each wanted split, with the weights of a blend."""
    d = config.data
    if d.data_path:
        say("Single data path provided for train, valid & test")
        say(f"data_prefix: {d.data_path}")
        weights, prefixes = blend(d.data_path)
        shared: dict[str, list[Part]] = {name: [] for name in TITLES}
        for prefix in prefixes:
            indexed = open_indexed(prefix, d.mmap_warmup, vocab_size)
            bounds = split_bounds(d.split, len(indexed), d.split_arithmetic)
            say(" > dataset split:")
            for name, a, b in zip(TITLES, bounds, bounds[1:], strict=False):
                say_documents(name, a, b)
                shared[name].append((indexed, range(a, b)))
        return {name: (weights, shared[name]) for name in wanted}
    say("Separate data paths provided for train, valid & test. Split string will be ignored.")
    out = {}
    for name, values in zip(TITLES, (d.train_data_path, d.valid_data_path, d.test_data_path), strict=True):
        if values and name in wanted:
            weights, prefixes = blend(values)
            parts: list[Part] = []
            for prefix in prefixes:
                indexed = open_indexed(prefix, d.mmap_warmup, vocab_size)
                say_documents(name, 0, len(indexed))
                parts.append((indexed, range(len(indexed))))
            out[name] = weights, parts
    return out


def say_documents(name: str, a: int, b: int) -> None:
    say(f"    {TITLES[name]}:")
    say(f"     document indices in [{a}, {b}) total of {b - a} documents")


def build_split(
    config: TrainConfig, name: str, weights: list[float] | None, parts: list[Part], size: int
) -> Dataset | None:
    """The samples of one split: of one pair of files, or a blend of several that leaves out what has no token."""
    d, seed = config.data, config.training.seed
    assert d.seq_length
    flag = f"--split {d.split}" if d.data_path else f"--{name}-data-path"
    kept: list[tuple[float, Indexed, range, int]] = []
    for n, (indexed, documents) in enumerate(parts):
        tokens = int(indexed.sizes[documents.start : documents.stop].sum(dtype=np.int64))
        weight = weights[n] if weights else float(tokens)
        if tokens and weight:
            kept.append((weight, indexed, documents, tokens))
            continue
        why = f"of {len(indexed)} documents is empty" if not tokens else "has the weight 0"
        notice(f"{flag}: the {name} split of {indexed.prefix} {why}, so it is left out")
    total = sum(tokens for *_, tokens in kept)
    if name == "train" and total <= d.seq_length:
        used, there = sum(len(documents) for _, documents in parts), sum(len(indexed) for indexed, _ in parts)
        raise UserError(
            f"the training split ({used} of {there} documents) has {total} tokens, but one sample takes "
            f"--seq-length {d.seq_length} + 1: give more data, a shorter --seq-length or another {flag.split()[0]}",
            BAD_DATA,
        )
    if not kept:
        return None
    plain = weights is None and len(parts) == 1
    shares = normalised([weight for weight, *_ in kept])
    made = []
    for share, (_, indexed, documents, tokens) in zip(shares, kept, strict=True):
        if tokens <= d.seq_length:
            notice(
                f"the {name} split of {indexed.prefix} has {tokens} tokens: each sample of {d.seq_length} + 1 repeats "
                "its documents"
            )
        number = size if plain else samples_needed(size, share)
        folder = cache_folder(d.data_cache_path, indexed)
        made.append(Samples(indexed, documents, number, d.seq_length, seed, d.last_epoch_cutoff, folder, name))
    return made[0] if plain else Blend(made, shares, size, cache_folder(d.data_cache_path, kept[0][1]))


def epochs(dataset: object) -> list[list[Any]]:
    """Of each pair of files how often it is read, and whether the last time is shuffled apart; nothing of other data."""
    if isinstance(dataset, Cyclic):
        return epochs(dataset.dataset)
    if isinstance(dataset, Blend):
        return [one for part in dataset.parts for one in epochs(part)]
    return [[dataset.epochs, dataset.apart]] if isinstance(dataset, Samples) else []


def cache_folder(given: str | None, indexed: Indexed) -> Path:
    return Path(given) if given else Path(indexed.prefix).parent / "index-cache"


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
