"""The documentation in both languages: what it names exists, and the pages correspond.

tests/test_tutorial.py and tests/test_readme.py run the commands of the first hour and README.
"""

from __future__ import annotations

import contextlib
import html
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from documents import ROOT
from meshwright.__main__ import COMMANDS, main
from meshwright.cli.data import verbs
from meshwright.compat.flags.megatron_flags import NO_EFFECT, REFUSED
from meshwright.config import flags
from meshwright.config.argv import syntax_of

READMES = sorted(ROOT.glob("compat/*/*.md"))  # their scripts have flags of their own
GUIDE = [ROOT / "README.md", ROOT / "README.zh.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = [*ROOT.glob("*.md"), *READMES, *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
CHINESE = sorted(ROOT.glob("docs/zh/*.md"))
ONLY_PRINT = ("help", "completion", "presets", "doctor")  # commands that may be without flags
# Flags of argparse, of Megatron's answers, and of other programs that the pages name as such.
MORE_FLAGS = {"--help", "--help-all", "--version", *NO_EFFECT, *REFUSED}
MORE_FLAGS |= {"--data_path", "--model_size", "--train_iters", "--FLAG"}  # of Ascend's scripts
# and of
MORE_FLAGS |= {
    f"--{flag}" for flag in "num_nodes num_gpus ssh_port launcher module exclude no_ssh".split()
}
# DeepSpeed
MORE_FLAGS |= {
    f"--{flag}" for flag in "no_python autotuning elastic_training bind_cores_to_rank".split()
}
MORE_FLAGS |= {"--fast-dev-run", "--resume"}  # of LiBai's train_net.py
# Words that begin a command of another program, or of a script, which has flags of its own.
OTHERS = re.compile(r"(uv|docker|scancel|trackio|FUZZ=\S*|#SBATCH|\S*\.py|\S*\.sh) ")
# Those in which a path may begin.
FOLDERS = [ROOT / name for name in (".", "src/meshwright", "src", "tests", "docs")]
COMPAT = sorted(ROOT.glob("compat/*/"))


class Stop(Exception):
    """Raised instead of running a command whose flags are right."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Return a page without code blocks and, where it compares programs, without their column."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.sub(r"^\|[^|]*\|", "|", text, flags=re.M) if page.stem == "coming-from" else text


def commands(page: Path) -> list[list[str]]:
    """Return the words of each `meshwright ...` line in the code blocks of a page."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(line, comments=True) for line in lines if line.startswith("meshwright ")]
    return [[word for word in words if word != "..."] for words in found]


def headings(page: Path) -> list[str]:
    return re.findall(r"^(#+) ", prose(page), re.M)


def known_flags(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return every flag of every command."""
    found: set[str] = set(MORE_FLAGS)

    def collect(
        cls: type, argv: list[str], prog: str, positional: str | None = None, **_: Any
    ) -> None:
        found.update(syntax_of(cls, positional).options)
        raise Stop

    monkeypatch.setattr(flags, "parse_settings", collect)
    for words in [*([c] for c in COMMANDS if c != "data"), *(["data", verb] for verb in verbs())]:
        if words[0] not in ONLY_PRINT:
            with pytest.raises(Stop):
                main(words)
    return found


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command line without running it; the files it names need not exist."""
    original = flags.parse_settings

    def parse(cls: type, argv: list[str], *args: Any, **options: Any) -> None:
        c = original(cls, argv, *args, **options | {"check": False}).config
        inner = getattr(c, "command", None)  # of launch
        raise Stop(*(inner if isinstance(inner, list) and inner and inner[0] in COMMANDS else ()))

    with monkeypatch.context() as patch:
        patch.setattr(flags, "parse_settings", parse)
        with pytest.raises(Stop) as stopped:
            status = main(words)
            pytest.fail(f"status {status}: {shlex.join(words)}")
    if stopped.value.args:
        check(list(stopped.value.args), monkeypatch)


@pytest.mark.parametrize("page", [*GUIDE, *READMES], ids=name)
def test_commands_parse(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in commands(page):
        if (
            words[1] in ONLY_PRINT
            or "--help" in words
            or len(words) == 2
            and words[1].startswith("-")
        ):
            continue
        line = re.sub(r" --config \S+", "", shlex.join(words[1:]))
        check(shlex.split(line), monkeypatch)


PLAIN = [
    p for p in PAGES if p.name not in ("flags.md", "CHANGELOG.md") and "records" not in p.parts
]


@pytest.mark.parametrize("page", PLAIN, ids=name)
def test_flags_and_commands_in_prose_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_flags(monkeypatch)
    text = re.sub(r"`([^`]+)`", lambda span: "" if OTHERS.match(span[1]) else span[0], prose(page))
    for flag in re.findall(
        r"(?<![\w-])--[a-zA-Z][\w-]*(?![\w-]|\.[\w.])", text
    ):  # not `--valid-...`
        assert flag in known or flag.replace("--no-", "--", 1) in known, flag
    for span in re.findall(r"`((?:--|meshwright )[^`]+)`", text):
        words = span.split()
        if words[0] == "meshwright" and words[1].islower() and words[1].isascii():
            assert words[1] in COMMANDS, span
            assert (
                words[1] != "data" or not words[2:] or words[2] in verbs() or words[2] == "VERB"
            ), span


@pytest.mark.parametrize("page", CHINESE, ids=name)
def test_a_chinese_page_has_the_commands_headings_and_flags_of_its_english_one(page: Path) -> None:
    english = ROOT / "docs" / page.name
    assert headings(page) == headings(english)
    assert commands(page) == commands(english)
    spans = [set(re.findall(r"--[a-zA-Z][\w-]*", prose(p))) for p in (english, page)]
    assert spans[0] == spans[1]


def rows(page: Path) -> list[int]:
    """Return the number of table rows below each heading."""
    return [
        len(re.findall(r"^\|", part, re.M)) for part in re.split(r"^#+ ", prose(page), flags=re.M)
    ]


def figures(page: Path) -> set[str]:
    """Return the digits of each number that has two or more.

    Neither commas, points nor zeros at the ends count, as 147.9 thousand is 14.79 times 10,000.
    """
    text = re.sub(r"\]\([^)\s]*\)|^\[\w\]: .*|\d+ 月", "", prose(page), flags=re.M)
    numbers = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text)
    return {digits for n in numbers if len(digits := re.sub(r"[,.]", "", n).strip("0")) > 1}


@pytest.mark.parametrize("page", [*CHINESE, ROOT / "README.zh.md"], ids=name)
def test_a_chinese_page_has_the_rows_figures_and_records_of_its_english_one(page: Path) -> None:
    english = ROOT / "docs" / page.name if page in CHINESE else ROOT / "README.md"
    assert rows(page) == rows(english)
    assert figures(page) == figures(english)
    of_records = [{at for at in links(p) if "records/" in at} for p in (english, page)]
    ours, theirs = ({at.partition("records/")[2] for at in found} for found in of_records)
    assert ours == theirs


def test_both_readmes_have_the_same_headings() -> None:
    assert headings(ROOT / "README.md") == headings(ROOT / "README.zh.md")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def links(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"\]\(([^)\s]+)\)", text)
    yield from re.findall(r'(?:src|srcset|href)="([^"]+)"', text)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def named_files(text: str, folders: list[Path]) -> Iterator[str]:
    """Yield the paths in a text that begin with a folder of ours and lead to no file."""
    ends = r"(?:\.(?:py|toml|sh|md|svg)\b|/)(?![\w*<{])"  # not `kernels/*.py`
    for path in re.findall(rf"(?<![\w./:{{}}-])(?:[A-Za-z_][\w-]*/)+(?:[\w.-]*\w)?{ends}", text):
        begins = any((folder / path.split("/")[0]).is_dir() for folder in folders)
        if begins and not any((folder / path).exists() for folder in folders):
            yield path


@pytest.mark.parametrize("page", PLAIN, ids=name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    if not page.stem.startswith(("from-", "coming-from")):  # those name other programs' files
        spans = " ".join(re.findall(r"`([^`]+)`", prose(page)))
        assert [*named_files(spans, [*FOLDERS, *COMPAT, page.parent])] == []


def test_files_that_the_code_names_exist() -> None:
    """Comments, docstrings and messages name files by their folders."""
    sources = [p for place in ("src", "docs", "benchmarks") for p in (ROOT / place).rglob("*.py")]
    sources = [p for p in sources if "records" not in p.parts]
    sources += [ROOT / "Makefile", ROOT / "pyproject.toml"]
    assert [
        (name(p), path)
        for p in sources
        for path in named_files(p.read_text(encoding="utf-8"), [*FOLDERS, p.parent])
        if not path.endswith("/")
    ] == []


@pytest.mark.parametrize(
    "picture, words", [("help", ["--help"]), ("train-help", ["train", "--help"])]
)
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_pictures_of_help_show_what_is_printed(
    picture: str, words: list[str], theme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/screens.py takes them; their number of flags, which any new one changes, may be old."""
    with contextlib.suppress(SystemExit):
        main(words)
    drawing = (ROOT / f"docs/screens/{picture}-{theme}.svg").read_text(encoding="utf-8")
    pieces = re.findall(r"<text [^>]*clip-path[^>]*>([^<]*)</text>", drawing)
    shown, printed = (
        re.sub(r"\s+|\d+(?=\s+flags)", "", text)
        for text in (html.unescape("".join(pieces)), capsys.readouterr().out)
    )
    assert shown.endswith(printed), f"python docs/screens.py {picture}"


def test_commits_that_records_name_are_in_the_history() -> None:
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no history here: an archive or a shallow clone")
    history = git("rev-list", "HEAD").split()
    texts = [p for end in ("md", "txt", "log") for p in (ROOT / "benchmarks").rglob(f"*.{end}")]
    named = {
        (name(path), commit)
        for path in texts
        for place in re.finditer(
            r"(?i)\bcommits?\b(.{0,80})", path.read_text(encoding="utf-8", errors="replace"), re.S
        )
        for commit in re.findall(r"\b[0-9a-f]{7,40}\b", place[1])
    }
    assert len(named) >= 10
    assert [
        pair for pair in sorted(named) if not any(one.startswith(pair[1]) for one in history)
    ] == []
