"""The short screen of a run on a terminal: a header, a line per logged step, and what comes next.

Megatron's log, which has the same figures and more, is then in log.txt only.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.base import console, registry
from meshwright.base.version import our_version
from meshwright.config import data_paths
from meshwright.config.schema import Logging, TrainConfig
from meshwright.data import tokenizers
from meshwright.training.log.lines import Check, Interval, RunSizes
from meshwright.training.sizes import describe_layout, describe_memory
from meshwright.training.state.folder import find_page

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.status import Status
    from rich.text import Text

    from meshwright.training.before.resolve import Vocabulary

WIDTH = 80
INDENT = "  "


@dataclass(frozen=True)
class Beginning:
    """Figures of a run that are known when it begins."""

    config: TrainConfig
    folder: Path | None
    vocabulary: Vocabulary
    parameters: int
    sizes: RunSizes
    device: str
    loaded: str | None  # what was loaded; None: the weights are random
    best: tuple[int, float] | None  # iteration and loss of the best validation so far


@dataclass(frozen=True)
class ScreenColumn:
    title: str
    width: int
    text: Callable[[Interval, float], str]  # of the interval and the seconds since the start
    rank: int  # a narrow terminal goes without the highest ones


COLUMNS = (
    ScreenColumn("step", 7, lambda x, _: f"{x.iteration:,}", 0),
    ScreenColumn("loss", 8, lambda x, _: f"{x.loss:.4f}", 0),
    ScreenColumn("z loss", 10, lambda x, _: f"{x.steps[-1]['z_loss']:.2e}", 5),
    ScreenColumn("gradient", 9, lambda x, _: f"{x.steps[-1]['grad_norm']:.3f}", 4),
    ScreenColumn("rate", 9, lambda x, _: f"{x.lr:.2e}", 3),
    ScreenColumn("tokens/s", 10, lambda x, _: f"{x.tokens_per_second:,.0f}", 1),
    ScreenColumn("MFU", 6, lambda x, _: "-" if x.mfu is None else f"{x.mfu:.1%}", 6),
    ScreenColumn("elapsed", 9, lambda _, seconds: clock(seconds), 5),
    ScreenColumn("left", 9, lambda x, _: clock(x.seconds_left), 2),
)


def open_screen(logging: Logging) -> LineScreen | None:
    """Return the short screen, or None if the log itself is shown: --log-format."""
    if logging.log_format == "auto" and console.is_notebook():
        return NotebookScreen()
    is_terminal = sys.stdout.isatty() and not console.is_quiet()
    if logging.log_format == "short" or (logging.log_format == "auto" and is_terminal):
        return LineScreen(is_terminal and sys.stderr.isatty() and logging.progress)
    return None


class LineScreen:
    """A screen that forms lines of at most 80 columns, which the caller prints."""

    def __init__(self, has_status: bool) -> None:
        from rich.console import Console

        has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        # In a notebook rich would display every captured text, empty, beside what is printed.
        self.console = Console(
            color_system="auto" if has_colours else None,
            highlight=False,
            emoji=False,
            force_jupyter=False,
        )
        self.began = time.perf_counter()
        self.columns: tuple[ScreenColumn, ...] = COLUMNS
        self.interval: Interval | None = None  # the last one
        self.checks: dict[str, list[Check]] = {}  # of each set
        self.best: tuple[int, float] | None = None
        self.run: Beginning | None = None
        self.status: Status | None = None
        if has_status:
            # On stderr, like the progress bar that follows; lines on stdout go above it.
            terminal = Console(file=sys.stderr)
            spinner = "dots" if terminal.encoding.startswith("utf") else "line"
            self.status = terminal.status("starting", spinner=spinner)
            self.status.start()

    def form(self, *parts: RenderableType) -> str:
        """Return text with the terminal's colours, no line of it longer than the screen."""
        with self.console.capture() as captured:
            for part in parts:
                self.console.print(part, width=self.width, soft_wrap=False, overflow="fold")
        return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))

    @property
    def width(self) -> int:
        return min(WIDTH, self.console.width)

    def grid(self, rows: Iterable[tuple[str, str]]) -> RenderableType:
        """Return names and values in two columns; a long value is cut, and a path in its middle."""
        from rich.table import Table
        from rich.text import Text

        grid, pairs = Table.grid(padding=(0, 2)), list(rows)
        names = max(len(name) for name, _ in pairs)
        room = self.width - len(INDENT) - names - 2
        for name, value in pairs:
            # rich would cut a path at its end, where it differs from others.
            path, space, rest = value.partition(" ")
            if "/" in path:
                value = shorten(path, max(room - len(space + rest), 12)) + space + rest
            grid.add_row(Text(INDENT + name, "dim"), Text(value, no_wrap=True, overflow="ellipsis"))
        return grid

    # Lines of the log that the console passes on

    def follow(self, line: str) -> None:
        """Show what the set-up is doing, until the header replaces it."""
        if self.status is not None and (text := line.strip(" >.")):
            self.status.update(shorten(text.splitlines()[0], self.width - 4).replace("[", "\\["))

    def format_remark(self, line: str) -> str:
        from rich.padding import Padding
        from rich.text import Text

        text = " ".join(line.removeprefix(" > ").split())
        is_warning = text.startswith("WARNING")
        return self.form(
            Padding(Text(text, "yellow" if is_warning else "dim"), (0, 0, 0, len(INDENT)))
        )

    # The run, in order

    def begin(self, run: Beginning) -> str:
        """Return the header, of at most twelve lines."""
        from rich.text import Text

        self.close()
        self.run, self.best, self.began = run, run.best, time.perf_counter()
        title = Text.assemble(("Meshwright", "bold"), f" {our_version()} on {run.device}")
        title.truncate(self.width, overflow="ellipsis")
        return self.form(title, self.grid(facts(run))) + "\n"

    def head(self, has_mfu: bool = False) -> Text:
        """Return the head of the table, with the columns that fit."""
        from rich.text import Text

        has_z_loss = self.run is not None and bool(self.run.config.training.z_loss_coef)
        shown = {"MFU": has_mfu, "z loss": has_z_loss}
        # Sort by rank: the step comes first, and columns at the end are left out first.
        chosen = [c for c in COLUMNS if shown.get(c.title, True)]
        chosen.sort(key=lambda c: c.rank)
        # The numbers of a long run need a wider column.
        if self.run is not None:
            step_width = len(f"{self.run.sizes.steps:,}") + 1
            if step_width > COLUMNS[0].width:
                chosen[0] = ScreenColumn("step", step_width, COLUMNS[0].text, 0)
        room = self.width - len(INDENT)
        while len(chosen) > 1 and sum(c.width for c in chosen) > room:
            chosen.pop()

        # Put them back into the order of the table.
        names = [c.title for c in COLUMNS]
        chosen.sort(key=lambda c: names.index(c.title))
        self.columns = tuple(chosen)
        titles = [c.title.rjust(c.width) for c in self.columns]
        return Text(INDENT + "".join(titles), "dim")

    def step(self, x: Interval) -> str:
        from rich.text import Text

        lines: list[RenderableType] = []
        if self.interval is None:
            lines.append(self.head(x.run.peak is not None))
        self.interval = x
        seconds = time.perf_counter() - self.began
        line = Text(INDENT)
        for column in self.columns:
            style = "bold" if column.title == "loss" else ""
            line.append(column.text(x, seconds).rjust(column.width), style)
        lines.append(line)
        if x.skipped:
            skipped = f"{x.skipped} of these {len(x.steps)} steps were skipped: not finite"
            scale = f", loss scale {x.steps[-1]['loss_scale']:g}"
            lines.append(Text(f"{INDENT}{skipped}{scale}", "yellow"))
        return self.form(*lines)

    def validation(self, check: Check) -> str:
        """Return a line of the table, with the loss below the training losses."""
        from rich.text import Text

        earlier = list(self.checks.setdefault(check.title, []))
        self.checks[check.title].append(check)

        # Find out whether it is the best so far.
        losses = [x.loss for x in earlier if not math.isnan(x.loss)]
        is_test = check.name == "test"
        # The best loss of earlier attempts is that of the only validation set, or a mean over all.
        if self.best is not None and not is_test and not check.dataset:
            losses.append(self.best[1])
        # Another loss of the same weights comes from other batches.
        is_again = any(x.iteration == check.iteration and x.loss != check.loss for x in earlier)
        # Or a finished run was started again.
        is_again |= check.is_at_end and self.interval is None and bool(losses)
        is_best = not is_test and not is_again and bool(losses) and check.loss < min(losses)

        cells = {"step": f"{check.iteration:,}", "loss": f"{check.loss:.4f}"}
        row = "".join(cells.get(c.title, "").rjust(c.width) for c in self.columns[:2])
        what = check.title
        if check.is_at_end:
            what += " at the end"
        if is_again:
            what += ", on other batches"
        line = Text(INDENT + row, "bold")
        line.append(f"  {what}", "bold")
        line.append(f", perplexity {check.ppl:,.2f}")
        if is_best:
            line.append(", the lowest so far")
        if check.ema_loss is not None:
            line.append(f"; the average {check.ema_loss:.4f}")
        return self.form_row(line)

    def form_row(self, line: Text) -> str:
        """Form a row between those of steps; if it is the first row, below the head."""
        line.truncate(self.width, overflow="ellipsis")
        return self.form(line) if self.interval is not None else self.form(self.head(), line)

    def score(self, iteration: int, task: str, headline: str, values: dict[str, float]) -> str:
        """Return a line with the headline measure of one of --eval-tasks."""
        from rich.text import Text

        step = f"{iteration:,}".rjust(self.columns[0].width)
        measure = f"{headline.replace('_', ' ')} {values[headline]:,.4f}"
        line = Text(f"{INDENT}{step}", "bold")
        line.append(f"  {task}: {measure}", "bold")
        return self.form_row(line)

    def close(self) -> None:
        """Remove the status line of the set-up."""
        if self.status is not None:
            self.status.stop()
            self.status = None

    def outcome(
        self, reason: str, is_done: bool, iteration: int, training: tuple[float, int]
    ) -> str:
        """Return how the run ended after `iteration` steps, and what to type next.

        `training` is the mean loss at the end, as on the page, and the number of its steps.
        """
        assert self.run is not None
        rows = [("done" if is_done else "stopped", self.describe_end(reason, is_done, iteration))]
        rows += [*self.training_loss(*training), *self.results()]
        folder = self.run.folder
        if folder is not None and find_page() is not None:
            rows.append(("page", str(folder / "report.html")))
        lines = [self.form("", self.grid(rows)), "", "next:"]
        # Commands are not wrapped, because line breaks would be copied from the terminal with them.
        room = self.width - len(INDENT)
        for words in next_commands(self.run, is_done):
            lines += [INDENT + line for line in broken(words, room)]
        if not self.run.config.checkpoint.save:
            lines.append(self.form("the model was not kept: --save DIR keeps it"))
        return "\n".join(lines)

    def describe_end(self, reason: str, is_done: bool, at: int) -> str:
        assert self.run is not None
        took = clock(time.perf_counter() - self.began)
        if is_done:
            return f"{at:,} steps in {took}"
        return f"after step {at:,} of {self.run.sizes.steps:,} in {took} ({reason})"

    def training_loss(self, mean: float, count: int) -> list[tuple[str, str]]:
        if not count:
            return []
        words = f", mean of the last {count:,} steps" if count > 1 else ""
        return [("loss", f"{mean:.4f} in training{words}")]

    def results(self) -> list[tuple[str, str]]:
        """Return each set's last loss, which is that at the end, and its lowest if it is lower."""
        out = []
        for title, checks in self.checks.items():
            final = checks[-1]
            lowest = min(checks, key=lambda c: math.inf if math.isnan(c.loss) else c.loss)
            at, best = lowest.iteration, lowest.loss
            # An earlier attempt may have had a lower loss on the only set, or as a mean over all.
            has_earlier = self.best is not None and final.name != "test" and not final.dataset
            if has_earlier and self.best is not None and self.best[1] < best:
                at, best = self.best
            text = f"{final.loss:.4f}, perplexity {final.ppl:,.2f}"
            if best < final.loss:
                # If the weights were the same, the lower loss says nothing about the training.
                if at == final.iteration:
                    text += f"; {best:.4f} on other batches"
                else:
                    text += f"; the lowest was {best:.4f} at step {at:,}"
            out.append((title, text))
        return out


