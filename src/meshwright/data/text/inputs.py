"""Find the text that a command reads: files, patterns, folders, pipes, objects in storage.

`preprocess`, `train-tokenizer` and `evaluate` share these flags and read the same documents.
"""

from __future__ import annotations

import glob
import itertools
import os
import stat
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from meshwright.base import origin
from meshwright.base.errors import IO, UserError, bad_data
from meshwright.base.hints import near_path
from meshwright.base.progress import SkippedLines
from meshwright.base.storage import texts
from meshwright.base.storage.addresses import is_address
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import (
    charsets,
    containers,
    detect,
    folders,
    formats,
    hub_sets,
    limits,
    rows,
    tables,
)
from meshwright.data.text.detect import JSON_NAME, Detected, Origin, Start
from meshwright.data.text.folders import NOT_CHOSEN, NameFilter, SkipReport
from meshwright.data.text.formats import JSONL, PAGE, TEXT
from meshwright.data.text.records import (
    EMPTY,
    NOT_UTF8,
    Document,
    Record,
    Rejected,
    TextPlace,
    shown,
)

NEEDED = "; give a file or a folder of text"
# Versions of readers that have changed. One is raised when it reads other documents in a file than
# before: what an earlier release made of the file is not what this one would make.
READERS = {"plain text": 2, "CSV": 2}
# The share of bad lines above which a warning comes, and their number.
MANY_BAD = 0.03
FEW_BAD = 10
# What can only be read in order.
IN_ORDER = (detect.CSV, detect.SQLITE, detect.HUB, detect.TAR, detect.ZIP)


@dataclass(frozen=True)
class Input:
    """A file, a pipe, or several small `files` of text that are each read as a whole.

    `found` is what it is; None for a pipe or a small object in storage, which are opened once.
    `bytes` is on disk, 0 for a pipe. `folder` is the one in which the input was found, None if it
    was named. The path of an object in storage is its address.
    """

    path: str
    found: Detected | None = None
    bytes: int = 0
    folder: str | None = None
    files: tuple[tuple[str, int, int], ...] = ()  # of small texts: path, size, time of change
    revision: str = ""  # of a data set of the Hub, or of an object in storage
    changed: int = 0  # time of change of a file

    @property
    def reader(self) -> str:
        return self.found.reader if self.found else ""

    @property
    def origin(self) -> Origin:
        return "named" if self.folder is None else "folder"

    @property
    def is_stream(self) -> bool:
        """Whether it can only be read in order."""
        if self.files:
            return False
        if self.found is None or is_address(self.path):
            return True
        return self.reader in IN_ORDER or self.found.is_packed or bool(self.found.codec)

    @property
    def is_table(self) -> bool:
        return self.reader in (*detect.TABLES, detect.CSV, detect.SQLITE)

    @property
    def dump(self) -> str:
        """The name of a kind of dumps, which divide themselves, or ""."""
        return self.reader if self.reader in formats.all_dumps() else ""

    @property
    def is_plain(self) -> bool:
        """Whether it may hold plain text, which --document-separator divides."""
        if self.is_table or self.dump or self.reader == detect.HUB:
            return False
        return not JSON_NAME.search(self.path) if self.is_stream else self.reader != JSONL

    @property
    def kind(self) -> str:
        """What it is, as reports count it."""
        if self.is_table:
            return "tables"
        if self.reader == detect.HUB:
            return "the Hugging Face Hub"
        if self.dump:
            return self.dump
        return "archives or streams" if self.is_stream else JSONL if self.reader == JSONL else TEXT


