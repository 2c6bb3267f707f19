"""Completion scripts for bash, zsh and fish, made from the settings.

A script holds all names itself, so that no key press starts Python.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.settings.help import Command, Entry, entries
from meshwright.settings.pages import PAGES, TOGETHER
from meshwright.settings.presets import PRESETS

KINDS = {"DIR": "dirs", "FILE": "files", "PATH": "files", "PREFIX": "prefixes"}
# What completes a word without a flag; else folders do.
BARE = {"COMMAND": " ".join(TOGETHER), "PREFIX": "prefixes", "DATASET": "prefixes", "NAME": "any", "TEXT": "files"}
# Flags that exist for old command lines only.
LEGACY = re.compile(r"\bold name\b|no effect|^accepted|set by launchers|'s name of|\[not yet\]")


@dataclass(frozen=True)
class Words:
    """What can follow one command."""

    name: str
    flags: list[Entry]
    positional: str  # "dirs", "files", "prefixes" or words; empty if the command takes none

    @staticmethod
    def kind(e: Entry) -> str:
        """Return the values of a flag: a kind of file, words, "any", or "" for a switch."""
        return " ".join(e.choices) or KINDS.get(e.value.split()[0], "any") if e.value else ""


def commands() -> dict[str, str]:
    found: dict[str, str] = pkgutil.resolve_name("meshwright.__main__:COMMANDS")
    return found


def verbs() -> dict[str, str]:
    return {name: row[1] for name, row in pkgutil.resolve_name("meshwright.commands.data:VERBS").items()}


def words_of_commands() -> list[Words]:
    out = []
    for name, page in PAGES.items():
        found = entries(Command(pkgutil.resolve_name(page.config), f"meshwright {name}", "", page.positional))
        flags = {e.flag: e for e in found if e.group != "arguments" and not LEGACY.search(e.text)}
        bare = next((e for e in found if e.group == "arguments"), None)
        kind = (" ".join(bare.choices) or BARE.get(bare.flag, "dirs")) if bare else ""
        kind = " ".join(PRESETS) if name == "presets" else kind
        out.append(Words(name, list(flags.values()), kind))
    return out


def script(shell: str) -> str:
    if shell == "fish":
        return _filled(FISH, {"HOW": _how("fish"), "LINES": "\n".join(_fish_lines())})
    return _bash() if shell == "bash" else _zsh()


def _how(shell: str) -> str:
    return next(text for text in PAGES["completion"].examples if f"completion {shell}" in text)


# bash

BASH = r"""# Completion of meshwright for bash:  @HOW@
_meshwright() {
    local cur=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} first=2 i word
    local flag= gap=0 flags= bare= kind= many= IFS=$' \t\n'
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "@COMMANDS@ --help --version" -- "$cur"))
        return
    fi
    case $command in
        help | data)
            if [[ $COMP_CWORD -eq 2 ]]; then
                local known="@COMMANDS@"
                [[ $command == data ]] && known="@VERBS@"
                COMPREPLY=($(compgen -W "$known" -- "$cur"))
                return
            fi
            [[ $command == data ]] && command="data ${COMP_WORDS[2]}" || command=${COMP_WORDS[2]}
            first=3
            ;;
        launch)
            for ((i = 2; i < COMP_CWORD; i++)); do
                case ${COMP_WORDS[i]} in @TOGETHER@) command=${COMP_WORDS[i]} first=$((i + 1)) ;; esac
            done
            ;;
    esac
    [[ $cur == "=" ]] && cur=
    for ((i = first; i < COMP_CWORD; i++)); do # the nearest flag before the cursor; bash splits --flag=value
        word=${COMP_WORDS[i]}
        case $word in
            =) ;;
            --*) flag=$word gap=0 ;;
            *) gap=$((gap + 1)) ;;
        esac
    done
    case $command in