class NotebookScreen(LineScreen):
    """The screen in a notebook, of twelve lines at most beside remarks: some steps, and the end."""

    STEPS = 6  # shown of the run's

    def __init__(self) -> None:
        super().__init__(has_status=False)
        self.next = self.stride = 0  # the next step to show, and how many lie between

    def format_remark(self, line: str) -> str:
        if line.startswith(("saved step", " > removed step")):
            return ""  # one for each save would fill the cell
        return super().format_remark(line)

    def begin(self, run: Beginning) -> str:
        from rich.text import Text

        super().begin(run)
        self.stride = math.ceil((run.sizes.steps - run.sizes.iteration) / self.STEPS)
        self.next = run.sizes.iteration + self.stride
        values = dict(facts(run))
        model, *_ = values["model"].partition(":")
        title = Text(f"Meshwright {our_version()}: {model}, {values['run']}, on {run.device}")
        title.truncate(self.width, overflow="ellipsis")
        return self.form(title)

    def step(self, x: Interval) -> str:
        if x.iteration < min(self.next, x.run.steps):
            return ""
        self.next = x.iteration + self.stride
        return super().step(x)

    def validation(self, check: Check) -> str:
        super().validation(check)
        return ""

    def score(self, iteration: int, task: str, headline: str, values: dict[str, float]) -> str:
        return ""

    def outcome(
        self, reason: str, is_done: bool, iteration: int, training: tuple[float, int]
    ) -> str:
        assert self.run is not None
        rows = [("done" if is_done else "stopped", self.describe_end(reason, is_done, iteration))]
        mean, count = training
        losses = [f"{mean:.4f} in training"] if count else []
        losses += [f"{checks[-1].loss:.4f} in {title}" for title, checks in self.checks.items()]
        if losses:
            rows.append(("loss", ", ".join(losses)))
        folder = self.run.folder
        kept = f"{folder} ({records()})" if folder else "none: save=DIR keeps the model"
        rows.append(("folder", kept))
        return self.form(self.grid(rows))


