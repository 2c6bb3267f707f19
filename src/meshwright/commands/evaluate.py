"""`meshwright evaluate DIR ...`: score models on text, LAMBADA, WikiText or the harness."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from meshwright import console
from meshwright.checkpoint import steps
from meshwright.commands import launch
from meshwright.errors import BAD_DATA, DONE, UserError
from meshwright.ranks.world import World
from meshwright.settings import checks, command, data_paths, flags
from meshwright.settings.fields import flag, spelling
from meshwright.settings.grammar import eval_tasks
from meshwright.settings.schema import READING, Logging, ReadConfig, Sampling, TokenizerFlags
from meshwright.settings.text_inputs import TextInputs

if TYPE_CHECKING:
    from meshwright.evaluation.results import Result
    from meshwright.evaluation.score import Scorer, WindowBatch
    from meshwright.evaluation.tasks import Task
    from meshwright.generation.engine import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Evaluate(TextInputs):
    """What to score, and the form of the results."""

    folders: list[str] = flag(
        [], "checkpoints: folders of runs, or of single steps; the same as --load", value="DIR", word="DIR"
    )
    steps: str | None = flag(
        None, "steps of these runs to score: 1000,2000, or all (none: the newest)", value="FORM", docs="evaluation"
    )
    task: Literal["LAMBADA", "WIKITEXT103"] | None = flag(
        None, "Megatron's evaluation of the file --valid-data", docs="evaluation"
    )
    valid_data: list[str] = flag(
        [], "file of --task: lambada_test.jsonl or wiki.test.tokens", value="FILE", docs="evaluation"
    )
    strict_lambada: bool = flag(False, "LAMBADA counts whole last words, not last tokens", docs="evaluation")
    overlapping_eval: int | None = flag(
        None,
        "tokens by which a window advances (none: half the sequence length; WikiText: 32)",
        bound=">0",
        docs="evaluation",
    )
    harness: str | None = flag(
        None,
        "tasks of lm-evaluation-harness, such as piqa,arc_easy (needs meshwright[eval])",
        value="FORM",
        docs="evaluation",
    )
    harness_path: str | None = flag(
        None, "folder with further task files of the harness", "--include-path", value="DIR", docs="evaluation"
    )
    num_fewshot: int | None = flag(
        None, "examples before each question of the harness (none: the task's own)", bound=">=0", docs="evaluation"
    )
    limit: int | None = flag(
        None, "most questions of each task of the harness (none: all)", bound=">0", docs="evaluation"
    )
    json: bool = flag(False, "print a line of JSON for each result instead of a table", docs="data")
    results_path: str | None = flag(
        None, "also write the results to this file, as a JSON list", value="FILE", docs="evaluation"
    )
    picture: str | None = flag(
        None, "draw the scores over the steps into this .svg, .png or .pdf", value="FILE", docs="data evaluation"
    )


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
        e = self.evaluate
        name = {"LAMBADA": "lambada-strict" if e.strict_lambada else "lambada", "WIKITEXT103": "wikitext"}
        return {name[e.task]: e.valid_data[0]} if e.task else eval_tasks(self.logging.eval_tasks or "")

    def problems(self) -> list[str]:
        e, c = self.evaluate, dataclasses.replace(self.checkpoint, load=next(iter(self.folders), None))
        out = checks.reading_problems(dataclasses.replace(self, checkpoint=c), "evaluate", copies=True)
        others = [n for n in data_paths.path_settings(self.data) if n != "data_path"]
        out += [f"{spelling(n)} is not read by evaluate; name token files with --data-path" for n in others]
        given = {"--input": e.input, "--data-path": self.data.data_path, "--task": e.task, "--harness": e.harness}
        given["--eval-tasks"] = self.logging.eval_tasks
        chosen = [name for name, value in given.items() if value]
        if len(chosen) > 1:
            out.append(f"{' and '.join(chosen)} exclude each other; give one")
        elif not chosen:
            out.append("--input is needed: files or folders of text; or --data-path, --task, --eval-tasks or --harness")
        if len(self.data.data_path) > 1:
            out.append("--data-path takes one prefix here; evaluate each part of a blend by itself")
        if e.task and len(e.valid_data) != 1:
            out.append(f"--task {e.task} reads one file, --valid-data has {len(e.valid_data)}; name the file")
        if e.steps not in (None, "all") and not all(n.strip().isdigit() for n in str(e.steps).split(",")):
            out.append(f"--steps {e.steps} is neither all nor numbers such as 1000,2000")
        if e.picture and not e.picture.endswith((".svg", ".png", ".pdf")):
            out.append(f"--picture {e.picture}: the name must end with .svg, .png or .pdf")
        owners: dict[str, tuple[str, Any]] = dict.fromkeys(_OF_HARNESS, ("--harness", e.harness))
        owners |= {"valid_data": ("--task", e.task), "strict_lambada": ("--task LAMBADA", e.task == "LAMBADA")}
        out += [
            f"{spelling(name)} belongs to {owner}; give that too, or leave it out"
            for name, (owner, is_there) in owners.items()
            if not is_there and getattr(e, name) not in (None, False, [])
        ]
        out += checks.eval_tasks_problems(self.logging)
        return [*out, *(e.input_problems() if e.input else [])]


_OF_HARNESS = ("harness_path", "num_fewshot", "limit")
ABOUT = """Score text with a model. Every token counts, a document's first one too: it follows an end of document.

