"""The data of a run: token files, split, to the samples of train, validation and test. Prints what Megatron prints."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from meshwright.config import TrainConfig
from meshwright.data.indexed import Indexed
from meshwright.data.loader import Dataset, Mock, Samples
from meshwright.data.samples import Say, quiet, split_bounds, to_stderr
from meshwright.errors import BAD_DATA, UserError


def build_datasets(
    config: TrainConfig, vocab_size: int, say: Say = quiet, notice: Say = to_stderr
) -> dict[str, Dataset | None]:
    """The data of "train", "valid" and "test"; None where a split has no document. Prints what Megatron prints."""
    t, d = config.training, config.data
    assert t.train_iters and d.seq_length
    targets = {
        "train": t.train_iters * config.global_batch,
        "valid": (t.train_iters // t.eval_interval + 1) * t.eval_iters * config.global_batch,
        "test": t.eval_iters * config.global_batch,
    }
    say("> building train, validation, and test datasets ...")
    say(" > datasets target sizes (minimum size):")
    say(f"    train:      {targets['train']}")
    say(f"    validation: {targets['valid']}")
    say(f"    test:       {targets['test']}")
    say("> building train, validation, and test datasets for GPT ...")
    out: dict[str, Dataset | None] = {}
    if d.mock_data:
        for n, (name, samples) in enumerate(targets.items()):
            out[name] = Mock(vocab_size, samples, d.seq_length, t.seed + n)
        say("> finished creating GPT datasets ...")
        return out

    prefix = d.data_path[0]
    say("Single data path provided for train, valid & test")
    say(f"data_prefix: {d.data_path}")
    indexed = open_indexed(prefix, d.mmap_warmup, vocab_size, say)
    bounds = split_bounds(d.split, len(indexed), d.split_arithmetic)
    say(" > dataset split:")
    for title, a, b in zip(("train", "validation", "test"), bounds, bounds[1:], strict=False):
        say(f"    {title}:")
        say(f"     document indices in [{a}, {b}) total of {b - a} documents")

    cache_dir = Path(d.data_cache_path) if d.data_cache_path else Path(prefix).parent / "index-cache"
    for name, a, b in zip(targets, bounds, bounds[1:], strict=False):
        tokens = int(indexed.sizes[a:b].sum(dtype=np.int64))
        if name == "train" and tokens <= d.seq_length:
            raise UserError(
                f"the training split ({b - a} of {len(indexed)} documents) has {tokens} tokens, but one sample takes "
                f"--seq-length {d.seq_length} + 1: give more data, a shorter --seq-length or another --split",
                BAD_DATA,
            )
        if tokens == 0:
            notice(f"--split {d.split}: the {name} split of {len(indexed)} documents is empty, so it is left out")
            out[name] = None
            continue
        if tokens <= d.seq_length:
            notice(f"the {name} split has {tokens} tokens: each sample of {d.seq_length} + 1 repeats its documents")
        out[name] = Samples(
            indexed, range(a, b), targets[name], d.seq_length, t.seed, d.last_epoch_cutoff, cache_dir, name, say, notice
        )
    say("> finished creating GPT datasets ...")
    return out


def open_indexed(prefix: str, warmup: bool, vocab_size: int, say: Say) -> Indexed:
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


def check_vocabulary(indexed: Indexed, vocab_size: int, blocks: int = 64, block: int = 4096) -> None:
    """Refuse data of another vocabulary before the first step by looking at samples; the loader looks at all."""
    last = max(len(indexed.tokens) - block, 0)
    for start in sorted({last * n // (blocks - 1) for n in range(blocks)}):
        tokens = indexed.tokens[start : start + block]
        wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        if len(wrong):
            at = start + int(wrong[0])
            raise UserError(
                f"{indexed.prefix}.bin has id {indexed.tokens[at]} in document {indexed.sequence_at(at)}, but the "
                f"tokenizer's ids are 0 ... {vocab_size - 1}: the data was made with another tokenizer",
                BAD_DATA,
            )


def read_through(path: str) -> None:
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass
