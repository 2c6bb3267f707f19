"""Settings of layouts: ranks, layers, batches, refusals, and the commands of the documents."""

import pytest

from meshwright.apps.evaluate.command import EvaluateConfig
from meshwright.base.errors import UserError
from meshwright.config import flags
from meshwright.config.grammar import split_layers
from meshwright.config.schema import GenerateConfig, Model, Parallel, TrainConfig, Training

SMALL = """--num-layers=4 --hidden-size=32 --num-attention-heads=4 --seq-length=16 --micro-batch-size=2
--global-batch-size=16 --lr=1e-2 --train-iters=6 --mock-data --vocab-size=64""".split()


def parse(line="", cls=TrainConfig):
    return flags.parse_settings(
        cls, [*SMALL, *line.split()] if cls is TrainConfig else line.split(), "meshwright test"
    )


def refusal(line, cls=TrainConfig):
    with pytest.raises(UserError) as caught:
        parse(line, cls)
    return str(caught.value)


def sized(layers=4, **parallel):
    return TrainConfig(model=Model(num_layers=layers), parallel=Parallel(**parallel))


# What the sizes mean


@pytest.mark.flag("muon_tp_mode")
def test_muon_never_takes_a_tensor_ranks_block_for_a_matrix():
    assert (
        parse("--optimizer muon --muon-tp-mode duplicated").config.optimizer.muon_tp_mode
        == "duplicated"
    )
    assert "give distributed" in refusal("--optimizer muon --muon-tp-mode blockwise")


def test_world_and_data_parallel_ranks():
    c = parse(
        "--world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    ).config
    assert (c.world, c.dp, c.parallel.model_ranks) == (8, 2, 4)
    c = parse("--world-size 8 --context-parallel-size 2 --attention-dropout 0").config
    assert (c.world, c.dp) == (8, 4)
    assert (parse().config.world, parse().config.dp) == (1, 1)


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
        (9, 4, [2, 2, 3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (24, 5, [5, 5, 5, 5, 4]),
        (21, 5, [4, 4, 5, 4, 4]),
        (4, 4, [1, 1, 1, 1]),
    ],
)
def test_extra_layers_go_to_the_middle(layers, stages, want):
    assert (
        split_layers(None, layers, stages)
        == want
        == sized(layers, pipeline_model_parallel_size=stages).stages
    )
    assert sum(want) == layers


@pytest.mark.parametrize(
    "layout",
    [
        "6,6,6,6",
        "[0]*6+[1]*6+[2]*6+[3]*6",
        " 6, 6 ,6,6",
        f"[{','.join(str(n // 6) for n in range(24))}]",
        "[0]*6+[1,1,1]*2+[2]*6+[3,3]*3",
    ],
)
def test_pipeline_layout(layout):
    c = sized(24, pipeline_model_parallel_size=4, pipeline_layout=layout)
    assert c.stages == [6, 6, 6, 6] and c.chunks == 1
    small = ["--num-layers", "24", "--pipeline-model-parallel-size", "4", "--world-size", "4"]
    got = flags.parse_settings(
        TrainConfig, [*SMALL, *small, "--custom-pipeline-stage-id", layout], "meshwright test"
    )
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
CP = "--context-parallel-size"
PP2 = f"{W} 2 {PP} 2"


# Refusals


def test_all_wrong_sizes_at_once():
    message = refusal(
        f"{W} 9 {TP} 3 {PP} 5 {CP} 2 --seq-length 17 --zero-stage 7 --global-batch-size 7"
    )
    numbers = (
        "9 ranks are",
        "--num-attention-heads 4 is",
        "--ffn-hidden-size 128 is",
        "--seq-length 17 is",
    )
    sizes = (
        "give --attention-dropout 0",
        "above --num-layers 4",
        "--zero-stage 7",
        "--global-batch-size 7",
    )
    assert all(message.count(words) == 1 for words in numbers + sizes), message


@pytest.mark.parametrize(
    "words",
    [
        *(f"--device {device}" for device in "auto cpu cuda cuda:3 npu npu:0 xpu mps".split()),
        *(
            f"--distributed-backend {backend}"
            for backend in "nccl gloo hccl xccl NCCL cpu:gloo,cuda:nccl".split()
        ),
    ],
)
def test_devices_and_backends(words):
    assert parse(f"--world-size 2 {words}").notices == []


def test_generation_uses_one_copy():
    """More ranks than one copy of the model needs have nothing to do."""
    parse(f"--load x {TP} 2 {PP} 2 {W} 7", GenerateConfig)
    assert "1 rank is not a multiple of" in refusal(f"--load x {TP} 2", GenerateConfig)
    assert "which generate makes token by token; give 1" in refusal(
        f"--load x {CP} 2 {W} 2", GenerateConfig
    )


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
        (
            "--sequence-parallel",
            "--sequence-parallel has no effect without --tensor-model-parallel-size above 1",
        ),
        (
            "--zero-stage 2",
            "--zero-stage has no effect without several data-parallel ranks",
        ),
        (
            "--use-distributed-optimizer",
            "--use-distributed-optimizer has no effect without several data-parallel ranks",
        ),
        (
            f"{W} 2 --use-distributed-optimizer --zero-stage 3",
            "is --zero-stage 1; --zero-stage 3 goes further",
        ),
        ("--pipeline-schedule gpipe", "--pipeline-schedule has no effect without"),
        (
            f"{PP2} --num-layers-per-virtual-pipeline-stage 2",
            "has no effect without several pieces on a pipeline rank",
        ),
        ("--partition-activations", "has no effect: --sequence-parallel splits activations"),
        ("--deepspeed", "--deepspeed is accepted and has no effect: --deepspeed_config"),
        (
            "--deepspeed-activation-checkpointing",
            "--deepspeed-activation-checkpointing recomputes whole layers",
        ),
        (
            "--distributed-backend gloo",
            "--distributed-backend has no effect without several processes",
        ),
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
    assert (
        parse("--deepspeed-activation-checkpointing").config.training.recompute_granularity
        == "full"
    )
    assert "contradicts full" in refusal(
        "--deepspeed-activation-checkpointing --recompute-activations"
    )


def command(text, *more):
    return flags.parse_settings(TrainConfig, [*text.split(), *more], "meshwright test").config
