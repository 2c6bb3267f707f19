"""`--load`: find what a path holds, open it, compare it with what a run wants, and read it.

All ranks call `load` together, each with the tensors it wants; a failure of one is raised by all.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint import manifests, native, publish, steps
from meshwright.checkpoint.manifests import DamagedCheckpoint
from meshwright.checkpoint.sources import Source, TensorBoxes, TensorInfo
from meshwright.checkpoint.steps import HUGGING_FACE, NATIVE, StepLocation
from meshwright.console import notice, say
from meshwright.errors import BAD_DATA, UserError
from meshwright.ranks.team import ALONE, Team

# The reader of each kind, imported when needed: called as (folder, trust, heads, optimizer).
READERS = {
    steps.MEGATRON: "megatron.reader:open_megatron",
    steps.TORCH_DIST: "megatron.torch_dist:open_torch_dist",
    steps.DEEPSPEED: "megatron.deepspeed:open_deepspeed",
    steps.UNIVERSAL: "megatron.deepspeed:open_deepspeed",
    HUGGING_FACE: "huggingface.reader:open_huggingface",
    steps.LIBAI: "libai.reader:open_libai",
    steps.ONEFLOW: "libai.reader:open_libai",
}


class LoadedStep(NamedTuple):
    step: int
    state: dict[str, Any]
    notes: tuple[str, ...] = ()  # about steps that were passed over


class OpenOptions(NamedTuple):
    """How a checkpoint is opened."""

    verify: str = "read"  # hash the chunks that are read; "full": every byte; "none": nothing
    trust: bool = False  # run the code in its pickles
    heads: int | None = None  # attention heads of the model, for checkpoints that do not say
    optimizer: bool = True  # the optimizer's state is wanted too, so it is checked


PLAIN = OpenOptions()
Accept = Callable[[Source], Source]
Report = Callable[[str], None]
Found = tuple[StepLocation | None, list[str]]  # and the notes to print


def open_found_step(place: StepLocation, options: OpenOptions = PLAIN, team: Team = ALONE) -> Source:
    """Open a step with its reader; files of ours that are not hashed when read are hashed now."""
    if options.trust and place.kind != NATIVE and team.is_lead:
        notice(f"--trust-pickle: any code in the files of {place.folder} is run")
    if place.kind == NATIVE:
        source: Source = native.open_native(place.folder, place.step, options.verify, team)
        source.root = place.root
        return source
    if place.ours and options.verify != "none":
        manifests.verify_step(place.folder, full=True, team=team)
    module, _, function = READERS[place.kind].partition(":")
    read = getattr(importlib.import_module(f"meshwright.checkpoint.foreign.{module}"), function)
    try:
        source = read(place.folder, options.trust, options.heads, options.optimizer)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        message = f"{place.folder}: not laid out as {place.kind}'s checkpoints: {error!r:.300}"
        raise UserError(message, BAD_DATA) from error
    source.root, source.step = place.root, place.step if source.state else 0
    return source


def open_checkpoint(path: str | Path, options: OpenOptions = PLAIN, report: Report = say) -> Source | None:
    """Open what `load` would read in one process; return None if there is no checkpoint."""
    place, notes = steps.find_step(path)
    while place is not None:
        for note in notes:
            report(note)
        try:
            return open_found_step(place, options)
        except DamagedCheckpoint as damage:
            place, notes = older(Path(path), place, damage, report)
    return None


def skipping(folder: Path, damage: DamagedCheckpoint) -> str:
    return f"WARNING: skipping {folder.name}, it is damaged: {damage}"


def older(path: Path, place: StepLocation, damage: DamagedCheckpoint, report: Report = say) -> Found:
    """Find the step before a damaged one; raise the damage if no other may be taken."""
    if not place.ours or path.resolve() == place.folder.resolve():
        raise damage
    report(skipping(place.folder, damage))
    try:
        return steps.find_step(path, below=place.step)
    except DamagedCheckpoint as no_older:
        raise DamagedCheckpoint(f"{damage}; {no_older}", everywhere=True) from damage


def load_checkpoint(
    path: str | Path,
    want: TensorBoxes | Callable[[Source], TensorBoxes],
    *,
    options: OpenOptions = PLAIN,
    accept: Accept = lambda source: source,
    team: Team = ALONE,
) -> LoadedStep | None:
    """Fill the wanted tensors from what the path means; return None without any checkpoint.

    If a step of ours proves damaged, the next older one is loaded, with a warning. Without
    `options.optimizer` the optimizer's tensors (`name/exp_avg` ...) may stay unread. `accept`
    raises to refuse a source before any tensor is read, or returns the source to read.
    """
    path = Path(path)
    place, notes = find_on_lead(path, lambda: steps.find_step(path), team)
    said: list[str] = []
    while True:
        said += notes
        for note in notes:
            say(note)
        if place is None:
            return None
        try:
            return load_place(place, want, options, accept, team)._replace(notes=tuple(said))
        except DamagedCheckpoint as damage:
            said.append(skipping(place.folder, damage))
            place, notes = find_on_lead(path, functools.partial(older, path, place, damage), team)


def find_on_lead(path: Path, find: Callable[[], Found], team: Team) -> Found:
    """Let rank 0 find the place and pass it to all ranks, each below its own path."""

    def act() -> Any:
        place, notes = find()
        below = [os.path.relpath(p, path) for p in (place.folder, place.root)] if place else []
        return [[place.kind, place.step, *below] if place else None, notes]

    found, notes = team.run_on_lead(act)
    if found is None:
        return None, notes
    kind, step, folder, root = found
    return StepLocation(kind, Path(os.path.normpath(path / folder)), step, Path(os.path.normpath(path / root))), notes


def load_place(
    place: StepLocation,
    want: TensorBoxes | Callable[[Source], TensorBoxes],
    options: OpenOptions,
    accept: Accept,
    team: Team,
) -> LoadedStep:
    release = " release" if place.folder.name == "release" else ""
    at = "" if release or place.kind == HUGGING_FACE else f" at iteration {place.step}"
    say(f" loading{release} checkpoint from {place.root}{at}")
    opened: list[Source] = []

    def open_here() -> list[Any]:
        if not team.is_lead:
            publish.wait_until_visible(place.folder, team)
        opened.append(open_found_step(place, options, team))
        return [manifests.sha256([opened[0].identity.encode()])]

    for rank, (sha256,) in enumerate(digests := team.run_on_all(open_here)):
        if sha256 != digests[0][0]:
            message = f"rank {rank} sees another {place.folder} than rank 0; all nodes must share it"
            raise UserError(message, BAD_DATA, everywhere=True)
    source = opened[0]
    for note in source.notes:
        say(note)
    if place.kind != HUGGING_FACE:
        say(f" checkpoint version {source.version}")
    if place.kind == steps.MEGATRON and float(source.version) < 2:  # Megatron's spelling, which scripts read
        say(f" succesfully fixed query-key-values ordering for checkpoint version {source.version}")
    team.run_on_all(lambda: opened.append(accept(source)))
    source = opened[1]
    mine = want(source) if callable(want) else want
    asked = native.merge_indexes(team.run_on_all(lambda: native.index_of(mine, [], "", 0)))
    check_names(place.folder, source.tensors, asked, options.optimizer and bool(source.state))
    for note in conversions(source.tensors, asked):
        say(note)
    team.run_on_all(lambda: source.fill(mine))
    say(f"  successfully loaded checkpoint from {place.root}{' at iteration 0' if release else at}")
    return LoadedStep(source.step, source.state)


def check_names(folder: Path, known: Mapping[str, TensorInfo], want: Mapping[str, Any], optimizer: bool) -> None:
    """Compare names and shapes, and report all differences together.

    `want` is the index of all ranks' wanted tensors; each pipeline stage wants only its own part.
    """
    out = []
    for name, shape in ((name, tuple(tensor["shape"])) for name, tensor in want.items()):
        if name not in known:
            out.append(f"{name}: the model has {shape}, the checkpoint has none")
        elif known[name].shape != shape:
            out.append(f"{name}: the model has {shape}, the checkpoint {known[name].shape}")
    for name, tensor in known.items():
        if name not in want and (optimizer or "/" not in name):
            out.append(f"{name}: the model has none, the checkpoint has {tensor.shape}")
    if out:
        shown = out[:20] + [f"and {len(out) - 20} more"] * (len(out) > 20)
        missing = [name for name in want if name not in known]
        if missing and all("/" in name for name in missing):
            shown.append("saved with --no-save-optim, or by another --optimizer? add --no-load-optim or --finetune")
        message = "\n  ".join([f"{folder} does not fit the model that the flags describe:", *shown])
        raise UserError(message, BAD_DATA, everywhere=True)


def conversions(known: Mapping[str, TensorInfo], want: Mapping[str, Any]) -> list[str]:
    kinds = Counter((native.NAMES[known[name].dtype], tensor["dtype"]) for name, tensor in want.items())
    return [f" {n} tensors converted from {a} to {b}" for (a, b), n in sorted(kinds.items()) if a != b]
