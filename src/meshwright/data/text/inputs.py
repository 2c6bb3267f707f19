"""Find the text that a command reads: files, patterns, folders, pipes.

`preprocess`, `train-tokenizer` and `evaluate` share these flags and read the same documents.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Literal

from meshwright.base import origin
from meshwright.base.errors import IO, UserError, bad_data
from meshwright.base.hints import near_path
from meshwright.base.progress import SkippedLines
from meshwright.base.storage import texts
from meshwright.base.storage.addresses import is_address
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import containers, dumps, encodings, folders, hub_sets, plain, rows, tables
from meshwright.data.text.dumps import Dump
from meshwright.data.text.folders import NOT_CHOSEN, NameFilter, PassedOver, shown
from meshwright.data.text.plain import HTML_NAME, PIECE
from meshwright.data.text.records import BINARY, NOT_UTF8, Bad, Mended, Unit, advice, lines_in, parse_line

# Names of JSON lines; in a folder, what is only called .json must look like them.
JSON_NAME = re.compile(r"\.(json|jsonl|ndjson)(\.(gz|xz|zst|bz2))?$", re.IGNORECASE)
# How JSON lines begin: with an object on one line; or an array of objects, which gets a hint.
JSON_START = re.compile(rb"(\xef\xbb\xbf)?\s*(\{[ \t]*[\"}]|\[\s*\{)")


NEEDED = "; give a file or a folder of text"
# Versions of readers that have changed. One is raised when it reads other documents in a file than
# before: what an earlier release made of the file is not what this one would make.
READERS = {"plain text": 2, "CSV": 2}
MANY_BAD, FEW_BAD = 0.03, 10  # the share of bad lines above which a warning comes, and their number

Kind = Literal["lines", "stream", "csv", "sqlite", "hub", "parquet", "arrow", "text", "small files"]


@dataclass(frozen=True)
class Input:
    """A file, a pipe, or several `small files` that are each read as a whole.

    The first bytes decide the kind. `bytes` is on disk, 0 for a pipe. `folder` is the one in which
    the input was found, None if it was named. The marks of a `dump` divide its documents.
    The path of an object in storage is its address.
    """

    path: str
    kind: Kind
    bytes: int = 0
    folder: str | None = None
    files: tuple[tuple[str, int, int], ...] = ()  # of texts: path, size, time of change
    dump: Dump | None = None
    revision: str = ""  # of a data set of the Hub, or of an object in storage
    changed: int = 0  # time of change of a file

    @property
    def is_stream(self) -> bool:
        """Whether it can only be read in order."""
        return self.kind in ("stream", "csv", "sqlite", "hub")

    @property
    def is_plain(self) -> bool:
        """Whether it may hold plain text, which --document-separator divides."""
        is_plain_stream = self.kind == "stream" and not JSON_NAME.search(self.path)
        return self.dump is None and (is_plain_stream or self.kind in ("text", "small files"))


@dataclass
class Inputs:
    """The inputs in the order of the documents, and the files and lines that are not read."""

    inputs: list[Input]
    passed: PassedOver = field(default_factory=PassedOver)
    bad: SkippedLines = field(default_factory=SkippedLines)
    warnings: list[str] = field(default_factory=list)  # about texts that read like another encoding

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.inputs)

    @property
    def paths(self) -> list[str]:
        named = (
            [path for path, _, _ in source.files] or [source.path] for source in self.inputs if not source.revision
        )
        data_sets = [f"{source.path}@{source.revision}" for source in self.inputs if source.revision]
        return [*(path for paths in named for path in paths), *data_sets]

    @property
    def readers(self) -> dict[str, int]:
        """The versions of those of READERS that read these inputs."""
        kinds = {"plain text": [source.is_plain for source in self.inputs]}
        kinds["CSV"] = [source.kind == "csv" or (source.is_plain and source.is_stream) for source in self.inputs]
        return {name: READERS[name] for name, reads in kinds.items() if any(reads)}

    def identity(self) -> dict[str, Any]:
        """Return what an output's record says of its text: which files, and how they were read."""
        files = origin.inputs_of(self.paths)
        return {**files, "readers": self.readers} if self.readers else files

    def describe(self) -> str:
        """Say how many files of which kind there are."""
        names = {"lines": "JSON lines", "stream": "archives or streams"}
        names |= {"text": "plain text", "small files": "plain text", "hub": "the Hugging Face Hub"}
        counts: Counter[str] = Counter()
        for source in self.inputs:
            counts[source.dump.name if source.dump else names.get(source.kind, "tables")] += len(source.files) or 1
        return ", ".join(f"{count:,} of {kind}" for kind, count in counts.items())

    def count_unit(self, unit: Unit, place: Callable[[], str]) -> None:
        """Count the lines of a unit, and what is wrong with it."""
        self.bad.lines += lines_in(unit)
        if isinstance(unit, Bad) and unit.is_passed:
            self.passed.note_unit(unit)
        elif isinstance(unit, Bad | Mended):
            kind, lines = (unit.kind, 1) if isinstance(unit, Bad) else (NOT_UTF8, unit.lines)
            self.bad.count(kind, lines, "" if kind in self.bad else place())

    def left_out(self, on_error: str, encoding: str = "") -> list[str]:
        """Say which lines and files were not read as they are."""
        name = f"not {encoding}" if encoding else NOT_UTF8
        mended, bad = SkippedLines(), SkippedLines()
        for kind, count in self.bad.items():
            is_mended = kind == NOT_UTF8 and on_error == "replace"
            (mended if is_mended else bad)[name if kind == NOT_UTF8 else kind] = count
        lines = ((f"mended {mended}", mended), (f"left out {bad}", bad), (self.passed.line(), self.passed))
        return [*(line for line, holds in lines if holds), *self.warnings, *self._many_bad(name)]

    def _many_bad(self, name: str) -> list[str]:
        """Warn if so many lines were mended or left out that there may be one cause."""
        lines, counts = self.bad.lines, {kind: count for kind, (count, _) in self.bad.items()}
        undecoded, left = counts.get(NOT_UTF8, 0), sum(counts.values())
        if undecoded > max(MANY_BAD * lines, FEW_BAD):
            cure = "the likely cause is another encoding, which --encoding names"
            return [f"warning: {undecoded / lines:.0%} of {lines:,} lines are {name}; {cure}"]
        is_much = max(MANY_BAD * lines, FEW_BAD) < left < lines
        return [f"warning: {left / lines:.0%} of {lines:,} lines were left out"] if is_much else []

    def opened(self) -> Iterator[str]:
        """Yield a line for each input that was named, and one for each folder."""
        number, archives = Counter[str](), dict[str, list[str]]()
        for source in self.inputs:
            if source.folder is not None:
                number[source.folder] += len(source.files) or 1
                if folders.suffix_of(source.path) in folders.ARCHIVES:
                    archives.setdefault(source.folder, []).append(shown(os.path.basename(source.path)))
        for source in self.inputs:
            if source.folder is None:
                yield from (shown(path) for path, _, _ in source.files or [(source.path, 0, 0)])
            elif count := number.pop(source.folder, 0):
                line = f"{shown(source.folder)}: {count:,} {'file' if count == 1 else 'files'}"
                packed = archives.get(source.folder, [])
                names = ", ".join(packed[:3]) + ", ..." * (len(packed) > 3)
                kind = "an archive" if len(packed) == 1 else "archives"
                yield f"{line}, {len(packed):,} of them {kind} ({names})" if packed else line


