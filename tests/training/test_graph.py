"""CUDA graphs of the step: the same numbers as without, by a stand-in on a CPU and on a GPU."""

import dataclasses

import pytest
import torch

from graphs_on_cpu import ByRecorder, Recorded, Recorder, stand_in
from helpers import TINY, TINY_FLAGS, read_rows
from meshwright.__main__ import main
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig
from meshwright.data.loader import Batch
from meshwright.model.loss import token_losses
from meshwright.training import graph_rule, network
from meshwright.training import graphs as graph
from meshwright.training.micro_step import Network
from meshwright.training.step import StepSettings, train_step
from stores import CPU, VOCAB, is_equal, make, snapshot

MASKS = (
    "--eod-mask-loss --reset-position-ids --reset-attention-mask --tokenizer-type ByteTokenizer"
).split()
MASKS += ["--vocab-size", "none"]  # the tokenizer's
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
LEVERS = (
    "--embedding-lr 3e-3 --vector-lr 1e-4 --cautious-weight-decay --zero-init-projections"
).split()
LEVERS += "--weight-decay 0.3 --weight-decay-incr-style rate".split()


@pytest.fixture
def recorded(monkeypatch):
    """Let every run use graphs by a Recorder; yield how to prepare it, as a dict."""
    stand_in(monkeypatch)
    return ByRecorder.prepared


def both(run, *flags):
    """Run without and with graphs; check that the numbers are equal; return the second run."""
    plain, graphed = (
        run(*flags, "--cuda-graphs", how, "--eval-iters", "1") for how in ("off", "auto")
    )
    assert plain.status == graphed.status == 0
    for name in ("loss", "grad_norm", "lr", "skipped", "loss_scale"):
        assert plain.column(name) == graphed.column(name), name
    validations = [
        [(r["loss"], r.get("ema_loss")) for r in read_rows(x.folder, "validation")]
        for x in (plain, graphed)
    ]
    assert validations[0] == validations[1] != []
    return graphed


def kinds(calls):
    return [call.split()[0] for call in calls]


@pytest.mark.flag("cuda_graphs")
@pytest.mark.parametrize("accumulated", [1, 5])
def test_a_step_is_up_to_three_pieces(run, recorded, accumulated):
    both(run, "--train-iters", 6, "--micro-batch-size", 2, "--global-batch-size", 2 * accumulated)
    (recorder,) = Recorder.made
    pieces = min(accumulated, 3)
    order = [0, *[1] * (accumulated - 2), pieces - 1][:accumulated]
    captures = [f"capture {i}" for i in range(pieces)]
    assert recorder.calls == ["prepare", *captures, *4 * [f"replay {i}" for i in order]]


@pytest.mark.parametrize(
    "flags",
    [
        ["--fp16", "--initial-loss-scale", 2**22, "--hysteresis", 1, "--ema", 0.9, *LEVERS],
        ["--bf16", "--optimizer", "muon", *LEVERS],
        [*MASKS, "--loss-mean", "microbatch"],
        ("--bf16 --fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max").split()
        + ["--ema", 0.9],
    ],
    ids=["fp16", "levers of muon", "masks", "fp8"],
)
def test_every_kind_of_run_computes_the_same(run, recorded, monkeypatch, flags):
    monkeypatch.setattr(network.devices, "has_fp8", lambda device: True)
    done = both(run, "--train-iters", 6, "--micro-batch-size", 2, "--global-batch-size", 4, *flags)
    assert kinds(Recorder.made[0].calls).count("replay") == 8
    if "--fp16" in flags:
        assert 0 < sum(done.column("skipped")) < 6


def test_a_further_term_of_the_loss(run, recorded, monkeypatch):
    """It is added for the gradients, and has a column of its own; the loss stays what it was."""
    alone, make_loss = run("--train-iters", 2), network.make_loss

    def make_two_terms(*settings):
        compute, names = make_loss(*settings)

        def compute_both(logits, batch):
            terms = compute(logits, batch)
            return terms | {"half_loss": terms["loss"] / 2}

        return compute_both, (*names, "half_loss")

    monkeypatch.setattr(network, "make_loss", make_two_terms)
    got = both(
        run, "--train-iters", 6, "--micro-batch-size", 2, "--global-batch-size", 4, "--clip-grad", 0
    )
    assert got.column("half_loss") == pytest.approx([loss / 2 for loss in got.losses])
    assert got.losses[0] == pytest.approx(alone.losses[0])
    assert got.column("grad_norm")[0] == pytest.approx(1.5 * alone.column("grad_norm")[0], rel=1e-5)
    validations = got.column("loss", "validation")
    monkeypatch.undo()
    assert validations[-1] < 1.2 * got.losses[-1]  # the first term alone


