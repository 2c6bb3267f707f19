"""A decoder's steps in CUDA graphs: all layers and the choice of tokens in one launch.

A step is captured for each number of rows and length, rounded up to powers of two, and each kind of
choice. Its first run is an ordinary one, which compiles kernels; the second captures it. Rows that
only fill up the number belong to the slot of nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright import device as devices
from meshwright.console import remark
from meshwright.generation.sampling import Kind
from meshwright.generation.state import Outputs, State, choose
from meshwright.kernels.decode import pick
from meshwright.kernels.grid import power_of_2
from meshwright.model.attention import Cache
from meshwright.model.decode import Step
from meshwright.model.gpt import GPT
from meshwright.training.graph import collector_off

SHORTEST = 256  # length of the shortest steps
Key = tuple[int, int, Kind, int]  # rows, length, choice, log-probabilities


class Steps:
    """The steps of one decoder."""

    def __init__(self, model: GPT, cache: Cache, state: State, eod: int) -> None:
        self.step, self.state, self.cache, self.eod = Step(model, cache), state, cache, eod
        self.captures = state.device.type == devices.NVIDIA
        self.slots: dict[int, torch.Tensor] = {}  # by rows
        self.names: dict[int, list[int]] = {}  # what these hold
        self.known: dict[Key, Callable[[], Outputs]] = {}
        self.pool: Any = None

    def run(self, slots: list[int], longest: int, kind: Kind, k: int) -> Outputs:
        """Advance the rows of these slots, whose texts have at most `longest` tokens."""
        rows = power_of_2(len(slots))
        longest = min(max(SHORTEST, power_of_2(longest)), self.cache.room)
        names = slots + [len(self.state.token) - 1] * (rows - len(slots))
        if self.names.get(rows) != names:
            new = self.state.send(torch.tensor(names))
            self.slots.setdefault(rows, torch.empty_like(new)).copy_(new)
            self.names[rows] = names
        key = rows, longest, kind, k if k < 1 else power_of_2(k)
        with torch.accelerator.device_index(self.state.device.index):  # a thread of its own begins on device 0
            if key not in self.known:
                self.known[key] = lambda: self.advance(*key)
            elif self.captures:
                return self.replay(key)
            return self.known[key]()

    def advance(self, rows: int, longest: int, kind: Kind, k: int) -> Outputs:
        s, slots = self.state, self.slots[rows]
        logits = self.step(s.rows, slots, longest)
        if not (kind.filtered or kind.penalised or kind.avoiding) and k < 0:
            return Outputs(pick(logits, s.vocab, slots, s.rows, self.eod, s.draws if kind.sampled else None))
        s.used[slots] += s.active[slots]
        return choose(s, slots, logits[:, : s.vocab], kind, k, self.eod)

    def replay(self, key: Key) -> Outputs:
        known = self.known[key]
        if not isinstance(known, Graph):
            try:
                if self.pool is None:
                    self.pool = torch.cuda.graph_pool_handle()
                known = self.known[key] = Graph(lambda: self.advance(*key), self.pool)
            except RuntimeError as error:
                self.captures = False
                line = (str(error).splitlines() or [""])[0]
                remark(f" > decoding without CUDA graphs: the capture failed: {line}")
        return known()


class Graph:
    """A captured function; its outputs are tensors that each replay overwrites."""

    def __init__(self, function: Callable[[], Outputs], pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with collector_off(), torch.cuda.graph(self.graph, pool, capture_error_mode="thread_local"):
            self.outputs = function()

    def __call__(self) -> Outputs:
        self.graph.replay()
        return self.outputs
