"""Train one small network with any flags on any number of ranks; cover all pairs of flags.

A layout is a line of flags. Every process runs the real Trainer; only the data and the log are
stand-ins. Ranks are forked once for many lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from meshwright.config import checks, flags, notices
from meshwright.config.schema import TrainConfig
from meshwright.runtime.ranks.team import Team
from meshwright.training import small_run
from meshwright.training.small_run import Connected, RankSetup
from on_ranks import make_team, run_ranks

TIMEOUT = datetime.timedelta(minutes=2)  # so that a deadlock fails and shows where
NEAR = 1e-9
MOST_RANKS = 8
VOCAB = 37  # prime
COVERING = Path(__file__).with_name("covering_cases.txt")
FLAGS = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-2 --lr-decay-style constant --weight-decay 0.1
    --clip-grad 0.25 --hidden-dropout 0.1 --attention-dropout 0 --seed 7 --eval-iters 1 --mock-data --vocab-size 37
    --make-vocab-size-divisible-by 8 --num-workers 0 --device cpu --params-dtype float64 --log-params-norm
"""


@functools.cache
def parse(line: str) -> TrainConfig:
    return flags.parse_settings(
        TrainConfig, [*FLAGS.split(), *line.split()], "meshwright test"
    ).config


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
    lines: list[str], steps: int = 10, around: Around = untouched
) -> dict[str, tuple[list[Rows], Rows]]:
    """Return, for each line of flags, the rows of its ranks and those of one process."""
    configs = {line: parse(line) for line in lines}
    ones = {repr(alone(c)): alone(c) for c in configs.values()}
    plain = run_all(ones, 1, steps, around)
    got: dict[str, list[Rows]] = {}
    for world in sorted({c.world for c in configs.values()}):
        got |= run_all(
            {line: c for line, c in configs.items() if c.world == world}, world, steps, around
        )
    return {line: (got[line], plain[repr(alone(c))][0]) for line, c in configs.items()}


def furthest(got: Rows, want: Rows) -> float:
    """Return the largest relative difference."""
    return max(
        itertools.starmap(relative, zip(itertools.chain(*got), itertools.chain(*want), strict=True))
    )


def column(name: str, rows: Rows) -> list[float]:
    return [row[small_run.COLUMNS.index(name)] for row in rows]


def check(lines: list[str], steps: int = 10, around: Around = untouched) -> float:
    """Check that all ranks record the same, and what one process records to 1e-9."""
    wrong, most = [], 0.0
    for line, (ranks, want) in compared(lines, steps, around).items():
        far = furthest(ranks[0], want)
        most = max(most, far)
        if not far < NEAR:
            wrong.append(f"{far:.1e} from one process: {line}\n    {ranks[0]}\n    {want}")
        if any(rows != ranks[0] for rows in ranks):
            wrong.append(f"ranks differ: {line}\n    {ranks}")
        assert len(want) == steps + 1 and all(
            norm > parse("").optimizer.clip_grad for norm in column("grad_norm", want[:-1])
        )
    assert not wrong, "\n".join(wrong)
    return most


# Sets of flags

# Dimension -> value -> flags. The first value of each is legal with any others.
LAYOUT = {
    "tensor": {str(n): f"--tensor-model-parallel-size {n}" if n > 1 else "" for n in (1, 2, 4)},
    "pipeline": {str(n): f"--pipeline-model-parallel-size {n}" if n > 1 else "" for n in (1, 2, 4)},
    "context": {str(n): f"--context-parallel-size {n}" if n > 1 else "" for n in (1, 2)},
    "data": {str(n): "" for n in (1, 2, 4)},
    "zero": {
        "0": "",
        "1": "--use-distributed-optimizer",
        "2": "--zero-stage 2",
        "3": "--zero-stage 3",
    },
    "sequence": {"whole": "", "parallel": "--sequence-parallel"},
    "schedule": {
        "1f1b": "",
        "gpipe": "--pipeline-schedule gpipe",
        "interleaved": "--num-layers 8 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8",
        "interleaved by hand": "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --pipeline-layout 3,1,1,3 "
        "--global-batch-size 8",
    },
    "split": {
        "even": "",
        "uneven": "--num-layers 5",
        "by hand": "--pipeline-layout 1,3",
        "by list": "--num-layers 5 --pipeline-layout [0]+[1]*2+[2,3]",
    },
    "copies": {"1": "", "2": "--num-distributed-optimizer-instances 2"},
}
OTHERS = {
    "micro": {"1": "", "2": "--micro-batch-size 2 --global-batch-size 8"},
    "recompute": {
        "full": "--recompute-granularity full",
        "uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "selective": "--recompute-granularity selective",
        "none": "",
    },
    "host": {"no": "", "state": "--cpu-optimizer", "shards": "--remote-device cpu"},
    "marks": {
        "none": "",
        "masks": "--eod-mask-loss --reset-attention-mask",
        "positions": "--eod-mask-loss --reset-position-ids",
    },
    "network": {
        "gpt2": "",
        "llama": "--use-rotary-position-embeddings --normalization RMSNorm --swiglu --ffn-hidden-size 48 "
        "--disable-bias-linear --num-query-groups 4 --untie-embeddings-and-output-weights --qk-layernorm",
        "bloom": "--position-embedding-type alibi --embed-layernorm --no-bias-gelu-fusion",
    },
}
DIMENSIONS = LAYOUT | OTHERS
FIRST = {name: next(iter(values)) for name, values in OTHERS.items()}
Case = dict[str, str]  # dimension -> value


