"""What a step allocates and computes on torch's meta device, section by section.

`Account` sees every operation of torch's. It counts each storage from its first tensor until Python
lets go of it, rounded as torch's caching allocator rounds, and knows at any moment in which section
of the step it is: `observe` hooks the sections into a network from the outside. A `Recorder` is
told about every operation, kernel and attention with the section that it runs in.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.apps.plan.measure.allocator import MemoryEvent, rounded
from meshwright.model.recompute import AttentionResults
from meshwright.parallel.pipeline_schedule import Action
from meshwright.training.micro_step import Network

META = torch.device("meta")


Phase = Literal[
    "set-up",
    "begin",  # of a step
    "embedding",  # and all else before the first layer; a stage without one receives a message
    "layer",
    "head",  # the last norm, logits and loss
    "head backward",
    "layer backward",
    "embedding backward",
    "end",  # of a pipeline's passes: the last messages arrive
    "update",
]


class Section(NamedTuple):
    """A part of a step. Layers are counted from 0 within a chunk, whatever their numbers are."""

    phase: Phase
    layer: int | None = None
    micro_batch: int = 0
    chunk: int = 0


SETUP = Section("set-up")


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results, in their order.

    `tree_leaves` does the same for more kinds of containers, in many times the time.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, (list, tuple)):
        return []
    found: list[Tensor] = []
    for each in value:
        found += tensors_in(each)
    return found


class StepObserver:
    """A listener that is told of each operation and its section; this one forgets them."""

    def operation(self, func: Any, args: Any, kwargs: Any, out: Any, section: Section) -> None:
        """Note an operation of torch's, such as `torch.ops.aten.mm.default`."""

    def launch(
        self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], section: Section
    ) -> None:
        """Note the launch of a Triton kernel."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, is_backward: bool, section: Section
    ) -> None:
        """Note causal attention by torch's flash kernel, of tensors [B, heads, T, width]."""

    def fused(self, name: str, tensors: Iterable[Any], section: Section) -> None:
        """Note a kernel of torch's that the meta device lacks, with what it reads and writes."""

    def collective(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], section: Section
    ) -> None:
        """Note a collective or a message, with the arguments of its function."""


class StepRecord(NamedTuple):
    """What was allocated and freed, in order, and where each section begins."""

    # The key of an event is the number of the event that allocates its memory.
    events: list[MemoryEvent]
    marks: list[tuple[int, Section]]  # each section, with the number of its first event


@dataclass(slots=True)
class Held:
    """The memory of a storage; it has no key while it is empty."""

    size: int
    kind: str
    stream: int
    key: int | None = None