def name_filter(given: TextInputs) -> NameFilter:
    return NameFilter(tuple(given.include), tuple(given.exclude))


def find_inputs(given: TextInputs) -> Inputs:
    """Return the inputs; raise if one cannot be read or nothing is left."""
    passed = PassedOver()
    single = [source for path in _expand(given.input) for source in _find_below(path, given, passed)]
    if not single:
        reason = passed.line() if passed else "nothing is there"
        raise bad_data(f"--input {' '.join(map(shown, given.input))} holds no text; {reason}")
    if given.table and not any(source.kind == "sqlite" for source in single):
        raise UserError(f"--table {given.table} names a table of an SQLite database, but no --input is one")
    return Inputs(list(_joined(single)), passed, warnings=_find_misread(single, given.encoding))


def _find_misread(single: list[Input], encoding: str) -> list[str]:
    """Name the first few texts that read like another encoding of Chinese than the one given."""
    out: list[str] = []
    if encodings.codec_of(b"", encoding) not in encodings.CHINESE:
        return out
    for source in single:
        if source.kind in ("text", "small files", "stream", "lines") and source.bytes:
            with open_source(source) as file:
                start = file.read(encodings.SAMPLE)
            codec = "" if containers.kind_of_bytes(start) else plain.codec_of_file(source.path, start, encoding)
            if other := encodings.misread(start, codec):
                counted = encodings.count_decoded(start, other, encoding)
                out.append(f"warning: {shown(source.path)} reads like {other}, not {encoding}: {counted}")
    more = len(out) - folders.MOST_NAMES
    return [*out[: folders.MOST_NAMES], *([f"warning: so do {more:,} other files"] if more > 0 else [])]


