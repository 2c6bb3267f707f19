"""Scores of --eval-tasks during a training: between two steps, or beside it from a snapshot.

They only read the weights: nothing that the training computes depends on them.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.base.console import remark, say
from meshwright.base.files import make_anew
from meshwright.checkpoint import steps
from meshwright.checkpoint.saved_model import GPT_NETWORK
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TrainConfig
from meshwright.data.tokenizers import Tokenizer
from meshwright.parallel.window_losses import WindowBatch, score_part
from meshwright.runtime.ranks.team import Team
from meshwright.training.log.metrics import Metrics
from meshwright.training.micro_step import Network
from meshwright.training.tasks import PreparedTask, prepare_task

# The most of a run's time that scores take at the default interval, if a forward pass is a third of
# a step. It is this small because padding, and stopping between two steps, cost more than that: in
# all the share must stay below 2 %.
TIME_SHARE = 0.005
SNAPSHOTS = "eval-snapshots"  # in the run's folder


class Scores:
    """The tasks of --eval-tasks, scored by the run's own network; every rank takes part."""

    def __init__(
        self, config: TrainConfig, net: Network, vocab: int, tokenizer: Tokenizer | None, team: Team
    ) -> None:
        assert config.data.seq_length
        self.config, self.net, self.team, self.vocab = config, net, team, vocab
        self.length, self.is_fixed = config.data.seq_length, runs_one_shape(net)
        self.scored_step = -1  # the last one
        spec = config.logging.eval_tasks
        assert spec is not None
        if tokenizer is None:
            raise SettingsError(
                f"{{eval_tasks={spec}}} reads text, for which the run needs a tokenizer; give {{tokenizer}}"
            )
        half = max(1, self.length // 2)
        self.tasks: list[PreparedTask[Any]] = []

        def read_tasks() -> None:
            for name, path in spec.tasks:
                self.tasks.append(prepare_task(name, path, tokenizer, self.length, half))

        # Every rank reads the files, and all fail if one cannot.
        team.run_on_all(read_tasks)
        self.interval = config.logging.eval_tasks_interval or self.default_interval()
        names = ", ".join(task.name for task in self.tasks)
        where = config.logging.eval_tasks_device
        remark(
            f" > --eval-tasks: {names} every {self.interval:,} steps{f', beside the run on {where}' * bool(where)}"
        )

    def default_interval(self) -> int:
        """Return the least of 1, 2, 5, 10, 20, ... that keeps the scores' time below TIME_SHARE."""
        fed = sum(self.tokens_fed(task) for task in self.tasks)
        # A step of training costs about three forward passes over its tokens.
        least = fed / (3 * TIME_SHARE * self.config.global_batch * self.length)
        power = 1
        while True:
            for digit in (1, 2, 5):
                if digit * power >= least:
                    return digit * power
            power *= 10

    def tokens_fed(self, task: PreparedTask[Any]) -> int:
        """Return the tokens that the network reads for a task, with padding."""
        if self.is_fixed:
            return self.length * len(task.windows)
        return sum(len(window.tokens) - 1 for window in task.windows)

    def collect(self, metrics: Metrics) -> None:
        """Record what was computed beside the run, without waiting."""

    def run(
        self, iteration: int, consumed: int, metrics: Metrics, should_stop: Callable[[], bool]
    ) -> None:
        """Score the current weights and record the result, unless this step's is recorded."""
        if iteration == self.scored_step:
            return
        scorer = functools.partial(score_on_all, self.net, self.vocab)
        micro = self.config.micro_batch
        for task in self.tasks:
            began = time.perf_counter()
            values = task.score(scorer, self.length, micro, self.is_fixed, should_stop)
            if values is None:
                return
            metrics.score(iteration, consumed, task, values, time.perf_counter() - began)
        self.scored_step = iteration

    def finish(
        self, iteration: int, consumed: int, metrics: Metrics, should_stop: Callable[[], bool]
    ) -> None:
        """Score the weights after the last step."""
        self.run(iteration, consumed, metrics, should_stop)

    def close(self) -> None:
        """End what is under way."""


def runs_one_shape(net: Network) -> bool:
    """Return whether the network should only run the shape that it trains with.

    Compiled layers would be compiled again for another, and a sequence of another length might not
    divide by the ranks that share it. A custom model may know no other shape.
    """
    return net.is_compiled or net.sequence or net.layout.cp > 1 or net.name != GPT_NETWORK


def score_on_all(net: Network, vocab: int, batches: list[WindowBatch]) -> Tensor:
    """Score micro-batches on all ranks, as a `Scorer` does."""
    total = score_part(net, vocab, batches)
    if net.layout.world > 1:
        dist.all_reduce(total)
    return total.cpu()


class ScoresBeside(Scores):
    """The same tasks, scored by another process from a snapshot of the weights; one at a time."""

    def __init__(
        self,
        config: TrainConfig,
        net: Network,
        vocab: int,
        tokenizer: Tokenizer | None,
        team: Team,
        snapshot: Callable[[Path], None],
    ) -> None:
        """`snapshot` writes the weights into a folder of steps; all ranks call it."""
        super().__init__(config, net, vocab, tokenizer, team)
        if net.name != GPT_NETWORK:
            raise SettingsError(
                f"{{eval_tasks_device}}: another process cannot build a {net.name}; leave it out"
            )
        c = config.checkpoint
        self.snapshot, self.run_folder = snapshot, Path(c.run_dir or c.save or "")
        self.root = self.run_folder / SNAPSHOTS
        self.child: subprocess.Popen[str] | None = None
        self.scored = (0, 0)  # iteration and samples of the newest snapshot

    def run(
        self, iteration: int, consumed: int, metrics: Metrics, should_stop: Callable[[], bool]
    ) -> None:
        """Begin to score these weights, unless earlier ones are still being scored."""
        if iteration == self.scored_step:
            return
        if self.team.merge(self.child is not None, any):
            busy = f"step {self.scored[0]:,} is still being scored on {self.config.logging.eval_tasks_device}"
            remark(
                f" > --eval-tasks: {busy}, so step {iteration:,} is not; raise --eval-tasks-interval"
            )
            return
        self.begin(iteration, consumed)

    def begin(self, iteration: int, consumed: int) -> None:
        """Write a snapshot, and start a process that scores it with `meshwright evaluate`."""
        self.team.run_on_rank_0(lambda: make_anew(self.root))
        self.snapshot(self.root)
        self.scored_step = iteration
        if not self.team.is_rank_0:
            return
        g, p = self.config.logging, self.config.precision
        where = g.eval_tasks_device or "cpu"
        words = [
            "evaluate",
            str(steps.step_folder(self.root, iteration)),
            f"--eval-tasks={g.eval_tasks}",
            f"--device={where}",
            f"--results-path={self.root / 'scores.json'}",
            f"--seq-length={self.length}",
            f"--overlapping-eval={max(1, self.length // 2)}",
            f"--micro-batch-size={self.config.micro_batch}",
        ]
        if p.bf16 and where != "cpu":
            words.append("--bf16")
        if p.fp16 and where != "cpu":
            words.append("--fp16")
        if p.params_dtype != "float32":
            words.append(f"--params-dtype={p.params_dtype}")
        if (self.run_folder / "tokenizer").is_dir():
            words.append(f"--tokenizer={self.run_folder / 'tokenizer'}")
        self.scored = iteration, consumed
        with open(self.root / "log.txt", "x") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-c", BESIDE, str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ONE_RANK,
                text=True,
            )

    def is_idle(self) -> bool:
        return self.child is None or self.child.poll() is not None

    def collect(self, metrics: Metrics) -> None:
        """Record the scores of the process, if it has ended."""
        if self.child is None or not self.is_idle():
            return
        status, self.child = self.child.wait(), None
        iteration, consumed = self.scored
        if status:
            # The run goes on without these scores; the last line says why.
            lines = (self.root / "log.txt").read_text(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "no output"
            remark(
                f"WARNING: --eval-tasks: no scores of step {iteration:,} (exit status {status}): {last}"
            )
            return
        for score in json.loads((self.root / "scores.json").read_text()):
            [task] = [task for task in self.tasks if task.name == score["task"]]
            metrics.score(iteration, consumed, task, score["values"], score["seconds"])

    def finish(
        self, iteration: int, consumed: int, metrics: Metrics, should_stop: Callable[[], bool]
    ) -> None:
        """Wait for the process, score the last weights and wait for them too."""
        self.wait(metrics, should_stop)
        if iteration != self.scored_step and not should_stop():
            self.begin(iteration, consumed)
            self.wait(metrics, should_stop)
        self.close()

    def wait(self, metrics: Metrics, should_stop: Callable[[], bool]) -> None:
        """Wait for the process, which may outlast the ranks' time-out, so they meet meanwhile."""
        if self.child is not None:
            say(f" > waiting for the scores of step {self.scored[0]:,} ...")
        # Only the rank that has the process waits for it; for all others it is idle.
        while not self.team.merge(self.is_idle() or should_stop(), all):
            time.sleep(0.1)
        self.collect(metrics)

    def close(self) -> None:
        """End the process if it runs, and remove the snapshot."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child = None
        if self.team.is_rank_0:
            shutil.rmtree(self.root, ignore_errors=True)


ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# The process ends with its parent, and leaves the processors to it.
BESIDE = """
import os, sys
from meshwright.runtime.ranks.orphans import LAUNCHER_PID
from meshwright.__main__ import main
os.nice(19)
os.environ[LAUNCHER_PID] = sys.argv[1]
sys.exit(main(sys.argv[2:]))
"""
