"""--split-sentences: split documents into sentences by rules, or with NLTK's Punkt models.

The rules are our own because Punkt's models are no part of NLTK's package: they are downloaded,
which closed clusters cannot do, and Punkt knows no Chinese or Japanese.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.errors import UNAVAILABLE, USAGE, UserError
from meshwright.settings.grammar import did_you_mean

_CLOSERS = "\"'”’»›)\\]}*_」』）〕】》〉"
_OPENERS = "\"'“‘„‚«‹([{¿¡*_"

# What may end a sentence: a stop before white space, an empty line, a Chinese or Japanese stop. All
# begin with one set of characters, for which re searches four times as fast as for alternatives.
_STOPS, _WIDE_STOPS = ".!?…‽؟۔।॥։።", "。！？｡"
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
_ITEM = re.compile(r"\W*(?:\d{1,3}|[ivxlc]+|[IVXLC]+|[a-zA-Z])")  # the number of a heading or a list
_ROMAN = re.compile(r"[IVXLC]+")


@dataclass(frozen=True)
class Language:
    """Abbreviations in lower case without their last stop, and words that begin sentences."""

    never: str = ""  # a sentence never ends behind them
    numbers: str = ""  # it does unless a number follows
    sometimes: str = ""  # it does if a starter follows; so do initials and U.S.
    starters: str = ""
    ordinals: bool = False  # a stop makes an ordinal: 3. Oktober


_CHINESE = Language(never="mr mrs ms dr prof st vs", numbers="no fig vol p pp", sometimes="inc ltd co corp jr sr etc")
LANGUAGES = {
    "english": Language(
        never="mr mrs ms messrs mme mlle dr drs prof rev fr hon st ste gen col maj capt cpt lt sgt cpl pvt adm cmdr gov"
        " sen rep pres supt insp ft mt vs viz cf e.g i.e ca approx resp",
        numbers="no nos fig figs vol vols p pp par ch chap art arts sec sect eq eqs ex ver op bk pt tab app cl",
        sometimes="etc al inc ltd co corp bros jr sr esq ph.d m.d b.a m.a a.m p.m a.d b.c u.s u.k u.n dept univ assn"
        " ave blvd rd sq jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri sat sun"
        " ed eds trans est ext tel min max misc lat long abbr orig incl ibid oz lb lbs",
        starters="the a an he she it they we you i this that these those there his her its their our my your in on at"
        " by for from with without after before when while if as but and or so yet however although though since then"
        " now here what who whom why how where which no not nor to is was are were do did some many most all both each"
        " one let thus hence another during under over",
    ),
    "german": Language(
        never="hr fr frl dr prof st ca bzw vgl sog inkl exkl evtl ggf bspw geb gest d.h z.b u.a i.d.r o.ä z.t u.u zzt"
        " hl ing dipl phil med jun sen bes insb max min",
        numbers="nr abb tab s bd abs art kap jg aufl anm ziff",
        sometimes="usw etc u.s.w u.v.m u.a.m str co jh jhd mio mrd jan feb apr aug sept okt nov dez v.chr n.chr chr",
        starters="der die das ein eine er sie es wir ihr ich du in im am an auf bei mit nach vor von zu aus für durch"
        " und aber oder denn doch wenn als da dann so auch nur noch dies diese dieser dieses hier dort wie was wer wo",
        ordinals=True,
    ),
    "french": Language(
        never="m mm mme mmes mlle mlles dr pr me mgr st ste cf p.ex c.-à-d env av boul gén col cap lt",
        numbers="no n p pp vol fig chap art t al",
        sometimes="etc cie ltd janv févr avr juil sept oct nov déc apr j.-c",
        starters="le la les l un une des il elle ils elles on nous vous je tu ce cet cette ces en dans à au aux par"
        " pour sur avec sans mais et ou donc or si quand lorsque puis ainsi alors",
    ),
    "spanish": Language(
        never="sr sra sras sres srta d dña dr dra prof profa st sto sta p.ej ej gral cap lic ing ud uds vd vds av avda",
        numbers="no núm n pág págs p pp vol fig cap art",
        sometimes="etc cía ltda s.a ee.uu aprox a.c d.c",
        starters="el la los las un una él ella ellos ellas yo tú nosotros en con sin por para de a al del y pero o si"
        " cuando como este esta esto ese esa eso no se su sus así entonces",
    ),
    "italian": Language(
        never="sig sigg sigra dott dr prof avv ing arch on mons s st cfr es gen col cap",
        numbers="n nn p pp pag pagg vol fig cap art",
        sometimes="ecc etc s.p.a s.r.l ca a.c d.c",
        starters="il lo la i gli le un uno una egli ella esso essi noi voi io tu in con per da di a al nel e ma o se"
        " quando come questo questa quello quella non si così allora",
    ),
    "portuguese": Language(
        never="sr sra srs sras dr dra prof profa eng d dom st sto sta ex av gal cel cap exmo",
        numbers="no n núm pág págs p pp vol fig cap art",
        sometimes="etc cia ltda s.a aprox a.c d.c",
        starters="o a os as um uma ele ela eles elas eu tu nós em no na com sem por para de do da e mas ou se quando"
        " como este esta isto esse essa isso não seu sua assim então",
    ),
    "dutch": Language(
        never="dhr mevr mw mr dr drs prof ir ing st ca bijv bv vgl d.w.z t.o.v m.b.t o.a i.p.v z.g zgn",
        numbers="nr nrs blz p pp fig vol art hfst",
        sometimes="enz etc e.d jan feb mrt apr aug sept okt nov dec v.chr n.chr",
        starters="de het een hij zij ze wij we ik je jij u in op aan bij met na voor van uit door en maar of want als"
        " toen dan dit dat deze die hier daar er wat wie hoe",
    ),
    "russian": Language(
        never="г гр т.е т.к им акад проф доц ул пр пл д см ср напр св",
        numbers="рис табл стр с гл ст п т",
        sometimes="т.д т.п др гг в вв руб коп тыс млн млрд н.э до н.э",
        starters="он она оно они мы вы я ты это этот эта эти тот та те в на с у к по за из о от до при для и а но или"
        " если когда как что где там тут так не",
    ),
    "chinese": _CHINESE,
    "japanese": _CHINESE,
    "korean": _CHINESE,
}


@functools.cache
def build(splitter: str, language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Return a function that splits a text into sentences, by "rules" or "punkt".

    With `keep_newlines`, white space stays with the sentence before it: joined, they are the text.
    """
    if splitter == "punkt":
        return _build_punkt(language, keep_newlines)
    if language not in LANGUAGES:
        raise UserError(
            f"--lang {language}: there are rules for {', '.join(LANGUAGES)}{did_you_mean(language, LANGUAGES)}; "
            "--sentence-splitter punkt knows other languages",
            USAGE,
        )
    rules = Rules(LANGUAGES[language])

    def split(text: str) -> list[str]:
        begin, out = 0, []
        for end in [*rules.ends(text), len(text)]:
            if sentence := text[begin:end] if keep_newlines else text[begin:end].strip():
                out.append(sentence)
            begin = end
        return out

    return split


