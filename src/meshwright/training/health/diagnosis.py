"""Recompute a step under hooks and find the first value that is not finite.

The step was not applied, so the same weights, samples and random numbers give the same values
again, unless a fault of the hardware made them. All ranks call `find_origin` together; steps that
are finite cost nothing.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.base import device as devices
from meshwright.data.loader import Batch
from meshwright.model.fused import FusedBlock
from meshwright.model.gpt import Block
from meshwright.parallel.layout import Layout
from meshwright.runtime.ranks.team import Team
from meshwright.training.micro_step import Network, sum_terms
from meshwright.training.step import StepSettings, accumulate, prepare_numbers

AT_ONCE = 1 << 26  # elements that are checked together
NAMED = 8  # ranks that an error names


class Origin(NamedTuple):
    """Where values began to be not finite, in words and as columns of metrics.jsonl."""

    text: str
    facts: dict[str, Any]

    @property
    def is_state(self) -> bool:
        """Whether weights or moments in memory are not finite."""
        return bool(self.facts["kind"] == "state")

    @property
    def is_transient(self) -> bool:
        return bool(self.facts["kind"] == "none")


class Finding(NamedTuple):
    """The first bad value that one rank found; of several ranks', the least `order` came first."""

    order: list[int]
    text: str
    name: str  # of the module, parameter or state
    is_fused: bool = False  # whether it is a layer that fused kernels run


def find_origin(
    net: Network, team: Team, batches: list[Batch], settings: StepSettings, has_loss: bool
) -> Origin:
    """Find where a step began to be not finite; `has_loss` tells whether its loss was finite."""
    first = functools.partial(first_of_all, team, net.layout)
    with devices.on_stream(net.stream), as_usual(net):
        net.store.wait_for_weights()
        # From the cheapest to the dearest: what is in memory, a forward pass, a backward pass.
        if origin := first("state", find_bad_state(net)):
            return origin
        on_device = [b.to(net.device) for b in batches]
        if origin := first("forward", run_forward(net, on_device, settings.seed)):
            if origin.facts["fused"]:
                with plain_blocks(net):  # the same up to rounding, module by module
                    return first("forward", run_forward(net, on_device, settings.seed)) or origin
            return origin
        if has_loss:
            of_rank, summed = run_backward(net, batches, settings)
            if origin := first("backward", of_rank) or first("sum", summed):
                return origin
    hosts = team.merge(
        [platform.node()], lambda lists: sorted({host for hosts in lists for host in hosts})
    )
    text = "computed again, it is finite: a transient fault, so suspect the hardware of "
    return Origin(text + list_some(hosts), {"kind": "none", "hosts": hosts})


def first_of_all(team: Team, layout: Layout, kind: str, own: Finding | None) -> Origin | None:
    """Return the first of what all ranks found, with the ranks that found it."""
    report = None
    if own is not None:
        report = [*own, team.rank, f"{team.rank} ({place_of(layout)}, host {platform.node()})"]
    # Lists, not Findings: the store that carries them between ranks has JSON's types.
    findings = [finding for finding in team.gather(report) if finding]
    if not findings:
        return None
    order, text, name, is_fused, *_ = min(findings)
    # Several ranks may find it: tensor ranks, for example, compute the same stream.
    same = [finding for finding in findings if finding[0] == order and finding[2] == name]
    ranks = [finding[-2] for finding in same]
    where = ""
    if team.size > 1:
        plural = "s" if len(ranks) > 1 else ""
        where = f", on rank{plural} {list_some([finding[-1] for finding in same])}"
    facts = {"kind": kind, "name": name, "fused": is_fused, "ranks": ranks}
    return Origin(f"it began in {text}{where}", facts)


def place_of(layout: Layout) -> str:
    """Return this rank's place in the layout, such as tp 0, pp 1, dp 3."""
    places = []
    for name, dims in COORDINATES.items():
        # Few runs have context ranks.
        if name != "cp" or layout.cp > 1:
            places.append(f"{name} {layout.at(*dims)}")
    return ", ".join(places)


