"""What a run tells: Megatron's console lines on stdout, metrics.jsonl as the source of truth, a bar on stderr."""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import BAD_DATA, UserError

# Dense half-precision peaks in FLOP/s by what the device calls itself, from the vendors' datasheets.
PEAKS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12, "A800": 312e12, "H800": 989e12,
         "L40S": 362e12, "V100": 125e12, "RTX 4090": 165e12, "B200": 2250e12}  # fmt: skip


def say(line: str = "") -> None:
    """One line on stdout, at once: the documents' scripts pipe it into tee. A training outlives its reader."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print("the reader of the log is gone; the run goes on", file=sys.stderr)


def peak_flops(device: torch.device) -> float | None:
    """The device's peak, or None when unknown (every CPU): then no MFU is claimed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in sorted(PEAKS.items(), key=lambda x: -len(x[0])) if key in name), None)


class Metrics:
    """Counts since the last log line, the JSON-lines file and the progress bar of one attempt."""

    def __init__(
        self, folder: Path | None, train_iters: int, batch: int, seq: int, flops_per_token: float,
        device: torch.device, log_interval: int, progress: bool,
    ) -> None:  # fmt: skip
        self.folder, self.train_iters, self.batch, self.seq = folder, train_iters, batch, seq
        self.flops, self.device, self.log_interval = flops_per_token, device, log_interval
        self.peak = peak_flops(device)
        self.file, self.attempt = -1, 1
        if folder is not None:
            self.attempt = 1 + _count_starts(folder / "metrics.jsonl")
            self.file = os.open(folder / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.bar = _bar(train_iters) if progress and sys.stderr.isatty() else None
        self._reset()
        self.memory_told = False

    def _reset(self) -> None:
        self.losses: list[float] = []
        self.steps = self.skipped = self.nan = 0
        self.seconds = 0.0

    def row(self, event: str, iteration: int, **values: Any) -> None:
        """Append one row at once and whole: a reader, or a kill, sees complete lines or one cut at the very end."""
        if self.file < 0:
            return
        plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        line = json.dumps({"event": event, "attempt": self.attempt, "iteration": iteration, **plain})
        data = line.encode() + b"\n"
        while data:  # a nearly full disk may take a part
            data = data[os.write(self.file, data) :]

    def sync(self) -> None:
        """To the disk, so that no power cut leaves a checkpoint that knows more steps than the log."""
        if self.file >= 0:
            os.fsync(self.file)

    def step(
        self, iteration: int, consumed: int, loss: float, norm: float, lr: float, next_lr: float, scale: float,
        skipped: bool, seconds: float,
    ) -> None:  # fmt: skip
        """Record one step; every --log-interval steps print the line. It shows the next step's rate, as Megatron's."""
        self.steps += 1
        self.seconds += seconds
        self.skipped += skipped
        self.nan += not math.isfinite(loss)
        if not skipped:
            self.losses.append(loss)
        tokens = self.batch * self.seq / seconds
        self.row(
            "step", iteration, consumed_samples=consumed, loss=loss, grad_norm=norm, lr=lr, loss_scale=scale,
            skipped=skipped, ms=round(seconds * 1e3, 3), tokens_per_second=round(tokens, 1),
            tflops=round(tokens * self.flops / 1e12, 4),
            mfu=round(tokens * self.flops / self.peak, 4) if self.peak else None, memory=self._memory(),
        )  # fmt: skip
        if self.bar is not None:
            self.bar[0].update(self.bar[1], completed=iteration, loss=f"{loss:.4f}", speed=f"{tokens:,.0f} tokens/s")
        if iteration % self.log_interval == 0 or not math.isfinite(loss):
            self._line(iteration, consumed, norm, next_lr, scale)

    def _line(self, iteration: int, consumed: int, norm: float, lr: float, scale: float) -> None:
        per_step = self.seconds / self.steps
        samples = self.batch / per_step
        rate = samples * self.seq * self.flops
        left = datetime.timedelta(seconds=round(per_step * (self.train_iters - iteration)))
        parts = [
            f" iteration {iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {consumed:12d}",
            f"elapsed time per iteration (ms): {per_step * 1e3:.1f}",
            f"learning rate: {lr:.3E}",
            f"global batch size: {self.batch:5d}",
        ]
        if self.losses:
            parts.append(f"lm loss: {sum(self.losses) / len(self.losses):.6E}")
        parts += [
            f"loss scale: {scale:.1f}",
            f"grad norm: {norm:.3f}",
            f"number of skipped iterations: {self.skipped:3d}",
            f"number of nan iterations: {self.nan:3d}",
            f"samples per second: {samples:.3f}",
            f"TFLOPs: {rate / 1e12:.2f}",
            f"tokens per second: {samples * self.seq:.0f}",
        ]
        if self.peak:
            parts.append(f"MFU: {100 * rate / self.peak:.1f}% of {self.peak / 1e12:.0f} TFLOP/s")
        memory = self._memory()
        if memory:
            parts.append(f"memory (GiB): {memory / 2**30:.2f}")
        say(" | ".join([*parts, f"ETA: {left}"]) + " |")
        if self.device.type == "cuda" and not self.memory_told:
            self.memory_told, mb, c = True, 2**20, torch.cuda
            say(
                f"[Rank 0] (after {iteration} iterations) memory (MB) | allocated: {c.memory_allocated() / mb} | "
                f"max allocated: {c.max_memory_allocated() / mb} | reserved: {c.memory_reserved() / mb} | "
                f"max reserved: {c.max_memory_reserved() / mb}"
            )
        self._reset()

    def _memory(self) -> int | None:
        """Peak bytes on the device."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def validation(self, iteration: int, name: str, prefix: str, loss: float) -> None:
        """Megatron's framed line; perplexity is exp(loss), capped as there."""
        ppl = math.exp(min(20, loss)) if math.isfinite(loss) else math.nan
        line = f" validation loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {ppl:.6E} | "
        say("-" * (len(line) + 1))
        say(line)
        say("-" * (len(line) + 1))
        self.row("validation", iteration, name=name, loss=loss, ppl=ppl)

    def close(self) -> None:
        if self.bar is not None:
            self.bar[0].stop()
            self.bar = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _count_starts(path: Path) -> int:
    """Attempts so far; a line cut short by a kill is closed, so that the next row starts on a line of its own."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}", BAD_DATA) from None
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
    return data.count(b'{"event": "start"')


def _bar(total: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"), TimeRemainingColumn(),
    )  # fmt: skip
    # Lines printed meanwhile go above the bar when both are the same terminal; into a pipe they go untouched.
    progress = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty())
    progress.start()
    return progress, progress.add_task("train", total=total, loss="-", speed="-")


class Timers:
    """Wall time of named phases, printed as Megatron does."""

    def __init__(self) -> None:
        self.started: dict[str, float] = {}
        self.took: dict[str, float] = {}

    def start(self, name: str) -> None:
        self.started[name] = time.perf_counter()

    def stop(self, name: str) -> None:
        self.took[name] = 1e3 * (time.perf_counter() - self.started.pop(name))

    def tell(self, *names: str) -> None:
        say("(min, max) time across ranks (ms):")
        for n in names:
            say(f"    {n} {'.' * (47 - len(n))}: ({self.took[n]:.2f}, {self.took[n]:.2f})")


def tell_time(what: str) -> None:
    say(f"[{what}] datetime: {datetime.datetime.now():%Y-%m-%d %H:%M:%S} ")


def tell_arguments(values: dict[str, Any]) -> None:
    say("------------------------ arguments ------------------------")
    for name in sorted(values, key=str.lower):
        say(f"  {name} {'.' * (48 - len(name))} {values[name]}")
    say("-------------------- end of arguments ---------------------")
