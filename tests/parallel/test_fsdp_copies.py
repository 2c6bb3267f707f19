"""ZeRO 3 by copy engines: the numbers that collectives give, in layouts of two and three ranks.

The memory that the ranks map is a file, and on a CPU all work is done when it is submitted.
"""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist

from helpers import TINY_FLAGS, read_rows
from meshwright.base import device as devices
from meshwright.parallel import fsdp_copies
from meshwright.parallel.symmetric_memory import SymmetricBuffer
from meshwright.training import network
from on_ranks import train_on_ranks

pytestmark = pytest.mark.whole
CPU = torch.device("cpu")


class Stream:
    device = CPU

    def wait_stream(self, other):
        pass

    wait_event = wait_stream

    def record_event(self):
        return None


class FileMapper:
    """A BufferMapper whose buffers are files in a folder; it counts the exchanges."""

    made = 0
    exchanges = 0

    def __init__(self, group, device, folder):
        self.group, self.folder, self.stream = group, folder, Stream()
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def barrier(self):
        FileMapper.exchanges += 1
        dist.barrier(self.group)

    def zeros(self, size, dtype):
        FileMapper.made += 1
        places = [self.folder / f"buffer-{self.made}-{rank}" for rank in range(self.ranks)]
        buffers = [torch.from_file(str(p), shared=True, size=size, dtype=dtype) for p in places]
        return SymmetricBuffer(buffers, self.rank, self.barrier, self.stream)


def map_files(folder, rank):
    make = functools.partial(FileMapper, device=CPU, folder=folder)
    network.sums_by_copies = lambda config, layout, device: make(layout.group("shard"))
    fsdp_copies.BufferMapper = lambda group, device: make(group)
    devices.current_stream = lambda device: Stream()
    devices.use_stream = lambda stream: contextlib.nullcontext()


def keep(folder, rank):
    pass


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, "--bf16 --recompute-granularity full --eval-interval 2"),
        (
            2,
            "--fp16 --initial-loss-scale 1024 --seq-length 16 --hidden-size 48 --num-attention-heads 3 --swiglu",
        ),
        (3, "--global-batch-size 12"),
    ],
)
def test_same_numbers_as_collectives(tmp_path, ranks, flags):
    rows = {}
    for prepare in (keep, map_files):
        folder = tmp_path / prepare.__name__
        folder.mkdir()
        words = [*TINY_FLAGS, "--zero-stage", "3", "--mock-data", "--vocab-size", "61"]
        words += ["--train-iters", "4", "--eval-iters", "1", "--lr", "1e-2", *flags.split()]
        words += ["--run-dir", str(folder / "run")]
        done = train_on_ranks(ranks, words, folder, functools.partial(prepare, folder))
        assert done == [0] * ranks, (folder / "log-0").read_text()[-3000:]
        rows[prepare] = [(r["loss"], r["grad_norm"]) for r in read_rows(folder / "run")]
    assert (tmp_path / "map_files" / "buffer-2-1").exists()
    # The sum of two numbers does not depend on their order.
    tolerance = 0 if ranks == 2 else 1e-5
    assert rows[map_files] == [pytest.approx(row, rel=tolerance) for row in rows[keep]] != []