def facts(run: Beginning) -> list[tuple[str, str]]:
    """Return the lines of the header as names and values."""
    c = run.config
    m, o, seq = c.model, c.optimizer, c.data.seq_length or 0
    shape = f"{m.num_layers} layers of {m.hidden_size}, {m.num_attention_heads} heads"
    tokens = round(c.tokens_of(c.samples or c.steps * c.global_batch))
    tokenizer = run.vocabulary.tokenizer
    tokenizer_name = tokenizer.name if tokenizer is not None else "none"
    precision = c.precision.dtype
    if c.training.recompute_granularity:
        precision += f", recompute {c.training.recompute_granularity}"
    folder = "none: nothing is kept without --save"
    if run.folder:
        folder = f"{run.folder} ({records()})"
    return [
        ("model", f"{run.parameters:,} parameters: {shape}, context of {seq:,}"),
        ("run", f"{run.sizes.steps:,} steps, {tokens:,} tokens; {describe_start(run)}"),
        ("data", describe_data(c)),
        ("tokenizer", f"{tokenizer_name}, {run.vocabulary.size:,} ids"),
        ("batch", describe_batch(c)),
        ("precision", precision),
        ("layout", describe_layout(c)),
        ("memory", f"{describe_memory(c, run.vocabulary.padded)} and activations"),
        (
            "rate",
            f"{o.lr:g} to {o.min_lr:g}, {o.lr_decay_style}{describe_warmup(c)}; {o.optimizer}",
        ),
        ("folder", folder),
    ]


