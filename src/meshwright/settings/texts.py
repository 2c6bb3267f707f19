"""The flags by which `preprocess`, `train-tokenizer` and `evaluate` find their text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshwright.settings.schema import flag, spelling

SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class TextInputs:
    """Text to read."""

    input: list[str] = flag(
        [], "text, also compressed: folders, plain files, HTML, JSON lines, Parquet, archives; - for standard input"
    )
    include: list[str] = flag([], "patterns of the files to read in folders and archives, whatever their suffix")
    exclude: list[str] = flag([], "patterns of files and folders to leave out")
    json_keys: list[str] = flag(["text"], "keys whose text is read from JSON lines and tables", "--json-key")
    document_separator: str = flag(SEPARATOR, "line between the documents of a plain text; '' for a blank line")

    def words(self) -> list[str]:
        """Return these flags as words of a command, without those that have their defaults."""
        out = []
        for field in dataclasses.fields(TextInputs):
            value = getattr(self, field.name)
            if value != getattr(TextInputs(), field.name):
                name = spelling(field.name)  # only after `=` may a value begin with a hyphen
                out += [f"{name}={value}"] if isinstance(value, str) else [name, *value]
        return out

    def input_problems(self) -> list[str]:
        """Return what is wrong with these flags."""
        conditions = {
            "--input is needed: files or folders of text": self.input,
            "--json-keys names no key; give at least one": self.json_keys,
            "--document-separator must be a single line": not set("\r\n") & set(self.document_separator),
        }
        return [message for message, holds in conditions.items() if not holds]
