"""Leave a run: close its connections, and have one rank report what all raise, or a lost rank."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator

from meshwright.base.errors import HANG, UserError
from meshwright.config.problem import SettingsError
from meshwright.runtime.ranks.world import World

# Seconds for the reporting rank to print: a launcher stops all ranks when the first one ends.
REPORT_SECONDS = 3.0

GLOO_LOSSES = (
    r"closed by peer|reset by peer|Socket closed|Broken pipe|[Tt]imed? ?out|No route to host|Network is unreachable|"
    r"Connection refused"
)
NCCL_LOSSES = r"ncclRemoteError|ncclSystemError|communicator was aborted|[Tt]imed out|[Tt]imeout|Connection (closed|reset)"


@contextlib.contextmanager
def reporting(
    world: World,
    minutes: float,
    explain: Callable[[Exception], Exception | None] = lambda error: None,
) -> Iterator[None]:
    """Raise the errors of the block as this rank should print them, and leave at its end.

    `minutes` is the time-out of the collectives; `explain` may return a better error in the place
    of one.
    """
    try:
        yield
    except Exception as error:
        reported = error_to_report(explain(error) or error, world, minutes)
        if reported is error:
            raise
        raise reported from error
    finally:
        leave_ranks()


def error_to_report(error: Exception, world: World, minutes: float) -> Exception:
    """Return the error that this rank should print; its text is empty if another rank does."""
    reported = (explain_lost_rank(error, minutes) if world.size > 1 else None) or error
    if not isinstance(reported, UserError) or world.size == 1:
        return reported
    message = str(reported.args[0])
    if not reported.everywhere:
        message = f"rank {world.rank}: {message}" if world.rank else message
    elif world.local_rank:  # the first rank of each machine prints it
        time.sleep(REPORT_SECONDS)
        message = ""
    reported.args = (message,)
    reported.everywhere = True
    return reported


def explain_lost_rank(error: BaseException, minutes: float) -> UserError | None:
    """Return the error to raise for torch's if another rank exited or did not answer, else None."""
    if not is_lost_rank(error):
        return None
    return SettingsError(
        f"another rank ended, or did not answer within {{distributed_timeout_minutes={minutes:g}}}; its own error, if "
        f"any, is above or in its node's log ({bare_message(error)})",
        HANG,
    )


def is_lost_rank(error: BaseException) -> bool:
    """Return whether torch raised this because another rank exited or did not answer."""
    if not isinstance(error, RuntimeError):
        return False
    import torch.distributed as dist

    # Some errors are known by kind, gloo's only by message: torch has no kind for them.
    text = str(error)
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):  # NCCL's, wrong usage included
        return bool(re.search(NCCL_LOSSES, text))
    if "gloo/" in text and "enforce fail" not in text and re.search(GLOO_LOSSES, text):
        return True
    # gloo's, for others that waited
    return text.startswith("Application timeout caused pair closure")


def bare_message(error: BaseException) -> str:
    """Return torch's message without its source location and advice."""
    line = str(error).strip().split("\n")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).split(". This is typically")[0][:200]


def leave_ranks() -> None:
    """Close the connections, after an error too: otherwise torch aborts the process at its end."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return

    def destroy() -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    # In a thread, because a device's library may wait here for a rank that is gone.
    ending = threading.Thread(target=destroy, daemon=True)
    with contextlib.suppress(RuntimeError):  # there may be no memory for a thread
        ending.start()
        ending.join(10)
    # gloo's threads may still hold the last tensors; freeing them while Python ends would abort it.
    time.sleep(0.1)
