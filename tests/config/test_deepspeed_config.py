"""A DeepSpeed JSON file: which keys are taken, and which are refused with which message."""

import json
import math
from dataclasses import replace

import pytest
from parsing import refusal as settings_refusal

from documents import CONFIG_003
from meshwright import train
from meshwright.base.errors import USAGE, UserError
from meshwright.compat.flags import deepspeed_json
from meshwright.config import fields, flags
from meshwright.config.schema import TrainConfig

SMALL = """--num-layers=4 --hidden-size=32 --num-attention-heads=4 --seq-length=16 --lr=1e-2 --train-iters=6
--mock-data --vocab-size=64""".split()
BATCHES = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """parse(file, line) -> Parsed: parse a command line with --deepspeed_config."""
    monkeypatch.chdir(tmp_path)

    def call(file, line=""):
        (tmp_path / "ds.json").write_text(file if isinstance(file, str) else json.dumps(file))
        argv = [*SMALL, "--deepspeed", "--deepspeed_config", "ds.json", *line.split()]
        return flags.parse_settings(TrainConfig, argv, "meshwright test")

    return call


@pytest.fixture
def refusal(parse):
    def call(file, line=""):
        with pytest.raises(UserError) as caught:
            parse(file, line)
        assert caught.value.status == USAGE
        return str(caught.value)

    return call


# Keys that are taken


@pytest.mark.flag("deepspeed_config")
@pytest.mark.parametrize(
    ("file", "name", "want"),
    [
        ({"train_batch_size": 8}, "global_batch_size", 8),
        ({"train_micro_batch_size_per_gpu": 4}, "micro_batch_size", 4),
        ({"gradient_clipping": 0.5}, "clip_grad", 0.5),
        ({"zero_optimization": {"stage": 2}}, "zero_stage", 2),
        ({"zero_optimization": True}, "zero_stage", 1),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}},
            "cpu_optimizer",
            True,
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "remote_device",
            "cpu",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}},
            "remote_device",
            "none",
        ),
        ({"fp16": {"enabled": True}}, "fp16", True),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "loss_scale", 128.0),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, "loss_scale", None),
        ({"fp16": {"enabled": True, "initial_scale_power": 12}}, "initial_loss_scale", 4096.0),
        ({"fp16": {"enabled": True, "hysteresis": 4}}, "hysteresis", 4),
        ({"fp16": {"enabled": True, "loss_scale_window": 500}}, "loss_scale_window", 500),
        ({"fp16": {"enabled": False, "initial_scale_power": 12}}, "initial_loss_scale", 2.0**32),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 5}}, "bf16", True),
        ({"steps_per_print": 5}, "steps_per_print", 5),
        ({"steps_per_print": math.inf}, "steps_per_print", 2**31 - 1),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True, "profile": True}},
            "checkpoint_in_cpu",
            True,
        ),
        ({"wall_clock_breakdown": True}, "timing_log_level", "1"),
        (
            {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"},
            "fp16",
            False,
        ),
    ],
)
def test_taken(parse, file, name, want):
    got = parse(BATCHES | file, "--world-size 2" if "zero_optimization" in file else "")
    assert flags.to_dict(got.config)[name] == want
    default = fields.default_of(fields.config_fields(TrainConfig)[name][1])
    assert got.sources[name] == ("ds.json" if want != default else "default")


def test_fp16_from_the_file_alone_is_reported(parse):
    """Seed 003's script omits --fp16 for USE_FP16=false; DeepSpeed would train in fp16 silently."""
    got = parse(
        CONFIG_003.replace("$MICRO", "2").replace("$GLOBAL", "8"), "--world-size 2 --zero-stage 1"
    )
    assert got.config.precision.fp16
    assert (
        'ds.json: "fp16.enabled" is true and --fp16 is not given: this run is fp16' in got.notices
    )


def test_the_file_alone_gives_the_batch(parse):
    got = parse(
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, "--world-size 4"
    ).config
    assert (got.global_batch, got.micro_batch, got.micro_batches(24)) == (24, 2, 3)
    got = parse({"train_batch_size": 24, "gradient_accumulation_steps": 3}, "--world-size 4").config
    assert (got.global_batch, got.micro_batch, got.micro_batches(24)) == (24, 2, 3)
    got = parse(BATCHES | {"gradient_accumulation_steps": 2}).config
    assert (got.global_batch, got.micro_batch, got.training.num_accumulation_steps) == (4, 2, None)


