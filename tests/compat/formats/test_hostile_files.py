"""Hostile files run nothing, take little memory and time, and are refused with a reason."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hostile
import pytest
import safetensors.torch  # noqa: F401  so that no process that is measured loads it, or torch
import torch  # noqa: F401
from measured import in_child, outcome_of

from meshwright.checkpoint import loading, native
from meshwright.checkpoint.formats import HUGGING_FACE
from meshwright.checkpoint.pickle import pickles
from meshwright.checkpoint.steps import StepLocation
from meshwright.compat.formats.table import DEEPSPEED, MEGATRON, TORCH_DIST

pytestmark = pytest.mark.whole

# of a processor: 10 is the limit of the process that reads pickles
MEMORY, SECONDS = 200 << 20, 12.0
UNENDING, SHORT = ("keys that laugh",), 1  # reading takes all the time it gets
READER = 560 << 20  # bytes of the process that reads pickles: its limit, and a file of 20 MB


@pytest.fixture(scope="module", autouse=True)
def reader() -> None:
    """Keep no process that reads: its time counts when it has ended."""


def open_as(kind: str, path: Path, trust: bool) -> Any:
    return loading.open_step(StepLocation(kind, path, 1, path), loading.OpenOptions(trust=trust))


OPENERS: dict[str, Callable[[Path, bool], Any]] = {
    "native": lambda path, _: native.open_native(path, 1, verify="full"),
    "pickle": lambda path, trust: pickles.load_pickle(path, trust=trust),
    **{
        kind: functools.partial(open_as, kind)
        for kind in (MEGATRON, DEEPSPEED, TORCH_DIST, HUGGING_FACE)
    },
}


class Outcome(NamedTuple):
    """How opening a file ended: error, CPU seconds, peak bytes.

    Those are of this process, and of the one that reads pickles.
    """

    case: hostile.Case
    path: Path
    marker: Path
    kind: str
    text: str
    seconds: float
    memory: int
    reader: int


def open_all(cases: Sequence[hostile.Case], folder: Path, trust: bool = False) -> Iterator[Outcome]:
    """Open the files in turn in one forked process; its peak memory counts for each of them.

    One process reads the pickles of all of them. Its time counts only where it reads a single file.
    """
    folder.mkdir()
    paths = [
        (folder / str(number) / "file", folder / str(number) / "marker")
        for number in range(len(cases))
    ]
    for case, (path, marker) in zip(cases, paths, strict=True):
        path.parent.mkdir()
        case.write(path, marker)

    def work() -> Iterator[tuple[str, str, float]]:
        with pickles.READ.kept() if len(cases) > 1 else contextlib.nullcontext():
            for case, (path, _) in zip(cases, paths, strict=True):
                yield outcome_of(functools.partial(OPENERS[case.opener], path, trust))

    seconds = SHORT if cases[0].name in UNENDING else pickles.READ.seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickles.READ, "seconds", seconds)
        outcomes, end, most, reader = in_child(work)
    outcomes += [("ended", end, 0.0)] * (len(cases) - len(outcomes))
    for case, (path, marker), outcome in zip(cases, paths, outcomes, strict=True):
        yield Outcome(case, path, marker, *outcome, most, reader)


@pytest.mark.fault("F27", "F28")
@pytest.mark.timeout(600)
@pytest.mark.promise(
    "Files outside of the folder are never opened",
    "What a file says about sizes is checked before memory is taken",
    "Checkpoints of other programs are pickles",
    "nothing that a file names is imported or called",
    "Nothing falls back to that without the flag",
    "Folders of Hugging Face bring no code",
    "A folder whose model is a Python file of its own is refused",
    "Names and links that lead out of the folder are refused",
)
@pytest.mark.parametrize(
    "dear", [False, pytest.param(True, marks=pytest.mark.long)], ids=["cheap", "dear"]
)
def test_hostile_files(tmp_path: Path, figures: Callable[..., None], dear: bool) -> None:
    """None runs, whatever opens it; each that is not harmless is refused with its reason."""
    cases = [case for case in hostile.CASES if case.dear == dear]
    together = [case for case in cases if not case.measured]
    outcomes = list(open_all(together, tmp_path / "together")) if together else []
    for number, case in enumerate(case for case in cases if case.measured):
        outcomes += open_all([case], tmp_path / str(number))
    assert {outcome.case.name for outcome in outcomes} == {case.name for case in cases}
    wrong = [described(outcome) for outcome in outcomes if not is_good(outcome)]
    refused = sum(outcome.kind == "refused" for outcome in outcomes)
    to_refuse = sum(case.says != hostile.OPENS for case in cases)
    executed = sum(outcome.marker.exists() for outcome in outcomes)
    figures(
        hostile_refused=f"{refused}/{to_refuse}",
        pickles_run=f"{executed}/{len(cases)}",
        hostile_mb=[max(outcome.memory for outcome in outcomes) / 1e6],
        reader_mb=[max(outcome.reader for outcome in outcomes) / 1e6],
    )
    assert not wrong, "\n".join(wrong)


def is_good(outcome: Outcome) -> bool:
    if outcome.marker.exists() or outcome.seconds > SECONDS:
        return False
    if outcome.memory > MEMORY or outcome.reader > READER:
        return False
    if outcome.case.says == hostile.OPENS:
        return outcome.kind == "opened"
    has_reason = re.search(outcome.case.says, outcome.text) and str(outcome.path) in outcome.text
    return outcome.kind == "refused" and bool(has_reason) and len(outcome.text) <= 1500


def described(outcome: Outcome) -> str:
    megabytes = f"{outcome.memory >> 20} and {outcome.reader >> 20} MB"
    return f"{outcome.case.name}: {outcome.kind} {outcome.seconds:.1f} s, {megabytes}: {outcome.text[:300]}"


@pytest.mark.flag("trust_pickle")
@pytest.mark.fault("F27")
@pytest.mark.promise(
    "`--trust-pickle` passes the file to `torch.load` instead",
    "a network, data set or script of yours",
)
def test_their_payloads_work(tmp_path: Path) -> None:
    """The same files do run where the user trusts them, so none of them is a dud."""
    outcomes = open_all(
        [case for case in hostile.CASES if case.runs], tmp_path / "trusted", trust=True
    )
    duds = [
        f"{case.name}: {kind} {text}"
        for case, _, marker, kind, text, *_ in outcomes
        if not marker.exists()
    ]
    assert not duds, "\n".join(duds)
