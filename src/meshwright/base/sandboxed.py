"""The child process of `sandbox.py`: answers each line of JSON by what one function makes of it.

    python -P sandboxed.py FILE FUNCTION MEMORY SECONDS

Beyond MEMORY bytes of addresses an allocation fails. Beyond SECONDS of a processor for one request
the system ends the process. macOS has no limit of memory; there only the time bounds it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def main(path: str, name: str, memory: int, seconds: int) -> None:
    limit_addresses(memory)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    function = load_function(path, name)
    for line in sys.stdin.buffer:
        limit_addresses(memory)
        # The limit counts from the start of the process, and in whole seconds.
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, hard))
        sys.stdout.buffer.write(answer(function, line, memory) + b"\n")
        sys.stdout.buffer.flush()


def limit_addresses(memory: int) -> None:
    """Let requests for memory fail beyond this."""
    with contextlib.suppress(OSError, ValueError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))


def load_function(path: str, name: str) -> Callable[[Any], Any]:
    spec = importlib.util.spec_from_file_location("sandboxed_function", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    function: Callable[[Any], Any] = getattr(module, name)
    return function


def answer(function: Callable[[Any], Any], line: bytes, memory: int) -> bytes:
    """Return {"result": ...} or {"error": ...} as JSON."""
    try:
        return json.dumps({"result": function(json.loads(line))}).encode()
    except MemoryError:
        error = f"it needs more than {memory >> 20} MiB"
    except Exception as raised:  # what anyone wrote fails in any way
        error = str(raised)[:1000]
    return json.dumps({"error": error}).encode()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
