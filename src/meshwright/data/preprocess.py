"""`meshwright preprocess`: JSON lines to token files.

The input is read as bytes, line by line, so that one line that is not UTF-8 costs that line and no other. A line is
parsed by orjson; what orjson refuses, the standard library looks at again: it is laxer (NaN, a lone surrogate in a
key nobody reads), so no line is lost that Megatron would have kept, and it says better what is wrong with the rest.
"""

from __future__ import annotations

import glob
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import orjson

from meshwright import command, tokenizers
from meshwright.config import PreprocessConfig
from meshwright.data.writing import Writer, token_dtype
from meshwright.errors import BAD_DATA, DONE, IO, UserError

COMPRESSED = {b"\x1f\x8b": "gzip -d", b"\xfd7zXZ": "xz -d", b"\x28\xb5\x2f\xfd": "zstd -d", b"BZh": "bzip2 -d"}
BOM = b"\xef\xbb\xbf"
MIB = 1 << 20


class BadLine(Exception):
    """One line that gives no document. `kind` is what is counted, `detail` belongs to this line."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind} ({detail})" if detail else kind)
        self.kind = kind


@dataclass
class Totals:
    documents: int = 0
    bytes: int = 0
    bad: dict[str, tuple[int, str]] = field(default_factory=dict)  # kind: how many, place of the first
    start: float = field(default_factory=time.perf_counter)

    def count_bad(self, kind: str, place: str) -> None:
        n, first = self.bad.get(kind, (0, place))
        self.bad[kind] = (n + 1, first)

    def line(self) -> str:
        seconds = max(time.perf_counter() - self.start, 1e-9)
        return (
            f"Processed {self.documents} documents "
            f"({self.documents / seconds:.2f} docs/s, {self.bytes / MIB / seconds:.2f} MB/s)."
        )


def main(argv: list[str]) -> int:
    parsed = command.settings(PreprocessConfig, argv, "preprocess", "JSON lines to .bin/.idx.")
    if parsed is None:
        return DONE
    if parsed.dry_run:
        inputs = find_inputs(parsed.config.preprocess.input)
        print(f"would read {', '.join(inputs)} with {tokenizers.build(parsed.config.tokenizer).size} ids")
        return DONE
    run(parsed.config, sys.stdout, sys.stderr)
    return DONE


def run(config: PreprocessConfig, stdout: TextIO, stderr: TextIO) -> None:
    """One pair of files for each key: <prefix>_<key>_document.bin/.idx."""
    start = time.perf_counter()
    p = config.preprocess
    keys = list(dict.fromkeys(p.json_keys))
    inputs = find_inputs(p.input)
    for path in inputs:
        print(f"Opening {path}", file=stdout)
    if p.workers > 1:
        print(f"--workers {p.workers}: one process does the work for now; the files are the same", file=stderr)
    if p.dataset_impl != "mmap":
        print(f"--dataset-impl {p.dataset_impl}: written as mmap, which every loader reads", file=stderr)
    print(f"> building {config.tokenizer.tokenizer_type} tokenizer ...", file=stdout)
    tokenizer = tokenizers.build(config.tokenizer)
    print(tokenizers.padding_line(tokenizer.size, tokenizers.padded_size(tokenizer.size, 128, 1, None)), file=stdout)
    print(f"Vocab size: {tokenizer.size}", file=stdout)
    print(f"Output prefix: {p.output_prefix}", file=stdout)

    totals = Totals()
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.size)
        writers = {key: stack.enter_context(Writer(f"{p.output_prefix}_{key}_document", dtype)) for key in keys}
        show = stack.enter_context(progress(inputs, p.log_interval, totals, stderr))
        print(f"Time to startup: {time.perf_counter() - start}", file=stdout, flush=True)
        for path in inputs:
            for number, line in read_lines(path):
                totals.bytes += len(line)
                try:
                    texts = parse(line, keys)
                    if texts is None:
                        continue
                    documents = [encode(tokenizer, text, p.append_eod) for text in texts]
                except BadLine as bad:
                    if p.on_error == "stop":
                        raise UserError(
                            f"{path}:{number}: {bad}{expected(bad, not totals.documents)}; mend the line, or leave such "
                            "lines out with --on-error skip (nothing was written)",
                            BAD_DATA,
                        ) from None
                    totals.count_bad(bad.kind, f"{path}:{number}")
                    continue
                for writer, ids in zip(writers.values(), documents, strict=True):
                    # As in Megatron-LM, a document without tokens has no sequence, only an entry in the document
                    # index, so that the files of several keys stay aligned (bigscience's tool drops it there).
                    if ids:
                        writer.add(ids)
                    writer.end_document()
                totals.documents += 1
                show()
        for key, writer in writers.items():
            if not writer.tokens:
                reason = f" ({bad_lines(totals)})" if totals.bad else ""
                raise UserError(f"no token under {key!r} in {', '.join(inputs)}{reason}: nothing was written", BAD_DATA)
    print(totals.line(), file=stderr)
    if totals.bad:
        print(f"left out {bad_lines(totals)}", file=stderr)
    for writer in writers.values():
        size = writer.tokens * writer.dtype.itemsize
        print(
            f"wrote {writer.prefix}.bin/.idx: {totals.documents:,} documents, {writer.sequences:,} sequences, "
            f"{writer.tokens:,} tokens, {size:,} bytes ({writer.dtype.name})",
            file=stdout,
        )


def find_inputs(patterns: list[str]) -> list[str]:
    """Files and `-` as given, patterns in sorted order; all are looked for before work starts."""
    found = []
    for pattern in patterns:
        matches = [pattern] if pattern == "-" or Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise UserError(f"--input {pattern} does not exist", BAD_DATA)
        found += matches
    for path in found:
        if Path(path).is_file():  # a pipe must not be read here
            with open_input(path) as file:
                start = file.read(6)
            for magic, unpack in COMPRESSED.items():
                if start.startswith(magic):
                    raise UserError(f"--input {path} is compressed: not yet; first run: {unpack} {path}", BAD_DATA)
    return found


def read_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Numbered lines as bytes, cut at line feeds only; a byte order mark at the start is dropped."""
    with open_input(path) as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                yield number, line.removeprefix(BOM) if number == 1 else line
        except OSError as error:
            raise UserError(f"{path} cannot be read after line {number}: {error.strerror or error}", IO) from None


