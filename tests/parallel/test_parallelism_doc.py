"""docs/parallelism.md: pictures and tables match the code, its flags and thresholds are there."""

from __future__ import annotations

import re
import sys

import parallelism as document
import pytest

from meshwright.compat.flags.megatron_flags import OLD_SWITCHES
from meshwright.config import fields
from meshwright.config import schema as config
from meshwright.parallel import overlap

pytestmark = pytest.mark.whole  # pictures


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the last matplotlib for Python 3.10 writes other numbers"
)
@pytest.mark.parametrize("name", ["data", "tensor", "pipeline", "context"])
def test_pictures_match_the_code(name):
    drawn = document.path(name).read_text(encoding="utf-8")
    assert drawn == document.draw(name), "update the pictures: python docs/parallelism.py"
    assert f"]({document.path(name).name})" in document.PAGE.read_text(encoding="utf-8")


def test_every_picture_is_tested():
    assert list(document.PICTURES) == ["data", "tensor", "pipeline", "context"]


def test_tables_match_the_code():
    assert document.PAGE.read_text(encoding="utf-8") == document.page(), (
        "update the tables: python docs/parallelism.py"
    )


def test_flags_exist():
    named = set(re.findall(r"`(--[a-z0-9_-]+)", document.PAGE.read_text(encoding="utf-8")))
    assert len(named) >= 14
    flags = {fields.spelling(name) for name in fields.config_fields(config.TrainConfig)}
    assert named <= flags | {"--dry-run", *map(fields.spelling, OLD_SWITCHES)}


def test_the_threshold_of_overlap_is_the_codes():
    words = f"{overlap.WORTHWHILE_BYTES >> 20} MiB of rows"
    assert overlap.WORTHWHILE_BYTES % 2**20 == 0
    assert f"`auto` needs at least {words} on a rank" in document.PAGE.read_text(encoding="utf-8")
    assert (
        f"from {words}"
        in fields.config_fields(config.TrainConfig)["tp_overlap"][1].metadata["help"]
    )