def test_hugging_face_style(parse):
    """With "auto" everywhere the flags decide."""
    names = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"
    file = dict.fromkeys(names.split(), "auto") | {
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR"},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "curriculum_learning": {"enabled": False},
        "amp": {"enabled": False},
    }
    got = parse(file, "--bf16 --micro-batch-size 2 --global-batch-size 4 --world-size 2")
    assert (
        got.config.precision.bf16
        and not got.config.precision.fp16
        and got.config.parallel.zero_stage == 2
    )
    idle = [n for n in got.notices if "without effect here" in n]
    assert (
        len(idle) == 1
        and "zero_optimization.overlap_comm" in idle[0]
        and "activation_checkpointing" in idle[0]
    )
    assert (
        'ds.json: the section "optimizer" is not read: --optimizer and its flags count'
        in got.notices
    )
    assert (
        'ds.json: the section "scheduler" is not read: --lr-decay-style and its flags count'
        in got.notices
    )


def test_a_saved_configuration_reads_back(parse, tmp_path):
    """Then every setting is given, and agrees with the file."""
    got = parse(CONFIG_003.replace("$MICRO", "2").replace("$GLOBAL", "8"), "--world-size 2")
    (tmp_path / "c.toml").write_text(flags.to_toml(got.config))
    again = flags.parse_settings(
        TrainConfig, ["--config", str(tmp_path / "c.toml")], "meshwright test"
    )
    assert again.config == got.config


def test_the_loss_scale_of_the_file_counts(parse):
    """BigScience's run.sh gives `--loss-scale 12`, which DeepSpeed does not read."""
    got = parse(
        json.dumps(BATCHES | {"fp16": {"enabled": True, "loss_scale": 0}}), "--fp16 --loss-scale 12"
    )
    assert got.config.precision.loss_scale is None
    assert (
        'ds.json: "fp16.loss_scale" is dynamic, which counts instead of --loss-scale 12'
        in got.notices
    )


# Contradictions between a key and a flag, with both values


# Refusals


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.json", "No such file"),
        (".", "directory"),
        ("odd", "not UTF-8 text"),
        ("deep", "nested too deeply"),
    ],
)
@pytest.mark.fault("F29")
@pytest.mark.promise("TOML, JSON and YAML's safe loader make no objects")
def test_unreadable(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd").write_bytes(b'{"\xff": 1}')
    (tmp_path / "deep").write_text('{"a": ' + "[" * 100_000)
    message = settings_refusal(
        *SMALL, "--micro-batch-size=1", "--deepspeed_config", name, check=True
    )
    assert (
        message.startswith(f"--deepspeed_config {name}: ")
        and words in message
        and "\n" not in message
    )


def test_every_key_is_of_one_kind_and_every_setting_is_real():
    tables = [
        deepspeed_json.MAPPED,
        deepspeed_json.IDLE,
        deepspeed_json.REFUSED,
        deepspeed_json.OURS,
    ]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert {name for name, _ in deepspeed_json.MAPPED.values()} <= fields.config_fields(
        TrainConfig
    ).keys()


def test_from_python_the_file_counts_too(tmp_path, capsys):
    """train(config) reads it; settings not at their default must agree with it."""
    (tmp_path / "ds.json").write_text(json.dumps({"gradient_clipping": 0.5, "train_batch_size": 4}))
    argv = [
        *SMALL,
        "--micro-batch-size=2",
        "--eval-iters=0",
        "--device=cpu",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    config = flags.parse_settings(TrainConfig, argv, "meshwright test").config
    parallel = replace(config.parallel, deepspeed_config=str(tmp_path / "ds.json"))
    assert train(replace(config, parallel=parallel)).status == 0
    out, err = capsys.readouterr()
    assert (
        "ds.json sets --clip-grad 0.5, --global-batch-size 4" in err
        and "global batch size:     4 " in out
    )
    clipped = replace(
        config, parallel=parallel, optimizer=replace(config.optimizer, clip_grad=0.25)
    )
    with pytest.raises(UserError, match="but clip_grad is 0.25"):
        train(clipped)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_precision_of_the_file_counts(parse, name):
    """ds_pretrain_gpt_350M.sh of offload_pp gives --fp16, and its file turns on bf16 alone."""
    other = {"fp16": "bf16", "bf16": "fp16"}[name]
    file = BATCHES | {name: {"enabled": True}, other: {"enabled": False}}
    got = parse(file, f"--{other}")
    assert (got.config.precision.fp16, got.config.precision.bf16) == (
        name == "fp16",
        name == "bf16",
    )
    line = f'"{name}.enabled" is true, which counts instead of --{other}: this run is {name}'
    assert f"ds.json: {line}" in got.notices
    # A file that turns on neither only contradicts the flag.
    with pytest.raises(UserError, match=f'"{other}.enabled" is false, but --{other} is true'):
        parse(BATCHES | {name: {"enabled": False}, other: {"enabled": False}}, f"--{other}")
    # One that turns on both is refused by its name, whatever the flags are.
    both = BATCHES | {name: {"enabled": True}, other: {"enabled": True}}
    for line in ("", f"--{other}"):
        with pytest.raises(UserError, match='ds.json: "fp16.enabled" and "bf16.enabled" are both'):
            parse(both, line)
