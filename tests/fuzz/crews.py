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
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np

from fuzz import cases
from fuzz.bugs import BUGS, SHARED
from fuzz.cases import WORDS, Case, Drawing, configs

multiprocessing.set_forkserver_preload(
    """torch torch.distributed torch._dynamo torch.distributed.fsdp torch.distributed.pipelining pytest
    meshwright.training.run meshwright.training.loop meshwright.checkpoint.background
    meshwright.checkpoint.foreign.megatron.writer meshwright.checkpoint.foreign.megatron.reader fuzz.trials""".split()
)
CONTEXT = multiprocessing.get_context("forkserver")
LIMIT = 180.0  # seconds of a leg
LIVES = 100  # cases of a crew


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`kind`: equal, refused (by every rank before its first step), differs, failed or hung."""

    kind: str
    lines: tuple[str, ...] = ()
    most: float = 0.0  # the largest share of an allowed distance
    where: str = ""

    @property
    def is_bad(self) -> bool:
        return self.kind in ("differs", "failed", "hung")


def write_data(folder: Path) -> None:
    """Write token files: documents of a few kinds, with and without many ends."""
    from meshwright.data.files.writer import Writer

    rng = np.random.RandomState(0)
    kinds = {"tiny": (12, 3, 12), "small": (120, 3, 12), "large": (300, 1, 40), "ends": (200, 3, 30)}
    for name, (documents, least, most) in kinds.items():
        with Writer(folder / name, np.uint16) as writer:
            for n in range(documents):
                body = rng.randint(WORDS, size=rng.randint(least, most))
                if name == "ends" and n % 2:  # samples of ends alone: without any unmasked token
                    body[:] = WORDS
                writer.add([*body, WORDS])
                writer.end_document()


# In a rank


def serve(pipe: Any, log: str, data: str) -> None:
    """Run legs and references as they are asked for, until the pipe is closed."""
    import torch

    from meshwright import console
    from meshwright import device as devices

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
                from meshwright.errors import UserError

                kind = "refused" if isinstance(error, UserError) else "failed"
                answer = (kind, str(error) if kind == "refused" else traceback.format_exc(limit=-8))
            pipe.send(answer)


def run_one(traces: list[Any], case: Case, folder: str, is_closer: bool, bug: str) -> list[str]:
    """Write what one process records; return in what it differs from the independent trainer."""
    from fuzz import trials

    with BUGS[bug]() if bug in SHARED else contextlib.nullcontext():
        made = trials.references(case, trials.LOOKS if is_closer else 1)
        Path(folder, "one").write_bytes(pickle.dumps(made))
        return trials.unlike_plain(case, made)


def run_leg(traces: list[Any], case: Case, number: int, place: tuple[int, int], folder: str, bug: str) -> Any:
    """Run a leg; return what is wrong, the rows, and how much of the allowed distances was used.

    `traces` holds those of the legs before.
    """
    import torch.distributed as dist

    from fuzz import trials
    from meshwright.parallel.layout import connect, layout_of
    from meshwright.ranks.team import Team

    rank, world = place
    if not number:
        traces.clear()
    config, leg = trials.leg_config(case, number, Path(folder, "run")), case.legs[number]
    team, layout, limit = Team(), layout_of(config, rank), datetime.timedelta(seconds=2 * LIMIT)
    if world > 1:
        store = f"file://{folder}/store{number}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
        team, layout = Team(rank, world, dist.group.WORLD), connect(layout, limit)
    try:
        with BUGS[bug]() if bug else contextlib.nullcontext():
            trace = trials.train(config, team, layout, not leg.lost, case.poison)
    finally:
        if world > 1:
            dist.destroy_process_group()
            layout = layout_of(config, rank)
            gc.collect()  # a trainer has cycles, and its groups' threads live as long as it
    distances = trials.Distances(config)
    if Path(folder, "one").exists():  # else one process refused to train it
        distances.compare(trace, pickle.loads(Path(folder, "one").read_bytes()))  # noqa: S301, of our own
    if traces and case.legs[number - 1].flags == leg.flags:
        distances.repeated(trace, traces[-1])
    traces.append(trace)
    return distances.wrong[:6], trace.rows, distances.most, distances.where


def draw(traces: list[Any], seed: int, number: int) -> tuple[Case, Drawing]:
    return cases.draw(seed, number)


ACTS = {"draw": draw, "one": run_one, "leg": run_leg}

# In the program


class Crew:
    """Up to eight forked ranks."""

    def __init__(self, folder: Path, data: Path, limit: float = LIMIT) -> None:
        self.folder, self.data, self.limit = folder, data, limit
        self.ranks: list[tuple[Any, Any, Path]] = []  # process, pipe, log
        self.cases, self.is_stuck = 0, False  # whether a rank waits for others that will not come
        folder.mkdir(parents=True, exist_ok=True)

    def need(self, count: int) -> None:
        while len(self.ranks) < count:
            mine, theirs = CONTEXT.Pipe()
            log = self.folder / f"rank{len(self.ranks)}"
            process = CONTEXT.Process(target=serve, args=(theirs, str(log), str(self.data)), daemon=True)
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
        got = self._ask([("draw", seed, number)])
        return cases.draw(seed, number) if isinstance(got, Outcome) else got[0]

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
        most, place = 0.0, ""
        for number, config in enumerate(configs(case)):
            asked = [("leg", case, number, (rank, config.world), str(where), bug) for rank in range(config.world)]
            got = self._ask(asked)
            name = f"leg {number + 1}, {case.legs[number]}"
            if isinstance(got, Outcome):
                return dataclasses.replace(got, lines=(name, *got.lines))
            wrong = [f"rank {rank}: {line}" for rank, (lines, *_) in enumerate(got) for line in lines]
            others = [rank for rank, (_, rows, *_) in enumerate(got) if repr(rows) != repr(got[0][1])]  # NaN is NaN
            wrong += [f"rank {rank} records other numbers than rank 0" for rank in others]
            if wrong:
                return Outcome("differs", (name, *wrong[:8]))
            most, place = max((most, place), *((m, p) for _, _, m, p in got))
        if isinstance(first, Outcome):
            return Outcome("differs", ("one process refuses what the legs trained:", *first.lines))
        return Outcome("equal", (), most, place)

    def _ask(self, asked: list[tuple[Any, ...]]) -> Any:
        """Return the answers of as many ranks, or what went wrong."""
        self.need(len(asked))
        for (_, pipe, _), message in zip(self.ranks, asked, strict=False):
            pipe.send(message)
        answers: dict[int, Any] = {}
        until = time.monotonic() + self.limit
        while len(answers) < len(asked) and time.monotonic() < until:
            waiting = {p: n for n, (_, p, _) in enumerate(self.ranks[: len(asked)]) if n not in answers}
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
        return " < ".join(line.strip().removeprefix("File ") for line in mine.splitlines()[1:9]) or "no output"
