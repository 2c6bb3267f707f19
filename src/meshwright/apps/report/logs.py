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
from typing import TYPE_CHECKING, Any

from meshwright.apps.pages.styles import COLOURS
from meshwright.base.errors import BAD_DATA, DONE, USAGE, UserError, bad_data
from meshwright.base.files import replacing
from meshwright.base.records import align_columns, json_ready
from meshwright.config.problem import SettingsError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PATTERNS = ("*.log", "*.out", "*log*.txt")  # of logs in folders
LONGEST_LINE = 1 << 16  # bytes; a longer one is cut
MOST_BARS = 100
# of lines that are read
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
    values = dict(part.strip().rsplit(": ", 1) for part in text.split("|") if ": " in part)
    ms, batch = (
        _number(values.get(n, "")) for n in ("elapsed time per iteration (ms)", "global batch size")
    )
    speed, tpt, tflops, per_gpu = (
        _number(values.get(n, ""))
        for n in ("samples per second", "tpt", "TFLOPs", "throughput per GPU (TFLOP/s/GPU)")
    )
    speed = tpt if speed is None else speed
    if speed is None and ms and batch:
        speed = batch * 1e3 / ms
    tflops = per_gpu if tflops is None else tflops
    return (
        LogLine(int(iteration[1]), speed, _number(values.get("lm loss", "")), tflops)
        if ms or speed
        else None
    )


def libai_line(text: str) -> LogLine | None:
    iteration = re.search(r"\biteration: +(\d+)/\d+", text)
    if iteration is None or "total_loss" not in text:
        return None
    speed, loss = _after("total_throughput: +", text), _after("total_loss: +", text)
    if (
        speed is None
        and (seconds := _after(r"\btime: +", text))
        and (batch := _after(r"total_batch_size: +", text))
    ):
        speed = batch / seconds
    return LogLine(int(iteration[1]), speed, loss)


def oneflow_line(text: str) -> LogLine | None:
    """Read a row `| step | micro_batches | samples | throughput | latency | loss |`, or `step=`."""
    cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
    if text.lstrip().startswith("|") and len(cells) == 6 and cells[0].isdigit():
        return LogLine(int(cells[0]), _number(cells[3]), _number(cells[5]))
    step = re.search(r"\bstep=(\d+),", text)
    if step is None or "throughput=" not in text:
        return None
    return LogLine(int(step[1]), _after("throughput=", text), _after("loss=", text))


def deepspeed_line(text: str) -> LogLine | None:
    """Read what DeepSpeed's engine and timer print every `steps_per_print` steps."""
    if (step := re.search(r"\bsteps: (\d+) loss: ", text)) is not None:
        return LogLine(int(step[1]), _after("samples/sec: +", text), _after("loss: +", text))
    step, speed = re.search(r"\bglobal_step=(\d+),", text), _after("CurrSamplesPerSec=", text)
    return LogLine(int(step[1]), speed) if step is not None and speed is not None else None


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
        if not path.is_dir():
            if not path.exists():
                raise bad_data(f"there is no log or folder {path}")
            yield path, str(path)
            continue
        for file in sorted({p for pattern in PATTERNS for p in path.rglob(pattern) if p.is_file()}):
            if file.name != "log.txt" or not has_output(file.parent):
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
                log.has_failure = log.has_failure or any(
                    word in piece for word in WORDS_OF_FAILURES
                )
                if piece.startswith(b"|") or any(word in piece for word in WORDS_OF_LINES):
                    read_line(log, clean(piece))
            log.last = rest.strip() or log.last  # without its end: cut, perhaps within a number
    return log


def clean(piece: bytes) -> str:
    """Return the text of a line without colours."""
    return re.sub(r"\x1b\[[\d;]*[mK]", "", piece.decode(errors="replace")).rstrip()


