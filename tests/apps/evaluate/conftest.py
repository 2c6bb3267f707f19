"""A small trained model with a BPE vocabulary, also exported for transformers; files to score."""

import json

import pytest

from helpers import train_on_texts
from meshwright.__main__ import main
from meshwright.data.tokenizers import train_bpe

WORDS = "the cat sat on the mat while a small dog ran around the old house and then slept near the warm fire".split()
TEXT = " ".join(WORDS[i * 7 % len(WORDS)] for i in range(90)) + "."
LENGTH = 32


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run with steps 10 and 20."""
    folder = tmp_path_factory.mktemp("trained")
    train_bpe([TEXT] * 3, 300, folder)
    vocabulary = [f"--vocab-file={folder}/vocab.json", f"--merge-file={folder}/merges.txt"]
    sizes = (
        f"--num-layers=2 --hidden-size=32 --num-attention-heads=4 --seq-length={LENGTH} --lr=1e-2"
    )
    more = f"--max-position-embeddings={LENGTH} --micro-batch-size=8 --train-iters=20 --save-interval=10"
    return train_on_texts(folder, [TEXT] * 30, vocabulary, [*sizes.split(), *more.split()])


@pytest.fixture(scope="session")
def exported(trained):
    """The same model for Hugging Face's libraries."""
    folder = trained.parent / "exported"
    assert main(["convert", str(trained), str(folder), "--to", "huggingface"]) == 0
    return folder


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Small files in the formats of the real sets."""
    folder = tmp_path_factory.mktemp("files")
    words = TEXT.split()
    examples = [
        " ".join(words[i : i + n])
        for i, n in ((0, 9), (11, 5), (3, 30), (20, 60), (40, 2), (7, 12))
    ]
    (folder / "lambada_test.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in examples)
    )
    article = " \n = The Cat = \n \n {} , and the cat 's dog @-@ house ( old ) sat . \n \n = = Fire = = \n \n {} ; \n"
    (folder / "wiki.test.tokens").write_text(article.format(TEXT[:200], TEXT[100:500]))
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in (TEXT, TEXT[:50], "a cat"))
    )
    return folder