def ranks_of(case: Case) -> int:
    return int(case["tensor"]) * int(case["pipeline"]) * int(case["context"]) * int(case["data"])


def line_of(case: Case) -> str:
    return " ".join(
        [
            f"--world-size {ranks_of(case)}",
            *(DIMENSIONS[n][v] for n, v in case.items() if DIMENSIONS[n][v]),
        ]
    )


@functools.cache
def settings(line: str) -> dict[str, dict[str, Any]]:
    """Return group -> setting -> value for what these flags change."""
    got = flags.parse_settings(
        TrainConfig, [*FLAGS.split(), *line.split()], "meshwright test", check=False
    ).config
    out: dict[str, dict[str, Any]] = {}
    for f in dataclasses.fields(TrainConfig):
        group, plain = getattr(got, f.name), getattr(parse(""), f.name)
        for g in dataclasses.fields(group):
            if getattr(group, g.name) != getattr(plain, g.name):
                out.setdefault(f.name, {})[g.name] = getattr(group, g.name)
    return out


def config_of(case: Case, more: str = "") -> TrainConfig:
    """Return the parsed configuration without the slow parser; later flags win."""
    changed: dict[str, dict[str, Any]] = {"parallel": {"world_size": ranks_of(case)}}
    for line in (*(DIMENSIONS[name][value] for name, value in case.items()), more):
        for group, values in settings(line).items():
            changed[group] = changed.get(group, {}) | values
    return dataclasses.replace(
        parse(""),
        **{
            g: dataclasses.replace(getattr(parse(""), g), **values) for g, values in changed.items()
        },
    )


def is_legal(case: Case) -> bool:
    """Whether no flag is refused or without effect, which would cover a pair in name only."""
    config = config_of(case)
    return not notices.without_effect(config) and not checks.problems(config)


def legal_layouts() -> list[Case]:
    names = [n for n in LAYOUT if n not in ("tensor", "pipeline", "context", "data")]
    out = []
    for t, p, c, d in itertools.product(
        *(LAYOUT[n] for n in ("tensor", "pipeline", "context", "data"))
    ):
        if int(t) * int(p) * int(c) * int(d) > MOST_RANKS:
            continue
        for values in itertools.product(*(LAYOUT[n] for n in names)):
            case = {
                "tensor": t,
                "pipeline": p,
                "context": c,
                "data": d,
                **dict(zip(names, values, strict=True)),
            }
            if is_legal(case):
                out.append(case)
    return out


Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs(case: Case) -> set[Pair]:
    return set(itertools.combinations(((n, case[n]) for n in DIMENSIONS if n in case), 2))


def legal_pairs(layouts: list[Case]) -> list[Pair]:
    """Return all pairs that occur in any legal case.

    For a pair with one of OTHERS it is enough to try the first values of the rest, which refuse
    nothing.
    """
    found = {p for case in layouts for p in itertools.combinations(case.items(), 2)}
    out = []
    items = [(name, value) for name, values in DIMENSIONS.items() for value in values]
    for a, b in itertools.combinations(items, 2):
        if a[0] == b[0]:
            continue
        if b[0] in LAYOUT:
            legal = (a, b) in found
        else:
            fits = (c for c in layouts if a[0] in OTHERS or c[a[0]] == a[1])
            legal = any(is_legal({**c, **FIRST, **dict([a, b])}) for c in fits)
        if legal:
            out.append((a, b))
    return out


@functools.cache
def covering_cases() -> list[Case]:
    """Return legal cases that cover every legal pair, as `python tests/layouts.py` wrote them."""
    cases: list[Case] = [
        dict(zip(DIMENSIONS, line.split("|"), strict=True))
        for line in COVERING.read_text().splitlines()
    ]
    return cases


def make_covering() -> tuple[list[Case], list[Pair]]:
    """Find few legal cases on few ranks in which every legal pair of values occurs; takes 10 s.

    Greedy: take the layout with the most missing pairs per cost for the first missing pair, then
    one dimension after the other the value with the most.
    """
    layouts = legal_layouts()
    wanted = legal_pairs(layouts)
    missing, cases = dict.fromkeys(wanted), []

    def gain(case: Case) -> int:
        return sum(p in missing for p in pairs(case))

    while missing:
        asked = dict(next(iter(missing)))
        fixed = {n: v for n, v in asked.items() if n in OTHERS}
        fits = [c for c in layouts if all(c[n] == v for n, v in asked.items() if n in LAYOUT)]
        fits.sort(key=lambda c: -gain(c | fixed) / cost(c))
        case = next(c for c in fits if is_legal({**c, **FIRST, **fixed}))
        for name in (n for n in OTHERS if n not in fixed):
            legal = [v for v in OTHERS[name] if is_legal({**FIRST, **fixed, **case, name: v})]
            case = {
                **case,
                name: max(reversed(legal), key=lambda v: gain({**case, **fixed, name: v})),
            }
        case = {n: {**case, **fixed}[n] for n in DIMENSIONS}
        cases.append(case)
        for p in pairs(case):
            missing.pop(p, None)
    return sorted(cases, key=cost), wanted


def cost(case: Case) -> int:
    """Estimate the time on few cores, spent in messages between ranks in every layer."""
    return 16 + ranks_of(case) * int(case["tensor"]) * int(case["context"])


if __name__ == "__main__":
    COVERING.write_text("".join("|".join(case.values()) + "\n" for case in make_covering()[0]))
