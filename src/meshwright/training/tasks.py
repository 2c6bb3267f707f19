"""The interface of the tasks of --eval-tasks: named measures of a model on a file.

A task is made once and then scored by any model, also during a training. Packages register them in
the group `meshwright.tasks`, each as a function with the arguments of `MakeTask`, under a name of
lower-case letters and hyphens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from meshwright.base import registry

if TYPE_CHECKING:
    from meshwright.data.tokenizers import Tokenizer
    from meshwright.parallel.window_scores import Scorer


class Window(NamedTuple):
    """Inputs and, one place on, their labels; predictions before number `first` do not count."""

    tokens: Sequence[int]
    first: int = 0


class Task(Protocol):
    """A file as windows of tokens.

    Properties:
        name: as in --eval-tasks.
        variant: how exactly it is measured, in words.
        sha256: of the file.
        headline: the measure that says most.
    """

    @property
    def name(self) -> str: ...

    @property
    def file(self) -> str: ...

    @property
    def variant(self) -> str: ...

    @property
    def sha256(self) -> str: ...

    @property
    def windows(self) -> Sequence[Window]: ...

    @property
    def headline(self) -> str: ...

    def score(
        self,
        scorer: Scorer,
        length: int,
        batch: int,
        fixed: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """Return the measures of a model, None if it should stop on the way.

        A micro-batch has `batch` windows of `length` predictions, or more shorter ones. With
        `fixed` each is [batch, length], for a network that runs no other shape.
        """

    def scores(self, values: dict[str, float]) -> dict[str, float]:
        """Return the measures that are drawn, by titles of several tasks."""

    def line(self, values: dict[str, float]) -> str:
        """Return the result in the words of Megatron's log, framed by dashes."""


class MakeTask(Protocol):
    """Read a task's file and cut it into windows of at most `length` predictions.

    `stride` is that of overlapping windows, and `limit` the most passages or documents; None of
    each leaves it to the task.
    """

    def __call__(
        self, path: str, tokenizer: Tokenizer, length: int, stride: int | None = None, limit: int | None = None
    ) -> Task: ...


def make_task(
    name: str, path: str, tokenizer: Tokenizer, length: int, stride: int | None = None, limit: int | None = None
) -> Task:
    """Make the task that is registered under a name, which config.grammar has found there."""
    make: MakeTask = registry.find("tasks", name)
    return make(path, tokenizer, length, stride, limit)
