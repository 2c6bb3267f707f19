"""Formats are what is registered: without any, ours and Hugging Face's remain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import error_of
from meshwright.base import registry
from meshwright.base.errors import UNAVAILABLE
from meshwright.checkpoint import formats, steps
from meshwright.checkpoint.convert import ConversionTarget

ZOO = (
    formats.Format(
        "Zoo", reader="zoo:read", files=(r"zoo\.pt",), tracker="zoo.txt", steps=r"zoo\d+"
    ),
)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    formats.all_formats.cache_clear()
    yield
    formats.all_formats.cache_clear()


def register(monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    monkeypatch.setattr(registry, "entries", lambda group: entries)


def test_they_are_tried_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (
        "Megatron Megatron-Core universal DeepSpeed litgpt Hugging Face LiBai OneFlow-GPT nanoGPT"
    )
    assert " ".join(formats.all_formats()) == known
    formats.all_formats.cache_clear()
    register(monkeypatch, zoo=f"{__name__}:ZOO", compat="meshwright.compat.formats.table:FORMATS")
    assert " ".join(formats.all_formats()) == f"{known} Zoo"


def test_another_package_s_steps_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, zoo=f"{__name__}:ZOO")
    (tmp_path / "zoo7").mkdir()
    (tmp_path / "zoo7" / "zoo.pt").touch()
    (tmp_path / "zoo.txt").write_text("zoo7")
    assert steps.find_step(tmp_path)[0] == steps.StepLocation("Zoo", tmp_path / "zoo7", 7, tmp_path)


def test_without_any_the_core_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch)
    assert list(formats.all_formats()) == [formats.HUGGING_FACE]
    assert list(steps.trackers()) == [steps.TRACKER]
    rank = tmp_path / "iter_0000003" / "mp_rank_00"
    rank.mkdir(parents=True)
    assert steps.kind_of_folder(rank.parent) is None
    message = error_of(lambda: ConversionTarget(tmp_path, "torch"), UNAVAILABLE)
    assert "the format torch cannot be written" in message and "choose native" in message
    assert ConversionTarget(tmp_path, "huggingface").to == "huggingface"
