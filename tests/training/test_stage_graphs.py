"""CUDA graphs of a pipeline rank: the same numbers as without, by a stand-in and on GPUs."""

import collections
import concurrent.futures
import re
import threading
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers import TINY_FLAGS, read_rows
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig
from meshwright.data.loader import Batch
from meshwright.model.gpt import initialise
from meshwright.parallel.layout import Layout
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.pipeline_schedule import schedule
from meshwright.training import graphs, network, stage_graphs
from meshwright.training.network import Spec, build_network
from meshwright.training.step import StepSettings, train_step
from on_ranks import environments, run_programs, train_on_two_gpus

TESTS = Path(__file__).parents[1]
MORE = "--num-layers=4 --global-batch-size=16 --hidden-dropout=0.1 --attention-dropout=0.1 --z-loss-coef=0.01"
COLUMNS = ("loss", "z_loss", "grad_norm", "lr", "skipped", "loss_scale")
PP2 = "--pipeline-model-parallel-size=2"
INTERLEAVED = f"{PP2} --num-layers-per-virtual-pipeline-stage=1"


def on_ranks(world, flags, folder, fails=None):
    words = [*TINY_FLAGS, *MORE.split(), *flags.split(), "--run-dir", str(folder)]
    envs = environments(world)
    if fails is not None:
        envs = [env | {"FAILS": str(fails)} for env in envs]
    envs = [env | {"PYTHONPATH": str(TESTS)} for env in envs]
    folder.mkdir()
    script = TESTS / "recorded_pretrain.py"
    statuses, outputs = run_programs(script, [words] * world, envs, folder)
    assert statuses == [0] * world, outputs
    rows = read_rows(folder)
    calls = [re.search(r"^calls:(.*)$", out, re.M) for out in outputs]
    return [[row[name] for row in rows] for name in COLUMNS], calls, outputs[0]


@pytest.mark.whole
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (
            2,
            f"{PP2} --params-dtype=float64 --eod-mask-loss --tokenizer-type=ByteTokenizer --vocab-size=none",
        ),
        (2, f"{INTERLEAVED} --fp16 --initial-loss-scale=4194304 --hysteresis=1"),
        (4, f"{PP2} --zero-stage=1 --bf16"),
        *(
            pytest.param(world, flags, marks=pytest.mark.long)
            for world, flags in (
                (2, f"{PP2} --pipeline-schedule=gpipe --recompute-granularity=full"),
                (4, f"{INTERLEAVED} --zero-stage=0"),
                (4, f"{PP2} --tensor-model-parallel-size=2 --sequence-parallel --optimizer=muon"),
            )
        ),
    ],
    ids=["masks", "interleaved fp16", "zero 1", "gpipe", "interleaved replicas", "tensor ranks"],
)
def test_recorded_passes_compute_the_same(tmp_path, world, flags):
    plain, none, _ = on_ranks(world, f"{flags} --cuda-graphs=off", tmp_path / "off")
    graphed, calls, _ = on_ranks(world, flags, tmp_path / "on")
    assert plain == graphed and len(plain[0]) == 6
    assert not any(none)
    if "fp16" in flags:
        assert 0 < sum(plain[COLUMNS.index("skipped")]) < 6

    # Each pass of the schedule is captured once and replayed in each of the four later steps.
    micro = 16 // (2 * world // 2)
    if "tensor" in flags:
        micro *= 2
    for rank, found in enumerate(calls):
        chunks = 2 if "virtual" in flags else 1
        name = "gpipe" if "gpipe" in flags else "1f1b"
        is_first_stage = rank < world // 2
        pieces = len(schedule(name, 2, 0, micro, chunks)) + (not is_first_stage)
        kinds = [word for word in found[1].split() if not word.isdigit()]
        assert kinds == ["prepare", *["capture"] * pieces, *["replay"] * pieces * 4], rank


@pytest.mark.whole
@pytest.mark.timeout(120)
def test_a_capture_that_fails_on_one_rank(tmp_path):
    """All ranks then go on without graphs, with the same numbers."""
    plain, _, _ = on_ranks(2, f"{PP2} --cuda-graphs=off", tmp_path / "off")
    graphed, calls, out = on_ranks(
        2, PP2, tmp_path / "on", fails=15
    )  # the last, with its collectives
    assert plain == graphed
    assert "CUDA graphs: off, because the capture failed" in out
    assert all("replay" not in found[1] for found in calls)


def test_passes_of_one_number_of_micro_batches_are_kept(monkeypatch):
    """Another number takes their room, as in a ramp-up of the batch."""

    class Backend:
        taken = False

        def prepare(self):
            pass

        def has_room(self):
            return not self.taken

        def discard(self):
            self.taken = False

    def record(self, net, batches, seed):
        self.backend.taken = True
        return len(batches)

    monkeypatch.setattr(stage_graphs.StageGraphs, "record", record)
    store = types.SimpleNamespace(
        device="cpu", layout=Layout(), is_settled=True, wait_for_weights=lambda: None
    )
    several = stage_graphs.StageGraphs(Backend(), [], store, True, 3, 16)
    x = torch.zeros(2, 16)
    for count in (2, 3, 2):
        found = [several.find(None, [Batch(x, x, torch.arange(2))] * count, 1) for _ in range(4)]
        assert found[-2:] == [count] * 2 and not several.why_off
        assert list(several.captured.values()) == [count]


