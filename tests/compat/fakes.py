"""Stand-ins for programs that download and install, first in PATH: nothing leaves the machine."""

from __future__ import annotations

from pathlib import Path

import warm

RECORD = """#!/bin/sh
printf '%s\\n' "${0##*/} $*" >> "$FAKES/calls"
"""
# Both deliver what lies in FILES under the name that the address ends with.
WGET = """
for word; do case $word in http*) cp "$FILES/${word##*/}" . || exit 8;; esac; done
"""
GIT = """
[ "$1" = clone ] || exit 0
for word; do case $word in http*) name=${word##*/}; name=${name%.git};; esac; done
if [ -e "$FILES/$name" ]; then cp -RP "$FILES/$name" .; else mkdir "$name"; fi
"""
PYTHON = """
[ "$1 $2" != "-m pip" ] || exit 0
exec PROGRAM "$@"
"""


def put_first(folder: Path, files: Path, **more: str) -> str:
    """Write wget, git, pip and python's pip into a folder, and `more` scripts; return a shell line.

    That line puts them first in PATH; `folder`/calls will have a line for each call.
    """
    folder.mkdir()
    python = PYTHON.replace("PROGRAM", warm.python())
    scripts = {
        "wget": WGET,
        "git": GIT,
        "pip": "",
        "pip3": "",
        "python": python,
        "python3": python,
        **more,
    }
    for name, script in scripts.items():
        (folder / name).write_text(RECORD + script)
        (folder / name).chmod(0o755)
    return f"export FAKES={folder} FILES={files} PATH={folder}:$PATH\n"
