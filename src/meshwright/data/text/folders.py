"""Choose the files of a folder that hold text, and count those that are passed over.

A name decides first: hidden files, and folders that programs fill, stay out; suffixes say which
files are text, JSON lines, tables or archives. `detect` then looks at the first bytes.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from meshwright.base.errors import IO, UserError
from meshwright.data.text.records import EMPTY, NOT_UTF8, Rejected, shown

# Prose, then source code.
SUFFIXES = frozenset(
    """.txt .text .md .markdown .rst .org .adoc .tex .html .htm .xhtml
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .hxx .cu .cuh .m .mm .s .asm .java .kt .kts .scala .groovy .js .jsx
    .mjs .cjs .ts .tsx .vue .svelte .go .rs .rb .php .pl .pm .sh .bash .zsh .fish .ps1 .bat .sql .swift .cs .fs .vb
    .r .jl .lua .hs .ml .mli .ex .exs .erl .clj .lisp .el .scm .rkt .f .f90 .f95 .for .pas .ada .adb .ads .d .dart
    .nim .zig .v .sv .vhd .vhdl .proto .cmake .tcl .awk""".split()
)
ARCHIVES = frozenset(".tar .tgz .txz .tbz2 .zip".split())
DATA = ARCHIVES | frozenset(
    ".jsonl .ndjson .json .xml .parquet .arrow .csv .tsv .sqlite .sqlite3 .db".split()
)
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
SINGULAR = {"broken links": "broken link", "pipes or devices": "pipe or device"}
SINGULAR |= {"SQLite databases, which need --table": "SQLite database, which needs --table"}
SINGULAR |= {"folders of vocabularies or runs": "folder of a vocabulary or run"}
NOT_CHOSEN = "not chosen by --include and --exclude"
PDF = "PDF"  # whose kind a suffix shows, or the first bytes
MOST_NAMES = 3  # of files that are not UTF-8, which surprise: so many are named
MOST_SUFFIXES = 12  # so many are counted by name


def singular(kind: str) -> str:
    return re.sub(r"^tables\b", "table", SINGULAR.get(kind, kind))


def join_few(some: list[str], more: list[str]) -> list[str]:
    """Return the first few of these lines, each once."""
    return list(dict.fromkeys(line for line in some + more if line))[:MOST_NAMES]


@dataclass
class SkipReport:
    """The number of files passed over, of each kind.

    It has what can be done about some, with the names of a few, and the names of a few that are not
    UTF-8.
    """

    counts: Counter[str] = field(default_factory=Counter)
    bytes: int = 0  # of those whose content was read
    names: list[str] = field(default_factory=list)
    cures: dict[str, list[str]] = field(default_factory=dict)  # with the names of a few files each

    def note(self, kind: str) -> None:
        self.counts[kind] += 1

    def add(self, rejected: Rejected) -> None:
        """Count a file by what is wrong with it."""
        self.note(rejected.reason)
        self.bytes += rejected.bytes
        if rejected.reason == NOT_UTF8:
            self.names = join_few(self.names, [str(rejected.place)])
        if rejected.cure:
            self._add_cures({rejected.cure: [str(rejected.place)]})

    def _add_cures(self, cures: dict[str, list[str]]) -> None:
        for cure, names in cures.items():
            known = self.cures.get(cure)
            if known is not None or len(self.cures) < MOST_NAMES:
                self.cures[cure] = join_few(known or [], names)

    def __add__(self, other: SkipReport) -> SkipReport:
        names = join_few(self.names, other.names)
        both = SkipReport(self.counts + other.counts, self.bytes + other.bytes, names)
        both._add_cures(self.cures)
        both._add_cures(other.cures)
        return both

    def __bool__(self) -> bool:
        return bool(self.counts)

    def line(self, advice: str = "choose with --include") -> str:
        """Say how many files of which kind were passed over, and what to do about suffixes."""
        # Each kind with its number; of texts that are not UTF-8, a few names.
        kinds = list[str]()
        others = list[str]()
        for kind, count in self.counts.most_common():
            if kind.startswith(OTHER_SUFFIX):
                others.append(kind)
                continue
            text = f"{count:,} {singular(kind) if count == 1 else kind}"
            if kind == NOT_UTF8 and self.names:
                more = ", ..." if count > len(self.names) else ""
                text += f" ({', '.join(self.names)}{more})"
            kinds.append(text)
        # The suffixes that are not known, as one kind. With one of them, or one file of each, the
        # total says how many files each has.
        if others:
            total = sum(self.counts[kind] for kind in others)
            is_clear = len(others) in (1, total)
            suffixes = []
            for kind in others[:MOST_SUFFIXES]:
                suffix = kind.removeprefix(OTHER_SUFFIX)
                suffixes.append(suffix if is_clear else f"{self.counts[kind]:,} {suffix}")
            if len(others) > MOST_SUFFIXES:
                suffixes.append("...")
            kinds.append(f"{total:,} with other suffixes ({', '.join(suffixes)})")

        # What can be done, with the files' names where there are several cures.
        number = self.counts.total()
        line = f"passed over {number:,} {'file' if number == 1 else 'files'}: {', '.join(kinds)}"
        cures = dict(self.cures)
        has_cure = any(set(names) & set(self.names) for names in cures.values())
        if self.counts[NOT_UTF8] and not has_cure:
            cure = "--encoding names another encoding, --on-error replace keeps what is intact"
            cures[cure] = self.names
        if len(cures) == 1:
            line += f"; {next(iter(cures))}"
        else:
            for cure, names in cures.items():
                line += f"\n    {', '.join(names)}: {cure}"
        return f"{line}; {advice}" if others else line


@dataclass(frozen=True)
class NameFilter:
    """The patterns of --include and --exclude; `*` matches `/` too.

    A pattern with a slash is compared with the path below the folder and with each folder above the
    file, a pattern without one with each name in the path.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def chooses(self, path: str, above: str = "") -> bool:
        """Return whether the patterns choose a path in the folder `above`.

        A pattern with a slash may begin at any folder of `above`; one without meets none of them.
        """
        return not _matches(path, self.exclude, above) and (
            not self.include or _matches(path, self.include, above)
        )

    def refusal(self, path: str) -> str:
        """Return why a file in a folder is passed over by its path, or "".

        Without a suffix of its own, as wikiextractor writes, a file may still be JSON lines.
        """
        if not self.chooses(path):
            return NOT_CHOSEN
        suffix = suffix_of(path)
        if suffix == ".pdf" and not self.include:
            return PDF
        is_open = self.include or is_known(suffix) or suffix in ("", *PACKED)
        return "" if is_open else OTHER_SUFFIX + suffix

    def is_hidden(self, name: str) -> bool:
        """Return whether a name in a folder is skipped silently, uncounted."""
        if not name.startswith(".") and name not in GENERATED_FOLDERS:
            return False
        # It is shown if --include asks for it, but not by a pattern that matches any name.
        asked = [
            part
            for pattern in self.include
            for part in pattern.split("/")
            if part.startswith(".") or part in GENERATED_FOLDERS
        ]
        return not _matches(name, asked)


