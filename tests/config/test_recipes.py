"""Recipes: what follows from the size of a model, what wins over it, and what is said of it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_pair
from parsing import parse, refusal

from meshwright.__main__ import main
from meshwright.checkpoint import exports
from meshwright.checkpoint.huggingface.writer import export_notices
from meshwright.config import checks, flags, recipes
from meshwright.config.fields import config_fields
from meshwright.config.presets import FAMILIES
from meshwright.config.schema import Data, TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
MOCK = ("--mock-data", "--vocab-size", "64")
COLUMNS = (
    "num_layers hidden_size num_attention_heads seq_length train_tokens global_batch_size lr weight_decay embedding_lr"
).split()
BY_DEPTH = [
    (1, 128, 2, 128, 3_768_320, 32, 0.008, 0.3, 0.006),
    (2, 128, 2, 128, 7_536_640, 64, 0.008, 0.3, 0.006),
    (4, 256, 4, 256, 60_293_120, 64, 0.006, 0.3, 0.006),
    (8, 512, 4, 512, 498_073_600, 64, 0.003, 0.15, 0.006),
    (12, 768, 6, 1024, 1_698_693_120, 64, 0.002, 0.13, 0.006),
    (24, 1536, 12, 1024, 13_589_544_960, 128, 0.001, 0.065, 0.006),
    (32, 2048, 16, 2048, 32_128_368_640, 64, 0.00075, 0.036, 0.006),
]
NAMES = [name for family in FAMILIES for name in family.presets]


def value(config: TrainConfig, name: str) -> Any:
    return flags.to_dict(config)[name]


@pytest.mark.parametrize("row", BY_DEPTH, ids=lambda row: f"depth {row[0]}")
def test_depth_decides_everything(row: tuple[Any, ...]) -> None:
    parsed = parse("--depth", str(row[0]), *MOCK, check=True)
    assert {name: value(parsed.config, name) for name in COLUMNS} == dict(
        zip(COLUMNS, row, strict=True)
    )
    assert parsed.config.optimizer.optimizer == "muon" and parsed.recipe == "modern"
    assert flags.to_dict(
        parse("--recipe=modern", "--depth", str(row[0]), *MOCK).config
    ) == flags.to_dict(parsed.config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            # Width 64 x 12 = 768, with 768 / 128 = 6 heads. A layer: 4 x 768^2 + 3 x 768 x 2,048 =
            # 7,077,888, twelve: 84,934,656, of 20 tokens each: 1,698,693,120. Batch: 8,192 x
            # (1,698.7 / 15)^0.383 = 50,130 tokens, which are 49 of 1,024: 2^5.61, so 64. Steps:
            # 1,698,693,120 / 65,536 = 25,920; a tenth is 2,592. Rate: 0.002 x 768 / 768. Decay:
            # share 1.084 x 20^-0.527 = 0.2236; 1.5 / (0.2236 x 0.002 x 25,920) = 0.129. Validation:
            # 3 x 1 % x 25,920 / 10 = 77.8 batches.
            "--depth 12",
            {
                "hidden_size": 768,
                "num_attention_heads": 6,
                "train_tokens": 1_698_693_120,
                "global_batch_size": 64,
            }
            | {"lr": 0.002, "lr_warmup_fraction": 0.02, "embedding_lr": 0.006, "vector_lr": 0.006}
            | {"weight_decay": 0.13, "eval_interval": 2592, "eval_iters": 78},
        ),
        (
            # Width 256, heads of 64. A layer: 4 x 256^2 + 3 x 256 x 640 = 753,664; tokens 20 x 4 x
            # that = 60,293,120. Batch: 8,192 x 4.02^0.383 = 13,957 tokens, 54.5 of 256: 2^5.77, so
            # 64; steps 60,293,120 / 16,384 = 3,680. Rate: 0.002 x 768 / 256. Decay: 1.5 / (0.2236 x
            # 0.006 x 3,680) = 0.304, at most 0.3. 11.04 batches.
            "--depth 4",
            {
                "hidden_size": 256,
                "num_attention_heads": 4,
                "train_tokens": 60_293_120,
                "global_batch_size": 64,
            }
            | {
                "lr": 0.006,
                "lr_warmup_fraction": 0.02,
                "weight_decay": 0.3,
                "eval_interval": 368,
                "eval_iters": 11,
            },
        ),
        (
            # Twice the batch: rate 0.002 x root of 2 = 0.0028, the others' 0.006 x 1.4 = 0.0084,
            # half the steps: 12,960. Decay: 1.5 / (0.2236 x 0.0028 x 12,960) = 0.185. Validation:
            # 0.03 x 1,296 = 38.9 batches.
            "--depth 12 --global-batch-size 128",
            {
                "lr": 0.0028,
                "embedding_lr": 0.0084,
                "weight_decay": 0.18,
                "eval_interval": 1296,
                "eval_iters": 39,
            },
        ),
        (
            # AdamW: 0.0006 x 768 / 256, a warm-up of a tenth; decay 1.5 / (0.2236 x 0.0018 x 3,680)
            # = 1.01, at most 0.3.
            "--depth 4 --optimizer adam",
            {"lr": 0.0018, "lr_warmup_fraction": 0.1, "weight_decay": 0.3, "embedding_lr": None},
        ),
    ],
)
def test_the_numbers_of_a_recipe_computed_by_hand(given: str, expected: dict[str, Any]) -> None:
    config = parse(*given.split(), *MOCK, check=True).config
    assert {name: value(config, name) for name in expected} == expected


def test_the_page_has_this_table() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for row in BY_DEPTH:
        layers, width, heads, length, tokens, batch, lr, decay, _ = row
        cells = (
            layers,
            width,
            heads,
            length,
            recipes._short(tokens),
            batch,
            f"{lr:g}",
            f"{decay:g}",
        )
        assert f"| {' | '.join(map(str, cells))} |" in lines


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "--depth 12 --lr 1e-3",
            {"lr": 1e-3, "embedding_lr": 0.003, "vector_lr": 0.003, "weight_decay": 0.26},
        ),
        ("--depth 12 --seq-length 512", {"seq_length": 512, "global_batch_size": 128, "lr": 0.002}),
        # The batch follows the tokens; the rate the root of a batch that is given, at most twice.
        (
            "--depth 12 --train-tokens 15e6",
            {"global_batch_size": 8, "lr": 0.002, "train_tokens": 15_000_000},
        ),
        (
            "--depth 12 --train-tokens 15e6 --global-batch-size 32",
            {"lr": 0.004, "global_batch_size": 32},
        ),
        (
            "--depth 12 --train-iters 1831",
            {"global_batch_size": 8, "train_iters": 1831, "train_tokens": None},
        ),
        ("--depth 12 --train-iters 292", {"log_interval": 7}),  # a curve of at least 40 points
        ("--depth 12 --train-iters 9999", {"log_interval": 100}),  # as without a recipe
        (
            "--recipe modern --num-layers 6 --hidden-size 192",
            {"num_attention_heads": 3, "seq_length": 128},
        ),
        ("--depth 12 --glu-activation geglu", {"glu_activation": "geglu", "swiglu": False}),
        (
            "--depth 12 --lr-warmup-iters 10",
            {
                "lr_warmup_iters": 10,
                "lr_warmup_fraction": None,
                "train_iters": 25_920,
                "train_tokens": None,
            },
        ),
        # Samples of different lengths are counted in both units.
        (
            "--depth 12 --lr-warmup-iters 10 --seq-length-schedule 0:64",
            {"train_iters": None, "train_tokens": 1_698_693_120},
        ),
        (
            "--depth 12 --optimizer adam",
            {
                "lr": 6e-4,
                "lr_warmup_fraction": 0.1,
                "muon_split_qkv": "off",
                "embedding_lr": None,
                "vector_lr": None,
            },
        ),
        (
            "--depth 12 --optimizer lion --lr 1e-4",
            {"adam_beta2": 0.999, "lr": 1e-4, "lr_warmup_fraction": None},
        ),
        ("--depth 12 --optimizer sgd --lr 0.1", {"cautious_weight_decay": False, "lr": 0.1}),
        # The rates and the decay are those of the base, which µP carries over.
        (
            "--depth 12 --mup-base-hidden-size 256",
            {"lr": 0.006, "embedding_lr": 0.006, "weight_decay": 0.043, "hidden_size": 768},
        ),
        ("--depth 12 --weight-decay-incr-style constant", {"weight_decay": 0.086}),
        (
            "--depth 12 --tensor-model-parallel-size 2 --world-size 2",
            {"micro_batch_size": 8, "global_batch_size": 64},
        ),
        ("--depth 12 --zero-stage 2 --world-size 32", {"micro_batch_size": 2}),
        (
            "--depth 12 --num-accumulation-steps 4",
            {"micro_batch_size": None, "global_batch_size": 64},
        ),
    ],
)
def test_what_is_given_wins_and_the_rules_follow_it(given: str, expected: dict[str, Any]) -> None:
    config = parse(*given.split(), *MOCK, check=True).config
    assert {name: value(config, name) for name in expected} == expected


@pytest.mark.parametrize("name", NAMES[::3])
@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
def test_every_preset_gives_sizes_and_the_recipe_all_else(name: str, recipe: str) -> None:
    alone, both = (
        parse("--preset", name).config,
        parse("--preset", name, "--recipe", recipe, *MOCK, check=True).config,
    )
    for size in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "seq_length",
    ):
        assert value(both, size) == value(alone, size)
    for row, (wanted, _) in recipes.RECIPES[recipe]["rows"].items():
        assert value(both, row) == wanted
    if alone.model.gated == both.model.gated:
        assert both.model.ffn == alone.model.ffn
    assert both.optimizer.adam_beta1 == 0.9 and not both.optimizer.lr_wsd_decay_iters
    if recipe == "modern":
        assert both.optimizer.lr_decay_iters is None and both.training.train_iters is None
        assert value(both, "max_position_embeddings") == value(alone, "max_position_embeddings")


def test_the_recipe_of_gpt2_is_the_documents_one() -> None:
    for depth, preset in ((12, "gpt2-117m"),):
        for length in (
            [],
            ["--train-iters", "2000"],
            ["--train-tokens", "1e9"],
            ["--train-tokens", "auto"],
        ):
            theirs = flags.to_dict(parse("--preset", preset, *length).config)
            ours = flags.to_dict(parse("--recipe=gpt2", f"--depth={depth}", *length).config)
            # as many as tokens of a sample
            assert ours == theirs | {"max_position_embeddings": None}
    assert (
        parse("--preset", "gpt2-345m", "--recipe", "gpt2").config
        == parse("--preset", "gpt2-345m").config
    )


def test_tokens_are_bounded_by_readings_of_the_data(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "text", [[np.arange(100)]] * 100)
    assert recipes.training_tokens(Data(data_path=[prefix], split="1,0,0")) == 10_000
    assert recipes.training_tokens(Data(data_path=[prefix], split="80,10,10")) == 8_000
    assert recipes.training_tokens(Data(train_data_path=[prefix])) == 10_000
    for unknown in (
        Data(),
        Data(mock_data=True),
        Data(data_path=["s3://b/x"]),
        Data(data_path=[str(tmp_path / "no")]),
    ):
        assert recipes.training_tokens(unknown) is None
    parsed = parse("--depth", "4", "--data-path", prefix, "--split", "1,0,0")
    assert parsed.config.training.train_tokens == 40_000
    assert "4 readings of the 10k tokens" in parsed.sources["train_tokens"]


def test_tokens_alone_can_follow_from_the_size(tmp_path: Path) -> None:
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --lr 1e-3 --micro-batch-size 4"
    parsed = parse(*sizes.split(), "--train-tokens", "auto", *MOCK, check=True)
    assert parsed.config.training.train_tokens == 20 * 2 * 12 * 64**2
    assert (
        parsed.sources["train_tokens"]
        == "command line (auto: 20 for each of 98.3k parameters of the layers)"
    )
    assert any("--train-tokens auto is 1,966,080: 20 for each" in line for line in parsed.notices)
    without_sizes = refusal("--train-tokens", "auto")
    assert "--train-tokens auto counts the parameters" in without_sizes
    assert without_sizes.count("--hidden-size") == 1  # it is not said to be needed once more
    file = tmp_path / "own.toml"
    file.write_text('train_tokens = "auto"\n')
    assert (
        parse(*sizes.split(), "--config", str(file)).config
        == parse(*sizes.split(), "--train-tokens=auto").config
    )
    assert (
        parse("--config", str(file), "--train-iters=5", *sizes.split()).config.training.train_tokens
        is None
    )


def test_every_choice_has_a_reason_that_is_printed() -> None:
    parsed = parse("--depth", "12", "--lr", "0.001", *MOCK)
    [lines] = [line.splitlines() for line in parsed.notices if line.startswith("--recipe")]
    assert lines[0] == "--recipe modern sets, for 84.9M parameters in 12 layers:"
    assert max(map(len, lines)) <= 100
    for row in (
        "--hidden-size 768 +64 x the layers",
        "--no-add-bias-linear +biases",
        "--lr 0.001 +recipe: 0.002",
    ):
        assert any(re.match(f"  {row}", line) for line in lines), row
    known = config_fields(TrainConfig)
    for recipe in recipes.RECIPES.values():
        assert all(
            name in known and len(reason) > 5 for name, (_, reason) in recipe["rows"].items()
        )
    from_recipe = [source for source in parsed.sources.values() if source.startswith("recipe")]
    assert len(from_recipe) > 25 and all(
        source.startswith("recipe modern: ") for source in from_recipe
    )


def test_the_model_can_be_exported_or_a_start_says_that_it_cannot(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for size in ["--depth=1", "--depth=12", *(f"--preset={name}" for name in NAMES[::4])]:
        model = parse("--recipe=modern", size).config.model
        assert exports.obstacles(model, "llama") == [] == export_notices(model), size
    assert main(["train", "--depth=1", "--squared-relu", *MOCK, "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "note: --recipe modern sets" in said
    assert (
        "cannot be exported to Hugging Face's format: Qwen3ForCausalLM cannot express the activation"
        in said
    )
    assert "squared-relu; --swiglu has one" in said
    assert main(["train", "--depth=1", *MOCK, "--dry-run"]) == 0
    assert "cannot be exported" not in capsys.readouterr().err


def test_a_resumed_run_keeps_what_its_file_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config.toml has values, no recipe, so that other numbers of a recipe do not reach it."""
    first = parse("--depth", "4", *MOCK).config
    file = tmp_path / "config.toml"
    file.write_text(flags.to_toml(first))
    monkeypatch.setitem(recipes.RECIPES["modern"]["numbers"], "lr", {"muon": 9.0})
    monkeypatch.setitem(recipes.RECIPES["modern"]["numbers"], "batch_tokens", 1)
    assert parse("--depth", "4", *MOCK).config != first
    assert parse("--config", str(file)).config == first
    again = parse("--depth", "4", "--config", str(file), "--lr-decay-style", "cosine").config
    assert again == dataclasses.replace(
        first, optimizer=dataclasses.replace(first.optimizer, lr_decay_style="cosine")
    )
    assert checks.problems(first) == []
