"""Help in two screens; a group, one flag, a search or everything on demand.

    meshwright train --help               common flags
    meshwright train --help optimizer     a group
    meshwright train --help lr            one flag
    meshwright train --help-all           everything

argparse would print all flags of `train` at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

from meshwright.base import host
from meshwright.base.errors import UserError
from meshwright.base.hints import did_you_mean
from meshwright.config.argv import has_control
from meshwright.config.dialects import equal, known_elsewhere, no_effect, old_switches, two_in_one
from meshwright.config.fields import (
    choices_of,
    config_fields,
    config_groups,
    default_of,
    help_of,
    inner_type,
    is_flat,
    is_list,
    not_yet,
    placeholder,
    spelling,
    switches,
    word_of,
)
from meshwright.config.pages import PAGES, SHORT, Page
from meshwright.config.presets import PRESETS
from meshwright.config.problem import FLAGS
from meshwright.config.recipes import RECIPES

WORDS = ("-h", "--help", "--help-all")
ALL = "all"
LINES = 48  # two screens of a terminal with 24 lines
LEFT, COMMON = 32, 27  # columns of a flag and its value: in lists of all flags, and of common ones
CONTROL = "settings"  # the group of the flags below, which no dataclass holds
CONTROLS = {
    "preset": (
        "--preset",
        "NAME",
        "architecture and recipe of a known model; `meshwright presets` lists them",
    ),
    "recipe": (
        "--recipe",
        "NAME",
        "all settings from the size; modern: Muon, rotary positions, rates and batch that fit; gpt2: the documents' "
        "recipe; a preset gives only sizes beside it, and flags win",
    ),
    "depth": (
        "--depth",
        "N",
        "layers, the only size to give; all else follows; means --recipe modern without one",
    ),
    "config_file": ("--config", "FILE", "TOML or YAML file of settings"),
    "print_config": ("--print-config", "", "print all settings and where each comes from"),
    "dry_run": ("--dry-run", "", "check everything, write nothing; then exit"),
}


@dataclass(frozen=True)
class Command:
    """What the help is about: a command's configuration and how it is called."""

    config: type
    prog: str
    about: str = ""
    positional: str | None = None

    @property
    def page(self) -> Page:
        return PAGES.get(self.prog.removeprefix("meshwright "), Page(""))


@dataclass(frozen=True)
class HelpEntry:
    """One flag or positional argument as the help shows it."""

    name: str  # of the field
    group: str
    flag: str  # or the word of a positional argument
    value: str  # its placeholder; empty for a switch
    text: str
    default: str = ""
    also: tuple[str, ...] = ()  # other spellings
    choices: tuple[str, ...] = ()
    field: dataclasses.Field[Any] | None = None
    kind: Any = None

    @property
    def left(self) -> str:
        return f"{self.flag} {self.value}".strip()

    @property
    def right(self) -> str:
        """Return the whole text: help, other spellings and default."""
        text = self.text
        # A help that explains each choice has listed them.
        if not all(re.search(rf"\b{re.escape(choice)}\b", self.text) for choice in self.choices):
            text += f" ({', '.join(self.choices)})"
        if self.default:
            text += f" [{self.default}]"
        return text

    def brief(self, width: int) -> str:
        """Return what one line holds: the text up to the end of a clause, values and default."""
        # Take the longest beginning that ends with a clause and fits.
        default = f" [{self.default}]" if self.default else ""
        whole = SHORT.get(self.name, self.text)
        fitting = []
        for end in re.finditer(r"[;:] | \(|$", whole):
            text = whole[: end.start()]
            # A clause may not end within parentheses.
            if len(text + default) <= width and text.count("(") == text.count(")"):
                fitting.append(text)
        text = max(fitting, key=len, default=whole)
        # The values are listed only behind a text that is whole: its rest may explain them.
        if self.choices and text == self.text:
            listed = f": {', '.join(self.choices)}"
            if len(text + listed + default) <= width:
                text += listed
        return text + default


def requested_topic(argv: list[str], names_follow: bool = False) -> str | None:
    """Return the topic that --help asks for, "" for the common flags; None without --help.

    With `names_follow` the first word without a flag begins another program's command line.
    """
    for i, word in enumerate(argv):
        # The command line is not parsed yet: a word behind a flag is taken for its value.
        is_value = i > 0 and argv[i - 1].startswith("--") and "=" not in argv[i - 1]
        if word == "--" or (names_follow and not word.startswith("-") and not is_value):
            return None
        # The topic is joined by `=` or is the next word; a later --help-all says more.
        name, _, value = word.partition("=")
        if name not in WORDS:
            continue
        if "--help-all" in argv[i:]:
            return ALL
        return value or next((w for w in argv[i + 1 :] if w not in WORDS), "")
    return None


