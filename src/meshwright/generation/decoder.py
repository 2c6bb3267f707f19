"""Generation for many requests at once: rows of unequal lengths advance together, token by token.

Each request has a slot of one key/value cache. What a step needs of a row (its last token, length,
sampling flags, whether it goes on) lies in tensors on the device, one element per slot, so that a
step chooses tokens and begins the next one without the host. On an accelerator the host reads a
step's tokens while the next step runs: a row that ends by itself is known there at once; one whose
end only the host sees, by a stop string, computes one token more, which nobody gets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from meshwright.base import device as devices
from meshwright.base.errors import UserError
from meshwright.data.tokenizers import Tokenizer
from meshwright.generation.requests import Completion, Event, Finish, Request, Top, not_finite_error
from meshwright.generation.sampling import ChoiceParts
from meshwright.generation.state import DecoderRow, Outputs, SlotState, choose_next, score_tokens
from meshwright.generation.steps import CapturedSteps
from meshwright.kernels.decode import BAD, NONE
from meshwright.model.cache import Cache, ContinuedTexts
from meshwright.model.decode import reason_against
from meshwright.model.gpt import GPT
from meshwright.model.positions import Positions

PREFILL = 16384  # most tokens of prompts in one pass, padding included; one prompt may have more
CHUNK = 2048  # most tokens of a prompt in one pass
ECHO_CHUNK = 512  # the same where the pass returns the logits of all tokens, which take more memory


class Decodable(Protocol):
    """What a decoder needs of language_model.LanguageModel."""

    @property
    def model(self) -> GPT: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def sharded(self) -> object | None: ...
    def decoder(self, slots: int, length: int) -> Decoder: ...

    def forward(self, tokens: Tensor, where: Positions, last_only: bool = False) -> Tensor:
        """Map tokens [B, T] to logits as GPT.forward does, in the model's layout."""


@dataclass
class Pending:
    """A pass whose results are on their way to the host."""

    rows: list[DecoderRow]
    outputs: Outputs
    ready: Any  # an event of the device, or None
    echoes: list[Outputs] = field(default_factory=list)  # of the only row's prompt, a chunk each


