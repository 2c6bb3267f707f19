"""`meshwright preprocess`: text to token files, on all cores of one machine or of several.

The input is cut into pieces (data/text.py), workers encode them and write side by side (data/crew.py), and what is committed is
noted in `<prefix>.progress`: the same command started again after a kill goes on there and ends with the same bytes. Started as
several ranks, each takes a range of the input into files of its own, which are then copied into one.
"""

from __future__ import annotations

import functools
import glob
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from meshwright import tokenizers
from meshwright.data.format.writer import Writer, copy_part, make_room, publish, token_dtype
from meshwright.data.prepare import sentences
from meshwright.data.prepare import workers as crew
from meshwright.data.prepare.encoding import Encoder, Made
from meshwright.data.prepare.journal import Journal, is_there
from meshwright.data.prepare.text import Input, Piece, broken, find_inputs, lines_before, look, place_of, shared
from meshwright.device import cores
from meshwright.errors import BAD_DATA, UserError
from meshwright.launch import rendezvous
from meshwright.launch.team import Team
from meshwright.launch.world import World
from meshwright.progress import SkippedLines, new_bar
from meshwright.settings.command import our_version
from meshwright.settings.schema import Tokenizer, flag, spelling

MIB = 1 << 20


@dataclass(frozen=True)
class Preprocess:
    """Text to .bin/.idx."""

    input: list[str] = flag(
        [],
        "files of JSON lines, one document per line, or Parquet, also compressed; folders of a saved data set; "
        "tar archives of text files; - for standard input",
    )
    output_prefix: str | None = flag(None, "prefix of the output files <prefix>_<key>_document.bin and .idx")
    json_keys: list[str] = flag(["text"], "keys whose text is read", "--json-key")
    append_eod: bool = flag(False, "append the end-of-document token to each document")
    on_error: Literal["stop", "skip"] = flag("stop", "on a bad line: stop, or skip and count it")
    dataset_impl: Literal["mmap", "lazy", "cached"] = flag("mmap", "output format; lazy and cached are written as mmap")
    workers: int | None = flag(None, "worker processes (none: one per core)", bound="above 0")
    log_interval: int = flag(1000, "documents between progress lines", bound="above 0")
    split_sentences: bool = flag(
        False, "split documents into sentences with NLTK and write <prefix>_<key>_sentence.bin and .idx"
    )
    keep_newlines: bool = flag(False, "with --split-sentences, keep the white space between sentences")
    lang: str = flag("english", "language for --split-sentences")


@dataclass(frozen=True)
class PreprocessConfig:
    """Settings of `meshwright preprocess`."""

    preprocess: Preprocess = Preprocess()
    tokenizer: Tokenizer = Tokenizer()

    def problems(self) -> list[str]:
        p = self.preprocess
        conditions = {
            "--input is needed: a file of JSON lines": p.input,
            "--json-keys names no key; give at least one": p.json_keys,
            "--output-prefix is needed: where to write": p.output_prefix,
            "--keep-newlines needs --split-sentences": p.split_sentences or not p.keep_newlines,
            "--lang needs --split-sentences": p.split_sentences or p.lang == type(p).lang,
        }
        return [message for message, holds in conditions.items() if not holds]


@dataclass
class Totals:
    """What is committed."""

    documents: int = 0
    bytes: int = 0
    bad: SkippedLines = field(default_factory=SkippedLines)
    begun: float = field(default_factory=time.perf_counter)
    before: tuple[int, int] = (0, 0)  # documents and bytes that an interrupted run had done

    def line(self) -> str:
        seconds = max(time.perf_counter() - self.begun, 1e-9)
        documents, speed = self.documents - self.before[0], (self.bytes - self.before[1]) / MIB / seconds
        return f"Processed {self.documents} documents ({documents / seconds:.2f} docs/s, {speed:.2f} MB/s)."


