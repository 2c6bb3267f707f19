"""Tiny runs in fp8, whose products are emulated: the losses, resumption, and other layouts."""

from __future__ import annotations

import functools
import json

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

import stores
from helpers import TINY_FLAGS, read_losses
from meshwright.__main__ import main
from meshwright.base import device as devices
from meshwright.base.errors import UserError
from meshwright.checkpoint.publish import step_folder
from meshwright.config import flags
from meshwright.config.schema import Precision, TrainConfig
from meshwright.kernels.fp8 import Recipe, Scales
from meshwright.parallel.layout import Layout, connect
from on_ranks import environments, run_programs, run_ranks

pytestmark = [pytest.mark.whole, pytest.mark.timeout(120)]

# Two micro-batches a step; a loss after each validation would show what it left behind.
FP8 = "--bf16 --fp8-format hybrid --attention-dropout 0 --eval-interval 2 --lr 3e-3 --lr-decay-iters 8".split()
HISTORY = "--fp8-amax-history-len 3 --fp8-amax-compute-algo max".split()


@pytest.fixture(autouse=True, scope="module")
def emulation():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "has_fp8", lambda device: device.type == "cpu")
        yield


@pytest.fixture
def run(run):
    """run(flag, ...) trains with two layers and two micro-batches."""
    return functools.partial(run, *TINY_FLAGS)


def test_a_cpu_has_no_fp8(run, monkeypatch):
    monkeypatch.setattr(devices, "has_fp8", lambda device: device.type != "cpu")
    result = run(*FP8)
    assert result.status == 2 and "needs an NVIDIA GPU with fp8" in result.err


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Return the losses without further flags."""
    folder = tmp_path_factory.mktemp("fp8")
    assert main(["train", *TINY_FLAGS, *FP8, "--run-dir", str(folder)]) == 0
    return read_losses(folder)


@pytest.mark.flag(
    """fp8_format fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16
    num_layers_at_start_in_bf16
    num_layers_at_end_in_bf16"""
)
@pytest.mark.parametrize(
    "more",
    [
        ["--fp8-format=e4m3"],
        ["--fp8-recipe=tensorwise"],
        ["--fp8-margin=3"],  # a power of 2 changes only what is clamped or underflows
        HISTORY,
        HISTORY[:2],
        ["--first-last-layers-bf16", "--num-layers-at-start-in-bf16=0"],
        ["--first-last-layers-bf16", "--num-layers-at-end-in-bf16=0"],
    ],
)
def test_each_flag_changes_the_losses(run, losses, more):
    is_idle = more == HISTORY[:2]  # the latest amax decides
    assert (run(*FP8, *more).losses == losses) == is_idle


def test_which_layers():
    def layers(**given):
        return [
            i
            for i in range(6)
            if Precision(bf16=True, fp8_format="e4m3", **given).multiplies_fp8(i, 6)
        ]

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(first_last_layers_bf16=True) == [1, 2, 3, 4]
    ends = dict(num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=0)
    assert layers(**ends) == [0, 1, 2, 3, 4, 5] and layers(first_last_layers_bf16=True, **ends) == [
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "needs bfloat16 around it, and all else is float32; give --bf16"),
        ("--fp16", "needs bfloat16 around it, and --fp16 scales the loss for its own range"),
        ("--bf16 --fp8-recipe mxfp8", "--fp8-recipe"),
        (
            "--bf16 --tensor-model-parallel-size 4",
            "the width of the heads 8 on each tensor rank is not a multiple of",
        ),
        ("--bf16 --ffn-hidden-size 40", "--ffn-hidden-size 40 is not a multiple of 16"),
        ("--bf16 --first-last-layers-bf16", "leaves none of 2 layers"),
    ],
)
def test_refusals(argv, message):
    with pytest.raises(UserError) as caught:
        flags.parse_settings(
            TrainConfig, [*TINY_FLAGS, "--fp8-format=e4m3", *argv.split()], "meshwright train"
        )
    assert message in str(caught.value)


def train(folder, *more):
    argv = [
        *TINY_FLAGS,
        *FP8,
        *HISTORY,
        "--train-iters=8",
        "--save",
        str(folder),
        "--load",
        str(folder),
        *more,
    ]
    assert main(["train", *argv]) == 0


def saved(folder):
    """Return the last step's tensors and scales."""
    step = step_folder(folder, 8)
    state = json.loads((step / "state.json").read_text())
    return safetensors.torch.load_file(step / "rank_00000.safetensors"), state["fp8"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder)
    return folder