def _matches(path: str, patterns: Iterable[str], above: str = "") -> bool:
    """Return whether any of the patterns matches, as `NameFilter` says."""
    # Each folder above the file and the file, then the path from each of the folders `above`.
    names = path.split("/")
    paths = list(itertools.accumulate(names, "{}/{}".format))
    folders = above.split("/")[:-1]
    for n in range(len(folders)):
        paths.append("/".join([*folders[n:], path]))

    for pattern in patterns:
        pattern = pattern.removeprefix("./").rstrip("/")
        candidates = paths if "/" in pattern else names
        if any(fnmatch.fnmatchcase(candidate, pattern) for candidate in candidates):
            return True
    return False


def suffix_of(path: str) -> str:
    """Return the suffix in lower case, of `a.txt.gz` that of `a.txt`, of `a.tar.gz` `.tar`."""
    stem, suffix = os.path.splitext(path)
    if suffix.lower() in PACKED:
        suffix = os.path.splitext(stem)[1] or suffix
    # A suffix is short and printable; what follows any other dot is part of the name.
    return suffix.lower() if re.fullmatch(r"\.\w{1,12}", suffix) else ""


def is_known(suffix: str) -> bool:
    return suffix in SUFFIXES or suffix in DATA


def walk(
    folder: str, name_filter: NameFilter, passed: SkipReport
) -> list[tuple[str, os.stat_result]]:
    """Return the regular files below a folder with their paths in it, sorted by path.

    Links are followed; each folder is read once, so that a link to a folder above ends nowhere.
    """
    files: list[tuple[str, os.stat_result]] = []
    seen: set[tuple[int, int]] = set()
    left = [""]
    while left:
        inside = left.pop()
        path = os.path.join(folder, inside)
        try:
            about = os.stat(path)
            names = sorted(os.listdir(path))
        except OSError as error:
            raise unreadable(path, error) from None
        identity = (about.st_dev, about.st_ino)
        if identity in seen:
            continue
        seen.add(identity)
        if inside and any(own <= set(names) for own in OUTPUT_FOLDERS):
            passed.note("folders of vocabularies or runs")
            continue
        deeper = []
        for name in names:
            if name_filter.is_hidden(name):
                continue
            path = inside + name
            full_path = os.path.join(folder, path)
            try:
                about = os.stat(full_path)
            except OSError as error:
                if not os.path.islink(full_path):
                    raise unreadable(full_path, error) from None
                passed.note("broken links")
                continue
            if stat.S_ISDIR(about.st_mode):
                deeper.append(path + "/")
            elif stat.S_ISREG(about.st_mode):
                files.append((path, about))
            else:
                passed.note("pipes or devices")
        left += reversed(deeper)
    return sorted(files, key=lambda file: file[0])


def unreadable(path: str, error: OSError) -> UserError:
    why = error.strerror or error
    return UserError(
        f"{shown(path)} cannot be read: {why}; make it readable, or leave it out with --exclude", IO
    )


def interrupted(what: str, error: OSError) -> UserError:
    """Return the error for a file that could be read when the inputs were found, and now cannot."""
    why = error.strerror or error
    if isinstance(error, FileNotFoundError):
        why = "it has vanished"
    return UserError(f"{what}: {why}; start again when it is there and readable", IO)


def chosen(
    folder: str, name_filter: NameFilter, passed: SkipReport
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield full path and state of the files whose names are chosen; count the others."""
    for path, about in walk(folder, name_filter, passed):
        if reason := name_filter.refusal(path) or ("" if about.st_size else EMPTY):
            passed.note(reason)
        else:
            yield os.path.join(folder, path), about
