"""`meshwright preprocess`: text to token files, on all cores of one machine.

After a kill the same command continues (journal.py) and ends with the same bytes. With --shard I/N
it writes the I-th of N parts of the input, which `meshwright data merge` joins.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from meshwright.base.console import fit
from meshwright.base.errors import UserError, bad_data
from meshwright.base.host import cores
from meshwright.base.progress import SkippedLines, new_bar
from meshwright.base.version import our_version
from meshwright.config.fields import spelling
from meshwright.config.problem import SettingsError, stated
from meshwright.config.schema import TokenizerFlags
from meshwright.config.text_inputs import SEPARATOR, Preprocess, PreprocessConfig
from meshwright.data import tokenizers
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer, is_made, token_dtype
from meshwright.data.text.encoder import Encoded, Encoder
from meshwright.data.text.folders import SkipReport
from meshwright.data.text.inputs import Input, Inputs, find_inputs
from meshwright.data.text.journal import Journal, has_parts, open_journal
from meshwright.data.text.pieces import cut_inputs
from meshwright.data.text.reading import why_nothing
from meshwright.data.text.records import NOT_UTF8, options_of, shown
from meshwright.data.text.splitting import build_splitter
from meshwright.data.text.workers import encode_pieces
from meshwright.model import counts

MIB = 1 << 20
FEW_DOCUMENTS = 10  # so few are named, since --split divides no document
# Tokens.
SHORT_DOCUMENT = 32
LONG_DOCUMENT = 1_000_000


@dataclass
class Totals:
    """What has been encoded so far."""

    lengths: list[list[int]]  # tokens, sequences and documents of each key
    on_error: str = "stop"
    documents: int = 0
    bytes: int = 0
    bad: SkippedLines = field(default_factory=SkippedLines)
    passed: SkipReport = field(default_factory=SkipReport)  # by the workers
    started: float = field(default_factory=time.perf_counter)
    # documents and bytes of the interrupted run that this one continues
    before: tuple[int, int] = (0, 0)
    printed: int = -1  # documents in the last line of progress

    def line(self) -> str:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        documents_before, bytes_before = self.before
        documents = (self.documents - documents_before) / seconds
        megabytes = (self.bytes - bytes_before) / MIB / seconds
        return (
            f"Processed {self.documents} documents ({documents:.2f} docs/s, {megabytes:.2f} MB/s)."
        )

    def state(self, pieces: int) -> dict[str, Any]:
        """Return what the journal notes after so many pieces."""
        return {
            "pieces": pieces,
            "documents": self.documents,
            "bytes": self.bytes,
            "bad": dict(self.bad),
            "passed": vars(self.passed),
            "lengths": self.lengths,
            "on_error": self.on_error,
            "lines": self.bad.lines,
        }

    def continues(self, state: dict[str, Any]) -> bool:
        """Return whether this run's --on-error would have given the same state."""
        depends = bool(state["bad"]) or NOT_UTF8 in state["passed"]["counts"]
        return state["on_error"] == self.on_error or not depends

    def restore(self, state: dict[str, Any]) -> None:
        self.documents, self.bytes = self.before = (state["documents"], state["bytes"])
        self.bad = SkippedLines(
            {kind: (count, first) for kind, (count, first) in state["bad"].items()}
        )
        self.bad.lines = state["lines"]
        self.passed = SkipReport(
            **{**state["passed"], "counts": Counter(state["passed"]["counts"])}
        )
        self.lengths = state["lengths"]

    def add_piece(self, encoded: Encoded) -> None:
        """Count a piece; raise for the error that stops the run."""
        if encoded.complaint:
            raise bad_data(f"{encoded.complaint} (nothing was written)")
        self.bad.lines += encoded.lines
        for reason, (count, place) in encoded.bad.items():
            self.bad.count(reason, count, "" if reason in self.bad else str(place))
        self.documents += encoded.documents
        self.bytes += encoded.bytes
        self.passed += encoded.passed


