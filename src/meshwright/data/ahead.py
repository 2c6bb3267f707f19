"""A training's data before it runs: `meshwright data index`, `data inspect --sample`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from meshwright.base import console
from meshwright.base.errors import BAD_DATA, IO, UserError
from meshwright.base.files import make_folder
from meshwright.config import data_paths
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TrainConfig
from meshwright.data.blend import Composite
from meshwright.data.samples import Dataset, FileSamples
from meshwright.data.sets import cache_folder, count_epochs, needed_sets
from meshwright.data.statistics import decode_ids
from meshwright.data.tokenizers import Tokenizer

# of data sets
INDEX_ARRAYS = ("doc_idx", "sample_idx", "shuffle_idx", "dataset_idx", "piece_idx", "bin_idx")
ANY_ID = 2**31  # without a tokenizer ids are not compared with one


# index


def build_index(config: TrainConfig, vocab: int | None, dry: bool) -> None:
    if config.data.mock_data:
        print("--mock-data: random tokens have no index; nothing to build")
        return
    config = count_epochs(config)
    from meshwright.data.datasets import build_datasets

    prefixes = data_paths.prefixes(config.data)
    folders = list(dict.fromkeys(cache_folder(config.data, prefix) for prefix in prefixes))
    shown_folders = ", ".join(map(str, folders))
    if dry:
        print(f"would build the indices of {len(needed_sets(config))} sets in {shown_folders}")
        return
    # A training keeps indices in memory if it cannot write them; built ahead they would be lost.
    for folder in folders:
        make_folder(folder, "--data-cache-path, here and in the training")
    start = perf_counter()
    before = find_entries(folders)
    if vocab is None:
        console.notice("note: no tokenizer is given, so ids are not compared with its vocabulary")
    needed = list_arrays(build_datasets(config, vocab or ANY_ID).values())
    lost = sum(array.flags.owndata for array in needed)  # not views of files
    if lost:
        where = f"{lost} of {len(needed)} index arrays are in memory alone, not in {shown_folders}"
        raise UserError(
            f"{where}; see the notice above for the reason: the training would build them again", IO
        )
    after = find_entries(folders)
    new = [record for record in after if after[record] != before.get(record)]
    seconds = perf_counter() - start
    if not new:
        print(
            f"nothing to build: all {len(needed)} index arrays are in {shown_folders} ({seconds:.1f} s)"
        )
        return
    # An entry is a record and the arrays beside it, whose names begin like the record's.
    size = 0
    for record in new:
        for path in record.parent.glob(f"{record.stem}*"):
            if path.is_file():
                size += path.stat().st_size
    written = ", ".join(sorted({str(record.parent) for record in new}))
    print(
        f"built {len(new)} indices, {size:,} bytes, in {written} ({seconds:.1f} s): the training finds them there"
    )


def list_arrays(datasets: Iterable[Any]) -> list[Any]:
    """Return the index arrays of data sets and of their parts."""
    # The parts of a blend may be blends themselves.
    out = list[Any]()
    left = [dataset for dataset in datasets if dataset is not None]
    while left:
        attributes = vars(left.pop())
        out += [attributes[n] for n in INDEX_ARRAYS if n in attributes]
        left += attributes.get("parts", ())
    return out


def find_entries(folders: Sequence[Path]) -> dict[Path, int]:
    """Return the entries of caches, and when each was written."""
    return {
        record: record.stat().st_mtime_ns for folder in folders for record in folder.glob("*.json")
    }


# inspect --sample


def show_sample(
    config: TrainConfig, tokenizer: Tokenizer | None, number: int, name: str, as_json: bool
) -> None:
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
        raise SettingsError(
            f"{{sample_set={name}}}: there is no such set; there are {names or 'none'}", BAD_DATA
        )
    if number >= len(dataset):
        raise SettingsError(
            f"{{sample={number}}}: {name} has {len(dataset):,} samples, 0 to {len(dataset) - 1}",
            BAD_DATA,
        )
    # The first row of a packed sample holds its tokens; padding begins where the last stretch ends.
    stretches = find_stretches(dataset, number)
    ids = [int(i) for i in np.atleast_2d(dataset[number])[0, : stretches[-1][1]]]
    if as_json:
        pieces = [
            {"position": first, "tokens": stop - first, "from": place}
            for first, stop, place in stretches
        ]
        facts = {"set": name, "sample": number, "ids": ids, "pieces": pieces}
        print(json.dumps({**facts, "text": decode_ids(tokenizer, ids)} if tokenizer else facts))
        return
    is_packed = ", and so is the last of each piece" * (config.data.packing != "stream")
    print(
        f"sample {number:,} of {name}: {len(ids):,} tokens, the last of which is only predicted{is_packed}"
    )
    for first, stop, place in stretches:
        stretch = ids[first:stop]
        print(f"--- {len(stretch):,} tokens from {place}")
        print(decode_ids(tokenizer, stretch) if tokenizer else " ".join(map(str, stretch)))


def find_stretches(dataset: Dataset, number: int) -> list[tuple[int, int, str]]:
    """Return (first position, end, place of the first token) of each stretch of a sample."""
    # Go down through blends to the file that the sample comes from.
    part = dataset
    k = number
    while isinstance(part, Composite):
        part, k = part.resolve(k)
    if not isinstance(part, FileSamples):  # random tokens
        return [(0, len(dataset[number]), dataset.locate(number, 0))]
    ends = accumulate((length for *_, length in part.pieces(k)), initial=0)
    return [
        (first, stop, dataset.locate(number, first))
        for first, stop in pairwise(ends)
        if first < stop
    ]
