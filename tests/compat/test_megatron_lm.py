"""The commands of Megatron-LM, on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blocks import block, covers
from documents import ROUNDING, SCRIPT, as_one_process, assert_same, free_port, run, shell, smaller, steps, words

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]


def pretrain_345m() -> str:
    """Return the document's script with paths of the folder that the tests have."""
    script = block("megatron-lm/pretrain-345m").replace("/workspace/model/megatron-models", "model/megatron-models")
    return script.replace("/workspace/model/gpt2-vocab/", "").replace("/workspace/data/my-gpt2", "my-gpt2")


@covers("megatron-lm/pretrain-345m")
def test_megatron_345m_under_torchrun(place: Path) -> None:
    """From an empty folder, then once more from its own checkpoint, with the document's log lines
    in its order.
    """
    first = shell(place, smaller(pretrain_345m()))
    assert "WARNING: could not find the metadata file" in first
    assert re.search(r" iteration +6/ +6 \| consumed samples: +12 \|.*loss scale: \d+\.0 \|", first)
    again = "\n" + shell(place, smaller(pretrain_345m()))
    order = [
        "using world size: 1, data-parallel-size: 1, tensor-model-parallel size: 1, pipeline-model-parallel size: 1",
        "using torch.float16 for parameters ...",
        "------------------------ arguments ------------------------",
        "-------------------- end of arguments ---------------------",
        "setting number of micro-batches to constant 2",
        "> building GPT2BPETokenizer tokenizer ...",
        " > padded vocab (size: 320) with 64 dummy tokens (new size: 384)",
        "> initializing torch distributed ...",
        "> initialized tensor model parallel with size 1",
        "> initialized pipeline model parallel with size 1",
        "> setting random seeds to 1234 ...",
        "time to initialize megatron (seconds):",
        "[after megatron is initialized] datetime:",
        "building GPT model ...",
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0):",
        "> learning rate decay style: cosine",
        " loading checkpoint from model/megatron-models/345m at iteration 6",
        " checkpoint version 3.0",
        " > using checkpoint value 0.00015 for learning rate",
        " > using checkpoint value 1e-05 for minimum learning rate",
        " > using checkpoint value 0.8 for warmup iterations",
        " > using checkpoint value 80 for total number of iterations",
        " > using checkpoint value cosine for learning rate decay style",
        " > using checkpoint value 0.01 for start weight decay",
        " > using checkpoint value 0.01 for end weight decay",
        " > using checkpoint value 12 for total number of weight decay iterations",
        " > using checkpoint value constant for weight decay incr style",
        "  successfully loaded checkpoint from model/megatron-models/345m at iteration 6",
        "    load-checkpoint ................................: (",
        "[after model, optimizer, and learning rate scheduler are built] datetime:",
        "> building train, validation, and test datasets ...",
        " > datasets target sizes (minimum size):",
        "    train:      12",
        "    validation: 6",
        "    test:       2",
        "> building train, validation, and test datasets for GPT ...",
        "Single data path provided for train, valid & test",
        "data_prefix: ['my-gpt2_text_document']",
        " > building dataset index ...",
        "    reading sizes...",
        "    reading pointers...",
        "    reading document index...",
        "    creating numpy buffer of mmap...",
        "    creating memory view of numpy buffer...",
        " > finished creating indexed dataset in",
        "    number of documents: 60",
        " > dataset split:",
        "    train:",
        "     document indices in [0, 42) total of 42 documents",
        "    validation:",
        "     document indices in [42, 54) total of 12 documents",
        "    test:",
        "     document indices in [54, 60) total of 6 documents",
        " > loading doc-idx mapping from",
        " > loading sample-idx mapping from",
        " > loading shuffle-idx mapping from",
        "    total number of samples:",
        "    total number of epochs: 1",
        "> finished creating GPT datasets ...",
        "[after dataloaders are built] datetime:",
        "done with setup ...",
        "(min, max) time across ranks (ms):",
        "    model-and-optimizer-setup ......................: (",
        "    train/valid/test-data-iterators-setup ..........: (",
        "training ...",
        "[before the start of training step] datetime:",
        "[after training is done] datetime:",
        " validation loss at the end of training for val data | lm loss value:",
        "saving checkpoint at iteration       6 to model/megatron-models/345m",
        "  successfully saved checkpoint at iteration       6 to model/megatron-models/345m",
        " validation loss at the end of training for test data | lm loss value:",
    ]
    at = 0
    for line in order:
        found = again.find("\n" + line, at)
        assert found >= 0, f"{line!r} is missing after:\n{again[max(0, at - 200) : at + 600]}"
        at = found + 1
    assert " iteration        " not in again  # no step was left


def test_seed_002_on_two_ranks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its torchrun command, given two GPUs: both samples of a batch at once."""
    ranks = f"torchrun --nproc_per_node 2 --master_port {free_port()} "
    script = smaller(pretrain_345m(), train_iters=18, eval_interval=9).replace("torchrun ", ranks)
    (log,) = run(place, script)
    assert "using world size: 2, data-parallel-size: 2" in log
    given = words(place, script, "torchrun")
    single = as_one_process(place, given[given.index(SCRIPT) + 1 :], monkeypatch)
    assert_same(steps(place / "model/megatron-models/345m"), single, ROUNDING)
