"""`meshwright verify-layout` and `train --verify-layout`, as programs."""

from __future__ import annotations

import json
import re
import socket

import pytest
import torch

from meshwright.__main__ import main
from meshwright.apps.pages.runs import CERTIFICATE
from meshwright.apps.verify import command as verify_layout
from meshwright.apps.verify import compare
from meshwright.apps.verify.baseline import make_baseline
from meshwright.base.errors import HANG, UNEQUAL, UserError
from meshwright.config import flags
from meshwright.config.schema import Optimizer, Parallel, Precision, TrainConfig
from on_ranks import run_programs

PROGRAM = """
import os, sys, time
from meshwright.__main__ import main
from meshwright.parallel import shard
from meshwright.training import setup
def sleep_for_ever(*_):
    time.sleep(3600)
if "BROKEN" in os.environ:
    shard.is_partial = lambda *_: False
if os.environ.get("RANK", "") == os.environ.get("HANGING"):
    setup.build_network = sleep_for_ever
sys.exit(main(sys.argv[1:]))
"""
TP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
TRAIN = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --lr 1e-3
    --micro-batch-size 1 --train-iters 2 --eval-iters 0 --mock-data --vocab-size 37 --device cpu --verify-layout 1
""".split()


def run(folder, argv, **more):
    """Run a command on two ranks."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    place = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    ranks = [place | {"RANK": n, "LOCAL_RANK": n} | more for n in "01"]
    return run_programs(program, [argv] * 2, ranks, folder)


@pytest.fixture
def failing(monkeypatch):
    """Let the layout fail after a difference."""

    def fail(comparing, run):
        comparing.seen.note(compare.Quantity.WEIGHTS, "wte.weight", 1, 0.5)
        raise ValueError("zip() argument 2 is shorter")

    monkeypatch.setattr(compare._Comparing, "check_cover", fail)


@pytest.mark.usefixtures("failing")
def test_a_layout_that_fails_is_a_difference(capsys):
    """It has a status and one sentence, with what differed before."""
    assert main(["verify-layout", "--world-size=1", *TRAIN]) == UNEQUAL
    shown = capsys.readouterr().err.splitlines()[-1]
    why = "this layout fails where one process does not, ValueError at test_verify_layout.py:"
    assert why in shown
    assert "zip() argument 2 is shorter, after a difference in wte.weight; do not train" in shown


