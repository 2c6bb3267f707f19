"""Many files of text or JSON lines to one of JSON lines: Megatron's tools/openwebtext/merge_jsons.py, and merge_data.py.

Neither a bad line nor a file without a final newline spoils what stands beside it: the former is left out and counted,
the latter is given one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from meshwright.errors import BAD_DATA, IO, UserError
from meshwright.files import replacing

ENDINGS = (".json", ".jsonl", ".txt")


@dataclass
class Merged:
    files: int = 0
    documents: int = 0
    blank: int = 0
    bad: dict[str, tuple[int, str]] = field(default_factory=dict)  # kind: how many, place of the first

    def leave_out(self, kind: str, place: str) -> None:
        count, first = self.bad.get(kind, (0, place))
        self.bad[kind] = (count + 1, first)


def merge(folder: str, output: str, each_line: bool) -> Merged:
    """Files in the order of their names; the output appears when it is whole."""
    place, target = Path(folder), Path(output)
    if not place.is_dir():
        raise UserError(f"{folder} is not a folder: --json-path names the one that holds the files", BAD_DATA)
    paths = sorted(
        p for p in place.iterdir() if p.suffix in ENDINGS and p.is_file() and p.resolve() != target.resolve()
    )
    if not paths:
        raise UserError(f"{folder} holds no {', '.join('*' + e for e in ENDINGS)} file", BAD_DATA)
    out = Merged()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            for path in paths:
                out.files += 1
                for line in text_lines(path, each_line, out) if path.suffix == ".txt" else json_lines(path, out):
                    file.write(line + b"\n")
                    out.documents += 1
                if out.files % 1024 == 0:
                    print("Merging at ", out.files, flush=True)
            if not out.documents:
                raise UserError(
                    f"{folder}: none of {out.files:,} files has a document{told(out)}; nothing was written", BAD_DATA
                )
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror or error}", IO) from None
    return out


def json_lines(path: Path, out: Merged) -> Iterator[bytes]:
    """The lines that are JSON objects, byte for byte."""
    with path.open("rb", buffering=1 << 20) as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if not line:
                out.blank += 1
                continue
            kind = wrong_with(line)
            if kind:
                out.leave_out(kind, f"{path}:{number}")
            else:
                yield line


def wrong_with(line: bytes) -> str:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:  # the standard library is laxer, as Megatron's tools are: NaN, a lone surrogate
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            return "not UTF-8"
        except (ValueError, RecursionError):
            return "not JSON"
    return "" if type(record) is dict else "not a JSON object"


def text_lines(path: Path, each_line: bool, out: Merged) -> Iterator[bytes]:
    """A document of the whole file, or one of each line, as {"text": ...}."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        out.leave_out("not UTF-8", str(path))
        return
    for document in text.splitlines(keepends=True) if each_line else [text]:
        if document.strip():
            yield orjson.dumps({"text": document})
        else:
            out.blank += 1


def told(out: Merged) -> str:
    kinds = "; ".join(f"{count:,} {kind}, first {place}" for kind, (count, place) in out.bad.items())
    return f"; left out {sum(count for count, _ in out.bad.values()):,}: {kinds}" if out.bad else ""
