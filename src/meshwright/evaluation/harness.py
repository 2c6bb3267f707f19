"""lm-evaluation-harness on a loaded model: its tasks ask for log-likelihoods and continuations.

Only this file imports the harness, the extra `eval`. Its results depend on it and on its data; what
is computed here equals its own `hf` backend on the exported model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from meshwright.errors import BAD_DATA, UserError
from meshwright.evaluation.score import Scorer, Window, document_windows, score_windows
from meshwright.settings.schema import Sampling

if TYPE_CHECKING:
    from meshwright.tokenizers import Tokenizer

MOST_NEW = 256  # tokens of an answer whose task gives no number, as in the harness
# What the tasks say of sampling, by our names.
OPTIONS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class HarnessModel(Protocol):
    """As generation.engine.LanguageModel."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def seq_length(self) -> int: ...


# Prompts, options and stop strings of each -> texts.
Complete = Callable[[list[tuple[list[int], Sampling, tuple[str, ...]]]], list[str]]


class Adapter(TemplateLM):  # type: ignore[misc]  # it has no types
    """A model as the harness sees it. All requests of a kind come at once."""

    def __init__(self, model: HarnessModel, scorer: Scorer, complete: Complete, batch: int) -> None:
        super().__init__()
        self.model, self.scorer, self.complete, self.batch = model, scorer, complete, batch

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.eod

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        return list(self.model.tokenizer.encode(string))

    def score(self, windows: list[Window]) -> list[list[float]]:
        """Return the nats and the hits of each window."""
        found = score_windows(self.scorer, windows, self.model.seq_length, self.batch)
        return torch.cat([torch.empty(0, 2, dtype=torch.float64), *found]).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding writes it."""
        windows = []
        for _, context, continuation in requests:
            ids = [*context, *continuation][-self.model.seq_length - 1 :]
            windows.append(Window(ids, max(len(ids) - len(continuation) - 1, 0)))
        out = []
        for (texts, *_), window, (nats, hits) in zip(requests, windows, self.score(windows), strict=True):
            out.append((-nats, hits == len(window.tokens) - 1 - window.first))
            self.cache_hook.add_partial("loglikelihood", texts, out[-1])
        return out

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows that do not overlap."""
        length, windows, counts = self.model.seq_length, list[Window](), list[int]()
        for request in requests:
            ids = [self.eot_token_id, *self.tok_encode(request.args[0])]
            before = len(windows)
            windows += document_windows(ids, length, length)
            counts.append(len(windows) - before)
        found, out = iter(self.score(windows)), []
        for request, n in zip(requests, counts, strict=True):
            out.append(-sum(next(found)[0] for _ in range(n)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, out[-1])
        return out

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each prompt, up to a stop string."""
        asked = []
        for request in requests:
            context, given = request.args
            options = dict(normalize_gen_kwargs(given, MOST_NEW))
            most = int(options["max_gen_toks"])
            room = self.model.seq_length - most
            if room < 1:
                reads = f"the model reads {self.model.seq_length}"
                raise UserError(f"a task of --harness asks for {most} new tokens, and {reads}; leave it out", BAD_DATA)
            sampling = {ours: options[theirs] for theirs, ours in OPTIONS.items() if options.get(theirs)}
            chosen = Sampling(greedy=not options.get("do_sample"), out_seq_length=most, **sampling)
            until = tuple(text for text in options["until"] if text)
            asked.append((self.tok_encode(context)[-room:], chosen, until))
        texts = self.complete(asked)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def run_tasks(
    adapter: Adapter, names: str, path: str | None, fewshot: int | None, limit: int | None
) -> Iterator[tuple[str, dict[str, float], dict[str, Any]]]:
    """Yield the name of each task and group, its measures, and what identifies the measurement."""
    manager = TaskManager(include_path=path)
    wanted = manager.match_tasks([name.strip() for name in names.split(",")])
    for name in (n.strip() for n in names.split(",")):
        if not manager.match_tasks([name]):
            raise UserError(f"--harness {name}: the harness has no such task; `lm-eval ls tasks` lists them", BAD_DATA)
    found: Any = evaluator.simple_evaluate(
        adapter, tasks=wanted, num_fewshot=fewshot, limit=limit, task_manager=manager, log_samples=False
    )
    for name, row in found["results"].items():
        # The key of a measure is its name and its filter; other keys describe the task.
        measures = {key: v for key, v in row.items() if "," in key and isinstance(v, int | float)}
        values = {key.removesuffix(",none"): float(v) for key, v in measures.items()}
        facts = {"few_shot": found["n-shot"].get(name), "version": found["versions"].get(name)}
        facts["samples"] = found.get("n-samples", {}).get(name, {}).get("effective")
        yield name, values, {key: value for key, value in facts.items() if value is not None}
