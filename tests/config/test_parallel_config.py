"""Settings of layouts: ranks, layers, batches, refusals, and the commands of the documents."""

import dataclasses
import json

import pytest

from documents import CONFIG_003, SEED_000, SEED_001, SEED_003, SEED_004
from helpers import TINY_FLAGS
from meshwright.apps.evaluate.command import EvaluateConfig
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.config.grammar import split_layers
from meshwright.config.schema import GenerateConfig, Model, Parallel, TrainConfig, Training

SMALL = """--num-layers=4 --hidden-size=32 --num-attention-heads=4 --seq-length=16 --micro-batch-size=2
--global-batch-size=16 --lr=1e-2 --train-iters=6 --mock-data --vocab-size=64""".split()


def parse(line="", cls=TrainConfig):
    return flags.parse_settings(cls, [*SMALL, *line.split()] if cls is TrainConfig else line.split(), "meshwright test")


def refusal(line, cls=TrainConfig):
    with pytest.raises(UserError) as caught:
        parse(line, cls)
    return str(caught.value)


def sized(layers=4, **parallel):
    return TrainConfig(model=Model(num_layers=layers), parallel=Parallel(**parallel))


# What the sizes mean


@pytest.mark.flag("muon_tp_mode")
def test_muon_never_takes_a_tensor_ranks_block_for_a_matrix():
    assert parse("--optimizer muon --muon-tp-mode duplicated").config.optimizer.muon_tp_mode == "duplicated"
    assert "give distributed" in refusal("--optimizer muon --muon-tp-mode blockwise")


def test_world_and_data_parallel_ranks():
    c = parse("--world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2").config
    assert (c.world, c.dp, c.parallel.model_ranks) == (8, 2, 4)
    c = parse("--world-size 8 --context-parallel-size 2 --attention-dropout 0").config
    assert (c.world, c.dp) == (8, 4)
    assert (parse().config.world, parse().config.dp) == (1, 1)


def test_oneflow_flags_give_the_number_of_ranks():
    """The number of started ranks takes precedence."""
    c = parse("--num-gpus-per-node 4 --num-nodes 2 --node-ips 10.0.0.1,10.0.0.2 --tensor-model-parallel-size 2").config
    assert (c.world, c.dp) == (8, 4)
    assert parse("--num-gpus-per-node 4 --num-nodes 2 --world-size 2").config.world == 2


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({"micro_batch_size": 2}, (2, 8, 1)),
        ({"micro_batch_size": 2, "num_accumulation_steps": 3}, (2, 24, 3)),
        ({"micro_batch_size": 2, "global_batch_size": 16}, (2, 16, 2)),
        ({"global_batch_size": 16, "num_accumulation_steps": 2}, (2, 16, 2)),
    ],
)
def test_any_two_of_micro_accumulation_and_global_give_the_third(given, want):
    c = TrainConfig(training=Training(train_iters=1, **given), parallel=Parallel(world_size=4))
    assert (c.micro_batch, c.global_batch, c.micro_batches(c.global_batch)) == want


@pytest.mark.flag("remote_device")
@pytest.mark.parametrize(
    ("line", "zero", "offloads"),
    [
        ("", 0, False),
        ("--use-distributed-optimizer", 1, False),
        ("--use-distributed-optimizer --zero-stage 3", 3, False),
        ("--zero-stage 2 --use-distributed-optimizer", 2, False),
        ("--zero-stage 3 --remote-device cpu", 3, True),
        ("--cpu-optimizer", 0, True),
    ],
)
def test_zero_and_offloading(line, zero, offloads):
    p = parse(f"{W} 2 {line}").config.parallel
    assert (p.zero_stage, p.offloads) == (zero, offloads)


# Stages


