"""`meshwright data VERB`: looking after token files, before and beside a training. No verb imports torch but `index`."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from meshwright import command, launchers, tokenizers
from meshwright.config import (
    FetchConfig,
    IndexConfig,
    InspectConfig,
    LooseTextConfig,
    MergeConfig,
    PlanConfig,
    TrainConfig,
    VerifyConfig,
    spelling,
)
from meshwright.config import Tokenizer as TokenizerFlags
from meshwright.console import notice
from meshwright.errors import BAD_DATA, DONE, IO, USAGE, UserError


def main(argv: list[str]) -> int:
    name = argv[0] if argv else ""
    if name in ("", "-h", "--help", "help"):
        print(usage())
        return DONE if name else USAGE
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, 1)
        print(f"meshwright data: no {name!r}{f'; did you mean {near[0]}?' if near else ''}\n{usage()}", file=sys.stderr)
        return USAGE
    return VERBS[name][0](argv[1:])


def usage() -> str:
    lines = [f"  {name:<12} {what}" for name, (_, what) in VERBS.items()]
    return "\n".join(
        ["usage: meshwright data VERB [flags]", "", *lines, "", "`meshwright data VERB --help` lists a verb's flags."]
    )


def tokenizer_of(t: TokenizerFlags) -> tokenizers.Tokenizer | None:
    """The tokenizer that the flags name, if they name one."""
    if t.vocab_file or t.merge_file or t.tokenizer_model or t.tokenizer_type != TokenizerFlags().tokenizer_type:
        return tokenizers.build(t)
    return None


def verify(argv: list[str]) -> int:
    about = (
        "Whether token files are whole: lengths, pointers, borders and ends of documents, ids, checksums, index caches."
    )
    parsed = command.settings(VerifyConfig, argv, "data verify", about, positional="prefixes")
    if parsed is None:
        return DONE
    from meshwright.data import verify as work
    from meshwright.data.meter import Clock, metered

    v, t = parsed.config.verification, parsed.config.tokenizer
    tokenizer = tokenizer_of(t)
    vocab, eod = (tokenizer.size, tokenizer.eod) if tokenizer else (t.vocab_size, None)
    checksums = Path(v.checksums) if v.checksums else None
    compares = checksums is not None and checksums.exists()
    if parsed.dry_run:
        print(
            f"would check {', '.join(v.prefixes)}"
            + (f" and {'compare' if compares else 'write'} {checksums}" if checksums else "")
        )
        return DONE
    found = []
    for prefix in v.prefixes:
        clock, size = Clock(), sum(p.stat().st_size for e in (".idx", ".bin") if (p := Path(prefix + e)).is_file())
        with metered(Path(prefix).name, size) as advance:
            one = work.check(prefix, vocab, eod, checksums is not None, advance)
        found.append(one)
        if compares and checksums:
            work.compare_checksums(checksums, [one])
        for line in one.notes:
            notice(f"note: {line}")
        print("\n".join(one.problems) or one.line(clock.speed(size)), flush=True)
    problems = sum(len(one.problems) for one in found)
    for folder in dict.fromkeys(Path(prefix).parent for prefix in v.prefixes):
        count, damaged = work.damaged_caches(folder)
        problems += len(damaged)
        for line in damaged or ([f"{folder / 'index-cache'}: whole: {count} entries"] if count else []):
            print(line)
    if problems:
        raise UserError(f"{problems} problem{'s' * (problems > 1)}, listed above", BAD_DATA)
    if checksums and not compares:
        try:
            work.write_checksums(checksums, found)
        except OSError as error:
            raise UserError(f"--checksums {checksums} cannot be written: {error.strerror or error}", IO) from None
        print(f"wrote {checksums}: the SHA-256 of {2 * len(found)} files, which `sha256sum -c` reads too")
    return DONE


def inspect(argv: list[str]) -> int:
    about = "What token files hold: counts, lengths, the most frequent tokens; one document; one sample of a training."
    parsed = command.settings(InspectConfig, argv, "data inspect", about, positional="prefix")
    if parsed is None:
        return DONE
    config, i = parsed.config, parsed.config.inspection
    tokenizer = tokenizer_of(config.tokenizer)
    if parsed.dry_run:
        print(f"would read {i.prefix or 'the data of the training'}")
        return DONE
    from meshwright.data import look
    from meshwright.data.indexed import Indexed

    if i.sample is not None:
        from meshwright.data.ahead import show_sample

        show_sample(with_prefix(config, i.prefix), tokenizer, i.sample, i.sample_set, i.json)
        return DONE
    assert i.prefix
    indexed = Indexed(i.prefix)
    if i.document is not None:
        facts = look.document(indexed, i.document, tokenizer)
        text = facts.pop("text") if "text" in facts and not i.json else None
        print(look.one_line(facts) if text is None else text)
        return DONE
    facts = look.summary(indexed, i.top, tokenizer)
    if i.picture:
        look.draw(facts, Path(i.picture))
    print(look.one_line(facts) if i.json else "\n".join(look.table(facts)))
    return DONE


def with_prefix(config: InspectConfig, prefix: str | None) -> InspectConfig:
    """A bare prefix is what --data-path would name."""
    from meshwright import datapaths

    named = datapaths.given(config.data)
    if prefix and named:
        raise UserError(f"{prefix} and {spelling(named[0])} both name the data: give one")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, data_path=[prefix])) if prefix else config


def index(argv: list[str]) -> int:
    about = "Build a training's sample indices ahead of it: give the training's own flags, all of them."
    parsed = command.settings(IndexConfig, argv, "data index", about)
    if parsed is None:
        return DONE
    from meshwright.data import ahead

    ahead.index(parsed.config, vocab_of(parsed.config), parsed.dry_run)
    return DONE


def plan(argv: list[str]) -> int:
    about = "Which source gives how many samples, tokens and epochs to a training: give the training's own flags."
    parsed = command.settings(PlanConfig, argv, "data plan", about)
    if parsed is None:
        return DONE
    from meshwright.data import ahead

    ahead.plan(parsed.config, parsed.config.planning.json)
    return DONE


def vocab_of(config: TrainConfig) -> int | None:
    tokenizer = tokenizer_of(config.tokenizer)
    return tokenizer.size if tokenizer else config.tokenizer.vocab_size


def merge(argv: list[str]) -> int:
    about = "Several pairs of token files to one, in the order given, or of a folder by name; in constant memory."
    parsed = command.settings(MergeConfig, argv, "data merge", about, positional="datasets")
    if parsed is None:
        return DONE
    from meshwright.data import merge as work
    from meshwright.data.meter import Clock

    m, clock, world = parsed.config.merging, Clock(), launchers.find(os.environ)
    assert m.output_prefix
    if world.rank:
        return DONE
    if world.size > 1:
        notice(
            f"note: {world.size} processes were started; this one alone merges, for it is the disk that takes the time"
        )
    prefixes = m.datasets or work.find(m.input or "", m.output_prefix)
    if parsed.dry_run:
        print(f"would merge {', '.join(prefixes)} into {m.output_prefix}")
        return DONE
    made = work.merge(prefixes, m.output_prefix, m.merge == "distributed")
    size = made.tokens * made.dtype.itemsize
    print(
        f"merged {len(prefixes):,} datasets to {made.prefix}.bin/.idx: {made.documents:,} documents, "
        f"{made.sequences:,} sequences, {made.tokens:,} tokens, {size:,} bytes ({made.dtype.name}), {clock.speed(size)}"
    )
    return DONE


def fetch(argv: list[str]) -> int:
    about = (
        "Download what the documents name, or any http(s) address; resumed where it was cut, checked where it can be."
    )
    parsed = command.settings(FetchConfig, argv, "data fetch", about, positional="names")
    if parsed is None:
        return DONE
    from meshwright.data import fetch as work

    f = parsed.config.fetching
    if parsed.dry_run:
        for name, known in work.wanted(f.names, f.sha256).items():
            print(f"would fetch {known.url} to {Path(f.output) / name}")
        return DONE
    work.main(f.names, f.output, f.sha256)
    return DONE


def merge_json(argv: list[str]) -> int:
    about = "Many files of JSON lines or text to one of JSON lines; bad lines are left out and counted."
    parsed = command.settings(LooseTextConfig, argv, "data merge-json", about)
    if parsed is None:
        return DONE
    from meshwright.data import loose

    t = parsed.config.loose_text
    if parsed.dry_run:
        print(f"would merge the files of {t.json_path} into {t.output_file}")
        return DONE
    merged = loose.merge(t.json_path, t.output_file, t.each_line)
    print(f"Merged file {t.output_file}: {merged.documents:,} documents of {merged.files:,} files{loose.told(merged)}")
    return DONE


VERBS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "verify": (verify, "whether token files are whole, with everything that is wrong"),
    "inspect": (inspect, "counts, lengths and frequent tokens; one document; one training sample"),
    "index": (index, "build a training's sample indices ahead of it"),
    "plan": (plan, "which source gives how many samples and epochs under a blend"),
    "merge": (merge, "several pairs of token files to one"),
    "merge-json": (merge_json, "many files of JSON lines or text to one"),
    "fetch": (fetch, "the documents' downloads: vocabularies and samples"),
}
