"""The child process that runs chat templates; `templates.py` starts it and reads its answers.

A request is a line of JSON, and so is its answer. The process takes MEMORY bytes, and SECONDS of a
processor for each request: beyond them the system ends it. It imports nothing else of ours.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import resource
import sys
import time
from typing import Any

MEMORY = 512 << 20  # bytes of address space
SECONDS = 4  # of a processor, and up to one more
LONGEST = 16 << 20  # characters of a text that is written


def main() -> None:
    with contextlib.suppress(OSError, ValueError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in sys.stdin.buffer:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + SECONDS, hard))
        sys.stdout.buffer.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return {"text": ...} or {"error": ...}; without "values" the template is only compiled."""
    try:
        template = compile_template(request["template"])
        text = str(template.render(**request["values"])) if "values" in request else ""
        if len(text) > LONGEST:
            raise ValueError(f"it writes {len(text):,} characters, more than {LONGEST:,}")
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MiB"}
    except Exception as error:  # a program of anyone's raises anything
        return {"error": str(error)[:1000]}
    return {"text": text}


@functools.cache
def compile_template(text: str) -> Any:
    """Compile a template with the names that Hugging Face's templates use."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks an answer for training; here its body is just text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> str:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    return environment.from_string(text)


if __name__ == "__main__":
    main()
