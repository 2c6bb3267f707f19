"""A folder with a corpus, vocabulary files and tokens, as after the documents' first steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocks import block
from documents import fill, shell


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fill(tmp_path_factory.mktemp("documents"))
    shell(folder, block("oneflow-gpt/preprocess"))
    (folder / "data").mkdir()
    for ending in ("bin", "idx"):
        made = folder / f"gpt_sample_dataset_text_document.{ending}"
        for other in (
            "data/meg-gpt2_text_document",
            "data/my-gpt_text_sentence",
            "my-gpt2_text_document",
        ):
            (folder / f"{other}.{ending}").symlink_to(made)
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        (folder / "data" / name).symlink_to(folder / name)
    return folder
