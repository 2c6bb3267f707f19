"""`meshwright data VERB`: prepare and check token files. Only `index` imports torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.base import registry
from meshwright.base.console import notice
from meshwright.base.errors import DONE, USAGE, UserError, bad_data
from meshwright.base.hints import did_you_mean, near_prefix
from meshwright.base.storage.addresses import address_of
from meshwright.config import checks, command, data_paths
from meshwright.config.fields import flag, group, spelling, with_settings
from meshwright.config.grammar import prefix_of
from meshwright.config.help import WORDS
from meshwright.config.problem import Problem, missing, named, stated
from meshwright.config.schema import TokenizerFlags, TrainConfig
from meshwright.runtime.ranks.world import find_world

TOP = 20  # default of --top
# The order of the list, which an installation's metadata does not keep.
IN_ORDER = ("verify", "inspect", "index", "plan", "merge", "merge-json", "dedup")
USAGE_END = "`meshwright data VERB --help` lists a verb's flags."


@dataclass(frozen=True)
class Verification:
    """Token files to check."""

    prefixes: list[str] = flag(
        [],
        "prefixes of .bin/.idx pairs, as for --data-path",
        "--prefix",
        value="PREFIX",
        word="PREFIX",
    )
    checksums: str | None = flag(
        None,
        "file in sha256sum's format: compared if it exists, otherwise written once everything is found intact",
        value="FILE",
        docs="data",
    )


@dataclass(frozen=True)
class VerifyConfig:
    """Settings of `meshwright data verify`."""

    verification: Verification = Verification()
    tokenizer: TokenizerFlags = TokenizerFlags()

    def problems(self) -> list[Problem]:
        if self.verification.prefixes:
            return []
        text = "a prefix of .bin/.idx is needed, or several: meshwright data verify PREFIX ..."
        return [Problem(("prefixes",), text, "missing")]


@dataclass(frozen=True)
@group(docs="data")
class Inspection:
    """Part of token files to show."""

    prefix: str | None = flag(
        None, "prefix of a .bin/.idx pair, as for --data-path", value="PREFIX", docs=""
    )
    document: int | None = flag(None, "show only this document, counted from 0", bound=">=0")
    sample: int | None = flag(
        None,
        "show this sample, counted from 0 in the order of the training whose flags are given",
        bound=">=0",
    )
    sample_set: str | None = flag(
        None,
        "set that --sample counts in: train (the default), valid, test, or valid/NAME if there are several",
        value="FORM",
    )
    top: int | None = flag(
        None, "number of most frequent tokens to show (none: 20; 0: skip counting)", bound=">=0"
    )
    picture: str | None = flag(
        None,
        "write a histogram of document lengths to this .png, .svg or .pdf",
        value="FILE",
        docs="data evaluation",
    )
    json: bool = flag(False, "print one line of JSON instead of a table")


@dataclass(frozen=True)
class InspectConfig(TrainConfig):
    """Settings of `meshwright data inspect`; the training's flags define the samples."""

    inspection: Inspection = Inspection()

    def problems(self) -> list[Problem]:
        i = self.inspection
        out = []
        if not i.prefix and i.sample is None:
            text = "a prefix of .bin/.idx is needed: meshwright data inspect PREFIX"
            out.append(Problem(("prefix",), text, "missing"))
        if i.document is not None and i.sample is not None:
            text = f"{stated(i, 'document')} and {stated(i, 'sample')} exclude each other; give one"
            out.append(Problem(("document", "sample"), text))
        if i.sample is None and i.sample_set is not None:
            text = (
                f"{stated(i, 'sample_set')} needs {{sample}}; say which sample of the set to show"
            )
            out.append(Problem(("sample_set",), text))
        # A document or a sample is shown alone; counts and pictures are of all documents.
        others = [other for other in ("top", "picture") if getattr(i, other) is not None]
        for name in ("document", "sample"):
            if others and getattr(i, name) is not None:
                text = f"{{{name}}} shows nothing else, but {named(others)} covers all documents; leave one out"
                out.append(Problem((name, *others), text))
        # A sample belongs to a training, so that the training's flags must be right.
        if i.sample is not None:
            out += checks.forecast_problems(self, needs_data=not i.prefix)
        return out


@dataclass(frozen=True)
class IndexConfig(TrainConfig):
    """Settings of `meshwright data index`: every flag of the training."""

    def problems(self) -> list[Problem]:
        return checks.forecast_problems(self)