def run(config: PreprocessConfig, stdout: TextIO, stderr: TextIO, world: World | None = None) -> None:
    """One pair of files for each key: <prefix>_<key>_document.bin/.idx, or _sentence."""
    begun = time.perf_counter()
    world = world or World()
    # The time-out concerns those who wait for the slowest rank to end.
    team = rendezvous.join(world, timeout_minutes=7 * 24 * 60) if world.size > 1 else Team()
    with ExitStack() as stack:
        if not team.is_lead:
            stdout = stderr = stack.enter_context(open(os.devnull, "w"))
        _run(config, stdout, stderr, world, team, begun)


def _run(config: PreprocessConfig, stdout: TextIO, stderr: TextIO, world: World, team: Team, begun: float) -> None:
    made: list[Share] = []
    team.run_on_all(lambda: made.append(begin(config, stdout, stderr, world)))
    (share,) = made
    rendezvous.require_equal(team, share.told)
    print(f"Time to startup: {time.perf_counter() - begun}", file=stdout, flush=True)
    if world.size > 1:
        team.run_on_lead(lambda: Path(share.failed).unlink(missing_ok=True))
    try:
        team.run_on_all(share.work)
    finally:
        if team.is_lead and world.size > 1:
            Path(share.failed).unlink(missing_ok=True)
    if world.size > 1:
        together(team, share)
    report(share, stdout, stderr)


def begin(config: PreprocessConfig, stdout: TextIO, stderr: TextIO, world: World) -> Share:
    """What is to be done, looked through before any work."""
    p = config.preprocess
    inputs = look(find_inputs(p.input))
    if world.size > 1 and any(one.kind == "stream" and not one.bytes for one in inputs):
        raise UserError("--input - or a pipe has one reader: start one process, or give files")
    for one in inputs:
        print(f"Opening {one.path}", file=stdout)
    if p.dataset_impl != "mmap":
        print(f"--dataset-impl {p.dataset_impl}: written as mmap, which every loader reads", file=stderr)
    print(f"> building {config.tokenizer.tokenizer_type} tokenizer ...", file=stdout)
    tokenizer_of.cache_clear()  # the files may be others now
    tokenizer = tokenizer_of(config.tokenizer)
    tokenizers.fastest(tokenizer)
    print(tokenizers.padding_line(tokenizer.size, tokenizers.padded_size(tokenizer.size, 128, 1, None)), file=stdout)
    print(f"Vocab size: {tokenizer.size}", file=stdout)
    print(f"Output prefix: {p.output_prefix}", file=stdout)
    return Share(config, inputs, tokenizer, world, stdout, stderr)


