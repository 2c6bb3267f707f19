"""The barrier's operations, run in every order that streams allow, and who does without them."""

import ctypes
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from meshwright.parallel import barrier
from meshwright.parallel.barrier import WAIT, Operation, operations


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_no_rank_leaves_before_all_have_come(ranks):
    """In drawn orders of 20 barriers each, no rank is ahead of another, and none waits forever."""
    for seed in range(160 // ranks):
        draw, size = random.Random(seed), 4 * 2 * ranks
        words, memory = [1000 * (r + 1) for r in range(ranks)], {}
        assert all(b - a > size for a, b in zip(words, words[1:], strict=False))
        programs = [operations(words, r) * 20 for r in range(ranks)]
        length, at = len(programs[0]) // 20, [0] * ranks
        while any(at[r] < len(programs[r]) for r in range(ranks)):
            able = []
            for r in range(ranks):
                if at[r] < len(programs[r]):
                    kind, address, value = programs[r][at[r]]
                    if kind != WAIT or memory.get(address, 0) == value:
                        able.append(r)
            assert able, "all ranks wait"
            r = draw.choice(able)
            kind, address, value = programs[r][at[r]]
            if kind != WAIT:
                memory[address] = value
            at[r] += 1
            # Whoever has left a barrier did so after all had come to it.
            left, come = max(n // length for n in at), min((n + length - 1) // length for n in at)
            assert left <= come, at
        assert not any(memory.values())


def test_operations_are_as_cuda_reads_them():
    """CUstreamBatchMemOpParams is a union of 48 bytes; its members begin as these two do."""
    assert ctypes.sizeof(Operation) == 48
    assert [getattr(Operation, name).offset for name in ("kind", "address", "value", "flags")] == [
        0,
        8,
        16,
        24,
    ]


def old_library(name):
    return SimpleNamespace()  # has no cuStreamBatchMemOp_v2


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


def library(name):
    return SimpleNamespace(cuStreamBatchMemOp_v2=mock.Mock(return_value=0))


def refusing_library(name):
    return SimpleNamespace(cuStreamBatchMemOp_v2=mock.Mock(return_value=801))


@pytest.mark.parametrize(
    ("kind", "load", "has_operations"),
    [
        ("cuda", library, True),
        ("cuda", old_library, False),
        ("cuda", no_library, False),
        ("cuda", refusing_library, False),
        ("cpu", library, False),
    ],
)
def test_what_cannot_wait_in_the_stream_takes_kernels(monkeypatch, kind, load, has_operations):
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(
        barrier.devices, "current_stream", lambda device: SimpleNamespace(cuda_stream=0)
    )
    monkeypatch.setattr(barrier.devices, "NVIDIA", "cpu" if kind == "cuda" else "cuda")
    words = [torch.zeros(barrier.count_words(2), dtype=torch.int32) for _ in range(2)]
    assert (barrier.stream_barrier(words, 0) is not None) == has_operations
