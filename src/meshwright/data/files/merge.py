"""`meshwright data merge`: join pairs of token files in constant memory.

The kernel copies the tokens, on some file systems by sharing the blocks; only lengths and document
borders pass through Python, block by block.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.base import origin
from meshwright.base.console import notice
from meshwright.base.errors import BAD_DATA, IO, UserError, bad_data
from meshwright.base.files import lock, make_folder
from meshwright.base.progress import progress_bar
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TokenizerFlags
from meshwright.data import tokenizers
from meshwright.data.files.indexed import BLOCK, FileColumn, Index, Indexed
from meshwright.data.files.writer import Writer, is_made, origin_path

# files copied at a time by --merge distributed: enough to hide the latency of a network disk
COPIES_AT_ONCE = 8
# what preprocess --shard calls its files; see InputShard.suffix
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{1,5})-of-(?P<count>[0-9]{1,5})(?P<key>_.+)")
MOST_NAMED = 5  # of the parts that are not merged
PROBE_TOKENS = 1 << 14  # tokens at both ends of each shard that are read again at the end
KERNEL_STEP = 1 << 27  # bytes asked of the kernel at a time, so that the bar moves
# The kernel cannot copy between these two files, but reading and writing can.
CANNOT_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


@dataclass(frozen=True)
class Shard:
    prefix: str
    dtype: np.dtype[Any]
    tokens: int
    sequences: int
    documents: int


def find_pairs(folder: str, output_prefix: str) -> list[str]:
    """Return the prefix of every pair of files in a folder, sorted, but for an earlier output."""
    root = Path(folder)
    if not root.is_dir():
        raise SettingsError(
            f"{{input={folder}}} is not a folder; give the one that holds the .bin/.idx files",
            BAD_DATA,
        )
    # A file without its other half is a mistake, or is still being copied.
    indices = {path.stem for path in root.glob("*.idx")}
    tokens = {path.stem for path in root.glob("*.bin")}
    lone = sorted(indices ^ tokens)
    if lone:
        what = ".idx without a .bin" if lone[0] in indices else ".bin without an .idx"
        more = f" ({len(lone)} such files)" if len(lone) > 1 else ""
        raise bad_data(f"{root / lone[0]} is a {what}{more}; complete it, or move it away")
    prefixes = [str(root / name) for name in sorted(indices)]
    others = [prefix for prefix in prefixes if not is_same_pair(prefix, output_prefix)]
    if len(others) < len(prefixes):
        notice(f"{output_prefix} is the output, so it is not read")
    if not others:
        raise SettingsError(f"{{input={folder}}} holds no pair of .bin and .idx files", BAD_DATA)
    return others


def is_same_pair(a: str, b: str) -> bool:
    return Path(f"{a}.bin").resolve() == Path(f"{b}.bin").resolve()


def merge_pairs(
    prefixes: list[str], output_prefix: str, together: bool, overwrite: bool = False
) -> Shard | None:
    """Join pairs of files made with one tokenizer, and keep it beside the result.

    Return None if the same pairs were joined there before.
    """
    # This raises an error if the pairs were made by different tokenizers.
    tokenizer_folder = tokenizers.find_of_data(prefixes)
    lacking = [prefix for prefix in prefixes if not tokenizers.tokenizer_folder(prefix).is_dir()]
    files = [f"{prefix}{end}" for prefix in prefixes for end in (".bin", ".idx")]
    made_from = {
        "command": "data merge",
        "inputs": origin.inputs_of([file for file in files if Path(file).exists()]),
    }
    # else `join_pairs` refuses it
    is_other = not any(is_same_pair(prefix, output_prefix) for prefix in prefixes)
    if is_other and is_made(output_prefix, made_from, overwrite):
        return None
    for line in lacking_parts(prefixes):
        notice(line)
    if tokenizer_folder and lacking:
        notice(
            f"{lacking[0]} does not say which tokenizer made it, so none is kept beside {output_prefix}"
        )

    def keep(writer: Writer) -> None:
        writer.keep_origin(made_from)
        shutil.rmtree(tokenizers.tokenizer_folder(output_prefix), ignore_errors=True)
        if tokenizer_folder and not lacking:
            tokenizer = tokenizers.build_tokenizer(TokenizerFlags(), tokenizer_folder)
            tokenizers.keep_beside(tokenizer, output_prefix)

    return join_pairs(prefixes, output_prefix, together, keep)


def lacking_parts(prefixes: list[str]) -> list[str]:
    """Return a warning for each input that `preprocess --shard` divided if a part is not here.

    A part without text has no files, so that this is no error.
    """
    found = defaultdict[tuple[str, str, int], set[int]](set)
    for prefix in prefixes:
        made_from, _ = origin.read_origin(origin_path(prefix))
        settings = made_from.get("settings")
        shard = settings.get("shard") if isinstance(settings, dict) else None
        # Files may have been renamed since; then their names say nothing of what belongs together.
        name = PART_NAME.fullmatch(Path(prefix).name)
        if shard and name:
            found[name["stem"], name["key"], int(name["count"])].add(int(name["number"]))
    out = []
    for (stem, key, count), numbers in found.items():
        missing = [f"{n}/{count}" for n in range(1, count + 1) if n not in numbers]
        if not missing:
            continue
        named = ", ".join(missing[:MOST_NAMED])
        if len(missing) > MOST_NAMED:
            named += ", ..."
        parts = f"{len(missing):,} of the {count:,} parts of {stem}{key}"
        out.append(
            f"warning: {parts} are not merged (--shard {named}); merge again with them, unless they have no text"
        )
    return out


def join_pairs(
    prefixes: list[str],
    output_prefix: str,
    together: bool,
    keep: Callable[[Writer], None],
) -> Shard:
    """Join pairs of files in the given order, and compare what was written with them.

    `keep` writes what belongs beside the files, just before they get their names.
    """
    if any(is_same_pair(prefix, output_prefix) for prefix in prefixes):
        raise SettingsError(
            f"{{output_prefix={output_prefix}}} is one of the files that are read; choose another"
        )
    shards = [measure_pair(prefix) for prefix in prefixes]
    dtype = shards[0].dtype
    for shard in shards:
        if shard.dtype != dtype:
            raise bad_data(
                f"{shards[0].prefix} has {dtype.name} tokens and {shard.prefix} {shard.dtype.name}: their vocabularies "
                "lie on either side of 65,500 ids; preprocess one of the two with the other's tokenizer"
            )
    size = sum(shard.tokens for shard in shards) * dtype.itemsize
    folder = Path(output_prefix).resolve().parent
    make_folder(folder, "--output-prefix")
    with lock(Path(f"{output_prefix}.lock")), Writer(output_prefix, dtype) as writer:
        # A sequence takes its length (int32) and pointer (int64), a document its border (int64).
        index = sum(12 * shard.sequences + 8 * shard.documents for shard in shards)
        # leftovers of a killed merge are gone now
        make_folder(folder, "--output-prefix", size + 2 * index)
        places = [append_index(writer, shard) for shard in shards]
        # The index is small and comes first: it says where each shard's tokens belong.
        with writer.reported():
            copy_all(shards, places, writer.files[".bin"].fileno(), together)
        keep(writer)
    check_result(shards, output_prefix)
    return Shard(output_prefix, dtype, writer.tokens, writer.sequences, writer.documents)


def measure_pair(prefix: str) -> Shard:
    """Open a pair, which checks it in full, and return its sizes."""
    indexed = Indexed(prefix, in_full=True)
    return Shard(prefix, indexed.dtype, len(indexed.tokens), len(indexed), len(indexed.doc_idx) - 1)


def append_index(writer: Writer, shard: Shard) -> int:
    """Append lengths and document borders; return the byte where the shard's tokens belong."""
    before = writer.sequences
    nothing = np.zeros(0, np.int64)
    place = writer.reserve(shard.tokens, nothing, nothing)
    with open(f"{shard.prefix}.idx", "rb") as idx:
        index = Index(shard.prefix, idx)
        for _, sizes in index.sizes.blocks():
            writer.reserve(0, sizes, nothing)
        # The first border, 0, is where the shard before ends.
        for start, borders in index.borders.blocks():
            writer.reserve(0, nothing, (borders if start else borders[1:]) + before)
    return place


