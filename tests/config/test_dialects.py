"""Dialects are what is registered: without any, flags and files are ours alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import error_of
from meshwright.base import hints, registry
from meshwright.base.errors import UNAVAILABLE, USAGE
from meshwright.config import argv, dialects, flags
from meshwright.config.dialects import Dialect
from meshwright.config.fields import with_settings
from meshwright.config.schema import TrainConfig

OF_ZOO = Dialect(
    equal={"--zoo-sgd": ("optimizer", "sgd")},
    old_switches={"zoo_bf16": ("bf16", True)},
    two_in_one={"--zoo-dropout": ("hidden_dropout", "attention_dropout", "0.25")},
    unset={"num_experts": 2},
    other_values={"ckpt_format": {"cage": ("torch", "both have bars")}},
    no_effect={"--zoo-cages": (1, "there are none")},
    answer=lambda flag, given: f"{given} is for animals" if flag.startswith("--animal") else None,
    suffix=".zoo",
    read=lambda path: {"lr": path.read_text()},
    arguments=lambda config, idle, backend: {"lr": config.optimizer.lr, "backend": backend, **idle},
)
CACHES = (
    dialects.dialects,
    dialects.equal,
    dialects.old_switches,
    dialects.two_in_one,
    dialects.unset,
    dialects.other_values,
    dialects.no_effect,
    argv.syntax_of,
)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def use(**entries: str) -> None:
        monkeypatch.setattr(registry, "entries", lambda group: entries)
        for cache in CACHES:
            cache.cache_clear()

    yield use
    for cache in CACHES:
        cache.cache_clear()


def parse(*argv: str) -> flags.Parsed[TrainConfig]:
    return flags.parse_settings(TrainConfig, list(argv), "meshwright train", check=False)


def test_another_package_s_dialect(register, tmp_path: Path) -> None:
    register(zoo=f"{__name__}:OF_ZOO")
    (tmp_path / "s.zoo").write_text("0.5")
    words = ["--zoo-sgd", "--zoo-bf16", "--zoo-cages", "3", "--config", str(tmp_path / "s.zoo")]
    words += ["--zoo-dropout", "0.5", "--num-experts", "2", "--ckpt-format", "cage"]
    parsed = parse(*words)
    config = parsed.config
    assert (config.optimizer.optimizer, config.precision.bf16, config.optimizer.lr) == (
        "sgd",
        True,
        0.5,
    )
    model = config.model
    assert (model.hidden_dropout, model.attention_dropout, model.num_experts) == (0.5, 0.25, None)
    given = parse("--attention-dropout", "0", "--zoo-dropout", "0.5").config.model
    assert given.attention_dropout == 0
    assert "--zoo-cages is accepted and has no effect: there are none" in parsed.notices
    assert config.checkpoint.ckpt_format == "torch"
    assert "--ckpt-format cage is torch here: both have bars" in parsed.notices
    assert "--animal-food is for animals" in error_of(lambda: parse("--animal-food", "hay"), USAGE)
    shown = dialects.shown_arguments(config, parsed.ignored, "gloo")
    assert shown == {"lr": 0.5, "backend": "gloo", "zoo_bf16": True, "zoo_cages": "3"}


def test_without_any_flags_are_ours_alone(register, tmp_path: Path) -> None:
    register()
    assert parse("--lr", "0.5").config.optimizer.lr == 0.5
    assert "unknown flag --use-flash-attn" in error_of(lambda: parse("--use-flash-attn"), USAGE)
    (tmp_path / "s.py").write_text("lr = 0.5")
    message = error_of(lambda: parse("--config", str(tmp_path / "s.py")), UNAVAILABLE)
    assert "s.py: Python files cannot be read" in message
    config = with_settings(TrainConfig(), deepspeed_config="ds.json")
    message = error_of(lambda: dialects.fill_from_file(config, ()), UNAVAILABLE)
    assert "--deepspeed_config ds.json cannot be read" in message
    shown = dialects.shown_arguments(config, {"zoo_cages": "3"}, "gloo")
    assert shown["deepspeed_config"] == "ds.json" and shown["zoo_cages"] == "3"


def test_without_other_programs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise FileNotFoundError(name)

    hints._other_words.cache_clear()
    monkeypatch.setattr(hints, "read_table", missing)
    assert hints.our_word("flags", "epochs", {"train_epochs"}) == ""
    hints._other_words.cache_clear()
