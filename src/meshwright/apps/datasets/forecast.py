"""A training's data before it runs: `meshwright data index`, `data plan`, `data inspect --sample`.

`plan` computes from lengths, without torch; the others build the training's data sets and cache.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from meshwright.apps.datasets.statistics import decode_ids
from meshwright.base import console
from meshwright.base.errors import IO, UserError, bad_data
from meshwright.base.files import make_folder
from meshwright.config import data_paths
from meshwright.config.grammar import split_shares
from meshwright.config.schema import TrainConfig
from meshwright.data.blend import Composite, blend_order
from meshwright.data.files.indexed import Indexed
from meshwright.data.samples import Dataset, FileSamples
from meshwright.data.sets import SetPart, SetSpec, cache_folder, count_epochs, find_parts, needed_sets, samples_of_epoch
from meshwright.data.tokenizers import Tokenizer

INDEX_ARRAYS = ("doc_idx", "sample_idx", "shuffle_idx", "dataset_idx", "piece_idx", "bin_idx")  # of data sets
ANY_ID = 2**31  # without a tokenizer ids are not compared with one
EXACT = 100_000_000  # up to so many samples, a blend is counted in its real order, in some seconds
OFTEN = 4  # epochs after which repeated data are known to help less and less: a warning


# index


def build_index(config: TrainConfig, vocab: int | None, dry: bool) -> None:
    if config.data.mock_data:
        print("--mock-data: random tokens have no index; nothing to build")
        return
    config = count_epochs(config)
    from meshwright.data.datasets import build_datasets

    folders = list(dict.fromkeys(cache_folder(config.data, prefix) for prefix in data_paths.prefixes(config.data)))
    shown_folders = ", ".join(map(str, folders))
    if dry:
        print(f"would build the indices of {len(needed_sets(config))} sets in {shown_folders}")
        return
    # A training keeps indices in memory if it cannot write them; built ahead they would be lost.
    for folder in folders:
        make_folder(folder, "--data-cache-path, here and in the training")
    start, before = perf_counter(), find_entries(folders)
    if vocab is None:
        console.notice("note: no tokenizer is given, so ids are not compared with its vocabulary")
    needed = list_arrays(build_datasets(config, vocab or ANY_ID).values())
    lost = sum(array.flags.owndata for array in needed)  # not views of files
    if lost:
        where = f"{lost} of {len(needed)} index arrays are in memory alone, not in {shown_folders}"
        raise UserError(f"{where}; see the notice above for the reason: the training would build them again", IO)
    after = find_entries(folders)
    new = [record for record in after if after[record] != before.get(record)]
    seconds = perf_counter() - start
    if not new:
        print(f"nothing to build: all {len(needed)} index arrays are in {shown_folders} ({seconds:.1f} s)")
        return
    size = sum(p.stat().st_size for record in new for p in record.parent.glob(f"{record.stem}*") if p.is_file())
    written = ", ".join(sorted({str(record.parent) for record in new}))
    print(f"built {len(new)} indices, {size:,} bytes, in {written} ({seconds:.1f} s): the training finds them there")


def list_arrays(datasets: Iterable[Any]) -> list[Any]:
    """Return the index arrays of data sets and of their parts."""
    out, left = list[Any](), [dataset for dataset in datasets if dataset is not None]
    while left:
        attributes = vars(left.pop())
        out += [attributes[n] for n in INDEX_ARRAYS if n in attributes]
        left += attributes.get("parts", ())
    return out


def find_entries(folders: Sequence[Path]) -> dict[Path, int]:
    """Return the entries of caches, and when each was written."""
    return {record: record.stat().st_mtime_ns for folder in folders for record in folder.glob("*.json")}


# plan


def print_plan(config: TrainConfig, as_json: bool) -> None:
    if config.data.mock_data:
        raise UserError("--mock-data: random tokens have no source; there is nothing to plan")
    config = count_epochs(config)
    indexed = functools.cache(Indexed)
    sets = [plan_set(config, spec, find_parts(config, spec, indexed)) for spec in needed_sets(config)]
    warnings = [line for facts in sets for line in facts.pop("warnings")]
    if config.data.blend_stages:
        warnings.append("--blend-stages: counted as if the first blend held throughout")
    if config.data.blend_change_at is not None:
        warnings.append("--blend-change-at: counted as if this blend held from the first sample on")
    if as_json:
        print(json.dumps({"sets": sets, "warnings": warnings}))
        return
    print("\n".join(line for facts in sets for line in format_table(facts)))
    for line in warnings:
        console.notice(f"warning: {line}")


def plan_set(config: TrainConfig, spec: SetSpec, parts: list[SetPart]) -> dict[str, Any]:
    """Count the samples that are read from each source of a set."""
    counts, how = count_samples(spec, parts)
    sources, warnings = list[dict[str, Any]](), list[str]()
    for part, count in zip(parts, counts, strict=True):
        if config.data.packing == "stream":
            tokens_read = count * (config.data.seq_length or 1)
            epochs = tokens_read / part.tokens
        else:
            epochs = count / samples_of_epoch(config, part.indexed, part.documents)
            tokens_read = round(epochs * part.tokens)
        source = dict(prefix=part.prefix, share=part.share, first_document=part.documents.start)
        source |= dict(documents=len(part.documents), tokens=part.tokens, samples=count)
        sources.append(source | dict(tokens_read=tokens_read, epochs=epochs))
        if spec.key == "train" and epochs > OFTEN:
            advice = "a smaller weight, more data or a shorter run avoids it"
            warnings.append(f"{part.prefix} is read {epochs:.1f} times over in training: {advice}")
    if not sources:
        flag, share = spec.paths.flag, 1.0
        if spec.paths.divided:
            flag = f"--split {config.data.split}"
            share = split_shares(config.data.split)[data_paths.SPLITS.index(spec.paths.split)]
        how = f"{flag} leaves it no document" if share else f"{flag} gives it no share"
        warnings += [f"{spec.key} is no set of this training: {how}"] if share else []
    samples = sum(counts)
    return {"set": spec.key, "samples": samples, "counted": how, "sources": sources, "warnings": warnings}


def count_samples(spec: SetSpec, parts: list[SetPart]) -> tuple[list[int], str]:
    """Return how many of a set's samples each part gives, and how they were counted."""
    if spec.in_full:
        return [part.samples for part in parts], "every sample once"
    if not parts:
        return [], "no document"
    if len(parts) == 1:
        return [spec.samples], "one source"
    shares = np.array([part.share for part in parts])
    if spec.samples > EXACT:
        return [round(share * spec.samples) for share in shares.tolist()], "from the shares: one sample more or less"
    which, _ = blend_order(shares / shares.sum(), spec.samples)
    return np.bincount(which, minlength=len(parts)).tolist(), "in the real order"


