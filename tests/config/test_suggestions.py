"""Suggestions in messages."""

import pytest

from meshwright.__main__ import main
from meshwright.base.hints import near_path


def test_a_path_that_does_not_exist_brings_up_what_is_named_like_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "my-text_text_document.idx",
        "my-text_text_document.bin",
        "other.idx",
        "my-texts",
        ".my-texts2",
    ):
        (tmp_path / name).touch()
    for wrong in ("my-text", "my-txt_text_document", "my-text_text_docment"):
        assert near_path(wrong, ".idx") == "; did you mean my-text_text_document?"
    assert (
        near_path("other", ".idx")
        == near_path("nothing", ".idx")
        == near_path("none/x", ".idx")
        == ""
    )
    assert near_path(f"{tmp_path}/my-textz") == f"; did you mean {tmp_path}/my-texts?"
    for name in ("run", "datasets"):
        (tmp_path / name).mkdir()
    (tmp_path / "datasets/corpus.jsonl").touch()
    monkeypatch.chdir("run")
    assert near_path("my-texts") == "; did you mean ../my-texts?"
    assert near_path("other", ".idx") == "; did you mean ../other?"
    assert near_path("corpus.jsonl") == "; did you mean ../datasets/corpus.jsonl?"
    # through a link, where the folder above is another one
    (tmp_path / "clone/run").mkdir(parents=True)
    (tmp_path / "link").symlink_to("clone/run")
    monkeypatch.chdir("../link")
    monkeypatch.setenv("PWD", f"{tmp_path}/link")
    assert near_path("corpus.jsonl") == f"; did you mean {tmp_path}/datasets/corpus.jsonl?"


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


def test_a_wrong_input_brings_up_what_is_named_like_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-texts").mkdir()
    assert main("preprocess --input my-text --output-prefix x --tokenizer byte".split()) == 65
    assert "my-text does not exist; did you mean my-texts?" in capsys.readouterr().err
    assert main(["quickstart", "my-text", "--output", "made"]) == 65
    assert "error: my-text does not exist; did you mean my-texts?" in capsys.readouterr().err


def test_auto_names_only_what_was_given(capsys):
    small = "train --mock-data --num-layers 1 --hidden-size 8 --num-attention-heads 1 --train-iters 1 --lr 1"
    words = f"{small} --seq-length 8 --max-position-embeddings 8 --micro-batch-size auto --vocab-size 9".split()
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "auto needs --global-batch-size" in err and "accumulation" not in err
    assert main([*words, "--num-accumulation-steps", "2"]) == 2
    assert "auto contradicts --num-accumulation-steps 2" in capsys.readouterr().err


def test_dry_run_warns_of_a_step_larger_than_the_data(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "just a few words"}\n')
    prefix = str(tmp_path / "a")
    assert (
        main(
            [
                "preprocess",
                "--input",
                f"{prefix}.jsonl",
                "--output-prefix",
                prefix,
                "--tokenizer",
                "byte",
            ]
        )
        == 0
    )
    small = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --train-iters 1 --lr 1 --seq-length 8 --dry-run"
    words = [
        "train",
        *small.split(),
        "--max-position-embeddings",
        "8",
        "--data-path",
        f"{prefix}_text_document",
    ]
    assert (
        main([*words, "--micro-batch-size", "1"]) == 0 and "warning" not in capsys.readouterr().out
    )
    assert main([*words, "--micro-batch-size", "9"]) == 0
    assert "warning: one step reads more than the 16 tokens of the data" in capsys.readouterr().out


def test_a_text_where_another_thing_is_expected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    assert main(["preprocess", "corpus.jsonl", "--output-prefix", "p", "--tokenizer", "byte"]) == 2
    assert "unexpected argument 'corpus.jsonl'; give it to --input" in capsys.readouterr().err
    small = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 1 --train-iters 1 --seq-length 8"
    words = f"train --data-path corpus.jsonl {small} --lr 1 --tokenizer byte --dry-run"
    assert main(words.split()) == 65
    assert (
        "; make token files of it: meshwright preprocess --input corpus.jsonl"
        in capsys.readouterr().err
    )
    words = (
        f"train --mock-data --vocab-size 8 --tensorboard-dir corpus.jsonl {small} --lr 1 --dry-run"
    )
    assert (
        main(words.split()) == 2
        and "--tensorboard-dir corpus.jsonl is a file" in capsys.readouterr().err
    )