def read_line(log: Log, text: str) -> None:
    if "iteration" in text or "step" in text or text.startswith("|"):
        for form, read in FORMS.items():
            if (line := read(text)) is not None:
                log.lines.setdefault(form, []).append(line)
                if (gib := _after(r"memory \(GiB\): +", text)) is not None:
                    _keep_most(log, "tensors", gib * 1024)
                return
    if "MiB" in text:
        read_nvidia(log, text)
    elif "memory (MB)" in text and (reserved := _after("max reserved: +", text)) is not None:
        _keep_most(log, "reserved", reserved)
    elif "lm loss PPL:" in text and "validation loss at" in text and " test " not in text:
        ppl = _after("lm loss PPL: +", text)
        log.ppl = min(
            (x for x in (ppl, log.ppl) if x is not None and not math.isnan(x)), default=None
        )
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
    pairs = itertools.pairwise(lines)
    return [b for a, b in pairs if a.iteration < b.iteration and b.iteration * 10 > last] or list(
        lines
    )


def row_of(log: Log) -> LogRow | None:
    """Return the log's row; None if it has no line of a step."""
    form = next((form for form in FORMS if form in log.lines), None)
    if form is None:
        return None
    lines = log.lines[form]
    counted = after_warm_up(lines)
    speeds = [x for line in counted if (x := line.samples_per_second) is not None]
    tflops = [x for line in counted if (x := line.tflops) is not None]
    memory_from = next((s for s in ("nvidia-smi", "reserved", "tensors") if s in log.memory), "")
    return LogRow(
        config_of(log),
        statistics.median(speeds) if speeds else None,
        log.memory.get(memory_from),
        memory_from,
        statistics.median(tflops) if tflops else None,
        next((x for line in reversed(lines) if (x := line.loss) is not None), None),
        log.ppl,
        lines[-1].iteration,
        len(counted),
        form,
        log.name,
    )


def title_of(log: Log) -> str:
    """Return the name of a log, or of its folder if all logs have that name."""
    path = log.path.absolute()
    return path.parent.name if path.stem in ("output", "log") else path.stem


def config_of(log: Log) -> str:
    """Return a name such as nl24_fp16_2x2x4_ac_mb32_gb512_2n8g, with DP x TP x PP.

    The arguments in the log say what ran, the names of the log and its folder the rest.
    """
    arguments, path = log.arguments, log.path.absolute()
    name = f"{path.parent.name}/{path.stem}"

    def value(argument: str, pattern: str) -> str | None:
        stated = arguments.get(argument)
        if stated and re.fullmatch(r"\d+", stated):
            return stated
        parts_of_name = re.findall(pattern, name, re.I)
        return str(parts_of_name[-1]).lower() if parts_of_name else None

    layers, tp, pp, micro, batch = (
        value(argument, rf"(?:^|[_/]){short}(\d+)")
        for argument, short in (
            ("num_layers", "nl"),
            ("tensor_model_parallel_size", "mp"),
            ("pipeline_model_parallel_size", "pp"),
            ("micro_batch_size", "mb"),
            ("global_batch_size", "gb"),
        )
    )
    if not (layers and tp and pp):
        return title_of(log)
    machines = machines_of(log)
    world = value("world_size", "$^") or (str(math.prod(machines)) if machines else None)
    size = f"_{machines[0]}n{machines[1]}g" if machines else f"_{world}g" if world else ""
    ranks = int(tp) * int(pp)
    dp = int(world) // ranks if world and ranks else "?"
    named = value("", r"_(fp16|bf16|fp32|amp)(?=_|$)") or "fp32"
    precision = (
        next((p for p in ("fp16", "bf16") if arguments.get(p) == "True"), "fp32")
        if "fp16" in arguments
        else named
    )
    recomputed = (
        arguments.get("checkpoint_activations") == "True"
        or arguments.get("recompute_granularity") == "full"
    )
    if "fp16" not in arguments:
        recomputed = "_actrue" in name.lower()
    parts = [f"nl{layers}", precision, f"{dp}x{tp}x{pp}", *(["ac"] if recomputed else [])]
    return "_".join([*parts, *(f"{n}{x}" for n, x in (("mb", micro), ("gb", batch)) if x)]) + size


