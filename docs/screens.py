"""Take the pictures of README and docs: `python docs/screens.py [NAME ...]`.

The commands of the first hour run in a terminal of 80 x 24, on a part of Python's standard library;
what the terminal shows at the end becomes an SVG picture, once dark and once light. Chromium takes
the pictures of the run's page and, driven by playwright, of `watch` and `serve`. Needs Linux or
macOS, some minutes, Chromium, playwright, and a Chinese font.

A terminal is emulated here as far as rich and our commands use one: colours, and a cursor that
moves up and along and erases.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

if TYPE_CHECKING:
    from playwright.sync_api import Page

PICTURES = Path(__file__).with_name("screens")
WIDTH, HEIGHT = 80, 24
THEMES = {"dark": SVG_EXPORT_THEME, "light": DEFAULT_TERMINAL_THEME}
LIBRARY = (
    "asyncio",
    "concurrent",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
    "unittest",
    "xml",
)
RECIPE = """--data-path corpus_text_document --split 90,10,0 --num-layers 4 --hidden-size 128
    --num-attention-heads 4 --seq-length 128 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.05
    --micro-batch-size 8 --train-iters 200 --lr 4e-3 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters 20
    --weight-decay 0.1 --log-interval 25 --eval-interval 100 --eval-iters 5 --save-interval 100"""
# Picture -> command, what of it is typed in the picture, and its rows: the last ones, or all (0).
SCREENS = {
    "help": ("meshwright --help", "meshwright", 0),
    "train-help": ("meshwright train --help", "meshwright train --help", 0),
    "doctor": ("meshwright doctor", "meshwright doctor", 0),
    "quickstart": (
        "meshwright quickstart texts --minutes 2",
        "meshwright quickstart texts --minutes 2",
        HEIGHT,
    ),
    "vocabulary": (
        "meshwright train-tokenizer --input texts --vocab-size 4096 --output vocabulary",
        "",
        HEIGHT,
    ),
    "preprocess": (
        "meshwright preprocess --input texts --output-prefix corpus --tokenizer vocabulary --append-eod",
        "meshwright preprocess --input texts --tokenizer vocabulary ...",
        HEIGHT,
    ),
    "train": (
        f"meshwright train {RECIPE} --save my-model --load my-model",
        "meshwright train --data-path corpus_text_document --save my-model ...",
        HEIGHT,
    ),
    "chat": (
        "meshwright chat my-model --max-new-tokens 7 --top_p 0.8 --no-history",
        "meshwright chat my-model",
        HEIGHT,
    ),
}
# at the prompts of a dialogue
TYPED = {"chat": ["class Server:", "/tokens", "/set temperature 0.5", "/retry"]}
NEEDED = {"preprocess": {"vocabulary"}, "train": {"vocabulary", "preprocess"}}
NEEDED["watch"] = {*NEEDED["train"], "train"}
SAMPLED = "--sample-interval 50 --sample-length 40 --sample-prompts import 'def '"
NEEDED["page"] = NEEDED["chat"] = NEEDED["serve"] = NEEDED["train"] | {"train"}
STARTS = ("train", "quickstart")  # whose first rows are a picture, too
CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()=>][A-Z0-9]?|\x1b\][^\x07]*\x07")


class Terminal:
    """Rows of (character, colour) cells, all that were ever shown."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[str, str]]] = [[]]
        self.row = self.column = 0
        self.colour = ""

    def write(self, text: str) -> None:
        at = 0
        while at < len(text):
            if found := CONTROL.match(text, at):
                self.control(found[1] or "", found[2] or "")
                at = found.end()
            else:
                self.put(text[at])
                at += 1

    def put(self, char: str) -> None:
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self.row += 1
            self.column = 0 if self.row == len(self.rows) else self.column
            self.rows += [[]] if self.row == len(self.rows) else []
        elif char == "\b":
            self.column = max(0, self.column - 1)
        elif char.isprintable():
            if self.column == WIDTH:
                self.put("\r")
                self.put("\n")
            cells = self.rows[self.row]
            cells += [(" ", "")] * (self.column + 1 - len(cells))
            cells[self.column] = (char, self.colour)
            self.column += 1

    def control(self, numbers: str, letter: str) -> None:
        n = int(numbers) if numbers.isdigit() else 1
        if letter == "m":
            self.colour = "" if numbers in ("", "0") else f"{self.colour}\x1b[{numbers}m"
        elif letter == "A":
            self.row = max(0, self.row - n)
        elif letter == "B":
            self.row = min(len(self.rows) - 1, self.row + n)
        elif letter == "C":
            self.column = min(WIDTH - 1, self.column + n)
        elif letter == "D":
            self.column = max(0, self.column - n)
        elif letter == "G":
            self.column = n - 1
        elif letter == "K":
            del self.rows[self.row][0 if numbers == "2" else self.column :]
        elif letter == "J":
            del self.rows[self.row][self.column :]
            del self.rows[self.row + 1 :]

    def lines(self) -> list[str]:
        """Return the rows as text with colours, without empty ones at the end."""
        out = [
            "".join(map(_coloured, itertools.groupby(row, lambda cell: cell[1])))
            for row in self.rows
        ]
        while out and not out[-1].strip():
            out.pop()
        return out


