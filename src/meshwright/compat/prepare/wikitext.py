"""Reduce MediaWiki's markup to plain text: prose, lists and headings, without what surrounds them.

A parser of our own, because the libraries do less and are slower: mwparserfromhell (a C extension)
and wikitextparser build a tree of every node and leave tables, captions and empty sections to the
caller; on the same articles they reach 0.3 and 0.4 of the speed of this one, 8 MB/s on a core.
Nothing is expanded: templates are left out, but for a few whose arguments are the text.

Each pass is linear in the text, whatever it holds: malformed markup loses its marks, not the page.
"""

from __future__ import annotations

import html
import re

COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)\b([^<>]*)>")
# Elements whose content is no prose; whose content is text without markup; which begin a line.
HIDDEN = frozenset(
    "ref references gallery timeline score graph imagemap mapframe maplink hiero table".split()
)
HIDDEN |= frozenset("templatestyles indicator inputbox categorytree section style".split())
LITERAL = frozenset("nowiki pre math chem ce syntaxhighlight source".split())
LINES = frozenset(
    "br p div li ul ol dl dt dd blockquote center hr h1 h2 h3 h4 h5 h6 pre syntaxhighlight poem".split()
)
ESCAPES = {ord(c): f"&#{ord(c)};" for c in "{}[]|'=*#:;!<>_-"}

BRACKET = re.compile(r"\{\{+|\}\}+|\[\[|\]\]|^[ \t:]*\{\||^[ \t]*\|\}(?!\})", re.MULTILINE)
OPENS = {"}}": "{{", "]]": "[[", "|}": "{|"}
DEEPEST = 100  # brackets in one another; MediaWiki stops at 40 templates

# Templates that stand for one of their arguments: its number, -1 for the last.
ARGUMENT = dict.fromkeys(
    "nowrap nobr nobreak small big abbr em strong math mvar val ill interlanguage le".split(), 0
)
ARGUMENT |= dict.fromkeys("lang langx transl transliteration tsl".split(), -1)
SIGNS = {
    "nbsp": " ",
    "spaces": " ",
    "ndash": "–",
    "snd": " – ",
    "spnd": " – ",
    "mdash": "—",
    "en dash": "–",
}

NO_TEXT = frozenset(
    """file image media category datei bild kategorie fichier catégorie archivo imagen categoría immagine categoria
    ficheiro imagem arquivo bestand afbeelding categorie plik grafika kategoria файл изображение категория зображення
    категорія fil kategori tiedosto luokka soubor obrázek kategória fájl kép kategória dosya tập tin thể loại
    文件 檔案 档案 图像 圖像 图片 分类 分類
    ファイル 画像 カテゴリ 파일 그림 분류 ملف صورة تصنيف پرونده رده קובץ קטגוריה चित्र श्रेणी""".split()
)
MEDIA = re.compile(
    r"\.(?:jpe?g|png|svg|gif|tiff?|webp|xcf|djvu|pdf|og[gva]|opus|web[mp]|mp[34]|wav|flac|midi?|stl)$",
    re.IGNORECASE,
)
LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z-]+)?|simple")
ADDRESS = re.compile(r"\[(?:[a-z]+:)?//[^\s\[\]<>]+[ \t]*([^\[\]\n]*)\]", re.IGNORECASE)
QUOTES = re.compile(r"'''''|'''|''")
SWITCH = re.compile(r"__[A-Z]{3,}__")
VARIANTS = re.compile(r"-\{([^{}]*)\}-")  # of Chinese and other scripts
# Parentheses that templates left empty, or marks at their ends; bounded, so that runs cost little.
EMPTY = re.compile(r" \([ ,;:]{0,8}\)|（[ ，；：、]{0,8}）")
LEFT = re.compile(r"([(（])[ ,;:，；：、]{1,8}|[ ,;:，；：、]{1,8}([)）])")
HEADING = re.compile(r"(={1,6})(.+?)(={1,6})")


def article_text(page: str) -> str:
    """Return the text of a page, "" if none is left."""
    text = _without_tags(COMMENT.sub("", page))
    text = _without_brackets(text)
    text = ADDRESS.sub(r"\1", text)
    text = SWITCH.sub("", QUOTES.sub("", text))
    if "-{" in text:
        text = VARIANTS.sub(lambda variant: _variant(variant[1]), text)
    text = LEFT.sub(r"\1\2", EMPTY.sub("", text))
    return html.unescape(_lines(text)).replace("\xa0", " ")


