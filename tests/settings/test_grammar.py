"""Suggestions in messages."""

import pytest

from meshwright.__main__ import main
from meshwright.settings.grammar import near_path


def test_a_path_that_does_not_exist_brings_up_what_is_named_like_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my-text_text_document.idx", "my-text_text_document.bin", "other.idx", "my-texts", ".my-texts2"):
        (tmp_path / name).touch()
    for wrong in ("my-text", "my-txt_text_document", "my-text_text_docment"):
        assert near_path(wrong, ".idx") == "; did you mean my-text_text_document?"
    assert near_path("other", ".idx") == near_path("nothing", ".idx") == near_path("none/x", ".idx") == ""
    assert near_path(f"{tmp_path}/my-textz") == f"; did you mean {tmp_path}/my-texts?"


@pytest.mark.parametrize(
    "words",
    [
        "train --mock --data-path P",
        "data inspect P",
        "data plan --data-path P --seq-length 8 --train-iters 1 --micro-batch-size 1",
    ],
)
def test_the_prefix_that_preprocess_was_given_is_no_dead_end(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for end in (".idx", ".bin"):
        (tmp_path / f"my-text_text_document{end}").touch()
    small = "--dry-run --num-layers 1 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 1 --train-iters 1"
    small += " --seq-length 8 --max-position-embeddings 8 --lr 1 --tokenizer byte"
    words = words.replace("--mock", small).replace("P", "my-text")
    assert main(words.split()) == 65
    assert "; did you mean my-text_text_document?" in capsys.readouterr().err


def test_a_misspelled_required_flag_is_named(capsys):
    assert main("train-tokenizer --input a --output b --vocab-sise 4096".split()) == 2
    err = capsys.readouterr().err
    assert "unknown flag --vocab-sise; did you mean --vocab-size?\n  the following arguments are required" in err
    assert main("quickstart --minuts 3".split()) == 2
    assert "unknown flag --minuts; did you mean --minutes?" in capsys.readouterr().err


def test_help_without_a_command_searches_the_flags_of_train(capsys):
    for topic, known in (("lr", "--lr"), ("--lr", "--lr"), ("resume", "--load"), ("learning", "--lr")):
        with pytest.raises(SystemExit) as end:
            main(["help", topic])
        out = capsys.readouterr().out
        assert end.value.code == 0 and known in out and f"this is `meshwright help train {topic}`" in out
    assert main(["help", "trian"]) == 2 and "no command 'trian'; did you mean train?" in capsys.readouterr().err
    assert main(["resume"]) == 2 and "no command 'resume'; `meshwright help` lists" in capsys.readouterr().err


def test_words_of_other_programs_bring_up_ours(tmp_path, capsys):
    assert main(["generate", "run", "--max-tokens", "5"]) == 2
    assert "unknown flag --max-tokens; did you mean --max-new-tokens?" in capsys.readouterr().err
    assert main(["train", "--max-tokens", "5"]) == 2 and "--max-new-tokens" not in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out"), "--to", "hf"]) == 65