def _expand(patterns: list[str]) -> list[str]:
    """Return files and `-` as given, and the matches of patterns sorted."""
    paths = []
    for pattern in patterns:
        is_remote = pattern.startswith(hub_sets.SCHEME) or is_address(pattern)
        is_path = pattern == "-" or is_remote or os.path.lexists(pattern)
        matches = [pattern] if is_path else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise bad_data(f"--input {shown(pattern)} does not exist{near_path(pattern) or NEEDED}")
        paths += matches
    return paths


def _find_below(path: str, given: TextInputs, passed: PassedOver) -> Iterator[Input]:
    if path == "-":
        yield Input("-", "stream")
        return
    if path.startswith(hub_sets.SCHEME):
        yield Input(path, "hub", revision=hub_sets.find_revision(path))
        return
    for candidate in (_find_objects if is_address(path) else _find_files)(path, given, passed):
        folder, name = os.path.split(candidate.path)
        if candidate.folder is None and not name_filter(given).chooses(name, os.path.join(folder, "")):
            source: Input | Bad = Bad(NOT_CHOSEN)
        else:
            source = _inspect(candidate, given)
        if isinstance(source, Bad):
            passed.note_unit(source._replace(place=shown(candidate.path)))
        else:
            yield source


def _find_files(path: str, given: TextInputs, passed: PassedOver) -> Iterator[Input]:
    """Yield the files that a path names, before their content is looked at."""
    if files := tables.find_saved(path) if os.path.isdir(path) else [path]:
        yield from (Input(file, "stream") for file in files)
        return
    for inside, about in folders.chosen(path, name_filter(given), passed):
        yield Input(inside, "stream", about.st_size, path, changed=about.st_mtime_ns)


def _find_objects(address: str, given: TextInputs, passed: PassedOver) -> Iterator[Input]:
    """Yield the objects of storage that an address names, before their content is looked at."""
    objects = texts.find_objects(address)
    if not objects:
        raise bad_data(f"--input {address} does not exist: no object has this name or is below it; check the address")
    below: dict[str, set[str]] = {}
    for named in objects:
        folder, _, name = named.address.rpartition("/")
        below.setdefault(f"{folder}/", set()).add(name)
    made = tuple(folder for folder, names in below.items() if any(own <= names for own in folders.OUTPUT_FOLDERS))
    chooser = name_filter(given)
    for path, (size, tag), found_in in objects:
        reason = "" if size else "empty"
        if found_in is not None:
            inside = path.removeprefix(f"{found_in}/")
            if any(map(chooser.is_hidden, inside.split("/"))):
                continue
            is_made = path.startswith(made)
            reason = "files in folders of vocabularies or runs" if is_made else chooser.refusal(inside) or reason
        if reason:
            passed.note(reason)
        else:
            yield Input(path, "stream", size, found_in, revision=tag or "")


