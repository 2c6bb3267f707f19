"""One process in the tests of starting: meet the others, print its place, and end as asked.

Arguments: --local_rank=N or --local-rank N as launchers pass it, --seconds=X to wait for the
others, --size=N as --world-size, and one word: an exit status for rank 1, `kill` (SIGKILL for rank
1), `leave` (rank 1 ends with 0, too early), `crash` or `raise` (rank 1 does), `once` (rank 1 fails
in its first attempt), `deaf` (rank 1 fails, and the others hear no signal), `slow` (all wait and
print the signals that they get), `again` (all leave and meet once more).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

from meshwright.base.errors import UserError
from meshwright.runtime.ranks.connect import join_ranks
from meshwright.runtime.ranks.lost import explain_lost_rank, leave_ranks
from meshwright.runtime.ranks.world import World, find_world, require_world_size


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--size", type=int)
    parser.add_argument("act", nargs="?", default="")
    given = parser.parse_args()
    try:
        world = find_world(os.environ, given.local_rank)
        require_world_size(world, given.size)
        team = join_ranks(world, "gloo", 1, seconds=given.seconds)
        ranks = team.gather([world.rank, world.local_rank, world.local_size, os.getpid()])
        if team.is_rank_0:
            line = json.dumps({"launcher": world.launcher, "ranks": ranks})
            os.write(1, f"{line}\n".encode())  # in one write, because other ranks write too
        return act(given.act, world, team)
    except UserError as error:
        print(f"words: {error}", file=sys.stderr, flush=True)
        return error.status
    except RuntimeError as error:
        lost = explain_lost_rank(error, 1)
        if lost is None:
            raise
        print(f"words: {lost}", file=sys.stderr, flush=True)
        return lost.status
    finally:
        leave_ranks()


def act(what: str, world: World, team: Any) -> int:
    if world.rank == 1:
        if what.isdigit():
            return int(what)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "leave":
            os._exit(0)
        if what == "crash":
            ctypes.string_at(0)
        if what == "raise":
            raise ValueError("a mistake")
        if what == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            return 1
    if what == "deaf":
        if world.rank == 1:
            os.write(1, f"failed at {time.monotonic()}\n".encode())
            return 1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)
    if what == "slow":
        signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda n, frame: signals.append(n))
        os.write(1, b"ready\n")
        for _ in range(200):
            time.sleep(0.1)
            if signals:
                time.sleep(0.5)  # as if it saved
                os.write(1, f"rank {world.rank} got {' '.join(map(str, signals))}\n".encode())
                return 128 + signals[0]
        return 0
    if what == "again":
        leave_ranks()
        team = join_ranks(world, "gloo", 1, seconds=20)
    for _ in range(2):
        team.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
