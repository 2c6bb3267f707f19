"""Find the text that a command reads: files, patterns, folders, pipes.

`preprocess`, `train-tokenizer` and `evaluate` share these flags and read the same documents.
"""

from __future__ import annotations

import glob
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from meshwright.data.prepare import containers, folders, tables, wiki
from meshwright.data.prepare.folders import NameFilter, PassedOver, shown
from meshwright.data.prepare.plain import HTML_NAME, PIECE
from meshwright.errors import IO, UserError, bad_data
from meshwright.settings.hints import near_path
from meshwright.settings.text_inputs import TextInputs

START = 1 << 16  # bytes that are read to recognise JSON lines in a folder
# Names of JSON lines; in a folder, what is only called .json must look like them.
JSON_NAME = re.compile(r"\.(json|jsonl|ndjson)(\.(gz|xz|zst|bz2))?$", re.IGNORECASE)
# How JSON lines begin: with an object on one line; or an array of objects, which gets a hint.
JSON_START = re.compile(rb"(\xef\xbb\xbf)?\s*(\{[ \t]*[\"}]|\[\s*\{)")


Kind = Literal["lines", "stream", "parquet", "arrow", "text", "small files"]


@dataclass(frozen=True)
class Input:
    """A file, a pipe, or several `small files` that are each read as a whole.

    The first bytes decide the kind. `bytes` is on disk, 0 for a pipe. `folder` is the one in which
    the input was found, None if it was named. Documents of a `wiki` are the articles of its dump.
    """

    path: str
    kind: Kind
    bytes: int = 0
    folder: str | None = None
    files: tuple[tuple[str, int, int], ...] = ()  # of texts: path, size, time of change
    is_wiki: bool = False


@dataclass
class Inputs:
    """The inputs in the order of the documents, and the number of files that are not read."""

    inputs: list[Input]
    passed: PassedOver = field(default_factory=PassedOver)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.inputs)

    @property
    def paths(self) -> list[str]:
        return [path for one in self.inputs for path in ([file for file, _, _ in one.files] or [one.path])]

    def describe(self) -> str:
        """Say how many files of which kind there are."""
        names = {"lines": "JSON lines", "stream": "archives or streams"}
        names |= dict.fromkeys(("text", "small files"), "plain text")
        counts: Counter[str] = Counter()
        for one in self.inputs:
            counts["wiki dumps" if one.is_wiki else names.get(one.kind, "tables")] += len(one.files) or 1
        return ", ".join(f"{count:,} of {kind}" for kind, count in counts.items())

    def opened(self) -> Iterator[str]:
        """Yield a line for each input that was named, and one for each folder."""
        number: Counter[str] = Counter()
        for one in self.inputs:
            if one.folder is not None:
                number[one.folder] += len(one.files) or 1
        for one in self.inputs:
            if one.folder is None:
                yield from (shown(path) for path, _, _ in one.files or [(one.path, 0, 0)])
            elif count := number.pop(one.folder, 0):
                yield f"{shown(one.folder)}: {count:,} {'file' if count == 1 else 'files'}"


def name_filter(given: TextInputs) -> NameFilter:
    return NameFilter(tuple(given.include), tuple(given.exclude))


def find_inputs(given: TextInputs) -> Inputs:
    """Return the inputs; raise if one cannot be read or nothing is left."""
    passed = PassedOver()
    single = [one for path in _expand(given.input) for one in _find_below(path, given, passed)]
    found = Inputs(list(_joined(single)), passed)
    if not found.inputs:
        reason = passed.line() if passed else "nothing is there"
        raise bad_data(f"--input {' '.join(map(shown, given.input))} holds no text; {reason}")
    return found


def _expand(patterns: list[str]) -> list[str]:
    """Return files and `-` as given, and the matches of patterns sorted."""
    found = []
    for pattern in patterns:
        matches = (
            [pattern] if pattern == "-" or os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
        )
        if not matches:
            raise bad_data(f"--input {shown(pattern)} does not exist{near_path(pattern)}")
        found += matches
    return found


def _find_below(path: str, given: TextInputs, passed: PassedOver) -> Iterator[Input]:
    if path == "-":
        yield Input("-", "stream")
    elif files := tables.find_saved(path) if os.path.isdir(path) else [path]:
        for one in files:
            if reason := name_filter(given).refusal(os.path.basename(one), is_named=True):
                passed[reason] += 1
            else:
                yield _inspect(one)
    else:
        for inside, about in folders.chosen(path, name_filter(given), passed):
            found = _inspect_inside(path, inside, about, given)
            if isinstance(found, str):
                passed.note(found, shown(inside))
            else:
                yield found