def read_texts(inputs: list[str], keys: list[str]) -> Iterator[str]:
    """Every text of the inputs; the first bad line is an error."""
    none_yet = True
    for path in inputs:
        for number, line in read_lines(path):
            try:
                texts = parse(line, keys) or []
            except BadLine as bad:
                raise UserError(f"{path}:{number}: {bad}{expected(bad, none_yet)}", BAD_DATA) from None
            none_yet = none_yet and not texts
            yield from texts


def expected(bad: BadLine, is_first: bool) -> str:
    """What is said to those whose file is plain text."""
    if not is_first or bad.kind != "not JSON":
        return ""
    return '; one {"text": "..."} a line is expected, and docs/data.md shows how plain text becomes that'


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(path, "rb", buffering=MIB)
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}", IO) from None
    with file:
        yield file


def parse(line: bytes, keys: list[str]) -> list[str] | None:
    """The text under each key; None for a blank line."""
    lax = False
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        if not line.strip():
            return None
        record, lax = parse_laxly(line), True
    if type(record) is not dict:
        raise BadLine("not a JSON object", f"but a {type(record).__name__}; one object a line is needed")
    texts = []
    for key in keys:
        text = record.get(key)
        if type(text) is not str:
            if key not in record:
                raise BadLine(f"no key {key!r}", f"keys: {', '.join(list(record)[:5]) or 'none'}")
            raise BadLine(f"null under {key!r}" if text is None else f"no text under {key!r}", type(text).__name__)
        if lax and (half := next((c for c in text if "\ud800" <= c <= "\udfff"), None)):
            raise BadLine(f"lone surrogate under {key!r}", f"\\u{ord(half):04x}, half a character")
        texts.append(text)
    return texts


def parse_laxly(line: bytes) -> Any:
    try:
        text = line.rstrip().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine("not UTF-8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadLine("not JSON", f"{error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise BadLine("not JSON", str(error)) from None


def encode(tokenizer: tokenizers.Tokenizer, text: str, append_eod: bool) -> list[int]:
    try:
        ids = tokenizer.encode(text)
    except UserError as error:
        raise BadLine("refused by the tokenizer", str(error)) from None
    if append_eod and ids:
        ids.append(tokenizer.eod)
    return ids


def bad_lines(totals: Totals) -> str:
    kinds = "; ".join(f"{n:,} {kind}, first {place}" for kind, (n, place) in totals.bad.items())
    return f"{sum(n for n, _ in totals.bad.values()):,} bad lines: {kinds}"


@contextmanager
def progress(inputs: list[str], interval: int, totals: Totals, stderr: TextIO) -> Iterator[Callable[[], None]]:
    """A call for each document: Megatron's line every `interval` documents, on a terminal a moving bar."""
    if not stderr.isatty():

        def line() -> None:
            if totals.documents % interval == 0:
                print(totals.line(), file=stderr, flush=True)

        yield line
        return

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    total = None if "-" in inputs else sum(Path(path).stat().st_size for path in inputs)
    with Progress(*columns, console=Console(file=stderr), transient=True) as bar:
        task = bar.add_task("", total=total)

        def move() -> None:
            if totals.documents % 16 == 0:
                bar.update(task, completed=totals.bytes, description=totals.line())

        yield move
