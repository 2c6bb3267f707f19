"""--split-sentences: split documents into sentences by rules, or with NLTK's Punkt models.

The rules are our own because Punkt's models are no part of NLTK's package: they are downloaded,
which closed clusters cannot do, and Punkt knows no Chinese or Japanese.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwright.base.errors import UNAVAILABLE, USAGE, UserError
from meshwright.base.files import read_table
from meshwright.base.hints import did_you_mean

_CLOSERS = "\"'”’»›)\\]}*_」』）〕】》〉"
_OPENERS = "\"'“‘„‚«‹([{¿¡*_"

# What may end a sentence: a stop before white space, an empty line, a Chinese or Japanese stop. All
# begin with one set of characters, for which re searches four times as fast as for alternatives.
_STOPS = ".!?…‽؟۔।॥։።"
_WIDE_STOPS = "。！？｡"
_END = re.compile(
    rf"""[{_STOPS}{_WIDE_STOPS}\n](?:
    (?<=[{_STOPS}])[{_STOPS}]*(?P<close>(?:[{_CLOSERS}]|[ \u00a0\u202f]»(?=\s|$))*)(?=\s|$)
    | (?<=\n)[^\S\n]*\n
    | (?<=[{_WIDE_STOPS}])[{_WIDE_STOPS}]*[{_CLOSERS.replace('"', "").replace("'", "")}]*(?P<quote>"?))""",
    re.X,
)
_SPACE = re.compile(r"\s*")
# The next word, behind opening quotes and dashes.
_NEXT = re.compile(rf"[\s—–{re.escape(_OPENERS)}-]*([^\W_][\w'’]*)?")
_DOTTED = re.compile(r"(?:[^\W\d_]{1,3}\.-?)+[^\W\d_]{1,3}")  # U.S, e.g, Ph.D, J.-P
# the number of a heading or a list
_ITEM = re.compile(r"\W*(?:\d{1,3}|[ivxlc]+|[IVXLC]+|[a-zA-Z])")
_ROMAN = re.compile(r"[IVXLC]+")


@functools.cache
def build_rules(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Return a function that splits a text into sentences by our rules."""
    languages = read_table("compat/prepare/sentences.toml")
    if language not in languages:
        raise UserError(
            f"--lang {language}: there are rules for {', '.join(languages)}{did_you_mean(language, languages)}; "
            "--sentence-splitter punkt knows other languages",
            USAGE,
        )
    rules = Rules(languages[language])

    def split(text: str) -> list[str]:
        begin = 0
        out = []
        for end in [*rules.ends(text), len(text)]:
            if sentence := text[begin:end] if keep_newlines else text[begin:end].strip():
                out.append(sentence)
            begin = end
        return out

    return split


class Rules:
    """Where sentences end in a language."""

    def __init__(self, language: Mapping[str, Any]) -> None:
        """`language` is a table of sentences.toml."""
        kinds = ("never", "numbers", "sometimes", "starters")
        self.never, self.numbers, self.sometimes, self.starters = (
            frozenset(language.get(kind, "").split()) for kind in kinds
        )
        self.ordinals = language.get("ordinals", False)

    def ends(self, text: str) -> Iterator[int]:
        """Yield where each sentence but the last ends, behind the white space that follows it."""
        begin = _end(_SPACE, text, 0)
        caseless = text.islower()  # then a small letter may begin a sentence
        for mark in _END.finditer(text):
            end = mark.end()
            if mark.start() < begin:  # an empty line behind a sentence that has ended
                continue
            if mark["quote"] and text.count('"', begin, end) % 2:  # it opens the next sentence
                end -= 1
            if mark["close"] is not None and not self._is_end(text, begin, mark, caseless):
                continue
            begin = _end(_SPACE, text, end)
            if begin < len(text):
                yield begin

    def _is_end(self, text: str, begin: int, mark: re.Match[str], caseless: bool) -> bool:
        """Return whether a sentence from `begin` ends at a stop before white space."""
        after = _NEXT.match(text, mark.end())
        assert after
        word = after[1]
        if not word:
            return text[after.end() : after.end() + 1] not in set(".,;:!?…)»&/")
        if word[0].islower() and not caseless:
            return False
        stop = text[mark.start() : mark.start("close")]
        if stop.strip(".…"):
            return True
        if stop != ".":  # an ellipsis; I and its forms have a capital letter anywhere
            return word.partition("’")[0].partition("'")[0] != "I"
        # Initials, or z. B.: a single letter before this stop and one with a stop behind it.
        is_letter = len(word) == 1 and text.startswith(".", after.end())
        if is_letter and text[mark.start() - 2 : mark.start() - 1] in " .":
            return False
        return bool(mark["close"]) or self._is_full_stop(text, begin, mark.start(), word)

    def _is_full_stop(self, text: str, begin: int, at: int, word: str) -> bool:
        """Return whether the stop `at` ends a sentence, not just an abbreviation or a number."""
        if at - begin < 8 and _ITEM.fullmatch(text, begin, at):
            return False
        # The word before it; a dash separates words too.
        before = text[max(begin, at - 30) : at]
        before = before.replace("—", " ").replace("--", " ")
        words = before.rsplit(None, 1)
        last = ""
        if words and not text[at - 1].isspace():
            last = words[-1].lstrip(_OPENERS)
        key = last.lower()
        is_starter = word.lower() in self.starters
        if key in self.never:
            return False
        # An initial; "I" is one unless a word follows.
        if len(last) == 1 and last.isupper() and not word[0].isdigit():
            return is_starter or (last == "I" and len(word) > 1)
        if key in self.numbers:
            return not (word[0].isdigit() or _ROMAN.fullmatch(word))
        # An abbreviation that may end a sentence, or in some languages an ordinal number.
        is_ordinal = self.ordinals and last.isdigit() and len(last) < 3
        if key in self.sometimes or _DOTTED.fullmatch(last) or is_ordinal:
            return is_starter
        return bool(last) or word != "I"  # no word: an ellipsis of separate stops


def _end(pattern: re.Pattern[str], text: str, begin: int) -> int:
    match = pattern.match(text, begin)
    return match.end() if match else begin


@functools.cache
def build_punkt(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Return a function that splits a text into sentences by NLTK's model of the language."""
    try:
        from nltk.tokenize.punkt import PunktLanguageVars, PunktTokenizer
    except ImportError:
        raise UserError(
            f"--sentence-splitter punkt needs NLTK and its model of {language}: {_COMMANDS}",
            UNAVAILABLE,
        ) from None

    class WithSpace(PunktLanguageVars):  # type: ignore[misc]
        """Make the end of a sentence include the white space after it."""

        _period_context_fmt = r"""
            %(SentEndChars)s             # a potential end of a sentence
            \s*                          # which keeps what separates it from the next one
            (?=(?P<after_tok>
                %(NonWord)s
                |
                (?P<next_tok>\S+)
            ))"""

    try:
        punkt = PunktTokenizer(language)
    except ValueError as error:  # a name that is a path
        raise UserError(f"--lang {language}: {error}") from None
    except LookupError:
        raise UserError(
            f"--sentence-splitter punkt needs NLTK's model of {language}: {_COMMANDS}", UNAVAILABLE
        ) from None
    if keep_newlines:
        punkt._lang_vars = WithSpace()
    return lambda text: list(punkt.tokenize(text))


_COMMANDS = (
    "pip install nltk; python -m nltk.downloader punkt_tab; or use --sentence-splitter rules"
)
