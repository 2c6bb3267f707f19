"""What is kept under a key: each input of it, changed once, gets nothing that was kept before.

The tables are complete: a parameter or a field that is added later fails until it has a place here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import json
import os
import sqlite3
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import BYTES, write_pair

from helpers import captured_output, write_counting
from meshwright.cli.train_tokenizer import TrainTokenizerConfig, recorded_settings
from meshwright.config.schema import Data, TokenizerFlags, TrainConfig, Training
from meshwright.config.text_inputs import Preprocess, PreprocessConfig
from meshwright.data.blend import Blend
from meshwright.data.datasets import build_datasets
from meshwright.data.files.indexed import Indexed, fingerprint
from meshwright.data.loader import Mock, Samples
from meshwright.data.packing import Packed, pack_files
from meshwright.data.text.preprocess import PreprocessPlan
from meshwright.data.vocabularies import byte_symbols

LENGTHS = [30, 20, 10, 40, 25, 7]

# Index arrays: what they are made of


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Indexed]:
    """Token files by what is different in their lengths."""
    made = {}
    for name, lengths in {
        "base": LENGTHS,
        "other": [30, 20, 40, 10, 25, 7],
        "longer": [31, *LENGTHS[1:]],
    }.items():
        write_counting(tmp_path / name, lengths)
        made[name] = Indexed(str(tmp_path / name))
    return made


ORDER: dict[str, Any] = {
    "indexed": "base",
    "documents": range(6),
    "num_samples": 20,
    "seq_length": 8,
    "seed": 1,
}
FILES, PARTS = ["other", "longer"], [range(5), range(1, 6)]
# What makes the arrays, its inputs, and other values of each input; None if it changes no array.
CACHED: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, list[Any] | None]]] = {
    "Samples": (
        Samples,
        {**ORDER, "cutoff": 0.8, "name": "train"},
        {
            "indexed": FILES,
            "documents": PARTS,
            "num_samples": [16, 60],
            "seq_length": [7, 9],
            "seed": [0, 2],
            "cutoff": [0.1],
            "name": None,  # a split's own entry, with its own documents
        },
    ),
    "Packed": (
        Packed,
        ORDER,
        {
            "indexed": FILES,
            "documents": PARTS,
            "num_samples": [1, 100],
            "seq_length": [7, 9, 30],
            "seed": [0, 2],
        },
    ),
    "pack_files": (
        pack_files,
        {name: value for name, value in ORDER.items() if name != "num_samples"},
        {"indexed": FILES, "documents": PARTS, "seq_length": [7, 9, 30], "seed": [0, 2]},
    ),
    "Blend": (
        Blend,
        {"parts": [Mock(9, 99, 4, n) for n in range(3)], "weights": [0.2, 0.3, 0.5], "size": 50},
        {
            "parts": None,  # the order depends on the weights alone
            "weights": [[0.3, 0.2, 0.5], [0.2, 0.3000001, 0.5], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]],
            "size": [49, 51],
        },
    ),
}
NO_INPUT = {"self", "cache_dir"}


def arrays(made: Any) -> list[Any]:
    """Return all index arrays of a data set, or those that a function returned."""
    found = (
        made
        if isinstance(made, list)
        else [x for x in vars(made).values() if isinstance(x, np.ndarray)]
    )
    assert found
    return [(x.dtype, x.tolist()) for x in found]


@pytest.mark.parametrize("name", CACHED)
def test_index_arrays_depend_on_each_input(
    name: str, files: dict[str, Indexed], tmp_path: Path
) -> None:
    """One folder serves all variations, and each as if it had been the only one."""
    make, base, changes = CACHED[name]
    parameters = set(inspect.signature(make).parameters) - NO_INPUT
    assert parameters == set(base) == set(changes), "each parameter needs other values in the table"

    def build(given: dict[str, Any], folder: Path | None) -> list[Any]:
        return arrays(
            make(
                **{n: files.get(v, v) if isinstance(v, str) else v for n, v in given.items()},
                cache_dir=folder,
            )
        )

    with captured_output():
        plain = build(base, None)
        variations = [
            base,
            *({**base, n: value} for n, values in changes.items() for value in values or ()),
        ]
        for given in [*variations, *variations[::-1]]:
            without = build(given, None)
            assert build(given, tmp_path / "cache") == without, given
            assert given == base or without != plain, f"{given} changes nothing"


def test_token_files_are_known_by_their_lengths(tmp_path: Path) -> None:
    """Neither path nor time counts; each length and each border of documents does."""
    documents = [[range(5), range(3)], [range(4)], [range(6)]]
    known = {}
    for name, variation in {
        "base": documents,
        "lengths": [[range(5), range(3)], [range(6)], [range(4)]],
        "sequences": [[range(3), range(5)], [range(4)], [range(6)]],
        "boundaries": [[range(5)], [range(3), range(4)], [range(6)]],
        "more": [*documents, [range(1)]],
        "longer": [[range(5), range(4)], [range(4)], [range(6)]],
    }.items():
        known[name] = fingerprint(write_pair(tmp_path / name, variation))
    known["type"] = fingerprint(write_pair(tmp_path / "type", documents, np.int32))
    assert len(set(known.values())) == len(known)
    moved = write_pair(tmp_path / "moved", documents)
    os.utime(f"{moved}.idx", (1, 1))
    assert fingerprint(moved) == known["base"]


# Orders of a run: every setting that is read on the way to them

CORPORA = {
    "a": [12, 9, 17, 8, 11, 30, 5, 14, 22, 9],
    "b": [20, 18, 7, 9, 16, 4, 25],
    "c": [40, 4, 13, 21, 6],
}
TRAINING: dict[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 12,
    "eval_interval": 6,
}
TRAINING |= {"eval_iters": 1}
DATA: dict[str, Any] = {"seq_length": 8, "split": "60,20,20"}
BASES: dict[str, dict[str, Any]] = {
    "stream": {"data_path": ["a"]},
    "packed": {"data_path": ["a"], "packing": "best-fit"},
    "blend": {"data_path": ["0.3", "a", "0.7", "b"]},
    "apart": {
        "train_data_path": ["a"],
        "valid_data_path": ["1", "b", "1", "c"],
        "test_data_path": ["c"],
    },
    "several": {
        "train_data_path": ["a"],
        "valid_data_path": ["b", "c"],
        "multiple_validation_sets": True,
    },
    "parts": {
        "train_weighted_split_paths": ["t: 0.4 0:0.5 a, 0.6 0:1 b"],
        "valid_weighted_split_paths": ["v: 1 0.5:1 a"],
        "test_weighted_split_paths": ["x: 1 0:1 c"],
    },
    "stages": {"data_path": ["0.3", "a", "0.7", "b", "0", "c"], "blend_stages": ["10: 1 a 1 c"]},
}
CHANGES: dict[str, dict[str, list[Any]]] = {
    "stream": {
        "data_path": [["b"], ["0.5", "a", "0.5", "b"]],
        "seq_length": [7, 9],
        "split": ["50,30,20", "50,20,30"],
        "last_epoch_cutoff": [0.1],
        "dataloader_type": ["cyclic"],
        "packing": ["best-fit"],
        "full_validation": [True],
        "seed": [1, 1235],
        "global_batch_size": [3],
        "train_iters": [30, 40],
        "train_samples": [60],
        "eval_iters": [2],
        "eval_interval": [2],
        "mock_data": [True],
        "skip_train": [True],
    },
    "packed": {
        "data_path": [["b"]],
        "seq_length": [7, 9],
        "split": ["50,30,20"],
        "seed": [1],
        "train_iters": [90],
    },
    "blend": {
        "data_path": [
            ["0.31", "a", "0.69", "b"],
            ["0.3", "a", "0.7", "c"],
            ["0.3", "b", "0.7", "a"],
        ],
        "seed": [1],
        "train_iters": [13],
        "blend_stages": [["10: 1 a 1 b"]],
        "packing": ["best-fit"],
    },
    "apart": {
        "train_data_path": [["c"]],
        "valid_data_path": [["1", "a", "1", "c"], ["1", "b", "2", "c"]],
        "test_data_path": [["b"]],
    },
    "several": {"multiple_validation_sets": [False], "valid_data_path": [["b", "a"]]},
    "parts": {
        "train_weighted_split_paths": [
            ["t: 0.4 0:0.6 a, 0.6 0:1 b"],
            ["t: 0.5 0:0.5 a, 0.5 0:1 b"],
        ],
        "valid_weighted_split_paths": [["v: 1 0.4:1 a"], ["v: 1 0.5:0.9 a"]],
        "test_weighted_split_paths": [["x: 1 0:0.8 c"]],
    },
    "stages": {"blend_stages": [["16: 1 a 1 c"], ["10: 1 a 2 c"], ["10: 1 b 1 c"]], "seed": [1]},
}
# Fields that decide where or how something is read, or what is done with a batch: no order.
NO_ORDER = set(
    "data_cache_path data_impl mmap_warmup num_workers blend_change_at data_changed validation_set_names "
    "eod_mask_loss reset_position_ids reset_attention_mask skip_train_iteration_range".split()
)
# Files that only list the values of fields above.
LISTS = {"data_args_path", "per_split_data_args_path"}
LISTS |= {f"{split}_weighted_split_paths_path" for split in ("train", "valid", "test")}
BORDERS = {"split_arithmetic"}  # has a test of its own, as its values rarely differ
LENGTHS_OF_RUNS = set(
    "train_tokens train_epochs rampup_batch_size step_batch_size_schedule seq_length_schedule num_accumulation_steps".split()
)
# read with the other small languages when settings are made
REACTIONS = {"on_nonfinite", "on_spike"}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    for number, (name, lengths) in enumerate(CORPORA.items()):
        write_counting(folder / name, lengths, first=1000 * number)
    return folder


def orders(cache: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of all samples of each data set."""
    of_training = {field.name for field in dataclasses.fields(Training)}
    training = Training(**TRAINING | {n: v for n, v in given.items() if n in of_training})
    if training.train_samples:
        training = dataclasses.replace(training, train_iters=None)
    data = Data(
        **DATA | {n: v for n, v in given.items() if n not in of_training},
        data_cache_path=str(cache),
    )
    with captured_output():
        made = build_datasets(TrainConfig(data=data, training=training), 9999)
    samples = {
        n: [d[k].tolist() for k in range(min(len(d), 40))] for n, d in made.items() if d is not None
    }
    return {name: [len(each), each] for name, each in samples.items()}