def show_help(command: Command, topic: str) -> None:
    """Print help; all but the common flags goes through a pager if the terminal is too low."""
    lines = help_lines(command, topic)
    text = "\n".join(_styled(line) for line in lines) + "\n"
    if topic and sys.stdout.isatty() and len(lines) >= _terminal()[1]:
        import pydoc
        import shutil
        import signal

        # An empty PAGER, or cat, is the usual way to ask for none.
        pager = os.environ.get("PAGER", "less")
        if pager.strip() not in ("", "cat") and shutil.which(pager.split()[0]):
            # as git has it: colours, and no pager for what fits
            os.environ.setdefault("LESS", "FRX")
            with host.handled([signal.SIGINT], lambda *_: None):  # Ctrl-C is for the pager
                pydoc.pipepager(text, pager)
            return
    sys.stdout.write(text)
    sys.stdout.flush()


def help_lines(command: Command, topic: str = "") -> list[str]:
    """Return the lines about a topic: "", `ALL`, a group, a flag, or a word to search for."""
    shown = entries(command)
    if not topic:
        lines = all_flags(command, shown, full=False)
        if len(lines) <= LINES or not command.page.common:
            return lines
        return common_flags(command, shown)
    if topic == ALL:
        return all_flags(command, shown, full=True)
    # A word means a group before a flag of the same name, which --WORD means.
    names = {_key(e.group): e.group for e in shown}
    key = _key(topic)
    if key in names and not topic.startswith("-"):
        group = names[key]
        lines = _section(group, [e for e in shown if e.group == group], command)
        if any(_key(e.flag) == key for e in shown):
            lines += ["", f"`{command.prog} --help --{key}` explains the flag of this name."]
        return lines
    # A flag comes before a positional argument of the same name.
    for entry in sorted(entries(command, hidden=True), key=lambda e: not e.flag.startswith("-")):
        if key in map(_key, (entry.name, entry.flag, *entry.also)):
            return explain_flag(command, entry)
    # What other programs have.
    flag = "--" + topic.lstrip("-")
    if flag in no_effect():
        return [f"{flag} is accepted and has no effect: {no_effect()[flag][1]}."]
    if same := equal().get(flag) or old_switches().get(flag[2:].replace("-", "_")):
        return [f"{flag} is {spelling(same[0])} {same[1]}."]
    if both := two_in_one().get(flag):
        return [f"{flag} VALUE is {spelling(both[0])} VALUE {spelling(both[1])} {both[2]}."]
    if elsewhere := known_elsewhere(flag, flag):
        return [f"{FLAGS.render(elsewhere)}."]
    return find_flags(command, shown, topic, names)


def find_flags(
    command: Command, shown: list[HelpEntry], topic: str, names: dict[str, str]
) -> list[str]:
    """Return the flags whose name or text has the word."""
    word = _key(topic)

    def mentioning(stem: str) -> list[HelpEntry]:
        begins_word = re.compile(rf"\b{re.escape(stem)}")
        return [e for e in shown if stem in _key(e.flag) or begins_word.search(e.right.lower())]

    # A plural finds the singular, if nothing has it itself.
    found = mentioning(word) or mentioning(word.removesuffix("s"))
    # A word of one or two letters is in almost every text.
    if found and len(word) > 2:
        return [f"No group or flag is named {topic!r}; these mention it:", "", *_rows(found)]
    known = list(names)
    for e in shown:
        known += (e.flag, *e.also)
    hint = did_you_mean(word, names) or did_you_mean("--" + word, known)
    groups = f"; the groups are {', '.join(names.values())}" if len(names) > 1 else ""
    raise UserError(f"no group or flag of `{command.prog}` is named {topic!r}{hint or groups}")


