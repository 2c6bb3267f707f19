"""Choose the files of a folder that hold text, and count those that are passed over.

A name decides first: hidden files, and folders that programs fill, stay out; suffixes say which
files are text, JSON lines, tables or archives. `inputs` then looks at the first bytes.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.errors import IO, UserError

# Prose, then source code.
SUFFIXES = frozenset(
    """.txt .text .md .markdown .rst .org .adoc .tex .html .htm .xhtml
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .hxx .cu .cuh .m .mm .s .asm .java .kt .kts .scala .groovy .js .jsx
    .mjs .cjs .ts .tsx .vue .svelte .go .rs .rb .php .pl .pm .sh .bash .zsh .fish .ps1 .bat .sql .swift .cs .fs .vb
    .r .jl .lua .hs .ml .mli .ex .exs .erl .clj .lisp .el .scm .rkt .f .f90 .f95 .for .pas .ada .adb .ads .d .dart
    .nim .zig .v .sv .vhd .vhdl .proto .cmake .tcl .awk""".split()
)
DATA = frozenset(".jsonl .ndjson .json .xml .parquet .arrow .tar .tgz .txz .tbz2 .zip".split())
PACKED = (".gz", ".xz", ".zst", ".bz2")
GENERATED_FOLDERS = ("__pycache__", "node_modules")  # by programs: not anyone's own text
# Names in a folder that train-tokenizer, preprocess, train, quickstart or the demo made.
OUTPUT_FOLDERS: list[set[str]] = [
    {"vocab.json", "merges.txt"},
    {"meta.json", "tokenizer.json"},
    {"config.toml", "metrics.jsonl"},
    {".meshwright-quickstart"},  # its copies of the text, too
    {".meshwright-demo"},
]
OTHER_SUFFIX = "other suffix "  # begins the kind of a file whose suffix is not known
NAMED = "\0"  # stands between a kind and a file's name
SINGULAR = {"broken links": "broken link", "pipes or devices": "pipe or device"}
SINGULAR |= {"folders of vocabularies or runs": "folder of a vocabulary or run"}
NOT_CHOSEN = "not chosen by --include and --exclude"


class PassedOver(Counter[str]):
    """The number of files passed over, of each kind; a few that are not UTF-8 also have names."""

    def note(self, kind: str, path: str = "") -> None:
        """Count a file, with its name if it surprises and the line has room for it."""
        has_name = kind == "not UTF-8" and path and sum(NAMED in key for key in self) < 3
        self[f"{kind}{NAMED}{path}" if has_name else kind] += 1

    def add(self, other: Counter[str]) -> None:
        for key, count in other.items():
            kind, _, path = key.partition(NAMED)
            self[kind] += count - bool(path)
            if path:
                self.note(kind, path)

    def line(self, advice: str = "choose with --include") -> str:
        """Say how many files of which kind were passed over, and what to do about suffixes."""
        counts, names = Counter[str](), list[str]()
        for key, count in self.items():
            kind, _, path = key.partition(NAMED)
            counts[kind] += count
            names += [path] if path else []
        shown_names = f" ({', '.join(names[:3])}{', ...' * (counts['not UTF-8'] > len(names[:3]))})" if names else ""
        kinds = [
            f"{count:,} {SINGULAR.get(kind, kind) if count == 1 else kind}{shown_names * (kind == 'not UTF-8')}"
            for kind, count in counts.most_common()
            if not kind.startswith(OTHER_SUFFIX)
        ]
        others = [kind for kind, _ in self.most_common() if kind.startswith(OTHER_SUFFIX)]
        if others:
            suffixes = [kind.removeprefix(OTHER_SUFFIX) for kind in others]
            shown_suffixes = ", ".join(suffixes[:5]) + (", ..." if len(suffixes) > 5 else "")
            kinds.append(f"{sum(self[kind] for kind in others):,} with other suffixes ({shown_suffixes})")
        plural = "file" if self.total() == 1 else "files"
        return f"passed over {self.total():,} {plural}: {', '.join(kinds)}{f'; {advice}' if others else ''}"


@dataclass(frozen=True)
class NameFilter:
    """The patterns of --include and --exclude; `*` matches `/` too.

    A pattern with a slash is compared with the path below the folder and with each folder above the
    file, a pattern without one with each name in the path.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def refusal(self, path: str, is_named: bool) -> str | None:
        """Return why a file is passed over by its path, or None; `is_named` skips the suffix.

        Without a suffix of its own, as wikiextractor writes, a file may still be JSON lines.
        """
        if _matches(path, self.exclude) or (self.include and not _matches(path, self.include)):
            return NOT_CHOSEN
        suffix = suffix_of(path)
        is_open = is_named or self.include or is_known(suffix) or suffix in ("", *PACKED)
        return None if is_open else OTHER_SUFFIX + suffix

    def is_hidden(self, name: str) -> bool:
        """Return whether a name in a folder is skipped silently, uncounted."""
        hidden = name.startswith(".") or name in GENERATED_FOLDERS
        return hidden and not any(_matches(name, (part,)) for one in self.include for part in _hidden_parts(one))


