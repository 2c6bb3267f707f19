"""--profile: a trace of some steps by torch's profiler, and a summary of where their time went."""

from __future__ import annotations

import bisect
import contextlib
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.base import device as devices
from meshwright.base.console import remark, say
from meshwright.base.files import own_folder, replacing, require_unlinked
from meshwright.config.schema import Logging

# The kinds of work, by the names of kernels or operators; the first that matches counts.
KINDS = {
    "communication": r"nccl|c10d::|gloo|all_?reduce|all_?gather|reduce_?scatter",
    "attention": r"flash|fmha|sdpa|attention|attn|_attend|cudnn.*(bprop|fprop)",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|split_?k|scaled_mm|symm|syrk|\b(add|b|baddb)?mm\b",
}
MEMORY_BOUND = "memory-bound"
# Of several kinds at one moment the first of these counts: communication only if nothing else runs.
ORDER = ("matrix products", "attention", MEMORY_BOUND, "communication")
IDLE = "idle"
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace that run on the device
LARGEST = 15
NAME = 72  # columns of a kernel's name

Span = tuple[float, float]  # begin and end in microseconds


@dataclass(frozen=True)
class Kernel:
    name: str
    kind: str
    ms: float  # a step
    calls: float  # a step
    share: float  # of all kernels' time


@dataclass(frozen=True)
class Summary:
    ms: float  # a step, from the first kernel to the end of the last
    shares: dict[str, float]  # of that time, by kind; the sum is 1
    hidden_communication: float  # share of that time in which communication ran beside other work
    kernels: list[Kernel]  # the largest

    def lines(self) -> list[str]:
        parts = [f"{kind} {share:.1%}" for kind, share in self.shares.items()]
        out = [f"{self.ms:.2f} ms a step: {', '.join(parts)}"]
        if self.hidden_communication:
            out.append(f"communication beside other work: {self.hidden_communication:.1%}")
        out.append(" ms a step   share   calls  largest kernels")
        for k in self.kernels:
            name = shorten_kernel(k.name)
            out.append(f"{k.ms:10.3f}{k.share:8.1%}{k.calls:8.1f}  {name} ({k.kind})")
        return out


def summarise(trace: Path, steps: int) -> Summary | None:
    """Return the summary of a trace file of torch's profiler; None if no work is in it."""
    with gzip.open(trace) if trace.suffix == ".gz" else trace.open("rb") as file:
        # Events of type "X" have a duration.
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    kernels = [e for e in events if e.get("cat") in KERNELS]
    spans = defaultdict[str, list[Span]](list)
    calls = Counter[str]()
    if kernels:
        for e in kernels:
            spans[e["name"]].append((e["ts"], e["ts"] + e["dur"]))
            calls[e["name"]] += 1
    else:
        # On a CPU operators do the work. They call each other, so each counts its own time only.
        for name, parts in own_time(e for e in events if e.get("cat") == "cpu_op"):
            spans[name] += parts
            calls[name] += 1
    if not spans:
        return None
    every = [span for parts in spans.values() for span in parts]
    begin = min(begin for begin, _ in every)
    whole = max(end for _, end in every) - begin

    by_kind = defaultdict[str, list[Span]](list)
    for name, parts in spans.items():
        by_kind[kind_of_kernel(name)] += parts
    # Each kind gets the time that the kinds before it have left.
    taken: list[Span] = []
    shares: dict[str, float] = {}
    for kind in ORDER:
        before = length(taken)
        taken = union(taken + by_kind[kind])
        shares[kind] = (length(taken) - before) / whole
    shares[IDLE] = 1 - length(taken) / whole
    hidden = length(union(by_kind["communication"])) / whole - shares["communication"]

    times = {name: length(parts) for name, parts in spans.items()}
    total = sum(times.values())
    rows = []
    for name in sorted(times, key=lambda name: -times[name])[:LARGEST]:
        rows.append(
            Kernel(
                name=name,
                kind=kind_of_kernel(name),
                ms=times[name] / 1e3 / steps,
                calls=calls[name] / steps,
                share=times[name] / total,
            )
        )
    return Summary(whole / 1e3 / steps, shares, hidden, rows)


