"""Whole steps on the meta device, with all layers, beside which plans of few layers are checked."""

from __future__ import annotations

from meshwright.apps.plan.measure.account import Account
from meshwright.apps.plan.measure.pretend import pretended_rank
from meshwright.apps.plan.measure.steps import build, sample_batch, take_steps
from meshwright.config.schema import TrainConfig
from meshwright.training.network import Model


def account_steps(
    config: TrainConfig,
    padded: int,
    pipeline_rank: int,
    account: Account,
    steps: int = 2,
    model: Model | None = None,
) -> int:
    """Take whole steps of a rank with all layers; return the bytes held before them."""
    with pretended_rank(config, pipeline_rank, account) as layout, account:
        net = build(config, padded, layout, account, model)
        held = account.peak = account.now
        batches = [sample_batch(config)] * config.micro_batches(config.global_batch)
        take_steps(net, batches, account, steps)
    return held
