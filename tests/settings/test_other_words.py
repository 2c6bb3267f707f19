"""Words of other trainers are answered with ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from parsing import refusal

from helpers import TINY_FLAGS
from meshwright.__main__ import COMMANDS, _as_typed, main
from meshwright.files import read_table
from meshwright.settings import flags, hints
from meshwright.settings.presets import PRESETS
from meshwright.settings.schema import GenerateConfig, TrainConfig
from meshwright.settings.text_inputs import PreprocessConfig

WORDS = read_table("settings/other_programs/other_words.toml")
COMING_FROM = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()


def documented() -> dict[str, str]:
    """Return the flags in the left columns of coming-from.md -> their answers."""
    out = {}
    for row in re.findall(r"^\| (`.*?) \| (.*) \|$", COMING_FROM, re.M):
        for name in re.findall(r"(?<=[` ])--[a-z][\w.-]+|(?<=`)(?:[a-z]+(?:_[a-z]+)+|optim|fsdp)(?=`)", row[0]):
            out["--" + name.lstrip("-").replace("_", "-")] = row[1]
    return out


def test_the_documented_flags_of_other_programs_are_answered_as_documented():
    documents, ours = documented(), flags._parser(TrainConfig)._option_string_actions
    assert len(documents) > 60
    for name, answer in documents.items():
        wanted = re.findall(r"--[a-z][a-z_-]+", answer)
        if name in ours or not wanted or set(wanted) <= {"--nproc-per-node"}:
            continue
        said = " ".join(flags._unknown(name, flags._parser(cls)) for cls in (TrainConfig, GenerateConfig))
        assert any(re.search(rf"{flag}(?![a-z-])", said) for flag in wanted), (name, said, answer)


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("--epochs 2", "--train-epochs"),
        ("--max-steps 3", "--train-iters"),
        ("--resume", "--load, with the folder of --save"),
        ("--output_dir=a", "--save"),
        ("--lr-scheduler cosine", "--lr-decay-style"),
        ("--context-length 3", "--seq-length"),
        ("--n-embd 3", "--hidden-size"),
        ("--block_size 3", "--seq-length"),
    ],
)
def test_common_flags(word, ours, tmp_path):
    first, *rest = word.split()
    assert f"unknown flag {first.partition('=')[0]}; here it is {ours}" in refusal(first, *rest)
    (tmp_path / "c.toml").write_text(f"{first.strip('-').partition('=')[0]} = 3\n")
    assert f"here it is {ours}" in refusal("--config", str(tmp_path / "c.toml"))


def test_an_answer_is_a_flag_of_the_command():
    assert "here it is --temperature" in refusal("--temp", "1", cls=GenerateConfig)
    assert "here it is --input" in refusal("--train-file", "a", cls=PreprocessConfig)
    assert hints.our_word("flags", "epochs", {"--temperature"}) == ""


@pytest.mark.parametrize(
    ("word", "ours"), [("export", "convert --to"), ("eval", "evaluate"), ("finetune", "train --lo")]
)
def test_commands(word, ours, capsys):
    assert main([word]) == 2 and f"; here it is `meshwright {ours}" in capsys.readouterr().err


def test_errors_name_the_typed_spelling(capsys):
    words = ["train", *TINY_FLAGS, "--learning-rate=0", "--min_lr", "-1", "--eval-only", "--eval-iters=0", "--n_embd=3"]
    assert main(words) == 2
    said = capsys.readouterr().err
    for line in ("--learning-rate 0.0 must", "--min_lr -1.0 must", "  --eval-only with --eval-iters 0", "--n_embd;"):
        assert line in said


def test_a_missing_value_too(capsys):
    assert main(["train", "--learning-rate"]) == 2
    assert "argument --learning-rate: expected one argument" in capsys.readouterr().err


def test_presets():
    assert "no preset 'gpt2'; here it is gpt2-117m" in refusal("--preset", "gpt2")


def test_every_answer_exists():
    parsers = [flags._parser(cls) for cls in (TrainConfig, GenerateConfig, PreprocessConfig)]
    known = {name for parser in parsers for name in parser._option_string_actions} | {"--system"}
    for kind, names in (("flags", known), ("commands", COMMANDS), ("presets", PRESETS)):
        for answer, words in WORDS[kind].items():
            first = words.split()[0]
            assert hints.our_word(kind, first, names), (answer, first)
            assert not [word for word in words.split() if word in names or f"--{word}" in names], answer


def test_a_length_in_epochs_is_refused_in_its_words() -> None:
    """A run makes samples of it, which nobody typed."""
    refusal = "--train-samples (2 samples) counts from the beginning; raise --train-samples"
    words = "(2 samples) counts from the beginning; raise"
    for typed, name in {"--train-epochs 1": "--train-epochs", "--num_train_epochs=1": "--num_train_epochs"}.items():
        assert _as_typed(refusal, ["train", *typed.split()], {}) == f"{name} {words} {name}"
    for typed in ("--train-samples 2", "--train_samples 2 --train-epochs 1"):
        assert "epochs" not in _as_typed(refusal, ["train", *typed.split()], {})
