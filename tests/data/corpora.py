"""Helpers of the tests of data: token files, settings, and commands in this process."""

import io
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from helpers import captured_output, tokens_of
from meshwright.__main__ import main
from meshwright.config.schema import Data, TokenizerFlags, TrainConfig, Training
from meshwright.config.text_inputs import Preprocess, PreprocessConfig
from meshwright.data.datasets import build_datasets
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer
from meshwright.data.text import preprocess

BYTES = TokenizerFlags(tokenizer_type="ByteTokenizer")


def write_pair(prefix: str | os.PathLike[str], documents: Any, dtype: Any = np.uint16) -> str:
    """Write documents, each a list of sequences."""
    with Writer(os.fspath(prefix), dtype) as writer:
        for sequences in documents:
            for ids in sequences:
                writer.add(ids)
            writer.end_document()
    return os.fspath(prefix)


def write_older(prefix: Path, documents: Any, code: int = 4, dtype: Any = np.int32) -> str:
    """Write Megatron's `lazy`/`cached` format from its description."""
    sequences = [ids for document in documents for ids in document]
    sizes = [len(ids) for ids in sequences]
    ends = np.cumsum([0, *map(len, documents)])
    n = len(sizes)
    header = [1, code, np.dtype(dtype).itemsize, n, n, len(ends)]
    arrays = [header, range(n + 1), np.cumsum([0, *sizes]), sizes, ends]
    longs = b"".join(np.array(array, "<i8").tobytes() for array in arrays)
    Path(f"{prefix}.idx").write_bytes(b"TNTIDX\x00\x00" + longs)
    Path(f"{prefix}.bin").write_bytes(np.array([*itertools.chain(*sequences)], dtype).tobytes())
    return str(prefix)


def data_config(**given: Any) -> TrainConfig:
    """Return the settings of a short training on these data."""
    training = {
        "micro_batch_size": 1,
        "global_batch_size": 2,
        "train_iters": 20,
        "eval_interval": 10,
        "eval_iters": 2,
    }
    inner = {
        k: given.pop(k)
        for k in list(given)
        if k in {*training, "train_samples", "skip_train", "seed"}
    }
    data = Data(**{"seq_length": 8, "split": "700,200,100", **given})
    return TrainConfig(
        data=data, training=Training(**{**training, **inner}), tokenizer=TokenizerFlags()
    )


def build_and_capture(config: TrainConfig, vocab: int = 1000) -> tuple[Any, list[str], list[str]]:
    """Return a training's data sets, the lines of its log, and the notices."""
    with captured_output() as (lines, notices):
        made = build_datasets(config, vocab)
    return made, lines, notices


def preprocess_inputs(
    output: Any,
    *inputs: Any,
    stderr: Any = None,
    tokenizer: TokenizerFlags = BYTES,
    **settings: Any,
) -> tuple[str, str]:
    """Preprocess the inputs; return what was printed."""
    p = Preprocess(
        input=list(map(str, inputs)),
        **{"output_prefix": str(output), "overwrite": True, **settings},
    )
    stdout, stderr = io.StringIO(), stderr or io.StringIO()
    preprocess.preprocess(PreprocessConfig(p, tokenizer), stdout, stderr)
    return stdout.getvalue(), stderr.getvalue()


def texts_in(prefix: str | os.PathLike[str]) -> list[str]:
    """Return the documents of the ByteTokenizer as text, by the document index."""
    data = Indexed(prefix)
    sequences = [
        bytes(ids[ids < 256].tolist()) for ids in (tokens_of(data, i) for i in range(len(data)))
    ]
    borders = data.doc_idx.tolist()
    return [b"".join(sequences[a:b]).decode() for a, b in zip(borders, borders[1:], strict=False)]


def run_data(*argv: str) -> tuple[int, str, str]:
    """Run `meshwright data ...`; return its status and what it printed."""
    with captured_output() as (out, err):
        status = main(["data", *argv])
    return status, "".join(f"{line}\n" for line in out), "".join(f"{line}\n" for line in err)


def line(text: str, **more: Any) -> bytes:
    """Return a text as a line of JSON."""
    return json.dumps({"text": text, **more}, ensure_ascii=False).encode()