COORDINATES = {"tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "dp": ("replicas", "shard")}


def list_some(names: list[str]) -> str:
    text = ", ".join(names[:NAMED])
    if len(names) > NAMED:
        text += f" and {len(names) - NAMED} more"
    return text


# Numbers


def count_bad(x: Tensor) -> Tensor:
    """Count the values that are not finite, on the device."""
    # In parts: the mask of all at once would need a quarter of the tensor's memory.
    parts = torch.split(x.detach().flatten(), AT_ONCE)
    return torch.stack([(~part.isfinite()).sum() for part in parts]).sum()


def floats(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of floating-point numbers in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, tuple | list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from floats(inner)


def bad_in(value: Any) -> tuple[int, int]:
    """Return how many values are not finite, and of how many."""
    tensors = list(floats(value))
    return sum(int(count_bad(x)) for x in tensors), sum(x.numel() for x in tensors)


def in_words(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]:,} of {numbers[1]:,} values"


def first_bad(tensors: dict[str, Tensor], before: str) -> Finding | None:
    """Return the first tensor that is not finite, after one wait for the device."""
    named = [(name, x) for name, x in tensors.items() if x.numel()]
    if not named:
        return None
    counts = torch.stack([count_bad(x).cpu() for _, x in named]).tolist()
    for i, bad in enumerate(counts):
        if bad:
            name, x = named[i]
            return Finding([i], f"{before}{name} ({in_words((bad, x.numel()))})", name)
    return None


def find_bad_state(net: Network) -> Finding | None:
    """Check this rank's weights and moments, and the copies that the layers read."""
    # Moments are named after their parameter, as wte.weight/exp_avg.
    masters: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for name, (_, _, x) in net.store.named_state().items():
        (moments if "/" in name else masters)[name] = x
    copies = {}
    for part in net.parts:
        for name, p in part.named_parameters():
            if not hasattr(p, "to_local"):  # ZeRO 3 has no copy outside of a pass
                copies[name] = p
    return (
        first_bad(masters, "the weights ")
        or first_bad(copies, "the copy that the layers read of the weights ")
        or first_bad(moments, "the optimizer's state ")
    )


# Passes


@contextlib.contextmanager
def as_usual(net: Network) -> Iterator[None]:
    """Let hooks see the block's passes: layers are not compiled, autograd has all gradients.

    The scales of fp8 learn nothing from these passes.
    """
    with contextlib.ExitStack() as block:
        # A compiled layer has no modules within it for hooks to see.
        if net.is_compiled:
            block.enter_context(torch.compiler.set_stance("force_eager"))
        if (scales := net.store.scales) is not None:
            block.enter_context(scales.trial())
        # Without main_grad a kernel hands the gradient to autograd.
        for p in (p for part in net.parts for p in part.parameters() if hasattr(p, "main_grad")):
            block.callback(setattr, p, "main_grad", p.main_grad)
            del p.main_grad
        for part in net.parts:
            part.train()
        yield


@contextlib.contextmanager
def plain_blocks(net: Network) -> Iterator[None]:
    blocks = [m for part in net.parts for m in part.modules() if isinstance(m, FusedBlock)]
    for block in blocks:
        block.forward = functools.partial(Block.forward, block)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def run_forward(net: Network, batches: list[Batch], seed: int) -> Finding | None:
    """Run the forward pass; return the first module whose output is not finite."""
    watch = Watch(net, has_gradients=False)

    def see_loss(logits: Tensor, i: int) -> Tensor:
        terms = sum_terms(net, batches[i], logits)
        watch.see("the loss function", watch.order(len(net.parts) - 1), logits, terms)
        return terms[0]

    with watch.attached():
        net.infer(batches, see_loss, seed)
    return watch.from_finite or watch.passed_on


def run_backward(
    net: Network, batches: list[Batch], settings: StepSettings
) -> tuple[Finding | None, Finding | None]:
    """Compute the gradients; return the first bad one on this rank, and the first bad sum."""
    if net.graphs is not None:
        net.graphs.release()  # their memory is needed; they are captured again
    watch = Watch(net, has_gradients=True)
    with watch.attached():
        accumulate(net, batches, *prepare_numbers(net, batches, settings), settings)
        net.store.finish_sums()
    summed = first_bad(
        dict(net.store.each_gradient()), "the sum over the ranks of the gradient of "
    )
    if summed is None and not bool(net.store.sum_of_squares().isfinite()):
        summed = Finding(
            [0], "the norm: the gradients are finite, the sum of their squares is not", "norm"
        )
    return watch.gradient(), summed


class Watch:
    """Hooks on all modules of this rank's parts."""

    def __init__(self, net: Network, has_gradients: bool) -> None:
        self.net, self.has_gradients = net, has_gradients
        self.calls = 0
        self.microbatches = [-1] * len(net.parts)
        self.from_finite: Finding | None = None  # made from finite inputs
        self.passed_on: Finding | None = None  # made from whatever inputs
        # The first bad gradient of a parameter (True) and of an output (False).
        self.gradients: dict[bool, Finding] = {}
        self.hooked: dict[int, Tensor] = {}  # parameters with a hook, by id
        self.handles: list[Any] = []

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        try:
            for chunk, part in enumerate(self.net.parts):
                for name, module in part.named_modules():
                    enter = functools.partial(self.enter, chunk, name)
                    leave = functools.partial(self.leave, chunk, name or type(part).__name__)
                    self.handles.append(module.register_forward_pre_hook(enter))
                    self.handles.append(module.register_forward_hook(leave, with_kwargs=True))
            yield
        finally:
            for handle in self.handles:
                handle.remove()

    def order(self, chunk: int) -> list[int]:
        """Return the order of this moment: the micro-batch, the stage, the call."""
        self.calls += 1
        stage = chunk if self.net.pipeline is None else self.net.pipeline.stages[chunk]
        return [self.microbatches[chunk], stage, self.calls]

    def enter(self, chunk: int, name: str, module: nn.Module, args: Any) -> None:
        # The part itself is entered once for each micro-batch.
        if not name:
            self.microbatches[chunk] += 1
        if not self.has_gradients:
            return
        for inner, p in module.named_parameters(prefix=name):  # ZeRO 3 has gathered them by now
            if id(p) not in self.hooked and p.requires_grad and not hasattr(p, "to_local"):
                self.hooked[id(p)] = p
                self.handles.append(p.register_hook(self.gradient_hook(chunk, inner, "", True)))  # type: ignore[no-untyped-call]

    def leave(
        self, chunk: int, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        order = self.order(chunk)
        if not self.has_gradients:
            self.see(name, order, (args, kwargs), output, isinstance(module, FusedBlock))
            return
        for x in floats(output):
            if x.requires_grad:
                x.register_hook(self.gradient_hook(chunk, name, "the output of ", False))  # type: ignore[no-untyped-call]

    def see(
        self, name: str, order: list[int], source: Any, output: Any, is_fused: bool = False
    ) -> None:
        """Note an output that is not finite, and whether its inputs are."""
        if self.from_finite is not None:
            return
        bad = bad_in(output)
        if not bad[0]:
            return
        is_first = not bad_in(source)[0]
        of_inputs = " from finite inputs" if is_first else ""
        text = f"the forward pass of micro-batch {order[0] + 1}: {in_words(bad)} that {name} made{of_inputs}"
        finding = Finding(order, text, name, is_fused)
        if is_first:
            self.from_finite = finding
        self.passed_on = self.passed_on or finding

    def gradient_hook(
        self, chunk: int, name: str, before: str, is_parameter: bool
    ) -> Callable[[Tensor], None]:
        stage = self.order(chunk)[1]

        def see(grad: Tensor) -> None:
            self.calls += 1
            if is_parameter in self.gradients:
                return
            bad = bad_in(grad)
            if bad[0]:
                text = f"the gradient of {before}{name} ({in_words(bad)})"
                # The backward pass goes from the last stage to the first.
                self.gradients[is_parameter] = Finding([-stage, self.calls], text, name)

        return see

    def gradient(self) -> Finding | None:
        """Return the first gradient that was not finite; a parameter's, if that came later, too."""
        if not self.gradients:
            return None
        first, *rest = sorted(self.gradients.values())
        then = f", then {rest[0].text}" if rest and first is not self.gradients.get(True) else ""
        return first._replace(text=f"the backward pass: {first.text}{then}")
