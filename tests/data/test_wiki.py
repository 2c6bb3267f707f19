"""Wikipedia: markup to text, dumps as they are downloaded, and wikiextractor's folders."""

import bz2
import gzip
import json
import random
import time
import tracemalloc
import zipfile
from xml.sax.saxutils import escape

import pytest
from test_inputs import fill, preprocess, read

from helpers import error_of
from meshwright.base.errors import BAD_DATA
from meshwright.compat.prepare.wikitext import article_text
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import reading

MARKUP = {
    "'''Bold''' and ''it'' '''''both'''''": "Bold and it both",
    "a<!-- no\n -->b<!-- open": "ab",
    "[[Page]]s, [[Page|label]], [[:Category:C]], [[a#b|]]": "Pages, label, Category:C, a#b",
    "x [[File:a.jpg|thumb|A [[caption|of]] it {{t}}]]y": "x y",
    "[[Category:C]][[分类:学科]][[Datei:b]][[Anything:c.PNG|thumb]][[de:D]]z": "z",
    "[[Star Wars: A New Hope]]": "Star Wars: A New Hope",
    "[http://x.y/z label text] [https://x] //x": "label text  //x",
    "a {{one|{{two|{{{three|}}}}}|[[x]]}} b": "a  b",
    "{{lang|fr|mot}} {{lang-de|Wort}} {{nowrap|5 m}} {{convert|5|km|mi}} 1{{ndash}}2": "mot Wort 5 m 5 km 1–2",
    "Name (; {{IPA|x}}, born 1900) (: {{x}}) f() 名（{{x}}；）在": "Name (born 1900) f() 名在",
    "{|class=x\n! a\n|-\n| {{t|\n}}\n{|\n|inner\n|}\n|}\nafter": "after",
    "<ref>{{cite}}</ref>a<ref name=x/>b<REF name='y'>z</Ref >c": "abc",
    "<gallery>\nFile:x\n</gallery>one<br/>two<div class=x>three</div>": "one\ntwo\nthree",
    "<nowiki>[[x]] ''y'' {{z}}</nowiki> <math>{{a}}_b</math>": "[[x]] ''y'' {{z}} {{a}}_b",
    "<pre>\n* a\n  b = c\n</pre>": "* a\n  b = c",
    "&lt;b&gt; &amp; &nbsp;&#65;": "<b> &  A",
    "== A ==\n=== B ===\n{{t}}\n== C ==\ntext\n=== D ===\n* one\n*# two\n== E ==": "C\n\ntext\n\nD\n\none\ntwo",
    "__NOTOC__\n----\n: quoted\n;term": "quoted\nterm",
    "-{zh-hans:计算机; zh-hant:電腦}-和-{A|zh-cn:甲;zh-tw:乙}--{H|zh:无}-": "计算机和甲",
}
BROKEN = {
    "a {{open [[b]] '''c": "a open b c",
    "a }} b ]] c |} d": "a  b  c |} d",
    "{|\n| a\nb": "b",
    "[[a|{{b]] c}} d": "a| d",
    "<ref>open and text": "open and text",
    "<b <i>x</i": "<b x</i",
    "== a =\n=\nx": "a\n\n=\nx",
}


@pytest.mark.parametrize("given", [*MARKUP, *BROKEN])
def test_markup_to_text(given):
    assert article_text(given) == (MARKUP | BROKEN)[given]


def test_markup_of_any_kind_ends_soon():
    """No pass is more than linear: long runs of each mark, alone and mixed."""
    marks = "{{ }} [[ ]] <ref> </ref> <!-- ''' == -{ [http:// , <".split()
    marks += ["{|\n", "\n|}", " ("]
    shuffle = random.Random(3)
    began = time.process_time()
    for mark in marks:
        article_text(mark * 8_000 + "text " * 1000 + "]]}}" * 8_000)
    article_text("[[" * 10_000 + "text " * 50_000 + "]]" * 10_000)
    for _ in range(50):
        article_text("".join(shuffle.choice([*marks, "a", "|", "\n"]) for _ in range(2000)))
    assert time.process_time() - began < 5


def page(title, body, ns=0, more="", model="wikitext"):
    return (
        f"  <page>\n    <title>{escape(title)}</title>\n    <ns>{ns}</ns>\n    <id>7</id>\n{more}    <revision>\n"
        f"      <id>8</id>\n      <model>{model}</model>\n      <format>text/x-wiki</format>\n"
        f'      <text bytes="{len(body)}" xml:space="preserve">{escape(body)}</text>\n'
        f"      <sha1>abc</sha1>\n    </revision>\n  </page>\n"
    )