@pytest.mark.parametrize(
    ("layers", "stages", "want"),
    [
        (4, 1, [4]),
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (9, 4, [2, 2, 3, 2]),
        (4, 3, [1, 2, 1]),
        (5, 3, [2, 2, 1]),
        (24, 5, [5, 5, 5, 5, 4]),
        (21, 5, [4, 4, 5, 4, 4]),
        (4, 4, [1, 1, 1, 1]),
    ],
)
def test_extra_layers_go_to_the_middle(layers, stages, want):
    assert split_layers(None, layers, stages) == want == sized(layers, pipeline_model_parallel_size=stages).stages
    assert sum(want) == layers


@pytest.mark.parametrize(
    "layout",
    [
        "6,6,6,6",
        "[0]*6+[1]*6+[2]*6+[3]*6",
        "[0] * 6 + [1] * 6 + [2] * 6 + [3] * 6",
        " 6, 6 ,6,6",
        f"[{','.join(str(n // 6) for n in range(24))}]",
        "[0]*6+[1,1,1]*2+[2]*6+[3,3]*3",
    ],
)
def test_pipeline_layout(layout):
    c = sized(24, pipeline_model_parallel_size=4, pipeline_layout=layout)
    assert c.stages == [6, 6, 6, 6] and c.chunks == 1
    small = ["--num-layers", "24", "--pipeline-model-parallel-size", "4", "--world-size", "4"]
    got = flags.parse_settings(TrainConfig, [*SMALL, *small, "--custom-pipeline-stage-id", layout], "meshwright test")
    assert got.config.stages == [6, 6, 6, 6]


@pytest.mark.parametrize(
    ("layers", "virtual", "layout", "stages"),
    [
        (4, None, "3,1", [3, 1]),
        (4, None, "[0]+[1]*3", [1, 3]),
        (8, 2, None, [2, 2, 2, 2]),
        (8, 1, None, [1] * 8),
        (8, 2, "1,3,3,1", [1, 3, 3, 1]),
        (8, 4, None, [4, 4]),
    ],
)
def test_uneven_and_virtual_stages(layers, virtual, layout, stages):
    sizes = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": virtual}
    c = sized(layers, **sizes, pipeline_layout=layout)
    assert (c.stages, c.chunks) == (stages, len(stages) // 2)


W, TP, PP = "--world-size", "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
CP, VP = "--context-parallel-size", "--num-layers-per-virtual-pipeline-stage"
INST = "--num-distributed-optimizer-instances"
PP2 = f"{W} 2 {PP} 2"


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("2,3", "5 layers, but --num-layers is 4"),
        ("1,2,1", "3 stages, but --pipeline-model-parallel-size, times the pieces of each rank, gives 2"),
        ("4,0", "stage 1 has no layer"),
        ("0,0,1,1", "4 stages, but"),
        ("two,two", "neither the layers of each stage"),
        ("__import__('os').system('touch hacked')", "neither the layers"),
        ("[0]*2+[1]*3", "5 layers have a stage, but --num-layers is 4"),
        ("[0,0,0,0]", "stage 1 has no layer"),
        (
            "[0,0,2,2]",
            "there is a stage 2, but --pipeline-model-parallel-size, times the pieces of each rank, gives 0 to 1",
        ),
        ("[0,1,0,1]", "layer 2 goes back from stage 1 to 0"),
        ("[0]*2+[1]*2+", "'[0]*2+[1]*2+' is not a list of numbers"),
        ("[0]*2-[1]", "'[0]*2-[1]' is not a list of numbers"),
        ("[0][1]", "is not a list of numbers"),
        ("[0]**9", "is not a list of numbers"),
        ("[]*4", "is not a list of numbers"),
        ("[-1,0,0,1]", "is not a list of numbers"),
        ("[x for x in (0,0,1,1)]", "is not a list of numbers"),
        ("[0]*99999", "is not a list of numbers"),
        ("[0]*9999", "9999 layers have a stage, but --num-layers is 4"),
        ("+".join(["[0,0,0,0,0,0,0,0,0,0,0,0]*9999"] * 50), "is not a list of numbers"),
    ],
)
def test_wrong_layouts(layout, words):
    argv = [*SMALL, *PP2.split(), "--pipeline-layout", layout]
    with pytest.raises(UserError) as caught:
        flags.parse_settings(TrainConfig, argv, "meshwright test")
    assert words in str(caught.value) and str(caught.value).startswith("--pipeline-layout ")
    assert len(str(caught.value)) < 300