def open_source(source: Input, buffering: int = PIECE) -> BinaryIO:
    """Open a file, or an object in storage as it was when it was listed."""
    if is_address(source.path):
        return texts.open_object(source.path, source.bytes, source.revision)
    return open(source.path, "rb", buffering)


def refuse_other_than_text(path: str, mode: int) -> None:
    """Refuse devices, some of which never end, and token files."""
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise bad_data(f"--input {shown(path)} is a device; give a file or a folder, or - for standard input")
    prefix, suffix = os.path.splitext(path)
    if suffix in (".bin", ".idx") and all(os.path.exists(prefix + end) for end in (".bin", ".idx")):
        raise bad_data(
            f"--input {shown(path)} holds tokens already; give the text, or train on them: --data-path {shown(prefix)}"
        )


def a_pdf(path: str) -> UserError:
    text = shlex.quote(f"{path.removesuffix('.pdf')}.txt")
    return bad_data(f"--input {shown(path)} is a PDF; convert it to text first: pdftotext {shlex.quote(path)} {text}")


def _inspect(source: Input, given: TextInputs) -> Input | Bad:
    """Recognise a file or an object, or return why it is passed over in a folder."""
    path, is_named, is_remote = source.path, source.folder is None, is_address(source.path)
    if not is_named and source.bytes <= PIECE and os.path.splitext(path)[1].lower() in folders.SUFFIXES:
        # A worker, who opens it anyway, looks at the content.
        return source if is_remote else replace(source, kind="small files")
    try:
        if is_named and not is_remote:
            about = os.stat(path)
            refuse_other_than_text(path, about.st_mode)
            if not stat.S_ISREG(about.st_mode):
                return source  # what is read from a pipe here would be lost
            source = replace(source, bytes=about.st_size, changed=about.st_mtime_ns)
        with open_source(source, containers.START) as file:
            kind, start = _look_into(file)
    except OSError as error:
        if is_named:
            raise UserError(f"--input {shown(path)} cannot be read: {error.strerror}", IO) from None
        raise folders.unreadable(path, error) from None
    if is_remote and kind in ("parquet", "arrow", "arrow stream", "sqlite"):
        reason = f"{kind} tables in object storage, which are read from a disk of this machine alone"
        if is_named:
            raise bad_data(f"--input {path}: {reason}; copy it here first, or write its texts as JSON lines")
        return Bad(reason)
    found = _recognise(source, given, kind, start)
    if is_remote and isinstance(found, Input):
        return replace(found, kind="csv" if found.kind == "csv" else "stream")
    return found


def _look_into(file: BinaryIO) -> tuple[str | None, bytes]:
    """Return the kind of a file, and the first bytes in it, unpacked; none of a damaged one."""
    kind = containers.kind_of_bytes(start := containers.peek(file))
    try:
        return kind, containers.peek(containers.unpacked(file)) if kind in containers.STREAMS else start
    except containers.DAMAGES:
        return kind, b""


