"""Parquet and Arrow tables, cut into pieces of similar size, with pyarrow of the `data` extra.

A table can be entered only at a row group or batch, so each process keeps its reader open and reads
on: its pieces come in increasing order.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.base.errors import bad_data, first_line
from meshwright.base.files import RECORD_LIMIT, read_small
from meshwright.data.text import limits
from meshwright.data.text.containers import DamagedInput, missing
from meshwright.data.text.records import Rejected, choose_key
from meshwright.data.text.rows import refuse_columns, refused_table, require_columns

HEAD = 64  # bytes of a page that have its sizes
# Read at once, whichever comes first.
BATCH_ROWS = 256
BATCH_BYTES = 1 << 20
BUFFER = 1 << 18  # bytes, for a Parquet file
# times its bytes that a piece or batch may unpack to, if each row repeats the longest value
UNPACKED = 64
# bytes of the values that rows of a row group may repeat; writers mostly stop at 1 MiB
DICTIONARY = 1 << 26
RATIO = 1000  # of the unpacked and the packed bytes of a column; texts have less than 100

pyarrow: Any = None  # see _import_pyarrow
Start = tuple[int, int]  # the row group or batch to enter at, and its first row
# A row group or batch: its number if the table can be entered there, rows, bytes, the end.
Part = tuple[int | None, int, int, int]


# Folders.


def find_saved(folder: str) -> list[str]:
    """Return the files of a data set saved by Hugging Face's `datasets`; [] for another folder."""
    splits = _names(Path(folder) / "dataset_dict.json", "splits")
    if splits:
        raise bad_data(
            f"--input {folder} holds several data sets; name one of them, such as {folder}/{splits[0]}"
        )
    paths = [
        str(Path(folder) / name) for name in _names(Path(folder) / "state.json", "_data_files")
    ]
    if paths:
        gone = [path for path in paths if not os.path.isfile(path)]
        if gone:
            raise bad_data(
                f"{folder}/state.json names {len(paths):,} files, of which {len(gone):,} are missing, such as "
                f"{gone[0]}; copy the whole folder again"
            )
    return paths


def _names(path: Path, key: str) -> list[str]:
    """Return names in a JSON object; [] if there are none: other programs have such files, too."""
    try:
        values = json.loads(read_small(path, RECORD_LIMIT))[key]
        names = [value if isinstance(value, str) else value["filename"] for value in values]
    except (OSError, ValueError, RecursionError, TypeError, LookupError):
        return []
    is_valid = isinstance(values, list) and all(isinstance(name, str) and name for name in names)
    return names if is_valid else []


# Columns.


def refuse_schema(path: str, kind: str, keys: Sequence[str]) -> Rejected | None:
    """Return why a table cannot be read that has no text under the keys.

    What is wrong with a damaged table is reported where it is read.
    """
    _import_pyarrow(path)
    try:
        if kind == "parquet":
            schema = pyarrow.parquet.read_schema(path)
        else:
            with pyarrow.memory_map(path) as source:
                schema = _arrow(source)[0].schema
    except _errors():
        return None
    texts = [column.name for column in schema if _is_text(column.type)]
    if refused := refuse_columns(path, schema.names, keys, texts):
        return refused
    odd = [
        f"{schema.field(key).type} in column {key!r}"
        for key in keys
        if not _is_text(schema.field(key).type)
    ]
    ways = [way for way in (choose_key(texts), "write its text as a column first") if way]
    return refused_table(path, ", ".join(odd), ", or ".join(ways)) if odd else None


def _import_pyarrow(path: str) -> None:
    """Import what the functions below use; the package is optional, and slow to import."""
    global pyarrow
    try:
        pyarrow = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise missing("pyarrow", path) from None


def _is_text(kind: Any) -> bool:
    """Return whether a column of this type can hold text; a column of nulls may be of any."""
    types = pyarrow.types
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return any(
        (
            types.is_string(kind),
            types.is_large_string(kind),
            types.is_string_view(kind),
            types.is_null(kind),
        )
    )


# Cutting.