class Account(TorchDispatchMode):
    """A count of the bytes of all tensors that are made on the meta device within its block."""

    def __init__(self, recorder: StepObserver | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder or StepObserver()
        self.now = self.peak = 0
        self.events: list[MemoryEvent] = []
        self.section = SETUP
        self.marks = [(0, SETUP)]
        self.kinds: dict[int, str] = {}  # of tensors of so many bytes; most others are activations
        self.held: Any = WeakIdKeyDictionary()  # by storage
        self.kept: AttentionResults | None = None  # of the layers that run now, if they run again
        # Of each stream: its number, in the order of their first use, and what is allocated there.
        self.streams = {torch.cpu.current_stream(): (0, "activations")}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True wraps each call of what follows, which takes as long as the call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch 2.11 cannot add a product to a matrix of another format on the meta device.
        is_missing = func is torch.ops.aten.addmm.dtype_out
        out = kwargs["out"] if is_missing else func(*args, **kwargs)
        self.recorder.operation(func, args, kwargs, out, self.section)
        for x in tensors_in(out):
            self.note(x)
        return out

    @contextlib.contextmanager
    def keeping(self, kept: AttentionResults) -> Iterator[None]:
        """Let the stand-in of attention keep its results, as torch's kernels do."""
        self.kept = kept
        try:
            yield
        finally:
            self.kept = None

    @property
    def record(self) -> StepRecord:
        """What has been counted so far."""
        return StepRecord(list(self.events), list(self.marks))

    def enter(self, section: Section) -> None:
        """Count what follows to another section."""
        if section != self.section:
            self.section = section
            self.marks.append((len(self.events), section))

    def note(self, x: Tensor) -> None:
        """Count a tensor's storage, unless it is known, until Python lets go of it."""
        # A DTensor has no storage: its local tensor is counted when torch makes that.
        storage = x.untyped_storage()
        if x.device != META or isinstance(x, DTensor) or storage in self.held:
            return
        # fully_shard gathers weights in streams of its own, and sums gradients in another one.
        new = len(self.streams), "gradients" if is_backward() else "weights"
        stream, kind = self.streams.setdefault(torch.cpu.current_stream(), new)
        size = storage.nbytes()
        held = Held(rounded(size), self.kinds.get(size, kind), stream)
        self.held[storage] = held
        self.fill(held)
        weakref.finalize(storage, self.empty, held)

    def fill(self, held: Held) -> None:
        """Allocate the memory of a storage."""
        # fully_shard may fill what is full already, and empty what is empty.
        if held.key is None:
            held.key = len(self.events)
            self.events.append(MemoryEvent(held.key, held.size, held.kind, held.stream))
            self.now += held.size
            self.peak = max(self.peak, self.now)

    def empty(self, held: Held) -> None:
        """Free it."""
        if held.key is not None:
            self.events.append(MemoryEvent(held.key, -held.size, held.kind, held.stream))
            self.now -= held.size
            held.key = None

    def hold(self, x: Tensor, is_held: bool) -> None:
        """Count a tensor whose storage fully_shard filled or emptied."""
        held = self.held[x.untyped_storage()]
        held.kind = "weights"
        self.fill(held) if is_held else self.empty(held)

    def hold_only(self, tensors: Iterable[Tensor]) -> None:
        """Forget all others so far: those that fully_shard has before there is memory for them."""
        for held in self.held.values():
            self.empty(held)
        for x in tensors:
            self.hold(x, True)


class Observer:
    """Hooks that tell an account which section of its steps a network is in.

    They are in modules, in the nodes of autograd's graph and around methods of the network's parts,
    and hold on to no tensor.
    """

    def __init__(self, account: Account, net: Network) -> None:
        self.account = account
        self.micro_batch = -1
        self.chunk = 0
        for part in net.parts:
            self.hook_part(part, counts=net.pipeline is None)
        # The store's calls mark where the backward pass and the update begin.
        self.wrap(net.store, "begin_backward", self.begin_backward)
        self.wrap(net.store, "step", self.begin_update)
        if net.pipeline is not None:
            run = net.pipeline._run
            net.pipeline._run = lambda actions, *more: run(self.announced(actions), *more)  # type: ignore[method-assign,arg-type]

    def enter(self, phase: Phase, layer: int | None = None) -> None:
        self.account.enter(Section(phase, layer, self.micro_batch, self.chunk))

    def begin_step(self) -> None:
        self.micro_batch = -1
        self.chunk = 0
        self.enter("begin")

    def begin_update(self, *_: Any) -> None:
        self.micro_batch = -1
        self.chunk = 0
        self.enter("update")

    def begin_backward(self, *_: Any) -> None:
        if self.micro_batch >= 0:  # the store calls it once more before the first one
            self.enter("head backward")

    def announced(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Note each pass of a pipeline's schedule before it begins."""
        for action in actions:
            self.micro_batch = action.microbatch
            self.chunk = action.chunk
            self.enter("embedding" if action.op == "F" else "head backward")
            yield action
        self.micro_batch = -1
        self.chunk = 0
        self.enter("end")

    def wrap(self, owner: Any, name: str, before: Callable[..., None]) -> None:
        """Call a function with the same arguments before each call of a method."""
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            before(*args)
            return method(*args, **kwargs)

        setattr(owner, name, call)

    def hook_part(self, part: nn.Module, counts: bool) -> None:
        """Hook into a stage's forward pass; `counts`: each call of it is the next micro-batch."""
        layers = layer_numbers(part)

        def begin(*_: Any) -> None:
            # A pipeline says the number itself, by its schedule.
            self.micro_batch += counts
            self.enter("embedding")

        part.register_forward_pre_hook(begin, prepend=True)
        # The first layer's inputs and the last one's outputs are the ends of the layers' part.
        for number, layer in enumerate(layers):
            is_last = number == len(layers) - 1
            self.hook_layer(layer, number, is_last)

    def hook_layer(self, layer: nn.Module, number: int, is_last: bool) -> None:
        def begin(_: nn.Module, inputs: Any) -> None:
            if is_backward():  # a recomputation belongs to the backward pass
                return
            if number == 0:
                self.before_backward(inputs, "embedding backward")
            self.enter("layer", number)

        def end(_: nn.Module, __: Any, outputs: Any) -> None:
            if is_backward():
                return
            self.before_backward(outputs, "layer backward", number)
            if is_last:
                self.enter("head")

        layer.register_forward_pre_hook(begin, prepend=True)
        layer.register_forward_hook(end)

    def before_backward(self, tensors: Any, phase: Phase, layer: int | None = None) -> None:
        """Enter a section when the backward pass comes to what made these tensors.

        Autograd runs the functions in the order of their numbers, the last one first.
        """
        nodes = [
            x.grad_fn
            for x in tree_leaves(tensors)
            if isinstance(x, Tensor) and x.grad_fn is not None
        ]
        if nodes:
            section = Section(phase, layer, self.micro_batch, self.chunk)

            def enter(_: Any) -> None:
                self.micro_batch = section.micro_batch
                self.chunk = section.chunk
                self.account.enter(section)

            max(nodes, key=lambda node: node._sequence_nr()).register_prehook(enter)


def layer_numbers(part: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that has them where GPT does."""
    return list(getattr(part, "h", nn.ModuleDict()).children())


def is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
