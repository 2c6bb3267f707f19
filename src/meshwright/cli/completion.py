"""`meshwright completion SHELL`: print a script that completes commands, flags and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.base.errors import DONE
from meshwright.config import flags
from meshwright.config.fields import MISSING, flag

ABOUT = "Print a script that completes commands, flags, values and files; write it to a file or `eval` it."


@dataclass(frozen=True)
class CompletionConfig:
    """Settings of `meshwright completion`."""

    shell: Literal["bash", "zsh", "fish"] = flag(MISSING, "bash, zsh or fish", positional=True)


def main(argv: list[str]) -> int:
    shell = flags.parse_settings(
        CompletionConfig, argv, "meshwright completion", about=ABOUT
    ).config.shell
    # This module looks at every command, which --help need not wait for.
    from meshwright.config import completion

    print(completion.completion_script(shell))
    return DONE
