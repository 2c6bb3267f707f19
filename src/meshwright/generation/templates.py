"""Chat templates: how the turns of a dialogue become one text, as Hugging Face's folders say it.

A template is a program in Jinja from a folder that anyone may have written, so it runs in Jinja's
sandbox and sees only plain values.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright import tokenizers
from meshwright.errors import bad_data
from meshwright.tokenizers import CHAT_TEMPLATE, Tokenizer
from meshwright.vocabularies import CHAT_CONFIG, read_chat_config

Messages = Sequence[Mapping[str, Any]]  # {"role": "system", "user" or "assistant", "content": text}
PLAIN = "plain"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and the special tokens that it may write."""

    path: Path
    text: str
    tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...

    def __post_init__(self) -> None:
        try:
            _compile(self.text)
        except Exception as error:  # a program of anyone's raises anything
            cure = "give another file to --chat-template, or plain"
            raise bad_data(f"{self.path} is no chat template: {error}; {cure}") from None

    def render(self, messages: Messages, begin_answer: bool = True) -> str:
        """Return the dialogue as text; `begin_answer` adds what precedes an assistant's answer."""
        plain = json.loads(json.dumps(list(messages)))  # nothing with methods of its own
        try:
            return str(_compile(self.text).render(messages=plain, add_generation_prompt=begin_answer, **self.tokens))
        except Exception as error:
            raise bad_data(f"{self.path}: the chat template cannot write these turns: {error}") from None

    def encode(self, tokenizer: Tokenizer, messages: Messages, begin_answer: bool = True) -> list[int]:
        """Return the dialogue as tokens; special tokens in it are themselves."""
        return tokenizers.encode_special(tokenizer, self.render(messages, begin_answer))

    @property
    def stop(self) -> tuple[str, ...]:
        """The string that ends an answer, beside the tokenizer's end of document."""
        return tuple(filter(None, [self.tokens.get("eos_token")]))


def find_template(tokenizer: Tokenizer, folder: Path | None) -> ChatTemplate | None:
    """Return the template of a tokenizer folder, or that beside the tokenizer's files, or None."""
    beside = [path.parent for path in tokenizer.files.values()]
    for folder_ in dict.fromkeys([*([folder] if folder else []), *beside]):
        if found := read_template(folder_):
            return found
    return None


def choose_template(name: str | None, tokenizer: Tokenizer, folder: Path | None) -> ChatTemplate | None:
    """Return the template of --chat-template: a file or folder; None for `plain`.

    Without a name, it is the one that `find` finds.
    """
    if name is None:
        return find_template(tokenizer, folder)
    if name == PLAIN:
        return None
    path = Path(name)
    if path.is_dir():
        if found := read_template(path):
            return found
        raise bad_data(f"--chat-template {name} holds neither {CHAT_TEMPLATE} nor a {CHAT_CONFIG} with a chat_template")
    run_template = find_template(tokenizer, folder)
    beside = _tokens(read_chat_config(path.parent)) or (run_template.tokens if run_template else {})
    return ChatTemplate(path, read_template_file(path), beside)


def read_template(folder: Path) -> ChatTemplate | None:
    """Return the template of a folder, or None if it has none."""
    config = read_chat_config(folder)
    if (path := folder / CHAT_TEMPLATE).is_file():
        return ChatTemplate(path, read_template_file(path), _tokens(config))
    text = config.get("chat_template")
    if isinstance(text, list):  # several, by their names
        by_name = {t.get("name"): t.get("template") for t in text if isinstance(t, dict)}
        text = by_name.get("default") or next(iter(by_name.values()), None)
    return ChatTemplate(folder / CHAT_CONFIG, text, _tokens(config)) if isinstance(text, str) and text else None


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json: strings, or objects with a content."""
    contents = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def read_template_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad_data(f"{path} cannot be read as a chat template: {error}") from None


@functools.cache
def _compile(text: str) -> Any:
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

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False} | options)

    def now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    return environment.from_string(text)