def kind_of_kernel(name: str) -> str:
    for kind, words in KINDS.items():
        if re.search(words, name, re.IGNORECASE):
            return kind
    return MEMORY_BOUND


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, those that touch as one."""
    out = list[Span]()
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return out


def length(spans: list[Span]) -> float:
    return sum(b - a for a, b in spans)


def own_time(operators: Iterable[dict[str, Any]]) -> Iterator[tuple[str, list[Span]]]:
    """Yield each operator on a CPU with its time, less that of the operators that it called."""
    threads = defaultdict[Any, list[dict[str, Any]]](list)
    for e in operators:
        threads[e["tid"]].append(e)
    for of_thread in threads.values():
        # A caller precedes the operators that it calls, even if both begin at once.
        of_thread.sort(key=lambda e: (e["ts"], -e["dur"]))
        starts = [e["ts"] for e in of_thread]
        for n, e in enumerate(of_thread):
            at = e["ts"]
            end = at + e["dur"]
            parts: list[Span] = []
            called = of_thread[n + 1 : bisect.bisect_left(starts, end)]
            for inner in called:
                if inner["ts"] > at:
                    parts.append((at, inner["ts"]))
                at = max(at, inner["ts"] + inner["dur"])
            if at < end:
                parts.append((at, end))
            yield e["name"], parts


def shorten_kernel(name: str) -> str:
    """Return a kernel's name without its arguments and return type."""
    plain = re.sub(r"^void |\(anonymous namespace\)::|at::native::", "", name)
    # "Memcpy HtoD (Pinned -> Device)" has its kind in parentheses.
    if not plain.startswith("Memc"):
        plain = re.sub(r"\(.*", "", plain)
    if len(plain) <= NAME:
        return plain
    return plain[: NAME - 1] + "…"


@contextlib.contextmanager
def profiler(
    g: Logging, folder: Path | None, device: torch.device
) -> Iterator[Callable[[int, Callable[[], None]], None]]:
    """Yield a function to call before each step with its number and a way to finish the one before.

    From --profile-step-start to --profile-step-end torch's profiler runs; then it writes a trace
    and a summary, and prints the summary and a table of the longest operations.
    """
    begun = 0  # the last step that began

    @contextlib.contextmanager
    def traced() -> Iterator[None]:
        # There is one cycle; torch 2.11 warns unless it may keep the events of several.
        with torch.profiler.profile(
            activities=devices.profiler_activities(device), acc_events=True
        ) as profile:
            yield
            devices.synchronize(device)
        order = f"self_{'cpu' if device.type == 'cpu' else 'device'}_time_total"
        say(profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))
        if folder is not None:
            trace = (
                folder / "profile" / f"trace_{g.profile_step_start}_{g.profile_step_end}.json.gz"
            )
            own_folder(trace.parent)
            require_unlinked(trace)
            profile.export_chrome_trace(str(trace))
            # A run may end before the last step to be traced.
            steps = min(begun + 1, g.profile_step_end) - g.profile_step_start
            write_summary(trace, steps)
            remark(f" > wrote {trace} (open it at ui.perfetto.dev or chrome://tracing)")

    with contextlib.ExitStack() as running:

        def before_step(iteration: int, finish: Callable[[], None]) -> None:
            nonlocal begun
            if iteration == g.profile_step_start:
                finish()
                running.enter_context(traced())
            elif iteration == g.profile_step_end:
                finish()
                running.close()
            begun = iteration

        yield before_step


def write_summary(trace: Path, steps: int) -> None:
    """Write summary.txt and summary.json beside the trace, and log the text."""
    summary = summarise(trace, max(steps, 1))
    if summary is None:
        return
    text = "\n".join(summary.lines())
    say(text)
    contents = {"summary.txt": text, "summary.json": json.dumps(asdict(summary), indent=1)}
    for name, content in contents.items():
        with replacing(trace.parent / name) as file:
            file.write(f"{content}\n".encode())