def describe_data(c: TrainConfig) -> str:
    if c.data.mock_data:
        return "random ids (--mock-data)"
    files = data_paths.prefixes(c.data)
    if not files:
        return "the caller's data sets"
    return files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def describe_batch(c: TrainConfig) -> str:
    size = c.global_batch
    length = c.data.seq_length or 0
    micro = f"{c.micro_batches(size)} x {c.micro_batch}"
    if c.world > 1:
        micro += " on each rank"
    batch = f"{size:,} sequences of {length:,} = {size * length:,} tokens, as {micro}"
    first_size = c.batch(0)
    if first_size < size:
        return f"{first_size:,} sequences, growing to {batch}"
    if len(c.sample_lengths) > 1:
        first, last = c.sample_lengths[0], c.sample_lengths[-1]
        return f"{batch}; of each the first {first:,} tokens, growing to {last:,}"
    return batch


def records() -> str:
    """Name the files of a run's folder that a person reads."""
    return "log.txt, report.html" if find_page() is not None else "log.txt"


def describe_start(run: Beginning) -> str:
    if run.loaded is None:
        return "new"
    done = run.sizes.iteration
    return f"goes on at step {done:,} of {run.loaded}" if done else f"weights of {run.loaded}"


def describe_warmup(c: TrainConfig) -> str:
    steps = round(c.warmup_samples / c.global_batch)
    return f" after {steps:,} steps of warm-up" if steps else ""


def next_commands(run: Beginning, is_done: bool) -> list[list[str]]:
    """Return three commands that follow from how the run ended."""
    save, folder = run.config.checkpoint.save, run.folder
    out = []
    if folder is not None and not is_done:
        out.append(["train", "--config", str(folder / "config.toml")])
    # Text needs a tokenizer, which the ids of --mock-data, for example, lack.
    if save and tokenizers.find_saved(Path(save)):
        out += [["chat", save], ["evaluate", save, "--input", "FILE.txt"]]
    elif save:
        out.append(["inspect", save])
    if folder is not None:
        out.append(["report", str(folder), "OTHER-RUN"])
    known = registry.entries("commands")
    return [["meshwright", *words] for words in out[:3] if words[0] in known]


def broken(words: list[str], room: int) -> list[str]:
    """Return a command as lines to copy: more than one if it is longer than the screen."""
    command = shlex.join(words)
    if len(command) <= room:
        return [command]
    lines = [shlex.join(words[:2])]
    lines += [INDENT + shlex.quote(word) for word in words[2:]]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def shorten(text: str, room: int) -> str:
    """Leave out the middle of a text that is too long."""
    if len(text) <= room:
        return text
    half = max(room - 1, 2) // 2
    return f"{text[: max(room - 1 - half, 0)]}…{text[-half:]}"


def clock(seconds: float) -> str:
    """Return a time as m:ss, h:mm:ss or days and hours."""
    all_minutes, secs = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(all_minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes:02d}:{secs:02d}"
    return f"{minutes}:{secs:02d}"
