"""A training's data before it runs: `meshwright data index`, `data plan`, `data inspect --sample`.

`plan` computes from lengths, without torch; the others build the training's data sets and cache.
"""

from __future__ import annotations

import functools
import json
import mmap
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright import console
from meshwright.data.blend import Composite, blend_order
from meshwright.data.files.indexed import Indexed
from meshwright.data.sets import SetPart, SetSpec, find_parts, needed_sets
from meshwright.data.tools.statistics import decode_ids
from meshwright.errors import IO, UserError, bad_data
from meshwright.files import make_folder
from meshwright.settings import data_paths
from meshwright.settings.grammar import split_shares
from meshwright.settings.schema import TrainConfig
from meshwright.tokenizers import Tokenizer

if TYPE_CHECKING:
    from meshwright.data.samples import Dataset

ANY_ID = 2**31  # without a tokenizer ids are not compared with one
EXACT = 100_000_000  # up to so many samples, a blend is counted in its real order, in some seconds
OFTEN = 4  # epochs after which repeated data are known to help less and less: a warning


# index


def build_index(config: TrainConfig, vocab: int | None, dry: bool) -> None:
    if config.data.mock_data:
        print("--mock-data: random tokens have no index; nothing to build")
        return
    from meshwright.data.datasets import build_datasets, cache_folder

    folders = list(dict.fromkeys(cache_folder(config, prefix) for prefix in data_paths.prefixes(config.data)))
    there = ", ".join(map(str, folders))
    if dry:
        print(f"would build the indices of {len(needed_sets(config))} sets in {there}")
        return
    # A training keeps indices in memory if it cannot write them; built ahead they would be lost.
    for folder in folders:
        make_folder(folder, "--data-cache-path, here and in the training")
    start, before = perf_counter(), find_entries(folders)
    if vocab is None:
        console.notice("note: no tokenizer is given, so ids are not compared with its vocabulary")
    needed = list_arrays(build_datasets(config, vocab or ANY_ID).values())
    lost = sum(not is_mapped(array) for array in needed)
    if lost:
        where = f"{lost} of {len(needed)} index arrays are in memory alone, not in {there}"
        raise UserError(f"{where}; see the notice above for the reason: the training would build them again", IO)
    after = find_entries(folders)
    new = [record for record in after if after[record] != before.get(record)]
    seconds = perf_counter() - start
    if not new:
        print(f"nothing to build: all {len(needed)} index arrays are in {there} ({seconds:.1f} s)")
        return
    size = sum(p.stat().st_size for record in new for p in record.parent.glob(f"{record.stem}*") if p.is_file())
    there = ", ".join(sorted({str(record.parent) for record in new}))
    print(f"built {len(new)} indices, {size:,} bytes, in {there} ({seconds:.1f} s): the training finds them there")


def list_arrays(datasets: Iterable[Any]) -> list[Any]:
    """Return the index arrays of data sets and of their parts."""
    out, left = list[Any](), [one for one in datasets if one is not None]
    while left:
        one = left.pop()
        held = vars(one)
        out += [held[n] for n in ("doc_idx", "sample_idx", "shuffle_idx", "dataset_idx") if n in held]
        left += [*held.get("parts", ()), *([held["dataset"]] if "dataset" in held else [])]
    return out


def is_mapped(array: Any) -> bool:
    """Return whether the array lies in a file."""
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    return array is not None


def find_entries(folders: Sequence[Path]) -> dict[Path, int]:
    """Return the entries of caches, and when each was written."""
    return {record: record.stat().st_mtime_ns for folder in folders for record in folder.glob("*.json")}


# plan


def print_plan(config: TrainConfig, as_json: bool) -> None:
    if config.data.mock_data:
        raise UserError("--mock-data: random tokens have no source; there is nothing to plan")
    indexed = functools.cache(Indexed)
    sets = [plan_set(config, spec, find_parts(config, spec, indexed)) for spec in needed_sets(config)]
    warnings = [line for one in sets for line in one.pop("warnings")]
    if config.data.blend_change_at is not None:
        warnings.append("--blend-change-at: counted as if this blend held from the first sample on")
    if as_json:
        print(json.dumps({"sets": sets, "warnings": warnings}))
        return
    print("\n".join(line for one in sets for line in format_table(one)))
    for line in warnings:
        console.notice(f"warning: {line}")


