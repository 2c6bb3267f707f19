"""Join files of text or JSON lines into one, as Megatron's merge_jsons.py and merge_data.py.

A bad line is left out and counted; a file without a final newline gets one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import orjson

from meshwright.base.errors import bad_data
from meshwright.base.files import write_lines
from meshwright.base.progress import SkippedLines
from meshwright.data.text import limits
from meshwright.data.text.charsets import BOM, codec_of, to_utf8
from meshwright.data.text.divide import whole
from meshwright.data.text.folders import (
    OTHER_SUFFIX,
    PACKED,
    NameFilter,
    SkipReport,
    suffix_of,
    walk,
)
from meshwright.data.text.jsonl import parse_line
from meshwright.data.text.plain import decode
from meshwright.data.text.records import Document, ReadOptions, Rejected, TextPlace, too_long

ENDINGS = (".json", ".jsonl", ".txt")
READ_BY = "`meshwright preprocess --input FOLDER` reads most of these"


@dataclass
class Merged:
    files: int = 0
    documents: int = 0
    is_unchanged: bool = False  # the output was there, with this content
    bad: SkippedLines = field(default_factory=SkippedLines)
    passed: SkipReport = field(default_factory=SkipReport)

    @property
    def skipped(self) -> str:
        return f"; left out {self.bad}" if self.bad else ""


def merge_json_files(folder: str, output: str, each_line: bool, overwrite: bool) -> Merged:
    """Join files in the order of their names; the output appears once complete.

    A file of other content is replaced only with `overwrite`.
    """
    root = Path(folder)
    target = Path(output)
    if not root.is_dir():
        raise bad_data(
            f"{folder} is not a folder; --json-path must name the one that holds the files"
        )
    # The output of an earlier merge may lie among the files.
    own = target.resolve()
    paths = sorted(
        p for p in root.iterdir() if p.suffix in ENDINGS and p.is_file() and p.resolve() != own
    )
    out = Merged(passed=_passed_over(root, {*paths, own}))
    # Other files may be what the user meant, and preprocess may read them.
    advice = f"; {out.passed.line(READ_BY)}" if out.passed else ""
    if not paths:
        raise bad_data(f"{folder} holds no {', '.join('*' + e for e in ENDINGS)} file{advice}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)

        out.is_unchanged = not write_lines(target, _all(paths, each_line, out), overwrite)
    except OSError as error:
        error.filename = error.filename or output  # a full disk names none; main adds the advice
        raise
    return out


def _all(paths: list[Path], each_line: bool, out: Merged) -> Iterator[bytes]:
    """Yield the documents of all files; raise UserError if there is none."""
    for path in paths:
        out.files += 1
        for line in documents(path, each_line, out):
            out.documents += 1
            yield line
        # Megatron's line about its progress.
        if out.files % 1024 == 0:
            print("Merging at ", out.files, flush=True)
    if not out.documents:
        missing = f"{paths[0].parent}: none of {out.files:,} files has a document{out.skipped}"
        raise bad_data(f"{missing}; nothing was written")


def _passed_over(root: Path, read: set[Path]) -> SkipReport:
    """Count the files that are not read, but for hidden ones."""
    passed = SkipReport()
    for path, _ in walk(str(root), NameFilter(), passed):
        if root / path in read or (root / path).resolve() in read:
            continue
        # Subfolders are not read, which a user may expect.
        if Path(path).suffix in ENDINGS:
            passed.note("in folders of this one")
        else:
            # A packed file has the suffix of what is in it, and is not read for the other one.
            packed = Path(path).suffix.lower()
            known = suffix_of(path)
            if packed in PACKED and known != packed:
                known += packed
            passed.note(OTHER_SUFFIX + (known or "no suffix"))
    return passed


def documents(path: Path, each_line: bool, out: Merged) -> Iterator[bytes]:
    """Yield documents as lines of JSON; JSON objects are kept byte for byte."""
    is_text = path.suffix == ".txt"
    convert = text_to_json if is_text else require_object
    is_one = is_text and not each_line  # the file is a document
    with path.open("rb", buffering=limits.PIECE) as file:
        # A text as a whole, or each line: in both cases as bytes, which JSON lines keep.
        content = [whole_text(file)] if is_one else lines(file)
        for number, line in enumerate(content, start=1):
            place = TextPlace(str(path)) if is_one else TextPlace(str(path), number)
            if line is None:
                out.bad.count(too_long(place).reason, 1, str(place))
                continue
            if number == 1:
                # A mark of the encoding, which some editors write, is no part of the JSON.
                line = line.removeprefix(BOM)
            document = convert(line, place)
            if isinstance(document, Rejected):
                out.bad.count(document.reason, 1, str(place))
            elif document:
                yield document


def lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield lines with their line feeds, and None for one that is too long."""
    while line := file.readline(limits.LONGEST + 1):
        is_long = len(line) > limits.LONGEST
        # Its rest is passed over in pieces, so that it never is in memory as a whole.
        while is_long and line and not line.endswith(b"\n"):
            line = file.readline(limits.PIECE)
        yield None if is_long else line


def whole_text(file: BinaryIO) -> bytes | None:
    """Return a text in UTF-8, None if it is too long."""
    content = file.read(limits.LONGEST + 1)
    return None if len(content) > limits.LONGEST else to_utf8(content, codec_of(content))


def require_object(line: bytes, place: TextPlace) -> bytes | Rejected:
    record = parse_line(memoryview(line), [], place)
    return record if isinstance(record, Rejected) else line.strip()


def text_to_json(content: bytes, place: TextPlace) -> bytes | Rejected:
    """Return the line of JSON of a text, nothing of a blank one."""
    record = next(decode(content, 0, whole(place.path, content), ReadOptions()), None)
    if isinstance(record, Document):
        return orjson.dumps({"text": record.texts[0]})
    return record or b""
