"""Verbs of `meshwright data` for text before it is tokenized, and the plan of a training's data."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.console import notice
from meshwright.cli.data import IndexConfig, Verb
from meshwright.config.fields import flag, group
from meshwright.config.problem import Problem, missing, stated


@dataclass(frozen=True)
class Planning:
    """Format of the forecast."""

    json: bool = flag(False, "print one line of JSON instead of a table", docs="data")


@dataclass(frozen=True)
class PlanConfig(IndexConfig):
    """Settings of `meshwright data plan`."""

    planning: Planning = Planning()


@dataclass(frozen=True)
@group(docs="data")
class LooseText:
    """Files of text or JSON lines to merge into one file of JSON lines."""

    json_path: str = flag(
        ".", "folder of *.json, *.jsonl and *.txt files", "--json_path", "--data_path", value="PATH"
    )
    output_file: str = flag("merged_output.json", "output file", "--output_file", value="FILE")
    overwrite: bool = flag(False, "replace an output file with another content", docs="")
    each_line: bool = flag(
        False, "treat each line of a .txt file as a document, not the whole file"
    )


@dataclass(frozen=True)
class LooseTextConfig:
    """Settings of `meshwright data merge-json`."""

    loose_text: LooseText = LooseText()


@dataclass(frozen=True)
class Deduplication:
    """Files of JSON lines from which near-duplicates are left out."""

    inputs: list[str] = flag(
        [],
        "files of JSON lines; of similar documents the first one is kept",
        "--input",
        value="FILE",
    )
    output_file: str | None = flag(
        None, "file of JSON lines for what is kept", value="FILE", docs="data"
    )
    removed_file: str | None = flag(
        None, "file that says of each removed document which one it resembles", value="FILE"
    )
    json_key: str = flag("text", "key of the text in each line", "--json-keys", value="NAME")
    threshold: float = flag(
        0.7, "Jaccard index, 0 to 1, from which documents are similar", bound=">0"
    )
    shingle: int = flag(5, "characters of the pieces that are compared", "--char-ngram", bound=">0")
    num_seeds: int = flag(100, "hashes in the signature of a document", "--num_seeds", bound=">0")
    num_bands: int = flag(
        20, "bands of these hashes; more find more pairs", "--num_bands", bound=">0"
    )
    seed: int = flag(1234, "random seed of the hashes, below 2^31", bound=">=0")
    overwrite: bool = flag(False, "replace an output file with another content")


@dataclass(frozen=True)
class DedupConfig:
    """Settings of `meshwright data dedup`."""

    deduplication: Deduplication = Deduplication()

    def problems(self) -> list[Problem]:
        d = self.deduplication
        out = []
        if not d.inputs:
            text = "files of JSON lines are needed: meshwright data dedup A.jsonl B.jsonl ..."
            out.append(Problem(("inputs",), text, "missing"))
        if not d.output_file:
            out.append(missing("output_file", "where to write what is kept"))
        if d.threshold > 1:
            text = f"{stated(d, 'threshold')} is above 1; give a share from 0 to 1"
            out.append(Problem(("threshold",), text))
        if d.seed >= 1 << 31:
            text = f"{stated(d, 'seed')} is too large; give a number below 2^31"
            out.append(Problem(("seed",), text))
        # Each band has as many of the hashes.
        if d.num_bands > 0 and d.num_seeds % d.num_bands:
            text = f"{stated(d, 'num_seeds')} is not a multiple of {stated(d, 'num_bands')}; change one of them"
            out.append(Problem(("num_seeds", "num_bands"), text))
        return out


def plan(config: PlanConfig, dry: bool) -> None:
    from meshwright.apps.datasets import forecast

    forecast.print_plan(config, config.planning.json)


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
    print(
        f"Merged file {t.output_file}: {merged.documents:,} documents of {merged.files:,} files{merged.skipped}"
    )
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
    # Equal sets of pieces: not always equal texts, but told apart from the merely similar.
    same = sum(index == 1 for _, index in out.removed.values())
    removed = f"removed {same:,} with the same pieces as an earlier document and {len(out.removed) - same:,} similar ones"
    print(
        f"{d.output_file}: kept {out.documents - len(out.removed):,} of {out.documents:,} documents; {removed}"
    )
    if out.bad:
        notice(f"left out {out.bad}")
    if out.is_unchanged:
        print(f"{d.output_file} was already there, unchanged")


PLAN = Verb(
    PlanConfig, "which source gives how many samples and epochs: give the training's flags", plan
)
MERGE_JSON = Verb(
    LooseTextConfig, "join files of JSON lines or text into one of JSON lines", merge_json
)
DEDUP = Verb(DedupConfig, "leave near-duplicates out of files of JSON lines", dedup, "inputs")