@pytest.mark.parametrize("base", CHANGES)
def test_an_order_depends_on_each_setting(
    base: str, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever entries are there, each is what it is without any."""
    monkeypatch.chdir(corpora)
    plain = orders(tmp_path / "shared", BASES[base])
    for field, values in CHANGES[base].items():
        for number, value in enumerate(values):
            given = BASES[base] | {field: value}
            if field == "mock_data":
                given.pop("data_path")
            without = orders(tmp_path / f"{field}{number}", given)
            assert orders(tmp_path / "shared", given) == without != plain, field
    assert orders(tmp_path / "shared", BASES[base]) == plain


def test_every_setting_on_the_way_to_an_order_is_changed_above(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read of a run's data and training, and all fields of its data, are in the tables."""
    monkeypatch.chdir(corpora)
    read = set[str]()

    def noting(self: Any, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(self, name)

    for group in (Data, Training):
        monkeypatch.setattr(group, "__getattribute__", noting, raising=False)
    for base in BASES.values():
        orders(tmp_path, base)
    monkeypatch.undo()
    named = {field for changes in CHANGES.values() for field in changes}
    known = named | NO_ORDER | LISTS | BORDERS
    assert {field.name for field in dataclasses.fields(Data)} - known == set()
    of_training = {field.name for field in dataclasses.fields(Training)}
    assert {"seed", "train_iters"} <= read & of_training
    assert (read & of_training) - known - LENGTHS_OF_RUNS - REACTIONS - {
        "micro_batch_size"
    } == set()


def test_files_that_changed_in_place_have_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same sizes of both files and the same times."""
    monkeypatch.chdir(tmp_path)
    times = None
    for packing, lengths in itertools.product(
        ("stream", "best-fit"), (CORPORA["a"], CORPORA["a"][::-1])
    ):
        write_counting("a", lengths)
        times = times or os.stat("a.idx").st_mtime_ns
        os.utime("a.idx", ns=(times, times))
        given = {"data_path": ["a"], "packing": packing}
        assert orders(tmp_path / "shared", given) == orders(
            tmp_path / f"{packing}{lengths[0]}", given
        )


# What token files and vocabularies were made from

# Other values of each field of `preprocess`; None if it changes nothing in the files.
PREPROCESS: dict[str, Any] = {
    "input": ["other.jsonl"],
    "include": ["*.jsonl"],
    "exclude": ["x"],
    "json_keys": ["text", "title"],
    "table": "t",
    "document_separator": "---",
    "encoding": "latin-1",
    "on_error": "skip",
    "output_prefix": None,
    "document_length": 5,
    "shard": "1/1",
    "append_eod": True,
    "dataset_impl": None,
    "overwrite": None,
    "workers": None,
    "log_interval": None,
    "split_sentences": True,
    "sentence_splitter": "punkt",
    "keep_newlines": True,
    "lang": "german",
}
IDLE: dict[str, Any] = {
    "output_prefix": "elsewhere",
    "dataset_impl": "lazy",
    "overwrite": True,
    "workers": 3,
}
IDLE |= {"log_interval": 7}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("text.jsonl", "other.jsonl"):
        Path(name).write_text(json.dumps({"text": f"of {name}", "title": "t"}) + "\n")
    return tmp_path


def preparation(tokenizer: TokenizerFlags = BYTES, **given: Any) -> PreprocessPlan:
    p = Preprocess(**{"input": ["text.jsonl"], "output_prefix": "out", **given})
    return PreprocessPlan(PreprocessConfig(p, tokenizer), StringIO(), StringIO())


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Preprocess)])
def test_token_files_are_made_from_each_setting(name: str, texts: Path) -> None:
    value = PREPROCESS[name]
    # Punkt needs a download
    sentences = {"split_sentences": True} if name in ("keep_newlines", "lang") else {}
    if name == "table":
        with contextlib.closing(sqlite3.connect("t.db")) as base:
            base.execute("create table t (text text)")
        sentences = {"input": ["t.db"]}
    if value is None:
        assert preparation(**{name: IDLE[name]}).made_from == preparation().made_from
        return
    before, now = (
        preparation(**sentences).made_from,
        preparation(**sentences, **{name: value}).made_from,
    )
    assert now != before and [key for key in now if now[key] != before[key]] in (
        ["inputs"],
        ["settings"],
    )


def test_token_files_are_made_from_their_texts_and_vocabulary(texts: Path) -> None:
    """From content, order and names of the texts, and from what the vocabulary's files say."""
    every = [preparation().made_from, preparation(input=["text.jsonl", "other.jsonl"]).made_from]
    every.append(preparation(input=["other.jsonl", "text.jsonl"]).made_from)
    # as long
    Path("text.jsonl").write_text(json.dumps({"text": "of text.jsonk", "title": "t"}) + "\n")
    every.append(preparation().made_from)
    every.append(
        preparation(TokenizerFlags(tokenizer_type="NullTokenizer", vocab_size=99)).made_from
    )
    every.append(
        preparation(TokenizerFlags(tokenizer_type="NullTokenizer", vocab_size=98)).made_from
    )
    for pair in ("a b", "b a"):  # as many ids, and as many bytes
        words = [*byte_symbols(), pair.replace(" ", ""), "<|endoftext|>"]
        Path("vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
        Path("merges.txt").write_text(f"#version: 0.2\n{pair}\n")
        every.append(
            preparation(TokenizerFlags(vocab_file="vocab.json", merge_file="merges.txt")).made_from
        )
    assert len({json.dumps(made_from) for made_from in every}) == len(every)


def test_a_vocabulary_is_made_from_each_setting() -> None:
    needed = {"input": ["a"], "vocab_size": 300, "output": Path("out")}
    before = recorded_settings(TrainTokenizerConfig(**needed))
    # the texts are known by their contents
    idle = {"input": ["b"], "output": Path("other"), "overwrite": True}
    for field in dataclasses.fields(TrainTokenizerConfig):
        change = {"vocab_size": 301, **idle}.get(field.name, PREPROCESS.get(field.name))
        now = recorded_settings(TrainTokenizerConfig(**needed | {field.name: change}))
        assert (now == before) == (field.name in idle), field.name
