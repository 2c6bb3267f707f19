"""What Python 3.10 lacks of the standard library, under the names that 3.11 has given it.

Nothing else asks for the version. The last torch with wheels for Python 3.10 is 2.14; without
support for it, this file and its imports go.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

if sys.version_info >= (3, 11):
    import tomllib as tomllib
    from enum import StrEnum as StrEnum
    from hashlib import file_digest as file_digest
    from typing import Self as Self
    from typing import Unpack as Unpack

    SAFE_PATH = "-P"  # of the interpreter: no module is found beside the program
    possessive = re.compile  # a pattern whose quantifiers, such as `*+`, never give back
    # Arguments of subprocess.Popen that give the child a process group of its own.
    NEW_GROUP: dict[str, Any] = {"process_group": 0}

    # asyncio takes 50 ms to import, which only a server is to spend.
    def timeout(seconds: float | None) -> asyncio.Timeout:
        """Return a context that cancels its block after so many seconds."""
        import asyncio

        return asyncio.timeout(seconds)

    def timeout_at(when: float | None) -> asyncio.Timeout:
        """Return a context that cancels its block at a time of the loop's clock."""
        import asyncio

        return asyncio.timeout_at(when)
else:
    import enum
    import hashlib
    import os

    from meshwright.base.errors import UNAVAILABLE

    Self = Unpack = Any  # in annotations, which nothing evaluates

    class tomllib:  # noqa: N801
        @staticmethod
        def loads(text):
            try:
                import tomli
            except ModuleNotFoundError:  # in a clone that is not installed
                print(
                    f"meshwright: error: {sys.executable} has no package tomli; pip install tomli",
                    file=sys.stderr,
                )
                raise SystemExit(UNAVAILABLE) from None
            return tomli.loads(text)

    NEW_GROUP = {"preexec_fn": os.setpgrp}
    SAFE_PATH = "-I"  # which also leaves PYTHONPATH and the user's own packages out

    def possessive(pattern, flags):
        """Compile a pattern with plain quantifiers; ours match the same, in more memory."""
        return re.compile(re.sub(r"([*+?])\+", r"\1", pattern), flags)

    class StrEnum(str, enum.Enum):  # noqa: UP042
        def __str__(self):
            return str(self.value)

        __format__ = str.__format__

        @staticmethod
        def _generate_next_value_(name, start, count, last_values):
            return name.lower()

    def file_digest(file, name):
        """Return the hash of a file that is open for reading, from its position on."""
        out = hashlib.new(name)
        while block := file.read(1 << 18):
            out.update(block)
        return out

    class timeout_at:  # noqa: N801
        """Cancel the block at a time of the loop's clock, and raise TimeoutError after it.

        The package async-timeout raises asyncio's error there, which is not the built-in one.
        """

        def __init__(self, when):
            self.when, self.is_expired = when, False

        async def __aenter__(self):
            import asyncio

            self.task = asyncio.current_task()
            self.reschedule(self.when)
            return self

        async def __aexit__(self, kind, error, traceback):
            import asyncio

            self.handle.cancel()
            if self.is_expired and kind is asyncio.CancelledError:
                raise TimeoutError from error

        def reschedule(self, when):
            import asyncio

            if hasattr(self, "handle"):
                self.handle.cancel()
            self.handle = asyncio.get_running_loop().call_at(when, self._expire)

        def _expire(self):
            self.is_expired = True
            self.task.cancel()

    def timeout(seconds):
        import asyncio

        return timeout_at(asyncio.get_running_loop().time() + seconds)