@dataclass(frozen=True)
class Merging:
    """Token files to merge into one pair."""

    datasets: list[str] = flag(
        [], "prefixes of .bin/.idx pairs, joined in this order", "--prefixes", value="PREFIX"
    )
    input: str | None = flag(
        None,
        "folder whose pairs are all merged, sorted by name",
        value="PATH",
        docs="data evaluation",
    )
    output_prefix: str | None = flag(
        None, "prefix of the output files", value="PREFIX", docs="data"
    )
    overwrite: bool = flag(False, "replace token files that were merged from others")
    merge: Literal["serial", "distributed"] = flag(
        "serial",
        "copy one file at a time, or several at once, which is faster on network disks",
        docs="data",
    )


@dataclass(frozen=True)
class MergeConfig:
    """Settings of `meshwright data merge`."""

    merging: Merging = Merging()

    def problems(self) -> list[Problem]:
        m = self.merging
        out = [] if m.output_prefix else [missing("output_prefix", "where to write")]
        # Exactly one of the two says what is merged.
        if bool(m.datasets) == bool(m.input):
            text = "give either prefixes of .bin/.idx (meshwright data merge A B ...) or {input=FOLDER}"
            out.append(Problem(("datasets", "input"), text))
        return out


@dataclass(frozen=True)
class Verb:
    """What `meshwright data` does under one name of the registry's group data_commands."""

    config: type[Any]  # its settings
    about: str  # a line of the help
    # takes the settings, and whether only to say what it would do
    work: Callable[[Any, bool], None]
    positional: str | None = None  # the setting that words without a flag give


def verbs() -> dict[str, Verb]:
    """Return the verbs of this installation; other packages' come last."""
    found = registry.load("data_commands")
    # Ours are in the order of the work.
    ours = [name for name in IN_ORDER if name in found]
    theirs = [name for name in found if name not in IN_ORDER]
    return {name: found[name] for name in (*ours, *theirs)}


def main(argv: list[str]) -> int:
    if argv[:1] == ["help"] and argv[1:]:  # help VERB [TOPIC]
        _, verb_name, *topic = argv
        argv = [verb_name, "--help", *topic]
    name, *words = argv or [""]
    if name in ("", "help", *WORDS):
        print(usage())
        return DONE if name else USAGE
    # Verbs of apps and of other packages are found like commands.
    verb: Verb | None = registry.find("data_commands", name)
    if verb is None:
        hint = did_you_mean(name, registry.entries("data_commands"))
        print(f"meshwright data: no verb {name!r}{hint}\n{usage()}", file=sys.stderr)
        return USAGE
    about = f"{verb.about[0].upper()}{verb.about[1:]}."
    parsed = command.settings(verb.config, words, f"data {name}", about, verb.positional)
    if parsed is not None:
        verb.work(parsed.config, parsed.dry_run)
    return DONE


def usage() -> str:
    lines = [f"  {name:<12} {verb.about}" for name, verb in verbs().items()]
    return "\n".join(["usage: meshwright data VERB [flags]", "", *lines, "", USAGE_END])


def strip_endings(words: list[str], must_exist: bool = True) -> list[str]:
    """Return prefixes of token files; a word may also name one file of a pair, or both."""
    out = list[str]()
    for word in words:
        prefix = prefix_of(word)
        for ending in (".idx", ".bin"):
            if must_exist and not Path(prefix + ending).exists():
                raise bad_data(f"{prefix}{ending} does not exist{near_prefix(prefix)}")
        # A run's own copy of an object holds only the blocks that were read so far.
        if address_of(prefix) is not None:
            what = f"what is here of {prefix} are the blocks that a run has read, with holes between them"
            raise UserError(f"{what}; copy both objects to another folder, and give that one's")
        if prefix == word or prefix not in out:  # a pattern names both
            out.append(prefix)
    return out


def check_files(config: VerifyConfig, dry: bool) -> None:
    from meshwright.data import tokenizers
    from meshwright.data.files.verify import verify_pairs

    v = config.verification
    t = config.tokenizer
    prefixes = strip_endings(v.prefixes, must_exist=False)
    checksums = Path(v.checksums) if v.checksums else None
    if dry:
        also = ""
        if checksums:
            also = f" and {'compare' if checksums.exists() else 'write'} {checksums}"
        print(f"would check {', '.join(prefixes)}{also}")
        return
    if tokenizers.is_named(t) or t.tokenizer_type != TokenizerFlags().tokenizer_type:
        tokenizers.build_tokenizer(t)  # a mistake in the flags is no problem of the data
    verify_pairs(prefixes, t, checksums)


