"""A stand-in for CUDA graphs, with which their Python code runs on a CPU."""

import copy

import torch

from meshwright.training import graph_rule, network, stage_graphs
from meshwright.training import graphs as graph


class Recorder:
    """Stands in for CUDA graphs on a CPU.

    A capture runs the Python code and leaves no number changed; a replay computes the numbers and
    leaves the store's Python state as it was. It reads the fp8 that the capture read.
    """

    made = []  # every one, for the tests

    def __init__(self, store, totals):
        self.store, self.totals = store, totals
        self.calls, self.fails, self.room = [], None, True
        Recorder.made.append(self)

    def prepare(self):
        self.calls.append("prepare")

    def has_room(self):
        return self.room

    def discard(self):
        self.calls.append("discard")

    def tensors(self):
        s = self.store
        states = [x for piece in s.update_ranges for x in piece.state.values()]
        casts = [] if s.scales is None else [each.cast for each in s.scales.products]
        scaled = (
            []
            if s.scales is None
            else [*s.scales.tensors(), *(x for cast in casts for x in cast[:2])]
        )
        averaged = [] if s.average is None else [*s.average.values, s.average.count]
        return [
            s.weights,
            s.gradients,
            s.share,
            s.master,
            self.totals,
            *states,
            *s._adam_steps(),
            *scaled,
            *averaged,
        ]

    def python(self):
        buckets = [(set(b.seen), b.is_summed) for b in self.store.buckets.values()]
        return copy.copy(self.store.added), self.store.is_last_backward, buckets

    def restore(self, python):
        added, self.store.is_last_backward, buckets = python
        self.store.added = set(added)
        for b, (seen, is_summed) in zip(self.store.buckets.values(), buckets, strict=True):
            b.seen, b.is_summed = set(seen), is_summed

    @torch.no_grad()
    def capture(self, run):
        number = sum(call.startswith("capture") for call in self.calls)
        self.calls.append(f"capture {number}")
        before, kept = self.python(), [x.clone() for x in self.tensors()]
        products = [] if self.store.scales is None else self.store.scales.products
        casts = [product.cast for product in products]
        with torch.enable_grad():
            run()
        for x, old in zip(self.tensors(), kept, strict=True):
            x.copy_(old)
        if number == self.fails:
            p = next(self.store_parameters())
            p.grad = torch.full_like(p, 1e3)
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        def replay():
            self.calls.append(f"replay {number}")
            now, casts_now = self.python(), [product.cast for product in products]
            self.restore(before)
            for product, cast in zip(products, casts, strict=True):
                product.cast = cast
            with torch.enable_grad():
                run()
            self.restore(now)
            for product, cast in zip(products, casts_now, strict=True):
                product.cast = cast

        return replay

    def store_parameters(self):
        return (p for part in self.parts for p in part.parameters())


class ByRecorder:
    """Graphs by a Recorder, whatever they should have been made with."""

    prepared = {}

    def __init__(self, backend, parts, store, needs_room, totals=3, width=16):
        super().__init__(None, parts, store, needs_room, totals, width)
        self.backend = Recorder(store, self.totals)
        self.backend.parts = parts
        vars(self.backend).update(ByRecorder.prepared)


class Recorded(ByRecorder, graph.Graphs):
    """The pieces of a step."""


class RecordedStages(ByRecorder, stage_graphs.StageGraphs):
    """The passes of a pipeline rank."""


def stand_in(monkeypatch):
    """Let every run but those with `--cuda-graphs off` use graphs by a Recorder."""
    monkeypatch.setattr(
        graph_rule,
        "reason_against",
        lambda c, *_: "off" if c.training.cuda_graphs == "off" else None,
    )
    monkeypatch.setattr(network, "CudaGraphs", lambda device: None)
    monkeypatch.setattr(network.devices, "new_stream", lambda device: None)
    monkeypatch.setattr(graph, "Graphs", Recorded)
    monkeypatch.setattr(network, "StageGraphs", RecordedStages)
    monkeypatch.setattr(ByRecorder, "prepared", {})
    Recorder.made.clear()
