"""The ranks that layouts will be tested on: they compute together, fail loudly, and start fast."""

import time

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks


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
    run_ranks(split_mlp_equals_dense, 2)  # the server starts once
    start = time.perf_counter()
    run_ranks(split_mlp_equals_dense, 4)
    took = time.perf_counter() - start
    print(f"4 ranks: {took:.2f} s")
    assert took < 5  # alone it takes about 0.2 s; the machine may be busy


def unhappy() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")


def test_a_failure_is_seen() -> None:
    with pytest.raises(Exception, match="rank one is unhappy"):
        run_ranks(unhappy, 2)
