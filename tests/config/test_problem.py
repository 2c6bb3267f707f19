"""Problems are put into the words of the caller, such as flags or keyword arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from parsing import refusal

import meshwright
from meshwright.config.problem import (
    KEYWORDS,
    GivenAs,
    Problem,
    Wording,
    plain,
    with_missing_last,
    with_value,
)

SMALL = "--num-layers=2 --hidden-size=32 --num-attention-heads=4 --seq-length=16 --mock-data --vocab-size=64".split()
LENGTH = "--micro-batch-size=1 --global-batch-size=8 --train-iters=6".split()


@pytest.mark.parametrize(
    ("text", "flags", "keywords"),
    [
        ("{lr} is needed", "--lr is needed", "lr is needed"),
        ("{lr=0.1} is above 0", "--lr 0.1 is above 0", "lr=0.1 is above 0"),
        ("{optimizer=sgd}", "--optimizer sgd", "optimizer='sgd'"),
        ("give {save=DIR}", "give --save DIR", "give save=DIR"),
        (
            "{fp16=True} or {mock_data=False}",
            "--fp16 or --no-mock-data",
            "fp16=True or mock_data=False",
        ),
        ("{config_file=a.toml}", "--config a.toml", "config_file='a.toml'"),
        ('a table {"train": [...]}', 'a table {"train": [...]}', 'a table {"train": [...]}'),
    ],
)
def test_a_text_in_flags_and_keywords(text: str, flags: str, keywords: str) -> None:
    assert str(Problem((), text)) == flags
    assert KEYWORDS.render(text) == keywords


@pytest.mark.parametrize("value", ["{lr}", "run_{seed}", "a}b", "{{lr}}", "a\nb", ""])
def test_a_value_is_no_name(value: str) -> None:
    """A value or a path may hold braces, also around the name of a setting."""
    assert Wording().render(f"{with_value('save', value)}!") == f"--save {value}!"
    assert Wording().render(plain(f"{value} is no folder")) == f"{value} is no folder"


def test_a_setting_is_named_as_it_was_given() -> None:
    given = {
        "lr": GivenAs("--learning-rate"),
        "min_lr": GivenAs("min_lr", " = ", " in a.toml"),
        "seed": GivenAs("SEED", "="),
    }
    words = Wording(given=given, remarks={"lr": (0.1, "chosen by {recipe=modern}")})
    text = "{min_lr=1} is above {lr=0.1}, not {lr=0.1}; {seed=2}, {min_lr}\n{lr=0.1} {lr=0.2}"
    assert words.render(text) == (
        "min_lr = 1 in a.toml is above --learning-rate 0.1 (chosen by --recipe modern), not --learning-rate 0.1; "
        "SEED=2, min_lr in a.toml\n--learning-rate 0.1 (chosen by --recipe modern) --learning-rate 0.2"
    )


def test_several_missing_settings_share_the_last_line() -> None:
    first, last = (
        Problem(("lr",), "{lr} is needed: a", "missing"),
        Problem(("save",), "{save} is needed: b", "missing"),
    )
    wrong = Problem(("seed",), "{seed=-1} is below 0")
    assert [*map(str, with_missing_last([first, wrong, last]))] == [
        "--seed -1 is below 0",
        "--lr and --save are needed too",
    ]
    assert with_missing_last([first, wrong]) == [first, wrong]


def test_each_source_has_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error names settings of a file, a variable and the command line, each as given there."""
    (tmp_path / "a.yaml").write_text("learning_rate: 0.1\n")
    monkeypatch.setenv("MESHWRIGHT_MIN_LR", "0.5")
    words = [*SMALL, *LENGTH, "--lr_warmup_init", "0.7", "--config", str(tmp_path / "a.yaml")]
    said = refusal(*words, check=True)
    of_file = f"learning_rate = 0.1 in {tmp_path / 'a.yaml'}"
    assert (
        said
        == f"\n  MESHWRIGHT_MIN_LR=0.5 is above {of_file}\n  --lr_warmup_init 0.7 is above {of_file}"
    )


def test_a_name_of_another_program_is_answered_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("batch_size = 8\n")
    said = refusal(*SMALL, *LENGTH, "--lr=1", "--config", str(tmp_path / "a.toml"))
    assert said.startswith(
        f"no setting batch_size in {tmp_path / 'a.toml'}; here it is --micro-batch-size"
    )


def test_python_names_keyword_arguments() -> None:
    sizes = {
        "num_layers": 2,
        "hidden_size": 30,
        "num_attention_heads": 4,
        "mock_data": True,
        "vocab_size": 64,
    }
    with pytest.raises(meshwright.UserError) as caught:
        meshwright.train(
            **sizes,
            seq_length=16,
            micro_batch_size=1,
            train_iters=1,
            lr=1e-3,
            optimizer="sgd",
            ema=2,
        )
    assert str(caught.value) == (
        "\n  ema=2 is not in [0, 1)"
        "\n  hidden_size=30 is not a multiple of num_attention_heads=4; change one or set kv_channels"
    )
