"""`meshwright preprocess`: text to token files, on all cores of one machine or of several.

After a kill the same command continues (journal.py) and ends with the same bytes. Started as
several ranks, each writes its range of the input as a pair of files of its own, and rank 0 merges
these pairs as `meshwright data merge` does.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from meshwright import origin, tokenizers
from meshwright.data.files.writer import Writer, is_made, token_dtype
from meshwright.data.prepare import sentences
from meshwright.data.prepare.encoding import Encoded, Encoder
from meshwright.data.prepare.folders import PassedOver, shown
from meshwright.data.prepare.inputs import Found, Input, find
from meshwright.data.prepare.journal import Journal, has_parts
from meshwright.data.prepare.text import Piece, count_lines, damage_message, describe_place, pieces
from meshwright.data.prepare.workers import encode_pieces
from meshwright.data.tools.merge import join
from meshwright.errors import UserError, bad_data
from meshwright.host import cores
from meshwright.progress import SkippedLines, new_bar
from meshwright.ranks.compare import require_equal
from meshwright.ranks.connect import join_ranks
from meshwright.ranks.team import Team
from meshwright.ranks.world import World
from meshwright.settings.fields import spelling
from meshwright.settings.schema import TokenizerFlags
from meshwright.settings.text_inputs import Preprocess, PreprocessConfig
from meshwright.version import our_version

MIB = 1 << 20
WAIT_MINUTES = 7 * 24 * 60  # faster ranks wait for the slowest one


@dataclass
class Totals:
    """Totals of the documents encoded so far."""

    documents: int = 0
    bytes: int = 0
    bad: SkippedLines = field(default_factory=SkippedLines)
    passed: PassedOver = field(default_factory=PassedOver)  # by the workers
    started: float = field(default_factory=time.perf_counter)
    before: tuple[int, int] = (0, 0)  # documents and bytes of the interrupted run that this one continues

    def line(self) -> str:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        documents, speed = self.documents - self.before[0], (self.bytes - self.before[1]) / MIB / seconds
        return f"Processed {self.documents} documents ({documents / seconds:.2f} docs/s, {speed:.2f} MB/s)."


def run(config: PreprocessConfig, stdout: TextIO, stderr: TextIO, world: World | None = None) -> list[str]:
    """Write a pair of files for each key, <prefix>_<key>_document or _sentence; return these."""
    started = time.perf_counter()
    world = world or World()
    team = join_ranks(world, timeout_minutes=WAIT_MINUTES) if world.size > 1 else Team()
    with ExitStack() as stack:
        if not team.is_lead:
            stdout = stderr = stack.enter_context(open(os.devnull, "w"))
        jobs: list[Job] = []
        team.run_on_all(lambda: jobs.append(prepare(config, stdout, stderr, world)))
        (job,) = jobs
        require_equal(team, job.comparable)
        if team.run_on_lead(job.is_done):
            return job.prefixes
        say_to_scripts(f"Time to startup: {time.perf_counter() - started}", stdout)
        if world.size == 1:
            job.work()
        else:
            work_together(team, job)
        if team.is_lead:
            report(job)
        return job.prefixes


def say_to_scripts(line: str, stdout: TextIO) -> None:
    """Print one of Megatron's lines, which scripts read; a terminal is spared them."""
    if not stdout.isatty():
        print(line, file=stdout, flush=True)


def prepare(config: PreprocessConfig, stdout: TextIO, stderr: TextIO, world: World) -> Job:
    """Check the inputs and the tokenizer before any work."""
    p = config.preprocess
    found = find(p)
    if world.size > 1 and any(one.kind == "stream" and not one.bytes for one in found.inputs):
        raise UserError("--input - or a pipe has one reader; start one process, or give files")
    for line in found.opened():
        print(f"Opening {line}", file=stdout)
    if p.dataset_impl != "mmap":
        print(f"--dataset-impl {p.dataset_impl}: written as mmap, which every loader reads", file=stderr)
    named = config.tokenizer.tokenizer
    say_to_scripts(f"> building {named or config.tokenizer.tokenizer_type} tokenizer ...", stdout)
    build_tokenizer.cache_clear()  # its files may have changed
    tokenizer = build_tokenizer(config.tokenizer)
    tokenizers.fastest_encoder(tokenizer)
    if hint := tokenizers.missing_speed(tokenizer):
        print(f"note: {hint}, with the same ids", file=stderr)
    padded = tokenizers.padded_size(tokenizer.size, 128, 1, None)
    say_to_scripts(tokenizers.padding_line(tokenizer.size, padded), stdout)
    say_to_scripts(f"Vocab size: {tokenizer.size}", stdout)
    say_to_scripts(f"Output prefix: {p.output_prefix}", stdout)
    if p.split_sentences:
        sentences.build(p.sentence_splitter, p.lang, p.keep_newlines)  # raises if it lacks the language
    return Job(config, found, tokenizer, world, stdout, stderr)