def _coloured(run: tuple[str, Iterator[tuple[str, str]]]) -> str:
    colour, text = run[0], "".join(char for char, _ in run[1])
    return f"{colour}{text}\x1b[0m" if colour else text


def run(command: str, folder: Path, typed: Sequence[str] = ()) -> Terminal:
    """Run a command of the package in a terminal of WIDTH x HEIGHT; raise if it fails.

    The lines are typed at the prompts of a dialogue, which then ends.
    """
    lines = [f"{line}\n" for line in typed] + (["\x04"] if typed else [])
    words = [sys.executable, "-m", *shlex.split(command)]
    environment = os.environ | {
        "COLUMNS": str(WIDTH),
        "LINES": str(HEIGHT),
        "TERM": "xterm-256color",
    }
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    with subprocess.Popen(
        words, stdin=side, stdout=side, stderr=side, cwd=folder, env=environment
    ) as process:
        os.close(side)
        received = b""
        while select.select([main], [], [], 600)[0]:
            try:
                data = os.read(main, 1 << 16)
            except OSError:  # Linux's end of a terminal
                break
            if not data:
                break
            received += data
            if lines and received.endswith(b"\n> "):
                time.sleep(0.2)  # readline gets ready
                os.write(main, lines.pop(0).encode())
        os.close(main)
    terminal = Terminal()
    terminal.write(received.decode(errors="replace"))
    if process.returncode:
        raise SystemExit(
            f"{command} ended with status {process.returncode}:\n"
            + "\n".join(terminal.lines()[-20:])
        )
    return terminal


def draw(name: str, title: str, lines: Sequence[str]) -> None:
    """Write the lines as two SVG pictures, without the address of a font that rich puts in."""
    for theme, colours in THEMES.items():
        console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)
        for line in [*lines, ""]:  # the picture ends where the last line's letters do
            console.print(Text.from_ansi(line), soft_wrap=True)
        picture = console.export_svg(title=title, theme=colours, unique_id=f"{name}-{theme}")
        picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S)
        # a frame on white too
        picture = picture.replace("rgba(255,255,255,0.35)", "rgba(127,127,127,0.6)")
        (PICTURES / f"{name}-{theme}.svg").write_text(picture, encoding="utf-8")


def last(lines: list[str], rows: int) -> list[str]:
    """Return the last rows (0: all); at most three fewer, to begin after an empty line."""
    shown = lines[-rows:]
    empty = (
        [n for n, line in enumerate(shown[:3]) if not line.strip()]
        if len(lines) > len(shown)
        else []
    )
    return shown[empty[-1] + 1 :] if empty else shown


def photograph(page: Path) -> None:
    """Take the run's page with Chromium, dark and light."""
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        raise SystemExit("the picture of the page needs chromium")
    for theme, scheme in (("dark", 0), ("light", 1)):
        target = PICTURES / f"page-{theme}.png"
        flags = f"--headless --no-sandbox --hide-scrollbars --window-size=1000,1100 --screenshot={target}"
        words = [
            chromium,
            *flags.split(),
            f"--blink-settings=preferredColorScheme={scheme}",
            page.as_uri(),
        ]
        subprocess.run(words, check=True, capture_output=True)


