"""The output of a command: log lines, which scripts read too, and notices. One rank prints them.

A run on a terminal may have a short screen instead of the log. The log is kept in a file either
way: `say` adds a line to the log alone, `show` to the screen alone, `remark` to both.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from meshwright.base.errors import UserError
from meshwright.base.files import own_file
from meshwright.base.storage import addresses

_stream: Literal["stdout", "stderr"] | None = "stdout"


class Screen(Protocol):
    """A short screen, which shows its own lines in place of the log's."""

    def follow(self, line: str) -> None:
        """Note what is being done, by a line of the log that is not shown."""

    def format_remark(self, line: str) -> str:
        """Return a remark in the form of the screen, or "" if that does not show it."""


class Warnings:
    """A screen of remarks and of the log's warnings."""

    def follow(self, line: str) -> None:
        if line.startswith(WARNING):
            show(line)

    def format_remark(self, line: str) -> str:
        return "" if line.startswith(WARNING) else line


WARNING = "WARNING"
_is_quiet = False
_screen: Screen | None = None
_log: LogFile | None = None


def set_stream(stream: Literal["stdout", "stderr"] | None, screen: Screen | None = None) -> None:
    """Choose where this process prints its lines; None: it prints nothing, notices included."""
    global _stream, _screen
    _stream = stream
    _screen = screen


@contextlib.contextmanager
def only_warnings() -> Iterator[None]:
    """Print only warnings and remarks of the block, on stderr, if this process prints at all."""
    before = _stream, _screen
    set_stream(_stream and "stderr", Warnings())
    try:
        yield
    finally:
        set_stream(*before)


@contextlib.contextmanager
def shortened() -> Iterator[None]:
    """Print only warnings and remarks of the block if the lines go to a terminal, beside text."""
    # The user asked for the text on stdout, and a log beside it would disturb.
    if _stream != "stderr" or not sys.stderr.isatty():
        yield
        return
    with only_warnings():
        yield


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Print nothing of the block; a log's file gets its lines all the same."""
    global _is_quiet
    before = _is_quiet
    _is_quiet = wanted
    try:
        yield
    finally:
        _is_quiet = before


def is_quiet() -> bool:
    return _is_quiet


def is_notebook() -> bool:
    """Whether this Python is interactive and has no terminal."""
    return hasattr(sys, "ps1") and not sys.stdout.isatty()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Print and log nothing of the block."""
    global _stream
    before = _stream
    _stream = None
    try:
        yield
    finally:
        _stream = before


# Lines that wait for the end of `held_back`, and whether a person needs them even after a mistake.
_held: list[tuple[str, bool]] | None = None
_printing = threading.RLock()
PATIENCE = 10.0  # seconds


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Print the block's log at its end, or after PATIENCE, but after a mistake its remarks alone.

    So a mistake that is found late in a set-up does not follow hundreds of lines of settings.
    """
    global _held
    _held = []
    # A long set-up must not look as if it hung.
    timer = threading.Timer(PATIENCE, _release)
    timer.daemon = True
    timer.start()
    try:
        yield
    except UserError:
        _release(remarks_only=True)
        raise
    finally:
        timer.cancel()
        _release()


def _release(remarks_only: bool = False) -> None:
    global _held
    with _printing:
        lines = _held or []
        _held = None
        for line, is_remark in lines:
            if is_remark or not remarks_only:
                show(line)


def say(
    line: str = "", shown: str | None = None, is_figure: bool = False, is_remark: bool = False
) -> None:
    """Add one line to the log: print it immediately, unless there is a short screen.

    `shown` is printed in its place, and the log's file has the line itself. A short screen does
    not follow a line that `is_figure`, as a setting or a time, which does not say what is done.
    """
    if _stream is None:
        return
    line = addresses.shown(line)
    if _log is not None:
        _log.add(line)
    if _screen is not None:
        if not is_figure:
            _screen.follow(line)
        return
    # The timer's thread may release the lines meanwhile.
    with _printing:
        text = line if shown is None else shown
        if _held is None:
            show(text)
        else:
            _held.append((text, is_remark))


def remark(line: str, on_screen: str = "") -> None:
    """Add a line to the log that a person needs too; `on_screen` replaces it on a short screen."""
    say(line, is_figure=bool(on_screen), is_remark=True)
    if _stream is None or _screen is None:
        return
    text = _screen.format_remark(on_screen or line)
    if text:
        show(text)


def show(line: str) -> None:
    """Print one line immediately. If the reader of stdout is gone, the run continues without it."""
    if _stream is None or _is_quiet:
        return
    line = addresses.shown(line)
    try:
        # One write: a thread that saves prints too.
        print(f"{line}\n", end="", file=getattr(sys, _stream), flush=True)
    except UnicodeEncodeError:  # a folder's name may have letters that the encoding lacks
        show(line.encode("ascii", "backslashreplace").decode())
    except OSError as error:
        # Later lines go nowhere, those of libraries included.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1 if _stream == "stdout" else 2)
        if isinstance(error, BrokenPipeError):
            notice("the reader of the log is gone; the run continues")
        else:
            notice(
                f"standard output: {error.strerror}; the run continues; its log is in its folder only"
            )


