"""The commands of Megatron-DeepSpeed, on a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from blocks import block, covers
from documents import (
    ROUNDING,
    SCRIPT,
    as_one_process,
    assert_same,
    by_deepspeed,
    free_port,
    run,
    shell,
    smaller,
    steps,
    with_values,
    words,
)

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]


def seed_000(two_nodes: bool) -> str:
    """The document's script with GPUS_PER_NODE of one replica."""
    script = (
        block("megatron-deepspeed/pretrain-one-node")
        .replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=4")
        .replace("PORT=6000", f"PORT={free_port()}")
    )
    if two_nodes:
        script = script.replace("NNODES=1", "NNODES=2").replace("NODE_RANK=0", "NODE_RANK=$1")
        script = script.replace("MASTER_ADDR=localhost", "MASTER_ADDR=127.0.0.1")
        script = script.replace("pipeline-model-parallel-size 2", "pipeline-model-parallel-size 4")
        script = script.replace("checkpoints/gpt2", "checkpoints/two-nodes")
    return smaller(script, num_layers=4, micro_batch_size=2, global_batch_size=4, train_iters=18, eval_interval=9)


def flags_of(place: Path, script: str) -> list[str]:
    given = words(place, script, "python")
    return given[given.index(SCRIPT) + 1 :]


@pytest.mark.long  # real launchers, whose ranks import torch one by one
@covers("megatron-deepspeed/pretrain-one-node", "megatron-deepspeed/generate")
def test_seed_000_on_one_node_and_its_samples(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP2 x PP2 under torch.distributed.launch; TP1 writes samples from the checkpoint, which
    nobody converted.
    """
    script = seed_000(two_nodes=False)
    (log,) = run(place, script)
    assert "data-parallel-size: 1, tensor-model-parallel size: 2, pipeline-model-parallel size: 2" in log
    assert log.count("--distributed-backend nccl has no effect") == 1
    single = as_one_process(place, flags_of(place, script), monkeypatch)
    assert_same(steps(place / "checkpoints/gpt2"), single, ROUNDING)

    shell(place, smaller(block("megatron-deepspeed/generate"), num_layers=4))
    samples = (place / "unconditional_samples.json").read_text().splitlines()
    assert len(samples) == 2 and all("text" in json.loads(line) for line in samples)


@pytest.mark.long  # real launchers, whose ranks import torch one by one
@covers("megatron-deepspeed/pretrain-two-nodes")
def test_seed_000_on_two_nodes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP2 x PP4 on eight ranks of two launchers, which are told their numbers; the second node is
    silent.
    """
    script = seed_000(two_nodes=True)
    logs = run(place, script, script)
    assert "tensor-model-parallel size: 2, pipeline-model-parallel size: 4" in logs[0] and " iteration " not in logs[1]
    single = as_one_process(place, flags_of(place, script), monkeypatch)
    assert_same(steps(place / "checkpoints/two-nodes"), single, ROUNDING)


def test_seed_000_exactly(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its eight ranks of one node, so with two replicas, and without the rounding of fp16."""
    flags = flags_of(place, seed_000(two_nodes=False).replace("--fp16", "--params-dtype float64"))
    flags = with_values(flags, train_iters=6, save="checkpoints/exact", load="checkpoints/exact")
    ends, logs = by_deepspeed(place, [flags], 8)
    assert ends == [0] * 8, "\n".join(logs)
    assert "data-parallel-size: 2" in logs[0]
    assert_same(steps(place / "checkpoints/exact"), as_one_process(place, flags, monkeypatch), 1e-9)


PREPROCESS = ("megatron-deepspeed/preprocess", "oneflow-gpt/preprocess")


@pytest.mark.parametrize("name", PREPROCESS)
@covers(*PREPROCESS)
def test_preprocess_commands(place: Path, name: str) -> None:
    prefix = re.search(r"--output-prefix (\S+)", block(name))[1]  # type: ignore[index]
    for ending in ("bin", "idx", "origin.json"):
        (place / f"{prefix}_text_document.{ending}").unlink(missing_ok=True)
    out = shell(place, block(name))
    assert "Processed 60 documents" in out
    assert (place / f"{prefix}_text_document.bin").stat().st_size > 0
    assert (place / f"{prefix}_text_document.idx").stat().st_size == 34 + 60 * 12 + 61 * 8