@pytest.mark.parametrize(
    ("prepared", "reason"),
    [
        (
            {"fails": 1},
            "the capture failed: RuntimeError: operation not permitted when stream is capturing",
        ),
        ({"room": False}, "a step takes so much memory that none would be left for a validation"),
    ],
)
def test_without_a_capture_the_steps_run_as_usual(run, recorded, prepared, reason):
    """The failed capture leaves no state behind, and there is no second attempt."""
    recorded.update(prepared)
    done = both(run, "--train-iters", 6, "--micro-batch-size", 2, "--global-batch-size", 4)
    assert (
        done.out.count("CUDA graphs: off, because") == 1
        and f"CUDA graphs: off, because {reason}\n" in done.out
    )
    (recorder,) = Recorder.made
    assert kinds(recorder.calls) == [
        "prepare",
        *["capture"] * (2 * ("fails" in prepared)),
        "discard",
    ]
    assert all(p.grad is None for p in recorder.store_parameters())


def losses_of_tokens(logits, batch):
    return {"loss": token_losses(logits, batch.labels, VOCAB)}


def test_steps_of_another_shape_between_replays():
    """They run as usual, after the same warm-up become graphs too, and never mix."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 16), (2, 16), (2, 16), (1, 16), (2, 16), (1, 8), (1, 16), (1, 16), (2, 16)]
    m = dataclasses.replace(TINY, hidden_dropout=0.0, attention_dropout=0.0)
    nets = []
    for _ in range(2):
        model, store = make(m)
        nets.append(Network(parts=[model], store=store, loss=losses_of_tokens, device=CPU))
    nets[1].graphs = Recorded(None, nets[1].parts, nets[1].store, True)
    for i, shape in enumerate(shapes):
        x = torch.randint(0, VOCAB, (2, *shape), generator=generator)
        batches = [Batch(y, y.roll(1, 1), torch.arange(shape[0])) for y in x]
        if i == 4:
            batches[1] = dataclasses.replace(batches[1], loss_mask=torch.ones(shape), unmasked=-1)
        settings = StepSettings(1, 1e-2 / (i + 1), 0.1)
        plain, graphed = (train_step(net, batches, settings) for net in nets)
        assert torch.equal(plain, graphed), i
        assert is_equal(snapshot(nets[0].store), snapshot(nets[1].store)), i
    calls = kinds(nets[1].graphs.backend.calls)
    assert (calls.count("capture"), calls.count("replay")) == (4, 6)  # steps 3 and 9; 8


def test_a_replay_begins_with_whole_weights():
    """With ZeRO 1 a step that runs as usual ends while its weights are still being gathered."""
    model, store = make()
    net = Network(parts=[model], store=store, loss=losses_of_tokens, device=CPU)
    net.graphs = Recorded(None, net.parts, store, True)
    waited = []

    class Gathering:
        def wait(self):
            waited.append(self)

    x = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = Batch(x, x.roll(1, 1), torch.arange(2))
    for _ in range(3):
        train_step(net, [batch], StepSettings(1, 1e-2, 0.1))
    (captured,) = net.graphs.captured.values()
    for bucket in store.buckets.values():
        bucket.gathering = Gathering(), None
    captured.replays[0] = lambda: waited.append("replay")
    train_step(net, [batch], StepSettings(1, 1e-2, 0.1))
    assert len(waited) == len(store.buckets) + 1 and waited[-1] == "replay"


def reason(*flags, kind="cuda", custom=False):
    config = parse_settings(
        TrainConfig, list(map(str, [*TINY_FLAGS, *flags])), "meshwright train", check=False
    ).config
    return graph_rule.reason_against(config, kind, custom)


def test_reasons_against_graphs():
    still = ["--attention-dropout", 0]
    assert reason() is None and reason("--bf16", *still, "--recompute-granularity", "full") is None
    # What draws is not computed again, but for compiled layers.
    drawing = ["--attention-dropout", 0.1, "--recompute-granularity"]
    assert reason(*drawing, "selective") is None and reason(*drawing, "full") is None
    assert "recomputed" in reason(*drawing, "full", "--fused-kernels", "off")
    assert (
        "off" in reason("--cuda-graphs", "off")
        and "NVIDIA" in reason(kind="cpu")
        and "NVIDIA" in reason(kind="xpu")
    )
    double = "--params-dtype", "float64"
    assert "in float64" in reason(*double) and reason(*double, "--optimizer", "lion") is None
    assert "SGD" in reason("--optimizer", "sgd") and "timing-log-level" in reason(
        "--timing-log-level", 1
    )
    assert "optimizer" in reason("--cpu-optimizer")
    stages = ["--world-size", 2, "--pipeline-model-parallel-size", 2]
    assert reason(*stages) is None
    for kinds in (
        ("--pipeline-model-parallel-size", 2),
        ("--pipeline-model-parallel-size", 2, "--tensor-model-parallel-size", 2),
        ("--zero-stage", 3, "--tensor-model-parallel-size", 2),
        ("--zero-stage", 3, "--num-distributed-optimizer-instances", 2),
    ):
        mixed = ["--world-size", 4, *kinds]
        assert "this layout" in reason(*mixed)
        assert reason(*mixed, "--cuda-graphs", "on") is None
    # Large layers take the device longer than the host, which then gathers as it goes.
    for stage, fits, large in ((1, 16, 32), (3, 64, 128)):
        sizes = f"--world-size=2 --zero-stage={stage} --hidden-size=8192 --micro-batch-size".split()
        assert reason(*sizes, fits) is None and f"ZeRO {stage}" in reason(*sizes, large)
        assert reason(*sizes, large, "--cuda-graphs", "on") is None
    many = ["--micro-batch-size", 1, "--global-batch-size", 257, "--cuda-graphs", "on"]
    assert "256 forward passes" in reason(*stages, *many)
    assert "frees gradients" in reason("--world-size", 2, "--zero-stage", 2)
    assert "inputs" in reason(*still, "--recompute-granularity", "full", "--checkpoint-in-cpu")
    assert reason(custom=True) and reason("--cuda-graphs", "on", custom=True) is None
    assert reason("--profile") is None  # the trace then shows the kernels, without the operations


def test_graphs_that_are_asked_for_and_impossible(run):
    assert (
        "CUDA graphs: off, because the device is not an NVIDIA GPU"
        in run("--cuda-graphs", "on").out
    )
    assert "CUDA graphs" not in run().out


SMALL = """--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128
--train-iters 20 --eval-interval 1000 --eval-iters 1 --lr 1e-3 --hidden-dropout 0.1 --attention-dropout 0.1
--compile off --device cuda --mock-data --vocab-size 500""".split()


def on_gpu(folder, *flags):
    assert main(["train", *SMALL, "--run-dir", str(folder), *map(str, flags)]) == 0
    return [(row["loss"], row["grad_norm"], row["skipped"]) for row in read_rows(folder)]


@gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "how",
    [
        "full",
        "full --recompute-num-layers 2",
        "full --recompute-method block --recompute-num-layers 1",
        "selective",
    ],
)
@pytest.mark.parametrize("masks", [[], MASKS])
def test_dropout_is_recomputed_on_a_gpu(tmp_path, capsys, how, masks):
    """The same numbers without graphs, with them, and without recomputation."""
    flags = "--bf16 --micro-batch-size 1 --global-batch-size 3 --attention-dropout 0.1".split()
    flags += masks
    plain = on_gpu(tmp_path / "plain", *flags, "--cuda-graphs", "off")
    flags += f"--recompute-granularity {how}".split()
    assert on_gpu(tmp_path / "off", *flags, "--cuda-graphs", "off") == plain
    capsys.readouterr()
    assert on_gpu(tmp_path / "on", *flags, "--cuda-graphs", "on") == plain
    assert "CUDA graphs: off" not in capsys.readouterr().out


@gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(500)
def test_a_failed_capture_on_a_gpu(tmp_path, monkeypatch, capsys):
    """The steps run as usual, dropout included."""
    flags = "--bf16 --micro-batch-size 1 --global-batch-size 1".split()
    plain = on_gpu(tmp_path / "off", *flags, "--cuda-graphs", "off")
    real = graph.micro_step

    def waiting(*a):
        real(*a)
        torch.cuda.synchronize()

    monkeypatch.setattr(graph, "micro_step", waiting)
    assert on_gpu(tmp_path / "on", *flags, "--cuda-graphs", "on") == plain
    assert "CUDA graphs: off, because the capture failed" in capsys.readouterr().out
