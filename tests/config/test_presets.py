"""Presets: the published sizes, schedules that fit any length, and `meshwright presets`."""

from __future__ import annotations

import json

import pytest
import torch
from parsing import parse

from meshwright.__main__ import main
from meshwright.config import flags
from meshwright.config.presets import ALIASES, FAMILIES, PRESETS, family_of
from meshwright.model import counts

# Parameters of the models whose files are public, with their own vocabulary.
PUBLISHED = {
    "gpt2-117m": 124_439_808,
    "gpt2-345m": 354_823_168,
    "gpt2-762m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}
# Those of the papers' tables and of the scripts, and within which share ours agree.
ABOUT = {
    **{
        "gpt3-125m": (125e6, 0.01),
        "gpt3-350m": (356e6, 0.01),
        "gpt3-760m": (760e6, 0.01),
        "gpt3-1.3b": (1.3e9, 0.02),
    },
    **{
        "gpt3-2.7b": (2.7e9, 0.02),
        "gpt3-6.7b": (6.7e9, 0.01),
        "gpt3-13b": (13e9, 0.02),
        "gpt3-175b": (174.6e9, 0.001),
    },
    **{
        "ascend-345m": (354.82e6, 0.0001),
        "ascend-1.3b": (1.31e9, 0.01),
        "ascend-2.7b": (2.65e9, 0.01),
    },
    **{
        "ascend-3.7b": (3.79e9, 0.01),
        "ascend-345m-without-mp": (354.82e6, 0.0001),
        "oneflow-117m": (124.4e6, 0.001),
    },
    **{
        "oneflow-345m": (354.82e6, 0.0001),
        "oneflow-16x1536": (533.7e6, 0.01),
        "oneflow-24x2304": (1.65e9, 0.01),
    },
}
NAMES = [name for one in FAMILIES for name in one.presets]


def settings(name, *more):
    return parse("--preset", name, *more).config


def positions(c):
    return c.model.max_position_embeddings or c.data.seq_length


@pytest.mark.parametrize("name", [*PUBLISHED, *ABOUT])
def test_the_published_number_of_parameters(name):
    c = settings(name)
    published, within = ABOUT.get(name) or (PUBLISHED[name], 0)
    parameters = counts.parameters(c.model, family_of(name).vocabulary, positions(c))
    assert parameters == pytest.approx(published, rel=within)


@pytest.mark.parametrize(
    "name", [n for n in PUBLISHED if n.startswith(("smol", "tiny", "llama", "qwen"))]
)
def test_shapes_are_those_of_transformers(name):
    """The class of the published model counts as many, layer by layer."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    c = settings(name)
    m = c.model
    kind, config = (
        (Qwen3ForCausalLM, Qwen3Config)
        if name.startswith("qwen3")
        else (LlamaForCausalLM, LlamaConfig)
    )
    sizes = {
        "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn,
        "num_hidden_layers": 1,
        "head_dim": m.head_dim,
    }
    heads = {"num_attention_heads": m.num_attention_heads, "num_key_value_heads": m.groups}
    tied = not m.untie_embeddings_and_output_weights
    with torch.device("meta"):
        theirs = kind(
            config(
                **sizes, **heads, vocab_size=family_of(name).vocabulary, tie_word_embeddings=tied
            )
        )
    one_layer = sum(p.numel() for p in theirs.model.layers.parameters())
    rest = sum(p.numel() for p in theirs.parameters()) - one_layer
    assert rest + m.num_layers * one_layer == PUBLISHED[name]


def test_aliases_are_the_same_presets():
    assert {PRESETS[a] is PRESETS[n] for a, n in ALIASES.items()} == {True}
    assert settings("gpt2-124m") == settings("gpt2-117m")


# Lengths


def test_a_shorter_run_has_a_shorter_schedule():
    """2,000 steps do not end inside the 3,200 steps of warm-up that 500,000 steps have."""
    c = settings(
        "gpt2-117m", "--train-iters", "2000", "--global-batch-size", "8", "--micro-batch-size", "8"
    )
    assert c.optimizer.lr_decay_iters == 1280 and c.warmup_samples == pytest.approx(12.8 * 8)
    assert settings("gpt2-117m").optimizer.lr_decay_iters == 320_000
    c = settings("gpt3-125m", "--train-tokens", str(10**9))
    assert c.optimizer.lr_decay_iters is None and c.training.train_iters is None
    assert c.decay_samples * 2048 == pytest.approx(10**9 * 260 / 300, rel=1e-3)
    # Where samples have different lengths, the share is one of tokens.
    grows = ["--seq-length-schedule", "linear:64:2048:3000:8"]
    c = settings("gpt3-125m", "--train-tokens", str(10**9), *grows)
    assert c.tokens_of(c.decay_samples) == pytest.approx(10**9 * 260 / 300, rel=1e-3)
    assert c.decay_samples * 2048 > 1.2 * 10**9
    c = settings("smollm2-135m", "--train-iters", "1000", "--mock-data", "--vocab-size", "64")
    assert (c.optimizer.lr_wsd_decay_iters, c.optimizer.lr_decay_style) == (200, "WSD")
    assert c.warmup_samples < c.decay_samples - c.wsd_samples


def test_every_preset_runs_at_other_lengths():
    for name in NAMES:
        if not family_of(name).is_script:
            for length in (
                ["--train-iters", "500"],
                ["--train-samples", "60000"],
                ["--train-tokens", str(10**9)],
            ):
                parse("--preset", name, "--mock-data", "--vocab-size", "64", *length, check=True)


# The command


def printed(capsys, *argv):
    assert main(["presets", *argv]) == 0
    return capsys.readouterr()


def test_the_list_fits_a_terminal(capsys):
    text = printed(capsys).out
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"  {name} " in text for name in NAMES)
    (row,) = (line for line in text.splitlines() if line.startswith("  llama3-8b "))
    assert row.split() == ["llama3-8b", "8.03B", "32", "4,096", "32/8", "8,192", "137.5", "GiB"]


@pytest.mark.parametrize("name", [*NAMES[::4], "gpt2-774m"])
def test_flags_and_file_say_the_same_as_the_preset(name, capsys, tmp_path):
    shown = printed(capsys, name)
    assert "\n" not in shown.out.strip() and shown.err.startswith(f"# {name}: ")
    wanted = settings(name)
    assert parse(*shown.out.split()).config == wanted
    for text in (printed(capsys, name, "--toml").out, flags.to_toml(wanted)):
        (tmp_path / "c.toml").write_text(text)
        assert parse("--config", str(tmp_path / "c.toml")).config == wanted


def test_json(capsys):
    one = json.loads(printed(capsys, "qwen3-0.6b", "--json").out)
    assert (one["parameters"], one["vocabulary"], one["settings"]["num_layers"]) == (
        596_049_920,
        151_936,
        28,
    )
    assert [p["name"] for p in json.loads(printed(capsys, "--json").out)] == NAMES
