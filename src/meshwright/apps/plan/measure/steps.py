"""Real steps on the meta device: the network of a rank is built and trained as a run would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from meshwright.apps.plan.measure.account import META, Account, Observer, StepObserver, StepRecord
from meshwright.apps.plan.measure.pretend import pretended_rank
from meshwright.config.fields import with_settings
from meshwright.config.schema import TrainConfig
from meshwright.data.loader import Batch
from meshwright.kernels.gradients import main_grad_of
from meshwright.model import pick
from meshwright.parallel import pipeline
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.layout import Layout
from meshwright.parallel.pipeline import stages
from meshwright.parallel.pipeline_schedule import Action
from meshwright.training import network
from meshwright.training.micro_step import Network, update_weights
from meshwright.training.network import Model, Spec, build_network
from meshwright.training.parameters import WIDTHS
from meshwright.training.sizes import rows
from meshwright.training.step import StepSettings, train_step

SETTINGS = StepSettings(seed=1, lr=1e-3, weight_decay=0.1)  # any do: no tensor has numbers


class Extent(NamedTuple):
    """How much is measured."""

    micro_batches: int  # of a step
    steps: int
    chunks: Sequence[int] = ()  # through which a pipeline runs one micro-batch after the other


def measure_layers(
    config: TrainConfig,
    padded: int,
    pipeline_rank: int,
    layers: Collection[int],
    extent: Extent,
    recorder: StepObserver | None,
    model: Model | None = None,
) -> StepRecord:
    """Take steps with these layers of a rank alone."""
    account = Account(recorder)
    with contextlib.ExitStack() as stack:
        layout = stack.enter_context(pretended_rank(config, pipeline_rank, account))
        stack.enter_context(account)
        stack.enter_context(only(config, layers))
        if extent.chunks:
            stack.enter_context(mock.patch.object(pipeline, "schedule", one_by_one(extent.chunks)))
        net = build(config, padded, layout, account, model)
        find_gradients(net)
        on_device = sample_batch(config).to(META)
        take_steps(net, [on_device] * extent.micro_batches, account, extent.steps)
        return account.record


def measure_update(
    config: TrainConfig,
    padded: int,
    pipeline_rank: int,
    layers: Collection[int] | None,
    recorder: StepObserver,
    model: Model | None,
) -> StepRecord:
    """Update the parameters of these layers, or of all, after their gradients have been summed."""
    account = Account(recorder)
    with pretended_rank(config, pipeline_rank, account) as layout, account, only(config, layers):
        net = build(config, padded, layout, account, model)
        if isinstance(net.store, FlatStore):
            net.store.added |= net.store.bucket_of.keys()  # no loss has left any out
        numbers = torch.zeros(
            5, dtype=torch.float64, device=META if net.store.reads_tensors else "cpu"
        )
        totals = torch.zeros(len(net.update_columns), dtype=torch.float64, device=META)
        Observer(account, net).begin_step()
        update_weights(net, numbers, totals)
        return account.record


def build(
    config: TrainConfig, padded: int, layout: Layout, account: Account, model: Model | None = None
) -> Network:
    """Build the network of a rank, and count what it holds."""
    config = with_settings(config, cpu_optimizer=False)  # what is on the host has no part in it
    net = build_network(Spec(config, layout, META, padded, padded, model))
    account.kinds = kinds_by_size(config, padded, net)
    if not isinstance(net.store, FlatStore):
        averages: Sequence[torch.Tensor] = net.store.average.values if net.store.average else ()
        state = (x for part in net.store.update_ranges for x in (part.master, *part.state.values()))
        account.hold_only([*state, *averages])
    return net


def kinds_by_size(config: TrainConfig, padded: int, net: Network) -> dict[int, str]:
    """Return the kinds as which tensors of some sizes, in bytes, are counted in a step."""
    low = WIDTHS[config.precision.dtype]
    has_head = any(getattr(part, "has_head", True) for part in net.parts)
    kinds = {}
    if has_head:
        kinds[rows(config) * padded // net.layout.tp * low] = "logits"
    if isinstance(net.store, FlatStore) and not net.store.keeps_gradients:
        buckets = [bucket.size * max(low, 4) for bucket in net.store.buckets.values()]
        kinds |= {
            size // parts: "gradients" for size in buckets for parts in (1, net.store.shard_count)
        }
    return kinds


def find_gradients(net: Network) -> None:
    """Make the views of gradients that the first step of a run makes, and later ones find."""
    if isinstance(net.store, FlatStore) and net.store.keeps_gradients:
        for part in net.parts:
            for parameter in part.parameters():
                if (main_grad := main_grad_of(parameter)) is not None:
                    main_grad.begin()


def take_steps(net: Network, batches: list[Batch], account: Account, steps: int) -> None:
    observer = Observer(account, net)
    for _ in range(steps):
        observer.begin_step()
        train_step(net, batches, SETTINGS)


def sample_batch(config: TrainConfig) -> Batch:
    """Return a micro-batch on the host."""
    d = config.data
    cp = config.parallel.context_parallel_size
    batch = config.micro_batch
    masks_loss, resets_positions, resets_attention = d.document_effects
    length = d.seq_length or 0
    ids = torch.zeros(batch, length // cp, dtype=torch.int64)
    mask = torch.ones(batch, length // cp) if masks_loss else None
    documents = torch.zeros(batch, length, dtype=torch.int32) if resets_attention else None
    return Batch(
        ids,
        ids.clone(),
        torch.arange(batch),
        mask,
        ids.clone() if resets_positions else None,
        documents,
    )


# A network of few layers


@contextlib.contextmanager
def only(config: TrainConfig, layers: Collection[int] | None) -> Iterator[None]:
    """Let networks be built with these layers alone."""
    if layers is None:
        yield
        return
    with (
        mock.patch.object(pick, "pick", pick_few(layers)),
        mock.patch.object(network, "stages", few_stages(config)),
    ):
        yield


class FewBlocks:
    """A maker of the layers that are measured, which makes nothing in the place of others."""

    def __init__(self, block: Any, layers: Collection[int]) -> None:
        self.block, self.layers, self.end = block, set(layers), block.end

    def __call__(self, m: Any, layer: int, options: Any) -> nn.Module:
        return self.block(m, layer, options) if layer in self.layers else Missing()


class Missing(nn.Module):
    """A layer that is not measured."""


def pick_few(layers: Collection[int]) -> Callable[..., tuple[Any, str]]:
    """Return what picks the kind of block for these layers."""
    all_layers = pick.pick

    def choose(*args: Any) -> tuple[Any, str]:
        block, execution = all_layers(*args)
        return FewBlocks(block, layers), execution

    return choose


def few_stages(config: TrainConfig) -> Callable[..., list[Any]]:
    """Return what makes a rank's stages without the layers that are not measured."""
    t = config.training

    def make(*args: Any) -> list[Any]:
        parts = stages(*args)
        for part in parts:
            again = set([*part.h][: t.recompute_num_layers])
            for name, layer in list(part.h.items()):
                if isinstance(layer, Missing):
                    del part.h[name]
            if t.recompute_method == "block":
                part.options = replace(part.options, recompute_layers=len(again & {*part.h}))
        return parts

    return make


def one_by_one(chunks: Sequence[int]) -> Callable[..., list[Action]]:
    """Return a schedule in which each micro-batch passes through these chunks alone."""

    def make(name: Any, pp: int, rank: int, count: int, _: int) -> list[Action]:
        actions = list[Action]()
        for i in range(count):
            actions += [Action("F", chunk, i) for chunk in chunks]
            actions += [Action("B", chunk, i) for chunk in reversed(chunks)]
        return actions

    return make
