"""The byte-trigram model that a small GPT is compared with."""

import math
import random
from collections import Counter, defaultdict

import pytest

from meshwright.apps.quickstart.trigram import trigram_bits_per_byte
from meshwright.base.errors import UserError


class WittenBell:
    """The same model by its definition, with dictionaries and one byte at a time."""

    def __init__(self, train):
        self.orders = [defaultdict(Counter) for _ in range(3)]
        for document in train:
            for i, byte in enumerate(document):
                for order, context in enumerate(self.contexts(document[:i])):
                    self.orders[order][context][byte] += 1

    def contexts(self, before):
        a, b = (None, None, *before)[-2:]
        return (), (b,), (a, b)

    def probability(self, before, byte):
        unigrams = self.orders[0][()]
        p = (unigrams[byte] + 1) / (unigrams.total() + 256)
        for order in (1, 2):
            seen = self.orders[order].get(self.contexts(before)[order])
            if seen:
                p = (seen[byte] + len(seen) * p) / (seen.total() + len(seen))
        return p

    def bits_per_byte(self, documents):
        bits = [-math.log2(self.probability(d[:i], d[i])) for d in documents for i in range(len(d))]
        return math.fsum(bits) / len(bits)


def test_trigram_against_the_definition():
    random_ = random.Random(0)
    for alphabet in (b"ab", b"abcdefgh ", bytes(range(256))):
        for _ in range(2):
            train = [bytes(random_.choices(alphabet, k=random_.randrange(60))) for _ in range(8)]
            held_out = [
                bytes(random_.choices(alphabet + b"\0\xffz", k=random_.randrange(60)))
                for _ in range(4)
            ]
            got = trigram_bits_per_byte(train, held_out)
            model = WittenBell(train)
            assert got == pytest.approx(model.bits_per_byte(held_out), rel=1e-12)
            for before in (b"", train[0][:1], train[1][:2], b"qz"):
                assert math.fsum(model.probability(before, b) for b in range(256)) == pytest.approx(
                    1
                )


def test_trigram_limits():
    assert trigram_bits_per_byte([], [b"abc"]) == pytest.approx(8)  # nothing seen: 256 equal bytes
    assert trigram_bits_per_byte([b"ab" * 5000], [b"ab" * 500]) < 0.01
    assert trigram_bits_per_byte(iter([b"abc"]), iter([b"", b"abc"])) < 8  # once through is enough
    with pytest.raises(UserError, match="no held-out bytes"):
        trigram_bits_per_byte([b"abc"], [b""])