class Rules:
    """Where sentences end in a language."""

    def __init__(self, language: Language) -> None:
        self.never, self.numbers = frozenset(language.never.split()), frozenset(language.numbers.split())
        self.sometimes, self.starters = frozenset(language.sometimes.split()), frozenset(language.starters.split())
        self.ordinals = language.ordinals

    def ends(self, text: str) -> Iterator[int]:
        """Yield where each sentence but the last ends, behind the white space that follows it."""
        begin = _end(_SPACE, text, 0)
        caseless = text.islower()  # then a small letter may begin a sentence
        for found in _END.finditer(text):
            end = found.end()
            if found.start() < begin:  # an empty line behind a sentence that has ended
                continue
            if found["quote"] and text.count('"', begin, end) % 2:  # it opens the next sentence
                end -= 1
            if found["close"] is not None and not self._is_end(text, begin, found, caseless):
                continue
            begin = _end(_SPACE, text, end)
            if begin < len(text):
                yield begin

    def _is_end(self, text: str, begin: int, found: re.Match[str], caseless: bool) -> bool:
        """Return whether a sentence from `begin` ends at a stop before white space."""
        after = _NEXT.match(text, found.end())
        assert after
        word = after[1]
        if not word:
            return text[after.end() : after.end() + 1] not in set(".,;:!?…)»&/")
        if word[0].islower() and not caseless:
            return False
        stop = text[found.start() : found.start("close")]
        if stop.strip(".…"):
            return True
        if stop != ".":  # an ellipsis; I and its forms have a capital letter anywhere
            return word.partition("’")[0].partition("'")[0] != "I"
        if len(word) == 1 and text.startswith(".", after.end()) and text[found.start() - 2 : found.start() - 1] in " .":
            return False  # initials, or z. B.
        return bool(found["close"]) or self._is_full_stop(text, begin, found.start(), word)

    def _is_full_stop(self, text: str, begin: int, at: int, word: str) -> bool:
        """Return whether the stop `at` ends a sentence, not just an abbreviation or a number."""
        if at - begin < 8 and _ITEM.fullmatch(text, begin, at):
            return False
        before = text[max(begin, at - 30) : at].replace("—", " ").replace("--", " ").rsplit(None, 1)
        last = before[-1].lstrip(_OPENERS) if before and not text[at - 1].isspace() else ""
        key, is_starter = last.lower(), word.lower() in self.starters
        if key in self.never:
            return False
        if len(last) == 1 and last.isupper() and not word[0].isdigit():  # an initial; "I" if a word follows
            return is_starter or (last == "I" and len(word) > 1)
        if key in self.numbers:
            return not (word[0].isdigit() or _ROMAN.fullmatch(word))
        if key in self.sometimes or _DOTTED.fullmatch(last) or (self.ordinals and last.isdigit() and len(last) < 3):
            return is_starter
        return bool(last) or word != "I"  # no word: an ellipsis of separate stops


def _end(pattern: re.Pattern[str], text: str, begin: int) -> int:
    found = pattern.match(text, begin)
    return found.end() if found else begin


def _build_punkt(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    try:
        from nltk.tokenize.punkt import PunktLanguageVars, PunktTokenizer
    except ImportError:
        raise UserError(
            f"--sentence-splitter punkt needs NLTK and its model of {language}: {_COMMANDS}", UNAVAILABLE
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


_COMMANDS = "pip install nltk; python -m nltk.downloader punkt_tab; or use --sentence-splitter rules"
