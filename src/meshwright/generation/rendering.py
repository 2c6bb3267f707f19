"""Render chat templates, in the child process of base/sandbox.py, which `templates.py` asks.

It imports nothing else of ours.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

LONGEST = 16 << 20  # characters of a text that is written


def render(request: dict[str, Any]) -> str:
    """Return what a template writes; without "values" it is only compiled."""
    template = compile_template(request["template"])
    text = str(template.render(**request["values"])) if "values" in request else ""
    if len(text) > LONGEST:
        raise ValueError(f"it writes {len(text):,} characters, more than {LONGEST:,}")
    return text


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
