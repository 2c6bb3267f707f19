"""A run's numbers: Megatron's lines or the short screen, metrics.jsonl, a progress bar."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from meshwright.base import device as devices
from meshwright.base.console import is_quiet, remark, say, show
from meshwright.base.errors import BAD_DATA, NON_FINITE, SIGINT, UNEXPECTED, UserError
from meshwright.base.files import naming_file, own_file
from meshwright.base.progress import new_bar
from meshwright.base.records import json_ready
from meshwright.base.runs.history import final_loss
from meshwright.base.runs.rows import METRICS, read_lines
from meshwright.base.storage.addresses import shown, shown_in
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.runtime.ranks.team import Team
from meshwright.training.forecast import StepComparison
from meshwright.training.log.lines import (
    FORMS,
    MEGATRON,
    Check,
    Interval,
    RunSizes,
    in_deepspeeds_form,
)
from meshwright.training.log.screen import LineScreen
from meshwright.training.log.timers import Timers
from meshwright.training.log.trackers import RunToDraw, open_trackers, tags, validation_tags
from meshwright.training.state.folder import LivePage, find_page
from meshwright.training.tasks import PreparedTask

# Dense half-precision peaks in FLOP/s by a part of the device's name, from the vendors' datasheets.
# The first part that is in the name counts, so that the longer ones come first.
PEAKS = {
    "B200": 2250e12,
    "RTX 4090": 165e12,
    "L40S": 362e12,
    "V100": 125e12,
    "H100 PCIe": 756e12,
    "H800 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
}

# Printed by --nvidia-smi-at.
GPU_FIELDS = "timestamp,name,driver_version,utilization.gpu,utilization.memory,memory.total,memory.free,memory.used"


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak FLOP/s, or None if it is unknown (as for CPUs).

    Without a peak, no MFU is printed.
    """
    name = devices.device_name(device)
    return next((peak for key, peak in PEAKS.items() if key in name), None)