def spans(
    path: str, kind: str, size: int, piece: int, keys: Collection[str]
) -> Iterator[tuple[int, int, int, Start]]:
    """Yield first row, end row, position in the file after it, and where to enter, for each piece.

    Small row groups are joined, large ones divided. Raise UserError if the table cannot be opened,
    DamagedInput after the pieces before the damage.
    """
    begin = end = have = behind = 0
    start = (0, 0)
    for number, rows, weight, after in _row_groups(path, kind, size, keys):
        if not rows:
            continue
        if end > begin and (have + weight > piece or end + rows - begin > limits.MOST_ROWS):
            yield begin, end, behind, start
            begin = end
        first = end
        end += rows
        if begin == first:
            start = (0, 0) if number is None else (number, first)
            have = 0
            step = min(limits.MOST_ROWS, max(1, rows * piece // max(weight, 1)))
            while end - begin > step:
                begin += step
                yield (
                    begin - step,
                    begin,
                    behind + (after - behind) * (begin - first) // rows,
                    start,
                )
        have += weight * (end - max(begin, first)) // rows
        behind = after
    if end > begin:
        yield begin, end, behind, start


def _row_groups(path: str, kind: str, size: int, keys: Collection[str]) -> Iterator[Part]:
    _import_pyarrow(path)
    opened = False
    try:
        if kind == "parquet":
            about = pyarrow.parquet.read_metadata(path)
            groups = [about.row_group(number) for number in range(about.num_row_groups)]
            counts = [group.num_rows for group in groups]
            if sum(counts) != about.num_rows or min(counts, default=0) < 0:
                raise ValueError("the rows of its row groups do not add up to those of the file")
            opened = True
            done = 0
            for number, group in enumerate(groups):
                done += group.num_rows
                yield (
                    number,
                    group.num_rows,
                    _weight(path, group, keys),
                    size * done // max(about.num_rows, 1),
                )
            return
        with pyarrow.memory_map(path) as source:
            reader, count = _arrow(source)
            opened = True
            for number, batch in enumerate(_batches(reader, count, 0)):
                after = (
                    size * (number + 1) // count if count is not None else min(source.tell(), size)
                )
                yield (
                    None if count is None else number,
                    batch.num_rows,
                    _batch_weight(batch, keys),
                    after,
                )
    except _errors() as error:
        if opened:
            raise DamagedInput(first_line(error)) from None
        raise bad_data(f"{path} cannot be read: {first_line(error)}") from None


def _weight(path: str, group: Any, keys: Collection[str]) -> int:
    """Return the bytes of a row group, or more if its rows may repeat a long value."""
    columns = [group.column(number) for number in range(group.num_columns)]
    longest = 0
    for chunk in (column for column in columns if column.path_in_schema in keys):
        if chunk.total_uncompressed_size > max(DICTIONARY, RATIO * chunk.total_compressed_size):
            packed = chunk.total_compressed_size
            unpacked = chunk.total_uncompressed_size
            raise ValueError(
                f"{packed:,} bytes of {chunk.path_in_schema} would unpack to {unpacked:,}"
            )
        if chunk.physical_type == "BYTE_ARRAY" and chunk.has_dictionary_page:
            longest += _longest_value(path, chunk)
    return max(int(group.total_byte_size), int(group.num_rows) * longest // UNPACKED)


def _batch_weight(batch: Any, keys: Collection[str]) -> int:
    """Return the bytes of a batch of Arrow, or more if its rows may repeat a long value."""
    import pyarrow.compute

    longest = 0
    for key in set(keys) & set(batch.schema.names):
        column = batch.column(key)
        if isinstance(column, pyarrow.DictionaryArray) and len(column.dictionary):
            values = column.dictionary.cast(pyarrow.large_binary())
            lengths = pyarrow.compute.binary_length(values)
            longest += int(pyarrow.compute.max(lengths).as_py() or 0)
    return max(int(batch.get_total_buffer_size()), int(batch.num_rows) * longest // UNPACKED)


def _longest_value(path: str, chunk: Any) -> int:
    """Return the bytes of the longest value in a column's dictionary."""
    begin = chunk.dictionary_page_offset
    end = chunk.data_page_offset
    with open(path, "rb") as file:
        file.seek(begin)
        size, packed = _page_sizes(file.read(HEAD))
        if max(size, packed) > DICTIONARY:
            raise ValueError(
                f"a dictionary of {chunk.path_in_schema} would unpack to {size:,} bytes"
            )
        if not begin < end - packed:
            return size
        file.seek(end - packed)
        values = file.read(packed)
    if chunk.compression != "UNCOMPRESSED":
        try:
            values = pyarrow.Codec(chunk.compression.lower()).decompress(values, size, asbytes=True)
        except _errors():
            return size
    longest = at = 0  # each value follows its size
    while at + 4 <= len(values):
        length = int.from_bytes(values[at : at + 4], "little")
        longest = max(longest, length)
        at += 4 + length
    return min(longest, size)


def _page_sizes(head: bytes) -> tuple[int, int]:
    """Return the unpacked and the packed bytes of a page, the second and third number in its head.

    In Thrift's compact form a byte names a number, which follows with 7 bits in each byte.
    """
    numbers = list[int]()
    at = 0
    for _ in range(3):
        value = 0
        shift = 0
        more = True
        at += 1
        while more and at < len(head):
            value |= (head[at] & 127) << shift
            shift += 7
            more = head[at] > 127
            at += 1
        # The last bit is the sign.
        numbers.append(value >> 1)
    return numbers[1], numbers[2]


def _errors() -> tuple[type[Exception], ...]:
    return (OSError, ValueError, pyarrow.ArrowException)


def _arrow(source: Any) -> tuple[Any, int | None]:
    """Return a reader and its number of batches, None for a stream, read from its start."""
    if bytes(source.read(6)) == b"ARROW1":
        reader = pyarrow.ipc.open_file(source)
        return reader, int(reader.num_record_batches)
    source.seek(0)
    return pyarrow.ipc.open_stream(source), None


def _batches(reader: Any, count: int | None, first: int) -> Iterator[Any]:
    for batch in iter(reader) if count is None else map(reader.get_batch, range(first, count)):
        batch.validate()  # as many rows as it says
        yield batch


# Reading.


def rows(
    path: str, kind: str, start: Start, begin: int, end: int, keys: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    """Yield the values under the keys in rows [begin, end), bytes that are not UTF-8 as surrogates.

    Raise DamagedInput after the last readable row.
    """
    _import_pyarrow(path)
    try:
        about = os.stat(path)
        reader = _reader(
            path, kind, tuple(keys), os.getpid(), about.st_ino, about.st_size, about.st_mtime_ns
        )
    except _errors() as error:
        raise DamagedInput(f"it cannot be opened: {first_line(error)}") from None
    for batch in reader.take(start, begin, end):
        yield from zip(*batch, strict=True)


@functools.lru_cache(maxsize=1)
def _reader(path: str, kind: str, keys: tuple[str, ...], *version: int) -> _TableReader:
    """Return this process's open reader; `version` changes with the process and with the file."""
    return _TableReader(path, kind, keys)


class _TableReader:
    """A position in a table that moves forward, and the row from which a part is damaged."""

    def __init__(self, path: str, kind: str, keys: tuple[str, ...]) -> None:
        self.path = path
        self.kind = kind
        self.keys = list(keys)
        if kind == "parquet":
            self.file = pyarrow.parquet.ParquetFile(
                path, buffer_size=BUFFER, page_checksum_verification=True
            )
            names = self.file.schema_arrow.names
        else:
            self.source = pyarrow.memory_map(path)
            names = _arrow(self.source)[0].schema.names
        require_columns(path, refuse_columns(path, names, keys))
        self.failed: tuple[Start, int, str] | None = None
        self.batches: Iterator[Any] = iter(())
        self.batch: Any = None  # the batch that begins at row `at`, once read
        self.at = -1  # not entered

    def take(self, start: Start, begin: int, end: int) -> Iterator[list[list[Any]]]:
        """Yield column values for rows [begin, end), batch by batch."""
        if self.failed and self.failed[0] == start and self.failed[1] <= begin:
            raise self._damaged(*self.failed[1:])
        if not start[1] <= self.at <= begin:
            self._enter(start)
        while self.at < end:
            # The next batch; what cannot be read is remembered, for the pieces that follow.
            if self.batch is None:
                try:
                    if (batch := next(self.batches, None)) is None:
                        raise OSError("the file ends here")
                except _errors() as error:
                    self.failed = (start, self.at, first_line(error))
                    self.at = -1
                    raise self._damaged(*self.failed[1:]) from None
                self.batch = batch

            # The rows of it that are asked for.
            after = self.at + self.batch.num_rows
            first = max(begin, self.at)
            if after > first:
                part = self.batch.slice(first - self.at, min(end, after) - first)
                try:
                    columns = [_values(part.column(key)) for key in self.keys]
                except _errors() as error:
                    raise self._damaged(first, first_line(error)) from None
                yield columns
            # The rest of the batch belongs to the next piece.
            if after > end:
                break
            self.at = after
            self.batch = None

    def _damaged(self, row: int, why: str) -> DamagedInput:
        return DamagedInput(f"unreadable from row {row + 1:,} on: {why}")

    def _enter(self, start: Start) -> None:
        number, self.at = start
        self.batch = None
        if self.kind == "parquet":
            self.batches = self._group_batches(number)
        else:
            self.source.seek(0)
            self.batches = _batches(*_arrow(self.source), number)

    def _group_batches(self, first: int) -> Iterator[Any]:
        for number in range(first, self.file.num_row_groups):
            group = self.file.metadata.row_group(number)
            # As many rows as have BATCH_BYTES, by the mean of the group.
            weight = max(_weight(self.path, group, self.keys), 1)
            wanted = group.num_rows * BATCH_BYTES // weight
            size = max(1, min(BATCH_ROWS, wanted))
            left = group.num_rows
            for batch in self.file.iter_batches(
                size, row_groups=[number], columns=self.keys, use_threads=False
            ):
                left -= batch.num_rows
                yield batch
            if left:
                raise OSError(f"row group {number} should have {left:,} rows more")


def _values(column: Any) -> list[Any]:
    """Return a column's values, checked: pyarrow would read a damaged column beyond its memory."""
    try:
        column.validate(full=True)
        return list(column.to_pylist())
    except pyarrow.ArrowInvalid:
        types = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
        if column.type not in types:
            raise
    column = column.view(types[column.type])
    column.validate(full=True)
    return [
        None if value is None else value.decode("utf-8", "surrogateescape")
        for value in column.to_pylist()
    ]
