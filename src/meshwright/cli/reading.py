"""Run a command that reads a trained model: evaluate, generate, chat, serve."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from meshwright.base import console
from meshwright.base import device as devices
from meshwright.base.errors import DONE
from meshwright.base.storage.addresses import shown
from meshwright.cli import launch
from meshwright.config import command, flags
from meshwright.config.schema import ReadConfig
from meshwright.runtime.ranks.world import World, is_idle

if TYPE_CHECKING:
    from meshwright.generation.language_model import CheckedModel, LanguageModel

C = TypeVar("C", bound=ReadConfig)


@dataclass(frozen=True)
class ReadingTask:
    """What a command does with a model.

    Fields:
        work: called on rank 0 with the model of each folder.
        less: the flags that need less memory.
        stream: where the log goes.
        check: called with the model of a dry run; raises what would go wrong later.
        input: what a dry run has found to read.
        folders: checkpoints in place of --load, one after the other.
        context: around the run, such as a socket that listens before the model is loaded.
        stops: whether `work` ends by itself after Ctrl-C and SIGTERM.
    """

    work: Callable[[LanguageModel], object]
    less: str
    stream: Literal["stdout", "stderr"] | None = "stderr"
    check: Callable[[CheckedModel], object] = lambda model: None
    input: str = ""
    folders: Sequence[str] = ()
    context: AbstractContextManager[object] = field(default_factory=contextlib.nullcontext)
    stops: bool = False


@dataclass(frozen=True)
class ReadingCommand(Generic[C]):
    """A command, its settings, and how it prepares its task from them before torch is imported.

    `prepare` gets the settings and whether this is rank 0, which alone reads and prints. With
    `copies` all ranks take part, else those that one copy of the model needs; `noun` names the work
    for the others.
    """

    name: str
    config: type[C]
    about: str
    noun: str
    prepare: Callable[[flags.Parsed[C], bool], ReadingTask]
    positional: str = "load"
    copies: bool = False

    def main(self, argv: list[str]) -> int:
        return launch.run_rank(argv, lambda words, world: self.run(argv, words, world))

    def run(self, argv: list[str], words: list[str], world: World) -> int:
        is_rank_0 = world.rank == 0
        parsed = command.settings(
            self.config, words, self.name, self.about, self.positional, prints=is_rank_0
        )
        if parsed is None:
            return DONE
        c = parsed.config
        # Ranks beyond those that the model needs have nothing to do.
        if not self.copies and is_idle(world, c.parallel.model_ranks, self.noun):
            return DONE
        if not parsed.dry_run:
            status = launch.relaunch(c.parallel, world, [self.name, *argv])
            if status is not None:
                return status
        task = self.prepare(parsed, is_rank_0)

        # torch is imported only now, so that a mistake in the flags is reported at once.
        from meshwright.generation import language_model, ranks

        console.set_stream(task.stream)
        given = flags.given_settings(parsed)
        folders = task.folders or [c.checkpoint.load or ""]
        # A dry run checks what needs no weights: the flags, the tokenizer, the template.
        if parsed.dry_run:
            for folder in folders:
                model = language_model.open_checked(folder, given, c.tokenizer)
                task.check(model)
                where = shown(str(model.source.root))
                print(
                    f"{task.input}the flags fit step {model.source.step} in {where}; nothing was loaded"
                )
            return DONE
        if c.precision.deterministic_mode:
            devices.use_deterministic_algorithms()
        # The context, such as a socket or the table of all results, closes last.
        with task.context, command.explain_out_of_memory(task.less):
            return ranks.run_on_ranks(
                c, world, given, task.work, copies=self.copies, stops=task.stops, folders=folders
            )