# Refusals: both numbers and the flag to change


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            f"{TP} 2",
            f"1 rank is not a multiple of {TP} 2 = 2: start 2 (meshwright launch --nproc-per-node 2 on one machine)",
        ),
        (f"{W} 6 {TP} 2 {PP} 2", f"6 ranks are not a multiple of {TP} 2 x {PP} 2 = 4: start 8"),
        (f"{TP} 0", f"{TP} 0 must be above 0"),
        (f"{W} 0", f"{W} 0 must be above 0"),
        (
            f"{W} 3 {TP} 3 --global-batch-size 6 --hidden-size 48",
            f"--num-attention-heads 4 is not a multiple of {TP} 3",
        ),
        (f"{W} 4 {TP} 4 --num-query-groups 2", f"--num-query-groups 2 is not a multiple of {TP} 4"),
        (f"{W} 2 {TP} 2 --group-query-attention", "--num-query-groups 1 is not"),
        (f"{W} 4 {TP} 4 --ffn-hidden-size 42", f"--ffn-hidden-size 42 is not a multiple of {TP} 4"),
        (f"{W} 4 {TP} 4 --pad-vocab-size-to 66", "--pad-vocab-size-to 66 is not"),
        (f"{W} 8 {TP} 2 {CP} 4 --attention-dropout 0", f"--num-attention-heads 4 is not a multiple of {TP} 2 x {CP} 4"),
        (
            f"{W} 4 {CP} 4 --num-query-groups 2 --attention-dropout 0",
            f"--num-query-groups 2 is not a multiple of {CP} 4",
        ),
        (f"{W} 4 {CP} 4 --seq-length 18 --attention-dropout 0", f"--seq-length 18 is not a multiple of {CP} 4"),
        (
            f"{W} 4 {TP} 4 --seq-length 18 --sequence-parallel",
            f"--sequence-parallel: --seq-length 18 is not a multiple of {TP} 4",
        ),
        (
            f"{W} 4 {TP} 2 {CP} 2 --seq-length 18 --sequence-parallel --attention-dropout 0",
            "--sequence-parallel: --seq-length 18 is not a multiple of --tensor-",
        ),
        (
            f"{W} 2 {CP} 2",
            f"{CP} 2 with --attention-dropout 0.1: its mask would depend on the layout; give --attention-dropout 0",
        ),
        (f"{W} 8 {PP} 8", f"{PP} 8 is above --num-layers 4: a stage would have no layer"),
        (f"{VP} 2", f"2 needs {PP} above 1"),
        (f"{PP2} {VP} 3", f"--num-layers 4 is not a multiple of {PP} 2 x {VP} 3 = 6"),
        (f"{PP2} {VP} 1 --pipeline-schedule gpipe", "contradicts"),
        (f"{PP2} {VP} 1 --pipeline-layout 2,2", "2 stages, but"),
        (
            f"{PP2} {VP} 1 --global-batch-size 6",
            f"--global-batch-size 6 makes 3 micro-batches for each rank, not a multiple of {PP} 2",
        ),
        (
            f"{PP2} {VP} 1 --train-iters none --train-samples 99 --rampup-batch-size 4 2 20",
            "--rampup-batch-size 2 makes 1 micro-batches for each rank",
        ),
        (f"{W} 4 {INST} 3 --zero-stage 1", f"{INST} 3 does not divide the 4 data-parallel ranks"),
        (f"{W} 4 {INST} 2", "2 needs --zero-stage 1, 2 or 3"),
        ("--zero-stage 4", "--zero-stage 4 is none of 0, 1, 2, 3"),
        ("--zero-stage 1.5", "--zero-stage: '1.5' is not a whole number"),
        ("--zero-stage -1", "--zero-stage -1 is none of 0, 1, 2, 3"),
        (f"{PP2} --micro-batch-size auto", "--micro-batch-size auto with a model on 2 ranks"),
        (f"{W} 2 --remote-device cpu --zero-stage 2", "--remote-device cpu needs --zero-stage 3, not 2"),
        ("--deepspeed --deepspeed_config nowhere.json", "--deepspeed_config nowhere.json: No such file"),
        (
            f"{W} 4 --global-batch-size 10",
            "10 is not a multiple of --micro-batch-size 2 x 4 data-parallel ranks = 8; the nearest multiple is 8",
        ),
        (
            f"{W} 4 --global-batch-size 12",
            "ranks = 8; --micro-batch-size 1 keeps the batch and its losses, and the nearest multiple is 16",
        ),
        (
            f"{W} 4 --micro-batch-size none --num-accumulation-steps 3",
            "16 is not a multiple of --num-accumulation-steps 3 x 4 data-parallel ranks = 12; the nearest multiple is",
        ),
        (
            f"{W} 4 --num-accumulation-steps 1",
            "2 x --num-accumulation-steps 1 x 4 data-parallel ranks is 8, not the --global-batch-size 16; leave one",
        ),
        (
            f"{W} 3 --micro-batch-size auto",
            "16 is not a multiple of --micro-batch-size auto x 3 data-parallel ranks = 3; the nearest multiple is 15",
        ),
        (
            f"{W} 2 --train-iters none --train-samples 99 --rampup-batch-size 4 2 20",
            "--rampup-batch-size 4 2 20: 4 and 2 must be multiples of --micro-batch-size 2 x 2 data-parallel ranks = 4",
        ),
        ("--device GPU!", "--device 'GPU!' is not auto, cpu, cuda"),
        ("--device auto:1", "--device 'auto:1' is not"),
        ("--distributed-backend n/ccl", "--distributed-backend 'n/ccl' is not a name such as nccl"),
        ("--cp-comm-type p2p", "--cp-comm-type p2p is not yet"),
        ("--remote-device nvme --zero-stage 3", "not yet in this version; give none, or give cpu"),
        ("--distributed-timeout-minutes 1e20", "--distributed-timeout-minutes 1e+20 is not between 0.01 and 100000"),
        ("--distributed-timeout-minutes 1e-9", "--distributed-timeout-minutes 1e-09 is not between"),
        ("--start-timeout-seconds 0", "--start-timeout-seconds 0 is not between 1 and 100000"),
    ],
)
def test_refusals(line, words):
    message = refusal(line)
    assert words in message and "\n" not in message, message


