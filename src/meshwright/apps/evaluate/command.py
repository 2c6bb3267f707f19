"""`meshwright evaluate DIR ...`: score models on text, LAMBADA, WikiText or the harness."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from meshwright.apps.evaluate.checkpoints import Documents, TaskScorer, score_text, step_folders
from meshwright.apps.evaluate.lambada import LAMBADA, STRICT_LAMBADA
from meshwright.apps.evaluate.perplexity import encode_documents, read_token_files
from meshwright.apps.evaluate.results import (
    Result,
    by_task,
    draw_results,
    list_result,
    tabulate,
    write_results,
)
from meshwright.apps.evaluate.wikitext import WIKITEXT
from meshwright.base import console
from meshwright.base.console import fit
from meshwright.base.errors import bad_data
from meshwright.checkpoint import steps
from meshwright.cli.reading import ReadingCommand, ReadingTask
from meshwright.config import checks, data_paths, flags
from meshwright.config.fields import flag, group, with_settings
from meshwright.config.problem import Problem, SettingsError, named, plain, stated
from meshwright.config.schema import READING, Logging, ReadConfig, TokenizerFlags
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text.folders import is_known, suffix_of
from meshwright.training.tasks import find_task

if TYPE_CHECKING:
    from meshwright.generation.language_model import LanguageModel

# A function that scores a model, given the folder of its run.
Measure = Callable[["LanguageModel", str], Iterable[Result]]
# Megatron's tasks by the words that ask for them: --task and the flags that change it.
OF_MEGATRON = {task.megatron: task for task in (LAMBADA, STRICT_LAMBADA, WIKITEXT)}


@dataclass(frozen=True, kw_only=True)
@group(docs="evaluation")
class Evaluate(TextInputs):
    """What to score, and the form of the results."""

    folders: list[str] = flag(
        [],
        "checkpoints: folders of runs, or of single steps; the same as --load",
        value="DIR",
        word="DIR",
        remote=True,
        docs="",
    )
    steps: str | None = flag(
        None, "steps of these runs to score: 1000,2000, or all (none: the newest)", value="FORM"
    )
    task: Literal["LAMBADA", "WIKITEXT103"] | None = flag(
        None, "Megatron's evaluation of the file --valid-data"
    )
    valid_data: list[str] = flag(
        [], "file of --task: lambada_test.jsonl or wiki.test.tokens", value="FILE"
    )
    strict_lambada: bool = flag(False, "LAMBADA counts whole last words, not last tokens")
    overlapping_eval: int | None = flag(
        None,
        f"tokens by which a window advances (none: half the sequence length; WikiText: {WIKITEXT.stride})",
        bound=">0",
    )
    harness: str | None = flag(
        None,
        "tasks of lm-evaluation-harness, such as piqa,arc_easy (needs meshwright[eval])",
        value="FORM",
    )
    harness_path: str | None = flag(
        None, "folder with further task files of the harness", "--include-path", value="DIR"
    )
    num_fewshot: int | None = flag(
        None, "examples before each question of the harness (none: the task's own)", bound=">=0"
    )
    limit: int | None = flag(
        None, "most documents, passages or questions of each task (none: all)", bound=">0"
    )
    json: bool = flag(False, "print a line of JSON for each result instead of a table", docs="data")
    results_path: str | None = flag(
        None, "also write the results to this file, as a JSON list", value="FILE"
    )
    picture: str | None = flag(
        None,
        "draw the scores over the steps into this .svg, .png or .pdf",
        value="FILE",
        docs="data evaluation",
    )

    @property
    def megatron(self) -> str:
        """The words that ask for one of OF_MEGATRON."""
        return f"{self.task}{' --strict-lambada' * self.strict_lambada}"


@dataclass(frozen=True)
class EvaluateConfig(ReadConfig):
    """Settings of `meshwright evaluate`."""

    evaluate: Evaluate = Evaluate()
    logging: Logging = Logging()

    USES: ClassVar[frozenset[str]] = frozenset(
        {f.name for group in (Evaluate, TokenizerFlags) for f in dataclasses.fields(group)}
        | {*READING, "data_path", "split", "split_arithmetic", "eval_tasks", "log_interval"}
    )

    @property
    def folders(self) -> list[str]:
        load = self.checkpoint.load
        return [*([load] if load else []), *(f for f in self.evaluate.folders if f != load)]

    @property
    def tasks(self) -> dict[str, str]:
        """Return the file of each task that is given by name."""
        if self.evaluate.task:
            return {OF_MEGATRON[self.evaluate.megatron].name: self.evaluate.valid_data[0]}
        return dict(self.logging.eval_tasks.tasks) if self.logging.eval_tasks else {}

    def problems(self) -> list[Problem]:
        e = self.evaluate
        # The checks of reading look at --load; the first folder stands for all.
        loading = with_settings(self, load=next(iter(self.folders), None))
        out = checks.reading_problems(loading, "evaluate", copies=True)
        out += self.choice_problems()
        out += self.value_problems()
        out += self.owner_problems()
        out += checks.eval_tasks_problems(self.logging)
        # A task's name is known to be right only if nothing was found so far.
        if e.limit and not out:
            for name in self.tasks:
                if why := find_task(name).no_limit:
                    text = (
                        f"{stated(e, 'limit')}: {why}, so there is nothing to limit; leave it out"
                    )
                    out.append(Problem(("limit",), text))
        return [*out, *(e.input_problems() if e.input else [])]

    def choice_problems(self) -> list[Problem]:
        """Return what is wrong with what is to be scored: it must be one thing."""
        e = self.evaluate
        out = []
        for name in data_paths.path_settings(self.data):
            if name != "data_path":
                text = f"{{{name}}} is not read by evaluate; name token files with {{data_path}}"
                out.append(Problem((name,), text))
        given: dict[str, Any] = {
            "input": e.input,
            "data_path": self.data.data_path,
            "task": e.task,
            "harness": e.harness,
            "eval_tasks": self.logging.eval_tasks,
        }
        chosen = [name for name, value in given.items() if value]
        # A file of text in the place of a checkpoint is a common slip.
        texts = [f for f in self.folders if is_known(suffix_of(f)) and not os.path.isdir(f)]
        if len(chosen) > 1:
            out.append(Problem(tuple(chosen), f"{named(chosen)} cannot be combined; give one"))
        elif texts:
            is_one = len(texts) == 1
            what = f"{' '.join(texts)} {'is a file' if is_one else 'are files'} of text, not a checkpoint"
            cure = f"give {'it' if is_one else 'them'} to {{input}}"
            out.append(Problem(("input",), f"{plain(what)}; {cure}"))
        elif not chosen:
            needed = "{input} is needed: files or folders of text; or {data_path}, {task}, {eval_tasks} or {harness}"
            out.append(Problem(tuple(given), needed, "missing"))
        if len(self.data.data_path) > 1:
            text = "{data_path} takes one prefix here; evaluate each part of a blend by itself"
            out.append(Problem(("data_path",), text))
        return out

    def value_problems(self) -> list[Problem]:
        e = self.evaluate
        out = []
        if e.task and len(e.valid_data) != 1:
            number = len(e.valid_data)
            text = f"{stated(e, 'task')} reads one file, {{valid_data}} has {number}; name the file"
            out.append(Problem(("task", "valid_data"), text))
        if e.steps not in (None, "all"):
            numbers = str(e.steps).split(",")
            if not all(number.strip().isdecimal() for number in numbers):
                text = f"{stated(e, 'steps')} is neither all nor numbers such as 1000,2000"
                out.append(Problem(("steps",), text))
        if e.picture and not e.picture.endswith((".svg", ".png", ".pdf")):
            text = f"{stated(e, 'picture')}: the name must end with .svg, .png or .pdf"
            out.append(Problem(("picture",), text))
        return out

    def owner_problems(self) -> list[Problem]:
        """Return the flags that are given without the one that reads them."""
        e = self.evaluate
        is_megatrons = e.megatron in OF_MEGATRON
        out = []
        for name, owner, is_there in (
            ("harness_path", "{harness}", bool(e.harness)),
            ("num_fewshot", "{harness}", bool(e.harness)),
            ("valid_data", "{task}", bool(e.task)),
            ("strict_lambada", "{task=LAMBADA}", is_megatrons),
        ):
            if not is_there and getattr(e, name) not in (None, False, []):
                text = f"{{{name}}} belongs to {owner}; give that too, or leave it out"
                out.append(Problem((name,), text))
        return out


ABOUT = f"""Score text with a model. Every token counts, a document's first one too: it follows an end of document.