class Share:
    """One process's part of the input: all of it, or that of one of several ranks."""

    def __init__(
        self,
        config: PreprocessConfig,
        inputs: list[Input],
        tokenizer: tokenizers.Tokenizer,
        world: World,
        stdout: TextIO,
        stderr: TextIO,
    ) -> None:
        self.config, self.inputs, self.world, self.stdout, self.stderr = config, inputs, world, stdout, stderr
        p = config.preprocess
        self.keys, self.dtype = list(dict.fromkeys(p.json_keys)), token_dtype(tokenizer.size)
        level = "sentence" if p.split_sentences else "document"
        self.prefixes = [f"{p.output_prefix}_{key}_{level}" for key in self.keys]
        self.part = "" if world.size == 1 else f".part{world.rank:05d}"
        if p.split_sentences:
            sentences.build(p.lang, p.keep_newlines)  # whether it can be had, before anything is written
        self.make = functools.partial(encoder, config, self.dtype)
        # Not on_error: in what is committed nothing stopped it, or all that is bad is counted.
        settings = {k: v for k, v in asdict(p).items() if k not in ("workers", "log_interval", "input", "on_error")}
        names = [tokenizer.name, tokenizer.size, tokenizers.hashes(tokenizer)]
        self.states = [_state(one) for one in inputs]
        self.told = {  # must be the same on all ranks
            "version": our_version(),
            "tokenizer": names,
            **{spelling(k): v for k, v in settings.items()},
            "--on-error": p.on_error,
            **{f"--input {n + 1}": [one.path, one.kind, one.bytes] for n, one in enumerate(inputs)},
        }
        self.identity = {
            "inputs": [[one.path, one.kind, *state] for one, state in zip(inputs, self.states, strict=True)],
            "share": [world.rank, world.size],
            "tokenizer": names,
            "settings": settings,
            "version": our_version(),
        }
        self.totals, self.writers = Totals(), list[Writer]()
        sizes = [max(one.bytes, 1) for one in inputs]
        self.ahead = [0, *itertools.accumulate(sizes)]  # bytes of the inputs before each
        self.mine = [self.ahead[-1] * n // world.size for n in (world.rank, world.rank + 1)]
        self.input = (-1, 0, 0)  # the present one, units of it so far, and the byte at which this rank began with it
        self.failed, self.looked = f"{p.output_prefix}.failed", 0.0
        self.lock, self.next = threading.Lock(), 0
        self.snapshots, self.written = dict[int, dict[str, Any]](), set[int]()
        self.last: dict[str, Any] | None = None
        self.show: Callable[[int], None] = lambda behind: None

    def work(self) -> None:
        """All pieces; the files of a single process are then complete."""
        p = self.config.preprocess
        with ExitStack() as stack:
            self.journal = stack.enter_context(
                Journal(f"{p.output_prefix}{self.part}.progress", self.identity, self.stderr)
            )
            begun = self.journal.state or {}
            size = np.dtype(self.dtype).itemsize
            if not all(is_there(*one, size) for one in zip(self.part_names(), begun.get("lengths", []), strict=False)):
                begun = {}
            self.resume(begun)
            for prefix, lengths in zip(self.part_names(), begun.get("lengths") or [None] * len(self.keys), strict=True):
                writer = Writer(prefix, self.dtype, lengths and tuple(lengths))
                writer.is_kept, writer.is_part = True, bool(self.part)
                self.writers.append(stack.enter_context(writer))
            todo = self.todo(begun.get("pieces", 0))
            paths = [f"{writer.prefix}.bin.tmp" for writer in self.writers]
            stop = p.on_error == "stop"
            try:
                size = self.workers()
                if size == 1:
                    with self.progress():
                        crew.work_alone(todo, self.make, paths, stop, self.commit, self.note)
                else:
                    self.stdout.flush()
                    team = crew.Crew(size, todo, self.make, paths, stop, self.commit, self.note)
                    with self.progress():
                        team.run()
                if self.world.size == 1:
                    self.require_tokens([writer.tokens for writer in self.writers])
                self.require_unchanged()
                for writer in self.writers:
                    writer.finish()
            except UserError as error:
                self.journal.is_kept = self.journal.state is not None  # else there is nothing to go on with
                for writer in self.writers:
                    writer.is_kept = self.journal.is_kept
                if self.world.size > 1 and not os.path.exists(self.failed):  # the first to fail tells why
                    Path(self.failed).write_text(f"rank {self.world.rank}: {error}")
                raise
            if self.world.size == 1:
                self.journal.is_kept = False
                self.discard()
            elif self.last:  # until all ranks' parts are put together
                self.journal.note(self.last)

    def discard(self) -> None:
        """The parts of ranks, those of an interrupted run of another size too."""
        for output in (
            str(self.config.preprocess.output_prefix),
            *self.prefixes,
        ):  # and of no other output that begins alike
            for path in glob.glob(f"{glob.escape(output)}.part[0-9][0-9][0-9][0-9][0-9].*"):
                if path.endswith((".tmp", ".progress")):
                    Path(path).unlink(missing_ok=True)

    def part_names(self) -> list[str]:
        return [prefix + self.part for prefix in self.prefixes]

    def resume(self, begun: dict[str, Any]) -> None:
        t = self.totals
        if begun:
            t.documents, t.bytes = t.before = (begun["documents"], begun["bytes"])
            self.input = tuple(begun["input"])
            t.bad = SkippedLines({kind: (n, first) for kind, (n, first) in begun["bad"].items()})
            self.next = begun["pieces"]
            print(f"going on after {t.documents:,} documents of an interrupted run", file=self.stderr)

    def todo(self, done: int) -> Iterator[tuple[int, Piece]]:
        mine = shared(self.inputs, self.world.rank, self.world.size)
        return enumerate(islice(mine, done, None), done)

    def workers(self) -> int:
        """As many as asked for, or cores; a few pieces are done before others have started."""
        wanted = self.config.preprocess.workers or max(1, cores() // self.world.local_size)
        small = all(one.kind == "lines" for one in self.inputs) and sum(one.bytes for one in self.inputs) < 4 * MIB
        return 1 if small else wanted

    def commit(self, number: int, piece: Piece, made: Made) -> list[int]:
        """In the order of the input: where each key's tokens belong."""
        stop = self.config.preprocess.on_error == "stop"
        hint = "leave such lines out with --on-error skip (nothing was written)"
        with self.lock:
            if piece.number != self.input[0]:
                self.input = (piece.number, 0, piece.begin)
            self.look_at_others()
            if made.bad and stop:
                place = self.place(piece, next(iter(made.bad.values()))[1])
                raise UserError(f"{place}: {made.first_bad}; mend the line, or {hint}", BAD_DATA)
            if piece.kind == "broken" and stop:
                raise UserError(f"{broken(piece)}: fetch it again, or keep what is whole and {hint}", BAD_DATA)
            if piece.kind == "broken":
                self.totals.bad.count("input cut short", 1, f"{piece.path} ({piece.content})")
            for kind, (count, unit) in made.bad.items():
                self.totals.bad.count(kind, count, "" if kind in self.totals.bad else self.place(piece, unit))
            self.input = (piece.number, self.input[1] + made.units, self.input[2])
            self.totals.documents += made.documents
            self.totals.bytes += made.bytes
            offsets = [
                writer.reserve(tokens, sizes, ends + writer.sequences)
                for writer, tokens, sizes, ends in zip(self.writers, made.tokens, made.sizes, made.ends, strict=True)
            ]
            t = self.totals
            self.last = self.snapshots[number] = {
                "pieces": number + 1,
                "documents": t.documents,
                "bytes": t.bytes,
                "input": self.input,
                "bad": dict(t.bad),
                "lengths": [[w.tokens, w.sequences, w.documents] for w in self.writers],
            }
            self.show(self.ahead[piece.number] + piece.behind - self.mine[0])
        return offsets

    def place(self, piece: Piece, unit: int) -> str:
        """Of a bad unit, for people. A rank that begins within a file counts the lines ahead of it now, when they matter."""
        ahead = lines_before(piece.path, self.input[2]) if piece.kind == "place" else 0
        return place_of(piece, unit, ahead + self.input[1] + 1)

    def look_at_others(self) -> None:
        """Whether another rank has failed: it tells why, and nobody works on for hours."""
        if self.world.size > 1 and time.monotonic() - self.looked > 1:
            self.looked = time.monotonic()
            if os.path.exists(self.failed):
                raise UserError(f"stopped, for another rank has failed: {Path(self.failed).read_text()}", BAD_DATA)

    def note(self, number: int) -> None:
        """The tokens of this piece are in the file."""
        with self.lock:
            self.written.add(number)
            state = None
            while self.next in self.written:
                self.written.remove(self.next)
                state = self.snapshots.pop(self.next)
                self.next += 1
            if state is not None and self.journal.is_due():
                for writer in self.writers:
                    writer.flush()
                self.journal.note(state)

    def require_unchanged(self) -> None:
        """A file that shrinks or grows under our eyes is half of two."""
        for one, state in zip(self.inputs, self.states, strict=True):
            if one.kind != "stream" and _state(one) != state:
                size = os.path.getsize(one.path)
                self.journal.state = None  # all begins anew
                raise UserError(
                    f"{one.path} has changed while it was read ({state[0]:,} bytes then, {size:,} now): start again when "
                    "it is complete",
                    BAD_DATA,
                )

    def require_tokens(self, tokens: list[int]) -> None:
        for key, count in zip(self.keys, tokens, strict=True):
            if not count:
                reason = f" ({self.totals.bad})" if self.totals.bad else ""
                paths = ", ".join(one.path for one in self.inputs)
                raise UserError(f"no token under {key!r} in {paths}{reason}: nothing was written", BAD_DATA)

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Megatron's line every --log-interval documents; on a terminal a moving bar instead."""
        t, stderr, interval = self.totals, self.stderr, self.config.preprocess.log_interval
        if not stderr.isatty():
            told = [t.documents // interval]

            def line(behind: int) -> None:
                if t.documents // interval > told[0]:
                    told[0] = t.documents // interval
                    print(t.line(), file=stderr, flush=True)

            self.show = line
            yield
            return

        total = self.mine[1] - self.mine[0] if all(one.bytes for one in self.inputs) else None
        bar, task = new_bar("{task.description}", "bar", "percent", "left", total=total, file=stderr)
        self.show = lambda behind: bar.update(task, completed=behind, description=t.line())
        with bar:
            yield


def encoder(config: PreprocessConfig, dtype: Any) -> Encoder:
    """What each worker makes for itself; a forked one finds the tokenizer ready."""
    p, tokenizer = config.preprocess, tokenizer_of(config.tokenizer)
    cut = sentences.build(p.lang, p.keep_newlines) if p.split_sentences else None
    keys = list(dict.fromkeys(p.json_keys))
    return Encoder(tokenizers.fastest(tokenizer), tokenizer.eod if p.append_eod else None, keys, dtype, cut)


@functools.lru_cache(maxsize=1)
def tokenizer_of(settings: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.build(settings)


def _state(one: Input) -> list[int]:
    """What tells whether a file is still the same; a pipe never is."""
    if one.kind == "stream" and not one.bytes:
        return [time.time_ns()]
    about = os.stat(one.path)
    return [about.st_size, about.st_mtime_ns]


def together(team: Team, share: Share) -> None:
    """The parts of all ranks become one pair of files for each key, the bytes that one process would have written."""
    t = share.totals
    totals = share.totals = Totals(begun=t.begun)
    for documents, size, before, bad in team.gather((t.documents, t.bytes, t.before, t.bad)):
        totals.documents += documents
        totals.bytes += size
        totals.before = (totals.before[0] + before[0], totals.before[1] + before[1])
        for kind, (count, place) in bad.items():
            totals.bad.count(kind, count, place)
    counts = [team.gather((writer.tokens, writer.sequences, writer.documents)) for writer in share.writers]
    try:
        share.require_tokens([sum(tokens for tokens, _, _ in ranks) for ranks in counts])
    except UserError as error:
        team.run_on_lead(share.discard)
        raise UserError(str(error), error.status, everywhere=True) from None
    for prefix, writer, ranks in zip(share.prefixes, share.writers, counts, strict=True):
        team.run_on_lead(lambda prefix=prefix, writer=writer, ranks=ranks: make_room(prefix, writer.dtype, ranks))  # type: ignore[misc]
        team.run_on_all(lambda prefix=prefix, writer=writer, ranks=ranks: copy_part(prefix, writer, team.rank, ranks))  # type: ignore[misc]
        team.run_on_lead(lambda prefix=prefix, writer=writer: publish(prefix, writer.dtype))  # type: ignore[misc]
        writer.tokens, writer.sequences, writer.documents = (sum(values) for values in zip(*ranks, strict=True))
    team.run_on_lead(share.discard)


def report(share: Share, stdout: TextIO, stderr: TextIO) -> None:
    print(share.totals.line(), file=stderr)
    if share.totals.bad:
        print(f"left out {share.totals.bad}", file=stderr)
    for prefix, writer in zip(share.prefixes, share.writers, strict=True):
        size = writer.tokens * writer.dtype.itemsize
        print(
            f"wrote {prefix}.bin/.idx: {share.totals.documents:,} documents, {writer.sequences:,} sequences, "
            f"{writer.tokens:,} tokens, {size:,} bytes ({writer.dtype.name})",
            file=stdout,
        )
