"""`train --verify-layout N`: verify the layout of a run before it begins."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from meshwright import console

if TYPE_CHECKING:
    import torch

    from meshwright.parallel.layout import Layout
    from meshwright.ranks.team import Team
    from meshwright.settings.schema import TrainConfig
    from meshwright.training.run import Job


def rehearse(config: TrainConfig, layout: Layout, device: torch.device, team: Team, job: Job) -> None:
    """Verify the layout of a run before it begins, and stop the run if it differs."""
    from meshwright.verify.certificate import verify
    from meshwright.verify.small_run import Place

    groups = layout.groups
    place = Place(team, device, lambda one: dataclasses.replace(one, groups=dict(groups)), job.model, job.loss)
    verify(config, place, job.command, lambda made, line: console.remark(f" > {line}"))