@pytest.mark.usefixtures("failing")
def test_no_step_is_trained_after_a_difference(tmp_path):
    assert main(["train", *TRAIN, "--run-dir", str(tmp_path)]) == UNEQUAL
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.flag("verify_layout")
@pytest.mark.long
@pytest.mark.parametrize("beta2", [0.95, 0.999, 0.9995])
def test_torchs_rounding_of_beta2_is_no_difference(beta2):
    """On GPUs, torch's fused AdamW makes exp_avg_sq of 1 - float32(beta2), ours of 1 - beta2."""
    squares = torch.rand(20, 1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torchs, ours = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    rounded = float(torch.tensor(beta2, dtype=torch.float32))
    for square in squares:
        torchs = rounded * torchs + (1.0 - rounded) * square
        ours = beta2 * ours + (1.0 - beta2) * square
    apart = float((torchs - ours).abs().max() / ours.max())

    def allowed(device="cuda", quantity=compare.Quantity.MOMENTS, stage=3, **optimizer):
        settings = TrainConfig(
            precision=Precision(bf16=True),
            parallel=Parallel(zero_stage=stage),
            optimizer=Optimizer(adam_beta2=beta2, **optimizer),
        )
        return quantity.tolerance(settings, torch.device(device))

    assert apart < allowed() - compare.UPDATED < 1.5 * apart + 1e-7
    assert (
        compare.UPDATED == allowed("cpu") == allowed(stage=1) == allowed(cautious_weight_decay=True)
    )
    assert allowed(quantity=compare.Quantity.WEIGHTS) == compare.UPDATED


@pytest.mark.long
def test_train_verifies_before_it_begins(tmp_path):
    """A difference ends the run before its first step; the certificate says where it is."""
    statuses, (log, _) = run(tmp_path, ["train", *TRAIN, *TP, "--run-dir", "run"], BROKEN="1")
    assert statuses == [UNEQUAL, UNEQUAL], log
    assert (
        "gradients differ first" in log
        and "ln_" in log
        and "[before the start of training step]" not in log
    )
    assert json.loads((tmp_path / "run" / CERTIFICATE).read_text())["verdict"] == "different"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.whole
def test_a_rank_that_hangs_is_named(tmp_path):
    """A layout may hang as well as differ; each rank shows where it is."""
    argv = ["verify-layout", *TP, "--device=cpu", "--distributed-timeout-minutes=0.05"]
    statuses, logs = run(tmp_path, argv, HANGING="1")
    assert statuses == [HANG, HANG], logs
    assert re.search(r"error: rank 1 \(\S+\) hangs in .* in sleep_for_ever", "".join(logs)), logs
    assert " in sleep_for_ever\n" in logs[1]


@pytest.mark.long
def test_train_begins_if_the_layout_is_equal(tmp_path):
    statuses, (log, _) = run(tmp_path, ["train", *TRAIN, *TP, "--run-dir", "run"])
    assert statuses == [0, 0], log
    assert log.index(" > layout verified: ") < log.index("[before the start of training step]")
    assert " > layout verified: " in (tmp_path / "run" / "log.txt").read_text()
    assert json.loads((tmp_path / "run" / CERTIFICATE).read_text())["command"][:2] == [
        "meshwright",
        "train",
    ]


@pytest.mark.long
@pytest.mark.parametrize("is_broken", [False, True])
def test_the_command_starts_ranks_itself(tmp_path, is_broken):
    """Alone, it starts its ranks by our launcher; the launcher returns their status."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("sys.exit", "sys.argv[0] = 'meshwright'; sys.exit"))
    argv = ["verify-layout", *TP, "--run-dir", str(tmp_path / "run"), "--verify-layout", "1"]
    if is_broken:  # a bug that the ranks have too
        (tmp_path / "sitecustomize.py").write_text(
            "import sys, meshwright.parallel.shard as m\nm.is_partial = lambda *_: False\n"
        )
    [status], [out] = run_programs(program, [argv], [{"PYTHONPATH": str(tmp_path)}], tmp_path)
    assert status == (UNEQUAL if is_broken else 0), out
    made = json.loads((tmp_path / "run" / CERTIFICATE).read_text())
    assert (
        made["layout"]["ranks"] == 4 and made["layout"]["data"] == 2 and made["backend"] == "gloo"
    ), made
    assert ("gradients differ first" in out) == is_broken and "not compared:" in out


def test_what_is_missing_is_filled_in():
    """Flags that name only a layout are enough, and their sizes can be divided by it."""
    for words in (
        "--tensor-model-parallel-size 4 --context-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --zero-stage 2",
        "--pipeline-model-parallel-size 4 --pipeline-schedule gpipe --num-accumulation-steps 8 --micro-batch-size 1",
        "--hidden-size 96 --tensor-model-parallel-size 3 --world-size 9",
        "--preset gpt2-117m --num-distributed-optimizer-instances 2 --zero-stage 1",
        "--packing best-fit --context-parallel-size 2",
        "--packing best-fit --tensor-model-parallel-size 2 --data-path some",
    ):
        given = flags.parse_settings(
            TrainConfig, words.split(), "meshwright verify-layout", check=False
        ).config
        ranks = verify_layout.ranks_wanted(given)
        assert ranks == (
            given.parallel.world_size
            or given.parallel.model_ranks * (4 if "instances" in words else 2)
        )
        more = [f"--world-size={ranks}", *verify_layout.missing(given, ranks)]
        flags.parse_settings(TrainConfig, [*more, *words.split()], "meshwright verify-layout")


def test_borders_of_packed_documents_are_ends_of_random_ones():
    """A packed run's baseline masks the loss, restarts positions and ends attention."""
    words = "--packing best-fit --context-parallel-size 2 --world-size 2 --data-path some --attention-dropout 0"
    words += " --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1"
    made = make_baseline(
        flags.parse_settings(TrainConfig, f"{words} --lr 1 --train-iters 2".split(), "train").config
    )
    assert made.config.data.packing == "stream" and all(made.config.data.document_effects)
    assert any("packing" in line for line in made.left_out)


def test_too_many_ranks_are_refused():
    argv = ["--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "8"]
    with pytest.raises(UserError, match="128 ranks are too many to start here"):
        verify_layout.main(argv)