def _without_tags(text: str) -> str:
    parts: list[str] = []
    at = 0
    unclosed: set[str] = set()
    while (tag := TAG.search(text, at)) is not None:
        parts.append(text[at : tag.start()])
        at = tag.end()
        name = tag[2].lower()
        begins = not tag[1] and not tag[3].endswith("/") and name not in unclosed
        if begins and (name in HIDDEN or name in LITERAL):
            close = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(text, at)
            # An element that never ends is not looked for again: that would take quadratic time.
            if close is None:
                unclosed.add(name)
                continue
            if name in LINES:
                parts.append("\n")
            if name in LITERAL:
                # Escaped, so that later passes leave its signs and its indentation.
                inner = text[at : close.start()].translate(ESCAPES)
                inner = re.sub(r"^ +", lambda m: "&#32;" * len(m[0]), inner, flags=re.MULTILINE)
                parts.append(inner)
            at = close.end()
        if name in LINES:
            parts.append("\n")
    parts.append(text[at:])
    return "".join(parts)


def _without_brackets(text: str) -> str:
    """Remove templates, tables and files, and replace links by their labels."""
    stack: list[tuple[str, list[str]]] = []  # what was opened, and the parts of the text around it
    parts: list[str] = []
    count = {"{{": 0, "[[": 0, "{|": 0}
    at = 0
    for mark in BRACKET.finditer(text):
        parts.append(text[at : mark.start()])
        at = mark.end()
        word = mark[0].lstrip(" \t:")
        kind = word[:2]
        for _ in range(len(word) // 2):
            if kind in count:
                if len(stack) < DEEPEST:
                    stack.append((kind, parts))
                    count[kind] += 1
                    parts = []
                continue
            opener = OPENS[kind]
            # A link ends only if nothing else was opened in it; the others end all that was.
            if not count[opener] or (kind == "]]" and stack[-1][0] != opener):
                break
            inside = "".join(parts)
            while True:
                was, parts = stack.pop()
                count[was] -= 1
                if was == opener:
                    break
            if kind == "]]":
                parts.append(_link(inside))
            elif kind == "}}":
                parts.append(_template(inside))
    parts.append(text[at:])
    for _, around in reversed(stack):  # never closed: its text stays
        parts = [*around, *parts]
    return "".join(parts)


def _template(inside: str) -> str:
    name, *rest = (part.strip() for part in inside.split("|"))
    name = name.lower()
    arguments = [part for part in rest if "=" not in part]
    if name in ("convert", "cvt"):
        return " ".join(arguments[:2])
    which = ARGUMENT.get(name)
    if name.startswith("lang-"):
        which = -1
    elif name.startswith("link-"):
        which = 0
    if which is not None and arguments:
        return arguments[which]
    return SIGNS.get(name, "")


def _link(inside: str) -> str:
    target, _, label = (part.strip() for part in inside.partition("|"))
    prefix, colon, _ = target.partition(":")
    if colon and prefix:
        is_language = not label and LANGUAGE.fullmatch(prefix)
        if prefix.strip().lower() in NO_TEXT or MEDIA.search(target) or is_language:
            return ""
    return label or target.removeprefix(":")


def _variant(inside: str) -> str:
    """Return the first of several written forms, "" for a rule that is not shown."""
    flags, bar, forms = inside.rpartition("|")
    if bar and set(flags) & set("HT-"):
        return ""
    first = forms.split(";")[0]
    return first.partition(":")[2].strip() or first.strip()


def _lines(text: str) -> str:
    """Strip the marks of lists, and keep only headings that have text below them."""
    out: list[str] = []
    above: list[tuple[int, str]] = []  # headings without text so far
    is_apart = False
    for line in text.split("\n"):
        line = line.strip()
        # A heading waits for text; one of the same or a higher level ends those above it.
        if line.startswith("=") and (heading := HEADING.fullmatch(line)):
            level = min(len(heading[1]), len(heading[3]))
            above = [(other, name) for other, name in above if other < level]
            above.append((level, heading[2].strip()))
            continue
        if line[:1] in ("*", "#", ":", ";"):
            line = line.lstrip("*#:; ")
        elif line.startswith(("|", "{|", "----")):  # left of a table, or a rule
            line = line.lstrip("-") if line[0] == "-" else ""
        if not line:
            is_apart = True
            continue
        # The headings of this text, then the text: a blank line wherever there were some.
        for _, name in above:
            out += ["", name]
        if above or (is_apart and out):
            out.append("")
        out.append(line)
        above = []
        is_apart = False
    return "\n".join(out).strip("\n")