@dataclass
class Inputs:
    """The inputs in the order of the documents, and the files and lines that are not read."""

    inputs: list[Input]
    passed: SkipReport
    bad: SkippedLines = field(default_factory=SkippedLines)
    warnings: list[str] = field(default_factory=list)  # about texts that read like another encoding

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.inputs)

    @property
    def paths(self) -> list[str]:
        """Of all files, then of what has a revision, which becomes part of the path."""
        paths = []
        with_revision = []
        for source in self.inputs:
            if source.revision:
                with_revision.append(f"{source.path}@{source.revision}")
            else:
                paths += [path for path, _, _ in source.files] or [source.path]
        return paths + with_revision

    @property
    def readers(self) -> dict[str, int]:
        """The versions of those of READERS that read these inputs."""
        names = set[str]()
        for source in self.inputs:
            if source.is_plain:
                names.add("plain text")
            # A stream may turn out to be CSV, or an archive that holds some.
            if source.reader == detect.CSV or (source.is_plain and source.is_stream):
                names.add("CSV")
        return {name: version for name, version in READERS.items() if name in names}

    def identity(self) -> dict[str, Any]:
        """Return what an output's record says of its text: which files, and how they were read."""
        files = origin.inputs_of(self.paths)
        return {**files, "readers": self.readers} if self.readers else files

    def describe(self) -> str:
        """Say how many files of which kind there are."""
        counts: Counter[str] = Counter()
        for source in self.inputs:
            counts[source.kind] += len(source.files) or 1
        return ", ".join(f"{count:,} of {kind}" for kind, count in counts.items())

    def count(self, record: Record) -> None:
        """Count the lines of a document, or what is wrong with one."""
        if isinstance(record, Document):
            self.bad.lines += record.lines
            if record.repaired:
                self._count_bad(NOT_UTF8, record.repaired, record.place)
        elif record.is_error:
            self.bad.lines += 1
            self._count_bad(record.reason, 1, record.place)
        else:
            self.passed.add(record)

    def _count_bad(self, reason: str, lines: int, place: TextPlace) -> None:
        self.bad.count(reason, lines, "" if reason in self.bad else str(place))

    def left_out(self, on_error: str, encoding: str = "") -> list[str]:
        """Say which lines and files were not read as they are."""
        name = f"not {encoding}" if encoding else NOT_UTF8
        mended = SkippedLines()
        bad = SkippedLines()
        for kind, count in self.bad.items():
            if kind != NOT_UTF8:
                bad[kind] = count
            elif on_error == "replace":
                mended[name] = count
            else:
                bad[name] = count
        lines = []
        if mended:
            lines.append(f"mended {mended}")
        if bad:
            lines.append(f"left out {bad}")
        if self.passed:
            lines.append(self.passed.line())
        return lines + self.warnings + self._many_bad(name)

    def _many_bad(self, name: str) -> list[str]:
        """Warn if so many lines were mended or left out that there may be one cause."""
        lines = self.bad.lines
        least = max(MANY_BAD * lines, FEW_BAD)
        undecoded, _ = self.bad.get(NOT_UTF8, (0, ""))
        if undecoded > least:
            cure = "the likely cause is another encoding, which --encoding names"
            return [f"warning: {undecoded / lines:.0%} of {lines:,} lines are {name}; {cure}"]
        left = sum(count for count, _ in self.bad.values())
        if least < left < lines:
            share = left / lines
            return [f"warning: {share:.0%} of {lines:,} lines were left out"]
        return []

    def opened(self) -> Iterator[str]:
        """Yield a line for each input that was named, and one for each folder."""
        # The files of each folder, and the names of the archives among them.
        counts = Counter[str]()
        archives = defaultdict[str, list[str]](list)
        for source in self.inputs:
            if source.folder is None:
                continue
            counts[source.folder] += len(source.files) or 1
            if folders.suffix_of(source.path) in folders.ARCHIVES:
                name = os.path.basename(source.path)
                archives[source.folder].append(shown(name))

        # A folder's line stands where its first file does.
        for source in self.inputs:
            if source.folder is None:
                for path in [path for path, _, _ in source.files] or [source.path]:
                    yield shown(path)
                continue
            count = counts.pop(source.folder, 0)
            if not count:
                continue
            line = f"{shown(source.folder)}: {count:,} {'file' if count == 1 else 'files'}"
            if packed := archives[source.folder]:
                names = ", ".join(packed[:3])
                if len(packed) > 3:
                    names += ", ..."
                kind = "an archive" if len(packed) == 1 else "archives"
                line += f", {len(packed):,} of them {kind} ({names})"
            yield line


def name_filter(given: TextInputs) -> NameFilter:
    return NameFilter(tuple(given.include), tuple(given.exclude))


def find_inputs(given: TextInputs) -> Inputs:
    """Return the inputs; raise if one cannot be read or nothing is left."""
    passed = SkipReport()
    single = [
        source for path in _expand(given.input) for source in _find_below(path, given, passed)
    ]
    if not single:
        reason = passed.line() if passed else "nothing is there"
        raise bad_data(f"{' '.join(map(shown, given.input))} holds no text; {reason}")
    if given.table and not any(source.reader == detect.SQLITE for source in single):
        raise UserError(
            f"--table {given.table} names a table of an SQLite database, but no --input is one"
        )
    return Inputs(list(_joined(single)), passed, warnings=_find_misread(single, given.encoding))


