"""Faults F1 to F38, and the lines that say how their tests ended.

A test names the faults that it injects: `@pytest.mark.fault("F7")`. `make faults` runs those of its
cases that belong to `make test`, `make faults-long` all. A test that takes the fixture `figures`
adds numbers to the line of its fault and to the last line.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

TITLES = {
    "F1": "kill -9 of a rank or of the launcher at a random moment",
    "F2": "kill -9 at each named point of a save, on each rank",
    "F3": "state that is not restored must show",
    "F4": "kill -9 during the recovery itself",
    "F5": "going on in another layout",
    "F6": "no space left while saving",
    "F7": "a folder that is read-only, gone or a file; I/O errors",
    "F8": "one bit flipped in a checkpoint",
    "F9": "files of a checkpoint cut, empty, missing, or named outside of it",
    "F10": "a tracker file that is empty, garbage or ahead",
    "F11": "no checkpoint that is whole",
    "F12": "leftovers of killed saves, clocks set back",
    "F13": "a second launcher on the same folder",
    "F14": "a save in the background that fails",
    "F15": "weights that change while they are saved in the background",
    "F16": "SIGTERM or SIGINT, once and twice",
    "F17": "a rank that hangs",
    "F18": "a rank that is slow",
    "F19": "one rank that fails or leaves",
    "F20": "NaN or infinity in a gradient, a loss or a weight",
    "F21": "a replica with other weights",
    "F22": "bad lines in the text",
    "F23": "kill -9 while text is prepared",
    "F24": "damaged token files",
    "F25": "an index cache that is half written or of other data",
    "F26": "data replaced under a run",
    "F27": "files that would run code",
    "F28": "files that would take all memory or time",
    "F29": "wrong configuration files and flags",
    "F30": "malformed requests to the server",
    "F31": "200 slow clients of the server",
    "F32": "64 clients at once, and clients that leave",
    "F33": "SIGTERM to a server at work",
    "F34": "another hash seed, locale, time zone or folder",
    "F35": "kills for minutes (500: make faults-soak)",
    "F36": "kill -9 of a run in object storage, or of an upload",
    "F37": "object storage that fails: 503, cut connections, changed bytes, refusals",
    "F38": "two writers of one run in object storage",
}


def name_of(node: str) -> str:
    """Return the id of a test as the table names it: without folders and case."""
    return node.partition("[")[0].rpartition("/")[2]


def lines(reports: Iterable[Any]) -> list[str]:
    """Return a line for each fault whose tests ran, and a summary; `reports` are pytest's."""
    outcomes: dict[str, dict[str, str]] = {}  # by fault and node
    figures: dict[str, dict[str, list[dict[str, Any]]]] = {}  # by name and node
    names: dict[str, list[str]] = {}  # of the tests of each fault
    # a skipped module has none
    for report in (r for r in reports if hasattr(r, "user_properties")):
        name = name_of(report.nodeid)
        for fault in (
            fault for key, faults in report.user_properties if key == "faults" for fault in faults
        ):
            ends = outcomes.setdefault(fault, {})
            if report.outcome != "passed" or report.when == "call" and report.nodeid not in ends:
                ends[report.nodeid] = report.outcome
            if report.when == "call":
                figures.setdefault(name, {})[report.nodeid] = [
                    v for k, v in report.user_properties if k == "figures"
                ]
                names.setdefault(fault, []).append(name)
    out, held = list[str](), 0
    for fault, title in TITLES.items():
        if not (ends := list(outcomes.get(fault, {}).values())):
            continue
        held += (good := "failed" not in ends and "passed" in ends)
        counts = " ".join(
            f"{ends.count(end)} {end}" for end in ("passed", "failed", "skipped") if end in ends
        )
        own = [
            one
            for name in dict.fromkeys(names.get(fault, []))
            for each in figures[name].values()
            for one in each
        ]
        out.append(
            f"{fault:4}{'held  ' if good else 'FAILED'} {title}: {counts} {write_figures(own)}".rstrip()
        )
    if out:
        every = [one for name in sorted(figures) for each in figures[name].values() for one in each]
        out.append(f"faults={held}/{len(out)} {write_figures(every)}".rstrip())
    return out


def write_figures(found: Iterable[Mapping[str, Any]]) -> str:
    """Return the figures in one line: numbers and "a/b" are added up, lists become p50 and max."""
    together: dict[str, list[Any]] = {}
    for one in found:
        for key, value in one.items():
            together.setdefault(key, []).append(value)
    return " ".join(text for key, values in together.items() for text in _written(key, values))


def _written(key: str, values: list[Any]) -> list[str]:
    if isinstance(values[0], list):
        numbers = [float(number) for one in values for number in one]
        if len(numbers) < 2:
            return [f"{key}={number:.2f}" for number in numbers]
        return [f"{key}_p50={statistics.median(numbers):.2f}", f"{key}_max={max(numbers):.2f}"]
    if isinstance(values[0], str):
        parts = [[int(number) for number in value.split("/")] for value in values]
        return [f"{key}={sum(a for a, _ in parts)}/{sum(b for _, b in parts)}"]
    return [f"{key}={sum(values):g}"]
