"""ZeRO 3 with weights and gradients copied between mapped memory equals that with collectives."""

import pytest
import torch

from layouts import FLAGS, rows_of, trained
from mapped_files import Memory
from meshwright.parallel import unit_copies
from meshwright.parallel.layout import connect
from meshwright.settings import flags
from meshwright.settings.schema import TrainConfig
from on_ranks import run_ranks

LINE = "--zero-stage 3 --train-iters 3"
COUNTED = [(unit_copies.GatherByCopies, "__call__"), (unit_copies.SumByCopies, "__call__")]


def training(line, world):
    words = [*FLAGS.split(), *LINE.split(), "--world-size", str(world), *line.split()]
    config, copied = (
        flags.parse_settings(TrainConfig, [*words, "--data-parallel-sums", how], "test").config
        for how in ("auto", "copies")
    )
    want, memory = rows_of(trained(config, world, connect=connect)), Memory()
    with memory.installed(*COUNTED):
        rows_of(trained(config, world, connect=connect))
        assert memory.calls["__call__"] == 0  # auto takes collectives
        got = rows_of(trained(copied, world, connect=connect))
    # Both add up in the full precision, two ranks in the same order.
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=0 if world == 2 else 1e-9, atol=0)
    layers, passes = config.model.num_layers, 3 * config.global_batch // world
    assert memory.calls["__call__"] >= passes * (layers + 1)


@pytest.mark.parametrize(
    ("line", "world"),
    [
        ("--params-dtype float32 --bf16", 2),
        ("--recompute-granularity full --global-batch-size 6", 3),
        ("--swiglu --global-batch-size 8 --num-distributed-optimizer-instances 2", 4),
        ("--cpu-optimizer", 2),
    ],
)
def test_training(line, world):
    run_ranks(training, world, line, world)
