"""Real steps on the meta device: the network of a rank is built and trained as a run would."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.apps.plan.measure.account import META, Account, observed
from meshwright.apps.plan.measure.pretend import pretended_rank
from meshwright.config.schema import TrainConfig
from meshwright.data.loader import Batch
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.layout import Layout
from meshwright.training.network import Model, Spec, build_network
from meshwright.training.step import Network, StepSettings, train_step

SETTINGS = StepSettings(1, 1e-3, 0.1)


def account_steps(
    config: TrainConfig, padded: int, pipeline_rank: int, account: Account, steps: int = 2, model: Model | None = None
) -> int:
    """Take whole steps of a rank's micro-batches; return the bytes held before them."""
    with pretended_rank(config, pipeline_rank, account) as layout, account:
        net = build(config, padded, layout, account, model)
        held = account.peak = account.now
        take_steps(config, net, account, steps)
    return held


def build(config: TrainConfig, padded: int, layout: Layout, account: Account, model: Model | None = None) -> Network:
    """Build the network of a rank, and count what it holds."""
    net = build_network(Spec(config, layout, META, min(padded, 1000), padded, model))
    if not isinstance(net.store, FlatStore):
        averages: Sequence[torch.Tensor] = net.store.average.values if net.store.average else ()
        state = (x for part in net.store.update_ranges for x in (part.master, *part.state.values()))
        account.hold_only([*state, *averages])
    return net


def take_steps(config: TrainConfig, net: Network, account: Account, steps: int) -> None:
    """Take steps of all micro-batches."""
    batches = [sample_batch(config)] * config.micro_batches(config.global_batch)
    with observed(account, net) as observer:
        for _ in range(steps):
            observer.begin_step()
            train_step(net, batches, SETTINGS)


def sample_batch(config: TrainConfig) -> Batch:
    """Return a micro-batch, which the meta device has no copy of."""
    d, columns = config.data, (config.data.seq_length or 0) // config.parallel.context_parallel_size
    ids = torch.zeros(config.micro_batch, columns, dtype=torch.int64)
    mask = torch.ones(config.micro_batch, columns) if d.eod_mask_loss else None
    samples = torch.arange(config.micro_batch)
    return Batch(ids, ids, samples, mask, ids if d.reset_position_ids else None)
