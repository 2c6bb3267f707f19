"""`meshwright data VERB`: prepare and check token files. Only `index` imports torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.base.console import notice
from meshwright.base.errors import DONE, USAGE, UserError, bad_data
from meshwright.base.hints import did_you_mean, near_prefix
from meshwright.base.storage.addresses import address_of
from meshwright.config import checks, command, data_paths
from meshwright.config.fields import flag, group, spelling, with_settings
from meshwright.config.grammar import prefix_of
from meshwright.config.help import WORDS
from meshwright.config.schema import TokenizerFlags, TrainConfig
from meshwright.runtime.ranks.world import find_world

TOP = 20  # default of --top
USAGE_END = "`meshwright data VERB --help` lists a verb's flags."


@dataclass(frozen=True)
class Verification:
    """Token files to check."""

    prefixes: list[str] = flag(
        [], "prefixes of .bin/.idx pairs, as for --data-path", "--prefix", value="PREFIX", word="PREFIX"
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

    def problems(self) -> list[str]:
        if self.verification.prefixes:
            return []
        return ["a prefix of .bin/.idx is needed, or several: meshwright data verify PREFIX ..."]


@dataclass(frozen=True)
@group(docs="data")
class Inspection:
    """Part of token files to show."""

    prefix: str | None = flag(None, "prefix of a .bin/.idx pair, as for --data-path", value="PREFIX", docs="")
    document: int | None = flag(None, "show only this document, counted from 0", bound=">=0")
    sample: int | None = flag(
        None, "show this sample, counted from 0 in the order of the training whose flags are given", bound=">=0"
    )
    sample_set: str | None = flag(
        None,
        "set that --sample counts in: train (the default), valid, test, or valid/NAME if there are several",
        value="FORM",
    )
    top: int | None = flag(None, "number of most frequent tokens to show (none: 20; 0: skip counting)", bound=">=0")
    picture: str | None = flag(
        None, "write a histogram of document lengths to this .png, .svg or .pdf", value="FILE", docs="data evaluation"
    )
    json: bool = flag(False, "print one line of JSON instead of a table")


@dataclass(frozen=True)
class InspectConfig(TrainConfig):
    """Settings of `meshwright data inspect`; the training's flags define the samples."""

    inspection: Inspection = Inspection()

    def problems(self) -> list[str]:
        i, out = self.inspection, []
        if not i.prefix and i.sample is None:
            out.append("a prefix of .bin/.idx is needed: meshwright data inspect PREFIX")
        if i.document is not None and i.sample is not None:
            out.append(f"--document {i.document} and --sample {i.sample} exclude each other; give one")
        if i.sample is None and i.sample_set is not None:
            out.append(f"--sample-set {i.sample_set} needs --sample; say which sample of the set to show")
        for name in ("document", "sample"):
            others = [spelling(other) for other in ("top", "picture") if getattr(i, other) is not None]
            if others and getattr(i, name) is not None:
                flags = " and ".join(others)
                out.append(f"--{name} shows nothing else, but {flags} covers all documents; leave one out")
        return out if i.sample is None else out + checks.forecast_problems(self, needs_data=not i.prefix)


@dataclass(frozen=True)
class IndexConfig(TrainConfig):
    """Settings of `meshwright data index`: every flag of the training."""

    def problems(self) -> list[str]:
        return checks.forecast_problems(self)


@dataclass(frozen=True)
class Planning:
    """Format of the forecast."""

    json: bool = flag(False, "print one line of JSON instead of a table", docs="data")


@dataclass(frozen=True)
class PlanConfig(IndexConfig):
    """Settings of `meshwright data plan`."""

    planning: Planning = Planning()


@dataclass(frozen=True)
class Merging:
    """Token files to merge into one pair."""

    datasets: list[str] = flag([], "prefixes of .bin/.idx pairs, joined in this order", "--prefixes", value="PREFIX")
    input: str | None = flag(
        None, "folder whose pairs are all merged, sorted by name", value="PATH", docs="data evaluation"
    )
    output_prefix: str | None = flag(None, "prefix of the output files", value="PREFIX", docs="data")
    overwrite: bool = flag(False, "replace token files that were merged from others")
    merge: Literal["serial", "distributed"] = flag(
        "serial", "copy one file at a time, or several at once, which is faster on network disks", docs="data"
    )


