"""A table of benchmarks from their logs: Megatron's lines, DeepSpeed's, LiBai's and OneFlow's.

The speed of a log is the median of its lines after the warm-up: no first line of a start, and no
line within the first tenth of the iterations, unless there is no other.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.apps.pages.styles import COLOURS
from meshwright.base.errors import BAD_DATA, DONE, USAGE, UserError, bad_data
from meshwright.base.files import replacing
from meshwright.base.records import align_columns, json_ready, or_dash
from meshwright.config.problem import SettingsError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PATTERNS = ("*.log", "*.out", "*log*.txt")  # of logs in folders
LONGEST_LINE = 1 << 16  # bytes; a longer one is cut
MOST_BARS = 100
# A line with none of these words is not parsed, unless it is a row of a table.
WORDS_OF_LINES = (b"iteration", b"step", b"MiB", b"memory (MB)", b"lm loss PPL", b" ..")
WORDS_OF_FAILURES = (b"Traceback (most", b"rror: ", b"core dumped", b"Killed")
NUMBER = r"([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"


@dataclass(frozen=True, slots=True)
class LogLine:
    """The figures of the steps since the line before."""

    iteration: int
    samples_per_second: float | None = None
    loss: float | None = None
    tflops: float | None = None  # per device


@dataclass
class Log:
    """The content of one log."""

    path: Path
    name: str  # the path as shown
    lines: dict[str, list[LogLine]] = field(default_factory=dict)  # per form
    arguments: dict[str, str] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)  # MiB, per source
    ppl: float | None = None  # the lowest of all validations
    last: bytes = b""  # the last line that is not empty
    has_failure: bool = False  # a line has a word of a failure
    nvidia: list[str] = field(default_factory=list)  # the columns of nvidia-smi's last head


@dataclass(frozen=True)
class LogRow:
    """One log in the table."""

    config: str
    samples_per_second: float | None
    memory_mib: float | None
    memory_from: str
    tflops: float | None
    loss: float | None
    ppl: float | None
    iteration: int
    lines: int  # those that the medians are of
    form: str
    log: str


# Lines of steps


def megatron_line(text: str) -> LogLine | None:
    """Read ` iteration 100/ 220 | elapsed time per iteration (ms): 12.5 | ...`, of any version."""
    iteration = re.search(r"\biteration +(\d+) */", text)
    if iteration is None or "|" not in text:
        return None
    values: dict[str, float | None] = {}
    # `name: value` between bars; versions differ in names and order.
    for part in text.split("|"):
        if ": " in part:
            name, value = part.strip().rsplit(": ", 1)
            values[name] = _number(value)

    # Versions name the speed and the TFLOPs differently; the oldest have the time alone.
    ms = values.get("elapsed time per iteration (ms)")
    batch = values.get("global batch size")
    speed = values.get("samples per second")
    if speed is None:
        speed = values.get("tpt")
    if speed is None and ms and batch:
        speed = batch * 1e3 / ms
    tflops = values.get("TFLOPs")
    if tflops is None:
        tflops = values.get("throughput per GPU (TFLOP/s/GPU)")
    if not ms and not speed:
        return None
    return LogLine(int(iteration[1]), speed, values.get("lm loss"), tflops)


def libai_line(text: str) -> LogLine | None:
    iteration = re.search(r"\biteration: +(\d+)/\d+", text)
    if iteration is None or "total_loss" not in text:
        return None
    speed = _after("total_throughput: +", text)
    if speed is None:
        seconds = _after(r"\btime: +", text)
        batch = _after(r"total_batch_size: +", text)
        speed = batch / seconds if seconds and batch else None
    return LogLine(int(iteration[1]), speed, _after("total_loss: +", text))


def oneflow_line(text: str) -> LogLine | None:
    """Read a row `| step | micro_batches | samples | throughput | latency | loss |`, or `step=`."""
    text = text.strip()
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    if text.startswith("|") and len(cells) == 6 and cells[0].isdecimal():
        return LogLine(int(cells[0]), _number(cells[3]), _number(cells[5]))

    step = re.search(r"\bstep=(\d+),", text)
    if step is None or "throughput=" not in text:
        return None
    return LogLine(
        int(step[1]),
        _after("throughput=", text),
        _after("loss=", text),
    )


def deepspeed_line(text: str) -> LogLine | None:
    """Read what DeepSpeed's engine and timer print every `steps_per_print` steps."""
    step = re.search(r"\bsteps: (\d+) loss: ", text)
    if step is not None:
        return LogLine(int(step[1]), _after("samples/sec: +", text), _after("loss: +", text))
    step = re.search(r"\bglobal_step=(\d+),", text)
    speed = _after("CurrSamplesPerSec=", text)
    if step is None or speed is None:
        return None
    return LogLine(int(step[1]), speed)


