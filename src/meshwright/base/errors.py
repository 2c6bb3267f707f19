"""Errors that the user can correct, and the exit status of every way in which a run ends."""

import errno
import signal
from pathlib import Path

DONE = 0
UNEXPECTED = 1  # a defect of Meshwright: shown with its traceback
USAGE = 2  # flags, configuration, layout; too little memory for them
BAD_DATA = 65  # data or checkpoint missing, damaged or not what the flags say
UNAVAILABLE = 69  # a service, port, package or download is not available
NON_FINITE = 70  # the loss or a gradient became NaN or infinite, or --on-spike ended the run
LOCKED = 73  # another run owns the folder, or it holds checkpoints that would be overwritten
IO = 74  # reading or writing failed, disk full
HANG = 75  # a time-out: trying again makes sense
# two computations that must give the same result do not, such as a layout and one process
UNEQUAL = 76
SIGINT = 130  # this and the next: stopped by a signal, after saving; SIGUSR1 is 138, SIGUSR2 140
SIGTERM = 143

MEANINGS = {
    UNEXPECTED: "an unexpected error",
    USAGE: "wrong settings, or too little memory for them",
    BAD_DATA: "bad data or checkpoint",
    UNAVAILABLE: "a service or port is not available",
    NON_FINITE: "a loss that is not finite",
    LOCKED: "a folder that another run owns",
    IO: "reading or writing failed",
    UNEQUAL: "results differ that must be equal",
    HANG: "another rank did not answer",
}
RETRIED = (UNEXPECTED, HANG)  # statuses after which the launcher starts the ranks again
# Statuses after which a cluster does not start the job again, which would end the same way. What is
# not available now may be so later, or on other nodes.
FINAL = tuple(status for status in MEANINGS if status not in (*RETRIED, UNAVAILABLE))

# What schedulers send as a warning, some to every process; never a reason to skip the save.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class UserError(Exception):
    """An error that is shown without a traceback; its message says what is wrong and what to do.

    `everywhere` is set if all ranks of a run raise it, so that only one of them prints it.
    """

    def __init__(self, message: str, status: int = USAGE, everywhere: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.everywhere = everywhere


class UnfitFile(OSError):
    """A file that is not read or written: a device, a pipe, a link, or one too long."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, str(path))


def not_a_run(path: object, missing: str) -> UserError:
    """Return the error of every command that reads a run's folder and finds another path."""
    folder = Path(str(path))
    wanted = "the save or run folder of a training"
    if missing == "checkpoint":  # a --run-dir has none
        wanted = "the save folder of a training, or another program's checkpoint"
    if not folder.exists():
        return bad_data(f"there is no folder {folder}; give {wanted}")
    if not folder.is_dir():
        return bad_data(f"{folder} is a file; give {wanted}")
    return bad_data(f"{folder} holds no {missing}{what_it_holds(folder) or f'; give {wanted}'}")


def what_it_holds(folder: Path) -> str:
    """Return what a folder without a run is: quickstart's, with the run in it, or a tokenizer."""
    if (folder / "run" / "config.toml").is_file():
        return f"; did you mean {folder / 'run'}?"
    is_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    if is_tokenizer and not (folder / "config.json").exists():
        return "; it is a tokenizer, not a model: give the save folder of a training"
    return ""


def first_line(error: BaseException) -> str:
    """Return the first line of a message, or the kind of an error without one."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def bad_data(message: str) -> UserError:
    """Return the error of a file that is missing, damaged or not what the flags say."""
    return UserError(message, BAD_DATA)


# The oldest release whose files are read. Files carry no version: each reader knows those of
# earlier ones by what they lack.
TOO_OLD = "was written by a release before 0.15, which is no longer read"


def too_old(what: object) -> UserError:
    """Return the error of a file, of whatever kind, that a release before 0.15 wrote."""
    return bad_data(
        f"{what} {TOO_OLD}; open it with Meshwright 0.17, or convert or continue it there first"
    )
