"""`--load`: find what a path holds, open it, compare it with what a run wants, and read it.

All ranks call `load` together, each with the tensors it wants; a failure of one is raised by all.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from meshwright.base.console import notice, say
from meshwright.base.errors import BAD_DATA, UserError, bad_data, not_a_run
from meshwright.checkpoint import averages, disks, manifests, mirror, native, publish, steps
from meshwright.checkpoint.boxes import Shape
from meshwright.checkpoint.claims import FalseClaim
from meshwright.checkpoint.formats import all_formats
from meshwright.checkpoint.machines import RunMachines, joined
from meshwright.checkpoint.manifests import DamagedCheckpoint
from meshwright.checkpoint.sources import Source, TensorBoxes, TensorInfo
from meshwright.checkpoint.steps import NATIVE, StepLocation
from meshwright.runtime.ranks.team import ALONE, Team

T = TypeVar("T")


class PassedStep(NamedTuple):
    """A note about steps that were passed over: which one, if it was damaged, and why."""

    note: str
    step: int | None = None
    why: str = ""


class LoadedStep(NamedTuple):
    step: int
    state: dict[str, Any]
    passed_over: tuple[PassedStep, ...] = ()


class OpenOptions(NamedTuple):
    """How a checkpoint is opened."""

    # hash the chunks that are read; "full": every byte; "none": nothing, only look
    verify: str = "read"
    trust: bool = False  # run the code in its pickles
    heads: int | None = None  # attention heads of the model, for checkpoints that do not say
    optimizer: bool = True  # the optimizer's state is wanted too, so it is checked
    weights: str = "plain"  # "ema": the average of --ema in their place
    average_last: int = 0  # above 1: the mean of the weights of so many steps


PLAIN = OpenOptions()
Accept = Callable[[Source], Source]
Report = Callable[[str], None]
Search = tuple[StepLocation | None, list[str]]  # and the notes to print
# Uses a step, which may be on the disks of several machines.
Use = Callable[[StepLocation, RunMachines | None], T]


# Find


def first_intact(
    path: Path,
    use: Use[T],
    team: Team = ALONE,
    report: Report = say,
    sizes: bool = True,
) -> tuple[T | None, list[PassedStep]]:
    """Use the step that a path means or, while steps of ours prove damaged, the next older one.

    Return what `use` returned, or None without any checkpoint, and the notes that were reported.
    """
    team.run_on_all(lambda: mirror.fetch(path))
    with joined(path, team) as machines:
        return first_of(path, use, team, report, sizes, machines)


def first_of(
    path: Path,
    use: Use[T],
    team: Team,
    report: Report,
    sizes: bool,
    machines: RunMachines | None,
) -> tuple[T | None, list[PassedStep]]:
    def find(below: int | None = None) -> Search:
        if machines is not None:
            return machines.find_step(path, below)
        return steps.find_step(path, below, sizes or below is not None)

    location, notes = search_on_rank_0(path, find, team)
    # Damage shows only when a step is read, so steps are tried until one is intact on all ranks.
    reported: list[PassedStep] = []
    while True:
        reported += map(PassedStep, notes)
        for note in notes:
            report(note)
        if location is None:
            return None, reported
        try:
            return use(location, machines), reported
        except DamagedCheckpoint as damage:
            note = f"WARNING: skipping {location.folder.name}, it is damaged: {damage}"
            reported.append(PassedStep(note, location.step, str(damage)))
            older = functools.partial(find_older, path, location, damage, note, report, find)
            location, notes = search_on_rank_0(path, older, team)


def find_older(
    path: Path,
    location: StepLocation,
    damage: DamagedCheckpoint,
    note: str,
    report: Report,
    find: Callable[[int], Search],
) -> Search:
    """Find the step before a damaged one; raise the damage if no other may be taken."""
    # Whoever names a step, or another program's folder, wants no other.
    if not location.ours or path.resolve() == location.folder.resolve():
        raise damage
    report(note)
    try:
        return find(location.step)
    except DamagedCheckpoint as no_older:
        raise DamagedCheckpoint(f"{damage}; {no_older}", everywhere=True) from damage


def search_on_rank_0(path: Path, search: Callable[[], Search], team: Team) -> Search:
    """Let rank 0 find the step and pass it to all ranks, each below its own path."""

    def act() -> Any:
        location, notes = search()
        if location is None:
            return [None, notes]
        # Relative to the path, which may be another one on another machine.
        folder = os.path.relpath(location.folder, path)
        root = os.path.relpath(location.root, path)
        return [[location.kind, location.step, folder, root], notes]

    parts, notes = team.run_on_rank_0(act)
    if parts is None:
        return None, notes
    kind, step, *below = parts
    folder, root = (Path(os.path.normpath(path / name)) for name in below)
    return StepLocation(kind, folder, step, root), notes


# Open


def open_checkpoint(
    path: str | Path,
    options: OpenOptions = PLAIN,
    report: Report = say,
    opened: Source | None = None,
) -> Source | None:
    """Open what `load_checkpoint` would read in one process; return None without any checkpoint."""
    sizes = options.verify != "none"
    return first_intact(
        Path(path),
        lambda location, machines: open_step(location, options, opened=opened),
        report=report,
        sizes=sizes,
    )[0]


def require_checkpoint(path: str | Path, options: OpenOptions = PLAIN) -> Source:
    """Open what a path means, or refuse a path without any checkpoint."""
    source = open_checkpoint(path, options)
    if source is None:
        raise not_a_run(path, "checkpoint")
    return source


def open_step(
    location: StepLocation,
    options: OpenOptions = PLAIN,
    team: Team = ALONE,
    opened: Source | None = None,
    machines: RunMachines | None = None,
) -> Source:
    """Open a step with its reader; files of ours that are not hashed when read are hashed now."""
    source = (
        open_own(location, options, team, machines)
        if location.kind == NATIVE
        else open_foreign(location, options, team, opened)
    )
    if options.weights == "ema":
        return averages.moving_average_of(source)
    if options.average_last > 1:
        reopen = functools.partial(open_own, options=options, team=team, machines=machines)
        return averages.mean_of(source, location, options.average_last, reopen, team)
    return source


def open_own(
    location: StepLocation, options: OpenOptions, team: Team, machines: RunMachines | None
) -> native.NativeSource:
    if machines is not None:
        team.run_on_rank_0(lambda: machines.require_complete(location.step))
    source = native.open_native(location.folder, location.step, options.verify, team, machines)
    source.root = location.root
    return source


def open_foreign(
    location: StepLocation, options: OpenOptions, team: Team, opened: Source | None
) -> Source:
    """Open another program's checkpoint, or return it if `opened` is it."""
    from meshwright.checkpoint.pickle import pickles  # it imports torch

    kind = location.kind
    folder = location.folder
    if options.trust and team.is_rank_0:
        notice(f"--trust-pickle: any code in the files of {folder} is run")
    if location.ours:
        # Its reader takes the files that it finds for all: a part would be another model.
        disks.require_here(folder, manifests.read_manifest(folder))
        if options.verify != "none":
            manifests.verify_step(folder, full=True)
    if opened is not None and (opened.kind, opened.folder) == (kind, folder):
        return opened
    try:
        with pickles.READ.kept():  # one child for all files
            source: Source = all_formats()[kind].load_reader()(
                folder, options.trust, options.heads, options.optimizer
            )
    # In a damaged or hostile file the reader may run into any of Python's errors.
    except FalseClaim as claim:
        raise bad_data(f"{folder}: {claim}; it is damaged, or made to mislead") from claim
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise bad_data(f"{folder}: not laid out as {kind}'s checkpoints: {error!r:.300}") from error
    number = location.step if location.is_numbered else source.state.get("iteration", 0)
    source.kind = kind
    source.root = location.root
    source.step = number if source.state else 0  # a run begins anew from weights alone
    return source


