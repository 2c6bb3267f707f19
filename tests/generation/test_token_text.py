"""Text from tokens as they come: whole characters, stop strings, the first token of a text."""

import random

import pytest

from helpers import spaced_words
from meshwright.data import tokenizers
from meshwright.generation.text import TokenText


class FixedTokens:
    """A tokenizer of given texts; with `replaces` it decodes half a character to U+FFFD."""

    name, eod = "fixed", -1

    def __init__(self, tokens, replaces):
        self.tokens, self.replaces = tokens, replaces

    def decode_bytes(self, ids):
        raw = b"".join(self.tokens[i] for i in ids)
        return raw.decode("utf-8", "replace").encode() if self.replaces else raw


def pieces_of(tokenizer, ids, **more):
    """Return the text of each token as it comes, and what waits at the end."""
    text = TokenText(tokenizer, **more)
    return [*(text.push(i) for i in ids), text.flush()]


@pytest.mark.parametrize("replaces", [True, False])
def test_no_character_is_broken(replaces):
    """However a text is cut into tokens, the pieces join to it without half characters."""
    text = "aé€😀 naïve 中文 👩‍👩‍👧 �?"
    raw = text.encode()
    random_ = random.Random(1)
    for _ in range(60):
        cuts = sorted({0, len(raw), *random_.choices(range(len(raw)), k=random_.randrange(40))})
        tokens = [raw[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        pieces = pieces_of(FixedTokens(tokens, replaces), range(len(tokens)))
        assert "".join(pieces) == text and sum("�" in p for p in pieces) == 1
    broken = [b"a", "é".encode()[:1], b"b", "€".encode()[:2]]
    assert "".join(pieces_of(FixedTokens(broken, replaces), range(4))) == "a�b�"


@pytest.mark.parametrize("replaces", [True, False])
def test_a_token_begins_where_its_first_character_is(replaces):
    """Also behind bytes that stay half a character, which become one of their own."""
    raw = "aé€😀 中文".encode()
    random_ = random.Random(2)
    for _ in range(60):
        cuts = sorted({0, len(raw), *random_.choices(range(len(raw)), k=random_.randrange(20))})
        tokens = [raw[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        expected = [len(raw[:a].decode("utf-8", "ignore")) for a in cuts[:-1]]
        assert begins_of(FixedTokens(tokens, replaces)) == expected
    half, other = "é".encode()[:1], "€".encode()[:2]
    assert begins_of(FixedTokens([b"a", half, b"b", half, half, b"cd", b"e"], replaces)) == [
        0,
        1,
        2,
        3,
        4,
        5,
        7,
    ]
    assert begins_of(FixedTokens([other, b"b", other[:1], other[1:], half], replaces)) == [
        0,
        1,
        2,
        2,
        3,
    ]


def begins_of(tokenizer):
    """Return the character in which each token begins, asked as the tokens come."""
    text = TokenText(tokenizer)
    begins = []
    for i in range(len(tokenizer.tokens)):
        begins.append(text.begin_of(i))
        text.push(i)
    return begins


def cut(text, *stop):
    """Return each piece of a text of bytes, its end, and whether a stop string ended it."""
    s = TokenText(tokenizers.Bytes(), stop)
    return [s.push(i) for i in text.encode()], s.flush(), s.stopped


def test_nothing_of_a_stop_string_is_shown():
    """Its beginning waits, however often it begins; what only looked like it comes later."""
    assert cut("aabab.c", "abab.") == (["", "a", "", "", "", "", ""], "", True)
    assert cut("aababc", "abab.") == (["", "a", "", "", "", "ababc"], "", False)
    assert (
        cut("one\n\ntwo", "\n\n", "tw")[1:] == ("", True)
        and "".join(cut("one\n\ntwo", "tw", "\n\n")[0]) == "one"
    )
    assert cut("ab", "abc") == (["", ""], "ab", False)
    assert cut("Bä.", "ä")[0] == ["B", "", "", ""]
    assert cut("x", "")[0] == ["x"]  # an empty string ends nothing


@pytest.fixture
def spaced(tmp_path):
    return spaced_words(tmp_path)


def test_text_after_a_prompt_keeps_its_space(spaced):
    assert pieces_of(spaced, [0, 1]) == ["a", " b", ""]
    assert pieces_of(spaced, [0, 1], before=[1, 1]) == [" a", " b", ""]