def test_all_wrong_sizes_at_once():
    message = refusal(f"{W} 9 {TP} 3 {PP} 5 {CP} 2 --seq-length 17 --zero-stage 7 --global-batch-size 7")
    numbers = ("9 ranks are", "--num-attention-heads 4 is", "--ffn-hidden-size 128 is", "--seq-length 17 is")
    sizes = ("give --attention-dropout 0", "above --num-layers 4", "--zero-stage 7", "--global-batch-size 7")
    assert all(message.count(words) == 1 for words in numbers + sizes), message


@pytest.mark.parametrize(
    "words",
    [
        *(f"--device {device}" for device in "auto cpu cuda cuda:3 npu npu:0 xpu mps".split()),
        *(f"--distributed-backend {backend}" for backend in "nccl gloo hccl xccl NCCL cpu:gloo,cuda:nccl".split()),
    ],
)
def test_devices_and_backends(words):
    assert parse(f"--world-size 2 {words}").notices == []


def test_generation_uses_one_copy():
    """More ranks than one copy of the model needs have nothing to do."""
    parse(f"--load x {TP} 2 {PP} 2 {W} 7", GenerateConfig)
    assert "1 rank is not a multiple of" in refusal(f"--load x {TP} 2", GenerateConfig)
    assert "which generate makes token by token; give 1" in refusal(f"--load x {CP} 2 {W} 2", GenerateConfig)


