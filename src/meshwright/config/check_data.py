"""Check the flags of data sets."""

from __future__ import annotations

import itertools
import re

from meshwright.config import data_paths
from meshwright.config.grammar import BlendStage
from meshwright.config.problem import Problem, plain, stated
from meshwright.config.schema import Data


def data_problems(d: Data, needed: bool) -> list[Problem]:
    out = []
    if d.num_workers > 1024:
        out.append(Problem(("num_workers",), f"{stated(d, 'num_workers')} is above 1024; lower it"))
    if not 0 <= d.last_epoch_cutoff <= 1:
        out.append(
            Problem(("last_epoch_cutoff",), f"{stated(d, 'last_epoch_cutoff')} is not in [0, 1]")
        )
    # The paths are read here only to check them; token files are not opened.
    try:
        trains = any(one.split == "train" for one in data_paths.path_sets(d))
        if needed and not trains and not d.mock_data:
            text = "{data_path} is needed (a prefix written by `meshwright preprocess`), or {mock_data=True}"
            out.append(Problem(("data_path", *data_paths.path_settings(d)), text, "missing"))
    except ValueError as error:
        out.append(Problem(tuple(data_paths.path_settings(d)), str(error)))
    if d.packing != "stream" and d.mock_data:
        text = f"{stated(d, 'packing')} with {{mock_data=True}}, whose random tokens are no documents; leave one out"
        out.append(Problem(("packing", "mock_data"), text))
    at = d.blend_change_at
    # 18 digits are within 64 bits.
    if at is not None and at != "now" and not re.fullmatch("[0-9]{1,18}", at):
        text = f"{{blend_change_at}} {plain(repr(at))} is neither a sample number nor now"
        out.append(Problem(("blend_change_at",), text))
    if at is not None and d.dataloader_type == "cyclic":
        text = "{blend_change_at} with {dataloader_type=cyclic}, which reshuffles all samples; give single"
        out.append(Problem(("blend_change_at", "dataloader_type"), text))
    out += stage_problems(d)
    # Both ends of a range count, so that equal ends overlap.
    ranges = sorted(d.skip_train_iteration_range, key=lambda one: one.first)
    if any(after.first <= before.last for before, after in itertools.pairwise(ranges)):
        given = " ".join(map(str, d.skip_train_iteration_range))
        text = f"{{skip_train_iteration_range}}: the ranges {given} overlap"
        out.append(Problem(("skip_train_iteration_range",), text))
    return out


def stage_problems(d: Data) -> list[Problem]:
    """Say what is wrong with --blend-stages."""
    if not d.blend_stages:
        return []
    others = {
        "blend_change_at": ("{blend_change_at}", d.blend_change_at is not None),
        "mock_data": ("{mock_data=True}", d.mock_data),
        "dataloader_type": ("{dataloader_type=cyclic}", d.dataloader_type == "cyclic"),
    }
    # Stages need files, samples in one order, and no other change of the blend.
    out = []
    for name, (other, is_given) in others.items():
        if is_given:
            text = f"{{blend_stages}} with {other}; leave one of them out"
            out.append(Problem(("blend_stages", name), text))
    # One mistake in the order makes all later stages look wrong: the first is enough.
    before: BlendStage | None = None
    for stage in d.blend_stages:
        if not stage.follows(before):
            text = f"{plain(repr(stage))} does not begin after the blend before it; give stages in their order"
            return [*out, Problem(("blend_stages",), f"{{blend_stages}}: {text}")]
        before = stage
    return out + _stage_prefix_problems(d)


def _stage_prefix_problems(d: Data) -> list[Problem]:
    """Check that each prefix of a stage is one source of the training set."""
    try:
        train = next((one for one in data_paths.path_sets(d) if one.split == "train"), None)
    except ValueError:
        return []  # reported for the paths
    if d.mock_data:
        return []  # reported above
    # All sources are opened at the start, so that a later stage cannot fail for want of a file.
    known = [source.prefix for source in train.sources] if train else []
    paths = train.flag if train else "{data_path}"
    advice = "give each prefix there once, with weight 0 until its stage"
    out = []
    for prefix in dict.fromkeys(prefix for stage in d.blend_stages for prefix, _ in stage.weights):
        if known.count(prefix) != 1:
            why = "is not one of" if prefix not in known else "names several ranges of"
            text = f"{{blend_stages}}: {plain(prefix)} {why} {paths}; {advice}"
            out.append(Problem(("blend_stages",), text))
    return out
