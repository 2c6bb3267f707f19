"""Groups of ranks that live for many cases, and the outcome of a case.

A crew is up to eight processes, forked from a server that has imported torch and Meshwright. Its
first process also runs the case in one process. Each leg makes its process groups anew. After a
failure, a hang or a number of cases, a crew is replaced by a fresh one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fuzz import cases
from fuzz.bugs import BUGS, SHARED
from fuzz.cases import WORDS, Case, Drawing, Leg, configs

multiprocessing.set_forkserver_preload(
    """torch torch.distributed torch._dynamo torch.distributed.fsdp torch.distributed.pipelining pytest
    meshwright.training.run meshwright.training.loop meshwright.checkpoint.background
    meshwright.compat.formats.megatron.writer meshwright.compat.formats.megatron.reader fuzz.trials""".split()
)
# A process that was forked from one that has asked for GPUs may not use them.
CONTEXTS = {
    "cpu": multiprocessing.get_context("forkserver"),
    "cuda": multiprocessing.get_context("spawn"),
}
LIMIT = 180.0  # seconds of a leg
LIVES = 100  # cases of a crew


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`kind`: equal, refused (by every rank before its first step), differs, failed or hung."""

    kind: str
    lines: tuple[str, ...] = ()
    most: float = 0.0  # the largest share of an allowed distance
    where: str = ""
    captured: int = 0  # legs that ended with steps in CUDA graphs

    @property
    def is_bad(self) -> bool:
        return self.kind in ("differs", "failed", "hung")


