"""Run a command that reads a trained model on one or several ranks, in the layout of its flags.

Rank 0 alone reads prompts and texts, chooses tokens and prints; the others compute what it calls
(see sharded.py). So such commands are written for one process and work in every layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshwright.base import console
from meshwright.base import device as devices
from meshwright.base.errors import DONE
from meshwright.config import flags
from meshwright.config.schema import ReadConfig
from meshwright.generation import language_model
from meshwright.generation.language_model import LanguageModel
from meshwright.optim.loss_scale import dtype_of
from meshwright.parallel.layout import Layout, connect
from meshwright.runtime.ranks.compare import require_equal
from meshwright.runtime.ranks.connect import join_ranks, pick_backend
from meshwright.runtime.ranks.lost import reporting
from meshwright.runtime.ranks.team import Team
from meshwright.runtime.ranks.world import World


def run_on_ranks(
    c: ReadConfig,
    world: World,
    given: Mapping[str, Any],
    work: Callable[[LanguageModel], object],
    *,
    copies: bool,
    stops: bool,
    folders: Sequence[str],
) -> int:
    """Load the model in the layout of the flags, on all its ranks, and call `work` on rank 0.

    With `copies` all ranks that were started take part, with several copies of the model if they
    are more than one needs. Otherwise the ranks after the first copy end. Set `stops` if
    `work` handles Ctrl-C and SIGTERM itself; the other ranks then keep running until it returns.
    `folders` are loaded one after the other instead of --load.
    """
    p = c.parallel
    size = world.size if copies else min(world.size, p.model_ranks)
    world = dataclasses.replace(world, size=size, local_size=min(world.local_size, size))
    device = devices.open_device(p.device, world.local_rank)
    if world.size > 1 and threading.current_thread() is threading.main_thread():
        # Ctrl-C ends every rank at once; Python's handler would wait for a collective to return
        if not stops:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        elif world.rank:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
    with reporting(world, p.distributed_timeout_minutes):
        backend = pick_backend(p, device, world.rank == 0)
        team = join_ranks(
            world, backend, p.distributed_timeout_minutes, device, p.start_timeout_seconds
        )
        if not team.is_rank_0:
            console.set_stream(None)
        serve_ranks(c, given, work, device, team, folders)
    return DONE


def serve_ranks(
    c: ReadConfig,
    given: Mapping[str, Any],
    work: Callable[[LanguageModel], object],
    device: torch.device,
    team: Team,
    folders: Sequence[str] = (),
) -> None:
    """Load this rank's part of each folder's model and call `work` on rank 0; the others follow."""
    p = c.parallel
    settings = flags.to_dict(c)
    require_equal(team, {name: value for name, value in settings.items() if name != "local_rank"})
    tp, pp, cp = (
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
        p.context_parallel_size,
    )
    layout = connect(Layout(pp, 1, team.size // p.model_ranks, cp, tp, team.rank), team.timeout)
    for folder in folders or [c.checkpoint.load or ""]:
        with console.shortened():
            m = language_model.load_model(
                folder, given, c.tokenizer, dtype_of(c.precision), device, layout=layout, team=team
            )
        calls = m.sharded.calls if m.sharded is not None else None
        if calls is not None and not team.is_rank_0:
            if not calls.follow():
                return
            continue
        succeeded = False
        try:
            work(m)
            succeeded = True
        finally:
            with contextlib.suppress(RuntimeError):  # if another rank is gone, that is reported
                if calls is not None:
                    calls.end(succeeded)