@contextlib.contextmanager
def browsing(command: str, folder: Path) -> Iterator[Callable[..., Page]]:
    """Yield what opens the page of a server that prints its address, in a theme and a language."""
    from playwright.sync_api import sync_playwright

    words = [sys.executable, "-um", *shlex.split(command)]
    with (
        subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as p,
    ):
        assert server.stdout is not None
        address = next(
            found[0] for line in server.stdout if (found := re.search(r"http://\S+", line))
        )
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])

        def open_page(scheme: str, language: str, width: int, height: int) -> Page:
            size = {"width": width, "height": height}
            page = browser.new_page(viewport=size, color_scheme=scheme, locale=language)
            page.goto(address)
            return page

        try:
            yield open_page
        finally:
            server.terminate()


def save(page: Page, picture: str) -> None:
    from PIL import Image

    target = PICTURES / f"{picture}.png"
    page.screenshot(path=target)
    Image.open(target).convert("RGB").quantize(96).save(target, optimize=True)


def photograph_live(folder: Path) -> None:
    """Take the page of `watch` with two runs: dark, light, and on a phone in Chinese."""
    run(
        f"meshwright train {RECIPE.replace('--lr 4e-3', '--lr 1e-3')} {SAMPLED} --save lower-rate",
        folder,
    )
    pictures = {"dark": ("en-US", 1000), "light": ("en-US", 1000), "phone": ("zh-CN", 390)}
    with browsing("meshwright watch my-model lower-rate --port 0", folder) as open_page:
        for name, (language, width) in pictures.items():
            page = open_page("light" if name == "light" else "dark", language, width, 800)
            page.locator("#runs tbody tr").nth(1).wait_for()
            page.wait_for_timeout(3000)  # until the curves are drawn
            page.locator("figure[data-key=loss] .u-over").hover(
                position={"x": 0.55 * width, "y": 100}
            )
            page.wait_for_timeout(500)
            save(page, f"watch-{name}")


def photograph_serve(folder: Path) -> None:
    """Take the page of `serve`, the mouse at an unlikely token: dark, light, and in Chinese."""
    pictures = {"dark": ("dark", "en-US"), "light": ("light", "en-US"), "zh": ("light", "zh-CN")}
    with browsing("meshwright serve my-model --port 8765", folder) as open_page:
        for name, (scheme, language) in pictures.items():
            page = open_page(scheme, language, 1000, 720)
            for field, value in {
                "prompt": "class Server:",
                "temperature": "0.7",
                "max_tokens": "90",
                "seed": "5",
            }.items():
                page.locator(f"#{field}").fill(value)
            page.locator("#generate").click()
            page.locator("#append:enabled").wait_for(timeout=60_000)  # when the text is complete
            page.locator("#text .p3, #text .p4").first.hover()
            page.wait_for_timeout(500)
            save(page, f"serve-{name}")


def main(wanted: set[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        sources = (path for package in LIBRARY for path in (library / package).rglob("*.py"))
        for source in filter(lambda path: path.stat().st_size, sources):
            (folder / "texts" / f"{'.'.join(source.relative_to(library).parts)}.txt").write_bytes(
                source.read_bytes()
            )
        for picture, (command, title, rows) in SCREENS.items():
            if wanted and picture not in wanted.union(*(NEEDED.get(one, set()) for one in wanted)):
                continue
            print(picture, flush=True)
            shown = (
                line.replace(str(PICTURES.parents[1]), "~/meshwright")
                for line in run(command, folder, TYPED.get(picture, ())).lines()
            )
            lines = [f"\x1b[1m$ {title}\x1b[0m", *shown]
            if wanted and picture not in wanted:
                continue
            if picture in STARTS:
                draw(f"{picture}-start", "Terminal", lines[:HEIGHT])
            if title:
                draw(picture, "Terminal", last(lines, rows))
        if not wanted or "page" in wanted:
            photograph(folder / "my-model" / "report.html")
        if not wanted or "serve" in wanted:
            photograph_serve(folder)
        if not wanted or "watch" in wanted:
            photograph_live(folder)


if __name__ == "__main__":
    main(set(sys.argv[1:]))
