"""Products overlapped with copies of rows compute what they do with collectives around them.

Copy engines copy between GPUs; here ranks copy in files that all of them map, and do so at once.
"""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from layouts import FLAGS, rows_of, trained
from mapped_files import CPU, Memory
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.parallel import agree, comm, overlap
from meshwright.parallel.layout import connect
from on_ranks import run_ranks

SIZE = 2 << 20
COUNTED = [
    (overlap.OverlappedMatmuls, name) for name in ("gather_multiply", "scatter", "start_gather")
]


def products():
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    x, weight, bias, wide = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((6, 5), (7, 5), (7,), (6 * world, 7))
    )
    dist.broadcast(bias, 0)
    memory, size = Memory(), 6 * 7 * 8
    with memory.installed(*COUNTED):
        by = overlap.OverlappedMatmuls(group, size, CPU)
        plain = overlap.PlainMatmuls(group)
        for _ in range(2):  # in memory that has been used before
            for b in (bias, None):
                y, rows = by.gather_multiply(x, weight, b, keeps_rows=True)
                want, want_rows = plain.gather_multiply(x, weight, b)
                torch.testing.assert_close(y, want)
                assert torch.equal(rows, want_rows)
                got, want = (
                    comm.wait_for(
                        each.multiply_scatter(wide, weight.t(), None if b is None else b[:5])
                    )
                    for each in (by, plain)
                )
                torch.testing.assert_close(got, want)
            torch.testing.assert_close(
                by.gather_multiply(x, weight)[0], plain.gather_multiply(x, weight)[0]
            )
            back = by.back_gather_multiply(x, weight.t())
            torch.testing.assert_close(back, plain.back_gather_multiply(x, weight.t()))
            started = by.start_gather(x)
            got, want = (
                comm.wait_for(each.back_multiply_scatter(wide, weight)) for each in (by, plain)
            )
            torch.testing.assert_close(got, want)
            assert torch.equal(comm.wait_for(started), want_rows)
        calls = {"gather_multiply": 8, "scatter": 6, "start_gather": 2}
        assert memory.calls == calls
        # What is too large for the memory that is mapped takes the collectives.
        more = torch.randn(18, 5, generator=draw, dtype=torch.float64)
        torch.testing.assert_close(
            by.gather_multiply(more, weight, None), plain.gather_multiply(more, weight, None)
        )
        assert torch.equal(comm.wait_for(by.start_gather(more)), comm.all_gather(more, group))
        large = torch.randn(18 * world, 7, generator=draw, dtype=torch.float64)
        got, want = (
            comm.wait_for(each.back_multiply_scatter(large, weight)) for each in (by, plain)
        )
        torch.testing.assert_close(got, want)
        assert memory.calls["scatter"] == calls["scatter"]


@pytest.mark.parametrize("world", [2, 3])
def test_products(world):
    run_ranks(products, world)


def make_trials_small():
    """Compare few rows, which a CPU multiplies in no time; from SIZE on a rank's are worth it."""
    overlap.TRIAL_BYTES, overlap.WORTHWHILE_BYTES = 1 << 14, SIZE


def choice():
    make_trials_small()
    group = dist.group.WORLD
    for wanted, reason in (
        ("off", "of --tp-overlap off"),
        ("auto", "the device is not an NVIDIA GPU"),
    ):
        by, why = overlap.choose_matmuls(wanted, group, CPU, SIZE)
        assert (type(by), why) == (overlap.PlainMatmuls, reason)
    with pytest.raises(
        UserError, match="--tp-overlap on: the device is not an NVIDIA GPU; give --tp-overlap auto"
    ):
        overlap.choose_matmuls("on", group, CPU, SIZE)
    memory = Memory()
    with memory.installed(*COUNTED):
        by, why = overlap.choose_matmuls("on", group, CPU, SIZE)
        assert (type(by), why) == (overlap.OverlappedMatmuls, "")
        few = "the rows of a micro-batch are few: 1 MiB on a rank, of 2"
        assert overlap.choose_matmuls("auto", group, CPU, SIZE - 1)[1] == few
        assert (
            type(overlap.choose_matmuls("on", group, CPU, SIZE - 1)[0]) is overlap.OverlappedMatmuls
        )
        assert overlap.choose_matmuls("auto", group, CPU, SIZE, "no")[1] == "no"
        # A rank that cannot map memory, or computes something else, takes the others with it.
        compare, refused = (
            overlap.largest_difference,
            mock.Mock(side_effect=RuntimeError("no rights\nto map")),
        )
        for own_reason, owner, name, broken in (
            ("it failed: RuntimeError: no rights", symmetric, "empty", refused),
            (
                "its result is 50.",
                overlap,
                "largest_difference",
                lambda *given: compare(*given) + 0.5,
            ),
        ):
            memory.others_come, memory.numbers = owner is overlap, itertools.count(100)
            with (
                mock.patch.object(owner, name, broken)
                if dist.get_rank() == 1
                else contextlib.nullcontext()
            ):
                by, why = overlap.choose_matmuls("auto", group, CPU, SIZE)
            assert type(by) is overlap.PlainMatmuls
            assert why.startswith(
                own_reason if dist.get_rank() == 1 else "it failed on another rank"
            ), why
        with mock.patch.object(agree.socket, "gethostname", lambda: f"host-{dist.get_rank()}"):
            assert (
                overlap.choose_matmuls("auto", group, CPU, SIZE)[1]
                == "tensor ranks are on several machines"
            )


@pytest.mark.flag("tp_overlap")
def test_choice():
    run_ranks(choice, 2)


LINE = "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --train-iters 2 --num-layers 2"
MORE = "--recompute-granularity full --disable-bias-linear --swiglu --untie-embeddings-and-output-weights"
LINES = [pytest.param(LINE, marks=pytest.mark.long), f"{LINE} --fused-kernels on {MORE}"]


def training(line):
    make_trials_small()
    words = [*FLAGS.split(), *line.split()]
    config, overlapped = (
        flags.parse_settings(TrainConfig, [*words, f"--tp-overlap={how}"], "test").config
        for how in ("auto", "on")
    )
    want, memory = rows_of(trained(config, 2, connect=connect)), Memory()
    with memory.installed(*COUNTED):
        got = rows_of(trained(overlapped, 2, connect=connect))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-9, atol=0)
    # A layer gathers for qkv and fc, and in backward for both proj; it scatters as often.
    layers, again = config.model.num_layers, "full" in line
    in_training, in_validation = (
        2 * config.global_batch,
        config.training.eval_iters * config.global_batch,
    )
    in_layers = in_training * layers * (6 if again else 4) + in_validation * layers * 2
    probes, of_head = 4, in_training
    wanted = in_layers + of_head + probes
    again = in_training * (2 * layers + 1)  # rows for the gradients of qkv, fc and the head
    counts = {
        "gather_multiply": wanted + in_validation,
        "scatter": wanted,
        "start_gather": again + probes // 2,
    }
    assert memory.calls == counts


@pytest.mark.parametrize("line", LINES, ids=["plain", "recomputed"])
def test_training(line):
    run_ranks(training, 2, line)
