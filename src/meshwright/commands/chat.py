"""`meshwright chat DIR`: a dialogue with a model in the terminal."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshwright import console
from meshwright import device as devices
from meshwright.commands import launch
from meshwright.errors import DONE
from meshwright.generation.terminal import accept_any_text
from meshwright.ranks.world import World, is_idle
from meshwright.settings import checks, command, flags
from meshwright.settings.fields import flag
from meshwright.settings.grammar import unescape
from meshwright.settings.schema import READING, ReadConfig, Sampling, TokenizerFlags

if TYPE_CHECKING:
    from meshwright.generation.engine import LanguageModel


@dataclass(frozen=True)
class ChatFlags:
    """The dialogue."""

    system: str | None = flag(None, "words that come before the dialogue", value="WORDS", docs="generation")
    chat_template: str | None = flag(
        None,
        "plain, or a Jinja file or its folder (none: the one beside the tokenizer; without one, plain)",
        value="FORM",
        short="plain, or a Jinja file (none: the tokenizer's)",
        docs="generation",
    )
    stop: list[str] = flag(
        [],
        "end an answer before any of these strings; \\n and \\t stand for characters",
        value="NAME",
        short="strings that end a text",
        docs="generation",
    )
    history: bool = flag(True, "keep the lines that are typed for the next dialogue", docs="generation")


@dataclass(frozen=True)
class ChatConfig(ReadConfig):
    """Settings of `meshwright chat`."""

    chat: ChatFlags = ChatFlags()
    sampling: Sampling = Sampling()

    USES: ClassVar[frozenset[str]] = frozenset(
        {f.name for group in (ChatFlags, Sampling, TokenizerFlags) for f in dataclasses.fields(group)}
        | {*READING, "seed", "deterministic_mode"} - {"micro_batch_size"}
    )

    def problems(self) -> list[str]:
        return checks.reading_problems(self, "chat")


ABOUT = "Talk to a model: each line is answered, and /help lists commands. A base model continues the text."


def main(argv: list[str]) -> int:
    return launch.run_rank(argv, lambda words, world: command_line(argv, words, world))


def command_line(argv: list[str], words: list[str], world: World) -> int:
    parsed = command.settings(ChatConfig, words, "chat", ABOUT, "load", world.rank == 0)
    if parsed is None or is_idle(world, parsed.config.parallel.model_ranks, "the dialogue"):
        return DONE
    c = parsed.config
    if not parsed.dry_run and (status := launch.relaunch(c.parallel, ["chat", *argv])) is not None:
        return status

    # torch is imported only now, so that a mistake in the flags is reported at once.
    from meshwright.generation import engine, ranks, templates

    console.set_stream("stderr")  # stdout is for the dialogue
    assert c.checkpoint.load
    given = flags.given_settings(parsed)
    if parsed.dry_run:
        fit = engine.open_checked(c.checkpoint.load, given, c.tokenizer)
        templates.choose_template(c.chat.chat_template, fit.tokenizer, fit.saved.tokenizer_folder)
        print(f"the flags fit step {fit.source.step} in {fit.source.root}; nothing was loaded")
        return DONE
    if c.precision.deterministic_mode:
        devices.use_deterministic_algorithms()
    with command.explain_out_of_memory("a smaller --seq-length, or --bf16,"):
        return ranks.run_on_ranks(c, given, lambda m: talk(c, m))


def talk(c: ChatConfig, m: LanguageModel) -> None:
    from meshwright.generation import templates
    from meshwright.generation.chat import Chat
    from meshwright.generation.dialogue import Dialogue

    template = templates.choose_template(c.chat.chat_template, m.tokenizer, m.tokenizer_folder)
    accept_any_text()
    dialogue = Dialogue(m.tokenizer, template, m.seq_length, c.chat.system or "")
    Chat(m, dialogue, c.sampling, tuple(map(unescape, c.chat.stop)), c.training.seed).run(c.chat.history)