def _hidden_parts(pattern: str) -> list[str]:
    return [part for part in pattern.split("/") if part.startswith(".") or part in GENERATED_FOLDERS]


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    if not patterns:
        return False
    parts = path.split("/")
    above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    slim = [pattern.removeprefix("./").rstrip("/") for pattern in patterns]
    return any(fnmatch.fnmatchcase(one, p) for p in slim for one in (above if "/" in p else parts))


def suffix_of(path: str) -> str:
    """Return the suffix in lower case, of `a.txt.gz` that of `a.txt`, of `a.tar.gz` `.tar`."""
    stem, suffix = os.path.splitext(path)
    if suffix.lower() in PACKED:
        suffix = os.path.splitext(stem)[1] or suffix
    # A suffix is short and printable; what follows any other dot is part of the name.
    return suffix.lower() if re.fullmatch(r"\.\w{1,12}", suffix) else ""


def is_known(suffix: str) -> bool:
    return suffix in SUFFIXES or suffix in DATA


def walk(folder: str, name_filter: NameFilter, passed: PassedOver) -> list[tuple[str, os.stat_result]]:
    """Return the regular files below a folder with their paths in it, sorted by path.

    Links are followed; each folder is read once, so that a link to a folder above ends nowhere.
    """
    found: list[tuple[str, os.stat_result]] = []
    seen: set[tuple[int, int]] = set()
    left = [""]
    while left:
        inside = left.pop()
        place = os.path.join(folder, inside)
        about, names = _listed(place)
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        if inside and any(own <= set(names) for own in OUTPUT_FOLDERS):
            passed["folders of vocabularies or runs"] += 1
            continue
        deeper = []
        for name in names:
            if name_filter.is_hidden(name):
                continue
            path = inside + name
            try:
                about = os.stat(os.path.join(folder, path))
            except OSError as error:
                if not os.path.islink(os.path.join(folder, path)):
                    raise unreadable(os.path.join(folder, path), error) from None
                passed["broken links"] += 1
                continue
            if stat.S_ISDIR(about.st_mode):
                deeper.append(path + "/")
            elif stat.S_ISREG(about.st_mode):
                found.append((path, about))
            else:
                passed["pipes or devices"] += 1
        left += reversed(deeper)
    return sorted(found, key=lambda one: one[0])


def _listed(place: str) -> tuple[os.stat_result, list[str]]:
    try:
        return os.stat(place), sorted(os.listdir(place))
    except OSError as error:
        raise unreadable(place, error) from None


def unreadable(path: str, error: OSError) -> UserError:
    why = error.strerror or error
    return UserError(f"{shown(path)} cannot be read: {why}; make it readable, or leave it out with --exclude", IO)


def shown(path: str) -> str:
    """Return a path that can be printed: control characters and invalid UTF-8 are escaped."""
    return path if path.isprintable() else path.encode("unicode_escape").decode()


def chosen(folder: str, name_filter: NameFilter, passed: PassedOver) -> Iterator[tuple[str, os.stat_result]]:
    """Yield full path and state of the files whose names are chosen; count the others."""
    for path, about in walk(folder, name_filter, passed):
        if reason := name_filter.refusal(path, is_named=False):
            passed[reason] += 1
        elif not about.st_size:
            passed["empty"] += 1
        else:
            yield os.path.join(folder, path), about