@dataclass(frozen=True)
class MergeConfig:
    """Settings of `meshwright data merge`."""

    merging: Merging = Merging()

    def problems(self) -> list[str]:
        m = self.merging
        out = [] if m.output_prefix else ["--output-prefix is needed: where to write"]
        if bool(m.datasets) == bool(m.input):
            out.append("give either prefixes of .bin/.idx (meshwright data merge A B ...) or --input FOLDER")
        return out


@dataclass(frozen=True)
class Fetching:
    """Files to download."""

    names: list[str] = flag(
        [], "names of known files, or addresses; without any, list the known files", "--name", value="NAME"
    )
    output: str = flag(".", "folder to download to", value="PATH", docs="tutorial")
    sha256: str | None = flag(None, "expected SHA-256 of the file, if there is only one", value="FORM", docs="data")


@dataclass(frozen=True)
class FetchConfig:
    """Settings of `meshwright data fetch`."""

    fetching: Fetching = Fetching()

    def problems(self) -> list[str]:
        f = self.fetching
        if not f.sha256 or len(f.names) == 1:
            return []
        return [f"--sha256 is for one file, but {len(f.names)} are named; fetch them one at a time"]


@dataclass(frozen=True)
@group(docs="data")
class LooseText:
    """Files of text or JSON lines to merge into one file of JSON lines."""

    json_path: str = flag(".", "folder of *.json, *.jsonl and *.txt files", "--json_path", "--data_path", value="PATH")
    output_file: str = flag("merged_output.json", "output file", "--output_file", value="FILE")
    overwrite: bool = flag(False, "replace an output file with another content", docs="")
    each_line: bool = flag(False, "treat each line of a .txt file as a document, not the whole file")


@dataclass(frozen=True)
class LooseTextConfig:
    """Settings of `meshwright data merge-json`."""

    loose_text: LooseText = LooseText()


@dataclass(frozen=True)
class Deduplication:
    """Files of JSON lines from which near-duplicates are left out."""

    inputs: list[str] = flag(
        [], "files of JSON lines; of similar documents the first one is kept", "--input", value="FILE"
    )
    output_file: str | None = flag(None, "file of JSON lines for what is kept", value="FILE", docs="data")
    removed_file: str | None = flag(
        None, "file that says of each removed document which one it resembles", value="FILE"
    )
    json_key: str = flag("text", "key of the text in each line", "--json-keys", value="NAME")
    threshold: float = flag(0.7, "Jaccard index, 0 to 1, from which documents are similar", bound=">0")
    shingle: int = flag(5, "characters of the pieces that are compared", "--char-ngram", bound=">0")
    num_seeds: int = flag(100, "hashes in the signature of a document", "--num_seeds", bound=">0")
    num_bands: int = flag(20, "bands of these hashes; more find more pairs", "--num_bands", bound=">0")
    seed: int = flag(1234, "random seed of the hashes, below 2^31", bound=">=0")
    overwrite: bool = flag(False, "replace an output file with another content")


@dataclass(frozen=True)
class DedupConfig:
    """Settings of `meshwright data dedup`."""

    deduplication: Deduplication = Deduplication()

    def problems(self) -> list[str]:
        d = self.deduplication
        out = [] if d.inputs else ["files of JSON lines are needed: meshwright data dedup A.jsonl B.jsonl ..."]
        if not d.output_file:
            out.append("--output-file is needed: where to write what is kept")
        if d.threshold > 1:
            out.append(f"--threshold {d.threshold:g} is above 1; give a share from 0 to 1")
        if d.num_bands > 0 and d.num_seeds % d.num_bands:
            out.append(f"--num-seeds {d.num_seeds} is not a multiple of --num-bands {d.num_bands}; change one of them")
        return out


