"""`python -m mutants`: seed each defect of table.toml in a copy of the tree, and look who finds it.

By default each is looked for by the tests that its entry names; with --tier by a whole tier:

    check    the tests of `make check`, up to the first that fails
    test     those of `make test`
    fuzz     100 seconds of `make fuzz`, up to the first bad case
    verify   a few calls of `meshwright verify-layout`

An untouched copy is looked at too. Tests that fail there are not asked about the others, and any
other counts if it fails twice. The status is 1 if a defect survives that its entry says is found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutants.table import PACKAGE, TABLE, TIERS, Mutant, copy_tree, mutated, read_table

CONTROL = "control"  # name of the untouched copy
NAMED = "named"
SELECTED = {"check": "not whole and not long", "test": "not long", NAMED: "not long"}
PYTEST = "-m pytest -q -rfE --tb=line -p no:cacheprovider --basetemp=../t".split()
FUZZ = "-m fuzz --stop --cases 1000000 --seconds 100 --limit 60 --jobs 2 --seed"
VERIFY = (
    "--world-size 4 --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 --bf16 --qk-layernorm "
    "--normalization RMSNorm",
    "--world-size 4 --pipeline-model-parallel-size 2 --zero-stage 2 --fp16 --position-embedding-type rope",
    "--world-size 2 --context-parallel-size 2 --position-embedding-type alibi --swiglu",
    "--world-size 4 --num-distributed-optimizer-instances 2 --zero-stage 1 --optimizer lion --window-size 4",
)
LIMITS = {NAMED: 300.0, "check": 900.0, "test": 7200.0, "fuzz": 400.0, "verify": 600.0}  # seconds
CHILDREN = set[int]()  # processes at work, each the first of its group
NO_TESTS = (4, 5)  # statuses of pytest where a tier has none of the named tests
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.M)


def commands(
    tier: str, tests: Sequence[str], left_out: Sequence[str], seed: int
) -> list[list[str]]:
    """Return the commands of a tier, without the interpreter: the first that fails has found it."""
    if tier == "fuzz":
        return [[*FUZZ.split(), str(seed)]]
    if tier == "verify":
        return [
            ["-m", "meshwright", "verify-layout", "--device", "cpu", *flags.split()]
            for flags in VERIFY
        ]
    words = [*PYTEST, "-m", SELECTED[tier]]
    words += [f"--deselect={test}" for test in left_out]
    named = [[*words, *tests]] if tests else []
    return named if tier == NAMED else [*named, words]  # the likely ones first


def run(command: list[str], tree: Path, seconds: float) -> tuple[int | None, str]:
    """Run Python in a copy; return the status, None after so many seconds, and the output."""
    path = os.pathsep.join([str(tree / "src"), str(tree / "tests")])
    environment = os.environ | {
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    with open(tree.parent / "output", "w+", errors="replace") as output:
        child = subprocess.Popen(
            [sys.executable, *command],
            cwd=tree,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        CHILDREN.add(child.pid)
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(seconds)
        kill(child.pid)  # also what a test may have left behind
        child.wait()
        CHILDREN.discard(child.pid)
        output.seek(0)
        return status, output.read()


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end(number: int, frame: object) -> None:
    """End at a signal, together with all that was started; --json has what is done."""
    for group in list(CHILDREN):
        kill(group)
    os._exit(128 + number)


class Measurement:
    """The results of a tier, kept in a file from defect to defect."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.tier, self.lock = given, given.tier, threading.Lock()
        self.path = Path(given.json) if given.json else None
        self.all: dict[str, Any] = {}
        if self.path and self.path.exists():
            self.all = json.loads(self.path.read_text())
        self.results: dict[str, dict[str, Any]] = self.all.setdefault(self.tier, {})

    def note(self, name: str, result: dict[str, Any]) -> None:
        with self.lock:
            self.results[name] = result
            print(f"{name}: {describe(result)}", flush=True)
            if self.path:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                beside = self.path.with_suffix(".tmp")
                beside.write_text(json.dumps(self.all, indent=1, sort_keys=True) + "\n")
                beside.replace(self.path)

    def control(self, mutants: list[Mutant]) -> None:
        """Look at an untouched copy, by all of a tier's tests."""
        if CONTROL in self.results:
            return
        tests = (
            list(dict.fromkeys(test for m in mutants for test in m.tests))
            if self.tier == NAMED
            else []
        )
        more = ["-n", str(self.given.jobs)] if self.tier in SELECTED and self.given.jobs > 1 else []
        self.note(CONTROL, self.look(None, tests, [], more))

    def one(self, mutant: Mutant) -> None:
        if mutant.name not in self.results:
            tests = self.given.tests.split() if self.given.tests else mutant.tests
            left_out = self.results[CONTROL].get("failing", []) if self.tier in SELECTED else []
            self.note(
                mutant.name,
                self.look(mutant, tests, left_out, ["-x"] if self.tier in SELECTED else []),
            )

    def look(
        self, mutant: Mutant | None, tests: Sequence[str], left_out: list[str], more: list[str]
    ) -> dict[str, Any]:
        """Return who has found a defect, or what fails without any, in a copy of its own."""
        began, until = time.monotonic(), time.monotonic() + LIMITS[self.tier]
        with tempfile.TemporaryDirectory(prefix="m", ignore_cleanup_errors=True) as name:
            tree = Path(name, "w")
            copy_tree(tree)
            if mutant:
                (tree / PACKAGE / mutant.file).write_text(mutated(mutant))
            result: dict[str, Any] = {"outcome": "survived" if mutant else "clean"}
            every = commands(self.tier, tests, left_out, self.given.seed)
            for command in every:
                status, text = run([*command, *more], tree, until - time.monotonic())
                while (
                    mutant
                    and status == 1
                    and (failing := FAILED.findall(text))
                    and not fails_again(failing, tree)
                ):
                    command = [*command, *(f"--deselect={test}" for test in failing)]
                    status, text = run([*command, *more], tree, until - time.monotonic())
                is_empty = status in NO_TESTS and command is not every[-1]
                if status != 0 and not is_empty:
                    result = judge(self.tier, command, status, text)
                    break
        if mutant is None and result["outcome"] == "found":
            result["outcome"] = "failing"
        return result | {"seconds": round(time.monotonic() - began, 1)}