def entries(command: Command, hidden: bool = False) -> list[HelpEntry]:
    """Return what the help of a command lists; with `hidden` also flags that it only accepts."""
    known = config_fields(command.config)
    used = known if hidden else getattr(command.config, "USES", known)
    out = []
    if command.positional:
        _, f, kind = known[command.positional]
        text = "folder of a run" if command.positional == "load" else help_of(f)
        text = f"{text}; same as {spelling(command.positional)}"
        word = word_of(f)
        value = "..." if is_list(kind) and " " not in word else ""
        out.append(HelpEntry(command.positional, "arguments", word, value, text))
    if not is_flat(command.config):
        choices = {"preset": tuple(PRESETS), "recipe": tuple(RECIPES)}
        for name, (flag, value, text) in CONTROLS.items():
            if has_control(command.config, name):
                listed = choices.get(name, ())
                out.append(HelpEntry(name, CONTROL, flag, value, text, choices=listed))
    for name, (group, f, kind) in known.items():
        if name in used:
            out.append(_entry(group or "flags", f, kind))
    return out


def _entry(group: str, f: dataclasses.Field[Any], kind: Any) -> HelpEntry:
    default = default_of(f)
    meta = f.metadata
    text = help_of(f)
    if lacking := not_yet(f, kind):
        text += f" [{lacking}]"
    rest: dict[str, Any] = {
        "field": f,
        "kind": kind,
        "choices": tuple(map(str, choices_of(kind))),
    }
    if meta["positional"]:
        value = "..." if is_list(kind) else ""
        return HelpEntry(f.name, "arguments", word_of(f), value, text, **rest)
    if inner_type(kind) is bool:
        on, off = switches(f)
        # What is on by default is listed by the flag that turns it off.
        if default is True:
            on, off = off, on
            text = f"disable: {text}"
        flag, *also = on
        return HelpEntry(f.name, group, flag, "", text, "", (*also, *off), **rest)
    if default is dataclasses.MISSING:
        text += " (required)"
    flag = spelling(f.name)
    value = placeholder(f, kind)
    return HelpEntry(
        f.name,
        group,
        flag,
        value,
        text,
        _shown_default(default),
        meta["aliases"],
        **rest,
    )


def _shown_default(default: Any) -> str:
    if default is None or default is dataclasses.MISSING or isinstance(default, bool):
        return ""
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, list):
        return " ".join(map(str, default))
    return str(default)


# Screens.


def usage_lines(command: Command, shown: list[HelpEntry]) -> list[str]:
    words = [_shape(e) for e in shown if e.group == "arguments"]
    # Notes behind the first paragraph are laid out already.
    about, *notes = command.about.split("\n\n")
    lines = [" ".join(["usage:", command.prog, "[flags]", *words]), ""]
    lines += textwrap.wrap(about, _width())
    for note in notes:
        lines += ["", *note.split("\n")]
    return lines


def _shape(e: HelpEntry) -> str:
    """Return a positional argument for the usage: [WORD] if it may be missing."""
    if e.field is not None:
        is_required = default_of(e.field) is dataclasses.MISSING
        if is_required or e.field.metadata["positional"] == "rest":
            return e.left
    return f"[{e.left}]"


def common_flags(command: Command, shown: list[HelpEntry]) -> list[str]:
    """Return the common flags, a line each, examples, and how to see more."""
    by_name = {e.name: e for e in shown}
    lines = usage_lines(command, shown)
    sections = command.page.common | {"Settings": command.page.settings}
    for heading, names in sections.items():
        lines += ["", f"{heading}:"]
        for name in names.split():
            # A page may name flags that an installation lacks.
            e = by_name.get(name)
            if e is None:
                continue
            # The text begins in one column, or behind a flag that is longer.
            start = max(COMMON, len(e.left) + 4)
            width = _width() - start
            first, *rest = textwrap.wrap(e.brief(width), width)
            left = f"  {e.left}"
            lines.append(f"{left:<{start}}{first}")
            lines += [" " * COMMON + text for text in rest]
    lines += _examples(command)

    # Say how to see more.
    groups = dict.fromkeys(e.group for e in shown if e.group != "arguments")
    first, *rest = textwrap.wrap(", ".join(groups), _width() - 17)
    lines += ["", "More:", f"  --help GROUP   {first}"]
    lines += [" " * 17 + line for line in rest]
    return [
        *lines,
        "  --help FLAG    one flag in full, such as --help save; or any word",
        f"  --help-all     all {len(shown)} flags",
    ]


def all_flags(command: Command, shown: list[HelpEntry], full: bool) -> list[str]:
    lines = usage_lines(command, shown)
    for group in dict.fromkeys(e.group for e in shown):
        lines += ["", *_section(group, [e for e in shown if e.group == group], command)]
    if not full:
        lines += _examples(command)
    if hasattr(command.config, "USES"):
        lines += ["", "Other flags of train are accepted; those without effect are reported."]
    return lines


