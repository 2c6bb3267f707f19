"""`meshwright inspect DIR`: what a checkpoint of any program holds, whether it is whole, and how two of them differ."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint import loading, native, steps
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.manifests import Damaged, verify
from meshwright.checkpoint.saved_model import model_settings
from meshwright.checkpoint.sources import Known, Source
from meshwright.checkpoint.steps import Place
from meshwright.data.history import History
from meshwright.errors import BAD_DATA, DONE, UserError
from meshwright.settings import flags
from meshwright.settings.schema import OUTCOME, TrainConfig


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="meshwright inspect", description="What a checkpoint of any program holds, or how two differ."
    )
    parser.add_argument("dir", help="a --save folder, one step's folder in it, or any folder that --load takes")
    parser.add_argument("other", nargs="?", help="another one: only the differences are told")
    parser.add_argument("--step", type=int, help="look at this step (none: all, and the newest more closely)")
    parser.add_argument("--tensors", action="store_true", help="list every tensor: shape, type, bytes")
    parser.add_argument("--boxes", action="store_true", help="and where each part of it lies: file, ranges of elements")
    parser.add_argument("--full", action="store_true", help="verify every byte")
    parser.add_argument("--num-attention-heads", type=int, help="of the model, where the checkpoint does not say")
    parser.add_argument("--trust-pickle", action="store_true", help="run whatever the checkpoint asks for")
    args = parser.parse_args(argv)
    options = OpenOptions("full" if args.full else "read", args.trust_pickle, args.num_attention_heads)
    if args.other is not None:
        if args.step is not None or args.tensors or args.boxes:
            parser.error("--step, --tensors and --boxes are for one checkpoint; of two steps give the folders")
        sources = [opened(Path(path), options) for path in (args.dir, args.other)]
        lines = differences(*sources)
        print("\n".join(lines or ["the two hold the same"]))
        return DONE
    root, step = steps.split_path(args.dir)
    step = step if args.step is None else args.step
    if not root.exists():
        raise UserError(f"there is no folder {root}", BAD_DATA)
    there = steps.steps(root)[::-1]
    if there and (step is None or step in there):
        lines, whole = describe(root, step, options, args.tensors or args.boxes, args.boxes)
        print("\n".join(lines))
        if not whole:
            steps.latest(root)  # says so if all are damaged
            raise UserError(f"a checkpoint in {root} is damaged, see above", BAD_DATA)
        return DONE
    if there and args.step is not None:
        few = ", ".join(map(str, there)) if len(there) < 10 else f"{len(there)}, from {there[0]} to {there[-1]}"
        raise UserError(f"no step {step} in {root}; there {'is' if len(there) == 1 else 'are'} {few}", BAD_DATA)
    path = Path(args.dir) if args.step is None else steps.step_folder(root, args.step)
    if not path.exists():
        raise UserError(f"there is no {path}: name another program's step by its folder", BAD_DATA)
    print("\n".join(of_another_program(opened(path, options), args.full, args.tensors or args.boxes, args.boxes)))
    return DONE


def of_another_program(source: Source, full: bool, tensors: bool, boxes: bool) -> list[str]:
    held = "weights and optimizer state" if source.has_optimizer else "weights"
    layout = f", {source.layout}" if source.layout else ""
    lines = [f"{source.folder}", f"  {source.kind} checkpoint{layout}: {held}", summary(source)]
    lines += [f"    {note.strip()}" for note in source.notes]
    lines += ["    --full: it has no checksums, so its bytes cannot be verified"] if full else []
    return lines + details(source, tensors, boxes)


def opened(path: Path, options: OpenOptions) -> Source:
    source = loading.open_any(path, options)
    if source is None:
        raise UserError(f"{path} holds no checkpoints" if path.exists() else f"there is no folder {path}", BAD_DATA)
    return source


def describe(
    root: Path, step: int | None, options: OpenOptions, tensors: bool = False, boxes: bool = False
) -> tuple[list[str], bool]:
    """Lines about our steps and, closer, about one (the newest whole one if none is given); and whether all are whole."""
    closer: list[str] | None = None
    damaged, full = False, options.verify == "full"
    lines = [f"{root}"]
    for number in steps.steps(root) if step is None else [step]:
        folder = steps.step_folder(root, number)
        kind = steps.kind_of(folder) or steps.NATIVE
        try:
            manifest = verify(folder, full)
            source = loading.open_place(Place(kind, folder, number, root), options._replace(verify="none"))
        except Damaged as damage:
            lines.append(f"  {folder.name}  verified: NO, {damage}")
            damaged = True
            continue
        how = "verified: yes, every byte" if full else "sizes: ok, contents not checked (--full does)"
        ranks = sum(name.startswith("rank_") for name in manifest)
        by = f"written by {ranks} rank{'s' * (ranks != 1)}" if ranks else f"{source.kind}'s tree: {source.layout}"
        lines += [
            f"  {folder.name}  {how}",
            f"{summary(source)} | {sum(f.size for f in manifest.values()):,} bytes, {by}",
        ]
        closer = details(source, tensors, boxes) if closer is None else closer
    return lines + (closer or []), not damaged


def summary(source: Source) -> str:
    parameters = sum(math.prod(known.shape) for name, known in source.tensors.items() if "/" not in name)
    state = source.state
    return (
        f"    iteration {state.get('iteration', source.step)} | consumed samples "
        f"{state.get('consumed_train_samples', 'not recorded')} | parameters {parameters:,}"
    )


def details(source: Source, tensors: bool, boxes: bool) -> list[str]:
    lines = settings(source.config)
    blends = History.of(source.state.get("blends"))
    lines += [f"  {line}" for line in blends.lines()] if blends else []
    for name, known in sorted(source.tensors.items()) if tensors else ():
        shape, kept = "x".join(map(str, known.shape)) or "scalar", native.NAMES[known.dtype]
        size = math.prod(known.shape) * native.SIZES[kept]
        where = list(source.parts(name))
        files = len({file for file, _ in where})
        told = f"{len(where)} boxes, {files} files"
        lines.append(f"  {name:40} {shape:>16} {kept:>4} {size:>16,} bytes in {told}")
        lines += [f"    {file} {native.ranges(box)}" for file, box in where] if boxes else []
    return lines


def differences(a: Source, b: Source) -> list[str]:
    """Settings, tensors that only one has, and numbers that differ, read a tensor at a time."""
    lines = []
    one, two = ({**source.config, **outcomes(source)} for source in (a, b))
    for name in sorted(a.config.keys() & b.config.keys()):
        if one[name] != two[name]:
            lines.append(f"setting {name}: {a.config[name]} | {b.config[name]}")
    optimizer, equal = a.has_optimizer and b.has_optimizer, 0
    if a.has_optimizer != b.has_optimizer:
        lines.append(f"optimizer state: only in {(a if a.has_optimizer else b).folder}")
    names = sorted(n for n in a.tensors.keys() | b.tensors.keys() if optimizer or "/" not in n)
    for name in names:
        told = list(tensor_differs(a, b, name))
        equal += not told
        lines += told
    if lines:
        lines.append(f"{equal} of {len(names)} {'tensors' if optimizer else 'weights'} are equal")
    return lines


def outcomes(source: Source) -> dict[str, Any]:
    """Settings of the network as they turn out: one that is left open may follow another."""
    model = model_settings(source.config, source.folder)
    return {name: getattr(model, outcome) for name, outcome in OUTCOME.items()}


def tensor_differs(a: Source, b: Source, name: str) -> Iterator[str]:
    one, two = a.tensors.get(name), b.tensors.get(name)
    if one is None or two is None:
        yield f"{name}: only in {(a if two is None else b).folder}"
    elif one.shape != two.shape:
        yield f"{name}: {one.shape} | {two.shape}"
    else:
        yield from numbers_that_differ(a, b, name, one, two)


def numbers_that_differ(a: Source, b: Source, name: str, one: Known, two: Known) -> Iterator[str]:
    import torch

    values = []
    for source in (a, b):
        values.append(
            torch.empty(one.shape, dtype=torch.float64 if "float64" in (one.dtype, two.dtype) else torch.float32)
        )
        source.fill({name: native.full_entry(values[-1])})
    types = f", {one.dtype} | {two.dtype}" if one.dtype != two.dtype else ""
    differ = int((values[0] != values[1]).sum())
    if differ:
        furthest = float((values[0] - values[1]).abs().max())
        yield f"{name}: {differ:,} of {values[0].numel():,} numbers differ, by at most {furthest:.3g}{types}"
    elif types:
        yield f"{name}: equal{types}"


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