SMALL = """--num-layers 4 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128
--train-iters 12 --eval-interval 1000 --eval-iters 1 --lr 1e-3 --hidden-dropout 0.1 --attention-dropout 0.1
--micro-batch-size 2 --global-batch-size 16 --mock-data --vocab-size 500""".split()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two stages need two GPUs")
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "flags",
    [
        f"{PP2} --bf16",
        f"{PP2} --fp16 --recompute-granularity=full --initial-loss-scale=65536",
        f"{INTERLEAVED} --bf16 --recompute-granularity=selective",
        f"{PP2} --bf16 --fp8-format=hybrid --hidden-size=256",
        f"{PP2} --bf16 --optimizer=muon --attention-dropout=0",
    ],
)
def test_two_gpus(tmp_path, flags):
    """The same numbers without graphs and with them."""
    rows = {}
    for how in ("off", "on"):
        words = [*SMALL, *flags.split(), "--cuda-graphs", how, "--run-dir", str(tmp_path / how)]
        out = train_on_two_gpus(words)
        assert (how == "off") == ("CUDA graphs: off" in out), out
        rows[how] = [
            [r[n] for n in ("loss", "grad_norm", "skipped")] for r in read_rows(tmp_path / how)
        ]
    assert rows["on"] == rows["off"] != []


class Post:
    """Messages between two ranks that are threads of this process, of which one runs at a time."""

    def __init__(self):
        self.turn = threading.Condition()
        self.messages = collections.defaultdict(collections.deque)

    def send(self, key, tensor):
        self.messages[key].append(tensor.clone())
        self.turn.notify_all()

    def receive(self, key):
        assert self.turn.wait_for(lambda: self.messages[key], timeout=60), key
        return self.messages[key].popleft()


class Arrived:
    """A message's work that is done."""

    def wait(self):
        pass


class LocalPipeline(Pipeline):
    """A pipeline whose stages are in one process."""

    post = None

    def open(self, device):
        pass

    def _send(self, x, stage, way):
        self.post.send((stage, way), x)
        return Arrived()

    def _receive(self, action, tokens):
        part = self.parts[action.chunk]
        if part.has_embedding if action.op == "F" else part.has_head:
            return None
        way = 1 if action.op == "F" else -1
        return self.post.receive((self.stages[action.chunk] - way, way))


def steps_of_both_stages(monkeypatch, flags, how):
    """Take steps of two stages; return each step's numbers and the weights at the end."""
    argv = [*TINY_FLAGS, *SMALL, *flags.split(), "--world-size=2", "--device=cuda"]
    config = parse_settings(TrainConfig, argv, "meshwright train", check=False).config
    post = Post()
    monkeypatch.setattr(network, "Pipeline", LocalPipeline)
    monkeypatch.setattr(LocalPipeline, "post", post)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(graphs, "on_all", lambda *given: "".join(ask() for ask in given[2:]))
    monkeypatch.setattr(
        network.graph_rule, "reason_against", lambda *_: None if how == "on" else "off"
    )
    stream = torch.cuda.Stream()
    monkeypatch.setattr(network.devices, "new_stream", lambda device: stream)
    nets = []
    for rank in range(2):
        spec = Spec(config, Layout(pp=2, rank=rank), torch.device("cuda"), 500, 512)
        net = build_network(spec)
        net.stream = stream
        net.store.initialise(lambda masters: initialise(masters, config.model, 500, 1))
        net.store.publish_weights()
        nets.append(net)
    numbers = {0: [], 1: []}

    def train(net, rank):
        random = torch.Generator().manual_seed(1)
        with post.turn:
            for i, count in enumerate([8, 8, 8, 8, 4, 8, 4, 4, 4, 8]):
                x = torch.randint(0, 500, (count, 2, 128), generator=random)
                ids = torch.arange(2) + 100 * i
                batches = [
                    Batch(y, y.roll(1, 1), ids + 2 * n, first_sample=100 * i + 2 * n)
                    for n, y in enumerate(x)
                ]
                settings = StepSettings(1, 1e-3 / (i + 1), 0.1, scale=float(2 ** (i % 3)))
                numbers[rank].append(train_step(net, batches, settings).tolist())

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for task in [threads.submit(train, net, rank) for rank, net in enumerate(nets)]:
            task.result()
    for net in nets:
        assert net.graphs is None or (net.graphs.why_off == "" and net.graphs.captured)
    return numbers, [net.store.master.clone() for net in nets]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize(
    "flags",
    [
        f"{PP2} --bf16",
        f"{PP2} --fp16 --recompute-granularity=full",
        f"{INTERLEAVED} --bf16 --recompute-granularity=selective",
        f"{PP2} --bf16 --fp8-format=hybrid --hidden-size=256 --pipeline-schedule=gpipe",
        f"{PP2} --bf16 --fp8-format=hybrid --fp8-recipe=tensorwise --hidden-size=256",
        f"{PP2} --bf16 --optimizer=muon --attention-dropout=0",
    ],
)
def test_both_stages_on_one_gpu(monkeypatch, flags):
    plain, graphed = (steps_of_both_stages(monkeypatch, flags, how) for how in ("off", "on"))
    assert plain[0] == graphed[0]
    assert all(map(torch.equal, plain[1], graphed[1]))