def write_data(folder: Path) -> None:
    """Write token files: documents of a few kinds, with and without many ends, joined of two parts.

    Those for the independent trainer, which reads no token files, are in NAME.npz.
    """
    from meshwright.data.files.merge import merge_pairs
    from meshwright.data.files.writer import Writer

    rng = np.random.RandomState(0)
    kinds = {
        "tiny": (12, 3, 12),
        "small": (120, 3, 12),
        "large": (300, 1, 40),
        "ends": (200, 3, 30),
    }
    for name, (documents, least, most) in kinds.items():
        made = []
        for n in range(documents):
            body = rng.randint(WORDS, size=rng.randint(least, most))
            if name == "ends" and n % 2:  # samples of ends alone: without any unmasked token
                body[:] = WORDS
            made.append(np.array([*body, WORDS]))
        parts = [str(folder / f"{name}{n}") for n in range(2)]
        for part, some in zip(parts, (made[: documents // 3], made[documents // 3 :]), strict=True):
            with Writer(part, np.uint16) as writer:
                for document in some:
                    writer.add(document)
                    writer.end_document()
        merge_pairs(parts, str(folder / name), True)
        np.savez(
            folder / name, tokens=np.concatenate(made), sizes=[len(document) for document in made]
        )


# In a rank


def serve(pipe: Any, log: str, data: str) -> None:
    """Run legs and references as they are asked for, until the pipe is closed."""
    import torch

    from meshwright.base import console
    from meshwright.base import device as devices

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = open(log, "w", buffering=1)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    devices.has_fp8 = lambda device: True  # products in fp8 are emulated
    os.fsync = lambda fd: None  # no case cuts the power
    gc.freeze()  # so that a collection looks at a leg's own objects only
    gc.freeze = gc.unfreeze = lambda: None
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.chdir(data)
    traces: list[Any] = []
    with contextlib.suppress(EOFError):
        while True:
            act, *values = pipe.recv()
            console.set_stream(None)
            try:
                answer = ("done", ACTS[act](traces, *values))
            except BaseException as error:
                from meshwright.base.errors import UserError

                kind = "refused" if isinstance(error, UserError) else "failed"
                answer = (kind, str(error) if kind == "refused" else traceback.format_exc(limit=-8))
            pipe.send(answer)


def run_one(traces: list[Any], case: Case, folder: str, is_closer: bool, bug: str) -> list[str]:
    """Write what one process records; return in what it differs from the independent trainer."""
    from fuzz import trials

    with BUGS[bug]() if bug in SHARED else contextlib.nullcontext():
        made = trials.references(case, trials.LOOKS if is_closer else 1)
        Path(folder, "one").write_bytes(pickle.dumps(made))
        return trials.unlike_plain(case, made) + trials.unlike_bf16(case, made)


class LegResult(NamedTuple):
    """What a rank says of its leg."""

    wrong: list[str]
    rows: dict[int, dict[str, float]]
    most: float  # of the allowed distances
    where: str
    graphs: str


def run_leg(
    traces: list[Any], case: Case, number: int, place: tuple[int, int], folder: str, bug: str
) -> LegResult:
    """Run a leg and compare it; `traces` holds those of the legs before."""
    from fuzz import trials
    from meshwright.training.graph_rule import reason_against

    rank, world = place
    if not number:
        traces.clear()
    config, leg, bare = (
        trials.leg_config(case, number, Path(folder, "run")),
        case.legs[number],
        None,
    )
    with joined(config, leg, rank, world, folder, number) as (team, layout):
        if not reason_against(config, trials.open_device(config, rank).type):
            without = Path(folder, f"bare{number}")  # where it begins as the leg does
            team.run_on_rank_0(lambda: copy_run(Path(folder, "run"), without))
            plain = trials.leg_config(case, number, without, has_graphs=False)
            bare = trials.train(plain, team, layout, leg.end if leg.lost else 0, case.spoilt)
        with BUGS[bug]() if bug else contextlib.nullcontext():
            write = trials.write_texts if "--decode" in leg.flags else None
            trace = trials.train(
                config, team, layout, leg.end if leg.lost else 0, case.spoilt, write=write
            )
    del team, layout
    gc.collect()  # a trainer has cycles, and its groups' threads live as long as it
    distances = trials.Distances(config)
    if Path(folder, "one").exists():  # else one process refused to train it
        distances.compare(trace, pickle.loads(Path(folder, "one").read_bytes()))  # noqa: S301, of our own
    if traces and case.legs[number - 1].flags == leg.flags:
        distances.repeated(trace, traces[-1])
    if bare is not None:
        distances.repeated(trace, bare, "with CUDA graphs")
    if trace.written and trace.written[0] != trace.written[1]:
        distances.wrong.append(
            f"a decoder with CUDA graphs writes {trace.written[1]}, without {trace.written[0]}"
        )
    if trace.graphs.startswith("off"):
        distances.wrong.append(f"CUDA graphs are {trace.graphs}")
    traces.append(trace)
    return LegResult(distances.wrong[:6], trace.rows, distances.most, distances.where, trace.graphs)


def copy_run(run: Path, to: Path) -> None:
    if run.exists():
        shutil.copytree(run, to)


@contextlib.contextmanager
def joined(
    config: Any, leg: Leg, rank: int, world: int, folder: str, number: int
) -> Iterator[tuple[Any, Any]]:
    """Connect the ranks of a leg; yield this one's team and layout."""
    import torch.distributed as dist

    from fuzz import trials
    from meshwright.parallel.layout import connect, layout_of
    from meshwright.runtime.ranks.connect import pick_backend
    from meshwright.runtime.ranks.team import Team
    from on_ranks import make_team

    team, layout, limit = Team(), layout_of(config, rank), datetime.timedelta(seconds=2 * LIMIT)
    has_group = world > 1 or "--own-group" in leg.flags
    with trials.without_triton() if "--no-triton" in leg.flags else contextlib.nullcontext():
        if has_group:
            device = trials.open_device(config, rank)
            backend = pick_backend(config.parallel, device)
            if backend != "gloo":
                backend = f"cpu:gloo,{device.type}:{backend}"
            store = f"file://{folder}/store{number}"
            dist.init_process_group(
                backend, init_method=store, rank=rank, world_size=world, timeout=limit
            )
        if world > 1:
            team, layout = make_team(), connect(layout, limit)
        elif has_group:
            layout = dataclasses.replace(
                layout, groups=dict.fromkeys(("gradients", "shard"), dist.group.WORLD)
            )
        try:
            yield team, layout
        finally:
            if has_group:
                dist.destroy_process_group()


def draw(traces: list[Any], seed: int, number: int, gpus: int) -> tuple[Case, Drawing]:
    return cases.draw(seed, number, gpus)


def share_gpu(traces: list[Any], rank: int, store: str) -> None:
    """Send tensors of one GPU between two ranks, as data-parallel ones do, by gloo."""
    import torch
    import torch.distributed as dist

    from meshwright.parallel import comm

    limit = datetime.timedelta(seconds=LIMIT)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit
    )
    try:
        x, part, both = (torch.arange(n, device="cuda:0", dtype=torch.float32) for n in (4, 2, 8))
        total = x + rank
        dist.all_reduce(total)
        comm.scatter_into(part, x + rank, group=dist.group.WORLD, async_op=True).wait()
        comm.gather_into(both, x + rank, group=dist.group.WORLD, async_op=True).wait()
        got = [*total.tolist(), *part.tolist(), *both.tolist()]
    finally:
        dist.destroy_process_group()
    want = [1, 3, 5, 7, *([1, 3], [5, 7])[rank], 0, 1, 2, 3, 1, 2, 3, 4]
    if got != want:
        raise AssertionError(f"{got} instead of {want}")


ACTS = {"draw": draw, "one": run_one, "leg": run_leg, "share": share_gpu}

# In the program


class Crew:
    """Up to eight forked ranks."""

    def __init__(self, folder: Path, data: Path, limit: float = LIMIT, gpus: int = 0) -> None:
        self.folder, self.data, self.limit, self.gpus = folder, data, limit, gpus
        self.context: Any = CONTEXTS["cuda" if gpus else "cpu"]
        self.ranks: list[tuple[Any, Any, Path]] = []  # process, pipe, log
        self.cases, self.is_stuck = 0, False  # whether a rank waits for others that will not come
        folder.mkdir(parents=True, exist_ok=True)

    def need(self, count: int) -> None:
        while len(self.ranks) < count:
            mine, theirs = self.context.Pipe()
            log = self.folder / f"rank{len(self.ranks)}"
            process = self.context.Process(
                target=serve, args=(theirs, str(log), str(self.data)), daemon=True
            )
            process.start()
            theirs.close()
            self.ranks.append((process, mine, log))

    def close(self) -> None:
        for process, pipe, _ in self.ranks:
            pipe.close()
            process.kill()
        for process, *_ in self.ranks:
            process.join()
        self.ranks.clear()
        self.is_stuck = False

    def draw(self, seed: int, number: int) -> tuple[Case, Drawing]:
        """Draw a case in a rank: checking hundreds of draws takes a processor."""
        got = self._ask([("draw", seed, number, self.gpus)])
        return cases.draw(seed, number, self.gpus) if isinstance(got, Outcome) else got[0]

    def why_not_shared(self) -> tuple[str, ...]:
        """Return why two ranks cannot share a GPU, or ()."""
        got = self._ask([("share", rank, str(self.folder / "share")) for rank in range(2)])
        if self.is_stuck:
            self.close()
        return got.lines[-1:] if isinstance(got, Outcome) else ()

    def run(self, case: Case, bug: str = "") -> Outcome:
        self.cases += 1
        if self.cases % LIVES == 0:
            self.close()
        outcome = self._run_in_folder(case, bug, False)
        if outcome.kind == "differs" and cases.in_one_process(case).precision.dtype != "float64":
            outcome = self._run_in_folder(case, bug, True)
        return outcome

    def _run_in_folder(self, case: Case, bug: str, is_closer: bool) -> Outcome:
        where = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            return self._run(case, where, bug, is_closer)
        finally:
            shutil.rmtree(where, ignore_errors=True)
            if self.is_stuck:
                self.close()

    def _run(self, case: Case, where: Path, bug: str, is_closer: bool) -> Outcome:
        first = self._ask([("one", case, str(where), is_closer, bug)])
        if isinstance(first, Outcome) and first.kind != "refused":
            return dataclasses.replace(first, lines=("one process:", *first.lines))
        if not isinstance(first, Outcome) and first[0]:
            return Outcome("differs", ("one process:", *first[0][:8]))
        most, place, captured = 0.0, "", 0
        for number, config in enumerate(configs(case)):
            asked = [
                ("leg", case, number, (rank, config.world), str(where), bug)
                for rank in range(config.world)
            ]
            got = self._ask(asked)
            name = f"leg {number + 1}, {case.legs[number]}"
            if isinstance(got, Outcome):
                return dataclasses.replace(got, lines=(name, *got.lines))
            wrong = [
                f"rank {rank}: {line}" for rank, result in enumerate(got) for line in result.wrong
            ]
            # NaN is NaN
            others = [
                rank for rank, result in enumerate(got) if repr(result.rows) != repr(got[0].rows)
            ]
            wrong += [f"rank {rank} records other numbers than rank 0" for rank in others]
            if wrong:
                return Outcome("differs", (name, *wrong[:8]))
            most, place = max((most, place), *((result.most, result.where) for result in got))
            captured += got[0].graphs == "on"
        if isinstance(first, Outcome):
            return Outcome("differs", ("one process refuses what the legs trained:", *first.lines))
        return Outcome("equal", (), most, place, captured)

    def _ask(self, asked: list[tuple[Any, ...]]) -> Any:
        """Return the answers of as many ranks, or what went wrong."""
        self.need(len(asked))
        for (_, pipe, _), message in zip(self.ranks, asked, strict=False):
            pipe.send(message)
        answers: dict[int, Any] = {}
        until = time.monotonic() + self.limit
        while len(answers) < len(asked) and time.monotonic() < until:
            waiting = {
                p: n for n, (_, p, _) in enumerate(self.ranks[: len(asked)]) if n not in answers
            }
            for pipe in connection.wait(list(waiting), timeout=max(0.0, until - time.monotonic())):
                n = waiting[pipe]  # type: ignore[index]
                try:
                    answers[n] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    answers[n] = ("failed", f"the process ended: {self._log(n)}")
                if answers[n][0] != "done":  # the others may now wait for it
                    until = min(until, time.monotonic() + 3)
        return self._judge(answers, len(asked))

    def _judge(self, answers: dict[int, Any], count: int) -> Any:
        self.is_stuck = len(answers) < count
        failed = {n: text for n, (kind, text) in answers.items() if kind == "failed"}
        refused = {n: text for n, (kind, text) in answers.items() if kind == "refused"}
        if failed:
            # A rank that lost its peer says so; the one that failed first says why.
            text = min(failed.items(), key=lambda item: ("onnection" in item[1], item[0]))
            return Outcome("failed", (f"rank {text[0]}:", *text[1].strip().splitlines()[-12:]))
        if refused and len(refused) == count:
            return Outcome("refused", (refused[0],))
        if len(answers) < count or refused:
            late = [n for n in range(count) if n not in answers]
            for n in late:
                os.kill(self.ranks[n][0].pid, signal.SIGUSR1)
            time.sleep(0.5)
            lines = [f"rank {n} stopped: {text}" for n, text in refused.items()]
            lines += [f"rank {n} is at: {self._log(n)}" for n in late]
            return Outcome("hung" if late else "failed", tuple(lines))
        return [answers[n][1] for n in range(count)]

    def _log(self, n: int) -> str:
        """Return the innermost lines of the last stack of a rank's main thread."""
        text = self.ranks[n][2].read_text(errors="replace")
        mine = text[text.rfind("Current thread") :] if "Current thread" in text else text[-2000:]
        return (
            " < ".join(line.strip().removeprefix("File ") for line in mine.splitlines()[1:9])
            or "no output"
        )
