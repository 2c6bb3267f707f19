"""Text from tokens as they come: whole characters, stop strings, the first token of a text."""

import random

import pytest

from meshwright import tokenizers
from meshwright.generation import stream


class Pieces:
    """A tokenizer of given texts; with `replaces` it decodes half a character to U+FFFD."""

    name = "pieces"

    def __init__(self, tokens, replaces):
        self.tokens, self.replaces = tokens, replaces

    def decode_bytes(self, ids):
        raw = b"".join(self.tokens[i] for i in ids)
        return raw.decode("utf-8", "replace").encode() if self.replaces else raw


@pytest.mark.parametrize("replaces", [True, False])
def test_no_character_is_broken(replaces):
    """However a text is cut into tokens, the pieces join to it without half characters."""
    text = "aé€😀 naïve 中文 👩‍👩‍👧 �?"
    raw = text.encode()
    random_ = random.Random(1)
    for _ in range(60):
        cuts = sorted({0, len(raw), *random_.choices(range(len(raw)), k=random_.randrange(40))})
        tokens = [raw[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        pieces = list(stream.pieces(Pieces(tokens, replaces), range(len(tokens))))
        assert "".join(pieces) == text and sum("�" in p for p in pieces) == 1
    broken = [b"a", "é".encode()[:1], b"b", "€".encode()[:2]]
    assert "".join(stream.pieces(Pieces(broken, replaces), range(4))) == "a�b�"


def test_pieces_come_as_soon_as_they_are_complete():
    assert list(stream.pieces(tokenizers.Bytes(), "Bär".encode())) == ["B", "", "ä", "r", ""]


def cut(text, *stop):
    """Return each piece of a text of bytes, its end, and whether a stop string ended it."""
    s = stream.TextStream(tokenizers.Bytes(), stop)
    return [s.push(i) for i in text.encode()], s.finish(), s.stopped


def test_nothing_of_a_stop_string_is_shown():
    """Its beginning waits, however often it begins; what only looked like it comes later."""
    assert cut("aabab.c", "abab.") == (["", "a", "", "", "", "", ""], "", True)
    assert cut("aababc", "abab.") == (["", "a", "", "", "", "ababc"], "", False)
    assert cut("one\n\ntwo", "\n\n", "tw")[1:] == ("", True) and "".join(cut("one\n\ntwo", "tw", "\n\n")[0]) == "one"
    assert cut("ab", "abc") == (["", ""], "ab", False)
    assert cut("Bä.", "ä")[0] == ["B", "", "", ""]
    assert cut("x", "")[0] == ["x"]  # an empty string ends nothing


def test_a_stop_string_within_one_token():
    many = Pieces([b"one st", b"op two", b"three"], False)
    assert stream.text_of(many, range(3), ["stop"]) == "one "
    assert stream.text_of(many, range(3), ["two", "op"]) == "one st"


def test_text_after_a_prompt_keeps_its_space(tmp_path):
    """A vocabulary with a space before each word leaves it out only where the text begins."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    library = Tokenizer(models.BPE(vocab={"▁a": 0, "▁b": 1, "</s>": 2}, merges=[]))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    t = tokenizers.HuggingFace(tmp_path)
    assert list(stream.pieces(t, [0, 1])) == ["a", " b", ""]
    assert stream.text_of(t, [0, 1], before=[1, 1]) == " a b"
