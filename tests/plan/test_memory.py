"""Predicted memory against torch's accounting of real training steps, and torch's allocator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from accounting import PADDED, account, config_of  # noqa: E402

from meshwright.kernels import grid
from meshwright.parallel import shard
from meshwright.plan import blocks, memory, parameters
from meshwright.plan.allocator import MIB, CachingAllocator

SMALL = """--num-layers 3 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --micro-batch-size 4
--global-batch-size 8""".split()


class Gpu:
    kind, context_bytes = "cuda", 10**9


def error_of(*words: str, pipeline_rank: int = 0) -> tuple[float, float]:
    """Return the relative errors of what is predicted: held throughout, and at the peak."""
    config = config_of(*words)
    held, peak = account(config, pipeline_rank)
    predicted = memory.memory_of_rank(config, PADDED, pipeline_rank, Gpu()).allocated - sum(memory.WORKSPACES)
    kept = sum(memory.held_bytes(config, PADDED, pipeline_rank, "cuda").values())
    kept -= 2 * memory.fp8_parameters(config, pipeline_rank)  # cast in the first step
    return kept / held - 1, predicted / peak - 1


LLAMA = """--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16"""


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("--bf16", 0),
        ("", 0),
        (LLAMA, 0),
        ("--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 0),
        ("--fp16 --recompute-granularity full --recompute-method block --recompute-num-layers 2", 0),
        ("--bf16 --recompute-granularity selective --fp32-residual-connection --final-logit-softcapping 30", 0),
        ("--bf16 --fp8-format hybrid --optimizer muon", 0),
        ("--bf16 --qk-layernorm --fused-kernels off --compile off", 0),
        ("--bf16 --optimizer lion --squared-relu --apply-residual-connection-post-layernorm", 0),
        ("--bf16 --tensor-model-parallel-size 2 --sequence-parallel --world-size 2", 0),
        ("--bf16 --context-parallel-size 2 --zero-stage 1 --world-size 2 --attention-dropout 0", 0),
        ("--bf16 --pipeline-model-parallel-size 3 --world-size 3 --global-batch-size 16", 0),
        ("--bf16 --pipeline-model-parallel-size 3 --world-size 3 --global-batch-size 16", 2),
        ("--bf16 --pipeline-model-parallel-size 3 --pipeline-schedule gpipe --world-size 3 --global-batch-size 12", 1),
    ],
)
def test_agrees_with_what_training_allocates(line, rank):
    given = line.split()
    held, peak = error_of(*(SMALL if "--global-batch-size" not in given else SMALL[:-2]), *given, pipeline_rank=rank)
    assert abs(held) < 0.002 and abs(peak) < 0.005, f"held {held:+.2%}, peak {peak:+.2%}"


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Forget what was predicted before and within a test that changes a table."""
    caches = parameters.shapes_of_layer, memory.measure_step, memory.measure_passes
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_reads_the_rule_of_the_flat_buffers(monkeypatch):
    """Wider gaps between parameters need more memory, in the prediction as in training."""
    words = *SMALL, "--bf16", "--zero-stage", "1", "--world-size", "2"
    before = account(config_of(*words))[0]
    monkeypatch.setattr(shard, "ALIGN", 1 << 14)
    assert account(config_of(*words))[0] > 1.02 * before
    assert abs(error_of(*words)[0]) < 0.002


def test_reads_the_kernels_tables(monkeypatch, forgetful):
    """More programs of a kernel need more memory, in the prediction as in training."""
    words = *SMALL, "--bf16", "--micro-batch-size", "8"
    before = error_of(*words)[1], account(config_of(*words))[1]
    launch = grid.BackwardLaunch(4, 64, 3, rows=1)
    monkeypatch.setitem(grid.BACKWARD, 1024, launch)
    memory.measure_step.cache_clear()
    after = error_of(*words)[1], account(config_of(*words))[1]
    assert after[1] > before[1] and abs(after[0]) < 0.005


def test_extends_to_many_layers():
    """The memory of a step grows by the same bytes with each layer."""
    peaks = []
    for layers in (4, 5, 6, 12):
        sizes = blocks.sizes_of(config_of(*SMALL, "--bf16", "--num-layers", str(layers)), 1 << 14, 132)
        peaks.append(sum(memory.measure_step(sizes, blocks.Stage(layers)).values()))
    dropout = peaks[1] - peaks[0]
    assert peaks[2] - peaks[1] == dropout and peaks[3] - peaks[2] == 6 * dropout


def test_allocator_takes_segments_as_torch_does():
    allocator = CachingAllocator()
    allocator.allocate(1, 512)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(2, 3 * MIB)
    assert allocator.reserved == 22 * MIB  # 20 for all below 10
    allocator.allocate(3, 11 * MIB + 512)
    assert allocator.reserved == 22 * MIB  # the rest of the 20
    allocator.allocate(4, 11 * MIB + 512)
    assert allocator.reserved == 34 * MIB
    for key in (2, 3, 4):
        allocator.release(key)
    allocator.allocate(5, 12 * MIB)  # the smallest that fits
    allocator.allocate(6, 20 * MIB)
    assert allocator.reserved == 34 * MIB
    allocator.release(6)
    allocator.empty_cache()
    assert allocator.reserved == 14 * MIB and allocator.most == 34 * MIB


def test_graphs_take_a_pool_of_their_own():
    config = config_of(*SMALL, "--bf16")
    graphs, plain = (
        memory.memory_of_rank(c, PADDED, 0, Gpu()).reserved
        for c in (config, config_of(*SMALL, "--bf16", "--cuda-graphs", "off"))
    )
    assert graphs >= plain > memory.memory_of_rank(config, PADDED, 0, Gpu()).allocated
