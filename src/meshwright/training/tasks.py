"""Evaluation tasks: all that is known of one is one record, which docs/adding-a-task.md explains.

A record says how a file is read, how its documents become windows of tokens, how the losses of
these become measures, and which of the measures every view of a run shows. Packages register their
records in the group `meshwright.tasks`, each under the record's own name. A task is prepared once,
with a file and a tokenizer, and then scored by any model, also during a training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from meshwright.base import registry
from meshwright.base.console import say
from meshwright.base.errors import UserError, bad_data
from meshwright.base.files import sha256
from meshwright.data.windows import Window

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.data.tokenizers import Tokenizer
    from meshwright.parallel.window_losses import Scorer

D = TypeVar("D")  # a document of a task, in a form of its own


@dataclass(frozen=True)
class Metric:
    """A measure that has a column in every view.

    Fields:
        name: that of the measure, with underscores.
        unit: that of its values, in words.
        better: which values are better.
    """

    name: str
    unit: str
    better: Literal["higher", "lower"]

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    @property
    def note(self) -> str:
        return f"{self.unit}, {self.better} is better"


@dataclass(frozen=True)
class TaskFile:
    """The file of a task, and the sizes of the windows that its documents are cut into.

    Fields:
        sha256: empty for a folder.
        length: the most predictions of a window.
        stride: by how many predictions overlapping windows advance, at most `length`.
    """

    path: str
    sha256: str
    length: int
    stride: int


@dataclass(frozen=True)
class Scored(Generic[D]):
    """The documents of a task with what a model made of them.

    Fields:
        windows: of each document, in order.
        values: [windows of all documents, 2] float64: `nats` and `hits`.
    """

    documents: Sequence[D]
    windows: Sequence[Sequence[Window]]
    values: Tensor

    @property
    def nats(self) -> Tensor:
        """The loss of each window, summed over its predictions that count."""
        return self.values[:, 0]

    @property
    def hits(self) -> Tensor:
        """How many of each window's counted predictions have the label as the likeliest token."""
        return self.values[:, 1]

    @property
    def counted(self) -> Tensor:
        """How many predictions of each window count."""
        return self.values.new_tensor([w.counted for windows in self.windows for w in windows])

    def by_document(self, column: Tensor) -> Sequence[Tensor]:
        """Divide a column, such as `nats`, into one for each document."""
        import torch

        return torch.split(column, [len(windows) for windows in self.windows])


@dataclass(frozen=True)
class Task(Generic[D]):
    """What is known of an evaluation task.

    Fields:
        name: in --eval-tasks and in front of its columns; lower-case letters and hyphens.
        title: in the framed line of Megatron's log.
        metrics: its columns; the first says most.
        read: the documents of a file.
        cut: the windows of a document, of at most `file.length` predictions each.
        measure: the measures by name, in the order in which results list them; all of `metrics`
            are among them.
        describe: exactly how it is measured, in words; this is the `variant` in results.
        words: the measures in the words of Megatron's log (none: each with its name).
        stride: by which overlapping windows advance if nothing says otherwise (none: half a
            window).
        takes_folders: whether the file may be a folder.
        no_limit: why --limit has nothing to limit, if the file is one document.
        dataset: its name in Megatron's lines about the reading of the file; none without it.
        megatron: the value of Megatron's --task that asks for it, with further flags.
        source: where its file comes from; `evaluate --help` says so.
    """

    name: str
    title: str
    metrics: tuple[Metric, ...]
    read: Callable[[str], Iterable[D]]
    cut: Callable[[D, Tokenizer, TaskFile], Sequence[Window]]
    measure: Callable[[Scored[D]], dict[str, float]]
    describe: Callable[[TaskFile], str]
    words: Callable[[dict[str, float]], str] | None = None
    stride: int | None = None
    takes_folders: bool = False
    no_limit: str = ""
    dataset: str = ""
    megatron: str = ""
    source: str = ""

    def column(self, metric: Metric) -> str:
        """Return the name of a column among those of several tasks."""
        return f"{self.name} {metric.title}"


