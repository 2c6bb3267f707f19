"""Describe what a checkpoint of any program holds, and how two of them differ."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.base.errors import bad_data, not_a_run
from meshwright.checkpoint import disks, loading, native, steps
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.manifests import DamagedCheckpoint, Manifest, verify_step
from meshwright.checkpoint.saved_model import recorded_settings
from meshwright.checkpoint.sources import Source, TensorInfo
from meshwright.checkpoint.steps import StepLocation
from meshwright.config import fields, flags
from meshwright.config.schema import TrainConfig
from meshwright.data.history import BlendHistory


@dataclass(frozen=True)
class Detail:
    """How closely to look: verify every byte, list tensors, and list the boxes of each."""

    full: bool = False
    tensors: bool = False
    boxes: bool = False


def describe_folder(
    path: str | Path,
    step: int | None = None,
    detail: Detail = Detail(),
    options: OpenOptions = loading.PLAIN,
) -> tuple[list[str], bool]:
    """Describe every step in a folder, or one; return the lines and whether all is undamaged."""
    root, named = steps.split_path(path)
    number = named if step is None else step
    if not root.exists():
        raise not_a_run(root, "checkpoint")
    # A file is another program's, though steps of ours may be beside it.
    is_file = named is None and Path(path).is_file()
    present = [] if is_file else steps.list_steps(root)
    if present and (number is None or number in present):
        return describe_steps(root, number, detail, options)
    # The folder has steps, but not this one.
    if present and number is not None:
        raise steps.no_such_step(root, number, present)
    # Without steps of ours it is another program's, whose steps have names of their own.
    folder = Path(path) if step is None else steps.step_folder(root, step)
    if not folder.exists():
        raise bad_data(f"there is no {folder}; name another program's step by its folder")
    return describe_foreign(loading.require_checkpoint(folder, options), detail), True


def describe_foreign(source: Source, detail: Detail) -> list[str]:
    contents = "weights and optimizer state" if source.has_optimizer else "weights"
    layout = f", {source.layout}" if source.layout else ""
    lines = [
        f"{source.folder}",
        f"  {source.kind} checkpoint{layout}: {contents}",
        summarize(source),
    ]
    lines += [f"    {note.strip()}" for note in source.notes]
    if detail.full:
        lines.append("    --full: it has no checksums, so its bytes cannot be verified")
    return lines + list_contents(source, detail)


def describe_steps(
    root: Path, step: int | None, detail: Detail, options: OpenOptions
) -> tuple[list[str], bool]:
    """Describe our steps, the newest undamaged in detail; also return whether all are undamaged."""
    contents: list[str] | None = None
    undamaged = True
    lines = [f"{root}"]
    how = "sizes: ok, contents not checked (--full does)"
    if detail.full:
        how = "verified: yes, every byte"
    for number in steps.list_steps(root) if step is None else [step]:
        folder = steps.step_folder(root, number)
        kind = steps.kind_of_folder(folder) or steps.NATIVE
        try:
            manifest = verify_step(folder, detail.full)
            # Nothing is verified a second time.
            source = loading.open_step(
                StepLocation(kind, folder, number, root), options._replace(verify="none")
            )
        except DamagedCheckpoint as damage:
            lines.append(f"  {folder.name}  verified: NO, {damage}")
            undamaged = False
            continue
        except disks.OnOtherMachine:
            lines += [f"  {folder.name}  {how}", *describe_elsewhere(folder, manifest)]
            continue

        # Two lines for each step; --ckpt-format has written one without files of ranks.
        ranks = sum(name.startswith("rank_") for name in manifest)
        by = f"{source.kind}'s tree: {source.layout}"
        if ranks:
            by = f"written by {ranks} rank{'s' * (ranks != 1)}"
        size = sum(file.size for file in manifest.values())
        lines += [f"  {folder.name}  {how}", f"{summarize(source)} | {size:,} bytes, {by}"]
        lines += describe_elsewhere(folder, manifest)
        if contents is None:
            contents = list_contents(source, detail)
    return lines + (contents or []), undamaged


def describe_elsewhere(folder: Path, manifest: Manifest) -> list[str]:
    """Say which files of a step are on the disks of other machines."""
    lines = []
    for place, names in disks.list_elsewhere(folder, manifest).items():
        number = f"{len(names)} of {len(manifest)} files"
        collect = f"`meshwright collect {folder.parent} --from {shlex.quote(place)}`"
        lines.append(f"    {number} are on {place}; {collect} brings them here")
    return lines


def summarize(source: Source) -> str:
    # A name with a slash is that of a weight's moment or average.
    parameters = sum(
        math.prod(info.shape) for name, info in source.tensors.items() if "/" not in name
    )
    step = source.state.get("iteration", source.step)
    progress = "no step recorded"
    if step or source.state:
        samples = source.state.get("consumed_train_samples", "not recorded")
        progress = f"iteration {step} | consumed samples {samples}"
    return f"    {progress} | parameters {parameters:,}"


def list_contents(source: Source, detail: Detail) -> list[str]:
    lines = list_settings(source.config)
    blends = BlendHistory.from_state(source.state.get("blends"))
    if blends:
        lines += [f"  {line}" for line in blends.lines()]
    if not (detail.tensors or detail.boxes):
        return lines
    for name, info in sorted(source.tensors.items()):
        lines.append(describe_tensor(source, name, info))
        if detail.boxes:
            lines += [f"    {file} {native.ranges(box)}" for file, box in source.parts(name)]
    return lines


def describe_tensor(source: Source, name: str, info: TensorInfo) -> str:
    """Return a line of a tensor: its shape, type and size, and over how many files it is spread."""
    shape = "x".join(map(str, info.shape)) or "scalar"
    dtype = native.NAMES[info.dtype]
    size = math.prod(info.shape) * native.SIZES[dtype]
    # Each rank that held a part of the tensor has saved it as a box of its own file.
    boxes = source.parts(name)
    files = {file for file, _ in boxes}
    return (
        f"  {name:40} {shape:>16} {dtype:>4} "
        f"{size:>16,} bytes in "
        f"{len(boxes)} boxes, {len(files)} files"
    )


def list_settings(saved: Mapping[str, Any]) -> list[str]:
    """List by group the settings that the run was made with, except those at their defaults."""
    defaults = flags.to_dict(TrainConfig())
    lines = []
    for group, kind in fields.config_groups(TrainConfig).items():
        names = (f.name for f in dataclasses.fields(kind))
        changed = [
            f"{name} {saved[name]}"
            for name in names
            if name in saved and saved[name] != defaults[name]
        ]
        if changed:
            lines.append(f"  {group}: {', '.join(changed)}")
    return lines


# Two checkpoints


def compare_checkpoints(first: str | Path, second: str | Path, options: OpenOptions) -> list[str]:
    """List the settings and tensors in which two checkpoints differ, one tensor at a time."""
    a, b = (loading.require_checkpoint(path, options) for path in (first, second))
    lines = []

    # Settings that both state.
    common = a.config.keys() & b.config.keys()
    differing = flags.differing([recorded_settings(source) for source in (a, b)])
    for name in sorted(common.intersection(differing)):
        lines.append(f"setting {name}: {a.config[name]} | {b.config[name]}")

    # Tensors; the optimizer's, whose names have a slash, if both have them.
    optimizer = a.has_optimizer and b.has_optimizer
    if a.has_optimizer != b.has_optimizer:
        lines.append(f"optimizer state: only in {(a if a.has_optimizer else b).folder}")
    equal = 0
    names = sorted(n for n in a.tensors.keys() | b.tensors.keys() if optimizer or "/" not in n)
    for name in names:
        differences = list(compare_tensor(a, b, name))
        equal += not differences
        lines += differences
    if lines:
        lines.append(f"{equal} of {len(names)} {'tensors' if optimizer else 'weights'} are equal")
    return lines


def compare_tensor(a: Source, b: Source, name: str) -> Iterator[str]:
    """Yield how a tensor differs, if it does."""
    import torch

    first = a.tensors.get(name)
    second = b.tensors.get(name)
    if first is None or second is None:
        yield f"{name}: only in {(a if second is None else b).folder}"
        return
    if first.shape != second.shape:
        yield f"{name}: {first.shape} | {second.shape}"
        return

    # float32 holds every number of the narrower types.
    dtype = torch.float64 if "float64" in (first.dtype, second.dtype) else torch.float32
    ours = torch.empty(first.shape, dtype=dtype)
    theirs = torch.empty(first.shape, dtype=dtype)
    a.fill({name: native.undivided(ours)})
    b.fill({name: native.undivided(theirs)})
    types = ""
    if first.dtype != second.dtype:
        types = f", {first.dtype} | {second.dtype}"
    if differ := int((ours != theirs).sum()):
        furthest = float((ours - theirs).abs().max())
        how = f"{differ:,} of {ours.numel():,} numbers differ, by at most {furthest:.3g}"
        yield f"{name}: {how}{types}"
    elif types:
        yield f"{name}: equal{types}"