def test_a_stopped_run_is_the_same_run(tmp_path, whole):
    for _ in range(3):
        train(tmp_path / "parts", "--exit-interval=3")
    assert read_losses(tmp_path / "parts") == read_losses(whole)
    (tensors, scales), (wanted, wanted_scales) = saved(tmp_path / "parts"), saved(whole)
    assert scales == wanted_scales and len(scales["scales"]) == 2 * 4 * 3
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_a_checkpoint_is_that_of_bfloat16(tmp_path, whole):
    assert all(x.dtype is torch.float32 for x in saved(whole)[0].values())
    argv = [
        *TINY_FLAGS,
        "--bf16",
        "--train-iters=9",
        "--load",
        str(whole),
        "--save",
        str(tmp_path / "run"),
    ]
    assert main(["train", *argv, "--override-opt_param-scheduler"]) == 0


@pytest.mark.parametrize("more", ["--micro-batch-size=auto"])
def test_how_it_is_run_changes_nothing(run, losses, monkeypatch, more):
    monkeypatch.setattr(
        "meshwright.training.before.memory.find_largest",
        lambda attempt, *rest: (attempt(4), 2)[1:] * 2,
    )
    assert run(*FP8, *more.split()).losses == losses


def run_on_two_ranks(folder, argv):
    script = folder / "fp8.py"
    script.write_text(
        "import sys\nfrom meshwright.base import device\nfrom meshwright.__main__ import main\n"
        "device.has_fp8 = lambda device: True\nsys.exit(main(['train', *sys.argv[1:]]))\n"
    )
    words = [*TINY_FLAGS, *FP8, *argv]
    statuses, outputs = run_programs(script, [words] * 2, environments(2), folder)
    assert statuses == [0, 0], outputs[0][-3000:]


def cast_parts(dimension):
    """Cast another part of a tensor on each rank; all must have chosen the same scale."""
    layout = connect(Layout(**{dimension: 2}, rank=dist.get_rank()))
    _, store = stores.make(layout=layout)
    scales = Scales(Recipe(is_tensorwise=True), stores.CPU)
    scales.add(["h.0.mlp.fc"])
    store.set_scales(scales)
    part = torch.full((16, 16), 1.0 + 7 * layout.rank)
    assert scales.cast(0, part, True, True).inverse == 8 / 448


@pytest.mark.parametrize("dimension", ["tp", "cp"])
def test_ranks_that_share_a_tensor_choose_one_scale(dimension):
    run_ranks(cast_parts, 2, dimension)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        # A rank's micro-batches are those of one process; others divide each of them.
        ("--zero-stage=1 --micro-batch-size=1", 1e-4),
        ("--tensor-model-parallel-size=2 --sequence-parallel --micro-batch-size=1", 2e-3),
        ("--context-parallel-size=2 --micro-batch-size=1", 2e-3),
    ],
    ids=["data", "tensor", "context"],
)
def test_scales_of_single_tensors_are_the_same_on_ranks_that_share_one(tmp_path, layout, tolerance):
    argv = ["--fp8-recipe=tensorwise", "--train-iters=4", "--micro-batch-size=1"]
    alone = [*TINY_FLAGS, *FP8, *argv, "--run-dir", str(tmp_path / "one")]
    assert main(["train", *alone]) == 0
    run_on_two_ranks(tmp_path, [*argv, *layout.split(), "--run-dir", str(tmp_path / "two")])
    one, two = read_losses(tmp_path / "one"), read_losses(tmp_path / "two")
    assert two == pytest.approx(one, abs=tolerance) and len(one) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        "--zero-stage=1",
        "--zero-stage=3",
        "--tensor-model-parallel-size=2 --sequence-parallel --micro-batch-size=2",
    ],
)
def test_layouts_have_the_same_scales(tmp_path, whole, layout):
    """Two ranks of a sample each multiply as one with two; only the order of sums differs."""
    argv = [*HISTORY, "--train-iters=8", "--micro-batch-size=1", *layout.split()]
    run_on_two_ranks(tmp_path, [*argv, "--save", str(tmp_path / "two")])
    assert read_losses(tmp_path / "two") == pytest.approx(read_losses(whole), abs=2e-3)
    one, two = (
        json.loads((step_folder(x, 8) / "state.json").read_text())["fp8"]
        for x in (whole, tmp_path / "two")
    )
    assert two["recipe"] == one["recipe"] and two["scales"].keys() == one["scales"].keys()
    for name, row in one["scales"].items():
        assert two["scales"][name] == pytest.approx(row, rel=0.1), name
