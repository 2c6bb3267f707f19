"""Lines on a terminal of 80 columns are broken at words, and elsewhere not at all."""

import io
import shlex

from meshwright.__main__ import main
from meshwright.apps.evaluate.results import Result, list_result
from meshwright.base import console
from meshwright.generation.terminal import Terminal

LONG = "a word and another, " * 9


class Tty(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch):
    """Replace the output, in the test itself: pytest does so before each of its phases."""
    monkeypatch.setenv("COLUMNS", "80")
    out = Tty()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", out)
    return out


def test_lines_break_at_words(monkeypatch):
    open_terminal(monkeypatch)
    for line in (LONG, f"  {LONG}", f"  perplexity       {LONG}"):
        broken = console.fit(line).split("\n")
        assert max(map(len, broken)) <= 80 and " ".join(" ".join(broken).split()) == " ".join(
            line.split()
        )
    assert broken[1][:19].isspace()  # below the value
    assert console.fit(LONG, io.StringIO()) == LONG and console.fit("short") == "short"


def test_a_broken_command_can_be_copied(monkeypatch):
    open_terminal(monkeypatch)
    words = ["meshwright", "train", *(f"--flag-{n} value" for n in range(20))]
    command = " ".join(words)
    for before in ("$ ", "  "):
        broken = console.fit(before + command)
        assert max(map(len, broken.split("\n"))) <= 80
        assert shlex.split(broken.replace("\\\n", " ").lstrip("$ ")) == command.split()


def test_who_breaks_lines(monkeypatch, tmp_path):
    """Errors, results, notes of a chat, and all that a tour prints."""
    terminal = open_terminal(monkeypatch)
    assert main(["inspect", str(tmp_path / ("no such folder " * 9))]) != 0
    print(console.fit(list_result(Result("run", 1, "", "loss", {"loss": 1.0}, {"file": LONG}))))
    chat = Terminal()
    chat.is_person = True
    chat.note(LONG)
    with console.fitted_output():
        print(LONG, end="", flush=False)
        print()
        print("as it comes", end="", flush=True)
    lines = terminal.getvalue().replace("\033[2m", "").replace("\033[0m", "").splitlines()
    assert len(lines) > 8 and max(map(len, lines)) <= 80 and lines[-1] == "as it comes"