def machines_of(log: Log) -> tuple[int, int] | None:
    """Return the numbers of machines and of devices on each, if the path states them (_2n8g)."""
    stated = re.findall(r"[_/](\d+)n(\d+)g", str(log.path.absolute().with_suffix("")))
    return (int(stated[-1][0]), int(stated[-1][1])) if stated else None


def join_machines(logs: Sequence[Log]) -> list[Log]:
    """Leave out the logs of a run's other machines, and add their memory to the one log with steps.

    The logs of machines have one name up to their date. Runs of one name are taken in the order of
    their dates; logs are left apart if each run has not the same number of them, or another number
    than the name says. A log that has neither steps nor memory is taken for a machine's only if the
    name says how many there are.
    """
    groups: dict[str, list[Log]] = {}
    for log in logs:
        name = re.sub(r"_\d{8}_\w+$", "", title_of(log))
        groups.setdefault(name if name != title_of(log) else log.name, []).append(log)
    joined: set[int] = set()
    for group in groups.values():
        group.sort(key=title_of)
        machines = machines_of(group[0])
        first = [log for log in group if log.lines]
        without = [log for log in group if not (log.lines or log.has_failure)]
        others = [log for log in without if machines or "nvidia-smi" in log.memory]
        each = machines[0] - 1 if machines else len(others) // max(1, len(first))
        if first and len(others) == each * len(first):
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
    return (
        f"no line of a step in it; its last line: {shown[:100]}{'...' if len(shown) > 100 else ''}"
    )


# Output

TABLE_HEAD = (
    "config",
    "samples/s",
    "memory (MiB)",
    "TFLOPs",
    "loss",
    "val. PPL",
    "iteration",
    "log",
)


def cells(row: LogRow) -> list[str]:
    def shown(value: float | None, form: str, after: str = "") -> str:
        return "-" if value is None else f"{value:{form}}{after}"

    memory = shown(row.memory_mib, ".0f", f" ({row.memory_from})")
    numbers = (
        shown(row.samples_per_second, ".2f"),
        memory,
        shown(row.tflops, ".1f"),
        shown(row.loss, ".4f"),
    )
    return [row.config, *numbers, shown(row.ppl, ".2f"), str(row.iteration), row.log]


def logs_as_text(rows: Sequence[LogRow]) -> str:
    return "\n".join(align_columns([list(TABLE_HEAD), *map(cells, rows)])) + "\n"


def as_markdown(rows: Sequence[LogRow]) -> str:
    lines = [list(TABLE_HEAD), ["---"] * len(TABLE_HEAD), *map(cells, rows)]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def as_csv(rows: Sequence[LogRow]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, LogRow.__dataclass_fields__, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.__dict__ for row in rows)
    return file.getvalue()


def logs_as_json(rows: Sequence[LogRow], without: Sequence[dict[str, str]] = ()) -> str:
    report: dict[str, Any] = {
        "runs": [row.__dict__ for row in rows],
        "without_steps": list(without),
    }
    return json.dumps(json_ready(report), allow_nan=False) + "\n"


TABLES = {"text": logs_as_text, "csv": as_csv, "markdown": as_markdown, "json": logs_as_json}


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
    logs = join_machines(read)
    without += [{"log": log.name, "reason": why_not(log)} for log in logs if not log.lines]
    rows = [row for log in logs if (row := row_of(log)) is not None]
    rows.sort(
        key=lambda row: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", row.config)]
    )
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
    forms, configs = list(dict.fromkeys(row.form for row in rows)), [row.config for row in rows]
    for axes, title, values in (
        (panels[0], "samples per second", [row.samples_per_second for row in rows]),
        (panels[1], "memory of a device, MiB", [row.memory_mib for row in rows]),
    ):
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
    which = (
        f"...{Path(row.log).stem[-30:]}" if configs.count(row.config) > 1 else row.form
        for row in rows
    )
    labels = [f"{config}\n{note}" for config, note in zip(configs, which, strict=True)]
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