def notice(line: str) -> None:
    """Print a line for people, which no script reads, on stderr."""
    if _stream is not None and not _is_quiet:
        with contextlib.suppress(OSError):
            print(addresses.shown(line), file=sys.stderr, flush=True)


def say_time(event: str) -> None:
    say(f"[{event}] datetime: {datetime.datetime.now():%Y-%m-%d %H:%M:%S} ", is_figure=True)


def say_arguments(values: dict[str, object]) -> None:
    """Print all settings as Megatron does."""
    say("------------------------ arguments ------------------------", is_figure=True)
    for name in sorted(values, key=str.lower):
        say(f"  {name} {'.' * (48 - len(name))} {values[name]}", is_figure=True)
    say("-------------------- end of arguments ---------------------", is_figure=True)


class LogFile:
    """The log in a file, appended to. A file that cannot be written is left off with a notice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1
        self.unwritten: list[str] | None = []  # until it is opened

    def open(self) -> None:
        """Open the file and write the lines that were added so far."""
        lines = "\n".join(self.unwritten or [])
        self.unwritten = None
        try:
            self.fd = own_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            self._leave_off(error)
        self.add(lines)

    def add(self, line: str) -> None:
        if self.unwritten is not None:
            self.unwritten.append(line)
            return
        data = f"{line}\n".encode(errors="backslashreplace")
        try:
            # A nearly full disk may take only a part at once.
            while data and self.fd >= 0:
                data = data[os.write(self.fd, data) :]
        except OSError as error:
            self._leave_off(error)

    def _leave_off(self, error: OSError) -> None:
        self.close()
        notice(f"{self.path}: {error.strerror}; the run continues without this file")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@contextlib.contextmanager
def logged_to(path: Path | None) -> Iterator[Callable[[], None]]:
    """Add what the block says to a file, or to none; yield the function that opens the file.

    A run that is refused before it has a folder leaves no file.
    """
    global _log
    log = _log = LogFile(path) if path is not None else None
    try:
        yield lambda: log.open() if log is not None else None
    finally:
        _log = None
        if log is not None:
            log.close()


NAME_COLUMN = re.compile(r" *\S+(?: \S+)* {2,}(?=\S)")  # before a value in a table of two columns
# a line to be copied, not a message that begins so
COMMAND = re.compile(r"(\$ | *)meshwright (?![\w -]*: )")
WIDEST_NAME = 40


def fit(text: str, stream: Any = None) -> str:
    """Break long lines at words, as wide as the terminal; leave them alone where there is none.

    What follows stands below the value of a table, or is indented. A command goes on after a
    backslash, so that it can be copied.
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = text.split("\n")
    return "\n".join(line if len(line) <= width else _break_line(line, width) for line in lines)


def _break_line(line: str, width: int) -> str:
    name = NAME_COLUMN.match(line)
    is_command = COMMAND.match(line) is not None
    # Below the value of a table, unless its name takes half of the line.
    hang = len(line) - len(line.lstrip()) + 2
    if name and name.end() <= min(WIDEST_NAME, width // 2):
        hang = name.end()
    # A command needs two columns for its backslash.
    parts = textwrap.wrap(
        line,
        max(width - 2 * is_command, 20),
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return (" \\\n" if is_command else "\n").join(parts)


class FittedOutput:
    """A terminal to which complete lines are written as `fit` breaks them."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.rest = ""

    def write(self, text: str) -> int:
        # Only whole lines can be broken; the rest waits for its end.
        *lines, self.rest = (self.rest + text).split("\n")
        fitted = [f"{fit(line, self.stream)}\n" for line in lines]
        self.stream.write("".join(fitted))
        return len(text)

    def flush(self) -> None:
        rest = self.rest
        self.rest = ""
        self.stream.write(rest)
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def fitted_output() -> Iterator[None]:
    """Break the block's lines on stdout at words, if it is a terminal."""
    if not sys.stdout.isatty():
        yield
        return
    fitted: Any = FittedOutput(sys.stdout)
    with contextlib.redirect_stdout(fitted):
        try:
            yield
        finally:
            fitted.flush()


@contextlib.contextmanager
def no_stderr() -> Iterator[None]:
    """Discard the process's error output, to which C++ and Rust code writes directly.

    Other threads' output is lost too, so the block must not wait.
    """
    sys.stderr.flush()
    # Redirect the descriptor, since what C++ writes does not pass through sys.stderr.
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
