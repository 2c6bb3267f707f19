"""--split-sentences: split documents with NLTK's Punkt models, as Megatron's tool does."""

from __future__ import annotations

import functools
from collections.abc import Callable

from meshwright.errors import UNAVAILABLE, UserError


@functools.cache
def build(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Return a function that splits a text into sentences.

    With `keep_newlines`, white space stays with the sentence before it: joined, they are the text.
    """
    try:
        from nltk.tokenize.punkt import PunktLanguageVars, PunktTokenizer
    except ImportError:
        raise UserError(
            f"--split-sentences needs NLTK and its model of {language}: {_commands()}", UNAVAILABLE
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
        raise UserError(f"--split-sentences needs NLTK's model of {language}: {_commands()}", UNAVAILABLE) from None
    if keep_newlines:
        punkt._lang_vars = WithSpace()
    return lambda text: list(punkt.tokenize(text))


def _commands() -> str:
    return "pip install nltk; python -m nltk.downloader punkt_tab"