def preprocess(config: PreprocessConfig, stdout: TextIO, stderr: TextIO) -> list[str]:
    """Write a pair of files for each key, <prefix>_<key>_document or _sentence; return these."""
    started = time.perf_counter()
    preparation = PreprocessPlan(config, stdout, stderr)
    if not preparation.is_done(stdout):
        say_to_scripts(f"Time to startup: {time.perf_counter() - started:.2f}", stdout)
        totals = Share(preparation, stdout, stderr).encode_all()
        report(preparation, totals, stdout, stderr)
    return preparation.prefixes


def say_to_scripts(line: str, stdout: TextIO) -> None:
    """Print one of Megatron's lines, which scripts read; a terminal is spared them."""
    if not stdout.isatty():
        print(line, file=stdout, flush=True)


class PreprocessPlan:
    """A command that has been checked: its inputs, tokenizer and outputs, and their identity."""

    def __init__(self, config: PreprocessConfig, stdout: TextIO, stderr: TextIO) -> None:
        p = config.preprocess
        self.config = config
        # The part of the input that is encoded: all of it is the first of one.
        self.shard = (p.shard.number - 1, p.shard.count) if p.shard else (0, 1)

        # The inputs.
        self.inputs = find_inputs(p)
        if p.shard and any(source.is_stream and not source.bytes for source in self.inputs.inputs):
            raise SettingsError(
                f"{stated(p, 'shard')} divides files, not standard input, a pipe or hf://; leave it out"
            )
        for line in self.inputs.opened():
            print(f"Opening {line}", file=stdout)

        # The tokenizer, whose lines are those of Megatron's tool.
        if p.dataset_impl != "mmap":
            print(
                f"--dataset-impl {p.dataset_impl}: written as mmap, which every loader reads",
                file=stderr,
            )
        named = config.tokenizer.tokenizer
        say_to_scripts(
            f"> building {named or config.tokenizer.tokenizer_type} tokenizer ...", stdout
        )
        # The tokenizer's files may have changed.
        cached_tokenizer.cache_clear()
        self.tokenizer = tokenizer = cached_tokenizer(config.tokenizer)
        tokenizers.fastest_encoder(tokenizer)
        if hint := tokenizers.missing_speed(tokenizer):
            print(f"note: {hint}, with the same ids", file=stderr)
        padded = counts.padded_size(tokenizer.size, 128, 1, None)
        say_to_scripts(tokenizers.padding_line(tokenizer.size, padded), stdout)
        say_to_scripts(f"Vocab size: {tokenizer.size}", stdout)
        say_to_scripts(f"Output prefix: {p.output_prefix}", stdout)
        if p.split_sentences:
            # raises if it lacks the language
            build_splitter(p.sentence_splitter, p.lang, p.keep_newlines)

        # The names of the outputs.
        self.keys = list(dict.fromkeys(p.json_keys))
        self.dtype = token_dtype(tokenizer.size)
        names = [re.sub(r"\s", "_", key) for key in self.keys]
        level = "sentence" if p.split_sentences else "document"
        self.stem = f"{p.output_prefix}{p.shard.suffix if p.shard else ''}"
        self.prefixes = [f"{self.stem}_{name}_{level}" for name in names]
        if len(set(names)) < len(names):
            raise UserError(
                f"--json-keys {' '.join(map(repr, self.keys))} differ in blanks alone; give them one by one"
            )
        if names != self.keys:
            print(
                f"note: in the names of the files, _ stands for the blanks of {', '.join(self.keys)}",
                file=stderr,
            )

        # What makes this command another than one that was interrupted.
        self.states = [hash_of(s.files) if s.files else state_of(s) for s in self.inputs.inputs]
        self.tokenizer_identity = [
            tokenizer.name,
            tokenizer.size,
            tokenizers.file_hashes(tokenizer),
        ]
        free = ("workers", "log_interval", "input", "on_error", "overwrite")
        self.settings = {k: v for k, v in asdict(p).items() if k not in free}

    @property
    def identity(self) -> dict[str, Any]:
        """What is equal in a run that continues an interrupted one."""
        # Without on_error: `Totals.continues` sees whether the state depends on it.
        inputs = enumerate(self.inputs.inputs, start=1)
        return {
            "version": our_version(),
            "tokenizer": self.tokenizer_identity,
            "readers": self.inputs.readers,
            **{spelling(name): value for name, value in self.settings.items()},
            "states": self.states,
            **{
                f"--input {n}": [source.path, source.found, source.bytes, len(source.files)]
                for n, source in inputs
            },
        }

    @functools.cached_property
    def made_from(self) -> dict[str, Any]:
        """What decides the content of the output; first used before the input is read."""
        p = self.config.preprocess
        idle = ("input", "output_prefix", "dataset_impl", "workers", "log_interval", "overwrite")
        defaults = asdict(Preprocess())
        settings = {k: v for k, v in asdict(p).items() if k not in idle and v != defaults[k]}
        # Records name the splitter "rules", though it is the default, and leave out Punkt.
        if p.split_sentences:
            settings.pop("sentence_splitter", None)
            settings |= {"sentence_splitter": "rules"} if p.sentence_splitter == "rules" else {}
        inputs = self.inputs.identity()
        return {
            "command": "preprocess",
            "inputs": inputs,
            "settings": settings,
            "tokenizer": self.tokenizer_identity,
        }

    def is_done(self, stdout: TextIO, dry_run: bool = False) -> bool:
        """Return whether the same command made the output; refuse to replace another one."""
        overwrite = self.config.preprocess.overwrite
        # A list, so that each prefix is looked at, and a file of another origin is refused.
        if not all([is_made(prefix, self.made_from, overwrite) for prefix in self.prefixes]):
            return False
        for prefix in self.prefixes:
            if not dry_run and not tokenizers.tokenizer_folder(prefix).exists():
                tokenizers.keep_beside(self.tokenizer, prefix)
            print(f"{prefix}.bin/.idx is already there, unchanged", file=stdout)
        return True

    def keep_beside(self, writer: Writer) -> None:
        """Write what belongs beside a pair of files, just before it gets its name."""
        writer.keep_origin(self.made_from)
        tokenizers.keep_beside(self.tokenizer, writer.prefix)

    def find_changed(self) -> str:
        """Name an input that changed while it was read: half of it may be of another version."""
        for source, state in zip(self.inputs.inputs, self.states, strict=True):
            if not source.bytes or state_of(source) == state:
                continue
            sizes = ""
            if not source.files:
                size, _ = _size_and_time(source.path)
                if size != source.bytes:
                    sizes = f" ({source.bytes:,} bytes then, {size:,} now)"
            return f"{shown(source.folder or source.path)} has changed while it was read{sizes}"
        return ""

    def read_inputs(self, totals: Totals) -> Inputs:
        """Return the inputs with what was left out of them."""
        return replace(self.inputs, passed=self.inputs.passed + totals.passed, bad=totals.bad)

    def require_tokens(self, totals: Totals) -> None:
        """Raise, with the reason as far as it is known, if a key has no token at all."""
        p = self.config.preprocess
        for key, (tokens, _, _) in zip(self.keys, totals.lengths, strict=True):
            if not tokens:
                reasons = why_nothing(self.read_inputs(totals), p)
                reason = "".join(f" ({line})" for line in reasons)
                paths = ", ".join(map(shown, p.input))
                what = f"no token under {key!r} in {paths}{reason}: nothing was written"
                if p.shard:
                    what = f"no token under {key!r} in part {p.shard} of {paths}{reason}: nothing was written"
                    what += "; the other parts can be merged without it"
                raise bad_data(what)


