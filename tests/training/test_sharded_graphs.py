"""CUDA graphs of the passes with ZeRO 3: the same numbers as without, on one GPU and on two."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from helpers import TINY_FLAGS, free_port, read_rows
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig
from meshwright.data.loader import Batch
from meshwright.parallel.layout import Layout
from meshwright.training import network
from meshwright.training.network import Spec, build_network
from meshwright.training.step import StepSettings, train_step

SIZES = "--num-layers 4 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128"
FLAGS = f"{SIZES} --hidden-dropout 0.1 --attention-dropout 0.1 --device cuda --zero-stage 3"


@pytest.fixture
def one_rank():
    """Yield a layout whose only rank has groups, as those of several ranks have."""
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    world = dist.group.WORLD
    yield Layout(groups={"shard": world, "gradients": world})
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize(
    "flags",
    [
        "--bf16",
        "--bf16 --recompute-granularity full",
        "--bf16 --fp8-format hybrid",
        "--fp16 --optimizer muon",
    ],
)
def test_one_gpu(one_rank, monkeypatch, flags):
    argv = [*TINY_FLAGS, *FLAGS.split(), *flags.split()]
    config = parse_settings(TrainConfig, argv, "meshwright train", check=False).config
    monkeypatch.setattr(network.graph_rule, "reason_against", lambda *_: None)
    generator = torch.Generator().manual_seed(1)
    device = torch.device("cuda")
    nets = []
    for _ in range(2):
        net = build_network(Spec(config, one_rank, device, 61, 64))
        net.store.initialise(draw)
        net.store.publish_weights()
        nets.append(net)
    nets[0].graphs = None
    for i, count in enumerate([3, 3, 3, 3, 1, 3, 1, 1, 1, 3]):
        x = torch.randint(0, 61, (count, 2, 128), generator=generator)
        ids = torch.arange(2)
        batches = [Batch(y, y.roll(1, 1), ids + 2 * n) for n, y in enumerate(x)]
        settings = StepSettings(1, 1e-3 / (i + 1), 0.1, scale=1024.0 if "fp16" in flags else 1.0)
        plain, graphed = (train_step(net, batches, settings) for net in nets)
        assert torch.equal(plain, graphed), i
        for name, parameter in nets[0].store.parameters.items():
            other = nets[1].store.parameters[name]
            assert torch.equal(parameter.to_local(), other.to_local()), (i, name)
    assert nets[1].graphs.why_off == "" and len(nets[1].graphs.captured) == 2


def draw(masters):
    for name, master in masters:
        generator = torch.Generator().manual_seed(len(name) + master.numel())
        master.copy_(torch.randn(master.shape, generator=generator) * 0.02)
        if "ln" in name and name.endswith("weight"):
            master.add_(1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="ZeRO 3 needs two GPUs")
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "more", ["--bf16", "--bf16 --fp8-format hybrid --recompute-granularity full"]
)
def test_two_gpus(tmp_path, more):
    rows = {}
    for how in ("off", "on"):
        words = [
            *FLAGS.split(),
            *more.split(),
            "--mock-data",
            "--vocab-size",
            "500",
            "--lr",
            "1e-3",
        ]
        words += (
            "--micro-batch-size 2 --global-batch-size 12 --train-iters 10 --eval-iters 1".split()
        )
        words += ["--cuda-graphs", how, "--run-dir", str(tmp_path / how)]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        done = subprocess.run(
            [*launcher, "-m", "meshwright", "train", *words], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert (how == "off") == ("CUDA graphs: off" in done.stdout), done.stdout
        rows[how] = [[r[n] for n in ("loss", "grad_norm")] for r in read_rows(tmp_path / how)]
    assert rows["on"] == rows["off"] != []
