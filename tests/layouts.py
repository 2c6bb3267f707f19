"""Train one small network with any flags on any number of ranks, and compare it with one process.

A layout is a line of flags. Every process runs the real Trainer; only the data and the log are
stand-ins. Ranks are forked once for many lines.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.apps.verify.baseline import alone as alone
from meshwright.apps.verify.compare import relative
from meshwright.apps.verify.compare import rows_of as rows_of
from meshwright.base import console
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.runtime.ranks.team import Team
from meshwright.training import small_run
from meshwright.training.small_run import Connected, RankSetup
from on_ranks import make_team, run_ranks

TIMEOUT = datetime.timedelta(minutes=2)  # so that a deadlock fails and shows where
NEAR = 1e-9
VOCAB = 37  # prime
FLAGS = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-2 --lr-decay-style constant --weight-decay 0.1
    --clip-grad 0.25 --hidden-dropout 0.1 --attention-dropout 0 --seed 7 --eval-iters 1 --mock-data --vocab-size 37
    --make-vocab-size-divisible-by 8 --num-workers 0 --device cpu --params-dtype float64 --log-params-norm
"""


@functools.cache
def parse(line: str, check: bool = True) -> TrainConfig:
    words = [*FLAGS.split(), *line.split()]
    return flags.parse_settings(TrainConfig, words, "meshwright test", check=check).config


# Runs and their records


# (name of the run, trainer, step) -> context manager entered for each step.
Around = Callable[[str, Any, int], contextlib.AbstractContextManager[Any]]


def untouched(name: str, trainer: Any, step: int) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def trained(
    config: TrainConfig, steps: int, around: Around = untouched, name: str = "", connect: Any = None
) -> Any:
    """Train for some steps and validate; return the trainer."""
    team = make_team() if config.world > 1 else Team()
    trainer = small_run.start_trainer(
        config, RankSetup(team, connect=connect or (lambda layout: layout))
    )
    for step in range(steps):
        with around(name, trainer, step):
            trainer.step()
    trainer.validation.validate("valid", is_at_end=True)
    return trainer


def _train_all(
    folder: str,
    jobs: list[tuple[str, TrainConfig]],
    steps: int,
    around: Around,
    read: Callable[[Any], Any],
) -> None:
    console.set_stream(None)
    team = make_team()
    connected, results = Connected(TIMEOUT), []
    for name, config in jobs:
        if team.is_rank_0:
            Path(folder, "now").write_text(name)
        try:
            results.append(team.gather(read(trained(config, steps, around, name, connected))))
        except Exception as error:
            note(error, f"with {name}")
            raise
    if team.is_rank_0:
        Path(folder, "results").write_text(json.dumps(results))


Rows = list[list[float]]


def note(error: BaseException, text: str) -> None:
    """Add a line to an error, where Python can."""
    if sys.version_info >= (3, 11):
        error.add_note(text)


def run_all(
    configs: dict[str, TrainConfig],
    world: int,
    steps: int = 10,
    around: Around = untouched,
    read: Callable[[Any], Any] = rows_of,
) -> dict[str, list[Any]]:
    """Run each configuration; return name -> what `read` returns of each rank's trainer."""
    jobs = sorted(configs.items(), key=lambda job: (sizes(job[1]), job[0]))
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks(_train_all, world, folder, jobs, steps, around, read)
        except BaseException as error:
            now = Path(folder, "now")
            note(
                error, f"{world} ranks were at: {now.read_text() if now.exists() else 'the start'}"
            )
            raise
        results = json.loads(Path(folder, "results").read_text())
    return dict(zip((name for name, _ in jobs), results, strict=True))


def sizes(config: TrainConfig) -> tuple[int, ...]:
    p = config.parallel
    return (
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
        p.context_parallel_size,
        config.dp,
        p.num_distributed_optimizer_instances,
    )


def compared(
    configs: list[TrainConfig], steps: int = 10, around: Around = untouched
) -> list[tuple[TrainConfig, list[Rows], Rows]]:
    """Return each configuration with the rows of its ranks and those of one process."""
    ones = {repr(alone(c)): alone(c) for c in configs}
    plain = run_all(ones, 1, steps, around)
    got: dict[str, list[Rows]] = {}
    for world in sorted({c.world for c in configs}):
        got |= run_all({repr(c): c for c in configs if c.world == world}, world, steps, around)
    return [(c, got[repr(c)], plain[repr(alone(c))][0]) for c in configs]


def furthest(got: Rows, want: Rows) -> float:
    """Return the largest relative difference."""
    return max(
        itertools.starmap(relative, zip(itertools.chain(*got), itertools.chain(*want), strict=True))
    )


def column(name: str, rows: Rows) -> list[float]:
    return [row[small_run.COLUMNS.index(name)] for row in rows]


def check(configs: list[TrainConfig], steps: int = 10, around: Around = untouched) -> None:
    """Check that all ranks record the same, and what one process records to 1e-9."""
    wrong = []
    for config, ranks, want in compared(configs, steps, around):
        if not (far := furthest(ranks[0], want)) < NEAR:
            wrong.append(f"{far:.1e} from one process: {config}\n    {ranks[0]}\n    {want}")
        if any(rows != ranks[0] for rows in ranks):
            wrong.append(f"ranks differ: {config}\n    {ranks}")
        assert min(column("grad_norm", want[:-1])) > config.optimizer.clip_grad
    assert not wrong, "\n".join(wrong)
