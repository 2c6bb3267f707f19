"""Check the flags of data sets."""

from __future__ import annotations

import math
import re

from meshwright.config import data_paths
from meshwright.config.grammar import blend_stages, skipped, split_shares
from meshwright.config.schema import Data


def data_problems(d: Data, needed: bool) -> list[str]:
    out = []
    if d.num_workers > 1024:
        out.append(f"--num-workers {d.num_workers} is above 1024; lower it")
    if not 0 <= d.last_epoch_cutoff <= 1:
        out.append(f"--last-epoch-cutoff {d.last_epoch_cutoff} is not in [0, 1]")
    try:
        trains = any(one.split == "train" for one in data_paths.path_sets(d))
        if needed and not trains and not d.mock_data:
            out.append("--data-path is needed (a prefix written by `meshwright preprocess`), or --mock-data")
    except ValueError as error:
        out.append(str(error))
    if d.packing != "stream" and d.mock_data:
        out.append(f"--packing {d.packing} with --mock-data, whose random tokens are no documents; leave one out")
    at = d.blend_change_at
    if at is not None and at != "now" and not re.fullmatch("[0-9]{1,18}", at):
        out.append(f"--blend-change-at {at!r} is neither a sample number nor now")
    if at is not None and d.dataloader_type == "cyclic":
        out.append("--blend-change-at with --dataloader-type cyclic, which reshuffles all samples; give single")
    out += stage_problems(d)
    try:
        skipped(d.skip_train_iteration_range)
    except ValueError as error:
        out.append(f"--skip-train-iteration-range: {error}")
    return out + split_problems(d.split)


def stage_problems(d: Data) -> list[str]:
    """Say what is wrong with --blend-stages."""
    if not d.blend_stages:
        return []
    others = {
        "--blend-change-at": d.blend_change_at is not None,
        "--mock-data": d.mock_data,
        "--dataloader-type cyclic": d.dataloader_type == "cyclic",
    }
    out = [f"--blend-stages with {flag}; leave one of them out" for flag, is_given in others.items() if is_given]
    try:
        stages = blend_stages(d.blend_stages)
    except ValueError as error:
        return [*out, f"--blend-stages: {error}"]
    try:
        train = next((one for one in data_paths.path_sets(d) if one.split == "train"), None)
    except ValueError:
        return out  # reported for the paths
    known = [source.prefix for source in train.sources] if train else []
    for prefix in dict.fromkeys(prefix for stage in stages for prefix in stage.weights):
        if known.count(prefix) != 1 and not d.mock_data:
            flag = train.flag if train else "--data-path"
            why = "is not one of" if prefix not in known else "names several ranges of"
            out.append(
                f"--blend-stages: {prefix} {why} {flag}; give each prefix there once, with weight 0 until its stage"
            )
    return out


def split_problems(split: str) -> list[str]:
    try:
        shares = split_shares(split)
    except ValueError:
        return [f"--split {split!r} is not three numbers such as 949,50,1"]
    if len(shares) > 3 or not 0 < sum(shares) < math.inf or min(shares) < 0:
        return [f"--split {split!r} must be at most three numbers, none below 0 and not all 0"]
    return []
