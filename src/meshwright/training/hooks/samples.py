"""Samples of --sample-interval: text that the network writes between two steps, in any layout.

Each new token takes a forward pass over the whole text, as in a validation, without a key/value
cache. So samples work wherever a validation does, and a sample of n tokens costs at most n forward
passes over full sequences. Random numbers are those of `generate`, functions of (seed, prompt,
position), so that the training draws the same numbers with samples as without.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.console import remark
from meshwright.config.problem import SettingsError, plain
from meshwright.config.schema import Sampling, TrainConfig
from meshwright.data.loader import Batch
from meshwright.data.tokenizers import Tokenizer
from meshwright.generation import sampling
from meshwright.generation.requests import Request, text_until_stop
from meshwright.generation.terminal import replace_surrogates
from meshwright.kernels.references import upcast
from meshwright.training.hooks.eval_tasks import runs_one_shape
from meshwright.training.log.metrics import Metrics
from meshwright.training.micro_step import Network

PADDING = 64  # texts are padded to a multiple of this, so that few shapes occur


class SampleWriter:
    """The prompts of --sample-prompts, which all ranks continue together."""

    def __init__(
        self, config: TrainConfig, net: Network, vocab: int, tokenizer: Tokenizer | None
    ) -> None:
        g, self.length = config.logging, config.data.seq_length or 0
        if tokenizer is None:
            raise SettingsError(
                "{sample_interval} writes text, for which the run needs a tokenizer; give {tokenizer}"
            )
        self.net, self.vocab, self.tokenizer, self.rows = net, vocab, tokenizer, config.micro_batch
        self.seed, self.count = config.training.seed, g.sample_length
        self.options = Sampling(temperature=g.sample_temperature)
        self.prompts = [replace_surrogates(prompt) for prompt in g.sample_prompts or [""]]
        self.requests = [Request(list(tokenizer.encode(prompt))) for prompt in self.prompts]
        # An empty prompt begins a document.
        self.ids = [request.prompt or [tokenizer.eod] for request in self.requests]
        # Checked before training: a run must not end at its first sample.
        for prompt, ids in zip(self.prompts, self.ids, strict=True):
            if len(ids) >= self.length:
                text = f"{plain(repr(prompt[:30]))} has {len(ids)} tokens; the model reads {self.length}, shorten it"
                raise SettingsError(f"{{sample_prompts}}: {text}")
        self.is_fixed = runs_one_shape(net)

    def write(self, iteration: int, metrics: Metrics) -> None:
        """Continue the prompts with the current weights and record the texts."""
        for number, (prompt, ids) in enumerate(zip(self.prompts, self.generate(), strict=True)):
            text, _ = text_until_stop(self.tokenizer, self.requests[number], ids)
            # The last character may be cut off within its bytes.
            text = text.removesuffix("\N{REPLACEMENT CHARACTER}")
            remark(
                f" > sample at iteration {iteration}: {prompt + '|' if prompt else ''}{in_one_line(text)}"
            )
            metrics.sample(iteration, number, prompt, text)

    def generate(self) -> list[list[int]]:
        """Return the new tokens of each prompt, without an end-of-document token."""
        device, eod = self.net.device, self.tokenizer.eod
        texts = [list(ids) for ids in self.ids]
        done = [False] * len(texts)
        kind = sampling.ChoiceParts.of(self.options)
        # All texts have the same options, and each a stream of random numbers of its own.
        flags = [sampling.control_numbers(self.options)] * len(texts)
        numbers = torch.tensor(flags, dtype=torch.float64, device=device)
        names = [sampling.stream_key(self.seed, row) for row in range(len(texts))]
        keys = torch.tensor(names, device=device)
        temperature, top_p, min_p = numbers.unbind(1)
        controls = sampling.Controls(temperature, top_p, min_p, torch.zeros_like(keys), keys)
        for _ in range(self.count):
            logits = self.next_logits(texts)
            at = torch.tensor(list(map(len, texts)), device=device)
            # All ranks have the same logits, and so choose the same tokens.
            new = sampling.sample_tokens(logits, kind, controls, at).tolist()
            for row, token in enumerate(new):
                done[row] = done[row] or token == eod or len(texts[row]) >= self.length
                if not done[row]:
                    texts[row].append(token)
            if all(done):
                break
        return [text[len(ids) :] for text, ids in zip(texts, self.ids, strict=True)]

    def pad(self, texts: list[list[int]]) -> Tensor:
        """Return texts of one width: the full length if the network runs only one shape."""
        width = self.length
        if not self.is_fixed:
            longest = max(map(len, texts))
            rounded_up = -(-longest // PADDING) * PADDING
            width = min(rounded_up, self.length)
        return torch.tensor([text + [0] * (width - len(text)) for text in texts])

    @torch.no_grad()
    def next_logits(self, texts: list[list[int]]) -> Tensor:
        """Return the logits [texts, vocabulary] behind each text, the same on all ranks."""
        net, at = self.net, self.net.layout.at

        # Micro-batches have the training's size; the last text is repeated to fill them.
        missing = -len(texts) % self.rows
        texts_to_run = texts + [texts[-1]] * missing
        tokens = self.pad(texts_to_run)
        last = torch.tensor([len(text) - 1 for text in texts_to_run])
        ends = last.split(self.rows)  # type: ignore[no-untyped-call]

        # Take this rank's columns.
        columns = tokens.shape[1] // net.layout.cp
        first = at("cp") * columns
        own = tokens[:, first : first + columns].contiguous()
        mine = own.split(self.rows)  # type: ignore[no-untyped-call]
        batches = [Batch(t, t, torch.arange(self.rows)) for t in mine]

        def take_ends(logits: Tensor, i: int) -> Tensor:
            """Return the logits behind each text, 0 if it ends in another rank's columns."""
            end = ends[i].to(logits.device) - first
            is_inside = (end >= 0) & (end < columns)
            rows = torch.arange(len(end), device=logits.device)
            column = end.where(is_inside, 0)
            chosen = upcast(logits[rows, column])
            is_outside = ~is_inside[:, None]
            return chosen.masked_fill(is_outside, 0)

        parts = net.infer(batches, take_ends)
        if net.layout.world == 1:
            return torch.cat(parts)[: len(texts), : self.vocab]

        # The first replica's last stage adds the ids of each tensor rank; all other ranks add 0.
        weight = next(net.parts[0].parameters())
        kind = torch.float64 if weight.dtype is torch.float64 else torch.float32
        total = torch.zeros(len(texts_to_run), self.vocab, dtype=kind, device=net.device)
        if parts and not at("replicas", "shard"):
            part = torch.cat(parts)
            begin = at("tp") * part.shape[1]
            total[:, begin : begin + part.shape[1]] = part[:, : max(self.vocab - begin, 0)]
        dist.all_reduce(total)
        return total[: len(texts)]


def in_one_line(text: str) -> str:
    """Return a text for the log, without what moves a terminal's cursor or changes its colours."""
    letters = []
    for letter in " ".join(text.split()):
        letters.append(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}")
    return "".join(letters)
