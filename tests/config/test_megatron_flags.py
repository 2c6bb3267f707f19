"""Every flag of Megatron-LM and Megatron-Core has an answer, and suggestions do not mislead."""

from __future__ import annotations

from pathlib import Path

import pytest
from parsing import parse

from meshwright.base.errors import UserError
from meshwright.checkpoint.saved_model import model_settings
from meshwright.compat.flags.megatron_flags import (
    EQUAL,
    NO_EFFECT,
    OTHER_MODELS,
    REFUSED,
    RETIRED,
    known_elsewhere,
)
from meshwright.config import fields, flags
from meshwright.config.argv import syntax_of
from meshwright.config.schema import TrainConfig

# Names and numbers of values (*: any). The first file has those of Megatron-LM's arguments.py of
# early 2026 and the dataclasses from which Megatron-Core 0.16 makes the rest; the second has what
# bigscience's (8387ae17), Microsoft's (4efb479d) and DeepSpeed's own add, with hyphens.
MEGATRON = {
    name: count
    for file in ("megatron_core_flags.txt", "megatron_deepspeed_flags.txt")
    for name, count in map(str.split, Path(__file__).with_name(file).read_text().splitlines())
}


def test_every_flag_of_megatron_has_an_answer():
    ours = syntax_of(TrainConfig).options
    unknown = [
        name for name in MEGATRON if name not in ours and known_elsewhere(name, name) is None
    ]
    assert unknown == []
    accepted = {
        name: "*" if ours[name].count == "+" else str(ours[name].count)
        for name in MEGATRON.keys() & NO_EFFECT.keys()
    }
    assert accepted == {name: MEGATRON[name] for name in accepted}
    assert not [
        name for name in MEGATRON if name in NO_EFFECT and (name in REFUSED or name in RETIRED)
    ]


def test_a_switch_that_is_one_of_our_settings(tmp_path):
    for name, (field, value) in EQUAL.items():
        group = fields.config_fields(TrainConfig)[field][0]
        parsed = parse("--loss-mean", "microbatch", "--bf16", name)
        assert getattr(getattr(parsed.config, group), field) == value and parsed.notices == []
        (tmp_path / "c.yaml").write_text(
            f"loss_mean: microbatch\nbf16: true\n{name[2:].replace('-', '_')}: true\n"
        )
        assert (
            getattr(getattr(parse("--config", str(tmp_path / "c.yaml")).config, group), field)
            == value
        )


def test_the_names_of_other_years():
    """Flags of 2021, of Microsoft and of LLaMA's scripts, with the values that these give."""
    words = "--activations-checkpoint-method block --activations-checkpoint-num-layers 3"
    words += " --num-experts 1 --ds-sequence-parallel-size 1 --num-key-value-heads 2"
    words += " --moe-expert-parallel-size 1 --moe-loss-coeff 0.01 --use-flash-attn-triton"
    words += " --normalization rmsnorm --use-rotary-position-embeddings"
    words += " --rotary-position-embeddings-theta 500000"
    parsed = parse(*words.split())
    t, m = parsed.config.training, parsed.config.model
    recomputed = (t.recompute_granularity, t.recompute_method, t.recompute_num_layers)
    assert recomputed == ("full", "block", 3)
    assert (m.num_experts, m.num_query_groups, m.normalization) == (None, 2, "RMSNorm")
    assert m.rotary_base == 500000 and parsed.config.parallel.context_parallel_size == 1
    assert m.attention_dropout == 0  # Microsoft's attention in Triton has none
    assert all("the network is dense" in notice for notice in parsed.notices)


def test_what_is_as_exact_here_is_accepted():
    """As in train_llama3_8b_h100_fp8.sh, which quotes a value within an array."""
    words = ["--grad-reduce-in-bf16", "--fp8-param-gather", "--ckpt-format", "torch_dist"]
    parsed = parse(*words, "--split", "'99,1,0'")
    assert parsed.config.checkpoint.ckpt_format == "native"
    assert parsed.config.data.split.shares == (99, 1, 0)
    for notice, part in zip(
        parsed.notices,
        (
            "in float32, which loses nothing",
            "cast to 8 bits once a step",
            "torch_dist is native here",
        ),
        strict=True,
    ):
        assert part in notice


def test_reasons_are_plain():
    reasons = [reason for _, reason in NO_EFFECT.values()] + list(REFUSED.values())
    assert not [r for r in reasons if r.endswith(".") or r != r.strip() or "\n" in r]
    assert all(words == words.lower() for words in OTHER_MODELS.values())


def test_older_switches_are_settings_with_a_value(tmp_path: Path) -> None:
    """On the command line, in a file or an older checkpoint, and turned off again."""

    def resolve(*words: str) -> TrainConfig:
        return flags.parse_settings(
            TrainConfig, list(words), "meshwright train", check=False
        ).config

    got = resolve(
        "--checkpoint-activations",
        "--use-rotary-position-embeddings",
        "--no-bias-gelu-fusion",
        "--openai-gelu",
    )
    assert (got.training.recompute_granularity, got.model.position, got.model.activation) == (
        "full",
        "rope",
        "gelu-tanh",
    )
    assert resolve("--openai-gelu", "--no-bias-gelu-fusion").model.activation == "gelu-tanh"
    # As 0.11 wrote every setting into config.toml.
    (tmp_path / "c.toml").write_text(
        "[training]\nrecompute_activations = true\ncheckpoint_activations = false\n[parallel]\nzero_stage = 0\n"
        "use_distributed_optimizer = true\npartition_activations = false\ndeepspeed = false\n"
    )
    file = f"--config={tmp_path}/c.toml"
    parsed = flags.parse_settings(
        TrainConfig, [file, "--world-size=2"], "meshwright train", check=False
    )
    assert (parsed.config.training.recompute_granularity, parsed.config.parallel.zero_stage) == (
        "selective",
        1,
    )
    assert not parsed.notices and parsed.sources["zero_stage"].endswith(
        "c.toml (--use-distributed-optimizer)"
    )
    assert resolve(file, "--zero-stage=3").parallel.zero_stage == 3
    assert resolve(file, "--checkpoint-activations").training.recompute_granularity == "full"
    assert resolve(file, "--no-recompute-activations").training.recompute_granularity is None
    assert (
        resolve(file, "--no-checkpoint-activations").training.recompute_granularity == "selective"
    )
    every = "checkpoint_activations = {}\nrecompute_activations = {}\ndeepspeed_activation_checkpointing = {}\n"
    for values, want in (
        ("true false false", "full"),
        ("false false true", "full"),
        ("false true false", "selective"),
    ):
        (tmp_path / "d.toml").write_text(every.format(*values.split()))
        assert resolve(f"--config={tmp_path}/d.toml").training.recompute_granularity == want
    with pytest.raises(UserError, match="contradicts full recomputation"):
        resolve("--recompute-granularity=selective", "--checkpoint-activations")
    saved = {
        "position_embedding_type": "learned_absolute",
        "use_rotary_position_embeddings": True,
        "zero_stage": 2,
    }
    found = flags.from_saved(
        TrainConfig, saved | {"use_distributed_optimizer": True, "openai_gelu": False}, "a step"
    )
    assert found == {"position_embedding_type": "rope", "zero_stage": 2}
    assert model_settings(saved, "a step").position == "rope"
