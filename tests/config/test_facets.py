"""A flag states all that is known of it: what is forgotten fails here, by its name."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import UserError
from meshwright.config import completion, flags, help
from meshwright.config.fields import (
    PATHS,
    baseline_settings,
    config_fields,
    every_config,
    flag,
    group,
    is_not_yet,
    placeholder,
    spelling,
    text_kind,
)
from meshwright.config.pages import PAGES
from meshwright.config.schema import TrainConfig

TESTS = Path(__file__).parents[1]
EVERY = [
    pkgutil.resolve_name(name) for name in dict.fromkeys(page.config for page in PAGES.values())
]


def every_flag() -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Return CLASS.NAME -> field and type of the flags of all commands."""
    return {
        f"{config.__name__}.{name}": (f, kind)
        for config in EVERY
        for name, (_, f, kind) in config_fields(config).items()
    }


def test_a_flag_of_text_says_what_it_holds() -> None:
    """Else its help would say TEXT of a path, and completion would offer no files."""
    for name, (f, kind) in every_flag().items():
        if text_kind(f, kind) == "FORM":
            assert f.metadata["value"] == "FORM", f"{name} is text: give flag(..., value=...)"
        if name.endswith(("_path", "_dir", "_file")):
            assert placeholder(f, kind).split()[0] in PATHS, name


def test_a_setting_of_training_joins_the_fuzz_or_says_that_it_does_not() -> None:
    drawn = "".join((TESTS / name).read_text() for name in ("fuzz/cases.py", "network_values.py"))
    missing = []
    for name, (_, f, _) in config_fields(TrainConfig).items():
        flag_words = [spelling(name), "--no-" + spelling(name)[2:], *f.metadata["aliases"]]
        # Lengths of a schedule are drawn as --lr-warmup-{unit}, sizes as {name}-size.
        flag_words.append(re.sub("-(iters|samples|tokens)$", "-{unit}", spelling(name)))
        flag_words.append(spelling(name)[2:].removesuffix("-size"))
        is_drawn = any(re.search(re.escape(word) + r"(?![\w-])", drawn) for word in flag_words)
        if "fuzz" in f.metadata["proof"] and not is_not_yet(f) and not is_drawn:
            missing.append(name)
    assert not missing, (
        f"tests/fuzz/cases.py does not draw {missing}: add them, or proof= without fuzz"
    )


def test_a_new_setting_is_copied_by_the_baseline() -> None:
    """What decides the numbers of a step is compared, unless its flag or group says otherwise."""

    @dataclasses.dataclass(frozen=True)
    @group(proof="fuzz")
    class Later:
        other: int = flag(2, "left out by its group")

    @dataclasses.dataclass(frozen=True)
    class Step:
        new: int = flag(1, "copied")
        other: int = flag(2, "left out", proof="")

    assert baseline_settings(Step(new=7)) == {"new": 7} and baseline_settings(Later()) == {}


def test_settings_of_other_commands_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shell or a file may hold settings for several commands: each leaves those of the others."""
    for config in every_config():
        for name, (_, f, _) in config_fields(config).items():
            if f.metadata["value"] == "WORDS" or name in config_fields(TrainConfig):
                continue
            monkeypatch.setenv(f"MESHWRIGHT_{name.upper()}", "1")
    (tmp_path / "c.toml").write_text(
        "top = 5\nthreshold = 0.8\n[conversion]\nno_optimizer = true\n"
    )
    parsed = flags.parse_settings(
        TrainConfig, [f"--config={tmp_path}/c.toml"], "meshwright train", check=False
    )
    assert set(parsed.sources.values()) == {"default"}
    monkeypatch.setenv("MESHWRIGHT_TOPP", "5")
    with pytest.raises(UserError, match="unknown setting 'MESHWRIGHT_TOPP'"):
        flags.parse_settings(TrainConfig, [], "meshwright train", check=False)


def test_paths_are_offered_where_a_path_is_wanted() -> None:
    """By the help and by completion."""
    wanted = {
        ("evaluate", "--harness-path"): "DIR",
        ("train", "--train-weighted-split-paths-path"): "FILE",
        ("bench", "--data"): "PREFIX",
        ("data dedup", "--inputs"): "FILE ...",
    }
    for (command, name), value in wanted.items():
        config = pkgutil.resolve_name(PAGES[command].config)
        entry = next(
            e for e in help.entries(help.Command(config, f"meshwright {command}")) if e.flag == name
        )
        assert entry.value == value and completion.Words.kind(entry) in (
            "dirs",
            "files",
            "prefixes",
        )
