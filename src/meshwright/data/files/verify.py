"""`meshwright data verify`: report everything that is wrong with token files.

Both files are read once, in blocks, so memory does not grow with them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meshwright.base.console import fit, notice
from meshwright.base.errors import BAD_DATA, UserError, bad_data
from meshwright.base.files import checksums, replacing, writing
from meshwright.base.hints import near_prefix
from meshwright.base.progress import Clock, progress_bar
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TokenizerFlags
from meshwright.data import tokenizers
from meshwright.data.files.indexed import FileColumn, Index, Indexed, Tally
from meshwright.data.index_cache import INVALID, open_entry

# calls a function for each block of a file
Digest = Callable[[BinaryIO, Callable[[int, bytes], None]], None]


@dataclass
class Findings:
    """The problems of one pair of files, remarks on it, and its contents."""

    prefix: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sequences: int = 0
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    dtype: str = ""
    format: str = ""
    with_eod: str = ""
    crc32: dict[str, str] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)  # path: digest

    def line(self, speed: str) -> str:
        sums = [f"crc32 of {part} {crc}" for part, crc in self.crc32.items()]
        return (
            f"{self.prefix}: intact: "
            f"{self.documents:,} documents, "
            f"{self.sequences:,} sequences, "
            f"{self.tokens:,} tokens ({self.dtype}, {self.format} format), "
            f"{self.with_eod}{', '.join(sums)}, {speed}"
        )


def check_pair(
    prefix: str,
    vocab_size: int | None,
    eod: int | None,
    hashes: bool,
    advance: Callable[[int], None],
) -> Findings:
    """Check one pair of files in full. `hashes`: compute the SHA-256 of both too."""
    findings = Findings(prefix)

    def digest(
        file: BinaryIO, inspect: Callable[[int, bytes], None] = lambda start, block: None
    ) -> None:
        def shown(start: int, block: bytes) -> None:
            inspect(start, block)
            advance(len(block))

        crc, sha = checksums(file, hashes, shown)
        findings.crc32[Path(file.name).suffix] = crc
        if hashes:
            findings.sha256[file.name] = sha

    try:
        with open(f"{prefix}.idx", "rb") as idx:
            digest(idx)
            index = Index(prefix, idx)
            findings.dtype = index.dtype.name
            findings.format = index.format
            findings.sequences = len(index.sizes)
            findings.documents = max(len(index.borders) - 1, 0)
            findings.problems += [f"{prefix}.idx: {fault}" for fault in index.faults()]
            is_sound = not findings.problems
            findings.tokens = index.described_tokens if is_sound else 0
            with open(f"{prefix}.bin", "rb") as file:
                check_tokens(file, index, is_sound, vocab_size, eod, findings, digest)
    except FileNotFoundError as error:
        has_one = Path(f"{prefix}.bin").exists() or Path(f"{prefix}.idx").exists()
        hint = "" if has_one else near_prefix(prefix)
        findings.problems.append(f"{error.filename} does not exist{hint}")
    except OSError as error:
        findings.problems.append(
            f"{error.filename or prefix} cannot be read: {error.strerror or error}"
        )
    except UserError as error:
        findings.problems.append(str(error))
    return findings


def check_tokens(
    file: BinaryIO,
    index: Index,
    is_sound: bool,
    vocab: int | None,
    eod: int | None,
    findings: Findings,
    digest: Digest,
) -> None:
    """Check the .bin's length, ids and ends of documents. `is_sound`: the index is right."""
    itemsize = index.dtype.itemsize
    findings.bytes = os.fstat(file.fileno()).st_size
    tokens = FileColumn(file, index.dtype, findings.bytes // itemsize)
    if is_sound and (fault := index.length_fault(findings.bytes)):
        findings.problems.append(find_uncounted_ends(index, tokens, findings, eod) or fault)
        is_sound = False
    strange = Tally()
    last = Counter[int]()
    ends = index.document_ends() if is_sound else iter(())
    pending = np.zeros(0, np.int64)

    def inspect(begin: int, block: bytes) -> None:
        nonlocal pending
        start = begin // itemsize
        ids = np.frombuffer(block, index.dtype, len(block) // itemsize)
        stop = start + len(ids)
        strange.add(start, (ids < 0) | (ids >= vocab if vocab else False))

        # The last ids of the documents that end in this block; `pending` holds ends to come.
        while not len(pending) or pending[-1] <= stop:
            more = next(ends, None)
            if more is None:
                break
            pending = np.concatenate([pending, more])
        in_block = int(np.searchsorted(pending, stop, side="right"))
        places = pending[:in_block] - 1 - start
        last.update(ids[places].tolist())
        pending = pending[in_block:]

    digest(file, inspect)
    if strange.count:
        where = ""
        if is_sound:
            where = f", in sequence {Indexed(findings.prefix).sequence_at(strange.first):,}"
        token = int(tokens.read(strange.first, strange.first + 1)[0])
        allowed = f"0 ... {vocab - 1}, the tokenizer's" if vocab else "0 and above"
        findings.problems.append(
            f"{findings.prefix}.bin: {strange.count:,} ids are not in {allowed}; the first is {token} at token "
            f"{strange.first:,}{where}"
        )
    findings.with_eod = describe_ends(last, eod, findings)


def find_uncounted_ends(
    index: Index, tokens: FileColumn, findings: Findings, eod: int | None
) -> str:
    """Describe the damage of Megatron-LM from 26 June to 5 August 2023, "" if there is none.

    It wrote ends of documents into .bin, but into no length: the k-th document with text, counted
    from 1, ends k tokens later than its index says. The first thousand documents show it.
    """
    surplus = len(tokens) - findings.tokens
    documents = sum(map(len, index.document_ends()))
    if surplus != documents or not documents or findings.bytes % index.dtype.itemsize:
        return ""
    ends = next(index.document_ends())[:1000]
    last_ids = {int(tokens.read(k, k + 1)[0]) for k in (ends + np.arange(len(ends))).tolist()}
    if len(last_ids) != 1 or (eod is not None and last_ids != {eod}):
        return ""
    return (
        f"{findings.prefix}: made with --append-eod by a Megatron-LM of 26 June to 5 August 2023: the {documents:,} "
        f"end-of-document ids ({last_ids.pop()}) are in .bin, but in no length of .idx, so every document after the "
        "first begins too early; preprocess the text again"
    )


def describe_ends(last: Counter[int], eod: int | None, findings: Findings) -> str:
    """Say how many documents end with the end of document, or with the most frequent last id."""
    total = sum(last.values())
    if not total:
        return ""
    token = last.most_common(1)[0][0] if eod is None else eod
    count = last[token]
    if eod is None and count <= total // 2:
        return "no common end of documents, "
    if 0 < count < total:
        kind = "end-of-document id" if eod is not None else "most frequent last id"
        findings.notes.append(
            f"{findings.prefix}: {total - count:,} of {total:,} documents do not end with {token}, the {kind}: were "
            "files with and without --append-eod merged?"
        )
    share = "all" if count == total else f"{count / total:.2%}" if count else "none"
    return f"{share} of the documents end with {token}, "


# Checksum files, as sha256sum writes and reads them


def read_checksums(path: Path) -> dict[str, str]:
    """Return absolute path -> digest; the names in the file are relative to its folder."""
    out = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{{checksums={path}}} cannot be read: {getattr(error, 'strerror', error)}", BAD_DATA
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *]*(.+)", line.strip())
        if not match:
            what = f"{line[:80]!r} is not a line of sha256sum: 64 hexadecimal digits, a name"
            raise bad_data(f"{path}:{number}: {what}")
        out[str((path.parent / match[2]).resolve())] = match[1].lower()
    return out


def compare_checksums(path: Path, findings: Findings) -> None:
    expected = read_checksums(path)
    for name, digest in findings.sha256.items():
        wanted = expected.get(str(Path(name).resolve()))
        if wanted is None:
            findings.problems.append(f"{name} is not in {path}, the file of checksums")
        elif wanted != digest:
            findings.problems.append(
                f"{name} has the SHA-256 {digest}, but {path} says {wanted}; it is another file"
            )


def write_checksums(path: Path, digests: dict[str, str]) -> None:
    folder = path.parent.resolve()
    with writing(path, "--checksums"), replacing(path, typed=True) as file:
        for name, digest in digests.items():
            listed = Path(name).resolve()
            # With relative paths, the list and its files can be moved together.
            if listed.is_relative_to(folder):
                listed = listed.relative_to(folder)
            file.write(f"{digest}  {listed}\n".encode())


def damaged_caches(folder: Path) -> tuple[int, list[str]]:
    """Return the number of index cache entries beside the data, and what is wrong with them."""
    problems = []
    records = sorted((folder / "index-cache").glob("*.json"))
    for record in records:
        try:
            open_entry(record, in_full=True)
        except INVALID as error:
            problems.append(
                f"{record} is damaged ({error}); remove it, or a training builds it again"
            )
    return len(records), problems


def verify_pairs(prefixes: list[str], t: TokenizerFlags, checksums: Path | None) -> None:
    """Check all pairs and the index caches beside them; print the results; raise for any problem.

    Ids are compared with the tokenizer of the flags, or the one beside the data. The file
    `checksums` is compared if it exists, otherwise written once everything is intact.
    """
    compares = checksums is not None and checksums.exists()
    problems = 0
    digests = dict[str, str]()
    for prefix in prefixes:
        clock = Clock()
        size = 0
        for file in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
            if file.is_file():
                size += file.stat().st_size
        with progress_bar(Path(prefix).name, size) as advance:
            try:
                tokenizer = tokenizers.resolve_for_data(t, tokenizers.find_of_data([prefix]))
                wrong = list[str]()
            except UserError as error:
                tokenizer = None
                wrong = [str(error)]
            vocab, eod = (tokenizer.size, tokenizer.eod) if tokenizer else (t.vocab_size, None)
            findings = check_pair(prefix, vocab, eod, checksums is not None, advance)
            findings.problems += wrong
        if compares and checksums:
            compare_checksums(checksums, findings)
        for line in findings.notes:
            notice(f"note: {line}")
        print("\n".join(findings.problems) or findings.line(clock.speed(size)), flush=True)
        problems += len(findings.problems)
        digests |= findings.sha256
    # The index caches of their folders, each once.
    for folder in dict.fromkeys(Path(prefix).parent for prefix in prefixes):
        count, damaged = damaged_caches(folder)
        problems += len(damaged)
        if count and not damaged:
            print(f"{folder / 'index-cache'}: intact: {count} entries")
        for line in damaged:
            print(line)
    if problems:
        raise bad_data(f"{problems} problem{'s' * (problems > 1)}, listed above")
    if checksums and not compares:
        write_checksums(checksums, digests)
        line = f"wrote {checksums}: the SHA-256 of {len(digests)} files, which `sha256sum -c` reads too"
        print(fit(line))