def main(argv: list[str]) -> int:
    if argv[:1] == ["help"] and argv[1:]:  # help VERB [TOPIC]
        argv = [argv[1], "--help", *argv[2:]]
    name = argv[0] if argv else ""
    lines = [f"  {verb:<12} {about}" for verb, (_, about, _, _) in VERBS.items()]
    usage = "\n".join(["usage: meshwright data VERB [flags]", "", *lines, "", USAGE_END])
    if name in ("", "help", *WORDS):
        print(usage)
        return DONE if name else USAGE
    if name not in VERBS:
        print(f"meshwright data: no verb {name!r}{did_you_mean(name, VERBS)}\n{usage}", file=sys.stderr)
        return USAGE
    settings, about, positional, work = VERBS[name]
    parsed = command.settings(settings, argv[1:], f"data {name}", f"{about[0].upper()}{about[1:]}.", positional)
    if parsed is not None:
        work(parsed.config, parsed.dry_run)
    return DONE


def strip_endings(words: list[str], must_exist: bool = True) -> list[str]:
    """Return prefixes of token files; a word may also name one file of a pair, or both."""
    out = list[str]()
    for word in words:
        prefix = prefix_of(word)
        lost = next((end for end in (".idx", ".bin") if must_exist and not Path(prefix + end).exists()), "")
        if lost:
            raise bad_data(f"{prefix}{lost} does not exist{near_prefix(prefix)}")
        if address_of(prefix) is not None:
            what = f"what is here of {prefix} are the blocks that a run has read, with holes between them"
            raise UserError(f"{what}; copy both objects to another folder, and give that one's")
        if prefix == word or prefix not in out:  # a pattern names both
            out.append(prefix)
    return out


def check_files(config: VerifyConfig, dry: bool) -> None:
    from meshwright.data import tokenizers
    from meshwright.data.files.verify import verify_pairs

    v, t = config.verification, config.tokenizer
    prefixes = strip_endings(v.prefixes, must_exist=False)
    checksums = Path(v.checksums) if v.checksums else None
    if dry:
        also = f" and {'compare' if checksums.exists() else 'write'} {checksums}" if checksums else ""
        print(f"would check {', '.join(prefixes)}{also}")
        return
    if tokenizers.is_named(t) or t.tokenizer_type != TokenizerFlags().tokenizer_type:
        tokenizers.build_tokenizer(t)  # a mistake in the flags is no problem of the data
    verify_pairs(prefixes, t, checksums)


def inspect(config: InspectConfig, dry: bool) -> None:
    from meshwright.data import tokenizers

    i = config.inspection
    prefix = strip_endings([i.prefix])[0] if i.prefix else None
    read = with_prefix(config, prefix) if i.sample is not None else config
    folder = tokenizers.find_of_data([prefix] if prefix else data_paths.prefixes(read.data))
    tokenizer = tokenizers.resolve_for_data(config.tokenizer, folder)
    if dry:
        print(f"would read {prefix or 'the data of the training'}")
        return
    from meshwright.apps.datasets import statistics
    from meshwright.data.files.indexed import Indexed

    if i.sample is not None:
        from meshwright.apps.datasets.forecast import show_sample

        show_sample(read, tokenizer, i.sample, i.sample_set or "train", i.json)
        return
    assert prefix
    indexed = Indexed(prefix)
    if i.document is not None:
        facts = statistics.describe_document(indexed, i.document, tokenizer)
        text = facts.pop("text") if "text" in facts and not i.json else None
        print(json.dumps(facts, ensure_ascii=False) if text is None else text)
        return
    facts = statistics.summary(indexed, TOP if i.top is None else i.top, tokenizer)
    facts |= {"tokenizer": tokenizers.describe_folder(folder), "tokenizer_folder": str(folder)} if folder else {}
    if i.picture:
        statistics.draw_histogram(facts, Path(i.picture))
    print(json.dumps(facts, ensure_ascii=False) if i.json else "\n".join(statistics.format_summary(facts)))


