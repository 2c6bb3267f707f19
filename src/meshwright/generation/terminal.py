"""Read lines from a terminal or a pipe, write text as it comes, and handle Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from meshwright.base.console import fit
from meshwright.base.errors import UserError

MOST_HISTORY = 1000  # lines of the history
# Characters that a terminal would obey: a model may write any.
HIDDEN = dict.fromkeys([*range(32), *range(127, 160)], "�") | {ord("\n"): "\n", ord("\t"): "\t"}


def history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "meshwright" / "chat_history"


def replace_surrogates(text: str) -> str:
    """Replace the surrogates that stand for bytes of a command line that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def accept_any_text() -> None:
    """Let stdin and stdout replace what their encoding lacks: a model may write anything."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class Terminal:
    """Stdin and stdout; `is_person` if both are a terminal. A pipe gets plain text only."""

    def __init__(self) -> None:
        self.is_person = sys.stdin.isatty() and sys.stdout.isatty()

    def ask(self, question: str) -> str | None:
        """Return a line, or None where the input ends; the question is for persons."""
        try:
            return replace_surrogates(input(question if self.is_person else ""))
        except EOFError:
            if self.is_person:
                print()
            return None

    def write(self, text: str) -> None:
        print(text.translate(HIDDEN) if sys.stdout.isatty() else text, end="", flush=True)

    def note(self, line: str) -> None:
        """Print a remark about the dialogue; stdout of a pipe is for text alone."""
        if not self.is_person:
            print(line, file=sys.stderr, flush=True)
            return
        line = fit(line)
        if "NO_COLOR" not in os.environ:
            line = f"\033[2m{line}\033[0m"  # dim, so that it is told from the model's words
        print(line, flush=True)


@contextlib.contextmanager
def line_editing(words: Callable[[str], Iterable[str]], file: Path | None) -> Iterator[None]:
    """Edit lines with readline, if there is one; complete words, and keep the lines in a file."""
    try:
        import readline
    except ImportError:  # Python may be built without it
        yield
        return

    def complete(text: str, number: int) -> str | None:
        """Return one word of those that fit; readline asks until there is none."""
        fitting = [w for w in words(readline.get_line_buffer()) if w.startswith(text)]
        return [*fitting, None][number]

    readline.set_completer(complete)
    readline.set_completer_delims(" ")  # by default / begins a word too
    is_libedit = "libedit" in (readline.__doc__ or "")  # macOS has it in readline's place
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    if file is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(file)
    try:
        yield
    finally:
        readline.set_completer(None)
        if file is not None:
            with contextlib.suppress(OSError):  # a home that cannot be written to
                file.parent.mkdir(parents=True, exist_ok=True)
                readline.set_history_length(MOST_HISTORY)
                # readline would make it readable for all.
                os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
                readline.write_history_file(file)


@contextlib.contextmanager
def interruptible(is_person: bool) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed in the block; a second one is raised.

    A decoder must not be left in the middle of a step, so the first one only asks to stop. In a
    pipe, and outside of the main thread, Ctrl-C does as always.
    """
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    if not is_person or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def report_errors(action: Callable[[], None], note: Callable[[str], None]) -> bool:
    """Run an action of a typed line; note why it failed, which does not end the dialogue."""
    try:
        action()
        return True
    except UserError as error:
        note(str(error).strip())
    except OSError as error:
        note(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    return False
