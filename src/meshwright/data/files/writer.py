"""Write token files as a stream, in constant memory and without a mismatched pair at any moment.

Lengths and document borders go to files of their own, from which the index is put together at the
end. Hand-written for that reason: Megatron's builder holds both as lists of Python numbers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from meshwright.base import origin
from meshwright.base.errors import IO
from meshwright.base.files import own_file, sync
from meshwright.config.problem import SettingsError
from meshwright.data.files.indexed import CODES, HEADER, MAGIC, FileColumn

# Tokens, int32 lengths of sequences, int64 ends of documents; each name ends with `.tmp`.
PART_ENDINGS = (".bin", ".sizes", ".docs")


def token_dtype(vocab_size: int) -> type[np.integer[Any]]:
    """Return Megatron's choice; the margin below 65,536 is Megatron's too."""
    return np.uint16 if vocab_size < 65500 else np.int32


def origin_path(prefix: str) -> Path:
    return Path(f"{prefix}.origin.json")


def is_made(prefix: str, made_from: dict[str, Any], overwrite: bool) -> bool:
    """Return whether this pair of files was made from this; see `origin.is_done`."""
    pair = [Path(f"{prefix}{end}") for end in (".bin", ".idx")]
    return origin.is_done(origin_path(prefix), made_from, pair, overwrite, "--output-prefix")


class Writer:
    """A stream into a pair of files, which get their names on a clean exit of the `with` block.

    An older .idx is removed before the .bin beside it is replaced, and the new one appears last:
    whenever the process is killed, no .idx stands beside a .bin that it does not describe.
    """

    def __init__(
        self, prefix: str | Path, dtype: npt.DTypeLike, begun: Sequence[int] | None = None
    ) -> None:
        """`begun`: tokens, sequences and documents to keep of an interrupted writer's parts."""
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self.tokens, self.sequences, self.documents = begun or (0, 0, 0)
        self.is_finished = False
        # After an error, keep the parts for another writer to continue.
        self.is_kept = False
        self.files: dict[str, BinaryIO] = {}
        # Bytes beyond these lengths were written after the last note of progress, and are cut off.
        lengths = (self.tokens * self.dtype.itemsize, 4 * self.sequences, 8 * self.documents)
        with contextlib.ExitStack() as failed, self.reported():
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            for part, length in zip(PART_ENDINGS, lengths, strict=True):
                file = open(
                    f"{self.prefix}{part}.tmp", "r+b" if begun else "wb", 1 << 20, opener=own_file
                )
                self.files[part] = failed.enter_context(file)
                file.truncate(length)
                file.seek(length)
            failed.pop_all()  # closed in __exit__ instead

    def add(self, ids: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append one sequence to the current document."""
        tokens = np.asarray(ids, dtype=self.dtype)
        self.append(tokens, np.array([len(ids)], np.int32), np.zeros(0, np.int64))

    def end_document(self) -> None:
        end = np.array([self.sequences], np.int64)
        self.append(np.zeros(0, self.dtype), np.zeros(0, np.int32), end)

    def append(
        self, tokens: npt.NDArray[Any], sizes: npt.NDArray[Any], ends: npt.NDArray[Any]
    ) -> None:
        """Append tokens, each sequence's length, and the sequences up to each document end."""
        with self.reported():
            self.files[".bin"].write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self.reserve(len(tokens), sizes, ends)

    def reserve(self, tokens: int, sizes: npt.NDArray[Any], ends: npt.NDArray[Any]) -> int:
        """Append sequences whose tokens another process writes at the returned byte of .bin.tmp."""
        with self.reported():
            self.files[".sizes"].write(np.ascontiguousarray(sizes, dtype="<i4").data)
            self.files[".docs"].write(np.ascontiguousarray(ends, dtype="<i8").data)
        offset = self.tokens * self.dtype.itemsize
        self.tokens += tokens
        self.sequences += len(sizes)
        self.documents += len(ends)
        return offset

    def flush(self) -> None:
        with self.reported():
            for file in self.files.values():
                file.flush()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            for file in self.files.values():
                with contextlib.suppress(OSError):  # a full disk fails again here
                    file.close()
            if not self.is_finished and not self.is_kept:
                clear(self.prefix)

    def keep_origin(self, made_from: dict[str, Any]) -> None:
        """Record what the files are made from, in the place of an older pair, before `finish`."""
        sizes = (
            self.tokens * self.dtype.itemsize,
            HEADER.size + 12 * self.sequences + 8 * (self.documents + 1),
        )
        # An older pair's index goes first, so that the new record never stands beside it.
        with self.reported():
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
            names = (f"{Path(self.prefix).name}{end}" for end in (".bin", ".idx"))
            origin.write_origin(
                origin_path(self.prefix), made_from, dict(zip(names, sizes, strict=True))
            )

    def finish(self) -> None:
        """Give the files their names, now that all is written."""
        if not self.is_finished:
            self.flush()
            with self.reported():
                publish(self.prefix, self.dtype)
            self.is_finished = True

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Turn a failed write into an error for the user."""
        try:
            yield
        except OSError as error:
            written = self.tokens * self.dtype.itemsize
            again = "run the same command to continue" if self.is_kept else "start again"
            raise SettingsError(
                f"{self.prefix}.bin/.idx cannot be written ({written:,} bytes so far): {error.strerror or error}; "
                f"nothing was published: free space and {again}, or choose another {{output_prefix}}",
                IO,
            ) from None


def publish(prefix: str, dtype: np.dtype[Any]) -> None:
    """Turn complete `.tmp` parts into the pair of files."""
    tokens = f"{prefix}.bin"
    index = f"{prefix}.idx"
    write_index(f"{index}.tmp", dtype, f"{prefix}.sizes.tmp", f"{prefix}.docs.tmp")
    sync(f"{prefix}.bin.tmp")
    # The old index goes first and the new one comes last: at no moment is there a pair of which
    # one file is of other data.
    Path(index).unlink(missing_ok=True)
    os.replace(f"{tokens}.tmp", tokens)
    os.replace(f"{index}.tmp", index)
    sync(Path(prefix).parent)
    clear(prefix)


def clear(prefix: str) -> None:
    for part in (*PART_ENDINGS, ".idx"):
        Path(f"{prefix}{part}.tmp").unlink(missing_ok=True)


def write_index(
    path: str | Path, dtype: np.dtype[Any], sizes_path: str | Path, ends_path: str | Path
) -> None:
    """Write the .idx for the lengths and document ends in two files, block by block."""
    n = os.path.getsize(sizes_path) // 4
    m = os.path.getsize(ends_path) // 8
    code = next(code for code, code_dtype in CODES.items() if code_dtype == dtype)
    with (
        open(path, "wb", buffering=1 << 20, opener=own_file) as idx,
        open(sizes_path, "rb") as lengths,
        open(ends_path, "rb") as ends,
    ):
        sizes = FileColumn(lengths, "<i4", n)
        idx.write(HEADER.pack(MAGIC, 1, code, n, m + 1))
        for _, block in sizes.blocks():
            idx.write(block.data)

        # The byte at which each sequence begins: where it ends, less its length.
        position = 0
        for _, block in sizes.blocks():
            lengths_in_bytes = block.astype(np.int64) * dtype.itemsize
            stops = position + np.cumsum(lengths_in_bytes)
            pointers = stops - lengths_in_bytes
            idx.write(pointers.astype("<i8", copy=False).data)
            position = int(stops[-1])

        # The document index begins with 0.
        idx.write(np.zeros(1, "<i8").data)
        for _, block in FileColumn(ends, "<i8", m).blocks():
            idx.write(block.data)
        idx.flush()
        os.fsync(idx.fileno())