def work_together(team: Team, job: Job) -> None:
    """Encode on all ranks, each into its own pair of files, and merge these on rank 0."""
    failure = Path(job.failure_path)
    team.run_on_lead(lambda: failure.unlink(missing_ok=True))
    try:
        team.run_on_all(job.work)
    finally:
        if team.is_lead:
            failure.unlink(missing_ok=True)
    totals = job.totals
    job.totals = Totals(started=totals.started)
    mine = (totals.documents, totals.bytes, totals.before, totals.bad, totals.passed)
    for documents, size, before, bad, passed in team.gather(mine):
        job.totals.passed.add(passed)
        job.totals.documents += documents
        job.totals.bytes += size
        job.totals.before = (job.totals.before[0] + before[0], job.totals.before[1] + before[1])
        for kind, (count, place) in bad.items():
            job.totals.bad.count(kind, count, place)
    job.lengths = np.sum(team.gather(job.lengths), axis=0).tolist()
    try:
        job.require_tokens()
    except UserError as error:
        team.run_on_lead(job.remove_parts)
        raise UserError(str(error), error.status, everywhere=True) from None
    team.run_on_lead(lambda: merge_ranks(job, team.size))


def merge_ranks(job: Job, ranks: int) -> None:
    for prefix in job.prefixes:
        parts = [prefix + part_suffix(rank) for rank in range(ranks)]
        join(parts, prefix, True, job.keep)
    job.remove_parts()


def part_suffix(rank: int) -> str:
    return f".part{rank:05d}"


