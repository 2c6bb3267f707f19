"""Token files know their tokenizer: who writes it, who finds it, and what is refused."""

import dataclasses
import json
import shutil
import types
from pathlib import Path

import pytest

from helpers import read_rows
from meshwright.__main__ import main
from meshwright.base.errors import BAD_DATA
from meshwright.config.schema import Data, TrainConfig
from meshwright.config.schema import TokenizerFlags as Flags
from meshwright.data import tokenizers
from meshwright.training.setup import bytes_per_token
from meshwright.training.state.folder import as_continued

TEXTS = ["the theme of the thesis, the other then " * 8, "a hundred and one words in one row " * 8]
SIZES = "--num-layers=1 --hidden-size=16 --num-attention-heads=2 --seq-length=16 --micro-batch-size=2 --lr=1e-3"
TRAIN = [
    *SIZES.split(),
    *"--train-iters=2 --eval-iters=0 --num-workers=0 --device=cpu --no-tensorboard".split(),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Vocabularies `one` and `two` of 266 ids; data `a` and `b` of the first, `c` of the second."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, text in zip(("one", "two"), TEXTS, strict=True):
        tokenizers.train_bpe([text], 266, folder / name)
    for prefix, name in (("a", "one"), ("b", "one"), ("c", "two"), ("bytes", "byte")):
        preprocess(folder, prefix, "--tokenizer", name if name == "byte" else str(folder / name))
    return folder


def preprocess(folder, prefix, *flags):
    assert (
        main(
            [
                "preprocess",
                "--input",
                str(folder / "t.jsonl"),
                "--output-prefix",
                str(folder / prefix),
                *flags,
            ]
        )
        == 0
    )


@pytest.fixture
def train(made, capsys, monkeypatch):
    """Train in the folder of the data; return status, stdout and stderr."""
    monkeypatch.chdir(made)
    monkeypatch.setattr("meshwright.training.run.write_report", lambda folder: None)

    def run(*flags):
        capsys.readouterr()
        return main(["train", *TRAIN, *map(str, flags)]), *capsys.readouterr()

    return run


def test_preprocess_keeps_its_tokenizer_beside_the_data(made):
    folder = made / "a_text_document.tokenizer"
    assert sorted(path.name for path in folder.iterdir()) == [
        "merges.txt",
        "meta.json",
        "vocab.json",
    ]
    assert (folder / "vocab.json").read_bytes() == (made / "one" / "vocab.json").read_bytes()
    assert json.loads((folder / "meta.json").read_text())["vocab_size"] == 266
    assert (
        json.loads((made / "bytes_text_document.tokenizer" / "meta.json").read_text())["type"]
        == "ByteTokenizer"
    )


def test_training_finds_the_tokenizer_beside_the_data(train, made, tmp_path):
    per_split = tmp_path / "split.json"
    per_split.write_text(json.dumps({"train": ["a_text_document"], "valid": ["b_text_document"]}))
    groups = ["train: 1 0:1 a_text_document, 1 0:1 b_text_document"]
    for n, data in enumerate(
        [
            ["--data-path", "a_text_document"],
            "--data-path 0.5 a_text_document 0.5 b_text_document".split(),
            ["--train-data-path", "b_text_document"],
            ["--per-split-data-args-path", per_split],
            ["--train-weighted-split-paths", *groups],
        ]
    ):
        status, out, err = train(*data, "--save", tmp_path / str(n))
        assert status == 0, err
        assert "> building GPT2BPETokenizer tokenizer ..." in out and "(size: 266)" in out
        assert (
            "tokenizer: GPT2BPETokenizer with 266 ids, found in " in err
            and "_text_document.tokenizer" in err
        )
        assert tokenizers.is_same(
            tokenizers.build_tokenizer(Flags(tokenizer="one")), tmp_path / str(n) / "tokenizer"
        )
    status, _, err = train("--data-path", "a_text_document", "--load", tmp_path / "0", "--finetune")
    # the run's own comes first
    assert status == 0 and f"found in {tmp_path / '0' / 'tokenizer'}" in err
    status, out, _ = train("--data-path", "bytes_text_document", "--dry-run")
    assert status == 0 and "tokenizer: ByteTokenizer, 257 ids" in out


def test_a_run_says_how_many_bytes_a_token_has(made, train):
    """Without ends of documents; so that losses of two vocabularies can be compared."""

    def size_of(prefix, *more):
        assert train("--data-path", prefix, "--save", f"sized-{prefix}", *more)[0] == 0
        return read_rows(made / f"sized-{prefix}", "start")[0]["bytes_per_token"]

    encoded = [
        len(tokenizers.build_tokenizer(Flags(tokenizer=str(made / "one"))).encode(text))
        for text in TEXTS
    ]
    assert size_of("a_text_document") == pytest.approx(
        sum(map(len, TEXTS)) / sum(encoded), abs=1e-3
    )
    assert size_of("bytes_text_document") == 1.0


def test_an_id_that_its_vocabulary_lacks_has_no_bytes(made, train):
    """The reader of the batches refuses such an id where it comes, and nobody before it."""
    prefix = str(made / "bytes_text_document")
    config = TrainConfig(data=Data(data_path=[prefix]))
    wrong = types.SimpleNamespace(
        size=98, eod=0, decode_bytes=lambda ids: bytes(ids) if max(ids) < 98 else None
    )
    assert bytes_per_token(config, wrong) == 1.0


def test_another_tokenizer_than_that_of_the_data_is_refused(train, made, tmp_path):
    # All have 266 ids: nothing but the record beside the data can tell.
    old = "--vocab-file two/vocab.json --merge-file two/merges.txt".split()
    for flags in (["--tokenizer", "two"], old, ["--tokenizer-type", "ByteTokenizer"]):
        status, out, err = train(
            "--data-path", "a_text_document", *flags, "--save", tmp_path / "refused"
        )
        assert status == BAD_DATA and " iteration " not in out
        assert (
            "the flags name another tokenizer (" in err
            and "a_text_document.tokenizer: GPT2BPETokenizer" in err
        )
        assert "leave out the tokenizer flags, or remove a_text_document.tokenizer" in err
    for flags in ([], ["--tokenizer", "one"]):
        status, _, err = train("--data-path", "a_text_document", "c_text_document", *flags)
        assert status == BAD_DATA
        assert (
            "different tokenizers, a_text_document.tokenizer (GPT2BPE" in err
            and "c_text_document.tokenizer" in err
        )
    assert train("--data-path", "a_text_document", "--save", tmp_path / "run")[0] == 0
    status, _, err = train(
        "--data-path", "c_text_document", "--load", tmp_path / "run", "--save", tmp_path / "new"
    )
    assert status == BAD_DATA and f"{tmp_path / 'run' / 'tokenizer'} keeps another tokenizer" in err
    # A new run in a folder where one was killed before its first checkpoint takes the data's.
    shutil.rmtree(tmp_path / "run" / "iter_0000002")
    assert train("--data-path", "c_text_document", "--run-dir", tmp_path / "other")[0] == 0


def test_data_without_a_record_and_a_size_alone(train, made, tmp_path):
    for end in (".bin", ".idx"):
        shutil.copy(made / f"a_text_document{end}", tmp_path / f"old{end}")
    assert train("--data-path", tmp_path / "old", "--tokenizer", "two")[0] == 0
    assert "a tokenizer is needed: --tokenizer" in train("--data-path", tmp_path / "old")[2]
    assert (
        "no tokenizer: the vocabulary's size is given, 300"
        in train("--data-path", "a_text_document", "--vocab-size=300")[1]
    )
    assert "(size: 266)" in train("--data-path", "a_text_document", "--vocab-size=266")[1]
    status, _, err = train("--data-path", "a_text_document", "--vocab-size=260")
    assert status == 2 and "--vocab-size 260, but a_text_document.tokenizer/vocab.json" in err


def test_one_vocabulary_in_two_forms_is_the_same(made, tmp_path):
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    library = Library(
        models.BPE.from_file(str(made / "one" / "vocab.json"), str(made / "one" / "merges.txt"))
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    hugging_face = tokenizers.build_tokenizer(Flags(tokenizer=str(tmp_path)))
    assert hugging_face.name == "HuggingFaceTokenizer"
    assert tokenizers.is_same(hugging_face, made / "a_text_document.tokenizer")
    assert not tokenizers.is_same(hugging_face, made / "c_text_document.tokenizer")
    assert not tokenizers.is_same(hugging_face, made / "bytes_text_document.tokenizer")


def test_data_commands_know_the_tokenizer(made, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(made)
    a, b, c = (f"{name}_text_document" for name in "abc")
    assert main(["data", "inspect", a]) == 0
    out = capsys.readouterr().out
    assert (
        "tokenizer: GPT2BPETokenizer, 266 ids, SHA-256 " in out
        and f"in {a}.tokenizer" in out
        and "'Ġthe'" not in out
    )
    assert main(["data", "inspect", a, "--document", "0"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == TEXTS[0]
    assert main(["data", "merge", a, b, "--output-prefix", str(tmp_path / "m")]) == 0
    assert tokenizers.is_same(
        tokenizers.build_tokenizer(Flags(tokenizer="one")), tmp_path / "m.tokenizer"
    )
    assert main(["data", "verify", str(tmp_path / "m"), c]) == 0
    assert main(["data", "merge", a, c, "--output-prefix", str(tmp_path / "n")]) == BAD_DATA
    assert "different tokenizers" in capsys.readouterr().err and not (tmp_path / "n.idx").exists()
    vocab = tmp_path / "m.tokenizer" / "vocab.json"
    vocab.write_bytes(Path("two/vocab.json").read_bytes())
    assert main(["data", "verify", str(tmp_path / "m")]) == BAD_DATA
    assert f"{vocab} is not the file that meta.json beside it describes" in capsys.readouterr().out
    for end in (".bin", ".idx"):
        shutil.copy(f"{b}{end}", tmp_path / f"old{end}")
    assert (
        main(["data", "merge", a, str(tmp_path / "old"), "--output-prefix", str(tmp_path / "o")])
        == 0
    )
    assert "does not say which tokenizer made it" in capsys.readouterr().err
    assert not (tmp_path / "o.tokenizer").exists()


@pytest.mark.parametrize(("name", "kept"), [("org/name", None), ("byte", "byte"), (".", ".")])
def test_config_toml_names_no_hub(name, kept):
    """The run's own copy continues it on a machine without a network."""
    config = dataclasses.replace(TrainConfig(), tokenizer=Flags(tokenizer=name))
    assert as_continued(config).tokenizer.tokenizer == kept