# Load


def load_checkpoint(
    path: str | Path,
    want: TensorBoxes | Callable[[Source], TensorBoxes],
    *,
    options: OpenOptions = PLAIN,
    accept: Accept = lambda source: source,
    team: Team = ALONE,
    opened: Source | None = None,
) -> LoadedStep | None:
    """Fill the wanted tensors from what the path means; return None without any checkpoint.

    If a step of ours proves damaged, the next older one is loaded, with a warning. Without
    `options.optimizer` the optimizer's tensors (`name/exp_avg` ...) may stay unread. `accept`
    raises to refuse a source before any tensor is read, or returns the source to read. `opened` is
    a checkpoint that this process has opened before: another program's is not opened again.
    """

    def use(location: StepLocation, machines: RunMachines | None) -> LoadedStep:
        def open_at(location: StepLocation) -> Source:
            return open_together(location, options, team, opened, machines)

        return load_step(location, want, options.optimizer, accept, team, open_at)

    loaded, passed_over = first_intact(Path(path), use, team)
    return loaded._replace(passed_over=tuple(passed_over)) if loaded else None


def load_step(
    location: StepLocation,
    want: TensorBoxes | Callable[[Source], TensorBoxes],
    with_optimizer: bool,
    accept: Accept,
    team: Team,
    open_at: Callable[[StepLocation], Source],
) -> LoadedStep:
    # Megatron's lines, which scripts look for.
    release = " release" if location.folder.name == "release" else ""
    at = f" at iteration {location.step}" if location.is_numbered and not release else ""
    say(f" loading{release} checkpoint from {location.root}{at}")
    opened = open_at(location)
    for note in opened.notes:
        say(note)
    if location.is_numbered:
        say(f" checkpoint version {opened.version}")
    if opened.version_note:
        say(opened.version_note)

    # What all ranks want is compared on rank 0 before any of them reads a tensor.
    source = team.run_on_all(lambda: accept(opened))
    named = want(source) if callable(want) else want
    wanted = team.collect_merged(
        lambda: native.describe_wanted(named, team.rank), native.merge_described
    )

    def compare() -> list[str]:
        asked = native.kinds_of(wanted)
        check_names(location.folder, source.tensors, asked, with_optimizer and bool(source.state))
        return conversions(source.tensors, asked)

    for note in team.run_on_rank_0(compare):
        say(note)

    # Read it: of ours each rank has learnt only what it needs for that.
    if isinstance(source, native.NativeSource | averages.WeightsOf):
        source.share(wanted, team)
    team.run_on_all(lambda: source.fill(named))
    say(
        f"  successfully loaded checkpoint from {location.root}{' at iteration 0' if release else at}"
    )
    return LoadedStep(source.step, source.state)


