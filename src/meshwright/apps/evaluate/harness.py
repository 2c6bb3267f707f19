"""lm-evaluation-harness on a loaded model: its tasks ask for log-likelihoods and continuations.

Only this file imports the harness, the extra `eval`. Its results depend on it and on its data; what
is computed here equals its own `hf` backend on the exported model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from meshwright.apps.evaluate.checkpoints import shown_scorer
from meshwright.apps.evaluate.perplexity import require_finite
from meshwright.apps.evaluate.results import Result
from meshwright.base.errors import BAD_DATA
from meshwright.base.progress import progress_bar
from meshwright.config.problem import SettingsError
from meshwright.config.schema import Sampling
from meshwright.data.windows import Window, document_windows, label_window
from meshwright.generation.decoder import complete
from meshwright.generation.language_model import LanguageModel
from meshwright.generation.requests import Request
from meshwright.parallel.window_losses import score_windows

MOST_NEW = 256  # tokens of an answer whose task gives no number, as in the harness
SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # what a task may say of it


class Adapter(TemplateLM):  # type: ignore[misc]  # it has no types
    """A model as the harness sees it. All requests of a kind come at once."""

    def __init__(self, model: LanguageModel, seed: int, batch: int) -> None:
        super().__init__()
        self.model = model
        self.seed = seed
        self.batch = batch

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.eod

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **more: Any
    ) -> list[int]:
        return list(self.model.tokenizer.encode(string))

    def score(self, windows: list[Window]) -> list[list[float]]:
        """Return the nats and the hits of each window."""
        with progress_bar("scoring", len(windows), "percent") as advance:
            scorer = shown_scorer(self.model, advance)
            scores = score_windows(scorer, windows, self.model.seq_length, self.batch)
            none = torch.empty(0, 2, dtype=torch.float64)  # of no window at all
            values = torch.cat([none, *scores])
        require_finite(float(values[:, 0].sum()))
        return values.tolist()

    def after_end(self, text: str) -> list[int]:
        """Return the tokens of a text that begins a document."""
        return [self.eot_token_id, *self.tok_encode(text)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding writes it."""
        length = self.model.seq_length
        windows = []
        for _, context, continuation in requests:
            windows.append(label_window(context, continuation, length))
        scores = self.score(windows)
        out = []
        for request, window, (nats, hits) in zip(requests, windows, scores, strict=True):
            out.append((-nats, hits == window.counted))
            # The harness keeps answers if it is asked to, so that it can go on after a stop.
            self.cache_hook.add_partial("loglikelihood", request[0], out[-1])
        return out

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows that do not overlap."""
        length = self.model.seq_length
        windows = list[Window]()
        counts = list[int]()
        for request in requests:
            # All windows of all texts are scored at once, and dealt out again by their numbers.
            own = list(document_windows(self.after_end(request.args[0]), length, length))
            windows += own
            counts.append(len(own))
        scores = iter(self.score(windows))
        out = []
        for request, n in zip(requests, counts, strict=True):
            out.append(-sum(next(scores)[0] for _ in range(n)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, out[-1])
        return out

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each prompt, up to a stop string."""
        length = self.model.seq_length
        # Answers have no loss by which damaged weights would be seen: score the first prompt.
        for request in requests[:1]:
            self.score([Window(self.after_end(request.args[0])[: length + 1])])
        # All prompts are decoded together, each with the options of its task.
        asked = list[Request]()
        for request in requests:
            context, task_options = request.args
            options = dict(normalize_gen_kwargs(task_options, MOST_NEW))
            most = int(options["max_gen_toks"])
            room = length - most
            if room < 1:
                raise SettingsError(
                    f"a task of {{harness}} asks for {most} new tokens, and the model reads {length}; leave it out",
                    BAD_DATA,
                )
            sampling = {name: options[name] for name in SAMPLING if options.get(name)}
            chosen = Sampling(greedy=not options.get("do_sample"), out_seq_length=most, **sampling)
            until = tuple(text for text in options["until"] if text)
            # Of a prompt that is too long, only the end is read, as by the harness' own backend.
            ids = self.tok_encode(context)[-room:]
            # An answer is decoded without the prompt, as by the harness' own backend: with a
            # vocabulary whose words begin with a space, its first space is lost.
            asked.append(Request(ids, chosen, self.seed, len(asked), until, is_alone=True))
        texts = [text.text for text in complete(self.model, asked, self.batch)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def score_harness(
    m: LanguageModel,
    folder: str,
    names: str,
    path: str | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    seed: int = 1234,
    batch: int = 8,
) -> Iterator[Result]:
    """Yield the result of each task and group, with what identifies the measurement."""
    manager = TaskManager(include_path=path)
    wanted = [name.strip() for name in names.split(",")]
    # An unknown name is an error here, whatever the others are.
    for name in wanted:
        if not manager.match_tasks([name]):
            raise SettingsError(
                f"{{harness={name}}}: the harness has no such task; `lm-eval ls tasks` lists them",
                BAD_DATA,
            )
    report: Any = evaluator.simple_evaluate(
        Adapter(m, seed, batch),
        tasks=manager.match_tasks(wanted),
        num_fewshot=fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    for name, row in report["results"].items():
        # The key of a measure is its name and its filter; other keys describe the task.
        values: dict[str, float] = {}
        for key, value in row.items():
            if "," in key and isinstance(value, int | float):
                values[key.removesuffix(",none")] = float(value)
        # Standard errors are shown, but are no headline.
        measures = [key for key in values if "stderr" not in key]
        # Standard errors are not looked at: a single question has none.
        for key in measures:
            require_finite(values[key], f"{key} of {name}")
        facts = {
            "few_shot": report["n-shot"].get(name),
            "version": report["versions"].get(name),
            "samples": report.get("n-samples", {}).get(name, {}).get("effective"),
        }
        stated = {key: value for key, value in facts.items() if value is not None}
        headline = next(iter([*measures, *values]), "")
        yield Result(folder, m.step, name, headline, values, stated)