def with_prefix(config: InspectConfig, prefix: str | None) -> InspectConfig:
    """Put a prefix given without a flag in the place of --data-path."""
    named = data_paths.path_settings(config.data)
    if prefix and named:
        raise UserError(f"{prefix} and {spelling(named[0])} both name the data; give one")
    return with_settings(config, data_path=[prefix]) if prefix else config


def index(config: IndexConfig, dry: bool) -> None:
    from meshwright.apps.datasets import forecast
    from meshwright.data import tokenizers

    tokenizer = tokenizers.resolve_for_data(config.tokenizer, tokenizers.find_of_data(data_paths.prefixes(config.data)))
    forecast.build_index(config, tokenizer.size if tokenizer else config.tokenizer.vocab_size, dry)


def plan(config: PlanConfig, dry: bool) -> None:
    from meshwright.apps.datasets import forecast

    forecast.print_plan(config, config.planning.json)


def merge_command(config: MergeConfig, dry: bool) -> None:
    from meshwright.base.progress import Clock
    from meshwright.data.files import merge as work

    m, clock, world = config.merging, Clock(), find_world(os.environ)
    assert m.output_prefix
    if world.rank:
        return
    if world.size > 1:
        notice(f"note: {world.size} processes were started; only this one merges, because the disk sets the speed")
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


def merge_json(config: LooseTextConfig, dry: bool) -> None:
    from meshwright.apps.datasets.merge_json import READ_BY, merge_json_files

    t = config.loose_text
    if dry:
        print(f"would merge the files of {t.json_path} into {t.output_file}")
        return
    merged = merge_json_files(t.json_path, t.output_file, t.each_line, t.overwrite)
    if merged.is_unchanged:
        print(f"{t.output_file} is already there, unchanged: {merged.documents:,} documents")
        return
    print(f"Merged file {t.output_file}: {merged.documents:,} documents of {merged.files:,} files{merged.skipped}")
    if merged.passed:
        notice(merged.passed.line(READ_BY))


def dedup(config: DedupConfig, dry: bool) -> None:
    from meshwright.apps.datasets import dedup as work

    d = config.deduplication
    assert d.output_file
    if dry:
        print(f"would read {', '.join(d.inputs)} and write {d.output_file}")
        return
    rule = work.Similarity(d.json_key, d.threshold, d.shingle, d.num_seeds, d.num_bands, d.seed)
    out = work.deduplicate(d.inputs, d.output_file, rule, d.removed_file, d.overwrite)
    same = sum(index == 1 for _, index in out.removed.values())
    removed = (
        f"removed {same:,} with the same pieces as an earlier document and {len(out.removed) - same:,} similar ones"
    )
    print(f"{d.output_file}: kept {out.documents - len(out.removed):,} of {out.documents:,} documents; {removed}")
    if out.bad:
        notice(f"left out {out.bad}")
    if out.is_unchanged:
        print(f"{d.output_file} was already there, unchanged")


def fetch(config: FetchConfig, dry: bool) -> None:
    from meshwright.apps.datasets.fetch import fetch_files

    f = config.fetching
    fetch_files(f.names, Path(f.output), f.sha256, dry)


# Name: settings, help, the setting that words without a flag give, function.
VERBS: dict[str, tuple[type[Any], str, str | None, Callable[[Any, bool], None]]] = {
    "verify": (VerifyConfig, "check token files completely and list everything that is wrong", "prefixes", check_files),
    "inspect": (InspectConfig, "counts, lengths, frequent tokens; one document or training sample", "prefix", inspect),
    "index": (IndexConfig, "build a training's sample indices ahead of it: give all of its flags", None, index),
    "plan": (PlanConfig, "which source gives how many samples and epochs: give the training's flags", None, plan),
    "merge": (MergeConfig, "join pairs of token files, in the order given", "datasets", merge_command),
    "merge-json": (LooseTextConfig, "join files of JSON lines or text into one of JSON lines", None, merge_json),
    "dedup": (DedupConfig, "leave near-duplicates out of files of JSON lines", "inputs", dedup),
    "fetch": (FetchConfig, "download known files or any http(s) address, resumed and checked", "names", fetch),
}
