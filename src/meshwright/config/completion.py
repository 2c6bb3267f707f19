"""Completion scripts for bash, zsh and fish: templates/ filled with the names of the settings.

A script holds all names itself, so that no key press starts Python.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.base.files import fill
from meshwright.config.fields import is_not_yet
from meshwright.config.help import Command, HelpEntry, entries
from meshwright.config.pages import LAUNCHED, PAGES
from meshwright.config.presets import PRESETS

KINDS = {"DIR": "dirs", "FILE": "files", "PATH": "files", "PREFIX": "prefixes"}
# What completes a word without a flag; else folders do.
BARE = {"PREFIX": "prefixes", "DATASET": "prefixes", "NAME": "any", "TEXT": "files"}


@dataclass(frozen=True)
class Words:
    """What can follow one command."""

    name: str
    flags: list[HelpEntry]
    positional: str  # "dirs", "files", "prefixes" or words; empty if the command takes none

    @staticmethod
    def kind(e: HelpEntry) -> str:
        """Return the values of a flag: a kind of file, words, "any", or "" for a switch."""
        if not e.value:
            return ""
        return " ".join(e.choices) or KINDS.get(e.value.split()[0], "any")


def command_texts() -> dict[str, str]:
    commands: dict[str, str] = pkgutil.resolve_name("meshwright.__main__:commands")()
    return commands


def verb_texts() -> dict[str, str]:
    return {
        name: verb.about
        for name, verb in pkgutil.resolve_name("meshwright.cli.data:verbs")().items()
    }


def launched() -> list[str]:
    """Return the commands of this installation that `launch` starts."""
    return [name for name in LAUNCHED if name in command_texts()]


def words_of_commands() -> list[Words]:
    known = command_texts()
    bare_words = BARE | {"COMMAND": " ".join(launched())}
    out = []
    for name, page in PAGES.items():
        # An installation may be without the app of a page. The first word of "data pack" counts.
        if name.split()[0] not in known:
            continue
        # List the flags as the help does, but for those that are only accepted.
        config = pkgutil.resolve_name(page.config)
        flags: dict[str, HelpEntry] = {}
        arguments = []
        for e in entries(Command(config, f"meshwright {name}", "", page.positional)):
            if e.group == "arguments":
                arguments.append(e)
            elif not _is_hidden(e):
                flags[e.flag] = e
        kind = ""
        if name == "presets":
            kind = " ".join(PRESETS)
        elif arguments:
            kind = " ".join(arguments[0].choices) or bare_words.get(arguments[0].flag, "dirs")
        out.append(Words(name, list(flags.values()), kind))
    return out


def _is_hidden(e: HelpEntry) -> bool:
    return e.field is not None and (e.field.metadata["hidden"] or is_not_yet(e.field))


def completion_script(shell: str) -> str:
    if shell == "fish":
        return _filled("fish", LINES="\n".join(_fish_lines()))
    return _bash() if shell == "bash" else _zsh()


def _bash() -> str:
    cases = []
    for w in words_of_commands():
        # Each kind of value is one case, with all flags that take it.
        by_kind: dict[str, list[str]] = {}
        for e in w.flags:
            if kind := w.kind(e):
                by_kind.setdefault(kind, []).append(e.flag)
        many = " ".join(e.flag for e in w.flags if e.value.endswith("..."))
        cases += [
            f"        '{w.name}')",
            f"            flags='{' '.join(e.flag for e in w.flags)}'",
            f"            bare='{w.positional}' many='{many}'",
            "            case $flag in",
            *(
                f"                {' | '.join(flags)}) kind='{kind}' ;;"
                for kind, flags in by_kind.items()
            ),
            "            esac",
            "            ;;",
        ]
    names = {
        "COMMANDS": " ".join(command_texts()),
        "VERBS": " ".join(verb_texts()),
        "LAUNCHED": " | ".join(launched()),
    }
    return _filled("bash", CASES="\n".join(cases), **names)


def _filled(shell: str, **values: str) -> str:
    how = next(text for text in PAGES["completion"].examples if f"completion {shell}" in text)
    return fill(f"config/templates/completion.{shell}", HOW=how, **values).rstrip("\n")


def _zsh() -> str:
    actions = {"dirs": "_files -/", "files": "_files", "prefixes": "_files", "any": " "}
    # Each command is one case, with its flags and what may follow each of them.
    cases = []
    for w in words_of_commands():
        cases.append(f"        '{w.name}')\n            _arguments \\")
        for e in w.flags:
            # zsh's form of an argument: --flag[text]:message:action
            spec = f"{e.flag}[{_escaped(e.text)}]"
            if kind := w.kind(e):
                word = e.value.split()[0]
                action = actions.get(kind, f"({kind})")
                spec += f":{word}:{action}"
            cases.append(f"                {_quoted(spec)} \\")
        last = "                '--help[show the common flags]' '--help-all[show all flags]'"
        if w.positional:
            action = actions.get(w.positional, f"({w.positional})")
            last += f" '*: :{action}'"
        cases += [last, "            ;;"]
    values = {}
    for key, names in {"COMMANDS": command_texts(), "VERBS": verb_texts()}.items():
        pairs = [_quoted(f"{name}:{text}") for name, text in names.items()]
        values[key] = " ".join(pairs)
    return _filled("zsh", CASES="\n".join(cases), **values)


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_lines() -> Iterator[str]:
    values = {
        "dirs": "-x -a '(__fish_complete_directories)'",
        "files": "-r -F",
        "prefixes": "-r -F",
        "any": "-x",
    }
    for name, text in command_texts().items():
        yield f"complete -c meshwright -n '__meshwright_words 1' -a {name} -d {_fish_quoted(text)}"
        if name != "help":
            yield f"complete -c meshwright -n '__meshwright_words 2; and __meshwright_is help' -a {name}"
    for name, text in verb_texts().items():
        how = "__meshwright_words 2; and __meshwright_is data"
        yield f"complete -c meshwright -n '{how}' -a {name} -d {_fish_quoted(text)}"
    # fish evaluates every line, so that each says which command it is for.
    for w in words_of_commands():
        start = f"complete -c meshwright -n '__meshwright_is {w.name}'"
        for e in w.flags:
            kind = w.kind(e)
            value = values.get(kind, f"-x -a {_fish_quoted(kind)}") if kind else ""
            yield f"{start} -l {e.flag[2:]} {value} -d {_fish_quoted(e.text)}"
        if w.positional:
            words = {
                "dirs": "-a '(__fish_complete_directories)'",
                "files": "-F",
                "prefixes": "-F",
                "any": "",
            }
            yield f"{start} {words.get(w.positional, f'-a {_fish_quoted(w.positional)}')}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