class Share:
    """One process's share of the work: the whole input, or one shard of it."""

    def __init__(self, preparation: PreprocessPlan, stdout: TextIO, stderr: TextIO) -> None:
        self.preparation = preparation
        self.stdout = stdout
        self.stderr = stderr
        self.settings = preparation.config.preprocess
        self.paths = preparation.prefixes
        self.progress_path = Path(f"{preparation.stem}.progress")
        self.totals = Totals([[0, 0, 0]] * len(self.paths), self.settings.on_error)
        sizes = [max(source.bytes, 1) for source in preparation.inputs.inputs]
        self.offsets = [0, *itertools.accumulate(sizes)]  # of each input in all of them, in bytes
        # A shard is a range of bytes of all inputs together.
        number, count = preparation.shard
        total = self.offsets[-1]
        self.begin = total * number // count
        self.end = total * (number + 1) // count

    def encode_all(self) -> Totals:
        """Encode all pieces and write the pairs of files."""
        preparation = self.preparation
        with ExitStack() as stack:
            # Continue from the journal, or begin.
            journal = stack.enter_context(
                open_journal(self.progress_path, preparation.identity, self.stderr)
            )
            state = self.restore(journal)
            writers = []
            for path, lengths in zip(self.paths, self.totals.lengths, strict=True):
                writer = Writer(path, preparation.dtype, tuple(lengths) if state else None)
                writer.is_kept = True
                writers.append(stack.enter_context(writer))

            # Encode, and publish the files if the input is still the same.
            try:
                self.encode_pieces(journal, writers, state["pieces"] if state else 0)
                preparation.require_tokens(self.totals)
                if changed := preparation.find_changed():
                    # Start from the beginning next time.
                    journal.state = None
                    raise bad_data(f"{changed}; start again when it is complete")
                for writer in writers:
                    preparation.keep_beside(writer)
                    writer.finish()
            except UserError:
                # Keep what can be continued.
                journal.is_kept = journal.state is not None
                for writer in writers:
                    writer.is_kept = journal.is_kept
                raise
            journal.is_kept = False
        return self.totals

    def restore(self, journal: Journal) -> dict[str, Any] | None:
        """Return the state of the interrupted run to continue, if its files are there."""
        state = journal.state
        if state is None:
            return None
        size = np.dtype(self.preparation.dtype).itemsize
        is_there = all(
            has_parts(*part, size) for part in zip(self.paths, state["lengths"], strict=True)
        )
        if not is_there or not self.totals.continues(state):
            return None
        self.totals.restore(state)
        print(
            f"continuing after {self.totals.documents:,} documents of an interrupted run",
            file=self.stderr,
        )
        return state

    def encode_pieces(self, journal: Journal, writers: list[Writer], done: int) -> None:
        """Encode and append all pieces but the first `done`."""
        p = self.settings
        preparation = self.preparation
        todo = islice(cut_inputs(preparation.inputs.inputs, p, *preparation.shard), done, None)
        make = functools.partial(build_encoder, preparation.config, preparation.dtype)
        stop = p.on_error != "skip"
        self.stdout.flush()
        with (
            closing(encode_pieces(todo, make, self.worker_count(), stop)) as results,
            self.progress() as show,
        ):
            for number, (piece, encoded, tokens) in enumerate(results, done + 1):
                self.totals.add_piece(encoded)
                for writer, ids, sizes, ends in zip(
                    writers, tokens, encoded.sizes, encoded.ends, strict=True
                ):
                    writer.append(ids, sizes, ends + writer.sequences)
                self.totals.lengths = [[w.tokens, w.sequences, w.documents] for w in writers]
                if journal.is_due():
                    for writer in writers:
                        writer.flush()
                    journal.note(self.totals.state(number))
                show(self.offsets[piece.number] + piece.done - self.begin)

    def worker_count(self) -> int:
        """Return --workers, by default one for each core, but 1 for a few pieces."""
        wanted = self.settings.workers or cores()
        is_small = self.offsets[-1] < 4 * MIB
        is_text = not any(
            source.is_stream or source.is_table for source in self.preparation.inputs.inputs
        )
        return 1 if is_small and is_text else wanted

    @contextmanager
    def progress(self) -> Iterator[Callable[[int], None]]:
        """Print Megatron's line every --log-interval documents; on a terminal show a bar."""
        totals = self.totals
        stderr = self.stderr
        interval = self.settings.log_interval
        if not stderr.isatty():
            passed = totals.documents // interval

            def print_line(done: int) -> None:
                nonlocal passed
                if totals.documents // interval > passed:
                    passed = totals.documents // interval
                    totals.printed = totals.documents
                    print(totals.line(), file=stderr, flush=True)

            yield print_line
            return
        total = (
            self.end - self.begin
            if all(source.bytes for source in self.preparation.inputs.inputs)
            else None
        )
        bar, task = new_bar(
            "{task.description}", "bar", "percent", "left", total=total, file=stderr
        )
        with bar:
            yield lambda done: bar.update(task, completed=done, description=totals.line())