LAMBADA https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl
  SHA-256 4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226
wiki.test.tokens of WikiText, https://wikitext.smerity.com/wikitext-103-v1.zip
  SHA-256 242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"""


def main(argv: list[str]) -> int:
    return launch.run_rank(argv, lambda words, world: command_line(argv, words, world))


def command_line(argv: list[str], words: list[str], world: World) -> int:
    is_lead = world.rank == 0
    parsed = command.settings(EvaluateConfig, words, "evaluate", ABOUT, "folders", prints=is_lead)
    if parsed is None:
        return DONE
    c, e = parsed.config, parsed.config.evaluate
    if not parsed.dry_run and (status := launch.relaunch(c.parallel, ["evaluate", *argv])) is not None:
        return status
    folders = step_folders(c.folders, e.steps)
    texts = read_input(e) if e.input and is_lead else []

    # torch is imported only now, so that a mistake in the flags is reported at once.
    from meshwright.generation import engine, ranks

    console.set_stream(None if e.json else "stdout")
    given = flags.given_settings(parsed)
    if parsed.dry_run:
        what = f"{len(texts)} documents" if e.input else c.data.data_path[0] if c.data.data_path else "tasks"
        for folder in folders:
            fit = engine.open_checked(folder, given, c.tokenizer)
            print(f"{what}; the flags fit step {fit.source.step} in {fit.source.root}; nothing was loaded")
        return DONE
    batch = int(c.training.micro_batch_size or 8)
    scoring = Scoring(c, folders, texts, parsed.sources["split"] != "default")
    with command.explain_out_of_memory(f"a smaller --micro-batch-size (now {batch}) or --seq-length, or --bf16,"):
        status = ranks.run_on_ranks(c, given, scoring.work, copies=True, folders=folders)
    if is_lead:
        scoring.finish()
    return status


def step_folders(folders: list[str], which: str | None) -> list[str]:
    """Return the folders of the steps that --steps names in each run, or the runs themselves."""
    if which is None:
        return folders
    out = []
    for folder in folders:
        there = sorted(steps.list_steps(folder))
        wanted = there if which == "all" else [int(n) for n in which.split(",")]
        if missing := sorted(set(wanted) - set(there)):
            has = ", ".join(map(str, there)) or "none"
            raise UserError(f"--steps {which}: {folder} has no step {missing[0]}; its steps: {has}", BAD_DATA)
        if not wanted:
            raise UserError(f"--steps all: {folder} has no step of a run; leave --steps out", BAD_DATA)
        out += [str(steps.step_folder(folder, n)) for n in wanted]
    return out


def read_input(e: Evaluate) -> list[str]:
    """Return the documents of --input."""
    from meshwright.data.prepare.inputs import find
    from meshwright.data.prepare.text import read_texts

    found = find(e)
    texts = list(read_texts(e, found))
    if not any(texts):
        reason = f" ({found.passed.line()})" if found.passed else ""
        raise UserError(f"{', '.join(e.input)}: no text to score{reason}", BAD_DATA)
    if found.passed:
        console.notice(found.passed.line())
    return texts


class Scoring:
    """Scores one checkpoint after the other and keeps the results."""

    def __init__(self, config: EvaluateConfig, folders: list[str], texts: list[str], is_divided: bool) -> None:
        self.config, self.texts, self.is_divided = config, texts, is_divided
        self.several, self.waiting = len(folders) > 1, iter(folders)
        self.batch = int(config.training.micro_batch_size or 8)
        self.results: list[Result] = []
        self.tasks: dict[Any, list[Task]] = {}  # (folder, sequence length) -> those made for them

    def work(self, m: LanguageModel) -> None:
        """Score the next folder's model, and print the results unless a table of all follows."""
        from meshwright.evaluation import results

        run = str(steps.split_path(next(self.waiting))[0])
        found = self.score_harness(m, run) if self.config.evaluate.harness else None
        found = found or (self.score_tasks(m, run) if self.config.tasks else [self.score_text(m, run)])
        self.results += found
        for result in found:
            if self.config.evaluate.json:
                print(json.dumps(result.record))
            elif not self.several:
                print(results.list_result(result))

    def finish(self) -> None:
        """Print and write what is of all checkpoints."""
        from meshwright.evaluation import results

        e = self.config.evaluate
        if self.several and not e.json:
            print("\n\n".join(results.tabulate(one) for one in results.by_task(self.results)))
        if e.results_path:
            results.write_results(self.results, e.results_path)
        if e.picture:
            results.draw_results(self.results, e.picture)
        if e.task:
            console.say("done :-)")

    def score_text(self, m: LanguageModel, folder: str) -> Result:
        from meshwright.evaluation.results import Result
        from meshwright.evaluation.score import read_token_files, score_documents, score_texts

        c, length = self.config, m.seq_length
        stride = min(c.evaluate.overlapping_eval or max(1, length // 2), length)
        if c.data.data_path:
            documents = read_token_files(c.data, m.tokenizer, divided=self.is_divided)
            s = score_documents(m.scorer, m.tokenizer.eod, documents, length, stride, self.batch)
        else:
            s = score_texts(m.scorer, m.tokenizer, self.texts, length, stride, self.batch)
        names = "documents tokens bytes loss perplexity bits_per_byte".split()
        facts = {"sequence_length": length, "stride": stride}
        return Result(folder, m.step, "", "bits_per_byte", {name: getattr(s, name) for name in names}, facts)

    def score_tasks(self, m: LanguageModel, folder: str) -> list[Result]:
        from meshwright.evaluation import tasks
        from meshwright.evaluation.results import Result
        from meshwright.evaluation.score import require_finite

        c, out = self.config, []
        key = folder, m.seq_length
        if key not in self.tasks:
            stride = c.evaluate.overlapping_eval
            self.tasks[key] = [
                tasks.make_task(n, file, m.tokenizer, m.seq_length, stride) for n, file in c.tasks.items()
            ]
        for task in self.tasks[key]:
            began, scorer = time.perf_counter(), m.scorer
            if c.evaluate.task:
                scorer = announced(scorer, c.logging.log_interval)
            values = tasks.score_task(task, scorer, m.seq_length, self.batch)
            assert values is not None
            require_finite(sum(values.values()))
            console.say(task.line(values))
            facts: dict[str, Any] = {"variant": task.variant, "file": task.file, "sha256": task.sha256}
            facts["seconds"] = round(time.perf_counter() - began, 3)
            out.append(Result(folder, m.step, task.name, task.headline, values, facts))
        return out

    def score_harness(self, m: LanguageModel, folder: str) -> list[Result]:
        from meshwright.evaluation.results import Result, headline_of
        from meshwright.generation.decoder import complete
        from meshwright.generation.requests import Request

        try:
            from meshwright.evaluation import harness
        except ModuleNotFoundError as error:
            cure = "pip install 'meshwright[eval]'"
            raise UserError(f"--harness needs lm-evaluation-harness, and {error.name} is missing; {cure}") from None

        def write(asked: list[tuple[list[int], Sampling, tuple[str, ...]]]) -> list[str]:
            seed = self.config.training.seed
            # The harness' own backend decodes an answer without its prompt, too.
            requests = [Request(ids, s, seed, n, stop, is_alone=True) for n, (ids, s, stop) in enumerate(asked)]
            return [done.text for done in complete(m, requests, self.batch)]

        e = self.config.evaluate
        assert e.harness
        adapter = harness.Adapter(m, m.scorer, write, self.batch)
        found = harness.run_tasks(adapter, e.harness, e.harness_path, e.num_fewshot, e.limit)
        return [Result(folder, m.step, name, headline_of(values), values, facts) for name, values, facts in found]


def announced(scorer: Scorer, every: int) -> Callable[[list[WindowBatch]], Any]:
    """Return the scorer with Megatron's lines about its progress."""
    done = 0

    def run(batches: list[WindowBatch]) -> Any:
        nonlocal done
        for number in range(done, done + len(batches)):
            if number % every == 0:
                console.say(f"> working on iteration: {number}")
        done += len(batches)
        return scorer(batches)

    return run
