"""The model that a server answers with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from meshwright.generation.engine import LanguageModel
from meshwright.generation.templates import ChatTemplate


@dataclass(frozen=True)
class ServedModel:
    """A language model under its name, with the template of its dialogues."""

    model: LanguageModel
    name: str
    template: ChatTemplate | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer in a dialogue."""
        return self.template.stop if self.template else ()
