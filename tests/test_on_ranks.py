"""The ranks of tests/on_ranks.py compute together, raise errors in the test, and start fast."""

import time

import pytest
import torch
import torch.distributed as dist

from on_ranks import run_ranks


def split_mlp_equals_dense() -> None:
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    a, b, x = (torch.randn(*s, dtype=torch.float64) for s in ((32, 8), (8, 32), (5, 8)))
    part = (x @ a.chunk(world)[rank].T).relu() @ b.chunk(world, 1)[rank].T
    dist.all_reduce(part)
    torch.testing.assert_close(part, (x @ a.T).relu() @ b.T)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_compute_together(world: int) -> None:
    run_ranks(split_mlp_equals_dense, world)


def test_ranks_are_cheap() -> None:
    run_ranks(split_mlp_equals_dense, 2)  # starts the fork server
    start = time.perf_counter()
    run_ranks(split_mlp_equals_dense, 4)
    took = time.perf_counter() - start
    assert took < 5  # 0.2 s on an idle machine


def unhappy() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")


def test_a_failing_rank_fails_the_test() -> None:
    with pytest.raises(Exception, match="rank one is unhappy"):
        run_ranks(unhappy, 2)