def open_together(
    location: StepLocation,
    options: OpenOptions,
    team: Team,
    opened: Source | None,
    machines: RunMachines | None,
) -> Source:
    """Open a step on all ranks, which must see the same files, or have them on their `machines`.

    Rank 0 alone reads the manifest and the index of ours; another program's files are read by all,
    once each: `opened` is what this rank has opened before.
    """
    if machines is not None and location.kind == NATIVE:
        return open_step(location, options, team, machines=machines)
    team.run_on_all(
        lambda: None if team.is_rank_0 else publish.wait_until_visible(location.folder, team)
    )
    if location.kind == NATIVE:
        source = open_step(location, options, team)
    else:
        if location.ours and options.verify != "none":
            manifests.verify_together(location.folder, team)
        unverified = options._replace(verify="none")
        source = team.run_on_all(lambda: open_step(location, unverified, team, opened))

    def identify() -> str:
        return manifests.sha256([source.identity.encode()])

    expected = team.run_on_rank_0(identify)

    def compare() -> None:
        if identify() != expected:
            message = f"rank {team.rank} sees another {location.folder} than rank 0; all nodes must share it"
            raise UserError(message, BAD_DATA)

    team.run_on_all(compare)
    return source


def check_names(
    folder: Path,
    stored: Mapping[str, TensorInfo],
    want: Mapping[str, tuple[Shape, str]],
    optimizer: bool,
) -> None:
    """Compare names and shapes, and report all differences together.

    `want` has what all ranks want; each pipeline stage wants only its own part.
    """
    out = []
    for name, (shape, _) in want.items():
        if name not in stored:
            out.append(f"{name}: the model has {shape}, the checkpoint has none")
        elif stored[name].shape != shape:
            out.append(f"{name}: the model has {shape}, the checkpoint {stored[name].shape}")
    for name, tensor in stored.items():
        if name not in want and (optimizer or "/" not in name) and not averages.is_average(name):
            out.append(f"{name}: the model has none, the checkpoint has {tensor.shape}")
    if not out:
        return
    shown = out[:20]
    if len(out) > 20:
        shown.append(f"and {len(out) - 20} more")
    # If nothing but moments is missing, there is a likely reason.
    missing = [name for name in want if name not in stored]
    if missing and all("/" in name for name in missing):
        shown.append(
            "saved with --no-save-optim, or by another --optimizer? add --no-load-optim or --finetune"
        )
    message = "\n  ".join([f"{folder} does not fit the model that the flags describe:", *shown])
    raise UserError(message, BAD_DATA, everywhere=True)


def conversions(
    stored: Mapping[str, TensorInfo], want: Mapping[str, tuple[Shape, str]]
) -> list[str]:
    kinds = Counter((native.NAMES[stored[name].dtype], dtype) for name, (_, dtype) in want.items())
    return [
        f" {n} tensors converted from {a} to {b}" for (a, b), n in sorted(kinds.items()) if a != b
    ]
