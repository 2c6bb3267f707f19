"""docs/adding-a-setting.md quotes the files as they are, and explains each keyword of a flag."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.__main__ import main
from meshwright.config.fields import FlagSpec, config_fields
from meshwright.config.schema import TrainConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-setting.md").read_text()


def test_the_quoted_lines_stand_in_the_files() -> None:
    quotes = re.findall(r"^`(\S+)`\n\n```python\n(.*?)```", PAGE, re.S | re.M)
    assert len(quotes) == PAGE.count("```python") >= 5
    for path, text in quotes:
        assert text in (ROOT / path).read_text(), f"{path} has no longer: {text}"


def test_every_keyword_of_a_flag_is_explained() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.M)
    explained = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(explained) == sorted(FlagSpec.__annotations__)


def test_files_and_commands_exist(capsys) -> None:
    for path in set(
        re.findall(r"`((?:settings|model|parallel|checkpoint|training)/[\w/.]*)`", PAGE)
    ):
        assert (ROOT / "src" / "meshwright" / path).exists(), path
    for path in set(re.findall(r"`((?:tests|src|docs)/[\w/.-]*)`", PAGE)):
        assert (ROOT / path).exists(), path
    [words] = re.findall(r"`meshwright (verify-layout [^`]*)`", PAGE)
    assert main([*words.split(), "--world-size=2", "--print-config"]) == 0
    assert re.search(r"^qk_layernorm = true", capsys.readouterr().out, re.M)
    assert "qk_layernorm" in config_fields(TrainConfig)
