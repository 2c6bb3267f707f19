"""`meshwright data plan`: how often a training reads each source, from lengths, without torch."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np

from meshwright.base import console
from meshwright.config import data_paths
from meshwright.config.problem import FLAGS, SettingsError
from meshwright.config.schema import TrainConfig
from meshwright.data import tokenizers
from meshwright.data.blend import blend_order
from meshwright.data.files.indexed import Indexed
from meshwright.data.sets import (
    SetPart,
    SetSpec,
    count_epochs,
    find_parts,
    needed_sets,
    samples_of_epoch,
)

EXACT = 100_000_000  # up to so many samples, a blend is counted in its real order, in some seconds
OFTEN = 4  # epochs after which repeated data are known to help less and less: a warning


def print_plan(config: TrainConfig, as_json: bool) -> None:
    if config.data.mock_data:
        raise SettingsError(
            "{mock_data=True}: random tokens have no source; there is nothing to plan"
        )
    # Of token files that a training would refuse there is nothing to count.
    folder = tokenizers.find_of_data(data_paths.prefixes(config.data))
    if folder is not None:
        tokenizers.resolve_for_data(config.tokenizer, folder)
    config = count_epochs(config)
    # Sets may read the same files, which are opened once.
    indexed = functools.cache(Indexed)
    sets = [
        plan_set(config, spec, find_parts(config, spec, indexed)) for spec in needed_sets(config)
    ]
    warnings = [line for facts in sets for line in facts.pop("warnings")]
    # What the count leaves out of consideration.
    if config.data.blend_stages:
        warnings.append("--blend-stages: counted as if the first blend held throughout")
    if config.data.blend_change_at is not None:
        warnings.append("--blend-change-at: counted as if this blend held from the first sample on")
    if as_json:
        print(json.dumps({"sets": sets, "warnings": warnings}))
        return
    print("\n".join(line for facts in sets for line in format_table(facts)))
    for line in warnings:
        console.notice(f"warning: {line}")


def plan_set(config: TrainConfig, spec: SetSpec, parts: list[SetPart]) -> dict[str, Any]:
    """Count the samples that are read from each source of a set."""
    counts, how = count_samples(spec, parts)
    sources = list[dict[str, Any]]()
    warnings = list[str]()
    for part, count in zip(parts, counts, strict=True):
        # Only in a stream has every sample the same number of tokens.
        if config.data.packing == "stream":
            tokens_read = count * (config.data.seq_length or 1)
            epochs = tokens_read / part.tokens
        else:
            epochs = count / samples_of_epoch(config, part.indexed, part.documents)
            tokens_read = round(epochs * part.tokens)
        source = {
            "prefix": part.prefix,
            "share": part.share,
            "first_document": part.documents.start,
            "documents": len(part.documents),
            "tokens": part.tokens,
            "samples": count,
            "tokens_read": tokens_read,
            "epochs": epochs,
        }
        sources.append(source)
        if spec.key == "train" and epochs > OFTEN:
            advice = "a smaller weight, more data or a shorter run avoids it"
            warnings.append(f"{part.prefix} is read {epochs:.1f} times over in training: {advice}")

    # A set without documents: --split gives it no share, or too small a one.
    if not sources:
        # The flag that the user must look at: the set's own, or --split.
        flag = FLAGS.render(spec.paths.flag)
        share = 1.0
        if spec.paths.divided:
            flag = f"--split {config.data.split}"
            share = config.data.split.shares[data_paths.SPLITS.index(spec.paths.split)]
        how = f"{flag} gives it no share"
        if share:
            how = f"{flag} leaves it no document"
            warnings.append(f"{spec.key} is no set of this training: {how}")
    return {
        "set": spec.key,
        "samples": sum(counts),
        "counted": how,
        "sources": sources,
        "warnings": warnings,
    }


def count_samples(spec: SetSpec, parts: list[SetPart]) -> tuple[list[int], str]:
    """Return how many of a set's samples each part gives, and how they were counted."""
    if spec.in_full:
        return [part.samples for part in parts], "every sample once"
    if not parts:
        return [], "no document"
    if len(parts) == 1:
        return [spec.samples], "one source"
    # Of many samples the shares say enough; of fewer, the order that training itself makes.
    shares = np.array([part.share for part in parts])
    if spec.samples > EXACT:
        counts = [round(share * spec.samples) for share in shares.tolist()]
        return counts, "from the shares: one sample more or less"
    which, _ = blend_order(shares / shares.sum(), spec.samples)
    return np.bincount(which, minlength=len(parts)).tolist(), "in the real order"


def format_table(facts: dict[str, Any]) -> list[str]:
    if not facts["sources"]:
        return [f"{facts['set']}: none; {facts['counted']}", ""]
    read = sum(source["tokens_read"] for source in facts["sources"])
    out = [
        f"{facts['set']}: {facts['samples']:,} samples, {read:,} tokens, counted: {facts['counted']}"
    ]
    out.append(
        "     share     documents              tokens         samples         tokens read    epochs  source"
    )
    for s in facts["sources"]:
        out.append(
            f"{s['share']:>10.4%}{s['documents']:>14,}{s['tokens']:>20,}{s['samples']:>16,}{s['tokens_read']:>20,}"
            f"{s['epochs']:>10.3f}  {s['prefix']}"
        )
    return [*out, ""]
