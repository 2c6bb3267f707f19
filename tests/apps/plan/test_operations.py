"""What a measured step executes: operations by hand, kernels by their source, whole layers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from plans import STILL, planned

from meshwright.apps.plan.measure.account import META, Account
from meshwright.apps.plan.measure.operations import TracedOperation, operations_of_rank
from meshwright.apps.plan.measure.recorder import OperationRecorder, accesses, launch_of
from meshwright.apps.plan.measure.steps import Extent, measure_layers
from meshwright.apps.plan.measure.work import is_measurable, operations_of_step
from meshwright.base.device_profiles import LAYER_LAUNCHES
from meshwright.kernels.triton import activation, embedding, muon, norm

SMALL = f"--num-layers 12 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --vocab-size 128 --bf16 {STILL}"
ONE = f"{SMALL} --micro-batch-size 2 --global-batch-size 2"


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def executed(run) -> list[TracedOperation]:
    """Return what a function executes, without views."""
    recorder = OperationRecorder()
    with Account(recorder):
        run()
    return [
        op for operations in recorder.sections.values() for op in operations if op.launch != "view"
    ]


def test_products_count_flops_factors_and_totals():
    a, b, bias = new(6, 8), new(8, 10), new(10)
    (plain,) = executed(lambda: torch.addmm(bias, a, b))
    assert plain == TracedOperation(
        "product", "addmm", "torch", 2 * 6 * 8 * 10, 2 * (48 + 80 + 60), "bfloat16"
    )
    sums = new(6, 10, dtype=torch.float32)
    (added,) = executed(lambda: torch.ops.aten.addmm.dtype_out(sums, a, b, torch.float32, out=sums))
    # read and written
    assert (added.flops, added.bytes, added.totals) == (960, 2 * (48 + 80), 2 * 4 * 60)
    (batched,) = executed(lambda: torch.bmm(new(3, 6, 8), new(3, 8, 10)))
    assert batched.flops == 3 * 960


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (
            lambda: F.layer_norm(new(16, 32), (32,), new(32), new(32)),
            2 * 2 * 16 * 32 + 2 * 2 * 32 + 2 * 4 * 16,
        ),
        (lambda: F.gelu(new(16, 32)), 2 * 2 * 16 * 32),
        (lambda: new(16, 32).add_(new(16, 32)), 3 * 2 * 16 * 32),
        (lambda: new(16, 32).copy_(new(16, 32)), 2 * 2 * 16 * 32),
        (lambda: new(16, 1).expand(16, 32).sum(), 2 * 16 + 2),  # what is expanded is read once
        # A table of a thousand rows, of which four are read
        (lambda: F.embedding(new(4, dtype=torch.int64), new(1000, 32)), 2 * 2 * 4 * 32 + 8 * 4),
    ],
)
def test_passes_count_what_they_touch(run, moved):
    (operation,) = executed(run)
    assert operation.kind == "pass" and operation.bytes == moved


def test_views_and_memory_alone_execute_nothing():
    assert not executed(lambda: new(4, 8).view(8, 4).t()[2:])


def test_kernels_are_read_for_what_they_touch():
    reads, writes = accesses(norm._norm_forward)
    assert {"residual", "pending", "bias", "rows", "weight", "shift"} <= reads
    assert {"x", "y", "means", "rstds"} <= writes and not writes & {"pending", "weight", "residual"}
    # Through a function that stores, and through tables of addresses
    assert "du" in accesses(activation._activation_backward)[1]
    reads, writes = accesses(muon._muon_subtract)
    assert "*weights" in reads & writes and "updates" in reads - writes


def test_launches_move_what_their_arguments_hold():
    x, y, weight, rstds = new(8, 16), new(8, 16), new(16), new(8, dtype=torch.float32)
    given = [None, x, None, None, weight, None, None, y, None, rstds, 8, 0, 1.0, 1e-5, None, None]
    assert launch_of(norm._norm_forward, given).bytes == 2 * (128 + 128 + 16) + 4 * 8
    sums, rows = new(1000, 16, dtype=torch.float32), new(8, 16)
    ids, order, ends = (new(8, dtype=torch.int64) for _ in range(3))
    added = launch_of(embedding._embedding_add_rows, [sums, rows, ids, order, ends, 16])
    assert added.bytes == 2 * 4 * 8 * 16 + 2 * 8 * 16 + 3 * 8 * 8  # eight rows of the table
    table = new(3, dtype=torch.int64)
    numbers = [new(3, 5), *(new(1, dtype=torch.float32) for _ in range(3))]
    subtracted = launch_of(muon._muon_subtract, [table, *numbers, None, 5]).bytes
    assert subtracted == 3 * 8 + 2 * 3 * 5 * 4 + 2 * 3 * 5 + 3 * 4
    copied = launch_of(muon._muon_subtract, [table, *numbers, table, 5]).bytes
    assert copied == subtracted + 3 * 8 + 2 * 3 * 5


@pytest.mark.parametrize(
    ("block", "flags"), [("fused", ""), ("plain", "--fused-kernels off --compile off")]
)
def test_a_layer_launches_what_calibration_divides_by(block, flags):
    recorder = OperationRecorder()
    config = planned(f"{ONE} {flags}".replace("--num-layers 12", "--num-layers 3"))
    measure_layers(config, 128, 0, range(3), Extent(1, 1), recorder)
    for phase, counted in zip(("layer", "layer backward"), LAYER_LAUNCHES[block], strict=True):
        launches: Counter[str] = Counter()
        for section, operations in recorder.sections.items():
            if (section.phase, section.layer) == (phase, 1):
                for operation, count in operations.items():
                    launches[operation.launch] += count
        assert launches == counted


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--optimizer muon",
    ],
)
def test_few_layers_stand_for_all(flags):
    number = 8 if "uniform" not in flags else 12
    config = planned(f"{ONE} {flags} --num-layers {number}")
    (stage,), update = operations_of_step(config, 128)
    recorder = OperationRecorder()
    measure_layers(config, 128, 0, range(number), Extent(1, 1), recorder)

    class Layer:
        def __init__(self, number: int) -> None:
            self.layers, self.copies = (number,), 1

    ((whole,), _, whole_update) = operations_of_rank(
        recorder.sections, [[Layer(i) for i in range(number)]], 1.0
    )
    for found, wanted in zip(stage, whole, strict=True):
        assert {op: n for op, n in found.items() if n} == {op: n for op, n in wanted.items() if n}
    moved = [sum(n * op.bytes for op, n in each.items()) for each in (update, whole_update)]
    assert moved[0] == pytest.approx(moved[1], rel=0.01)


def test_later_micro_batches_add_to_gradients():
    (one,), _ = operations_of_step(planned(ONE), 128)
    (four,), _ = operations_of_step(
        planned(
            ONE.replace("batch-size 2 --global-batch-size 2", "batch-size 2 --global-batch-size 8")
        ),
        128,
    )
    sums = [sum(n * op.totals for op, n in each.backward.items()) for each in (one, four)]
    assert sums[1] == pytest.approx(sums[0] * (1 + 3 * 2) / 4)  # writes, then reads and writes


@pytest.mark.parametrize(
    "flags", ["--compile on", "--window-size 8,0", "--cpu-optimizer", "--reset-attention-mask"]
)
def test_what_is_compiled_or_on_the_host_is_not_measured(flags):
    assert not is_measurable(planned(f"{ONE} {flags}")) and is_measurable(planned(ONE))