def test_evaluation_uses_all_ranks():
    line = "--load x --input y"
    parse(f"{line} {TP} 2 {PP} 2 {CP} 2 {W} 8", EvaluateConfig)
    parse(f"{line} {TP} 2 {W} 8", EvaluateConfig)
    assert f"6 ranks are not a multiple of {TP} 2 x {PP} 2 = 4: start 8" in refusal(
        f"{line} {TP} 2 {PP} 2 {W} 6", EvaluateConfig
    )


# Notices


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--sequence-parallel", "--sequence-parallel has no effect without --tensor-model-parallel-size above 1"),
        ("--zero-stage 2", "--zero-stage has no effect without several data-parallel ranks"),
        ("--use-distributed-optimizer", "--zero-stage has no effect without several data-parallel ranks"),
        (f"{W} 2 --use-distributed-optimizer --zero-stage 3", "is --zero-stage 1; --zero-stage 3 goes further"),
        ("--pipeline-schedule gpipe", "--pipeline-schedule has no effect without"),
        (f"{PP2} --num-layers-per-virtual-pipeline-stage 2", "has no effect without several pieces on a pipeline rank"),
        ("--partition-activations", "has no effect: --sequence-parallel splits activations"),
        ("--deepspeed", "--deepspeed is accepted and has no effect: --deepspeed_config"),
        ("--deepspeed-activation-checkpointing", "--deepspeed-activation-checkpointing recomputes whole layers"),
        ("--distributed-backend gloo", "--distributed-backend has no effect without several processes"),
    ],
)
def test_notices(line, words):
    [notice] = parse(line).notices
    assert words in notice


@pytest.mark.parametrize(
    "line",
    [
        "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "--world-size 2 --zero-stage 3",
        "--world-size 2 --context-parallel-size 2 --attention-dropout 0 --zero-stage 1",
        "--world-size 4 --use-distributed-optimizer --num-distributed-optimizer-instances 2",
        f"{PP2} --pipeline-schedule gpipe",
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1",
        "--world-size 2 --distributed-backend gloo",
        "--checkpoint-activations --deepspeed-activation-checkpointing",
    ],
)
def test_no_notices(line):
    assert parse(line).notices == []


def test_recompute_by_deepspeeds_name():
    assert parse("--deepspeed-activation-checkpointing").config.training.recompute_granularity == "full"
    assert "contradicts full" in refusal("--deepspeed-activation-checkpointing --recompute-activations")


def test_tiny_flags_fit_many_layouts():
    for more in (f"{W} 2 {TP} 2", PP2, f"{W} 2 --zero-stage 3", f"{W} 2 {CP} 2 --attention-dropout 0"):
        got = flags.parse_settings(TrainConfig, [*TINY_FLAGS, *more.split()], "meshwright test")
        assert got.config.world == 2 and dataclasses.replace(got.config) == got.config


def command(text, *more):
    return flags.parse_settings(TrainConfig, [*text.split(), *more], "meshwright test").config


@pytest.mark.parametrize(
    ("more", "ranks", "dp", "stages"),
    [([], 8, 2, [12, 12]), (["--pipeline-model-parallel-size", "4"], 16, 2, [6, 6, 6, 6])],
)
def test_seed_000(more, ranks, dp, stages):
    c = command(SEED_000, "--local-rank=3", "--world-size", str(ranks), *more)
    assert (c.dp, c.stages, c.micro_batches(c.global_batch)) == (dp, stages, 1)