HEAD = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11">\n  <siteinfo>\n    <namespaces>\n'
HEAD += '      <namespace key="0" case="first-letter" />\n    </namespaces>\n  </siteinfo>\n'
PAGES = [
    page("A & B", "'''A''' is &nbsp;<b>one</b>.{{t}}"),
    page("Talk:A", "talk", ns=1),
    page("R", "#重定向 [[A]]", more='    <redirect title="A" />\n'),
    page("Old", "#redirect [[A]]"),
    page("Code", "{}", model="json"),
    page("Empty", "{{only a template}}"),
    page("Two", "revisions").replace(
        "<revision>", "<revision><text>earlier</text></revision>\n    <revision>"
    ),
    page("None", "x").replace('xml:space="preserve">x</text>', "/>"),
    page("中文", "'''中文'''"),
]
DUMP = (HEAD + "".join(PAGES) + "</mediawiki>\n").encode()
ARTICLES = ["A & B\n\nA is  one.\n", "Two\n\nrevisions\n", "中文\n\n中文\n"]


def multistream(pieces):
    return b"".join(bz2.compress(piece) for piece in pieces)


MULTISTREAM = multistream(
    [
        HEAD.encode(),
        *("".join(PAGES[n : n + 2]).encode() for n in range(0, 10, 2)),
        b"</mediawiki>\n",
    ]
)


def test_workers_and_a_folder(tmp_path):
    """Dumps in a folder are found by their content; other XML only if it is chosen."""
    files = {"a.xml.bz2": MULTISTREAM, "b.xml": "<svg/>", "c.txt": "c"}
    folder = fill(tmp_path / "in", files)
    documents, out, err = preprocess(tmp_path, folder, workers=2)
    assert (
        documents == [*ARTICLES, "c"] and "passed over 1 file: 1 XML other than wiki dumps" in err
    )
    assert read(folder, include=["*.xml"])[0] == ["<svg/>"]
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr("d.xml", DUMP)
        archive.writestr("e.txt", "e")
    documents, passed = read(tmp_path / "in.zip")
    assert documents == ["e"] and "1 wiki dumps in an archive" in passed


DAMAGES = {
    "a page that is cut": ("d.xml", DUMP[: DUMP.index(b"</text>", 2000)], "page cut short"),
    "a stream that is cut": ("d.xml.bz2", bz2.compress(DUMP)[:-20], "ended within a bzip2 stream"),
    "a cut between streams": (
        "d.xml.bz2",
        multistream([(HEAD + PAGES[0]).encode(), PAGES[-1][:-40].encode()]),
        "page cut short",
    ),
    "no text": ("d.xml", DUMP.replace(b"</text>", b"", 1), "damaged page (no text in"),
    "no title": ("d.xml", DUMP.replace(b"</title>", b"", 1), "damaged page (no title in"),
    "no UTF-8": (
        "d.xml",
        DUMP.replace("'''中文'''".encode(), b"\xe4\xb8"),
        "not UTF-8 (byte 0xe4 in a page)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported(tmp_path, damage):
    """It ends with a status; --on-error skip keeps the undamaged articles."""
    name, content, message = DAMAGES[damage]
    fill(tmp_path, {name: content})
    assert message in error_of(lambda: preprocess(tmp_path, tmp_path / name, workers=1), BAD_DATA)
    if damage != "a stream that is cut":  # one block of bzip2, so nothing comes out of it
        documents, _, err = preprocess(tmp_path, tmp_path / name, on_error="skip", workers=1)
        assert (
            set(documents) <= set(ARTICLES) and "left out" in err and message.split(" (")[0] in err
        )


def test_memory_does_not_grow_with_the_dump(tmp_path):
    """Pages of 20 MB, which bzip2 packs into some kB, take little more than one of them."""
    chunk = bz2.compress(page("P", f"word <!--{'x' * 10**6}-->").encode())
    peaks = []
    for count in (1, 20):
        path = tmp_path / f"{count}.xml.bz2"
        path.write_bytes(bz2.compress(HEAD.encode()) + chunk * count)
        tracemalloc.start()
        assert sum(1 for _ in reading.read_texts(TextInputs(input=[str(path)]))) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 10 << 20


def test_wikiextractor_folders(tmp_path):
    """Files without a suffix are read if they hold JSON lines with the text, else passed over."""

    def lines(*names):
        rows = (
            {"id": "1", "revid": "2", "url": "u", "title": n, "text": f"{n}\n\ntext"} for n in names
        )
        return "".join(json.dumps(row) + "\n" for row in rows)

    files = {
        "AA/wiki_00": lines("a", "b"),
        "AA/wiki_01": lines("c"),
        "AB/wiki_00.bz2": bz2.compress(lines("d").encode()),
        "AB/LICENSE": "free",
        "AB/other": '{"id": 1}\n',
        "AB/archive": b"PK\x03\x04\0\0\0\0",
        "AB/x.gz": gzip.compress(b"plain"),
    }
    documents, passed = read(fill(tmp_path, files))
    assert documents == [f"{n}\n\ntext" for n in "abcd"]
    assert (
        passed
        == "passed over 4 files: 4 with other suffixes (3 no suffix, 1 .gz); choose with --include"
    )