def _recognise(source: Input, given: TextInputs, kind: str | None, start: bytes) -> Input | Bad:
    """Recognise a file by its first bytes, or return why it is passed over in a folder."""
    path, keys, is_named = source.path, given.json_keys, source.folder is None
    if kind == "pdf" and is_named:
        raise a_pdf(path)
    inner = containers.kind_of_bytes(start) if start else None
    codec = plain.codec_of_file(path, start, given.encoding) if inner is None else ""
    start = encodings.to_utf8(start[: containers.HEAD] if kind in containers.STREAMS else start, codec)
    suffix = folders.suffix_of(path)
    is_chosen = is_named or given.include or folders.is_known(suffix)
    if is_chosen and (kind in ("parquet", "arrow") or (kind == "arrow stream" and path.endswith(".arrow"))):
        source = replace(source, kind="parquet" if kind == "parquet" else "arrow")
        return _table(source, tables.refuse_schema(path, source.kind, keys))
    if is_chosen and (kind in ("arrow stream", "tar", "zip") or inner == "tar"):
        return _text(source, kind)
    if kind == "sqlite":
        can_read = is_named or given.table
        return replace(source, kind="sqlite") if can_read else Bad("SQLite databases, which need --table")
    if rows.CSV_NAME.search(path) and inner is None:
        refused = None if is_named else rows.refuse_header(path, start, keys)
        return _table(replace(source, kind="csv"), refused)
    if is_named:
        is_json = bool(JSON_NAME.search(path) or JSON_START.match(start))
    else:
        is_json = suffix in (".jsonl", ".ndjson") or is_json_lines(start, keys)
    if is_json:
        return replace(source, kind="stream" if kind or codec else "lines")
    if not is_chosen:
        return Bad(folders.OTHER_SUFFIX + (suffix or "no suffix"))
    if dump := dumps.recognise(start):
        return replace(source, kind="stream" if kind or codec else "text", dump=dump)
    if not is_named and (reason := _why_no_text(suffix, kind, start, given)):
        return reason
    if is_named and not kind and given.on_error != "skip" and (why := encodings.why_binary(start)):
        binary = Bad(BINARY, why)
        raise bad_data(f"--input {shown(path)}: {binary}{advice(binary, True)}")
    return source if codec else _text(source, kind)


def _why_no_text(suffix: str, kind: str | None, start: bytes, given: TextInputs) -> Bad | None:
    """Return why a file in a folder that is no table, archive or JSON lines is passed over."""
    if suffix in (".json", ".xml") and not given.include:
        return _not_lines(start, given) if suffix == ".json" else Bad(dumps.but_for_dumps("XML"))
    if suffix in folders.DATA and suffix not in (".json", ".xml") and not kind:
        return Bad("not of the kind that their suffix says")
    if kind == "pdf":
        return Bad(folders.PDF)
    return Bad(BINARY) if b"\0" in start else None


def _table(source: Input, refused: rows.Refused | None) -> Input | Bad:
    if source.folder is None:
        rows.require_columns(f"--input {source.path}", refused)
    return refused.as_bad() if refused else source


def _not_lines(start: bytes, given: TextInputs) -> Bad:
    """Say why a .json file is passed over, which may hold JSON lines without the key."""
    unit = parse_line(memoryview(start.removeprefix(encodings.BOM).lstrip().partition(b"\n")[0]), given.json_keys)
    if isinstance(unit, Bad) and unit.kind.startswith("no key"):
        return Bad(f"JSON lines with {unit.kind}", cure=unit.cure)
    return Bad("not JSON lines")


def is_json_lines(start: bytes, keys: list[str]) -> bool:
    """Return whether the first line is an object with these keys, as far as can be seen."""
    if not JSON_START.match(start):
        return False
    line, feed, _ = start.removeprefix(encodings.BOM).lstrip().partition(b"\n")
    if not feed and len(start) in (containers.START, containers.HEAD):
        return all(json.dumps(key).encode() in line for key in keys) or len(start) < containers.START
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and all(key in record for key in keys)


def _text(source: Input, kind: str | None) -> Input:
    """Return a text, or what may be unpacked to one or to several."""
    is_text = kind is None or kind == "arrow stream"
    is_small = source.bytes <= PIECE or (is_text and HTML_NAME.search(source.path))
    is_one = is_text or (source.folder is not None and folders.suffix_of(source.path) in folders.SUFFIXES)
    if is_small and is_one:
        return replace(source, kind="small files")
    return replace(source, kind="text" if is_text else "stream")


def _joined(inputs: list[Input]) -> Iterator[Input]:
    """Join small texts that follow each other, so that pieces can hold many of them."""
    for (kind, folder), group in itertools.groupby(inputs, lambda source: (source.kind, source.folder)):
        if kind != "small files":
            yield from group
            continue
        files = tuple((source.path, source.bytes, source.changed) for source in group)
        yield Input(files[0][0], kind, sum(max(size, 1) for _, size, _ in files), folder, files)
