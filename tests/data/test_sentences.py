"""Sentences: the rules of each language, Punkt by a flag, and no text lost."""

import io
import json
import random
import sys

import nltk
import pytest

from helpers import error_of, tokens_of
from meshwright.base.errors import LOCKED, UNAVAILABLE, USAGE
from meshwright.compat.prepare import sentences
from meshwright.config.schema import TokenizerFlags
from meshwright.config.text_inputs import Preprocess, PreprocessConfig
from meshwright.data.files.indexed import Indexed
from meshwright.data.text import preprocess
from meshwright.data.text.splitting import build_splitter

# Sentences are divided by |; the text has a blank there.
ENGLISH = """
    Dr. Who met Mr. Smith and Mrs. Jones.|They left!|Why?|No answer
    J. R. R. Tolkien wrote it.|It was I.|Nobody knew.
    It cost 3.14 dollars, i.e. a lot.|See Fig. 3 and No. 7 on p. 12.|No.|Never.
    He works for Acme Inc. The pay is good.
    He lives in the U.S. Army barracks.|She came at 5 p.m. on Monday.
    “What?” he said.|“Nothing.”|(He lied.)|Then: silence.
    Wait... what?|Well...|Then go.|Oh, if... I forgot.|So . . . I went . . . then home.
    He came in 1999.|Two years later he left.
    1. Introduction
    IV. The end.|Yes.
    Really?!|Yes.|¿Qué?|"No."|'Yes!'
    Visit www.example.com or mail a.b@c.de now.|Version 2.0 is out.
    Sammy Davis Jr. Smith met the N.A.T.O. Council.|Done.
    He said "and so on, etc."|Martin left.
    By P. Smith, p. 3, to P. 4.|OK.
    W. B. Yeats, Jr. was there, etc. and St. John, too.
"""
OTHERS = {
    "german": "Am 3. Oktober kam Hr. Dr. Müller, z. B. mit Frau Nr. 2.|Er ging bzw. lief usw. nach Haus.|Gut.",
    "french": "M. Dupont et Mme. Durand sont là.|Voir p. 3.|« Oui ! »|« Non ! », dit-il.|Il part, etc. vers midi.",
    "spanish": "El Sr. García llegó.|¿Dónde está?|¡Aquí!|Ver pág. 4.",
    "italian": "Il dott. Rossi è qui.|Vedi pag. 5.|Bene.",
    "portuguese": "O Sr. Silva chegou.|Veja pág. 6.|Bom.",
    "dutch": "Dhr. Jansen is er, bijv. vandaag.|Zie blz. 7.|Goed.",
    "russian": "В г. Москве живёт А. С. Пушкин.|Т.е. здесь.|Хорошо.",
    "japanese": "今日は晴れ。|「行こう！」|と言った。|No. 5。|終わり",
    "chinese": '他说：“好。”|然后走了！|真的吗？！|价格是3.14元。|“是。”|"对。"|"走吧。"|完',
}


def rules(language="english", keep=False):
    return build_splitter("rules", language, keep)


@pytest.mark.parametrize(
    "line", [pytest.param(line.strip(), id=line.split()[0]) for line in ENGLISH.strip().split("\n")]
)
def test_english(line):
    expected = line.split("|")
    # an abbreviation that may end a sentence does before a word that begins one
    if "Inc. The" in line:
        expected = ["He works for Acme Inc.", "The pay is good."]
    assert rules()(line.replace("|", " ")) == expected


@pytest.mark.flag("lang")
@pytest.mark.parametrize("language", OTHERS)
def test_languages(language):
    gap = "" if language in ("japanese", "chinese") else " "
    assert rules(language)(OTHERS[language].replace("|", gap)) == OTHERS[language].split("|")


def test_paragraphs_and_small_letters():
    assert rules()("CHAPTER I\n\nCall me\nIshmael.\r\n\r\nYes") == [
        "CHAPTER I",
        "Call me\nIshmael.",
        "Yes",
    ]
    assert rules()("hello there. how are you? fine.") == ["hello there.", "how are you?", "fine."]
    assert rules()(" \n ") == rules()("") == [] and rules(keep=True)(" \n ") == [" \n "]