def _find_misread(single: list[Input], encoding: str) -> list[str]:
    """Name the first few texts that read like another encoding of Chinese than the one given."""
    out: list[str] = []
    if charsets.codec_of(b"", encoding) not in charsets.CHINESE:
        return out
    for source in single:
        if source.is_table or not source.bytes:
            continue
        with open_source(source) as file:
            start = file.read(charsets.SAMPLE)
        if containers.kind_of_bytes(start):
            continue
        codec = detect.charset_of(source.path, start, encoding)
        if other := charsets.misread(start, codec):
            counted = charsets.count_decoded(start, other, encoding)
            out.append(
                f"warning: {shown(source.path)} reads like {other}, not {encoding}: {counted}"
            )
    more = len(out) - folders.MOST_NAMES
    if more > 0:
        out = [*out[: folders.MOST_NAMES], f"warning: so do {more:,} other files"]
    return out


def _expand(patterns: list[str]) -> list[str]:
    """Return files and `-` as given, and the matches of patterns sorted."""
    paths = []
    for pattern in patterns:
        is_remote = pattern.startswith(hub_sets.SCHEME) or is_address(pattern)
        is_path = pattern == "-" or is_remote or os.path.lexists(pattern)
        matches = [pattern] if is_path else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise bad_data(f"{shown(pattern)} does not exist{near_path(pattern) or NEEDED}")
        paths += matches
    return paths


def _find_below(path: str, given: TextInputs, passed: SkipReport) -> Iterator[Input]:
    """Yield the inputs that a path names, and count what is passed over."""
    if path == "-":
        yield Input("-")
        return
    if path.startswith(hub_sets.SCHEME):
        yield Input(path, Detected(detect.HUB), revision=hub_sets.find_revision(path))
        return
    find = _find_objects if is_address(path) else _find_files
    for candidate in find(path, given, passed):
        # Files of a folder were chosen when it was read, those of --input itself are here.
        folder, name = os.path.split(candidate.path)
        above = os.path.join(folder, "")
        if candidate.folder is None and not name_filter(given).chooses(name, above):
            passed.note(NOT_CHOSEN)
            continue
        source = _inspect(candidate, given)
        if isinstance(source, Rejected):
            passed.add(source)
        else:
            yield source


def _find_files(path: str, given: TextInputs, passed: SkipReport) -> Iterator[Input]:
    """Yield the files that a path names, before their content is looked at."""
    if files := tables.find_saved(path) if os.path.isdir(path) else [path]:
        yield from map(Input, files)
        return
    for inside, about in folders.chosen(path, name_filter(given), passed):
        yield Input(inside, bytes=about.st_size, folder=path, changed=about.st_mtime_ns)


def _find_objects(address: str, given: TextInputs, passed: SkipReport) -> Iterator[Input]:
    """Yield the objects of storage that an address names, before their content is looked at."""
    objects = texts.find_objects(address)
    if not objects:
        raise bad_data(
            f"{address} does not exist: no object has this name or is below it; check the address"
        )
    # The folders that this program has made.
    below = defaultdict[str, set[str]](set)
    for named in objects:
        folder, _, name = named.address.rpartition("/")
        below[f"{folder}/"].add(name)
    made = tuple(
        folder
        for folder, names in below.items()
        if any(own <= names for own in folders.OUTPUT_FOLDERS)
    )

    # What a folder holds is chosen as on a disk.
    chooser = name_filter(given)
    for path, (size, tag), found_in in objects:
        reason = "" if size else EMPTY
        if found_in is not None:
            inside = path.removeprefix(f"{found_in}/")
            if any(map(chooser.is_hidden, inside.split("/"))):
                continue
            if path.startswith(made):
                reason = "files in folders of vocabularies or runs"
            else:
                reason = chooser.refusal(inside) or reason
        if reason:
            passed.note(reason)
        else:
            yield Input(path, bytes=size, folder=found_in, revision=tag or "")