def build_encoder(config: PreprocessConfig, dtype: Any) -> Encoder:
    """Return a worker's encoder; a forked worker finds the tokenizer built."""
    p = config.preprocess
    tokenizer = cached_tokenizer(config.tokenizer)
    encode = tokenizers.fastest_encoder(tokenizer)
    eod = tokenizer.eod if p.append_eod else None
    split = None
    if p.split_sentences:
        split = build_splitter(p.sentence_splitter, p.lang, p.keep_newlines)
    return Encoder(encode, eod, options_of(p), dtype, split, p.document_length)


@functools.lru_cache(maxsize=1)
def cached_tokenizer(settings: TokenizerFlags) -> tokenizers.Tokenizer:
    return tokenizers.build_tokenizer(settings)


def state_of(source: Input) -> str:
    """Return a hash of the sizes and times of an input's files, something new for a pipe."""
    if source.revision:
        return source.revision
    if source.is_stream and not source.bytes:
        return str(time.time_ns())
    paths = [path for path, _, _ in source.files] or [source.path]
    return hash_of(tuple((path, *_size_and_time(path)) for path in paths))


def hash_of(files: tuple[tuple[str, int, int], ...]) -> str:
    return hashlib.sha256(repr(files).encode(errors="surrogateescape")).hexdigest()


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        about = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return about.st_size, about.st_mtime_ns