@dataclass(frozen=True)
class PreparedTask(Generic[D]):
    """A task with its file, read and cut into windows."""

    task: Task[D]
    file: TaskFile
    variant: str
    documents: Sequence[D]
    windows_by_document: Sequence[Sequence[Window]]

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def headline(self) -> str:
        """The measure that says most."""
        return self.task.metrics[0].name

    @property
    def windows(self) -> list[Window]:
        return [window for windows in self.windows_by_document for window in windows]

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that, with the model and the task's name, identify a measurement."""
        return {"variant": self.variant, "file": self.file.path, "sha256": self.file.sha256}

    def score(
        self,
        scorer: Scorer,
        length: int,
        batch: int,
        fixed: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """Return the measures of a model, or None if it had to stop on the way.

        A micro-batch has `batch` windows of `length` predictions, or more shorter ones. With
        `fixed` each is [batch, length], for a network that runs no other shape.
        """
        import torch

        from meshwright.parallel.window_losses import score_windows

        parts = []
        for values in score_windows(scorer, self.windows, length, batch, fixed):
            if should_stop():
                return None
            parts.append(values)
        return self.task.measure(Scored(self.documents, self.windows_by_document, torch.cat(parts)))

    def columns(self, values: dict[str, float]) -> dict[str, float]:
        """Return the measures that have a column, by its name."""
        return {self.task.column(metric): values[metric.name] for metric in self.task.metrics}

    def line(self, values: dict[str, float]) -> str:
        """Return the result in the words of Megatron's log, framed by dashes."""
        words = (self.task.words or list_measures)(values)
        text = f" validation results on {self.task.title} | {words}"
        frame = "-" * (len(text) + 1)
        return f"{frame}\n{text}\n{frame}"


def list_measures(values: dict[str, float]) -> str:
    return " | ".join(f"{name.replace('_', ' ')}: {value:,.6g}" for name, value in values.items())


def find_task(name: str) -> Task[Any]:
    """Return the record that is registered under a name."""
    task = registry.find("tasks", name)
    if task is None:
        raise UserError(f"there is no task {name}; install the package that has it")
    if not isinstance(task, Task) or task.name != name:
        what = f"{name} in the group {registry.PREFIX}tasks is no record of a task of this name"
        raise UserError(f"{what}; mend the package that registers it (docs/adding-a-task.md)")
    return task


def describe_column(column: str) -> str:
    """Return a column's unit and which values are better; "" if no installed task has it."""
    name, _, title = column.partition(" ")
    try:
        metrics = find_task(name).metrics
    except UserError:
        return ""
    return next((metric.note for metric in metrics if metric.title == title), "")


def prepare_task(
    name: str,
    path: str,
    tokenizer: Tokenizer,
    length: int,
    stride: int | None = None,
    limit: int | None = None,
) -> PreparedTask[Any]:
    """Read the file of a task and cut it into windows of at most `length` predictions.

    `stride` is that of overlapping windows (None: the task's own), `limit` the most documents.
    """
    task = find_task(name)
    is_file = Path(path).is_file()
    if not is_file and not task.takes_folders:
        raise bad_data(f"{name}={path}: no such file")
    digest = sha256(path) if is_file else ""
    advance = stride or task.stride or max(1, length // 2)
    file = TaskFile(path, digest, length, min(advance, length))

    # Read the documents.
    if task.dataset:
        say(f"> building {task.dataset} dataset from {path} ...")
    documents = list(itertools.islice(task.read(path), limit))
    if task.dataset:
        say(f" > found {len(documents)} samples.")

    # Cut them into windows.
    windows = [list(task.cut(document, tokenizer, file)) for document in documents]
    if not any(windows):
        raise bad_data(f"{name}={path}: there is nothing to score; name another file")
    limited = f"; at most the first {limit:,}" if limit else ""
    return PreparedTask(task, file, task.describe(file) + limited, documents, windows)