def _inspect(path: str) -> Input:
    """Recognise a file that was named."""
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            return Input(path, "stream")  # what is read from a pipe here would be lost
        with open(path, "rb") as file:
            start = file.read(containers.HEAD)
    except OSError as error:
        raise UserError(f"--input {shown(path)} cannot be read: {error.strerror}", IO) from None
    if other := containers.foreign_encoding(start):
        raise bad_data(f"--input {shown(path)} {other} {shown(path)} > {shown(path)}.utf8")
    kind = containers.kind_of_bytes(start)
    if kind is None and (JSON_NAME.search(path) or JSON_START.match(start)):
        return Input(path, "lines", about.st_size)
    if wiki.IS_DUMP.match(start):
        return Input(path, "text", about.st_size, is_wiki=True)
    return _input(path, kind, about, None)


def _inspect_inside(folder: str, path: str, about: os.stat_result, given: TextInputs) -> Input | str:
    """Recognise a file in a folder, or return why it is passed over."""
    if about.st_size <= PIECE and os.path.splitext(path)[1].lower() in folders.SUFFIXES:
        return _input(path, None, about, folder)  # a worker, who opens it anyway, looks at the content
    try:
        with open(path, "rb") as file:
            start = containers.peek(file)
            kind = containers.kind_of_bytes(start)
            if kind in containers.STREAMS:
                start = containers.peek(containers.unpacked(file))
            elif kind is None and JSON_START.match(start):
                start = file.read(START)
    except containers.DAMAGES:
        start = b""
    except OSError as error:
        raise folders.unreadable(path, error) from None
    inner = containers.kind_of_bytes(start) if start else None
    suffix = folders.suffix_of(path)
    is_chosen = given.include or folders.is_known(suffix)
    if is_chosen and (kind in ("parquet", "arrow", "arrow stream", "tar", "zip") or inner == "tar"):
        return _input(path, kind, about, folder)
    if suffix in (".jsonl", ".ndjson") or is_json_lines(start, given.json_keys):
        return Input(path, "stream" if kind else "lines", about.st_size, folder)
    if not is_chosen:
        return folders.OTHER_SUFFIX + (suffix or "no suffix")
    if wiki.IS_DUMP.match(start):
        return Input(path, "stream" if kind else "text", about.st_size, folder, is_wiki=True)
    if suffix in (".json", ".xml") and not given.include:
        return "not JSON lines" if suffix == ".json" else "XML other than wiki dumps"
    if suffix in folders.DATA and suffix not in (".json", ".xml") and not kind:
        return "not of the kind that their suffix says"
    if containers.foreign_encoding(start):
        return "not UTF-8"
    return "binary" if b"\0" in start else _input(path, kind, about, folder)


def is_json_lines(start: bytes, keys: list[str]) -> bool:
    """Return whether the first line is an object with these keys, as far as can be seen."""
    if not JSON_START.match(start):
        return False
    line, feed, _ = start.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if not feed and len(start) in (START, containers.HEAD):
        return all(json.dumps(key).encode() in line for key in keys) or len(start) < START
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and all(key in record for key in keys)


def _input(path: str, kind: str | None, about: os.stat_result, folder: str | None) -> Input:
    """Return a table, an archive, or text."""
    size = about.st_size
    if kind in ("parquet", "arrow"):
        return Input(path, "parquet" if kind == "parquet" else "arrow", size, folder)
    if kind == "arrow stream" and path.endswith(".arrow"):
        return Input(path, "arrow", size, folder)
    is_text = kind is None or kind == "arrow stream"
    is_small = size <= PIECE or (is_text and HTML_NAME.search(path))
    if is_small and (is_text or (folder is not None and folders.suffix_of(path) in folders.SUFFIXES)):
        return Input(path, "small files", size, folder, ((path, size, about.st_mtime_ns),))
    return Input(path, "text" if is_text else "stream", size, folder)


def _joined(inputs: list[Input]) -> Iterator[Input]:
    """Join small texts that follow each other, so that pieces can hold many of them."""
    kept: list[Input] = []
    for one in [*inputs, None]:
        if kept and (one is None or one.kind != "small files" or one.folder != kept[0].folder):
            files = tuple(file for each in kept for file in each.files)
            yield Input(kept[0].path, "small files", sum(max(size, 1) for _, size, _ in files), kept[0].folder, files)
            kept = []
        if one is not None and one.kind == "small files":
            kept.append(one)
        elif one is not None:
            yield one
