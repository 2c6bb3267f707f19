"""Suggestions for misspelled names, and answers to addresses where a path is needed."""

from __future__ import annotations

import difflib
import functools
import itertools
import os
import re
from collections.abc import Container, Iterable

from meshwright.base.files import read_table


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "; did you mean X?" for the closest known word, or an empty string.

    A suggestion must not mislead: it is never the opposite (--no-x for --x), and the parts in which
    the two differ must be alike too (--min-learning-rate is not --learning-rate).
    """
    near = nearest(word, known, cutoff)
    return f"; did you mean {near}?" if near else ""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that `did_you_mean` suggests, or an empty string."""
    # Look at several, since the closest may be the opposite.
    for other in difflib.get_close_matches(word, list(known), 5, cutoff):
        if _is_alike(word, other):
            return other
    return ""


@functools.cache
def _other_words() -> dict[str, dict[str, str]]:
    try:
        return read_table("compat/flags/other_words.toml")
    except FileNotFoundError:  # an installation without compat/
        return {}


def our_word(kind: str, word: str, known: Container[str]) -> str:
    """Return what a word of another trainer is here, or an empty string.

    `kind` is flags, commands or presets; `known` are those that there are, flags by their fields.
    An answer names fields as the text of a problem does.
    """
    for answer, words in _other_words().get(kind, {}).items():
        first = re.split("[ ,;=}]", answer.removeprefix("{"))[0]
        if word in words.split() and (answer.startswith("`") or first in known):
            return answer
    return ""


def near_path(path: str, ending: str = "") -> str:
    """Return "; did you mean X?" for what is named like a path that does not exist, or nothing.

    Names with this ending count, without it: first those that go on where the path ends, then
    those that end where its suffix begins, and for a name without a folder the same one folder up.
    """
    folder, name = os.path.split(path)
    try:
        listed = sorted(os.listdir(folder or "."))
    except OSError:
        return ""

    # What is there, but for the path itself and hidden files; comparing more would take long.
    others = []
    for entry in listed[:10_000]:
        other = entry.removesuffix(ending)
        is_shown = other.isprintable() and not other.startswith(".")
        if entry.endswith(ending) and other != name and is_shown:
            others.append(other)

    # A name that goes on where the typed one ends, or lacks its suffix, precedes similar names.
    longer = [other for other in others if name and other.startswith(name)]
    shorter = [other for other in others if name.startswith(f"{other}.")]
    near = longer[:3] or shorter[-1:]
    if not near and name and not folder and not os.path.exists(path + ending):
        near = _one_folder_up(name, ending)
    near = near or difflib.get_close_matches(name, others, 1, 0.8)
    if not near:
        return ""
    return f"; did you mean {' or '.join(os.path.join(folder, other) for other in near)}?"


def _one_folder_up(name: str, ending: str) -> list[str]:
    """Return where this name is, in a folder above this one or else in a folder there.

    A shell that came here by a link shows another folder above than `..` is.
    """
    typed = os.environ.get("PWD", "")
    here = os.path.realpath(os.curdir)
    above = [os.pardir]
    if typed != here and os.path.realpath(typed) == here:
        above.append(os.path.dirname(typed))
    for folder in above:
        try:
            with os.scandir(folder) as entries:
                # more of them would take long, on a network disk
                beside = sorted(entry.path for entry in itertools.islice(entries, 200))
        except OSError:
            continue
        places = [folder, *(place for place in beside if os.path.realpath(place) != here)]
        paths = [os.path.join(place, name) for place in places]
        if found := [path for path in paths if os.path.exists(path + ending)]:
            return found[:1]
    return []


def near_prefix(prefix: str) -> str:
    """Return what to do about a prefix of token files that has none."""
    return near_path(prefix, ".idx") or f"; {prefix} must be the prefix of a .bin and an .idx"


def _is_alike(word: str, other: str) -> bool:
    """Return whether a close match may be suggested; see `did_you_mean`."""
    parts = re.split("[-_ ]+", word.lstrip("-"))
    others = re.split("[-_ ]+", other.lstrip("-"))
    opposites = ("no", "disable")
    if (parts[0] in opposites) != (others[0] in opposites):
        return False

    # Compare the parts that only one of them has.
    mine = "-".join(part for part in parts if part not in others)
    theirs = "-".join(part for part in others if part not in parts)
    if mine == theirs:
        return True
    return difflib.SequenceMatcher(None, mine, theirs).ratio() >= 0.5


def find_address(text: str) -> str | None:
    """Return the first word that is an address, such as s3://bucket/folder, and no local path."""
    found = re.search(r"""(?:^|[\s"'])([A-Za-z][A-Za-z0-9+.-]+://[^\s"',]*)""", text)
    return found[1] if found else None


def refuse_address(address: str) -> str:
    """Return why an address cannot be read or written, and what to do."""
    scheme, _, rest = address.partition(":")
    rest = rest.strip("/")
    advice = {
        "file": f"give the path /{rest}",
        "hf": f"a name on the Hugging Face Hub is given alone, as {rest or 'gpt2'}, and only to --tokenizer; "
        "data sets of the Hub are read by preprocess --input",
        **dict.fromkeys(("http", "https"), "download it first, as with `wget -c`"),
    }
    what = advice.get(scheme.lower(), "mount it here, or copy from and to a local folder")
    return f"{address} is an address, not a path of this machine; {what}"