# The first form of which a log has lines is the one it is read in.
FORMS = {
    "megatron": megatron_line,
    "libai": libai_line,
    "oneflow": oneflow_line,
    "deepspeed": deepspeed_line,
}


def _number(text: str) -> float | None:
    number = re.match(NUMBER, text.strip(), re.I)
    try:
        return float(number[1]) if number else None
    except ValueError:  # such as 1.2.3
        return None


def _after(pattern: str, text: str) -> float | None:
    number = re.search(pattern + NUMBER, text, re.I)
    return _number(number[1]) if number else None


# Reading


def find_logs(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Yield logs and their names: named files, and in folders those that look like logs."""
    for path in paths:
        if not path.exists():
            raise bad_data(f"there is no log or folder {path}")
        if not path.is_dir():
            yield path, str(path)
            continue
        # A file may look like a log by two patterns.
        found = {file for pattern in PATTERNS for file in path.rglob(pattern)}
        for file in sorted(found):
            if file.is_file() and (file.name != "log.txt" or not has_output(file.parent)):
                yield file, str(file)


def has_output(folder: Path) -> bool:
    """Return whether the run of log.txt has an output.log too, which is enough.

    The benchmark's script writes it into the folder or, on several machines, into one that has this
    name and the time.
    """
    dated = folder.parent.glob(f"{escape(folder.name)}_[0-9]*_[0-9]*/output.log")
    return (folder / "output.log").exists() or any(dated)


def read_log(path: Path, name: str) -> Log:
    log = Log(path, name)
    with path.open("rb") as file:
        while block := file.readline(LONGEST_LINE):
            *pieces, rest = re.split(rb"[\r\n]", block)  # progress bars write over their line
            for piece in pieces:
                log.last = piece.strip() or log.last
                # Words are looked for in bytes: most lines are neither decoded nor parsed.
                if any(word in piece for word in WORDS_OF_FAILURES):
                    log.has_failure = True
                if piece.startswith(b"|") or any(word in piece for word in WORDS_OF_LINES):
                    read_line(log, clean(piece))
            log.last = rest.strip() or log.last  # without its end: cut, perhaps within a number
    return log


def clean(piece: bytes) -> str:
    """Return the text of a line without colours."""
    return re.sub(r"\x1b\[[\d;]*[mK]", "", piece.decode(errors="replace")).rstrip()


def read_line(log: Log, text: str) -> None:
    # A line of steps.
    if "iteration" in text or "step" in text or text.startswith("|"):
        for form, read in FORMS.items():
            line = read(text)
            if line is None:
                continue
            log.lines.setdefault(form, []).append(line)
            if (gib := _after(r"memory \(GiB\): +", text)) is not None:
                _keep_most(log, "tensors", gib * 1024)
            return

    # Memory, a validation, or an argument in Megatron's list of them.
    if "MiB" in text:
        read_nvidia(log, text)
    elif "memory (MB)" in text and (reserved := _after("max reserved: +", text)) is not None:
        _keep_most(log, "reserved", reserved)
    elif "lm loss PPL:" in text and "validation loss at" in text and " test " not in text:
        ppl = _after("lm loss PPL: +", text)
        if ppl is not None and not math.isnan(ppl):
            log.ppl = ppl if log.ppl is None else min(ppl, log.ppl)
    elif argument := re.match(r" +(\w+) \.{2,} (.*)$", text):
        log.arguments.setdefault(argument[1], argument[2].strip())


def read_nvidia(log: Log, text: str) -> None:
    """Take the memory in use from a row of nvidia-smi's CSV, in the columns of the head before."""
    cells = [cell.strip() for cell in text.split(",")]
    if "memory.used [MiB]" in cells:
        log.nvidia = cells
    elif log.nvidia and len(cells) == len(log.nvidia):
        cell = cells[log.nvidia.index("memory.used [MiB]")]
        if cell.endswith(" MiB") and (used := _number(cell)) is not None:
            _keep_most(log, "nvidia-smi", used)


def _keep_most(log: Log, source: str, mib: float) -> None:
    log.memory[source] = max(mib, log.memory.get(source, 0.0))


# Rows


def after_warm_up(lines: Sequence[LogLine]) -> list[LogLine]:
    """Return the lines that the medians are of; see the top of this module."""
    last = max(line.iteration for line in lines)
    counted = []
    for before, line in itertools.pairwise(lines):
        # A start begins where iterations go back.
        if before.iteration < line.iteration and line.iteration * 10 > last:
            counted.append(line)
    return counted or list(lines)


def row_of(log: Log) -> LogRow | None:
    """Return the log's row; None if it has no line of a step."""
    form = next((form for form in FORMS if form in log.lines), None)
    if form is None:
        return None
    lines = log.lines[form]
    counted = after_warm_up(lines)
    losses = [line.loss for line in lines if line.loss is not None]
    # The most telling source: the whole process, torch's allocator, tensors alone.
    sources = ("nvidia-smi", "reserved", "tensors")
    memory_from = next((source for source in sources if source in log.memory), "")
    return LogRow(
        config=config_of(log),
        samples_per_second=median_of(line.samples_per_second for line in counted),
        memory_mib=log.memory.get(memory_from),
        memory_from=memory_from,
        tflops=median_of(line.tflops for line in counted),
        loss=losses[-1] if losses else None,
        ppl=log.ppl,
        iteration=lines[-1].iteration,
        lines=len(counted),
        form=form,
        log=log.name,
    )


def median_of(values: Iterable[float | None]) -> float | None:
    """Return the median of those that are known."""
    known = [x for x in values if x is not None]
    return statistics.median(known) if known else None


def title_of(log: Log) -> str:
    """Return the name of a log, or of its folder if all logs have that name."""
    path = log.path.absolute()
    return path.parent.name if path.stem in ("output", "log") else path.stem


def config_of(log: Log) -> str:
    """Return a name such as nl24_fp16_2x2x4_ac_mb32_gb512_2n8g, with DP x TP x PP.

    The arguments in the log say what ran, the names of the log and its folder the rest.
    """
    arguments = log.arguments
    path = log.path.absolute()
    name = f"{path.parent.name}/{path.stem}"

    def number(argument: str, short: str) -> str | None:
        stated = arguments.get(argument)
        if stated and re.fullmatch(r"\d+", stated):
            return stated
        # The last one is in the log's own name; its folder may state another.
        in_name = re.findall(rf"(?:^|[_/]){short}(\d+)", name, re.I)
        return str(in_name[-1]) if in_name else None

    layers = number("num_layers", "nl")
    tp = number("tensor_model_parallel_size", "mp")
    pp = number("pipeline_model_parallel_size", "pp")
    if not (layers and tp and pp):
        return title_of(log)

    # The number of devices, from which data parallelism follows.
    machines = machines_of(log)
    world = arguments.get("world_size", "")
    if re.fullmatch(r"\d+", world) is None:
        world = str(math.prod(machines)) if machines else ""
    size = f"_{world}g" if world else ""
    if machines:
        size = f"_{machines[0]}n{machines[1]}g"
    ranks = int(tp) * int(pp)
    dp = int(world) // ranks if world and ranks else "?"

    # Precision and recomputation: arguments of Megatron's list, or words of the name.
    if "fp16" in arguments:
        chosen = [low for low in ("fp16", "bf16") if arguments.get(low) == "True"]
        precision = chosen[0] if chosen else "fp32"
        is_recomputed = (
            arguments.get("checkpoint_activations") == "True"
            or arguments.get("recompute_granularity") == "full"
        )
    else:
        named = re.findall(r"_(fp16|bf16|fp32|amp)(?=_|$)", name, re.I)
        precision = named[-1].lower() if named else "fp32"
        is_recomputed = "_actrue" in name.lower()

    parts = [f"nl{layers}", precision, f"{dp}x{tp}x{pp}"]
    if is_recomputed:
        parts.append("ac")
    if micro := number("micro_batch_size", "mb"):
        parts.append(f"mb{micro}")
    if batch := number("global_batch_size", "gb"):
        parts.append(f"gb{batch}")
    return "_".join(parts) + size


def machines_of(log: Log) -> tuple[int, int] | None:
    """Return the numbers of machines and of devices on each, if the path states them (_2n8g)."""
    stated = re.findall(r"[_/](\d+)n(\d+)g", str(log.path.absolute().with_suffix("")))
    return (int(stated[-1][0]), int(stated[-1][1])) if stated else None


def join_machines(logs: Sequence[Log]) -> list[Log]:
    """Leave out the logs of a run's other machines, and add their memory to the one log with steps.

    The logs of machines have one name up to their date. Runs of one name are taken in the order of
    their dates. Logs are left apart if the runs do not have equally many of them, or not as many as
    the name says. A log that has neither steps nor memory is taken for a machine's only if the name
    says how many there are.
    """
    groups: dict[str, list[Log]] = {}
    for log in logs:
        title = title_of(log)
        name = re.sub(r"_\d{8}_\w+$", "", title)
        groups.setdefault(name if name != title else log.name, []).append(log)

    joined: set[int] = set()
    for group in groups.values():
        group.sort(key=title_of)
        # The first log of a run has its steps, the others a machine's memory alone.
        machines = machines_of(group[0])
        first = [log for log in group if log.lines]
        others = []
        for log in group:
            if not log.lines and not log.has_failure and (machines or "nvidia-smi" in log.memory):
                others.append(log)
        each = machines[0] - 1 if machines else len(others) // max(1, len(first))
        if not first or len(others) != each * len(first):
            continue
        # In the order of their dates, so many logs of machines belong to each run.
        for n, log in enumerate(others):
            if "nvidia-smi" in log.memory:
                _keep_most(first[n // each], "nvidia-smi", log.memory["nvidia-smi"])
            joined.add(id(log))
    return [log for log in logs if id(log) not in joined]


def why_not(log: Log) -> str:
    """Return why a log has no row."""
    if not log.last:
        return "empty"
    shown = clean(log.last)
    if "\0" in shown or "\ufffd" in shown:
        return "no line of a step in it; not a text"
    if len(shown) > 100:
        shown = f"{shown[:100]}..."
    return f"no line of a step in it; its last line: {shown}"


# Output

TABLE_HEAD = [
    "config",
    "samples/s",
    "memory (MiB)",
    "TFLOPs",
    "loss",
    "val. PPL",
    "iteration",
    "log",
]


def cells(row: LogRow) -> list[str]:
    memory = or_dash(row.memory_mib, ".0f")
    if row.memory_mib is not None:
        memory += f" ({row.memory_from})"
    return [
        row.config,
        or_dash(row.samples_per_second, ".2f"),
        memory,
        or_dash(row.tflops, ".1f"),
        or_dash(row.loss, ".4f"),
        or_dash(row.ppl, ".2f"),
        str(row.iteration),
        row.log,
    ]


def logs_as_text(rows: Sequence[LogRow]) -> str:
    return "\n".join(align_columns([TABLE_HEAD, *map(cells, rows)])) + "\n"


def as_markdown(rows: Sequence[LogRow]) -> str:
    out = ""
    for line in (TABLE_HEAD, ["---"] * len(TABLE_HEAD), *map(cells, rows)):
        escaped = (cell.replace("|", "\\|") for cell in line)
        out += f"| {' | '.join(escaped)} |\n"
    return out


def as_csv(rows: Sequence[LogRow]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, LogRow.__dataclass_fields__, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.__dict__ for row in rows)
    return file.getvalue()


def logs_as_json(rows: Sequence[LogRow], without: Sequence[dict[str, str]]) -> str:
    report = {"runs": [row.__dict__ for row in rows], "without_steps": list(without)}
    return json.dumps(json_ready(report), allow_nan=False) + "\n"


TABLES = {"text": logs_as_text, "csv": as_csv, "markdown": as_markdown}


def extract(paths: Sequence[Path], form: str, picture: Path | None) -> int:
    """Print the table of all logs, and draw a picture of it."""
    if picture is not None and picture.suffix not in (".svg", ".png"):
        raise SettingsError(
            f"{{output={picture}}}: with {{logs=True}} it is a picture; name it .svg or .png", USAGE
        )
    read: list[Log] = []
    without: list[dict[str, str]] = []
    for path, name in find_logs(paths):
        try:
            read.append(read_log(path, name))
        except OSError as error:
            without.append({"log": name, "reason": f"cannot be read: {error.strerror}"})

    rows: list[LogRow] = []
    for log in join_machines(read):
        if (row := row_of(log)) is not None:
            rows.append(row)
        else:
            without.append({"log": log.name, "reason": why_not(log)})
    rows.sort(key=natural_order)

    if form == "json":
        print(logs_as_json(rows, without), end="")
    elif rows:
        print(TABLES[form](rows), end="")
    for entry in without:
        print(f"{entry['log']}: {entry['reason']}", file=sys.stderr)
    if not rows:
        searched = ", ".join(map(str, paths))
        raise UserError(
            f"no log with a line of a step in {searched}; in folders, {', '.join(PATTERNS)} are read",
            BAD_DATA,
        )
    if picture is not None:
        write_picture(picture, draw_logs(rows))
        print(picture, file=sys.stderr)
    return DONE


def natural_order(row: LogRow) -> list[int | str]:
    """Return what sorts configurations by the numbers in them: mb2 before mb16."""
    return [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", row.config)]


def draw_logs(rows: Sequence[LogRow]) -> Figure:
    """Draw samples/s and memory as bars, a row each."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    if len(rows) > MOST_BARS:
        print(
            f"the picture shows the first {MOST_BARS} of {len(rows)} logs; name fewer for the others",
            file=sys.stderr,
        )
    rows = rows[:MOST_BARS]
    figure = Figure(figsize=(10, 1.2 + 0.35 * len(rows)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True, squeeze=False)[0]
    forms = list(dict.fromkeys(row.form for row in rows))
    for axes, title, values in (
        (panels[0], "samples per second", [row.samples_per_second for row in rows]),
        (panels[1], "memory of a device, MiB", [row.memory_mib for row in rows]),
    ):
        # A bar for each log, in the colour of its form.
        for n, (row, value) in enumerate(zip(rows, values, strict=True)):
            if value is not None and math.isfinite(value):
                axes.barh(n, value, color=COLOURS[forms.index(row.form)])
                axes.text(value, n, f" {value:,.6g}", va="center", fontsize=8)
        axes.set_xlabel(title)
        axes.margins(x=0.2)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.spines[["top", "right"]].set_visible(False)

    # The end of a log's name, where its date is, distinguishes runs of one configuration.
    configs = [row.config for row in rows]
    labels = []
    for row in rows:
        is_repeated = configs.count(row.config) > 1
        note = f"...{Path(row.log).stem[-30:]}" if is_repeated else row.form
        labels.append(f"{row.config}\n{note}")
    panels[0].set_yticks(range(len(rows)), labels, fontsize=8, parse_math=False)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    return figure


def write_picture(target: Path, figure: Figure) -> None:
    with replacing(target, typed=True) as file:
        figure.savefig(
            file,
            format=target.suffix[1:],
            dpi=150,
            metadata={"Date": None} if target.suffix == ".svg" else {},
        )