{LAMBADA.source}
{WIKITEXT.source}"""


def prepare_evaluate(parsed: flags.Parsed[EvaluateConfig], is_rank_0: bool) -> ReadingTask:
    c = parsed.config
    e = c.evaluate
    folders = step_folders(c.folders, e.steps)
    # Rank 0 alone reads text; the others score what it hands out.
    texts = read_input(e) if e.input and is_rank_0 else []
    batch = int(c.training.micro_batch_size or 8)
    # Token files are scored whole, unless --split is given.
    is_divided = parsed.sources["split"] != "default"
    scoring = Scoring(e, folders, choose_measure(c, texts, is_divided, batch))
    what = "tasks"
    if e.input:
        what = f"{len(texts)} documents"
    elif c.data.data_path:
        what = c.data.data_path[0]
    return ReadingTask(
        scoring.work,
        f"a smaller --micro-batch-size (now {batch}) or --seq-length, or --bf16,",
        None if e.json else "stdout",
        input=f"{what}; ",
        folders=folders,
        context=scoring.reported() if is_rank_0 else contextlib.nullcontext(),
    )


def read_input(e: Evaluate) -> list[str]:
    from meshwright.data.text.inputs import find_inputs
    from meshwright.data.text.reading import read_texts, why_nothing

    inputs = find_inputs(e)
    texts = list(itertools.islice(read_texts(e, inputs), e.limit))
    if not any(texts):
        reason = "".join(f" ({line})" for line in why_nothing(inputs, e))
        raise bad_data(f"{', '.join(e.input)}: no text to score{reason}")
    for line in inputs.left_out(e.on_error, e.encoding):
        console.notice(line)
    return texts


def choose_measure(c: EvaluateConfig, texts: list[str], is_divided: bool, batch: int) -> Measure:
    """Return the function that scores a model, with the folder of its run, as the flags ask."""
    e = c.evaluate
    stride = e.overlapping_eval
    if e.harness:
        try:
            from meshwright.apps.evaluate.harness import score_harness
        except ModuleNotFoundError as error:
            cure = "pip install 'meshwright[eval]'"
            raise SettingsError(
                f"{{harness}} needs lm-evaluation-harness, and {error.name} is missing; {cure}"
            ) from None
        return functools.partial(
            score_harness,
            names=e.harness,
            path=e.harness_path,
            fewshot=e.num_fewshot,
            limit=e.limit,
            seed=c.training.seed,
            batch=batch,
        )
    if c.tasks:
        # Megatron's lines about its progress go with Megatron's flag.
        every = c.logging.log_interval if e.task else None
        return TaskScorer(c.tasks, stride, batch, every, e.limit).score

    def measure(m: LanguageModel, run: str) -> Iterable[Result]:
        documents: Documents
        if c.data.data_path:
            documents, count = read_token_files(c.data, m.tokenizer, is_divided, e.limit)
        else:
            documents = encode_documents(m.tokenizer, texts)
            count = len(texts)
        return score_text(m, run, documents, count, stride, batch)

    return measure


class Scoring:
    """The scoring of one checkpoint after the other, with the results so far."""

    def __init__(self, e: Evaluate, folders: list[str], measure: Measure) -> None:
        self.flags = e
        self.measure = measure
        self.several = len(folders) > 1
        self.waiting = iter(folders)  # in the order in which their models are loaded
        self.results: list[Result] = []

    def work(self, m: LanguageModel) -> None:
        """Score the next folder's model, and print the results unless a table of all follows."""
        # Models come in the order of the folders, one at a time.
        run = str(steps.split_path(next(self.waiting))[0])
        results = [*self.measure(m, run)]
        if not results:
            raise bad_data(f"{run}: nothing was measured; name other tasks")
        for result in results:
            self.results.append(result)
            if self.flags.json:
                print(json.dumps(result.record))
            elif not self.several:
                print(fit(list_result(result)))

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Print and write the results of all checkpoints at the end of the block."""
        yield
        e = self.flags
        # A table compares checkpoints; each has been printed if there is one, or as JSON.
        if self.several and not e.json:
            print("\n\n".join(tabulate(results) for results in by_task(self.results)))
        if e.results_path:
            write_results(self.results, e.results_path)
        if e.picture:
            draw_results(self.results, e.picture)
        if e.task:
            console.say("done :-)")


main = ReadingCommand(
    "evaluate", EvaluateConfig, ABOUT, "scoring", prepare_evaluate, "folders", copies=True
).main
