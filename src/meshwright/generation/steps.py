"""A decoder's steps in CUDA graphs: all layers and the choice of tokens in one launch.

A step is captured for each number of rows and length, rounded up to powers of two, and each kind of
choice, and so is the reading of short prompts, whose kernels the host launches more slowly than the
device runs them. The first run in each thread is eager, for it compiles kernels and creates handles
of libraries for this thread; the second is captured. Padding rows point at a spare slot that no
request owns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from meshwright.base import device as devices
from meshwright.base.console import remark
from meshwright.base.errors import first_line
from meshwright.generation.sampling import ChoiceParts
from meshwright.generation.state import Outputs, SlotState, choose_next
from meshwright.kernels.decode import choose_tokens
from meshwright.kernels.grid import power_of_2
from meshwright.model.cache import Cache, ContinuedTexts
from meshwright.model.decode import DecodeStep
from meshwright.model.gpt import GPT
from meshwright.model.positions import Positions
from meshwright.runtime.cuda_graphs import CudaGraphs

SHORTEST_TEXT = 256  # length of the shortest steps
NARROWEST_PROMPT = 64  # width of prompts that a graph reads
MOST_PROMPT_TOKENS = 4096  # that a graph reads
# rows, length, choice, log-probabilities; of prompts
Key = tuple[int, int, ChoiceParts, int] | tuple[int, int]


class CapturedSteps:
    """The steps of one decoder."""

    def __init__(self, model: GPT, cache: Cache, state: SlotState, eod: int) -> None:
        self.model = model
        self.state = state
        self.cache = cache
        self.eod = eod
        self.step = DecodeStep(model, cache)
        self.captures = state.device.type == devices.NVIDIA
        self.slots: dict[int, torch.Tensor] = {}  # by rows
        self.names: dict[int, list[int]] = {}  # what these hold
        self.prompts: dict[tuple[int, int], torch.Tensor] = {}  # by rows and width
        self.runs: dict[Key, Callable[[], Any]] = {}
        self.tried: set[Key] = set()  # to capture
        self.thread = 0  # the one that runs them
        self.ready: set[Key] = set()  # to be captured by it
        self.graphs: CudaGraphs | None = None
        self.stream: Any = None  # of captures

    def run(self, slots: list[int], longest: int, kind: ChoiceParts, k: int) -> Outputs:
        """Advance the rows of these slots, whose texts have at most `longest` tokens."""
        rows = power_of_2(len(slots))
        longest = max(SHORTEST_TEXT, power_of_2(longest))
        longest = min(longest, self.cache.room)
        names = self.pad(slots, rows)
        # Most steps advance the same slots as the step before, and copy nothing.
        if self.names.get(rows) != names:
            new = self.state.send(names)
            # A graph reads its slots where they were when it was captured.
            buffer = self.slots.setdefault(rows, torch.empty_like(new))
            buffer.copy_(new)
            self.names[rows] = names
        # A k of -1 asks for no log-probabilities, and 0 for the chosen token's alone.
        key = rows, longest, kind, k if k < 1 else power_of_2(k)
        outputs: Outputs = self.call(key, lambda: self.advance(*key))
        return outputs

    def pad(self, slots: list[int], rows: int) -> list[int]:
        """Return slots for this many rows; those after the given ones are the spare slot."""
        spare = len(self.state.token) - 1
        return slots + [spare] * (rows - len(slots))

    def read(self, slots: list[int], prompts: list[list[int]]) -> torch.Tensor | None:
        """Read prompts into the cache and return the logits [B, V] behind them.

        None if they are so many tokens that the device, not the host, limits the speed.
        """
        rows = power_of_2(len(slots))
        width = max(NARROWEST_PROMPT, power_of_2(max(map(len, prompts))))
        if rows * width > MOST_PROMPT_TOKENS:
            return None
        # Slots, ends and tokens are one tensor, which goes to the device in one copy.
        lines = []
        prompts = prompts + [[0]] * (rows - len(slots))
        for name, prompt in zip(self.pad(slots, rows), prompts, strict=True):
            behind = [0] * (width - len(prompt))
            lines.append([name, len(prompt) - 1, *prompt, *behind])
        new = self.state.send(lines)
        # A graph reads its prompts where they were when it was captured.
        key = rows, width
        prompt_buffer = self.prompts.setdefault(key, torch.empty_like(new))
        prompt_buffer.copy_(new)
        logits: torch.Tensor = self.call(key, lambda: self.read_buffer(prompt_buffer))
        return logits[: len(slots)]

    def read_buffer(self, prompt_buffer: torch.Tensor) -> torch.Tensor:
        """Read prompts from rows [B, 2 + T] of a slot, the place of the last token, and tokens."""
        slots = prompt_buffer[:, 0]
        ends = prompt_buffer[:, 1]
        tokens = prompt_buffer[:, 2:]
        where = Positions(
            cached=ContinuedTexts(self.cache, slots, torch.zeros_like(slots), 0, ends)
        )
        logits: torch.Tensor = self.model(tokens, where, last_only=True)
        return logits[:, 0, : self.state.vocab]

    def advance(self, rows: int, longest: int, kind: ChoiceParts, k: int) -> Outputs:
        s = self.state
        slots = self.slots[rows]
        logits = self.step(s.rows, slots, longest)
        changes_logits = kind.filtered or kind.penalised or kind.counting or kind.avoiding
        if not changes_logits and k < 0:
            # One kernel does all of the choice, and advances the rows too.
            draws = s.draws if kind.sampled else None
            return Outputs(choose_tokens(logits, s.vocab, slots, s.rows, self.eod, draws))
        # The step has added a token's keys and values to each row that goes on.
        s.used[slots] += s.active[slots]
        logits = logits[:, : s.vocab]
        return choose_next(s, slots, logits, kind, k, self.eod)

    def call(self, key: Key, function: Callable[[], Any]) -> Any:
        """Run a function: as it is a thread's first time, and captured from the second time on."""
        if self.thread != threading.get_ident():
            self.thread = threading.get_ident()
            self.ready = set()
        # a thread of its own begins on device 0
        with torch.accelerator.device_index(self.state.device.index):
            if key in self.ready and key not in self.tried and self.captures:
                # A capture that failed once is not tried again.
                self.tried.add(key)
                self.runs[key] = self.capture(function)
            self.ready.add(key)
            return self.runs.setdefault(key, function)()

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that replays this one; its outputs are overwritten each time."""
        outputs: list[Any] = []
        try:
            if self.graphs is None:
                self.graphs = CudaGraphs(self.state.device)
                self.stream = devices.new_stream(self.state.device)
            self.graphs.prepare()
            # CUDA does not capture the default stream.
            with devices.on_stream(self.stream):
                replay = self.graphs.capture(lambda: outputs.append(function()))
        except RuntimeError as error:
            remark(
                f" > decoding: a step runs without a CUDA graph, whose capture failed: {first_line(error)}"
            )
            return function

        def replayed() -> Any:
            replay()
            return outputs[-1]

        return replayed