def report(preparation: PreprocessPlan, totals: Totals, stdout: TextIO, stderr: TextIO) -> None:
    """Print what was written and what was not, and advice about the documents."""
    p = preparation.config.preprocess

    # The last line of progress, and what was left out.
    if totals.printed != totals.documents:
        print(totals.line(), file=stderr)
    for line in preparation.read_inputs(totals).left_out(p.on_error, p.encoding):
        print(line, file=stderr)

    # Each pair of files. Without --split-sentences a sequence is a document with text.
    dtype = np.dtype(preparation.dtype)
    is_plain = any(source.is_plain for source in preparation.inputs.inputs)
    for prefix, (tokens, sequences, _) in zip(preparation.prefixes, totals.lengths, strict=True):
        lacking = largest = ""
        advice: Iterator[str] = iter(())
        if not p.split_sentences:
            sizes = Indexed(prefix).sizes
            largest = f" (the largest document has {sizes.max():,})"
            advice = advise_on_documents(sizes, p.document_length, is_plain)
            if blank := totals.documents - sequences:
                lacking = f" ({blank:,} without text, which have no sequence)"
        line = (
            f"wrote {prefix}.bin/.idx: "
            f"{totals.documents:,} documents{lacking}, "
            f"{sequences:,} sequences, "
            f"{tokens:,} tokens{largest}, "
            f"{tokens * dtype.itemsize:,} bytes ({dtype.name})"
        )
        print(fit(line, stdout), file=stdout)
        for line in advice:
            print(fit(line, stderr), file=stderr)


def advise_on_documents(
    sizes: npt.NDArray[np.int32], longest: int | None, is_plain: bool
) -> Iterator[str]:
    """Say what to do about documents that are too few to be divided by --split, short or very long.

    Short ones are remarked in a plain text, which may be meant to be divided otherwise.
    """
    if sizes.max() > LONG_DOCUMENT:
        lines = f"divide them by lines {SEPARATOR}, or name the line between them with --document-separator"
        cure = lines if is_plain else "give each a line or row of its own"
        yield f"warning: the largest document has {sizes.max():,} tokens; if it was meant as several, {cure}"
    if len(sizes) < FEW_DOCUMENTS:
        number = "1 document"
        no_text = "no --split can keep text of it"
        if len(sizes) > 1:
            number = f"{len(sizes)} documents"
            no_text = "--split can only keep whole ones of them"
        length = max(longest // 2, 1) if longest else 4000
        cut = f"--document-length {length} cuts longer ones into parts"
        yield f"note: {number}: {no_text} for validation; {cut}"
    elif is_plain and 2 * np.count_nonzero(sizes < SHORT_DOCUMENT) > len(sizes):
        line = f"{len(sizes):,} documents, half of them of {np.median(sizes):,.0f} tokens or fewer"
        again = "if headings or single lines were meant to stay with their text, try another --document-separator"
        yield f"note: {line}: {again}"
