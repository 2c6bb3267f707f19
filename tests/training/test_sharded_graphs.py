"""CUDA graphs of the passes with ZeRO 3: the same numbers as without, on one GPU and on two.

What their Python code must see to is tested on a CPU, with a stand-in for the graphs.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from helpers import TINY_FLAGS, free_port, read_rows
from meshwright.config.flags import parse_settings
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TrainConfig
from meshwright.data.loader import Batch
from meshwright.parallel.layout import Layout
from meshwright.training import network
from meshwright.training.network import Spec, build_network
from meshwright.training.step import StepSettings, train_step
from meshwright.training.validation import evaluate
from on_ranks import train_on_two_gpus

SIZES = "--num-layers 4 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128"
FLAGS = f"{SIZES} --hidden-dropout 0.1 --attention-dropout 0.1 --device cuda --zero-stage 3"


@pytest.fixture
def one_rank():
    """Yield a layout whose only rank has groups, as those of several ranks have."""
    address = f"tcp://127.0.0.1:{free_port()}"
    kind = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(kind, init_method=address, rank=0, world_size=1)
    world = dist.group.WORLD
    yield Layout(groups={"shard": world, "gradients": world})
    dist.destroy_process_group()


class Recorder:
    """Stands in for CUDA graphs: a capture and each replay run the Python code.

    All of them note the modules whose weights are gathered when they begin: a graph would know
    nothing of these.
    """

    def __init__(self, device):
        self.gathered, self.fails = [], False

    def prepare(self):
        pass

    discard = prepare

    def has_room(self):
        return True

    def capture(self, run):
        def replay():
            self.gathered.append(gathered(self.model))
            run()
            if self.fails:
                raise RuntimeError("operation not permitted when stream is capturing")

        replay()
        return replay


def gathered(model):
    states = {n: m._get_fsdp_state() for n, m in model.named_modules() if isinstance(m, FSDPModule)}
    return [name for name, state in states.items() if state._fsdp_param_group.is_unsharded]


@pytest.fixture
def recorded(one_rank, monkeypatch):
    """Yield a network on a CPU, whose backend is a Recorder, and a batch."""
    monkeypatch.setattr(network.graph_rule, "reason_against", lambda *_: None)
    monkeypatch.setattr(network.devices, "new_stream", lambda device: None)
    monkeypatch.setattr(network, "CudaGraphs", Recorder)
    argv = [*TINY_FLAGS, "--zero-stage", "3"]
    config = parse_settings(TrainConfig, argv, "meshwright train", check=False).config
    net = build_network(Spec(config, one_rank, torch.device("cpu"), 61, 64))
    net.store.initialise(draw)
    (net.graphs.backend.model,) = net.parts
    x = torch.arange(32).view(2, 16)
    yield net, Batch(x, x + 1, torch.arange(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="one rank's group is NCCL's")
def test_no_weight_is_gathered_when_a_pass_is_captured_or_replayed(recorded):
    net, batch = recorded
    for _ in range(4):
        train_step(net, [batch, batch], StepSettings(1, 1e-2, 0.1))
        evaluate(net, iter([[batch]]))
        assert gathered(net.parts[0])  # else this shows nothing
    # Two captures, and two replays in each of two steps.
    assert net.graphs.backend.gathered == [[]] * 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="one rank's group is NCCL's")
def test_a_failed_capture_ends_the_run(recorded):
    net, batch = recorded
    net.graphs.backend.fails = True
    settings = StepSettings(1, 1e-2, 0.1)
    for _ in range(2):
        train_step(net, [batch], settings)
    with pytest.raises(SettingsError, match="cannot go on.*cuda.graphs"):
        train_step(net, [batch], settings)


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
        # A validation leaves weights gathered, which the next one must not use.
        plain_loss, graphed_loss = (evaluate(net, iter([batches])) for net in nets)
        assert plain_loss == graphed_loss, i
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
            "--micro-batch-size 2 --global-batch-size 12 --train-iters 10 "
            "--eval-iters 1 --eval-interval 2".split()
        )
        words += ["--cuda-graphs", how, "--run-dir", str(tmp_path / how)]
        out = train_on_two_gpus(words)
        assert (how == "off") == ("CUDA graphs: off" in out), out
        rows[how] = [[r[n] for n in ("loss", "grad_norm")] for r in read_rows(tmp_path / how)]
        # The validations between steps leave weights gathered.
        rows[how] += [r["loss"] for r in read_rows(tmp_path / how, "validation")]
    assert rows["on"] == rows["off"] != []