def fails_again(failing: list[str], tree: Path) -> bool:
    """Return whether tests fail a second time: on a busy machine one may fail without a defect."""
    status, _ = run([*PYTEST, *failing], tree, LIMITS[NAMED])
    return status != 0


def judge(tier: str, command: list[str], status: int | None, text: str) -> dict[str, Any]:
    """Return what a command says that has not ended well."""
    ended = "did not end" if status is None else f"ended with status {status}"
    # such as no test at all
    if status is None or (status == 2 if tier == "verify" else status != 1):
        return {"outcome": "unclear", "by": ended, "output": text[-3000:]}
    failing = sorted(set(FAILED.findall(text)))
    result = {"outcome": "found", "by": ", ".join(failing[:5]), "failing": failing}
    if tier == "fuzz":
        match = re.search(r"^case \d+ .*\n(.*)", text, re.M)
        result["by"] = match[1] if match else ended
    elif tier == "verify":
        result["by"] = shlex.join(command[5:])
    return result | {"output": text[-1000:]}


def describe(result: dict[str, Any]) -> str:
    return f"{result['outcome']}, {result['seconds']:.0f} s" + (
        f", {result['by']}" if "by" in result else ""
    )


def show(mutants: list[Mutant], measured: dict[str, dict[str, Any]]) -> None:
    """Print who has found which, and how many."""
    tiers = [tier for tier in (NAMED, *TIERS) if tier in measured]
    print(f"\n{'room':13}{'defect':34}" + "".join(f"{tier:10}" for tier in tiers).rstrip())
    for m in mutants:
        outcomes = [measured[tier].get(m.name, {}).get("outcome", "-") for tier in tiers]
        print(f"{m.room:13}{m.name:34}" + "".join(f"{outcome:10}" for outcome in outcomes).rstrip())
    for tier in tiers:
        outcomes = [measured[tier].get(m.name, {}).get("outcome") for m in mutants]
        print(
            f"{tier}: {outcomes.count('found')} of {len(mutants)} found, {outcomes.count(None)} not looked for"
        )


def update_table(measured: dict[str, dict[str, Any]]) -> None:
    """Write into the table who has found what; a tier that has not looked stays as it is."""
    text = TABLE.read_text()
    for m in read_table():
        looked = {
            tier: measured[tier][m.name]["outcome"]
            for tier in TIERS
            if m.name in measured.get(tier, {})
        }
        finding = [
            tier
            for tier in TIERS
            if looked.get(tier, "found" if tier in m.tiers else "") == "found"
        ]
        if "check" in finding and "test" not in finding:
            finding.insert(1, "test")
        tiers, before = " ".join(finding), " ".join(m.tiers)
        text, count = re.subn(
            rf'(name = "{m.name}"\n(?:(?!\[\[).*\n)*?tiers = )"{before}"', rf'\1"{tiers}"', text
        )
        assert count == 1, m.name
    TABLE.write_text(text)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mutants", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--tier",
        choices=[NAMED, *TIERS],
        default=NAMED,
        help="who looks (default: the named tests)",
    )
    parser.add_argument("--only", help="names or rooms, separated by commas")
    parser.add_argument("--shard", default="1/1", help="i/n: the i-th of n parts of the table")
    parser.add_argument("--jobs", type=int, default=1, help="defects that are looked for at once")
    parser.add_argument("--json", help="keep results in this file, and leave out those that it has")
    parser.add_argument(
        "--update", action="store_true", help="write into the table what --json has"
    )
    parser.add_argument("--tests", help="instead of the named tests, files or tests")
    parser.add_argument("--seed", type=int, default=0, help="of the fuzz")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    given = arguments(argv)
    index, parts = map(int, given.shard.split("/"))
    table = read_table()
    wanted = set(given.only.split(",")) if given.only else None
    if wanted and (unknown := wanted - {m.name for m in table} - {m.room for m in table}):
        raise SystemExit(f"there is no {', '.join(sorted(unknown))} in the table")
    mutants = [m for m in table if wanted is None or {m.name, m.room} & wanted][index - 1 :: parts]
    for m in table:
        mutated(m)
    measurement = Measurement(given)
    if given.update:
        update_table(measurement.all)
        return 0
    with ThreadPoolExecutor(given.jobs) as threads:
        control = threads.submit(measurement.control, mutants)
        if given.tier in SELECTED:  # the others leave out what it says
            control.result()
        list(threads.map(measurement.one, mutants))
    show(mutants, measurement.all)
    due = [m for m in mutants if given.tier in (NAMED, *m.tiers)]
    survivors = [m.name for m in due if measurement.results[m.name]["outcome"] != "found"]
    if survivors:
        print(f"not found, though the table says so: {', '.join(survivors)}")
    is_sound = given.tier in SELECTED or measurement.results[CONTROL]["outcome"] == "clean"
    if not is_sound:
        print("an untouched copy is called defective too, so the results say nothing")
    return int(bool(survivors) or not is_sound)