def inspect(config: InspectConfig, dry: bool) -> None:
    from meshwright.data import tokenizers

    i = config.inspection
    # PREFIX stands for the --data-path of the training that a sample belongs to.
    prefix = strip_endings([i.prefix])[0] if i.prefix else None
    read = with_prefix(config, prefix) if i.sample is not None else config
    folder = tokenizers.find_of_data([prefix] if prefix else data_paths.prefixes(read.data))
    tokenizer = tokenizers.resolve_for_data(config.tokenizer, folder)
    if dry:
        print(f"would read {prefix or 'the data of the training'}")
        return
    from meshwright.data import statistics
    from meshwright.data.files.indexed import Indexed

    if i.sample is not None:
        from meshwright.data.ahead import show_sample

        show_sample(read, tokenizer, i.sample, i.sample_set or "train", i.json)
        return
    assert prefix
    indexed = Indexed(prefix)
    if i.document is not None:
        facts = statistics.describe_document(indexed, i.document, tokenizer)
        # The text alone is what a reader wants; with --json it is one of the facts.
        text = facts.pop("text") if "text" in facts and not i.json else None
        print(json.dumps(facts, ensure_ascii=False) if text is None else text)
        return
    facts = statistics.summary(indexed, TOP if i.top is None else i.top, tokenizer)
    if folder:
        facts["tokenizer"] = tokenizers.describe_folder(folder)
        facts["tokenizer_folder"] = str(folder)
    if i.picture:
        statistics.draw_histogram(facts, Path(i.picture))
    if i.json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print("\n".join(statistics.format_summary(facts)))


def with_prefix(config: InspectConfig, prefix: str | None) -> InspectConfig:
    """Put a prefix given without a flag in the place of --data-path."""
    named = data_paths.path_settings(config.data)
    if prefix and named:
        raise UserError(f"{prefix} and {spelling(named[0])} both name the data; give one")
    return with_settings(config, data_path=[prefix]) if prefix else config


def index(config: IndexConfig, dry: bool) -> None:
    from meshwright.data import ahead, tokenizers

    tokenizer = tokenizers.resolve_for_data(
        config.tokenizer, tokenizers.find_of_data(data_paths.prefixes(config.data))
    )
    ahead.build_index(config, tokenizer.size if tokenizer else config.tokenizer.vocab_size, dry)


def merge_command(config: MergeConfig, dry: bool) -> None:
    from meshwright.base.progress import Clock
    from meshwright.data.files import merge as work

    m = config.merging
    clock = Clock()
    world = find_world(os.environ)
    # If several ranks were started by mistake, one merges and the others end.
    assert m.output_prefix
    if world.rank:
        return
    if world.size > 1:
        notice(
            f"note: {world.size} processes were started; only this one merges, because the disk sets the speed"
        )
    prefixes = strip_endings(m.datasets) or work.find_pairs(m.input or "", m.output_prefix)
    if dry:
        print(f"would merge {', '.join(prefixes)} into {m.output_prefix}")
        return
    made = work.merge_pairs(prefixes, m.output_prefix, m.merge == "distributed", m.overwrite)
    if made is None:
        print(f"{m.output_prefix}.bin/.idx is already there, unchanged")
        return
    size = made.tokens * made.dtype.itemsize
    counts = f"{made.documents:,} documents, {made.sequences:,} sequences, {made.tokens:,} tokens, {size:,} bytes"
    head = f"merged {len(prefixes):,} datasets to {made.prefix}.bin/.idx"
    print(f"{head}: {counts} ({made.dtype.name}), {clock.speed(size)}")


VERIFY = Verb(
    VerifyConfig,
    "check token files completely and list everything that is wrong",
    check_files,
    "prefixes",
)
INSPECT = Verb(
    InspectConfig,
    "counts, lengths, frequent tokens; one document or training sample",
    inspect,
    "prefix",
)
INDEX = Verb(
    IndexConfig, "build a training's sample indices ahead of it: give all of its flags", index
)
MERGE = Verb(
    MergeConfig, "join pairs of token files, in the order given", merge_command, "datasets"
)