@pytest.mark.parametrize(
    ("name", "tp", "pp", "hidden", "layers", "seq", "heads", "batch", "micro", "steps"),
    [
        ("345m", 1, 2, 1024, 24, 1024, 16, 16, 4, 1),
        ("1.3b", 2, 2, 2048, 24, 1024, 16, 32, 8, 2),
        ("2.7b", 2, 2, 2560, 32, 2048, 32, 32, 8, 2),
        ("3.7b", 2, 2, 3072, 32, 2048, 32, 16, 4, 2),
        ("345m-without-mp", 1, 1, 1024, 24, 1024, 16, 64, 8, 1),
    ],
)
def test_seed_001(tmp_path, monkeypatch, name, tp, pp, hidden, layers, seq, heads, batch, micro, steps):
    monkeypatch.chdir(tmp_path)
    file = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "steps_per_print": 1,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 1.0,
        "prescale_gradients": True,
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1},
        "wall_clock_breakdown": False,
    }
    file["fp16"]["initial_scale_power"] = 12
    (tmp_path / "ds_config.json").write_text(json.dumps(file))
    text = SEED_001.format(tp=tp, pp=pp, hidden=hidden, layers=layers, seq=seq, heads=heads, batch=batch, micro=micro)
    c = command(text, "--world-size", "8", "--local_rank=0")
    assert (c.dp, c.micro_batches(c.global_batch)) == (8 // tp // pp, steps)
    assert (c.precision.initial_loss_scale, c.precision.loss_scale_window, c.parallel.zero_stage) == (4096, 500, 0)
    sizes = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp), "--world-size", "8"]
    preset = command("", "--preset", f"ascend-{name}", *sizes, "--mock-data", "--vocab-size", "99")
    assert (preset.dp, preset.stages, preset.model.hidden_size) == (c.dp, c.stages, c.model.hidden_size)
    assert (preset.global_batch, preset.micro_batch) == (c.global_batch, c.micro_batch)


@pytest.mark.parametrize(("micro", "batch", "steps"), [(32, 512, 8), (32, 1024, 16), (80, 1280, 8), (60, 1920, 16)])
def test_seed_003(tmp_path, monkeypatch, micro, batch, steps):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(CONFIG_003.replace("$MICRO", str(micro)).replace("$GLOBAL", str(batch)))
    text = SEED_003.format(micro=micro, batch=batch)
    c = command(text, "--world-size", "16", "--fp16", "--checkpoint-activations", "--local-rank=7")
    assert (c.dp, c.stages, c.micro_batches(batch), c.parallel.zero_stage) == (2, [6, 6, 6, 6], steps, 1)
    libai = command(text, "--world-size", "16", "--custom-pipeline-stage-id", "[0] * 6 + [1] * 6 + [2] * 6 + [3] * 6")
    assert libai.stages == c.stages


@pytest.mark.parametrize(
    ("more", "dp", "steps"),
    [
        ("", 1, 2),
        (
            "--num-gpus-per-node 8 --num-nodes 4 --node-ips 10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4 "
            "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --global-batch-size 512",
            2,
            64,
        ),
        (
            "--num-gpus-per-node 8 --tensor-model-parallel-size 4 --micro-batch-size none --num-accumulation-steps 2",
            2,
            2,
        ),
    ],
)
def test_seed_004(more, dp, steps):
    c = command(SEED_004, "--initial-loss-scale", "4294967296", "--use-rdma", *more.split())
    assert (c.dp, c.micro_batches(c.global_batch)) == (dp, steps)


@pytest.mark.parametrize(
    ("preset", "pp", "ranks", "batch", "steps"), [("24x2304", 4, 32, 512, 32), ("16x1536", 1, 8, 16, 1)]
)
def test_oneflow_presets(preset, pp, ranks, batch, steps):
    sizes = f"{TP} 4 {PP} {pp} {W} {ranks} --mock-data --vocab-size 99"
    c = command(f"--preset oneflow-{preset} {sizes}")
    assert (c.dp, c.micro_batches(batch)) == (2, steps)
