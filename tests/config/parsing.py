"""Parse a command line, or return why it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.base.errors import USAGE, UserError
from meshwright.config import flags
from meshwright.config.schema import TrainConfig


def parse(*argv: str, cls: Any = TrainConfig, **more: Any) -> flags.Parsed[Any]:
    return flags.parse_settings(cls, list(argv), "meshwright test", **{"check": False} | more)


def refusal(*argv: str, cls: Any = TrainConfig, check: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        parse(*argv, cls=cls, check=check)
    assert caught.value.status == USAGE
    return str(caught.value)