def test_no_text_is_lost():
    """Joined with their white space the sentences are the text; without it they have its words."""
    draw = random.Random(1)
    parts = """a Bc Dr U.S I 7 . . ! ? … 。 " ” ( ) -- — é 好""".split()
    parts += [" ", " ", " ", "\n", "\n\n", "\r\n", "\t", "\u3000", "\ud800", "\x1c", "e.g.", "..."]
    for _ in range(1000):
        text = "".join(draw.choices(parts, k=draw.randint(0, 40)))
        for language in ("english", "chinese"):
            kept = rules(language, True)(text)
            assert "".join(kept) == text and "" not in kept
            cut = rules(language)(text)
            assert "".join("".join(cut).split()) == "".join(text.split()) and all(
                s == s.strip() != "" for s in cut
            )
            assert [s.strip() for s in kept if s.strip()] == cut


def test_a_long_text_without_stops_takes_linear_time():
    for part in ("word ", ".", ". ", "a. b. ", '"', "\n"):
        text = part * (200_000 // len(part))
        assert "".join(rules(keep=True)(text)) == text


@pytest.fixture
def punkt(tmp_path, monkeypatch):
    """Give NLTK a tiny model where its downloader puts models; return its language."""
    folder = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "toylang"
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("dr\n")
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    sentences.build_punkt.cache_clear()
    yield "toylang"
    sentences.build_punkt.cache_clear()


@pytest.mark.flag("split_sentences sentence_splitter keep_newlines")
def test_each_is_a_sequence(tmp_path, punkt):
    """The last has the end of document; --keep-newlines keeps all text; another splitter's files
    are not taken for these.
    """
    content = "Dr. Who is here. He left!\n\nWhy? No answer"
    ways = {"punkt": punkt, "rules": "english"}
    for splitter, lang in ways.items():
        assert build_splitter(splitter, lang, False)(content) == [
            "Dr. Who is here.",
            "He left!",
            "Why?",
            "No answer",
        ]
        assert "".join(build_splitter(splitter, lang, True)(content)) == content
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in (content, "", "One."))
    )

    def make(splitter, keep, lang, overwrite=True):
        how = {"append_eod": True, "lang": lang, "split_sentences": True, "keep_newlines": keep}
        how |= {"sentence_splitter": splitter, "overwrite": overwrite}
        p = Preprocess(
            input=[str(tmp_path / "in.jsonl")], output_prefix=str(tmp_path / "out"), **how
        )
        tokenizer = TokenizerFlags(tokenizer_type="ByteTokenizer")
        preprocess.preprocess(PreprocessConfig(p, tokenizer), io.StringIO(), io.StringIO())

    for splitter, lang in ways.items():
        for keep, first in ((False, b"Dr. Who is here."), (True, b"Dr. Who is here. ")):
            make(splitter, keep, lang)
            data = Indexed(tmp_path / "out_text_sentence")
            assert data.doc_idx.tolist() == [0, 4, 4, 5]
            assert bytes(tokens_of(data, 0).tolist()) == first
            assert [tokens_of(data, n).tolist()[-1] == 256 for n in range(5)] == [
                False,
                False,
                False,
                True,
                True,
            ]
    make("punkt", False, punkt)
    assert "sentence_splitter" not in (tmp_path / "out_text_sentence.origin.json").read_text()
    message = error_of(lambda: make("rules", False, "english", False), LOCKED)
    assert "made with other" in message and "--overwrite" in message


def test_missing_models(punkt, monkeypatch):
    command = (
        "pip install nltk; python -m nltk.downloader punkt_tab; or use --sentence-splitter rules"
    )
    message = error_of(lambda: build_splitter("punkt", "klingon", False), UNAVAILABLE)
    assert f"needs NLTK's model of klingon: {command}" in message
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)
    message = error_of(lambda: build_splitter("punkt", "english", False), UNAVAILABLE)
    assert f"needs NLTK and its model of english: {command}" in message
    message = error_of(lambda: build_splitter("rules", "turkish", False), USAGE)
    assert (
        "--lang turkish: there are rules for english, german" in message
        and "--sentence-splitter punkt" in message
    )
