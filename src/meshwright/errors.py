"""Errors that are the user's to mend, and the exit status of every way a run can end."""

DONE = 0
UNEXPECTED = 1  # a defect of ours: shown with its traceback
USAGE = 2  # flags, configuration, layout
BAD_DATA = 65  # data or checkpoint missing, damaged or not what the flags say
UNAVAILABLE = 69  # a service, port, package or download that is not there
NON_FINITE = 70  # the loss or a gradient became NaN or infinite
LOCKED = 73  # another run owns the folder, or it holds checkpoints we would overwrite
IO = 74  # reading or writing failed, disk full
HANG = 75  # a time-out: trying again is sensible
SIGINT = 130
SIGTERM = 143


class UserError(Exception):
    """A failure told in words, without a traceback: what is wrong, both numbers, what to change.

    `everywhere`: all ranks of a run raise it, so that one of them tells it.
    """

    def __init__(self, message: str, status: int = USAGE, everywhere: bool = False) -> None:
        super().__init__(message)
        self.status, self.everywhere = status, everywhere
