"""Cases of sample orders and blends, megatron-core's answers to them, and ours.

    python tests/data/megatron_core_cases.py > tests/data/megatron_core.json

writes its answers again, as hashes. It needs megatron-core (`pip install --no-deps megatron-core`).
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.blend import blend_order
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer
from meshwright.data.loader import Samples

FROZEN = Path(__file__).with_name("megatron_core.json")
SHAPES = ["tiny", "short", "long", "mixed", "empty ones", "one"]


def sizes_of(shape: str, rng: np.random.Generator) -> list[int]:
    """Lengths of documents."""
    n = int(rng.integers(2, 60))
    return {
        "tiny": lambda: rng.integers(1, 4, 3),
        "short": lambda: rng.integers(1, 9, n),
        "long": lambda: rng.integers(200, 900, n),
        "mixed": lambda: (10 ** rng.uniform(0, 3.3, n)).astype(int),
        "empty ones": lambda: (
            rng.integers(0, 3, n) * rng.integers(0, 60, n) + np.eye(1, n, n - 1, dtype=int)[0]
        ),
        "one": lambda: rng.integers(40, 400, 1),
    }[shape]().tolist()


def index_cases(seeds: range) -> list[dict[str, Any]]:
    """One epoch to dozens, the last apart or not, parts of the documents, seeds."""
    out = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        shape = SHAPES[seed % len(SHAPES)]
        sizes = sizes_of(shape, rng)
        first = int(rng.integers(0, len(sizes)))
        documents = (
            [0, len(sizes)] if seed % 3 else [first, int(rng.integers(first, len(sizes))) + 1]
        )
        tokens = sum(sizes[documents[0] : documents[1]])
        length = int(rng.choice([2, 7, 16, 64]))
        wanted = int(
            rng.choice(
                [
                    1,
                    tokens // length,
                    3 * tokens // (2 * length),
                    2 * tokens // length + 1,
                    5 * tokens // length + 3,
                ]
            )
        )
        wanted = min(max(wanted, 1), 20_000)
        if tokens > 1:  # megatron-core never ends where there is no token
            out.append(
                {
                    "sizes": sizes,
                    "documents": documents,
                    "samples": wanted,
                    "length": length,
                    "seed": 7 * seed,
                }
            )
    return out


def blend_cases(seeds: range) -> list[dict[str, Any]]:
    out = []
    for seed in seeds:
        rng = np.random.default_rng(1000 + seed)
        n = int(rng.choice([1, 2, 3, 10, 100]))
        weights = [
            rng.random(n),
            rng.integers(1, 5, n) / 10,
            np.ones(n),
            10.0 ** rng.integers(-7, 1, n),
        ][seed % 4]
        out.append(
            {"weights": (weights / weights.sum()).tolist(), "size": int(rng.integers(1, 5000))}
        )
    return out


def write(prefix: Path, sizes: list[int], seed: int = 0) -> Indexed:
    rng = np.random.default_rng(seed)
    with Writer(prefix, np.uint16) as writer:
        for n in sizes:
            writer.add(rng.integers(0, 1000, n))
            writer.end_document()
    return Indexed(prefix)


# Each answers with document, sample and shuffle index, or with the blend's two arrays.


def our_index(case: dict[str, Any], folder: Path) -> list[Any]:
    indexed = write(folder / "x", case["sizes"])
    made = Samples(
        indexed, range(*case["documents"]), case["samples"], case["length"], case["seed"]
    )
    return [made.doc_idx, made.sample_idx, made.shuffle_idx]


def our_blend(case: dict[str, Any]) -> list[Any]:
    weights = np.array(case["weights"])
    return list(blend_order(weights / weights.sum(), case["size"]))


def megatron_dataset(case: dict[str, Any], folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split

        class Words:
            unique_identifiers: dict[str, str] = {}
            pad, eod, eos, vocab_size = 1000, 1001, 1002, 1003

        settings = GPTDatasetConfig(
            random_seed=case["seed"],
            sequence_length=case["length"],
            path_to_cache=str(folder / "cache"),
            tokenizer=Words(),
            split="1",
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        write(folder / "x", case["sizes"])
        documents = np.arange(*case["documents"], dtype=np.int32)
        indexed = IndexedDataset(str(folder / "x"), mmap=True)
        return GPTDataset(
            indexed, str(folder / "x"), documents, case["samples"], Split.train, settings
        )


def megatron_index(case: dict[str, Any], folder: Path) -> list[Any]:
    made = megatron_dataset(case, folder)
    return [np.asarray(x) for x in (made.document_index, made.sample_index, made.shuffle_index)]


def megatron_blend(case: dict[str, Any]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import helpers
    which, number = np.zeros(case["size"], np.int16), np.zeros(case["size"], np.int64)
    weights = np.array(case["weights"])
    helpers.build_blending_indices(
        which, number, weights / weights.sum(), len(weights), case["size"], False
    )
    return [which, number]


def digest(arrays: list[Any]) -> list[str]:
    return [
        hashlib.sha256(f"{x.dtype} {x.shape} ".encode() + x.tobytes()).hexdigest()[:24]
        for x in arrays
    ]


def main() -> None:
    from meshwright.base import console

    console.set_stream(None)
    out: dict[str, Any] = {"indices": [], "blends": []}
    for case in index_cases(range(48)):
        with tempfile.TemporaryDirectory() as folder:
            out["indices"].append(digest(megatron_index(case, Path(folder))))
    out["blends"] = [digest(megatron_blend(case)) for case in blend_cases(range(20))]
    import megatron.core

    out["megatron-core"] = megatron.core.__version__
    json.dump(out, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
