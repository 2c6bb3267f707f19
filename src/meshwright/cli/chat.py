"""`meshwright chat DIR`: a dialogue with a model in the terminal."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshwright.cli.reading import ReadingCommand, ReadingTask
from meshwright.config import checks, flags
from meshwright.config.fields import flag
from meshwright.config.grammar import unescape
from meshwright.config.problem import Problem
from meshwright.config.schema import READING, ReadConfig, Sampling, TokenizerFlags
from meshwright.generation.terminal import accept_any_text, replace_surrogates

if TYPE_CHECKING:
    from meshwright.generation.language_model import CheckedModel, LanguageModel


@dataclass(frozen=True)
class ChatFlags:
    """The dialogue."""

    system: str | None = flag(
        None, "words that come before the dialogue", value="WORDS", docs="generation"
    )
    chat_template: str | None = flag(
        None,
        "plain, or a Jinja file or its folder (none: the one beside the tokenizer; without one, plain)",
        value="FORM",
        docs="generation",
    )
    stop: list[str] = flag(
        [],
        "end an answer before any of these strings; \\n and \\t stand for characters",
        value="NAME",
        docs="generation",
    )
    history: bool = flag(
        True, "keep the lines that are typed for the next dialogue", docs="generation"
    )


@dataclass(frozen=True)
class ChatConfig(ReadConfig):
    """Settings of `meshwright chat`."""

    chat: ChatFlags = ChatFlags()
    sampling: Sampling = Sampling()

    USES: ClassVar[frozenset[str]] = frozenset(
        {
            f.name
            for group in (ChatFlags, Sampling, TokenizerFlags)
            for f in dataclasses.fields(group)
        }
        | {*READING, "seed", "deterministic_mode"} - {"micro_batch_size"}
    )

    def problems(self) -> list[Problem]:
        return checks.reading_problems(self, "chat")


ABOUT = "Talk to a model: each line is answered, and /help lists commands. A base model continues the text."


def prepare_chat(parsed: flags.Parsed[ChatConfig], is_rank_0: bool) -> ReadingTask:
    from meshwright.generation.templates import choose_template

    c = parsed.config

    # A dry run finds a mistake in the template, too.
    def check(model: CheckedModel) -> None:
        choose_template(c.chat.chat_template, model.tokenizer, model.saved.tokenizer_folder)

    def work(m: LanguageModel) -> None:
        from meshwright.generation.chat import Chat
        from meshwright.generation.dialogue import Dialogue

        template = choose_template(c.chat.chat_template, m.tokenizer, m.tokenizer_folder)
        # Pasted text may hold bytes that are no character.
        accept_any_text()
        dialogue = Dialogue(
            m.tokenizer, template, m.seq_length, replace_surrogates(c.chat.system or "")
        )
        Chat(m, dialogue, c.sampling, tuple(map(unescape, c.chat.stop)), c.training.seed).run(
            c.chat.history
        )

    # stdout is for the dialogue
    return ReadingTask(work, "a smaller --seq-length, or --bf16,", check=check)


main = ReadingCommand("chat", ChatConfig, ABOUT, "the dialogue", prepare_chat).main