class Metrics:
    """The sums since the last log line, the JSON-lines file, the trackers and the progress bar.

    Every rank has one. Ranks other than 0 have no folder, and print at most their machine's GPUs.
    """

    def __init__(
        self,
        folder: Path | None,
        config: TrainConfig,
        run: RunSizes,
        timers: Timers,
        team: Team,
        screen: LineScreen | None = None,
    ) -> None:
        self.folder, self.is_rank_0 = folder, team.is_rank_0
        self.config, self.g = config, config.logging
        self.run, self.device, self.timers, self.screen = run, timers.device, timers, screen
        self.file, self.attempt_number, self.has_failed = -1, 1, False
        self.unwritten = bytearray()  # rows, or the rest of one, that a full disk refused
        self.is_late = False  # whether rows wait in memory, which the log has said once
        self.path = (folder or Path()) / METRICS
        if folder is not None:
            # Attempts in one folder continue one file, and each row names its attempt.
            self.file = own_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self.attempt_number = 1 + _count_starts(folder)
        name = folder.resolve().name if folder is not None else "meshwright"
        self.trackers, self.bar = [], None
        if team.is_rank_0:
            settings = shown_in(flags.to_dict(config))
            self.trackers = open_trackers(
                RunToDraw(self.g, folder, settings, name, run.iteration + 1, run.consumed)
            )
            self.bar = (
                _start_bar(run.steps)
                if self.g.progress and sys.stderr.isatty() and not is_quiet()
                else None
            )
        self.since_line: list[dict[str, Any]] = []  # numbers of the steps since the last line
        self.seconds = 0.0  # that they took
        # steps, samples and seconds since the last line of --steps-per-print
        self.since_print = (0, 0, 0.0)
        self.iteration = run.iteration
        # The last losses, as many as the mean at the end may need.
        self.recent = collections.deque[tuple[int, float]](
            maxlen=max(self.g.log_interval, run.steps // 50, 1)
        )
        self.memory_is_printed = self.gpus_are_hidden = False
        self.is_first_of_machine = True  # the start says so if it is not
        self.form, self.head_is_printed = FORMS.get(self.g.log_format, MEGATRON), False
        # On an accelerator, the plan beside the first steps of the size that it is for: those of a
        # growing batch or length are smaller.
        self.comparison: StepComparison | None = None
        is_drawn = not config.training.skip_train and find_page() is not None
        self.page = LivePage(folder) if folder is not None and is_drawn else None

    def row(self, event: str, iteration: int, **values: Any) -> None:
        """Append one row immediately, so that a kill can truncate only the last line.

        With --save-error warn, rows wait in memory while the disk is full.
        """
        # Nothing follows a failure: "end" is the last row of an attempt.
        if self.file < 0 or self.has_failed:
            return
        head = {"event": event, "attempt": self.attempt_number, "iteration": iteration}
        line = json.dumps(head | {"time": round(time.time(), 3)} | json_ready(values))
        self.unwritten += line.encode() + b"\n"
        with self._tolerating():
            while self.unwritten:
                del self.unwritten[: os.write(self.file, self.unwritten)]
            self.is_late = False

    def sync(self) -> None:
        """Flush rows to disk, so that after a power cut no checkpoint has more steps than they."""
        if self.file >= 0:
            with self._tolerating():
                os.fsync(self.file)

    @contextlib.contextmanager
    def _tolerating(self) -> Iterator[None]:
        """Raise an error of the disk; with --save-error warn only log it, once."""
        try:
            with naming_file(self.path):
                yield
        except OSError as error:
            if self.config.checkpoint.save_error == "stop":
                raise
            if not self.is_late:
                remark(
                    f"WARNING: {self.path}: {error.strerror}; its rows wait in memory (--save-error warn)"
                )
            self.is_late = True

    def step(
        self, iteration: int, consumed: int, seconds: float, next_lr: float, values: dict[str, Any]
    ) -> None:
        """Record one step, and print a line every --log-interval steps.

        The line shows the learning rate of the next step, as Megatron's does.
        """
        batch, loss, length = values["batch"], values["loss"], values.get("length")
        self.since_line.append(values)
        self.seconds += seconds
        if not values["skipped"]:
            self.recent.append((iteration, loss))
        self.iteration = iteration

        # Write the row, and draw the curves from it.
        tokens = self.run.tokens(values) / seconds
        flops = self.run.flops(values) / seconds / self.run.devices
        row = values | {
            "ms": round(seconds * 1e3, 3),
            "tokens_per_second": round(tokens, 1),
            "tflops": round(flops / 1e12, 4),
            "mfu": round(flops / self.run.peak, 4) if self.run.peak else None,
            "memory": devices.peak_memory(self.device),
        }
        self.row("step", iteration, consumed_samples=consumed, **row)
        if self.trackers:
            self._draw_step(iteration, consumed, row)

        # Show the progress and, where due, the lines.
        if self.bar is not None:
            bar, task = self.bar
            speed = f"{tokens:,.0f} tokens/s"
            bar.update(task, completed=iteration, loss=f"{loss:.4f}", speed=speed)
        if every := self.g.steps_per_print:
            steps, samples, time_spent = self.since_print
            self.since_print = (steps + 1, samples + batch, time_spent + seconds)
            if iteration % every == 0:
                say(in_deepspeeds_form(iteration, loss, *self.since_print))
                self.since_print = (0, 0, 0.0)
        is_last = iteration == self.run.steps
        if is_last or iteration % self.g.log_interval == 0 or not math.isfinite(loss):
            self._line(iteration, consumed, next_lr)
        is_planned = batch == self.config.global_batch and length in (
            None,
            self.config.data.seq_length,
        )
        if self.comparison is not None and is_planned and self.comparison.note(seconds):
            stats, mapped = devices.memory_stats(self.device), devices.symmetric_memory()
            for line in self.comparison.compare(stats, mapped):
                remark(line)
            self.comparison = None  # once is enough
        if self.page is not None:
            self.page.update()

    def _draw_step(self, iteration: int, consumed: int, row: dict[str, Any]) -> None:
        row = row | {"iteration": iteration, "world_size": self.run.devices}
        row["timers"] = self.timers.times_of_step()
        if self.g.log_memory_to_tensorboard and row["memory"] is not None:
            stats = devices.memory_stats(self.device)
            # Megatron's curves show the memory in use now; the row has the peak.
            row["reserved"] = stats["reserved_bytes.all.current"]
            row["memory"] = stats["allocated_bytes.all.current"]
            row["allocated_count"] = stats.get("allocation.all.current", 0)
        self._track(tags(self.g, row), iteration, consumed)

    def _track(self, values: dict[str, float], iteration: int, consumed: int) -> None:
        for tracker in self.trackers:
            tracker.scalars(values, iteration, consumed)

    def _line(self, iteration: int, consumed: int, lr: float) -> None:
        memory = devices.peak_memory(self.device)
        interval = Interval(
            self.run, iteration, consumed, lr, self.since_line, self.seconds, memory
        )
        if self.form.head and not self.head_is_printed:
            self.head_is_printed = True
            show(self.form.head)
        # The log has Megatron's line in any case; stdout has the chosen form.
        say(interval.in_megatrons_form(), self.form.step(interval))
        if self.screen is not None:
            self._show(self.screen.step(interval))
        # Megatron prints the memory once, after the first steps: later ones take no more.
        if memory is not None and not self.memory_is_printed:
            self.memory_is_printed = True
            self._print_memory(iteration)
        if self.timers.steps:
            self.timers.print_means(len(self.since_line))
        self.since_line, self.seconds = [], 0.0

    def _print_memory(self, iteration: int) -> None:
        stats = devices.memory_stats(self.device)
        columns = {
            "allocated": "allocated_bytes.all.current",
            "max allocated": "allocated_bytes.all.peak",
            "reserved": "reserved_bytes.all.current",
            "max reserved": "reserved_bytes.all.peak",
        }
        shown = " | ".join(f"{name}: {stats[key] / 2**20}" for name, key in columns.items())
        say(f"[Rank 0] (after {iteration} iterations) memory (MB) | {shown}")

    def _show(self, text: str) -> None:
        """Show a screen's text, unless it is empty."""
        if text:
            show(text)

    def roll_back(self, to: int, iteration: int, **values: Any) -> None:
        """Record that the steps after `to`, up to `iteration`, were undone."""
        # Only steps that count are in the mean at the end.
        while self.recent and self.recent[-1][0] > to:
            self.recent.pop()
        self.row("rollback", iteration, to=to, **values)

    def validation(self, consumed: int, check: Check) -> None:
        """Record one validation and print Megatron's framed line."""
        say(check.in_megatrons_form())
        if self.screen is not None:
            self._show(self.screen.validation(check))
        row: dict[str, Any] = {"name": check.name, "loss": check.loss, "ppl": check.ppl}
        if check.ema_loss is not None:
            row["ema_loss"] = check.ema_loss
        if check.dataset:
            row["set"] = check.dataset
        if check.by_position:
            row["by_position"] = check.by_position
        if check.by_data:
            # Addresses of object storage as they were typed, not the folders that stand for them.
            row["by_data"] = {shown(prefix): loss for prefix, loss in check.by_data.items()}
        end = {"end": True} if check.is_at_end else {}
        self.row("validation", check.iteration, seconds=round(check.seconds, 3), **row, **end)
        self._track(validation_tags(self.g, row), check.iteration, consumed)

    def sample(self, iteration: int, number: int, prompt: str, text: str) -> None:
        """Record text that the model wrote."""
        self.row("sample", iteration, number=number, prompt=prompt, text=text)
        for tracker in self.trackers:
            tracker.text(f"sample {number}", prompt + text, iteration)

    def score(
        self,
        iteration: int,
        consumed: int,
        task: PreparedTask[Any],
        values: dict[str, float],
        seconds: float,
    ) -> None:
        """Record the measures of one of --eval-tasks, and print Megatron's framed line."""
        say(f"scores at iteration {iteration} ({task.variant}):\n{task.line(values)}")
        if self.screen is not None:
            self._show(self.screen.score(iteration, task.name, task.headline, values))
        scores = task.columns(values)
        facts = {"task": task.name} | task.facts | {"seconds": round(seconds, 3), "values": values}
        self.row("scores", iteration, scores=scores, **facts)
        self._track(
            {f"scores/{name}": value for name, value in scores.items()}, iteration, consumed
        )

    def event(self, name: str, iteration: int, line: str, **facts: Any) -> None:
        """Record what happened to the run, and print a line about it."""
        remark(line)
        self.row(name, iteration, **facts)

    def print_gpus(self) -> None:
        """Print the use and memory of this machine's GPUs, once a machine: by its first rank."""
        if self.gpus_are_hidden or not self.is_first_of_machine:
            return
        try:
            lines = devices.ask_nvidia_smi(GPU_FIELDS).strip().splitlines()
        except RuntimeError as error:
            self.gpus_are_hidden = True  # the reason is printed once
            lines = [f" > --nvidia-smi-at: {error}, so nothing is printed"]
        for line in lines:
            if self.is_rank_0:
                remark(line)
            else:  # on another machine, whose lines are not in rank 0's log
                with contextlib.suppress(OSError):
                    print(line, flush=True)

    def record_failure(self, iteration: int, error: BaseException) -> None:
        """Record why the run ends, and have the page say so."""
        status = error.status if isinstance(error, UserError) else UNEXPECTED
        status = SIGINT if isinstance(error, KeyboardInterrupt) else status
        reason = (
            "not finite"
            if status == NON_FINITE
            else (str(error) or type(error).__name__).splitlines()[0]
        )
        with contextlib.suppress(OSError):  # a full disk may be why the run ends
            self.row("end", iteration, reason=reason, status=status)
        self.has_failed = True  # the watchdog and the training may both find out
        if self.page is not None:
            self.page.close(failed=True)

    @property
    def final_loss(self) -> tuple[float, int]:
        """The mean training loss at the end of this attempt, and of how many steps."""
        return final_loss([loss for _, loss in self.recent], self.iteration, self.g.log_interval)

    def stop_bar(self) -> None:
        if self.bar is not None:
            self.bar[0].stop()
            self.bar = None

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
        self.stop_bar()
        if self.page is not None:
            self.page.close()
        if self.file >= 0:
            if self.unwritten:
                remark(
                    f"WARNING: {self.path} lacks its last {len(self.unwritten):,} bytes: the disk took no more"
                )
            os.close(self.file)
            self.file = -1


def _count_starts(folder: Path) -> int:
    """Return the number of attempts so far, and cut off a last line that a kill left incomplete."""
    starts, size, line = 0, 0, b"\n"
    try:
        for line in read_lines(folder):
            starts += line.startswith((b'{"event": "start"', b'{"event": "evaluate"'))
            size += len(line)
    except OSError as e:
        raise UserError(f"cannot read {folder / METRICS}: {e.strerror}", BAD_DATA) from None
    if not line.endswith(b"\n"):
        os.truncate(folder / METRICS, size - len(line))  # no link: it was opened before
    return starts


def _start_bar(total: int) -> tuple[Any, Any]:
    columns = ("bar", "count", "loss {task.fields[loss]}", "{task.fields[speed]}", "left")
    bar, task = new_bar(*columns, total=total, loss="-", speed="-")
    bar.start()
    return bar, task
