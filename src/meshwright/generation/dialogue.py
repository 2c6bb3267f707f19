"""The turns of a dialogue and the prompt that they make, at most as long as the model reads.

Without a chat template the dialogue is one text that both write: each input begins a new line of
it, and an end of document ends it, so that the next input begins another one.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.errors import UserError, bad_data
from meshwright.base.files import RECORD_LIMIT, read_small, replacing
from meshwright.base.records import lone_surrogate
from meshwright.data.tokenizers import Tokenizer
from meshwright.generation.templates import ChatTemplate
from meshwright.generation.text import gap

USER = "user"
ASSISTANT = "assistant"
SYSTEM = "system"


@dataclass
class ChatTurn:
    """An input of the user, or an answer; `ended` says that it ended with an end of document."""

    role: str
    content: str
    ended: bool = False


@dataclass
class Dialogue:
    """Turns, and how they become a prompt of a model that reads `positions` tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: a text that goes on
    positions: int
    system: str = ""
    turns: list[ChatTurn] = field(default_factory=list)
    # the oldest turns, or tokens of the text, that the last prompt was too short for
    left_out: int = 0

    def add(self, role: str, content: str, ended: bool = False) -> None:
        self.turns.append(ChatTurn(role, content, ended))

    def reset(self) -> None:
        """Forget all turns; what the system says stays."""
        self.turns = []
        self.left_out = 0

    def undo(self) -> str | None:
        """Remove the last input with its answer, and return it; None if there is none."""
        while self.turns and self.turns[-1].role != USER:
            self.turns.pop()
        self.left_out = 0
        return self.turns.pop().content if self.turns else None

    @property
    def is_open(self) -> bool:
        """Whether an empty input makes sense: the text of a plain dialogue can go on."""
        return self.template is None and bool(self.turns) and not self.turns[-1].ended

    @property
    def text(self) -> str:
        """The document of a plain dialogue that the next answer continues."""
        # It begins behind the last turn that ended with an end of document.
        begin = 0
        for n, turn in enumerate(self.turns):
            if turn.ended:
                begin = n + 1
        text = f"{self.system}\n" if self.system else ""
        for n, turn in enumerate(self.turns[begin:]):
            # An answer continues its input's line; an empty input lets the answer go on.
            begins_line = n > 0 and turn.role == USER and turn.content
            text += "\n" if begins_line else gap(self.tokenizer)
            text += turn.content
        return text

    def prompt(self, most: int) -> list[int]:
        """Return the prompt of the next answer, which may have `most` tokens.

        Where there is no room for a quarter of the positions, or for `most`, the oldest turns are
        left out, or the beginning of a plain text.
        """
        room = self.positions - min(most, max(1, self.positions // 4))
        if self.template is None:
            return self.plain_prompt(room)
        # Turns that an earlier prompt left out stay out.
        ids = self.encode_from(self.left_out)
        inputs = [n for n, turn in enumerate(self.turns) if n > self.left_out and turn.role == USER]
        if len(ids) > room and inputs:
            # Later beginnings make shorter prompts: find the first that fits, else take the last.
            at = bisect.bisect_left(
                inputs, True, key=lambda first: len(self.encode_from(first)) <= room
            )
            self.left_out = inputs[min(at, len(inputs) - 1)]
            ids = self.encode_from(self.left_out)
        return ids

    def plain_prompt(self, room: int) -> list[int]:
        """Return the last tokens of a plain dialogue's text, behind what the system says."""
        ids = list(self.tokenizer.encode(self.text))
        self.left_out = max(0, len(ids) - room)
        if not self.left_out:
            return ids
        head = []
        if self.system:
            head = list(self.tokenizer.encode(f"{self.system}\n"))
        # System words that would fill half of the room are left out like other text.
        if len(head) >= room // 2:
            head = []
        begin = self.left_out + len(head)
        return head + ids[begin:]

    def encode_from(self, first: int) -> list[int]:
        """Return the prompt of the turns from this one on, as the template writes them."""
        assert self.template is not None
        return self.template.encode(self.tokenizer, self.messages(first))

    def messages(self, first: int) -> list[dict[str, str]]:
        """Return the turns as chat templates take them, the system's words before them."""
        system = [{"role": SYSTEM, "content": self.system}] if self.system else []
        return [*system, *({"role": t.role, "content": t.content} for t in self.turns[first:])]

    def save(self, path: Path) -> None:
        """Write the dialogue as JSON; another file than a dialogue is not replaced."""
        if path.exists():
            try:
                read_dialogue(path)
            except UserError:
                raise UserError(f"{path} exists and holds no dialogue; name another file") from None
        messages: list[dict[str, object]] = []
        if self.system:
            messages.append({"role": SYSTEM, "content": self.system})
        for turn in self.turns:
            message: dict[str, object] = {"role": turn.role, "content": turn.content}
            # Other programs' readers know no "ended", so it is written only where it matters.
            if turn.ended:
                message["ended"] = True
            messages.append(message)
        text = json.dumps({"messages": messages}, ensure_ascii=False, indent=1) + "\n"
        with replacing(path, typed=True) as file:
            file.write(text.encode())

    def load(self, path: Path) -> None:
        """Replace the turns by a file's: {"messages": [...]}, or the list alone."""
        system, turns = read_dialogue(path)
        self.system = system
        self.turns = turns
        self.left_out = 0


def read_dialogue(path: Path) -> tuple[str, list[ChatTurn]]:
    """Return the system's words and the turns of a file."""
    try:
        content: Any = json.loads(read_small(path, RECORD_LIMIT, pipes=True))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise bad_data(f"{path}: {reason}") from None
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, Sequence):
        messages = [None]  # which is refused below as message 1
    system = ""
    turns: list[ChatTurn] = []
    for number, message in enumerate(messages, 1):
        is_turn = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_turn or message.get("role") not in (SYSTEM, USER, ASSISTANT):
            wanted = 'a list of {"role": "user", "assistant" or "system", "content": TEXT}'
            raise bad_data(f"{path}: message {number} is not a chat message; give {wanted}")
        if half := lone_surrogate(message["content"]):
            raise bad_data(f"{path}: message {number} has {half}, half a character; mend it")
        if message["role"] == SYSTEM:
            system = message["content"]
        else:
            turns.append(ChatTurn(message["role"], message["content"], bool(message.get("ended"))))
    return system, turns
