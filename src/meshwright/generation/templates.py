"""Chat templates: how the turns of a dialogue become one text, as Hugging Face's folders say it.

A template is a program in Jinja from a folder that anyone may have written, so it runs in Jinja's
sandbox, in a child process whose memory and time are bounded, and sees only plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.errors import BAD_DATA, bad_data
from meshwright.base.sandbox import Sandbox
from meshwright.config.problem import SettingsError
from meshwright.data.tokenizers import CHAT_TEMPLATE, Tokenizer
from meshwright.data.vocabularies import CHAT_CONFIG, read_bytes, read_chat_config
from meshwright.generation import rendering

Messages = Sequence[Mapping[str, Any]]  # {"role": "system", "user" or "assistant", "content": text}
PLAIN = "plain"
RENDER = Sandbox(rendering.render, memory=512 << 20, seconds=4)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and the special tokens that it may write."""

    path: Path
    text: str
    tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...

    def __post_init__(self) -> None:
        try:
            RENDER({"template": self.text})
        except ValueError as error:
            cure = "give another file to --chat-template, or plain"
            raise bad_data(f"{self.path} is no chat template: {error}; {cure}") from None

    def render(self, messages: Messages, begin_answer: bool = True) -> str:
        """Return the dialogue as text; `begin_answer` adds what precedes an assistant's answer."""
        values = {**self.tokens, "messages": list(messages), "add_generation_prompt": begin_answer}
        try:
            return str(RENDER({"template": self.text, "values": values}))
        except ValueError as error:
            raise bad_data(
                f"{self.path}: the chat template cannot write these turns: {error}"
            ) from None

    def encode(
        self, tokenizer: Tokenizer, messages: Messages, begin_answer: bool = True
    ) -> list[int]:
        """Return the dialogue as tokens; special tokens of messages are letters."""
        # Or a user could end a turn by typing its token, and speak as the system.
        shielded = [{**m, "content": tokenizer.shield(str(m["content"]))} for m in messages]
        return tokenizer.encode_special(self.render(shielded, begin_answer))

    @property
    def stop(self) -> tuple[str, ...]:
        """The string that ends an answer, beside the tokenizer's end of document."""
        eos = self.tokens.get("eos_token")
        return (eos,) if eos else ()


def find_template(tokenizer: Tokenizer, folder: Path | None) -> ChatTemplate | None:
    """Return the template of a tokenizer folder, or that beside the tokenizer's files, or None."""
    folders = [] if folder is None else [folder]
    folders += [path.parent for path in tokenizer.files.values()]
    for each in dict.fromkeys(folders):
        if template := read_template(each):
            return template
    return None


def choose_template(
    name: str | None, tokenizer: Tokenizer, folder: Path | None
) -> ChatTemplate | None:
    """Return the template of --chat-template: a file or folder; None for `plain`.

    Without a name, it is that of `find_template`.
    """
    if name is None:
        return find_template(tokenizer, folder)
    if name == PLAIN:
        return None
    path = Path(name)
    if path.is_dir():
        if template := read_template(path):
            return template
        raise SettingsError(
            f"{{chat_template={name}}} holds neither {CHAT_TEMPLATE} nor a {CHAT_CONFIG} with a chat_template",
            BAD_DATA,
        )
    run_template = find_template(tokenizer, folder)
    beside = _tokens(read_chat_config(path.parent)) or (run_template.tokens if run_template else {})
    return ChatTemplate(path, read_template_file(path), beside)


def read_template(folder: Path) -> ChatTemplate | None:
    """Return the template of a folder, or None if it has none."""
    config = read_chat_config(folder)
    # A file of its own wins over the older key in the settings.
    if (path := folder / CHAT_TEMPLATE).is_file():
        return ChatTemplate(path, read_template_file(path), _tokens(config))
    text = config.get("chat_template")
    if isinstance(text, list):  # several, by their names
        by_name = {t.get("name"): t.get("template") for t in text if isinstance(t, dict)}
        text = by_name.get("default") or next(iter(by_name.values()), None)
    if not isinstance(text, str) or not text:
        return None
    return ChatTemplate(folder / CHAT_CONFIG, text, _tokens(config))


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json: strings, or objects with a content."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def read_template_file(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise bad_data(f"{path} cannot be read as a chat template: {error}") from None