def open_source(source: Input, buffering: int = limits.PIECE) -> BinaryIO:
    """Open the standard input, a file, or an object in storage as it was when it was listed."""
    if source.path == "-":
        if sys.stdin is None:
            raise UserError(
                "--input - cannot be read: the standard input is closed; give it a file or a pipe",
                IO,
            )
        return sys.stdin.buffer
    try:
        if is_address(source.path):
            return texts.open_object(source.path, source.bytes, source.revision)
        return open(source.path, "rb", buffering)
    except OSError as error:
        if source.folder is not None:
            raise folders.unreadable(source.path, error) from None
        raise UserError(f"{shown(source.path)} cannot be read: {error.strerror}", IO) from None


def refuse_other_than_text(path: str, mode: int) -> None:
    """Refuse devices, some of which never end, and token files."""
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise bad_data(
            f"{shown(path)} is a device; give a file or a folder, or - for standard input"
        )
    prefix, suffix = os.path.splitext(path)
    if suffix in (".bin", ".idx") and all(os.path.exists(prefix + end) for end in (".bin", ".idx")):
        raise bad_data(
            f"{shown(path)} holds tokens already; give the text, or train on them: --data-path {shown(prefix)}"
        )


def _inspect(source: Input, given: TextInputs) -> Input | Rejected:
    """Return a file or an object with what it is, or why it is passed over in a folder."""
    path = source.path
    is_named = source.folder is None
    is_remote = is_address(source.path)
    # A short text of a folder: a worker, which opens it anyway, looks at the content.
    suffix = os.path.splitext(path)[1].lower()
    if not is_named and source.bytes <= limits.PIECE and suffix in folders.SUFFIXES:
        return source if is_remote else _small(source)

    # Its first bytes.
    try:
        if is_named and not is_remote:
            about = os.stat(path)
            refuse_other_than_text(path, about.st_mode)
            if not stat.S_ISREG(about.st_mode):
                # What is read from a pipe here would be lost.
                return source
            source = replace(source, bytes=about.st_size, changed=about.st_mtime_ns)
        with open_source(source, containers.START) as file:
            start = detect.look_at(file)
    except OSError as error:
        if is_named:
            raise UserError(f"{shown(path)} cannot be read: {error.strerror}", IO) from None
        raise folders.unreadable(path, error) from None

    # Tables are read from a disk alone.
    if is_remote and start.outer in (*detect.TABLES, "arrow stream", detect.SQLITE):
        reason = f"{start.outer} tables in object storage, which are read from a disk of this machine alone"
        if is_named:
            raise bad_data(
                f"--input {path}: {reason}; copy it here first, or write its texts as JSON lines"
            )
        return Rejected(reason, TextPlace(path), is_error=False)

    # What reads it, and whether it has the columns that are asked for.
    found = detect.detect(path, start, given, source.origin)
    if isinstance(found, Rejected):
        return found
    source = replace(source, found=found)
    if refused := _refuse_columns(source, start, given.json_keys):
        if is_named:
            rows.require_columns(f"--input {path}", refused)
        return refused
    return _small(source) if _is_small(source) else source


def _refuse_columns(source: Input, start: Start, keys: list[str]) -> Rejected | None:
    """Return why a table cannot be read; that of a named CSV file is said when it is read."""
    if source.reader in detect.TABLES:
        return tables.refuse_schema(source.path, source.reader, keys)
    if source.reader == detect.CSV and source.folder is not None:
        codec = source.found.codec if source.found else ""
        head = start.content[: containers.HEAD] if start.is_packed else start.content
        return rows.refuse_header(source.path, charsets.to_utf8(head, codec), keys)
    return None


def _is_small(source: Input) -> bool:
    """Return whether a text is read as a whole: a short one, or a page of any length."""
    found = source.found
    if found is None or found.reader not in (TEXT, PAGE) or is_address(source.path):
        return False
    is_short = source.bytes <= limits.PIECE and not found.codec
    if not found.is_packed:
        return is_short or found.reader == PAGE
    # What it unpacks to may be long.
    is_known = folders.suffix_of(source.path) in folders.SUFFIXES
    return is_short and is_known and source.folder is not None


def _small(source: Input) -> Input:
    return replace(source, files=((source.path, source.bytes, source.changed),))


def _joined(inputs: list[Input]) -> Iterator[Input]:
    """Join small texts that follow each other, so that pieces can hold many of them."""
    groups = itertools.groupby(inputs, lambda source: (bool(source.files), source.folder))
    for (is_small, folder), group in groups:
        if not is_small:
            yield from group
            continue
        files = tuple(file for source in group for file in source.files)
        size = sum(max(size, 1) for _, size, _ in files)
        yield Input(files[0][0], Detected(TEXT), size, folder, files)