@CASES@
    esac
    [[ " $many " == *" $flag "* ]] && gap=0
    [[ -n $kind && $gap -eq 0 && $cur != --* ]] || kind=
    if [[ -z $kind && ( $cur == -* || -z $bare ) ]]; then
        COMPREPLY=($(compgen -W "$flags --help --help-all" -- "$cur"))
        return
    fi
    case ${kind:-$bare} in
        any) ;;
        dirs | files | prefixes)
            IFS=$'\n'
            compopt -o filenames 2>/dev/null
            if [[ ${kind:-$bare} == dirs ]]; then
                COMPREPLY=($(compgen -d -- "$cur"))
            elif [[ ${kind:-$bare} == files ]]; then
                COMPREPLY=($(compgen -f -- "$cur"))
            else # of token files only the common beginning
                COMPREPLY=($(compgen -f -- "$cur" | sed -e 's/\.bin$//' -e 's/\.idx$//' | sort -u))
            fi
            ;;
        *) COMPREPLY=($(compgen -W "${kind:-$bare}" -- "$cur")) ;;
    esac
}
complete -F _meshwright meshwright"""


def _bash() -> str:
    cases = []
    for w in words_of_commands():
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
            *(f"                {' | '.join(flags)}) kind='{kind}' ;;" for kind, flags in by_kind.items()),
            "            esac",
            "            ;;",
        ]
    values = {"HOW": _how("bash"), "COMMANDS": " ".join(commands()), "VERBS": " ".join(verbs())}
    values |= {"TOGETHER": " | ".join(TOGETHER), "CASES": "\n".join(cases)}
    return _filled(BASH, values)


def _filled(template: str, values: dict[str, str]) -> str:
    return re.sub("@([A-Z]+)@", lambda m: values[m[1]], template)


# zsh

ZSH = r"""#compdef meshwright
# Completion of meshwright for zsh:  @HOW@
_meshwright() {
    local -a commands verbs
    commands=(@COMMANDS@)
    verbs=(@VERBS@)
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local command=$words[2]
    if [[ $command == (data|help) ]]; then
        if ((CURRENT == 3)); then
            [[ $command == data ]] && _describe verb verbs || _describe command commands
            return
        fi
        [[ $command == data ]] && command="data $words[3]" || command=$words[3]
        shift words
        ((CURRENT--))
    fi
    shift words
    ((CURRENT--))
    case $command in
@CASES@
    esac
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _meshwright "$@"
else
    compdef _meshwright meshwright
fi"""


def _zsh() -> str:
    actions = {"dirs": "_files -/", "files": "_files", "prefixes": "_files", "any": " "}
    cases = []
    for w in words_of_commands():
        cases.append(f"        '{w.name}')\n            _arguments \\")
        for e in w.flags:
            kind = w.kind(e)
            value = f":{e.value.split()[0]}:{actions.get(kind, f'({kind})')}" if kind else ""
            cases.append(f"                {_quoted(f'{e.flag}[{_escaped(e.text)}]{value}')} \\")
        bare = f" '*: :{actions.get(w.positional, f'({w.positional})')}'" if w.positional else ""
        cases.append(f"                '--help[show the common flags]' '--help-all[show all flags]'{bare}")
        cases.append("            ;;")
    listed = {"COMMANDS": commands(), "VERBS": verbs()}
    values = {key: " ".join(_quoted(f"{n}:{text}") for n, text in names.items()) for key, names in listed.items()}
    return _filled(ZSH, values | {"CASES": "\n".join(cases), "HOW": _how("zsh")})


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# fish

FISH = r"""# Completion of meshwright for fish:  @HOW@
function __meshwright_is
    set -l words (commandline -opc)
    test "$words[2]" = help; and set -e words[2]
    test "$words[2]" = "$argv[1]"; or return 1
    test (count $argv) -lt 2; or test "$words[3]" = "$argv[2]"
end
function __meshwright_words
    test (count (commandline -opc)) -eq $argv[1]
end
complete -c meshwright -f
@LINES@"""


def _fish_lines() -> Iterator[str]:
    values = {"dirs": "-x -a '(__fish_complete_directories)'", "files": "-r -F", "prefixes": "-r -F", "any": "-x"}
    for name, text in commands().items():
        yield f"complete -c meshwright -n '__meshwright_words 1' -a {name} -d {_fish_quoted(text)}"
        if name != "help":
            yield f"complete -c meshwright -n '__meshwright_words 2; and __meshwright_is help' -a {name}"
    for name, text in verbs().items():
        how = "__meshwright_words 2; and __meshwright_is data"
        yield f"complete -c meshwright -n '{how}' -a {name} -d {_fish_quoted(text)}"
    for w in words_of_commands():
        start = f"complete -c meshwright -n '__meshwright_is {w.name}'"
        for e in w.flags:
            kind = w.kind(e)
            value = values.get(kind, f"-x -a {_fish_quoted(kind)}") if kind else ""
            yield f"{start} -l {e.flag[2:]} {value} -d {_fish_quoted(e.text)}"
        if w.positional:
            words = {"dirs": "-a '(__fish_complete_directories)'", "files": "-F", "prefixes": "-F", "any": ""}
            yield f"{start} {words.get(w.positional, f'-a {_fish_quoted(w.positional)}')}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