def _section(group: str, rows: list[HelpEntry], command: Command) -> list[str]:
    name = group.capitalize().replace("_", " ")
    heading = f"{name}:"
    # A group's docstring says what its flags are about, unless it only repeats the name. A
    # dataclass without a docstring has its signature there.
    kind = config_groups(command.config).get(group)
    doc = ""
    if kind is not None and kind.__doc__:
        doc, *_ = kind.__doc__.split("\n")
    if doc and "(" not in doc and group not in doc.lower():
        rest = doc[1:].rstrip(".")
        heading += f" {doc[0].lower()}{rest}"
    return [*textwrap.wrap(heading, _width()), *_rows(rows)]


def _rows(rows: list[HelpEntry]) -> list[str]:
    lines: list[str] = []
    for e in rows:
        texts = textwrap.wrap(e.right, _width() - LEFT, break_long_words=False) or [""]
        left = f"  {e.left}"
        if len(left) < LEFT:
            lines.append(f"{left:<{LEFT}}{texts.pop(0)}")
        else:
            lines.append(left)
        lines += [" " * LEFT + text for text in texts]
    return lines


def _examples(command: Command) -> list[str]:
    examples = command.page.examples
    if not examples:
        return []
    lines = ["", "Examples:" if len(examples) > 1 else "Example:"]
    for text in examples:
        lines += [f"  {line}" for line in text.split("\n")]
    return lines


def explain_flag(command: Command, e: HelpEntry) -> list[str]:
    """Return all that is known of one flag."""
    rows = {"values": _values(e), "default": e.default or _no_default(e)}
    if e.also:
        rows["also"] = ", ".join(e.also)
    f = e.field
    if f is not None and f.metadata["needs"]:
        rows["needs"] = ", ".join(f.metadata["needs"])
    # Flags of a flat command and positional arguments are in no group, and no file sets them.
    in_group = e.group not in ("flags", "arguments")
    if in_group and f is not None:
        rows["config file"] = f"{e.name} = ...   in [{e.group}] of --config FILE"
        rows["environment"] = f"MESHWRIGHT_{e.name.upper()}"
    if in_group:
        rows["group"] = f"{e.group} (`{command.prog} --help {_key(e.group)}`)"
    if f is not None:
        # If no page explains the flag, the table of all flags does.
        pages = [f"docs/{page}.md" for page in f.metadata["docs"].split()]
        rows["explained"] = ", ".join(pages[:2]) or "docs/flags.md"

    lines = [f"{e.left}:"]
    lines += [f"  {line}" for line in textwrap.wrap(e.text, _width() - 2)]
    lines.append("")
    for name, text in rows.items():
        label = name
        for line in textwrap.wrap(text, _width() - 17, break_on_hyphens=False):
            lines.append(f"  {label:<13}  {line}")
            label = ""  # of the first line only
    return lines


def _values(e: HelpEntry) -> str:
    if e.choices:
        return ", ".join(e.choices)
    if not e.value:
        return "none: it is a switch"
    word = e.value.split()[0]
    kind = {"N": "whole number", "X": "number", "TEXT": "text"}.get(word, "path")
    if e.value.endswith("..."):
        kind = "words" if kind == "text" else f"{kind}s, separated by spaces"
    bound = e.field.metadata["bound"] if e.field else None
    bounds = {
        ">0": "above 0",
        ">=0": "0 or more",
        "[0,1)": "from 0 to below 1",
        "[0,1]": "from 0 to 1",
    }
    return f"{kind}, {bounds[bound]}" if bound else kind


def _no_default(e: HelpEntry) -> str:
    if e.field is not None and default_of(e.field) is dataclasses.MISSING:
        return "none: it is required"
    if not e.value:
        return "on" if e.field is not None and default_of(e.field) is True else "off"
    return "none"


# The terminal.


def _key(word: str) -> str:
    # Flags, fields and groups are compared in one spelling.
    return word.lower().lstrip("-").replace("_", "-").replace(" ", "-")


def _terminal() -> tuple[int, int]:
    # Output that goes into a pipe is as wide as a usual terminal.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(sys.stdout.fileno())
    return 80, 24


def _width() -> int:
    # Longer lines are hard to read, and columns need room.
    return min(100, max(60, _terminal()[0]))


def _styled(line: str) -> str:
    """Make headings bold, on terminals only."""
    heading = re.match(r"[^ `].*?:(?= |$)", line)
    has_style = (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    if heading is None or not has_style:
        return line
    return f"\033[1m{heading[0]}\033[0m{line[heading.end() :]}"
