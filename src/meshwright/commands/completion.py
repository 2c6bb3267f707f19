"""`meshwright completion SHELL`: print a script that completes commands, flags and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.errors import DONE
from meshwright.settings import flags
from meshwright.settings.fields import MISSING, flag

ABOUT = "Print a script that completes commands, flags, values and files; write it to a file or `eval` it."


@dataclass(frozen=True)
class CompletionConfig:
    """Settings of `meshwright completion`."""

    shell: Literal["bash", "zsh", "fish"] = flag(MISSING, "bash, zsh or fish", positional=True)


def main(argv: list[str]) -> int:
    shell = flags.parse_settings(CompletionConfig, argv, "meshwright completion", about=ABOUT).config.shell
    from meshwright.settings import completion

    print(completion.completion_script(shell))
    return DONE