class Job:
    """One process's share of the work: the whole input, or one rank's range of it."""

    def __init__(
        self,
        config: PreprocessConfig,
        found: Found,
        tokenizer: tokenizers.Tokenizer,
        world: World,
        stdout: TextIO,
        stderr: TextIO,
    ) -> None:
        self.config, self.world, self.stdout, self.stderr = config, world, stdout, stderr
        self.found, self.inputs, self.passed, self.tokenizer = found, found.inputs, found.passed, tokenizer
        p = config.preprocess
        self.keys, self.dtype = list(dict.fromkeys(p.json_keys)), token_dtype(tokenizer.size)
        level = "sentence" if p.split_sentences else "document"
        self.prefixes = [f"{p.output_prefix}_{key}_{level}" for key in self.keys]
        self.suffix = "" if world.size == 1 else part_suffix(world.rank)
        self.failure_path, self.checked = f"{p.output_prefix}.failed", 0.0
        self.states = [hash_of(one.files) if one.files else file_state(one) for one in self.inputs]
        self._identify(tokenizer)
        self.totals = Totals()
        self.writers = list[Writer]()
        self.lengths = [[0, 0, 0]] * len(self.keys)  # tokens, sequences and documents of each key
        self.position = (-1, 0, 0)  # the current input, its units so far, and the byte at which this rank entered it
        self.state: dict[str, Any] | None = None
        sizes = [max(one.bytes, 1) for one in self.inputs]
        self.offsets = [0, *itertools.accumulate(sizes)]  # of each input in all of them, in bytes
        self.begin, self.end = (self.offsets[-1] * n // world.size for n in (world.rank, world.rank + 1))

    def _identify(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Set `comparable`, equal on all ranks, and `identity`, equal in a run that continues."""
        p = self.config.preprocess
        # Without on_error: the noted state has no bad line, or counts all of them.
        free = ("workers", "log_interval", "input", "on_error", "overwrite")
        settings = {k: v for k, v in asdict(p).items() if k not in free}
        names = [tokenizer.name, tokenizer.size, tokenizers.file_hashes(tokenizer)]
        self.comparable = {
            "version": our_version(),
            "tokenizer": names,
            **{spelling(k): v for k, v in settings.items()},
            "--on-error": p.on_error,
            **{
                f"--input {n + 1}": [one.path, one.kind, one.bytes, len(one.files)] for n, one in enumerate(self.inputs)
            },
        }
        self.identity = {
            "inputs": [[one.path, one.kind, *state] for one, state in zip(self.inputs, self.states, strict=True)],
            "share": [self.world.rank, self.world.size],
            "tokenizer": names,
            "settings": settings,
            "version": our_version(),
        }

    def is_done(self, dry_run: bool = False) -> bool:
        """Return whether the same command made the output; refuse to replace another one."""
        overwrite = self.config.preprocess.overwrite
        if not all([is_made(prefix, self.made_from, overwrite) for prefix in self.prefixes]):
            return False
        for prefix in self.prefixes:
            if not dry_run and not tokenizers.folder_of(prefix).exists():
                tokenizers.keep_beside(self.tokenizer, prefix)
            print(f"{prefix}.bin/.idx is already there, unchanged", file=self.stdout)
        return True

    @functools.cached_property
    def made_from(self) -> dict[str, Any]:
        """What decides the content of the output; first used before the input is read."""
        p = self.config.preprocess
        idle = ("input", "output_prefix", "dataset_impl", "workers", "log_interval", "overwrite")
        defaults = asdict(Preprocess())
        settings = {k: v for k, v in asdict(p).items() if k not in idle and v != defaults[k]}
        if p.split_sentences:  # before 0.8 all were split by Punkt, without a word of it
            settings.pop("sentence_splitter", None)
            settings |= {"sentence_splitter": "rules"} if p.sentence_splitter == "rules" else {}
        tokenizer = [self.tokenizer.name, self.tokenizer.size, tokenizers.file_hashes(self.tokenizer)]
        inputs = origin.inputs_of(self.found.paths)
        return {"command": "preprocess", "inputs": inputs, "settings": settings, "tokenizer": tokenizer}

    def keep(self, writer: Writer) -> None:
        """Write what belongs beside a pair of files, just before it gets its name."""
        writer.keep_origin(self.made_from)
        tokenizers.keep_beside(self.tokenizer, writer.prefix)

    def work(self) -> None:
        """Encode all pieces and write the pairs of files."""
        with ExitStack() as stack:
            progress_path = f"{self.config.preprocess.output_prefix}{self.suffix}.progress"
            self.journal = stack.enter_context(Journal(progress_path, self.identity, self.stderr))
            state = self.restore()
            if state and state["is_complete"]:
                return
            for prefix, lengths in zip(self.prefixes, self.lengths, strict=True):
                writer = Writer(prefix + self.suffix, self.dtype, tuple(lengths) if state else None)
                writer.is_kept = True
                self.writers.append(stack.enter_context(writer))
            try:
                self.encode(state["pieces"] if state else 0)
                if self.world.size == 1:
                    self.require_tokens()
                self.require_unchanged()
                for writer in self.writers:
                    if self.world.size == 1:
                        self.keep(writer)
                    writer.finish()
            except UserError as error:
                self.journal.is_kept = self.journal.state is not None  # otherwise there is nothing to continue
                for writer in self.writers:
                    writer.is_kept = self.journal.is_kept
                if self.world.size > 1 and not os.path.exists(self.failure_path):  # the first failure is the reason
                    Path(self.failure_path).write_text(f"rank {self.world.rank}: {error}")
                raise
            if self.world.size == 1:
                self.journal.is_kept = False
                self.remove_parts()
            else:
                self.journal.note({**(self.state or self.snapshot(0)), "is_complete": True})

    def restore(self) -> dict[str, Any] | None:
        """Return the state of the interrupted run to continue, if its files are there."""
        state = self.journal.state
        if state is None:
            return None
        size = np.dtype(self.dtype).itemsize
        paths = [prefix + self.suffix for prefix in self.prefixes]
        if state["is_complete"]:
            is_there = all(os.path.exists(path + end) for path in paths for end in (".bin", ".idx"))
        else:
            is_there = all(has_parts(*one, size) for one in zip(paths, state["lengths"], strict=True))
        if not is_there:
            return None
        t = self.totals
        t.documents, t.bytes = t.before = (state["documents"], state["bytes"])
        t.bad = SkippedLines({kind: (count, first) for kind, (count, first) in state["bad"].items()})
        t.passed = PassedOver(state["passed"])
        self.position, self.lengths, self.state = tuple(state["input"]), state["lengths"], state
        print(f"continuing after {t.documents:,} documents of an interrupted run", file=self.stderr)
        return state

    def snapshot(self, pieces: int) -> dict[str, Any]:
        """Return what the journal notes after so many pieces."""
        t = self.totals
        state = dict(pieces=pieces, documents=t.documents, bytes=t.bytes, input=self.position, bad=dict(t.bad))
        return {**state, "passed": dict(t.passed), "lengths": self.lengths, "is_complete": False}

    def encode(self, done: int) -> None:
        """Encode and append all pieces but the first `done`."""
        p = self.config.preprocess
        todo = islice(pieces(self.inputs, p, self.world.rank, self.world.size), done, None)
        make = functools.partial(build_encoder, self.config, self.dtype)
        self.stdout.flush()
        with (
            closing(encode_pieces(todo, make, self.worker_count(), p.on_error == "stop")) as results,
            self.progress() as show,
        ):
            for number, (piece, encoded, tokens) in enumerate(results, done + 1):
                self.check_other_ranks()
                self.count(piece, encoded)
                for writer, ids, sizes, ends in zip(self.writers, tokens, encoded.sizes, encoded.ends, strict=True):
                    writer.append(ids, sizes, ends + writer.sequences)
                self.lengths = [[w.tokens, w.sequences, w.documents] for w in self.writers]
                self.state = self.snapshot(number)
                if self.journal.is_due():
                    for writer in self.writers:
                        writer.flush()
                    self.journal.note(self.state)
                show(self.offsets[piece.number] + piece.behind - self.begin)

    def worker_count(self) -> int:
        """Return --workers, by default one for each core, but 1 for a few pieces."""
        wanted = self.config.preprocess.workers or max(1, cores() // self.world.local_size)
        is_small = all(one.kind in ("lines", "text", "texts") for one in self.inputs) and self.offsets[-1] < 4 * MIB
        return 1 if is_small else wanted

    def count(self, piece: Piece, encoded: Encoded) -> None:
        """Add a piece to the totals; raise for its first bad line unless --on-error skip."""
        if piece.number != self.position[0]:
            self.position = (piece.number, 0, piece.begin)
        hint = "leave such lines out with --on-error skip (nothing was written)"
        stop = self.config.preprocess.on_error == "stop"
        if encoded.bad and stop:
            place = self.place(piece, next(iter(encoded.bad.values()))[1])
            raise bad_data(f"{place}: {encoded.first_bad}; mend the line, or {hint}")
        if piece.kind == "broken":
            if stop:
                why = damage_message(piece)
                raise bad_data(f"{why}; fetch it again, or keep its undamaged part and {hint}")
            self.totals.bad.count("input cut short", 1, f"{shown(piece.path)} ({piece.content})")
        for kind, (count, unit) in encoded.bad.items():
            self.totals.bad.count(kind, count, "" if kind in self.totals.bad else self.place(piece, unit))
        number, count, begin = self.position
        self.position = (number, count + encoded.units, begin)
        self.totals.documents += encoded.documents
        self.totals.bytes += encoded.bytes
        self.totals.passed.add(encoded.passed)

    def place(self, piece: Piece, unit: int) -> str:
        """Name the place of a bad unit; a rank counts the lines before its own."""
        before = count_lines(piece.path, self.position[2]) if piece.kind == "place" else 0
        return describe_place(piece, unit, before + self.position[1] + 1, self.keys)

    def check_other_ranks(self) -> None:
        """Stop early if another rank failed."""
        if self.world.size > 1 and time.monotonic() - self.checked > 1:
            self.checked = time.monotonic()
            if os.path.exists(self.failure_path):
                reason = Path(self.failure_path).read_text()
                raise bad_data(f"stopped because another rank failed: {reason}")

    def require_unchanged(self) -> None:
        """Raise if a file grew or shrank while it was read: half of it is of another version."""
        for one, state in zip(self.inputs, self.states, strict=True):
            if one.kind != "stream" and file_state(one) != state:
                self.journal.state = None  # start from the beginning next time
                what = f"{shown(one.folder or one.path)} has changed while it was read"
                if not one.files:
                    what += f" ({state[0]:,} bytes then, {file_state(one)[0]:,} now)"
                raise bad_data(f"{what}; start again when it is complete")

    def require_tokens(self) -> None:
        for key, (tokens, _, _) in zip(self.keys, self.lengths, strict=True):
            if not tokens:
                reason = f" ({self.totals.bad})" if self.totals.bad else ""
                passed = PassedOver(self.passed + self.totals.passed)
                reason += f" ({passed.line()})" if passed else ""
                paths = ", ".join(map(shown, self.config.preprocess.input))
                raise bad_data(f"no token under {key!r} in {paths}{reason}: nothing was written")

    def remove_parts(self) -> None:
        """Remove this output's files of ranks, also those of an interrupted run of another size."""
        for output in (str(self.config.preprocess.output_prefix), *self.prefixes):
            for path in glob.glob(f"{glob.escape(output)}.part[0-9][0-9][0-9][0-9][0-9].*"):
                if path.endswith((".tmp", ".progress", ".bin", ".idx")):
                    Path(path).unlink(missing_ok=True)

    @contextmanager
    def progress(self) -> Iterator[Callable[[int], None]]:
        """Print Megatron's line every --log-interval documents; on a terminal show a bar."""
        t, stderr, interval = self.totals, self.stderr, self.config.preprocess.log_interval
        if not stderr.isatty():
            printed = t.documents // interval

            def print_line(done: int) -> None:
                nonlocal printed
                if t.documents // interval > printed:
                    printed = t.documents // interval
                    print(t.line(), file=stderr, flush=True)

            yield print_line
            return
        total = self.end - self.begin if all(one.bytes for one in self.inputs) else None
        bar, task = new_bar("{task.description}", "bar", "percent", "left", total=total, file=stderr)
        with bar:
            yield lambda done: bar.update(task, completed=done, description=t.line())


def build_encoder(config: PreprocessConfig, dtype: Any) -> Encoder:
    """Return a worker's encoder; a forked worker finds the tokenizer built."""
    p, tokenizer = config.preprocess, build_tokenizer(config.tokenizer)
    split = sentences.build(p.sentence_splitter, p.lang, p.keep_newlines) if p.split_sentences else None
    keys = list(dict.fromkeys(p.json_keys))
    return Encoder(tokenizers.fastest_encoder(tokenizer), tokenizer.eod if p.append_eod else None, keys, dtype, split)


@functools.lru_cache(maxsize=1)
def build_tokenizer(settings: TokenizerFlags) -> tokenizers.Tokenizer:
    return tokenizers.build_tokenizer(settings)


def file_state(one: Input) -> list[int]:
    """Return size and time of a file, a hash of those of texts, something new for a pipe."""
    if one.kind == "stream" and not one.bytes:
        return [time.time_ns()]
    if one.files:
        return hash_of([(path, *_size_and_time(path)) for path, _, _ in one.files])
    return _size_and_time(one.path)


def hash_of(files: Sequence[object]) -> list[int]:
    return [int.from_bytes(hashlib.sha256(repr(list(files)).encode()).digest())]


def _size_and_time(path: str) -> list[int]:
    try:
        about = os.stat(path)
    except FileNotFoundError:
        return [0, 0]
    return [about.st_size, about.st_mtime_ns]


def report(job: Job) -> None:
    print(job.totals.line(), file=job.stderr)
    if job.totals.bad:
        print(f"left out {job.totals.bad}", file=job.stderr)
    if passed := PassedOver(job.passed + job.totals.passed):
        print(passed.line(), file=job.stderr)
    dtype = np.dtype(job.dtype)
    for prefix, (tokens, sequences, _) in zip(job.prefixes, job.lengths, strict=True):
        counts = f"{job.totals.documents:,} documents, {sequences:,} sequences, {tokens:,} tokens"
        size = f"{tokens * dtype.itemsize:,} bytes ({dtype.name})"
        print(f"wrote {prefix}.bin/.idx: {counts}, {size}", file=job.stdout)
