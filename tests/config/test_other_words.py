"""Words of other trainers are answered with ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from parsing import parse, refusal

import meshwright
from helpers import TINY_FLAGS
from meshwright.__main__ import COMMANDS, main
from meshwright.apps.bench.command import BenchConfig
from meshwright.apps.datasets.commands import DedupConfig
from meshwright.apps.evaluate.command import EvaluateConfig
from meshwright.base import hints
from meshwright.base.errors import UserError
from meshwright.base.files import read_table
from meshwright.cli.convert import ConvertConfig
from meshwright.config.argv import answer_unknown, syntax_of
from meshwright.config.presets import PRESETS
from meshwright.config.problem import FLAGS
from meshwright.config.schema import GenerateConfig, TrainConfig
from meshwright.config.text_inputs import PreprocessConfig
from meshwright.generation.language_model import TextOptions
from meshwright.runtime.launch.launcher import LaunchConfig

WORDS = read_table("compat/flags/other_words.toml")
COMING_FROM = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()


def documented() -> dict[str, str]:
    """Return the flags in the left columns of coming-from.md -> their answers."""
    out = {}
    for row in re.findall(r"^\| (`.*?) \| (.*) \|$", COMING_FROM, re.M):
        for name in re.findall(
            r"(?<=[` ])--[a-z][\w.-]+|(?<=`)(?:[a-z]+(?:_[a-z]+)+|optim|fsdp)(?=`)", row[0]
        ):
            out["--" + name.lstrip("-").replace("_", "-")] = row[1]
    return out


def test_the_documented_flags_of_other_programs_are_answered_as_documented():
    documents, ours = documented(), syntax_of(TrainConfig).options
    assert len(documents) > 60
    for name, answer in documents.items():
        wanted = re.findall(r"--[a-z][a-z_-]+", answer)
        if name in ours or not wanted or set(wanted) <= {"--nproc-per-node"}:
            continue
        said = " ".join(
            str(answer_unknown(name, syntax_of(cls))) for cls in (TrainConfig, GenerateConfig)
        )
        assert any(re.search(rf"{flag}(?![a-z-])", said) for flag in wanted), (name, said, answer)


def test_a_word_without_a_flag_is_answered(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text("lr = 0.1\nseq_length = 16\n")
    said = refusal("c.toml", check=True)
    assert (
        "'c.toml'; give it to --config" in said
        and "--lr" not in said
        and said.endswith(" --data-path are needed too")
    )
    for name in ("held-out.txt", "more.jsonl"):
        Path(name).write_text("a")
    assert "'held-out.txt'; give the file to --prompts" in refusal(
        "held-out.txt", cls=GenerateConfig
    )
    one, two = "held-out.txt is a file of text", "held-out.txt more.jsonl are files of text"
    for typed, line in (
        ("run held-out.txt", f"{one}, not a checkpoint; give it"),
        ("held-out.txt more.jsonl", two),
    ):
        assert main(["evaluate", *typed.split()]) == 2
        err = capsys.readouterr().err
        assert line in err and " to --input" in err and "needed" not in err
    Path("run.txt").mkdir()
    assert main(["evaluate", "run.txt"]) == 2 and "--input is needed" in capsys.readouterr().err


def test_errors_name_the_typed_spelling(capsys):
    rest = [flag for flag in TINY_FLAGS if not flag.startswith("--lr")]
    words = [
        "train",
        *rest,
        "--learning-rate=0",
        "--min_lr",
        "-1",
        "--eval-only",
        "--eval-iters=0",
        "--n_embd=3",
    ]
    assert main(words) == 2
    said = capsys.readouterr().err
    for line in (
        "--learning-rate 0 must",
        "--min_lr -1 must",
        "  --eval-only with --eval-iters 0",
        "--n_embd;",
    ):
        assert line in said


@pytest.mark.parametrize("typed", ["--epochs 3", "--lr fast", "--lora"])
def test_a_mistake_is_not_lost_above_the_flags_that_are_missing(typed):
    mistake, missing = refusal(*typed.split(), check=True).strip().splitlines()
    assert typed.split()[0] in mistake
    needed = {
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--micro-batch-size",
    }
    assert needed < set(re.findall(r"--[\w-]+", missing)) and missing.endswith(
        " --data-path are needed too"
    )


def test_gguf_is_made_of_an_export():
    way = "native, torch(,| or) huggingface; llama.cpp's convert_hf_to_gguf.py makes it of a huggingface folder"
    with pytest.raises(UserError, match=way):
        meshwright.convert("run", "out", to="gguf")


def used_flags(cls: type) -> set[str]:
    syntax = syntax_of(cls)
    return {
        name
        for name, option in syntax.options.items()
        if syntax.used is None or option.target in syntax.used
    }


def test_every_answer_exists():
    assert hints.our_word("flags", "epochs", {"temperature"}) == ""
    configs = [
        TrainConfig,
        GenerateConfig,
        PreprocessConfig,
        EvaluateConfig,
        LaunchConfig,
        BenchConfig,
        DedupConfig,
        ConvertConfig,
    ]
    commands = [used_flags(cls) for cls in configs]
    known = {name for own in commands for name in own} | {"system"}
    known |= {option.target for cls in configs for option in syntax_of(cls).options.values()}
    options = {"prompt", *TextOptions.__annotations__}
    for kind, names in (
        ("flags", known),
        ("commands", COMMANDS),
        ("presets", PRESETS),
        ("generate", options),
    ):
        for answer, words in WORDS[kind].items():
            first = words.split()[0]
            assert hints.our_word(kind, first, names), (answer, first)
            # of another command the word may be a flag
            for own in commands if kind == "flags" else ():
                assert not any(
                    f"--{word}" in own
                    for word in words.split()
                    if set(FLAGS.render(answer).split()) & set(own)
                ), answer
            assert kind == "flags" or not any(word in names for word in words.split()), answer


def test_a_choice_of_on_and_off_takes_true_and_false():
    assert [parse(f"--compile={word}").config.training.compile for word in ("True", "false")] == [
        "on",
        "off",
    ]
    assert (
        parse("--learning_rate=1e-3", "--lr", "1e-3", "--lr=2e-3", "--lr=1e-3").config.optimizer.lr
        == 1e-3
    )
