"""`python -m fuzz`: train random cases on ranks, compare with one process, shrink what differs.

The last lines are the summary; each bad case is printed as the command that repeats it. The status
is 1 if a case was bad, or if a seeded bug was not found. With `--device cuda` the cases are drawn
for GPUs: CUDA graphs, fp8, Triton's kernels, runs that go back to a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fuzz import cases, crews
from fuzz.bugs import BUGS, ON_GPU
from fuzz.cases import Case
from fuzz.crews import Crew, Outcome
from meshwright.base import device as devices
from meshwright.base.errors import USAGE, UserError

COMMAND = "PYTHONPATH=src:tests python -m fuzz --case "
FIND = 200  # cases within which a seeded bug must be found
SHRINKING = 90.0  # seconds for a bad case
SHRUNK = 5  # bad cases that are shrunk
EVERY = 10.0  # seconds between lines


def shrink(case: Case, crew: Crew, bug: str, kind: str, seconds: float = SHRINKING) -> Case:
    """Return a simpler case that is bad in the same way: drop one thing after the other."""
    until = time.monotonic() + seconds
    found: Case | None = case
    while found is not None:
        case, found = found, None
        for smaller in cases.smaller(case):
            if time.monotonic() > until:
                break
            if crew.run(smaller, bug).kind == kind:
                found = smaller
                break
    return case


class Hunt:
    """Numbered cases of a seed, run by several crews, and their record."""

    def __init__(self, given: argparse.Namespace, folder: Path, bug: str = "") -> None:
        self.given, self.folder, self.bug = given, folder, bug
        self.kinds: Counter[str] = Counter()
        self.values: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.bad: list[dict[str, Any]] = []
        self.rejected, self.first_bad, self.captured = 0, 0, 0
        self.most: tuple[float, str, str] = (0.0, "", "")
        self.lock = threading.Lock()
        self.began = self.printed = time.monotonic()
        self.until = self.began + given.seconds

    @property
    def done(self) -> int:
        return sum(self.kinds.values())

    def run(self, cases_wanted: int, stops: Callable[[], bool] = lambda: False) -> None:
        """Run cases until there are enough, the time is over, or `stops` says so."""
        numbers = iter(range(cases_wanted))
        with ThreadPoolExecutor(self.given.jobs) as threads:
            for job in [
                threads.submit(self.work, n, numbers, stops) for n in range(self.given.jobs)
            ]:
                job.result()

    def work(self, job: int, numbers: Iterator[int], stops: Callable[[], bool]) -> None:
        crew = Crew(
            self.folder / f"crew{self.bug}{job}",
            self.folder / "data",
            self.given.limit,
            self.given.gpus,
        )
        try:
            while time.monotonic() < self.until and not stops():
                with self.lock:
                    number = next(numbers, None)
                if number is None:
                    break
                case, drawing = crew.draw(self.given.seed, number)
                if case.ranks > self.given.gpus > 0 and self.given.why_not_shared:
                    outcome = Outcome("unshared")
                else:
                    outcome = crew.run(case, self.bug)
                self.note(number, case, drawing, outcome)
                if outcome.is_bad and not self.bug:
                    self.report(number, case, crew, outcome)
        finally:
            crew.close()

    def note(self, number: int, case: Case, drawing: cases.Drawing, outcome: Outcome) -> None:
        with self.lock:
            self.kinds[outcome.kind] += 1
            self.values += drawing.values
            self.rejected += drawing.rejected
            self.captured += outcome.captured
            self.most = max(self.most, (outcome.most, outcome.where, str(case)))
            if outcome.kind == "refused":
                self.refusals[outcome.lines[-1][:160]] += 1
            if outcome.is_bad and not self.first_bad:
                self.first_bad = self.done
            if time.monotonic() - self.printed > EVERY:
                self.printed = time.monotonic()
                print(self.line(), flush=True)

    def line(self) -> str:
        shown = " ".join(f"{kind}={n}" for kind, n in sorted(self.kinds.items()))
        return f"{time.monotonic() - self.began:5.0f} s: {self.done} cases, {shown}, {self.rejected} draws rejected"

    def report(self, number: int, case: Case, crew: Crew, outcome: Outcome) -> None:
        """Shrink a bad case and print the command that repeats it."""
        with self.lock:
            place = len(self.bad)
            self.bad.append(entry := {"number": number, "case": str(case), "kind": outcome.kind})
        shrinks = place < SHRUNK and not self.given.stop
        small = shrink(case, crew, self.bug, outcome.kind) if shrinks else case
        after = crew.run(small, self.bug) if small != case else outcome
        entry |= {
            "shrunk": str(small),
            "lines": list(after.lines if after.is_bad else outcome.lines),
        }
        print(
            "\n".join(
                [f"case {number} {outcome.kind}; to repeat it:", repeating(small), *entry["lines"]]
            ),
            flush=True,
        )

    def record(self) -> dict[str, Any]:
        """Return the record of the run, as --json writes it."""
        import numpy
        import torch

        from meshwright.base.version import our_version

        values: dict[str, dict[str, int]] = {}
        for (name, value), n in sorted(self.values.items()):
            values.setdefault(name, {})[value or "-"] = n
        share, where, case = self.most
        return {
            "seed": self.given.seed,
            "jobs": self.given.jobs,
            "seconds": round(time.monotonic() - self.began, 1),
            "cases": self.done,
            "differing": sum(
                n for kind, n in self.kinds.items() if kind in ("differs", "failed", "hung")
            ),
            "outcomes": dict(self.kinds),
            "rejected_draws": self.rejected,
            "refusals": dict(self.refusals),
            "gpus": self.given.gpus,
            "legs_in_cuda_graphs": self.captured,
            "largest_share_of_allowed": {"share": share, "where": where, "case": case},
            "bad": self.bad,
            "values": values,
            "versions": {
                "meshwright": our_version(),
                "torch": torch.__version__,
                "numpy": numpy.__version__,
                "python": platform.python_version(),
                "machine": platform.machine(),
            },
        }


def table(values: dict[str, dict[str, int]], names: Iterable[str]) -> list[str]:
    """Return a line for each value that was drawn of some settings, with its number of cases."""
    return [
        f"{name:<18} {n:5d}  {value}" for name in names for value, n in values.get(name, {}).items()
    ]


def repeating(case: Case, bug: str = "") -> str:
    return f"{COMMAND}{shlex.quote(str(case))}{f' --bug {bug}' if bug else ''}"


def one_case(given: argparse.Namespace, folder: Path) -> int:
    case = cases.read(given.case)
    if lines := cases.refusals(case):
        print("\n".join(["the settings refuse it:", *lines]))
        return 2
    crew = Crew(folder / "crew", folder / "data", given.limit, given.gpus)
    outcome = crew.run(case, given.bug or "")
    if outcome.is_bad and given.shrink:
        small = shrink(case, crew, given.bug or "", outcome.kind)
        print(repeating(small, given.bug or ""))
        outcome = crew.run(small, given.bug or "")
    crew.close()
    share = (
        f", at most {outcome.most:.2g} of what is allowed ({outcome.where})"
        if outcome.where
        else ""
    )
    print("\n".join([f"{outcome.kind}{share}", *outcome.lines]))
    return int(outcome.is_bad)


def seeded(given: argparse.Namespace, folder: Path) -> int:
    """Look for seeded bugs; print after how many cases each was found."""
    found = {}
    of_device = [bug for bug in BUGS if (bug in ON_GPU) == (given.gpus > 0)]
    for bug in of_device if given.bug == "all" else [given.bug]:
        hunt = Hunt(given, folder, bug)
        hunt.run(FIND, stops=lambda hunt=hunt: hunt.first_bad > 0)  # type: ignore[misc]
        found[bug] = hunt.first_bad
        after = (
            f"found after {hunt.first_bad} cases"
            if hunt.first_bad
            else f"not found in {hunt.done} cases"
        )
        print(f"{bug}: {after}, {time.monotonic() - hunt.began:.0f} s", flush=True)
    if given.json:
        Path(given.json).write_text(
            json.dumps({"seed": given.seed, "found_after_cases": found}, indent=1) + "\n"
        )
    return int(not all(found.values()))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument(
        "--cases", type=int, default=100, help="how many cases to run (default %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no case after so many seconds"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="groups of ranks that run cases at once"
    )
    parser.add_argument(
        "--limit", type=float, default=crews.LIMIT, help="seconds of a leg that hangs"
    )
    parser.add_argument("--json", help="write the record to this file")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="of the cases (default %(default)s)",
    )
    parser.add_argument("--case", help="run one case, given as the fuzz prints it")
    parser.add_argument(
        "--shrink", action="store_true", help="with --case: make it smaller if it is bad"
    )
    parser.add_argument(
        "--stop", action="store_true", help="end after a bad case, which stays as large as it is"
    )
    parser.add_argument(
        "--bug", choices=[*BUGS, "all"], help="seed a defect, and stop when it is found"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    given = arguments(argv)
    if "--device cuda" in (given.case or ""):
        given.device = "cuda"
    given.gpus = devices.count_accelerators() if given.device == "cuda" else 0
    try:
        if given.device == "cuda":
            devices.open_device("cuda")
    except UserError as error:
        print(error, file=sys.stderr)
        return error.status
    if given.bug in ON_GPU and not given.gpus:
        print(f"--bug {given.bug} is one of CUDA graphs; give --device cuda", file=sys.stderr)
        return USAGE
    sys.path[:] = map(os.path.abspath, sys.path)  # for ranks, which work in another folder
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    with tempfile.TemporaryDirectory(prefix="fuzz") as name:
        folder = Path(name)
        crews.write_data(folder / "data")
        if given.gpus:
            crew = Crew(folder / "crew", folder / "data", given.limit, given.gpus)
            given.why_not_shared = crew.why_not_shared()
            crew.close()
            if given.why_not_shared:
                print(
                    f"two ranks cannot share a GPU, and cases with them are left out: {given.why_not_shared[0]}"
                )
        if given.case:
            return one_case(given, folder)
        if given.bug:
            return seeded(given, folder)
        hunt = Hunt(given, folder)
        hunt.run(given.cases, stops=lambda: given.stop and hunt.first_bad > 0)
        record = hunt.record()
    if given.json:
        Path(given.json).write_text(json.dumps(record, indent=1) + "\n")
    for line, n in hunt.refusals.most_common(5):
        print(f"refused {n} times: {line}")
    for line in table(record["values"], cases.ON_GPU if given.gpus else ()):
        print(line)
    if given.gpus:
        print(f"{hunt.captured} legs ended with steps in CUDA graphs")
    share = record["largest_share_of_allowed"]
    print(f"largest distance: {share['share']:.2g} of what is allowed, {share['where']}")
    print(
        f"{hunt.line()}\nfuzz seed={given.seed} cases={hunt.done} differing={record['differing']}"
    )
    return int(record["differing"] > 0)


if __name__ == "__main__":
    sys.exit(main())
