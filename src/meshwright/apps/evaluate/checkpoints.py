"""The checkpoints of `meshwright evaluate`: which ones, and how a loaded one is scored."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.apps.evaluate.perplexity import require_finite, score_documents
from meshwright.apps.evaluate.results import Result
from meshwright.base import console
from meshwright.base.errors import BAD_DATA
from meshwright.base.progress import progress_bar
from meshwright.checkpoint import mirror, steps
from meshwright.config.problem import SettingsError
from meshwright.data.windows import window_spans
from meshwright.training.tasks import PreparedTask, prepare_task

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.generation.language_model import LanguageModel
    from meshwright.parallel.window_losses import Scorer, WindowBatch

Documents = Iterable[tuple[Sequence[int], int]]  # tokens and number of bytes of each


def step_folders(folders: list[str], which: str | None) -> list[str]:
    """Return the folders of the steps that --steps names in each run, or the runs themselves."""
    if which is None:
        return folders
    out = []
    for folder in folders:
        mirror.fetch(folder)
        # Only whole steps are listed, so a run that is still saving can be scored.
        complete = sorted(steps.list_steps(folder))
        wanted = complete if which == "all" else [int(n) for n in which.split(",")]
        if missing := sorted(set(wanted) - set(complete)):
            has = ", ".join(map(str, complete)) or "none"
            raise SettingsError(
                f"{{steps={which}}}: {folder} has no step {missing[0]}; its steps: {has}", BAD_DATA
            )
        if not wanted:
            raise SettingsError(
                f"{{steps}} all: {folder} has no step of a run; leave {{steps}} out", BAD_DATA
            )
        out += [str(steps.step_folder(folder, n)) for n in wanted]
    return out


def shown_scorer(m: LanguageModel, advance: Callable[[int], None]) -> Scorer:
    """Return a model's scorer that says how many windows it has scored.

    One process scores a micro-batch after the other; ranks share out all that they are given.
    """

    def score(batches: list[WindowBatch]) -> Tensor:
        import torch

        parts = [batches] if m.sharded is not None else [[batch] for batch in batches]
        scores = []
        for part in parts:
            scores.append(m.scorer(part))
            advance(sum(len(batch.tokens) for batch in part))
        return torch.cat(scores)

    return score


def score_text(
    m: LanguageModel, folder: str, documents: Documents, count: int, stride: int | None, batch: int
) -> list[Result]:
    """Score `count` documents; `stride` is that of overlapping windows (none: half the length)."""
    length = m.seq_length
    # By half the length, each token beyond the first window has at least that much context.
    stride = min(stride or max(1, length // 2), length)

    # The bar counts documents, but windows are scored: each advances it by its share of a document.
    shares = collections.deque[float]()  # of the windows that are not scored yet, in order

    def cut() -> Documents:
        for ids, size in documents:
            windows = sum(1 for _ in window_spans(len(ids), length, stride))
            for _ in range(windows):
                shares.append(1 / windows)
            yield ids, size

    with progress_bar("scoring", count, "percent") as advance:

        def advance_by(windows: int) -> None:
            advance(sum(shares.popleft() for _ in range(windows)))

        scorer = shown_scorer(m, advance_by)
        s = score_documents(scorer, m.tokenizer.eod, cut(), length, stride, batch)
    values = {
        "documents": s.documents,
        "tokens": s.tokens,
        "bytes": s.bytes,
        "loss": s.loss,
        "perplexity": s.perplexity,
        "bits_per_byte": s.bits_per_byte,
    }
    facts = {"sequence_length": length, "stride": stride}
    return [Result(folder, m.step, "", "bits_per_byte", values, facts, s.by_position)]


class TaskScorer:
    """A scorer of named tasks, which are cut into windows once for models of one run and length."""

    def __init__(
        self,
        files: Mapping[str, str],
        stride: int | None,
        batch: int,
        every: int | None,
        limit: int | None,
    ) -> None:
        self.files = files
        self.stride = stride
        self.batch = batch
        self.every = every
        self.limit = limit
        # By folder and sequence length.
        self.prepared: dict[tuple[str, int], list[PreparedTask[Any]]] = {}

    def score(self, m: LanguageModel, folder: str) -> list[Result]:
        # All steps of a run have one vocabulary, so their windows are the same.
        key = folder, m.seq_length
        if key not in self.prepared:
            tasks = []
            for name, file in self.files.items():
                task = prepare_task(name, file, m.tokenizer, m.seq_length, self.stride, self.limit)
                tasks.append(task)
            self.prepared[key] = tasks
        return [self.score_task(m, folder, task) for task in self.prepared[key]]

    def score_task(self, m: LanguageModel, folder: str, task: PreparedTask[Any]) -> Result:
        began = time.perf_counter()
        with progress_bar(task.name, len(task.windows), "percent") as advance:
            scorer = shown_scorer(m, advance)
            if self.every is not None:
                scorer = log_batches(scorer, self.every)
            values = task.score(scorer, m.seq_length, self.batch)
        assert values is not None
        # The sum is finite only if each measure is.
        require_finite(sum(values.values()))
        console.say(task.line(values))
        facts = task.facts | {"seconds": round(time.perf_counter() - began, 3)}
        return Result(folder, m.step, task.name, task.headline, values, facts)


def log_batches(scorer: Scorer, every: int) -> Scorer:
    """Return the scorer with Megatron's lines about its progress."""
    done = 0

    def score(batches: list[WindowBatch]) -> Tensor:
        nonlocal done
        # Megatron counts batches from 0 over the whole task, so the count goes on between calls.
        for number in range(done, done + len(batches)):
            if number % every == 0:
                console.say(f"> working on iteration: {number}")
        done += len(batches)
        return scorer(batches)

    return score