class Decoder:
    """Slots for requests, one key/value cache, and the step that advances all rows by a token.

    Not thread-safe: one thread drives it. `length` is the most tokens of a text, by default the
    model's. `graphs` chooses captured steps, which need an NVIDIA GPU.
    """

    def __init__(
        self,
        model: Decodable,
        slots: int,
        length: int | None = None,
        graphs: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        if slots < 1:
            raise UserError(f"a decoder needs slots; {slots} are given")
        self.model = model
        self.slots = slots
        self.eod = model.tokenizer.eod
        self.length = min(length or model.seq_length, model.seq_length)
        self.device = model.device
        self.cache = Cache(slots + 1, self.length)  # the last slot is for padding rows
        self.state = SlotState(slots, model.model.vocab, self.device)
        self.steps = steps_of(model, self.cache, self.state, graphs)
        self.is_asynchronous = devices.is_asynchronous(self.device)
        self._queue: deque[DecoderRow] = deque()
        self._rows: dict[int, DecoderRow] = {}  # by slot
        # A heap: the lowest slots are used first, so that fewer combinations of slots occur, and
        # the same requests always get the same ones.
        self._free = list(range(slots))
        self._pending: deque[Pending] = deque()
        self._next = 0

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return len(self._queue)

    @property
    def active(self) -> int:
        """The number of requests that have a slot."""
        return len(self._rows)

    def submit(self, request: Request) -> int:
        """Add a request, which waits until a slot is free, and return its number."""
        # Nothing at all is continued as the beginning of a document.
        prompt = request.prompt or [self.eod]
        vocab = self.model.model.vocab
        wanted = request.options.out_seq_length
        if problem := request.problem():
            raise UserError(problem)
        for i in prompt:
            if not 0 <= i < vocab:
                raise UserError(f"token id {i} is outside of the vocabulary, 0 ... {vocab - 1}")
        # A request for no tokens, which only scores its prompt, may fill all positions.
        if len(prompt) + min(wanted, 1) > self.length:
            raise UserError(
                f"the prompt has {len(prompt)} tokens; the model reads {self.length}, shorten the prompt"
            )
        count = min(wanted, self.length - len(prompt))
        text = request.new_text(self.model.tokenizer) if request.stop else None
        number = self._next
        self._next += 1
        self._queue.append(
            DecoderRow(number, request, prompt, count, count, parts_of(request), text)
        )
        return number

    def cancel(self, number: int) -> None:
        """Drop a request; its slot is free before the next step. An unknown one is ignored."""
        for row in [*self._queue, *self._rows.values()]:
            if row.id == number:
                self._finish(row)
        self._queue = deque(row for row in self._queue if not row.is_done)

    def _finish(self, row: DecoderRow) -> None:
        row.is_done = True
        row.left = 0
        # A row in the queue has no slot yet. Of several calls for a row only the first frees its
        # slot, which may belong to another row by the second.
        if row.slot >= 0 and self._rows.pop(row.slot, None) is not None:
            heapq.heappush(self._free, row.slot)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit waiting requests, advance all rows by a token, return the tokens that are known.

        These are all tokens on a CPU; on an accelerator those of the step before.
        """
        events: list[Event] = []
        for rows in self._admit():
            self._pending.append(self._prefill(rows))
        # A row that recomputes its text needs the text on the host before each pass.
        if not self.is_asynchronous or self._recomputes():
            events += self._read(0)
        rows = [row for _, row in sorted(self._rows.items()) if row.left]
        if rows:
            self._pending.append(self._advance(rows))
        # The pass that was begun just now may stay pending while the next one is launched.
        is_ahead = self.is_asynchronous and bool(rows) and not self._recomputes()
        return events + self._read(1 if is_ahead else 0)

    def _recomputes(self) -> bool:
        return any(row.request.options.recompute for row in self._rows.values())

    # Device work

    def _admit(self) -> Iterator[list[DecoderRow]]:
        """Give waiting rows slots; yield those whose prompts are read in one pass."""
        rows: list[DecoderRow] = []
        size = 0
        while self._queue and self._free:
            size += len(self._queue[0].prompt)
            # Rows that generate wait while prompts are read, so a step reads no more than this.
            if rows and size > PREFILL:
                break
            row = self._queue.popleft()
            row.slot = heapq.heappop(self._free)
            self._rows[row.slot] = row
            rows.append(row)
        if rows:
            self.state.admit(rows)
        # Prompts of a pass are padded to its longest, so those of similar lengths go together.
        together: list[DecoderRow] = []
        for row in sorted(rows, key=lambda r: len(r.prompt)):
            alone = row.request.echo or row.request.options.recompute
            padded = len(row.prompt) * (len(together) + 1)
            if together and (alone or padded > PREFILL):
                yield together
                together = []
            together.append(row)
            if alone:
                yield together
                together = []
        if together:
            yield together

    def _prefill(self, rows: list[DecoderRow]) -> Pending:
        """Read the rows' prompts into the cache, and choose their first tokens."""
        slots = self.state.send([row.slot for row in rows])
        echoes: list[Outputs] = []
        if rows[0].request.options.recompute:
            logits = self._recompute(rows, echoes)
        else:
            logits = self._read_prompts(rows, slots, echoes)
        # Only an echo asks for no tokens, and it is alone. Its request ends with the prompt, so
        # nobody reads the outputs, and the slots can stand in for tokens.
        is_done = not rows[0].left
        outputs = Outputs(slots) if is_done else self._choose(rows, slots, logits)
        pending = self._collect(rows, outputs)
        pending.echoes = echoes
        return pending

    def _read_prompts(self, rows: list[DecoderRow], slots: Tensor, echoes: list[Outputs]) -> Tensor:
        """Return the logits [B, V] behind the prompts, which are read in chunks.

        The rows come in the order of their lengths, the shortest first.
        """
        echo = wants_scored_prompt(rows[0].request)
        if self.steps is not None and not echo:
            read = self.steps.read([row.slot for row in rows], [row.prompt for row in rows])
            if read is not None:
                return read
        chunk = ECHO_CHUNK if echo else CHUNK
        longest = len(rows[-1].prompt)
        logits_of_rows: list[Tensor] = []
        done = 0  # rows whose prompts are read to their ends: the first ones
        for start in range(0, longest, chunk):
            # Rows that have tokens in this chunk are padded behind their ends.
            left = rows[done:]
            end = start + chunk
            parts = [row.prompt[start:end] for row in left]
            width = max(map(len, parts))
            padded = [part + [0] * (width - len(part)) for part in parts]
            tokens = self.state.send(padded)
            ends = self.state.send([len(part) - 1 for part in parts])
            used = torch.full_like(ends, start)
            seen = min(self.cache.room, start + width) if start else 0
            texts = ContinuedTexts(self.cache, slots[done:], used, seen, ends)
            logits = self.model.forward(tokens, Positions(cached=texts), last_only=not echo)
            logits = logits[..., : self.state.vocab]
            if echo:
                self._echo(logits[0], rows[0], start, echoes)
                logits = logits[:, -1:]
            # The shortest prompts come first, so those that end here are the first ones left.
            ended = sum(len(row.prompt) <= end for row in left)
            logits_of_rows.append(logits[:ended, 0])
            done += ended
        return torch.cat(logits_of_rows)

    def _echo(self, logits: Tensor, row: DecoderRow, start: int, echoes: list[Outputs]) -> None:
        """Score the prompt's tokens that follow `start` by the logits [T, V] of a chunk."""
        first = start + 1
        tokens = row.prompt[first : first + len(logits)]
        # The prompt's last token may be alone in a chunk, with nothing behind it.
        if tokens:
            sent = self.state.send(tokens)
            k = row.request.logprobs or 0
            echoes.append(score_tokens(logits[: len(tokens)], sent, k))

    def _recompute(self, rows: list[DecoderRow], echoes: list[Outputs] | None = None) -> Tensor:
        """Return the logits [B, V] behind the rows' texts, without a cache."""
        logits_of_rows = []
        for row in rows:
            echo = echoes is not None and wants_scored_prompt(row.request)
            tokens = self.state.send([row.prompt + row.tokens])
            logits = self.model.forward(tokens, Positions(), last_only=not echo)
            logits = logits[0, :, : self.state.vocab]
            if echo and echoes is not None:
                self._echo(logits, row, 0, echoes)
            logits_of_rows.append(logits[-1])
        return torch.stack(logits_of_rows)

    def _advance(self, rows: list[DecoderRow]) -> Pending:
        """Compute the next token of each row."""
        s = self.state
        again = [row for row in rows if row.request.options.recompute]
        rows = [row for row in rows if not row.request.options.recompute]
        if self.steps is not None and not again:
            longest = max(row.length for row in rows)
            kind, k = self._wanted(rows)
            outputs = self.steps.run([row.slot for row in rows], longest, kind, k)
            return self._collect(rows, outputs)
        slots = s.send([row.slot for row in rows + again])
        logits = []
        # The model reads the last tokens of rows with a cache, and the whole texts of the others.
        if rows:
            cached = slots[: len(rows)]
            seen = min(self.cache.room, max(row.length for row in rows))
            texts = ContinuedTexts(self.cache, cached, s.used[cached], seen)
            tokens = s.token[cached][:, None]
            of_rows = self.model.forward(tokens, Positions(cached=texts))
            logits.append(of_rows[:, 0, : s.vocab])
        if again:
            logits.append(self._recompute(again))
        # A row that has ended on the device stays at its length.
        s.used[slots] += s.active[slots]
        rows = rows + again
        outputs = self._choose(rows, slots, torch.cat(logits))
        return self._collect(rows, outputs)

    def _choose(self, rows: list[DecoderRow], slots: Tensor, logits: Tensor) -> Outputs:
        """Choose the rows' next tokens from logits [B, V]."""
        kind, k = self._wanted(rows)
        return choose_next(self.state, slots, logits, kind, k, self.eod)

    def _wanted(self, rows: list[DecoderRow]) -> tuple[ChoiceParts, int]:
        """Count a token for each row; return what its choice needs, and -1 or `score`'s k."""
        kind = ChoiceParts()
        k = -1
        for row in rows:
            # Rows are mostly of one kind, and the comparison is cheaper than the union.
            if row.kind != kind:
                kind = kind | row.kind
            if row.request.logprobs is not None:
                k = max(k, row.request.logprobs)
            row.left -= 1
        return kind, k

    def _collect(self, rows: list[DecoderRow], outputs: Outputs) -> Pending:
        """Begin the copy to the host."""
        if not self.is_asynchronous:
            return Pending(rows, outputs, None)
        outputs = Outputs(*(None if x is None else to_pinned(x) for x in vars(outputs).values()))  # type: ignore[arg-type]
        ready = torch.Event(self.device)
        ready.record()
        return Pending(rows, outputs, ready)

    # Results

    def _read(self, keep: int) -> list[Event]:
        """Return the events of all pending passes but the last `keep`."""
        events: list[Event] = []
        while len(self._pending) > keep:
            pending = self._pending.popleft()
            if pending.ready is not None:
                pending.ready.synchronize()
            first = pending.rows[0]
            # The pass that read the prompt comes before all others of the row, which has no tokens
            # until then.
            if first.request.echo and not first.is_done and not first.tokens:
                events += self._echoed(first, pending.echoes)
            tokens = pending.outputs.tokens.tolist()
            for i, row in enumerate(pending.rows):
                # A row may have ended since the pass was begun: here by a stop string, or on the
                # device, which says NONE.
                if not row.is_done and tokens[i] != NONE:
                    logprob, top = pending.outputs.of_row(i, row.request.logprobs)
                    events.append(self._report(row, tokens[i], logprob, top))
        return events

    def _echoed(self, row: DecoderRow, echoes: list[Outputs]) -> list[Event]:
        """Return the events of a prompt; they are the only ones of a request for no tokens."""
        # Nothing precedes the first token, so that it has no probability.
        scores: list[tuple[float | None, Top]] = [(None, [])]
        for part in echoes:
            scores += [part.of_row(i, row.request.logprobs) for i in range(len(part.tokens))]
        # Without log-probabilities there are no echoes.
        scores += [(None, [])] * (len(row.prompt) - len(scores))
        events = []
        for token, (logprob, top) in zip(row.prompt, scores, strict=True):
            events.append(Event(row.id, token, logprob, top, echoed=True))
        if not row.count:
            self._finish(row)
            events[-1] = dataclasses.replace(events[-1], finish="length")
        return events

    def _report(self, row: DecoderRow, token: int, logprob: float | None, top: Top) -> Event:
        if token == BAD:
            self._finish(row)
            raise not_finite_error()
        row.tokens.append(token)
        finish: Finish | None = None
        if token == self.eod or stops(row, token):
            finish = "stop"
        elif len(row.tokens) == row.count:
            finish = "length"
        if finish:
            self._finish(row)
        return Event(row.id, token, logprob, top, finish)


def steps_of(model: Decodable, cache: Cache, state: SlotState, graphs: str) -> CapturedSteps | None:
    """Return the captured steps, unless this network or device has none."""
    cut = "the model is cut over several ranks" if model.sharded is not None else None
    reason = cut or reason_against(model.model)
    if graphs == "on" and reason:
        raise UserError(
            f"decoding cannot be captured in CUDA graphs: {reason}; leave graphs at auto"
        )
    if reason or graphs == "off":
        return None
    return CapturedSteps(model.model, cache, state, model.tokenizer.eod)


def wants_scored_prompt(request: Request) -> bool:
    """Return whether the prompt's own tokens need log-probabilities, hence logits of all."""
    return request.echo and request.logprobs is not None


def to_pinned(x: Tensor) -> Tensor:
    """Begin the copy of a tensor into pinned memory of the host."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def parts_of(request: Request) -> ChoiceParts:
    """Return the parts of the choice of tokens that a request needs."""
    parts = ChoiceParts.of(request.options)
    return parts._replace(
        decaying=parts.filtered and request.top_p_decay != 1,
        counting=bool(request.presence_penalty or request.frequency_penalty),
        avoiding=request.forbidden_pair is not None,
    )


def stops(row: DecoderRow, token: int) -> bool:
    """Return whether a row's newest token completes a stop string."""
    if row.text is None:
        return False
    row.text.push(token)
    return row.text.stopped


def run_requests(
    decoder: Decoder, requests: Iterable[Request]
) -> Generator[tuple[int, Event], None, None]:
    """Yield the events of requests as they come, each with its request's number.

    Requests are taken as slots become free. Closing the generator cancels those at work.
    """
    numbered = enumerate(requests)
    numbers: dict[int, int] = {}  # ours, by the decoder's
    try:
        while True:
            # As many wait as there are slots, so that one that becomes free is filled in the same
            # step; more are not taken, for `requests` may be without end.
            missing = max(0, decoder.slots - decoder.waiting)
            for number, request in itertools.islice(numbered, missing):
                numbers[decoder.submit(request)] = number
            if not numbers:
                return
            for event in decoder.step():
                number = numbers.pop(event.id) if event.finish else numbers[event.id]
                yield number, event
    finally:
        for submitted in numbers:
            decoder.cancel(submitted)


def complete(model: Decodable, requests: Sequence[Request], slots: int) -> list[Completion]:
    """Return the completions of requests, of which at most `slots` are computed at once."""
    longest = max((request.longest for request in requests), default=1)
    decoder = model.decoder(max(1, min(slots, len(requests))), longest)
    texts = [Completion(model.tokenizer, request) for request in requests]
    for number, event in run_requests(decoder, requests):
        texts[number].add(event)
    return texts


def run_request(model: Decodable, request: Request) -> Generator[Event, None, None]:
    """Yield a request's events as they come; closing the generator stops it."""
    events = run_requests(model.decoder(1, request.longest), [request])
    with contextlib.closing(events):
        for _, event in events:
            yield event
