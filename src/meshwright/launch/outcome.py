"""What is started where, and how ranks end: whose exit code tells why, how long the others have,
and in which words.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import BAD_DATA, HANG, IO, LOCKED, NON_FINITE, SIGINT, SIGTERM, UNAVAILABLE, UNEXPECTED, USAGE
from meshwright.launch import rendezvous

GRACE = 300  # seconds that ranks have to save after a signal
RETRIED = (UNEXPECTED, HANG)
LOST = (HANG, -signal.SIGABRT)  # how ranks end that lost another; NCCL aborts
STOPPED = (SIGTERM, SIGINT, -signal.SIGTERM)
MEANING = {
    UNEXPECTED: "an unexpected error",
    USAGE: "wrong settings",
    BAD_DATA: "bad data or checkpoint",
    UNAVAILABLE: "a service or port that is not there",
    NON_FINITE: "a loss that is not finite",
    LOCKED: "a folder that another run owns",
    IO: "reading or writing failed",
    HANG: "another rank did not answer",
}


@dataclass(frozen=True)
class Plan:
    """What is started where."""

    processes: int
    nodes: int = 1
    node: int = 0  # this one's number
    address: str = "127.0.0.1"
    port: int = 0  # 0: any free one, which one machine alone can do
    restarts: int = 0
    wait: float = rendezvous.START_SECONDS


def first(failed: Mapping[int, int]) -> tuple[int, int]:
    """Whose exit code tells why: one failure pulls the others along, within moments and in any
    order.

    Who gives a reason comes before who crashed, then who was stopped, and last who lost another
    rank.
    """

    def weight(code: int) -> int:
        if code in LOST:
            return 3
        if code in STOPPED:
            return 2
        return 0 if code < 0 or code in MEANING and code not in RETRIED else 1

    return min(failed.items(), key=lambda pair: weight(pair[1]))


def patience(code: int) -> float:
    """Seconds that the others have to end by themselves after one ended so."""
    if code in (SIGTERM, SIGINT):  # they save together, and end together
        return 30
    return 3 if code in LOST + STOPPED else 0  # the reason is still to come


def status(exitcode: int) -> int:
    """As a shell gives it; a rank that NCCL aborted waited for another one too long."""
    if exitcode == -signal.SIGABRT:
        return HANG
    return exitcode if exitcode >= 0 else 128 - exitcode


def ending(exitcode: int) -> str:
    if exitcode < 0:
        hints = {
            signal.SIGKILL: "as the system does when memory runs out",
            signal.SIGABRT: "as NCCL does when another rank does not answer",
        }
        hint = f" ({hints[-exitcode]})" if -exitcode in hints else ""  # type: ignore[index]
        known = {int(s): s.name for s in signal.Signals}
        return f"was killed by {known.get(-exitcode, f'signal {-exitcode}')}{hint}"
    meaning = f" ({MEANING[exitcode]})" if exitcode in MEANING else ""
    return f"ended with status {exitcode}{meaning}"


def say(line: str) -> None:
    print(f"meshwright launch: {line}", file=sys.stderr, flush=True)
