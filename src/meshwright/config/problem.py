"""What is wrong with settings, as values: each names its settings by their fields.

A text names a setting as `{lr}`, or with a value as `{lr=0.1}`. It is put into the caller's words
once, where it is shown: `--lr 0.1` on a command line, `lr=0.1` in a call from Python, `lr = 0.1 in
run.toml` for a key of a file, and `MESHWRIGHT_LR=0.1` for a variable of the environment.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from meshwright.base.errors import USAGE, UserError
from meshwright.config.fields import spelling

# A name in braces, which may have a value. "{{" is a brace of a text from outside.
NAME = re.compile(r"\{\{|\{([a-z][a-z0-9_]*)(?:=((?:[^{}]|\{\{|\}\}|\{[^{}]*\})*))?\}")
SWITCHED = ("True", "False")
# Values that no quotes are put around: placeholders, none and numbers.
BARE = re.compile(r"[A-Z]+|none|[-+]?[\d.][\d.e+-]*")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with settings.

    Fields:
        about: The fields whose values are wrong, or of which one is missing.
        text: What is wrong and what to do, with fields in braces.
        kind: "missing" if a value is needed and none is given.
    """

    about: tuple[str, ...]
    text: str
    kind: Literal["wrong", "missing"] = "wrong"

    def __str__(self) -> str:
        return FLAGS.render(self.text)


def missing(name: str, what: str) -> Problem:
    """Return the problem of a setting that is needed and not given."""
    return Problem((name,), f"{{{name}}} is needed: {what}", "missing")


def plain(text: object) -> str:
    """Return a text from outside, such as a path, whose braces name no setting."""
    return str(text).replace("{", "{{")


def named(names: Sequence[str]) -> str:
    """Return settings as one phrase: `{lr} and {min_lr}`."""
    return " and ".join(f"{{{name}}}" for name in names)


def stated(group: Any, name: str) -> str:
    """Return what names a setting in a text, with its value in a group of settings."""
    return with_value(name, getattr(group, name))


def with_value(name: str, value: Any) -> str:
    """Return what names a setting in a text, with this value."""
    values = value if isinstance(value, list | tuple) else [value]
    text = " ".join(map(_value_text, values))
    # Braces of the value itself are doubled, and name no setting.
    text = text.replace("{", "{{")
    text = text.replace("}", "}}")
    return f"{{{name}={text}}}"


def _value_text(value: Any) -> str:
    """Return a value as a command line has it, a number without needless digits."""
    if value is None:
        return "none"
    # %g rounds to six digits: a number that has more is shown in full.
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


class GivenAs(NamedTuple):
    """How a setting was given: its name there, what joins a value to it, and where that was."""

    name: str
    joint: str = " "
    place: str = ""


@dataclass(frozen=True)
class Wording:
    """The words in which a caller gives settings.

    Fields:
        default: How settings are named that were not given.
        given: Field -> how it was given.
        remarks: Field -> a value, and what is said behind it, such as who chose it.
    """

    default: Literal["flags", "keywords", "names"] = "flags"
    given: dict[str, GivenAs] = field(default_factory=dict)
    remarks: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def render(self, text: str) -> str:
        """Return a text with settings named in these words."""
        remarked = set[tuple[int, str]]()

        def words_for(match: re.Match[str]) -> str:
            # A match is a doubled brace, a setting's name, or a name with a value.
            name, value = match.groups()
            if name is None:
                return "{"
            if value is None:
                return self.name(name)
            value = value.replace("{{", "{").replace("}}", "}")
            known, remark = self.remarks.get(name, (None, ""))
            place = text.count("\n", 0, match.start()), name
            if not remark or place in remarked or _value_text(known) != value:
                return self.with_value(name, value)
            # Once a line is enough.
            remarked.add(place)
            return f"{self.with_value(name, value)} ({self.render(remark)})"

        return NAME.sub(words_for, text)

    def name(self, name: str) -> str:
        """Return how a setting is named."""
        given = self.how_given(name)
        return given.name + given.place

    def with_value(self, name: str, value: str) -> str:
        """Return how a setting is named together with a value."""
        given = self.how_given(name)
        # On a command line a switch has no value: another flag turns it off.
        is_switch = value in SWITCHED
        if is_switch and given.name.startswith("-"):
            return given.name if value == "True" else f"--no-{spelling(name)[2:]}"
        # TOML and YAML have true and false.
        if is_switch and given.place:
            value = value.lower()
        # A text is quoted in Python and in files, not a number or a placeholder such as DIR.
        elif given.joint != " " and not is_switch and not BARE.fullmatch(value):
            value = repr(value)
        return f"{given.name}{given.joint}{value}{given.place}"

    def how_given(self, name: str) -> GivenAs:
        """Return how a setting was given or, if it was not, how it would be."""
        if name in self.given:
            return self.given[name]
        if self.default == "flags":
            return GivenAs(spelling(name))
        return GivenAs(name, "=" if self.default == "keywords" else " ")


FLAGS = Wording()
KEYWORDS = Wording("keywords")
NAMES = Wording("names")


def listed(problems: Sequence[Problem], heading: str = "") -> str:
    """Return the text of an error that lists problems, a line each."""
    if len(problems) == 1 and not heading:
        return problems[0].text
    return "\n  ".join([heading, *(p.text for p in problems)])


def with_missing_last(problems: Sequence[Problem]) -> list[Problem]:
    """Name several missing settings in one last line, so that it hides no other mistake."""
    lacking = [p for p in problems if p.kind == "missing"]
    if len(lacking) < 2:
        return list(problems)
    # The first field of a problem is the one to give; others are what it may be derived from.
    *names, last = (f"{{{p.about[0]}}}" for p in lacking)
    about: list[str] = []
    for problem in lacking:
        about += problem.about
    text = f"{', '.join(names)} and {last} are needed too"
    others = [p for p in problems if p.kind != "missing"]
    return [*others, Problem(tuple(about), text, "missing")]


def names_in(text: str) -> tuple[str, ...]:
    """Return the fields that a text names."""
    return tuple(match[1] for match in NAME.finditer(text) if match[1])


class SettingsError(UserError):
    """An error that names settings, as problems do; `words` are those of who gave them."""

    words: Wording | None = None  # also of an error that another rank sent

    def __init__(
        self, text: str, status: int = USAGE, everywhere: bool = False, words: Wording | None = None
    ) -> None:
        super().__init__(text, status, everywhere)
        self.words = words

    def __str__(self) -> str:
        return (self.words or FLAGS).render(self.args[0])


def require(problems: Sequence[Problem], words: Wording | None = None) -> None:
    """Raise an error that lists the problems, if there are any."""
    if problems:
        raise SettingsError(listed(problems), words=words)


@contextlib.contextmanager
def in_words(words: Wording) -> Iterator[None]:
    """Let errors about settings that leave a block name them in these words."""
    try:
        yield
    except SettingsError as error:
        error.words = error.words or words
        raise