def copy_all(shards: list[Shard], places: list[int], target: int, together: bool) -> None:
    """Copy each shard's bytes to its place, several at a time if `together`."""
    sizes = [shard.tokens * shard.dtype.itemsize for shard in shards]
    with (
        progress_bar("merging", sum(sizes)) as advance,
        ThreadPoolExecutor(COPIES_AT_ONCE if together else 1) as pool,
    ):
        prefixes = [shard.prefix for shard in shards]
        # An error cancels the rest.
        list(pool.map(copy_tokens, prefixes, repeat(target), places, sizes, repeat(advance)))


def copy_tokens(
    prefix: str, target: int, place: int, size: int, advance: Callable[[int], None]
) -> None:
    with open(f"{prefix}.bin", "rb") as source:
        done = 0
        by_kernel = hasattr(os, "copy_file_range")
        while done < size:
            # The kernel copies as long as it can; after that, we read and write.
            copied = 0
            if by_kernel:
                try:
                    count = min(KERNEL_STEP, size - done)
                    copied = os.copy_file_range(source.fileno(), target, count, done, place + done)
                except OSError as error:
                    if error.errno not in CANNOT_COPY:
                        raise
                # Some network disks return 0.
                by_kernel = copied > 0
            if not by_kernel:
                data = os.pread(source.fileno(), min(BLOCK, size - done), done)
                copied = os.pwrite(target, data, place + done)
            if not copied:
                raise bad_data(f"{prefix}.bin has become shorter: {done:,} of {size:,} bytes")
            done += copied
            advance(copied)


def check_result(shards: list[Shard], output_prefix: str) -> None:
    """Open the merged pair, and compare the first and last tokens of each shard."""
    merged = measure_pair(output_prefix)
    place = 0
    sequences = sum(shard.sequences for shard in shards)
    documents = sum(shard.documents for shard in shards)
    if (merged.sequences, merged.documents) != (sequences, documents):
        wrong = f"{output_prefix}.idx holds {merged.sequences:,} sequences, not those of its parts"
        raise UserError(f"{wrong}: merge again", IO)
    # A shard at a wrong place would differ at its ends.
    with open(f"{output_prefix}.bin", "rb") as target:
        result = FileColumn(target, merged.dtype, merged.tokens)
        for shard in shards:
            with open(f"{shard.prefix}.bin", "rb") as source:
                tokens = FileColumn(source, shard.dtype, shard.tokens)
                for start in {0, max(shard.tokens - PROBE_TOKENS, 0)}:
                    stop = min(start + PROBE_TOKENS, shard.tokens)
                    expected = tokens.read(start, stop)
                    written = result.read(place + start, place + stop)
                    if not np.array_equal(expected, written):
                        raise UserError(
                            f"{output_prefix}.bin differs from {shard.prefix}.bin at token {place + start:,}: "
                            "the disk or another program that writes there is at fault; merge again",
                            IO,
                        )
            place += shard.tokens
