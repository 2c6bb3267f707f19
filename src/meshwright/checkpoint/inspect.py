"""`meshwright inspect DIR`: what a checkpoint folder holds, and whether it is whole."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright import flags
from meshwright.checkpoint import native, store
from meshwright.checkpoint.store import Damaged
from meshwright.config import TrainConfig
from meshwright.data.history import History
from meshwright.errors import BAD_DATA, DONE, UserError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="meshwright inspect", description="What a checkpoint folder holds.")
    parser.add_argument("dir", help="the --save folder, or one iter_... folder in it")
    parser.add_argument("--step", type=int, help="look at this step (none: all, and the newest more closely)")
    parser.add_argument("--tensors", action="store_true", help="list every tensor: shape, type, bytes")
    parser.add_argument("--boxes", action="store_true", help="and where each part of it lies: file, ranges of elements")
    parser.add_argument("--full", action="store_true", help="verify every byte")
    args = parser.parse_args(argv)
    root, step = store.split_path(args.dir)
    step = step if args.step is None else args.step
    if not root.is_dir():
        raise UserError(f"there is no folder {root}", BAD_DATA)
    there = store.steps(root)[::-1]
    if not there:
        store.latest(root)  # says so if they are another program's
        raise UserError(f"{root} holds no checkpoints", BAD_DATA)
    if step is not None and step not in there:
        few = ", ".join(map(str, there)) if len(there) < 10 else f"{len(there)}, from {there[0]} to {there[-1]}"
        raise UserError(f"no step {step} in {root}; there {'is' if len(there) == 1 else 'are'} {few}", BAD_DATA)
    lines, whole = describe(root, step, args.tensors or args.boxes, args.full, args.boxes)
    print("\n".join(lines))
    if not whole:
        store.latest(root)  # says so if all are damaged
        raise UserError(f"a checkpoint in {root} is damaged, see above", BAD_DATA)
    return DONE


def describe(
    root: str | Path, step: int | None = None, tensors: bool = False, full: bool = False, boxes: bool = False
) -> tuple[list[str], bool]:
    """Lines about the steps and, closer, about one (the newest whole one if none is given); and whether it is whole."""
    chosen, damaged = None, False
    lines = [f"{root}"]
    for number in store.steps(root) if step is None else [step]:
        folder = store.step_folder(root, number)
        try:
            manifest = store.verify(folder, full)
            index, state = native.read_index(folder, manifest), native.read_state(root, number)
        except Damaged as damage:
            lines.append(f"  {folder.name}  verified: NO, {damage}")
            damaged = True
            continue
        parameters = sum(math.prod(t.shape) for name, t in index.items() if "/" not in name)
        how = "verified: yes, every byte" if full else "sizes: ok, contents not checked (--full does)"
        lines.append(f"  {folder.name}  {how}")
        ranks = sum(name.startswith("rank_") for name in manifest)
        lines.append(
            f"    iteration {state.get('iteration', number)} | "
            f"consumed samples {state.get('consumed_train_samples', 'not recorded')} | "
            f"parameters {parameters:,} | {sum(file.size for file in manifest.values()):,} bytes, "
            f"written by {ranks} rank{'s' * (ranks != 1)}"
        )
        chosen = number if chosen is None else chosen
    if chosen is None:
        return lines, False
    lines += settings(native.read_config(root, chosen))
    blends = History.of(native.read_state(root, chosen).get("blends"))
    lines += [f"  {line}" for line in blends.lines()] if blends else []
    if tensors:
        folder = store.step_folder(root, chosen)
        for name, tensor in sorted(native.read_index(folder, store.verify(folder)).items()):
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            size = math.prod(tensor.shape) * native.SIZES[tensor.dtype]
            files = len({box.file for box in tensor.boxes})
            where = f"{len(tensor.boxes)} boxes, {files} files"
            lines.append(f"  {name:40} {shape:>16} {tensor.dtype:>4} {size:>16,} bytes in {where}")
            for stored in tensor.boxes if boxes else ():
                lines.append(f"    {stored.file} {native.ranges(stored.box)}")
    return lines, not damaged


def settings(saved: Mapping[str, Any]) -> list[str]:
    """What the run was made with, by group, defaults left out."""
    defaults = flags.to_dict(TrainConfig())
    lines = []
    for group, kind in flags.groups(TrainConfig).items():
        told = [
            f"{name} {saved[name]}"
            for name in (f.name for f in dataclasses.fields(kind))
            if name in saved and saved[name] != defaults[name]
        ]
        if told:
            lines.append(f"  {group}: {', '.join(told)}")
    return lines