def plan_set(config: TrainConfig, spec: SetSpec, found: list[SetPart]) -> dict[str, Any]:
    """Count the samples that are read from each source of a set."""
    length = config.data.seq_length or 1
    counts, how = count_samples(spec, found)
    sources, warnings = list[dict[str, Any]](), list[str]()
    for part, count in zip(found, counts, strict=True):
        source = dict(prefix=part.prefix, share=part.share, first_document=part.documents.start)
        source |= dict(documents=len(part.documents), tokens=part.tokens, samples=count)
        sources.append(source | dict(tokens_read=count * length, epochs=count * length / part.tokens))
        if spec.key == "train" and (epochs := count * length / part.tokens) > OFTEN:
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


def count_samples(spec: SetSpec, found: list[SetPart]) -> tuple[list[int], str]:
    """Return how many of a set's samples each part gives, and how they were counted."""
    if spec.in_full:
        return [part.samples for part in found], "every sample once"
    if not found:
        return [], "no document"
    if len(found) == 1:
        return [spec.samples], "one source"
    shares = np.array([part.share for part in found])
    if spec.samples > EXACT:
        return [round(share * spec.samples) for share in shares.tolist()], "from the shares: one sample more or less"
    which, _ = blend_order(shares / shares.sum(), spec.samples)
    return np.bincount(which, minlength=len(found)).tolist(), "in the real order"


def format_table(one: dict[str, Any]) -> list[str]:
    if not one["sources"]:
        return [f"{one['set']}: none; {one['counted']}", ""]
    read = sum(source["tokens_read"] for source in one["sources"])
    out = [f"{one['set']}: {one['samples']:,} samples, {read:,} tokens, counted: {one['counted']}"]
    out.append("     share     documents              tokens         samples         tokens read    epochs  source")
    for s in one["sources"]:
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
    console.set_stream(None)  # Megatron's lines about building belong to a training's log
    try:
        sets = build_datasets(config, vocab)
    finally:
        console.set_stream("stdout")
    there = [key for key, dataset in sets.items() if dataset is not None]
    dataset = sets.get(name)
    if dataset is None:
        raise bad_data(f"--sample-set {name}: there is no such set; there are {', '.join(there) or 'none'}")
    if number >= len(dataset):
        raise bad_data(f"--sample {number}: {name} has {len(dataset):,} samples, 0 to {len(dataset) - 1}")
    ids, found = [int(i) for i in dataset[number]], find_stretches(dataset, number)
    if as_json:
        places = [{"position": first, "tokens": stop - first, "from": place} for first, stop, place in found]
        facts = {"set": name, "sample": number, "ids": ids, "pieces": places}
        print(json.dumps({**facts, "text": decode_ids(tokenizer, ids)} if tokenizer else facts))
        return
    print(f"sample {number:,} of {name}: {len(ids):,} tokens, the last of which is only predicted")
    for first, stop, place in found:
        some = ids[first:stop]
        print(f"--- {len(some):,} tokens from {place}")
        print(decode_ids(tokenizer, some) if tokenizer else " ".join(map(str, some)))


def find_stretches(dataset: Dataset, number: int) -> list[tuple[int, int, str]]:
    """Return (first position, end, place of the first token) of each stretch of a sample."""
    from meshwright.data.loader import Samples

    held, k = dataset, number
    while isinstance(held, Composite):
        held, k = held.resolve(k)
    if not isinstance(held, Samples):  # random tokens
        return [(0, len(dataset[number]), dataset.locate(number, 0))]
    ends = accumulate((length for *_, length in held.pieces(k)), initial=0)
    return [(first, stop, dataset.locate(number, first)) for first, stop in pairwise(ends) if first < stop]