def format_table(facts: dict[str, Any]) -> list[str]:
    if not facts["sources"]:
        return [f"{facts['set']}: none; {facts['counted']}", ""]
    read = sum(source["tokens_read"] for source in facts["sources"])
    out = [f"{facts['set']}: {facts['samples']:,} samples, {read:,} tokens, counted: {facts['counted']}"]
    out.append("     share     documents              tokens         samples         tokens read    epochs  source")
    for s in facts["sources"]:
        out.append(
            f"{s['share']:>10.4%}{s['documents']:>14,}{s['tokens']:>20,}{s['samples']:>16,}{s['tokens_read']:>20,}"
            f"{s['epochs']:>10.3f}  {s['prefix']}"
        )
    return [*out, ""]


# inspect --sample


def show_sample(config: TrainConfig, tokenizer: Tokenizer | None, number: int, name: str, as_json: bool) -> None:
    """Print one sample as the training reads it, and the document of each stretch of it."""
    from meshwright.data.datasets import build_datasets

    vocab = tokenizer.size if tokenizer else config.tokenizer.vocab_size or ANY_ID
    config = count_epochs(config)
    console.set_stream(None)  # Megatron's lines about building belong to a training's log
    try:
        sets = build_datasets(config, vocab)
    finally:
        console.set_stream("stdout")
    if (dataset := sets.get(name)) is None:
        names = ", ".join(key for key, dataset in sets.items() if dataset is not None)
        raise bad_data(f"--sample-set {name}: there is no such set; there are {names or 'none'}")
    if number >= len(dataset):
        raise bad_data(f"--sample {number}: {name} has {len(dataset):,} samples, 0 to {len(dataset) - 1}")
    stretches = find_stretches(dataset, number)
    ids = [int(i) for i in np.atleast_2d(dataset[number])[0, : stretches[-1][1]]]  # without padding
    if as_json:
        pieces = [{"position": first, "tokens": stop - first, "from": place} for first, stop, place in stretches]
        facts = {"set": name, "sample": number, "ids": ids, "pieces": pieces}
        print(json.dumps({**facts, "text": decode_ids(tokenizer, ids)} if tokenizer else facts))
        return
    is_packed = ", and so is the last of each piece" * (config.data.packing != "stream")
    print(f"sample {number:,} of {name}: {len(ids):,} tokens, the last of which is only predicted{is_packed}")
    for first, stop, place in stretches:
        stretch = ids[first:stop]
        print(f"--- {len(stretch):,} tokens from {place}")
        print(decode_ids(tokenizer, stretch) if tokenizer else " ".join(map(str, stretch)))


def find_stretches(dataset: Dataset, number: int) -> list[tuple[int, int, str]]:
    """Return (first position, end, place of the first token) of each stretch of a sample."""
    part, k = dataset, number
    while isinstance(part, Composite):
        part, k = part.resolve(k)
    if not isinstance(part, FileSamples):  # random tokens
        return [(0, len(dataset[number]), dataset.locate(number, 0))]
    ends = accumulate((length for *_, length in part.pieces(k)), initial=0)
    return [(first, stop, dataset.locate(number, first)) for first, stop in pairwise(ends) if first < stop]
